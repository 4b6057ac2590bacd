"""A journal on a disk in memory, of which an interrupted write may leave anything. Reads and writes real records."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from properties.fleet import Difference
from tcpstore_async.log.encoding import JournalError
from tcpstore_async.log.journal import Journal
from tcpstore_async.log.records import Chain, Reader, Record, Snapshot

if TYPE_CHECKING:
    from simulation.journal import Restarting

INSTANCE: Final = "the server"

ALL: Final = 1 << 60
"""More records than there are."""


class Crash(BaseException):
    """The server's process ends here."""


class Disk:
    """Segments of a journal. What an interrupted write has left is behind `end`."""

    def __init__(self, sync: bool, segment_bytes: int) -> None:
        self.sync = sync
        """Whether each record is synced; else the kernel has all that the process has written."""
        self.segment_bytes = segment_bytes
        self.segments: list[bytearray] = []
        self.end = 0
        """Of the durable records in the last segment."""
        self.ends: list[tuple[int, int]] = []
        """For each record, how many segments there are behind it, and where it ends in the last one."""
        self.snapshot: Snapshot | None = None
        """With it, the records before need not be executed again."""

    def begin(self, size: int) -> None:
        """Begin a segment."""
        self.segments.append(bytearray(size))
        self.end = 0

    def put(self, data: bytes | bytearray) -> None:
        """Write behind the end, without moving it."""
        self.segments[-1][self.end : self.end + len(data)] = data

    def records(self, reader: Reader, upto: int) -> Iterator[Record]:
        """Yield the first records, or those of them behind the snapshot."""
        first = 0 if self.snapshot is None else self.snapshot.number
        for count, segment in enumerate(self.segments, 1):
            for record in reader.read(bytes(segment)):
                if record.number >= upto:
                    return
                if record.number == len(self.ends):
                    self.ends.append((count, reader.end))
                if record.number >= first:
                    yield record
            if reader.torn and count < len(self.segments):
                raise JournalError(f"segment {count} is damaged")

    def upto(self, records: int, more: int) -> Disk:
        """Return a disk without a snapshot, with so many records, and the first bytes of the next."""
        disk = Disk(self.sync, self.segment_bytes)
        count, end = self.ends[records - 1]
        disk.segments = [bytearray(segment) for segment in self.segments[:count]]
        last = disk.segments[-1]
        last[end + more :] = bytes(max(0, len(last) - end - more))
        return disk


class Memory(Journal):
    """A journal on a disk in memory."""

    def __init__(self, world: Restarting, disk: Disk) -> None:
        self.world = world
        self.disk = disk
        self.folder = Path("memory")
        self.instance = INSTANCE
        self.sync = disk.sync
        self.snapshot = disk.snapshot
        self.complete = {}
        self.on_complete = None
        self.cut = 0
        self.spare = True
        self.refused = ""
        self.chain = Chain()
        self.failed = 0

    def shortage(self) -> int:
        return 0

    def read(self) -> Iterator[Record]:
        disk, world, reader = self.disk, self.world, Reader()
        for record in disk.records(reader, ALL):
            yield record
            world.is_durable(record)
            world.compare(record.number, world.server.clock.recorder)
            world.digests.pop(record.number, None)
        if disk.segments:
            disk.end = reader.end
            disk.segments[-1][reader.end :] = bytes(len(disk.segments[-1]) - reader.end)
        self.chain = reader.chain
        self.cut = reader.torn
        if not self.world.past and reader.chain.number < self.world.executed.records:
            raise Difference(f"{reader.chain.number} of {self.world.executed.records} durable records are there")

    def append(self, now: float, outputs: int, events: bytes) -> None:
        if self.failed:
            raise OSError(self.failed, os.strerror(self.failed))
        disk, chain = self.disk, self.chain
        self.world.deliver()
        if not self.world.past:
            self.world.digests[chain.number] = self.world.look(chain.number)
        before = chain.number, chain.crc
        data = chain.record(now, outputs, events)
        if not disk.segments or disk.end + len(data) > len(disk.segments[-1]):
            chain.number, chain.crc = before
            header = chain.header()
            data = chain.record(now, outputs, events)
            disk.begin(max(disk.segment_bytes, len(header) + len(data)))
            disk.put(header)
            disk.end = len(header)
        trouble = self.world.trouble()
        if trouble is not None:
            self._fail(data, *trouble)
        disk.put(data)
        disk.end += len(data)
        disk.ends.append((len(disk.segments), disk.end))
        self.world.is_durable(Record(chain.number - 1, now, outputs, events))

    def _fail(self, data: bytes, how: str, part: float) -> None:
        """Leave something of a record on the disk, and raise: the process ends, or learns that the write failed."""
        disk = self.disk
        at = int(part * len(data))
        if how == "damaged" and disk.sync:
            damaged = bytearray(data)
            for place in range(at, min(at + 12, len(data))):
                damaged[place] ^= 1 + place % 255
            disk.put(damaged)
        elif how == "whole":
            disk.put(data)
        elif how != "none":
            disk.put(data[:at])
        if how == "error":
            self.failed = errno.EIO
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        raise Crash

    def seal(self, now: float, state: bytes) -> None:
        trouble = self.world.trouble()
        if trouble is not None:
            self._fail(b"", "error" if trouble[0] == "error" else "none", 0.0)
        self.disk.snapshot = Snapshot(len(self.disk.segments), self.chain.number, self.chain.crc, now, state)

    def close(self) -> None:
        pass
