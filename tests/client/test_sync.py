"""The connections under the synchronous stores: threads, interruptions, forks."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from support import LIMIT, RawPeer, blob, tcpstore_server, torch_server
from tcpstore_async import DistNetworkError, StoreTimeoutError
from tcpstore_async.blob import pack
from tcpstore_async.client.sync import TCPClient


@pytest.fixture(scope="module", params=["ours", "libuv", "legacy"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    if request.param == "ours":
        with tcpstore_server() as server:
            yield server.port
    else:
        with torch_server(request.param) as found:
            yield found


@pytest.fixture
def client(port: int) -> Iterator[TCPClient]:
    client = TCPClient("127.0.0.1", port, LIMIT)
    yield client
    client.close()


_numbers = iter(range(1_000_000))


@pytest.fixture
def key() -> bytes:
    return b"/key%d" % next(_numbers)


def wait(client: TCPClient, *keys: bytes, seconds: float = LIMIT) -> None:
    client.park("wait", (list(keys),), seconds, "out of time")


def test_calls(client: TCPClient, key: bytes) -> None:
    client.ask("set", key, pack(b"1"))
    wait(client, key)
    assert client.ask("get", key) == blob(b"1")
    assert client.ask("add", key, 41) == 42
    assert client.ask("check", [key, b"/no"]) is False
    client.ask("set", key, pack(b"x" * 8_000_000))
    assert client.ask("get", key) == blob(b"x" * 8_000_000)


def test_a_blocked_thread_blocks_no_other(client: TCPClient, key: bytes) -> None:
    names = [key + b"/%d" % number for number in range(10)]
    with ThreadPoolExecutor(len(names)) as threads:
        waits = [threads.submit(wait, client, name) for name in names]
        assert client.ask("add", key, 1) == 1
        for name in names:
            client.ask("set", name, pack(b""))
        for one in waits:
            one.result(LIMIT)


def test_time_outs_leave_it_in_step(client: TCPClient, key: bytes) -> None:
    for seconds in (0.0, 0.001, 0.03):
        with pytest.raises(StoreTimeoutError, match=r"^out of time$"):
            wait(client, key, seconds=seconds)
        assert client.ask("ping", 5) == 5
    client.ask("set", key, pack(b""))
    wait(client, key)


def test_what_a_thread_wrote_is_there_for_every_thread(client: TCPClient, key: bytes) -> None:
    """While others park on further connections: a read must not overtake a silent write."""
    stop = threading.Event()

    def park_again_and_again() -> None:
        while not stop.is_set():
            with pytest.raises(StoreTimeoutError):
                wait(client, key + b"never", seconds=0.001)

    with ThreadPoolExecutor(4) as threads:
        parking = [threads.submit(park_again_and_again) for _ in range(3)]
        try:
            for number in range(300):
                client.ask("set", key + b"/%d" % number, pack(b"x" * 5000))
                seen = threads.submit(client.ask, "check", [key + b"/%d" % number]).result(LIMIT)
                assert seen is True
        finally:
            stop.set()
        for one in parking:
            one.result(LIMIT)


def test_many_threads_against_a_count(client: TCPClient, key: bytes) -> None:
    def work(seed: int) -> int:
        rng = random.Random(seed)
        mine = 0
        for number in range(60):
            what = rng.randrange(4)
            if what == 0:
                client.ask("set", key + b"/%d" % seed, pack(b"%d" % number))
                assert client.ask("get", key + b"/%d" % seed) == blob(b"%d" % number)
            elif what == 1:
                with pytest.raises(StoreTimeoutError):
                    wait(client, key + b"never", seconds=rng.random() / 100)
            else:
                assert client.ask("add", key, 1) > 0
                mine += 1
        return mine

    with ThreadPoolExecutor(32) as threads:
        assert client.ask("add", key, 0) == 0
        total = sum(threads.map(work, range(32)))
    assert client.ask("add", key, 0) == total


def test_closing_ends_what_others_wait_for(client: TCPClient, key: bytes) -> None:
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(wait, client, key)
        while not any(channel.parked for channel in list(client._channels)):
            client.ask("ping", 1)
        client.close()
        with pytest.raises(DistNetworkError):
            waiting.result(LIMIT)
    with pytest.raises(DistNetworkError, match="has been closed"):
        client.ask("ping", 1)


def test_a_server_that_goes_is_noticed() -> None:
    with tcpstore_server() as server:
        client = TCPClient("127.0.0.1", server.port, LIMIT)
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(wait, client, b"/k")
            assert client.ask("ping", 1) == 1
            server.stop(signal.SIGKILL)
            with pytest.raises(DistNetworkError, match=r"remote server shutdown|reset|Broken pipe"):
                waiting.result(LIMIT)
        client.close()


def test_a_silent_server_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        connecting = threads.submit(TCPClient, "127.0.0.1", listener.getsockname()[1], LIMIT)
        peer, _ = listener.accept()
        with peer:
            hello = b""
            while len(hello) < 10:
                hello += peer.recv(10)
            peer.sendall(hello[6:])
            client = connecting.result(LIMIT)
            client.timeout = 0.05
            with pytest.raises(StoreTimeoutError, match=r"^add timeout after 50ms$"):
                client.ask("add", b"/a", 1)
            client.close()


def test_a_forked_child_has_connections_of_its_own(client: TCPClient, key: bytes) -> None:
    client.ask("set", key, pack(b"parent"))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = b"failed"
        try:
            client.ask("set", key + b"child", pack(b"child"))
            said = client.ask("get", key)[8:]
            client.close()
        finally:
            os.write(writing, said)
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == b"parent"
    os.waitpid(child, 0)
    assert client.ask("get", key + b"child") == blob(b"child")


INTERRUPTED = """
import sys, threading, os, signal
from tcpstore_async.client.sync import TCPClient
client = TCPClient("127.0.0.1", int(sys.argv[1]), 60.0)
print("ready", flush=True)
try:
    client.park("wait", ([b"/never"],), 60.0, "out of time")
except KeyboardInterrupt:
    print("interrupted, and in step:", client.ask("ping", 7), flush=True)
"""


def test_an_interrupt_ends_a_wait_and_leaves_it_in_step(port: int) -> None:
    command = [sys.executable, "-c", INTERRUPTED, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tempfile.gettempdir()) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        parked(port)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b"interrupted, and in step: 7\n"
        assert process.wait(LIMIT) == 0


def parked(port: int) -> None:
    """Give the other process's request time to come, in round trips of our own."""
    with RawPeer(port) as peer:
        for _ in range(200):
            peer.ping()
