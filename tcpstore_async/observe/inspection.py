"""Facts about the sessions and keys of a store, in portions, for the admin socket.

Who is connected, what each session waits for, which keys there are, who has arrived at which barrier. Conclusions are
drawn where the facts are read (`diagnosis/`). Performs no I/O and changes nothing.

Invariants: between two portions anything may happen; a session or key that is there all the time is in one of them. A
portion takes no longer than a command with as many keys. Text of peers is passed on as text.
"""

from collections import deque
from collections.abc import Collection, Iterator
from typing import Any, Final

from ..base.errors import ProtocolError
from ..base.keys import readable
from ..keyspace.keyspace import Keyspace
from ..keyspace.waiter_types import AWAITED, AWAITING_KEYS, Counter, SharedWait
from ..links.link_server import LinkInput
from ..links.linked_session import LinkedSession
from ..session.named_stores import NamedStore, NamedStores
from ..session.observer import NEVER
from ..session.peer import NO_PID, Peer
from ..session.server import ServerSession
from ..session.store import Store
from ..wire.values import read_length
from .history import History, history_of

PORTION: Final = 50
"""Sessions, or keys, of one portion: 0.1 ms, compiled, a fraction of a busy loop's iteration."""

_LONG: Final = 256
"""Bytes of a key that count as one more key of a portion."""

_MOST_AWAITED: Final = 1024
"""Keys listed for a session that waits alone."""

_NUMBERS: Final = 10 * PORTION
"""Members of a barrier, or sessions examined for them, in one portion: each is only a number."""

_SUMMED: Final = ("joined", "expected", "sessions", "keys", "bytes")
"""Fields summed over stores that are not listed."""

Fact = dict[str, Any]


class Inspection:
    """One look at one store of a server and its history."""

    def __init__(
        self, store: Store, history: History, now: float, everyone: bool = False, named: NamedStores | None = None
    ) -> None:
        """Look at `now`, the time of the server's clock; `named` has the named stores.

        With `everyone`, include the sessions of all stores of the server.
        """
        self.named = named
        self.everyone = everyone
        self.store = store
        self.history = history
        self.now = now
        self._departed: dict[int, Peer] = {}
        """Departed sessions that the next portion refers to, keyed by serial number."""
        self._groups: set[int] = set()
        """Groups of waiters already described."""

    def summary(self) -> Fact:
        """Return totals of the server."""
        store = self.store
        return {
            "sessions": len(store.budget.holders),
            "num_keys": len(store.keyspace.values),
            "bytes": store.budget.used(),
            "joins": store.joins,
        }

    def sessions(self) -> Iterator[Fact]:
        """Yield portions of the sessions, and of the groups in which they wait."""
        found: list[Fact] = []
        groups: list[Fact] = []
        weight = 0
        holders = self.store.budget.holders
        for holder in list(holders):
            # It may have left since the last portion.
            if not isinstance(holder, ServerSession) or holder not in holders:
                continue
            if holder.store is not self.store and not self.everyone:
                continue
            fact = self.session(holder)
            found.append(fact)
            weight += 1
            if holder.state in AWAITED:
                wait = fact["wait"] = self._wait(holder, groups)
                weight += len(wait["keys"]) // 8
            for group in groups:
                weight += len(group["keys"]) // 8
            if weight >= PORTION:
                yield {"groups": groups, "sessions": found}
                found, groups, weight = [], [], 0
        if found:
            yield {"groups": groups, "sessions": found}

    def stores(self) -> Iterator[Fact]:
        """Yield portions of the named stores, including ended ones that sessions are still in."""
        named = self.named
        found: list[Fact] = []
        if named is not None:
            for store in [*named.stores.values(), *named.ending]:
                found.append(self._store(store))
                if len(found) >= PORTION:
                    yield {"stores": found}
                    found = []
        if found:
            yield {"stores": found}

    def oldest_stores(self, most: int) -> Iterator[Fact]:
        """Yield empty portions, and finally the `most` oldest named stores, and sums over the others.

        A store that is among the oldest stays there until it ends.
        """
        named = self.named
        stores = [] if named is None else list(named.stores.values())
        others: Fact = dict.fromkeys(("stores", *_SUMMED), 0)
        for number, store in enumerate(stores[most:], 1):
            if number % PORTION == 0:
                yield {}
            fact = self._store(store)
            others["stores"] += 1
            for name in _SUMMED:
                others[name] += fact[name]
        yield {"oldest": [self._store(store) for store in stores[:most]], "others": others}

    def _store(self, store: NamedStore) -> Fact:
        return {
            "name": store.name,
            "host": store.host,
            "pid": store.pid,
            "attempt": store.attempt,
            "age": self._age(store.since),
            "joined": store.joined(),
            "expected": store.joins,
            "sessions": len(store.sessions),
            "keys": len(store.keyspace.values),
            "bytes": store.keyspace.size,
            "ended": store.ended,
            "port": store.port,
        }

    def keys(self) -> Iterator[Fact]:
        """Yield portions of the keys: key, bytes of its value, age of its last write and the session that wrote it.

        The last two are None if unknown. Queues follow, with 0 bytes.
        """
        keyspace = self.store.keyspace
        found: list[list[Any]] = []
        weight = 0
        for stored in (keyspace.values, keyspace.queues):
            for key in list(stored):
                value = stored.get(key)
                if value is None:  # deleted since the previous portion
                    continue
                size = 0 if isinstance(value, deque) else read_length(value)
                found.append([readable(key), size, *self._last_write(key)])
                weight += 1 + len(key) // _LONG
                if weight >= PORTION:
                    yield self._with_departed({"keys": found})
                    found, weight = [], 0
        if found:
            yield self._with_departed({"keys": found})

    def counters(self) -> Iterator[Fact]:
        """Yield portions of the counters of incomplete barriers, with the sessions that have counted there.

        Some portions are empty, because all sessions are examined for the barriers that they are in.
        """
        keyspace = self.store.keyspace
        holders = self.store.budget.holders
        members: dict[bytes, list[int]] = {}
        sizes: dict[bytes, int] = {}
        weight = 0
        left: dict[int, ServerSession] = {}
        for holder in [*holders, *self.history.departed()]:
            weight += 1
            if weight >= _NUMBERS:
                yield {}
                weight = 0
            if not isinstance(holder, ServerSession) or holder.store is not self.store:
                continue
            if holder not in holders:  # departed: the history has its arrivals
                left[holder.serial] = holder
                continue
            if holder.joined is not None:
                members.setdefault(holder.joined[0], []).append(self.history.serial(holder))
            if holder.barrier is not None:
                members.setdefault(holder.barrier, []).append(self.history.serial(holder))
                sizes[holder.barrier] = max(sizes.get(holder.barrier, 0), holder.number)
        for key in list({**self.history.barriers, **members}):
            if key not in keyspace.values:
                continue
            number = counter_value(keyspace, key)
            size = sizes.get(key, 0)
            if 0 < size <= number:  # complete
                continue
            barrier = self.history.barriers.get(key)
            found = members.get(key, [])
            if barrier is not None:
                found += barrier.members
            age = self._last_write(key)[0]
            for at in range(0, max(1, len(found)), _NUMBERS):
                for serial in found[at : at + _NUMBERS]:
                    if serial in left:
                        self._departed[serial] = left[serial]
                fact: Fact = {
                    "key": readable(key),
                    "value": number,
                    "expected": size,
                    "age": 0.0 if age is None else age,
                    "members": found[at : at + _NUMBERS],
                }
                yield self._with_departed({"counters": [fact]})

    def session(self, session: ServerSession) -> Fact:
        """Describe a session, but for what it waits for."""
        heard = session.heard_at != NEVER
        history = history_of(session.store)
        fact: Fact = {
            "id": history.serial(session) if heard and history is not None else 0,
            "host": session.host,
            "port": session.port,
            "joined": self._age(session.connected_at),
            "idle": self._age(session.heard_at if heard else session.connected_at),
            "command": session.slot.command.name,
        }
        if session.unsent:
            fact["unsent"] = session.unsent
        if session.held:
            fact["held"] = session.held
        if session.pid != NO_PID:
            fact["pid"] = session.pid
        if session.peer:
            fact["peer"] = session.peer
        if session.store.name:
            fact["store"] = session.store.name
        owner = session.owner
        if isinstance(owner, LinkedSession):
            fact["link"] = str(owner.link.host)
        elif isinstance(session.partial, LinkInput):
            fact["carries"] = 0 if session.partial.link is None else len(session.partial.link.sessions)
        return fact

    def _wait(self, session: ServerSession, groups: list[Fact]) -> Fact:
        group = session.group
        kind = AWAITED[session.state] if session.barrier is None else "barrier"
        if isinstance(group, SharedWait):  # its keys are in the fact about the group
            if id(group) not in self._groups:
                self._groups.add(id(group))
                missing = [] if group.parked is None else [readable(key) for key in group.parked]
                listed = [] if group.listed is None else [readable(key) for key in group.listed.keys]
                groups.append({"id": id(group), "keys": missing, "all": listed})
            return {"for": kind, "keys": [], "group": id(group)}
        keys = self._registered(session) if kind == "keys" else list(awaited_keys(session))
        wait: Fact = {"for": kind, "keys": [readable(key) for key in keys[:_MOST_AWAITED]]}
        if len(keys) > _MOST_AWAITED:
            wait["more"] = len(keys) - _MOST_AWAITED
        if isinstance(group, Counter):
            wait["target"] = session.number
        return wait

    def _registered(self, session: ServerSession) -> list[bytes]:
        """Return the keys that a session still awaits: not those whose waiters are being woken."""
        waiters = session.store.keyspace.waiters
        return [key for key in session.parked or () if session in waiters.get(key, ())]

    def _last_write(self, key: bytes) -> tuple[float | None, int | None]:
        """Return the age of the last write to a key, and the session that made it; None if unknown."""
        write = self.history.last_write(key)
        at = NEVER if write is None else write.at
        by = None if write is None else write.by
        waiting = self.store.keyspace.waiters.get(key)
        if waiting:
            last = next(reversed(waiting))
            if isinstance(last, ServerSession) and last.barrier == key and last.heard_at > at:
                at = last.heard_at  # entering a barrier writes its counter
                by = last
        if at == NEVER:
            return None, None
        return self._age(at), None if by is None else self._name(by)

    def _name(self, session: Peer) -> int:
        """Return the serial number of a session; if it has left, have the next portion describe it."""
        serial = self.history.serial(session)
        if session.heard_at == NEVER:
            self._departed[serial] = session
        return serial

    def _with_departed(self, fact: Fact) -> Fact:
        departed: list[Fact] = []
        for serial, session in self._departed.items():
            departed.append({"id": serial, **client_of(session)})
        self._departed.clear()
        if departed:
            fact["departed"] = departed
        return fact

    def _age(self, at: float) -> float:
        """Return the seconds since `at`, to a millisecond: `round` would take a third of the time of a whole fact."""
        milliseconds = int((self.now - at) * 1000.0 + 0.5)
        return milliseconds / 1000.0 if milliseconds > 0 else 0.0


def awaited_keys(session: ServerSession) -> Collection[bytes]:
    """Return the keys that a session waits for, possibly with stale registrations; for ENTER, the name of the store."""
    group = session.group
    if session.barrier is not None:
        return (session.barrier,)
    if isinstance(group, Counter):
        return (group.key,)
    if session.state != AWAITING_KEYS:
        return (session.awaited,) if session.awaited else ()
    return (group.parked if isinstance(group, SharedWait) else session.parked) or ()


def client_of(session: Peer) -> Fact:
    """Return what identifies the client of a session."""
    pid = None if session.pid == NO_PID else session.pid
    return {"host": session.host, "port": session.port, "pid": pid, "peer": session.peer}


def counter_value(keyspace: Keyspace, key: bytes) -> int:
    """Return the number that a counter has reached; 0 for a value that is not a number."""
    try:
        return keyspace.number_at(key)
    except ProtocolError:
        return 0
