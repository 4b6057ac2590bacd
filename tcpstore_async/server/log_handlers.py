"""Log handlers that never hold up the event loop.

Knows: descriptors, logging. Must not know: what is logged.
Invariant: whoever holds the other end of a descriptor, or serves the file behind it, cannot stop the server by not
taking its lines. A line that cannot be written is dropped and counted, and the next one says how many were.
"""

import logging
import os
import queue
import select
import stat
import threading
import time
from typing import Final

from .process.protocol import Line, encode

_LONGEST: Final = 4096
"""A pipe that can be written takes at least so many bytes (PIPE_BUF) without blocking."""

_PATIENCE: Final = 0.1
"""Seconds to wait, once, for a file that does not take a line; after that lines queue up until it does."""

_MOST_QUEUED: Final = 1000
"""Lines that wait for a file."""

_MOST_PER_SECOND: Final = 20
"""Lines that a server process sends to its owner, whose program has other things to do."""

_write = os.write


class NonBlockingHandler(logging.Handler):
    """Writes a line to a descriptor if that is possible at once; else the line is dropped, and counted.

    A regular file is always writable, says `poll`, even if its server hangs: a thread writes to it.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._lost = 0
        self._file = _FileWriter(fd) if _is_file(fd) else None
        self._poll = select.poll() if hasattr(select, "poll") else None
        if self._poll is not None:
            self._poll.register(fd, select.POLLOUT)

    def emit(self, record: logging.LogRecord) -> None:
        lost = f" ({self._lost} lines before this one were lost: nobody read them)" if self._lost else ""
        if self._put(self.encode(record, lost)):
            self._lost = 0
        else:
            self._lost += 1

    def encode(self, record: logging.LogRecord, lost: str) -> bytes:
        """Encode a record as one line that a pipe takes whole."""
        return f"{self.format(record)}{lost}".encode(errors="replace")[: _LONGEST - 1] + b"\n"

    def _put(self, line: bytes) -> bool:
        if self._file is not None:
            return self._file.put(line)
        if self._poll is not None and not self._poll.poll(0):
            return False
        try:
            return _write(self._fd, line) == len(line)
        except OSError:
            return False  # the other end is gone


class OwnerHandler(NonBlockingHandler):
    """Sends records, a limited number a second, to the process that owns this one; see `control.Line`."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._second = 0.0
        self._sent = 0

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now - self._second >= 1.0:
            self._second, self._sent = now, 0
        self._sent += 1
        if self._sent > _MOST_PER_SECOND:
            self._lost += 1
        else:
            super().emit(record)

    def encode(self, record: logging.LogRecord, lost: str) -> bytes:
        text = self.format(record)
        for longest in (2 * _LONGEST, 2000, 500):
            line = encode(Line(record.levelno, record.name, text[:longest] + lost))
            if len(line) <= _LONGEST:
                break
        return line


class _FileWriter:
    """A thread that writes lines to a file, which may hang."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lines: queue.Queue[bytes] = queue.Queue(_MOST_QUEUED)
        self._hangs = False
        threading.Thread(target=self._run, name="tcpstore log", daemon=True).start()

    def put(self, line: bytes) -> bool:
        """Have a line written: usually it is when this returns. False if too many wait."""
        lines = self._lines
        with lines.all_tasks_done:
            if not lines.unfinished_tasks:
                self._hangs = False
        try:
            lines.put_nowait(line)
        except queue.Full:
            return False
        if not self._hangs:
            with lines.all_tasks_done:
                self._hangs = not lines.all_tasks_done.wait_for(lambda: not lines.unfinished_tasks, _PATIENCE)
        return True

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            try:
                _write(self._fd, line)
            except OSError:
                pass  # the disk is full, say
            finally:
                self._lines.task_done()


def _is_file(fd: int) -> bool:
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode)
    except OSError:
        return False
