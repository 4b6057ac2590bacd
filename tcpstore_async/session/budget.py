"""One budget for everything that peers make a server hold.

Knows: what each thing costs in memory, who holds how much, and who has to go when it is too much. Must not know: how
bytes travel, opcodes, what time it is.
Invariants: `used` is the store and what every session holds, overheads included; a session that leaves or is evicted
gives back at once all that nobody else holds. Above the first mark the largest holder goes; above the second no command
enlarges the store; what is left up to the limit is for replies, requests under way and connections.

What a reply and the store share is counted in both, but once, however many replies hold it. Who stored something is
known by growth: when the store shrinks, everybody's share shrinks alike.
"""

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final

from ..errors import BudgetError
from ..incremental import KeyListing
from ..keyspace import Keyspace, Waiter
from ..values import Framed

SESSION_BYTES: Final = 1024
"""What one connection of the event-driven server takes, without anything that it asks for."""

_UNSENT_BYTES: Final = 1024
"""What holds the unsent bytes of one peer; an empty deque is 760."""

_PIN_BYTES: Final = 256
"""What holds one piece of a reply that is kept by reference, or one of copied pieces."""

_SLOT_BYTES: Final = 9
"""What one more reference to such a piece takes."""

_COPIED: Final = 64
"""Pieces shorter than that are copied together: an object for each would cost many times its bytes."""

_CHUNK: Final = 32 * 1024
"""Length from which no more is added to a chunk of copied pieces."""

PIECES: Final = 256
"""Pieces that go out in one write."""

_SHARES: Final = 16
"""Parts of the budget, of which two lie above the first mark and one above the second."""

_STEP: Final = 128
"""The part of the budget by which it must fill up further before another one goes, and that makes a holder large."""

_SMALLEST_SCALE: Final = 1e-9


class _Pin:
    """A piece of a reply that is kept by reference, however often."""

    def __init__(self, cost: int, holder: "Unsent") -> None:
        self.cost = cost
        self.references = 1
        self.holder: Unsent | None = holder
        """Who is taken for the one that holds it; None if that one has let go of it, and others have not."""


class Unsent:
    """Bytes for one peer that the kernel has not taken, in order."""

    def __init__(self, budget: "Budget") -> None:
        self.budget = budget
        self.pieces: deque[Framed] = deque()
        self.taken: int = 0
        """How much of the first piece the kernel has taken."""
        self.cost: int = _UNSENT_BYTES
        """What it takes beside pinned pieces."""
        self.pinned: int = 0
        """What pieces take for which it is taken to be the holder."""
        self.referenced: int = 0
        """What pieces take to which it refers."""
        self._chunk: bytearray | None = None
        """The last piece, if it consists of copied ones and may grow."""
        budget.charge(_UNSENT_BYTES)

    def add(self, replies: list[Framed], taken: int = 0) -> None:
        """Keep replies, without their first `taken` bytes; those may be more than 0 if nothing is kept yet."""
        pieces = self.pieces
        before = self.cost
        for piece in replies:
            size = len(piece)
            if taken >= size:
                taken -= size
                continue
            if taken:
                self.taken = taken
                taken = 0
            elif size < _COPIED:
                chunk = self._chunk
                if chunk is None or len(chunk) >= _CHUNK:
                    chunk = self._chunk = bytearray()
                    pieces.append(chunk)
                    self.cost += _PIN_BYTES
                chunk += piece
                self.cost += size
                continue
            self._chunk = None
            pieces.append(piece)
            self.cost += _SLOT_BYTES
            self._pin(piece)
        self.budget.charge(self.cost - before)

    def batch(self) -> list[Framed | memoryview]:
        """What to write next."""
        batch: list[Framed | memoryview] = list(islice(self.pieces, PIECES))
        if self.taken:
            batch[0] = memoryview(batch[0])[self.taken :]
        return batch

    def took(self, count: int) -> bool:
        """The kernel took so many bytes more; whether those were all."""
        pieces = self.pieces
        before = self.cost
        count += self.taken
        while pieces and count >= len(pieces[0]):
            piece = pieces.popleft()
            count -= len(piece)
            self._drop(piece)
        self.taken = count
        if not pieces:
            self.cost = 0
        self.budget.charge(self.cost - before)
        return not pieces

    def release(self) -> None:
        """Let go of everything."""
        before = self.cost
        while self.pieces:
            self._drop(self.pieces.popleft())
        self.cost = 0
        self.budget.charge(-before)

    def _pin(self, piece: Framed) -> None:
        budget = self.budget
        pin = budget.pins.get(id(piece))
        if pin is None:
            pin = budget.pins[id(piece)] = _Pin(len(piece) + _PIN_BYTES, self)
            self.pinned += pin.cost
            budget.charge(pin.cost)
        else:
            pin.references += 1
            if pin.holder is None:
                pin.holder = self
                self.pinned += pin.cost
                budget.orphaned -= pin.cost
        self.referenced += pin.cost

    def _drop(self, piece: Framed) -> None:
        budget = self.budget
        pin = budget.pins.get(id(piece))
        if pin is None:
            if piece is self._chunk:
                self._chunk = None
            self.cost -= len(piece) + _PIN_BYTES
            return
        self.cost -= _SLOT_BYTES
        self.referenced -= pin.cost
        pin.references -= 1
        if pin.holder is self:
            pin.holder = None
            self.pinned -= pin.cost
            budget.orphaned += pin.cost
        if not pin.references:
            del budget.pins[id(piece)]
            budget.orphaned -= pin.cost
            budget.charge(-pin.cost)


class Holder(Waiter):
    """One peer, and what it makes the server hold."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: float = 0.0
        """How much of the store it has made, in units of `Budget.scale`."""
        self.held: int = 0
        """What is kept of its unfinished requests."""
        self.backlog: Unsent | None = None
        """What the kernel has not taken of its replies; None while it takes everything."""

    def introduction(self) -> int:
        """Bytes kept of its introduction."""
        raise NotImplementedError

    def evict(self, error: BudgetError) -> None:
        """Let go of everything that can be let go of, and have the connection closed."""
        raise NotImplementedError


class Budget:
    """What all peers of one server make it hold."""

    def __init__(self, limit: int, keyspace: Keyspace, serving: Callable[[], Holder | None]) -> None:
        self.limit = limit
        self.keyspace = keyspace
        self.serving = serving
        """Whose command is being done."""
        self.others: int = 0
        """Everything but the store."""
        self.orphaned: int = 0
        """Of that, what pinned pieces take that nobody in particular holds."""
        self.pins: dict[int, _Pin] = {}
        """By the identity of the piece."""
        self.holders: dict[Holder, bool] = {}
        self.seen: int = 0
        """The size of the store when it was last looked at."""
        self._stored: int = 0
        """The same without waiters."""
        self._listing: KeyListing | None = None
        """The last long list of keys that somebody was sent, for whoever asks for it next."""
        self._scale: float = 1.0
        """What one unit of `Holder.stored` is now, in bytes."""
        self._next: int = 0
        """What may be used before the next one goes."""
        self._first_mark: int = 0
        self._second_mark: int = 0
        self.resize(limit)
        keyspace.full = self._full

    def resize(self, limit: int) -> None:
        """Allow for so much."""
        self.limit = limit
        self._first_mark = limit - 2 * (limit // _SHARES)
        self._second_mark = limit - limit // _SHARES
        self._next = self._first_mark
        self.charge(0)

    def used(self) -> int:
        """Bytes that are counted."""
        return self.keyspace.size + self.others

    def charge(self, amount: int) -> None:
        """Count so much more, or less."""
        self.others += amount
        keyspace = self.keyspace
        if amount < 0 and self._next > self._first_mark and keyspace.size + self.others <= self._first_mark:
            self._next = self._first_mark
        most = self._next
        keyspace.max_size = (most if most < self._second_mark else self._second_mark) - self.others

    def enter(self, holder: Holder, size: int) -> None:
        """A peer has come, whose connection takes `size` bytes."""
        self.holders[holder] = True
        self.charge(size)

    def forget(self, holder: Holder, size: int) -> bool:
        """A peer goes: give back what it holds, except what is stored, and its waiters; whether it was known."""
        if not self.holders.pop(holder, False):
            return False
        if holder.backlog is not None:
            holder.backlog.release()
            holder.backlog = None
        self.charge(-size - holder.held - holder.introduction())
        holder.held = 0
        return True

    def attribute(self) -> None:
        """Note who has made the store larger, or that it is smaller."""
        keyspace = self.keyspace
        self.seen = keyspace.size
        if self._listing is not None and self._listing.changes != keyspace.changes:
            self._drop_listing()
        before = self._stored
        stored = self._stored = keyspace.size - keyspace.parked
        if stored > before:
            holder = self.serving()
            if holder is not None:
                holder.stored += (stored - before) / self._scale
        elif stored < before:
            self._scale *= stored / before
            if self._scale < _SMALLEST_SCALE:
                for holder in self.holders:
                    holder.stored *= self._scale
                self._scale = 1.0

    def listing(self) -> KeyListing | None:
        """The list of keys as it is sent, if it is still at hand."""
        listing = self._listing
        return listing if listing is not None and listing.changes == self.keyspace.changes else None

    def expect_listing(self, size: int, holder: Holder) -> None:
        """Make room for a list of so many bytes. Raises BudgetError if there is none."""
        self._drop_listing()
        self.charge(size)
        try:
            self.relieve(holder)
        finally:
            self.charge(-size)

    def keep_listing(self, listing: KeyListing) -> None:
        """Have the list at hand until it changes: those who ask for it at once must not get a copy each."""
        if listing.size > _CHUNK and listing.changes == self.keyspace.changes:
            self._drop_listing()
            self._listing = listing
            self.charge(listing.size)

    def _drop_listing(self) -> None:
        listing = self._listing
        if listing is not None:
            self._listing = None
            self.charge(-listing.size)

    def relieve(self, holder: Holder) -> None:
        """Have somebody go if too much is used now that `holder` holds more. Raises BudgetError if that is `holder`."""
        if self.used() <= self._next:
            return
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

    def _full(self, growth: int) -> None:
        """The store is about to grow above a mark. Raises BudgetError if it must not."""
        self.attribute()
        self._drop_listing()
        serving = self.serving()
        used = self.used() + growth
        if used > self._next:
            victim, most = self._largest(self._holds)
            self._next = min(self.limit, max(self._first_mark, used + self.limit // _STEP))
            if victim is not None and most >= self.limit // _STEP:
                self._remove(victim, serving, most, used, self._first_mark)
        while self.used() + growth > self._second_mark:
            victim, most = self._largest(self._releases)
            if victim is None or victim is serving or most < self.used() + growth - self._second_mark:
                self.charge(0)
                raise BudgetError(used, self._second_mark, self.limit, 0 if serving is None else self._holds(serving))
            self._remove(victim, serving, most, used, self._second_mark)
        self.charge(0)

    def _remove(self, victim: Holder, serving: Holder | None, held: int, used: int, allowed: int) -> None:
        if victim is serving:
            self.charge(0)  # what is raised has no name here: its frames, and the request in them, would be in a cycle
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
        """What it holds, and what it has stored."""
        return self._releases(holder) + holder.weight + int(holder.stored * self._scale)

    def _releases(self, holder: Holder) -> int:
        """What is free again at once if it goes."""
        backlog = holder.backlog
        unsent = 0 if backlog is None else backlog.cost + backlog.pinned
        return holder.held + holder.introduction() + unsent
