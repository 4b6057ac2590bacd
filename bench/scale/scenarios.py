"""The scenarios of the scale benchmark, each declared once: what is measured, at which sizes, and how it is described.

The figures, the report and the table in docs/benchmark.md are derived from here (`python -m bench.scale.scenarios`
prints the table). Must not know statistics, files or figures.
Invariant: of every metric, less is better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

from bench.scale import workloads
from bench.scale.results import Job, Sample
from bench.scale.start import NCCL2, Pattern
from bench.scale.workloads import Measured


class Metric(NamedTuple):
    """A number derived from a sample; ratios are taken between samples of one round."""

    name: str
    """As in "the time of PyTorch libuv"."""
    axis: str
    """Label of the axis, with what the number is per."""
    unit: Literal["seconds", "bytes", "ranks"]
    of: Callable[[Sample], float | None]
    """None where the sample does not have it."""


def _cpu_per(what: str) -> Metric:
    return Metric("server CPU", f"server CPU per {what}", "seconds", lambda sample: _per_operation(sample, "cpu"))


def _per_operation(sample: Sample, what: Literal["cpu", "wall"]) -> float | None:
    seconds = sample.server_cpu_seconds if what == "cpu" else sample.wall_seconds
    return seconds / sample.operations if sample.operations else None


def _memory_per_rank(sample: Sample) -> float | None:
    return None if sample.server_memory_bytes is None else sample.server_memory_bytes / sample.size


TIME = Metric("time", "time", "seconds", lambda sample: sample.wall_seconds)
TIME_PER_OPERATION = Metric(
    "time per operation", "time per operation", "seconds", lambda sample: _per_operation(sample, "wall")
)
MEMORY = Metric("memory", "memory added per rank", "bytes", _memory_per_rank)
PARKED = Metric("most parked", "most parked at once", "ranks", lambda sample: sample.parked)
COPYING = Metric(
    "CPU for copying", "CPU for copying requests and replies per rank", "seconds",
    lambda sample: sample.copy_cpu_seconds / sample.size if sample.copy_cpu_seconds else None,
)  # fmt: skip
RELAY_CPU = Metric(
    "relays' CPU", "relays' CPU per operation", "seconds",
    lambda sample: sample.relay_cpu_seconds / sample.operations
    if sample.relay_cpu_seconds is not None and sample.operations else None,
)  # fmt: skip
P50 = Metric("p50 latency", "p50 latency", "seconds", lambda sample: sample.p50_seconds)
P95 = Metric("p95 latency", "p95 latency", "seconds", lambda sample: sample.p95_seconds)
P99 = Metric("p99 latency", "p99 latency", "seconds", lambda sample: sample.p99_seconds)
CPU_PER_RANK = _cpu_per("rank")
CPU_PER_OPERATION = _cpu_per("operation")
CPU_PER_REQUEST = _cpu_per("request, of all")
"""Of the background's requests too."""


@dataclass(frozen=True)
class Scenario:
    """What `--scenario` names."""

    name: str
    title: str
    description: str
    """What happens and what is measured."""
    metric: Metric
    cpu: Metric
    measure: Callable[..., list[Measured]]
    """Measures a Point. Raises LoadError."""
    sizes: tuple[int, ...] = ()
    quick: tuple[int, ...] = ()
    """Sizes of a quick run."""
    weight: float = 0.0
    """Share of a run's time, relative to the other scenarios."""
    quick_weight: float = 0.0
    memory: tuple[int, ...] = ()
    """Sizes at which our sessions are driven without sockets."""
    sizes_are: str = "ranks"
    per_connection: bool = True
    """Whether a size is a number of connections, which the limit on open files bounds."""
    tutorial: bool = False
    """Whether it is one of the libuv tutorial's two: more rounds, and every server in a quick run."""
    slow: bool = False
    """Whether a sample takes seconds at any size: one round in a quick run."""
    constant: bool = False
    """Whether the work is the same at every size."""
    fixed_seconds: float = 0.5
    """The part of a sample's time that is the same at every size."""
    max_power: float = 3.0
    """The highest power of the size that a projection grows with; 1: linear."""
    job: Job | None = None
    """What a scenario of a start replays."""

    @property
    def words(self) -> tuple[str, ...]:
        """Return what describes a start to `bench.scale.in_memory`."""
        return (self.job.backend, self.job.groups) if self.job else ()

    def replaying(self, pattern: Pattern, preset: str = "") -> Scenario:
        """Return a scenario of a start with another one."""
        assert self.job is not None
        job = Job(*pattern.words, self.job.arrival, preset)
        return replace(self, measure=partial(self.measure, pattern=pattern), job=job)


K = 1024
RANKS = (1 * K, 2 * K, 4 * K, 8 * K, 16 * K, 19_000, 32 * K)
"""19,000 is what 20,000 open files allow; the next is for machines that allow more."""
QUICK = (1 * K, 2 * K, 4 * K, 8 * K)
IN_MEMORY = (*QUICK, 16 * K, 32 * K, 64 * K, 96 * K, 1_000_000)

_ALL = (
    Scenario(
        "init",
        "Store initialization",
        "Every rank connects, shakes hands and joins; the time is until rank 0 returns, when all have joined.",
        TIME, CPU_PER_RANK, workloads.init,
        sizes=(*RANKS, 64 * K, 96 * K), quick=QUICK, weight=350, quick_weight=46, memory=IN_MEMORY, tutorial=True,
    ),
    Scenario(
        "barrier",
        "Barrier run time: store_based_barrier ×10",
        "All ranks pass ten barriers as torch.distributed's `store_based_barrier` makes them; the time is for all ten.",
        TIME, CPU_PER_OPERATION, workloads.barrier,
        sizes=(*RANKS, 64 * K, 96 * K), quick=QUICK, weight=850, quick_weight=96, memory=IN_MEMORY, tutorial=True,
    ),
    Scenario(
        "barrier-opcode",
        "Barrier in one message: BARRIER ×10",
        "The same barriers with the BARRIER command: one message per rank instead of three.",
        TIME, CPU_PER_OPERATION, workloads.barrier_opcode,
        sizes=RANKS, quick=(1 * K, 8 * K), weight=400, quick_weight=18, memory=IN_MEMORY,
    ),
    Scenario(
        "thundering-herd",
        "Thundering herd: every rank connects at once",
        "Initialization without stagger: all connections are opened at the same moment; the time is until rank 0 has "
        "seen all. When the server's backlog is full, the kernel retries a connection after a second: that is in the "
        "time, and not in the latencies, which begin when a connection is established.",
        TIME, CPU_PER_RANK, workloads.thundering_herd,
        # A retry adds a whole second: a step, from which a power law would extrapolate ever steeper.
        sizes=RANKS, quick=(1 * K,), weight=290, quick_weight=5, max_power=1.0,
    ),
    Scenario(
        "join-under-load",
        "Joining a busy server",
        "Ranks join while other clients keep the server busy; the time is until all have joined. The CPU is per "
        "request answered meanwhile, the other clients' included.",
        TIME, CPU_PER_REQUEST, workloads.join_under_load,
        sizes=RANKS, quick=(1 * K,), weight=170, quick_weight=4,
    ),
    Scenario(
        "steady",
        "Steady load: one CHECK a second from every rank",
        "Every rank sends one CHECK a second, as NCCL's monitor does. The rate is fixed; the latency is compared.",
        P99, CPU_PER_OPERATION, workloads.steady,
        sizes=RANKS, quick=(1 * K,), weight=380, quick_weight=14, slow=True, fixed_seconds=0.5 + workloads.SECONDS,
    ),
    Scenario(
        "fanout",
        "Wake-up: one SET, all ranks wait for it",
        "All ranks WAIT for a key that one client then SETs; the time is until the last one is woken.",
        TIME, CPU_PER_RANK, workloads.fanout,
        sizes=RANKS, quick=(1 * K, 8 * K), weight=220, quick_weight=15, memory=IN_MEMORY,
    ),
    Scenario(
        "start",
        "The start of a job",
        "Every rank joins, exchanges the IDs of NCCL's communicators and makes its groups, with the requests that "
        "PyTorch sends; `--backend`, `--groups` and `--preset` say which. The roots, which set the IDs, arrive last. "
        "The time is until the last rank has everything.",
        TIME, CPU_PER_RANK, workloads.start,
        sizes=RANKS, quick=(1 * K,), weight=300, quick_weight=12, memory=IN_MEMORY[:-1], slow=True,
        job=Job(*NCCL2.words, "at once"),
    ),
    Scenario(
        "start-spread",
        "The start of a job whose ranks arrive within ten seconds",
        "The same, but the ranks, roots among them, arrive evenly within ten seconds; the time is from then on.",
        TIME, CPU_PER_RANK, partial(workloads.start, seconds=workloads.ARRIVAL_SECONDS),
        sizes=RANKS, weight=300, quick_weight=0.1, memory=IN_MEMORY[:-1], slow=True,
        fixed_seconds=0.5 + workloads.ARRIVAL_SECONDS,
        job=Job(*NCCL2.words, f"within {workloads.ARRIVAL_SECONDS:.0f} s"),
    ),
    Scenario(
        "exchange",
        "Key exchange: each rank SETs 1 KiB and reads all others'",
        "Each rank SETs 1 KiB and reads all ranks' values by MULTI_GET; the time is until all have everything.",
        TIME, CPU_PER_OPERATION, workloads.exchange,
        sizes=(256, 512, 1024, 2048, 4096), quick=(256,), weight=260, quick_weight=4,
    ),
    Scenario(
        "operations",
        "Throughput and latency by operation",
        "Clients send one kind of request as fast as replies come.",
        TIME_PER_OPERATION, CPU_PER_OPERATION, workloads.operations,
        sizes=(1, 8, 64), quick=(64,), weight=120, quick_weight=15, sizes_are="clients", per_connection=False,
        constant=True,
    ),
    Scenario(
        "memory",
        "Memory per rank",
        "All ranks join; the growth of the server's resident memory since it was idle, divided by their number.",
        MEMORY, CPU_PER_RANK, workloads.memory,
        sizes=RANKS, quick=(1 * K,), weight=280, quick_weight=5, slow=True,
    ),
    Scenario(
        "resolver",
        "A resolver that does not answer",
        "Initialization while the name server, a stub on loopback, never replies: PyTorch's servers look up the name "
        "of every peer.",
        TIME, CPU_PER_RANK, workloads.resolver,
        sizes=(2, 4, 8), quick=(2,), weight=110, quick_weight=8, slow=True,
    ),
    Scenario(
        "busy-trainer",
        "A trainer whose main thread is busy",
        "The process that owns the server computes in Python without pause while the ranks are served.",
        TIME, CPU_PER_OPERATION, workloads.busy_trainer,
        sizes=(16, 64, 256), quick=(16,), weight=90, quick_weight=5, slow=True,
    ),
)  # fmt: skip
SCENARIOS = {scenario.name: scenario for scenario in _ALL}
"""By name, in the order of the report."""


def scenario_of(name: str) -> tuple[Scenario, str]:
    """Return the scenario of a sample and its operation: `operations-set` is `set` of `operations`.

    An unknown one stands for itself and is compared by time.
    """
    for known in sorted(SCENARIOS, key=len, reverse=True):
        if name == known or name.startswith(f"{known}-"):
            return SCENARIOS[known], name[len(known) + 1 :]
    return Scenario(name, name.capitalize(), "", TIME, CPU_PER_OPERATION, lambda _: [], sizes_are="size"), ""


def table() -> str:
    """Return the table of docs/benchmark.md."""
    rows = [f"| `{one.name}` | {one.description} | {one.metric.axis} |" for one in _ALL]
    return "\n".join(["| `--scenario` | what happens | what is compared |", "|---|---|---|", *rows])


if __name__ == "__main__":
    print(table())
