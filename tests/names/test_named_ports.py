"""Ports on loopback that stand for stores with names."""

from __future__ import annotations

import array
import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from relay.test_same_user import needs_root, someone_else, try_it
from support import LIMIT, RawPeer, Server, tcpstore_server
from tcpstore_async import TCPStore
from tcpstore_async.client.store_name import find_server
from tcpstore_async.relay.named_ports import open_port
from tcpstore_async.relay.port_process import serve
from tcpstore_async.server.listen_socket import listen


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tcpstore_server() as server:
        yield server


@pytest.fixture
def owner(server: Server, request: pytest.FixtureRequest) -> Iterator[TCPStore]:
    name = str(request.node.name)
    with TCPStore(name, 1, None, True, LIMIT, server=f"tcp://127.0.0.1:{server.port}") as store:
        store.set("k", "v")
        yield store


def port_of(store: TCPStore) -> int:
    name = store._connection().name
    assert store._server is not None
    assert name is not None
    return open_port(store._server, name, listen("127.0.0.1", 0))


@needs_root
def test_other_users_are_refused(owner: TCPStore) -> None:
    """What is at the other end of the port has this user's token; nor do they end it for its user."""
    port = port_of(owner)
    with someone_else() as stranger:
        _, reply = try_it(stranger, port, count=3)
    assert reply == b""
    assert owner.list_keys() == ["k"]
    with RawPeer(port) as own:
        own.ping()


async def test_a_port_for_which_there_is_no_descriptor_ends_no_other(server: Server, owner: TCPStore) -> None:
    """The kernel delivers an order without the socket if the process has as many files as it may have."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    name = owner._connection().name
    url = find_server(f"tcp://127.0.0.1:{server.port}")
    assert name is not None
    assert url is not None
    order = json.dumps([str(url), name.name, name.incarnation, "", {}]).encode()
    with mine, its, listen("127.0.0.1", 0) as listener:
        forwarding = asyncio.ensure_future(serve(its, None))
        mine.send(order)
        fds = array.array("i", [listener.fileno()])
        mine.sendmsg([order], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        with await asyncio.to_thread(RawPeer, listener.getsockname()[1]) as peer:
            await asyncio.to_thread(peer.ping)
            peer.socket.shutdown(socket.SHUT_WR)
            assert await asyncio.to_thread(peer.closed)  # then the port is given up: nothing is left for the loop
        mine.close()
        await forwarding


_WITHOUT_SOCK_DIAG = """
from tcpstore_async.relay.port_process import main
from tcpstore_async.server import peer_user
peer_user._NETLINK_SOCK_DIAG = -1
main()
"""


def test_who_is_served_if_the_kernel_does_not_tell_users_apart() -> None:
    """Everyone, as elsewhere than on Linux; but nobody has to find that out alone."""
    mine, its = socket.socketpair()
    with mine, its:
        mine.shutdown(socket.SHUT_WR)
        command = [sys.executable, "-c", _WITHOUT_SOCK_DIAG]
        done = subprocess.run(command, stdin=its.fileno(), stderr=subprocess.PIPE, text=True, check=True, timeout=LIMIT)
    assert done.stderr.startswith(
        "tcpstore: every user of this host can use this process's ports of named stores, with"
    )
