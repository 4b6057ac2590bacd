"""One connection of the synchronous client: written to and read from by the thread that leases it.

Knows: a socket, a session, what is left half done on it. Must not know: which other connections there are, who may have
it.
Invariant: it is in step, or marked as broken, wherever an interrupt strikes.
"""

import select
import socket
import struct
import time
from typing import Final

from ..session.client import LOST, Call, ClientSession
from . import calls
from .calls import Ask
from .deadline import Deadline

_SHORT: Final = (960,)
"""Most replies are this short, and malloc has a fast path for a buffer that is not longer."""

_LONG: Final = (256 * 1024,)

_SPIN: Final = struct.pack("ll", 0, 1)
"""Most replies come within one tick of the kernel's clock, 1 to 10 ms, which this is rounded up to: for so long a read
blocks by itself, which saves the system call that asks first.

Not for longer, because a signal makes it start again.
"""

NOBODY: Final = 0


class OutOfTime(Exception):
    """The deadline has passed."""


class Channel:
    """One connection, used by one thread at a time."""

    def __init__(self, peer: socket.socket, session: ClientSession) -> None:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SPIN)
        self.peer = peer
        self.session = session
        self.user = NOBODY
        """The thread that leases it."""
        self.parked = False
        """Whether the call that leases it may wait for ever; then others need not wait for it to end."""
        self.broken = False
        """Whether a request is on it in part, or a reply is lost in part, or may be: then it is of no use any more."""
        self._chunks: list[bytes] = []
        """What was received but not looked at. It gets here without a step of the interpreter, at which an interrupt
        could strike and lose it."""
        self.stranded: list[Call] = []
        """Pops that were answered, or will be, for callers who have gone, where they need not be confirmed."""
        self.used = time.monotonic()
        """When it was given back; kept only while it is one of several."""

    def send(self, data: bytes, deadline: Deadline) -> None:
        """Hand bytes to the kernel, all of them. Raises OSError, or OutOfTime when some are left."""
        view = memoryview(data)
        while view:
            try:
                sent = self.peer.send(view, socket.MSG_DONTWAIT)  # in the slice mypyc would make the call twice
                view = view[sent:]
            except BlockingIOError:
                self._poll(select.POLLOUT, deadline)

    def request(self, ask: Ask, deadline: Deadline) -> Call:
        """Send a request that is answered, behind a fence if other connections must not overtake what was written.

        Raises OSError or OutOfTime.
        """
        session = self.session
        self.broken = True
        fence = session.fence(0)[0] if session.unconfirmed() and ask[0].parks else b""
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
        data = self.session.cancel(call)
        try:
            self.broken = self.peer.send(data, socket.MSG_DONTWAIT) != len(data)
        except OSError:
            pass  # it is broken, or full

    def give_back(self, lease: Ask) -> None:
        """Have an item that was leased, or is on its way, or awaited, go back, without waiting for anything."""
        call = self.session.waiting
        if call is not None and call.fields is lease[1]:
            self.cancel()
        elif not self.broken:
            self.broken = True
            data, _ = self.session.request(*calls.give_back(lease))
            try:
                self.broken = self.peer.send(data, socket.MSG_DONTWAIT) != len(data)
            except OSError:
                pass  # then it goes back with the connection

    def confirm(self, lease: Ask, sent: list[int], deadline: Deadline) -> None:
        """Say that a leased item has come; `sent` is no longer empty from the moment it has been said.

        Raises OSError or OutOfTime, then it goes back with the connection.
        """
        data, _ = self.session.request(*calls.confirm(lease))
        try:
            sent += map(self.peer.send, (data,), (socket.MSG_DONTWAIT,))  # no interrupt strikes between call and list
        except BlockingIOError:
            sent.append(0)
        if sent[0] < len(data):
            left = data[sent.pop() :]
            self.broken = True
            self.send(left, deadline)
            self.broken = False
            sent.append(len(data))

    def settle(self, deadline: Deadline) -> None:
        """Read what a call that was given up has left to come. Raises OSError, ProtocolError or OutOfTime."""
        self.cancel()
        if self.broken:
            raise ConnectionError(LOST)
        while self.session.pending:
            self.read_until(self.session.pending[-1], deadline)
        while self.stranded:
            self.push_back(self.stranded[0], deadline)
            del self.stranded[0]

    def push_back(self, pop: Call, deadline: Deadline) -> None:
        """Give back what a pop has taken for a caller that has gone. Raises OSError or OutOfTime."""
        if pop.result[1] is not None:
            self.broken = True
            data, _ = self.session.request(*calls.push_back(pop.fields[0], pop.result[1]))
            self.send(data, deadline)
            self.broken = False

    def read_until(self, call: Call, deadline: Deadline) -> None:
        """Read replies until this call is answered. Raises OSError, ProtocolError or OutOfTime."""
        while not call.done:
            if not self._chunks:
                self._poll(select.POLLIN, deadline)
            self.read(_LONG)

    def read_soon(self) -> None:
        """Read what comes at once, if anything does. Raises OSError, ProtocolError."""
        try:
            self.read()
        except BlockingIOError:
            pass

    def read(self, size: tuple[int] = _SHORT) -> None:
        """Read once, up to `size[0]` bytes. Raises OSError, ProtocolError."""
        chunks = self._chunks
        if not chunks:
            chunks += map(self.peer.recv, size)
        if not chunks[0]:
            raise ConnectionError(LOST)
        self.broken = True
        self.session.receive(chunks.pop())
        self.broken = False

    def _poll(self, event: int, deadline: Deadline) -> None:
        left = deadline.left()
        poll = select.poll()
        poll.register(self.peer, event)
        if not poll.poll(None if left is None else left * 1000):
            raise OutOfTime
