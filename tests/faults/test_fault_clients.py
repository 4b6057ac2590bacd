"""Clients whose connection is cut, or whose server sends nonsense."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from client.fakes import PROBE, STOCK, answer_probe, exactly, fake_server, greet, proxy_to
from contract.store_kinds import either_client
from marks import ON_STOCK
from support import LIMIT, blob, server_of, tcpstore_server
from tcpstore_async import AsyncTCPStore, DistError, DistNetworkError, TCPStore

CUT = "Failed to recv, got 0 bytes|reset by peer|Broken pipe|no sense|nobody asked|bytes"


# A cut connection


clients = pytest.mark.parametrize("client", ["sync", "async"])


@clients
@pytest.mark.parametrize("server", ["ours", pytest.param("libuv", marks=ON_STOCK)])
def test_what_was_sent_is_never_sent_again(server: str, client: str) -> None:
    """The connection is cut between an ADD and its answer: the call fails, and so do all that follow."""
    with server_of(server) as port, either_client(client) as connect:
        with proxy_to(port) as proxy:
            store = connect(proxy.port)
            assert store.add("n", 1) == 1
            with pytest.raises(DistError, match="wait timeout"):
                store.wait(["never"], 0)
            proxy.cut_before = b"\x04" + blob(b"/n")
            for _ in range(3):
                with pytest.raises(DistNetworkError, match=CUT):
                    store.add("n", 1)
            assert proxy.connections == 1
        assert connect(port).add("n", 0) == 2


def test_a_write_that_is_lost_fails_the_next_call() -> None:
    with (
        tcpstore_server() as server,
        proxy_to(server.port) as proxy,
        TCPStore("127.0.0.1", proxy.port, timeout=LIMIT) as store,
        ThreadPoolExecutor(1) as threads,
    ):
        waiting = threads.submit(store.get, "late")
        while len(proxy.sent) < 1 or b"/late" not in proxy.all_sent():
            pass
        proxy.cut_before = b"\x01"
        store.set("k", "v")
        for call in (lambda: store.check(["k"]), lambda: store.get("k"), lambda: store.set("k", "v")):
            with pytest.raises(DistNetworkError, match=CUT):
                call()
        with pytest.raises(DistNetworkError, match=CUT):
            waiting.result(LIMIT)


@clients
def test_a_further_connection_leads_to_the_same_server(client: str) -> None:
    """The server behind a name is another one now: the store's next call fails, and nothing reaches the new one."""
    with tcpstore_server() as first, tcpstore_server() as second, proxy_to(first.port) as proxy:
        with either_client(client) as connect, ThreadPoolExecutor(1) as threads:
            store = connect(proxy.port)
            waiting = threads.submit(store.get, "never")
            while proxy.all_sent().count(b"/never") < (1 if client == "sync" else 3):  # an async one looks twice
                pass
            proxy.target = second.port
            with pytest.raises(DistNetworkError, match="a different server is now listening"):
                store.add("n", 1)
            with pytest.raises(DistNetworkError, match="a different server is now listening"):
                waiting.result(LIMIT)
        with TCPStore("127.0.0.1", second.port, timeout=LIMIT) as other:
            assert other.num_keys() == 0


@pytest.mark.parametrize("server", ["ours", pytest.param("libuv", marks=ON_STOCK)])
def test_what_goes_over_the_wire(server: str) -> None:
    """One probe, however many threads; a get is one round trip on ours; nothing above 18 to PyTorch's servers."""
    with (
        server_of(server) as port,
        proxy_to(port) as proxy,
        TCPStore("127.0.0.1", proxy.port, timeout=LIMIT) as store,
        ThreadPoolExecutor(8) as threads,
    ):
        store.set("k", "v")
        assert store.add("n", 1) == 1
        assert proxy.all_sent().count(PROBE) == 1
        assert set(threads.map(store.get, ["k"] * 32)) == {b"v"}
        assert proxy.all_sent().count(PROBE) == 1
        before = len(proxy.senders[0])
        if len(proxy.senders) == 1:
            assert store.get("k") == b"v"
            assert proxy.senders[0][before:] == (["c", "s"] if server == "ours" else ["c", "s", "c", "s"])
        commands = proxy.all_sent().replace(struct.pack("<I", os.getpid()), b"")  # a pid may have any bytes
        assert (b"\x40" in commands) == (server == "ours")


# Lies


def answering(reply: bytes) -> Callable[[socket.socket], None]:
    """A server that greets, replies to the probe as PyTorch's do, and then sends this to every request."""

    def talk(peer: socket.socket) -> None:
        greet(peer)
        while said := peer.recv(65536):
            peer.sendall(STOCK if said == PROBE else reply)

    return talk


LIES: list[tuple[str, bytes, Callable[[Any], Any]]] = [
    ("absurd length", struct.pack("<Q", 2**63), lambda s: s.compare_set("k", "", "v")),
    ("absurd count", struct.pack("<q", -1), lambda s: s.list_keys()),
    ("absurd number of keys", struct.pack("<Q", 2**40), lambda s: s.list_keys()),
    ("unexpected byte", b"\x07", lambda s: s.wait(["k"])),
    ("unexpected byte", b"\x07", lambda s: s.check(["k"])),
    ("unexpected byte", b"\x07", lambda s: s.barrier("k", 2)),
    ("unexpected answer to a cancel", b"", lambda s: s.wait(["k"], 0.01)),
    ("more than was asked for", struct.pack("<q", 1) + b"!", lambda s: s.add("n", 1)),
    ("more than was asked for", b"\0\0", lambda s: s.check(["k"])),
    ("absurd length of an item", struct.pack("<qQ", 1, 2**62), lambda s: s.queue_pop("q", False)),
    ("garbage", b"HTTP/1.1 400 Bad Request\r\n\r\n", lambda s: s.compare_set("k", "", "v")),
]


@clients
@pytest.mark.parametrize(("lie", "reply", "call"), LIES)
def test_a_lie_ends_the_store(lie: str, reply: bytes, call: Callable[[Any], Any], client: str) -> None:
    with fake_server(answering(reply)) as fake, either_client(client) as connect:
        store = connect(fake.port)
        store.set_timeout(5)
        for _ in range(2):
            with pytest.raises(DistError):
                call(store)
        if lie != "unexpected answer to a cancel":
            with pytest.raises(DistNetworkError):
                store.set("k", "v")


@pytest.mark.parametrize("pong", [b"\1\2\3\4", b"HTTP/1.1 400\r\n\r\n", b"", b"\xff" * 10])
# quirk: constructor-timeout
def test_a_greeting_that_is_none(pong: bytes) -> None:
    """The client retries until the deadline; the error names the last cause."""

    def talk(peer: socket.socket) -> None:
        exactly(peer, 10)
        peer.sendall(pong)

    with fake_server(talk) as fake:
        text = rf"timed out after 1000ms while .*127\.0\.0\.1, {fake.port}\).*last error: (?!no answer)"
        with pytest.raises(DistNetworkError, match=text):
            TCPStore("127.0.0.1", fake.port, timeout=1)
        assert fake.connections > 1
        with pytest.raises(DistNetworkError, match=text):
            asyncio.run(AsyncTCPStore.connect("127.0.0.1", fake.port, timeout=1))


def test_a_reply_in_single_bytes() -> None:
    def talk(peer: socket.socket) -> None:
        greet(peer)
        answer_probe(peer)
        assert exactly(peer, 1 + 8 + 2 + 8 + 8)[:1] == b"\x02"
        for byte in blob(b"value" * 20):
            peer.sendall(bytes([byte]))

    with fake_server(talk) as fake, TCPStore("127.0.0.1", fake.port, timeout=LIMIT) as store:
        assert store.compare_set("k", "", "") == b"value" * 20


def test_a_server_that_is_killed_ends_every_call_at_once() -> None:
    """The server of a master, killed by its process id."""
    with TCPStore("127.0.0.1", 0, None, True, -1) as store, ThreadPoolExecutor(5) as threads:
        assert store._hosted is not None
        with TCPStore("127.0.0.1", store.port, timeout=-1) as worker:
            waiting = [threads.submit(one.get, f"never{number}") for number in range(2) for one in (store, worker)]
            for one in (store, worker):
                while sum(connection.parked for connection in list(one._client._connections)) < 2:  # type: ignore[union-attr]
                    pass
            os.kill(store._hosted.pid, signal.SIGKILL)
            for call in waiting:
                with pytest.raises(DistNetworkError):
                    call.result(LIMIT)
            with pytest.raises(DistNetworkError) as raised:
                worker.add("n", 1)
            assert "the server process" not in str(raised.value)
            with pytest.raises(DistNetworkError, match=rf"the server process for port {store.port} \(pid \d+\) "):
                store.add("n", 1)
