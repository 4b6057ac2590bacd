"""The real clients on the stage lose nothing; what 0.1.0 lost is found when it is put back."""

from __future__ import annotations

import pytest

from simulation.planted import REAL, planted
from simulation.real import fault, perform, shrink
from simulation.stage import Choices
from tcpstore_async.serving import build

PORTION = 100
MOST = 3000
"""Runs within which a defect is found."""


@pytest.mark.parametrize("first", range(0, 5 * PORTION, PORTION))
def test_runs_have_no_finding(first: int) -> None:
    for seed in range(first, first + PORTION):
        choices = Choices([], seed)
        try:
            perform(choices)
        except Exception as error:
            pytest.fail(f"python tests/simulation/run.py --kind real --seed {seed}: {error!r}")


def test_a_seed_means_one_run() -> None:
    taken = [Choices([], 3), Choices([], 3)]
    for choices in taken:
        perform(choices)
    assert taken[0].taken == taken[1].taken


@pytest.mark.slow
@pytest.mark.skipif(build() == "compiled", reason="nothing can be put into compiled classes")
@pytest.mark.parametrize("name", REAL)
def test_a_planted_defect_is_found(name: str) -> None:
    def finding(given: list[int], seed: int | None = None) -> Exception | None:
        wrong = fault(given, seed)
        return wrong if wrong is not None and REAL[name].finding in str(wrong) else None

    with planted(name):
        seed = next((seed for seed in range(MOST) if finding([], seed) is not None), None)
        assert seed is not None, f"{MOST} runs do not notice {name}"


def test_a_finding_shrinks() -> None:
    def differs(given: list[int]) -> object:
        return True if sum(given) > 10 and given[:1] == [1] else None

    short = shrink([1, 2, 3, 0, 4, 5, 6], differs)
    assert differs(short)
    assert len(short) < 7
