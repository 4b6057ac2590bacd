"""Waiters parked on keys: registrations, wake-ups and the hand-off of queue items.

This module knows which waiters a write or a queued item wakes, and in which order. It does not know what is stored: the
keyspace, which extends `WaiterRegistry`, supplies values, numbers and items. What a waiter replies when it is woken is
its own `fire` (`waiter_types.py`), which for a connection is that of `session/server.py`.

Terms:

* A *registration* lets a waiter be woken when a key appears. Registrations under one key are kept in order of arrival,
  each with a count: how often one WAIT named the key.
* A registration is *stale* when it outlives the wait that made it: PyTorch's servers let a second WAIT replace the
  number of registrations that are awaited, but not the registrations themselves. Its count is then negative. A write
  uses it up like any other, and counts down whatever its waiter awaits by then; a queue skips it.
* A *group* is registered for all its members: waiters for one counter, or WAITs for one list of keys.
* A *hand-off* is an item of a queue that a woken waiter is expected to take with its next command. If that command does
  something else, or the waiter leaves, the next waiter is woken.

Invariants: a waiter fires once, when the registrations that it awaits are used up, and no registration is left that
nothing can use up. If waiters (except those in a barrier of the same name, and those that were passed over) are parked
on a queue that holds items, each of these items is covered by a hand-off. `size` includes every registration.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from ..base.errors import LimitError, ProtocolError
from ..base.limits import PARKED_BYTES
from ..wire.values import Framed
from .accounts import Account
from .incremental import (
    AWAITED_BYTES,
    UNCUT,
    DeferredWork,
    IncrementalCommand,
    UnparkDeparted,
    Value,
    WakeAtCount,
    WakeKeys,
    WakeMany,
    WakeMembers,
)
from .waiter_types import (
    AWAITING_ITEM,
    AWAITING_KEYS,
    AWAITING_VALUE,
    IDLE,
    Counter,
    Group,
    Handoff,
    KeyList,
    SharedWait,
    Waiter,
)

_LONG: Final = 16
"""Registrations under one key from which on the holes that others left are counted."""

_HOLES: Final = 16
"""A dict of n registrations is rebuilt once it has more than sqrt(n * _HOLES) holes: copying and skipping balance."""

_FEW: Final = 16
"""Members of a group that are woken at once, as one write may end the waits of many groups; and registrations that are
dropped at once, as many waiters may go at the same moment."""


class WaiterRegistry:
    """The waiters of one store, and the work that waking them leaves for later. The base class of `Keyspace`."""

    def __init__(self, max_size: int, portion: int) -> None:
        self.portion = portion
        """Keys, or waiters, that a command handles at once; a command with more is carried out in steps."""
        self._most_at_once: int = portion if portion == UNCUT else min(_FEW, portion)
        """Registrations of a waiter that has gone which are dropped at once, and of a key that are used up at once in
        any case."""
        self._woken: int = 0
        """Registrations that writes and items have used up at once since the last step."""
        self.taken: int = 0
        """Registrations that items have used up, or that were set aside as stale, so far."""
        self.incremental: IncrementalCommand | None = None
        """Set by a command that has to go on in steps; its return value is then void. The caller takes it."""
        self.work: deque[DeferredWork] = deque()
        """What finished commands have left to do; see `step`."""
        self.working = False
        """Whether there is work: cheaper to test than a deque."""
        self.waking: WakeKeys | None = None
        """The part of the deferred work that wakes the waiters of many keys."""
        self._awaited: int = 0
        """Bytes counted for it."""
        self.unparking: UnparkDeparted | None = None
        """The part of the deferred work that drops registrations of waiters that have gone."""
        self.on_work: Callable[[], object] | None = None
        """Called when the first work is deferred."""
        self.waiters: dict[bytes, dict[Waiter, int]] = {}
        """By key: the registrations in order of arrival, with their counts."""
        self.stale: dict[bytes, dict[Waiter, int]] = {}
        """By key: stale registrations that a queue has skipped, so that its next push does not look at them again.

        They precede those in `waiters`, where the key is present too, though perhaps with nothing in it.
        """
        self.unmarked: set[Waiter] = set()
        """Idle waiters with many stale registrations whose counts are not negative yet.

        `MarkStale` must run before one of them is parked again.
        """
        self.counters: dict[bytes, Counter] = {}
        """By key: the waiters for its number."""
        self.tracked: dict[bytes, KeyList] = {}
        """By key: the list of keys that names it and for which something is kept; see `SharedRequests`."""
        self.holes: dict[bytes, int] = {}
        """By key with many registrations: how many were removed since its dict was built."""
        self.handoffs: dict[bytes, int] = {}
        """By queue: the number of hand-offs."""
        self.size: int = 0
        """Bytes counted for the whole store, waiters included."""
        self.parked: int = 0
        """Of these, bytes counted for waiters."""
        self.max_size: int = max_size
        """The size above which `on_full` decides."""
        self.on_full: Callable[[int], None] | None = None
        """Called with the growth that `max_size` does not allow: returns once it is allowed, or raises LimitError."""
        self.account: Account | None = None
        """What is counted for whoever changes the store now, if that is limited; see `charge`."""
        self._keys_before: int = 0
        self._stored_before: int = 0
        """What was stored when it was charged."""
        self._last_key: bytes = b""
        """The key of the last BARRIER, or WAIT for one key; see `known`."""

    # What the keyspace supplies

    def count_keys(self) -> int:
        """Return the number of keys and queues."""
        raise NotImplementedError

    def reply_value(self, key: bytes) -> Value:
        """Return the value of a key as it is sent to a waiter that fetches it."""
        raise NotImplementedError

    def number_at(self, key: bytes) -> int:
        """Return the number under a key, 0 if it is missing. Raises ProtocolError if the value is not a number."""
        raise NotImplementedError

    def queue_len(self, key: bytes) -> int:
        """Return the number of items in a queue."""
        raise NotImplementedError

    def update_noting(self) -> None:
        """Find out whether anything has to be noted before a key changes, such as `finish_waking`."""
        raise NotImplementedError

    def lease(self, waiter: Waiter, key: bytes, ticket: int) -> tuple[int, Framed | None]:
        """Lease the oldest item of a queue to the waiter."""
        raise NotImplementedError

    # Deferred work

    def defer(self, work: DeferredWork) -> None:
        """Leave work for `step`."""
        self.work.append(work)
        self.working = True
        if len(self.work) == 1 and self.on_work is not None:
            self.on_work()

    def step(self) -> None:
        """Do a portion of the deferred work. There must be some."""
        work = self.work[0]
        self._woken = -self.portion  # a step of `WakeKeys` stops by itself
        if work.step(self.portion):
            self.work.popleft()
            self.working = len(self.work) > 0
        self._woken = 0

    def postpones(self, waiter: Waiter) -> bool:
        """Whether a waiter may have more registrations for `waking` to use up than `resolve` uses up at once.

        Its next command has to be postponed until that work is done.
        """
        return self.waking is not None and self._needs_steps(waiter)

    def resolve(self, waiter: Waiter) -> None:
        """Do the deferred work that concerns a waiter, before it sends or receives anything else.

        For one whose commands are postponed that takes long: only a queue that needs to know what it awaits does so.
        """
        group = waiter.group
        if group is not None:
            for work in list(self.work):  # it may grow by the waking of the group
                work.resolve(group)
        for work in self.work:
            work.resolve(waiter)

    # Size

    def _grow(self, growth: int) -> None:
        """Make sure that the store may grow by so many bytes. Raises LimitError."""
        if growth > 0 and self.size + growth > self.max_size:
            if self.on_full is None:
                raise LimitError("budget_bytes", self.size + growth, self.max_size)
            self.on_full(growth)

    def _make_room(self, growth: int, keys: int = 0) -> None:
        """Make sure that what is stored may grow by so many bytes, and keys. Raises LimitError or NotAllowedError."""
        account = self.account
        if account is not None:
            keys += self.count_keys() - self._keys_before
            size = growth + self.size - self.parked - self._stored_before
            if not account.usage.allows(keys, size):
                account.bound(self._keys_before, self._stored_before)
                account.usage.demand(keys, size)
        self._grow(growth)

    def charge(self, account: Account | None) -> Account | None:
        """Count for this account what is stored, or no longer, from now on; return the one before, to be put back."""
        before = self.account
        if before is not account:
            keys, stored = self.count_keys(), self.size - self.parked
            if before is not None:
                before.add(keys - self._keys_before, stored - self._stored_before)
            self.account = account
            self._keys_before, self._stored_before = keys, stored
        return before

    def registration_bytes(self, key: bytes) -> int:
        return len(key) + PARKED_BYTES

    def _weigh(self, waiter: Waiter, amount: int) -> None:
        """Count so many bytes more, or less, for a waiter."""
        waiter.weight += amount
        self.parked += amount
        self.size += amount

    def hold(self, waiter: Waiter, size: int) -> None:
        """Count bytes that are held for a waiter elsewhere. Raises LimitError."""
        self._grow(size)
        self._weigh(waiter, size)

    def hold_less(self, waiter: Waiter, size: int) -> None:
        self._weigh(waiter, -size)

    # Registering

    def park(self, waiter: Waiter, keys: list[bytes]) -> None:
        """Register the waiter under missing keys and let it await as many registrations. Raises LimitError."""
        group = waiter.group
        growth = 0 if group is None else self._separation_bytes(waiter)
        for key in keys:
            growth += self.registration_bytes(key)
            if self.tracked:
                self.close_group(key)
        self._grow(growth)
        if isinstance(group, SharedWait):
            self._separate(waiter, group)
        elif group is not None:
            self._leave_group(waiter, group)
        waiter.state = AWAITING_KEYS
        waiter.awaited = b""
        waiter.remaining = len(keys)
        if waiter.parked is None:
            waiter.parked = set()
        added = 0
        for key in keys:
            registered = self.waiters.get(key)
            if registered is None:
                registered = self.waiters[key] = {}
            if key not in waiter.parked:
                registered[waiter] = 1
                waiter.parked.add(key)
                added += self.registration_bytes(key)
            elif (count := registered.get(waiter, 0)) > 0:
                registered[waiter] = count + 1
            else:  # stale: renewed, and moved to the end
                registered[waiter] = 1 - self._pop_registration(waiter, key)
        self._weigh(waiter, added)

    def park_on(self, waiter: Waiter, key: bytes) -> None:
        """Do the same as `park` for one key: what ranks send most, without what a list needs. Raises LimitError."""
        if waiter.parked is not None or waiter.group is not None:
            self.park(waiter, [key])
            return
        if self.tracked:
            self.close_group(key)
        size = self.registration_bytes(key)
        self._grow(size)
        waiter.state = AWAITING_KEYS
        waiter.awaited = b""
        waiter.remaining = 1
        waiter.parked = {key}
        self._register(waiter, key, 1)

    def known(self, key: bytes) -> bytes:
        """Return the same key as the peer before has sent, if they are equal.

        The ranks of a job name one key after each other. The hash of that object is known, dicts find it by identity,
        and the waiters do not have a copy each.
        """
        last = self._last_key
        if key == last:
            return last
        self._last_key = key
        return key

    def _register(self, waiter: Waiter, key: bytes, count: int) -> None:
        """Add a registration, and count it for the waiter."""
        registered = self.waiters.get(key)
        if registered is None:
            registered = self.waiters[key] = {}
        registered[waiter] = count
        self._weigh(waiter, self.registration_bytes(key))

    def _require_idle(self, waiter: Waiter) -> None:
        """Raise ProtocolError if the waiter awaits something: a wait of the extension replaces no other wait."""
        if waiter.state != IDLE:
            raise ProtocolError("connection already has a pending wait")

    # Unregistering

    def _needs_steps(self, waiter: Waiter) -> bool:
        """Whether dropping the waiter's registrations takes more than one portion."""
        return waiter.parked is not None and len(waiter.parked) > self.portion

    def _make_idle(self, waiter: Waiter) -> None:
        """Let the waiter await nothing. Its registrations stay."""
        if waiter.group is not None:
            self._leave_group(waiter, waiter.group)
        waiter.state = IDLE
        waiter.awaited = b""
        waiter.remaining = 0
        waiter.barrier = None

    def _unpark(self, waiter: Waiter) -> None:
        """Let the waiter await nothing and drop all its registrations."""
        self._make_idle(waiter)
        parked = waiter.parked
        if parked is None:
            return
        waiter.parked = None
        if self.unmarked:
            self.unmarked.discard(waiter)
        for key in parked:
            self._unregister(waiter, key)

    def has_many(self, waiter: Waiter) -> bool:
        """Whether the registrations of a waiter that has gone are dropped later: others may go at the same moment."""
        return waiter.parked is not None and len(waiter.parked) > self._most_at_once

    def unpark_later(self, waiter: Waiter) -> None:
        """Let a waiter that has gone await nothing, and drop its registrations in steps."""
        self._make_idle(waiter)
        if self.unparking is None:
            self.unparking = UnparkDeparted(self)
            self.defer(self.unparking)
        self.unparking.waiters.append(waiter)

    def unpark_some(self, waiter: Waiter, most: int) -> bool:
        """Drop at most so many registrations of an idle waiter; True if none is left."""
        if self.working:
            self.resolve(waiter)  # registrations that a WakeMany holds
        parked = waiter.parked
        if parked is not None:
            for _ in range(min(most, len(parked))):
                self._unregister(waiter, parked.pop())
            if parked:
                return False
            waiter.parked = None
        self.unmarked.discard(waiter)
        return True

    def _unregister(self, waiter: Waiter, key: bytes) -> None:
        """Drop one registration."""
        self._pop_registration(waiter, key)
        self._weigh(waiter, -self.registration_bytes(key))
        self._drop_empty(key)

    def _drop_empty(self, key: bytes) -> None:
        """Drop what is kept for a key of which a registration was removed, if that was the last; or note the hole."""
        registered = self.waiters[key]
        if not registered and key not in self.stale:
            del self.waiters[key]
        elif len(registered) >= _LONG - 1:
            self._compact(key, registered, 1)

    def _pop_registration(self, waiter: Waiter, key: bytes) -> int:
        """Remove a registration from `waiters`, or from `stale`, and return its count."""
        count = self.waiters[key].pop(waiter, 0)
        if count:
            return count
        stale = self.stale[key]
        count = stale.pop(waiter)
        if not stale:
            del self.stale[key]
        return count

    def _compact(self, key: bytes, registered: dict[Waiter, int], removed: int) -> None:
        """Note that registrations were removed, and rebuild the dict if it has too many holes.

        Looking for the first entry of a dict steps over the places of all that were removed before it.
        """
        holes = self.holes.get(key, 0) + removed
        if len(registered) < _LONG or holes * holes > _HOLES * len(registered):
            self.holes.pop(key, None)
            self.waiters[key] = dict(registered)
        else:
            self.holes[key] = holes

    # Using up registrations

    def _count_down(self, waiter: Waiter, key: bytes, count: int) -> int:
        """Take a used-up registration off the waiter. Returns the state that this ends; IDLE if it ends no wait."""
        parked = waiter.parked
        assert parked is not None
        parked.remove(key)
        self._weigh(waiter, -self.registration_bytes(key))
        remaining = waiter.remaining
        waiter.remaining = remaining - count
        if remaining <= 0 or remaining > count:
            if not parked and remaining <= 0:  # that was the last stale one
                waiter.parked = None
                if self.unmarked:
                    self.unmarked.discard(waiter)
            return IDLE
        state = waiter.state
        if parked:
            self.end_wait(waiter)
        else:  # the common case, without a call
            waiter.state = IDLE
            waiter.barrier = None
            waiter.parked = None
        return state

    def end_wait(self, waiter: Waiter) -> None:
        """Make the waiter idle. Registrations that it still has become stale."""
        waiter.state = IDLE
        waiter.barrier = None
        keys = waiter.parked
        if not keys:
            waiter.parked = None
            return
        if len(keys) > self.portion:
            self.unmarked.add(waiter)
        else:
            self.mark_stale(waiter, list(keys))

    def mark_stale(self, waiter: Waiter, keys: list[bytes]) -> None:
        """Make the counts of an idle waiter's registrations negative."""
        for key in keys:
            registered = self.waiters.get(key)
            if registered is None:
                continue  # a WakeMany has it, or it is being used up just now
            count = registered.get(waiter, 0)
            if count > 0:
                registered[waiter] = -count

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

    def begin_waking(self, work: WakeKeys) -> None:
        """Let this work wake the waiters of the keys that it expects, which have all been written."""
        self.set_waking(work)
        self.weigh_awaited(work.keys)
        self.defer(work)

    def set_waking(self, work: WakeKeys | None) -> None:
        """Begin, or end, waking the waiters of many keys."""
        self.waking = work
        self.update_noting()

    def weigh_awaited(self, keys: dict[bytes, None]) -> None:
        """Count the keys that `waking` still has to do with."""
        growth = len(keys) * AWAITED_BYTES - self._awaited
        self._awaited += growth
        self.parked += growth
        self.size += growth

    def finish_waking(self, key: bytes) -> None:
        """Wake the waiters of a key that `waking` has to do with, because the key is about to change."""
        waking = self.waking
        if waking is not None and key in waking.keys:
            del waking.keys[key]
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
        item that is handed on skips waiters in a barrier of that name. See also `Waiter.pass_over`.
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
                    elif waiter.pass_over(key):
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
        elif len(registered) >= _LONG - removed:
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

    def _leave_group(self, waiter: Waiter, group: Group) -> None:
        """Make a member idle and remove it from its group, and drop the group if it was the last."""
        last = group.remove(waiter)
        self._weigh(waiter, -group.member_bytes)
        if not last:
            return
        if isinstance(group, Counter):
            self._drop_counter(group)
        elif isinstance(group, SharedWait):
            self._close(group)
            if self.has_many(group):
                self.unpark_later(group)
            else:
                self._unpark(group)

    def close_group(self, key: bytes) -> None:
        """Let no further waiter join the group for the list that names this key.

        To be called where a new WAIT for that list would be registered otherwise than the group: when one of its keys
        ceases to exist, or comes into being without using up the group's registration, and when another waiter is
        registered under it, behind which that WAIT has to stay.
        """
        listed = self.tracked.get(key)
        if listed is not None and listed.group is not None:
            self._close(listed.group)

    def _close(self, group: SharedWait) -> None:
        listed = group.listed
        if listed is not None:
            listed.group = None
            group.listed = None

    def _separation_bytes(self, waiter: Waiter) -> int:
        """Return by how much the store grows, at most, when the waiter leaves its group and is registered by itself."""
        group = waiter.group
        return group.weight if isinstance(group, SharedWait) else 0

    def _separate(self, waiter: Waiter, group: SharedWait) -> None:
        """Replace a waiter's membership by registrations of its own, behind all others."""
        parked = group.parked
        assert parked is not None
        registrations = [(key, self.waiters[key][group]) for key in parked]
        self._leave_group(waiter, group)
        waiter.parked = set()
        for key, count in registrations:
            if self.tracked:
                self.close_group(key)
            waiter.parked.add(key)
            self._register(waiter, key, count)

    def wait_is_over(self, group: SharedWait) -> None:
        """Wake the members of a group that has nothing left to await: now if they are few."""
        self._close(group)
        if len(group.members) > min(_FEW, self.portion):
            self.defer(WakeMembers(self, group))
        else:
            self.wake_members(group, _FEW)

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

    def _drop_counter(self, counter: Counter) -> None:
        del self.counters[counter.key]
        self._unpark(counter)

    def counter_changed(self, counter: Counter) -> None:
        """Wake the waiters whose target a write has reached, and register the counter anew for the others."""
        key = counter.key
        try:
            total = self.number_at(key)
        except ProtocolError:
            self._register_counter(counter)  # it is not a number: that ends no wait
            return
        if counter.reaching is not None:
            counter.reaching.total = max(counter.reaching.total, total)
        else:
            for _ in range(self.portion):
                waiter = counter.next_reached(total)
                if waiter is None:
                    break
                self.wake_member(waiter, counter)
            else:
                counter.reaching = WakeAtCount(self, counter, total)
                self.defer(counter.reaching)
        if counter.awaiting:
            self._register_counter(counter)
        else:
            del self.counters[key]

    def wake_reached(self, counter: Counter, total: int, most: int) -> bool:
        """Wake at most so many waiters whose target has been reached; True if none is left."""
        for _ in range(most):
            waiter = counter.next_reached(total)
            if waiter is None:
                counter.reaching = None
                if not counter.awaiting and self.counters.get(counter.key) is counter:
                    self._drop_counter(counter)
                return True
            self.wake_member(waiter, counter)
        return False
