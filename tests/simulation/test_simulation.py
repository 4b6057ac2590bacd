"""Short schedules end without a finding, and each planted defect is found. `run.py` runs more of them."""

from __future__ import annotations

import pytest

from simulation.planted import PLANTED, planted
from simulation.schedule import chosen, fault, run, shrink
from tcpstore_async.serving import build

PORTION = 500
MOST = 3000
"""Schedules within which a defect is found."""


@pytest.mark.parametrize("first", range(0, 10 * PORTION, PORTION))
def test_schedules_have_no_finding(first: int) -> None:
    for seed in range(first, first + PORTION):
        try:
            run(chosen(seed))
        except Exception as error:
            pytest.fail(f"python tests/simulation/run.py --seed {seed}: {error!r}\n{shrink(chosen(seed))}")


def test_a_seed_means_one_schedule() -> None:
    assert chosen(7) == chosen(7) != chosen(8)


@pytest.mark.slow
@pytest.mark.skipif(build() == "compiled", reason="nothing can be put into compiled classes")
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_defect_is_found(name: str) -> None:
    with planted(name):
        failing = next((schedule for schedule in map(chosen, range(MOST)) if fault(schedule) is not None), None)
        assert failing is not None, f"{MOST} schedules do not notice that {name}"
        short = shrink(failing)
        assert fault(short) is not None
        assert len(short.steps) <= len(failing.steps)
    assert fault(failing) is None
    assert fault(short) is None
