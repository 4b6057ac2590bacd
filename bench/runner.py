"""A run: which points are measured, in which order and within which time, and what is kept of it.

Knows rounds, budgets, and why a line ends. Must not know what ranks say or how servers start.
Invariant: whatever ends a run, what was measured is returned; a point that is not measured has an `Ending`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from bench import scenarios
from bench.plan import OURS, Line, Plan
from bench.records import Ending, Sample
from bench.scenarios import Measured, Scenario
from bench.servers import PYTORCH, SERVERS, Died, Host, Impossible, has_torch
from bench.stats import LEAST_ROUNDS
from tcpstore_async.load.generator import Late, LoadError

RESERVE = 600
"""Open files that a server or a generator needs besides its connections, BUSY ones among them."""
PAIRED = ("uvloop", "control")
"""Those, with the reference, whose ratios count: for the budget, a size is measured of all of them or of none. The
others have what is left: in a quick run one round of the tutorial's two scenarios, and nothing of the rest."""
IN_MEMORY = 1 / 3
"""Of a scenario's time, what its sessions in memory may take at most where sockets are measured, too."""


class Progress(Protocol):
    """Who is told how far the run is."""

    def __call__(self, done: float, text: str) -> None:
        """`done`: the part of the run's budget, 0 to 1, that is behind us."""


class Runner:
    """Measures a plan; `samples` and `endings` hold what there is at any moment; `keep` is called after each size."""

    def __init__(self, plan: Plan, host: Host, progress: Progress, keep: Callable[[], None] | None = None) -> None:
        self.plan = plan
        self.samples: list[Sample] = []
        self.endings: list[Ending] = []
        self.failures: list[str] = []
        """What went wrong, each in one line, without ending the run."""
        self.notes: list[str] = []
        """Who was too late, each in one line: a slow server's line ends so, and one that hangs."""
        self._host = host
        self._paired = (*PAIRED, host.reference)
        self._progress = progress
        self._keep = keep
        self._before = 0
        """Samples of the scenarios before."""
        self._began = time.monotonic()

    def run(self) -> None:
        """All of it. Raises LoadError when a server dies; KeyboardInterrupt passes through."""
        weights = [scenario.quick_weight if self.plan.quick else scenario.weight for scenario in self.plan.scenarios]
        for number, scenario in enumerate(self.plan.scenarios):
            left = self._began + self.plan.seconds - time.monotonic()
            self._scenario(scenario, time.monotonic() + left * weights[number] / sum(weights[number:]))

    def _scenario(self, scenario: Scenario, deadline: float) -> None:
        self._before = len(self.samples)
        in_memory = self.plan.sizes_in_memory(scenario)
        sizes = self.plan.sizes_of_sockets(scenario)
        share = IN_MEMORY if sizes else 1.0
        until = deadline - (1 - share) * (deadline - time.monotonic())
        self._lines(scenario, [Line(OURS, "memory", scenario)], in_memory, until)
        if sizes:
            self._lines(scenario, self._of_sockets(scenario, sizes[0]), sizes, deadline)

    def _of_sockets(self, scenario: Scenario, first: int) -> list[Line]:
        lines = [Line(server, "sockets", scenario) for server in self.plan.servers or SERVERS]
        for line in lines:
            kind = self._host.kind_of(line.server)
            if not kind:
                self._end(scenario, line, 0, "there is no reference that it could be a second time")
            elif kind in PYTORCH and not has_torch():
                self._end(scenario, line, 0, "PyTorch is not installed")
            elif self._too_much(scenario, line):
                self._end(scenario, line, first, "not part of a quick run")
        return lines

    def _too_much(self, scenario: Scenario, line: Line) -> bool:
        """Whether a quick run leaves it out."""
        if not self.plan.quick or self.plan.servers or scenario.tutorial:
            return False
        return line.server not in self._paired

    def _lines(self, scenario: Scenario, lines: list[Line], sizes: Sequence[int], deadline: float) -> None:
        for number in range(len(sizes)):
            self._judge(scenario, lines, sizes[number:], deadline)
            self._size(scenario, lines, sizes[number:], deadline)
            if self._keep:
                self._keep()

    def _size(self, scenario: Scenario, lines: list[Line], sizes: Sequence[int], deadline: float) -> None:
        """All rounds of the first size, interleaved: every server in turn, then all again, another one first."""
        rounds = self.plan.rounds_of(scenario, lines[0].transport)
        for number in range(rounds):
            if number >= _least(rounds) and (
                time.monotonic() > deadline or self._better_larger(lines, sizes, rounds, number, deadline)
            ):
                return
            for line in _turned([line for line in lines if not line.ended], number):
                spare = self._spare(lines, sizes, rounds, number, deadline)
                if number and line.server not in self._paired and (self.plan.quick or line.took[-1][1] > spare):
                    continue
                self._sample(scenario, line, sizes[0], number)

    def _better_larger(
        self, lines: list[Line], sizes: Sequence[int], rounds: int, number: int, deadline: float
    ) -> bool:
        """Whether a further round, beyond the least that say anything, would cost the next size its own."""
        if len(sizes) < 2 or not self._fits(sizes[1]):
            return False
        needed = _least(rounds) * self._round(lines, sizes[1])
        left = deadline - time.monotonic()
        return left - self._round(lines, sizes[0]) < needed <= left

    def _fits(self, size: int) -> bool:
        """Whether one process can hold so many connections."""
        return size <= self.plan.open_files - RESERVE

    def _compared(self, lines: list[Line]) -> list[Line]:
        """Those whose ratios count, as far as they go on."""
        return [line for line in lines if not line.ended and line.server in self._paired]

    def _round(self, lines: list[Line], size: int) -> float:
        """Seconds that a round of those will take."""
        return sum(line.projected(size) for line in self._compared(lines))

    def _spare(self, lines: list[Line], sizes: Sequence[int], rounds: int, done: int, deadline: float) -> float:
        """Seconds left beside what the paired servers will take when so many rounds of the first size are done.

        That is all other rounds of it; but only the least, if all would cost them a larger size.
        """
        many = (rounds - done, max(0, _least(rounds) - done))
        found = [self._reserved(lines, sizes, rounds, each, deadline) for each in many]
        _, seconds = max(found, key=lambda one: one[0])
        return seconds

    def _reserved(
        self, lines: list[Line], sizes: Sequence[int], rounds: int, here: int, deadline: float
    ) -> tuple[int, float]:
        """To how many larger sizes the paired servers come after `here` rounds of the first; the seconds they leave."""
        left = deadline - time.monotonic() - here * self._round(lines, sizes[0])
        for number, size in enumerate(sizes[1:]):
            taken = _least(rounds) * self._round(lines, size)
            if taken > left or not self._fits(size):
                return number, left
            left -= taken
        return len(sizes) - 1, left

    def _judge(self, scenario: Scenario, lines: list[Line], sizes: Sequence[int], deadline: float) -> None:
        """End the lines that cannot, or had better not, be taken to the first of these sizes."""
        size, rounds = sizes[0], self.plan.rounds_of(scenario, lines[0].transport)
        for line in lines:
            if not line.ended and line.transport == "sockets" and scenario.per_connection:
                self._judge_files(scenario, line, size)
        paired = self._compared(lines)
        least = _least(rounds)
        needed = least * self._round(lines, size)
        left = max(0.0, deadline - time.monotonic())
        if needed > left:
            for line in paired:
                if line.server == OURS and least * line.projected(size) <= left:
                    continue
                who = "of all servers compared " if len(paired) > 1 else ""
                reason = f"{_many(least)} {who}would take about {needed:.1f} s, {left:.1f} s are left"
                self._miss(scenario, line, size, reason)
        others = [line for line in lines if not line.ended and line.server not in self._paired]
        spare = self._reserved(lines, sizes, rounds, least, deadline)[1]
        for line in others:
            share = max(0.0, spare / len(others))
            needed = line.projected(size)
            if needed > share:
                reason = f"one round would take about {needed:.1f} s, {share:.1f} s are left beside the others"
                self._miss(scenario, line, size, reason)

    def _judge_files(self, scenario: Scenario, line: Line, size: int) -> None:
        if self._fits(size):
            return
        needed = size + RESERVE
        reason = f"a process may have {self.plan.open_files:,} files open here, {needed:,} are needed"
        self._end(scenario, line, size, reason)
        if self._wanted(scenario, line, size):
            self._fail(scenario, line, size, reason)

    def _wanted(self, scenario: Scenario, line: Line, size: int) -> bool:
        """Whether a run fails that cannot hold it: the first, chosen by nobody, or one that was asked for.

        Where it, and what comes behind it, is measured in memory instead, that will do for all but those who asked for
        the transport, or for another server than ours.
        """
        if not self.plan.sizes:
            return not line.took
        named = line.server != OURS and line.server in self.plan.servers
        if named or "sockets" in self.plan.transports:
            return True
        instead = self.plan.sizes_in_memory(scenario)
        return any(each not in instead for each in self.plan.sizes if each >= size)

    def _miss(self, scenario: Scenario, line: Line, size: int, reason: str) -> None:
        """End it for want of time; if that size was asked for, the run fails."""
        self._end(scenario, line, size, reason)
        if size in self.plan.sizes:
            self._fail(scenario, line, size, reason)

    def _fail(self, scenario: Scenario, line: Line, size: int, reason: str) -> None:
        self.failures.append(_told(scenario, line, size, reason))

    def _sample(self, scenario: Scenario, line: Line, size: int, number: int) -> None:
        self._progress(
            (time.monotonic() - self._began) / self.plan.seconds,
            f"{scenario.name}, {line.server}, {line.transport}, {size:,}, round {number + 1}",
        )
        limit = max(self.plan.patience, 3 * line.projected(size))
        began, starts, once = time.monotonic(), self._host.starts, self._host.imports
        try:
            if line.transport == "memory":
                found = [scenarios.without_sockets(scenario.name, size, limit)]
            else:
                found = scenario.measure(self._host, line.server, size, limit)
        except Died as error:
            self._end(scenario, line, size, str(error))
            raise Died(_told(scenario, line, size, str(error))) from None
        except LoadError as error:
            # Without the round that failed the others would say too much good of it.
            self._forget(line, size)
            if isinstance(error, Late):
                self._miss(scenario, line, size, str(error))
                self.notes.append(_told(scenario, line, size, str(error)))
                return
            self._end(scenario, line, size, str(error))
            if not isinstance(error, Impossible):
                self._fail(scenario, line, size, str(error))
            return
        start = self._host.starts - starts
        line.add(size, start, time.monotonic() - began - start - (self._host.imports - once))
        self.samples += [_sample(scenario, line, size, number, one) for one in found]

    def _forget(self, line: Line, size: int) -> None:
        """Drop what this scenario has of it."""
        of_line = (line.server, line.transport, size)
        kept = [one for one in self.samples[self._before :] if (one.server, one.transport, one.size) != of_line]
        self.samples[self._before :] = kept

    def _end(self, scenario: Scenario, line: Line, size: int, reason: str) -> None:
        line.ended = True
        self.endings.append(Ending(scenario.name, line.server, line.transport, size, reason))


def _told(scenario: Scenario, line: Line, size: int, reason: str) -> str:
    """What went wrong, and where, in one line."""
    return f"{scenario.name}, {line.server} at {size:,}: {reason}"


def _turned(lines: list[Line], number: int) -> list[Line]:
    """Every second round backwards, and then others first: who comes when, and who follows whom, changes."""
    first = number // 2 % len(lines) if lines else 0
    turned = lines[first:] + lines[:first]
    return turned[::-1] if number % 2 else turned


def _least(rounds: int) -> int:
    """Rounds without which a size had better not be measured, for those whose ratios count."""
    return min(rounds, LEAST_ROUNDS)


def _many(rounds: int) -> str:
    return "one round" if rounds == 1 else f"{rounds} rounds"


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
