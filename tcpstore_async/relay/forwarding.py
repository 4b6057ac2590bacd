"""Forward a client's connection to a server, unchanged, over a connection of its own.

It knows asyncio's transports; it must not know the protocol, or who watches the bytes. Invariants: bytes arrive
complete and in order; a side that does not read is not written to; the end of one direction is passed on and leaves the
other open.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

from ..base.deadline import backoff
from ..client.connect import keep_alive
from ..client.tls import serve

_MOST_EARLY: Final = 64 * 1024
"""Most bytes of a client kept while its connection to the server is being made."""


class ForwardedConnection:
    """A client's connection, and its connection to the server.

    `client` is the protocol of the client's transport. Subclasses may override `accepted`, `passed`, `ended`, `failed`
    and `lost` to observe what happens.
    """

    def __init__(self, connect: Callable[[], Awaitable[socket.socket]]) -> None:
        """`connect` returns a socket connected to the server, or raises OSError."""
        self.client = _Side(self, True)
        self.server = _Side(self, False)
        self.client.other, self.server.other = self.server, self.client
        self.early: list[bytes] | None = []
        """What the client sent before the connection to the server was made; None from then on."""
        self._connect_to_server = connect
        self._early_bytes = 0
        self._connecting: asyncio.Task[None] | None = None
        self._failures = 0
        """Failed attempts to connect to the server."""

    # What subclasses observe

    def accepted(self, address: str) -> None:
        """Start serving a client at this address."""
        self._connecting = asyncio.get_running_loop().create_task(self._connect(address))

    def passed(self, by_client: bool, data: bytes) -> None:
        if by_client and self.early is not None:
            self.early.append(data)
            self._early_bytes += len(data)
            if self._early_bytes > _MOST_EARLY:
                self.client.pause()
        else:
            (self.server if by_client else self.client).write(data)

    def failed(self, address: str, error: OSError) -> None:
        """Note that an attempt to connect the client at `address` to the server has failed; another follows."""

    def ended(self, by_client: bool) -> None:
        """Note that one side sends no more."""

    def lost(self, by_client: bool, error: Exception | None) -> None:
        """Close the other side too."""
        self.ended(by_client)
        if self._connecting is not None:
            self._connecting.cancel()
        (self.server if by_client else self.client).close(reset=error is not None)

    # Called by its owner

    def close(self) -> None:
        self.lost(True, None)
        self.client.close(reset=False)

    # Called by the two sides

    def awaits_server(self) -> bool:
        """Return whether the first attempt to connect to the server is under way."""
        return self.early is not None and self._failures == 0

    async def _connect(self, address: str) -> None:
        """Connect to the server, retrying until the client closes its connection.

        A client that ends its direction during the first attempt is kept until that has ended: it may await replies.
        """
        while True:
            try:
                connected = await self._connect_to_server()
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                keep_alive(connected)
                await serve(connected, self.server)
                break
            except OSError as error:
                self._failures += 1
                self.failed(address, error)
                if self.client.finished:
                    self.close()
                    return
                await asyncio.sleep(backoff(self._failures))
        early, self.early = self.early, None
        self.client.resume()  # before writing, which may pause it
        self.server.write(b"".join(early or ()))
        if self.client.finished:
            self.server.write_eof()


class _Side(asyncio.Protocol):
    """One of the two connections."""

    other: "_Side"

    def __init__(self, owner: ForwardedConnection, is_client: bool) -> None:
        self._owner = owner
        self._is_client = is_client
        self._transport: asyncio.Transport | None = None
        self.finished = False
        """Whether the peer sends no more."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._is_client:
            self._owner.accepted(str((transport.get_extra_info("peername") or ("unknown",))[0]))

    def peer(self) -> Any:
        """Return the socket of an established connection, which must not be read or written."""
        assert self._transport is not None
        return self._transport.get_extra_info("socket")

    def data_received(self, data: bytes) -> None:
        self._owner.passed(self._is_client, data)

    def eof_received(self) -> bool:
        """Pass on that the peer sends no more; keep the connection open for what the peer still receives."""
        self.finished = True
        self._owner.ended(self._is_client)
        if self.other.finished:
            return False
        if self._owner.early is not None:
            return self._owner.awaits_server()
        self.other.write_eof()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._owner.lost(self._is_client, error)

    def pause_writing(self) -> None:
        self.other.pause()

    def resume_writing(self) -> None:
        self.other.resume()

    def write(self, data: bytes) -> None:
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def write_eof(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()

    def pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self, reset: bool) -> None:
        if self._transport is not None and not self._transport.is_closing():
            if reset:
                self._transport.abort()
            else:
                self._transport.close()
