"""The command table. What it declares today must not change; new rows may follow without a change here."""

from __future__ import annotations

import pytest

from tcpstore_async.wire import commands
from tcpstore_async.wire.commands import BY_OPCODE, COMMANDS, JOINS_KEY, MAGIC, SERVER_KEY, by_opcode

MUTATING = {"SET", "COMPARE_SET", "ADD", "DELETE_KEY", "APPEND", "MULTI_SET", "QUEUE_PUSH", "QUEUE_POP", "BARRIER"}
MUTATING |= {"LEASE", "LEASE_LATER", "RETURN", "JOIN", "MEET", "ATTEND"}
PARKING = {"WAIT", "CANCEL_WAIT", "BARRIER", "FETCH", "CANCEL_FETCH", "WAIT_COUNT", "LEASE_LATER", "MEET"}
SESSION = {"VALIDATE", "PING", "INTRODUCE", "JOIN"}
HOLDING = {"LEASE", "CONFIRM", "RETURN", "LEAVE", "ATTEND"}
EXTENSION = [
    "FETCH", "CANCEL_FETCH", "WAIT_COUNT", "INTRODUCE", "LEASE", "LEASE_LATER", "CONFIRM", "RETURN", "JOIN", "LEAVE",
    "MEET", "ATTEND",
]  # fmt: skip
FIRST = 64
"""The first opcode of the extension: far from PyTorch's, which grow from 19."""


def test_opcodes_and_names_are_pytorchs() -> None:
    names = (
        "VALIDATE SET COMPARE_SET GET ADD CHECK WAIT GETNUMKEYS DELETE_KEY APPEND MULTI_GET MULTI_SET CANCEL_WAIT PING "
        "QUEUE_PUSH QUEUE_POP QUEUE_LEN LIST_KEYS BARRIER"
    ).split()
    stock = [command for command in COMMANDS if command.opcode < FIRST]
    assert [(command.opcode, command.name) for command in stock] == list(enumerate(names))
    assert MAGIC == 0x3C85F7CE


def test_opcodes_and_names_of_the_extension() -> None:
    ours = [(command.opcode, command.name) for command in COMMANDS if command.opcode >= FIRST]
    assert ours[: len(EXTENSION)] == list(enumerate(EXTENSION, FIRST))


def test_commands_of_the_extension_have_a_version() -> None:
    for command in COMMANDS:
        assert bool(command.since) == (command.opcode >= FIRST), command.name


def test_slots() -> None:
    assert len(BY_OPCODE) == 256
    declared = {command.opcode: command for command in COMMANDS}
    assert len(declared) == len(COMMANDS)
    for opcode, command in enumerate(BY_OPCODE):
        assert command is declared.get(opcode)


def test_an_opcode_is_declared_once() -> None:
    with pytest.raises(ValueError, match="opcode 1 is declared twice"):
        by_opcode((*COMMANDS, COMMANDS[1]))


def test_flags() -> None:
    known = [command for command in COMMANDS if command.opcode < FIRST + len(EXTENSION)]
    assert {command.name for command in known if command.flags & commands.MUTATES} == MUTATING
    assert {command.name for command in known if command.flags & commands.PARKS} == PARKING
    assert {command.name for command in known if command.flags & commands.SESSION} == SESSION
    assert {command.name for command in known if command.flags & commands.HOLDS} == HOLDING
    assert {command.name for command in COMMANDS if command.flags & commands.HANDSHAKE} == {"VALIDATE"}


def test_methods_are_named_once() -> None:
    assert len({command.method for command in COMMANDS}) == len(COMMANDS)


@pytest.mark.parametrize("key", [SERVER_KEY, JOINS_KEY])
def test_no_stock_client_can_name_a_reserved_key(key: bytes) -> None:
    assert not key.startswith((b"/", b"init/"))
