"""How a value is kept: in the form in which a reply costs least.

Knows: the forms a stored value may take, and how to turn each into the bytes of a reply and back into plain bytes.
Must not know: keys, commands, who stores or sends it.
Invariant: a blob never changes once it is stored, so it may be sent later without a copy; `Growing` is the one
exception and never leaves the keyspace.

* `bytes` or `bytearray`: the value with its u64 length before it, ready to be sent.
* `int`: a counter, rendered as decimal text when it is read.
* `Growing`: a value that was appended to and is small or was not read since, so that n appends do not cost n copies of
  all before. One of `CHUNKED_BYTES` or more is read in pieces, and stays what it is.
"""

import re
from struct import Struct
from typing import Final

from .errors import ProtocolError

PREFIX: Final = 8
"""Length of a blob's own length, in bytes."""

_U64: Final = Struct("<Q")

_LENGTHS: Final[list[bytes]] = [_U64.pack(length) for length in range(256)]
"""Those of most keys and values: looking one up takes a tenth of packing it."""

COUNTER_SIZE: Final = PREFIX
"""What a counter counts against `Limits.budget_bytes`, in bytes."""

EMPTY: Final = bytes(PREFIX)
"""The blob of the empty value."""

NO_BLOB: Final = b"\xff" * PREFIX
"""What stands for a blob that there is not: a length that no value has."""


NUMBER_BYTES: Final = 4096
"""A number has to end within so many bytes of its value, white space and zeros before it included.

However large a value is, looking for its number costs no more than that.
"""

CHUNKED_BYTES: Final = 64 * 1024
"""A value under APPEND is read in pieces from this size on: neither GET nor the APPEND after it copies it all."""

_PIECE: Final = 256 * 1024
"""Length of those pieces, about."""

Framed = bytes | bytearray


class Growing:
    """A value under APPEND: pieces that do not change any more, and a buffer with room at the end."""

    def __init__(self, first: bytes) -> None:
        self.pieces: list[Framed] = []
        """Shared with replies that were not sent yet."""
        self.tail = bytearray(first)
        self.size: int = len(first)

    def append(self, piece: bytes) -> None:
        self.tail += piece
        self.size += len(piece)
        if len(self.tail) >= _PIECE:
            self._close_tail()

    def read(self) -> list[Framed]:
        """The value, its length first, in pieces that later appends leave alone."""
        if self.tail:
            self._close_tail()
        return [_U64.pack(self.size), *self.pieces]

    def start(self) -> Framed:
        """The first of its bytes: `NUMBER_BYTES` at least, or all."""
        pieces = self.pieces
        if not pieces:
            return self.tail
        first = pieces[0]
        if len(first) >= NUMBER_BYTES:
            return first
        return first + (pieces[1] if len(pieces) > 1 else self.tail)[:NUMBER_BYTES]

    def _close_tail(self) -> None:
        """Add the tail to the pieces, or to the last one while that is short: reading often leaves no crumbs."""
        pieces = self.pieces
        if pieces and len(pieces[-1]) + len(self.tail) <= _PIECE:
            pieces[-1] = pieces[-1] + self.tail
        else:
            pieces.append(self.tail)
        self.tail = bytearray()


Blob = bytes | bytearray | int | Growing


def pack(raw: bytes) -> bytes:
    """The blob of a plain value."""
    size = len(raw)
    return (_LENGTHS[size] if size < 256 else _U64.pack(size)) + raw


def unpack(blob: Framed) -> bytes:
    """The plain value of a framed blob."""
    return bytes(blob[PREFIX:])


def framed(blob: Blob) -> Framed:
    """The blob as it goes into a reply."""
    if isinstance(blob, bytes):
        return blob
    if isinstance(blob, int):
        return pack(b"%d" % blob)
    if isinstance(blob, Growing):
        return b"".join(blob.read())
    return blob


def length(pieces: list[Framed]) -> int:
    """Bytes of all pieces together. Compiled, this loop takes a sixth of what `sum(map(len, pieces))` does."""
    total = 0
    for piece in pieces:
        total += len(piece)
    return total


def size(blob: Blob) -> int:
    """What the blob counts against `Limits.budget_bytes`, in bytes."""
    if isinstance(blob, bytes):
        return len(blob)
    if isinstance(blob, int):
        return COUNTER_SIZE
    if isinstance(blob, Growing):
        return PREFIX + blob.size
    return len(blob)


_NUMBER: Final = re.compile(rb"[ \t\n\v\f\r]*([+-]?)0*([0-9]{0,20})")
_ZERO: Final = re.compile(rb"[ \t\n\v\f\r]*[+-]?0")
_SMALL: Final = 2**61
"""Below it, compiled code compares without making an object."""

INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1


def number(blob: Blob) -> int:
    """The number a blob's text starts with, read as PyTorch's servers do (C's `stoll`, base 10).

    White space, one sign, digits; what follows is ignored. Raises ProtocolError if there is no digit, the number does
    not fit int64, or it does not end within `NUMBER_BYTES`.
    """
    if isinstance(blob, int):
        return blob
    text, start = (blob.start(), 0) if isinstance(blob, Growing) else (blob, PREFIX)
    stop = start + NUMBER_BYTES
    found = _NUMBER.match(text, start, stop)
    assert found is not None
    if found.end() == stop and size(blob) > PREFIX + NUMBER_BYTES:
        raise ProtocolError(f"the value is not a number within its first {NUMBER_BYTES} bytes")
    sign, digits = found.groups()
    if digits:
        value = -int(digits) if sign == b"-" else int(digits)
        if INT64_MIN <= value <= INT64_MAX:
            return value
    elif _ZERO.match(text, start, stop):
        return 0
    raise ProtocolError("the value is not a 64-bit number")


def wrap(value: int) -> int:
    """The value as int64 arithmetic leaves it, modulo 2**64."""
    if -_SMALL < value < _SMALL or INT64_MIN <= value <= INT64_MAX:
        return value
    return (value + 2**63) % 2**64 - 2**63
