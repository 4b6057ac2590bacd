"""The cost of a rank does not grow with the job: growth is tested, not times."""

from __future__ import annotations

from bench_factories import run_program
from tcpstore_async.serving import build


def test_nothing_is_quadratic() -> None:
    """Quadratic cost would be sixteen times as much; the caches of a busy machine make it three times."""
    words = "--sizes 1000,16000 --runs 2 --max-growth 6"
    done = run_program("-m", "bench", "growth", *words.split(), BENCH_BUILD=build())
    assert done.returncode == 0, done.stdout + done.stderr
    rows = done.stdout.splitlines()[1:]
    assert [row.split()[1:3] for row in rows] == [
        ["tuned", "1,000"], ["tuned", "16,000"], ["default", "1,000"], ["default", "16,000"]
    ]  # fmt: skip
    for name in ("init", "barrier", "one_message_barrier", "fan_out", "leave_waiting", "give_up_so_many_keys"):
        assert all(f" {name} " in row for row in rows)


def test_a_row_that_grows_too_much_is_named() -> None:
    done = run_program("-m", "bench", "growth", *"--sizes 2000,1000 --runs 1 --max-growth 0.01".split())
    assert done.returncode == 1
    rows = [row.split()[:3] for row in done.stdout.splitlines()[1:]]  # in whatever order the sizes were given
    assert rows[:2] == [["interpreted", "tuned", "1,000"], ["interpreted", "tuned", "2,000"]]
    assert done.stderr.count("\n") == 1
    assert "ranks, collector" in done.stderr
    assert "(max 0.01)" in done.stderr
