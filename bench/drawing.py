"""What all figures share: size, colours, markers, axes of values, the frame with title and footer.

Knows matplotlib. Must not know which kind of figure it is for.
Invariant: a server over a transport looks the same in every figure, and no two that we know look alike in
black and white.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from bench import results, wording
from bench.records import SATURATED, Run
from bench.results import Line

WIDTH, HEIGHT, DPI = 12.0, 8.0, 120
"""Inches, and dots per inch of the PNG files."""

LEFT, RIGHT = 0.082, 0.62
"""Where the axes begin and end, as shares of the width; names and endings stand to the right of them."""
HOLLOW = f"the generator was saturated (busy ≥ {SATURATED:.0%} of the time) and may have set the pace"


class Style(NamedTuple):
    colour: str
    marker: str
    dashes: Literal["-"] | tuple[float, Sequence[float]]


# Okabe and Ito's colours, which the colour-blind can tell apart; marker and dashes say the same again for print.
_STYLES = {
    ("uvloop", "sockets"): Style("#0072B2", "o", "-"),
    ("uvloop", "memory"): Style("#009E73", "P", (0, (8, 2))),
    ("threaded", "sockets"): Style("#56B4E9", "s", (0, (4, 1, 1, 1))),
    ("threaded", "memory"): Style("#CC79A7", "X", (0, (6, 1, 1, 1, 1, 1))),
    ("libuv", "sockets"): Style("#D55E00", "^", (0, (5, 2))),
    ("legacy", "sockets"): Style("#E69F00", "D", (0, (1, 1))),
    ("control", "sockets"): Style("#777777", "v", (0, (2, 3))),
}
_OTHER = Style("#666666", "*", (0, (1, 3)))

RC: dict[Any, Any] = {
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


def canvas(title: str, said: str, run: Run, lines: Sequence[Line]) -> Figure:
    """A figure of these lines, no axes yet: title, a sentence, and at the foot where and how it was measured."""
    figure = Figure(figsize=(WIDTH, HEIGHT))
    FigureCanvasAgg(figure)
    figure.text(0.012, 0.982, title, fontsize=15, fontweight="bold", va="top")
    figure.text(0.012, 0.942, textwrap.fill(said, 138), fontsize=10.5, va="top", linespacing=1.35)
    figure.text(0.012, 0.008, _footer(run, lines), fontsize=8, color="#444444", va="bottom")
    return figure


def _footer(run: Run, lines: Sequence[Line]) -> str:
    versions, machine = run.versions, run.machine
    torch = f", PyTorch {versions.torch}" if versions.torch else ""
    return (
        f"{_rounds(lines)}. {run.began[:10]}, {machine.processor}, {machine.cores} cores"
        f", {machine.kernel}; tcpstore_async {versions.tcpstore_async} ({versions.build}){torch}"
        f"{'' if run.complete else '. THE RUN IS NOT COMPLETE'}"
    )


def _rounds(lines: Sequence[Line]) -> str:
    """How many there are of each point."""
    found = results.rounds(lines)
    return "One round" if found == "1" else f"Medians of {found} rounds, bars from min to max"


def style_of(line: Line) -> Style:
    """How a line is drawn; servers that nobody knows share a grey one."""
    return _STYLES.get((line.server, line.transport), _OTHER)


Unit = Literal["seconds", "bytes", "times"]


def scale_values(axes: Axes, unit: Unit) -> None:
    """Make the vertical axis logarithmic, with numbers in a unit; after everything was drawn."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value, unit)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    ticks = _ticks(*axes.get_ylim(), unit)
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    if ticks[1] < 10 * ticks[0]:
        axes.yaxis.set_minor_locator(NullLocator())


def name_values(axes: Axes, name: str) -> None:
    """At the figure's edge, whatever room the numbers take."""
    box = axes.get_position()
    axes.figure.text(0.013, (box.y0 + box.y1) / 2, name, rotation="vertical", ha="center", va="center")


def _ticks(low: float, high: float, unit: Unit) -> list[float]:
    """At least two round numbers within a logarithmic axis: the coarsest steps that give as many."""
    base = 2.0 if unit == "bytes" else 10.0
    steps: tuple[tuple[float, ...], ...] = ((1,), (1, 1.5)) if base == 2 else ((1,), (1, 2, 5), (1, 1.5, 2, 3, 5, 7))
    exponents = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
    for within in steps:
        ticks = [step * base**exponent for exponent in exponents for step in within]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 2:
            return ticks
    return [low, high]


def _tick(value: float, unit: Unit) -> str:
    if unit == "times":
        return f"{value:,.9g}"
    number, _, scale = (wording.seconds(value) if unit == "seconds" else wording.size_of(value)).partition(" ")
    return f"{float(number.replace(',', '')):,.9g} {scale}"


def any_saturated(lines: Sequence[Line]) -> bool:
    """Whether a point of any of them is hollow."""
    return any(line.saturated(size) for line in lines for size in line.sizes)


def handle(line: Line) -> Line2D:
    """The line's sample in a legend."""
    style = style_of(line)
    return Line2D(
        [], [], color=style.colour, linestyle=style.dashes, linewidth=1.8, marker=style.marker, markersize=8,
        markeredgewidth=1.6, label=line.label,
    )  # fmt: skip


def hollow() -> Line2D:
    """The sample in a legend of a saturated point."""
    return Line2D(
        [], [], color="#444444", linestyle="none", marker="o", markerfacecolor="white", markersize=8,
        markeredgewidth=1.6, label=f"hollow: {HOLLOW}",
    )  # fmt: skip
