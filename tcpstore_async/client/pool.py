"""The synchronous client: connections that threads lease, write to and read from themselves.

Knows: which connection a call may use, deadlines, threads and forks, when to ask the server who it is. Must not know:
what a call means.
Invariants: a call that waits keeps no other thread waiting. What one thread has written is there for whatever any
thread asks next, on whichever connection. A call that is interrupted, or out of time, leaves its connection in step or
closed. A handler of signals may make calls whatever it has interrupted: it waits for the server and for other threads,
never for what only the interrupted call could do. The background loop takes no part in calls: it marks a store as
lost whose idle connection is, which nobody would notice otherwise until the next call.
"""

import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from threading import RLock, get_ident
from typing import Any, Final

from ..deadline import IDLE_SECONDS, MIN_ROUND_TRIP, Deadline
from ..errors import DistNetworkError, ProtocolError, StoreTimeoutError
from ..session.client import PendingCall
from ..session.identity import Identity, read_identity
from ..values import Framed, unpack
from . import background, capabilities, requests
from .connect import Cancelled, connect_blocking
from .requests import ANOTHER, Request
from .sync_connection import FLAGS, NO_THREAD, DeadlineExceeded, SyncConnection
from .wait_queue import Ticket, WaitQueue

log = logging.getLogger("tcpstore_async.client")

_LAST_LOOK: Final = 0.05
"""Seconds that what follows a wake gets, though that came at the last moment."""

_PATIENCE: Final = 0.001
"""Seconds that a thread waits for a connection before others let it go first.

Without that, a thread that makes call after call gives its connection back and has it again before any other runs.
"""

_MOMENT: Final = 0.01
"""Seconds that a thread lets others go first without a look for itself, and that a handler of signals waits to be told:
what it is told may go to the call that it has interrupted, or be held up by a lock that this one holds."""

_FREE_THREADED: Final[bool] = hasattr(sys, "_is_gil_enabled") and not sys._is_gil_enabled()

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
    ) -> None:
        """Connect, trying again until the timeout, in seconds from now or from `began`. Raises DistNetworkError.

        The introduction is what the server may know of this client, once it turns out to be one of ours.
        """
        self.host = host
        self.port = port
        self.timeout = timeout
        self.introduction = introduction or {}
        self.identity: Identity | None = None
        """Who the server is, if it is one of ours and was asked."""
        self.last_word: Request | None = None
        """What a server of ours is told when the store is closed; it has no reply."""
        self.closed = False
        self._asked = False
        self._known: dict[str, bool] = {}
        """What PyTorch's servers have not always known: whether this one does, if that was tried."""
        self._lost = ""
        self._start([SyncConnection(*connect_blocking(host, port, Deadline(timeout, began)))])

    def _start(self, connections: list[SyncConnection]) -> None:
        self._connections = connections
        self._tries: list[SyncConnection] = []
        """Those that are asked whether they lead to the same server, and those on which it is tried what that knows."""
        self._opening = NO_THREAD
        """The thread that opens one more."""
        self._asking = NO_THREAD
        """The thread that asks the server who it is."""
        self._lock = RLock()  # a handler of signals may make a call in the midst of one
        self._free_queue = WaitQueue()
        """For a connection."""
        self._identity_queue = WaitQueue()
        """To hear who the server is."""
        self._starving = 0
        """Threads that have waited for a connection for long."""
        self._watched = False
        """Whether the background loop watches the connections. It does from the first call on, so that a store that is
        made and closed starts no thread."""
        self._detour = True
        """Whether a call may not just take the only connection: threads are starving, or the loop has to be told."""

    def close(self) -> None:
        """Close every connection. Calls under way in other threads fail, and later ones."""
        if not self.closed:
            self._return_stranded()
            self._say_last_word()
        self.closed = True
        self._lose("the store has been closed")

    def clone(self) -> "TCPClient":
        """Another on the same server, if it is the same still, where that can be asked. Raises DistNetworkError."""
        if self._lost:
            raise self._lost_error()
        clone = TCPClient(self.host, self.port, self.timeout, self.introduction)
        clone._known = dict(self._known)
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
        """For a forked child: it gets connections of its own; the parent's stay the parent's."""
        me = get_ident()
        for connection in [*self._connections, *self._tries]:
            connection.gone = True
            if connection.user == me:
                _replace(connection.peer)  # a handler of signals has forked: the interrupted call is still at it
            else:
                connection.peer.close()
        self._start([])

    # Calls

    def call(self, ask: Request, deadline: Deadline | None = None) -> Any:
        """A call that the server answers at once, or not at all. Raises StoreTimeoutError, DistNetworkError.

        The deadline is the store's timeout unless given; of that, 0 means one look.
        """
        connection = None
        me = get_ident()
        try:
            # `_lease` without the call, as `_release` below: 0.3 µs of the 1.7 that the client itself takes.
            with self._lock:
                connections = self._connections
                if len(connections) == 1 and not connections[0].user and not self._detour:
                    connection = connections[0]
                    connection.user = me
            if connection is None or connection.session.pending:
                deadline = deadline or Deadline.of_a_call(self.timeout)
                if connection is None:
                    connection = self._lease_later(me, deadline)
                if connection.session.pending:
                    connection.settle(deadline)
            data, call = connection.session.prepare(*ask)
            writes = call is None and ask[0].mutates
            if not connection.put(data, call, writes):
                deadline = deadline or Deadline.of_a_call(self.timeout)
                connection.put_rest(data, call, deadline, writes)
            if call is None:
                if len(self._connections) > 1:
                    self._confirm_within(connection, me, deadline)
                return None
            try:
                connection.read()
            except BlockingIOError:
                pass  # there is none yet
            if not call.done:
                connection.read_until(call, deadline or Deadline.of_a_call(self.timeout))
            return call.result
        except DeadlineExceeded as out:
            raise requests.late(ask, self.timeout, out.__cause__) from out.__cause__
        except (OSError, ProtocolError) as error:
            raise self._failed(connection, error) from None
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
                    else:  # whoever joins the line before this is seen in it, whoever does so after it sees this
                        connection.user = NO_THREAD
                        if self._lost or self._free_queue.tickets or len(self._connections) > 1:
                            self._pass_on(connection)
                except BaseException:  # an interrupt; assume no second one this soon
                    self._release(connection)
                    raise

    def call_blocking(
        self, ask: Request, seconds: float, then: Request | None = None, began: float | None = None
    ) -> Any:
        """A call that is answered when something happens; after `seconds`, negative for never, StoreTimeoutError.

        With `then` that is asked next on the same connection, before anything else, and its result returned. The
        seconds are counted from `began` if that is given. 0 means one look.
        """

        def wait(connection: SyncConnection, deadline: Deadline) -> Any:
            call = connection.request(ask, deadline)
            self._wait_for(connection, call, deadline, one_look=seconds == 0)
            if then is not None:
                deadline = _at_least(_LAST_LOOK, deadline)
                call = connection.request(then, deadline)
                connection.read_until(call, deadline)
            return call.result

        return self._on_a_connection(wait, ask, Deadline.of_a_call(seconds, began), seconds)

    def _on_a_connection(
        self, work: Callable[[SyncConnection, Deadline], Any], ask: Request, deadline: Deadline, seconds: float
    ) -> Any:
        """Lease a connection for `work`, which may raise DeadlineExceeded, OSError and ProtocolError.

        Raises StoreTimeoutError, which names the request and the seconds, and DistNetworkError.
        """
        connection = None
        try:
            connection = self._lease(deadline, seconds, deadline.began)
            return work(connection, deadline)
        except DeadlineExceeded as out:
            raise requests.late(ask, seconds, out.__cause__) from out.__cause__
        except (OSError, ProtocolError) as error:
            raise self._failed(connection, error) from None
        finally:
            if connection is not None:
                try:
                    self._release(connection)
                except BaseException:  # an interrupt; assume no second one this soon
                    self._release(connection)
                    raise

    def pop(self, lease: Request, seconds: float, began: float) -> bytes | None:
        """Take the item that a server of ours leases; None if there is none.

        It is the caller's from the moment that this is said to the server. An interrupt that strikes between that and
        the return has it pushed back, to the end of the queue. The caller must not make a call before it returns it.
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
            try:
                call = connection.request(lease, deadline)
                if lease[0].parks:
                    self._wait_for(connection, call, deadline, one_look=False)
                else:
                    connection.read_until(call, deadline)
                _, item = call.result
                if item is None:
                    return None
                taken.append(item)
                value = unpack(item)
                connection.confirm(lease, confirmed, deadline)
                return value
            except BaseException:
                if not confirmed:
                    connection.give_back(lease)
                raise

        value: bytes | None = self._on_a_connection(pop, lease, Deadline.of_a_call(seconds, began), seconds)
        return value

    def pop_unconfirmed(self, ask: Request, seconds: float, began: float, wait: Request | None) -> bytes | None:
        """Take an item from a server of PyTorch's, after a wait if that is given; None if there is none.

        Whatever keeps it from the caller, it is pushed back, to the end of the queue, when it has come.
        """

        def pop(connection: SyncConnection, deadline: Deadline) -> bytes | None:
            if wait is not None:
                self._wait_for(connection, connection.request(wait, deadline), deadline, one_look=seconds == 0)
                deadline = _at_least(MIN_ROUND_TRIP, deadline)
            mine: list[PendingCall] = []
            try:
                mine.append(connection.request(ask, deadline))
                connection.read_until(mine[0], deadline)
                item: Framed | None = mine[0].result[1]
                return None if item is None else unpack(item)
            except BaseException:
                connection.stranded += mine or [call for call in connection.session.pending if call.fields is ask[1]]
                raise

        value: bytes | None = self._on_a_connection(pop, wait or ask, Deadline.of_a_call(seconds, began), seconds)
        return value

    def _say_last_word(self) -> None:
        word = self.last_word
        if word is None:
            return
        for connection in self._connections:
            if not connection.user and not connection.broken and connection.session.waiting is None:
                try:
                    connection.peer.send(connection.session.request(*word)[0], FLAGS)
                except OSError:
                    pass  # it has been lost

    def _return_stranded(self) -> None:
        """Before all is closed: have what was popped for callers who have gone go back, if it comes within a moment."""
        deadline = Deadline(MIN_ROUND_TRIP)
        for connection in self._connections:
            if connection.stranded and not connection.user:
                try:
                    connection.settle(deadline)
                except (OSError, ProtocolError, DeadlineExceeded):
                    pass  # it has gone with the connection

    def ask_all(self, asks: list[Request], deadline: Deadline) -> list[Any]:
        """Calls that the server answers at once, all sent before the first reply is read: one round trip.

        For replies of a few bytes: nothing is read while the requests are sent. Raises StoreTimeoutError,
        DistNetworkError.
        """

        def exchange(connection: SyncConnection, deadline: Deadline) -> list[Any]:
            connection.broken = True
            sent = [connection.session.request(*ask) for ask in asks]
            connection.send(b"".join([data for data, _ in sent]), deadline)
            connection.broken = False
            results: list[Any] = []
            for _, call in sent:
                if call is not None:
                    connection.read_until(call, deadline)
                    results.append(call.result)
            return results

        results: list[Any] = self._on_a_connection(exchange, asks[0], deadline, deadline.timeout)
        return results

    def _wait_for(self, connection: SyncConnection, call: PendingCall, deadline: Deadline, one_look: bool) -> None:
        """Read until a call that waits is over. Raises OSError, ProtocolError or OutOfTime."""
        connection.read_soon()
        if call.done:
            return
        if one_look:
            connection.cancel()
            connection.settle(deadline)
            if not call.woken:
                raise DeadlineExceeded
            return
        pending = connection.session.pending
        while pending and pending[0] is not call:  # the fence: until then others must not go elsewhere
            connection.read_until(pending[0], deadline)
        with self._lock:
            connection.parked = True
            self._free_queue.notify_all()
        connection.read_until(call, deadline)

    # Who the server is

    def extended(self, ask: Request | None = None, seconds: float | None = None, began: float | None = None) -> bool:
        """Whether the server is one of ours. Asks it, once, the first time this is asked.

        That is part of the call `ask`, which has so many seconds. Raises StoreTimeoutError, DistNetworkError.
        """
        if not self._asked:
            seconds = self.timeout if seconds is None else seconds
            try:
                self._ask_who(Deadline.of_a_call(seconds, began))
            except (DeadlineExceeded, StoreTimeoutError):
                raise requests.late(ask or requests.HAS_EXTENSION, seconds) from None
        return self.identity is not None

    def knows(self, what: str, ask: Request, seconds: float | None = None, began: float | None = None) -> bool:
        """Whether the server knows what older ones of PyTorch's do not: tried once, on a connection of its own.

        That is part of the call `ask`, which has so many seconds. Raises StoreTimeoutError, DistNetworkError.
        """
        known = self._known.get(what)
        if known is None:
            known = self._known[what] = self.extended(ask, seconds, began) or self._tried(what, ask, seconds, began)
        return known

    def _tried(self, what: str, ask: Request, seconds: float | None, began: float | None) -> bool:
        seconds = self.timeout if seconds is None else seconds
        try:
            deadline = Deadline.of_a_call(seconds, began)
            return any(self._try_out(capabilities.tries(what), deadline) for _ in range(capabilities.TRIES))
        except DeadlineExceeded:
            raise requests.late(ask, seconds) from None

    def _try_out(self, asks: list[Request], deadline: Deadline) -> bool:
        connection = self._dial(deadline)
        connection.user = get_ident()
        try:
            with self._lock:
                if self._lost:
                    raise self._lost_error()
                self._tries.append(connection)
            for ask in asks:
                connection.read_until(connection.request(ask, deadline), deadline)
        except OSError:
            self.call(requests.NO_KEY, deadline)  # unless the store, or the server, has gone altogether
            return False
        except ProtocolError as error:
            raise self._lose(str(error)) from None
        finally:
            with self._lock:
                if connection in self._tries:
                    self._tries.remove(connection)
            connection.peer.close()
        return True

    def _ask_who(self, deadline: Deadline) -> None:
        """One thread asks, the others wait for the outcome. Raises OutOfTime, StoreTimeoutError, DistNetworkError."""
        me = get_ident()
        ticket = Ticket()
        while not self._asked and not self._lost:
            with self._lock:
                # A handler of signals does not wait for them: they may wait for what the interrupted call holds.
                others = self._asking not in (NO_THREAD, me) and not self._within_another(me)
                if others:
                    self._identity_queue.join(ticket)
                else:
                    self._asking = me
            if not others:
                self._ask_now(deadline)
            elif not ticket.wait(deadline.moment()) and deadline.passed():
                raise DeadlineExceeded

    def _ask_now(self, deadline: Deadline) -> None:
        try:
            if self.call(requests.HAS_EXTENSION, deadline):
                self.identity = read_identity(unpack(self.call(requests.WHO_ARE_YOU, deadline)))
            if self.identity is not None:
                self.call(requests.introduce(self.introduction), deadline)
            self._asked = True
        finally:
            with self._lock:
                self._asking = NO_THREAD
                self._identity_queue.notify_all()

    def _verify(self, connection: SyncConnection, deadline: Deadline) -> None:
        """A further connection must lead to the same server, where that can be asked."""
        known = self.identity
        if known is None:
            return
        data, _ = connection.session.prepare(*requests.introduce(self.introduction))
        if not connection.put(data, None):
            connection.put_rest(data, None, deadline)
        call = connection.request(requests.WHO_ARE_YOU, deadline)
        connection.read_until(call, deadline)
        found = read_identity(unpack(call.result))
        if found is None or found.instance != known.instance:
            raise ProtocolError(ANOTHER)

    # Connections

    def _lease(self, deadline: Deadline | None, seconds: float, began: float) -> SyncConnection:
        """A connection for this thread alone, on which all that the store has written is there.

        The common case needs no deadline; it is made of the seconds of the call if there is none yet. Wherever an
        interrupt strikes, none stays leased. Raises OutOfTime.
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
            if connection.session.pending:
                connection.settle(deadline or Deadline.of_a_call(seconds, began))
            return connection
        except BaseException:
            if connection is not None and connection.user == me:
                self._release(connection)
            raise

    def _lease_later(self, me: int, deadline: Deadline) -> SyncConnection:
        """The same when there is none at the moment, perhaps: wait for one, or open one."""
        connection: SyncConnection | None = None
        ticket = Ticket()
        if not self._watched:
            self._watch()
        within = self._within_another(me)
        behind = self._starving > 0 and not within
        try:
            for other in list(self._connections) if within else []:
                if other.user == me:
                    other.await_writes(deadline)
            while connection is None:
                with self._lock:
                    self._free_queue.join(ticket)  # before the look: whoever gives one back must see it
                    if not behind:
                        connection = self._free()
                    may_open = connection is None and not behind and self._may_open(me, within)
                    if connection is not None:
                        connection.user = me
                        self._leave(ticket)
                if connection is not None and self._unconfirmed_beside(connection):
                    if connection.session.pending:
                        connection.settle(deadline)
                    connection.read_until(connection.request(requests.NO_KEY, deadline), deadline)
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
        """Whether this thread is in a call already, which a handler of signals has interrupted to make this one."""
        if self._opening == me or any(connection.user == me for connection in [*self._connections, *self._tries]):
            return True
        return any(ticket.user == me for ticket in list(self._free_queue.tickets))

    def _confirm_within(self, connection: SyncConnection, me: int, deadline: Deadline | None) -> None:
        """What a handler of signals has written must be executed before the call goes on that it has interrupted, for
        that may write as well, on another connection. Raises OSError, ProtocolError or OutOfTime.
        """
        if any(other is not connection and other.user == me for other in list(self._connections)):
            deadline = deadline or Deadline.of_a_call(self.timeout)
            connection.read_until(connection.request(requests.NO_KEY, deadline), deadline)

    def _wait(self, ticket: Ticket, deadline: Deadline, briefly: bool) -> None:
        """Until this thread is told, or for a moment if it has not even looked yet. Raises OutOfTime."""
        left = deadline.moment()
        if briefly:
            left = _MOMENT if left is None else min(left, _MOMENT)
        if not ticket.wait(left) and deadline.passed():
            raise DeadlineExceeded
        if not ticket.starving and deadline.spent() > _PATIENCE:
            with self._lock:
                self._starving += 1
                self._detour = True
                ticket.starving = True

    def _leave(self, ticket: Ticket) -> None:
        self._starving -= ticket.starving
        ticket.starving = False
        self._detour = self._starving > 0 or not self._watched
        self._free_queue.leave(ticket)

    def _give_up(self, connection: SyncConnection | None, ticket: Ticket, me: int) -> None:
        with self._lock:
            self._leave(ticket)
            self._free_queue.notify()  # what this thread was told, perhaps, another must hear
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
        """Whether a free connection and another one both have writes that are not confirmed: two threads have written
        at the same time. What is asked on one of them could overtake the other's, so one is confirmed first.
        """
        return connection.session.unconfirmed() and any(
            other is not connection and not other.user and other.session.unconfirmed()
            for other in list(self._connections)
        )

    def _may_open(self, me: int, within: bool) -> bool:
        """Whether none is to be had, and nobody else opens one. A handler of signals waits for others' writes only."""
        if within:
            return not any(
                connection.user != me and connection.session.unconfirmed() for connection in self._connections
            )
        return not self._opening and all(connection.parked for connection in self._connections)

    def _open(self, deadline: Deadline, me: int, within: bool) -> None:
        """Open one more, if nobody else does."""
        mine = False
        opened: list[SyncConnection] = []  # not a name that may be None: in `finally` mypyc takes it for a Channel
        try:
            with self._lock:
                if self._opening and not within:
                    return
                mine = not self._opening
                if mine:
                    self._opening = me
            connection = self._dial(deadline)
            opened.append(connection)
            connection.user = me
            with self._lock:
                if self._lost:
                    raise self._lost_error()
                self._tries.append(connection)
            self._verify(connection, deadline)
            connection.user = NO_THREAD
            with self._lock:
                if self._lost:
                    raise self._lost_error()
                self._connections.append(connection)
            self._watch()
        except BaseException:
            for one in opened:
                one.peer.close()
            raise
        finally:
            with self._lock:
                for one in opened:
                    if one in self._tries:
                        self._tries.remove(one)
                if mine:
                    self._opening = NO_THREAD
                self._free_queue.notify_all()

    def _dial(self, deadline: Deadline) -> SyncConnection:
        """Raises DistNetworkError; OutOfTime if it is only for the time that there is no connection."""
        try:
            return SyncConnection(*connect_blocking(self.host, self.port, deadline, lambda: not self._lost))
        except Cancelled:
            raise self._lost_error() from None
        except DistNetworkError as error:
            if self._lost:
                raise self._lost_error() from None
            if self._connections:
                raise DeadlineExceeded from error
            raise

    def _release(self, connection: SyncConnection) -> None:
        """Give a connection back, in step, or closed if it can be neither. May be called again."""
        if connection.user == get_ident():
            connection.tidy()
            if connection.session.waiting is not None and not connection.gone:
                connection.cancel()
            if connection.broken and not self._lost and not connection.gone:
                self._drop(connection)
            connection.parked = False
            with self._lock:  # without the GIL, whoever has joined the line and looked might not be seen below
                connection.user = NO_THREAD
        self._pass_on(connection)

    def _pass_on(self, connection: SyncConnection) -> None:
        """Have others know that a connection is free. Whoever did not see that was in line before it looked."""
        if (self._lost or connection.gone) and not connection.user:
            connection.peer.close()
            if connection.gone:
                return
        if self._free_queue.tickets or len(self._connections) > 1:
            with self._lock:
                self._free_queue.notify()
                self._close_surplus(connection)

    def _close_surplus(self, connection: SyncConnection) -> None:
        """Of several connections, close those that have not been used for a while."""
        now = connection.used = time.monotonic()
        for other in self._connections[1:]:
            if not other.user and now - other.used > IDLE_SECONDS and not other.session.unconfirmed():
                self._connections.remove(other)
                other.peer.close()

    def _drop(self, connection: SyncConnection) -> None:
        """Close a connection that is out of step; the store goes on if nothing was lost with it."""
        if connection.session.unconfirmed() or self.identity is None:
            self._lose("a connection was closed in the middle of a call, which had sent or received only part of a message")
            return
        with self._lock:
            if connection in self._connections:
                self._connections.remove(connection)
        connection.peer.close()

    def _failed(self, connection: SyncConnection | None, error: Exception) -> DistNetworkError:
        """What a call says whose connection has failed: that the store is lost."""
        if connection is not None and connection.gone:
            return DistNetworkError(_FORKED)
        said = _said(error)
        if connection is not None and isinstance(error, OSError):
            said += requests.size_hint(connection.longest)
        return self._lose(said)

    def _lose(self, reason: str) -> DistNetworkError:
        """The store is lost, as PyTorch's is when its connection goes. The error says why it was lost first."""
        with self._lock:
            self._lost = self._lost or reason
            try:
                background.release(self)  # first: that connections are closed here is no news
            finally:
                for connection in [*self._connections, *self._tries]:
                    _shut(connection)
                self._connections.clear()
                self._free_queue.notify_all()
                self._identity_queue.notify_all()
        return self._lost_error()

    def _lost_error(self) -> DistNetworkError:
        """The error of every call on a store that is lost."""
        error = DistNetworkError(self._lost)
        error.__cause__ = None  # and so no context is shown, in compiled code either
        return error

    # What the background loop does

    def _watch(self) -> None:
        """Have the background loop watch all connections, unless the store is lost."""
        with self._lock:
            if self._lost:
                return
            self._watched = True  # before the fact: the loop may stop at once
            if not background.watch(self, [connection.peer.fileno() for connection in self._connections]):
                self._watched = False
            self._detour = self._starving > 0 or not self._watched

    def unwatched(self) -> None:
        """The background loop has stopped: have the next call start it again."""
        self._watched = False
        self._detour = True

    def check_idle(self) -> bool:
        """On the background loop: lose the store if an idle connection is lost, as the next call would.

        Whoever uses a connection notices its end, and reports it. Returns False if this is to be called again.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            done = True
            for connection in list(self._connections):
                if connection.user:
                    done = done and not connection.hung_up()
                    continue
                error = connection.loss()
                if error is not None:
                    lost = self._failed(connection, error)
                    log.debug("lost the idle connection to %s:%d: %s", self.host, self.port, lost)
                    return True
            return done
        finally:
            self._lock.release()


def _at_least(seconds: float, deadline: Deadline) -> Deadline:
    """What is left of a deadline, or so many seconds if that is more."""
    left = deadline.left()
    return Deadline(-1.0 if left is None else max(left, seconds))


def _shut(connection: SyncConnection) -> None:
    """Close it; if it is leased, wake who reads from it, who closes it then: its number must not become another's."""
    try:
        connection.peer.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is gone already
    if not connection.user:
        connection.peer.close()


def _replace(peer: socket.socket) -> None:
    """Put a connection that has ended in its place: whoever is about to read from it hears that, and nothing else."""
    ended, other = socket.socketpair()
    other.close()
    os.dup2(ended.fileno(), peer.fileno(), inheritable=False)
    ended.close()


def _said(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
