"""Deadlines on the monotonic clock, for calls that signal handlers may interrupt.

Not to be compiled: the interpreter runs pending signal handlers when it enters a function that is not.
"""

import random
import threading
import time
from datetime import timedelta
from typing import Final

DEFAULT_TIMEOUT: Final = timedelta(seconds=300)
"""Timeout of a store, as in PyTorch."""

IDLE_SECONDS: Final = 5.0
"""Seconds after which an unused connection of a store, other than its first, is closed."""

MIN_ROUND_TRIP: Final = 1.0
"""Seconds that one attempt, or one round trip, may take when the timeout is 0."""

_LOOK: Final = 0.25
"""Seconds that the main thread blocks in one system call. A signal just before it, while compiled code runs, does not
interrupt the call; its handler runs after it."""

_NEVER: Final = 20 * 24 * 3600.0
"""Seconds from which a timeout counts as none: system calls take at most 2**31 ms."""

_FIRST_PAUSE: Final = 0.05
"""Seconds before the second attempt."""

_LONGEST_PAUSE: Final = 2.0
"""Seconds between attempts after many failures."""


def backoff(failures: int, first: float = _FIRST_PAUSE, longest: float = _LONGEST_PAUSE) -> float:
    """Return the seconds to wait after some failures in a row: `first`, doubled up to `longest`, varied by half."""
    return random.uniform(0.5, 1.5) * min(longest, first * 2.0 ** min(failures - 1, 10))


class Deadline:
    """When a timeout, in seconds, ends; a negative one never does."""

    def __init__(self, timeout: float, began: float | None = None) -> None:
        """Start now, or at `began` on the monotonic clock."""
        self.timeout = timeout
        self.began = time.monotonic() if began is None else began

    @classmethod
    def of_a_call(cls, timeout: float, began: float | None = None) -> "Deadline":
        """Return the deadline of a call, for which a timeout of 0 still allows one round trip."""
        return cls(timeout or MIN_ROUND_TRIP, began)

    def left(self) -> float | None:
        """Return the seconds left, at least 0; None without a timeout."""
        if self.timeout < 0 or self.timeout > _NEVER:
            return None
        return max(0.0, self.began + self.timeout - time.monotonic())

    def poll_seconds(self) -> float | None:
        """Return the seconds to block in the next system call, None without limit. Signal handlers run here."""
        left = self.left()
        if threading.get_ident() != threading.main_thread().ident:
            return left
        return _LOOK if left is None else min(left, _LOOK)

    def passed(self) -> bool:
        return self.left() == 0.0

    def spent(self) -> float:
        return time.monotonic() - self.began
