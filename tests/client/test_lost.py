"""What the error of a lost connection says: the call, its keys, and since when the server was silent."""

from __future__ import annotations

import re
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from contract.store_kinds import AsyncStore, either_client
from support import HANDSHAKE, LIMIT, tcpstore_server, until
from tcpstore_async import Store, TCPStore
from tcpstore_async.base.errors import DistNetworkError
from tcpstore_async.client import requests
from tcpstore_async.client.last_byte import describe_silence, seconds_silent
from tcpstore_async.session.client import LOST

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO is Linux's")

BROKEN = rf"({re.escape(LOST)}|Connection reset by peer; Connection refused)"
SILENCE = r"last byte from the server \d+\.\d s ago"

CALLS: list[tuple[Callable[[Store], object], str]] = [
    (lambda store: store.get("a"), "get('a')"),
    (lambda store: store.wait(["a", "b"]), "wait('a', 'b')"),
    (lambda store: store.wait([f"rank{i}" for i in range(300)]), "wait('rank0', 'rank1', 'rank2' and 297 more)"),
    (lambda store: store.queue_pop("jobs"), "queue_pop('jobs')"),
    (lambda store: store.barrier("all", 2), "barrier('all')"),
]


def waiting(store: Store) -> int:
    """How many calls wait for their replies."""
    if isinstance(store, AsyncStore):
        return sum(connection.session.waiting is not None for connection in store.client._connections)
    client: Any = store._client  # type: ignore[attr-defined]
    return sum(connection.parked for connection in list(client._connections))


@pytest.mark.parametrize(("call", "shown"), CALLS)
@pytest.mark.parametrize("client", ["sync", "async"])
def test_a_store(client: str, call: Callable[[Store], object], shown: str) -> None:
    with tcpstore_server() as server, either_client(client) as connect, ThreadPoolExecutor(2) as threads:
        store = connect(server.port)
        store.set("x", "y")
        calls: list[Future[object]] = [threads.submit(call, store), threads.submit(store.get, "another")]
        until(lambda: waiting(store) == 2)
        server.stop(signal.SIGKILL)
        errors = [str(one.exception(LIMIT)) for one in calls]
        assert re.fullmatch(rf"{BROKEN} \(awaiting the reply to {re.escape(shown)}; {SILENCE}\)", errors[0])
        assert "get('another')" in errors[1]  # each error is that of its call
        with pytest.raises(DistNetworkError) as later:
            store.get("a")
        assert re.fullmatch(BROKEN, str(later.value))  # it has sent nothing


def test_an_idle_store() -> None:
    """Nobody awaits anything: the error of the next call says how long nothing had arrived."""
    with tcpstore_server() as server, TCPStore("127.0.0.1", server.port, timeout=LIMIT) as store:
        store.set("x", "y")
        assert store.get("x") == b"y"
        server.stop(signal.SIGKILL)
        with pytest.raises(DistNetworkError) as lost:
            while True:  # until the background loop, or this call, has noticed
                store.get("x")
        assert re.search(SILENCE, str(lost.value))


def test_how_a_request_is_shown() -> None:
    assert requests.describe(requests.set_("a\n\x1b", "v")) == r"set('a\n\x1b')"
    assert requests.describe(requests.multi_set(["a", "b"], ["1", "2"])) == "multi_set('a', 'b')"
    assert requests.describe(requests.count(1)) == "add('init/')"
    assert requests.describe(requests.NUM_KEYS) == "num_keys()"
    assert requests.describe(requests.NO_KEY) == "check()"
    assert requests.describe(requests.check([b"/" + b"k" * 500])) == f"check('{'k' * 100}…')"
    assert requests.describe(requests.lease(b"/jobs", True)) == "queue_pop('jobs')"
    assert requests.lost_during(requests.set_("a", "v"), "") == " (sending set('a'))"
    assert requests.lost_during(requests.wait([b"/a"]), "x") == " (awaiting the reply to wait('a'); x)"


def test_what_tells_no_silence() -> None:
    here, there = socket.socketpair()
    with here, there:
        assert seconds_silent(here) is None
    assert describe_silence(here) == ""  # it has been closed
    assert describe_silence(None) == ""


def test_the_silence_is_that_since_the_last_byte() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as peer:
        accepted, _ = server.accept()
        with accepted:
            accepted.sendall(HANDSHAKE)
            assert peer.recv(5) == HANDSHAKE
            seconds = seconds_silent(peer)
            assert seconds is not None
            assert 0 <= seconds < LIMIT
