"""What a forked child must not inherit.

Knows: sockets that are this process's own. Must not know: what they are for.
Invariant: a forked child closes its copies before it does anything else. A copy of a listening socket would keep the
port, a copy of a control socket would keep the other end from noticing that its owner has gone.
"""

import os
import socket
import weakref
from typing import Final

_private: Final[weakref.WeakSet[socket.socket]] = weakref.WeakSet()


def keep_private(private: socket.socket) -> socket.socket:
    """The same socket, which forked children close."""
    _private.add(private)
    return private


def _close_inherited() -> None:
    for private in list(_private):
        private.close()
    _private.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)
