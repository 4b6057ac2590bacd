"""The HTTP process of a server, and `tcpstore http`: what real processes answer, and what the end of one means."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from web.requests import get, request, until
from web.scenes import large_reply
from web.stub import AdminStub, watched

from faults.fault_helpers import gone
from support import LIMIT, RawPeer, Server, blob, keys, resting, run_python, secret_file, tcpstore_server
from tcpstore_async.cli import main
from tcpstore_async.server.backends import BACKENDS
from tcpstore_async.server.http_process import HttpOptions, http_process
from tcpstore_async.server.listen_socket import listen
from tcpstore_async.stores.tcp import TCPStore

HTTP = ("--http", "127.0.0.1:0")


pytestmark = pytest.mark.usefixtures("module_sockets")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tcpstore_server(*HTTP) as server:
        yield server


def http_port(server: Server) -> int:
    return int(json.loads(server.ready)["http"].rstrip("/").rpartition(":")[2])


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def http_pid(server: Server) -> int:
    [pid] = until(lambda: [one for one in children(server.process.pid) if b"http" in command_of(one)])
    return int(pid)


def command_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def state(port: int) -> Callable[[], Any]:
    """What the page is told once there has been a look."""
    return lambda: (found := json.loads(get(port, "/api/state")[1]))["look"] and found


# Beside a server


def test_metrics(server: Server) -> None:
    with RawPeer(server.port) as peer:
        peer.send(b"\x01" + blob(b"/secret-key") + blob(b"secret-value"))
        peer.ping()
        found = until(lambda: (text := get(http_port(server), "/metrics")[1]) and 'command="SET"} 1.0' in text and text)
    assert "\ntcpstore_up 1.0\n" in found
    assert "\ntcpstore_connections 1.0\n" in found
    assert "secret" not in found
    response, body = request(http_port(server), "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert response.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert body.endswith(b"# EOF\n")


def test_the_state_has_no_values(server: Server) -> None:
    with RawPeer(server.port) as writer, RawPeer(server.port) as waiter:
        writer.send(b"\x01" + blob(b"/near_1") + blob(b"secret-value"))
        writer.ping()
        waiter.send(b"\x06" + keys(b"/near_2") + b"\x0d" + b"abcd")
        waiter.read(4)

        def waits() -> Any:
            text = get(http_port(server), "/api/state")[1]
            assert "secret-value" not in text
            look = json.loads(text)["look"]
            return look and look["waits"]

        [wait] = until(waits)
        assert (wait["key"], wait["nearest"][0]["key"]) == ("near_2", "near_1")


# Who lives how long


def test_a_server_that_stops_is_not_alive() -> None:
    with tcpstore_server(*HTTP) as server:
        until(lambda: get(http_port(server), "/readyz")[0] == 200)
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            until(lambda: get(http_port(server), "/livez")[0] == 503)
            status, text = get(http_port(server), "/readyz")
            assert status == 503
            assert text.startswith("the server has not answered for ")
            assert "\ntcpstore_up 0.0\n" in get(http_port(server), "/metrics")[1]
            assert json.loads(get(http_port(server), "/api/state")[1])["silent"] > 0
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        until(lambda: get(http_port(server), "/readyz")[0] == 200)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_server_that_drains_is_alive_and_not_ready(backend: str) -> None:
    with tcpstore_server(*HTTP, "--backend", backend, "--grace", "600") as server, RawPeer(server.port) as peer:
        peer.ping()
        until(lambda: get(http_port(server), "/readyz")[0] == 200)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: get(http_port(server), "/readyz") == (503, "the server is no longer accepting connections\n"))
        assert get(http_port(server), "/livez")[0] == 200
        peer.close()
        assert server.process.wait(LIMIT) == 0


@pytest.mark.needs_proc
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_the_process_ends_with_the_server(number: int) -> None:
    with tcpstore_server(*HTTP) as server:
        until(lambda: get(http_port(server), "/livez")[0] == 200)
        pid = http_pid(server)
        assert server.stop(number) == (-number if number == signal.SIGKILL else 0)
        until(lambda: gone(pid))
        with pytest.raises(ConnectionRefusedError):
            get(http_port(server), "/livez")
        assert "has ended" not in server.log()


@pytest.mark.needs_proc
def test_the_server_goes_on_without_the_process() -> None:
    with tcpstore_server(*HTTP) as server:
        until(lambda: get(http_port(server), "/livez")[0] == 200)
        pid = http_pid(server)
        os.kill(pid, signal.SIGTERM)  # for the server to decide
        assert get(http_port(server), "/livez")[0] == 200
        os.kill(pid, signal.SIGKILL)
        until(lambda: "exited with status" in server.log())
        [line] = [line for line in server.log().splitlines() if "ERROR" in line]
        assert f"the HTTP process (pid {pid}) exited with status -9: http://127.0.0.1:" in line
        with RawPeer(server.port) as peer:
            peer.ping()
        with pytest.raises(ConnectionRefusedError):
            get(http_port(server), "/livez")
        assert children(server.process.pid) == []
        assert server.stop() == 0
        assert server.log().count("exited with status") == 1


@pytest.mark.needs_proc
def test_a_server_without_it_has_no_process(server: Server) -> None:
    with tcpstore_server() as plain:
        assert "http" not in json.loads(plain.ready)
        resting(plain.process.pid)
        assert children(plain.process.pid) == []


# Without a server of its own


def test_the_server_of_a_master(sockets: Path) -> None:
    with TCPStore("127.0.0.1", 0, 1, True) as store:
        store.set("key", "value")
        with watched(sockets / f"{store.port}.sock") as page:
            assert get(page.port, "/readyz") == (200, "ready\n")
            found = until(state(page.port))
            assert found["server"]["port"] == store.port
            assert found["look"]["joined"] == 1
            assert page.stop(signal.SIGTERM) == 0
    assert json.loads(page.ready)["role"] == "http"


def test_only_the_same_user_sees_names(tmp_path: Path) -> None:
    """Root and this user do; that nobody else does is tried where users can be changed."""
    with watched(tmp_path / "none.sock", "--same-user") as page:
        assert get(page.port, "/api/state")[0] == 200
        if os.geteuid() != 0:
            return
        code = (
            "import encodings.idna, http.client, os, sys; os.setgid(65534); os.setuid(65534)\n"
            "for path in sys.argv[2:]:\n"
            "    peer = http.client.HTTPConnection('127.0.0.1', int(sys.argv[1])); peer.request('GET', path)\n"
            "    print(peer.getresponse().status); peer.close()"
        )
        paths = ["/", "/app.js", "/api/state", "/api/rank?number=1", "/metrics", "/livez"]
        assert run_python(code, page.port, *paths).split() == ["403", "403", "403", "403", "200", "503"]


@pytest.mark.needs_proc
def test_a_server_that_requires_tokens_of_everybody_shows_names_to_its_user_only(tmp_path: Path) -> None:
    secrets = secret_file(tmp_path / "secrets", "id:" + "s" * 40 + "\n")
    with tcpstore_server(*HTTP, "--token-keys", str(secrets), "--require-auth=all") as server:
        [child] = until(lambda: children(server.process.pid))
        assert "--same-user" in until(lambda: Path(f"/proc/{child}/cmdline").read_text()).split("\0")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "--http", "9400"], "'9400' is not of the form HOST:PORT"),
        (["serve", "--http", ":9400"], "is not of the form HOST:PORT"),
        (["serve", "--http", "::1:9400"], "is not of the form HOST:PORT"),
        (["serve", "--http", "127.0.0.1:65536"], "is not of the form HOST:PORT"),
        (["serve", "--http", "127.0.0.1:0", "--admin", ""], "--http needs the admin socket"),
        (["http", "--listen", "x"], "is not of the form HOST:PORT"),
    ],
)
def test_usage_errors(words: list[str], said: str) -> None:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2
    assert said in done.output


def test_a_port_that_is_taken_is_an_error_of_the_server(tmp_path: Path) -> None:
    with watched(tmp_path / "s") as page:
        for command in ("serve", "--port", "0", "--http"), ("http", "--listen"):
            done = CliRunner().invoke(main, [*command, f"127.0.0.1:{page.port}"])
            assert done.exit_code == 1
            assert f"cannot listen on 127.0.0.1:{page.port}: " in done.output


def test_it_warns_when_others_can_reach_it(tmp_path: Path) -> None:
    with tcpstore_server("--http", "0.0.0.0:0") as server:
        assert get(http_port(server), "/livez")[0] == 200
        until(lambda: "anyone who can reach it sees the names of keys and hosts" in server.log())
    with watched(tmp_path / "s") as page:
        assert get(page.port, "/")[0] == 200
        assert "reach" not in page.log()


def test_the_command_in_this_process(tmp_path: Path) -> None:
    """Told to end by a signal, as the others are in processes of their own."""
    with AdminStub(tmp_path / "s", large_reply(3, frozenset())) as admin, listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        main_thread = threading.main_thread().ident
        assert main_thread is not None

        def ask() -> tuple[int, str]:
            try:
                return get(port, "/readyz")
            finally:
                signal.pthread_kill(main_thread, signal.SIGTERM)

        words = ["http", "--admin", str(admin.path), "--listen-fd", str(listener.detach()), "--same-user"]
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask)
            done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["port"] == port
    assert answer.result() == (200, "ready\n")
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def own_http_pid() -> int:
    """The HTTP process that this one has just started."""
    [pid] = until(lambda: [pid for pid in children(os.getpid()) if b"--owner-fd" in command_of(pid)])
    return int(pid)


@pytest.mark.needs_proc
async def test_the_process_in_the_loop_of_another_program(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with AdminStub(tmp_path / "s", large_reply(3, frozenset())) as admin:
        listener = listen("127.0.0.1", 0)
        port = listener.getsockname()[1]
        async with http_process(str(admin.path), HttpOptions(listener, "http://x/", same_user=True)):
            loop = asyncio.get_running_loop()
            assert await loop.run_in_executor(None, get, port, "/livez") == (200, "alive\n")
            pid = own_http_pid()
            assert b"--same-user" in command_of(pid)
        assert gone(pid)
        assert "exited with status" not in caplog.text
        listener = listen("127.0.0.1", 0)
        async with http_process(str(admin.path), HttpOptions(listener, "http://x/")):
            pid = own_http_pid()
            os.kill(pid, signal.SIGKILL)
            while "exited with status -9: http://x/" not in caplog.text:
                await asyncio.sleep(0.01)
