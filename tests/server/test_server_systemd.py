"""A server and a relay under a service manager, played by the test: sockets, readiness, the watchdog, the end."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from support import LIMIT, RawPeer, deferred_for, tcpstore_server
from tcpstore_async.base.errors import DistNetworkError
from tcpstore_async.relay.process import RelayProcess
from tcpstore_async.server.master import host
from tcpstore_async.server.systemd import Manager, activated_fd, supervised

pytestmark = pytest.mark.interpreted

TCPSTORE = [sys.executable, "-m", "tcpstore_async"]

KINDS = [["serve"], ["serve", "--backend", "threaded"], ["relay", "--upstream", "tcp://127.0.0.1:1"]]


ACTIVATE = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1", LISTEN_FDNAMES="store")
os.execv(sys.argv[2], sys.argv[2:])
"""


class FakeManager:
    """The socket on which systemd is told."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        self.socket.settimeout(LIMIT)

    def told(self) -> list[str]:
        """Wait for the next message."""
        return self.socket.recv(4096).decode().split("\n")

    def told_nothing(self) -> bool:
        self.socket.setblocking(False)
        try:
            return not self.socket.recv(4096)
        except BlockingIOError:
            return True


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FakeManager]:
    if request.param == "abstract" and sys.platform != "linux":
        pytest.skip("only Linux has these")
    made = FakeManager(str(tmp_path / "notify") if request.param == "path" else f"@tcpstore-test-{os.getpid()}")
    with made.socket:
        yield made


@contextmanager
def service(
    words: list[str], environment: dict[str, str], passed: socket.socket | None = None
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a command as systemd does, and wait for its ready line; yields the process and its port."""
    command, fds = [*TCPSTORE, *words, "--port", "0"], tuple[int, ...]()
    if passed is not None:
        command, fds = [sys.executable, "-c", ACTIVATE, str(passed.fileno()), *command], (passed.fileno(),)
    process = subprocess.Popen(
        command, cwd=tempfile.gettempdir(), env={**os.environ, **environment}, pass_fds=fds,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())["port"]
        finally:
            process.kill()


@pytest.mark.parametrize("words", KINDS, ids=lambda words: words[-1].partition(":")[0])
def test_it_says_when_it_is_ready_and_alive_and_when_it_ends(words: list[str], manager: FakeManager) -> None:
    environment = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "100000"}
    with service(words, environment) as (process, port):
        ready, status = manager.told()
        assert ready == "READY=1"
        assert status.startswith(f"STATUS=listening on 127.0.0.1:{port}, 0 ")
        for _ in range(3):
            assert manager.told()[0] == "WATCHDOG=1"
        socket.create_connection(("127.0.0.1", port), LIMIT).close()
        process.send_signal(signal.SIGTERM)
        while (told := manager.told())[0] != "STOPPING=1":
            assert told[0].startswith(("STATUS=", "WATCHDOG=1"))
        assert process.wait(LIMIT) == 0
        _, errors = process.communicate()
        assert "service manager" not in errors


def test_the_status_counts_clients(tmp_path: Path) -> None:
    manager = FakeManager(str(tmp_path / "notify"))
    environment = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "100000"}
    with manager.socket, service(["serve"], environment) as (process, port), RawPeer(port) as peer:
        peer.ping()
        while "STATUS=" not in (told := manager.told()[-1]) or not told.endswith(", 1 client"):
            pass
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT) == 0


def test_another_process_watchdog_is_not_ours(manager: FakeManager) -> None:
    environment = {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1", "NOTIFY_SOCKET": manager.address}
    with closing(Manager(environment)) as told:
        assert told.watchdog == 0.0
    assert environment == {}
    mine = Manager({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())})
    assert mine.watchdog == 3.0
    assert not mine.is_there
    mine.beat("no one is told")
    assert Manager({"WATCHDOG_USEC": "often"}).watchdog == 0.0


def test_a_manager_that_has_gone_or_does_not_listen(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    manager = FakeManager(str(tmp_path / "notify"))
    told = Manager({"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "1000000"})
    for _ in range(10_000):  # more than its socket holds
        told.beat("x")
    assert told.is_there
    manager.socket.close()
    for _ in range(2):
        told.beat("y")
    assert caplog.messages == ["cannot notify the service manager: Connection refused"]
    assert not told.is_there


async def test_supervised(manager: FakeManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    counts = itertools.count()
    async with supervised(lambda: f"look {next(counts)}") as told:
        assert manager.told() == ["READY=1", "STATUS=look 0"]
        for number in (1, 2):
            assert await asyncio.to_thread(manager.told) == ["WATCHDOG=1", f"STATUS=look {number}"]
        told.stopping()
    assert not told.is_there
    assert "NOTIFY_SOCKET" not in os.environ
    async with supervised(lambda: "nobody is told") as told:
        told.stopping()


# Socket activation


@pytest.mark.parametrize("words", KINDS, ids=lambda words: words[-1].partition(":")[0])
def test_the_socket_of_a_socket_unit(words: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        early = RawPeer(port)  # before there is a server
        with early, service(words, {}, listener) as (process, announced):
            assert announced == port
            assert deferred_for(listener) == 0  # that is up to the unit
            if words[0] == "serve":
                early.ping()
            process.send_signal(signal.SIGINT)
            assert process.wait(LIMIT) == 0


def test_the_variables_of_another_process() -> None:
    environment = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "x", "HOME": "/"}
    assert activated_fd(environment) is None
    assert environment == {"HOME": "/"}
    assert activated_fd({}) is None


def test_several_sockets_or_none() -> None:
    for count in ("0", "2", "many", ""):
        with pytest.raises(DistNetworkError, match="one ListenStream="):
            activated_fd({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": count})


# Processes that are no services themselves


def test_a_relay_of_an_agent_leaves_the_agents_manager_alone(
    manager: FakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    with tcpstore_server(env={"NOTIFY_SOCKET": ""}) as server:
        relay = RelayProcess(f"tcp://127.0.0.1:{server.port}")
        with RawPeer(relay.port) as peer:
            peer.ping()
        relay.close()
    assert manager.told_nothing()


def test_a_masters_server_leaves_the_masters_manager_alone(
    manager: FakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    hosted = host(0)
    with RawPeer(hosted.port) as peer:
        peer.ping()
    hosted.release()
    assert manager.told_nothing()
