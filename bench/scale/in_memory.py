"""Drive our server's sessions without sockets.

`python -m bench.scale.in_memory SCENARIO RANKS [WORD…]` prints what a scenario took; `without_sockets` starts it.
`growth` measures what a rank costs as the job grows. Must not know the other servers, which cannot be driven so.
Invariant: what is measured is what the server computes, without the kernel's part. Of a start, every reply is compared
with the known one; neither that nor copying requests and replies is in the server's time.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bench import processes
from bench.scale.servers import Measured, Server
from bench.scale.start import Action, Pattern, Traffic, in_order_of_arrival, planned, traffic
from tcpstore_async.base.errors import LimitError
from tcpstore_async.base.limits import Limits
from tcpstore_async.serving import build, tune_gc
from tcpstore_async.session.peer import Peer
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store
from tcpstore_async.tools.load.generator import LoadError, late
from tcpstore_async.tools.load.scripts import encode_request, join, one_message_barrier, store_based_barrier
from tcpstore_async.wire.values import pack

BARRIERS = 10
"""Of a measurement, as over sockets."""
BATCH = 64
"""Ranks of a start whose requests arrive between two flushes of the replies."""
FIRST_READ, READ_ON = 479, 128 * 1024
"""Bytes that the server on uvloop reads at once, first and in the middle of a request (`server/uv.py`)."""
KEYS_AT_ONCE = 100_000
"""Most keys for which one client waits as the job grows."""
RANKS_SERVED = 20_000
"""By the passes of one run together, at least."""
COLLECTORS = ("tuned", "default")
HELLO = join()[0].request


def without_sockets(scenario: str, size: int, limit: float, words: Sequence[str] = ()) -> Measured:
    """Drive our sessions in a child process; `words` describe a start. Raises LoadError."""
    if words:
        _, limit = planned(Pattern.of(*words), size, limit)
    found = _child(limit, scenario, str(size), *words)
    return Measured(
        found["wall"], found["operations"], found["cpu"], 0.0, 0.0,
        memory=found.get("memory"), parked=found.get("parked"), copy_cpu=found.get("copy_cpu"),
    )  # fmt: skip


def _child(limit: float | None, *words: str) -> dict[str, Any]:
    """Run this module as a program in a process of its own; return what it prints. Raises LoadError."""
    command = [sys.executable, "-m", "bench.scale.in_memory", *words]
    stdin, ours = os.pipe()  # open as long as this process lives: the child exits when it ends
    try:
        done = subprocess.run(
            command, stdin=stdin, capture_output=True, timeout=limit, check=False,
            cwd=tempfile.gettempdir(), env=processes.environment(),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise late(limit or 0.0, "the in-memory sessions were not done") from None
    finally:
        os.close(ours)
        os.close(stdin)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise LoadError(f"the in-memory sessions failed with status {done.returncode}: {''.join(last)}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# The child side


class Sessions:
    """The ranks of one job and the store that serves them."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.store = Store(Limits(budget_bytes=1 << 40))
        self.sessions: list[ServerSession] = []

    def connected(self, number: int) -> ServerSession:
        """Return a session that has shaken hands."""
        session = ServerSession(self.store, None, "10.0.0.1", number % 65536, 0.0)
        self.send(session, HELLO)
        return session

    def send(self, session: ServerSession, data: bytes) -> None:
        session.receive(data)
        session.unsent = 0
        session.out.clear()

    def finish(self, session: ServerSession | None = None) -> None:
        """Finish what the store does in steps, and a long command of this session."""
        while session is not None and session.running is not None:
            session.receive(b"")
        while self.store.keyspace.work:
            self.store.keyspace.step()

    def flush_woken(self, expected: int) -> None:
        """Take what was written to woken sessions, as a server does; exit if not so many were woken."""
        self.finish()
        woken = len(self.store.hub.pending_flush)
        for session in self.store.hub.pending_flush:
            session.unsent = 0
            session.out.clear()
        self.store.hub.pending_flush.clear()
        if woken != expected:
            raise SystemExit(f"{woken} ranks were woken instead of {expected}")

    def init(self) -> int:
        """Let all ranks join; return the number of operations, as the other scenarios do."""
        _, added = join()
        for number in range(self.ranks):
            session = self.connected(number)
            self.send(session, added.request)
            self.sessions.append(session)
        return self.ranks

    def barrier(self, times: int = BARRIERS) -> int:
        for number in range(times):
            add, check, wait = store_based_barrier(b"/barrier:%d" % number, self.ranks)
            for session in self.sessions:
                self.send(session, add.request)
                self.send(session, check.request)
                self.send(session, wait.request)
            self.send(self.sessions[-1], check.then)
            self.flush_woken(self.ranks)
        return times * self.ranks * 3

    def barrier_opcode(self, times: int = BARRIERS) -> int:
        for number in range(times):
            [enter] = one_message_barrier(b"/entered:%d" % number, self.ranks)
            for session in self.sessions:
                self.send(session, enter.request)
            self.flush_woken(self.ranks - 1)
        return times * self.ranks

    def fanout(self) -> int:
        wait = encode_request("wait", [b"/late"])
        for session in self.sessions:
            self.send(session, wait)
        self.send(self.sessions[0], encode_request("set", b"/late", pack(b"1")))
        self.flush_woken(self.ranks)
        return self.ranks


class Spent(NamedTuple):
    """Seconds of the clock and of CPU."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Spent:
        return cls(time.perf_counter(), time.process_time())


class Ranks:
    """The ranks of one job, at their positions in what they send, and the store that serves them."""

    def __init__(self, plan: Traffic, ranks: int) -> None:
        self.store = Store(Limits())
        self.ranks = ranks
        self.sessions: list[ServerSession | None] = [None] * ranks
        self.parked = 0
        """The most ranks that waited for a WAIT at the same time."""
        self.wall = self.cpu = self.copy_cpu = 0.0
        self._first = plan.first
        self._actions = [*plan.joining, *plan.actions]
        self._joined = len(plan.joining)
        self._position = [0] * ranks
        self._awaited: list[Action | None] = [None] * ranks
        self._waiting = 0
        self._ready: deque[int] = deque()
        self._pieces: dict[int, list[bytes]] = {}
        """Of requests that are the same for all ranks, by position."""

    def play(self, roots_last: bool) -> None:
        """Let rank 0 join, then all others arrive; rank 0 goes on when nothing is left to do for them."""
        self._play([0], stop=self._joined)
        for action in self._first:
            self._serve([(0, [action.of(0)])])
        self._play(in_order_of_arrival(self.ranks, roots_last))
        self._play([0])
        if any(self._awaited) or any(position < len(self._actions) for position in self._position):
            raise SystemExit("some ranks have not got everything")

    def _play(self, arriving: Sequence[int], stop: int | None = None) -> None:
        """Let ranks arrive, each batch when all before it wait for others, are done or have reached a position."""
        arrived = 0
        while self._ready or arrived < len(arriving):
            if not self._ready:
                self._ready += arriving[arrived : arrived + BATCH]
                arrived += BATCH
            batch = [self._ready.popleft() for _ in range(min(BATCH, len(self._ready)))]
            self._serve([(rank, self._next(rank)) for rank in batch])
            end = stop or len(self._actions)
            self._ready += [rank for rank in self._collect(batch) if self._position[rank] != end]

    def _next(self, rank: int) -> list[bytes]:
        """Return a rank's next requests, up to one that has a reply, in the pieces in which they arrive."""
        pieces: list[bytes] = []
        while self._position[rank] < len(self._actions):
            position = self._position[rank]
            action = self._actions[position]
            self._position[rank] += 1
            if not action.sent_by(rank):
                continue
            if action.fields:
                pieces += _cut(action.of(rank))
            else:
                if position not in self._pieces:
                    self._pieces[position] = _cut(action.request)
                pieces += self._pieces[position]
            if action.reply_bytes:
                self._awaited[rank] = action
                self._waiting += 1
                break
        return pieces

    def _serve(self, work: list[tuple[int, list[bytes]]]) -> None:
        """Have the store take requests; only this counts as the server's time, without copying the requests.

        Each piece is copied before it is taken, as receiving does: no two ranks' are the same object, and it is in the
        processor's cache. What copying takes is measured alone.
        """
        store, keyspace = self.store, self.store.keyspace
        began = Spent.now()
        for _, pieces in work:
            for piece in pieces:
                bytes(memoryview(piece))
        copied = Spent.now()
        for rank, pieces in work:
            session = self.sessions[rank]
            if session is None:
                self.sessions[rank] = session = ServerSession(store, rank, "10.0.0.1", rank % 65536, 0.0)
            for piece in pieces:
                session.receive(bytes(memoryview(piece)))
            while session.running is not None:
                session.receive(b"")
        while keyspace.work:
            keyspace.step()
        ended = Spent.now()
        self.wall += (ended.wall - copied.wall) - (copied.wall - began.wall)
        self.cpu += (ended.cpu - copied.cpu) - (copied.cpu - began.cpu)
        self.copy_cpu += copied.cpu - began.cpu
        if store.hub.evicted:
            raise SystemExit(f"a limit was reached: {next(iter(store.hub.evicted.values()))}")

    def _collect(self, batch: list[int]) -> list[int]:
        """Take the replies to these ranks and to those that were woken; return the ranks that have theirs."""
        sessions: dict[int, Peer] = {
            rank: session for rank in batch if (session := self.sessions[rank]) is not None and session.out
        }
        sessions.update(
            {rank: session for session in self.store.hub.pending_flush if isinstance(rank := session.owner, int)}
        )
        self.store.hub.pending_flush.clear()
        began = time.process_time()
        replies = [bytearray().join(session.out) for session in sessions.values()]  # joining bytes may copy nothing
        self.copy_cpu += time.process_time() - began
        for (rank, peer), reply in zip(sessions.items(), replies, strict=True):
            action = self._awaited[rank]
            if action is None or len(reply) != action.reply_bytes or (action.reply and reply != action.reply):
                raise SystemExit(f"rank {rank} got a wrong reply: {bytes(reply[:32])!r}")
            peer.unsent = 0
            peer.out.clear()
            self._awaited[rank] = None
        self._waiting -= len(sessions)
        self.parked = max(self.parked, self._waiting)
        return list(sessions)


def _cut(request: bytes) -> list[bytes]:
    later = [request[at : at + READ_ON] for at in range(FIRST_READ, len(request), READ_ON)]
    return [request[:FIRST_READ], *later] if request else []


def measure_start(pattern: Pattern, ranks: int, roots_last: bool) -> dict[str, float]:
    """Return seconds of wall time and CPU, the number of operations they are for, and the peaks."""
    plan = traffic(pattern, ranks)
    process = Server(0, os.getpid())
    process.reset_peak_memory()
    idle = process.memory()
    job = Ranks(plan, ranks)
    try:
        job.play(roots_last)
    except LimitError as error:
        raise SystemExit(f"a limit was reached: {error}") from None
    memory = process.peak_memory() - idle
    return {
        "wall": job.wall, "cpu": job.cpu, "operations": ranks, "memory": memory, "parked": job.parked,
        "copy_cpu": job.copy_cpu,
    }  # fmt: skip


def measure(scenario: str, ranks: int, words: Sequence[str]) -> dict[str, float]:
    """Return seconds of wall time and CPU, and the number of operations they are for; `words` describe a start."""
    tune_gc()
    if scenario in ("start", "start-spread"):
        return measure_start(Pattern.of(*words), ranks, roots_last=scenario == "start")
    job = Sessions(ranks)
    run = {"init": job.init, "barrier": job.barrier, "barrier-opcode": job.barrier_opcode, "fanout": job.fanout}
    if scenario != "init":
        job.init()
    wall, cpu = time.perf_counter(), time.process_time()
    operations = run[scenario]()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "operations": operations}


# The cost of a rank as the job grows


class Growth(NamedTuple):
    """A row's cost per rank, as a multiple of that at the smallest size."""

    factor: float
    row: str


def growth(sizes: Sequence[int], runs: int) -> Growth:
    """Print every row at these sizes; return the one that grew most."""
    print(f"gc thresholds of Python: {gc.get_threshold()}", flush=True)
    worst = Growth(0.0, "")
    for collector in COLLECTORS:
        base: dict[str, float] = {}
        for ranks in sizes:
            found = [_child(None, "growth", str(ranks), collector) for _ in range(runs)]
            rows = {name: min(one[name] for one in found) / ranks * 1e6 for name in found[0]}
            base = base or rows
            grown = {name: us / base[name] for name, us in rows.items()}
            row = "  ".join(f"{name} {us:6.2f} ({grown[name]:.2f}×)" for name, us in rows.items())
            print(f"{build()} {collector:8} {ranks:9,} ranks: {row}", flush=True)
            where = f"{ranks:,} ranks, collector {collector}"
            worst = max(worst, *(Growth(factor, f"{name}, {where}") for name, factor in grown.items()))
    return worst


def measure_growth(ranks: int, collector: str) -> dict[str, float]:
    """Return the median CPU seconds by row of several passes, for all ranks together."""
    if collector == "tuned":
        tune_gc()
    one_pass(ranks)  # warm up
    passes = [one_pass(ranks) for _ in range(max(1, RANKS_SERVED // ranks))]
    return {name: statistics.median(found[name] for found in passes) for name in passes[0]}


def spent(do: Callable[[], object]) -> float:
    began = time.process_time()
    do()
    return time.process_time() - began


def many_ranks(ranks: int) -> dict[str, float]:
    """Return the CPU seconds by row, for all ranks together."""
    job = Sessions(ranks)
    found = {
        "init": spent(job.init),
        "barrier": spent(lambda: job.barrier(times=1)),
        "one_message_barrier": spent(lambda: job.barrier_opcode(times=1)),
        "fan_out": spent(job.fanout),
    }
    wait = encode_request("wait", [b"/never"])
    for session in job.sessions:
        job.send(session, wait)

    def leave() -> None:
        for session in job.sessions:
            session.leave()
        job.finish()

    return {**found, "leave_waiting": spent(leave)}


def many_keys(count: int) -> dict[str, float]:
    """Return the CPU seconds of one client that waits for so many keys, which come one by one, or that disconnects."""
    job = Sessions(0)
    waiter, leaver, setter = job.connected(1), job.connected(2), job.connected(3)
    names = [b"/key/%d" % number for number in range(count)]
    wait, others = encode_request("wait", names), encode_request("wait", [b"/never" + name for name in names])
    sets = [encode_request("set", name, pack(b"")) for name in names]

    def run() -> None:
        job.send(waiter, wait)
        job.finish(waiter)
        for request in sets:
            job.send(setter, request)
        job.finish()

    def give_up() -> None:
        job.send(leaver, others)
        job.finish(leaver)
        leaver.leave()
        job.finish()

    found = spent(run)
    job.flush_woken(1)
    return {"wait_for_so_many_keys": found, "give_up_so_many_keys": spent(give_up)}


def one_pass(ranks: int) -> dict[str, float]:
    """Measure on new engines, without the garbage of the pass before."""
    gc.collect()
    return {**many_ranks(ranks), **(many_keys(ranks) if ranks <= KEYS_AT_ONCE else {})}


if __name__ == "__main__":
    processes.die_with_parent()
    name, ranks, *rest = sys.argv[1:]
    print(json.dumps(measure_growth(int(ranks), *rest) if name == "growth" else measure(name, int(ranks), rest)))
