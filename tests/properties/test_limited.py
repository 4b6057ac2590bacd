"""What is counted for tokens with limits is what their holders have stored, whatever they do and however they leave."""

from __future__ import annotations

import pytest

from properties.limited import run


@pytest.mark.parametrize("first", range(0, 300, 30))
def test_usage_equals_the_model(first: int) -> None:
    """`python tests/simulation/run.py --kind tokens` runs more of them."""
    assert sum(run(seed) for seed in range(first, first + 30)) > 0
