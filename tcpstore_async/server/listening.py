"""What every server door needs before a byte flows: addresses, the backlog, file limits, and its log.

Knows: sockets and limits of the operating system. Must not know: the protocol, event loops.
Invariant: no name is looked up but that of the address to listen on, before there are any peers.
"""

import errno
import logging
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from ..errors import DistNetworkError

BACKLOG: Final = 65_535
"""Connections the kernel may hold ready: a whole job may come at once."""

NEWCOMERS: Final = frozenset(
    getattr(errno, name, errno.ECONNABORTED)
    for name in (
        "ECONNABORTED", "EPROTO", "EPERM", "ENETDOWN", "ENETUNREACH", "EHOSTDOWN", "EHOSTUNREACH", "ENONET",
        "ENOPROTOOPT", "EOPNOTSUPP",
    )
)  # fmt: skip
"""Errors of `accept` that concern one connection, which is lost already: the next one may be fine."""

_SILENCE: Final = 180
_PROBES: Final = 4
_PROBE_PAUSE: Final = 30
"""Seconds of silence until a peer's system is asked whether it is there, how often, and seconds in between."""

_UNHEARD: Final = 300
"""Seconds until a peer is given up whose system does not acknowledge what it is sent."""

START_TIMEOUT: Final = 60.0
"""Seconds that a caller who waits for nobody, whose timeout is 0, waits for a server. Usually it takes 0.1."""

RESERVE: Final = 64
"""File descriptors that connections never get: for the loop, logs, and to be able to refuse."""

_M_MMAP_THRESHOLD: Final = -3
"""From <malloc.h>; where there is no such option, nothing changes."""

_LARGE: Final = 1 << 20

_TABLE: Final = 131_072
"""Open files that the kernel's table is made for in advance, at most: a mebibyte, for 98,304 ranks and more."""

_FEW: Final = 64
"""Fewer connections than that are not what somebody wanted."""

log = logging.getLogger("tcpstore_async.server")


BACKENDS: Final = ("uv", "threaded")
"""Kinds of server that there are."""

Address = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]
"""What `socket.bind` takes, as `socket.getaddrinfo` gives it."""


def listen(host: str, port: int) -> socket.socket:
    """A non-blocking socket that listens on exactly this address; port 0 lets the kernel choose.

    `host` is an IPv4 or IPv6 literal or a name of this machine; `::` listens on every address of both families.
    Raises DistNetworkError, and ValueError for a port that there is not.
    """
    family, address = resolve(host, port)
    try:
        return listen_at(family, address)
    except OSError as error:
        raise DistNetworkError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from None


def resolve(host: str, port: int) -> tuple[int, Address]:
    """Family and address to listen on. Raises as `listen` does."""
    check_port(port)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DistNetworkError(f"cannot listen on {host}: {reason}") from None
    return family, address


def check_port(port: int) -> None:
    """Raise ValueError for a port that there is not."""
    if not 0 <= port <= 65535:
        raise ValueError(f"port must be from 0 to 65535, not {port}")


def listen_at(family: int, address: Address) -> socket.socket:
    """A non-blocking socket that listens on this address. Raises OSError."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if address[0] == "::" else 1)
        listener.bind(address)
        prepare(listener)
    except OSError:
        listener.close()
        raise
    return listener


def adopt(fd: int) -> socket.socket:
    """The same for a socket that was bound, or listens already, elsewhere. Owns the descriptor from here on.

    Raises DistNetworkError if `fd` is not a TCP socket.
    """
    try:
        listener = socket.socket(fileno=fd)
    except OSError as error:
        raise DistNetworkError(f"cannot listen on file descriptor {fd}: {error.strerror}") from None
    if listener.family not in (socket.AF_INET, socket.AF_INET6) or listener.type != socket.SOCK_STREAM:
        listener.close()
        raise DistNetworkError(f"cannot listen on file descriptor {fd}: it is not a TCP socket")
    try:
        prepare(listener)
    except OSError as error:
        listener.close()
        raise DistNetworkError(f"cannot listen on file descriptor {fd}: {error.strerror}") from None
    return listener


def prepare(listener: socket.socket) -> None:
    """Listen, with the options that accepted sockets inherit: a peer that lost power must not stay for ever."""
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _SILENCE),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_KEEPINTVL", _PROBE_PAUSE),
        ("TCP_USER_TIMEOUT", 1000 * _UNHEARD),
    ):
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    listener.setblocking(False)
    listener.listen(BACKLOG)


def tell_of_short_backlog(ranks: int | None = None) -> None:
    """Log if the kernel cuts the backlog: a warning if so many ranks would see resets, else a word."""
    try:
        somaxconn = int(Path("/proc/sys/net/core/somaxconn").read_text())
    except (OSError, ValueError):
        return
    if somaxconn >= BACKLOG or (ranks is not None and ranks <= somaxconn):
        return
    log.log(
        logging.INFO if ranks is None else logging.WARNING,
        "net.core.somaxconn is %d: more ranks than that connecting at once may be reset%s; "
        "sysctl -w net.core.somaxconn=%d allows for all",
        somaxconn,
        "" if ranks is None else f", and {ranks} are to come",
        BACKLOG,
    )


def raise_file_limit() -> None:
    """Raise this process's soft limit of open files to the hard one. For processes that are the server, no others."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # macOS refuses "unlimited"
        log.warning("the limit of open files stays at %d: %s", soft, error)


def max_connections_by_files() -> int:
    """How many more connections this process can hold, a reserve kept back."""
    if sys.platform == "win32":
        return 2**31
    import resource

    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return 2**31
    return max(1, soft - _open_files() - RESERVE)


def _open_files() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 32


def presize_file_table(fd: int, connections: int) -> None:
    """Have the kernel's table of open files, which never shrinks, hold so many connections before they come.

    `fd` is any open descriptor. The table grows by doubling, and in a process with threads Linux waits each time until
    every processor has passed a certain point: tens of milliseconds in which nothing is accepted, while a herd of ranks
    fills the backlog, is not heard, and tries again a second later.
    """
    if sys.platform == "win32":
        return
    import fcntl

    with suppress(OSError):
        os.close(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, min(connections + RESERVE, _TABLE) - 1))


def reserve_connections(listener: socket.socket, host: str, port: int, most: int) -> int:
    """How many connections a server may hold, at most `most` unless that is 0; prepares the kernel, tells the log."""
    room = max_connections_by_files()
    connections = min(room, most or room)
    presize_file_table(listener.fileno(), connections)
    log.info("listening on %s, port %d, for up to %d connections", host, port, connections)
    if connections == room < _FEW:
        log.warning("the limit of open files leaves room for only %d connections", room)
    return connections


def free_large_memory() -> None:
    """Have malloc give large blocks back to the system when they are freed.

    With a thread for each connection, it would keep tens of mebibytes for each that has ever handled a large value.
    """
    with suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE)


class RateLimitedLog:
    """What peers did wrong, logged at most once a second for each kind, with a count of the others."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def add(self, kind: str, text: str) -> bool:
        """Log it, or count it; whether it was logged."""
        now = time.monotonic()
        if now - self._last.get(kind, -1.0) < 1.0:
            self._unsaid[kind] = self._unsaid.get(kind, 0) + 1
            return False
        self._last[kind] = now
        unsaid = self._unsaid.pop(kind, 0)
        log.warning("%s%s", text, f" ({unsaid} more of the kind since the last such line)" if unsaid else "")
        return True

    def finish(self) -> None:
        """Say what is still unsaid."""
        for kind, count in self._unsaid.items():
            self._last[kind] = time.monotonic()
            log.warning("%d more of the kind %r since the last such line", count, kind)
        self._unsaid.clear()
