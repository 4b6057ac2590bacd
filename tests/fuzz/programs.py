"""Programs for the machine in machine.py, by hand: what its fuzzer begins with."""

from __future__ import annotations

from conformance.frames import (
    CANCEL_FETCH,
    CANCEL_WAIT,
    LIST_KEYS,
    NUM_KEYS,
    add,
    append,
    barrier,
    check,
    compare_set,
    delete,
    fetch,
    get,
    introduce,
    multi_get,
    multi_set,
    ping,
    pop,
    push,
    queue_len,
    set_,
    wait,
    wait_count,
)
from support import HANDSHAKE, blob, u64

SET, COMPARE_SET, GET, CHECK, APPEND, MULTI_SET, PUSH = b"\x01", b"\x02", b"\x03", b"\x05", b"\x09", b"\x0b", b"\x0e"
FETCH, INTRODUCE = b"\x40", b"\x43"
SERVER = b"tcpstore_async/server"


def leave(slot: int) -> bytes:
    return bytes([slot])


def read(slot: int) -> bytes:
    return bytes([slot | 1 << 2])


def say(slot: int, *frames: bytes) -> bytes:
    """In one chunk, or in several of 255 bytes."""
    data = b"".join(frames)
    parts = [data[at : at + 255] for at in range(0, len(data), 255)] or [b""]
    return b"".join(bytes([slot | 2 << 2, len(part)]) + part for part in parts)


def drip(slot: int, *frames: bytes) -> bytes:
    """Byte by byte."""
    data = b"".join(frames)
    return bytes([slot | 5 << 2, len(data)]) + data


def stranger(slot: int, data: bytes) -> bytes:
    """Without a handshake before it."""
    return bytes([slot | 2 << 2 | 128, len(data)]) + data


def zeros(slot: int, count: int) -> bytes:
    return bytes([slot | 7 << 2, count // 1000]) + bytes([slot | 6 << 2, count % 1000 % 256]) * (count % 1000 > 0)


def large(slot: int, opcode: bytes, size: int) -> bytes:
    """A command with a large value of zeros."""
    return say(slot, opcode, blob(b"/big"), u64(size)) + zeros(slot, size)


ABSURD = [2**63 - 1, 2**63, 2**64 - 16]
GREETED = HANDSHAKE + ping(b"\1\2\3\4")
SET_A, SET_B = set_(b"/a", b""), set_(b"/b", b"")

PROGRAMS = {
    "empty": b"",
    "set-get": say(0, set_(b"/k", b"v"), get(b"/k")) + read(0),
    "all-commands": say(
        0,
        *(set_(b"/k", b"1"), compare_set(b"/k", b"1", b"2"), get(b"/k"), add(b"/n", 1), check(b"/k", b"/x")),
        *(wait(b"/k"), NUM_KEYS, delete(b"/k"), append(b"/k", b"v"), multi_get(b"/k", b"/n")),
        *(multi_set((b"/a", b"1"), (b"/b", b"2")), CANCEL_WAIT, ping(b"\1\2\3\4"), push(b"q", b"i"), queue_len(b"q")),
        *(pop(b"q"), LIST_KEYS, barrier(b"/w", 1)),
    )
    + read(0),
    "drip": drip(0, compare_set(b"/k", b"", b"2"), multi_get(b"/k", b"/n"), wait(b"", b"/k")),
    "two-wait": say(0, wait(b"/a", b"/b")) + say(1, SET_A) + say(1, SET_B),
    "wait-twice": say(0, wait(b"/a"), wait(b"/b")) + say(1, SET_A) + say(0, wait(b"/c")),
    "wait-same-key-twice": say(0, wait(b"/a", b"/a", b"/b")) + say(1, multi_set((b"/a", b""), (b"/a", b""))),
    "leave-waiting": say(0, wait(b"/a", b"/b")) + leave(0) + say(1, SET_A),
    "queue-line": say(0, wait(b"q")) + say(1, wait(b"q")) + say(2, push(b"q", b"i")) + leave(0) + say(1, pop(b"q")),
    "queue-renewed": say(0, wait(b"q")) + say(1, push(b"q", b"i")) + say(0, wait(b"q"), pop(b"q")),
    "queue-stolen": say(0, wait(b"q")) + say(1, push(b"q", b"i"), pop(b"q")) + say(0, wait(b"q")),
    "queue-and-barrier": say(0, push(b"q", b"i"), barrier(b"q", 3)) + say(1, push(b"q", b"i")),
    "barrier": say(0, barrier(b"/b", 2)) + say(1, barrier(b"/b", 2)),
    "barrier-text": say(0, set_(b"/b", b"x"), barrier(b"/b", 2)),
    "add-wraps": say(0, add(b"/n", 2**63 - 1) * 3),
    "add-text": say(0, set_(b"/n", b" +12abc"), add(b"/n", 1)),
    "add-no-number": say(0, set_(b"/n", b"-"), add(b"/n", 1)),
    "append-counter": say(0, add(b"/n", 5), append(b"/n", b"7") * 3, get(b"/n")),
    "large-set": large(0, SET, 69_900) + say(0, get(b"/big")) + read(0),
    "large-push": large(0, PUSH, 65_600) + say(1, pop(b"/big")) + read(1),
    "large-half": large(0, SET, 65_000)[:-2] + leave(0),
    "large-cas": large(0, COMPARE_SET, 66_000) + say(0, u64(66_000)) + zeros(0, 66_000),
    "large-wait": say(0, wait(*[b"%d" % n for n in range(20)])) + leave(0),
    "multi-get-large": large(0, SET, 66_000) + say(0, multi_get(*[b"/big"] * 20)),
    "gets-stall": say(0, set_(b"/k", bytes(200))) + say(0, get(b"/k") * 20) + read(0),
    "store-full": large(0, SET, 66_000)
    + say(1, MULTI_SET, u64(2), blob(b"/a"), blob(b""), blob(b"/b"), u64(60_000))
    + zeros(1, 60_000),
    "unfinished": b"".join(
        say(slot, MULTI_SET, u64(2), blob(b"/a"), u64(69_000)) + zeros(slot, 68_000) for slot in range(4)
    ),
    "pipelined-pings": say(0, ping(b"abcd") * 100) + read(0),
    "greeting": stranger(0, GREETED) + read(0),
    "greeting-drip": bytes([5 << 2 | 128, len(GREETED)]) + GREETED,
    "wrong-magic": stranger(0, b"\0\1\2\3\4"),
    "http": stranger(0, b"GET / HTTP/1.1\r\n\r\n"),
    "no-validate": stranger(0, set_(b"/k", b"v")),
    "validate-twice": say(0, HANDSHAKE),
    "unknown": say(0, NUM_KEYS, b"\x13", NUM_KEYS),
    "key-too-long": say(0, SET, u64(41)),
    "value-too-long": say(0, APPEND, blob(b"/k"), u64(70_001)),
    "too-many-keys": say(0, CHECK, u64(21)),
    "no-keys": say(0, wait(), check(), multi_get(), multi_set()),
    "fetch": say(0, set_(b"/k", b"v"), fetch(b"/k"), fetch(b"/j"))
    + say(1, fetch(b"/j"), CANCEL_FETCH, append(b"/j", b"w"))
    + read(0)
    + read(1),
    "fetch-drip": drip(0, fetch(b"/k"), set_(b"/k", b"v"), CANCEL_FETCH) + read(0),
    "fetch-large": say(0, fetch(b"/big")) + large(1, SET, 66_000) + read(0) + large(1, APPEND, 66_000),
    "fetch-behind-unsent": large(0, SET, 66_000)
    + say(1, fetch(b"/k"), multi_get(*[b"/big"] * 4))
    + say(2, SET, blob(b"/k"), u64(69_000))
    + zeros(2, 69_000)
    + say(1, CANCEL_FETCH)
    + read(1),
    "fetch-of-queue": say(0, fetch(b"q"))
    + say(1, wait(b"q"))
    + say(2, push(b"q", b"i"))
    + say(1, fetch(b"q"))
    + leave(0),
    "fetch-of-barrier": say(0, fetch(b"/b")) + say(1, barrier(b"/b", 9)) + say(2, append(b"/b", b"0"), get(b"/b")),
    "fetch-after-waits": say(0, wait(b"/a"), wait(b"/b"))
    + say(1, SET_A)
    + say(0, fetch(b"/k"))
    + say(1, SET_B, set_(b"/k", b"")),
    "fetch-twice": say(0, fetch(b"/a"), fetch(b"/b")),
    "fetch-then-wait": say(0, fetch(b"/a"), wait(b"/b")) + say(1, SET_B, SET_A),
    "count": say(0, wait_count(b"/n", 3))
    + say(1, wait_count(b"/n", 5))
    + say(2, add(b"/n", 4), set_(b"/n", b"x"), set_(b"/n", b"7")),
    "count-negative": say(0, add(b"/n", -9), wait_count(b"/n", -4), delete(b"/n")),
    "count-no-number": say(0, set_(b"/n", b"x"), wait_count(b"/n", 1)),
    "count-barrier": say(0, wait_count(b"/b", 1), barrier(b"/b", 2))
    + say(1, wait_count(b"/b", 2), CANCEL_WAIT)
    + say(1, barrier(b"/b", 2)),
    "count-then-wait": say(0, wait_count(b"/n", 1), wait(b"/k")) + say(1, add(b"/n", 1), set_(b"/k", b"")),
    "count-and-leave": say(0, wait_count(b"/n", 1)) + say(1, wait_count(b"/n", 1)) + leave(0),
    "count-targets": say(0, wait_count(b"/n", 99))
    + say(1, *[wait_count(b"/n", number) + CANCEL_WAIT for number in range(40)])
    + say(2, add(b"/n", 99)),
    "count-of-queue": say(0, wait_count(b"q", 1)) + say(1, push(b"q", b"i"), wait(b"q")),
    "introduce": say(0, introduce((b"rank", b"3"), (b"a\nb", b"\xff\x1b[0m"))),
    "introduce-at-length": say(0, introduce((b"host", bytes(2037))), introduce()),
    "reserved": say(0, check(SERVER), get(SERVER), fetch(SERVER), delete(SERVER), LIST_KEYS),
    "reserved-set": say(0, set_(SERVER, b"v")) + say(1, multi_set((SERVER, b"v"))),
    "reserved-count": say(0, wait_count(SERVER, 1)),
    "extension-first": stranger(0, fetch(b"/k")),
    **{f"absurd-fetch-{n}": say(0, FETCH, u64(length)) for n, length in enumerate(ABSURD)},
    **{f"absurd-introduction-{n}": say(0, INTRODUCE, u64(length)) for n, length in enumerate(ABSURD)},
    **{f"absurd-key-{n}": say(0, GET, u64(length)) for n, length in enumerate(ABSURD)},
    **{f"absurd-value-{n}": say(0, SET, blob(b"/k"), u64(length)) for n, length in enumerate(ABSURD)},
    **{f"absurd-count-{n}": say(0, MULTI_SET, u64(length)) for n, length in enumerate(ABSURD)},
}
