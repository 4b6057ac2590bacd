"""PyTorch's own client, unchanged, through every method against our server, which runs in another process.

The same calls on PyTorch's own libuv server are the control: a test that fails there says something wrong.
"""

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from support import Server, tcpstore_relay, tcpstore_server, torch_server
from tcpstore_async.server.backends import BACKENDS
from versions import VERSION, methods, needs, timeout_message

torch = pytest.importorskip("torch", reason="the torch extra is not installed")
dist = torch.distributed

SHORT = timedelta(milliseconds=50)
MINUTE = timedelta(seconds=60)

NAMES = ["", "/", "a", "b", "b/c", "empty", "inner/outer/b", "inner/outer/k", "inner/outer/n", "k", "n", "q", "z", "zz"]
NAMES += ["\u00fc", "key \u00fc\U0001f600", *(f"key {i}" for i in range(3000))]
"""What the tests write, for a client that cannot list it."""


@pytest.fixture(scope="module", params=[*BACKENDS, "PyTorch's", "relay", "relay to PyTorch's"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    if request.param == "PyTorch's":
        with torch_server() as found:
            yield found
    elif request.param == "relay to PyTorch's":
        with torch_server() as found, tcpstore_relay(found) as relay:
            yield relay.port
    else:
        relayed = request.param == "relay"
        with tcpstore_server("--backend", "uv" if relayed else request.param) as server:
            if relayed:
                with tcpstore_relay(server.port) as relay:
                    yield relay.port
            else:
                yield server.port
            assert "closed the connection" not in server.log()


@pytest.fixture(params=BACKENDS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of ours, for one test."""
    with tcpstore_server("--backend", request.param) as running:
        yield running


@pytest.fixture(scope="module", params=[True, False], ids=["libuv flag", "legacy flag"])
def libuv(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def client(port: int, libuv: bool) -> Any:
    """One for the module: PyTorch's server looks the names of its peers up, which may take 5 s for each."""
    return dist.TCPStore("127.0.0.1", port, None, False, MINUTE, wait_for_workers=False, use_libuv=libuv)


@pytest.fixture
def store(client: Any) -> Iterator[Any]:
    """A client on an empty store."""
    assert client.num_keys() == 0
    client.set_timeout(MINUTE)
    yield client
    client.set_timeout(MINUTE)
    if "list_keys" in methods():
        assert all(client.delete_key(key) for key in client.list_keys())
    else:
        for key in NAMES:
            client.delete_key(key)


def test_set_get(store: Any) -> None:
    assert store.set("k", "text") is None
    assert store.get("k") == b"text"
    store.set("k", b"\x00\xff" * 1000)
    assert store.get("k") == b"\x00\xff" * 1000
    store.set("", "")
    assert store.get("") == b""
    store.set("key \u00fc\U0001f600", "v")
    assert store.get("key \u00fc\U0001f600") == b"v"


@pytest.mark.parametrize("size", [1, 1000, 8192, 65_536, 1 << 20, 8 << 20])
def test_values_of_every_size(store: Any, size: int) -> None:
    value = bytes(i * 7 % 256 for i in range(256)) * (size // 256 + 1)
    store.set("k", value[:size])
    assert store.get("k") == value[:size]
    assert store.compare_set("k", value[:size], "short") == b"short"


def test_add(store: Any) -> None:
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.get("n") == b"-2"
    store.set("n", " 41 apples")
    assert store.add("n", 1) == 42
    assert store.add("n", 2**63 - 1) == -(2**63) + 41


def test_compare_set(store: Any) -> None:
    assert store.compare_set("k", "expected", "desired") == b"expected"
    assert not store.check(["k"])
    assert store.compare_set("k", "", "first") == b"first"
    assert store.compare_set("k", "other", "second") == b"first"
    assert store.compare_set("k", "first", "second") == b"second"
    assert store.get("k") == b"second"


def test_check(store: Any) -> None:
    assert store.check([])
    assert not store.check(["a"])
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.check(["a", "b"])
    assert not store.check(["a", "b", "c"])
    store.multi_set([f"key {i}" for i in range(3000)], [""] * 3000)
    assert store.check([f"key {i}" for i in range(3000)])


def test_delete_key_and_num_keys(store: Any) -> None:
    store.set("a", "1")
    store.set("b", "2")
    assert store.num_keys() == 2
    assert store.delete_key("a") is True
    assert store.delete_key("a") is False
    assert store.num_keys() == 1


def test_append(store: Any) -> None:
    for part in ("one", " two", "", " three"):
        store.append("k", part)
    assert store.get("k") == b"one two three"
    store.append("empty", "")
    assert store.get("empty") == b""


def test_multi(store: Any) -> None:
    names = [f"key {i}" for i in range(1000)]
    store.multi_set(names, [str(i) * (i % 50) for i in range(1000)])
    assert store.multi_get(names) == [(str(i) * (i % 50)).encode() for i in range(1000)]
    assert store.multi_get([]) == []
    store.multi_set([], [])
    with pytest.raises(dist.DistStoreError if VERSION >= (2, 7) else RuntimeError, match="must be of same size"):
        store.multi_set(["a"], [])


@needs("list_keys")
def test_list_keys(store: Any) -> None:
    assert store.list_keys() == []
    names = {"a", "b/c", "", "/", "\u00fc"}
    for name in names:
        store.set(name, "")
    assert sorted(store.list_keys()) == sorted(names)


@needs("queue_pop")
def test_queues(store: Any, libuv: bool) -> None:
    if not libuv:
        for method, *arguments in (["queue_push", "q", "x"], ["queue_pop", "q", False], ["queue_len", "q"]):
            with pytest.raises(NotImplementedError, match="queues not implemented on legacy TCPStore backend"):
                getattr(store, str(method))(*arguments)
        return
    assert store.queue_len("q") == 0
    for item in ("one", b"two", ""):
        store.queue_push("q", item)
    assert store.queue_len("q") == 3
    assert store.check(["q"])
    assert store.num_keys() == 0
    assert "list_keys" not in methods() or store.list_keys() == []
    assert store.queue_pop("q") == b"one"
    assert store.queue_pop("q", block=True) == b"two"
    assert store.queue_pop("q", block=False) == b""
    assert not store.check(["q"])
    with pytest.raises(dist.QueueEmptyError, match="queue is empty"):
        store.queue_pop("q", block=False)


@needs("queue_pop")
def test_queue_pop_gives_up(store: Any, libuv: bool) -> None:
    if not libuv:
        pytest.skip("no queues with this flag")
    store.set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError, match=r"wait timeout after 50ms, keys: /q$"):
        store.queue_pop("q")
    store.queue_push("q", "late")
    assert store.queue_pop("q") == b"late"


def test_wait(store: Any) -> None:
    store.wait([])
    store.set("a", "1")
    store.wait(["a"])
    store.wait(["a"], MINUTE)
    store.wait(["a", "a"], 60.0)


@pytest.mark.parametrize("timeout", [timedelta(milliseconds=50), 0.05, timedelta(0), 0.0])
def test_wait_gives_up_and_the_connection_goes_on(store: Any, timeout: Any) -> None:
    store.set("a", "1")
    text = "wait timeout after " + ("50ms" if timeout else "0ms") + r", keys: /a, /zz$"
    for _ in range(3):
        with pytest.raises(dist.DistStoreError, match=timeout_message(text)):
            store.wait(["a", "zz"], timeout)
        assert store.add("n", 1) > 0
    store.set("zz", "1")
    store.wait(["a", "zz"], MINUTE)


@pytest.mark.parametrize("call", ["get", "multi_get", "wait"])
def test_the_timeout_of_the_store(store: Any, call: str) -> None:
    store.set_timeout(SHORT)
    assert store.timeout == SHORT
    asked = "zz" if call == "get" else ["zz", "z"]
    keys = "/zz" if call == "get" else "/zz, /z"
    with pytest.raises(dist.DistStoreError, match=timeout_message(f"^wait timeout after 50ms, keys: {keys}$")):
        getattr(store, call)(asked)
    store.multi_set(["zz", "z"], ["v", "w"])
    getattr(store, call)(asked)


@needs("barrier")
def test_barrier(store: Any) -> None:
    store.barrier("alone", 1)
    with pytest.raises(dist.DistStoreError, match=r"^barrier timeout after 50ms, key: pair$"):
        store.barrier("pair", 2, SHORT)
    assert store.get("pair") == b"1"
    store.clone().barrier("pair", 2)
    store.barrier("pair", 2)
    assert store.get("pair") == b"3"


def test_the_rest(store: Any, port: int, libuv: bool) -> None:
    assert store.has_extended_api()
    assert (store.host, store.port, store.libuvBackend) == ("127.0.0.1", port, libuv)
    if VERSION >= (2, 5):
        assert re.match(r"TCPStore\(client=TCPClient\(SocketImpl\(fd=\d+, ", repr(store))


@needs("clone")
def test_clone(store: Any, libuv: bool) -> None:
    clone = store.clone()
    clone.set("k", "v")
    assert store.get("k") == b"v"
    assert isinstance(clone, dist.TCPStore)
    assert (clone.port, clone.timeout, clone.libuvBackend) == (store.port, store.timeout, libuv)
    del clone
    assert store.get("k") == b"v"


def test_prefix_store(store: Any, libuv: bool) -> None:
    prefixed = dist.PrefixStore("outer", dist.PrefixStore("inner", store))
    prefixed.set("k", "v")
    assert store.get("inner/outer/k") == b"v"
    assert prefixed.get("k") == b"v"
    assert prefixed.add("n", 2) == 2
    assert prefixed.compare_set("k", "v", "w") == b"w"
    prefixed.append("k", "x")
    assert prefixed.multi_get(["k", "n"]) == [b"wx", b"2"]
    prefixed.multi_set(["a", "b"], ["1", "2"])
    assert prefixed.check(["a", "b"])
    prefixed.wait(["a"], MINUTE)
    assert prefixed.num_keys() == store.num_keys() == 4
    assert prefixed.delete_key("a")
    if "list_keys" in methods():
        assert sorted(prefixed.list_keys()) == ["b", "k", "n"]
    prefixed.set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError, match=timeout_message(r"keys: /inner/outer/zz$")):
        prefixed.get("zz")
    prefixed.set_timeout(MINUTE)
    if "barrier" in methods():
        prefixed.barrier("b1", 1)
        assert store.check(["inner/outer/b1/last_member"])
    if "clone" in methods():
        assert prefixed.clone().get("k") == b"wx"
    if libuv and "queue_pop" in methods():
        prefixed.queue_push("q", "item")
        assert store.queue_len("inner/outer/q") == 1
        assert prefixed.queue_pop("q") == b"item"


def test_the_workers_are_counted(server: Server) -> None:
    """A client with a world size announces itself; the counter is a key without a slash."""
    arguments = ("127.0.0.1", server.port)
    stores = [dist.TCPStore(*arguments, 3, False, MINUTE) for _ in range(3)]
    assert stores[0].num_keys() == 1
    assert "list_keys" not in methods() or stores[0].list_keys() == []
    for store in stores:
        store.set("k", "v")
    assert "list_keys" not in methods() or stores[0].list_keys() == ["k"]
    quiet = dist.TCPStore(*arguments, 3, False, MINUTE, wait_for_workers=False)
    assert quiet.num_keys() == 2
