"""A program that serves and forks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from typing import Any, cast

import pytest

from support import LIMIT
from tcpstore_async import serve

pytestmark = pytest.mark.slow

SERVES = """
import asyncio, os, signal, socket, sys, tcpstore_async

def fork(then):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        os.write(writer, b"x")
        if then == "lives":
            signal.pause()
        elif then == "exits":
            os._exit(0)
        else:
            raise SystemExit  # out of the context: the server is not the child's to stop
    os.read(reader, 1)
    return pid

async def peer(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(bytes.fromhex("00cef7853c"))
    return reader, writer

async def ping(reader, writer):
    writer.write(bytes.fromhex("0d01020304"))
    assert await asyncio.wait_for(reader.readexactly(4), 60) == bytes([1, 2, 3, 4])

async def main():
    async with tcpstore_async.serve(backend=sys.argv[1]) as server:
        one = await peer(server.port)
        await ping(*one)
        worker = fork("lives")
        os.waitpid(fork("exits"), 0)
        if sys.argv[2] == "asyncio":  # uvloop's would take its parent's epoll set to pieces
            os.waitpid(fork("leaves"), 0)
        await ping(*one)
        another = await peer(server.port)
        await ping(*another)
    for reader, writer in (one, another):
        assert await asyncio.wait_for(reader.read(1), 60) == b"", "it hears of the end"
        writer.close()
    with socket.create_server(("127.0.0.1", server.port)):
        print("free")
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)

import uvloop
(asyncio.run if sys.argv[2] == "asyncio" else uvloop.run)(main())
print("good")
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("backend", ["uv", "threaded"])
# quirk: server-forks
def test_forked_children_hold_nothing_of_the_server(backend: str, loop: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVES, backend, loop],
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT,
        cwd=tempfile.gettempdir(),
    )
    assert done.stdout == "free\ngood\n"
    assert done.returncode == 0


@pytest.mark.parametrize("backend", ["uv", "threaded"])
async def test_a_child_that_has_not_closed_its_copy_yet_does_not_keep_the_port(backend: str) -> None:
    """The child has been forked, but has not run yet, when the server ends."""
    async with serve(backend=backend) as server:
        copy = os.dup(cast(Any, server).listener.fileno())
    try:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port), LIMIT)
        socket.create_server(("127.0.0.1", server.port)).close()
    finally:
        os.close(copy)
