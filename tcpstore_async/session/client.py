"""The client's side of a connection, without I/O: requests to bytes, bytes to replies, in order.

A `ClientSession` knows which requests have no reply yet, which writes without reply the server has not confirmed, and
the race between a wake-up and its cancel. It does not know how bytes travel, what time it is, or of other connections.

Invariants: replies belong to requests in the order in which these were sent. Only its cancel may follow a request that
blocks, and a canceled call is done only when the server has replied to the cancel, so the connection never gets out of
step. An interrupt of `take` leaves each reply taken or untouched. After a ProtocolError, drop the session.
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

_WOKEN: Final = object()
"""Stands for the wake-up before the reply to a cancel."""


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
        self.arrived: list[bytes] = []
        """The chunk to `take`, behind what has been kept."""
        self.kept: int = 0
        """How many of its bytes had been kept."""
        self._at: int = 0
        """How many of its bytes have been taken."""
        self._input_buffer: bytearray | None = None
        """An incomplete reply, to be joined with the next chunk."""
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

    def greet(self, pid: int) -> tuple[bytes, PendingCall]:
        """Encode a PING, which tells a server that is known to have it which process this is."""
        self._pings = True
        return self.fence(pid)

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
        if not chunk:
            return []
        self.arrived.append(chunk)
        return self.take()

    def take(self) -> list[PendingCall]:
        """As `receive`, for the chunk that has `arrived`. After an interrupt, call it again unless that has gone."""
        data = self.arrived[0]
        if self._input_buffer is not None:
            kept = len(self._input_buffer)
            if kept + len(data) < self._need:
                self._input_buffer += data  # nothing is called between these two, so no interrupt strikes
                del self.arrived[0]
                return []
            data = b"".join((self._input_buffer, data))
            self._input_buffer = None
            self.arrived[0] = data
            self.kept = kept
        done: list[PendingCall] = []
        at = self._at
        end = len(data)
        while at < end:
            if not self.pending:
                raise ProtocolError(f"server sent {counted(end - at, 'unexpected byte')}")
            call = self.pending[0]
            result, stop = self._decode_reply(call, data, at, end)
            if stop < 0:
                self._keep(result, data, at, -stop)
                break
            self._complete(call, result, stop if stop < end else 0)
            at = stop
            if call.done:
                done.append(call)
        return done

    def _decode_reply(self, call: PendingCall, data: bytes, at: int, end: int) -> tuple[Any, int]:
        """Decode a call's reply, or part of it. Returns as `ReplyCodec.decode`, or `_WOKEN` and where that stops."""
        if call.canceled and call.command.reply is DEFERRED_VALUE:
            return self._decode_canceled_fetch(call, data, at, end)
        if call.canceled and call.command is not _LEASE_LATER:  # which has one reply in any case
            return self._decode_canceled(call, data[at]), at + 1
        if self._partial is None:
            return call.command.reply.decode(data, at, end, call.count)
        return self._partial.decode(data, at, end)

    def _decode_canceled(self, call: PendingCall, byte: int) -> Any:
        """Decode the reply to the cancel, or the wake-up that was sent before it."""
        if byte == WAIT_CANCELED:
            return None
        if byte == STOP_WAITING and not call.woken:
            return _WOKEN
        raise ProtocolError("wait_canceled response is expected")

    def _decode_canceled_fetch(self, call: PendingCall, data: bytes, at: int, end: int) -> tuple[Any, int]:
        stop = at + PREFIX
        if stop > end:
            return None, -stop
        if data[at:stop] == ABSENT:
            return None, stop
        if call.woken:
            raise ProtocolError("expected the reply to a canceled FETCH")
        _, stop = call.command.reply.decode(data, at, end, 1)
        return None if stop < 0 else _WOKEN, stop

    # Nothing is called below that changes anything, so an interrupt finds all of it done, or none.

    def _keep(self, partial: PartialReply | None, data: bytes, at: int, need: int) -> None:
        """Keep an incomplete reply, which starts at `at`, until `data` has the length `need`."""
        whole = 0
        if partial is not None:
            at = partial.at
            whole = len(partial.items)
        rest = bytearray(memoryview(data)[at:])
        if partial is not None:
            partial.whole = whole
        self._partial = partial
        self._need = need - at
        self._input_buffer = rest
        self._at = self.kept = 0
        del self.arrived[0]

    def _complete(self, call: PendingCall, result: Any, at: int) -> None:
        """Note a call's reply, or its wake-up, behind which the chunk has more at `at`, unless that is 0."""
        self._partial = None
        self._at = at
        if not at:
            self.kept = 0
            del self.arrived[0]
        if result is _WOKEN:
            call.woken = True
            return
        del self.pending[0]
        self.confirmed = call.written
        call.result = result
        call.done = True
