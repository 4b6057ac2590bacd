"""One server process of a replicated store: it stands by, serves while it holds the epoch, and stands by again.

Knows the log in etcd and how to make a server. Must not know what a record does, nor signals or options.

Invariant: it serves only what it has read to the end while it held the epoch. Meanwhile, and before, whoever comes is
told who serves, if anybody does.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Final

from ..base.errors import counted
from ..log.encoding import JournalError
from ..log.etcd import EtcdLog, Holder, Standby, Trimmed
from ..log.records import REPLAY, OtherReplay
from .replication import SNAPSHOT_BYTES, Replication
from .uv import UvServer

log = logging.getLogger("tcpstore_async.server")

_OPEN_SECONDS: Final = 10.0
"""Time for etcd to answer for the first time. Later, it is waited for."""

_RETRY_SECONDS: Final = 0.5
"""Time between two attempts to follow a log that another version writes."""

_KNOWN_SECONDS: Final = 1.0
"""Time between two announcements of a server that stands by."""

_SOON_SECONDS: Final = 1.0
"""Time for which clients wait for a server that may take the epoch."""

_PATIENCE: Final = 2.0
"""Seconds behind the end of the lease for which connections are kept: etcd may only be electing a leader."""

_SILENT_SECONDS: Final = 1.0
"""Time without what etcd was asked for until that is said."""

_LOOK_SECONDS: Final = 0.1
"""Time between two looks whether the lease is held."""

SERVER: Final = "server"
STANDBY: Final = "standby"
"""Roles."""

_NOBODY: Final = "nobody serves at the moment"


class Replica:
    """Stands by, and serves, for one process."""

    def __init__(
        self,
        etcd: EtcdLog,
        settings: dict[str, str],
        make: Callable[[str], UvServer],
        looking: Callable[[UvServer], AbstractAsyncContextManager[None]],
        announce: Callable[[UvServer, str], Awaitable[None]],
    ) -> None:
        """`make` returns a server, given the name of its instance; `looking` answers at its admin socket meanwhile.

        `announce` is called with a server that accepts connections, and its role.
        """
        self.etcd = etcd
        self.server: UvServer | None = None
        """The one that accepts connections."""
        self._settings = settings
        self._limit = _OPEN_SECONDS
        self._make = make
        self._looking = looking
        self._announce = announce
        self._loop = asyncio.get_running_loop()
        self._free = asyncio.Event()
        """Set while nobody holds the epoch."""
        self._holder: Holder | None = None
        self._standbys: list[Standby] = []
        """Those seen last."""
        self._told = asyncio.Event()
        """Set once it is known who does."""
        self.over = asyncio.Event()
        """Set when this process is to stand by again."""

    async def _look_for_standbys(self) -> None:
        with suppress(JournalError):
            self._standbys = await asyncio.to_thread(self.etcd.standbys)

    async def _know_standbys(self, replication: Replication) -> None:
        """Know who follows, and what is in their snapshots."""
        while True:
            await self._look_for_standbys()
            with suppress(JournalError):
                replication.look_for_snapshot(await asyncio.to_thread(self.etcd.saved))
            await asyncio.sleep(_KNOWN_SECONDS)

    def _facts(self, replication: Replication) -> dict[str, object]:
        """Return what a server that serves says of itself."""
        number = replication.chain.number
        return {
            "role": SERVER,
            "epoch": self.etcd.epoch,
            "commit_seconds": round(replication.commit_seconds, 6),
            "records": number,
            "bytes_since_snapshot": replication.unsaved,
            "standbys": [
                {"address": one.address, "version": one.version, "records_behind": max(0, number - one.number)}
                for one in self._standbys
            ],
        }

    def _promote(self) -> None:
        log.info("handing over, as an administrator has asked for")
        self.over.set()

    def status(self) -> str:
        """Return what this process does, in a few words."""
        server = self.server
        if server is None:
            return "starting"
        if server.links.elsewhere is not None:
            return server.store.hub.why_held
        return f"serving at {self.etcd.holder.address}, {counted(server.links.clients(server.count), 'client')}"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[UvServer]:
        """Stand by until this process may serve; then serve while the context lasts, and give up the epoch."""
        server, replication = await self._stand_by()
        try:
            self.over.clear()
            replication.on_deposed = self.over.set
            server.why_not_promote = lambda: "" if self._standbys else "no other server stands by"
            server.on_promote = self._promote
            server.persistence = replication
            replication.on_committed = server.committed
            server.facts = partial(self._facts, replication)
            replication.go_on(replication.chain.number == 0)
            server.turn.end()  # a record has events of one time
            server.call_soon(server.go_on)
            self.server = server
            server.start()
            async with self._looking(server):
                log.info("serving (epoch %d)", self.etcd.epoch)
                await self._announce(server, SERVER)
                tasks = [asyncio.ensure_future(self._watch(server, replication))]
                tasks.append(asyncio.ensure_future(self._know_standbys(replication)))
                try:
                    yield server
                finally:
                    for task in tasks:
                        task.cancel()
        finally:
            await self._leave(server, replication)

    async def _leave(self, server: UvServer, replication: Replication) -> None:
        if server.stopped:
            return
        if not replication.failed and time.monotonic() < self.etcd.certain_until:  # else nobody can be asked
            await self._look_for_standbys()
        server.cut()
        if not replication.failed:  # nothing waits from here on: the cut connections are not to end in the log
            if any(one.replay != REPLAY for one in self._standbys) and not replication.differs:
                server.break_all()
                await replication.keep_state()  # all that another version can begin with
            await replication.finish()
        await asyncio.to_thread(self.etcd.resign)
        replication.close(False)
        if not replication.failed:
            server.persistence = None
        server.stop(for_good=False)

    async def _watch(self, server: UvServer, replication: Replication) -> None:
        """Say what the server waits for.

        Close the connections of one that may no longer hold the epoch: their clients look for another.
        """
        fine, troubled = time.monotonic(), False
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if self.etcd.lost():
                self.over.set()
            now = time.monotonic()
            if not self.etcd.trouble:
                fine = now
            before = troubled, server.cut_off
            troubled = now >= fine + _SILENT_SECONDS
            late = now >= self.etcd.certain_until + _PATIENCE
            if (troubled, late) == before:
                continue
            why = f"waiting: {self.etcd.trouble}" if troubled else ""
            if late:
                why = "etcd has not answered for so long that another server may serve"
            server.store.hub.why_held = why
            breaks = late and not server.cut_off
            log.warning("%s", f"{why}: closing all connections" if breaks else why or "etcd answers again")
            if breaks:
                server.cut()
                server.break_all()
            server.cut_off = late

    # Standing by

    async def _stand_by(self) -> tuple[UvServer, Replication]:
        """Return a server that is as the log says to its end, and the log, whose epoch is ours."""
        self._told.clear()
        front = self.server = self._make("")
        front.links.elsewhere = ""
        front.store.hub.why_held = f"this server stands by: {_NOBODY}"
        front.facts = lambda: {"role": STANDBY, "serves": front.links.elsewhere}
        front.why_not_promote = lambda: f"{front.store.hub.why_held}; ask that one to hand over"
        try:
            async with self._looking(front):
                following = asyncio.ensure_future(self._follow())
                announcing = asyncio.ensure_future(self._answer(front))
                try:
                    return await following
                finally:
                    following.cancel()
                    announcing.cancel()
        finally:
            front.stop()

    async def _answer(self, front: UvServer) -> None:
        """Tell clients who serves, unless this server is just about to: then they can wait."""
        await self._told.wait()
        if self._holder is None:
            await asyncio.sleep(_SOON_SECONDS)
        front.start()
        log.info("%s", front.store.hub.why_held)
        await self._announce(front, STANDBY)

    async def _follow(self) -> tuple[UvServer, Replication]:
        """Follow the log until the epoch is ours, and everything is read."""
        said = ""
        while True:
            saying = self._loop.call_later(_SILENT_SECONDS, self._say_what_it_waits_for)
            try:
                instance = await asyncio.to_thread(self.etcd.open, self._settings, self._limit)
            finally:
                saying.cancel()
            self._limit = math.inf
            server = self._make(instance)
            replication = Replication(server.engine(), server.links, server.turn, self.etcd)
            try:
                await asyncio.to_thread(replication.begin)
                ours = await self._until_ours(replication)
                if ours and await asyncio.to_thread(self.etcd.open, self._settings, self._limit) == instance:
                    rest = partial(self._read_rest, replication)
                    await asyncio.to_thread(rest)
                    return server, replication
                if ours:
                    log.info("the stores have ended for good: beginning with empty ones")
                    await asyncio.to_thread(self.etcd.resign)
            except Trimmed as error:
                log.info("beginning anew with the snapshot: %s", error)
                await asyncio.to_thread(self.etcd.resign)
            except OtherReplay as error:
                if str(error) != said:
                    said = str(error)
                    log.warning("cannot follow the log until there is a snapshot: %s", error)
                await asyncio.to_thread(self.etcd.resign)
                await asyncio.sleep(_RETRY_SECONDS)
            except BaseException:
                await asyncio.to_thread(self.etcd.resign)
                server.stop(for_good=False)
                raise
            replication.close(False)
            server.stop(for_good=False)

    def _say_what_it_waits_for(self) -> None:
        log.warning("waiting: %s", self.etcd.trouble or "etcd has not answered yet")

    def _read_rest(self, replication: Replication) -> None:
        began = time.monotonic()
        replication.follow(self.etcd.read_rest(replication.chain.number))
        what = f"executed {counted(replication.records, 'record')} of {replication.where}"
        log.info("%s, the last of them in %.2f s", what, time.monotonic() - began)

    async def _until_ours(self, replication: Replication) -> bool:
        """Follow until the epoch is ours; return False if following has to begin anew.

        Raises Trimmed, OtherReplay and JournalError.
        """
        self._free.clear()
        following = asyncio.ensure_future(
            asyncio.to_thread(self.etcd.follow, replication.chain.number, partial(self._take, replication), self._tell)
        )
        announcing = asyncio.ensure_future(self._stay_known(replication))
        try:
            while True:
                free = asyncio.ensure_future(self._free.wait())
                await asyncio.wait([following, free], return_when=asyncio.FIRST_COMPLETED)
                free.cancel()
                if following.done():
                    await following
                    return False
                if await asyncio.to_thread(self.etcd.take_epoch):
                    return True
                await asyncio.sleep(_LOOK_SECONDS)  # unless it is gone again, we are about to be told who has it
        finally:
            announcing.cancel()
            if not following.done():
                self.etcd.stop_following()
            with suppress(Exception):
                await following

    async def _stay_known(self, replication: Replication) -> None:
        """Let others know that this server stands by, and how far it has followed."""
        while True:
            with suppress(JournalError):  # `follow` says it
                await asyncio.to_thread(self.etcd.announce, replication.chain.number)
            await asyncio.sleep(_KNOWN_SECONDS)

    def _take(self, replication: Replication, records: list[bytes]) -> None:
        """Execute records, in the thread that follows."""
        replication.follow(records)
        if replication.unsaved >= SNAPSHOT_BYTES:
            try:
                others = self.etcd.standbys()
            except JournalError:  # etcd does not answer: soon
                return
            if all(one.id >= self.etcd.holder.id for one in others):
                replication.make_snapshot()
            else:
                replication.unsaved = 0  # the first of them makes it

    def _tell(self, holder: Holder | None) -> None:
        """Note who serves. Called in the thread that follows."""
        self._loop.call_soon_threadsafe(self._note, holder)

    def _note(self, holder: Holder | None) -> None:
        self._holder = holder
        self._told.set()
        if holder is None:
            self._free.set()
        else:
            self._free.clear()
        front = self.server
        if front is not None and front.links.elsewhere is not None:
            front.links.elsewhere = "" if holder is None else holder.address
            serves = _NOBODY if holder is None else f"{holder.address} serves"
            front.store.hub.why_held = f"this server stands by: {serves}"
