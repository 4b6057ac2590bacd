"""Waiters: what may be parked on keys, alone or as a group that is registered as one.

This module knows what a waiter awaits. Which waiters a write or a queued item wakes is known to `waiters.py`, and what
is stored to the keyspace.

Invariants: a waiter fires once for each wait. A member of a group has no registration of its own.
"""

from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Final

from ..base.limits import MEMBER_BYTES
from ..base.mypyc_shim import mypyc_attr
from ..wire.values import Framed, Value
from .accounts import Account

KeySet = dict[bytes, None]

_SLACK: Final = 16
"""Targets without waiters that a counter may keep, however few others it has."""

IDLE: Final = 0
"""It awaits nothing. It may have a hand-off and leases, and registrations while a WAIT for many keys parks it."""
AWAITING_KEYS: Final = 1
"""WAIT and BARRIER: it fires once all its registrations have been used up."""
AWAITING_VALUE: Final = 2
"""FETCH: it fires with the value of `awaited`."""
AWAITING_ITEM: Final = 3
"""LEASE_LATER: it is granted an item of the queue `awaited`, leased under the ticket `number`."""
AWAITING_NUMBER: Final = 4
"""WAIT_COUNT: it fires once the counter that is its `group` reaches `number`."""
AWAITING_ROUND: Final = 5
"""MEET: it fires with the answer to its agent, and has no registration."""
AWAITING_STORE: Final = 6
"""ENTER: it fires when the store named `awaited` is there, and has no registration."""

AWAITED: Final = {
    AWAITING_KEYS: "keys",
    AWAITING_VALUE: "value",
    AWAITING_ITEM: "item",
    AWAITING_NUMBER: "number",
    AWAITING_ROUND: "round",
    AWAITING_STORE: "store",
}
"""What a waiter in each state waits for, as `keys.describe_wait` calls it."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Handoff:
    """An item of a queue that a woken waiter is expected to take with its next command."""

    def __init__(self, queue: bytes) -> None:
        self.queue = queue


class Waiter:
    """What may be parked on keys: a session, a thread, a counter. Subclasses override `fire` and `grant`."""

    def __init__(self) -> None:
        self.state: int = IDLE
        """What it awaits: `IDLE` or one of the `AWAITING_…` constants."""
        self.parked: KeySet | None = None
        """Keys under which it is registered; None if there are none, or if its group has them."""
        self.awaited: bytes = b""
        """The key to fetch, the queue to lease from, or the store to enter, in these three states."""
        self.group: Group | None = None
        """The group that it waits in: a `Counter` in the state AWAITING_NUMBER, a `SharedWait` in AWAITING_KEYS."""
        self.number: int = 0
        """The target that the counter has to reach, the size of the barrier, or the ticket for the awaited item."""
        self.barrier: bytes | None = None
        """The barrier that it is in: a queue of the same name must not hand an item on to it."""
        self.handoff: Handoff | None = None
        """The item that it was woken for, until its next command."""
        self.leases: dict[int, tuple[bytes, Framed]] | None = None
        """Queue and item of each unconfirmed pop, oldest first, keyed by ticket."""
        self.joined: tuple[bytes, bytes] | None = None
        """The counter of ranks that it has joined, and the token of the rank that it represents, if it has one."""
        self.weight: int = 0
        """Bytes counted for its registrations."""

    def leave_group(self) -> None:
        """Await nothing, and be in no group. (The group forgets the waiter by itself.)"""
        self.state = IDLE
        self.group = None

    def skip_suspended(self, queue: bytes) -> bool:
        """Return whether a queue must not offer it an item now, as its connection may never come back.

        If so, the waiter has it offered later, with `WaiterRegistry.offer`, unless it leaves.
        """
        return False

    def account(self) -> Account | None:
        """Return what is counted for it, if that is limited."""
        return None

    def fire(self, value: Value | None) -> None:
        """End the wait, with the value if one was fetched. Must not call the keyspace."""
        raise NotImplementedError

    def grant(self, length: int, item: Framed | None) -> None:
        """End the wait for an item, with the result of the lease. Must not call the keyspace."""
        raise NotImplementedError


class CallbackWaiter(Waiter):
    """A waiter that calls a function, which must not call the keyspace."""

    def __init__(self, callback: Callable[[], object]) -> None:
        super().__init__()
        self.callback = callback

    def fire(self, value: Value | None) -> None:
        self.callback()


class GroupRegistry:
    """Where groups are registered. The base class of `Registrations`."""

    def counter_changed(self, counter: "Counter") -> None:
        """Wake the members of a counter whose registration was used up, as far as their targets are reached."""
        raise NotImplementedError

    def wait_is_over(self, group: "SharedWait") -> None:
        """Wake the members of a group that has nothing left to await."""
        raise NotImplementedError


class Group(Waiter):
    """Waiters that are registered as one."""

    def __init__(self, registry: GroupRegistry, member_bytes: int) -> None:
        super().__init__()
        self.registry = registry
        self.member_bytes = member_bytes
        """Bytes counted for each member."""

    def remove(self, waiter: Waiter) -> bool:
        """Make a member idle and remove it. Returns whether it was the last."""
        raise NotImplementedError


class Counter(Group):
    """The waiters for a counter to reach a number. Under its key they are one waiter, registered for every write.

    A write looks at the smallest target only, so n writes with m waiters cost n + m and not n * m.
    """

    def __init__(self, registry: GroupRegistry, key: bytes, member_bytes: int) -> None:
        super().__init__(registry, member_bytes)
        self.key = key
        self.targets: list[int] = []
        """A heap of targets; some may have no waiters any more."""
        self.awaiting: dict[int, OrderedDict[Waiter, None]] = {}
        """The waiters in order of arrival, keyed by target."""
        self.reaching = False
        """Whether deferred work wakes waiters whose target has been reached, because they are many."""
        self.reached: int = 0
        """The largest number written since that began."""

    def fire(self, value: Value | None) -> None:
        self.registry.counter_changed(self)

    def add(self, waiter: Waiter, target: int) -> None:
        waiter.state = AWAITING_NUMBER
        waiter.group = self
        waiter.number = target
        equal = self.awaiting.get(target)
        if equal is None:
            equal = self.awaiting[target] = OrderedDict()
            heappush(self.targets, target)
        equal[waiter] = None

    def remove(self, waiter: Waiter) -> bool:
        waiter.leave_group()
        equal = self.awaiting[waiter.number]
        del equal[waiter]
        if equal:
            return False
        del self.awaiting[waiter.number]
        if len(self.targets) > 2 * len(self.awaiting) + _SLACK:
            self.targets = list(self.awaiting)
            heapify(self.targets)
        return not self.awaiting

    def next_reached(self, total: int) -> Waiter | None:
        """Remove and return the next waiter whose target is at most `total`: by target, then in order of arrival."""
        while self.targets and self.targets[0] <= total:
            equal = self.awaiting.get(self.targets[0])
            if equal is None:
                heappop(self.targets)
                continue
            waiter = equal.popitem(last=False)[0]
            if not equal:
                del self.awaiting[heappop(self.targets)]
            waiter.leave_group()
            return waiter
        return None


UNKNOWN: Final = -1
"""Of `KeyList.present`: not looked up since a key changed."""


@mypyc_attr(allow_interpreted_subclasses=True)
class KeyList:
    """A list of keys that requests name alike, and what is kept for it while none of its keys changes."""

    def __init__(self, raw: bytes, keys: list[bytes]) -> None:
        self.raw = raw
        """The list as it is sent, with its count."""
        self.keys = keys
        """Not to be changed."""
        self.uses: int = 0
        """Requests while it has not been tracked; see `Registrations.tracked`."""
        self.tracked = False
        self.group: SharedWait | None = None
        """The open group: the next WAIT for the list joins it."""
        self.present: int = UNKNOWN
        """Whether all keys exist: `UNKNOWN`, 0 or 1."""
        self.reads: int = 0
        """MULTI_GETs since a key changed."""
        self.reply: bytes | None = None
        """The reply to a MULTI_GET."""
        self.longest_reply: int = 0
        """Bytes of the longest `reply` so far."""
        self.counted_reply: int = 0
        """The same when the list was last counted in the budget."""
        self.size: int = 0
        """Bytes counted in the budget for the list and its reply."""
        self.compared: int = 0
        """Incomplete frames that are being compared with the list."""


class SharedWait(Group):
    """WAITs for one list of keys: their waiters are registered as one, so that each costs the same for any list.

    All keys that the group has not seen appear are those that a new WAIT for the list would have to await, or else the
    group is closed to further waiters.
    """

    def __init__(self, registry: GroupRegistry) -> None:
        super().__init__(registry, MEMBER_BYTES)
        self.members: OrderedDict[Waiter, None] = OrderedDict()
        """In order of arrival."""
        self.listed: KeyList | None = None
        """The list, while further waiters may join."""

    def fire(self, value: Value | None) -> None:
        self.registry.wait_is_over(self)

    def add(self, waiter: Waiter) -> None:
        waiter.state = AWAITING_KEYS
        waiter.group = self
        self.members[waiter] = None

    def remove(self, waiter: Waiter) -> bool:
        waiter.leave_group()
        del self.members[waiter]
        return not self.members

    def first_present(self, queue: bytes) -> Waiter | None:
        """Return the first member that is not passed over when an item of a queue is offered."""
        for waiter in self.members:
            if not waiter.skip_suspended(queue):
                return waiter
        return None
