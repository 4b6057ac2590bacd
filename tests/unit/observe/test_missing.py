"""MISSING: the facts that a server hands out about missing keys and ranks; what follows is in `unit/diagnosis`."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from looking import World
from support import blob, u64
from tcpstore_async.auth.access import Access
from tcpstore_async.base.errors import NotAllowedError
from tcpstore_async.session.identity import identity


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
    world.history.clock.now = 180.0
    facts = world.ask(0, b"/there/0", b"/nccl_storekey_8")
    assert facts["absent"] == [[0, 1]]
    assert facts["similar"] == [["/nccl_storekey_5", 0, 180.0, facts["sessions"][0]["id"]]]
    assert facts["sessions"][0]["peer"]["rank"] == "1"


def test_the_writers_of_the_keys_and_other_sessions() -> None:
    world = world_of(8)
    for rank in (0, 1, 2, 4, 5, 6):
        world.set(rank, b"/address/%d" % rank)
    world.wait(3, b"/never")
    world.leave(7)
    world.history.clock.now = 70.0
    facts = world.ask(0, *[b"/address/%d" % rank for rank in range(8)])
    assert facts["absent"] == [[3, 3], [7, 7]]
    ranks = {one["id"]: one["peer"]["rank"] for one in facts["sessions"]}
    assert [ranks[one] for one in facts["writers"]] == ["0", "1", "2", "4", "5", "6"]
    (other,) = [one for one in facts["sessions"] if one["id"] not in facts["writers"]]
    assert (other["peer"]["rank"], other["wait"], other["idle"]) == ("3", {"for": "keys", "keys": ["/never"]}, 70.0)
    assert facts["worlds"] == {"8": 8}
    assert len(facts["departed"]) == 1


def test_what_is_listed_is_bounded() -> None:
    world = world_of(1_000)
    for rank in range(0, 1_000, 2):
        world.barrier(rank, b"/bar", 1_000)
    facts = world.ask(0, counter=b"/bar", expected=1_000)
    counter = facts["counters"][0]
    assert (counter["told"], len(counter["ranks"]), counter["ranks"][-1]) == (500, 257, [512, 512])
    assert [one["peer"]["rank"] for one in facts["sessions"]] == [str(rank) for rank in range(1, 32, 2)]
    for client in range(1_000, 3_000):
        world.connect(client)
    facts = world.ask(0, counter=b"/bar", expected=1_000)
    assert (len(facts["sessions"]), facts["unlisted"]) == (32, 2_000 - 16)
    for number in range(500):
        world.set(number, b"/list/%d" % number)
    facts = world.ask(0, *[b"/list/%d" % number for number in range(501)])
    assert len(facts["writers"]) == 32


def test_long_descriptions_of_sessions_are_cut() -> None:
    world = World()
    for client in range(40):
        world.connect(client)
        world.introduce(client, rank=str(client), host="n" * 1_900)
        world.wait(client, *[b"\1" * 8_000 + b"%d" % number for number in range(20)])
    facts = world.ask(39, counter=b"/bar", expected=40)
    assert len(facts["sessions"]) < 16
    (wait, *_) = [one["wait"] for one in facts["sessions"]]
    assert ([len(key) for key in wait["keys"]], wait["more"]) == ([255] * 8, 12)


def test_many_that_ask_the_same_have_one_answer() -> None:
    """While one of them is being answered, the others join it."""
    world = world_of(3)
    for number in range(3_000):
        world.set(0, b"/key/%d/x" % number)
    question = b"\x4f" + u64(1) + blob(b"/key/9999/x") + blob(b"")
    for client in range(3):
        world.sessions[client].receive(question)
        assert world.sessions[client].stalled()
    first = world.finish(0)
    assert b"/key/2999/x" in first
    for client in (1, 2):
        world.sessions[client].receive(b"")
        assert not world.sessions[client].stalled()
        assert world.finish(client) == first
    world.set(0, b"/key/9998/x")
    assert world.ask(1, b"/key/9999/x")["similar"][0][0] == "/key/9998/x"


def test_one_inquiry_at_a_time_for_all_stores_and_what_it_holds_is_counted() -> None:
    root = world_of(1)
    worlds = [root, *[World(root=root) for _ in range(11)]]
    for world in worlds:
        if world is not root:
            world.connect(0)
        for number in range(1_000):
            world.set(0, b"/key/%d/x" % number)
    queue = root.inquiries
    budget = root.store.budget
    before = budget.others
    for world in worlds:
        world.sessions[0].receive(b"\x4f" + u64(1) + blob(b"/key/9999/x") + blob(b""))
    assert [world.sessions[0].stalled() for world in worlds] == [True] * 8 + [False] * 4
    root.store.activate()
    root.sessions[0].receive(b"")
    assert (queue.active is not None, queue.waiting) == (True, 7)
    root.store.activate()
    assert budget.others - before > 262_144 + 8_000
    for world in [root, *worlds[1:8:2]]:
        world.leave(0)
    for world in worlds[2:8:2]:
        assert b"absent" in world.finish(0)
    assert (queue.active, queue.waiting) == (None, 0)
    root.store.activate()
    assert abs(budget.others - before) < 8_000


def test_those_that_wait_carry_on_an_inquiry_whose_peer_is_suspended() -> None:
    world = world_of(2)
    for number in range(1_000):
        world.set(0, b"/key/%d/x" % number)
    world.sessions[0].receive(b"\x4f" + u64(1) + blob(b"/key/9999/x") + blob(b""))
    world.sessions[0].receive(b"")
    assert world.ask(1, b"/key/9998/x")["absent"] == [[0, 0]]
    world.sessions[0].receive(b"")
    assert not world.sessions[0].stalled()


def test_a_token_for_a_prefix_learns_of_no_other_keys() -> None:
    world = world_of(4)
    world.store.identify(identity("i", "uv"))
    world.set(0, b"/mine/k_1")
    world.set(0, b"/others/k_1")
    world.set(0, b"/mine/k_3")
    world.store.guards.grant(world.sessions[0], Access("t", "read", "mine/"))
    world.sessions[0].table = world.store.guards.table_of(world.sessions[0])
    assert [near[0] for near in world.ask(0, b"/mine/k_2")["similar"]] == ["/mine/k_1"]
    world.set(1, b"/mine/rank1")
    world.set(3, b"/mine/rank3")
    world.wait(2, b"/others/secret")
    facts = world.ask(0, *[b"/mine/rank%d" % rank for rank in range(1, 4)])
    assert [one["wait"] for one in facts["sessions"] if "wait" in one] == [{"for": ""}]
    assert "similar" not in world.ask(0, b"/mine/+=+=+=+")
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
        assert json.loads(world.finish(client))["absent"] == [[1, 1]]


@pytest.mark.parametrize("key", [b"/k/%d", b"/%d" + b"/1" * 250, b"/%d" + b"a" * 500])
def test_a_step_compares_few_keys_whatever_they_are(key: bytes) -> None:
    world = world_of(1)
    for number in range(4_000):
        world.set(0, key % number)
    assert len(list(steps(world, key % 9_000))) >= 40


def test_long_keys_are_not_compared() -> None:
    world = world_of(1)
    numbers = b"/1" * 4_000
    world.set(0, b"%s/%d" % (numbers, 1))
    world.set(0, b"/near/1")
    assert "similar" not in world.ask(0, numbers + b"/9999")
    assert [near[0] for near in world.ask(0, b"/near/2", numbers + b"/2")["similar"]] == ["/near/1"]


def test_a_step_looks_at_few_sessions() -> None:
    world = world_of(3_000)
    session = world.sessions[0]
    session.receive(b"\x4f" + u64(1) + blob(b"/bar") + blob(b"1000"))
    taken = 1
    while session.stalled():
        session.receive(b"")
        taken += 1
    assert taken >= 1 + 2 * 3_000 / 500
