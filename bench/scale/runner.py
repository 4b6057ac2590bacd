"""A run: which points are measured, in which order and within which time.

Must not know what ranks do or how servers start.
Invariant: whatever ends a run, its samples are kept; a point that is not measured has an `Ending`; a projection is made
from measurements only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from bench.scale.in_memory import without_sockets
from bench.scale.results import Ending, Sample, Transport
from bench.scale.scenarios import Scenario
from bench.scale.servers import PYTORCH, RELAY, SERVERS, Died, Host, Impossible, Measured, Point, has_torch
from bench.stats import LEAST_ROUNDS
from tcpstore_async.tools.load.generator import Late, LoadError

OURS = "uvloop"
"""Driven in memory too, and measured on where those it is compared with would take too long."""
COMPARED = ("uvloop", "control")
"""With the reference, the servers whose ratios count: a size is measured of all of them or of none. The others share
the time that is left; in a quick run they have one round of the tutorial's scenarios only."""
RESERVED_FILES = 600
"""Open files of a server or a generator besides its connections."""
MEMORY_SHARE = 1 / 3
"""Of a scenario's time, at most, for its sessions in memory."""


class Plan(NamedTuple):
    """What to measure."""

    scenarios: Sequence[Scenario]
    servers: Sequence[str]
    """Empty: the scenario's default, as for sizes and transports."""
    sizes: Sequence[int]
    rounds: int
    """0: the scenario's default."""
    quick: bool
    seconds: float
    """Time budget of the run."""
    open_files: int
    transports: Sequence[Transport] = ()

    def has(self, transport: Transport) -> bool:
        return not self.transports or transport in self.transports

    @property
    def min_limit(self) -> float:
        """Seconds that a step of a sample may always take."""
        return 20.0 if self.quick else 60.0

    @property
    def measures_torch(self) -> bool:
        return has_torch() and self.has("sockets") and any(server in PYTORCH for server in self.servers or SERVERS)

    def memory_sizes(self, scenario: Scenario) -> list[int]:
        """Return the sizes at which our sessions are driven in memory."""
        if not self.has("memory") or (self.servers and OURS not in self.servers):
            return []
        if self.sizes and "memory" in self.transports:
            return list(self.sizes) if scenario.memory else []
        chosen = self.sizes or (scenario.quick if self.quick else scenario.memory)
        return [size for size in scenario.memory if size in chosen]

    def socket_sizes(self, scenario: Scenario) -> Sequence[int]:
        if not self.has("sockets"):
            return ()
        return self.sizes or (scenario.quick if self.quick else scenario.sizes)

    def rounds_of(self, scenario: Scenario, transport: Transport) -> int:
        if self.rounds:
            return self.rounds
        if self.quick:
            return 1 if scenario.slow or transport == "memory" else 3
        return 5 if scenario.tutorial and transport == "sockets" else 3


class ActiveSeries:
    """One server of one scenario over one transport, while it is measured at growing sizes."""

    def __init__(self, server: str, transport: Transport, scenario: Scenario) -> None:
        self.server = server
        self.transport = transport
        self.ended = False
        self._scenario = scenario
        self._start = 0.0
        """Seconds in which the server starts, the same at every size: the minimum seen."""
        self._took: list[tuple[int, float]] = []
        """Size, and the minimum of the seconds of all else in a sample."""

    @property
    def measured(self) -> bool:
        return bool(self._took)

    @property
    def last_seconds(self) -> float:
        """Seconds of the last sample but for the server's start."""
        return self._took[-1][1]

    def add(self, size: int, start: float, rest: float) -> None:
        """Record what a sample took."""
        self._start = min(self._start, start) if self._took else start
        if self._took and self._took[-1][0] == size:
            rest = min(rest, self._took.pop()[1])
        self._took.append((size, rest))

    def projected(self, size: int) -> float:
        """Return the seconds that a sample of this size will take, or 0 if none was measured."""
        return self._start + self._rest(size) if self._took else 0.0

    def _rest(self, size: int) -> float:
        """Extrapolate linearly or, if steeper, by a power law."""
        before, seconds = self._took[-1]
        if self._scenario.constant:
            return seconds
        fixed = (0, min(self._scenario.fixed_seconds, 0.9 * seconds))
        earlier, less = self._took[-2] if len(self._took) > 1 else fixed
        power = math.log(seconds / less) / math.log(before / earlier) if earlier else 1.0
        power = min(self._scenario.max_power, power)
        if power <= 1:
            return seconds + max(0.0, (seconds - less) / (before - earlier)) * (size - before)
        return float(seconds * (size / before) ** power)


class Progress(Protocol):
    """Receives the progress of a run."""

    def __call__(self, done: float, text: str) -> None:
        """`done`: the fraction of the time budget that is used."""


class Runner:
    """Measures a plan. `samples` and `endings` are current at any moment; `save` is called after each size."""

    def __init__(self, plan: Plan, host: Host, progress: Progress, save: Callable[[], None] | None = None) -> None:
        self.plan = plan
        self.samples: list[Sample] = []
        self.endings: list[Ending] = []
        self.failures: list[str] = []
        """Errors that fail the run without ending it, one line each."""
        self.notes: list[str] = []
        """Timeouts, one line each: a slow server's series ends with one, and so does one that hangs."""
        self._host = host
        self._compared = (*COMPARED, host.reference)
        self._progress = progress
        self._save = save
        self._scenario_start = 0
        """Index of the scenario's first sample."""
        self._began = time.monotonic()

    def run(self) -> None:
        """Measure everything. Raises Died; KeyboardInterrupt passes through."""
        weights = [scenario.quick_weight if self.plan.quick else scenario.weight for scenario in self.plan.scenarios]
        for number, scenario in enumerate(self.plan.scenarios):
            left = self._began + self.plan.seconds - time.monotonic()
            self._measure_scenario(scenario, time.monotonic() + left * weights[number] / sum(weights[number:]))

    def _measure_scenario(self, scenario: Scenario, deadline: float) -> None:
        self._scenario_start = len(self.samples)
        sizes = self.plan.socket_sizes(scenario)
        now = time.monotonic()
        memory_deadline = now + (deadline - now) * (MEMORY_SHARE if sizes else 1.0)
        self._measure_sizes(
            scenario, [ActiveSeries(OURS, "memory", scenario)], self.plan.memory_sizes(scenario), memory_deadline
        )
        if sizes:
            self._measure_sizes(scenario, self._socket_series(scenario, sizes[0]), sizes, deadline)

    def _socket_series(self, scenario: Scenario, first: int) -> list[ActiveSeries]:
        found = [ActiveSeries(server, "sockets", scenario) for server in self.plan.servers or SERVERS]
        for series in found:
            kind = self._host.kind_of(series.server)
            if not kind:
                self._end(scenario, series, 0, "the run has no reference to measure a second time")
            elif kind in PYTORCH and not has_torch():
                self._end(scenario, series, 0, "PyTorch is not installed")
            elif self._skipped_by_quick(scenario, series):
                self._end(scenario, series, first, "not part of a quick run")
        return found

    def _skipped_by_quick(self, scenario: Scenario, series: ActiveSeries) -> bool:
        if not self.plan.quick or self.plan.servers or scenario.tutorial:
            return False
        return series.server not in self._compared

    def _measure_sizes(
        self, scenario: Scenario, all_series: list[ActiveSeries], sizes: Sequence[int], deadline: float
    ) -> None:
        for number in range(len(sizes)):
            self._end_what_does_not_fit(scenario, all_series, sizes[number:], deadline)
            self._measure_size(scenario, all_series, sizes[number:], deadline)
            if self._save:
                self._save()

    def _measure_size(
        self, scenario: Scenario, all_series: list[ActiveSeries], sizes: Sequence[int], deadline: float
    ) -> None:
        """Measure the first of these sizes in interleaved rounds: each server once, then all again in another order."""
        rounds = self.plan.rounds_of(scenario, all_series[0].transport)
        for number in range(rounds):
            if number >= _least(rounds) and (
                time.monotonic() > deadline or self._next_size_needs_it(all_series, sizes, rounds, deadline)
            ):
                return
            for series in _in_order([one for one in all_series if not one.ended], number):
                spare = self._spare(all_series, sizes, rounds, number, deadline)
                unpaired = series.server not in self._compared
                if number and unpaired and (self.plan.quick or series.last_seconds > spare):
                    continue
                self._measure(scenario, series, sizes[0], number)

    def _next_size_needs_it(
        self, all_series: list[ActiveSeries], sizes: Sequence[int], rounds: int, deadline: float
    ) -> bool:
        """Whether one more round, beyond the minimum, would cost the next size its minimum."""
        if len(sizes) < 2 or not self._has_files(sizes[1]):
            return False
        needed = _least(rounds) * self._round_seconds(all_series, sizes[1])
        left = deadline - time.monotonic()
        return left - self._round_seconds(all_series, sizes[0]) < needed <= left

    def _has_files(self, size: int, server: str = OURS) -> bool:
        """Whether one process may hold this many connections; relays are as many as it takes."""
        return server == RELAY or size <= self.plan.open_files - RESERVED_FILES

    def _active(self, all_series: list[ActiveSeries]) -> list[ActiveSeries]:
        """Return those whose ratios count."""
        return [one for one in all_series if not one.ended and one.server in self._compared]

    def _round_seconds(self, all_series: list[ActiveSeries], size: int) -> float:
        """Project a round of those whose ratios count."""
        return sum(one.projected(size) for one in self._active(all_series))

    def _spare(
        self, all_series: list[ActiveSeries], sizes: Sequence[int], rounds: int, done: int, deadline: float
    ) -> float:
        """Return the seconds that the compared servers leave to the others after `done` rounds of the first size.

        They take all remaining rounds of it, but only the minimum if more would cost them a larger size.
        """
        options = (rounds - done, max(0, _least(rounds) - done))
        _, seconds = max(
            (self._reach(all_series, sizes, rounds, each, deadline) for each in options), key=lambda found: found[0]
        )
        return seconds

    def _reach(
        self, all_series: list[ActiveSeries], sizes: Sequence[int], rounds: int, here: int, deadline: float
    ) -> tuple[int, float]:
        """Return how many larger sizes the compared servers reach after `here` rounds of the first; seconds left."""
        left = deadline - time.monotonic() - here * self._round_seconds(all_series, sizes[0])
        for number, size in enumerate(sizes[1:]):
            needed = _least(rounds) * self._round_seconds(all_series, size)
            if needed > left or not self._has_files(size):
                return number, left
            left -= needed
        return len(sizes) - 1, left

    def _end_what_does_not_fit(
        self, scenario: Scenario, all_series: list[ActiveSeries], sizes: Sequence[int], deadline: float
    ) -> None:
        """End the series for which the first of these sizes has too few files or too little time."""
        size, rounds = sizes[0], self.plan.rounds_of(scenario, all_series[0].transport)
        for series in all_series:
            if not series.ended and series.transport == "sockets" and scenario.per_connection:
                self._check_files(scenario, series, size)
        compared, least = self._active(all_series), _least(rounds)
        needed = least * self._round_seconds(all_series, size)
        left = max(0.0, deadline - time.monotonic())
        if needed > left:
            for series in compared:
                if series.server == OURS and least * series.projected(size) <= left:
                    continue
                who = "of all servers compared " if len(compared) > 1 else ""
                count = "one round" if least == 1 else f"{least} rounds"
                self._miss(
                    scenario, series, size, f"{count} {who}would take about {needed:.1f} s, {left:.1f} s are left"
                )
        others = [one for one in all_series if not one.ended and one.server not in self._compared]
        spare = self._reach(all_series, sizes, rounds, least, deadline)[1]
        for series in others:
            share = max(0.0, spare / len(others))
            needed = series.projected(size)
            if needed > share:
                reason = f"one round would take about {needed:.1f} s, {share:.1f} s are left beside the others"
                self._miss(scenario, series, size, reason)

    def _check_files(self, scenario: Scenario, series: ActiveSeries, size: int) -> None:
        if self._has_files(size, series.server):
            return
        limit, needed = self.plan.open_files, size + RESERVED_FILES
        reason = f"a process may have {limit:,} files open here, {needed:,} are needed"
        self._end(scenario, series, size, reason)
        if self._was_asked_for(scenario, series, size):
            self._fail(scenario, series, size, reason)

    def _was_asked_for(self, scenario: Scenario, series: ActiveSeries, size: int) -> bool:
        """Whether a run without this size fails: a default size only if it is the first.

        Being measured in memory instead is enough unless the transport or another server was asked for.
        """
        if not self.plan.sizes:
            return not series.measured
        named = series.server != OURS and series.server in self.plan.servers
        if named or "sockets" in self.plan.transports:
            return True
        in_memory = self.plan.memory_sizes(scenario)
        return any(each not in in_memory for each in self.plan.sizes if each >= size)

    def _miss(self, scenario: Scenario, series: ActiveSeries, size: int, reason: str) -> None:
        """End a series for want of time; if the size was asked for, the run fails."""
        self._end(scenario, series, size, reason)
        if size in self.plan.sizes:
            self._fail(scenario, series, size, reason)

    def _fail(self, scenario: Scenario, series: ActiveSeries, size: int, reason: str) -> None:
        self.failures.append(_located(scenario, series, size, reason))

    def _measure(self, scenario: Scenario, series: ActiveSeries, size: int, number: int) -> None:
        """Take one sample, or end the series with the reason why there is none."""
        self._progress(
            (time.monotonic() - self._began) / self.plan.seconds,
            f"{scenario.name}, {series.server}, {series.transport}, {size:,}, round {number + 1}",
        )
        limit = max(self.plan.min_limit, 3 * series.projected(size))
        began, starts, imports = time.monotonic(), self._host.starts, self._host.imports
        try:
            if series.transport == "memory":
                found = [without_sockets(scenario.name, size, limit, scenario.words)]
            else:
                found = scenario.measure(Point(self._host, series.server, size, limit))
        except Died as error:
            self._end(scenario, series, size, str(error))
            raise Died(_located(scenario, series, size, str(error))) from None
        except LoadError as error:
            # The rounds before the one that failed would flatter the server.
            self._forget(series, size)
            if isinstance(error, Late):
                self._miss(scenario, series, size, str(error))
                self.notes.append(_located(scenario, series, size, str(error)))
                return
            self._end(scenario, series, size, str(error))
            if not isinstance(error, Impossible):
                self._fail(scenario, series, size, str(error))
            return
        start = self._host.starts - starts
        series.add(size, start, time.monotonic() - began - start - (self._host.imports - imports))
        self.samples += [_sample(scenario, series, size, number, one) for one in found]

    def _forget(self, series: ActiveSeries, size: int) -> None:
        """Drop this scenario's samples of a series at a size."""
        dropped = (series.server, series.transport, size)
        kept = [one for one in self.samples[self._scenario_start :] if (one.server, one.transport, one.size) != dropped]
        self.samples[self._scenario_start :] = kept

    def _end(self, scenario: Scenario, series: ActiveSeries, size: int, reason: str) -> None:
        series.ended = True
        self.endings.append(Ending(scenario.name, series.server, series.transport, size, reason))


def _located(scenario: Scenario, series: ActiveSeries, size: int, reason: str) -> str:
    return f"{scenario.name}, {series.server} at {size:,}: {reason}"


def _in_order(all_series: list[ActiveSeries], number: int) -> list[ActiveSeries]:
    """Vary from round to round who is first and who follows whom."""
    first = number // 2 % len(all_series) if all_series else 0
    rotated = all_series[first:] + all_series[:first]
    return rotated[::-1] if number % 2 else rotated


def _least(rounds: int) -> int:
    """Return the minimum of rounds for those whose ratios count."""
    return min(rounds, LEAST_ROUNDS)


def _sample(scenario: Scenario, series: ActiveSeries, size: int, number: int, found: Measured) -> Sample:
    p50, p95, p99 = found.quantiles
    return Sample(
        scenario=f"{scenario.name}-{found.part}" if found.part else scenario.name,
        server=series.server,
        transport=series.transport,
        size=size,
        round=number,
        wall_seconds=found.wall,
        operations=found.operations,
        server_cpu_seconds=found.server_cpu,
        generator_cpu_seconds=found.generator_cpu,
        generator_share=found.share,
        p50_seconds=p50,
        p95_seconds=p95,
        p99_seconds=p99,
        server_memory_bytes=found.memory,
        parked=found.parked,
        copy_cpu_seconds=found.copy_cpu,
        relay_cpu_seconds=found.relay_cpu,
    )
