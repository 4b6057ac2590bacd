"""`tcpstore stat`, `latency`, `monitor`, `info` and `keys --sort size`: what they print, and how they fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from commands import run_command
from support import LIMIT, RawPeer, Server, blob, keys, tcpstore_server
from tcpstore_async.base.errors import DistStoreError, ProtocolError
from tcpstore_async.client.admin import ask
from tcpstore_async.diagnosis.rates import Histogram, Stats, between, read_look
from tcpstore_async.diagnosis.samples import read_samples
from tcpstore_async.tools.look.asking import in_bytes, in_seconds

STRANGE = b"/evil\x1b[31m\nkey"


@pytest.fixture(scope="module")
def server(module_sockets: Path) -> Iterator[Server]:
    """A server with two clients: one wrote three keys, one waits."""
    with tcpstore_server() as server, RawPeer(server.port) as one, RawPeer(server.port) as two:
        for key, size in ((b"/small", 1), (b"/large", 1000), (STRANGE, 10)):
            one.send(b"\x01" + blob(key) + blob(b"x" * size))
        one.ping(os.getpid())
        two.send(b"\x06" + keys(b"/missing") + b"\x0d" + b"abcd")
        two.read(4)
        yield server


def test_stat(server: Server) -> None:
    done = run_command(server, "stat")
    assert done.exit_code == 0
    header, row = done.stdout.splitlines()
    assert header.split() == ["CONNECTIONS", "WAITING", "OPS/S", "KEYS", "BYTES", "P99", "LAG", "QUEUE", "CPU"]
    assert row.split()[:4] == ["2", "1", "0", "3"]
    found = json.loads(run_command(server, "stat", "-o", "json").stdout)
    assert (found["connections"], found["sessions"], found["waiting"], found["keys"]) == (2, 2, 1, 3)
    assert found.keys() >= {"ops", "bytes", "p99", "lag", "accept_queue", "time", "seconds", "commands"}


def test_stat_again_and_again(server: Server) -> None:
    lines = run_command(server, "stat", "-i", "0.1", "--count", "21").stdout.splitlines()
    assert len(lines) == 23
    assert [line.startswith("CONN") for line in lines].count(True) == 2
    assert lines[0] == lines[21]


def started(command: str, server: Server, *options: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "tcpstore_async", command, "--url", f"tcp://127.0.0.1:{server.port}", *options]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_stat_ends_with_its_server() -> None:
    with tcpstore_server() as server, started("stat", server, "-i", "0.1", "-o", "json") as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        server.stop()
        _, errors = process.communicate(timeout=LIMIT)
        assert process.returncode == 4
        assert json.loads(errors)["status"] == 4


def test_latency(server: Server) -> None:
    lines = run_command(server, "latency", "--count", "30").stdout.splitlines()
    assert lines[0].startswith("30 round trips: min ")
    assert any(line.startswith("service time in the server: p50 ") for line in lines)
    assert any(line.startswith("lag of its event loop: p50 ") for line in lines)
    found = json.loads(run_command(server, "latency", "--count", "30", "-o", "json").stdout)
    assert found["count"] == 30
    assert 0 < found["min"] <= found["p50"] <= found["p99"] <= found["max"]
    assert found["server"]["service"]["p99"] > 0
    assert sum(found["server"]["lag"]["counts"]) > 0


def test_the_latency_of_a_server_that_cannot_be_asked() -> None:
    with tcpstore_server("--admin", "") as server:
        lines = run_command(server, "latency", "--count", "3").stdout.splitlines()
        assert len(lines) == 2
        assert lines[1].startswith("no service times from the server: there is no admin socket for port")
        assert json.loads(run_command(server, "latency", "--count", "3", "-o", "json").stdout)["server"] is None


def test_keys_by_size(server: Server) -> None:
    assert run_command(server, "keys", "--sort", "size").stdout.splitlines() == [
        "1000  large",
        "  10  evil\\x1b[31m\\nkey",
        "   1  small",
    ]
    found = json.loads(run_command(server, "keys", "--sort", "size", "--prefix", "l", "-o", "json").stdout)["keys"]
    assert [(one["key"], one["bytes"]) for one in found] == [("large", 1000)]
    assert run_command(server, "keys", "--sort", "size", "--prefix", "none").stdout == ""
    assert run_command(server, "keys").stdout.splitlines() == ["evil\\x1b[31m\\nkey", "large", "small"]


def test_info_of_a_full_server_comes_from_its_admin_socket() -> None:
    with tcpstore_server("--limit", "connections=1") as server, RawPeer(server.port) as one:
        one.ping()
        found = json.loads(run_command(server, "info", "-o", "json").stdout)
        assert (found["connections"], found["max_connections"], found["ping_milliseconds"]) == (1, 1, None)
        assert found["unreachable"] == "it has reached its maximum of 1 connection"
        assert "server: tcpstore_async" in run_command(server, "info").stdout


def test_info_of_a_server_that_lets_nobody_in(tmp_path: Path) -> None:
    """Whatever keeps a client out, the admin socket answers; to what is no network error there is no other answer."""
    ready: dict[str, Any]
    with tcpstore_server() as server:
        ready = json.loads(server.ready)
        name = Path(ready["admin"])
        other = name.with_name("1.sock")
        name.rename(other)
        try:
            done = run_command(None, "info", "--url", "tcp://127.0.0.1:1", "--timeout", "0.2", "-o", "json")
            found = json.loads(done.stdout)
            assert (found["port"], found["ping_milliseconds"]) == (ready["port"], None)
            assert "Connection refused" in found["unreachable"]
        finally:
            other.rename(name)


def test_info_by_path(server: Server, module_sockets: Path) -> None:
    path = module_sockets / f"{server.port}.sock"
    found = json.loads(run_command(None, "info", "--admin", str(path), "-o", "json").stdout)
    assert (found["num_keys"], found["connections"]) == (3, 2)
    assert "unreachable" not in found


def test_info_of_nobody() -> None:
    done = run_command(None, "info", "--url", "tcp://127.0.0.1:1", "--timeout", "0.2")
    assert (done.exit_code, done.stdout) == (4, "")


@contextmanager
def sending(server: Server) -> Iterator[Callable[[], None]]:
    """A client that goes on sending, until the function that is yielded is called, or the end."""
    stopped = threading.Event()
    with RawPeer(server.port) as one, ThreadPoolExecutor(1) as pool:

        def send() -> None:
            while not stopped.wait(0.02):
                one.send(b"\x01" + blob(b"/k\x1b") + blob(b"v\x1blue"))
                one.ping(os.getpid())

        def stop() -> None:
            stopped.set()
            sent.result(LIMIT)

        sent = pool.submit(send)
        try:
            yield stop
        finally:
            stop()


def monitored(server: Server, *options: str) -> list[str]:
    """The lines that a monitor prints of the commands of such a client."""
    with sending(server):
        done = run_command(server, "monitor", *options)
    assert done.exit_code == 0
    return done.stdout.splitlines()


@pytest.mark.parametrize(("options", "said"), [((), "SET  k\\x1b  5 bytes"), (("--values",), "'v\\x1blue'")])
def test_monitor(server: Server, options: tuple[str, ...], said: str) -> None:
    lines = [line for line in monitored(server, "--count", "5", *options) if "SET" in line]
    assert lines
    assert all(line.isprintable() and line.endswith(said) for line in lines)
    assert "127.0.0.1:" in lines[0]


def test_monitor_as_json(server: Server) -> None:
    found: list[Any] = [json.loads(line) for line in monitored(server, "--count", "4", "-o", "json")]
    assert len(found) == 4
    assert found[0].keys() == set("time host port pid rank command key keys size value store".split())
    assert {"k\x1b"} >= {one["key"] for one in found if one["command"] == "SET"}


def test_monitor_says_that_the_server_has_gone() -> None:
    with tcpstore_server() as server, sending(server) as stop, started("monitor", server) as process:
        assert process.stdout is not None
        assert b"SET" in process.stdout.readline() + process.stdout.readline()
        stop()
        server.stop(signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT)
        assert process.returncode == 4
        assert b"the server closed the admin socket" in errors


@pytest.mark.parametrize("command", ["stat", "monitor"])
def test_a_server_that_cannot_be_asked(command: str) -> None:
    with tcpstore_server("--admin", "") as server:
        done = run_command(server, command)
        assert (done.exit_code, done.stdout) == (4, "")
        assert "there is no admin socket for port" in done.stderr


@pytest.mark.parametrize(
    "words",
    [["stat", "-i", "nan"], ["top", "-i", "NaN"], ["serve", "--grace", "nan"], ["serve", "--linger", "nan"]],
    ids=" ".join,
)
def test_nan_seconds_are_a_usage_error(words: list[str]) -> None:
    """Neither less nor more than any limit, it would be no pause at all."""
    done = run_command(None, *words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"Invalid value for '{'-i' if '-i' in words else words[1]}" in done.stderr
    assert "is not a number of seconds" in done.stderr


# What follows from the numbers


def stats(server: Server, uptime: float, **changes: Any) -> Stats:
    found = read_look(ask(Path(json.loads(server.ready)["admin"]), ["stats"], 60.0)).stats
    found.uptime = uptime
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def test_between_two_looks(server: Server) -> None:
    then = stats(server, 10.0, commands={"SET": 5, "GET": 1}, cpu=1.0, lag=Histogram([1.0], [0, 0], 0.0))
    now = stats(server, 12.0, commands={"SET": 25, "GET": 1, "ADD": 2}, cpu=2.0, lag=Histogram([1.0], [1, 0], 0.0))
    found = between(then, now)
    assert (found.seconds, found.ops, found.commands) == (2.0, 11.0, {"SET": 10.0, "ADD": 1.0})
    assert (found.cpu, found.lag, found.p99) == (0.5, 1.0, None)
    again = between(now, then)  # the server has been started again
    assert (again.seconds, again.ops) == (10.0, 0.6)


def test_quantiles() -> None:
    times = Histogram([1.0, 2.0, 4.0], [10, 0, 10, 0], 0.0)
    assert [times.quantile(share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)] == [0.0, 0.5, 1.0, 3.0, 4.0]
    assert Histogram([1.0], [0, 0], 0.0).quantile(0.5) is None
    assert Histogram([1.0], [0, 3], 0.0).quantile(0.5) == 1.0
    assert times.since(Histogram([1.0, 2.0, 4.0], [9, 0, 0, 0], 0.0)).counts == [1, 0, 10, 0]
    assert times.since(Histogram([1.0], [9, 0], 0.0)) is times


def test_replies_that_are_none() -> None:
    for lines in ([], [b'{"end": true}'], [b"\xff"], [b'{"stats": 1}']):
        with pytest.raises(ProtocolError):
            read_look(lines)
    with pytest.raises(DistStoreError, match="no"):
        read_look([b'{"error": "no"}'])
    with pytest.raises(ProtocolError):
        list(read_samples([b'{"samples": [[1]]}']))
    with pytest.raises(DistStoreError, match="no"):
        list(read_samples([b'{"error": "no"}']))


def test_units() -> None:
    assert [in_seconds(number) for number in (None, 0.0000123, 0.0123, 12.3, 600.0, 9000.0)] == [
        "-", "12 µs", "12.3 ms", "12.3 s", "10 min", "2.5 h",
    ]  # fmt: skip
    assert [in_bytes(number) for number in (0, 1023, 1536, 2**30, 2**50)] == [
        "0 B", "1023 B", "1.5 KiB", "1.0 GiB", "1024.0 TiB",
    ]  # fmt: skip
