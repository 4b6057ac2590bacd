"""Addresses that a rank publishes are dialled from another host, by clients that nobody has patched and by others.

The hosts are network namespaces. The server runs on the first of them.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import networks
from conformance.frames import set_
from faults.fault_helpers import server_under
from support import HANDSHAKE, LIMIT
from torch_forker import Program

pytest.importorskip("torch")

PUBLISH = """
import logging, sys
sys.path.insert(0, sys.argv[1])
from networks import enter
enter(sys.argv[2])
logging.basicConfig(level=logging.INFO)
from datetime import timedelta
import torch.distributed as dist

client, role, shown, host, port, seconds = sys.argv[3:]
if client != "plain":
    import tcpstore_async.torch
    tcpstore_async.torch.install(client=client.removesuffix("-class"), classes=client.endswith("-class"))
make = dist.TCPStore
if client == "plain":
    from tcpstore_async import TCPStore as make
timeout = timedelta(seconds=float(seconds))
store = make(host, int(port), None, True, timeout, wait_for_workers=False)
store.set("who", "right one")
if role == "guest":
    store, owner = make(host, store.port if port == "0" else int(port), None, False, timeout), store
print(f"{host}:{store.port}" if shown == "given host" else f"{store.host}:{store.port}", flush=True)
sys.stdin.read()
"""

DIAL = """
import sys
sys.path.insert(0, sys.argv[1])
from networks import enter
enter(sys.argv[2])
from datetime import timedelta
client, address, seconds = sys.argv[3:]
host, port = address.rsplit(":", 1)
timeout = timedelta(seconds=float(seconds))
if client == "plain":
    from tcpstore_async import TCPStore
    store = TCPStore(host, int(port), timeout=timeout)
else:
    import torch.distributed as dist
    if client != "stock":
        import tcpstore_async.torch
        tcpstore_async.torch.install(client=client)
    store = dist.TCPStore(host, int(port), None, False, timeout, wait_for_workers=False)
print(store.get("who").decode())
"""

WORKER = """
import os, sys
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                      wait_for_workers=False, timeout=timedelta(seconds=60))
store.set("who", "right one")
print(f'{os.environ["MASTER_ADDR"]}:{os.environ["MASTER_PORT"]}', flush=True)
store.get("done")
"""

TESTS = Path(__file__).parent.parent


class Hosts:
    """Two hosts, and the URL of a server."""

    def __init__(self, both: tuple[networks.Network, networks.Network], url: str, durable: bool = False) -> None:
        self.both = both
        self.url = url
        self.durable = durable

    def publish(self, client: str, role: str, shown: str, at: int, port: int, seconds: float = LIMIT) -> Program:
        """Start a program on a host that publishes the address of a store by its standard output."""
        here = self.both[at]
        given = (client, role, shown, here.address, port, seconds)
        return Program(PUBLISH, TESTS, here.path, *given, env={"TCPSTORE_SERVER_URL": self.url})

    def dial(self, client: str, address: str, at: int, seconds: float = LIMIT) -> Program:
        """Start a program on a host that reads what was published."""
        env = {} if client == "stock" else {"TCPSTORE_SERVER_URL": self.url}
        return Program(DIAL, TESTS, self.both[at].path, client, address, seconds, env=env)


@pytest.fixture(scope="module", params=[False, True], ids=["", "durable"])
def hosts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := networks.why_not():
        pytest.skip(reason)
    options = ["--persist", str(tmp_path_factory.mktemp("journal"))] if request.param else []
    with networks.two_networks() as both, server_under(both[0].prefix, "--host", "::", *options) as server:
        yield Hosts(both, f"tcp://{both[0].address}:{server.port}", request.param)


def published(program: Program) -> str:
    line = program.stdout.readline().decode().strip()
    assert line, program.errors()
    return line


PORT = 29_700


@pytest.mark.parametrize(("client", "role", "shown", "at", "port"), [
    ("native", "owner", "store", 0, PORT),
    ("native", "owner", "store", 1, 0),
    ("native", "guest", "store", 1, PORT),
    ("native", "owner", "given host", 0, 0),
    ("python-class", "owner", "store", 0, 0),
    ("python-class", "owner", "store", 1, PORT),
    ("python-class", "guest", "store", 1, 0),
    ("python-class", "owner", "given host", 0, 0),
    ("plain", "owner", "store", 1, PORT),
])  # fmt: skip
# quirk: named-stores
def test_an_address_leads_to_its_store(client: str, role: str, shown: str, at: int, port: int, hosts: Hosts) -> None:
    """From the other host and from the same one, for clients of all kinds."""
    with hosts.publish(client, role, shown, at, port) as publisher:
        address = published(publisher)
        with ExitStack() as stack:
            dials = [
                stack.enter_context(hosts.dial(dialling, address, there))
                for dialling, there in (("stock", 1 - at), ("stock", at), ("native", 1 - at), ("plain", 1 - at))
            ]
            for dial in dials:
                assert dial.output() == "right one\n", (address, dial.errors())


@pytest.mark.parametrize(("client", "port"), [("native", 0), ("python-class", 0), ("plain", 0)])
def test_the_given_host_and_the_port_are_a_name(client: str, port: int, hosts: Hosts) -> None:
    """Of a store whose owner is not on the server's host: clients that can say names are led to it."""
    with hosts.publish(client, "owner", "given host", 1, port) as publisher:
        address = published(publisher)
        for dialling in ("native", "plain"):
            with hosts.dial(dialling, address, 0) as dial:
                assert dial.output() == "right one\n", (address, dial.errors())


@pytest.mark.parametrize("at", [0, 1])
def test_the_workers_of_torchrun(at: int, hosts: Hosts, tmp_path: Path) -> None:
    """On a server that runs already, which need not be the agent's host."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    endpoint = hosts.url.removeprefix("tcp://")
    launch = ["--nnodes=1", "--nproc-per-node=1", "--rdzv-backend=tcpstore", f"--rdzv-endpoint={endpoint}"]
    command = [*hosts.both[at].prefix, sys.executable, "-m", "torch.distributed.run", *launch]
    command += [f"--rdzv-id=job{at}", f"--local-addr={hosts.both[at].address}", str(worker)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path) as torchrun:
        try:
            assert torchrun.stdout is not None
            assert torchrun.stderr is not None
            address = torchrun.stdout.readline().decode().strip()
            reached = hosts.both[at if hosts.durable else 0]  # through the relay, or directly
            assert address.startswith(f"{reached.address}:"), address + torchrun.stderr.read().decode()
            with hosts.dial("stock", address, 1 - at) as dial:
                assert dial.output() == "right one\n", (address, dial.errors())
            port = int(address.rpartition(":")[2])
            done = hosts.both[at].inside(lambda: socket.create_connection((reached.address, port), LIMIT))
            with done:
                done.sendall(HANDSHAKE + set_(b"/done", b"1"))
                assert torchrun.wait(LIMIT) == 0
        finally:
            torchrun.kill()
