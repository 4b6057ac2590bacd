"""What the master of a job holds: a server, its own or one that it shares with other stores of this process.

Knows: which address a master listens on, who shares a server, where servers run. Must not know: the protocol, clients.
Invariants: when the last holder has released a server its port is free. A forked child shares nothing with its parent.
"""

import errno
import logging
import os
import socket
import sys
import threading
import time
import warnings
import weakref
from typing import Final, Protocol

from ..errors import DistNetworkError, DistStoreError
from .bind_errors import Tried, Uv, refusals
from .fork_safety import close_on_fork
from .listening import BACKENDS, START_TIMEOUT, Address, check_port, listen_at, prepare, resolve, tell_of_short_backlog

WHERE: Final = "TCPSTORE_SERVER"
BIND: Final = "TCPSTORE_BIND"


log = logging.getLogger("tcpstore_async.server")


class Server(Protocol):
    """A server that is owned, wherever it runs."""

    port: int
    pid: int
    room: int
    """Connections that it can hold."""

    def announce(self, joins: int) -> None: ...

    def complete(self) -> None: ...

    def alive(self) -> bool: ...

    def stop(self) -> None: ...


class _SharedServer:
    """A server and how many hold it."""

    def __init__(self, server: Server, backend: str, shared: bool, address: str, given: bool) -> None:
        self.server = server
        self.address = address
        """The host that it listens on."""
        self.given = given
        """Whether it listens on a socket that was made elsewhere."""
        self.backend = backend
        self.shared = shared
        self.holders = 0
        self.owner = os.getpid()
        self.lock = _shared_lock if shared else threading.RLock()

    def release(self) -> None:
        if self.owner != os.getpid():
            return
        with self.lock:
            self.holders -= 1
            if self.holders:
                return
            if _shared.get(self.server.port) is self:
                del _shared[self.server.port]
            self.server.stop()


_PROCESS_ONLY: Final = "process, or not at all"
_NO_THREAD: Final = "the server of this store must not be a thread of its own process"

_shared: Final[dict[int, _SharedServer]] = {}
"""Servers for which `multi_tenant` was said, by port."""

_shared_lock = threading.RLock()
"""Held while a shared server starts and stops, so that others wait for the outcome. Reentrant: a collection may release
one meanwhile."""


class ServerHandle:
    """One holder's part in a server. It is released when it is dropped, too, and when the interpreter ends."""

    def __init__(self, tenancy: _SharedServer) -> None:
        tenancy.holders += 1
        self.port = tenancy.server.port
        self.pid = tenancy.server.pid
        """The process that serves."""
        self.backend = tenancy.backend
        self.shared = tenancy.shared
        """Whether other stores of this process may hold the same server."""
        self._tenancy = tenancy
        self._release = weakref.finalize(self, tenancy.release)

    def announce(self, joins: int) -> None:
        """So many more ranks are expected to join. Raises DistStoreError if they cannot all be connected."""
        text = self.tell_of_room(joins)
        if text:
            raise DistStoreError(text)
        self._tenancy.server.announce(joins)

    def tell_of_room(self, joins: int) -> str:
        """Log what keeps so many ranks from being connected at once, or makes that slow; the former is the result."""
        server = self._tenancy.server
        if joins > server.room:
            text = _no_room(joins, server)
            log.error("%s", text)
            return text
        tell_of_short_backlog(joins)
        return ""

    def complete(self) -> None:
        """All have joined: connections that come from now on belong to a next round."""
        self._tenancy.server.complete()

    def release(self) -> None:
        """Hold the server no longer; the last holder stops it, and its port is free when this returns.

        May be called again. In a forked child it does nothing.
        """
        if self._tenancy.owner != os.getpid():
            return
        with self._tenancy.lock:  # who comes second waits for the first
            self._release()


def host(
    port: int,
    *,
    bind_host: str | None = None,
    listen_fd: int | None = None,
    multi_tenant: bool = False,
    backend: str = "uv",
    may_be_thread: bool = True,
    timeout: float | None = None,
) -> ServerHandle:
    """A server that serves on `port`, which may be 0; it runs when this returns.

    It listens on every address of this machine, or on exactly `bind_host` or what TCPSTORE_BIND names, or on the socket
    `listen_fd`, which it owns from here on. With `multi_tenant`, stores of this process share the server of a port.
    It runs in a process of its own or, where that is asked for or nothing else is to be had, in a thread of this one,
    if it may. `timeout` is what the caller has left for it, in seconds; None has no end, and 0 is enough for a server,
    but for nothing that has to be waited for. Raises DistNetworkError if the address cannot be had or the server was
    not ready in time, DistStoreError if `listen_fd` has another port, RuntimeError if the server could be a thread only
    and must not.
    """
    if backend not in BACKENDS:
        raise ValueError(f"there is no backend {backend!r}; there is {', '.join(BACKENDS)}")
    where = _where()
    if where == "thread" and not may_be_thread:
        raise RuntimeError(f"{_NO_THREAD}: unset {WHERE}")
    where = where if may_be_thread else _PROCESS_ONLY
    check_port(port)
    if not multi_tenant:
        return ServerHandle(_open(port, bind_host, listen_fd, where, backend, timeout, shared=False))
    began, lock = time.monotonic(), _shared_lock
    if not lock.acquire(timeout=-1 if timeout is None else timeout or START_TIMEOUT):
        raise DistNetworkError(f"another store of this process was still busy with a shared server after {timeout:g} s")
    try:
        tenancy = _shared.get(port)
        if tenancy is None or not tenancy.server.alive():
            left = timeout and max(1e-3, began + timeout - time.monotonic())
            tenancy = _open(port, bind_host, listen_fd, where, backend, left, shared=True)
            _shared[tenancy.server.port] = tenancy
        elif listen_fd is not None:
            _take_over(listen_fd, port, backend).close()
        else:
            _check_address(tenancy, bind_host or os.environ.get(BIND))
        if not may_be_thread and tenancy.server.pid == os.getpid():
            raise RuntimeError(f"{_NO_THREAD}, and another store has made it one")
        return ServerHandle(tenancy)
    finally:
        lock.release()


def _where() -> str:
    """In what servers are to run."""
    where = os.environ.get(WHERE) or "process"
    if where not in ("process", "thread"):
        raise ValueError(f"{WHERE} must be process or thread, not {where!r}")
    return where


def _no_room(joins: int, server: Server) -> str:
    """What is said of a world that does not fit."""
    import resource  # without a limit of files there is room for all

    is_thread = server.pid == os.getpid()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0 if is_thread else 1]
    return (
        f"a world of {joins} ranks does not fit: the server of port {server.port} has room for {server.room} "
        f"connections, as many as the limit of open files leaves (ulimit -{'S' if is_thread else 'H'}n: {limit}); "
        f"start rank 0 with a limit of {joins + limit - server.room} or more"
    )


def _check_address(tenancy: _SharedServer, bind_host: str | None) -> None:
    """Raise DistNetworkError if a store that asks for one address would share the server of another."""
    if bind_host is None and tenancy.given:
        return
    wanted = str(resolve(bind_host, 0)[1][0]) if bind_host else _ANYWHERE[0]
    if wanted != tenancy.address and not (wanted in _ANYWHERE and tenancy.address in _ANYWHERE):
        raise DistNetworkError(
            f"cannot share the server of port {tenancy.server.port}: it listens on {tenancy.address}, and this store "
            f"asks for {wanted}; use the same bind_host (or {BIND}), or another port"
        )


_ANYWHERE: Final = ("::", "0.0.0.0")
"""Every address."""


def _open(
    port: int,
    bind_host: str | None,
    listen_fd: int | None,
    where: str,
    backend: str,
    timeout: float | None,
    *,
    shared: bool,
) -> _SharedServer:
    listener = (
        _listen(port, bind_host or os.environ.get(BIND), backend)
        if listen_fd is None
        else _take_over(listen_fd, port, backend)
    )
    with close_on_fork(listener):
        address = str(listener.getsockname()[0])
        server = _start_process(listener, backend, where != _PROCESS_ONLY, timeout) if where != "thread" else None
        return _SharedServer(
            server or _start_thread(listener, backend), backend, shared, address, given=listen_fd is not None
        )


# The socket


def _listen(port: int, bind_host: str | None, backend: str) -> socket.socket:
    tried: Tried = []
    for family, address in [resolve(bind_host, port)] if bind_host else _everywhere(port):
        try:
            return listen_at(family, address)
        except OSError as error:
            tried.append((family, f"{address[0]!s}", error))
    raise refusals(backend).no_address(port, tried)


def _everywhere(port: int) -> list[tuple[int, Address]]:
    """As PyTorch's servers: on both families, or on IPv4 where that fails, whatever the reason."""
    return [(socket.AF_INET6, ("::", port)), (socket.AF_INET, ("0.0.0.0", port))]


def _take_over(fd: int, port: int, backend: str) -> socket.socket:
    """The socket `fd`, listening. Once it turns out to be one it is ours to close, whatever else is wrong."""
    words = refusals(backend)
    try:
        listener = socket.socket(fileno=fd)
    except OSError as error:
        raise words.no_socket(fd, error) from None
    except ValueError:  # it is negative
        raise words.no_socket(fd, OSError(errno.EBADF, "no descriptor")) from None
    try:
        _listen_on(listener, port, words)
    except BaseException:
        listener.close()
        raise
    return listener


def _listen_on(listener: socket.socket, port: int, words: Uv) -> None:
    fd = listener.fileno()
    bound = listener.getsockname()[1] if listener.family in (socket.AF_INET, socket.AF_INET6) else 0
    words.check_kind(listener)
    if port != bound and not (port == 0 and words.takes_port_0):
        raise words.other_port(fd, bound, port)
    try:
        prepare(listener)
    except OSError as error:
        raise words.not_listening(fd, error) from None


# Where it runs


def _start_process(listener: socket.socket, backend: str, may_be_thread: bool, timeout: float | None) -> Server | None:
    """A server in a process of its own; None, after one warning, if there can be no such process.

    Raises DistNetworkError if the caller's time is up: there is none for a thread either.
    """
    if sys.platform == "win32":
        if not may_be_thread:
            raise RuntimeError(f"{_NO_THREAD}, and Windows has no other")
        return None
    from .process import parent  # for hosts only: it costs the clients nothing

    try:
        return parent.start(listener, backend=backend, timeout=timeout)
    except parent.StartTimeout as error:
        port = listener.getsockname()[1]
        raise DistNetworkError(
            f"the server process of port {port} did not start: {error}; give the store a longer timeout, or find out "
            "why Python takes so long to start here"
        ) from None
    except parent.StartError as error:
        if not may_be_thread:
            raise RuntimeError(f"{_NO_THREAD}, and cannot be a process either: {error}") from None
        _warn(error)
        return None


def _start_thread(listener: socket.socket, backend: str) -> Server:
    from .in_process import ServerThread

    return ServerThread(listener.dup(), backend)


_warned = False


def _warn(error: Exception) -> None:
    global _warned
    if _warned:
        log.warning("the server runs in a thread of this process: %s", error)
        return
    _warned = True
    warnings.warn(
        f"The store's server cannot have a process of its own ({error}), so it runs in a thread of this one: whenever "
        f"Python code is busy here every answer waits for it, 5 ms and more. {WHERE}=thread asks for it and is silent.",
        RuntimeWarning,
        stacklevel=5,
    )


def _forget_inherited() -> None:
    """In a forked child: it may host servers, but has none."""
    global _shared_lock
    _shared_lock = threading.RLock()
    _shared.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_inherited)
