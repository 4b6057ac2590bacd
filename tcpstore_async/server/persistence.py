"""Keeps the stores of a server in a log: executes its records again, then writes one for each turn.

Here is what any log has in common, and the journal; `replication.py` has the log in etcd. Knows an engine and a
journal. Must not know what an event does, or how the server's connections work.

Invariants: what a record depends on is in the records before. Nothing that a turn replies leaves before `commit`. If
the records have another effect than before, no client continues on a state that is not its own.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ..base.errors import counted
from ..base.mypyc_shim import mypyc_attr
from ..links.link_registry import LinkRegistry
from ..links.resume import Outputs
from ..log.encoding import Encoder, JournalError, decode
from ..log.events import Engine, EventRecorder
from ..log.journal import Journal
from ..log.records import Record, Snapshot
from ..log.replay import Replayer
from ..log.snapshot import NotNowError, dump, restore
from ..session.store import WRITES
from ..session.transport import Keeper, Transport
from .turn import LoopTurn

log = logging.getLogger("tcpstore_async.server")

_LONG_START: Final = 1.0
"""Seconds of executing again after which the next start is to have less to do."""

_UNKNOWN: Final = "unknown"
"""The instance of a server to which no link belongs."""


class _Recorder(EventRecorder):
    """Encodes each event at once."""

    def __init__(self, engine: Engine, encoder: Encoder) -> None:
        super().__init__(engine, encoder.add)
        self.encoder = encoder

    def received(self, number: int, data: bytes) -> None:
        self.encoder.received(number, data)


def execute(replayer: Replayer, record: Record, outputs: Outputs) -> bool:
    """Execute the events of a record again; return whether links are sent what they were sent before."""
    replayer.hub.clock.now = record.now
    try:
        for event in decode(record.events, record.now):
            replayer.execute(event)
    except JournalError:
        raise
    except Exception:
        log.exception("record %d fails", record.number)
    return outputs.take() == record.outputs


@mypyc_attr(allow_interpreted_subclasses=True)
class Persistence:
    """The log of one server."""

    def __init__(self, engine: Engine, links: LinkRegistry, turn: LoopTurn, where: str) -> None:
        """`where` says in messages which log it is."""
        self.where = where
        self.failed = False
        """Whether nothing more can be written, so that nothing more may leave."""
        self._engine = engine
        self._turn = turn
        self._clock = engine.root.hub.clock
        self._links = links
        self._encoder = Encoder()
        """Has the events of the turn."""
        self._recorder: _Recorder
        self._outputs = links.outputs = Outputs()
        links.durable = True
        self.records: int = 0
        """How many records were executed again."""
        self.differs = False
        """Whether one of them had another effect than before."""
        self._replayer = Replayer(engine, lambda session, pieces: None)

    # The start

    def restore(self, snapshot: Snapshot | None) -> None:
        """Begin with a state. Raises JournalError."""
        try:
            restore(snapshot, self._replayer)
        except JournalError as error:
            raise JournalError(f"{self.where}: {error}") from None

    def execute(self, record: Record) -> None:
        """Execute the next record again. Raises JournalError."""
        self.records += 1
        if not execute(self._replayer, record, self._outputs) and not self.differs:
            self.differs = True
            log.error(
                "record %d in %s had another effect than before: no client can continue its session",
                record.number,
                self.where,
            )

    def go_on(self, fresh: bool) -> None:
        """Record from now on what happens. Unless the stores are `fresh`, all connections have broken."""
        self._recorder = _Recorder(self._engine, self._encoder)
        self._replayer.hand_over(self._recorder)
        last = self._clock.now
        self._turn.begin()
        if fresh:
            return
        self._turn.offset = last - self._clock.now  # the time without a server is nobody's fault
        self._turn.begin()
        self.break_all(lambda connection: connection.leave(True))
        self._links.hold(0)  # until it is known what the disk has space for
        if self.differs:
            self._links.instance = _UNKNOWN

    def break_all(self, give_up: Callable[[Transport], object]) -> None:
        """Break all connections, as they are gone, or about to go: events like any others."""
        hub, links = self._engine.root.hub, self._links
        sessions = self._recorder.numbers
        for link, session in list(links.attaching.items()):
            if isinstance(session.owner, Transport) and not link.over:
                link.attach()
            else:  # its client has left, or was evicted, since it sent LINK
                link.abandon()
        if self._engine.named is not None:
            self._engine.named.restart(self._clock.now + links.grace)
        for session in list(sessions):
            owner = session.owner
            if isinstance(owner, Transport) and not isinstance(owner, Keeper) and not owner.shares_connection():
                give_up(owner)
        for evicted in list(hub.evicted):
            owner = evicted.owner
            if isinstance(owner, Transport):
                owner.close()
        links.restart()
        hub.pending_flush.extend(session for session in sessions if session.out)

    # Each turn

    def commit(self, leaves: bool) -> bool:
        """Write a record of what has entered the stores since the last one; return whether that is done.

        `leaves` is whether something is to be sent, or closed. Raises OSError.
        """
        raise NotImplementedError

    def watch_disk(self) -> bool:
        """Let commands wait no longer if the disk has space; else look again soon: return True."""
        return False

    # The end

    async def finish(self) -> None:
        """Wait for the end of what is being written, and write no more."""

    def state(self) -> bytes:
        """Return the state of everything. Raises NotNowError."""
        return dump(self._recorder)

    def seal(self) -> None:
        """Keep a snapshot, so that the next server need not execute anything. Raises NotNowError and OSError."""
        raise NotImplementedError

    def close(self, for_good: bool) -> None:
        """Record no more. What clients see now does not matter to those that come back: nothing is written of it.

        If that is `for_good`, the log is removed, else it is left to another server.
        """
        self._clock.recorder = None


class JournalPersistence(Persistence):
    """The journal of one server."""

    def __init__(self, engine: Engine, links: LinkRegistry, turn: LoopTurn, journal: Journal) -> None:
        """Execute the records of the journal again. Raises JournalError and OSError."""
        super().__init__(engine, links, turn, str(journal.folder))
        self.journal = journal
        began = time.monotonic()
        snapshot = journal.snapshot
        self.restore(snapshot)
        for record in journal.read():
            self.execute(record)
        if journal.cut:
            what = f"{counted(journal.cut, 'byte')} of a record that was not whole in {self.where}"
            log.warning("cut %s: nobody was answered for it", what)
        fresh = not self.records and snapshot is None
        seconds = time.monotonic() - began
        if not fresh:
            what = f"executed {counted(self.records, 'record')} of {self.where} again"
            log.info("%s%s in %.1f s", "" if snapshot is None else "read a snapshot and ", what, seconds)
        self.go_on(fresh)
        self.commit(True)
        if seconds > _LONG_START and not self.differs:
            # A server that dies again and again would never have its snapshots made, and would take longer each time.
            with suppress(NotNowError, OSError):
                self.seal()

    def commit(self, leaves: bool) -> bool:
        events = self._encoder.take()
        if events or self.journal.failed:
            try:
                self.journal.append(self._clock.now, self._outputs.take(), events)
            except OSError:
                self.failed = True
                raise
            if not self.journal.spare:
                self._hold()
        return True

    def watch_disk(self) -> bool:
        self._hold()
        if self.journal.refused:
            self.journal.make_ahead()
        return bool(self.journal.refused)

    def _hold(self) -> None:
        """Have commands wait, or wait no longer, as the journal has space."""
        hub, journal = self._engine.root.hub, self.journal
        shortage = journal.shortage()
        if shortage != hub.held:
            self._links.hold(shortage)
        why = ""
        if shortage and journal.refused:
            what = "writes wait, reads go on" if shortage == WRITES else "everything waits"
            why = f"the journal cannot grow ({journal.refused}): {what}"
        if why == hub.why_held:
            return
        hub.why_held = why
        if why:
            log.warning("%s until there is space for %s", why, self.where)
        else:
            log.warning("there is space for %s again: nothing waits", self.where)

    def seal(self) -> None:
        self.commit(True)
        self.journal.seal(self._clock.now, self.state())

    def close(self, for_good: bool) -> None:
        super().close(for_good)
        if for_good:
            self.journal.remove()
        else:
            self.journal.close()
