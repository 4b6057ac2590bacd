"""Standard streams of a server process: they must exist, and must never hold it up.

Knows: descriptors 0 to 2, logging. Must not know: what is logged.
Invariant: whoever holds the other end of standard error cannot stop the server by not reading it.
"""

import logging
import os
from typing import Final

from ..server.log_handlers import NonBlockingHandler

STANDARD_ERROR: Final = 2


def open_standard_streams() -> None:
    """Open what the parent closed, so that no socket of ours gets the number of a standard stream."""
    for fd in (0, 1, STANDARD_ERROR):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def log_without_blocking() -> None:
    """Log everything from INFO up to standard error."""
    handler = NonBlockingHandler(STANDARD_ERROR)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.addHandler(handler)
