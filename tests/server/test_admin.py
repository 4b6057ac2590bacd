"""The admin socket of a running server."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from commands import run_command
from support import LIMIT, RawPeer, blob, keys, tcpstore_server
from tcpstore_async.base.errors import DistNetworkError, DistStoreError, ProtocolError, StoreTimeoutError
from tcpstore_async.client.admin import ask, find_local, is_local, read_environment
from tcpstore_async.client.aio import AsyncTCPStore
from tcpstore_async.diagnosis.facts import read_facts
from tcpstore_async.server import admin, admin_path
from tcpstore_async.server.backends import BACKENDS
from tcpstore_async.serving import serve
from tcpstore_async.stores.tcp import TCPStore

ALL = ["sessions", "counters", "keys"]


def dead_socket(path: Path) -> None:
    """What a server that was killed leaves behind."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_cannot_connect() -> None:
    """Even where the folder would let it: the path was the user's choice."""
    code = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = str(Path(folder, "admin"))
        with tcpstore_server("--admin", path):
            for user, status, error in ((65534, 1, "PermissionError"), (0, 0, "")):
                command = ["/usr/bin/env", "python3", "-c", code, path]
                done = subprocess.run(command, user=user, cwd="/", capture_output=True, text=True, timeout=LIMIT)
                assert (done.returncode, error in done.stderr) == (status, True), done.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_answers_and_is_gone_afterwards(sockets: Path, backend: str) -> None:
    with tcpstore_server("--backend", backend) as server:
        path = sockets / f"{server.port}.sock"
        assert admin_path.find(server.port) == [path]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with RawPeer(server.port) as one, RawPeer(server.port) as other:
            one.ping(4711)
            one.send(b"\x01" + blob(b"/k") + blob(b"value") + b"\x0d" + b"abcd")
            one.read(4)
            other.send(b"\x06" + keys(b"/missing") + b"\x0d" + b"abcd")
            other.read(4)
            facts = read_facts(ask(path, ALL, 60.0))
            assert facts.server["port"] == server.port
            assert {session.pid: session.wait and session.wait.keys for session in facts.sessions} == {
                4711: None,
                int.from_bytes(b"abcd", "little"): ["/missing"],
            }
            (key,) = facts.keys
            assert (key.key, key.size) == ("/k", 5)
            assert key.age is not None
            assert 0 <= key.age < 60
        assert server.stop() == 0
        assert list(sockets.iterdir()) == []


def test_the_ready_line_names_it(sockets: Path, tmp_path: Path) -> None:
    chosen = tmp_path / "chosen"
    for options, expected in [((), None), (("--admin", str(chosen)), str(chosen)), (("--admin", ""), "")]:
        with tcpstore_server(*options) as server:
            ready = json.loads(server.ready)
            assert ready.get("admin", "") == (str(sockets / f"{server.port}.sock") if expected is None else expected)
            assert server.stop() == 0
    assert not chosen.exists()


def test_the_server_process_of_a_master_has_one(sockets: Path) -> None:
    with TCPStore("127.0.0.1", 0, 1, True) as store:
        store.set("key", "value")
        (path,) = admin_path.find(store.port)
        facts = read_facts(ask(path, ALL, 60.0))
        assert {key.key for key in facts.keys} >= {"/key", "init/"}
        assert facts.server["pid"] != os.getpid()
        assert [session.pid for session in facts.sessions][:1] == [os.getpid()]
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(60.0)
            probe.connect(str(path))
            store.close()
            assert probe.recv(1) == b""  # the file goes first
    assert list(sockets.iterdir()) == []


@pytest.mark.parametrize("libuv", [True, False])
def test_so_does_the_server_thread_of_a_master(sockets: Path, monkeypatch: pytest.MonkeyPatch, libuv: bool) -> None:
    monkeypatch.setenv("TCPSTORE_SERVER", "thread")
    with TCPStore("127.0.0.1", 0, 1, True, use_libuv=libuv) as store:
        store.set("key", "value")
        assert store.get("key") == b"value"  # SET has no reply
        (path,) = admin_path.find(store.port)
        facts = read_facts(ask(path, ALL, 60.0))
        assert {key.key for key in facts.keys} >= {"/key", "init/"}
        assert facts.server["pid"] == os.getpid()
    assert list(sockets.iterdir()) == []


async def test_a_long_reply_takes_few_turns_of_a_busy_loop(tmp_path: Path) -> None:
    """With a turn for each portion, it took seconds where turns were long, as with many busy clients."""
    chosen = tmp_path / "chosen"
    iterations = 0
    busy = True
    loop = asyncio.get_running_loop()

    def iterate() -> None:
        nonlocal iterations
        iterations += 1
        time.sleep(0.1)
        if busy:
            loop.call_soon(iterate)

    async with (
        serve(admin=str(chosen)) as server,
        await AsyncTCPStore.connect("127.0.0.1", server.port, timeout=60.0) as store,
    ):
        for first in range(0, 20_000, 1000):
            names = [str(number) for number in range(first, first + 1000)]
            await store.multi_set(names, names)
        iterate()
        facts = read_facts(await asyncio.to_thread(lambda: list(ask(chosen, ["keys"], 60.0))))
        busy = False
    assert len(facts.keys) == 20_000
    assert iterations < 90


async def test_peers_that_leave_before_the_reply_are_no_errors_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's streams hide theirs when they are collected, unless the future that reports it is collected first."""
    monkeypatch.delattr(asyncio.StreamReaderProtocol, "__del__")
    path = str(tmp_path / "chosen")
    async with serve(admin=path):
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(path)
                peer.sendall(b'{"ask": ["sessions"]}\n')
        assert await asyncio.to_thread(lambda: list(ask(Path(path), ["sessions"], LIMIT)))
    gc.collect()  # what is reported is an error of this test (`conftest`)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_so_does_a_programs_own_server_if_it_is_asked_for(sockets: Path, tmp_path: Path, backend: str) -> None:
    chosen = tmp_path / "chosen"
    async with serve(backend=backend, admin=str(chosen)) as server, serve(admin=None) as found, serve() as none:
        assert (server.admin, none.admin) == (str(chosen), "")
        assert admin_path.find(found.port) == [Path(found.admin)] == list(sockets.iterdir())
        async with await AsyncTCPStore.connect("127.0.0.1", server.port, timeout=60.0) as store:
            await store.set("key", "value")
            assert await store.get("key") == b"value"
            answer = await asyncio.to_thread(lambda: list(ask(chosen, ALL, 60.0)))
        assert [key.key for key in read_facts(answer).keys] == ["/key"]
    assert not chosen.exists()
    assert list(sockets.iterdir()) == []


def test_what_a_killed_server_has_left_is_replaced(sockets: Path) -> None:
    sockets.mkdir(mode=0o700)
    dead_socket(sockets / "1.sock")
    with tcpstore_server() as server:
        port = server.port
        server.process.kill()
        server.process.wait(60.0)
        assert (sockets / f"{port}.sock").exists()
    with tcpstore_server() as server:
        assert [path.name for path in sockets.iterdir()] == [f"{server.port}.sock"]


def test_a_socket_that_is_in_use_is_not_replaced(sockets: Path, tmp_path: Path) -> None:
    with tcpstore_server() as server:
        path = sockets / f"{server.port}.sock"
        assert admin_path.default_path(server.port) == sockets / f"{server.port}-{os.getpid()}.sock"
        with pytest.raises(DistNetworkError, match="another server is listening"):
            admin_path.listen(path)
        assert read_facts(ask(path, [], 60.0)).server["port"] == server.port


def test_paths_that_cannot_be_had(sockets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "file"
    other.write_text("kept")
    with pytest.raises(DistNetworkError, match="is not a socket"):
        admin_path.listen(other)
    assert other.read_text() == "kept"
    with pytest.raises(DistNetworkError, match="limited to 107 bytes"):
        admin_path.listen(tmp_path / ("x" * 100) / "s")
    with pytest.raises(DistNetworkError, match="No such file"):
        admin_path.listen(Path("/nowhere/s"))
    sockets.mkdir(mode=0o755)
    with pytest.raises(DistNetworkError, match="must be a directory that belongs to this user"):
        admin_path.default_path(1)
    sockets.rmdir()
    sockets.symlink_to(tmp_path)
    with pytest.raises(DistNetworkError, match="must be a directory that belongs to this user"):
        admin_path.default_path(1)
    assert admin_path.find(1) == []


def test_a_folder_that_others_can_enter_does_not_keep_a_server_from_starting(sockets: Path) -> None:
    sockets.mkdir(mode=0o755)
    with tcpstore_server() as server:
        assert "admin" not in json.loads(server.ready)
        assert "no admin socket" in server.log()


def test_a_runtime_folder_of_others_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Path(f"/tmp/tcpstore-{os.geteuid()}")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    assert admin_path.folders() == [shared]
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert admin_path.folders() == [shared]
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert admin_path.folders() == [shared]


def test_only_the_own_file_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with admin_path.listen(path):
        identity = admin_path.identify(path)
        path.unlink()
        path.write_text("another's")
        admin_path.remove(path, identity)
        admin_path.remove(path, None)
        assert path.read_text() == "another's"


@pytest.fixture
def full(tmp_path: Path) -> Iterator[socket.socket]:
    """A listener at `tmp_path / "full"` with a backlog that is full, as of a server that has been stopped."""
    path = str(tmp_path / "full")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(path)
        listener.listen(0)
        first.connect(path)
        yield listener


def test_a_backlog_that_stays_full_is_a_timeout(full: socket.socket) -> None:
    path = full.getsockname()
    with pytest.raises(StoreTimeoutError, match="the server is not accepting queries"):
        list(ask(Path(path), [], 0.1))
    done = run_command(None, "stat", "--admin", path, "--timeout", "0.1")
    assert done.exit_code == 3
    assert "is not accepting queries" in done.stderr


def test_a_backlog_that_is_full_for_a_moment(full: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    paused = []

    def accept(seconds: float) -> None:
        paused.append(seconds)
        full.accept()[0].close()

    monkeypatch.setattr(time, "sleep", accept)
    with pytest.raises(StoreTimeoutError, match="no complete reply"):  # it has connected
        list(ask(Path(full.getsockname()), [], 0.1))
    assert len(paused) == 1


@pytest.fixture
def server_path(sockets: Path) -> Iterator[Path]:
    with tcpstore_server() as server:
        yield sockets / f"{server.port}.sock"


def raw(path: Path, request: bytes) -> Any:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(60.0)
        peer.connect(str(path))
        peer.sendall(request)
        peer.shutdown(socket.SHUT_WR)
        data = b""
        while chunk := peer.recv(65536):
            data += chunk
    return [json.loads(line) for line in data.splitlines()]


@pytest.mark.parametrize("request_", [b"", b"\n", b"{}\n", b"\xff\n", b"[1]\n", b'{"ask": 1}\n', b"x" * 200_000])
def test_requests_that_are_none(server_path: Path, request_: bytes) -> None:
    (answer,) = raw(server_path, request_)
    assert answer["error"].startswith("invalid request")
    assert raw(server_path, b'{"ask": []}\n')[-1] == {"end": True}


def test_an_unknown_part(server_path: Path) -> None:
    with pytest.raises(DistStoreError, match="unknown part 'secrets'"):
        read_facts(ask(server_path, ["secrets"], 60.0))


def test_whoever_asks_and_does_not_read_holds_up_nobody(server_path: Path) -> None:
    port = int(server_path.stem)
    with RawPeer(port) as peer:
        for number in range(20_000):
            peer.send(b"\x01" + blob(b"/key%05d" % number) + blob(b""))
        peer.ping()
        silent = []
        try:
            for _ in range(3):
                one = socket.socket(socket.AF_UNIX)
                silent.append(one)
                one.connect(str(server_path))
                one.sendall(b'{"ask": ["keys"]}\n')
            peer.ping()
            assert len(read_facts(ask(server_path, ["keys"], 60.0)).keys) == 20_000
        finally:
            for one in silent:
                one.close()
        peer.ping()


def test_it_works_when_the_server_is_full(sockets: Path) -> None:
    with (
        tcpstore_server("--limit", "connections=2") as server,
        RawPeer(server.port) as one,
        RawPeer(server.port) as other,
    ):
        one.ping()
        other.ping()
        with RawPeer(server.port) as third:
            assert third.closed()
        facts = read_facts(ask(sockets / f"{server.port}.sock", ALL, 60.0))
        assert (facts.server["connections"], facts.server["max_connections"]) == (2, 2)


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(DistNetworkError, match="is the server running"):
        list(ask(tmp_path / "none", [], 60.0))
    dead_socket(tmp_path / "dead")
    with pytest.raises(DistNetworkError, match="Connection refused"):
        list(ask(tmp_path / "dead", [], 60.0))


def test_a_server_that_does_not_answer(tmp_path: Path) -> None:
    with admin_path.listen(tmp_path / "s"), pytest.raises(StoreTimeoutError, match=r"within 0\.01 s"):
        list(ask(tmp_path / "s", [], 0.01))


def test_a_reply_that_ends_early() -> None:
    for lines in ([], [b'{"server": {}}'], [b'{"sessions": 1}'], [b"\xff"], [b""]):
        with pytest.raises(ProtocolError):
            read_facts(lines)


def test_what_is_of_this_machine() -> None:
    assert is_local("127.0.0.1")
    assert is_local("localhost")
    assert not is_local("192.0.2.1")
    assert not is_local("no such name.invalid")
    hosts = ["127.0.0.1", "192.0.2.1", "::1", "127.0.0.2", "2001:db8::1", "localhost", "no such name.invalid", "%1"]
    assert find_local(hosts) == set(filter(is_local, hosts)) >= {"127.0.0.1", "127.0.0.2", "localhost"}


def test_environments_are_those_that_processes_were_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_environment(2**31 - 1) == {}
    assert set(read_environment(os.getpid())) <= {"RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"}


def test_lines_for_a_peer_that_has_gone_end_its_request() -> None:
    """Quietly: uvloop raises RuntimeError if a closed transport is written to, which was logged with a traceback."""

    async def main() -> None:
        here, there = socket.socketpair()
        with there:
            _, writer = await asyncio.open_unix_connection(sock=here)
            writer.transport.abort()
            await writer.wait_closed()
            with pytest.raises(ConnectionError):
                await admin._write(writer, b"{}\n")

    uvloop.run(main())
