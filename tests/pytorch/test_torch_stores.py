"""Our stores as PyTorch sees them: through its C++ side, with its exceptions, under its timeouts, for long."""

from __future__ import annotations

import gc
import inspect
import os
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist
from torch.distributed.elastic.utils import store as elastic

import tcpstore_async
import tcpstore_async.torch as ours
from server.test_auth import KEY_LINE, KEYS
from support import LIMIT, secret_file, tcpstore_server
from tcpstore_async.torch import stores
from versions import methods, needs, timeout_message

pytestmark = pytest.mark.measured

elastic_barrier: Any = elastic.barrier

MINUTE = timedelta(seconds=60)
SHORT = timedelta(milliseconds=50)

KINDS = ["tcp", "file", "hash", "prefix", "prefix of cpp"]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with tcpstore_server() as server:
        yield server.port


_numbers = iter(range(1_000_000))


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, port: int, tmp_path: Path) -> Iterator[Any]:
    name = f"part {next(_numbers)}"
    made: Any
    if request.param == "file":
        made = ours.FileStore(str(tmp_path / "f"), 1)
    elif request.param == "hash":
        made = ours.HashStore()
    elif request.param == "prefix of cpp":
        cpp = dist.TCPStore("127.0.0.1", port, None, False, MINUTE, wait_for_workers=False)
        made = ours.PrefixStore(name, cpp)
    else:
        below = ours.TCPStore("127.0.0.1", port, timeout=LIMIT)
        made = ours.PrefixStore(name, below, owns=True)
        made = made if request.param == "prefix" else below
    with made:
        yield made


@pytest.fixture
def cpp(store: Any) -> Any:
    """PyTorch's C++ PrefixStore over ours: what it does is what C++ does."""
    return dist.PrefixStore(f"cpp {next(_numbers)}", store)


def test_every_method_through_cpp(cpp: Any, store: Any) -> None:
    before = cpp.num_keys()
    cpp.set("k", b"\x00v\xff")
    assert cpp.get("k") == b"\x00v\xff"
    assert cpp.compare_set("k", b"\x00v\xff", "w") == b"w"
    assert cpp.add("n", 3) == 3
    cpp.append("k", "x")
    cpp.multi_set(["a", "b"], ["1", "2"])
    assert cpp.multi_get(["k", "a", "b"]) == [b"wx", b"1", b"2"]
    assert cpp.check(["a", "b"])
    assert not cpp.check(["a", "zz"])
    cpp.wait(["a"])
    cpp.wait(["a"], MINUTE)
    assert cpp.num_keys() >= before + 4
    assert cpp.delete_key("a")
    assert not cpp.check(["a"])
    assert cpp.has_extended_api() is store.has_extended_api()
    if "barrier" in methods():
        cpp.barrier("meet", 1)
    if "clone" in methods():
        assert cpp.clone().get("k") == b"wx"


def test_every_method_from_python(store: Any) -> None:
    if below_is_theirs(store) and "list_keys" not in methods():
        pytest.skip("PyTorch has all methods since 2.10")
    store.set("k", "v")
    assert store.get("k") == b"v"
    assert store.add("n", 2) == 2
    assert store.compare_set("k", "v", "w") == b"w"
    store.append("k", "x")
    store.multi_set(["a"], ["1"])
    assert store.multi_get(["k", "a"]) == [b"wx", b"1"]
    assert {"k", "n", "a"} <= set(store.list_keys())
    assert store.delete_key("a") is store.deleteKey("n") is True
    assert store.num_keys() == store.getNumKeys() > 0
    store.queue_push("q", "item")
    assert store.queue_len("q") == 1
    assert store.queue_pop("q") == b"item"
    store.wait(["k"], 1.0)
    if below_is_theirs(store) and "barrier" not in methods():
        with pytest.raises(NotImplementedError, match="has no barrier"):
            store.barrier("meet", 1, timeout=MINUTE)
    else:
        store.barrier("meet", 1, timeout=MINUTE)
    elastic_barrier(store, 1, "elastic", 60)
    assert isinstance(store, dist.Store)


PUBLIC = [name for name, _ in inspect.getmembers(tcpstore_async.Store, inspect.isfunction) if name[0] != "_"]


@pytest.mark.parametrize("name", PUBLIC)
def test_methods_have_the_signatures_of_the_plain_store(name: str) -> None:
    plain, method = (inspect.signature(getattr(kind, name)) for kind in (tcpstore_async.Store, ours.Store))
    assert list(method.parameters.values())[1:] == list(plain.parameters.values())[1:]
    assert getattr(ours.Store, name).__doc__
    assert getattr(ours.Store, name) is not getattr(dist.Store, name, None)


def below_is_theirs(store: Any) -> bool:
    return isinstance(getattr(store, "underlying_store", None), dist.TCPStore)


@pytest.mark.parametrize("through_cpp", [True, False])
def test_errors_are_of_both_trees(store: Any, cpp: Any, through_cpp: bool) -> None:
    asked = cpp if through_cpp else store
    theirs = [dist.DistStoreError, dist.DistError, RuntimeError]
    of_ours = [] if below_is_theirs(store) else [tcpstore_async.StoreTimeoutError, tcpstore_async.DistStoreError]
    said = r"[Ww]ait timeout after 50ms, keys: .*zz"  # HashStore's as PyTorch's
    for kind in theirs + of_ours:
        with pytest.raises(kind, match=said if of_ours else timeout_message(said)):
            asked.wait(["zz"], SHORT)
    if of_ours and not through_cpp:
        empty = [dist.QueueEmptyError] if "queue_pop" in methods() else []
        for kind in (*empty, tcpstore_async.QueueEmptyError, dist.DistStoreError):
            with pytest.raises(kind):
                store.queue_pop("q", block=False)


def test_network_errors_are_of_both_trees() -> None:
    for kind in (dist.DistNetworkError, tcpstore_async.DistNetworkError, dist.DistError, tcpstore_async.DistError):
        with pytest.raises(kind, match="The client socket has timed out after 100ms"):
            ours.TCPStore("127.0.0.1", 1, timeout=0.1)
        with pytest.raises(kind, match="The client socket has timed out after 100ms"):
            next(ours.rendezvous("tcp://127.0.0.1:1?rank=1&world_size=2", timeout=0.1))


def test_refusals_are_of_both_trees(tmp_path: Path) -> None:
    keys = secret_file(tmp_path / "keys", KEY_LINE)
    of_both = (tcpstore_async.AccessDeniedError, tcpstore_async.DistStoreError, dist.DistStoreError)
    lost = (*of_both, tcpstore_async.DistNetworkError, dist.DistNetworkError)
    with tcpstore_server("--token-keys", str(keys), "--require-auth=all") as server:
        token = KEYS.create(prefix="job/", max_keys=1)
        with ours.TCPStore("127.0.0.1", server.port, timeout=LIMIT, token=token) as store:
            for kind in of_both:
                with pytest.raises(kind, match="grants access only to keys with the prefix"):
                    store.set("k", "v")
            store.set("job/a", "v")
            for any_of_them in lost:
                with pytest.raises(any_of_them, match="1 of the 1 allowed"):
                    store.add("job/b", 1)


def test_a_timeout_set_by_cpp(store: Any, cpp: Any) -> None:
    cpp.set_timeout(SHORT)
    assert store.timeout == cpp.timeout == SHORT
    calls: list[Any] = [lambda: cpp.get("zz"), lambda: store.get("zz"), lambda: store.wait(["zz"])]
    says = timeout_message if below_is_theirs(store) else str
    for milliseconds in (50, 70):
        for call in calls:
            with pytest.raises(dist.DistStoreError, match=says(f"{milliseconds}ms")):
                call()
        store.set_timeout(timedelta(milliseconds=70))


def test_a_prefix_and_its_store_share_one_timeout() -> None:
    below: Any = ours.HashStore()
    with below, ours.PrefixStore("a", below) as inner, ours.PrefixStore("b", inner) as outer:
        outer.set_timeout(SHORT)
        assert outer.timeout == inner.timeout == below.timeout == SHORT
        below.set_timeout(MINUTE)
        assert outer.timeout == inner.timeout == MINUTE
        inner.set_timeout(SHORT)
        with pytest.raises(dist.DistStoreError, match="50ms"):
            outer.get("zz")
        assert outer.underlying_store is inner
        assert outer._underlying_non_prefix_store is below
        outer.set("k", "v")
        assert below.get("a/b/k") == b"v"


def test_a_prefix_rejects_what_is_no_store() -> None:
    with pytest.raises(ValueError, match="store argument cannot be None"):
        ours.PrefixStore("p", cast(Any, None))
    with pytest.raises(TypeError, match=r"must be a torch\.distributed\.Store, not HashStore"):
        ours.PrefixStore("p", cast(Any, tcpstore_async.HashStore()))


# quirk: dropped-store
def test_a_store_lives_until_it_is_closed(port: int) -> None:
    """Also if the program has dropped it and only PyTorch's C++ side holds it."""
    store = ours.TCPStore("127.0.0.1", port, timeout=LIMIT)
    clone, seen = store.clone(), [weakref.ref(store)]
    seen.append(weakref.ref(clone))
    prefixes = [dist.PrefixStore("p", store), dist.PrefixStore("p", clone)]
    del store, clone
    gc.collect()
    prefixes[0].set("k", "v")
    assert prefixes[1].get("k") == b"v"
    for one in seen:
        one().close()  # type: ignore[union-attr]
    prefixes.clear()
    gc.collect()
    assert [one() for one in seen] == [None, None]


# quirk: dropped-store
def test_a_dropped_store_stays_open(port: int) -> None:
    """Nothing reports that PyTorch's C++ side does not hold it."""
    store = ours.TCPStore("127.0.0.1", port, timeout=LIMIT)
    plain = store._plain
    del store
    gc.collect()
    assert plain.num_keys() >= 0
    (dropped,) = [one for one in stores._open if one._plain is plain]
    dropped.close()


def test_closing_a_store_frees_its_port() -> None:
    for _ in range(2):
        with ours.TCPStore("127.0.0.1", 0, 1, True, timeout=LIMIT) as store:
            number = store.port
        ours.TCPStore("127.0.0.1", number, 1, True, timeout=LIMIT).close()


@pytest.mark.needs_proc
def test_a_master_may_take_the_address_of_one_that_was_dropped() -> None:
    first = ours.TCPStore("127.0.0.1", 0, 1, True, LIMIT)
    number = first.port
    first.set("k", "v")
    with pytest.raises(dist.DistNetworkError, match="EADDRINUSE"):  # it is still in use
        ours.TCPStore("127.0.0.1", number, 1, True, LIMIT)
    dist.init_process_group("gloo", store=first, rank=0, world_size=1)
    del first
    gc.collect()
    with pytest.raises(dist.DistNetworkError, match="EADDRINUSE"):  # by the group
        ours.TCPStore("127.0.0.1", number, 1, True, LIMIT)
    dist.destroy_process_group()
    with ours.TCPStore("127.0.0.1", number, 1, True, LIMIT) as second:
        assert not second.check(["k"])


@pytest.mark.needs_proc
def test_closed_stores_leave_no_descriptors(port: int) -> None:
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(30):
        with ours.TCPStore("127.0.0.1", port, timeout=LIMIT) as store:
            store.set("k", "v")
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_closed_store_that_pytorch_still_uses(port: int) -> None:
    store = ours.TCPStore("127.0.0.1", port, timeout=LIMIT)
    outer: Any = dist.PrefixStore("p", store)
    store.close()
    with pytest.raises(dist.DistNetworkError, match="the store has been closed"):
        outer.get("k")
    del store
    gc.collect()
    with pytest.raises(RuntimeError):  # in PyTorch's words
        outer.get("k")


def test_many_threads_make_and_close_stores() -> None:
    """What goes through all that are open is not upset by others that come and go."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    lasting = [ours.HashStore() for _ in range(50)]
    try:
        with ThreadPoolExecutor(4) as threads:
            for one in [threads.submit(make_and_close, 300) for _ in range(4)]:
                one.result(LIMIT)
    finally:
        sys.setswitchinterval(interval)
        for store in lasting:
            store.close()


def make_and_close(times: int) -> None:
    for _ in range(times):
        store = ours.HashStore()
        stores.close_with_clones(store)
        del store


def test_the_server_is_never_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of whose methods would wait for ever for a thread of their own process."""
    monkeypatch.setenv("TCPSTORE_SERVER", "thread")
    with pytest.raises(RuntimeError, match="cannot run in a thread of this process"):
        ours.TCPStore("127.0.0.1", 0, 1, True, timeout=LIMIT)


@pytest.mark.parametrize("chain", list(product((ours.PrefixStore, dist.PrefixStore), repeat=3)))
@pytest.mark.parametrize("kind", [ours.HashStore, dist.HashStore])
def test_the_store_below_all_prefixes_whosever_they_are(kind: Any, chain: tuple[Any, ...]) -> None:
    below = store = kind()
    for prefix in chain:
        store = prefix("p", store)
    assert store._underlying_non_prefix_store is below
    for one in list(stores._open):
        one.close()


def test_a_clone_of_a_prefix_closes_its_store(port: int) -> None:
    with ours.TCPStore("127.0.0.1", port, timeout=LIMIT) as below, ours.PrefixStore("p", below) as prefix:
        open_before = len(stores._open)
        prefix.clone().close()
        assert len(stores._open) == open_before
        below.set("k", "v")


def test_attributes(port: int, tmp_path: Path) -> None:
    with ours.TCPStore("127.0.0.1", port, timeout=LIMIT, use_libuv=False) as store:
        assert (store.host, store.port, store.libuvBackend) == ("127.0.0.1", port, False)
        assert repr(store).startswith("TCPStore(client=TCPClient(")
    with ours.FileStore(str(tmp_path / "f")) as file:
        assert file.path == str(tmp_path / "f")
    with ours.HashStore() as table:
        assert table.clone() is table


def test_rendezvous_returns_torch_stores(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCPSTORE_JOB", "job")
    kept = len(stores._open)
    for url, kind in (
        (f"tcp://127.0.0.1:{port}?rank=0&world_size=1&join=1", ours.PrefixStore),
        ("tcp://127.0.0.1:0?rank=0&world_size=1", ours.TCPStore),
        (f"file://{tmp_path}/f?rank=0&world_size=1", ours.FileStore),
    ):
        found = ours.rendezvous(url)
        store, rank, size = next(found)
        with cast(Any, store):
            assert (type(store), rank, size) == (kind, 0, 1)
            store.set("k", "v")
            clone = cast(Any, store).clone()
            assert clone.get("k") == b"v"
            clone.close()
            with pytest.raises(RuntimeError, match="Unable to perform"):
                next(found)
    assert len(stores._open) == kept


def test_a_master_waits_for_its_ranks() -> None:
    with pytest.raises(dist.DistStoreError, match=r"after 10 seconds waiting for clients\. 1/2 clients joined\."):
        ours.TCPStore("127.0.0.1", 0, 2, True, timeout=9.5)
    with ours.TCPStore("127.0.0.1", 0, 1, True, MINUTE) as store:
        store.set("k", "v")


@needs("list_keys")
def test_methods_that_cpp_does_not_forward() -> None:
    """PyTorch's C++ PrefixStore has nowhere to pass these on to; the store below it has them."""
    cpp: Any = dist.PrefixStore("p", ours.HashStore())
    cpp.set("k", "v")
    calls = [cpp.list_keys, lambda: cpp.queue_push("q", "v"), lambda: cpp.queue_pop("q"), lambda: cpp.queue_len("q")]
    for call in calls:
        with pytest.raises(NotImplementedError, match="support is not implemented"):
            call()
    cpp.underlying_store.queue_push("p/q", "item")
    assert cpp.underlying_store.list_keys() == ["p/k"]
    assert cpp.underlying_store.queue_pop("p/q") == b"item"
