"""Assemble a relay on a running loop, and run one in a process of its own.

Knows the parts of a relay, and what identifies this one. Must not know the command line.
Invariant: when `relay` or `run` ends, in whatever way, the port is free and nothing is left behind.
"""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, closing
from functools import partial
from typing import Final

from ..auth.secret_files import TlsFiles
from ..base.addresses import format_address, is_loopback
from ..base.errors import AccessDeniedError, DistNetworkError, counted
from ..client.credentials import find_token
from ..client.store_name import StoreName, address_of, this_network
from ..client.tls import checked
from ..links.link_client import ClientLink
from ..server.fork_safety import close_on_fork, closed_in_children
from ..server.listen_socket import adopt, listen, log_short_backlog, raise_file_limit
from ..server.peer_user import PeerUsers
from ..server.process.child import ignore_signals
from ..server.signals import drain_when_told, watch_signals
from ..server.systemd import activated_fd, supervised
from ..serving import tune_gc
from .core import Relay
from .describing import describer
from .entering import Entry
from .examining import Examiner
from .upstream import Upstream

log = logging.getLogger("tcpstore_async.server")

_CANCEL_SECONDS: Final = 0.05
"""Time between two attempts to cancel a task."""

_FIRST_SECONDS: Final = 5.0
"""Time for the first attempt to reach the server, after which the relay reports that it is ready in any case."""

_NOTHING_TO_RELOAD: Final = (
    "SIGHUP: the relay has nothing to reload, because it rereads its files each time it connects to its server; "
    "it keeps running"
)


@asynccontextmanager
async def relay(
    servers: list[tuple[str, int]],
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    listener: socket.socket | None = None,
    same_user: bool = False,
    token: Callable[[], bytes] = find_token,
    tls: TlsFiles | None = None,
    store: StoreName | None = None,
) -> AsyncIterator[Relay]:
    """Run a relay on the running loop while the context lasts; `.port` is its port.

    `servers`, hosts and ports, are tried in order. `listener`, a listening TCP socket, replaces `host` and `port`; it
    is closed at the end. `same_user` rejects connections of other users' processes, and of other hosts. `token` is
    called for every connection and returns the token to present, by default that of the environment. With `tls`,
    connections to the servers are encrypted. Ranks enter the `store`, if one is given. Raises DistNetworkError
    if the address is unavailable, if a file of `tls` cannot be used, or if the system does not support `same_user`.
    """
    files = None if tls is None else checked(tls)
    listening = listener if listener is not None else listen(host, port)
    with close_on_fork(listening), ExitStack() as inherited:
        where = listening.getsockname()[:2]
        if where in servers:
            raise DistNetworkError(f"{format_address(*where)} is the relay's own address, not a server's")
        users = inherited.enter_context(closing(PeerUsers())) if same_user else None
        place = f"{this_network()}/{format_address(*where)}"  # a restarted relay has the same
        running = Relay(
            listening,
            partial(ClientLink, place, _description()),
            users=users,
            describe=describer(),
            entry=None if store is None else Entry(store, address_of(*where)),
            examiner=Examiner(),
        )
        upstream = Upstream(running, servers, token, files)
        connecting: asyncio.Task[None] | None = None
        try:
            running.start()
            inherited.enter_context(closed_in_children(running))
            connecting = asyncio.get_running_loop().create_task(upstream.run())
            connecting.add_done_callback(_report)
            yield running
        finally:
            running.stop()
            upstream.close()
            while connecting is not None and not connecting.done():
                connecting.cancel()  # `asyncio.wait_for` may swallow it if an attempt fails at the same time
                await asyncio.wait([connecting], timeout=_CANCEL_SECONDS)


async def run(
    servers: list[tuple[str, int]],
    host: str,
    port: int,
    fd: int | None,
    *,
    grace: float,
    same_user: bool = False,
    owner_fd: int | None = None,
    token: Callable[[], bytes] = find_token,
    tls: TlsFiles | None = None,
    store: StoreName | None = None,
    ready: Callable[[Relay], None],
) -> None:
    """Relay until SIGTERM, after which ranks get up to `grace` seconds to leave, or SIGINT. For a process of its own.

    With `owner_fd`, a pipe or socket whose other end the starting process holds, signals are ignored, and the relay
    ends when the other end is closed. `same_user`, `token`, `tls` and `store` are as for `relay`. `ready` is called
    once connections are accepted. A socket passed by systemd replaces the address. Raises DistNetworkError if the
    address or the socket `fd` is unavailable, or the system does not support `same_user`, and AccessDeniedError if, at
    the first attempt, the server refuses the relay's token, or one end does not accept the other's TLS.
    """
    if owner_fd is None:
        signals = watch_signals()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, log.info, _NOTHING_TO_RELOAD)
    else:
        signals = _watch_owner(owner_fd)
    raise_file_limit()
    fd = activated_fd() if fd is None and owner_fd is None else fd
    listener = listen(host, port) if fd is None else adopt(fd)
    log_short_backlog()
    if owner_fd is None:
        _warn_if_exposed(listener, same_user)
    async with relay(servers, listener=listener, same_user=same_user, token=token, tls=tls, store=store) as running:
        tune_gc()
        await _first_attempt(running, signals)
        ready(running)
        if owner_fd is not None:  # a service manager would be the owner's
            await drain_when_told(signals, _drain(running, grace), lambda: None)
            return
        where = format_address(running.host, running.port)
        async with supervised(lambda: f"listening on {where}, {counted(running.count, 'rank')}") as manager:
            await drain_when_told(signals, _drain(running, grace), manager.stopping)


async def _first_attempt(running: Relay, signals: "asyncio.Queue[signal.Signals]") -> None:
    """Wait briefly, or until a signal, for the first attempt to reach the server. Raises AccessDeniedError.

    An unreachable server may start later, but a refused token, or a certificate that one end does not accept, is a
    mistake that the user must correct.
    """
    trying = asyncio.ensure_future(running.tried.wait())
    told = asyncio.ensure_future(signals.get())
    await asyncio.wait([trying, told], timeout=_FIRST_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    trying.cancel()
    if told.done():
        signals.put_nowait(told.result())
    told.cancel()
    if running.refusal:
        raise AccessDeniedError(f"cannot connect to {running.refusal}", final=True)


def _warn_if_exposed(listener: socket.socket, same_user: bool) -> None:
    """Warn if the relay is reachable from other hosts."""
    host, port = listener.getsockname()[:2]
    if not same_user and not is_loopback(host):
        log.warning(
            "%s is reachable from other hosts: anyone who can reach this port can use this relay's link "
            "and its token; listen on 127.0.0.1, or start it with --same-user (docs/security.md)",
            format_address(host, port),
        )


def _watch_owner(fd: int) -> "asyncio.Queue[signal.Signals]":
    """Ignore signals; return a queue that receives SIGINT when the other end of `fd` is closed."""
    ignore_signals()
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()

    def end() -> None:
        loop.remove_reader(fd)
        signals.put_nowait(signal.SIGINT)

    loop.add_reader(fd, end)
    return signals


async def _drain(running: Relay, grace: float) -> None:
    """Stop accepting, and wait up to `grace` seconds for the ranks to leave."""
    running.stop_accepting()
    running.make_link = partial(ClientLink, "", _description())  # the place may be a successor's, whose link would end
    try:
        await asyncio.wait_for(running.empty.wait(), grace)
    except asyncio.TimeoutError:
        log.info("closing %s still open after %g s", counted(running.count, "connection"), grace)


def _report(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        log.critical("internal error: the relay has stopped trying to connect to its server", exc_info=task.exception())


def _description() -> dict[str, str]:
    return {"host": socket.gethostname()[:64], "pid": str(os.getpid()), "examines": "1"}
