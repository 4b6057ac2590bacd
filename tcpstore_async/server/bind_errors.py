"""The errors that PyTorch's two servers raise if a master cannot listen.

Knows their texts and types, which differ between the two. The holder of the port is added after PyTorch's text. Must
not know where the socket comes from.
"""

import errno
import os
import socket
from collections.abc import Collection
from typing import Final

from ..base.addresses import format_address
from ..base.errors import DistError, DistNetworkError, DistStoreError
from .port_holder import holder_of

Tried = list[tuple[int, str, OSError]]
"""Family and address, and the error of listening there."""

_FREE_IT: Final = (
    "close it, or drop all references to it, before another one takes its port, or share its server (multi_tenant=True "
    "for both)"
)


class UvErrors:
    """Errors of the event-driven server, whose texts are libuv's."""

    takes_port_0 = True
    """Whether port 0 matches a given socket of any port."""

    def no_address(self, port: int, tried: Tried, servers: Collection[int]) -> DistError:
        return DistNetworkError(
            "The server socket has failed to listen on any local network address. "
            f"port: {port}, useIpv6: false, {_as_libuv(tried[-1][2])}{_held(port, tried, servers)}"
        )

    def no_socket(self, fd: int, error: OSError) -> DistError:
        return DistNetworkError(f"Failed to open existing socket. socket: {fd}, {_as_libuv(error)}")

    def check_kind(self, listener: socket.socket) -> None:
        """Raise if this is not a stream socket."""
        try:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise self.no_socket(listener.fileno(), error) from None

    def other_port(self, fd: int, bound: int, port: int) -> DistError:
        return DistStoreError(_other_port(fd, bound, port))

    def not_listening(self, fd: int, error: OSError) -> DistError:
        return DistNetworkError(
            f"The server socket has failed to listen on provided socket. socket: {fd}, {_as_libuv(error)}"
        )


class ThreadedErrors(UvErrors):
    """Errors of the legacy server."""

    takes_port_0 = False

    def no_address(self, port: int, tried: Tried, servers: Collection[int]) -> DistError:
        failures = [
            f"The server socket has failed to bind to {format_address(host, port)} {_as_legacy(error)}. "
            f"The server could not be initialized on any address for port={port}, family={int(family)}"
            for family, host, error in tried
        ]
        return DistNetworkError(
            f"The server socket has failed to listen on any local network address. {' '.join(failures)}"
            f"{_held(port, tried, servers)}"
        )

    def no_socket(self, fd: int, error: OSError) -> DistError:
        return DistNetworkError(f"getsockname failed for fd {fd}: {_as_legacy(error)}")

    def check_kind(self, listener: socket.socket) -> None:
        if listener.type != socket.SOCK_STREAM:
            raise self.not_listening(listener.fileno(), OSError(errno.EOPNOTSUPP, "no stream"))

    def other_port(self, fd: int, bound: int, port: int) -> DistError:
        return DistNetworkError(_other_port(fd, bound, port))

    def not_listening(self, fd: int, error: OSError) -> DistError:
        return DistNetworkError(f"Failed to listen on socket initialized from fd {fd}: {_as_legacy(error)}.")


def errors_of(backend: str) -> UvErrors:
    return ThreadedErrors() if backend == "threaded" else UvErrors()


def _other_port(fd: int, bound: int, port: int) -> str:
    return f"listen fd {fd} is bound to port {bound}, expected to be bound to port {port}"


def _held(port: int, tried: Tried, servers: Collection[int]) -> str:
    """Return who holds the port, to follow PyTorch's text; "" if that is not the reason, or no holder is found.

    `servers` are the process ids of this process's own servers.
    """
    _, host, error = tried[-1]
    holder = holder_of(error, host, port)
    if holder is None:
        return ""
    if holder.pid in servers:
        return f"; port {port} is in use by another store of this process, whose server is pid {holder.pid}: {_FREE_IT}"
    if holder.pid == os.getpid() and not holder.peer:
        return f"; port {port} is in use by {holder}: if it is a store, {_FREE_IT}"
    return f"; port {port} is in use by {holder}"


def _as_libuv(error: OSError) -> str:
    number = error.errno or 0
    message = "operation not supported on socket" if number == errno.ENOTSUP else os.strerror(number).lower()
    return f"code: -{number}, name: {errno.errorcode.get(number, 'UNKNOWN')}, message: {message}"


def _as_legacy(error: OSError) -> str:
    number = error.errno or 0
    return f"(errno: {number} - {os.strerror(number)})"
