"""The server's side of a connection, without I/O: bytes in, commands executed, replies out.

There is one `Engine` for each server and one `ServerSession` for each connection. Neither knows how bytes travel or
what time it is.

Invariants: commands and replies do not depend on how bytes are cut into chunks. A command is executed once, when it is
complete. Whatever arrives, a session replies or raises PeerError; after an error, call `leave` and drop it.
"""

from collections import OrderedDict
from collections.abc import Callable
from sys import getsizeof
from typing import TYPE_CHECKING, Final

from ..errors import BudgetError, LimitError, PeerError, ProtocolError
from ..incremental import IncrementalCommand, KeyListing, ListKeys, ReplyInPieces, Value
from ..keyspace import Keyspace
from ..limits import Limits
from ..mypyc_shim import mypyc_attr
from ..values import PREFIX, Framed, length, pack, unpack
from ..wire.codecs import (
    COUNTED_KEYS,
    KEYS,
    STOP_WAITING,
    Handler,
    LargeValue,
    PartialRequest,
    RequestCodec,
    encode_popped,
)
from ..wire.commands import BY_OPCODE, JOINS_KEY, MAGIC, SERVER_KEY, WORKERS_KEY, Command, Flag
from .budget import SESSION_BYTES, Budget, Holder
from .key_list_cache import KeyListCache, SharedKeys
from .unsent import Unsent

if TYPE_CHECKING:
    from .single_link import SingleLink

NO_PID: Final = -1

_WOKEN: Final = bytes([STOP_WAITING])

_BUFFER_BYTES: Final = 64
"""Bytes counted for an input buffer, besides its contents."""

PORTION: Final = 1000
"""Keys, or waiters, of a command that are handled in one step: half a millisecond at most, compiled."""

_MAX_INTRODUCTION: Final = 2048
"""Bytes of an INTRODUCE: names and framed values, which limits the number of items too."""

_MAX_PID_DIGITS: Final = 19

_MAX_TOKEN: Final = PREFIX + 64
"""Bytes of the token of a rank that joins, framed."""

Introduction = dict[str, str]

_NO_INTRODUCTION: Final[Introduction] = {}
"""Shared by all sessions that have not sent INTRODUCE; never changed."""


class _Slot:
    """A row of the command table as an engine serves it: its codecs and the method that executes it."""

    def __init__(self, command: Command, call: Handler) -> None:
        self.command = command
        self.request: RequestCodec = command.request
        self.call = call
        self.encode = command.reply.encode if command.reply.measure is None else None
        self.in_pieces = command.reply.in_pieces or command.reply.measure is not None


class Engine:
    """What the sessions of one server share: keyspace, limits, budget and command table."""

    def __init__(self, limits: Limits, portion: int = PORTION, session_bytes: int = SESSION_BYTES) -> None:
        self.limits = limits
        self.keyspace = Keyspace(limits, portion)
        self.budget = Budget(limits.budget_bytes, self.keyspace, lambda: self.serving)
        self.key_lists = KeyListCache(self.keyspace, self.budget, min(portion, PORTION))
        self.session_bytes = session_bytes
        """Bytes counted for one connection of this kind of server."""
        self.pending_flush: list[ServerSession] = []
        """Sessions that another session's command gave output to, or evicted; the server flushes or closes them."""
        self.evicted: dict[ServerSession, PeerError] = {}
        """Sessions whose connections the server has to close, and why."""
        self.open_link: Callable[[ServerSession, list[tuple[bytes, Framed]]], bytes] | None = None
        """Executes LINK; None if this server has no links."""
        self.attaching: dict[ServerSession, SingleLink] = {}
        """Sessions that have sent LINK, and the single links for which their connections are used from its reply on."""
        self.unvalidated: OrderedDict[ServerSession, bool] = OrderedDict()
        """Sessions on connections of their own that have not sent VALIDATE, oldest first."""
        self.unvalidated_on_links: OrderedDict[ServerSession, bool] = OrderedDict()
        """The same for sessions on links."""
        self.listing: KeyListing | None = None
        """The reply to LIST_KEYS that is being made in steps."""
        self.joins: int = 0
        """How many ranks the owner of this server expects to join, if it has one."""
        self.over = False
        """Whether the owner expected ranks, and expects no more: the round is over."""
        self.unfinished: int = 0
        """Bytes held of incomplete requests, all sessions together."""
        self.handshake: list[_Slot | None] = [None] * 256
        self.commands: list[_Slot | None] = [None] * 256
        self.no_commands: list[_Slot | None] = [None] * 256
        """The table of an evicted session, which must not make the server hold anything any more."""
        self.first: _Slot
        self.serving: ServerSession | None = None
        """The session whose command is being executed."""
        for command in filter(None, BY_OPCODE):
            slot = _Slot(command, self._method(command, command.method))
            if command.request is KEYS:
                slot.request = SharedKeys(self.key_lists, self._method(command, command.method + "_shared"))
            if command.flags & Flag.HANDSHAKE:
                self.handshake[command.opcode] = self.first = slot
            else:
                self.commands[command.opcode] = slot

    def identify(self, identity: bytes) -> None:
        """Set the identity of this server, which clients of the extension read; see `session/identity.py`."""
        self.keyspace.reserved[SERVER_KEY] = pack(identity)

    def announce(self, joins: int) -> None:
        """Publish how many ranks the owner of this server expects to join, in all stores that it has made on it.

        0 means that the server is about to stop. Sessions that this wakes are in `pending_flush`.
        """
        self.over = not joins and (self.over or self.joins > 0)
        self.joins = joins
        self.keyspace.reserve(JOINS_KEY, pack(b"%d" % joins), last=not joins)

    def all_joined(self) -> bool:
        """Whether as many ranks have joined as were announced."""
        joined = self.keyspace.values.get(WORKERS_KEY)
        return (joined if isinstance(joined, int) else 0) >= self.joins

    def oldest_unvalidated(self) -> "ServerSession | None":
        """Return the session that has had a connection of its own for longest without sending VALIDATE."""
        return next(iter(self.unvalidated), None)

    def overdue(self, now: float) -> "ServerSession | None":
        """Return a session that has exceeded `Limits.validate_seconds`; `now` is a time of the server's clock."""
        oldest = self.oldest_unvalidated()
        most = self.limits.validate_seconds
        return oldest if oldest is not None and most and now - oldest.connected_at >= most else None

    def overdue_on_links(self, now: float) -> "list[ServerSession]":
        """Return the sessions on links that have exceeded it; the time without a connection does not count."""
        most = self.limits.validate_seconds
        found: list[ServerSession] = []
        for session in self.unvalidated_on_links if most else ():
            if now - session.connected_at < most:
                break
            owner = session.owner
            if isinstance(owner, Transport) and now - owner.awaited_since() >= most:
                found.append(session)
        return found

    def _method(self, command: Command, name: str) -> Handler:
        """Return the function that executes a command, given its fields, by the method of this name."""
        owner: object = ServerSession if command.flags & Flag.SESSION else self.keyspace
        method: Handler = getattr(owner, name)
        if command.flags & (Flag.SESSION | Flag.PARKS | Flag.HOLDS):
            return self._with_session(method, command.request.arity)
        return method if command.reply.measure is None else self._list_keys

    def _with_session(self, method: Handler, arity: int) -> Handler:
        """Bind the session as a method's first argument. (One lambda for any arity would cost 0.1 µs a call.)"""
        if arity == 0:
            return lambda: method(self.serving)
        if arity == 1:
            return lambda field: method(self.serving, field)
        if arity == 2:
            return lambda first, second: method(self.serving, first, second)
        return lambda *fields: method(self.serving, *fields)

    def _list_keys(self) -> list[Framed]:
        """Reply to LIST_KEYS: one copy for all clients that ask while the keys are the same."""
        listing = self.budget.listing()
        if listing is not None:
            return listing.pieces
        keyspace = self.keyspace
        serving = self.serving
        assert serving is not None
        listing = self.listing
        size = 0
        if listing is None or listing.changes != keyspace.changes:
            keys = keyspace.list_keys()
            assert COUNTED_KEYS.measure is not None
            size = COUNTED_KEYS.measure(keys)
            self.budget.expect_listing(size, serving)
            listing = KeyListing(keys, size, keyspace.changes)
            if len(keys) <= keyspace.portion:
                listing.step(len(keys))
                self._keep_listing(listing)
                return listing.pieces
            self.listing = listing
        keyspace.incremental = ListKeys(listing, self._keep_listing)
        keyspace.incremental.held = size
        return []

    def _keep_listing(self, listing: KeyListing) -> None:
        """Cache a complete listing."""
        if self.listing is listing:
            self.listing = None
        self.budget.keep_listing(listing)


@mypyc_attr(allow_interpreted_subclasses=True)
class Transport:
    """What moves a session's bytes, as far as sessions and servers know it."""

    def __init__(self, engine: Engine, host: str, port: int, connected_at: float) -> None:
        self.single: SingleLink | None = None
        """What keeps the session when the connection breaks."""
        self.session: ServerSession = ServerSession(engine, self, host, port, connected_at)

    def flush(self) -> None:
        """Send the session's replies, as far as its peer takes them."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connection and take back what its session was offered. Idempotent."""
        raise NotImplementedError

    def leave(self, broken: bool) -> None:
        """The connection has ended. If it is broken and there is a single link, that keeps the session."""
        link = self.single
        if link is not None and broken and not link.over:
            link.detach()
            return
        if link is not None:
            link.forget()
        self.session.leave()

    def send_again(self, replies: list[Framed], taken: int) -> None:
        """Send replies without their first `taken` bytes; they are counted as unsent, and nothing is ahead of them."""
        raise NotImplementedError

    def resumed(self) -> None:
        """Go on soon with what the session, which comes from another connection, has kept back."""
        raise NotImplementedError

    def pass_over(self, queue: bytes) -> bool:
        """See `Waiter.pass_over`."""
        return False

    def awaited_since(self) -> float:
        """Return since when the peer could send VALIDATE, in seconds of the server's clock; infinite if it cannot."""
        return self.session.connected_at

    def shares_connection(self) -> bool:
        """Return whether there are other sessions on the same connection, and closing this one leaves it open."""
        return False


class ServerSession(Holder):
    """One connection: its incomplete request, its replies, and what is known about its peer."""

    def __init__(self, engine: Engine, owner: object, host: str, port: int, connected_at: float) -> None:
        super().__init__()
        self.engine = engine
        self.owner: object = owner
        """Its `Transport`, on a server; None after `leave`."""
        self.host = host
        self.port = port
        self.connected_at = connected_at
        """In seconds of the server's clock."""
        self.pid: int = NO_PID
        """The peer's process: from its INTRODUCE, else the number of its first PING, which PyTorch's client and ours
        send in the handshake."""
        self.table: list[_Slot | None] = engine.handshake
        self.out: list[Framed] = []
        """Replies for the server to take, in order."""
        self.unsent: int = 0
        """Bytes of replies, `out` included, that the kernel has not accepted yet."""
        self.partial: PartialRequest | None = None
        """The request that has been decoded in part."""
        self.peer: Introduction = _NO_INTRODUCTION
        """The contents of the peer's INTRODUCE."""
        self.slot: _Slot = engine.first
        """The last command, incomplete ones included. What it awaits is in `parked` or `group`."""
        self.incremental: IncrementalCommand | None = None
        """The last command, if it is still running; `receive(b"")` goes on with it."""
        self.input_buffer: bytearray | None = None
        """Bytes that are not decoded yet."""
        self.need: int = 0
        """The length of `input_buffer` from which decoding can go on; 0 if it waits for something else."""
        (engine.unvalidated_on_links if self._shares_connection() else engine.unvalidated)[self] = True
        engine.budget.enter(self, self._base_bytes())
        self._relieve()

    def __str__(self) -> str:
        address = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        known = {} if self.pid == NO_PID else {"pid": str(self.pid)}
        known.update(self.peer)
        return f"{address} ({', '.join(f'{name} {text}' for name, text in known.items())})" if known else address

    # Input

    def receive(self, chunk: bytes) -> None:
        """Take bytes, execute the commands that are complete, and put their replies into `out`.

        Stops while more than `Limits.unsent_high_water` bytes of replies are unsent, and after each step of a long
        command; see `stalled`. Raises PeerError.
        """
        kept = self.input_buffer
        if kept is not None:
            if len(kept) + len(chunk) < self.need:
                kept += chunk
                self._account()
                return
            chunk = b"".join([kept, chunk])
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
        if self.incremental is not None and not self._go_on():
            self._keep_for_incremental(chunk, 0)
            return
        if self.unsent > high_water:
            self._stall(chunk, 0)
            return
        while at < end or self.partial is not None:
            handoff = self.handoff
            partial = self.partial
            if partial is None:
                slot = self.table[chunk[at]]
                if slot is None:
                    raise ProtocolError(self._refusal(chunk[at]))
                self.slot = slot
                result, stop = slot.request.decode(slot.call, chunk, at + 1, end, limits)
            else:
                slot = self.slot
                held = self.held
                if held:
                    self._count_held(0)  # executing the command may move what it holds to the store
                result, stop = partial.decode(slot.call, chunk, at, end, limits)
                if self.partial is partial and not partial.endless:  # LINK replaces it
                    self.partial = None
                if stop == 0 and result is partial:  # a link stopped early, within its first frame
                    self._stall(chunk, 0)
                    return
            if stop < 0:
                self._suspend(result, chunk, at, -stop)
                return
            at = stop
            if keyspace.working:  # it may have woken itself
                keyspace.resolve(self)
            if keyspace.incremental is not None:
                self._take_incremental(at if partial is None else max(held, at))
                if handoff is not None:
                    keyspace.end_handoff(self, handoff)
                if not isinstance(self.incremental, ReplyInPieces) or not self._go_on():
                    self._keep_for_incremental(chunk, at)
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
                    self.check_reply_size(size)
                    out.extend(result)
                    self.unsent += size
                else:
                    out.append(result)
                    self.unsent += len(result)
            if handoff is not None:
                engine.keyspace.end_handoff(self, handoff)
            if self.unsent > high_water:
                self._stall(chunk, at)
                return
        if self.held:
            self._account()

    def large_value(self) -> LargeValue | None:
        """Return the large value under way, if any.

        Instead of reading, the server may receive into its `free_space`, report that to `fill`, and call
        `receive(b"")`.
        """
        partial = self.partial
        return partial if isinstance(partial, LargeValue) and self.input_buffer is None else None

    def stalled(self) -> bool:
        """Whether requests are held back until replies have been sent; `receive(b"")` goes on with them.

        While a command is `incremental`, `receive(b"")` goes on whatever is unsent.
        """
        return self.input_buffer is not None and self.need == 0

    def hold_back(self, chunk: bytes) -> None:
        """Keep bytes that arrive while this is `stalled`. Raises BudgetError."""
        kept = self.input_buffer
        assert kept is not None
        kept += chunk
        self._account()

    def leave(self) -> None:
        """Release everything: the connection is gone. Sessions that this wakes are in `Engine.pending_flush`."""
        self.engine.keyspace.leave(self)
        self._let_go()
        if self.engine.evicted:
            self.engine.evicted.pop(self, None)
        self.owner = None

    def evict(self, error: PeerError) -> None:
        self.engine.evicted[self] = error
        self.table = self.engine.no_commands
        self._let_go()
        self.engine.pending_flush.append(self)

    def keep_unsent(self, replies: list[Framed], taken: int) -> None:
        """Queue replies of which the kernel has accepted the first `taken` bytes, behind those that are queued."""
        if self in self.engine.evicted:
            return
        if self.backlog is None:
            self.backlog = Unsent(self.engine.budget)
        self.backlog.add(replies, taken)
        self._relieve()

    def _let_go(self) -> None:
        """Release everything but what the keyspace holds."""
        engine = self.engine
        self._expect_nothing()
        engine.unfinished -= self.held
        engine.budget.forget(self, self._base_bytes())
        if self.partial is not None:
            engine.keyspace.free_later(self.partial.items)
            self.partial.abandon()
            self.partial = None
        self.input_buffer = None
        self.out.clear()
        self.unsent = 0
        if self.incremental is not None:
            self.incremental.abandon()
            self.incremental = None

    def _expect_nothing(self) -> None:
        """Await VALIDATE no more."""
        engine = self.engine
        if not engine.unvalidated.pop(self, False) and engine.unvalidated_on_links:
            engine.unvalidated_on_links.pop(self, False)

    def _shares_connection(self) -> bool:
        owner = self.owner
        return isinstance(owner, Transport) and owner.shares_connection()

    def _base_bytes(self) -> int:
        """Return the bytes counted for the session and its connection."""
        return SESSION_BYTES if self._shares_connection() else self.engine.session_bytes

    def _relieve(self) -> None:
        """Have the budget evict a peer, perhaps this one, if too much is held now."""
        try:
            self.engine.budget.relieve(self)
        except BudgetError as error:
            self.evict(error)

    def _take_incremental(self, size: int) -> None:
        """Take over the rest of the command that was just called, whose request has so many bytes."""
        keyspace = self.engine.keyspace
        incremental = keyspace.incremental
        keyspace.incremental = None
        self.incremental = incremental
        if incremental is not None and incremental.keeps:
            incremental.held = size

    def _keep_for_incremental(self, chunk: bytes, at: int) -> None:
        """Hold back what follows a command that is not done."""
        self.need = 0
        self.input_buffer = bytearray(memoryview(chunk)[at:])
        self._account()

    def _go_on(self) -> bool:
        """Do the next step of the last command. True if that was all; its reply is in `out` then."""
        incremental = self.incremental
        assert incremental is not None
        keyspace = self.engine.keyspace
        done = incremental.step(keyspace.portion)
        if incremental.parts:
            self.out.extend(incremental.parts)
            self.unsent += length(incremental.parts)
            incremental.parts = []
        if not done:
            return False
        if keyspace.incremental is not None:
            self._take_incremental(0)
            return False
        self.incremental = None
        slot = self.slot
        result = incremental.result
        if slot.encode is not None and not isinstance(result, list):
            result = slot.encode(result)
        if isinstance(result, list):
            size = length(result)
            self.check_reply_size(size)
            self.out.extend(result)
            self.unsent += size
        elif result:
            self.out.append(result)
            self.unsent += len(result)
        self.out.extend(incremental.behind)
        self.unsent += length(incremental.behind)
        return True

    def _stall(self, chunk: bytes, at: int) -> None:
        """Hold back requests, as the peer reads its replies too slowly."""
        self._keep(chunk, at, 0)

    def check_reply_size(self, size: int) -> None:
        """Raise LimitError for a reply of more bytes than the whole budget."""
        most = self.engine.limits.budget_bytes
        if size > most:
            raise LimitError("budget_bytes", size, most)

    def _suspend(self, partial: PartialRequest | None, chunk: bytes, at: int, need: int) -> None:
        """Keep what an incomplete request needs to go on."""
        if partial is not None:
            self.partial = partial
            at = partial.at
        self._keep(chunk, at, need - at)

    def _keep(self, chunk: bytes, at: int, need: int) -> None:
        self.need = need
        if at < len(chunk):
            self.input_buffer = bytearray(memoryview(chunk)[at:])
        self._account()

    def _account(self) -> None:
        """Count what is held of unfinished requests. Raises LimitError."""
        held = 0 if self.input_buffer is None else _BUFFER_BYTES + len(self.input_buffer)
        if self.partial is not None:
            held += self.partial.held()
        if self.incremental is not None:
            held += self.incremental.held
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
            return f"first frame has opcode {opcode}, expected VALIDATE"
        if self.table is self.engine.no_commands:
            return f"opcode {opcode} from an evicted session"
        return f"unknown opcode {opcode}"

    # Commands that concern the connection

    def validate(self, magic: int) -> None:
        if magic != MAGIC:
            raise ProtocolError(f"VALIDATE carries {magic:#x}, expected {MAGIC:#x}")
        self.table = self.engine.commands
        self._expect_nothing()

    def ping(self, nonce: int) -> int:
        if self.pid == NO_PID:
            self.pid = nonce
        return nonce

    def introduce(self, items: list[tuple[bytes, Framed]]) -> None:
        """Keep a description of the peer for logs. Raises ProtocolError if it is too long."""
        if len(items) > _MAX_INTRODUCTION or sum(len(name) + len(value) for name, value in items) > _MAX_INTRODUCTION:
            raise ProtocolError(f"INTRODUCE of more than {_MAX_INTRODUCTION} bytes")
        before = self.introduction_bytes()
        self.peer = {printable(name): printable(unpack(value)) for name, value in items}
        pid = self.peer.get("pid", "")
        if pid.isdecimal() and len(pid) <= _MAX_PID_DIGITS:
            self.pid = int(pid)
        self.engine.budget.charge(self.introduction_bytes() - before)
        self.engine.budget.relieve(self)

    def introduction_bytes(self) -> int:
        peer = self.peer
        if not peer:
            return 0
        return getsizeof(peer) + sum(getsizeof(name) + getsizeof(text) for name, text in peer.items())

    def join(self, key: bytes, token: Framed) -> int:
        """See `Keyspace.join`. Raises ProtocolError for a token that is too long, and when the round is over.

        A rank that was counted then would stay on a server that nobody else of its round will use.
        """
        if len(token) > _MAX_TOKEN:
            raise ProtocolError(f"JOIN with a token of {len(token) - PREFIX} bytes (max {_MAX_TOKEN - PREFIX})")
        if self.engine.over and len(token) > PREFIX:
            raise ProtocolError("JOIN when the round is over; the rank will join the next one")
        return self.engine.keyspace.join(self, key, unpack(token))

    def link(self, items: list[tuple[bytes, Framed]]) -> bytes:
        """Make the connection a link; see `session/link_registry.py`."""
        open_link = self.engine.open_link
        if open_link is None:
            raise ProtocolError("LINK to a server that does not support links")
        return open_link(self, items)

    def taken(self, count: int) -> None:
        """Acknowledge the replies on a single link; see `docs/links.md`."""
        owner = self.owner
        link = owner.single if isinstance(owner, Transport) else None
        if link is None:
            raise ProtocolError("TAKEN on a connection without a single link")
        link.acknowledge(count)

    # Output

    def pass_over(self, queue: bytes) -> bool:
        owner = self.owner
        return isinstance(owner, Transport) and owner.pass_over(queue)

    def fire(self, value: Value | None) -> None:
        """Send the end of a wait, whatever is unsent: one value at most, which must not fail another's command."""
        if self.incremental is not None and self.incremental.determined:
            behind = self.incremental.behind
            behind.extend([_WOKEN] if value is None else value if isinstance(value, list) else [value])
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
        """Send the end of a wait for an item."""
        pieces = encode_popped((length, item))
        if self.incremental is not None and self.incremental.determined:
            self.incremental.behind.extend(pieces)
            return
        self.out.extend(pieces)
        self.unsent += sum(map(len, pieces))
        self.engine.pending_flush.append(self)


def latecomers(sessions: list[ServerSession], complete: float) -> list[ServerSession]:
    """Return the sessions connected after the world was complete: they belong to the next round.

    A peer that was connected before, judged by host and process, keeps its later connections too.
    """
    early = {(one.host, one.pid) for one in sessions if one.connected_at <= complete and one.pid != NO_PID}
    return [one for one in sessions if one.connected_at > complete and (one.host, one.pid) not in early]


def printable(raw: bytes) -> str:
    """Text that cannot break a log line."""
    text = raw.decode(errors="replace")
    return text if text.isprintable() else repr(text)[1:-1]
