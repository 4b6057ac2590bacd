"""The benchmark of the longest step has a case for every command."""

from __future__ import annotations

from bench_factories import run_program


def test_every_command_has_a_case() -> None:
    done = run_program("-m", "bench.turns", "--runs", "1", "LEAVE")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "LEAVE" in done.stdout
