"""Waking: which waiters a write or a queued item wakes, in which order, and the hand-off of items.

It does not know what is stored: the keyspace, which extends `WaiterRegistry`, supplies values, numbers and items. What
a waiter replies when it is woken is its own `fire` (`waiter_types.py`), which for a connection is that of
`session/server.py`. `registrations.py` has the terms.

Invariants: a waiter fires once, when the registrations that it awaits are used up. If waiters (except those in a
barrier of the same name, and those that were passed over) are parked on a queue that holds items, each of these items
is covered by a hand-off.
"""

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any, Final

from ..base.errors import ProtocolError
from ..wire.values import Framed, Value
from .registrations import FEW, LONG, Registrations
from .steps import DeferredWork, IncrementalCommand
from .waiter_types import (
    AWAITING_ITEM,
    AWAITING_KEYS,
    AWAITING_VALUE,
    IDLE,
    Counter,
    Group,
    Handoff,
    SharedWait,
    Waiter,
)

_AWAITED_BYTES: Final = 80
"""Counted for a key that a MULTI_SET wrote and whose waiters are to be woken: its entry in a dict."""

_TAKEN: Final = 5000
"""Registrations, most of them stale, that are taken away in one step while items are offered: about a millisecond."""


class PostponedWaitCount(IncrementalCommand):
    """A WAIT_COUNT for a target that has been reached, while earlier waiters for it are still to be woken."""

    def __init__(self, counter: Counter, target: int, then: Callable[[], Any]) -> None:
        super().__init__()
        self.counter = counter
        self.target = target
        self.then = then

    def step(self, most: int) -> bool:
        if self.counter.reaching and self.target <= self.counter.reached:
            return False
        self.result = self.then()
        return True


class PostponedCommands(IncrementalCommand):
    """What a session does instead of its next command while `WaiterRegistry.postpones` its waiter. It has no reply."""

    def __init__(self, registry: "WaiterRegistry", waiter: Waiter) -> None:
        super().__init__()
        self.registry = registry
        self.waiter = waiter
        self.result = []

    def step(self, most: int) -> bool:
        return not self.registry.postpones(self.waiter)


class OfferReturned(DeferredWork):
    """Offer items that went back to their queues to the next waiters, in order.

    At once if that is soon done; else others may take the items in between.
    """

    def __init__(self, registry: "WaiterRegistry", keys: deque[bytes]) -> None:
        self.registry = registry
        self.keys = keys
        """The queues, one for each item."""
        self.passed_over: set[bytes] = set()
        """Queues of which nobody is to take an item."""
        self.late = False
        """Whether the items may have been taken, or offered already."""

    def step(self, most: int) -> bool:
        registry, keys = self.registry, self.keys
        before = registry.taken
        while keys:
            if registry.taken - before > _TAKEN:
                self.late = True
                return False
            key = keys.popleft()
            if key in self.passed_over or key not in registry.waiters:
                continue
            if self.late and registry.queue_len(key) <= registry.handoffs.get(key, 0):
                continue
            if not registry.wake_next(key, handed_on=True):
                self.passed_over.add(key)
        return True


class WakeMany(DeferredWork):
    """Wake many waiters of a key that was written, in order of arrival."""

    def __init__(self, registry: "WaiterRegistry", key: bytes, registered: dict[Waiter, int], value: Value) -> None:
        self.registry = registry
        self.key = key
        self.registered = registered
        self.value = value
        """The value when it was written, for waiters that fetch it."""
        self.empty = registry.queue_len(key) == 0
        """Whether the queue of that name had no items, for waiters that lease one."""

    def step(self, most: int) -> bool:
        registered = self.registered
        if isinstance(self.value, list):
            most = max(1, most // len(self.value))
        for waiter in list(islice(registered, most)):
            count = registered[waiter]
            del registered[waiter]  # compiled, `pop` costs three times as much
            self.registry.wake(waiter, self.key, count, self.value, self.empty)
        return not registered

    def resolve(self, waiter: Waiter) -> None:
        count = self.registered.pop(waiter, 0)
        if count:
            self.registry.wake(waiter, self.key, count, self.value, self.empty)


class WakeKeys(DeferredWork):
    """Wake the waiters of many keys that were written at once; those of one key in order of arrival.

    Registrations stay where they are until then: taking out those of 131,072 keys would take too long. So whoever is
    about to change such a key otherwise, or to park on it, calls `WaiterRegistry.finish_waking` first.
    """

    def __init__(self, registry: "WaiterRegistry", keys: dict[bytes, None]) -> None:
        self.registry = registry
        self.keys = keys
        """Keys that were written, and whose waiters, if there are any, have not been woken. (A set has no order.)"""

    def step(self, most: int) -> bool:
        registry = self.registry
        keys = self.keys
        while keys and most > 0:
            key, _ = keys.popitem()
            registered = registry.waiters.get(key)
            if registered is not None:
                most -= len(registered)
                registry.wake_all(key)
            most -= 1
        registry.weigh_awaited(keys)
        if keys:
            return False
        registry.set_waking(None)
        return True

    def resolve(self, waiter: Waiter) -> None:
        parked = waiter.parked
        if parked is None:
            return
        for key in [key for key in parked if key in self.keys]:
            self.registry.wake_now(waiter, key)


class WakeAtCount(DeferredWork):
    """Wake many waiters of a counter whose targets have been reached."""

    def __init__(self, registry: "WaiterRegistry", counter: Counter) -> None:
        self.registry = registry
        self.counter = counter

    def step(self, most: int) -> bool:
        return self.registry.wake_reached(self.counter, most)

    def resolve(self, waiter: Waiter) -> None:
        if waiter.group is self.counter and waiter.number <= self.counter.reached:
            self.counter.remove(waiter)
            self.registry.wake_member(waiter, self.counter)


class WakeMembers(DeferredWork):
    """Wake the members of a large group whose wait is over, in order of arrival."""

    def __init__(self, registry: "WaiterRegistry", group: SharedWait) -> None:
        self.registry = registry
        self.group = group

    def step(self, most: int) -> bool:
        return self.registry.wake_members(self.group, most)

    def resolve(self, waiter: Waiter) -> None:
        if waiter.group is self.group:
            self.group.remove(waiter)
            self.registry.wake_member(waiter, self.group)


class WaiterRegistry(Registrations):
    """The waiters of one store, and the work that waking them leaves for later. The base class of `Keyspace`."""

    # What the keyspace supplies

    def reply_value(self, key: bytes) -> Value:
        """Return the value of a key as it is sent to a waiter that fetches it."""
        raise NotImplementedError

    def number_at(self, key: bytes) -> int:
        """Return the number under a key, 0 if it is missing. Raises ProtocolError if the value is not a number."""
        raise NotImplementedError

    def queue_len(self, key: bytes) -> int:
        """Return the number of items in a queue."""
        raise NotImplementedError

    def lease(self, waiter: Waiter, key: bytes, ticket: int) -> tuple[int, Framed | None]:
        """Lease the oldest item of a queue to the waiter."""
        raise NotImplementedError

    # Waking

    def _take_registrations(self, key: bytes) -> dict[Waiter, int]:
        """Remove and return all registrations under a key that was written, stale ones included."""
        registered = self.waiters[key]
        del self.waiters[key]  # compiled, `pop` costs three times as much
        if self.holes:
            self.holes.pop(key, None)
        if self.stale and key in self.stale:
            stale = self.stale.pop(key)
            stale.update(registered)
            return stale
        return registered

    def _too_many(self, count: int) -> bool:
        """Whether using up so many registrations is deferred: one peer may send hundreds of writes at once."""
        return count > self.portion or (count > self._most_at_once and self._woken + count > self.portion)

    def wake_all(self, key: bytes) -> None:
        """Use up all registrations under a key that was written."""
        registered = self._take_registrations(key)
        if self._too_many(len(registered)):
            self._wake_many(key, registered)
            return
        self._woken += len(registered)
        for waiter, count in registered.items():
            ended = self._count_down(waiter, key, count if count > 0 else -count)  # abs() is a call, here too
            if ended == AWAITING_KEYS:
                waiter.fire(None)
            elif ended != IDLE:
                self._fire(waiter, ended)

    def _wake_many(self, key: bytes, registered: dict[Waiter, int]) -> None:
        """Defer waking many waiters; they receive what was written now, whatever follows."""
        counter = self._take_counter(key, registered)
        self.defer(WakeMany(self, key, registered, self.reply_value(key)))
        if counter is not None:
            self.counter_changed(counter)

    def begin_waking(self, keys: dict[bytes, None]) -> None:
        """Wake the waiters of these keys, which have all been written, in steps."""
        self.set_waking(keys)
        self.weigh_awaited(keys)
        self.defer(WakeKeys(self, keys))

    def set_waking(self, keys: dict[bytes, None] | None) -> None:
        """Begin, or end, waking the waiters of many keys."""
        self.waking = keys
        self.update_noting()

    def weigh_awaited(self, keys: dict[bytes, None]) -> None:
        """Count the keys that `waking` still has to do with."""
        growth = len(keys) * _AWAITED_BYTES - self._awaited
        self._awaited += growth
        self.parked += growth
        self.size += growth

    def finish_waking(self, key: bytes) -> None:
        """Wake the waiters of a key that `waking` has to do with, because the key is about to change."""
        waking = self.waking
        if waking is not None and key in waking:
            del waking[key]
            if key in self.waiters:
                self.wake_all(key)

    def wake_now(self, waiter: Waiter, key: bytes) -> None:
        """Use up one registration under a key that was written."""
        count = self._pop_registration(waiter, key)
        self._drop_empty(key)
        ended = self._count_down(waiter, key, abs(count))
        if ended != IDLE:
            self._fire(waiter, ended)

    def wake_counter(self, counter: Counter) -> None:
        """Use up the registration of a counter whose number was written."""
        self._unpark(counter)
        self.counter_changed(counter)

    def _take_counter(self, key: bytes, registered: dict[Waiter, int]) -> Counter | None:
        """Use up the registration of the counter under this key and return it, if it has one."""
        counter = self.counters.get(key)
        if counter is None or registered.pop(counter, 0) == 0:
            return None
        self._count_down(counter, key, 1)
        return counter

    def wake(self, waiter: Waiter, key: bytes, count: int, value: Value, empty: bool) -> None:
        """Use up a registration whose key was written earlier.

        `value` is the value at that time, and `empty` is whether the queue of this name had no items.
        """
        ended = self._count_down(waiter, key, count if count > 0 else -count)
        if ended == AWAITING_KEYS:
            waiter.fire(None)
        elif ended == AWAITING_VALUE:
            waiter.awaited = b""
            waiter.fire(value)
        elif ended == AWAITING_ITEM and empty:
            waiter.awaited = b""
            waiter.grant(0, None)
        elif ended != IDLE:
            self._fire(waiter, ended)

    def wake_next(self, key: bytes, handed_on: bool = False) -> bool:
        """Count an item down for the waiters under its queue, up to and including the first that it wakes to take it.

        False if nobody is to take it; then nobody would take a second one either.
        Of a group that is the first member only; the others stay registered. A FETCH ends without taking the item. An
        item that is handed on skips waiters in a barrier of that name. See also `Waiter.skip_suspended`.
        """
        self.finish_waking(key)
        if key not in self.waiters:
            return False
        registered = self.waiters[key]
        stale = []
        counted: list[Waiter] = []
        taker: Waiter | None = None
        member: Waiter | None = None
        for waiter, count in registered.items():
            if self.working:
                self.resolve(waiter)
                count = registered[waiter]
            if count < 0 or waiter.remaining <= 0:
                stale.append(waiter)
            elif not (handed_on and waiter.barrier == key):
                if waiter.remaining <= count and waiter.state != AWAITING_VALUE:
                    if isinstance(waiter, SharedWait):
                        member = waiter.first_present(key)
                        if member is None:
                            continue
                    elif waiter.skip_suspended(key):
                        continue
                    else:
                        taker = waiter
                        counted.append(waiter)
                    break
                counted.append(waiter)
        if stale:
            self._set_aside(key, stale)
        found = taker is not None or member is not None
        removed = len(stale) + len(counted)
        self.taken += removed
        if len(counted) > self.portion:
            self._wake_later(key, registered, counted, taker)
            counted = [] if taker is None else [taker]
        if len(counted) > self._most_at_once:
            self._woken += len(counted)
        for waiter in counted:
            ended = self._count_down(waiter, key, registered.pop(waiter))
            if ended != IDLE:
                if ended == AWAITING_KEYS:
                    waiter.handoff = self.new_handoff(key)
                self._fire(waiter, ended)
        if not registered and key not in self.stale:
            del self.waiters[key]
            self.holes.pop(key, None)
        elif len(registered) >= LONG - removed:
            self._compact(key, registered, removed)
        if member is not None and member.group is not None:
            self._leave_group(member, member.group)
            member.handoff = self.new_handoff(key)
            member.fire(None)
        return found

    def _wake_later(
        self, key: bytes, registered: dict[Waiter, int], counted: list[Waiter], taker: Waiter | None
    ) -> None:
        """Defer counting an item down for many waiters, but not for the one that is to take it."""
        if taker is None and len(counted) == len(registered):
            later = dict(registered)
            registered.clear()
        else:
            later = {waiter: registered.pop(waiter) for waiter in counted if waiter is not taker}
        self.defer(WakeMany(self, key, later, self.reply_value(key)))

    def _set_aside(self, key: bytes, waiters: list[Waiter]) -> None:
        """Move stale registrations to `stale`, so that the next push does not look at them again."""
        registered = self.waiters[key]
        stale = self.stale.setdefault(key, {})
        for waiter in waiters:
            stale[waiter] = -abs(registered.pop(waiter))

    def _fire(self, waiter: Waiter, ended: int) -> None:
        """Send the waiter the result of the wait that has ended."""
        if ended == AWAITING_KEYS:
            waiter.fire(None)
            return
        key = waiter.awaited
        waiter.awaited = b""
        if ended == AWAITING_VALUE:
            waiter.fire(self.reply_value(key))
            return
        before = self.charge(waiter.account())  # whose lease it is, and for whom it ends
        length, item = self.lease(waiter, key, waiter.number)
        self.charge(before)
        waiter.grant(length, item)

    # Groups

    def wait_is_over(self, group: SharedWait) -> None:
        """Wake the members of a group that has nothing left to await: now if they are few."""
        self._close(group)
        if len(group.members) > min(FEW, self.portion):
            self.defer(WakeMembers(self, group))
        else:
            self.wake_members(group, FEW)

    def wake_members(self, group: SharedWait, most: int) -> bool:
        """Wake at most so many members; True if none is left."""
        members = group.members
        for _ in range(min(most, len(members))):
            waiter = next(iter(members))
            group.remove(waiter)
            self.wake_member(waiter, group)
        return not members

    def wake_member(self, waiter: Waiter, group: Group) -> None:
        """Fire a waiter that has been removed from its group, whose wait is over."""
        self._weigh(waiter, -group.member_bytes)
        waiter.fire(None)

    def forget_waiters(self) -> None:
        """Drop all waiters, without waking them: in a forked child the threads that wait do not exist."""
        for registrations in (self.waiters, self.stale, self.counters, self.holes, self.handoffs):
            registrations.clear()
        self.unmarked.clear()
        self.size -= self.parked
        self.parked = 0

    # Hand-offs

    def new_handoff(self, queue: bytes) -> Handoff:
        """Note that a woken waiter is expected to take an item."""
        self.handoffs[queue] = self.handoffs.get(queue, 0) + 1
        return Handoff(queue)

    def end_handoff(self, waiter: Waiter, handoff: Handoff) -> None:
        """End a hand-off, as the waiter has sent its next command or left. If it left an item, wake the next waiter."""
        if waiter.handoff is handoff:
            waiter.handoff = None
        key = handoff.queue
        others = self.handoffs[key] - 1
        if others:
            self.handoffs[key] = others
        else:
            del self.handoffs[key]
        if key in self.waiters and self.queue_len(key) > others:
            self.wake_next(key, handed_on=True)

    def offer(self, key: bytes) -> bool:
        """Offer an item of a queue for which waiters were passed over, if there is one; True if that woke somebody."""
        length, handoffs = self.queue_len(key), self.handoffs.get(key, 0)
        if key not in self.waiters or length <= handoffs:
            return False
        self.wake_next(key, handed_on=True)
        return self.queue_len(key) != length or self.handoffs.get(key, 0) != handoffs

    # Waiters for a number

    def _register_counter(self, counter: Counter) -> None:
        """Register a counter for the next write to its key, as stale so that a queue skips it."""
        key = counter.key
        counter.state = AWAITING_KEYS
        counter.remaining = 1
        counter.parked = {key}
        self._register(counter, key, -1)

    def counter_changed(self, counter: Counter) -> None:
        """Wake the waiters whose target a write has reached, and register the counter anew for the others."""
        key = counter.key
        try:
            total = self.number_at(key)
        except ProtocolError:
            self._register_counter(counter)  # it is not a number: that ends no wait
            return
        if counter.reaching:
            counter.reached = max(counter.reached, total)
        else:
            for _ in range(self.portion):
                waiter = counter.next_reached(total)
                if waiter is None:
                    break
                self.wake_member(waiter, counter)
            else:
                counter.reaching = True
                counter.reached = total
                self.defer(WakeAtCount(self, counter))
        if counter.awaiting:
            self._register_counter(counter)
        else:
            del self.counters[key]

    def wake_reached(self, counter: Counter, most: int) -> bool:
        """Wake at most so many waiters whose target has been reached; True if none is left."""
        for _ in range(most):
            waiter = counter.next_reached(counter.reached)
            if waiter is None:
                counter.reaching = False
                if not counter.awaiting and self.counters.get(counter.key) is counter:
                    self._drop_counter(counter)
                return True
            self.wake_member(waiter, counter)
        return False
