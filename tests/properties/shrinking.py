"""Shorten a schedule that fails. Must not know what a step is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

Step = TypeVar("Step")


class Schedule(Protocol):
    """A NamedTuple with a list of steps."""

    @property
    def steps(self) -> list[Any]: ...

    def _replace(self, *, steps: list[Any]) -> Any: ...


S = TypeVar("S", bound=Schedule)


def shrink(schedule: S, fault: Callable[[S], Exception | None]) -> S:
    """Return a part of the schedule that still fails, from which no step can be left out."""
    short: S = schedule._replace(
        steps=fewest(schedule.steps, lambda steps: fault(schedule._replace(steps=steps)) is not None)
    )
    return short


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
