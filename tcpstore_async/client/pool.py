"""The connections of one synchronous client, which threads lease.

`TCPClient`, which extends `Pool`, makes calls on them. This module must not know what a request means.

Invariants:

* A blocked call delays no other thread.
* What one thread has written is visible to every later request of any thread, on whichever connection.
* A signal handler may lease the connection of the call that it has interrupted. It waits for the server and for other
  threads, never for something that only the interrupted call could do.
* The background loop takes no part in calls. It marks a store as lost when an idle connection is lost, which otherwise
  only the next call would notice.
"""

import asyncio
import functools
import logging
import socket
import time
from collections.abc import Callable
from threading import get_ident
from typing import Final

from ..auth.secret_files import TlsFiles
from ..base.deadline import IDLE_SECONDS, MIN_ROUND_TRIP, Deadline
from ..base.errors import ConnectionDeniedError, DistNetworkError, DistStoreError, reason_of
from ..base.locks import RLock
from ..links.single_client import is_break
from ..session.identity import Identity
from . import background, requests
from .connect import Cancelled, connect_blocking, leave_to_parent, why_lost
from .last_byte import describe_silence
from .requests import Request
from .resume import resume_idle
from .servers import Servers
from .store_name import StoreName
from .sync_connection import NO_THREAD, DeadlineExceeded, SyncConnection
from .tls import TlsSocket
from .wait_queue import Ticket, WaitQueue

log = logging.getLogger("tcpstore_async.client")

_STARVING_AFTER: Final = 0.001
"""Seconds after which a thread that waits for a connection has precedence.

Otherwise a thread that makes call after call would take its connection again before any other thread runs.
"""

_BRIEF_WAIT: Final = 0.01
"""Seconds that a thread waits before it competes with starving threads, and between checks of a signal handler, whose
notification may go to the interrupted call or be delayed by that call's lock."""

LOOP: Final = -1
"""User of a connection that the background loop is replacing."""

_FORKED: Final = "the process forked during this call; only the parent receives the reply"


class Pool:
    """The connections of one store. The base class of `TCPClient`."""

    def __init__(
        self, servers: Servers, timeout: float, token: bytes, tls: TlsFiles | None, name: StoreName | None
    ) -> None:
        self.servers = servers
        self.name = name
        self._why_lost: str | None = None
        """The server's reason for ending the named store or the connection; "" if it has none, None if unknown."""
        self._denied = False
        """Whether the reason is that the token does not allow it."""
        self.timeout = timeout
        self.token = token
        self.tls = tls
        self.identity: Identity | None = None
        """The server's identity, once requested, if the server is one of ours."""
        self.server_crash: Callable[[], str] | None = None
        """Returns how the server crashed, or "" if it did not, in the process that has started it."""
        self.joining = False
        """Whether the store is being opened. It may be closed right afterwards, so only later calls start the
        background loop."""
        self.forming = False
        """Whether it is forming a process group; then calls do not wait for the background loop to start."""
        self.closed = False
        self._identified = False
        """Whether the server has been asked for its identity."""
        self._lost = ""
        """Why the store is lost; empty while it is not."""
        self._start([])

    def _start(self, connections: list[SyncConnection]) -> None:
        self._connections = connections
        self._probes: list[SyncConnection] = []
        """New connections whose server is being verified, and those that probe what the server supports."""
        self._opening = NO_THREAD
        """The thread that is opening a further connection."""
        self._identifying = NO_THREAD
        """The thread that is requesting the server's identity."""
        self._lock = RLock()  # a signal handler may make a call in the middle of one
        self._free_queue = WaitQueue()
        """Threads that wait for a free connection."""
        self._identity_queue = WaitQueue()
        """Threads that wait for the server's identity."""
        self._starving = 0
        """How many threads have waited longer than _STARVING_AFTER."""
        self._watched = False
        """Whether the background loop watches all connections. It starts with the first call after `joining`, so that
        a store without calls starts no thread."""
        self._detour = True
        """Whether calls must not simply take the only connection: threads starve, the server is not identified, the
        connection is not watched yet, or it has items to push back."""

    @property
    def host(self) -> str:
        """The host of the server that was reached last."""
        return self.servers.first[0]

    @property
    def port(self) -> int:
        return self.servers.first[1]

    @property
    def durable(self) -> bool:
        """Whether the store's session continues when its server comes back, as far as that is known."""
        return any(one.link is not None and one.link.durable for one in self._connections)

    def local_host(self) -> str:
        """Return the IP address by which this host reaches the server; "" if the connection is lost."""
        try:
            return str(self._connections[0].peer.getsockname()[0])
        except (OSError, IndexError):
            return ""

    def describe(self) -> str:
        """Return both ends of the first connection, in the format of PyTorch's client."""
        connection = next(iter(self._connections), None)
        if connection is None:
            return "closed" if self.closed else "not connected"
        try:
            here, there = connection.peer.getsockname(), connection.peer.getpeername()
        except OSError:
            return "lost"
        ends = f"addr=[{here[0]}]:{here[1]}, remote=[{there[0]}]:{there[1]}"
        return f"SocketImpl(fd={connection.peer.fileno()}, {ends})"

    def reset_after_fork(self) -> None:
        """Drop the parent's connections in a forked child; the next call opens one."""
        me = get_ident()
        for connection in [*self._connections, *self._probes]:
            connection.inherited = True
            leave_to_parent(connection.peer, connection.user == me)
        if self.name is not None:
            self.name = self.name.of_a_guest()
        self._start([])

    def _verify(self, connection: SyncConnection, deadline: Deadline) -> None:
        """Check that a further connection leads to the same server. Raises ProtocolError and AccessDeniedError."""
        raise NotImplementedError

    # Connections

    def _lease(self, deadline: Deadline) -> SyncConnection:
        """Lease a connection to this thread, on which everything that the store has written is visible.

        An interrupt leaves no connection leased. Raises DeadlineExceeded.
        """
        me = get_ident()
        connection: SyncConnection | None = None
        try:
            with self._lock:
                connections = self._connections
                if len(connections) == 1 and not connections[0].user and not self._detour:  # the common case
                    connection = connections[0]
                    connection.user = me
            if connection is None:
                connection = self._lease_later(me, deadline)
            if connection.session.pending or connection.stranded:
                connection.drain_abandoned_calls(deadline)
            return connection
        except BaseException as error:
            if connection is not None and connection.user == me:
                connection.interrupted(error)
                self._release(connection)
            raise

    def _lease_later(self, me: int, deadline: Deadline) -> SyncConnection:
        """Lease a connection when none may be free: wait for one, or open one. Raises DeadlineExceeded."""
        connection: SyncConnection | None = None
        ticket = Ticket()
        within = self._within_another(me)
        behind = self._starving > 0 and not within  # the interrupted call may be what the starving threads wait for
        try:
            for other in list(self._connections) if within else []:
                if other.user == me:
                    other.await_writes(deadline)
            while connection is None:
                if not self._watched and self.forming:
                    background.defer(self.watch)
                elif not self._watched and not self.joining:
                    background.call_uninterrupted(self.watch)
                with self._lock:
                    self._free_queue.join(ticket)  # before `_free`: a thread that releases one must see the ticket
                    if not behind:
                        connection = self._free()
                    may_open = connection is None and not behind and self._may_open(me, within)
                    if connection is not None:
                        connection.user = me
                        self._leave(ticket)
                if connection is not None and self._unconfirmed_beside(connection):
                    # Make the writes on this one visible; the next turn takes the other connection with writes.
                    if connection.session.pending:
                        connection.drain_abandoned_calls(deadline)
                    connection.confirm_writes(deadline)
                    self._release(connection)
                    connection = None
                elif may_open:
                    self._open(deadline, me, within)
                elif connection is None:
                    self._wait(ticket, deadline, behind or within)
                    behind = False
            return connection
        except BaseException as error:
            if connection is not None:
                connection.interrupted(error)
            try:
                self._give_up(connection, ticket, me)
            except BaseException:  # an interrupt; assume no second one this soon
                self._give_up(connection, ticket, me)
            raise

    def _within_another(self, me: int) -> bool:
        """Return whether a signal handler makes this call, having interrupted another call of this store."""
        if self._opening == me or any(connection.user == me for connection in [*self._connections, *self._probes]):
            return True
        return any(ticket.user == me for ticket in list(self._free_queue.tickets))

    def _confirm_within(self, connection: SyncConnection, me: int, deadline: Deadline | None) -> None:
        """In a signal handler, wait until the server has executed the handler's writes.

        The interrupted call may write next, on another connection. Raises OSError, ProtocolError or DeadlineExceeded.
        """
        if any(other is not connection and other.user == me for other in list(self._connections)):
            deadline = deadline or Deadline.of_a_call(self.timeout)
            connection.confirm_writes(deadline)

    def _wait(self, ticket: Ticket, deadline: Deadline, briefly: bool) -> None:
        """Wait until this thread is notified, or only briefly. Raises DeadlineExceeded."""
        left = deadline.poll_seconds()
        if briefly:
            left = _BRIEF_WAIT if left is None else min(left, _BRIEF_WAIT)
        if not ticket.wait(left) and deadline.passed():
            raise DeadlineExceeded
        if not ticket.starving and deadline.spent() > _STARVING_AFTER:
            with self._lock:
                self._starving += 1
                self._detour = True
                ticket.starving = True

    def _leave(self, ticket: Ticket) -> None:
        """Leave the queue for a free connection. Needs the lock."""
        self._starving -= ticket.starving
        ticket.starving = False
        stranded = [connection for connection in self._connections if connection.stranded]
        self._detour = self._starving > 0 or not self._watched or not self._identified or bool(stranded)
        self._free_queue.leave(ticket)

    def _give_up(self, connection: SyncConnection | None, ticket: Ticket, me: int) -> None:
        """Leave the queue, and release a connection that was leased. May be called again."""
        with self._lock:
            self._leave(ticket)
            self._free_queue.notify()  # a notification that this thread may have received is due to another
        if connection is not None and connection.user == me:
            self._release(connection)

    def _free(self) -> SyncConnection | None:
        """Return a free connection that shows everything written, or None. Raises DistNetworkError if lost."""
        if self._lost:
            raise self._lost_error()
        free = None
        me = get_ident()
        for connection in self._connections:
            if connection.user:
                # A call on another connection could overtake these writes. Our own were confirmed before.
                if connection.session.unconfirmed() and connection.user != me:
                    return None
            elif free is None or connection.session.unconfirmed():
                free = connection
        return free

    def _unconfirmed_beside(self, connection: SyncConnection) -> bool:
        """Return whether another free connection has unconfirmed writes, too.

        Then two threads have written at the same time, and a request on one connection could overtake the writes on the
        other, unless those of one are confirmed first.
        """
        return connection.session.unconfirmed() and any(
            other is not connection and not other.user and other.session.unconfirmed()
            for other in list(self._connections)
        )

    def _may_open(self, me: int, within: bool) -> bool:
        """Return whether to open a connection: every one is parked, and no thread is opening another.

        A signal handler opens one anyway, unless another thread has unconfirmed writes.
        """
        if within:
            return not any(
                connection.user != me and connection.session.unconfirmed() for connection in self._connections
            )
        return not self._opening and all(connection.parked for connection in self._connections)

    def _open(self, deadline: Deadline, me: int, within: bool) -> None:
        """Open a further connection, unless another thread is doing that."""
        mine = False
        opened: list[SyncConnection] = []  # a list: mypyc mistypes an optional in `finally`
        try:
            with self._lock:
                if self._opening and not within:
                    return
                mine = not self._opening
                if mine:
                    self._opening = me
            connection = self._connect(deadline)
            opened.append(connection)
            connection.user = me
            with self._lock:
                if self._lost:
                    raise self._lost_error()
                self._probes.append(connection)
            self._verify(connection, deadline)
            connection.user = NO_THREAD
            with self._lock:
                if self._lost:
                    raise self._lost_error()
                self._connections.append(connection)
                self._watched = False
                self._detour = True
        except BaseException as error:
            for one in opened:
                one.peer.close()
            if not is_break(error):
                raise
            time.sleep(_BRIEF_WAIT)  # the caller tries again: nothing has been written on this one
        finally:
            with self._lock:
                for one in opened:
                    if one in self._probes:
                        self._probes.remove(one)
                if mine:
                    self._opening = NO_THREAD
                self._free_queue.notify_all()

    def _connect(self, deadline: Deadline) -> SyncConnection:
        """Connect once more. Raises DeadlineExceeded if the store has other connections, else DistNetworkError."""
        try:
            wanted = lambda: not self._lost  # noqa: E731
            connected = connect_blocking(self.servers, deadline, wanted, token=self.token, tls=self.tls, name=self.name)
            return SyncConnection(*connected)
        except Cancelled:
            raise self._lost_error() from None
        except DistNetworkError as error:
            if self._lost:
                raise self._lost_error() from None
            if self._connections:  # the server is there: this call's time was too short, and the store is not lost
                raise DeadlineExceeded from error
            raise

    def _release(self, connection: SyncConnection) -> None:
        """Return a connection to the pool in step, or close it. May be called again after an interrupt."""
        if connection.user == get_ident():
            connection.check_partial_send()
            if not connection.inherited and not self._lost:
                connection.give_back()
                connection.cancel()
            if connection.broken and not self._lost and not connection.inherited:
                self._drop(connection)
            connection.parked = False
            with self._lock:  # without the GIL, `_notify_free` might miss a thread that has just queued
                connection.user = NO_THREAD
            if connection.down is not None and not self._lost:
                background.check_soon(self)
        self._notify_free(connection)

    def _notify_free(self, connection: SyncConnection) -> None:
        """Notify a waiting thread of a free connection.

        A thread that queues after the check of the tickets finds the connection free, as it queues before it looks.
        """
        if (self._lost or connection.inherited) and not connection.user:
            connection.peer.close()
            if connection.inherited:
                return
        if self._free_queue.tickets or len(self._connections) > 1:
            with self._lock:
                self._free_queue.notify()
                self._close_surplus(connection)

    def _close_surplus(self, connection: SyncConnection) -> None:
        """Close further connections that have been idle for IDLE_SECONDS. Needs the lock."""
        # Not those with unconfirmed writes, which could be lost unnoticed.
        now = connection.used = time.monotonic()
        for other in self._connections[1:]:
            if not other.user and now - other.used > IDLE_SECONDS and not other.session.unconfirmed():
                self._connections.remove(other)
                other.peer.close()

    def _drop(self, connection: SyncConnection) -> None:
        """Close a connection that is out of step. Lose the store if writes may be lost with it."""
        if connection.session.unconfirmed() or self.identity is None:
            self._lose(f"a connection was closed in the middle of a call: {connection.broken_by}")
            return
        with self._lock:
            if connection in self._connections:
                self._connections.remove(connection)
        connection.peer.close()

    def _failed(
        self, connection: SyncConnection | None, error: Exception, request: Request | None = None
    ) -> DistNetworkError:
        """Lose the store because a connection failed; return the error of the call that made `request`."""
        if connection is not None and connection.inherited:
            return DistNetworkError(_FORKED)
        reason = reason_of(error)
        silence = "" if connection is None else describe_silence(connection.peer)
        if connection is not None and isinstance(error, OSError):
            reason += requests.size_hint(connection.longest)
        if request is not None:
            return self._lose(reason, requests.lost_during(request, silence))
        return self._lose(f"{reason} ({silence})" if silence else reason)

    def _lose(self, reason: str, details: str = "") -> DistNetworkError:
        """Lose the store, as PyTorch's is lost with its connection; return an error with the first reason.

        `details` of the failed call follow it.
        """
        with self._lock:
            self._lost = self._lost or reason
            try:
                background.release(self)  # first, so that closing connections does not wake the loop
            finally:
                for connection in [*self._connections, *self._probes]:
                    _shut(connection)
                self._connections.clear()
                self._free_queue.notify_all()
                self._identity_queue.notify_all()
        return self._lost_error(details)

    def _lost_error(self, details: str = "") -> DistNetworkError:
        """Return a new error for a call on a lost store."""
        text = self._lost + ("" if self.closed else details)
        if (self.name is not None or self.token) and not self.closed:
            why = self._ask_why_lost()
            text = f"{why}: {text}" if why else text
        if self.server_crash is not None and not self.closed:
            crash = self.server_crash()
            text = f"{text}: {crash}" if crash else text
        error = ConnectionDeniedError(text) if self._denied and not self.closed else DistNetworkError(text)
        error.__cause__ = None  # hides the context, in compiled code too
        return error

    def _ask_why_lost(self) -> str:
        """Return the server's reason for ending the store or the connection; "" if it has none or does not answer."""
        if self._why_lost is None and not background.is_running_here():
            self._why_lost = ""
            try:
                peer, session = connect_blocking(
                    self.servers,
                    Deadline(MIN_ROUND_TRIP),
                    refused_is_final=True,
                    token=self.token,
                    tls=self.tls,
                    name=None if self.name is None else self.name.once(),
                )
                peer.close()
                self._why_lost, self._denied = session.refusal, bool(session.refusal)
            except (DistNetworkError, DistStoreError, OSError) as error:
                self._why_lost, self._denied = why_lost(error)
        return self._why_lost or ""

    # Background loop

    def watch(self) -> bool:
        """Hand new connections to the background loop, unless the store is lost; return False to try again.

        Called by `background.call_uninterrupted` or `defer`. It must not wait for the lock: an interrupted call may
        hold it.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._lost:
                return True
            self.forming = False
            new = [connection for connection in self._connections if not connection.watched]
            for connection in new:
                connection.watched = True
            self._watched = True  # before `watch`: the loop may stop right after it
            if not background.watch(self, [connection.peer.fileno() for connection in new]):
                self.unwatched()
            self._detour = self._starving > 0 or not self._watched or not self._identified
            return self._watched
        finally:
            self._lock.release()

    def unwatched(self) -> None:
        """Have the next call hand all connections to a new background loop, as this one has stopped."""
        for connection in list(self._connections):
            connection.watched = False
        self._watched = False
        self._detour = True

    def check_idle(self) -> bool:
        """On the background loop, lose the store if an idle connection is lost, with the next call's error.

        A thread that uses a connection notices its loss itself. Returns False to be called again.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            done = True
            for connection in list(self._connections):
                if connection.user:
                    done = done and not connection.hung_up()
                    continue
                error = connection.down or connection.loss()
                if error is not None and self._resume_later(connection, error):
                    continue
                if error is not None:
                    lost = self._failed(connection, error)
                    log.debug("lost the idle connection to %s:%d: %s", self.host, self.port, lost)
                    return True
            return done
        finally:
            self._lock.release()

    def _resume_later(self, connection: SyncConnection, error: OSError) -> bool:
        """On the background loop, start replacing a broken connection; return False if it cannot be. Needs the lock."""
        if not connection.can_resume() or (connection.down is None and not connection.breaks(error)):
            return False
        if connection.down is None:
            connection.mark_down(error)
        connection.user = LOOP
        wanted = lambda: not (self._lost or background.exiting())  # noqa: E731
        resuming = resume_idle(self.servers, self.token, self.tls, connection, wanted)
        background.spawn(resuming, functools.partial(self._resumed, connection))
        return True

    def _resumed(self, connection: SyncConnection, task: "asyncio.Task[None]") -> None:
        """On the background loop, release a connection that was replaced, or lose the store with it."""
        down = connection.down
        error = None if task.cancelled() else task.exception()
        connection.user = NO_THREAD
        if self._lost:
            connection.peer.close()  # without the lock: the thread that loses the store has it, and waits for the loop
            return
        self._notify_free(connection)
        if isinstance(error, Exception):
            reason = f"{reason_of(down)}; {reason_of(error)}" if down is not None else reason_of(error)
            lost = self._failed(connection, ConnectionError(reason))
            log.debug("lost the idle connection to %s:%d: %s", self.host, self.port, lost)


def _shut(connection: SyncConnection) -> None:
    """Close a connection. If it is leased, only wake its user, which closes it: the descriptor must not be reused."""
    try:
        if isinstance(connection.peer, TlsSocket) and not connection.user:
            connection.peer.finish()
        connection.peer.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # not connected any more
    if not connection.user:
        connection.peer.close()
