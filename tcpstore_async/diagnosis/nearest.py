"""Which keys are awaited, by whom, and which existing keys are most similar.

Must not know what keys mean, nor how similarity is measured (`observe/similar_keys.py`).
"""

from typing import Final

import msgspec

from ..base.addresses import format_address
from ..observe.similar_keys import COMPARISONS, Search
from .facts import Facts, Key
from .missing import Awaited
from .stock_ranks import Ranks

_OF_A_LIST: Final = 8
"""Keys of an awaited list that are described."""

_QUICKLY: Final = 200_000
"""Existing keys compared by their numbers if the search must be quick."""


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
    nearest = nearest_keys(facts.keys, wanted, COMPARISONS if most is None else _QUICKLY)
    for waiting in listed:
        waiting.ranks = sorted(set(waiting.ranks))
    for waiting in listed[:most]:
        for near in nearest[waiting.key]:
            writer = ranks.by_session.get(near.by or 0)
            waiting.nearest.append(Near(near.key, near.age, None if writer is None else str(writer)))
    return listed


def nearest_keys(keys: list[Key], wanted: list[str], numbered: int = COMPARISONS) -> dict[str, list[Key]]:
    """Return the most similar existing keys of each wanted key, nearest first. The first get more effort.

    At most `numbered` keys are compared by their numbers.
    """
    known = {key.key: key for key in keys}
    search = Search(wanted, known.__contains__, lambda name: known[name].age or 0.0, numbered=numbered)
    search.add(known)
    while not search.compare():
        pass
    return {name: [known[near] for near in search.nearest(name)] for name in wanted}
