"""What commands mean: values, counters and waits.

A `Keyspace` is one store: it applies commands to values. By its base classes, each in its own module, it registers
waiters (`registrations.py`) and wakes them (`waiters.py`), shares what many peers request alike (`shared_requests.py`),
lets the agents of elastic jobs meet (`agents.py`), counts the ranks that join (`joins.py`), has queues (`queues.py`)
and leases their items (`leases.py`). It knows nothing of framing beyond the length prefix that stored values keep, and
nothing of sockets, threads or clocks.

Invariants: a command is applied whole or, if it raises, not at all; whatever can refuse it does so before the first
change. `size` is the sum of what everything stored and every waiter counts.

A wait ends when PyTorch's libuv server would end it, except for its queue defects and for a second wait that a client
sends before the first has ended (`docs/quirks.md`).
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from ..base.errors import LimitError, ProtocolError
from ..base.limits import ENTRY_BYTES, Limits
from ..wire.values import (
    ABSENT,
    CHUNKED_BYTES,
    COUNTER_SIZE,
    EMPTY,
    GROWING_BYTES,
    PREFIX,
    Framed,
    Growing,
    StoredValue,
    Value,
    cost,
    framed,
    length,
    number,
    size,
    wrap,
)
from .leases import Leases
from .steps import UNCUT, Later, Running, Steps, free_value
from .waiter_types import AWAITING_KEYS, AWAITING_VALUE, Counter, Waiter

_LARGE: Final = 4 * 1024 * 1024
"""Bytes from which on a dropped value that was appended to is freed in steps."""


_KEY_BYTES: Final = 1024 * 1024
"""Bytes of keys after which a step ends: long keys take longer to hash and compare."""


def _portion_end(keys: list[bytes], at: int, most: int) -> int:
    """Return where a step that begins at `at` ends: after `most` keys, or fewer long ones."""
    stop = min(at + most, len(keys))
    size = 0
    while at < stop and size < _KEY_BYTES:
        size += len(keys[at])
        at += 1
    return at


class Keyspace(Leases):
    """One store. Keys and values are opaque bytes; `wire/values.py` describes the forms of stored values.

    Methods named in the command table take a command's fields, values framed, and return what its reply encodes. They
    raise ProtocolError for what a peer must not send, and LimitError if the store would grow too large.
    """

    def __init__(self, limits: Limits, portion: int = UNCUT) -> None:
        super().__init__(limits.budget_bytes, portion)
        self.values: dict[bytes, StoredValue] = {}
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
            reserved = self.reserved.get(key)
            if reserved is None:
                return EMPTY
            told: Framed = self.clock.ask(lambda: reserved)  # not the same after a restart by another version
            return told
        if isinstance(value, Growing) and self._chunked(value):
            self.running = Running(None, value.read())
            return EMPTY
        return self._flatten(key, value)

    def exists(self, key: bytes) -> bool:
        """Whether CHECK sees the key: as a value, a queue with items, or a reserved key."""
        return key in self.values or key in self.queues or key in self.reserved

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
            self.clock.lasting = True  # less is counted
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
                if self.running is not None or current != expected:
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
        values = self.values
        present = True
        for key in keys:
            if key not in values and key not in self.queues and key not in self.reserved:
                present = False
                break
        self.free_later(keys)
        return present

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
            self.defer(Later(free_value(growing), aside=True))

    def num_keys(self) -> int:
        return len(self.values)

    def count_keys(self) -> int:
        return len(self.values) + self.queue_count

    def list_keys(self) -> list[bytes]:
        return list(self.values)

    def multi_get(self, keys: list[bytes]) -> list[Framed]:
        """Return the values in order, empty ones for missing keys. Raises LimitError for a reply above `max_reply`."""
        values: list[Framed] = []
        for key in keys:
            value = self.values.get(key)
            if isinstance(value, bytes):
                values.append(value)
            elif isinstance(value, Growing) and self._chunked(value):
                values.extend(value.read())
            else:
                values.append(self.get(key))
        self.free_later(keys)
        if (reply := length(values)) > self.max_reply:
            raise LimitError("budget_bytes", reply, self.max_reply)
        return values

    def multi_set(self, items: list[tuple[bytes, Framed]]) -> None:
        """Set every pair in order, or none if the store would grow too large."""
        if self.waking is not None and (
            len(items) > self.portion or self._registrations([key for key, _ in items]) > self.portion
        ):
            self.running = Running(self._set_when_woken(items), request=items)
        else:
            self.set_items(items)

    def _set_when_woken(self, items: list[tuple[bytes, Framed]]) -> Steps:
        """Set many keys, or keys with many waiters, once the waiters of an earlier MULTI_SET are woken."""
        while self.waking is not None:
            yield
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
            self.begin_waking(awaited)
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
            self.defer(Later(self._free_items(items), aside=True))

    def _free_items(self, items: list[Any]) -> Iterator[None]:
        """Free a list from its end: then the allocator returns memory to the kernel in steps, too.

        Freed from the front, 256 MiB of keys would all be returned together with the last one, which takes 16 ms.
        """
        while True:
            del items[-self.portion :]
            if not items:
                self.freeing = False
                return
            yield

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
        """True if every key exists; else the waiter is parked on the missing ones, not on those before."""
        if len(keys) > self.portion or self._needs_steps(waiter):
            self._make_idle(waiter)
            self.running = Running(self._wait_in_steps(waiter, keys), request=keys)
            return False
        if len(keys) == 1:
            key = self.known(keys[0])
            if key in self.values or self._exists_elsewhere(key):
                self.renew_handoff(waiter, keys)
                return True
            self.park_on(waiter, key)
            return False
        if self.check(keys):
            self.renew_handoff(waiter, keys)
            return True
        self.park(waiter, self._missing(keys))
        return False

    def _missing(self, keys: list[bytes]) -> list[bytes]:
        return [key for key in keys if key not in self.values and not self._exists_elsewhere(key)]

    def _wait_in_steps(self, waiter: Waiter, keys: list[bytes]) -> Steps:
        """WAIT for many keys, or in place of a wait for many. Each key is looked at in its step, and registered."""
        while not self.unpark_some(waiter, self.portion):
            yield
        at = 0
        while at < len(keys):
            if at:
                yield
            stop = _portion_end(keys, at, self.portion)
            missing = self._missing(keys[at:stop])
            at = stop
            if missing:
                self._grow(sum([self.registration_bytes(key) for key in missing]))
                self._register_under(waiter, missing)  # it stays idle: what appears before the last step ends no wait
        if waiter.parked is None:
            return True
        waiter.state = AWAITING_KEYS
        return False

    def fetch(self, waiter: Waiter, key: bytes) -> Framed | None:
        """Return the value if the key exists; else None, and the waiter receives the value when it fires."""
        value = self.values.get(key)
        if isinstance(value, bytes):  # the common case, without a call
            return value
        if value is not None or self._exists_elsewhere(key):
            return self.get(key)
        self._require_idle(waiter)
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
        counter = self.counters.get(key)
        if counter is not None and counter.reaching and target <= counter.reached:
            self.wait_until_woken(counter, target, partial(self.wait_count, waiter, key, target))
            return False
        self._grow(self.registration_bytes(key) * (2 if counter is None else 1))
        if counter is None:
            counter = self.counters[key] = Counter(self, key, self.registration_bytes(key))
            self._register_counter(counter)
        counter.add(waiter, target)
        self._weigh(waiter, self.registration_bytes(key))
        return False

    def barrier(self, waiter: Waiter, key: bytes, world_size: int) -> bool:
        """Count an arrival. True if that completes the barrier; else the waiter is parked until another one does.

        The count stays when a waiter leaves, and is never reset. Raises ProtocolError if the value is not a number.
        """
        key = self.known(key)
        old = self.values.get(key)
        count = 1 if old is None else wrap(number(old) + 1)
        if count < world_size:
            if self._needs_steps(waiter):
                self.unpark_then(waiter, partial(self.barrier, waiter, key, world_size))
                return False
            growth = self._growth(key, old, COUNTER_SIZE) + self.registration_bytes(key)
            self._grow(growth)
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
        """Let the waiter await nothing; return True, whether it awaited something or not."""
        if self._needs_steps(waiter):
            self.unpark_then(waiter, lambda: True)
        else:
            self._unpark(waiter)
        return True

    def cancel_fetch(self, waiter: Waiter) -> Framed:
        """As `cancel_wait`, but return `ABSENT`."""
        if self._needs_steps(waiter):
            self.unpark_then(waiter, lambda: ABSENT)
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
