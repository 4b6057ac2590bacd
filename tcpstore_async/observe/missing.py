"""Answers MISSING with facts: which keys are missing, which keys resemble them, who has written or arrived, who not.

Reads the keyspace and, if the store is observed, its history. Must not know how bytes travel, nor draw conclusions: the
asker does (`diagnosis/`). Changes neither what is stored nor what sessions wait for.

Invariants: a step takes no longer than a command with 1,000 keys. On a whole server one inquiry is under way at a time,
and what it holds is counted. Identical questions asked meanwhile share its answer; `_MOST_WAITING` others wait, and
beyond these, questions are answered at once and briefly. No peer learns of keys that its token does not cover.
"""

from bisect import insort
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

import msgspec

from ..auth.access import Access
from ..base.coercion import parse_digits
from ..base.errors import ProtocolError
from ..base.keys import readable
from ..keyspace.keyspace import Keyspace
from ..keyspace.steps import Running, Steps
from ..keyspace.waiter_types import AWAITED, Counter
from ..session.observer import NEVER
from ..session.peer import NO_PID, Peer
from ..session.server import ServerSession
from ..session.store import Store
from ..wire.commands import WORKERS_KEY
from ..wire.values import PREFIX, Framed, pack, unpack
from .history import Barrier, History, history_of
from .inspection import Fact, Inspection, awaited_keys, client_of, counter_value
from .similar_keys import LONGEST, Nearest, neighbours

MOST_ASKED: Final = 1000
"""Most keys of one question."""

MOST_BYTES: Final = 131_072
"""Most bytes of these keys."""

_DESCRIBED: Final = 4
"""Missing keys for which similar keys are listed."""

_SCANNED: Final = 16_384
"""Existing keys examined, newest first: a misspelled key mostly resembles a recent one."""

_WRITERS: Final = 32
"""Existing keys of the question whose writers are listed."""

_OTHERS: Final = 16
"""Most sessions of known rank, and of unknown rank, listed as not having arrived."""

_PROCESSES: Final = 1024
"""Most processes of unknown rank that are told apart to find these."""

_RANGES: Final = 257
"""Ranges listed of the ranks that have arrived: between them are the first 256 missing ranks."""

_RANKS: Final = 262_144
"""Ranks that are noted, beginning with 0."""

_WORLDS: Final = 4
"""Most world sizes listed."""

_AWAITED: Final = 8
"""Most keys listed that a session waits for."""

_NAME: Final = 255
"""Most characters listed of such a key, and of a world size."""

_SESSION_BYTES: Final = 131_072
"""Bytes of descriptions of sessions, about which no more are added."""

_PUBLIC: Final = ("id", "host", "port", "joined", "idle", "command", "pid")
"""What any client may know of a session, besides its rank."""

_PORTION: Final = 100
"""Keys of one step."""

_SESSIONS: Final = 500
"""Sessions of one step."""

_MOST_WAITING: Final = 8
"""Inquiries that wait until none is under way."""

_BASE_BYTES: Final = 32_768
"""Bytes counted for an inquiry, besides what grows with a store."""

_PROCESS_BYTES: Final = 256
"""Bytes counted for a process that is told apart."""

_POINTER_BYTES: Final = 8
"""Bytes counted for a key or session in a list."""

_MOST_DIGITS: Final = 9
"""Of an expected number."""

Items = list[tuple[bytes, Framed]]


def answer_missing(store: Store) -> None:
    """Have MISSING answered in all stores of a server."""
    inquiries = Inquiries()
    store.hub.register("missing", lambda one: inquiries.ask)


class Inquiries:
    """The questions of all peers of a server that are being answered."""

    def __init__(self) -> None:
        self.active: Inquiry | None = None
        """The inquiry that is under way."""
        self.waiting: int = 0
        """Number of inquiries that wait for its end."""
        self._shared: dict[tuple[object, ...], Inquiry] = {}

    def ask(self, session: ServerSession, items: Items) -> Framed | None:
        """Return the answer if it takes one step, else None; the session then continues the command.

        Raises ProtocolError for too many keys or bytes, and for an expected number that is not a number.
        """
        size = sum([len(key) for key, _ in items])
        if len(items) > MOST_ASKED or size > MOST_BYTES:
            raise ProtocolError(
                f"MISSING with {len(items)} keys of {size} bytes (max {MOST_ASKED} keys, {MOST_BYTES} bytes)"
            )
        steps = self._steps(session.store, session.store.hub.auth.granted.get(session), items)
        recorder = session.store.hub.clock.recorder
        if recorder is not None:
            steps = recorder.steps(steps)
        running = Running(steps, request=items)
        if running.step():
            answer: Framed = running.result
            return answer
        session.store.keyspace.running = running
        return None

    def _steps(self, store: Store, access: Access | None, items: Items) -> Steps:
        """Take part in the steps of an inquiry, which peers may share; return its answer."""
        identity: tuple[object, ...] = (store, access, *items)
        inquiry = self._shared.get(identity)
        if inquiry is None:
            inquiry = Inquiry(self, store, access, items)
            self._shared[identity] = inquiry
        inquiry.askers += 1
        try:
            while not inquiry.step():
                yield
            return inquiry.answer
        finally:
            inquiry.askers -= 1
            if not inquiry.askers:
                inquiry.abandon()
            if inquiry.is_over() and self._shared.get(identity) is inquiry:
                del self._shared[identity]


class Inquiry:
    """A question of one peer, or of several that asked the same."""

    def __init__(self, inquiries: Inquiries, store: Store, access: Access | None, items: Items) -> None:
        self.askers: int = 0
        """Number of peers that wait for the answer."""
        self.answer: Framed = b""
        self._inquiries = inquiries
        self._store = store
        self._keyspace: Keyspace = store.keyspace
        self._history: History | None = history_of(store)
        self._access = access
        self._keys: list[bytes] = []
        self._counter: bytes | None = None
        self._expected: int = 0
        for key, expected in items:
            if len(expected) > PREFIX:
                self._counter, self._expected = key, _number(expected)
            else:
                self._keys.append(key)
        self._similar: dict[bytes, None] = {}
        self._arrivals: _Arrivals | None = None
        self._described: dict[int, Peer] = {}
        """Sessions to which the answer refers, keyed by serial number."""
        self._steps: Steps | None = self._inquire()
        """None once there is an answer, or it is no longer wanted."""

    def step(self) -> bool:
        """Take the next step; return True once there is an answer."""
        for _ in self._steps or ():
            return False
        self._steps = None
        return True

    def is_over(self) -> bool:
        return self._steps is None

    def abandon(self) -> None:
        """Stop: no peer waits for the answer any more."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def _inquire(self) -> Steps:
        inquiries = self._inquiries
        absent = self._absent()
        pending = absent or (self._counter is not None and not 0 < self._expected <= self._value())
        if pending and inquiries.waiting < _MOST_WAITING:
            inquiries.waiting += 1
            try:
                yield  # others may ask the same meanwhile
                while inquiries.active is not None:
                    inquiries.active.step()  # the peer that began it may be suspended
                    yield
            finally:
                inquiries.waiting -= 1
            inquiries.active = self
            budget = self._store.budget
            size = self._size()
            budget.charge(size)
            try:
                yield from self._find([self._keys[at] for at in absent[:_DESCRIBED]])
            finally:
                inquiries.active = None
                budget.charge(-size)
        self.answer = pack(msgspec.json.encode(self._facts()))

    def _size(self) -> int:
        """Return the bytes that an inquiry holds at most."""
        size = _BASE_BYTES + _POINTER_BYTES * min(_SCANNED, len(self._keyspace.values))
        if self._history is None:
            return size
        sessions = len(self._store.budget.holders) + len(self._history.departed())
        return size + _RANKS + 2 * _POINTER_BYTES * sessions + _PROCESS_BYTES * min(_PROCESSES, sessions)

    def _absent(self) -> list[int]:
        """Return the indices of the keys that do not exist."""
        return [at for at, key in enumerate(self._keys) if not self._keyspace.exists(key)]

    def _value(self) -> int:
        """Return the value of the counter; 0 without one."""
        return counter_value(self._keyspace, self._counter or b"")

    def _may_see(self, key: bytes) -> bool:
        return key not in self._keyspace.reserved and (self._access is None or self._access.covers(key))

    # Steps

    def _find(self, wanted: list[bytes]) -> Iterator[None]:
        keyspace = self._keyspace
        wanted = [key for key in wanted if len(key) <= LONGEST]
        if wanted:
            nearest = [Nearest(key) for key in wanted]
            for key, one in zip(wanted, nearest, strict=True):
                for name in neighbours(readable(key), self._exists):
                    one.add(name.encode(), 0.0)
            newest = list(islice(reversed(keyspace.values), _SCANNED))
            newest += list(islice(keyspace.queues, _PORTION))
            for at in range(0, len(newest), _PORTION):
                yield
                for number, key in enumerate(newest[at : at + _PORTION], at):
                    if self._may_see(key):
                        for one in nearest:
                            one.add(key, float(number))
            for one in nearest:
                self._similar.update(dict.fromkeys(one.found()))
        history = self._history
        if history is None:
            return
        writers: set[Peer] = set()
        for key in self._keys:
            write = history.last_write(key)
            if write is not None and write.by is not None and self._keyspace.exists(key):
                writers.add(write.by)
        if self._counter is not None or writers:
            arrivals = _Arrivals(history, self._counter, writers)
            yield from arrivals.find()
            self._arrivals = arrivals

    def _exists(self, name: str) -> bool:
        key = name.encode()
        return self._keyspace.exists(key) and self._may_see(key)

    # The answer

    def _facts(self) -> Fact:
        absent = self._absent()
        fact: Fact = {
            "absent": _ranges_of(absent),
            "similar": [self._similar_key(key) for key in self._similar if self._keyspace.exists(key)],
            "counters": [],
        }
        arrivals = self._arrivals
        if self._counter is not None:
            counter: Fact = {"key": readable(self._counter), "value": self._value()}
            if arrivals is not None:
                counter.update(arrivals.facts())
            fact["counters"].append(counter)
        if arrivals is not None:
            gone = set(absent)
            there = [key for at, key in enumerate(self._keys) if at not in gone]
            fact["writers"] = [self._writer(key) for key in there[:_WRITERS]]
            for one in arrivals.others():
                self._serial(one)
            fact["unlisted"] = arrivals.unlisted
            fact["worlds"] = arrivals.worlds
        if self._described:
            self._describe(fact)
        why_held = self._store.hub.why_held
        if why_held:
            fact["server"] = {**fact.get("server", {}), "why_held": why_held}
        return {name: found for name, found in fact.items() if found}

    def _describe(self, fact: Fact) -> None:
        """Add what is known of the sessions to which the answer refers."""
        store, history = self._store, self._history
        assert history is not None
        inspection = Inspection(store, history, history.clock.now)
        sessions: list[Fact] = []
        departed: list[Fact] = []
        joined: list[int] = []
        arrived: list[int] = []
        size = 0
        for serial, session in self._described.items():
            if size >= _SESSION_BYTES:
                break
            if session.heard_at == NEVER or not isinstance(session, ServerSession):
                departed.append(_public({"id": serial, **client_of(session)}))
            else:
                found = _public(inspection.session(session))
                if session.state in AWAITED:
                    found["wait"] = self._wait(session)
                sessions.append(found)
                if has_joined(session):
                    joined.append(serial)
                if self._arrivals is not None and self._arrivals.has_arrived(session):
                    arrived.append(serial)
                size += len(msgspec.json.encode(found))
        if self._counter is not None:
            fact["counters"][0]["members"] = arrived
        if joined and self._counter != WORKERS_KEY:
            value = counter_value(self._keyspace, WORKERS_KEY)
            fact["counters"].append({"key": WORKERS_KEY.decode(), "value": value, "members": joined})
        fact["sessions"] = sessions
        fact["departed"] = departed
        if store.joins:
            fact["server"] = {"joins": store.joins}

    def _similar_key(self, key: bytes) -> list[Any]:
        history = self._history
        write = None if history is None else history.last_write(key)
        if write is None or history is None:
            return [readable(key), 0]
        return [readable(key), 0, _age(history, write.at), None if write.by is None else self._serial(write.by)]

    def _writer(self, key: bytes) -> int:
        write = None if self._history is None else self._history.last_write(key)
        return 0 if write is None or write.by is None else self._serial(write.by)

    def _serial(self, session: Peer) -> int:
        """Return the number of a session, and have the answer describe it."""
        assert self._history is not None
        serial = self._history.serial(session)
        self._described[serial] = session
        return serial

    def _wait(self, session: ServerSession) -> Fact:
        if self._access is not None and not self._access.whole():
            return {"for": ""}  # its keys, which the asker may not see, would be in what it waits for
        kind = AWAITED[session.state] if session.barrier is None else "barrier"
        awaited = awaited_keys(session)
        keys = [readable(key[:_NAME])[:_NAME] for key in islice(awaited, _AWAITED)]
        wait: Fact = {"for": kind, "keys": keys}
        if len(awaited) > len(keys):
            wait["more"] = len(awaited) - len(keys)
        if isinstance(session.group, Counter):
            wait["target"] = session.number
        return wait


class _Arrivals:
    """Who has counted at a counter, or written some keys, and which other sessions there are."""

    def __init__(self, history: History, counter: bytes | None, writers: set[Peer]) -> None:
        self.worlds: dict[str, int] = {}
        """How many sessions have said each size of the world."""
        self.unlisted: int = 0
        """Number of processes of unknown rank that have not arrived and are not among the `others`."""
        self._history = history
        self._counter = counter
        self._writers = writers
        barrier: Barrier | None = None if counter is None else history.barriers.get(counter)
        self._members: set[int] = set() if barrier is None else barrier.members
        self._known: int = 0
        self._joined: int = 0
        self._ranks = bytearray()
        """For each rank, whether it has arrived."""
        self._by_rank: list[tuple[int, int, ServerSession]] = []
        """Sessions of other ranks, lowest first: rank, order and session."""
        self._nameless: dict[tuple[object, ...], ServerSession] = {}
        """Connected processes that may be other ranks."""

    def find(self) -> Iterator[None]:
        for sessions in self._history.sessions(_SESSIONS):
            for one in sessions:
                size = one.peer.get("world_size")
                if size is not None:
                    size = size[:_NAME]
                    if size in self.worlds or len(self.worlds) < _WORLDS:
                        self.worlds[size] = self.worlds.get(size, 0) + 1
                if self.has_arrived(one):
                    self._note(one)
            yield
        number = 0
        for sessions in self._history.sessions(_SESSIONS):
            for one in sessions:
                if not self.has_arrived(one):
                    number += 1
                    self._note_other(one, number)
            yield
        if self._nameless:
            for sessions in self._history.sessions(_SESSIONS):
                for one in sessions:
                    if self.has_arrived(one):
                        self._nameless.pop(self._process(one), None)
                yield

    def has_arrived(self, one: ServerSession) -> bool:
        counter = self._counter
        if counter is None:
            return one in self._writers
        if one.heard_at != NEVER and ((one.joined is not None and one.joined[0] == counter) or one.barrier == counter):
            return True
        return one.serial != 0 and one.serial in self._members

    def _note(self, one: ServerSession) -> None:
        self._known += 1
        self._joined += has_joined(one)
        rank = _rank(one)
        if 0 <= rank < _RANKS:
            if rank >= len(self._ranks):
                self._ranks.extend(bytes(rank + 1 - len(self._ranks)))
            self._ranks[rank] = 1

    def _note_other(self, one: ServerSession, number: int) -> None:
        rank = _rank(one)
        if rank < 0:
            process = self._process(one)
            if process in self._nameless or len(self._nameless) < _PROCESSES:
                if one.heard_at != NEVER:
                    self._nameless[process] = one
            else:
                self.unlisted += 1
        elif rank >= len(self._ranks) or not self._ranks[rank]:  # else it is another connection of a rank that has come
            by_rank = self._by_rank
            if len(by_rank) < _OTHERS or rank < by_rank[-1][0]:
                insort(by_rank, (rank, number, one))
                del by_rank[_OTHERS:]

    def others(self) -> list[ServerSession]:
        """Return sessions of processes that have not arrived; count those that are not among them."""
        nameless = list(self._nameless.values())
        self.unlisted += max(0, len(nameless) - _OTHERS)
        return [*[one for _, _, one in self._by_rank], *nameless[:_OTHERS]]

    def facts(self) -> Fact:
        """Return who has counted at the counter: sessions, those of them that have joined, and ranks."""
        ranks: list[tuple[int, int]] = []
        first = self._ranks.find(1)
        while first >= 0 and len(ranks) < _RANGES:
            end = self._ranks.find(0, first)
            end = len(self._ranks) if end < 0 else end
            ranks.append((first, end - 1))
            first = self._ranks.find(1, end)
        found = {"known": self._known, "joined": self._joined, "told": self._ranks.count(1), "ranks": ranks}
        return {name: what for name, what in found.items() if what}

    def _process(self, session: ServerSession) -> tuple[object, ...]:
        """Return what distinguishes processes, as far as known."""
        if session.pid == NO_PID:
            return (self._history.serial(session),)
        return session.pid, session.host, session.peer.get("host")


def _public(session: Fact) -> Fact:
    """Return what any client may know of a session."""
    peer = session.get("peer") or {}
    known = {name: peer[name][:_NAME] for name in ("host", "rank", "world_size") if name in peer}
    return {**{name: session[name] for name in _PUBLIC if name in session}, **({"peer": known} if known else {})}


def _ranges_of(numbers: list[int]) -> list[list[int]]:
    """Return ascending numbers as ranges."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ranges


def _rank(session: Peer) -> int:
    """Return the rank that a client has sent; -1 if it has sent none."""
    rank = parse_digits(session.peer.get("rank"))
    return -1 if rank is None else rank


def has_joined(session: ServerSession) -> bool:
    return session.joined is not None and session.joined[0] == WORKERS_KEY


def _age(history: History, at: float) -> float:
    return round(max(0.0, history.clock.now - at), 3)


def _number(expected: Framed) -> int:
    text = unpack(expected) if len(expected) <= PREFIX + _MOST_DIGITS else b""
    if not text.isdigit():
        raise ProtocolError(f"MISSING expects a decimal number of ranks; got {len(expected) - PREFIX} bytes")
    return int(text)
