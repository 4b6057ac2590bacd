"""Verdicts: which server is called ahead."""

from __future__ import annotations

import pytest

from bench.scale import analysis
from bench.scale.results import Run, Sample
from bench_factories import operations, run, samples


def servers(ours: list[float], libuv: list[float], control: list[float] | None = None) -> list[Sample]:
    return [*samples("uvloop", ours), *samples("libuv", libuv), *samples("control", control or [])]


def verdict(what: Run) -> str:
    [result] = analysis.results(what)
    return analysis.verdict(result)


ONE = [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("measured", "text"),
    [
        (
            servers([0.8, 0.9, 0.85], ONE, ONE),
            "Ours on uvloop is ahead: 0.85× (0.80–0.90) the time of PyTorch libuv at 1,024 ranks, sockets "
            "(server CPU per rank: 1.00×)",
        ),
        (
            servers([3.0, 3.1, 3.2], ONE, ONE),
            "PyTorch libuv is ahead: ours on uvloop 3.10× (3.00–3.20) the time of PyTorch libuv at 1,024 ranks",
        ),
        # Nine tenths, but the same server differs from itself by a third.
        (servers([0.9] * 3, ONE, [1.3] * 3), "No difference beyond the noise: ours on uvloop 0.90× (0.69–1.17) the"),
        (
            servers([0.1] * 3, ONE),
            "No control, noise unknown: ours on uvloop 0.10× the time of PyTorch libuv at 1,024 ranks, sockets, no",
        ),
        (servers([1.04], [1.0]), "One round: ours on uvloop 1.04× the time of PyTorch libuv at 1,024 ranks"),
        (servers([1.04] * 2, [1.0] * 2), "2 rounds: ours on uvloop 1.04× the time of PyTorch libuv at 1,024 ranks"),
        (samples("uvloop", [1.0]), "Nothing to compare: only ours on uvloop, sockets"),
        (
            [*samples("uvloop", [1.0]), *samples("libuv", [1.0], size=2048)],
            "No ratio: no size in common of ours on uvloop, sockets, PyTorch libuv, sockets",
        ),
        (
            [*samples("uvloop", ONE, scenario="memory", memory=1 << 20),
             *samples("libuv", ONE, scenario="memory", memory=0)],
            "No ratio: memory added per rank was 0 of PyTorch libuv, sockets",
        ),
    ],
)  # fmt: skip
def test_verdicts(measured: list[Sample], text: str) -> None:
    assert verdict(run(measured)).startswith(text)
    assert ("is ahead" in verdict(run(measured))) == ("is ahead" in text)


def test_the_reference_is_the_one_that_the_run_names() -> None:
    """Even if PyTorch's libuv server was measured as well, because the control repeats the reference."""
    measured = [*servers(ONE, [4.0] * 3, [2.0] * 3), *samples("legacy", [2.0] * 3)]
    assert "0.50× (0.50–0.50) the time of PyTorch legacy" in verdict(run(measured, reference="legacy"))


@pytest.mark.parametrize("reference", ["", "threaded"])
def test_without_the_reference_there_is_no_ratio(reference: str) -> None:
    text = verdict(run(servers(ONE, [4.0] * 3), reference=reference))
    assert text == "Nothing to compare: only ours on uvloop, sockets, PyTorch libuv, sockets"


def test_the_verdict_is_of_the_largest_size_with_enough_rounds() -> None:
    more = [*samples("uvloop", ONE, size=4096), *samples("libuv", [4.0], size=4096)]
    assert " at 1,024 ranks, " in verdict(run([*servers(ONE, ONE, ONE), *more]))


def test_a_saturated_generator_is_mentioned() -> None:
    measured = [*samples("uvloop", ONE), *samples("libuv", ONE, share=0.95), *samples("control", ONE)]
    assert verdict(run(measured)).endswith("; the generator was saturated there")


def test_the_noise_of_other_sizes_widens_too() -> None:
    measured = [
        sample
        for size, control in ((1024, 1.3), (2048, 1.0))
        for server, wall in (("uvloop", 0.9), ("libuv", 1.0), ("control", control))
        for sample in samples(server, [wall] * 3, size=size)
    ]
    [result] = analysis.results(run(measured))
    for server, noises in (("uvloop", [1.3, 1.3]), ("control", [1.0, 1.3])):
        series = result.find(server, "sockets")
        assert series is not None
        ratios = [result.ratio(series, size, result.scenario.metric) for size in (1024, 2048)]
        assert [ratio.noise for ratio in ratios if ratio] == noises


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        (operations({"set": 0.5}, rounds=1), ["One round: ours on uvloop takes 0.50× the", "no interval"]),
        (operations({"set": 0.5}, control=False), ["No control, noise unknown: ours on uvloop takes 0.50× the"]),
        (operations({"set": 0.5, "get": 0.5}), ["Ours on uvloop is ahead: ", "at 64 clients, sockets (median of 2 "]),
        (operations({"set": 1.0, "get": 1.0, "add": 2.0}), ["PyTorch libuv is ahead in 1 of 3: "]),
        (operations({"set": 0.5, "add": 2.0}), ["Mixed: ", "leads in 1 (set), PyTorch libuv in 1 (add)"]),
        (operations({"set": 1.0}), ["No difference beyond the noise: "]),
    ],
)
def test_operations_are_judged_by_those_beyond_the_noise(what: Run, texts: list[str]) -> None:
    verdict = analysis.verdict_of_all(analysis.results(what))
    assert verdict.startswith(texts[0])
    assert all(text in verdict for text in texts)
    assert "saturated" not in verdict


def test_saturated_operations_are_counted() -> None:
    pushed = samples("libuv", ONE, scenario="operations-get", size=64, share=0.95)
    what = run([*operations({"set": 0.5, "get": 0.5}).samples, *pushed])
    assert "; the generator was saturated in 1 of 2" in analysis.verdict_of_all(analysis.results(what))
