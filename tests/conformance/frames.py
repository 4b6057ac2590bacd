"""Requests and replies as bytes, written down once more, apart from the package's own table."""

from __future__ import annotations

import struct

from support import blob, keys, u64

WOKEN = b"\x00"
"""The reply to a WAIT or BARRIER that is over."""
CANCELED = b"\x01"
NO_VALUE = b"\xff" * 8
"""The reply to a CANCEL_FETCH."""
READY = b"\x00"
NOT_READY = b"\x01"


def i64(number: int) -> bytes:
    return struct.pack("<q", number)


def link(*items: tuple[bytes, bytes]) -> bytes:
    return b"\x4c" + u64(len(items)) + b"".join(blob(name) + blob(value) for name, value in items)


def missing(*pairs: tuple[bytes, bytes]) -> bytes:
    return b"\x4f" + u64(len(pairs)) + b"".join(blob(key) + blob(expected) for key, expected in pairs)


def auth(token: bytes) -> bytes:
    return b"\x4e" + blob(token)


def taken(count: int) -> bytes:
    return b"\x4d" + i64(count)


def set_(key: bytes, value: bytes) -> bytes:
    return b"\x01" + blob(key) + blob(value)


def compare_set(key: bytes, expected: bytes, desired: bytes) -> bytes:
    return b"\x02" + blob(key) + blob(expected) + blob(desired)


def get(key: bytes) -> bytes:
    return b"\x03" + blob(key)


def add(key: bytes, amount: int) -> bytes:
    return b"\x04" + blob(key) + i64(amount)


def check(*names: bytes) -> bytes:
    return b"\x05" + keys(*names)


def wait(*names: bytes) -> bytes:
    return b"\x06" + keys(*names)


NUM_KEYS = b"\x07"


def delete(key: bytes) -> bytes:
    return b"\x08" + blob(key)


def append(key: bytes, value: bytes) -> bytes:
    return b"\x09" + blob(key) + blob(value)


def multi_get(*names: bytes) -> bytes:
    return b"\x0a" + keys(*names)


def multi_set(*pairs: tuple[bytes, bytes]) -> bytes:
    return b"\x0b" + u64(len(pairs)) + b"".join(blob(key) + blob(value) for key, value in pairs)


CANCEL_WAIT = b"\x0c"


def ping(nonce: bytes) -> bytes:
    return b"\x0d" + nonce


def push(queue: bytes, value: bytes) -> bytes:
    return b"\x0e" + blob(queue) + blob(value)


def pop(queue: bytes) -> bytes:
    return b"\x0f" + blob(queue)


def queue_len(queue: bytes) -> bytes:
    return b"\x10" + blob(queue)


LIST_KEYS = b"\x11"


def barrier(key: bytes, world_size: int) -> bytes:
    return b"\x12" + blob(key) + i64(world_size)


def fetch(key: bytes) -> bytes:
    return b"\x40" + blob(key)


CANCEL_FETCH = b"\x41"


def wait_count(key: bytes, target: int) -> bytes:
    return b"\x42" + blob(key) + i64(target)


def introduce(*pairs: tuple[bytes, bytes]) -> bytes:
    return b"\x43" + u64(len(pairs)) + b"".join(blob(name) + blob(text) for name, text in pairs)


def lease(queue: bytes, ticket: int) -> bytes:
    return b"\x44" + blob(queue) + i64(ticket)


def lease_later(queue: bytes, ticket: int) -> bytes:
    return b"\x45" + blob(queue) + i64(ticket)


def confirm(ticket: int) -> bytes:
    return b"\x46" + i64(ticket)


def give_back(ticket: int) -> bytes:
    return b"\x47" + i64(ticket)


def join(counter: bytes, token: bytes) -> bytes:
    return b"\x48" + blob(counter) + blob(token)


def meet(key: bytes, agent: bytes, least: int, most: int, left: int = -1) -> bytes:
    return b"\x4a" + blob(key) + blob(agent) + i64(least) + i64(most) + i64(left)


def attend(key: bytes, agent: bytes, action: int = 0, number: int = 0) -> bytes:
    return b"\x4b" + blob(key) + blob(agent) + i64(action) + i64(number)


def met(round_number: int, rank: int, world: int) -> bytes:
    """The reply to MEET."""
    return blob(i64(round_number) + i64(rank) + i64(world))


def state(*numbers: int, described: bytes = b"") -> bytes:
    """The reply to ATTEND: round, state, participants, waiting agents, standing, last call; and a description."""
    return blob(b"".join(map(i64, numbers)) + described)


DEPART = b"\x49"
RETURNED = i64(-1)
"""What ends a LEASE_LATER that is given up."""


def popped(length: int, value: bytes) -> bytes:
    """The reply to QUEUE_POP: the length before it, and the item."""
    return i64(length) + blob(value)


END = b"\x51"


def enter(name: str | bytes | None, **items: object) -> bytes:
    said = {} if name is None else {"name": name}
    named = {
        key: value if isinstance(value, bytes) else str(value).encode() for key, value in {**said, **items}.items()
    }
    return b"\x50" + u64(len(named)) + b"".join(blob(key.encode()) + blob(value) for key, value in named.items())
