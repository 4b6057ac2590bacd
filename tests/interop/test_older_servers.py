"""Our clients on servers like PyTorch's older ones, which close the connection for a command that they do not know.

The server is PyTorch's own of today, behind a proxy that closes where an older one would; `make matrix` has the old
ones themselves.
"""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from client.fakes import fake_server, greet
from contract.store_kinds import either_client
from support import LIMIT, torch_server
from tcpstore_async import AsyncTCPStore, DistNetworkError, QueueEmptyError, Store, StoreTimeoutError, TCPStore
from tcpstore_async.wire.commands import BY_METHOD
from versions import needs

pytestmark = needs("barrier")

clients = pytest.mark.parametrize("client", ["sync", "async"])

PING = BY_METHOD["ping"].opcode


@pytest.fixture(scope="module")
def newest() -> Iterator[int]:
    with torch_server("libuv") as port:
        yield port


@contextmanager
def older(newest: int, *lacks: str) -> Iterator[int]:
    """A server that knows neither these methods nor PING."""
    unknown = {BY_METHOD[method].opcode for method in lacks}

    def talk(peer: socket.socket) -> None:
        hello = peer.recv(6, socket.MSG_WAITALL)
        if hello[5] == PING:
            return
        with answering(peer, newest) as server:
            server.sendall(hello)
            pump(peer, server, unknown)

    with fake_server(talk) as fake:
        yield fake.port


@contextmanager
def answering(peer: socket.socket, newest: int) -> Iterator[socket.socket]:
    """A connection to the server, whose replies go to the client."""
    with socket.create_connection(("127.0.0.1", newest), LIMIT) as server:
        back = threading.Thread(target=pump, args=(server, peer, set()))
        back.start()
        try:
            yield server
        finally:
            server.shutdown(socket.SHUT_RDWR)
            back.join(LIMIT)


def pump(source: socket.socket, target: socket.socket, unknown: set[int]) -> None:
    """Hand on what comes until it begins with something unknown."""
    try:
        while (data := source.recv(65536)) and data[0] not in unknown:
            target.sendall(data)
        target.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the other side has ended it


def test_a_server_without_ping(newest: int) -> None:
    with older(newest) as port, TCPStore("127.0.0.1", port, timeout=LIMIT) as store:
        store.set("k", "v")
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(store.get, "later")
            assert store.get("k") == b"v"
            store.set("later", "w")
            assert waiting.result(LIMIT) == b"w"
        store.barrier("b", 1)
        with store.clone() as clone:
            clone.barrier("b1", 1)
        with pytest.raises(StoreTimeoutError):
            store.barrier("b2", 2, 0.05)


@clients
def test_barriers_of_a_server_without_them(newest: int, client: str) -> None:
    """Over its keys, as PyTorch's stores without a barrier of their own make one; tried once for all threads."""
    with older(newest, "barrier") as port, either_client(client) as connect:
        store = connect(port)
        with ThreadPoolExecutor(8) as threads:
            for number in range(3):
                for one in [threads.submit(store.barrier, f"{client} {number}", 8) for _ in range(8)]:
                    one.result(LIMIT)
        with pytest.raises(StoreTimeoutError):
            store.barrier(f"{client} incomplete", 2, 0.05)
        assert store.get(f"{client} 0/num_members") == b"8"


CALLS: list[tuple[str, Callable[[Any], Any], str]] = [
    ("list_keys", lambda store: store.list_keys(), "cannot list its keys (PyTorch added this in 2.10"),
    ("queue_push", lambda store: store.queue_push("q", "v"), "has no queues (PyTorch added them in 2.8"),
    ("queue_len", lambda store: store.queue_len("q"), "has no queues (PyTorch added them in 2.8"),
    ("queue_pop", lambda store: store.queue_pop("q"), "has no queues (PyTorch added them in 2.8"),
    ("poll", lambda store: store.queue_pop("q", False), "has no queues (PyTorch added them in 2.8"),
]


@clients
@pytest.mark.parametrize(("call", "said"), [case[1:] for case in CALLS], ids=[case[0] for case in CALLS])
def test_methods_that_older_servers_cannot_have(
    newest: int, call: Callable[[Store], Any], said: str, client: str
) -> None:
    """It is said at once, and the store goes on, with what it has written."""
    lacks = ("list_keys", "queue_push", "queue_len", "queue_pop")
    with older(newest, *lacks) as port, either_client(client) as connect, ThreadPoolExecutor(8) as threads:
        store = connect(port)
        store.append("log", ".")
        with store.clone() as clone:
            for one in [threads.submit(call, store) for _ in range(20)] + [threads.submit(call, clone)]:
                with pytest.raises(NotImplementedError, match=re.escape(said)):
                    one.result(LIMIT)
        assert store.get("log").endswith(b".")


@clients
def test_a_value_ends_a_wait_for_a_queue(newest: int, client: str) -> None:
    """The server has queues and cannot list keys, which is how that is told apart elsewhere."""
    with older(newest, "list_keys") as port, either_client(client) as connect:
        store = connect(port)
        store.set(f"plain {client}", "v")
        with pytest.raises(QueueEmptyError):
            store.queue_pop(f"plain {client}")


def test_a_server_that_stops_during_the_probe(newest: int) -> None:
    """That is a lost connection, and no word of what it may lack."""
    with (
        fake_server(lambda peer: answer_one(peer, newest)) as fake,
        TCPStore("127.0.0.1", fake.port, timeout=LIMIT) as store,
        pytest.raises(DistNetworkError),
    ):
        store.queue_len("q")


def answer_one(peer: socket.socket, newest: int) -> None:
    """A handshake with PING, and the end of the connection at the first question."""
    hello = peer.recv(6, socket.MSG_WAITALL)
    with socket.create_connection(("127.0.0.1", newest), LIMIT) as server:
        server.sendall(hello + peer.recv(4, socket.MSG_WAITALL))
        peer.sendall(server.recv(4, socket.MSG_WAITALL))
    peer.recv(1)


# What may happen while a server is tried


class Second:
    """A proxy whose second connection shakes hands and then does what `talk` says."""

    def __init__(self, newest: int, talk: Callable[[socket.socket], None]) -> None:
        self.newest = newest
        self.talk = talk
        self.connections = 0
        self.tried = threading.Event()

    def __call__(self, peer: socket.socket) -> None:
        self.connections += 1
        if self.connections == 2:
            greet(peer)
            peer.recv(1)
            self.tried.set()
            self.talk(peer)
            return
        with answering(peer, self.newest) as server:
            pump(peer, server, set())


def hush(peer: socket.socket) -> None:
    while peer.recv(65536):
        pass


def test_closing_ends_a_probe(newest: int) -> None:
    second = Second(newest, hush)
    with fake_server(second) as fake, ThreadPoolExecutor(1) as threads:
        store = TCPStore("127.0.0.1", fake.port, timeout=-1)
        asking = threads.submit(store.queue_len, "q")
        assert second.tried.wait(LIMIT)
        store.close()
        with pytest.raises(DistNetworkError, match="the store has been closed"):
            asking.result(LIMIT)


async def test_closing_ends_a_try_of_the_async_client(newest: int) -> None:
    second = Second(newest, hush)
    with fake_server(second) as fake:
        store = await AsyncTCPStore.connect("127.0.0.1", fake.port, timeout=-1)
        asking = asyncio.create_task(store.queue_len("q"))
        await asyncio.to_thread(second.tried.wait, LIMIT)
        await store.close()
        with pytest.raises(DistNetworkError, match="the store has been closed"):
            await asyncio.wait_for(asking, LIMIT)
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_one_callers_time_is_not_anothers(newest: int) -> None:
    """The first, who begins the try, has little of it."""
    answer = threading.Event()

    def late(peer: socket.socket) -> None:
        answer.wait(LIMIT)

    with fake_server(Second(newest, late)) as fake:
        async with await AsyncTCPStore.connect("127.0.0.1", fake.port, timeout=LIMIT) as store:
            await store.server()
            hasty = asyncio.create_task(store.barrier("b", 1, 0.05))
            patient = asyncio.create_task(store.barrier("b", 1, LIMIT))
            with pytest.raises(StoreTimeoutError, match="barrier timeout after 50ms"):
                await hasty
            assert not patient.done()
            answer.set()
            await asyncio.wait_for(patient, LIMIT)


def cut(peer: socket.socket) -> None:
    """The connection is lost, though the server knows what it is asked."""


@clients
def test_one_lost_probe_proves_nothing(newest: int, client: str) -> None:
    with fake_server(Second(newest, cut)) as fake, either_client(client) as connect:
        assert connect(fake.port).queue_len("q") == 0


@clients
def test_a_barrier_over_keys_keeps_its_timeout(newest: int, client: str) -> None:
    """Though the server has stopped, and the store's is another."""
    frozen = threading.Event()
    with stopping(newest, frozen) as port, either_client(client) as connect:
        store = connect(port)
        store.barrier(f"{client} before", 1)
        frozen.set()
        with pytest.raises(StoreTimeoutError, match=f"barrier timeout after 100ms, key: {client} after"):
            store.barrier(f"{client} after", 1, 0.1)


@contextmanager
def stopping(newest: int, frozen: threading.Event) -> Iterator[int]:
    """A server without BARRIER that answers no more once `frozen` is set."""

    def talk(peer: socket.socket) -> None:
        with answering(peer, newest) as server:
            while (data := peer.recv(65536)) and data[0] != BY_METHOD["barrier"].opcode:
                if not frozen.is_set():
                    server.sendall(data)

    with fake_server(talk) as fake:
        yield fake.port
