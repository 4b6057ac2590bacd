"""Measure the rendezvous of torchrun's agents: time, and requests and bytes of one agent, ours and PyTorch's handler.

    python -m bench.rendezvous [--agents 16 256 4096 12288] [--handlers 256] [--runs 3]

Prints three tables. The first is the time until the last of so many agents has its rank. Each has a connection over
loopback to one server, and sends the bytes of a handler: all connect at once, and when they have, all join at once.

In the second, real handlers in threads of this process meet through a relay that counts what they send and receive:
until they have their ranks and know where their workers meet, and then per second while they run, asked for waiting
nodes as torchrun's agents ask. Sizes above `--handlers` are computed: for ours from the requests of the first table,
which are those of a handler; for PyTorch's, the least that a handler can send, without collisions.

The third is PyTorch's assignment of workers' ranks, which follows and is the same for both handlers.

The compiled build is measured if it is up to date; otherwise, and with BENCH_BUILD=interpreted, the checkout.
"""

from __future__ import annotations

import base64
import logging
import pickle
import selectors
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any, NamedTuple

from bench import processes

if __name__ == "__main__":
    processes.use_build()  # before the package is imported

from bench.scale.servers import hosting
from bench.stats import spread
from tcpstore_async import TCPStore
from tcpstore_async.client.client_info import introduction
from tcpstore_async.server.listen_socket import raise_file_limit
from tcpstore_async.serving import build
from tcpstore_async.stores.agent import Options
from tcpstore_async.tools.load.generator import Generator, Step
from tcpstore_async.tools.load.observer import RequestDecoder
from tcpstore_async.tools.load.scripts import RANK, encode_request, hello, make_step
from tcpstore_async.wire.commands import SERVER_KEY
from tcpstore_async.wire.values import pack

SIZES = (16, 256, 4096, 12288)
MEASURED_SECONDS = 10.0
"""For which running handlers are observed."""
POLL_SECONDS = 0.1
"""Between two questions of an agent for waiting nodes: torchrun's monitor interval."""
LIMIT = 300.0


class Traffic(NamedTuple):
    """What one agent sends and receives."""

    requests: float
    sent: float
    """Bytes."""
    received: float
    """Bytes."""

    def per(self, agents: float) -> Traffic:
        return Traffic(self.requests / agents, self.sent / agents, self.received / agents)

    def minus(self, other: Traffic) -> Traffic:
        return Traffic(self.requests - other.requests, self.sent - other.sent, self.received - other.received)


class Relay:
    """Passes connections on to a server, and counts requests and bytes."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._decoders: dict[socket.socket, RequestDecoder] = {}
        """By a client's connection."""
        self._other: dict[socket.socket, socket.socket] = {}
        self._stopped = False
        self.traffic = Traffic(0, 0, 0)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._stopped = True
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped:
            for key, _ in self._selector.select(0.1):
                sock: Any = key.fileobj
                if sock is self._listener:
                    self._accept()
                elif sock in self._other:
                    self._pass_on(sock)
        for sock in [self._listener, *self._other]:
            sock.close()
        self._selector.close()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(("127.0.0.1", self._target))
        self._decoders[client] = RequestDecoder()
        for one, other in ((client, server), (server, client)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._other[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _pass_on(self, sock: socket.socket) -> None:
        other = self._other[sock]
        try:
            data = sock.recv(1 << 20)
            other.sendall(data)
        except OSError:
            data = b""
        if not data:
            for one in (sock, other):
                self._selector.unregister(one)
                del self._other[one]
                self._decoders.pop(one, None)
                one.close()
            return
        requests, sent, received = self.traffic
        decoder = self._decoders.get(sock)
        if decoder is not None:
            self.traffic = Traffic(requests + sum(1 for _ in decoder.receive(data)), sent + len(data), received)
        else:
            self.traffic = Traffic(requests, sent, received + len(data))


# Real handlers


def our_handler(port: int, agents: int, number: int) -> Any:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from tcpstore_async.torch.rendezvous_handler import create_handler

    conf: dict[str, Any] = {"is_host": "0"}
    return create_handler(
        RendezvousParameters("tcpstore", f"127.0.0.1:{port}", "job", agents, agents, _host(number), **conf)
    )


def pytorchs_handler(port: int, agents: int, number: int) -> Any:
    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LIMIT))
    timeout = RendezvousTimeout(join=timedelta(seconds=LIMIT))
    backend = C10dRendezvousBackend(store, "job")
    return DynamicRendezvousHandler.from_backend("job", store, backend, agents, agents, _host(number), timeout)


def _host(number: int) -> str:
    """Return an address of this host that no other agent has."""
    return f"127.1.{number // 250:03}.{number % 250:03}"


def measure_handlers(make: Callable[[int, int, int], Any], agents: int) -> tuple[Traffic, Traffic, float]:
    """Return the traffic of one agent until it runs and, per second, while it runs; and the seconds to meet."""
    with hosting("libuv") as host, host.running("uvloop") as server:
        relay = Relay(server.port)
        with ThreadPoolExecutor(agents) as pool:
            began = time.monotonic()

            def meet(number: int) -> Any:
                handler = make(relay.port, agents, number)
                found = handler.next_rendezvous()
                assert found.world_size == agents
                return handler

            handlers = list(pool.map(meet, range(agents)))
            took = time.monotonic() - began
            time.sleep(0.3)
            joined = relay.traffic
            began = time.monotonic()
            while time.monotonic() < began + MEASURED_SECONDS:
                list(pool.map(lambda handler: handler.num_nodes_waiting(), handlers))
                time.sleep(POLL_SECONDS)
            seconds = time.monotonic() - began
            running = relay.traffic.minus(joined)
            list(pool.map(lambda handler: handler.shutdown(), handlers))
        relay.close()
    return joined.per(agents), running.per(agents * seconds), took


# Computed


def pytorchs_state(agents: int) -> int:
    """Return the bytes of the state of PyTorch's handler as the store has it."""
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

    state = _RendezvousState()
    for number in range(agents):
        node = _NodeDesc(_host(number), 10_000 + number, 0)
        state.participants[node] = number
        state.last_heartbeats[node] = datetime.now(timezone.utc)
    return len(base64.b64encode(pickle.dumps(state)))


def pytorchs_least(agents: int) -> tuple[Traffic, Traffic]:
    """Return what PyTorch's handler must send at least: the state is half as long on average while agents join.

    To meet: GET, COMPARE_SET and GET of the state. Per second: a GET and, every five seconds, a COMPARE_SET.
    """
    whole = pytorchs_state(agents)
    half = whole / 2
    met = Traffic(3, 2 * half, 2 * half + whole)
    return met, Traffic(1.2, 2 * whole / 5, whole + whole / 5)


def replayed(agents: int) -> list[Step]:
    """Return the requests of one of our handlers until it has its rank."""
    key = b"/tcpstore.job.0"
    name = b"127.%s 0000010000 000000 0123456789abcdef" % RANK
    known = [(item.encode(), pack(text.encode())) for item, text in introduction().items()]
    return [
        *hello(),
        make_step(encode_request("check", [SERVER_KEY]), 1),
        Step(encode_request("get", SERVER_KEY), 0),
        make_step(encode_request("introduce", known), 0),
        make_step(encode_request("compare_set", b"/tcpstore.epoch.job", pack(b""), pack(b"0")), 9),
        make_step(encode_request("attend", key, pack(b""), 0, 0), 56),
        make_step(encode_request("meet", key, pack(name), agents, agents, -1), 32),
    ]


def our_traffic(agents: int, identity: int) -> tuple[Traffic, Traffic]:
    """Return what one of our handlers sends and receives; the same for any number of agents."""
    where = b"/tcpstore.job.0.0/tcpstore.round"
    place = len(b'["127.1.000.000", 29400, "0123456789abcdef"]')
    steps = [*replayed(agents), make_step(encode_request("fetch", where), 8 + place)]
    met = Traffic(
        1 + len(steps), sum(len(step.request) for step in steps), identity + sum(step.reply for step in steps)
    )
    name = b"127.1.000.000 0000010000 000000 0123456789abcdef"
    attend = len(encode_request("attend", b"/tcpstore.job.0", pack(name), 0, 0))
    rate = 1 + 1 / Options(1, 1).period()
    return met, Traffic(rate, rate * attend, rate * 56)


# Time


class Meeting(NamedTuple):
    """What it took until all agents had their ranks."""

    connected: float
    """Seconds until all agents were connected and knew the server and the epoch."""
    met: float
    """Seconds from then until the last had its rank."""
    cpu: float
    """The server's CPU seconds, for both."""


def measure_time(agents: int) -> Meeting:
    with hosting("libuv") as host, host.running("uvloop") as server, identity_size(server.port) as (size, store):
        steps = [step._replace(reply=size) if step.request[0] == 3 else step for step in replayed(agents)]
        generator = Generator("127.0.0.1", [server.port])
        generator.open(agents, 0)
        cpu = server.cpu()
        try:
            entered = generator.closed_loop(steps[:-1], LIMIT)
            met = generator.closed_loop(steps[-1:], LIMIT)
            spent = server.cpu() - cpu
            state = store._connection().call(_LOOK)
            if struct.unpack_from("<6q", state, 8)[:3] != (0, 1, agents):
                raise SystemExit("the agents have not met in one round")
        finally:
            generator.close()
        return Meeting(entered.ended - entered.began, met.ended - met.began, spent)


@contextmanager
def identity_size(port: int) -> Iterator[tuple[int, TCPStore]]:
    """Yield the bytes of the reply in which the server identifies itself, and a store."""
    from tcpstore_async.client import requests

    store = TCPStore("127.0.0.1", port)
    try:
        yield len(store._connection().call(requests.WHO_ARE_YOU)), store
    finally:
        store.close()


def _look() -> Any:
    from tcpstore_async.client import requests

    return requests.attend(b"/tcpstore.job.0", b"", 0)


_LOOK = _look()


# The assignment of ranks


def measure_assignment(agents: int, rank: int) -> tuple[Traffic, float]:
    """Return the traffic and seconds of PyTorch's assignment of workers' ranks, for one agent of a formed round."""
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, _RoleInstanceInfo

    from tcpstore_async.torch import PrefixStore
    from tcpstore_async.torch import TCPStore as Store

    with hosting("libuv") as host, host.running("uvloop") as server:
        relay = Relay(server.port)
        others, mine = Store("127.0.0.1", server.port), Store("127.0.0.1", relay.port)
        spec: Any = SimpleNamespace(role="default", local_world_size=8)
        infos = [_RoleInstanceInfo("default", number, 8).serialize() for number in range(agents)]
        prefix = "tcpstore.job.0.0"
        shared = PrefixStore(prefix, others)
        shared.multi_set([f"torchelastic/role_info/{number}" for number in range(agents)], infos)
        if rank:
            shared.set(f"torchelastic/assigned_ranks/{rank}", "[98296, 98304, 98296, 98304]")
        mine.set("ready", "")
        mine.get("ready")  # it has found out which server it is
        before = relay.traffic
        began = time.monotonic()
        assign: Any = SimpleElasticAgent._assign_worker_ranks
        assign(SimpleNamespace(), PrefixStore(prefix, mine), rank, agents, spec)
        took = time.monotonic() - began
        for store in (others, mine):
            store.close()
        relay.close()
        return relay.traffic.minus(before), took


# Tables


def show_traffic(sizes: Sequence[int], handlers: int) -> None:
    with hosting("libuv") as host, host.running("uvloop") as server, identity_size(server.port) as (size, _):
        identity = size
    print("| agents | handler | requests to meet | sent | received | requests per second | sent | received | |")
    print("|---:|---|---:|---:|---:|---:|---:|---:|---|")
    for agents in sizes:
        for name, make, compute in (
            ("ours", our_handler, lambda agents: our_traffic(agents, identity)),
            ("PyTorch's", pytorchs_handler, pytorchs_least),
        ):
            if agents <= handlers:
                met, running, took = measure_handlers(make, agents)
                note = f"measured, {took:.1f} s"
            else:
                met, running = compute(agents)
                note = "computed"
            print(f"| {agents:,} | {name} | {_cells(met)} | {_cells(running)} | {note} |", flush=True)


def _cells(traffic: Traffic) -> str:
    return f"{traffic.requests:.1f} | {traffic.sent:,.0f} B | {traffic.received:,.0f} B"


def show_times(sizes: Sequence[int], runs: int) -> None:
    print("| agents | all are connected | and have met | together | server CPU per agent |")
    print("|---:|---:|---:|---:|---:|")
    for agents in sizes:
        found = [measure_time(agents) for _ in range(runs)]
        columns = [spread([one.connected for one in found], " s"), spread([one.met for one in found], " s")]
        columns.append(spread([one.connected + one.met for one in found], " s"))
        cpu = statistics.median(one.cpu for one in found) / agents
        print(f"| {agents:,} | {' | '.join(columns)} | {cpu * 1e6:.0f} µs |", flush=True)


def show_assignments(sizes: Sequence[int]) -> None:
    print("| agents | agent | requests | sent | received | |")
    print("|---:|---|---:|---:|---:|---:|")
    for agents in sizes:
        for name, rank in (("the first", 0), ("any other", agents - 1)):
            traffic, took = measure_assignment(agents, rank)
            print(f"| {agents:,} | {name} | {_cells(traffic)} | {took * 1000:.0f} ms |", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--agents", type=int, nargs="+", default=SIZES)
    parser.add_argument("--handlers", type=int, default=256, help="size up to which real handlers are measured")
    parser.add_argument("--runs", type=int, default=3)
    chosen = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    raise_file_limit()
    print(f"{build()} build\n")
    show_times(chosen.agents, chosen.runs)
    print()
    show_traffic(chosen.agents, chosen.handlers)
    print()
    show_assignments(chosen.agents)


if __name__ == "__main__":
    main()
