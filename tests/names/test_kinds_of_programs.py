"""The ways in which programs choose, publish and dial addresses: whatever works on PyTorch alone works in every mode.

Two hosts are network namespaces; the server with the names runs on the first. What other hosts do with an address that
a store has published is also in `test_addresses_travel.py`.
"""

from __future__ import annotations

import ast
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import networks
from faults.fault_helpers import server_under, until
from relay.test_same_user import OTHER, needs_root
from support import free_port, tcpstore_server
from tcpstore_async.client.interfaces import global_addresses
from torch_forker import Program

torch = pytest.importorskip("torch")

TESTS = Path(__file__).parent.parent
MODES = ["stock", "native", "python", "names-native", "names-python", "names-durable"]
"""The last one is names-native, on a server that keeps its stores when it is killed: then there are relays."""

PROGRAM = """
import os, sys
tests, network, user, mode = sys.argv[1:]
sys.path.insert(0, tests)
if network:
    from networks import enter
    enter(network)
import errno, signal, socket
from datetime import timedelta
import torch.distributed as dist
if mode != "stock":
    import tcpstore_async.torch
    client = mode.removeprefix("names-").replace("durable", "native")
    tcpstore_async.torch.install(client=client, classes=client == "python")
if user:
    os.setuid(int(user))

def make(host, port, master, seconds=60):
    return dist.TCPStore(host, port, None, master, timedelta(seconds=seconds), wait_for_workers=False)

def own(host, port):
    global store
    store = make(host, port, True)
    store.set("who", mode + str(os.getpid()))
    return store.host, store.port

def read(host, port):
    return make(host, port, False).get("who").decode()

def finds(host, port):
    try:
        return bool(make(host, port, False, 2))
    except dist.DistNetworkError as error:
        assert "has not been created there" in str(error), error
        return False

def is_free(host, port, how):
    with socket.socket() as probe:
        if how == "connect":
            return probe.connect_ex((host, port)) == errno.ECONNREFUSED
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, how == "reuse")
        try:
            probe.bind(("" if how == "any" else host, port))
            if how != "any":
                probe.listen(1)
            return True
        except OSError as error:
            assert error.errno == errno.EADDRINUSE, error
            return False

def scan(host, base, how):
    return next(port for port in range(base, base + 50) if is_free(host, port, how))

def claim(host, base):
    for port in range(base, base + 50):
        try:
            own(host, port)
            return port
        except dist.DistNetworkError as error:
            assert "EADDRINUSE" in str(error), error

def leave_child():
    child = os.fork()
    if not child:
        os.closerange(0, 3)
        signal.pause()
    return child

def ready():
    return True

for line in sys.stdin:
    print(repr(eval(line)), flush=True)
"""


class Engine:
    """A program that does one thing after the other, as it is told."""

    def __init__(self, mode: str, url: str, network: str, user: str) -> None:
        env = {"TCPSTORE_SERVER_URL": url if mode.startswith("names") else "", "HOME": "/"}
        self.program = Program(PROGRAM, TESTS, network, user, mode, env=env)

    def begin(self, function: str, *given: object) -> None:
        self.program.stdin.write(f"{function}(*{given!r})\n".encode())

    def end(self) -> Any:
        line = self.program.stdout.readline().decode()
        assert line, self.program.errors()
        return ast.literal_eval(line)

    def __call__(self, function: str, *given: object) -> Any:
        self.begin(function, *given)
        return self.end()

    def leave(self, number: int = signal.SIGTERM) -> None:
        """Have it end: in order, or by a signal."""
        if number == signal.SIGKILL:
            os.kill(self.program.pid, number)
        else:
            self.program.stdin.close()
        self.program.wait()


class World:
    """The engines of one mode, killed at the end of `with`."""

    def __init__(self, mode: str, url: str, hosts: tuple[networks.Network, ...] = ()) -> None:
        self.mode = mode
        self.url = url
        self.hosts = hosts
        self.stack = ExitStack()

    def engine(self, at: int | None = None, user: str = "", mode: str = "") -> Engine:
        network = "" if at is None else str(self.hosts[at].path)
        engine = Engine(mode or self.mode, self.url, network, user)
        self.stack.enter_context(engine.program)
        return engine


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The URLs of two servers, of which the second is durable."""
    journal = ["--persist", str(tmp_path_factory.mktemp("journal"))]
    with tcpstore_server() as server, tcpstore_server(*journal) as durable:
        yield [f"tcp://127.0.0.1:{one.port}" for one in (server, durable)]


@pytest.fixture(params=MODES)
def world(request: pytest.FixtureRequest, servers: list[str]) -> Iterator[World]:
    world = World(request.param, servers[request.param == "names-durable"])
    with world.stack:
        yield world


Hosts = tuple[networks.Network, networks.Network]


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[str], Hosts]]:
    if reason := networks.why_not():
        pytest.skip(reason)
    journal = ["--persist", str(tmp_path_factory.mktemp("journal"))]
    with (
        networks.two_networks() as both,
        server_under(both[0].prefix, "--host", "::") as server,
        server_under(both[0].prefix, "--host", "::", *journal) as durable,
    ):
        yield [f"tcp://{both[0].address}:{one.port}" for one in (server, durable)], both


@pytest.fixture(params=MODES)
def wide_world(request: pytest.FixtureRequest, two_hosts: tuple[list[str], Hosts]) -> Iterator[World]:
    urls, both = two_hosts
    world = World(request.param, urls[request.param == "names-durable"], both)
    with world.stack:
        yield world


def may_run() -> bool:
    """Whether the other user may run this interpreter."""
    try:
        return subprocess.run([sys.executable, "-S", "-c", ""], user=OTHER, check=False, env={}).returncode == 0
    except PermissionError:
        return False


def check_apart(world: World, first: Engine, second: Engine, ports: list[int], host: str = "127.0.0.1") -> None:
    """Each of two engines has the store that its ranks find."""
    assert ports[0] != ports[1]
    for engine, port in zip((first, second), ports, strict=True):
        assert world.engine()("read", host, port) == f"{world.mode}{engine.program.pid}"


@pytest.mark.parametrize("how", ["plain", "reuse", "any", "connect"])
# quirk: named-stores
def test_two_engines_scan_from_one_base(how: str, world: World) -> None:
    base, first, second = free_port(), world.engine(), world.engine()
    ports = []
    for engine in (first, second):
        ports.append(engine("scan", "127.0.0.1", base, how))
        engine("own", "127.0.0.1", ports[-1])
    check_apart(world, first, second, ports)


def test_a_number_is_free_when_its_store_is_closed(world: World) -> None:
    first, second, port = world.engine(), world.engine(), free_port()
    first("own", "127.0.0.1", port)
    assert not second("is_free", "127.0.0.1", port, "reuse")
    first.leave()
    assert second("is_free", "127.0.0.1", port, "reuse")
    second("own", "127.0.0.1", port)
    assert world.engine()("read", "127.0.0.1", port) == f"{world.mode}{second.program.pid}"


def test_probe_by_bind_and_close(world: World) -> None:
    engine, rank = world.engine(), world.engine()
    port = engine("scan", "127.0.0.1", 0, "plain") or free_port()
    rank.begin("read", "127.0.0.1", port)
    engine("own", "127.0.0.1", port)
    assert rank.end() == f"{world.mode}{engine.program.pid}"


def test_port_0_is_published(world: World) -> None:
    first, second = world.engine(), world.engine()
    ports = [engine("own", "127.0.0.1", 0)[1] for engine in (first, second)]
    check_apart(world, first, second, ports)


def test_a_loop_that_catches_eaddrinuse(world: World) -> None:
    base, first, second = free_port(), world.engine(), world.engine()
    check_apart(world, first, second, [engine("claim", "127.0.0.1", base) for engine in (first, second)])


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::"])
@pytest.mark.parametrize("before", [False, True])
# quirk: named-stores
def test_a_wildcard_master(wildcard: str, before: bool, world: World) -> None:
    """Ranks come before it or behind it, and call it as they like."""
    master, port = world.engine(), free_port()
    spellings = ["127.0.0.1", "localhost", "0.0.0.0", socket.gethostname(), *global_addresses()[:2]]
    ranks = [world.engine() for _ in spellings]
    if not before:
        master("own", wildcard, port)
    for rank, host in zip(ranks, spellings, strict=True):
        rank.begin("read", host, port)
    if before:
        master("own", wildcard, port)
    for rank in ranks:
        assert rank.end() == f"{world.mode}{master.program.pid}"


def test_a_wildcard_master_on_another_host(wide_world: World) -> None:
    master, rank, port = wide_world.engine(1), wide_world.engine(0), 29_811
    rank.begin("read", wide_world.hosts[1].address, port)
    master("own", "0.0.0.0", port)
    assert rank.end() == f"{wide_world.mode}{master.program.pid}"
    assert wide_world.engine(1)("read", "127.0.0.1", port) == f"{wide_world.mode}{master.program.pid}"


def test_two_engines_with_one_base_on_two_hosts(wide_world: World) -> None:
    """Both get the base, and on each host a loopback address leads to its own."""
    base, engines = 29_821, [wide_world.engine(0), wide_world.engine(1)]
    for engine in engines:
        assert engine("scan", "127.0.0.1", base, "reuse") == base
        engine("own", "127.0.0.1", base)
    for at, engine in enumerate(engines):
        assert not engine("is_free", "127.0.0.1", base, "reuse")
        assert wide_world.engine(at)("read", "127.0.0.1", base) == f"{wide_world.mode}{engine.program.pid}"


# quirk: named-stores
def test_a_child_outlives_its_parent(world: World) -> None:
    """On PyTorch alone it keeps the port."""
    parent, following, port = world.engine(), world.engine(), free_port()
    parent("own", "127.0.0.1", port)
    child = parent("leave_child")
    try:
        parent.leave()
        if world.mode == "stock":
            assert not following("is_free", "127.0.0.1", port, "reuse")
        else:
            until(lambda: following("is_free", "127.0.0.1", port, "reuse"), "the number is free")
            following("own", "127.0.0.1", port)
            assert world.engine()("read", "127.0.0.1", port) == f"{world.mode}{following.program.pid}"
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_owner_is_killed(world: World) -> None:
    killed, following, port = world.engine(), world.engine(), free_port()
    killed("own", "127.0.0.1", port)
    following("ready")
    killed.leave(signal.SIGKILL)
    following("claim", "127.0.0.1", port)


@needs_root
def test_two_users_scan_from_one_base(world: World) -> None:
    if world.mode == "python" and not may_run():
        pytest.skip("the other user may not run this interpreter, and so not our server")
    base, first, second = free_port(), world.engine(), world.engine(user=str(OTHER))
    ports = []
    for engine in (first, second):
        ports.append(engine("scan", "127.0.0.1", base, "reuse"))
        engine("own", "127.0.0.1", ports[-1])
    assert ports[0] != ports[1]
    assert world.engine()("read", "127.0.0.1", ports[0]) == f"{world.mode}{first.program.pid}"
    assert world.engine(user=str(OTHER))("read", "127.0.0.1", ports[1]) == f"{world.mode}{second.program.pid}"


@needs_root
# quirk: named-stores
def test_a_loopback_address_is_within_one_user(world: World) -> None:
    """On PyTorch alone it is within one host."""
    port, rank, stranger, master = free_port(), world.engine(), world.engine(user=str(OTHER)), world.engine()
    master("own", "127.0.0.1", port)
    assert rank("finds", "127.0.0.1", port)
    assert stranger("finds", "127.0.0.1", port) == (not world.mode.startswith("names"))


@needs_root
def test_another_user_finds_a_wildcard_master(world: World) -> None:
    port, rank, master = free_port(), world.engine(user=str(OTHER)), world.engine()
    master("own", "0.0.0.0", port)
    assert rank("read", "127.0.0.1", port) == f"{world.mode}{master.program.pid}"


@pytest.mark.parametrize("port", [29_831, 0])
@pytest.mark.parametrize("dials", ["same", "stock"])
# quirk: named-stores
def test_a_stores_own_address_is_published(port: int, dials: str, wide_world: World) -> None:
    """To another host, for clients of the same mode and for some that nobody has patched."""
    host = wide_world.hosts[0].address
    master = wide_world.engine(0)
    published = master("own", host, port)
    rank = wide_world.engine(1, mode=wide_world.mode if dials == "same" else "stock")
    assert rank("read", *published) == f"{wide_world.mode}{master.program.pid}"


def test_a_process_group_is_reconfigured(world: World) -> None:
    if not hasattr(torch.distributed.ProcessGroup, "_reconfigure"):
        pytest.skip("PyTorch has _reconfigure from 2.14 on")
    master, rank, port = world.engine(), world.engine(), free_port()
    address = master("own", "127.0.0.1", port)
    assert rank("read", *address) == f"{world.mode}{master.program.pid}"
