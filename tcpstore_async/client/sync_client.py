"""The synchronous client of one store: threads make calls on connections of its pool, and read the replies themselves.

It makes calls, keeps their deadlines, and identifies the server. `pool.py` decides which connection a call may use.
This module must not know what a request means.

Invariants: a call that is interrupted or times out leaves its connection in step, down or closed. A value that has left
its queue reaches its caller or is pushed back.
"""

import functools
import logging
import socket
import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any, Final

from ..auth.secret_files import TlsFiles
from ..base.deadline import MIN_ROUND_TRIP, Deadline
from ..base.errors import DistError, DistNetworkError, ProtocolError, StoreTimeoutError
from ..links.single_client import UNANSWERED_BYTES, ClientSingleLink
from ..session.client import PendingCall
from ..session.identity import SINGLE_LINKS, Identity, check_admitted, granted_access, read_identity
from ..wire.commands import MUTATES, PARKS
from ..wire.values import Framed, unpack
from . import background, capabilities, explanation, requests
from .connect import Cancelled, always, connect_blocking
from .pool import LOOP, Pool
from .requests import ANOTHER, Request
from .resume import resume_blocking
from .servers import Servers
from .store_name import StoreName
from .sync_connection import FLAGS, NO_THREAD, DeadlineExceeded, Leased, SyncConnection
from .wait_queue import Ticket

log = logging.getLogger("tcpstore_async.client")

_GRACE: Final = 0.05
"""Seconds granted to the request after a wake-up that came just before the deadline."""

_END_SECONDS: Final = 10.0
"""Time for a server to come back that keeps its stores: else the name of one that is closed is taken for longer."""

_FREE_THREADED: Final[bool] = hasattr(sys, "_is_gil_enabled") and not sys._is_gil_enabled()


class TCPClient(Pool):
    """A client of one store."""

    def __init__(
        self,
        servers: Servers,
        timeout: float,
        introduction: dict[str, str] | None = None,
        began: float | None = None,
        token: bytes = b"",
        tls: TlsFiles | None = None,
        name: StoreName | None = None,
        joins: bool = False,
        refused_is_final: bool = False,
        wanted: Callable[[], bool] = always,
    ) -> None:
        """Connect, retrying until the timeout, in seconds from now or from `began`. Raises DistNetworkError.

        With `refused_is_final`, raises ConnectionRefusedError at once if all servers refuse. Retrying ends when
        `wanted` returns False.

        `introduction` describes this client to servers of ours. Every connection presents the `token`, if given; raises
        AccessDeniedError if it is refused. With `tls`, connections are encrypted. With a
        `name`, they enter that named store. A client that `joins` will need the server's identity next, so it asks for
        it with the handshake.
        """
        super().__init__(servers, timeout, token, tls, name)
        self.introduction = introduction or {}
        self.farewell: Request | None = None
        """Request without a reply, sent to a server of ours when the store is closed."""
        self._supported: dict[str, bool] = {}
        """Whether the server has each capability that was probed."""
        limit = Deadline(timeout, began)
        asks = joins and not token and name is None  # admission asks for the identity otherwise
        opened = connect_blocking(
            servers, limit, wanted, refused_is_final=refused_is_final, token=token, tls=tls, name=name, asks=asks
        )
        self._start([SyncConnection(*opened)])

    def close(self) -> None:
        """Close all connections. Calls in progress in other threads fail, and so do later ones."""
        if not self.closed:
            self._finish_writes()
            self._return_stranded()
            if not self._end_named_store():
                self._send_farewell()
        self.closed = True
        self._lose("the store has been closed")

    def clone(self) -> "TCPClient":
        """Return a client of the same server. Raises DistNetworkError, also if another server has replaced it."""
        if self._lost:
            raise self._lost_error()
        name = None if self.name is None else self.name.of_a_guest()
        clone = TCPClient(self.servers, self.timeout, self.introduction, token=self.token, tls=self.tls, name=name)
        clone._supported = dict(self._supported)
        try:
            if self.identity is not None and (not clone.extended() or clone.identity != self.identity):
                raise DistNetworkError(ANOTHER)
        except BaseException:
            clone.close()
            raise
        return clone

    # Calls

    def call(self, request: Request, deadline: Deadline | None = None) -> Any:
        """Make a call that the server answers at once, or not at all. Raises StoreTimeoutError, DistNetworkError.

        The default deadline is the store's timeout, of which 0 allows one round trip.
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
                    connection.drain_abandoned_calls(deadline)
            data, call = connection.session.prepare(*request)
            writes = call is None and request[0].flags & MUTATES != 0
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
                if len(self._connections) > 1:  # a signal handler's write must precede the interrupted call's next
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
            limit = deadline.timeout if self.timeout and deadline is not None else self.timeout
            raise requests.late(request, limit, out.__cause__) from out.__cause__
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
                        or connection.torn is not None
                        or connection.frame
                        or connection.broken
                        or connection.user != me
                        or connection.session.pending
                    ):
                        self._release(connection)
                    else:  # a thread that queues before this line is seen below; one that queues later sees it free
                        connection.user = NO_THREAD
                        if self._lost or self._free_queue.tickets or len(self._connections) > 1:
                            self._notify_free(connection)
                except BaseException:  # an interrupt; assume no second one this soon
                    self._release(connection)
                    raise

    def call_blocking(
        self, request: Request, seconds: float, then: Request | None = None, began: float | None = None
    ) -> Any:
        """Make a call that the server answers when a condition is met. Raises StoreTimeoutError, DistNetworkError.

        The timeout is in seconds, from `began` if given; 0 checks once, negative means none. `then` follows on the same
        connection before any other request, and its result is returned. After a timeout a server of ours is asked for
        the reason, which may take a second more; see `StoreTimeoutError`.
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
        """Ask the server why a call has timed out, and add the reason to its error, if there is one."""
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

        Raises StoreTimeoutError, whose text has the request and the seconds, and DistNetworkError for them.
        """
        connection = None
        try:
            connection = self._lease(deadline)
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

        The item is the caller's once the confirmation has been sent. An interrupt between that and the return pushes it
        back to the end of the queue. The caller must not make a call before it returns the item.
        """
        leased = Leased(lease)
        try:
            return self._pop(leased, seconds, began)
        except BaseException:
            if leased.confirmed and leased.item is not None:
                self.call(requests.push_back(lease[1][0], leased.item))
            raise

    def _pop(self, leased: Leased, seconds: float, began: float) -> bytes | None:
        lease = leased.request

        def pop(connection: SyncConnection, deadline: Deadline) -> bytes | None:
            connection.leased = leased  # before the request: `_release` gives it back
            call = connection.request(lease, deadline)
            if lease[0].flags & PARKS:
                self._wait_for(connection, call, deadline, once=False)
            else:
                connection.read_until(call, deadline)
            leased.item = call.result[1]
            if leased.item is None:
                connection.leased = None
                return None
            value = unpack(leased.item)
            connection.confirm(leased, deadline)
            return value

        value: bytes | None = self._on_a_connection(pop, lease, Deadline.of_a_call(seconds, began), seconds)
        return value

    def pop_unconfirmed(self, request: Request, seconds: float, began: float, wait: Request | None) -> bytes | None:
        """Take an item from PyTorch's server, after `wait` if given; return None if there is none.

        If the call fails, the item is pushed back to the end of the queue once it has arrived.
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
                connection.stranded += calls
                self._detour = True
                raise

        value: bytes | None = self._on_a_connection(pop, wait or request, Deadline.of_a_call(seconds, began), seconds)
        return value

    def _finish_writes(self) -> None:
        """Before closing, wait up to a second until the server has executed the last writes.

        Broken connections are resumed, so that the server gets the last writes and ends the sessions at once, not after
        its grace period. Calls of other threads are not waited for.
        """
        if background.is_running_here():
            return  # the loop may be replacing a connection, and cannot wait for itself
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
        """Resume a connection if it is broken, and confirm its last writes, unless a call leases it."""
        me = get_ident()
        if connection.user == me:
            return  # a signal handler closes the store, having interrupted the call
        ticket = Ticket()
        try:
            while not self._lost:
                with self._lock:
                    self._free_queue.join(ticket)
                    if not connection.user:
                        connection.user = me
                if connection.user != LOOP:
                    break
                self._wait(ticket, deadline, briefly=True)  # notified of any free connection, not only of this one
            if connection.user == me and not self._lost:
                error = connection.down or connection.loss()
                if error is not None and connection.breaks(error):
                    if connection.down is None:
                        connection.mark_down(error)
                    connection.drain_abandoned_calls(deadline)
                if connection.session.unconfirmed():
                    connection.drain_abandoned_calls(deadline)
                    connection.confirm_writes(deadline)
        finally:
            self._give_up(connection, ticket, me)

    def _end_named_store(self) -> bool:
        """Before closing, end the named store if this client owns it, so that the name is free on return.

        Returns True if that also removed this client from the store.
        """
        if self.name is not None and self.name.owner and not self._lost:
            try:
                self.call(requests.END_STORE, Deadline(_END_SECONDS if self.durable else MIN_ROUND_TRIP))
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
        """Before closing, push back items of abandoned pops that arrive within a second."""
        deadline = Deadline(MIN_ROUND_TRIP)
        for connection in self._connections:
            if connection.stranded and not connection.user:
                try:
                    connection.drain_abandoned_calls(deadline)
                except (OSError, ProtocolError, DeadlineExceeded):
                    pass  # it was lost with the connection

    def call_all(self, batch: list[Request], deadline: Deadline) -> list[Any]:
        """Make calls that have replies in one round trip. Raises StoreTimeoutError, DistNetworkError.

        All requests are sent before the first reply is read, so each reply must be a few bytes only.
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
            connection.drain_abandoned_calls(deadline)
            if not call.woken:
                raise DeadlineExceeded
            return
        pending = connection.session.pending
        # Until the reply to the fence, other threads must not use other connections, on which they could overtake it.
        while pending and pending[0] is not call:
            connection.read_until(pending[0], deadline)
        with self._lock:
            connection.parked = True
            self._free_queue.notify_all()
        connection.read_until(call, deadline)

    # Server identity and capabilities

    def extended(
        self, request: Request | None = None, seconds: float | None = None, began: float | None = None
    ) -> bool:
        """Return whether the server is one of ours; the first call asks it.

        That is part of the call `request`, which has `seconds` from `began`. Raises StoreTimeoutError,
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
        """Return whether the server has a capability; the first call probes it, on a separate connection.

        That is part of the call `request`, which has `seconds` from `began`. Raises StoreTimeoutError,
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
            if others:
                if not ticket.wait(deadline.poll_seconds()) and deadline.passed():
                    raise DeadlineExceeded
                continue
            try:
                self._on_a_connection(self._identify_on, requests.HAS_EXTENSION, deadline, deadline.timeout)
                self._identified = True
            finally:
                with self._lock:
                    self._identifying = NO_THREAD
                    self._identity_queue.notify_all()

    def _identify_first(self, deadline: Deadline) -> None:
        """Request the server's identity before a call that does not need it.

        Without the identity, the store would not survive a reset connection. A call with a short timeout must not fail
        because of it, and leaves it to a later one. Raises DeadlineExceeded, DistNetworkError.
        """
        if self._identified or 0 <= deadline.timeout < MIN_ROUND_TRIP:
            return
        try:
            self._identify(deadline)
        except StoreTimeoutError:
            raise DeadlineExceeded from None

    def _identify_on(self, connection: SyncConnection, deadline: Deadline) -> None:
        if self.identity is None:
            self.identity = connection.session.identity
        if self.identity is None:
            asked = connection.session.asked  # answered, as `_lease` reads pending replies
            ours = self._result(connection, requests.HAS_EXTENSION, deadline) if asked is None else asked.result
            if ours:
                self.identity = self._identity_on(connection, deadline)
        if self.identity is not None:
            check_admitted(self.identity)
            if not self.token:  # a relay may have presented one
                self._restrict(self._connections)
            self._introduce(connection, self.identity, deadline)

    def _identity_on(self, connection: SyncConnection, deadline: Deadline) -> Identity | None:
        """Return the identity of a server that has the extension."""
        return read_identity(unpack(self._result(connection, requests.WHO_ARE_YOU, deadline)))

    def _result(self, connection: SyncConnection, request: Request, deadline: Deadline) -> Any:
        call = connection.request(request, deadline)
        connection.read_soon()
        connection.read_until(call, deadline)
        return call.result

    def _introduce(self, connection: SyncConnection, server: Identity, deadline: Deadline) -> None:
        """Introduce this client, and have the server keep the session when the connection breaks, if it can."""
        introduction, _ = connection.session.prepare(*requests.introduce(self.introduction))
        if server.has_links(SINGLE_LINKS):
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
        """Restrict connections to the requests that the server allows."""
        access = None if self.identity is None else granted_access(self.identity.access)
        for connection in list(connections):
            connection.session.access = access

    def _reach(self, link: ClientSingleLink, deadline: Deadline) -> tuple[socket.socket, bytes]:
        """Reconnect a link whose connection is broken; see `resume_blocking`."""
        try:
            return resume_blocking(self.servers, link, deadline, lambda: not self._lost, self.token, self.tls)
        except Cancelled:
            raise ConnectionError(self._lost) from None


def _at_least(seconds: float, deadline: Deadline) -> Deadline:
    """Return a deadline with the time left, but at least this many seconds."""
    left = deadline.left()
    return Deadline(-1.0 if left is None else max(left, seconds))
