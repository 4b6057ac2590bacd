"""`tcpstore bench` against our server and both of PyTorch's, and its failures."""

from __future__ import annotations

import importlib
import json
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from client.fakes import freezable
from faults.fault_helpers import gone, until
from marks import exhaustive
from support import LIMIT, server_of, tcpstore_server
from tcpstore_async import TCPStore
from tcpstore_async.tools.load.quick_bench import Row
from tcpstore_async.tools.load.scripts import OPERATIONS

command = importlib.import_module("tcpstore_async.tools.load.bench")  # the package has the command itself by this name


def bench(port: int, *words: str, files: int = 0) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run(
        [sys.executable, "-m", "tcpstore_async", "bench", "--url", f"tcp://127.0.0.1:{port}", *words],
        cwd=tempfile.gettempdir(), capture_output=True, timeout=LIMIT, check=False,
        preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))) if files else None,
    )  # fmt: skip
    assert b"Traceback" not in done.stderr
    return done


@pytest.fixture(params=["ours", "libuv", exhaustive("legacy")])
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def port(kind: str) -> Iterator[int]:
    with server_of(kind) as found:
        yield found


def num_keys(port: int) -> int:
    with TCPStore("127.0.0.1", port, timeout=LIMIT) as store:
        return store.num_keys()


def test_every_operation_is_measured_and_cleaned_up(kind: str, port: int) -> None:
    before = num_keys(port)
    names = list(OPERATIONS)
    done = bench(port, "--ops", ",".join(names), "--ranks", "4", "--requests", "10", "--value-size", "9", "-o", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["ranks"], found["value_size"], found["complete"]) == (4, 9, True)
    assert found["server"] == ("tcpstore_async" if kind == "ours" else "PyTorch or compatible")
    assert [(row["operation"], row["requests"]) for row in found["operations"]] == [(name, 10) for name in names]
    for row in found["operations"]:
        assert 0 < row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"]
        assert row["per_second"] > 0
        assert row["load_cpu"] > 0
    assert num_keys(port) == before


@pytest.mark.parametrize(("requests", "ranks"), [(50, 8), (3, 8), (1, 1), (16, 8)])
def test_number_of_requests(requests: int, ranks: int) -> None:
    with tcpstore_server() as server:
        done = bench(server.port, "--ops", "add", "--ranks", str(ranks), "--requests", str(requests), "-o", "json")
    assert [row["requests"] for row in json.loads(done.stdout)["operations"]] == [requests]


def test_the_table() -> None:
    with tcpstore_server("--backend", "threaded") as server:
        done = bench(server.port, "--ranks", "2", "--requests", "10")
    who, head, *rows = done.stdout.decode().splitlines()
    assert re.fullmatch(r"server: tcpstore_async, \S+, threaded, (interpreted|compiled)", who)
    assert head.split() == "operation requests ops/s p50 ms p95 ms p99 ms load CPU".split()
    assert [row.split()[0] for row in rows] == ["set", "get", "add", "check"]
    assert all("%" in row.split()[6] for row in rows)


@pytest.mark.parametrize(("share", "said"), [(0.899, "90%"), (0.9, "90% sat."), (1.0, "100% sat.")])
def test_saturated_generator_is_marked(share: float, said: str) -> None:
    assert command._table({}, [Row("set", 10, 1.0, 10.0, 1.0, 1.0, 1.0, share)]).endswith(f" {said}")


@pytest.mark.needs_proc
def test_failures_are_one_line() -> None:
    with tcpstore_server() as server:
        full = bench(server.port, "--ranks", "200", files=100)
        late = bench(server.port, "--requests", "10000000", "--timeout", "0.2", "--ops", "ping")
    assert (full.returncode, full.stderr.count(b"\n")) == (1, 1)
    assert b"Too many open files" in full.stderr
    assert (late.returncode, late.stderr.count(b"\n")) == (3, 1)
    gone = bench(server.port)
    assert gone.returncode == 4
    assert gone.stderr == f"Error: cannot connect to 127.0.0.1:{server.port}: Connection refused\n".encode()


def test_silent_server() -> None:
    """No keys were written, so the error does not mention any."""
    with socket.create_server(("127.0.0.1", 0), backlog=9) as silent:
        done = bench(silent.getsockname()[1], "--ranks", "2", "--timeout", "0.3")
    assert done.returncode == 3
    assert done.stderr == b"Error: not completed within 0.3 s: connections done: 0 of 2\n"


def test_progress_estimates_the_remaining_time() -> None:
    progress = command._Progress(4)
    progress.began -= 10
    shown = []
    for done, name in ((0, "set"), (2, "add"), (4, "cleaning up")):
        progress.show(done, name)
        shown.append(progress.text)
    assert re.fullmatch(r"2 of 4 done, now add, about 1[01] s left", shown.pop(1))
    assert shown == ["0 of 4 done, now set", "4 of 4 done, now cleaning up"]


def test_every_address_of_a_host_is_tried() -> None:
    """localhost may resolve to ::1 first, where nothing listens."""
    with tcpstore_server("--host", "127.0.0.1") as server:
        done = bench(server.port, "--requests", "10", "--url", f"tcp://localhost:{server.port}")
    assert done.returncode == 0, done.stderr


HELD = """
import importlib, signal, sys
from tcpstore_async.cli import main
from tcpstore_async.tools.load import quick_bench
at, hangup, clean = int(sys.argv.pop(1)), sys.argv.pop(1), quick_bench._clean

def show(self, done, name):
    if done == at:
        print(flush=True)
        sys.stdin.readline()

def cleaning(*given):
    print("cleans up within", given[-1], file=sys.stderr)
    clean(*given)

signal.signal(signal.SIGHUP, getattr(signal, hangup))
importlib.import_module("tcpstore_async.tools.load.bench")._Progress.show = show
quick_bench._clean = cleaning
main()
"""
"""A benchmark that prints a line after a number of operations and waits for one before it continues."""


class Held:
    """A paused benchmark."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def go_on(self) -> tuple[int, bytes, list[bytes]]:
        """Resume it; return exit status, output and lines of errors."""
        out, errors = self.process.communicate(b"\n", LIMIT)
        assert b"Traceback" not in errors
        return self.process.returncode, out, errors.splitlines()


@contextmanager
def held(port: int, *words: str, at: int = 1, hangup: str = "SIG_DFL") -> Iterator[Held]:
    """Pause a benchmark after `at` of its two operations."""
    with subprocess.Popen(
        [sys.executable, "-c", HELD, str(at), hangup, "bench", "--url", f"tcp://127.0.0.1:{port}",
         "--ranks", "2", "--requests", "10", "--ops", "set,add", *words],
        cwd=tempfile.gettempdir(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
            yield Held(process)
        finally:
            process.kill()


def operations(table: bytes) -> list[str]:
    return [line.split()[0] for line in table.decode().splitlines()[2:]]


@pytest.mark.parametrize("output", ["text", "json"])
def test_results_are_printed_when_the_server_dies(output: str) -> None:
    with freezable() as server, held(server.port, "-o", output) as one:
        server.kill()
        status, out, [error] = one.go_on()
    assert status == 4
    if output == "text":
        assert operations(out) == ["set"]
        assert error.startswith(b"Error: a connection to 127.0.0.1:")
    else:
        found = json.loads(out)
        assert (found["complete"], found["server"]) == (False, "tcpstore_async")
        assert [row["operation"] for row in found["operations"]] == ["set"]


@pytest.mark.needs_proc
def test_worker_exits_with_a_killed_parent(port: int) -> None:
    with held(port) as one:
        pid = one.process.pid
        [load] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        one.process.kill()
        one.process.wait(LIMIT)
        until(lambda: gone(int(load)), "the load has ended")


@pytest.mark.parametrize(("at", "finished"), [(1, ["set"]), (2, ["set", "add"])])
def test_frozen_server_is_waited_for_once(at: int, finished: list[str]) -> None:
    """Frozen during an operation, or while the keys are deleted."""
    with freezable() as server, held(server.port, "--timeout", "4", at=at) as one:
        server.freeze()
        status, out, [error] = one.go_on()
        server.thaw()
    assert (status, operations(out)) == (3, finished)
    assert error == (
        b"Error: not completed within 4 s: connections done: 0 of 2; keys under /tcpstore-bench/ may remain"
    )


@pytest.mark.parametrize(
    ("number", "timeout", "patience"),
    [(signal.SIGINT, -1, b"5.0"), (signal.SIGTERM, 1000, b"5.0"), (signal.SIGHUP, 4, b"4.0")],
)
def test_results_are_printed_after_an_interrupt(number: int, timeout: int, patience: bytes) -> None:
    with tcpstore_server() as server:
        before = num_keys(server.port)
        with held(server.port, "--timeout", str(timeout)) as one:
            assert num_keys(server.port) != before
            one.process.send_signal(number)
            one.process.wait(LIMIT)
            status, out, errors = one.go_on()
        assert (status, operations(out)) == (-number, ["set"])
        assert errors == [b"cleans up within " + patience, b"Error: interrupted"]
        assert num_keys(server.port) == before


def test_ignored_hangup() -> None:
    """SIGHUP under nohup."""
    with tcpstore_server() as server, held(server.port, hangup="SIG_IGN") as one:
        one.process.send_signal(signal.SIGHUP)
        status, out, errors = one.go_on()
    assert (status, operations(out), errors) == (0, ["set", "add"], [])


@pytest.mark.parametrize("words", [["--ops", "nix"], ["--ops", ","], ["--ranks", "0"], ["--value-size", "-1"]])
def test_bad_arguments_are_usage_errors(words: list[str]) -> None:
    done = bench(1, *words)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(b"Error: Invalid value")
