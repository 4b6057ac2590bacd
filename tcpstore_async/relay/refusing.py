"""Tell ranks why their relay has no server: the server refuses its token for good, or TLS cannot be agreed on.

A rank's connection is served as by a server that admits no client: it can ask for the server's identity, which has the
reason; anything else closes it. This module knows sessions and asyncio's transports; it must not know links.

Invariant: such a connection ends soon, whatever its rank does, and holds little memory until then.
"""

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any, Final

from ..base.addresses import format_address
from ..base.errors import PeerError
from ..base.limits import Limits
from ..base.version import VERSION
from ..session.auth import ALL
from ..session.identity import Identity, encode_identity
from ..session.server import ServerSession
from ..session.store import Store
from ..wire.commands import EXTENSION

SECONDS: Final = 10.0
"""Time after which a rank is closed."""

_MOST_UNSENT: Final = 64 * 1024
"""Most bytes of replies that the kernel has not taken."""


class Refusal:
    """Serves ranks that connect while the relay can use no server."""

    def __init__(
        self,
        reason: str,
        connections: "set[RefusedConnection]",
        log: Callable[[str], object],
        left: Callable[[], object],
    ) -> None:
        """`connections` are the open ones. `log` logs why one was closed; `left` is called when one has ended."""
        self.reason = reason
        self.log = log
        self.left = left
        self.store = Store(Limits())
        self.store.identify(encode_identity(Identity("tcpstore_async", VERSION, EXTENSION, "", refused=reason)))
        self.store.hub.auth.require_auth = ALL
        self.store.hub.auth.authenticate = lambda token: reason
        self.connections = connections

    def serve(self, fd: int, host: str, port: int) -> None:
        RefusedConnection(self, host, port).start(socket.socket(fileno=fd))


class RefusedConnection(asyncio.Protocol):
    def __init__(self, refusal: Refusal, host: str, port: int) -> None:
        self.refusal = refusal
        self.session = ServerSession(refusal.store, None, host, port, time.monotonic())
        self._transport: Any = None
        """An `asyncio.Transport`; uvloop's do not inherit from it."""
        self._timer: asyncio.TimerHandle | None = None
        self._starting: asyncio.Task[None] | None = None

    def start(self, accepted: socket.socket) -> None:
        self.refusal.connections.add(self)
        self._starting = asyncio.get_running_loop().create_task(self._start(accepted))

    async def _start(self, accepted: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: self, accepted)
        except BaseException:
            accepted.close()
            self._leave()
            raise

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        elif self._starting is not None:
            self._starting.cancel()

    # Called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(SECONDS, self.close)

    def data_received(self, data: bytes) -> None:
        session = self.session
        transport = self._transport
        if transport.is_closing():
            return
        refused = False
        try:
            session.receive(data)
        except PeerError:
            refused = True
        out = b"".join(bytes(piece) for piece in session.out)
        session.out.clear()
        session.unsent = 0
        if out:
            transport.write(out)
        if refused or transport.get_write_buffer_size() > _MOST_UNSENT:
            address = format_address(session.host, session.port)
            self.refusal.log(f"closed the connection from {address}: {self.refusal.reason}")
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self in self.refusal.connections:
            self.refusal.connections.discard(self)
            self.session.leave()
            self.refusal.left()
