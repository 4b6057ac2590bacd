"""Invented runs of the benchmark, and real ones of its programs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from bench.scale.results import Ending, Job, Machine, Run, Sample, Transport, Versions

MACHINE = Machine("made up", 2, 8 << 30, "Linux 6.18", 20_000)
VERSIONS = Versions("0.1.0", "compiled", "abc1234", "3.11.7", "0.23.0", "2.13.0")


def samples(
    server: str,
    walls: Iterable[float],
    *,
    scenario: str = "init",
    transport: Transport = "sockets",
    size: int = 1024,
    cpu: float = 0.01,
    share: float = 0.3,
    p50: float | None = None,
    memory: int | None = None,
) -> list[Sample]:
    """Return one sample per round; times in seconds, `cpu` the server's, `memory` in bytes."""
    p95, p99 = (None, None) if p50 is None else (2 * p50, 4 * p50)
    return [
        Sample(scenario, server, transport, size, number, wall, size, cpu, cpu / 2, share, p50, p95, p99, memory)
        for number, wall in enumerate(walls)
    ]


def run(
    measured: Iterable[Sample] = (), endings: Iterable[Ending] = (), *, complete: bool = True, reference: str = "libuv",
    jobs: Mapping[str, Job] = {},
) -> Run:  # fmt: skip
    return Run(
        "2026-11-21T07:00:00+00:00", 100.0, "python -m bench scale", MACHINE, VERSIONS, list(measured), list(endings),
        complete, reference, dict(jobs),
    )  # fmt: skip


def operations(walls: dict[str, float], *, control: bool = True, rounds: int = 3) -> Run:
    """Return a run: ours takes this many seconds per operation of 64 clients, the reference and the control one."""
    measured: list[Sample] = []
    for name, wall in walls.items():
        for server in ("uvloop", "libuv", "control") if control else ("uvloop", "libuv"):
            times = [wall if server == "uvloop" else 1.0] * rounds
            measured += samples(server, times, scenario=f"operations-{name}", size=64, p50=1e-4)
    return run(measured)


ROOT = Path(__file__).parent.parent


def run_program(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in the checkout."""
    environment = {**os.environ, "BENCH_BUILD": "interpreted", **env}
    command = [sys.executable, "-W", "ignore", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False)
