"""Schedules of stores with names end without a finding; each planted defect is found. `run.py` runs more of them."""

from __future__ import annotations

import pytest

from simulation.planted import NAMED, planted
from simulation.stores import chosen, fault, run, shrink
from tcpstore_async.serving import build

PORTION = 500
MOST = 500
"""Schedules within which a defect is found."""


@pytest.mark.parametrize("first", range(0, 4 * PORTION, PORTION))
def test_schedules_have_no_finding(first: int) -> None:
    for seed in range(first, first + PORTION):
        try:
            run(chosen(seed))
        except Exception as error:
            pytest.fail(f"python tests/simulation/run.py --kind stores --seed {seed}: {error!r}")


@pytest.mark.slow
@pytest.mark.skipif(build() == "compiled", reason="nothing can be put into compiled classes")
@pytest.mark.parametrize("name", NAMED)
def test_a_planted_defect_is_found(name: str) -> None:
    with planted(name):
        failing = next((schedule for schedule in map(chosen, range(MOST)) if fault(schedule) is not None), None)
        assert failing is not None, f"{MOST} schedules do not notice that {name}"
        short = shrink(failing)
        assert fault(short) is not None
        assert len(short.steps) <= len(failing.steps)
    assert fault(failing) is None
    assert fault(short) is None
