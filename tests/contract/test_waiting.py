"""Waiting: what wakes a waiter, timeouts and their texts, queues and barriers, on every kind of store."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from typing import Any

import pytest

from contract.store_kinds import Kind, Maker
from support import LIMIT
from tcpstore_async import DistStoreError, QueueEmptyError, Store, StoreTimeoutError
from tcpstore_async.base.coercion import Timeout

Name = Callable[[str], str]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def let_it_wait(future: Future[Any]) -> None:
    """Give a call the time to begin to wait; assert that it has not returned."""
    time.sleep(0.05)
    assert not future.done()


@contextmanager
def takes(least: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert least - 0.002 <= time.monotonic() - began < LIMIT / 2


WRITES: dict[str, Callable[[Store, str], object]] = {
    "set": lambda store, key: store.set(key, "7"),
    "add": lambda store, key: store.add(key, 7),
    "append": lambda store, key: store.append(key, "7"),
    "compare_set": lambda store, key: store.compare_set(key, "", "7"),
    "multi_set": lambda store, key: store.multi_set([key], ["7"]),
}

WAITS: dict[str, Callable[[Store, str], object]] = {
    "get": lambda store, key: store.get(key) == b"7",
    "wait": lambda store, key: store.wait([key]) is None,  # type: ignore[func-returns-value]
    "multi_get": lambda store, key: store.multi_get([key]) == [b"7"],
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("wait", WAITS)
def test_every_write_wakes_every_wait(make: Maker, pool: ThreadPoolExecutor, key: str, write: str, wait: str) -> None:
    waiting = pool.submit(WAITS[wait], make(), key)
    let_it_wait(waiting)
    WRITES[write](make(), key)
    assert waiting.result(LIMIT)


def test_threads_on_one_store_wake_each_other(store: Store, pool: ThreadPoolExecutor, key: str) -> None:
    waiting = [pool.submit(store.get, key) for _ in range(4)]
    let_it_wait(waiting[0])
    store.set(key, "1")
    assert [future.result(LIMIT) for future in waiting] == [b"1"] * 4


def test_an_item_wakes_a_wait_for_its_queue(make: Maker, pool: ThreadPoolExecutor, key: str) -> None:
    waiting = pool.submit(make().wait, [key])
    let_it_wait(waiting)
    make().queue_push(key, "item")
    waiting.result(LIMIT)


def test_wait_for_several(make: Maker, pool: ThreadPoolExecutor, name: Name) -> None:
    store = make()
    store.set(name("a"), "")
    waiting = pool.submit(make().wait, [name("a"), name("b"), name("c"), name("b")])
    let_it_wait(waiting)
    store.set(name("b"), "")
    let_it_wait(waiting)
    store.set(name("c"), "")
    waiting.result(LIMIT)


def test_key_that_appeared_and_was_deleted_wakes_a_waiter(make: Maker, pool: ThreadPoolExecutor, key: str) -> None:
    waiting = pool.submit(make().wait, [key])
    let_it_wait(waiting)
    store = make()
    store.set(key, "1")
    store.delete_key(key)
    waiting.result(LIMIT)


def test_wait_for_nothing(store: Store) -> None:
    store.wait([])
    store.wait([], 0)


# Timeouts

REASON = r"(\. \d of \d keys? missing: .*)?"
"""A server of ours may say more, if the keys of other tests are like those that are missing."""

QUARTER: list[Timeout] = [0.25, timedelta(seconds=0.25), timedelta(microseconds=250_999)]


@pytest.mark.parametrize("timeout", QUARTER, ids=str)
def test_timeout_in_milliseconds(kind: Kind, store: Store, name: Name, timeout: Timeout) -> None:
    text = f"{kind.wait} timeout after 250ms, keys: {kind.shown}{name('a')}, {kind.shown}{name('z')}"
    with takes(0.25), pytest.raises(StoreTimeoutError, match=f"^{re.escape(text)}{REASON}$"):
        store.wait([name("a"), name("z")], timeout)


@pytest.mark.parametrize(
    "call",
    [
        lambda store, key: store.get(key),
        lambda store, key: store.multi_get([key]),
        lambda store, key: store.wait([key]),
        lambda store, key: store.queue_pop(key),
    ],
    ids=["get", "multi_get", "wait", "queue_pop"],
)
def test_the_timeout_of_the_store(kind: Kind, store: Store, key: str, call: Callable[[Store, str], object]) -> None:
    store.set_timeout(0.1)
    text = f"{kind.wait} timeout after 100ms, keys: {kind.shown}{key}"
    with takes(0.1), pytest.raises(DistStoreError, match=f"^{re.escape(text)}{REASON}$"):
        call(store, key)
    store.set_timeout(LIMIT)
    store.set(key, "1")
    assert store.get(key) == b"1"


# quirk: timeouts
def test_a_timeout_of_0_is_one_look(store: Store, key: str) -> None:
    store.set_timeout(0)
    assert store.timeout == timedelta(0)
    with takes(0), pytest.raises(StoreTimeoutError, match="ait timeout after 0ms"):
        store.get(key)
    with takes(0), pytest.raises(StoreTimeoutError, match="ait timeout after 0ms"):
        store.queue_pop(key)
    store.set(key, "1")
    assert store.get(key) == b"1"
    store.wait([key], 0)
    store.wait([key], 0.0001)
    assert store.multi_get([key]) == [b"1"]
    assert store.check([key])
    assert store.add(key, 1) == 2


def test_negative_timeout_means_no_limit(make: Maker, pool: ThreadPoolExecutor, name: Name) -> None:
    store, other = make(), make()
    other.set_timeout(-1)
    waiting = pool.submit(make().wait, [name("a")], timedelta(seconds=-1))
    getting = pool.submit(other.get, name("b"))
    time.sleep(0.2)
    assert not waiting.done()
    assert not getting.done()
    store.multi_set([name("a"), name("b")], ["", "1"])
    waiting.result(LIMIT)
    assert getting.result(LIMIT) == b"1"


@pytest.mark.parametrize("given", [5, 2.5, timedelta(seconds=7), -3, 0])
def test_the_timeout_can_be_read(store: Store, given: Timeout) -> None:
    store.set_timeout(given)
    assert store.timeout == (given if isinstance(given, timedelta) else timedelta(seconds=given))


# Concurrency


def test_threads_add(make: Maker, pool: ThreadPoolExecutor, key: str) -> None:
    stores = [make() for _ in range(4)]
    sums: list[int] = []

    def add(store: Store) -> None:
        for _ in range(50):
            sums.append(store.add(key, 1))

    for future in [pool.submit(add, store) for store in stores * 2]:
        future.result(LIMIT)
    assert sorted(sums) == list(range(1, 401))
    assert stores[0].get(key) == b"400"


def test_threads_append(make: Maker, pool: ThreadPoolExecutor, key: str) -> None:
    def append(store: Store, piece: str) -> None:
        for _ in range(25):
            store.append(key, piece)
        assert store.check([key])  # waits until the writes are done

    for future in [pool.submit(append, make(), str(rank)) for rank in range(4)]:
        future.result(LIMIT)
    value = make().get(key)
    assert len(value) == 100
    assert {value.count(b"%d" % rank) for rank in range(4)} == {25}


def test_one_thread_wins_a_compare_set(make: Maker, pool: ThreadPoolExecutor, key: str) -> None:
    def claim(store: Store, rank: int) -> bytes:
        return store.compare_set(key, "", str(rank))

    answers = {future.result(LIMIT) for future in [pool.submit(claim, make(), rank) for rank in range(8)]}
    assert answers == {make().get(key)}


# Queues


def test_a_queue_is_first_in_first_out(make: Maker, key: str) -> None:
    store, other = make(), make()
    assert store.queue_len(key) == 0
    for item in ("a", b"", "a", bytearray(b"\0")):
        store.queue_push(key, item)
    assert store.queue_len(key) == 4  # in this order: the writer's own reply comes after its writes
    assert other.queue_len(key) == 4
    assert [other.queue_pop(key), store.queue_pop(key)] == [b"a", b""]
    assert [other.queue_pop(key, False), store.queue_pop(key, block=False)] == [b"a", b"\0"]
    assert store.queue_len(key) == 0
    with pytest.raises(QueueEmptyError, match="queue is empty"):
        store.queue_pop(key, block=False)


def test_queues_are_not_keys(store: Store, key: str) -> None:
    keys = store.num_keys()
    store.queue_push(key, "item")
    assert store.num_keys() == keys
    assert key not in store.list_keys()
    assert not store.delete_key(key)
    assert store.check([key])
    store.wait([key], 0)
    assert store.get(key) == b""
    assert store.queue_pop(key) == b"item"
    assert not store.check([key])


# quirk: woken-for-nothing
def test_a_value_of_that_name_is_no_item(make: Maker, pool: ThreadPoolExecutor, key: str) -> None:
    store = make()
    waiting = pool.submit(make().queue_pop, key)
    let_it_wait(waiting)
    store.set(key, "value")
    with pytest.raises(QueueEmptyError):
        waiting.result(LIMIT)
    with pytest.raises(QueueEmptyError):
        store.queue_pop(key)
    store.queue_push(key, "item")
    assert store.queue_pop(key) == b"item"
    assert store.get(key) == b"value"


def test_a_pop_waits_for_an_item(make: Maker, pool: ThreadPoolExecutor, key: str) -> None:
    waiting = pool.submit(make().queue_pop, key)
    let_it_wait(waiting)
    make().queue_push(key, "item")
    assert waiting.result(LIMIT) == b"item"


def test_waiter_that_does_not_pop_passes_the_item_on(
    kind: Kind, make: Maker, pool: ThreadPoolExecutor, name: Name, key: str
) -> None:
    if not kind.ours:
        pytest.skip("PyTorch's server does not wake the second waiter")
    store, first = make(), make()
    waiting = pool.submit(first.wait, [key])
    let_it_wait(waiting)
    popping = pool.submit(make().queue_pop, key)
    let_it_wait(popping)
    store.queue_push(key, "item")
    waiting.result(LIMIT)
    first.check([name("other")])  # shows the server that this waiter does not take the item
    assert popping.result(LIMIT) == b"item"


@pytest.mark.parametrize("shared", [True, False], ids=["one store", "a store each"])
def test_every_item_is_popped_once(kind: Kind, make: Maker, pool: ThreadPoolExecutor, key: str, shared: bool) -> None:
    if not kind.ours:
        pytest.skip("PyTorch's server prefers a waiter that returns, so others starve")
    one = make()
    stores = [one if shared else make() for _ in range(8)]
    taken: list[list[int]] = [[] for _ in stores]

    def take(number: int) -> None:
        while (item := stores[number].queue_pop(key)) != b"end":
            taken[number].append(int(item))

    takers = [pool.submit(take, number) for number in range(8)]
    for item in range(200):
        one.queue_push(key, str(item))
    for _ in takers:
        one.queue_push(key, "end")
    for taker in takers:
        taker.result(LIMIT)
    assert all(items == sorted(items) for items in taken)
    assert sorted(chain(*taken)) == list(range(200))


# Barriers


def test_barrier_opens_when_all_have_arrived(make: Maker, pool: ThreadPoolExecutor, key: str) -> None:
    early = [pool.submit(make().barrier, key, 3) for _ in range(2)]
    let_it_wait(early[0])
    make().barrier(key, 3)
    for future in early:
        future.result(LIMIT)
    make().barrier(key, 3, 0)


@pytest.mark.parametrize("size", [1, 0, -1])
def test_a_barrier_of_a_small_world(store: Store, key: str, size: int) -> None:
    store.barrier(key, size, 0)
    store.barrier(key, size, timedelta(0))


def test_barrier_timeout(store: Store, key: str) -> None:
    with takes(0.25), pytest.raises(StoreTimeoutError, match=r"timeout after 250ms, keys?: .*" + key):
        store.barrier(key, 2, 0.25)
    store.set_timeout(0.1)
    with takes(0.1), pytest.raises(StoreTimeoutError, match="timeout after 100ms"):
        store.barrier(key, 3)
    store.set_timeout(LIMIT)
    store.barrier(key, 3)


def test_many_rounds_of_barriers(make: Maker, pool: ThreadPoolExecutor, name: Name) -> None:
    gate = threading.Barrier(4)

    def rounds(store: Store) -> list[int]:
        seen = []
        for number in range(5):
            store.add(name("arrived"), 1)
            store.barrier(name(f"round {number}"), 4)
            seen.append(store.add(name("arrived"), 0))
            gate.wait(LIMIT)
        return seen

    for future in [pool.submit(rounds, make()) for _ in range(4)]:
        assert future.result(LIMIT) == [4, 8, 12, 16, 20]
