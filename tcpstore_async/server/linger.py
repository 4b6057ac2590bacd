"""Decide when a server whose job is over ends by itself.

Must not know clocks, or how a server ends.
"""


class Linger:
    """Decides that a server is no longer needed: it was used, and has had no client for `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._since: float | None = None
        """When the last client left; None while there are clients."""

    def is_over(self, now: float, clients: int, used: bool) -> bool:
        """Return whether to end, given the time in seconds, the number of clients, and whether one has done anything.

        A probe, which only connects, has not used the server.
        """
        if clients or not used:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since >= self.seconds

    def poll_seconds(self) -> float:
        """Return the time until `is_over` should be asked again."""
        return min(1.0, max(0.05, self.seconds / 4))
