"""Which rank a session belongs to, although PyTorch's clients do not send it.

A rank is a process with one or more sessions. Its number is known from its client's introduction, from its environment,
or from the keys that only a rank of that number writes. Must not know what sessions wait for.

Invariant: no two ranks have the same number; where facts contradict each other, none of these ranks is numbered.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Final, cast

import msgspec

from ..base.addresses import format_address
from ..base.coercion import parse_digits
from ..base.errors import counted
from ..observe.similar_keys import Family
from .facts import AnySession, Departed, Facts, Members, Process, Session, group_by_process
from .patterns import JOIN_COUNTER, gloo_size, may_name_ranks, names_ranks

Environment = Mapping[str, str]

_MOST_RANGES: Final = 32
"""Most ranges in a text."""


class Rank(msgspec.Struct, eq=False, gc=False):
    """A process that is a rank, or may be. There may be a hundred thousand: plain classes would take twice as long."""

    host: str
    """Its name if known, else its address."""
    pid: int | None
    peer: dict[str, str]
    """The introduction of its client: all its sessions have the same pid and rank."""
    sessions: Sequence[Session]
    """Its connected sessions."""
    departed: Sequence[Departed] = ()
    """Its departed sessions."""
    number: int | None = None
    source: str = ""
    """Where the number is from: `client`, `environment` or `keys`."""

    def __str__(self) -> str:
        where = self.host if self.pid is None else f"{self.host}, pid {self.pid}"
        if self.pid is None and self.sessions:
            where = format_address(self.host, self.sessions[0].port)
        return where if self.number is None else f"rank {self.number} ({where})"

    def waits(self) -> bool:
        """Return whether any of its sessions waits."""
        for session in self.sessions:  # any() takes twice as long, for each of many ranks
            if session.wait is not None:
                return True
        return False

    def main_session(self) -> Session | None:
        """Return the session that shows what it does: the longest waiting one, else the last used."""
        waiting = [session for session in self.sessions if session.wait is not None]
        if waiting:
            return max(waiting, key=lambda session: session.idle)
        return min(self.sessions, key=lambda session: session.idle, default=None)


class Ranks:
    """The ranks of a job, as far as facts show them."""

    def __init__(self, facts: Facts, environments: Mapping[int, Environment], world_size: int | None) -> None:
        """`environments`, keyed by session id, are those of processes on the server's machine."""
        self.facts = facts
        self.families = facts.families
        self.all: list[Rank] = []
        self.by_session: dict[int, Rank] = {}
        self.by_number: dict[int, Rank] = {}
        self.claimed: dict[int, list[Rank]] = {}
        """Connected ranks that claim the same number, so that none has it, keyed by number."""
        self.described: list[Rank] = []
        """Ranks whose client has introduced itself."""
        self.agents = 0
        """Agents of torchrun that have joined their own server, which expects them, and which ranks join too."""
        self._make()
        self._environments = environments
        self.world_size = self._size(world_size)
        self._number()

    def of(self, ids: Iterable[int]) -> set[Rank]:
        """Return the ranks of sessions, given their ids."""
        found = set(map(self.by_session.get, ids))
        found.discard(None)
        return cast(set[Rank], found)

    # Which sessions are one process

    def _make(self) -> None:
        facts = self.facts
        left: dict[Process, list[Departed]] = {}
        group_by_process(left, facts.departed.values())
        introduced = _introduced(facts.processes, left)
        connected, left = _moved(facts.processes, introduced), _moved(left, introduced)
        several: list[tuple[Sequence[Session], Sequence[Departed]]] = []
        by_session, everyone = self.by_session, self.all
        for process, found in connected.items():
            if len(found) > 1 or (left and process in left):
                several.append((found, left.pop(process, ())))
                continue
            first = found[0]  # common: saves a call
            peer = first.peer
            rank = Rank((peer and peer.get("host")) or first.host, first.pid, peer, found)
            everyone.append(rank)
            if peer:
                self.described.append(rank)
            if first.id:
                by_session[first.id] = rank
        several += [((), departed) for departed in left.values()]
        ids = [[*[one.id for one in sessions], *[one.id for one in departed]] for sessions, departed in several]
        actions = self._unique_actions(set(chain.from_iterable(ids)))
        for (sessions, departed), each in zip(several, ids, strict=True):
            if _overlap([actions.get(one, []) for one in each]):
                for session in sessions:
                    self._add((session,), ())
                for one in departed:
                    self._add((), (one,))
            else:
                self._add(sessions, departed)

    def _unique_actions(self, ids: set[int]) -> dict[int, list[str]]:
        """Return, for some sessions, what a rank does only once: two sessions that did the same are two ranks."""
        actions: dict[int, list[str]] = defaultdict(list)
        if not ids:
            return actions
        for counter in self.facts.counters.values():
            for one in ids.intersection(counter.members):
                actions[one].append(counter.key)
        for family, members in self.families.items():
            if members.one_each:
                for one in ids.intersection(members.writers.values()):
                    actions[one].append(str(family))
        return actions

    def _add(self, sessions: Sequence[Session], departed: Sequence[Departed]) -> None:
        first = sessions[0] if sessions else departed[0]
        peer = first.peer or next((one.peer for one in departed if one.peer), first.peer)
        rank = Rank(peer.get("host") or first.host, first.pid, peer, sessions, departed)
        for session in sessions:
            if session.id:
                self.by_session[session.id] = rank
        for one in departed:
            if one.id:
                self.by_session[one.id] = rank
        self.all.append(rank)
        if rank.peer:
            self.described.append(rank)

    # Which number each has

    def _number(self) -> None:
        claims: dict[int, list[Rank]] = defaultdict(list)
        for rank in self.all if self._environments else self.described:
            number = parse_digits(rank.peer.get("rank"))
            if number is None:
                number = parse_digits(self._environment(rank).get("RANK"))
            if number is not None:
                claims[number].append(rank)
        for number, ranks in claims.items():
            if len(ranks) > 1:  # one that has left may have been replaced
                ranks = [rank for rank in ranks if rank.sessions] or ranks
            if len(ranks) == 1:
                rank = ranks[0]
                rank.number = number
                rank.source = "environment" if parse_digits(rank.peer.get("rank")) is None else "client"
                self.by_number[number] = rank
            elif ranks[0].sessions:
                self.claimed[number] = ranks
        for family, members in sorted(self.families.items(), key=lambda item: _evidence(*item), reverse=True):
            if len(self.by_number) == len(self.all):
                return
            if members.one_each and self._concerns_all(family, members):
                self._name_writers(members)

    def _name_writers(self, members: Members) -> None:
        """Number the writers of the keys of a family, unless that contradicts known numbers."""
        found = zip(members.writers, map(self.by_session.get, members.writers.values()), strict=True)
        known = {number: rank for number, rank in found if rank is not None}
        if len(set(known.values())) != len(known):
            return
        if self.by_number:
            for number, rank in known.items():
                if rank.number not in (None, number) or self.by_number.get(number, rank) is not rank:
                    return
        for number, rank in known.items():
            if rank.number is None:
                rank.source = "keys"
                rank.number = number
        self.by_number.update(known)

    def _concerns_all(self, family: Family, members: Members) -> bool:
        """Return whether the numbers in the keys are ranks of the whole job, not of a group."""
        size = self.world_size
        if not may_name_ranks(family) or (size is not None and max(members.writers) >= size):
            return False
        if names_ranks(family):
            return True
        if size is None and self.facts.partial:
            return False
        total = size or len([rank for rank in self.all if rank.sessions])
        if size_told := gloo_size(family, members.value_bytes):
            return size_told >= total  # else ranks in a smaller group
        return 2 * len(members.writers) > total

    def _environment(self, rank: Rank) -> Environment:
        for session in rank.sessions:
            if session.id in self._environments:
                return self._environments[session.id]
        return {}

    # How many there are

    def _size(self, given: int | None) -> int | None:
        """Return the number of ranks, which is `given` if the caller knows it."""
        expected = self.facts.server.get("joins")
        if isinstance(expected, int) and expected > 0:
            joining = self.facts.counters.get(JOIN_COUNTER)
            if joining is None or joining.value <= expected:
                return given or expected
            said = given or self._said_size()  # more have joined: agents are expected, or ranks have joined again
            if said is None or said <= expected:
                return given or expected
            self.agents = expected
            return said
        if given:
            return given
        for wait in map(attrgetter("wait"), self.facts.sessions):
            if wait is not None and wait.target and wait.keys == [JOIN_COUNTER]:
                return int(wait.target)
        return self._said_size()

    def _said_size(self) -> int | None:
        """Return the size of the world that most ranks have said, or have in their environment."""
        sessions = chain.from_iterable([rank.sessions for rank in self.described])
        size = _most_common(self.facts.worlds or Counter([one.peer.get("world_size") for one in sessions]))
        if size is None and self._environments:
            size = _most_common(Counter([self._environment(rank).get("WORLD_SIZE") for rank in self.all]))
        return size


def _overlap(actions: list[list[str]]) -> bool:
    """Return whether two of these sessions did the same."""
    done = [action for each in actions for action in set(each)]
    return len(set(done)) < len(done)


def _evidence(family: Family, members: Members) -> tuple[bool, bool, int]:
    return names_ranks(family), gloo_size(family, members.value_bytes) > 0, len(members.writers)


def _introduced(*groups: Mapping[Process, Sequence[Session | Departed]]) -> dict[Process, Process]:
    """Return, for processes with sessions of PyTorch's client, those that have introduced themselves and are the same.

    With `install()`, a rank has sessions of both. The pid alone may be that of processes in two containers behind one
    address: then several have introduced themselves, or the two have done what one rank does only once.
    """
    stock = {process for group in groups for process, sessions in group.items() if not sessions[0].peer}
    introduced: dict[Process, set[Process]] = defaultdict(set)
    for group in groups if stock else ():
        for process, sessions in group.items():
            if sessions[0].peer and process[:2] in stock:
                introduced[process[:2]].add(process)
    return {process: next(iter(found)) for process, found in introduced.items() if len(found) == 1}


def _moved(
    group: dict[Process, list[AnySession]], introduced: Mapping[Process, Process]
) -> dict[Process, list[AnySession]]:
    if not any(map(group.__contains__, introduced)):
        return group
    moved: dict[Process, list[AnySession]] = {}
    for process, sessions in sorted(group.items(), key=lambda item: item[0] in introduced):
        moved.setdefault(introduced.get(process, process), []).extend(sessions)
    return moved


def _most_common(texts: "Mapping[str, int] | Counter[str | None]") -> int | None:
    """Return the most frequent number among texts, given with their counts."""
    sizes: Counter[int | None] = Counter()
    for text, count in texts.items():
        sizes[parse_digits(text)] += count
    sizes.pop(None, None)
    return sizes.most_common(1)[0][0] if sizes else None


def number_ranges(numbers: Iterable[int], dash: str = "-") -> str:
    """Return numbers as text: ranges where consecutive, and the number of further ranges."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [str(first) if first == last else f"{first}{dash}{last}" for first, last in ranges[:_MOST_RANGES]]
    more = f" and {counted(len(ranges) - _MOST_RANGES, 'more range')}" if len(ranges) > _MOST_RANGES else ""
    return ", ".join(texts) + more
