"""Methods that are declared once for all stores, with JOIN for an example: a command of the extension with a key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support import LIMIT, tcpstore_server
from tcpstore_async import AsyncTCPStore, HashStore, PrefixStore, Store, TCPStore
from tcpstore_async.base.coercion import Text, to_bytes
from tcpstore_async.base.keys import stored_key
from tcpstore_async.client.methods import Call, Method
from tcpstore_async.wire.commands import BY_METHOD
from tcpstore_async.wire.values import pack


@Method
def join(self: Any, key: Text, token: Text = "") -> Call[str]:
    """Count a rank."""
    return (BY_METHOD["join"], (stored_key(key), pack(to_bytes("token", token)))), str


class Joining(TCPStore):
    join = join.function


class AsyncJoining(AsyncTCPStore):
    join = join.coroutine


class Viewed(HashStore):
    """Returns the arguments."""

    def join(self, *given: Any, **named: Any) -> Any:
        return given, named


class View(PrefixStore):
    join = join.function


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with tcpstore_server() as server:
        yield server.port


def test_of_a_synchronous_store(port: int) -> None:
    with Joining("127.0.0.1", port, timeout=LIMIT) as store:
        assert store.join("sync", "a") == "1"
        assert store.join(key="sync", token="b") == "2"
        assert store.join(b"sync") == "2"
        assert store.get("sync") == b"2"


async def test_of_the_async_client(port: int) -> None:
    async with await AsyncJoining.connect("127.0.0.1", port, timeout=LIMIT) as store:
        assert isinstance(store, AsyncJoining)
        assert await store.join("async", "a") == "1"
        assert await store.join(key="async", token="b") == "2"
        with pytest.raises(TypeError, match="key must be"):
            await store.join(3)


@pytest.mark.parametrize("given", [(), ("k", "t", 3)])
def test_wrong_numbers_of_arguments(port: int, given: tuple[Any, ...]) -> None:
    with Joining("127.0.0.1", port, timeout=LIMIT) as store, pytest.raises(TypeError, match="argument"):
        store.join(*given)


def test_of_a_view() -> None:
    view = View("p", Viewed())
    assert view.join("k", "t") == (("p/k", "t"), {})
    assert view.join(key=b"k", token="t") == ((), {"key": b"p/k", "token": "t"})
    assert view.join("k", "t", 3) == (("p/k", "t", 3), {}), "the store below says that it is too much"
    with pytest.raises(TypeError, match="key must be"):
        view.join(3)


def test_of_a_store_that_does_not_have_it() -> None:
    with pytest.raises(NotImplementedError, match="this store has no join"):
        join.function(HashStore(), "k")
    with pytest.raises(NotImplementedError, match="this store has no num_keys"):
        Store().num_keys()
