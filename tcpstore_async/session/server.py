"""The server's side of a connection: bytes in, meaning done, bytes out.

Knows: one engine for each server, one session for each connection, and what is known of its peer. Must not know: how
bytes travel, what time it is.
Invariants: however bytes are cut into chunks, what is done and answered is the same. A command is executed once, when
it is complete. Whatever arrives, a session answers or raises PeerError; after that it is to be left and dropped.
"""

from collections import OrderedDict
from sys import getsizeof
from typing import Final

from ..errors import BudgetError, LimitError, ProtocolError
from ..incremental import IncrementalCommand, KeyListing, ListKeys, ReplyInPieces, Value
from ..keyspace import Keyspace
from ..limits import Limits
from ..values import Framed, length, pack, unpack
from ..wire.codecs import COUNTED_KEYS, STOP_WAITING, Handler, LargeValue, PartialRequest, RequestCodec, encode_popped
from ..wire.commands import BY_OPCODE, JOINS_KEY, MAGIC, SERVER_KEY, WORKERS_KEY, Command, Flag
from .budget import SESSION_BYTES, Budget, Holder, Unsent

NO_PID: Final = -1

_WOKEN: Final = bytes([STOP_WAITING])

_KEPT_BYTES: Final = 64
"""What holds bytes that are not decoded yet."""

PORTION: Final = 1000
"""Keys, or waiters, of a command that are dealt with in one turn: half a millisecond at most, compiled."""

_MOST_SAID: Final = 2048
"""Bytes that a peer may say of itself: names and framed values, so that their number has a limit too."""

_LONGEST_PID: Final = 20
"""Digits of a process id, at the most."""

_LONGEST_TOKEN: Final = 8 + 64
"""Bytes of the token of a rank that joins, framed."""

Introduction = dict[str, str]

_NO_INTRODUCTION: Final[Introduction] = {}
"""Shared by all sessions that have not sent INTRODUCE; never changed."""


class _Slot:
    """A row of the table as an engine serves it: its shapes, and the method that gives it its meaning."""

    def __init__(self, command: Command, call: Handler) -> None:
        self.command = command
        self.request: RequestCodec = command.request
        self.call = call
        self.encode = command.reply.encode if command.reply.measure is None else None
        self.in_pieces = command.reply.in_pieces or command.reply.measure is not None


class Engine:
    """One server: its keyspace, its limits, and the sessions that have something to send."""

    def __init__(self, limits: Limits, portion: int = PORTION, session_bytes: int = SESSION_BYTES) -> None:
        self.limits = limits
        self.keyspace = Keyspace(limits, portion)
        self.budget = Budget(limits.budget_bytes, self.keyspace, lambda: self.serving)
        self.session_bytes = session_bytes
        """What one connection of the server takes."""
        self.pending_flush: list[ServerSession] = []
        """Sessions that another session's command gave bytes, or evicted; the server flushes or closes them."""
        self.evicted: dict[ServerSession, BudgetError] = {}
        """Those whose connections are to be closed, and why."""
        self.unvalidated: OrderedDict[ServerSession, None] = OrderedDict()
        """Those that have not sent VALIDATE, oldest first."""
        self.listing: KeyListing | None = None
        """The list of keys that is being put together."""
        self.joins: int = 0
        """How many ranks the owner of this server expects to join, if it has one."""
        self.unfinished: int = 0
        """Bytes kept of requests that are not complete, of all sessions."""
        self.handshake: list[_Slot | None] = [None] * 256
        self.commands: list[_Slot | None] = [None] * 256
        self.first: _Slot
        self.serving: ServerSession | None = None
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

    def oldest_unvalidated(self) -> "ServerSession | None":
        """The session that has been without VALIDATE for longest."""
        return next(iter(self.unvalidated), None)

    def overdue(self, now: float) -> "ServerSession | None":
        """Who should have sent VALIDATE by now; the time is of the server's clock."""
        oldest = self.oldest_unvalidated()
        most = self.limits.validate_seconds
        return oldest if oldest is not None and most and now - oldest.connected_at >= most else None

    def _meaning(self, command: Command) -> Handler:
        """What does a command, given its fields."""
        owner: object = ServerSession if command.flags & Flag.SESSION else self.keyspace
        method: Handler = getattr(owner, command.method)
        if command.flags & (Flag.SESSION | Flag.PARKS | Flag.HOLDS):
            return self._with_session(method, command.request.arity)
        return method if command.reply.measure is None else self._list_keys

    def _with_session(self, method: Handler, arity: int) -> Handler:
        """A method that is also given the session. Not for any number of fields at once, which costs 0.1 µs a call."""
        if arity == 0:
            return lambda: method(self.serving)
        if arity == 1:
            return lambda field: method(self.serving, field)
        return lambda first, second: method(self.serving, first, second)

    def _list_keys(self) -> list[Framed]:
        """The reply to LIST_KEYS: one copy for all who ask while the keys are the same."""
        names = self.budget.listing()
        if names is not None:
            return names.pieces
        keyspace = self.keyspace
        serving = self.serving
        assert serving is not None
        names = self.listing
        size = 0
        if names is None or names.changes != keyspace.changes:
            keys = keyspace.list_keys()
            assert COUNTED_KEYS.measure is not None
            size = COUNTED_KEYS.measure(keys)
            self.budget.expect_listing(size, serving)
            names = KeyListing(keys, size, keyspace.changes)
            if len(keys) <= keyspace.portion:
                names.step(len(keys))
                self._keep_listing(names)
                return names.pieces
            self.listing = names
        keyspace.job = ListKeys(names, self._keep_listing)
        keyspace.job.held = size
        return []

    def _keep_listing(self, names: KeyListing) -> None:
        """A list is complete."""
        if self.listing is names:
            self.listing = None
        self.budget.keep_listing(names)


class ServerSession(Holder):
    """One connection, and what is known of its peer."""

    def __init__(self, engine: Engine, owner: object, host: str, port: int, came: float) -> None:
        super().__init__()
        self.engine = engine
        self.owner: object = owner
        """The door's connection; None once it is gone."""
        self.host = host
        self.port = port
        self.connected_at = came
        """When it came, in seconds of the door's clock."""
        self.pid: int = NO_PID
        """Its process: what it says when it introduces itself, else the number of its first PING, which PyTorch's
        client, and ours, send in the handshake."""
        self.table: list[_Slot | None] = engine.handshake
        self.out: list[Framed] = []
        """Replies for the door to take, in order."""
        self.unsent: int = 0
        """Bytes of replies, `out` included, that the kernel has not taken yet."""
        self.rest: PartialRequest | None = None
        """What goes on with a frame that was decoded in part."""
        self.peer: Introduction = _NO_INTRODUCTION
        """What the peer has said of itself, in its own words."""
        self.slot: _Slot = engine.first
        """Its last command, the one that `rest` is for included. What it waits for is `parked`, or `counter`."""
        self.job: IncrementalCommand | None = None
        """What its last command has left to do; `receive(b"")` goes on with it."""
        self.input_buffer: bytearray | None = None
        """Bytes not decoded yet."""
        self.need: int = 0
        """The length that `kept` must have before decoding can go on; 0 if it waits for its turn, or the peer."""
        engine.unvalidated[self] = None
        engine.budget.enter(self, engine.session_bytes)
        self._relieve()

    def __str__(self) -> str:
        address = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        known = {} if self.pid == NO_PID else {"pid": str(self.pid)}
        known.update(self.peer)
        return f"{address} ({', '.join(f'{name} {text}' for name, text in known.items())})" if known else address

    # In

    def receive(self, chunk: bytes) -> None:
        """Take bytes in, execute what is complete, put the replies into `out`.

        Stops while more than `Limits.unsent_high_water` bytes of replies are unsent, and after each portion of a long
        command; see `stalled`. Raises PeerError.
        """
        kept = self.input_buffer
        if kept is not None:
            kept += chunk
            if len(kept) < self.need:
                self._account()
                return
            chunk = bytes(kept)
            self.input_buffer = None
        engine = self.engine
        keyspace = engine.keyspace
        budget = engine.budget
        if keyspace.size != budget.seen:
            budget.attribute()
        engine.serving = self
        limits = engine.limits
        high_water = limits.unsent_high_water
        out = self.out
        end = len(chunk)
        at = held = 0
        if keyspace.working:
            keyspace.resolve(self)
        if self.job is not None and not self._go_on():
            self._keep_for_job(chunk, 0)
            return
        if self.unsent > high_water:
            self._stall(chunk, 0)
            return
        while at < end or self.rest is not None:
            handoff = self.handoff
            rest = self.rest
            if rest is None:
                slot = self.table[chunk[at]]
                if slot is None:
                    raise ProtocolError(self._refusal(chunk[at]))
                self.slot = slot
                result, stop = slot.request.decode(slot.call, chunk, at + 1, end, limits)
            else:
                slot = self.slot
                held = self.held
                if held:
                    self._count_held(0)  # what it holds may be in the store when this is done
                result, stop = rest.decode(slot.call, chunk, at, end, limits)
                self.rest = None
            if stop < 0:
                self._suspend(result, chunk, at, -stop)
                return
            at = stop
            if keyspace.working:  # it may have woken itself
                keyspace.resolve(self)
            if keyspace.job is not None:
                self._take_job(at if rest is None else max(held, at))
                if handoff is not None:
                    keyspace.settle(self, handoff)
                if not isinstance(self.job, ReplyInPieces) or not self._go_on():
                    self._keep_for_job(chunk, at)
                    return
                if self.unsent > high_water:
                    self._stall(chunk, at)
                    return
                continue
            if slot.encode is not None:
                result = slot.encode(result)
            if result:
                if slot.in_pieces:
                    size = length(result)
                    self.check_room(size)
                    out.extend(result)
                    self.unsent += size
                else:
                    out.append(result)
                    self.unsent += len(result)
            if handoff is not None:
                engine.keyspace.settle(self, handoff)
            if self.unsent > high_water:
                self._stall(chunk, at)
                return
        if self.held:
            self._account()

    def bulk(self) -> LargeValue | None:
        """The large value under way: the door may fill its `room`, and then call `receive(b"")`, instead of reading."""
        rest = self.rest
        return rest if isinstance(rest, LargeValue) and self.input_buffer is None else None

    def stalled(self) -> bool:
        """Whether requests are kept back until the peer reads its replies; `receive(b"")` goes on with them.

        So it does, whatever is unsent, if there is a `job`.
        """
        return self.input_buffer is not None and self.need == 0

    def leave(self) -> None:
        """The connection is gone. Waiters that this wakes are in `Engine.dirty`."""
        self.engine.keyspace.leave(self)
        self._let_go()
        if self.engine.evicted:
            self.engine.evicted.pop(self, None)
        self.owner = None

    def evict(self, error: BudgetError) -> None:
        self.engine.evicted[self] = error
        self._let_go()
        self.engine.pending_flush.append(self)

    def leave_behind(self, replies: list[Framed], taken: int) -> None:
        """Keep replies of which the kernel has taken the first `taken` bytes, behind those that are kept already."""
        if self in self.engine.evicted:
            return
        if self.backlog is None:
            self.backlog = Unsent(self.engine.budget)
        self.backlog.add(replies, taken)
        self._relieve()

    def _let_go(self) -> None:
        engine = self.engine
        if engine.unvalidated:
            engine.unvalidated.pop(self, None)
        engine.unfinished -= self.held
        engine.budget.forget(self, engine.session_bytes)
        self.rest = None
        self.input_buffer = None
        self.out.clear()
        if self.job is not None:
            self.job.abandon()
            self.job = None

    def _relieve(self) -> None:
        """It has been given something to hold: somebody may have to go for that."""
        try:
            self.engine.budget.relieve(self)
        except BudgetError as error:
            self.evict(error)

    def _take_job(self, size: int) -> None:
        """What was just decoded, and took so many bytes, has a job to do."""
        keyspace = self.engine.keyspace
        job = keyspace.job
        keyspace.job = None
        self.job = job
        if job is not None and job.keeps:
            job.held = size

    def _keep_for_job(self, chunk: bytes, at: int) -> None:
        """The last command is not done: what was sent behind it waits."""
        self.need = 0
        self.input_buffer = bytearray(memoryview(chunk)[at:])
        self._account()

    def _go_on(self) -> bool:
        """Do the next portion of the last command, and say its result if that was all."""
        job = self.job
        assert job is not None
        keyspace = self.engine.keyspace
        done = job.step(keyspace.portion)
        if job.parts:
            self.out.extend(job.parts)
            self.unsent += length(job.parts)
            job.parts = []
        if not done:
            return False
        if keyspace.job is not None:
            self._take_job(0)
            return False
        self.job = None
        slot = self.slot
        result = job.result
        if slot.encode is not None and not isinstance(result, list):
            result = slot.encode(result)
        if isinstance(result, list):
            size = length(result)
            self.check_room(size)
            self.out.extend(result)
            self.unsent += size
        elif result:
            self.out.append(result)
            self.unsent += len(result)
        self.out.extend(job.said)
        self.unsent += length(job.said)
        return True

    def _stall(self, chunk: bytes, at: int) -> None:
        """The peer is behind with reading: its further requests wait."""
        self._keep(chunk, at, 0)

    def check_room(self, size: int) -> None:
        """Raise LimitError for a reply of so many bytes that no budget allows for it."""
        most = self.engine.limits.budget_bytes
        if size > most:
            raise LimitError("budget_bytes", size, most)

    def _suspend(self, rest: PartialRequest | None, chunk: bytes, at: int, need: int) -> None:
        """A frame is not complete: keep what is needed to go on."""
        if rest is not None:
            self.rest = rest
            at = rest.at
        self._keep(chunk, at, need - at)

    def _keep(self, chunk: bytes, at: int, need: int) -> None:
        self.need = need
        if at < len(chunk):
            self.input_buffer = bytearray(memoryview(chunk)[at:])
        self._account()

    def _account(self) -> None:
        """Count what is held for unfinished requests. Raises LimitError."""
        held = 0 if self.input_buffer is None else _KEPT_BYTES + len(self.input_buffer)
        if self.rest is not None:
            held += self.rest.held()
        if self.job is not None:
            held += self.job.held
        if held != self.held:
            self._count_held(held)
            self.engine.budget.relieve(self)

    def _count_held(self, held: int) -> None:
        engine = self.engine
        growth = held - self.held
        self.held = held
        engine.unfinished += growth
        engine.budget.charge(growth)

    def _refusal(self, opcode: int) -> str:
        if self.table is self.engine.handshake:
            return f"the first frame is not VALIDATE but opcode {opcode}"
        return f"opcode {opcode} is unknown"

    # Commands that concern the connection

    def validate(self, magic: int) -> None:
        if magic != MAGIC:
            raise ProtocolError(f"VALIDATE carries {magic:#x}, not {MAGIC:#x}")
        self.table = self.engine.commands
        self.engine.unvalidated.pop(self, None)

    def ping(self, nonce: int) -> int:
        if self.pid == NO_PID:
            self.pid = nonce
        return nonce

    def introduce(self, items: list[tuple[bytes, Framed]]) -> None:
        """Keep what the peer says of itself, for logs. Raises ProtocolError if that is no short text."""
        if len(items) > _MOST_SAID or sum(len(name) + len(blob) for name, blob in items) > _MOST_SAID:
            raise ProtocolError(f"it introduces itself with more than {_MOST_SAID} bytes")
        before = self.introduction()
        self.peer = {_readable(name): _readable(unpack(blob)) for name, blob in items}
        pid = self.peer.get("pid", "")
        if pid.isdecimal() and len(pid) < _LONGEST_PID:
            self.pid = int(pid)
        self.engine.budget.charge(self.introduction() - before)
        self.engine.budget.relieve(self)

    def introduction(self) -> int:
        peer = self.peer
        if not peer:
            return 0
        return getsizeof(peer) + sum(getsizeof(name) + getsizeof(text) for name, text in peer.items())

    def join(self, key: bytes, token: Framed) -> int:
        """Raises ProtocolError for a token that is too long to be one, or if the value is no number."""
        if len(token) > _LONGEST_TOKEN:
            raise ProtocolError(f"a token of {len(token)} bytes")
        return self.engine.keyspace.join(self, key, unpack(token))

    # Out

    def fire(self, value: Value | None) -> None:
        """Say it, whatever is unsent: a peer has one value at most to come, which others' commands must not refuse."""
        if self.job is not None and self.job.settled:
            self.job.said.extend([_WOKEN] if value is None else value if isinstance(value, list) else [value])
            return
        if value is None:
            self.out.append(_WOKEN)
            self.unsent += 1
        elif isinstance(value, list):
            self.out.extend(value)
            self.unsent += length(value)
        else:
            self.out.append(value)
            self.unsent += len(value)
        self.engine.pending_flush.append(self)

    def grant(self, length: int, item: Framed | None) -> None:
        """The same for an item."""
        pieces = encode_popped((length, item))
        if self.job is not None and self.job.settled:
            self.job.said.extend(pieces)
            return
        self.out.extend(pieces)
        self.unsent += sum(map(len, pieces))
        self.engine.pending_flush.append(self)


def latecomers(sessions: list[ServerSession], complete: float) -> list[ServerSession]:
    """Those that came after the world was complete: they belong to a next round.

    A peer that was there before, by host and process, keeps its later connections too.
    """
    early = {(one.host, one.pid) for one in sessions if one.connected_at <= complete and one.pid != NO_PID}
    return [one for one in sessions if one.connected_at > complete and (one.host, one.pid) not in early]


def _readable(raw: bytes) -> str:
    """Text that cannot break a line of the log."""
    text = raw.decode(errors="replace")
    return text if text.isprintable() else repr(text)[1:-1]
