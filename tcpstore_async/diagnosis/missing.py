"""Which ranks are missing from the job, from a barrier, from an exchange of keys.

Whatever all ranks of a group must do, and sessions wait for, is a `Pending`: how many have done it, which ranks have
not, and what the connected ones among these do instead.

Invariant: a rank is called missing only if the facts leave no other; if ranks are unknown, connections are listed.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec

from ..base.keys import describe_wait
from ..observe.similar_keys import Family, family_of, number_after
from ..wire.commands import BY_METHOD
from .facts import Counter as BarrierCounter
from .facts import Facts, Group, Members, Session, Wait
from .patterns import (
    JOIN_COUNTER,
    gloo_size,
    is_for_agents,
    is_nccl_counter,
    nccl_id,
    opened_counter,
    root_rank,
)
from .stock_ranks import Rank, Ranks


class Elsewhere(msgspec.Struct):
    """A missing rank that is or was connected."""

    rank: int | None
    host: str
    port: int
    pid: int | None
    does: str
    since: float
    """Seconds since its last request."""


class Hosted(msgspec.Struct):
    """A host from which fewer ranks have arrived than from others."""

    host: str
    arrived: int
    usual: int
    """Arrivals from most hosts."""


class Pending(msgspec.Struct):
    """Something that sessions wait for."""

    kind: str
    """`join`, `barrier` or `keys`."""
    key: str
    """The counter, or a family of keys with `*` in place of the number."""
    arrived: int
    expected: int | None
    missing_ranks: list[int]
    """Ranks, in the group that exchanges the keys; empty if unknown."""
    elsewhere: list[Elsewhere]
    unseen: int
    """Number of missing ranks that are not connected."""
    waiting: int
    """Number of ranks that wait for it."""
    since: float
    """Seconds of the longest wait."""
    fewer_on: list[Hosted] = []
    unidentified: int = 0
    """Number of missing ranks that may be connected: the ranks of some connections are unknown."""
    left: list[Elsewhere] = []
    """Missing ranks that were connected."""
    of_job: bool = False
    """Whether the missing ranks are ranks of the whole job, not only of a group."""


class Claimed(msgspec.Struct):
    """A rank that several connected processes claim."""

    rank: int
    by: list[str]


class Missing(msgspec.Struct):
    """The result: everything pending."""

    world_size: int | None
    joined: int
    waits: list[Pending]
    waiting: int = 0
    """Number of sessions that wait for anything."""
    claimed: list[Claimed] = []


class Awaited(NamedTuple):
    """Sessions that wait for the same."""

    wait: Wait
    keys: list[str]
    """The missing ones."""
    all: list[str]
    """The whole list, if known."""
    sessions: list[Session]


# Calls in C: there may be a hundred thousand ranks.
_host_of: Final[Callable[[Rank], str]] = attrgetter("host")
_id_of: Final[Callable[[Session], int]] = attrgetter("id")
_idle_of: Final[Callable[[Session], float]] = attrgetter("idle")

_MOST_NUMBERS: Final = 1_000_000
"""Most numbers examined, in all: any peer may wait for a key with an invented number."""


_QUESTION: Final = BY_METHOD["missing"].name
"""The command with which a client asks why it has timed out."""


def awaited(facts: Facts) -> list[Awaited]:
    """Return the waits, one for each awaited list of keys."""
    found: list[Awaited] = []
    for number, (wait, sessions) in facts.waits_in_groups.items():
        group = facts.groups.get(number)
        if group is not None and group.keys:
            found.append(Awaited(wait, group.keys, group.all, sessions))
    for wait, sessions in facts.waits.values():
        keys = wait.keys if len(wait.keys) == 1 else sorted(wait.keys)
        found.append(Awaited(wait, keys, [], sessions))
    return found


def find_pending(facts: Facts, keys: list[str], counter: str, expected: int) -> tuple[Ranks, Pending | None]:
    """Return what a call has waited for that has timed out, if its ranks are known; `facts` are those about it.

    It has waited for `keys` or, if there is an `expected` number, for `counter` to reach it.
    """
    ranks = Ranks(facts, {}, expected if counter == JOIN_COUNTER else None)
    if counter in facts.counters:
        facts.counters[counter].expected = expected
    wait = Awaited(Wait("barrier"), [counter], [], []) if expected else Awaited(Wait("keys"), facts.absent, keys, [])
    waits = [one for one in find_missing(facts, ranks, [wait]).waits if one.kind != "join" or counter == JOIN_COUNTER]
    return ranks, waits[0] if waits else None


def find_missing(facts: Facts, ranks: Ranks, waits: list[Awaited]) -> Missing:
    """Return which ranks are missing from what is pending; `waits` is the result of `awaited`."""
    return _Search(facts, ranks).run(waits)


def describe_activity(session: Session | None, groups: Mapping[int, Group]) -> str:
    """Describe what a session does; `groups` has the groups of waiters."""
    if session is None:
        return "has left"
    wait = session.wait
    if wait is None:
        if session.command == _QUESTION:
            return "has just timed out"
        return f"has sent nothing since {session.command}" if session.id else "has sent nothing"
    if not wait.kind:
        return "is waiting"
    group = groups.get(wait.group) if wait.group else None
    return describe_wait(wait.kind, wait.keys if group is None else group.keys, wait.more, wait.target)


class _Exchange:
    """A family of keys that sessions wait for."""

    def __init__(self) -> None:
        self.awaited: set[int] = set()
        self.listed: set[int] = set()
        """Numbers in awaited lists that name several keys of the family."""
        self.sessions: list[Session] = []
        """The waiting sessions."""


class _Search:
    def __init__(self, facts: Facts, ranks: Ranks) -> None:
        self.facts = facts
        self.ranks = ranks
        joining = facts.counters.get(JOIN_COUNTER)
        self.joined = ranks.of(joining.members) if joining is not None else set()
        self.joined_count = joining.value if joining is not None else len([one for one in ranks.all if one.sessions])
        self.joined_count -= ranks.agents
        self.waiting: dict[str, list[Session]] = defaultdict(list)
        """Sessions that wait for a barrier to open, keyed by its counter."""
        self.exchanges: dict[Family, _Exchange] = defaultdict(_Exchange)
        self._last: tuple[str, _Exchange] | None = None
        """Cache for `_sort`: what precedes the number at the end of the last key awaited alone, and its exchange."""
        self.roots: dict[str, _Exchange] = defaultdict(_Exchange)
        """Exchanges of NCCL's IDs, keyed by list of IDs."""
        self._numbers_left = _MOST_NUMBERS
        self._names: dict[str, str] | None = None
        """Names of hosts, keyed by address; made when needed."""

    def run(self, awaited: list[Awaited]) -> Missing:
        for one in awaited:
            if one.wait.kind == "barrier":
                self.waiting[one.keys[0]] += one.sessions
            elif one.wait.kind != "item":
                self._sort(one)
        waits = [self._join(), *map(self._barrier, self.waiting)]
        waits += [self._roots(name, exchange) for name, exchange in self.roots.items()]
        waits += [self._exchange(family, exchange) for family, exchange in self.exchanges.items()]
        found = [one for one in waits if one is not None]
        found.sort(key=lambda one: (one.kind != "join", -one.waiting))
        waiting = len([session for session in self.facts.sessions if session.wait is not None])
        claimed = [
            Claimed(number, sorted(str(rank) for rank in ranks)) for number, ranks in sorted(self.ranks.claimed.items())
        ]
        return Missing(self.ranks.world_size, self.joined_count, found, waiting, claimed)

    def _sort(self, one: Awaited) -> None:
        """Note which barriers and exchanges these sessions wait for."""
        if self._last is not None and len(one.keys) == 1 and not one.all:  # mostly the same family as before
            before, exchange = self._last
            number = number_after(before, one.keys[0])
            if number is not None:
                exchange.awaited.add(number)
                exchange.sessions += one.sessions
                return
        by_family: dict[Family, tuple[set[int], set[int]]] = {}
        lists: set[str] = set()
        for key in one.keys:
            counter = opened_counter(key)
            if counter is not None:
                self.waiting[counter] += one.sessions
                continue
            if (ids := nccl_id(key)) is not None:
                name, number = ids
                roots = self.roots[name]
                roots.awaited.add(number)
                if name not in lists:
                    lists.add(name)
                    roots.listed.update(found[1] for other in one.all if (found := nccl_id(other)) is not None)
                    roots.sessions += one.sessions
            elif (parsed := family_of(key)) is None:
                continue
            elif len(one.keys) == 1 and not one.all:  # the most frequent case: keep it short
                exchange = self.exchanges[parsed[0]]
                exchange.awaited.add(parsed[1])
                exchange.sessions += one.sessions
                if not parsed[0].after:
                    self._last = parsed[0].before, exchange
            else:
                by_family.setdefault(parsed[0], (set(), set()))[0].add(parsed[1])
        for key in one.all:
            parsed = family_of(key)
            if parsed is not None and parsed[0] in by_family:
                by_family[parsed[0]][1].add(parsed[1])
        for family, (missing, listed) in by_family.items():
            exchange = self.exchanges[family]
            exchange.awaited |= missing
            if len(missing | listed) > 1:
                exchange.listed |= missing | listed
            exchange.sessions += one.sessions

    # Joining and barriers

    def _join(self) -> Pending | None:
        size = self.ranks.world_size
        if size is None or self.joined_count >= size:
            return None
        counter = self.facts.counters.get(JOIN_COUNTER)
        joined = self.joined
        if not joined and (counter is None or not counter.known):
            joined = {rank for rank in self.ranks.all if rank.sessions}
        waiting = [session for session in self.facts.sessions if session.wait and JOIN_COUNTER in session.wait.keys]
        since = max([session.idle for session in waiting], default=0.0 if counter is None else counter.age)
        others = self._without(self.ranks.all, joined)
        return self._pending(
            "join", JOIN_COUNTER, self.joined_count, size, joined, others, len(waiting), since, counter
        )

    def _barrier(self, key: str) -> Pending | None:
        counter = self.facts.counters.get(key)
        sessions = self.waiting[key]
        if not sessions and counter is None:
            return None
        came = self.ranks.of([session.id for session in sessions])
        value = len(came)
        waiting = value or len(sessions)
        expected: int | None = None
        if counter is not None:
            came |= self.ranks.of(counter.members)
            value = counter.value
            expected = counter.expected or None
        if expected is None and not is_for_agents(key):
            expected = self.ranks.world_size
        if expected is not None and value >= expected:
            expected = None
        since = max([session.idle for session in sessions], default=0.0)
        joined, known = len(came & self.joined), len(came)
        if counter is not None and counter.known:
            joined, known = counter.joined, counter.known
        everyone = self.joined if 2 * joined > known else self.ranks.all
        others = [] if is_for_agents(key) else self._without(everyone, came)
        return self._pending("barrier", key, value, expected, came, others, waiting, since, counter)

    def _pending(
        self,
        kind: str,
        key: str,
        arrived: int,
        expected: int | None,
        came: set[Rank],
        others: list[Rank],
        waiting: int,
        since: float,
        counter: BarrierCounter | None,
    ) -> Pending:
        """Describe what waits for the arrival of all; `others` are connected and have not arrived."""
        size = self.ranks.world_size
        known = len(came) if counter is None else max(len(came), counter.known)
        beyond = 0
        """Ranks that have arrived and are not listed, above those that are."""
        numbers = {rank.number for rank in came if rank.number is not None}
        numbers.update(number for number, ranks in self.ranks.claimed.items() if not came.isdisjoint(ranks))
        missing: list[int] = []
        count = None if expected is None else expected - arrived
        candidates = len(others) + self.facts.unlisted
        if expected is not None and expected == size and expected <= _MOST_NUMBERS:
            end = expected
            if counter is not None and counter.ranks:
                for first, last in counter.ranks:
                    numbers.update(range(max(0, first), min(last + 1, expected)))
                beyond = max(0, counter.told - len(numbers))
                end = min(expected, last + 1) if beyond else expected
            rest = [number for number in range(end) if number not in numbers]
            missing = rest if len(rest) + (expected - end - beyond) == expected - arrived else []
        if missing:
            others, candidates = self._identify(missing, [rank for rank in others if rank.number is None])
        elif (known < arrived or self.facts.unlisted) and candidates != count:
            others = []  # some of them have arrived, but it is unknown which
        elsewhere = self._elsewhere(others)
        unseen, unidentified = _absent(count or 0, len(elsewhere), candidates)
        fewer_on = self._fewer_on(came)
        left = self._left(missing)
        return Pending(
            *(kind, key, arrived, expected, missing, elsewhere, unseen, waiting, since, fewer_on, unidentified, left),
            bool(missing),
        )

    def _without(self, everyone: Iterable[Rank], came: set[Rank]) -> list[Rank]:
        """Return the connected processes that may be ranks and have not arrived."""
        return [rank for rank in set(everyone) - came if rank.sessions and self._may_be_rank(rank)]

    def _may_be_rank(self, rank: Rank) -> bool:
        """Return whether a connected process may be a rank: it has sent more than VALIDATE."""
        return any(session.id and session.command != "VALIDATE" for session in rank.sessions)

    # Keys

    def _roots(self, name: str, exchange: _Exchange) -> Pending:
        """Describe the IDs that the roots of a communicator publish."""
        size = self.ranks.world_size
        roots = max(exchange.listed | exchange.awaited) + 1
        missing = sorted(exchange.awaited)
        if size is not None and roots <= size:
            missing = [root_rank(number, size, roots) for number in missing]
        key = name if roots == 1 else f"{name}*" if name.endswith(":") else f"{name}_*"
        return self._by_roots(key, roots, missing, exchange)

    def _by_roots(self, key: str, roots: int, missing: list[int], exchange: _Exchange) -> Pending:
        """Describe keys that a few ranks write for all others."""
        waiters = self._waiters(exchange)
        listed, candidates = self._identify(missing, self._nameless(waiters))
        if self.ranks.world_size != len([rank for rank in self.ranks.all if rank.sessions]):
            listed = [rank for rank in listed if rank.number is not None]  # the root may not be connected
        unseen, unidentified = _absent(len(missing), len(listed), candidates)
        return Pending(
            "keys",
            key,
            max(0, roots - len(missing)),
            roots,
            missing,
            self._elsewhere(listed),
            unseen,
            len(waiters),
            self._since(exchange),
            unidentified=unidentified,
        )

    def _exchange(self, family: Family, exchange: _Exchange) -> Pending | None:
        """Describe keys that each rank writes for the others, or one rank for all; None if it is unclear."""
        known = self.ranks.families.get(family) or Members(0)
        if known.several_each:
            return None
        waiters = self._waiters(exchange)
        writers = self.ranks.of(known.writers.values())
        waiting, since = len(waiters), self._since(exchange)
        write_too = not waiters.isdisjoint(writers)
        by_each = write_too or (known.one_each and len(writers) > 1)
        if not by_each and not exchange.listed:
            if not is_nccl_counter(family.key(0)):
                return None  # it may not be the key of a rank
            return self._by_roots(family.key(min(exchange.awaited)), 1, [0], exchange)
        involved = waiters | writers
        expected = self._expected(family, known, exchange, involved)
        missing = sorted(exchange.awaited)
        if expected <= self._numbers_left:
            self._numbers_left -= expected
            missing = [number for number in range(expected) if number not in known.writers]
        if exchange.listed and not write_too:  # a rank that gathers values does not write one
            missing = sorted(exchange.awaited)
        if not missing:
            return None
        of_job = expected == self.ranks.world_size or self._are_ranks(known)
        found, candidates = self._who(missing, of_job, involved)
        unseen, unidentified = _absent(len(missing), len(found), candidates)
        return Pending(
            "keys",
            str(family),
            len(known.writers),
            len(known.writers) + len(missing),
            missing,
            self._elsewhere(found),
            unseen,
            waiting,
            since,
            self._fewer_on(writers),
            unidentified,
            self._left(missing) if of_job else [],
            of_job,
        )

    def _expected(self, family: Family, known: Members, exchange: _Exchange, involved: set[Rank]) -> int:
        """Return the expected number of keys."""
        size = self.ranks.world_size
        least = max([*known.writers, *exchange.awaited, *exchange.listed]) + 1
        told = gloo_size(family, known.value_bytes)
        if told >= least:
            return told
        if size is not None and size >= least and 2 * len(involved) >= size and not exchange.listed:
            return size
        return least

    def _are_ranks(self, members: Members) -> bool:
        """Return whether the numbers in keys are those that their writers say they have as ranks of the job."""
        writers = [(number, self.ranks.by_session.get(writer)) for number, writer in members.writers.items()]
        told = [
            (number, rank.number) for number, rank in writers if rank is not None and rank.source not in ("", "keys")
        ]
        return bool(told) and all(number == rank for number, rank in told)

    def _who(self, missing: list[int], of_job: bool, involved: set[Rank]) -> tuple[list[Rank], int]:
        """Return the connected ones of the missing ranks, and how many there may be."""
        if self.ranks.world_size is not None and not of_job:  # numbers in a group, whose members are unknown
            return [], len(self._without(self.joined or self.ranks.all, involved))
        return self._identify(missing, self._nameless(involved))

    def _identify(self, missing: list[int], nameless: list[Rank]) -> tuple[list[Rank], int]:
        """Return the connected ones of the missing ranks, and how many may be connected.

        `nameless` ranks have no number; they are the missing ones if there are not too many of them.
        """
        named = [rank for number in missing if (rank := self._connected(number)) is not None]
        candidates = len(named) + len(nameless)
        return named + (nameless if candidates <= len(missing) else []), candidates

    def _nameless(self, involved: set[Rank]) -> list[Rank]:
        """Return the connected ranks that have no number and are not involved."""
        return [rank for rank in self._without(self.joined or self.ranks.all, involved) if rank.number is None]

    def _connected(self, number: int) -> Rank | None:
        rank = self.ranks.by_number.get(number)
        return rank if rank is not None and rank.sessions else None

    # Common parts

    def _waiters(self, exchange: _Exchange) -> set[Rank]:
        return self.ranks.of(map(_id_of, exchange.sessions))

    def _since(self, exchange: _Exchange) -> float:
        """Return the seconds of the longest wait."""
        return max(map(_idle_of, exchange.sessions), default=0.0)

    def _elsewhere(self, ranks: Iterable[Rank]) -> list[Elsewhere]:
        found = []
        for rank in ranks:
            session = rank.main_session()
            since = 0.0 if session is None else session.idle
            port = rank.departed[0].port if session is None else session.port
            found.append(
                Elsewhere(rank.number, rank.host, port, rank.pid, describe_activity(session, self.facts.groups), since)
            )
        found.sort(key=lambda one: (one.rank is None, one.rank or 0, one.host, one.port))
        return found

    def _left(self, missing: list[int]) -> list[Elsewhere]:
        by_number = self.ranks.by_number
        return self._elsewhere(
            [rank for one in missing if (rank := by_number.get(one)) is not None and not rank.sessions]
        )

    def _fewer_on(self, came: set[Rank]) -> list[Hosted]:
        """Return the hosts from which fewer ranks have arrived than from most."""
        counts = Counter(map(_host_of, came))
        for rank in self.joined - came:
            counts.setdefault(rank.host, 0)
        if len(counts) < 2:
            return []
        hosts: Counter[str] = Counter()
        for host, count in counts.items():
            hosts[self._name_of(host)] += count
        usual = max(Counter(hosts.values()).items(), key=lambda one: (one[1], one[0]))[0]
        return sorted((Hosted(host, count, usual) for host, count in hosts.items() if count < usual), key=_host)

    def _name_of(self, host: str) -> str:
        """Return the name of the host with this address, if its ranks have sent one."""
        if self._names is None:
            names: dict[str, set[str]] = defaultdict(set)
            for rank in self.ranks.described:
                for one in rank.sessions[:1] or rank.departed[:1]:
                    names[one.host].add(rank.host)
            self._names = {address: found.pop() for address, found in names.items() if len(found) == 1}
        return self._names.get(host, host)


def _absent(count: int, listed: int, candidates: int) -> tuple[int, int]:
    """Return how many of `count` missing ranks are not connected, and for how many this is unknown.

    `listed` have been found; `candidates`, these included, are connected and may be among the missing.
    """
    unidentified = max(0, min(count, candidates) - listed)
    return max(0, count - listed - unidentified), unidentified


def _host(hosted: Hosted) -> tuple[int, str]:
    return hosted.arrived, hosted.host
