"""Every recorded vector and every case of our own, on the pure engine, on our server, and on PyTorch's as the control.

The control hears PyTorch's answers where ours are mended: so each defect we mend has a test that PyTorch's server
fails.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.cases import own_cases
from conformance.mended import MENDED
from conformance.script import Script
from conformance.targets import (
    OUR_SERVERS,
    TORCH_SERVERS,
    EngineTarget,
    Servers,
    SocketTarget,
    at_random,
    byte_by_byte,
    play,
    servers,
)
from conformance.vectors import LISTS, STATES, libuv_vectors

VECTORS = libuv_vectors()
SCRIPTS = VECTORS + own_cases()
ENGINE_SCRIPTS = [script for script in SCRIPTS if not script.stops_server]

every = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
every_on_the_engine = pytest.mark.parametrize("script", ENGINE_SCRIPTS, ids=lambda script: script.name)


@pytest.fixture(scope="module")
def our_servers() -> Iterator[Servers]:
    with servers(OUR_SERVERS) as running:
        yield running


@pytest.fixture(scope="module")
def torch_servers() -> Iterator[Servers]:
    with servers(TORCH_SERVERS) as running:
        yield running


@every_on_the_engine
def test_engine(script: Script) -> None:
    target = EngineTarget()
    play(script, target)
    target.finish()


@every_on_the_engine
def test_engine_byte_by_byte(script: Script) -> None:
    target = EngineTarget(byte_by_byte)
    play(script, target)
    target.finish()


@every_on_the_engine
def test_engine_in_random_pieces(script: Script) -> None:
    for number in range(6):
        target = EngineTarget(at_random(f"{script.name} {number}"), bulk=number % 2 == 1)
        play(script, target)
        target.finish()


def _play_to_a_new_server(script: Script, running: Servers, *, torch: bool) -> None:
    port = running.start()
    with SocketTarget(port, lambda: running.stop(port)) as target:
        play(script, target, torch=torch)


@every
def test_our_server(script: Script, our_servers: Servers) -> None:
    _play_to_a_new_server(script, our_servers, torch=False)


@every
def test_torch_server(script: Script, torch_servers: Servers) -> None:
    _play_to_a_new_server(script, torch_servers, torch=True)


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script.mended], ids=lambda script: script.name)
def test_the_answers_of_pytorch_are_not_ours(script: Script) -> None:
    with pytest.raises(AssertionError, match="hears"):
        play(script, EngineTarget(), torch=True)


def test_tables_name_only_what_exists() -> None:
    names = [script.name for script in SCRIPTS]
    assert len(set(names)) == len(names)
    recorded = {script.name for script in VECTORS}
    for table in (MENDED, STATES, LISTS):
        assert set(table) <= recorded


def test_every_recorded_libuv_vector_is_played() -> None:
    assert len(VECTORS) == 97 + 81
    assert {script.name for script in VECTORS if script.mended} == set(MENDED)
