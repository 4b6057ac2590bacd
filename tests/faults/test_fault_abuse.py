"""Regressions that a hostile reviewer found."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from commands import run_command
from support import HANDSHAKE, LIMIT, RawPeer, blob, u64
from tcpstore_async import Limits, serve
from tcpstore_async.server.uv import UvServer
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store

MIB = 1 << 20


@pytest.mark.parametrize("command", [b"\x0c", b"\x0a" + u64(0)], ids=["CANCEL_WAIT", "MULTI_GET of nothing"])
async def test_a_flood_is_deferred_once_at_a_time(command: bytes) -> None:
    """A peer that sends faster than it is served is put off once, however often the kernel reports it."""
    flood = command * (MIB // len(command))
    longest = 0

    def pour(peer: RawPeer) -> None:
        with suppress(OSError):
            peer.socket.settimeout(None)
            threading.Thread(target=drain, args=(peer.socket,), daemon=True).start()
            while True:
                peer.send(flood)

    def drain(peer: socket.socket) -> None:
        with suppress(OSError):
            while peer.recv(MIB):
                pass

    async def look(server: UvServer) -> None:
        nonlocal longest
        looks = 0
        while looks < 30:
            await asyncio.sleep(0)
            longest = max(longest, len(server._deferred))
            looks += len(server._deferred) > 0

    async with serve() as server:
        assert isinstance(server, UvServer)
        peers = [RawPeer(server.port) for _ in range(2)]
        pouring = [asyncio.create_task(asyncio.to_thread(pour, peer)) for peer in peers]
        try:
            await asyncio.wait_for(look(server), LIMIT)
        finally:
            for peer in peers:
                with suppress(OSError):
                    peer.socket.shutdown(socket.SHUT_RDWR)
            await asyncio.wait(pouring, timeout=LIMIT)
            for peer in peers:
                peer.close()
        assert longest <= 2


def test_an_announcement_counts_what_has_arrived() -> None:
    store = Store(Limits())
    for _ in range(1000):
        session = ServerSession(store, None, "127.0.0.1", 1, 0.0)
        session.receive(HANDSHAKE + b"\x01" + blob(b"/a") + u64(8 * MIB) + b"0123456789")
    assert store.budget.unfinished < 1000 * 50


@pytest.mark.parametrize("closed", [0, 2])
def test_a_closed_standard_stream_harms_nobody(closed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder, "port")
        process = subprocess.Popen(
            [sys.executable, "-m", "tcpstore_async", "serve", "--port", "0", "--port-file", str(port_file)],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: os.close(closed),
        )
        with process:
            assert process.stdout is not None
            assert process.stdout.readline()
            with RawPeer(int(port_file.read_text())) as peer:
                peer.ping()
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT) == 0


def test_a_log_that_nobody_reads_stops_nobody(backend: str) -> None:
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "tcpstore_async", "serve", "--port", "0", "--backend", backend]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writing, cwd=tempfile.gettempdir()) as process:
        try:
            assert process.stdout is not None
            port = int(re.findall(rb'"port":(\d+)', process.stdout.readline())[0])
            os.set_blocking(writing, False)
            with suppress(BlockingIOError):
                while True:
                    os.write(writing, bytes(65_536))
            for bad in (b"\xff", b"\x03" + u64(2**40), b"\x01" + blob(b"/a") + u64(2**40), b"\x05" + u64(2**40)):
                with RawPeer(port) as peer:
                    peer.send(bad)
                    assert peer.closed()
            with RawPeer(port) as peer:
                peer.ping()
        finally:
            os.close(writing)
            os.close(reading)
            process.kill()


def test_an_absurd_limit_is_a_usage_error() -> None:
    done = run_command(None, "serve", "--limit", "keys=" + "9" * 5000)
    assert (done.exit_code, "is not of the form NAME=NUMBER" in done.stderr) == (2, True)
