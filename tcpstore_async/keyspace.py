"""What commands mean: values, counters, queues, leases and joins.

A `Keyspace` is one store: it applies commands to values and queues. By its base classes, each in its own module, it
parks and wakes waiters (`waiters.py`), shares what many peers request alike (`shared_requests.py`), lets the agents of
elastic jobs meet (`agents.py`) and counts the ranks that join (`joins.py`). It knows nothing of framing beyond the
length prefix that stored values keep, and nothing of sockets, threads or clocks.

Invariants: a command is applied whole or, if it raises, not at all; whatever can refuse it does so before the first
change. An item that is leased is in no queue: the waiter has it until it confirms it, and it goes back to the front of
its queue when it is returned or the waiter leaves. `size` is the sum of what everything stored and every waiter counts.

Registrations are counted exactly as by PyTorch's libuv server, except for its queue defects (`docs/quirks.md`).
"""

from collections import deque
from functools import partial
from typing import Any, Final

from .errors import LimitError, ProtocolError
from .incremental import (
    UNCUT,
    FreeItems,
    FreeValue,
    MarkStale,
    OfferReturned,
    ParkOnKeys,
    Pause,
    PostponedMultiSet,
    PostponedWaitCount,
    ReadKeys,
    ReplyInPieces,
    UnparkFirst,
    Value,
    WakeKeys,
)
from .joins import JoinRegistry
from .limits import ENTRY_BYTES, PARKED_BYTES, QUEUE_BYTES, Limits
from .values import (
    ABSENT,
    CHUNKED_BYTES,
    COUNTER_SIZE,
    EMPTY,
    GROWING_BYTES,
    PREFIX,
    Framed,
    Growing,
    StoredValue,
    cost,
    framed,
    number,
    size,
    wrap,
)
from .waiter_types import AWAITING_ITEM, AWAITING_VALUE, Counter, Waiter

MAX_LEASES: Final = 4096
"""Leases of one waiter: those of one that leaves go back at once, so that nobody overtakes them."""

_LARGE: Final = 4 * 1024 * 1024
"""Bytes from which on a dropped value that was appended to is freed in steps."""


class Keyspace(JoinRegistry):
    """One store. Keys and values are opaque bytes; `values.py` describes the forms of stored values.

    Methods named in the command table take a command's fields, values framed, and return what its reply encodes. They
    raise ProtocolError for what a peer must not send, and LimitError if the store would grow too large.
    """

    def __init__(self, limits: Limits, portion: int = UNCUT) -> None:
        super().__init__(limits.budget_bytes, portion)
        self.values: dict[bytes, StoredValue] = {}
        self.queues: dict[bytes, deque[Framed]] = {}
        """Never holds an empty queue."""
        self.leased: dict[bytes, int] = {}
        """By queue: how many items are leased. It counts until there are none, as they may go back."""
        self.queue_count: int = 0
        """Queues that count: those with items, and those of which items are leased."""
        self.reserved: dict[bytes, Framed] = {}
        """Information about the server: visible to GET, CHECK and WAIT, read-only, and no keys of the store."""
        self.final: set[bytes] = set()
        """Reserved keys that will not change any more: WAIT_COUNT of them returns at once."""
        self.changes: int = 0
        """Incremented whenever a value's key is created or deleted."""
        self.freeing = False
        """Whether a list is being freed in steps."""
        self.max_reply: int = limits.budget_bytes
        """Bytes of a MULTI_GET reply above which it is refused."""

    # Values

    def set(self, key: bytes, value: Framed) -> None:
        if self.noting:
            self.note(key)
        old = self.values.get(key)
        # The common case, without a call.
        if (
            isinstance(old, bytes)
            and (grown := self.size + len(value) - len(old)) <= self.max_size
            and self.account is None
        ):
            self.size = grown
            self.values[key] = value
        else:
            self._put(key, old, value, len(value))
        if key in self.waiters:
            self.wake_all(key)

    def get(self, key: bytes) -> Framed:
        """Return the value; the empty one if the key is missing."""
        value = self.values.get(key)
        if isinstance(value, bytes):
            return value
        if value is None:
            return self.reserved.get(key, EMPTY)
        if self._chunked(value):
            self.incremental = ReplyInPieces(self.read(key, whole=True) or [])
            return EMPTY
        return self._flatten(key, value)

    def exists(self, key: bytes) -> bool:
        """Whether CHECK sees the key: as a value, a queue with items, or a reserved key."""
        return key in self.values or key in self.queues or key in self.reserved

    def read(self, key: bytes, whole: bool) -> list[Framed] | None:
        """Return the value in pieces, the empty one if it is missing.

        If not `whole`, only report whether the key exists: no pieces if it does, None if not.
        """
        if not whole:
            return [] if self.exists(key) else None
        value = self.values.get(key)
        if value is None:
            return [self.reserved.get(key, EMPTY)]
        return value.read() if isinstance(value, Growing) else [framed(value)]

    def reply_value(self, key: bytes) -> Value:
        value = self.values.get(key)
        if value is None:
            return EMPTY
        return value.read() if isinstance(value, Growing) and self._chunked(value) else self._flatten(key, value)

    def _chunked(self, value: StoredValue) -> bool:
        """Whether a value is too large to be copied for a reply."""
        return isinstance(value, Growing) and value.size >= CHUNKED_BYTES and self.portion != UNCUT

    def _flatten(self, key: bytes, value: StoredValue) -> Framed:
        """Return a stored value as it goes into a reply. One that was appended to is stored in that form."""
        flat = framed(value)
        if isinstance(value, Growing):
            self._put(key, value, flat, len(flat))
        return flat

    def add(self, key: bytes, amount: int) -> int:
        """Add to a counter and return the sum. Raises ProtocolError if the value is not a number."""
        old = self.values.get(key)
        if old is None:
            total = amount
            self._put(key, None, total, COUNTER_SIZE)
        elif isinstance(old, int):
            if self.noting:
                self.note(key)
            total = wrap(old + amount)
            self.values[key] = total
        else:
            total = wrap(number(old) + amount)
            self._put(key, old, total, COUNTER_SIZE)
        if key in self.waiters:
            self.wake_all(key)
        return total

    def make_room_to_add(self, key: bytes, size: int) -> None:
        old = self.values.get(key)
        if old is not None:
            number(old)
        self._make_room(self._growth(key, old, COUNTER_SIZE) + size, 1 if old is None else 0)

    def number_at(self, key: bytes) -> int:
        value = self.values.get(key)
        if value is None:
            value = self.reserved.get(key)
        return 0 if value is None else number(value)

    def compare_set(self, key: bytes, expected: Framed, desired: Framed) -> Framed:
        """Store `desired` if the value equals `expected`; a missing key equals the empty value.

        Returns the value afterwards. If the key is missing and `expected` is not empty, returns `expected`.
        """
        if key not in self.values:
            if len(expected) != len(EMPTY):
                return expected
        else:
            value = self.values[key]
            if self._chunked(value) and size(value) == len(expected):
                current = framed(value)
                if current != expected:
                    return self.get(key)
            else:
                current = self.get(key)
                if self.incremental is not None or current != expected:
                    return current
        self.set(key, desired)
        return desired

    def append(self, key: bytes, value: Framed) -> None:
        old = self.values.get(key)
        if old is None:
            self._put(key, None, value, len(value))
        else:
            if self.noting:
                self.note(key)
            growth = len(value) - PREFIX
            if isinstance(old, Growing):
                growing = old
                self._make_room(growth)
            else:
                flat = framed(old)
                growth += len(flat) + GROWING_BYTES - cost(old)
                self._make_room(growth)
                growing = Growing(flat)
                self.values[key] = growing
            growing.append(value)
            self.size += growth
        if key in self.waiters:
            self.wake_all(key)

    def check(self, keys: list[bytes]) -> bool:
        """Whether every key exists; see `exists`."""
        if len(keys) > self.portion:
            self.incremental = ReadKeys(self, keys, whole=False)
            return False
        values = self.values
        for key in keys:
            if key not in values and key not in self.queues and key not in self.reserved:
                return False
        return True

    def _exists_elsewhere(self, key: bytes) -> bool:
        """Whether a key without a value exists nevertheless."""
        return key in self.queues or key in self.reserved

    def delete_key(self, key: bytes) -> int:
        """Remove a value, never a queue; return 1 if it existed, else 0. Wakes no waiter."""
        if self.noting:
            self.note(key)
        if key in self.rounds:
            self.forget_rounds(key)
        old = self.values.pop(key, None)
        if old is None:
            return 0
        if self.tracked:
            self.close_group(key)
        self.size -= len(key) + ENTRY_BYTES + cost(old)
        if key in self.joins:
            self.forget_joins(key)
        self.changes += 1
        if isinstance(old, Growing):
            self._drop(old)
        return 1

    def _drop(self, growing: Growing) -> None:
        """Free a value that was replaced or deleted: a large one in steps."""
        if growing.size >= _LARGE and self.portion != UNCUT:
            self.defer(FreeValue(growing))

    def num_keys(self) -> int:
        return len(self.values)

    def count_keys(self) -> int:
        return len(self.values) + self.queue_count

    def list_keys(self) -> list[bytes]:
        return list(self.values)

    def multi_get(self, keys: list[bytes]) -> list[Framed]:
        """Return the values in order, empty ones for missing keys."""
        values: list[Framed] = []
        if len(keys) > self.portion:
            self.incremental = ReadKeys(self, keys, whole=True)
            return values
        large = 0
        for key in keys:
            value = self.values.get(key)
            if isinstance(value, bytes):
                values.append(value)
            elif isinstance(value, Growing) and self._chunked(value):
                large += size(value)
                if large <= self.max_reply:
                    values.extend(value.read())
            else:
                values.append(self.get(key))
        if large > self.max_reply:
            raise LimitError("budget_bytes", large, self.max_reply)
        return values

    def multi_set(self, items: list[tuple[bytes, Framed]]) -> None:
        """Set every pair in order, or none if the store would grow too large."""
        if self.waking is not None and (
            len(items) > self.portion or self._registrations([key for key, _ in items]) > self.portion
        ):
            self.incremental = PostponedMultiSet(self, items)
        else:
            self.set_items(items)

    def _surely_fits(self, growth: int, keys: int) -> bool:
        """Return whether a command may add so many bytes and keys."""
        account = self.account
        return self.size + growth <= self.max_size and (account is None or account.usage.allows(keys, growth))

    def _most_growth(self, items: list[tuple[bytes, Framed]], look_up: bool) -> tuple[int, int]:
        """Return by how many bytes and keys a MULTI_SET enlarges the store at most.

        As if no key came twice and old values were empty; without `look_up`, as if all keys were new, which takes less
        time. Raises ProtocolError for a reserved key.
        """
        values, reserved = self.values, self.reserved
        growth = 0
        new = len(items)
        for key, value in items:
            if key in reserved:
                self._growth(key, None, 0)
            growth += len(value)
            if look_up and key in values:
                new -= 1
            else:
                growth += len(key) + ENTRY_BYTES
        return growth, new

    def _registrations(self, keys: list[bytes]) -> int:
        """Return how many registrations writing these keys uses up."""
        count = 0
        for key in keys:
            registered = self.waiters.get(key)
            if registered is not None:
                count += len(registered)
        return count

    def set_items(self, items: list[tuple[bytes, Framed]]) -> None:
        """Set every pair in order, then wake the waiters of all keys: in steps if they are many.

        Raises LimitError or NotAllowedError if the pairs do not fit, and ProtocolError for a reserved key.
        """
        values, waiters = self.values, self.waiters
        near = not self._surely_fits(0, len(items))
        growth, new = self._most_growth(items, near)
        if not near and not self._surely_fits(growth, new):
            growth, new = self._most_growth(items, True)
        if not self._surely_fits(growth, new):
            growth = new = 0
            for key, value in dict(items).items():
                old = values.get(key)
                if isinstance(old, bytes):
                    growth += len(value) - len(old)
                elif old is None:
                    growth += len(key) + ENTRY_BYTES + len(value)
                    new += 1
                else:
                    growth += len(value) - cost(old)
            self._make_room(growth, new)
        grown = created = 0
        awaited: dict[bytes, None] = {}
        some_wait = len(waiters) > 0
        # Then whether each key is awaited is found out in steps, too.
        many = len(waiters) > self.portion and len(items) > self.portion
        for key, value in items:
            if self.noting:
                self.note(key)
            old = values.get(key)
            if isinstance(old, bytes):
                grown += len(value) - len(old)
            elif old is None:
                grown += len(key) + ENTRY_BYTES + len(value)
                created += 1
            else:
                grown += len(value) - cost(old)
                if isinstance(old, Growing):
                    self._drop(old)
            values[key] = value
            if some_wait and (many or key in waiters):
                awaited[key] = None
        self.size += grown
        self.changes += created
        if many or (awaited and self._registrations(list(awaited)) > self.portion):
            self.begin_waking(WakeKeys(self, awaited))
            for key in list(awaited if len(awaited) < len(self.counters) else self.counters):
                counter = self.counters.get(key)
                if counter is not None and key in awaited:
                    self.wake_counter(counter)
        else:
            for key in awaited:
                if key in waiters:
                    self.wake_all(key)
        self.free_later(items)

    def free_later(self, items: list[Any]) -> None:
        """Free a list in steps if it is long. One at a time, because what is not freed yet is not counted."""
        if len(items) > self.portion and not self.freeing:
            self.freeing = True
            self.defer(FreeItems(self, items))

    def _growth(self, key: bytes, old: StoredValue | None, length: int) -> int:
        """Return by how much a value of `length` bytes in place of `old` enlarges the store.

        Raises ProtocolError for a reserved key.
        """
        if old is None:
            if key in self.reserved:
                raise ProtocolError(f"key {key.decode()} is read-only")
            return len(key) + ENTRY_BYTES + length
        return length - cost(old)

    def _put(self, key: bytes, old: StoredValue | None, value: StoredValue, length: int) -> None:
        """Store a value that counts `length` bytes in place of `old`."""
        if self.noting:
            self.note(key)
        growth = self._growth(key, old, length)
        self._make_room(growth, 1 if old is None else 0)
        self.size += growth
        if old is None:
            self.changes += 1
        self.values[key] = value
        if isinstance(old, Growing):
            self._drop(old)

    # Queues

    def queue_push(self, key: bytes, value: Framed) -> None:
        """Append to a queue and wake the next waiter. Raises ProtocolError for a reserved key."""
        queue = self.queues.get(key)
        growth = ENTRY_BYTES + len(value)
        new = 0
        if queue is None:
            if key in self.reserved:
                raise ProtocolError(f"key {key.decode()} is read-only")
            if key not in self.leased:
                growth += len(key) + QUEUE_BYTES
                new = 1
        self._make_room(growth, new)
        self.queue_count += new
        if queue is None:
            if self.noting:
                self.note(key)
                self.close_group(key)
            queue = self.queues[key] = deque()
        queue.append(value)
        self.size += growth
        if key in self.waiters:
            self.wake_next(key)
            if self._woken > self.portion:
                self._woken = 0
                self.incremental = Pause()

    def queue_pop(self, key: bytes) -> tuple[int, Framed | None]:
        """Return the length before the pop and, unless that is 0, the oldest item."""
        queue = self.queues.get(key)
        if queue is None:
            return 0, None
        length = len(queue)
        item = self._take(key, queue)
        self.size -= ENTRY_BYTES + len(item)
        return length, item

    def _take(self, key: bytes, queue: deque[Framed]) -> Framed:
        """Remove the oldest item, which still counts, and the queue if that was the last."""
        item = queue.popleft()
        if not queue:
            if self.noting:
                self.note(key)
                self.close_group(key)
            del self.queues[key]
            if key not in self.leased:
                self._forget_queue(key)
        return item

    def _forget_queue(self, key: bytes) -> None:
        """Stop counting a queue."""
        self.queue_count -= 1
        self.size -= len(key) + QUEUE_BYTES

    def queue_len(self, key: bytes) -> int:
        queue = self.queues.get(key)
        return 0 if queue is None else len(queue)

    # Leases: pops that the client confirms

    def lease(self, waiter: Waiter, key: bytes, ticket: int) -> tuple[int, Framed | None]:
        """As `queue_pop`, but the item goes back unless the waiter confirms the ticket.

        Raises ProtocolError for a ticket that is in use, and for too many leases.
        """
        leases = waiter.leases
        pending = waiter.state == AWAITING_ITEM
        if (leases is not None and ticket in leases) or (pending and waiter.number == ticket):
            raise ProtocolError(f"ticket {ticket} is in use")
        if leases is not None and len(leases) + pending >= MAX_LEASES:
            raise ProtocolError(f"too many unconfirmed leases (max {MAX_LEASES})")
        queue = self.queues.get(key)
        if queue is None:
            return 0, None
        length = len(queue)
        self.leased[key] = self.leased.get(key, 0) + 1
        item = self._take(key, queue)
        if leases is None:
            leases = waiter.leases = {}
        leases[ticket] = (key, item)
        self.size += PARKED_BYTES + len(key)  # even above the limit: a full store has to be emptied
        return length, item

    def lease_later(self, waiter: Waiter, key: bytes, ticket: int) -> tuple[int, Framed | None] | None:
        """As `lease` if the key exists. If not: None, and the waiter is granted an item when there is one."""
        leased = self.lease(waiter, key, ticket)
        if leased[0] or key in self.values or key in self.reserved:
            return leased
        self._require_idle(waiter)
        if self._needs_steps(waiter):
            self.incremental = UnparkFirst(self, waiter, partial(self.lease_later, waiter, key, ticket))
            return None
        self._grow(self.registration_bytes(key))
        self._unpark(waiter)
        self.park_on(waiter, key)
        waiter.state = AWAITING_ITEM
        waiter.awaited = key
        waiter.number = ticket
        return None

    def confirm(self, waiter: Waiter, ticket: int) -> None:
        """Drop the item leased under this ticket, if there is one: it has reached its caller."""
        leases = waiter.leases
        if leases is not None and ticket in leases:
            key, item = leases.pop(ticket)
            self.size -= ENTRY_BYTES + len(item)
            self._end_lease(key)
            if not leases:
                waiter.leases = None

    def _end_lease(self, key: bytes) -> None:
        """Stop counting a lease, and its queue if that has no items, and no others that are leased."""
        self.size -= PARKED_BYTES + len(key)
        left = self.leased[key] - 1
        if left:
            self.leased[key] = left
            return
        del self.leased[key]
        if key not in self.queues:
            self._forget_queue(key)

    def give_back(self, waiter: Waiter, ticket: int) -> Framed:
        """Return the item leased under this ticket to the front of its queue, and wake the next waiter.

        If the lease is still awaited, end that wait and return `ABSENT`; else return nothing.
        """
        if waiter.state == AWAITING_ITEM and waiter.number == ticket:
            self._unpark(waiter)
            return ABSENT
        leases = waiter.leases
        if leases is not None and ticket in leases:
            self._restore([leases.pop(ticket)])
            if not leases:
                waiter.leases = None
        return b""

    def _restore(self, leased: list[tuple[bytes, Framed]]) -> None:
        """Return items to the front of their queues, the oldest first; each wakes the next waiter, as a push does."""
        for key, item in reversed(leased):
            queue = self.queues.get(key)
            if queue is None:
                if self.noting:
                    self.note(key)
                    self.close_group(key)
                queue = self.queues[key] = deque()
            queue.appendleft(item)
            self._end_lease(key)
        if self.waiters:
            offering = OfferReturned(self, deque([key for key, _ in leased if key in self.waiters]))
            if not offering.step(self.portion):
                self.defer(offering)

    # Reserved keys: information about the server

    def reserve(self, key: bytes, value: Framed, last: bool = False) -> None:
        """Set a reserved key and wake the waiters whose number that reaches; all waiters if it is the last value."""
        if self.noting:
            self.note(key)
            self.close_group(key)
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
                    self._leave_group(waiter, counter)
                    waiter.fire(None)
        else:
            self.counter_changed(counter)

    # Waiting

    def wait(self, waiter: Waiter, keys: list[bytes]) -> bool:
        """True if every key exists; else the waiter is parked on the missing ones."""
        if self.unmarked and waiter in self.unmarked:
            self.incremental = MarkStale(self, waiter, partial(self.wait, waiter, keys))
            return False
        if len(keys) == 1:
            key = self.known(keys[0])
            if key in self.values or self._exists_elsewhere(key):
                self.renew_handoff(waiter, keys)
                return True
            self.park_on(waiter, key)
            return False
        if len(keys) > self.portion:
            self.incremental = ParkOnKeys(self, waiter, keys)
            return False
        if self.check(keys):
            self.renew_handoff(waiter, keys)
            return True
        missing = [key for key in keys if key not in self.values and not self._exists_elsewhere(key)]
        self.park(waiter, missing)
        return False

    def fetch(self, waiter: Waiter, key: bytes) -> Framed | None:
        """Return the value if the key exists; else None, and the waiter receives the value when it fires."""
        value = self.values.get(key)
        if isinstance(value, bytes):  # the common case, without a call
            return value
        if value is not None or self._exists_elsewhere(key):
            return self.get(key)
        self._require_idle(waiter)
        if self._needs_steps(waiter):
            self.incremental = UnparkFirst(self, waiter, partial(self.fetch, waiter, key))
            return None
        self._grow(self.registration_bytes(key))
        self._unpark(waiter)
        self.park_on(waiter, key)
        waiter.state = AWAITING_VALUE
        waiter.awaited = key
        return None

    def wait_count(self, waiter: Waiter, key: bytes, target: int) -> bool:
        """True if the number under a key, 0 if it is missing, is at least `target`; else the waiter is parked until so.

        Raises ProtocolError if the value is not a number.
        """
        self._require_idle(waiter)
        if self.number_at(key) >= target or key in self.final:
            return True
        if self._needs_steps(waiter):
            self.incremental = UnparkFirst(self, waiter, partial(self.wait_count, waiter, key, target))
            return False
        counter = self.counters.get(key)
        if counter is not None and counter.reaching is not None and target <= counter.reaching.total:
            self.incremental = PostponedWaitCount(counter, target, partial(self.wait_count, waiter, key, target))
            return False
        self._grow(self.registration_bytes(key) * (2 if counter is None else 1))
        self._unpark(waiter)
        if counter is None:
            counter = self.counters[key] = Counter(self, key)
            self._register_counter(counter)
        counter.add(waiter, target)
        self._weigh(waiter, self.registration_bytes(key))
        return False

    def barrier(self, waiter: Waiter, key: bytes, world_size: int) -> bool:
        """Count an arrival. True if that completes the barrier; else the waiter is parked until another one does.

        The count stays when a waiter leaves, and is never reset. Raises ProtocolError if the value is not a number.
        """
        if self.unmarked and waiter in self.unmarked:
            self.incremental = MarkStale(self, waiter, partial(self.barrier, waiter, key, world_size))
            return False
        key = self.known(key)
        old = self.values.get(key)
        count = 1 if old is None else wrap(number(old) + 1)
        if count < world_size:
            growth = self._growth(key, old, COUNTER_SIZE) + self.registration_bytes(key)
            self._grow(growth + self._separation_bytes(waiter))
        self._put(key, old, count, COUNTER_SIZE)
        if count < world_size:
            counter = self.counters.get(key)
            if counter is not None:
                self.wake_counter(counter)
            self.park_on(waiter, key)
            waiter.barrier = key
            waiter.number = world_size
            return False
        if key in self.waiters:
            self.wake_all(key)
        return True

    # Ending a wait

    def cancel_wait(self, waiter: Waiter) -> bool:
        """Drop every registration of the waiter; True whether there was one or not."""
        if self._needs_steps(waiter):
            self._make_idle(waiter)
            self.incremental = UnparkFirst(self, waiter, lambda: True)
        else:
            self._unpark(waiter)
        return True

    def cancel_fetch(self, waiter: Waiter) -> Framed:
        """As `cancel_wait`, but return `ABSENT`."""
        if self._needs_steps(waiter):
            self._make_idle(waiter)
            self.incremental = UnparkFirst(self, waiter, lambda: ABSENT)
        else:
            self._unpark(waiter)
        return ABSENT

    def leave(self, waiter: Waiter) -> None:
        """Forget a waiter that has gone. Its hand-off passes to the next waiter, its leases go back to their queues."""
        if self.has_many(waiter):
            self.unpark_later(waiter)
        else:
            if self.working:
                self.resolve(waiter)
            self._unpark(waiter)
        if waiter.joined is not None:
            self.lose(waiter, waiter.joined[0], waiter.joined[1])
        if self.represented and waiter in self.represented:
            self.lose_agent(waiter)
        if waiter.handoff is not None:
            self.end_handoff(waiter, waiter.handoff)
        if waiter.leases is not None:
            leases = waiter.leases
            waiter.leases = None
            self._restore(list(leases.values()))
