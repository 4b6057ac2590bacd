"""`tcpstore bench` against our server and both of PyTorch's, and everything that may go wrong with it."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from support import LIMIT, server_of, tcpstore_server
from tcpstore_async.load.requests import OPERATIONS


def bench(port: int, *words: str, files: int = 0) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run(
        [sys.executable, "-m", "tcpstore_async", "bench", "--url", f"tcp://127.0.0.1:{port}", *words],
        cwd=tempfile.gettempdir(), capture_output=True, timeout=LIMIT, check=False,
        preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))) if files else None,
    )  # fmt: skip
    assert b"Traceback" not in done.stderr
    return done


@pytest.fixture(params=["ours", "libuv", "legacy"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    with server_of(request.param) as found:
        yield found


def num_keys(port: int) -> bytes:
    url = f"tcp://127.0.0.1:{port}"
    command = [sys.executable, "-m", "tcpstore_async", "num-keys", "--url", url, "--timeout", str(LIMIT)]
    return subprocess.run(command, cwd=tempfile.gettempdir(), capture_output=True, timeout=LIMIT, check=True).stdout


def test_every_operation_is_measured_and_leaves_nothing(port: int) -> None:
    before = num_keys(port)
    names = list(OPERATIONS)
    done = bench(port, "--ops", ",".join(names), "--ranks", "4", "--requests", "10", "--value-size", "9", "-o", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["ranks"], found["value_size"]) == (4, 9)
    assert [(row["operation"], row["requests"]) for row in found["operations"]] == [(name, 12) for name in names]
    for row in found["operations"]:
        assert 0 < row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"]
        assert row["per_second"] > 0
    assert num_keys(port) == before


def test_the_table() -> None:
    with tcpstore_server() as server:
        done = bench(server.port, "--ranks", "2", "--requests", "10")
    lines = done.stdout.decode().splitlines()
    assert lines[0].split() == "operation requests ops/s p50 ms p95 ms p99 ms".split()
    assert [line.split()[0] for line in lines[1:]] == ["set", "get", "add", "check"]


def test_what_goes_wrong_is_one_line() -> None:
    with tcpstore_server() as server:
        full = bench(server.port, "--ranks", "200", files=100)
        late = bench(server.port, "--requests", "10000000", "--timeout", "0.2", "--ops", "ping")
    assert (full.returncode, full.stderr.count(b"\n")) == (1, 1)
    assert b"Too many open files" in full.stderr
    assert (late.returncode, late.stderr.count(b"\n")) == (3, 1)
    gone = bench(server.port)
    assert gone.returncode == 4
    assert gone.stderr == f"Error: cannot connect to 127.0.0.1:{server.port}: Connection refused\n".encode()


@contextmanager
def endless(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """One that has begun, as its keys on the server show."""
    before = num_keys(port)
    with subprocess.Popen(
        [sys.executable, "-m", "tcpstore_async", "bench", "--url", f"tcp://127.0.0.1:{port}",
         "--requests", "100000000", "--timeout", "60", "--ranks", "2"],
        cwd=tempfile.gettempdir(), stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            while num_keys(port) == before:
                assert process.poll() is None
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_keys(port: int, number: int) -> None:
    before = num_keys(port)
    with endless(port) as process:
        process.send_signal(number)
        _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode != 0
    assert b"Traceback" not in errors
    assert num_keys(port) == before


def test_a_server_that_dies_half_way_is_one_line() -> None:
    with tcpstore_server() as server, endless(server.port) as process:
        server.process.kill()
        _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 4
    assert errors.startswith(b"Error: a connection to 127.0.0.1:")
    assert errors.count(b"\n") == 1


@pytest.mark.parametrize("words", [["--ops", "nix"], ["--ops", ","], ["--ranks", "0"], ["--value-size", "-1"]])
def test_bad_arguments_are_usage(words: list[str]) -> None:
    done = bench(1, *words)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(b"Error: Invalid value")
