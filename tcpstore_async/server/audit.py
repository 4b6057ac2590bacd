"""The audit log: a line for each action refused to a peer, and for each process's requests to an admin socket.

It is a logger of its own, `tcpstore_async.audit`. Knows clocks and logging. Must not know what is refused, or why.
Invariant: every action is logged or counted. A second has at most `most_lines` lines about single actions, as many with
the count of one peer each, and one with the count of all other peers, so that the counts are exact.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

from ..base.errors import counted

_SECONDS: Final = 1.0

log = logging.getLogger("tcpstore_async.audit")


class AuditLog:
    """The audit log of one server or relay."""

    def __init__(self, most_lines: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Give up to `most_lines` actions per second lines of their own; all if it is 0."""
        self._most = most_lines
        self._clock = clock
        self._began = 0.0
        """Start of the current second."""
        self._lines = 0
        self._left_out: dict[str, int] = {}
        """Actions of this second without a line, for each of at most `most_lines` peers."""
        self._others: int = 0
        """Actions of all other peers without a line."""

    def add(self, peer: str, text: str, level: int = logging.WARNING) -> bool:
        """Log an action of a peer, such as a host or a user, or count it; return whether it was logged."""
        now = self._clock()
        if now - self._began >= _SECONDS:
            self.flush()
            self._began, self._lines = now, 0
        if not self._most or self._lines < self._most:
            self._lines += 1
            log.log(level, "%s", text)
            return True
        left_out = self._left_out
        if peer in left_out or len(left_out) < self._most:
            left_out[peer] = left_out.get(peer, 0) + 1
        else:
            self._others += 1
        return False

    def flush_due(self) -> float:
        """Log the counts of a past second; return the seconds until the next are due, 0 if there are none."""
        if not self._left_out:
            return 0.0
        left = self._began + _SECONDS - self._clock()
        if left > 0:
            return left
        self.flush()
        return 0.0

    def flush(self) -> None:
        """Log all counts."""
        for peer, number in self._left_out.items():
            log.warning("omitted %s about %s in the last second", counted(number, "more line"), peer)
        if self._others:
            log.warning("omitted %s about other peers in the last second", counted(self._others, "more line"))
        self._left_out.clear()
        self._others = 0
