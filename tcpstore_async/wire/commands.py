"""The command table: every opcode of the protocol, in one place.

Each row declares a command's opcode, name, request and reply codecs, the method that executes it, its flags and its
documentation. Servers, sessions, the version of the extension and `docs/wire.md` are derived from the rows. Must not
know what the methods do.

`CONTRIBUTING.md` lists what a new opcode takes; `tests/test_completeness.py` names what is missing.
"""

from dataclasses import dataclass, field
from typing import Final

from .codecs import (
    CANCELED,
    COUNTED_KEYS,
    DEFERRED_POPPED,
    DEFERRED_VALUE,
    ECHO,
    I64,
    ITEMS,
    KEY,
    KEY_I64,
    KEY_VALUE,
    KEY_VALUE_2_I64,
    KEY_VALUE_3_I64,
    KEY_VALUE_VALUE,
    KEYS,
    NAMED_VALUES,
    NO_REPLY,
    NO_VALUE,
    NOTHING,
    NUMBER,
    POPPED,
    PRESENCE,
    TOKEN,
    U32,
    VALUE,
    VALUES,
    WAKE,
    WHOLE_NAMED_VALUES,
    ReplyCodec,
    RequestCodec,
)

MAGIC: Final = 0x3C85F7CE
"""The magic number of VALIDATE."""

SERVER_KEY: Final = b"tcpstore_async/server"
"""Reserved key that CHECK finds on servers with the extension; GET returns the server's identity in JSON.

No stock client can name it: their keys begin with `/`. It is not a key of the store: nothing counts or lists it.
"""

WORKERS_KEY: Final = b"init/"
"""PyTorch's counter of the ranks that have joined: the one key of its client without a slash before it."""

JOINS_KEY: Final = b"tcpstore_async/joins"
"""Reserved key whose GET returns how many ranks the server's owner expects; absent without an owner."""


# Flags of a row: what a server must know about a command besides its codecs. They are integers because `&` of an enum
# takes a microsecond in any build.

MUTATES: Final = 1
"""May change what is stored."""
PARKS: Final = 2
"""The method's first argument is the waiter, which it parks or releases. A client's call may block."""
SESSION: Final = 4
"""Concerns the connection: the method belongs to the session, not to the keyspace."""
HANDSHAKE: Final = 8
"""Must be the first command of a connection, and occur only there."""
HOLDS: Final = 16
"""The method's first argument is the waiter, which takes or releases something; a client's call does not block."""
STORES: Final = 32
"""May make the store hold more than before. Implies MUTATES."""
WHOLE: Final = 64
"""Concerns all keys of the store."""
FIRST: Final = 128
"""Allowed to a peer that has yet to authenticate, of keys to the server's identity only."""
INTERNAL: Final = 256
"""Sent by clients of their own accord: no method of a store is named after it."""


@dataclass(eq=False)
class Command:
    """One row of the table."""

    opcode: int
    name: str
    request: RequestCodec
    reply: ReplyCodec
    method: str
    """The name of the method that executes it, and of the stores' methods unless it is INTERNAL."""
    flags: int
    doc: str
    """What it does, in Markdown, for `docs/wire.md`."""
    since: int = 0
    """Version of the extension that added it; 0 for PyTorch's commands, which every server has."""
    prefix: bytes = field(init=False)
    """The first byte of its requests."""

    def __post_init__(self) -> None:
        self.prefix = bytes([self.opcode])
        if self.flags & STORES:
            self.flags |= MUTATES


COMMANDS: Final = (
    #       opcode  name          request          reply          method         flags
    Command(0x00, "VALIDATE",     U32,             NO_REPLY,      "validate",    SESSION | HANDSHAKE | INTERNAL,
            "Must be the first frame of a connection, and only that. The number is 0x3c85f7ce."),
    Command(0x01, "SET",          KEY_VALUE,       NO_REPLY,      "set",         STORES,
            "Stores the value."),
    Command(0x02, "COMPARE_SET",  KEY_VALUE_VALUE, VALUE,         "compare_set", STORES,
            "Stores the second value if the current one equals the first; a missing key counts as the empty value. "
            "Replies with the resulting value or, if the key is missing and the first value is not empty, with the "
            "first value."),
    Command(0x03, "GET",          KEY,             VALUE,         "get",         FIRST,
            "Replies with the value, empty if the key is missing."),
    Command(0x04, "ADD",          KEY_I64,         NUMBER,        "add",         STORES,
            "Adds to the number at the start of the value's text (0 if the key is missing), modulo 2^64. Stores the "
            "sum as decimal text and replies with it. Error: the text starts with no number, or with one that is no "
            "int64."),
    Command(0x05, "CHECK",        KEYS,            PRESENCE,      "check",       FIRST,
            "Replies 0 if every key exists, else 1. A queue exists if it has items."),
    Command(0x06, "WAIT",         KEYS,            WAKE,          "wait",        PARKS,
            "Replies 0 at once if every key exists, as CHECK sees it. Otherwise registers the connection under each "
            "missing key, and replies 0 once each has appeared, even if deleted since."),
    Command(0x07, "GETNUMKEYS",   NOTHING,         NUMBER,        "num_keys",    WHOLE,
            "Replies with the number of keys, without queues."),
    Command(0x08, "DELETE_KEY",   KEY,             NUMBER,        "delete_key",  MUTATES,
            "Removes a value, never a queue. Replies 1 if it existed, else 0."),
    Command(0x09, "APPEND",       KEY_VALUE,       NO_REPLY,      "append",      STORES,
            "Appends to the value; creates it if the key is missing."),
    Command(0x0A, "MULTI_GET",    KEYS,            VALUES,        "multi_get",   0,
            "Replies with the values in order, empty for missing keys."),
    Command(0x0B, "MULTI_SET",    ITEMS,           NO_REPLY,      "multi_set",   STORES,
            "Sets all pairs in order, or none, before it wakes waiters."),
    Command(0x0C, "CANCEL_WAIT",  NOTHING,         CANCELED,      "cancel_wait", PARKS | INTERNAL,
            "Drops the registrations of the connection, if there are any."),
    Command(0x0D, "PING",         U32,             ECHO,          "ping",        SESSION | FIRST | INTERNAL,
            "Replies with the number. PyTorch's client sends its process id, right after VALIDATE."),
    Command(0x0E, "QUEUE_PUSH",   KEY_VALUE,       NO_REPLY,      "queue_push",  STORES,
            "Appends to a queue. The item counts for the queue's waiters in order of arrival, up to and including the "
            "first whose wait ends. If that connection's next command does not take the item, or it closes, the next "
            "waiter is woken."),
    Command(0x0F, "QUEUE_POP",    KEY,             POPPED,        "queue_pop",   MUTATES,
            "Replies with the length before the pop and, unless that is 0, the oldest item. Never blocks: to block, "
            "send WAIT first."),
    Command(0x10, "QUEUE_LEN",    KEY,             NUMBER,        "queue_len",   0,
            "Replies with the number of items, 0 if there is no such queue."),
    Command(0x11, "LIST_KEYS",    NOTHING,         COUNTED_KEYS,  "list_keys",   WHOLE,
            "Replies with all keys, in any order, without queues."),
    Command(0x12, "BARRIER",      KEY_I64,         WAKE,          "barrier",     STORES | PARKS,
            "Adds 1 to the key's number, as ADD does, but wakes no waiter. If the sum is at least the given number, "
            "wakes all waiters of the key and replies 0. Otherwise replies 0 when another connection completes the "
            "barrier or sets the key. The count is never reset."),

    Command(0x40, "FETCH",        KEY,             DEFERRED_VALUE,  "fetch",     PARKS | INTERNAL,
            "Replies with the value once the key exists, like WAIT for that key followed by GET: a QUEUE_PUSH ends it "
            "with the empty value and leaves the item to the waiters behind it.", since=1),
    Command(0x41, "CANCEL_FETCH", NOTHING,         NO_VALUE,      "cancel_fetch", PARKS | INTERNAL,
            "Like CANCEL_WAIT, for FETCH, MEET and ENTER. A reply to these that has already been sent precedes this "
            "one.", since=1),
    Command(0x42, "WAIT_COUNT",   KEY_I64,         WAKE,          "wait_count",  PARKS | INTERNAL,
            "Replies 0 once the number at the start of the value's text (0 if the key is missing) is at least the "
            "given number: at once, or after a write or an arrival at a barrier. Ended by CANCEL_WAIT. Error: the text "
            "starts with no number; such a value written later only ends no wait.", since=1),
    Command(0x43, "INTRODUCE",    NAMED_VALUES,    NO_REPLY,      "introduce",   SESSION | INTERNAL,
            "Describes the client for the server's log: rank, world_size, host, pid and job, as text, as far as known. "
            "The pid, of a forked process its parent's, distinguishes clients on one host. Error: names and values, "
            "with the length prefixes of the values, exceed 2,048 bytes.", since=1),
    Command(0x44, "LEASE",        KEY_I64,         POPPED,        "lease",       MUTATES | HOLDS | INTERNAL,
            "Like QUEUE_POP, but only leases the item, under a ticket: a number that the client chooses, new for each "
            "lease. The item leaves its queue. If the connection ends, unconfirmed items go back in their original "
            "order. Error: the ticket is in use, or 4,096 leases are unconfirmed.", since=2),
    Command(0x45, "LEASE_LATER",  KEY_I64,         DEFERRED_POPPED, "lease_later", MUTATES | PARKS | INTERNAL,
            "Like LEASE, but if the key does not exist, it joins the queue's waiters in order of arrival, takes the "
            "item itself, and replies then. If the key has a plain value, or is set to one, *n* is 0.", since=2),
    Command(0x46, "CONFIRM",      I64,             NO_REPLY,      "confirm",     HOLDS | INTERNAL,
            "Ends the lease under this ticket, and the item is gone: to be sent right before the caller gets it. Does "
            "nothing if there is no such lease. May be sent while the connection waits.", since=2),
    Command(0x47, "RETURN",       I64,             NO_REPLY,      "give_back",   MUTATES | HOLDS | INTERNAL,
            "Gives up the lease under this ticket: its item goes back to the front of its queue, and the next waiter "
            "is woken as by QUEUE_PUSH. A LEASE_LATER that still waits gets a reply with an *n* of -1. Does nothing if "
            "there is neither. May be sent while the connection waits, and while a reply is on its way.", since=2),
    Command(0x48, "JOIN",         KEY_VALUE,       NUMBER,        "join",        STORES | SESSION | INTERNAL,
            "Like ADD of 1, but counts each value, a rank's token of at most 64 bytes, only once, on however many "
            "connections, which then represent the rank. An empty token adds nothing, and the reply is the number "
            "minus the ranks that have lost all their connections. DELETE_KEY forgets the tokens. Error: as for ADD; a "
            "longer token; the owner has stopped a server that was told how many ranks to expect, so the rank belongs "
            "to the next round.", since=2),
    Command(0x49, "LEAVE",        NOTHING,         NO_REPLY,      "depart",      HOLDS | INTERNAL,
            "The connection no longer represents a rank, which does not count as lost.", since=2),
    Command(0x4A, "MEET",         KEY_VALUE_3_I64, DEFERRED_VALUE,  "meet",      STORES | PARKS | INTERNAL,
            "The agent whose name is the value (1 to 512 bytes) joins the rounds under the key; the connection then "
            "represents it. The numbers are the minimum and maximum number of agents in a round, and the round that "
            "the agent is leaving, or -1. Replies with three i64: once the agent has a rank, the round, the rank in "
            "order of names, and the world size; if it is to time a last call, the round, -1 and the number of the "
            "call; if the rounds are closed, the round, -2 and 1 for a redundant agent, else 0. May be repeated, on "
            "any connection. Error: any other numbers; the server's owner has stopped it or ended, and the rounds are "
            "not closed.", since=3),
    Command(0x4B, "ATTEND",       KEY_VALUE_2_I64, VALUE,           "attend",    STORES | HOLDS | INTERNAL,
            "Executes an action for the agent whose name is the value (for none if it is empty), and replies with the "
            "state of the rounds under the key. The numbers are the action and its argument. 0: nothing; if the "
            "argument is 1, a JSON object follows the state. 1: a beat; agents without a sign of life for as many "
            "ticks as the argument says are removed. 2: ends the last call with this number. 3: closes the rounds; the "
            "argument is 1 if this agent's workers have succeeded. 4: removes the agent, unless it has a rank or is "
            "redundant. DELETE_KEY forgets rounds without agents. Error: any other action; a beat with an argument "
            "below 1; an agent other than the one for which the connection's MEET still waits.", since=3),
    Command(0x4C, "LINK",         WHOLE_NAMED_VALUES, VALUE,        "link",      SESSION | INTERNAL,
            "Makes the connection a link, or resumes a link whose connection broke: see "
            "[links.md](links.md). Error: more than 4,096 bytes.", since=4),
    Command(0x4D, "TAKEN",        I64,             NO_REPLY,        "taken",     SESSION | INTERNAL,
            "Acknowledges so many bytes of replies on a [single link](links.md#single-links), since LINK. Error: it is "
            "no single link; fewer bytes have been sent.", since=5),
    Command(0x4E, "AUTH",         TOKEN,           VALUE,           "auth",        SESSION | FIRST | INTERNAL,
            "Presents a token of at most 4,096 bytes, which determines what the connection may do from now on. Unless "
            "the `status` in the reply is `ok`, the server closes the connection. May be repeated: the last token "
            "counts.", since=6),
    Command(0x4F, "MISSING",      ITEMS,           VALUE,           "missing",     SESSION | INTERNAL,
            "Asks which of the keys (at most 1,000, of at most 131,072 bytes together) are missing, and for facts that "
            "show why. The value of a key is empty; one key may instead have a number of at most 9 decimal digits: a "
            "counter that is expected to reach it, 0 if unknown. Never waits. Error: more keys; a value that is "
            "neither.", since=7),
    Command(0x50, "ENTER",        NAMED_VALUES,    DEFERRED_VALUE,  "enter",       PARKS | SESSION | INTERNAL,
            "Moves the connection from the unnamed store into a named one, for good. Replies once there is a store of "
            "that name, or at once if the connection is to own it. Error: an invalid item; or the connection is in a "
            "named store, waits, has joined, represents an agent, or has unconfirmed leases, even if only since it "
            "waits for the store.", since=8),
    Command(0x51, "END_STORE",    NOTHING,         NUMBER,          "end_store",   SESSION | INTERNAL,
            "Ends the store that the connection owns, unless it has other owners: its name is free, no connection can "
            "enter it any more, and those in it are closed after ten seconds. Replies with their number, not counting "
            "this owner's, which represent no rank any more, as after LEAVE. Error: it owns no store.", since=8),
)  # fmt: skip


def by_opcode(commands: tuple[Command, ...]) -> tuple[Command | None, ...]:
    """Return the rows in 256 slots, indexed by opcode."""
    slots: list[Command | None] = [None] * 256
    for command in commands:
        if slots[command.opcode] is not None:
            raise ValueError(f"opcode {command.opcode} is declared twice")
        slots[command.opcode] = command
    return tuple(slots)


BY_OPCODE: Final = by_opcode(COMMANDS)

BY_METHOD: Final = {command.method: command for command in COMMANDS}

EXTENSION: Final = max([command.since for command in COMMANDS])
"""The version of the extension: its commands up to this version are implemented."""
