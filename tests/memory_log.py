"""A log as `EtcdLog` has it, in memory: for tests of servers that share one, where there is no etcd.

Its clock is a set of holders whose leases the test ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tcpstore_async.log.encoding import JournalError
from tcpstore_async.log.etcd import Deposed, Holder, Standby, Trimmed
from tcpstore_async.log.records import Snapshot


class Memory:
    """What all members of etcd know."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.instances = 0
        self.instance: dict[str, str] | None = None
        self.records: dict[int, bytes] = {}
        self.trimmed = 0
        self.snapshot: Snapshot | None = None
        self.epoch: MemoryLog | None = None
        self.standbys: dict[str, Standby] = {}
        self.answers = True
        """Whether it answers at all."""

    def end_lease(self) -> None:
        """The serving server has not been heard of for too long."""
        with self.changed:
            self.epoch = None
            self.changed.notify_all()

    def silence(self, answers: bool) -> None:
        with self.changed:
            self.answers = answers
            self.changed.notify_all()


class MemoryLog:
    def __init__(self, memory: Memory, holder: Holder) -> None:
        self.memory = memory
        self.where = "the log in memory"
        self.epoch = 1
        self.holder = holder
        self.certain_until = 0.0
        self.before_append: Callable[[int], object] = lambda number: None
        self.trouble = ""
        self._following = True
        self._closed = False

    def _wait(self) -> None:
        self.memory.changed.wait_for(lambda: self.memory.answers or self._closed)
        if self._closed:
            raise JournalError("closed")

    def open(self, settings: dict[str, str], limit: float) -> str:
        with self.memory.changed:
            self._wait()
            if self.memory.instance is None:
                self.memory.instance = settings
                self.memory.instances += 1
            if self.memory.instance != settings:
                raise JournalError("other settings")
            return f"instance{self.memory.instances}"

    def snapshot(self) -> Snapshot | None:
        with self.memory.changed:
            self._wait()
            return self.memory.snapshot

    def follow(
        self,
        number: int,
        on_records: Callable[[list[bytes]], object],
        on_epoch: Callable[[Holder | None], object],
    ) -> None:
        memory = self.memory
        self._following = True
        said: object = self
        while self._following and not self._closed:
            with memory.changed:
                epoch = memory.epoch
                if number < memory.trimmed:
                    raise Trimmed
                found = []
                while number in memory.records:
                    found.append(memory.records[number])
                    number += 1
                if not found and said is epoch:
                    memory.changed.wait(0.05)
                    continue
            if said is not epoch:
                said = epoch
                on_epoch(None if epoch is None else epoch.holder)
            if found:
                on_records(found)

    def stop_following(self) -> None:
        self._following = False

    def take_epoch(self) -> bool:
        with self.memory.changed:
            self._wait()
            if self.memory.epoch is None:
                self.memory.epoch = self
                self.memory.standbys.pop(self.holder.id, None)
                self.hold()
                self.memory.changed.notify_all()
            return self.memory.epoch is self

    def hold(self) -> None:
        self.certain_until = time.monotonic() + 3600.0

    def read_rest(self, number: int) -> list[bytes]:
        with self.memory.changed:
            self._wait()
            return [self.memory.records[one] for one in sorted(self.memory.records) if one >= number]

    def append(self, number: int, record: bytes) -> None:
        self.before_append(number)
        with self.memory.changed:
            self._wait()
            if self.memory.epoch is not self:
                raise Deposed
            assert number not in self.memory.records
            self.memory.records[number] = record
            self.memory.changed.notify_all()

    def lost(self) -> bool:
        return self.memory.epoch is not self

    def resign(self) -> None:
        with self.memory.changed:
            if self.memory.epoch is self:
                self.memory.epoch = None
                self.memory.changed.notify_all()
        self.certain_until = 0.0

    def write_snapshot(self, snapshot: Snapshot) -> None:
        with self.memory.changed:
            memory = self.memory
            if memory.snapshot is None or memory.snapshot.number < snapshot.number:
                memory.snapshot = snapshot
                memory.trimmed = snapshot.number
                memory.records = {number: one for number, one in memory.records.items() if number >= snapshot.number}

    def announce(self, number: int) -> None:
        holder = self.holder
        standby = Standby(holder.address, holder.version, holder.replay, holder.id, number)
        self.memory.standbys[holder.id] = standby

    def saved(self) -> int:
        snapshot = self.memory.snapshot
        return 0 if snapshot is None else snapshot.number

    def standbys(self) -> list[Standby]:
        return list(self.memory.standbys.values())

    def remove(self) -> None:
        with self.memory.changed:
            memory = self.memory
            memory.records, memory.snapshot, memory.instance, memory.trimmed = {}, None, None, 0
            self.resign()

    def close(self) -> None:
        with self.memory.changed:
            self._closed = True
            self.memory.changed.notify_all()
