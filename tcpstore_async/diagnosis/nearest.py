"""Which keys are awaited, by whom, and which existing keys are most similar.

Must not know what keys mean, nor how similarity is measured (`observe/similar_keys.py`).
"""

from typing import Final

import msgspec

from ..base.addresses import format_address
from ..observe.similar_keys import Nearest, neighbours
from .facts import Facts, Key
from .missing import Awaited
from .stock_ranks import Ranks

_OF_A_LIST: Final = 8
"""Keys of an awaited list that are described."""

_COMPARISONS: Final = 400_000
"""Most keys compared, in all: 3 µs each in plain Python. Beyond, only other numbers are tried."""

_QUICKLY: Final = 100_000
"""The same if the search must be quick."""


class Near(msgspec.Struct):
    """An existing key that is similar to an awaited one."""

    key: str
    age: float | None
    """Seconds since it was last written, if known."""
    by: str | None
    """Who wrote it."""


class Waiting(msgspec.Struct):
    """An awaited key."""

    key: str
    ranks: list[int]
    """The known ranks that wait for it."""
    since: float
    """Seconds of the longest wait."""
    waiting: int
    """Number of sessions that wait for it."""
    connections: list[str]
    """The first waiting connections of unknown rank."""
    nearest: list[Near]
    more: int = 0
    """Number of other missing keys that the same sessions wait for."""


_CONNECTIONS: Final = 16
"""Most connections listed for a key."""


def find_waiting(facts: Facts, ranks: Ranks, waits: list[Awaited], most: int | None = None) -> list[Waiting]:
    """Return the awaited keys, longest wait first; `waits` is the result of `awaited`.

    With `most`, search the nearest keys only for the first ones, and less thoroughly.
    """
    found: dict[str, Waiting] = {}
    for one in waits:
        numbered: list[int] = []
        nameless: list[str] = []
        for session in one.sessions:
            rank = ranks.by_session.get(session.id)
            if rank is not None and rank.number is not None:
                numbered.append(rank.number)
            elif len(nameless) < _CONNECTIONS:
                nameless.append(str(rank) if rank is not None else format_address(session.host, session.port))
        since = max([session.idle for session in one.sessions])
        for key in one.keys[:_OF_A_LIST]:
            waiting = found.get(key)
            if waiting is None:
                waiting = found[key] = Waiting(key, [], 0.0, 0, [], [])
            waiting.ranks += numbered
            waiting.connections = (waiting.connections + nameless)[:_CONNECTIONS]
            waiting.since = max(waiting.since, since)
            waiting.waiting += len(one.sessions)
            waiting.more = max(waiting.more, len(one.keys) - _OF_A_LIST)
    listed = sorted(found.values(), key=lambda waiting: (-waiting.since, waiting.key))
    wanted = [waiting.key for waiting in listed[:most]]
    nearest = find_similar(facts.keys, ranks, wanted, _COMPARISONS if most is None else _QUICKLY)
    for waiting in listed:
        waiting.ranks = sorted(set(waiting.ranks))
        waiting.nearest = nearest.get(waiting.key, [])
    return listed


def find_similar(
    keys: list[Key], ranks: Ranks, wanted: list[str], comparisons: int = _COMPARISONS
) -> dict[str, list[Near]]:
    """Return the most similar existing keys of each wanted key, nearest first. The first get more effort."""
    known = {key.key: key for key in keys}
    existing = [(key.key.encode(), key.age or 0.0) for key in keys] if wanted else []
    found: dict[str, list[Near]] = {}
    for name in wanted:
        nearest = Nearest(name.encode())
        for near in neighbours(name, known.__contains__):
            nearest.add(near.encode(), known[near].age or 0.0)
        if comparisons >= len(existing):
            comparisons -= len(existing)
            for encoded, age in existing:
                nearest.add(encoded, age)
        found[name] = []
        for key in [known[near.decode()] for near in nearest.found()]:
            writer = ranks.by_session.get(key.by or 0)
            found[name].append(Near(key.key, key.age, None if writer is None else str(writer)))
    return found
