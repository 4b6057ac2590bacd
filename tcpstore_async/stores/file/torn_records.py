"""Find the torn records of a damaged file among the complete ones.

Invariant: removing the torn spans leaves only complete records. Time and memory are linear in the number of bytes, and
in the number of places that look like the beginning of a record. This module knows the layout of records, not their
meaning.

A killed writer may leave the beginning of a record. PyTorch's stores append behind it without checking, so a torn
record swallows part of what follows and may even look complete: only the bytes behind it tell. The search therefore
runs backwards and minimizes the number of bytes to discard. At each place where a record may begin there is either a
complete record, whose end determines the rest, or a torn one, which ends at a place where another may begin, before its
own announced end. Bytes that cannot be the beginning of a record cost more than any number of others.
"""

import re
from bisect import bisect_left
from typing import Final

from .records import KEY, LENGTH

_BEGINNING: Final = re.compile(rb"\0\0(?:[-+<]?/|refcount/|cleanup/)")
"""The upper half of a key length below 65,536, and the key's start. A longer key is not recognized as a beginning."""

_KEY_STARTS: Final = (b"/", b"-/", b"+/", b"</", b"refcount/", b"cleanup/")

_NONSENSE_COST: Final = 1 << 96
"""Added to the cost of bytes that are not the beginning of a record."""


def torn_spans(data: bytes) -> list[tuple[int, int]]:
    """Return (start, end) of each torn record, in order. A complete record whose key no store writes counts as torn."""
    beginnings = {found.start() - 2 for found in _BEGINNING.finditer(data, 2)}
    ends = _ends(data, beginnings)
    costs = {len(data): 0}
    torn_until: dict[int, int] = {}
    candidates = _Candidates(len(data))
    for place in sorted(ends, reverse=True):
        cost, until = candidates.best_before(_torn_limit(data, place))
        if until < 0:
            cost, until = candidates.best_before(len(data) + 1)
            cost += _NONSENSE_COST
        costs[place] = cost - place
        torn_until[place] = until
        end = ends[place]
        if end is not None:
            # A write is never cut within its first length field: such a remainder was rather swallowed by this record.
            suspect = end - place - 1 if 0 < torn_until.get(end, end) - end < LENGTH.size else 0
            if costs[end] + suspect < costs[place]:
                costs[place] = costs[end] + suspect
                del torn_until[place]
        if place in beginnings:
            candidates.add(place, costs[place])
    return _collect(len(data), ends, torn_until)


def _collect(length: int, ends: dict[int, int | None], torn_until: dict[int, int]) -> list[tuple[int, int]]:
    spans = []
    place: int | None = 0
    while place is not None and place < length:
        if place in torn_until:
            spans.append((place, torn_until[place]))
        place = torn_until.get(place, ends[place])
    return spans


def _ends(data: bytes, beginnings: set[int]) -> dict[int, int | None]:
    """Map each reachable place to the end of the complete record there; to None if there is no complete record."""
    ends: dict[int, int | None] = {}
    for beginning in (0, *beginnings):
        place: int | None = beginning
        while place is not None and place < len(data) and place not in ends:
            end = ends[place] = _end_of(data, place)
            place = end
    return ends


def _end_of(data: bytes, at: int) -> int | None:
    """Return the end of the complete record at this place, if there is one whose key a store writes."""
    end = _announced_end(data, at)
    if end > len(data):
        return None
    key_at = at + LENGTH.size
    key_end = key_at + int(LENGTH.unpack_from(data, at)[0])
    return end if KEY.match(data, key_at, key_end) else None


def _announced_end(data: bytes, at: int) -> int:
    """Return where the record at this place ends by its lengths; a place beyond the data if they are incomplete."""
    beyond = len(data) + 1
    key_at = at + LENGTH.size
    if key_at > len(data):
        return beyond
    key_end = key_at + int(LENGTH.unpack_from(data, at)[0])
    if key_end + LENGTH.size > len(data):
        return beyond
    return min(beyond, key_end + LENGTH.size + int(LENGTH.unpack_from(data, key_end)[0]))


def _torn_limit(data: bytes, at: int) -> int:
    """Return the place before which a torn record that begins here must end."""
    key_at = at + LENGTH.size
    if data[at + 2 : key_at] != b"\0\0":
        return key_at  # not even its first length is complete
    if data.startswith(_KEY_STARTS, key_at):
        return _announced_end(data, at)
    key = data[key_at : key_at + max(map(len, _KEY_STARTS))]
    count = 0
    while any(start.startswith(key[: count + 1]) for start in _KEY_STARTS) and count < len(key):
        count += 1
    return key_at + count + 1


class _Candidates:
    """Places where the scan may continue after a torn record, nearest last.

    The best one before a limit has the lowest sum of its cost and its offset; among equals it is the nearest.
    """

    def __init__(self, length: int) -> None:
        self._negated_places = [-length]
        self._sums = [length]
        """From the farthest to the nearest place; strictly increasing."""

    def add(self, place: int, cost: int) -> None:
        """Add a place that is nearer than all others."""
        while self._sums and self._sums[-1] >= place + cost:
            self._negated_places.pop()
            self._sums.pop()
        self._negated_places.append(-place)
        self._sums.append(place + cost)

    def best_before(self, limit: int) -> tuple[int, int]:
        """Return the sum and the place of the best candidate before `limit`; a place of -1 if there is none."""
        index = bisect_left(self._negated_places, 1 - limit)
        return (self._sums[index], -self._negated_places[index]) if index < len(self._negated_places) else (0, -1)
