"""A server's log in etcd: followed while another server serves, appended to while this one does.

Knows an engine and the client of etcd, whose calls block: they are made in threads. Must not know connections.

Invariants: one record is appended at a time, and the server executes nothing meanwhile. Nothing leaves that another
server could contradict: what is executed is appended first, and what is only read leaves while the lease is certainly
held, or behind a record that shows that it was.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from ..links.link_registry import LinkRegistry
from ..log.encoding import JournalError
from ..log.etcd import Closed, Deposed, EtcdLog
from ..log.events import Engine
from ..log.records import REPLAY, Chain, OtherReplay, Snapshot, alone, read_alone
from ..log.snapshot import NotNowError, dump
from .persistence import Persistence
from .turn import LoopTurn

log = logging.getLogger("tcpstore_async.server")

SNAPSHOT_BYTES: Final = 16 << 20
"""Records after which a standby makes a snapshot."""

_MUCH: Final = 64 << 20
"""Bytes of records without a snapshot of which a server warns."""

_END_SECONDS: Final = 2.0
"""Time for the last record when a server ends, and for its state if another version is to go on."""

_KEEP_SECONDS: Final = 0.01
"""Time between two attempts to keep the state."""


class Replication(Persistence):
    """The log of one server, in etcd."""

    def __init__(self, engine: Engine, links: LinkRegistry, turn: LoopTurn, etcd: EtcdLog) -> None:
        super().__init__(engine, links, turn, etcd.where)
        self.etcd = etcd
        self.busy = False
        """Whether a record is being appended: nothing leaves, and the server executes nothing meanwhile."""
        self.chain = Chain()
        self.on_committed: Callable[[], object] = lambda: None
        """Called on the loop when a record is appended."""
        self.on_deposed: Callable[[], object] = lambda: None
        """Called on the loop when another server may have the epoch."""
        self.commit_seconds = 0.0
        """How long the last record took."""
        self.unsaved = 0
        """Bytes of records since the last snapshot, as far as that is known."""
        self.saved = 0
        """The number of the first record behind it."""
        self._fenced = False
        """Whether a record behind all that was executed has just been appended."""
        self._ending = False
        self._warned = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "tcpstore log")

    # While another server serves; in a thread

    def begin(self) -> None:
        """Begin with the last snapshot. Raises JournalError."""
        snapshot = self.etcd.snapshot()
        if snapshot is not None and snapshot.replay > REPLAY:
            raise OtherReplay(f"the snapshot was made by a later version, for replay {snapshot.replay}")
        self.restore(snapshot)
        if snapshot is not None:
            self.chain = Chain(snapshot.number, snapshot.crc)

    def follow(self, records: list[bytes]) -> None:
        """Execute the next records. Raises JournalError."""
        for data in records:
            self.execute(read_alone(data, self.chain))
            self.unsaved += len(data)

    def make_snapshot(self) -> None:
        """Make a snapshot, if that is possible now, which makes the records before unnecessary."""
        if self.differs:
            return
        with suppress(NotNowError):  # soon
            self.etcd.write_snapshot(self._snapshot(dump(self._replayer)))
            self.unsaved = 0

    def _snapshot(self, state: bytes) -> Snapshot:
        return Snapshot(0, self.chain.number, self.chain.crc, self._clock.now, state)

    # While this server serves; on the loop

    def look_for_snapshot(self, saved: int) -> None:
        """Note that a standby has made a snapshot of all records before this one."""
        if saved > self.saved:
            self.saved, self.unsaved = saved, 0

    def commit(self, leaves: bool) -> bool:
        if self._ending:
            return True
        if self.busy:
            return False
        events = self._encoder.take()
        if not events and (not leaves or self._fenced or time.monotonic() < self.etcd.certain_until):
            return True
        self._fenced = False
        self.busy = True
        self._idle.clear()
        number, record = self._record(events)
        if self.unsaved > _MUCH and not self._warned:
            self._warned = True
            log.warning(
                "%s grows: it has %d MiB without a snapshot, as no other server stands by", self.where, _MUCH >> 20
            )
        began = time.perf_counter()
        writing = self._loop.run_in_executor(self._thread, self.etcd.append, number, record)
        writing.add_done_callback(lambda done: self._appended(done, began))
        return False

    def _record(self, events: bytes) -> tuple[int, bytes]:
        """Return the number of the next record, and the record."""
        number = self.chain.number
        record = alone(self.chain.record(self._clock.now, self._outputs.take(), events))
        self.unsaved += len(record)
        return number, record

    def _appended(self, done: "asyncio.Future[None]", began: float) -> None:
        error = done.exception()
        self._idle.set()
        if error is not None:
            self.failed = True
            if not isinstance(error, (Deposed, Closed)):
                log.error("cannot append to %s: %s", self.where, error)
            self.on_deposed()
            return
        self.commit_seconds = time.perf_counter() - began
        self.busy = False
        self._fenced = True
        self.on_committed()
        self._fenced = False

    async def finish(self) -> None:
        self._ending = True
        try:
            await asyncio.wait_for(self._idle.wait(), _END_SECONDS)
        except asyncio.TimeoutError:
            log.warning("etcd has not answered for %g s: what was not appended is lost, unanswered", _END_SECONDS)

    async def keep_state(self) -> None:
        """Write a snapshot of everything, for a server of another version. What is under way may take a while."""
        end = time.monotonic() + _END_SECONDS
        while not self.failed and time.monotonic() < end:
            if not self.busy:  # then everything that has happened is in a record
                with suppress(NotNowError):
                    snapshot = self._snapshot(self.state())
                    await asyncio.wait_for(asyncio.to_thread(self.etcd.write_snapshot, snapshot), _END_SECONDS)
                    return
            await asyncio.sleep(_KEEP_SECONDS)
        log.warning("a server of another version cannot go on with %s: a command takes too long", self.where)

    def close(self, for_good: bool) -> None:
        super().close(for_good)
        self._thread.shutdown(wait=False)
        if for_good:
            try:
                self.etcd.remove()
            except JournalError as error:
                log.warning("the next server goes on with %s, which cannot be removed: %s", self.where, error)
