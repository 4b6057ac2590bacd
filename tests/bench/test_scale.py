"""The scale benchmark: every scenario at a tiny size, and what is kept when a run does not come to its end."""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import made_up
from bench import records, servers
from bench.builds import environment
from bench.first_rank import FirstRank
from bench.keeping import Keeper
from bench.machine import machine
from bench.peer import Peer
from bench.plan import Line, Plan
from bench.runner import Runner, _turned
from bench.scenarios import SCENARIOS, SECONDS, Measured, both, knows_barrier, measured
from bench.servers import Died, Host, Server, can_mount, command_of, has_torch, hosting, reference_of
from faults.watching import Watch, gone
from support import LIMIT, free_port
from tcpstore_async.load.generator import Clock, Generator, Late, LoadError, Unreachable, waited
from tcpstore_async.load.process import Play, busy, fleet
from tcpstore_async.load.requests import PONG, act, hello, join, said

ROOT = Path(__file__).parent.parent.parent
TINY = {"resolver": 2, "operations": 4, "busy-trainer": 4}


def quiet(done: float, text: str) -> None:
    pass


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with hosting() as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("server", ["uvloop", "libuv"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_measures(host: Host, name: str, server: str) -> None:
    if name == "resolver" and not can_mount():
        pytest.skip("a server cannot be given a resolver of its own here")
    found = SCENARIOS[name].measure(host, server, TINY.get(name, 20), LIMIT)
    for one in found:
        assert one.wall > 0
        assert one.operations > 0
        assert one.server_cpu > 0
    assert (found[0].memory is not None) == (name == "memory")
    assert len(found) == (1 if name != "operations" else len({one.part for one in found}))


@pytest.mark.slow
@pytest.mark.skipif(not has_torch(), reason="PyTorch is not installed")
def test_a_kept_process_has_the_file_table_of_a_new_one(host: Host) -> None:
    """Its server must grow it while the ranks come, as any job's does."""
    with host.running("libuv") as server, fleet("127.0.0.1", server.port, 1000) as load:
        load.tell(Play(join(), LIMIT))
        assert Watch(server.pid).file_table() > 1000
    with host.running("libuv") as following:
        assert following.pid == server.pid
        assert Watch(following.pid).file_table() < 1000


@pytest.mark.skipif(not has_torch(), reason="PyTorch is not installed")
def test_the_reference_is_one_that_the_run_has() -> None:
    assert reference_of(["uvloop", "threaded", "legacy", "libuv", "control"]) == "libuv"
    assert reference_of(["uvloop", "threaded", "legacy", "control"]) == "legacy"
    assert reference_of(["uvloop", "threaded", "control"]) == "threaded"
    assert reference_of(["uvloop", "control"]) == ""


def test_the_reference_is_no_server_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.servers.has_torch", lambda: False)
    assert reference_of(["uvloop", "threaded", "legacy", "libuv", "control"]) == "threaded"


@pytest.mark.slow
def test_the_control_is_the_reference() -> None:
    with hosting("threaded") as host, host.running("control") as server:
        assert b"threaded" in Path(f"/proc/{server.pid}/cmdline").read_bytes()


def test_without_a_reference_there_is_no_control() -> None:
    with hosting("") as host:
        runner = Runner(Plan([SCENARIOS["herd"]], ["control"], [4], 1, False, LIMIT, 20_000), host, quiet)
        runner.run()
    assert not runner.samples
    assert [(one.server, one.reason) for one in runner.endings] == [
        ("control", "there is no reference that it could be a second time")
    ]


def test_a_quick_run_has_a_control_everywhere(host: Host) -> None:
    asked: list[str] = []

    def measure(host: Host, server: str, size: int, limit: float) -> list[Measured]:
        asked.append(server)
        return [Measured(0.1, size, 0.1, 0.1, 0.1)]

    Runner(Plan([SCENARIOS["herd"]._replace(measure=measure)], [], [], 1, True, LIMIT, 20_000), host, quiet).run()
    assert sorted(asked) == ["control", "libuv", "uvloop"]


def instant(host: Host, server: str, size: int, limit: float) -> list[Measured]:
    return [Measured(0.1, size, 0.1, 0.1, 0.1)]


HERD = SCENARIOS["herd"]._replace(measure=instant)
IN_MEMORY = HERD._replace(memory=(4096,))


def plan_of(**fields: Any) -> Plan:
    return Plan([HERD], ["uvloop"], [], 1, False, LIMIT, 1700)._replace(**fields)


@pytest.mark.parametrize(
    ("plan", "fails"),
    [
        (plan_of(), False),
        (plan_of(open_files=700), True),
        (plan_of(sizes=[1024, 2048]), True),
        (plan_of(sizes=[4096]), True),
        (plan_of(sizes=[4096], scenarios=[IN_MEMORY]), False),
        (plan_of(sizes=[4096], scenarios=[IN_MEMORY], servers=["uvloop", "threaded"]), True),
        (plan_of(sizes=[4096], scenarios=[IN_MEMORY], servers=[]), False),
        (plan_of(sizes=[4096, 5000], scenarios=[IN_MEMORY]), True),
        (plan_of(sizes=[4096], scenarios=[IN_MEMORY], transports=["memory"]), False),
        (plan_of(sizes=[4096], scenarios=[IN_MEMORY], transports=["sockets"]), True),
        (plan_of(sizes=[4096], scenarios=[IN_MEMORY], transports=["sockets", "memory"]), True),
    ],
)
def test_a_run_fails_if_what_was_asked_for_cannot_be_held(
    host: Host, plan: Plan, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.scenarios.without_sockets", lambda *_: Measured(0.1, 1, 0.1, 0.0, 0.0))
    runner = Runner(plan, host, quiet)
    runner.run()
    assert any("files open here" in failure for failure in runner.failures) == fails
    assert bool(runner.failures) == fails


def test_the_transports_of_a_plan() -> None:
    init = SCENARIOS["init"]
    assert plan_of().sizes_in_memory(init) == list(init.memory)
    assert plan_of(quick=True).sizes_in_memory(init) == list(init.quick)
    assert plan_of(sizes=[50, 1024]).sizes_in_memory(init) == [1024]
    assert plan_of(sizes=[50], transports=["memory"]).sizes_in_memory(init) == [50]
    assert plan_of(transports=["memory"]).sizes_of_sockets(init) == ()
    assert plan_of(transports=["sockets"]).sizes_in_memory(init) == []
    assert plan_of(servers=["libuv"]).sizes_in_memory(init) == []


def test_rounds_that_were_asked_for_are_those_of_all() -> None:
    for name in ("init", "herd", "memory"):
        for quick in (False, True):
            assert plan_of(rounds=7, quick=quick).rounds_of(SCENARIOS[name], "sockets") == 7
    assert plan_of(rounds=0).rounds_of(SCENARIOS["init"], "sockets") == 5
    assert plan_of(rounds=0).rounds_of(SCENARIOS["init"], "memory") == 3
    assert plan_of(rounds=0, quick=True).rounds_of(SCENARIOS["memory"], "sockets") == 1


def test_a_server_that_does_not_know_barrier_is_found_out(host: Host) -> None:
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


def test_a_run_that_measures_nothing_fails(tmp_path: Path) -> None:
    words = ["--scenario", "init", "--server", "uvloop", "--sizes", "1", "--out", str(tmp_path)]
    done = subprocess.run(scale(*words), capture_output=True, timeout=LIMIT, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert done.stderr.decode().splitlines()[-1] == (
        "Error: nothing was measured: init, uvloop at 1: there are no others for rank 0 to wait for"
    )


@pytest.mark.skipif(not has_torch(), reason="PyTorch is not installed")
def test_who_names_the_peers_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for possible, names in ((True, "files only"), (False, "this machine's")):
        monkeypatch.setattr("bench.machine.can_mount", lambda possible=possible: possible)
        assert machine(plan_of(servers=[]).measures_torch).names == names
        assert machine(plan_of(servers=["uvloop", "legacy"]).measures_torch).names == names
        assert machine(plan_of(servers=["uvloop", "threaded"]).measures_torch).names == ""
        assert machine(plan_of(servers=[], transports=["memory"]).measures_torch).names == ""


def test_the_machine_is_described() -> None:
    found = machine(False)
    assert found.backlog > 0
    assert found.server_cores
    assert found.load_cores


def test_a_generator_that_waits_for_a_core_is_busy() -> None:
    assert busy(Clock(1.0, 5.0), Clock(1.25, 5.5)) == 0.75


def test_a_wait_for_a_core_is_seen() -> None:
    """Two processes that compute on the same core."""
    core = str(min(os.sched_getaffinity(0)))
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this system does not say")
    loop = ["taskset", "-c", core, sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(loop) for _ in range(2)]
    try:
        until(lambda: all(waited(str(process.pid)) > 0.05 for process in processes))
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_the_busier_phase_counts() -> None:
    quiet_one, loaded = Measured(9.0, 5, 1.0, 1.0, 0.1), Measured(1.0, 6, 2.0, 3.0, 0.95)
    assert both(quiet_one, loaded)[:5] == (10.0, 11, 3.0, 4.0, 0.95)


def test_a_generator_computes_no_longer_than_the_time(host: Host) -> None:
    """At a size where what is around a measurement takes as long as the measurement."""
    with host.running("uvloop") as server, fleet("127.0.0.1", server.port, 1) as load:
        load.tell(Play(hello(), LIMIT))
        for _ in range(50):
            took = load.tell(Play([act(said("ping", 1), 4)], LIMIT))
            assert 0 < took.cpu < took.wall * 1.01


def test_work_that_is_the_same_at_every_size_is_projected_so() -> None:
    line = Line("uvloop", "sockets", SCENARIOS["operations"])
    line.add(1, 0.5, 8.0)
    assert line.projected(8) == 8.5
    line.add(8, 0.5, 9.0)
    assert line.projected(64) == 9.5
    step = Line("libuv", "sockets", SCENARIOS["herd"])
    for size, seconds in ((4096, 0.7), (8192, 3.7)):
        step.add(size, 0.0, seconds)
    assert step.projected(16_384) == pytest.approx(9.7)
    growing = Line("uvloop", "sockets", SCENARIOS["init"])
    growing.add(1, 0.5, 8.0)
    assert growing.projected(8) > 50
    timed = Line("uvloop", "sockets", SCENARIOS["steady"])
    timed.add(1024, 0.5, SECONDS + 0.6)
    assert timed.projected(2048) < SECONDS + 1.6


def test_a_server_that_is_long_in_starting_is_not_projected_as_work() -> None:
    line = Line("libuv", "sockets", SCENARIOS["memory"])
    line.add(1000, 10.0, 0.6)
    assert 10 < line.projected(2000) < 11
    line.add(2000, 11.0, 0.7)
    assert 10 < line.projected(4000) < 11.1


@pytest.mark.slow
def test_without_sockets(host: Host) -> None:
    for name in ("init", "barrier", "barrier-opcode", "fanout"):
        plan = Plan([SCENARIOS[name]._replace(memory=(50,))], ["uvloop"], [50], 1, False, LIMIT, 20_000)
        runner = Runner(plan, host, quiet)
        runner.run()
        assert [(one.transport, one.size) for one in runner.samples] == [("memory", 50), ("sockets", 50)]
        assert not runner.endings


def test_rounds_are_interleaved_and_their_order_changes(host: Host) -> None:
    def measure(host: Host, server: str, size: int, limit: float) -> list[Measured]:
        return [Measured(0.1, size, 0.1, 0.1, 0.1)]

    scenario = SCENARIOS["herd"]._replace(measure=measure)
    runner = Runner(Plan([scenario], ["uvloop", "threaded"], [4, 8], 3, False, LIMIT, 20_000), host, quiet)
    runner.run()
    one, other = ["uvloop", "threaded"], ["threaded", "uvloop"]
    assert [(one.size, one.round) for one in runner.samples] == [
        (size, number) for size in (4, 8) for number in range(3) for _ in range(2)
    ]
    assert [one.server for one in runner.samples] == (one + other + other) * 2


def test_who_comes_when_and_who_follows_whom_changes(host: Host) -> None:
    orders = [[line.server for line in _turned(lines_of("uvloop", "libuv", "control"), number)] for number in range(6)]
    assert len({tuple(order) for order in orders}) == 6
    assert len({order[0] for order in orders[:3]}) == 3


def lines_of(*servers: str) -> list[Line]:
    return [Line(server, "sockets", SCENARIOS["herd"]) for server in servers]


def test_a_round_that_fails_takes_those_before_with_it(host: Host) -> None:
    """Without it they would say too much good of the server."""

    def measure(host: Host, server: str, size: int, limit: float) -> list[Measured]:
        rounds = sum(one.size == 8 for one in runner.samples)
        if size == 8 and rounds == 2:
            raise Late("not done after 20 s")
        return [Measured(0.1, size, 0.1, 0.1, 0.1)]

    scenario = SCENARIOS["herd"]._replace(measure=measure)
    runner = Runner(Plan([scenario], ["uvloop"], [4, 8], 3, False, LIMIT, 20_000), host, quiet)
    runner.run()
    assert [one.size for one in runner.samples] == [4, 4, 4]
    assert [(one.size, one.reason) for one in runner.endings] == [(8, "not done after 20 s")]


class Time:
    """A clock that only measurements move."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def timed_run(
    monkeypatch: pytest.MonkeyPatch, servers: list[str], rounds: int, seconds: float, took: Callable[[str, int], float]
) -> Runner:
    """A run of three sizes whose measurements take so many seconds of a clock of their own."""
    time = Time()

    def measure(host: Host, server: str, size: int, limit: float) -> list[Measured]:
        time.now += took(server, size)
        return [Measured(0.1, size, 0.1, 0.1, 0.1)]

    monkeypatch.setattr("bench.runner.time", time)
    scenario = SCENARIOS["herd"]._replace(measure=measure)
    with hosting("threaded") as host:
        runner = Runner(Plan([scenario], servers, [100, 200, 400], rounds, False, seconds, 20_000), host, quiet)
        runner.run()
    return runner


def test_a_further_round_does_not_cost_the_next_size_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rounds of all sizes say more than five of the small ones."""
    servers = ["uvloop", "threaded", "control"]
    runner = timed_run(monkeypatch, servers, 5, 80.0, lambda server, size: size / 100)
    assert not runner.endings
    rounds = Counter(one.size for one in runner.samples if one.server == "uvloop")
    assert (rounds[100], rounds[200]) == (5, 4)
    assert rounds[400] >= 3


def test_ours_goes_on_where_the_others_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def took(server: str, size: int) -> float:
        return size / 100 if server == "uvloop" else size / 10

    runner = timed_run(monkeypatch, ["uvloop", "threaded"], 3, 70.0, took)
    assert {(one.server, one.size) for one in runner.samples} == {
        ("uvloop", 100), ("threaded", 100), ("uvloop", 200), ("uvloop", 400)
    }  # fmt: skip
    [ending] = runner.endings
    assert (ending.server, ending.size) == ("threaded", 200)
    assert "3 rounds of all servers compared would take about" in ending.reason


def test_a_server_that_does_not_answer_ends_its_own_line_only(host: Host) -> None:
    def measure(host: Host, server: str, size: int, limit: float) -> list[Measured]:
        if server == "threaded":
            raise Late("not done after 20 s")
        return [Measured(0.1, size, 0.1, 0.1, 0.1)]

    scenario = SCENARIOS["fanout"]._replace(measure=measure, memory=(), sizes=(4, 8))
    for sizes, failures in (([], []), ([4, 8], ["fanout, threaded at 4: not done after 20 s"])):
        runner = Runner(Plan([scenario], ["uvloop", "threaded"], sizes, 1, False, LIMIT, 20_000), host, quiet)
        runner.run()
        assert [(one.server, one.size) for one in runner.samples] == [("uvloop", 4), ("uvloop", 8)]
        assert [(one.server, one.size, one.reason) for one in runner.endings] == [
            ("threaded", 4, "not done after 20 s")
        ]
        assert runner.notes == ["fanout, threaded at 4: not done after 20 s"]
        assert runner.failures == failures  # a slow server's line just ends, but not at a size that was asked for


def test_who_is_too_late_where_it_was_asked_for_fails_the_run_whatever_memory_says(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(host: Host, server: str, size: int, limit: float) -> list[Measured]:
        raise Late("not done after 20 s")

    monkeypatch.setattr("bench.scenarios.without_sockets", lambda *_: Measured(0.1, 1, 0.1, 0.0, 0.0))
    runner = Runner(
        plan_of(sizes=[4096], scenarios=[IN_MEMORY._replace(measure=measure)], open_files=20_000), host, quiet
    )
    runner.run()
    assert runner.failures == ["herd, uvloop at 4,096: not done after 20 s"]


def test_who_is_too_late_is_told(tmp_path: Path) -> None:
    """Once, whatever else there is; a sample has a minute, or 20 s in a quick run."""
    assert [plan_of(quick=quick).patience for quick in (False, True)] == [60.0, 20.0]
    text = "from bench import command, plan\nplan.Plan.patience = 0.01\ncommand.main()"
    words = [sys.executable, "-c", text, "scale", "--scenario", "init", "--transport", "memory", "--out", str(tmp_path)]
    reason = "not done after 0.01 s: the sessions in memory are still driven"
    for more, size, told in (
        (["--sizes", "1000000"], "1,000,000", []),
        ([], "1,024", ["Note: init, uvloop at 1,024: "]),
    ):
        done = subprocess.run([*words, *more], capture_output=True, timeout=LIMIT, cwd=ROOT, check=False)
        *_, note, error = done.stderr.decode().splitlines()
        assert done.returncode == 1
        assert error.endswith(f"init, uvloop at {size}: {reason}")
        assert [line.removesuffix(reason) for line in [note] if line.startswith("Note: ")] == told


@pytest.mark.slow
def test_the_control_has_a_process_of_its_own(host: Host) -> None:
    """Which is kept, as the reference's is."""
    pids: dict[str, set[int]] = {"libuv": set(), "control": set()}
    for server in ("libuv", "control", "libuv", "control"):
        with host.running(server) as found:
            pids[server].add(found.pid)
    assert pids["libuv"] != pids["control"]
    assert [len(found) for found in pids.values()] == [1, 1]


@pytest.mark.slow
def test_a_point_beyond_the_file_limit_or_the_time_is_an_ending(host: Host) -> None:
    runner = Runner(Plan([SCENARIOS["init"]], ["uvloop"], [4, 700], 1, False, LIMIT, 1000), host, quiet)
    runner.run()
    assert [(one.size, one.reason) for one in runner.endings] == [
        (700, "a process may have 1,000 files open here, 1,300 are needed")
    ]
    late = Runner(Plan([SCENARIOS["init"]], ["uvloop"], [4, 8], 1, False, 0.001, 20_000), host, quiet)
    late.run()
    assert [(one.size, "s are left" in one.reason) for one in late.endings] == [(8, True)]
    assert [len(one.failures) for one in (runner, late)] == [1, 1]


@pytest.mark.parametrize(("left", "done", "spare"), [(200, 0, 90), (95, 0, 5), (75, 2, 5), (65, 5, 5), (50, 5, 50)])
def test_the_others_get_no_time_that_a_larger_size_needs(host: Host, left: float, done: int, spare: float) -> None:
    """Ours takes 10 s a round here and 20 s at the next size: rounds 4 and 5 are given up for it."""
    line = Line("uvloop", "sockets", SCENARIOS["init"])
    for size, seconds in ((4, 5.0), (8, 10.0)):
        line.add(size, 0.0, seconds)
    runner = Runner(plan_of(), host, quiet)
    assert runner._spare([line], [8, 16], 5, done, time.monotonic() + left) == pytest.approx(spare, abs=1)


@pytest.mark.slow
def test_those_compared_end_at_the_same_size(host: Host) -> None:
    """Whatever one of them alone would take; the others end on their own, and ours where it would by itself."""
    asked: list[tuple[str, int]] = []

    def measure(host: Host, server: str, size: int, limit: float) -> list[Measured]:
        asked.append((server, size))
        time.sleep(size / 50 if server in ("control", "uvloop") else 0.0)
        return [Measured(0.1, size, 0.1, 0.1, 0.1)]

    scenario = SCENARIOS["init"]._replace(measure=measure, memory=())
    runner = Runner(Plan([scenario], [], [4, 8, 8_000], 2, False, 20.0, 20_000), host, quiet)
    runner.run()
    assert {server for server, size in asked if size == 8} >= {"uvloop", "libuv", "control"}
    ends = {one.server: one for one in runner.endings}
    assert {ends[server].size for server in ("uvloop", "libuv", "control")} == {8_000}
    assert len({ends[server].reason for server in ("uvloop", "libuv", "control")}) == 1
    assert "legacy" not in ends


def test_newcomers_share_the_servers_time_with_the_background(host: Host) -> None:
    """Two requests of each newcomer, and what was answered meanwhile: as many ADDs as the sum says."""
    with host.running("uvloop") as server, fleet("127.0.0.1", server.port, 8) as load:
        load.tell(Play(hello(), LIMIT))
        load.open(20)
        took = load.tell(Play(join(), LIMIT, background=8, behind=[act(said("add", b"/busy", 1), 8)]))
        with socket.create_connection(("127.0.0.1", server.port)) as one:
            one.sendall(hello()[0].request + said("add", b"/busy", 0))
            answer = one.recv(12, socket.MSG_WAITALL)
    assert took.operations == 40
    assert took.behind == int.from_bytes(answer[4:], "little") > 0
    assert measured(took, 1.0).operations == 40 + took.behind


@pytest.mark.slow
def test_rank_0_returns_when_it_has_seen_all(host: Host) -> None:
    with host.running("uvloop") as server, FirstRank(server.port, LIMIT) as first:
        with socket.create_connection(("127.0.0.1", server.port)) as other:
            other.sendall(b"".join(step.request for step in join()))
            other.recv(12, socket.MSG_WAITALL)
        ended = first.sees(2)
        assert ended is not None
        assert ended > first.began
    with host.running("uvloop") as server, FirstRank(server.port, 0.1) as first:
        assert first.sees(2) is None


@pytest.mark.slow
def test_a_server_that_dies_ends_the_run_and_keeps_what_was_measured(host: Host) -> None:
    def die(host: Host, server: str, size: int, limit: float) -> list[object]:
        with host.running(server) as one:
            os.kill(one.pid, signal.SIGKILL)
            until(lambda: gone(one.pid))
            raise LoadError("a connection was lost")

    deadly = SCENARIOS["herd"]._replace(measure=die)  # type: ignore[arg-type]
    runner = Runner(Plan([SCENARIOS["init"], deadly], ["uvloop"], [4], 1, False, LIMIT, 20_000), host, quiet)
    with pytest.raises(Died, match="herd, uvloop at 4: the server has ended by itself: a connection was lost"):
        runner.run()
    assert [one.scenario for one in runner.samples] == ["init"]
    assert [one.scenario for one in runner.endings] == ["herd"]


@pytest.mark.parametrize("name", ["fanout", "barrier-opcode", "init"])
def test_a_server_that_dies_while_it_is_asked_is_called_dead(
    host: Host, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far it got: what breaks is a connection of the benchmark's own."""
    victim: list[int] = []
    running = Host.running

    @contextmanager
    def watched(self: Host, server: str, **how: bool) -> Iterator[Server]:
        with running(self, server, **how) as one:
            victim[:] = [one.pid]
            yield one

    def ask(self: Peer, request: bytes, reply: int) -> bytes:
        os.kill(victim[0], signal.SIGKILL)
        return asked(self, request, reply)

    asked = Peer.ask
    monkeypatch.setattr(Host, "running", watched)
    monkeypatch.setattr(Peer, "ask", ask)
    plan = Plan([SCENARIOS[name]._replace(memory=())], ["uvloop"], [4], 1, False, LIMIT, 20_000)
    with pytest.raises(Died, match=f"{name}, uvloop at 4: the server has ended by itself: "):
        Runner(plan, host, quiet).run()


def test_a_peer_of_nobody() -> None:
    with pytest.raises(Unreachable, match="a connection cannot be made: Connection refused"):
        Peer(free_port(), LIMIT)


def test_a_peer_that_is_not_answered() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        Peer(silent.getsockname()[1], 0.05) as peer,
        pytest.raises(Late, match=r"not done after 0\.05 s: a connection was not answered"),
    ):
        peer.ask(b"?", 1)


def test_a_server_that_does_not_start_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "LIMIT", 0.1)
    monkeypatch.setattr(servers, "command_of", lambda *what: ["sleep", "60"])
    with hosting() as host, pytest.raises(Late, match="the server has not started within 0 s"), host.running("uvloop"):
        pass


@pytest.mark.slow
@pytest.mark.skipif(not has_torch(), reason="PyTorch is not installed")
def test_a_kept_process_has_taken_leave_of_its_server_before_the_next_is_measured(host: Host) -> None:
    with host.running("libuv") as server:
        port = server.port
    with pytest.raises(Unreachable):
        Peer(port, LIMIT)


@pytest.mark.parametrize(("window", "least", "most"), [(0, 100, 100), (50, 1, 50)])
def test_a_herd_comes_before_anybody_is_served(window: int, least: int, most: int) -> None:
    """When the first hello is there, the connections of all others are."""
    found: list[int] = []

    def count(listener: socket.socket) -> None:
        with ExitStack() as stack:
            first = stack.enter_context(listener.accept()[0])
            first.settimeout(LIMIT)
            first.recv(1000)
            listener.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    stack.enter_context(listener.accept()[0])
                    found.append(1)

    with socket.create_server(("127.0.0.1", 0), backlog=200) as listener:
        listener.settimeout(LIMIT)
        thread = threading.Thread(target=count, args=[listener])
        thread.start()
        generator = Generator("127.0.0.1", listener.getsockname()[1])
        generator.open(100, 0)
        with pytest.raises(LoadError):
            generator.play(join(), 1.0, window=window)
        generator.close()
        thread.join(LIMIT)
    assert least <= 1 + len(found) <= most


def resetting(listener: socket.socket, resets: int, connections: int) -> None:
    """Reset so many connections before they are answered; answer the hello of those that follow, and no more."""
    with ExitStack() as stack, suppress(OSError):  # nobody comes any more, or stays
        for number in range(resets + connections):
            one = stack.enter_context(listener.accept()[0])
            one.settimeout(LIMIT)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.recv(1000)
            if number < resets:
                one.close()
            else:
                one.sendall(PONG)
        one.recv(1000)


@contextmanager
def load_on(resets: int) -> Iterator[Generator]:
    """Two connections to who resets so many."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT)
        thread = threading.Thread(target=resetting, args=[listener, resets, 2], daemon=True)
        thread.start()
        generator = Generator("127.0.0.1", listener.getsockname()[1])
        generator.open(2, 0)
        try:
            yield generator
        finally:
            generator.close()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(LIMIT)


def test_a_connection_that_is_reset_before_its_answer_is_made_again() -> None:
    """So does a kernel with connections for which its backlog has no room, and PyTorch's client tries again."""
    with load_on(3) as generator:
        assert generator.play(hello(), LIMIT).operations == 2
        with pytest.raises(Unreachable, match="was lost after 0 requests"):
            generator.play(hello(), LIMIT)


def test_but_not_for_ever() -> None:
    with load_on(100) as generator, pytest.raises(Unreachable, match="was lost after 0 requests: Connection reset"):
        generator.play(hello(), LIMIT)


def scale(*words: str) -> list[str]:
    return [sys.executable, "-m", "bench", "scale", *words]


@pytest.mark.slow
def test_the_command_leaves_a_run(tmp_path: Path) -> None:
    words = ["--scenario", "init", "--server", "uvloop", "--sizes", "8", "--rounds", "1", "--out", str(tmp_path)]
    done = subprocess.run(scale(*words), capture_output=True, timeout=LIMIT, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    run = records.read(tmp_path / "run.json")
    assert run.complete
    assert [(one.scenario, one.size) for one in run.samples] == [("init", 8)]


INIT_THEN_STEADY = ["--scenario", "init", "--scenario", "steady", "--server", "uvloop", "--sizes", "4"]


@contextmanager
def steady(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run that has the samples of `init`, and is long at those of `steady`."""
    words = scale(*INIT_THEN_STEADY, "--rounds", "3", "--out", str(tmp_path))
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the tests, and what they start, ignore it
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    signal.signal(signal.SIGHUP, before)
    try:
        until(lambda: (tmp_path / "run.json").exists() and len(below(process.pid)) == 2)
        yield process
    finally:
        process.kill()
        process.communicate()


def until(so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def below(pid: int) -> list[int]:
    """The processes that a process has started: a server and a generator."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def has_init(folder: Path) -> bool:
    run = records.read(folder / "run.json")
    return not run.complete and any(one.scenario == "init" for one in run.samples)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_keeps_what_was_measured(tmp_path: Path, number: int) -> None:
    with steady(tmp_path) as process:
        for _ in range(3):
            process.send_signal(number)
        _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    assert errors.decode().splitlines()[-1] == "Error: interrupted; what was measured until then is kept"
    assert has_init(tmp_path)


@pytest.mark.slow
def test_a_kill_keeps_what_was_measured_and_leaves_no_process(tmp_path: Path) -> None:
    with steady(tmp_path) as process:
        children = below(process.pid)
        process.kill()
        until(lambda: all(map(gone, children)))
    assert has_init(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("server", ["uvloop", "libuv"])
def test_a_trainer_ends_with_its_standard_input(host: Host, server: str) -> None:
    process = subprocess.Popen(
        command_of(server, True), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()
    )
    with process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        process.stdin.close()
        assert process.wait(LIMIT) == 1


@pytest.mark.slow
def test_a_broken_standard_error_ends_nothing(tmp_path: Path) -> None:
    words = scale(*INIT_THEN_STEADY, "--rounds", "1", "--out", str(tmp_path))
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT)
    assert process.stderr is not None
    process.stderr.close()
    process.wait(LIMIT)
    assert records.read(tmp_path / "run.json").complete


def test_a_size_that_was_measured_is_kept(host: Host) -> None:
    kept = []

    def measure(host: Host, server: str, size: int, limit: float) -> list[Measured]:
        return [Measured(0.1, size, 0.1, 0.1, 0.1)]

    plan = Plan([SCENARIOS["herd"]._replace(measure=measure)], ["uvloop"], [4, 8], 2, False, LIMIT, 20_000)
    runner = Runner(plan, host, quiet, lambda: kept.append(len(runner.samples)))
    runner.run()
    assert kept == [2, 4]


def test_the_run_before_goes_aside_and_nothing_does_not_replace_it(tmp_path: Path) -> None:
    before, now = made_up.run(made_up.samples("uvloop", [1.0])), made_up.run(made_up.samples("libuv", [2.0]))
    for run in (before, made_up.run(), now, now, before):
        Keeper(tmp_path).write(run)
    assert records.read(tmp_path / "run.json") == before
    aside = [tmp_path / f"run-20261121T070000{more}.json" for more in ("", "-2", "-3")]
    assert [records.read(path) for path in aside] == [before, now, now]
    assert len(list(tmp_path.iterdir())) == 4


def test_what_is_no_run_goes_aside_too(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("mine")
    keeper = Keeper(tmp_path)
    for walls in ([1.0], [1.0, 2.0]):
        keeper.write(made_up.run(made_up.samples("uvloop", walls)))
    assert len(records.read(tmp_path / "run.json").samples) == 2
    assert [path.read_text() for path in tmp_path.glob("run-*")] == ["mine"]


def test_a_folder_in_the_files_place_is_found_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "run.json").mkdir()
    done = subprocess.run(scale("--out", str(tmp_path)), capture_output=True, timeout=LIMIT, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert done.stderr.decode().splitlines()[-1] == (
        f"Error: Invalid value for '--out': cannot write {tmp_path}/run.json: Is a directory"
    )


@pytest.mark.slow
def test_a_full_file_table_ends_the_line(tmp_path: Path) -> None:
    words = ["--scenario", "init", "--server", "uvloop", "--sizes", "8,500", "--rounds", "1", "--out", str(tmp_path)]
    done = subprocess.run(
        scale(*words), capture_output=True, timeout=LIMIT, cwd=ROOT, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (700, 700)),
    )  # fmt: skip
    assert b"Traceback" not in done.stderr
    run = records.read(tmp_path / "run.json")
    assert [one.size for one in run.samples] == [8]
    assert "files open" in run.endings[0].reason
    assert done.returncode == 1
    assert b"files open" in done.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["--sizes", "x"],
        ["--sizes", "0"],
        ["--sizes", ""],
        ["--sizes", ","],
        ["--sizes", "4,"],
        ["--seconds", "nan"],
        ["--transport", "nix"],
        ["--scenario", "nix"],
        ["--rounds", "0"],
        ["--out", "/proc/nix"],
    ],
)
def test_bad_arguments_are_one_line(words: list[str]) -> None:
    done = subprocess.run(scale(*words), capture_output=True, timeout=LIMIT, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert done.stderr.decode().splitlines()[-1].startswith("Error: ")
    assert b"Traceback" not in done.stderr
