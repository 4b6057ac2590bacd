"""The server's side of a connection: bytes in, meaning done, bytes out.

Knows: one engine for each server, one session for each connection, and what is known of its peer. Must not know: how
bytes travel, what time it is.
Invariants: however bytes are cut into chunks, what is done and answered is the same. A command is executed once, when
it is complete. Whatever arrives, a session answers or raises PeerError; after that it is to be left and dropped.
"""

from collections.abc import Callable
from typing import Any, Final

from ..blob import Framed, length, pack, unpack
from ..errors import LimitError, ProtocolError
from ..keyspace import Keyspace, Waiter
from ..limits import Limits
from ..wire.commands import BY_OPCODE, JOINS_KEY, MAGIC, SERVER_KEY, WORKERS_KEY, Command, Flag
from ..wire.shapes import STOP_WAITING, Bulk, Call, Request, Rest, encode_popped

NO_PID: Final = -1

_WOKEN: Final = bytes([STOP_WAITING])

_MOST_SAID: Final = 2048
"""Bytes that a peer may say of itself: names and framed values, so that their number has a limit too."""

_LONGEST_PID: Final = 20
"""Digits of a process id, at the most."""

_LONGEST_TOKEN: Final = 8 + 64
"""Bytes of the token of a rank that joins, framed."""

Introduction = dict[str, str]


class _Slot:
    """A row of the table as an engine serves it: its shapes, and the method that gives it its meaning."""

    def __init__(self, command: Command, call: Call) -> None:
        self.command = command
        self.request: Request = command.request
        self.call = call
        self.encode = command.reply.encode
        self.in_pieces = command.reply.in_pieces


class Engine:
    """One server: its keyspace, its limits, and the sessions that have something to send."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.keyspace = Keyspace(limits)
        self.dirty: list[ServerSession] = []
        """Sessions that were given bytes by another session's command; the door flushes them."""
        self.joins: int = 0
        """How many ranks the owner of this server expects to join, if it has one."""
        self.unfinished: int = 0
        """Bytes counted against `Limits.unfinished_bytes`."""
        self.handshake: list[_Slot | None] = [None] * 256
        self.commands: list[_Slot | None] = [None] * 256
        self.first: _Slot
        self.serving: ServerSession
        """The session whose command is being done."""
        for command in filter(None, BY_OPCODE):
            slot = _Slot(command, self._meaning(command))
            if command.flags & Flag.HANDSHAKE:
                self.handshake[command.opcode] = self.first = slot
            else:
                self.commands[command.opcode] = slot

    def identify(self, identity: bytes) -> None:
        """Say who this server is to those who ask; see `extension`."""
        self.keyspace.reserved[SERVER_KEY] = pack(identity)

    def announce(self, joins: int) -> None:
        """Say how many ranks the owner of this server expects to join, in all stores it has made on it.

        0 once the server is about to go. Those whom this wakes are in `dirty`.
        """
        self.joins = joins
        self.keyspace.reserve(JOINS_KEY, pack(b"%d" % joins), last=not joins)

    def all_joined(self) -> bool:
        """Whether as many ranks have joined as were announced."""
        joined = self.keyspace.values.get(WORKERS_KEY)
        return (joined if isinstance(joined, int) else 0) >= self.joins

    def _meaning(self, command: Command) -> Call:
        """What does a command, given its fields."""
        owner: object = ServerSession if command.flags & Flag.SESSION else self.keyspace
        method: Call = getattr(owner, command.method)
        if command.flags & (Flag.SESSION | Flag.PARKS | Flag.HOLDS):
            return self._with_session(method, command.request.arity)
        measure = command.reply.measure
        if measure is None:
            return method
        return lambda *fields: self._measured(measure, method(*fields))

    def _with_session(self, method: Call, arity: int) -> Call:
        """A method that is also given the session. Not for any number of fields at once, which costs 0.1 µs a call."""
        if arity == 0:
            return lambda: method(self.serving)
        if arity == 1:
            return lambda field: method(self.serving, field)
        return lambda first, second: method(self.serving, first, second)

    def _measured(self, measure: Callable[[Any], int], result: Any) -> Any:
        """A result, if the reply that will be built from it may be sent."""
        self.serving.check_room(measure(result))
        return result


class ServerSession(Waiter):
    """One connection, and what is known of its peer."""

    def __init__(self, engine: Engine, owner: object, host: str, port: int, came: float) -> None:
        super().__init__()
        self.engine = engine
        self.owner: object = owner
        """The door's connection; None once it is gone."""
        self.host = host
        self.port = port
        self.came = came
        """When it came, in seconds of the door's clock."""
        self.pid: int = NO_PID
        """Its process: what it says when it introduces itself, else the number of its first PING, which PyTorch's
        client, and ours, send in the handshake."""
        self.table: list[_Slot | None] = engine.handshake
        self.out: list[Framed] = []
        """Replies for the door to take, in order."""
        self.unread: int = 0
        """Bytes of replies, `out` included, that the door has not handed to the kernel yet."""
        self.rest: Rest | None = None
        """What goes on with a frame that was decoded in part."""
        self.peer: Introduction = {}
        """What the peer has said of itself, in its own words."""
        self.slot: _Slot = engine.first
        """Its last command, the one that `rest` is for included. What it waits for is `parked`, or `counter`."""
        self.kept: bytearray | None = None
        """Bytes not decoded yet."""
        self.need: int = 0
        """The length that `kept` must have before decoding can go on; 0 if it waits for the peer to read."""
        self.held: int = 0
        """This session's part of `Engine.unfinished`."""

    def __str__(self) -> str:
        address = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        known = {} if self.pid == NO_PID else {"pid": str(self.pid)}
        known.update(self.peer)
        return f"{address} ({', '.join(f'{name} {text}' for name, text in known.items())})" if known else address

    # In

    def receive(self, chunk: bytes) -> None:
        """Take bytes in, execute what is complete, put the replies into `out`.

        Stops while more than `Limits.unread_soft_bytes` of replies are unread; see `stalled`. Raises PeerError.
        """
        kept = self.kept
        if kept is not None:
            kept += chunk
            if len(kept) < self.need:
                self._account()
                return
            chunk = bytes(kept)
            self.kept = None
        engine = self.engine
        engine.serving = self
        limits = engine.limits
        soft = limits.unread_soft_bytes
        out = self.out
        end = len(chunk)
        at = 0
        if self.unread > soft:
            self._stall(chunk, 0)
            return
        while at < end or self.rest is not None:
            promise = self.promise
            rest = self.rest
            if rest is None:
                slot = self.table[chunk[at]]
                if slot is None:
                    raise ProtocolError(self._refusal(chunk[at]))
                self.slot = slot
                result, stop = slot.request.decode(slot.call, chunk, at + 1, end, limits)
            else:
                slot = self.slot
                result, stop = rest.decode(slot.call, chunk, at, end, limits)
                self.rest = None
            if stop < 0:
                self._suspend(result, chunk, at, -stop)
                return
            at = stop
            if slot.encode is not None:
                result = slot.encode(result)
            if result:
                if slot.in_pieces:
                    size = length(result)
                    self.check_room(size)
                    out.extend(result)
                    self.unread += size
                else:
                    out.append(result)
                    self.unread += len(result)
            if promise is not None:
                engine.keyspace.settle(self, promise)
            if self.unread > soft:
                self._stall(chunk, at)
                return
        if self.held:
            self._account()

    def bulk(self) -> Bulk | None:
        """The large value under way: the door may fill its `room`, and then call `receive(b"")`, instead of reading."""
        rest = self.rest
        return rest if isinstance(rest, Bulk) and self.kept is None else None

    def stalled(self) -> bool:
        """Whether requests are kept back until the peer reads its replies; `receive(b"")` goes on with them."""
        return self.kept is not None and self.need == 0

    def leave(self) -> None:
        """The connection is gone. Waiters that this wakes are in `Engine.dirty`."""
        self.engine.keyspace.leave(self)
        self.engine.unfinished -= self.held
        self.held = 0
        self.rest = None
        self.kept = None
        self.out.clear()
        self.owner = None

    def _stall(self, chunk: bytes, at: int) -> None:
        """The peer is behind with reading: its further requests wait, or it goes, without what was too much."""
        if self.unread > self.engine.limits.unread_hard_bytes and self.out:
            size = len(self.out.pop())
            self.unread -= size
            self.check_room(size)
        self._keep(chunk, at, 0)

    def check_room(self, size: int) -> None:
        """Raise LimitError if a reply of `size` bytes would make the unread ones too many."""
        hard = self.engine.limits.unread_hard_bytes
        if self.unread + size > hard:
            raise LimitError("unread_hard_bytes", self.unread + size, hard)

    def _suspend(self, rest: Rest | None, chunk: bytes, at: int, need: int) -> None:
        """A frame is not complete: keep what is needed to go on."""
        if rest is not None:
            self.rest = rest
            at = rest.at
        self._keep(chunk, at, need - at)

    def _keep(self, chunk: bytes, at: int, need: int) -> None:
        self.need = need
        if at < len(chunk):
            self.kept = bytearray(memoryview(chunk)[at:])
        self._account()

    def _account(self) -> None:
        """Count what is held for unfinished requests. Raises LimitError."""
        held = 0 if self.kept is None else len(self.kept)
        if self.rest is not None:
            held += self.rest.held()
        engine = self.engine
        engine.unfinished += held - self.held
        self.held = held
        if engine.unfinished > engine.limits.unfinished_bytes:
            raise LimitError("unfinished_bytes", engine.unfinished, engine.limits.unfinished_bytes)

    def _refusal(self, opcode: int) -> str:
        if self.table is self.engine.handshake:
            return f"the first frame is not VALIDATE but opcode {opcode}"
        return f"opcode {opcode} is unknown"

    # Commands that concern the connection

    def validate(self, magic: int) -> None:
        if magic != MAGIC:
            raise ProtocolError(f"VALIDATE carries {magic:#x}, not {MAGIC:#x}")
        self.table = self.engine.commands

    def ping(self, nonce: int) -> int:
        if self.pid == NO_PID:
            self.pid = nonce
        return nonce

    def introduce(self, items: list[tuple[bytes, Framed]]) -> None:
        """Keep what the peer says of itself, for logs. Raises ProtocolError if that is no short text."""
        if sum(len(name) + len(blob) for name, blob in items) > _MOST_SAID:
            raise ProtocolError(f"it introduces itself with more than {_MOST_SAID} bytes")
        self.peer = {_readable(name): _readable(unpack(blob)) for name, blob in items}
        pid = self.peer.get("pid", "")
        if pid.isdecimal() and len(pid) < _LONGEST_PID:
            self.pid = int(pid)

    def join(self, key: bytes, token: Framed) -> int:
        """Raises ProtocolError for a token that is too long to be one, or if the value is no number."""
        if len(token) > _LONGEST_TOKEN:
            raise ProtocolError(f"a token of {len(token)} bytes")
        return self.engine.keyspace.join(self, key, unpack(token))

    # Out

    def fire(self, value: Framed | None) -> None:
        """Say it, whatever is unread: a peer has one value at most to come, which others' commands must not refuse."""
        if value is None:
            value = _WOKEN
        self.out.append(value)
        self.unread += len(value)
        self.engine.dirty.append(self)

    def grant(self, length: int, item: Framed | None) -> None:
        """The same for an item."""
        pieces = encode_popped((length, item))
        self.out.extend(pieces)
        self.unread += sum(map(len, pieces))
        self.engine.dirty.append(self)


def newcomers(sessions: list[ServerSession], complete: float) -> list[ServerSession]:
    """Those that came after the world was complete: they belong to a next round.

    A peer that was there before, by host and process, keeps its later connections too.
    """
    early = {(one.host, one.pid) for one in sessions if one.came <= complete and one.pid != NO_PID}
    return [one for one in sessions if one.came > complete and (one.host, one.pid) not in early]


def _readable(raw: bytes) -> str:
    """Text that cannot break a line of the log."""
    text = raw.decode(errors="replace")
    return text if text.isprintable() else repr(text)[1:-1]
