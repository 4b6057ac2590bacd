"""Every recorded vector and every case of our own, through a relay."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from conformance.script import Script
from conformance.targets import TORCH_SERVERS, Servers, SocketTarget, play, servers
from conformance.test_vectors import SCRIPTS, STOCK
from faults.fault_helpers import program
from relay.relayed import OUR_SERVERS_BEHIND_RELAYS, RELAYS, RelayedTarget, Relays


@pytest.fixture(scope="module", params=["uv", pytest.param("threaded", marks=pytest.mark.exhaustive)])
def backend(request: pytest.FixtureRequest) -> str:
    which: str = request.param
    if which == "threaded" and sys.platform != "linux":
        pytest.skip("when a server with threads is done is seen in /proc")
    return which


@pytest.fixture(scope="module")
def our_servers(backend: str) -> Iterator[Servers]:
    with servers(OUR_SERVERS_BEHIND_RELAYS, backend) as running:
        yield running


@pytest.fixture(scope="module")
def torch_servers() -> Iterator[Relays]:
    with servers(TORCH_SERVERS) as running, program(RELAYS) as process:
        yield Relays(process, running)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_our_server(script: Script, our_servers: Servers, backend: str) -> None:
    port = our_servers.start()
    threads_of = our_servers.process.pid if backend == "threaded" else None
    with SocketTarget(port, lambda: our_servers.stop(port), threads_of) as target:
        play(script, target)


@pytest.mark.parametrize("script", STOCK, ids=lambda script: script.name)
def test_torch_server(script: Script, torch_servers: Relays) -> None:
    with RelayedTarget(torch_servers) as target:
        play(script, target, torch=True)
