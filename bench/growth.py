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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

from bench.memory import Sessions
from tcpstore_async.blob import pack
from tcpstore_async.daemon import build, spare_the_collector
from tcpstore_async.load.requests import said

KEYS_AT_ONCE = 100_000


def spent(do: Callable[[], object]) -> float:
    began = time.process_time()
    do()
    return time.process_time() - began


def measure(ranks: int) -> dict[str, float]:
    """Seconds of processor time of each scenario, for all ranks together."""
    job = Sessions(ranks)

    def leave_waiting() -> None:
        wait = said("wait", [b"/never"])
        for session in job.sessions:
            job.tell(session, wait)
        for session in job.sessions:
            session.leave()

    scenarios: dict[str, Callable[[], object]] = {
        "init": job.init,
        "barrier": lambda: job.barrier(times=1),
        "one_message_barrier": lambda: job.barrier_opcode(times=1),
        "fan_out": job.fanout,
        "leave_waiting": leave_waiting,
    }
    return {name: spent(scenario) for name, scenario in scenarios.items()}


def many_keys(count: int) -> float:
    """Processor time for one client that waits for so many keys, which then come one by one."""
    job = Sessions(0)
    waiter, setter = job.connected(1), job.connected(2)
    names = [b"/key/%d" % number for number in range(count)]

    def run() -> None:
        job.tell(waiter, said("wait", names))
        for name in names:
            job.tell(setter, said("set", name, pack(b"")))

    seconds = spent(run)
    job.demand(1)
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
