"""The format of a store's file, which is PyTorch's.

Knows: what a record looks like, what a command adds to the file. Must not know: files, locks, time.
Invariant: what the keyspace says that a command means is what its record makes of any replica.

A file is a row of records: length of the key, key, length of the value, value; lengths are u32, little-endian. The last
record of a key counts. PyTorch's are:

    `/` + key           a value
    `-/` + key          the key is gone; empty
    `refcount/`         how many stores have the file open, in decimal
    `cleanup/`          how many have closed it

PyTorch's stores have no queues. Ours are two kinds of records more; PyTorch takes them for values that nobody asks for:

    `+/` + key          an item, at the end of the queue
    `</` + key          the first item is taken; empty
"""

import re
from collections.abc import Callable
from struct import Struct
from typing import Final, TypeVar

from ...keyspace import Keyspace
from ...values import unpack
from ..hash import UNLIMITED

T = TypeVar("T")

LENGTH: Final = Struct("<I")
_LONGEST: Final = 2**32 - 1

REFERENCES: Final = b"refcount/"
CLOSED: Final = b"cleanup/"
GONE: Final = b"-"
PUSHED: Final = b"+"
POPPED: Final = b"<"


def record(key: bytes, value: bytes) -> bytes:
    if max(len(key), len(value)) > _LONGEST:
        raise ValueError(f"key or value is too long for a FileStore, which takes up to {_LONGEST} bytes")
    return b"".join((LENGTH.pack(len(key)), key, LENGTH.pack(len(value)), value))


FIRST: Final = LENGTH.pack(len(REFERENCES)) + REFERENCES
"""What every file begins with."""

KEY: Final = re.compile(rb"[-+<]?/|(?:refcount|cleanup)/\Z")
"""How keys begin that a store has written."""


def next_record(data: bytes, at: int) -> tuple[bytes, bytes, int] | None:
    """Key, value and end of the record at this place; None if it is not all there."""
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
    """Whether there is nothing but whole records from here to the end; if it is `strict`, with keys of stores."""
    while at < len(data):
        found = next_record(data, at)
        if found is None or (strict and not KEY.match(found[0])):
            return False
        at = found[2]
    return True


def outcome(keyspace: Keyspace, name: bytes, command: Callable[[Keyspace], T]) -> tuple[T, bytes]:
    """What a command on one key returns, and the record of what it makes of that key. Nothing is changed by this."""
    trial = Keyspace(UNLIMITED)
    old = keyspace.values.get(name)
    if old is not None:
        trial.values[name] = old
    result = command(trial)
    unchanged = trial.values.get(name) is old
    return result, b"" if unchanged else record(name, unpack(trial.get(name)))


def sign_on_records(keyspace: Keyspace, round_size: int) -> tuple[bool, bytes]:
    """Whether a store may join, and the record that says that it has.

    It may not if an earlier round is done with the file: all ranks of a round of that size have had it open, and one
    has closed it again. A size of 0 means that there are no rounds.
    """
    opened, closed = _count(keyspace, REFERENCES), _count(keyspace, CLOSED)
    if closed and 0 < round_size <= opened + closed:
        return False, b""
    return True, outcome(keyspace, REFERENCES, lambda trial: trial.add(REFERENCES, 1))[1]


def _count(keyspace: Keyspace, name: bytes) -> int:
    return outcome(keyspace, name, lambda trial: trial.add(name, 0))[0]


def sign_off_records(keyspace: Keyspace, world_size: int) -> tuple[bool, bytes]:
    """Whether nobody is left, and the records that say that a store has gone."""
    closed, first = outcome(keyspace, CLOSED, lambda trial: trial.add(CLOSED, 1))
    left, second = outcome(keyspace, REFERENCES, lambda trial: trial.add(REFERENCES, -1))
    return 0 <= world_size <= closed and left == 0, first + second
