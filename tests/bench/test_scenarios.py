"""Scenarios: each at a tiny size, its failures, what is compared, and their table in the documentation."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest

from bench.scale.in_memory import without_sockets
from bench.scale.scenarios import SCENARIOS, knows_barrier, scenario_of, table, total
from bench.scale.servers import (
    Connection,
    Died,
    Host,
    Impossible,
    Measured,
    Point,
    Server,
    can_mount,
    measured,
    wait_for_ranks,
)
from bench_factories import samples
from support import LIMIT, free_port
from tcpstore_async.tools.load.generator import Late, Unreachable
from tcpstore_async.tools.load.scripts import encode_request, hello, join, make_step
from tcpstore_async.tools.load.workers import ClosedLoop, worker_pool

TINY = {"resolver": 2, "operations": 4, "busy-trainer": 4}


@pytest.mark.parametrize("server", ["uvloop", "libuv", pytest.param("relay", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_measures(host: Host, name: str, server: str) -> None:
    if server == "libuv":
        pytest.importorskip("torch")
    if name == "resolver" and not can_mount():
        pytest.skip("unshare -m is not allowed")
    measure = SCENARIOS[name].measure
    if name == "start-spread":
        measure = partial(measure, seconds=0.5)
    found = measure(Point(host, server, TINY.get(name, 20), LIMIT))
    for one in found:
        assert one.wall > 0
        assert one.operations > 0
        assert one.server_cpu > 0
    starts = name.startswith("start")
    assert (found[0].memory is not None) == (name == "memory" or starts)
    assert found[0].parked == (19 if starts else None)  # all but rank 0, which sends its ID when it has seen them
    assert len(found) == (1 if name != "operations" else len({one.part for one in found}))


@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if scenario.memory])
def test_a_scenario_measures_in_memory(name: str) -> None:
    found = without_sockets(name, 4000, LIMIT)  # more than the store wakes in one step
    assert found.wall > 0
    assert found.operations >= 4000


def test_in_memory_sessions_have_a_time_limit() -> None:
    with pytest.raises(Late, match=r"not completed within 0\.01 s: the in-memory sessions were not done"):
        without_sockets("init", 1_000_000, 0.01)


def test_one_rank_cannot_wait_for_others(host: Host) -> None:
    with pytest.raises(Impossible, match="rank 0 has no other ranks to wait for"):
        SCENARIOS["init"].measure(Point(host, "uvloop", 1, LIMIT))


def test_a_server_that_does_not_know_barrier_is_detected(host: Host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def close_at_barrier() -> None:
            one, _ = listening.accept()
            with one:
                one.recv(len(hello()[0].request), socket.MSG_WAITALL)
                one.sendall(hello()[0].expect)
                one.recv(1)

        thread = threading.Thread(target=close_at_barrier)
        thread.start()
        assert not knows_barrier(listening.getsockname()[1], LIMIT)
        thread.join()
    with host.running("uvloop") as server:
        assert knows_barrier(server.port, LIMIT)


def test_rank_0_waits_for_all_ranks(host: Host) -> None:
    with host.running("uvloop") as server, Connection(server.port, LIMIT) as rank0:
        for step in join():
            rank0.call(step.request, step.reply)
        assert wait_for_ranks(rank0, 1, LIMIT) > 0
        with pytest.raises(Late, match="rank 0 has not seen all others"):
            wait_for_ranks(rank0, 2, 0.05)


def test_joining_under_load_counts_the_background(host: Host) -> None:
    """Operations are two per joining rank and the ADDs that the server's counter shows."""
    with host.running("uvloop") as server, worker_pool("127.0.0.1", server.port, 8) as load:
        load.run(ClosedLoop(hello(), LIMIT))
        load.open(20)
        took = load.run(
            ClosedLoop(join(), LIMIT, background=8, background_steps=[make_step(encode_request("add", b"/busy", 1), 8)])
        )
        with Connection(server.port, LIMIT) as one:
            one.call(hello()[0].request, hello()[0].reply)
            count = int.from_bytes(one.call(encode_request("add", b"/busy", 0), 8), "little")
    assert took.operations == 40
    assert took.background_operations == count > 0
    assert measured(took, 1.0).operations == 40 + count


def test_the_busier_phase_decides_whether_generators_were_saturated() -> None:
    quiet, loaded = Measured(9.0, 5, 1.0, 1.0, 0.1), Measured(1.0, 6, 2.0, 3.0, 0.95)
    assert total(quiet, loaded)[:5] == (10.0, 11, 3.0, 4.0, 0.95)


@pytest.mark.parametrize("name", ["fanout", "barrier-opcode", "init"])
def test_a_server_that_exits_is_called_dead(host: Host, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    victim: list[int] = []
    running, call = Host.running, Connection.call

    @contextmanager
    def noting_pid(self: Host, server: str, **options: bool) -> Iterator[Server]:
        with running(self, server, **options) as one:
            victim[:] = [one.pid]
            yield one

    def killing(self: Connection, request: bytes, reply: int) -> bytes:
        os.kill(victim[0], signal.SIGKILL)
        return call(self, request, reply)

    monkeypatch.setattr(Host, "running", noting_pid)
    monkeypatch.setattr(Connection, "call", killing)
    with pytest.raises(Died, match="the server has exited: "):
        SCENARIOS[name].measure(Point(host, "uvloop", 4, LIMIT))


def test_a_refused_connection() -> None:
    with pytest.raises(Unreachable, match="a connection cannot be made: Connection refused"):
        Connection(free_port(), LIMIT)


def test_a_connection_that_is_not_answered() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        Connection(silent.getsockname()[1], 0.05) as one,
        pytest.raises(Late, match=r"not completed within 0\.05 s: a connection was not answered"),
    ):
        one.call(b"?", 1)


@pytest.mark.parametrize(
    ("name", "scenario", "operation"),
    [
        ("barrier", "barrier", ""),
        ("barrier-opcode", "barrier-opcode", ""),
        ("operations-multi-get", "operations", "multi-get"),
        ("initial", "initial", ""),
    ],
)
def test_to_which_scenario_a_sample_belongs(name: str, scenario: str, operation: str) -> None:
    found, what = scenario_of(name)
    assert (found.name, what) == (scenario, operation)


@pytest.mark.parametrize(
    ("name", "value"),
    [("init", 8.0), ("steady", 0.004), ("operations-set", 8.0 / 64), ("memory", 100.0), ("unknown", 8.0)],
)
def test_what_is_compared(name: str, value: float) -> None:
    [sample] = samples("uvloop", [8.0], size=64, p50=0.001, memory=6400)
    assert scenario_of(name)[0].metric.of(sample) == pytest.approx(value)


def test_cpu_is_per_operation() -> None:
    [sample] = samples("uvloop", [8.0], size=64, cpu=0.5)
    for scenario in SCENARIOS.values():
        assert scenario.cpu.of(msgspec.structs.replace(sample, operations=1000)) == pytest.approx(0.0005)
        assert scenario.cpu.of(msgspec.structs.replace(sample, operations=0)) is None


def test_the_documentation_has_the_table() -> None:
    """`python -m bench.scale.scenarios` prints it."""
    page = Path(__file__).parents[2] / "bench" / "README.md"
    assert f"\n{table()}\n" in page.read_text()
