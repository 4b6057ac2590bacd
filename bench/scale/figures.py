"""The figures of a run, as PNG and SVG.

A scenario is drawn as lines over its sizes, the server's CPU below, or, if it has several operations, as a group of
points for each. Must not know how anything was measured, and computes nothing that the report would have to repeat.
Invariant: every point drawn was measured; where a line ends early or a point is missing, the reason is in the figure;
no text covers anything; the same run gives the same files.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.path import Path as Polyline
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator
from matplotlib.transforms import Bbox

from bench import stats
from bench.scale import analysis
from bench.scale.analysis import Result, Series
from bench.scale.results import SATURATED, Ending, Run
from bench.scale.scenarios import P50, P95, P99, Metric

WIDTH, HEIGHT, DPI = 12.0, 8.0, 120
"""Inches, and dots per inch of the PNG files."""
TITLE_POINTS = 1400
"""Font size times characters that fit into the width; a longer title is set smaller."""
LEFT, RIGHT = 0.082, 0.62
"""Of the axes, as fractions of the figure's width; the legend is to the right of them."""
HOLLOW = f"the generator was saturated (busy ≥ {SATURATED:.0%} of the time) and may have set the pace"
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


class Style(NamedTuple):
    color: str
    marker: str
    dashes: Literal["-"] | tuple[float, Sequence[float]]


# Okabe and Ito's palette for colour-blind readers; markers and dashes tell the series apart in black and white.
_STYLES = {
    ("uvloop", "sockets"): Style("#0072B2", "o", "-"),
    ("uvloop", "memory"): Style("#009E73", "P", (0, (8, 2))),
    ("relay", "sockets"): Style("#000000", "h", (0, (3, 1, 1, 1))),
    ("threaded", "sockets"): Style("#56B4E9", "s", (0, (4, 1, 1, 1))),
    ("threaded", "memory"): Style("#CC79A7", "X", (0, (6, 1, 1, 1, 1, 1))),
    ("libuv", "sockets"): Style("#D55E00", "^", (0, (5, 2))),
    ("legacy", "sockets"): Style("#E69F00", "D", (0, (1, 1))),
    ("control", "sockets"): Style("#777777", "v", (0, (2, 3))),
}
_UNKNOWN = Style("#666666", "*", (0, (1, 3)))


def render_figures(run: Run) -> dict[str, bytes]:
    """Return the files of all figures, by name: `SCENARIO.png` and `SCENARIO.svg`."""
    files = {}
    for name, results in analysis.by_scenario(run).items():
        if any(result.series for result in results):
            with matplotlib.rc_context(RC):
                figure = draw(results, run)
                files[f"{name}.png"] = _saved(figure, "png", dpi=DPI, metadata={"Software": None})
                files[f"{name}.svg"] = _saved(figure, "svg", metadata={"Date": None})
    return files


def _saved(figure: Figure, file_format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format=file_format, **options)
    return file.getvalue()


def draw(results: Sequence[Result], run: Run) -> Figure:
    """Draw the figure of one scenario."""
    with matplotlib.rc_context(RC):
        if any(result.detail for result in results):
            return _draw_operations(results, run)
        return _draw_sizes(results[0], run)


# What both kinds of figures share


def _canvas(title: str, verdict: str, run: Run, series: Sequence[Series]) -> Figure:
    """Return a figure without axes: title, verdict, and at the foot where and how it was measured."""
    figure = Figure(figsize=(WIDTH, HEIGHT))
    FigureCanvasAgg(figure)
    figure.text(0.012, 0.982, title, fontsize=min(15, TITLE_POINTS / len(title)), fontweight="bold", va="top")
    figure.text(0.012, 0.942, textwrap.fill(verdict, 138), fontsize=10.5, va="top", linespacing=1.35)
    figure.text(0.012, 0.008, _footer(run, series), fontsize=8, color="#444444", va="bottom")
    return figure


def _footer(run: Run, series: Sequence[Series]) -> str:
    versions, machine = run.versions, run.machine
    rounds = analysis.rounds(series)
    return (
        f"{'One round' if rounds == '1' else f'Medians of {rounds} rounds, bars from min to max'}. "
        f"{run.began[:10]}, {machine.processor}, {machine.cores} cores, {machine.kernel}; "
        f"tcpstore_async {versions.tcpstore_async} ({versions.build})"
        f"{f', PyTorch {versions.torch}' if versions.torch else ''}"
        f"{'' if run.complete else '. THE RUN IS NOT COMPLETE'}"
    )


def _style(series: Series) -> Style:
    return _STYLES.get((series.server, series.transport), _UNKNOWN)


def _point(axes: Axes, x: float, values: Sequence[float], style: Style, saturated: bool, gid: str | None) -> None:
    """Draw the median with a bar from min to max; hollow, and named in the SVG file, if saturated."""
    median = stats.median(values)
    spread = [[median - min(values)], [max(values) - median]]
    axes.errorbar(x, median, yerr=spread, color=style.color, capsize=3, linewidth=1.1, fmt="none", zorder=2.6)
    axes.plot(
        [x], [median], style.marker, color=style.color, markerfacecolor="white" if saturated else style.color,
        markersize=8, markeredgewidth=1.6, linestyle="none", gid=gid if saturated else None, zorder=3,
    )  # fmt: skip


Unit = Literal["seconds", "bytes", "ranks", "times"]


def _scale_values(axes: Axes, unit: Unit, name: str) -> None:
    """Make the vertical axis logarithmic and label it; call this when everything is drawn."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value, unit)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    ticks = _ticks(*axes.get_ylim(), unit)
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    if ticks[1] < 10 * ticks[0]:
        axes.yaxis.set_minor_locator(NullLocator())
    box = axes.get_position()
    axes.figure.text(0.013, (box.y0 + box.y1) / 2, name, rotation="vertical", ha="center", va="center")


def _ticks(low: float, high: float, unit: Unit) -> list[float]:
    """Return at least two round numbers on a logarithmic axis, in the coarsest steps that have as many."""
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
    if unit in ("times", "ranks"):
        return f"{value:,.9g}"
    shown = stats.format_seconds(value) if unit == "seconds" else stats.format_bytes(value)
    number, _, scale = shown.partition(" ")
    return f"{float(number.replace(',', '')):,.9g} {scale}"


def _handle(series: Series) -> Line2D:
    """Return the series' legend handle."""
    style = _style(series)
    return Line2D(
        [], [], color=style.color, linestyle=style.dashes, linewidth=1.8, marker=style.marker, markersize=8,
        markeredgewidth=1.6, label=series.label,
    )  # fmt: skip


def _hollow_handle() -> Line2D:
    return Line2D(
        [], [], color="#444444", linestyle="none", marker="o", markerfacecolor="white", markersize=8,
        markeredgewidth=1.6, label=f"hollow: {HOLLOW}",
    )  # fmt: skip


def _any_saturated(all_series: Sequence[Series]) -> bool:
    return any(series.saturated(size) for series in all_series for size in series.sizes)


# Lines over sizes


def _draw_sizes(result: Result, run: Run) -> Figure:
    figure = _canvas(result.title, analysis.verdict(result), run, result.series)
    upper = figure.add_axes((LEFT, 0.455, RIGHT - LEFT, 0.405))
    lower = figure.add_axes((LEFT, 0.105, RIGHT - LEFT, 0.285), sharex=upper)
    both = ((upper, result.scenario.metric), (lower, result.scenario.cpu))
    for axes, metric in both:
        for series in result.series:
            _draw_series(axes, series, metric)
        _scale_values(axes, metric.unit, metric.axis)
    _scale_sizes(lower, result)
    upper.tick_params(labelbottom=False)
    figure.draw_without_rendering()
    for axes, metric in both:
        _label_ratios(figure, axes, result, metric)
    _legend_with_details(figure, result)
    return figure


def _points(series: Series, metric: Metric) -> list[tuple[int, float]]:
    """Return sizes and medians, without zeros, which a logarithmic axis cannot show."""
    return [(size, median) for size in series.sizes if (median := series.median(size, metric))]


def _draw_series(axes: Axes, series: Series, metric: Metric) -> None:
    style, points = _style(series), _points(series, metric)
    if not points:
        return
    axes.plot(*zip(*points, strict=True), color=style.color, linestyle=style.dashes, linewidth=1.8)
    for size, _ in points:
        values = [value for value in series.values(size, metric).values() if value > 0]
        gid = f"saturated-{series.server}-{series.transport}-{size}-{metric.name.replace(' ', '-')}"
        _point(axes, size, values, style, series.saturated(size), gid)


def _scale_sizes(axes: Axes, result: Result) -> None:
    sizes = sorted({size for series in result.series for size in series.sizes})
    low, high = sizes[0] / 1.2, sizes[-1] * 1.2
    axes.set_xscale("log", base=2)
    axes.set_xlabel(result.scenario.sizes_are)
    axes.set_xlim(low, high)
    labelled: list[int] = []
    for size in sorted(sizes, key=lambda size: (size & (size - 1) != 0, size)):  # powers of two first
        if all(abs(math.log(size / other)) >= 0.055 * math.log(high / low) for other in labelled):
            labelled.append(size)
    axes.xaxis.set_major_locator(FixedLocator(sorted(labelled)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: stats.format_size(round(value))))
    axes.xaxis.set_minor_locator(NullLocator())


# Places and sizes as fractions of the figure's width and height.
_LABEL_HEIGHT, _CHARACTER_WIDTH = 0.019, 0.0078
_MARKER = (0.0058, 0.0088)
"""From the centre of a marker to its edges."""
_LABEL_OFFSET = 0.0115
_END_OFFSET, _END_WIDTH, _END_HEIGHT = 0.0085, 0.0018, 0.014
"""From a line's last point to the bar across its end; from that bar's centre to its edges."""
_LEGEND = RIGHT + 0.072


def _position(figure: Figure, axes: Axes, size: int, value: float) -> tuple[float, float]:
    x, y = figure.transFigure.inverted().transform(axes.transData.transform((size, value)))
    return float(x), float(y)


def _label_ratios(figure: Figure, axes: Axes, result: Result, metric: Metric) -> None:
    """Write each series' last ratio beside its point, and mark the ends of lines that end for a reason."""
    wanted: list[tuple[Bbox, str, str]] = []
    lines: list[Polyline] = []
    taken: list[Bbox] = []
    for series in result.series:
        color = _style(series).color
        places = {size: _position(figure, axes, size, value) for size, value in _points(series, metric)}
        taken += [_box(x, y, *_MARKER) for x, y in places.values()]
        if not places:
            continue
        lines.append(Polyline(list(places.values())))
        if result.ending(series):
            x, y = places[max(places)]
            x += _END_OFFSET
            taken.append(_box(x, y, _END_WIDTH, _END_HEIGHT))
            gid = f"end-{series.server}-{series.transport}-{metric.name.replace(' ', '-')}"
            bar = [y - _END_HEIGHT, y + _END_HEIGHT]
            figure.add_artist(Line2D([x, x], bar, color=color, linewidth=2.4, gid=gid))
        found = result.last_ratio(series, metric)
        if found:
            text = stats.format_times(found[1].median) + _fewer_rounds(result, series, *found, metric)
            wanted.append((_label_box(*places[found[0]], text), text, color))
    low, high = axes.get_position().y0, axes.get_position().y1
    for box, text, color in sorted(wanted, key=lambda label: (-label[0].x0, label[0].y0)):
        taken.append(_nearest_free(box, lines, taken, low, high))
        _write_label(figure, axes, text, color, taken[-1])


def _box(x: float, y: float, half_width: float, half_height: float) -> Bbox:
    return Bbox.from_extents(x - half_width, y - half_height, x + half_width, y + half_height)


def _label_box(x: float, y: float, text: str) -> Bbox:
    """To the right of a point, or to its left if it would reach into the legend."""
    width = len(text) * _CHARACTER_WIDTH
    left = x + _LABEL_OFFSET if x + _LABEL_OFFSET + width < _LEGEND else x - _LABEL_OFFSET - width
    return Bbox.from_bounds(left, y - _LABEL_HEIGHT / 2, width, _LABEL_HEIGHT)


def _nearest_free(wanted: Bbox, lines: Sequence[Polyline], taken: Sequence[Bbox], low: float, high: float) -> Bbox:
    """Move a label up or down, as little as possible, until it covers nothing; leave it if that is impossible."""
    for step in sorted(range(-80, 81), key=abs):
        box = wanted.translated(0, step * wanted.height / 4)
        if (
            low <= box.y0 and box.y1 <= high
            and not box.count_overlaps(taken)
            and not any(line.intersects_bbox(box, filled=False) for line in lines)
        ):  # fmt: skip
            return box
    return wanted


def _fewer_rounds(result: Result, series: Series, size: int, ratio: stats.Ratio, metric: Metric) -> str:
    """Say so if a ratio has fewer rounds than the reference: it may not match the distance of the points."""
    reference = result.reference(series.transport)
    if reference is None or ratio.rounds >= len(reference.values(size, metric)):
        return ""
    return f", {stats.format_rounds(ratio.rounds)}"


def _write_label(figure: Figure, axes: Axes, text: str, color: str, box: Bbox) -> None:
    red, green, blue = to_rgb(color)
    axes.text(
        box.x0, (box.y0 + box.y1) / 2, text, fontsize=9, fontweight="bold", va="center",
        color=to_hex((red * 0.72, green * 0.72, blue * 0.72)),  # light colours are illegible as text
        transform=figure.transFigure, zorder=3.5, clip_on=False,
        bbox={"boxstyle": "square,pad=0.05", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
    )  # fmt: skip


class _Entry(NamedTuple):
    """An entry of the legend."""

    handle: Line2D
    name: str
    details: str

    @property
    def height(self) -> float:
        return 0.036 + (self.details.count("\n") + 1) * 0.0178 if self.details else 0.034


def _legend_with_details(figure: Figure, result: Result) -> None:
    """Write each series' name, its ratios with their intervals, and why it ends."""
    reasons: dict[str, str] = {}
    found = [(_handle(series), series.label, _details(result, series, reasons)) for series in result.series]
    drawn = {(series.server, series.transport) for series in result.series}
    for ending in result.endings:
        if (ending.server, ending.transport) not in drawn:
            name = analysis.series_name(ending.server, ending.transport)
            found.append((Line2D([], [], linestyle="none"), name, [f"not measured: {_reason(ending, reasons)}"]))
    if _any_saturated(result.series):
        found.append((_hollow_handle(), "hollow", [HOLLOW]))
    entries = [
        _Entry(handle, name, "\n".join(textwrap.fill(sentence, 42) for sentence in details))
        for handle, name, details in found
    ]
    scale = min(1.0, 0.82 / sum(entry.height for entry in entries))  # smaller print if there are many
    y = 0.86
    for entry in entries:
        _write_entry(figure, y, entry, scale)
        y -= entry.height * scale


def _write_entry(figure: Figure, y: float, entry: _Entry, scale: float) -> None:
    sample = Line2D([_LEGEND, _LEGEND + 0.02, _LEGEND + 0.04], [y - 0.008 * scale] * 3, markevery=[1])
    sample.update_from(entry.handle)
    sample.set_transform(figure.transFigure)
    figure.add_artist(sample)
    x = _LEGEND + 0.048
    figure.text(x, y, entry.name, fontsize=9 * scale, fontweight="bold", va="top")
    figure.text(x, y - 0.021 * scale, entry.details, fontsize=8.5 * scale, va="top", linespacing=1.2)


def _details(result: Result, series: Series, reasons: dict[str, str]) -> list[str]:
    text = []
    if result.reference(series.transport) is series and result.comparison():
        text.append("the reference: 1×")
    for metric in (result.scenario.metric, result.scenario.cpu):
        found = result.last_ratio(series, metric)
        if found:
            text.append(f"{metric.name} {found[1]} at {found[0]:,}")
    zero = [f"{size:,}" for size in series.sizes if series.median(size, result.scenario.metric) == 0]
    if zero:
        text.append(f"{result.scenario.metric.name} 0 at {', '.join(zero)}: not on a logarithmic axis")
    ending = result.ending(series)
    if ending:
        text.append(f"ends before {ending.size:,}: {_reason(ending, reasons)}")
    return text


def _reason(ending: Ending, reasons: dict[str, str]) -> str:
    """Give a reason in full once, then refer to the series that had it first (kept in `reasons`)."""
    name = analysis.series_name(ending.server, ending.transport)
    first = reasons.setdefault(ending.reason, name)
    return ending.reason if first == name else f"as {first}"


# Groups of points by operation


def _draw_operations(all_results: Sequence[Result], run: Run) -> Figure:
    """Draw throughput above and p50, p95 and p99 below, at the largest size of each series."""
    results = [result for result in all_results if result.series]
    title, verdict = results[0].title, analysis.verdict_of_all(results)
    figure = _canvas(title, verdict, run, [series for result in results for series in result.series])
    every = {
        analysis.sort_key(series.server, series.transport): series for result in results for series in result.series
    }
    order = sorted(every)
    missing = _missing(all_results)
    saturated = any(_any_saturated(result.series) for result in results)
    bottom = 0.155 + 0.018 * len(missing) + _legend_below(figure, [_handle(every[key]) for key in order], saturated)
    left, width, height = LEFT + 0.012, 0.973 - LEFT, (0.80 - bottom) / 2
    upper = figure.add_axes((left, 0.86 - height, width, height))
    lower = figure.add_axes((left, bottom, width, height), sharex=upper)
    for place, result in enumerate(results):
        for series in result.series:
            column = order.index(analysis.sort_key(series.server, series.transport))
            _draw_operation(upper, lower, place + (column - (len(order) - 1) / 2) * 0.8 / len(order), series)
        _label_operation(upper, place, result)
    _scale_values(upper, "times", "operations per second")
    upper.tick_params(labelbottom=False)
    if any(series.values(series.sizes[-1], P99) for result in results for series in result.series):
        _scale_values(lower, "seconds", "latency: p50, p95, p99")
    for axes in (upper, lower):
        axes.grid(axis="x", visible=False)
    lower.set_xticks(range(len(results)), [result.detail or result.scenario.name for result in results])
    lower.set_xlim(-0.6, len(results) - 0.4)
    size = max(series.sizes[-1] for result in results for series in result.series)
    clients = f"{size:,} {results[0].scenario.sizes_are}"
    about = f"{clients}; above the points: ours over the reference, in time; bold beyond the noise"
    lower.set_xlabel("\n".join([about, *missing]), fontsize=9)
    return figure


def _draw_operation(upper: Axes, lower: Axes, x: float, series: Series) -> None:
    size, style = series.sizes[-1], _style(series)
    rates = [sample.operations / sample.wall_seconds for sample in series.points[size].values() if sample.wall_seconds]
    if rates:
        _point(upper, x, rates, style, series.saturated(size), None)
    latencies = [median for metric in (P50, P95, P99) if (median := series.median(size, metric))]
    if latencies:
        lower.plot(
            [x] * len(latencies), latencies, style.marker, linestyle="-", color=style.color, linewidth=1.2, markersize=5
        )


def _label_operation(axes: Axes, place: int, result: Result) -> None:
    found = result.comparison()
    if found is None:
        return
    axes.annotate(
        stats.format_times(found.time.median), (place, 1.0), xycoords=("data", "axes fraction"), ha="center",
        va="bottom", fontsize=9, fontweight="bold" if found.time.verdict == "beyond the noise" else "normal",
    )  # fmt: skip


def _missing(results: Sequence[Result]) -> list[str]:
    """Say which points are missing or of a smaller size than others, and why, in lines."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for result in results:
        for ending in result.endings:
            series = analysis.series_of(ending, result, results)
            how = f"goes to {series.sizes[-1]:,} {result.scenario.sizes_are}" if series else "not measured"
            key = (analysis.series_name(ending.server, ending.transport), how, ending.reason)
            found.setdefault(key, []).append(result.detail or "all")
    names: dict[str, list[str]] = {}
    for (name, how, reason), details in found.items():
        names.setdefault(f"{how} in {', '.join(details)}: {reason}", []).append(name)
    return textwrap.wrap("; ".join(f"{' and '.join(those)} {what}" for what, those in names.items()), 150)


def _legend_below(figure: Figure, handles: list[Line2D], saturated: bool) -> float:
    """Draw the legend, three series in a row; return by how much it is higher than two rows."""
    look: dict[str, Any] = {"loc": "lower left", "frameon": False, "fontsize": 9.5, "handlelength": 3.6}
    row = 0.026
    if saturated:
        figure.legend(handles=[_hollow_handle()], bbox_to_anchor=(0.005, 0.03), **look)
    figure.legend(handles=handles, bbox_to_anchor=(0.005, 0.03 + row * saturated), ncol=3, **look)
    return row * (-(-len(handles) // 3) - 2 + saturated)
