"""Each planted defect of links is found. That there is none without is shown by tests/properties/test_links.py."""

from __future__ import annotations

import pytest

from properties.linked import chosen, fault, shrink
from simulation.planted import LINKED, planted
from tcpstore_async.serving import build

MOST = 100
"""Schedules within which a defect is found."""


@pytest.mark.slow
@pytest.mark.skipif(build() == "compiled", reason="nothing can be put into compiled classes")
@pytest.mark.parametrize("name", LINKED)
def test_a_planted_defect_of_links_is_found(name: str) -> None:
    with planted(name):
        failing = next((one for one in map(chosen, range(MOST)) if fault(*one) is not None), None)
        assert failing is not None, f"{MOST} schedules do not notice that {name}"
        links, steps, portion = failing
        short = shrink(links, steps, portion)
        assert fault(links, short, portion) is not None
        assert len(short) <= len(steps)
    assert fault(links, steps, portion) is None
    assert fault(links, short, portion) is None
