"""Records: the events of a turn as a journal keeps them, the segments that these fill, and snapshots. Without I/O.

A segment is a header and records, then zeros. A record is

    u32 length, u32 crc, u64 number, f64 now, u32 outputs, events

The length is that of everything behind the crc. The crc is chained: it goes on from that of the record before, or of
the segment's header, which goes on from the segment before. So a block that is old, or in another place, is not
accepted. `outputs` is a checksum of all that links were given since the record before. A snapshot has a state and the
place behind the records that led to it. This module must not know what an event is, or a state.

Invariant: what `Reader` returns was written, in this order, with nothing missing in between.
"""

import struct
import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple

from .encoding import JournalError

FORMAT: Final = 1
"""Version of segments and records."""

REPLAY: Final = 1
"""Raised when the same events have another effect, or give a link other bytes, than in the version before."""

_MAGIC: Final = b"tcpstore journal"
_SEGMENT: Final = struct.Struct("<16sIIIQ")
"""Magic, FORMAT, REPLAY, the crc of the last record before, the number of the first record."""

_MOST_SEARCHED: Final = 256 << 20
"""Bytes that are looked at for whole records behind a damaged one: a value may be full of what looks like them."""

_RECORD: Final = struct.Struct("<II")
_FIXED: Final = struct.Struct("<QdI")

_LEAST_RECORD: Final = _RECORD.size + _FIXED.size

HEADER_BYTES: Final = _SEGMENT.size + 4

_VERSIONS: Final = struct.Struct("<II")
"""FORMAT and REPLAY, before a record that is in no segment."""

_SNAPSHOT_MAGIC: Final = b"tcpstore state\0\0"
_SNAPSHOT: Final = struct.Struct("<16sIIIIQdQ")
"""Magic, FORMAT, REPLAY, the segment that follows, the crc and number of its first record, the time, and the length of
the state, which follows; then a crc of everything."""


class Record(NamedTuple):
    number: int
    now: float
    outputs: int
    events: bytes


class Snapshot(NamedTuple):
    """A state, and which records have led to it."""

    segment: int
    """The number of the segment whose records follow."""
    number: int
    """Of the first of these records."""
    crc: int
    """Of the record before."""
    now: float
    """The time of the last record."""
    state: bytes
    replay: int = REPLAY
    """With which the state was made."""

    def encode(self) -> list[bytes]:
        """Return the contents of a file, in pieces."""
        head = _SNAPSHOT.pack(
            _SNAPSHOT_MAGIC, FORMAT, self.replay, self.segment, self.crc, self.number, self.now, len(self.state)
        )
        return [head, self.state, zlib.crc32(self.state, zlib.crc32(head)).to_bytes(4, "little")]


def decode_snapshot(data: bytes) -> Snapshot:
    """Return the snapshot of a file. Raises JournalError."""
    if len(data) < _SNAPSHOT.size + 4:
        raise JournalError("the snapshot is not whole")
    magic, form, replay, segment, crc, number, now, size = _SNAPSHOT.unpack_from(data)
    if magic != _SNAPSHOT_MAGIC:
        raise JournalError("this is no snapshot")
    if form != FORMAT:
        raise JournalError(f"the snapshot was written in format {form}; this version has {FORMAT}")
    if len(data) != _SNAPSHOT.size + size + 4 or zlib.crc32(memoryview(data)[:-4]).to_bytes(4, "little") != data[-4:]:
        raise JournalError("the snapshot is damaged")
    return Snapshot(segment, number, crc, now, data[_SNAPSHOT.size : -4], replay)


class Chain:
    """Where a journal ends: what the next record continues."""

    def __init__(self, number: int = 0, crc: int = 0) -> None:
        self.number = number
        """Of the next record."""
        self.crc = crc

    def header(self) -> bytes:
        """Return the header of a segment that begins here."""
        header = _SEGMENT.pack(_MAGIC, FORMAT, REPLAY, self.crc, self.number)
        self.crc = zlib.crc32(header, self.crc)
        return header + self.crc.to_bytes(4, "little")

    def record(self, now: float, outputs: int, events: bytes) -> bytes:
        """Return the next record."""
        body = _FIXED.pack(self.number, now, outputs) + events
        self.crc = zlib.crc32(body, self.crc)
        self.number += 1
        return _RECORD.pack(len(body), self.crc) + body

    def read(self, data: bytes, at: int) -> Record | None:
        """Return the next record, which is at a byte of the data; None if it is not whole. Raises JournalError."""
        size, crc = _RECORD.unpack_from(data, at)
        body = memoryview(data)[at + _RECORD.size : at + _RECORD.size + size]
        if size < _FIXED.size or len(body) < size or zlib.crc32(body, self.crc) != crc:
            return None
        number, now, outputs = _FIXED.unpack_from(body)
        if number != self.number:
            raise JournalError(f"record {number} stands where record {self.number} is expected")
        self.crc = crc
        self.number += 1
        return Record(number, now, outputs, bytes(body[_FIXED.size :]))


class Reader:
    """Reads segments, one after the other."""

    def __init__(self, after: Snapshot | None = None) -> None:
        """Begin with the segment that follows this snapshot, or with the first one."""
        self.chain = Chain() if after is None else Chain(after.number, after.crc)
        self.first: int = 0 if after is None else after.segment
        """The number of that segment."""
        self.following = self.first
        """The number of the segment after those that were read."""
        self.end: int = 0
        """Where the last segment's records end, in bytes."""
        self.torn: int = 0
        """Bytes behind them of a record that is not whole."""

    def read(self, segment: bytes) -> Iterator[Record]:
        """Yield the records of the next segment, up to the first that is not whole. Raises JournalError."""
        chain = self.chain
        if len(segment) < HEADER_BYTES:
            raise JournalError("the header of the segment is not whole")
        magic, form, replay, crc, number = _SEGMENT.unpack_from(segment)
        if magic != _MAGIC:
            raise JournalError("this is no segment of a journal")
        if form != FORMAT or replay != REPLAY:
            raise JournalError(
                f"the segment was written by another version, in format {form} for replay {replay}; this one has "
                f"{FORMAT} and {REPLAY}: start that version, and end it with SIGTERM, which leaves a snapshot only"
            )
        if (crc, number) != (chain.crc, chain.number):
            raise JournalError(f"the segment continues record {number}, but record {chain.number} is the next")
        if chain.header() != segment[:HEADER_BYTES]:
            raise JournalError("the header of the segment is damaged")
        at = HEADER_BYTES
        while len(segment) - at >= _RECORD.size:
            record = chain.read(segment, at)
            if record is None:
                break
            at += _LEAST_RECORD + len(record.events)
            self.end = at
            yield record
        self.end = at
        self.following += 1
        self.torn = len(segment[at:].rstrip(b"\0"))
        if self.torn and _is_followed(segment, at, chain.number):
            raise JournalError(f"record {chain.number}, at byte {at}, is damaged, and whole ones follow")


class OtherReplay(JournalError):
    """A record can be executed by another version only."""


def alone(record: bytes) -> bytes:
    """Return a record for a log that has no segments."""
    return _VERSIONS.pack(FORMAT, REPLAY) + record


def read_alone(data: bytes, chain: Chain) -> Record:
    """Return the next record of a log that has no segments. Raises JournalError, and OtherReplay."""
    if len(data) < _VERSIONS.size + _LEAST_RECORD:
        raise JournalError(f"record {chain.number} is not whole")
    form, replay = _VERSIONS.unpack_from(data)
    if (form, replay) != (FORMAT, REPLAY):
        raise OtherReplay(
            f"record {chain.number} was written by another version, in format {form} for replay {replay}; this one "
            f"has {FORMAT} and {REPLAY}"
        )
    record = chain.read(data, _VERSIONS.size)
    if record is None:
        raise JournalError(f"record {chain.number} is damaged")
    return record


def _is_followed(segment: bytes, at: int, number: int) -> bool:
    """Return whether whole records stand behind the one with this number, at a byte, which is not whole.

    The checksum of the next one goes on from that of the damaged one; if that is damaged itself, the one after tells.
    """
    if len(segment) - at < _RECORD.size:
        return False
    _, damaged = _RECORD.unpack_from(segment, at)
    wanted = (number + 1).to_bytes(8, "little")
    place = segment.find(wanted, at + 2 * _RECORD.size)
    searched = 0
    while place >= 0 and searched < _MOST_SEARCHED:
        size, crc = _RECORD.unpack_from(segment, place - _RECORD.size)
        end = place + size
        if _FIXED.size <= size <= len(segment) - place:
            searched += size
            if zlib.crc32(segment[place:end], damaged) == crc:
                return True
            if len(segment) - end >= _RECORD.size:
                after, last = _RECORD.unpack_from(segment, end)
                body = segment[end + _RECORD.size : end + _RECORD.size + after]
                if len(body) == after >= _FIXED.size and zlib.crc32(body, crc) == last:
                    return True
        place = segment.find(wanted, place + 1)
    return False
