"""The one place where a server, its limits and, later, its observers are put together.

Knows: which parts make a server. Must not know: the command line.
Invariant: when `serve` or `run` ends, however it ends, the port is free and nothing is left behind.
"""

import asyncio
import gc
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

from .limits import Limits
from .server.base import adopt, listen, prepare, raise_file_limit
from .server.uv import UvServer
from .session import server as _session

DEFAULT_GRACE: Final = 10.0
"""Seconds that connections get to end after SIGTERM."""


def build() -> str:
    """How the hot path of this installation runs: `compiled` or `interpreted`."""
    return "interpreted" if (_session.__file__ or "").endswith(".py") else "compiled"


@asynccontextmanager
async def serve(
    host: str = "127.0.0.1", port: int = 0, *, listener: socket.socket | None = None, limits: Limits | None = None
) -> AsyncIterator[UvServer]:
    """A server on the running loop, for as long as the context lasts; `.port` tells where.

    It listens on exactly `host`; port 0 lets the kernel choose. A TCP socket that is bound, or listens already, may be
    given as `listener` instead; it is closed at the end. Raises DistNetworkError if the address cannot be had.
    """
    with listener if listener is not None else listen(host, port) as listening:
        prepare(listening)
        server = UvServer(listening, limits or Limits())
        try:
            server.start()
            yield server
        finally:
            server.stop()


async def run(
    host: str, port: int, fd: int | None, limits: Limits, grace: float, ready: Callable[[UvServer], None]
) -> None:
    """Serve until SIGTERM, which drains, or SIGINT, which does not. For a process that is the server.

    Raises DistNetworkError if the address, or the socket `fd`, cannot be had.
    """
    raise_file_limit()
    listener = listen(host, port) if fd is None else adopt(fd)
    loop = asyncio.get_running_loop()
    asked: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.put_nowait, number)
    async with serve(listener=listener, limits=limits) as server:
        spare_the_collector()
        ready(server)
        if await asked.get() is signal.SIGTERM:
            draining = asyncio.ensure_future(server.drain(grace))
            stopping = asyncio.ensure_future(asked.get())
            await asyncio.wait([draining, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in (draining, stopping):
                task.cancel()


def spare_the_collector() -> None:
    """Nothing the server makes for a connection is part of a cycle once it is closed: collect seldom.

    With the defaults, collections that find nothing cost 4 % of a job's start, and more the more ranks there are.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on uvloop, or on asyncio where uvloop does not exist."""
    if sys.platform == "win32":
        asyncio.run(main)
    else:
        import uvloop

        uvloop.run(main)
