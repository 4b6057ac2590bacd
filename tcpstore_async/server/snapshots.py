"""Snapshots of a journal, made by another process, so that a restart need not execute all that ever happened.

The process executes the records of complete segments on the last snapshot, writes the next one and ends; then the
server removes what that makes unnecessary. Knows files and processes. Must not know what a state is.

Invariants: the server neither waits for the process nor depends on it: if it fails, the journal only grows. A snapshot
is of a state whose links were given what the server gave them.
"""

import asyncio
import logging
import os
import sys
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Final

from ..base.limits import Limits
from ..links.resume import Outputs
from ..log.encoding import JournalError
from ..log.events import Engine
from ..log.journal import (
    Instance,
    Journal,
    read_instance,
    read_records,
    read_snapshot,
    snapshots_of,
    write_snapshot,
)
from ..log.records import Reader, Snapshot
from ..log.replay import Replayer
from ..log.snapshot import NotNowError, dump, restore
from ..session.store import Store
from .features import attach_features
from .owned_process import OwnedProcess
from .persistence import execute

log = logging.getLogger("tcpstore_async.server")

NOT_NOW: Final = 75
"""The exit status if something was being done in steps at the end of the last segment."""

_NICE: Final = 19
_OOM_SCORE: Final = "1000"
"""If memory is short, the kernel is to end this process and not the server."""


class Snapshots:
    """Has snapshots of a server's journal made, one at a time."""

    def __init__(self, journal: Journal, loop: asyncio.AbstractEventLoop) -> None:
        self.journal = journal
        self._loop = loop
        self._process: OwnedProcess | None = None
        self._failed = False
        journal.on_complete = self._look
        self._look()

    def _look(self) -> None:
        """Begin if there are enough complete segments."""
        unneeded = sum(list(self.journal.complete.values()))
        if not unneeded or self._process is not None or self.journal.on_complete is None:
            return
        snapshot = max(snapshots_of(self.journal.folder), default=None)
        if snapshot is not None and 2 * unneeded < snapshot.stat().st_size:
            return  # a large one takes long to write: not for a little more
        try:
            self._process = OwnedProcess(["journal", "snapshot", str(self.journal.folder)])
        except OSError as error:
            self._report(f"cannot start a process: {error.strerror}")
            return
        self._loop.add_reader(self._process.end, self._ended, self._process)

    def _ended(self, process: OwnedProcess) -> None:
        self._loop.remove_reader(process.end)
        self._process = None
        status = process.process.wait()
        process.close()
        if status == 0:
            self._failed = False
            self._loop.run_in_executor(None, self.journal.trim).add_done_callback(self._trimmed)
        elif status != NOT_NOW:
            self._report(f"its process ended with status {status}")

    def _trimmed(self, done: "asyncio.Future[None]") -> None:
        error = done.exception()
        if error is not None:
            self._report(str(error))
        self._look()

    def _report(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            log.warning("cannot make a snapshot of %s, which grows until one is made: %s", self.journal.folder, why)

    def close(self) -> None:
        """Make no more. End the process, if it runs."""
        self.journal.on_complete = None
        process, self._process = self._process, None
        if process is not None:
            self._loop.remove_reader(process.end)
            process.process.kill()
            process.close()


def engine_of(instance: Instance) -> Engine:
    """Return an engine as the server of a journal began with."""
    settings = instance.settings
    limits = Limits(**{field.name: int(settings[field.name]) for field in fields(Limits)})
    store = Store(limits)
    features = attach_features(store, instance.instance, "uv", float(settings["link-grace"]))
    auth = store.hub.auth
    auth.require_auth = settings["require-auth"]
    if settings["tokens"] == "True":
        auth.authenticate = lambda token: ""
    features.links.durable = True
    features.links.outputs = Outputs()
    return Engine(store, features.named, features.links)


def make_snapshot(folder: Path) -> str:
    """Make the snapshot behind all complete segments of a journal; return why it cannot be made now, or nothing.

    Raises JournalError and OSError.
    """
    engine = engine_of(read_instance(folder))
    replayer = Replayer(engine, lambda session, pieces: None)
    assert engine.links is not None
    outputs = engine.links.outputs
    assert outputs is not None
    last = read_snapshot(folder)
    restore(last, replayer)
    reader = Reader(last)
    for record in read_records(folder, reader, complete=True):
        if not execute(replayer, record, outputs):
            raise JournalError(f"record {record.number} has another effect than before")
    try:
        state = dump(replayer)
    except NotNowError as error:
        return str(error)
    chain = reader.chain
    write_snapshot(folder, Snapshot(reader.following, chain.number, chain.crc, engine.root.hub.clock.now, state))
    return ""


def give_way() -> None:
    """Let others have the processor, and the memory, first. For a process of its own."""
    if sys.platform == "linux":  # to a server with a real-time policy, niceness means nothing
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.nice(_NICE)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
