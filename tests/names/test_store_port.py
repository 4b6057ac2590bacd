"""Whether a client reaches the port that a server has for its store, and what it takes for that."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import pytest

from faults.fault_helpers import until
from support import LIMIT, Server, tcpstore_server, torch_server
from tcpstore_async import DistNetworkError, TCPStore
from tcpstore_async.client import store_port
from tcpstore_async.client.server_url import ServerUrl
from tcpstore_async.client.store_name import StoreName
from tcpstore_async.client.store_port import direct_address


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tcpstore_server() as server:
        yield server


@pytest.fixture
def owner(server: Server, request: pytest.FixtureRequest) -> Iterator[TCPStore]:
    with TCPStore(request.node.name, 1, None, True, LIMIT, server=f"tcp://127.0.0.1:{server.port}") as store:
        yield store


def entered(store: TCPStore, port: int | None = None, incarnation: str = "") -> StoreName:
    """Return the name of a store as a client knows it that has been told this."""
    known = store._connection().name
    assert known is not None
    name = StoreName(known.name)
    name.port = known.port if port is None else port
    name.incarnation = incarnation or known.incarnation
    return name


def test_the_port_of_the_store(server: Server, owner: TCPStore) -> None:
    url = ServerUrl("localhost", server.port, False)
    name = entered(owner)
    assert direct_address(url, name, LIMIT) == ("localhost", name.port)


def test_what_is_not_the_store(server: Server, owner: TCPStore, caplog: pytest.LogCaptureFixture) -> None:
    """Another server, another store, or another life of the same name: each is logged, with what to do."""
    caplog.set_level(logging.INFO, "tcpstore_async.client")
    url = ServerUrl("127.0.0.1", server.port, False)
    port = entered(owner).port
    assert direct_address(url, entered(owner, server.port), LIMIT) is None
    assert direct_address(url, entered(owner, incarnation="another"), LIMIT) is None
    pytest.importorskip("torch")
    with torch_server() as stock:
        assert direct_address(url, entered(owner, stock), LIMIT) is None
    reasons = [record.getMessage().partition("of no use to other hosts: ")[2] for record in caplog.records]
    assert [reason.partition(". ")[0] for reason in reasons] == [
        f"127.0.0.1:{there} is not that of the store" for there in (server.port, port, stock)
    ]
    assert all("--store-ports" in reason for reason in reasons)


def test_where_nobody_answers(server: Server, owner: TCPStore, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tcpstore_async.client")
    url = ServerUrl("127.0.0.1", server.port, False)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert direct_address(url, entered(owner, closed.getsockname()[1]), LIMIT) is None
    assert "Connection refused" in caplog.text
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert direct_address(url, entered(owner, silent.getsockname()[1]), 0.2) is None
    assert direct_address(url, entered(owner), LIMIT) is not None
    assert direct_address(ServerUrl("127.0.0.1", server.port, True), entered(owner), LIMIT) is None
    assert "asks for TLS" in caplog.text


def test_a_filtered_host_is_not_tried_again_soon(owner: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def open_blocking(host: str, *_: object, **__: object) -> socket.socket:
        tried.append(host)
        raise DistNetworkError("no answer")

    monkeypatch.setattr(store_port, "open_blocking", open_blocking)
    monkeypatch.setattr(store_port, "_silent", {})
    for host in ("a", "a", "b"):
        assert direct_address(ServerUrl(host, 1, False), entered(owner), LIMIT) is None
    assert tried == ["a", "b"]


def test_the_error_says_what_a_loopback_address_is() -> None:
    """It may come from another host: this one has nobody there."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(
            DistNetworkError, match=r"if another host has published 127\.0\.0\.1, it is of use there only"
        ):
            TCPStore("127.0.0.1", closed.getsockname()[1], timeout=0.3, server="")


def test_the_port_is_that_of_the_store_only_while_that_lives(server: Server, owner: TCPStore) -> None:
    url = ServerUrl("127.0.0.1", server.port, False)
    name = entered(owner)
    owner.close()
    until(lambda: direct_address(url, name, LIMIT) is None, "the port is closed")
