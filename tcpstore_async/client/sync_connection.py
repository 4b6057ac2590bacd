"""One connection of the synchronous client, written to and read from by the thread that leases it.

It knows a socket, a session, and what an interrupt has left half done; it must not know other connections or who may
lease it.

Invariants: wherever an interrupt strikes, the connection is in step, or marked: as broken because a request was sent in
part, or as down because the interrupt tore the stream of TLS. A signal handler that interrupts a call on it can wait
until everything written before has been executed, and changes nothing that the call continues with.

Signal handlers run between two bytecodes of the interpreter; in compiled code, only within blocking system calls and in
interpreted functions. An atomic step is therefore a single call of C code in interpreted builds: a chain of `map`s
consumed by `+=` or `extend`. TLS has no such steps: what an interrupt leaves is found by `check_partial_send`.
"""

import errno
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from itertools import chain, compress, filterfalse, repeat
from operator import not_
from typing import Final

from ..base.deadline import Deadline
from ..base.errors import AccessDeniedError, DistNetworkError, ProtocolError, reason_of
from ..links.single_client import ACKNOWLEDGED_AT_ONCE, ClientSingleLink, is_break
from ..session.client import LOST, ClientSession, PendingCall
from ..session.identity import build
from ..wire.commands import BY_METHOD, PARKS
from ..wire.values import unpack
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

_EACH: Final = (FLAGS,)

_PEEK: Final[int] = socket.MSG_PEEK | socket.MSG_DONTWAIT

_COMPILED: Final = build() == "compiled"

_INTERRUPTED: Final = "an interrupt struck within TLS, and the session cannot be resumed"

NO_THREAD: Final = 0


class DeadlineExceeded(Exception):
    """The deadline has passed."""


def reset_when_closed(peer: socket.socket, reset: bool) -> None:
    """Choose whether closing the connection resets it, which the server takes for a break and not for its end."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", reset, 0))


class Leased:
    """An item that a server of ours leases to a call, or will lease."""

    def __init__(self, request: Request, confirmed: list[int]) -> None:
        self.request = request
        self.confirmed = confirmed
        """Bytes of the confirmation that were sent; once not empty, the item is the caller's."""
        self.returned: list[int] = []
        """Bytes of the GIVE_BACK that were sent."""


class Stranded:
    """An abandoned pop on PyTorch's server, whose item is to be pushed back."""

    def __init__(self, call: PendingCall) -> None:
        self.call = call
        self.sent: list[int] = []
        """Bytes of the push handed to the kernel, by each send."""


class SyncConnection:
    """One connection, used by one thread at a time."""

    def __init__(self, peer: socket.socket, session: ClientSession) -> None:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _RECV_TIMEOUT)
        self.peer = peer
        self._tls = peer if isinstance(peer, TlsSocket) else None
        self._torn = False
        """Whether bytes are between the kernel and what counts them, in the stream of TLS: an interrupt loses count."""
        self.session = session
        self.user = NO_THREAD
        """Identifier of the thread that leases it."""
        self.parked = False
        """Whether the call that leases it may block for ever, so that other calls should not wait for it."""
        self.broken = False
        """Whether a request was sent, or a reply received, only in part, so that it must be closed."""
        self.broken_by = "a request or reply was incomplete"
        self.frame = b""
        """A request that may have been sent in part."""
        self.sent: list[int] = []
        """Bytes of `frame` handed to the kernel, by each send."""
        self.inherited = False
        """Whether it belongs to the parent process."""
        self._canceled: list[int] = []
        """Bytes of a cancel that were sent."""
        self._chunks: list[bytes] = []
        """Received, but not yet given to the session. `recv` puts it here in one atomic step, so that no interrupt
        loses it."""
        self._read: list[list[PendingCall]] = []
        """The calls that `_chunks` completed, once the session has received it."""
        self.leased: Leased | None = None
        """The item that `give_back` returns, unless it has been confirmed."""
        self.stranded: list[Stranded] = []
        self.longest: int = 0
        """Bytes of the longest request that took more than one send."""
        self.watched = False
        """Whether the background loop watches it for hang-ups."""
        self.link: ClientSingleLink | None = None
        """Set if the server keeps the session when the connection breaks."""
        self._linking: tuple[ClientSingleLink, PendingCall] | None = None
        """The link of an unanswered LINK."""
        self._received = 0
        """Bytes received on the link before `_chunks`."""
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
        sent: list[int] = []
        try:
            if self._tls is not None:
                self.sent = sent
                self.frame = data
                self._send(data, sent, call, ahead)
            elif _COMPILED:
                count: int = self.peer.send(data, FLAGS)
                if link is not None:
                    link.note(data, call)
                if ahead:
                    session.pending.extend(ahead)
                if call is not None and not call.done:
                    session.pending.append(call)
                if count < len(data):
                    sent.append(count)
            else:
                self.sent = sent
                self.frame = data
                sending = self._sending(data, call)
                if call is None or call.done:
                    sent += sending
                else:  # sends when `extend` requests the first call, and appends the calls if something was taken
                    session.pending.extend(
                        compress((*ahead, call), chain(filterfalse(sent.append, sending), repeat(True)))
                    )
        except BlockingIOError:
            return False
        except OSError as error:
            if not self._breaks(error):
                raise
            return False
        if sent and sent[0] < len(data):
            self.sent = sent
            self.frame = data
            return False
        session.written += mutates
        self.frame = b""
        return True

    def _sending(self, data: bytes, call: PendingCall | None = None) -> Iterator[int]:
        """Return an iterator of one item, the bytes sent. Taking it sends, and notes that on a link in one step."""
        sending = map(self.peer.send, (data,), _EACH)
        if self.link is None:
            return sending
        return compress(sending, map(not_, map(self.link.sent.append, ((0, data, call),))))

    def _send(
        self, data: bytes, sent: list[int], call: PendingCall | None = None, ahead: tuple[PendingCall, ...] = ()
    ) -> None:
        """Send, and append to `sent` how many bytes the kernel took, in one step or, with TLS, so that none is lost.

        With TLS a link notes the bytes first, and the calls that then are pending: it sends again what an interrupt
        or a break has kept from the server. Raises OSError.
        """
        tls = self._tls
        if tls is None:
            sent += self._sending(data, call)
            return
        pending = self.session.pending
        calls = (*ahead, call) if call is not None and not call.done else ()
        self._torn = True
        if self.link is None:
            pending.extend(calls)
        else:
            noted = map(not_, map(self.link.sent.append, ((0, data, call),)))
            if calls:
                pending.extend(compress(calls, chain(noted, repeat(True))))
                sent.append(len(data))
            else:
                sent.extend(compress((len(data),), noted))
        try:
            sent[:] = (tls.send(data),)
        except OSError as error:
            if not self._breaks(error):
                self._torn = False
                raise
        self._torn = False

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
            begun = sum(self.sent) if self.frame else 0
            if begun:
                whole = self._push()
                self.session.written += mutates and whole
            else:
                whole = self.put(data, call, mutates, ahead)
        self.frame = b""

    def _push(self) -> bool:
        """Send as much of the rest of the frame as the kernel takes; return whether that was all.

        A signal handler may call it in the middle of itself, so one atomic step finds out what is left and sends it.
        """
        view = memoryview(self.frame)
        sent = self.sent
        try:
            if self._tls is not None:
                self._torn = True
                took: int = self._tls.send(view[sum(sent) :])
                sent.append(took)
            elif _COMPILED:
                rest = view[sum(sent) :]
                count: int = self.peer.send(rest, FLAGS)  # in the slice mypyc would make the call twice
                sent.append(count)
            else:
                sent += map(self.peer.send, map(view.__getitem__, map(slice, map(sum, (sent,)), (None,))), _EACH)
        except BlockingIOError:
            pass
        except OSError as error:
            self._torn = False
            if not self._breaks(error):
                raise
            return False
        self._torn = False
        return sum(sent) >= len(view)

    def request(self, request: Request, deadline: Deadline, first: bytes = b"") -> PendingCall:
        """Send a request that has a reply, behind a fence if it blocks and writes are unconfirmed.

        `first` is a request without a reply to send before it. Raises OSError or DeadlineExceeded.
        """
        session = self.session
        self._canceled = []
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
        """After an interrupt, find out whether it tore TLS, or left a request sent in part."""
        if self._torn:
            self._torn = False
            self.session.written += self.frame != b""
            self.frame = b""
            if self.can_resume():
                self.mark_down(self.down or ConnectionResetError(errno.ECONNRESET, _INTERRUPTED))
            else:
                self.broken = True
                self.broken_by = _INTERRUPTED
        sent = sum(self.sent) if self.frame else 0
        if sent:
            self.session.written += 1  # the interrupt may have prevented this; one too many does no harm
        if 0 < sent < len(self.frame):
            self.broken = True
        self.frame = b""

    def cancel(self) -> None:
        """Cancel its blocking call, if any, without waiting for the reply. May be called again."""
        call = self.session.waiting
        if call is None or call.canceled or self.broken:
            return
        data = self.session.prepare_cancel(call)
        if not self._canceled:
            self._send_or_note(data, self._canceled)
        if self._canceled:
            self.broken = self._canceled[0] < len(data)
            call.canceled = True

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
            if not leased.returned:
                self._send_or_note(data, leased.returned)
            if leased.returned:
                self.broken = leased.returned[0] < len(data)
        self.leased = None

    def _send_or_note(self, data: bytes, sent: list[int]) -> None:
        """Send the end of a call without waiting; note it for the next connection of a link that breaks or is down.

        `sent` gets how many bytes count as sent; it stays empty if the connection is out of step, or is lost.
        """
        try:
            if self.down is None:
                self._send(data, sent)
        except OSError as error:  # lost, or the kernel's buffer is full
            self.broken = not self._breaks(error)
        if self.down is not None and self.link is not None and not sent:
            sent.extend(compress((len(data),), map(not_, map(self.link.sent.append, ((0, data, None),)))))

    def confirm(self, lease: Request, sent: list[int], deadline: Deadline) -> None:
        """Confirm that a leased item has arrived; `sent` is not empty as soon as the confirmation has been sent.

        Raises OSError or DeadlineExceeded; then the server takes the item back when the connection ends.
        """
        data, _ = self.session.request(*requests.confirm(lease))
        if self.link is not None:
            self._confirm_on_link(data, sent, deadline)
            return
        try:
            self._send(data, sent)
        except BlockingIOError:
            sent.append(0)
        self._confirm_rest(data, sent, deadline)

    def _confirm_rest(self, data: bytes, sent: list[int], deadline: Deadline) -> None:
        if sent[0] < len(data):
            self.broken = True
            self.frame = data
            self.sent = [sent.pop()]
            while not self._push():
                self._poll(select.POLLOUT, deadline)
            self.frame = b""
            self.broken = False
            sent.append(len(data))

    def confirm_writes(self, deadline: Deadline) -> None:
        """Wait until the server has executed all writes. Raises OSError, ProtocolError or DeadlineExceeded."""
        self.read_until(self.request(requests.NO_KEY, deadline), deadline)

    def await_writes(self, deadline: Deadline) -> None:
        """In a signal handler that has interrupted a call on it, wait until earlier writes have been executed.

        Nothing is read, because the bytes are the interrupted call's. The writes precede every pending request, so the
        first byte of a reply confirms them. If the connection is broken, they are executed when the interrupted call
        continues. Raises OSError or DeadlineExceeded.
        """
        session = self.session
        if self.broken or self._torn or self._chunks or self.down is not None or not session.unconfirmed():
            return
        try:
            self._await_writes(deadline)
        except OSError:
            if self.link is None:
                raise
            # The interrupted call resumes the link: it has got the error of the broken connection, or is about to.

    def _await_writes(self, deadline: Deadline) -> None:
        if self.frame and sum(self.sent):
            whole = self._push()
            while not whole:
                self._poll(select.POLLOUT, deadline)
                whole = self._push()
        if not self.session.pending:
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
            self.push_back(self.stranded[0], deadline)
            del self.stranded[0]

    def push_back(self, stranded: Stranded, deadline: Deadline) -> None:
        """Push back the item of an abandoned pop. Raises OSError or DeadlineExceeded.

        After an interrupt, `check_partial_send` finds out what was sent; a second call does not repeat it.
        """
        call = stranded.call
        if call.result[1] is not None and not stranded.sent:
            data, _ = self.session.prepare(*requests.push_back(call.fields[0], call.result[1]))
            self.sent = stranded.sent
            self.frame = data
            while not self._push():
                self._poll(select.POLLOUT, deadline)
            self.session.written += 1
            self.frame = b""

    def read_until(self, call: PendingCall, deadline: Deadline) -> None:
        """Read replies until this call is answered. Raises OSError, ProtocolError or DeadlineExceeded."""
        while not call.done:
            if not self._chunks or self._read:
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
        chunks = self._chunks
        if not chunks or self._read:  # an interrupt at the end of this method leaves both
            chunks.clear()
            self._read.clear()
            if self.link is None:
                self._receive(size)
            else:
                self._receive_on_link(self.link, size)
        if self.link is not None:
            self.counted()
        if not chunks[0]:
            if self.down is not None:  # a signal handler has received the error
                chunks.clear()
                raise BlockingIOError
            raise ConnectionError(LOST)
        if _COMPILED:
            done = self.session.receive(chunks.pop())
            if self.link is not None:
                self._acknowledge(self.link, done)
            return
        saved = self.session.save()
        try:
            self._read += map(self.session.receive, chunks)
        except ProtocolError:
            raise
        except BaseException:  # an interrupt; assume no second one this soon
            if not self._read:
                self.broken = True
                self.session.restore(saved)
                self._read += map(self.session.receive, chunks)
                self.broken = False
            raise
        if self.link is not None and self._read:
            self._acknowledge(self.link, self._read[0])
        chunks.clear()
        self._read.clear()

    def _receive(self, size: tuple[int]) -> None:
        """Receive into `_chunks`, in one step or, with TLS, so that an interrupt is noticed. Raises OSError."""
        tls = self._tls
        if tls is None:
            self._chunks += map(self.peer.recv, size)
            return
        tls.fetch(size[0])
        self._torn = True
        try:
            self._chunks.append(tls.decrypt(size[0]))
        except OSError:
            self._torn = False
            raise
        self._torn = False

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
        """Return the link, with the bytes of `_chunks` counted. May be called again for the same bytes."""
        link = self.link
        assert link is not None
        if self._chunks and not self._read:
            link.received = self._received + len(self._chunks[0])
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
                if not is_break(error):
                    raise
                return False
        if self.frame and sum(self.sent):
            self.sent.append(len(self.frame) - sum(self.sent))
        return True

    def _breaks(self, error: OSError) -> bool:
        """After an error of `send` or `recv`, return whether `resume` can replace the connection, and mark it down."""
        if not is_break(error) or not self.can_resume():
            return False
        self.mark_down(error)
        return True

    def interrupted(self, error: BaseException) -> None:
        """After an interrupt, mark the connection down if it struck between the kernel's error and `mark_down`."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, OSError) and is_break(cause):
                if self.down is None and self.can_resume():
                    self.mark_down(cause)
                return
            cause = cause.__context__

    def mark_down(self, error: OSError) -> None:
        """Note that the connection is broken, and since when."""
        self.down_since = time.monotonic()
        self.down = error.with_traceback(None)

    def _receive_on_link(self, link: ClientSingleLink, size: tuple[int]) -> None:
        """Receive into `_chunks`. Raises BlockingIOError if there is nothing, or the connection is broken."""
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
        if not data or self.frame:
            return
        self.sent = []
        self.frame = data
        try:
            self._send(data, self.sent)
        except OSError as error:  # broken, or the kernel's buffer is full: the next one acknowledges these bytes, too
            self._breaks(error)
        if 0 < sum(self.sent) < len(data):
            self.broken = True  # as after any request that is sent in part
        self.frame = b""

    def _confirm_on_link(self, data: bytes, sent: list[int], deadline: Deadline) -> None:
        """Confirm as `confirm` does; replace the connection first if it breaks."""
        while not sent:
            if self.down is not None:
                self.resume(deadline)
            try:
                self._send(data, sent)
            except BlockingIOError:
                self._poll(select.POLLOUT, deadline)
            except OSError as error:
                if not self._breaks(error):
                    raise
        self._confirm_rest(data, sent, deadline)

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
