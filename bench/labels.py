"""Where labels stand so that none covers another.

Knows places, boxes and lines in one plane. Must not know figures.
Invariant: labels that are spread out keep the order of what they belong to, and overlap only where they cannot all fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Point = tuple[float, float]

_WAYS = 80
"""Places tried above and below, a quarter of a label apart."""


class Box(NamedTuple):
    """What a label covers."""

    left: float
    low: float
    right: float
    high: float

    def raised(self, by: float) -> Box:
        return self._replace(low=self.low + by, high=self.high + by)

    def padded(self, width: float, height: float) -> Box:
        """So much larger on every side."""
        return Box(self.left - width, self.low - height, self.right + width, self.high + height)

    def covers(self, other: Box) -> bool:
        return self.left < other.right and other.left < self.right and self.low < other.high and other.low < self.high

    def crossed_by(self, one: Point, other: Point) -> bool:
        """Whether the line from one point to the other goes through."""
        (x, y), (to_x, to_y) = sorted((one, other))
        if to_x <= self.left or self.right <= x:
            return False
        ends = [y, to_y]
        if to_x > x:
            ends = [y + (to_y - y) * (at - x) / (to_x - x) for at in (max(x, self.left), min(to_x, self.right))]
        return min(ends) < self.high and self.low < max(ends)


def beside(wanted: Box, lines: Sequence[tuple[Point, Point]], others: Sequence[Box], low: float, high: float) -> Box:
    """As near to where it is wanted as it may stand, above or below, without covering a line or one of the others.

    Where it would cover something everywhere between low and high, it stays.
    """
    step = (wanted.high - wanted.low) / 4
    ways = sorted((way * step for way in range(-_WAYS, _WAYS + 1)), key=abs)
    for box in (wanted.raised(by) for by in ways):
        inside = low <= box.low and box.high <= high
        if inside and not any(map(box.covers, others)) and not any(box.crossed_by(*line) for line in lines):
            return box
    return wanted


def spread_out(wanted: Sequence[float], heights: Sequence[float], low: float, high: float) -> list[float]:
    """The centre of each label, as near to the one wanted as its neighbours allow, within low to high."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    placed = [0.0] * len(wanted)
    floor = low
    for index in order:
        placed[index] = max(wanted[index], floor + heights[index] / 2)
        floor = placed[index] + heights[index] / 2
    # What went over the top is pushed back down, and those below it in turn.
    ceiling = high
    for index in reversed(order):
        placed[index] = min(placed[index], ceiling - heights[index] / 2)
        ceiling = placed[index] - heights[index] / 2
    return placed
