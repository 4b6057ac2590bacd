"""The command table: every opcode of the protocol, in one place.

Each row declares a command's opcode, name, request and reply codecs, the method that executes it, its flags and its
documentation. Servers, sessions, clients and `docs/wire.md` are derived from the rows. What the methods do is not known
here. `docs/design.md` has a checklist for adding an opcode; `tests/test_completeness.py` names what is missing.
"""

from enum import IntFlag
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
    ReplyCodec,
    RequestCodec,
)

MAGIC: Final = 0x3C85F7CE
"""The magic number of VALIDATE."""

SERVER_KEY: Final = b"tcpstore_async/server"
"""CHECK finds this reserved key on servers with the extension; GET returns the server's identity in JSON.

No stock client can name it, since their keys begin with `/`. It is not a key of the store: nothing counts or lists it.
"""

WORKERS_KEY: Final = b"init/"
"""PyTorch's counter of the ranks that have joined: the one key of its client without a slash before it."""

JOINS_KEY: Final = b"tcpstore_async/joins"
"""GET of this reserved key returns how many ranks the server's owner expects to join; absent without an owner."""


class Flag(IntFlag):
    """What a server must know about a command besides its codecs."""

    MUTATES = 1
    """May change what is stored."""
    PARKS = 2
    """The method's first argument is the waiter, which it parks or releases. A client's call may block."""
    SESSION = 4
    """Concerns the connection: the method belongs to the session, not to the keyspace."""
    HANDSHAKE = 8
    """Must be the first command of a connection, and occur only there."""
    EXTENSION = 16
    """Not part of PyTorch's protocol: send it only to a server known to have it."""
    HOLDS = 32
    """The method's first argument is the waiter, which then holds something, or no longer; it does not block."""
    STORES = 64
    """May make the store hold more than before."""
    WHOLE = 128
    """Concerns all keys of the store."""
    FIRST = 256
    """Allowed to a peer that has yet to authenticate, of keys to the server's identity only."""


MUTATES, PARKS, SESSION, HANDSHAKE = Flag.MUTATES, Flag.PARKS, Flag.SESSION, Flag.HANDSHAKE
EXTENSION, HOLDS = Flag.EXTENSION, Flag.HOLDS
STORES, WHOLE, FIRST = Flag.MUTATES | Flag.STORES, Flag.WHOLE, Flag.FIRST


class Command:
    """One row of the table."""

    def __init__(
        self, opcode: int, name: str, request: RequestCodec, reply: ReplyCodec, method: str, flags: int, doc: str
    ) -> None:
        self.opcode = opcode
        self.prefix = bytes([opcode])
        """The first byte of its requests."""
        self.name = name
        self.request = request
        self.reply = reply
        self.method = method
        """The name of the method that executes it, and of the client's method if users can call it."""
        self.flags = flags
        self.doc = doc
        """What it does, in Markdown, for `docs/wire.md`."""
        # Asked for each store and session: `&` of an enum takes 2 µs in any build.
        self.mutates: bool = bool(flags & Flag.MUTATES)
        self.parks: bool = bool(flags & Flag.PARKS)
        self.holds: bool = bool(flags & Flag.HOLDS)
        self.stores: bool = bool(flags & Flag.STORES)
        self.whole: bool = bool(flags & Flag.WHOLE)
        self.session: bool = bool(flags & Flag.SESSION)
        self.handshake: bool = bool(flags & Flag.HANDSHAKE)
        self.first: bool = bool(flags & Flag.FIRST)


COMMANDS: Final = (
    #       opcode  name          request          reply          method         flags
    Command(0x00, "VALIDATE",     U32,             NO_REPLY,      "validate",    SESSION | HANDSHAKE,
            "Must be the first frame of a connection, with the magic number 0x3c85f7ce. A wrong number closes it."),
    Command(0x01, "SET",          KEY_VALUE,       NO_REPLY,      "set",         STORES,
            "Stores the value. Wakes all waiters of the key."),
    Command(0x02, "COMPARE_SET",  KEY_VALUE_VALUE, VALUE,         "compare_set", STORES,
            "Stores the second value if the current one equals the first; a missing key equals the empty value. "
            "Replies with the value afterwards or, if the key is missing and the first value is not empty, with the "
            "first value. Wakes all waiters of the key if it stored."),
    Command(0x03, "GET",          KEY,             VALUE,         "get",         FIRST,
            "Replies with the value, or with the empty value if the key is missing."),
    Command(0x04, "ADD",          KEY_I64,         NUMBER,        "add",         STORES,
            "Adds to the number at the start of the value's text, 0 if the key is missing, modulo 2^64. Stores the sum "
            "as decimal text and replies with it. Wakes all waiters of the key, before the reply. Closes the "
            "connection if the text starts with no number or with one outside int64."),
    Command(0x05, "CHECK",        KEYS,            PRESENCE,      "check",       FIRST,
            "Replies 0 if every key exists, else 1. A queue with items exists."),
    Command(0x06, "WAIT",         KEYS,            WAKE,          "wait",        PARKS,
            "Replies 0 at once if every key exists, as CHECK sees it. Otherwise registers the connection under each "
            "missing key, as often as it is named, and replies 0 when each of them has appeared once; a DELETE_KEY in "
            "between does not undo that. A second WAIT replaces the number of registrations to wait for, but not the "
            "registrations."),
    Command(0x07, "GETNUMKEYS",   NOTHING,         NUMBER,        "num_keys",    WHOLE,
            "Replies with the number of keys, without queues."),
    Command(0x08, "DELETE_KEY",   KEY,             NUMBER,        "delete_key",  MUTATES,
            "Removes a value, never a queue. Replies 1 if it existed, else 0. Wakes no waiter."),
    Command(0x09, "APPEND",       KEY_VALUE,       NO_REPLY,      "append",      STORES,
            "Appends to the value; creates it if the key is missing. Wakes all waiters of the key."),
    Command(0x0A, "MULTI_GET",    KEYS,            VALUES,        "multi_get",   0,
            "Replies with the values in order, empty ones for missing keys."),
    Command(0x0B, "MULTI_SET",    ITEMS,           NO_REPLY,      "multi_set",   STORES,
            "Sets all pairs, in order, or none. Wakes all waiters of the keys."),
    Command(0x0C, "CANCEL_WAIT",  NOTHING,         CANCELED,      "cancel_wait", PARKS,
            "Drops every registration of the connection. Replies 1, whether there was one or not."),
    Command(0x0D, "PING",         U32,             ECHO,          "ping",        SESSION | FIRST,
            "Replies with the number. PyTorch's client sends its process id, right after VALIDATE."),
    Command(0x0E, "QUEUE_PUSH",   KEY_VALUE,       NO_REPLY,      "queue_push",  STORES,
            "Appends to a queue. Counts the item down for its waiters in order of arrival, up to and including the "
            "first whose wait that ends. If the next command of that connection does not take the item, or it closes, "
            "the next waiter is woken."),
    Command(0x0F, "QUEUE_POP",    KEY,             POPPED,        "queue_pop",   MUTATES,
            "Replies with the length before the pop and, unless that is 0, the oldest item. Never blocks: a client "
            "that wants to block sends WAIT first."),
    Command(0x10, "QUEUE_LEN",    KEY,             NUMBER,        "queue_len",   0,
            "Replies with the number of items, 0 if there is no such queue."),
    Command(0x11, "LIST_KEYS",    NOTHING,         COUNTED_KEYS,  "list_keys",   WHOLE,
            "Replies with all keys in any order, without queues."),
    Command(0x12, "BARRIER",      KEY_I64,         WAKE,          "barrier",     STORES | PARKS,
            "Adds 1 to the key's number, as ADD does, but wakes no waiter. If the sum is at least the given number, "
            "wakes all waiters of the key and replies 0. Otherwise registers the connection under the key, and replies "
            "0 when another connection completes the barrier or sets the key. The count is never reset."),

    Command(0x40, "FETCH",        KEY,             DEFERRED_VALUE,  "fetch",     PARKS | EXTENSION,
            "Replies with the value at once if the key exists, as CHECK sees it; otherwise when it appears, as WAIT of "
            "that key followed by GET would: a QUEUE_PUSH ends it with the empty value and leaves the item to the "
            "waiters behind it. Closes the connection if it has to block while another wait is pending."),
    Command(0x41, "CANCEL_FETCH", NOTHING,         NO_VALUE,      "cancel_fetch", PARKS | EXTENSION,
            "As CANCEL_WAIT, for a FETCH. A value that was already on its way precedes the reply."),
    Command(0x42, "WAIT_COUNT",   KEY_I64,         WAKE,          "wait_count",  PARKS | EXTENSION,
            "Replies 0 at once if the number at the start of the value's text, 0 if the key is missing, is at least "
            "the given number; otherwise when a write makes it so, an arrival at a barrier included. A value that is "
            "no number ends no wait. Ended by CANCEL_WAIT. Closes the connection if the text starts with no number, or "
            "if another wait is pending."),
    Command(0x43, "INTRODUCE",    NAMED_VALUES,    NO_REPLY,      "introduce",   SESSION | EXTENSION,
            "Describes the client for the server's log: rank, world_size, host, pid and job as far as they are known, "
            "as text. The pid tells a host's clients apart; a forked process sends its parent's. Closes the connection "
            "for more than 2,048 bytes of names and values, length prefixes of the values included."),
    Command(0x44, "LEASE",        KEY_I64,         POPPED,        "lease",       MUTATES | HOLDS | EXTENSION,
            "As QUEUE_POP, but the item is only leased, under a ticket: a number that the client chooses anew for each "
            "lease. It has left its queue, and goes back if the connection ends. Closes the connection if the ticket "
            "is in use, or if 4,096 leases are not confirmed."),
    Command(0x45, "LEASE_LATER",  KEY_I64,         DEFERRED_POPPED, "lease_later", MUTATES | PARKS | EXTENSION,
            "As LEASE, but if the key does not exist, the reply follows when it does. It takes its place among the "
            "queue's waiters in order of arrival, and takes the item itself. If a plain value exists, or is set, *n* "
            "is 0. Closes the connection if it has to block while another wait is pending."),
    Command(0x46, "CONFIRM",      I64,             NO_REPLY,      "confirm",     HOLDS | EXTENSION,
            "Ends the lease under this ticket: the item has reached its caller and is gone. Without such a lease, does "
            "nothing. May be sent while the connection waits."),
    Command(0x47, "RETURN",       I64,             NO_REPLY,      "give_back",   MUTATES | HOLDS | EXTENSION,
            "Gives up the lease under this ticket. A LEASE_LATER that still waits is answered with an *n* of -1; a "
            "leased item goes back to the front of its queue, and the next waiter is woken as by QUEUE_PUSH. Without "
            "either, does nothing. May be sent while the connection waits, and before a reply that is on its way."),
    Command(0x48, "JOIN",         KEY_VALUE,       NUMBER,        "join",        STORES | SESSION | EXTENSION,
            "As ADD of 1, but only once for each value, the token of a rank (at most 64 bytes), whichever connection "
            "sends it; the connection then represents that rank. An empty token adds nothing, and the reply is the "
            "number less the ranks that have lost all their connections. DELETE_KEY forgets the tokens. Closes the "
            "connection as ADD does, for a token that is too long, and once the owner has stopped a server that it had "
            "announced ranks to: they belong to the next round."),
    Command(0x49, "LEAVE",        NOTHING,         NO_REPLY,      "depart",      HOLDS | EXTENSION,
            "Lets the connection represent no rank any more, without counting that rank as lost."),
    Command(0x4A, "MEET",         KEY_VALUE_3_I64, DEFERRED_VALUE,  "meet",      STORES | PARKS | EXTENSION,
            "Lets an agent, whose name is the value (1 to 512 bytes), join the rounds under the key; the connection "
            "then represents it. The numbers are how many agents a round needs and admits, and the round that the "
            "agent leaves, -1 for none. Replies with three i64 when the agent has a rank: the round, the rank by "
            "name, the world size; or, in place of the rank and the world size, with -1 and a number if it is to time "
            "a last call, or with -2 and 1 if it is redundant, else 0, if the rounds are closed. May be repeated, on "
            "any connection. Ended by CANCEL_FETCH. Closes the connection for other numbers, or if it has to block "
            "while another wait is pending."),
    Command(0x4B, "ATTEND",       KEY_VALUE_2_I64, VALUE,           "attend",    STORES | HOLDS | EXTENSION,
            "Executes an action of the agent whose name is the value, or of nobody if it is empty, and replies with "
            "the state of the rounds under the key. The numbers are the action and its argument. 0: none. 1: a beat; "
            "agents without a sign of life for as many ticks as the argument are removed. 2: the end of the last call "
            "with this number. 3: closes the rounds. 4: removes the agent, unless it has a rank or is redundant. Agents"
            " are also removed when they lose all their connections. DELETE_KEY forgets rounds without agents. Closes "
            "the connection for other numbers."),
    Command(0x4C, "LINK",         NAMED_VALUES,    VALUE,           "link",      SESSION | EXTENSION,
            "Makes the connection a link, or resumes a link whose connection broke. The items and the reply, which is "
            "JSON, are specified in [links.md](links.md), as is everything that follows if the reply says `new` or"
            " `resumed`. After any other reply the connection is as before."),
    Command(0x4D, "TAKEN",        I64,             NO_REPLY,        "taken",     SESSION | EXTENSION,
            "On a single link, acknowledges the replies: how many bytes of them the client has received since LINK. See"
            " [links.md](links.md). Closes the connection if it is no single link, and for a number of bytes that was "
            "not sent."),
    Command(0x4E, "AUTH",         TOKEN,           VALUE,           "auth",        SESSION | EXTENSION | FIRST,
            "Presents a token, of at most 4,096 bytes, which says what the connection may do from now on. The reply is"
            " a JSON object, see below. If its `status` is not `ok`, the server closes the connection. May be repeated:"
            " the last token counts."),
    Command(0x4F, "MISSING",      ITEMS,           VALUE,           "missing",     SESSION | EXTENSION,
            "Asks which of the keys, at most 1,000, are missing, and what may be the reason. The value of a key is "
            "empty, or a number in decimal text: then the key is a counter that is expected to reach it, of which there"
            " may be one. The reply is a JSON object, see below. Waits for nothing. Closes the connection for more "
            "keys, and for a value that is no such number."),
    Command(0x50, "ENTER",        NAMED_VALUES,    DEFERRED_VALUE,  "enter",       PARKS | SESSION | EXTENSION,
            "Puts the connection, which is in the store without a name, into one with a name, for good. The items, and "
            "the reply, which is a JSON object, are specified below. Replies when there is a store of that name, unless"
            " the connection is to own it. Ended by CANCEL_FETCH. Closes the connection if it is in such a store, "
            "waits, has joined, is an agent's, or has unconfirmed leases, also while it waits, and for an invalid "
            "item."),
    Command(0x51, "END_STORE",    NOTHING,         NUMBER,          "end_store",   SESSION | EXTENSION,
            "Ends the store that the connection owns, unless it has other owners: its name is free, nobody enters it "
            "any more, and the connections that are in it are closed after ten seconds. Replies with their number, "
            "without those of this owner. Closes a connection that owns no store."),
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
