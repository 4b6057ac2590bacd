"""Compare our clients with PyTorch's C++ client on the same server process: latency in pairs, with intervals.

    python bench/clients.py                    nothing pinned, our server
    python bench/clients.py --pin              client on core 0, server on core 1
    python bench/clients.py --server libuv     PyTorch's server

A row is the median of paired batches in alternating order, so that other load hits both, with the 90 % interval of the
median ratio (from order statistics). A batch counts with its median call; `set`, which takes no longer than reading the
clock, and calls in flight are timed by the batch and divided. Needs PyTorch.

The compiled build is measured, client and server, if it is up to date; otherwise, and with BENCH_BUILD=interpreted, the
checkout. A server of another build than the client's is refused with exit status 2.
"""

from __future__ import annotations

import asyncio
import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import uvloop

sys.path.append(str(Path(__file__).parent.parent))

from bench import processes, stats

processes.use_build()

import tcpstore_async  # noqa: E402  (the path comes first)
from tcpstore_async.serving import build  # noqa: E402

BATCH = 500
ASYNC_IN_FLIGHT = 64
ASYNC_BATCH = 40 * ASYNC_IN_FLIGHT
TIMEOUT = timedelta(seconds=60)


class BuildMismatch(Exception):
    """Client and server run different builds."""


def in_child(*words: str, core: int | None = None) -> AbstractContextManager[tuple[int, int]]:
    """Start a server of `bench.processes`; yield its port and process."""
    pin = [] if core is None else ["taskset", "-c", str(core)]
    command = [*pin, *processes.CHILD, *words]
    return processes.announced(command, env=processes.environment(), stderr=subprocess.DEVNULL)


def check_build(port: int) -> None:
    """Compare the build of one of our servers with the clients'. Raises BuildMismatch."""

    async def server_build() -> str:
        async with await tcpstore_async.AsyncTCPStore.connect("127.0.0.1", port, timeout=TIMEOUT) as store:
            identity = await store.server()
            return identity.build if identity else "PyTorch's"

    theirs = asyncio.run(server_build())
    if theirs != build():
        raise BuildMismatch(f"the clients are {build()} and the server on port {port} is {theirs}: nothing is measured")


def p50(do: Callable[[], object], count: int) -> float:
    """Return the median time of a call, in microseconds."""
    clock = time.perf_counter_ns
    times = []
    for _ in range(count):
        began = clock()
        do()
        times.append(clock() - began)
    return statistics.median(times) / 1000


def timed(do: Callable[[], object], count: int) -> Callable[[], float]:
    return lambda: p50(do, count)


def repeated(do: Callable[[], object], count: int) -> None:
    for _ in range(count):
        do()


def divided(batch: Callable[[], object], count: int) -> float:
    """Return the mean time of a call of a batch, in microseconds."""
    began = time.perf_counter()
    batch()
    return (time.perf_counter() - began) / count * 1e6


def pairs(ours: Callable[[], float], theirs: Callable[[], float], count: int) -> list[tuple[float, float]]:
    """Measure both so many times, in alternating order."""
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
    """Print a row: both medians, the median ratio and its interval."""
    ratios = [ours / theirs for ours, theirs in found]
    interval = stats.interval(ratios)
    medians = [statistics.median(side) for side in zip(*found, strict=True)]
    print(
        f"{name:42} ours {medians[0]:9.2f} {unit}   PyTorch {medians[1]:9.2f} {unit}   "
        f"ratio {statistics.median(ratios):.2f} ({interval.low:.2f}–{interval.high:.2f})",
        flush=True,
    )


def calls(port: int, count: int) -> None:
    """Measure ordinary calls, one at a time."""
    import torch.distributed as dist

    theirs: Any = dist.TCPStore("127.0.0.1", port, None, False, TIMEOUT, wait_for_workers=False)
    with tcpstore_async.TCPStore("127.0.0.1", port, timeout=TIMEOUT) as ours:
        ours.set("k", "v" * 100)
        ours.get("k")
        kinds: dict[str, Callable[[Any], Callable[[], object]]] = {
            "add": lambda store: lambda: store.add("n", 1),
            "set, then check": lambda store: lambda: (store.set("s", "v"), store.check(["s"])),
            "check": lambda store: lambda: store.check(["k"]),
            "get": lambda store: lambda: store.get("k"),
        }
        for name, call in kinds.items():
            report(name, pairs(timed(call(ours), BATCH), timed(call(theirs), BATCH), count))
        mine, other = (functools.partial(sets, store) for store in (ours, theirs))
        report("set, of a whole batch", pairs(mine, other, count))


def sets(store: Any) -> float:
    """Return the mean `set` of a batch, in microseconds, and wait until the server has done them all."""
    took = divided(functools.partial(repeated, functools.partial(store.set, "s", "v"), BATCH), BATCH)
    store.check(["s"])
    return took


def creating(port: int, count: int) -> None:
    """Measure making and closing a client at a literal address."""
    import torch.distributed as dist

    def ours() -> None:
        tcpstore_async.TCPStore("127.0.0.1", port, timeout=TIMEOUT).close()

    def theirs() -> None:
        dist.TCPStore("127.0.0.1", port, None, False, TIMEOUT, wait_for_workers=False)

    report("make and close", pairs(timed(ours, 20), timed(theirs, 20), count))


def in_flight(port: int, count: int) -> None:
    """Compare the async client with many calls in flight with one C++ client, in microseconds per operation.

    Every batch ends with a `check`: before its reply no `set` is known to be done. Each row has a new async client,
    which does not inherit connections from the row before.
    """
    import torch.distributed as dist

    theirs: Any = dist.TCPStore("127.0.0.1", port, None, False, TIMEOUT, wait_for_workers=False)
    theirs.set("k", "v" * 100)

    def one_by_one(call: Callable[[], object]) -> None:
        repeated(call, ASYNC_BATCH)
        theirs.check(["k"])

    kinds: dict[str, Callable[[Any], Callable[[], Any]]] = {
        "add": lambda store: functools.partial(store.add, "n", 1),
        "get": lambda store: functools.partial(store.get, "k"),
        "check": lambda store: functools.partial(store.check, ["k"]),
        "set, and one check": lambda store: functools.partial(store.set, "s", "v"),
    }
    for name, call in kinds.items():
        one = functools.partial(divided, functools.partial(one_by_one, call(theirs)), ASYNC_BATCH)
        with concurrent(port, call) as at_once:
            many = functools.partial(divided, at_once, ASYNC_BATCH)
            report(f"async {name}, {ASYNC_IN_FLIGHT} in flight", pairs(many, one, count))


@contextmanager
def concurrent(port: int, call: Callable[[Any], Callable[[], Awaitable[object]]]) -> Iterator[Callable[[], None]]:
    """Yield a function that makes a batch of calls of one async client, many of them in flight."""
    loop = uvloop.new_event_loop()
    store = loop.run_until_complete(tcpstore_async.AsyncTCPStore.connect("127.0.0.1", port, timeout=TIMEOUT))
    do = call(store)

    async def worker() -> None:
        for _ in range(ASYNC_BATCH // ASYNC_IN_FLIGHT):
            await do()

    async def batch() -> None:
        await asyncio.gather(*(worker() for _ in range(ASYNC_IN_FLIGHT)))
        await store.check(["k"])

    try:
        yield lambda: loop.run_until_complete(batch())
    finally:
        loop.run_until_complete(store.close())
        loop.close()


def busy_master(count: int) -> None:
    """Measure stores whose owner's main thread never pauses, with the C++ client on both."""
    import torch.distributed as dist

    with in_child("uvloop", "--busy") as (ours, _), in_child("libuv", "--busy") as (theirs, _):
        check_build(ours)
        stores: list[Any] = [
            dist.TCPStore("127.0.0.1", port, None, False, TIMEOUT, wait_for_workers=False) for port in (ours, theirs)
        ]
        mine, other = (functools.partial(store.add, "n", 1) for store in stores)
        report("add, busy main thread in the master", pairs(timed(mine, BATCH), timed(other, BATCH), count))


def measure(kind: str, pin: bool, count: int) -> None:
    """Print all rows. Raises BuildMismatch."""
    with in_child("libuv" if kind == "libuv" else "uvloop", core=1 if pin else None) as (port, _):
        if kind == "ours":
            check_build(port)
        print(f"server: {kind}; package: {build()}; {'pinned apart' if pin else 'nothing pinned'}", flush=True)
        calls(port, count)
        creating(port, count)
        in_flight(port, count)
    if not pin:
        busy_master(count)


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--server", choices=["ours", "libuv"], default="ours", help="the server (ours)")
    parser.add_argument("--pin", action="store_true", help="client on core 0, server on core 1")
    parser.add_argument("--pairs", type=int, default=30, help="paired batches (30)")
    options = parser.parse_args()
    if options.pin:
        os.sched_setaffinity(0, {0})
    try:
        measure(options.server, options.pin, options.pairs)
    except BuildMismatch as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
