"""A log that peers cannot flood.

Knows: clocks, logging. Must not know: what is logged.
"""

import logging
import time

log = logging.getLogger("tcpstore_async.server")


class RateLimitedLog:
    """Logs at most one message of each kind per second and counts the others."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}

    def add(self, kind: str, text: str) -> bool:
        """Log a message or count it; return whether it was logged."""
        now = time.monotonic()
        if now - self._last.get(kind, -1.0) < 1.0:
            self._suppressed[kind] = self._suppressed.get(kind, 0) + 1
            return False
        self._last[kind] = now
        suppressed = self._suppressed.pop(kind, 0)
        log.warning("%s%s", text, f" ({suppressed} similar messages suppressed)" if suppressed else "")
        return True

    def flush(self) -> None:
        """Log how many messages of each kind have been suppressed since the last one that was logged."""
        for kind, count in self._suppressed.items():
            self._last[kind] = time.monotonic()
            log.warning("%d similar messages of kind %r suppressed", count, kind)
        self._suppressed.clear()
