"""The child side of a server process: it follows its owner.

Knows the owner's process and the control socket. Must not know how a server is assembled.
Invariants: an owner that ends, in whatever way, ends its server. The server first frees the port and reports that; then
the ranks still connected get their grace, and no waiter is woken.
"""

import array
import asyncio
import faulthandler
import logging
import os
import signal
import socket
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from ...auth.tokens import HostTokens
from ...base.errors import DistNetworkError
from ..log_handlers import OwnerHandler
from .pidfd import exists, open_pidfd
from .protocol import Event, LineReader, LogLine, encode

if TYPE_CHECKING:
    from ..base import Server

_STDIN: Final = 0
STDERR: Final = 2

_POLL: Final = 1.0
"""Seconds between checks that the owner is alive, where the kernel does not report its end."""

_IGNORED_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a job manager sends to every process of a job. The server must outlive the ranks."""


def read_tokens() -> HostTokens | None:
    """Read tokens from standard input, if it is a pipe, and close it. Raises EOFError if the owner ended first."""
    awaited = stat.S_ISFIFO(os.fstat(_STDIN).st_mode)
    line = b""
    while not line.endswith(b"\n") and (chunk := os.read(_STDIN, 1 << 16)):
        line += chunk
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, _STDIN)
    os.close(nothing)
    if awaited and not line:
        raise EOFError("the owner process exited before it passed on its tokens")
    return HostTokens.decode(line) if line else None


def ignore_signals() -> None:
    """Ignore job signals: the owner decides when the server ends. Only in the main thread of a server process."""
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def log_to_owner(log_fd: int) -> None:
    """Send the log and tracebacks of crashes to the owner. Only in a server process."""
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.addHandler(OwnerHandler(log_fd))
    faulthandler.enable(log_fd, all_threads=False)


def announce_end(log_fd: int) -> None:
    """Announce an orderly exit: a process that ends without it has crashed."""
    with suppress(OSError):
        os.write(log_fd, encode(LogLine(over=True)))


class Owner:
    """The process that owns this server."""

    def __init__(self, pid: int, control_fd: int, pidfd: int | None = None) -> None:
        """Follow the process `pid`; `pidfd` is its pidfd, or -1 if the system has none.

        With None, `pid` must be the parent of this process. Raises DistNetworkError if `control_fd` is not a socket.
        """
        self._pid = pid
        try:
            self._control = socket.socket(fileno=control_fd)
        except OSError as error:
            raise DistNetworkError(
                f"cannot use file descriptor {control_fd} as the control socket: {error.strerror}"
            ) from None
        self._control.setblocking(False)
        self._lines = LineReader(self._control)
        self._over = asyncio.Event()
        self._joins = 0
        self._complete: float | None = None
        """Time after which connections belong to the next round."""
        self._loop = asyncio.get_running_loop()
        self._is_parent = pidfd is None
        self._pidfd = open_pidfd(pid) if pidfd is None else None if pidfd < 0 else pidfd
        self._next_check: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Free the descriptors."""
        self._unwatch()
        self._control.close()

    def report(self, event: Event) -> None:
        """Send an event to the owner, if it still runs."""
        with suppress(OSError):
            self._control.send(encode(event))

    def report_ready(self, event: Event) -> None:
        """Send the event `ready` with a pidfd of this process, if the system has pidfds."""
        own = open_pidfd(os.getpid())
        rights = [] if own is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [own]))]
        try:
            with suppress(OSError):
                self._control.sendmsg([encode(event)], rights)
        finally:
            if own is not None:
                os.close(own)

    async def follow(self, server: "Server", grace: float) -> None:
        """Execute the owner's commands until it stops the server or ends; then give the ranks their grace."""
        self._loop.add_reader(self._control, self._read, server)
        try:
            self._watch()
            await self._over.wait()
            self._unwatch()  # the ranks get their grace even if the owner ends now
            await self._drain(server, grace)
        finally:
            self._loop.remove_reader(self._control)

    async def _drain(self, server: "Server", grace: float) -> None:
        server.stop_accepting()
        server.announce(0)
        if self._complete is not None:
            server.close_latecomers(self._complete)
        why = "the server exits with the process that hosts it, so agents cannot form rounds here"
        server.end_rounds(why, socket.gethostname(), self._pid)
        self.report(Event("stopped", remaining=server.count))
        await server.drain(grace)

    # Commands of the owner

    def _read(self, server: "Server") -> None:
        try:
            lines = self._lines.read()
        except BlockingIOError:
            return
        except OSError:
            lines = None
        if lines is None:  # the owner closed it, called exec(), or is ending
            self._loop.remove_reader(self._control)
            self._over.set()
            return
        for line in lines:
            self._execute(server, line.decode())

    def _execute(self, server: "Server", line: str) -> None:
        word, _, number = line.partition(" ")
        if word == "joins":
            self._joins += int(number)
            self._complete = None  # another store shares the server and waits for its ranks
            server.announce(self._joins)
        elif word == "complete":
            # As in PyTorch, the master of a second store does not wait if the first store's ranks suffice: its own may
            # still be connecting.
            self._complete = float(number) if server.all_joined() else None
        elif word == "stop":
            self._over.set()

    # The end of the owner

    def _watch(self) -> None:
        """Stop when the owner ends."""
        if self._pidfd is not None:
            self._loop.add_reader(self._pidfd, self._died)
        self._check()  # it may have ended already, and another process may have its pid

    def _unwatch(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        if self._next_check is not None:
            self._next_check.cancel()
            self._next_check = None

    def _check(self) -> None:
        if os.getppid() != self._pid if self._is_parent else self._pidfd is None and not exists(self._pid):
            self._died()
        elif self._pidfd is None:
            self._next_check = self._loop.call_later(_POLL, self._check)

    def _died(self) -> None:
        self._unwatch()
        self._over.set()
