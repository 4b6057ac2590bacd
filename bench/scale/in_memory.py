"""Drive our server's sessions without sockets.

`python -m bench.scale.in_memory SCENARIO RANKS [WORD…]` prints what it took.
Must not know the other servers, which cannot be driven so.
Invariant: what is measured is what the server computes, without the kernel's part.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

from bench.processes import die_with_parent
from bench.scale import in_memory_start
from bench.scale.start import Pattern
from tcpstore_async.limits import Limits
from tcpstore_async.load.scripts import encode_request, join, one_message_barrier, store_based_barrier
from tcpstore_async.serving import tune_gc
from tcpstore_async.session.server import Engine, ServerSession
from tcpstore_async.values import pack

BARRIERS = 10
"""Of a measurement, as over sockets."""
HELLO = join()[0].request


class Sessions:
    """The ranks of one job and the engine that serves them."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.engine = Engine(Limits(budget_bytes=1 << 40))
        self.sessions: list[ServerSession] = []

    def connected(self, number: int) -> ServerSession:
        """Return a session that has shaken hands."""
        session = ServerSession(self.engine, None, "10.0.0.1", number % 65536, 0.0)
        self.send(session, HELLO)
        return session

    def send(self, session: ServerSession, data: bytes) -> None:
        session.receive(data)
        session.unsent = 0
        session.out.clear()

    def finish(self, session: ServerSession | None = None) -> None:
        """Finish what the engine does in steps, and a long command of this session."""
        while session is not None and session.incremental is not None:
            session.receive(b"")
        while self.engine.keyspace.work:
            self.engine.keyspace.step()

    def flush_woken(self, expected: int) -> None:
        """Take what was written to woken sessions, as a server does; exit if not so many were woken."""
        self.finish()
        woken = len(self.engine.pending_flush)
        for session in self.engine.pending_flush:
            session.unsent = 0
            session.out.clear()
        self.engine.pending_flush.clear()
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


def measure(scenario: str, ranks: int, words: Sequence[str]) -> dict[str, float]:
    """Return seconds of wall time and CPU, and the number of operations they are for; `words` describe a start."""
    tune_gc()
    if scenario in ("start", "start-spread"):
        return in_memory_start.measure(Pattern.of(*words), ranks, roots_last=scenario == "start")
    job = Sessions(ranks)
    run = {"init": job.init, "barrier": job.barrier, "barrier-opcode": job.barrier_opcode, "fanout": job.fanout}
    if scenario != "init":
        job.init()
    wall, cpu = time.perf_counter(), time.process_time()
    operations = run[scenario]()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "operations": operations}


if __name__ == "__main__":
    die_with_parent()
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), sys.argv[3:])))
