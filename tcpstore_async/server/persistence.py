"""Keeps the stores of a server in a journal: executes its records again, then writes one for each turn.

Knows an engine and a journal. Must not know what an event does, or how the server's connections work.

Invariants: what a record depends on is in the records before. Nothing that a turn replies leaves before `commit`. If
the records have another effect than before, no client continues on a state that is not its own.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

from ..base.errors import counted
from ..links.link_registry import LinkRegistry
from ..links.resume import Outputs
from ..log.encoding import Encoder, JournalError, decode
from ..log.events import Engine, EventRecorder
from ..log.journal import Journal
from ..log.records import Record
from ..log.replay import Replayer
from ..log.snapshot import dump, restore
from ..session.store import WRITES
from ..session.transport import Keeper, Transport
from .turn import LoopTurn

log = logging.getLogger("tcpstore_async.server")

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


class Persistence:
    """The journal of one server."""

    def __init__(self, engine: Engine, links: LinkRegistry, turn: LoopTurn, journal: Journal) -> None:
        """Execute the records of the journal again. Raises JournalError."""
        self.journal = journal
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
        self._replay()

    # The start

    def _replay(self) -> None:
        replayer = Replayer(self._engine, lambda session, pieces: None)
        began = time.monotonic()
        snapshot = self.journal.snapshot
        try:
            restore(snapshot, replayer)
        except JournalError as error:
            raise JournalError(f"{self.journal.folder}: {error}") from None
        for record in self.journal.read():
            self.records += 1
            if not execute(replayer, record, self._outputs) and not self.differs:
                self.differs = True
                log.error(
                    "record %d in %s had another effect than before: no client can continue its session",
                    record.number,
                    self.journal.folder,
                )
        if self.journal.cut:
            what = f"{counted(self.journal.cut, 'byte')} of a record that was not whole in {self.journal.folder}"
            log.warning("cut %s: nobody was answered for it", what)
        self._recorder = _Recorder(self._engine, self._encoder)
        replayer.hand_over(self._recorder)
        last = self._clock.now
        self._turn.begin()
        if not self.records and snapshot is None:
            return
        seconds = time.monotonic() - began
        what = f"executed {counted(self.records, 'record')} of {self.journal.folder} again"
        log.info("%s%s in %.1f s", "" if snapshot is None else "read a snapshot and ", what, seconds)
        self._turn.offset = last - self._clock.now  # the time without a server is nobody's fault
        self._turn.begin()
        self.break_all(lambda connection: connection.leave(True))
        self._links.hold(0)  # until it is known what the disk has space for
        if self.differs:
            self._links.instance = _UNKNOWN
        self.commit()

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

    def commit(self) -> None:
        """Write a record of what has entered the stores since the last one. Raises OSError."""
        events = self._encoder.take()
        if events or self.journal.failed:
            self.journal.append(self._clock.now, self._outputs.take(), events)
            if not self.journal.spare:
                self._hold()

    def watch_disk(self) -> bool:
        """Let commands wait no longer if the disk has space; else look again soon: return True."""
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
            log.warning("%s until there is space for %s", why, journal.folder)
        else:
            log.warning("there is space for %s again: nothing waits", journal.folder)

    def seal(self) -> None:
        """Keep a snapshot instead of all records. Raises NotNowError and OSError."""
        self.commit()
        self.journal.seal(self._clock.now, dump(self._recorder))

    def close(self, for_good: bool) -> None:
        """Record no more. What clients see now does not matter to those that come back: nothing is written of it.

        If that is `for_good`, the journal is removed, else it is left to another server.
        """
        self._clock.recorder = None
        if for_good:
            self.journal.remove()
        else:
            self.journal.close()
