"""What a run is to measure, and how long the next point of a line will take.

Knows scenarios and seconds. Must not know servers, processes or files.
Invariant: a projection is made of what was measured, and of nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from bench.records import Transport
from bench.scenarios import Scenario

FIXED = 0.5
"""Seconds of a sample, about, that are for starting the load, whatever the size."""


class Plan(NamedTuple):
    """What a run is to measure; `seconds` is how long all of it may take."""

    scenarios: Sequence[Scenario]
    servers: Sequence[str]
    """Empty: all that a scenario, or a quick run of it, has."""
    sizes: Sequence[int]
    """Empty: each scenario's own."""
    rounds: int
    quick: bool
    seconds: float
    open_files: int


class Line:
    """One server in one scenario by one transport, until it ends."""

    def __init__(self, server: str, transport: Transport, constant: bool = False) -> None:
        self.server = server
        self.transport = transport
        self.constant = constant
        """Whether its work is the same at every size."""
        self.ended = False
        self.start = 0.0
        """Seconds of a sample in which the server starts, which no size changes: the least there was."""
        self.took: list[tuple[int, float]] = []
        """Size and seconds of all else of a sample, preparation and all: the least of the rounds."""

    def add(self, size: int, start: float, rest: float) -> None:
        """Keep what a sample took."""
        self.start = min(self.start, start) if self.took else start
        if self.took and self.took[-1][0] == size:
            rest = min(rest, self.took.pop()[1])
        self.took.append((size, rest))

    def projected(self, size: int) -> float:
        """Seconds that a sample at this size will take, from those before; 0 if there was none."""
        return self.start + self._rest(size) if self.took else 0.0

    def _rest(self, size: int) -> float:
        """From two on a straight line, or a power law if that is steeper; from one in proportion, but for `FIXED`."""
        before, seconds = self.took[-1]
        if self.constant:
            return seconds
        earlier, less = self.took[-2] if len(self.took) > 1 else (0, min(FIXED, 0.8 * seconds))
        rising = max(0.0, (seconds - less) / (before - earlier)) * (size - before)
        power = math.log(seconds / less) / math.log(before / earlier) if earlier else 1.0
        if power <= 1:
            return seconds + rising
        return float(seconds * (size / before) ** min(3.0, power))
