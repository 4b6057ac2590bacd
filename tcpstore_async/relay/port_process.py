"""The process behind `named_ports`: it forwards each connection to a port as one that has entered the port's store.

Knows VALIDATE, which clients send but the server has already received. Must not know other commands, or who uses a
port.

Invariants: the process ends when its owner does, whatever signals it gets before. A port that cannot be served harms no
other. Only this user's processes are served, as tokens are presented for them; if the kernel does not report the owners
of connections, all are, and standard error says so. When a store ends, the connections of its clients are closed; one
line on standard error says why.
"""

import asyncio
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Final

from ..base.addresses import spelled
from ..base.deadline import DEFAULT_TIMEOUT, Deadline
from ..base.errors import DistError, DistNetworkError, reason_of
from ..client.connect import connect
from ..client.credentials import find_token
from ..client.server_url import parse_server_url
from ..client.servers import Servers
from ..client.store_name import StoreName
from ..client.tls import checked
from ..client.tls_settings import files_from_environment
from ..server.listen_socket import raise_file_limit
from ..server.peer_user import PeerUsers, UnknownOwnerError
from ..session.identity import CLOSED
from .forwarding import ForwardedConnection

_VALIDATE_BYTES: Final = 5

_STANDARD_INPUT: Final = 0

_LONGEST: Final = 64 * 1024
"""Most bytes of an order. One read ends with the descriptors of one order."""

_LAST_WORDS: Final = 1.0
"""Seconds that the process has, when it ends, to find out why stores have ended."""


def main() -> None:
    """Serve ports until the other end of standard input, a socket, is closed."""
    import uvloop

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to all processes of a job, whose ranks may still need the store
    raise_file_limit()
    try:
        users = PeerUsers()
    except DistNetworkError as error:
        users = None
        _say(f"every user of this host can use this process's ports of named stores, with its token: {error}")
    with socket.socket(fileno=_STANDARD_INPUT) as control:
        uvloop.run(serve(control, users))


async def serve(control: socket.socket, users: PeerUsers | None) -> None:
    """Serve the ports that arrive on `control` until it ends; without `users`, whoever connects."""
    loop = asyncio.get_running_loop()
    serving: set[asyncio.Task[None]] = set()
    explaining: set[asyncio.Task[None]] = set()
    while True:
        try:
            order, fds, _, _ = await loop.run_in_executor(None, socket.recv_fds, control, _LONGEST, 2)
        except OSError:
            break
        if not order:
            break
        if fds:  # else at the limit of open files
            port = _Port(order, users, explaining)
            task = loop.create_task(port.serve(*[socket.socket(fileno=fd) for fd in fds]))
            serving.add(task)
            task.add_done_callback(serving.discard)
    if explaining:
        await asyncio.wait(explaining, timeout=_LAST_WORDS)


def _say(text: str) -> None:
    with suppress(OSError, ValueError):  # standard error may be closed
        print(f"tcpstore: {text}", file=sys.stderr, flush=True)


class _Port:
    """A listening socket that stands for a store."""

    def __init__(self, order: bytes, users: PeerUsers | None, explaining: "set[asyncio.Task[None]]") -> None:
        server, name, incarnation, token, shown = json.loads(order)
        os.environ.update(shown)
        self.users = users
        self.connections = 0
        self.empty = asyncio.Event()
        """Set when the last client has left."""
        self._server = parse_server_url(server)
        self._servers = Servers(*self._server.all())
        self._name = StoreName(name)
        self._name.incarnation = incarnation
        self._files = files_from_environment() if self._server.tls else None
        self._token: str = token
        self._explaining = explaining
        self._explained = False

    async def serve(self, listener: socket.socket, until: socket.socket | None = None) -> None:
        """Accept connections until all clients have left or, with `until`, until the other end of that is closed."""
        loop = asyncio.get_running_loop()
        try:
            if self._files is not None:
                checked(self._files)
            accepting = await loop.create_server(lambda: _Connection(self).client, sock=listener)
        except (DistError, OSError) as error:
            listener.close()
            _say(f"cannot serve the port for the store {spelled(self._name.name)!r}: {error}")
            return
        if until is None:
            await self.empty.wait()
        else:
            with until:
                until.setblocking(False)
                await loop.sock_recv(until, 1)
        accepting.close()

    async def connect(self) -> socket.socket:
        """Return a connection that has entered the store. Raises OSError."""
        try:
            deadline = Deadline(DEFAULT_TIMEOUT.total_seconds())
            token = find_token(self._token or None)
            peer, _ = await connect(self._servers, deadline, True, token, self._files, self._name.once())
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
        name = spelled(self._name.name)
        try:
            (await self.connect()).close()
        except ConnectionRefusedError:
            _say(
                f"no process is listening at {self._server} any more, so this host's processes have lost the store "
                f"{name!r} there: the server has ended, or its machine was restarted. Restart the server and the job"
            )
        except OSError as error:
            if not str(error).endswith(CLOSED):
                _say(f"this host's processes have lost the store {name!r} at {self._server}: {reason_of(error)}")


class _Connection(ForwardedConnection):
    """A client's connection, and one that has entered the store."""

    def __init__(self, port: _Port) -> None:
        super().__init__(port.connect)
        self._port = port
        self._to_swallow = _VALIDATE_BYTES
        self._counts = False

    def accepted(self, address: str) -> None:
        users = self._port.users
        try:
            self._counts = users is None or users.look_up(self.client.peer()) == users.user
        except UnknownOwnerError:
            pass
        if self._counts:
            self._port.connections += 1
            super().accepted(address)
        else:
            self.client.close(reset=True)

    def passed(self, by_client: bool, data: bytes) -> None:
        if by_client and self._to_swallow:
            count = min(len(data), self._to_swallow)
            self._to_swallow -= count
            data = data[count:]
        if data:
            super().passed(by_client, data)

    def failed(self, address: str, error: OSError) -> None:
        self._port.explain()
        self.close()

    def ended(self, by_client: bool) -> None:
        if not by_client and self._counts and not self.client.finished:
            self._port.explain()

    def lost(self, by_client: bool, error: Exception | None) -> None:
        super().lost(by_client, error)
        if by_client and self._counts:
            self._counts = False
            self._port.connections -= 1
            if not self._port.connections:
                self._port.empty.set()
