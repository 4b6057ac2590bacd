"""The synchronous client: connections that threads lease, write to and read from themselves.

Knows: which connection a call may use, deadlines, threads and forks. Must not know: what a call means.
Invariants: a call that waits keeps no other thread waiting. What one thread has written is there for whatever any
thread asks next, on whichever connection. A call that is interrupted, or out of time, leaves its connection in step or
closed. There is no thread of our own.
"""

import os
import select
import socket
import struct
import threading
from typing import Any, Final

from ..arguments import in_milliseconds
from ..errors import DistNetworkError, ProtocolError, StoreTimeoutError
from ..session.client import LOST, Call, ClientSession
from ..wire.commands import BY_METHOD, Command
from ..wire.shapes import Fields
from .dial import Deadline, dial_in_this_thread

_CHUNK: Final = 64 * 1024
_GRACE: Final = 0.1
"""Seconds that the answer to a cancel gets when nobody wants to wait for it."""


class OutOfTime(Exception):
    """The deadline has passed; the connection is in step, but a call is unanswered."""


class Channel:
    """One connection, used by one thread at a time."""

    def __init__(self, peer: socket.socket, session: ClientSession) -> None:
        self.peer = peer
        self.session = session
        self.leased = False
        self.parked = False
        """Whether the call that leases it may wait for ever; then others need not wait for it to end."""
        self._patience: float | None = None

    def send(self, data: bytes, deadline: Deadline) -> None:
        """Hand bytes to the kernel, all of them. Raises OSError, or OutOfTime when some are left: then it is broken."""
        view = memoryview(data)
        while True:
            try:
                view = view[self.peer.send(view, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                self._poll(select.POLLOUT, deadline)
            if not view:
                return

    def read_until(self, call: Call, deadline: Deadline) -> None:
        """Read replies until this call is answered. Raises OSError, ProtocolError or OutOfTime."""
        self._be_patient(deadline.timeout)
        first = True
        while not call.done:
            if not first:
                self._poll(select.POLLIN, deadline)
            first = False
            try:
                chunk = self.peer.recv(_CHUNK)
            except BlockingIOError:
                if deadline.passed():
                    raise OutOfTime from None
                continue
            if not chunk:
                raise ConnectionError(LOST)
            self.session.receive(chunk)

    def _be_patient(self, seconds: float) -> None:
        """Let a read block for so long: one system call for a reply, not two."""
        if seconds != self._patience:
            self._patience = seconds
            whole = 0 if seconds < 0 else max(1, int(seconds * 1e6))  # 0 means for ever
            self.peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", *divmod(whole, 1_000_000)))

    def _poll(self, event: int, deadline: Deadline) -> None:
        left = deadline.left()
        poll = select.poll()
        poll.register(self.peer, event)
        if not poll.poll(None if left is None else left * 1000):
            raise OutOfTime


class TCPClient:
    """The connections of one store."""

    def __init__(self, host: str, port: int, timeout: float) -> None:
        """Connect, trying again until the timeout, in seconds. Raises DistNetworkError."""
        self.host = host
        self.port = port
        self.timeout = timeout
        self._start([self._open(Deadline(timeout))])

    def _start(self, channels: list[Channel]) -> None:
        self._pid = os.getpid()
        self._lost: DistNetworkError | None = None
        self._opening = False
        self._channels = channels
        self._changed = threading.Condition(threading.Lock())

    def close(self) -> None:
        """Close every connection. Calls under way in other threads fail, and later ones."""
        self._lose(DistNetworkError("the store has been closed"))

    # Calls

    def ask(self, method: str, *fields: Any) -> Any:
        """A call that the server answers at once, or not at all. Raises StoreTimeoutError, DistNetworkError."""
        deadline = Deadline(self.timeout)
        channel = self._lease(deadline)
        try:
            data, call = channel.session.request(BY_METHOD[method], fields)
            self._send(channel, data, deadline)
            if call is None:
                return None
            channel.read_until(call, deadline)
            return call.result
        except OutOfTime:
            raise StoreTimeoutError(f"{method} timeout after {in_milliseconds(self.timeout)}ms") from None
        except (OSError, ProtocolError) as error:
            raise self._lose(DistNetworkError(str(error))) from None
        finally:
            self._release(channel)

    def park(self, method: str, fields: Fields, seconds: float, text: str) -> None:
        """A call that is answered when something happens; after `seconds` it raises StoreTimeoutError(text)."""
        deadline = Deadline(seconds)
        channel = self._lease(Deadline(self.timeout))
        try:
            self._park(channel, BY_METHOD[method], fields, deadline)
        except OutOfTime:
            raise StoreTimeoutError(text) from None
        except (OSError, ProtocolError) as error:
            raise self._lose(DistNetworkError(str(error))) from None
        finally:
            self._release(channel)

    def _park(self, channel: Channel, command: Command, fields: Fields, deadline: Deadline) -> None:
        session = channel.session
        fence = b""
        pong = None
        if session.unconfirmed():
            fence, pong = session.fence(0)
        data, call = session.request(command, fields)
        assert call is not None
        self._send(channel, fence + data, Deadline(self.timeout))
        if pong is not None:
            channel.read_until(pong, Deadline(self.timeout))
        with self._changed:
            channel.parked = True
            self._changed.notify_all()
        try:
            channel.read_until(call, deadline)
        except BaseException:
            if not call.done:
                self._cancel(channel, call)
            raise

    def _cancel(self, channel: Channel, call: Call) -> None:
        """End a wait, whatever happens: its connection is in step afterwards, or closed."""
        deadline = Deadline(_GRACE)
        try:
            channel.send(channel.session.cancel(call), deadline)
            channel.read_until(call, deadline)
        except (OSError, ProtocolError, OutOfTime):
            self._drop(channel)

    # Connections

    def _lease(self, deadline: Deadline) -> Channel:
        """A connection for this thread alone, on which all that the store has written is there."""
        if self._pid != os.getpid():
            self._after_fork()
        with self._changed:
            while True:
                if self._lost is not None:
                    raise self._lost
                channel = self._pick()
                if channel is not None:
                    channel.leased = True
                    return channel
                if not self._opening and all(channel.parked for channel in self._channels):
                    self._opening = True
                    break
                if not self._changed.wait(deadline.left()):
                    raise StoreTimeoutError(f"no connection was free for {in_milliseconds(deadline.timeout)}ms")
        try:
            channel = self._open(deadline)
            channel.leased = True
        finally:
            with self._changed:
                self._opening = False
                self._changed.notify_all()
        with self._changed:
            self._channels.append(channel)
        return channel

    def _pick(self) -> Channel | None:
        for channel in self._channels:
            if channel.session.unconfirmed():
                return None if channel.leased else channel
        for channel in self._channels:
            if not channel.leased:
                return channel
        return None

    def _release(self, channel: Channel) -> None:
        with self._changed:
            channel.leased = False
            channel.parked = False
            self._changed.notify()

    def _open(self, deadline: Deadline) -> Channel:
        return Channel(*dial_in_this_thread(self.host, self.port, deadline))

    def _send(self, channel: Channel, data: bytes, deadline: Deadline) -> None:
        """Send a request whole; one that is cut short, by whatever, breaks its connection and with it the store."""
        try:
            channel.send(data, deadline)
        except BaseException as error:
            self._lose(DistNetworkError(f"a request was sent in part only: {error or type(error).__name__}"))
            raise

    def _drop(self, channel: Channel) -> None:
        with self._changed:
            if channel in self._channels:
                self._channels.remove(channel)
        channel.peer.close()

    def _lose(self, error: DistNetworkError) -> DistNetworkError:
        """The store is lost, as PyTorch's is when its connection goes."""
        with self._changed:
            self._lost = self._lost or error
            for channel in self._channels:
                _shut(channel.peer)
            self._channels.clear()
            self._changed.notify_all()
        return error

    def _after_fork(self) -> None:
        """The child gets connections of its own; the parent's stay the parent's."""
        for channel in self._channels:
            channel.peer.close()
        lost = self._lost
        self._start([])
        self._lost = lost


def _shut(peer: socket.socket) -> None:
    """Close for every thread: one that reads from it wakes up."""
    try:
        peer.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is gone already
    peer.close()
