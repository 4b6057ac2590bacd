"""The client's side of a connection: calls become bytes, bytes become their replies, in order.

Knows: what was asked and not answered yet, which silent writes the server has not confirmed, and the race between a
wake and its cancel. Must not know: how bytes travel, what time it is, which other connections there are.
Invariants: replies belong to calls in the order in which they were sent. Nothing follows a call that waits but its
cancel, and a canceled call is done only when the server has said so: the connection is never out of step. After a
ProtocolError it is to be left and dropped.
"""

from collections import deque
from typing import Any, Final

from ..errors import ProtocolError
from ..values import NO_BLOB, PREFIX
from ..wire.codecs import BLOBS, DEFERRED_VALUE, NO_REPLY, STOP_WAITING, WAIT_CANCELED, Fields, PartialReply
from ..wire.commands import BY_METHOD, MAGIC, Command

LOST: Final = "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?"
"""What PyTorch's client says when the server has closed; every door of ours says the same."""

_VALIDATE: Final = BY_METHOD["validate"]
_PING: Final = BY_METHOD["ping"]
_CHECK: Final = BY_METHOD["check"]
_CANCEL_WAIT: Final = BY_METHOD["cancel_wait"]
_CANCEL_FETCH: Final = BY_METHOD["cancel_fetch"]
_LEASE_LATER: Final = BY_METHOD["lease_later"]
_GIVE_BACK: Final = BY_METHOD["give_back"]


class PendingCall:
    """One request that will be answered."""

    def __init__(self, command: Command, count: int, written: int, fields: Fields) -> None:
        self.command = command
        self.fields = fields
        self.count = count
        """How many keys were asked for."""
        self.written = written
        """How many silent writes had been sent before it: its reply confirms them."""
        self.result: Any = None
        self.done = False
        self.canceled = False
        self.woken = False
        """Whether the wake came before the answer to the cancel."""


class ClientSession:
    """One connection."""

    def __init__(self, pings: bool = True) -> None:
        self._pings = pings
        """Whether the server knows PING, which PyTorch's do since 2.5."""
        self.pending: deque[PendingCall] = deque()
        """Calls that were sent and are not answered, in order."""
        self.written: int = 0
        """Silent writes that were sent."""
        self.confirmed: int = 0
        """Silent writes that the server is known to have executed."""
        self._kept: bytearray | None = None
        self._need: int = 0
        self._rest: PartialReply | None = None

    @property
    def waiting(self) -> PendingCall | None:
        """The call after which nothing but its cancel may be sent."""
        if not self.pending:
            return None
        last: PendingCall = self.pending[-1]
        return last if last.command.parks else None

    # Out

    def hello(self, pid: int) -> tuple[bytes, PendingCall]:
        """The first bytes of a connection, and the fence among them; the result of a PING must be `pid`."""
        validate, _ = self.request(_VALIDATE, (MAGIC,))
        fence, call = self.fence(pid)
        return validate + fence, call

    def request(self, command: Command, fields: Fields) -> tuple[bytes, PendingCall | None]:
        """The bytes of a request, and the call that its reply will complete; None if there is no reply.

        Values among the fields are framed blobs. To be sent at once and whole. Raises RuntimeError while a call waits.
        """
        data, call = self.prepare(command, fields)
        if call is None:
            if command.mutates and not command.holds:  # what is given back was not written by this client
                self.written += 1
        elif not call.done:
            self.pending.append(call)
        return data, call

    def prepare(self, command: Command, fields: Fields) -> tuple[bytes, PendingCall | None]:
        """The same, of which the session takes no note yet.

        Whoever sends it adds the call to `pending` unless it is done, or the silent write to `written`.
        """
        waiting = self.waiting
        if waiting is not None and not (command.reply is NO_REPLY and command.holds):
            raise RuntimeError(f"{command.name} cannot be sent behind a {waiting.command.name} that waits")
        data = command.prefix + command.request.encode(fields)
        if command.reply is NO_REPLY:
            return data, None
        count = len(fields[0]) if fields and isinstance(fields[0], list) else 0
        call = PendingCall(command, count, self.written, fields)
        if command.reply is BLOBS and not count:  # the one reply that has no bytes
            call.result = []
            call.done = True
        return data, call

    def fence(self, nonce: int) -> tuple[bytes, PendingCall]:
        """A PING, or a look for no key: when it is answered, every write sent before it has been executed."""
        data, call = self.prepare_fence(nonce)
        self.pending.append(call)
        return data, call

    def prepare_fence(self, nonce: int) -> tuple[bytes, PendingCall]:
        """The same, of which the session takes no note yet."""
        data, call = self.prepare(_PING, (nonce,)) if self._pings else self.prepare(_CHECK, ([],))
        assert call is not None
        return data, call

    def cancel(self, call: PendingCall) -> bytes:
        """What ends the wait of a call that waits. It is done once the server has answered that."""
        data = self.prepare_cancel(call)
        call.canceled = True
        return data

    def prepare_cancel(self, call: PendingCall) -> bytes:
        """The same, of which the session takes no note yet: whoever sends it sets `canceled`."""
        if call is not self.waiting or call.canceled:
            raise RuntimeError("only a call that waits can be canceled, once")
        if call.command is _LEASE_LATER:
            return self.prepare(_GIVE_BACK, (call.fields[1],))[0]
        return bytes([(_CANCEL_FETCH if call.command.reply is DEFERRED_VALUE else _CANCEL_WAIT).opcode])

    def unconfirmed(self) -> bool:
        """Whether silent writes may not have been executed yet."""
        return self.confirmed < self.written

    # In

    def receive(self, chunk: bytes) -> list[PendingCall]:
        """Take bytes in; the calls they complete, in order. Raises ProtocolError for what cannot be a reply."""
        data = chunk
        if self._kept is not None:
            self._kept += chunk
            if len(self._kept) < self._need:
                return []
            data = bytes(self._kept)
            self._kept = None
        done: list[PendingCall] = []
        at = 0
        end = len(data)
        while at < end:
            if not self.pending:
                raise ProtocolError(f"the server sent {end - at} bytes that nobody asked for")
            call = self.pending[0]
            stop = self._answer(call, data, at, end)
            if stop < 0:
                at = at if self._rest is None else self._rest.at
                self._need = -stop - at
                self._kept = bytearray(memoryview(data)[at:])
                break
            at = stop
            if call.done:
                self._complete(call)
                done.append(call)
        return done

    def _answer(self, call: PendingCall, data: bytes, at: int, end: int) -> int:
        """Decode the reply of a call, or part of it; where that stops, or minus the length that is needed."""
        if call.canceled and call.command.reply is DEFERRED_VALUE:
            return self._answer_canceled_fetch(call, data, at, end)
        if call.canceled and call.command is not _LEASE_LATER:  # that has one answer, come what may
            return self._answer_canceled(call, data[at], at)
        if self._rest is None:
            result, stop = call.command.reply.decode(data, at, end, call.count)
        else:
            result, stop = self._rest.decode(data, at, end)
        if stop < 0:
            self._rest = result
            return stop
        self._rest = None
        call.result = result
        call.done = True
        return stop

    def _answer_canceled(self, call: PendingCall, byte: int, at: int) -> int:
        """Either the answer to the cancel, or the wake that was on its way before it."""
        if byte == WAIT_CANCELED:
            call.done = True
        elif byte == STOP_WAITING and not call.woken:
            call.woken = True
        else:
            raise ProtocolError("wait_canceled response is expected")
        return at + 1

    def _answer_canceled_fetch(self, call: PendingCall, data: bytes, at: int, end: int) -> int:
        stop = at + PREFIX
        if stop > end:
            return -stop
        if data[at:stop] == NO_BLOB:
            call.done = True
        elif call.woken:
            raise ProtocolError("the answer to a canceled FETCH is expected")
        else:
            _, stop = call.command.reply.decode(data, at, end, 1)
            call.woken = stop > 0
        return stop

    def _complete(self, call: PendingCall) -> None:
        self.pending.popleft()
        self.confirmed = call.written

    # Interrupted

    def save(self) -> "Saved":
        """What `receive` changes, to be put back should an interrupt strike in the midst of it."""
        return Saved(self, self._kept, self._need, self._rest)

    def restore(self, saved: "Saved") -> None:
        """As if nothing had been received since: the same bytes may be received again."""
        for call in saved.pending:
            call.done = False
        if saved.pending:
            saved.pending[-1].woken = saved.woken
        self.pending.clear()
        self.pending.extend(saved.pending)
        self.confirmed = saved.confirmed
        self._kept = saved.kept
        if self._kept is not None:
            del self._kept[saved.length :]
        self._need = saved.need
        self._rest = saved.rest
        if self._rest is not None:
            del self._rest.items[saved.items :]
            self._rest.at = saved.at


class Saved:
    """What a session was before it received something."""

    def __init__(self, session: ClientSession, kept: bytearray | None, need: int, rest: PartialReply | None) -> None:
        self.pending: list[PendingCall] = list(session.pending)
        self.woken: bool = bool(self.pending) and self.pending[-1].woken
        self.confirmed = session.confirmed
        self.kept = kept
        self.length = 0 if kept is None else len(kept)
        self.need = need
        self.rest = rest
        self.items = 0 if rest is None else len(rest.items)
        self.at = 0 if rest is None else rest.at
