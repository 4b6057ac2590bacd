"""What is read off a figure: who is ahead, where the generator was saturated, why a line ends."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from bench import results
from bench.figures import draw, write_figures
from bench.records import Ending, Run
from made_up import run, samples

SVG = "{http://www.w3.org/2000/svg}"


def drawn(folder: Path, what: Run, name: str = "init") -> str:
    """The figure's SVG text; every figure comes as PNG and SVG."""
    files = write_figures(what, folder)[name]
    assert [file.name for file in files] == [f"{name}.png", f"{name}.svg"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    return files[1].read_text()


def words(svg: str) -> str:
    """All that is written in a figure, line after line."""
    found = (" ".join("".join(text.itertext()).split()) for text in ET.fromstring(svg).iter(f"{SVG}text"))
    return " ".join(found)


def drawn_as(svg: str, name: str) -> str:
    """The drawing of the point of this name; empty if there is none."""
    found = [group for group in ET.fromstring(svg).iter(f"{SVG}g") if group.get("id") == name]
    return "".join(ET.tostring(group, encoding="unicode") for group in found)


TWO = [
    *samples("uvloop", [0.8, 0.9, 0.85], size=1024),
    *samples("libuv", [1.0, 1.0, 1.0], size=1024),
    *samples("uvloop", [1.8, 1.6, 1.7], size=2048, cpu=0.019),
    *samples("libuv", [2.0, 2.0, 2.0], size=2048, cpu=0.020),
    *samples("control", [2.0, 2.0, 2.0], size=2048, cpu=0.020),
    *samples("uvloop", [3.0, 3.0, 3.0], size=4096),
]


HELD_UP = [*samples("libuv", [4.0] * 3, size=4096, share=0.9), *samples("control", [4.0] * 3, size=4096)]


def test_the_title_says_who_is_ahead_at_the_largest_size_in_common(tmp_path: Path) -> None:
    said = words(drawn(tmp_path, run(TWO)))
    expected = "Ours on uvloop is ahead: 0.85× (0.80–0.90) the time of PyTorch libuv at 2,048 ranks, sockets"
    assert f"Store initialization {expected} (server CPU per rank: 0.95×) " in said


def test_the_title_names_the_other_when_it_is_ahead(tmp_path: Path) -> None:
    measured = [
        *samples("uvloop", [3.0, 3.1, 3.2]),
        *samples("libuv", [1.0, 1.0, 1.0]),
        *samples("control", [1.0, 1.0, 1.0]),
    ]
    said = words(drawn(tmp_path, run(measured)))
    assert "PyTorch libuv is ahead: ours on uvloop 3.10× (3.00–3.20) the time of PyTorch libuv" in said


def test_the_title_names_nobody_within_the_noise(tmp_path: Path) -> None:
    """Nine tenths, were it not that the same server differs from itself by a third."""
    measured = [
        *samples("uvloop", [0.9, 0.9, 0.9]),
        *samples("libuv", [1.0, 1.0, 1.0]),
        *samples("control", [1.3, 1.3, 1.3]),
    ]
    said = words(drawn(tmp_path, run(measured)))
    assert "No difference beyond the noise: ours on uvloop 0.90× (0.69–1.17) the" in said
    assert "is ahead" not in said
    assert "noise unknown" not in said


def test_the_noise_of_other_sizes_widens_too() -> None:
    measured = [
        sample
        for size, control in ((1024, 1.3), (2048, 1.0))
        for server, wall in (("uvloop", 0.9), ("libuv", 1.0), ("control", control))
        for sample in samples(server, [wall] * 3, size=size)
    ]
    [part] = results.parts(run(measured))
    for server, noises in (("uvloop", [1.3, 1.3]), ("control", [1.0, 1.3])):
        line = part.find(server, "sockets")
        assert line is not None
        ratios = [part.ratio(line, size, part.scene.measure) for size in (1024, 2048)]
        assert [ratio.noise for ratio in ratios if ratio] == noises


def test_the_run_says_what_its_reference_is(tmp_path: Path) -> None:
    """Though PyTorch's libuv server was measured as well: the control was not that one."""
    measured = [
        *samples("uvloop", [1.0] * 3),
        *samples("libuv", [4.0] * 3),
        *samples("legacy", [2.0] * 3),
        *samples("control", [2.0] * 3),
    ]
    said = words(drawn(tmp_path, run(measured, reference="legacy")))
    assert "0.50× (0.50–0.50) the time of PyTorch legacy" in said
    assert "PyTorch libuv, sockets time 2.00× (2.00–2.00)" in said


@pytest.mark.parametrize("reference", ["", "threaded"])
def test_without_the_reference_there_is_no_ratio(tmp_path: Path, reference: str) -> None:
    measured = [*samples("uvloop", [1.0] * 3), *samples("libuv", [4.0] * 3)]
    said = words(drawn(tmp_path, run(measured, reference=reference)))
    assert "Nothing to compare: only ours on uvloop, sockets, PyTorch libuv, sockets" in said
    assert "×" not in said


def test_without_a_control_nobody_is_ahead(tmp_path: Path) -> None:
    """However great the difference: nothing says how far equal servers are apart."""
    measured = [*samples("uvloop", [0.1] * 3), *samples("libuv", [1.0] * 3)]
    said = words(drawn(tmp_path, run(measured)))
    expected = "No control, noise unknown: ours on uvloop 0.10× the time of PyTorch libuv at 1,024 ranks, sockets"
    assert f"{expected}, no interval" in said
    assert "ahead" not in said


@pytest.mark.parametrize(("count", "said"), [(1, "One round"), (2, "2 rounds")])
def test_few_rounds_name_nobody(tmp_path: Path, count: int, said: str) -> None:
    """However great the difference: nothing says what it would be in the next round."""
    few = run([*samples("uvloop", [1.04] * count), *samples("libuv", [1.0] * count)])
    expected = f"{said}: ours on uvloop 1.04× the time of PyTorch libuv at 1,024 ranks, sockets, no interval"
    text = words(drawn(tmp_path, few))
    assert expected in text
    assert "ahead" not in text


def operations(walls: dict[str, float], *, control: bool = True, count: int = 3) -> Run:
    """Ours on uvloop takes so long where the reference takes 1 s, at 64 clients."""
    servers = ("libuv", "control") if control else ("libuv",)
    measured = []
    for name, wall in walls.items():
        scenario = f"operations-{name}"
        measured += samples("uvloop", [wall] * count, scenario=scenario, size=64, late=1e-4)
        for server in servers:
            measured += samples(server, [1.0] * count, scenario=scenario, size=64, late=1e-4)
    return run(measured)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (operations({"set": 0.5}, count=1), "One round: ours on uvloop takes 0.50× the"),
        (operations({"set": 0.5}, control=False), "No control, noise unknown: ours on uvloop takes 0.50× the"),
    ],
)
def test_of_operations_nobody_is_named_either(tmp_path: Path, what: Run, said: str) -> None:
    text = words(drawn(tmp_path, what, "operations"))
    assert said in text
    assert "no interval" in text
    assert "ahead" not in text


@pytest.mark.parametrize(
    ("walls", "said"),
    [
        ({"set": 0.5, "get": 0.5}, "Ours on uvloop is ahead: "),
        ({"set": 1.0, "get": 1.0, "add": 2.0}, "PyTorch libuv is ahead in 1 of 3: "),
        ({"set": 0.5, "get": 0.5, "add": 2.0}, "Mixed: "),
        ({"set": 1.0}, "No difference beyond the noise: "),
    ],
)
def test_of_operations_those_beyond_the_noise_decide(tmp_path: Path, walls: dict[str, float], said: str) -> None:
    text = words(drawn(tmp_path, operations(walls), "operations"))
    assert f"{said}ours on uvloop takes " in text
    assert "at 64 clients, sockets (median of " in text
    assert "saturated" not in text


def test_of_operations_the_saturated_are_counted(tmp_path: Path) -> None:
    pushed = samples("libuv", [1.0] * 3, scenario="operations-get", size=64, share=0.95)
    what = operations({"set": 0.5, "get": 0.5})
    text = words(drawn(tmp_path, run([*what.samples, *pushed]), "operations"))
    assert "; the generator was saturated in 1 of 2" in text


def test_the_ratio_stands_beside_the_line_and_every_line_has_its_transport(tmp_path: Path) -> None:
    measured = [*TWO, *samples("uvloop", [0.1, 0.1], transport="memory", size=98_304)]
    said = words(drawn(tmp_path, run(measured)))
    assert re.search(r"(?<!: )0\.85×(?! \()", said)
    assert "ours on uvloop, sockets time 0.85× (0.80–0.90) at 2,048 server CPU 0.95×" in said
    assert "ours on uvloop, memory (no sockets)" in said
    assert "PyTorch libuv, sockets the reference: 1×" in said
    assert "96K" in said


def test_a_ratio_of_fewer_rounds_than_the_reference_has_says_so(tmp_path: Path) -> None:
    """Of the first round alone it is 2, but the points are 1.5 apart."""
    measured = [*samples("legacy", [3.0]), *samples("libuv", [1.5, 2.0, 2.5]), *samples("control", [1.5, 2.0, 2.5])]
    said = words(drawn(tmp_path, run(measured)))
    assert "2.00×, one round " in said
    assert said.count(", one round ") == 2, "of time and CPU, not of the control"


def test_a_label_in_the_middle_does_not_cover_the_line_that_goes_on() -> None:
    measured = [
        sample
        for size in (1024, 2048, 4096, 8192)
        for server in (("uvloop", "libuv") if size <= 2048 else ("uvloop",))
        for sample in samples(server, [1.0 if server == "uvloop" else 2.0], size=size)
    ]
    what = run(measured)
    figure = draw(results.parts(what), what)
    axes = figure.axes[0]
    [label] = [text for text in axes.texts if text.get_text() == "0.50×"]
    height = axes.transData.transform((4096, 1.0))[1]
    box = label.get_window_extent()
    assert not box.y0 <= height <= box.y1


def marks(figure: Figure) -> list[Bbox]:
    """Where points are drawn, and the bars at which lines end."""
    figure.draw_without_rendering()
    found = [artist.get_window_extent() for artist in figure.artists if str(artist.get_gid()).startswith("end-")]
    for axes in figure.axes:
        for line in axes.lines:
            if line.get_linestyle() == "None" and line.get_markersize() == 8:
                [(x, y)] = axes.transData.transform(np.asarray(line.get_xydata()))
                found.append(Bbox([[x, y], [x, y]]).padded(line.get_markersize() / 2 * figure.dpi / 72))
    return found


def test_no_ratio_stands_on_a_point_or_on_the_end_of_a_line() -> None:
    """Nor in the legend: here one is of a size before the last, to which little is missing, and one is long."""
    measured = [
        sample
        for server, factor, rounds in (("uvloop", 1.0, 3), ("control", 1.1, 3), ("libuv", 1.1, 3), ("threaded", 5.0, 1))
        for size in (1024, 16_384, 19_000)
        for sample in samples(server, [size * factor] * rounds, size=size, cpu=size * factor)
    ]
    measured += samples("legacy", [16_384 * 20.0] * 3, size=16_384, cpu=9.0)
    measured += samples("legacy", [19_000 * 20.0], size=19_000, cpu=9.0)
    what = run(measured, [Ending("init", server, "sockets", 32_768, "no") for server in ("uvloop", "threaded")])
    figure = draw(results.parts(what), what)
    found = marks(figure)
    assert len(found) == 2 * (3 * 4 + 2) + 4
    ratios = {text: box for text, box in spans(figure).items() if re.search(r"^\d+: [\d.]+×", text)}
    assert len(ratios) == 8
    for text, box in ratios.items():
        assert not [mark for mark in found if mark.overlaps(box)], text
        assert box.x1 < figure.bbox.width * 0.69, text


def test_the_title_is_of_the_largest_size_that_can_be_judged(tmp_path: Path) -> None:
    """A run that was stopped in the first round of a size has not lost what it knew before."""
    text = words(drawn(tmp_path, run([*TWO, *samples("libuv", [4.0], size=4096)])))
    assert "at 2,048 ranks, sockets" in text


def test_a_saturated_point_is_hollow(tmp_path: Path) -> None:
    svg = drawn(tmp_path, run([*TWO, *HELD_UP]))
    assert "fill: #ffffff" in drawn_as(svg, "saturated-libuv-sockets-4096-time")
    assert not drawn_as(svg, "saturated-libuv-sockets-2048-time")
    assert "the generator was saturated there" in words(svg)
    assert "hollow the generator was saturated (busy ≥ 90% of the time)" in words(svg)


def test_nothing_is_hollow_below_that(tmp_path: Path) -> None:
    """Nor in memory, where no generator is."""
    in_memory = samples("uvloop", [4.0] * 3, share=1.0, transport="memory")
    svg = drawn(tmp_path, run([*samples("libuv", [4.0] * 3, share=0.89), *in_memory]))
    assert "saturated" not in svg


def test_an_ending_stands_beside_the_line_with_its_reason(tmp_path: Path) -> None:
    """As do the servers that were not measured at all."""
    reason = "32,768 ranks would take 41 s, more than the budget of 20 s"
    endings = [
        Ending("init", "libuv", "sockets", 8192, "later"),
        Ending("init", "libuv", "sockets", 4096, reason),
        Ending("init", "legacy", "sockets", 1024, "PyTorch is not installed"),
        Ending("barrier", "uvloop", "sockets", 4096, "of another scenario"),
    ]
    svg = drawn(tmp_path, run(TWO, endings))
    said = words(svg)
    assert f"ends before 4,096: {reason}" in said
    assert "later" not in said
    assert drawn_as(svg, "end-libuv-sockets-time")
    assert not drawn_as(svg, "end-uvloop-sockets-time")
    assert "PyTorch legacy, sockets not measured: PyTorch is not installed" in said
    assert "another" not in said


def test_a_reason_that_many_share_is_told_once(tmp_path: Path) -> None:
    endings = [Ending("init", server, "sockets", 8192, "no more files") for server in ("uvloop", "libuv", "legacy")]
    said = words(drawn(tmp_path, run(TWO, endings)))
    assert said.count("no more files") == 1
    assert said.count("ends before 8,192: as ours on uvloop, sockets") == 1
    assert "PyTorch legacy, sockets not measured: as ours on uvloop, sockets" in said


def test_no_line_goes_beyond_what_was_measured(tmp_path: Path) -> None:
    """An ending at 1,000,000 does not stretch the axis."""
    ending = Ending("init", "libuv", "sockets", 1_000_000, "no")
    said = words(drawn(tmp_path, run(TWO, [ending])))
    assert "1M" not in said


def test_one_server_is_compared_with_nothing(tmp_path: Path) -> None:
    said = words(drawn(tmp_path, run(samples("uvloop", [1.0]))))
    assert "Nothing to compare: only ours on uvloop, sockets" in said
    assert "One round. 2026-11-21" in said


def test_memory_that_did_not_grow_was_measured(tmp_path: Path) -> None:
    """It is no point on a logarithmic axis, and nothing can be divided by it."""
    measured = [
        *samples("uvloop", [1.0] * 3, scenario="memory", memory=1 << 20),
        *samples("libuv", [1.0] * 3, scenario="memory", memory=0),
    ]
    said = words(drawn(tmp_path, run(measured), "memory"))
    assert "No ratio: memory added per rank was 0 of PyTorch libuv, sockets" in said
    assert "memory 0 at 1,024: no place on a logarithmic axis" in said
    assert "Nothing to compare" not in said


def test_servers_without_a_size_in_common_have_no_ratio(tmp_path: Path) -> None:
    measured = [*samples("uvloop", [1.0]), *samples("libuv", [1.0], size=2048)]
    said = words(drawn(tmp_path, run(measured)))
    assert "No ratio: no size in common of ours on uvloop, sockets, PyTorch libuv, sockets" in said


def test_throughput_and_latency_have_logarithmic_axes_without_empty_space() -> None:
    """A tenth more than from the least to the greatest round, about."""
    what = operations({"set": 0.5, "get": 2.0})
    figure = draw(results.parts(what), what)
    assert [axes.get_yscale() for axes in figure.axes] == ["log", "log"]
    low, high = figure.axes[0].get_ylim()
    assert 0.8 * 32 < low < 32
    assert 128 < high < 1.2 * 128


def test_what_hollow_means_stands_in_a_row_of_its_own() -> None:
    what = run(sample for server in ("uvloop", "libuv", "legacy", "control")
               for sample in samples(server, [1.0], scenario="operations-set", size=64, share=1))  # fmt: skip
    found = spans(draw(results.parts(what), what))
    [hollow] = [box for text, box in found.items() if "hollow: " in text]
    others = [box for text, box in found.items() if text.endswith(", sockets")]
    assert len(others) == 4
    assert all(hollow.y1 < box.y0 for box in others)


def test_groups_of_operations(tmp_path: Path) -> None:
    missing = Ending("operations-get", "legacy", "sockets", 64, "it fell over")
    shorter = Ending("operations-get", "uvloop", "sockets", 256, "no time left")
    of_all = [Ending("operations", server, "sockets", 256, "of all") for server in ("threaded", "legacy", "libuv")]
    what = run(operations({"set": 0.5, "get": 1.2}).samples, [missing, shorter, *of_all])
    said = words(drawn(tmp_path, what, "operations"))
    assert "ours with threads, sockets and PyTorch legacy, sockets not measured in all: of all" in said
    assert "PyTorch libuv, sockets goes to 64 clients in all: of all" in said
    assert "beyond the noise ours on uvloop leads in 1 (set), PyTorch libuv in 1 (get)" in said
    assert "0.50×" in said
    assert "1.20×" in said
    assert "PyTorch legacy, sockets not measured in get: it fell over" in said
    assert "ours on uvloop, sockets goes to 64 clients in get: no time left" in said


def test_no_samples_no_figure(tmp_path: Path) -> None:
    assert write_figures(run([], [Ending("init", "libuv", "sockets", 1024, "no")]), tmp_path) == {}


@pytest.mark.parametrize("cpu", [0.0, 0.01])
def test_a_measure_that_nothing_says_is_left_out(tmp_path: Path, cpu: float) -> None:
    """CPU below what the clock can tell, and a latency that the scenario did not take."""
    measured = [
        *samples("uvloop", [1.0], scenario="steady", cpu=cpu),
        *samples("libuv", [1.0], scenario="steady", cpu=cpu),
    ]
    assert "p99 latency" in words(drawn(tmp_path, run(measured), "steady"))


def test_the_same_run_gives_the_same_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_figures(run(TWO), tmp_path / name)
    for file in ("init.svg", "init.png"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_the_bars_go_from_the_least_to_the_greatest_round() -> None:
    """Around the median, which is not in the middle."""
    what = run(samples("uvloop", [1.0, 2.0, 4.0]))
    [part] = results.parts(what)
    axes = draw([part], what).axes[0]
    ends = [
        (float(segment[0][1]), float(segment[1][1]))
        for collection in axes.collections
        if isinstance(collection, LineCollection)
        for segment in collection.get_segments()
    ]
    assert ends == [(1.0, 4.0)]
    assert (1024.0, 2.0) in [tuple(point) for line in axes.lines for point in np.asarray(line.get_xydata())]


def crowd() -> Run:
    """Every server over both transports, close to each other, each with a long reason of its own to end."""
    servers = ("uvloop", "threaded", "libuv", "legacy", "control")
    measured = [
        sample
        for factor, server in enumerate(servers)
        for size in (1024, 2048, 4096, 8192, 16_384, 19_000)
        for sample in samples(server, [size * (1 + factor / 50)] * 3, size=size, cpu=size * (1 + factor / 50), share=1)
    ]
    for size in (1024, 98_304, 1_000_000):
        measured += samples("uvloop", [size / 10] * 3, size=size, transport="memory", cpu=size / 10)
    reason = "its time would be over the budget, since it grows with the square of the ranks, as every key wakes all, "
    return run(measured, [Ending("init", server, "sockets", 32_768, reason * 2 + server) for server in servers])


def spans(figure: Figure) -> dict[str, Bbox]:
    """Where everything is written, in pixels."""
    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    return {f"{number}: {text.get_text()}": text.get_window_extent() for number, text in enumerate(texts)}


@pytest.mark.parametrize("scenario", ["init", "operations"])
def test_nothing_is_written_over_anything_else(scenario: str) -> None:
    what = crowd()
    if scenario == "operations":
        names = ("set", "get", "add", "check", "wait", "multi_get", "append", "compare_set", "queue_push", "num_keys")
        measured = [
            sample
            for name in names
            for server in ("uvloop", "threaded", "libuv", "legacy", "control")
            for sample in samples(server, [0.1] * 3, scenario=f"operations-{name}", size=64, late=1e-4, share=1)
        ]
        what = run(measured, [Ending("operations-set", "legacy", "sockets", 64, "it is too slow " * 10)])
    figure = draw(results.parts(what), what)
    found = spans(figure)
    inside = figure.bbox
    for text, box in found.items():
        assert inside.x0 <= box.x0 < box.x1 <= inside.x1, text
        assert inside.y0 <= box.y0 < box.y1 <= inside.y1, text
    over = [
        (one, other)
        for (one, first), (other, second) in itertools.combinations(found.items(), 2)
        if first.padded(-1).overlaps(second.padded(-1))
    ]
    assert not over
