"""Who is missing, in worlds of simulated stock clients. What is said of common situations is in scenes.txt."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looking import World, environments
from support import blob
from tcpstore_async.diagnosis.missing import Missing, Pending

GLOO = b"/default_pg/0//cpu//0/"


def only(answer: Missing) -> Pending:
    assert len(answer.waits) == 1
    return answer.waits[0]


def ports(found: Pending) -> set[int]:
    return {one.port - 20_000 for one in found.elsewhere}


def gloo(world: World, ranks: set[int], size: int, prefix: bytes = GLOO) -> None:
    """Ranks make a gloo group: each publishes its address, then waits for those of all, in order."""
    for rank in sorted(ranks):
        world.set(rank, prefix + b"%d" % rank, bytes(154 + 8 * size))
    first = next(rank for rank in range(size) if rank not in ranks)
    for rank in sorted(ranks):
        world.wait(rank, prefix + b"%d" % first)


@pytest.mark.parametrize("by_list", [True, False])
@pytest.mark.parametrize("size", [1_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_seven_missing_from_an_exchange_of_keys(size: int, by_list: bool) -> None:
    """Nothing says which rank a client is but the key that it writes."""
    chance = random.Random(f"{size} {by_list}")
    world = World()
    numbers = list(range(size))
    chance.shuffle(numbers)
    absent = set(chance.sample(range(size), 7))
    names = [b"/exchange/%d" % rank for rank in range(size)]
    for client, rank in enumerate(numbers):
        world.connect(client)
        if rank not in absent:
            world.set(client, names[rank])
    first = names[min(absent)]
    missing = [names[rank] for rank in sorted(absent)]
    for client, rank in enumerate(numbers):
        if rank not in absent:
            world.wait(client, *((names if size <= 1_000 else missing) if by_list else [first]))
    found = only(world.missing(size))
    assert found.missing_ranks == sorted(absent)
    assert (found.kind, found.arrived, found.expected, found.unseen) == ("keys", size - 7, size, 0)
    assert {one.pid for one in found.elsewhere} == {1000 + at for at, rank in enumerate(numbers) if rank in absent}


@pytest.mark.parametrize("pid", [None, 77])
@pytest.mark.parametrize("world_size", [None, 1_000])
@pytest.mark.parametrize("barrier", ["store_based", "BARRIER"])
def test_seven_of_1000_that_show_no_rank(pid: int | None, world_size: int | None, barrier: str) -> None:
    """Even if all say that they are the same process."""
    world = World()
    for client in range(1_000):
        world.connect(client, pid=pid)
    absent = set(random.Random(7).sample(range(1_000), 7))
    came = {*range(1_000)} - absent
    if barrier == "store_based":
        world.store_based_barrier(came)
    else:
        for client in came:
            world.barrier(client, b"/start", 1_000)
    found = only(world.missing(world_size))
    assert ports(found) == absent
    assert {one.rank for one in found.elsewhere} == {None}
    assert (found.arrived, found.missing_ranks, found.unseen) == (993, [], 0)


def test_a_barrier_that_is_open_is_not_under_way() -> None:
    world = World()
    for client in range(3):
        world.connect(client)
    world.store_based_barrier(range(3))
    world.set(2, b"/store_based_barrier_key:default_pg:last_worker")
    assert world.missing(3).waits == []
    assert world.facts().counters.keys() == {"init/"}


def test_the_root_of_a_group_is_missing() -> None:
    for names, size, expected in [
        ([b"/default_pg/0//cuda//0"], 4, [0]),
        ([b"/default_pg/0//cuda//pg/nccl_storekey_2"], 4, [0]),
        ([b"/pg/nccl_storekey_0_%d" % root for root in range(4)], 512, [128, 384]),
        ([b"/pg/UniqueNCCLID:%d" % root for root in range(4)], 510, [128, 383]),
    ]:
        world = World()
        for client in range(3):
            world.connect(client)
        if len(names) > 1:
            world.set(0, names[0])
            world.set(1, names[2])
        world.wait(1, *names)
        world.wait(2, *names)
        found = [one for one in world.missing(size).waits if one.kind == "keys"]
        assert [one.missing_ranks for one in found] == [expected], names
        assert (found[0].unseen, found[0].unidentified) == (len(expected) - 1, 1)


def test_the_root_of_a_group_is_the_only_one_that_does_not_wait() -> None:
    """All ranks are connected, and which is which is not known."""
    world = World()
    for client in range(8):
        world.connect(client)
    for client in range(1, 8):
        world.wait(client, b"/default_pg/0//cuda//0")
    found = only(world.missing(8))
    assert [one.pid for one in found.elsewhere] == [1000]
    assert (found.missing_ranks, found.unseen, found.unidentified) == ([0], 0, 0)


def test_a_rank_of_a_larger_world_may_be_connected() -> None:
    world = World()
    for client in range(8):
        world.connect(client)
    gloo(world, {0, 1, 3, 4}, 5)
    found = [one for one in world.missing(50).waits if one.kind == "keys"]
    assert [(one.missing_ranks, one.elsewhere, one.unseen, one.unidentified) for one in found] == [([2], [], 0, 1)]


def test_a_rank_that_two_processes_claim() -> None:
    world = World()
    for client, rank in enumerate((0, 1, 1, 3)):
        world.connect(client)
        world.introduce(client, rank=str(rank), world_size="4", host="node", pid=str(client))
    world.barrier(0, b"/b", 4)
    world.barrier(1, b"/b", 4)
    world.barrier(3, b"/b", 4)
    answer = world.missing()
    assert [(one.rank, one.by) for one in answer.claimed] == [(1, ["node, pid 1", "node, pid 2"])]
    assert [one.missing_ranks for one in answer.waits] == [[2]]


@pytest.mark.parametrize("other", [False, True])
def test_both_clients_of_rank_0_are_one_process(other: bool) -> None:
    """With `install()`, it has one of ours and PyTorch's. Not if two processes with that pid share an address."""
    world = World()
    for client, pid in ((0, 70), (1, 71), (3, 70)):
        world.connect(client, pid=pid, host="127.0.0.1", joins=client != 0)
    world.introduce(0, rank="0", world_size="3", host="vm", pid="70")
    if other:
        world.connect(4, pid=70, host="127.0.0.1", joins=False)
        world.introduce(4, rank="7", world_size="9", host="elsewhere", pid="70")
    world.send(0, b"\x42" + blob(b"init/") + struct.pack("<q", 3))
    world.wait(1, b"/default_pg/0//cpu//0/0")
    known = {1: {"RANK": "1"}, 3: {"RANK": "0"}}
    answer = world.missing(3, known)
    assert [one.rank for one in answer.claimed] == ([0] if other else [])
    if not other:
        joining = next(one for one in answer.waits if one.kind == "join")
        assert (joining.missing_ranks, joining.unidentified) == ([2], 0)


def test_more_ranks_than_the_server_expects() -> None:
    """As with the server of torchrun's agent, which expects itself only."""
    world = World()
    world.store.announce(1)
    for client in range(4):
        world.connect(client)
    known = {one: {"RANK": str(one), "WORLD_SIZE": "4"} for one in range(3)}  # the last one is the agent
    answer = world.missing(environments=known)
    assert (answer.joined, answer.world_size) == (3, 4)


def test_ranks_that_join_again_are_no_agents() -> None:
    """More have joined than the server expects, but the ranks say how many they are."""
    world = World()
    world.store.announce(3)
    for client in range(5):
        world.connect(client)
    for known in (None, environments(range(3), 3)):
        answer = world.missing(environments=known)
        assert (answer.joined, answer.world_size) == (5, 3)


def test_a_rank_that_has_joined_on_another_connection_has_arrived() -> None:
    """As with `install()`: the store is PyTorch's client, and one of ours has joined for it and left."""
    world = World()
    world.connect(0, pid=70, joins=False)
    world.introduce(0, rank="0", world_size="3", host="node", pid="70")
    world.send(0, b"\x48" + blob(b"init/") + blob(b"0"))
    world.connect(1, pid=71, joins=False)
    world.introduce(1, rank="1", world_size="3", host="node", pid="71")
    world.send(1, b"\x48" + blob(b"init/") + blob(b"1") + b"\x49")
    world.connect(2, pid=71, joins=False)
    world.leave(1)
    world.send(0, b"\x42" + blob(b"init/") + struct.pack("<q", 3))
    found = only(world.missing(3))
    assert (found.kind, found.arrived, found.missing_ranks, found.elsewhere, found.unseen) == ("join", 2, [2], [], 1)


def test_a_key_that_is_no_ranks_is_not_missing_from_anybody() -> None:
    world = World()
    for client in range(3):
        world.connect(client)
    world.set(0, b"/assigned/0")
    world.set(0, b"/assigned/1")
    world.wait(1, b"/assigned/2")
    world.wait(2, b"/go")
    assert world.missing().waits == []


def test_a_group_of_some_ranks() -> None:
    """Its size is in what its members publish; which ranks they are is not."""
    world = World()
    for client in range(16):
        world.connect(client)
    gloo(world, {0, 1, 3}, 5, b"/default_pg/0//2//cpu//0/")
    found = only(world.missing(16))
    assert (found.arrived, found.expected, found.missing_ranks, found.elsewhere) == (3, 5, [2, 4], [])
    assert (found.unseen, found.unidentified) == (0, 2)


def test_hosts_from_which_fewer_have_come() -> None:
    world = World()
    for client in range(32):
        world.connect(client, host=f"10.0.0.{client // 8}")
    world.store_based_barrier({*range(32)} - {9, 10, 11})
    found = only(world.missing(32))
    assert [(one.host, one.arrived, one.usual) for one in found.fewer_on] == [("10.0.0.1", 5, 8)]


def test_a_host_counts_once_whether_its_ranks_say_its_name_or_not() -> None:
    world = World()
    for client in range(5):
        world.connect(client, host="10.0.0.1")
        if client:
            world.introduce(client, rank=str(client), world_size="5", host="node", pid=str(client))
    world.store_based_barrier(range(4))
    assert only(world.missing()).fewer_on == []


def test_a_rank_that_has_left_is_not_connected() -> None:
    world = World()
    for client in range(4):
        world.connect(client)
        world.introduce(client, rank=str(client), world_size="4", host="node", pid=str(client))
    world.store_based_barrier([0, 1])
    world.leave(3)
    found = only(world.missing())
    assert found.missing_ranks == [2, 3]
    assert [one.rank for one in found.elsewhere] == [2]
    assert [(one.rank, one.port, one.does) for one in found.left] == [(3, 20_003, "has left")]
    assert found.unseen == 1


def test_numbers_that_a_peer_has_made_up() -> None:
    """They cost no more than others: nobody looks at a thousand million ranks."""
    world = World()
    for client in range(40):
        world.connect(client)
        world.wait(client, b"/made%d/999999999" % client, b"/made%d/7" % client)
    assert {tuple(one.missing_ranks) for one in world.missing().waits} == {(7, 999_999_999)}
    assert world.missing(world_size=999_999_999).waits[0].kind == "join"


def test_nobody_is_blamed_when_it_is_not_known_who_has_come() -> None:
    """More have come to the barrier than are remembered."""
    world = World(most_bytes=3600)
    for client in range(8):
        world.connect(client)
    world.store_based_barrier(range(6))
    for client in range(4):
        world.send(client, b"\x0c")
    found = only(world.missing(8))
    assert (found.arrived, found.missing_ranks, found.elsewhere) == (6, [], [])
    assert (found.unseen, found.unidentified) == (0, 2)


def test_contradictory_ranks_are_none() -> None:
    world = World()
    for client in range(3):
        world.connect(client)
    found = world.ranks(None, {0: {"RANK": "1"}, 1: {"RANK": "1"}, 2: {"RANK": "2"}})
    assert {number: rank.pid for number, rank in found.by_number.items()} == {2: 1002}


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_whoever_is_missing_is_named_and_no_other(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 24))
    everybody = set(range(size))
    absent = data.draw(st.sets(st.sampled_from(sorted(everybody)), min_size=0, max_size=size - 1))
    present = everybody - absent
    hanging = data.draw(st.sets(st.sampled_from(sorted(present)), max_size=len(present) - 1))
    kind = data.draw(st.sampled_from(["store_based", "BARRIER", "gloo"]))
    known = data.draw(st.booleans())
    world = World()
    for rank in data.draw(st.permutations(sorted(present))):
        world.connect(rank)
    came = present - hanging
    if kind == "store_based":
        world.store_based_barrier(came)
    elif kind == "BARRIER" and len(came) < size:
        for rank in came:
            world.barrier(rank, b"/b", size)
    elif kind == "gloo" and len(came) < size:
        gloo(world, came, size)
    answer = world.missing(size, environments(present, size) if known else None)
    waits = [one for one in answer.waits if one.kind != "join"]
    if len(came) == size:
        assert not [one for one in waits if one.missing_ranks or one.elsewhere]
        return
    found = waits[0]
    if known or kind == "gloo":
        assert found.missing_ranks == sorted(absent | hanging)
    if known:
        assert {one.rank for one in found.elsewhere} == hanging
        assert found.unseen == len(absent)
    assert ports(found) <= hanging
