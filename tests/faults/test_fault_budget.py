"""Peers that make a server hold too much, or only occupy a connection: what both servers do about them."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import select
import socket
import struct
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from faults.fault_helpers import Watch, until
from support import HANDSHAKE, LIMIT, RawPeer, blob, tcpstore_server
from tcpstore_async import AsyncTCPStore, Limits, serve
from tcpstore_async.base.errors import DistNetworkError
from tcpstore_async.links.link_client import ClientLink, Stream
from tcpstore_async.server import uv
from tcpstore_async.server.poller import READ
from tcpstore_async.server.uv import UvServer
from tcpstore_async.session.server import ServerSession

MIB = 1 << 20


def hoarder(port: int) -> RawPeer:
    """A peer that reads nothing."""
    peer = RawPeer(port, validate=False)
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    peer.send(HANDSHAKE)
    return peer


def test_pinned_versions_stay_within_the_budget(backend: str) -> None:
    """Each peer replaces a large value, requests it, and does not read."""
    with tcpstore_server("--backend", backend, f"--limit=budget_bytes={256 * MIB}") as server, ExitStack() as stack:
        watch = Watch(server.process.pid)
        other = stack.enter_context(RawPeer(server.port))
        before = watch.memory()
        for number in range(40):
            peer = stack.enter_context(hoarder(server.port))
            with suppress(OSError):
                peer.send(b"\x01" + blob(b"/v") + blob(bytes([number]) * (8 * MIB)) + b"\x03" + blob(b"/v"))
            other.ping()
        until(lambda: "budget_bytes" in server.log(), "somebody had to go")
        assert watch.memory() - before < 1.5 * 256 * MIB
        line = next(line for line in server.log().splitlines() if "budget_bytes" in line)
        assert re.search(r"closed the connection from 127\.0\.0\.1:\d+.*=268435456\); this peer accounts for", line)
        other.ping()


def test_versions_of_a_value_that_grows_share_what_they_have_in_common(backend: str) -> None:
    """Each peer appends a byte to a large value, requests it, and does not read."""
    with tcpstore_server("--backend", backend) as server, ExitStack() as stack:
        watch = Watch(server.process.pid)
        other = stack.enter_context(RawPeer(server.port))
        before = watch.memory()
        for _ in range(2):
            other.send(b"\x09" + blob(b"/v") + blob(bytes(8 * MIB)))
        other.ping()
        for _ in range(20):
            peer = stack.enter_context(hoarder(server.port))
            peer.send(b"\x09" + blob(b"/v") + blob(b"x") + b"\x03" + blob(b"/v"))
            other.ping()
        assert watch.memory() - before < 100 * MIB


# quirk: validate_seconds
async def test_a_connection_that_stays_silent_ends(backend: str) -> None:
    async with serve(limits=Limits(validate_seconds=1), backend=backend) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        good, talking = await asyncio.open_connection("127.0.0.1", server.port)
        talking.write(HANDSHAKE)
        assert await reader.read() == b""
        talking.write(b"\x0dpong")
        assert await good.readexactly(4) == b"pong"
        for one in (writer, talking):
            one.close()


class Silent(Stream):
    """A session on a link that says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.is_closed = False

    def received(self, data: bytes) -> None:
        raise AssertionError(data)

    def credited(self) -> None:
        raise AssertionError

    def closed(self) -> None:
        self.is_closed = True


async def linked(port: int) -> tuple[ClientLink, asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    link = ClientLink()
    writer.write(link.request())
    link.answered(await reader.readexactly(int.from_bytes(await reader.readexactly(8), "little")))
    return link, reader, writer


async def test_a_session_on_a_link_that_stays_silent_ends() -> None:
    """Also if there is nobody else who has not sent VALIDATE."""
    async with serve(limits=Limits(validate_seconds=1)) as server:
        link, reader, writer = await linked(server.port)
        for _ in range(2):  # the first may be noticed because the connection was new
            silent = Silent()
            link.open(silent, "127.0.0.1", 1)
            link.seal()
            writer.write(b"".join(link.out))
            link.out.clear()
            while not silent.is_closed:
                link.receive(await reader.read(1000))
        writer.close()


async def test_a_server_that_stops_ends_its_links_whatever_else_there_is_to_send() -> None:
    """Also if so much was woken at the same time that it would be sent in several turns of the loop."""
    async with serve() as server:
        link, reader, writer = await linked(server.port)
        with server.turn:
            [carrier] = server.links.links.values()
            assert carrier.connection is not None
            server.store.hub.pending_flush.extend([carrier.connection] * 1000)
        server.stop()
        link.receive(await reader.read())
        assert link.is_over
        writer.close()


# quirk: connections
async def test_silent_connections_give_way(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    """Peers that send nothing must not occupy all connections."""
    async with serve(limits=Limits(connections=5), backend=backend) as server:
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(5)]
        good, talking = await asyncio.open_connection("127.0.0.1", server.port)
        talking.write(HANDSHAKE + b"\x0dpong")
        assert await good.readexactly(4) == b"pong"
        # Which one goes is open: TCP_DEFER_ACCEPT holds connections without data back, and releases them in no order.
        closing = [asyncio.create_task(reader.read()) for reader, _ in silent]
        await asyncio.wait(closing, return_when=asyncio.FIRST_COMPLETED)
        assert "had not sent VALIDATE" in caplog.text
        for _, writer in (*silent, (good, talking)):
            writer.close()
        await asyncio.gather(*closing, return_exceptions=True)


# quirk: silent-peers
async def test_the_kernel_asks_after_silent_peers() -> None:
    async with serve() as server:
        assert isinstance(server, UvServer)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(HANDSHAKE + b"\x0dpong")
        assert await reader.readexactly(4) == b"pong"
        [connection] = [one for one in server.connections if one is not None]
        with socket.socket(fileno=os.dup(connection.fd)) as copy:
            assert copy.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                assert copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 300_000
        writer.close()


class Defect(Exception):
    """An injected error."""


@pytest.mark.interpreted("compiled methods are not looked up")
@pytest.mark.parametrize("method", ["receive", "resume_reading"])
async def test_an_internal_error_of_one_connection_does_not_lose_events_of_others(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edge-triggered epoll set does not report an event twice: the rest of the batch is served at once."""
    async with serve() as server:
        assert isinstance(server, UvServer)
        with RawPeer(server.port) as first, RawPeer(server.port) as second:
            for peer in (first, second):
                await asyncio.to_thread(peer.ping)
            found = {one.session.port: one for one in server.connections if one is not None}
            broken, whole = [found[peer.socket.getsockname()[1]] for peer in (first, second)]
            owner = ServerSession if method == "receive" else uv.Connection
            working = getattr(owner, method)

            def fail(self: Any, *arguments: Any) -> None:
                if self in (broken, broken.session):
                    raise Defect
                working(self, *arguments)

            monkeypatch.setattr(owner, method, fail)
            sending = [(second, whole)] if method == "resume_reading" else [(first, broken), (second, whole)]
            for peer, connection in sending:  # the broken one goes on if it turns out that there is nothing to read
                peer.send(b"\x0dpong")
                select.select([connection.fd], [], [], LIMIT)
            before = server.sent
            server.ready([(broken.fd, READ), (whole.fd, READ)])
            assert server.sent == before + 4
            assert second.read(4) == b"pong"
            assert broken.fd < 0
            assert first.closed()
            await asyncio.to_thread(second.ping)


class Listener:
    """A listener whose `accept` fails first, both that of sockets and the one beneath it."""

    def __init__(self, listener: socket.socket, errors: list[int]) -> None:
        self._listener = listener
        self.errors = errors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)

    def _accept(self) -> Any:
        self._fail()
        return self._listener._accept()  # type: ignore[attr-defined]

    def accept(self) -> Any:
        self._fail()
        return self._listener.accept()

    def _fail(self) -> None:
        if self.errors:
            number = self.errors.pop()
            raise OSError(number, os.strerror(number))


@pytest.mark.parametrize("name", ["EPROTO", "ENETDOWN", "EHOSTUNREACH", "ECONNABORTED"])
async def test_an_error_of_one_new_connection_does_not_pause_accepting(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(backend=backend) as server:
        paused: list[int] = []
        failing: Any = Listener(server.listener, [getattr(errno, name)])
        accepting: Any = server.acceptor
        with suppress(TypeError, AttributeError):
            accepting.listener = failing
        if accepting.listener is not failing:
            pytest.skip("compiled classes take no stand-in")
        monkeypatch.setattr(server.rate_limited, "add", lambda *_: paused.append(1))
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(HANDSHAKE + b"\x0d" + struct.pack("<I", 7))
        assert await reader.readexactly(4) == struct.pack("<I", 7)
        assert not failing.errors, "it has failed"
        assert not paused
        writer.close()


@pytest.mark.needs_proc
async def test_a_connection_that_cannot_be_served_leaks_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve() as server:
        assert isinstance(server, UvServer)

        def fail(*_: object) -> None:
            raise MemoryError

        watched = server.poller.watch
        try:
            monkeypatch.setattr(server.poller, "watch", fail)
        except (AttributeError, TypeError):
            pytest.skip("compiled classes take no stand-in")
        before = len(os.listdir("/proc/self/fd"))
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        monkeypatch.setattr(server.poller, "watch", watched)
        assert len(os.listdir("/proc/self/fd")) <= before
        assert server.count == 0


async def test_what_is_kept_for_a_single_link_is_free_at_once() -> None:
    """Else the store waits for memory that its eviction does not free, and the server with it."""
    async with serve(limits=Limits(budget_bytes=4_000_000, value_bytes=1_000_000)) as server:
        reader = await AsyncTCPStore.connect("127.0.0.1", server.port)
        async with reader:
            await reader.num_keys()
            async with await AsyncTCPStore.connect("127.0.0.1", server.port) as other:
                await other.set("read", bytes(25_000))
                await reader.get("read")
                await other.delete_key("read")
            for number in range(250):
                with suppress(DistNetworkError):
                    async with await AsyncTCPStore.connect("127.0.0.1", server.port) as writer:
                        await writer.set(f"{number}", bytes(20_000))
                        await writer.num_keys()
            assert server.store.budget.used() > 3_600_000
            with pytest.raises(DistNetworkError):
                await reader.num_keys()
