"""Servers whose links last as long as a test needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import persisted
from faults.fault_helpers import program

_PROGRAM = (
    persisted.PROGRAM
    + """
import asyncio, sys
from tcpstore_async.serving import run_loop, serve

async def main():
    async with serve(port=int(sys.argv[1])) as server:
        server.links.grace, server.links.keep_alive = float(sys.argv[2]), float(sys.argv[3])
        print(server.port, flush=True)
        await asyncio.Event().wait()

run_loop(main())
"""
)


@contextmanager
def server_with(port: int = 0, grace: float = 1e6, keep_alive: float = 5.0) -> Iterator[int]:
    """A server whose links last for `grace` seconds without a connection; yields its port."""
    with program(_PROGRAM, str(port), str(grace), str(keep_alive)) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
