"""Figures: ratios, saturated points, reasons for endings, and that nothing overlaps."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from bench.scale import analysis
from bench.scale.figures import draw, render_figures
from bench.scale.results import Ending, Run, Sample
from bench_factories import operations, run, samples

SERVERS = ("uvloop", "threaded", "libuv", "legacy", "control")
TWO = [
    *samples("uvloop", [0.8, 0.9, 0.85], size=1024),
    *samples("libuv", [1.0, 1.0, 1.0], size=1024),
    *samples("uvloop", [1.8, 1.6, 1.7], size=2048, cpu=0.019),
    *samples("libuv", [2.0, 2.0, 2.0], size=2048, cpu=0.020),
    *samples("control", [2.0, 2.0, 2.0], size=2048, cpu=0.020),
    *samples("uvloop", [3.0, 3.0, 3.0], size=4096),
]


def drawn(what: Run) -> Figure:
    [results] = analysis.by_scenario(what).values()
    return draw(results, what)


def texts(figure: Figure) -> list[str]:
    return [" ".join(text.get_text().split()) for text in figure.findobj(Text)]


def words(what: Run) -> str:
    return " ".join(text for text in texts(drawn(what)) if text)


def boxes(figure: Figure) -> list[tuple[str, Bbox]]:
    """Return where each text is drawn, in pixels."""
    figure.draw_without_rendering()
    found = [text for text in figure.findobj(Text) if text.get_visible()]
    return [(text.get_text(), text.get_window_extent()) for text in found if text.get_text()]


def named(figure: Figure) -> dict[str, Line2D]:
    """Return the points and ends that have a name in the SVG file."""
    return {str(line.get_gid()): line for line in figure.findobj(Line2D) if line.get_gid()}


def markers(figure: Figure) -> list[Bbox]:
    """Return where points are drawn, and the bars at the ends of lines."""
    figure.draw_without_rendering()
    found = [artist.get_window_extent() for artist in figure.artists if str(artist.get_gid()).startswith("end-")]
    for axes in figure.axes:
        for line in axes.lines:
            if line.get_linestyle() == "None" and line.get_markersize() == 8:
                [(x, y)] = axes.transData.transform(np.asarray(line.get_xydata()))
                found.append(Bbox([[x, y], [x, y]]).padded(line.get_markersize() / 2 * figure.dpi / 72))
    return found


def test_figures_are_png_and_svg_and_the_same_each_time() -> None:
    files = render_figures(run([*TWO, *samples("uvloop", [1.0], scenario="steady")]))
    assert list(files) == ["init.png", "init.svg", "steady.png", "steady.svg"]
    assert files["init.png"].startswith(b"\x89PNG")
    assert b"<svg" in files["init.svg"]
    again = render_figures(run(TWO))
    assert again == {name: files[name] for name in ("init.png", "init.svg")}


def test_no_samples_no_figure() -> None:
    assert render_figures(run([], [Ending("init", "libuv", "sockets", 1024, "no")])) == {}


def test_title_ratios_and_legend() -> None:
    memory = samples("uvloop", [0.1, 0.1], transport="memory", size=98_304)
    found = texts(drawn(run([*TWO, *memory])))
    assert "Store initialization" in found
    assert any(text.startswith("Ours on uvloop is ahead: 0.85× (0.80–0.90) the time of") for text in found)
    assert "0.85×" in found
    assert "ours on uvloop, memory (no sockets)" in found
    assert "the reference: 1×" in found
    assert "time 0.85× (0.80–0.90) at 2,048 server CPU 0.95× (0.95–0.95) at 2,048" in found
    assert "96K" in found


def test_a_ratio_of_fewer_rounds_than_the_reference_is_marked() -> None:
    """The ratio is 2 in the only common round, but the points are 1.5 apart."""
    measured = [*samples("legacy", [3.0]), *samples("libuv", [1.5, 2.0, 2.5]), *samples("control", [1.5, 2.0, 2.5])]
    found = texts(drawn(run(measured)))
    assert "2.00×, one round" in found
    assert sum(text.endswith("×, one round") for text in found) == 2, "of time and CPU, not of the control"


def test_a_label_in_the_middle_does_not_cover_its_line() -> None:
    measured = [
        sample
        for size in (1024, 2048, 4096, 8192)
        for server in (("uvloop", "libuv") if size <= 2048 else ("uvloop",))
        for sample in samples(server, [1.0 if server == "uvloop" else 2.0], size=size)
    ]
    figure = drawn(run(measured))
    axes = figure.axes[0]
    [label] = [text for text in axes.texts if text.get_text() == "0.50×"]
    height = axes.transData.transform((4096, 1.0))[1]
    box = label.get_window_extent()
    assert not box.y0 <= height <= box.y1


def test_no_ratio_covers_a_point_the_end_of_a_line_or_the_legend() -> None:
    measured = [
        sample
        for server, factor, rounds in (("uvloop", 1.0, 3), ("control", 1.1, 3), ("libuv", 1.1, 3), ("threaded", 5.0, 1))
        for size in (1024, 16_384, 19_000)
        for sample in samples(server, [size * factor] * rounds, size=size, cpu=size * factor)
    ]
    measured += samples("legacy", [16_384 * 20.0] * 3, size=16_384, cpu=9.0)
    measured += samples("legacy", [19_000 * 20.0], size=19_000, cpu=9.0)
    endings = [Ending("init", server, "sockets", 32_768, "no") for server in ("uvloop", "threaded")]
    figure = drawn(run(measured, endings))
    found = markers(figure)
    assert len(found) == 2 * (3 * 4 + 2) + 4
    ratios = [(text, box) for text, box in boxes(figure) if re.match(r"[\d.]+×", text)]
    assert len(ratios) == 8
    for text, box in ratios:
        assert not [marker for marker in found if marker.overlaps(box)], text
        assert box.x1 < figure.bbox.width * 0.69, text


def test_a_saturated_point_is_hollow() -> None:
    pushed = [*samples("libuv", [4.0] * 3, size=4096, share=0.9), *samples("control", [4.0] * 3, size=4096)]
    figure = drawn(run([*TWO, *pushed]))
    points = {name: line for name, line in named(figure).items() if name.startswith("saturated-")}
    assert set(points) == {"saturated-libuv-sockets-4096-time", "saturated-libuv-sockets-4096-server-CPU"}
    assert all(line.get_markerfacecolor() == "white" for line in points.values())
    assert any("saturated (busy ≥ 90% of the time)" in text for text in texts(figure))
    in_memory = samples("uvloop", [4.0] * 3, share=1.0, transport="memory")
    assert "saturated" not in words(run([*samples("libuv", [4.0] * 3, share=0.89), *in_memory]))


def test_an_ending_is_in_the_legend_with_its_reason() -> None:
    reason = "32,768 ranks would take 41 s"
    endings = [
        Ending("init", "libuv", "sockets", 8192, "later"),
        Ending("init", "libuv", "sockets", 4096, reason),
        Ending("init", "uvloop", "sockets", 1_000_000, reason),
        Ending("init", "legacy", "sockets", 1024, "PyTorch is not installed"),
    ]
    figure = drawn(run(TWO, endings))
    text = " ".join(texts(figure))
    assert "ends before 1,000,000: 32,768 ranks would take 41 s" in text
    assert "ends before 4,096: as ours on uvloop, sockets" in text
    assert "not measured: PyTorch is not installed" in text
    assert "later" not in text
    ends = {name for name in named(figure) if name.startswith("end-")}
    assert ends == {f"end-{server}-sockets-{what}" for server in ("uvloop", "libuv") for what in ("time", "server-CPU")}
    assert "1M" not in texts(figure), "the axis ends at the last point"


def test_memory_that_did_not_grow_has_no_point() -> None:
    measured = [
        *samples("uvloop", [1.0] * 3, scenario="memory", memory=1 << 20),
        *samples("libuv", [1.0] * 3, scenario="memory", memory=0),
    ]
    assert "memory 0 at 1,024: not on a logarithmic axis" in words(run(measured))


@pytest.mark.parametrize("cpu", [0.0, 0.01])
def test_a_metric_that_no_sample_has_is_left_out(cpu: float) -> None:
    measured = [sample for one in ("uvloop", "libuv") for sample in samples(one, [1.0], scenario="steady", cpu=cpu)]
    assert "p99 latency" in words(run(measured))


def test_bars_go_from_min_to_max_around_the_median() -> None:
    axes = drawn(run(samples("uvloop", [1.0, 2.0, 4.0]))).axes[0]
    ends = [
        (float(segment[0][1]), float(segment[1][1]))
        for collection in axes.collections
        if isinstance(collection, LineCollection)
        for segment in collection.get_segments()
    ]
    assert ends == [(1.0, 4.0)]
    assert (1024.0, 2.0) in [tuple(point) for line in axes.lines for point in np.asarray(line.get_xydata())]


def test_the_axes_of_operations_are_logarithmic_and_tight() -> None:
    figure = drawn(operations({"set": 0.5, "get": 2.0}))
    assert [axes.get_yscale() for axes in figure.axes] == ["log", "log"]
    low, high = figure.axes[0].get_ylim()
    assert 0.8 * 32 < low < 32
    assert 128 < high < 1.2 * 128


def test_operations_have_ratios_and_list_missing_points() -> None:
    missing = Ending("operations-get", "legacy", "sockets", 64, "it failed")
    shorter = Ending("operations-get", "uvloop", "sockets", 256, "no time left")
    of_all = [Ending("operations", server, "sockets", 256, "of all") for server in ("threaded", "legacy", "libuv")]
    text = words(run(operations({"set": 0.5, "get": 1.2}).samples, [missing, shorter, *of_all]))
    for part in (
        "0.50×",
        "1.20×",
        "ours with threads, sockets and PyTorch legacy, sockets not measured in all: of all",
        "PyTorch libuv, sockets goes to 64 clients in all: of all",
        "PyTorch legacy, sockets not measured in get: it failed",
        "ours on uvloop, sockets goes to 64 clients in get: no time left",
    ):
        assert part in text


def crowded(scenario: str) -> Run:
    """Return a run with every server close to the others, each with its own long reason to end."""
    measured: list[Sample] = []
    if scenario == "operations":
        names = ("set", "get", "add", "check", "wait", "multi_get", "append", "compare_set", "queue_push", "num_keys")
        for server, name in itertools.product(SERVERS, names):
            measured += samples(server, [0.1] * 3, scenario=f"operations-{name}", size=64, p50=1e-4, share=1)
        return run(measured, [Ending("operations-set", "legacy", "sockets", 64, "it is too slow " * 10)])
    for (factor, server), size in itertools.product(enumerate(SERVERS), (1024, 2048, 4096, 8192, 16_384, 19_000)):
        cost = size * (1 + factor / 50)
        measured += samples(server, [cost] * 3, size=size, cpu=cost, share=1)
    for size in (1024, 98_304, 1_000_000):
        measured += samples("uvloop", [size / 10] * 3, size=size, transport="memory", cpu=size / 10)
    reason = "its time would be over the budget, since it grows with the square of the ranks, as every key wakes all, "
    return run(measured, [Ending("init", server, "sockets", 32_768, reason * 2 + server) for server in SERVERS])


@pytest.mark.parametrize("scenario", ["init", "operations"])
def test_no_text_covers_another_or_leaves_the_figure(scenario: str) -> None:
    figure = drawn(crowded(scenario))
    found = boxes(figure)
    inside = figure.bbox
    for text, box in found:
        assert inside.x0 <= box.x0 < box.x1 <= inside.x1, text
        assert inside.y0 <= box.y0 < box.y1 <= inside.y1, text
    pairs = itertools.combinations(found, 2)
    assert not [(one[0], other[0]) for one, other in pairs if one[1].padded(-1).overlaps(other[1].padded(-1))]
