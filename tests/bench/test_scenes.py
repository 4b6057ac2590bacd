"""Names and numbers as readers see them."""

from __future__ import annotations

import msgspec
import pytest

from bench import wording
from bench.scenes import scene_of
from bench.stats import Ratio
from made_up import samples


@pytest.mark.parametrize(
    ("scenario", "scene", "detail"),
    [
        ("barrier", "barrier", ""),
        ("barrier-opcode", "barrier-opcode", ""),
        ("operations-multi_get", "operations", "multi_get"),
        ("operations:set", "operations", "set"),
        ("initial", "initial", ""),
        ("new", "new", ""),
    ],
)
def test_which_scene_a_scenario_belongs_to(scenario: str, scene: str, detail: str) -> None:
    found, what = scene_of(scenario)
    assert (found.name, what) == (scene, detail)


@pytest.mark.parametrize(
    ("scenario", "value"),
    [("init", 8.0), ("steady", 0.004), ("operations-set", 8.0 / 64), ("memory", 100.0), ("new", 8.0)],
)
def test_what_is_compared(scenario: str, value: float) -> None:
    """Of 64 ranks in 8 s, with a p50 of 1 ms, so that p99 is 4 ms, and 6,400 bytes."""
    [sample] = samples("uvloop", [8.0], size=64, late=0.001, memory=6400)
    assert scene_of(scenario)[0].measure.of(sample) == pytest.approx(value)


def test_the_cpu_for_newcomers_is_of_all_requests() -> None:
    """The background's are in it, so that it is per rank it must not say."""
    measure = scene_of("newcomers")[0].cpu
    [sample] = samples("uvloop", [8.0], size=64, cpu=0.5)
    assert measure.axis == "server CPU per request, of all"
    assert measure.of(msgspec.structs.replace(sample, operations=1000)) == pytest.approx(0.0005)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0, "0 s"), (1e-10, "0.100 ns"), (3.14159e-6, "3.14 µs"), (0.0009999, "1.00 ms"), (0.5, "500 ms"),
        (1.0, "1.00 s"), (1234.5, "1,234 s"),
    ],
)  # fmt: skip
def test_seconds(value: float, said: str) -> None:
    assert wording.seconds(value) == said


@pytest.mark.parametrize(("value", "said"), [(0, "0 B"), (12, "12.0 B"), (1536, "1.50 KiB"), (8 << 30, "8.00 GiB")])
def test_bytes(value: float, said: str) -> None:
    assert wording.size_of(value) == said


@pytest.mark.parametrize(
    ("size", "said"),
    [(256, "256"), (1024, "1K"), (19_000, "19,000"), (98_304, "96K"), (1_000_000, "1M"), (1_000_001, "1,000,001")],
)
def test_sizes_as_the_tutorial_writes_them(size: int, said: str) -> None:
    assert wording.short(size) == said


@pytest.mark.parametrize(
    ("value", "said"), [(0.92, "0.92×"), (0.0341, "0.034×"), (12.345, "12.35×"), (123.4, "123×"), (1234.0, "1,234×")]
)
def test_ratios(value: float, said: str) -> None:
    assert wording.times(value) == said


def test_few_rounds_have_no_interval() -> None:
    assert wording.ratio(Ratio(0.5, 0.5, 0.5, 1, None)) == "0.50× (one round, no interval)"
    assert wording.ratio(Ratio(0.5, 0.4, 0.6, 2, None)) == "0.50× (2 rounds, no interval)"
    assert wording.ratio(Ratio(0.5, 0.4, 0.6, 3, None)) == "0.50× (noise unknown)"
    assert wording.ratio(Ratio(0.5, 0.4, 0.6, 3, 1.0)) == "0.50× (0.40–0.60)"
