"""A server whose journal cannot grow: writes wait, reads go on, everybody is told why, and nothing is lost."""

from __future__ import annotations

import asyncio
import errno
import functools
import json
import os
import re
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

import tcpstore_async
from conformance.frames import set_
from relay.test_pollers import relay_with
from server.test_persistence import Restarting
from support import HANDSHAKE, LIMIT, blob, keys, tcpstore, u64
from support import until as until_now
from tcpstore_async import serving
from tcpstore_async.base.errors import StoreTimeoutError
from tcpstore_async.client.aio import AsyncTCPStore
from tcpstore_async.links.linked_session import LinkedSession
from tcpstore_async.log.journal import Journal
from tcpstore_async.server.persistence import JournalPersistence
from tcpstore_async.server.poller import make_poller
from tcpstore_async.server.uv import UvServer
from tcpstore_async.session.store import EVERYTHING, WRITES

pytestmark = pytest.mark.slow

SEGMENT = 40_000


class Disk:
    """A directory for a journal in which no more segments, and no snapshots, can be made while it is full."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._obstacles = [folder / "made", folder / "snapshot"]

    def fill(self) -> None:
        for obstacle in self._obstacles:
            obstacle.unlink(missing_ok=True)
            obstacle.mkdir()

    def free(self) -> None:
        for obstacle in self._obstacles:
            obstacle.rmdir()


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr(serving, "Journal", functools.partial(Journal, segment_bytes=SEGMENT))
    return Disk(tmp_path / "journal")


@asynccontextmanager
async def served(disk: Disk, **more: Any) -> AsyncIterator[UvServer]:
    async with serving.serve(persist=disk.folder, **more) as server:
        assert isinstance(server, UvServer)
        yield server


def journal_of(server: UvServer) -> Journal:
    assert isinstance(server.persistence, JournalPersistence)
    return server.persistence.journal


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def connected(port: int) -> AsyncTCPStore:
    store = await AsyncTCPStore.connect("127.0.0.1", port, timeout=LIMIT)
    await store.num_keys()  # from its first call on, it survives its connection
    return store


async def fill(server: UvServer, disk: Disk, store: AsyncTCPStore) -> asyncio.Future[int]:
    """Write until the next segment cannot be made, and writes wait; return a call that waits."""
    await store.add("before", 1)
    await until(lambda: journal_of(server).spare)
    disk.fill()

    full = False

    async def write() -> int:
        count = 0
        while not full:
            count = await store.add("count", 1)
            await store.set("large", bytes(1000))
        return await store.add("count", 1) - count

    waiting = asyncio.ensure_future(write())
    await until(lambda: server.store.hub.held)
    full = True
    return waiting


@pytest.mark.parametrize("kind", ["direct", "relay"])
@pytest.mark.parametrize("sync", ["process", "always"])
async def test_writes_wait_and_reads_go_on(
    kind: str, sync: str, disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    admin = str(tmp_path / "admin")
    async with served(disk, sync=sync, admin=admin) as server, relay_with(make_poller, server.port) as relay:
        port = relay.port if kind == "relay" else server.port
        writer, reader = await connected(port), await connected(port)
        await writer.set("key", "value")
        waiting = await fill(server, disk, writer)
        assert server.store.hub.held == WRITES
        assert await reader.get("key") == b"value"
        assert await reader.check(["key"])
        awaited = asyncio.ensure_future(reader.wait(["later"], LIMIT))
        why = "the journal cannot grow (Is a directory): writes wait, reads go on"
        other = await connected(port)
        with pytest.raises(StoreTimeoutError, match=re.escape(why)):
            await other.wait(["never"], 0.5)
        assert f"{why} until there is space for {disk.folder}" in caplog.text
        for words in (["who"], ["who", "--missing"]):
            shown = await asyncio.to_thread(tcpstore, *words, "--admin", admin)
            assert shown.stdout.decode().splitlines()[0] == why
        shown = await asyncio.to_thread(tcpstore, "info", "-o", "json", "--admin", admin)
        assert json.loads(shown.stdout)["why_held"] == why
        assert not waiting.done()
        disk.free()
        assert await waiting == 1
        assert f"there is space for {disk.folder} again: nothing waits" in caplog.text
        await other.set("later", "x")
        await awaited
        count = await reader.add("count", 0)
        server.stop(for_good=False)
        for store in (writer, reader, other):
            await store.close()
    async with served(disk, sync=sync) as server:
        assert server.store.keyspace.values[b"/count"] == count
        assert "another effect" not in caplog.text


async def test_when_the_rest_is_nearly_used_up_everything_waits(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    """The server does not end: what is left suffices for what nobody can hold back."""
    async with served(disk) as server, relay_with(make_poller, server.port) as relay:
        lost: list[OSError | None] = []
        server.on_end = lost.append
        stores = [await connected(port) for port in (server.port, relay.port, server.port)]
        waiting = await fill(server, disk, stores[2])

        async def read(store: AsyncTCPStore) -> None:
            while server.store.hub.held:
                await store.get("before")

        reading = [asyncio.ensure_future(read(store)) for store in stores[:2]]
        await until(lambda: server.store.hub.held == EVERYTHING)
        assert "everything waits until there is space" in caplog.text
        with server.turn:
            server.links.tick()
        assert not any(one.done() for one in reading)
        assert SEGMENT // 8 < SEGMENT - journal_of(server)._at < SEGMENT // 4
        disk.free()
        assert await waiting == 1
        await asyncio.gather(*reading)
        assert not lost
        for store in stores:
            await store.close()


async def test_when_the_rest_is_used_up_the_server_ends(disk: Disk) -> None:
    async with served(disk) as server:
        lost: list[OSError | None] = []
        server.on_end = lost.append
        store = await connected(server.port)
        waiting = await fill(server, disk, store)
        while not lost:
            with server.turn:
                server.announce(5)  # as an owner would; nothing holds that back
        assert lost[0] is not None
        assert lost[0].errno == errno.EISDIR
        waiting.cancel()
        server.stop(for_good=False)
        await store.close()
    disk.free()


async def test_a_server_that_starts_with_a_full_disk(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    """It was killed while writes waited: who waits, on a link or not, waits on."""
    async with served(disk) as server, relay_with(make_poller, server.port) as relay:
        port = server.port
        stores = [await connected(one) for one in (port, relay.port)]
        waiting = await fill(server, disk, stores[0])
        through_relay = asyncio.ensure_future(stores[1].add("relay", 1))
        await until(lambda: any(one.session.stalled() for one in linked(server)))
        server.stop(for_good=False)
        async with served(disk, port=port) as again:
            # What comes before it is known that the disk is full is executed, if there is space for it.
            await until(lambda: again.store.hub.held == WRITES and (again.waiting or waiting.done()))
            await until(lambda: any(one.session.stalled() for one in linked(again)) or through_relay.done())
            disk.free()
            assert await waiting == 1
            assert await through_relay == 1
            again.stop(for_good=False)
        for store in stores:
            await store.close()
    assert "another effect" not in caplog.text


def linked(server: UvServer) -> list[LinkedSession]:
    return [one for link in server.links.links.values() for one in link.sessions.values()]


async def test_requests_of_stock_clients(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    """A short write that had begun to arrive ends, as its beginning is in the journal; all others wait."""
    async with served(disk) as server, sending(server.port) as begun, sending(server.port) as half:
        store = await connected(server.port)
        first, long = set_(b"/begun", b"x" * 100), set_(b"/long", bytes(400_000))
        await begun(HANDSHAKE + first[:50])
        await half(HANDSHAKE + long[:200_000])
        await until(lambda: server.received > 200_100 and not server.store.hub.unvalidated)
        journal = journal_of(server)
        waiting = await fill(server, disk, store)
        await begun(first[50:] + set_(b"/next", b"y"))
        await half(long[200_000:])
        async with sending(server.port) as late:
            get = b"\x06" + keys(b"/begun") + b"\x03" + blob(b"/begun")
            value = b"\x00" + u64(100) + b"x" * 100
            await late(HANDSHAKE + get)
            assert await late.receive(len(value)) == value
            await late(set_(b"/late", bytes(500_000)) + get)
            await until(lambda: len(server.waiting) == 4)
            values = server.store.keyspace.values
            assert values.keys().isdisjoint({b"/next", b"/long", b"/late"})
            before = journal._at
            async with sending(server.port) as leaving:
                await leaving(HANDSHAKE + b"\x03" + blob(b"/none") + set_(b"/left", b"z"))
                assert await leaving.receive(8) == u64(0)
                await until(lambda: len(server.waiting) == 5)
            assert journal._at - before < 300
            disk.free()
            assert await waiting == 1
            assert await late.receive(len(value)) == value
        await until(lambda: values.keys() >= {b"/next", b"/long", b"/late", b"/left"})
        server.stop(for_good=False)
        await store.close()
    async with served(disk) as server:
        assert server.store.keyspace.values.keys() >= {b"/begun", b"/next", b"/long", b"/late", b"/left"}
        assert "another effect" not in caplog.text


class Peer:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    async def __call__(self, data: bytes) -> None:
        await asyncio.to_thread(self.connection.sendall, data)

    async def receive(self, count: int) -> bytes:
        return await asyncio.to_thread(self.connection.recv, count, socket.MSG_WAITALL)


@asynccontextmanager
async def sending(port: int) -> AsyncIterator[Peer]:
    with socket.create_connection(("127.0.0.1", port), LIMIT) as connection:
        yield Peer(connection)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Callable[[str], None]]:
    """Mount a file system; yield a function that changes its size."""

    def mount(*options: str) -> None:
        subprocess.run(["mount", *options, str(folder)], check=True)

    folder.mkdir()
    mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs")
    try:
        yield lambda size: mount("-o", f"remount,size={size}")
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """It holds two segments and a half. `/readyz` says that it is full, also when the server was killed meanwhile."""
    why = "the journal cannot grow (No space left on device): writes wait, reads go on"
    with small_disk(tmp_path / "disk", "40m") as resize:
        folder = tmp_path / "disk" / "journal"
        with Restarting(folder, "--http", "127.0.0.1:0") as restarting:

            def ready() -> str:
                try:
                    with urllib.request.urlopen(f"{json.loads(restarting.server.ready)['http']}readyz") as answer:
                        return str(answer.read().decode().strip())
                except urllib.error.HTTPError as error:
                    return str(error.read().decode().strip())

            port, done, counts = restarting.port, threading.Event(), [0]

            def write() -> None:
                with tcpstore_async.TCPStore("127.0.0.1", port, timeout=LIMIT) as store:
                    while not done.is_set():
                        store.set("large", bytes(900_000))
                        counts.append(store.add("count", 1))

            until_now(lambda: ready() == "ready")
            writing = threading.Thread(target=write)
            writing.start()
            until_now(lambda: ready() == why)
            restarting.restart()
            until_now(lambda: ready() == why)
            assert f"{why} until there is space for {folder}" in restarting.server.log()
            with tcpstore_async.TCPStore("127.0.0.1", port, timeout=LIMIT) as reader:
                assert len(reader.get("large")) == 900_000
                assert writing.is_alive()
                resize("200m")
                until_now(lambda: ready() == "ready")
                done.set()
                writing.join()
                assert counts == list(range(len(counts)))
                assert reader.add("count", 0) == counts[-1]
