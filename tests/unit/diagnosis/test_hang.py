"""Whether a job hangs, from recorded looks at the processes of eight ranks: the cases, and what is none."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from looking import World, environments
from tcpstore_async.base.errors import ProtocolError
from tcpstore_async.diagnosis.activity import describe
from tcpstore_async.diagnosis.hang import (
    GOES_ON,
    HANGS,
    STARTS,
    UNKNOWN,
    WAITS,
    Hang,
    Look,
    Relays,
    conclude,
)
from tcpstore_async.stacks.report import Collective, Doing, Group, HostReport
from tcpstore_async.tools.look.stacks import hang_lines

SIZE = 8
HOST = "node-0"
TRAIN = ("<module> (train.py:98)",)
IN_BARRIER = ("barrier (distributed_c10d.py:5144)", "wrapper (c10d_logger.py:83)", *TRAIN)
IN_REDUCE = ("all_reduce (distributed_c10d.py:3155)", "wrapper (c10d_logger.py:83)", *TRAIN)
ODD = 5

Looks = dict[int, Doing] | Callable[[int], Doing]


def waiting(frames: tuple[str, ...] = IN_REDUCE, *collectives: Collective) -> Doing:
    return Doing("sleeping", "futex_wait_queue", "futex", "py-spy", frames, collectives)


def kernel(doing: Doing) -> Doing:
    """What is known of the same process from outside."""
    return msgspec.structs.replace(doing, source="", frames=(), collectives=(), no_stack="no responder")


def entered(number: int, name: str = "all_reduce", since: float = 240.0, sizes: str = "[1024]") -> Collective:
    return Collective("default_pg", name, number, sizes, since)


def look(doing: dict[int, Doing], cpu: dict[int, float] | None = None) -> Look:
    found = Look()
    groups = [Group([1000 + rank], one, [(cpu or {}).get(rank, 0.0)]) for rank, one in doing.items()]
    found.add(HostReport(HOST, groups))
    return found


def world(size: int = SIZE) -> World:
    made = World()
    for rank in range(size):
        made.connect(rank)
    made.history.clock.now = 300.0
    return made


def concluded(first: Look, second: Look, ranks: World | None = None, between: float = 1.0, size: int = SIZE) -> Hang:
    known = (ranks or world()).ranks(size, environments(range(SIZE), size))
    return conclude(known, (first, second), between, {"10.0.0.1": HOST})


def same_twice(doing: dict[int, Doing], cpu: dict[int, float] | None = None) -> Hang:
    return concluded(look(doing, cpu), look(doing, cpu))


def all_but_one(odd: Doing, others: Doing) -> dict[int, Doing]:
    return {rank: odd if rank == ODD else others for rank in range(SIZE)}


ASLEEP = Doing("sleeping", "hrtimer_nanosleep", "clock_nanosleep", "py-spy", ("<module> (hung.py:5)",))
READING = Doing(
    "sleeping", "pipe_read", "read", "py-spy",
    ("read (dataset.py:41)", "fetch (fetch.py:54)", "_next_data (dataloader.py:791)", *TRAIN),
)  # fmt: skip
LOOPING = Doing("running", "", "", "py-spy", ("spin (model.py:30)", *TRAIN))
STOPPED = Doing("stopped", "do_signal_stop", "", "py-spy", ("step (train.py:70)", *TRAIN), no_stack="")
ENDING = Doing(
    "sleeping", "futex_wait_queue", "futex", "py-spy", ("destroy_process_group (distributed_c10d.py:2712)", *TRAIN)
)
BROADCAST = ("broadcast (distributed_c10d.py:3085)", "wrapper (c10d_logger.py:83)", "<module> (train.py:99)")


@pytest.mark.parametrize(
    ("odd", "others", "says", "outside"),
    [
        (ASLEEP, IN_BARRIER, "sleeping in clock_nanosleep (hung.py:5)", "sleeping in clock_nanosleep"),
        (READING, IN_REDUCE, "sleeping in read (dataset.py:41)", "sleeping in read"),
        (LOOPING, IN_REDUCE, "running in spin (model.py:30)", "running"),
        (STOPPED, IN_REDUCE, "stopped (SIGSTOP) in step (train.py:70)", "stopped (SIGSTOP)"),
        (ENDING, IN_REDUCE, "destroy_process_group (train.py:98)", ""),
        (waiting(BROADCAST), IN_REDUCE, "broadcast (train.py:99)", ""),
    ],
)
def test_the_odd_one_is_first(odd: Doing, others: tuple[str, ...], says: str, outside: str) -> None:
    cpu = {ODD: 1.0 if odd is LOOPING else 0.0}
    hang = same_twice(all_but_one(odd, waiting(others)), cpu)
    state = HANGS if odd is STOPPED else WAITS
    assert (hang.state, hang.seen, hang.without_stacks) == (state, SIZE, 0)
    assert next(one.does for one in hang.groups) == says
    assert [(one.count, one.ranks[0], one.first[0].pid) for one in hang.groups] == [(1, ODD, 1000 + ODD), (7, 0, 1000)]
    text = list(hang_lines(hang))
    assert text[1].startswith(f"rank {ODD} ({HOST}, pid {1000 + ODD}): {says}")
    name = others[0].partition(" ")[0]
    assert text[2] == f"7 of 8 ranks: {name} (train.py:98), quiet for 5.0 min".replace("5.0 min", "5 min")
    bare = same_twice({rank: kernel(one) for rank, one in all_but_one(odd, waiting(others)).items()}, cpu)
    assert bare.groups[0].does == (outside or "sleeping in futex")
    assert bare.groups[0].count == (1 if outside else SIZE)
    assert bare.state == (state if outside else UNKNOWN)
    assert list(hang_lines(bare))[-1].startswith(
        f"without stacks: {7 if odd is STOPPED else 8} of 8 ranks (no responder); to tell"
    )


def test_a_host_that_is_frozen() -> None:
    """Its relay does not answer; ranks behind others do."""
    made = world()
    known = made.ranks(SIZE, environments(range(SIZE), SIZE))
    for number, rank in known.by_number.items():
        for session in rank.sessions:
            session.link = "10.0.0.9" if number >= 6 else "10.0.0.8"
    found = look({rank: waiting(IN_REDUCE) for rank in range(6)})
    found.relays = Relays(2, 1, ["10.0.0.9:4242"])
    hang = conclude(known, (found, found), 1.0, {"10.0.0.1": HOST})
    assert (hang.state, hang.groups[0].ranks) == (WAITS, [6, 7])
    assert conclude(known, (found, found), 60.0, {"10.0.0.1": HOST}).state == HANGS
    text = list(hang_lines(hang))
    said = f"the relay on {HOST} does not answer (it, or its host, is frozen or too busy)"
    assert text[1].startswith(f"ranks 6-7 ({HOST}, pid 1006; {HOST}, pid 1007): {said}")
    assert text[-1] == "no answer from relays: 10.0.0.9:4242"
    once = look({rank: waiting(IN_REDUCE) for rank in range(SIZE)})
    assert conclude(known, (found, once), 1.0, {"10.0.0.1": HOST}).state == WAITS


def test_several_odd_ranks() -> None:
    """Each has its host and pid, the first four are named."""
    text = list(hang_lines(same_twice({rank: READING if rank < 2 else waiting(IN_REDUCE) for rank in range(SIZE)})))
    assert text[1].startswith(f"ranks 0-1 ({HOST}, pid 1000; {HOST}, pid 1001): sleeping in read")
    assert text[2].startswith("6 of 8 ranks: all_reduce")
    size = 16
    doing = {rank: READING if rank < 6 else waiting(IN_REDUCE) for rank in range(size)}
    known = world(size).ranks(size, environments(range(size), size))
    text = list(hang_lines(conclude(known, (look(doing), look(doing)), 1.0, {"10.0.0.1": HOST})))
    places = "; ".join(f"{HOST}, pid {1000 + rank}" for rank in range(4))
    assert text[1].startswith(f"ranks 0-5 ({places} and 2 more): sleeping in read")


def test_ranks_whose_stacks_were_not_read_in_time() -> None:
    doing = dict.fromkeys(range(SIZE), waiting())
    doing[0] = doing[1] = kernel(waiting())
    doing |= dict.fromkeys((5, 6, 7), Doing("sleeping", "pipe_read", "read", "py-spy", ("read (dataset.py:41)",)))
    assert [one.ranks for one in same_twice(doing).groups] == [[5, 6, 7], [0, 1], [2, 3, 4]]
    doing[0] = waiting()
    assert [one.ranks for one in same_twice(doing, {1: 1.0}).groups] == [[1], [5, 6, 7], [0, 2, 3, 4]]


def test_another_collective() -> None:
    """With the flight recorder; both wait in the same file."""
    doing = all_but_one(
        waiting(BROADCAST, entered(1041, "broadcast")),
        waiting(IN_REDUCE, entered(1041), Collective("1", "all_gather", 7, "", 900.0)),
    )
    doing[6] = waiting(TRAIN, entered(1040, since=250.0))
    doing[7] = waiting(TRAIN, entered(1038, since=260.0))
    hang = same_twice(doing)
    assert hang.state == HANGS
    assert hang.mismatches == [
        "rank 6 has not entered #1041 all_reduce of default_pg",
        "rank 7 has not entered #1039 of default_pg (others are in #1041 all_reduce)",
        "rank 5 entered broadcast as #1041 of default_pg, most entered all_reduce",
    ]
    assert next(iter(hang_lines(hang))) == "the job hangs, since at least 4 min"
    assert "5 of 8 ranks: all_reduce #1041 of default_pg (train.py:98) for 4 min" in hang_lines(hang)


def test_other_sizes() -> None:
    hang = same_twice(
        all_but_one(waiting(IN_REDUCE, entered(9, sizes="[2]", since=1.0)), waiting(IN_REDUCE, entered(9, since=1.0)))
    )
    assert hang.state == WAITS
    assert hang.mismatches == [
        "rank 5 entered all_reduce of [2], not [1024], as #9 of default_pg, most entered all_reduce"
    ]


def test_it_is_called_a_hang_once_it_lasts() -> None:
    for since, state in ((59.0, WAITS), (61.0, HANGS)):
        doing = all_but_one(READING, waiting(IN_REDUCE, entered(3, since=since)))
        assert same_twice(doing).state == state
    assert same_twice(all_but_one(LOOPING, doing[0]), {ODD: 1.0}).state == WAITS  # or it computes
    quiet = all_but_one(READING, waiting(IN_REDUCE))
    assert concluded(look(quiet), look(quiet), between=90.0).state == HANGS


# What is no hang


def test_a_job_that_goes_on() -> None:
    before = {rank: waiting(IN_REDUCE, entered(5, since=0.1)) for rank in range(SIZE)}
    after = {rank: waiting(IN_REDUCE, entered(9 + rank % 2, since=0.1)) for rank in range(SIZE)}
    hang = concluded(look(before), look(after))
    assert (hang.state, hang.moved, hang.mismatches) == (GOES_ON, SIZE, [])
    assert next(iter(hang_lines(hang))) == "the job goes on: 8 of 8 ranks did something else 1.0 s before"
    after = {rank: Doing("running", frames=(f"step (train.py:{rank})",), source="py-spy") for rank in range(SIZE)}
    assert concluded(look(before), look(after)).state == GOES_ON


def test_a_job_whose_loop_has_few_lines() -> None:
    """Many ranks are found at the same line twice."""
    before = dict.fromkeys(range(SIZE), LOOPING)
    after = {rank: waiting(IN_REDUCE) if rank < 2 else LOOPING for rank in range(SIZE)}
    busy = dict.fromkeys(range(SIZE), 0.3)
    assert concluded(look(before, busy), look(after, busy)).state == GOES_ON
    assert concluded(look(before), look(after)).state == WAITS


def test_a_job_that_computes_or_that_communicates_all_the_time() -> None:
    """It may go on, or spin: two looks at the same line do not tell."""
    for doing in (LOOPING, waiting(IN_REDUCE)):
        hang = same_twice(dict.fromkeys(range(SIZE), doing), dict.fromkeys(range(SIZE), 0.9))
        assert hang.state == UNKNOWN
        text = list(hang_lines(hang))
        assert text[0] == "cannot tell whether the job hangs: most ranks neither wait nor were seen to go on in 1.0 s"
        assert text[-1] == (
            "without numbers of collectives: 8 of 8 ranks; to know whether these go on, start them with "
            "TCPSTORE_STACKS=1 and TORCH_FR_BUFFER_SIZE=2000"
        )
    computing = msgspec.structs.replace(LOOPING, collectives=(entered(7),))
    text = list(hang_lines(same_twice(dict.fromkeys(range(SIZE), computing), dict.fromkeys(range(SIZE), 0.9))))
    assert (text[0].startswith("cannot tell whether the job hangs: most"), len(text)) == (True, 2)


def test_a_slow_start() -> None:
    importing = Doing(
        "running", source="py-spy", frames=("_find_and_load (<frozen importlib._bootstrap>:1007)", *TRAIN)
    )
    assert same_twice(all_but_one(importing, waiting(IN_REDUCE, entered(1, since=100.0)))).state == STARTS
    making = waiting(
        ("_store_based_barrier (distributed_c10d.py:9)", "init_process_group (distributed_c10d.py:1)", *TRAIN)
    )
    hang = same_twice(dict.fromkeys(range(SIZE), making))
    assert (hang.state, hang.groups[0].does) == (STARTS, "init_process_group (train.py:98)")
    some = world(6)
    doing = {rank: waiting(IN_REDUCE, entered(1, since=100.0)) for rank in range(6)}
    hang = conclude(some.ranks(SIZE, environments(range(6), SIZE)), (look(doing), look(doing)), 1.0, {"10.0.0.1": HOST})
    assert (hang.state, hang.absent) == (STARTS, 2)
    assert next(iter(hang_lines(hang))) == "the job starts: 2 of 8 ranks are not connected, or not known by number"


# What cannot be known


def test_nothing_was_seen() -> None:
    hang = concluded(Look(), Look())
    assert (hang.state, hang.seen, hang.unseen) == (UNKNOWN, 0, {HOST: SIZE})
    assert list(hang_lines(hang)) == [
        "cannot tell whether the job hangs",
        f"8 ranks not seen, as they have ended, or no relay there can be asked: on {HOST} (8)",
    ]
    empty = conclude(World().ranks(), (Look(), Look()), 1.0, {})
    assert (empty.state, list(hang_lines(empty))) == (UNKNOWN, ["no rank is connected"])


def test_frames_at_one_look_only() -> None:
    """As of a host that is too busy to tell all in time."""
    doing = all_but_one(READING, waiting(IN_REDUCE, entered(3, since=9.0)))
    bare = look({rank: kernel(one) for rank, one in doing.items()})
    assert (concluded(bare, look(doing)).state, concluded(bare, look(doing)).moved) == (WAITS, 0)


def test_only_seen_once() -> None:
    hang = concluded(Look(), look(all_but_one(READING, waiting())))
    assert hang.state == UNKNOWN


def test_a_rank_that_has_left_and_one_that_has_ended() -> None:
    made = world()
    made.introduce(3, rank="3", world_size="8", host="10.0.0.1")
    made.set(3, b"/x/3")
    made.leave(3)
    known = made.ranks(SIZE, environments(sorted({*range(SIZE)} - {3}), SIZE))
    doing = all_but_one(Doing("gone"), waiting(IN_REDUCE))
    doing[6] = Doing("zombie")
    hang = conclude(known, (look(doing), look(doing)), 1.0, {"10.0.0.1": HOST})
    assert [one.does for one in hang.groups[:2]] == ["left the store", "ended (zombie)"]
    assert hang.unseen == {HOST: 1}


def test_relays() -> None:
    report = HostReport(HOST, [Group([7], waiting(), [0.0])])
    relays = {"asked": 3, "answered": 1, "older": 2}
    facts: list[dict[str, object]] = [{"server": {}}, {"stacks": report}, {"relays": relays}, {"end": True}]
    lines = list(map(msgspec.json.encode, facts))
    found = Look()
    found.read(lines)
    assert found.doing.keys() == {(HOST, 7)}
    found.relays.refused = "another one is answered"
    hang = concluded(found, found)
    assert list(hang_lines(hang))[-2:] == [
        "relays were not asked: another one is answered",
        "2 relays cannot look at ranks: too old",
    ]
    with pytest.raises(ProtocolError, match="incomplete"):
        found.read(lines[:2])


def test_what_pytorchs_debug_server_knows() -> None:
    """Of ranks of which little or nothing else is known."""
    kernels = {rank: kernel(waiting()) for rank in range(6)}
    found = look(kernels)
    found.pytorch = {rank: ASLEEP.frames if rank == ODD else IN_BARRIER for rank in range(7)}
    hang = concluded(found, found)
    assert [(one.does, one.ranks) for one in hang.groups] == [
        ("sleeping in futex (hung.py:5)", [ODD]),
        ("barrier (train.py:98)", [0, 1, 2, 3, 4, 6]),
    ]
    assert (hang.without_stacks, hang.unseen) == (0, {HOST: 1})
    found.pytorch[6] = ASLEEP.frames
    assert concluded(found, found).groups[0].does == "<module> (hung.py:5)"


# Words


@pytest.mark.parametrize(
    ("doing", "words"),
    [
        (Doing("sleeping", "ep_poll"), "sleeping in ep_poll"),
        (Doing("waiting for a disk", frames=("load (data.py:3)",)), "waiting for a disk in load (data.py:3)"),
        (Doing("sleeping", frames=("wait (threading.py:320)",)), "sleeping in wait (threading.py:320)"),
        (
            Doing("sleeping", frames=("_exception_logger.<locals>.wrapper (c10d_logger.py:83)", "Net.step (a.py:2)")),
            "sleeping in step (a.py:2)",
        ),
        (Doing("traced"), "stopped by a debugger"),
        (Doing("running", frames=("not a frame", "f (<string>)")), "running in f (<string>)"),
        (
            Doing("sleeping", frames=("all_gather_into_tensor (distributed_c10d.py:1)", "f (a.py:2)"),
                  collectives=(entered(4, "_all_gather_base"),)),
            "all_gather_into_tensor #4 of default_pg (a.py:2)",
        ),
        (
            Doing("sleeping", frames=("barrier (distributed_c10d.py:1)", "f (a.py:2)"), collectives=(entered(4),)),
            "barrier (a.py:2)",
        ),
    ],
)  # fmt: skip
def test_words(doing: Doing, words: str) -> None:
    assert describe(doing).words == words
