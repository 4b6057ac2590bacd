"""One connection of the async client, on its event loop.

It knows a session, the futures of its calls, and the bytes to be written; it must not know other connections or what a
call means.

Invariants: no request is executed twice. A call whose caller has gone is still answered and its reply dropped, so that
the connection stays in step. When the connection is lost, every call on it fails with the reason. A link is lost only
if its broken connection cannot be replaced.
"""

import asyncio
import functools
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from copy import copy
from typing import Any, Final, cast

from ..base.deadline import MIN_ROUND_TRIP, Deadline
from ..base.errors import AccessDeniedError, DistNetworkError, ProtocolError, StoreTimeoutError, reason_of
from ..links.single_client import ACKNOWLEDGED_AT_ONCE, UNANSWERED_BYTES, ClientSingleLink, is_break
from ..session.client import LOST, ClientSession, PendingCall
from ..wire.codecs import Fields
from ..wire.commands import BY_METHOD, PARKS, Command
from ..wire.values import unpack
from .last_byte import describe_silence
from .requests import VALUE_BYTES, Request, confirm, give_back, lost_during, size_hint, timeout_message
from .sync_connection import reset_when_closed
from .tls import serve

_AGAIN_SECONDS: Final = 0.05
"""Seconds until a connection whose task was cancelled is resumed. Not at once: the loop may be about to end."""


class AsyncConnection(asyncio.Protocol):
    """A connection that sends the requests of one iteration of the loop together."""

    def __init__(
        self,
        session: ClientSession,
        on_lost: Callable[["AsyncConnection", DistNetworkError], None],
        on_free: Callable[["AsyncConnection"], None],
        reach: Callable[[ClientSingleLink, Deadline, Callable[[], bool]], Awaitable[tuple[socket.socket, bytes]]]
        | None = None,
        lost_error: Callable[[str], Awaitable[DistNetworkError]] | None = None,
    ) -> None:
        """`reach` reconnects a link; it returns the connection, and the reply to LINK on it.

        `lost_error` returns the error with the given text and the server's reason for closing the connection.
        """
        self.session = session
        self.link: ClientSingleLink | None = None
        """Set if the server keeps the session when the connection breaks."""
        self._reach = reach
        self._lost_error = lost_error
        self.is_broken = False
        """Whether it was lost to a break before it became a link."""
        self._held = False
        """Whether requests wait for the reply to LINK, or for the next connection."""
        self._resuming: asyncio.Task[None] | None = None
        """The task that replaces the connection, or finds out why it was lost."""
        self.lost: DistNetworkError | None = None
        self.pops = 0
        """Pops in progress: their items are not yet confirmed."""
        self.fence: asyncio.Future[Any] | None = None
        """Done when the writes before a blocking call have been executed."""
        self._on_lost = on_lost
        self._on_free = on_free
        """Called when a blocking call has ended."""
        self._loop = asyncio.get_running_loop()
        self._futures: dict[PendingCall, asyncio.Future[Any]] = {}
        self._outbox: list[bytes] = []
        self._held_bytes = 0
        """Bytes that were put into the outbox while requests wait."""
        self.space: asyncio.Future[None] | None = None
        """Set while so many requests wait that no further call may be made; done when they no longer do."""
        self._ends: list[tuple[int, PendingCall]] = []
        """The last non-blocking and the blocking call in the outbox, each with the number of items up to its end."""
        self._longest = 0
        """Bytes of the longest request, once one exceeded the largest value that a server accepts by default."""
        self._silent: list[asyncio.Future[Any]] = []
        """Futures of the requests in the outbox that have no reply."""
        self._drained: asyncio.Future[None] | None = None
        """Done when the transport resumes writing; None while it takes data."""
        self._closing = False
        self._is_lost = False
        """Whether it or the store was lost rather than closed."""
        self._silence = ""
        """How long the server had been silent when the connection was lost, for errors."""
        self._due: deque[tuple[float, asyncio.Future[Any], Request, float]] = deque()
        """Calls with a timeout, the first to expire first."""
        self._timer: asyncio.TimerHandle | None = None
        self._fires_at = 0.0
        """When the timer fires."""

    # Calls

    def call(self, command: Command, fields: Fields) -> tuple[PendingCall | None, "asyncio.Future[Any]"]:
        """Send a request. The future gets its result, or None once the kernel has a request without a reply."""
        if self.lost is not None:
            raise copy(self.lost)
        data, call = self.session.request(command, fields)
        self._write(data, call)
        future: asyncio.Future[Any] = self._loop.create_future()
        if call is None:
            self._silent.append(future)
        elif call.done:
            future.set_result(call.result)
        else:
            self._futures[call] = future
        return call, future

    def limit(self, future: "asyncio.Future[Any]", request: Request, seconds: float) -> None:
        """Fail a call that is not answered within this many seconds. Calls with the same timeout share a timer."""
        due = self._due
        while due and due[0][1].done():
            due.popleft()
        when = self._loop.time() + (seconds or MIN_ROUND_TRIP)
        if due and when < due[-1][0]:  # out of order: the timeout has been shortened
            self._loop.call_at(when, _expire, future, request, seconds)
            return
        due.append((when, future, request, seconds))
        if self._timer is None or when < self._fires_at:  # it may be set for a call that has been answered
            self._set_timer(when)

    def _expire_due(self) -> None:
        due = self._due
        now = self._loop.time()
        while due and (due[0][1].done() or due[0][0] <= now):
            _, future, request, seconds = due.popleft()
            _expire(future, request, seconds)
        self._timer = None
        if due:
            self._set_timer(due[0][0])

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fires_at = when
        self._timer = self._loop.call_at(when, self._expire_due)

    def send_fence(self) -> None:
        """Send a PING, whose reply confirms the writes before it."""
        data, call = self.session.fence(0)
        self._write(data, call)
        self.fence = self._futures[call] = self._loop.create_future()

    def cancel(self, call: PendingCall) -> None:
        """Cancel a blocked call. The connection is free once the server has replied."""
        if call is self.session.waiting and not call.canceled and self.lost is None:
            self._write(self.session.cancel(call))

    def rest_of(self, call: PendingCall) -> "asyncio.Future[Any]":
        """Return a future for the reply to a cancel. Raises DistNetworkError if the connection was lost."""
        if self.lost is not None:
            raise copy(self.lost)
        future = self._futures[call] = self._loop.create_future()
        return future

    def confirm(self, lease: Request) -> None:
        """Confirm that a leased item has reached its caller. Raises DistNetworkError if it goes back instead."""
        if self.lost is not None:
            raise copy(self.lost)
        self._write(self.session.request(*confirm(lease))[0])

    def give_back(self, lease: Request) -> None:
        """Return to the server the item that is leased, on its way, or waited for."""
        call = self.session.waiting
        if call is not None and call.fields is lease[1]:
            self.cancel(call)
        elif self.lost is None:  # otherwise it goes back with the connection
            self._write(self.session.request(*give_back(lease))[0])

    def idle(self) -> bool:
        """Return whether nothing is in progress."""
        in_progress = self.session.pending or self.pops or self._outbox or self._held
        return not in_progress and self._drained is None

    def close(self, reason: DistNetworkError | None = None, lost: bool = False) -> None:
        """Close the connection; calls in progress fail. `lost` is whether the store has been lost with another one."""
        self._closing = True
        if lost and not self._is_lost:  # else `connection_lost` has asked the socket, which may be closed now
            self._silence = describe_silence(self.transport.get_extra_info("socket"))
        self._is_lost = lost
        if self._resuming is not None:
            self._resuming.cancel()
        self._flush()
        if self._drained is None:
            self.transport.close()
        else:  # `close` would wait until the peer reads
            self.transport.abort()
        self._fail(reason or DistNetworkError("the store has been closed"))

    def forget(self) -> None:
        """Close at once, from any thread, even if the loop has been closed."""
        self._closing = True
        try:
            self._loop.call_soon_threadsafe(self._abort)
        except RuntimeError:
            pass  # the transport closes itself when it is collected, with a warning

    def _abort(self) -> None:
        if self._resuming is not None:
            self._resuming.cancel()
        self.transport.abort()

    # Called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(0)

    def data_received(self, data: bytes) -> None:
        waited = self.session.waiting is not None
        try:
            done = self.session.receive(data)
        except ProtocolError as error:
            self._fail(DistNetworkError(f"invalid reply from the server: {error}"))
            self.transport.abort()
            return
        if self.link is not None:
            self._acknowledge(self.link, len(data), done)
        for call in done:
            future = self._futures.pop(call, None)  # None if it failed while the connection was being replaced
            if future is not None and not future.done():
                future.set_result(call.result)
        if waited and self.session.waiting is None:
            self._on_free(self)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        if not self._closing:
            self._is_lost = True
            self._silence = describe_silence(self.transport.get_extra_info("socket"))
        if self.link is not None and self.link.breaks(error) and not self._closing and self.lost is None:
            self._held = True
            self._start_resuming(self.link, Deadline(self.link.grace), LOST if error is None else reason_of(error))
            return
        self.is_broken = is_break(error)
        reason = (LOST if error is None else reason_of(error)) + size_hint(self._longest)
        idle = f" ({self._silence})" if self._silence and not self._futures else ""
        if self._lost_error is None or self._closing or self.lost is not None:
            self._fail(DistNetworkError(reason + idle))
        else:
            self._held = True
            lost = DistNetworkError(reason + idle)
            self._run(self._fail_with_reason(reason + idle), functools.partial(self._fail, lost))

    def pause_writing(self) -> None:
        self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    # On a single link

    def open_link(self) -> "asyncio.Future[Any]":
        """Ask the server to keep the session when the connection breaks. No call may be blocked on it.

        Until the reply, which completes the future, other requests wait.
        """
        link = ClientSingleLink()
        _, future = self.call(BY_METHOD["link"], link.fields())
        self._flush()
        self._held = True
        future.add_done_callback(functools.partial(self._link_opened, link))
        return future

    def _link_opened(self, link: ClientSingleLink, future: "asyncio.Future[Any]") -> None:
        self._held = False
        if not future.cancelled() and future.exception() is None and link.begun(unpack(future.result())):
            self.link = link
        self._flush()

    def _note(self, link: ClientSingleLink, outbox: list[bytes], ends: list[tuple[int, PendingCall]]) -> bytes:
        """Join an outbox, and keep its parts until the calls at their ends are answered."""
        data = taken = link.acknowledgement()
        if taken:
            link.note(taken)
        start = 0
        for end, call in ends:
            requests = b"".join(outbox[start:end])
            call.ends_batch = True
            link.note(requests, call)
            data += requests
            start = end
        if start < len(outbox):
            silent = b"".join(outbox[start:])
            link.note(silent)
            link.unanswered += len(silent)
            data += silent
            free = self.session.waiting is None and (self.fence is None or self.fence.done())
            if link.unanswered > UNANSWERED_BYTES and free:
                self.send_fence()
        return data

    def _acknowledge(self, link: ClientSingleLink, size: int, done: list[PendingCall]) -> None:
        """Forget answered requests, and acknowledge long replies, which the server keeps until then."""
        link.received += size
        for call in reversed(done):
            if call.ends_batch:
                link.answered(call)
                break
        data = link.acknowledgement(ACKNOWLEDGED_AT_ONCE)
        if data:
            self._write(data)

    def _start_resuming(self, link: ClientSingleLink, deadline: Deadline, reason: str) -> None:
        if not self._is_over():
            again = functools.partial(self._start_resuming, link, deadline, reason)
            self._run(self._resume(link, deadline, reason), lambda: self._loop.call_later(_AGAIN_SECONDS, again))

    def _run(self, work: Coroutine[Any, Any, None], on_cancel: Callable[[], object]) -> None:
        """Run the task for a lost connection. Others than `close` may cancel it, with all tasks of the loop."""
        self._resuming = self._loop.create_task(work)
        self._resuming.add_done_callback(lambda task: on_cancel() if task.cancelled() else None)

    async def _resume(self, link: ClientSingleLink, deadline: Deadline, reason: str) -> None:
        """Replace the broken connection, and send again what the server has not received."""
        assert self._reach is not None
        try:
            peer, reply = await self._reach(link, deadline, lambda: not self._is_over())
            reset_when_closed(peer, False)
            if self._is_over():  # before Python 3.12, `wait_for` may swallow the cancellation by `close`
                peer.close()
                return
            try:
                await serve(peer, self)
            except BaseException:
                peer.close()
                raise
            if self._is_over():
                self.transport.abort()
                return
            rest = link.resume(reply)
        except (OSError, ProtocolError, DistNetworkError, AccessDeniedError) as error:
            try:
                await self._fail_with_reason(f"{reason}; {reason_of(error)}" + size_hint(self._longest))
            finally:
                self.transport.abort()
            return
        self._resuming = None
        self._held = False
        self.resume_writing()
        self.transport.write(rest)
        self._flush()

    def _is_over(self) -> bool:
        """Return whether the connection has been closed or lost meanwhile."""
        return self._closing or self.lost is not None

    async def _fail_with_reason(self, text: str) -> None:
        self._fail(DistNetworkError(text) if self._lost_error is None else await self._lost_error(text))

    def _write(self, data: bytes, call: PendingCall | None = None) -> None:
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(data)
        if self._held:
            self._held_bytes += len(data)
            if self._held_bytes >= UNANSWERED_BYTES and self.space is None:
                self.space = self._loop.create_future()
        if call is not None and not call.done:
            if self._ends and not call.command.flags & PARKS:
                self._ends.pop()
            self._ends.append((len(self._outbox), call))

    def _flush(self) -> None:
        outbox = self._outbox
        if self._held or not (outbox or self._silent) or self.transport.is_closing():
            return
        ends = self._ends
        self._outbox = []
        self._ends = []
        self._make_space()
        data = b"".join(outbox) if self.link is None else self._note(self.link, outbox, ends)
        if len(data) > VALUE_BYTES:
            self._longest = max(self._longest, *map(len, outbox))
        if data:
            self.transport.write(data)
        silent, self._silent = self._silent, []
        for future in silent:
            if self._drained is not None:
                self._drained.add_done_callback(functools.partial(_pass_on, future))
            elif not future.done():
                future.set_result(None)

    def _make_space(self) -> None:
        self._held_bytes = 0
        space, self.space = self.space, None
        if space is not None:
            space.set_result(None)

    def _fail(self, error: DistNetworkError) -> None:
        if self.lost is not None:
            return
        self.lost = error
        self._outbox.clear()
        self._make_space()
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        failed: list[tuple[asyncio.Future[Any], DistNetworkError]] = [
            (future, self._error_of(call, error) if self._is_lost else error) for call, future in self._futures.items()
        ]
        failed += [(future, error) for future in self._silent]
        self._futures.clear()
        self._silent.clear()
        if self._drained is not None:
            failed.append((self._drained, error))
        for future, its_error in failed:
            if not future.done():
                future.set_exception(its_error)
                future.exception()  # marks it as retrieved, as the caller may have gone
        if not self._closing:
            self._on_lost(self, error)

    def _error_of(self, call: PendingCall, error: DistNetworkError) -> DistNetworkError:
        """Return the error of a call that was in progress when the connection was lost."""
        return type(error)(f"{error}{lost_during((call.command, call.fields), self._silence)}")


def _expire(future: "asyncio.Future[Any]", request: Request, seconds: float) -> None:
    if not future.done():
        future.set_exception(StoreTimeoutError(timeout_message(request, seconds)))


def _pass_on(target: "asyncio.Future[Any]", source: "asyncio.Future[None]") -> None:
    if target.done():
        return
    error = source.exception()
    if error is None:
        target.set_result(None)
    else:
        target.set_exception(error)
