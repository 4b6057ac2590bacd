"""What each scenario is called, what of its samples is compared, and what that means.

Knows the scenarios' names and the fields of a sample. Must not know statistics, files or figures.
Invariant: of everything that is compared, less is better.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from bench.records import Sample


class Measure(NamedTuple):
    """Something that a sample says; the samples of one round are compared by it."""

    name: str
    """As in a title: "the time of PyTorch libuv"."""
    axis: str
    """As at an axis, with what it is per."""
    unit: Literal["seconds", "bytes"]
    of: Callable[[Sample], float | None]
    """None where this sample does not say it."""


class Scene(NamedTuple):
    """A scenario, for readers."""

    name: str
    title: str
    measure: Measure
    cpu: Measure
    sizes: str
    """What a size counts."""
    what: str
    """What happens and what is measured, for the report."""


def _cpu_of_each(what: str) -> Measure:
    return Measure("server CPU", f"server CPU per {what}", "seconds", _cpu)


def _cpu(sample: Sample) -> float | None:
    return sample.server_cpu_seconds / sample.operations if sample.operations else None


def _wall(sample: Sample) -> float | None:
    return sample.wall_seconds


def _wall_of_each(sample: Sample) -> float | None:
    return sample.wall_seconds / sample.operations if sample.operations else None


def _memory(sample: Sample) -> float | None:
    return None if sample.server_memory_bytes is None else sample.server_memory_bytes / sample.size


def _p99(sample: Sample) -> float | None:
    return sample.p99_seconds


TIME = Measure("time", "time", "seconds", _wall)
TIME_OF_EACH = Measure("time per operation", "time per operation", "seconds", _wall_of_each)
MEMORY = Measure("memory", "memory added per rank", "bytes", _memory)
P99 = Measure("p99 latency", "p99 latency", "seconds", _p99)
CPU_OF_RANK = _cpu_of_each("rank")
CPU_OF_OPERATION = _cpu_of_each("operation")
CPU_OF_REQUEST = _cpu_of_each("request, of all")
"""Of those too that are not what the scenario is about, but keep the server busy meanwhile."""

_SCENES = (
    Scene(
        "init",
        "Store initialization",
        TIME,
        CPU_OF_RANK,
        "ranks",
        "Every rank connects, shakes hands and joins; the time is until rank 0 returns, when all have joined.",
    ),
    Scene(
        "barrier",
        "Barrier run time: store_based_barrier ×10",
        TIME,
        CPU_OF_OPERATION,
        "ranks",
        "All ranks pass `store_based_barrier`, as torch.distributed's does it, ten times; the time is for all ten.",
    ),
    Scene(
        "barrier-opcode",
        "Barrier in one message: BARRIER ×10",
        TIME,
        CPU_OF_OPERATION,
        "ranks",
        "The same barriers with the BARRIER command: one message a rank instead of three.",
    ),
    Scene(
        "herd",
        "Herd: every rank connects at once",
        TIME,
        CPU_OF_RANK,
        "ranks",
        "Initialization without stagger: all connections are opened in the same moment; the time is until the last is "
        "served. One that the server's full backlog has dropped is asked for again after a second, by the kernel: that "
        "is in the time, and not in the latencies, which begin when a connection stands.",
    ),
    Scene(
        "newcomers",
        "Newcomers on a busy server",
        TIME,
        CPU_OF_REQUEST,
        "ranks",
        "Ranks join while the server is kept busy by others; the time is until all newcomers are served. The CPU is "
        "per request answered meanwhile, the newcomers' and the others' together.",
    ),
    Scene(
        "steady",
        "Steady load: one CHECK a second from every rank",
        P99,
        CPU_OF_OPERATION,
        "ranks",
        "As NCCL's monitor does it. The rate is given, so what is compared is the latency that 99 of 100 stay below.",
    ),
    Scene(
        "fanout",
        "Wake-up: one SET, all ranks wait for it",
        TIME,
        CPU_OF_RANK,
        "ranks",
        "All ranks WAIT for a key that one rank then SETs; the time is until the last has been told.",
    ),
    Scene(
        "exchange",
        "Key exchange: each rank SETs 1 KiB and reads all others'",
        TIME,
        CPU_OF_OPERATION,
        "ranks",
        "Each rank SETs 1 KiB and reads that of all the others by MULTI_GET; the time is until all have everything.",
    ),
    Scene(
        "operations",
        "Throughput and latency by operation",
        TIME_OF_EACH,
        CPU_OF_OPERATION,
        "clients",
        "Clients send one kind of request as fast as replies come; what is compared is the time per operation.",
    ),
    Scene(
        "memory",
        "Memory per rank",
        MEMORY,
        CPU_OF_RANK,
        "ranks",
        "By how much the server's resident memory grows over the idle server's when all ranks join, over their number.",
    ),
    Scene(
        "resolver",
        "A resolver that does not answer",
        TIME,
        CPU_OF_RANK,
        "ranks",
        "Initialization while the name server, a stub on loopback, never replies: PyTorch's servers look up the name "
        "of every peer.",
    ),
    Scene(
        "busy-trainer",
        "A trainer whose main thread is busy",
        TIME,
        CPU_OF_OPERATION,
        "ranks",
        "The process that owns the server computes in Python without pause while the ranks are served.",
    ),
)

SCENES = {scene.name: scene for scene in _SCENES}
"""By name, in the order of the report."""


def scene_of(scenario: str) -> tuple[Scene, str]:
    """The scene a scenario belongs to, and what of it this is: "operations-set" is the "set" of "operations".

    One that is not known is a scene by itself, compared by time.
    """
    for name in sorted(SCENES, key=len, reverse=True):
        if scenario == name:
            return SCENES[name], ""
        if scenario.startswith(name) and scenario[len(name)] in "-:/ ":
            return SCENES[name], scenario[len(name) + 1 :]
    return Scene(scenario, scenario.capitalize(), TIME, CPU_OF_OPERATION, "size", ""), ""
