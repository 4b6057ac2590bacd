"""`tcpstore relay --same-user`: who is admitted is found out from the kernel, and everybody else is refused."""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest

import networks
from faults.fault_helpers import program, server_under, until
from support import LIMIT, RawPeer, Server, blob, tcpstore_relay, tcpstore_server
from tcpstore_async import TCPStore
from tcpstore_async.base.errors import DistNetworkError
from tcpstore_async.base.limits import Limits
from tcpstore_async.server import peer_user
from tcpstore_async.server.peer_user import PeerUsers, UnknownOwnerError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel of other systems does not say")

OTHER = 12345
"""A user whom nobody else has."""

_OTHER_USER = """
import encodings.idna, os, socket, sys  # imported while it may still read the standard library
os.setgroups([])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
for line in sys.stdin:
    host, port, count = line.split()
    for _ in range(int(count)):
        with socket.create_connection((host, int(port)), 30) as rank:
            mine = rank.getsockname()[1]
            try:
                rank.sendall(bytes.fromhex(sys.argv[2]))
                reply = rank.recv(100)
            except OSError:
                reply = b""
    print(mine, reply.hex(), flush=True)
"""

VALIDATE = bytes.fromhex("00cef7853c")
SET = VALIDATE + b"\x01" + blob(b"/planted") + blob(b"x") + b"\x0d\1\2\3\4"

needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can be someone else")


@pytest.fixture
def relay() -> Iterator[Server]:
    with tcpstore_server() as server, tcpstore_relay(server.port, "--same-user") as relay:
        yield relay


@contextmanager
def someone_else() -> Iterator[subprocess.Popen[str]]:
    with program(_OTHER_USER, str(OTHER), SET.hex()) as process:
        yield process


def try_it(process: subprocess.Popen[str], port: int, host: str = "127.0.0.1", count: int = 1) -> tuple[int, bytes]:
    """Have them connect and set a key; returns the port of the last connection, and what it received."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{host} {port} {count}\n")
    process.stdin.flush()
    mine, _, reply = process.stdout.readline().partition(" ")
    return int(mine), bytes.fromhex(reply)


@needs_root
def test_another_user_is_refused(relay: Server) -> None:
    with someone_else() as process:
        port, reply = try_it(process, relay.port)
    assert reply == b""
    line = (
        f"rejected 127.0.0.1:{port}: its process belongs to user {OTHER}; "
        f"--same-user admits only user {os.geteuid()} on this host"
    )
    until(lambda: line in relay.log(), "the refusal is logged")
    with TCPStore("127.0.0.1", relay.port) as store:
        assert not store.check(["planted"])
        store.set("mine", "x")
        assert store.get("mine") == b"x"


@needs_root
def test_without_the_option_anybody_is_admitted() -> None:
    """The control: the same request of the same user is executed."""
    with tcpstore_server() as server, tcpstore_relay(server.port) as relay, someone_else() as process:
        assert try_it(process, relay.port)[1] == b"\1\2\3\4"


@needs_root
@pytest.mark.skipif(not socket.has_ipv6, reason="there is no IPv6 here")
def test_another_user_is_refused_over_either_protocol() -> None:
    with (
        tcpstore_server() as server,
        tcpstore_relay(server.port, "--same-user", "--host", "::") as relay,
        someone_else() as process,
    ):
        for host in ("::1", "127.0.0.1", "::ffff:127.0.0.1"):
            assert try_it(process, relay.port, host)[1] == b""
            with socket.create_connection((host, relay.port), LIMIT) as mine:
                mine.sendall(SET)
                assert mine.recv(4, socket.MSG_WAITALL) == b"\1\2\3\4"
        assert "reachable from other hosts" not in relay.log()


@needs_root
def test_refusals_are_counted_and_do_not_flood_the_log(relay: Server) -> None:
    with someone_else() as process:
        try_it(process, relay.port, count=200)
    with RawPeer(relay.port) as mine:
        mine.ping()
    assert relay.stop(signal.SIGTERM) == 0
    log = relay.log()
    lines = re.findall(r"rejected .* user 12345", log)
    counted = [int(number) for number in re.findall(r"omitted (\d+) more lines? about 127.0.0.1", log)]
    assert len(lines) >= Limits().audit_lines
    assert len(lines) + sum(counted) == 200


@needs_root
def test_another_network_is_refused_though_its_users_have_the_same_numbers() -> None:
    if reason := networks.why_not():
        pytest.skip(reason)
    with (
        networks.two_networks() as (here, there),
        server_under(here.prefix) as server,
        tcpstore_relay(server.port, "--same-user", "--host", here.address, prefix=here.prefix) as relay,
    ):
        address = here.address, relay.port
        with there.inside(lambda: socket.create_connection(address, LIMIT)) as peer:
            port = peer.getsockname()[1]
            assert peer.recv(1) == b""
        line = f"rejected {there.address}:{port}: cannot determine its user: the connection is not from this host"
        until(lambda: line in relay.log(), "the refusal is logged")
        with here.inside(lambda: socket.create_connection(address, LIMIT)) as mine:
            mine.sendall(SET)
            assert mine.recv(4, socket.MSG_WAITALL) == b"\1\2\3\4"
        assert relay.log().count("rejected") == 1


def connected(family: int, host: str, to: str) -> tuple[socket.socket, socket.socket]:
    """The two ends of a connection: the client's, and the accepted one."""
    with socket.socket(family) as listener:
        if host == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((host, 0))
        listener.listen(1)
        client = socket.create_connection((to, listener.getsockname()[1]), LIMIT)
        return client, listener.accept()[0]


@pytest.fixture
def users() -> Iterator[PeerUsers]:
    users = PeerUsers()
    yield users
    users.close()


@pytest.mark.parametrize("half_closed", [False, True])
def test_the_user_of_a_connection(users: PeerUsers, half_closed: bool) -> None:
    with ExitStack() as stack:
        client, accepted = (stack.enter_context(end) for end in connected(socket.AF_INET, "127.0.0.1", "127.0.0.1"))
        if half_closed:
            client.shutdown(socket.SHUT_WR)
        assert users.look_up(accepted) == users.user == os.geteuid()


@pytest.mark.parametrize("reset", [False, True])
def test_who_has_closed_is_nobody(users: PeerUsers, reset: bool) -> None:
    """The kernel reports a socket that no process has any more as one of user 0."""
    client, accepted = connected(socket.AF_INET, "127.0.0.1", "127.0.0.1")
    with accepted:
        client.sendall(SET)
        if reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        with pytest.raises(UnknownOwnerError):
            users.look_up(accepted)


class Overtaken(PeerUsers):
    """Whose first look-up is overtaken by something, after it has asked for the addresses."""

    def __init__(self, by: Callable[[], None]) -> None:
        self.by: Callable[[], None] | None = None
        super().__init__()
        self.by = by

    def _owner(self, family: int, peer: tuple[Any, ...], here: tuple[Any, ...]) -> int:
        if self.by is not None:
            self.by()
            self.by = None
        return super()._owner(family, peer, here)


@pytest.mark.parametrize("before_the_look_up", [True, False])
def test_a_connection_whose_addresses_someone_else_has_now(users: PeerUsers, before_the_look_up: bool) -> None:
    """A stranger resets its connection after it has sent requests, and a process of ours happens to get its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as honest:
        # On an address of its own: the ports of 127.0.0.1 are everybody's, and one in use cannot be bound.
        pid = os.getpid()
        source = f"127.{64 + pid % 64}.{pid >> 6 & 255}.{1 + (pid >> 14) % 254}"
        stranger = socket.create_connection(listener.getsockname(), LIMIT, source_address=(source, 0))
        accepted, mine = listener.accept()
        stranger.sendall(SET)

        def swap() -> None:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stranger.close()
            honest.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            honest.bind(mine)
            honest.connect(listener.getsockname())

        if before_the_look_up:
            swap()
        with accepted, closing(users if before_the_look_up else Overtaken(swap)) as looking:
            assert accepted.recv(100) == SET
            with pytest.raises(UnknownOwnerError):
                looking.look_up(accepted)
            with listener.accept()[0] as ours:
                assert looking.look_up(ours) == users.user


def test_many_connections_are_told_apart(users: PeerUsers) -> None:
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0), backlog=200) as listener:
        ends = []
        for _ in range(200):
            client = stack.enter_context(socket.create_connection(listener.getsockname(), LIMIT))
            ends.append((client, stack.enter_context(listener.accept()[0])))
        for client, _ in ends[::2]:
            client.close()
        for number, (_, accepted) in enumerate(ends):
            if number % 2:
                assert users.look_up(accepted) == users.user
            else:
                with pytest.raises(UnknownOwnerError):
                    users.look_up(accepted)


def test_other_systems_say_so_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(
        DistNetworkError, match=r"^cannot determine which user a connection belongs to on darwin: this needs Linux$"
    ):
        PeerUsers()


def test_a_kernel_that_does_not_say_is_noticed_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_user, "_NETLINK_SOCK_DIAG", 31)
    with pytest.raises(
        DistNetworkError, match=r"^cannot determine which user a connection belongs to: Protocol not supported$"
    ):
        PeerUsers()
    monkeypatch.undo()
    monkeypatch.setattr(peer_user, "_SOCK_DIAG_BY_FAMILY", 99)
    with pytest.raises(DistNetworkError, match=r"^cannot determine which user a connection belongs to: "):
        PeerUsers()


def test_a_user_that_stands_for_several_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a user namespace, users that are not mapped all look alike."""
    monkeypatch.setattr(peer_user, "_overflow_user", os.geteuid)
    with pytest.raises(DistNetworkError, match="stands for all users that are not mapped"):
        PeerUsers()
