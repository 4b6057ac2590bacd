"""What a store with a name costs a server, and one with a server process its owner.

    python -m bench.stores [--rounds 7] [PART …]

Parts: `memory`, CPU of the store and its sessions, without sockets: a store is created, two ranks join it, it ends;
and the same two ranks join the store without a name. `sockets`, CPU of `tcpstore serve` for the same by `TCPStore`s, as
programs make them; and how much more memory and how many more descriptors it has afterwards. `process`, how long
`is_master=True` waits for its server process before its first request: bind, listen, start the process, wait until it
is ready; run it on an idle machine. Must not know how a server holds its stores.
Invariant: what is compared alternates in one run; CPU is the server's alone.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from bench import processes
from bench.processes import cpu_seconds, memory, open_files, started
from bench.stats import spread

if __name__ == "__main__":
    processes.use_build()  # before the package is imported

from tcpstore_async import TCPStore
from tcpstore_async.base.limits import Limits
from tcpstore_async.client import requests
from tcpstore_async.observe.history import History
from tcpstore_async.server.master import host
from tcpstore_async.serving import build, tune_gc
from tcpstore_async.session.client import ClientSession
from tcpstore_async.session.identity import identity
from tcpstore_async.session.named_stores import NamedStores
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store

COUNTS = {"memory": 2000, "sockets": 250, "process": 60}
"""Stores in one measurement."""
ROUNDS = 7
LIMIT = 60.0
MANY = 1_000_000
"""A world size that the store without a name never reaches."""


class Pair(NamedTuple):
    """What the two ranks of a store send."""

    owner_enters: bytes
    rank_enters: bytes
    owner_joins: bytes
    rank_joins: bytes


def encoded(*asked: requests.Request) -> bytes:
    session = ClientSession()
    return b"".join(session.request(*one)[0] for one in asked)


HELLO = ClientSession().hello(1)[0]
END = encoded(requests.END_STORE)


class Served:
    """A store and its sessions, as `tcpstore serve` has them, observed by an admin socket or not."""

    def __init__(self, observed: bool) -> None:
        self.unnamed = Store(Limits())
        self.unnamed.identify(identity("0123456789abcdef", "uv"))
        self.named = NamedStores(self.unnamed, "0123456789abcdef")
        if observed:
            self.unnamed.observe(History(self.unnamed))
            self.named.on_created = lambda store: store.observe(History(store))
        self.questions = (encoded(requests.HAS_EXTENSION), encoded(requests.WHO_ARE_YOU))
        self.number = 0

    def connected(self, *asked: bytes) -> ServerSession:
        """Have a new connection send all this, one by one, as clients do."""
        session = ServerSession(self.unnamed, None, "10.0.0.7", 4711, 0.0)
        for one in asked:
            self.send(session, one)
        return session

    def send(self, session: ServerSession, data: bytes) -> None:
        session.receive(data)
        while session.stalled():
            session.receive(b"")
        session.out.clear()
        session.unsent = 0

    def pair(self) -> Pair:
        """The requests of another pair of ranks."""
        self.number += 1
        items = {"name": f"node7:{self.number}", "host": "node7", "pid": "4711"}
        owner = {**items, "owner": "0" * 32, "joins": "2"}
        joins = [encoded(requests.join(b"%015d%d" % (self.number, rank))) for rank in range(2)]
        return Pair(encoded(requests.enter(owner)), encoded(requests.enter(items)), *joins)

    def two_joins(self, pair: Pair) -> None:
        for joins in (pair.owner_joins, pair.rank_joins):
            self.connected(HELLO, *self.questions, joins).leave()

    def store(self, pair: Pair) -> None:
        hello = b"".join([HELLO, *self.questions])
        owner = self.connected(hello, pair.owner_enters, pair.owner_joins)
        rank = self.connected(hello, pair.rank_enters, pair.rank_joins)
        self.send(owner, END)
        owner.leave()
        rank.leave()
        while self.unnamed.keyspace.work or self.named.work():
            self.unnamed.keyspace.step()


def in_memory(rounds: int, count: int) -> None:
    tune_gc()
    for observed in (False, True):
        served = Served(observed)
        kinds = {"two joins": served.two_joins, "a store": served.store}
        found: dict[str, list[float]] = {name: [] for name in kinds}
        for number in range(rounds + 1):
            for name, kind in kinds.items():
                spent = time_of(kind, [served.pair() for _ in range(count)]) / count
                if number:  # the first one warms up
                    found[name].append(spent)
        report(f"in memory, {'' if observed else 'not '}observed", found)


def time_of(do: Callable[[Pair], object], pairs: list[Pair]) -> float:
    """CPU seconds of this process for all of them."""
    gc.collect()
    began = time.process_time()
    for pair in pairs:
        do(pair)
    return time.process_time() - began


def over_sockets(rounds: int, count: int) -> None:
    with started("serve") as (port, pid), ThreadPoolExecutor(1) as other:
        number = 0

        def pair(named: bool) -> None:
            nonlocal number
            number += 1
            address = ("node7", number) if named else ("127.0.0.1", port)
            server = f"tcp://127.0.0.1:{port}" if named else ""
            size = 2 if named else MANY
            rank = other.submit(TCPStore, *address, size, False, LIMIT, server=server)
            with TCPStore(*address, size, named, LIMIT, server=server), rank.result():
                pass

        kinds = {"two joins": lambda: pair(False), "a store": lambda: pair(True)}
        for kind in kinds.values():
            measured(kind, pid, count)  # warm up
        found: dict[str, list[float]] = {name: [] for name in kinds}
        files, grown = open_files(pid), 0
        for _ in range(rounds):
            for name, kind in kinds.items():
                began = memory(pid)
                found[name].append(measured(kind, pid, count))
                if name == "a store":  # of those that join the store without a name, it keeps the tokens
                    grown += memory(pid) - began
        report("over sockets", found)
        print(f"  after {rounds * count} stores: {grown // 1024:+} KiB, {open_files(pid) - files:+} descriptors")


def measured(do: Callable[[], object], pid: int, count: int) -> float:
    """CPU seconds of a process for one."""
    began = cpu_seconds(pid)
    for _ in range(count):
        do()
    return (cpu_seconds(pid) - began) / count


def report(title: str, found: dict[str, list[float]]) -> None:
    print(f"{title} ({build()}), CPU of the server in µs: median (least–most)")
    for name, seconds in found.items():
        print(f"  {name:10} {spread([one * 1e6 for one in seconds])}")
    joins, stores = found.values()
    print(f"  ratio      {spread([store / join for store, join in zip(stores, joins, strict=True)])}")


def server_process(rounds: int, count: int) -> None:
    starts, stops = [], []
    began = time.perf_counter()
    host(0).release()
    first = time.perf_counter() - began
    for _ in range(count):
        began = time.perf_counter()
        hosted = host(0)
        ready = time.perf_counter()
        hosted.release()
        starts.append(ready - began)
        stops.append(time.perf_counter() - ready)
    print(f"{build()} build, {count} starts, server in a {os.environ.get('TCPSTORE_SERVER') or 'process'}")
    print(f"machine: {os.cpu_count()} CPUs, {platform.platform()}, Python {platform.python_version()}")
    print(f"first start and stop: {first * 1000:.1f} ms")
    for what, seconds in (("start to ready", starts), ("stop to port free", stops)):
        cuts = statistics.quantiles(seconds, n=100, method="inclusive")
        print(f"{what:>18}: " + ", ".join(f"p{cut} {cuts[cut - 1] * 1000:.1f} ms" for cut in (50, 95, 99)))


PARTS: dict[str, Callable[[int, int], None]] = {
    "memory": in_memory,
    "sockets": over_sockets,
    "process": server_process,
}


def main() -> None:
    parser = processes.parser(__doc__, PARTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--count", type=int, help="stores in one measurement")
    asked = parser.parse_args()
    for part in asked.parts:
        PARTS[part](asked.rounds, asked.count or COUNTS[part])


if __name__ == "__main__":
    main()
