"""MISSING: what a server says about keys that are missing and ranks that have not come."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from looking import World
from support import blob, u64
from tcpstore_async.auth.access import Access
from tcpstore_async.base.errors import NotAllowedError
from tcpstore_async.base.limits import Limits
from tcpstore_async.observe.missing import answer_missing
from tcpstore_async.observe.missing_reply import Elsewhere, Near, Who
from tcpstore_async.session.identity import identity
from tcpstore_async.session.store import Store


def world_of(ranks: int, *, known: bool = True) -> World:
    """Ranks that have joined; if known, they have said who they are."""
    world = World()
    for rank in range(ranks):
        world.connect(rank)
        if known:
            world.introduce(rank, rank=str(rank), world_size=str(ranks), host=f"node{rank // 4}", pid=str(rank))
    return world


def test_keys_near_a_missing_one_with_age_and_writer() -> None:
    world = world_of(2)
    world.set(1, b"/nccl_storekey_5")
    world.history.now = 180.0
    report = world.ask(0, b"/there/0", b"/nccl_storekey_8")
    assert report.missing == 2
    assert [absent.index for absent in report.keys] == [0, 1]
    assert report.keys[1].nearest == [Near("/nccl_storekey_5", 180.0, Who("node0", 1, 1))]
    assert str(report.keys[1].nearest[0].by) == "rank 1 (node0, pid 1)"


def test_without_a_history_there_are_no_writers_nor_ages() -> None:
    world = World()
    world.store = Store(Limits())
    answer_missing(world.store)
    world.connect(0)
    world.set(0, b"/k_5")
    assert world.ask(0, b"/k_6").keys[0].nearest == [Near("/k_5")]
    assert world.ask(0, counter=b"init/", expected=3).arrived == 1


def test_the_ranks_that_have_not_written_their_keys() -> None:
    world = world_of(8)
    for rank in (0, 1, 2, 4, 5, 6):
        world.set(rank, b"/address/%d" % rank)
    world.wait(3, b"/never")
    world.history.now = 70.0
    report = world.ask(0, *[b"/address/%d" % rank for rank in range(8)])
    assert (report.missing, [absent.index for absent in report.keys]) == (2, [3, 7])
    assert report.ranks == [3, 7]
    assert report.elsewhere == [
        Elsewhere(Who("node0", 3, 3), "is waiting for never", 70.0),
        Elsewhere(Who("node1", 7, 7), "has sent nothing since INTRODUCE", 70.0),
    ]


def test_numbers_that_are_no_ranks_are_not_called_so() -> None:
    """One rank has written them all."""
    world = world_of(8)
    for number in range(4):
        world.set(5, b"/shard/%d" % number)
    assert world.ask(0, *[b"/shard/%d" % number for number in range(6)]).ranks == []
    assert world.ask(0, b"/other/7").ranks == []


@pytest.mark.parametrize("counter", [b"/bar", b"init/"])
def test_the_ranks_that_have_not_arrived(counter: bytes) -> None:
    world = world_of(8)
    if counter == b"init/":
        report = world.ask(0, counter=counter, expected=10)
        assert (report.arrived, report.ranks, report.elsewhere) == (8, [8, 9], [])
        return
    for rank in (0, 2, 3, 4, 5, 7):
        world.barrier(rank, counter, 8)
    world.fetch(1, b"/weights")
    report = world.ask(6, counter=counter, expected=8)
    assert (report.arrived, report.ranks, report.more) == (6, [1, 6], 0)
    assert [(one.who.rank, one.does) for one in report.elsewhere] == [
        (1, "is waiting for weights"),
        (6, "has just timed out"),
    ]


@pytest.mark.parametrize(("counter", "opener"), [
    (b"/store_based_barrier_key:g", b"/store_based_barrier_key:g:last_worker"),
    (b"/step/num_members", b"/step/last_member"), (b"/step/num_members", b"/step/last_members"),
])  # fmt: skip
def test_the_ranks_for_which_a_barrier_over_keys_is_not_open(counter: bytes, opener: bytes) -> None:
    world = world_of(4)
    for rank in (1, 2):
        world.add(rank, counter)
        world.wait(rank, opener)
    world.fetch(3, b"/weights")
    report = world.ask(1, opener)
    assert (report.missing, report.ranks) == (1, [0, 3])
    assert [(one.who.rank, one.does) for one in report.elsewhere] == [
        (0, "has sent nothing since INTRODUCE"),
        (3, "is waiting for weights"),
    ]
    assert world.ask(1, b"/other:last_worker").ranks == []


def test_a_barrier_of_a_part_of_the_world_names_no_ranks() -> None:
    world = world_of(8)
    world.barrier(5, b"/bar", 2)
    report = world.ask(5, counter=b"/bar", expected=2)
    assert (report.arrived, report.ranks, report.elsewhere) == (1, [], [])


def test_those_that_joined_and_did_not_enter_are_named_without_ranks() -> None:
    world = world_of(4, known=False)
    for client in (0, 1, 3):
        world.barrier(client, b"/bar", 4)
    report = world.ask(0, counter=b"/bar", expected=4)
    assert (report.arrived, report.ranks) == (3, [])
    assert report.elsewhere == [Elsewhere(Who("10.0.0.1", None, 1002), "has sent nothing since ADD", 0.0)]


def test_many_ranks_are_not_all_listed() -> None:
    world = world_of(2)
    report = world.ask(0, counter=b"init/", expected=100_000)
    assert len(report.ranks) == 256
    assert len(report.ranks) + report.more == 99_998
    report = world.ask(0, counter=b"init/", expected=999_999_999)
    assert (report.arrived, report.ranks) == (2, [])


def test_many_that_ask_the_same_have_one_answer() -> None:
    """While one of them is being answered, the others join it; right after it, they get what it got."""
    world = world_of(3)
    for number in range(3_000):
        world.set(0, b"/key/%d/x" % number)
    question = b"\x4f" + u64(1) + blob(b"/key/9999/x") + blob(b"")
    for client in range(3):
        world.sessions[client].receive(question)
    assert world.sessions[0].stalled()
    first = world.answer(0)
    assert first.keys[0].nearest[0].key == "/key/2999/x"
    for client in (1, 2):
        world.sessions[client].receive(b"")
        assert not world.sessions[client].stalled()
        assert world.answer(client) == first
    world.sessions[1].receive(question)
    assert not world.sessions[1].stalled()
    assert world.answer(1) == first
    world.set(0, b"/key/9998/x")
    assert world.ask(1, b"/key/9999/x").keys[0].nearest[0].key == "/key/9998/x"


def test_one_that_leaves_lets_others_search() -> None:
    world = world_of(12)
    for number in range(3_000):
        world.set(0, b"/key/%d/x" % number)
    for client in range(12):
        world.sessions[client].receive(b"\x4f" + u64(1) + blob(b"/key/99%d/y%d" % (client, client)) + blob(b""))
    queue = world.questions
    assert (queue.searching is not None, queue.queued) == (True, 8)
    answered = [client for client in range(12) if not world.sessions[client].stalled()]
    assert answered == [9, 10, 11]
    for client in range(1, 12, 2):
        world.leave(client)
    world.leave(0)
    for client in range(2, 12, 2):
        assert world.answer(client).missing == 1
    assert (queue.searching, queue.queued) == (None, 0)


def test_a_token_for_a_prefix_learns_of_no_other_keys() -> None:
    world = world_of(4)
    world.store.identify(identity("i", "uv"))
    world.set(0, b"/mine/k_1")
    world.set(0, b"/others/k_1")
    world.set(0, b"/mine/k_3")
    world.store.guards.grant(world.sessions[0], Access("t", "read", "mine/"))
    world.sessions[0].table = world.store.guards.table_of(world.sessions[0])
    report = world.ask(0, b"/mine/k_2")
    assert [near.key for near in report.keys[0].nearest] == ["/mine/k_1"]
    world.set(1, b"/mine/rank1")
    world.set(3, b"/mine/rank3")
    world.wait(2, b"/others/secret")
    report = world.ask(0, *[b"/mine/rank%d" % rank for rank in range(1, 4)])
    assert [(one.who.rank, one.does) for one in report.elsewhere] == [(2, "is waiting")]
    report = world.ask(0, b"/mine/+=+=+=+")
    assert report.keys[0].nearest == []
    with pytest.raises(NotAllowedError):
        world.ask(0, b"/others/k_2")


def steps(world: World, *names: bytes) -> Iterator[int]:
    """Ask about keys; yield after each step how many have been taken."""
    session = world.sessions[0]
    session.receive(b"\x4f" + u64(len(names)) + b"".join(blob(name) + blob(b"") for name in names))
    taken = 1
    while session.stalled():
        yield taken
        session.receive(b"")
        taken += 1


def test_the_answer_is_true_when_it_is_given() -> None:
    """One who shares a question may have written its keys, or deleted them, after others have asked it."""
    world = world_of(3)
    for number in range(3_000):
        world.set(0, b"/key/%d/x" % number)
    world.set(0, b"/there")
    question = b"\x4f" + u64(2) + blob(b"/key/9999/x") + blob(b"") + blob(b"/there") + blob(b"")
    world.sessions[0].receive(question)
    assert world.sessions[0].stalled()
    world.set(2, b"/key/9999/x")
    world.delete(2, b"/there")
    world.sessions[2].receive(question)
    for client in (2, 0):
        report = world.answer(client)
        assert (report.missing, [one.index for one in report.keys]) == (1, [1])


def test_long_keys_are_not_compared() -> None:
    """Each has thousands of numbers, the time for all of which would hold up the other peers."""
    world = world_of(1)
    numbers = b"/1" * 4_000
    for number in range(600):
        world.set(0, b"%s/%d" % (numbers, number))
    world.set(0, b"/near/1")
    assert len(list(steps(world, numbers + b"/9999"))) < 5
    assert world.answer(0).keys[0].nearest == []
    assert world.ask(0, b"/near/2", numbers + b"/9999").keys[0].nearest == [Near("/near/1", 0.0, Who("node0", 0, 0))]


def test_longer_keys_are_looked_at_in_more_steps() -> None:
    world = world_of(1)
    for number in range(600):
        world.set(0, b"/%s/%d" % (b"a1" * 200, number))
    short = len(list(steps(world, b"/b")))
    assert short > 600 * 400 / 32_768


def test_many_keys_of_one_family_are_looked_at_in_steps() -> None:
    world = world_of(1)
    taken = list(steps(world, *[b"/%s%d" % (b"x" * 8_000, number) for number in range(1_000)]))
    assert len(taken) > 100


def test_the_number_of_a_key_is_found_in_linear_time() -> None:
    """Each of these took a second when the time grew with the square of the length."""
    world = world_of(1)
    report = world.ask(0, *[b"/%sx%d" % (b"1" * 8_000, number) for number in range(1_000)])
    assert report.missing == 1_000
