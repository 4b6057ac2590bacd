"""Samples of commands: what is in them, and that watching changes nothing."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import pytest

from looking import World
from support import blob, keys
from tcpstore_async.auth.access import Access
from tcpstore_async.base.errors import NotAllowedError
from tcpstore_async.observe.monitor import Monitor
from tcpstore_async.session.identity import identity
from tcpstore_async.session.store import Store
from tcpstore_async.wire.commands import BY_METHOD
from tcpstore_async.wire.values import pack


def watched(every: int = 1, values: bool = False, most: int = 1000) -> tuple[World, Monitor]:
    """A world with one client, and a monitor that is attached after that has connected."""
    world = World()
    world.connect(1, joins=False)
    monitor = Monitor(itertools.count(100.0).__next__, every, values, most)
    world.store.hub.watch(monitor.note)
    return world, monitor


def brief(monitor: Monitor) -> list[list[Any]]:
    """Samples without the time and the peer: command, key, keys, size, value."""
    return [sample[5:] for sample in monitor.take()]


def test_a_sample_says_who_when_and_what() -> None:
    world, monitor = watched()
    world.set(1, b"/k")
    world.introduce(1, rank="3")
    world.set(1, b"/k")
    first, _, last = monitor.take()
    assert first == [100.0, "10.0.0.1", 20_001, 1001, None, "SET", "/k", 1, 5, None]
    assert last == [102.0, "10.0.0.1", 20_001, 1001, "3", "SET", "/k", 1, 5, None]
    assert monitor.take() == []


def test_commands_of_all_kinds() -> None:
    world, monitor = watched(values=True)
    world.set(1, b"/k", b"x" * 1000)
    world.add(1, b"/n", 7)
    world.send(1, b"\x02" + blob(b"/k") + blob(b"expected") + blob(b"desired"))
    world.wait(1, b"/a")
    world.wait(1, b"/a", b"/b", b"/c", b"/d", b"/e")
    world.send(1, b"\x0b" + struct.pack("<Q", 2) + blob(b"/one") + blob(b"1") + blob(b"/two") + blob(b"22"))
    world.send(1, b"\x07")
    world.send(1, b"\x03" + blob(b"/" + b"long" * 100))
    found = brief(monitor)
    assert found[:6] == [
        ["SET", "/k", 1, 1000, "x" * 256 + "…"],
        ["ADD", "/n", 1, 0, "7"],
        ["COMPARE_SET", "/k", 1, 15, "desired"],
        ["WAIT", "/a", 1, 0, None],
        ["WAIT", "/a", 5, 0, None],
        ["MULTI_SET", "/one", 2, 3, "22"],
    ]
    assert found[6] == ["GETNUMKEYS", None, 0, 0, None]
    assert len(found[7][1]) == 257


def test_values_are_hidden_unless_asked_for_and_secrets_always() -> None:
    world, monitor = watched()
    world.set(1, b"/k", b"secret value")
    assert "secret" not in str(monitor.take())
    world, monitor = watched(values=True)
    world.store.hub.auth.authenticate = lambda token: "no"
    world.send(1, b"\x48" + blob(b"init/") + blob(b"secret of a rank"))
    with pytest.raises(NotAllowedError):
        world.send(1, b"\x4e" + blob(b"secret token"))
    monitor.note(BY_METHOD["link"], ([(b"secret", pack(b"secret of a link"))],), world.sessions[1], "")
    samples = monitor.take()
    assert [sample[5] for sample in samples] == ["JOIN", "AUTH", "LINK"]
    assert "secret" not in str(samples)


def test_one_command_of_several() -> None:
    world, monitor = watched(every=3)
    for number in range(10):
        world.set(1, b"/%d" % number)
    assert [sample[1] for sample in brief(monitor)] == ["/2", "/5", "/8"]
    assert (monitor.seen, monitor.dropped) == (10, 0)


def test_what_is_not_taken_is_dropped_and_counted() -> None:
    world, monitor = watched(most=3)
    for number in range(10):
        world.set(1, b"/%d" % number)
    assert [sample[1] for sample in brief(monitor)] == ["/0", "/1", "/2"]
    assert (monitor.seen, monitor.dropped) == (10, 7)
    world.set(1, b"/again")
    assert len(monitor.take()) == 1


def handlers(store: Store) -> list[Any]:
    """What executes commands."""
    slots = [slot for table in (store.handshake, store.commands) for slot in table if slot is not None]
    return [slot.call for slot in slots] + [getattr(slot.request, "call", None) for slot in slots]


def test_nothing_is_left_once_nobody_watches() -> None:
    world = World()
    world.connect(0)
    world.set(0, b"/k")
    before = handlers(world.store)
    one, other = (Monitor(lambda: 0.0, 1, False) for _ in range(2))
    world.store.hub.watch(one.note)
    world.store.hub.watch(other.note)
    assert handlers(world.store) != before
    world.connect(1)
    assert (one.seen, other.seen) == (3, 3)
    world.store.hub.unwatch(one.note)
    world.store.hub.unwatch(one.note)
    world.set(1, b"/k")
    assert (one.seen, other.seen) == (3, 4)
    world.store.hub.unwatch(other.note)
    assert handlers(world.store) == before
    world.set(1, b"/k")
    assert other.seen == 4


def test_sessions_with_a_token_are_watched_too() -> None:
    """Both those whose table there is when the monitor comes, and later ones; and neither once it has gone."""
    world = World()
    world.connect(1, joins=False)
    world.connect(2, joins=False)
    store = world.store
    store.identify(identity("instance", "uv"))
    store.guards.grant(world.sessions[1], Access("one"))
    world.sessions[1].table = store.guards.table_of(world.sessions[1])
    monitor = Monitor(lambda: 0.0, 1, False)
    store.hub.watch(monitor.note)
    store.guards.grant(world.sessions[2], Access("two"))
    world.sessions[2].table = store.guards.table_of(world.sessions[2])
    for client in (1, 2):
        world.set(client, b"/k")
        world.send(client, b"\x05" + keys(b"/a", b"/b", b"/c", b"/d", b"/e"))
    assert brief(monitor) == [["SET", "/k", 1, 5, None], ["CHECK", "/a", 5, 0, None]] * 2
    store.hub.unwatch(monitor.note)
    for client in (1, 2):
        world.set(client, b"/k")
        world.send(client, b"\x05" + keys(b"/a", b"/b", b"/c", b"/d", b"/e"))
    assert monitor.seen == 4
    assert store.hub.counts()["SET"] == 4


def test_a_command_is_noted_when_it_is_complete() -> None:
    world, monitor = watched()
    frame = b"\x01" + blob(b"/k") + blob(b"x" * 100_000)
    world.send(1, frame[:50_000])
    assert monitor.seen == 0
    world.send(1, frame[50_000:])
    assert brief(monitor) == [["SET", "/k", 1, 100_000, None]]
