"""Making a connection: resolving, connecting and shaking hands, under one deadline.

Knows: addresses, both families, when to try again. Must not know: what the connection is for.
Invariants: the deadline covers everything and is kept, whatever a resolver or a peer does. A peer's name is never
looked up. What fails in a way that may pass is tried again until the deadline; a look-up that hangs is left behind in a
thread that nobody waits for.
"""

import asyncio
import ipaddress
import os
import random
import socket
import threading
import time
from typing import Any, Final

from aiohappyeyeballs import start_connection

from ..errors import DistNetworkError, ProtocolError
from ..session.client import ClientSession

_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 5.0
_STAGGER: Final = 0.1
"""Seconds until the next address is tried beside one that has not answered."""

AddressInfo = tuple[Any, Any, int, str, Any]


class Deadline:
    """When something must be over, in seconds from now; negative means never."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.began = time.monotonic()

    def left(self) -> float | None:
        """Seconds left, 0 at the least; None if there is no end."""
        if self.timeout < 0:
            return None
        return max(0.0, self.began + self.timeout - time.monotonic())

    def passed(self) -> bool:
        return self.left() == 0.0

    def spent(self) -> float:
        return time.monotonic() - self.began


async def dial(host: str, port: int, deadline: Deadline) -> tuple[socket.socket, ClientSession]:
    """A connection to the store at this address, validated and answering.

    A deadline of 0 means one try. Raises DistNetworkError with the last cause.
    """
    pause = _FIRST_PAUSE
    while True:
        try:
            left = deadline.left()
            return await asyncio.wait_for(_try(host, port), left or None if left != 0.0 else _ONE_TRY)
        except (OSError, ProtocolError, asyncio.TimeoutError) as error:
            cause = str(error) or "no answer"
        wait = random.uniform(0.5, 1.5) * pause
        pause = min(2 * pause, _LONGEST_PAUSE)
        left = deadline.left()
        if left is not None and left <= wait:
            await asyncio.sleep(left)
            raise DistNetworkError(
                f"The client socket has timed out after {round(1000 * deadline.timeout)}ms while trying to connect to "
                f"({host}, {port}). {deadline.spent():.1f} s were spent; the last cause: {cause}."
            )
        await asyncio.sleep(wait)


_ONE_TRY: Final = 1.0
"""Seconds that a try may take when the timeout is 0."""


def dial_in_this_thread(host: str, port: int, deadline: Deadline) -> tuple[socket.socket, ClientSession]:
    """The same for a thread without a loop: the connection comes back blocking.

    A loop lives in a helper thread for as long as it takes, so that the caller may itself be inside of one. Raises
    DistNetworkError.
    """
    found: list[tuple[socket.socket, ClientSession]] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(asyncio.run(dial(host, port, deadline)))
        except BaseException as error:
            failed.append(error)

    helper = threading.Thread(target=run, name=f"connecting to {host}", daemon=True)
    helper.start()
    helper.join()
    if failed:
        raise failed[0]
    peer, session = found[0]
    peer.setblocking(True)
    return peer, session


async def _try(host: str, port: int) -> tuple[socket.socket, ClientSession]:
    peer = await start_connection(await _resolve(host, port), happy_eyeballs_delay=_STAGGER)
    try:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return peer, await _shake_hands(peer)
    except BaseException:
        peer.close()
        raise


async def _shake_hands(peer: socket.socket) -> ClientSession:
    loop = asyncio.get_running_loop()
    session = ClientSession()
    pid = os.getpid()
    hello, call = session.hello(pid)
    await loop.sock_sendall(peer, hello)
    while not call.done:
        chunk = await loop.sock_recv(peer, 4)
        if not chunk:
            raise ConnectionError("the peer closed the connection during the handshake")
        session.receive(chunk)
    if call.result != pid:
        raise ProtocolError(f"Ping failed, invalid value returned from server. Expected: {pid}, Got: {call.result}")
    return session


async def _resolve(host: str, port: int) -> list[AddressInfo]:
    """The addresses of a host. A literal is not looked up."""
    try:
        literal = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return await _look_up(host, port)
    family = socket.AF_INET6 if literal.version == 6 else socket.AF_INET
    return socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)


async def _look_up(host: str, port: int) -> list[AddressInfo]:
    """Ask the resolver, in a thread of its own: one that hangs must delay neither others nor the end of the process."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[AddressInfo]] = loop.create_future()

    def tell(found: list[AddressInfo] | None, error: OSError | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        elif found is not None:
            answer.set_result(found)

    def ask() -> None:
        found: list[AddressInfo] | None = None
        failed: OSError | None = None
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            failed = error
        except UnicodeError as error:
            failed = OSError(f"{host!r} is no host name: {error}")
        try:
            loop.call_soon_threadsafe(tell, found, failed)
        except RuntimeError:
            return  # the loop has been closed: nobody wants to know any more

    threading.Thread(target=ask, name=f"look-up of {host}", daemon=True).start()
    return await answer
