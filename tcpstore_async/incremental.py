"""What would hold everybody up for long, done in steps.

Knows: how a long command, or what follows from one, is cut into portions of work. Must not know: sessions, sockets,
clocks, who calls `step` and when.
Invariants: a `Job` is a command whose session takes no other until it is done; a `Work` goes on when its command is
done, and nobody can tell: before a waiter says or hears anything else, it has heard of it (`Work.resolve`).
Whatever is short never comes here.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from .errors import LimitError
from .values import Framed, Growing, length, pack

if TYPE_CHECKING:
    from .keyspace import Counter, Keyspace, Waiter

Value = Framed | list[Framed]
"""A value as it goes into a reply: in one piece or, if it is large and was appended to, in several."""


class IncrementalCommand:
    """A command that is done in steps."""

    def __init__(self) -> None:
        self.result: Any = None
        """What the command returns, once it is done."""
        self.keeps = False
        """Whether it keeps its request; what that holds is not looked at again, which takes long for many keys."""
        self.held: int = 0
        """Bytes that it keeps of it."""
        self.settled = False
        """Whether the result is as of now: what its session hears from now on is said after it."""
        self.said: list[Framed] = []
        """That."""
        self.parts: list[Framed] = []
        """What comes of it already, before its result. Whoever calls `step` takes it."""

    def step(self, most: int) -> bool:
        """Do the next `most` keys, or as many registrations; True once all is done. Raises PeerError."""
        return True

    def abandon(self) -> None:
        """Its session has gone."""


class ReplyInPieces(IncrementalCommand):
    """A reply that is there already, in pieces."""

    def __init__(self, pieces: list[Framed]) -> None:
        super().__init__()
        self.result = pieces
        self.settled = True


class ReadKeys(IncrementalCommand):
    """CHECK and MULTI_GET of many keys, as they were when it began: whoever changes one notes its value before.

    One at a time, so that a change has one to tell; others begin when it is done.
    """

    def __init__(self, keyspace: "Keyspace", keys: list[bytes], whole: bool) -> None:
        super().__init__()
        self.keyspace = keyspace
        self.keys = keys
        self.whole = whole
        """Whether values are asked for, and not only if all are there."""
        self.at = 0
        self.before: dict[bytes, list[Framed] | None] = {}
        """What was changed since it began: the value then, if it was there."""
        self.size: int = 0
        self.keeps = True
        self.step(0)

    def note(self, key: bytes) -> None:
        """Something is about to happen to a key."""
        if key not in self.before:
            self.before[key] = self.keyspace.read(key, self.whole)

    def step(self, most: int) -> bool:
        keyspace = self.keyspace
        if keyspace.reading is not self:
            if keyspace.reading is not None:
                return False
            keyspace.reading = self
            self.settled = True
        keys = self.keys
        at = self.at
        stop = min(at + most, len(keys))
        before = self.before
        parts = self.parts
        while at < stop and len(parts) < most:
            key = keys[at]
            keys[at] = b""  # so that not all are freed at once
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
            self.keyspace.reading = None


class KeyListing:
    """The names of all keys, put into the form of the reply to LIST_KEYS: once for all who ask while they are these."""

    def __init__(self, keys: list[bytes], size: int, changes: int) -> None:
        self.size = size
        """Bytes of the reply."""
        self.changes = changes
        """`Keyspace.changes` of the time that they are of."""
        self.keys = keys
        self.at = 0
        self.pieces: list[Framed] = [len(keys).to_bytes(8, "little")]
        self.parts: list[Framed] = []
        self.parts_size: int = 0
        """What comes into the next piece."""

    def step(self, most: int) -> bool:
        """Put so many more into it; True once all are there."""
        stop = min(self.at + most, len(self.keys))
        portion = self.keys[self.at : stop]
        self.keys[self.at : stop] = [b""] * len(portion)  # so that not all are freed at once
        self.at = stop
        part = b"".join([pack(key) for key in portion])
        self.parts.append(part)
        self.parts_size += len(part)
        done = stop == len(self.keys)
        if done or self.parts_size >= _PIECE:
            self.pieces.append(b"".join(self.parts))
            self.parts = []
            self.parts_size = 0
        return done


class ListKeys(IncrementalCommand):
    """LIST_KEYS of many keys."""

    def __init__(self, names: KeyListing, keep: Callable[[KeyListing], object]) -> None:
        super().__init__()
        self.settled = True
        self.names = names
        self.keep = keep
        """Called once they are complete."""

    def step(self, most: int) -> bool:
        names = self.names
        if names.at < len(names.keys):  # else another who asked has completed them
            if not names.step(most):
                return False
            self.keep(names)
        self.result = names.pieces
        return True


class MarkStale(IncrementalCommand):
    """A command that begins with noting which registrations of its waiter are left over; see `Keyspace.unmarked`."""

    def __init__(self, keyspace: "Keyspace", waiter: "Waiter", then: Callable[[], Any]) -> None:
        super().__init__()
        self.keyspace = keyspace
        self.waiter = waiter
        self.then = then
        self.keys = [] if waiter.parked is None else list(waiter.parked)

    def step(self, most: int) -> bool:
        self.keyspace.mark(self.waiter, self.keys[-most:])
        del self.keys[-most:]
        if self.keys:
            return False
        self.keyspace.unmarked.discard(self.waiter)
        self.result = self.then()
        return True


class ParkOnKeys(IncrementalCommand):
    """WAIT for many keys: each is looked at in its turn, and its waiter stands in line for it from then on."""

    def __init__(self, keyspace: "Keyspace", waiter: "Waiter", keys: list[bytes]) -> None:
        super().__init__()
        self.keyspace = keyspace
        self.waiter = waiter
        handoff = waiter.handoff
        self.queue = None if handoff is None else handoff.queue
        """What it was woken for last; if nothing is missing, that is what it waits for again."""
        self.again = False
        self.marking: MarkStale | None = None
        self.keys = keys
        self.at = 0
        self.begun = False
        """Whether a key was missing; until then, what was awaited before still is."""
        self.keeps = True

    def step(self, most: int) -> bool:
        keyspace, waiter = self.keyspace, self.waiter
        if waiter in keyspace.unmarked and not self.begun:  # what it waited for before has ended meanwhile
            if self.marking is None:
                self.marking = MarkStale(keyspace, waiter, lambda: None)
            if self.marking.step(most):
                self.marking = None
            return False
        stop = min(self.at + most, len(self.keys))
        portion = self.keys[self.at : stop]
        if not self.begun:
            self.again = self.again or self.queue in portion
        self.keys[self.at : stop] = [b""] * len(portion)
        self.at = stop
        missing = [key for key in portion if not keyspace.there(key)]
        if missing:
            left = (
                waiter.remaining if self.begun else 1
            )  # one more than there are, lest it ends before all were looked at
            self.begun = True
            keyspace.park(waiter, missing)
            waiter.remaining += left
        if stop < len(self.keys):
            return False
        self.result = True
        if self.begun:
            waiter.remaining -= 1
            if waiter.remaining > 0:
                self.result = False
            else:
                keyspace.end(waiter)
        elif self.again and self.queue is not None:
            waiter.handoff = keyspace.handoff(self.queue)
        return True


class UnparkFirst(IncrementalCommand):
    """A command that begins with forgetting many registrations of its waiter."""

    def __init__(self, keyspace: "Keyspace", waiter: "Waiter", then: Callable[[], Any]) -> None:
        super().__init__()
        self.keyspace = keyspace
        self.waiter = waiter
        self.then = then

    def step(self, most: int) -> bool:
        if not self.keyspace.unpark_some(self.waiter, most):
            return False
        self.result = self.then()
        return True


class PostponedWaitCount(IncrementalCommand):
    """A WAIT_COUNT for a number that others, who have waited for it, are still to be told of."""

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


class DeferredWork:
    """What is still to be done for a command that is over."""

    def step(self, most: int) -> bool:
        """Do the next portion; True once all is done."""
        raise NotImplementedError

    def resolve(self, waiter: "Waiter") -> None:
        """Do now what concerns this waiter."""


class UnparkDeparted(DeferredWork):
    """Registrations of a waiter that has gone."""

    def __init__(self, keyspace: "Keyspace", waiter: "Waiter") -> None:
        self.keyspace = keyspace
        self.waiter = waiter

    def step(self, most: int) -> bool:
        return self.keyspace.unpark_some(self.waiter, most)


class WakeMany(DeferredWork):
    """A long line of waiters under a key that has been written."""

    def __init__(self, keyspace: "Keyspace", key: bytes, line: "dict[Waiter, int]", value: Value) -> None:
        self.keyspace = keyspace
        self.key = key
        self.line = line
        self.value = value
        """The key's, for those who fetch it."""
        self.empty = key not in keyspace.queues
        """Whether there was no item for those who wait for one."""

    def step(self, most: int) -> bool:
        line = self.line
        if isinstance(self.value, list):
            most = max(1, most // len(self.value))
        for _ in range(min(most, len(line))):
            waiter, count = line.popitem()
            self.keyspace.wake(waiter, self.key, count, self.value, self.empty)
        return not line

    def resolve(self, waiter: "Waiter") -> None:
        count = self.line.pop(waiter, 0)
        if count:
            self.keyspace.wake(waiter, self.key, count, self.value, self.empty)


class WakeAtCount(DeferredWork):
    """Many who waited until a counter reached numbers that it has reached."""

    def __init__(self, keyspace: "Keyspace", counter: "Counter", total: int) -> None:
        self.keyspace = keyspace
        self.counter = counter
        self.total = total
        """The largest number that was written since it began."""

    def step(self, most: int) -> bool:
        return self.keyspace.reach_some(self.counter, self.total, most)

    def resolve(self, waiter: "Waiter") -> None:
        if waiter.counter is self.counter and waiter.target <= self.total:
            self.counter.leave(waiter)
            self.keyspace.reach(waiter, self.counter.key)


class FreeValue(DeferredWork):
    """A large value that nobody will ask for again."""

    def __init__(self, growing: Growing) -> None:
        self.pieces = growing.pieces

    def step(self, most: int) -> bool:
        dropped = 0
        while self.pieces and dropped < _DROPPED:
            dropped += len(self.pieces.pop())
        return not self.pieces


class FreeTokens(DeferredWork):
    """The tokens of ranks that had joined a counter that is gone."""

    def __init__(self, connections: dict[bytes, int]) -> None:
        self.connections = connections

    def step(self, most: int) -> bool:
        connections = self.connections
        for _ in range(min(most, len(connections))):
            connections.popitem()
        return not connections


class FreeItems(DeferredWork):
    """The items of a long list, which have been stored."""

    def __init__(self, items: list[tuple[bytes, Framed]]) -> None:
        self.items = items

    def step(self, most: int) -> bool:
        del self.items[-most:]
        return not self.items


_PIECE: Final = 1024 * 1024
"""Length from which no more names are added to a piece of their list."""

_DROPPED: Final = 8 * 1024 * 1024
"""Bytes that are freed in one step."""
