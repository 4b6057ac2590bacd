"""What `compare.py` says of measurements: the rule by which a change is slower, and who sets the pace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import compare, processes
from bench.compare import BEFORE, NOW, Record, Row

SLOWER = [1.0, 1.03, 1.03, 1.04, 1.04, 1.05, 1.05, 1.06, 1.06, 1.07, 1.08]
SAME = [0.95, 0.97, 0.98, 0.99, 0.99, 1.0, 1.0, 1.01, 1.02, 1.03, 1.05]


def runs(ratios: list[float], job: str = "start", mode: str = "init", **fields: float) -> list[Record]:
    """Return the records of both builds: each repetition at another speed, and these ratios of CPU time."""
    measured = dict.fromkeys(("srv_cpu_us_per_conn", "lg_cpu_us_per_conn", *compare.SHOWN[mode]), 10.0) | fields
    found: list[Record] = []
    for repetition, ratio in enumerate(ratios):
        common: dict[str, Any] = {"job": job, "mode": mode, "rep": repetition}
        before = {field: value * (1 + repetition % 3) for field, value in measured.items()}
        found.append({**common, "tag": BEFORE, **before})
        found.append({**common, "tag": NOW, **before, "srv_cpu_us_per_conn": before["srv_cpu_us_per_conn"] * ratio})
    return found


def scaled(records: list[Record], field: str, factor: float) -> list[Record]:
    return [{**each, field: each[field] * factor} if each["tag"] == NOW else each for each in records]


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        (SLOWER, True),
        (SAME, False),
        ([1.01] * 11, False),  # certain, but not worth a name
        ([1.02] * 11, False),
        ([1.021] * 11, True),
        ([0.9, 0.95, 0.98, 0.99, 1.05, 1.06, 1.1, 1.2, 1.3, 1.4, 1.5], False),  # perhaps noise
        ([0.8] * 11, False),
        ([], False),
    ],
)
def test_slower_is_what_is_certain_and_large_enough(ratios: list[float], expected: bool) -> None:
    assert compare.is_slower(ratios) is expected


def test_repetitions_are_compared_in_pairs() -> None:
    assert compare.seem_slower(runs(SLOWER)) == [(Row("start", "init", "init"), "srv_cpu_us_per_conn")]
    assert compare.seem_slower(runs(SAME)) == []


def test_only_cpu_and_memory_are_judged() -> None:
    found = runs(SAME)
    for field in ("wall_ms", "p99_us", "rss_per_conn", "lg_cpu_us_per_conn"):
        found = scaled(found, field, 3)
    assert [field for _, field in compare.seem_slower(found)] == ["rss_per_conn"]


def test_memory_that_does_not_grow_says_nothing() -> None:
    assert compare.seem_slower(runs(SAME, rss_per_conn=0)) == []


def test_what_seems_slower_is_measured_again_alone() -> None:
    asked: list[str] = []

    def again(ratios: list[float]) -> list[tuple[Row, str]]:
        def measured(job: str) -> list[Record]:
            asked.append(job)
            return runs(ratios, job)

        return compare.judge(runs(SLOWER, "one") + runs(SAME, "other"), measured)

    assert again(SLOWER) == [(Row("one", "init", "init"), "srv_cpu_us_per_conn")]
    assert again(SAME) == []
    assert asked == ["one", "one"]


def test_another_row_of_the_job_that_is_slower_only_then_is_not() -> None:
    first = runs(SLOWER)
    then = scaled(runs(SAME), "rss_per_conn", 2)
    assert compare.judge(first, lambda _: then) == []


def test_nothing_is_measured_again_if_nothing_seems_slower() -> None:
    assert compare.judge(runs(SAME), lambda job: pytest.fail(job)) == []


@pytest.mark.parametrize(("again", "status"), [(SLOWER, 1), (SAME, 0)])
def test_the_exit_status_says_whether_something_is_slower(
    again: list[float], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def measure(servers: dict[str, str | None], jobs: list[tuple[str, str]], reps: int) -> tuple[list[Record], int]:
        asked.append(reps)
        return runs(SLOWER if len(asked) == 1 else again), 0

    monkeypatch.setenv("BENCH_BUILD", "interpreted")
    monkeypatch.setattr(compare, "measure", measure)
    words = ["--no-netns", "--against", str(processes.ROOT), "start: -n 1 -m init"]
    monkeypatch.setattr(sys, "argv", ["compare.py", *words])
    assert compare.main() == status
    assert asked == [11, 25]
    verdict = "slower: start | init | srv_cpu_us_per_conn" if status else "nothing is slower"
    assert capsys.readouterr().out.splitlines()[-1] == verdict


@pytest.mark.parametrize(("load", "waits"), [(15.0, True), (10.0, False), (5.0, False)])
def test_a_load_generator_that_sets_the_pace_is_named(
    load: float, waits: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    compare.report(runs([1.0] * 3, lg_cpu_us_per_conn=load), [BEFORE, NOW], BEFORE)
    text = "the load generator is the bottleneck, in µs of CPU: 30.00 beside 20.00 of before, 30.00 beside 20.00 of now"
    assert (text in capsys.readouterr().out) is waits


# What a change is judged against


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)


def test_a_folder_with_the_package_is_taken_as_it_is() -> None:
    assert processes.tree_of(str(processes.ROOT)) == processes.ROOT


def test_a_revision_that_has_been_compiled_is_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(tmp_path, "init")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--allow-empty", "-m", "first")
    commit = subprocess.check_output(["git", "-C", str(tmp_path), "rev-parse", "HEAD"], text=True).strip()
    made = tmp_path / "build" / "against" / commit
    made.mkdir(parents=True)
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    assert processes.tree_of("HEAD") == made


@pytest.mark.parametrize("name", ["", "no-such-revision"])
def test_what_is_neither_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="neither a folder with the package nor a git revision"):
        processes.tree_of(name)


def test_builds_of_two_kinds_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tcpstore_async").mkdir()
    for name in ("tcpstore_async/__init__.py", "x.so"):
        (tmp_path / name).touch()
    monkeypatch.setenv("BENCH_BUILD", "interpreted")
    with pytest.raises(ValueError, match="only one of these is compiled"):
        compare.builds(str(tmp_path))
