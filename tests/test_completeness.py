"""A new command is a row, a method, a vector and a line in the documentation: this names whichever is missing."""

from __future__ import annotations

import functools
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from conformance.cases import own_cases
from conformance.extension import extension_cases
from conformance.script import Deed
from conformance.vectors import libuv_vectors
from properties.test_codecs import REPLIES, REQUESTS
from tcpstore_async.client.aio import AsyncTCPStore
from tcpstore_async.errors import PeerError
from tcpstore_async.keyspace import Keyspace
from tcpstore_async.limits import Limits
from tcpstore_async.session.server import ServerSession
from tcpstore_async.wire import codecs
from tcpstore_async.wire.codecs import ReplyCodec, RequestCodec
from tcpstore_async.wire.commands import BY_OPCODE, COMMANDS, Command, Flag

ROOT = Path(__file__).parent.parent
STOCK = range(19)
INTERNAL = {"validate", "cancel_wait"}
"""What clients say without being asked; so is the extension."""

commands = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)


def test_the_stock_opcodes_are_all_there() -> None:
    assert [BY_OPCODE[opcode] is not None for opcode in STOCK] == [True] * len(STOCK)


@commands
def test_a_command_has_its_method(command: Command) -> None:
    owner = ServerSession if command.flags & Flag.SESSION else Keyspace
    assert inspect.isroutine(getattr(owner, command.method, None)), f"{owner.__name__} lacks {command.method}"
    if command.method not in INTERNAL and not command.flags & Flag.EXTENSION:
        assert inspect.iscoroutinefunction(getattr(AsyncTCPStore, command.method, None)), "AsyncTCPStore lacks it"


@commands
def test_a_command_has_codecs_for_both_directions(command: Command) -> None:
    """That they round-trip is shown in tests/properties/test_codecs.py, for every shape listed there."""
    shown = {id(getattr(codecs, name)) for name, _ in [*REQUESTS, *REPLIES]}
    assert id(command.request) in shown
    assert id(command.reply) in shown
    assert type(command.request).decode is not RequestCodec.decode
    assert type(command.request).encode is not RequestCodec.encode
    assert type(command.reply).decode is not ReplyCodec.decode


@functools.cache
def _opcodes_in_vectors() -> frozenset[int]:
    """Opcodes of the frames that peers say in the recorded vectors and in our own cases."""
    found: set[int] = set()
    for script in [*libuv_vectors(), *own_cases(), *extension_cases()]:
        said: dict[str, bytes] = {}
        for step in script.steps:
            if step.deed is Deed.SAY:
                said[step.peer] = said.get(step.peer, b"") + step.data
        for data in said.values():
            found |= _opcodes(data)
    return frozenset(found)


def _opcodes(data: bytes) -> set[int]:
    """The opcodes of the frames at the beginning of some bytes."""
    found: set[int] = set()
    at = 0
    while at < len(data) and (command := BY_OPCODE[data[at]]) is not None:
        found.add(command.opcode)
        try:
            _, stop = command.request.decode(_nothing, data, at + 1, len(data), Limits())
        except PeerError:
            break
        if stop < 0:
            break
        at = stop
    return found


def _nothing(*fields: Any) -> None:
    return None


@commands
def test_a_command_has_a_vector(command: Command) -> None:
    assert command.opcode in _opcodes_in_vectors(), f"no vector under tests/conformance says {command.name}"


def test_the_recorded_vectors_are_all_there() -> None:
    for name, least in (("vectors.json", 190), ("vectors_badinput.json", 160)):
        assert len(json.loads((ROOT / "tests" / "conformance" / name).read_text())) >= least


@commands
def test_a_command_is_documented(command: Command) -> None:
    assert f"| {command.opcode} | {command.name} |" in (ROOT / "docs" / "wire.md").read_text()
