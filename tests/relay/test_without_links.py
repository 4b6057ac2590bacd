"""A relay in front of servers without links: each rank gets a connection of its own.

PyTorch's servers have PING since 2.5, so round trips to them are GETNUMKEYS.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from conformance import frames
from conformance.frames import ping, set_, wait
from faults.fault_helpers import get, num_keys, until
from support import RawPeer, Server, free_port, tcpstore_relay, tcpstore_server, torch_server

pytestmark = pytest.mark.interpreted


@pytest.fixture(scope="module", params=["libuv", "legacy", "threaded"])
def server(request: pytest.FixtureRequest) -> Iterator[int]:
    if request.param == "threaded":
        with tcpstore_server("--backend", "threaded") as ours:
            yield ours.port
    else:
        with torch_server(request.param) as port:
            yield port


@pytest.fixture(scope="module")
def relay(server: int) -> Iterator[Server]:
    with tcpstore_relay(server) as relay:
        yield relay


# quirk: legacy-server
def test_ranks_are_served_and_the_log_says_how(relay: Server) -> None:
    with RawPeer(relay.port) as one, RawPeer(relay.port) as other:
        one.send(wait(b"/key"))
        value = b"v" * 5_000_000
        other.send(set_(b"/key", value))
        num_keys(other)
        assert one.read(1) == b"\x00"
        assert get(one, b"/key") == value
    until(
        lambda: relay.log().count("does not support links: each rank gets a connection of its own") == 1, "it says so"
    )


def test_a_rank_that_ends_its_side_still_gets_its_replies(relay: Server) -> None:
    """As far as the server is so kind."""
    with RawPeer(relay.port) as rank:
        num_keys(rank)
        rank.socket.shutdown(socket.SHUT_WR)
        assert rank.closed()


def test_a_rank_that_does_not_read_delays_nobody() -> None:
    """Not before PyTorch's legacy server, which waits for it."""
    port = free_port()
    with (
        tcpstore_relay(port) as relay,
        tcpstore_server("--port", str(port), "--backend", "threaded"),
        RawPeer(relay.port) as rank,
        RawPeer(relay.port) as other,
    ):
        other.send(set_(b"/mebibyte", b"z" * (1 << 20)))
        other.ping()
        rank.send(frames.get(b"/mebibyte") * 20)
        for number in range(50):
            other.ping(number + 1)
        for _ in range(20):
            assert rank.read(8 + (1 << 20))


def test_a_rank_that_sends_garbage_is_closed_alone(relay: Server) -> None:
    with RawPeer(relay.port) as other, RawPeer(relay.port) as rank:
        num_keys(rank)
        num_keys(other)
        rank.send(b"\xff")
        assert rank.closed()
        num_keys(other)
        with RawPeer(relay.port) as another:
            num_keys(another)


def _answers(port: int) -> bool:
    try:
        with RawPeer(port) as rank:
            rank.ping()
    except (EOFError, ConnectionError):
        return False
    return True


def test_the_relay_finds_out_that_the_server_has_been_replaced() -> None:
    port = free_port()
    with tcpstore_relay(port) as relay:
        old = ("--port", str(port), "--backend", "threaded")
        with tcpstore_server(*old) as server, RawPeer(relay.port) as rank:
            rank.ping()
            until(lambda: "does not support links" in relay.log(), "the relay says that there are no links")
            server.process.kill()
            server.process.wait()
            assert rank.closed()
        with tcpstore_server("--port", str(port)), RawPeer(relay.port) as rank:
            rank.send(ping(b"ping"))
            assert rank.read(4) == b"ping"
            until(lambda: "linked to" in relay.log(), "the relay has a link")
        with tcpstore_server(*old):
            until(lambda: _answers(relay.port), "the relay has given up the link, and those ranks with it")
            until(lambda: relay.log().count("does not support links") >= 2, "the relay says so again")


def test_ranks_that_give_up_before_there_is_a_server_leave_nothing_behind() -> None:
    port = free_port()
    with tcpstore_relay(port, "--grace", "1000") as relay:
        for _ in range(20):
            RawPeer(relay.port).close()
        until(lambda: "cannot connect" in relay.log(), "the relay has tried")
        relay.process.terminate()
        assert relay.process.wait(60) == 0
