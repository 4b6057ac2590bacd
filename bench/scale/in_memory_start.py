"""Play a job's start (`bench/scale/start.py`) against our sessions without sockets, with the default limits.

Must not know the other scenarios.
Invariant: every reply is compared with the known one; neither that nor copying requests and replies is in the server's
time.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from bench.scale.servers import Server
from bench.scale.start import Action, Pattern, Traffic, in_order_of_arrival, traffic
from tcpstore_async.errors import LimitError
from tcpstore_async.limits import Limits
from tcpstore_async.session.server import Engine, ServerSession

BATCH = 64
"""Ranks whose requests arrive between two flushes of the replies."""
FIRST_READ, READ_ON = 960, 128 * 1024
"""Bytes that the server on uvloop reads at once, first and in the middle of a request (`server/uv.py`)."""


class Spent(NamedTuple):
    """Seconds of the clock and of CPU."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Spent:
        return cls(time.perf_counter(), time.process_time())


class Ranks:
    """The ranks of one job, at their positions in what they send, and the engine that serves them."""

    def __init__(self, plan: Traffic, ranks: int) -> None:
        self.engine = Engine(Limits())
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
        """Have the engine take requests; only this counts as the server's time, without copying the requests.

        Each piece is copied before it is taken, as receiving does: no two ranks' are the same object, and it is in the
        processor's cache. What copying takes is measured alone.
        """
        engine, keyspace = self.engine, self.engine.keyspace
        began = Spent.now()
        for _, pieces in work:
            for piece in pieces:
                bytes(memoryview(piece))
        copied = Spent.now()
        for rank, pieces in work:
            session = self.sessions[rank]
            if session is None:
                self.sessions[rank] = session = ServerSession(engine, rank, "10.0.0.1", rank % 65536, 0.0)
            for piece in pieces:
                session.receive(bytes(memoryview(piece)))
            while session.incremental is not None:
                session.receive(b"")
        while keyspace.work:
            keyspace.step()
        ended = Spent.now()
        self.wall += (ended.wall - copied.wall) - (copied.wall - began.wall)
        self.cpu += (ended.cpu - copied.cpu) - (copied.cpu - began.cpu)
        self.copy_cpu += copied.cpu - began.cpu
        if engine.evicted:
            raise SystemExit(f"a limit was reached: {next(iter(engine.evicted.values()))}")

    def _collect(self, batch: list[int]) -> list[int]:
        """Take the replies to these ranks and to those that were woken; return the ranks that have theirs."""
        sessions = {rank: session for rank in batch if (session := self.sessions[rank]) is not None and session.out}
        sessions.update(
            {rank: session for session in self.engine.pending_flush if isinstance(rank := session.owner, int)}
        )
        self.engine.pending_flush.clear()
        began = time.process_time()
        replies = [bytearray().join(session.out) for session in sessions.values()]  # joining bytes may copy nothing
        self.copy_cpu += time.process_time() - began
        for (rank, session), reply in zip(sessions.items(), replies, strict=True):
            action = self._awaited[rank]
            if action is None or len(reply) != action.reply_bytes or (action.reply and reply != action.reply):
                raise SystemExit(f"rank {rank} got a wrong reply: {bytes(reply[:32])!r}")
            session.unsent = 0
            session.out.clear()
            self._awaited[rank] = None
        self._waiting -= len(sessions)
        self.parked = max(self.parked, self._waiting)
        return list(sessions)


def _cut(request: bytes) -> list[bytes]:
    later = [request[at : at + READ_ON] for at in range(FIRST_READ, len(request), READ_ON)]
    return [request[:FIRST_READ], *later] if request else []


def measure(pattern: Pattern, ranks: int, roots_last: bool) -> dict[str, float]:
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
