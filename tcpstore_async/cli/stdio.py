"""The standard streams of a server process, which must exist and must never block it.

Invariant: a reader of standard error cannot stop the server by not reading.
"""

import logging
import os
from typing import Final

from ..server.log_handlers import NonBlockingHandler

STANDARD_ERROR: Final = 2


def open_standard_streams() -> None:
    """Open descriptors 0 to 2 where the parent closed them, so that no socket gets the number of a standard stream."""
    for fd in (0, 1, STANDARD_ERROR):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number


def log_without_blocking() -> None:
    """Log to standard error from level INFO on."""
    handler = NonBlockingHandler(STANDARD_ERROR)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.addHandler(handler)
