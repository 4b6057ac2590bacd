"""HashStore, PrefixStore and FileStore beyond the contract: signals, forks, ownership, rounds in a file."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from support import LIMIT, alarms, in_child
from tcpstore_async import DistStoreError, FileStore, HashStore, PrefixStore, Store, StoreTimeoutError


@pytest.mark.unmeasured
def test_ctrl_c_ends_a_wait_at_once() -> None:
    store = HashStore()
    store.set_timeout(LIMIT)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
        store.queue_pop("q")
    assert time.monotonic() - began < LIMIT / 2
    store.queue_push("q", "item")
    assert store.queue_pop("q") == b"item"


@pytest.mark.unmeasured
def test_a_signal_handler_ends_the_wait_of_its_own_thread() -> None:
    store = HashStore()
    store.set_timeout(LIMIT)
    with alarms(lambda *_: store.set("k", "from the handler"), 0.1):
        assert store.get("k") == b"from the handler"


@pytest.mark.unmeasured
def test_forked_child_has_a_copy_without_waiters() -> None:
    store = HashStore()
    store.set_timeout(LIMIT)

    def use() -> tuple[bytes, int]:
        store.queue_push("q", "the child's")
        return store.queue_pop("q"), store.queue_len("q")

    with ThreadPoolExecutor(4) as pool:
        popping = [pool.submit(store.queue_pop, "q") for _ in range(2)]
        done = threading.Event()
        adding = pool.submit(lambda: [store.add("busy", 1) for _ in iter(done.is_set, True)])
        time.sleep(0.1)
        try:
            for _ in range(20):
                assert in_child(use) == '(b"the child\'s", 0)'
        finally:
            done.set()
        adding.result(LIMIT)
        store.queue_push("q", "1")
        store.queue_push("q", "2")
        assert sorted(future.result(LIMIT) for future in popping) == [b"1", b"2"]


def test_timed_out_waiters_are_removed() -> None:
    store = HashStore()
    for number in range(20):
        with pytest.raises(StoreTimeoutError):
            store.wait([f"k{number}", "never"], 0.001)
    assert not store._keyspace.waiters
    assert not store._keyspace.handoffs
    assert store._keyspace.size == 0


def test_clone_of_a_hash_store_is_itself() -> None:
    store = HashStore()
    assert store.clone() is store
    store.clone().close()
    store.set("k", "1")


def test_keys_of_a_prefix_store() -> None:
    store = HashStore()
    PrefixStore("a", PrefixStore("b", store)).set("k", "1")
    PrefixStore("", store).set("k", "2")
    PrefixStore("x/", store).set("k", "3")
    PrefixStore(b"\xff", store).set("k", "4")
    assert [store.get(key) for key in ("b/a/k", "/k", "x//k", b"\xff/k")] == [b"1", b"2", b"3", b"4"]


def test_underlying_stores_and_arguments_of_a_prefix_store() -> None:
    store = HashStore()
    view = PrefixStore("p", PrefixStore("q", store))
    assert isinstance(view.underlying_store, PrefixStore)
    assert view._underlying_non_prefix_store is store
    assert repr(PrefixStore("p", store)) == f"PrefixStore('p', {store!r})"
    bad: Any
    for bad, error in ((None, ValueError), ("store", TypeError), ({}, TypeError)):
        with pytest.raises(error, match=r"^store "):
            PrefixStore("p", bad)
    bad = 1
    with pytest.raises(TypeError, match=r"^prefix "):
        PrefixStore(bad, store)


def test_prefix_store_uses_the_underlying_timeout() -> None:
    store = HashStore()
    view = PrefixStore("p", store)
    view.set_timeout(0.1)
    assert store.timeout == view.timeout == timedelta(seconds=0.1)
    began = time.monotonic()
    with pytest.raises(StoreTimeoutError, match=r"^Wait timeout after 100ms, keys: p/b/last_member$"):
        view.barrier("b", 2)
    assert time.monotonic() - began < LIMIT / 2


def test_view_closes_only_the_store_it_owns(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store", 1) as store:
        with PrefixStore("p", store) as view:
            clone = view.clone()
            view.set("k", "1")
        assert view.get("k") == b"1"
        clone.close()
        with pytest.raises(DistStoreError, match="closed"):
            clone.get("k")
        assert store.get("p/k") == b"1"


class OnlyText(Store):
    """A minimal user-defined store that accepts only str keys."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[Any, Any] = {}

    def set(self, key: Any, value: Any) -> None:
        self.values[key] = value

    def get(self, key: Any) -> bytes:
        return bytes(self.values[key])

    def check(self, keys: Any) -> bool:
        return all(key in self.values for key in keys)


def test_str_keys_stay_str_under_a_prefix() -> None:
    store = OnlyText()
    view = PrefixStore("p", store)
    view.set("k", b"1")
    assert store.values == {"p/k": b"1"}
    assert view.check(["k"])
    assert view.get("k") == b"1"


# quirk: file-rounds
def test_a_round_in_a_file_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    fast, slow = (FileStore(path, 2, new_round=True) for _ in range(2))
    fast.set("key", "of the first round")
    fast.close()
    with FileStore(path, 2, new_round=True) as again:
        assert not again.check(["key"])
        again.set("key", "of the second")
        slow.close()
        with FileStore(path, 2, new_round=True) as last:
            assert last.get("key") == b"of the second"
        assert again.get("key") == b"of the second"
    assert not path.exists()


def test_rank_may_leave_a_round_before_another_joins(tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    with FileStore(path, 2, new_round=True) as early:
        early.set("key", "value")
    with FileStore(path, 2, new_round=True) as late:
        assert late.get("key") == b"value"
    assert not path.exists()


def test_open_stores_belong_to_the_same_round(tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    with FileStore(path, 1, new_round=True) as one, FileStore(path, 1, new_round=True) as other:
        one.set("key", "value")
        assert other.get("key") == b"value"


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_undecodable_key_outside_a_view_is_not_listed(kind: str, tmp_path: Path) -> None:
    store = HashStore() if kind == "hash" else FileStore(tmp_path / "file")
    with store:
        view, inner = PrefixStore("p", store), PrefixStore("q", PrefixStore("p", store))
        view.set("k", "1")
        inner.set("i", "2")
        store.set(b"\xff", "x")
        assert sorted(view.list_keys()) == ["k", "q/i"]
        assert inner.list_keys() == ["i"]
        with pytest.raises(UnicodeDecodeError):
            store.list_keys()


def test_failed_close_can_be_retried(tmp_path: Path) -> None:
    path = tmp_path / "file"
    store = FileStore(path, 1, timeout=0.05)
    with open(path, "rb") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        with pytest.raises(StoreTimeoutError):
            store.close()
    store.close()
    assert not path.exists()
    store.close()


def test_very_long_timeout() -> None:
    store = HashStore()
    for given in (timedelta.max, 1e300):
        store.set_timeout(given)
        assert store.timeout > timedelta(days=100_000)
        store.barrier("one", 1, given)
