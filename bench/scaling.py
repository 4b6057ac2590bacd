"""Measure the cost of a rank as the job grows: our server's sessions, driven in memory without sockets.

    python bench/scaling.py [--ranks 1000 19000 98304 1000000] [--runs 3]
    python bench/scaling.py --ranks 1000 16000 --max-growth 6      exit status 1 if a row grows by more than that

A row is the CPU time of the engine per rank, in microseconds, and its ratio to the smallest size. Each run has a
process of its own; its first pass does not count, and small sizes are repeated on new engines until some 20,000 ranks
have been served. Shown is the minimum over the runs of the median over the passes. `collector` says how the garbage
collector is set: as the server sets it (`tuned`) or as Python does (`default`). `leave_waiting` is the disconnection of
all ranks while each waits for a key; `give_up_so_many_keys` is one client that waits for so many keys and disconnects.

The compiled build is measured if it is up to date, otherwise, and with BENCH_BUILD=interpreted, the checkout; the
output says which.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parent.parent))

from bench import builds
from bench.scale.in_memory import Sessions
from tcpstore_async.load.scripts import encode_request
from tcpstore_async.serving import build, tune_gc
from tcpstore_async.values import pack

KEYS_AT_ONCE = 100_000
RANKS_SERVED = 20_000
"""By the passes of one run together, at least."""
COLLECTORS = ("tuned", "default")


class Found(NamedTuple):
    """What one process measured."""

    build: str
    seconds: dict[str, float]
    """CPU seconds by row, for all ranks together."""


class Growth(NamedTuple):
    """A row's cost per rank, as a multiple of that at the smallest size."""

    factor: float
    row: str


def spent(do: Callable[[], object]) -> float:
    began = time.process_time()
    do()
    return time.process_time() - began


def many_ranks(ranks: int) -> dict[str, float]:
    """Return CPU seconds by row, for all ranks together."""
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


def one(ranks: int, collector: str) -> None:
    """The child's part: measure and print."""
    if collector == "tuned":
        tune_gc()
    one_pass(ranks)  # warm up
    passes = [one_pass(ranks) for _ in range(max(1, RANKS_SERVED // ranks))]
    seconds = {name: statistics.median(found[name] for found in passes) for name in passes[0]}
    print(json.dumps(Found(build(), seconds)))


def least(tree: Path, ranks: int, collector: str, runs: int) -> tuple[str, dict[str, float]]:
    """Return the build that was measured and the minimum of each row over the runs, in microseconds per rank."""
    found = []
    for _ in range(runs):
        done = subprocess.run(
            [sys.executable, __file__, "--one", str(ranks), "--collector", collector],
            stdout=subprocess.PIPE,
            check=True,
            cwd=tempfile.gettempdir(),
            env=builds.environment(tree),
        )
        found.append(Found(*json.loads(done.stdout)))
    rows = {name: min(one.seconds[name] for one in found) / ranks * 1e6 for name in found[0].seconds}
    return found[0].build, rows


def measure(sizes: list[int], runs: int) -> Growth:
    """Print every row; return the one that grew most."""
    tree = builds.chosen()
    worst = Growth(0.0, "")
    for collector in COLLECTORS:
        base: dict[str, float] = {}
        for ranks in sizes:
            package, found = least(tree, ranks, collector, runs)
            base = base or found
            grown = {name: us / base[name] for name, us in found.items()}
            row = "  ".join(f"{name} {us:6.2f} ({grown[name]:.2f}×)" for name, us in found.items())
            print(f"{package} {collector:8} {ranks:9,} ranks: {row}", flush=True)
            where = f"{ranks:,} ranks, collector {collector}"
            worst = max(worst, *(Growth(factor, f"{name}, {where}") for name, factor in grown.items()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1000, 19_000, 98_304, 1_000_000])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--max-growth", type=float, metavar="FACTOR", help="highest growth of any row")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--collector", choices=COLLECTORS, default="tuned", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one, options.collector)
        return
    print(f"gc thresholds of Python: {gc.get_threshold()}", flush=True)
    worst = measure(sorted(set(options.ranks)), options.runs)
    if options.max_growth is not None and worst.factor > options.max_growth:
        parser.exit(1, f"{worst.row}: {worst.factor:.2f} times the smallest size's (max {options.max_growth:g})\n")


if __name__ == "__main__":
    main()
