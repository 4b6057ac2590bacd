"""Ports at a server that stand for named stores: who connects there is in the store, and says no name."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from client.test_resumed import resetter
from commands import run_command
from conformance.frames import set_
from faults.fault_helpers import until
from support import LIMIT, RawPeer, Server, refused, secret_file, tcpstore_relay, tcpstore_server
from tcpstore_async import TCPStore, serve
from tcpstore_async.server.backends import BACKENDS
from tls.certificates import certificates


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(backend: str) -> Iterator[Server]:
    with tcpstore_server("--backend", backend) as server:
        yield server


def owner_on(server: Server, number: int = 1) -> TCPStore:
    return TCPStore("node7", number, None, True, LIMIT, server=f"tcp://127.0.0.1:{server.port}")


def port_of(store: TCPStore) -> int:
    name = store._connection().name
    assert name is not None
    return name.port


def why_none(store: TCPStore) -> str:
    name = store._connection().name
    assert name is not None
    assert not name.port
    return name.no_port


def free_ports(count: int) -> tuple[int, int]:
    """Return the first and last of adjacent ports that nobody has, outside of those that the kernel hands out."""
    for first in range(20_000, 32_000, count):
        with ExitStack() as held:
            try:
                for number in range(first, first + count):
                    held.enter_context(socket.create_server(("", number)))
            except OSError as error:
                assert error.errno == errno.EADDRINUSE
                continue
            return first, first + count - 1
    raise AssertionError("there are none")


def test_who_connects_there_is_in_the_store(server: Server) -> None:
    """A client of ours that says no name, and one that speaks bytes."""
    with owner_on(server) as owner, owner_on(server, 2) as other:
        assert 0 != port_of(owner) != port_of(other) != 0
        owner.set("k", "v")
        with RawPeer(port_of(owner)) as peer, TCPStore("127.0.0.1", port_of(owner), timeout=LIMIT, server="") as ours:
            peer.send(set_(b"/raw", b"1"))
            assert ours.get("k") == b"v"
            assert owner.get("raw") == b"1"
            assert not other.check(["k"])
            ours.barrier("all", 1)


def test_a_connection_there_that_breaks_is_resumed() -> None:
    with (
        tcpstore_server() as server,
        owner_on(server) as owner,
        resetter(port_of(owner)) as proxy,
        TCPStore("127.0.0.1", proxy.port, timeout=LIMIT, server="") as cut,
    ):
        owner.set("k", "v")
        cut.set("cut", "1")
        proxy.reset()
        assert cut.get("k") == b"v"
        assert cut.add("cut", 1) == 2


def test_a_port_ends_with_its_store(server: Server) -> None:
    owner = owner_on(server)
    port = port_of(owner)
    with RawPeer(port) as peer:
        peer.ping()
        owner.close()
        until(lambda: refused(port), "the port is closed")
        peer.ping()  # it has ten seconds to leave
    with owner_on(server) as again, RawPeer(port_of(again)) as peer:
        peer.ping()


def test_ports_end_with_the_server(server: Server) -> None:
    with owner_on(server) as owner:
        port = port_of(owner)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: refused(port), "the port is closed")
        owner.set("k", "v")  # clients that are connected may finish
        assert owner.get("k") == b"v"
    server.stop()


def test_a_range(backend: str) -> None:
    """A store that gets none works without, and is told why; the next one gets what has been given back."""
    first, last = free_ports(3)
    with ExitStack() as stack:
        stranger = stack.enter_context(socket.create_server(("", first + 1)))
        server = stack.enter_context(tcpstore_server("--backend", backend, "--store-ports", f"{first}-{last}"))
        owners = [stack.enter_context(owner_on(server, number)) for number in range(2)]
        assert {port_of(owner) for owner in owners} == {first, last}
        third = stack.enter_context(owner_on(server, 3))
        assert why_none(third) == (
            f"the server cannot listen on any of the ports {first}-{last}: Address already in use"
        )
        third.set("k", "v")
        assert third.get("k") == b"v"
        owners[0].close()
        until(lambda: refused(first) or refused(last), "a port is closed")
        stranger.close()
        assert {port_of(stack.enter_context(owner_on(server, number))) for number in (4, 5)} < {first, first + 1, last}


def test_none() -> None:
    with tcpstore_server("--store-ports", "0") as server, owner_on(server) as owner:
        assert why_none(owner) == "the server offers none (--store-ports 0)"


@pytest.mark.parametrize("given", ["7-", "9-8", "0-5", "65535-65536", "all", "", "8-9-10", "80"])
def test_what_is_no_range(given: str) -> None:
    found = run_command(None, "serve", "--port", "0", "--store-ports", given)
    assert found.exit_code == 2
    assert f"{given!r} is not of the form FIRST-LAST, any or 0" in found.stderr


def test_a_protected_server_has_none(tmp_path: Path) -> None:
    """Who connects there would be in the store without a token, and in clear text."""
    keys = secret_file(tmp_path / "keys", f"a:{'1' * 64}\n")
    with (
        tcpstore_server("--token-keys", str(keys)) as server,
        owner_on(server) as owner,
    ):
        assert why_none(owner) == "the server checks tokens, and has no ports for stores that need none"
    with tcpstore_server(*certificates().serving()) as server, owner_on(server) as owner:
        assert why_none(owner) == "the server has TLS, and no clear-text ports for stores"


def test_ports_count_as_connections(backend: str) -> None:
    """And leave most of these to clients."""
    with ExitStack() as stack:
        server = stack.enter_context(tcpstore_server("--backend", backend, "--limit", "connections=8"))
        owners = [stack.enter_context(owner_on(server, number)) for number in range(3)]
        assert [port_of(owner) > 0 for owner in owners] == [True, True, False]
        assert why_none(owners[2]).startswith("2 stores have one already")
        for _ in range(3):
            stack.enter_context(RawPeer(server.port)).ping()
        with RawPeer(server.port) as peer, pytest.raises((EOFError, ConnectionError)):
            peer.ping()
        assert "connection limit 8 reached" in server.log()


def test_a_relay_of_a_port_is_refused() -> None:
    """Its ranks would be in the store without a name."""
    with tcpstore_server() as server, owner_on(server) as owner, tcpstore_relay(port_of(owner)) as relay:
        with RawPeer(relay.port) as peer, pytest.raises((EOFError, ConnectionError)):
            peer.ping()
        until(lambda: "this connection is in the store 'node7:1'" in relay.log(), "the relay says why")


@pytest.mark.unmeasured
async def test_a_forked_child_holds_no_port(backend: str) -> None:
    """As it holds nothing of its server."""
    async with serve(backend=backend) as server:
        url = f"tcp://127.0.0.1:{server.port}"
        owner = await asyncio.to_thread(TCPStore, "node7", 1, None, True, LIMIT, server=url)
        port = port_of(owner)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.write(writing, b"1")
            signal.pause()
        try:
            os.read(reading, 1)
            await asyncio.to_thread(owner.close)
            while not await asyncio.to_thread(refused, port):
                await asyncio.sleep(0)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(reading)
            os.close(writing)
