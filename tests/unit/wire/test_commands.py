"""The table of commands."""

from __future__ import annotations

import pytest

from tcpstore_async.wire.commands import BY_OPCODE, COMMANDS, MAGIC, Flag, by_opcode

MUTATING = {"SET", "COMPARE_SET", "ADD", "DELETE_KEY", "APPEND", "MULTI_SET", "QUEUE_PUSH", "QUEUE_POP", "BARRIER"}


def test_opcodes_and_names_are_pytorchs() -> None:
    names = (
        "VALIDATE SET COMPARE_SET GET ADD CHECK WAIT GETNUMKEYS DELETE_KEY APPEND MULTI_GET MULTI_SET CANCEL_WAIT PING "
        "QUEUE_PUSH QUEUE_POP QUEUE_LEN LIST_KEYS BARRIER"
    ).split()
    assert [(command.opcode, command.name) for command in COMMANDS] == list(enumerate(names))
    assert MAGIC == 0x3C85F7CE


def test_slots() -> None:
    assert len(BY_OPCODE) == 256
    for opcode, command in enumerate(BY_OPCODE):
        if opcode < len(COMMANDS):
            assert command is COMMANDS[opcode]
        else:
            assert command is None


def test_an_opcode_is_declared_once() -> None:
    with pytest.raises(ValueError, match="opcode 1 is declared twice"):
        by_opcode((*COMMANDS, COMMANDS[1]))


def test_flags() -> None:
    assert {command.name for command in COMMANDS if command.flags & Flag.MUTATES} == MUTATING
    assert {command.name for command in COMMANDS if command.flags & Flag.PARKS} == {"WAIT", "CANCEL_WAIT", "BARRIER"}
    assert {command.name for command in COMMANDS if command.flags & Flag.SESSION} == {"VALIDATE", "PING"}
    assert {command.name for command in COMMANDS if command.flags & Flag.HANDSHAKE} == {"VALIDATE"}


def test_methods_are_named_once() -> None:
    assert len({command.method for command in COMMANDS}) == len(COMMANDS)
