"""Each planted defect is found, and what finds it shrinks."""

from __future__ import annotations

import pytest

from properties.shrinking import shrink
from simulation.planted import planted
from simulation.run import KINDS, first_seed

pytestmark = [pytest.mark.slow, pytest.mark.interpreted("nothing can be planted into compiled classes")]

MOST = 3000
"""Schedules within which a defect is found."""


@pytest.mark.parametrize("name", [name for kind in KINDS.values() for name in kind.defects])
def test_a_planted_defect_is_found(name: str) -> None:
    with planted(name):
        found = first_seed(name, MOST)
        assert found is not None, f"{MOST} schedules do not notice {name}"
        kind, seed = found
        module = KINDS[kind].steps
        if module is None:
            return
        failing = module.chosen(seed)
        short = shrink(failing, module.fault)
        assert module.fault(short) is not None
        assert len(short.steps) <= len(failing.steps)
    assert module.fault(failing) is None
    assert module.fault(short) is None
