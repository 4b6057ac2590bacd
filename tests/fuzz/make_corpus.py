"""Writes the hand-written part of the corpus: `python tests/fuzz/make_corpus.py`. Finds of the fuzzer stay beside it.

Each file is a program for the machine in machine.py. Their names begin with `hand-`, those of finds with `find-`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from support import HANDSHAKE, blob, keys, u64

CORPUS = Path(__file__).parent / "corpus"

SET, CAS, GET, ADD, CHECK, WAIT, NUM, DELETE, APPEND, MGET, MSET, CANCEL, PING, PUSH, POP, LEN, LIST, BARRIER = (
    bytes([opcode]) for opcode in range(1, 19)
)
FETCH, CANCEL_FETCH, WAIT_COUNT, INTRODUCE = (bytes([opcode]) for opcode in range(64, 68))
SERVER = b"tcpstore_async/server"


def leave(slot: int) -> bytes:
    return bytes([slot])


def read(slot: int) -> bytes:
    return bytes([slot | 1 << 2])


def say(slot: int, data: bytes) -> bytes:
    """In one chunk, or in several of 255 bytes."""
    parts = [data[at : at + 255] for at in range(0, len(data), 255)] or [b""]
    return b"".join(bytes([slot | 2 << 2, len(part)]) + part for part in parts)


def drip(slot: int, data: bytes) -> bytes:
    """Byte by byte."""
    return bytes([slot | 5 << 2, len(data)]) + data


def stranger(slot: int, data: bytes) -> bytes:
    """Without a handshake before it."""
    return bytes([slot | 2 << 2 | 128, len(data)]) + data


def zeros(slot: int, count: int) -> bytes:
    return bytes([slot | 7 << 2, count // 1000]) + bytes([slot | 6 << 2, count % 1000 % 256]) * (count % 1000 > 0)


def large(slot: int, opcode: bytes, size: int) -> bytes:
    """A command with a large value of zeros."""
    return say(slot, opcode + blob(b"/big") + u64(size)) + zeros(slot, size)


ABSURD = [2**63 - 1, 2**63, 2**64 - 16]
GREETED = HANDSHAKE + PING + b"\1\2\3\4"

PROGRAMS = {
    "empty": b"",
    "set-get": say(0, SET + blob(b"/k") + blob(b"v") + GET + blob(b"/k")) + read(0),
    "all-commands": say(
        0,
        SET
        + blob(b"/k")
        + blob(b"1")
        + CAS
        + blob(b"/k")
        + blob(b"1")
        + blob(b"2")
        + GET
        + blob(b"/k")
        + ADD
        + blob(b"/n")
        + u64(1)
        + CHECK
        + keys(b"/k", b"/x")
        + WAIT
        + keys(b"/k")
        + NUM
        + DELETE
        + blob(b"/k")
        + APPEND
        + blob(b"/k")
        + blob(b"v")
        + MGET
        + keys(b"/k", b"/n")
        + MSET
        + u64(2)
        + blob(b"/a")
        + blob(b"1")
        + blob(b"/b")
        + blob(b"2")
        + CANCEL
        + PING
        + b"\1\2\3\4"
        + PUSH
        + blob(b"q")
        + blob(b"i")
        + LEN
        + blob(b"q")
        + POP
        + blob(b"q")
        + LIST
        + BARRIER
        + blob(b"/w")
        + u64(1),
    )
    + read(0),
    "drip": drip(0, CAS + blob(b"/k") + blob(b"") + blob(b"2") + MGET + keys(b"/k", b"/n") + WAIT + keys(b"", b"/k")),
    "two-wait": say(0, WAIT + keys(b"/a", b"/b"))
    + say(1, SET + blob(b"/a") + blob(b""))
    + say(1, SET + blob(b"/b") + blob(b"")),
    "wait-twice": say(0, WAIT + keys(b"/a") + WAIT + keys(b"/b"))
    + say(1, SET + blob(b"/a") + blob(b""))
    + say(0, WAIT + keys(b"/c")),
    "wait-same-key-twice": say(0, WAIT + keys(b"/a", b"/a", b"/b"))
    + say(1, MSET + u64(2) + (blob(b"/a") + blob(b"")) * 2),
    "leave-waiting": say(0, WAIT + keys(b"/a", b"/b")) + leave(0) + say(1, SET + blob(b"/a") + blob(b"")),
    "queue-line": say(0, WAIT + keys(b"q"))
    + say(1, WAIT + keys(b"q"))
    + say(2, PUSH + blob(b"q") + blob(b"i"))
    + leave(0)
    + say(1, POP + blob(b"q")),
    "queue-renewed": say(0, WAIT + keys(b"q"))
    + say(1, PUSH + blob(b"q") + blob(b"i"))
    + say(0, WAIT + keys(b"q") + POP + blob(b"q")),
    "queue-stolen": say(0, WAIT + keys(b"q"))
    + say(1, PUSH + blob(b"q") + blob(b"i") + POP + blob(b"q"))
    + say(0, WAIT + keys(b"q")),
    "queue-and-barrier": say(0, PUSH + blob(b"q") + blob(b"i") + BARRIER + blob(b"q") + u64(3))
    + say(1, PUSH + blob(b"q") + blob(b"i")),
    "barrier": say(0, BARRIER + blob(b"/b") + u64(2)) + say(1, BARRIER + blob(b"/b") + u64(2)),
    "barrier-text": say(0, SET + blob(b"/b") + blob(b"x") + BARRIER + blob(b"/b") + u64(2)),
    "add-wraps": say(0, (ADD + blob(b"/n") + u64(2**63 - 1)) * 3),
    "add-text": say(0, SET + blob(b"/n") + blob(b" +12abc") + ADD + blob(b"/n") + u64(1)),
    "add-no-number": say(0, SET + blob(b"/n") + blob(b"-") + ADD + blob(b"/n") + u64(1)),
    "append-counter": say(0, ADD + blob(b"/n") + u64(5) + (APPEND + blob(b"/n") + blob(b"7")) * 3 + GET + blob(b"/n")),
    "large-set": large(0, SET, 69_900) + say(0, GET + blob(b"/big")) + read(0),
    "large-push": large(0, PUSH, 65_600) + say(1, POP + blob(b"/big")) + read(1),
    "large-half": large(0, SET, 65_000)[:-2] + leave(0),
    "large-cas": say(0, CAS + blob(b"/big") + u64(66_000)) + zeros(0, 66_000) + say(0, u64(66_000)) + zeros(0, 66_000),
    "large-wait": say(0, WAIT + keys(*[b"%d" % n for n in range(20)])) + leave(0),
    "multi-get-large": large(0, SET, 66_000) + say(0, MGET + keys(*[b"/big"] * 20)),
    "gets-stall": say(0, SET + blob(b"/k") + blob(bytes(200))) + say(0, (GET + blob(b"/k")) * 20) + read(0),
    "store-full": large(0, SET, 66_000)
    + say(1, MSET + u64(2) + blob(b"/a") + blob(b"") + blob(b"/b") + u64(60_000))
    + zeros(1, 60_000),
    "unfinished": b"".join(
        say(slot, MSET + u64(2) + blob(b"/a") + u64(69_000)) + zeros(slot, 68_000) for slot in range(4)
    ),
    "pipelined-pings": say(0, (PING + b"abcd") * 100) + read(0),
    "greeting": stranger(0, GREETED) + read(0),
    "greeting-drip": bytes([5 << 2 | 128, len(GREETED)]) + GREETED,
    "wrong-magic": stranger(0, b"\0\1\2\3\4"),
    "http": stranger(0, b"GET / HTTP/1.1\r\n\r\n"),
    "no-validate": stranger(0, SET + blob(b"/k") + blob(b"v")),
    "validate-twice": say(0, HANDSHAKE),
    "unknown": say(0, NUM + b"\x13" + NUM),
    "key-too-long": say(0, SET + u64(41)),
    "value-too-long": say(0, APPEND + blob(b"/k") + u64(70_001)),
    "too-many-keys": say(0, CHECK + u64(21)),
    "no-keys": say(0, WAIT + u64(0) + CHECK + u64(0) + MGET + u64(0) + MSET + u64(0)),
    "fetch": say(0, SET + blob(b"/k") + blob(b"v") + FETCH + blob(b"/k") + FETCH + blob(b"/j"))
    + say(1, FETCH + blob(b"/j") + CANCEL_FETCH + APPEND + blob(b"/j") + blob(b"w"))
    + read(0)
    + read(1),
    "fetch-drip": drip(0, FETCH + blob(b"/k") + SET + blob(b"/k") + blob(b"v") + CANCEL_FETCH) + read(0),
    "fetch-large": say(0, FETCH + blob(b"/big")) + large(1, SET, 66_000) + read(0) + large(1, APPEND, 66_000),
    "fetch-behind-unsent": large(0, SET, 66_000)
    + say(1, FETCH + blob(b"/k") + MGET + keys(*[b"/big"] * 4))
    + say(2, SET + blob(b"/k") + u64(69_000))
    + zeros(2, 69_000)
    + say(1, CANCEL_FETCH)
    + read(1),
    "fetch-of-queue": say(0, FETCH + blob(b"q"))
    + say(1, WAIT + keys(b"q"))
    + say(2, PUSH + blob(b"q") + blob(b"i"))
    + say(1, FETCH + blob(b"q"))
    + leave(0),
    "fetch-of-barrier": say(0, FETCH + blob(b"/b"))
    + say(1, BARRIER + blob(b"/b") + u64(9))
    + say(2, APPEND + blob(b"/b") + blob(b"0") + GET + blob(b"/b")),
    "fetch-after-waits": say(0, WAIT + keys(b"/a") + WAIT + keys(b"/b"))
    + say(1, SET + blob(b"/a") + blob(b""))
    + say(0, FETCH + blob(b"/k"))
    + say(1, SET + blob(b"/b") + blob(b"") + SET + blob(b"/k") + blob(b"")),
    "fetch-twice": say(0, FETCH + blob(b"/a") + FETCH + blob(b"/b")),
    "fetch-then-wait": say(0, FETCH + blob(b"/a") + WAIT + keys(b"/b"))
    + say(1, SET + blob(b"/b") + blob(b"") + SET + blob(b"/a") + blob(b"")),
    "count": say(0, WAIT_COUNT + blob(b"/n") + u64(3))
    + say(1, WAIT_COUNT + blob(b"/n") + u64(5))
    + say(2, ADD + blob(b"/n") + u64(4) + SET + blob(b"/n") + blob(b"x") + SET + blob(b"/n") + blob(b"7")),
    "count-negative": say(0, ADD + blob(b"/n") + u64(-9) + WAIT_COUNT + blob(b"/n") + u64(-4) + DELETE + blob(b"/n")),
    "count-no-number": say(0, SET + blob(b"/n") + blob(b"x") + WAIT_COUNT + blob(b"/n") + u64(1)),
    "count-barrier": say(0, WAIT_COUNT + blob(b"/b") + u64(1) + BARRIER + blob(b"/b") + u64(2))
    + say(1, WAIT_COUNT + blob(b"/b") + u64(2) + CANCEL)
    + say(1, BARRIER + blob(b"/b") + u64(2)),
    "count-then-wait": say(0, WAIT_COUNT + blob(b"/n") + u64(1) + WAIT + keys(b"/k"))
    + say(1, ADD + blob(b"/n") + u64(1) + SET + blob(b"/k") + blob(b"")),
    "count-and-leave": say(0, WAIT_COUNT + blob(b"/n") + u64(1)) + say(1, WAIT_COUNT + blob(b"/n") + u64(1)) + leave(0),
    "count-targets": say(0, WAIT_COUNT + blob(b"/n") + u64(99))
    + say(1, b"".join(WAIT_COUNT + blob(b"/n") + u64(number) + CANCEL for number in range(40)))
    + say(2, ADD + blob(b"/n") + u64(99)),
    "count-of-queue": say(0, WAIT_COUNT + blob(b"q") + u64(1))
    + say(1, PUSH + blob(b"q") + blob(b"i") + WAIT + keys(b"q")),
    "introduce": say(0, INTRODUCE + u64(2) + blob(b"rank") + blob(b"3") + blob(b"a\nb") + blob(b"\xff\x1b[0m")),
    "introduce-at-length": say(0, INTRODUCE + u64(1) + blob(b"host") + blob(bytes(2037)) + INTRODUCE + u64(0)),
    "reserved": say(0, CHECK + keys(SERVER) + GET + blob(SERVER) + FETCH + blob(SERVER) + DELETE + blob(SERVER) + LIST),
    "reserved-set": say(0, SET + blob(SERVER) + blob(b"v")) + say(1, MSET + u64(1) + blob(SERVER) + blob(b"v")),
    "reserved-count": say(0, WAIT_COUNT + blob(SERVER) + u64(1)),
    "extension-first": stranger(0, FETCH + blob(b"/k")),
    **{f"absurd-fetch-{n}": say(0, FETCH + u64(length)) for n, length in enumerate(ABSURD)},
    **{f"absurd-introduction-{n}": say(0, INTRODUCE + u64(length)) for n, length in enumerate(ABSURD)},
    **{f"absurd-key-{n}": say(0, GET + u64(length)) for n, length in enumerate(ABSURD)},
    **{f"absurd-value-{n}": say(0, SET + blob(b"/k") + u64(length)) for n, length in enumerate(ABSURD)},
    **{f"absurd-count-{n}": say(0, MSET + u64(length)) for n, length in enumerate(ABSURD)},
}


def main() -> None:
    CORPUS.mkdir(exist_ok=True)
    for old in CORPUS.glob("hand-*"):
        old.unlink()
    for name, program in PROGRAMS.items():
        (CORPUS / f"hand-{name}").write_bytes(program)


if __name__ == "__main__":
    main()
