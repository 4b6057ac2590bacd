"""History of a store's sessions, for inspection: who last wrote each key, and who has arrived at each barrier.

An observed store (`Store.observe`) reports each command that writes. A session itself knows when it was last heard,
whether it has joined and which BARRIER it is in; the history keeps this for sessions that have left. Knows commands by
the names of their methods; must not know sockets, nor what is stored. It reads no clock but the server's.

Invariants: what a peer is sent does not depend on whether there is a history. Everything remembered, and
departed sessions that it refers to, are counted in the budget and bounded: beyond the history's share, the older part
is forgotten, and arrivals at barriers are not noted.
"""

from collections.abc import Iterator
from typing import Any, Final

from ..base.keys import BARRIER_LAST, BARRIER_MEMBERS, COLLECTIVE_LAST, GROUP_BARRIER, GROUP_BARRIER_LAST
from ..keyspace.steps import Later, free_dict
from ..session.budget import Holder
from ..session.observer import NEVER, Observer
from ..session.peer import Peer
from ..session.server import ServerSession
from ..session.store import Store
from ..wire.codecs import Handler
from ..wire.commands import BY_METHOD, MUTATES, STORES, WORKERS_KEY, Command
from ..wire.values import Framed

MOST_BYTES: Final = 256 * 1024 * 1024
"""Most bytes counted for one history."""

_SHARE: Final = 32
"""A history also has at most 1/32 of the budget."""

_KEY_BYTES: Final = 256
"""Bytes counted for the last write to a key, besides the key."""

_DEPARTED_BYTES: Final = 640
"""Bytes counted for a departed session, besides its introduction."""

_BARRIER_BYTES: Final = 512
"""Bytes counted for a barrier, besides its counter."""

_MEMBER_BYTES: Final = 96
"""Bytes counted for one arrival at a barrier."""

_OPENERS: Final = (
    (BARRIER_LAST, BARRIER_MEMBERS),
    (COLLECTIVE_LAST, BARRIER_MEMBERS),
    (GROUP_BARRIER_LAST, b""),
)
"""Suffixes of keys that open barriers, and of their counters."""

_OPENERS_END: Final = b"rs"
"""Last bytes of these suffixes: a cheap test that rules out most keys."""

_MOST_ITEMS: Final = 1000
"""Pairs of one MULTI_SET that are noted, so that a long one does not hold the loop."""

_RECORDED: Final = frozenset(
    ("set", "append", "add", "compare_set", "multi_set", "delete_key", "barrier", "cancel_wait", "depart")
)
"""Methods that are noted in their own way, which their rows do not imply."""

_NO_VALUES: Final = frozenset(("queue_push", "queue_pop", "lease", "lease_later", "meet", "attend"))
"""Methods that change what is stored, but no value."""


def counter_of(key: bytes) -> bytes:
    """Return the counter of the barrier that a key opens; empty if it opens none."""
    for suffix, counter in _OPENERS:
        if key.endswith(suffix):
            return key[: -len(suffix)] + counter
    return b""


class Barrier:
    """Arrivals at a barrier that is not open, other than those that sessions know themselves."""

    def __init__(self) -> None:
        self.members: set[int] = set()
        """Serial numbers of the sessions that added 1 to its counter; for BARRIER and joins, of those that have left or
        canceled."""
        self.recent = True
        """Whether there was an arrival since the history last forgot something."""


class Write:
    """The last write to a key."""

    def __init__(self, key: bytes, at: float) -> None:
        self.key: bytes = key
        self.by: Peer | None = None
        """The session that wrote it, which may have left."""
        self.at: float = at
        """Time of the write, in seconds of the server's clock."""
        self.barrier: Barrier | None = None
        """The barrier whose counter it is, unless it is open."""


_NOTHING: Final = Write(b"", NEVER)
"""Placeholder for `_last`: no session has written it."""


class History(Observer):
    """The history of one store: last writes, arrivals at barriers, departed sessions."""

    def __init__(self, store: Store, most_bytes: int = MOST_BYTES, last_serial: int = 0) -> None:
        """Remember as much as `most_bytes`, or its share of the budget if that is less.

        Serial numbers of sessions begin after `last_serial`.
        """
        super().__init__()
        self.store = store
        self.keyspace = store.keyspace
        self.clock = store.keyspace.clock
        self.held: int = 0
        """Bytes counted for the whole history."""
        self.barriers: dict[bytes, Barrier] = {}
        """Keyed by counter."""
        most = min(most_bytes, store.budget.limit // _SHARE)
        self._most_in_barriers: int = most // 4
        self._in_barriers: int = 0
        """Bytes counted for `barriers`."""
        self._capacity: int = (most - self._most_in_barriers) // 2
        """Bytes of the young part above which it becomes the old part, and the old part is forgotten."""
        self._young: dict[bytes, Write] = {}
        self._old: dict[bytes, Write] = {}
        self._last: Write = _NOTHING
        """Last write noted, if it is young. Repeated writes to one key then skip the dict look-up, and cost as much as
        without a history."""
        self._young_departed: list[ServerSession] = []
        """Departed sessions, which are forgotten with what they wrote, or later."""
        self._old_departed: list[ServerSession] = []
        self._young_bytes: int = 0
        self._old_bytes: int = 0
        self._last_serial: int = last_serial
        self._joined: tuple[bytes, bytes] | None = (WORKERS_KEY, b"")
        """Counter and token of sessions that have joined with ADD; no real token is empty. It is an attribute, because
        compiled code would make a new tuple for each session from a constant."""
        self._joining = Barrier()
        """Barrier of the counter of joined ranks. It has no members: each session knows whether it has joined."""

    # Called by sessions

    def leaves(self, session: Holder) -> None:
        """Keep a session that is about to leave, if anything refers to it."""
        if not isinstance(session, ServerSession) or session.heard_at == NEVER:
            return  # it has sent nothing, or has left already
        session.heard_at = NEVER
        if session.joined is not None:
            self._enter(self._barrier(session.joined[0]), session)
        if session.barrier is not None:
            self._enter(self._barrier(session.barrier), session)
        if session.serial:
            self._grow(_DEPARTED_BYTES + session.introduction_bytes())
            self._young_departed.append(session)

    def dispose(self) -> tuple[list[dict[bytes, Any]], list[list[Any]]]:
        """Forget everything, as the store has ended; return what may be long, to be freed in portions.

        This breaks the cycle between sessions, which are referred to here, and their slots, which refer to this.
        """
        self._count(-self.held)
        found = [self._young, self._old], [self._young_departed, self._old_departed]
        self._young, self._old, self._young_departed, self._old_departed = {}, {}, [], []
        self._last = _NOTHING
        self.barriers.clear()
        return found

    # For inspection

    def last_write(self, key: bytes) -> Write | None:
        """Return the last write to a key, if it is known."""
        write = self._young.get(key)
        return self._old.get(key) if write is None else write

    def serial(self, session: Peer) -> int:
        """Return the serial number of a session, unique in this store; assign it on first use."""
        if session.serial == 0:
            self._last_serial += 1
            session.serial = self._last_serial
        return session.serial

    def departed(self) -> list[ServerSession]:
        """Return the departed sessions that may be referred to. Their `heard_at` is NEVER."""
        return self._old_departed + self._young_departed

    def sessions(self, portion: int) -> Iterator[list[ServerSession]]:
        """Yield portions of the connected sessions that have been heard, then of the departed ones."""
        holders = list(self.store.budget.holders)
        for at in range(0, len(holders), portion):
            found = [one for one in holders[at : at + portion] if isinstance(one, ServerSession)]
            yield [one for one in found if one.store is self.store and one.heard_at != NEVER]
        departed = self.departed()
        for at in range(0, len(departed), portion):
            yield departed[at : at + portion]

    # Commands

    def recorded(self, method: str, call: Handler) -> Handler:
        """Return `call`, which executes the command with this method, or a function that also notes its effect.

        Nothing is noted of a command that raises. The keyspace's own methods are called without an indirection.
        """
        if method not in _RECORDED:
            command = BY_METHOD[method]
            if not command.flags & MUTATES or method in _NO_VALUES:
                return call
            return lambda *fields: self._changed(command, command.request.keys(fields), call(*fields))
        if getattr(call, "__self__", None) is self.keyspace:  # the usual case, without an indirection
            if method == "set":
                return self._set
            if method == "add":
                return self._add
        if method == "barrier" and getattr(call, "__self__", None) is self.store:
            return self._barrier_of
        if method in ("set", "append"):
            return lambda key, value: self._wrote(key, call(key, value))
        if method == "add":
            return lambda key, amount: self._added(key, amount, call(key, amount))
        if method == "compare_set":
            return lambda key, expected, desired: self._compared(key, desired, call(key, expected, desired))
        if method == "multi_set":
            return lambda items: self._wrote_items(items[:_MOST_ITEMS], call(items))
        if method == "delete_key":
            return lambda key: self._deleted(key, call(key))
        if method == "barrier":
            return lambda key, size: self._entered(key, call(key, size))
        if method == "depart":
            return lambda: self._departed(call)
        assert method == "cancel_wait"
        return lambda: self._canceled(call)

    def _set(self, key: bytes, value: Framed) -> None:
        last = self._last
        if last.by is self.store.serving and key == last.key:
            self.keyspace.set(last.key, value)  # the same key, whose hash is cached
            last.at = self.clock.now
            return
        self.keyspace.set(key, value)
        write = self._young.get(key)
        if write is None or write.by is not self.store.serving:
            self._note(key, False)
        else:  # common: saves a call
            write.at = self.clock.now
            self._last = write

    def _add(self, key: bytes, amount: int) -> int:
        last = self._last
        if last.by is self.store.serving and key == last.key and last.barrier is None and amount:
            total = self.keyspace.add(last.key, amount)
            last.at = self.clock.now
            return total
        write = self._young.get(key)
        if write is None or write.barrier is not None or not amount:
            total = self.keyspace.add(key, amount)
            self._added(key, amount, None)
            return total
        total = self.keyspace.add(write.key, amount)  # as above
        session = self.store.serving
        if write.by is not session:
            if session is not None and session.serial == 0:
                self.serial(session)
            write.by = session
        write.at = self.clock.now
        self._last = write
        return total

    def _barrier_of(self, key: bytes, world_size: int) -> bool:
        session = self.store.serving
        assert session is not None
        if not self.keyspace.barrier(session, key, world_size):
            return False  # the session itself knows of its arrival
        self._entered(key, True)
        return True

    def _wrote(self, key: bytes, result: Any) -> Any:
        self._note(key, False)
        return result

    def _wrote_items(self, items: list[tuple[bytes, Framed]], result: Any) -> Any:
        for key, _ in items:
            self._note(key, False)
        return result

    def _compared(self, key: bytes, desired: Framed, result: Any) -> Any:
        if result is desired:
            self._note(key, False)
        return result

    def _added(self, key: bytes, amount: int, result: Any) -> Any:
        if amount:
            write = self._note(key, True)
            if write.barrier is not None and amount == 1:
                self._arrive(write.barrier)
        return result

    def _entered(self, key: bytes, result: Any) -> Any:
        if result:
            self._note(key, False)
            self._forget_barrier(key)
        return result

    def _changed(self, command: Command, keys: list[bytes], result: Any) -> Any:
        """Note what a command has done to values, as far as its row implies it."""
        for key in keys[:_MOST_ITEMS]:
            if key not in self.keyspace.values:
                self._deleted(key, None)
            elif command.flags & STORES:
                self._note(key, False)
        return result

    def _canceled(self, call: Handler) -> Any:
        session = self.store.serving
        barrier = None if session is None else session.barrier  # the cancel makes the session forget it
        result = call()
        if session is not None and barrier is not None:
            self._enter(self._barrier(barrier), session)
        return result

    def _departed(self, call: Handler) -> Any:
        session = self.store.serving
        joined = None if session is None else session.joined  # it represents its rank no more, which has joined
        result = call()
        if session is not None and joined is not None:
            self._enter(self._barrier(joined[0]), session)
        return result

    def _deleted(self, key: bytes, result: Any) -> Any:
        size = _KEY_BYTES + len(key)
        if key == self._last.key:
            self._last = _NOTHING
        if self._young.pop(key, None) is not None:
            self._young_bytes -= size
            self._count(-size)
        if self._old.pop(key, None) is not None:
            self._old_bytes -= size
            self._count(-size)
        self._forget_barrier(key)
        return result

    # Keys

    def _note(self, key: bytes, counts: bool) -> Write:
        """Note that the session being served has written a key, or counted there."""
        write = self._young.get(key)
        if write is None:
            write = self._remember(key, counts)
        session = self.store.serving
        if write.by is not session:
            if session is not None and session.serial == 0:
                self.serial(session)
            write.by = session
        write.at = self.clock.now
        self._last = write
        return write

    def _remember(self, key: bytes, counts: bool) -> Write:
        """Add a write to a key that is new, or whose last write is old."""
        self._grow(_KEY_BYTES + len(key))
        write = self._young[key] = Write(key, self.clock.now)
        if counts:
            if key == WORKERS_KEY:
                write.barrier = self._joining
            elif GROUP_BARRIER in key or key.endswith(BARRIER_MEMBERS):
                write.barrier = self._barrier(key)
        elif key and key[-1] in _OPENERS_END and (counter := counter_of(key)):
            self._forget_barrier(counter)
        return write

    def _grow(self, size: int) -> None:
        """Make room in the young part, and count bytes for what is added next."""
        if self._young_bytes >= self._capacity:
            self._forget_old()
        self._young_bytes += size
        self._count(size)

    def _count(self, size: int) -> None:
        self.held += size
        self.store.budget.charge(size)

    def _forget_old(self) -> None:
        """Forget the old part, and let the young one become old."""
        old = self._old
        departed = self._old_departed
        self._count(-self._old_bytes)
        self._old = self._young
        self._old_departed = self._young_departed
        self._old_bytes = self._young_bytes
        self._young = {}
        self._last = _NOTHING
        self._young_departed = []
        self._young_bytes = 0
        if self.barriers:
            self.keyspace.defer(Later(self._age_barriers(list(self.barriers)), aside=True))
        if old:
            self.keyspace.defer(Later(free_dict(old, self.keyspace.portion), aside=True))
        self.keyspace.free_later(departed)

    def _age_barriers(self, counters: list[bytes]) -> Iterator[None]:
        """Forget the barriers that no session has entered since some were last forgotten."""
        while True:
            for _ in range(min(self.keyspace.portion, len(counters))):
                self._age_barrier(counters.pop())
            if not counters:
                return
            yield

    # Barriers

    def _arrive(self, barrier: Barrier) -> None:
        """Note that the session being served has added 1 to the counter of a barrier, or has joined."""
        session = self.store.serving
        if session is None:
            return
        if barrier is not self._joining:
            self._enter(barrier, session)
        elif session.joined is None:
            session.joined = self._joined

    def _barrier(self, counter: bytes) -> Barrier | None:
        """Return the barrier with this counter, created if necessary; None if there are too many."""
        barrier = self.barriers.get(counter)
        size = _BARRIER_BYTES + len(counter)
        if barrier is None and self._in_barriers + size <= self._most_in_barriers:
            barrier = self.barriers[counter] = Barrier()
            self._in_barriers += size
            self._count(size)
        return barrier

    def _enter(self, barrier: Barrier | None, session: Peer) -> None:
        """Note that a session has arrived at a barrier."""
        if barrier is None or self._in_barriers + _MEMBER_BYTES > self._most_in_barriers:
            return
        members = barrier.members
        known = len(members)
        members.add(self.serial(session))
        if len(members) > known:
            self._in_barriers += _MEMBER_BYTES
            self._count(_MEMBER_BYTES)
        barrier.recent = True

    def _age_barrier(self, counter: bytes) -> None:
        """Forget a barrier unless there was an arrival since this was last called."""
        barrier = self.barriers.get(counter)
        if barrier is None:
            return
        if barrier.recent:
            barrier.recent = False
        else:
            self._forget_barrier(counter)

    def _forget_barrier(self, counter: bytes) -> None:
        """Forget the arrivals at a barrier that is open, so that no rank is missing, or whose counter is deleted."""
        barrier = self.barriers.pop(counter, None)
        if barrier is None:
            return
        size = _BARRIER_BYTES + len(counter) + _MEMBER_BYTES * len(barrier.members)
        self._in_barriers -= size
        self._count(-size)
        write = self._young.get(counter)
        if write is not None:  # the barrier is open: later ADDs are not arrivals
            write.barrier = None


def history_of(store: Store) -> History | None:
    """Return the history of a store, if it is observed."""
    observer = store.observer
    return observer if isinstance(observer, History) else None
