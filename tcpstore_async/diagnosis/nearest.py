"""Who waits for which key, and which existing keys are most like it.

Must not know what keys mean, nor how likeness is measured (`observe/similar_keys.py`).
"""

from typing import Final

import msgspec

from ..base.addresses import format_address
from ..observe.similar_keys import COMPARISONS, Search
from .facts import Facts, Key
from .missing import Awaited
from .ranks import Ranks

_OF_A_LIST: Final = 8
"""Keys that are described of a list that is awaited."""

_QUICKLY: Final = 200_000
"""Existing keys that are compared by their numbers when there is little time."""


class Near(msgspec.Struct):
    """A key that exists, and is like one that is awaited."""

    key: str
    age: float | None
    """Seconds since it was last written, if that is known."""
    by: str | None
    """Who wrote it."""


class Waiting(msgspec.Struct):
    """A key that is awaited."""

    key: str
    ranks: list[int]
    """Numbers of the ranks that wait for it, as far as they are known."""
    since: float
    """For how many seconds, the longest of them."""
    waiting: int
    """How many sessions wait for it."""
    connections: list[str]
    """The first ones of which no rank is known."""
    nearest: list[Near]
    more: int = 0
    """Further missing keys for which the same sessions wait."""


_CONNECTIONS: Final = 16


def find_waiting(facts: Facts, ranks: Ranks, waits: list[Awaited], most: int | None = None) -> list[Waiting]:
    """Return what is waited for, that which has been waited for longest first; `waits` are all that is `awaited`.

    With `most`, the nearest keys are looked for only for so many, the first ones, and less thoroughly.
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
    """Return for each wanted key the existing ones most like it, the nearest first. The first get more care.

    `numbered` is how many keys are compared by their numbers.
    """
    known = {key.key: key for key in keys}
    search = Search(wanted, known.__contains__, lambda name: known[name].age or 0.0, numbered=numbered)
    search.add(known)
    while not search.compare():
        pass
    return {name: [known[near] for near in search.nearest(name)] for name in wanted}
