"""Where labels stand so that none covers another.

Knows heights and places in one dimension. Must not know figures.
Invariant: labels keep the order of what they belong to, and overlap only where they cannot all fit.
"""

from __future__ import annotations

from collections.abc import Sequence


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
