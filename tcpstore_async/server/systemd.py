"""systemd's protocols for services: socket activation (LISTEN_FDS) and sd_notify.

Knows the environment and the notification socket. Must not know what is served.
Invariant: without a service manager, or with one that does not listen, nothing changes.
"""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Final

from ..base.errors import DistNetworkError

_FIRST_FD: Final = 3
"""The first descriptor passed, see sd_listen_fds(3)."""

_STATUS_SECONDS: Final = 5.0
"""Time between two status updates without a watchdog."""

log = logging.getLogger("tcpstore_async.server")


def activated_fd(environ: MutableMapping[str, str] = os.environ) -> int | None:
    """Return the descriptor of the socket that systemd passed to this process; None if there is none.

    Removes the variables, so that no child takes them for its own. Raises DistNetworkError for several sockets.
    """
    is_ours = environ.get("LISTEN_PID") == str(os.getpid())
    given = [environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")]
    if not is_ours:
        return None
    if given[1] != "1":
        raise DistNetworkError(
            f"systemd passed {given[1] or 'no'} sockets, but a server listens on exactly one: the socket unit must "
            "have exactly one ListenStream="
        )
    try:
        os.set_inheritable(_FIRST_FD, False)
    except OSError as error:
        raise DistNetworkError(f"cannot listen on the socket that systemd passed: {error.strerror}") from None
    return _FIRST_FD


class Manager:
    """The service manager of this process, if there is one that listens."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Take the address of the manager's socket out of the environment, so that no child uses it."""
        address = environ.pop("NOTIFY_SOCKET", "")
        microseconds = environ.pop("WATCHDOG_USEC", "")
        is_ours = environ.pop("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog: float = int(microseconds) / 1e6 if is_ours and microseconds.isdecimal() else 0.0
        """Seconds without a heartbeat after which the manager ends this process; 0 for never."""
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._socket: socket.socket | None = None
        self._status = ""
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)

    @property
    def is_there(self) -> bool:
        return self._socket is not None

    def notify(self, *assignments: str) -> None:
        """Send assignments such as READY=1; they are lost if the manager's socket is full."""
        if self._socket is None:
            return
        try:
            self._socket.sendto("\n".join(assignments).encode(), self._address)
        except BlockingIOError:
            pass  # the next heartbeat is soon enough for the watchdog
        except OSError as error:
            log.warning("cannot notify the service manager: %s", error.strerror)
            self.close()

    def ready(self, status: str) -> None:
        self._status = status
        self.notify("READY=1", f"STATUS={status}")

    def stopping(self) -> None:
        self.notify("STOPPING=1", "STATUS=waiting for clients to disconnect")

    def beat(self, status: str) -> None:
        """Send a heartbeat if there is a watchdog, and the status if it has changed."""
        changed = [f"STATUS={status}"] if status != self._status else []
        beats = ["WATCHDOG=1"] if self.watchdog else []
        self._status = status
        if changed or beats:
            self.notify(*beats, *changed)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


@asynccontextmanager
async def supervised(status: Callable[[], str]) -> AsyncIterator[Manager]:
    """Notify the service manager that this process is ready, then send heartbeats from its loop; yield the manager.

    `status` returns one line for `systemctl status`.
    """
    manager = Manager()
    beating: asyncio.Task[None] | None = None
    try:
        if manager.is_there:
            manager.ready(status())
            beating = asyncio.get_running_loop().create_task(_beat(manager, status))
        yield manager
    finally:
        if beating is not None:
            beating.cancel()
        manager.close()


async def _beat(manager: Manager, status: Callable[[], str]) -> None:
    seconds = manager.watchdog / 2 or _STATUS_SECONDS
    while manager.is_there:
        await asyncio.sleep(seconds)
        manager.beat(status())
