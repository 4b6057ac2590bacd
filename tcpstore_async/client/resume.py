"""Going on with a single link on another connection.

It knows addresses, deadlines and LINK; it must not know what was being sent, or who waits for a reply.

Invariant: nothing behind the reply to LINK is read here. A server that refuses connections is gone, and the session
with it: that is final, while other failures may pass.
"""

import asyncio
import select
import socket
import time
from collections.abc import Callable
from typing import Final

from ..deadline import Deadline, backoff
from ..errors import DistNetworkError, ProtocolError
from ..session.single_client import ClientSingleLink
from ..values import PREFIX
from ..wire.commands import BY_METHOD
from .connect import NO_SIGPIPE, Attempt, connect, connect_blocking
from .sync_connection import SyncConnection

_LONGEST_REPLY: Final = 64 * 1024


def resume_blocking(
    host: str, port: int, link: ClientSingleLink, deadline: Deadline, wanted: Callable[[], bool]
) -> tuple[socket.socket, bytes]:
    """Return the next connection of a link, and the reply to LINK on it, for `ClientSingleLink.resume`.

    Raises DistNetworkError at the deadline, ConnectionRefusedError, and Cancelled if `wanted` no longer returns True.
    """
    failures = 0
    while True:
        peer, _ = connect_blocking(host, port, deadline, wanted, refused_is_final=True)
        try:
            peer.sendall(_request(link), NO_SIGPIPE)
            attempt = Attempt(deadline.left(), wanted)
            return peer, _receive(peer, _length(_receive(peer, PREFIX, attempt)), attempt)
        except OSError as error:  # the connection has broken too
            peer.close()
            failures += 1
            pause = _pause(failures, deadline, error)
        except BaseException:
            peer.close()
            raise
        time.sleep(pause)


def _receive(peer: socket.socket, size: int, attempt: Attempt) -> bytes:
    parts: list[bytes] = []
    while size:
        attempt.wait_for(peer, select.POLLIN)
        parts.append(_part(peer.recv(size)))
        size -= len(parts[-1])
    return b"".join(parts)


async def resume(host: str, port: int, link: ClientSingleLink, deadline: Deadline) -> tuple[socket.socket, bytes]:
    """Do what `resume_blocking` does, on an event loop."""
    failures = 0
    while True:
        peer, _ = await connect(host, port, deadline, refused_is_final=True)
        try:
            return peer, await asyncio.wait_for(_exchange(peer, link), deadline.left())
        except (OSError, asyncio.TimeoutError) as error:
            peer.close()
            failures += 1
            pause = _pause(failures, deadline, error)
        except BaseException:
            peer.close()
            raise
        await asyncio.sleep(pause)


async def _exchange(peer: socket.socket, link: ClientSingleLink) -> bytes:
    loop = asyncio.get_running_loop()

    async def receive(size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            parts.append(_part(await loop.sock_recv(peer, size)))
            size -= len(parts[-1])
        return b"".join(parts)

    await loop.sock_sendall(peer, _request(link))
    return await receive(_length(await receive(PREFIX)))


def _pause(failures: int, deadline: Deadline, error: Exception) -> float:
    """Return the seconds until the next attempt. Raises DistNetworkError if there is none."""
    left = deadline.left()
    if left == 0.0:
        raise DistNetworkError(f"the session could not be continued: {error or 'no answer'}") from None
    wait = backoff(failures)
    return wait if left is None else min(wait, left)


async def resume_idle(host: str, port: int, connection: SyncConnection, report: Callable[[bool | None], None]) -> None:
    """Replace a broken connection that no thread uses, until the server's grace period is over.

    Reports whether that is done, or None if this was cancelled.
    """
    link = connection.link
    assert link is not None
    done: bool | None = None
    try:
        deadline = Deadline(max(0.0, connection.down_since + link.grace - time.monotonic()))
        peer, reply = await resume(host, port, link, deadline)
        with peer:
            rest = link.resume(reply)
            await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(peer, rest), deadline.left())
            peer.setblocking(True)
            connection.replace(peer)
            connection.down = None
        done = True
    except (OSError, ProtocolError, DistNetworkError, asyncio.TimeoutError):
        done = False
    finally:
        report(done)


def _request(link: ClientSingleLink) -> bytes:
    command = BY_METHOD["link"]
    return command.prefix + command.request.encode(link.fields())


def _length(prefix: bytes) -> int:
    size = int.from_bytes(prefix, "little")
    if size > _LONGEST_REPLY:
        raise ProtocolError(f"reply to LINK of {size} bytes")
    return size


def _part(chunk: bytes) -> bytes:
    if not chunk:
        raise ConnectionError("the server has closed the connection on which the session was to continue")
    return chunk
