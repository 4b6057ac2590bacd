"""A turn of a server: what enters its stores meanwhile enters at one time, and what they reply leaves at its end.

Must not know what that is. Invariant: nothing enters the stores outside of a turn.
"""

import time
from collections.abc import Callable

from ..base.clock import Clock
from ..base.mypyc_shim import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class LoopTurn:
    """For `with`. Servers whose peers are served by several threads lock, too: see `FairLock`."""

    def __init__(self) -> None:
        self.clock = Clock()
        """Set to that of the server's stores once there is a server."""
        self.offset: float = 0.0
        """Added to the machine's clock, in seconds."""
        self.stands = False
        """Whether the time stands still, while a record is written."""
        self.end: Callable[[], object] = _nothing
        """Called at the end: writes what is to be sent."""

    def begin(self) -> None:
        """Set the time."""
        if not self.stands:
            self.clock.now = time.monotonic() + self.offset

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()


def _nothing() -> None:
    pass
