"""What commands mean: values, counters, queues and the waiters parked on keys that do not exist yet.

Knows: what each command does to the store and whom it wakes. Must not know: framing, sockets, threads, clocks.
Invariants: a command is applied whole or, when it raises, not at all. A waiter fires when the keys it was parked on
have appeared, once, and holds no registration that nobody can fire. If waiters, other than those in a barrier of that
name, are parked on a queue that holds items, then each of those items is promised to a waiter that was woken and has
not been heard of since. An item that was leased is in its queue's stead with the waiter, until it confirms it; given
back, or left behind, it is at the front again.

The counting is PyTorch's libuv server's to the byte, except for the queue defects listed in `docs/quirks.md`.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Final

from .errors import LimitError, ProtocolError
from .incremental import (
    DeferredWork,
    FreeItems,
    FreeTokens,
    FreeValue,
    IncrementalCommand,
    MarkStale,
    ParkOnKeys,
    PostponedWaitCount,
    ReadKeys,
    ReplyInPieces,
    UnparkDeparted,
    UnparkFirst,
    Value,
    WakeAtCount,
    WakeMany,
)
from .limits import ENTRY_BYTES, PARKED_BYTES, QUEUE_BYTES, Limits
from .values import (
    CHUNKED_BYTES,
    COUNTER_SIZE,
    EMPTY,
    NO_BLOB,
    Blob,
    Framed,
    Growing,
    framed,
    number,
    size,
    unpack,
    wrap,
)

KeySet = set[bytes]

_LONG_QUEUE: Final = 16
"""Waiters in line for one key from which the holes of those who left it are counted."""

_HOLES: Final = 16
"""A line of n is made anew once it has more than the root of this times n holes: the copy and skipping them balance."""

_UNCUT: Final = 2**62
"""A portion that holds everything."""

_LARGE: Final = 4 * 1024 * 1024
"""A value under APPEND of so many bytes is not freed at once."""


class Handoff:
    """An item of a queue that a woken waiter is expected to take with its next command."""

    def __init__(self, queue: bytes) -> None:
        self.queue = queue


class Waiter:
    """Someone who may be parked on keys. The owner overrides `fire`."""

    def __init__(self) -> None:
        self.remaining: int = 0
        """Registrations to come before the waiter fires; 0 or less: nothing is awaited."""
        self.parked: KeySet | None = None
        """Keys under which the waiter is registered."""
        self.barrier: bytes | None = None
        """The barrier it is in: an item of a queue of that name must not be handed on to it."""
        self.handoff: Handoff | None = None
        """What the waiter was woken for, until its next command."""
        self.fetching: bytes | None = None
        """The key whose value it is to be told when it fires."""
        self.counter: Counter | None = None
        """The counter that it waits for, instead of keys."""
        self.target: int = 0
        """What that counter has to reach."""
        self.popping: tuple[bytes, int] | None = None
        """The queue of which it awaits an item, and the ticket under which that will be leased to it."""
        self.leases: dict[int, tuple[bytes, Framed]] | None = None
        """Per ticket, the queue and the item that it was given and has not confirmed, oldest first."""
        self.joined: tuple[bytes, bytes] | None = None
        """The counter of ranks that it has joined, and the token of the rank that it stands for."""
        self.weight: int = 0
        """What its registrations count."""

    def fire(self, value: Value | None) -> None:
        """Tell the waiter that its wait is over, and the value if it is fetching one. Must not call back."""
        raise NotImplementedError

    def grant(self, length: int, item: Framed | None) -> None:
        """Tell the waiter that its wait for an item is over, and what `lease` has come to. Must not call back."""
        raise NotImplementedError


class CallbackWaiter(Waiter):
    """A waiter that calls somebody, who must not call back into the keyspace."""

    def __init__(self, ring: Callable[[], object]) -> None:
        super().__init__()
        self.ring = ring

    def fire(self, value: Value | None) -> None:
        self.ring()


class Counter(Waiter):
    """Those who wait until a counter reaches a number: one waiter under its key, whatever is written there.

    Each write looks at the smallest number only, so n writes with m waiters cost n + m and not n * m.
    """

    def __init__(self, keyspace: "Keyspace", key: bytes) -> None:
        super().__init__()
        self.keyspace = keyspace
        self.key = key
        self.targets: list[int] = []
        """A heap; of those whom nobody awaits any more, some are left."""
        self.awaiting: dict[int, dict[Waiter, None]] = {}
        self.reaching: WakeAtCount | None = None
        """What tells those who need not wait any longer, if they are many."""

    def fire(self, value: Value | None) -> None:
        self.keyspace.count(self)

    def enter(self, waiter: Waiter, target: int) -> None:
        waiter.counter = self
        waiter.target = target
        waiter.remaining = 1
        crowd = self.awaiting.get(target)
        if crowd is None:
            crowd = self.awaiting[target] = {}
            heappush(self.targets, target)
        crowd[waiter] = None

    def leave(self, waiter: Waiter) -> None:
        waiter.counter = None
        waiter.remaining = 0
        crowd = self.awaiting[waiter.target]
        del crowd[waiter]
        if crowd:
            return
        del self.awaiting[waiter.target]
        if len(self.targets) > 2 * len(self.awaiting) + _LONG_QUEUE:
            self.targets = list(self.awaiting)
            heapify(self.targets)

    def next_reached(self, total: int) -> Waiter | None:
        """One of those who need not wait any longer, if there is any."""
        while self.targets and self.targets[0] <= total:
            crowd = self.awaiting.get(self.targets[0])
            if crowd is None:
                heappop(self.targets)
                continue
            waiter = crowd.popitem()[0]
            if not crowd:
                del self.awaiting[heappop(self.targets)]
            return waiter
        return None


class Joins:
    """The ranks that have joined one counter, each by a token of its own."""

    def __init__(self) -> None:
        self.connections: dict[bytes, int] = {}
        """Per token, how many waiters stand for that rank; negative if one of them has said that it leaves."""
        self.lost: int = 0
        """Tokens for which nobody stands any more, though nobody said so."""
        self.size: int = 0
        """What the tokens count."""


class Keyspace:
    """One store. Keys and values are opaque; values are blobs (see `blob`)."""

    def __init__(self, limits: Limits, portion: int = _UNCUT) -> None:
        self.portion = portion
        """Keys, or waiters, of a command that are dealt with at once; with more than that it is done in steps."""
        self.job: IncrementalCommand | None = None
        """What the command that was just called has left to do. Whoever called takes it, and its result is that."""
        self.reading: ReadKeys | None = None
        """The one that is told before anything changes."""
        self.work: deque[DeferredWork] = deque()
        """What commands that are over have left to do; see `step`."""
        self.working = False
        """Whether there is any: asking a deque takes longer."""
        self.on_work: Callable[[], object] | None = None
        """Called when there is work, and was none."""
        self.values: dict[bytes, Blob] = {}
        self.queues: dict[bytes, deque[Framed]] = {}
        self.waiters: dict[bytes, dict[Waiter, int]] = {}
        """Per key, who is registered how often, in order of arrival; negative: left over from a wait that is done."""
        self.stale: dict[bytes, dict[Waiter, int]] = {}
        """Per key, the negative ones that a queue has passed over: they come before the line, which may be empty."""
        self.unmarked: set[Waiter] = set()
        """Those who have registrations left over that do not say so yet: they must not be parked before those do."""
        self.counters: dict[bytes, Counter] = {}
        """Per key, those who wait until it reaches a number."""
        self.reserved: dict[bytes, Framed] = {}
        """What the server says of itself: there when it is asked for by name, but no key of the store."""
        self.final: set[bytes] = set()
        """Those of them that will not change any more, so that nobody waits until they do."""
        self.holes: dict[bytes, int] = {}
        """Per key with a long line, how many have left it since it was made."""
        self.handoffs: dict[bytes, int] = {}
        """Per queue, how many woken waiters have not been heard of since."""
        self.joins: dict[bytes, Joins] = {}
        """Per counter, who has joined it."""
        self.size: int = 0
        """Bytes counted for everything here."""
        self.parked: int = 0
        """Of those, what waiters count."""
        self.changes: int = 0
        """How often a value's key has come or gone."""
        self.max_size: int = limits.budget_bytes
        """The size above which growing needs leave."""
        self.max_reply: int = limits.budget_bytes
        """More than that is not put together for a reply."""
        self.full: Callable[[int], None] | None = None
        """Gives leave to grow above `max_size` by so many bytes, or raises LimitError."""

    # Work

    def defer(self, work: DeferredWork) -> None:
        """Leave work for `step`."""
        self.work.append(work)
        self.working = True
        if len(self.work) == 1 and self.on_work is not None:
            self.on_work()

    def step(self) -> None:
        """Do a portion of the work. There must be some."""
        work = self.work[0]
        if work.step(self.portion):
            self.work.popleft()
            self.working = len(self.work) > 0

    def resolve(self, waiter: Waiter) -> None:
        """Do the work that concerns a waiter, before it says anything else."""
        for work in self.work:
            work.resolve(waiter)

    # Values

    def set(self, key: bytes, value: Framed) -> None:
        if self.reading is not None:
            self.reading.note(key)
        old = self.values.get(key)
        # The common case, without a call.
        if isinstance(old, bytes) and (grown := self.size + len(value) - len(old)) <= self.max_size:
            self.size = grown
            self.values[key] = value
        else:
            self._put(key, old, value, len(value))
        if key in self.waiters:
            self._wake_all(key)

    def get(self, key: bytes) -> Framed:
        """The value; the empty one if the key is missing."""
        blob = self.values.get(key)
        if isinstance(blob, bytes):
            return blob
        if blob is None:
            return self.reserved.get(key, EMPTY)
        if self._chunked(blob):
            self.job = ReplyInPieces(self.read(key, whole=True) or [])
            return EMPTY
        return self._flatten(key, blob)

    def there(self, key: bytes) -> bool:
        """Whether a key is there, as a value, as a queue that holds items or as what the server says of itself."""
        return key in self.values or key in self.queues or key in self.reserved

    def read(self, key: bytes, whole: bool) -> list[Framed] | None:
        """The value in pieces, the empty one if it is missing; or, if that is not asked for, none at all if it is."""
        if not whole:
            return [] if self.there(key) else None
        blob = self.values.get(key)
        if blob is None:
            return [self.reserved.get(key, EMPTY)]
        return blob.read() if isinstance(blob, Growing) else [framed(blob)]

    def _chunked(self, blob: Blob) -> bool:
        """Whether a value is too large to be copied for a reply."""
        return isinstance(blob, Growing) and blob.size >= CHUNKED_BYTES and self.portion != _UNCUT

    def _flatten(self, key: bytes, blob: Blob) -> Framed:
        """The blob of a key as it goes into a reply; one that was appended to is kept so."""
        flat = framed(blob)
        if isinstance(blob, Growing):
            self._put(key, blob, flat, len(flat))
        return flat

    def _value(self, key: bytes) -> Value:
        """The value of a key for those who fetch it."""
        blob = self.values.get(key)
        if blob is None:
            return EMPTY
        return blob.read() if isinstance(blob, Growing) and self._chunked(blob) else self._flatten(key, blob)

    def add(self, key: bytes, amount: int) -> int:
        """Add to a counter and return the sum. Raises ProtocolError if the value is no number."""
        old = self.values.get(key)
        if old is None:
            total = amount
            self._put(key, None, total, COUNTER_SIZE)
        elif isinstance(old, int):
            if self.reading is not None:
                self.reading.note(key)
            total = wrap(old + amount)
            self.values[key] = total
        else:
            total = wrap(number(old) + amount)
            self._put(key, old, total, COUNTER_SIZE)
        if key in self.waiters:
            self._wake_all(key)
        return total

    def compare_set(self, key: bytes, expected: Framed, desired: Framed) -> Framed:
        """Store `desired` if the value equals `expected`, a missing key counting as empty.

        Returns the value afterwards; for a missing key that was expected to hold something, `expected`.
        """
        if key not in self.values:
            if len(expected) != len(EMPTY):
                return expected
        else:
            blob = self.values[key]
            if self._chunked(blob) and size(blob) == len(expected):
                current = framed(blob)
                if current != expected:
                    return self.get(key)
            else:
                current = self.get(key)
                if self.job is not None or current != expected:
                    return current
        self.set(key, desired)
        return desired

    def append(self, key: bytes, value: Framed) -> None:
        old = self.values.get(key)
        if old is None:
            self._put(key, None, value, len(value))
        else:
            if self.reading is not None:
                self.reading.note(key)
            piece = unpack(value)
            if isinstance(old, Growing):
                growing = old
                growth = len(piece)
                self._grow(growth)
            else:
                flat = framed(old)
                growth = len(flat) - size(old) + len(piece)
                self._grow(growth)
                growing = Growing(unpack(flat))
                self.values[key] = growing
            growing.append(piece)
            self.size += growth
        if key in self.waiters:
            self._wake_all(key)

    def check(self, keys: list[bytes]) -> bool:
        """Whether every key is there, a queue that holds items included."""
        if len(keys) > self.portion:
            self.job = ReadKeys(self, keys, whole=False)
            return False
        values = self.values
        for key in keys:
            if key not in values and key not in self.queues and key not in self.reserved:
                return False
        return True

    def _elsewhere(self, key: bytes) -> bool:
        """Whether a key that is no value is there nevertheless."""
        return key in self.queues or key in self.reserved

    def delete_key(self, key: bytes) -> int:
        """Remove a value, never a queue; 1 if it was there, else 0. Wakes nobody."""
        if self.reading is not None:
            self.reading.note(key)
        old = self.values.pop(key, None)
        if old is None:
            return 0
        self.size -= len(key) + ENTRY_BYTES + size(old)
        if key in self.joins:
            joins = self.joins.pop(key)
            self.size -= joins.size
            if len(joins.connections) > self.portion:
                self.defer(FreeTokens(joins.connections))
        self.changes += 1
        if isinstance(old, Growing):
            self._drop(old)
        return 1

    def _drop(self, growing: Growing) -> None:
        """Nobody will ask for this value again: one that is large is freed in steps."""
        if growing.size >= _LARGE and self.portion != _UNCUT:
            self.defer(FreeValue(growing))

    def num_keys(self) -> int:
        return len(self.values)

    def list_keys(self) -> list[bytes]:
        return list(self.values)

    def multi_get(self, keys: list[bytes]) -> list[Framed]:
        values: list[Framed] = []
        if len(keys) > self.portion:
            self.job = ReadKeys(self, keys, whole=True)
            return values
        large = 0
        for key in keys:
            blob = self.values.get(key)
            if isinstance(blob, bytes):
                values.append(blob)
            elif isinstance(blob, Growing) and self._chunked(blob):
                large += size(blob)
                if large <= self.max_reply:
                    values.extend(blob.read())
            else:
                values.append(self.get(key))
        if large > self.max_reply:
            raise LimitError("budget_bytes", large, self.max_reply)
        return values

    def multi_set(self, items: list[tuple[bytes, Framed]]) -> None:
        """Set every pair in order, or none if the store would grow too large."""
        growth = 0
        for key, value in items:
            if key in self.reserved:
                self._growth(key, None, 0)
            growth += len(key) + ENTRY_BYTES + len(value)
        values = self.values
        if self.size + growth > self.max_size:  # if none of them is there yet
            growth = 0
            for key, value in dict(items).items():
                growth += self._growth(key, values.get(key), len(value))
            self._grow(growth)
        grown = 0
        for key, value in items:
            if self.reading is not None:
                self.reading.note(key)
            old = values.get(key)
            if isinstance(old, bytes):
                grown += len(value) - len(old)
            elif old is None:
                grown += len(key) + ENTRY_BYTES + len(value)
                self.changes += 1
            else:
                grown += len(value) - size(old)
                if isinstance(old, Growing):
                    self._drop(old)
            values[key] = value
            if key in self.waiters:
                self._wake_all(key)
        self.size += grown
        if len(items) > self.portion:
            self.defer(FreeItems(items))

    # Queues

    def queue_push(self, key: bytes, value: Framed) -> None:
        """Append to a queue and wake the first in line for it. Raises ProtocolError for a key not to be written."""
        queue = self.queues.get(key)
        growth = ENTRY_BYTES + len(value)
        if queue is None:
            growth += len(key) + QUEUE_BYTES
        self._grow(growth)
        if queue is None:
            if key in self.reserved:
                raise ProtocolError(f"{key.decode()} is not to be written")
            if self.reading is not None:
                self.reading.note(key)
            queue = self.queues[key] = deque()
        queue.append(value)
        self.size += growth
        if key in self.waiters:
            self._wake_next(key)

    def queue_pop(self, key: bytes) -> tuple[int, Framed | None]:
        """The length before the pop and, unless that is 0, the oldest item."""
        queue = self.queues.get(key)
        if queue is None:
            return 0, None
        length = len(queue)
        item = queue.popleft()
        if not queue:
            if self.reading is not None:
                self.reading.note(key)
            del self.queues[key]
            self.size -= len(key) + QUEUE_BYTES
        self.size -= ENTRY_BYTES + len(item)
        return length, item

    def queue_len(self, key: bytes) -> int:
        queue = self.queues.get(key)
        return 0 if queue is None else len(queue)

    # What the server says of itself

    def reserve(self, key: bytes, value: Framed, last: bool = False) -> None:
        """Say something, and tell those who wait until that reaches a number; if it is the last word, all of them."""
        self.reserved[key] = value
        if last:
            self.final.add(key)
        counter = self.counters.get(key)
        if counter is None:
            return
        self._unpark(counter)
        if last:
            for target in list(counter.awaiting):
                for waiter in list(counter.awaiting[target]):
                    self._leave_counter(waiter, counter)
                    waiter.fire(None)
        else:
            self.count(counter)

    # Queues, confirmed

    def lease(self, waiter: Waiter, key: bytes, ticket: int) -> tuple[int, Framed | None]:
        """As `queue_pop`, but the item is the waiter's only once it confirms the ticket.

        Raises ProtocolError for a ticket that is in use.
        """
        leases = waiter.leases
        if (leases is not None and ticket in leases) or (waiter.popping is not None and waiter.popping[1] == ticket):
            raise ProtocolError(f"ticket {ticket} is in use")
        queue = self.queues.get(key)
        if queue is None:
            return 0, None
        length = len(queue)
        item = queue.popleft()
        if not queue:
            if self.reading is not None:
                self.reading.note(key)
            del self.queues[key]
            self.size -= len(key) + QUEUE_BYTES
        if leases is None:
            leases = waiter.leases = {}
        leases[ticket] = (key, item)
        self.size += PARKED_BYTES + len(key)  # whatever the limit: a store that is full must be emptied
        return length, item

    def lease_later(self, waiter: Waiter, key: bytes, ticket: int) -> tuple[int, Framed | None] | None:
        """The same, unless nothing of that name is there: then None, and the waiter is told when something is."""
        popped = self.lease(waiter, key, ticket)
        if popped[0] or key in self.values or key in self.reserved:
            return popped
        self._demand_idle(waiter)
        if self._many_parked(waiter):
            self.job = UnparkFirst(self, waiter, partial(self.lease_later, waiter, key, ticket))
            return None
        self._grow(self._parking(key))
        self._unpark(waiter)
        self.park(waiter, [key])
        waiter.popping = (key, ticket)
        return None

    def confirm(self, waiter: Waiter, ticket: int) -> None:
        """The item that was leased under this ticket, if any is, has come where it should."""
        leases = waiter.leases
        if leases is not None and ticket in leases:
            key, item = leases.pop(ticket)
            self.size -= PARKED_BYTES + len(key) + ENTRY_BYTES + len(item)
            if not leases:
                waiter.leases = None

    def give_back(self, waiter: Waiter, ticket: int) -> Framed:
        """Nobody wants what was, or would be, leased under this ticket; for a wait that ends so, what stands for that.

        An item comes to the front of its queue, and the next in line is woken.
        """
        if waiter.popping is not None and waiter.popping[1] == ticket:
            self._unpark(waiter)
            return NO_BLOB
        leases = waiter.leases
        if leases is not None and ticket in leases:
            self._restore([leases.pop(ticket)])
            if not leases:
                waiter.leases = None
        return b""

    def _restore(self, leased: list[tuple[bytes, Framed]]) -> None:
        """Put items back where they were, the oldest first in front; each wakes the next in line, as a push does."""
        for key, item in reversed(leased):
            queue = self.queues.get(key)
            if queue is None:
                if self.reading is not None:
                    self.reading.note(key)
                queue = self.queues[key] = deque()
                self.size += len(key) + QUEUE_BYTES
            queue.appendleft(item)
            self.size -= PARKED_BYTES + len(key)
        for key, _ in leased:
            if key in self.waiters:
                self._wake_next(key, handed_on=True)

    # Ranks

    def join(self, waiter: Waiter, key: bytes, token: bytes) -> int:
        """Add 1 to a counter, once for each token, and return the sum; from now on the waiter stands for that rank.

        With an empty token nothing is added; the sum is less by those for whom nobody stands any more, though they have
        not said that they leave. Raises ProtocolError if the value is no number.
        """
        joins = self.joins.get(key)
        if not token:
            return wrap(self._count(key) - (0 if joins is None else joins.lost))
        known = joins is not None and token in joins.connections
        if known:
            total = self._count(key)
        else:
            old = self.values.get(key)
            if old is not None:
                number(old)
            self._grow(self._growth(key, old, COUNTER_SIZE) + self._parking(token))
        if joins is None:
            joins = self.joins[key] = Joins()
        if not known:
            joins.connections[token] = 0
            joins.lost += 1
            self.size += self._parking(token)
            joins.size += self._parking(token)
            total = self.add(key, 1)
        if waiter.joined != (key, token):
            self.depart(waiter)
            standing = joins.connections[token]
            if standing >= 0:
                joins.connections[token] = standing + 1
                joins.lost -= standing == 0
            waiter.joined = (key, token)
        return total

    def depart(self, waiter: Waiter) -> None:
        """The waiter stands for no rank any more; that one has not been lost."""
        if waiter.joined is None:
            return
        key, token = waiter.joined
        waiter.joined = None
        joins = self.joins.get(key)
        if joins is not None and token in joins.connections:
            joins.lost -= joins.connections[token] == 0
            joins.connections[token] = -1

    def _lose(self, waiter: Waiter, key: bytes, token: bytes) -> None:
        joins = self.joins.get(key)
        waiter.joined = None
        if joins is not None and (standing := joins.connections.get(token, -1)) > 0:
            joins.connections[token] = standing - 1
            joins.lost += standing == 1

    # Waiting

    def wait(self, waiter: Waiter, keys: list[bytes]) -> bool:
        """True if every key is there (as `check` sees it); else the waiter is parked on the missing ones."""
        if self.unmarked and waiter in self.unmarked:
            self.job = MarkStale(self, waiter, partial(self.wait, waiter, keys))
            return False
        if len(keys) > self.portion:
            self.job = ParkOnKeys(self, waiter, keys)
            return False
        if self.check(keys):
            handoff = waiter.handoff
            if handoff is not None and handoff.queue in keys:
                waiter.handoff = self.handoff(handoff.queue)
            return True
        missing = [key for key in keys if key not in self.values and not self._elsewhere(key)]
        self.park(waiter, missing)
        return False

    def fetch(self, waiter: Waiter, key: bytes) -> Framed | None:
        """The value if the key is there, as `check` sees it; else None, and the waiter is told it when it fires."""
        value = self.values.get(key)
        if isinstance(value, bytes):  # the common case, without a call
            return value
        if value is not None or self._elsewhere(key):
            return self.get(key)
        self._demand_idle(waiter)
        if self._many_parked(waiter):
            self.job = UnparkFirst(self, waiter, partial(self.fetch, waiter, key))
            return None
        self._grow(self._parking(key))
        self._unpark(waiter)
        self.park(waiter, [key])
        waiter.fetching = key
        return None

    def cancel_fetch(self, waiter: Waiter) -> Framed:
        """As `cancel_wait`; it returns what stands for no value."""
        if self._many_parked(waiter):
            self._end_waits(waiter)
            self.job = UnparkFirst(self, waiter, lambda: NO_BLOB)
        else:
            self._unpark(waiter)
        return NO_BLOB

    def wait_count(self, waiter: Waiter, key: bytes, target: int) -> bool:
        """True if the key's number, 0 if it is missing, is at least `target`; else the waiter is parked until it is.

        Raises ProtocolError if the value is no number.
        """
        self._demand_idle(waiter)
        if self._count(key) >= target or key in self.final:
            return True
        if self._many_parked(waiter):
            self.job = UnparkFirst(self, waiter, partial(self.wait_count, waiter, key, target))
            return False
        counter = self.counters.get(key)
        if counter is not None and counter.reaching is not None and target <= counter.reaching.total:
            self.job = PostponedWaitCount(counter, target, partial(self.wait_count, waiter, key, target))
            return False
        self._grow(self._parking(key) * (2 if counter is None else 1))
        self._unpark(waiter)
        if counter is None:
            counter = self.counters[key] = Counter(self, key)
            self._register(counter)
        counter.enter(waiter, target)
        self._weigh(waiter, self._parking(key))
        return False

    def count(self, counter: Counter) -> None:
        """Something was written to a counter that is waited for."""
        key = counter.key
        try:
            total = self._count(key)
        except ProtocolError:
            self._register(counter)  # it is no number: that ends nobody's wait
            return
        if counter.reaching is not None:
            counter.reaching.total = max(counter.reaching.total, total)
        else:
            for _ in range(self.portion):
                waiter = counter.next_reached(total)
                if waiter is None:
                    break
                self.reach(waiter, key)
            else:
                counter.reaching = WakeAtCount(self, counter, total)
                self.defer(counter.reaching)
        if counter.awaiting:
            self._register(counter)
        else:
            del self.counters[key]

    def reach(self, waiter: Waiter, key: bytes) -> None:
        """The number that a waiter waits for has been reached."""
        waiter.counter = None
        waiter.remaining = 0
        self._weigh(waiter, -self._parking(key))
        waiter.fire(None)

    def reach_some(self, counter: Counter, total: int, most: int) -> bool:
        """Tell some of those whose number has been reached; True if those were all."""
        for _ in range(most):
            waiter = counter.next_reached(total)
            if waiter is None:
                counter.reaching = None
                if not counter.awaiting and self.counters.get(counter.key) is counter:
                    del self.counters[counter.key]
                    self._unpark(counter)
                return True
            self.reach(waiter, counter.key)
        return False

    def barrier(self, waiter: Waiter, key: bytes, world_size: int) -> bool:
        """Count an arrival. True if the world is complete; else the waiter is parked until someone completes it.

        The count stays when a waiter leaves, and is never reset. Raises ProtocolError if the value is no number.
        """
        if self.unmarked and waiter in self.unmarked:
            self.job = MarkStale(self, waiter, partial(self.barrier, waiter, key, world_size))
            return False
        old = self.values.get(key)
        count = 1 if old is None else wrap(number(old) + 1)
        if count < world_size:
            self._grow(self._growth(key, old, COUNTER_SIZE) + self._parking(key))
        self._put(key, old, count, COUNTER_SIZE)
        if count < world_size:
            counter = self.counters.get(key)
            if counter is not None:
                self._unpark(counter)
                self.count(counter)
            self.park(waiter, [key])
            waiter.barrier = key
            return False
        if key in self.waiters:
            self._wake_all(key)
        return True

    def cancel_wait(self, waiter: Waiter) -> bool:
        """Drop every registration of the waiter; True whether there was one or not."""
        if self._many_parked(waiter):
            self._end_waits(waiter)
            self.job = UnparkFirst(self, waiter, lambda: True)
        else:
            self._unpark(waiter)
        return True

    def leave(self, waiter: Waiter) -> None:
        """Forget a waiter that has gone, and hand on what it was promised, and what it was leased."""
        if self.working:
            self.resolve(waiter)
        if self._many_parked(waiter):
            self._end_waits(waiter)
            self.defer(UnparkDeparted(self, waiter))
        else:
            self._unpark(waiter)
        if waiter.joined is not None:
            self._lose(waiter, waiter.joined[0], waiter.joined[1])
        if waiter.handoff is not None:
            self.settle(waiter, waiter.handoff)
        if waiter.leases is not None:
            leased = list(waiter.leases.values())
            waiter.leases = None
            self._restore(leased)

    def settle(self, waiter: Waiter, handoff: Handoff) -> None:
        """The waiter has spoken or gone since it was woken: an item it did not take goes to the next in line."""
        if waiter.handoff is handoff:
            waiter.handoff = None
        key = handoff.queue
        promised = self.handoffs[key] - 1
        if promised:
            self.handoffs[key] = promised
        else:
            del self.handoffs[key]
        if key in self.waiters and self.queue_len(key) > promised:
            self._wake_next(key, handed_on=True)

    # Counters that are waited for

    def _count(self, key: bytes) -> int:
        blob = self.values.get(key)
        if blob is None:
            blob = self.reserved.get(key)
        return 0 if blob is None else number(blob)

    def _register(self, counter: Counter) -> None:
        """Have a counter fired at the next write to its key; queues pass it over."""
        key = counter.key
        counter.remaining = 1
        counter.parked = {key}
        line = self.waiters.get(key)
        if line is None:
            line = self.waiters[key] = {}
        line[counter] = -1
        self._weigh(counter, self._parking(key))

    def _leave_counter(self, waiter: Waiter, counter: Counter) -> None:
        counter.leave(waiter)
        self._weigh(waiter, -self._parking(counter.key))
        if not counter.awaiting:
            del self.counters[counter.key]
            self._unpark(counter)

    def _demand_idle(self, waiter: Waiter) -> None:
        """Raise ProtocolError if it waits: waits of the extension take no other's place.

        What is left over of former waits must go then, lest it ends this one.
        """
        if waiter.remaining > 0:
            raise ProtocolError("it waits already")

    # Size

    def _growth(self, key: bytes, old: Blob | None, length: int) -> int:
        """By how much a value of `length` bytes in place of `old` enlarges the store.

        Raises ProtocolError for a key that is not to be written.
        """
        if old is None:
            if key in self.reserved:
                raise ProtocolError(f"{key.decode()} is not to be written")
            return len(key) + ENTRY_BYTES + length
        return length - size(old)

    def _grow(self, growth: int) -> None:
        if growth > 0 and self.size + growth > self.max_size:
            if self.full is None:
                raise LimitError("budget_bytes", self.size + growth, self.max_size)
            self.full(growth)

    def _put(self, key: bytes, old: Blob | None, blob: Blob, length: int) -> None:
        if self.reading is not None:
            self.reading.note(key)
        growth = self._growth(key, old, length)
        self._grow(growth)
        self.size += growth
        if old is None:
            self.changes += 1
        self.values[key] = blob
        if isinstance(old, Growing):
            self._drop(old)

    # Registrations

    def _parking(self, key: bytes) -> int:
        return len(key) + PARKED_BYTES

    def _weigh(self, waiter: Waiter, amount: int) -> None:
        """Count so much more, or less, for a waiter."""
        waiter.weight += amount
        self.parked += amount
        self.size += amount

    def park(self, waiter: Waiter, keys: list[bytes]) -> None:
        growth = 0
        for key in keys:
            growth += self._parking(key)
        self._grow(growth)
        if waiter.counter is not None:
            self._leave_counter(waiter, waiter.counter)
        waiter.fetching = None
        waiter.popping = None
        waiter.remaining = len(keys)
        if waiter.parked is None:
            waiter.parked = set()
        for key in keys:
            line = self.waiters.get(key)
            if line is None:
                line = self.waiters[key] = {}
            if key not in waiter.parked:
                line[waiter] = 1
                waiter.parked.add(key)
                self._weigh(waiter, self._parking(key))
            elif (count := line.get(waiter, 0)) > 0:
                line[waiter] = count + 1
            else:  # left over: it comes to the end of the line
                line[waiter] = 1 - self._withdraw(waiter, key)

    def _many_parked(self, waiter: Waiter) -> bool:
        """Whether forgetting the waiter's registrations takes more than one portion."""
        return waiter.parked is not None and len(waiter.parked) > self.portion

    def _end_waits(self, waiter: Waiter) -> None:
        """Nothing fires the waiter any more, but it stands in its lines still."""
        if waiter.counter is not None:
            self._leave_counter(waiter, waiter.counter)
        waiter.remaining = 0
        waiter.barrier = None
        waiter.fetching = None
        waiter.popping = None

    def _unpark(self, waiter: Waiter) -> None:
        self._end_waits(waiter)
        parked = waiter.parked
        if parked is None:
            return
        waiter.parked = None
        if self.unmarked:
            self.unmarked.discard(waiter)
        for key in parked:
            self._forget(waiter, key)

    def unpark_some(self, waiter: Waiter, most: int) -> bool:
        """Drop some of the registrations of a waiter that awaits nothing; True if those were all."""
        if self.working:
            self.resolve(waiter)  # those in lines that are being woken
        parked = waiter.parked
        if parked is not None:
            for _ in range(min(most, len(parked))):
                self._forget(waiter, parked.pop())
            if parked:
                return False
            waiter.parked = None
        self.unmarked.discard(waiter)
        return True

    def _forget(self, waiter: Waiter, key: bytes) -> None:
        """Drop one registration, and the line if it was the last."""
        self._withdraw(waiter, key)
        self._weigh(waiter, -self._parking(key))
        line = self.waiters[key]
        if not line and key not in self.stale:
            del self.waiters[key]
        elif len(line) >= _LONG_QUEUE - 1:
            self._count_holes(key, line, 1)

    def _count_holes(self, key: bytes, line: dict[Waiter, int], more: int) -> None:
        """Some have left a long line. Their places would be looked at again and again, so it is made anew at times."""
        holes = self.holes.get(key, 0) + more
        if len(line) < _LONG_QUEUE or holes * holes > _HOLES * len(line):
            self.holes.pop(key, None)
            self.waiters[key] = dict(line)
        else:
            self.holes[key] = holes

    def _withdraw(self, waiter: Waiter, key: bytes) -> int:
        """Take a waiter out of the line, or from among those passed over; how often it was registered."""
        count = self.waiters[key].pop(waiter, 0)
        if count:
            return count
        passed = self.stale[key]
        count = passed.pop(waiter)
        if not passed:
            del self.stale[key]
        return count

    def _count_down(self, waiter: Waiter, key: bytes, count: int) -> bool:
        """Take a registration that its key has used up off the waiter; True if that ended the wait."""
        parked = waiter.parked
        assert parked is not None
        parked.remove(key)
        self._weigh(waiter, -self._parking(key))
        left = waiter.remaining
        waiter.remaining = left - count
        if left <= 0 or left > count:
            return False
        self.end(waiter)
        return True

    def end(self, waiter: Waiter) -> None:
        """The wait is over.

        Registrations of a wait that a second WAIT overwrote outlive it, as in PyTorch; a queue passes them over.
        """
        waiter.barrier = None
        keys = waiter.parked
        if not keys:
            waiter.parked = None
            return
        if len(keys) > self.portion:
            self.unmarked.add(waiter)
        else:
            self.mark(waiter, list(keys))

    def mark(self, waiter: Waiter, keys: list[bytes]) -> None:
        """Have registrations say that they are left over."""
        for key in keys:
            line = self.waiters.get(key)
            if line is None:
                continue  # it is being woken, or has been
            count = line.get(waiter, 0)
            if count > 0:
                line[waiter] = -count

    def _wake_all(self, key: bytes) -> None:
        line = self.waiters.pop(key)
        if self.holes:
            self.holes.pop(key, None)
        if key in self.stale:
            passed = self.stale.pop(key)
            passed.update(line)
            line = passed
        if len(line) > self.portion:
            self._wake_many(key, line)
            return
        for waiter, count in line.items():
            if self._count_down(waiter, key, abs(count)):
                self._fire(waiter)

    def _wake_many(self, key: bytes, line: dict[Waiter, int]) -> None:
        """Have a long line woken later: for what is written now, whatever comes after it."""
        counter = self.counters.get(key)
        count = 0 if counter is None else line.pop(counter, 0)
        self.defer(WakeMany(self, key, line, self._value(key)))
        if counter is not None and count:
            self._count_down(counter, key, 1)
            self.count(counter)

    def wake(self, waiter: Waiter, key: bytes, count: int, value: Value, empty: bool) -> None:
        """A key was written that the waiter, out of its line now, was registered under; what was there then."""
        if self._count_down(waiter, key, abs(count)):
            if waiter.fetching is not None:
                waiter.fetching = None
                waiter.fire(value)
            elif waiter.popping is not None and empty:
                waiter.popping = None
                waiter.grant(0, None)
            else:
                self._fire(waiter)

    def _wake_next(self, key: bytes, handed_on: bool = False) -> None:
        """Count an item down for those in line, up to and including the first whose wait it ends.

        A FETCH takes no item: it ends, and those behind it have their turn.
        """
        line = self.waiters[key]
        passed = []
        counted: list[Waiter] = []
        last: Waiter | None = None
        for waiter, count in line.items():
            if self.working:
                self.resolve(waiter)
                count = line[waiter]
            if count < 0 or waiter.remaining <= 0:
                passed.append(waiter)
            elif not (handed_on and waiter.barrier == key):
                counted.append(waiter)
                if waiter.remaining <= count and waiter.fetching is None:
                    last = waiter
                    break
        if passed:
            self._set_stale(key, passed)
        gone = len(passed) + len(counted)
        if len(counted) > self.portion:
            self._wake_later(key, line, counted, last)
            counted = [] if last is None else [last]
        for waiter in counted:
            if self._count_down(waiter, key, line.pop(waiter)):
                if waiter.fetching is None and waiter.popping is None:
                    waiter.handoff = self.handoff(key)
                self._fire(waiter)
        if not line and key not in self.stale:
            del self.waiters[key]
            self.holes.pop(key, None)
        elif len(line) >= _LONG_QUEUE - gone:
            self._count_holes(key, line, gone)

    def _wake_later(self, key: bytes, line: dict[Waiter, int], counted: list[Waiter], last: Waiter | None) -> None:
        """Have many whom an item is counted down for, but the one who is to take it, hear of it later."""
        if last is None and len(counted) == len(line):
            crowd = dict(line)
            line.clear()
        else:
            crowd = {waiter: line.pop(waiter) for waiter in counted if waiter is not last}
        self.defer(WakeMany(self, key, crowd, self._value(key)))

    def _set_stale(self, key: bytes, waiters: list[Waiter]) -> None:
        """Take those who want nothing of a queue out of its line, so that the next push does not look at them again."""
        line = self.waiters[key]
        passed = self.stale.setdefault(key, {})
        for waiter in waiters:
            passed[waiter] = -abs(line.pop(waiter))

    def _fire(self, waiter: Waiter) -> None:
        popping = waiter.popping
        if popping is not None:
            waiter.popping = None
            length, item = self.lease(waiter, popping[0], popping[1])
            waiter.grant(length, item)
            return
        key = waiter.fetching
        if key is None:
            waiter.fire(None)
        else:
            waiter.fetching = None
            waiter.fire(self._value(key))

    def handoff(self, queue: bytes) -> Handoff:
        """Note that a woken waiter is expected to take an item."""
        self.handoffs[queue] = self.handoffs.get(queue, 0) + 1
        return Handoff(queue)
