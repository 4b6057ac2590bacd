"""A log that peers and outages cannot flood: one line per distinct failure, and then how often it has repeated.

Knows clocks and logging. Must not know what is logged.
Invariant: every message is logged or counted, and every count is logged in the end.
"""

import logging
import re
import time
from collections.abc import Callable
from typing import Final

from ..base.errors import counted

_FIRST_SECONDS: Final = 1.0
"""Time between the first two lines about one failure; it doubles with each line."""

_MOST_SECONDS: Final = 60.0
"""Longest time between two lines about one failure."""

_NUMBERS: Final = re.compile(r"\d+")
"""Ports, process ids and counts: texts that differ only in these are about the same failure."""


class _Kind:
    """The last line about failures of one kind, and what was suppressed since."""

    def __init__(self) -> None:
        self.failure = ""
        """The text, without numbers."""
        self.logged_at = 0.0
        self.seconds = _FIRST_SECONDS
        """Until the next line about the same failure."""
        self.suppressed = 0

    def log(self, now: float) -> int:
        """Note that a line is logged; return how many were suppressed before it."""
        suppressed, self.suppressed, self.logged_at = self.suppressed, 0, now
        return suppressed


class RateLimitedLog:
    """Logs at most one message of each kind per second, and a repeated failure ever less often, down to once a minute.

    Other messages are counted, and a later line has the count.
    """

    def __init__(
        self,
        log: logging.Logger = logging.getLogger("tcpstore_async.server"),  # noqa: B008
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._clock = clock
        self._kinds: dict[str, _Kind] = {}

    def add(self, kind: str, text: str) -> bool:
        """Log a message, or count it; return whether it was logged."""
        now = self._clock()
        failure = _NUMBERS.sub("", text)
        known = self._kinds.get(kind)
        if known is None:
            known = self._kinds[kind] = _Kind()
        else:
            is_same = failure == known.failure
            passed = now - known.logged_at
            if passed < (known.seconds if is_same else _FIRST_SECONDS):
                known.suppressed += 1
                return False
            if is_same and passed < 2 * known.seconds:
                known.seconds = min(2 * known.seconds, _MOST_SECONDS)
            else:  # a different failure, or one that had stopped and is back
                known.seconds = _FIRST_SECONDS
        known.failure = failure
        suppressed = known.log(now)
        self._log.warning("%s%s", text, f" ({counted(suppressed, 'similar message')} suppressed)" if suppressed else "")
        return True

    def flush_due(self) -> float:
        """Log the counts that are due; return the seconds until the next one is, 0 if there is none."""
        now = self._clock()
        next_one = 0.0
        for name, kind in self._kinds.items():
            if kind.suppressed and now - kind.logged_at >= kind.seconds:
                self._log_count(name, kind, now)
                kind.seconds = min(2 * kind.seconds, _MOST_SECONDS)
            elif kind.suppressed:
                left = kind.logged_at + kind.seconds - now
                next_one = min(next_one, left) if next_one else left
        return next_one

    def flush(self) -> None:
        """Log all counts."""
        now = self._clock()
        for name, kind in self._kinds.items():
            if kind.suppressed:
                self._log_count(name, kind, now)

    def _log_count(self, name: str, kind: _Kind, now: float) -> None:
        self._log.warning("suppressed %s (kind: %s)", counted(kind.log(now), "similar message"), name)
