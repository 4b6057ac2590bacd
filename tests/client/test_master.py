"""A store that hosts its server, and the ranks that join it."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from support import LIMIT, free_port, tcpstore_server, torch_server, until
from tcpstore_async import DistNetworkError, DistStoreError, TCPStore
from tcpstore_async.base.deadline import Deadline
from tcpstore_async.stores import own_address

pytestmark = [pytest.mark.slow, pytest.mark.measured, pytest.mark.interpreted]

SOON = 3.0
"""Enough for a server to start on a busy machine."""


@pytest.fixture
def port() -> int:
    return free_port()


def is_free(port: int) -> None:
    """Listen on the port, as the next server would."""
    with socket.socket(socket.AF_INET6) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("::", port))
        listener.listen()


# quirk: master-wait
def test_all_join(port: int) -> None:
    with ThreadPoolExecutor(3) as threads, ExitStack() as stack:
        workers = [threads.submit(TCPStore, "localhost", port, 4, False, LIMIT) for _ in range(3)]
        master = stack.enter_context(TCPStore("localhost", port, 4, True, LIMIT))
        for worker in workers:
            store = stack.enter_context(worker.result(LIMIT))
            assert store.port == port
        assert master.num_keys() == 1
        assert master.list_keys() == []
        assert master.add("n", 1) == 1
        assert repr(master).endswith(f"server=TCPServer(port={port}))")
    is_free(port)


def test_some_do_not_join() -> None:
    for timeout, said in ((1.3, 2), (2.0, 2), (0, 0)):
        began = time.monotonic()
        with pytest.raises(DistStoreError, match=rf"^Timed out after {said} seconds waiting for clients\. 1/2 clients"):
            TCPStore("127.0.0.1", 0, 2, True, timeout)
        assert time.monotonic() - began < LIMIT / 2


def test_nobody_is_waited_for(port: int) -> None:
    with TCPStore("127.0.0.1", port, 9, True, LIMIT, wait_for_workers=False) as store:
        assert store.num_keys() == 0
        with TCPStore("127.0.0.1", port, 9, False, LIMIT, False):
            assert store.num_keys() == 0
    for world_size in (None, -1, -5):
        with TCPStore("127.0.0.1", 0, world_size, True, LIMIT) as store:
            assert store.num_keys() == 0
            assert store.port > 0


@pytest.mark.parametrize("agent", ["1", "True"])
def test_an_agent_hosts(agent: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    monkeypatch.setenv("MASTER_PORT", str(port))
    with TCPStore("127.0.0.1", port, None, True, LIMIT) as store:
        assert "TCPServer" in repr(store)
        with TCPStore("127.0.0.1", port, None, True, LIMIT) as other:
            assert "server=<nullptr>" in repr(other)
            store.set("k", "v")
            assert other.get("k") == b"v"
        monkeypatch.setenv("MASTER_PORT", "1")
        with pytest.raises(DistNetworkError, match="EADDRINUSE"):
            TCPStore("127.0.0.1", port, None, True, LIMIT)


def test_a_listener_of_the_callers(port: int) -> None:
    listener = socket.socket(socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    with TCPStore("127.0.0.1", port, None, True, LIMIT, master_listen_fd=listener.detach()) as store:
        assert store.add("n", 1) == 1
    is_free(port)


ROUNDS = """
import sys
from tcpstore_async import TCPStore
port, rounds = int(sys.argv[1]), int(sys.argv[2])
for turn in range(rounds):
    with TCPStore("127.0.0.1", port, 2, False, 60) as store:
        assert store.compare_set("first1", "", str(turn)) == str(turn).encode()
        store.set("rank1", str(turn))
        assert store.get("rank0") == str(turn).encode()
        store.barrier("over", 2)
"""


# quirk: early-rank
def test_a_rank_that_is_a_round_ahead(port: int) -> None:
    """It connects before the master has closed the last round's server, and ends up on the next one."""
    command = [sys.executable, "-W", "error", "-c", ROUNDS, str(port), "1"]
    with ThreadPoolExecutor(1) as threads:
        early = threads.submit(TCPStore, "127.0.0.1", port, 2, False, LIMIT)
        master = TCPStore("127.0.0.1", port, 2, True, LIMIT)
        early.result(LIMIT).close()
    master.set("first1", "of the first round")
    ahead = subprocess.Popen(command, cwd=tempfile.gettempdir())
    try:
        while joined(master) < 3:
            assert ahead.poll() is None
        master.close()
        with TCPStore("127.0.0.1", port, 2, True, LIMIT) as store:
            assert store.get("rank1") == b"0"
            store.set("rank0", "0")
            store.barrier("over", 2)
            assert ahead.wait(LIMIT) == 0
    finally:
        ahead.kill()
        ahead.wait(LIMIT)


def joined(store: TCPStore) -> int:
    from tcpstore_async.stores import tcp

    assert store._client is not None
    return tcp._joined(store._client, Deadline(LIMIT))


TWICE = """
import sys
from tcpstore_async import TCPStore
TCPStore("127.0.0.1", int(sys.argv[1]), 2, timeout=60).close()
print("left", flush=True)
sys.stdin.readline()
with TCPStore("127.0.0.1", int(sys.argv[1]), 2, timeout=60) as store:
    print("there again", flush=True)
    sys.stdin.readline()
    print(store.add("n", 1), flush=True)
"""


@pytest.mark.parametrize("libuv", [True, False])
def test_a_second_store_of_the_same_ranks_is_no_next_round(libuv: bool, port: int) -> None:
    """The master's world is complete before the others join, because the counter of ranks says so."""
    command = [sys.executable, "-W", "error", "-c", TWICE, str(port)]
    with subprocess.Popen(
        command, cwd=tempfile.gettempdir(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            first = TCPStore("127.0.0.1", port, 2, True, LIMIT, multi_tenant=True, use_libuv=libuv)
            assert worker.stdout.readline() == "left\n"
            second = TCPStore("127.0.0.1", port, 2, True, LIMIT, multi_tenant=True, use_libuv=libuv)
            print(file=worker.stdin, flush=True)
            assert worker.stdout.readline() == "there again\n"
            first.close()
            second.close()
            print(file=worker.stdin, flush=True)
            assert worker.stdout.readline() == "1\n"
            assert worker.wait(LIMIT) == 0
        finally:
            worker.kill()


def test_a_constructor_that_fails_leaves_nothing(port: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = threading.active_count()
        with pytest.raises(DistStoreError, match="1/2 clients joined"):
            TCPStore("127.0.0.1", port, 2, True, SOON)
        is_free(port)
        until(lambda: threading.active_count() == before)  # the server's log is listened to until it has ended


def test_an_address_of_another_machine(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A master waits for its own server there: the log says so early, and the error does."""
    monkeypatch.setattr(own_address, "_SLOW_SECONDS", 0.0)
    said = f"192.0.2.1 is not an address of this machine, where this store's server listens on port {port}: "
    with pytest.raises(DistNetworkError, match=said):  # an address for documentation
        TCPStore("192.0.2.1", port, 1, True, SOON)
    assert [record.levelname for record in caplog.records if said in record.getMessage()] == ["WARNING"]


@pytest.mark.parametrize("host", ["localhost", "no.such.host.invalid"])
def test_an_address_that_may_lead_here(host: str, caplog: pytest.LogCaptureFixture) -> None:
    """A name that is not known yet may be, once its pod has started."""
    own = own_address.OwnAddress(host, 29500)
    own._check()
    assert (own.fault, caplog.records) == ("", [])


def test_closing_again_and_again(port: int) -> None:
    store = TCPStore("127.0.0.1", port, None, True, LIMIT)
    with ThreadPoolExecutor(4) as threads:
        for one in [threads.submit(store.close) for _ in range(4)]:
            one.result(LIMIT)
    is_free(port)
    with pytest.raises(DistNetworkError, match="the store has been closed"):
        store.add("n", 1)


def test_a_clone_does_not_keep_the_server(port: int) -> None:
    with TCPStore("127.0.0.1", port, None, True, LIMIT) as store:
        clone = store.clone()
    with clone:
        is_free(port)


@pytest.mark.parametrize("server", ["ours", "libuv", "legacy"])
def test_world_size_on_a_server_that_stands(server: str) -> None:
    """A rank that is not the master joins and returns at once, however many others have joined."""
    with tcpstore_server() if server == "ours" else torch_server(server) as running:
        at = running if isinstance(running, int) else running.port
        with TCPStore("127.0.0.1", at, 3, False, LIMIT) as store:
            assert joined(store) == 1
            with TCPStore("127.0.0.1", at, 3, False, LIMIT):
                assert joined(store) == 2
