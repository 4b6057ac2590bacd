"""The link breaks and is resumed, and ranks do not notice; or it is given up, and they are closed."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from conformance.frames import lease, lease_later, ping, popped, push, set_, wait
from faults.fault_helpers import until
from relay.link_proxy import link_proxy
from relay.servers import server_with
from support import RawPeer, Server, free_port, keys, tcpstore_relay, tcpstore_server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tcpstore_server() as server:
        yield server


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_are_closed_when_the_server_ends_and_starts_anew(number: signal.Signals) -> None:
    port = free_port()
    with tcpstore_server("--port", str(port)) as server, tcpstore_relay(port) as relay, RawPeer(relay.port) as rank:
        rank.ping()
        server.stop(number)
        if number == signal.SIGINT:  # it has said so
            assert rank.closed()
        with tcpstore_server("--port", str(port)):
            assert rank.closed()
            with RawPeer(relay.port) as another:
                another.ping()


def test_a_relay_that_comes_back_ends_the_sessions_of_the_one_that_was_killed() -> None:
    """An item that was leased by a rank of it goes back to its queue."""
    place = free_port()
    with server_with() as port, RawPeer(port) as direct:
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
