"""The scenarios of the scale benchmark, each declared once: its name, what its ranks do, sizes, metrics and texts.

The figures, the report and the table in bench/README.md are derived from here (`python -m bench.scale.scenarios`
prints the table). Must not know rounds, time budgets, statistics, files or figures.
Invariant: of every metric, less is better.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

from bench.scale.in_memory import BARRIERS
from bench.scale.results import Job, Sample
from bench.scale.servers import (
    FOREIGN,
    RANKS_PER_RELAY,
    RELAY,
    WINDOW,
    Connection,
    Impossible,
    Measured,
    Point,
    load_cores,
    measured,
    wait_for_ranks,
)
from bench.scale.start import NCCL2, Pattern, planned, playing
from tcpstore_async.tools.load.generator import LoadError, Step, Unreachable, late
from tcpstore_async.tools.load.scripts import (
    OPERATIONS,
    RANK,
    confirmed,
    encode_request,
    hello,
    join,
    make_step,
    one_message_barrier,
    operation,
    store_based_barrier,
)
from tcpstore_async.tools.load.workers import ClosedLoop, OpenLoop, busy
from tcpstore_async.wire.values import pack


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
        """Return what describes a start to `in_memory`."""
        return (self.job.backend, self.job.groups) if self.job else ()

    def replaying(self, pattern: Pattern, preset: str = "") -> Scenario:
        """Return a scenario of a start with another one."""
        assert self.job is not None
        job = Job(*pattern.words, self.job.arrival, preset)
        return replace(self, measure=partial(self.measure, pattern=pattern), job=job)


# What ranks do, and what of it is timed

READERS = 64
"""Ranks that read all values concurrently: each has megabytes in flight."""
BACKGROUND = 64
"""Connections of each generator that keep a server busy while ranks join."""
SECONDS = 4.0
"""Duration of the steady load."""
ARRIVAL_SECONDS = 10.0
"""Within which ranks arrive where not all do at once."""
BUSY_REQUESTS = 20
"""Requests of each rank to a busy trainer's server."""
REQUESTS = 10_000
"""Of each operation, over all clients."""
REQUESTS_OF_ONE = 2_000
"""Of each operation, for one client at most: it takes about as long."""
VALUE_BYTES = 64
EXCHANGED_BYTES = 1024


def init(point: Point) -> list[Measured]:
    with point.started(point.others) as bed:
        return [bed.join(point.size, WINDOW)]


def thundering_herd(point: Point) -> list[Measured]:
    with point.started(point.others) as bed:
        return [bed.join(point.size, window=0)]


def memory(point: Point) -> list[Measured]:
    with point.started(point.others, new=True) as bed:
        before = bed.server.memory()
        found = bed.join(point.size, WINDOW)
        return [found._replace(memory=max(0, bed.server.memory() - before))]


def resolver(point: Point) -> list[Measured]:
    with point.started(point.others, source=FOREIGN, silent_resolver=True) as bed:
        return [bed.join(point.size, window=0, source=FOREIGN)]


def barrier(point: Point) -> list[Measured]:
    steps = [step for number in range(BARRIERS) for step in store_based_barrier(b"/barrier:%d" % number, point.size)]
    with point.started(point.size) as bed:
        bed.prepare(join())
        return [bed.play(steps)]


def barrier_opcode(point: Point) -> list[Measured]:
    steps = [step for number in range(BARRIERS) for step in one_message_barrier(b"/barrier:%d" % number, point.size)]
    with point.started(point.size) as bed:
        if not knows_barrier(bed.server.port, point.limit):
            raise Impossible("does not know BARRIER")
        bed.prepare(join())
        return [bed.play(steps)]


def knows_barrier(port: int, limit: float) -> bool:
    """Try a barrier of one rank: older PyTorch servers close the connection. Raises Unreachable if nobody answers."""
    with Connection(port, limit) as one:
        _call_all(one, hello())
        try:
            _call_all(one, one_message_barrier(b"/probe", 1))
        except Unreachable:
            return False
    return True


def _call_all(connection: Connection, steps: Iterable[Step]) -> None:
    for step in steps:
        connection.call(step.request, step.reply)


def join_under_load(point: Point) -> list[Measured]:
    """Operations are answered requests: two of each joining rank, and the background's."""
    with point.started(BACKGROUND * min(4, len(load_cores()))) as bed:
        bed.prepare(hello())
        bed.load.open(point.size)
        background_steps = [make_step(encode_request("add", b"/busy", 1), 8)]
        return [bed.play(join(), window=WINDOW, background=BACKGROUND, background_steps=background_steps)]


def steady(point: Point) -> list[Measured]:
    check = make_step(encode_request("check", [b"/abort"]), 1, b"\1")
    with point.connected() as bed:
        before = bed.server.cpu()
        took = bed.load.run(OpenLoop(check, SECONDS, 1.0, SECONDS + point.limit))
        return [measured(took, bed.server.cpu() - before)]


def fanout(point: Point) -> list[Measured]:
    waiting = make_step(encode_request("add", b"/waiting", 1) + encode_request("wait", [b"/late"]), 9)
    with point.connected() as bed, bed.connect() as setter:
        setter.call(hello()[0].request, hello()[0].reply)
        bed.load.send(ClosedLoop([waiting], point.limit))
        _until_all_wait(setter, point)
        cpu, before, began = bed.server.cpu(), bed.load.clocks(), time.perf_counter()
        setter.call(encode_request("set", b"/late", pack(b"1")), 0)
        took = bed.load.collect()
        wall = took.ended - began
        clocks = list(zip(before, took.clocks, strict=True))
        generator_cpu = sum(end.cpu - start.cpu for start, end in clocks)
        share = max(busy(start, end) for start, end in clocks) / wall
        return [Measured(wall, point.size, bed.server.cpu() - cpu, generator_cpu, share)]


def _until_all_wait(setter: Connection, point: Point) -> None:
    deadline = time.monotonic() + point.limit
    while int.from_bytes(setter.call(encode_request("add", b"/waiting", 0), 8), "little") < point.size:
        if time.monotonic() > deadline:
            raise late(point.limit, "some ranks do not wait yet")
        time.sleep(0.01)
    time.sleep(0.1)  # let the last replies reach the generators, which have to be idle


def exchange(point: Point) -> list[Measured]:
    write = confirmed(encode_request("set", b"/exchange/" + RANK, pack(bytes(EXCHANGED_BYTES))))
    # All ranks ask for the same keys, so these are spelled out instead of using the placeholder RANK.
    names = [b"/exchange/%08d" % rank for rank in range(point.size)]
    read = Step(encode_request("multi_get", names), point.size * (8 + EXCHANGED_BYTES))
    with point.connected() as bed:
        return [total(bed.play([write]), bed.play([read], window=READERS))]


def total(one: Measured, other: Measured) -> Measured:
    """Add up two phases; the busier one says whether the generators were saturated."""
    return Measured(
        one.wall + other.wall,
        one.operations + other.operations,
        one.server_cpu + other.server_cpu,
        one.generator_cpu + other.generator_cpu,
        max(one.share, other.share),
    )


def operations(point: Point) -> list[Measured]:
    found = []
    with point.connected() as bed:
        for name in OPERATIONS:
            one = operation(name, b"/operations/", VALUE_BYTES)
            if one.before:
                bed.prepare(one.before)
            repeat = max(1, min(REQUESTS // point.size, REQUESTS_OF_ONE))
            found.append(bed.play([one.request], repeat=repeat)._replace(part=name))
    return found


def busy_trainer(point: Point) -> list[Measured]:
    with point.started(point.size, busy=True) as bed:
        bed.prepare(hello())
        return [bed.play([make_step(encode_request("add", b"/sum", 1), 8)], repeat=BUSY_REQUESTS)]


def start(point: Point, pattern: Pattern = NCCL2, seconds: float = 0.0) -> list[Measured]:
    """Let the ranks arrive within so many seconds. The time counts from then on, until all have all replies.

    Rank 0 arrives first, and exchanges nothing before it has seen the others, as PyTorch's constructor does. Raises
    LoadError.
    """
    others = point.others
    if point.server == RELAY and others > RANKS_PER_RELAY:
        raise Impossible(f"one process plays all ranks, and one relay holds {RANKS_PER_RELAY:,}")
    plan, limit = planned(pattern, point.size, point.limit + seconds)
    with (
        point.host.running(point.server, ranks=others, new=True) as server,
        Connection(server.port, limit, name="rank 0's connection") as rank0,
    ):
        for action in (*plan.joining, *plan.first):
            rank0.call(action.of(0), action.reply_bytes)
        server.reset_peak_memory()
        idle, cpu = server.memory(), server.cpu()
        with playing(server.port, [*plan.joining, *plan.actions], others, seconds, load_cores()) as player:
            wait_for_ranks(rank0, point.size, limit)
            for action in plan.actions:
                if action.sent_by(0) and rank0.call(action.of(0), action.reply_bytes) != action.reply:
                    raise LoadError("rank 0 got a wrong reply")
            ended = time.perf_counter()
            played = player.result(limit)
        wall = max(ended, played.ended) - played.began - seconds
        return [
            Measured(
                wall, point.size, server.cpu() - cpu, played.cpu, played.share,
                memory=max(0, server.peak_memory() - idle), parked=played.parked,
            )
        ]  # fmt: skip


# The declarations

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
        TIME, CPU_PER_RANK, init,
        sizes=(*RANKS, 64 * K, 96 * K), quick=QUICK, weight=350, quick_weight=46, memory=IN_MEMORY, tutorial=True,
    ),
    Scenario(
        "barrier",
        "Barrier run time: store_based_barrier ×10",
        "All ranks pass ten barriers as torch.distributed's `store_based_barrier` makes them; the time is for all ten.",
        TIME, CPU_PER_OPERATION, barrier,
        sizes=(*RANKS, 64 * K, 96 * K), quick=QUICK, weight=850, quick_weight=96, memory=IN_MEMORY, tutorial=True,
    ),
    Scenario(
        "barrier-opcode",
        "Barrier in one message: BARRIER ×10",
        "The same barriers with the BARRIER command: one message per rank instead of three.",
        TIME, CPU_PER_OPERATION, barrier_opcode,
        sizes=RANKS, quick=(1 * K, 8 * K), weight=400, quick_weight=18, memory=IN_MEMORY,
    ),
    Scenario(
        "thundering-herd",
        "Thundering herd: every rank connects at once",
        "Initialization without stagger: all connections are opened at the same moment; the time is until rank 0 has "
        "seen all. When the server's backlog is full, the kernel retries a connection after a second: that is in the "
        "time, and not in the latencies, which begin when a connection is established.",
        TIME, CPU_PER_RANK, thundering_herd,
        # A retry adds a whole second: a step, from which a power law would extrapolate ever steeper.
        sizes=RANKS, quick=(1 * K,), weight=290, quick_weight=5, max_power=1.0,
    ),
    Scenario(
        "join-under-load",
        "Joining a busy server",
        "Ranks join while other clients keep the server busy; the time is until all have joined. The CPU is per "
        "request answered meanwhile, the other clients' included.",
        TIME, CPU_PER_REQUEST, join_under_load,
        sizes=RANKS, quick=(1 * K,), weight=170, quick_weight=4,
    ),
    Scenario(
        "steady",
        "Steady load: one CHECK a second from every rank",
        "Every rank sends one CHECK a second, as NCCL's monitor does. The rate is fixed; the latency is compared.",
        P99, CPU_PER_OPERATION, steady,
        sizes=RANKS, quick=(1 * K,), weight=380, quick_weight=14, slow=True, fixed_seconds=0.5 + SECONDS,
    ),
    Scenario(
        "fanout",
        "Wake-up: one SET, all ranks wait for it",
        "All ranks WAIT for a key that one client then SETs; the time is until the last one is woken.",
        TIME, CPU_PER_RANK, fanout,
        sizes=RANKS, quick=(1 * K, 8 * K), weight=220, quick_weight=15, memory=IN_MEMORY,
    ),
    Scenario(
        "start",
        "The start of a job",
        "Every rank joins, exchanges the IDs of NCCL's communicators and makes its groups, with the requests that "
        "PyTorch sends; `--backend`, `--groups` and `--preset` say which. The roots, which set the IDs, arrive last. "
        "The time is until the last rank has everything.",
        TIME, CPU_PER_RANK, start,
        sizes=RANKS, quick=(1 * K,), weight=300, quick_weight=12, memory=IN_MEMORY[:-1], slow=True,
        job=Job(*NCCL2.words, "at once"),
    ),
    Scenario(
        "start-spread",
        "The start of a job whose ranks arrive within ten seconds",
        "The same, but the ranks, roots among them, arrive evenly within ten seconds; the time is from then on.",
        TIME, CPU_PER_RANK, partial(start, seconds=ARRIVAL_SECONDS),
        sizes=RANKS, weight=300, quick_weight=0.1, memory=IN_MEMORY[:-1], slow=True,
        fixed_seconds=0.5 + ARRIVAL_SECONDS,
        job=Job(*NCCL2.words, f"within {ARRIVAL_SECONDS:.0f} s"),
    ),
    Scenario(
        "exchange",
        "Key exchange: each rank SETs 1 KiB and reads all others'",
        "Each rank SETs 1 KiB and reads all ranks' values by MULTI_GET; the time is until all have everything.",
        TIME, CPU_PER_OPERATION, exchange,
        sizes=(256, 512, 1024, 2048, 4096), quick=(256,), weight=260, quick_weight=4,
    ),
    Scenario(
        "operations",
        "Throughput and latency by operation",
        "Clients send one kind of request as fast as replies come.",
        TIME_PER_OPERATION, CPU_PER_OPERATION, operations,
        sizes=(1, 8, 64), quick=(64,), weight=120, quick_weight=15, sizes_are="clients", per_connection=False,
        constant=True,
    ),
    Scenario(
        "memory",
        "Memory per rank",
        "All ranks join; the growth of the server's resident memory since it was idle, divided by their number.",
        MEMORY, CPU_PER_RANK, memory,
        sizes=RANKS, quick=(1 * K,), weight=280, quick_weight=5, slow=True,
    ),
    Scenario(
        "resolver",
        "A resolver that does not answer",
        "Initialization while the name server, a stub on loopback, never replies: PyTorch's servers look up the name "
        "of every peer.",
        TIME, CPU_PER_RANK, resolver,
        sizes=(2, 4, 8), quick=(2,), weight=110, quick_weight=8, slow=True,
    ),
    Scenario(
        "busy-trainer",
        "A trainer whose main thread is busy",
        "The process that owns the server computes in Python without pause while the ranks are served.",
        TIME, CPU_PER_OPERATION, busy_trainer,
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
    """Return the table of bench/README.md."""
    rows = [f"| `{one.name}` | {one.description} | {one.metric.axis} |" for one in _ALL]
    return "\n".join(["| `--scenario` | what happens | what is compared |", "|---|---|---|", *rows])


if __name__ == "__main__":
    print(table())
