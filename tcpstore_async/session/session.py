"""What a server holds for one connection, and lets go: its place in a store, its budget and its replies.

It knows who may do what, and what is counted for whom; it must not know how bytes travel, or how requests are decoded:
`server.py` does.

Invariants: a session that leaves, or is evicted, releases at once everything outside the keyspace. The end of a wait is
sent whatever is unsent.
"""

from math import inf
from typing import Final

from ..auth.access import Access
from ..base.addresses import format_address
from ..base.errors import BudgetError, NotAllowedError, PeerError, ProtocolError
from ..keyspace.accounts import Account
from ..wire.codecs import STOP_WAITING, encode_popped
from ..wire.commands import MAGIC
from ..wire.values import Framed, Value, length
from .budget import SESSION_BYTES, StoreShare
from .guard import authentication_required
from .observer import NEVER
from .owner import Owner
from .peer import NO_PID, Introduction, Peer
from .slots import NO_COMMANDS
from .store import Store
from .tls import MISMATCH
from .unsent import Unsent

_WOKEN: Final = bytes([STOP_WAITING])

_BUFFER_BYTES: Final = 64
"""Bytes counted for an input buffer, besides its contents."""

_MOST_BEFORE_AUTH: Final = 8192
"""Bytes of incomplete requests that are kept for a session that has to authenticate: more than any it may send."""


class Session(Peer):
    """One connection, but for its input: the base class of `ServerSession`."""

    def __init__(self, engine: Store, owner: object, host: str, port: int, connected_at: float) -> None:
        super().__init__(owner, host, port, connected_at, engine.handshake, engine.first)
        self.engine = engine
        hub = engine.hub
        (hub.unvalidated_on_links if self.shares_connection() else hub.unvalidated)[self] = True
        engine.budget.enter(self, self._base_bytes())
        self._relieve()

    def __str__(self) -> str:
        address = format_address(self.host, self.port)
        known = {} if self.pid == NO_PID else {"pid": str(self.pid)}
        known.update(self.peer)
        granted = self.engine.hub.auth.granted
        access = granted.get(self) if granted else None
        if access is not None:
            known["token"] = access.identity
        return f"{address} ({', '.join(f'{name} {text}' for name, text in known.items())})" if known else address

    # What it may do, and in which store

    def validate(self, magic: int) -> None:
        if magic != MAGIC:
            raise ProtocolError(f"VALIDATE carries {magic:#x}, expected {MAGIC:#x}")
        engine = self.engine
        auth = engine.hub.auth
        if auth.granted or auth.require_auth:
            self.table = engine.guards.table_of(self)
            if auth.must_authenticate(self):
                return
        else:
            self.table = engine.commands
        self._expect_nothing()

    def grant_access(self, access: Access | None) -> None:
        engine = self.engine
        if self.table is NO_COMMANDS:
            return
        engine.guards.grant(self, access)
        if self.table is not engine.handshake:
            self.table = engine.guards.table_of(self)
            self._expect_nothing()

    def certify(self) -> None:
        """The peer has shown a certificate that the server demands, which allows everything unless tokens decide."""
        if self.engine.hub.auth.authenticate is None:
            self.grant_access(None)

    def why_ended(self) -> str:
        return self.engine.guards.why_ended(self)

    def expected(self) -> str:
        return "VALIDATE" if self.table is self.engine.handshake else "AUTH"

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
        return NotAllowedError(authentication_required(what, self.engine.hub.auth.authenticate is None))

    def put_into(self, engine: Store) -> None:
        """Go on in another store. What the session has written in the one before is nobody's share any more."""
        before = self.engine
        self.heard_at = NEVER
        authenticated = before.hub.auth.granted
        granted = self in authenticated
        access = authenticated.get(self)
        if granted:
            if access is not None:
                engine.guards.expect(access, before.guards.why_ended(self))
            before.guards.revoke(self)
        self.engine = engine
        self.stored = 0.0
        before.serving = None
        if granted:
            engine.guards.grant(self, access)
        self.table = engine.guards.table_of(self)

    def came_back(self) -> None:
        """Its link has a connection again."""
        on_return = self.engine.hub.on_return
        if on_return is not None:
            on_return(self)

    # What it holds

    def leave(self) -> None:
        engine = self.engine
        engine.activate()
        if engine.observer is not None:
            engine.observer.leaves(self)
        keyspace = engine.keyspace
        before = keyspace.charge(self.account())
        keyspace.leave(self)
        keyspace.charge(before)
        self._let_go()
        hub = engine.hub
        if hub.auth.granted:  # not before, so that what goes back to the store is counted
            engine.guards.revoke(self)
        if hub.evicted:
            hub.evicted.pop(self, None)
        if hub.on_leave is not None:
            hub.on_leave(self)
        self.owner = None

    def evict(self, error: PeerError) -> None:
        hub = self.engine.hub
        hub.evicted[self] = error
        self.table = NO_COMMANDS
        self._let_go()
        hub.pending_flush.append(self)

    def share(self) -> StoreShare:
        return self.engine.share

    def account(self) -> Account | None:
        return self.engine.guards.account_of(self)

    def keep_unsent(self, replies: list[Framed], taken: int) -> None:
        """Queue replies of which the kernel has accepted the first `taken` bytes, behind those that are queued."""
        hub = self.engine.hub
        if self in hub.evicted:
            return
        if hub.auth.must_authenticate(self):
            self.evict(self._stranger("not reading its replies"))
            return
        if self.backlog is None:
            self.backlog = Unsent(self.engine.budget)
        self.backlog.add(replies, taken)
        self._relieve()

    def describe(self, peer: Introduction) -> None:
        """Keep what a relay says of the peer, unless the peer has said it itself."""
        if not self.peer and self.table is not NO_COMMANDS:
            self.peer = peer
            self.engine.budget.charge(self.introduction_bytes())
            self._relieve()

    def _account(self) -> None:
        """Count what is held of unfinished requests. Raises LimitError."""
        held = 0 if self.input_buffer is None else _BUFFER_BYTES + len(self.input_buffer)
        if self.partial is not None:
            held += self.partial.held()
        if self.incremental is not None:
            held += self.incremental.held
        if held != self.held:
            if held > _MOST_BEFORE_AUTH and self.engine.hub.auth.must_authenticate(self):
                raise self._stranger(f"{self.slot.command.name} with more than {_MOST_BEFORE_AUTH} bytes")
            self._count_held(held)
            self.engine.budget.relieve(self)

    def _count_held(self, held: int) -> None:
        engine = self.engine
        growth = held - self.held
        self.held = held
        engine.budget.unfinished += growth
        engine.budget.charge(growth)

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
        hub = self.engine.hub
        if self in hub.unvalidated:
            del hub.unvalidated[self]  # compiled, `pop` costs twice as much
        elif hub.unvalidated_on_links:
            hub.unvalidated_on_links.pop(self, False)

    def _relieve(self) -> None:
        """Have the budget evict a peer, perhaps this one, if too much is held now."""
        try:
            self.engine.budget.relieve(self)
        except BudgetError as error:
            self.evict(error)

    def _base_bytes(self) -> int:
        """Return the bytes counted for the session and its connection."""
        return SESSION_BYTES if self.shares_connection() else self.engine.budget.session_bytes

    # What its owner knows

    def shares_connection(self) -> bool:
        owner = self.owner
        return isinstance(owner, Owner) and owner.shares_connection()

    def awaited_since(self) -> float:
        owner = self.owner
        return owner.awaited_since() if isinstance(owner, Owner) else inf

    def refused_before(self) -> str:
        owner = self.owner
        return owner.refused_before() if isinstance(owner, Owner) else ""

    # Output of other commands

    def fire(self, value: Value | None) -> None:
        """Send the end of a wait, whatever is unsent: one value at most, which must not fail another's command."""
        if self.incremental is not None and self.incremental.determined:
            behind = self.incremental.behind
            behind.extend([_WOKEN] if value is None else value if isinstance(value, list) else [value])
            return
        if value is None:
            owner = self.owner
            if isinstance(owner, Owner) and owner.wake(_WOKEN):
                return
            self.out.append(_WOKEN)
            self.unsent += 1
        elif isinstance(value, list):
            self.out.extend(value)
            self.unsent += length(value)
        else:
            self.out.append(value)
            self.unsent += len(value)
        self.engine.hub.pending_flush.append(self)

    def grant(self, length: int, item: Framed | None) -> None:
        """Send the end of a wait for an item."""
        pieces = encode_popped((length, item))
        if self.incremental is not None and self.incremental.determined:
            self.incremental.behind.extend(pieces)
            return
        self.out.extend(pieces)
        self.unsent += sum(map(len, pieces))
        self.engine.hub.pending_flush.append(self)

    def pass_over(self, queue: bytes) -> bool:
        owner = self.owner
        return isinstance(owner, Owner) and owner.pass_over(self.engine, queue)
