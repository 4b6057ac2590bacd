"""The figure of a scenario with several parts, such as operations: bars of throughput, with latencies below.

Knows what stands where in such a figure. Must not know how anything was measured, and computes nothing that the report
would have to repeat.
Invariant: every bar drawn was measured; one that is missing for a reason has it told below.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from bench import results, stats, wording
from bench.drawing import LEFT, any_saturated, canvas, handle, hollow, name_values, scale_values, style_of
from bench.records import Run, Transport
from bench.results import Line, Part
from bench.scenes import P99


def grouped(parts: Sequence[Part], run: Run) -> Figure:
    """Above operations per second, below p50, p95 and p99, a group for each part; at the largest size of each line."""
    figure = canvas(
        parts[0].scene.title, results.verdict_of_all(parts), run, [line for part in parts for line in part.lines]
    )
    upper = figure.add_axes((LEFT + 0.012, 0.52, 0.973 - LEFT, 0.34))
    bottom = 0.17 + 0.018 * len(_missing(parts))
    lower = figure.add_axes((LEFT + 0.012, bottom, 0.973 - LEFT, 0.46 - bottom), sharex=upper)
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
    size, style = line.sizes[-1], style_of(line)
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
    style = style_of(line)
    rows = [[s.p50_seconds, s.p95_seconds, s.p99_seconds] for s in samples]
    found = [[value for value in column if value is not None] for column in zip(*rows, strict=True)]
    middles = [stats.median(values) for values in found if values]
    if not middles:
        return
    axes.plot([x] * len(middles), middles, style.marker, linestyle="-", color=style.colour, linewidth=1.2, markersize=5)


def _ratio_over(axes: Axes, place: int, part: Part) -> None:
    found = part.comparison()
    if found is None:
        return
    axes.annotate(
        wording.times(found.time.median), (place, 1.0), xycoords=("data", "axes fraction"), ha="center", va="bottom",
        fontsize=9, fontweight="bold" if found.time.verdict == "beyond the noise" else "normal",
    )  # fmt: skip


def _axes_of_operations(upper: Axes, lower: Axes, parts: Sequence[Part]) -> None:
    name_values(upper, "operations per second")
    name_values(lower, "latency: p50, p95, p99")
    upper.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    upper.grid(axis="x", visible=False)
    upper.tick_params(labelbottom=False)
    lower.grid(axis="x", visible=False)
    if any(line.values(line.sizes[-1], P99) for part in parts for line in part.lines):
        scale_values(lower, P99)
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
    handles = [handle(line) for line in lines]
    if any(any_saturated(part.lines) for part in parts):
        handles.append(hollow())
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.005, 0.03), ncol=3, frameon=False, fontsize=9.5,
        handlelength=3.6,
    )  # fmt: skip
