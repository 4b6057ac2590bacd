"""Opening a connection: resolve, connect and shake hands under one deadline.

It knows addresses of both families and when to retry; it must not know what the connection is for.

Invariants: the deadline covers everything, whatever a resolver or a peer does. No reverse look-ups. Transient failures
are retried until the deadline. A look-up that hangs is abandoned in a daemon thread.
"""

import asyncio
import errno
import ipaddress
import itertools
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any, Final, TypeVar

from aiohappyeyeballs import start_connection

from ..auth.secret_files import TlsFiles
from ..base.addresses import format_address, is_loopback
from ..base.deadline import MIN_ROUND_TRIP, Deadline
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
from . import exchanges, requests
from .admission import admission
from .server_url import Address
from .servers import Servers
from .store_name import StoreEndedError, StoreName, is_local
from .tls import TlsFailed, TlsSocket, encrypted, tls_required

_LAST_TRY: Final = 0.05
"""Seconds reserved for the last attempt."""

NO_ANSWER: Final = "no answer"
"""The reason when nothing else is known: another program may hold the port and stay silent."""

_HANG_UPS: Final = 2
"""Handshakes cut off in a row before PING is left out of the next one, or put back. A single one may be a reset."""

_FULL: Final = " (a server at its connection limit also does this; see its log)"
"""Added to the reason of a handshake that was cut off."""

_STAGGER: Final = 0.1
"""Seconds until the next address is tried in parallel with one that has not answered."""

NO_SIGPIPE: Final[int] = getattr(socket, "MSG_NOSIGNAL", 0)
"""The program may have SIGPIPE at its default, which would kill it when the peer is gone."""

_KEEP_ALIVE: Final = (("TCP_KEEPIDLE", 180), ("TCP_KEEPINTVL", 30), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 300_000))
"""Gives up on a host that has vanished, as after a power failure, after five minutes, and fails calls without a timeout
then. Not earlier, because a network may come back. In seconds, the last one in milliseconds. Where the system lacks an
option, its own defaults apply."""

_KEEP_ALIVE_OF_SEVERAL: Final = (
    ("TCP_KEEPIDLE", 1),
    ("TCP_KEEPINTVL", 1),
    ("TCP_KEEPCNT", 2),
    ("TCP_USER_TIMEOUT", 3_000),
)
"""Gives up soon after another server can have taken over, which continues the link: a network that comes back costs no
more than another connection."""

_LAST_ASK: Final = 0.25
"""Seconds reserved for a client that waits for a named store to ask once more which others exist."""

_LOOK_UP_AGAIN: Final = 15.0
"""Seconds until a failed look-up of a host is repeated."""

_PATIENCE: Final = 2.0
"""Seconds for each step of an attempt if there are other servers to try; doubled with each round."""

_TICK: Final = 0.1
"""Seconds between checks whether a connection that is being made is still wanted."""

_HELLO_REPLY: Final = 4
"""Bytes to read at most until the handshake has been answered: what follows may be the caller's."""

_REPLY: Final = 4096
"""Bytes to read at most from then on."""

_opened: Final["weakref.WeakKeyDictionary[socket.socket, int]"] = weakref.WeakKeyDictionary()
"""Sockets that threads have opened, also those that nothing else knows yet, and the threads."""

AddressInfo = tuple[Any, Any, int, str, Any]

T = TypeVar("T")


class _Tries:
    """What to connect to, when to retry, and when to give up."""

    def __init__(
        self,
        servers: Servers,
        deadline: Deadline,
        refused_is_final: bool,
        token: bytes = b"",
        tls: TlsFiles | None = None,
        name: StoreName | None = None,
    ) -> None:
        self.servers = servers
        self._round = servers.round()
        self.host, self.port = next(self._round)
        self.deadline = deadline
        self.refused_is_final = refused_is_final
        self.token = token
        self.tls = tls
        self.name = name
        self.pings = len(servers.all()) == 1
        """Whether the handshake has a PING: PyTorch's servers before 2.5 close the connection on it, and so do ours
        that stand by. Without it, the server is asked who it is."""
        self._causes: dict[Address, str] = {}
        """Why the last attempt at a server failed, or the one before if the last was too short to show it."""
        self._may_pass = False
        """Whether, in this round, a server failed in a way that may pass."""
        self._short = False
        """Whether the current attempt has too little time to show why it fails."""
        self._failures = 0
        self._hung_up = 0
        """Handshakes in a row that the peer has cut off."""

    def limit(self) -> float | None:
        """Return the timeout of the next attempt in seconds; None means no limit."""
        left = self.deadline.left()
        # End early while the name may mean another store: the last attempt then tells the error which stores exist.
        if left is not None and left > 4 * _LAST_ASK and self.name is not None and self.name.is_ambiguous():
            return left - _LAST_ASK
        self._short = left is not None and left <= 2 * _LAST_TRY
        return MIN_ROUND_TRIP if self.deadline.timeout == 0 else left

    def step_limit(self) -> float | None:
        """Return the seconds for the next step of an attempt; None if it may take as long as the attempt."""
        if self.name is not None and self.name.asked:
            return _LOOK_UP_AGAIN if self.name.unresolved else None
        return None if len(self.servers.all()) == 1 else _PATIENCE * 2.0 ** min(self._failures, 10)

    def after(self, error: Exception) -> float:
        """Note why an attempt failed; return the seconds until the next.

        Raises DistNetworkError if there is none, or the error itself if it is a refusal that is final.
        """
        here = self.host, self.port
        self.servers.note(error)
        self._hung_up = self._hung_up + 1 if isinstance(error, _HungUp) else 0
        if self._hung_up == _HANG_UPS:
            self._hung_up = 0
            self.pings = not self.pings
        self.pings = self.pings and len(self.servers.all()) == 1
        cause = _cause(error) + (_FULL if isinstance(error, _HungUp) else "")
        if cause == NO_ANSWER and self.name is not None:
            cause = self.name.missing() or cause
        if self.name is not None:
            self.name.asked = False  # by the next attempt, so far
        if cause != NO_ANSWER or not self._short or here not in self._causes:
            self._causes[here] = cause  # a short attempt times out whatever is wrong
        untrusted = isinstance(error, TlsFailed) and error.final
        refused = self.refused_is_final and isinstance(error, ConnectionRefusedError)
        self._may_pass = self._may_pass or not (untrusted or refused)
        following = next(self._round, None)
        if following is None and not self._may_pass:
            if refused:
                try:
                    raise error
                finally:
                    del error
            raise DistNetworkError(f"cannot connect to {self._where()}: {self._why()}") from None
        left = self.deadline.left()
        if left is not None and left <= _LAST_TRY and (self.deadline.timeout or following is None):
            raise DistNetworkError(
                f"The client socket has timed out after {round(1000 * self.deadline.timeout)}ms while trying to "
                f"connect to {self._where()}. Gave up after {self.deadline.spent():.1f} s; last error: "
                f"{self._why()}.{self._advice()}"
            ) from None
        if following is not None:
            self.host, self.port = following
            return 0.0
        self._failures += 1
        self._may_pass = False
        self._round = self.servers.round()
        self.host, self.port = next(self._round)
        wait = self.servers.pause(self._failures)
        return wait if left is None else min(wait, left - _LAST_TRY)

    def reached(self) -> None:
        """Note that an attempt has succeeded."""
        self.servers.first = self.host, self.port

    def _where(self) -> str:
        return ", ".join([f"({host}, {port})" for host, port in self.servers.all()])

    def _why(self) -> str:
        causes = self._causes
        if len(causes) == 1:
            return next(iter(causes.values()))
        return "; ".join([f"{format_address(*server)}: {cause}" for server, cause in causes.items()])

    def _advice(self) -> str:
        """Return advice for an address without a listener here that another host may have published; else ""."""
        if self.name is not None or self._why() != os.strerror(errno.ECONNREFUSED) or not is_local(self.host):
            return ""
        return (
            f" Nobody listens there on this host; if another host has published {self.host}, it is of use there only: "
            "its log says why (level info)."
        )


def _cause(error: Exception) -> str:
    if isinstance(error, (asyncio.TimeoutError, TimeoutError, BlockingIOError)):
        return NO_ANSWER
    if isinstance(error, OSError) and error.errno and not isinstance(error, (socket.gaierror, TlsFailed)):
        return os.strerror(error.errno)  # asyncio's text says only that it failed
    return reason_of(error)


class _HungUp(ConnectionError):
    """The connection was lost before the handshake was answered."""


def _hung_up(peer: socket.socket, error: ConnectionError) -> ConnectionError:
    why = peer.why(error) if isinstance(peer, TlsSocket) else error
    return why if isinstance(why, TlsFailed) else _HungUp(*error.args)


# On an event loop


async def connect(
    servers: Servers,
    deadline: Deadline,
    refused_is_final: bool = False,
    token: bytes = b"",
    tls: TlsFiles | None = None,
    name: StoreName | None = None,
) -> tuple[socket.socket, ClientSession]:
    """Connect to the server that serves, shake hands, present the token, and enter the named store, if given.

    A timeout of 0 allows one attempt at each server. With `tls` the connection is encrypted, and the server's
    certificate verified. Raises DistNetworkError with the last error, AccessDeniedError, and, with `refused_is_final`,
    ConnectionRefusedError if all servers refuse.
    """
    tries = _Tries(servers, deadline, refused_is_final, token, tls, name)
    while True:
        try:
            connected = await asyncio.wait_for(_try(tries), tries.limit())
            tries.reached()
            return connected
        except (OSError, ProtocolError, asyncio.TimeoutError) as error:
            pause = tries.after(error)
        await asyncio.sleep(pause)


async def lost_error(
    servers: Servers, token: bytes, tls: TlsFiles | None, name: StoreName | None, text: str
) -> DistNetworkError:
    """Return the error of a lost connection: `text`, after the server's reason for ending it or its store, if known."""
    try:
        deadline = Deadline(MIN_ROUND_TRIP)
        ended = None if name is None else name.once()
        peer, session = await connect(servers, deadline, refused_is_final=True, token=token, tls=tls, name=ended)
        peer.close()
        why, denied = session.refusal, bool(session.refusal)
    except (DistNetworkError, DistStoreError, OSError) as error:
        why, denied = why_lost(error)
    text = f"{why}: {text}" if why else text
    return ConnectionDeniedError(text) if denied else DistNetworkError(text)


async def _try(tries: _Tries) -> tuple[socket.socket, ClientSession]:
    peer = await asyncio.wait_for(open_connection(tries.host, tries.port, tries.tls), tries.step_limit())

    async def perform(step: _Step) -> Any:
        if isinstance(step, str):
            with suppress(OSError):
                return _hosts(await _look_up(step, 0))
            return []
        return await asyncio.wait_for(transfer(peer, step), tries.step_limit())

    try:
        return peer, await exchanges.run_async(perform, _open_session(peer, tries, False))
    except BaseException:
        peer.close()
        raise


async def open_connection(host: str, port: int, tls: TlsFiles | None = None) -> socket.socket:
    """Return a socket that is connected to this address, without the store's handshake. Raises OSError."""
    addresses = _literal(host, port) or await _look_up(host, port)
    peer = await start_connection(addresses, happy_eyeballs_delay=_STAGGER)
    return peer if tls is None else await encrypt(peer, tls, host)


async def encrypt(peer: socket.socket, tls: TlsFiles, host: str) -> socket.socket:
    """Shake hands on a connection to this host, which is taken over; return the socket to use. Raises OSError."""
    keep_alive(peer)
    try:
        return await exchanges.run_async(partial(transfer, peer), encrypted(peer, tls, host))
    except BaseException:
        peer.close()
        raise


async def transfer(peer: socket.socket, step: bytes | int) -> bytes | None:
    """Send bytes, or return what arrives next, at most that many bytes; b"" at the end."""
    loop = asyncio.get_running_loop()
    if isinstance(step, bytes):
        await loop.sock_sendall(peer, step)
        return None
    with suppress(BlockingIOError):
        return peer.recv(step)  # it may be buffered, which the loop does not look for
    return await loop.sock_recv(peer, step)


async def _look_up(host: str, port: int) -> list[AddressInfo]:
    """Resolve a name in a thread of its own, so that a look-up that hangs delays no other. Raises OSError."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def end() -> None:
        if not done.done():
            done.set_result(None)

    def report() -> None:
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(end)

    _, found, failed = _start_look_up(host, port, report)
    await done
    if failed:
        raise failed.pop()
    return found


def _start_look_up(
    host: str, port: int, on_end: Callable[[], object]
) -> tuple[threading.Thread, list[AddressInfo], list[OSError]]:
    """Resolve a name in a daemon thread, which does not delay the end of the process if it hangs.

    Returns the thread, and lists of the addresses and the error that it fills before it calls `on_end`.
    """
    found: list[AddressInfo] = []
    failed: list[OSError] = []

    def resolve() -> None:
        try:
            found.extend(_resolve(host, port))
        except OSError as error:
            failed.append(error.with_traceback(None))
        on_end()

    thread = threading.Thread(target=resolve, name=f"lookup of {host}", daemon=True)
    thread.start()
    return thread, found, failed


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

    def __init__(self, seconds: float | None, wanted: Callable[[], bool] = always) -> None:
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

    def at_most(self, seconds: float | None) -> "Attempt":
        """Return an attempt that ends with this one, but within this many seconds."""
        if seconds is None:
            return self
        left = self.deadline.left()
        limited = Attempt(seconds if left is None else min(left, seconds), self.wanted)
        limited.pid = self.pid
        return limited

    def wait_for(self, peer: socket.socket, event: int) -> None:
        poll = select.poll()
        poll.register(peer, event)
        while not poll.poll(self.tick() * 1000):
            pass
        if os.getpid() != self.pid:  # a signal handler has forked: the reply is the parent's
            raise OSError("the process forked while connecting")

    def receive(self, peer: socket.socket, size: int) -> bytes:
        """Return what arrives next, at most this many bytes; b"" at the end."""
        while True:
            if not (isinstance(peer, TlsSocket) and peer.buffered()):
                self.wait_for(peer, select.POLLIN)
            with suppress(BlockingIOError):  # of a TLS record only a part has arrived
                return peer.recv(size, socket.MSG_DONTWAIT)

    def sleep(self) -> None:
        """Sleep until the deadline."""
        try:
            while True:
                time.sleep(self.tick())
        except TimeoutError:
            pass


def connect_blocking(
    servers: Servers,
    deadline: Deadline,
    wanted: Callable[[], bool] = always,
    refused_is_final: bool = False,
    token: bytes = b"",
    tls: TlsFiles | None = None,
    name: StoreName | None = None,
    asks: bool = False,
) -> tuple[socket.socket, ClientSession]:
    """Connect as `connect` does, from a thread without a loop. The socket returned is blocking.

    With `asks`, the question whether the server is one of ours goes with the handshake; the caller reads the reply.
    Raises DistNetworkError, AccessDeniedError, ConnectionRefusedError, or Cancelled if `wanted` no longer returns True.
    """
    tries = _Tries(servers, deadline, refused_is_final, token, tls, name)
    return _retry(tries, wanted, lambda attempt: _try_in_this_thread(tries, attempt, asks))


def open_blocking(host: str, port: int, deadline: Deadline, refused_is_final: bool = False) -> socket.socket:
    """Return a non-blocking socket connected to this address, without the handshake, from a thread without a loop.

    Raises DistNetworkError and, with `refused_is_final`, ConnectionRefusedError.
    """
    tries = _Tries(Servers((host, port)), deadline, refused_is_final)
    return _retry(tries, always, lambda attempt: _open_in_this_thread(tries, attempt))


def _retry(tries: _Tries, wanted: Callable[[], bool], attempt: Callable[[Attempt], T]) -> T:
    while True:
        try:
            connected = attempt(Attempt(tries.limit(), wanted))
            tries.reached()
            return connected
        except (OSError, ProtocolError, asyncio.TimeoutError) as error:
            pause = tries.after(error)
        Attempt(pause, wanted).sleep()


def _open_in_this_thread(tries: _Tries, attempt: Attempt) -> socket.socket:
    attempt = attempt.at_most(tries.step_limit())
    addresses = _literal(tries.host, tries.port)
    if addresses:
        return _connect_to(addresses[0], attempt)
    return _connect_in_a_helper(tries.host, tries.port, attempt)


def _try_in_this_thread(tries: _Tries, attempt: Attempt, asks: bool) -> tuple[socket.socket, ClientSession]:
    peer = _open_in_this_thread(tries, attempt)

    def perform(step: _Step) -> Any:
        if isinstance(step, str):
            return _look_up_in_a_helper(step, attempt)
        if isinstance(step, bytes):
            return peer.sendall(step, NO_SIGPIPE)
        return attempt.at_most(tries.step_limit()).receive(peer, step)

    try:
        if tries.tls is not None:
            keep_alive(peer)
            peer = exchanges.run(perform, encrypted(peer, tries.tls, tries.host))
            _opened[peer] = threading.get_ident()
        session = exchanges.run(perform, _open_session(peer, tries, asks))
        peer.settimeout(None)
        return peer, session
    except BaseException:
        peer.close()
        raise


def _connect_to(address: AddressInfo, attempt: Attempt) -> socket.socket:
    peer = socket.socket(address[0], address[1])
    _opened[peer] = threading.get_ident()
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
    _opened[found[0]] = threading.get_ident()
    return found[0]


def _look_up_in_a_helper(host: str, attempt: Attempt) -> list[str]:
    """Return the addresses of a name, none if it cannot be resolved. A look-up that hangs is abandoned."""
    helper, found, _ = _start_look_up(host, 0, always)
    while helper.is_alive():
        helper.join(attempt.tick())
    return _hosts(found)


def _close_all(peers: list[socket.socket]) -> None:
    while peers:
        peers.pop().close()


# In a forked child


def leave_to_parent(peer: socket.socket, mine: bool) -> None:
    """Close a copy of a connection; with `mine`, a call of this thread goes on with it, and finds its end.

    A copy would hide from the server that the parent has closed the connection.
    """
    _opened.pop(peer, None)
    if mine and peer.fileno() >= 0:  # a signal handler has forked
        ended, other = socket.socketpair()
        other.close()
        os.dup2(ended.fileno(), peer.fileno(), inheritable=False)
        ended.close()
    else:
        socket.socket.close(peer)  # not `close`, which with TLS says something to the server


def leave_rest_to_parent() -> None:
    """Do the same with connections that other threads, or an interrupted call, were opening or resuming."""
    me = threading.get_ident()
    for peer, user in list(_opened.items()):
        leave_to_parent(peer, user == me)


# Shared by both


def leaves_host(peer: socket.socket) -> bool:
    """Return whether a connection leaves this host, so that others could read its bytes."""
    try:
        return not is_loopback(peer.getpeername()[0])
    except OSError:
        return False  # it has been lost


def why_lost(error: Exception) -> tuple[str, bool]:
    """Return why the server rejects a client that has lost its connection, and whether the reason is its token.

    The text is "" if the error does not explain the loss.
    """
    if isinstance(error, StoreEndedError):
        return str(error), False
    # Without `final`, there are too many sessions with the token; the lost one may be among them.
    return (str(error), True) if isinstance(error, AccessDeniedError) and error.final else ("", False)


_Step = bytes | int | str
"""Bytes to send, the most bytes to receive, or a host to resolve."""


def _open_session(peer: socket.socket, tries: _Tries, asks: bool) -> Generator[_Step, Any, ClientSession]:
    """Shake hands, present the token and enter the named store; return the session.

    Yields steps; after one to receive, it is sent the bytes, and after one to resolve, the addresses. Raises
    ProtocolError if the peer is no store's server, and what `admission` raises.
    """
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(peer, len(tries.servers.all()) > 1)
    clear = tries.token != b"" and tries.tls is None and leaves_host(peer)
    session = ClientSession(tries.pings)
    hello, greeting = session.hello(os.getpid())
    if asks and tries.pings:
        asking, session.asked = session.request(*requests.HAS_EXTENSION)
        hello += asking
    admitting = admission(session, tries.host, tries.port, tries.token, tries.name, clear, not tries.pings)
    first, first_asked = next(admitting, (b"", greeting))
    try:
        yield hello + first  # the first message of the admission goes with the handshake
        while not greeting.done:
            _receive(session, (yield _HELLO_REPLY))
    except ConnectionError as error:
        raise _hung_up(peer, error) from None
    check_hello(greeting)
    for data, asked in itertools.chain([(b"", first_asked)], admitting):
        if tries.name is not None and tries.name.host_to_resolve:
            tries.name.resolved((yield tries.name.host_to_resolve))
        if data:
            yield data
        while not asked.done:
            _receive(session, (yield _REPLY))
    return session


def keep_alive(peer: socket.socket, of_several: bool = False) -> None:
    """Enable TCP keep-alive, so that the system gives up a connection to a vanished host; see `_KEEP_ALIVE`."""
    chosen = _KEEP_ALIVE_OF_SEVERAL if of_several else _KEEP_ALIVE
    options = [(getattr(socket, name, None), value) for name, value in chosen]
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
    """Check that a store's server has answered the handshake.

    Raises ProtocolError, and AccessDeniedError if it requires TLS.
    """
    pid = os.getpid()
    if call.command.method == "ping" and call.result != pid:
        if is_mismatch(call.result.to_bytes(4, "little")):
            raise tls_required()
        raise ProtocolError(f"Ping failed, invalid value returned from server. Expected: {pid}, Got: {call.result}")


def _literal(host: str, port: int) -> list[AddressInfo]:
    """Return the address of an IP literal; empty for a name."""
    try:
        literal = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return []
    family = socket.AF_INET6 if literal.version == 6 else socket.AF_INET
    ascii_host = host.encode("ascii")  # text would import a codec, which takes 2 ms
    return socket.getaddrinfo(ascii_host, port, family, socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
