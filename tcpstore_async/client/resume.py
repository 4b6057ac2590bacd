"""Resuming a single link on another connection.

It knows addresses, deadlines and LINK; it must not know which requests the link carries, or what waits for replies.

Invariants: nothing behind the reply to LINK is read here. A new connection that fails to resume the link is reset,
because its orderly end would end the session. A refused connection is final, as the server and the session are gone;
other failures may be transient.
"""

import asyncio
import functools
import socket
import time
from collections.abc import Callable, Generator
from typing import Final

from ..base.deadline import Deadline, backoff
from ..base.errors import AccessDeniedError, DistNetworkError, ProtocolError, reason_of
from ..links.single_client import ClientSingleLink, is_break
from ..wire.commands import BY_METHOD
from ..wire.values import PREFIX
from . import exchanges
from .connect import NO_SIGPIPE, Attempt, Cancelled, connect, connect_blocking
from .sync_connection import SyncConnection, reset_when_closed
from .tls import ClientTls

_LONGEST_REPLY: Final = 64 * 1024


def resume_blocking(
    host: str,
    port: int,
    link: ClientSingleLink,
    deadline: Deadline,
    wanted: Callable[[], bool],
    token: bytes = b"",
    tls: ClientTls | None = None,
) -> tuple[socket.socket, bytes]:
    """Return the next connection of a link, and the reply to LINK on it, for `ClientSingleLink.resume`.

    Closing the connection resets it until the caller calls `reset_when_closed`.

    Raises DistNetworkError at the deadline, AccessDeniedError, ConnectionRefusedError, and Cancelled if `wanted` no
    longer returns True.
    """
    failures = 0
    while True:
        try:
            peer, _ = connect_blocking(host, port, deadline, wanted, refused_is_final=True, token=token, tls=tls)
        except AccessDeniedError as error:
            if error.final:
                raise
            failures += 1  # the broken connection still counts for the token, until the server notices its end
            time.sleep(_pause(failures, deadline, error))
            continue
        reset_when_closed(peer, True)
        try:
            peer.sendall(_request(link), NO_SIGPIPE)
            return peer, exchanges.run(functools.partial(Attempt(deadline.left(), wanted).receive, peer), _reply())
        except OSError as error:  # the connection has broken too
            peer.close()
            failures += 1
            pause = _pause(failures, deadline, error)
        except BaseException as error:
            if isinstance(error, Cancelled):  # the store is being closed, so have the server end the session at once
                reset_when_closed(peer, False)
            peer.close()
            raise
        time.sleep(pause)


async def resume(
    host: str, port: int, token: bytes, tls: ClientTls | None, link: ClientSingleLink, deadline: Deadline
) -> tuple[socket.socket, bytes]:
    """Resume as `resume_blocking` does, on an event loop."""
    failures = 0
    while True:
        try:
            peer, _ = await connect(host, port, deadline, refused_is_final=True, token=token, tls=tls)
        except AccessDeniedError as error:
            if error.final:
                raise
            failures += 1  # see `resume_blocking`
            await asyncio.sleep(_pause(failures, deadline, error))
            continue
        reset_when_closed(peer, True)
        try:
            return peer, await asyncio.wait_for(_exchange(peer, link), deadline.left())
        except (OSError, asyncio.TimeoutError) as error:
            peer.close()
            failures += 1
            pause = _pause(failures, deadline, error)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):  # see `resume_blocking`
                reset_when_closed(peer, False)
            peer.close()
            raise
        await asyncio.sleep(pause)


async def _exchange(peer: socket.socket, link: ClientSingleLink) -> bytes:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(peer, _request(link))
    return await exchanges.run_async(functools.partial(loop.sock_recv, peer), _reply())


def _pause(failures: int, deadline: Deadline, error: Exception) -> float:
    """Return the seconds until the next attempt. Raises DistNetworkError if there is none."""
    left = deadline.left()
    if left == 0.0:
        raise DistNetworkError(f"the session could not be resumed: {reason_of(error) or 'no answer'}") from None
    wait = backoff(failures)
    return wait if left is None else min(wait, left)


async def resume_idle(host: str, port: int, token: bytes, tls: ClientTls | None, connection: SyncConnection) -> None:
    """Replace a broken connection that no thread uses, within the server's grace period.

    Raises OSError, ProtocolError or DistNetworkError if it cannot be replaced.
    """
    link = connection.counted()
    deadline = Deadline(max(0.0, connection.down_since + link.grace - time.monotonic()))
    while True:
        peer, reply = await resume(host, port, token, tls, link, deadline)
        with peer:
            try:
                rest = link.resume(reply)
                await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(peer, rest), deadline.left())
            except OSError as error:
                if not is_break(error):
                    raise
                continue
            peer.setblocking(True)
            connection.replace(peer)
            connection.down = None
            return


def _request(link: ClientSingleLink) -> bytes:
    command = BY_METHOD["link"]
    return command.prefix + command.request.encode(link.fields())


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
