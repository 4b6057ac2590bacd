"""Worlds of stock PyTorch processes on our server: gloo groups, worlds that count their workers, blocked ranks."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from marks import thinned
from support import LIMIT, RawPeer, tcpstore_relay, tcpstore_server
from tcpstore_async.server.backends import BACKENDS
from versions import VERSION

pytestmark = pytest.mark.skipif(not VERSION, reason="the torch extra is not installed")

Run = Callable[[str, int], list[Any]]


@pytest.fixture(scope="module")
def ranks() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("ranks.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    yield process
    process.stdin.close()
    process.wait(LIMIT)
    process.stdout.close()


@pytest.fixture(params=[*BACKENDS, "relays"])
def run(ranks: subprocess.Popen[str], request: pytest.FixtureRequest) -> Iterator[Run]:
    """Runs a scenario on a fresh server and returns what its ranks return; every other rank has another relay."""
    assert ranks.stdin is not None
    assert ranks.stdout is not None
    relayed = request.param == "relays"
    with ExitStack() as stack:
        server = stack.enter_context(tcpstore_server("--backend", "uv" if relayed else request.param))
        relays = [stack.enter_context(tcpstore_relay(server.port)) for _ in range(2)] if relayed else []
        ports = [relay.port for relay in relays] or [server.port]

        def run(scenario: str, world: int) -> list[Any]:
            assert ranks.stdin is not None
            assert ranks.stdout is not None
            print(json.dumps({"scenario": scenario, "world": world, "ports": ports}), file=ranks.stdin, flush=True)
            answers = json.loads(ranks.stdout.readline())
            errors = [answer["error"] for answer in answers if "error" in answer]
            assert not errors, "\n".join(errors)
            return [answer["result"] for answer in answers]

        yield run
        with RawPeer(server.port) as peer:
            peer.ping()
        assert "closed the connection" not in server.log()


SCENARIOS = ["group", "group_with_store_barrier", "group_with_debug", "group_with_store_v2", "stock_world"]


@pytest.mark.parametrize(
    ("run", "scenario", "world"),
    thinned(
        product([*BACKENDS, "relays"], SCENARIOS, [2, 4]),
        [
            *product(["uv"], SCENARIOS, [4]),
            *product(["threaded"], SCENARIOS, [2]),
            *product(["relays"], ["group_with_store_barrier", "group_with_store_v2"], [4]),
        ],
    ),
    indirect=["run"],
)
def test_a_gloo_group(run: Run, scenario: str, world: int) -> None:
    for rank, (total, paired, gathered) in enumerate(run(scenario, world)):
        assert total == sum(range(1, world + 1))
        assert paired == (30.0 if rank < 2 else 10.0 * (rank + 1))
        assert gathered == list(range(world))


@pytest.mark.skipif(VERSION < (2, 7), reason="before 2.7 PyTorch's master insists on its port")
@pytest.mark.parametrize("world", [1, 4])
def test_a_master_that_waits_for_its_workers(run: Run, world: int) -> None:
    assert all(joined >= 1 for joined in run("master_waits", world))


def test_ranks_that_block_are_woken_by_another(run: Run) -> None:
    assert run("blocked", 8) == ["woke", "got", None, "item", None, "a", "3", ["x", "y"]]
