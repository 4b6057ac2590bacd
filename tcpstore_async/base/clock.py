"""The time, as an input: whoever drives a server's stores sets it once a turn, and nothing in them reads any other.

Invariant: it changes between events only, so what is executed again at the same times does the same.
"""


class Clock:
    """The time of the present turn."""

    def __init__(self) -> None:
        self.now: float = 0.0
        """In seconds of the server's clock, which is monotonic."""
