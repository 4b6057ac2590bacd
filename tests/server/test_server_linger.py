"""A server that ends when its job has: `serve --linger`."""

from __future__ import annotations

import pytest

from support import LIMIT, RawPeer, Server, blob, tcpstore_relay, tcpstore_server
from tcpstore_async import TCPStore
from tcpstore_async.server.linger import Linger


def ended(server: Server) -> None:
    assert server.process.wait(LIMIT) == 0
    assert "exiting: the last client left 0 s ago" in server.log()


@pytest.mark.parametrize("backend", ["uv", "threaded"])
def test_it_ends_when_the_last_client_has_left(backend: str) -> None:
    with tcpstore_server("--linger", "0", "--backend", backend) as server:
        with TCPStore("127.0.0.1", server.port, timeout=LIMIT) as store:
            store.set("x", "y")
            assert store.get("x") == b"y"
        ended(server)


def test_without_a_number_it_waits_for_a_restart() -> None:
    with tcpstore_server("--linger") as server:
        with TCPStore("127.0.0.1", server.port, timeout=LIMIT) as store:
            store.set("x", "y")
        with TCPStore("127.0.0.1", server.port, timeout=LIMIT) as store:
            assert store.get("x") == b"y"
        assert server.stop() == 0


def test_probes_do_not_count() -> None:
    with tcpstore_server("--linger", "0") as server:
        for _ in range(3):
            with RawPeer(server.port) as probe:
                probe.ping()
        with RawPeer(server.port, validate=False):
            pass
        with RawPeer(server.port) as client:
            client.join(1)
        ended(server)


def test_a_relay_without_ranks_is_no_client() -> None:
    with tcpstore_server("--linger", "0") as server, tcpstore_relay(server.port) as relay:
        with RawPeer(relay.port) as rank:
            rank.ping()
            with RawPeer(server.port) as other:
                other.send(b"\x01" + blob(b"/x") + blob(b"y"))
                other.ping()
            rank.ping()  # it is still there, and so is the server
        ended(server)


def test_when_it_is_over() -> None:
    linger = Linger(60)
    assert not linger.is_over(0, 0, used=False)
    assert not linger.is_over(100, 0, used=False)  # nobody has come yet
    assert not linger.is_over(101, 2, used=True)
    assert not linger.is_over(200, 0, used=True)  # just left
    assert not linger.is_over(259, 0, used=True)
    assert not linger.is_over(259.5, 1, used=True)  # back
    assert not linger.is_over(300, 0, used=True)
    assert linger.is_over(360, 0, used=True)
    assert Linger(0).is_over(0, 0, used=True)
    assert [Linger(seconds).poll_seconds() for seconds in (0, 2, 60)] == [0.05, 0.5, 1.0]
