"""A turn of a server: what enters its stores meanwhile enters at one time.

Must not know what that is. Invariant: nothing enters the stores outside of a turn.
"""

import time

from ..base.clock import Clock
from ..base.mypyc_shim import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class LoopTurn:
    """For `with`. Servers whose peers are served by several threads lock, too: see `FairLock`."""

    def __init__(self) -> None:
        self.clock = Clock()
        """Set to that of the server's stores once there is a server."""

    def begin(self) -> None:
        """Set the time."""
        self.clock.now = time.monotonic()

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        pass
