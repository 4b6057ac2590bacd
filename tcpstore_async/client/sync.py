"""The synchronous client: connections that threads lease, write to and read from themselves.

Knows: which connection a call may use, deadlines, threads and forks, when to ask the server who it is. Must not know:
what a call means.
Invariants: a call that waits keeps no other thread waiting. What one thread has written is there for whatever any
thread asks next, on whichever connection. A call that is interrupted, or out of time, leaves its connection in step or
closed. There is no thread of our own.
"""

import os
import select
import socket
import struct
import time
import weakref
from threading import Condition, RLock, get_ident
from typing import Any, Final

from ..blob import unpack
from ..errors import DistNetworkError, ProtocolError, StoreTimeoutError
from ..session.client import LOST, Call, ClientSession
from ..session.extension import Identity, read_identity
from . import calls
from .calls import Ask
from .dial import Deadline, dial_in_this_thread

_SHORT: Final = 960
"""Most replies are this short, and malloc has a fast path for a buffer that is not longer."""

_LONG: Final = 256 * 1024

_SPIN: Final = struct.pack("ll", 0, 4000)
"""Most replies come within 4 ms: for so long a read blocks by itself, which saves the system call that asks first.

Not for longer, because a signal makes it start again.
"""

_GRACE: Final = 0.1
"""Seconds that the answer to a cancel gets when nobody wants to wait for it."""

_SURPLUS_SECONDS: Final = 5.0
"""A connection that was opened beside the first, and is not used for so long, is closed."""

_NOBODY: Final = 0


class OutOfTime(Exception):
    """The deadline has passed; the connection is in step, but a call is unanswered."""


class Channel:
    """One connection, used by one thread at a time."""

    def __init__(self, peer: socket.socket, session: ClientSession) -> None:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SPIN)
        self.peer = peer
        self.session = session
        self.user = _NOBODY
        """The thread that leases it."""
        self.parked = False
        """Whether the call that leases it may wait for ever; then others need not wait for it to end."""
        self.used = 0.0
        """When it was given back; kept only while it is one of several."""

    def send(self, data: bytes, deadline: Deadline) -> None:
        """Hand bytes to the kernel, all of them. Raises OSError, or OutOfTime when some are left: then it is broken."""
        view = memoryview(data)
        while view:
            try:
                view = view[self.peer.send(view, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                self._poll(select.POLLOUT, deadline)

    def read_until(self, call: Call, deadline: Deadline) -> None:
        """Read replies until this call is answered. Raises OSError, ProtocolError or OutOfTime."""
        while not call.done:
            self._poll(select.POLLIN, deadline)
            self.read(_LONG)

    def read(self, size: int) -> None:
        chunk = self.peer.recv(size)
        if not chunk:
            raise ConnectionError(LOST)
        self.session.receive(chunk)

    def _poll(self, event: int, deadline: Deadline) -> None:
        left = deadline.left()
        poll = select.poll()
        poll.register(self.peer, event)
        if not poll.poll(None if left is None else left * 1000):
            raise OutOfTime


class TCPClient:
    """The connections of one store."""

    def __init__(self, host: str, port: int, timeout: float, introduction: dict[str, str] | None = None) -> None:
        """Connect, trying again until the timeout, in seconds. Raises DistNetworkError.

        The introduction is what the server may know of this client, once it turns out to be one of ours.
        """
        self.host = host
        self.port = port
        self.timeout = timeout
        self.introduction = introduction or {}
        self.identity: Identity | None = None
        """Who the server is, if it is one of ours and was asked."""
        self.closed = False
        self._asked = False
        self._lost = ""
        self._start([Channel(*dial_in_this_thread(host, port, Deadline(timeout)))])
        _clients.add(self)

    def _start(self, channels: list[Channel]) -> None:
        self._opening = False
        self._channels = channels
        self._lock = RLock()  # a handler of signals may make a call in the midst of one
        self._changed = Condition(self._lock)
        self._waiting = 0
        """Threads that wait for a connection."""

    def close(self) -> None:
        """Close every connection. Calls under way in other threads fail, and later ones."""
        self.closed = True
        self._lose("the store has been closed")

    def describe(self) -> str:
        """Both ends of the first connection, as PyTorch's client shows them."""
        channel = next(iter(self._channels), None)
        if channel is None:
            return "closed" if self.closed else "not connected"
        try:
            here, there = channel.peer.getsockname(), channel.peer.getpeername()
        except OSError:
            return "lost"
        ends = f"addr=[{here[0]}]:{here[1]}, remote=[{there[0]}]:{there[1]}"
        return f"SocketImpl(fd={channel.peer.fileno()}, {ends})"

    def forked(self) -> None:
        """For a forked child: it gets connections of its own; the parent's stay the parent's."""
        for channel in self._channels:
            channel.peer.close()
        self._start([])

    # Calls

    def ask(self, ask: Ask) -> Any:
        """A call that the server answers at once, or not at all. Raises StoreTimeoutError, DistNetworkError."""
        channel = None
        sent = False
        began = time.monotonic()
        try:
            channel = self._lease()
            data, call = channel.session.request(*ask)
            try:
                count = channel.peer.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                count = 0
            if count < len(data):
                channel.send(data[count:], Deadline(self.timeout))
            sent = True
            if call is None:
                return None
            try:
                channel.read(_SHORT)
            except BlockingIOError:
                pass
            if not call.done:
                channel.read_until(call, Deadline(self.timeout, began))
            return call.result
        except OutOfTime:
            raise StoreTimeoutError(calls.out_of_time(ask, self.timeout)) from None
        except (OSError, ProtocolError) as error:
            raise self._lose(_said(error)) from None
        finally:
            if channel is not None:
                self._release(channel, sent)

    def park(self, ask: Ask, seconds: float, then: Ask | None = None) -> Any:
        """A call that is answered when something happens; after `seconds`, negative for never, StoreTimeoutError.

        With `then` that is asked next on the same connection, before anything else, and its result returned.
        """
        channel = None
        sent = False
        began = time.monotonic()
        try:
            channel = self._lease()
            session = channel.session
            fence = b""
            pong = None
            if session.unconfirmed():
                fence, pong = session.fence(0)
            data, call = session.request(*ask)
            assert call is not None
            channel.send(fence + data, Deadline(self.timeout))
            sent = True
            if pong is not None:
                channel.read_until(pong, Deadline(self.timeout))
            self._wait_for(channel, call, Deadline(seconds, began))
            if then is None:
                return call.result
            sent = False
            data, call = session.request(*then)
            assert call is not None
            channel.send(data, Deadline(self.timeout))
            sent = True
            channel.read_until(call, Deadline(self.timeout))
            return call.result
        except OutOfTime:
            raise StoreTimeoutError(calls.out_of_time(ask, seconds)) from None
        except (OSError, ProtocolError) as error:
            raise self._lose(_said(error)) from None
        finally:
            if channel is not None:
                self._release(channel, sent)

    def _wait_for(self, channel: Channel, call: Call, deadline: Deadline) -> None:
        """Read until a call that waits is over; whatever happens, its connection is in step afterwards, or closed."""
        try:
            try:
                channel.read(_SHORT)
            except BlockingIOError:
                pass
            if call.done:
                return
            with self._lock:
                channel.parked = True
                if self._waiting:
                    self._changed.notify_all()
            channel.read_until(call, deadline)
        except BaseException:
            if not call.done:
                self._cancel(channel, call)
            raise

    def _cancel(self, channel: Channel, call: Call) -> None:
        deadline = Deadline(_GRACE)
        try:
            channel.send(channel.session.cancel(call), deadline)
            channel.read_until(call, deadline)
        except (OSError, ProtocolError, OutOfTime):
            self._drop(channel)

    # Who the server is

    def extended(self) -> bool:
        """Whether the server is one of ours. Asks it, once, the first time this is asked."""
        if not self._asked:
            if self.ask(calls.HAS_EXTENSION):
                self.identity = read_identity(unpack(self.ask(calls.WHO_ARE_YOU)))
            if self.identity is not None:
                self.ask(calls.introduce(self.introduction))
            self._asked = True
        return self.identity is not None

    def _verify(self, channel: Channel, deadline: Deadline) -> None:
        """A further connection must lead to the same server, where that can be asked."""
        known = self.identity
        if known is None:
            return
        session = channel.session
        data, _ = session.request(*calls.introduce(self.introduction))
        more, call = session.request(*calls.WHO_ARE_YOU)
        assert call is not None
        channel.send(data + more, deadline)
        channel.read_until(call, deadline)
        found = read_identity(unpack(call.result))
        if found is None or found.instance != known.instance:
            raise ProtocolError("another server has taken the place of the one that this store was on")

    # Connections

    def _lease(self) -> Channel:
        """A connection for this thread alone, on which all that the store has written is there."""
        with self._lock:
            channels = self._channels
            if len(channels) == 1 and not channels[0].user:  # the common case, without a call
                channel: Channel | None = channels[0]
            else:
                channel = self._free()
            if channel is None:
                channel = self._lease_later(Deadline(self.timeout))
            channel.user = get_ident()
            return channel

    def _free(self) -> Channel | None:
        if self._lost:
            raise DistNetworkError(self._lost)
        free = None
        for channel in self._channels:
            if channel.user:
                if channel.session.unconfirmed():
                    return None
            elif free is None or channel.session.unconfirmed():
                free = channel
        return free

    def _lease_later(self, deadline: Deadline) -> Channel:
        """The same when there is none at the moment: wait for one, or open one if all may be waiting for ever."""
        self._waiting += 1
        try:
            while not self._may_open():
                if not self._changed.wait(deadline.left()):
                    raise OutOfTime
                channel = self._free()
                if channel is not None:
                    return channel
        finally:
            self._waiting -= 1
        return self._open(deadline)

    def _may_open(self) -> bool:
        """Whether nobody else does, and none is to be had: a thread that is in a call already is in no other."""
        if self._opening:
            return False
        me = get_ident()
        return all(channel.parked or channel.user == me for channel in self._channels)

    def _open(self, deadline: Deadline) -> Channel:
        """Open one more, with the lock released meanwhile."""
        channel = None
        self._opening = True
        self._lock.release()
        try:
            channel = Channel(*dial_in_this_thread(self.host, self.port, deadline))
            self._verify(channel, deadline)
        except BaseException:
            if channel is not None:
                channel.peer.close()
            raise
        finally:
            self._lock.acquire()
            self._opening = False
            self._changed.notify_all()
        if self._lost:
            channel.peer.close()
            raise DistNetworkError(self._lost)
        self._channels.append(channel)
        return channel

    def _release(self, channel: Channel, sent: bool) -> None:
        """Give a connection back. It is out of step if what was to be sent on it was not sent whole."""
        if not sent and not self._lost:
            self._drop(channel)
        channel.parked = False
        channel.user = _NOBODY
        # Whoever did not see that it is free had counted itself as waiting before.
        if self._waiting or len(self._channels) > 1:
            with self._lock:
                self._changed.notify()
                self._close_surplus(channel)

    def _close_surplus(self, channel: Channel) -> None:
        """Of several connections, close those that have not been used for a while."""
        now = channel.used = time.monotonic()
        for other in self._channels[1:]:
            if not other.user and now - other.used > _SURPLUS_SECONDS and not other.session.unconfirmed():
                self._channels.remove(other)
                other.peer.close()

    def _drop(self, channel: Channel) -> None:
        """Close a connection that is out of step; the store goes on if nothing was lost with it."""
        if channel.session.unconfirmed() or self.identity is None:
            self._lose("a connection had to be closed in the midst of a call")
            return
        with self._lock:
            if channel in self._channels:
                self._channels.remove(channel)
        channel.peer.close()

    def _lose(self, reason: str) -> DistNetworkError:
        """The store is lost, as PyTorch's is when its connection goes. The error says why it was lost first."""
        with self._lock:
            self._lost = self._lost or reason
            for channel in self._channels:
                _shut(channel.peer)
            self._channels.clear()
            self._changed.notify_all()
        return DistNetworkError(self._lost)


_clients: Final["weakref.WeakSet[TCPClient]"] = weakref.WeakSet()


def _forked() -> None:
    for client in list(_clients):
        client.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _said(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _shut(peer: socket.socket) -> None:
    """Close for every thread: one that reads from it wakes up."""
    try:
        peer.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is gone already
    peer.close()
