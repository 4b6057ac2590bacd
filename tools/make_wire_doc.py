"""Writes docs/wire.md from the table of commands: `python tools/make_wire_doc.py`. tests/test_docs.py proves it fresh.

What a command means stands here, in one sentence each; how it looks on the wire is read from the table.
"""

from __future__ import annotations

from pathlib import Path

from tcpstore_async.limits import KIB, MIB, Limits
from tcpstore_async.wire import codecs
from tcpstore_async.wire.commands import COMMANDS, JOINS_KEY, MAGIC, SERVER_KEY, Command, Flag

TARGET = Path(__file__).parent.parent / "docs" / "wire.md"

SHAPES = {
    "NOTHING": "",
    "U32": "u32",
    "I64": "i64",
    "KEY": "key",
    "KEY_I64": "key, i64",
    "KEY_VALUE": "key, value",
    "KEY_VALUE_VALUE": "key, value, value",
    "KEYS": "u64 *n*, *n* × key",
    "ITEMS": "u64 *n*, *n* × (key, value)",
    "NO_REPLY": "",
    "ECHO": "u32",
    "NUMBER": "i64",
    "PRESENCE": f"u8: {codecs.READY} or {codecs.NOT_READY}",
    "WAKE": f"u8: {codecs.STOP_WAITING}, now or later",
    "CANCELED": f"u8: {codecs.WAIT_CANCELED}",
    "BLOB": "value",
    "DEFERRED_VALUE": "value, now or later",
    "NO_VALUE": "8 bytes `ff`",
    "BLOBS": "*n* × value",
    "COUNTED_KEYS": "i64 *n*, *n* × key",
    "POPPED": "i64 *n*; value if *n* > 0",
    "POPPED_LATER": "i64 *n*; value if *n* > 0; now or later",
}

MEANINGS = {
    "VALIDATE": f"The first frame of every connection, and only that: the magic number {MAGIC:#x}, else it is closed.",
    "SET": "Stores the value. Wakes those who wait for the key.",
    "COMPARE_SET": "Stores the second value if the present one equals the first; a missing key equals the empty value. "
    "Replies the value afterwards; if the key is missing and the first value is not empty, the first value. "
    "Wakes those who wait for the key if it stored.",
    "GET": "Replies the value; the empty one if the key is missing.",
    "ADD": "Adds to the number that the value's text begins with, 0 if the key is missing, modulo 2^64; stores the sum "
    "as decimal text and replies it. Wakes those who wait for the key, before the reply. Closes the connection if the "
    "text begins with no number or with one outside int64.",
    "CHECK": "0 if every key is present, 1 if not. A queue that holds items is present.",
    "WAIT": "0 at once if every key is present, as CHECK sees it. Else the connection is registered under each missing "
    "key, as often as it is named, and 0 follows when they have all appeared once. A DELETE_KEY in between does not "
    "undo that. A second WAIT replaces what is counted, not the registrations.",
    "GETNUMKEYS": "Replies the number of keys, queues not among them.",
    "DELETE_KEY": "Removes a value, never a queue; replies 1 if it was there, else 0. Wakes nobody.",
    "APPEND": "Appends to the value; creates it if the key is missing. Wakes those who wait for the key.",
    "MULTI_GET": "Replies the values in order, empty ones for missing keys.",
    "MULTI_SET": "Sets all pairs, in order, or none. Wakes those who wait for the keys.",
    "CANCEL_WAIT": "Drops every registration of the connection; 1, whether there was one or not.",
    "PING": "Replies the number. PyTorch's client sends its process id, right behind VALIDATE.",
    "QUEUE_PUSH": "Appends to a queue. Counts the item down for those in line, up to and including the first whose "
    "wait that ends. If what that one says next does not take the item, or it leaves, the next in line is woken.",
    "QUEUE_POP": "Replies the length before the pop and, unless that is 0, the oldest item. Never waits: a client that "
    "wants to WAITs first.",
    "QUEUE_LEN": "Replies the number of items, 0 if there is no such queue.",
    "LIST_KEYS": "Replies all keys in any order, queues not among them.",
    "BARRIER": "Adds 1 to the key's number, as ADD does, without waking anyone. If the sum is at least the number "
    "given: wakes all who wait for the key, and replies 0. Else the connection is registered under the key, and 0 "
    "follows when somebody completes the barrier or sets the key. Nothing ever resets the count.",
    "FETCH": "Replies the value at once if the key is present, as CHECK sees it; else when it appears, as a WAIT of "
    "that one key followed by a GET would: a QUEUE_PUSH ends it with the empty value, and leaves the item to those "
    "behind. Closes the connection if that has to wait and something else waits already.",
    "CANCEL_FETCH": "As CANCEL_WAIT, for a FETCH. If the value was on its way already, it stands before the answer.",
    "WAIT_COUNT": "0 at once if the number that the value's text begins with, 0 if the key is missing, is at least the "
    "number given; else 0 follows when something was written that makes it so, be it the arrival at a barrier; what is "
    "no number ends no wait. Ended by CANCEL_WAIT. Closes the connection if the text begins with no number, or if "
    "something else waits already.",
    "INTRODUCE": "Says who the client is, for the server's log: rank, world_size, host, pid, job, as far as they are "
    "known, each as text. The pid is what tells its processes apart, and a forked process says its parent's. Closes "
    "the connection for more than 2,048 bytes of names and values, lengths of the values included.",
    "LEASE": "As QUEUE_POP, but the item is only lent, under a ticket, a number that the client chooses anew for each: "
    "no command sees it in its queue any more, and it goes back when the connection ends. Closes the connection if the "
    "ticket is in use.",
    "LEASE_LATER": "As LEASE, but if nothing of that name is there the reply follows when something is. It stands in "
    "one line with those who WAIT, in order of arrival, and takes the item itself. If a plain value is there, or is "
    "set, *n* is 0. Closes the connection if that has to wait and something else waits already.",
    "CONFIRM": "The item that was lent under this ticket has reached its caller, and is gone for good. Nothing "
    "happens if there is none. To be sent whatever the connection waits for.",
    "RETURN": "The caller of this ticket has gone. If its LEASE_LATER waits, that is answered with an *n* of -1; if it "
    "was lent an item, that goes back to the front of its queue, and the next in line is woken as by a QUEUE_PUSH. "
    "Else nothing happens. To be sent whatever the connection waits for, without waiting for what is on its way.",
    "JOIN": "As ADD of 1, but once only for each value, the token of a rank, of 64 bytes at most, whichever connection "
    "it comes on; the connection then stands for that rank. With an empty token nothing is added, and the reply is the "
    "number less the ranks that have lost all their connections. DELETE_KEY forgets the tokens. Closes the connection "
    "as ADD does, and for a token that is too long.",
    "LEAVE": "The connection stands for no rank any more, and that rank does not count as lost.",
}

HEAD = """# The wire

<!-- Made by tools/make_wire_doc.py from the table of commands. Edit that, and run it. -->

What a client of PyTorch's TCPStore and this server say to each other. It is PyTorch's protocol; where this server
answers otherwise, [quirks.md](quirks.md) says so.

One TCP connection for each client. A request is one byte, the opcode, and fields; a reply is fields alone. There is no
frame length, no request id and no version. Requests are executed in the order in which they arrive and answered in that
order, but for the replies "now or later", which may come later, between the replies to others. However requests
are cut into packets, the answers are the same.

| field | bytes |
|---|---|
| u8, u32, u64, i64 | an integer, little-endian |
| key, value | u64 length, and as many bytes of any kind |

A key of PyTorch's client begins with `/`, but for the one it counts its workers in, `init/`. The server adds and strips
nothing.

## Commands

"""

FLAGS = {
    Flag.MUTATES: "may change what is stored",
    Flag.PARKS: "registers or releases the connection as a waiter",
    Flag.SESSION: "concerns the connection only",
    Flag.HANDSHAKE: "is the first command, and only that",
    Flag.HOLDS: "makes the connection hold something, or hold it no more",
    Flag.EXTENSION: "must be sent to no server that is not known to have it",
}


EXTENSION = f"""
## The extension

Commands from opcode 64 are this project's own. A stock client never sends them and sees no difference; to PyTorch's
servers they must not be sent.

| opcode | name | request | reply | meaning |
|---|---|---|---|---|
%s
A client asks whether they are there the first time it would use one, and never while it connects: peers exist that
answer PING and expect silence. It sends CHECK of the key `{SERVER_KEY.decode()}`. PyTorch's servers answer 1, for they
have no such key and no client of PyTorch's can name it; this server answers 0. Then GET of that key is answered with
an object of JSON:

| member | |
|---|---|
| `server` | `"tcpstore_async"` |
| `version` | the package's version |
| `extension` | 2: the commands above; 1 has those up to 67, a later number these and more |
| `instance` | text that differs for every server ever started |
| `backend`, `build` | which of its backends this is, and how it was built |

A client that opens a further connection asks there again, and compares `instance`: another server behind the same
address has nothing of the store that the client knows.

GET of `{JOINS_KEY.decode()}` says in decimal text how many ranks the owner of the server expects to join, in all the
stores that it has made on it; the empty value if the server has no owner, 0 once it is about to go. When PyTorch's
counter of workers, `init/`, is past that number, whoever joined last belongs to a store that the owner has yet to make,
or takes the place of a rank that was lost. WAIT_COUNT of that key ends when that many are expected, or with the 0.

A client pops with LEASE or LEASE_LATER, and sends CONFIRM right before it hands the item to its caller: an item that
was on its way when the connection broke, or its caller went, is there for others. Those that one connection leaves
behind come back in their order. A rank that joins with JOIN may do so again after any loss of its connection.

Neither key is counted, listed or deleted, WAIT finds both there, and a command that would write to one closes its
connection.

FETCH, WAIT_COUNT and LEASE_LATER that have to wait drop what WAITs that were replaced have left registered.
"""


def _size(count: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if count >= unit and count % unit == 0:
            return f"{count // unit:,} {name}"
    return f"{count:,} bytes"


def _tail() -> str:
    limits = Limits()
    key, value = _size(limits.key_bytes), _size(limits.value_bytes)
    return f"""
## Closing

The server closes a connection, after the replies to what came before, for: a first frame that is not VALIDATE; a wrong
magic number; an opcode that is not above; ADD or BARRIER on a value that is no number; a length or a count over a
limit, as soon as it is announced; and for what is said of the extension above. A frame that was not complete has had no
effect.

By default a key may have {key}, a value {value} and a request {limits.keys:,} keys, as on PyTorch's
server, and {_size(limits.request_bytes)} in all.
"""


def _shape(shape: object) -> str:
    for name, text in SHAPES.items():
        if getattr(codecs, name) is shape:
            return text or "–"
    raise LookupError(f"SHAPES lacks {shape!r}")


def _row(command: Command) -> str:
    return (
        f"| {command.opcode} | {command.name} | {_shape(command.request)} | {_shape(command.reply)} "
        f"| {MEANINGS[command.name]} |\n"
    )


def _flags() -> str:
    lines = []
    for flag, text in FLAGS.items():
        names = [command.name for command in COMMANDS if command.flags & flag]
        lines.append(f"* {text}: {', '.join(names)}\n")
    return "\n## What a server must know besides\n\n" + "".join(lines)


def render() -> str:
    """The whole page."""
    stock = "".join(_row(command) for command in COMMANDS if not command.flags & Flag.EXTENSION)
    ours = "".join(_row(command) for command in COMMANDS if command.flags & Flag.EXTENSION)
    head = "| opcode | name | request | reply | meaning |\n|---|---|---|---|---|\n"
    return HEAD + head + stock + EXTENSION % ours + _flags() + _tail()


if __name__ == "__main__":
    TARGET.write_text(render())
