"""Answers MISSING: which keys are missing, which existing keys are similar, and which ranks have not arrived.

Reads the keyspace and, if the store is observed, its history. Must not know how bytes travel or how an answer is used.
Changes neither what is stored nor what sessions wait for.

Invariants: a step takes no longer than a command with 1,000 keys. Identical simultaneous questions share one answer,
and one thorough search runs at a time, so the cost does not grow with the number of peers that time out; beyond
`_MOST_QUEUED`, questions are answered without a search. No peer learns of keys that its token does not cover.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Final

from ..auth.access import Access
from ..base.coercion import parse_digits
from ..base.errors import ProtocolError
from ..base.keys import describe_wait, readable
from ..keyspace.keyspace import Keyspace
from ..keyspace.steps import Running, Steps
from ..keyspace.waiter_types import AWAITED, IDLE
from ..session.observer import NEVER
from ..session.peer import Peer
from ..session.server import ServerSession
from ..session.store import Store
from ..wire.commands import WORKERS_KEY
from ..wire.values import PREFIX, Framed, pack, unpack
from .history import History, counter_of, history_of
from .inspection import awaited_keys, counter_value
from .missing_reply import Absent, Elsewhere, Near, Report, Who, encode_report
from .similar_keys import Family, Search, family_of

MOST_ASKED: Final = 1000
"""Most keys of one question."""

_DESCRIBED: Final = 4
"""Missing keys for which similar keys are searched."""

_INDICES: Final = 100
"""Missing keys listed in an answer."""

_SCANNED: Final = 16_384
"""Existing keys examined, newest first: a misspelled key is mostly similar to a recent one."""

_LONGEST_KEY: Final = 512
"""Longest key, in characters, that is compared, whether missing or existing."""

_LETTERS: Final = 100
"""Most texts compared by edit distance."""

_LONGEST: Final = 128
"""Characters of the longest such text."""

_RANKS: Final = 256
"""Missing ranks listed in an answer."""

_MOST_EXPECTED: Final = 1_048_576
"""Largest expected count for which missing ranks are computed."""

_MOST_OTHERS: Final = 1024
"""Most missing sessions of unknown rank that are identified."""

_ELSEWHERE: Final = 8
"""Missing ranks whose activity is described, and keys read for a description."""

_PORTION: Final = 500
"""Keys, or sessions, of one step."""

_PORTION_BYTES: Final = 32_768
"""Bytes of the keys of one step: one key may have thousands of numbers."""

_MOST_QUEUED: Final = 8
"""Questions that wait for their thorough search."""

_KEPT: Final = 8
"""Questions whose answers are kept while they cannot have changed: few, as all are forgotten in one step."""

_KEPT_BYTES: Final = 65_536
"""Bytes of the keys of such a question; a longer one is answered for each peer alone."""

_MOST_DIGITS: Final = 9
"""Of an expected number."""

_MISSING: Final = "MISSING"

Items = list[tuple[bytes, Framed]]


def answer_missing(store: Store) -> None:
    """Have MISSING answered in all stores of a server."""
    store.hub.register("missing", lambda one: Questions(one).ask)


class Questions:
    """The questions of one store that are being answered, or were just answered."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.searching: Question | None = None
        """The question whose thorough search is running."""
        self.queued: int = 0
        """Number of questions that wait for their search."""
        self._known: dict[tuple[object, ...], Question] = {}
        self._changes: int = -1
        self._now: float = -1.0

    def ask(self, session: ServerSession, items: Items) -> Framed | None:
        """Return the answer if it takes one step, else None; the session then continues the command.

        Raises ProtocolError for too many keys, and for an expected number that is not a number.
        """
        if len(items) > MOST_ASKED:
            raise ProtocolError(f"MISSING with {len(items)} keys (max {MOST_ASKED})")
        size = 0
        for key, expected in items:
            if len(expected) > PREFIX:
                _number(expected)
            size += len(key)
        store = self.store
        now = -1.0 if store.observer is None else store.observer.now
        # Answers are shared only until a key changes, or the clock, to which ages refer, moves on.
        if store.keyspace.changes != self._changes or now != self._now or len(self._known) >= _KEPT:
            self._changes, self._now = store.keyspace.changes, now
            self._known = {key: known for key, known in self._known.items() if not known.done}
            if len(self._known) >= _KEPT:
                self._known = {}
        access = store.hub.auth.granted.get(session)
        if size > _KEPT_BYTES:  # comparing it with known questions would take long
            question = Question(self, access, items)
        else:
            identity: tuple[object, ...] = (access, *items)
            known = self._known.get(identity)
            if known is None:
                known = self._known[identity] = Question(self, access, items)
            question = known
        question.askers += 1
        running = Running(_await_answer(question), request=items)
        if running.step():
            return question.answer
        store.keyspace.running = running
        return None

    def forget(self, question: "Question") -> None:
        """Do not share a question that was abandoned."""
        self._known = {key: known for key, known in self._known.items() if known is not question}


def _await_answer(question: "Question") -> Steps:
    """Take part in the steps of a question, which peers may share."""
    try:
        while not question.step():
            yield
        return question.answer
    finally:
        question.askers -= 1
        if not question.askers:
            question.abandon()


class Question:
    """A question of one peer, or of several that asked the same."""

    def __init__(self, questions: Questions, access: Access | None, items: Items) -> None:
        self.askers: int = 0
        """Number of peers that wait for the answer."""
        self.done = False
        self.answer: Framed = b""
        self._questions = questions
        self._keyspace: Keyspace = questions.store.keyspace
        self._history: History | None = history_of(questions.store)
        self._access = access
        self._keys: list[bytes] = []
        self._counter = b""
        self._expected: int = 0
        for key, expected in items:
            if len(expected) > PREFIX:
                self._counter, self._expected = key, _number(expected)
            else:
                self._keys.append(key)
        self._queued = False
        self._work = self._find()

    def step(self) -> bool:
        """Take the next step; return True once there is an answer."""
        if self.done:
            return True
        for _ in self._work:
            return False
        self._finish()
        return True

    def abandon(self) -> None:
        """Stop: no peer waits for the answer any more."""
        if not self.done:
            self._finish()
            self._questions.forget(self)

    def _finish(self) -> None:
        self.done = True
        self._work = iter(())
        self._keys = []
        self._release_search()

    def _release_search(self) -> None:
        """Give up the search, or the place in its queue."""
        if self._questions.searching is self:
            self._questions.searching = None
        if self._queued:
            self._queued = False
            self._questions.queued -= 1

    def _find(self) -> Iterator[None]:
        absent = self._absent()
        wanted = {at: readable(self._keys[at]) for at in absent[:_DESCRIBED]}
        wanted = {at: name for at, name in wanted.items() if len(name) <= _LONGEST_KEY}
        search = Search(list(wanted.values()), self._exists, similar=_LETTERS, longest=_LONGEST)
        arrived = self._arrived()
        ranks: list[int] = []
        more = 0
        elsewhere: list[Elsewhere] = []
        if absent or (arrived is not None and arrived < self._expected):
            thorough = self._questions.searching is None or self._questions.queued < _MOST_QUEUED
            if thorough:
                self._queued = self._questions.searching is not None
                self._questions.queued += self._queued
                while self._questions.searching is not None:  # another question's search
                    yield
                self._release_search()
                self._questions.searching = self
                if wanted:
                    yield from self._scan(search)
                if self._history is not None:
                    who = _WhoIsMissing(self._history, self._access)
                    if arrived is not None and arrived < self._expected:
                        yield from who.find_by_counter(self._counter, arrived, self._expected)
                    elif arrived is None and (counter := self._counter_of_the_key()):
                        yield from who.find_by_counter(counter, counter_value(self._keyspace, counter), 0)
                    elif arrived is None:
                        yield from who.find_by_keys(self._keys, absent)
                    yield from who.find_elsewhere()
                    ranks, more, elsewhere = who.ranks, who.more, who.elsewhere
                # Other peers, even ones that share this question, may have written and deleted keys meanwhile.
                before = absent, arrived
                absent, arrived = self._absent(), self._arrived()
                if (absent, arrived) != before:
                    ranks, more, elsewhere = [], 0, []
        report = Report(
            missing=len(absent),
            keys=[
                Absent(at, self._describe(search.nearest(wanted[at])) if at in wanted else [])
                for at in absent[:_INDICES]
            ],
            arrived=arrived,
            ranks=ranks,
            more=more,
            elsewhere=elsewhere,
        )
        self.answer = pack(encode_report(report))

    def _absent(self) -> list[int]:
        """Return the indices of the keys that do not exist."""
        return [at for at, key in enumerate(self._keys) if not self._keyspace.exists(key)]

    def _arrived(self) -> int | None:
        """Return the value of the counter; None without one."""
        return counter_value(self._keyspace, self._counter) if self._counter else None

    def _counter_of_the_key(self) -> bytes:
        """Return the counter of the barrier that the only key would open; empty without one."""
        counter = counter_of(self._keys[0]) if len(self._keys) == 1 else b""
        return counter if counter in self._keyspace.values and self._may_see(counter) else b""

    def _exists(self, name: str) -> bool:
        key = name.encode()
        return self._keyspace.exists(key) and self._may_see(key)

    def _may_see(self, key: bytes) -> bool:
        return key not in self._keyspace.reserved and (self._access is None or self._access.covers(key))

    def _scan(self, search: Search) -> Iterator[None]:
        """Add the newest keys to a search, then compare them."""
        keyspace = self._keyspace
        yield
        newest = list(islice(reversed(keyspace.values), _SCANNED))
        newest += list(islice(keyspace.queues, _PORTION))
        yield
        names: list[str] = []
        size = 0
        for number, key in enumerate(newest, 1):
            if len(key) <= _LONGEST_KEY and self._may_see(key):
                names.append(readable(key))
                size += len(key)
            if number % _PORTION == 0 or number == len(newest) or size >= _PORTION_BYTES:
                search.add([name for name in names if len(name) <= _LONGEST_KEY])  # escapes may have made it longer
                names = []
                size = 0
                yield
        while not search.compare():
            yield

    def _describe(self, names: list[str]) -> list[Near]:
        found: list[Near] = []
        history = self._history
        for name in names:
            write = None if history is None else history.last_write(name.encode())
            if write is None or history is None:
                found.append(Near(name))
            else:
                found.append(Near(name, _age(history, write.at), None if write.by is None else process_of(write.by)))
        return found


class _WhoIsMissing:
    """Finds out which ranks have not arrived, and what the connected ones among them do."""

    def __init__(self, history: History, access: Access | None) -> None:
        self.ranks: list[int] = []
        """The first missing ranks, ascending."""
        self.more: int = 0
        """Number of further ones."""
        self.elsewhere: list[Elsewhere] = []
        self._history = history
        self._shows_keys = access is None or access.whole()
        """Whether the asker may see the keys of others, which descriptions contain."""
        self._others: list[ServerSession] = []
        """The missing sessions, if ranks are not known."""

    def find_by_counter(self, counter: bytes, arrived: int, expected: int) -> Iterator[None]:
        """Find who has not counted at a barrier, or joined; `expected` is 0 for all ranks of the world."""
        members: list[ServerSession] = []
        if expected <= _MOST_EXPECTED:
            yield from self._history.members(counter, members, _PORTION)
        expected = expected or next(filter(None, map(_world_size, members)), 0)
        if not arrived < expected <= _MOST_EXPECTED:
            return
        came = bytearray(expected)
        known = 0
        world = str(expected)
        whole = counter == WORKERS_KEY
        part = False
        for at in range(0, len(members), _PORTION):
            for member in members[at : at + _PORTION]:
                peer = member.peer
                rank = rank_of(peer)
                if rank is not None and rank < expected and not came[rank]:
                    came[rank] = 1
                    known += 1
                size = peer.get("world_size", world)
                part = part or size != world
                whole = whole or "world_size" in peer
            yield
        # Numbers are missing ranks only if all arrivals are known, by ranks of one world.
        if whole and known == arrived and (counter == WORKERS_KEY or not part):
            rank = came.find(0)
            while rank >= 0 and len(self.ranks) < _RANKS:
                self.ranks.append(rank)
                rank = came.find(0, rank + 1)
            self.more = expected - arrived - len(self.ranks)
        elif counter != WORKERS_KEY:
            yield from self._find_among_joined(members, expected - arrived)

    def _find_among_joined(self, members: "list[ServerSession]", missing: int) -> Iterator[None]:
        """Find the sessions that have joined but not arrived, if their number is `missing`."""
        if missing > _MOST_OTHERS:
            return
        joined: list[ServerSession] = []
        yield from self._history.members(WORKERS_KEY, joined, _PORTION)
        came = set(members)
        others: dict[tuple[object, ...], ServerSession] = {}
        for at in range(0, len(joined), _PORTION):
            for one in joined[at : at + _PORTION]:
                if one not in came:
                    others[self._process(one)] = one
            if len(others) > 2 * _MOST_OTHERS:
                return
            yield
        for at in range(0, len(members), _PORTION):
            for one in members[at : at + _PORTION]:
                others.pop(self._process(one), None)
            yield
        if len(others) == missing:
            self._others = list(others.values())

    def find_by_keys(self, keys: list[bytes], absent: list[int]) -> Iterator[None]:
        """Find who has not written keys, if the rank in each existing key is the one that wrote it."""
        family: Family | None = None
        missing: list[int] = []
        confirmed = False
        gone = set(absent)
        size = 0
        for at in [*absent, *[at for at in range(len(keys)) if at not in gone]]:
            size += len(keys[at])
            if size >= _PORTION_BYTES:
                size = 0
                yield
            found = family_of(readable(keys[at]))
            if at in gone:
                if found is None or (family is not None and found[0] != family):
                    return  # not one key per rank
                family = found[0]
                missing.append(found[1])
            elif found is not None and found[0] == family:
                write = self._history.last_write(keys[at])
                rank = None if write is None or write.by is None else rank_of(write.by.peer)
                if rank is not None and rank != found[1]:
                    return  # the numbers are not ranks
                confirmed = confirmed or rank is not None
        if confirmed:
            missing.sort()
            self.ranks = missing[:_RANKS]
            self.more = len(missing) - len(self.ranks)

    def find_elsewhere(self) -> Iterator[None]:
        """Find out what missing ranks do."""
        found: dict[int, ServerSession] = {}
        if self.ranks:
            wanted = set(self.ranks)
            for sessions in self._history.sessions(_PORTION):
                for one in sessions:
                    rank = rank_of(one.peer)
                    if (
                        rank is not None
                        and rank in wanted
                        and (rank not in found or _is_more_telling(one, found[rank]))
                    ):
                        found[rank] = one
                yield
        for one in [*[found[rank] for rank in sorted(found)], *self._others][:_ELSEWHERE]:
            since = None if one.heard_at == NEVER else _age(self._history, one.heard_at)
            self.elsewhere.append(Elsewhere(process_of(one), _describe_activity(one, self._shows_keys), since))

    def _process(self, session: ServerSession) -> tuple[object, ...]:
        """Return what distinguishes processes, as far as known."""
        if session.pid < 0:
            return (self._history.serial(session),)
        return session.pid, session.host, session.peer.get("host"), session.peer.get("rank")


def rank_of(peer: dict[str, str]) -> int | None:
    """Return the rank that a client has sent; None if it has sent none."""
    return parse_digits(peer.get("rank"))


def _world_size(session: ServerSession) -> int:
    """Return the number of ranks that a client has sent; 0 if it has sent none."""
    return parse_digits(session.peer.get("world_size")) or 0


def process_of(session: Peer) -> Who:
    """Describe a session's process."""
    pid = session.pid
    return Who(session.peer.get("host") or session.host, rank_of(session.peer), None if pid < 0 else pid)


def _is_more_telling(one: ServerSession, other: ServerSession) -> bool:
    """Return whether a session tells more about its rank than another: it waits longer, or was heard later."""
    waits, waited = _waits(one), _waits(other)
    if waits != waited:
        return waits
    return one.heard_at < other.heard_at if waits else one.heard_at > other.heard_at


def _waits(session: ServerSession) -> bool:
    return session.heard_at != NEVER and session.state != IDLE


def _describe_activity(session: ServerSession, shows_keys: bool) -> str:
    """Describe what a session does; name keys only if `shows_keys`."""
    if session.heard_at == NEVER:
        return "has left"
    if session.state == IDLE and session.slot.command.name == _MISSING:
        return "has just timed out"
    if session.state == IDLE:
        return f"has sent nothing since {session.slot.command.name}"
    if not shows_keys:
        return "is waiting"
    kind = AWAITED[session.state] if session.barrier is None else "barrier"
    awaited = awaited_keys(session)
    keys = [readable(key) for key in islice(awaited, _ELSEWHERE)]
    return describe_wait(kind, keys, len(awaited) - len(keys), session.number)


def _age(history: History, at: float) -> float:
    return round(max(0.0, history.now - at), 3)


def _number(expected: Framed) -> int:
    text = unpack(expected) if len(expected) <= PREFIX + _MOST_DIGITS else b""
    if not text.isdigit():
        raise ProtocolError(f"MISSING expects a decimal number of ranks; got {len(expected) - PREFIX} bytes")
    return int(text)
