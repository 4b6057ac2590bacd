"""What a run is to measure, and how long the next point of a line will take.

Knows scenarios, seconds and the names of servers. Must not know processes or files.
Invariant: a projection is made of what was measured, and of nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from bench.records import Transport
from bench.scenarios import Scenario
from bench.servers import PYTORCH, SERVERS, has_torch

OURS = "uvloop"
"""The only one that is driven without sockets, too, and that goes on where those it is compared with take too long."""
ROUNDS = 5
FEWER = 3
"""Rounds, but for the tutorial's two scenarios."""
QUICK_ROUNDS = 3


class Plan(NamedTuple):
    """What a run is to measure; `seconds` is how long all of it may take."""

    scenarios: Sequence[Scenario]
    servers: Sequence[str]
    """Empty: all that a scenario, or a quick run of it, has."""
    sizes: Sequence[int]
    """Empty: each scenario's own."""
    rounds: int
    """0: what each scenario has."""
    quick: bool
    seconds: float
    open_files: int
    transports: Sequence[Transport] = ()
    """Empty: both, where there are both."""

    def has(self, transport: Transport) -> bool:
        return not self.transports or transport in self.transports

    @property
    def patience(self) -> float:
        """Seconds that a sample may always take."""
        return 20.0 if self.quick else 60.0

    @property
    def measures_torch(self) -> bool:
        """Whether PyTorch's servers are among those that are measured."""
        return has_torch() and self.has("sockets") and any(server in PYTORCH for server in self.servers or SERVERS)

    def sizes_in_memory(self, scenario: Scenario) -> list[int]:
        """Those that our sessions are driven at without sockets."""
        if not self.has("memory") or (self.servers and OURS not in self.servers):
            return []
        if self.sizes and "memory" in self.transports:
            return list(self.sizes) if scenario.memory else []
        chosen = self.sizes or (scenario.quick if self.quick else scenario.memory)
        return [size for size in scenario.memory if size in chosen]

    def sizes_of_sockets(self, scenario: Scenario) -> Sequence[int]:
        if not self.has("sockets"):
            return ()
        return self.sizes or (scenario.quick if self.quick else scenario.sizes)

    def rounds_of(self, scenario: Scenario, transport: Transport) -> int:
        """Of each point: as many as were asked for, or more in the tutorial's two scenarios than in the others."""
        if self.rounds:
            return self.rounds
        if self.quick:
            return 1 if scenario.slow or transport == "memory" else QUICK_ROUNDS
        return ROUNDS if scenario.tutorial and transport == "sockets" else FEWER


class Line:
    """One server in one scenario by one transport, until it ends."""

    def __init__(self, server: str, transport: Transport, scenario: Scenario) -> None:
        self.server = server
        self.transport = transport
        self._scenario = scenario
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
        """From two sizes on a straight line, or a power law, up to the scenario's, if that is steeper; from one in
        proportion, but what is fixed.
        """  # fmt: skip
        before, seconds = self.took[-1]
        if self._scenario.constant:
            return seconds
        earlier, less = self.took[-2] if len(self.took) > 1 else (0, min(self._scenario.fixed, 0.9 * seconds))
        rising = max(0.0, (seconds - less) / (before - earlier)) * (size - before)
        power = math.log(seconds / less) / math.log(before / earlier) if earlier else 1.0
        power = min(self._scenario.steepest, power)
        if power <= 1:
            return seconds + rising
        return float(seconds * (size / before) ** power)
