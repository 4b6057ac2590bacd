"""Waking: which waiters a write or a queued item wakes, in which order, and the hand-off of items.

It does not know what is stored: the keyspace, which extends `WaiterRegistry`, supplies values, numbers and items. What
a waiter replies when it is woken is its own `fire` (`waiter_types.py`), which for a connection is that of
`session/session.py`. `registrations.py` has the terms.

Invariants: a waiter fires once, when all its registrations are used up. If waiters (except those in a barrier of the
same name, and suspended ones that were skipped) are parked on a queue that holds items, each of these items is covered
by a hand-off.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, Final

from ..base.errors import ProtocolError
from ..wire.values import Framed, Value
from .registrations import FEW, LONG, Registrations, Written
from .steps import Later, Running, Steps
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
"""Registrations that are used up in one step while items are offered: about a millisecond."""


class WaiterRegistry(Registrations):
    """The waiters of one store, and the work that waking them leaves for later. The base class of `SharedRequests`."""

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

    def _take_registrations(self, key: bytes) -> dict[Waiter, None]:
        """Remove and return all registrations under a key that was written."""
        registered = self.waiters[key]
        del self.waiters[key]  # compiled, `pop` costs three times as much
        if self.holes:
            self.holes.pop(key, None)
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
        for waiter in registered:
            ended = self._count_down(waiter, key)
            if ended == AWAITING_KEYS:
                waiter.fire(None)
            elif ended != IDLE:
                self._fire(waiter, ended)

    def _wake_many(self, key: bytes, registered: dict[Waiter, None]) -> None:
        """Defer waking many waiters; they receive what was written now, whatever follows."""
        counter = self._take_counter(key, registered)
        self._wake_later(key, registered)
        if counter is not None:
            self.counter_changed(counter)

    def _wake_later(self, key: bytes, registered: dict[Waiter, None]) -> None:
        """Defer using up registrations, in order of arrival.

        All that is deferred so is one piece of work, with an index: one peer can write to many keys that few others
        have listed, and their next commands must not look for them in each of as many pieces of work.
        """
        written = Written(key, registered, self.reply_value(key), self.queue_len(key) == 0)
        self.written.setdefault(key, []).append(written)
        self.unwoken.append(written)
        if len(self.unwoken) == 1:
            self.defer(Later(self._wake_written()))

    def _wake_written(self) -> Iterator[None]:
        unwoken = self.unwoken
        most = self.portion
        while unwoken:
            written = unwoken[0]
            cost = len(written.value) or 1 if isinstance(written.value, list) else 1
            some = list(islice(written.registered, max(1, most // cost)))
            for waiter in some:
                self._wake(written, waiter)
            most -= cost * len(some) + 1
            if not written.registered:
                unwoken.popleft()
                others = self.written[written.key]
                others.remove(written)
                if not others:
                    del self.written[written.key]
            if most <= 0 and unwoken:
                yield
                most = self.portion

    def wake_where_written(self, waiter: Waiter) -> None:
        parked, found = waiter.parked, self.written
        if parked is None:
            return
        keys = (
            [key for key in parked if key in found]
            if len(parked) < len(found)
            else [key for key in found if key in parked]
        )
        for key in keys:
            for written in list(found[key]):
                self._wake(written, waiter)

    def _wake(self, written: Written, waiter: Waiter) -> None:
        """Use up a registration, if the waiter still has it, whose key was written earlier."""
        registered = written.registered
        if waiter not in registered:
            return
        del registered[waiter]  # compiled, `pop` costs three times as much
        ended = self._count_down(waiter, written.key)
        if ended == AWAITING_KEYS:
            waiter.fire(None)
        elif ended == AWAITING_VALUE:
            waiter.awaited = b""
            waiter.fire(written.value)
        elif ended == AWAITING_ITEM and written.empty:
            waiter.awaited = b""
            waiter.grant(0, None)
        elif ended != IDLE:
            self._fire(waiter, ended)

    def begin_waking(self, keys: dict[bytes, None]) -> None:
        """Wake the waiters of these keys, which have all been written, in steps; those of one key in order of arrival.

        Registrations stay where they are until then: taking out those of 131,072 keys would take too long. So what is
        about to change such a key otherwise calls `finish_waking` first. (`keys` is a dict because a set has no order.)
        """
        self.set_waking(keys)
        self.weigh_awaited(keys)
        self.defer(Later(self._wake_keys(keys), partial(self._wake_at_keys, keys)))

    def _wake_keys(self, keys: dict[bytes, None]) -> Iterator[None]:
        while True:
            most = self.portion
            while keys and most > 0:
                key, _ = keys.popitem()
                registered = self.waiters.get(key)
                if registered is not None:
                    most -= len(registered)
                    self.wake_all(key)
                most -= 1
            self.weigh_awaited(keys)
            if not keys:
                self.set_waking(None)
                return
            yield

    def _wake_at_keys(self, keys: dict[bytes, None], waiter: Waiter) -> None:
        parked = waiter.parked
        if parked is None:
            return
        for key in [key for key in parked if key in keys]:
            self._wake_now(waiter, key)

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

    def _wake_now(self, waiter: Waiter, key: bytes) -> None:
        """Use up one registration under a key that was written."""
        del self.waiters[key][waiter]
        self._drop_empty(key)
        ended = self._count_down(waiter, key)
        if ended != IDLE:
            self._fire(waiter, ended)

    def wake_counter(self, counter: Counter) -> None:
        """Use up the registration of a counter whose number was written."""
        self._unpark(counter)
        self.counter_changed(counter)

    def _take_counter(self, key: bytes, registered: dict[Waiter, None]) -> Counter | None:
        """Use up the registration of the counter under this key and return it, if it has one."""
        counter = self.counters.get(key)
        if counter is None or counter not in registered:
            return None
        del registered[counter]
        self._count_down(counter, key)
        return counter

    def wake_next(self, key: bytes, handed_on: bool = False) -> bool:
        """Use up registrations under a queue for one item, up to and including that of the waiter which is to take it.

        False if no waiter takes it; then none would take a second one either.
        A waiter that awaits other keys too, or a value, does not take it. Of a group, the first member takes it and the
        others stay registered. An item that is handed on skips waiters in a barrier of that name. See also
        `Waiter.skip_suspended`.
        """
        self.finish_waking(key)
        if key not in self.waiters:
            return False
        registered = self.waiters[key]
        used: list[Waiter] = []
        taker: Waiter | None = None
        member: Waiter | None = None
        for waiter in registered:
            if self.working:
                self.resolve(waiter)
            if isinstance(waiter, Counter) or (handed_on and waiter.barrier == key):
                continue
            parked = waiter.parked
            assert parked is not None
            if len(parked) > 1 or waiter.state == AWAITING_VALUE or waiter.state == IDLE:
                used.append(waiter)
            elif isinstance(waiter, SharedWait):
                member = waiter.first_present(key)
                if member is not None:
                    break
            elif not waiter.skip_suspended(key):
                taker = waiter
                break
        self.taken += len(used)
        if len(used) > self.portion:
            later = dict.fromkeys(used)
            for waiter in used:
                del registered[waiter]
            self._wake_later(key, later)
        else:
            if len(used) > self._most_at_once:
                self._woken += len(used)
            for waiter in used:
                self._use_up(waiter, key, registered)
        if taker is not None:
            self._use_up(taker, key, registered)
        removed = len(used) + (taker is not None)
        if not registered:
            del self.waiters[key]
            self.holes.pop(key, None)
        elif len(registered) >= LONG - removed:
            self._compact(key, registered, removed)
        if member is not None and member.group is not None:
            self._leave_group(member, member.group)
            member.handoff = self.new_handoff(key)
            member.fire(None)
        return taker is not None or member is not None

    def _use_up(self, waiter: Waiter, key: bytes, registered: dict[Waiter, None]) -> None:
        """Use up the registration of a waiter under a queue, for an item that it is to take if that ends its wait."""
        del registered[waiter]
        ended = self._count_down(waiter, key)
        if ended != IDLE:
            if ended == AWAITING_KEYS:
                waiter.handoff = self.new_handoff(key)
            self._fire(waiter, ended)

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
        if waiter.skip_suspended(key):  # it asks again, should it come back
            waiter.grant(0, None)
            return
        before = self.charge(waiter.account())  # whose lease it is, and for whom it ends
        length, item = self.lease(waiter, key, waiter.number)
        self.charge(before)
        waiter.grant(length, item)

    # Groups

    def wait_is_over(self, group: SharedWait) -> None:
        """Wake the members of a group that has nothing left to await: now if they are few."""
        self._close(group)
        if len(group.members) > self._most_at_once:
            self.defer(Later(self._wake_each_member(group), partial(self._wake_member_of, group)))
        else:
            self._wake_members(group, FEW)

    def _wake_members(self, group: SharedWait, most: int) -> None:
        """Wake at most so many members, in order of arrival."""
        members = group.members
        for _ in range(min(most, len(members))):
            self._wake_member_of(group, next(iter(members)))

    def _wake_each_member(self, group: SharedWait) -> Iterator[None]:
        while True:
            self._wake_members(group, self.portion)
            if not group.members:
                return
            yield

    def _wake_member_of(self, group: SharedWait, waiter: Waiter) -> None:
        if waiter.group is group:
            group.remove(waiter)
            self.wake_member(waiter, group)

    def wake_member(self, waiter: Waiter, group: Group) -> None:
        """Fire a waiter that has been removed from its group, whose wait is over."""
        self._weigh(waiter, -group.member_bytes)
        waiter.fire(None)

    def forget_waiters(self) -> None:
        """Drop all waiters, without waking them: in a forked child the threads that wait do not exist."""
        for registrations in (self.waiters, self.counters, self.holes, self.handoffs):
            registrations.clear()
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
        """Offer an item of a queue to waiters that were skipped, if there is one; True if that woke one."""
        length, handoffs = self.queue_len(key), self.handoffs.get(key, 0)
        if key not in self.waiters or length <= handoffs:
            return False
        self.wake_next(key, handed_on=True)
        return self.queue_len(key) != length or self.handoffs.get(key, 0) != handoffs

    # Waiters for a number

    def _register_counter(self, counter: Counter) -> None:
        """Register a counter for the next write to its key. (A queue of that name skips it.)"""
        key = counter.key
        counter.state = AWAITING_KEYS
        counter.parked = {key: None}
        self._register(counter, key)

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
                self.defer(Later(self._wake_reached(counter), partial(self._wake_if_reached, counter)))
        if counter.awaiting:
            self._register_counter(counter)
        else:
            del self.counters[key]

    def _wake_reached(self, counter: Counter) -> Iterator[None]:
        """Wake the waiters whose target has been reached."""
        while True:
            for _ in range(self.portion):
                waiter = counter.next_reached(counter.reached)
                if waiter is None:
                    counter.reaching = False
                    if not counter.awaiting and self.counters.get(counter.key) is counter:
                        self._drop_counter(counter)
                    return
                self.wake_member(waiter, counter)
            yield

    def _wake_if_reached(self, counter: Counter, waiter: Waiter) -> None:
        if waiter.group is counter and waiter.number <= counter.reached:
            counter.remove(waiter)
            self.wake_member(waiter, counter)

    # Commands that have to wait for deferred work

    def wait_until_woken(self, counter: Counter, target: int, then: Callable[[], Any]) -> None:
        """Have a WAIT_COUNT for a reached target return `then()`, once earlier waiters for it are woken."""
        self.running = Running(self._until_woken(counter, target, then))

    def _until_woken(self, counter: Counter, target: int, then: Callable[[], Any]) -> Steps:
        while counter.reaching and target <= counter.reached:
            yield
        return then()

    def until_not_postponed(self, waiter: Waiter) -> Steps:
        """What a session does instead of its next command while `postpones` its waiter. It has no reply."""
        while self.postpones(waiter):
            yield
        return []

    def offer_returned(self, keys: deque[bytes]) -> None:
        """Offer items that went back to their queues, one for each key, to the next waiters, in order.

        At once if that is soon done; else others may take the items in between.
        """
        offering = self._offer_returned(keys)
        for _ in offering:
            self.defer(Later(offering))
            break

    def _offer_returned(self, keys: deque[bytes]) -> Iterator[None]:
        refused: set[bytes] = set()  # queues of which no waiter takes an item
        late = False  # whether the items may have been taken, or offered already
        before = self.taken
        while keys:
            if self.taken - before > _TAKEN:
                late = True
                yield
                before = self.taken
            key = keys.popleft()
            if key in refused or key not in self.waiters:
                continue
            if late and self.queue_len(key) <= self.handoffs.get(key, 0):
                continue
            if not self.wake_next(key, handed_on=True):
                refused.add(key)
