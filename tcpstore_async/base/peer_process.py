"""Which process is at the other end of a Unix socket.

Must not know who asks. Invariant: it is the kernel that says so.
"""

import errno
import os
import socket
import struct
from typing import Final

_CREDENTIALS: Final = struct.Struct("3i")
"""The value of SO_PEERCRED: process, user and group."""


def peer_process(connection: socket.socket) -> tuple[int, int]:
    """Return its pid and its user. Raises OSError, also where the system does not say."""
    if not hasattr(socket, "SO_PEERCRED"):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    pid, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user
