"""What the page shows of a server's facts: a state for each rank, who is missing, who waits for what.

Knows facts and what follows from them. Must not know HTTP, nor where the facts come from.
Invariant: what is encoded is bounded, however many ranks, keys and waits there are, and however long a key is; what
was left out is counted. Texts of peers stay texts: whoever shows them must not take them for markup.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from typing import Any, Final, NamedTuple

import msgspec

from ...base.keys import caller_key
from ...diagnosis.facts import Facts
from ...diagnosis.missing import Missing, Pending, awaited, does, find_missing
from ...diagnosis.nearest import Waiting, find_waiting
from ...diagnosis.ranks import Ranks, number_ranges

JOINED: Final = "j"
WAITING: Final = "w"
LATE: Final = "l"
MISSING: Final = "m"
GONE: Final = "g"
UNSEEN: Final = "n"
STATES: Final = {
    JOINED: "connected",
    WAITING: "waiting",
    LATE: "missing, connected",
    MISSING: "missing, not connected",
    GONE: "has left",
    UNSEEN: "not seen",
}
"""Of a rank. One that is missing is called that, whatever else it is."""

MOST_RANKS: Final = 262_144
"""Ranks that are shown: twice as many sessions as a server has by default."""

_PENDING: Final = 24
_WAITING: Final = 48
_NAMED: Final = 32
"""Ranks, hosts or connections that are named of more."""
_TEXT: Final = 300
"""Characters of a text that are shown."""


class Detail(NamedTuple):
    """A rank that is connected, or has been."""

    host: str
    port: int
    pid: int | None
    does: str
    since: float
    """For how many seconds."""
    source: str
    """How its number is known."""


class Summary:
    """What one look at a server has shown."""

    def __init__(self, facts: Facts, ranks: Ranks) -> None:
        if ranks.world_size is not None and ranks.world_size > MOST_RANKS:
            ranks.world_size = None  # some peer has said so
        waits = awaited(facts)
        missing = find_missing(facts, ranks, waits)
        waiting = find_waiting(facts, ranks, waits, _WAITING)
        self.size = _size(ranks)
        self._by_number = ranks.by_number
        self._groups = facts.groups
        states = _states(ranks, missing, self.size)
        unnamed = [rank for rank in ranks.all if rank.number is None and rank.sessions]
        counts = Counter(states)
        self.encoded = msgspec.json.encode(
            {
                "world_size": missing.world_size,
                "joined": missing.joined,
                "ranks": _runs(states),
                "counts": {state: counts[state] for state in STATES},
                "unnamed": _runs(sorted(WAITING if rank.waits() else JOINED for rank in unnamed[:MOST_RANKS])),
                "pending": [_pending(one) for one in missing.waits[:_PENDING]],
                "more_pending": max(0, len(missing.waits) - _PENDING),
                "waits": [_waiting(one) for one in waiting[:_WAITING]],
                "more_waits": max(0, len(waiting) - _WAITING),
                "sessions": len(facts.sessions),
                "keys": len(facts.keys),
            }
        )
        """As JSON."""

    def detail(self, number: int) -> Detail | None:
        """Return what is known of the rank with a number."""
        rank = self._by_number.get(number) if number < self.size else None
        if rank is None:
            return None
        session = rank.main_session()
        port, idle = (0, 0.0) if session is None else (session.port, session.idle)
        return Detail(clip(rank.host), port, rank.pid, clip(does(session, self._groups)), idle, rank.source)


def _size(ranks: Ranks) -> int:
    """Return how many ranks are shown by number."""
    if ranks.world_size is not None:
        return ranks.world_size
    return min(MOST_RANKS, max(ranks.by_number, default=-1) + 1)


def _states(ranks: Ranks, missing: Missing, size: int) -> list[str]:
    states = [UNSEEN] * size
    for number, rank in ranks.by_number.items():
        if number < size:
            states[number] = GONE if not rank.sessions else WAITING if rank.waits() else JOINED
    for one in missing.waits:
        named = [rank.rank for rank in one.elsewhere if rank.rank is not None]
        if one.expected is not None and one.expected == missing.world_size:  # else they are numbers in a group
            named += one.missing_ranks
        for number in named:
            if number < size:
                states[number] = LATE if states[number] in (JOINED, WAITING, LATE) else MISSING
    return states


def _pending(one: Pending) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "key": clip(caller_key(one.key)),
        "arrived": one.arrived,
        "expected": one.expected,
        "missing": number_ranges(one.missing_ranks, "–"),
        "elsewhere": [
            {
                "rank": rank.rank,
                "host": clip(rank.host),
                "port": rank.port,
                "pid": rank.pid,
                "does": clip(rank.does),
                "since": round(rank.since, 1),
            }
            for rank in one.elsewhere[:_NAMED]
        ],
        "more_elsewhere": max(0, len(one.elsewhere) - _NAMED),
        "unseen": one.unseen,
        "unidentified": one.unidentified,
        "waiting": one.waiting,
        "since": round(one.since, 1),
        "fewer_on": [[clip(host.host), host.arrived, host.usual] for host in one.fewer_on[:_NAMED]],
    }


def _waiting(one: Waiting) -> dict[str, Any]:
    return {
        "key": clip(caller_key(one.key)),
        "ranks": number_ranges(one.ranks, "–"),
        "connections": [clip(text) for text in one.connections[:4]],
        "waiting": one.waiting,
        "since": round(one.since, 1),
        "more": max(0, one.more),
        "nearest": [
            {
                "key": clip(caller_key(near.key)),
                "age": None if near.age is None else round(near.age, 1),
                "by": None if near.by is None else clip(near.by),
            }
            for near in one.nearest
        ],
    }


def clip(text: str) -> str:
    """Return a text, or its beginning."""
    return text if len(text) <= _TEXT else text[:_TEXT] + "…"


def _runs(states: Iterable[str]) -> str:
    """Return states as text, run-length encoded: `j120w3`."""
    return "".join(f"{state}{sum(1 for _ in run)}" for state, run in groupby(states))
