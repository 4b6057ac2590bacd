"""The table of commands: what can be said, read like a manual.

Knows: for every opcode its name, the shapes of its request and reply, and the method that gives it its meaning. Must
not know: what that method does.
Invariant: this is the one place where commands are declared. `docs/wire.md` is generated from it.
"""

from enum import IntFlag
from typing import Final

from .codecs import (
    BLOB,
    BLOBS,
    CANCELED,
    COUNTED_KEYS,
    DEFERRED_VALUE,
    ECHO,
    I64,
    ITEMS,
    KEY,
    KEY_I64,
    KEY_VALUE,
    KEY_VALUE_VALUE,
    KEYS,
    NO_REPLY,
    NO_VALUE,
    NOTHING,
    NUMBER,
    POPPED,
    POPPED_LATER,
    PRESENCE,
    U32,
    WAKE,
    ReplyCodec,
    RequestCodec,
)

MAGIC: Final = 0x3C85F7CE
"""What VALIDATE carries."""


SERVER_KEY: Final = b"tcpstore_async/server"
"""CHECK of this key is READY where the commands of the extension are; GET of it says who the server is, in JSON.

No stock client can name it: their keys begin with `/`. It is no key of the store: nothing counts or lists it.
"""

WORKERS_KEY: Final = b"init/"
"""PyTorch's counter of the ranks that have joined; the one key of its client without a slash before it."""

JOINS_KEY: Final = b"tcpstore_async/joins"
"""GET of it says how many ranks the owner of the server expects to join; there only if it has an owner."""


class Flag(IntFlag):
    """What a server must know of a command besides its shapes."""

    MUTATES = 1
    """May change what is stored: a journal would record it."""
    PARKS = 2
    """Takes the waiter before its other arguments, because it parks or releases it."""
    SESSION = 4
    """Concerns the connection; the keyspace has no such method."""
    HANDSHAKE = 8
    """The first command of every connection, and only that."""
    EXTENSION = 16
    """PyTorch has no such command: to be sent to a server only that is known to have it."""
    HOLDS = 32
    """Takes the waiter before its other arguments, because that holds something; nothing waits."""


MUTATES, PARKS, SESSION, HANDSHAKE = Flag.MUTATES, Flag.PARKS, Flag.SESSION, Flag.HANDSHAKE
EXTENSION, HOLDS = Flag.EXTENSION, Flag.HOLDS


class Command:
    """One row. `method` is the command's name on every floor: Keyspace, AsyncTCPStore, Store."""

    def __init__(
        self, opcode: int, name: str, request: RequestCodec, reply: ReplyCodec, method: str, flags: int = 0
    ) -> None:
        self.opcode = opcode
        self.prefix = bytes([opcode])
        """What its frames begin with."""
        self.name = name
        self.request = request
        self.reply = reply
        self.method = method
        self.flags = flags
        self.mutates: bool = bool(flags & Flag.MUTATES)
        self.parks: bool = bool(flags & Flag.PARKS)
        self.holds: bool = bool(flags & Flag.HOLDS)


COMMANDS: Final = (
    #       opcode  name            request          reply         method          flags
    Command(0x00, "VALIDATE",     U32,             NO_REPLY,      "validate",     SESSION | HANDSHAKE),
    Command(0x01, "SET",          KEY_VALUE,       NO_REPLY,      "set",          MUTATES),
    Command(0x02, "COMPARE_SET",  KEY_VALUE_VALUE, BLOB,         "compare_set",  MUTATES),
    Command(0x03, "GET",          KEY,             BLOB,         "get"),
    Command(0x04, "ADD",          KEY_I64,         NUMBER,       "add",          MUTATES),
    Command(0x05, "CHECK",        KEYS,            PRESENCE,    "check"),
    Command(0x06, "WAIT",         KEYS,            WAKE,         "wait",         PARKS),
    Command(0x07, "GETNUMKEYS",   NOTHING,         NUMBER,       "num_keys"),
    Command(0x08, "DELETE_KEY",   KEY,             NUMBER,       "delete_key",   MUTATES),
    Command(0x09, "APPEND",       KEY_VALUE,       NO_REPLY,      "append",       MUTATES),
    Command(0x0A, "MULTI_GET",    KEYS,            BLOBS,        "multi_get"),
    Command(0x0B, "MULTI_SET",    ITEMS,           NO_REPLY,      "multi_set",    MUTATES),
    Command(0x0C, "CANCEL_WAIT",  NOTHING,         CANCELED,     "cancel_wait",  PARKS),
    Command(0x0D, "PING",         U32,             ECHO,         "ping",         SESSION),
    Command(0x0E, "QUEUE_PUSH",   KEY_VALUE,       NO_REPLY,      "queue_push",   MUTATES),
    Command(0x0F, "QUEUE_POP",    KEY,             POPPED,       "queue_pop",    MUTATES),
    Command(0x10, "QUEUE_LEN",    KEY,             NUMBER,       "queue_len"),
    Command(0x11, "LIST_KEYS",    NOTHING,         COUNTED_KEYS, "list_keys"),
    Command(0x12, "BARRIER",      KEY_I64,         WAKE,         "barrier",      MUTATES | PARKS),

    Command(0x40, "FETCH",        KEY,             DEFERRED_VALUE,  "fetch",        PARKS | EXTENSION),
    Command(0x41, "CANCEL_FETCH", NOTHING,         NO_VALUE,     "cancel_fetch", PARKS | EXTENSION),
    Command(0x42, "WAIT_COUNT",   KEY_I64,         WAKE,         "wait_count",   PARKS | EXTENSION),
    Command(0x43, "INTRODUCE",    ITEMS,           NO_REPLY,      "introduce",    SESSION | EXTENSION),
    Command(0x44, "LEASE",        KEY_I64,         POPPED,       "lease",        MUTATES | HOLDS | EXTENSION),
    Command(0x45, "LEASE_LATER",  KEY_I64,         POPPED_LATER, "lease_later",  MUTATES | PARKS | EXTENSION),
    Command(0x46, "CONFIRM",      I64,             NO_REPLY,      "confirm",      HOLDS | EXTENSION),
    Command(0x47, "RETURN",       I64,             NO_REPLY,      "give_back",    MUTATES | HOLDS | EXTENSION),
    Command(0x48, "JOIN",         KEY_VALUE,       NUMBER,       "join",         MUTATES | SESSION | EXTENSION),
    Command(0x49, "LEAVE",        NOTHING,         NO_REPLY,      "depart",       HOLDS | EXTENSION),
)  # fmt: skip


def by_opcode(commands: tuple[Command, ...]) -> tuple[Command | None, ...]:
    """The rows in 256 slots, one for every opcode there could be."""
    slots: list[Command | None] = [None] * 256
    for command in commands:
        if slots[command.opcode] is not None:
            raise ValueError(f"opcode {command.opcode} is declared twice")
        slots[command.opcode] = command
    return tuple(slots)


BY_OPCODE: Final = by_opcode(COMMANDS)

BY_METHOD: Final = {command.method: command for command in COMMANDS}
