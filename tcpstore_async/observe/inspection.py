"""What is known about the sessions and keys of a store, in portions, for those who look into a running server.

Only facts: who is connected, what each session waits for, which keys there are, who has come to which barrier. What
follows from them is worked out by whoever asked (`diagnosis/`). Without I/O, and nothing here changes anything.

Invariants: between two portions anything may happen; a session or key that was there all the time is in one of them. A
portion takes no longer than a command with as many keys. Text of peers is passed on as text.
"""

from collections.abc import Iterator
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
"""Sessions, or keys, of one portion: a tenth of a millisecond, compiled, which is a fraction of a busy loop's turn."""

_LONG: Final = 256
"""Bytes of a key that count as much as another key."""

_MOST_AWAITED: Final = 1024
"""Keys that are listed of those which one session waits for by itself."""

_NUMBERS: Final = 10 * PORTION
"""Members of a barrier in one portion: each is a number only."""

_SUMMED: Final = ("joined", "expected", "sessions", "keys", "bytes")
"""Of stores that are not listed."""

Fact = dict[str, Any]


class Inspection:
    """One look at one store of a server and its history."""

    def __init__(
        self, store: Store, history: History, now: float, everyone: bool = False, named: NamedStores | None = None
    ) -> None:
        """`now` is the time of the server's clock, to which ages refer; `named` are its stores with names.

        With `everyone`, sessions are those of all stores of the server.
        """
        self.named = named
        self.everyone = everyone
        self.store = store
        self.history = history
        self.now = now
        self._departed: dict[int, Peer] = {}
        """By serial number: sessions that have left, and are named by what follows."""
        self._groups: set[int] = set()
        """The groups of waiters that have been described."""

    def summary(self) -> Fact:
        """Return what is known of the server as a whole."""
        store = self.store
        return {
            "sessions": len(store.budget.holders),
            "num_keys": len(store.keyspace.values),
            "bytes": store.budget.used(),
            "joins": store.joins,
        }

    def sessions(self) -> Iterator[Fact]:
        """Yield portions of the sessions, and of the groups of waiters that they are in."""
        found: list[Fact] = []
        groups: list[Fact] = []
        weight = 0
        holders = self.store.budget.holders
        for holder in list(holders):
            if not isinstance(holder, ServerSession) or holder not in holders:
                continue
            if holder.store is not self.store and not self.everyone:
                continue
            fact = self._session(holder, groups)
            found.append(fact)
            weight += 1
            wait = fact.get("wait")
            if wait is not None:
                weight += len(wait["keys"]) // 8
            for group in groups:
                weight += len(group["keys"]) // 8
            if weight >= PORTION:
                yield {"groups": groups, "sessions": found}
                found, groups, weight = [], [], 0
        if found:
            yield {"groups": groups, "sessions": found}

    def stores(self) -> Iterator[Fact]:
        """Yield the stores with names, those included that have ended and that sessions are still in, in portions."""
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
        """Yield empty portions, and at last the oldest stores with names, and sums over the others.

        Whatever comes and goes, a store that is among the oldest stays there until it ends.
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

        The last two are None if they are not known. Queues follow, with 0 bytes.
        """
        keyspace = self.store.keyspace
        found: list[list[Any]] = []
        weight = 0
        for key in list(keyspace.values):
            value = keyspace.values.get(key)
            if value is None:
                continue
            found.append(self._key(key, read_length(value)))
            weight += 1 + len(key) // _LONG
            if weight >= PORTION:
                yield self._with_departed({"keys": found})
                found, weight = [], 0
        for key in list(keyspace.queues):
            if key not in keyspace.queues:
                continue
            found.append(self._key(key, 0))
            weight += 1 + len(key) // _LONG
            if weight >= PORTION:
                yield self._with_departed({"keys": found})
                found, weight = [], 0
        if found:
            yield self._with_departed({"keys": found})

    def counters(self) -> Iterator[Fact]:
        """Yield the counters of barriers that are not complete, and who has counted there, in portions.

        Some are empty: looking for those who are in a barrier takes more than one.
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
            if holder not in holders:
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
            number = _number(keyspace, key)
            size = sizes.get(key, 0)
            if 0 < size <= number:
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

    def _session(self, session: ServerSession, groups: list[Fact]) -> Fact:
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
        if session.state in AWAITED:
            fact["wait"] = self._wait(session, groups)
        return fact

    def _wait(self, session: ServerSession, groups: list[Fact]) -> Fact:
        wait: Fact = {"for": AWAITED[session.state], "keys": []}
        group = session.group
        if session.barrier is not None:
            wait.update({"for": "barrier", "keys": [readable(session.barrier)]})
        elif isinstance(group, Counter):
            wait["keys"] = [readable(group.key)]
            wait["target"] = session.number
        elif isinstance(group, SharedWait):
            wait["group"] = id(group)
            if id(group) not in self._groups:
                self._groups.add(id(group))
                missing = [] if group.parked is None else [readable(key) for key in group.parked]
                listed = [] if group.listed is None else [readable(key) for key in group.listed.keys]
                groups.append({"id": id(group), "keys": missing, "all": listed})
        elif session.state == AWAITING_KEYS:
            keys = self._registered(session)
            wait["keys"] = [readable(key) for key in keys[:_MOST_AWAITED]]
            if len(keys) > _MOST_AWAITED:
                wait["more"] = len(keys) - _MOST_AWAITED
        elif session.awaited:
            wait["keys"] = [readable(session.awaited)]
        return wait

    def _registered(self, session: ServerSession) -> list[bytes]:
        """Return the keys that a session still awaits: not those whose waiters are being woken."""
        waiters = session.store.keyspace.waiters
        return [key for key in session.parked or () if session in waiters.get(key, ())]

    def _key(self, key: bytes, stored: int) -> list[Any]:
        age, by = self._last_write(key)
        return [readable(key), stored, age, by]

    def _last_write(self, key: bytes) -> tuple[float | None, int | None]:
        """Return how long ago a key was last written, and by which session; None if that is not known."""
        write = self.history.write(key)
        at = NEVER if write is None else write.at
        by = None if write is None else write.by
        waiting = self.store.keyspace.waiters.get(key)
        if waiting:
            last = next(reversed(waiting))
            if isinstance(last, ServerSession) and last.barrier == key and last.heard_at > at:
                at = last.heard_at  # whoever enters a barrier writes its counter
                by = last
        if at == NEVER:
            return None, None
        return self._age(at), None if by is None else self._name(by)

    def _name(self, session: Peer) -> int:
        """Return the serial number of a session, and describe it in this portion if it has left."""
        serial = self.history.serial(session)
        if session.heard_at == NEVER:
            self._departed[serial] = session
        return serial

    def _with_departed(self, fact: Fact) -> Fact:
        departed: list[Fact] = []
        for serial, session in self._departed.items():
            departed.append({
                "id": serial,
                "host": session.host,
                "port": session.port,
                "pid": None if session.pid == NO_PID else session.pid,
                "peer": session.peer,
            })  # fmt: skip
        self._departed.clear()
        if departed:
            fact["departed"] = departed
        return fact

    def _age(self, at: float) -> float:
        """Return how long ago that was, to a millisecond: `round` would take a third of the time of a whole fact."""
        milliseconds = int((self.now - at) * 1000.0 + 0.5)
        return milliseconds / 1000.0 if milliseconds > 0 else 0.0


def _number(keyspace: Keyspace, key: bytes) -> int:
    try:
        return keyspace.number_at(key)
    except ProtocolError:
        return 0
