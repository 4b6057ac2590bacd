"""Every recorded vector and every case of our own, on sessions in memory, our servers, and PyTorch's as the control.

The control hears PyTorch's answers where ours are mended: so each defect we mend has a test that PyTorch's server
fails. What the extension does is not said to PyTorch's server; the control of it shows why.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest

from conformance.cases import own_cases
from conformance.divergences import MENDED
from conformance.extension import control_cases, extension_cases
from conformance.frames import CANCEL_FETCH, NOT_READY, check, fetch, get, introduce, wait_count
from conformance.link_target import LinkTarget
from conformance.nccl import nccl_cases
from conformance.script import Script
from conformance.single_target import SingleTarget
from conformance.targets import (
    OUR_SERVERS,
    TORCH_SERVERS,
    EngineTarget,
    Servers,
    at_random,
    byte_by_byte,
    play,
    play_to_a_new_server,
    playable,
    servers,
)
from conformance.vectors import LISTS, ROWS, STATES, libuv_vectors
from marks import STOCK_SERVERS, exhaustive
from support import RawPeer, torch_server
from tcpstore_async.base.limits import Limits
from tcpstore_async.base.version import VERSION
from tcpstore_async.observe.history import History
from tcpstore_async.session.identity import build, read_identity
from tcpstore_async.session.store import Store
from tcpstore_async.wire.commands import EXTENSION, JOINS_KEY, SERVER_KEY

VECTORS = libuv_vectors()
STOCK = VECTORS + own_cases() + nccl_cases() + control_cases()
"""What PyTorch's server is told too."""
SCRIPTS = STOCK + extension_cases()
ENGINE_SCRIPTS = [script for script in SCRIPTS if not script.stops_server]

every = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
every_stock = pytest.mark.parametrize("script", STOCK, ids=lambda script: script.name)
over_links = pytest.mark.parametrize("kind", [LinkTarget, SingleTarget])
every_on_the_engine = pytest.mark.parametrize("script", ENGINE_SCRIPTS, ids=lambda script: script.name)
every_in_pieces = pytest.mark.parametrize(
    "script",
    [exhaustive(script) if script.name.endswith("_of_16384") else script for script in ENGINE_SCRIPTS],
    ids=lambda script: script.name,
)


@pytest.fixture(scope="module", params=["uv", pytest.param("threaded", marks=pytest.mark.interpreted)])
def backend(request: pytest.FixtureRequest) -> str:
    return playable(request.param)


@pytest.fixture(scope="module")
def our_servers(backend: str) -> Iterator[Servers]:
    with servers(OUR_SERVERS, backend) as running:
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


@pytest.mark.unmeasured
@every_in_pieces
def test_engine_byte_by_byte(script: Script) -> None:
    target = EngineTarget(byte_by_byte)
    play(script, target)
    target.finish()


@pytest.mark.unmeasured
@every_on_the_engine
def test_engine_in_random_pieces(script: Script) -> None:
    for number in range(6):
        target = EngineTarget(at_random(f"{script.name} {number}"), bulk=number % 2 == 1)
        play(script, target)
        target.finish()


@every_on_the_engine
def test_engine_that_is_observed(script: Script) -> None:
    """A history makes no difference to a peer, even if it forgets all the time."""
    for most_bytes in (2**30, 2048):
        target = EngineTarget(at_random(script.name))
        target.store.observe(History(target.store, most_bytes))
        play(script, target)
        target.finish()


@every_on_the_engine
def test_link_to_an_engine_that_is_observed(script: Script) -> None:
    store = Store(Limits())
    store.observe(History(store))
    target = LinkTarget(store=store)
    play(script, target)
    target.finish()


@every_on_the_engine
@over_links
def test_link(script: Script, kind: type[LinkTarget | SingleTarget]) -> None:
    target = kind()
    play(script, target)
    target.finish()


@pytest.mark.slow
@pytest.mark.unmeasured
@every_in_pieces
@over_links
def test_link_in_random_pieces_that_breaks(script: Script, kind: type[LinkTarget | SingleTarget]) -> None:
    for number in range(2):
        name = f"{script.name} {number}"
        target = kind(at_random(name), random.Random(name))
        play(script, target)
        target.finish()


@pytest.mark.slow
@every
def test_our_server(script: Script, our_servers: Servers, backend: str) -> None:
    play_to_a_new_server(script, our_servers, threads=backend == "threaded")


@pytest.mark.slow
@pytest.mark.interpreted
@every_stock
def test_torch_server(script: Script, torch_servers: Servers) -> None:
    play_to_a_new_server(script, torch_servers, torch=True)


@pytest.mark.parametrize("script", [script for script in STOCK if script.mended], ids=lambda script: script.name)
def test_replies_of_pytorch_differ_where_the_rows_say_so(script: Script) -> None:
    with pytest.raises(AssertionError, match="hears"):
        play(script, EngineTarget(), torch=True)


def _ask_for_value(peer: RawPeer, frame: bytes) -> bytes:
    return peer.read(int.from_bytes(peer.ask(frame, 8), "little"))


@pytest.mark.slow
def test_the_identity_of_our_server(our_servers: Servers, backend: str) -> None:
    """And that each is another one."""
    seen = set()
    for _ in range(2):
        port = our_servers.start()
        with RawPeer(port) as peer:
            raw = _ask_for_value(peer, get(SERVER_KEY))
            identity = read_identity(raw)
            assert identity is not None
            assert json.loads(raw)["server"] == identity.server == "tcpstore_async"
            assert (identity.version, identity.extension, identity.build) == (VERSION, EXTENSION, build())
            assert identity.backend == backend
            assert _ask_for_value(peer, fetch(SERVER_KEY)) == raw
            assert _ask_for_value(peer, get(JOINS_KEY)) == b""
            seen.add(identity.instance)
        our_servers.stop(port)
    assert len(seen) == 2


@pytest.mark.parametrize("theirs", STOCK_SERVERS)
def test_pytorchs_servers_have_no_extension(theirs: str) -> None:
    """What a client that asks first relies on. (The legacy server closes for GET of a missing key.)"""
    with torch_server(theirs) as port:
        with RawPeer(port) as peer:
            peer.ping()
            assert peer.ask(check(SERVER_KEY), 1) == NOT_READY
            assert peer.ask(check(JOINS_KEY), 1) == NOT_READY
        for frame in (fetch(b"/k"), CANCEL_FETCH, wait_count(b"/k", 0), introduce((b"rank", b"0"))):
            with RawPeer(port) as peer:
                peer.ping()
                peer.send(frame[:1])
                assert peer.closed()


def test_tables_name_only_what_exists() -> None:
    names = [script.name for script in SCRIPTS]
    assert len(set(names)) == len(names)
    recorded = {script.name for script in VECTORS}
    for table in (MENDED, ROWS, STATES, LISTS):
        assert set(table) <= recorded


def test_every_recorded_libuv_vector_is_played() -> None:
    assert len(VECTORS) == 97 + 81
    assert {script.name for script in VECTORS if script.mended} == set(MENDED)
