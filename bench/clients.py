"""Our clients against PyTorch's C++ client, on one and the same server process: latency in pairs, with intervals.

    python bench/clients.py                    nothing pinned, our server
    python bench/clients.py --pin              client on core 0, server on core 1
    python bench/clients.py --server libuv     PyTorch's server

Every row is the median of paired batches, the order of the two alternating, so that what else the machine does hits
both; the interval is that of the ratios' medians (90 %, from the order statistics). Needs PyTorch.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import uvloop

import tcpstore_async
from tcpstore_async.daemon import build

BATCH = 500
ASYNC_IN_FLIGHT = 64
TIMEOUT = timedelta(seconds=60)

TORCH_SERVER = """
import datetime, sys, torch
store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, datetime.timedelta(seconds=300), wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""

BUSY = """
import sys
from datetime import timedelta
if sys.argv[1] == "ours":
    from tcpstore_async import TCPStore
else:
    from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=300), False)
print(store.port, flush=True)
while True:
    sum(range(1000))
"""
"""A trainer whose main thread runs Python without a pause, with the store it has made."""


@contextmanager
def process(command: list[str], core: int | None = None) -> Iterator[str]:
    """A process that says one line when it is ready."""
    pin = ["taskset", "-c", str(core)] if core is not None else []
    child = subprocess.Popen(
        [*pin, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=tempfile.gettempdir(),
        text=True,
    )
    assert child.stdout is not None
    try:
        yield child.stdout.readline()
    finally:
        child.kill()
        child.communicate()


@contextmanager
def server(kind: str, core: int | None) -> Iterator[int]:
    if kind == "libuv":
        with process([sys.executable, "-W", "ignore", "-c", TORCH_SERVER], core) as line:
            yield int(line)
    else:
        with process([sys.executable, "-m", "tcpstore_async", "serve", "--port", "0"], core) as line:
            yield json.loads(line)["port"]


def p50(do: Callable[[], object], count: int) -> float:
    """The median time of a call, in microseconds."""
    clock = time.perf_counter_ns
    times = []
    for _ in range(count):
        began = clock()
        do()
        times.append(clock() - began)
    return statistics.median(times) / 1000


def timed(do: Callable[[], object], count: int) -> Callable[[], float]:
    return lambda: p50(do, count)


def pairs(ours: Callable[[], float], theirs: Callable[[], float], count: int) -> list[tuple[float, float]]:
    """Measure both so many times, taking turns at going first."""
    found = []
    for number in range(count):
        if number % 2:
            second = theirs()
            found.append((ours(), second))
        else:
            first = ours()
            found.append((first, theirs()))
    return found


def report(name: str, found: list[tuple[float, float]], unit: str = "µs") -> None:
    """One row: both medians, the median ratio, and its interval."""
    ratios = sorted(ours / theirs for ours, theirs in found)
    low, high = interval(len(ratios))
    medians = [statistics.median(side) for side in zip(*found, strict=True)]
    print(
        f"{name:34} ours {medians[0]:9.2f} {unit}   PyTorch {medians[1]:9.2f} {unit}   "
        f"ratio {statistics.median(ratios):.2f} ({ratios[low]:.2f}–{ratios[high]:.2f})",
        flush=True,
    )


def interval(count: int) -> tuple[int, int]:
    """Which order statistics hold the median with 90 %."""
    spread = 1.645 * count**0.5 / 2
    return max(0, int(count / 2 - spread)), min(count - 1, int(count / 2 + spread))


def calls(port: int, count: int) -> None:
    """The ordinary calls, one outstanding."""
    import torch.distributed as dist

    theirs: Any = dist.TCPStore("127.0.0.1", port, None, False, TIMEOUT, wait_for_workers=False)
    with tcpstore_async.TCPStore("127.0.0.1", port, timeout=TIMEOUT) as ours:
        ours.set("k", "v" * 100)
        ours.get("k")
        kinds: dict[str, Callable[[Any], Callable[[], object]]] = {
            "add": lambda store: lambda: store.add("n", 1),
            "set, then check": lambda store: lambda: (store.set("s", "v"), store.check(["s"])),
            "set": lambda store: lambda: store.set("s", "v"),
            "check": lambda store: lambda: store.check(["k"]),
            "get": lambda store: lambda: store.get("k"),
        }
        for name, call in kinds.items():
            report(name, pairs(timed(call(ours), BATCH), timed(call(theirs), BATCH), count))


def creating(port: int, count: int) -> None:
    """Making and closing a client at a literal address."""
    import torch.distributed as dist

    def ours() -> None:
        tcpstore_async.TCPStore("127.0.0.1", port, timeout=TIMEOUT).close()

    def theirs() -> None:
        dist.TCPStore("127.0.0.1", port, None, False, TIMEOUT, wait_for_workers=False)

    report("make and close", pairs(timed(ours, 20), timed(theirs, 20), count))


def in_flight(port: int, count: int) -> None:
    """The async client with many calls in flight against one C++ client, in microseconds per operation."""
    import torch.distributed as dist

    theirs: Any = dist.TCPStore("127.0.0.1", port, None, False, TIMEOUT, wait_for_workers=False)
    loop = uvloop.new_event_loop()
    ours = loop.run_until_complete(tcpstore_async.AsyncTCPStore.connect("127.0.0.1", port, timeout=TIMEOUT))

    async def worker(calls: int) -> None:
        for _ in range(calls):
            await ours.add("n", 1)

    async def crowd(calls: int) -> None:
        await asyncio.gather(*(worker(calls) for _ in range(ASYNC_IN_FLIGHT)))

    def many(calls: int = 40) -> float:
        began = time.perf_counter()
        loop.run_until_complete(crowd(calls))
        return (time.perf_counter() - began) / (calls * ASYNC_IN_FLIGHT) * 1e6

    def one(calls: int = 1000) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            theirs.add("n", 1)
        return (time.perf_counter() - began) / calls * 1e6

    report(f"async add, {ASYNC_IN_FLIGHT} in flight", pairs(many, one, count))
    loop.run_until_complete(ours.close())
    loop.close()


def busy_master(count: int) -> None:
    """What another process sees of a store whose owner's main thread never pauses: the C++ client on both."""
    import torch.distributed as dist

    command = [sys.executable, "-W", "ignore", "-c", BUSY]
    with process([*command, "ours"]) as ours, process([*command, "theirs"]) as theirs:
        stores: list[Any] = [
            dist.TCPStore("127.0.0.1", int(line), None, False, TIMEOUT, wait_for_workers=False)
            for line in (ours, theirs)
        ]
        mine, other = (functools.partial(store.add, "n", 1) for store in stores)
        report("add, the master being busy", pairs(timed(mine, BATCH), timed(other, BATCH), count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", choices=["ours", "libuv"], default="ours", help="whose server (ours)")
    parser.add_argument("--pin", action="store_true", help="client on core 0, server on core 1")
    parser.add_argument("--pairs", type=int, default=30, help="paired batches (30)")
    options = parser.parse_args()
    if options.pin:
        os.sched_setaffinity(0, {0})
    print(f"server: {options.server}; package: {build()}; {'pinned apart' if options.pin else 'nothing pinned'}")
    with server(options.server, 1 if options.pin else None) as port:
        calls(port, options.pairs)
        creating(port, options.pairs)
        in_flight(port, options.pairs)
    if not options.pin:
        busy_master(options.pairs)


if __name__ == "__main__":
    main()
