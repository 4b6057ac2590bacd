"""Standard streams of a server process: they must exist, and must never hold it up.

Knows: descriptors 0 to 2, logging. Must not know: what is logged.
Invariant: whoever holds the other end of standard error cannot stop the server by not reading it.
"""

import logging
import os
import select
from typing import Final

STANDARD_ERROR: Final = 2

_LONGEST: Final = 4096
"""A pipe that can be written takes at least so many bytes (PIPE_BUF) without blocking."""


def open_standard_streams() -> None:
    """Open what the parent closed, so that no socket of ours gets the number of a standard stream."""
    for fd in (0, 1, STANDARD_ERROR):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


class NonBlockingHandler(logging.Handler):
    """Writes a line to a descriptor if that is possible at once; else the line is lost, and counted."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._lost = 0
        self._poll = select.poll() if hasattr(select, "poll") else None
        if self._poll is not None:
            self._poll.register(fd, select.POLLOUT)

    def emit(self, record: logging.LogRecord) -> None:
        if self._poll is not None and not self._poll.poll(0):
            self._lost += 1
            return
        lost = f" ({self._lost} lines before this one were lost: nobody read them)" if self._lost else ""
        line = f"{self.format(record)}{lost}".encode(errors="replace")[: _LONGEST - 1] + b"\n"
        try:
            os.write(self._fd, line)
            self._lost = 0
        except OSError:
            self._lost += 1  # the other end is gone


def log_without_blocking() -> None:
    """Log everything from INFO up to standard error."""
    handler = NonBlockingHandler(STANDARD_ERROR)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.addHandler(handler)
