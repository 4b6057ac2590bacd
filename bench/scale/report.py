"""What readers see: the report of a run, and what changed between two runs, by more than noise.

The report is one page of Markdown with machine, method, figures and tables.
Must not know how anything is measured or drawn.
Invariant: every number comes from the run and has its transport, what is missing is text to be missing, and the same
run gives the same page. A change is beyond the noise only if it exceeds the spread of both runs' rounds and the
difference between the reference and the control in either. Without a control, as in memory, no change is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from bench import stats
from bench.scale import analysis
from bench.scale.analysis import Result, Series
from bench.scale.results import SATURATED, Ending, Machine, Run, read
from bench.scale.scenarios import COPYING, MEMORY, P50, P95, P99, PARKED, RELAY_CPU, Metric

REPORT = "report.md"
_SHOWN = {"seconds": stats.format_seconds, "bytes": stats.format_bytes, "ranks": "{:,.0f}".format}

_NAMES = {
    "": "unknown, or no such server was measured",
    "files only": "/etc/hosts, no name server",
    "this machine's": "as configured: a name server may have been queried, in PyTorch's time",
}

METHOD = f"""\
## Method

* **Rounds are interleaved**: every server in turn at one size, then all again in another order. Whatever slows the
  machine for a while slows all of them.
* **Each sample has a new server**: ours is a new process; PyTorch's two are a new TCPStore in a process that is reused
  and was warmed up unmeasured, because importing torch takes seconds. Its memory has been touched before; its table of
  open files is small, as a new process's is. The control has a process of its own. For `start`,
  `start-spread`, `memory`, `resolver` and `busy-trainer`, PyTorch's processes are new as well.
* **A number is the median of the rounds**, with min to max in brackets. **A ratio is the median of the ratios of each
  round** to the reference.
* **An interval** lies between two order statistics: it holds the median with {stats.CONFIDENCE:.0%} confidence or more
  from five rounds on; below that it is min to max, with less. It is widened by the noise.
* **The noise** is measured by the control, the reference a second time: how far the interval of its ratio reaches from
  1, at that size or at most sizes (the upper quartile). A difference is *beyond the noise*, and bold, if the widened
  interval does not contain 1. Without a control the noise is unknown, and nobody is called ahead.
* **CPU** is given for the server, per rank or operation, and for the load generators. On a shared machine, trust CPU
  over wall time and ratios over either.
* **Saturated** (`sat.` in tables, hollow in figures): in some round the busiest generator ran, or waited for a core,
  for {SATURATED:.0%} of the time or more. The generator may have limited the result, and the servers may be
  further apart than the ratio of times says; the ratio of CPU still counts.
* **A series ends** where a server was not measured further, with the reason. Nothing is extrapolated.
* **sockets** are connections over loopback. **memory** is the server's sessions driven without sockets: what the server
  computes, without the kernel's part. The two are never put into one ratio.
"""


def write_report(run: Run, folder: Path) -> list[Path]:
    """Write `report.md` and the figures to a folder, which is created; return the paths, the report first.

    Raises OSError, with the name of the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = _figures(run)
    figures = {name.removesuffix(".png"): name for name in files if name.endswith(".png")}
    return [_write(folder / name, data) for name, data in {REPORT: render(run, figures).encode(), **files}.items()]


def _write(path: Path, data: bytes) -> Path:
    try:
        path.write_bytes(data)
    except OSError as error:  # a full disk's does not name the file
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None
    return path


def _figures(run: Run) -> dict[str, bytes]:
    """Return the figures' files, or nothing without matplotlib: the tables of an hour's run are worth having."""
    if find_spec("matplotlib") is None:
        return {}
    from bench.scale.figures import render_figures

    return render_figures(run)


def render(run: Run, images: dict[str, str]) -> str:
    """Return the page; `images` maps a scenario's name to the file name of its figure."""
    scenarios = analysis.by_scenario(run)
    sections = [_head(run, images), _glance(scenarios), _machine(run), METHOD]
    sections += [_section(results, images.get(name)) for name, results in scenarios.items()]
    return "\n".join(sections)


def _head(run: Run, images: dict[str, str]) -> str:
    text = [
        "# Results of the scale benchmark",
        "",
        "For whoever wants to see how the servers compare, size by size. `bench/README.md` says how that is measured.",
        "",
        f"`{run.command}`, began {run.began}, took {_duration(run.seconds)}.",
        "",
    ]
    if not run.complete:
        text += ["**This run is not complete**: it was stopped or failed; this is what was measured.", ""]
    if not run.samples:
        text += ["**Nothing was measured.**", ""]
    elif not images:
        text += ["No figures: matplotlib is not installed (`pip install '.[bench]'`).", ""]
    text += [_headline(run), ""]
    return "\n".join(text)


def _headline(run: Run) -> str:
    found = analysis.headline(run)
    if found:
        return f"**{found}**"
    return (
        f"Initialization of {analysis.TUTORIAL_RANKS:,} ranks, for which the tutorial of PyTorch's libuv server shows "
        f"{analysis.TUTORIAL_SECONDS:.0f} s, was not measured in this run, over sockets or in memory."
    )


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds"


def _glance(scenarios: dict[str, list[Result]]) -> str:
    rows = [(results[0].title, _rounds(results), _verdict(results)) for results in scenarios.values()]
    if not rows:
        return ""
    return "\n".join(["## At a glance", "", _table(["scenario", "rounds", "who is ahead"], rows), ""])


def _rounds(results: Sequence[Result]) -> str:
    return analysis.rounds(one for result in results for one in result.series)


def _verdict(results: Sequence[Result]) -> str:
    return (
        analysis.verdict_of_all(results) if any(result.detail for result in results) else analysis.verdict(results[0])
    )


def _machine(run: Run) -> str:
    machine, versions = run.machine, run.versions
    rows = [
        ("processor", machine.processor),
        ("cores", str(machine.cores)),
        ("memory", stats.format_bytes(machine.memory_bytes)),
        ("kernel", machine.kernel),
        ("cores of the servers; of the load", _pinned(machine)),
        ("load average of the minute before", f"{machine.load_average:.2f}"),
        ("open files of one process", f"{machine.open_files:,}"),
        ("listen backlog (somaxconn)", f"{machine.backlog:,}" if machine.backlog else "unknown"),
        ("names of peers, for PyTorch's servers", _NAMES[machine.names]),
        ("tcpstore_async", f"{versions.tcpstore_async}, {versions.build}, commit {versions.commit or 'unknown'}"),
        ("Python, uvloop", f"{versions.python}, {versions.uvloop}"),
        ("PyTorch", versions.torch or "not installed"),
        ("reference", analysis.server_name(run.reference) or "none: there are no ratios"),
        ("control", "yes" if any(sample.server == "control" for sample in run.samples) else "none: noise unknown"),
    ]
    return "\n".join(["## Machine and versions", "", _table(["", ""], rows), ""])


def _pinned(machine: Machine) -> str:
    if not machine.server_cores and not machine.load_cores:
        return "not pinned, or unknown"
    if machine.server_cores == machine.load_cores:
        return f"{machine.server_cores} for both, which compete for it"
    return f"{machine.server_cores or 'not pinned'}; {machine.load_cores or 'not pinned'}"


def _section(results: Sequence[Result], image: str | None) -> str:
    scenario, title = results[0].scenario, results[0].title
    text = [f"## {title}", ""]
    if scenario.description:
        text += [scenario.description, ""]
    text += [f"{_verdict(results)}.", ""]
    if image:
        text += [f"![{title}]({image})", ""]
    for result in results:
        text += _tables(result)
    endings = [_ending(ending, result, results) for result in results for ending in result.endings]
    return "\n".join([*text, *endings, ""] if endings else text)


def _ending(ending: Ending, result: Result, results: Sequence[Result]) -> str:
    name = analysis.series_name(ending.server, ending.transport) + (f" ({result.detail})" if result.detail else "")
    measured = analysis.series_of(ending, result, results) is not None
    return f"* {name} {f'ends before {ending.size:,}' if measured else 'not measured'}: {ending.reason}"


def _tables(result: Result) -> list[str]:
    text: list[str] = []
    for transport in ("sockets", "memory"):
        series = [one for one in result.series if one.transport == transport]
        if not series:
            continue
        where = analysis.TRANSPORT_NAMES[transport]
        text += [f"### {result.detail + ', ' if result.detail else ''}{where}", ""]
        text += [_numbers(result, series), ""]
        text += [note for one in series if (note := _marginal(result, one))]
    return text


def _numbers(result: Result, series: Sequence[Series]) -> str:
    points = [(one, size) for size in sorted({size for one in series for size in one.sizes}) for one in series]
    points = [(one, size) for one, size in points if size in one.points]
    latencies = any(one.values(size, P50) for one, size in points)
    others = [metric for metric in (MEMORY, PARKED, COPYING, RELAY_CPU) if metric is not result.scenario.metric]
    more = [metric for metric in others if any(one.values(size, metric) for one, size in points)]
    head = [
        result.scenario.sizes_are, "server", result.scenario.metric.axis, "× reference", result.scenario.cpu.axis,
        "× reference", "generator CPU", "busiest",
    ]  # fmt: skip
    head += [metric.axis for metric in more]
    rows = [
        _row(result, one, size)
        + [_measured(one, size, metric) for metric in more]
        + ([_latency(one, size)] if latencies else [])
        for one, size in points
    ]
    return _table([*head, "p50 / p95 / p99"] if latencies else head, rows)


def _row(result: Result, one: Series, size: int) -> list[str]:
    samples = list(one.points[size].values())
    generator = stats.median([sample.generator_cpu_seconds / max(1, sample.operations) for sample in samples])
    share = max(sample.generator_share for sample in samples)
    return [
        f"{size:,}",
        analysis.server_name(one.server),
        _measured(one, size, result.scenario.metric),
        _compared(result, one, size, result.scenario.metric),
        _measured(one, size, result.scenario.cpu),
        _compared(result, one, size, result.scenario.cpu),
        stats.format_seconds(generator),
        f"{share:.0%}{' sat.' if one.saturated(size) else ''}",
    ]


def _measured(one: Series, size: int, metric: Metric) -> str:
    values = list(one.values(size, metric).values())
    if not values:
        return "–"
    shown = _SHOWN[metric.unit]
    middle = shown(stats.median(values))
    return f"{middle} ({shown(min(values))}–{shown(max(values))})" if len(values) > 1 else f"{middle} (one round)"


def _compared(result: Result, one: Series, size: int, metric: Metric) -> str:
    reference = result.reference(one.transport)
    if reference is one:
        return "1"
    found = result.ratio(one, size, metric)
    if found is None:
        return "–"
    text = str(found)
    return f"**{text}**" if found.verdict == "beyond the noise" and one.server != "control" else text


def _latency(one: Series, size: int) -> str:
    medians = [one.median(size, metric) for metric in (P50, P95, P99)]
    return " / ".join("–" if median is None else stats.format_seconds(median) for median in medians)


def _marginal(result: Result, one: Series) -> str | None:
    """Say what one more rank takes, without the fixed part."""
    if result.scenario.metric is not MEMORY or len(one.sizes) < 2:
        return None
    (least, first), (most, last) = ((size, one.median(size, MEMORY)) for size in (one.sizes[0], one.sizes[-1]))
    if first is None or last is None:
        return None
    each = (last * most - first * least) / (most - least)
    server = analysis.server_name(one.server)
    return f"* {server}: {stats.format_bytes(each)} for each more rank between {least:,} and {most:,}.\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def write_report_of(path: Path, folder: Path) -> int:
    """Write the report of a run file; return the exit status: 2 for a file that cannot be read or written."""
    try:
        written = write_report(read(path), folder)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    print(written[0])
    return 0


# The comparison of two runs


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
    print(_changes_table(found))
    print(_summary(found))
    return 0


def _read(path: Path) -> Run:
    try:
        return read(path)
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


def _changes_table(found: Sequence[Change]) -> str:
    head = ["scenario", "server", "size", "B/A", "", "CPU B/A", "", "to the reference, A", "B", "B within A's"]
    rows = [_change_row(change) for change in found]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]
    )


def _change_row(change: Change) -> list[str]:
    cpu = change.cpu
    return [
        change.scenario,
        change.series.label,
        f"{change.size:,}",
        str(change.time),
        change.time.verdict,
        str(cpu) if cpu else "–",
        cpu.verdict if cpu else "",
        str(change.before) if change.before else "–",
        str(change.after) if change.after else "–",
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
