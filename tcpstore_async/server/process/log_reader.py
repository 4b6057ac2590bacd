"""The parent side of a server's log: pass its records, and how it ended, to the owner's logging.

The server is no child, so it has no exit status: `faulthandler` reports signals that it can catch, and no output at all
means SIGKILL. Knows the socket that is the server's standard error, the logging module, and fork. Must not know the
control socket.

Invariants: the reading thread sleeps while the server logs nothing, keeps no interpreter alive, and ends after the
server. A server that ends without announcing it is one error in the log. No fork happens while the thread logs, so that
a forked child inherits no locked lock.
"""

import logging
import os
import signal
import socket
import threading
from typing import Final

import msgspec

from ...base.locks import RLock
from .pidfd import Process
from .protocol import LineReader, LogLine

log = logging.getLogger("tcpstore_async.server")

_MOST_LOGGED: Final = 2000
"""Most characters of raw output in one record."""

_END_TIMEOUT: Final = 10.0
"""Seconds to wait for the end of a process that has closed its sockets."""

_FORK_TIMEOUT: Final = 1.0
"""Seconds that a fork waits for a log handler that does not return."""


class LogReader:
    """A thread that logs what a server process sends, and how it ends."""

    def __init__(self, source: socket.socket, process: Process, port: int) -> None:
        """Read `source`, and close it in any case. Raises RuntimeError if the thread cannot be started."""
        self._source = source
        self._process = process
        self._port = port
        self.crash = ""
        """How the server process crashed, briefly, for errors; empty until that is known, and after an orderly exit."""
        self._killed = ""
        self._raw: list[str] = []
        """Lines that are not `LogLine`s."""
        self._thread = threading.Thread(target=self._run, name="tcpstore server log", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            source.close()
            raise

    def expect_kill(self, why: str) -> None:
        """Give `why` as the cause when the server ends: the owner is about to kill it."""
        self._killed = why

    def join(self, seconds: float) -> None:
        """Wait up to `seconds` until everything has been logged."""
        if threading.current_thread() is not self._thread:  # a garbage collection may stop the server there
            self._thread.join(seconds)

    def _run(self) -> None:
        over = False
        with self._source:
            lines = LineReader(self._source)
            try:
                while (read := lines.read()) is not None:
                    for line in read:
                        over |= self._log(line)
            except OSError:
                pass  # the server has ended
        self._process.wait(_END_TIMEOUT)
        status = self._process.reap()
        self._raw += lines.rest.decode(errors="replace").splitlines()
        if over and not self._killed:
            self._log_raw()
            return
        server = f"the server process for port {self._port} (pid {self._process.pid})"
        self.crash = f"{server} {self._killed or _cause(status, _essence(self._raw))}"
        _emit(logging.ERROR, log.name, f"{server} {self._killed or _cause(status, self._raw)}")

    def _log(self, line: bytes) -> bool:
        """Log a line; return whether it announces an orderly exit."""
        try:
            record = msgspec.json.decode(line, type=LogLine)
        except msgspec.DecodeError:
            self._raw.append(line.decode(errors="replace"))
            del self._raw[:-100]
            return False
        self._log_raw()
        if not record.over:
            _emit(record.level, record.name, record.text)
        return record.over

    def _log_raw(self) -> None:
        if self._raw:
            _emit(logging.WARNING, log.name, f"the server process for port {self._port} wrote: {joined(self._raw)}")
            self._raw.clear()


def joined(lines: list[str]) -> str:
    """Join raw output into one line for a log."""
    return "; ".join(text for line in lines if (text := line.strip()))[:_MOST_LOGGED]


def _essence(raw: list[str]) -> list[str]:
    """Return the line that names the error: the first of a fatal error, the last of a traceback."""
    lines = [text for line in raw if (text := line.strip())]
    return [line for line in lines if line.startswith("Fatal Python error")][:1] or lines[-1:]


def _cause(status: int | None, raw: list[str]) -> str:
    """Return why a server ended, as a predicate."""
    output = joined(raw)
    end = "crashed" if output else "was killed (SIGKILL; out of memory? See dmesg, or check the job's memory limit)"
    if status is not None:
        killed = -status in signal.valid_signals()
        end = f"was killed by {signal.Signals(-status).name}" if killed else f"exited with status {status}"
    return f"{end}: {output}" if output else end


# One lock for all readers, held during a fork

_logging = RLock()


def _emit(level: int, name: str, text: str) -> None:
    with _logging:
        logger = logging.getLogger(name)
        if logger.isEnabledFor(level):
            logger.log(level, "%s", text)


def _before_fork() -> None:
    _logging.acquire(timeout=_FORK_TIMEOUT)


def _after_fork_in_parent() -> None:
    try:
        _logging.release()
    except RuntimeError:
        pass  # `_before_fork` timed out and does not hold it


def _after_fork_in_child() -> None:
    global _logging
    _logging = RLock()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
