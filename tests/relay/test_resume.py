"""The link breaks and is resumed, and ranks do not notice; or it is given up, and they are closed."""

from __future__ import annotations

import random
import signal
import struct
import threading
from collections.abc import Iterator

import pytest

from conformance.frames import get, lease, lease_later, ping, pop, popped, push, set_, wait
from faults.fault_helpers import until
from relay.link_proxy import link_proxy
from relay.servers import server_with
from support import RawPeer, Server, blob, free_port, keys, tcpstore_relay, tcpstore_server, u64
from tcpstore_async.server.backends import BACKENDS


@pytest.fixture(scope="module", params=BACKENDS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with tcpstore_server("--backend", request.param) as server:
        yield server


class Adder(threading.Thread):
    """A rank that adds, reads large values and waits for others; it notes what it got."""

    def __init__(self, port: int, seed: int, operations: int, large: int) -> None:
        super().__init__()
        self.peer = RawPeer(port)
        self.random = random.Random(seed)
        self.operations = operations
        self.large = large
        """Bytes of a long value."""
        self.key = b"/own%d" % seed
        self.sums: list[int] = []
        self.pushed: list[bytes] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with self.peer:
                for number in range(self.operations):
                    self._operate(number)
                self.peer.ping()
        except BaseException as error:
            self.error = error

    def _operate(self, number: int) -> None:
        peer = self.peer
        choice = self.random.random()
        if choice < 0.6:
            answer = peer.ask(b"\x04" + blob(b"/sum") + u64(1), 8)
            self.sums.append(struct.unpack("<q", answer)[0])
        elif choice < 0.8:
            item = self.key + b"-%d" % number
            peer.send(push(b"/queue", item))
            self.pushed.append(item)
        elif choice < 0.9:
            value = self.random.randbytes(self.random.choice((10, self.large)))
            peer.send(set_(self.key, value) + get(self.key))
            assert peer.read(8) == u64(len(value))
            assert peer.read(len(value)) == value
        else:
            peer.ping(number + 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_or_doubled_when_the_link_is_cut(server: Server, seed: int) -> None:
    most = (2000, 5000, 100_000, 1_000_000)[seed]  # a batch, of up to 64 KiB, has to get through
    large = (20, 50, 5000, 200_000)[seed]
    with RawPeer(server.port) as direct, link_proxy(server.port, seed, most) as proxy:
        for key in (b"/sum", b"/queue"):
            direct.ask(b"\x08" + blob(key), 8)
        with tcpstore_relay(proxy.port) as relay:
            adders = [Adder(relay.port, number, 100, large) for number in range(8)]
            for adder in adders:
                adder.start()
            until(lambda: proxy.cuts >= 10 or not any(adder.is_alive() for adder in adders), "the link has been cut")
            proxy.most = 0
            for adder in adders:
                adder.join()
            assert [adder.error for adder in adders] == [None] * 8, relay.log() + server.log()
        assert proxy.cuts > 0
        sums = [number for adder in adders for number in adder.sums]
        assert sorted(sums) == list(range(1, len(sums) + 1))
        for adder in adders:
            assert adder.sums == sorted(adder.sums)
        items = []
        while length := struct.unpack("<q", direct.ask(pop(b"/queue"), 8))[0]:
            assert length > 0
            items.append(direct.read(struct.unpack("<Q", direct.read(8))[0]))
        assert sorted(items) == sorted(item for adder in adders for item in adder.pushed)
        for adder in adders:
            assert [item for item in items if item.startswith(adder.key + b"-")] == adder.pushed


def test_a_wait_goes_on_after_the_link_broke(server: Server) -> None:
    with (
        link_proxy(server.port) as proxy,
        tcpstore_relay(proxy.port) as relay,
        RawPeer(relay.port) as rank,
        RawPeer(relay.port) as queued,
        RawPeer(server.port) as direct,
    ):
        rank.ping()
        rank.send(wait(b"/later"))
        queued.ping()
        queued.send(lease_later(b"/later items", 0))
        with RawPeer(relay.port) as other:
            other.ping()
        proxy.open.clear()
        proxy.cut()
        until(lambda: "lost the link" in relay.log(), "the relay has noticed")
        direct.send(set_(b"/later", b"there") + push(b"/later items", b"item"))
        direct.ping()
        rank.send(ping(b"ping"))
        proxy.open.set()
        assert rank.read(5) == b"\x00ping"
        assert queued.read(8 + 8 + 4) == popped(1, b"item")


def test_ranks_are_closed_when_the_server_starts_anew() -> None:
    port = free_port()
    with tcpstore_server("--port", str(port)) as server, tcpstore_relay(port) as relay, RawPeer(relay.port) as rank:
        rank.ping()
        server.process.kill()
        server.process.wait()
        with tcpstore_server("--port", str(port)):
            assert rank.closed()
            with RawPeer(relay.port) as another:
                another.ping()


def test_ranks_are_closed_when_the_server_stops() -> None:
    port = free_port()
    with tcpstore_server("--port", str(port)) as server, tcpstore_relay(port) as relay, RawPeer(relay.port) as rank:
        rank.ping()
        server.stop(signal.SIGINT)
        assert rank.closed()
        with RawPeer(relay.port) as another, tcpstore_server("--port", str(port)):
            another.ping()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_relay_that_comes_back_ends_the_sessions_of_the_one_that_was_killed(backend: str) -> None:
    """An item that was leased by a rank of it goes back to its queue."""
    place = free_port()
    with server_with(backend) as port, RawPeer(port) as direct:
        direct.send(push(b"/leased", b"item"))
        with tcpstore_relay(port, port=place) as relay, RawPeer(place) as rank:
            rank.send(lease(b"/leased", 1))
            assert rank.read(8 + 8 + 4) == popped(1, b"item")
            direct.send(lease_later(b"/leased", 1))
            relay.process.kill()
            relay.process.wait()
            assert rank.closed()
        with tcpstore_relay(port, port=place):
            assert direct.read(8 + 8 + 4) == popped(1, b"item")


def test_ranks_are_closed_when_the_link_cannot_be_resumed_in_time() -> None:
    with server_with(grace=0.5) as port, link_proxy(port) as proxy, tcpstore_relay(proxy.port) as relay:
        with RawPeer(relay.port) as rank:
            rank.ping()
            proxy.open.clear()
            proxy.cut()
            assert rank.closed()
        proxy.open.set()
        with RawPeer(relay.port) as another:
            another.ping()


def test_a_connection_on_which_nothing_arrives_is_replaced() -> None:
    with (
        server_with(keep_alive=0.2) as port,
        link_proxy(port) as proxy,
        tcpstore_relay(proxy.port) as relay,
        RawPeer(relay.port) as rank,
    ):
        rank.ping()
        proxy.frozen.set()
        rank.send(ping(b"ping"))
        until(lambda: "nothing received" in relay.log(), "the relay has noticed")
        proxy.frozen.clear()
        assert rank.read(4) == b"ping"


def test_of_several_servers_the_next_takes_over_when_the_link_is_given_up() -> None:
    with (
        server_with(grace=0.5) as first,
        server_with() as second,
        link_proxy(first) as proxy,
        tcpstore_relay(f"tcp://127.0.0.1:{proxy.port},tcp://127.0.0.1:{second}") as relay,
    ):
        with RawPeer(relay.port) as rank:
            rank.send(set_(b"/first", b"") + ping(b"ping"))
            assert rank.read(4) == b"ping"
            proxy.cut()
            rank.ping()
            proxy.open.clear()
            proxy.cut()
            assert rank.closed()
        with RawPeer(relay.port) as another:
            assert another.ask(b"\x05" + keys(b"/first"), 1) == b"\x01"
