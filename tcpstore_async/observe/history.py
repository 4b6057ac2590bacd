"""What a server remembers of its sessions for those who look into it: who wrote which key, who has come to a barrier.

A store that is observed (`Store.observe`) reports each command that writes. When a session was last heard, whether
it has joined and which BARRIER it is in, the session itself knows; the history keeps it of those who leave. This module
knows commands by the names of their methods, and must not know sockets, nor what is stored. It reads no clock: whoever
runs the server sets `now`.

Invariants: what a peer is sent does not depend on whether there is a history. Everything remembered is counted in the
budget, and bounded: the older part is forgotten when it is too much, and those who come to barriers are not noted any
more. A session that has left and is named by what is remembered is counted, too.
"""

from collections.abc import Iterator
from typing import Any, Final

from ..base.keys import BARRIER_LAST, BARRIER_MEMBERS, COLLECTIVE_LAST, GROUP_BARRIER, GROUP_BARRIER_LAST
from ..keyspace.steps import DeferredWork, FreeDict
from ..session.budget import Holder
from ..session.observer import NEVER, Observer
from ..session.peer import Peer
from ..session.server import ServerSession
from ..session.store import Store
from ..wire.codecs import Handler
from ..wire.commands import BY_METHOD, MUTATES, STORES, WORKERS_KEY, Command
from ..wire.values import Framed

MOST_BYTES: Final = 256 * 1024 * 1024
_SHARE: Final = 32
"""At most 1/32 of the budget is for the history."""

_KEY_BYTES: Final = 256
"""Bytes counted for what is known about one key, besides the key."""

_DEPARTED_BYTES: Final = 640
"""Bytes counted for a session that has left, besides its introduction."""

_BARRIER_BYTES: Final = 512
"""Bytes counted for a barrier, besides its counter."""

_MEMBER_BYTES: Final = 96
"""Bytes counted for one that has come to a barrier."""

_R: Final = ord("r")
_S: Final = ord("s")
"""The last bytes of keys that open barriers."""

_OPENERS: Final = (
    (BARRIER_LAST, BARRIER_MEMBERS),
    (COLLECTIVE_LAST, BARRIER_MEMBERS),
    (GROUP_BARRIER_LAST, b""),
)
"""Suffixes of keys that open barriers, and those of their counters."""

_MOST_ITEMS: Final = 1000
"""Pairs of one MULTI_SET that are noted, lest a long one holds the loop."""


_RECORDED: Final = frozenset(
    ("set", "append", "add", "compare_set", "multi_set", "delete_key", "barrier", "cancel_wait")
)
"""Methods of which something is noted that their rows do not tell."""

_NO_VALUES: Final = frozenset(("queue_push", "queue_pop", "lease", "lease_later", "meet", "attend"))
"""Methods that change what is stored under a key, but no value."""


def counter_of(key: bytes) -> bytes:
    """Return the counter of the barrier that a key opens; empty if it opens none."""
    for suffix, counter in _OPENERS:
        if key.endswith(suffix):
            return key[: -len(suffix)] + counter
    return b""


class Barrier:
    """Those who have come to a barrier that is not open, as far as their sessions do not tell."""

    def __init__(self) -> None:
        self.members: set[int] = set()
        """Serial numbers of those who have added 1 to its counter; for BARRIER and joins, of those who have left or
        given up."""
        self.recent = True
        """Whether somebody has come since the history last forgot something."""


class Write:
    """The last write to a key."""

    def __init__(self, key: bytes, at: float) -> None:
        self.key: bytes = key
        self.by: Peer | None = None
        """Who wrote it, which may have left."""
        self.at: float = at
        """In seconds of the server's clock."""
        self.barrier: Barrier | None = None
        """The barrier whose counter it is, unless it is open."""


_NOTHING: Final = Write(b"", NEVER)
"""In place of a write: no session has written it."""


class History(Observer):
    """What is remembered of the sessions of one store."""

    def __init__(self, store: Store, most_bytes: int = MOST_BYTES, last_serial: int = 0) -> None:
        """`most_bytes` may be counted for it in the budget, and no more than its share.

        Serial numbers of sessions begin after `last_serial`.
        """
        super().__init__()
        self.store = store
        self.keyspace = store.keyspace
        self.held: int = 0
        """Bytes counted for all of it."""
        self.barriers: dict[bytes, Barrier] = {}
        """By counter."""
        most = min(most_bytes, store.budget.limit // _SHARE)
        self._most_in_barriers: int = most // 4
        self._in_barriers: int = 0
        """Bytes counted for `barriers`."""
        self._capacity: int = (most - self._most_in_barriers) // 2
        """Bytes counted for what is young above which that becomes old, and what is old is forgotten."""
        self._young: dict[bytes, Write] = {}
        self._old: dict[bytes, Write] = {}
        self._last: Write = _NOTHING
        """The one that was noted last, if it is young: a client that sends many requests at once often writes one key.
        That costs as much as if nothing were noted, because the key is found by its identity."""
        self._young_departed: list[ServerSession] = []
        """Sessions that have left. They are forgotten with what they wrote, or later."""
        self._old_departed: list[ServerSession] = []
        self._young_bytes: int = 0
        self._old_bytes: int = 0
        self._last_serial: int = last_serial
        self._joined: tuple[bytes, bytes] | None = (WORKERS_KEY, b"")
        """In place of counter and token, for sessions that have joined with ADD; no token is empty. One for all of
        them: of a constant, compiled code makes a new one each time."""
        self._joining = Barrier()
        """Stands for the counter of ranks that join. It has no members: each session knows whether it has joined."""

    # Called by sessions

    def leaves(self, session: Holder) -> None:
        """Keep a session that is about to leave, if it is named anywhere."""
        if not isinstance(session, ServerSession) or session.heard_at == NEVER:
            return
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

        A session is named here, and its last command refers to what names it. Nothing else breaks that cycle.
        """
        self._count(-self.held)
        found = [self._young, self._old], [self._young_departed, self._old_departed]
        self._young, self._old, self._young_departed, self._old_departed = {}, {}, [], []
        self._last = _NOTHING
        self.barriers.clear()
        return found

    # Called by whoever looks

    def write(self, key: bytes) -> Write | None:
        """Return what is known of the last write to a key."""
        write = self._young.get(key)
        return self._old.get(key) if write is None else write

    def serial(self, session: Peer) -> int:
        """Return the serial number of a session, which no other session of this store ever has."""
        if session.serial == 0:
            self._last_serial += 1
            session.serial = self._last_serial
        return session.serial

    def departed(self) -> list[ServerSession]:
        """Return the sessions that have left and may be named. `heard_at` is NEVER for them."""
        return self._old_departed + self._young_departed

    def sessions(self, portion: int) -> Iterator[list[ServerSession]]:
        """Yield portions of the sessions that are connected and have been heard, then of those that have left."""
        holders = list(self.store.budget.holders)
        for at in range(0, len(holders), portion):
            yield [one for one in holders[at : at + portion] if isinstance(one, ServerSession) and self._knows(one)]
        departed = self.departed()
        for at in range(0, len(departed), portion):
            yield departed[at : at + portion]

    def _knows(self, session: ServerSession) -> bool:
        return session.store is self.store and session.heard_at != NEVER

    def members(self, counter: bytes, found: list[ServerSession], portion: int) -> Iterator[None]:
        """Append to `found` those who have come to a barrier or joined, looking at so many sessions in each step."""
        barrier = self.barriers.get(counter)
        noted: set[int] = set() if barrier is None else barrier.members
        for sessions in self.sessions(portion):
            for one in sessions:
                if (
                    one.heard_at != NEVER
                    and ((one.joined is not None and one.joined[0] == counter) or one.barrier == counter)
                ) or (one.serial and one.serial in noted):
                    found.append(one)
            yield

    # Commands

    def recorded(self, method: str, call: Handler) -> Handler:
        """Return `call`, which executes the command with this method, or a function that also notes what it has done.

        Nothing is noted of a command that raises. The keyspace's own methods are called without a detour.
        """
        if method not in _RECORDED:
            command = BY_METHOD[method]
            if not command.flags & MUTATES or method in _NO_VALUES:
                return call
            return lambda *fields: self._changed(command, command.request.keys(fields), call(*fields))
        if getattr(call, "__self__", None) is self.keyspace:
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
        assert method == "cancel_wait"
        return lambda: self._canceled(call)

    def _set(self, key: bytes, value: Framed) -> None:
        last = self._last
        if last.by is self.store.serving and key == last.key:
            self.keyspace.set(last.key, value)  # that key, as its hash is known
            last.at = self.now
            return
        self.keyspace.set(key, value)
        write = self._young.get(key)
        if write is None or write.by is not self.store.serving:
            self._note(key, False)
        else:  # the common case, without a call
            write.at = self.now
            self._last = write

    def _add(self, key: bytes, amount: int) -> int:
        last = self._last
        if last.by is self.store.serving and key == last.key and last.barrier is None and amount:
            total = self.keyspace.add(last.key, amount)
            last.at = self.now
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
        write.at = self.now
        self._last = write
        return total

    def _barrier_of(self, key: bytes, world_size: int) -> bool:
        session = self.store.serving
        assert session is not None
        if not self.keyspace.barrier(session, key, world_size):
            return False  # that it has come, the session knows
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
                self._come(write.barrier)
        return result

    def _entered(self, key: bytes, result: Any) -> Any:
        if result:
            self._note(key, False)
            self._forget_barrier(key)
        return result

    def _changed(self, command: Command, keys: list[bytes], result: Any) -> Any:
        """Note what a command has done to values, as far as its row tells."""
        for key in keys[:_MOST_ITEMS]:
            if key not in self.keyspace.values:
                self._deleted(key, None)
            elif command.flags & STORES:
                self._note(key, False)
        return result

    def _canceled(self, call: Handler) -> Any:
        session = self.store.serving
        barrier = None if session is None else session.barrier
        result = call()
        if session is not None and barrier is not None:
            self._enter(self._barrier(barrier), session)
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
        """Note that the session that is being served has written a key, or counted there."""
        write = self._young.get(key)
        if write is None:
            write = self._remember(key, counts)
        session = self.store.serving
        if write.by is not session:
            if session is not None and session.serial == 0:
                self.serial(session)
            write.by = session
        write.at = self.now
        self._last = write
        return write

    def _remember(self, key: bytes, counts: bool) -> Write:
        """Add a key that is new, or was written long ago."""
        self._grow(_KEY_BYTES + len(key))
        write = self._young[key] = Write(key, self.now)
        if counts:
            if key == WORKERS_KEY:
                write.barrier = self._joining
            elif GROUP_BARRIER in key or key.endswith(BARRIER_MEMBERS):
                write.barrier = self._barrier(key)
        elif key and key[-1] in (_R, _S):
            self._note_opening(key)
        return write

    def _grow(self, size: int) -> None:
        """Count so many bytes more of what is young, for what is added next."""
        if self._young_bytes >= self._capacity:
            self._forget_old()
        self._young_bytes += size
        self._count(size)

    def _count(self, size: int) -> None:
        self.held += size
        self.store.budget.charge(size)

    def _forget_old(self) -> None:
        """Forget what was not used since there was half as much."""
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
            self.keyspace.defer(_ForgetBarriers(self, list(self.barriers)))
        if old:
            self.keyspace.defer(FreeDict(old))
        self.keyspace.free_later(departed)

    # Barriers

    def _note_opening(self, key: bytes) -> None:
        """Forget who came to a barrier if this key opens it."""
        counter = counter_of(key)
        if counter:
            self._forget_barrier(counter)

    def _come(self, barrier: Barrier) -> None:
        """Note that the session that is being served has added 1 to the counter of a barrier, or has joined."""
        session = self.store.serving
        if session is None:
            return
        if barrier is not self._joining:
            self._enter(barrier, session)
        elif session.joined is None:
            session.joined = self._joined

    def _barrier(self, counter: bytes) -> Barrier | None:
        """Return the barrier with this counter; None if there are too many."""
        barrier = self.barriers.get(counter)
        size = _BARRIER_BYTES + len(counter)
        if barrier is None and self._in_barriers + size <= self._most_in_barriers:
            barrier = self.barriers[counter] = Barrier()
            self._in_barriers += size
            self._count(size)
        return barrier

    def _enter(self, barrier: Barrier | None, session: Peer) -> None:
        """Note that a session has come to a barrier."""
        if barrier is None or self._in_barriers + _MEMBER_BYTES > self._most_in_barriers:
            return
        members = barrier.members
        known = len(members)
        members.add(self.serial(session))
        if len(members) > known:
            self._in_barriers += _MEMBER_BYTES
            self._count(_MEMBER_BYTES)
        barrier.recent = True

    def age_barrier(self, counter: bytes) -> None:
        """Forget a barrier unless somebody has come since this was last called."""
        barrier = self.barriers.get(counter)
        if barrier is None:
            return
        if barrier.recent:
            barrier.recent = False
        else:
            self._forget_barrier(counter)

    def _forget_barrier(self, counter: bytes) -> None:
        """Forget who came to a barrier that is open now, so that nobody is missing, or whose counter is deleted."""
        barrier = self.barriers.pop(counter, None)
        if barrier is None:
            return
        size = _BARRIER_BYTES + len(counter) + _MEMBER_BYTES * len(barrier.members)
        self._in_barriers -= size
        self._count(-size)
        write = self._young.get(counter)
        if write is not None:
            write.barrier = None


def history_of(store: Store) -> History | None:
    """Return what is remembered of the sessions of a store, if it is observed."""
    observer = store.observer
    return observer if isinstance(observer, History) else None


class _ForgetBarriers(DeferredWork):
    """Forget the barriers to which nobody has come since some were last forgotten."""

    def __init__(self, history: History, counters: list[bytes]) -> None:
        self.history = history
        self.counters = counters

    def step(self, most: int) -> bool:
        counters = self.counters
        for _ in range(min(most, len(counters))):
            self.history.age_barrier(counters.pop())
        return not counters
