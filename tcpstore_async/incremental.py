"""Long commands in steps, so that none of them holds the event loop for long.

Two kinds of work are cut into portions. An `IncrementalCommand` is a command that is still running: its session accepts
no other until it is done. `DeferredWork` is what a finished command leaves behind, such as waking 100,000 waiters;
this cannot be observed, because what concerns a waiter is done before that waiter sends or receives anything else
(`DeferredWork.resolve`).

This module knows nothing of sessions, sockets and clocks, nor who calls `step` when. Short commands never come here.
"""

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from .errors import LimitError
from .values import Framed, Growing, length, pack

if TYPE_CHECKING:
    from .accounts import Account
    from .keyspace import Keyspace
    from .waiter_types import Counter, SharedWait, Waiter
    from .waiters import WaiterRegistry

Value = Framed | list[Framed]
"""A value as it goes into a reply: one piece or, if it is large and was appended to, several."""

UNCUT: Final = 2**62
"""A portion that holds everything: nothing is done in steps."""

_LISTING_PIECE: Final = 1024 * 1024
"""Bytes from which on no more names are added to a piece of a key listing."""

_FREED: Final = 8 * 1024 * 1024
"""Bytes that are freed in one step."""

_KEY_BYTES: Final = 1024 * 1024
"""Bytes of keys after which a step ends: long keys take longer to hash and compare."""

AWAITED_BYTES: Final = 80
"""Counted for a key that a MULTI_SET wrote and whose waiters are to be woken: its entry in a dict."""

_TAKEN: Final = 5000
"""Registrations, most of them stale, that are taken away in one step while items are offered: about a millisecond."""

_HELD_BACK: Final = 2**40
"""Registrations that a waiter awaits in addition while it parks: more than can be used up meanwhile."""


def _portion_end(keys: list[bytes], at: int, most: int) -> int:
    """Return where a step that begins at `at` ends: after `most` keys, or fewer long ones."""
    stop = min(at + most, len(keys))
    size = 0
    while at < stop and size < _KEY_BYTES:
        size += len(keys[at])
        at += 1
    return at


class IncrementalCommand:
    """A command that is carried out in steps."""

    def __init__(self) -> None:
        self.result: Any = None
        """What the command returns, once it is done."""
        self.keeps = False
        """Whether it holds its request. (What that holds is not measured again, which takes long for many keys.)"""
        self.held: int = 0
        """Bytes of the request that it holds."""
        self.determined = False
        """Whether the reply is determined already: what other commands send to its session must follow it."""
        self.behind: list[Framed] = []
        """Replies that have to follow it."""
        self.parts: list[Framed] = []
        """Parts of the reply so far. The caller of `step` takes them."""
        self.account: Account | None = None
        """What is counted for its client, if that is limited. The caller of `step` charges it."""

    def step(self, most: int) -> bool:
        """Handle the next `most` keys, or as many registrations; True once all is done. Raises PeerError."""
        return True

    def abandon(self) -> None:
        """Stop, because the session has gone."""


class ReplyInPieces(IncrementalCommand):
    """A reply that is complete already, in pieces."""

    def __init__(self, pieces: list[Framed]) -> None:
        super().__init__()
        self.result = pieces
        self.determined = True


class Pause(IncrementalCommand):
    """The end of a command without a reply, to serve others before its session's next command."""

    def step(self, most: int) -> bool:
        self.result = []
        return True


class ReadKeys(IncrementalCommand):
    """CHECK and MULTI_GET of many keys, as of the moment the read begins: changes note the old value with it first.

    One runs at a time, so that a change has one to notify; others begin when it is done.
    """

    def __init__(self, keyspace: "Keyspace", keys: list[bytes], whole: bool) -> None:
        super().__init__()
        self.keyspace = keyspace
        self.keys = keys
        self.whole = whole
        """Whether to read values; if not, only whether all keys exist."""
        self.at = 0
        self.before: dict[bytes, list[Framed] | None] = {}
        """By key changed since the read began: what it was then."""
        self.size: int = 0
        self.keeps = True
        self.step(0)

    def note(self, key: bytes) -> None:
        """Remember a key that is about to change."""
        if key not in self.before:
            self.before[key] = self.keyspace.read(key, self.whole)

    def step(self, most: int) -> bool:
        keyspace = self.keyspace
        if keyspace.reading is not self:
            if keyspace.reading is not None:
                return False
            keyspace.set_reading(self)
            self.determined = True
        keys = self.keys
        at = self.at
        stop = _portion_end(keys, at, most)
        before = self.before
        parts = self.parts
        while at < stop and len(parts) < most:
            key = keys[at]
            at += 1
            pieces = before[key] if key in before else keyspace.read(key, self.whole)
            if pieces is None:
                if not self.whole:
                    self.result = False
                    self.abandon()
                    return True
                continue
            parts.extend(pieces)
            self.size += length(pieces)
        self.at = at
        if self.size > keyspace.max_reply:
            raise LimitError("budget_bytes", self.size, keyspace.max_reply)
        if at < len(keys):
            return False
        self.result = [] if self.whole else True
        self.abandon()
        return True

    def abandon(self) -> None:
        if self.keyspace.reading is self:
            self.keyspace.set_reading(None)
        self.keyspace.free_later(self.keys)


class PostponedMultiSet(IncrementalCommand):
    """A MULTI_SET of many keys, or many waiters, while the waiters of an earlier one are still to be woken."""

    def __init__(self, keyspace: "Keyspace", items: list[tuple[bytes, Framed]]) -> None:
        super().__init__()
        self.keyspace = keyspace
        self.items = items
        self.counted: int = 0
        """Bytes that it holds while it waits."""
        self.keeps = True

    def step(self, most: int) -> bool:
        if self.keyspace.waking is not None:
            self.counted = self.held = max(self.held, self.counted)
            return False
        if self.held:  # it is about to be in the store, and must not count twice
            self.counted, self.held = self.held, 0
            return False
        self.keyspace.set_items(self.items)
        return True

    def abandon(self) -> None:
        self.keyspace.free_later(self.items)


class KeyListing:
    """The names of all keys as the reply to LIST_KEYS, made once for all clients that ask before the keys change."""

    def __init__(self, keys: list[bytes], size: int, changes: int) -> None:
        self.size = size
        """Bytes of the reply."""
        self.changes = changes
        """`Keyspace.changes` when the names were collected."""
        self.keys = keys
        self.at = 0
        self.pieces: list[Framed] = [len(keys).to_bytes(8, "little")]
        self.parts: list[Framed] = []
        """Names for the next piece."""
        self.parts_size: int = 0

    def step(self, most: int) -> bool:
        """Encode at most so many names; True once all are encoded."""
        stop = min(self.at + most, len(self.keys))
        portion = self.keys[self.at : stop]
        self.keys[self.at : stop] = [b""] * len(portion)  # so that not all are freed at once
        self.at = stop
        part = b"".join([pack(key) for key in portion])
        self.parts.append(part)
        self.parts_size += len(part)
        done = stop == len(self.keys)
        if done or self.parts_size >= _LISTING_PIECE:
            self.pieces.append(b"".join(self.parts))
            self.parts = []
            self.parts_size = 0
        return done


class ListKeys(IncrementalCommand):
    """LIST_KEYS of many keys."""

    def __init__(self, listing: KeyListing, on_complete: Callable[[KeyListing], object]) -> None:
        super().__init__()
        self.determined = True
        self.listing = listing
        self.on_complete = on_complete

    def step(self, most: int) -> bool:
        listing = self.listing
        if listing.at < len(listing.keys):  # else another client's command has completed it
            if not listing.step(most):
                return False
            self.on_complete(listing)
        self.result = listing.pieces
        return True


class MarkStale(IncrementalCommand):
    """A command that must first mark its waiter's stale registrations; see `WaiterRegistry.unmarked`."""

    def __init__(self, registry: "WaiterRegistry", waiter: "Waiter", then: Callable[[], Any]) -> None:
        super().__init__()
        self.registry = registry
        self.waiter = waiter
        self.then = then
        self.keys = [] if waiter.parked is None else list(waiter.parked)

    def step(self, most: int) -> bool:
        self.registry.mark_stale(self.waiter, self.keys[-most:])
        del self.keys[-most:]
        if self.keys:
            return False
        self.registry.unmarked.discard(self.waiter)
        self.result = self.then()
        return True


class ParkOnKeys(IncrementalCommand):
    """WAIT for many keys. Each is looked at in its step, and the waiter is registered from then on if it is missing."""

    def __init__(self, keyspace: "Keyspace", waiter: "Waiter", keys: list[bytes]) -> None:
        super().__init__()
        self.keyspace = keyspace
        self.waiter = waiter
        handoff = waiter.handoff
        self.queue = None if handoff is None else handoff.queue
        """The queue of the waiter's hand-off, which is renewed if it is among the keys and nothing is missing."""
        self.renew = False
        self.marking: MarkStale | None = None
        self.keys = keys
        self.at = 0
        self.parking = False
        """Whether a key was missing; until then the waiter still awaits what it awaited before."""
        self.keeps = True

    def step(self, most: int) -> bool:
        keyspace, waiter = self.keyspace, self.waiter
        if waiter in keyspace.unmarked and not self.parking:  # what it awaited before has ended meanwhile
            if self.marking is None:
                self.marking = MarkStale(keyspace, waiter, lambda: None)
            if self.marking.step(most):
                self.marking = None
            return False
        stop = _portion_end(self.keys, self.at, most)
        portion = self.keys[self.at : stop]
        if not self.parking:
            self.renew = self.renew or self.queue in portion
        self.at = stop
        missing = [key for key in portion if not keyspace.exists(key)]
        if missing:
            # Registrations of earlier waits count down this one, too, but it must not end before the last key is seen.
            remaining = waiter.remaining if self.parking else _HELD_BACK
            keyspace.park(waiter, missing)
            waiter.remaining += remaining
            if not self.parking:
                self.parking = True
                if waiter.handoff is not None:  # what it awaited before has ended meanwhile
                    keyspace.end_handoff(waiter, waiter.handoff)
        if stop < len(self.keys):
            return False
        self.abandon()
        self.result = True
        if self.parking:
            waiter.remaining -= _HELD_BACK
            if waiter.remaining > 0:
                self.result = False
            else:
                keyspace.end_wait(waiter)
        elif self.renew and self.queue is not None:
            waiter.handoff = keyspace.new_handoff(self.queue)
        return True

    def abandon(self) -> None:
        self.keyspace.free_later(self.keys)


class UnparkFirst(IncrementalCommand):
    """A command that must first drop many registrations of its waiter."""

    def __init__(self, registry: "WaiterRegistry", waiter: "Waiter", then: Callable[[], Any]) -> None:
        super().__init__()
        self.registry = registry
        self.waiter = waiter
        self.then = then

    def step(self, most: int) -> bool:
        if not self.registry.unpark_some(self.waiter, most):
            return False
        self.result = self.then()
        return True


class PostponedWaitCount(IncrementalCommand):
    """A WAIT_COUNT for a target that has been reached, while earlier waiters for it are still to be woken."""

    def __init__(self, counter: "Counter", target: int, then: Callable[[], Any]) -> None:
        super().__init__()
        self.counter = counter
        self.target = target
        self.then = then

    def step(self, most: int) -> bool:
        reaching = self.counter.reaching
        if reaching is not None and self.target <= reaching.total:
            return False
        self.result = self.then()
        return True


class PostponedCommands(IncrementalCommand):
    """What a session does instead of its next command while `WaiterRegistry.postpones` its waiter. It has no reply."""

    def __init__(self, registry: "WaiterRegistry", waiter: "Waiter") -> None:
        super().__init__()
        self.registry = registry
        self.waiter = waiter
        self.result = []

    def step(self, most: int) -> bool:
        return not self.registry.postpones(self.waiter)


class DeferredWork:
    """Work that a finished command leaves behind."""

    def step(self, most: int) -> bool:
        """Do the next portion; True once all is done."""
        raise NotImplementedError

    def resolve(self, waiter: "Waiter") -> None:
        """Do now what concerns this waiter."""


class UnparkDeparted(DeferredWork):
    """Drop the registrations of waiters that have gone, however many have gone at once."""

    def __init__(self, registry: "WaiterRegistry") -> None:
        self.registry = registry
        self.waiters: deque[Waiter] = deque()

    def step(self, most: int) -> bool:
        registry = self.registry
        while self.waiters and most > 0:
            waiter = self.waiters[0]
            if registry.postpones(waiter):
                registry.defer(self)  # behind that work
                return True
            parked = waiter.parked
            count = 0 if parked is None else len(parked)
            if not registry.unpark_some(waiter, most):
                return False
            self.waiters.popleft()
            most -= count + 1
        if self.waiters:
            return False
        registry.unparking = None
        return True


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

    def __init__(self, registry: "WaiterRegistry", key: bytes, registered: "dict[Waiter, int]", value: Value) -> None:
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

    def resolve(self, waiter: "Waiter") -> None:
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

    def resolve(self, waiter: "Waiter") -> None:
        parked = waiter.parked
        if parked is None:
            return
        for key in [key for key in parked if key in self.keys]:
            self.registry.wake_now(waiter, key)


class WakeAtCount(DeferredWork):
    """Wake many waiters of a counter whose targets have been reached."""

    def __init__(self, registry: "WaiterRegistry", counter: "Counter", total: int) -> None:
        self.registry = registry
        self.counter = counter
        self.total = total
        """The largest number written since this began."""

    def step(self, most: int) -> bool:
        return self.registry.wake_reached(self.counter, self.total, most)

    def resolve(self, waiter: "Waiter") -> None:
        if waiter.group is self.counter and waiter.number <= self.total:
            self.counter.remove(waiter)
            self.registry.wake_member(waiter, self.counter)


class WakeMembers(DeferredWork):
    """Wake the members of a large group whose wait is over, in order of arrival."""

    def __init__(self, registry: "WaiterRegistry", group: "SharedWait") -> None:
        self.registry = registry
        self.group = group

    def step(self, most: int) -> bool:
        return self.registry.wake_members(self.group, most)

    def resolve(self, waiter: "Waiter") -> None:
        if waiter.group is self.group:
            self.group.remove(waiter)
            self.registry.wake_member(waiter, self.group)


class FreeValue(DeferredWork):
    """Free a large value that was replaced or deleted."""

    def __init__(self, growing: Growing) -> None:
        self.pieces = growing.pieces

    def step(self, most: int) -> bool:
        freed = 0
        while self.pieces and freed < _FREED:
            freed += len(self.pieces.pop())
        return not self.pieces


class FreeDict(DeferredWork):
    """Free a large dict."""

    def __init__(self, items: dict[Any, Any]) -> None:
        self.items = items

    def step(self, most: int) -> bool:
        items = self.items
        for _ in range(min(most, len(items))):
            items.popitem()
        return not items


class FreeItems(DeferredWork):
    """Free the list of a long request, from its end.

    Then the allocator returns memory to the kernel in steps, too. Freed from the front, 256 MiB of keys would all be
    returned together with the last one, which takes 16 ms.
    """

    def __init__(self, keyspace: "Keyspace", items: list[Any]) -> None:
        self.keyspace = keyspace
        self.items = items

    def step(self, most: int) -> bool:
        del self.items[-most:]
        if self.items:
            return False
        self.keyspace.freeing = False
        return True
