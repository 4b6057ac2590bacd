"""A run: which points are measured, in which order and within which time, and what is kept of it.

Knows rounds, budgets, and why a line ends. Must not know what ranks say or how servers start.
Invariant: whatever ends a run, what was measured is returned; a point that is not measured has an `Ending`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from bench import scenarios
from bench.records import Ending, Sample, Transport
from bench.scenarios import Measured, Scenario
from bench.servers import Died, Host, Impossible, has_torch, kind_of
from tcpstore_async.load.generator import Late, LoadError

RESERVE = 600
"""Open files that a server or a generator needs besides its connections, BUSY ones among them."""
MEMORY_SERVER = "uvloop"
LEAST = 20.0
"""Seconds that a sample may always take."""


class Plan(NamedTuple):
    """What a run is to measure; `seconds` is how long all of it may take."""

    scenarios: Sequence[Scenario]
    servers: Sequence[str]
    sizes: Sequence[int]
    """Empty: each scenario's own."""
    rounds: int
    quick: bool
    seconds: float
    open_files: int


class Progress(Protocol):
    """Who is told how far the run is."""

    def __call__(self, done: float, text: str) -> None:
        """`done`: the part of the run's budget, 0 to 1, that is behind us."""


class Line:
    """One server in one scenario by one transport, until it ends."""

    def __init__(self, server: str, transport: Transport) -> None:
        self.server = server
        self.transport = transport
        self.ended = False
        self.took: list[tuple[int, float]] = []
        """Size and seconds of a whole sample, preparation and all."""

    def projected(self, size: int) -> float:
        """Seconds that a sample at this size will take, from those before: by a power law of their last two."""
        if not self.took:
            return 0.0
        before, seconds = self.took[-1]
        power = 1.0
        if len(self.took) > 1:
            earlier, less = self.took[-2]
            power = (
                max(1.0, min(3.0, math.log(seconds / less) / math.log(before / earlier))) if earlier != before else 1.0
            )
        return float(seconds * (size / before) ** power)


class Runner:
    """Measures a plan; `samples` and `endings` hold what there is at any moment."""

    def __init__(self, plan: Plan, host: Host, progress: Progress) -> None:
        self.plan = plan
        self.samples: list[Sample] = []
        self.endings: list[Ending] = []
        self.failures: list[str] = []
        """What went wrong, each in one line, without ending the run."""
        self._host = host
        self._progress = progress
        self._began = time.monotonic()

    def run(self) -> None:
        """All of it. Raises LoadError when a server dies; KeyboardInterrupt passes through."""
        weights = sum(scenario.weight for scenario in self.plan.scenarios)
        for scenario in self.plan.scenarios:
            left = self._began + self.plan.seconds - time.monotonic()
            self._scenario(scenario, time.monotonic() + left * scenario.weight / weights)
            weights -= scenario.weight

    def _scenario(self, scenario: Scenario, deadline: float) -> None:
        sockets = [Line(server, "sockets") for server in self.plan.servers if server in scenario.servers]
        for line in sockets:
            if not has_torch() and kind_of(line.server) in ("libuv", "legacy"):
                self._end(scenario, line, 0, "PyTorch is not installed")
        for size in self._sizes(scenario):
            self._size(scenario, sockets, size, deadline)
        if MEMORY_SERVER not in self.plan.servers:
            return
        memory = [Line(MEMORY_SERVER, "memory")]
        sizes = [size for size in scenario.memory if size in self.plan.sizes or not self.plan.sizes]
        for size in sizes:
            if not self.plan.quick or size in scenario.quick:
                self._size(scenario, memory, size, deadline)

    def _sizes(self, scenario: Scenario) -> Sequence[int]:
        return self.plan.sizes or (scenario.quick if self.plan.quick else scenario.sizes)

    def _rounds(self, scenario: Scenario) -> int:
        if not scenario.slow:
            return self.plan.rounds
        return 1 if self.plan.quick else min(3, self.plan.rounds)

    def _size(self, scenario: Scenario, lines: list[Line], size: int, deadline: float) -> None:
        """All rounds of one size, interleaved: every server in turn, then all of them again."""
        for line in lines:
            if not line.ended:
                self._judge(scenario, line, size, lines, deadline)
        for number in range(self._rounds(scenario)):
            for line in lines:
                if not line.ended:
                    self._sample(scenario, line, size, number)

    def _judge(self, scenario: Scenario, line: Line, size: int, lines: list[Line], deadline: float) -> None:
        """End a line that cannot, or had better not, be taken to this size."""
        room = self.plan.open_files - RESERVE
        if line.transport == "sockets" and scenario.per_connection and size > room:
            reason = f"a process may have {self.plan.open_files:,} files open here"
            self._end(scenario, line, size, reason)
            if self.plan.sizes:  # it was asked for
                self.failures.append(f"{scenario.name}, {line.server} at {size:,}: {reason}")
            return
        running = sum(not other.ended for other in lines)
        allowed = (deadline - time.monotonic()) / self._rounds(scenario) / running
        projected = line.projected(size)
        if line.took and projected > allowed:
            self._end(
                scenario,
                line,
                size,
                f"a sample would take about {projected:.1f} s, {max(allowed, 0):.1f} s are left for it",
            )

    def _sample(self, scenario: Scenario, line: Line, size: int, number: int) -> None:
        self._progress(
            (time.monotonic() - self._began) / self.plan.seconds,
            f"{scenario.name}, {line.server}, {line.transport}, {size:,}, round {number + 1}",
        )
        limit = max(LEAST, 3 * line.projected(size))
        began = time.monotonic()
        try:
            if line.transport == "memory":
                found = [scenarios.without_sockets(scenario.name, size, limit)]
            else:
                found = scenario.measure(self._host, line.server, size, limit)
        except Died as error:
            self._end(scenario, line, size, str(error))
            raise Died(f"{scenario.name}, {line.server} at {size:,}: {error}") from None
        except LoadError as error:
            self._end(scenario, line, size, str(error))
            if not isinstance(error, (Late, Impossible)):
                self.failures.append(f"{scenario.name}, {line.server} at {size:,}: {error}")
            return
        took = time.monotonic() - began
        if line.took and line.took[-1][0] == size:
            took = min(took, line.took.pop()[1])  # the first of PyTorch's has imported PyTorch
        line.took.append((size, took))
        self.samples += [_sample(scenario, line, size, number, one) for one in found]

    def _end(self, scenario: Scenario, line: Line, size: int, reason: str) -> None:
        line.ended = True
        self.endings.append(Ending(scenario.name, line.server, line.transport, size, reason))


def _sample(scenario: Scenario, line: Line, size: int, number: int, found: Measured) -> Sample:
    name = f"{scenario.name}-{found.part}" if found.part else scenario.name
    return Sample(
        scenario=name,
        server=line.server,
        transport=line.transport,
        size=size,
        round=number,
        wall_seconds=found.wall,
        operations=found.operations,
        server_cpu_seconds=found.server_cpu,
        generator_cpu_seconds=found.generator_cpu,
        generator_share=found.share,
        p50_seconds=found.quantiles[0],
        p95_seconds=found.quantiles[1],
        p99_seconds=found.quantiles[2],
        server_memory_bytes=found.memory,
    )
