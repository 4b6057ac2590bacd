"""Ask the kernel which user owns the other end of a connection from this host.

Knows Linux's sock_diag (netlink). Must not know what a connection is for, nor log.
Invariants: one exact look-up per connection, whose cost does not grow with the number of sockets. A user that cannot be
determined is an error, never a guess.
"""

import errno
import os
import socket
import struct
import sys
from contextlib import closing
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any, Final

from ..base.errors import DistNetworkError
from .fork_safety import close_on_fork

_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_NLMSG_ERROR: Final = 2
_NLM_F_REQUEST: Final = 1
_NO_COOKIE: Final = 0xFFFF_FFFF
_ESTABLISHED: Final = 1
_CLOSE_WAIT: Final = 8

_HEADER: Final = struct.Struct("=IHHII")
"""Length, type, flags, sequence number and port of a netlink message."""
_REQUEST: Final = struct.Struct("=BBBxI")
"""The start of inet_diag_req_v2: family, protocol, extensions, states. The socket's addresses follow."""
_PORTS: Final = struct.Struct("!HH")
_INTERFACE: Final = struct.Struct("=III")
"""Interface and cookie, the end of inet_diag_req_v2."""
_ERROR: Final = struct.Struct("=i")
_OWNER: Final = struct.Struct("=II")
"""User and inode, at the end of inet_diag_msg."""
_OWNER_AT: Final = _HEADER.size + 4 + 48 + 12
_MOST_REPLY: Final = 4096


class UnknownOwnerError(Exception):
    """The owner of the other end cannot be determined; the text says why."""


class PeerUsers:
    """Looks up the users of connections from this host. Not to be shared between threads.

    Its netlink socket sees the network namespace of this process.
    """

    def __init__(self) -> None:
        """Raises DistNetworkError if the kernel does not report the owners of sockets, which needs Linux."""
        self.user: int = os.geteuid()
        """The user of this process."""
        self._number = 0
        if not sys.platform.startswith("linux"):
            raise DistNetworkError(
                f"cannot determine which user a connection belongs to on {sys.platform}: this needs Linux"
            )
        try:
            self._netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG)
        except OSError as error:
            raise _unavailable(error.strerror or str(error)) from None
        close_on_fork(self._netlink)
        try:
            self._netlink.setblocking(False)
            self._try()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free the netlink socket. Idempotent."""
        self._netlink.close()

    def look_up(self, connection: socket.socket) -> int:
        """Return the user ID of the process that made the other end of an accepted connection.

        Raises UnknownOwnerError if that end is not, or no longer, a socket of this network namespace.
        """
        try:
            found = self._owner(connection.family, connection.getpeername(), connection.getsockname())
            # No other socket can have the same two addresses while this end is open, so the peer's was found.
            state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        except OSError as error:
            raise UnknownOwnerError(f"the kernel does not report it ({error.strerror})") from None
        if state not in (_ESTABLISHED, _CLOSE_WAIT):
            raise UnknownOwnerError("the peer has already closed the connection")
        return found

    def _owner(self, family: int, peer: tuple[Any, ...], here: tuple[Any, ...]) -> int:
        """Return the user of the socket at `peer` connected to `here`. Raises UnknownOwnerError and OSError."""
        interface = peer[3] if family == socket.AF_INET6 else 0
        addresses = [_packed(family, one[0]) for one in (peer, here)]
        if len(addresses[0]) == 4:
            family = socket.AF_INET
        self._number = self._number + 1 & 0xFFFF_FFFF
        body = (
            _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 1 << _ESTABLISHED)
            + _PORTS.pack(peer[1], here[1])
            + b"".join(address.ljust(16, b"\0") for address in addresses)
            + _INTERFACE.pack(interface, _NO_COOKIE, _NO_COOKIE)
        )
        size = _HEADER.size + len(body)
        self._netlink.sendto(_HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, self._number, 0) + body, (0, 0))
        while True:  # the kernel has answered before `sendto` returns
            reply, (sender, *_) = self._netlink.recvfrom(_MOST_REPLY)
            _, kind, _, number, _ = _HEADER.unpack_from(reply)
            if sender == 0 and number == self._number:
                break
        if kind == _NLMSG_ERROR:
            code = -_ERROR.unpack_from(reply, _HEADER.size)[0]
            if code == errno.ENOENT:
                raise UnknownOwnerError("the connection is not from this host, or the peer has already closed it")
            raise OSError(code, os.strerror(code))
        user: int
        user, inode = _OWNER.unpack_from(reply, _OWNER_AT)
        if not inode:  # no process holds it any more, for which the kernel reports user 0
            raise UnknownOwnerError("the peer has already closed the connection")
        return user

    def _try(self) -> None:
        """Raise DistNetworkError if a connection of this process to itself is not found, or has a different user."""
        if self.user == _overflow_user():
            raise _unavailable(
                f"this process runs as user {self.user}, which stands for all users that are not mapped in this user "
                "namespace"
            )
        with closing(socket.socket()) as listener, closing(socket.socket()) as client:
            try:
                listener.bind(("127.0.0.1", 0))
                listener.listen(1)
                client.connect(listener.getsockname())
                accepted, _ = listener.accept()
                with closing(accepted):
                    found = self.look_up(accepted)
            except OSError as error:
                raise _unavailable(error.strerror or str(error)) from None
            except UnknownOwnerError as error:
                raise _unavailable(f"a connection from this process to itself was not recognized: {error}") from None
        if found != self.user:
            raise _unavailable(
                f"the kernel reported that a connection owned by user {self.user} belongs to user {found}"
            )


def _packed(family: int, host: str) -> bytes:
    """Return an address in bytes, as the kernel keeps it: an IPv4-mapped one as IPv4."""
    data = socket.inet_pton(family, host.partition("%")[0])
    mapped = IPv6Address(data).ipv4_mapped if family == socket.AF_INET6 else None
    return data if mapped is None else mapped.packed


def _overflow_user() -> int:
    """Return the user ID that stands for all unmapped users of this user namespace; -1 if all are mapped."""
    try:
        if Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]:
            return -1
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return -1


def _unavailable(reason: str) -> DistNetworkError:
    return DistNetworkError(f"cannot determine which user a connection belongs to: {reason}")
