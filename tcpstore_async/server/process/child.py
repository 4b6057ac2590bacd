"""The server's side of belonging to another process.

Knows: the owner's process, the control socket. Must not know: who starts the server, and with what.
Invariants: an owner that ends, however it does, takes its server with it. The end frees the port first, and says so;
then the ranks that are still there get their grace, and nobody is woken.
"""

import array
import asyncio
import faulthandler
import logging
import os
import signal
import socket
from typing import Final

from ...errors import DistNetworkError
from ..backends import Server
from ..log_handlers import OwnerHandler
from .pidfd import exists, open_pidfd
from .protocol import Event, Line, Lines, encode

_POLL: Final = 1.0
"""Seconds between looks whether the owner lives, where the kernel does not report its death."""

_MEANT_FOR_THE_RANKS: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""A job manager sends these to every process of a job. The store must not go before the ranks."""


def ignore_signals() -> None:
    """Leave it to the owner when the server ends. Only in the main thread of a process that is the server."""
    for name in _MEANT_FOR_THE_RANKS:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def speak_to_owner(log_fd: int) -> None:
    """Send the log, and what kills this process, to the owner. Only in a process that is the server."""
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.addHandler(OwnerHandler(log_fd))
    faulthandler.enable(log_fd, all_threads=False)


def say_over(log_fd: int) -> None:
    """Say that this process ends as it should: one that does not say so has crashed."""
    try:
        os.write(log_fd, encode(Line(over=True)))
    except OSError:
        pass


class Owner:
    """The process that a server belongs to."""

    def __init__(self, pid: int, control_fd: int, pidfd: int | None = None) -> None:
        """With `pidfd`, a descriptor of the owner's or -1 where there are none; without, it must be the parent.

        Raises DistNetworkError if `control_fd` is not a socket.
        """
        self._pid = pid
        try:
            self._control = socket.socket(fileno=control_fd)
        except OSError as error:
            raise DistNetworkError(f"cannot use file descriptor {control_fd} for control: {error.strerror}") from None
        self._control.setblocking(False)
        self._lines = Lines(self._control)
        self._over = asyncio.Event()
        self._joins = 0
        self._complete: float | None = None
        """Since when newcomers belong to a next round."""
        self._loop = asyncio.get_running_loop()
        self._is_parent = pidfd is None
        self._pidfd = open_pidfd(pid) if pidfd is None else None if pidfd < 0 else pidfd
        self._next_look: asyncio.TimerHandle | None = None

    def close(self) -> None:
        self._unwatch()
        self._control.close()

    def tell(self, event: Event) -> None:
        """Report to the owner, if it still listens."""
        try:
            self._control.send(encode(event))
        except OSError:
            pass

    def tell_ready(self, event: Event) -> None:
        """Report that the server serves, and give the owner a descriptor of this process, where there are any."""
        own = open_pidfd(os.getpid())
        try:
            rights = [] if own is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [own]))]
            self._control.sendmsg([encode(event)], rights)
        except OSError:
            pass
        finally:
            if own is not None:
                os.close(own)

    async def follow(self, server: Server, grace: float) -> None:
        """Do as the owner says until it wants the server gone, and let the ranks end."""
        self._loop.add_reader(self._control, self._listen, server)
        try:
            self._watch()
            await self._over.wait()
            self._unwatch()  # the owner may end now: the ranks have their grace all the same
            await self._wind_up(server, grace)
        finally:
            self._loop.remove_reader(self._control)

    async def _wind_up(self, server: Server, grace: float) -> None:
        server.stop_accepting()
        server.announce(0)
        if self._complete is not None:
            server.dismiss_latecomers(self._complete)
        self.tell(Event("stopped", left=server.count))
        await server.drain(grace)

    # What the owner says

    def _listen(self, server: Server) -> None:
        try:
            lines = self._lines.read()
        except BlockingIOError:
            return
        except OSError:
            lines = None
        if lines is None:  # the owner closed it, became another program, or is dying
            self._loop.remove_reader(self._control)
            self._over.set()
            return
        for line in lines:
            self._obey(server, line.decode())

    def _obey(self, server: Server, line: str) -> None:
        word, _, number = line.partition(" ")
        if word == "joins":
            self._joins += int(number)
            self._complete = None  # another store has joined in, and waits for its ranks
            server.announce(self._joins)
        elif word == "complete":
            # A second store's master waits for nobody, as in PyTorch, if the first one's ranks are enough: its own may
            # be on their way still.
            self._complete = float(number) if server.all_joined() else None
        elif word == "stop":
            self._over.set()

    # Whether the owner lives

    def _watch(self) -> None:
        """Notice the end of the owner."""
        if self._pidfd is not None:
            self._loop.add_reader(self._pidfd, self._died)
        self._look()  # it may have ended before it was watched, and its pid be another's now

    def _unwatch(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None

    def _look(self) -> None:
        if os.getppid() != self._pid if self._is_parent else self._pidfd is None and not exists(self._pid):
            self._died()
        elif self._pidfd is None:
            self._next_look = self._loop.call_later(_POLL, self._look)

    def _died(self) -> None:
        self._unwatch()
        self._over.set()
