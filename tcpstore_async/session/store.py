"""The stores of a server: a `Store` is one keyspace and its commands, the `Hub` what all of them share.

Neither knows how bytes travel, what time it is, or which features there are: these register the commands that they
execute (`Commands.register`).

Invariants: one store is active, the one in which something happens; the budget counts all of them. A store that has
ended is part of no cycle.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Final

from ..auth.access import Access
from ..base.errors import NotAllowedError, PeerError, ProtocolError
from ..base.limits import Limits
from ..keyspace.keyspace import Keyspace
from ..keyspace.steps import KeyListing, Later, Running, Steps
from ..wire.codecs import COUNTED_KEYS
from ..wire.commands import JOINS_KEY, SERVER_KEY, WORKERS_KEY
from ..wire.values import PREFIX, Framed, pack, unpack
from .auth import Auth, Guards
from .budget import SESSION_BYTES, Budget, StoreShare
from .key_list_cache import KeyListCache
from .peer import Peer
from .slots import Slot
from .table import Commands, Table, Watcher

PORTION: Final = 1000
"""Keys, or waiters, of a command that are handled in one step: half a millisecond at most, compiled."""

WRITES: Final = 1
EVERYTHING: Final = 2

_CLOSING: Final = 16
"""Closing a session costs as much as handling this many keys."""

_MAX_TOKEN: Final = PREFIX + 64
"""Bytes of the token of a rank that joins, framed."""


def _nobody() -> None:
    return None


class Hub(Commands):
    """What all stores of one server share."""

    def __init__(self, limits: Limits, budget: Budget) -> None:
        super().__init__()
        self.limits = limits
        self.budget = budget
        self.clock = budget.keyspace.clock
        self.auth = Auth(self, self.clock)
        self.root: Store
        """The store without a name, in which every session begins."""
        self.stores: dict[Store, None] = {}
        """All stores that sessions may be in, in order of creation."""
        self.pending_flush: list[Peer] = []
        """Sessions that another session's command gave output to, or evicted; the server flushes or closes them."""
        self.evicted: dict[Peer, PeerError] = {}
        """Sessions whose connections the server has to close, and why."""
        self.unvalidated: OrderedDict[Peer, bool] = OrderedDict()
        """Sessions on connections of their own that have not sent VALIDATE, oldest first."""
        self.unvalidated_on_links: OrderedDict[Peer, bool] = OrderedDict()
        """Sessions on links that have not sent VALIDATE, oldest first."""
        self.held: int = 0
        """What is not executed until the server's disk has space: 0 for nothing, WRITES, or EVERYTHING."""
        self.why_held: str = ""
        self.on_leave: Callable[[Any], object] | None = None
        """Called with each session that leaves."""
        self.on_return: Callable[[Any], object] | None = None
        """Called with each session whose link has a connection again."""
        self.register("validate", lambda store: lambda session, magic: session.validate(magic))
        self.register("ping", lambda store: lambda session, nonce: session.ping(nonce, self.clock))
        self.register("introduce", lambda store: lambda session, items: session.introduce(items, budget))
        self.register("join", lambda store: store.join)
        self.register("list_keys", lambda store: store.list_keys)

    def watch(self, watcher: Watcher) -> None:
        """Have each command in any store noted from now on. Without watchers, nothing is called for it."""
        self.watchers.append(watcher)
        if len(self.watchers) == 1:
            for store in self.stores:
                for slot in store.all_slots():
                    slot.watch(store.note)

    def unwatch(self, watcher: Watcher) -> None:
        """Undo `watch`. Idempotent."""
        if watcher in self.watchers:
            self.watchers.remove(watcher)
            if not self.watchers:
                for store in self.stores:
                    for slot in store.all_slots():
                        slot.unwatch()

    def end_invalid(self, ended: Callable[[Access], str]) -> None:
        """Refuse all commands of sessions whose token is no longer valid, and close their connections in portions.

        `ended` returns why that is so, or nothing.
        """
        if self.clock.enters(self, "end_invalid", ended):
            return
        invalid = [store.guards.end_invalid(ended) for store in self.stores]
        if any(invalid):
            self.evict_in_steps(list(self.auth.granted), _no_longer_valid)

    def evict_in_steps(self, sessions: list[Peer], why: Callable[[Peer], PeerError | None]) -> None:
        """Have the connections of many sessions closed, in portions.

        `why` returns why a session is to be closed; None if it is not, or has gone.
        """
        self.root.keyspace.defer(Later(self._evict_each(sessions, why)))

    def _evict_each(self, sessions: list[Peer], why: Callable[[Peer], PeerError | None]) -> Iterator[None]:
        while True:
            most = self.root.keyspace.portion
            while sessions and most > 0:
                session = sessions.pop()
                most -= 1
                error = None if session in self.evicted else why(session)
                if error is not None:
                    session.evict(error)
                    most -= _CLOSING
            if not sessions:
                return
            yield

    # Sessions that have not sent VALIDATE

    def oldest_unvalidated(self) -> Peer | None:
        """Return the session that has had a connection of its own for longest without sending VALIDATE."""
        return next(iter(self.unvalidated), None)

    def overdue(self, now: float) -> Peer | None:
        """Return a session that has exceeded `Limits.validate_seconds`; `now` is a time of the server's clock."""
        oldest = self.oldest_unvalidated()
        most = self.limits.validate_seconds
        return oldest if oldest is not None and most and now - oldest.connected_at >= most else None

    def overdue_on_links(self, now: float) -> list[Peer]:
        """Return the sessions on links that have exceeded it; the time without a connection does not count."""
        most = self.limits.validate_seconds
        found: list[Peer] = []
        for session in self.unvalidated_on_links if most else ():
            if now - session.connected_at < most:
                break
            if now - session.awaited_since() >= most:
                found.append(session)
        return found


class Store(Table):
    """One keyspace, and what its sessions share. (With 30 attributes, plain Python would be slower to look them up.)"""

    def __init__(
        self, limits: Limits, portion: int = PORTION, session_bytes: int = SESSION_BYTES, hub: Hub | None = None
    ) -> None:
        """Without `hub`, it is the store without a name of a new server; see `Hub.root`.

        `session_bytes` are counted for one connection of this kind of server.
        """
        keyspace = Keyspace(limits, portion)
        self.limits = limits
        self.share = StoreShare(keyspace, lambda: self.serving)
        root = None if hub is None else hub.root
        if hub is None:
            hub = Hub(limits, Budget(limits.budget_bytes, self.share, session_bytes))
            hub.root = self
        self.hub: Hub = hub
        self.budget: Budget = hub.budget
        """The hub's, which each command needs."""
        super().__init__(hub, keyspace, KeyListCache(keyspace, hub.budget, min(portion, PORTION)), root)
        self.guards = Guards(hub.auth, self)
        self.joins: int = 0
        """How many ranks the owner of this store expects to join, if it has one."""
        self.over = False
        """Whether the owner expected ranks and no longer does: the round is over."""
        self._listing: KeyListing | None = None
        """The reply to LIST_KEYS that is being made in steps."""
        hub.stores[self] = None

    def dispose(self) -> None:
        """Break the cycles of a store that has ended: nothing has to wait for the garbage collector."""
        self.clear()
        self.guards.clear()
        self.key_lists.lists.clear()
        self.hub.stores.pop(self, None)
        self.share.serving = _nobody
        self.share = self.hub.root.share

    def activate(self) -> None:
        """Have the budget count this store. To be called before anything changes in it outside of `receive`."""
        if self.budget.share is not self.share:
            self.budget.switch(self.share)

    def all_slots(self) -> list[Slot]:
        return [*super().all_slots(), *self.guards.all_slots()]

    def identify(self, identity: bytes) -> None:
        """Set the identity of this server, which clients of the extension read; see `session/identity.py`."""
        self.keyspace.reserved[SERVER_KEY] = pack(identity)

    def announce(self, joins: int) -> None:
        """Publish how many ranks the owner of this store expects to join, in all stores that it has made on it.

        0 means that the server is about to stop. Sessions that this wakes are in `Hub.pending_flush`.
        """
        if self.hub.clock.enters(self, "announce", joins):
            return
        self.activate()
        self.over = not joins and (self.over or self.joins > 0)
        self.joins = joins
        self.keyspace.reserve(JOINS_KEY, pack(b"%d" % joins), last=not joins)

    def all_joined(self) -> bool:
        """Whether as many ranks have joined as were announced."""
        joined = self.keyspace.values.get(WORKERS_KEY)
        return (joined if isinstance(joined, int) else 0) >= self.joins

    def join(self, session: Peer, key: bytes, token: Framed) -> int:
        """See `Keyspace.join`. Raises ProtocolError for a token that is too long, and when the round is over.

        A rank counted then would stay on a server that no other rank of its round will use.
        """
        if len(token) > _MAX_TOKEN:
            raise ProtocolError(f"JOIN with a token of {len(token) - PREFIX} bytes (max {_MAX_TOKEN - PREFIX})")
        if self.over and len(token) > PREFIX:
            raise ProtocolError("JOIN after the end of the round; the rank will join the next one")
        return self.keyspace.join(session, key, unpack(token))

    def list_keys(self) -> list[Framed]:
        """Reply to LIST_KEYS: one copy for all clients that ask while the keys are the same."""
        listing = self.budget.listing()
        if listing is not None:
            return listing.pieces
        keyspace = self.keyspace
        serving = self.serving
        assert serving is not None
        listing = self._listing
        size = 0
        if listing is None or listing.changes != keyspace.changes:
            keys = keyspace.list_keys()
            assert COUNTED_KEYS.measure is not None
            size = COUNTED_KEYS.measure(keys)
            self.budget.expect_listing(size, serving)
            listing = KeyListing(keys, size, keyspace.changes)
            if len(keys) <= keyspace.portion:
                listing.add(len(keys))
                self._keep_listing(listing)
                return listing.pieces
            self._listing = listing
        running = Running(self._encode_listing(listing))
        running.determined = True
        running.held = size
        keyspace.running = running
        return []

    def _encode_listing(self, listing: KeyListing) -> Steps:
        portion = self.keyspace.portion
        try:
            while not listing.is_complete():  # another client's command may complete it between two steps
                listing.add(portion)
                if listing.is_complete():
                    self._keep_listing(listing)
                else:
                    yield
        finally:
            if self._listing is listing:  # its client has left: nobody continues with what no snapshot has
                self._listing = None
        return listing.pieces

    def _keep_listing(self, listing: KeyListing) -> None:
        """Cache a complete listing."""
        if self._listing is listing:
            self._listing = None
        self.budget.keep_listing(listing)


def _no_longer_valid(session: Peer) -> PeerError | None:
    reason = session.why_ended()
    return NotAllowedError(reason) if reason else None
