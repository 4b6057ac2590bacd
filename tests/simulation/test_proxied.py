"""The real clients lose nothing on real servers behind a bad network."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from simulation.proxied import perform
from support import tcpstore_server

pytestmark = [pytest.mark.slow, pytest.mark.interpreted]


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[int]:
    with tcpstore_server("--backend", request.param) as server:
        yield server.port


@pytest.mark.parametrize(
    ("server", "first"), [("uv", 0), ("threaded", 15), ("uv", 30), ("threaded", 30)], indirect=["server"]
)
def test_runs_have_no_finding(server: int, first: int) -> None:
    assert sum(perform(server, seed).losses for seed in range(first, first + 15)) > 0
