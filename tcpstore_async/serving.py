"""The one place where a server, its limits and, later, its observers are put together.

Knows: which parts make a server. Must not know: the command line.
Invariant: when `serve` or `run` ends, however it ends, the port is free and nothing is left behind.
"""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from typing import Final

from .limits import Limits
from .server.backends import DEFAULT_BACKEND, Server, server_of
from .server.fork_safety import close_on_fork, kept_private
from .server.listening import adopt, listen, prepare, raise_file_limit, tell_of_short_backlog
from .server.loop import run_loop as run_loop
from .server.loop import tune_gc as tune_gc
from .server.process.child import Owner, ignore_signals, say_over, speak_to_owner
from .server.process.protocol import Event
from .session.identity import build as build

DEFAULT_GRACE: Final = 10.0
"""Seconds that connections get to end after SIGTERM."""


@asynccontextmanager
async def serve(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    listener: socket.socket | None = None,
    limits: Limits | None = None,
    backend: str = DEFAULT_BACKEND,
) -> AsyncIterator[Server]:
    """A server on the running loop, for as long as the context lasts; `.port` tells where.

    It listens on exactly `host`; port 0 lets the kernel choose. A TCP socket that is bound, or listens already, may be
    given as `listener` instead; it is closed at the end. `backend` is `uv` or `threaded`. A forked child has nothing of
    the server. Raises DistNetworkError if the address cannot be had.
    """
    make = server_of(backend)
    pid = os.getpid()
    with close_on_fork(listener if listener is not None else listen(host, port)) as listening:
        prepare(listening)
        server = make(listening, limits or Limits())
        with kept_private(server):
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
    ready: Callable[[Server], None],
) -> None:
    """Serve until SIGTERM, which drains, or SIGINT, which does not. For a process that is the server.

    Raises DistNetworkError if the address, or the socket `fd`, cannot be had.
    """
    raise_file_limit()
    listener = listen(host, port) if fd is None else adopt(fd)
    tell_of_short_backlog()
    loop = asyncio.get_running_loop()
    asked: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.put_nowait, number)
    async with serve(listener=listener, limits=limits, backend=backend) as server:
        tune_gc()
        ready(server)
        if await asked.get() is signal.SIGTERM:
            draining = asyncio.ensure_future(server.drain(grace))
            stopping = asyncio.ensure_future(asked.get())
            await asyncio.wait([draining, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in (draining, stopping):
                task.cancel()


def run_owned(
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
    """Be the server of the process `owner_pid`, on the socket `listen_fd`, until it says stop or ends.

    That process is the parent, unless `pidfd` is a descriptor of it, or -1. Reports to it over the socket `control_fd`
    and, if `log_fd` is given, sends it the log; see `server/process/protocol.py`. Raises what it has reported as a
    failure.
    """
    ignore_signals()
    if log_fd is not None:
        speak_to_owner(log_fd)
    run_loop(_serve_owner(listen_fd, owner_pid, control_fd, pidfd, backend, limits, grace))
    if log_fd is not None:
        say_over(log_fd)


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
                room = server.max_connections
                owner.tell_ready(Event("ready", server.port, os.getpid(), backend, room=room))
                await owner.follow(server, grace)
        except Exception as error:
            owner.tell(Event("failed", error=str(error)))
            raise
