"""Assemble a server: on a running loop, in a process of its own, and for another process.

Knows the parts of a server. Must not know the command line.
Invariant: when `serve`, `run` or `serve_owner` ends, in whatever way, the port is free and nothing is left behind.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from .auth.tokens import HostTokens, SharedTokens, TokenFiles
from .base.addresses import format_address
from .base.errors import DistNetworkError, counted
from .base.limits import DEFAULT_GRACE, LINK_GRACE, Limits
from .log.encoding import JournalError
from .log.journal import Journal
from .server.admin import admin_socket
from .server.backends import DEFAULT_BACKEND, check_backend, make_server
from .server.fork_safety import close_on_fork, closed_in_children
from .server.handover import pass_on
from .server.linger import Linger
from .server.listen_socket import (
    DEFER_ACCEPT,
    adopt,
    listen,
    log_short_backlog,
    prepare,
    raise_file_limit,
    warn_if_exposed,
)
from .server.process.child import STDERR, Owner, announce_end, ignore_signals, log_to_owner, read_tokens
from .server.process.protocol import Event
from .server.reloading import Reloading
from .server.signals import drain_when_told, watch_signals
from .server.store_ports import ANY
from .server.systemd import activated_fd, supervised
from .session.auth import ALL, REMOTE
from .session.identity import build as build

if TYPE_CHECKING:
    from .server.base import Server
    from .server.etcd_options import EtcdOptions
    from .server.http_process import HttpOptions
    from .server.tls import ServerTls
    from .server.uv import UvServer

_AnyServer = TypeVar("_AnyServer", bound="Server")

log = logging.getLogger("tcpstore_async.server")

PROCESS: Final = "process"
"""Stores survive the end of the server's process."""

ALWAYS: Final = "always"
"""They survive the machine: nothing leaves before it is on the disk."""

SYNCS: Final = (PROCESS, ALWAYS)


class JournalLost(JournalError):
    """A journal can no longer be written."""


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on uvloop, in any thread."""
    import uvloop  # not needed by users of `serve`, which runs on any loop

    uvloop.run(main)


@asynccontextmanager
async def serve(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    listener: socket.socket | None = None,
    limits: Limits | None = None,
    backend: str = DEFAULT_BACKEND,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    tls_ca: str | None = None,
    require_tls: bool = False,
    tokens: TokenFiles | SharedTokens | None = None,
    require_auth: str = "",
    admin: str | None = "",
    store_ports: range = ANY,
    link_grace: float = LINK_GRACE,
    persist: str | os.PathLike[str] | None = None,
    sync: str = PROCESS,
) -> "AsyncIterator[Server]":
    """Run a server on the running loop while the context lasts; `.port` is its port.

    It listens on exactly `host`; port 0 lets the kernel choose. `listener`, a bound or listening TCP socket, replaces
    both; it is closed at the end. Where the system can, it holds connections to `port` until their peers have sent
    something, or for a second. `backend` is `uv` or `threaded`. A forked child holds nothing of the server.

    With `tls_cert` and `tls_key`, files in PEM format, it serves TLS 1.3 beside plain connections; with `tls_ca`, peers
    that use TLS must have a certificate of one of these CAs. `.tls.reload()` reloads the files. `require_tls` refuses
    plain connections. `tokens` checks the tokens of clients. `require_auth` says which connections need a token or such
    a certificate: none (empty), those from other hosts (`remote`), or `all`. `admin` is the path of the admin socket:
    None for the one that `tcpstore who` finds by the port, empty for none; `.admin` is its path. `store_ports` are the
    ports for clients that cannot name their store, empty for none; they need a server without TLS and tokens.
    `link_grace` is how many seconds the sessions of a broken connection are kept.

    With `persist`, a directory, the server continues with the stores that the last server with that directory had, and
    keeps them there: until that server's process ends (`sync="process"`), or before each reply (`always`). Leaving the
    context removes them, unless that is by an exception, or `stop(for_good=False)` was called before.

    Raises DistNetworkError if the address or the admin socket is unavailable, or a file cannot be used, JournalError
    for a directory that cannot be used, and ValueError for a certificate without a key or the reverse, if TLS is
    required without them, for a backend that lacks TLS, tokens or journals, and for an unknown `require_auth` or
    `sync`.
    """
    if sync not in SYNCS:
        raise ValueError(f"sync must be {' or '.join(map(repr, SYNCS))}, not {sync!r}")
    if require_auth not in ("", REMOTE, ALL):
        raise ValueError(f"require_auth must be empty, {REMOTE!r} or {ALL!r}, not {require_auth!r}")
    has_tls, has_tokens = bool(tls_cert or tls_key or tls_ca or require_tls), bool(tokens or require_auth)
    check_backend(backend, has_tls, has_tokens, persist is not None)
    tls = _server_tls(tls_cert, tls_key, tls_ca, require_tls)
    pid = os.getpid()
    limits = limits or Limits()
    with (
        _journal(persist, sync, limits, link_grace, tokens is not None, require_auth) as journal,
        close_on_fork(listener if listener is not None else listen(host, port, DEFER_ACCEPT)) as listening,
    ):
        prepare(listening)
        instance = "" if journal is None else journal.instance
        server = _configured(
            make_server(backend, listening, limits, tls, instance), tokens, require_auth, store_ports, link_grace
        )
        if journal is not None:
            try:
                server.persist(journal)
            except OSError as error:
                raise JournalLost(f"cannot write the journal in {persist}: {error.strerror}") from None
            if isinstance(tokens, TokenFiles):
                server.close_invalid(tokens.reload())
        with closed_in_children(server):
            try:
                server.start()
                async with admin_socket(server, admin):
                    yield server
            except BaseException:
                if os.getpid() == pid and server.persistence is not None:
                    server.stop(for_good=False)  # nobody has asked for the end of its stores
                raise
            finally:
                if os.getpid() == pid:
                    await server.dismiss()
                    if listener is None:  # frees the port even if a child forked just now still has a copy
                        with suppress(OSError):
                            listening.shutdown(socket.SHUT_RDWR)
                    server.stop()


def _configured(
    server: "_AnyServer",
    tokens: TokenFiles | SharedTokens | None,
    require_auth: str,
    store_ports: range,
    link_grace: float,
) -> "_AnyServer":
    server.store.hub.auth.authenticate = None if tokens is None else tokens.authenticate
    server.store.hub.auth.require_auth = require_auth
    server.ports.numbers = store_ports
    server.links.grace = link_grace
    return server


async def run(
    host: str,
    port: int,
    fd: int | None,
    *,
    backend: str,
    limits: Limits,
    grace: float,
    link_grace: float,
    defer_accept: int = DEFER_ACCEPT,
    admin: str | None = None,
    http: "HttpOptions | None" = None,
    ready: "Callable[..., None]",
    tokens: TokenFiles | None = None,
    require_auth: str = "",
    linger: float | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    tls_ca: str | None = None,
    require_tls: bool = False,
    store_ports: range = ANY,
    persist: Path | None = None,
    sync: str = PROCESS,
    etcd: "EtcdOptions | None" = None,
) -> None:
    """Serve until SIGTERM, which drains for up to `grace` seconds, or SIGINT, which does not. For a process of its own.

    With `persist`, SIGTERM means that another server will continue with that directory: nothing is drained. With
    `etcd`, the server stands by while another one serves, and SIGTERM lets another one serve. The
    sessions of a link whose connection breaks are kept for `link_grace` seconds. For `defer_accept`, which does not
    apply to a given socket, see `wait_for_data`. `admin` is the path of the admin socket: None for the usual one, empty
    for none. `http` starts a process that shows the server's state over HTTP. `ready` is called once the server accepts
    connections. With `linger`, the server also ends when it has been used and then had no client for `linger` seconds.
    For the other arguments see `serve`. SIGHUP reloads token and certificate files. A socket passed by systemd replaces
    the address. Raises DistNetworkError if the address, the socket `fd` or the admin socket is unavailable,
    JournalError for a directory that cannot be used, and JournalLost if it fails.
    """
    raise_file_limit()
    fd = activated_fd() if fd is None else fd
    listener = listen(host, port, defer_accept) if fd is None else adopt(fd)
    log_short_backlog()
    warn_if_exposed(
        listener,
        has_tls=tls_cert is not None,
        has_ca=tls_ca is not None,
        has_tokens=tokens is not None,
        requires_auth=bool(require_auth),
        requires_tls=require_tls,
    )
    signals = watch_signals()
    if etcd is not None:
        chosen = limits, link_grace, tokens is not None, require_auth
        tls = _server_tls(tls_cert, tls_key, tls_ca, require_tls)

        def make(instance: str) -> "UvServer":
            from .server.uv import UvServer

            server = UvServer(listener.dup(), limits, tls=tls, instance=instance)
            return _configured(server, tokens, require_auth, store_ports, link_grace)

        with closing(close_on_fork(listener)):
            prepare(listener)
            await _replicate(etcd, _settings(*chosen), listener, make, signals, admin, http, ready, tokens, linger)
        return
    async with (
        AsyncExitStack() as successor,
        serve(
            listener=listener,
            limits=limits,
            backend=backend,
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_ca=tls_ca,
            require_tls=require_tls,
            tokens=tokens,
            require_auth=require_auth,
            admin=admin,
            store_ports=store_ports,
            link_grace=link_grace,
            persist=persist,
            sync=sync,
        ) as server,
        _http_process(server, http),
    ):
        tune_gc()
        failed: list[OSError] = []

        def stop(error: OSError | None) -> None:
            if error is not None:
                failed.append(error)
            signals.put_nowait(signal.SIGINT)

        def replaced(path: str) -> None:
            try:
                successor.enter_context(pass_on(path, listener))
            except OSError as error:
                log.warning("cannot let another server take over at %s: %s", path, error.strerror)
                return
            log.info("another server takes over: ending")
            signals.put_nowait(signal.SIGTERM)

        server.on_end = stop
        if persist is not None:
            server.on_replace = replaced
        reloading = Reloading(server, tokens)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloading.reload, "SIGHUP")
        ready(server)
        where = format_address(server.host, server.port)
        async with supervised(lambda: f"listening on {where}, {counted(_clients(server), 'client')}") as manager:
            ending = None if linger is None else asyncio.ensure_future(_end_when_unused(server, linger, signals))
            try:
                end = server.drain(grace) if persist is None else _leave(server)
                await drain_when_told(signals, end, manager.stopping)
            finally:
                if ending is not None:
                    ending.cancel()
        if failed:
            server.stop(for_good=False)
            raise JournalLost(f"cannot write the journal in {persist}: {failed[0].strerror}")


async def _replicate(
    options: "EtcdOptions",
    settings: dict[str, str],
    listener: socket.socket,
    make: "Callable[[str], UvServer]",
    signals: "asyncio.Queue[signal.Signals]",
    admin: str | None,
    http: "HttpOptions | None",
    ready: "Callable[..., None]",
    tokens: TokenFiles | None,
    linger: float | None,
) -> None:
    """Stand by, and serve, until a signal. See `run`."""
    from .server.replica import Replica

    tune_gc()
    page = AsyncExitStack()

    async def accepting(server: "UvServer", role: str) -> None:
        server.on_end = lambda error: signals.put_nowait(signal.SIGINT)
        if http is not None and not paged:
            paged.append(http)
            await page.enter_async_context(_http_process(server, http))
        ready(server, role=role)

    paged: list[HttpOptions] = []
    with closing(options.log(listener)) as etcd:
        replica = Replica(etcd, settings, make, lambda server: admin_socket(server, admin), accepting)

        def reload() -> None:
            if replica.server is not None:
                Reloading(replica.server, tokens).reload("SIGHUP")

        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
        told = asyncio.ensure_future(signals.get())
        async with page, supervised(replica.status):
            while not told.done():
                serving = AsyncExitStack()
                entering = asyncio.ensure_future(serving.enter_async_context(replica.serving()))
                await asyncio.wait([told, entering], return_when=asyncio.FIRST_COMPLETED)
                if not entering.done():
                    entering.cancel()
                    with suppress(asyncio.CancelledError):
                        await entering
                    return
                async with serving:
                    server = await entering
                    if isinstance(tokens, TokenFiles):
                        server.close_invalid(tokens.reload())
                    unused = (
                        None if linger is None else asyncio.ensure_future(_end_when_unused(server, linger, signals))
                    )
                    over = asyncio.ensure_future(replica.over.wait())
                    await asyncio.wait([told, over], return_when=asyncio.FIRST_COMPLETED)
                    over.cancel()
                    if unused is not None:
                        unused.cancel()
                    if told.done() and told.result() is signal.SIGINT:
                        await server.dismiss()
                        server.stop()


async def _leave(server: "Server") -> None:
    """Stop a server whose stores another one will continue."""
    server.stop(for_good=False)


def _http_process(server: "Server", options: "HttpOptions | None") -> AbstractAsyncContextManager[None]:
    if options is None:
        return nullcontext()
    if not server.admin:
        raise DistNetworkError("cannot serve the status page over HTTP: the server has no admin socket")
    from .server.http_process import http_process  # most servers do not need it

    return http_process(server.admin, options)


def _clients(server: "Server") -> int:
    with server.turn:
        return server.links.clients(server.count)


async def _end_when_unused(server: "Server", seconds: float, signals: "asyncio.Queue[signal.Signals]") -> None:
    """Drain the server, as SIGTERM does, `seconds` after the last client has left."""
    linger = Linger(seconds)
    while not linger.is_over(time.monotonic(), _clients(server), _has_been_used(server)):
        await asyncio.sleep(linger.poll_seconds())
    log.info("exiting: the last client left %g s ago", seconds)
    signals.put_nowait(signal.SIGTERM if server.persistence is None else signal.SIGINT)


def _has_been_used(server: "Server") -> bool:
    keyspace = server.store.keyspace
    return keyspace.changes > 0 or len(keyspace.rounds) > 0 or server.named.created > 0


@contextmanager
def _journal(
    persist: "str | os.PathLike[str] | None", sync: str, limits: Limits, grace: float, tokens: bool, require_auth: str
) -> Iterator[Journal | None]:
    """The journal in a directory."""
    if persist is None:
        yield None
        return
    journal = Journal(Path(persist), sync == ALWAYS, _settings(limits, grace, tokens, require_auth))
    if journal.outdated:
        log.warning(
            "%s is from before this machine was started, and was kept for its server's process only (--sync process): "
            "beginning with empty stores",
            persist,
        )
    with closing(journal):
        yield journal


def _settings(limits: Limits, grace: float, tokens: bool, require_auth: str) -> dict[str, str]:
    """Return what the effects of events depend on: servers with one log must have the same."""
    settings = {field.name: str(getattr(limits, field.name)) for field in fields(limits)}
    return settings | {"link-grace": f"{grace:g}", "tokens": str(tokens), "require-auth": require_auth}


def _server_tls(cert: str | None, key: str | None, ca: str | None, required: bool = False) -> "ServerTls | None":
    if not cert and not key and not ca and not required:
        return None
    if not cert or not key:
        raise ValueError("TLS needs a certificate and its key: give both tls_cert and tls_key")
    from .auth.secret_files import TlsFiles
    from .server.tls import ServerTls

    return ServerTls(TlsFiles(ca or "", cert, key), required)


def tune_gc() -> None:
    """Collect garbage rarely, in a server process: connections leave no cycles behind.

    With the defaults, collections that find nothing cost 4 % of a job's start, and more with more ranks. The youngest
    generation is collected often enough that no collection takes 30 ms: a WAIT for 131,072 keys makes a dict for each.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 500, 100)


def child_main(
    listen_fd: int, owner_pid: int, pidfd: int, control_fd: int, backend: str, grace: float, *tls: str
) -> None:
    """Be the server process that `server/process/parent.py` has started; return when it should exit.

    `tls` are the fields of `TlsFiles`, empty if there are none. Its tokens, if it has any, are a line of its standard
    input.
    """
    serve_owner(
        listen_fd,
        owner_pid,
        control_fd,
        pidfd=pidfd,
        log_fd=STDERR,
        backend=backend,
        grace=grace,
        tls=tls,
        tokens=read_tokens(),
    )


def serve_owner(
    listen_fd: int,
    owner_pid: int,
    control_fd: int,
    *,
    pidfd: int | None = None,
    log_fd: int | None = None,
    backend: str = DEFAULT_BACKEND,
    limits: Limits | None = None,
    grace: float = DEFAULT_GRACE,
    tls: tuple[str, ...] = ("", "", ""),
    tokens: HostTokens | None = None,
) -> None:
    """Be the server process of `owner_pid`, on the socket `listen_fd`, until that process stops it or ends.

    `pidfd` is as for `Owner`. `control_fd` is a socket for commands and events, and `log_fd`, if given, one for the
    log; see `server/process/protocol.py`. `tls` are the fields of `TlsFiles`, and `tokens` says who is admitted. Raises
    what keeps the server from starting, after reporting it to the owner.
    """
    ca, cert, key = tls

    async def serve_until_told() -> None:
        with closing(Owner(owner_pid, control_fd, pidfd)) as owner:
            try:
                raise_file_limit()
                checker = None if tokens is None else tokens.checker()
                async with serve(
                    listener=adopt(listen_fd),
                    limits=limits,
                    backend=backend,
                    tls_cert=cert,
                    tls_key=key,
                    tls_ca=ca,
                    tokens=checker,
                    require_auth="" if tokens is None else tokens.require_auth,
                    admin=None,
                ) as server:
                    tune_gc()
                    ready = Event("ready", server.port, os.getpid(), backend, max_connections=server.max_connections)
                    with Reloading(server, checker).watching():
                        owner.report_ready(ready)
                        await owner.follow(server, grace)
            except Exception as error:
                owner.report(Event("failed", error=str(error)))
                raise

    ignore_signals()
    if log_fd is not None:
        log_to_owner(log_fd)
    run_loop(serve_until_told())
    if log_fd is not None:
        announce_end(log_fd)
