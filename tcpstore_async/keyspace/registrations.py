"""Registrations: which waiters are parked on which keys, and what they count in memory.

This module does not know what is stored, nor whom a write wakes: `WaiterRegistry`, which extends `Registrations`, does.

Terms:

* A *registration* lets a waiter be woken when a key appears. Those under one key are kept in order of arrival. A write
  to the key uses them up, and a wait ends with the last registration of its waiter.
* A *group* is registered for all its members: waiters for one counter, or WAITs for one list of keys.
* A *hand-off* is an item of a queue that a woken waiter is expected to take with its next command. If that command does
  something else, or the waiter leaves, the next waiter is woken.

Invariants: no registration outlives the wait that made it, whether that ends or another wait of its waiter replaces it.
`size` includes every registration.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

from ..base.clock import Clock
from ..base.errors import LimitError, ProtocolError
from ..base.limits import PARKED_BYTES
from ..wire.values import Value
from .accounts import Account
from .steps import UNCUT, Later, Running, Steps
from .waiter_types import (
    AWAITING_KEYS,
    IDLE,
    Counter,
    Group,
    GroupRegistry,
    KeyList,
    SharedWait,
    Waiter,
)

LONG: Final = 16
"""Registrations under one key from which on the holes that others left are counted."""

_HOLES: Final = 16
"""A dict of n registrations is rebuilt once it has more than sqrt(n * _HOLES) holes: copying and skipping balance."""

FEW: Final = 16
"""Members of a group that are woken at once, as one write may end the waits of many groups; and registrations that are
dropped at once, as many waiters may go at the same moment."""


class Written:
    """The registrations under one key that a write has used up."""

    def __init__(self, key: bytes, registered: dict[Waiter, None], value: Value, empty: bool) -> None:
        self.key = key
        self.registered = registered
        self.value = value
        """The value at that time, as it is sent to a waiter that fetches it."""
        self.empty = empty
        """Whether the queue of this name had no items."""


class Registrations(GroupRegistry):
    """Which waiters are registered under which keys, and what that counts. The base class of `WaiterRegistry`."""

    def __init__(self, max_size: int, portion: int) -> None:
        super().__init__()
        self.clock = Clock()
        self.portion = portion
        """Keys, or waiters, that a command handles at once; a command with more is carried out in steps."""
        self._most_at_once: int = portion if portion == UNCUT else min(FEW, portion)
        """Registrations of a waiter that has gone which are dropped at once, and of a key that are used up at once in
        any case."""
        self._woken: int = 0
        """Registrations that writes and items have used up at once since the last step."""
        self.taken: int = 0
        """Registrations that items have used up so far."""
        self.running: Running | None = None
        """Set by a command that continues in steps; its return value is then void. The caller takes it."""
        self.work: deque[Later] = deque()
        """What finished commands have left to do; see `step`."""
        self.working = False
        """Whether there is work: cheaper to test than a deque."""
        self.unwoken: deque[Written] = deque()
        """Registrations that writes have used up, and of whose waiters deferred work has yet to tell that."""
        self.written: dict[bytes, list[Written]] = {}
        """The same, keyed by key."""
        self.waking: dict[bytes, None] | None = None
        """Keys written by a MULTI_SET whose waiters deferred work has yet to wake; None if there is no such work."""
        self._awaited: int = 0
        """Bytes counted for them."""
        self.departed: deque[Waiter] = deque()
        """Waiters that have gone. While there are some, deferred work drops their registrations."""
        self.on_work: Callable[[], object] | None = None
        """Called when the first work is deferred."""
        self.waiters: dict[bytes, dict[Waiter, None]] = {}
        """The registered waiters in order of arrival, keyed by key."""
        self.counters: dict[bytes, Counter] = {}
        """The waiters for the number under a key, keyed by key."""
        self.tracked: dict[bytes, KeyList] = {}
        """The tracked list that names a key, keyed by key; see `SharedRequests`."""
        self.holes: dict[bytes, int] = {}
        """Registrations removed since the dict of a key was built, keyed by key; only for keys with many."""
        self.handoffs: dict[bytes, int] = {}
        """The number of hand-offs, keyed by queue."""
        self.size: int = 0
        """Bytes counted for the whole store, waiters included."""
        self.parked: int = 0
        """Of these, bytes counted for waiters."""
        self.max_size: int = max_size
        """The size above which `on_full` decides."""
        self.on_full: Callable[[int], None] | None = None
        """Called with the growth that `max_size` does not allow: returns once it is allowed, or raises LimitError."""
        self.account: Account | None = None
        """The account charged for changes of the store at the moment, if it is limited; see `charge`."""
        self._keys_before: int = 0
        self._stored_before: int = 0
        """What was stored when it was charged."""
        self._last_key: bytes = b""
        """The key of the last BARRIER, or WAIT for one key; see `known`."""

    # What others supply

    def count_keys(self) -> int:
        """Return the number of keys and queues."""
        raise NotImplementedError

    def update_noting(self) -> None:
        """Find out whether anything has to be noted before a key changes, such as `finish_waking`."""
        raise NotImplementedError

    def wake_where_written(self, waiter: Waiter) -> None:
        """Use up the registrations of a waiter that are in `written`."""
        raise NotImplementedError

    # Deferred work

    def defer(self, work: Later) -> None:
        """Leave work for `step`."""
        recorder = self.clock.recorder
        if work.aside and recorder is not None and recorder.again:
            while not work.step():
                pass
            return
        self.work.append(work)
        self.working = True
        if len(self.work) == 1 and self.on_work is not None:
            self.on_work()

    def step(self) -> None:
        """Do a portion of the deferred work. There must be some."""
        work = self.work[0]
        if not work.aside and self.clock.enters(self, "step"):
            return
        woken = self._woken if work.aside else 0
        self._woken = -self.portion  # a step of `_wake_keys` stops by itself
        if work.step():
            self.work.popleft()
            self.working = len(self.work) > 0
        self._woken = woken

    def postpones(self, waiter: Waiter) -> bool:
        """Whether a waiter may have more registrations for deferred work to use up than `resolve` uses up at once.

        Its next command has to be postponed until that work is done.
        """
        return self.wakes_many() and self._needs_steps(waiter)

    def wakes_many(self) -> bool:
        """Whether deferred work has to wake the waiters of many keys."""
        return self.waking is not None or len(self.written) > self.portion

    def resolve(self, waiter: Waiter) -> None:
        """Do the deferred work that concerns a waiter, before it sends or receives anything else.

        For one whose commands are postponed that takes long: only a queue that needs to know what it awaits does so.
        """
        if waiter.group is not None:
            self._resolve(waiter.group)
        self._resolve(waiter)

    def _resolve(self, waiter: Waiter) -> None:
        if self.written:
            self.wake_where_written(waiter)
        for work in list(self.work):  # resolving one may defer more
            if work.resolve is not None:
                work.resolve(waiter)

    # Size

    def _grow(self, growth: int) -> None:
        """Check that the store may grow by so many bytes. Raises LimitError."""
        if growth > 0 and self.size + growth > self.max_size:
            if self.on_full is None:
                raise LimitError("budget_bytes", self.size + growth, self.max_size)
            self.on_full(growth)

    def _make_room(self, growth: int, keys: int = 0) -> None:
        """Make sure that what is stored may grow by so many bytes, and keys. Raises LimitError or NotAllowedError."""
        account = self.account
        gone = 0, 0
        if account is not None:
            keys += self.count_keys() - self._keys_before
            size = growth + self.size - self.parked - self._stored_before
            if not account.usage.allows(keys, size):
                gone = account.gone(self._keys_before, self._stored_before)
                account.usage.demand(keys, size, *gone)
        self._grow(growth)
        if account is not None:  # only now, as what is refused must change nothing
            account.add(*gone)

    def charge(self, account: Account | None) -> Account | None:
        """Charge further changes to this account; return the previous one, for the caller to put back."""
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
        """Adjust the bytes charged to a waiter."""
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
        """Let the waiter await missing keys, instead of what it awaited before. Raises LimitError."""
        growth = 0
        for key in keys:
            growth += self.registration_bytes(key)
        self._grow(growth)
        if waiter.state != IDLE:
            self._unpark(waiter)
        waiter.state = AWAITING_KEYS
        self._register_under(waiter, keys)

    def park_on(self, waiter: Waiter, key: bytes) -> None:
        """Do the same as `park` for one key: what ranks send most, without what a list needs. Raises LimitError."""
        size = self.registration_bytes(key)
        self._grow(size)
        if waiter.state != IDLE:
            self._unpark(waiter)
        if self.tracked:
            self.close_group(key)
        waiter.state = AWAITING_KEYS
        waiter.parked = {key: None}
        self._register(waiter, key)

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

    def _register(self, waiter: Waiter, key: bytes) -> None:
        """Add a registration, and count it for the waiter."""
        registered = self.waiters.get(key)
        if registered is None:
            registered = self.waiters[key] = {}
        registered[waiter] = None
        self._weigh(waiter, self.registration_bytes(key))

    def _register_under(self, waiter: Waiter, keys: list[bytes]) -> None:
        """Register a waiter under keys, of which one may come more than once."""
        parked = waiter.parked
        if parked is None:
            parked = waiter.parked = {}
        for key in keys:
            if key not in parked:
                if self.tracked:
                    self.close_group(key)
                parked[key] = None
                self._register(waiter, key)

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
        waiter.barrier = None

    def _unpark(self, waiter: Waiter) -> None:
        """Let the waiter await nothing and drop all its registrations."""
        self._make_idle(waiter)
        parked = waiter.parked
        if parked is None:
            return
        waiter.parked = None
        for key in parked:
            self._unregister(waiter, key)

    def unpark_then(self, waiter: Waiter, then: Callable[[], Any]) -> None:
        """Let the waiter await nothing, drop its many registrations in steps, and have the command return `then()`."""
        self._make_idle(waiter)
        self.running = Running(self._unpark_first(waiter, then))

    def _unpark_first(self, waiter: Waiter, then: Callable[[], Any]) -> Steps:
        while not self.unpark_some(waiter, self.portion):
            yield
        return then()

    def has_many(self, waiter: Waiter) -> bool:
        """Whether the registrations of a waiter that has gone are dropped later: others may go at the same moment."""
        return waiter.parked is not None and len(waiter.parked) > self._most_at_once

    def unpark_later(self, waiter: Waiter) -> None:
        """Let a waiter that has gone await nothing, and drop its registrations in steps."""
        self._make_idle(waiter)
        if not self.departed:
            self.defer(Later(self._unpark_departed()))
        self.departed.append(waiter)

    def _unpark_departed(self) -> Iterator[None]:
        """Drop the registrations of waiters that have gone, however many have gone at once."""
        departed = self.departed
        most = self.portion
        while departed:
            waiter = departed[0]
            most -= 1 if waiter.parked is None else len(waiter.parked) + 1
            if self.unpark_some(waiter, self.portion):
                departed.popleft()
            if departed and most <= 0:
                yield
                most = self.portion

    def unpark_some(self, waiter: Waiter, most: int) -> bool:
        """Drop at most so many registrations of an idle waiter; True if none is left."""
        parked = waiter.parked
        if parked is not None:
            for _ in range(min(most, len(parked))):
                self._unregister(waiter, parked.popitem()[0])
            if parked:
                return False
            waiter.parked = None
        return True

    def _unregister(self, waiter: Waiter, key: bytes) -> None:
        """Drop one registration."""
        self._weigh(waiter, -self.registration_bytes(key))
        registered = self.waiters.get(key)
        if registered is not None and waiter in registered:
            del registered[waiter]
            self._drop_empty(key)
            return
        for written in self.written[key]:
            written.registered.pop(waiter, None)

    def _drop_empty(self, key: bytes) -> None:
        """Drop what is kept for a key of which a registration was removed, if that was the last; or note the hole."""
        registered = self.waiters[key]
        if not registered:
            del self.waiters[key]
        elif len(registered) >= LONG - 1:
            self._compact(key, registered, 1)

    def _compact(self, key: bytes, registered: dict[Waiter, None], removed: int) -> None:
        """Note that registrations were removed, and rebuild the dict if it has too many holes.

        Looking for the first entry of a dict steps over the places of all that were removed before it.
        """
        holes = self.holes.get(key, 0) + removed
        if len(registered) < LONG or holes * holes > _HOLES * len(registered):
            self.holes.pop(key, None)
            self.waiters[key] = dict(registered)
        else:
            self.holes[key] = holes

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

    def _drop_counter(self, counter: Counter) -> None:
        del self.counters[counter.key]
        self._unpark(counter)

    # Using up registrations

    def _count_down(self, waiter: Waiter, key: bytes) -> int:
        """Take a used-up registration off the waiter. Returns the state that this ends; IDLE if it ends no wait."""
        parked = waiter.parked
        assert parked is not None
        del parked[key]
        self._weigh(waiter, -self.registration_bytes(key))
        if parked:
            return IDLE
        state = waiter.state
        waiter.state = IDLE
        waiter.barrier = None
        waiter.parked = None
        return state
