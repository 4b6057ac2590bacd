"""The scenarios: what the ranks do, at which sizes, and what of it is timed.

Knows requests, orders to the generators, and the servers' clocks. Must not know rounds, budgets or files.
Invariant: each measurement has a fresh server, and what prepares it is not in its times.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from bench.builds import environment
from bench.first_rank import FirstRank
from bench.leash import leash
from bench.memory import BARRIERS
from bench.peer import Peer
from bench.servers import FOREIGN, Host, Impossible, Server, cores_of_load
from tcpstore_async.blob import pack
from tcpstore_async.load.generator import Act, LoadError, Unreachable, late
from tcpstore_async.load.process import Fleet, Pace, Play, Took, busy, fleet
from tcpstore_async.load.requests import (
    OPERATIONS,
    RANK,
    act,
    confirmed,
    hello,
    join,
    one_message_barrier,
    operation,
    said,
    store_based_barrier,
)

WINDOW = 512
"""Ranks that connect at the same time, where they do not all."""
READERS = 64
"""Ranks that read all others' values at the same time: each has megabytes under way."""
BUSY = 64
"""Connections that keep a server busy while newcomers join."""
SECONDS = 4.0
"""How long the steady load lasts."""
STARTING = 0.5
"""Seconds, about, in which the load starts."""
TURNS = 20
"""Requests of each rank to a busy trainer's server."""
REQUESTS = 10_000
"""Of each operation, over all clients."""
ALONE = 2_000
"""The same of one client, at most: it takes a like time for them."""
VALUE = 64
EXCHANGED = 1024

K = 1024
TUTORIAL = (1 * K, 2 * K, 4 * K, 8 * K, 16 * K, 32 * K, 64 * K, 96 * K)
RANKS = (1 * K, 2 * K, 4 * K, 8 * K, 16 * K, 19_000, 32 * K)
"""19,000 is what 20,000 open files allow. The last is for machines that allow more; here it says why a line ends."""
QUICK = (1 * K, 2 * K, 4 * K, 8 * K)


class Measured(NamedTuple):
    """One measurement, before it is a Sample; seconds and bytes."""

    wall: float
    operations: int
    """What the server's time is for: answered requests, or ranks."""
    server_cpu: float
    generator_cpu: float
    share: float
    quantiles: tuple[float | None, float | None, float | None] = (None, None, None)
    memory: int | None = None
    part: str = ""
    """Of the scenario, such as an operation; empty: all of it."""


class Scenario(NamedTuple):
    """What `--scenario` names."""

    name: str
    measure: Callable[[Host, str, int, float], list[Measured]]
    """On which host, which server, at which size, in how many seconds at most. Raises LoadError."""
    sizes: tuple[int, ...]
    quick: tuple[int, ...]
    weight: float
    """Seconds that a run has for it, beside those of the others: all are scaled to the run's budget."""
    quick_weight: float
    """The same of a quick run."""
    per_connection: bool = True
    """Whether a size is the number of connections, which the limit of open files bounds."""
    slow: bool = False
    """Whether a sample takes seconds at any size: fewer rounds, one in a quick run."""
    tutorial: bool = False
    """Whether it is one of the tutorial's two, which have all servers in a quick run, too, and the most rounds."""
    memory: tuple[int, ...] = ()
    """Sizes at which our sessions are driven without sockets."""
    constant: bool = False
    """Whether the work is the same at every size."""
    fixed: float = STARTING
    """Seconds of a sample, about, that are the same at every size."""
    steepest: float = 3.0
    """The power of the size that a projection grows with, at most; 1: on a straight line through the last two."""


class Bench:
    """A server under test, and the ranks."""

    def __init__(self, server: Server, load: Fleet, limit: float) -> None:
        self.server = server
        self.load = load
        self.limit = limit

    def prepare(self, acts: list[Act]) -> None:
        """What is not measured; WINDOW ranks at a time."""
        self.load.tell(Play(acts, self.limit, window=WINDOW))

    def play(
        self, acts: list[Act], *, repeat: int = 1, window: int = 0, background: int = 0, behind: list[Act] | None = None
    ) -> Measured:
        """What is."""
        before = self.server.cpu()
        order = Play(acts, self.limit, repeat=repeat, window=window, background=background, behind=behind)
        return measured(self.load.tell(order), self.server.cpu() - before)


def measured(took: Took, cpu: float) -> Measured:
    quantiles = (took.quantile(0.5), took.quantile(0.95), took.quantile(0.99))
    return Measured(took.wall, took.operations + took.behind, cpu, took.cpu, took.share, quantiles)


def both(one: Measured, other: Measured) -> Measured:
    """One after the other, as one; in either the generator may have set the pace."""
    wall = one.wall + other.wall
    cpu = one.generator_cpu + other.generator_cpu
    operations, server_cpu = one.operations + other.operations, one.server_cpu + other.server_cpu
    return Measured(wall, operations, server_cpu, cpu, max(one.share, other.share))


@contextmanager
def under_test(
    host: Host,
    server: str,
    size: int,
    limit: float,
    *,
    source: str = "",
    busy: bool = False,
    silent: bool = False,
    new: bool = False,
) -> Iterator[Bench]:
    cores = cores_of_load()
    with (
        host.running(server, busy=busy, silent_resolver=silent, new=new) as one,
        fleet(
            "127.0.0.1", one.port, size, generators=min(4, len(cores)), source=source, cores=None if busy else cores
        ) as load,
    ):
        yield Bench(one, load, limit)


def _init(host: Host, server: str, size: int, limit: float) -> list[Measured]:
    with gathering(host, server, size, limit) as bench:
        return [_joining(bench, size, WINDOW)]


@contextmanager
def gathering(
    host: Host, server: str, size: int, limit: float, *, source: str = "", silent: bool = False, new: bool = False
) -> Iterator[Bench]:
    """A server and all ranks but the first, for `_joining`."""
    if size < 2:
        raise Impossible("there are no others for rank 0 to wait for")
    with under_test(host, server, size - 1, limit, source=source, silent=silent, new=new) as bench:
        yield bench


def _joining(bench: Bench, size: int, window: int, source: str = "") -> Measured:
    """Rank 0 joins, then the others, until rank 0 has seen that all have; operations are ranks."""
    cpu = bench.server.cpu()
    with FirstRank(bench.server.port, bench.limit, source) as first:
        bench.load.send(Play(join(), bench.limit, window=window))
        ended = first.sees(size)
        took = bench.load.collect()
    if ended is None:
        raise late(bench.limit, "rank 0 has not seen all others")
    wall = ended - first.began
    return measured(took, bench.server.cpu() - cpu)._replace(wall=wall, operations=size)


def _herd(host: Host, server: str, size: int, limit: float) -> list[Measured]:
    with gathering(host, server, size, limit) as bench:
        return [_joining(bench, size, 0)]


def _barrier(host: Host, server: str, size: int, limit: float) -> list[Measured]:
    acts = [step for number in range(BARRIERS) for step in store_based_barrier(b"/barrier:%d" % number, size)]
    with under_test(host, server, size, limit) as bench:
        bench.prepare(join())
        return [bench.play(acts)]


def _barrier_opcode(host: Host, server: str, size: int, limit: float) -> list[Measured]:
    acts = [step for number in range(BARRIERS) for step in one_message_barrier(b"/barrier:%d" % number, size)]
    with under_test(host, server, size, limit) as bench:
        if not knows_barrier(bench.server.port, limit):
            raise Impossible("does not know BARRIER")
        bench.prepare(join())
        return [bench.play(acts)]


def knows_barrier(port: int, limit: float) -> bool:
    """Older PyTorch's servers do not, and close the connection. A barrier of one opens at once."""
    with Peer(port, limit) as one:
        try:
            for step in [*hello(), *one_message_barrier(b"/probe", 1)]:
                one.ask(step.request, step.reply)
        except Unreachable:
            return False
    return True


def _newcomers(host: Host, server: str, size: int, limit: float) -> list[Measured]:
    """Operations are answered requests, two of each newcomer and all of the background: the CPU is for both."""
    generators = min(4, len(cores_of_load()))
    with under_test(host, server, BUSY * generators, limit) as bench:
        bench.prepare(hello())
        bench.load.open(size)
        behind = [act(said("add", b"/busy", 1), 8)]
        return [bench.play(join(), window=WINDOW, background=BUSY, behind=behind)]


def _steady(host: Host, server: str, size: int, limit: float) -> list[Measured]:
    look = act(said("check", [b"/abort"]), 1, b"\1")
    with under_test(host, server, size, limit) as bench:
        bench.prepare(hello())
        before = bench.server.cpu()
        took = bench.load.tell(Pace(look, SECONDS, 1.0, SECONDS + limit))
        return [measured(took, bench.server.cpu() - before)]


def _fanout(host: Host, server: str, size: int, limit: float) -> list[Measured]:
    waiting = act(said("add", b"/waiting", 1) + said("wait", [b"/late"]), 9)
    with under_test(host, server, size, limit) as bench:
        bench.prepare(hello())
        with Peer(bench.server.port, limit) as setter:
            setter.ask(hello()[0].request, hello()[0].reply)
            bench.load.send(Play([waiting], limit))
            _until_all_wait(setter, size, limit)
            cpu, before, began = bench.server.cpu(), bench.load.clocks(), time.perf_counter()
            setter.ask(said("set", b"/late", pack(b"1")), 0)
            took = bench.load.collect()
            wall = took.ended - began
            clocks = list(zip(before, took.clocks, strict=True))
            own = sum(end.cpu - start.cpu for start, end in clocks)
            share = max(busy(start, end) for start, end in clocks) / wall
            return [Measured(wall, size, bench.server.cpu() - cpu, own, share)]


def _until_all_wait(setter: Peer, size: int, limit: float) -> None:
    deadline = time.monotonic() + limit
    while int.from_bytes(setter.ask(said("add", b"/waiting", 0), 8), "little") < size:
        if time.monotonic() > deadline:
            raise late(limit, "the ranks have not all come to wait")
        time.sleep(0.01)
    time.sleep(0.1)  # the last answers reach the generators, which are to be at rest


def _exchange(host: Host, server: str, size: int, limit: float) -> list[Measured]:
    write = confirmed(said("set", b"/exchange/" + RANK, pack(bytes(EXCHANGED))))
    # All ranks ask for the same keys: those digits are no place for the rank.
    names = [b"/exchange/%08d" % rank for rank in range(size)]
    read = Act(said("multi_get", names), size * (8 + EXCHANGED))
    with under_test(host, server, size, limit) as bench:
        bench.prepare(hello())
        return [both(bench.play([write]), bench.play([read], window=READERS))]


def _operations(host: Host, server: str, size: int, limit: float) -> list[Measured]:
    found = []
    with under_test(host, server, size, limit) as bench:
        bench.prepare(hello())
        for name in OPERATIONS:
            one = operation(name, b"/operations/", VALUE)
            if one.before:
                bench.prepare(one.before)
            took = bench.play([one.request], repeat=max(1, min(REQUESTS // size, ALONE)))
            found.append(took._replace(part=name))
    return found


def _memory(host: Host, server: str, size: int, limit: float) -> list[Measured]:
    with gathering(host, server, size, limit, new=True) as bench:
        before = bench.server.memory()
        found = _joining(bench, size, WINDOW)
        return [found._replace(memory=max(0, bench.server.memory() - before))]


def _resolver(host: Host, server: str, size: int, limit: float) -> list[Measured]:
    with gathering(host, server, size, limit, source=FOREIGN, silent=True) as bench:
        return [_joining(bench, size, 0, FOREIGN)]


def _busy_trainer(host: Host, server: str, size: int, limit: float) -> list[Measured]:
    with under_test(host, server, size, limit, busy=True) as bench:
        bench.prepare(hello())
        return [bench.play([act(said("add", b"/sum", 1), 8)], repeat=TURNS)]


_WITHOUT = (*TUTORIAL, 1_000_000)
_ALL = (
    Scenario("init", _init, (*RANKS, *TUTORIAL[6:]), QUICK, 350, 46, tutorial=True, memory=_WITHOUT),
    Scenario("barrier", _barrier, (*RANKS, *TUTORIAL[6:]), QUICK, 850, 96, tutorial=True, memory=_WITHOUT),
    Scenario("barrier-opcode", _barrier_opcode, RANKS, (1 * K, 8 * K), 400, 18, memory=_WITHOUT),
    # Ranks that are not heard come again a second later: a step, which a power law would take for ever steeper.
    Scenario("herd", _herd, RANKS, (1 * K,), 290, 5, steepest=1.0),
    Scenario("newcomers", _newcomers, RANKS, (1 * K,), 170, 4),
    Scenario("steady", _steady, RANKS, (1 * K,), 380, 14, slow=True, fixed=STARTING + SECONDS),
    Scenario("fanout", _fanout, RANKS, (1 * K, 8 * K), 220, 15, memory=_WITHOUT),
    Scenario("exchange", _exchange, (256, 512, 1024, 2048, 4096), (256,), 260, 4),
    Scenario("operations", _operations, (1, 8, 64), (64,), 120, 15, per_connection=False, constant=True),
    Scenario("memory", _memory, RANKS, (1 * K,), 280, 5, slow=True),
    Scenario("resolver", _resolver, (2, 4, 8), (2,), 110, 8, slow=True),
    Scenario("busy-trainer", _busy_trainer, (16, 64, 256), (16,), 90, 5, slow=True),
)
SCENARIOS = {scenario.name: scenario for scenario in _ALL}


def without_sockets(scenario: str, size: int, limit: float) -> Measured:
    """Our sessions in memory, in a process of its own, `limit` seconds at most. Raises LoadError."""
    command = [sys.executable, "-m", "bench.memory", scenario, str(size)]
    where = tempfile.gettempdir()
    try:
        with leash() as stdin:
            done = subprocess.run(
                command, stdin=stdin, capture_output=True, timeout=limit, cwd=where, env=environment(), check=False
            )
    except subprocess.TimeoutExpired:
        raise late(limit, "the sessions in memory are still driven") from None
    if done.returncode:
        said_last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise LoadError(f"the sessions in memory ended with {done.returncode}: {''.join(said_last)}")
    found = json.loads(done.stdout)
    return Measured(found["wall"], found["operations"], found["cpu"], 0.0, 0.0)
