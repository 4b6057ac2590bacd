"""Resuming a single link on another connection.

It knows addresses, deadlines and LINK; it must not know which requests the link carries, or what waits for replies.

Invariants: nothing behind the reply to LINK is read here. A new connection that fails to resume the link is reset,
because its orderly end would end the session. A refused connection is final, as the server and the session are gone,
unless the session is durable: then the server may come back. Other failures may be transient. Where several servers are
known, one of another store ends no session.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Generator
from typing import Any, Final

from ..auth.secret_files import TlsFiles
from ..base.deadline import Deadline
from ..base.errors import AccessDeniedError, DistNetworkError, ProtocolError, reason_of
from ..links.single_client import ClientSingleLink
from ..wire.commands import BY_METHOD
from ..wire.values import PREFIX
from . import exchanges
from .connect import NO_SIGPIPE, Attempt, connect, connect_blocking, transfer
from .servers import Servers
from .sync_connection import SyncConnection, reset_when_closed

_LONGEST_REPLY: Final = 64 * 1024


_Step = bytes | int | float | None
"""Bytes to send, the most bytes to receive, seconds to sleep, or None to connect."""


def resume_blocking(
    servers: Servers,
    link: ClientSingleLink,
    deadline: Deadline,
    wanted: Callable[[], bool],
    token: bytes = b"",
    tls: TlsFiles | None = None,
) -> tuple[socket.socket, bytes]:
    """Return the next connection of a link, and the reply to LINK on it, for `ClientSingleLink.resume`.

    Closing the connection resets it until the caller calls `reset_when_closed`. Raises DistNetworkError at the
    deadline, AccessDeniedError, ConnectionRefusedError, and Cancelled if `wanted` no longer returns True.
    """
    peer: socket.socket
    attempt: Attempt

    def perform(step: _Step) -> Any:
        nonlocal peer, attempt
        if step is None:
            peer, _ = connect_blocking(servers, deadline, wanted, not link.durable, token=token, tls=tls)
            attempt = Attempt(deadline.left(), wanted)
            return peer
        if isinstance(step, bytes):
            return peer.sendall(step, NO_SIGPIPE)
        return time.sleep(step) if isinstance(step, float) else attempt.receive(peer, step)

    return exchanges.run(perform, _resuming(servers, link, deadline, wanted))


async def resume(
    servers: Servers,
    token: bytes,
    tls: TlsFiles | None,
    link: ClientSingleLink,
    deadline: Deadline,
    wanted: Callable[[], bool],
) -> tuple[socket.socket, bytes]:
    """Resume as `resume_blocking` does, on an event loop. If this is cancelled, `wanted` tells whether for good."""
    peer: socket.socket

    async def perform(step: _Step) -> Any:
        nonlocal peer
        if step is None:
            peer, _ = await connect(servers, deadline, not link.durable, token=token, tls=tls)
            return peer
        if isinstance(step, float):
            return await asyncio.sleep(step)
        return await asyncio.wait_for(transfer(peer, step), deadline.left())

    return await exchanges.run_async(perform, _resuming(servers, link, deadline, wanted))


def _resuming(
    servers: Servers, link: ClientSingleLink, deadline: Deadline, wanted: Callable[[], bool]
) -> Generator[_Step, Any, tuple[socket.socket, bytes]]:
    """Connect and resume the link, repeatedly until the deadline. Yields steps, which are sent their results."""
    command = BY_METHOD["link"]
    attempts = 0
    while True:
        attempts += 1
        peer: socket.socket | None = None
        try:
            peer = yield None
            assert peer is not None
            reset_when_closed(peer, True)
            yield command.prefix + command.request.encode(link.fields())  # which has the number of the attempt
            reply = yield from _reply()
            if len(servers.all()) > 1 and link.is_unknown_elsewhere(reply):
                servers.leave(servers.first)
                raise ConnectionError("the server is not one of those that have the session")
            return peer, reply
        except AccessDeniedError as error:
            if error.final:
                raise
            # The broken connection counts for the token until the server notices its end.
            pause = _pause(servers.pause(attempts), deadline, error)
        except (OSError, asyncio.TimeoutError) as error:
            if peer is None:
                raise  # refused
            peer.close()
            pause = _pause(servers.pause(attempts), deadline, error)
        except BaseException:
            if peer is not None:
                reset_when_closed(peer, wanted())  # of a store that is being closed, the session ends at once
                peer.close()
            raise
        yield pause


def _pause(wait: float, deadline: Deadline, error: Exception) -> float:
    """Return the seconds until the next attempt, which may wait. Raises DistNetworkError if there is none."""
    left = deadline.left()
    if left == 0.0:
        raise DistNetworkError(f"the session could not be resumed: {reason_of(error) or 'no answer'}") from None
    return wait if left is None else min(wait, left)


async def resume_idle(
    servers: Servers, token: bytes, tls: TlsFiles | None, connection: SyncConnection, wanted: Callable[[], bool]
) -> None:
    """Replace a broken connection that no thread uses, within the server's grace period.

    If this is cancelled while the store is still `wanted`, as by a fork, the session goes on.
    Raises OSError, ProtocolError or DistNetworkError if it cannot be replaced.
    """
    link = connection.counted()
    deadline = Deadline(max(0.0, connection.down_since + link.grace - time.monotonic()))
    while True:
        peer, reply = await resume(servers, token, tls, link, deadline, wanted)
        with peer:
            try:
                rest = link.resume(reply)
                await asyncio.wait_for(transfer(peer, rest), deadline.left())
            except OSError as error:
                if not link.breaks(error):
                    raise
                continue
            peer.setblocking(True)
            connection.replace(peer)
            connection.down = None
            return


def _reply() -> Generator[int, bytes, bytes]:
    """Receive the reply to LINK, and nothing behind it. Yields the most bytes to receive next."""
    size = int.from_bytes((yield from _bytes(PREFIX)), "little")
    if size > _LONGEST_REPLY:
        raise ProtocolError(f"the reply to LINK is too long: {size} bytes")
    return (yield from _bytes(size))


def _bytes(size: int) -> Generator[int, bytes, bytes]:
    data = b""
    while len(data) < size:
        part = yield size - len(data)
        if not part:
            raise ConnectionError("the server closed the connection while the session was being resumed")
        data += part
    return data
