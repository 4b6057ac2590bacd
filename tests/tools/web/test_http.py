"""What is answered over HTTP: paths, who may ask, and limits. The server is a stub; test_processes.py has real ones."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import re
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
from web.requests import get, request, until
from web.scenes import large_reply
from web.stub import COUNTERS, AdminStub, answering, named_store

from support import LIMIT
from tcpstore_async.base.errors import DistNetworkError
from tcpstore_async.server.peer_user import PeerUsers, UnknownOwnerError
from tcpstore_async.stacks.report import Doing, Group, HostReport
from tcpstore_async.tools.look.stacks import look_twice
from tcpstore_async.tools.web import http, looking
from tcpstore_async.tools.web.answers import Answer, Answers


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    path = tmp_path_factory.mktemp("stub") / "s"
    with AdminStub(path, large_reply(100, frozenset({3}))), answering(path) as port:
        yield port


def raw(port: int, data: bytes) -> bytes:
    """Everything that is answered until the connection is closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT) as peer:
        peer.sendall(data)
        answer = b""
        while chunk := peer.recv(65536):
            answer += chunk
        return answer


def test_health(port: int) -> None:
    assert get(port, "/livez") == (200, "alive\n")
    assert get(port, "/readyz") == (200, "ready\n")


def test_only_what_reads_is_allowed(port: int) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH", "BREW"):
        response, _ = request(port, "/api/state", method)
        assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")
    response, body = request(port, "/", "HEAD")
    assert (response.status, body) == (200, b"")
    assert int(response.headers["Content-Length"]) > 1000
    for path in ("/../etc/passwd", "/page/app.js", "/api", "/app.js/", "/x//", f"http://localhost:{port}/"):
        assert request(port, path)[0].status == 404, path


def test_every_answer_has_the_headers_that_protect_the_page(port: int) -> None:
    for path in ("/", "/app.js", "/style.css", "/icon.svg", "/api/state", "/metrics", "/livez", "/nothing"):
        headers = request(port, path)[0].headers
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["X-Frame-Options"] == "DENY"
        assert "Access-Control-Allow-Origin" not in headers


def test_a_foreign_name_for_this_address_is_refused(port: int) -> None:
    """Else the page of whoever has the name could read what is answered."""
    port = port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "[::1", "a@evil.example", ""):
        assert get(port, "/api/state", Host=host)[0] == 421, host
    for host in ("localhost", f"LOCALHOST:{port}", f"127.0.0.1:{port}", "[::1]:80", "10.1.2.3", socket.gethostname()):
        assert get(port, "/livez", Host=host)[0] == 200, host
    two = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    assert raw(port, two).startswith(b"HTTP/1.1 421 ")
    assert raw(port, b"GET /livez HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")  # no browser


def test_a_foreign_page_may_not_ask(port: int) -> None:
    for site in ("cross-site", "same-site"):
        assert get(port, "/api/state", Sec_Fetch_Site=site)[0] == 403
        assert get(port, "/", Sec_Fetch_Site=site)[0] == 200  # a link to it
    assert get(port, "/api/state", Sec_Fetch_Site="same-origin")[0] == 200


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"\x16\x03\x01\x02\x00\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /?" + b"&".join([b"a=b"] * 100) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_requests_that_are_none(port: int, request_: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT) as peer:
        peer.sendall(request_)
        assert re.match(rb"HTTP/1.1 (400|505) ", peer.recv(65536))
    assert get(port, "/livez")[0] == 200


def test_a_request_without_end_is_closed(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT) as peer:
        try:
            peer.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (1 << 20))
            while peer.recv(65536):
                pass
        except ConnectionError:
            pass  # closed while there was more
    assert get(port, "/livez")[0] == 200


def test_silent_connections_are_bounded_and_keep_nobody_out(port: int) -> None:
    """The oldest of them makes way."""
    peers = [socket.create_connection(("127.0.0.1", port), timeout=LIMIT) for _ in range(64)]
    try:
        for peer in peers:
            peer.setblocking(False)
        closed: set[int] = set()

        def some_are_closed() -> bool:
            for number, peer in enumerate(peers):
                with suppress(BlockingIOError):
                    if peer.recv(12) == b"":
                        closed.add(number)
            return len(closed) >= len(peers) - http.MOST_CONNECTIONS

        until(some_are_closed)
        assert closed == set(range(len(peers) - http.MOST_CONNECTIONS))
        for _ in range(http.MOST_CONNECTIONS):
            assert get(port, "/livez")[0] == 200
    finally:
        for peer in peers:
            peer.close()
    until(lambda: get(port, "/livez")[0] == 200)


def test_what_takes_too_long_is_closed(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if something arrives all the time."""
    monkeypatch.setattr(http, "_REQUEST_SECONDS", 0.05)
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT) as peer:

        def is_closed() -> bool:
            try:
                peer.sendall(b"x")
                peer.setblocking(False)
                return peer.recv(1) == b""
            except BlockingIOError:
                return False
            except ConnectionError:
                return True
            finally:
                peer.settimeout(LIMIT)

        until(is_closed)
    monkeypatch.undo()
    assert get(port, "/livez")[0] == 200


def test_one_connection_serves_many_requests(port: int) -> None:
    one = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answers = raw(port, one * 5 + last)
    assert answers.count(b"HTTP/1.1 200 OK") == 6
    assert answers.endswith(b"ready\n")


# What is known of the server


def test_the_state(port: int) -> None:
    found = json.loads(get(port, "/api/state")[1])
    assert found["silent"] == 0
    assert found["server"]["host"] == "::1"
    assert found["figures"]["keys"] == 77
    look = until(lambda: json.loads(get(port, "/api/state")[1])["look"])
    assert look["ranks"] == "w3m1w96"


def test_one_rank(port: int) -> None:
    until(lambda: json.loads(get(port, "/api/state")[1])["look"])
    detail = json.loads(get(port, "/api/rank?number=17")[1])["detail"]
    assert (detail["host"], detail["port"], detail["pid"]) == ("node-00002", 40000, 1017)
    assert detail["does"] == "is waiting for store_based_barrier_key:default_pg:last_worker"
    assert json.loads(get(port, "/api/rank?number=3")[1])["detail"] is None
    for wrong in ("", "x", "-1", "9" * 20, "%D9%A3"):
        assert get(port, f"/api/rank?number={wrong}")[0] == 404


def test_what_the_processes_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One look serves all pages for a while; only one is under way."""
    reports = [{"stacks": HostReport("node-00000", [Group([1000, 1001], Doing("stopped"), [0.0, 0.0])])}]
    reply = [*large_reply(100, frozenset({3}))[:-1], *map(msgspec.json.encode, [*reports, {"end": True}])]
    monkeypatch.setattr(looking, "look_twice", functools.partial(look_twice, seconds=0.01))
    with AdminStub(tmp_path / "s", reply) as admin, answering(admin.path) as port:
        lines = json.loads(get(port, "/api/stacks")[1])["lines"]
        assert any(line.startswith("ranks 0-1 (node-00000, pid 1000; node-00000, pid 1001): stopped") for line in lines)
        assert json.loads(get(port, "/api/stacks")[1])["lines"] == lines
        assert admin.asked.count(["stacks"]) == 2
        meanwhile: list[tuple[int, str]] = []

        def fail(*_: object) -> NoReturn:
            meanwhile.append(get(port, "/api/stacks?store=another"))
            raise DistNetworkError("gone")

        monkeypatch.setattr(looking, "look_twice", fail)
        assert get(port, "/api/stacks?store=one") == (503, "gone\n")
        assert meanwhile == [(503, "another look is under way\n")]


def test_processes_are_not_looked_at_for_pages_that_others_reach(tmp_path: Path) -> None:
    answers = Answers(looking.Looker(lambda: tmp_path), stacks=False)
    refused = answers.answer("/api/stacks", {}, "")
    assert isinstance(refused, Answer)
    assert refused.status == 403


def test_who_looks_does_not_ask(tmp_path: Path) -> None:
    """However many look, the server is asked for everything once in a while, and not while nobody does."""
    with AdminStub(tmp_path / "s", large_reply(100, frozenset())) as admin, answering(admin.path) as port:
        until(lambda: len(admin.asked) > 2)
        assert all(request == COUNTERS for request in admin.asked)
        for _ in range(50):
            until(lambda: json.loads(get(port, "/api/state")[1])["look"])
        looks = [request for request in admin.asked if request != COUNTERS]
        assert 1 <= len(looks) < 10
        assert looks[0] == ["sessions", "counters", "keys"]


def test_a_store_with_a_name(tmp_path: Path) -> None:
    """It is listed, and shown if it is asked for: only those ranks that are in it."""
    reply = large_reply(10, frozenset())
    sessions = json.loads(reply[1])
    for session in sessions["sessions"][:3]:
        session["store"] = "a&b c"
    reply[1] = json.dumps(sessions).encode()
    with AdminStub(tmp_path / "s", reply) as admin, answering(admin.path) as port:
        admin.oldest = [named_store("a&b c")]
        admin.others = 4711
        found = until(lambda: (one := json.loads(get(port, "/api/state")[1]))["stores"] and one["look"] and one)
        assert found["stores"] == [
            {"name": "a&b c", "owner": "node7, pid 4711", "age": 90, "joined": 2, "expected": 8, "sessions": 3,
             "keys": 5, "bytes": 700}
        ]  # fmt: skip
        assert found["more_stores"] == 4711
        assert found["look"]["sessions"] == 7
        look = until(lambda: json.loads(get(port, "/api/state?store=a%26b+c")[1])["look"])
        assert look["sessions"] == 3
        assert set(admin.stores) == {None, "a&b c"}
        assert json.loads(get(port, "/api/rank?number=1&store=a%26b+c")[1])["detail"]["pid"] == 1001
        assert json.loads(get(port, "/api/rank?number=5&store=a%26b+c")[1])["detail"] is None


def test_the_number_of_stores_that_are_looked_at_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "MOST_STORES", 2)
    with AdminStub(tmp_path / "s", large_reply(1, frozenset())) as admin, answering(admin.path) as port:
        for store in ("one", "two"):
            assert json.loads(get(port, f"/api/state?store={store}")[1])["failed"] == ""
        failed = json.loads(get(port, "/api/state?store=three")[1])["failed"]
        assert failed == "2 other stores are already being inspected, the maximum"
        monkeypatch.setattr(looking, "_WANTED_SECONDS", 0.0)  # the others are no longer looked at
        assert json.loads(get(port, "/api/state?store=three")[1])["failed"] == ""


def test_operations(tmp_path: Path) -> None:
    with AdminStub(tmp_path / "s", large_reply(1, frozenset())) as admin, answering(admin.path) as port:
        until(lambda: admin.asked)
        admin.stats = {**admin.stats, "uptime": 101.0, "commands": {"SET": 15, "GET": 120, "WAIT": 0}}
        found = until(lambda: (one := json.loads(get(port, "/api/state")[1]))["ops"] and one)
        assert found["ops"][0] == 105
        assert found["commands"] == [["GET", 100.0], ["SET", 5.0]]


def test_a_server_that_is_not_ready(tmp_path: Path) -> None:
    with AdminStub(tmp_path / "s", []) as admin, answering(admin.path) as port:
        admin.server = {**admin.server, "accepting": False}
        until(lambda: get(port, "/readyz") == (503, "the server is no longer accepting connections\n"))
        admin.server = {**admin.server, "accepting": True, "connections": 100}
        until(lambda: get(port, "/readyz") == (503, "the server is at its connection limit\n"))
        assert "tcpstore_writes_held 0.0\n" in get(port, "/metrics")[1]
        admin.server = {**admin.server, "connections": 1, "why_held": "the journal cannot grow"}
        until(lambda: get(port, "/readyz") == (503, "the journal cannot grow\n"))
        assert "tcpstore_writes_held 1.0\n" in get(port, "/metrics")[1]
        assert json.loads(get(port, "/api/state")[1])["server"]["why_held"] == "the journal cannot grow"
        assert get(port, "/livez")[0] == 200


@pytest.mark.parametrize("reply", [[b"nonsense"], [b'{"error": "not now"}'], []])
def test_a_server_that_answers_nonsense(tmp_path: Path, reply: list[bytes]) -> None:
    with AdminStub(tmp_path / "s", reply) as admin, answering(admin.path) as port:
        found = until(lambda: (one := json.loads(get(port, "/api/state")[1]))["failed"] and one)
        assert found["look"] is None
        assert get(port, "/livez")[0] == 200
        assert admin.asked


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with answering(tmp_path / "none") as port:
        status, text = get(port, "/livez")
        assert status == 503
        assert "there is no admin socket" in text
        assert get(port, "/readyz")[0] == 503
        assert "tcpstore_up 0.0\n" in get(port, "/metrics")[1]
        found = json.loads(get(port, "/api/state")[1])
        assert found["look"] is None
        assert "there is no admin socket" in found["failed"]
        assert get(port, "/")[0] == 200


def test_queries_that_fail_are_logged_when_that_begins_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(looking, "_EVERY_SECONDS", 0.01)
    caplog.set_level(logging.INFO)
    attempts = itertools.count()
    done = threading.Event()

    def find() -> Path:
        attempt = next(attempts)
        if attempt > 9:
            done.set()
        if attempt in (0, 1, 2, 5, 6):
            raise DistNetworkError(f"failed at {attempt}")
        return admin.path

    with AdminStub(tmp_path / "s", []) as admin, closing(looking.Looker(find)) as looker:
        looker.start()
        assert done.wait(LIMIT)
    for thread in looker.threads:
        thread.join(LIMIT)
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said[:4] == [
        ("WARNING", "cannot query the server; retrying every second: failed at 0"),
        ("INFO", "the server is answering queries"),
        ("WARNING", "cannot query the server; retrying every second: failed at 5"),
        ("INFO", "the server is answering queries"),
    ]


def test_metrics_without_what_they_need(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert get(port, "/metrics")[0] == 200
    monkeypatch.setitem(sys.modules, "tcpstore_async.tools.web.metrics", None)
    status, text = get(port, "/metrics")
    assert status == 501
    assert "pip install 'tcpstore-async[metrics]'" in text


def test_metrics_name_stores_to_the_same_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with AdminStub(tmp_path / "s", []) as admin, answering(admin.path, same_user=True) as port:
        admin.oldest = [named_store("secret")]
        until(lambda: 'tcpstore_named_store_keys{store="secret"} 5.0' in get(port, "/metrics")[1])
        monkeypatch.setattr(PeerUsers, "look_up", lambda *_: 12345)
        text = get(port, "/metrics")[1]
        assert "secret" not in text
        assert 'tcpstore_named_store_keys{store="(others)"} 5.0' in text


def test_names_are_for_the_same_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(tmp_path / "none", same_user=True) as port:
        assert get(port, "/api/state")[0] == 200
        monkeypatch.setattr(PeerUsers, "look_up", lambda *_: 12345)
        assert [get(port, path)[0] for path in ("/", "/app.js", "/api/state")] == [403, 403, 403]
        assert get(port, "/livez")[0] == 503
        assert get(port, "/metrics")[0] == 200

        def unknown(*_: object) -> int:
            raise UnknownOwnerError("nobody knows")

        monkeypatch.setattr(PeerUsers, "look_up", unknown)
        assert get(port, "/api/state")[0] == 403
