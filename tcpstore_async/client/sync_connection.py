"""One connection of the synchronous client: written to and read from by the thread that leases it.

Knows: a socket, a session, what is left half done on it. Must not know: which other connections there are, who may have
it.
Invariants: it is in step wherever an interrupt strikes, or marked as broken, which it is only if a request is on it in
part. A handler of signals that struck in the midst of a call on it can wait until all that was written before has been
executed, and changes nothing that the call goes on with.

Handlers run between two steps of the interpreter; in compiled code, only inside of system calls that wait and in what
is interpreted. So what must be one step is one call of C code in interpreted builds: a row of `map`s that `+=` or
`extend` runs.
"""

import select
import socket
import struct
import time
from itertools import chain, compress, filterfalse, repeat
from typing import Final

from ..deadline import Deadline
from ..errors import ProtocolError
from ..session.client import LOST, ClientSession, PendingCall
from ..session.identity import build
from . import requests
from .requests import Request

_SHORT: Final = (960,)
"""Most replies are this short, and malloc has a fast path for a buffer that is not longer."""

_LONG: Final = (256 * 1024,)

_RECV_TIMEOUT: Final = struct.pack("ll", 0, 1)
"""Most replies come within one tick of the kernel's clock, 1 to 10 ms, which this is rounded up to: for so long a read
blocks by itself, which saves the system call that asks first.

Not for longer, because a signal makes it start again.
"""

FLAGS: Final[int] = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)
"""Of every send. A program may have set SIGPIPE to its default, which would end it when the server is gone."""

_EACH: Final = (FLAGS,)

_PEEK: Final[int] = socket.MSG_PEEK | socket.MSG_DONTWAIT

_COMPILED: Final = build() == "compiled"

NO_THREAD: Final = 0


class DeadlineExceeded(Exception):
    """The deadline has passed."""


class SyncConnection:
    """One connection, used by one thread at a time."""

    def __init__(self, peer: socket.socket, session: ClientSession) -> None:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _RECV_TIMEOUT)
        self.peer = peer
        self.session = session
        self.user = NO_THREAD
        """The thread that leases it."""
        self.parked = False
        """Whether the call that leases it may wait for ever; then others need not wait for it to end."""
        self.broken = False
        """Whether a request is on it in part, or a reply is lost in part: then it is of no use any more."""
        self.frame = b""
        """A request that may be on it in part."""
        self.sent: list[int] = []
        """How many bytes of that the kernel has taken, send by send."""
        self.gone = False
        """Whether it is that of a parent process."""
        self._canceled: list[int] = []
        """Bytes sent to end the wait that is on it."""
        self._chunks: list[bytes] = []
        """What was received but not looked at. It gets here without a step of the interpreter, at which an interrupt
        could strike and lose it."""
        self._read: list[list[PendingCall]] = []
        """What that came to, once it has been looked at."""
        self.stranded: list[PendingCall] = []
        """Pops that were answered, or will be, for callers who have gone, where they need not be confirmed."""
        self.longest: int = 0
        """Bytes of the longest request that the kernel did not take at once."""
        self.used = time.monotonic()
        """When it was given back; kept only while it is one of several."""

    # Writing

    def put(
        self, data: bytes, call: PendingCall | None, mutates: bool = False, fence: PendingCall | None = None
    ) -> bool:
        """Hand a request to the kernel, as much as it takes; whether that was all. Raises OSError.

        The call, and one that goes ahead of it, are on the connection from the first byte on.
        """
        sent: list[int] = []
        session = self.session
        try:
            if _COMPILED:
                count: int = self.peer.send(data, FLAGS)
                if fence is not None:
                    session.pending.append(fence)
                if call is not None and not call.done:
                    session.pending.append(call)
                if count < len(data):
                    sent.append(count)
            else:
                self.sent = sent
                self.frame = data
                sending = map(self.peer.send, (data,), _EACH)
                if call is None or call.done:
                    sent += sending
                else:  # sends when the first of the calls is looked for, and notes all of them if something was taken
                    asked = (call,) if fence is None else (fence, call)
                    session.pending.extend(compress(asked, chain(filterfalse(sent.append, sending), repeat(True))))
        except BlockingIOError:
            return False
        if sent and sent[0] < len(data):
            self.sent = sent
            self.frame = data
            return False
        session.written += mutates
        self.frame = b""
        return True

    def put_rest(
        self,
        data: bytes,
        call: PendingCall | None,
        deadline: Deadline,
        mutates: bool = False,
        fence: PendingCall | None = None,
    ) -> None:
        """Hand over what `put` has left. Raises OSError, or OutOfTime when some is left still."""
        whole = False
        self.longest = max(self.longest, len(data))
        while not whole:
            self._poll(select.POLLOUT, deadline)
            begun = sum(self.sent) if self.frame else 0
            if begun:
                whole = self._push()
                self.session.written += mutates and whole
            else:
                whole = self.put(data, call, mutates, fence)
        self.frame = b""

    def _push(self) -> bool:
        """Hand over the rest of the frame, or as much as the kernel takes; whether that was all. May be called again,
        and by a handler of signals in the midst of itself: how much is left is found out in the step that sends it.
        """
        view = memoryview(self.frame)
        sent = self.sent
        try:
            if _COMPILED:
                rest = view[sum(sent) :]
                count: int = self.peer.send(rest, FLAGS)  # in the slice mypyc would make the call twice
                sent.append(count)
            else:
                sent += map(self.peer.send, map(view.__getitem__, map(slice, map(sum, (sent,)), (None,))), _EACH)
        except BlockingIOError:
            pass
        return sum(sent) >= len(view)

    def send(self, data: bytes, deadline: Deadline) -> None:
        """Hand bytes to the kernel, all of them. Raises OSError, or OutOfTime when some are left."""
        view = memoryview(data)
        while view:
            try:
                sent = self.peer.send(view, FLAGS)  # in the slice mypyc would make the call twice
                view = view[sent:]
            except BlockingIOError:
                self._poll(select.POLLOUT, deadline)

    def request(self, ask: Request, deadline: Deadline) -> PendingCall:
        """Send a request that is answered, behind a fence if other connections must not overtake what was written.

        Raises OSError or OutOfTime.
        """
        session = self.session
        self._canceled = []
        ahead, fence = b"", None
        if session.unconfirmed() and ask[0].parks:
            ahead, fence = session.prepare_fence(0)
        data, call = session.prepare(*ask)
        assert call is not None
        if not self.put(ahead + data, call, False, fence):
            self.put_rest(ahead + data, call, deadline, False, fence)
        return call

    def tidy(self) -> None:
        """After an interrupt: whether it is broken."""
        sent = sum(self.sent) if self.frame else 0
        if sent:
            self.session.written += 1  # perhaps it had not been counted; one too many does no harm
        if 0 < sent < len(self.frame):
            self.broken = True
        self.frame = b""

    def cancel(self) -> None:
        """End the wait that is on it, if there is one, without waiting for the answer. May be called again."""
        call = self.session.waiting
        if call is None or call.canceled or self.broken:
            return
        if not self._canceled:
            data = self.session.prepare_cancel(call)
            try:
                self._canceled += map(self.peer.send, (data,), _EACH)
            except OSError:  # it is lost, or full
                self.broken = True
                return
            self.broken = self._canceled[0] < len(data)
        call.canceled = True

    def give_back(self, lease: Request) -> None:
        """Have an item that was leased, or is on its way, or awaited, go back, without waiting for anything."""
        self.tidy()
        call = self.session.waiting
        if call is not None and call.fields is lease[1]:
            self.cancel()
        elif not self.broken:
            self.broken = True
            data, _ = self.session.request(*requests.give_back(lease))
            try:
                self.broken = self.peer.send(data, FLAGS) != len(data)
            except OSError:
                pass  # then it goes back with the connection

    def confirm(self, lease: Request, sent: list[int], deadline: Deadline) -> None:
        """Say that a leased item has come; `sent` is no longer empty from the moment it has been said.

        Raises OSError or OutOfTime, then it goes back with the connection.
        """
        data, _ = self.session.request(*requests.confirm(lease))
        try:
            sent += map(self.peer.send, (data,), _EACH)  # no interrupt strikes between call and list
        except BlockingIOError:
            sent.append(0)
        if sent[0] < len(data):
            left = data[sent.pop() :]
            self.broken = True
            self.send(left, deadline)
            self.broken = False
            sent.append(len(data))

    def await_writes(self, deadline: Deadline) -> None:
        """For a handler of signals in the midst of a call on it: wait until what was written before has been executed.

        Nothing is read: what comes is for the call that goes on then, and wakes it. Whatever was written stands before
        all that is to be answered, so the first byte that comes says it. Raises OSError or OutOfTime.
        """
        session = self.session
        if self.broken or self._chunks or not session.unconfirmed():
            return
        if self.frame and sum(self.sent):
            whole = self._push()
            while not whole:
                self._poll(select.POLLOUT, deadline)
                whole = self._push()
        if not session.pending:
            self._put_fence(deadline)
        self._poll(select.POLLIN, deadline)

    def _put_fence(self, deadline: Deadline) -> None:
        frame, sent = self.frame, self.sent
        self.frame, self.sent = b"", []
        try:
            data, call = self.session.prepare_fence(0)
            if not self.put(data, call):
                self.put_rest(data, call, deadline)
        finally:
            self.tidy()
            self.frame, self.sent = frame, sent

    # Idle, or in another thread's use

    def hung_up(self) -> bool:
        """Whether the peer has closed or reset it. Takes nothing from whoever reads it, not even the error."""
        poll = select.poll()
        try:
            poll.register(self.peer, getattr(select, "POLLRDHUP", 0))
        except ValueError:
            return False  # closed by ourselves
        return bool(poll.poll(0))

    def loss(self) -> OSError | None:
        """While it is idle: the error that the next call on it would raise, or None."""
        try:
            if not self.peer.recv(1, _PEEK):
                return ConnectionError(LOST)
        except BlockingIOError:
            return None
        except OSError as error:
            return error
        return ConnectionError(LOST) if self.hung_up() else None

    # Reading

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

    def push_back(self, pop: PendingCall, deadline: Deadline) -> None:
        """Give back what a pop has taken for a caller that has gone. Raises OSError or OutOfTime."""
        if pop.result[1] is not None:
            self.broken = True
            data, _ = self.session.request(*requests.push_back(pop.fields[0], pop.result[1]))
            self.send(data, deadline)
            self.broken = False

    def read_until(self, call: PendingCall, deadline: Deadline) -> None:
        """Read replies until this call is answered. Raises OSError, ProtocolError or OutOfTime."""
        while not call.done:
            if not self._chunks or self._read:
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
        if not chunks or self._read:  # the latter if an interrupt has struck where it could
            chunks.clear()
            self._read.clear()
            chunks += map(self.peer.recv, size)
        if not chunks[0]:
            raise ConnectionError(LOST)
        if _COMPILED:
            self.session.receive(chunks.pop())
            return
        saved = self.session.save()
        try:
            self._read += map(self.session.receive, chunks)
        except ProtocolError:
            raise
        except BaseException:  # an interrupt, of which there is no second so soon
            if not self._read:
                self.broken = True
                self.session.restore(saved)
                self._read += map(self.session.receive, chunks)
                self.broken = False
            raise
        chunks.clear()
        self._read.clear()

    def _poll(self, event: int, deadline: Deadline) -> None:
        poll = select.poll()
        poll.register(self.peer, event)
        while True:
            moment = deadline.moment()
            if poll.poll(None if moment is None else moment * 1000):
                return
            if deadline.passed():
                raise DeadlineExceeded
