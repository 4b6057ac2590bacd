"""What the ranks of each scenario do, and what of it is timed.

Must not know rounds, time budgets or files.
Invariant: each measurement has a new server; its times exclude preparation; a failure is a LoadError of one line, and
nothing waits longer than the limit.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from bench.builds import environment
from bench.loadgen.player import playing
from bench.scale.in_memory import BARRIERS
from bench.scale.servers import FOREIGN, RANKS_PER_RELAY, RELAY, Host, Impossible, Server, load_cores
from bench.scale.start import NCCL2, Pattern, Traffic, traffic
from tcpstore_async.load.generator import Late, LoadError, Step, Unreachable, late
from tcpstore_async.load.scripts import (
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
from tcpstore_async.load.workers import ClosedLoop, OpenLoop, Took, WorkerPool, busy, worker_pool
from tcpstore_async.values import pack

WINDOW = 512
"""Ranks that connect concurrently, where not all do."""
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
REQUESTS_PER_SECOND = 20_000
"""At least, of a start: what it may take beyond the limit."""
REQUESTS = 10_000
"""Of each operation, over all clients."""
REQUESTS_OF_ONE = 2_000
"""Of each operation, for one client at most: it takes about as long."""
VALUE_BYTES = 64
_CONNECTIONS_PER_GENERATOR = 19_200
"""A process may have 20,000 files open here. Only relays allow more in all."""
EXCHANGED_BYTES = 1024
POLL_SECONDS = 0.01
"""Between two looks at the number of ranks, as in PyTorch's `waitForWorkers`."""


class Measured(NamedTuple):
    """One measurement; seconds and bytes."""

    wall: float
    operations: int
    """What the server's CPU is for: answered requests, or ranks."""
    server_cpu: float
    generator_cpu: float
    share: float
    quantiles: tuple[float | None, float | None, float | None] = (None, None, None)
    memory: int | None = None
    part: str = ""
    """The operation, if the scenario has several."""
    parked: int | None = None
    copy_cpu: float | None = None
    relay_cpu: float | None = None


class Connection:
    """A blocking connection to a server under test. `limit`: seconds for each reply. Raises LoadError."""

    def __init__(self, port: int, limit: float, *, name: str = "a connection", source: str = "") -> None:
        self._name = name
        self._limit = limit
        try:
            self._socket = socket.create_connection(("127.0.0.1", port), limit, (source, 0) if source else None)
        except TimeoutError:
            raise self._late() from None
        except OSError as error:
            raise Unreachable(f"{name} cannot be made: {error.strerror or error}") from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()

    def call(self, request: bytes, reply: int) -> bytes:
        """Send a request; return its reply, of `reply` bytes."""
        answer = b""
        try:
            self._socket.sendall(request)
            while len(answer) < reply:
                piece = self._socket.recv(reply - len(answer))
                if not piece:
                    raise Unreachable(f"{self._name} was closed by the server")
                answer += piece
        except TimeoutError:
            raise self._late() from None
        except OSError as error:
            raise Unreachable(f"{self._name} was lost: {error.strerror or error}") from None
        return answer

    def _late(self) -> Late:
        return late(self._limit, f"{self._name} was not answered")


def wait_for_ranks(rank0: Connection, ranks: int, limit: float) -> float:
    """Poll as PyTorch's constructor does until all ranks have joined; return that time. Raises LoadError."""
    deadline = time.monotonic() + limit
    wait, get = encode_request("wait", [b"init/"]), encode_request("get", b"init/")
    while time.monotonic() < deadline:
        rank0.call(wait, 1)
        size = int.from_bytes(rank0.call(get, 8), "little")
        if int(rank0.call(b"", size)) >= ranks:
            return time.perf_counter()
        time.sleep(POLL_SECONDS)
    raise late(limit, "rank 0 has not seen all others")


class TestBed:
    """A server under test and the generators' connections to it."""

    __test__ = False

    def __init__(self, server: Server, load: WorkerPool, limit: float) -> None:
        self.server = server
        self.load = load
        self.limit = limit

    def connect(self, **how: str) -> Connection:
        return Connection(self.server.port, self.limit, **how)

    def prepare(self, steps: list[Step]) -> None:
        """Play without measuring."""
        self.load.run(ClosedLoop(steps, self.limit, window=WINDOW))

    def play(
        self,
        steps: list[Step],
        *,
        repeat: int = 1,
        window: int = 0,
        background: int = 0,
        background_steps: list[Step] | None = None,
    ) -> Measured:
        before, relays = self.server.cpu(), self.server.relay_cpu()
        order = ClosedLoop(
            steps, self.limit, repeat=repeat, window=window, background=background, background_steps=background_steps
        )
        found = measured(self.load.run(order), self.server.cpu() - before)
        return found._replace(relay_cpu=self.relay_cpu_since(relays))

    def relay_cpu_since(self, before: float | None) -> float | None:
        now = self.server.relay_cpu()
        return None if now is None or before is None else now - before

    def join(self, ranks: int, window: int, source: str = "") -> Measured:
        """Let rank 0 join, then the others, until rank 0 has seen all; operations are ranks."""
        cpu, relays, began = self.server.cpu(), self.server.relay_cpu(), time.perf_counter()
        with self.connect(name="rank 0's connection", source=source) as rank0:
            for step in join():
                rank0.call(step.request, step.reply)
            self.load.send(ClosedLoop(join(), self.limit, window=window))
            ended = wait_for_ranks(rank0, ranks, self.limit)
            took = self.load.collect()
        found = measured(took, self.server.cpu() - cpu)
        return found._replace(wall=ended - began, operations=ranks, relay_cpu=self.relay_cpu_since(relays))


def measured(took: Took, cpu: float) -> Measured:
    quantiles = (took.quantile(0.5), took.quantile(0.95), took.quantile(0.99))
    return Measured(took.wall, took.operations + took.background_operations, cpu, took.cpu, took.share, quantiles)


def generators(connections: int, cores: int, relays: int = 0) -> int:
    """Return how many processes make the load: one for each core, and enough for their limits on open files.

    Several relays for many ranks have one each, so that ranks that share a link are active at the same time, as those
    of a host are.
    """
    needed = -(-connections // _CONNECTIONS_PER_GENERATOR)
    return max(min(4, cores), relays if needed > 1 else 1, needed)


class Point(NamedTuple):
    """What to measure: a server at a size, within a limit of seconds for each step."""

    host: Host
    server: str
    size: int
    limit: float

    @contextmanager
    def started(
        self, connections: int, *, source: str = "", busy: bool = False, silent_resolver: bool = False,
        new: bool = False,
    ) -> Iterator[TestBed]:  # fmt: skip
        """Start the server and the generators; the options are those of `Host.running`."""
        cores = load_cores()
        with (
            self.host.running(
                self.server, ranks=connections, busy=busy, silent_resolver=silent_resolver, new=new
            ) as server,
            worker_pool(
                "127.0.0.1", server.port, connections, source=source,
                generators=generators(connections, len(cores), len(server.relays)),
                ports=[relay.port for relay in server.relays], cores=None if busy else cores,
            ) as load,
        ):  # fmt: skip
            yield TestBed(server, load, self.limit)

    @contextmanager
    def connected(self) -> Iterator[TestBed]:
        """Start the server and connect `size` clients."""
        with self.started(self.size) as bed:
            bed.prepare(hello())
            yield bed

    @property
    def others(self) -> int:
        """Ranks besides rank 0. Raises Impossible if there are none."""
        if self.size < 2:
            raise Impossible("rank 0 has no other ranks to wait for")
        return self.size - 1


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
    plan, limit = _plan(pattern, point.size, point.limit + seconds)
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


def _plan(pattern: Pattern, ranks: int, limit: float) -> tuple[Traffic, float]:
    """Return what the ranks of a start send, and a limit of seconds that grows with it. Raises Impossible."""
    try:
        plan = traffic(pattern, ranks)
    except ValueError as error:
        raise Impossible(str(error)) from None
    return plan, limit + len(plan.actions) * ranks / REQUESTS_PER_SECOND


def without_sockets(scenario: str, size: int, limit: float, words: Sequence[str] = ()) -> Measured:
    """Drive our sessions in memory, in a child process; `words` describe a start. Raises LoadError."""
    if words:
        _, limit = _plan(Pattern.of(*words), size, limit)
    command = [sys.executable, "-m", "bench.scale.in_memory", scenario, str(size), *words]
    stdin, ours = os.pipe()  # open as long as this process lives: the child exits when it ends
    try:
        done = subprocess.run(
            command, stdin=stdin, capture_output=True, timeout=limit, check=False,
            cwd=tempfile.gettempdir(), env=environment(),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise late(limit, "the in-memory sessions were not done") from None
    finally:
        os.close(ours)
        os.close(stdin)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise LoadError(f"the in-memory sessions failed with status {done.returncode}: {''.join(last)}")
    found = json.loads(done.stdout)
    return Measured(
        found["wall"], found["operations"], found["cpu"], 0.0, 0.0,
        memory=found.get("memory"), parked=found.get("parked"), copy_cpu=found.get("copy_cpu"),
    )  # fmt: skip
