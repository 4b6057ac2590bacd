"""Peers that make the server hold all they can do honest ones no harm; what 0.1.0 did not count is noticed."""

from __future__ import annotations

import pytest

from properties.fleet import Difference
from simulation.hogs import perform
from simulation.planted import HOGGED, planted
from tcpstore_async.serving import build


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_runs_have_no_finding(first: int) -> None:
    assert sum(map(perform, range(first, first + 10))) > 0


def test_an_evicted_peer_that_goes_on_sending() -> None:
    perform(7_000_348)


@pytest.mark.slow
@pytest.mark.skipif(build() == "compiled", reason="nothing can be put into compiled classes")
@pytest.mark.parametrize("name", HOGGED)
def test_a_planted_defect_is_found(name: str) -> None:
    with planted(name), pytest.raises(Difference):
        for seed in range(100):
            perform(seed)
