"""One memory budget for everything that peers make a server hold.

It knows what each thing costs in memory, which peer holds how much, and which one to evict when it is too much. It does
not know how bytes travel, opcodes, or what time it is.

A server may have many stores. One is active, the one in which something happens; what the others count does not change
and is among `others`.

Invariants: `used` counts the stores and what every session holds, overheads included. A session that leaves or is
evicted releases at once everything that no other session holds. Above the first mark the largest holder is evicted;
above the second mark no command enlarges the store; the rest, up to the limit, is for replies, incomplete requests and
connections.

What a reply and the store share is counted in both, but only once however many replies hold it. A peer's share of the
store is what the store grew by during its commands; when the store shrinks, all shares shrink in proportion.
"""

from collections.abc import Callable
from typing import Final

from ..base.errors import BudgetError
from ..keyspace.keyspace import Keyspace
from ..keyspace.steps import KeyListing
from ..keyspace.waiter_types import SharedWait, Waiter
from .unsent import CHUNK, Pins, Unsent

SESSION_BYTES: Final = 1024
"""Bytes counted for one idle connection of the event-driven server."""

_SHARES: Final = 16
"""The first mark lies 2/16 below the limit, the second 1/16."""

_STEP: Final = 128
"""1/128 of the budget is how much it must fill up before the next eviction, and the least that a victim holds."""

_SMALLEST_SCALE: Final = 1e-9


class StoreShare:
    """A store as the budget sees it."""

    def __init__(self, keyspace: Keyspace, serving: "Callable[[], Holder | None]") -> None:
        self.keyspace = keyspace
        self.serving = serving
        """Returns the peer of this store whose command was executed last."""
        self.counted: int = 0
        """While it is not active: its bytes among `Budget.others`."""
        self.stored: int = 0
        """The size of the store without waiters when `Budget.attribute` last ran."""
        self.scale: float = 1.0
        """Bytes that one unit of `Holder.stored` is worth now."""


class Holder(Waiter):
    """A peer as the budget sees it: what it makes the server hold."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: float = 0.0
        """Its share of its store, in units of `StoreShare.scale`."""
        self.held: int = 0
        """Bytes counted for its incomplete requests."""
        self.backlog: Unsent | None = None
        """Its replies that the kernel has not accepted; None while it accepts everything."""

    def share(self) -> StoreShare | None:
        """Return the store that it is in, if that is known."""
        return None

    def introduction_bytes(self) -> int:
        """Return the bytes counted for its INTRODUCE."""
        raise NotImplementedError

    def evict(self, error: BudgetError) -> None:
        """Release everything outside the store and have the connection closed."""
        raise NotImplementedError


class Budget(Pins):
    """Counts what all peers of one server make it hold, and evicts the largest holder when that is too much."""

    def __init__(self, limit: int, share: StoreShare, session_bytes: int = SESSION_BYTES) -> None:
        """`share` is the store that is never removed."""
        super().__init__()
        self.limit = limit
        self.session_bytes = session_bytes
        """Bytes counted for one connection of this kind of server."""
        self.root = share
        self.share = share
        """The active store."""
        self.keyspace = share.keyspace
        """Its keyspace."""
        self.clock = share.keyspace.clock
        self.others: int = 0
        """Bytes counted for everything but the active store, pinned pieces included."""
        self.lists: int = 0
        """Of these, bytes of lists of keys: see `KeyListCache`."""
        self.unfinished: int = 0
        """Of these, bytes of incomplete requests."""
        self.holders: dict[Holder, bool] = {}
        self.seen: int = 0
        """The size of the active store when `attribute` last ran."""
        self._listing: KeyListing | None = None
        """The last long reply to LIST_KEYS, for the next client that asks."""
        self._next: int = 0
        """Bytes that may be used before the next eviction."""
        self._first_mark: int = 0
        self._second_mark: int = 0
        self._wanted: int = -1
        """The size that the store is about to have, or -1; see `Clock.points`."""
        self.resize(limit)
        self.keyspace.on_full = self._evict_for_growth

    def resize(self, limit: int) -> None:
        """Set the limit, in bytes."""
        self.limit = limit
        self._first_mark = limit - 2 * (limit // _SHARES)
        self._second_mark = limit - limit // _SHARES
        self._next = self._first_mark
        self.charge(0)

    # Stores

    def add(self, share: StoreShare) -> None:
        """Count a new store, which is empty."""
        share.keyspace.on_full = self._evict_for_growth

    def switch(self, share: StoreShare) -> None:
        """Make another store the active one."""
        self.attribute()
        self._drop_listing()
        before = self.share
        before.counted = self.keyspace.size
        self.share = share
        self.keyspace = share.keyspace
        self.others += before.counted - share.counted
        share.counted = 0
        self.attribute()
        self.charge(0)

    def remove(self, share: StoreShare) -> None:
        """Stop counting a store, which has ended."""
        if self.share is share:
            self.switch(self.root)
        share.keyspace.on_full = None
        self.charge(-share.counted)
        share.counted = 0

    def used(self) -> int:
        """Return all bytes that are counted."""
        return self.keyspace.size + self.others

    def charge(self, amount: int) -> None:
        """Count so many bytes more, or less, outside the store."""
        self.others += amount
        keyspace = self.keyspace
        if amount < 0 and self._next > self._first_mark and keyspace.size + self.others <= self._first_mark:
            self._next = self._first_mark
        most = self._next
        keyspace.max_size = (most if most < self._second_mark else self._second_mark) - self.others

    def enter(self, holder: Holder, size: int) -> None:
        """Add a peer whose connection counts `size` bytes."""
        self.holders[holder] = True
        self.charge(size)

    def forget(self, holder: Holder, size: int) -> bool:
        """Remove a peer and what it holds outside the store; False if that was done before."""
        if not self.holders.pop(holder, False):
            return False
        if holder.backlog is not None:
            holder.backlog.release()
            holder.backlog = None
        self.charge(-size - holder.held - holder.introduction_bytes())
        holder.held = 0
        return True

    def attribute(self) -> None:
        """Add what the store has grown by to the serving peer's share, or shrink all shares of it in proportion."""
        keyspace = self.keyspace
        share = self.share
        self.seen = keyspace.size
        if self._listing is not None and self._listing.changes != keyspace.changes:
            self._drop_listing()
        before = share.stored
        stored = share.stored = keyspace.size - keyspace.parked
        if stored > before:
            holder = share.serving()
            if holder is not None:
                holder.stored += (stored - before) / share.scale
        elif stored < before:
            share.scale *= stored / before
            if share.scale < _SMALLEST_SCALE:
                for holder in self.holders:
                    if holder.share() is share or holder.share() is None:
                        holder.stored *= share.scale
                share.scale = 1.0

    def listing(self) -> KeyListing | None:
        """Return the cached reply to LIST_KEYS if the keys are still the same."""
        listing = self._listing
        return listing if listing is not None and listing.changes == self.keyspace.changes else None

    def expect_listing(self, size: int, holder: Holder) -> None:
        """Make sure that there is memory for a listing of so many bytes. Raises BudgetError if not."""
        self._drop_listing()
        self.charge(size)
        try:
            self.relieve(holder)
        finally:
            self.charge(-size)

    def keep_listing(self, listing: KeyListing) -> None:
        """Cache a listing until the keys change, so that clients that ask at the same time share one copy.

        Not if events are recorded: a listing that is dropped, as memory is short, would have to be an event.
        """
        if self.clock.recorder is None and listing.size > CHUNK and listing.changes == self.keyspace.changes:
            self._drop_listing()
            self._listing = listing
            self.charge(listing.size)

    def _drop_listing(self) -> None:
        listing = self._listing
        if listing is not None:
            self._listing = None
            self.charge(-listing.size)

    def relieve(self, holder: Holder) -> None:
        """Evict a peer if too much is used, now that `holder` holds more. Raises BudgetError if that is `holder`."""
        self.clock.points += 1
        if self.used() <= self._next or self._did_before(holder, -1):
            return
        self.attribute()
        self._drop_listing()
        used = self.used()
        victim, most = self._largest(self._holds)
        self._next = min(self.limit, max(self._first_mark, used + self.limit // _STEP))
        if victim is not None and most >= self.limit // _STEP:
            self._remove(victim, holder, most, used, self._first_mark)
        while self.used() > self.limit:
            used = self.used()
            victim, most = self._largest(self._releases)
            if victim is None or most < used - self.limit:
                victim = holder
            self._remove(victim, holder, most, used, self.limit)
        self.charge(0)

    def _evict_for_growth(self, growth: int) -> None:
        """Evict peers so that the store may grow above a mark. Raises BudgetError if it must not grow."""
        serving = self.share.serving()
        if self._did_before(serving, self.keyspace.size + growth):
            return
        self.attribute()
        self._drop_listing()
        used = self.used() + growth
        if used > self._next:
            victim, most = self._largest(self._holds)
            self._next = min(self.limit, max(self._first_mark, used + self.limit // _STEP))
            if victim is not None and most >= self.limit // _STEP:
                self._remove(victim, serving, most, used, self._first_mark)
        while self.used() + growth > self._second_mark:
            victim, most = self._largest(self._releases)
            if victim is None or victim is serving or most < self.used() + growth - self._second_mark:
                victim = serving
                most = 0 if serving is None else self._holds(serving)
            self._remove(victim, serving, most, used, self._second_mark)
        self.charge(0)

    def _did_before(self, serving: Holder | None, wanted: int) -> bool:
        """Evict whom it has evicted at this point, if events are executed again. Raises BudgetError."""
        self._wanted = wanted
        recorder = self.clock.recorder
        if recorder is None or not recorder.again:
            return False
        for victim in recorder.victims(wanted):
            self._remove(victim, serving, 0, 0, 0)
        return True

    def _remove(self, victim: Holder | None, serving: Holder | None, held: int, used: int, allowed: int) -> None:
        recorder = self.clock.recorder
        if recorder is not None:
            recorder.evicts(victim, self._wanted)
        if victim is None or victim is serving:
            self.charge(0)  # a local variable for the error would make a cycle with the frames, and the request in them
            raise BudgetError(used, allowed, self.limit, held)
        victim.evict(BudgetError(used, allowed, self.limit, held))

    def _largest(self, measure: Callable[[Holder], int]) -> tuple[Holder | None, int]:
        largest: Holder | None = None
        most = 0
        for holder in self.holders:
            size = measure(holder)
            if size > most:
                largest = holder
                most = size
        if self.orphaned > most:
            for holder in self.holders:
                size = 0 if holder.backlog is None else holder.backlog.referenced
                if size > most:
                    largest = holder
                    most = size
        return largest, most

    def _holds(self, holder: Holder) -> int:
        """Bytes that a peer holds, with its waiter and its shares of that waiter's group and of the store."""
        group = holder.group
        shared = group.weight // len(group.members) if isinstance(group, SharedWait) else 0
        share = holder.share()
        scale = self.share.scale if share is None else share.scale
        return self._releases(holder) + holder.weight + shared + int(holder.stored * scale)

    def _releases(self, holder: Holder) -> int:
        """Bytes that are free again at once if a peer is evicted."""
        backlog = holder.backlog
        unsent = 0 if backlog is None else backlog.cost + backlog.pinned
        return holder.held + holder.introduction_bytes() + unsent
