"""The data that the page shows of a server: the state of each rank, missing ranks, waits.

Knows facts and conclusions. Must not know HTTP, nor where the facts come from.
Invariant: the encoded data is bounded, however many ranks, keys and waits there are, and however long a key is; omitted
items are counted. Text of peers stays text: the page must not take it for markup.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from typing import Any, Final, NamedTuple

import msgspec

from ...base.keys import caller_key
from ...diagnosis.facts import Facts
from ...diagnosis.missing import Missing, Pending, awaited, describe_activity, find_missing
from ...diagnosis.nearest import Waiting, find_waiting
from ...diagnosis.stock_ranks import Ranks, number_ranges

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
"""Descriptions of a rank's states. A missing rank is in a missing state, whatever else it does."""

MOST_RANKS: Final = 262_144
"""Most ranks shown: twice the sessions that a server has by default."""

_PENDING: Final = 24
"""Most pending joins, barriers and exchanges shown."""
_WAITING: Final = 48
"""Most awaited keys shown."""
_NAMED: Final = 32
"""Most ranks or hosts listed for one of them."""
_TEXT: Final = 300
"""Most characters of a text."""


class Detail(NamedTuple):
    """A rank that is or was connected."""

    host: str
    port: int
    pid: int | None
    does: str
    since: float
    """Seconds since its last request."""
    source: str
    """Where its number is from."""


class Summary:
    """The result of one look at a server."""

    def __init__(self, facts: Facts, ranks: Ranks) -> None:
        if ranks.world_size is not None and ranks.world_size > MOST_RANKS:
            ranks.world_size = None  # invented by a peer
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
        """The data as JSON."""

    def detail(self, number: int) -> Detail | None:
        """Return details of the rank with this number."""
        rank = self._by_number.get(number) if number < self.size else None
        if rank is None:
            return None
        session = rank.main_session()
        port, idle = (0, 0.0) if session is None else (session.port, session.idle)
        return Detail(
            clip(rank.host), port, rank.pid, clip(describe_activity(session, self._groups)), idle, rank.source
        )


def _size(ranks: Ranks) -> int:
    """Return the number of ranks that are shown by number."""
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
        if one.of_job:
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
    """Return a text, shortened if it is long."""
    return text if len(text) <= _TEXT else text[:_TEXT] + "…"


def _runs(states: Iterable[str]) -> str:
    """Return run-length encoded states: `j120w3`."""
    return "".join(f"{state}{sum(1 for _ in run)}" for state, run in groupby(states))
