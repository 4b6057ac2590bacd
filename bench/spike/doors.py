"""The doors that lost: a callback protocol on uvloop, and the same accepting by hand. See docs/performance.md.

    python bench/spike/doors.py protocol PORT
    python bench/spike/doors.py adaptive PORT

Both serve the package's own engine and sessions, so that only the door differs from `tcpstore serve`. `adaptive` takes
many new connections a turn while the server is busy, one a turn while it is not.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from typing import cast

import uvloop

from tcpstore_async.daemon import spare_the_collector
from tcpstore_async.errors import PeerError
from tcpstore_async.limits import Limits
from tcpstore_async.server.base import listen, raise_file_limit
from tcpstore_async.session.server import Engine, ServerSession

BUSY_SECONDS = 0.001
"""A turn that took longer than this means that the server is busy."""


class Connection(asyncio.Protocol):
    """The callbacks of one connection."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        host, port = transport.get_extra_info("peername")[:2]
        self.session = ServerSession(self.engine, self, host, port, time.monotonic())

    def data_received(self, data: bytes) -> None:
        try:
            self.session.receive(data)
        except PeerError:
            self.transport.abort()
            return
        self.flush()
        dirty = self.engine.dirty
        while dirty:
            cast(Connection, dirty.pop().owner).flush()

    def flush(self) -> None:
        out = self.session.out
        if out:
            self.session.unsent = 0
            self.transport.write(out[0] if len(out) == 1 else b"".join(out))
            out.clear()

    def pause_writing(self) -> None:
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.session.leave()


class AdaptiveAcceptor:
    """Accepts by hand: as many a turn as the turn before it took long."""

    def __init__(self, listener: socket.socket, engine: Engine) -> None:
        self.listener = listener
        self.engine = engine
        self.loop = asyncio.get_running_loop()
        self.tasks: set[asyncio.Task[object]] = set()
        self.last = time.monotonic()
        self.loop.add_reader(listener.fileno(), self.accept)

    def accept(self) -> None:
        now = time.monotonic()
        for _ in range(64 if now - self.last > BUSY_SECONDS else 1):
            try:
                peer, _ = self.listener.accept()
            except BlockingIOError:
                break
            peer.setblocking(False)
            task: asyncio.Task[object] = self.loop.create_task(
                self.loop.connect_accepted_socket(lambda: Connection(self.engine), peer)
            )
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        self.last = now


async def main(door: str, port: int) -> None:
    raise_file_limit()
    engine = Engine(Limits())
    listener = listen("127.0.0.1", port)
    if door == "adaptive":
        AdaptiveAcceptor(listener, engine)
    else:
        loop = asyncio.get_running_loop()
        await loop.create_server(lambda: Connection(engine), sock=listener, backlog=65_535)
    spare_the_collector()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2])))
