"""Which bytes of a damaged file are torn records, with whole ones between and behind them.

Knows: how records look. Must not know: files, what a record means.
Invariant: what is left when the torn spans are taken out is nothing but whole records. Time and memory grow with the
number of bytes and of places that look like the beginning of a record, not with a product of them.

A writer that is killed leaves the beginning of a record. One of PyTorch's writes on behind it without a look, so the
torn record swallows a part of what follows, and may look whole: which bytes are torn can be told by what follows only.
So it is decided from the back, by what costs the least bytes. At every place where a record may begin either a whole
one is there, and its end says the rest; or a torn one is, which ends where another may begin, before its own length is
reached. What cannot even be the beginning of a record costs more than any bytes.
"""

import re
from bisect import bisect_left
from typing import Final

from .records import KEY, LENGTH

_BEGINNING: Final = re.compile(rb"\0\0(?:[-+<]?/|refcount/|cleanup/)")
"""The second half of a length below 65,536 and a key: a longer key is no place to go on at."""

_STARTS: Final = (b"/", b"-/", b"+/", b"</", b"refcount/", b"cleanup/")
"""How keys begin."""

_NONSENSE: Final = 1 << 96
"""What is to be paid, beside their number, for bytes that are not the beginning of a record."""


def torn_spans(data: bytes) -> list[tuple[int, int]]:
    """Where torn records begin and end, in order; a whole record that nobody of us has written counts as torn."""
    beginnings = {found.start() - 2 for found in _BEGINNING.finditer(data, 2)}
    ends = _ends(data, beginnings)
    costs = {len(data): 0}
    torn_until: dict[int, int] = {}
    nearest = _Nearest(len(data))
    for place in sorted(ends, reverse=True):
        cost, until = nearest.before(_limit(data, place))
        if until < 0:
            cost, until = nearest.before(len(data) + 1)
            cost += _NONSENSE
        costs[place] = cost - place
        torn_until[place] = until
        end = ends[place]
        if end is not None:
            # Nobody writes a part of the first length: it is rather what one that was swallowed here has left.
            suspect = end - place - 1 if 0 < torn_until.get(end, end) - end < LENGTH.size else 0
            if costs[end] + suspect < costs[place]:
                costs[place] = costs[end] + suspect
                del torn_until[place]
        if place in beginnings:
            nearest.add(place, costs[place])
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
    """Every place that may be come to, and where the whole record there ends; None if there is none."""
    ends: dict[int, int | None] = {}
    for beginning in (0, *beginnings):
        place: int | None = beginning
        while place is not None and place < len(data) and place not in ends:
            end = ends[place] = _end_of(data, place)
            place = end
    return ends


def _end_of(data: bytes, at: int) -> int | None:
    """Where the whole record at this place ends, if there is one with a key of stores."""
    end = _announced(data, at)
    if end > len(data):
        return None
    key_at = at + LENGTH.size
    key_end = key_at + int(LENGTH.unpack_from(data, at)[0])
    return end if KEY.match(data, key_at, key_end) else None


def _announced(data: bytes, at: int) -> int:
    """Where the record at this place says that it ends; beyond the end of the data if it cannot be read so far."""
    beyond = len(data) + 1
    key_at = at + LENGTH.size
    if key_at > len(data):
        return beyond
    key_end = key_at + int(LENGTH.unpack_from(data, at)[0])
    if key_end + LENGTH.size > len(data):
        return beyond
    return min(beyond, key_end + LENGTH.size + int(LENGTH.unpack_from(data, key_end)[0]))


def _limit(data: bytes, at: int) -> int:
    """Before which place a record ends that begins here and is torn."""
    key_at = at + LENGTH.size
    if data[at + 2 : key_at] != b"\0\0":
        return key_at  # there is not even its first length
    if data.startswith(_STARTS, key_at):
        return _announced(data, at)
    key = data[key_at : key_at + max(map(len, _STARTS))]
    count = 0
    while any(start.startswith(key[: count + 1]) for start in _STARTS) and count < len(key):
        count += 1
    return key_at + count + 1


class _Nearest:
    """Places behind one that moves to the front: of those before a limit, the best to go on at.

    That is the one with the lowest sum of its cost and the bytes before it; of several the nearest.
    """

    def __init__(self, length: int) -> None:
        self._places = [-length]
        self._sums = [length]
        """From the farthest to the nearest; each sum is higher than those before it."""

    def add(self, place: int, cost: int) -> None:
        """One that is nearer than all others."""
        while self._sums and self._sums[-1] >= place + cost:
            self._places.pop()
            self._sums.pop()
        self._places.append(-place)
        self._sums.append(place + cost)

    def before(self, limit: int) -> tuple[int, int]:
        """Its sum, and its place; -1 if there is none."""
        which = bisect_left(self._places, 1 - limit)
        return (self._sums[which], -self._places[which]) if which < len(self._places) else (0, -1)
