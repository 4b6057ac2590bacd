"""Looking in from elsewhere: replies of the admin socket over HTTP, and the commands that ask for them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from web.requests import get, request, until
from web.scenes import large_reply
from web.stub import SERVER, AdminStub, answering, stats

from commands import run_command
from support import LIMIT, RawPeer, Server, blob, keys, tcpstore_server
from tcpstore_async import TCPStore
from tcpstore_async.client.admin import ask
from tcpstore_async.client.server_url import HttpUrl, parse_http_url
from tcpstore_async.server.peer_user import PeerUsers
from tcpstore_async.tools.web import http, replies

LOOKS = (
    ["who"],
    ["who", "--missing"],
    ["who", "--missing", "--store", "node7:4711"],
    ["waiters"],
    ["stores"],
    ["stat", "--count", "1"],
    ["stat", "--store", "node7:4711"],
    ["top"],
)


@pytest.fixture(scope="module")
def server(module_sockets: Path) -> Iterator[Server]:
    """A server with a rank that waits, known by its environment only, and a store with a name."""
    with (
        tcpstore_server("--http", "127.0.0.1:0") as server,
        RawPeer(server.port) as one,
        RawPeer(server.port) as two,
        TCPStore("node7", 4711, 1, True, LIMIT, server=f"tcp://127.0.0.1:{server.port}") as owner,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"RANK": "3"}) as rank,
    ):
        owner.set("key", "value")
        one.send(b"\x01" + blob(b"/step_5") + blob(b"x"))
        one.ping()
        two.ping(rank.pid)
        two.send(b"\x06" + keys(b"/step_8") + b"\x0d" + b"abcd")
        two.read(4)
        yield server
        rank.communicate(b"\n")


def url_of(server: Server) -> str:
    return str(json.loads(server.ready)["http"])


def over_http(server: Server, *words: str) -> Result:
    return run_command(None, *words, "--url", url_of(server))


def settled(value: Any) -> Any:
    """Without what changes from one look to the next."""
    if isinstance(value, list):
        return [settled(one) for one in value]
    if isinstance(value, dict):
        return {name: settled(one) for name, one in value.items() if not isinstance(one, float) and name != "commands"}
    return value


@pytest.mark.parametrize("words", LOOKS, ids=" ".join)
def test_the_same_output(server: Server, words: list[str]) -> None:
    words = [*words, "-o", "json"]
    there, here = over_http(server, *words), run_command(server, *words)
    looks_at_processes = "--missing" in words
    assert (there.exit_code, there.stderr) == (int(looks_at_processes), "")
    found, expected = settled(json.loads(there.stdout)), settled(json.loads(here.stdout))
    if looks_at_processes:
        assert found.pop("processes") is None
        assert expected.pop("processes")["seen"] == 1
    if words[0] == "top":
        for one in (found, expected):
            for name in ("connections", "waiting", "sessions", "keys", "bytes"):
                assert one["now"].pop(name) is not None
    assert found == expected


def test_environments_of_the_servers_machine(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are asked from, a process with the same number is another one."""
    monkeypatch.setattr("tcpstore_async.tools.look.local.read_environment", lambda pid: {"RANK": "8"})
    found = json.loads(over_http(server, "who", "-o", "json").stdout)
    assert [one["rank"] for one in found if one["rank"] is not None] == [3]


def test_text(server: Server) -> None:
    assert over_http(server, "waiters").stdout.startswith("step_8: 1 waiting for ")
    assert over_http(server, "stat").stdout.split()[0] == "CONNECTIONS"


def test_the_variable(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCPSTORE_URL", url_of(server))
    assert run_command(None, "stores").stdout.splitlines()[1].startswith("node7:4711")


def test_commands_that_need_the_server_itself(server: Server) -> None:
    for words in (["ping"], ["get", "k"], ["clients"], ["monitor"], ["keys"], ["latency"], ["stores", "drop", "x"]):
        done = over_http(server, *words)
        assert done.exit_code == 2, words
        assert "only who, waiters, stat, top and stores take http://" in done.output.replace("\n", " ")


def test_an_address_that_is_none() -> None:
    assert parse_http_url("http://[::1]:9400/") == HttpUrl("::1", 9400)
    assert parse_http_url("http://node7") == HttpUrl("node7", 80)
    for url in ("http://", "http://a:b", "http://a:1/x", "http://a:1?b", "https://a:1", "http://u@a:1"):
        with pytest.raises(ValueError, match="is not of the form http://HOST:PORT"):
            parse_http_url(url)
    done = run_command(None, "who", "--url", "http://::1:9400")
    assert (done.exit_code, "as in http://[::1]:9400" in done.output) == (2, True)


# What is answered


def lines_of(port: int, query: str) -> list[Any]:
    response, body = request(port, f"/api/lines?{query}")
    assert (response.status, response.headers["Content-Type"]) == (200, "application/x-ndjson")
    assert response.headers["Cache-Control"] == "no-store"
    return [json.loads(line) for line in body.splitlines()]


def test_lines(tmp_path: Path) -> None:
    """As the socket sends them, and what this machine knows of sessions."""
    reply = large_reply(10, frozenset())
    with AdminStub(tmp_path / "s", reply) as admin, answering(admin.path) as port:
        found = lines_of(port, "ask=sessions,counters,keys&store=a%26b")
        assert [line for line in found if "environments" not in line] == list(map(json.loads, reply))
        assert [line for line in found if "environments" in line] == [{"environments": {}}] * (len(found) - len(reply))
        assert admin.asked[-1] == ["sessions", "counters", "keys"]
        assert admin.stores[-1] == "a&b"
        for _ in range(replies.MOST_REPLIES):
            assert request(port, "/api/lines?ask=keys", "HEAD")[0].status == 200
        until(lambda: get(port, "/api/lines?ask=keys")[0] == 200)


def test_what_may_not_be_asked_for(tmp_path: Path) -> None:
    """Nothing that shows values, never ends or changes anything."""
    with AdminStub(tmp_path / "s", []) as admin, answering(admin.path) as port:
        for part in ("monitor", "stacks"):
            assert get(port, f"/api/lines?ask=keys,{part}")[0] == 400
        assert "unknown part 'x'" in get(port, "/api/lines?ask=x")[1]
        until(lambda: admin.asked)
        admin.facts = [json.dumps(line).encode() for line in ({"server": SERVER}, {"stats": stats()}, {"end": True})]
        assert lines_of(port, "ask=stats&drop=store&values=1&every=1")[-1] == {"end": True}
        assert set(admin.said[-1]) == {"ask", "store"}


def test_who_may_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with AdminStub(tmp_path / "s", large_reply(1, frozenset())) as admin:
        with answering(admin.path) as port:
            assert get(port, "/api/lines?ask=keys", Host="evil.example")[0] == 421
            assert get(port, "/api/lines?ask=keys", Sec_Fetch_Site="cross-site")[0] == 403
            done = run_command(None, "who", "--url", f"http://localhost:{port}")
            assert done.exit_code == 0, done.output
        with answering(admin.path, same_user=True) as port:
            monkeypatch.setattr(PeerUsers, "look_up", lambda *_: 12345)
            done = run_command(None, "who", "--url", f"http://127.0.0.1:{port}")
            assert (done.exit_code, "only processes running as the server's user" in done.stderr) == (5, True)


LARGE = [b'{"server":{}}', *[b'{"keys":[["' + b"x" * 1_000_000 + b'",1]]}'] * 40, b'{"end":true}']
"""More than the kernel takes while nobody reads."""


def ask_without_reading(port: int) -> socket.socket:
    peer = socket.create_connection(("127.0.0.1", port), timeout=LIMIT)
    peer.sendall(b"GET /api/lines?ask=keys HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert peer.recv(12) == b"HTTP/1.1 200"
    return peer


def test_replies_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beyond are refused, and commands ask again; the page is answered."""
    monkeypatch.setattr(replies, "MOST_REPLIES", 1)
    with AdminStub(tmp_path / "s", LARGE) as admin, answering(admin.path) as port:
        peer = ask_without_reading(port)
        response, body = request(port, "/api/lines?ask=keys")
        assert (response.status, response.headers["Retry-After"]) == (503, "5")
        assert body == b"other requests are being answered; there may be 1 at a time\n"
        assert get(port, "/")[0] == 200
        done = run_command(None, "who", "--url", f"http://127.0.0.1:{port}", "--timeout", "0.5")
        assert (done.exit_code, "other requests are being answered" in done.stderr) == (3, True), done.output
        found: list[list[bytes]] = []
        waiting = threading.Thread(target=lambda: found.append(list(ask(HttpUrl("127.0.0.1", port), ["keys"], LIMIT))))
        waiting.start()
        peer.close()
        waiting.join(LIMIT)
        assert found == [LARGE]


def test_who_does_not_read_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "MOST_REPLIES", 1)
    monkeypatch.setattr(http, "_LINES_SECONDS", 0.05)
    with AdminStub(tmp_path / "s", LARGE) as admin, answering(admin.path) as port, ask_without_reading(port):
        admin.facts = [b'{"end":true}']
        until(lambda: get(port, "/api/lines?ask=keys")[0] == 200)


# What is not there


def test_no_server(tmp_path: Path) -> None:
    with answering(tmp_path / "none") as port:
        done = run_command(None, "who", "--url", f"http://127.0.0.1:{port}")
    assert (done.exit_code, "there is no admin socket" in done.stderr) == (4, True)
    done = run_command(None, "who", "--url", f"http://127.0.0.1:{port}")
    assert done.exit_code == 4
    assert "Connection refused; is 'tcpstore serve --http' or 'tcpstore http' running there?" in done.stderr


def test_a_store_that_is_not_there(server: Server) -> None:
    done = over_http(server, "who", "--missing", "--store", "none:1")
    assert (done.exit_code, done.stderr) == (1, "Error: there is no store 'none:1'\n")


class _Foreign(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404, "\x1b[31m" + "x" * 500)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_another_servers_port(server: Server) -> None:
    with HTTPServer(("127.0.0.1", 0), _Foreign) as foreign:
        thread = threading.Thread(target=foreign.handle_request)
        thread.start()
        done = run_command(None, "who", "--url", f"http://127.0.0.1:{foreign.server_address[1]}")
        thread.join(LIMIT)
    assert (done.exit_code, "is not the HTTP process of a tcpstore_async server" in done.stderr) == (1, True)
    done = run_command(None, "who", "--url", f"http://127.0.0.1:{server.port}", "--timeout", str(LIMIT))
    assert done.exit_code in (1, 4), done.output  # the store's own port closes what speaks HTTP


def test_a_reply_that_is_cut(tmp_path: Path) -> None:
    with AdminStub(tmp_path / "s", large_reply(1, frozenset())[:-1]) as admin, answering(admin.path) as port:
        done = run_command(None, "who", "--url", f"http://127.0.0.1:{port}")
    assert (done.exit_code, "the admin socket's reply is incomplete" in done.stderr) == (1, True)
