"""Arguments: every wrong one raises TypeError or ValueError with its name, before anything is sent."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from client.fakes import proxy_to
from contract.store_kinds import either_client
from support import LIMIT, tcpstore_server
from tcpstore_async import AsyncTCPStore, DistNetworkError, TCPStore
from tcpstore_async.base.coercion import to_seconds


class Index:
    def __index__(self) -> int:
        return 7


NO_TEXT = [5, None, 1.5, memoryview(b"k"), ["k"], object(), "\ud800"]
NO_INT = [1.5, "1", None, b"1", 2**63, -(2**63) - 1]
NO_KEYS = ["text", b"text", bytearray(b"text"), {"a": 1}, 5, None, [5], ["a", None], ["\udfff"]]
NO_TIMEOUT: list[Any] = ["1", b"1", [], object(), math.nan, math.inf, 10**400]

Call = Callable[[Any, Any], Any]

WRONG: list[tuple[str, Call, list[Any]]] = [
    ("key", lambda s, x: s.set(x, "v"), NO_TEXT),
    ("value", lambda s, x: s.set("k", x), NO_TEXT),
    ("key", lambda s, x: s.get(x), NO_TEXT),
    ("key", lambda s, x: s.add(x, 1), NO_TEXT),
    ("amount", lambda s, x: s.add("k", x), NO_INT),
    ("key", lambda s, x: s.compare_set(x, "", ""), NO_TEXT),
    ("expected", lambda s, x: s.compare_set("k", x, ""), NO_TEXT),
    ("desired", lambda s, x: s.compare_set("k", "", x), NO_TEXT),
    ("keys", lambda s, x: s.check(x), NO_KEYS),
    ("keys", lambda s, x: s.wait(x), NO_KEYS),
    ("timeout", lambda s, x: s.wait(["k"], x), NO_TIMEOUT),
    ("key", lambda s, x: s.delete_key(x), NO_TEXT),
    ("key", lambda s, x: s.append(x, "v"), NO_TEXT),
    ("value", lambda s, x: s.append("k", x), NO_TEXT),
    ("keys", lambda s, x: s.multi_get(x), NO_KEYS),
    ("keys", lambda s, x: s.multi_set(x, ["v"]), NO_KEYS),
    ("values", lambda s, x: s.multi_set(["k"], x), NO_KEYS),
    ("key", lambda s, x: s.queue_push(x, "v"), NO_TEXT),
    ("value", lambda s, x: s.queue_push("k", x), NO_TEXT),
    ("key", lambda s, x: s.queue_pop(x), NO_TEXT),
    ("key", lambda s, x: s.queue_pop(x, False), NO_TEXT),
    ("key", lambda s, x: s.queue_len(x), NO_TEXT),
    ("key", lambda s, x: s.barrier(x, 1), NO_TEXT),
    ("world_size", lambda s, x: s.barrier("k", x), NO_INT),
    ("timeout", lambda s, x: s.barrier("k", 1, x), NO_TIMEOUT),
    ("timeout", lambda s, x: s.set_timeout(x), [*NO_TIMEOUT, None]),
]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with tcpstore_server() as server:
        yield server.port


def names(error: BaseException, name: str) -> None:
    assert re.match(rf"{name}(\[\d+\])? (must|has|contains|does not fit)\b", str(error)), str(error)


def test_every_method(port: int) -> None:
    with proxy_to(port) as proxy, TCPStore("127.0.0.1", proxy.port, timeout=LIMIT) as store:
        for name, call, wrong in WRONG:
            for value in wrong:
                with pytest.raises((TypeError, ValueError)) as caught:
                    call(store, value)
                names(caught.value, name)
        assert len(proxy.all_sent()) == 10  # the handshake
        assert store.num_keys() == 0


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (0, 0.0), (-0.0, 0.0), (True, 1.0), (0.0004, 0.0), (1.0005, 1.0), (1e308, 1e10), (timedelta.max, 1e10),
        (-1, -1.0), (-0.0004, -0.001), (-5e-324, -0.001), (-1e308, -1e10), (-math.inf, -1e10), (-(10**400), -1e10),
        (timedelta.min, -1e10), (timedelta(microseconds=-1), -0.001), (-1.0005, -1.0),
    ],
)  # fmt: skip
def test_a_timeout_that_is_negative_is_for_ever(given: Any, seconds: float) -> None:
    found = to_seconds("timeout", given)
    assert found == seconds
    assert (math.copysign(1, found) < 0) == (seconds < 0)
    assert timedelta(seconds=found).total_seconds() == seconds


def test_an_iterator_that_raises(port: int) -> None:
    def keys() -> Iterator[str]:
        yield "k"
        raise KeyError("mine")

    with TCPStore("127.0.0.1", port, timeout=LIMIT) as store:
        with pytest.raises(KeyError, match="mine"):
            store.check(keys())
        assert store.add("fine", 1)
        store.delete_key("fine")


def test_ints(port: int) -> None:
    with TCPStore("127.0.0.1", port, timeout=LIMIT) as store:
        assert store.add("n", True) == 1
        assert store.add("n", Index()) == 8  # type: ignore[arg-type]
        assert store.add("b", 6) == 6
        store.barrier("b", Index())  # type: ignore[arg-type]
        store.delete_key("n")
        store.delete_key("b")


CONSTRUCTOR: list[tuple[str, list[Any]]] = [
    ("port", [-1, 65536, "1", None, 1.5]),
    ("world_size", [1.5, "1", 2**63]),
    ("is_master", [0, 1, None, "True"]),
    ("timeout", [*NO_TIMEOUT, None]),
    ("wait_for_workers", [0, 1, None]),
    ("multi_tenant", [0, 1, None]),
    ("master_listen_fd", ["3", 1.5, b"3"]),
    ("use_libuv", [0, 1, "1"]),
    ("host_name", [None, 5, b"localhost", "a\0b"]),
    ("bind_host", [5, b"localhost", "a\0b"]),
]


@pytest.mark.parametrize(("name", "wrong"), CONSTRUCTOR)
def test_the_constructor(name: str, wrong: list[Any]) -> None:
    for value in wrong:
        options: dict[str, Any] = {"host_name": "127.0.0.1", "port": 0, "is_master": True, "timeout": 5, name: value}
        with pytest.raises((TypeError, ValueError)) as caught:
            TCPStore(**options)
        names(caught.value, name)


def test_world_size_0() -> None:
    with pytest.raises(ValueError, match="TCPStore world size cannot be 0"):
        TCPStore("127.0.0.1", 0, 0, True)


@pytest.mark.slow
def test_signatures_are_pytorchs() -> None:
    """The constructor's arguments are those that PyTorch's binding documents."""
    torch = pytest.importorskip("torch")
    said = torch.distributed.TCPStore.__init__.__doc__
    theirs = re.findall(
        r"(\w+): [^,=]+?(?: = ([^,)]+(?:\([^)]*\))?))?[,)]", said.partition("self")[2].partition("\n")[0]
    )
    ours = inspect.signature(TCPStore.__init__).parameters
    positional = [name for name, one in ours.items() if one.kind is one.POSITIONAL_OR_KEYWORD and name != "self"]
    named = [name for name, _ in theirs if name in positional]
    assert named == positional
    for name, default in theirs:
        if name in ("world_size", "is_master", "wait_for_workers", "multi_tenant", "master_listen_fd"):
            assert str(ours[name].default) == default, name
    assert ours["timeout"].default == timedelta(seconds=300)
    for method in ("queue_pop", "barrier"):
        assert [one.default for one in inspect.signature(getattr(TCPStore, method)).parameters.values()][-1] in (
            True,
            None,
        )


async def test_the_async_store_has_the_same_methods() -> None:
    missing = {"close", "set_timeout", "has_extended_api", "host", "port", "libuvBackend", "timeout"}
    for name, method in inspect.getmembers(TCPStore, inspect.isfunction):
        if name.startswith("_") or name in missing:
            continue
        ours = inspect.signature(method)
        other = inspect.signature(getattr(AsyncTCPStore, name))
        assert [(one.name, one.default) for one in ours.parameters.values()] == [
            (one.name, one.default) for one in other.parameters.values()
        ], name


@pytest.mark.parametrize("client", ["sync", "async"])
def test_a_value_over_the_limit_ends_the_store(client: str, port: int) -> None:
    text = r"the longest request sent was 8388\d+ bytes; .*value exceeds its limit, by default 8388608 bytes"
    with either_client(client) as connect:
        store = connect(port)
        with pytest.raises(DistNetworkError, match=text):
            store.set("k", bytes((8 << 20) + 1))
            store.add("n", 1)
        with pytest.raises(DistNetworkError, match=r"value exceeds its limit"):
            store.add("n", 1)
