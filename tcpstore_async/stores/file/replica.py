"""The contents of a store's file up to an offset, as this process has read them.

Invariant: the keyspace is the result of applying the records before the offset. The caller locks the file.
"""

import errno
import os
from typing import Final

from ...keyspace.keyspace import Keyspace
from ...wire.values import pack
from ..hash import UNLIMITED
from .records import GONE, KEY, POPPED, PUSHED, next_record

_CHUNK: Final = 1 << 20
"""Bytes to read at once, unless a record is longer."""

_FINGERPRINT_BYTES: Final = 64
"""Bytes before the offset that identify the file, as a new one may get the same inode."""


class Replica:
    """The contents of a file up to an offset."""

    def __init__(self) -> None:
        self.keyspace: Final = Keyspace(UNLIMITED)
        self.offset = 0
        self.last_start = 0
        """Where the last record before the offset begins."""
        self._inode: tuple[int, int] | None = None
        self._fingerprint = b""
        """The last bytes before the offset."""
        self._valid = True
        """False while records are applied, because an interrupt leaves the number of applied records unknown."""

    def is_of(self, fd: int) -> bool:
        """Return whether this is a replica of the beginning of this file."""
        found = os.fstat(fd)
        if not self._valid or found.st_size < self.offset:
            return False
        if self._inode is None:
            self._inode = found.st_dev, found.st_ino
        if self._inode != (found.st_dev, found.st_ino):
            return False
        return os.pread(fd, len(self._fingerprint), self.offset - len(self._fingerprint)) == self._fingerprint

    def catch_up(self, fd: int, strict: bool = True) -> bool:
        """Apply what has been written since the last time; return whether it was only complete records.

        With `strict`, a key that no store writes indicates a torn record.
        """
        size = os.fstat(fd).st_size
        length = _CHUNK
        while self.offset < size:
            data = os.pread(fd, min(length, size - self.offset), self.offset)
            if not data:
                raise OSError(errno.EIO, "truncated while it was locked")
            if self.apply(data, strict):
                length = _CHUNK
            elif len(data) == size - self.offset or (strict and next_record(data, 0)):
                return False
            else:
                length *= 2
        return True

    def apply(self, data: bytes, strict: bool = False) -> bool:
        """Apply the complete records at the start of `data`, the bytes at the offset; return whether there are any."""
        self._valid = False
        at = last_start = 0
        while (found := next_record(data, at)) is not None:
            key, value, end = found
            if strict and not KEY.match(key):
                break
            self._apply(key, value)
            last_start, at = at, end
        if at:
            self.last_start = self.offset + last_start
            self.offset += at
            recent = data[max(0, at - _FINGERPRINT_BYTES) : at]
            self._fingerprint = (self._fingerprint + recent)[-_FINGERPRINT_BYTES:]
        self._valid = True
        return at > 0

    def invalidate(self) -> None:
        """Make `is_of` return False from now on."""
        self._valid = False

    def _apply(self, key: bytes, value: bytes) -> None:
        kind = key[:1]
        if kind == GONE:
            self.keyspace.delete_key(key[1:])
        elif kind == PUSHED:
            self.keyspace.queue_push(key[1:], pack(value))
        elif kind == POPPED:
            self.keyspace.queue_pop(key[1:])
        else:
            self.keyspace.set(key, pack(value))
