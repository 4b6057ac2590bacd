"""The format of a store's file, which is PyTorch's.

Invariant: a command's record has the same effect on any replica as the command itself on the keyspace. This module
must not know files, locks or time.

A file is a sequence of records: key length, key, value length, value. Lengths are little-endian u32. A key's last
record has its value. PyTorch's records are:

    `/` + key           a value
    `-/` + key          the key was deleted; empty
    `refcount/`         how many stores have the file open, in decimal
    `cleanup/`          how many have closed it

PyTorch's FileStore has no queues. Ours adds two kinds of records, which PyTorch takes for values of unrelated keys:

    `+/` + key          an item was pushed to the queue
    `</` + key          the first item was popped; empty
"""

import re
from collections.abc import Callable
from struct import Struct
from typing import Final, TypeVar

from ...keyspace.keyspace import Keyspace
from ...wire.values import unpack
from ..hash import UNLIMITED

T = TypeVar("T")

LENGTH: Final = Struct("<I")
_LENGTH_MAX: Final = 2**32 - 1

REFERENCES: Final = b"refcount/"
CLOSED: Final = b"cleanup/"
GONE: Final = b"-"
PUSHED: Final = b"+"
POPPED: Final = b"<"


def record(key: bytes, value: bytes) -> bytes:
    """Encode a record. Raises ValueError if key or value is too long."""
    if max(len(key), len(value)) > _LENGTH_MAX:
        raise ValueError(f"key or value exceeds FileStore's limit of {_LENGTH_MAX} bytes")
    return b"".join((LENGTH.pack(len(key)), key, LENGTH.pack(len(value)), value))


FIRST: Final = LENGTH.pack(len(REFERENCES)) + REFERENCES
"""The beginning of every file."""

KEY: Final = re.compile(rb"[-+<]?/|(?:refcount|cleanup)/\Z")
"""Matches keys that stores write."""


def next_record(data: bytes, at: int) -> tuple[bytes, bytes, int] | None:
    """Return key, value and end of the record at this offset; None if it is incomplete."""
    key_at = at + LENGTH.size
    if key_at > len(data):
        return None
    key_end = key_at + int(LENGTH.unpack_from(data, at)[0])
    value_at = key_end + LENGTH.size
    if value_at > len(data):
        return None
    end = value_at + int(LENGTH.unpack_from(data, key_end)[0])
    if end > len(data):
        return None
    return data[key_at:key_end], data[value_at:end], end


def is_complete(data: bytes, at: int, strict: bool = True) -> bool:
    """Return whether only complete records follow from this offset; with `strict`, only with keys that stores write."""
    while at < len(data):
        found = next_record(data, at)
        if found is None or (strict and not KEY.match(found[0])):
            return False
        at = found[2]
    return True


def outcome(keyspace: Keyspace, name: bytes, command: Callable[[Keyspace], T]) -> tuple[T, bytes]:
    """Return the result of a command on one key, and the record of its effect; empty if it has none.

    The keyspace itself is not changed.
    """
    trial = Keyspace(UNLIMITED)
    old = keyspace.values.get(name)
    if old is not None:
        trial.values[name] = old
    result = command(trial)
    unchanged = trial.values.get(name) is old
    return result, b"" if unchanged else record(name, unpack(trial.get(name)))


def register(keyspace: Keyspace, round_size: int) -> tuple[bool, bytes]:
    """Return whether one more store may open the file, and the record that counts it.

    It may not if the file is a finished round's: all stores of a round of this size have opened it, and one has closed
    it. A size of 0 means no rounds.
    """
    opened, closed = _count(keyspace, REFERENCES), _count(keyspace, CLOSED)
    if closed and 0 < round_size <= opened + closed:
        return False, b""
    return True, outcome(keyspace, REFERENCES, lambda trial: trial.add(REFERENCES, 1))[1]


def unregister(keyspace: Keyspace, world_size: int) -> tuple[bool, bytes]:
    """Return whether the last store of the world closes the file, and the records that count one store less."""
    closed, first = outcome(keyspace, CLOSED, lambda trial: trial.add(CLOSED, 1))
    remaining, second = outcome(keyspace, REFERENCES, lambda trial: trial.add(REFERENCES, -1))
    return 0 <= world_size <= closed and remaining == 0, first + second


def _count(keyspace: Keyspace, name: bytes) -> int:
    return outcome(keyspace, name, lambda trial: trial.add(name, 0))[0]
