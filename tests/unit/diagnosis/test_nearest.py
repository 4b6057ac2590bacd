"""Near misses: keys that exist, and are like one that is waited for. More of them are told in scenes.txt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looking import World
from tcpstore_async.diagnosis.facts import Facts, Key
from tcpstore_async.diagnosis.missing import awaited
from tcpstore_async.diagnosis.nearest import find_similar, find_waiting
from tcpstore_async.diagnosis.stock_ranks import Ranks

NOBODY = Ranks(Facts(), {}, None)

STORIES = {
    "a generation counter is off by some": (
        b"/default_pg/0//cuda//pg/nccl_storekey_8",
        [b"/default_pg/0//cuda//pg/nccl_storekey_5", b"/default_pg/0//cuda//other", b"/ready"],
        b"/default_pg/0//cuda//pg/nccl_storekey_5",
    ),
    "a rank waits on the wrong group": (
        b"/default_pg/0//3//cpu//0/2",
        [b"/default_pg/0//2//cpu//0/2", *[b"/default_pg/0//cpu//0/%d" % rank for rank in range(9)]],
        b"/default_pg/0//2//cpu//0/2",
    ),
    "a typing mistake": (b"/worker/raedy", [b"/worker/ready", b"/worker/done", b"/x"], b"/worker/ready"),
}


@pytest.mark.parametrize("story", STORIES)
def test_the_near_miss_is_shown(story: str) -> None:
    awaited, existing, near = STORIES[story]
    world = World()
    for client in range(8):
        world.connect(client)
        world.introduce(client, rank=str(client), host="node", pid=str(client))
    for key in existing:
        world.set(0, key)
    world.history.clock.now = 180.0
    for client in range(1, 8):
        world.wait(client, awaited)
    world.history.clock.now = 200.0
    (found,) = world.waiting()
    assert (found.key, found.ranks, found.since, found.waiting) == (awaited.decode(), list(range(1, 8)), 20.0, 7)
    shown = {one.key: one for one in found.nearest}
    assert near.decode() in shown
    assert shown[near.decode()].age == 200.0
    assert shown[near.decode()].by == "rank 0 (node, pid 0)"
    if "group" not in story:
        assert found.nearest[0].key == near.decode()


def test_the_longest_wait_comes_first() -> None:
    world = World()
    for client in range(3):
        world.connect(client)
    for client in (2, 0, 1):
        world.history.clock.now += 1.0
        world.wait(client, b"/%d" % client)
    assert [one.key for one in world.waiting()] == ["/2", "/0", "/1"]


def test_a_long_list_is_described_by_its_first_keys() -> None:
    world = World()
    for client in range(50):
        world.connect(client)
        world.wait(client, *[b"/list/%d" % number for number in range(100)])
    found = world.waiting()
    assert len(found) == 8
    assert all((one.waiting, one.more, len(one.connections)) == (50, 92, 16) for one in found)


def test_only_the_longest_waits_are_compared_if_that_is_asked_for() -> None:
    world = World()
    world.connect(9)
    world.set(9, b"/step_1")
    for client in range(3):
        world.connect(client)
        world.history.clock.now = float(client)
        world.wait(client, b"/step_%d" % (client + 2))
    ranks = world.ranks()
    found = find_waiting(ranks.facts, ranks, awaited(ranks.facts), 2)
    assert [(one.key, [near.key for near in one.nearest]) for one in found] == [
        ("/step_2", ["/step_1"]),
        ("/step_3", ["/step_1"]),
        ("/step_4", []),
    ]


def test_of_many_keys() -> None:
    """800,000 take seconds; 10,000 show that the cost is bounded, as a scan of all for each would be 10 million."""
    keys = [Key(f"/exchange/{number // 1000}/{number % 1000}", 1, 1.0, None) for number in range(10_000)]
    wanted = [f"/exchange/{number}/1000" for number in range(1_000)]
    found = find_similar(keys, NOBODY, wanted)
    assert found["/exchange/7/1000"][0].key == "/exchange/7/999"


@given(st.lists(st.text("ab/01", max_size=12), max_size=30), st.lists(st.text("ab/01", max_size=12), max_size=5))
def test_only_other_existing_keys_are_near(existing: list[str], wanted: list[str]) -> None:
    keys = [Key(key, 1, None, None) for key in dict.fromkeys(existing)]
    found = find_similar(keys, NOBODY, wanted)
    assert found.keys() == set(wanted)
    for key, near in found.items():
        names = [one.key for one in near]
        assert set(names) <= set(existing) - {key}
        assert len(set(names)) == len(names) <= 5
