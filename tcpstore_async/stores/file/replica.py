"""What a store's file holds, up to an offset, as this process has read it.

Knows: how far it has read, and how it knows its file again. Must not know: locks; the caller has one.
Invariant: the keyspace is what the records before the offset make of it.
"""

import errno
import os
from typing import Final

from ...keyspace import Keyspace
from ...values import pack
from ..hash import UNLIMITED
from .records import GONE, KEY, POPPED, PUSHED, next_record

_CHUNK: Final = 1 << 20
"""Bytes that are read at once, unless a record is longer."""

_SEAM: Final = 64
"""Bytes before the offset by which a replica knows its file again: another one may get the same inode."""


class Replica:
    """What the file holds, up to an offset."""

    def __init__(self) -> None:
        self.keyspace: Final = Keyspace(UNLIMITED)
        self.offset = 0
        self.last = 0
        """Where the record before the offset begins."""
        self._inode: tuple[int, int] | None = None
        self._seam = b""
        """The last bytes before the offset."""
        self._whole = True
        """False while records are applied; if that is interrupted, nobody knows how many were."""

    def is_of(self, fd: int) -> bool:
        """Whether the beginning of this file is what is here."""
        found = os.fstat(fd)
        if not self._whole or found.st_size < self.offset:
            return False
        if self._inode is None:
            self._inode = found.st_dev, found.st_ino
        if self._inode != (found.st_dev, found.st_ino):
            return False
        return os.pread(fd, len(self._seam), self.offset - len(self._seam)) == self._seam

    def catch_up(self, fd: int, strict: bool = True) -> bool:
        """Apply what has been written since; whether nothing but whole records was found.

        If it is `strict`, a key that no store has written is a sign that a record is torn.
        """
        size = os.fstat(fd).st_size
        length = _CHUNK
        while self.offset < size:
            data = os.pread(fd, min(length, size - self.offset), self.offset)
            if not data:
                raise OSError(errno.EIO, "it became shorter while it was locked")
            if self.apply(data, strict):
                length = _CHUNK
            elif len(data) == size - self.offset or (strict and next_record(data, 0)):
                return False
            else:
                length *= 2
        return True

    def apply(self, data: bytes, strict: bool = False) -> bool:
        """Apply the whole records at the beginning of what stands behind the offset; whether there is one."""
        self._whole = False
        at = last = 0
        while (found := next_record(data, at)) is not None:
            key, value, end = found
            if strict and not KEY.match(key):
                break
            self._apply(key, value)
            last, at = at, end
        if at:
            self.last = self.offset + last
            self.offset += at
            self._seam = (self._seam + data[max(0, at - _SEAM) : at])[-_SEAM:]
        self._whole = True
        return at > 0

    def discard(self) -> None:
        """What is here is not to be trusted any more."""
        self._whole = False

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
