"""Scripts of the conformance tests, played through a relay.

A server of ours and its relay share one process and loop. In front of PyTorch's server each rank has a connection of
its own, which takes a moment to make: a peer counts as connected when that is there.
"""

from __future__ import annotations

import subprocess

import persisted
from conformance.targets import Servers, SocketTarget

OUR_SERVERS_BEHIND_RELAYS = (
    persisted.PROGRAM
    + """
import asyncio, sys
from contextlib import AsyncExitStack
from tcpstore_async.relay.running import relay
from tcpstore_async.serving import run_loop, serve

async def main():
    running = {}
    while line := await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
        if line == "new\\n":
            server, front = AsyncExitStack(), AsyncExitStack()
            upstream = (await server.enter_async_context(serve(backend=sys.argv[1]))).port
            port = (await front.enter_async_context(relay([("127.0.0.1", upstream)]))).port
            running[port] = server, front
        else:
            port = int(line)
            server, front = running.pop(port)
            await server.aclose()
            asyncio.get_running_loop().call_later(60, lambda front=front: asyncio.ensure_future(front.aclose()))
        print(port, flush=True)

run_loop(main())
"""
)

RELAYS = """
import asyncio, sys
from contextlib import AsyncExitStack
from tcpstore_async.relay.running import relay
from tcpstore_async.serving import run_loop

async def main():
    running = {}
    while line := await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
        command, number = line.split()
        if command == "new":
            stack = AsyncExitStack()
            front = await stack.enter_async_context(relay([("127.0.0.1", int(number))]))
            running[front.port] = stack, front
            print(front.port, flush=True)
            continue
        stack, front = running[int(number)]
        if command == "stop":
            del running[int(number)]
            await stack.aclose()
        else:
            upstream = front.on_direct.__self__
            while front.state != 2 or front.count != len(upstream.direct) or any(
                connection.early is not None for connection in upstream.direct
            ):
                await asyncio.sleep(0.001)
        print(number, flush=True)

run_loop(main())
"""


class Relays:
    """A process with relays in front of other servers."""

    def __init__(self, process: subprocess.Popen[str], servers: Servers) -> None:
        self.process = process
        self.servers = servers

    def start(self) -> tuple[int, int]:
        """Start a server and its relay; return the ports of both."""
        server = self.servers.start()
        return server, self.ask("new", server)

    def ask(self, command: str, number: int) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{command} {number}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


class RelayedTarget(SocketTarget):
    """A relay in front of a server without links."""

    def __init__(self, relays: Relays) -> None:
        self.relays = relays
        server, relay = relays.start()

        def stop() -> None:
            relays.servers.stop(server)

        super().__init__(relay, stop)
        relays.ask("settle", relay)

    def connect(self, peer: str) -> None:
        super().connect(peer)
        self.relays.ask("settle", self.port)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.relays.ask("stop", self.port)
