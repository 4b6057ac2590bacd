"""The server behind one of PyTorch's own C++ clients, which runs as long as that client exists.

PyTorch has no function that returns whether its C++ side still holds a store. But a C++ client owns one TCP connection
from its construction to its destruction, so its server is needed while that socket is open in this process. The
process's table of descriptors tells; where it cannot be listed, or does not have the socket, the server runs until it
is released or the process exits.

This module must not know rendezvous, process groups or the use of the store.
"""

import os
import socket
import stat
import sys
import weakref
from collections.abc import Callable
from typing import Any, Final, Protocol


class Handle(Protocol):
    """A server, or a named store on one, that runs until it is released."""

    port: int
    pid: int

    def release(self) -> None: ...


Sockets = frozenset[tuple[int, int, int]]
"""Open sockets of this process: descriptor, device and inode of each."""

_DESCRIPTORS: Final = "/dev/fd"


def sockets_to(port: int) -> Sockets:
    """Return this process's sockets that are connected to `port`, on whatever host."""
    try:
        descriptors = [int(name) for name in os.listdir(_DESCRIPTORS)]
    except OSError:
        return frozenset()
    found = {fd: _identity(fd) for fd in descriptors}
    return frozenset(one for fd, one in found.items() if one is not None and _peer_port(fd) == port)


def _identity(fd: int) -> tuple[int, int, int] | None:
    """Return what distinguishes a socket from a later one with the same descriptor; None if it is not a socket."""
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return (fd, status.st_dev, status.st_ino) if stat.S_ISSOCK(status.st_mode) else None


def _peer_port(fd: int) -> int | None:
    try:
        copy = os.dup(fd)
        try:
            peer = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            return None
        with peer:
            address = peer.getpeername()
    except OSError:
        return None
    return int(address[1]) if peer.family in (socket.AF_INET, socket.AF_INET6) else None


class NativeServer:
    """The server of a C++ client, which it stops once neither Python nor C++ holds that client any more."""

    def __init__(self, store: Any, handle: Handle, sockets: Sockets) -> None:
        """`sockets` are those that the client opened; another thread's among them only keeps the server longer."""
        self.port = handle.port
        self.pid = handle.pid
        self._handle = handle
        self._sockets = sockets
        self._store = weakref.ref(store, self._dropped)
        _running[id(self)] = self

    def _dropped(self, _: Any, _finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Stop the server if C++ has dropped the store, too. At the interpreter's exit, its owner stops it."""
        if not _finalizing():
            self.stop_if_unused()

    def stop_if_unused(self) -> None:
        """Stop the server if its client no longer exists."""
        if self._store() is None and self._sockets and not any(_identity(one[0]) == one for one in self._sockets):
            self.release()

    def release(self) -> None:
        """Stop the server, even if its client exists. May be called again; in a forked child it does nothing."""
        _running.pop(id(self), None)
        self._handle.release()


_running: Final[dict[int, NativeServer]] = {}


def stop_unused() -> None:
    """Stop the servers whose clients no longer exist: C++ does not report when it drops one."""
    for server in list(_running.values()):
        server.stop_if_unused()
