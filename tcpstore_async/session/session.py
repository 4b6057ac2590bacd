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

    def __init__(self, store: Store, owner: object, host: str, port: int, connected_at: float) -> None:
        super().__init__(owner, host, port, connected_at, store.handshake, store.first)
        self.store = store
        hub = store.hub
        (hub.unvalidated_on_links if self.shares_connection() else hub.unvalidated)[self] = True
        store.budget.enter(self, self._base_bytes())
        if hub.clock.recorder is not None:
            hub.clock.recorder.opened(self)
        self._relieve()

    def __str__(self) -> str:
        address = format_address(self.host, self.port)
        known = {} if self.pid == NO_PID else {"pid": str(self.pid)}
        known.update(self.peer)
        access = self.store.hub.auth.access_of(self)
        if access is not None:
            known["token"] = access.identity
        return f"{address} ({', '.join(f'{name} {text}' for name, text in known.items())})" if known else address

    # What it may do, and in which store

    def validate(self, magic: int) -> None:
        if magic != MAGIC:
            raise ProtocolError(f"VALIDATE carries {magic:#x}, expected {MAGIC:#x}")
        store = self.store
        auth = store.hub.auth
        if auth.granted or auth.require_auth or auth.elsewhere is not None:
            self.table = store.guards.table_of(self)
            if auth.must_authenticate(self):
                return
        else:
            self.table = store.commands
        self._expect_nothing()

    def grant_access(self, access: Access | None) -> None:
        if self.store.hub.clock.enters(self, "grant_access", access):
            return
        store = self.store
        if self.table is NO_COMMANDS:
            return
        store.guards.grant(self, access)
        if self.table is not store.handshake:
            self.table = store.guards.table_of(self)
            self._expect_nothing()

    def certify(self) -> None:
        """The peer has shown a certificate that the server demands, which allows everything unless tokens decide."""
        if self.store.hub.auth.authenticate is None:
            self.grant_access(None)

    def why_ended(self) -> str:
        return self.store.guards.why_ended(self)

    def expected(self) -> str:
        return "VALIDATE" if self.table is self.store.handshake else "AUTH"

    def plain_refused(self) -> NotAllowedError:
        """Return the error for a peer that must use TLS and does not; tell the peer."""
        self._alert()
        return NotAllowedError(
            "it uses plain TCP, but the server was started with --require-tls; use tcps://, or a relay"
        )

    def _alert(self) -> None:
        """Tell the peer that it uses TLS and the server does not, or the other way round."""
        self.out.append(MISMATCH)
        self.unsent += len(MISMATCH)

    def _stranger(self, what: str) -> NotAllowedError:
        """Return the error for a session that must authenticate and has not, or of a server that stands by."""
        return NotAllowedError(self.store.hub.auth.refuse(what))

    def move_to(self, store: Store) -> None:
        """Move the session to another store. What it wrote in the previous one counts for no session any longer."""
        before = self.store
        self.heard_at = NEVER
        authenticated = before.hub.auth.granted
        granted = self in authenticated
        access = authenticated.get(self)
        if granted:
            if access is not None:
                store.guards.expect(access, before.guards.why_ended(self))
            before.guards.revoke(self)
        self.store = store
        self.stored = 0.0
        before.serving = None
        if granted:
            store.guards.grant(self, access)
        self.table = store.guards.table_of(self)

    def came_back(self) -> None:
        """Note that its link has a connection again."""
        on_return = self.store.hub.on_return
        if on_return is not None:
            on_return(self)

    # What it holds

    def leave(self) -> None:
        store = self.store
        recorder = store.hub.clock.recorder
        if recorder is not None:
            if not recorder.inside:
                recorder.enter(self, "leave")
                return
            recorder.left(self)
        store.activate()
        if store.observer is not None:
            store.observer.leaves(self)
        keyspace = store.keyspace
        before = keyspace.charge(self.account())
        keyspace.leave(self)
        keyspace.charge(before)
        self._let_go()
        hub = store.hub
        if hub.auth.granted:  # not before, so that what goes back to the store is counted
            self.store.guards.revoke(self)  # it may just have been let into another store
        if hub.evicted:
            hub.evicted.pop(self, None)
        if hub.on_leave is not None:
            hub.on_leave(self)
        self.owner = None

    def evict(self, error: PeerError) -> None:
        hub = self.store.hub
        if hub.clock.enters(self, "evict", error):
            return
        hub.evicted[self] = error
        self.table = NO_COMMANDS
        self._let_go()
        hub.pending_flush.append(self)

    def share(self) -> StoreShare:
        return self.store.share

    def account(self) -> Account | None:
        return self.store.guards.account_of(self)

    def keep_unsent(self, replies: list[Framed], taken: int) -> None:
        """Queue replies of which the kernel has accepted the first `taken` bytes, behind those that are queued."""
        hub = self.store.hub
        if self in hub.evicted:
            return
        if hub.auth.must_authenticate(self):
            self.evict(self._stranger("not reading its replies"))
            return
        if self.backlog is None:
            self.backlog = Unsent(self.store.budget)
        self.backlog.add(replies, taken)
        self._relieve()

    def describe(self, peer: Introduction) -> None:
        """Keep what a relay says of the peer, unless the peer has said it itself."""
        if not self.peer and self.table is not NO_COMMANDS:
            self.peer = peer
            self.store.budget.charge(self.introduction_bytes())
            self._relieve()

    def _account(self) -> None:
        """Update the bytes counted for unfinished requests. Raises LimitError."""
        held = self._holds()
        if held != self.held:
            if held > _MOST_BEFORE_AUTH and self.store.hub.auth.must_authenticate(self):
                raise self._stranger(f"{self.slot.command.name} with more than {_MOST_BEFORE_AUTH} bytes")
            self._count_held(held)
            self.store.budget.relieve(self)

    def _holds(self) -> int:
        """Return the bytes held for unfinished requests."""
        held = 0 if self.input_buffer is None else _BUFFER_BYTES + len(self.input_buffer)
        if self.partial is not None:
            held += self.partial.held()
        if self.running is not None:
            held += self.running.held
        return held

    def _count_held(self, held: int) -> None:
        store = self.store
        growth = held - self.held
        self.held = held
        store.budget.unfinished += growth
        store.budget.charge(growth)

    def _let_go(self) -> None:
        """Release everything but what the keyspace holds."""
        store = self.store
        self._expect_nothing()
        store.budget.unfinished -= self.held
        store.budget.forget(self, self._base_bytes())
        if self.partial is not None:
            store.keyspace.free_later(self.partial.items)
            self.partial.abandon()
            self.partial = None
        self.input_buffer = None
        self.out.clear()
        self.unsent = 0
        running = self.running
        if running is not None:
            self.running = None
            running.abandon()
            if running.request is not None:
                store.keyspace.free_later(running.request)

    def _expect_nothing(self) -> None:
        """Stop awaiting VALIDATE and authentication."""
        hub = self.store.hub
        if self in hub.unvalidated:
            del hub.unvalidated[self]  # compiled, `pop` costs twice as much
        elif hub.unvalidated_on_links:
            hub.unvalidated_on_links.pop(self, False)

    def _relieve(self) -> None:
        """Have the budget evict a peer, perhaps this one, if too much is held now."""
        try:
            self.store.budget.relieve(self)
        except BudgetError as error:
            self.evict(error)

    def _base_bytes(self) -> int:
        """Return the bytes counted for the session and its connection."""
        return SESSION_BYTES if self.shares_connection() else self.store.budget.session_bytes

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
        if self.running is not None and self.running.determined:
            behind = self.running.behind
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
        self.store.hub.pending_flush.append(self)

    def grant(self, length: int, item: Framed | None) -> None:
        """Send the end of a wait for an item."""
        pieces = encode_popped((length, item))
        if self.running is not None and self.running.determined:
            self.running.behind.extend(pieces)
            return
        self.out.extend(pieces)
        self.unsent += sum(map(len, pieces))
        self.store.hub.pending_flush.append(self)

    def skip_suspended(self, queue: bytes) -> bool:
        owner = self.owner
        return isinstance(owner, Owner) and owner.skip_suspended(self.store, queue)
