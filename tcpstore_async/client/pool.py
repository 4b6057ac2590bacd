"""The synchronous client of one store: a pool of connections that threads lease, write to and read from themselves.

The pool decides which connection a call may use, keeps deadlines, and copes with threads, forks and signal handlers.
What a request means is not its business.

Invariants:

* A blocked call delays no other thread.
* What one thread has written is visible to every later request of any thread, on whichever connection.
* A call that is interrupted or times out leaves its connection in step or closed.
* A signal handler may make calls whatever it has interrupted. It waits for the server and for other threads, never for
  something that only the interrupted call could do.
* The background loop takes no part in calls. It marks a store as lost whose idle connection is lost, which would
  otherwise show at the next call only.
"""

import asyncio
import functools
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from threading import get_ident
from typing import Any, Final

from ..base.deadline import IDLE_SECONDS, MIN_ROUND_TRIP, Deadline
from ..base.errors import (
    AccessDeniedError,
    ConnectionDeniedError,
    DistError,
    DistNetworkError,
    DistStoreError,
    ProtocolError,
    StoreTimeoutError,
    reason_of,
)
from ..base.locks import RLock
from ..links.single_client import UNANSWERED_BYTES, ClientSingleLink, is_break
from ..session.client import PendingCall
from ..session.identity import SINGLE_LINKS, Identity, check_admitted, granted_access, read_identity
from ..wire.values import Framed, unpack
from . import background, capabilities, explanation, requests
from .connect import Cancelled, always, connect_blocking
from .last_byte import describe_silence
from .requests import ANOTHER, Request
from .resume import resume_blocking, resume_idle
from .store_name import StoreEndedError, StoreName
from .sync_connection import FLAGS, NO_THREAD, DeadlineExceeded, Leased, Stranded, SyncConnection
from .tls import ClientTls
from .wait_queue import Ticket, WaitQueue

log = logging.getLogger("tcpstore_async.client")

_GRACE: Final = 0.05
"""Seconds granted to the request after a wake-up that came just before the deadline."""

_STARVING_AFTER: Final = 0.001
"""Seconds after which a thread that waits for a connection has precedence.

Otherwise a thread that makes call after call would take its connection again before any other thread runs.
"""

_BRIEF_WAIT: Final = 0.01
"""Seconds that a thread waits before it competes with starving threads, and between two looks of a signal handler: its
notification may go to the call that it has interrupted, or be held up by a lock of that call."""

_FREE_THREADED: Final[bool] = hasattr(sys, "_is_gil_enabled") and not sys._is_gil_enabled()

_LOOP: Final = -1
"""The user of a connection that the background loop replaces."""

_FORKED: Final = "the process forked during this call; only the parent receives the reply"


class TCPClient:
    """The connections of one store."""

    def __init__(
        self,
        host: str,
        port: int,
        timeout: float,
        introduction: dict[str, str] | None = None,
        began: float | None = None,
        token: bytes = b"",
        tls: ClientTls | None = None,
        name: StoreName | None = None,
        joins: bool = False,
        refused_is_final: bool = False,
        wanted: Callable[[], bool] = always,
    ) -> None:
        """Connect, retrying until the timeout, in seconds from now or from `began`. Raises DistNetworkError.

        With `refused_is_final`, raises ConnectionRefusedError at once if nobody listens there. `wanted` says, when
        asked, whether to go on.

        `introduction` describes this client to the server, if the server turns out to be one of ours. With a `token`,
        every connection presents it; raises AccessDeniedError if it is refused. With `tls`, which is this client's
        alone, connections are encrypted. With a `name`, they are put into the store of that name. A client that `joins`
        asks for the server's identity next, and begins that with the handshake.
        """
        self.name = name
        self._why_lost: str | None = None
        """Why the server has ended the store with a name, or the connection, if it has; None before that was asked."""
        self._denied = False
        """Whether that is for what the token does not allow."""
        self.host = host
        self.port = port
        self.timeout = timeout
        self.introduction = introduction or {}
        self.token = token
        self.identity: Identity | None = None
        """The server's identity, once requested, if the server is one of ours."""
        self.farewell: Request | None = None
        """Request without a reply that is sent to a server of ours when the store is closed."""
        self.server_crash: Callable[[], str] | None = None
        """Returns how the server crashed, or "" if it did not, in the process that has started it."""
        self.joining = False
        """Whether the store is being opened. It may be closed right after that, so only later calls start the
        background loop."""
        self.forming = False
        """Whether a process group is being formed with it: then calls do not wait until the background loop runs."""
        self.closed = False
        self._identified = False
        self._supported: dict[str, bool] = {}
        """Whether the server supports what older servers of PyTorch do not, as far as probed."""
        self._lost = ""
        self.tls = tls
        try:
            limit = Deadline(timeout, began)
            asks = joins and not token and name is None  # otherwise the connection's identity will be known
            opened = connect_blocking(
                host, port, limit, wanted, refused_is_final=refused_is_final, token=token, tls=tls, name=name, asks=asks
            )
            self._start([SyncConnection(*opened)])
        except BaseException:
            if tls is not None:
                tls.close_blocking()
            raise

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
        """Whether the background loop watches the connections: from the first call on, so that a store without calls
        starts no thread. See `joining`."""
        self._detour = True
        """Whether calls must not simply take the only connection, because threads starve, the server is to be
        identified, or the connection has to be handed to the background loop or has items to push back."""

    def close(self) -> None:
        """Close every connection. Calls in progress in other threads fail, and so do later ones."""
        if not self.closed:
            self._finish_writes()
            self._return_stranded()
            if not self._end_named_store():
                self._send_farewell()
        self.closed = True
        self._lose("the store has been closed")
        if self.tls is not None:
            self.tls.close_blocking()

    def clone(self) -> "TCPClient":
        """Return a client of the same server. Raises DistNetworkError, also if another server has replaced it."""
        if self._lost:
            raise self._lost_error()
        tls = None if self.tls is None else self.tls.renewed()
        name = None if self.name is None else self.name.of_a_guest()
        clone = TCPClient(self.host, self.port, self.timeout, self.introduction, token=self.token, tls=tls, name=name)
        clone._supported = dict(self._supported)
        try:
            if self.identity is not None and (not clone.extended() or clone.identity != self.identity):
                raise DistNetworkError(ANOTHER)
        except BaseException:
            clone.close()
            raise
        return clone

    def describe(self) -> str:
        """Both ends of the first connection, as PyTorch's client shows them."""
        connection = next(iter(self._connections), None)
        if connection is None:
            return "closed" if self.closed else "not connected"
        try:
            here, there = connection.peer.getsockname(), connection.peer.getpeername()
        except OSError:
            return "lost"
        ends = f"addr=[{here[0]}]:{here[1]}, remote=[{there[0]}]:{there[1]}"
        return f"SocketImpl(fd={connection.peer.fileno()}, {ends})"

    def forked(self) -> None:
        """In a forked child: drop the parent's connections, to open its own with the next call."""
        me = get_ident()
        for connection in [*self._connections, *self._probes]:
            connection.inherited = True
            if connection.user == me:
                _replace(connection.peer)  # a signal handler has forked; the interrupted call still uses it
            else:
                connection.peer.close()
        if self.tls is not None:
            self.tls = self.tls.renewed()
        if self.name is not None:
            self.name = self.name.of_a_guest()
        self._start([])

    # Calls

    def call(self, request: Request, deadline: Deadline | None = None) -> Any:
        """Make a call that the server answers at once, or not at all. Raises StoreTimeoutError, DistNetworkError.

        Without a deadline the store's timeout counts, of which 0 allows one round trip.
        """
        connection = None
        me = get_ident()
        try:
            # `_lease` and, below, `_release`, inlined: 0.3 µs of the 1.7 µs that the client itself takes.
            with self._lock:
                connections = self._connections
                if len(connections) == 1 and not connections[0].user and not self._detour:
                    connection = connections[0]
                    connection.user = me
            if connection is None or connection.session.pending:
                if connection is None and not self._identified:
                    spent = deadline or Deadline.of_a_call(self.timeout)
                    self._identify_first(spent)
                    deadline = spent if self.timeout else deadline  # 0 allows this, and then the call, one second each
                deadline = deadline or Deadline.of_a_call(self.timeout)
                if connection is None:
                    connection = self._lease_later(me, deadline)
                if connection.session.pending or connection.stranded:
                    connection.settle(deadline)
            data, call = connection.session.prepare(*request)
            writes = call is None and request[0].mutates
            if not connection.put(data, call, writes):
                deadline = deadline or Deadline.of_a_call(self.timeout)
                connection.put_rest(data, call, deadline, writes)
            if call is None:
                link = connection.link
                if link is not None:
                    link.unanswered += len(data)
                    if link.unanswered > UNANSWERED_BYTES:
                        deadline = deadline or Deadline.of_a_call(self.timeout)
                        connection.confirm_writes(deadline)
                if len(self._connections) > 1:
                    self._confirm_within(connection, me, deadline)
                return None
            try:
                connection.read()
            except BlockingIOError:
                pass  # no reply yet
            if not call.done:
                connection.read_until(call, deadline or Deadline.of_a_call(self.timeout))
            return call.result
        except DeadlineExceeded as out:
            raise requests.late(request, self.timeout, out.__cause__) from out.__cause__
        except (OSError, ProtocolError) as error:
            raise self._failed(connection, error, request) from None
        except BaseException as error:
            if connection is not None:
                connection.interrupted(error)
            raise
        finally:
            if connection is not None:
                try:
                    if (
                        _FREE_THREADED
                        or connection.frame
                        or connection.broken
                        or connection.user != me
                        or connection.session.pending
                    ):
                        self._release(connection)
                    else:  # a thread that queues before this is seen below; one that queues after it sees this
                        connection.user = NO_THREAD
                        if self._lost or self._free_queue.tickets or len(self._connections) > 1:
                            self._notify_free(connection)
                except BaseException:  # an interrupt; assume no second one this soon
                    self._release(connection)
                    raise

    def call_blocking(
        self, request: Request, seconds: float, then: Request | None = None, began: float | None = None
    ) -> Any:
        """Make a call that is answered when something happens. Raises StoreTimeoutError, DistNetworkError.

        The timeout is in seconds, from `began` if given; 0 checks once, negative means none. With `then`, that request
        follows on the same connection before any other, and its result is returned. A server of ours is asked why the
        call has timed out, which may take a second more; see `StoreTimeoutError`.
        """

        def wait(connection: SyncConnection, deadline: Deadline) -> Any:
            call = connection.request(request, deadline)
            self._wait_for(connection, call, deadline, once=seconds == 0)
            if then is not None:
                deadline = _at_least(_GRACE, deadline)
                call = connection.request(then, deadline)
                connection.read_until(call, deadline)
            return call.result

        try:
            return self._on_a_connection(wait, request, Deadline.of_a_call(seconds, began), seconds)
        except StoreTimeoutError as error:
            self._explain(error, request, seconds)
            raise

    def _explain(self, error: StoreTimeoutError, request: Request, seconds: float) -> None:
        """Ask the server why a call has timed out, and say so in its error; without an answer, leave that as it is."""
        asked = explanation.question(request, seconds, self.identity)
        if asked is None or self._lost:
            return
        try:
            answer = self.call(asked, Deadline(min(seconds, explanation.MOST_SECONDS)))
            explanation.explain(error, asked, answer)
        except (DistError, ProtocolError) as failure:
            log.debug("could not find out from %s:%d why a call timed out: %s", self.host, self.port, failure)

    def _on_a_connection(
        self, work: Callable[[SyncConnection, Deadline], Any], request: Request, deadline: Deadline, seconds: float
    ) -> Any:
        """Lease a connection for `work`, which may raise DeadlineExceeded, OSError and ProtocolError.

        They become StoreTimeoutError, with the request and the seconds in its text, and DistNetworkError.
        """
        connection = None
        try:
            connection = self._lease(deadline, seconds, deadline.began)
            return work(connection, deadline)
        except DeadlineExceeded as out:
            raise requests.late(request, seconds, out.__cause__) from out.__cause__
        except (OSError, ProtocolError) as error:
            raise self._failed(connection, error, request) from None
        except BaseException as error:
            if connection is not None:
                connection.interrupted(error)
            raise
        finally:
            if connection is not None:
                try:
                    self._release(connection)
                except BaseException:  # an interrupt; assume no second one this soon
                    self._release(connection)
                    raise

    def pop(self, lease: Request, seconds: float, began: float) -> bytes | None:
        """Take an item that a server of ours leases; return None if there is none.

        The item is the caller's once the server has been sent the confirmation. After an interrupt between that and the
        return, it is pushed back to the end of the queue. The caller must not make a call before it returns the item.
        """
        taken: list[Framed] = []
        confirmed: list[int] = []
        try:
            return self._pop(lease, seconds, began, taken, confirmed)
        except BaseException:
            if confirmed:
                self.call(requests.push_back(lease[1][0], taken[0]))
            raise

    def _pop(
        self, lease: Request, seconds: float, began: float, taken: list[Framed], confirmed: list[int]
    ) -> bytes | None:
        def pop(connection: SyncConnection, deadline: Deadline) -> bytes | None:
            connection.leased = Leased(lease, confirmed)  # before the request: `_release` gives it back
            call = connection.request(lease, deadline)
            if lease[0].parks:
                self._wait_for(connection, call, deadline, once=False)
            else:
                connection.read_until(call, deadline)
            _, item = call.result
            if item is None:
                connection.leased = None
                return None
            taken.append(item)
            value = unpack(item)
            connection.confirm(lease, confirmed, deadline)
            return value

        value: bytes | None = self._on_a_connection(pop, lease, Deadline.of_a_call(seconds, began), seconds)
        return value

    def pop_unconfirmed(self, request: Request, seconds: float, began: float, wait: Request | None) -> bytes | None:
        """Take an item from a server of PyTorch, after `wait` if given; return None if there is none.

        If anything keeps the item from the caller, it is pushed back to the end of the queue once it has arrived.
        """

        def pop(connection: SyncConnection, deadline: Deadline) -> bytes | None:
            if wait is not None:
                self._wait_for(connection, connection.request(wait, deadline), deadline, once=seconds == 0)
                deadline = _at_least(MIN_ROUND_TRIP, deadline)
            mine: list[PendingCall] = []
            try:
                mine.append(connection.request(request, deadline))
                connection.read_until(mine[0], deadline)
                item: Framed | None = mine[0].result[1]
                return None if item is None else unpack(item)
            except BaseException:
                calls = mine or [call for call in connection.session.pending if call.fields is request[1]]
                connection.stranded += map(Stranded, calls)
                self._detour = True
                raise

        value: bytes | None = self._on_a_connection(pop, wait or request, Deadline.of_a_call(seconds, began), seconds)
        return value

    def _finish_writes(self) -> None:
        """Before closing: wait until the server has executed the last writes, if that takes no more than a second.

        Connections that break meanwhile, or are broken, are resumed, so that the server gets what was sent last and
        ends their sessions at once, not after its grace period. Calls of other threads are not waited for.
        """
        if background.is_running_here():
            return  # the loop may be replacing one, and cannot wait for itself
        deadline = Deadline(MIN_ROUND_TRIP)
        unconfirmed = False
        for connection in [connection for connection in self._connections if connection.can_resume()]:
            try:
                self._finish_writes_on(connection, deadline)
            except DeadlineExceeded:  # the session ends with the grace period
                unconfirmed = unconfirmed or connection.session.unconfirmed()
            except (OSError, ProtocolError):
                pass  # the session has ended with the server
        if unconfirmed:
            log.warning("%s", requests.unconfirmed_at_close(self.host, self.port))

    def _finish_writes_on(self, connection: SyncConnection, deadline: Deadline) -> None:
        """Lease a connection, unless a call has it; resume it if it is broken, and have its last writes confirmed."""
        me = get_ident()
        if connection.user == me:
            return  # a signal handler closes the store, and has interrupted the call
        ticket = Ticket()
        try:
            while not self._lost:
                with self._lock:
                    self._free_queue.join(ticket)
                    if not connection.user:
                        connection.user = me
                if connection.user != _LOOP:
                    break
                self._wait(ticket, deadline, briefly=True)  # notified of any free connection, not only of this one
            if connection.user == me and not self._lost:
                error = connection.down or connection.loss()
                if error is not None and is_break(error):
                    if connection.down is None:
                        connection.mark_down(error)
                    connection.settle(deadline)
                if connection.session.unconfirmed():
                    connection.settle(deadline)
                    connection.confirm_writes(deadline)
        finally:
            self._give_up(connection, ticket, me)

    def _end_named_store(self) -> bool:
        """Before closing: end the store, if this client owns it, so that its name is free when this returns.

        Returns whether this client has left the store by that.
        """
        if self.name is not None and self.name.owner and not self._lost:
            try:
                self.call(requests.END_STORE, Deadline(MIN_ROUND_TRIP))
                return True
            except (DistNetworkError, StoreTimeoutError):
                pass  # it ends when the server notices that the connection is lost
        return False

    def _send_farewell(self) -> None:
        farewell = self.farewell
        if farewell is None:
            return
        for connection in self._connections:
            if not connection.user and not connection.broken and connection.session.waiting is None:
                try:
                    connection.peer.send(connection.session.request(*farewell)[0], FLAGS)
                except OSError:
                    pass  # the connection is lost

    def _return_stranded(self) -> None:
        """Before closing: push back items popped for callers that gave up, if they arrive within a second."""
        deadline = Deadline(MIN_ROUND_TRIP)
        for connection in self._connections:
            if connection.stranded and not connection.user:
                try:
                    connection.settle(deadline)
                except (OSError, ProtocolError, DeadlineExceeded):
                    pass  # it was lost with the connection

    def call_all(self, batch: list[Request], deadline: Deadline) -> list[Any]:
        """Make calls that have replies, at once, in one round trip. Raises StoreTimeoutError, DistNetworkError.

        All requests are sent before the first reply is read, so the replies must be of a few bytes.
        """

        def exchange(connection: SyncConnection, deadline: Deadline) -> list[Any]:
            prepared = [connection.session.prepare(*request) for request in batch]
            data = b"".join([data for data, _ in prepared])
            calls = [call for _, call in prepared if call is not None]
            ahead = tuple(calls[:-1])
            if not connection.put(data, calls[-1], False, ahead):
                connection.put_rest(data, calls[-1], deadline, False, ahead)
            connection.read_until(calls[-1], deadline)
            return [call.result for call in calls]

        try:
            self._identify_first(deadline)
        except DeadlineExceeded:
            raise requests.late(batch[0], deadline.timeout) from None
        results: list[Any] = self._on_a_connection(exchange, batch[0], deadline, deadline.timeout)
        return results

    def _wait_for(self, connection: SyncConnection, call: PendingCall, deadline: Deadline, once: bool) -> None:
        """Read until a blocking call is answered. Raises OSError, ProtocolError or DeadlineExceeded."""
        connection.read_soon()
        if call.done:
            return
        if once:
            connection.cancel()
            connection.settle(deadline)
            if not call.woken:
                raise DeadlineExceeded
            return
        pending = connection.session.pending
        while (
            pending and pending[0] is not call
        ):  # the fence: until its reply other threads must not use other connections
            connection.read_until(pending[0], deadline)
        with self._lock:
            connection.parked = True
            self._free_queue.notify_all()
        connection.read_until(call, deadline)

    # Server identity and capabilities

    def extended(
        self, request: Request | None = None, seconds: float | None = None, began: float | None = None
    ) -> bool:
        """Return whether the server is one of ours; the first time, request that from the server.

        The time counts as part of the call `request`, which has `seconds` from `began`. Raises StoreTimeoutError,
        DistNetworkError.
        """
        if not self._identified:
            seconds = self.timeout if seconds is None else seconds
            try:
                self._identify(Deadline.of_a_call(seconds, began))
            except (DeadlineExceeded, StoreTimeoutError):
                raise requests.late(request or requests.HAS_EXTENSION, seconds) from None
        return self.identity is not None

    def supports(self, what: str, request: Request, seconds: float | None = None, began: float | None = None) -> bool:
        """Return whether the server supports a capability; probe once, on a separate connection.

        The time counts as part of the call `request`, which has `seconds` from `began`. Raises StoreTimeoutError,
        DistNetworkError.
        """
        if what == capabilities.EXTENSION:
            self.extended(request, seconds, began)
            return self.identity is not None and self.identity.extension >= request[0].since
        known = self._supported.get(what)
        if known is None:
            known = self.extended(request, seconds, began) or self._probe(what, request, seconds, began)
            self._supported[what] = known
        return known

    def _probe(self, what: str, request: Request, seconds: float | None, began: float | None) -> bool:
        seconds = self.timeout if seconds is None else seconds
        try:
            deadline = Deadline.of_a_call(seconds, began)
            return any(self._probe_once(capabilities.probe(what), deadline) for _ in range(capabilities.PROBES))
        except DeadlineExceeded:
            raise requests.late(request, seconds) from None

    def _probe_once(self, batch: list[Request], deadline: Deadline) -> bool:
        connection = self._connect(deadline)
        connection.user = get_ident()
        try:
            with self._lock:
                if self._lost:
                    raise self._lost_error()
                self._probes.append(connection)
            for request in batch:
                connection.read_until(connection.request(request, deadline), deadline)
        except OSError:
            self.call(requests.NO_KEY, deadline)  # raises if the store, or the whole server, is lost
            return False
        except ProtocolError as error:
            raise self._lose(str(error)) from None
        finally:
            with self._lock:
                if connection in self._probes:
                    self._probes.remove(connection)
            connection.peer.close()
        return True

    def _identify(self, deadline: Deadline) -> None:
        """Request the identity in one thread, while others wait. Raises DeadlineExceeded, StoreTimeoutError,
        DistNetworkError.
        """
        me = get_ident()
        ticket = Ticket()
        while not self._identified and not self._lost:
            with self._lock:
                # A signal handler does not wait for another thread, which may need what the interrupted call holds.
                others = self._identifying not in (NO_THREAD, me) and not self._within_another(me)
                if others:
                    self._identity_queue.join(ticket)
                else:
                    self._identifying = me
            if not others:
                self._identify_now(deadline)
            elif not ticket.wait(deadline.poll_seconds()) and deadline.passed():
                raise DeadlineExceeded

    def _identify_first(self, deadline: Deadline) -> None:
        """Before a call that does not depend on the server's identity: request that all the same.

        Otherwise the store would not survive a reset connection. A call with little time must not fail because of it:
        it leaves that to a later one. Raises DeadlineExceeded, DistNetworkError.
        """
        if self._identified or 0 <= deadline.timeout < MIN_ROUND_TRIP:
            return
        try:
            self._identify(deadline)
        except StoreTimeoutError:
            raise DeadlineExceeded from None

    def _identify_now(self, deadline: Deadline) -> None:
        try:
            self._on_a_connection(self._identify_on, requests.HAS_EXTENSION, deadline, deadline.timeout)
            self._identified = True
        finally:
            with self._lock:
                self._identifying = NO_THREAD
                self._identity_queue.notify_all()

    def _identify_on(self, connection: SyncConnection, deadline: Deadline) -> None:
        if self.identity is None:
            self.identity = connection.session.identity
        if self.identity is None:
            asked = connection.session.asked  # answered: whoever leases a connection takes the replies that are due
            ours = self._result(connection, requests.HAS_EXTENSION, deadline) if asked is None else asked.result
            if ours:
                self.identity = self._identity_on(connection, deadline)
        if self.identity is not None:
            check_admitted(self.identity)
            if not self.token:  # what a relay's token allows
                self._restrict(self._connections)
            self._introduce(connection, self.identity, deadline)

    def _identity_on(self, connection: SyncConnection, deadline: Deadline) -> Identity | None:
        """Return what a server that has the extension says who it is."""
        return read_identity(unpack(self._result(connection, requests.WHO_ARE_YOU, deadline)))

    def _result(self, connection: SyncConnection, request: Request, deadline: Deadline) -> Any:
        call = connection.request(request, deadline)
        connection.read_soon()
        connection.read_until(call, deadline)
        return call.result

    def _introduce(self, connection: SyncConnection, server: Identity, deadline: Deadline) -> None:
        """Say who this is, and have the server keep the session when the connection breaks, if it can."""
        introduction, _ = connection.session.prepare(*requests.introduce(self.introduction))
        if server.extension >= SINGLE_LINKS:
            connection.reach = self._reach
            connection.replaced = functools.partial(background.watch_again, self, connection.peer.fileno())
            connection.open_link(deadline, introduction)
        elif not connection.put(introduction, None):
            connection.put_rest(introduction, None, deadline)

    def _verify(self, connection: SyncConnection, deadline: Deadline) -> None:
        """Check that a further connection leads to the same server. Raises ProtocolError and AccessDeniedError."""
        known = self.identity
        if known is None:
            return
        found = connection.session.identity or self._identity_on(connection, deadline)
        if found is not None and found.refused:
            check_admitted(found)
        if found is None or found.instance != known.instance:
            raise ProtocolError(ANOTHER)
        if not self.token:
            self._restrict([connection])
        self._introduce(connection, found, deadline)

    def _restrict(self, connections: list[SyncConnection]) -> None:
        """Let connections send only what the server has said that it allows."""
        access = None if self.identity is None else granted_access(self.identity.access)
        for connection in list(connections):
            connection.session.access = access

    def _reach(self, link: ClientSingleLink, deadline: Deadline) -> tuple[socket.socket, bytes]:
        """Connect again for a link whose connection is broken. See `resume_blocking`."""
        try:
            return resume_blocking(self.host, self.port, link, deadline, lambda: not self._lost, self.token, self.tls)
        except Cancelled:
            raise ConnectionError(self._lost) from None

    # Connections

    def _lease(self, deadline: Deadline | None, seconds: float, began: float) -> SyncConnection:
        """Lease a connection to this thread, on which everything that the store has written is visible.

        Without a deadline, one is made of `seconds` and `began` when it is needed. An interrupt leaves no connection
        leased. Raises DeadlineExceeded.
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
                deadline = deadline or Deadline.of_a_call(seconds, began)
                connection = self._lease_later(me, deadline)
            if connection.session.pending or connection.stranded:
                connection.settle(deadline or Deadline.of_a_call(seconds, began))
            return connection
        except BaseException:
            if connection is not None and connection.user == me:
                self._release(connection)
            raise

    def _lease_later(self, me: int, deadline: Deadline) -> SyncConnection:
        """Lease a connection when none may be free: wait for one, or open one."""
        connection: SyncConnection | None = None
        ticket = Ticket()
        within = self._within_another(me)
        behind = self._starving > 0 and not within
        try:
            for other in list(self._connections) if within else []:
                if other.user == me:
                    other.await_writes(deadline)
            while connection is None:
                if not self._watched and self.forming:
                    background.soon(self._watch)
                elif not self._watched and not self.joining:
                    background.uninterrupted(self._watch)
                with self._lock:
                    self._free_queue.join(ticket)  # before looking: whoever releases one must see the ticket
                    if not behind:
                        connection = self._free()
                    may_open = connection is None and not behind and self._may_open(me, within)
                    if connection is not None:
                        connection.user = me
                        self._leave(ticket)
                if connection is not None and self._unconfirmed_beside(connection):
                    if connection.session.pending:
                        connection.settle(deadline)
                    connection.confirm_writes(deadline)
                    self._release(connection)
                    connection = None
                elif may_open:
                    self._open(deadline, me, within)
                elif connection is None:
                    self._wait(ticket, deadline, behind or within)
                    behind = False
            return connection
        except BaseException:
            try:
                self._give_up(connection, ticket, me)
            except BaseException:  # an interrupt; assume no second one this soon
                self._give_up(connection, ticket, me)
            raise

    def _within_another(self, me: int) -> bool:
        """Return whether this call is made by a signal handler that has interrupted another call of this store."""
        if self._opening == me or any(connection.user == me for connection in [*self._connections, *self._probes]):
            return True
        return any(ticket.user == me for ticket in list(self._free_queue.tickets))

    def _confirm_within(self, connection: SyncConnection, me: int, deadline: Deadline | None) -> None:
        """In a signal handler: wait until the server has executed what the handler has written.

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
        self._starving -= ticket.starving
        ticket.starving = False
        stranded = [connection for connection in self._connections if connection.stranded]
        self._detour = self._starving > 0 or not self._watched or not self._identified or bool(stranded)
        self._free_queue.leave(ticket)

    def _give_up(self, connection: SyncConnection | None, ticket: Ticket, me: int) -> None:
        with self._lock:
            self._leave(ticket)
            self._free_queue.notify()  # a notification that this thread may have received is due to another
        if connection is not None and connection.user == me:
            self._release(connection)

    def _free(self) -> SyncConnection | None:
        if self._lost:
            raise self._lost_error()
        free = None
        me = get_ident()
        for connection in self._connections:
            if connection.user:
                if connection.session.unconfirmed() and connection.user != me:
                    return None
            elif free is None or connection.session.unconfirmed():
                free = connection
        return free

    def _unconfirmed_beside(self, connection: SyncConnection) -> bool:
        """Return whether another free connection also has unconfirmed writes.

        Then two threads have written at the same time, and a request on one connection could overtake the writes on the
        other; one has to be confirmed first.
        """
        return connection.session.unconfirmed() and any(
            other is not connection and not other.user and other.session.unconfirmed()
            for other in list(self._connections)
        )

    def _may_open(self, me: int, within: bool) -> bool:
        """Return whether to open a connection: every other one is parked, and no thread is opening one.

        A signal handler waits only for other threads' writes.
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
            time.sleep(_BRIEF_WAIT)  # the caller opens another one: nothing has been written on this one
        finally:
            with self._lock:
                for one in opened:
                    if one in self._probes:
                        self._probes.remove(one)
                if mine:
                    self._opening = NO_THREAD
                self._free_queue.notify_all()

    def _connect(self, deadline: Deadline) -> SyncConnection:
        """Connect once more. Raises DistNetworkError, or DeadlineExceeded if only the time was too short."""
        try:
            wanted = lambda: not self._lost  # noqa: E731
            connected = connect_blocking(
                self.host, self.port, deadline, wanted, token=self.token, tls=self.tls, name=self.name
            )
            return SyncConnection(*connected)
        except Cancelled:
            raise self._lost_error() from None
        except DistNetworkError as error:
            if self._lost:
                raise self._lost_error() from None
            if self._connections:
                raise DeadlineExceeded from error
            raise

    def _release(self, connection: SyncConnection) -> None:
        """Return a connection to the pool in step, or close it. May be called again."""
        if connection.user == get_ident():
            connection.tidy()
            if not connection.inherited and not self._lost:
                connection.give_back()
                connection.cancel()
            if connection.broken and not self._lost and not connection.inherited:
                self._drop(connection)
            connection.parked = False
            with self._lock:  # without the GIL, a thread that has queued and looked might not be seen below
                connection.user = NO_THREAD
            if connection.down is not None and not self._lost:
                background.check_soon(self)
        self._notify_free(connection)

    def _notify_free(self, connection: SyncConnection) -> None:
        """Notify a waiting thread of a free connection. A thread that missed it had queued before it looked."""
        if (self._lost or connection.inherited) and not connection.user:
            connection.peer.close()
            if connection.inherited:
                return
        if self._free_queue.tickets or len(self._connections) > 1:
            with self._lock:
                self._free_queue.notify()
                self._close_surplus(connection)

    def _close_surplus(self, connection: SyncConnection) -> None:
        """Close all but the first connection that have been idle for IDLE_SECONDS."""
        now = connection.used = time.monotonic()
        for other in self._connections[1:]:
            if not other.user and now - other.used > IDLE_SECONDS and not other.session.unconfirmed():
                self._connections.remove(other)
                other.peer.close()

    def _drop(self, connection: SyncConnection) -> None:
        """Close a connection that is out of step; lose the store only if writes may be lost with it."""
        if connection.session.unconfirmed() or self.identity is None:
            self._lose("a connection was closed in the middle of a call: a request or reply was incomplete")
            return
        with self._lock:
            if connection in self._connections:
                self._connections.remove(connection)
        connection.peer.close()

    def _failed(
        self, connection: SyncConnection | None, error: Exception, request: Request | None = None
    ) -> DistNetworkError:
        """Lose the store because a connection failed; return the error for the call that made the request."""
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
        """Mark the store as lost, as PyTorch's is with its connection; return an error with the first reason.

        `details`, which follow it, are those of one call.
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
        """Return why the server has ended the store, or the connection; "" if it has not, or does not say so now."""
        why = self._why_lost
        if why is None and not background.is_running_here():
            why = self._why_lost = ""
            ended = None if self.name is None else self.name.once()
            tls = None if self.tls is None else self.tls.renewed()
            try:
                deadline = Deadline(MIN_ROUND_TRIP)
                peer, session = connect_blocking(
                    self.host, self.port, deadline, refused_is_final=True, token=self.token, tls=tls, name=ended
                )
                peer.close()
                why = self._why_lost = session.refusal
                self._denied = bool(why)
            except StoreEndedError as error:
                why = self._why_lost = str(error)
            except AccessDeniedError as error:
                if error.final:  # else there are too many sessions with the token: perhaps the one that was lost
                    why = self._why_lost = str(error)
                    self._denied = True
            except (DistNetworkError, DistStoreError, OSError):
                pass
            finally:
                if tls is not None:
                    tls.close_blocking()
        return why or ""

    # Background loop

    def _watch(self) -> bool:
        """Hand new connections to the background loop, unless the store is lost; return False if that is still due.

        Called by `background.uninterrupted`, or `soon`. If the lock is taken, perhaps by a call that the waiting signal
        handler has interrupted, the next call tries again.
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
        """The background loop has stopped: have the next call hand all connections to another one."""
        for connection in list(self._connections):
            connection.watched = False
        self._watched = False
        self._detour = True

    def check_idle(self) -> bool:
        """On the background loop: lose the store if an idle connection is lost, with the next call's error.

        A thread that uses a connection notices its loss itself. Return False if this has to be called again.
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
        """On the background loop, with the lock: go on with another connection soon. Return False if that cannot be."""
        if not connection.can_resume() or (connection.down is None and not is_break(error)):
            return False
        if connection.down is None:
            connection.mark_down(error)
        connection.user = _LOOP
        resuming = resume_idle(self.host, self.port, self.token, self.tls, connection)
        background.spawn(resuming, functools.partial(self._resumed, connection))
        return True

    def _resumed(self, connection: SyncConnection, task: "asyncio.Task[None]") -> None:
        """On the background loop: it has replaced a connection, or could not, or was stopped before."""
        down = connection.down
        error = None if task.cancelled() else task.exception()
        connection.user = NO_THREAD
        if self._lost:
            connection.peer.close()  # without the lock: whoever loses the store has it, and waits for the loop
            return
        self._notify_free(connection)
        if isinstance(error, Exception):
            reason = f"{reason_of(down)}; {reason_of(error)}" if down is not None else reason_of(error)
            lost = self._failed(connection, ConnectionError(reason))
            log.debug("lost the idle connection to %s:%d: %s", self.host, self.port, lost)


def _at_least(seconds: float, deadline: Deadline) -> Deadline:
    """Return a deadline with the time left, but at least so many seconds."""
    left = deadline.left()
    return Deadline(-1.0 if left is None else max(left, seconds))


def _shut(connection: SyncConnection) -> None:
    """Close a connection. If it is leased, wake its user, which closes it: the descriptor must not be reused before."""
    try:
        connection.peer.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # not connected any more
    if not connection.user:
        connection.peer.close()


def _replace(peer: socket.socket) -> None:
    """Replace a connection by one at its end, so that whoever is about to read from it gets that and nothing else."""
    ended, other = socket.socketpair()
    other.close()
    os.dup2(ended.fileno(), peer.fileno(), inheritable=False)
    ended.close()
