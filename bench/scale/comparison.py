"""Compare two runs: what changed, and by more than noise.

Must not know how anything is measured.
Invariant: a change is beyond the noise only if it exceeds the spread of both runs' rounds and the difference between
the reference and the control in either. Without a control, as in memory, no change is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import stats
from bench.scale import analysis, formatting, results
from bench.scale.analysis import Result, Series
from bench.scale.results import Run
from bench.scale.scenarios import Metric


class Change(NamedTuple):
    """One server at one size, in both runs."""

    scenario: str
    series: Series
    size: int
    time: stats.Ratio
    """B over A, of the scenario's metric."""
    cpu: stats.Ratio | None
    before: stats.Ratio | None
    """To the reference in A; `after` in B, None if its reference is another one."""
    after: stats.Ratio | None

    @property
    def reproduced(self) -> bool | None:
        """Whether B's ratio to the reference is within A's interval; None without one."""
        if self.before is None or self.after is None or not self.before.judged:
            return None
        return self.before.low <= self.after.median <= self.before.high


def compare_files(a: Path, b: Path) -> int:
    """Print B over A for everything that both measured.

    Returns the exit status: 1 if they have nothing in common, 2 if a file cannot be read.
    """
    try:
        before, after = _read(a), _read(b)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for difference in differences(before, after):
        print(difference)
    found = list(changes(before, after))
    if not found:
        print("The runs have no measurement in common.", file=sys.stderr)
        return 1
    print(_table(found))
    print(_summary(found))
    return 0


def _read(path: Path) -> Run:
    try:
        return results.read(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None


def differences(a: Run, b: Run) -> Iterator[str]:
    """Yield what else may explain a change, a line each."""
    for what, one, other in (("machine", a.machine, b.machine), ("versions", a.versions, b.versions)):
        for field in one.__struct_fields__:
            was, is_now = getattr(one, field), getattr(other, field)
            if was != is_now and field != "load_average":  # which is never the same
                yield f"different {what}: {field} {_shown(was)} in A, {_shown(is_now)} in B"
    if a.reference != b.reference:
        yield f"different reference: {_shown(a.reference)} in A, {_shown(b.reference)} in B"
    for name in sorted(a.jobs.keys() & b.jobs.keys()):
        if a.jobs[name] != b.jobs[name]:
            yield f"different job of {name}: {a.jobs[name]} in A, {b.jobs[name]} in B"
    for name, run in (("A", a), ("B", b)):
        if not run.complete:
            yield f"{name} is not complete"


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value) or "none"


def changes(a: Run, b: Run) -> Iterator[Change]:
    """Yield the changes in the order of the report."""
    others = {(result.scenario.name, result.detail): result for result in analysis.results(b)}
    for result in analysis.results(a):
        other = others.get((result.scenario.name, result.detail))
        if other is None:
            continue
        for series in result.series:
            again = other.find(series.server, series.transport)
            if again is not None:
                yield from _changes(result, series, other, again)


def _changes(result: Result, series: Series, other: Result, again: Series) -> Iterator[Change]:
    name = f"{result.scenario.name} {result.detail}".strip()
    metric = result.scenario.metric
    for size in series.sizes:
        time = _ratio(result, series, other, again, size, metric)
        if time is None:
            continue
        cpu = _ratio(result, series, other, again, size, result.scenario.cpu)
        after = other.ratio(again, size, metric) if result.reference_name == other.reference_name else None
        yield Change(name, series, size, time, cpu, result.ratio(series, size, metric), after)


def _ratio(
    result: Result, series: Series, other: Result, again: Series, size: int, metric: Metric
) -> stats.Ratio | None:
    noises = [one.noise(series.transport, size, metric) for one in (result, other)]
    return stats.unpaired(
        list(again.values(size, metric).values()),
        list(series.values(size, metric).values()),
        max((noise for noise in noises if noise is not None), default=None),
    )


def _table(found: Sequence[Change]) -> str:
    head = ["scenario", "server", "size", "B/A", "", "CPU B/A", "", "to the reference, A", "B", "B within A's"]
    rows = [_row(change) for change in found]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]
    )


def _row(change: Change) -> list[str]:
    cpu = change.cpu
    return [
        change.scenario,
        change.series.label,
        f"{change.size:,}",
        formatting.ratio(change.time),
        change.time.verdict,
        formatting.ratio(cpu) if cpu else "–",
        cpu.verdict if cpu else "",
        formatting.ratio(change.before) if change.before else "–",
        formatting.ratio(change.after) if change.after else "–",
        {True: "yes", False: "no", None: "–"}[change.reproduced],
    ]


def _summary(found: Sequence[Change]) -> str:
    beyond = sum(change.time.verdict == "beyond the noise" for change in found)
    unknown = sum(change.time.verdict == "noise unknown" for change in found)
    judged = [change for change in found if change.reproduced is not None and change.series.server != "control"]
    reproduced = sum(bool(change.reproduced) for change in judged)
    text = f"{beyond} of {len(found)} differ from A by more than the noise."
    if unknown:
        text += f" For {unknown} the noise is unknown: neither run has a control."
    if not judged:
        return f"{text} No ratio to a reference is in both runs with an interval."
    return f"{text} {reproduced} of {len(judged)} ratios to the reference are within A's interval."
