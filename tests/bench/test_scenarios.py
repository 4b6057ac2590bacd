"""Scenarios: which samples belong to them, what is compared, and their table in the documentation."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.scale.scenarios import SCENARIOS, scenario_of, table
from bench_factories import samples


@pytest.mark.parametrize(
    ("name", "scenario", "operation"),
    [
        ("barrier", "barrier", ""),
        ("barrier-opcode", "barrier-opcode", ""),
        ("operations-multi-get", "operations", "multi-get"),
        ("initial", "initial", ""),
    ],
)
def test_to_which_scenario_a_sample_belongs(name: str, scenario: str, operation: str) -> None:
    found, what = scenario_of(name)
    assert (found.name, what) == (scenario, operation)


@pytest.mark.parametrize(
    ("name", "value"),
    [("init", 8.0), ("steady", 0.004), ("operations-set", 8.0 / 64), ("memory", 100.0), ("unknown", 8.0)],
)
def test_what_is_compared(name: str, value: float) -> None:
    [sample] = samples("uvloop", [8.0], size=64, p50=0.001, memory=6400)
    assert scenario_of(name)[0].metric.of(sample) == pytest.approx(value)


def test_cpu_is_per_operation() -> None:
    [sample] = samples("uvloop", [8.0], size=64, cpu=0.5)
    for scenario in SCENARIOS.values():
        assert scenario.cpu.of(msgspec.structs.replace(sample, operations=1000)) == pytest.approx(0.0005)
        assert scenario.cpu.of(msgspec.structs.replace(sample, operations=0)) is None


def test_the_documentation_has_the_table() -> None:
    """`python -m bench.scale.scenarios` prints it."""
    page = Path(__file__).parents[2] / "docs" / "benchmark.md"
    assert f"\n{table()}\n" in page.read_text()
