"""A listener that keeps the port number of a named store from being taken for free on its owner's host.

Programs look for a free port by binding or connecting, and nothing else listens at an address that is only a name. It
knows sockets and the background loop; it must not know what the number is for.

Invariants: failing to hold a port is harmless. Connections are accepted, which shows that the port is taken, and then
reset. A forked child holds nothing, and the port of a killed process is free.
"""

import asyncio
import logging
import os
import socket
import struct
import threading
from collections import deque
from contextlib import suppress
from typing import Final

from ..base.errors import reason_of
from ..client import background
from ..server.fork_safety import close_on_fork

log = logging.getLogger("tcpstore_async.stores")

HOLD_PORT: Final = "TCPSTORE_HOLD_PORT"
"""Environment variable: with 0, no port is held."""

_BACKLOG: Final = 8
"""Connections that wait to be accepted: with 0, the second one would hang while this process does not run Python."""

_OPEN_SECONDS: Final = 0.1
"""Seconds until a connection is reset. A reset before the peer's `connect` returns would make that fail."""

_MOST_OPEN: Final = 64
"""Connections that are open at once; older ones are reset earlier."""

_RESET: Final = struct.pack("ii", 1, 0)

_STOP_SECONDS: Final = 1.0
"""Seconds that `close` waits for the loop."""


class HeldPort:
    """A socket that listens on a port of all addresses of this host, of both families."""

    def __init__(self, port: int) -> None:
        """Raises OSError if the port is in use."""
        self._listener = close_on_fork(_listen(port))
        self._fd = self._listener.fileno()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = threading.Event()
        self._peers: deque[socket.socket] = deque()

    def reset_peers(self) -> None:
        """Start to accept and reset connections."""
        background.add_service(self)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is None and self._listener.fileno() >= 0:
            self._loop = loop
            loop.add_reader(self._fd, self._accept, loop)

    def detach(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._fd)
        while self._peers:
            self._reset_oldest()

    def finish(self) -> None:
        self.detach()
        self._listener.close()
        self._closed.set()

    def close(self) -> None:
        """Free the port. Idempotent."""
        if background.is_running_here():
            self.finish()
        else:
            background.call_soon(self.finish)
            self._closed.wait(_STOP_SECONDS)
        self._listener.close()
        background.remove_service(self)

    def _accept(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(OSError):
            self._peers.append(self._listener.accept()[0])
            loop.call_later(_OPEN_SECONDS, self._reset_oldest)
        if len(self._peers) > _MOST_OPEN:
            self._reset_oldest()

    def _reset_oldest(self) -> None:
        if self._peers:
            self._peers.popleft().close()


def hold(port: int) -> HeldPort | None:
    """Hold a port; return None if TCPSTORE_HOLD_PORT is 0 or the port is in use, which is logged."""
    if os.environ.get(HOLD_PORT) == "0":
        return None
    try:
        return HeldPort(port)
    except OSError as error:
        log.debug("port %d of this host is not held for the store with this number: %s", port, reason_of(error))
        return None


def _listen(port: int) -> socket.socket:
    """Return a socket that listens on a port of every address. Closing a connection that it accepts resets it."""
    family, address = (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "")
    listener = socket.socket(family)
    try:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)  # accepted connections inherit it
        listener.setblocking(False)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
