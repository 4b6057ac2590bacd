"""Addresses, the backlog, the limit on open files, and the rate-limited log."""

import logging
import os
import re
import resource
import select
import socket
import tempfile
from collections.abc import Iterator

import pytest

from support import LIMIT, deferred_for
from tcpstore_async.base.errors import DistNetworkError
from tcpstore_async.server import listen_socket
from tcpstore_async.server.listen_socket import (
    DEFER_ACCEPT,
    adopt,
    listen,
    max_connections_by_files,
    reserve_connections,
)
from tcpstore_async.server.rate_limited_log import RateLimitedLog
from tcpstore_async.serving import serve

pytestmark = pytest.mark.interpreted


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1", 0) as listener:
        yield listener


def test_a_listener(listener: socket.socket) -> None:
    host, port = listener.getsockname()
    assert host == "127.0.0.1"
    assert port > 0
    assert not listener.getblocking()
    assert not listener.get_inheritable()
    assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
    with socket.create_connection((host, port), LIMIT) as client:
        listener.setblocking(True)
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert client.getpeername() == (host, port)


def test_the_backlog_is_that_of_a_whole_job() -> None:
    assert listen_socket.BACKLOG == 65_535


@pytest.mark.needs_proc
# quirk: defer-accept
def test_a_connection_is_held_until_its_peer_has_sent_something() -> None:
    with listen("127.0.0.1", 0, 60) as listener, socket.socket() as silent:
        silent.connect(listener.getsockname())
        with socket.create_connection(listener.getsockname(), LIMIT) as other:
            other.sendall(b"x")
            assert accepted(listener) == other.getsockname()
        with pytest.raises(BlockingIOError):
            listener.accept()
        silent.sendall(b"x")
        assert accepted(listener) == silent.getsockname()


@pytest.mark.needs_proc
# quirk: defer-accept
def test_a_peer_that_never_sends_is_accepted_all_the_same() -> None:
    with listen("127.0.0.1", 0, DEFER_ACCEPT) as listener:
        with socket.create_connection(listener.getsockname(), LIMIT) as silent:
            assert accepted(listener) == silent.getsockname()
        with socket.create_connection(listener.getsockname(), LIMIT) as probe:  # one that only connects, and leaves
            probe.shutdown(socket.SHUT_WR)
            assert accepted(listener) == probe.getsockname()


def accepted(listener: socket.socket) -> object:
    """Wait for a connection; return the address of its peer."""
    assert select.select([listener], [], [], LIMIT)[0]
    with listener.accept()[0] as peer:
        return peer.getpeername()


@pytest.mark.parametrize("has_option", [False, True])
def test_where_connections_cannot_be_held(has_option: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if has_option:
        monkeypatch.setattr(socket, "TCP_DEFER_ACCEPT", 9999, raising=False)
    else:
        monkeypatch.delattr(socket, "TCP_DEFER_ACCEPT", raising=False)
    with listen("127.0.0.1", 0, 60) as listener, socket.create_connection(listener.getsockname(), LIMIT) as silent:
        assert accepted(listener) == silent.getsockname()


@pytest.mark.needs_proc
async def test_only_sockets_of_its_own_are_told_to_hold_connections() -> None:
    async with serve() as server:
        assert deferred_for(server.listener) == DEFER_ACCEPT
    with socket.create_server(("127.0.0.1", 0)) as given:
        async with serve(listener=given.dup()):
            assert deferred_for(given) == 0


@pytest.mark.skipif(not socket.has_ipv6, reason="there is no IPv6 here")
@pytest.mark.parametrize(("host", "only"), [("::", 0), ("::1", 1)])
def test_ipv6(host: str, only: int) -> None:
    with listen(host, 0) as listener:
        assert listener.family == socket.AF_INET6
        assert listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == only


def test_a_port_in_use(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with pytest.raises(DistNetworkError, match=rf"^cannot listen on 127\.0\.0\.1:{port}: Address already in use\b"):
        listen("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no address", "a" * 300, "a..b"])
def test_an_address_that_is_not_ours(host: str) -> None:
    with pytest.raises(DistNetworkError, match=f"^cannot listen on {host}"):
        listen(host, 0)


@pytest.mark.parametrize("port", [-1, 65_536, 70_000])
def test_a_port_that_is_none(port: int) -> None:
    with pytest.raises(ValueError, match=f"^port must be from 0 to 65535, not {port}$"):
        listen("127.0.0.1", port)


@pytest.mark.parametrize("listening", [False, True])
def test_a_socket_from_elsewhere(listening: bool) -> None:
    with socket.socket() as given:
        given.bind(("127.0.0.1", 0))
        if listening:
            given.listen(1)
        with adopt(os.dup(given.fileno())) as adopted:
            assert adopted.getsockname() == given.getsockname()
            assert not adopted.getblocking()
            socket.create_connection(adopted.getsockname(), LIMIT).close()


def test_what_is_no_listener_is_refused() -> None:
    with pytest.raises(DistNetworkError, match="file descriptor 9999"):
        adopt(9999)
    with tempfile.TemporaryFile() as file, pytest.raises(DistNetworkError, match="cannot listen on file descriptor"):
        adopt(os.dup(file.fileno()))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as given:
        fd = os.dup(given.fileno())
        with pytest.raises(DistNetworkError, match="it is not a TCP socket"):
            adopt(fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    with socket.socket(socket.AF_UNIX) as given, pytest.raises(DistNetworkError, match="it is not a TCP socket"):
        adopt(os.dup(given.fileno()))
    near, far = socket.socketpair()
    with near, far, pytest.raises(DistNetworkError, match="it is not a TCP socket"):
        adopt(os.dup(near.fileno()))


def test_a_connected_socket_is_no_listener(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname(), LIMIT) as given:
        fd = os.dup(given.fileno())
        with pytest.raises(DistNetworkError, match=f"cannot listen on file descriptor {fd}: "):
            adopt(fd)


def test_max_connections_is_the_file_limit_less_a_reserve() -> None:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    before = max_connections_by_files()
    assert before < soft - listen_socket.RESERVE
    files = [os.dup(0) for _ in range(10)]
    assert max_connections_by_files() == before - 10
    for file in files:
        os.close(file)


def test_few_connections_are_logged_only_if_the_file_limit_is_the_reason(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert reserve_connections(listener, "127.0.0.1", 1, 10) == 10
    assert not caplog.messages
    monkeypatch.setattr(listen_socket, "max_connections_by_files", lambda: 40)
    assert reserve_connections(listener, "127.0.0.1", 1, 0) == 40
    assert reserve_connections(listener, "127.0.0.1", 1, 100) == 40
    assert reserve_connections(listener, "127.0.0.1", 1, 10) == 10
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert caplog.messages == [f"ulimit -n is {files} and allows only 40 connections; raise it"] * 2


def test_limited_of_one_kind_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    limited = RateLimitedLog()
    for i in range(50):
        limited.add("key_bytes", f"peer {i}")
        limited.add("keys", f"other peer {i}")
    limited.flush()
    limited.flush()
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert messages[:2] == ["peer 0", "other peer 0"]
    assert sorted(messages[-2:]) == [
        "suppressed 49 similar messages (kind: key_bytes)",
        "suppressed 49 similar messages (kind: keys)",
    ]
    assert len(messages) == 4


def test_a_single_message_has_no_count(caplog: pytest.LogCaptureFixture) -> None:
    limited = RateLimitedLog()
    limited.add("key_bytes", "peer")
    limited.flush()
    assert [record.getMessage() for record in caplog.records] == ["peer"]


class Clock:
    """A clock that a test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_failure_that_lasts_is_logged_ever_less_often(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    limited = RateLimitedLog(clock=clock)
    logged = []
    for second in range(400):
        if limited.add("upstream", f"cannot connect, attempt {second}"):
            logged.append(second)
        clock.now += 1
    assert logged == [0, 1, 3, 7, 15, 31, 63, 123, 183, 243, 303, 363]
    assert caplog.messages[-1] == "cannot connect, attempt 363 (59 similar messages suppressed)"
    clock.now += 120
    assert limited.add("upstream", "cannot connect, attempt 400")  # it had stopped
    assert caplog.messages[-1].endswith("(36 similar messages suppressed)")
    clock.now += 1
    assert limited.add("upstream", "cannot connect, attempt 401")


def test_another_failure_is_logged_at_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    limited = RateLimitedLog(clock=clock)
    for text in ["refused"] * 20 + ["no answer"]:
        limited.add("upstream", text)
        clock.now += 1
    assert [message.partition(" (")[0] for message in caplog.messages] == ["refused"] * 5 + ["no answer"]
    assert caplog.messages[-1] == "no answer (4 similar messages suppressed)"


def test_counts_are_logged_when_they_are_due(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    limited = RateLimitedLog(clock=clock)
    assert limited.flush_due() == 0
    for _ in range(1200):  # ten messages a second
        limited.add("accept", "too many open files")
        limited.flush_due()
        clock.now += 0.1
    limited.flush()
    text = " ".join(caplog.messages)
    counted = sum(map(int, re.findall(r"(\d+) similar", text)))
    assert counted + text.count("too many open files") == 1200
    assert len(caplog.messages) < 12
