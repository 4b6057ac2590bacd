"""Groups of ranks on two hosts between which one port is open: that of the server, on one of them.

What a rank sends to other ranks, gloo sends over a second network, which no store uses.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

import networks
from faults.fault_helpers import server_under
from names import test_addresses_travel as travel
from support import LIMIT
from torch_forker import Program

pytest.importorskip("torch")


PORT = 29600
"""In the address of the group. Nothing listens there."""

RANKS = 4

RANK = """
import sys
sys.path.insert(0, sys.argv[1])
from networks import enter
enter(sys.argv[2])  # before anything has a thread or a socket
from datetime import timedelta
import torch
import torch.distributed as dist

client, address, rank, world, seconds = sys.argv[3], sys.argv[4], *map(int, sys.argv[5:])
if client != "stock":
    import tcpstore_async.torch
    tcpstore_async.torch.install(client=client)
for number in range(3):
    timeout = timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=world, timeout=timeout)
    total = torch.tensor([rank])
    dist.all_reduce(total)
    assert total.item() == sum(range(world))
    dist.destroy_process_group()
print("done")
"""


class Hosts(NamedTuple):
    both: tuple[networks.Network, networks.Network]
    url: str
    """Of the server, on the first one."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if reason := networks.why_not():
        pytest.skip(reason)
    with networks.two_networks() as both:
        networks.join_for_data(both)
        with server_under(both[0].prefix, "--host", both[0].address) as server:
            networks.close_all_but(server.port, both)
            yield Hosts(both, f"tcp://{both[0].address}:{server.port}")


def start(hosts: Hosts, client: str, owner: int, rank: int, seconds: float) -> Program:
    """Start a rank: half of them are on the host of rank 0, which owns the store, and half on the other."""
    address = f"{hosts.both[owner].address}:{PORT}"
    env = {"GLOO_SOCKET_IFNAME": networks.DATA_INTERFACE}
    if client != "stock":
        env["TCPSTORE_SERVER_URL"] = hosts.url
    here = hosts.both[(owner + rank) % 2]
    return Program(RANK, Path(__file__).parent.parent, here.path, client, address, rank, RANKS, int(seconds), env=env)


def reaches(source: networks.Network, destination: networks.Network, port: int) -> bool:
    def connect() -> bool:
        try:
            socket.create_connection((destination.address, port), LIMIT).close()
        except OSError:
            return False
        return True

    return source.inside(connect)


@pytest.mark.parametrize(("client", "owner"), [
    ("native", 0), ("python", 1), pytest.param("native", 1, marks=pytest.mark.exhaustive),
    pytest.param("python", 0, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_groups_form(client: str, owner: int, hosts: Hosts) -> None:
    with ExitStack() as stack:
        ranks = [stack.enter_context(start(hosts, client, owner, rank, LIMIT)) for rank in range(RANKS)]
        for rank in ranks:
            assert rank.output() == "done\n", rank.errors()


@pytest.mark.parametrize("owner", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_pytorch_alone_cannot(owner: int, hosts: Hosts) -> None:
    with start(hosts, "stock", owner, 0, LIMIT), start(hosts, "stock", owner, 1, 2) as rank:
        status, errors = rank.wait(), rank.errors()
    assert status != 0
    assert "Network is unreachable" in errors


def test_no_other_port_is_open(hosts: Hosts) -> None:
    first, second = hosts.both
    server = int(hosts.url.rpartition(":")[2])
    with ExitStack() as stack:
        for one in hosts.both:
            stack.enter_context(one.inside(lambda: socket.create_server(("", PORT))))
        stack.enter_context(second.inside(lambda: socket.create_server(("", server))))
        assert all(reaches(one, one, PORT) for one in hosts.both)
        assert reaches(second, first, server)
        assert not reaches(second, first, PORT)
        assert not reaches(first, second, PORT)
        assert not reaches(first, second, server)


# quirk: named-stores
def test_an_address_is_of_use_on_its_host_only(hosts: Hosts) -> None:
    """For PyTorch's client. The log says so, and the error of those of ours that dial it elsewhere."""
    programs = travel.Hosts(hosts.both, hosts.url)
    with ExitStack() as stack:
        native = stack.enter_context(programs.publish("native", "owner", "store", 1, travel.PORT))
        address = travel.published(native)
        assert address.startswith("127.0.0.1:")
        log = native.errors()
        assert "has an address on loopback here, which is of no use to other hosts" in log
        assert "Network is unreachable" in log
        same = stack.enter_context(programs.dial("stock", address, 1))
        assert same.output() == "right one\n", same.errors()
        elsewhere = stack.enter_context(programs.dial("plain", address, 0, 1.0))
        assert elsewhere.wait() != 0
        assert "an address on loopback means another store on each host" in elsewhere.errors()
        python = stack.enter_context(programs.publish("python-class", "owner", "store", 1, travel.PORT + 1))
        named = stack.enter_context(programs.dial("plain", travel.published(python), 0))
        assert named.output() == "right one\n", named.errors()
