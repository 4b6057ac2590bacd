"""Servers that stand by, and one that takes over: it comes back at another port, with its journal."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from faults.fault_helpers import program
from server.test_persistence import Restarting
from support import free_port
from tcpstore_async.serving import serve

_PROGRAM = """
import asyncio, sys
from tcpstore_async.serving import run_loop, serve

async def main():
    async with serve() as server:
        server.links.elsewhere = ""
        print(server.port, flush=True)
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            server.links.elsewhere = line.strip()
            print("told", flush=True)

run_loop(main())
"""


@asynccontextmanager
async def standing_by(server: str = "", **options: Any) -> AsyncIterator[Any]:
    """A server on this loop that stands by for the one at this address."""
    async with serve(**options) as standby:
        standby.links.elsewhere = server
        yield standby


class Moving(Restarting):
    """A server that comes back at another port, where it takes over from itself."""

    def start(self) -> None:
        self.port = free_port()
        self.options[2] = str(self.port)
        super().start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


class Replicated(Moving):
    """The same with another process that stands by, and says where it is."""

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self._standby = self._stack.enter_context(program(_PROGRAM))
        standby = int(self._said())
        super().__init__(folder)
        self.endpoint = f"{self.address},127.0.0.1:{standby}"
        """The addresses that clients are given: none of the server's later ones."""
        self._tell(self.address)

    def start(self) -> None:
        super().start()
        self._tell(self.address)

    def kill(self) -> None:
        super().kill()
        self._tell("")

    def __exit__(self, *given: object) -> None:
        with self._stack:
            super().__exit__(*given)

    def _tell(self, address: str) -> None:
        assert self._standby.stdin is not None
        self._standby.stdin.write(f"{address}\n")
        self._standby.stdin.flush()
        assert self._said() == "told\n"

    def _said(self) -> str:
        assert self._standby.stdout is not None
        return self._standby.stdout.readline()
