"""Fixtures of the contract tests: an empty store of every kind for every test."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from contract.store_kinds import KINDS, Kind, Maker
from support import LIMIT
from tcpstore_async import Store


def _marks(kind: Kind) -> list[pytest.MarkDecorator]:
    """Leave kinds that reach the same code in other ways out of `make test` and the compiled build."""
    if kind.name in ("hash", "file", "prefix-prefix-hash", "tcp-thread-uv", "tcp-thread-threaded", "async"):
        return []
    rare = kind.name in ("prefix-hash", "tcp-served-uv", "tcp-served-threaded", "tcp-process-threaded")
    return [pytest.mark.slow, pytest.mark.interpreted, *([pytest.mark.exhaustive] if rare else [])]


@pytest.fixture(scope="module", params=[pytest.param(kind, id=kind.name, marks=_marks(kind)) for kind in KINDS])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture(scope="module")
def maker(kind: Kind) -> Iterator[Maker]:
    with ExitStack() as stack:
        yield kind.start(stack)
        gc.collect()


@pytest.fixture
def make(maker: Maker) -> Iterator[Maker]:
    """Make stores on the same keys; close them after the test."""
    with ExitStack() as stack:

        def made() -> Store:
            store = stack.enter_context(maker())
            store.set_timeout(LIMIT)
            return store

        yield made


@pytest.fixture
def store(make: Maker) -> Store:
    return make()


_numbers = iter(range(1_000_000))


@pytest.fixture
def name() -> Callable[[str], str]:
    """Make keys that no other test uses."""
    number = next(_numbers)
    return lambda text: f"{text}-{number}"


@pytest.fixture
def key(name: Callable[[str], str]) -> str:
    return name("key")
