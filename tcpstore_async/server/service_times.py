"""Histograms of a server's service times.

Must not know what takes the time, or who asks.
Invariant: the size is fixed. One turn of the loop in `_EVERY` is timed, so that the clock costs next to nothing.
"""

import time
from bisect import bisect_left
from typing import Any, Final

BOUNDS: Final[tuple[float, ...]] = (
    0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0,
    5.0, 10.0,
)  # fmt: skip
"""Upper bounds of a histogram's buckets, in seconds; one more bucket follows for longer times."""

_EVERY: Final = 29
"""One turn in this many is timed. A prime, so that it does not follow a pattern of the load."""


class Histogram:
    """A distribution of seconds in fixed buckets."""

    def __init__(self) -> None:
        self.counts: list[int] = [0] * (len(BOUNDS) + 1)
        self.sum: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds

    def as_fact(self) -> dict[str, Any]:
        """Return the histogram for a reply of the admin socket."""
        return {"bounds": list(BOUNDS), "counts": list(self.counts), "sum": round(self.sum, 6)}


class ServiceTimes:
    """Histograms of requests, and of the turns of the loop that serve them."""

    def __init__(self) -> None:
        self.service = Histogram()
        """From the start of a turn, when the kernel has reported a request, until it has been handed the replies."""
        self.turn_times = Histogram()
        """Whole turns."""
        self._untimed: int = 0
        """Turns to skip before the next timed one."""

    def begin(self) -> float:
        """Return the start time of a turn if it is timed; else 0."""
        if self._untimed > 0:
            self._untimed -= 1
            return 0.0
        self._untimed = _EVERY - 1
        return time.perf_counter()

    def served(self, began: float) -> None:
        """Note that a connection was served in a timed turn."""
        self.service.add(time.perf_counter() - began)

    def end(self, began: float) -> None:
        """Note the end of a timed turn."""
        self.turn_times.add(time.perf_counter() - began)
