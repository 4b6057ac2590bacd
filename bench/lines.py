"""The figure of a scenario that was measured at several sizes: lines, with the server's CPU below.

Knows what stands where in such a figure. Must not know how anything was measured, and computes nothing that the report
would have to repeat.
Invariant: every point drawn was measured; where a line ends before others do, its reason stands beside it; nothing is
written over anything else.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from bench import results, stats, wording
from bench.drawing import (
    HOLLOW,
    LEFT,
    RIGHT,
    Style,
    any_saturated,
    canvas,
    handle,
    hollow,
    name_values,
    scale_values,
    style_of,
)
from bench.labels import Box, Point, beside, spread_out
from bench.records import Ending, Run
from bench.results import Line, Part
from bench.scenes import Measure

_COLUMNS = 42
_LINE = 0.0178
"""Characters in a line of the column to the right, and its height as a share of the figure's."""


def growing(part: Part, run: Run) -> Figure:
    """Above what the scenario is about, below the server's CPU, to the right names, ratios and endings."""
    figure = canvas(part.scene.title, results.verdict(part), run, part.lines)
    upper = figure.add_axes((LEFT, 0.455, RIGHT - LEFT, 0.405))
    lower = figure.add_axes((LEFT, 0.105, RIGHT - LEFT, 0.285), sharex=upper)
    for axes, measure in ((upper, part.scene.measure), (lower, part.scene.cpu)):
        for line in part.lines:
            _draw(axes, line, measure)
        scale_values(axes, measure.unit)
        name_values(axes, measure.axis)
    _axis_of_sizes(lower, part)
    upper.tick_params(labelbottom=False)
    figure.draw_without_rendering()
    for axes, measure in ((upper, part.scene.measure), (lower, part.scene.cpu)):
        _tag(figure, axes, part, measure)
    _column(figure, part)
    return figure


def _draw(axes: Axes, line: Line, measure: Measure) -> None:
    style = style_of(line)
    points = _points(line, measure)
    if not points:
        return
    axes.plot(*zip(*points, strict=True), color=style.colour, linestyle=style.dashes, linewidth=1.8)
    for size, median in points:
        values = [value for value in line.values(size, measure).values() if value > 0]
        spread = [[median - min(values)], [max(values) - median]]
        axes.errorbar(size, median, yerr=spread, color=style.colour, capsize=3, linewidth=1.1, fmt="none", zorder=2.6)
        name = f"saturated-{line.server}-{line.transport}-{size}-{measure.name.replace(' ', '-')}"
        _mark(axes, size, median, style, name if line.saturated(size) else None)


def _points(line: Line, measure: Measure) -> list[tuple[int, float]]:
    """Sizes and medians, without those that are 0, for which a logarithmic axis has no place."""
    return [(size, median) for size in line.sizes if (median := line.median(size, measure))]


def _mark(axes: Axes, x: float, y: float, style: Style, saturated: str | None) -> None:
    """Hollow, and named so in the SVG file, where the generator was saturated."""
    axes.plot(
        [x], [y], style.marker, color=style.colour, markerfacecolor="white" if saturated else style.colour,
        markersize=8, markeredgewidth=1.6, linestyle="none", gid=saturated, zorder=3,
    )  # fmt: skip


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


_HEIGHT, _WIDTH = 0.019, 0.0078
"""Of a label and of one of its characters, as shares of the figure's."""
_MARK = (0.0058, 0.0088)
"""From the middle of a point to its edges, as shares of the figure's width and height."""
_BAR, _BAR_WIDTH, _BAR_HEIGHT = 0.0085, 0.0018, 0.014
"""From a point to the bar where its line ends; from the middle of that to its edges."""
_ASIDE = 0.0115
"""From a point to its label."""
_LEGEND = RIGHT + 0.072

# What stands beside the lines: the ratio where it was measured, and to the right of all, names and endings.


class _Tag(NamedTuple):
    box: Box
    text: str
    colour: str


def _tag(figure: Figure, axes: Axes, part: Part, measure: Measure) -> None:
    """How many times the reference, at the largest size in common; and a bar across where a line ends for a reason."""
    tags: dict[int, list[_Tag]] = {}
    for line in part.lines:
        found = part.last_ratio(line, measure)
        if found:
            text = wording.times(found[1].median) + _fewer(part, line, *found, measure)
            x, y = _place(figure, axes, found[0], line, measure)
            tags.setdefault(found[0], []).append(_Tag(_box(x, y, text), text, style_of(line).colour))
        if part.ending(line):
            _end(figure, axes, line, measure)
    pieces, marks = _drawn(figure, axes, part, measure)
    low, high = axes.get_position().y0, axes.get_position().y1
    placed: list[Box] = []
    for size in sorted(tags, reverse=True):
        those = sorted(tags[size], key=lambda tag: tag.box.low)
        middles = spread_out([(tag.box.low + tag.box.high) / 2 for tag in those], [_HEIGHT] * len(those), low, high)
        for tag, y in zip(those, middles, strict=True):
            wanted = tag.box._replace(low=y - _HEIGHT / 2, high=y + _HEIGHT / 2)
            placed.append(beside(wanted, pieces, [*marks, *placed], low, high))
            _write_tag(figure, axes, tag, placed[-1])


def _drawn(figure: Figure, axes: Axes, part: Part, measure: Measure) -> tuple[list[tuple[Point, Point]], list[Box]]:
    """What a label must not cover: the pieces between points; the points, and the bars where lines end."""
    pieces: list[tuple[Point, Point]] = []
    marks: list[Box] = []
    for line in part.lines:
        places = [_place(figure, axes, size, line, measure) for size, _ in _points(line, measure)]
        pieces += itertools.pairwise(places)
        marks += [Box(x, y, x, y).padded(*_MARK) for x, y in places]
        if places and part.ending(line):
            x, y = places[-1]
            marks.append(Box(x + _BAR, y, x + _BAR, y).padded(_BAR_WIDTH, _BAR_HEIGHT))
    return pieces, marks


def _fewer(part: Part, line: Line, size: int, found: stats.Ratio, measure: Measure) -> str:
    """That a ratio is of fewer rounds than the reference has: it need not be the distance of the two points."""
    reference = part.reference(line.transport)
    if reference is None or found.rounds >= len(reference.values(size, measure)):
        return ""
    return f", {wording.rounds(found.rounds)}"


def _box(x: float, y: float, text: str) -> Box:
    """To the right of a point, or to its left where it would stand in the legend."""
    width = len(text) * _WIDTH
    left = x + _ASIDE if x + _ASIDE + width < _LEGEND else x - _ASIDE - width
    return Box(left, y - _HEIGHT / 2, left + width, y + _HEIGHT / 2)


def _write_tag(figure: Figure, axes: Axes, tag: _Tag, box: Box) -> None:
    """Over lines and points: where there is no room elsewhere, a ratio without its first digit would be another one."""
    axes.text(
        box.left, (box.low + box.high) / 2, tag.text, fontsize=9, fontweight="bold", color=_darker(tag.colour),
        va="center", transform=figure.transFigure, zorder=3.5, clip_on=False,
        bbox={"boxstyle": "square,pad=0.05", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
    )  # fmt: skip


def _place(figure: Figure, axes: Axes, size: int, line: Line, measure: Measure) -> tuple[float, float]:
    """Of a line's point, in shares of the figure."""
    in_pixels = axes.transData.transform((size, line.median(size, measure) or 1.0))
    x, y = figure.transFigure.inverted().transform(in_pixels)
    return float(x), float(y)


def _end(figure: Figure, axes: Axes, line: Line, measure: Measure) -> None:
    points = _points(line, measure)
    if not points:
        return
    x, y = _place(figure, axes, points[-1][0], line, measure)
    name = f"end-{line.server}-{line.transport}-{measure.name.replace(' ', '-')}"
    colour = style_of(line).colour
    bar = [y - _BAR_HEIGHT, y + _BAR_HEIGHT]
    figure.add_artist(Line2D([x + _BAR] * 2, bar, color=colour, linewidth=2.4, gid=name))


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
    entries = [_entry(handle(line), line.label, _about(part, line, told)) for line in part.lines]
    for ending in _without_line(part):
        name = wording.line(ending.server, ending.transport)
        entries.append(_entry(Line2D([], [], linestyle="none"), name, [f"not measured: {_why(ending, told)}"]))
    if any_saturated(part.lines):
        entries.append(_entry(hollow(), "hollow", [HOLLOW]))
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
    x = _LEGEND
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
    zero = [f"{size:,}" for size in line.sizes if line.median(size, part.scene.measure) == 0]
    if zero:
        said.append(f"{part.scene.measure.name} 0 at {', '.join(zero)}: no place on a logarithmic axis")
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
