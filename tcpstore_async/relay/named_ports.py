"""Ports on loopback that stand for named stores, for clients that cannot name one: PyTorch's C++ client.

A connection to such a port is in its store: a process beside this one forwards the bytes, as some methods of that
client hold this process's GIL while they wait. The module knows VALIDATE, which the client sends but the server has
already received; it must not know other commands, or who uses the port.

Invariants: a port listens before a client learns of it. Only this user's processes are served, if the kernel reports
the owners of connections: the forwarding process presents its token for them. It ends when this process does, in
whatever way. A port closes when all its clients have left or, if it is a lasting one, when it is closed; connected
clients then stay connected. A port that cannot be served harms no other. When a store ends, the connections of its
clients are closed; one line on standard error says why.
"""

import array
import asyncio
import atexit
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ..auth.secret_files import TOKEN, TOKEN_FILE
from ..base import python_process
from ..base.addresses import spelled
from ..base.deadline import DEFAULT_TIMEOUT, Deadline
from ..base.errors import DistError, DistNetworkError, reason_of
from ..base.locks import RLock
from ..client.connect import connect
from ..client.credentials import find_token
from ..client.server_url import ServerUrl
from ..client.store_name import StoreName
from ..client.tls import checked
from ..client.tls_settings import CA, CERT, KEY, files_from_environment
from ..session.identity import CLOSED
from .forwarding import ForwardedConnection

_VALIDATE_BYTES: Final = 5
_BACKLOG: Final = 128

_LONGEST: Final = 64 * 1024
"""Most bytes of an order."""

_LAST_WORDS: Final = 1.0
"""Seconds that the process has, when it ends, to find out why stores have ended."""

_CREDENTIALS: Final = (TOKEN, TOKEN_FILE, CA, CERT, KEY)
"""Variables that may have changed since the forwarding process was started."""

_PROGRAM: Final = """# the ports of this job's stores with names
import sys
control_fd, *path = sys.argv[1:]
sys.path[:] = [entry for entry in sys.path if entry] + path
import os
if os.fork():
    os._exit(0)
from tcpstore_async.relay.named_ports import main
from tcpstore_async.server.peer_user import own_connections
main(int(control_fd), own_connections())
"""

_ROOT: Final = os.path.abspath(Path(__file__).parent.parent.parent)


Admits = Callable[[socket.socket], bool]
"""Returns whether a connection is served."""


# In the process that uses the ports

_control: socket.socket | None = None
_lock = RLock()


def listen() -> socket.socket:
    """Return a socket that listens on a free port of 127.0.0.1."""
    listener = socket.socket()
    try:
        listener.bind(("127.0.0.1", 0))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def open_port(
    server: ServerUrl, name: StoreName, listener: socket.socket, token: str = "", until: socket.socket | None = None
) -> int:
    """Make the port of `listener`, which is closed here, stand for an existing store; return the port.

    Without a `token`, that of the environment is presented. With `until`, one end of a pair, the port lasts until the
    other end is shut down. Raises DistNetworkError.
    """
    order = _order(server, name, token)
    with _lock, listener:
        fds = [listener.fileno()] + ([] if until is None else [until.fileno()])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        try:
            try:
                _running().sendmsg([order], rights)
            except OSError:  # the forwarding process was killed: start another one
                _forget()
                _running().sendmsg([order], rights)
        except (OSError, subprocess.SubprocessError) as error:
            _forget()
            raise DistNetworkError(f"cannot forward connections to the store {spelled(name.name)!r}: {error}") from None
        port: int = listener.getsockname()[1]
        return port


def _order(server: ServerUrl, name: StoreName, token: str = "") -> bytes:
    """Return the message that makes the forwarding process serve a port."""
    shown = {variable: os.environ.get(variable, "") for variable in _CREDENTIALS}
    return json.dumps([*server, name.name, name.incarnation, token, shown]).encode()


class LastingPort:
    """A port that stands for a store until it is closed, whatever its clients do."""

    def __init__(self, server: ServerUrl, name: str, token: str = "") -> None:
        """Open the port. Raises DistNetworkError."""
        self._end, other = socket.socketpair()
        with other:
            try:
                self.port = open_port(server, StoreName(name), listen(), token, other)
            except BaseException:
                self._end.close()
                raise

    def close(self) -> None:
        """Close the port; connections last until their store ends. Idempotent."""
        with self._end, suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)  # works even if a child holds a copy


def _running() -> socket.socket:
    """Return the control socket of the forwarding process, starting it if necessary."""
    global _control
    if _control is None:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with its:
                starter = subprocess.Popen(
                    [*python_process.command(_PROGRAM), str(its.fileno()), _ROOT, *filter(None, sys.path)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=python_process.environment(),
                    pass_fds=[its.fileno()],
                    start_new_session=True,
                )
            starter.wait()
        except BaseException:
            mine.close()
            raise
        _control = mine
    return _control


def _forget() -> None:
    global _control
    if _control is not None:
        _control.close()
        _control = None


def _forked() -> None:
    """In a forked child: close its copy, which would keep the forwarding process running."""
    global _lock
    _lock = RLock()
    _forget()


os.register_at_fork(after_in_child=_forked)


def _leave_open() -> None:
    """At exit: leave the socket to the kernel, as C++ code may use a port for longer than Python runs."""
    global _control
    if _control is not None:
        _control.detach()
        _control = None


atexit.register(_leave_open)


# In the process that forwards


def main(control_fd: int, admits: Admits) -> None:
    """Forward connections that `admits` accepts until the other end of the control socket is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to all processes of a job, whose ranks may still need the store
    with socket.socket(fileno=control_fd) as control:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        asyncio.run(_forward(control, admits))


async def _forward(control: socket.socket, admits: Admits) -> None:
    over = asyncio.Event()
    ports: set[_Port] = set()
    explaining: set[asyncio.Task[None]] = set()
    loop = asyncio.get_running_loop()

    def read() -> None:
        try:
            order, ancillary, _, _ = control.recvmsg(_LONGEST, socket.CMSG_SPACE(8))
        except OSError:
            order, ancillary = b"", []
        fds = array.array("i")
        for _, _, data in ancillary:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        if not order:
            over.set()
            loop.remove_reader(control)
        if not fds:  # at the limit of open files
            return
        port = _Port(ports, explaining, admits, json.loads(order), *[socket.socket(fileno=fd) for fd in fds])
        port.starting = loop.create_task(port.start())

    control.setblocking(False)
    loop.add_reader(control, read)
    await over.wait()
    if explaining:
        await asyncio.wait(explaining, timeout=_LAST_WORDS)


class _Port:
    """A listening socket that stands for a store."""

    def __init__(
        self,
        ports: "set[_Port]",
        explaining: "set[asyncio.Task[None]]",
        admits: Admits,
        order: list[Any],
        listener: socket.socket,
        until: socket.socket | None = None,
    ) -> None:
        host, port, tls, name, incarnation, token, shown = order
        os.environ.update(shown)
        self.server = ServerUrl(host, port, tls)
        self.name = StoreName(name)
        self.name.incarnation = incarnation
        self.tls = checked(files_from_environment()) if tls else None
        self.token: str = token
        self.listener = listener
        self.until = until
        """Readable when a lasting port should close; None for a port that is not lasting."""
        self.ports = ports
        self.admits = admits
        self.connections = 0
        self._explaining = explaining
        self._explained = False
        self.starting: asyncio.Task[None] | None = None
        self._accepting: asyncio.AbstractServer | None = None
        ports.add(self)

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self.listener.setblocking(False)
        self._accepting = await loop.create_server(lambda: _Connection(self).client, sock=self.listener)
        if self.until is not None:
            loop.add_reader(self.until, self.close)

    async def connect(self) -> socket.socket:
        """Return a connection that has entered the store. Raises OSError."""
        try:
            deadline = Deadline(DEFAULT_TIMEOUT.total_seconds())
            name = self.name.of_a_guest()
            name.waits = False
            peer, _ = await connect(
                *self.server[:2],
                deadline,
                token=find_token(self.token or None),
                tls=self.tls,
                name=name,
                refused_is_final=True,
            )
        except DistError as error:
            raise OSError(str(error)) from None
        return peer

    def explain(self) -> None:
        """Print once why the server has closed connections of the store, unless the store's owner closed it."""
        if not self._explained:
            self._explained = True
            task = asyncio.get_running_loop().create_task(self._explain())
            self._explaining.add(task)
            task.add_done_callback(self._explaining.discard)

    async def _explain(self) -> None:
        try:
            (await self.connect()).close()
        except OSError as error:
            if not str(error).endswith(CLOSED):
                with suppress(OSError, ValueError):  # standard error may be closed
                    print(f"tcpstore: {self._lost(error)}", file=sys.stderr, flush=True)

    def _lost(self, error: OSError) -> str:
        """Return what happened to the connections, and what to do."""
        name = spelled(self.name.name)
        if isinstance(error, ConnectionRefusedError):
            return (
                f"no process is listening at {self.server} any more, so this host's processes have lost the store "
                f"{name!r} there: the server has ended, or its machine was restarted. Restart the "
                "server and the job"
            )
        return f"this host's processes have lost the store {name!r} at {self.server}: {reason_of(error)}"

    def left(self) -> None:
        self.connections -= 1
        if not self.connections and self.until is None:
            self.close()

    def close(self) -> None:
        """Accept no more connections."""
        if self._accepting is not None:
            self._accepting.close()
        if self.until is not None:
            asyncio.get_running_loop().remove_reader(self.until)
            self.until.close()
        self.ports.discard(self)


class _Connection(ForwardedConnection):
    """A client's connection, and one that has entered the store."""

    def __init__(self, port: _Port) -> None:
        super().__init__(port.connect)
        self.port = port
        self._swallowed = 0
        self._counts = False

    def accepted(self, address: str) -> None:
        if not self.port.admits(self.client.peer()):
            self.client.close(reset=True)
            return
        self._counts = True
        self.port.connections += 1
        super().accepted(address)

    def passed(self, by_client: bool, data: bytes) -> None:
        if by_client and self._swallowed < _VALIDATE_BYTES:
            count = min(len(data), _VALIDATE_BYTES - self._swallowed)
            self._swallowed += count
            data = data[count:]
        if data:
            super().passed(by_client, data)

    def failed(self, address: str, error: OSError) -> None:
        self.port.explain()
        self.close()

    def ended(self, by_client: bool) -> None:
        if not by_client and self._counts and not self.client.finished:
            self.port.explain()

    def lost(self, by_client: bool, error: Exception | None) -> None:
        super().lost(by_client, error)
        if by_client and self._counts:
            self._counts = False
            self.port.left()
