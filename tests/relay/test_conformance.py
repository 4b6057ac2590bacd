"""Every recorded vector and every case of our own, through a relay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.script import Script
from conformance.targets import TORCH_SERVERS, Servers, play, play_to_a_new_server, servers
from conformance.test_vectors import SCRIPTS, STOCK
from faults.fault_helpers import program
from relay.relayed import OUR_SERVERS_BEHIND_RELAYS, RELAYS, RelayedTarget, Relays


@pytest.fixture(scope="module")
def our_servers() -> Iterator[Servers]:
    with servers(OUR_SERVERS_BEHIND_RELAYS, "uv") as running:
        yield running


@pytest.fixture(scope="module")
def torch_servers() -> Iterator[Relays]:
    with servers(TORCH_SERVERS) as running, program(RELAYS) as process:
        yield Relays(process, running)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_our_server(script: Script, our_servers: Servers) -> None:
    play_to_a_new_server(script, our_servers)


@pytest.mark.interpreted
@pytest.mark.parametrize("script", STOCK, ids=lambda script: script.name)
def test_torch_server(script: Script, torch_servers: Relays) -> None:
    with RelayedTarget(torch_servers) as target:
        play(script, target, torch=True)
