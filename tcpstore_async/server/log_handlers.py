"""Log handlers that never block the event loop.

Knows descriptors and logging. Must not know what is logged.
Invariant: a reader that stops reading, or a file server that hangs, cannot stop the server. A line that cannot be
written is dropped and counted; the next line written ends with the count.
"""

import json
import logging
import os
import queue
import select
import signal
import stat
import threading
import time
from datetime import datetime, timezone
from typing import Final

from .process.protocol import LogLine, encode

_LONGEST: Final = 4096
"""Most bytes that a writable pipe takes without blocking (PIPE_BUF)."""

_FILE_TIMEOUT: Final = 0.1
"""Seconds to wait, once, for a file that hangs; then lines are queued until it recovers."""

_MOST_QUEUED: Final = 1000
"""Most lines queued for a file."""

_MOST_PER_SECOND: Final = 20
"""Most lines per second that a server process sends its owner, which has other things to do."""

_write = os.write


class NonBlockingHandler(logging.Handler):
    """Writes a line to a descriptor if that is possible at once; else drops and counts it.

    A regular file is written by a thread: `poll` reports it as writable even while its file server hangs.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._dropped = 0
        self._file = _FileWriter(fd) if _is_file(fd) else None
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def emit(self, record: logging.LogRecord) -> None:
        dropped = f" ({self._dropped} earlier lines dropped)" if self._dropped else ""
        if self._put(self.encode(record, dropped)):
            self._dropped = 0
        else:
            self._dropped += 1

    def encode(self, record: logging.LogRecord, dropped: str) -> bytes:
        """Encode a record as one line that fits a pipe."""
        return f"{self.format(record)}{dropped}".encode(errors="replace")[: _LONGEST - 1] + b"\n"

    def _put(self, line: bytes) -> bool:
        if self._file is not None:
            return self._file.put(line)
        if not self._poll.poll(0):
            return False
        try:
            return _write(self._fd, line) == len(line)
        except OSError:
            return False  # the other end is gone


class JsonHandler(NonBlockingHandler):
    """Writes a record as one line of JSON, shortened to fit a pipe."""

    def encode(self, record: logging.LogRecord, dropped: str) -> bytes:
        time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        entry = {"time": time, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            entry["exception"] = logging.Formatter().formatException(record.exc_info)
        if dropped:
            entry["dropped"] = dropped.strip(" ()")
        for longest in (2 * _LONGEST, 1000, 150):
            line = json.dumps({name: text[:longest] for name, text in entry.items()}).encode()
            if len(line) < _LONGEST:
                break
        return line + b"\n"


class OwnerHandler(NonBlockingHandler):
    """Sends records to the owner of this process as `LogLine`s, a limited number per second."""

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
            self._dropped += 1
        else:
            super().emit(record)

    def encode(self, record: logging.LogRecord, dropped: str) -> bytes:
        text = self.format(record)
        for longest in (2 * _LONGEST, 2000, 500):
            line = encode(LogLine(record.levelno, record.name, text[:longest] + dropped))
            if len(line) <= _LONGEST:
                break
        return line


class _FileWriter:
    """A thread that writes lines to a file that may hang."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lines: queue.Queue[bytes] = queue.Queue(_MOST_QUEUED)
        self._hangs = False
        threading.Thread(target=self._run, name="tcpstore log", daemon=True).start()

    def put(self, line: bytes) -> bool:
        """Queue a line, and wait until it is written unless the file hangs; return False if the queue is full."""
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
                self._hangs = not lines.all_tasks_done.wait_for(lambda: not lines.unfinished_tasks, _FILE_TIMEOUT)
        return True

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # other threads wait for them
        while True:
            line = self._lines.get()
            try:
                _write(self._fd, line)
            except OSError:
                pass  # the disk may be full
            finally:
                self._lines.task_done()


def _is_file(fd: int) -> bool:
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode)
    except OSError:
        return False
