"""Numbers about a store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from looking import World
from support import blob
from tcpstore_async.observe import statistics
from tcpstore_async.observe.statistics import Statistics


def last(portions: Iterator[Any]) -> Any:
    return list(portions)[-1]


def look(world: World) -> Statistics:
    return Statistics(world.store, world.history.clock.now)


def counters(world: World) -> dict[str, Any]:
    found = look(world)
    for _ in found.count():
        pass
    return found.counters()


def test_commands_are_counted_by_name_once_they_are_executed() -> None:
    world = World()
    world.connect(1)
    world.set(1, b"/k")
    world.send(1, b"\x01" + blob(b"/k"))  # incomplete
    found = counters(world)["commands"]
    assert {name: number for name, number in found.items() if number} == {"VALIDATE": 1, "PING": 1, "ADD": 1, "SET": 1}
    world.send(1, blob(b"value"))
    world.wait(1, b"/a", b"/b", b"/c", b"/d", b"/e")
    assert (counters(world)["commands"]["SET"], counters(world)["commands"]["WAIT"]) == (2, 1)


def test_sessions_keys_and_the_budget() -> None:
    world = World()
    world.connect(1)
    before = counters(world)
    world.connect(2)
    world.introduce(2, rank="0", world_size="64")
    world.set(1, b"/k", b"x" * 1000)
    world.send(1, b"\x0e" + blob(b"/queue") + blob(b"item"))
    world.wait(2, b"/missing")
    found = counters(world)
    assert found["sessions"] == {"open": 2, "unvalidated": 0, "waiting": 1, "unsent_bytes": 0}
    assert (found["keys"], found["queues"], found["awaited_keys"]) == (2, 1, 1)
    assert found["joins"] == {"joined": 2, "expected": 0, "world_size": 64}
    budget = found["budget"]
    assert budget["used"] == sum(budget[kind] for kind in ("store", "waiters", "requests", "key_lists", "connections"))
    assert budget["store"] - before["budget"]["store"] > 1000
    assert budget["waiters"] > before["budget"]["waiters"] == 0
    assert budget["connections"] > before["budget"]["connections"]


@pytest.mark.parametrize("portion", [1, statistics.PORTION])
def test_the_longest_waits_come_first_and_each_list_of_keys_once(portion: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "PORTION", portion)
    world = World()
    for client in range(1, 6):
        world.connect(client)
    world.history.clock.now = 10.0
    world.wait(2, b"/alone")
    world.history.clock.now = 20.0
    world.wait(3, b"/a", b"/b", b"/c", b"/d", b"/e")
    world.history.clock.now = 30.0
    world.wait(1, b"/a", b"/b", b"/c", b"/d", b"/e")
    world.barrier(4, b"/bar", 8)
    world.history.clock.now = 40.0
    found = last(look(world).longest_waits(2))
    assert found["different"] == 3
    first, second = found["waits"]
    assert (first["key"], first["keys"], first["waiting"], first["since"], first["pid"]) == ("/alone", 1, 1, 30.0, 1002)
    assert (second["key"][:1], second["keys"], second["waiting"], second["since"]) == ("/", 5, 2, 20.0)
    everything = last(look(world).longest_waits(10))["waits"]
    assert (everything[2]["key"], everything[2]["command"], everything[2]["since"]) == ("/bar", "BARRIER", 10.0)


@pytest.mark.parametrize("portion", [1, statistics.PORTION])
def test_the_largest_keys_come_first(portion: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "PORTION", portion)
    world = World()
    world.connect(1)
    for number in range(100):
        world.set(1, b"/%03d" % (number * 37 % 100), b"x" * (number * 37 % 100))
    found = last(look(world).largest_keys(3))
    assert found == {"largest": [["/099", 99], ["/098", 98], ["/097", 97]]}
    world.set(1, b"/" + b"\xff" * 1000, b"x" * 1000)
    ((key, size),) = last(look(world).largest_keys(1))["largest"]
    assert (len(key), size) == (1 + 4 * 255 + 1, 1000)
