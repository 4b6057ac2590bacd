"""Worlds of stock ranks on two hosts: each rank connects to the relay of its host, all relays to one server."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from support import Server, tcpstore_relay, tcpstore_server

Results = Callable[..., list[Any]]

AGENT_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
"""Makes rank 0 a client too, as under torchrun."""


class Hosts:
    """Two hosts, with a relay each, and a server elsewhere."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.running: list[Server] = []

    def start(self) -> dict[str, Any]:
        """Start a server and its relays; return the options of a job on them."""
        server = self.stack.enter_context(tcpstore_server())
        self.relays = [self.stack.enter_context(tcpstore_relay(server.port)) for _ in range(2)]
        self.running += [*self.relays, server]
        return {"ports": [relay.port for relay in self.relays]}


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Afterwards no session is left: whoever is asked to stop ends by itself, relays first."""
    with ExitStack() as stack:
        hosts = Hosts(stack)
        yield hosts
        for one in hosts.running:
            assert one.stop(signal.SIGTERM) == 0
            assert "closed the connection" not in one.log()


def expected(rank: int, ranks: list[int]) -> dict[str, Any]:
    """What `every_collective` gives."""
    first, last, place = ranks[0], ranks[-1], ranks.index(rank)
    product = 1.0
    for n in ranks:
        product *= n
    return {
        "all_reduce SUM": sum(ranks),
        "all_reduce MAX": last,
        "all_reduce PRODUCT": product,
        "broadcast": last,
        "reduce": sum(ranks) if rank == first else None,
        "all_gather": ranks,
        "gather": ranks if rank == last else None,
        "scatter": 10.0 * rank,
        "all_to_all_single": ranks,
        "send, recv": ranks[place - 1],
        "all_gather_object": [{"rank": n} for n in ranks],
        "broadcast_object_list": [first],
        "async_op": sum(ranks),
    }


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_every_collective_of_gloo(results: Results, hosts: Hosts, world: int) -> None:
    found = results("collectives", world, "env", fresh=hosts.start, env=AGENT_STORE)
    for rank, one in enumerate(found):
        assert one["client"] == ["torch._C._distributed_c10d", "127.0.0.1", hosts.relays[rank % 2].port]
        assert one["world"] == expected(rank, list(range(world)))
        assert one.get("others") == (expected(rank, list(range(1, world))) if rank else None)


def test_ddp_trains_to_the_same_losses_as_without_relays(results: Results, hosts: Hosts) -> None:
    direct = results("train", 4)
    assert results("train", 4, "env", fresh=hosts.start, env=AGENT_STORE) == direct
