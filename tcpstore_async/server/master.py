"""The server of a master: its own, or one shared with other stores of this process.

Knows which address a master listens on, which stores share a server, and where servers run. Must not know the protocol,
or clients.
Invariants: the port is free once the last handle of a server is released. A forked child holds no server of its parent.
"""

import errno
import logging
import os
import resource
import socket
import time
import warnings
import weakref
from typing import Final, NamedTuple, Protocol

from ..auth.secret_files import TlsFiles
from ..auth.tokens import HostTokens
from ..base.addresses import EVERYWHERE
from ..base.errors import AccessDeniedError, DistNetworkError, DistStoreError, counted
from ..base.locks import RLock
from .backends import DEFAULT_BACKEND, START_TIMEOUT, check_backend
from .bind_errors import Tried, UvErrors, errors_of
from .fork_safety import close_on_fork
from .listen_socket import Address, check_port, listen_at, log_short_backlog, prepare, resolve, wait_for_data
from .tls import ServerTls, make_context

WHERE: Final = "TCPSTORE_SERVER"
BIND: Final = "TCPSTORE_BIND"

log = logging.getLogger("tcpstore_async.server")


class RunningServer(Protocol):
    """A server started for a master: a `ServerProcess` or a `ServerThread`."""

    port: int
    pid: int
    """Process that it runs in."""
    max_connections: int

    def announce(self, joins: int) -> None: ...

    def complete(self) -> None: ...

    def alive(self) -> bool: ...

    def crash(self) -> str: ...

    def stop(self) -> None: ...


class _CountedServer:
    """A running server and the number of its handles."""

    def __init__(self, server: RunningServer, listening: "_Listening", shared: bool, address: str) -> None:
        self.server = server
        self.listening = listening
        self.address = address
        """Host that it listens on."""
        self.shared = shared
        self.handles = 0
        self.owner = os.getpid()
        self.lock = _shared_lock if shared else RLock()
        _running.add(server.pid)

    def release(self) -> None:
        if self.owner != os.getpid():
            return
        with self.lock:
            self.handles -= 1
            if self.handles:
                return
            if _shared.get(self.server.port) is self:
                del _shared[self.server.port]
            _running.discard(self.server.pid)
            self.server.stop()


class NoServerError(RuntimeError):
    """No process could be started, and a thread will not do."""


class LateServerError(DistNetworkError):
    """A process was started, but the server was not ready in time. A given socket is closed."""


_NO_THREAD: Final = "this store's server cannot run in a thread of this process"

_shared: Final[dict[int, _CountedServer]] = {}
"""Servers started with `multi_tenant`, by port."""

_running: Final[set[int]] = set()
"""Process ids of this process's servers; its own for servers in threads."""

_shared_lock = RLock()
"""Held while a shared server starts or stops, so that other threads wait for the outcome. Reentrant: a garbage
collection meanwhile may release a handle."""


class ServerHandle:
    """A share in a server. Released by `release`, by garbage collection, and when the interpreter exits."""

    def __init__(self, counted: _CountedServer) -> None:
        counted.handles += 1
        self.port = counted.server.port
        self.pid = counted.server.pid
        """Process that the server runs in."""
        self.backend = counted.listening.backend
        self.shared = counted.shared
        """Whether other stores of this process may share the server."""
        self._counted = counted
        self._release = weakref.finalize(self, counted.release)

    def announce(self, joins: int, connections: int = 0) -> None:
        """Expect `joins` more ranks to join. Raises DistStoreError if the server cannot hold their `connections`.

        `connections` is how many they need at once; 0 means one each.
        """
        text = self.check_capacity(joins, connections)
        if text:
            raise DistStoreError(text)
        self._counted.server.announce(joins)

    def check_capacity(self, joins: int, connections: int = 0) -> str:
        """Log what prevents or slows that many connections; return what prevents them, or "" if all fit.

        A store that does not wait for its workers only logs this: they may be fewer, or not all connected at once.
        """
        server = self._counted.server
        if max(joins, connections) > server.max_connections:
            text = _too_many(joins, max(joins, connections), server)
            log.error("%s", text)
            return text
        log_short_backlog(joins)
        return ""

    def complete(self) -> None:
        """Report that all ranks have joined: later connections belong to the next round."""
        self._counted.server.complete()

    def crash(self) -> str:
        """Return how the server process crashed, as a sentence, or "" if it has not."""
        return self._counted.server.crash()

    def release(self) -> None:
        """Give up the share. The last one stops the server, whose port is free on return.

        Idempotent. Does nothing in a forked child.
        """
        if self._counted.owner != os.getpid():
            return
        with self._counted.lock:  # a second thread waits for the first
            self._release()


def host(
    port: int,
    *,
    bind_host: str | None = None,
    listen_fd: int | None = None,
    multi_tenant: bool = False,
    backend: str = DEFAULT_BACKEND,
    may_be_thread: bool = True,
    timeout: float | None = None,
    tls: TlsFiles | None = None,
    tokens: HostTokens | None = None,
) -> ServerHandle:
    """Start a server on `port`, or share one; port 0 lets the kernel choose. It serves on return.

    It listens on `bind_host`, or the address in TCPSTORE_BIND, or every address of this machine; or on the socket
    `listen_fd`, of which it takes ownership. With `multi_tenant`, stores of this process share the server of a port. It
    runs in a process of its own, or in a thread of this process if TCPSTORE_SERVER says so or no process can be
    started, and `may_be_thread` allows it. With `tls` it serves TLS beside plain connections. `tokens` says which
    clients are admitted: all without it.

    `timeout`, in seconds, limits how long this takes: None is no limit, and 0 waits for the started server, but for
    nothing else. Raises DistNetworkError if the address is unavailable or the server is not ready in time,
    DistStoreError if `listen_fd` has another port or the file of token keys cannot be used, and RuntimeError if the
    server could only run in a thread and must not; `listen_fd` is the caller's again then.
    """
    check_backend(backend, tls is not None, tokens is not None)
    in_thread = _runs_in_thread()
    if in_thread and not may_be_thread:
        raise NoServerError(f"{_NO_THREAD}: unset {WHERE}")
    check_port(port)
    if tls is not None:
        tls = TlsFiles(*[path and os.path.abspath(path) for path in tls])
        make_context(tls)  # raise here what would otherwise fail in the server process
    if tokens is not None:
        check_host_tokens(tokens)
    listening = _Listening(port, bind_host or os.environ.get(BIND), listen_fd, backend, tls, tokens)
    if not multi_tenant:
        return ServerHandle(_start(listening, in_thread, may_be_thread, timeout, shared=False))
    began, lock = time.monotonic(), _shared_lock
    if not lock.acquire(timeout=-1 if timeout is None else timeout or START_TIMEOUT):
        raise DistNetworkError(
            f"timed out after {timeout or START_TIMEOUT:g} s: another store in this process is starting or stopping a "
            "shared server"
        )
    try:
        counted = _shared.get(port)
        if counted is None or not counted.server.alive():
            left = timeout and max(1e-3, began + timeout - time.monotonic())
            counted = _start(listening, in_thread, may_be_thread, left, shared=True)
            _shared[counted.server.port] = counted
        elif listen_fd is not None:
            listening.open().close()  # raises if it is no socket for this port
        else:
            _check_address(counted, listening.bind_host)
        if tls != counted.listening.tls:
            raise DistNetworkError(
                f"cannot share the server on port {counted.server.port}: it was not started with the certificate that "
                "this store asks for; use another port"
            )
        if tokens != counted.listening.tokens:
            raise DistNetworkError(
                f"cannot share the server on port {counted.server.port}: its token or token keys differ from those of "
                "this store; use another port"
            )
        if not may_be_thread and counted.server.pid == os.getpid():
            raise NoServerError(f"{_NO_THREAD}, but another store has already started it in a thread")
        return ServerHandle(counted)
    finally:
        lock.release()


def check_host_tokens(tokens: HostTokens) -> None:
    """Raise AccessDeniedError if the file of token keys cannot be used."""
    try:
        tokens.checker()
    except OSError as error:
        raise AccessDeniedError(f"cannot read the token keys {tokens.keys}: {error.strerror}") from None
    except ValueError as error:
        raise AccessDeniedError(str(error)) from None


def _runs_in_thread() -> bool:
    """Return whether servers are to run in threads. Raises ValueError for a bad TCPSTORE_SERVER."""
    where = os.environ.get(WHERE) or "process"
    if where not in ("process", "thread"):
        raise ValueError(f"{WHERE} must be process or thread, not {where!r}")
    return where == "thread"


def _too_many(joins: int, connections: int, server: RunningServer) -> str:
    is_thread = server.pid == os.getpid()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0 if is_thread else 1]
    more = "" if connections == joins else f", which need {connections} connections at once as they join"
    return (
        f"the server on port {server.port} cannot accept {joins} ranks{more}: the limit on open files "
        f"(ulimit -{'S' if is_thread else 'H'}n: {limit}) allows only {counted(server.max_connections, 'connection')}; "
        f"start rank 0 with a limit of at least {connections + limit - server.max_connections}"
    )


def _check_address(counted: _CountedServer, bind_host: str | None) -> None:
    """Raise DistNetworkError if a store asks for a different address than that of the server it would share."""
    if bind_host is None and counted.listening.fd is not None:
        return
    wanted = str(resolve(bind_host, 0)[1][0]) if bind_host else EVERYWHERE[0]
    if wanted != counted.address and not (wanted in EVERYWHERE and counted.address in EVERYWHERE):
        raise DistNetworkError(
            f"cannot share the server on port {counted.server.port}: it listens on {counted.address}, but this store "
            f"asks for {wanted}; use the same bind_host (or {BIND}), or another port"
        )


# The socket


class _Listening(NamedTuple):
    """Where a server should listen, and how it should serve."""

    port: int
    bind_host: str | None
    fd: int | None
    """A socket given by the caller."""
    backend: str
    tls: TlsFiles | None
    tokens: HostTokens | None

    def open(self) -> socket.socket:
        """Return a listening socket. Raises what PyTorch's server of this backend raises."""
        return self._bind() if self.fd is None else self._adopt(self.fd)

    def _bind(self) -> socket.socket:
        tried: Tried = []
        for family, address in [resolve(self.bind_host, self.port)] if self.bind_host else _everywhere(self.port):
            try:
                return wait_for_data(listen_at(family, address))
            except OSError as error:
                tried.append((family, f"{address[0]!s}", error.with_traceback(None)))
        raise errors_of(self.backend).no_address(self.port, tried, _running)

    def _adopt(self, fd: int) -> socket.socket:
        """Listen on `fd`, and take ownership of it if it is a socket."""
        errors = errors_of(self.backend)
        try:
            listener = socket.socket(fileno=fd)
        except OSError as error:
            raise errors.no_socket(fd, error) from None
        except ValueError:  # it is negative
            raise errors.no_socket(fd, OSError(errno.EBADF, "no descriptor")) from None
        try:
            _listen_on(listener, self.port, errors)
        except BaseException:
            listener.close()
            raise
        return listener


def _everywhere(port: int) -> list[tuple[int, Address]]:
    """Return the addresses that PyTorch's servers try: both families, then IPv4 alone after any error."""
    return [(socket.AF_INET6, ("::", port)), (socket.AF_INET, ("0.0.0.0", port))]


def _listen_on(listener: socket.socket, port: int, errors: UvErrors) -> None:
    fd = listener.fileno()
    bound = listener.getsockname()[1] if listener.family in (socket.AF_INET, socket.AF_INET6) else 0
    errors.check_kind(listener)
    if port != bound and not (port == 0 and errors.takes_port_0):
        raise errors.other_port(fd, bound, port)
    try:
        prepare(listener)
    except OSError as error:
        raise errors.not_listening(fd, error) from None


# Where the server runs


def _start(
    listening: _Listening, in_thread: bool, may_be_thread: bool, timeout: float | None, *, shared: bool
) -> _CountedServer:
    with close_on_fork(listening.open()) as listener:
        address = str(listener.getsockname()[0])
        try:
            server = None if in_thread else _start_process(listener, listening, may_be_thread, timeout)
        except NoServerError:
            if listening.fd is not None:
                listener.detach()
            raise
        if server is None:
            from .in_process import ServerThread  # most masters do not need it

            tls = None if listening.tls is None else ServerTls(listening.tls)
            server = ServerThread(listener.dup(), listening.backend, tls, listening.tokens)
        return _CountedServer(server, listening, shared, address)


def _start_process(
    listener: socket.socket, listening: _Listening, may_be_thread: bool, timeout: float | None
) -> RunningServer | None:
    """Start a server process; return None, after a warning, if that fails and a thread will do.

    Raises LateServerError if it is not ready in time: there is no time left for a thread either.
    """
    from .process import parent  # only masters need it

    try:
        return parent.start(
            listener, backend=listening.backend, timeout=timeout, tls=listening.tls, tokens=listening.tokens
        )
    except parent.StartTimeout as error:
        port = listener.getsockname()[1]
        raise LateServerError(
            f"could not start the server process for port {port}: {error}; give the store a longer timeout, or find "
            "out why Python starts so slowly here"
        ) from None
    except parent.StartError as error:
        if not may_be_thread:
            raise NoServerError(f"{_NO_THREAD}, and a server process could not be started: {error}") from None
        _warn(error)
        return None


_warned = False


def _warn(error: Exception) -> None:
    global _warned
    text = (
        f"could not start the server process ({error}); falling back to a thread: replies wait for this process's "
        f"GIL, 5 ms or more while it runs Python code. Set {WHERE}=thread to silence this warning."
    )
    if _warned:
        log.warning("%s", text)
        return
    _warned = True
    warnings.warn(text, RuntimeWarning, stacklevel=5)


def _forget_inherited() -> None:
    """In a forked child: forget the servers, which are the parent's."""
    global _shared_lock
    _shared_lock = RLock()
    _shared.clear()
    _running.clear()


os.register_at_fork(after_in_child=_forget_inherited)
