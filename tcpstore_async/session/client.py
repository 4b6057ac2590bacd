"""The client's side of a connection, without I/O: requests to bytes, bytes to replies, in order.

A `ClientSession` knows which requests have no reply yet, which writes without reply the server has not confirmed, and
the race between a wake-up and its cancel. It does not know how bytes travel, what time it is, or of other connections.

Invariants: replies belong to requests in the order in which these were sent. Only its cancel may follow a request that
blocks, and a canceled call is done only when the server has replied to the cancel, so the connection never gets out of
step. After a ProtocolError, drop the session.
"""

from collections import deque
from typing import Any, Final

from ..auth.access import Access
from ..base.errors import AccessDeniedError, ProtocolError, counted
from ..wire.codecs import DEFERRED_VALUE, NO_REPLY, STOP_WAITING, VALUES, WAIT_CANCELED, Fields, PartialReply
from ..wire.commands import BY_METHOD, HOLDS, MAGIC, MUTATES, PARKS, Command
from ..wire.values import ABSENT, PREFIX
from .identity import Identity

LOST: Final = "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?"
"""PyTorch's message when the server has closed the connection; all clients of this package use it."""

_VALIDATE: Final = BY_METHOD["validate"]
_PING: Final = BY_METHOD["ping"]
_CHECK: Final = BY_METHOD["check"]
_CANCEL_WAIT: Final = BY_METHOD["cancel_wait"]
_CANCEL_FETCH: Final = BY_METHOD["cancel_fetch"]
_LEASE_LATER: Final = BY_METHOD["lease_later"]
_GIVE_BACK: Final = BY_METHOD["give_back"]


class PendingCall:
    """A request that the server will reply to."""

    def __init__(self, command: Command, count: int, written: int, fields: Fields) -> None:
        self.command = command
        self.fields = fields
        self.count = count
        """The number of keys in the request."""
        self.written = written
        """How many writes without reply were sent before it: its reply confirms them."""
        self.result: Any = None
        self.done = False
        self.canceled = False
        self.ends_batch = False
        """Whether it is the last call of requests that were sent together, and kept together for a link."""
        self.woken = False
        """Whether the wake-up arrived before the reply to the cancel."""


class ClientSession:
    """One connection."""

    def __init__(self, pings: bool = True) -> None:
        self.access: Access | None = None
        """What its token allows; None without one, if it is not known, or if that is everything."""
        self.store: str | None = None
        """The name of the store that it is in; None for the one without a name."""
        self.identity: Identity | None = None
        """The server's identity on this connection, if that was requested before its first call."""
        self.asked: PendingCall | None = None
        """The question whether the server is one of ours, if that went with the handshake."""
        self.refusal: str = ""
        """Why the server has just closed another connection of this process with the same token, if it has."""
        self._pings = pings
        """Whether the server knows PING, which PyTorch's do since 2.5."""
        self.pending: deque[PendingCall] = deque()
        """Calls without reply, in the order in which they were sent."""
        self.written: int = 0
        """The number of writes without reply that were sent."""
        self.confirmed: int = 0
        """How many of these the server is known to have executed."""
        self._input_buffer: bytearray | None = None
        self._need: int = 0
        self._partial: PartialReply | None = None

    @property
    def waiting(self) -> PendingCall | None:
        """The blocking call under way: nothing but its cancel may be sent."""
        if not self.pending:
            return None
        last: PendingCall = self.pending[-1]
        return last if last.command.flags & PARKS else None

    # Output

    def hello(self, pid: int) -> tuple[bytes, PendingCall]:
        """Encode the handshake: VALIDATE and a fence. The result of a PING must be `pid`."""
        validate, _ = self.request(_VALIDATE, (MAGIC,))
        fence, call = self.fence(pid)
        return validate + fence, call

    def request(self, command: Command, fields: Fields) -> tuple[bytes, PendingCall | None]:
        """Encode a request. Returns its bytes and the call that its reply will complete; None if it has no reply.

        Values among the fields are framed. Send the bytes at once and whole. Raises RuntimeError while a call blocks.
        """
        data, call = self.prepare(command, fields)
        if call is None:
            if command.flags & MUTATES and not command.flags & HOLDS:  # RETURN writes nothing of this client's
                self.written += 1
        elif not call.done:
            self.pending.append(call)
        return data, call

    def prepare(self, command: Command, fields: Fields) -> tuple[bytes, PendingCall | None]:
        """As `request`, but without recording it in the session.

        When sending it, add the call to `pending` unless it is done, or the write without reply to `written`. Raises
        AccessDeniedError for what the server would not allow.
        """
        if self.access is not None:
            refusal = self.access.refusal(command, fields, self.store)
            if refusal:
                raise AccessDeniedError(f"not allowed: {refusal}")
        waiting = self.waiting
        if waiting is not None and not (command.reply is NO_REPLY and command.flags & HOLDS):
            raise RuntimeError(f"cannot send {command.name} while {waiting.command.name} is blocking")
        data = command.prefix + command.request.encode(fields)
        if command.reply is NO_REPLY:
            return data, None
        count = len(fields[0]) if fields and isinstance(fields[0], list) else 0
        call = PendingCall(command, count, self.written, fields)
        if command.reply is VALUES and not count:  # the one reply that has no bytes
            call.result = []
            call.done = True
        return data, call

    def fence(self, nonce: int) -> tuple[bytes, PendingCall]:
        """Encode a fence: a PING, or a CHECK of no keys. Its reply confirms every write that was sent before it."""
        data, call = self.prepare_fence(nonce)
        self.pending.append(call)
        return data, call

    def prepare_fence(self, nonce: int) -> tuple[bytes, PendingCall]:
        """As `fence`, but without recording it in the session."""
        data, call = self.prepare(_PING, (nonce,)) if self._pings else self.prepare(_CHECK, ([],))
        assert call is not None
        return data, call

    def cancel(self, call: PendingCall) -> bytes:
        """Encode the cancel of the blocking call. The call is done once the server has replied to that."""
        data = self.prepare_cancel(call)
        call.canceled = True
        return data

    def prepare_cancel(self, call: PendingCall) -> bytes:
        """As `cancel`, but without recording it in the session: set `canceled` when sending it."""
        if call is not self.waiting or call.canceled:
            raise RuntimeError("only a blocking call can be canceled, and only once")
        if call.command is _LEASE_LATER:
            return self.prepare(_GIVE_BACK, (call.fields[1],))[0]
        return bytes([(_CANCEL_FETCH if call.command.reply is DEFERRED_VALUE else _CANCEL_WAIT).opcode])

    def unconfirmed(self) -> bool:
        """Whether there are writes that the server may not have executed yet."""
        return self.confirmed < self.written

    # Input

    def receive(self, chunk: bytes) -> list[PendingCall]:
        """Take bytes and return the calls that they complete, in order.

        Raises ProtocolError for what cannot be a reply.
        """
        data = chunk
        if self._input_buffer is not None:
            self._input_buffer += chunk
            if len(self._input_buffer) < self._need:
                return []
            data = bytes(self._input_buffer)
            self._input_buffer = None
        done: list[PendingCall] = []
        at = 0
        end = len(data)
        while at < end:
            if not self.pending:
                raise ProtocolError(f"server sent {counted(end - at, 'unexpected byte')}")
            call = self.pending[0]
            stop = self._decode_reply(call, data, at, end)
            if stop < 0:
                at = at if self._partial is None else self._partial.at
                self._need = -stop - at
                self._input_buffer = bytearray(memoryview(data)[at:])
                break
            at = stop
            if call.done:
                self._complete(call)
                done.append(call)
        return done

    def _decode_reply(self, call: PendingCall, data: bytes, at: int, end: int) -> int:
        """Decode a call's reply, or part of it. Returns where that stops, or minus the length that is needed."""
        if call.canceled and call.command.reply is DEFERRED_VALUE:
            return self._decode_canceled_fetch(call, data, at, end)
        if call.canceled and call.command is not _LEASE_LATER:  # which has one reply in any case
            return self._decode_canceled(call, data[at], at)
        if self._partial is None:
            result, stop = call.command.reply.decode(data, at, end, call.count)
        else:
            result, stop = self._partial.decode(data, at, end)
        if stop < 0:
            self._partial = result
            return stop
        self._partial = None
        call.result = result
        call.done = True
        return stop

    def _decode_canceled(self, call: PendingCall, byte: int, at: int) -> int:
        """Decode the reply to the cancel, or the wake-up that was sent before it."""
        if byte == WAIT_CANCELED:
            call.done = True
        elif byte == STOP_WAITING and not call.woken:
            call.woken = True
        else:
            raise ProtocolError("wait_canceled response is expected")
        return at + 1

    def _decode_canceled_fetch(self, call: PendingCall, data: bytes, at: int, end: int) -> int:
        stop = at + PREFIX
        if stop > end:
            return -stop
        if data[at:stop] == ABSENT:
            call.done = True
        elif call.woken:
            raise ProtocolError("expected the reply to a canceled FETCH")
        else:
            _, stop = call.command.reply.decode(data, at, end, 1)
            call.woken = stop > 0
        return stop

    def _complete(self, call: PendingCall) -> None:
        self.pending.popleft()
        self.confirmed = call.written

    # Interrupts

    def save(self) -> "Saved":
        """Save what `receive` changes, to `restore` it if an interrupt strikes meanwhile."""
        return Saved(self, self._input_buffer, self._need, self._partial)

    def restore(self, saved: "Saved") -> None:
        """Undo what was received since: the same bytes may be received again."""
        for call in saved.pending:
            call.done = False
        if saved.pending:
            saved.pending[-1].woken = saved.woken
        self.pending.clear()
        self.pending.extend(saved.pending)
        self.confirmed = saved.confirmed
        self._input_buffer = saved.input_buffer
        if self._input_buffer is not None:
            del self._input_buffer[saved.length :]
        self._need = saved.need
        self._partial = saved.partial
        if self._partial is not None:
            del self._partial.items[saved.items :]
            self._partial.at = saved.at


class Saved:
    """The state of a session before it received something."""

    def __init__(
        self, session: ClientSession, input_buffer: bytearray | None, need: int, partial: PartialReply | None
    ) -> None:
        self.pending: list[PendingCall] = list(session.pending)
        self.woken: bool = bool(self.pending) and self.pending[-1].woken
        self.confirmed = session.confirmed
        self.input_buffer = input_buffer
        self.length = 0 if input_buffer is None else len(input_buffer)
        self.need = need
        self.partial = partial
        self.items = 0 if partial is None else len(partial.items)
        self.at = 0 if partial is None else partial.at
