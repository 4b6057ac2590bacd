"""Our clients over TLS: what they hold, and what interrupts and forks in the middle of TLS do to them."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from interrupts import interrupt
from support import LIMIT, Server, tcpstore_server
from tcpstore_async import AsyncTCPStore, DistNetworkError, TCPStore
from tcpstore_async.client.tls import TlsSocket
from tcpstore_async.links.single_client import ClientSingleLink
from tls.certificates import certificates
from tls.test_clients import descriptors

pytestmark = pytest.mark.needs_proc


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tcpstore_server(*certificates().serving()) as running:
        yield running


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in certificates().environment().items():
        monkeypatch.setenv(name, value)


def sockets() -> set[str]:
    """Return the sockets that this process has open."""
    return {name for name in descriptors() if name.startswith("socket:")}


def opened(store: TCPStore) -> TCPStore:
    """Have a store ask who its server is, and open its link."""
    assert store.queue_len("none") == 0
    return store


# What a store holds


def test_a_synchronous_store_has_one_socket_and_no_thread(server: Server) -> None:
    before, threads = sockets(), threading.active_count()
    with TCPStore("127.0.0.1", server.port, timeout=LIMIT) as store:
        assert (len(sockets() - before), threading.active_count()) == (1, threads)
        store.set("key", "value")
        with TCPStore("127.0.0.1", server.port, timeout=LIMIT, tls=False) as plain:
            assert plain.get("key") == b"value"
            held, threads = sockets(), threading.active_count()  # the loop that watches idle connections, of both
            assert store.get("key") == b"value"
            assert (sockets(), threading.active_count()) == (held, threads)


async def test_an_asynchronous_store_has_one_socket_and_no_thread(server: Server) -> None:
    before, threads = sockets(), threading.active_count()
    async with await AsyncTCPStore.connect("127.0.0.1", server.port, timeout=LIMIT) as store:
        await store.set("key", "value")
        assert await store.get("key") == b"value"
        assert len(sockets() - before) == 1
        assert threading.active_count() == threads


# Interrupts


def _append(into: list[Any], call: Callable[[], object]) -> None:
    into.append(call())


@pytest.mark.interpreted("compiled code has no steps between which an interrupt could strike")
@pytest.mark.parametrize("name", ["set", "add", "get", "large", "pop"])
# quirk: interrupted-send
def test_an_interrupt_at_every_step_is_resumed(server: Server, name: str) -> None:
    """A value is written once or not at all, none that was popped is lost, and the store lives on."""
    large = bytes(300_000)
    calls: dict[str, Callable[[TCPStore], object]] = {
        "set": lambda store: store.set(f"{name} a", "2"),
        "add": lambda store: store.add(f"{name} n", 1),
        "get": lambda store: store.get(f"{name} b"),
        "large": lambda store: store.append(f"{name} l", large),
        "pop": lambda store: store.queue_pop(f"{name} q"),
    }
    step, struck = 0, True
    with TCPStore("127.0.0.1", server.port, timeout=LIMIT, tls=False) as observer:
        observer.set(f"{name} b", large)
        while struck:
            with opened(TCPStore("127.0.0.1", server.port, timeout=LIMIT)) as store:
                taken: list[object] = []
                call = functools.partial(calls[name], store)
                store.set(f"{name} before", f"{step}")
                sum_before = observer.add(f"{name} n", 0)
                if name == "pop":
                    observer.queue_push(f"{name} q", f"{step}")
                struck = interrupt(functools.partial(_append, taken, call), step)
                assert store.get(f"{name} before") == b"%d" % step
                assert store.add(f"{name} after", 1) == step + 1
                assert store.add(f"{name} n", 0) - sum_before in ((0, 1) if struck else (name == "add",))
                if name == "pop":
                    items = [store.queue_pop(f"{name} q", False) for _ in range(store.queue_len(f"{name} q"))]
                    assert items + taken == [b"%d" % step]
            step += 1
    assert step > 20


def within_tls(frame: Any) -> bool:
    """Return whether a frame is within the encryption, and of TlsSocket's methods."""
    while frame is not None:
        if frame.f_code in (TlsSocket.send.__code__, TlsSocket.decrypt.__code__):
            return True
        frame = frame.f_back
    return False


@pytest.mark.interpreted("compiled code has no steps between which an interrupt could strike")
@pytest.mark.parametrize("writes", [False, True])
# quirk: interrupted-send
def test_without_a_link_an_interrupt_ends_a_store_whose_writes_it_may_have_lost(
    server: Server, writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = ClientSingleLink.begun
    monkeypatch.setattr(ClientSingleLink, "begun", lambda link, raw: begun(link, raw) and False)
    for step in (0, 1, 5):
        with opened(TCPStore("127.0.0.1", server.port, timeout=LIMIT)) as store:
            call = functools.partial(store.set, "k", "v") if writes else functools.partial(store.add, "n", 1)
            assert interrupt(call, step, within_tls)
            if not writes:
                assert store.check(["never"]) is False
                continue
            with pytest.raises(DistNetworkError, match="an interrupt struck within a send or receive"):
                store.check(["k"])


@pytest.mark.interpreted("compiled code has no steps between which an interrupt could strike")
# quirk: interrupted-send
def test_a_handler_within_tls_may_make_calls(server: Server) -> None:
    """It gets another connection, and the interrupted call goes on as if nothing had happened."""
    step, struck = 0, True
    while struck:
        with opened(TCPStore("127.0.0.1", server.port, timeout=LIMIT)) as store:
            sums: list[int] = []
            add = functools.partial(_append, sums, functools.partial(store.add, "handled", 1))
            struck = interrupt(add, step, within_tls, functools.partial(store.set, f"{step}", ""))
            assert sums == [step + 1]
            assert store.check([f"{step}"]) is struck
        step += 1
    assert step > 5


# Forks


@pytest.mark.unmeasured
def test_a_child_keeps_no_copy_and_says_nothing(server: Server) -> None:
    with opened(TCPStore("127.0.0.1", server.port, timeout=LIMIT)) as store:
        [connection] = store._connection()._connections
        mine = os.readlink(f"/proc/self/fd/{connection.peer.fileno()}")
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = 2 if mine in sockets() else 0 if store.add("child", 1) == 1 else 3
                store.close()
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        assert store.add("child", 1) == 2
        assert store._connection()._connections == [connection]
        assert os.readlink(f"/proc/self/fd/{connection.peer.fileno()}") == mine
