"""The server's side of a connection, without I/O: bytes in, commands executed, replies out.

There is one `Engine` for each store of a server, the one without a name and those of `named_stores.py`, and one
`ServerSession` for each connection. Neither knows how bytes travel, what time it is, or which features there are:
these register the commands that they execute (`Engine.register`).

Invariants: commands and replies do not depend on how bytes are cut into chunks. A command is executed once, when it is
complete. Whatever arrives, a session replies or raises PeerError; after an error, call `leave` and drop it.
"""

from collections import OrderedDict
from collections.abc import Callable
from sys import getsizeof
from typing import Any, Final

from ..auth.access import Access
from ..base.addresses import format_address, is_loopback
from ..base.errors import BudgetError, LimitError, NotAllowedError, PeerError, ProtocolError, counted
from ..base.limits import Limits
from ..base.mypyc_shim import mypyc_attr
from ..keyspace.accounts import Account
from ..keyspace.keyspace import Keyspace
from ..keyspace.steps import (
    DeferredWork,
    IncrementalCommand,
    KeyListing,
    ListKeys,
    ReplyInPieces,
)
from ..keyspace.waiter_types import Handoff
from ..keyspace.waiters import PostponedCommands
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
from ..wire.commands import BY_OPCODE, JOINS_KEY, MAGIC, SERVER_KEY, WORKERS_KEY, Command
from ..wire.values import PREFIX, Framed, Value, length, pack, unpack
from .budget import SESSION_BYTES, Budget, Holder, StoreShare
from .guard import Guard, TokenUsage, authentication_required
from .identity import (
    CERTIFICATE,
    CROWDED,
    REFUSED,
    TOKEN,
    auth_refusal,
    auth_reply,
    decode_identity,
    encode_identity,
    with_access,
    with_requirement,
)
from .key_list_cache import KeyListCache, SharedKeys
from .observer import NEVER, Observer
from .tls import HANDSHAKE, MISMATCH
from .unsent import Unsent

NO_PID: Final = -1

_WOKEN: Final = bytes([STOP_WAITING])

_BUFFER_BYTES: Final = 64
"""Bytes counted for an input buffer, besides its contents."""

PORTION: Final = 1000
"""Keys, or waiters, of a command that are handled in one step: half a millisecond at most, compiled."""

_CLOSING: Final = 16
"""A session is closed in the time in which so many keys are handled."""

_MAX_INTRODUCTION: Final = 2048
"""Bytes of an INTRODUCE: names and framed values, which limits the number of items too."""

_MAX_PID_DIGITS: Final = 19

_MAX_TOKEN: Final = PREFIX + 64
"""Bytes of the token of a rank that joins, framed."""

_MOST_BEFORE_AUTH: Final = 8192
"""Bytes of incomplete requests that are kept for a session that has to authenticate: more than any it may send."""

REMOTE: Final = "remote"
ALL: Final = "all"
"""Whose sessions have to authenticate: those from other hosts, or all."""

Introduction = dict[str, str]


def _nobody() -> None:
    return None


_NO_INTRODUCTION: Final[Introduction] = {}
"""Shared by all sessions that have not sent INTRODUCE; never changed."""


class Tally:
    """How often a command has been executed, whichever table it was in."""

    def __init__(self) -> None:
        self.count: int = 0


class _Slot:
    """A row of the command table as an engine serves it: its codecs and the method that executes it."""

    def __init__(self, command: Command, call: Handler, tally: Tally) -> None:
        self.command = command
        self.tally = tally
        self.request: RequestCodec = command.request
        self.call = call
        self.encode = command.reply.encode if command.reply.measure is None else None
        self.in_pieces = command.reply.in_pieces or command.reply.measure is not None
        self._unwatched: list[Handler] = []
        """What `call` is, and for shared keys that of `request`, while nobody watches; empty then."""

    def executing(self) -> Handler:
        """Return the function that executes the command, without those that only note it."""
        return self._unwatched[0] if self._unwatched else self.call

    def executing_shared(self) -> Handler:
        """Do the same for lists of keys that many send, of a command that has them."""
        request = self.request
        assert isinstance(request, SharedKeys)
        return self._unwatched[1] if self._unwatched else request.call

    def watch(self, note: Handler) -> None:
        """Have `note` called with the command and its fields before the command is executed."""
        command, call, request = self.command, self.call, self.request
        self._unwatched = [call]
        self.call = lambda *fields: _noted(note, command, call, fields)
        if isinstance(request, SharedKeys):
            shared = request.call
            self._unwatched.append(shared)
            request.call = lambda listed: _noted(note, command, shared, (listed,))

    def unwatch(self) -> None:
        """Undo `watch`."""
        if self._unwatched:
            if isinstance(self.request, SharedKeys):
                self.request.call = self._unwatched[1]
            self.call = self._unwatched[0]
            self._unwatched = []


def _noted(note: Handler, command: Command, call: Handler, fields: tuple[Any, ...]) -> Any:
    note(command, fields)
    return call(*fields)


NO_COMMANDS: Final[list[_Slot | None]] = [None] * 256
"""The table of an evicted session, which must not make the server hold anything any more."""


class Engine:
    """What the sessions of one store share: keyspace, limits, budget and command table.

    All stores of a server share the budget, and what concerns connections. The one without a name, in which every
    session begins, is the `root` of the others. (With 30 attributes, plain Python would be slower to look them up.)
    """

    def __init__(
        self,
        limits: Limits,
        portion: int = PORTION,
        session_bytes: int = SESSION_BYTES,
        root: "Engine | None" = None,
    ) -> None:
        """`session_bytes` are counted for one connection of this kind of server."""
        self.limits = limits
        self.keyspace = Keyspace(limits, portion)
        self.share = StoreShare(self.keyspace, lambda: self.serving)
        self.budget: Budget = Budget(limits.budget_bytes, self.share, session_bytes) if root is None else root.budget
        self.key_lists = KeyListCache(self.keyspace, self.budget, min(portion, PORTION))
        self.name: str = ""
        """Of the store; the root has none."""
        self.accounts: dict[str, Account] = {}
        """What the holders of tokens with limits have stored here, by the token's id. Not of the root."""
        self.pending_flush: list[ServerSession] = [] if root is None else root.pending_flush
        """Sessions that another session's command gave output to, or evicted; the server flushes or closes them."""
        self.evicted: dict[ServerSession, PeerError] = {} if root is None else root.evicted
        """Sessions whose connections the server has to close, and why."""
        self.features: dict[str, Feature] = {} if root is None else root.features
        """By method, what makes the handlers of commands that neither sessions nor keyspaces execute."""
        self.on_leave: Callable[[ServerSession], object] | None = None
        """Called with each session of any store that leaves. Of the root only."""
        self.on_return: Callable[[ServerSession], object] | None = None
        """Called with each session of any store whose link has a connection again. Of the root only."""
        self.unvalidated: OrderedDict[ServerSession, bool] = OrderedDict() if root is None else root.unvalidated
        """Sessions on connections of their own that have not sent VALIDATE, oldest first."""
        self.unvalidated_on_links: OrderedDict[ServerSession, bool] = (
            OrderedDict() if root is None else root.unvalidated_on_links
        )
        """The same for sessions on links."""
        self.listing: KeyListing | None = None
        """The reply to LIST_KEYS that is being made in steps."""
        self.joins: int = 0
        """How many ranks the owner of this server expects to join, if it has one."""
        self.over = False
        """Whether the owner expected ranks, and expects no more: the round is over."""
        self.root: Engine = self if root is None else root
        self.handshake: list[_Slot | None] = [None] * 256 if root is None else root.handshake
        self.commands: list[_Slot | None] = [None] * 256
        """Commands that were sent to the store, and others when they are: see `slot`."""
        self.tallies: list[Tally] = [Tally() for _ in range(256)] if root is None else root.tallies
        """By opcode, for all stores."""
        self.authenticate: Callable[[bytes], Access | str] | None = None
        """Returns what a token allows, or why it is refused; None if this server has no keys to check tokens with."""
        self.require_auth: str = ""
        """Whose sessions must present a token or certificate: `REMOTE`, `ALL`, or nobody's."""
        self.granted: dict[ServerSession, Access | None] = {} if root is None else root.granted
        """Sessions that have authenticated, and what they may do; None for everything."""
        self.usage: dict[str, TokenUsage] = {} if root is None else root.usage
        """What is counted for tokens with limits, by their id."""
        self._guarded: dict[Access | None, tuple[Guard, list[_Slot | None]]] = {}
        """Guards, and the tables with them. None: of sessions that have to authenticate."""
        self.first: _Slot
        self.serving: ServerSession | None = None
        """The session whose command is being executed."""
        self.observer: Observer | None = None
        """Told what sessions do, if the engine is observed."""
        self._watchers: list[Watcher] = [] if root is None else root._watchers
        """Called with the commands of all stores."""
        self._engines: dict[Engine, None] = {} if root is None else root._engines
        """Those of all stores, in order of creation."""
        self._engines[self] = None
        if root is not None:
            self.first = root.first
            self.authenticate = root.authenticate
            self.require_auth = root.require_auth
            return
        for command in filter(None, BY_OPCODE):
            if command.handshake:
                call = self._method(command, command.method)
                assert call is not None
                self.handshake[command.opcode] = self.first = self._make_slot(command, call)

    def register(self, method: str, feature: "Feature") -> None:
        """Have a feature execute the command with this method, in all stores; none has executed it before."""
        self.features[method] = feature

    def _make_slot(self, command: Command, call: Handler) -> _Slot:
        slot = _Slot(command, call, self.tallies[command.opcode])
        shared = command.method + "_shared"
        if command.request is KEYS and hasattr(self.keyspace, shared):
            call_shared = self._method(command, shared)
            assert call_shared is not None
            slot.request = SharedKeys(self.key_lists, call_shared)
        if self.observer is not None:
            slot.call = self.observer.recorded(command.method, slot.call)
        if self._watchers:
            slot.watch(self._note)
        return slot

    def slot(self, opcode: int) -> _Slot | None:
        """Return how a command is executed in this store; None for an opcode that nothing executes, and for VALIDATE.

        Making the whole table takes longer than anything else that is done for a store with a name.
        """
        slot = self.commands[opcode]
        command = BY_OPCODE[opcode]
        if slot is None and command is not None and not command.handshake:
            call = self._method(command, command.method)
            if call is not None:
                slot = self.commands[opcode] = self._make_slot(command, call)
        return slot

    def begin_sessions(self) -> None:
        """Have sessions begin in this store, which is one with a name: VALIDATE is executed here. Idempotent."""
        if self.handshake is self.root.handshake:
            command = self.root.first.command
            call = self._method(command, command.method)
            assert call is not None
            self.first = self._make_slot(command, call)
            self.handshake = [None] * 256
            self.handshake[self.first.command.opcode] = self.first

    def take_apart(self) -> None:
        """Break the cycles of an engine whose store has ended: nothing has to wait for the garbage collector."""
        self.commands = NO_COMMANDS
        self.handshake = self.root.handshake
        self.first = self.root.first
        self._guarded.clear()
        self.key_lists.lists.clear()
        self.serving = None
        self.observer = None
        self._engines.pop(self, None)
        self.share.serving = _nobody
        self.share = self.root.share

    def activate(self) -> None:
        """Have the budget count this store. To be called before anything changes in it outside of `receive`."""
        if self.budget.share is not self.share:
            self.budget.switch(self.share)

    @property
    def unfinished(self) -> int:
        """Bytes held of incomplete requests, all sessions together."""
        return self.budget.unfinished

    def observe(self, observer: Observer) -> None:
        """Have an observer told what sessions do from now on. To be called once."""
        self.observer = observer
        for slot in self.commands:
            if slot is not None:
                slot.call = observer.recorded(slot.command.method, slot.call)

    def counts(self) -> dict[str, int]:
        """Return how often each command has been executed, in all stores of the server."""
        return {command.name: self.tallies[command.opcode].count for command in filter(None, BY_OPCODE)}

    def watch(self, watcher: "Watcher") -> None:
        """Have each command in any store noted from now on. Nothing is called for that while nobody watches."""
        self._watchers.append(watcher)
        if len(self._watchers) == 1:
            for engine in self.engines():
                for slot in engine._all_slots():
                    slot.watch(engine._note)

    def unwatch(self, watcher: "Watcher") -> None:
        """Undo `watch`. Idempotent."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)
            if not self._watchers:
                for engine in self.engines():
                    for slot in engine._all_slots():
                        slot.unwatch()

    def _note(self, command: Command, fields: tuple[Any, ...]) -> None:
        for watcher in self._watchers:
            watcher(command, fields, self.serving)

    def engines(self) -> "list[Engine]":
        """Return the engines of all stores of the server that sessions may be in."""
        return list(self._engines)

    def _all_slots(self) -> "list[_Slot]":
        tables = [self.commands, *[table for _, table in self._guarded.values()]]
        if self is self.root or self.handshake is not self.root.handshake:
            tables.append(self.handshake)
        return [slot for table in tables for slot in table if slot is not None]

    def identify(self, identity: bytes) -> None:
        """Set the identity of this server, which clients of the extension read; see `session/identity.py`."""
        self.keyspace.reserved[SERVER_KEY] = pack(identity)

    def announce(self, joins: int) -> None:
        """Publish how many ranks the owner of this server expects to join, in all stores that it has made on it.

        0 means that the server is about to stop. Sessions that this wakes are in `pending_flush`.
        """
        self.activate()
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

    # Authentication

    def grant(self, session: "ServerSession", access: Access | None) -> None:
        """Let a session do what `access` allows from now on; None allows everything."""
        self.revoke(session)
        self.granted[session] = access
        if access is not None:
            self._guard(access)[0].sessions += 1
            if access.limited():
                self.usage[access.identity].sessions.add(session)

    def expect(self, access: Access, ended: str) -> None:
        """A session with this token, which is no longer valid if `ended` says why, is about to come from another store.

        To be called before it leaves that one, so that what is counted for the token is not forgotten in between.
        """
        self._guard(access)[0].ended = ended

    def revoke(self, session: "ServerSession") -> None:
        """Forget what a session was allowed: it has gone, or is about to be allowed something else."""
        access = self.granted.pop(session, None)
        if access is None:
            return
        usage = self.usage.get(access.identity)
        if usage is not None:
            usage.sessions.discard(session)
        guard = self._guarded[access][0]
        guard.sessions -= 1
        if not guard.sessions:
            del self._guarded[access]
            if usage is not None:
                usage.guards -= 1
                self.forget_unused(usage)

    def end_invalid(self, ended: Callable[[Access], str]) -> None:
        """Refuse everything to those whose token is no longer valid, and have their connections closed in portions.

        `ended` returns why that is so, or nothing.
        """
        invalid = False
        for engine in self.engines():
            for access, (guard, _) in engine._guarded.items():
                guard.ended = "" if access is None else ended(access)
                invalid = invalid or guard.ended != ""
        if invalid:
            self.root.keyspace.defer(EvictSessions(list(self.granted), _no_longer_valid))

    def why_ended(self, session: "ServerSession") -> str:
        """Return why the token of a session is no longer valid; empty if it is, or has none."""
        access = self.granted.get(session)
        found = None if access is None else self._guarded.get(access)
        return "" if found is None else found[0].ended

    def usage_of(self, session: "ServerSession") -> TokenUsage | None:
        """Return what is counted for the token of a session, if that is limited."""
        access = self.granted.get(session) if self.granted else None
        return None if access is None else self.usage.get(access.identity)

    def forget_unused(self, usage: TokenUsage) -> None:
        """Forget a token of which there is nothing to count."""
        if usage.unused():
            self.usage.pop(usage.identity, None)

    def account_of(self, access: Access) -> Account | None:
        """Return what is counted in this store for the holders of a token, if that is limited."""
        found = self._guarded.get(access)
        return None if found is None else found[0].account

    def crowded(self, access: Access | None) -> str:
        """Return why there may be no further session with this token; empty if there may.

        Those without a connection do not keep others out: see `LinkRegistry.make_way`.
        """
        usage = None if access is None else self.usage.get(access.identity)
        connected = 0 if usage is None else len(usage.sessions) - len(usage.suspended)
        if access is None or not 0 < access.max_sessions <= connected:
            return ""
        return f"token {access.identity} already has {counted(connected, 'session')} (max {access.max_sessions})"

    def table_of(self, session: "ServerSession") -> "list[_Slot | None]":
        """Return the table of a session that has sent VALIDATE."""
        if session in self.granted:
            access = self.granted[session]
            return self.commands if access is None else self._guard(access)[1]
        return self._guard(None)[1] if self.must_authenticate(session) else self.commands

    def must_authenticate(self, session: "ServerSession") -> bool:
        """Return whether a session may do nothing yet."""
        if not self.require_auth or session in self.granted or session.shares_connection():
            return False  # one on a link may do what the link's connection may
        return self.require_auth == ALL or not is_loopback(session.host)

    def _guard(self, access: Access | None) -> "tuple[Guard, list[_Slot | None]]":
        found = self._guarded.get(access)
        if found is not None:
            return found
        identity = self.keyspace.reserved.get(SERVER_KEY, pack(b"{}"))
        account: Account | None = None
        if access is not None:
            identity = pack(encode_identity(with_access(decode_identity(unpack(identity)), access)))
            if access.limited():
                usage = self.usage.setdefault(access.identity, TokenUsage(access))
                usage.guards += 1
                account = self._account(usage)
        elif SERVER_KEY in self.keyspace.reserved:
            required = CERTIFICATE if self.authenticate is None else TOKEN
            identity = pack(encode_identity(with_requirement(decode_identity(unpack(identity)), required)))
        guard = Guard(self.keyspace, access, account, identity, self.authenticate is None, self.name or None)
        table: list[_Slot | None] = [None] * 256
        for opcode in range(256):
            slot = self.slot(opcode)
            if slot is None or (access is None and not slot.command.first):
                continue
            command = slot.command
            guarded = _Slot(command, guard.wrap(command, slot.executing()), slot.tally)
            if isinstance(slot.request, SharedKeys):
                guarded.request = SharedKeys(self.key_lists, guard.wrap_shared(command, slot.executing_shared()))
            if self._watchers:
                guarded.watch(self._note)
            table[command.opcode] = guarded
        self._guarded[access] = guard, table
        return guard, table

    def _account(self, usage: TokenUsage) -> Account:
        """Return what the holders of a token have stored here."""
        if not self.name:
            return usage.nameless
        account = self.accounts.get(usage.identity)
        if account is None or account.usage is not usage:  # the token was forgotten, as there was nothing to count
            account = self.accounts[usage.identity] = Account(usage)
        return account

    def _method(self, command: Command, name: str) -> Handler | None:
        """Return the function that executes a command, given its fields, by the method of this name."""
        if name == "wait":
            return self._wait
        if name == "barrier":
            return self._barrier
        feature = self.features.get(name)
        owner: object = ServerSession if command.session else self.keyspace
        method: Handler | None = getattr(owner, name, None) if feature is None else feature(self)
        if method is None:
            return None  # a command of a feature that this server does not have
        if command.session or command.parks or command.holds:
            return self._with_session(method, command.request.arity)
        return method if command.reply.measure is None else self._list_keys

    def _wait(self, keys: list[bytes]) -> bool:
        # What all ranks send: calling the keyspace from compiled code costs less than by `_with_session`.
        serving = self.serving
        assert serving is not None
        return self.keyspace.wait(serving, keys)

    def _barrier(self, key: bytes, world_size: int) -> bool:
        serving = self.serving
        assert serving is not None
        return self.keyspace.barrier(serving, key, world_size)

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
        self.single: Keeper | None = None
        """What keeps the session when the connection breaks."""
        self.session: ServerSession = ServerSession(engine, self, host, port, connected_at)

    def flush(self) -> None:
        """Send the session's replies, as far as its peer takes them."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connection and take back what its session was offered. Idempotent."""
        raise NotImplementedError

    def finish(self) -> None:
        """Read no more, and close once the peer has been sent the replies that are unsent."""
        self.close()

    def leave(self, broken: bool) -> None:
        """The connection has ended. If it is broken and there is a single link, that keeps the session."""
        link = self.single
        if link is not None and broken and not link.over:
            link.detach()
            return
        if link is not None:
            link.forget()
            self.single = None
        self.session.leave()

    def send_again(self, replies: list[Framed], taken: int) -> None:
        """Send replies without their first `taken` bytes; they are counted as unsent, and nothing is ahead of them."""
        raise NotImplementedError

    def resumed(self) -> None:
        """Go on soon with what the session, which comes from another connection, has kept back."""
        raise NotImplementedError

    def wake(self, reply: bytes) -> bool:
        """Send the reply that ends a wait, if that costs less than to flush it later and nothing is ahead of it.

        Returns whether it is sent. This must not fail.
        """
        return False

    def pass_over(self, engine: Engine, queue: bytes) -> bool:
        """See `Waiter.pass_over`."""
        return False

    def awaited_since(self) -> float:
        """Return since when the peer could send VALIDATE, in seconds of the server's clock; infinite if it cannot."""
        return self.session.connected_at

    def shares_connection(self) -> bool:
        """Return whether there are other sessions on the same connection, and closing this one leaves it open."""
        return False

    def refused_before(self) -> str:
        """Return why another connection of the same process and token has just been closed; empty if none was."""
        return ""

    def in_handshake(self) -> bool:
        """Return whether the peer has begun a TLS handshake, or has to, and has not finished it."""
        return False


class Keeper(Transport):
    """A single link, as connections know it: keeps replies until they are acknowledged, and the session meanwhile."""

    over: bool
    received: int
    """Bytes taken from the client since LINK."""

    def keep(self, out: list[Framed]) -> None:
        """Keep replies that are about to be sent. May evict the session, which clears its `out`."""
        raise NotImplementedError

    def detach(self) -> None:
        """Do without the connection, which is broken: wait for the next for as long as the grace period is."""
        raise NotImplementedError

    def forget(self) -> None:
        """End the link; the session is then its connection's alone, and ends with it."""
        raise NotImplementedError


class ServerSession(Holder):
    """One connection: its incomplete request, its replies, and what is known about its peer."""

    __slots__ = ("heard_at", "serial")
    """Python shares the names of 29 other attributes among all sessions. With one more, each would have its own."""

    def __init__(self, engine: Engine, owner: object, host: str, port: int, connected_at: float) -> None:
        super().__init__()
        # What most commands use comes first: compiled, it is in fewer cache lines.
        self.engine = engine
        self.owner: object = owner
        """Its `Transport`, on a server; None after `leave`."""
        self.table: list[_Slot | None] = engine.handshake
        self.slot: _Slot = engine.first
        """The last command, incomplete ones included. What it awaits is in `parked` or `group`."""
        self.heard_at: float = NEVER
        """When it last received something, in seconds of the server's clock, if the engine is observed."""
        self.out: list[Framed] = []
        """Replies for the server to take, in order."""
        self.unsent: int = 0
        """Bytes of replies, `out` included, that the kernel has not accepted yet."""
        self.partial: PartialRequest | None = None
        """The request that has been decoded in part."""
        self.incremental: IncrementalCommand | None = None
        """The last command, if it is still running; `receive(b"")` goes on with it."""
        self.input_buffer: bytearray | None = None
        """Bytes that are not decoded yet."""
        self.need: int = 0
        """The length of `input_buffer` from which decoding can go on; 0 if it waits for something else."""
        self.host = host
        self.port = port
        self.connected_at = connected_at
        """On the same clock."""
        self.serial: int = 0
        """Its serial number in the history; 0 if it is not named there."""
        self.pid: int = NO_PID
        """The peer's process: from its INTRODUCE, else the number of its first PING, which PyTorch's client and ours
        send in the handshake."""
        self.peer: Introduction = _NO_INTRODUCTION
        """The contents of the peer's INTRODUCE."""
        (engine.unvalidated_on_links if self.shares_connection() else engine.unvalidated)[self] = True
        engine.budget.enter(self, self._base_bytes())
        self._relieve()

    def __str__(self) -> str:
        address = format_address(self.host, self.port)
        known = {} if self.pid == NO_PID else {"pid": str(self.pid)}
        known.update(self.peer)
        access = self.engine.granted.get(self) if self.engine.granted else None
        if access is not None:
            known["token"] = access.identity
        return f"{address} ({', '.join(f'{name} {text}' for name, text in known.items())})" if known else address

    # Input

    def receive(self, chunk: bytes) -> None:
        """Take bytes, execute the commands that are complete, and put their replies into `out`.

        Stops while more than `Limits.unsent_high_water` bytes of replies are unsent, and after each step of a long
        command; see `stalled`. Raises PeerError.
        """
        # What rarely happens is in methods of its own: compiled, the common path then takes fewer cache lines.
        if self.input_buffer is not None:
            joined = self._join_kept(chunk)
            if joined is None:
                return
            chunk = joined
        engine = self.engine
        keyspace = engine.keyspace
        budget = engine.budget
        if keyspace is not budget.keyspace:
            budget.switch(engine.share)
        elif keyspace.size != budget.seen:
            budget.attribute()
        engine.serving = self
        if engine.observer is not None:
            self.heard_at = engine.observer.now
        limits = engine.limits
        high_water = limits.unsent_high_water
        out = self.out
        end = len(chunk)
        at = held = 0
        if (keyspace.working or self.incremental is not None) and not self._finish_before(engine, chunk):
            return
        if self.unsent > high_water:
            self._stall(chunk, 0)
            return
        while at < end or self.partial is not None:
            if keyspace.working and keyspace.postpones(self):
                self.incremental = PostponedCommands(keyspace, self)
                self._keep_for_incremental(chunk, at)
                return
            handoff = self.handoff
            partial = self.partial
            if partial is None:
                slot = self.table[chunk[at]]
                if slot is None:
                    slot = self._missing(chunk[at])
                self.slot = slot
                result, stop = slot.request.decode(slot.call, chunk, at + 1, end, limits)
            else:
                slot = self.slot
                held = self.held
                result, stop = self._decode_more(partial, chunk, at)
                if stop == 0 and result is partial:  # a link stopped early, within its first frame
                    self._stall(chunk, 0)
                    return
            if stop < 0:
                self._suspend(result, chunk, at, -stop)
                return
            at = stop
            slot.tally.count += 1
            if keyspace.working and not keyspace.postpones(self):  # it may have woken itself
                keyspace.resolve(self)
            if keyspace.incremental is not None:
                if not self._begin_steps(keyspace, handoff, chunk, at, at if partial is None else max(held, at)):
                    return
                continue
            if slot.encode is not None:
                result = slot.encode(result)
            if result:
                if slot.in_pieces:
                    self._add_pieces(result)
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

    def _join_kept(self, chunk: bytes) -> bytes | None:
        """Return the bytes that were kept and those that follow; None if they do not suffice, and are kept too."""
        kept = self.input_buffer
        assert kept is not None
        if len(kept) + len(chunk) < self.need:
            kept += chunk
            self._account()
            return None
        self.input_buffer = None
        return b"".join([kept, chunk])

    def _finish_before(self, engine: Engine, chunk: bytes) -> bool:
        """Do what has to precede the next command: work that concerns this session, and the rest of the last command.

        Returns whether commands follow now; if not, `chunk` has been dealt with.
        """
        keyspace = engine.keyspace
        if keyspace.working and not keyspace.postpones(self):
            keyspace.resolve(self)
            if self.engine is not engine:  # it has been let into another store
                self.receive(chunk)
                return False
        if self.incremental is not None:
            if keyspace.postpones(self) or not self._go_on():
                self._keep_for_incremental(chunk, 0)
                return False
            if self.engine is not engine:  # ENTER: what follows is for another store
                if chunk:
                    self._keep_for_incremental(chunk, 0)
                return False
        return True

    def _decode_more(self, partial: PartialRequest, chunk: bytes, at: int) -> tuple[Any, int]:
        """Decode more of a request, and execute it if it is complete. Returns what `PartialRequest.decode` does."""
        if self.held:
            self._count_held(0)  # executing the command may move what it holds to the store
        result, stop = partial.decode(self.slot.call, chunk, at, len(chunk), self.engine.limits)
        if self.partial is partial and not partial.endless:  # LINK replaces it
            self.partial = None
        return result, stop

    def _begin_steps(self, keyspace: Keyspace, handoff: Handoff | None, chunk: bytes, at: int, size: int) -> bool:
        """Begin with the rest of a command that is carried out in steps, whose request has `size` bytes.

        Returns whether it is done, so that others follow now; if not, the rest of `chunk` is held back.
        """
        self._take_incremental(size)
        if handoff is not None:
            keyspace.end_handoff(self, handoff)
        if not isinstance(self.incremental, ReplyInPieces) or not self._go_on():
            self._keep_for_incremental(chunk, at)
            return False
        if self.unsent > self.engine.limits.unsent_high_water:
            self._stall(chunk, at)
            return False
        return True

    def _add_pieces(self, pieces: list[Framed]) -> None:
        """Add a reply in pieces. Raises LimitError."""
        size = length(pieces)
        self.check_reply_size(size)
        self.out.extend(pieces)
        self.unsent += size

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
        engine = self.engine
        engine.activate()
        if engine.observer is not None:
            engine.observer.leaves(self)
        keyspace = engine.keyspace
        before = keyspace.charge(self.account())
        keyspace.leave(self)
        keyspace.charge(before)
        self._let_go()
        if engine.granted:  # not before, so that what goes back to the store is counted
            engine.revoke(self)
        if engine.evicted:
            engine.evicted.pop(self, None)
        on_leave = engine.root.on_leave
        if on_leave is not None:
            on_leave(self)
        self.owner = None

    def share(self) -> StoreShare:
        return self.engine.share

    def account(self) -> Account | None:
        engine = self.engine
        access = engine.granted.get(self) if engine.granted else None
        return None if access is None else engine.account_of(access)

    def evict(self, error: PeerError) -> None:
        self.engine.evicted[self] = error
        self.table = NO_COMMANDS
        self._let_go()
        self.engine.pending_flush.append(self)

    def keep_unsent(self, replies: list[Framed], taken: int) -> None:
        """Queue replies of which the kernel has accepted the first `taken` bytes, behind those that are queued."""
        if self in self.engine.evicted:
            return
        if self.engine.must_authenticate(self):
            self.evict(self._stranger("not reading its replies"))
            return
        if self.backlog is None:
            self.backlog = Unsent(self.engine.budget)
        self.backlog.add(replies, taken)
        self._relieve()

    def _let_go(self) -> None:
        """Release everything but what the keyspace holds."""
        engine = self.engine
        self._expect_nothing()
        engine.budget.unfinished -= self.held
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
        """Await VALIDATE, and authentication, no more."""
        engine = self.engine
        if self in engine.unvalidated:
            del engine.unvalidated[self]  # compiled, `pop` costs twice as much
        elif engine.unvalidated_on_links:
            engine.unvalidated_on_links.pop(self, False)

    def shares_connection(self) -> bool:
        """Return whether this is a session on a link."""
        owner = self.owner
        return isinstance(owner, Transport) and owner.shares_connection()

    def _base_bytes(self) -> int:
        """Return the bytes counted for the session and its connection."""
        return SESSION_BYTES if self.shares_connection() else self.engine.budget.session_bytes

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
        account = incremental.account
        done = incremental.step(keyspace.portion) if account is None else self._step_counted(incremental, account)
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
            self._add_pieces(result)
        elif result:
            self.out.append(result)
            self.unsent += len(result)
        self.out.extend(incremental.behind)
        self.unsent += length(incremental.behind)
        return True

    def _step_counted(self, incremental: IncrementalCommand, account: Account) -> bool:
        """Do the next step of a command whose effects are counted."""
        keyspace = self.engine.keyspace
        account.usage.command = self.slot.command.name
        before = keyspace.charge(account)
        try:
            return incremental.step(keyspace.portion)
        finally:
            keyspace.charge(before)
            if keyspace.incremental is not None:
                keyspace.incremental.account = account

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
            before = partial.before
            if before:
                partial.before = b""
                chunk = before + chunk[at:]
                need += len(before) - at
                at = 0
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
            if held > _MOST_BEFORE_AUTH and self.engine.must_authenticate(self):
                raise self._stranger(f"{self.slot.command.name} with more than {_MOST_BEFORE_AUTH} bytes")
            self._count_held(held)
            self.engine.budget.relieve(self)

    def _count_held(self, held: int) -> None:
        engine = self.engine
        growth = held - self.held
        self.held = held
        engine.budget.unfinished += growth
        engine.budget.charge(growth)

    def _missing(self, opcode: int) -> _Slot:
        """Return how a command is executed for which the table has nothing. Raises PeerError."""
        engine = self.engine
        slot = engine.slot(opcode) if self.table is engine.commands else None
        if slot is None:
            raise self._refusal(opcode)
        return slot

    def _refusal(self, opcode: int) -> PeerError:
        engine = self.engine
        if self.table is engine.handshake:
            if opcode == HANDSHAKE:
                self._alert()
                return ProtocolError("it began a TLS handshake, but this server does not use TLS")
            return ProtocolError(f"first frame has opcode {opcode}, expected VALIDATE")
        if self.table is NO_COMMANDS:
            return ProtocolError(f"opcode {opcode} from an evicted session")
        command = BY_OPCODE[opcode]
        if command is not None and engine.must_authenticate(self):
            return self._stranger(command.name)
        return ProtocolError(f"unknown opcode {opcode}")

    def plain_refused(self) -> NotAllowedError:
        """Return the error of a session whose peer does not use TLS, and has to; tell the peer."""
        self._alert()
        return NotAllowedError(
            "it uses plain TCP, but the server was started with --require-tls; use tcps://, or a relay"
        )

    def _alert(self) -> None:
        """Tell the peer that it uses TLS and the server does not, or the other way round."""
        self.out.append(MISMATCH)
        self.unsent += len(MISMATCH)

    def _stranger(self, what: str) -> NotAllowedError:
        """Return the error of a session that has not authenticated, and has to."""
        return NotAllowedError(authentication_required(what, self.engine.authenticate is None))

    def expected(self) -> str:
        """Return what the peer has to send first, and has not sent."""
        return "VALIDATE" if self.table is self.engine.handshake else "AUTH"

    # Commands that concern the connection

    def validate(self, magic: int) -> None:
        if magic != MAGIC:
            raise ProtocolError(f"VALIDATE carries {magic:#x}, expected {MAGIC:#x}")
        engine = self.engine
        if engine.granted or engine.require_auth:
            self.table = engine.table_of(self)
            if engine.must_authenticate(self):
                return
        else:
            self.table = engine.commands
        self._expect_nothing()

    def grant_access(self, access: Access | None) -> None:
        """The peer has authenticated, by a token with this access, or by a certificate, which allows everything."""
        engine = self.engine
        if self.table is NO_COMMANDS:
            return
        engine.grant(self, access)
        if self.table is not engine.handshake:
            self.table = engine.table_of(self)
            self._expect_nothing()

    def certify(self) -> None:
        """The peer has shown a certificate that the server demands, which allows everything unless tokens decide."""
        if self.engine.authenticate is None:
            self.grant_access(None)

    def auth(self, token: Framed) -> Framed:
        """Present a token. Raises NotAllowedError if it is refused, behind the reply that says so."""
        engine = self.engine
        if engine.authenticate is None:
            found: Access | str = "the server has no keys to check tokens with; connect without a token"
        else:
            found = engine.authenticate(unpack(token))
        status = REFUSED
        if isinstance(found, Access):
            if found.store and "enter" not in engine.features:
                found = f"token {found.identity} is only for the store {found.store!r}, which this server does not have"
            elif engine.granted.get(self) != found:
                status = CROWDED
                found = engine.crowded(found) or found
        if isinstance(found, str):
            reply = pack(auth_refusal(status, found))
            self.out.append(reply)
            self.unsent += len(reply)
            raise NotAllowedError(found)
        self.grant_access(found)
        owner = self.owner
        return pack(auth_reply(found, owner.refused_before() if isinstance(owner, Transport) else ""))

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

    def describe(self, peer: Introduction) -> None:
        """Keep what a relay says of the peer, unless the peer has said it itself."""
        if not self.peer and self.table is not NO_COMMANDS:
            self.peer = peer
            self.engine.budget.charge(self.introduction_bytes())
            self._relieve()

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
            raise ProtocolError("JOIN after the end of the round; the rank will join the next one")
        return self.engine.keyspace.join(self, key, unpack(token))

    def put_into(self, engine: Engine) -> None:
        """Go on in another store. What the session has written in the one before is nobody's share any more."""
        before = self.engine
        self.heard_at = NEVER
        granted = self in before.granted
        access = before.granted.get(self)
        if granted:
            if access is not None:
                engine.expect(access, before.why_ended(self))
            before.revoke(self)
        self.engine = engine
        self.stored = 0.0
        before.serving = None
        if granted:
            engine.grant(self, access)
        self.table = engine.table_of(self)

    def came_back(self) -> None:
        """Its link has a connection again."""
        on_return = self.engine.root.on_return
        if on_return is not None:
            on_return(self)

    # Output

    def pass_over(self, queue: bytes) -> bool:
        owner = self.owner
        return isinstance(owner, Transport) and owner.pass_over(self.engine, queue)

    def fire(self, value: Value | None) -> None:
        """Send the end of a wait, whatever is unsent: one value at most, which must not fail another's command."""
        if self.incremental is not None and self.incremental.determined:
            behind = self.incremental.behind
            behind.extend([_WOKEN] if value is None else value if isinstance(value, list) else [value])
            return
        if value is None:
            owner = self.owner
            if isinstance(owner, Transport) and owner.wake(_WOKEN):
                return
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


Feature = Callable[[Engine], Handler]
"""Makes the handler of a command for one store, when it is first sent there: it gets the session and the fields."""

Watcher = Callable[[Command, tuple[Any, ...], ServerSession | None], object]
"""Notes a command, its fields and the session that sends it, before the command is executed."""


class EvictSessions(DeferredWork):
    """Have the connections of many sessions closed, in portions."""

    def __init__(self, sessions: list[ServerSession], why: Callable[[ServerSession], PeerError | None]) -> None:
        self.sessions = sessions
        self.why = why
        """Returns why a session is to be closed; None if it is not, or has gone."""

    def step(self, most: int) -> bool:
        sessions = self.sessions
        while sessions and most > 0:
            session = sessions.pop()
            most -= 1
            error = None if session in session.engine.evicted else self.why(session)
            if error is not None:
                session.evict(error)
                most -= _CLOSING
        return not sessions


def _no_longer_valid(session: ServerSession) -> PeerError | None:
    reason = session.engine.why_ended(session)
    return NotAllowedError(reason) if reason else None


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
