"""A run's figures, as PNG and SVG.

Knows matplotlib and how a part of a run is drawn. Must not know how anything was measured, and computes nothing that
the report would have to repeat: ratios and verdicts come from `bench/results.py`.
Invariant: every point drawn was measured; where a line ends before others do, its reason stands beside it. The same run
gives the same files.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from bench import results, stats, wording
from bench.labels import spread_out
from bench.records import SATURATED, Ending, Run, Transport
from bench.results import Line, Part
from bench.scenes import P99, Measure

WIDTH, HEIGHT, DPI = 12.0, 8.0, 120
"""Inches, and dots per inch of the PNG files."""

_LEFT, _RIGHT = 0.082, 0.64
"""Where the axes begin and end, as shares of the width; names and endings stand to the right of them."""
_COLUMNS = 42
_LINE = 0.0178
"""Characters in a line of the column to the right, and its height as a share of the figure's."""
_HOLLOW = f"the generator was saturated (≥ {SATURATED:.0%} of a core) and may have set the pace"


class _Style(NamedTuple):
    colour: str
    marker: str
    dashes: Literal["-"] | tuple[float, Sequence[float]]


# Okabe and Ito's colours, which the colour-blind can tell apart; marker and dashes say the same again for print.
_STYLES = {
    ("uvloop", "sockets"): _Style("#0072B2", "o", "-"),
    ("uvloop", "memory"): _Style("#009E73", "P", (0, (8, 2))),
    ("threaded", "sockets"): _Style("#56B4E9", "s", (0, (4, 1, 1, 1))),
    ("threaded", "memory"): _Style("#CC79A7", "X", (0, (6, 1, 1, 1, 1, 1))),
    ("libuv", "sockets"): _Style("#D55E00", "^", (0, (5, 2))),
    ("legacy", "sockets"): _Style("#E69F00", "D", (0, (1, 1))),
    ("control", "sockets"): _Style("#777777", "v", (0, (2, 3))),
}
_OTHER = _Style("#666666", "*", (0, (1, 3)))

_RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tcpstore_async",
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
}


def write_figures(run: Run, folder: Path) -> dict[str, list[Path]]:
    """One figure for each scenario that has samples, as `NAME.png` and `NAME.svg`; the files of each by its name."""
    written: dict[str, list[Path]] = {}
    scenes: dict[str, list[Part]] = {}
    for part in results.parts(run):
        if part.lines:
            scenes.setdefault(part.scene.name, []).append(part)
    with matplotlib.rc_context(_RC):
        for name, parts in scenes.items():
            written[name] = _save(draw(parts, run), folder / name)
    return written


def draw(parts: Sequence[Part], run: Run) -> Figure:
    """The figure of one scene: bars if it has several parts, such as operations, otherwise lines over sizes."""
    with matplotlib.rc_context(_RC):
        return _grouped(parts, run) if any(part.detail for part in parts) else _growing(parts[0], run)


def _save(figure: Figure, stem: Path) -> list[Path]:
    png, svg = stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.svg")
    figure.savefig(png, dpi=DPI, metadata={"Software": None})
    figure.savefig(svg, metadata={"Date": None})
    return [png, svg]


def _canvas(title: str, said: str, run: Run) -> Figure:
    figure = Figure(figsize=(WIDTH, HEIGHT))
    FigureCanvasAgg(figure)
    figure.text(0.012, 0.982, title, fontsize=15, fontweight="bold", va="top")
    figure.text(0.012, 0.942, textwrap.fill(said, 138), fontsize=10.5, va="top", linespacing=1.35)
    figure.text(0.012, 0.008, _footer(run), fontsize=8, color="#444444", va="bottom")
    return figure


def _footer(run: Run) -> str:
    versions, machine = run.versions, run.machine
    torch = f", PyTorch {versions.torch}" if versions.torch else ""
    return (
        f"{_rounds(run)}. {run.began[:10]}, {machine.processor}, {machine.cores} cores"
        f", {machine.kernel}; tcpstore_async {versions.tcpstore_async} ({versions.build}){torch}"
        f"{'' if run.complete else '. THE RUN IS NOT COMPLETE'}"
    )


def _rounds(run: Run) -> str:
    """How many there are of each point."""
    found = sorted(
        {len(rounds) for part in results.parts(run) for line in part.lines for rounds in line.points.values()}
    )
    if found == [1]:
        return "One round"
    return f"Medians of {found[0] if len(found) == 1 else f'{found[0]} to {found[-1]}'} rounds, bars from min to max"


# Lines over sizes.


def _growing(part: Part, run: Run) -> Figure:
    figure = _canvas(part.scene.title, results.verdict(part), run)
    upper = figure.add_axes((_LEFT, 0.455, _RIGHT - _LEFT, 0.405))
    lower = figure.add_axes((_LEFT, 0.105, _RIGHT - _LEFT, 0.285), sharex=upper)
    for axes, measure in ((upper, part.scene.measure), (lower, part.scene.cpu)):
        for line in part.lines:
            _draw(axes, line, measure)
        _axis_of_values(axes, measure)
        _name_values(axes, measure.axis)
    _axis_of_sizes(lower, part)
    upper.tick_params(labelbottom=False)
    figure.draw_without_rendering()
    for axes, measure in ((upper, part.scene.measure), (lower, part.scene.cpu)):
        _tag(figure, axes, part, measure)
    _column(figure, part)
    return figure


def _draw(axes: Axes, line: Line, measure: Measure) -> None:
    style = _style(line)
    points = [(size, median) for size in line.sizes if (median := line.median(size, measure)) is not None]
    if not points:
        return
    axes.plot(*zip(*points, strict=True), color=style.colour, linestyle=style.dashes, linewidth=1.8)
    for size, median in points:
        values = line.values(size, measure).values()
        spread = [[median - min(values)], [max(values) - median]]
        axes.errorbar(size, median, yerr=spread, color=style.colour, capsize=3, linewidth=1.1, fmt="none")
        name = f"saturated-{line.server}-{line.transport}-{size}-{measure.name.replace(' ', '-')}"
        _mark(axes, size, median, style, name if line.saturated(size) else None)


def _mark(axes: Axes, x: float, y: float, style: _Style, saturated: str | None) -> None:
    """Hollow, and named so in the SVG file, where the generator was saturated."""
    axes.plot(
        [x], [y], style.marker, color=style.colour, markerfacecolor="white" if saturated else style.colour,
        markersize=8, markeredgewidth=1.6, linestyle="none", gid=saturated,
    )  # fmt: skip


def _style(line: Line) -> _Style:
    return _STYLES.get((line.server, line.transport), _OTHER)


def _axis_of_values(axes: Axes, measure: Measure) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value, measure)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    ticks = _ticks(*axes.get_ylim(), measure)
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    if ticks[1] < 10 * ticks[0]:
        axes.yaxis.set_minor_locator(NullLocator())


def _name_values(axes: Axes, name: str) -> None:
    """At the figure's edge, whatever room the numbers take."""
    box = axes.get_position()
    axes.figure.text(0.013, (box.y0 + box.y1) / 2, name, rotation="vertical", ha="center", va="center")


def _ticks(low: float, high: float, measure: Measure) -> list[float]:
    """At least two round numbers within a logarithmic axis: the coarsest steps that give as many."""
    base = 2.0 if measure.unit == "bytes" else 10.0
    steps: tuple[tuple[float, ...], ...] = ((1,), (1, 1.5)) if base == 2 else ((1,), (1, 2, 5), (1, 1.5, 2, 3, 5, 7))
    exponents = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
    for within in steps:
        ticks = [step * base**exponent for exponent in exponents for step in within]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 2:
            return ticks
    return [low, high]


def _tick(value: float, measure: Measure) -> str:
    number, _, unit = (wording.seconds(value) if measure.unit == "seconds" else wording.size_of(value)).partition(" ")
    return f"{float(number.replace(',', '')):,.9g} {unit}"


def _axis_of_sizes(axes: Axes, part: Part) -> None:
    sizes = sorted({size for line in part.lines for size in line.sizes})
    axes.set_xscale("log", base=2)
    axes.set_xlabel(part.scene.sizes)
    axes.set_xlim(sizes[0] / 1.2, sizes[-1] * 1.2)
    shown = _apart(sizes, math.log(axes.get_xlim()[1] / axes.get_xlim()[0]) * 0.055)
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: wording.short(round(value))))
    axes.xaxis.set_minor_locator(NullLocator())


def _apart(sizes: Sequence[int], least: float) -> list[int]:
    """Those whose numbers have room at the axis (logarithms this far apart); powers of two before others."""
    chosen: list[int] = []
    for size in sorted(sizes, key=lambda size: (size & (size - 1) != 0, size)):
        if all(abs(math.log(size / other)) >= least for other in chosen):
            chosen.append(size)
    return sorted(chosen)


# What stands beside the lines: the ratio where it was measured, and to the right of all, names and endings.


class _Tag(NamedTuple):
    x: float
    y: float
    text: str
    colour: str


def _tag(figure: Figure, axes: Axes, part: Part, measure: Measure) -> None:
    """How many times the reference, at the largest size in common; and a bar across where a line ends for a reason."""
    tags: dict[int, list[_Tag]] = {}
    for line in part.lines:
        found = part.last_ratio(line, measure)
        if found:
            place = _place(figure, axes, found[0], line, measure)
            tags.setdefault(found[0], []).append(_Tag(*place, wording.times(found[1].median), _style(line).colour))
        if part.ending(line):
            _end(figure, axes, line, measure)
    low, high = axes.get_position().y0, axes.get_position().y1
    for those in tags.values():
        places = spread_out([tag.y for tag in those], [0.019] * len(those), low, high)
        for tag, y in zip(those, places, strict=True):
            # Beneath the lines: no label covers a point.
            axes.text(
                tag.x + 0.011, y, tag.text, fontsize=9, fontweight="bold", color=_darker(tag.colour), va="center",
                transform=figure.transFigure, zorder=1.5, clip_on=False,
                bbox={"boxstyle": "square,pad=0.05", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
            )  # fmt: skip


def _place(figure: Figure, axes: Axes, size: int, line: Line, measure: Measure) -> tuple[float, float]:
    """Of a line's point, in shares of the figure."""
    in_pixels = axes.transData.transform((size, line.median(size, measure) or 1.0))
    x, y = figure.transFigure.inverted().transform(in_pixels)
    return float(x), float(y)


def _end(figure: Figure, axes: Axes, line: Line, measure: Measure) -> None:
    sizes = [size for size in line.sizes if line.values(size, measure)]
    if not sizes:
        return
    x, y = _place(figure, axes, sizes[-1], line, measure)
    name = f"end-{line.server}-{line.transport}-{measure.name.replace(' ', '-')}"
    colour = _style(line).colour
    figure.add_artist(Line2D([x + 0.0085] * 2, [y - 0.014, y + 0.014], color=colour, linewidth=2.4, gid=name))


def _darker(colour: str) -> str:
    """Light colours cannot be read as text."""
    red, green, blue = to_rgb(colour)
    return to_hex((red * 0.72, green * 0.72, blue * 0.72))


class _Entry(NamedTuple):
    handle: Line2D
    name: str
    about: str

    @property
    def height(self) -> float:
        return 0.034 if not self.about else 0.036 + (self.about.count("\n") + 1) * _LINE


def _column(figure: Figure, part: Part) -> None:
    """The legend: each line's name, its ratios with their intervals, and why it goes no further."""
    told: dict[str, str] = {}
    entries = [_entry(_handle(line), line.label, _about(part, line, told)) for line in part.lines]
    for ending in _without_line(part):
        name = wording.line(ending.server, ending.transport)
        entries.append(_entry(Line2D([], [], linestyle="none"), name, [f"not measured: {_why(ending, told)}"]))
    if _any_saturated(part.lines):
        entries.append(_entry(_hollow(), "hollow", [_HOLLOW]))
    # A crowd has to stand closer, in smaller print.
    scale = min(1.0, 0.82 / sum(entry.height for entry in entries))
    y = 0.86
    for entry in entries:
        _write(figure, y, entry, scale)
        y -= entry.height * scale


def _entry(handle: Line2D, name: str, about: Sequence[str]) -> _Entry:
    return _Entry(handle, name, "\n".join(textwrap.fill(sentence, _COLUMNS) for sentence in about))


def _write(figure: Figure, y: float, entry: _Entry, scale: float) -> None:
    """With its top at `y`, as a share of the figure's height."""
    x = _RIGHT + 0.052
    sample = Line2D([x, x + 0.02, x + 0.04], [y - 0.008 * scale] * 3, markevery=[1])
    sample.update_from(entry.handle)
    sample.set_transform(figure.transFigure)
    figure.add_artist(sample)
    figure.text(x + 0.048, y, entry.name, fontsize=9 * scale, fontweight="bold", va="top")
    figure.text(x + 0.048, y - 0.021 * scale, entry.about, fontsize=8.5 * scale, va="top", linespacing=1.2)


def _about(part: Part, line: Line, told: dict[str, str]) -> list[str]:
    said = []
    if part.reference(line.transport) is line and part.comparison():
        said.append("the reference: 1×")
    for measure in (part.scene.measure, part.scene.cpu):
        found = part.last_ratio(line, measure)
        if found:
            said.append(f"{measure.name} {wording.ratio(found[1])} at {found[0]:,}")
    ending = part.ending(line)
    if ending:
        said.append(f"ends before {ending.size:,}: {_why(ending, told)}")
    return said


def _why(ending: Ending, told: dict[str, str]) -> str:
    """The reason, once; after that whose it is as well. `told` maps those told to whose they were."""
    name = wording.line(ending.server, ending.transport)
    first = told.setdefault(ending.reason, name)
    return ending.reason if first == name else f"as {first}"


def _without_line(part: Part) -> list[Ending]:
    drawn = {(line.server, line.transport) for line in part.lines}
    return [ending for ending in part.endings if (ending.server, ending.transport) not in drawn]


def _any_saturated(lines: Sequence[Line]) -> bool:
    return any(line.saturated(size) for line in lines for size in line.sizes)


def _handle(line: Line) -> Line2D:
    style = _style(line)
    return Line2D(
        [], [], color=style.colour, linestyle=style.dashes, linewidth=1.8, marker=style.marker, markersize=8,
        markeredgewidth=1.6, label=line.label,
    )  # fmt: skip


def _hollow() -> Line2D:
    return Line2D(
        [], [], color="#444444", linestyle="none", marker="o", markerfacecolor="white", markersize=8,
        markeredgewidth=1.6, label=f"hollow: {_HOLLOW}",
    )  # fmt: skip


# Bars by operation.


def _grouped(parts: Sequence[Part], run: Run) -> Figure:
    figure = _canvas(parts[0].scene.title, results.verdict_of_all(parts), run)
    upper = figure.add_axes((_LEFT + 0.012, 0.52, 0.973 - _LEFT, 0.34))
    bottom = 0.17 + 0.018 * len(_missing(parts))
    lower = figure.add_axes((_LEFT + 0.012, bottom, 0.973 - _LEFT, 0.46 - bottom), sharex=upper)
    keys = _keys(parts)
    for place, part in enumerate(parts):
        for line in part.lines:
            x = place + (keys.index((line.server, line.transport)) - (len(keys) - 1) / 2) * 0.8 / len(keys)
            _bar(upper, x, 0.7 / len(keys), line)
            _latencies(lower, x, line)
        _ratio_over(upper, place, part)
    _axes_of_operations(upper, lower, parts)
    every = {(line.server, line.transport): line for part in parts for line in part.lines}
    _legend_of_bars(figure, [every[key] for key in keys], parts)
    return figure


def _keys(parts: Sequence[Part]) -> list[tuple[str, Transport]]:
    keys = {wording.place(line.server, line.transport): line for part in parts for line in part.lines}
    return [(keys[place].server, keys[place].transport) for place in sorted(keys)]


def _bar(axes: Axes, x: float, width: float, line: Line) -> None:
    size, style = line.sizes[-1], _style(line)
    rates = [sample.operations / sample.wall_seconds for sample in line.points[size].values() if sample.wall_seconds]
    if not rates:
        return
    middle = stats.median(rates)
    face = "white" if line.saturated(size) else style.colour
    axes.bar([x], [middle], width, color=face, edgecolor=style.colour, linewidth=1.5)
    axes.errorbar(
        x, middle, yerr=[[middle - min(rates)], [max(rates) - middle]], color="#222222", capsize=2, fmt="none"
    )


def _latencies(axes: Axes, x: float, line: Line) -> None:
    samples = list(line.points[line.sizes[-1]].values())
    style = _style(line)
    rows = [[s.p50_seconds, s.p95_seconds, s.p99_seconds] for s in samples]
    found = [[value for value in column if value is not None] for column in zip(*rows, strict=True)]
    middles = [stats.median(values) for values in found if values]
    if not middles:
        return
    axes.plot([x] * len(middles), middles, color=style.colour, linewidth=1.2)
    for middle, face in zip(middles, (style.colour, "white", style.colour), strict=False):
        axes.plot([x], [middle], style.marker, color=style.colour, markerfacecolor=face, markersize=5)


def _ratio_over(axes: Axes, place: int, part: Part) -> None:
    found = part.comparison()
    if found is None:
        return
    axes.annotate(
        wording.times(found.time.median), (place, 1.0), xycoords=("data", "axes fraction"), ha="center", va="bottom",
        fontsize=9, fontweight="bold" if found.time.verdict == "beyond the noise" else "normal",
    )  # fmt: skip


def _axes_of_operations(upper: Axes, lower: Axes, parts: Sequence[Part]) -> None:
    _name_values(upper, "operations per second")
    _name_values(lower, "latency: p50, p95, p99")
    upper.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    upper.grid(axis="x", visible=False)
    upper.tick_params(labelbottom=False)
    lower.grid(axis="x", visible=False)
    if any(line.values(line.sizes[-1], P99) for part in parts for line in part.lines):
        _axis_of_values(lower, P99)
    lower.set_xticks(range(len(parts)), [part.detail or part.scene.name for part in parts])
    lower.set_xlim(-0.6, len(parts) - 0.4)
    size = max(line.sizes[-1] for part in parts for line in part.lines)
    said = f"{size:,} {parts[0].scene.sizes}; above the bars: ours over the reference, in time; bold beyond the noise"
    lower.set_xlabel("\n".join([said, *_missing(parts)]), fontsize=9)


def _missing(parts: Sequence[Part]) -> list[str]:
    """Bars that are not there, and why."""
    found: dict[tuple[str, str], list[str]] = {}
    for part in parts:
        for ending in part.endings:
            key = (wording.line(ending.server, ending.transport), ending.reason)
            found.setdefault(key, []).append(part.detail or part.scene.name)
    said = [f"{name} not measured in {', '.join(details)}: {reason}" for (name, reason), details in found.items()]
    return textwrap.wrap("; ".join(said), 150)


def _legend_of_bars(figure: Figure, lines: Sequence[Line], parts: Sequence[Part]) -> None:
    handles = [_handle(line) for line in lines]
    if any(_any_saturated(part.lines) for part in parts):
        handles.append(_hollow())
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.005, 0.03), ncol=3, frameon=False, fontsize=9.5,
        handlelength=3.6,
    )  # fmt: skip
