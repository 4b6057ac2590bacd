"""The number of a named store's address, which its owner's host shows as taken while the store lives."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import networks
from support import LIMIT, tcpstore_server
from tcpstore_async import TCPStore
from tcpstore_async.client.interfaces import global_addresses
from torch_forker import Program


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with tcpstore_server() as server:
        yield f"tcp://127.0.0.1:{server.port}"


@pytest.fixture
def number() -> int:
    with socket.create_server(("", 0)) as free:
        return int(free.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether a program that looks for a free port takes this one, in any of the usual ways; all agree."""
    found = set()
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, ""), (socket.AF_INET6, "::1")):
        for reuse in (0, 1):
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                try:
                    probe.bind((host, port))
                    found.add(True)
                except OSError:
                    found.add(False)
    [free] = found
    return free


def check_reset(port: int) -> None:
    """What connects is reset, and not before it has learned that the port is taken, however many come together."""
    peers = [socket.create_connection(("127.0.0.1", port), LIMIT) for _ in range(100)]
    for peer in peers:
        with peer, pytest.raises(ConnectionResetError):
            peer.recv(1)


def test_a_number_is_taken_as_long_as_its_store_lives(url: str, number: int) -> None:
    """For probes of all kinds, wherever the address of the store is."""
    for host in ("127.0.0.1", "node7", "0.0.0.0"):
        assert is_free(number)
        with TCPStore(host, number, None, True, LIMIT, server=url) as owner:
            assert not is_free(number)
            check_reset(number)
            with TCPStore(host, number, timeout=LIMIT, server=url) as rank:
                rank.set("k", "v")
            assert not is_free(number)
            assert owner.get("k") == b"v"
        assert is_free(number)


def test_port_0_holds_what_it_gets(url: str) -> None:
    with TCPStore("node7", 0, None, True, LIMIT, server=url) as store:
        name = store._connection().name
        assert name is not None
        assert not is_free(int(name.name.rpartition(":")[2]))


def test_a_given_socket_is_closed_before(url: str) -> None:
    with socket.create_server(("", 0)) as given:
        port = given.getsockname()[1]
        fd = given.detach()
    with TCPStore("node7", port, None, True, LIMIT, master_listen_fd=fd, server=url):
        check_reset(port)
    assert is_free(port)


def test_a_number_that_cannot_be_had_does_no_harm(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Such as the server's own."""
    port = int(url.rpartition(":")[2])
    with (
        caplog.at_level(logging.DEBUG, "tcpstore_async.stores"),
        TCPStore("node7", port, None, True, LIMIT, server=url) as owner,
    ):
        owner.set("k", "v")
        assert f"port {port} of this host is not held for the store with this number: Address already in use" in (
            caplog.text
        )


def test_the_switch(url: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCPSTORE_HOLD_PORT", "0")
    with TCPStore("node7", number, None, True, LIMIT, server=url):
        assert is_free(number)


def test_a_forked_child_holds_nothing(url: str, number: int) -> None:
    with TCPStore("node7", number, None, True, LIMIT, server=url) as store:
        child = os.fork()
        if not child:
            signal.pause()
        try:
            check_reset(number)
            store.close()
            assert is_free(number)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


OWNER = """
import sys
from tcpstore_async import TCPStore
store = TCPStore("node7", int(sys.argv[1]), None, True, 60.0, server=sys.argv[2])
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_killed_owner_holds_nothing(url: str, number: int) -> None:
    command = [sys.executable, "-c", OWNER, str(number), url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "ready\n"
            assert not is_free(number)
        finally:
            owner.kill()
        owner.wait()
    assert is_free(number)


INTERFACES = """
import sys
sys.path.insert(0, sys.argv[1])
from networks import enter
enter(sys.argv[2])
from tcpstore_async.client.interfaces import global_addresses
print(*global_addresses())
"""


def test_addresses_of_interfaces() -> None:
    """Those of loopback and of links only are not among them."""
    for address in global_addresses():
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family):
            pass
    if reason := networks.why_not():
        pytest.skip(reason)
    with networks.two_networks() as hosts:
        networks.join_for_data(hosts)
        for host, *addresses in zip(hosts, networks.ADDRESSES, networks.DATA_ADDRESSES, strict=True):
            with Program(INTERFACES, Path(__file__).parent.parent, host.path) as program:
                assert program.output().split() == addresses
