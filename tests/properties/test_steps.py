"""Commands that are done in steps mean what they mean at once, whatever comes between two steps."""

from __future__ import annotations

import pytest

from properties.stepped import run


@pytest.mark.parametrize("seed", range(120))
# quirk: wait-in-portions
def test_steps_equal_the_model(seed: int) -> None:
    assert run(seed) > 0
