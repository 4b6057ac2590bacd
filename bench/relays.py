"""Measure what relays save and what they cost.

    python -m bench.relays                     all parts
    python -m bench.relays latency fairness    these parts

* many:      connects all ranks over real sockets at once, behind six links and behind links of eight ranks each, and
             compares that with PyTorch's libuv server at the most ranks that it can hold;
* ratios:    compares our server with and without links of eight ranks;
* bursts:    the same on a server that is stopped for 20 ms whenever it sleeps, and so finds the requests of many ranks
             when it goes on, as the server of a large job does: here one core has to do the work of all hosts;
* processes: compares relay processes of 64 and of 8 ranks with none, each rank with one request outstanding, with the
             ordinary scheduling policy and with SCHED_BATCH for the relays;
* latency:   measures one client, with and without a relay;
* fairness:  measures 1,000 ranks behind two relays, alone, and beside a rank that reads nothing and one that never
             stops sending.

What is compared alternates in one run. CPU time is the server's; that of the relays is shown separately.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

from bench import processes

if __name__ == "__main__":
    processes.use_build()  # before the package is imported

from bench.scale.in_memory import BARRIERS
from bench.scale.scenarios import SECONDS
from bench.scale.servers import (
    RANKS_PER_LINK,
    RANKS_PER_RELAY,
    WINDOW,
    Connection,
    Host,
    Measured,
    TestBed,
    hosting,
    load_cores,
    loaded,
    relayed,
)
from bench.stats import spread
from tcpstore_async.base.errors import counted
from tcpstore_async.serving import build
from tcpstore_async.tools.load.scripts import encode_request, hello, make_step, one_message_barrier, store_based_barrier
from tcpstore_async.tools.load.workers import OpenLoop
from tcpstore_async.wire.values import pack

LIMIT = 600.0
LARGEST_DIRECT = 19_000
"""What 20,000 open files allow."""
ONE_LINK = 16_384
"""Ranks of one relay process with a single link."""
PARTS = ("many", "ratios", "bursts", "processes", "latency", "fairness")
STOPPED_SECONDS = 0.02
LARGE_VALUES = 100
"""Values of a mebibyte that a rank asks for and does not read."""


class Way(NamedTuple):
    """A way from the ranks to a server."""

    name: str
    server: str
    ranks_per_link: int = -1
    """-1: no relays; 0: one link for each relay process."""
    ranks_per_process: int = RANKS_PER_RELAY
    policy: int = os.SCHED_OTHER
    """The scheduling policy of the relays."""


@contextmanager
def bed(host: Host, way: Way, ranks: int) -> Iterator[TestBed]:
    with ExitStack() as stack:
        server = stack.enter_context(host.running(way.server, new=True))
        if way.ranks_per_link >= 0:
            server = stack.enter_context(relayed(server, ranks, way.ranks_per_link, way.ranks_per_process))
            for one in server.relays:
                os.sched_setscheduler(one.pid, way.policy, os.sched_param(0))
        yield stack.enter_context(loaded(server, ranks - 1, LIMIT))


def start_and_barriers(
    host: Host, way: Way, ranks: int, beside: Callable[[int], AbstractContextManager[object]] = nullcontext
) -> dict[str, Measured]:
    """Let all ranks join, then pass ten store-based barriers and ten BARRIERs, on the same connections.

    `beside` is entered meanwhile, with the server's process.
    """
    with bed(host, way, ranks) as test, beside(test.server.pid):
        idle = test.server.memory()
        found = {"init": test.join(ranks, WINDOW)}
        others = ranks - 1  # rank 0, of `join`, has gone
        steps = [step for number in range(BARRIERS) for step in store_based_barrier(b"/store:%d" % number, others)]
        found["store_based_barrier"] = test.play(steps)
        steps = [step for number in range(BARRIERS) for step in one_message_barrier(b"/barrier:%d" % number, others)]
        found["BARRIER"] = test.play(steps)
        memory = test.server.memory() - idle
        _note(
            f"{way.name}: {processes.open_files(test.server.pid)} connections, {memory / ranks:.0f} B resident per rank"
        )
        return {part: one._replace(memory=memory) for part, one in found.items()}


def per_rank(part: str, found: Measured, ranks: int) -> float:
    """Return the server's CPU seconds for each rank, and for each barrier."""
    return found.server_cpu / ranks / (1 if part == "init" else BARRIERS)


def many(host: Host, ranks: int, rounds: int) -> None:
    print(f"\n# {ranks:,} ranks over real sockets, held at once; libuv with {LARGEST_DIRECT:,}\n")
    six = Way(counted(-(-ranks // ONE_LINK), "link"), "uvloop", 0, ONE_LINK)
    eight = Way(f"{ranks // RANKS_PER_LINK:,} links of {RANKS_PER_LINK}", "uvloop", RANKS_PER_LINK)
    libuv, ours = Way("libuv, direct", "libuv"), Way("ours, direct", "uvloop")
    print("| round | | ranks | | wall | server CPU per rank | × libuv | relays' CPU per rank | resident per rank |")
    print("|---|---|---|---|---|---|---|---|---|")
    for number in range(rounds):
        reference: dict[str, float] = {}
        for way in (libuv, ours, six, eight):
            size = ranks if way.ranks_per_link >= 0 else min(ranks, LARGEST_DIRECT)
            for part, one in start_and_barriers(host, way, size).items():
                cpu = per_rank(part, one, size)
                if way is libuv:
                    reference[part] = cpu
                relays = one.relay_cpu
                times = 1 if part == "init" else BARRIERS
                shown = "–" if relays is None else f"{relays / size / times * 1e6:.1f} µs"
                print(
                    f"| {number + 1} | {way.name} | {size:,} | {part} | {one.wall:.1f} s | {cpu * 1e6:.2f} µs "
                    f"| {cpu / reference[part]:.2f} | {shown} | {(one.memory or 0) / size:.0f} B |",
                    flush=True,
                )


def ratios(host: Host, ranks: int, rounds: int) -> None:
    direct, eight = Way("direct", "uvloop"), Way("links of 8", "uvloop", RANKS_PER_LINK)
    _compare(f"{ranks:,} ranks", direct, (eight,), rounds, lambda way: start_and_barriers(host, way, ranks))


def bursts(host: Host, ranks: int, rounds: int) -> None:
    direct, eight = Way("direct", "uvloop"), Way("links of 8", "uvloop", RANKS_PER_LINK)

    def run(way: Way) -> dict[str, Measured]:
        return start_and_barriers(host, way, ranks, stopped_when_idle)

    _compare(f"{ranks:,} ranks in bursts", direct, (eight,), rounds, run)


def relay_processes(host: Host, ranks: int, rounds: int) -> None:
    """Real relay processes: each wakes, and wakes the server, by itself.

    One process sends for all ranks, on the relays' core: with the ordinary policy a relay that wakes interrupts it.
    """
    ways = [
        Way(f"relay processes of {each}{how}", "uvloop", 0, each, policy)
        for how, policy in (("", os.SCHED_OTHER), (", SCHED_BATCH", os.SCHED_BATCH))
        for each in (64, 8)
    ]

    def run(way: Way) -> dict[str, Measured]:
        with bed(host, way, ranks) as test:
            test.prepare(hello())
            steps = [make_step(encode_request("add", b"/sum", 1), 8)]
            test.play(steps, repeat=5)
            return {"ADD": test.play(steps, repeat=40)}

    _compare(f"{ranks:,} ranks, one ADD outstanding", Way("direct", "uvloop"), ways, rounds, run)


def _compare(
    title: str,
    direct: Way,
    ways: Sequence[Way],
    rounds: int,
    run: Callable[[Way], dict[str, Measured]],
) -> None:
    print(f"\n# {title}: {rounds} interleaved repetitions\n")
    cpu: dict[tuple[str, str], list[float]] = {}
    relays: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for way in (direct, *ways):
            for part, one in run(way).items():
                cpu.setdefault((way.name, part), []).append(one.server_cpu / one.operations)
                if one.relay_cpu is not None:
                    relays.setdefault((way.name, part), []).append(one.relay_cpu / one.operations)
    print("| | | server CPU per operation | × direct | relays' CPU × direct's server |\n|---|---|---|---|---|")
    for (name, part), found in cpu.items():
        base = cpu[direct.name, part]
        ratio = spread([one / other for one, other in zip(found, base, strict=True)])
        outside = relays.get((name, part))
        beside = spread([one / other for one, other in zip(outside, base, strict=True)]) if outside else "–"
        print(f"| {name} | {part} | {statistics.median(found) * 1e6:.2f} µs | {ratio} | {beside} |", flush=True)


def latency(host: Host, rounds: int, requests: int = 4000) -> None:
    """One client, one ADD after the other, nothing else to do.

    It runs where ranks run: on the server's core it would not have to wake another one.
    """
    print(f"\n# One client: {requests:,} ADDs, {rounds} interleaved repetitions\n")
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for way in (Way("direct", "uvloop"), Way("through a relay", "uvloop", 0, 64)):
            with bed(host, way, 2) as test:
                test.prepare(hello())
                with pinned(load_cores()):
                    times = one_by_one(test, requests)
                found.setdefault(way.name, []).append((times[len(times) // 2], times[len(times) * 99 // 100]))
    print("| | p50 | p99 |\n|---|---|---|")
    for name, quantiles in found.items():
        p50, p99 = (spread([one[at] * 1e6 for one in quantiles]) for at in (0, 1))
        print(f"| {name} | {p50} µs | {p99} µs |", flush=True)


@contextmanager
def stopped_when_idle(pid: int) -> Iterator[None]:
    """Stop a process for `STOPPED_SECONDS`, and again whenever it has begun to sleep."""

    def run(over: threading.Event) -> None:
        state = Path(f"/proc/{pid}/stat")
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(STOPPED_SECONDS)
            os.kill(pid, signal.SIGCONT)
            while not over.wait(0.001) and state.read_text().rpartition(")")[2].split()[0] == "R":
                pass

    with in_thread(run):
        yield


@contextmanager
def in_thread(run: Callable[[threading.Event], None]) -> Iterator[None]:
    """Call `run` in a thread, with an event that is set when it is to return."""
    over = threading.Event()
    thread = threading.Thread(target=run, args=[over])
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def pinned(cores: set[int]) -> Iterator[None]:
    """Run this thread on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def one_by_one(test: TestBed, requests: int) -> list[float]:
    """Return the sorted latencies of ADDs of a blocking client of this process."""
    with test.connect() as client:
        for step in hello():
            client.call(step.request, step.reply)
        add = encode_request("add", b"/one", 1)
        times = []
        for _ in range(requests):
            began = time.perf_counter()
            client.call(add, 8)
            times.append(time.perf_counter() - began)
    return sorted(times)


def fairness(host: Host, rounds: int, ranks: int = 1000) -> None:
    """Each rank sends a CHECK per second; without and with the two others, which have a relay each."""
    print(f"\n# Two relays of {ranks // 2} ranks, a CHECK per second each: {rounds} interleaved repetitions\n")
    print("| | p99 without the two others | with them | × |\n|---|---|---|---|")
    check = OpenLoop(make_step(encode_request("check", [b"/abort"]), 1, b"\1"), SECONDS, 1.0, SECONDS + LIMIT)
    for way in (Way("direct", "uvloop"), Way("two relays", "uvloop", 0, ranks // 2)):
        without, beside = [], []
        for _ in range(rounds):
            with bed(host, way, ranks) as test:
                test.prepare(hello())
                without.append((test.load.run(check).quantile(0.99) or 0.0) * 1000)
                with reading_nothing(test), sending_without_end(test):
                    beside.append((test.load.run(check).quantile(0.99) or 0.0) * 1000)
        times = spread([one / other for one, other in zip(beside, without, strict=True)])
        print(f"| {way.name} | {spread(without)} ms | {spread(beside)} ms | {times} |", flush=True)


@contextmanager
def reading_nothing(test: TestBed) -> Iterator[None]:
    with test.connect() as rank:
        for step in hello():
            rank.call(step.request, step.reply)
        rank.call(encode_request("set", b"/large", pack(bytes(1 << 20))), 0)
        rank.call(encode_request("get", b"/large") * LARGE_VALUES, 0)
        yield


@contextmanager
def sending_without_end(test: TestBed) -> Iterator[None]:
    """Send SETs as fast as they are taken, behind the last relay, on the cores of the load."""
    port = test.server.relays[-1].port if test.server.relays else test.server.port
    flood = encode_request("set", b"/flood", pack(b"x")) * 100

    with Connection(port, LIMIT) as rank:

        def send(over: threading.Event) -> None:
            with pinned(load_cores()):
                while not over.is_set():
                    rank.call(flood, 0)

        for step in hello():
            rank.call(step.request, step.reply)
        with in_thread(send):
            yield


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = processes.parser(__doc__, PARTS)
    most = f"ranks in `many`; `ratios` and `bursts` have at most {ONE_LINK:,} (%(default)s)"
    parser.add_argument("--ranks", type=int, default=98_304, help=most)
    few = "rounds of `many`; the other parts have at least five (%(default)s)"
    parser.add_argument("--rounds", type=int, default=2, help=few)
    given = parser.parse_args(arguments)
    rounds = max(5, given.rounds)
    print(f"{build()} build")
    with hosting("libuv") as host:
        run = {
            "many": lambda: many(host, given.ranks, given.rounds),
            "ratios": lambda: ratios(host, min(given.ranks, ONE_LINK), rounds),
            "bursts": lambda: bursts(host, min(given.ranks, ONE_LINK), rounds),
            "processes": lambda: relay_processes(host, 1024, rounds),
            "latency": lambda: latency(host, rounds),
            "fairness": lambda: fairness(host, rounds),
        }
        for part in given.parts:
            run[part]()


if __name__ == "__main__":
    main()
