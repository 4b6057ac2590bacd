"""The real clients lose nothing on real servers behind a bad network."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from simulation.proxied import perform
from support import tcpstore_server

PORTION = 15


@pytest.fixture(scope="module", params=["uv", "threaded"])
def server(request: pytest.FixtureRequest) -> Iterator[int]:
    with tcpstore_server("--backend", request.param) as server:
        yield server.port


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        *range(0, 3 * PORTION, PORTION),
        *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(3 * PORTION, 8 * PORTION, PORTION)),
    ],
)
def test_runs_have_no_finding(server: int, first: int) -> None:
    assert sum(perform(server, seed).losses for seed in range(first, first + PORTION)) > 0
