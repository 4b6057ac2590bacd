"""How long a server takes: distributions that are kept while it runs.

Knows numbers of seconds. Must not know what was done in them, nor who asks.
Invariant: what is kept has a fixed size. One turn of the loop in `_EVERY` is timed, so that the clock costs next to
nothing.
"""

import time
from bisect import bisect_left
from typing import Any, Final

BOUNDS: Final[tuple[float, ...]] = (
    0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0,
    5.0, 10.0,
)  # fmt: skip
"""Upper bounds of a histogram's buckets, in seconds; a last bucket is for what took longer."""

_EVERY: Final = 29
"""Of so many turns one is timed: a prime, so that it does not follow a pattern of the load."""


class Histogram:
    """A distribution of seconds in fixed buckets."""

    def __init__(self) -> None:
        self.counts: list[int] = [0] * (len(BOUNDS) + 1)
        self.sum: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds

    def as_fact(self) -> dict[str, Any]:
        """Return it for a reply."""
        return {"bounds": list(BOUNDS), "counts": list(self.counts), "sum": round(self.sum, 6)}


class ServiceTimes:
    """How long requests, and the turns of the loop that serve them, take."""

    def __init__(self) -> None:
        self.service = Histogram()
        """From the beginning of a turn, when the kernel has reported a request, until its replies are handed to it."""
        self.turn_times = Histogram()
        """All that is served in one turn."""
        self._untimed: int = 0
        """Turns until the next one that is timed."""

    def begin(self) -> float:
        """Return the time if the turn that begins is timed; else 0."""
        if self._untimed > 0:
            self._untimed -= 1
            return 0.0
        self._untimed = _EVERY - 1
        return time.perf_counter()

    def served(self, began: float) -> None:
        """A connection has been served in a turn that is timed."""
        self.service.add(time.perf_counter() - began)

    def end(self, began: float) -> None:
        """The turn is over."""
        self.turn_times.add(time.perf_counter() - began)
