"""Runs of the benchmark that nobody measured, for testing what is made of them."""

from __future__ import annotations

from collections.abc import Iterable

from bench.records import Ending, Machine, Run, Sample, Transport, Versions

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
    late: float | None = None,
    memory: int | None = None,
) -> list[Sample]:
    """One a round; `walls` and `late` (p50) in seconds, `cpu` the server's in seconds, `memory` in bytes."""
    p95, p99 = (None, None) if late is None else (2 * late, 4 * late)
    return [
        Sample(scenario, server, transport, size, number, wall, size, cpu, cpu / 2, share, late, p95, p99, memory)
        for number, wall in enumerate(walls)
    ]


def run(
    measured: Iterable[Sample] = (),
    endings: Iterable[Ending] = (),
    *,
    complete: bool = True,
    reference: str = "libuv",
) -> Run:
    return Run(
        "2026-11-21T07:00:00+00:00", 100.0, "python -m bench scale", MACHINE, VERSIONS, list(measured), list(endings),
        complete, reference,
    )  # fmt: skip
