"""The figure of a scenario with several parts, such as operations: throughput, with latencies below.

Knows what stands where in such a figure. Must not know how anything was measured, and computes nothing that the report
would have to repeat.
Invariant: every point drawn was measured; one that is missing for a reason has it told below. There are no bars: on a
logarithmic axis their length would say nothing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bench import results, stats, wording
from bench.drawing import LEFT, any_saturated, canvas, handle, hollow, name_values, scale_values, style_of
from bench.records import Run, Transport
from bench.results import Line, Part
from bench.scenes import P99

_ABREAST = 3
_ROW = 0.026
"""Servers in a row of the legend, and its height as a share of the figure's."""
_LOOK: dict[str, Any] = {"frameon": False, "fontsize": 9.5, "handlelength": 3.6}


def grouped(scene: Sequence[Part], run: Run) -> Figure:
    """Above operations per second, below p50, p95 and p99, a group for each part; at the largest size of each line."""
    parts = [part for part in scene if part.lines]
    missing = _missing(scene)
    figure = canvas(
        parts[0].scene.title, results.verdict_of_all(parts), run, [line for part in parts for line in part.lines]
    )
    keys = _keys(parts)
    every = {(line.server, line.transport): line for part in parts for line in part.lines}
    handles = [handle(every[key]) for key in keys]
    bottom = 0.155 + 0.018 * len(missing) + _legend(figure, handles, parts)
    height = (0.80 - bottom) / 2
    upper = figure.add_axes((LEFT + 0.012, 0.86 - height, 0.973 - LEFT, height))
    lower = figure.add_axes((LEFT + 0.012, bottom, 0.973 - LEFT, height), sharex=upper)
    for place, part in enumerate(parts):
        for line in part.lines:
            x = place + (keys.index((line.server, line.transport)) - (len(keys) - 1) / 2) * 0.8 / len(keys)
            _rate(upper, x, line)
            _latencies(lower, x, line)
        _ratio_over(upper, place, part)
    _axes_of_operations(upper, lower, parts, missing)
    return figure


def _keys(parts: Sequence[Part]) -> list[tuple[str, Transport]]:
    keys = {wording.place(line.server, line.transport): line for part in parts for line in part.lines}
    return [(keys[place].server, keys[place].transport) for place in sorted(keys)]


def _rate(axes: Axes, x: float, line: Line) -> None:
    size, style = line.sizes[-1], style_of(line)
    rates = [sample.operations / sample.wall_seconds for sample in line.points[size].values() if sample.wall_seconds]
    if not rates:
        return
    middle = stats.median(rates)
    spread = [[middle - min(rates)], [max(rates) - middle]]
    axes.errorbar(x, middle, yerr=spread, color=style.colour, capsize=3, linewidth=1.1, fmt="none")
    axes.plot(
        [x], [middle], style.marker, color=style.colour, markersize=8, markeredgewidth=1.6, zorder=3,
        markerfacecolor="white" if line.saturated(size) else style.colour,
    )  # fmt: skip


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


def _axes_of_operations(upper: Axes, lower: Axes, parts: Sequence[Part], missing: Sequence[str]) -> None:
    name_values(upper, "operations per second")
    name_values(lower, "latency: p50, p95, p99")
    scale_values(upper, "times")
    upper.grid(axis="x", visible=False)
    upper.tick_params(labelbottom=False)
    lower.grid(axis="x", visible=False)
    if any(line.values(line.sizes[-1], P99) for part in parts for line in part.lines):
        scale_values(lower, P99.unit)
    lower.set_xticks(range(len(parts)), [part.detail or part.scene.name for part in parts])
    lower.set_xlim(-0.6, len(parts) - 0.4)
    size = max(line.sizes[-1] for part in parts for line in part.lines)
    said = f"{size:,} {parts[0].scene.sizes}; above the points: ours over the reference, in time; bold beyond the noise"
    lower.set_xlabel("\n".join([said, *missing]), fontsize=9)


def _missing(parts: Sequence[Part]) -> list[str]:
    """Points that are not there, or are of fewer clients than others, and why."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for part in parts:
        for ending in part.endings:
            line = results.line_of(ending, part, parts)
            how = f"goes to {line.sizes[-1]:,} {part.scene.sizes}" if line else "not measured"
            key = (wording.line(ending.server, ending.transport), how, ending.reason)
            found.setdefault(key, []).append(part.detail or "all")
    names: dict[str, list[str]] = {}
    for (name, how, reason), details in found.items():
        names.setdefault(f"{how} in {', '.join(details)}: {reason}", []).append(name)
    said = [f"{' and '.join(those)} {what}" for what, those in names.items()]
    return textwrap.wrap("; ".join(said), 150)


def _legend(figure: Figure, handles: list[Line2D], parts: Sequence[Part]) -> float:
    """Its height over that of two rows, as a share of the figure's; what hollow means has a row of its own."""
    said = [hollow()] if any(any_saturated(part.lines) for part in parts) else []
    rows = -(-len(handles) // _ABREAST)
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.005, 0.03 + _ROW * len(said)), ncol=_ABREAST, **_LOOK
    )
    if said:
        figure.legend(handles=said, loc="lower left", bbox_to_anchor=(0.005, 0.03), **_LOOK)
    return _ROW * (rows - 2 + len(said))
