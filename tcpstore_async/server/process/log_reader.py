"""What a server process says, in the logging of its owner.

Knows: the socket that is the server's standard error, the logging module, fork. Must not know: the control socket.
Invariants: the thread that listens sleeps while the server is silent, keeps no interpreter alive, and ends when the
server has ended. A server that ends without having said so is one error line. No fork happens while the thread logs, so
that a forked child finds no lock taken.
"""

import logging
import os
import signal
import socket
import threading
from typing import Final

import msgspec

from .pidfd import Process
from .protocol import Line, Lines

log = logging.getLogger("tcpstore_async.server")

_LONGEST: Final = 2000
"""Characters of the last words that are logged."""

_END: Final = 10.0
"""Seconds until a process that has closed its sockets has ended, at the most."""

_FORK_PATIENCE: Final = 1.0
"""Seconds that a fork waits for a log handler that does not return."""


class ChildLog:
    """Logs what a server process says, and how it ends."""

    def __init__(self, source: socket.socket, process: Process, port: int) -> None:
        """Listen to `source`, which is closed in any case. Raises RuntimeError if there can be no thread."""
        self._source = source
        self._process = process
        self._port = port
        self._killed = ""
        self._raw: list[str] = []
        """Lines that are not of the server's log."""
        self._thread = threading.Thread(target=self._listen, name="tcpstore server log", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            source.close()
            raise

    def expect_kill(self, why: str) -> None:
        """Say, when the end comes, that the owner has killed the server, and why."""
        self._killed = why

    def join(self, seconds: float) -> None:
        """Wait until everything has been logged."""
        if threading.current_thread() is not self._thread:  # a collection may stop the server there
            self._thread.join(seconds)

    def _listen(self) -> None:
        over = False
        with self._source:
            lines = Lines(self._source)
            try:
                while (read := lines.read()) is not None:
                    for line in read:
                        over |= self._hear(line)
            except OSError:
                pass  # it has ended
        self._process.wait(_END)
        status = self._process.reap()
        self._raw += lines.rest.decode(errors="replace").splitlines()
        if over and not self._killed:
            self._tell_raw()
            return
        cause = self._killed or _cause(status, self._raw)
        _emit(logging.ERROR, log.name, f"the server of port {self._port}, process {self._process.pid}, {cause}")

    def _hear(self, line: bytes) -> bool:
        """Log a line; whether it is the last one."""
        try:
            said = msgspec.json.decode(line, type=Line)
        except msgspec.DecodeError:
            self._raw.append(line.decode(errors="replace"))
            del self._raw[:-100]
            return False
        self._tell_raw()
        if not said.over:
            _emit(said.level, said.name, said.text)
        return said.over

    def _tell_raw(self) -> None:
        if self._raw:
            _emit(logging.WARNING, log.name, f"the server of port {self._port} wrote: {last_words(self._raw)}")
            self._raw.clear()


def last_words(lines: list[str]) -> str:
    """What was written to standard error, in one line."""
    return "; ".join(text for line in lines if (text := line.strip()))[:_LONGEST]


def _cause(status: int | None, raw: list[str]) -> str:
    """What a server died of."""
    words = last_words(raw)
    by = ""
    if status is not None:
        by = f" of {signal.Signals(-status).name}" if -status in signal.valid_signals() else f" with status {status}"
    if words:
        return f"crashed{by}: {words}"
    return f"died{by}" if by else "was killed (SIGKILL: out of memory? see dmesg, or the memory limit of the job)"


# One lock over all of them, which a fork takes

_logging = threading.RLock()


def _emit(level: int, name: str, text: str) -> None:
    with _logging:
        logger = logging.getLogger(name)
        if logger.isEnabledFor(level):
            logger.log(level, "%s", text)


def _before_fork() -> None:
    _logging.acquire(timeout=_FORK_PATIENCE)


def _after_fork_in_parent() -> None:
    try:
        _logging.release()
    except RuntimeError:
        pass  # it was not to be had


def _after_fork_in_child() -> None:
    global _logging
    _logging = threading.RLock()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
