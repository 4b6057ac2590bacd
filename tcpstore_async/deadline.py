"""When something must be over.

Knows: the monotonic clock, which thread runs handlers of signals. Must not know: what is waited for.
Not to be compiled: that a function of the interpreter is entered is what runs the handlers of signals that have come.
"""

import random
import threading
import time
from datetime import timedelta
from typing import Final

DEFAULT_TIMEOUT: Final = timedelta(seconds=300)
"""Of a store, as in PyTorch."""

IDLE_SECONDS: Final = 5.0
"""A connection that was opened beside the first, and is not used for so long, is closed."""

MIN_ROUND_TRIP: Final = 1.0
"""Seconds that a try, or a round trip, may take when the timeout is 0."""

_LOOK: Final = 0.25
"""Seconds that the main thread waits in one system call. A signal that comes just before, while compiled code runs,
does not end that call; its handler runs after it."""

_NEVER: Final = 20 * 24 * 3600.0
"""A timeout of so many seconds is none: system calls take no more than 2**31 ms."""

_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 2.0


def backoff(failures: int) -> float:
    """Return the seconds to wait after so many failures in a row: 0.05, doubled up to 2, by half more or less."""
    return random.uniform(0.5, 1.5) * min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(failures - 1, 10))


class Deadline:
    """When something must be over, in seconds from now; negative means never."""

    def __init__(self, timeout: float, began: float | None = None) -> None:
        """From now on, or from a moment of the monotonic clock."""
        self.timeout = timeout
        self.began = time.monotonic() if began is None else began

    @classmethod
    def of_a_call(cls, timeout: float, began: float | None = None) -> "Deadline":
        """The same for a call, to which 0 means one look: that takes as long as a round trip takes, within a limit."""
        return cls(timeout or MIN_ROUND_TRIP, began)

    def left(self) -> float | None:
        """Seconds left, 0 at the least; None if there is no end."""
        if self.timeout < 0 or self.timeout > _NEVER:
            return None
        return max(0.0, self.began + self.timeout - time.monotonic())

    def moment(self) -> float | None:
        """Seconds to wait until one looks again; None for as long as it takes. Handlers of signals run here."""
        left = self.left()
        if threading.get_ident() != threading.main_thread().ident:
            return left
        return _LOOK if left is None else min(left, _LOOK)

    def passed(self) -> bool:
        return self.left() == 0.0

    def spent(self) -> float:
        return time.monotonic() - self.began
