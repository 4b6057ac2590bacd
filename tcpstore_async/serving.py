"""Assembling a server: on a running loop, in a process of its own, and for another process.

Knows which parts make a server. Must not know the command line.
Invariant: when `serve`, `run` or `serve_owner` ends, in whatever way, the port is free and nothing is left behind.
"""

import asyncio
import gc
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing, suppress
from typing import TYPE_CHECKING, Any

from .limits import Limits
from .server.backends import DEFAULT_BACKEND, DEFAULT_GRACE, server_class
from .server.fork_safety import close_on_fork, closed_in_children
from .server.listen_socket import adopt, listen, log_short_backlog, prepare, raise_file_limit
from .server.process.child import Owner, announce_end, ignore_signals, log_to_owner
from .server.process.protocol import Event
from .session.identity import build as build

if TYPE_CHECKING:
    from .server.base import Server


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on uvloop, in any thread."""
    import uvloop  # not for those who only use `serve`, which runs on any loop

    uvloop.run(main)


@asynccontextmanager
async def serve(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    listener: socket.socket | None = None,
    limits: Limits | None = None,
    backend: str = DEFAULT_BACKEND,
) -> "AsyncIterator[Server]":
    """Run a server on the running loop for as long as the context lasts; `.port` is its port.

    It listens on exactly `host`; port 0 lets the kernel choose. `listener`, a TCP socket that is bound or listening,
    takes their place; it is closed at the end. `backend` is `uv` or `threaded`. A forked child holds nothing of the
    server. Raises DistNetworkError if the address cannot be had.
    """
    make = server_class(backend)
    pid = os.getpid()
    with close_on_fork(listener if listener is not None else listen(host, port)) as listening:
        prepare(listening)
        server = make(listening, limits or Limits())
        with closed_in_children(server):
            try:
                server.start()
                yield server
            finally:
                if os.getpid() == pid:
                    if listener is None:  # a child that was forked just now may not have closed its copy yet
                        with suppress(OSError):
                            listening.shutdown(socket.SHUT_RDWR)
                    server.stop()


async def run(
    host: str,
    port: int,
    fd: int | None,
    *,
    backend: str,
    limits: Limits,
    grace: float,
    link_grace: float,
    ready: "Callable[[Server], None]",
) -> None:
    """Serve until SIGTERM, which drains for up to `grace` seconds, or SIGINT, which does not. For a process of its own.

    The sessions of a link whose connection breaks are kept for `link_grace` seconds. `ready` is called once the server
    accepts connections. Raises DistNetworkError if the address, or the socket `fd`, cannot be had.
    """
    raise_file_limit()
    listener = listen(host, port) if fd is None else adopt(fd)
    log_short_backlog()
    signals = watch_signals()
    async with serve(listener=listener, limits=limits, backend=backend) as server:
        tune_gc()
        server.links.grace = link_grace
        ready(server)
        await drain_when_told(signals, server.drain(grace))


def watch_signals() -> "asyncio.Queue[signal.Signals]":
    """Return a queue that gets every SIGTERM and SIGINT from now on."""
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    return signals


async def drain_when_told(signals: "asyncio.Queue[signal.Signals]", drain: Coroutine[Any, Any, None]) -> None:
    """Wait for a signal; after SIGTERM, for the end of `drain` or for another signal."""
    if await signals.get() is not signal.SIGTERM:
        drain.close()
        return
    draining = asyncio.ensure_future(drain)
    stopping = asyncio.ensure_future(signals.get())
    await asyncio.wait([draining, stopping], return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, stopping):
        task.cancel()


def tune_gc() -> None:
    """Collect garbage rarely, in a process that is a server: nothing it makes for a connection is left in a cycle.

    With the defaults, collections that find nothing cost 4 % of a job's start, and more with more ranks. The youngest
    generation is still collected often enough that no collection takes 30 ms: a WAIT for 131,072 keys makes a dict for
    each.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 500, 100)


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
) -> None:
    """Be the server process of `owner_pid`, on the socket `listen_fd`, until that process stops it or ends.

    That process is the parent, unless `pidfd` is a descriptor of it, or -1. `control_fd` is a socket for commands and
    events, and `log_fd`, if given, one for the log; see `server/process/protocol.py`. Raises what keeps the server from
    starting, after it has been reported.
    """
    ignore_signals()
    if log_fd is not None:
        log_to_owner(log_fd)
    run_loop(_serve_owner(listen_fd, owner_pid, control_fd, pidfd, backend, limits, grace))
    if log_fd is not None:
        announce_end(log_fd)


async def _serve_owner(
    listen_fd: int,
    owner_pid: int,
    control_fd: int,
    pidfd: int | None,
    backend: str,
    limits: Limits | None,
    grace: float,
) -> None:
    with closing(Owner(owner_pid, control_fd, pidfd)) as owner:
        try:
            raise_file_limit()
            async with serve(listener=adopt(listen_fd), limits=limits, backend=backend) as server:
                tune_gc()
                ready = Event("ready", server.port, os.getpid(), backend, max_connections=server.max_connections)
                owner.report_ready(ready)
                await owner.follow(server, grace)
        except Exception as error:
            owner.report(Event("failed", error=str(error)))
            raise
