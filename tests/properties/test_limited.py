"""What is counted for tokens with limits is what their holders have stored, whatever they do and however they leave."""

from __future__ import annotations

import pytest

from properties.limited import fault, run
from simulation.planted import LIMITED, planted
from tcpstore_async.serving import build


@pytest.mark.parametrize("first", range(0, 300, 30))
def test_usage_equals_the_model(first: int) -> None:
    """`python tests/simulation/run.py --kind tokens` runs more of them."""
    assert sum(run(seed) for seed in range(first, first + 30)) > 0


@pytest.mark.slow
@pytest.mark.skipif(build() == "compiled", reason="nothing can be put into compiled classes")
@pytest.mark.parametrize("name", LIMITED)
def test_a_planted_defect_is_found(name: str) -> None:
    with planted(name):
        assert any(fault(seed) is not None for seed in range(300))
