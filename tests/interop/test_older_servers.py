"""Our clients on servers like PyTorch's older ones, which close the connection for a command that they do not know.

The server is PyTorch's own of today, behind a proxy that closes where an older one would; `make matrix` has the old
ones themselves.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from client.fakes import fake_server
from support import LIMIT, torch_server
from tcpstore_async import AsyncTCPStore, DistNetworkError, StoreTimeoutError, TCPStore
from tcpstore_async.wire.commands import BY_METHOD

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
        with socket.create_connection(("127.0.0.1", newest), LIMIT) as server:
            server.sendall(hello)
            back = threading.Thread(target=pump, args=(server, peer, set()))
            back.start()
            try:
                pump(peer, server, unknown)
            finally:
                server.shutdown(socket.SHUT_RDWR)
                back.join(LIMIT)

    with fake_server(talk) as fake:
        yield fake.port


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


def test_barriers_of_a_server_without_them(newest: int) -> None:
    """Over its keys, as PyTorch's stores without a barrier of their own make one; tried once for all threads."""
    with older(newest, "barrier") as port, TCPStore("127.0.0.1", port, timeout=LIMIT) as store:
        with ThreadPoolExecutor(8) as threads:
            for number in range(3):
                for one in [threads.submit(store.barrier, f"round {number}", 8) for _ in range(8)]:
                    one.result(LIMIT)
        with pytest.raises(StoreTimeoutError):
            store.barrier("incomplete", 2, 0.05)
        assert store.get("round 0/num_members") == b"8"


async def test_barriers_of_the_async_client(newest: int) -> None:
    with older(newest, "barrier") as port:
        async with AsyncTCPStore("127.0.0.1", port, timeout=LIMIT) as store:
            await store.ping()
            await asyncio.gather(*(store.barrier("async", 50) for _ in range(50)))
            with pytest.raises(StoreTimeoutError):
                await store.barrier("incomplete too", 2, 0.05)
            assert await store.get("async/num_members") == b"50"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda store: store.list_keys(), "PyTorch's server knows LIST_KEYS since 2.10."),
        (lambda store: store.queue_len("q"), "PyTorch's server knows QUEUE_LEN since 2.8, its legacy one never."),
        (
            lambda store: store.queue_pop("q", False),
            "PyTorch's server knows QUEUE_POP since 2.8, its legacy one never.",
        ),
    ],
    ids=["list_keys", "queue_len", "queue_pop"],
)
def test_what_nothing_can_be_done_about(newest: int, call: Callable[[TCPStore], Any], said: str) -> None:
    with older(newest, "list_keys", "queue_len", "queue_pop") as port:
        with TCPStore("127.0.0.1", port, timeout=LIMIT) as store, pytest.raises(DistNetworkError) as caught:
            call(store)
        assert str(caught.value).endswith(f" {said}")
