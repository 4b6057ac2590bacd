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
from ..wire.commands import Flag
from . import calls
from .calls import Ask
from .dial import ONE_LOOK, Deadline, Unwanted, dial_in_this_thread

_SHORT: Final = 960
"""Most replies are this short, and malloc has a fast path for a buffer that is not longer."""

_LONG: Final = 256 * 1024

_SPIN: Final = struct.pack("ll", 0, 1)
"""Most replies come within one tick of the kernel's clock, 1 to 10 ms, which this is rounded up to: for so long a read
blocks by itself, which saves the system call that asks first.

Not for longer, because a signal makes it start again.
"""

_SURPLUS_SECONDS: Final = 5.0
"""A connection that was opened beside the first, and is not used for so long, is closed."""

_NOBODY: Final = 0


class OutOfTime(Exception):
    """The deadline has passed."""


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
        self.broken = False
        """Whether a request is on it in part, or may be: then nothing else can be sent."""
        self.used = time.monotonic()
        """When it was given back; kept only while it is one of several."""

    def send(self, data: bytes, deadline: Deadline) -> None:
        """Hand bytes to the kernel, all of them. Raises OSError, or OutOfTime when some are left."""
        view = memoryview(data)
        while view:
            try:
                view = view[self.peer.send(view, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                self._poll(select.POLLOUT, deadline)

    def request(self, ask: Ask, deadline: Deadline) -> Call:
        """Send a request that is answered, behind a fence if other connections must not overtake what was written.

        Raises OSError or OutOfTime.
        """
        session = self.session
        self.broken = True
        fence = session.fence(0)[0] if session.unconfirmed() and ask[0].flags & Flag.PARKS else b""
        data, call = session.request(*ask)
        assert call is not None
        self.send(fence + data, deadline)
        self.broken = False
        return call

    def cancel(self) -> None:
        """End the wait that is on it, if there is one, without waiting for the answer."""
        call = self.session.waiting
        if call is None or call.canceled or self.broken:
            return
        self.broken = True
        try:
            self.broken = self.peer.send(self.session.cancel(call), socket.MSG_DONTWAIT) != 1
        except OSError:
            pass  # it is broken, or full

    def settle(self, deadline: Deadline) -> None:
        """Read what a call that was given up has left to come. Raises OSError, ProtocolError or OutOfTime."""
        self.cancel()
        if self.broken:
            raise ConnectionError(LOST)
        while self.session.pending:
            self.read_until(self.session.pending[-1], deadline)

    def read_until(self, call: Call, deadline: Deadline) -> None:
        """Read replies until this call is answered. Raises OSError, ProtocolError or OutOfTime."""
        while not call.done:
            self._poll(select.POLLIN, deadline)
            self.read(_LONG)

    def read_soon(self) -> None:
        """Read what comes at once, if anything does. Raises OSError, ProtocolError."""
        try:
            self.read(_SHORT)
        except BlockingIOError:
            pass

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
        self._channels = channels
        self._newest: Channel | None = None
        """One that is asked whether it leads to the same server."""
        self._opening = False
        self._asking = _NOBODY
        """The thread that asks the server who it is."""
        self._lock = RLock()  # a handler of signals may make a call in the midst of one
        self._changed = Condition(self._lock)
        self._known = Condition(self._lock)
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

    def ask(self, ask: Ask, deadline: Deadline | None = None) -> Any:
        """A call that the server answers at once, or not at all. Raises StoreTimeoutError, DistNetworkError.

        The deadline is the store's timeout unless given; of that, 0 means one look.
        """
        channel = None
        deadline = deadline or Deadline.of_a_call(self.timeout)
        try:
            channel = self._lease(deadline)
            session = channel.session
            channel.broken = True
            data, call = session.request(*ask)
            try:
                count = channel.peer.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                count = 0
            if count < len(data):
                channel.send(data[count:], deadline)
            channel.broken = False
            if call is None:
                return None
            channel.read_soon()
            if not call.done:
                channel.read_until(call, deadline)
            return call.result
        except OutOfTime as out:
            raise StoreTimeoutError(calls.out_of_time(ask, self.timeout)) from out.__cause__
        except (OSError, ProtocolError) as error:
            raise self._lose(_said(error)) from None
        finally:
            if channel is not None:
                self._give_back(channel)

    def park(self, ask: Ask, seconds: float, then: Ask | None = None, began: float | None = None) -> Any:
        """A call that is answered when something happens; after `seconds`, negative for never, StoreTimeoutError.

        With `then` that is asked next on the same connection, before anything else, and its result returned. The
        seconds are counted from `began` if that is given. 0 means one look.
        """
        channel = None
        deadline = Deadline.of_a_call(seconds, began)
        try:
            channel = self._lease(deadline)
            call = channel.request(ask, deadline)
            self._wait_for(channel, call, deadline, one_look=seconds == 0)
            if then is not None:
                left = deadline.left()
                deadline = Deadline(-1.0 if left is None else max(left, ONE_LOOK))
                call = channel.request(then, deadline)
                channel.read_until(call, deadline)
            return call.result
        except OutOfTime as out:
            raise StoreTimeoutError(calls.out_of_time(ask, seconds)) from out.__cause__
        except (OSError, ProtocolError) as error:
            raise self._lose(_said(error)) from None
        finally:
            if channel is not None:
                self._give_back(channel)

    def _wait_for(self, channel: Channel, call: Call, deadline: Deadline, one_look: bool) -> None:
        """Read until a call that waits is over. Raises OSError, ProtocolError or OutOfTime."""
        channel.read_soon()
        if call.done:
            return
        if one_look:
            channel.cancel()
            channel.settle(deadline)
            if not call.woken:
                raise OutOfTime
            return
        while channel.session.pending[0] is not call:  # the fence: until then others must not go elsewhere
            channel.read_until(channel.session.pending[0], deadline)
        with self._lock:
            channel.parked = True
            if self._waiting:
                self._changed.notify_all()
        channel.read_until(call, deadline)

    # Who the server is

    def extended(self, ask: Ask | None = None, seconds: float | None = None, began: float | None = None) -> bool:
        """Whether the server is one of ours. Asks it, once, the first time this is asked.

        That is part of the call `ask`, which has so many seconds. Raises StoreTimeoutError, DistNetworkError.
        """
        if not self._asked:
            seconds = self.timeout if seconds is None else seconds
            try:
                self._ask_who(Deadline.of_a_call(seconds, began))
            except (OutOfTime, StoreTimeoutError):
                raise StoreTimeoutError(calls.out_of_time(ask or calls.HAS_EXTENSION, seconds)) from None
        return self.identity is not None

    def _ask_who(self, deadline: Deadline) -> None:
        """One thread asks, the others wait for the outcome. Raises OutOfTime, StoreTimeoutError, DistNetworkError."""
        me = get_ident()
        mine = False
        try:
            with self._lock:
                while self._asking not in (_NOBODY, me) and not self._lost:
                    if not self._known.wait(deadline.left()):
                        raise OutOfTime
                if self._asked:
                    return
                self._asking = me
                mine = True
            if self.ask(calls.HAS_EXTENSION, deadline):
                self.identity = read_identity(unpack(self.ask(calls.WHO_ARE_YOU, deadline)))
            if self.identity is not None:
                self.ask(calls.introduce(self.introduction), deadline)
            self._asked = True
        finally:
            if mine:
                with self._lock:
                    self._asking = _NOBODY
                    self._known.notify_all()

    def _verify(self, channel: Channel, deadline: Deadline) -> None:
        """A further connection must lead to the same server, where that can be asked."""
        known = self.identity
        if known is None:
            return
        data, _ = channel.session.request(*calls.introduce(self.introduction))
        channel.send(data, deadline)
        call = channel.request(calls.WHO_ARE_YOU, deadline)
        channel.read_until(call, deadline)
        found = read_identity(unpack(call.result))
        if found is None or found.instance != known.instance:
            raise ProtocolError("another server has taken the place of the one that this store was on")

    # Connections

    def _lease(self, deadline: Deadline) -> Channel:
        """A connection for this thread alone, on which all that the store has written is there.

        Wherever an interrupt strikes, none stays leased.
        """
        me = get_ident()
        channel: Channel | None = None
        try:
            while channel is None:
                with self._lock:
                    channels = self._channels
                    if len(channels) == 1 and not channels[0].user:  # the common case, without a call
                        channel = channels[0]
                    else:
                        channel = self._free() or self._wait_for_free(deadline)
                    if channel is not None:
                        channel.user = me
                if channel is None:
                    self._open(deadline)
            if channel.session.pending:
                channel.settle(deadline)
            return channel
        except BaseException:
            if channel is not None and channel.user == me:
                self._give_back(channel)
            raise

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

    def _wait_for_free(self, deadline: Deadline) -> Channel | None:
        """The same when there is none at the moment; None if this thread may open one. Raises OutOfTime."""
        self._waiting += 1
        try:
            while (channel := self._free()) is None and not self._may_open():
                if not self._changed.wait(deadline.left()) and self._free() is None:
                    raise OutOfTime
            return channel
        except BaseException:
            self._changed.notify()  # what this thread was told, perhaps, another must hear
            raise
        finally:
            self._waiting -= 1

    def _may_open(self) -> bool:
        """Whether nobody else does, and none is to be had: a thread that is in a call already is in no other."""
        if self._opening:
            return False
        me = get_ident()
        return all(channel.parked or channel.user == me for channel in self._channels)

    def _open(self, deadline: Deadline) -> None:
        """Open one more, if nobody else does."""
        mine = False
        channel = None
        try:
            with self._lock:
                if self._opening:
                    return
                self._opening = mine = True
            channel = self._newest = self._dial(deadline)
            channel.user = get_ident()
            self._verify(channel, deadline)
            channel.user = _NOBODY
            with self._lock:
                if self._lost:
                    raise DistNetworkError(self._lost)
                self._channels.append(channel)
        except BaseException:
            if channel is not None:
                channel.peer.close()
            raise
        finally:
            if mine:
                with self._lock:
                    self._newest = None
                    self._opening = False
                    self._changed.notify_all()

    def _dial(self, deadline: Deadline) -> Channel:
        """Raises DistNetworkError; OutOfTime if it is only for the time that there is no connection."""
        try:
            return Channel(*dial_in_this_thread(self.host, self.port, deadline, lambda: not self._lost))
        except Unwanted:
            raise DistNetworkError(self._lost) from None
        except DistNetworkError as error:
            if self._lost:
                raise DistNetworkError(self._lost) from None
            if self._channels:
                raise OutOfTime from error
            raise

    def _give_back(self, channel: Channel) -> None:
        """End a lease, even if the first try is interrupted."""
        try:
            self._release(channel)
        except BaseException:
            self._release(channel)
            raise

    def _release(self, channel: Channel) -> None:
        """Give a connection back, in step, or closed if it can be neither. May be called again."""
        if channel.user == get_ident():
            if channel.session.waiting is not None:
                channel.cancel()
            if channel.broken and not self._lost:
                self._drop(channel)
            channel.parked = False
            channel.user = _NOBODY
            if self._lost:
                channel.peer.close()
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
            for channel in [*self._channels, *([self._newest] if self._newest else [])]:
                _shut(channel)
            self._channels.clear()
            self._changed.notify_all()
            self._known.notify_all()
        return DistNetworkError(self._lost)


_clients: Final["weakref.WeakSet[TCPClient]"] = weakref.WeakSet()


def _forked() -> None:
    for client in list(_clients):
        client.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _said(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _shut(channel: Channel) -> None:
    """Close it; if it is leased, wake who reads from it, who closes it then: its number must not become another's."""
    try:
        channel.peer.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is gone already
    if not channel.user:
        channel.peer.close()
