"""Ports on loopback that stand for stores with names, for clients that can say no name: PyTorch's C++ client.

What connects to such a port is in its store: a process beside this one forwards the bytes, since some methods of that
client hold this process's GIL while they wait. It knows VALIDATE, which the client sends and the server has had; it
must not know other commands, or who uses the port.

Invariants: a port listens before anybody learns of it. The process ends when this one does, in whatever way. A port is
given up when all its clients have gone. Clients whose store ends learn of it by the end of their connection; why it has
ended is one line on standard error.
"""

import array
import asyncio
import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final

from ..deadline import DEFAULT_TIMEOUT, Deadline
from ..errors import DistError, DistNetworkError
from ..session.identity import CLOSED
from .connect import connect
from .credentials import find_token
from .forwarding import ForwardedConnection
from .store_name import ServerUrl, StoreName
from .tls import ClientTls, files_from_environment

_VALIDATE_BYTES: Final = 5
_BACKLOG: Final = 128
_LONGEST: Final = 64 * 1024

_LAST_WORDS: Final = 1.0
"""Seconds that are left, when the process ends, for finding out why a store has ended."""

_PROGRAM: Final = """# the ports of this job's stores with names
import sys
control_fd, *path = sys.argv[1:]
sys.path[:] = [entry for entry in sys.path if entry] + path
import os
if os.fork():
    os._exit(0)
from tcpstore_async.client.named_ports import main
main(int(control_fd))
"""

_ROOT: Final = os.path.abspath(Path(__file__).parent.parent.parent)


# In the process that uses the ports

_control: socket.socket | None = None
_lock = threading.RLock()


def listen() -> socket.socket:
    """Return a socket that listens on a port of 127.0.0.1 that the kernel has chosen."""
    listener = socket.socket()
    try:
        listener.bind(("127.0.0.1", 0))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def open_port(server: ServerUrl, name: StoreName, listener: socket.socket) -> int:
    """Have the port of `listener`, which is closed here, stand for the store that has been entered; return the port.

    Raises DistNetworkError.
    """
    order = json.dumps([server.host, server.port, server.tls, name.name, name.incarnation]).encode()
    with _lock, listener:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [listener.fileno()]))]
        try:
            try:
                _running().sendmsg([order], rights)
            except OSError:  # it was killed
                _forget()
                _running().sendmsg([order], rights)
        except (OSError, subprocess.SubprocessError) as error:
            _forget()
            raise DistNetworkError(f"cannot forward connections to the store {name.name!r}: {error}") from None
        port: int = listener.getsockname()[1]
        return port


def _running() -> socket.socket:
    """Return the control socket of the process that forwards, which is started if need be."""
    global _control
    if _control is None:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with its:
                starter = subprocess.Popen(
                    [sys.executable, "-S", "-c", _PROGRAM, str(its.fileno()), _ROOT, *filter(None, sys.path)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={name: text for name, text in os.environ.items() if name[:6] != "PYTHON"},
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
    """In a child, whose copy must not keep the process running."""
    global _lock
    _lock = threading.RLock()
    _forget()


os.register_at_fork(after_in_child=_forked)


def _leave_open() -> None:
    """At exit: C++ code may use a port for longer than Python runs. The kernel closes the socket after that."""
    global _control
    if _control is not None:
        _control.detach()
        _control = None


atexit.register(_leave_open)


# In the process that forwards


def main(control_fd: int) -> None:
    """Forward until the other end of the control socket is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # what is sent to all processes of a job: the ranks may need the store
    with socket.socket(fileno=control_fd) as control:
        asyncio.run(_forward(control))


async def _forward(control: socket.socket) -> None:
    over = asyncio.Event()
    ports: set[_Port] = set()
    explaining: set[asyncio.Task[None]] = set()
    loop = asyncio.get_running_loop()

    def read() -> None:
        try:
            order, ancillary, _, _ = control.recvmsg(_LONGEST, socket.CMSG_SPACE(4))
        except OSError:
            order, ancillary = b"", []
        fds = array.array("i")
        for _, _, data in ancillary:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        if not order or not fds:
            over.set()
            return
        port = _Port(ports, explaining, json.loads(order), socket.socket(fileno=fds[0]))
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
        order: list[Any],
        listener: socket.socket,
    ) -> None:
        host, port, tls, name, incarnation = order
        self.server = ServerUrl(host, port, tls)
        self.name = StoreName(name)
        self.name.incarnation = incarnation
        self.name.waits = False
        self.tls = ClientTls(files_from_environment()) if tls else None
        self.listener = listener
        self.ports = ports
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

    async def connect(self) -> socket.socket:
        """Return a connection that is in the store. Raises OSError if there can be none."""
        try:
            deadline = Deadline(DEFAULT_TIMEOUT.total_seconds())
            name = self.name.of_a_guest()
            name.waits = False
            peer, _ = await connect(
                *self.server[:2], deadline, token=find_token(), tls=self.tls, name=name, refused_is_final=True
            )
        except DistError as error:
            raise OSError(str(error)) from None
        return peer

    def explain(self) -> None:
        """Say once why the server has closed a connection that is in the store, unless its owner wanted that."""
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
                with contextlib.suppress(OSError, ValueError):  # nobody may read it
                    print(f"tcpstore: {error}", file=sys.stderr, flush=True)

    def left(self) -> None:
        self.connections -= 1
        if not self.connections and self._accepting is not None:
            self._accepting.close()
            self.ports.discard(self)


class _Connection(ForwardedConnection):
    """A client's connection, and one that is in the store."""

    def __init__(self, port: _Port) -> None:
        super().__init__(port.connect)
        self.port = port
        self._swallowed = 0
        self._gone = False

    def accepted(self, address: str) -> None:
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

    def lost(self, by_client: bool, error: Exception | None) -> None:
        super().lost(by_client, error)
        if not by_client and not self._gone:
            self.port.explain()
        if by_client and not self._gone:
            self._gone = True
            self.port.left()
