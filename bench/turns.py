"""The longest time for which one request holds the loop: every command of the table, with the worst that limits allow.

Run it as `python -m bench.turns` (`PYTHONPATH=build/compiled` for the compiled build). It prints a line for each case:
the longest turn, the limit, and whether it is kept; it ends with 1 if one is not.

A turn is what the server does before others have theirs: one `receive` of what one read brings, one step of a long
command or of the work it left, or the flush of one bunch of woken peers. Each is timed by the processor time of this
thread, so that a busy machine does not count, garbage collection included. The sessions are real and in memory: so many
peers as are woken here cannot have sockets in one process, so a flush writes to /dev/null instead. What the kernel
takes for a write (some 4 µs for each peer) comes on top: `uv.py` bounds it by the number of peers and of bytes in a
turn.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from tcpstore_async.errors import PeerError
from tcpstore_async.limits import Limits
from tcpstore_async.session.identity import build
from tcpstore_async.session.server import Engine, ServerSession
from tcpstore_async.wire.commands import BY_METHOD, COMMANDS, MAGIC

MANY = 131_072
CROWD = 100_000
STORE = 800_000
LARGE = 256
"""MiB of a value grown by APPEND."""

CUT, WHOLE = 5.0, 50.0
"""Milliseconds: what can be cut into turns, and what must be atomic."""

_READ, _READ_ON, _BUNCH = 16 * 1024, 128 * 1024, 512

Case = Callable[["Loop"], None]


def frame(method: str, *fields: Any) -> bytes:
    """The bytes of a command; values are plain."""
    command = BY_METHOD[method]
    return command.prefix + command.request.encode(fields)


def blob(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def names(count: int, length: int = 12) -> list[bytes]:
    return [b"/%0*d" % (length - 1, number) for number in range(count)]


class Loop:
    """A server's turns, without its sockets."""

    def __init__(self) -> None:
        self.engine = Engine(Limits())
        self.engine.identify(b"{}")
        self.engine.announce(0)
        self.longest = 0.0
        self.sink = os.open(os.devnull, os.O_WRONLY)
        self.peer = self.greet()
        self.other = self.greet()

    def greet(self) -> ServerSession:
        session = ServerSession(self.engine, self, "::1", 1, 0.0)
        session.receive(frame("validate", MAGIC))
        return session

    def timed(self, what: Callable[..., object], *arguments: object) -> None:
        began = time.thread_time()
        what(*arguments)
        self.longest = max(self.longest, time.thread_time() - began)

    def say(self, data: bytes, session: ServerSession | None = None) -> None:
        """Have a peer send this, and do all that follows from it."""
        session = session or self.peer
        at = 0
        try:
            while at < len(data):
                size = _READ if session.partial is None and session.input_buffer is None else _READ_ON
                bulk = session.large_value()
                if bulk is None:
                    self.timed(session.receive, data[at : at + size])
                    at += size
                else:
                    with bulk.free_space() as room:
                        count = min(len(room), len(data) - at)
                        room[:count] = data[at : at + count]
                    bulk.fill(count)
                    at += count
                    self.timed(session.receive, b"")
                self.flush([session])
                self.go_on(session)
        except PeerError:
            self.leave(session)

    def go_on(self, session: ServerSession) -> None:
        while session.stalled() or self.engine.keyspace.work or self.engine.pending_flush:
            if session.stalled():
                self.timed(session.receive, b"")
            if self.engine.keyspace.work:
                self.timed(self.engine.keyspace.step)
            self.flush([session])
            pending_flush = self.engine.pending_flush
            while pending_flush:
                bunch = pending_flush[-_BUNCH:]
                del pending_flush[-_BUNCH:]
                self.flush(bunch)

    def flush(self, sessions: Sequence[ServerSession]) -> None:
        self.timed(self._flush, sessions)

    def _flush(self, sessions: Sequence[ServerSession]) -> None:
        for session in sessions:
            if session.out:
                if len(session.out) == 1:
                    os.write(self.sink, session.out[0])
                for piece in session.out:
                    session.unsent -= len(piece)
                session.out.clear()

    def leave(self, session: ServerSession) -> None:
        self.timed(session.leave)
        self.go_on(self.other)

    # What cases begin with, untimed

    def prepare(self, data: bytes, session: ServerSession | None = None) -> None:
        longest = self.longest
        self.say(data, session)
        self.longest = longest

    def grow(self, key: bytes, mebibytes: int = LARGE) -> None:
        """A value that was appended to."""
        for _ in range(mebibytes // 8):
            self.prepare(frame("append", key, blob(bytes(8 << 20))))

    def fill(self, keys: list[bytes], value: bytes = b"v") -> None:
        self.engine.keyspace.multi_set([(key, blob(value)) for key in keys])

    def crowd(self, *requests: bytes) -> list[ServerSession]:
        """Many who wait."""
        sessions = []
        for number in range(CROWD):
            session = self.greet()
            session.receive(requests[number % len(requests)])
            sessions.append(session)
        gc.collect()
        gc.freeze()
        return sessions

    def close(self) -> None:
        os.close(self.sink)


def woken_by(request: bytes, *waits: bytes) -> Case:
    def case(loop: Loop) -> None:
        loop.crowd(*waits)
        loop.say(request)

    return case


def saying(request: bytes, *before: bytes) -> Case:
    def case(loop: Loop) -> None:
        for one in before:
            loop.prepare(one)
        loop.say(request)

    return case


def on_large(*requests: bytes) -> Case:
    def case(loop: Loop) -> None:
        loop.grow(b"/big")
        for request in requests:
            loop.say(request)

    return case


def listed(method: str, length: int, there: bool) -> Case:
    def case(loop: Loop) -> None:
        keys = names(MANY, length)
        if there:
            loop.fill([bytes(bytearray(key)) for key in keys])
        loop.say(frame(method, keys))

    return case


def scattered(method: str, *, keys: bool = True) -> Case:
    def case(loop: Loop) -> None:
        there = names(STORE)
        loop.fill(there)
        if not keys:
            loop.say(frame(method))
            return
        loop.say(frame(method, [bytes(bytearray(there[number * 7919 % STORE])) for number in range(MANY)]))

    return case


def set_many(length: int, there: bool) -> Case:
    def case(loop: Loop) -> None:
        keys = names(MANY, length)
        if there:
            loop.fill([bytes(bytearray(key)) for key in keys])
        loop.say(frame("multi_set", [(key, blob(b"")) for key in keys]))

    return case


def parked(request: bytes, length: int = 12) -> Case:
    """A peer that waits for many keys, or has waited, says something else."""

    def case(loop: Loop) -> None:
        loop.prepare(frame("wait", names(MANY, length)))
        if request:
            loop.say(request)
        else:
            loop.leave(loop.peer)

    return case


def left_over(request: bytes) -> Case:
    def case(loop: Loop) -> None:
        loop.prepare(frame("wait", names(MANY)) + frame("wait", [b"/x"]))
        loop.say(frame("set", b"/x", blob(b"")), loop.other)
        loop.say(request)

    return case


def list_keys(loop: Loop) -> None:
    loop.fill(names(STORE))
    gc.collect()
    gc.freeze()
    loop.say(frame("list_keys"))


def died_in_line(loop: Loop) -> None:
    """Those before it in the line of a queue have all gone or wait for something else, too."""
    loop.crowd(frame("wait", [b"/q", b"/other"]))
    loop.say(frame("queue_push", b"/q", blob(b"")))


def targets(loop: Loop) -> None:
    for number in range(CROWD):
        loop.greet().receive(frame("wait_count", b"/n", number + 1))
    loop.say(frame("add", b"/n", CROWD))


def leased(request: bytes) -> Case:
    def case(loop: Loop) -> None:
        for number in range(MANY):
            loop.peer.receive(frame("queue_push", b"/q", blob(b"")) + frame("lease", b"/q", number))
            loop.peer.out.clear()
            loop.peer.unsent = 0
        if request:
            loop.say(request)
        else:
            loop.leave(loop.peer)

    return case


def joined(loop: Loop) -> None:
    for number in range(CROWD):
        loop.greet().receive(frame("join", b"init/", blob(b"%d" % number)))
    loop.say(frame("delete_key", b"init/"))


WAIT, FETCH, COUNT = frame("wait", [b"/k"]), frame("fetch", b"/k"), frame("wait_count", b"/k", 1)
LATER = frame("lease_later", b"/k", 1)
V = blob(b"7")
SPACES = frame("set", b"/s", blob(b" " * (8 << 20)))
ZEROS = [frame("set", b"/s", blob(b"0" * (8 << 20))), frame("append", b"/s", blob(b"0"))]
EIGHT = blob(bytes(8 << 20))

CASES: dict[str, dict[str, Case]] = {
    "VALIDATE": {"": saying(b"")},
    "SET": {
        "wakes 100,000 WAITs": woken_by(frame("set", b"/k", V), WAIT),
        "wakes 100,000 FETCHes": woken_by(frame("set", b"/k", V), FETCH),
        "wakes all kinds": woken_by(frame("set", b"/k", V), WAIT, FETCH, COUNT, LATER),
        "over 256 MiB": on_large(frame("set", b"/big", V)),
    },
    "COMPARE_SET": {
        "wakes 100,000": woken_by(frame("compare_set", b"/k", blob(b""), V), WAIT),
        "of 256 MiB": on_large(frame("compare_set", b"/big", EIGHT, V)),
    },
    "GET": {"of 256 MiB, APPENDs between": on_large(*[frame("get", b"/big"), frame("append", b"/big", V)] * 3)},
    "ADD": {
        "wakes 100,000": woken_by(frame("add", b"/k", 1), WAIT),
        "reaches 100,000 WAIT_COUNTs": woken_by(frame("add", b"/k", 1), COUNT),
        "reaches 100,000 numbers": targets,
        "to 8 MiB of white space": saying(frame("add", b"/s", 1), SPACES),
    },
    "CHECK": {
        "131,072 keys": listed("check", 12, True),
        "131,072 longest keys": listed("check", 2032, True),
        "among 800,000": scattered("check"),
    },
    "WAIT": {
        "131,072 keys": listed("wait", 12, False),
        "131,072 longest keys": listed("wait", 2032, False),
        "there already": listed("wait", 12, True),
        "a death with 131,072": parked(b""),
        "a death with 131,072 longest": parked(b"", 2032),
        "is over, 131,072 left over": left_over(frame("ping", 1)),
    },
    "GETNUMKEYS": {"of 800,000": scattered("num_keys", keys=False)},
    "DELETE_KEY": {"256 MiB": on_large(frame("delete_key", b"/big"))},
    "APPEND": {
        "wakes 100,000": woken_by(frame("append", b"/k", V), WAIT),
        "862 to 8 MiB of zeros, awaited": saying(frame("append", b"/s", blob(b"0")) * 862, *ZEROS),
        "to 256 MiB": on_large(frame("append", b"/big", EIGHT)),
    },
    "MULTI_GET": {
        "131,072 keys": listed("multi_get", 12, True),
        "131,072 longest keys": listed("multi_get", 2032, True),
        "none of them there": listed("multi_get", 12, False),
        "among 800,000": scattered("multi_get"),
        "of 256 MiB": on_large(frame("multi_get", [b"/big"])),
    },
    "MULTI_SET": {
        "131,072 new keys": set_many(12, False),
        "131,072 keys": set_many(12, True),
        "131,072 new longest keys": set_many(1996, False),
        "131,072 longest keys": set_many(1996, True),
        "wakes 100,000": woken_by(frame("multi_set", [(b"/k", V)]), WAIT),
    },
    "CANCEL_WAIT": {"of 131,072": parked(frame("cancel_wait"))},
    "PING": {"862": saying(frame("ping", 1) * 862)},
    "QUEUE_PUSH": {
        "wakes one of 100,000": woken_by(frame("queue_push", b"/k", V), WAIT),
        "passes over 100,000": died_in_line,
        "wakes 100,000 FETCHes": woken_by(frame("queue_push", b"/k", V), FETCH),
    },
    "QUEUE_POP": {"8 MiB": saying(frame("queue_pop", b"/q"), frame("queue_push", b"/q", EIGHT))},
    "QUEUE_LEN": {"": saying(frame("queue_len", b"/q"))},
    "LIST_KEYS": {"800,000": list_keys},
    "BARRIER": {"of 100,000": woken_by(frame("barrier", b"/k", CROWD + 1), frame("barrier", b"/k", CROWD + 1))},
    "FETCH": {
        "of 256 MiB": on_large(frame("fetch", b"/big")),
        "after a WAIT for 131,072": left_over(frame("fetch", b"/y")),
    },
    "CANCEL_FETCH": {"after a WAIT for 131,072": parked(frame("cancel_fetch"))},
    "WAIT_COUNT": {
        "862 of 8 MiB of zeros": saying(frame("wait_count", b"/s", 0) * 862, *ZEROS),
        "after a WAIT for 131,072": left_over(frame("wait_count", b"/y", 1)),
    },
    "INTRODUCE": {"131,072 names": saying(frame("introduce", [(b"", blob(b""))] * MANY))},
    "LEASE": {"131,072, then a death": leased(b"")},
    "LEASE_LATER": {
        "after a WAIT for 131,072": left_over(frame("lease_later", b"/y", 1)),
        "100,000, and a value": woken_by(frame("set", b"/k", V), LATER),
    },
    "CONFIRM": {"one of 131,072": leased(frame("confirm", 1))},
    "RETURN": {"one of 131,072": leased(frame("give_back", 1))},
    "JOIN": {"100,000, and their counter goes": joined},
    "LEAVE": {"": saying(frame("join", b"init/", blob(b"t")) + frame("depart"))},
}
"""By command: the worst that one request, or the end of a connection after it, can do."""

ATOMIC = ("MULTI_SET", "LIST_KEYS", "QUEUE_PUSH", "LEASE")


def longest(case: Case) -> float:
    """Milliseconds of the longest turn."""
    loop = Loop()
    gc.collect()
    gc.freeze()
    try:
        case(loop)
        return loop.longest * 1e3
    finally:
        loop.close()
        gc.unfreeze()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.turns", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5, help="the median of so many counts (default: 5)")
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help="names of commands (default: all)")
    options = parser.parse_args()
    without = {command.name for command in COMMANDS} ^ CASES.keys()
    if without:
        print(f"commands without a worst case, or cases without a command: {', '.join(sorted(without))}")
        return 1
    gc.set_threshold(10_000, 500, 100)  # as a server has it
    print(f"{build()} build, longest turn in ms, median of {options.runs}")
    over = 0
    for name, cases in CASES.items():
        if options.commands and name not in options.commands:
            continue
        limit = WHOLE if name in ATOMIC else CUT
        for what, case in cases.items():
            took = statistics.median(longest(case) for _ in range(options.runs))
            over += took > limit
            print(f"{name:<13} {what:<36} {took:8.2f} {limit:4.0f} {'ok' if took <= limit else 'OVER'}", flush=True)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
