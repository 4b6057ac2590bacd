"""`tcpstore relay` in front of both of our servers: everything passes, whoever leaves, stops or does not read."""

from __future__ import annotations

import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import persisted
from conformance.frames import add, lease_later, popped, push
from faults.fault_helpers import Watch, get, gone, until
from faults.fault_helpers import number as number_of
from support import RawPeer, Server, blob, free_port, refused, tcpstore_relay, tcpstore_server, u64


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tcpstore_server() as server:
        yield server


@pytest.fixture(scope="module")
def relay(server: Server) -> Iterator[Server]:
    with tcpstore_relay(server.port) as relay:
        yield relay


@pytest.mark.needs_proc
def test_many_ranks_share_one_connection(server: Server, relay: Server) -> None:
    with RawPeer(relay.port) as first:
        first.ping()
        watch = Watch(server.process.pid)
        before = watch.files()
        ranks = [RawPeer(relay.port) for _ in range(50)]
        for number, rank in enumerate(ranks):
            rank.ping(number + 1)
        assert watch.files() == before
        for rank in ranks:
            rank.send(b"\x04" + blob(b"/many") + u64(1))
        assert sorted(struct.unpack("<q", rank.read(8))[0] for rank in ranks) == list(range(1, 51))
        for rank in ranks:
            rank.close()
        first.ping()


def test_values_of_any_size_pass(relay: Server) -> None:
    value = os.urandom(1 << 20) * 7
    with RawPeer(relay.port) as writer, RawPeer(relay.port) as reader:
        writer.send(b"\x01" + blob(b"/large") + blob(value))
        writer.ping()
        assert get(reader, b"/large") == value


@pytest.mark.parametrize("end", [RawPeer.close, RawPeer.reset])
def test_the_end_of_a_rank_ends_its_session(relay: Server, end: Callable[[RawPeer], None]) -> None:
    """It waited for a queue first, and the item goes to the one that is left."""
    rank = RawPeer(relay.port)
    with RawPeer(relay.port) as survivor, RawPeer(relay.port) as other:
        for waiting in (rank, survivor):
            waiting.ping()
            waiting.send(lease_later(b"/items", 0))
            other.ping()
        end(rank)
        other.ping()
        other.send(push(b"/items", b"item"))
        assert survivor.read(8 + 8 + 4) == popped(1, b"item")


def test_a_rank_that_ends_its_side_still_gets_its_replies(relay: Server) -> None:
    with RawPeer(relay.port) as rank:
        rank.send(b"\x01" + blob(b"/half") + blob(b"y" * 300_000) + b"\x03" + blob(b"/half") + b"\x0d" + b"\x07\0\0\0")
        rank.socket.shutdown(socket.SHUT_WR)
        assert rank.read(8) == u64(300_000)
        assert rank.read(300_000) == b"y" * 300_000
        assert rank.read(4) == b"\x07\0\0\0"
        assert rank.closed()


def test_a_rank_that_sends_garbage_is_closed_alone(relay: Server) -> None:
    with RawPeer(relay.port) as other, RawPeer(relay.port) as rank:
        rank.ping()
        rank.send(b"\xff" * 100_000)
        assert rank.closed()
        other.ping()


@pytest.mark.needs_proc
def test_a_rank_that_does_not_read_delays_nobody(relay: Server) -> None:
    with RawPeer(relay.port) as rank, RawPeer(relay.port) as other:
        other.send(b"\x01" + blob(b"/mebibyte") + blob(b"z" * (1 << 20)))
        other.ping()
        rank.send((b"\x03" + blob(b"/mebibyte")) * 100 + b"\x0d" + b"\x09\0\0\0")
        for number in range(200):
            other.ping(number + 1)
            assert number_of(other, add(b"/beside", 1)) == number + 1
        assert Watch(relay.process.pid).memory() < 120 << 20
        for _ in range(100):
            assert rank.read(8) == u64(1 << 20)
            assert rank.read(1 << 20) == b"z" * (1 << 20)
        assert rank.read(4) == b"\x09\0\0\0"


def test_a_rank_that_sends_without_end_delays_nobody(relay: Server) -> None:
    """Its requests are held back, as it does not read the replies."""
    with RawPeer(relay.port) as rank, RawPeer(relay.port) as other:
        rank.socket.setblocking(False)
        flood = (b"\x0d" + b"\x05\0\0\0") * 10_000
        sent = 0
        for number in range(300):
            try:
                while sent < 20_000_000:
                    sent += rank.socket.send(flood[sent % 5 :])
            except BlockingIOError:
                pass
            other.ping(number + 1)
        rank.socket.setblocking(True)


def test_sigterm_waits_for_the_ranks_and_sigint_does_not(server: Server) -> None:
    with tcpstore_relay(server.port) as relay, RawPeer(relay.port) as rank:
        rank.ping()
        relay.process.send_signal(signal.SIGTERM)
        until(lambda: refused(relay.port), "the relay has stopped accepting")
        rank.ping()
        rank.close()
        assert relay.process.wait(60) == 0
    with tcpstore_relay(server.port) as relay, RawPeer(relay.port) as rank:
        rank.ping()
        assert relay.stop() == 0
        assert rank.closed()


def test_a_relay_that_stops_ends_its_link() -> None:
    """So a server that is to stop does not wait for it."""
    with tcpstore_server("--grace", "1000") as server, tcpstore_relay(server.port) as relay:
        with RawPeer(relay.port) as rank:
            rank.ping()
            assert relay.stop() == 0
        assert server.stop(signal.SIGTERM) == 0


@pytest.mark.skipif(bool(persisted.SYNC), reason="with a journal, SIGTERM means that the server comes back")
def test_a_server_that_is_about_to_stop_waits_for_ranks_behind_a_relay() -> None:
    with tcpstore_server("--grace", "1000") as server, tcpstore_relay(server.port) as relay:
        with RawPeer(relay.port) as rank:
            rank.ping()
            server.process.send_signal(signal.SIGTERM)
            with suppress(ConnectionError, EOFError):
                while True:
                    with RawPeer(relay.port) as other:
                        other.ping()
            rank.ping()
        assert server.process.wait(60) == 0


def test_a_relay_may_start_before_its_server() -> None:
    port = free_port()
    with tcpstore_relay(port) as relay, RawPeer(relay.port) as rank:
        rank.send(b"\x0d" + b"\x08\0\0\0")
        until(lambda: "cannot connect" in relay.log(), "the relay has tried")
        with tcpstore_server("--port", str(port)):
            assert rank.read(4) == b"\x08\0\0\0"


@pytest.mark.needs_proc
def test_the_port_file(server: Server, tmp_path: Path) -> None:
    with tcpstore_relay(server.port, "--port-file", str(tmp_path / "port")) as relay:
        assert (tmp_path / "port").read_text() == f"{relay.port}\n"
        relay.stop()
    assert gone(relay.process.pid)


def test_a_relay_in_front_of_a_relay_says_what_is_wrong(server: Server) -> None:
    with tcpstore_relay(server.port) as relay, tcpstore_relay(relay.port) as another:
        until(lambda: "this is a connection to a relay; connect to its server instead" in another.log(), "it says so")


def test_ranks_beyond_the_limit_of_sessions_are_rejected() -> None:
    """The server says so: the relay does not know the limit."""
    with (
        tcpstore_server(
            "--limit",
            "sessions=1",
        ) as server,
        tcpstore_relay(server.port) as relay,
        RawPeer(relay.port) as first,
    ):
        first.ping()
        with RawPeer(relay.port) as second:
            assert second.closed()
            own = second.socket.getsockname()[1]
        until(lambda: f"rejected 127.0.0.1:{own}: session limit 1 reached" in server.log(), "it is logged")
        first.ping()


def test_ranks_beyond_the_limit_of_files_are_rejected(server: Server) -> None:
    """And others are served on; when one leaves, there is a place for another."""
    with tcpstore_relay(server.port, prefix=("prlimit", "--nofile=120:120")) as relay:
        ranks = []
        while True:
            rank = RawPeer(relay.port)
            ranks.append(rank)
            try:
                rank.ping()
            except (EOFError, ConnectionError):
                break
        assert 10 < len(ranks) < 120
        until(lambda: "rejected 127.0.0.1" in relay.log(), "the relay has logged it")
        for rank in ranks[:-1]:
            rank.ping()
        ranks[0].close()

        def admitted() -> bool:
            with RawPeer(relay.port) as another, suppress(EOFError, ConnectionError):
                another.ping()
                return True
            return False

        until(admitted, "there is a place for another")
        for rank in ranks:
            rank.close()
