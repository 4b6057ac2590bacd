"""The base class of the servers.

A server owns one store and one session per connection. This module accepts, limits and expires connections, flushes
sessions, logs what peers did, announces joins and stops; `uv` and `threaded` read and write.

It knows sessions and timers, and must not know opcodes, keys, or how a connection reads and writes.
Invariants: what a peer does wrong, or a defect met while serving it, closes that connection only. Methods listed below
as part of a turn are called within `Server.turn`, which also is the lock if several threads serve connections.
"""

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Callable
from typing import Final

from ..auth.access import Access
from ..base.addresses import format_address
from ..base.errors import BudgetError, LimitError, NotAllowedError, PeerError, ProtocolError, counted
from ..base.limits import DEFAULT_GRACE, Limits
from ..base.mypyc_shim import mypyc_attr
from ..links.link_registry import LinkRegistry
from ..log.events import Engine
from ..log.journal import Journal
from ..log.snapshot import NotNowError
from ..session.budget import SESSION_BYTES
from ..session.named_stores import NamedStore, NamedStores, StoreEnded
from ..session.peer import Peer, latecomers
from ..session.server import ServerSession
from ..session.store import Store
from ..session.tls import TlsError
from ..session.transport import Transport
from .accepting import Acceptor
from .audit import AuditLog
from .due import Due
from .features import attach_features
from .listen_socket import reserve_connections
from .persistence import JournalPersistence, Persistence
from .rate_limited_log import RateLimitedLog
from .service_times import ServiceTimes
from .snapshots import Snapshots
from .store_ports import StorePorts
from .tls import ServerTls
from .turn import LoopTurn

log = logging.getLogger("tcpstore_async.server")

_FLUSHES_PER_TURN: Final = 512
"""Sessions flushed per turn of the loop, at about 4 µs each, when one command wakes more."""

_REFUSED_SECONDS: Final = 5.0
"""Time for which a client can ask why its connection was closed. Our clients ask at once."""

_MOST_REFUSED: Final = 1024
"""Connections for which the reason is remembered."""

_FAREWELL_SECONDS: Final = 1.0
"""Time for clients to ask for their sessions, which they do at once when their connections end."""

_SEAL_SECONDS: Final = 2.0
"""Time for commands under way to end before a snapshot of what they do."""

_DISK_SECONDS: Final = 1.0
"""Time between two looks whether a full disk has space."""

_TICK_SECONDS: Final = 1.0
"""Time between two ticks of the links."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Server:
    """One server. Created, started and stopped on a running event loop."""

    def __init__(
        self,
        listener: socket.socket,
        limits: Limits,
        backend: str,
        session_bytes: int = SESSION_BYTES,
        turn: LoopTurn | None = None,
        tls: ServerTls | None = None,
        instance: str = "",
    ) -> None:
        """Serve the peers of `listener`, which is closed when the server stops accepting.

        `session_bytes` is what one connection costs. `turn` is a lock if several threads serve connections. With
        `tls`, peers may use TLS. `instance` tells this server from others; by default it is random.
        """
        self.loop = asyncio.get_running_loop()
        self.listener = listener
        self.tls: ServerTls | None = tls
        self.limits = limits
        self.turn = turn or LoopTurn()
        self._counting = self._due(self._log_suppressed)
        self._refusing = self._due(self._close_refused)
        self._validating = self._due(self._close_overdue)
        self._leaving = self._due(self._close_left)
        self._ticking = self._due(self._tick)
        self._holding = self._due(self._watch_disk)
        self.store: Store = Store(limits, session_bytes=session_bytes)
        self.clock = self.turn.clock = self.store.hub.clock
        self.turn.begin()
        features = attach_features(self.store, instance or secrets.token_hex(8), backend)
        self.links: LinkRegistry = features.links
        self.links.on_work = lambda: self.call_soon(self._serve_links)
        self.links.on_link = self._ticking.expect
        self.links.on_end = lambda link, reason: self.log_limited("links", f"ended {link}: {reason}")
        self.links.on_refused = self._report_refused
        self.links.on_refusal = lambda host, peer, reason: self.log_audit(
            host, f"refused a request from {peer}: {reason}"
        )
        self.links.on_failure = self.give_up
        self.store.keyspace.on_work = self._schedule_work
        self.persistence: Persistence | None = None
        """Keeps what has been executed, before anything leaves."""
        self.snapshots: Snapshots | None = None
        self.on_end: Callable[[OSError | None], object] | None = None
        """Called when the server is to end for good, or with an error if it cannot keep what has been executed:
        then nothing has left, and nothing more will."""
        self.facts: Callable[[], dict[str, object]] = dict
        """Returns what else it says of itself."""
        self.why_not_promote: Callable[[], str] = lambda: "this server has no replicated store"
        """Returns why no server that stands by can serve instead, or nothing."""
        self.on_promote: Callable[[], object] = lambda: None
        """Called when one is to serve instead."""
        self.on_replace: Callable[[str], object] | None = None
        """Called with the path where a server waits that takes this one's place."""
        self.named: NamedStores = features.named
        self.named.on_work = self._schedule_work
        self.named.on_released = lambda _: self._leaving.expect()
        self.ports = StorePorts(listener, self.loop, self.call_soon, self.serve, self.served, self._log_accept)
        """The ports of named stores. They count as connections."""
        self.acceptor = Acceptor(self.loop, listener, self.serve, self.served, self._log_accept)
        self.named.open_port = self._open_port
        self.named.close_port = self.ports.close
        self._finishing: dict[Transport, float] = {}
        """Refused peers that have not read their replies, and when they are closed, in that order."""
        self._refused: dict[tuple[str, str, int], tuple[str, float]] = {}
        """Why and when connections were closed, keyed by token, host and process, oldest first."""
        self._working: bool = False
        """Whether `_work` will be called."""
        self.host: str = listener.getsockname()[0]
        self.port: int = listener.getsockname()[1]
        self.max_connections: int = 0
        """Connections that it can hold; 0 until it starts."""
        self.admin: str = ""
        """Path of its admin socket; empty if it has none."""
        self.count: int = 0
        """Open connections."""
        self.accepted: int = 0
        """Connections admitted so far."""
        self.rejected: int = 0
        """Connections closed at once because there were too many."""
        self.closed_for: dict[str, int] = {}
        """Connections closed because of what their peers did, keyed by `_kind_of` the error."""
        self.received: int = 0
        """Bytes read from connections, decrypted."""
        self.sent: int = 0
        """Bytes of replies accepted by the kernel, before encryption."""
        self.times: ServiceTimes | None = None
        """Measured service times; None while nothing is measured."""
        self.empty = asyncio.Event()
        """Set while no connection is open."""
        self.empty.set()
        self.stopped: bool = False
        self.rate_limited = RateLimitedLog()
        self.audit = AuditLog(limits.audit_lines)
        self._flushing: bool = False
        self._to_flush: list[Peer] = []
        """Sessions woken together, more than one turn can flush; those without replies are skipped."""

    # What a subclass defines

    def serve(self, fd: int, host: str, port: int, store: NamedStore | None = None) -> None:
        """Serve a new connection, to `store` if it came to that store's port; close it if there are too many."""
        raise NotImplementedError

    def open_connections(self) -> list[Transport]:
        """Return the open connections. In a turn."""
        raise NotImplementedError

    def close_inherited(self) -> None:
        """In a forked child: close its copies of the descriptors, without touching the parent's connections."""
        raise NotImplementedError

    def resume_held(self) -> None:
        """Continue with the connections whose requests waited for space on the disk. In a turn."""

    def release(self) -> None:
        """Free threads and descriptors once the last connection has been closed."""
        raise NotImplementedError

    def break_off(self, connection: Transport) -> None:
        """Close a connection as if it had broken: what can survive that survives. In a turn; needs a journal."""
        raise NotImplementedError

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Schedule a call on the loop, from any thread that serves connections."""
        self.loop.call_soon(callback)

    # Called on the loop by the owner of the server

    def start(self) -> None:
        """Accept connections from now on."""
        self.max_connections = reserve_connections(self.listener, self.host, self.port, self.limits.connections)
        self.ports.reserve(self.max_connections)
        self.acceptor.resume()

    def persist(self, journal: Journal) -> None:
        """Continue with the stores of a journal, and keep it. Call it before `start`. Raises JournalError."""
        self.persistence = JournalPersistence(self.engine(), self.links, self.turn, journal)
        self.snapshots = Snapshots(journal, self.loop)
        journal.on_made = lambda: self.loop.call_soon_threadsafe(self._holding.expect)
        self.go_on()

    def engine(self) -> Engine:
        """Return what a log has the events of."""
        return Engine(self.store, self.named, self.links)

    def go_on(self) -> None:
        """Go on with the stores of a log: with commands in steps, links, what is due, and ports."""
        with self.turn:
            self._holding.expect()
            self._schedule_work()
            self.call_soon(self._serve_links)
            self._ticking.expect()
            self._leaving.expect()
            for store in list(self.named.ports.values()):
                failed = self.ports.open_again(store)
                if failed:
                    self.log_limited("ports", f"cannot listen on port {store.port} of {store} again: {failed}")
                    self.named.lose_port(store)
            self.flush_pending()

    def stop_accepting(self) -> None:
        """Free the port; open connections stay. Idempotent."""
        self.acceptor.close()

    async def dismiss(self) -> None:
        """Stop for good a server that clients expect to come back: for a second, tell those that ask."""
        if self.persistence is None or self.stopped:
            return
        await self.persistence.finish()
        with self.turn:
            pass  # what has happened is kept, and answered
        self._stop_snapshots()
        self.persistence.close(True)
        self.persistence = None
        expected = len(self.links.singles) > 0
        with self.turn:
            self.ports.stop()
            self.links.go_away()
            for connection in self.open_connections():
                if connection.single is not None:
                    connection.close()
            self.flush_pending()
        if expected:
            await asyncio.sleep(_FAREWELL_SECONDS)

    def stop(self, for_good: bool = True) -> None:
        """Stop at once: the port is free and every connection closed on return. Idempotent.

        Unless that is `for_good`, links are not told that they have ended: another server will continue them.
        """
        if self.stopped:
            return
        self.stop_accepting()
        if self.persistence is not None:
            self._stop_snapshots()
            with self.turn:
                pass  # what has happened is kept, and answered
            if not (for_good or self.persistence.failed or self.persistence.differs):
                self.seal(self.persistence)
            self.persistence.close(for_good)
            if not self.persistence.failed:
                self.persistence = None
        self.stopped = True
        with self.turn:
            self.ports.stop()
            if for_good:
                self.links.close_all()
            self.flush_pending()
        with self.turn:  # another one: what links are sent has left
            for connection in self.open_connections():
                connection.close()
        self.release()
        for due in (self._counting, self._refusing, self._validating, self._leaving, self._ticking, self._holding):
            due.cancel()
        self.rate_limited.flush()
        self.audit.flush()
        self._note_empty()

    def _stop_snapshots(self) -> None:
        if self.snapshots is not None:
            self.snapshots.close()

    def seal(self, persistence: Persistence) -> None:
        """Keep a snapshot, so that the next server has nothing to execute again, whichever version it is."""
        with self.turn:
            persistence.break_all(self.break_off)
            self.flush_pending()
        deadline = time.monotonic() + _SEAL_SECONDS
        while True:
            self.work()
            self._serve_links()
            try:
                persistence.seal()
            except NotNowError:
                if time.monotonic() < deadline:
                    continue
                log.warning("the next server has to execute what has happened again: a command takes too long")
            except OSError as error:
                log.warning("cannot make a snapshot of %s: %s", persistence.where, error.strerror)
            except Exception:  # the records are there
                log.exception("cannot make a snapshot of %s", persistence.where)
            return

    def lost(self, error: OSError) -> None:
        """Serve no more, as what has happened cannot be made durable: nobody must learn of it."""
        if self.on_end is not None:
            self.on_end(error)

    async def drain(self, grace: float) -> None:
        """Stop accepting, wait up to `grace` seconds for the peers to leave, then stop."""
        self.stop_accepting()
        with self.turn:
            self.ports.stop()
            self.links.go_away()
            self.flush_pending()
        self._note_empty()  # the loop may not have run since the last connection was accepted
        try:
            await asyncio.wait_for(self.empty.wait(), grace)
        except asyncio.TimeoutError:
            log.info("closing %s still open after %g s", counted(self.count, "connection"), grace)
        self.stop()

    def close_invalid(self, ended: Callable[[Access], str]) -> None:
        """Soon close every connection whose token is no longer valid; `ended` returns the reason, or ""."""
        with self.turn:
            self.store.hub.end_invalid(ended)

    def announce(self, joins: int) -> None:
        """Publish the total number of ranks expected to join."""
        with self.turn:
            self.store.announce(joins)
            self.flush_pending()

    def all_joined(self) -> bool:
        """Return whether as many ranks have joined as were announced."""
        with self.turn:
            return self.store.all_joined()

    def close_latecomers(self, complete: float) -> None:
        """Close the connections accepted after `complete`, a time of `time.monotonic`.

        They belong to the next round and will join its server.
        """
        with self.turn:
            sessions = [connection.session for connection in self.open_connections()]
            sessions = [session for session in sessions if not self.links.is_carrying(session)]
            for session in latecomers(sessions + self.links.all_sessions(), complete):
                owner = session.owner
                if isinstance(owner, Transport):
                    owner.close()
            if self.store.hub.pending_flush:
                self.flush_pending()

    def end_rounds(self, why: str, host: str, pid: int) -> None:
        """Form no more rounds of agents, and close the connections of agents in open rounds.

        Agents of the process `pid` on `host` stay connected: they end the server, and know.
        """
        with self.turn:
            for store in (self.store, *self.named.stores.values()):
                for waiter in store.keyspace.end_rounds(why):
                    if not isinstance(waiter, ServerSession) or waiter in self.store.hub.evicted:
                        continue
                    if waiter.pid != pid or waiter.peer.get("host") != host:
                        waiter.evict(ProtocolError(why))
            if self.store.hub.pending_flush:
                self.flush_pending()

    def drop_store(self, name: str, why: str) -> bool:
        """End a named store; return False if there is none. In a turn."""
        found = self.named.drop(name, why)
        if self.store.hub.pending_flush:
            self.flush_pending()
        return found

    # Called in a turn, by connections and by `serve`

    def admits(self, host: str, port: int) -> bool:
        """Return whether a new connection fits, evicting an unvalidated one if necessary; log if it does not."""
        if self.count + len(self.ports) < self.max_connections or self._evict_unvalidated():
            return True
        self.rejected += 1
        self.log_limited(
            "connections", f"rejected {format_address(host, port)}: connection limit {self.max_connections} reached"
        )
        return False

    def opened(self) -> None:
        """Count a connection that was admitted."""
        self.count += 1
        self.accepted += 1
        if self.count == 1:
            self.call_soon(self._note_empty)

    def closed(self, connection: Transport) -> None:
        """Stop counting a connection whose session has left, and flush the sessions that its end woke."""
        self.count -= 1
        self._finishing.pop(connection, None)
        recorder = self.clock.recorder
        inside = recorder is not None and recorder.inside  # then a flush would be no event; the caller flushes
        if not self.stopped and self.store.hub.pending_flush and not inside:
            self.flush_pending()
        if not self.count:
            self.call_soon(self._note_empty)

    def flush_pending(self) -> None:
        """Flush sessions that another session's command, or end, gave a reply; close the evicted ones."""
        if self._flushing:
            return  # a connection failed in the loop below, which flushes what that woke
        self._flushing = True
        try:
            pending_flush = self.store.hub.pending_flush
            evicted = self.store.hub.evicted
            if len(pending_flush) > _FLUSHES_PER_TURN and not self.stopped:
                self._flush_in_turns(pending_flush)
            while pending_flush:
                session = pending_flush.pop()
                connection = session.owner
                if isinstance(connection, Transport):
                    try:
                        error = evicted.get(session) if evicted else None
                        if error is not None:
                            self.close_for(connection, error)
                        elif session.out:
                            connection.flush()
                    except Exception:
                        self.give_up(connection)
        finally:
            self._flushing = False
        if self.links.attaching:
            self.turn.end()  # at once: what the old connection brings after the reply to LINK must not be executed

    def close_for(self, connection: Transport, error: PeerError) -> None:
        """Close a connection because of what its peer did; replies to earlier requests still go out."""
        session = connection.session
        text = f"closed the connection from {session}: {error}"
        kind = _kind_of(error)
        self.closed_for[kind] = self.closed_for.get(kind, 0) + 1
        if isinstance(error, NotAllowedError):
            self._remember(session, str(error))
        if kind in ("access", "tls") or self.store.hub.auth.must_authenticate(session):
            self.log_audit(session.host, text)
        else:
            self.log_limited(kind, text)
        if connection.single is not None:
            connection.single.forget()  # whatever happens now, its client must not resume the session
        if session.out:
            connection.flush()
            if connection.close_behind(error):
                return
        self.close_refused(connection, error)

    def close_refused(self, connection: Transport, error: PeerError) -> None:
        """Close a connection whose replies have been sent, as far as the kernel took them."""
        session = connection.session
        if session.backlog is None or isinstance(error, BudgetError) or session in self.store.hub.evicted:
            connection.close()  # keeping replies for an evicted peer would hold the memory it was evicted for
            return
        self._finishing[connection] = self.clock.now + DEFAULT_GRACE
        connection.finish()
        self._refusing.expect()

    def _remember(self, session: ServerSession, refusal: str) -> None:
        """Remember why a token holder's connection is closed, for `refused_before`: no reply could carry the reason."""
        access = self.store.hub.auth.granted.get(session)
        if access is None:
            return
        refused = self._refused
        holder = access.identity, session.host, session.pid
        refused.pop(holder, None)  # re-inserted as the newest
        refused[holder] = refusal, self.clock.now
        if len(refused) > _MOST_REFUSED:
            del refused[next(iter(refused))]

    def refused_before(self, session: ServerSession) -> str:
        """Return why another connection of the same process and token was just closed; "" if none was."""
        access = self.store.hub.auth.granted.get(session)
        if access is None:
            return ""
        refusal, at = self._refused.get((access.identity, session.host, session.pid), ("", 0.0))
        return refusal if self.clock.now - at < _REFUSED_SECONDS else ""

    def give_up(self, connection: Transport) -> None:
        """Close a connection after an internal error, so that the others are still served."""
        log.exception("closing the connection from %s after an internal error", connection.session)
        try:
            connection.close()
        except Exception:
            log.exception("could not close the connection from %s", connection.session)

    def log_limited(self, kind: str, text: str) -> None:
        """Log what a peer did, or count it and log the count within a second."""
        if not self.rate_limited.add(kind, text):
            self._counting.expect()

    def log_audit(self, peer: str, text: str, level: int = logging.WARNING) -> None:
        """Log in the audit log what was refused to a peer, or what an administrator did; or count it."""
        if not self.audit.add(peer, text, level):
            self._counting.expect()

    # Internal; in a turn

    def _open_port(self, store: NamedStore) -> int | str:
        """Listen for a named store; return its port, or why it gets none."""
        # PyTorch's clients, for which these ports are, can use neither TLS nor tokens.
        if self.tls is not None:
            return "the server has TLS, and no clear-text ports for stores"
        if self.store.hub.auth.authenticate is not None or self.store.hub.auth.require_auth:
            return "the server checks tokens, and has no ports for stores that need none"
        return self.ports.open(store)

    def _evict_unvalidated(self) -> bool:
        """Close the oldest connection that has not sent VALIDATE; return False if there is none."""
        session = self.store.hub.oldest_unvalidated()
        if session is None:
            return False
        owner = session.owner
        if not isinstance(owner, Transport):
            return False
        late = "finished its TLS handshake" if owner.in_handshake() else f"sent {session.expected()}"
        self.closed_for["connections"] = self.closed_for.get("connections", 0) + 1
        self.log_limited(
            "connections",
            f"closed the connection from {session}, which had not {late}: connection limit {self.max_connections} "
            "reached",
        )
        owner.close()
        return True

    def attach_links(self) -> None:
        """Attach single links to the connections that sent LINK, after the replies to LINK."""
        for link, session in list(self.links.attaching.items()):
            connection = session.owner
            if not isinstance(connection, Transport):
                link.abandon()
                continue
            try:
                if session.backlog is None and session.owner is connection and not link.over:
                    link.attach()
                else:
                    link.abandon()
                    connection.close()
            except Exception:
                self.give_up(connection)

    def _flush_in_turns(self, pending_flush: list[Peer]) -> None:
        """Flush many sessions in later turns of the loop, so that other peers are served in between."""
        if not self._to_flush:
            self.call_soon(self._flush_more)
        evicted = self.store.hub.evicted
        if self.persistence is not None:  # the record of this turn tells what links are sent
            for session in pending_flush:
                owner = session.owner
                if isinstance(owner, Transport) and owner.single is not None:
                    owner.single.keep_ahead(owner.session.out)
        self._to_flush.extend(pending_flush)  # unfiltered: reading each session would cost a cache miss
        pending_flush[:] = [session for session in pending_flush if session in evicted] if evicted else []

    def _schedule_work(self) -> None:
        if not self._working:
            self._working = True
            self.call_soon(self.work)

    def _report_refused(self, host: str, port: int) -> None:
        self.log_limited(
            "sessions",
            f"rejected {format_address(host, port)}: session limit {self.limits.sessions} reached (the `sessions` "
            "limit)",
        )

    # Internal; called by the loop, outside of a turn

    def work(self) -> None:
        """Run one portion of the long commands under way."""
        with self.turn:
            self._working = False
            if self.stopped:
                return
            keyspace = self.store.keyspace
            if keyspace.work:
                self.store.activate()
                keyspace.step()
            more = self.named.work()
            if self.store.hub.pending_flush:
                self.flush_pending()
            if more or keyspace.work:
                self._schedule_work()

    def served(self) -> None:
        """Flush what a batch of new connections woke, and expect them to send VALIDATE in time."""
        with self.turn:
            if self.store.hub.pending_flush:
                self.flush_pending()
            if self.limits.validate_seconds:
                self._validating.expect()

    def _log_accept(self, kind: str, text: str) -> None:
        with self.turn:
            self.log_limited(kind, text)

    def _flush_more(self) -> None:
        with self.turn:
            to_flush = self._to_flush
            batch = to_flush[:_FLUSHES_PER_TURN]
            del to_flush[:_FLUSHES_PER_TURN]
            for session in batch:
                connection = session.owner
                if session.out and isinstance(connection, Transport):
                    try:
                        connection.flush()
                    except Exception:
                        self.give_up(connection)
            if to_flush:
                self.call_soon(self._flush_more)
            if self.store.hub.pending_flush:  # the budget may have evicted peers for their unsent replies
                self.flush_pending()

    def _serve_links(self) -> None:
        """Write the replies of sessions on links, once `_to_flush` is empty: they then share batches."""
        with self.turn:
            if self.stopped:
                return
            if self._to_flush or self.links.work():
                self.call_soon(self._serve_links)
            if self.store.hub.pending_flush:
                self.flush_pending()

    def _note_empty(self) -> None:
        if self.count:
            self.empty.clear()
        else:
            self.empty.set()

    # Internal; called when due, in a turn. Return the seconds until the next call, or None if none is needed

    def _log_suppressed(self) -> float | None:
        """Log the numbers of suppressed messages."""
        return min(filter(None, (self.rate_limited.flush_due(), self.audit.flush_due())), default=None)

    def _close_refused(self) -> float | None:
        """Close refused peers that have not read the refusal: they may be blocked in send()."""
        now = self.clock.now
        while self._finishing:
            connection, deadline = next(iter(self._finishing.items()))
            if deadline > now:
                return deadline - now
            del self._finishing[connection]
            connection.close()
        return None

    def _close_left(self) -> float | None:
        """Close named stores that their owners have ended, after the grace period."""
        now = self.clock.now
        while (store := self.named.oldest_released()) is not None:
            if now - store.released < DEFAULT_GRACE:
                return store.released + DEFAULT_GRACE - now
            self.named.close(store)
        until = self.named.orphaned_until()
        if until is not None and until <= now:
            self.named.end_orphans()
        return None if until is None or until <= now else until - now

    def _close_overdue(self) -> float | None:
        """Close connections that have not sent VALIDATE in time."""
        now = self.clock.now
        hub = self.store.hub
        while (session := hub.overdue(now)) is not None:
            self._close_unvalidated(session)
        oldest = hub.oldest_unvalidated()
        return None if oldest is None else oldest.connected_at + self.limits.validate_seconds - now

    def _tick(self) -> float | None:
        """Acknowledge on links, keep them alive, and close what is overdue there."""
        more = self.links.tick()
        for session in self.store.hub.overdue_on_links(self.clock.now):
            self._close_unvalidated(session)
        if self.store.hub.pending_flush:
            self.flush_pending()
        return _TICK_SECONDS if more else None

    def _watch_disk(self) -> float | None:
        """Continue with what has waited for space on the disk, if there is space."""
        if self.persistence is None or self.stopped:
            return None
        more = self.persistence.watch_disk()
        if not self.store.hub.held:
            self.resume_held()
        return _DISK_SECONDS if more else None

    def _due(self, run: Callable[[], float | None]) -> Due:
        return Due(self.loop, self.call_soon, self.turn, run)

    def _close_unvalidated(self, session: Peer) -> None:
        owner = session.owner
        assert isinstance(owner, Transport)
        late = "TLS handshake not finished" if owner.in_handshake() else f"no {session.expected()}"
        seconds = self.limits.validate_seconds
        self.close_for(owner, ProtocolError(f"{late} within {seconds} s (the `validate_seconds` limit)"))


def _kind_of(error: PeerError) -> str:
    """Return the key of `closed_for` under which an error counts."""
    if isinstance(error, LimitError):
        return error.limit
    kinds = ((TlsError, "tls"), (NotAllowedError, "access"), (StoreEnded, "stores"))
    return next((name for kind, name in kinds if isinstance(error, kind)), "protocol")
