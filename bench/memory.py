"""Our server's sessions driven without sockets, once, in a process of its own: `python -m bench.memory SCENARIO RANKS`.

Knows the engine and what ranks say. Must not know the other servers, which cannot be driven so.
Invariant: what is measured is what the server computes, and nothing of the kernel's part.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

from bench.leash import end_with_parent
from tcpstore_async.blob import pack
from tcpstore_async.daemon import spare_the_collector
from tcpstore_async.limits import Limits
from tcpstore_async.load.requests import join, one_message_barrier, said, store_based_barrier
from tcpstore_async.session.server import Engine, ServerSession

BARRIERS = 10
"""Of a run, as over sockets."""
HELLO = join()[0].request


class Sessions:
    """So many ranks of one server."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.engine = Engine(Limits(budget_bytes=1 << 40))
        self.sessions: list[ServerSession] = []

    def connected(self, number: int) -> ServerSession:
        """A connection that has shaken hands."""
        session = ServerSession(self.engine, None, "10.0.0.1", number % 65536, 0.0)
        self.tell(session, HELLO)
        return session

    def tell(self, session: ServerSession, data: bytes) -> None:
        session.receive(data)
        session.unsent = 0
        session.out.clear()

    def woken(self) -> int:
        """What the door does with those who were woken; how many there were."""
        count = len(self.engine.dirty)
        for session in self.engine.dirty:
            session.unsent = 0
            session.out.clear()
        self.engine.dirty.clear()
        return count

    def init(self) -> int:
        """All ranks join; how many requests that were."""
        _, added = join()
        for number in range(self.ranks):
            session = self.connected(number)
            self.tell(session, added.request)
            self.sessions.append(session)
        return self.ranks

    def barrier(self, times: int = BARRIERS) -> int:
        for number in range(times):
            add, look, wait = store_based_barrier(b"/barrier:%d" % number, self.ranks)
            for session in self.sessions:
                self.tell(session, add.request)
                self.tell(session, look.request)
                self.tell(session, wait.request)
            self.tell(self.sessions[-1], look.then)
            self.demand(self.ranks)
        return times * self.ranks * 3

    def barrier_opcode(self, times: int = BARRIERS) -> int:
        for number in range(times):
            [enter] = one_message_barrier(b"/entered:%d" % number, self.ranks)
            for session in self.sessions:
                self.tell(session, enter.request)
            self.demand(self.ranks - 1)
        return times * self.ranks

    def fanout(self) -> int:
        wait = said("wait", [b"/late"])
        for session in self.sessions:
            self.tell(session, wait)
        self.tell(self.sessions[0], said("set", b"/late", pack(b"1")))
        self.demand(self.ranks)
        return self.ranks

    def demand(self, count: int) -> None:
        woken = self.woken()
        if woken != count:
            raise SystemExit(f"{woken} ranks were woken, not {count}")


def measure(scenario: str, ranks: int) -> dict[str, float]:
    """Seconds of wall and processor time, and how many operations they are for."""
    spare_the_collector()
    sessions = Sessions(ranks)
    deeds: dict[str, Callable[[], int]] = {
        "init": sessions.init,
        "barrier": sessions.barrier,
        "barrier-opcode": sessions.barrier_opcode,
        "fanout": sessions.fanout,
    }
    if scenario != "init":
        sessions.init()
    wall, cpu = time.perf_counter(), time.process_time()
    operations = deeds[scenario]()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "operations": operations}


if __name__ == "__main__":
    end_with_parent()
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
