"""Ports on loopback that stand for named stores, for clients that cannot name one: PyTorch's C++ client.

A connection to such a port is in its store: a process beside this one (`port_process`) forwards the bytes, as some
methods of that client hold this process's GIL while they wait. Must not know the protocol, or who uses a port.

Invariants: a port listens before a client learns of it. That process is not a child of this one, which may wait for
all of its children, and ends when this one does, in whatever way. A port closes when all its clients have left or, if
it is a lasting one, when it is closed; connected clients then stay connected.
"""

import array
import atexit
import json
import os
import socket
import subprocess
from contextlib import suppress
from typing import Final

from ..auth.secret_files import TOKEN, TOKEN_FILE
from ..base.addresses import spelled
from ..base.errors import DistNetworkError
from ..base.locks import RLock
from ..client.connect import NO_SIGPIPE
from ..client.server_url import ServerUrl
from ..client.store_name import StoreName
from ..client.tls_settings import CA, CERT, KEY
from ..server.listen_socket import listen
from ..server.owned_process import OwnedProcess

_CREDENTIALS: Final = (TOKEN, TOKEN_FILE, CA, CERT, KEY)
"""Variables that may have changed since the process was started."""

_PROGRAM: Final = """# the ports of this job's stores with names
if os.fork():
    os._exit(0)
from tcpstore_async.relay.port_process import main
main()
"""

_process: OwnedProcess | None = None
_lock = RLock()


def open_port(
    server: ServerUrl, name: StoreName, listener: socket.socket, token: str = "", until: socket.socket | None = None
) -> int:
    """Make the port of `listener`, which is closed here, stand for an existing store; return the port.

    Without a `token`, that of the environment is presented. With `until`, one end of a pair, the port lasts until the
    other end is shut down. Raises DistNetworkError.
    """
    shown = {variable: os.environ.get(variable, "") for variable in _CREDENTIALS}
    order = json.dumps([str(server), name.name, name.incarnation, token, shown]).encode()
    with _lock, listener:
        try:
            fds = array.array("i", [listener.fileno()] + ([] if until is None else [until.fileno()]))
            try:
                _send(order, fds)
            except OSError:  # the process was killed: start another one
                _forget()
                _send(order, fds)
        except (OSError, subprocess.SubprocessError) as error:
            _forget()
            raise DistNetworkError(f"cannot forward connections to the store {spelled(name.name)!r}: {error}") from None
        port: int = listener.getsockname()[1]
        return port


class LastingPort:
    """A port that stands for a store until it is closed, whatever its clients do."""

    def __init__(self, server: ServerUrl, name: str, token: str = "") -> None:
        """Open the port. Raises DistNetworkError."""
        self._end, other = socket.socketpair()
        with other:
            try:
                self.port = open_port(server, StoreName(name), listen("127.0.0.1", 0), token, other)
            except BaseException:
                self._end.close()
                raise

    def close(self) -> None:
        """Close the port; connections last until their store ends. Idempotent."""
        with self._end, suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)  # works even if a child holds a copy


def _send(order: bytes, fds: "array.array[int]") -> None:
    """Send an order to the process, starting it if necessary."""
    global _process
    if _process is None:
        process = OwnedProcess(program=_PROGRAM)
        process.process.wait()  # it has forked, so that the system adopts its child
        _process = process
    _process.end.sendmsg([order], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)], NO_SIGPIPE)


def _forget() -> None:
    global _process
    if _process is not None:
        _process.close()
        _process = None


def _forked() -> None:
    global _process, _lock
    _process, _lock = None, RLock()


os.register_at_fork(after_in_child=_forked)


def _leave_open() -> None:
    """At exit: leave the socket to the kernel, as C++ code may use a port for longer than Python runs."""
    global _process
    if _process is not None:
        _process.close.detach()
        _process.end.detach()
        _process = None


atexit.register(_leave_open)
