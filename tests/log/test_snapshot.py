"""Snapshots: whole, in any build, or refused. `replaying.py` compares what follows with every run of the simulators."""

from __future__ import annotations

import ast
import json
import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from log.digests import look
from properties import linked
from properties.linked import chosen
from replaying import Beginning, Noted, replayed
from tcpstore_async.log import snapshot
from tcpstore_async.log.encoding import JournalError
from tcpstore_async.log.journal import read_snapshot, segments_of
from tcpstore_async.log.records import REPLAY, Snapshot, decode_snapshot
from tcpstore_async.log.replay import Replayer
from tcpstore_async.log.snapshot import NotNowError, dump, load

PACKAGE = Path(__file__).parent.parent.parent / "tcpstore_async"
GOLDENS = Path(__file__).parent / "goldens"

AT_REST = {
    "Hub": {"limits", "budget", "clock", "auth", "root", "pending_flush", "on_leave", "on_return", "why_held"},
    "Auth": {"commands", "clock", "authenticate", "require_auth", "elsewhere"},
    "Budget": {
        *("limit", "session_bytes", "root", "clock", "_listing", "_next", "_first_mark", "_second_mark", "_wanted"),
    },
    "NamedStores": {
        *("unnamed", "instance", "identity", "to_work", "clock", "on_work", "on_released", "on_created"),
        *("open_port", "close_port"),
    },
    "LinkRegistry": {
        *("instance", "durable", "store", "portion", "grace", "keep_alive", "clock", "outputs", "on_work", "on_link"),
        *("on_end", "on_refused", "on_refusal", "on_failure"),
    },
    "Store": {"limits", "share", "hub", "budget", "guards", "_listing"},
    "Keyspace": {"freeing", "max_reply"},
    "StoreShare": {"keyspace", "serving"},
    "KeyListCache": {"keyspace", "budget", "most", "capacity"},
    "Guards": {"auth", "table", "guarded"},
    "Carrier": {"registry", "identity", "secret", "stream", "size", "on_evict"},
    "Resumable": {"budget", "outputs"},
    "NamedStore": {"name", "incarnation"},
    "ServerSession": set(),
    "LinkedSession": {"link", "number"},
    "ServerLink": {"examines", "place", "_taking"},
    "SingleLink": {"registry", "session", "stream", "carrier"},
    "LargeValue": {"codec"},
    "PartialValues": {"codec"},
    "PartialList": {"codec"},
    "PartialKeys": {"shared"},
    "EqualSoFar": {"codec"},
}
"""What is not written of a class: given by its constructor, set by whoever has it, a cache, or nothing at rest."""


def attributes() -> dict[str, set[str]]:
    """The attributes that each class of the package sets in its own constructor."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                name = f"{path.stem}.{node.name}"
                found[name] = set()
                for function in node.body:
                    if isinstance(function, ast.FunctionDef) and function.name == "__init__":
                        for one in ast.walk(function):
                            targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", None)]
                            for target in targets:
                                if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
                                    found[name].add(target.attr)
    return found


def test_every_attribute_is_written_or_known_not_to_be() -> None:
    declared = attributes()
    for name, kind in snapshot._NAMES.items():
        written = set(snapshot._LAYOUTS[kind])
        unknown = declared[name] - written - AT_REST.get(kind.__name__, set())
        assert not unknown, f"{name} has attributes that no snapshot has: {sorted(unknown)}"


def snapshots(seed: int) -> list[tuple[Beginning, bytes]]:
    """Snapshots in the middle of a run with links that break."""
    found: list[tuple[Beginning, bytes]] = []

    def keep(start: Beginning, noted: list[Noted]) -> None:
        engine = start.make()
        replayer = Replayer(engine, lambda session, pieces: None)
        for number, one in enumerate(noted):
            for event in one.events:
                replayer.execute(event)
            if number % 20 == 10:
                try:
                    found.append((start, dump(replayer)))
                except NotNowError:
                    continue

    with replayed(1000, keep):
        linked.run(chosen(seed))
    return found


@pytest.fixture(scope="module")
def some() -> list[tuple[Beginning, bytes]]:
    found = [one for seed in range(6) for one in snapshots(seed)]
    assert len(found) > 5
    return found


def read(start: Beginning, data: bytes) -> bytes:
    replayer = Replayer(start.make(), lambda session, pieces: None)
    load(data, replayer)
    return dump(replayer)


def test_what_is_read_is_what_was_written(some: list[tuple[Beginning, bytes]]) -> None:
    for start, data in some:
        assert read(start, data) == data


def test_damaged_bytes_are_refused_or_read(some: list[tuple[Beginning, bytes]]) -> None:
    """A checksum finds them before; without it, nothing else than an error comes of them."""
    rng = random.Random(4)
    refused = 0
    for _ in range(400):
        start, data = rng.choice(some)
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            load(bytes(damaged), Replayer(start.make(), lambda session, pieces: None))
        except JournalError:
            refused += 1
    assert refused > 100


def changed(parts: Any, rng: random.Random) -> None:
    """Change one value somewhere in a tree."""
    while True:
        keys = list(parts) if isinstance(parts, dict) else range(len(parts))
        key = rng.choice(keys)
        value = parts[key]
        if isinstance(value, (list, dict)) and value and rng.random() < 0.95:
            parts = value
        else:
            parts[key] = rng.choice(
                [None, True, -1, 0, 7, 2**40, 1.5, b"x", "m", [], [3], ["t", 1], ["m", [2], "step"]]
            )
            return


@pytest.mark.parametrize("seed", range(4))
def test_a_changed_state_is_refused_or_read(some: list[tuple[Beginning, bytes]], seed: int) -> None:
    """Its values too: each has a type, and a place."""
    rng = random.Random(seed)
    for _ in range(100):
        start, data = rng.choice(some)
        parts = msgspec.msgpack.decode(data)
        for _ in range(rng.randint(1, 3)):
            changed(parts, rng)
        with suppress(JournalError):
            load(msgspec.msgpack.encode(parts), Replayer(start.make(), lambda session, pieces: None))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 9), st.integers(0, 2**32), st.floats(0, 1e9), st.binary(max_size=50), st.data())
def test_a_file_is_whole_or_refused(segment: int, number: int, now: float, state: bytes, data: st.DataObject) -> None:
    written = Snapshot(segment, number, 7, now, state)
    whole = b"".join(written.encode())
    assert decode_snapshot(whole) == written
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(JournalError):
        decode_snapshot(whole[:cut])
    at, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    damaged = bytearray(whole)
    damaged[at] ^= 1 << bit
    with pytest.raises(JournalError):
        decode_snapshot(bytes(damaged))


def test_a_snapshot_of_another_layout_is_refused(some: list[tuple[Beginning, bytes]]) -> None:
    start, data = some[0]
    parts = msgspec.msgpack.decode(data)
    name = next(iter(parts[0]))
    parts[0][name].append("more")
    with pytest.raises(JournalError, match="was written by another version"):
        load(msgspec.msgpack.encode(parts), Replayer(start.make(), lambda session, pieces: None))


@pytest.mark.parametrize("folder", sorted(GOLDENS.iterdir()), ids=lambda folder: str(folder.name))
def test_journals_of_every_version(folder: Path, tmp_path: Path) -> None:
    """What was recorded has the effect that it had. If not, REPLAY has to be raised, and another journal recorded."""
    journal = tmp_path / "journal"
    shutil.copytree(folder / "journal", journal)
    expected = json.loads((folder / "whole.json").read_text())
    if int(folder.name) != REPLAY:  # its records mean something else: a snapshot is all that is read
        for segment in segments_of(journal):
            segment.unlink()
        expected = json.loads((folder / "snapshot.json").read_text())
    assert read_snapshot(journal) is not None
    assert look(journal, meaning=True) == expected
