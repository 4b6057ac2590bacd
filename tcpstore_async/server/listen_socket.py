"""Listening sockets, and the system limits that a server prepares before the first peer connects.

Knows sockets, and the limits of files and backlog. Must not know the protocol, or event loops.
Invariant: the only name resolved is that of the address to listen on, before there are any peers.
"""

import errno
import fcntl
import logging
import os
import resource
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from ..base.addresses import format_address, is_loopback
from ..base.errors import DistNetworkError, counted
from .port_holder import by_holder

BACKLOG: Final = 65_535
"""Connections that the kernel may hold until they are accepted. A whole job may connect at once."""

CONNECTION_ERRORS: Final = frozenset(
    getattr(errno, name, errno.ECONNABORTED)
    for name in (
        "ECONNABORTED", "EPROTO", "EPERM", "ENETDOWN", "ENETUNREACH", "EHOSTDOWN", "EHOSTUNREACH", "ENONET",
        "ENOPROTOOPT", "EOPNOTSUPP",
    )
)  # fmt: skip
"""Errors of `accept` that concern one lost connection: accepting continues with the next one."""

_TCP_INFO: Final = struct.Struct("=24xII")
"""The start of tcp_info, up to two numbers that describe the backlog of a listening socket."""

_KEEP_ALIVE: Final = (
    ("TCP_KEEPIDLE", 180),  # seconds of silence before the first probe
    ("TCP_KEEPCNT", 4),
    ("TCP_KEEPINTVL", 30),
    ("TCP_USER_TIMEOUT", 300_000),  # milliseconds in which sent bytes must be acknowledged
)
"""Options that find out that a peer lost power, where the system has them."""

RESERVE: Final = 64
"""File descriptors reserved for the loop and logs, and for rejecting a connection."""

DEFER_ACCEPT: Final = 1
"""Seconds until a connection is accepted even if its peer has sent nothing."""

_M_MMAP_THRESHOLD: Final = -3
"""From <malloc.h>; a libc without this option ignores it."""

_LARGE: Final = 1 << 20
"""Bytes from which on a freed block is returned to the system."""

_PRESIZED: Final = 131_072
"""Most open files for which the kernel's table is grown in advance: 1 MiB, enough for 98,304 ranks."""

_FEW: Final = 64
"""A lower limit on connections is logged as a warning."""

log = logging.getLogger("tcpstore_async.server")

Address = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]
"""An address for `socket.bind`, as returned by `socket.getaddrinfo`."""


def listen(host: str, port: int, defer_accept: int = 0) -> socket.socket:
    """Return a non-blocking socket that listens on exactly this address; port 0 lets the kernel choose.

    `host` is an IPv4 or IPv6 literal or a name of this machine; `::` stands for every address of both families. For
    `defer_accept` see `wait_for_data`. Raises DistNetworkError, and ValueError for a port out of range.
    """
    family, address = resolve(host, port)
    try:
        return wait_for_data(listen_at(family, address), defer_accept)
    except OSError as error:
        held = by_holder(error, address[0], port)
        raise DistNetworkError(
            f"cannot listen on {format_address(host, port)}: {error.strerror or error}{held}"
        ) from None


def resolve(host: str, port: int) -> tuple[int, Address]:
    """Return the family and address to listen on. Raises as `listen` does."""
    check_port(port)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DistNetworkError(f"cannot listen on {host}: {reason}") from None
    return family, address


def check_port(port: int) -> None:
    """Raise ValueError for a port out of range."""
    if not 0 <= port <= 65535:
        raise ValueError(f"port must be from 0 to 65535, not {port}")


def listen_at(family: int, address: Address, only_v6: bool | None = None) -> socket.socket:
    """Return a non-blocking socket that listens on this address. Raises OSError.

    The address `::` includes IPv4 unless `only_v6` says otherwise.
    """
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            only = address[0] != "::" if only_v6 is None else only_v6
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
        listener.bind(address)
        prepare(listener)
    except OSError:
        listener.close()
        raise
    return listener


def v6_only(listener: socket.socket) -> bool | None:
    """Return whether an IPv6 socket excludes IPv4; None for an IPv4 socket."""
    if listener.family != socket.AF_INET6:
        return None
    return bool(listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY))


def adopt(fd: int) -> socket.socket:
    """Listen on a descriptor that is already bound or listening; return its socket. Takes ownership of it.

    Raises DistNetworkError if `fd` is not a TCP socket.
    """
    listener = None
    try:
        listener = socket.socket(fileno=fd)
        if listener.family not in (socket.AF_INET, socket.AF_INET6) or listener.type != socket.SOCK_STREAM:
            raise OSError(errno.EPROTOTYPE, "it is not a TCP socket")
        prepare(listener)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise DistNetworkError(f"cannot listen on file descriptor {fd}: {error.strerror}") from None
    return listener


def prepare(listener: socket.socket) -> None:
    """Listen, with options that accepted sockets inherit."""
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE:
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    listener.setblocking(False)
    listener.listen(BACKLOG)


def wait_for_data(listener: socket.socket, seconds: int = DEFER_ACCEPT) -> socket.socket:
    """Let the kernel hold each connection until its peer has sent something, or for `seconds`; return the socket.

    The server then wakes once per starting rank instead of twice, for the connection and for its first request. 0
    changes nothing; nor does any number on a system without the option. Not for sockets that others have made.
    """
    if seconds and hasattr(socket, "TCP_DEFER_ACCEPT"):
        with suppress(OSError):  # it only saves time
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, seconds)
    return listener


def log_short_backlog(ranks: int | None = None) -> None:
    """Log if the kernel limits the backlog: as a warning if `ranks` are expected and do not fit, else for debugging."""
    try:
        somaxconn = int(Path("/proc/sys/net/core/somaxconn").read_text())
    except (OSError, ValueError):
        return
    if somaxconn >= BACKLOG or (ranks is not None and ranks <= somaxconn):
        return
    log.log(
        logging.DEBUG if ranks is None else logging.WARNING,
        "net.core.somaxconn is %d%s: connections may be reset if more than %d ranks connect at once; "
        "run sysctl -w net.core.somaxconn=%d",
        somaxconn,
        "" if ranks is None else f", but {ranks} ranks are expected",
        somaxconn,
        BACKLOG,
    )


def warn_if_exposed(
    listener: socket.socket,
    *,
    has_tls: bool,
    requires_auth: bool,
    has_ca: bool = False,
    has_tokens: bool = False,
    requires_tls: bool = False,
) -> None:
    """Warn if a server is reachable from other hosts without protection, and say what to do.

    It `has_tls` if it has a certificate, and `has_ca` if peers that use TLS need one. `requires_auth`: peers on other
    hosts need a token or such a certificate; `requires_tls`: all peers must use TLS.
    """
    host, port = listener.getsockname()[:2]
    if is_loopback(host):
        return
    authenticates = requires_auth or (has_ca and requires_tls)
    if has_tls and authenticates:
        if requires_tls or not has_tokens:  # without tokens, a peer without TLS cannot authenticate
            return
        lacks, danger = "mandatory TLS", "a client that connects without TLS sends its token in clear text"
        needed = ["--require-tls"]
    elif authenticates:
        lacks, danger = "TLS", "anyone who sees its traffic can read tokens, keys and values"
        needed = ["--tls-cert", "--tls-key", "--require-tls"]
    else:
        lacks = "mandatory authentication" if has_tls else "TLS or mandatory authentication"
        danger = "anyone who can reach this port can read and change every key"
        needed = [] if has_tls else ["--tls-cert", "--tls-key"]
        needed += [] if has_tokens or has_ca else ["--token-keys or --tls-ca"]
        needed += ["--require-auth"] + ([] if requires_tls else ["--require-tls"])
    advice = " and ".join(filter(None, [", ".join(needed[:-1]), needed[-1]]))
    log.warning(
        "%s is reachable from other hosts without %s: %s; start it with %s, or listen on 127.0.0.1 (docs/security.md)",
        format_address(host, port),
        lacks,
        danger,
        advice,
    )


def raise_file_limit() -> None:
    """Raise the soft limit on open files to the hard one. Only in a server process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # macOS refuses "unlimited"
        log.warning("could not raise the limit on open files from %d to %d: %s", soft, hard, error)


def max_connections_by_files(reserve: int = RESERVE) -> int:
    """Return how many more connections this process can hold besides `reserve` other files."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return 2**31
    return max(1, soft - _open_files() - reserve)


def _open_files() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 32


def presize_file_table(fd: int, connections: int) -> None:
    """Grow the kernel's table of open files, which never shrinks, to this number of connections.

    `fd` is any open descriptor. The table grows by doubling, and in a process with threads Linux waits for an RCU grace
    period each time: tens of milliseconds without an accept, in which ranks that connect at once overflow the backlog,
    are dropped, and retry a second later.
    """
    with suppress(OSError):
        os.close(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, min(connections + RESERVE, _PRESIZED) - 1))


def accept_queue(listener: socket.socket) -> tuple[int, int] | None:
    """Return how many connections wait to be accepted, and how many may; None if the kernel does not report it."""
    if not sys.platform.startswith("linux") or listener.fileno() < 0:
        return None
    try:
        known = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        waiting, most = _TCP_INFO.unpack(known)
    except (OSError, struct.error):
        return None
    return waiting, most


def reserve_connections(listener: socket.socket, host: str, port: int, limit: int) -> int:
    """Prepare the kernel for the connections of a server; return how many it can hold, at most `limit` unless 0."""
    allowed_by_files = max_connections_by_files()
    connections = min(allowed_by_files, limit or allowed_by_files)
    presize_file_table(listener.fileno(), connections)
    log.info("listening on %s, up to %s", format_address(host, port), counted(connections, "connection"))
    if connections == allowed_by_files < _FEW:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        log.warning("ulimit -n is %d and allows only %s; raise it", files, counted(allowed_by_files, "connection"))
    return connections


def free_large_memory() -> None:
    """Make malloc return large blocks to the system when they are freed.

    In a process with a thread per connection, it would keep tens of MiB for each that ever handled a large value.
    """
    with suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE)
