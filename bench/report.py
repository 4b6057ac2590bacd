"""A run's report: one page of Markdown that puts machine, method, figures and tables together.

Knows Markdown and what a reader asks. Must not know how anything is measured or drawn.
`python -m bench.report RUN.json` writes it anew, beside the run or where `--out` says.
Invariant: every number comes from the run, with its transport; what is missing is said to be missing; the same run
gives the same page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from bench import records, results, stats, wording
from bench.files import naming
from bench.records import SATURATED, Ending, Machine, Run
from bench.results import Line, Part
from bench.scenes import MEMORY, Measure

REPORT = "report.md"

_NAMES = {
    "": "not known, or none was measured",
    "files only": "/etc/hosts, no name server",
    "this machine's": "as this machine is set up: a name server may have been asked, which costs PyTorch's time",
}

METHOD = f"""\
## Method

* **Rounds are interleaved**: every server in turn at one size, then all of them again in another order. What slows the
  machine down for a while slows all of them.
* **A server is new for each sample**: ours a new process, PyTorch's two a new TCPStore in a process that is kept and
  was warmed up unmeasured, because importing torch takes seconds: its memory has been touched before, its table of open
  files is small, as a new process's is. The control has such a process of its own. Only for the scenarios `memory`,
  `resolver` and `busy-trainer` are PyTorch's new processes as well.
* **A number is the median of the rounds**, with min to max in brackets. **A ratio is the median of the ratios taken
  round by round** to the reference, which the run chose.
* **An interval** is between two order statistics: it holds the median with {stats.CONFIDENCE:.0%} confidence or more
  from five rounds on, and is min to max with less confidence below that. It is widened by the noise.
* **The noise** is the control's: the reference a second time, as if it were another server. How far the interval of its
  ratio reaches from 1, there or (the upper quartile) at all sizes, widens every interval. A difference is *beyond the
  noise*, and in bold, when the widened interval does not contain 1. Without a control the noise is unknown, and nobody
  is called ahead.
* **CPU beside wall time**: of the server, per rank or operation, and of the load generators. On a shared machine trust
  CPU before wall time, and ratios before either.
* **Saturated** (`sat.` in the tables, hollow in the figures): in some round the busiest generator used a core, or
  waited for one, for {SATURATED:.0%} of the time or more. There the generator may have set the pace, and the ratio of
  times be nearer to 1 than the servers are; that of CPU still counts.
* **A line ends** where a server was taken no further, with the reason. Nothing is extrapolated.
* **sockets** are real connections over loopback. **memory** is the server's own sessions driven without sockets: it
  says what the server computes, and nothing of the kernel's part. The two are never put into one ratio.
"""


def write_report(run: Run, folder: Path) -> list[Path]:
    """Write `report.md` and the figures into a folder, which is made; the files written, the report first.

    Works with whatever the run has, and says what it has not. Raises OSError, that names the file it cannot write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = _figures(run, folder)
    page = folder / REPORT
    text = render(run, {name: files[0].name for name, files in drawn.items()})
    with naming(page):
        page.write_text(text, encoding="utf-8")
    return [page, *(file for files in drawn.values() for file in files)]


def _figures(run: Run, folder: Path) -> dict[str, list[Path]]:
    """None without matplotlib: what an hour measured has its tables all the same."""
    if find_spec("matplotlib") is None:
        return {}
    from bench.figures import write_figures

    return write_figures(run, folder)


def render(run: Run, images: dict[str, str]) -> str:
    """The page; `images` maps a scene's name to the file name of its figure."""
    scenes: dict[str, list[Part]] = {}
    for part in results.parts(run):
        scenes.setdefault(part.scene.name, []).append(part)
    sections = [_head(run, images), _glance(scenes), _machine(run), METHOD]
    sections += [_scene(parts, images.get(name)) for name, parts in scenes.items()]
    return "\n".join(sections)


def _head(run: Run, images: dict[str, str]) -> str:
    said = ["# The scale benchmark", "", f"`{run.command}`, began {run.began}, took {_duration(run.seconds)}.", ""]
    if not run.complete:
        said += [
            "**This run is not complete**: it was stopped or failed, and what was measured until then is here.",
            "",
        ]
    if not run.samples:
        said += ["**Nothing was measured.**", ""]
    elif not images:
        said += ["There are no figures: matplotlib is not installed (`pip install '.[bench]'`).", ""]
    said += [_headline(run), ""]
    return "\n".join(said)


def _headline(run: Run) -> str:
    found = results.headline(run)
    if found:
        return f"**{found}**"
    return (
        f"Initialization of {results.TUTORIAL_RANKS:,} ranks, for which the tutorial of PyTorch's libuv server shows "
        f"{results.TUTORIAL_SECONDS:.0f} s, was not measured in this run, over sockets or in memory."
    )


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds"


def _glance(scenes: dict[str, list[Part]]) -> str:
    rows = [(parts[0].scene.title, _rounds(parts), _said(parts)) for parts in scenes.values()]
    if not rows:
        return ""
    return "\n".join(["## At a glance", "", _table(["scenario", "rounds", "who is ahead"], rows), ""])


def _rounds(parts: Sequence[Part]) -> str:
    return results.rounds(line for part in parts for line in part.lines)


def _said(parts: Sequence[Part]) -> str:
    return results.verdict_of_all(parts) if any(part.detail for part in parts) else results.verdict(parts[0])


def _machine(run: Run) -> str:
    machine, versions = run.machine, run.versions
    rows = [
        ("processor", machine.processor),
        ("cores", str(machine.cores)),
        ("memory", wording.size_of(machine.memory_bytes)),
        ("kernel", machine.kernel),
        ("cores of the servers; of the load", _pinned(machine)),
        ("load average of the minute before", f"{machine.load_average:.2f}"),
        ("open files of one process", f"{machine.open_files:,}"),
        ("connections that may wait (somaxconn)", f"{machine.backlog:,}" if machine.backlog else "not known"),
        ("names of peers, for PyTorch's servers", _NAMES[machine.names]),
        ("tcpstore_async", f"{versions.tcpstore_async}, {versions.build}, commit {versions.commit or 'unknown'}"),
        ("Python, uvloop", f"{versions.python}, {versions.uvloop}"),
        ("PyTorch", versions.torch or "not installed"),
        ("reference", wording.server(run.reference) or "none: there are no ratios"),
        ("control", "yes" if any(sample.server == "control" for sample in run.samples) else "none: noise unknown"),
    ]
    return "\n".join(["## Machine and versions", "", _table(["", ""], rows), ""])


def _pinned(machine: Machine) -> str:
    if not machine.server_cores and not machine.load_cores:
        return "not pinned, or not known"
    if machine.server_cores == machine.load_cores:
        return f"{machine.server_cores} for both, which compete for it"
    return f"{machine.server_cores or 'not pinned'}; {machine.load_cores or 'not pinned'}"


def _scene(parts: Sequence[Part], image: str | None) -> str:
    scene = parts[0].scene
    said = [f"## {scene.title}", ""]
    if scene.what:
        said += [scene.what, ""]
    said += [f"{_said(parts)}.", ""]
    if image:
        said += [f"![{scene.title}]({image})", ""]
    for part in parts:
        said += _tables(part)
    endings = [_ending(ending, part, parts) for part in parts for ending in part.endings]
    return "\n".join([*said, *endings, ""] if endings else said)


def _ending(ending: Ending, part: Part, parts: Sequence[Part]) -> str:
    name = wording.line(ending.server, ending.transport) + (f" ({part.detail})" if part.detail else "")
    measured = results.line_of(ending, part, parts) is not None
    return f"* {name} {f'ends before {ending.size:,}' if measured else 'not measured'}: {ending.reason}"


def _tables(part: Part) -> list[str]:
    said: list[str] = []
    for transport in ("sockets", "memory"):
        lines = [line for line in part.lines if line.transport == transport]
        if not lines:
            continue
        said += [f"### {part.detail + ', ' if part.detail else ''}{wording.TRANSPORTS[lines[0].transport]}", ""]
        said += [_numbers(part, lines), ""]
        said += [note for line in lines if (note := _marginal(part, line))]
    return said


def _numbers(part: Part, lines: Sequence[Line]) -> str:
    late = any(s.p50_seconds is not None for line in lines for point in line.points.values() for s in point.values())
    head = [
        part.scene.sizes, "server", part.scene.measure.axis, "× reference", part.scene.cpu.axis, "× reference",
        "generator CPU", "busiest",
    ]  # fmt: skip
    rows = []
    for size in sorted({size for line in lines for size in line.sizes}):
        for line in lines:
            if size in line.points:
                rows.append(_row(part, line, size) + ([_latency(line, size)] if late else []))
    return _table([*head, "p50 / p95 / p99"] if late else head, rows)


def _row(part: Part, line: Line, size: int) -> list[str]:
    samples = list(line.points[size].values())
    generator = stats.median([sample.generator_cpu_seconds / max(1, sample.operations) for sample in samples])
    share = max(sample.generator_share for sample in samples)
    return [
        f"{size:,}",
        wording.server(line.server),
        _measured(line, size, part.scene.measure),
        _compared(part, line, size, part.scene.measure),
        _measured(line, size, part.scene.cpu),
        _compared(part, line, size, part.scene.cpu),
        wording.seconds(generator),
        f"{share:.0%}{' sat.' if line.saturated(size) else ''}",
    ]


def _measured(line: Line, size: int, measure: Measure) -> str:
    values = list(line.values(size, measure).values())
    if not values:
        return "–"
    tell = wording.seconds if measure.unit == "seconds" else wording.size_of
    middle = tell(stats.median(values))
    return f"{middle} ({tell(min(values))}–{tell(max(values))})" if len(values) > 1 else f"{middle} (one round)"


def _compared(part: Part, line: Line, size: int, measure: Measure) -> str:
    reference = part.reference(line.transport)
    if reference is line:
        return "1"
    found = part.ratio(line, size, measure)
    if found is None:
        return "–"
    said = wording.ratio(found)
    return f"**{said}**" if found.verdict == "beyond the noise" and line.server != "control" else said


def _latency(line: Line, size: int) -> str:
    samples = list(line.points[size].values())
    columns = [
        [sample.p50_seconds for sample in samples],
        [sample.p95_seconds for sample in samples],
        [sample.p99_seconds for sample in samples],
    ]
    found = [[value for value in column if value is not None] for column in columns]
    return " / ".join(wording.seconds(stats.median(values)) if values else "–" for values in found)


def _marginal(part: Part, line: Line) -> str | None:
    """What one more rank takes, without what is taken however many come."""
    if part.scene.measure is not MEMORY or len(line.sizes) < 2:
        return None
    (least, first), (most, last) = ((size, line.median(size, MEMORY)) for size in (line.sizes[0], line.sizes[-1]))
    if first is None or last is None:
        return None
    each = (last * most - first * least) / (most - least)
    return (
        f"* {wording.server(line.server)}: {wording.size_of(each)} for each more rank between {least:,} and {most:,}.\n"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 2 for a file that cannot be read or written. `arguments` are the command line's."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description="Write the report of a run anew.")
    parser.add_argument("run", type=Path, help="the run's JSON file")
    parser.add_argument("--out", type=Path, help="the folder, by default the run's")
    options = parser.parse_args(arguments)
    try:
        written = write_report(records.read(options.run), options.out or options.run.parent)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    print(written[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
