"""One connection of the synchronous client, written to and read from by the thread that leases it.

It knows a socket, a session, and what an interrupt has left half done; it must not know other connections or who may
lease it.

Invariants: wherever an interrupt strikes, the connection is in step, or marked: as down if a link resumes it, else as
broken. Only one within a send, or the encryption of TLS, does that; never one that waits. A signal handler that strikes
elsewhere can wait until everything written before has been executed, and changes nothing that the call continues with.

Signal handlers run where the interpreter calls something or jumps back; in compiled code, only within blocking system
calls and in interpreted functions. While `torn` is set, nobody can tell what has been sent: `check_partial_send` notes
all of it then, and the link finds out. Only a few steps, within which nothing is called, are atomic; so is one
call of C code, such as `+=` of a `map`.
"""

import errno
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Final

from ..base.deadline import Deadline
from ..base.errors import AccessDeniedError, DistNetworkError, ProtocolError, reason_of
from ..links.single_client import ACKNOWLEDGED_AT_ONCE, ClientSingleLink
from ..session.client import LOST, ClientSession, PendingCall
from ..session.identity import build
from ..wire.commands import BY_METHOD, PARKS
from ..wire.values import Framed, unpack
from . import requests
from .requests import Request
from .tls import TlsSocket

_SHORT: Final = (479,)
"""Bytes to read at once. Longer than most replies; with its header a buffer of 512 bytes, up to which Python allocates
fast."""

_LONG: Final = (256 * 1024,)

_RECV_TIMEOUT: Final = struct.pack("ll", 0, 1)
"""Timeout of a read: rounded up to one tick of the kernel's clock, 1 to 10 ms. Most replies arrive within it, which
saves a call of poll(). Not longer, because the timeout starts again after a signal.
"""

FLAGS: Final[int] = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)
"""Flags of every send. The program may have SIGPIPE at its default, which would kill it when the server is gone."""

_INTERPRETED: Final = build() != "compiled"

_PEEK: Final[int] = socket.MSG_PEEK | socket.MSG_DONTWAIT

_INCOMPLETE: Final = "a request or reply was incomplete"

_INTERRUPTED: Final = "an interrupt struck within a send or receive, and the session cannot be resumed"

_Sending = tuple[bytes, PendingCall | None, tuple[PendingCall, ...]]
"""Bytes, the call that they request, and calls before it in the same bytes."""

_NOTHING: Final[_Sending] = b"", None, ()

NO_THREAD: Final = 0


class DeadlineExceeded(Exception):
    """The deadline has passed."""


def reset_when_closed(peer: socket.socket, reset: bool) -> None:
    """Choose whether closing the connection resets it, which the server takes for a break and not for its end."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", reset, 0))


class Leased:
    """An item that a server of ours leases to a call, or will lease."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.item: Framed | None = None
        self.confirmed: list[int] = []
        """Bytes of the confirmation that were sent; once not empty, the item is the caller's."""


class SyncConnection:
    """One connection, used by one thread at a time."""

    def __init__(self, peer: socket.socket, session: ClientSession) -> None:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _RECV_TIMEOUT)
        self.peer = peer
        self._tls = peer if isinstance(peer, TlsSocket) else None
        self._may_tear = _INTERPRETED or self._tls is not None
        """Whether an interrupt can strike within a send: not within one call of compiled code."""
        self.torn: _Sending | None = None
        """What is being sent, and not noted yet; `_NOTHING` for what has been noted, and within the decryption."""
        self.session = session
        self.user = NO_THREAD
        """Identifier of the thread that leases it."""
        self.parked = False
        """Whether the call that leases it may block for ever, so that other calls should not wait for it."""
        self.broken = False
        """Whether it is out of step, or may be, so that it must be closed."""
        self.broken_by = _INCOMPLETE
        self.frame = b""
        """A request that has been noted, but perhaps not sent to its end."""
        self.sent: int = 0
        """Bytes of `frame` handed to the kernel."""
        self.inherited = False
        """Whether it belongs to the parent process."""
        self.leased: Leased | None = None
        """The item that `give_back` returns, unless it has been confirmed."""
        self.stranded: list[PendingCall] = []
        """Abandoned pops on PyTorch's server, whose items are to be pushed back."""
        self.longest: int = 0
        """Bytes of the longest request that took more than one send."""
        self.watched = False
        """Whether the background loop watches it for hang-ups."""
        self.link: ClientSingleLink | None = None
        """Set if the server keeps the session when the connection breaks."""
        self._linking: tuple[ClientSingleLink, PendingCall] | None = None
        """The link of an unanswered LINK."""
        self._received = 0
        """Bytes received on the link before what has `arrived`."""
        self.reach: Callable[[ClientSingleLink, Deadline], tuple[socket.socket, bytes]] | None = None
        """Reconnects a link; returns the connection, and the reply to LINK on it."""
        self.replaced: Callable[[], object] | None = None
        """Called when the descriptor refers to another connection."""
        self.down: OSError | None = None
        """The error that broke the connection, until it is replaced."""
        self.down_since = 0.0
        """When it broke, on the monotonic clock."""
        self.used = time.monotonic()
        """When it was last released; only kept up to date while it is one of several."""

    # Writing

    def put(
        self, data: bytes, call: PendingCall | None, mutates: bool = False, ahead: tuple[PendingCall, ...] = ()
    ) -> bool:
        """Send as much of a request as the kernel takes; return whether that was all. Raises OSError.

        With the first byte, the call and those `ahead` of it in the same bytes become pending.
        """
        session = self.session
        link = self.link
        if link is not None:
            if self.down is not None:  # `put_rest` resumes first
                return False
            taken = link.acknowledgement()
            if taken:
                data = taken + data
        if self._may_tear:
            self.torn = data, call, ahead
        try:
            count: int = self.peer.send(data, FLAGS)
        except BlockingIOError:
            self.torn = None
            return False
        except OSError as error:
            if not self._breaks(error):
                self.torn = None
                raise
            count = 0  # `resume` sends what the server has not received
        if link is not None:
            link.note(data, call)
        if ahead:
            session.pending.extend(ahead)
        if call is not None and not call.done:
            session.pending.append(call)
        if count < len(data):
            self.frame = data
            self.sent = count
        else:
            session.written += mutates
        self.torn = None
        return count == len(data)

    def put_rest(
        self,
        data: bytes,
        call: PendingCall | None,
        deadline: Deadline,
        mutates: bool = False,
        ahead: tuple[PendingCall, ...] = (),
    ) -> None:
        """Send what `put` has left. Raises OSError, or DeadlineExceeded if some is still left."""
        whole = False
        self.longest = max(self.longest, len(data))
        while not whole:
            self._poll(select.POLLOUT, deadline)
            if self.frame:
                whole = self._push()
                self.session.written += mutates and whole
            else:
                whole = self.put(data, call, mutates, ahead)
        self.frame = b""

    def _push(self) -> bool:
        """Send as much of the rest of the frame as the kernel takes; return whether that was all."""
        if self.down is not None or self.sent == len(self.frame):  # a signal handler or a link has sent the rest
            return self.down is None
        self.torn = _NOTHING
        rest = memoryview(self.frame)[self.sent :]
        try:
            count: int = self.peer.send(rest, FLAGS)  # in the slice mypyc would make the call twice
            self.sent += count
        except BlockingIOError:
            pass
        except OSError as error:
            if not self._breaks(error):
                self.torn = None
                raise
        self.torn = None
        return self.sent == len(self.frame)

    def _push_rest(self, deadline: Deadline) -> None:
        """Send the rest of the frame. Raises OSError or DeadlineExceeded."""
        while not self._push():
            self._poll(select.POLLOUT, deadline)
        self.frame = b""

    def request(self, request: Request, deadline: Deadline, first: bytes = b"") -> PendingCall:
        """Send a request that has a reply, behind a fence if it blocks and writes are unconfirmed.

        `first` is a request without a reply to send before it. Raises OSError or DeadlineExceeded.
        """
        session = self.session
        ahead: tuple[PendingCall, ...] = ()
        if session.unconfirmed() and request[0].flags & PARKS:
            asking, fence = session.prepare_fence(0)
            first += asking
            ahead = (fence,)
        data, call = session.prepare(*request)
        assert call is not None
        data = first + data
        if not self.put(data, call, False, ahead):
            self.put_rest(data, call, deadline, False, ahead)
        return call

    def check_partial_send(self) -> None:
        """After an interrupt, find out whether it left something sent in part, or perhaps: a link resumes that."""
        torn = self.torn
        if torn is None and not self.frame:
            return
        if self.frame or (torn is not None and torn[0] and torn[1] is None):
            self.session.written += 1  # the interrupt may have prevented this; one too many does no harm
        if torn is not None or self.sent < len(self.frame):
            why = _INCOMPLETE if torn is None else _INTERRUPTED
            if not self.can_resume():
                self.broken = True
                self.broken_by = why
            else:
                if torn is not None:
                    self._note(*torn)
                if self.down is None:
                    self.mark_down(ConnectionResetError(errno.ECONNRESET, why))
        self.frame = b""
        self.torn = None

    def _note(self, data: bytes, call: PendingCall | None, ahead: tuple[PendingCall, ...]) -> None:
        """Note what may have been sent on the link. May be called again."""
        link = self.link
        assert link is not None
        _, last, owner = link.sent[-1]
        if data and not (last is data and owner is call):
            link.note(data, call)
        pending = self.session.pending
        pending.extend([one for one in (*ahead, call) if one is not None and not one.done and one not in pending])

    def cancel(self) -> None:
        """Cancel its blocking call, if any, without waiting for the reply. May be called again."""
        call = self.session.waiting
        if call is None or call.canceled or self.broken:
            return
        data = self.session.prepare_cancel(call)
        self.torn = data, None, ()  # and nothing is called in between
        call.canceled = True
        self._send_end(data)

    def give_back(self) -> None:
        """Return the item that is leased, on its way, or waited for, unless it was confirmed, without blocking.

        May be called again after an interrupt.
        """
        leased = self.leased
        if leased is None:
            return
        if self.session.waiting is not None:
            self.cancel()
        elif not leased.confirmed and not self.broken:
            data, _ = self.session.prepare(*requests.give_back(leased.request))
            self.torn = data, None, ()  # and nothing is called in between
            self.leased = None
            self._send_end(data)
        self.leased = None

    def _send_end(self, data: bytes) -> None:
        """Send the end of a call, for which `torn` is set, without waiting, or leave it to a link to be resumed."""
        sent = len(data)
        try:
            if self.down is None:
                sent = self.peer.send(data, FLAGS)
        except OSError as error:  # lost, or the kernel's buffer is full
            self.broken = not self._breaks(error)
        if sent < len(data):
            self.check_partial_send()
        if self.link is not None and self.torn is not None:
            self.link.note(data)
        self.torn = None

    def confirm(self, leased: Leased, deadline: Deadline) -> None:
        """Confirm that a leased item has arrived; it is the caller's as soon as the confirmation has been sent.

        Raises OSError or DeadlineExceeded; then the server takes the item back when the connection ends.
        """
        data, _ = self.session.prepare(*requests.confirm(leased.request))
        if self.down is not None:
            self.resume(deadline)
        if self.link is not None:
            self.link.sent += ((0, data, None),)  # nothing is called from here to `confirmed`
            self.frame = data
            self.sent = 0
            leased.confirmed += (0,)
        else:
            self.torn = _NOTHING
            try:
                leased.confirmed += map(self.peer.send, (data,), (FLAGS,))  # in one step, as nothing resumes this
            except BlockingIOError:
                leased.confirmed += (0,)
            self.sent = leased.confirmed[0]
            self.frame = data
            self.torn = None
        self._push_rest(deadline)

    def confirm_writes(self, deadline: Deadline) -> None:
        """Wait until the server has executed all writes. Raises OSError, ProtocolError or DeadlineExceeded."""
        self.read_until(self.request(requests.NO_KEY, deadline), deadline)

    def await_writes(self, deadline: Deadline) -> None:
        """In a signal handler that has interrupted a call on it, wait until earlier writes have been executed.

        Nothing is read, because the bytes are the interrupted call's. The writes precede every pending request, so the
        first byte of a reply confirms them. It does not wait if the call was interrupted within a send, or if the
        connection is broken. Raises OSError or DeadlineExceeded.
        """
        session = self.session
        if self.broken or self.torn is not None or self.down is not None:
            return  # the writes are executed when the interrupted call continues
        if session.arrived or not session.unconfirmed():
            return
        try:
            self._await_writes(deadline)
        except OSError:
            if self.link is None:
                raise
            # The interrupted call resumes the link: it has got the error of the broken connection, or is about to.

    def _await_writes(self, deadline: Deadline) -> None:
        if self.frame:
            while not self._push():
                self._poll(select.POLLOUT, deadline)
        if not self.session.pending:
            self._put_fence(deadline)
        self._poll(select.POLLIN, deadline)

    def _put_fence(self, deadline: Deadline) -> None:
        frame, sent = self.frame, self.sent
        self.frame = b""
        try:
            data, call = self.session.prepare_fence(0)
            if not self.put(data, call):
                self.put_rest(data, call, deadline)
        finally:
            self.check_partial_send()
            self.frame, self.sent = frame, sent

    # While idle, or in use by another thread

    def hung_up(self) -> bool:
        """Return whether the peer has closed or reset it. Consumes neither data nor a pending error."""
        poll = select.poll()
        try:
            poll.register(self.peer, getattr(select, "POLLRDHUP", 0))
        except ValueError:
            return False  # closed by this process
        return bool(poll.poll(0))

    def loss(self) -> OSError | None:
        """Return the error that the next call would raise if the idle connection is lost, else None."""
        try:
            if not socket.socket.recv(self.peer, 1, _PEEK):  # of TLS, what would be decrypted
                return ConnectionError(LOST)
            error = self.peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # hidden by what has not been read
        except BlockingIOError:
            return None
        except OSError as failure:
            return failure
        if error:
            return OSError(error, os.strerror(error))
        return ConnectionError(LOST) if self.hung_up() else None

    # Reading

    def drain_abandoned_calls(self, deadline: Deadline) -> None:
        """Read the replies of abandoned calls. Raises OSError, ProtocolError or DeadlineExceeded."""
        if self.down is not None:
            self.resume(deadline)
        self.cancel()
        if self.broken:
            raise ConnectionError(LOST)
        while self.session.pending:
            self.read_until(self.session.pending[-1], deadline)
        self._link_opened()
        while self.stranded:
            self._push_back(self.stranded[0], deadline)

    def _push_back(self, call: PendingCall, deadline: Deadline) -> None:
        """Push back the item of an abandoned pop. Raises OSError or DeadlineExceeded."""
        item = call.result[1]
        if item is None:
            self.stranded.remove(call)
            return
        data, _ = self.session.prepare(*requests.push_back(call.fields[0], item))
        while call in self.stranded:
            self._poll(select.POLLOUT, deadline)
            self.torn = data, None, ()
            try:
                self.sent = self.peer.send(data, FLAGS)
            except BlockingIOError:
                self.torn = None
                continue
            self.frame = data
            self.session.written += 1
            self.stranded.remove(call)
            self.torn = None  # not before: it would be pushed back twice
        self._push_rest(deadline)

    def read_until(self, call: PendingCall, deadline: Deadline) -> None:
        """Read replies until this call is answered. Raises OSError, ProtocolError or DeadlineExceeded."""
        while not call.done:
            if not self.session.arrived:
                self._poll(select.POLLIN, deadline)
            try:
                self.read(_LONG)
            except BlockingIOError:
                if self.link is None and self._tls is None:
                    raise

    def read_soon(self) -> None:
        """Read once, if data arrives within a tick of the kernel's clock. Raises OSError, ProtocolError."""
        try:
            self.read()
        except BlockingIOError:
            pass

    def read(self, size: tuple[int] = _SHORT) -> None:
        """Read once, up to `size[0]` bytes. Raises OSError, ProtocolError."""
        arrived = self.session.arrived
        link = self.link
        if not arrived:
            if link is None:
                self._receive(size)
            else:
                self._receive_on_link(link, size)
        if link is not None:
            self.counted()
        if not arrived[0]:
            if self.down is None and link is not None and self.breaks(None):
                self.mark_down(ConnectionError(LOST))
            if self.down is not None:  # or a signal handler has received the error
                arrived.clear()
                raise BlockingIOError
            raise ConnectionError(LOST)
        done = self.session.take()
        if link is not None:
            self._acknowledge(link, done)

    def _receive(self, size: tuple[int]) -> None:
        """Receive what the session takes next. No interrupt loses it, but one in the decryption. Raises OSError."""
        tls = self._tls
        if tls is None:
            self.session.arrived += map(self.peer.recv, size)
            return
        tls.fetch(size[0])
        self.torn = _NOTHING
        try:
            self.session.arrived.append(tls.decrypt(size[0]))
        except OSError:
            self.torn = None
            raise
        self.torn = None

    # On a single link

    def open_link(self, deadline: Deadline, introduction: bytes = b"") -> None:
        """Ask the server to keep the session when the connection breaks, unless it was asked before.

        `introduction` goes first. Raises OSError, ProtocolError or DeadlineExceeded; `drain_abandoned_calls` reads a
        late reply.
        """
        if self.link is None and self._linking is None:
            link = ClientSingleLink()
            self.broken = True  # until the request is known to have been sent
            self._linking = link, self.request((BY_METHOD["link"], link.fields()), deadline, introduction)
            self.broken = False
        if self._linking is not None:
            self.read_until(self._linking[1], deadline)
            self._link_opened()

    def _link_opened(self) -> None:
        if self._linking is not None:
            link, call = self._linking
            if link.begun(unpack(call.result)):
                self.link = link
            self._linking = None

    def counted(self) -> ClientSingleLink:
        """Return the link, with the bytes counted that have `arrived`. May be called again for the same bytes."""
        link = self.link
        assert link is not None
        arrived = self.session.arrived
        if arrived:
            link.received = self._received + len(arrived[0]) - self.session.kept
        return link

    def can_resume(self) -> bool:
        """Return whether the connection can be replaced when it breaks."""
        return self.link is not None and not self.inherited

    def resume(self, deadline: Deadline) -> None:
        """Replace the broken connection, and send again what the server has not received.

        Raises DeadlineExceeded, or the error that broke the connection if the server has not kept the session.
        """
        down, reach = self.down, self.reach
        assert down is not None
        assert reach is not None
        link = self.counted()
        while self.can_resume():
            grace = max(0.0, self.down_since + link.grace - time.monotonic())
            left = deadline.left()
            try:
                peer, reply = reach(link, Deadline(grace if left is None else min(grace, left)))
            except (OSError, DistNetworkError, AccessDeniedError) as error:
                # The call's time is over before the server's grace period: a later call can still resume.
                if isinstance(error, DistNetworkError) and left is not None and left < grace:
                    raise DeadlineExceeded from None
                raise OSError(down.errno, f"{down.strerror}; {reason_of(error)}") from None
            try:
                rest = link.resume(reply)
                self.replace(peer)
                if self._send_again(rest, deadline):
                    self.down = None
                    return
            except ProtocolError as error:
                raise OSError(down.errno, f"{down.strerror}; {error}") from None
            finally:
                peer.close()
        raise OSError(down.errno, down.strerror)

    def replace(self, peer: socket.socket) -> None:
        """Use another connection under the same descriptor. The caller closes `peer`."""
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _RECV_TIMEOUT)
        os.dup2(peer.fileno(), self.peer.fileno(), inheritable=False)
        reset_when_closed(self.peer, False)
        if self._tls is not None and isinstance(peer, TlsSocket):
            self._tls.adopt(peer)
        if self.replaced is not None:
            self.replaced()

    def _send_again(self, rest: bytes, deadline: Deadline) -> bool:
        """Send what the server has not received. Return False if this connection has broken, too."""
        view = memoryview(rest)
        while view:
            try:
                sent = self.peer.send(view, FLAGS)
                view = view[sent:]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
            except OSError as error:
                if not self.breaks(error):
                    raise
                return False
        self.sent = len(self.frame)
        return True

    def breaks(self, error: BaseException | None) -> bool:
        """Return whether the connection can be replaced after an error, or after its end (None)."""
        return self.link is not None and not self.inherited and self.link.breaks(error)

    def _breaks(self, error: OSError) -> bool:
        """After an error of `send` or `recv`, return whether `resume` can replace the connection, and mark it down."""
        if not self.breaks(error):
            return False
        self.mark_down(error)
        return True

    def interrupted(self, error: BaseException) -> None:
        """After an interrupt, mark the connection down if it struck between the kernel's error and `mark_down`."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, OSError) and self.breaks(cause):
                if self.down is None:
                    self.mark_down(cause)
                return
            cause = cause.__context__

    def mark_down(self, error: OSError) -> None:
        """Note that the connection is broken, and since when."""
        self.down_since = time.monotonic()
        self.down = error.with_traceback(None) if error.errno else ConnectionResetError(errno.ECONNRESET, str(error))

    def _receive_on_link(self, link: ClientSingleLink, size: tuple[int]) -> None:
        """As `_receive`. Raises BlockingIOError if there is nothing, or the connection is broken."""
        if self.down is not None:
            raise BlockingIOError
        self._received = link.received
        try:
            self._receive(size)
        except BlockingIOError:
            raise
        except OSError as error:
            if not self._breaks(error):
                raise
            raise BlockingIOError from None

    def _acknowledge(self, link: ClientSingleLink, done: list[PendingCall]) -> None:
        """Forget answered requests, and acknowledge long replies, which the server keeps until then."""
        if done:
            link.answered(done[-1])
        data = link.acknowledgement(ACKNOWLEDGED_AT_ONCE)
        try:
            if data and not self.put(data, None):  # if the kernel's buffer is full, the next one acknowledges this, too
                self.check_partial_send()
        except OSError:
            pass  # the server has closed the connection

    def _poll(self, event: int, deadline: Deadline) -> None:
        if self.down is not None:
            self.resume(deadline)
        self._wait(event, deadline)

    def _wait(self, event: int, deadline: Deadline) -> None:
        if event == select.POLLIN and self._tls is not None and self._tls.buffered():
            return
        poll = select.poll()
        poll.register(self.peer, event)
        while True:
            moment = deadline.poll_seconds()
            if poll.poll(None if moment is None else moment * 1000):
                return
            if deadline.passed():
                raise DeadlineExceeded
