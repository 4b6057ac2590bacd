"""How a server passes its listening socket to the one that takes its place, so that no client is refused in between.

The new server listens at a Unix socket of its own and asks the old one, which connects there, passes its listening
socket, ends, and closes that connection last. Knows sockets. Must not know why, or what a server has besides.

Invariant: what `receive` returns is nobody else's any more.
"""

import os
import socket
from collections.abc import Callable
from typing import Final

from ..base.errors import DistNetworkError
from .admin_path import own_folder

SECONDS: Final = 60.0
"""Time for the old server to end: it writes a snapshot of everything."""

_CONNECT_SECONDS: Final = 1.0


def receive(ask: Callable[[str], object]) -> int:
    """Return the descriptor of another server's listening socket once that server has ended.

    `ask` has it call `pass_on` with a path. Raises DistNetworkError.
    """
    path = own_folder() / f"{os.getpid()}-{os.urandom(4).hex()}.taking"
    with socket.socket(socket.AF_UNIX) as meeting:
        try:
            meeting.settimeout(SECONDS)
            meeting.bind(str(path))  # in a folder of this user's only
            meeting.listen(1)
            ask(str(path))
            peer, _ = meeting.accept()
            with peer:
                peer.settimeout(SECONDS)
                _, fds, _, _ = socket.recv_fds(peer, 1, 1)
                if not fds:
                    raise OSError("it has ended")
                peer.recv(1)
        except OSError as error:
            raise DistNetworkError(f"cannot take over from the running server: {error}") from None
        finally:
            path.unlink(missing_ok=True)
    os.set_inheritable(fds[0], False)
    return fds[0]


def pass_on(path: str, listener: socket.socket) -> socket.socket:
    """Pass a listening socket; return the connection to whoever waits for its end. Raises OSError."""
    peer = socket.socket(socket.AF_UNIX)
    try:
        peer.settimeout(_CONNECT_SECONDS)
        peer.connect(path)
        socket.send_fds(peer, [b"\0"], [listener.fileno()])
    except BaseException:
        peer.close()
        raise
    return peer
