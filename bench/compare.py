"""Two runs side by side: what changed from one to the other, and by more than noise.

Knows two files and how their ratios are told. Must not know how anything is measured.
Invariant: a change is called beyond the noise only if it is more than the spread of the rounds of both runs and more
than the same server differed from itself (the control) in either. Where neither has a control, as in memory, nothing
says what noise is, and no change is called more than it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import records, results, stats, wording
from bench.records import Run
from bench.results import Line, Part
from bench.scenes import Measure


class Change(NamedTuple):
    """One server at one size, in both runs."""

    scenario: str
    line: Line
    size: int
    time: stats.Ratio
    """B over A: of what the scene measures."""
    cpu: stats.Ratio | None
    before: stats.Ratio | None
    """To the reference of its own run, in A and in B; none in B where that is another one."""
    after: stats.Ratio | None

    @property
    def reproduced(self) -> bool | None:
        """Whether B's ratio to the reference is within the interval that A reports; None where there is none."""
        if self.before is None or self.after is None or not self.before.judged:
            return None
        return self.before.low <= self.after.median <= self.before.high


def compare(a: Path, b: Path) -> int:
    """Print B over A for everything that both measured.

    The exit status: 0, 1 if there is no such thing, 2 for a file that cannot be read.
    """
    try:
        before, after = _read(a), _read(b)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for said in differences(before, after):
        print(said)
    found = list(changes(before, after))
    if not found:
        print("The two runs have no measurement in common.", file=sys.stderr)
        return 1
    print(_table(found))
    print(_summary(found))
    return 0


def _read(path: Path) -> Run:
    try:
        return records.read(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None


def differences(a: Run, b: Run) -> Iterator[str]:
    """What else than the servers may explain a change, a line each."""
    for what, one, other in (("machine", a.machine, b.machine), ("versions", a.versions, b.versions)):
        for field in one.__struct_fields__:
            was, is_now = getattr(one, field), getattr(other, field)
            if was != is_now and field != "load_average":  # which is never the same
                yield f"different {what}: {field} {_told(was)} in A, {_told(is_now)} in B"
    if a.reference != b.reference:
        yield f"different reference: {_told(a.reference)} in A, {_told(b.reference)} in B"
    for name, run in (("A", a), ("B", b)):
        if not run.complete:
            yield f"{name} is not complete"


def _told(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value) or "none"


def changes(a: Run, b: Run) -> Iterator[Change]:
    """In the order of the report."""
    others = {(part.scene.name, part.detail): part for part in results.parts(b)}
    for part in results.parts(a):
        other = others.get((part.scene.name, part.detail))
        if other is None:
            continue
        for line in part.lines:
            again = other.find(line.server, line.transport)
            if again is not None:
                yield from _changes(part, line, other, again)


def _changes(part: Part, line: Line, other: Part, again: Line) -> Iterator[Change]:
    name = f"{part.scene.name} {part.detail}".strip()
    for size in line.sizes:
        time = _ratio(part, line, other, again, size, part.scene.measure)
        if time is None:
            continue
        cpu = _ratio(part, line, other, again, size, part.scene.cpu)
        measure = part.scene.measure
        after = other.ratio(again, size, measure) if part.compared_with == other.compared_with else None
        yield Change(name, line, size, time, cpu, part.ratio(line, size, measure), after)


def _ratio(part: Part, line: Line, other: Part, again: Line, size: int, measure: Measure) -> stats.Ratio | None:
    noises = [one.noise(line.transport, size, measure) for one in (part, other)]
    return stats.unpaired(
        list(again.values(size, measure).values()),
        list(line.values(size, measure).values()),
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
        change.line.label,
        f"{change.size:,}",
        wording.ratio(change.time),
        change.time.verdict,
        wording.ratio(cpu) if cpu else "–",
        cpu.verdict if cpu else "",
        wording.ratio(change.before) if change.before else "–",
        wording.ratio(change.after) if change.after else "–",
        {True: "yes", False: "no", None: "–"}[change.reproduced],
    ]


def _summary(found: Sequence[Change]) -> str:
    beyond = sum(change.time.verdict == "beyond the noise" for change in found)
    told = [change for change in found if change.reproduced is not None and change.line.server != "control"]
    again = sum(bool(change.reproduced) for change in told)
    unknown = sum(change.time.verdict == "noise unknown" for change in found)
    said = f"{beyond} of {len(found)} differ from A by more than the noise."
    if unknown:
        said += f" Of {unknown} the noise is unknown: neither run has a control there."
    if not told:
        return f"{said} No ratio to a reference with an interval is in both."
    return f"{said} {again} of {len(told)} ratios to the reference are within the interval that A reports."
