"""Making a connection: resolving, connecting and shaking hands, under one deadline.

Knows: addresses, both families, when to try again. Must not know: what the connection is for.
Invariants: the deadline covers everything and is kept, whatever a resolver or a peer does. A peer's name is never
looked up. What fails in a way that may pass is tried again until the deadline; a look-up that hangs is left behind in a
thread that nobody waits for.
"""

import asyncio
import errno
import ipaddress
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from aiohappyeyeballs import start_connection

from ..deadline import MIN_ROUND_TRIP, Deadline, backoff
from ..errors import DistNetworkError, ProtocolError
from ..session.client import ClientSession, PendingCall

_LAST_TRY: Final = 0.05
"""Seconds that are kept for the last try."""

_NO_ANSWER: Final = "no answer"

_HANG_UPS: Final = 2
"""Answers to the handshake that fail to come before it is tried without PING, or with it again. One may be a reset."""

_FULL: Final = " (a server at its connection limit also does this; see its log)"

_STAGGER: Final = 0.1
"""Seconds until the next address is tried beside one that has not answered."""

_NO_SIGPIPE: Final[int] = getattr(socket, "MSG_NOSIGNAL", 0)
"""A program may have set SIGPIPE to its default, which would end it when the peer has gone."""

_KEEP_ALIVE: Final = (("TCP_KEEPIDLE", 180), ("TCP_KEEPINTVL", 30), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 300_000))
"""A host that is gone without a word, because it has lost its power, say, is given up after five minutes, and with it
the calls that wait for it for ever; not earlier, for a network may come back. In seconds, the last in milliseconds.
Where a system has no such option, it keeps its own time."""

_TICK: Final = 0.1
"""Seconds between two looks whether a connection that another thread makes is still wanted."""

AddressInfo = tuple[Any, Any, int, str, Any]


class _Tries:
    """When to try again, and when no more."""

    def __init__(self, host: str, port: int, deadline: Deadline) -> None:
        self.host = host
        self.port = port
        self.deadline = deadline
        self.pings = True
        """Whether to shake hands with a PING: PyTorch's servers before 2.5 close the connection for it."""
        self.cause = ""
        """Why the last try failed, or the one before, if the last one's time was too short to say anything."""
        self._short = False
        self._failures = 0
        self._hung_up = 0
        """Connections in a row that the peer has closed instead of an answer."""

    def limit(self) -> float | None:
        """Seconds that this try may take; None for as long as it likes."""
        left = self.deadline.left()
        self._short = left is not None and left <= 2 * _LAST_TRY
        return MIN_ROUND_TRIP if self.deadline.timeout == 0 else left

    def after(self, error: Exception) -> float:
        """Seconds until the next try. Raises DistNetworkError if there will be none."""
        self._hung_up = self._hung_up + 1 if isinstance(error, _HungUp) else 0
        if self._hung_up == _HANG_UPS:
            self._hung_up = 0
            self.pings = not self.pings
        cause = _cause(error) + (_FULL if isinstance(error, _HungUp) else "")
        if cause != _NO_ANSWER or not self._short or not self.cause:
            self.cause = cause
        left = self.deadline.left()
        if left is not None and left <= _LAST_TRY:
            raise DistNetworkError(
                f"The client socket has timed out after {round(1000 * self.deadline.timeout)}ms while trying to "
                f"connect to ({self.host}, {self.port}). Gave up after {self.deadline.spent():.1f} s; last error: "
                f"{self.cause}."
            ) from None
        self._failures += 1
        wait = backoff(self._failures)
        return wait if left is None else min(wait, left - _LAST_TRY)


def _cause(error: Exception) -> str:
    if isinstance(error, (asyncio.TimeoutError, TimeoutError, BlockingIOError)):
        return _NO_ANSWER
    if isinstance(error, OSError) and error.errno and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno)  # asyncio says in its own words that it failed, and not why
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


class _HungUp(ConnectionError):
    """The connection was made, and lost before the handshake was answered."""


# From a loop


async def connect(host: str, port: int, deadline: Deadline) -> tuple[socket.socket, ClientSession]:
    """A connection to the store at this address, validated and answering.

    A timeout of 0 means one try. Raises DistNetworkError with the last cause.
    """
    tries = _Tries(host, port, deadline)
    while True:
        try:
            return await asyncio.wait_for(_try(host, port, tries.pings), tries.limit())
        except (OSError, ProtocolError, asyncio.TimeoutError) as error:
            pause = tries.after(error)
        await asyncio.sleep(pause)


async def _try(host: str, port: int, pings: bool) -> tuple[socket.socket, ClientSession]:
    peer = await _connect(host, port)
    try:
        loop = asyncio.get_running_loop()
        session, hello, call = _hello(peer, pings)
        try:
            await loop.sock_sendall(peer, hello)
            while not call.done:
                _hear(session, await loop.sock_recv(peer, 4))
        except ConnectionError as error:
            raise _HungUp(*error.args) from None
        _check(call)
        return peer, session
    except BaseException:
        peer.close()
        raise


async def _connect(host: str, port: int) -> socket.socket:
    addresses = _literal(host, port) or await _look_up(host, port)
    return await start_connection(addresses, happy_eyeballs_delay=_STAGGER)


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
        except ValueError as error:  # too long a label, say
            failed = OSError(f"{host!r} is not a valid host name: {error}")
        try:
            loop.call_soon_threadsafe(tell, found, failed)
        except RuntimeError:
            return  # the loop has been closed: nobody wants to know any more

    threading.Thread(target=ask, name=f"look-up of {host}", daemon=True).start()
    return await answer


# From a thread without a loop


class Cancelled(Exception):
    """While a connection was being made, another thread has closed or lost what it was for."""


def _always() -> bool:
    return True


class _Attempt:
    """How long a try may take, in a thread that looks every now and then whether its outcome is still wanted."""

    def __init__(self, seconds: float | None, wanted: Callable[[], bool]) -> None:
        self.deadline = Deadline(-1.0 if seconds is None else seconds)
        self.wanted = wanted
        self.pid = os.getpid()

    def tick(self) -> float:
        """Seconds until the next look. Raises TimeoutError when time is up, Unwanted."""
        if not self.wanted():
            raise Cancelled
        left = self.deadline.left()
        if left == 0.0:
            raise TimeoutError
        return _TICK if left is None else min(left, _TICK)

    def wait_for(self, peer: socket.socket, event: int) -> None:
        poll = select.poll()
        poll.register(peer, event)
        while not poll.poll(self.tick() * 1000):
            pass
        if os.getpid() != self.pid:  # a handler of signals has forked: what comes is for the parent
            raise OSError("the process forked while connecting")

    def sleep(self) -> None:
        """Until time is up."""
        try:
            while True:
                time.sleep(self.tick())
        except TimeoutError:
            pass


def connect_blocking(
    host: str, port: int, deadline: Deadline, wanted: Callable[[], bool] = _always
) -> tuple[socket.socket, ClientSession]:
    """The same for a thread that has no loop: the connection comes back blocking.

    Raises DistNetworkError, or Unwanted if that is what it has become.
    """
    tries = _Tries(host, port, deadline)
    while True:
        try:
            return _try_in_this_thread(host, port, _Attempt(tries.limit(), wanted), tries.pings)
        except (OSError, ProtocolError, asyncio.TimeoutError) as error:
            pause = tries.after(error)
        _Attempt(pause, wanted).sleep()


def _try_in_this_thread(host: str, port: int, attempt: _Attempt, pings: bool) -> tuple[socket.socket, ClientSession]:
    addresses = _literal(host, port)
    peer = _connect_to(addresses[0], attempt) if addresses else _connect_in_a_helper(host, port, attempt)
    try:
        session, hello, call = _hello(peer, pings)
        try:
            peer.sendall(hello, _NO_SIGPIPE)
            while not call.done:
                attempt.wait_for(peer, select.POLLIN)
                _hear(session, peer.recv(4))
        except ConnectionError as error:
            raise _HungUp(*error.args) from None
        _check(call)
        peer.settimeout(None)
        return peer, session
    except BaseException:
        peer.close()
        raise


def _connect_to(address: AddressInfo, attempt: _Attempt) -> socket.socket:
    peer = socket.socket(address[0], address[1])
    try:
        peer.setblocking(False)
        error = peer.connect_ex(address[4])
        if error == errno.EINPROGRESS:
            attempt.wait_for(peer, select.POLLOUT)
            error = peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        return peer
    except BaseException:
        peer.close()
        raise


def _connect_in_a_helper(host: str, port: int, attempt: _Attempt) -> socket.socket:
    """Look up and connect on a loop in a helper thread, for the caller may be inside of one itself."""
    limit = attempt.deadline.left()
    found: list[socket.socket] = []
    failed: list[BaseException] = []
    stop: list[Callable[[], object]] = []
    abandoned = threading.Event()

    async def connect() -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(task.cancel))
        if not abandoned.is_set():
            found.append(await asyncio.wait_for(_connect(host, port), limit))

    def run() -> None:
        try:
            asyncio.run(connect())
        except BaseException as error:
            failed.append(error)
        if abandoned.is_set():
            _close_all(found)

    helper = threading.Thread(target=run, name=f"connecting to {host}", daemon=True)
    helper.start()
    try:
        while helper.is_alive():
            helper.join(attempt.tick())
    except BaseException:
        abandoned.set()
        for cancel in stop:
            try:
                cancel()
            except RuntimeError:
                pass  # it has just ended
        _close_all(found)
        raise
    if failed:
        raise failed[0]
    return found[0]


def _close_all(peers: list[socket.socket]) -> None:
    while peers:
        peers.pop().close()


# What both have in common


def _hello(peer: socket.socket, pings: bool) -> tuple[ClientSession, bytes, PendingCall]:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _keep_alive(peer)
    session = ClientSession(pings)
    hello, call = session.hello(os.getpid())
    return session, hello, call


def _keep_alive(peer: socket.socket) -> None:
    options = [(getattr(socket, name, None), value) for name, value in _KEEP_ALIVE]
    try:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in options:
            if option is not None:
                peer.setsockopt(socket.IPPROTO_TCP, option, value)
    except OSError:
        pass  # some systems know the name and nothing else


def _hear(session: ClientSession, chunk: bytes) -> None:
    if not chunk:
        raise ConnectionError("the peer closed the connection during the handshake")
    session.receive(chunk)


def _check(call: PendingCall) -> None:
    """Whether it is a store's server that answered."""
    pid = os.getpid()
    if call.command.method == "ping" and call.result != pid:
        raise ProtocolError(f"Ping failed, invalid value returned from server. Expected: {pid}, Got: {call.result}")


def _literal(host: str, port: int) -> list[AddressInfo]:
    """The address, if that is what the host is: there is nothing to look up."""
    try:
        literal = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return []
    family = socket.AF_INET6 if literal.version == 6 else socket.AF_INET
    return socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
