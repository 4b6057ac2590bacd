"""Makes the steps of a run that fails fewer. Must not know what a step is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Step = TypeVar("Step")


def fewest(steps: list[Step], fails: Callable[[list[Step]], bool]) -> list[Step]:
    """Return a part of the steps that still fails, from which none can be left out; all of them if they do not fail."""
    size = max(1, len(steps) // 2)
    while fails(steps):
        at, before = 0, len(steps)
        while at < len(steps):
            shorter = steps[:at] + steps[at + size :]
            if fails(shorter):
                steps = shorter
            else:
                at += size
        if size == 1 and len(steps) == before:
            break
        size = max(1, size // 2)
    return steps
