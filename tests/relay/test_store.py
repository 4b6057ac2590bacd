"""A relay that puts its ranks into a store with a name, which they need not know of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from click.testing import CliRunner

from conformance.frames import wait
from support import (
    HANDSHAKE,
    LIMIT,
    RawPeer,
    Server,
    blob,
    resting,
    tcpstore_relay,
    tcpstore_server,
    torch_server,
    until,
)
from tcpstore_async import TCPStore
from tcpstore_async.cli import main

NAME = "node7:4711"


@pytest.fixture
def server() -> Iterator[Server]:
    with tcpstore_server() as server:
        yield server


@contextmanager
def owning(server: Server) -> Iterator[TCPStore]:
    with TCPStore("node7", 4711, None, True, LIMIT, server=f"tcp://127.0.0.1:{server.port}") as store:
        yield store


def test_ranks_are_in_the_store(server: Server) -> None:
    """Of our client and of one that sends its first request byte by byte, or together with others."""
    with owning(server) as owner, tcpstore_relay(server.port, "--store", NAME) as relay:
        owner.set("k", "v")
        with TCPStore("127.0.0.1", relay.port, timeout=LIMIT) as rank:
            assert rank.get("k") == b"v"
            rank.set("mine", "1")
            assert owner.get("mine") == b"1"
        with RawPeer(relay.port, validate=False) as slow:
            for byte in HANDSHAKE:
                slow.send(bytes([byte]))
                resting(relay.process.pid)
            assert slow.ask(b"\x03" + blob(b"/k"), 9) == blob(b"v")
        with RawPeer(relay.port, validate=False) as fast:
            assert fast.ask(HANDSHAKE + b"\x03" + blob(b"/k"), 9) == blob(b"v")
        with TCPStore("127.0.0.1", server.port, timeout=LIMIT) as nameless:
            assert not nameless.check(["k"])
            assert not nameless.check(["mine"])


def test_without_such_a_store_ranks_are_closed_and_change_nothing(server: Server) -> None:
    with tcpstore_relay(server.port, "--store", NAME) as relay:
        with RawPeer(relay.port) as rank:
            rank.send(b"\x01" + blob(b"/k") + blob(b"v"))
            assert rank.closed()
        until(lambda: f"there is no store '{NAME}'" in relay.log())
        with TCPStore("127.0.0.1", server.port, timeout=LIMIT) as nameless:
            assert nameless.num_keys() == 0
        with owning(server), RawPeer(relay.port) as rank:
            rank.ping()


def test_who_does_not_begin_with_validate_is_closed(server: Server) -> None:
    with owning(server), tcpstore_relay(server.port, "--store", NAME) as relay:
        for wrong in (b"GET / HTTP/1.1\r\n", HANDSHAKE[:4] + b"\0", b"\x16"):
            with RawPeer(relay.port, validate=False) as peer:
                peer.send(wrong)
                assert peer.closed()
        with RawPeer(relay.port, validate=False) as gone:
            gone.send(HANDSHAKE[:2])
        with RawPeer(relay.port) as rank:
            rank.ping()


def test_ranks_are_closed_when_the_store_ends(server: Server) -> None:
    with ExitStack() as stack:
        relay = stack.enter_context(tcpstore_relay(server.port, "--store", NAME))
        with owning(server) as owner:
            rank = stack.enter_context(RawPeer(relay.port))
            rank.ping()
            rank.send(wait(b"/never"))
            owner.set("k", "v")
        assert rank.closed()


def test_a_server_without_named_stores_gets_no_rank() -> None:
    with (
        torch_server() as port,
        tcpstore_relay(port, "--store", NAME) as relay,
        RawPeer(relay.port),
    ):
        until(lambda: "it does not support named stores" in relay.log())


def test_a_name_that_no_server_takes_is_an_error() -> None:
    words = ["relay", "--upstream", "tcp://127.0.0.1:1", "--port", "0", "--store", "x" * 600]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert "Invalid value for '--store': 'xxxx" in result.stderr
