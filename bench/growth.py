"""What a rank costs as a job grows: the server's own sessions in memory, no sockets.

    python bench/growth.py [--ranks 1000 19000 98304 1000000] [--runs 3]

Every row is the processor's time of the engine for one rank, in microseconds, and how that compares with the first
size; the least of the runs counts. `collector` says what the garbage collector is told: as the server tells it
(`tuned`), or what Python does by itself (`default`). Each measurement has a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from tcpstore_async.daemon import build, spare_the_collector
from tcpstore_async.limits import Limits
from tcpstore_async.session.client import ClientSession
from tcpstore_async.session.server import Engine, ServerSession
from tcpstore_async.wire.commands import BY_METHOD

KEYS_AT_ONCE = 100_000
LIMITS = Limits(store_bytes=1 << 40)


def said(method: str, *fields: object) -> bytes:
    """A request, as a client sends it."""
    return ClientSession().request(BY_METHOD[method], fields)[0]


HELLO = ClientSession().hello(1234)[0]
JOIN = said("add", b"init/", 1)


def spent(do: Callable[[], object]) -> float:
    began = time.process_time()
    do()
    return time.process_time() - began


def tell(session: ServerSession, data: bytes) -> None:
    session.receive(data)
    session.unread = 0
    session.out.clear()


def flush(engine: Engine) -> int:
    """What the door does with those who were woken; how many there were."""
    count = len(engine.dirty)
    for session in engine.dirty:
        session.unread = 0
        session.out.clear()
    engine.dirty.clear()
    return count


def measure(ranks: int) -> dict[str, float]:
    """Seconds of processor time of each scenario, for all ranks together."""
    engine = Engine(LIMITS)
    sessions: list[ServerSession] = []

    def init() -> None:
        for number in range(ranks):
            session = ServerSession(engine, None, "10.0.0.1", number % 65536, 0.0)
            tell(session, HELLO)
            tell(session, JOIN)
            sessions.append(session)

    def barrier() -> None:
        add, look = said("add", b"/store_based_barrier_key:0", 1), said("add", b"/store_based_barrier_key:0", 0)
        wait = said("wait", [b"/store_based_barrier_key:0:last_worker"])
        for session in sessions:
            tell(session, add)
            tell(session, look)
            tell(session, wait)
        tell(sessions[-1], said("set", b"/store_based_barrier_key:0:last_worker", struct.pack("<Q", 1) + b"1"))
        assert flush(engine) == ranks

    def one_message_barrier() -> None:
        enter = said("barrier", b"/barrier", ranks)
        for session in sessions:
            tell(session, enter)
        assert flush(engine) == ranks - 1

    def fan_out() -> None:
        wait = said("wait", [b"/late"])
        for session in sessions:
            tell(session, wait)
        tell(sessions[0], said("set", b"/late", bytes(8)))
        assert flush(engine) == ranks

    def leave_waiting() -> None:
        wait = said("wait", [b"/never"])
        for session in sessions:
            tell(session, wait)
        for session in sessions:
            session.leave()

    scenarios = (init, barrier, one_message_barrier, fan_out, leave_waiting)
    return {scenario.__name__: spent(scenario) for scenario in scenarios}


def many_keys(count: int) -> float:
    """Processor time for one client that waits for so many keys, which then come one by one."""
    engine = Engine(LIMITS)
    waiter, setter = (ServerSession(engine, None, "::1", port, 0.0) for port in (1, 2))
    tell(waiter, HELLO)
    tell(setter, HELLO)
    names = [b"/key/%d" % number for number in range(count)]

    def run() -> None:
        tell(waiter, said("wait", names))
        for name in names:
            tell(setter, said("set", name, bytes(8)))

    seconds = spent(run)
    assert flush(engine) == 1
    return seconds


def one(ranks: int, collector: str) -> None:
    """The child's part: measure once and print."""
    if collector == "tuned":
        spare_the_collector()
    found = measure(ranks)
    if ranks <= KEYS_AT_ONCE:
        found["wait_for_so_many_keys"] = many_keys(ranks)
    print(json.dumps(found))


def least(ranks: int, collector: str, runs: int) -> dict[str, float]:
    """The least of several runs, in microseconds a rank."""
    best: dict[str, float] = {}
    for _ in range(runs):
        done = subprocess.run(
            [sys.executable, __file__, "--one", str(ranks), "--collector", collector],
            capture_output=True,
            check=True,
            cwd=tempfile.gettempdir(),
        )
        for name, seconds in json.loads(done.stdout).items():
            best[name] = min(best.get(name, float("inf")), seconds / ranks * 1e6)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1000, 19_000, 98_304, 1_000_000])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--collector", choices=["tuned", "default"], default="tuned", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one, options.collector)
        return
    print(f"package: {build()}; gc thresholds of Python: {gc.get_threshold()}")
    for collector in ("tuned", "default"):
        base: dict[str, float] = {}
        for ranks in options.ranks:
            found = least(ranks, collector, options.runs)
            base = base or found
            row = "  ".join(f"{name} {us:6.2f} ({us / base[name]:.2f}×)" for name, us in found.items())
            print(f"{collector:8} {ranks:9,} ranks: {row}", flush=True)


if __name__ == "__main__":
    main()
