"""Servers under test: which is started, that it is new, and that none is left."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench.processes import environment
from bench.scale import servers
from bench.scale.results import machine
from bench.scale.runner import Plan
from bench.scale.servers import Connection, command_of, has_torch, hosting, reference_of
from faults.fault_helpers import Watch
from support import LIMIT
from tcpstore_async.tools.load.generator import Late, Unreachable
from tcpstore_async.tools.load.scripts import join
from tcpstore_async.tools.load.workers import ClosedLoop, worker_pool

with_torch = pytest.mark.skipif(not has_torch(), reason="PyTorch is not installed")


@pytest.mark.parametrize(
    ("chosen", "torch", "reference"),
    [
        (["uvloop", "threaded", "legacy", "libuv", "control"], True, "libuv"),
        (["uvloop", "threaded", "legacy", "control"], True, "legacy"),
        (["uvloop", "threaded", "legacy", "libuv", "control"], False, "threaded"),
        (["uvloop", "control"], True, ""),
    ],
)
def test_the_reference_is_one_that_the_run_has(
    monkeypatch: pytest.MonkeyPatch, chosen: list[str], torch: bool, reference: str
) -> None:
    monkeypatch.setattr("bench.scale.servers.has_torch", lambda: torch)
    assert reference_of(chosen) == reference


@pytest.mark.needs_proc
def test_the_control_is_the_reference() -> None:
    with hosting("threaded") as host, host.running("control") as server:
        assert b"threaded" in Path(f"/proc/{server.pid}/cmdline").read_bytes()


@with_torch
def test_pytorchs_processes_are_reused_and_their_servers_are_new() -> None:
    pids: dict[str, set[int]] = {"libuv": set(), "control": set()}
    with hosting() as host:
        with host.running("libuv") as server, worker_pool("127.0.0.1", server.port, 1000) as load:
            load.run(ClosedLoop(join(), LIMIT))
            assert Watch(server.pid).file_table() > 1000
        with pytest.raises(Unreachable):  # closed before the next one is measured
            Connection(server.port, LIMIT)
        for name in ("libuv", "control", "libuv", "control"):
            with host.running(name) as server:
                pids[name].add(server.pid)
                assert Watch(server.pid).file_table() < 1000  # it grows while ranks connect, as any job's does
    assert pids["libuv"] != pids["control"]
    assert [len(found) for found in pids.values()] == [1, 1]


def test_a_server_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "TIMEOUT", 0.1)
    monkeypatch.setattr(servers, "command_of", lambda *what: ["sleep", "60"])
    with hosting() as host, pytest.raises(Late, match="the server has not started within 0 s"), host.running("uvloop"):
        pass


@pytest.mark.parametrize("server", ["uvloop", pytest.param("libuv", marks=with_torch)])
@pytest.mark.parametrize("busy", [False, True])
def test_a_server_ends_with_its_standard_input(server: str, busy: bool) -> None:
    process = subprocess.Popen(
        command_of(server, busy), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()
    )
    with process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        process.stdin.close()
        assert process.wait(LIMIT) == 1


@with_torch
def test_how_peers_are_named_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(**fields: object) -> str:
        plan = Plan([], [], [], 1, False, LIMIT, 20_000)._replace(**fields)  # type: ignore[arg-type]
        return machine(plan.measures_torch).names

    for possible, expected in ((True, "files only"), (False, "this machine's")):
        monkeypatch.setattr("bench.scale.results.can_mount", lambda possible=possible: possible)
        assert names() == names(servers=["uvloop", "legacy"]) == expected
        assert names(servers=["uvloop", "threaded"]) == names(transports=["memory"]) == ""


def test_the_machine_is_described() -> None:
    found = machine(False)
    assert found.backlog > 0
    assert found.server_cores
    assert found.load_cores
