"""Which points a run measures, in which order, and why a series ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bench.scale.runner import ActiveSeries, Plan, Runner, _in_order
from bench.scale.scenarios import SCENARIOS, SECONDS, Scenario
from bench.scale.servers import Died, Measured, Point, hosting
from support import LIMIT
from tcpstore_async.tools.load.generator import Late, LoadError

NAME = "thundering-herd"


def quiet(done: float, text: str) -> None:
    pass


def instant(point: Point) -> list[Measured]:
    return [Measured(0.1, point.size, 0.1, 0.1, 0.1)]


def scenario(measure: Callable[[Point], list[Measured]] = instant, **fields: Any) -> Scenario:
    return replace(SCENARIOS[NAME], measure=measure, **fields)


def plan_of(**fields: Any) -> Plan:
    return Plan([scenario()], ["uvloop"], [], 1, False, LIMIT, 20_000)._replace(**fields)


def run(plan: Plan, reference: str = "threaded") -> Runner:
    with hosting(reference) as host:
        runner = Runner(plan, host, quiet)
        runner.run()
    return runner


def endings(runner: Runner) -> list[tuple[str, int, str]]:
    return [(one.server, one.size, one.reason) for one in runner.endings]


class Clock:
    """A clock that only measurements advance."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("bench.scale.runner.time", made)
    return made


def taking(clock: Clock, seconds: Callable[[str, int], float]) -> Scenario:
    """Return a scenario whose samples take this long."""

    def measure(point: Point) -> list[Measured]:
        clock.now += seconds(point.server, point.size)
        return instant(point)

    return scenario(measure)


def test_rounds_are_interleaved_in_changing_order() -> None:
    runner = run(plan_of(servers=["uvloop", "threaded"], sizes=[4, 8], rounds=3))
    assert [(one.size, one.round) for one in runner.samples] == [
        (size, number) for size in (4, 8) for number in range(3) for _ in range(2)
    ]
    one, other = ["uvloop", "threaded"], ["threaded", "uvloop"]
    assert [one.server for one in runner.samples] == (one + other + other) * 2


def test_every_server_is_first_and_follows_every_other() -> None:
    series = [ActiveSeries(server, "sockets", scenario()) for server in ("uvloop", "libuv", "control")]
    orders = [tuple(one.server for one in _in_order(series, number)) for number in range(6)]
    assert len(set(orders)) == 6
    assert len({order[0] for order in orders[:3]}) == 3


def test_samples_are_saved_after_each_size() -> None:
    saved = []
    with hosting("threaded") as host:
        plan = plan_of(sizes=[4, 8], rounds=2)
        runner = Runner(plan, host, quiet, lambda: saved.append(len(runner.samples)))
        runner.run()
    assert saved == [2, 4]


def test_rounds_of_a_plan() -> None:
    for name in ("init", NAME, "memory"):
        for quick in (False, True):
            assert plan_of(rounds=7, quick=quick).rounds_of(SCENARIOS[name], "sockets") == 7
    default, quickly = plan_of(rounds=0), plan_of(rounds=0, quick=True)
    assert [default.rounds_of(SCENARIOS["init"], transport) for transport in ("sockets", "memory")] == [5, 3]
    assert [quickly.rounds_of(SCENARIOS[name], "sockets") for name in ("init", "memory")] == [3, 1]


def test_sizes_of_a_plan() -> None:
    init = SCENARIOS["init"]
    assert plan_of().memory_sizes(init) == list(init.memory)
    assert plan_of(quick=True).memory_sizes(init) == list(init.quick)
    assert plan_of(sizes=[50, 1024]).memory_sizes(init) == [1024]
    assert plan_of(sizes=[50], transports=["memory"]).memory_sizes(init) == [50]
    assert plan_of(transports=["memory"]).socket_sizes(init) == ()
    assert plan_of(transports=["sockets"]).memory_sizes(init) == []
    assert plan_of(servers=["libuv"]).memory_sizes(init) == []


def test_a_quick_run_has_a_control_everywhere() -> None:
    runner = run(plan_of(servers=[], quick=True))
    assert sorted(one.server for one in runner.samples) == ["control", "threaded", "uvloop"]
    assert {(server, reason) for server, _, reason in endings(runner)} <= {
        ("relay", "not part of a quick run"),
        ("libuv", "not part of a quick run"), ("legacy", "not part of a quick run"),
        ("libuv", "PyTorch is not installed"), ("legacy", "PyTorch is not installed"),
    }  # fmt: skip


def test_without_a_reference_there_is_no_control() -> None:
    runner = run(plan_of(servers=["control"], sizes=[4]), reference="")
    assert not runner.samples
    assert endings(runner) == [("control", 0, "the run has no reference to measure a second time")]


IN_MEMORY = scenario(memory=(4096,))


@pytest.mark.parametrize(
    ("fields", "fails"),
    [
        ({}, False),
        ({"open_files": 700}, True),
        ({"sizes": [1024, 2048]}, True),
        ({"sizes": [4096]}, True),
        ({"sizes": [4096], "scenarios": [IN_MEMORY]}, False),
        ({"sizes": [4096], "scenarios": [IN_MEMORY], "servers": ["uvloop", "threaded"]}, True),
        ({"sizes": [4096, 5000], "scenarios": [IN_MEMORY]}, True),
        ({"sizes": [4096], "scenarios": [IN_MEMORY], "transports": ["memory"]}, False),
        ({"sizes": [4096], "scenarios": [IN_MEMORY], "transports": ["sockets", "memory"]}, True),
    ],
)
def test_a_run_fails_if_a_requested_size_exceeds_the_file_limit(
    fields: dict[str, Any], fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.scale.runner.without_sockets", lambda *_: Measured(0.1, 1, 0.1, 0.0, 0.0))
    runner = run(plan_of(**{"open_files": 1700, **fields}))
    assert any("files open here" in failure for failure in runner.failures) == fails
    assert bool(runner.failures) == fails


def test_projections() -> None:
    constant = ActiveSeries("uvloop", "sockets", SCENARIOS["operations"])
    constant.add(1, 0.5, 8.0)
    assert constant.projected(64) == 8.5
    linear = ActiveSeries("libuv", "sockets", SCENARIOS[NAME])
    for size, seconds in ((4096, 0.7), (8192, 3.7)):
        linear.add(size, 0.0, seconds)
    assert linear.projected(16_384) == pytest.approx(9.7)
    growing = ActiveSeries("uvloop", "sockets", SCENARIOS["init"])
    growing.add(1, 0.5, 8.0)
    assert growing.projected(8) > 50
    timed = ActiveSeries("uvloop", "sockets", SCENARIOS["steady"])
    timed.add(1024, 0.5, SECONDS + 0.6)
    assert timed.projected(2048) < SECONDS + 1.6
    slow_start = ActiveSeries("libuv", "sockets", SCENARIOS["memory"])
    slow_start.add(1000, 10.0, 0.6)
    assert 10 < slow_start.projected(2000) < 11


def test_a_failed_round_takes_the_others_of_its_size_with_it() -> None:
    calls = Counter[int]()

    def measure(point: Point) -> list[Measured]:
        calls[point.size] += 1
        if calls[8] == 3:
            raise Late("not done after 20 s")
        return instant(point)

    runner = run(plan_of(scenarios=[scenario(measure)], sizes=[4, 8], rounds=3))
    assert [one.size for one in runner.samples] == [4, 4, 4]
    assert endings(runner) == [("uvloop", 8, "not done after 20 s")]


def late(point: Point) -> list[Measured]:
    if point.server == "threaded":
        raise Late("not done after 20 s")
    return instant(point)


@pytest.mark.parametrize("asked_for", [False, True])
def test_a_timeout_ends_one_series_and_fails_a_run_that_requested_the_size(asked_for: bool) -> None:
    plan = plan_of(scenarios=[scenario(late, sizes=(4, 8))], servers=["uvloop", "threaded"])
    runner = run(plan._replace(sizes=[4, 8] if asked_for else []))
    assert [(one.server, one.size) for one in runner.samples] == [("uvloop", 4), ("uvloop", 8)]
    assert endings(runner) == [("threaded", 4, "not done after 20 s")]
    assert runner.notes == [f"{NAME}, threaded at 4: not done after 20 s"]
    assert runner.failures == (runner.notes if asked_for else [])


def test_a_dead_server_ends_the_run_and_keeps_the_samples() -> None:
    def die(point: Point) -> list[Measured]:
        raise Died("the server has exited: a connection was lost")

    with hosting("threaded") as host:
        runner = Runner(plan_of(scenarios=[scenario(), scenario(die)], sizes=[4]), host, quiet)
        with pytest.raises(Died, match=f"{NAME}, uvloop at 4: the server has exited: a connection was lost"):
            runner.run()
    assert len(runner.samples) == 1
    assert len(runner.endings) == 1


def test_another_failure_ends_the_series_and_fails_the_run() -> None:
    def fail(point: Point) -> list[Measured]:
        raise LoadError("wrong reply")

    runner = run(plan_of(scenarios=[scenario(fail)], sizes=[4, 8]))
    assert endings(runner) == [("uvloop", 4, "wrong reply")]
    assert runner.failures == [f"{NAME}, uvloop at 4: wrong reply"]


def timed_run(
    clock: Clock, servers: list[str], rounds: int, budget: float, seconds: Callable[[str, int], float]
) -> Runner:
    timed = taking(clock, seconds)
    return run(plan_of(scenarios=[timed], servers=servers, sizes=[100, 200, 400], rounds=rounds, seconds=budget))


def test_more_rounds_do_not_cost_the_next_size_its_minimum(clock: Clock) -> None:
    runner = timed_run(clock, ["uvloop", "threaded", "control"], 5, 80.0, lambda _, size: size / 100)
    assert not runner.endings
    rounds = Counter(one.size for one in runner.samples if one.server == "uvloop")
    assert (rounds[100], rounds[200]) == (5, 4)
    assert rounds[400] >= 3


def test_compared_servers_end_at_the_same_size_and_ours_goes_on(clock: Clock) -> None:
    servers = ["uvloop", "threaded", "control"]
    runner = timed_run(clock, servers, 3, 100.0, lambda server, size: size / (100 if server == "uvloop" else 10))
    assert {one.size for one in runner.samples if one.server == "uvloop"} == {100, 200, 400}
    assert {one.size for one in runner.samples if one.server != "uvloop"} == {100}
    assert [(server, size) for server, size, _ in endings(runner)] == [("threaded", 200), ("control", 200)]
    assert all("3 rounds of all servers compared would take about" in reason for _, _, reason in endings(runner))


def test_a_slow_server_that_is_not_compared_ends_alone(clock: Clock) -> None:
    servers = ["uvloop", "threaded", "control", "other"]
    runner = timed_run(clock, servers, 1, 40.0, lambda server, size: size / (10 if server == "other" else 100))
    assert {one.size for one in runner.samples if one.server != "other"} == {100, 200, 400}
    [(server, size, reason)] = endings(runner)
    assert (server, size) == ("other", 200)
    assert reason.startswith("one round would take about 19.5 s, 15.0 s are left")


@pytest.mark.parametrize(("left", "done", "spare"), [(200, 0, 90), (95, 0, 5), (75, 2, 5), (65, 5, 5), (50, 5, 50)])
def test_the_others_get_no_time_that_a_larger_size_needs(clock: Clock, left: float, done: int, spare: float) -> None:
    """Ours takes 10 s a round here and 20 s at the next size: rounds 4 and 5 are given up for it."""
    series = ActiveSeries("uvloop", "sockets", SCENARIOS["init"])
    for size, seconds in ((4, 5.0), (8, 10.0)):
        series.add(size, 0.0, seconds)
    with hosting("threaded") as host:
        runner = Runner(plan_of(), host, quiet)
    assert runner._spare([series], [8, 16], 5, done, left) == pytest.approx(spare)
