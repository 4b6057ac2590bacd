"""Opening a connection: resolve, connect and shake hands under one deadline.

It knows addresses of both families and when to retry; it must not know what the connection is for.

Invariants: the deadline covers everything, whatever a resolver or a peer does. A peer's name is never looked up.
Failures that may pass are retried until the deadline. A look-up that hangs is left behind in a thread for which nothing
waits.
"""

import asyncio
import errno
import ipaddress
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from copy import copy
from typing import Any, Final, TypeVar

from aiohappyeyeballs import start_connection

from ..base.addresses import is_loopback
from ..base.deadline import MIN_ROUND_TRIP, Deadline, backoff
from ..base.errors import (
    AccessDeniedError,
    ConnectionDeniedError,
    DistNetworkError,
    DistStoreError,
    ProtocolError,
    reason_of,
)
from ..session.client import ClientSession, PendingCall
from ..session.tls import is_mismatch
from . import requests
from .admission import admission
from .store_name import StoreEndedError, StoreName, is_local
from .tls import ClientTls, TlsFailed, tls_required

_LAST_TRY: Final = 0.05
"""Seconds reserved for the last attempt."""

NO_ANSWER: Final = "no answer"
"""Given as the reason if nothing else is known: somebody may hold the port and be silent."""

_HANG_UPS: Final = 2
"""Handshakes cut off in a row before the next one is made without PING, or with it again. One may be a reset."""

_FULL: Final = " (a server at its connection limit also does this; see its log)"

_STAGGER: Final = 0.1
"""Seconds until the next address is tried in parallel with one that has not answered."""

NO_SIGPIPE: Final[int] = getattr(socket, "MSG_NOSIGNAL", 0)
"""The program may have SIGPIPE at its default, which would kill it when the peer is gone."""

_KEEP_ALIVE: Final = (("TCP_KEEPIDLE", 180), ("TCP_KEEPINTVL", 30), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 300_000))
"""Gives up on a host that vanished, say with its power, after five minutes, and with it calls without a timeout. Not
earlier, because a network may come back. In seconds, the last one in milliseconds. Where the system lacks an option,
its own defaults apply."""

_LAST_LOOK: Final = 0.25
"""Seconds left of those of a client that waits for a store, when it asks for the last time which others there are."""

_LOOK_AGAIN: Final = 15.0
"""Seconds until a host is looked up again that could not be."""

_TICK: Final = 0.1
"""Seconds between two checks whether a connection that is being made is still wanted."""

_REPLY: Final = 4096

AddressInfo = tuple[Any, Any, int, str, Any]

T = TypeVar("T")


class _Tries:
    """Decides when to retry, and when to give up."""

    def __init__(
        self, host: str, port: int, deadline: Deadline, refused_is_final: bool, name: StoreName | None
    ) -> None:
        self.name = name
        self.host = host
        self.port = port
        self.deadline = deadline
        self.refused_is_final = refused_is_final
        self.pings = True
        """Whether the handshake has a PING: PyTorch's servers before 2.5 close the connection on it."""
        self.cause = ""
        """Why the last attempt failed, or the one before if the last had too little time to show it."""
        self._short = False
        self._failures = 0
        self._hung_up = 0
        """Handshakes in a row that the peer has cut off."""

    def is_final(self, error: Exception) -> bool:
        """Return whether the caller is to get this error of an attempt as it is."""
        return self.refused_is_final and isinstance(error, ConnectionRefusedError)

    def limit(self) -> float | None:
        """Return the seconds that this attempt may take; None without limit."""
        left = self.deadline.left()
        if left is not None and left > 4 * _LAST_LOOK and self.name is not None and self.name.looks():
            return left - _LAST_LOOK
        self._short = left is not None and left <= 2 * _LAST_TRY
        return MIN_ROUND_TRIP if self.deadline.timeout == 0 else left

    def after(self, error: Exception) -> float:
        """Return the seconds until the next attempt. Raises DistNetworkError if there is none."""
        if isinstance(error, TlsFailed) and error.final:
            raise DistNetworkError(f"cannot connect to ({self.host}, {self.port}): {error}") from None
        self._hung_up = self._hung_up + 1 if isinstance(error, _HungUp) else 0
        if self._hung_up == _HANG_UPS:
            self._hung_up = 0
            self.pings = not self.pings
        cause = _cause(error) + (_FULL if isinstance(error, _HungUp) else "")
        if cause == NO_ANSWER and self.name is not None:
            cause = self.name.missing() or cause
        if cause != NO_ANSWER or not self._short or not self.cause:
            self.cause = cause
        left = self.deadline.left()
        if left is not None and left <= _LAST_TRY:
            raise DistNetworkError(
                f"The client socket has timed out after {round(1000 * self.deadline.timeout)}ms while trying to "
                f"connect to ({self.host}, {self.port}). Gave up after {self.deadline.spent():.1f} s; last error: "
                f"{self.cause}.{self._elsewhere()}"
            ) from None
        self._failures += 1
        wait = backoff(self._failures)
        return wait if left is None else min(wait, left - _LAST_TRY)

    def _elsewhere(self) -> str:
        """Return what to do if the address is one that another host has published, where nobody listens here."""
        if self.name is not None or self.cause != os.strerror(errno.ECONNREFUSED) or not is_local(self.host):
            return ""
        return (
            f" Nobody listens there on this host; if another host has published {self.host}, it is of use there only: "
            "its log says why (level info)."
        )


def _cause(error: Exception) -> str:
    if isinstance(error, (asyncio.TimeoutError, TimeoutError, BlockingIOError)):
        return NO_ANSWER
    if isinstance(error, OSError) and error.errno and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno)  # asyncio's own text says that it failed, not why
    return reason_of(error)


class _HungUp(ConnectionError):
    """The connection was lost before the handshake was answered."""


# On an event loop


async def connect(
    host: str,
    port: int,
    deadline: Deadline,
    refused_is_final: bool = False,
    token: bytes = b"",
    tls: ClientTls | None = None,
    name: StoreName | None = None,
) -> tuple[socket.socket, ClientSession]:
    """Connect to the store at this address, shake hands, present the token, and enter the named store, if given.

    A timeout of 0 allows one attempt. With `tls` the connection is encrypted, and the server's certificate verified.
    Raises DistNetworkError with the last error, AccessDeniedError, and, if that is said to be final,
    ConnectionRefusedError.
    """
    tries = _Tries(host, port, deadline, refused_is_final, name)
    while True:
        try:
            return await asyncio.wait_for(_try(host, port, tries.pings, token, tls, name), tries.limit())
        except (OSError, ProtocolError, asyncio.TimeoutError) as error:
            if tries.is_final(error):
                raise
            pause = tries.after(error)
        await asyncio.sleep(pause)


async def lost_error(
    host: str, port: int, token: bytes, tls: ClientTls | None, name: StoreName | None, text: str
) -> DistNetworkError:
    """Return the error for a lost connection, with why the server has ended that, or the store with this name.

    Without that, if the server does not say so now.
    """
    ended = None if name is None else name.once()
    try:
        deadline = Deadline(MIN_ROUND_TRIP)
        peer, session = await connect(host, port, deadline, refused_is_final=True, token=token, tls=tls, name=ended)
        peer.close()
        if session.refusal:
            return ConnectionDeniedError(f"{session.refusal}: {text}")
    except StoreEndedError as error:
        return DistNetworkError(f"{error}: {text}")
    except AccessDeniedError as error:
        if error.final:  # else there are too many sessions with the token: perhaps the one that was lost
            return ConnectionDeniedError(f"{error}: {text}")
    except (DistNetworkError, DistStoreError, OSError):
        pass
    return DistNetworkError(text)


async def _try(
    host: str, port: int, pings: bool, token: bytes, tls: ClientTls | None, name: StoreName | None
) -> tuple[socket.socket, ClientSession]:
    peer = await open_connection(host, port, tls)
    try:
        loop = asyncio.get_running_loop()
        session, hello, call = _hello(peer, pings)
        clear = token != b"" and tls is None and leaves_host(peer)
        try:
            for data, asked in _opening(hello, call, admission(session, host, port, token, name, clear)):
                if name is not None and name.to_look_up:
                    try:
                        name.tell(_hosts(await _look_up(name.to_look_up, 0)))
                    except OSError:
                        name.tell(())
                if data:
                    await loop.sock_sendall(peer, data)
                while not asked.done:
                    chunk = loop.sock_recv(peer, _reply_bytes(call))
                    limit = _LOOK_AGAIN if name is not None and name.unknown else None
                    _receive(session, await (asyncio.wait_for(chunk, limit) if limit else chunk))
        except ConnectionError as error:
            if call.done:
                raise
            raise _hung_up(error, tls) from None
        return peer, session
    except BaseException:
        peer.close()
        raise


async def open_connection(host: str, port: int, tls: ClientTls | None = None) -> socket.socket:
    """Return a socket that is connected to this address, without the store's handshake. Raises OSError.

    With `tls` it is the end of a pair on loopback that stands for the TLS connection.
    """
    addresses = _literal(host, port) or await _look_up(host, port)
    peer = await start_connection(addresses, happy_eyeballs_delay=_STAGGER)
    if tls is None:
        return peer
    keep_alive(peer)
    return await tls.wrap(peer, host)


async def _look_up(host: str, port: int) -> list[AddressInfo]:
    """Resolve a name in a separate thread: one that hangs must delay neither others nor the end of the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    found: list[AddressInfo] = []
    failed: list[OSError] = []

    def end() -> None:
        if not done.done():
            done.set_result(None)

    def resolve() -> None:
        try:
            found.extend(_resolve(host, port))
        except OSError as error:
            failed.append(error.with_traceback(None))
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(end)

    threading.Thread(target=resolve, name=f"lookup of {host}", daemon=True).start()
    await done
    if failed:
        raise failed.pop()
    return found


def _resolve(host: str, port: int) -> list[AddressInfo]:
    """Resolve a name. Raises OSError."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except ValueError as error:  # too long a label, say
        raise OSError(f"{host!r} is not a valid host name: {error}") from None


def _hosts(found: list[AddressInfo]) -> list[str]:
    return [str(address[4][0]) for address in found]


# In a thread without a loop


class Cancelled(Exception):
    """Another thread has closed or lost the store for which a connection was being made."""


def always() -> bool:
    return True


class Attempt:
    """The deadline of one attempt, in a thread that checks regularly whether the connection is still wanted."""

    def __init__(self, seconds: float | None, wanted: Callable[[], bool]) -> None:
        self.deadline = Deadline(-1.0 if seconds is None else seconds)
        self.wanted = wanted
        self.pid = os.getpid()

    def tick(self) -> float:
        """Return the seconds until the next check. Raises TimeoutError, Cancelled."""
        if not self.wanted():
            raise Cancelled
        left = self.deadline.left()
        if left == 0.0:
            raise TimeoutError
        return _TICK if left is None else min(left, _TICK)

    def at_most(self, seconds: float) -> "Attempt":
        """Return an attempt that ends with this one, or in so many seconds."""
        left = self.deadline.left()
        return Attempt(seconds if left is None else min(left, seconds), self.wanted)

    def wait_for(self, peer: socket.socket, event: int) -> None:
        poll = select.poll()
        poll.register(peer, event)
        while not poll.poll(self.tick() * 1000):
            pass
        if os.getpid() != self.pid:  # a signal handler has forked: the reply is the parent's
            raise OSError("the process forked while connecting")

    def sleep(self) -> None:
        """Sleep until the deadline."""
        try:
            while True:
                time.sleep(self.tick())
        except TimeoutError:
            pass


def connect_blocking(
    host: str,
    port: int,
    deadline: Deadline,
    wanted: Callable[[], bool] = always,
    refused_is_final: bool = False,
    token: bytes = b"",
    tls: ClientTls | None = None,
    name: StoreName | None = None,
    asks: bool = False,
) -> tuple[socket.socket, ClientSession]:
    """Connect as `connect` does, from a thread without a loop. The socket returned is blocking.

    With `asks`, the question whether the server is one of ours goes with the handshake, and its reply is left to the
    caller.

    Raises DistNetworkError, AccessDeniedError, ConnectionRefusedError, or Cancelled if `wanted` no longer returns True.
    """
    tries = _Tries(host, port, deadline, refused_is_final, name)
    return _persist(
        tries, wanted, lambda attempt: _try_in_this_thread(host, port, attempt, tries.pings, token, tls, name, asks)
    )


def open_blocking(host: str, port: int, deadline: Deadline, refused_is_final: bool = False) -> socket.socket:
    """Return a socket that is connected to this address, without the handshake. It does not block.

    From a thread without a loop. Raises DistNetworkError and, if that is said to be final, ConnectionRefusedError.
    """
    tries = _Tries(host, port, deadline, refused_is_final, None)
    return _persist(tries, always, lambda attempt: _open_in_this_thread(host, port, attempt))


def _persist(tries: _Tries, wanted: Callable[[], bool], attempt: Callable[[Attempt], T]) -> T:
    while True:
        try:
            return attempt(Attempt(tries.limit(), wanted))
        except (OSError, ProtocolError, asyncio.TimeoutError) as error:
            if tries.is_final(error):
                raise
            pause = tries.after(error)
        Attempt(pause, wanted).sleep()


def _open_in_this_thread(host: str, port: int, attempt: Attempt) -> socket.socket:
    addresses = _literal(host, port)
    return _connect_to(addresses[0], attempt) if addresses else _connect_in_a_helper(host, port, attempt)


def _try_in_this_thread(
    host: str,
    port: int,
    attempt: Attempt,
    pings: bool,
    token: bytes,
    tls: ClientTls | None,
    name: StoreName | None,
    asks: bool,
) -> tuple[socket.socket, ClientSession]:
    peer = _open_in_this_thread(host, port, attempt)
    if tls is not None:
        keep_alive(peer)
        peer = tls.wrap_blocking(peer, host, attempt)
    try:
        session, hello, call = _hello(peer, pings)
        clear = token != b"" and tls is None and leaves_host(peer)
        if asks:
            asking, session.asked = session.request(*requests.HAS_EXTENSION)
            hello += asking
        try:
            for data, asked in _opening(hello, call, admission(session, host, port, token, name, clear)):
                if name is not None and name.to_look_up:
                    name.tell(_look_up_in_a_helper(name.to_look_up, attempt))
                    if name.unknown:
                        attempt = attempt.at_most(_LOOK_AGAIN)
                if data:
                    peer.sendall(data, NO_SIGPIPE)
                while not asked.done:
                    attempt.wait_for(peer, select.POLLIN)
                    _receive(session, peer.recv(_reply_bytes(call)))
        except ConnectionError as error:
            if call.done:
                raise
            raise _hung_up(error, tls) from None
        peer.settimeout(None)
        return peer, session
    except BaseException:
        peer.close()
        raise


def _connect_to(address: AddressInfo, attempt: Attempt) -> socket.socket:
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


def _connect_in_a_helper(host: str, port: int, attempt: Attempt) -> socket.socket:
    """Resolve and connect on a loop in a helper thread, because the caller may be running a loop itself."""
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
            found.append(await asyncio.wait_for(open_connection(host, port), limit))

    def run() -> None:
        try:
            asyncio.run(connect())
        except BaseException as error:
            failed.append(copy(error))  # the task keeps the error itself, and `stop` the task
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
                pass  # the helper has just ended
        _close_all(found)
        raise
    if failed:
        raise failed.pop()
    return found[0]


def _look_up_in_a_helper(host: str, attempt: Attempt) -> list[str]:
    """Return the addresses of a name, none if it cannot be resolved; a look-up that hangs is left behind."""
    found: list[str] = []

    def run() -> None:
        with suppress(OSError):
            found.extend(_hosts(_resolve(host, 0)))

    helper = threading.Thread(target=run, name=f"lookup of {host}", daemon=True)
    helper.start()
    while helper.is_alive():
        helper.join(attempt.tick())
    return found


def _close_all(peers: list[socket.socket]) -> None:
    while peers:
        peers.pop().close()


# Shared by both


def leaves_host(peer: socket.socket) -> bool:
    """Return whether the bytes of a connection pass where others could read them: not over loopback."""
    try:
        return not is_loopback(peer.getpeername()[0])
    except OSError:
        return False  # it has been lost


def _hung_up(error: ConnectionError, tls: ClientTls | None) -> ConnectionError:
    """Return why the handshake was cut off."""
    cause = None if tls is None else tls.cause()
    return _HungUp(*error.args) if cause is None else cause


def _hello(peer: socket.socket, pings: bool) -> tuple[ClientSession, bytes, PendingCall]:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(peer)
    session = ClientSession(pings)
    hello, call = session.hello(os.getpid())
    return session, hello, call


def _opening(
    hello: bytes, call: PendingCall, admission: Generator[tuple[bytes, PendingCall], None, None]
) -> Generator[tuple[bytes, PendingCall], None, None]:
    """Shake hands, and do what comes before the first request; its first message goes with the handshake.

    Yields as `admission` does. Raises ProtocolError if no store's server has answered.
    """
    data, asked = next(admission, (b"", call))
    yield hello + data, call
    check_hello(call)
    yield b"", asked
    yield from admission


def _reply_bytes(hello: PendingCall) -> int:
    """Return how much to read: no more than the reply to the handshake, until it is there."""
    return _REPLY if hello.done else 4


def keep_alive(peer: socket.socket) -> None:
    """Have the system give up a connection to a host that has vanished; see `_KEEP_ALIVE`."""
    options = [(getattr(socket, name, None), value) for name, value in _KEEP_ALIVE]
    try:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in options:
            if option is not None:
                peer.setsockopt(socket.IPPROTO_TCP, option, value)
    except OSError:
        pass  # some systems define the names only


def _receive(session: ClientSession, chunk: bytes) -> None:
    if not chunk:
        raise ConnectionError("the peer closed the connection during the handshake")
    session.receive(chunk)


def check_hello(call: PendingCall) -> None:
    """Check that it was a store's server that has answered the handshake.

    Raises ProtocolError, and AccessDeniedError if it requires TLS.
    """
    pid = os.getpid()
    if call.command.method == "ping" and call.result != pid:
        if is_mismatch(call.result.to_bytes(4, "little")):
            raise tls_required()
        raise ProtocolError(f"Ping failed, invalid value returned from server. Expected: {pid}, Got: {call.result}")


def _literal(host: str, port: int) -> list[AddressInfo]:
    """Return the address if the host is a literal one, otherwise an empty list."""
    try:
        literal = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return []
    family = socket.AF_INET6 if literal.version == 6 else socket.AF_INET
    ascii_host = host.encode("ascii")  # as text it would import a codec, which takes 2 ms
    return socket.getaddrinfo(ascii_host, port, family, socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
