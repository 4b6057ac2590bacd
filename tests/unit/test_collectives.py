"""Barriers, gathers and broadcasts, over a store of this process; with PyTorch's ranks in tests/interop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import pytest

from support import LIMIT
from tcpstore_async import DistStoreError, HashStore, MissingRanksError, StoreTimeoutError
from tcpstore_async.arguments import Text, Timeout
from tcpstore_async.collectives import StoreCollectives, barrier, get_all, store_based_barrier, synchronize

T = TypeVar("T")
RANKS = 4
SOON = timedelta(milliseconds=50)


@pytest.fixture
def store() -> HashStore:
    return HashStore()


def together(do: Callable[[int], T], ranks: int = RANKS) -> list[T]:
    """Every rank at once, each in a thread; what they return."""
    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(do, range(ranks), timeout=LIMIT))


def each(store: HashStore, do: Callable[[StoreCollectives, int], T]) -> list[T]:
    return together(lambda rank: do(StoreCollectives(store, rank, RANKS), rank))


# As init_process_group and torchrun do it


def test_store_based_barrier(store: HashStore) -> None:
    together(lambda rank: store_based_barrier(rank, store, "0", RANKS))
    assert store.get("store_based_barrier_key:0") == b"4"
    assert store.check(["store_based_barrier_key:0:last_worker"])


def test_store_based_barrier_says_how_many_have_come(
    store: HashStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tcpstore_async.collectives._LEAST_INTERVAL", 0.01)
    with (
        caplog.at_level(logging.INFO, "tcpstore_async.collectives"),
        pytest.raises(DistStoreError, match=r"rank 0.*world_size=2, num_workers_joined=1"),
    ):
        store_based_barrier(0, store, "g", 2, SOON, timedelta(milliseconds=10))
    assert "1 of 2 have joined" in caplog.text


def test_get_all(store: HashStore) -> None:
    for rank in range(RANKS):
        store.set(f"data{rank}", str(rank))
    found = together(lambda rank: get_all(store, rank, "data", RANKS))
    assert found == [[b"0", b"1", b"2", b"3"]] * RANKS


def test_synchronize(store: HashStore) -> None:
    found = together(lambda rank: synchronize(store, str(rank), rank, RANKS, "data"))
    assert found == [[b"0", b"1", b"2", b"3"]] * RANKS
    assert store.timeout == timedelta(seconds=300)


def test_synchronize_names_the_missing(store: HashStore) -> None:
    with pytest.raises(MissingRanksError, match="missing ranks: 1, 3") as caught:
        together(lambda rank: rank % 2 or synchronize(store, "x", rank, RANKS, "data", SOON))
    assert caught.value.ranks == [1, 3]


def test_barrier(store: HashStore) -> None:
    together(lambda rank: barrier(store, RANKS, "b"))
    assert store.get("b/num_members") == b"4"
    assert store.check(["b/last_member"])


def test_barrier_traces_the_missing(store: HashStore) -> None:
    def come(rank: int) -> str:
        if rank == 2:
            return ""
        with pytest.raises(MissingRanksError) as caught:
            barrier(store, RANKS, "b", SOON, rank, lambda rank: f"host{rank}", timedelta(seconds=0.5))
        return str(caught.value)

    texts = together(come)
    assert "on rank 0, for key prefix: b (world_size=4, missing_ranks=[host2], timeout=0.05)" in texts[0]
    assert "missing_ranks=[<check rank 0 (host0) for missing rank info>]" in texts[1]


def test_barrier_without_rank_0_says_what_the_store_says(store: HashStore) -> None:
    with pytest.raises(StoreTimeoutError, match=r"(?i)wait timeout"):
        barrier(store, 2, "b", SOON, 1, None, SOON)
    with pytest.raises(AssertionError, match="Tracing requires rank information"):
        barrier(store, 2, "b", SOON, None, str)


# StoreCollectives


def test_collective_barrier(store: HashStore) -> None:
    each(store, lambda world, rank: world.barrier("b"))
    assert store.get("b/num_members") == b"4"
    assert store.get("b/2") == b"joined"


def test_a_barrier_need_not_block(store: HashStore) -> None:
    StoreCollectives(store, 0, 2).barrier("b", block=False)
    StoreCollectives(store, 1, 2).barrier("b")


def test_broadcast(store: HashStore) -> None:
    def take_part(world: StoreCollectives, rank: int) -> bytes:
        if rank:
            return world.broadcast_recv("k")
        world.broadcast_send("k", "news")
        return b"news"

    assert each(store, take_part) == [b"news"] * RANKS


def test_gather(store: HashStore) -> None:
    def take_part(world: StoreCollectives, rank: int) -> list[bytes]:
        if rank == 2:
            return world.gather_recv("k", "mine")
        world.gather_send("k", str(rank))
        return []

    assert each(store, take_part)[2] == [b"0", b"1", b"mine", b"3"]


def test_scatter(store: HashStore) -> None:
    def take_part(world: StoreCollectives, rank: int) -> bytes:
        return world.scatter_recv("k") if rank else world.scatter_send("k", ["a", "b", "c", "d", "too many"])

    assert each(store, take_part) == [b"a", b"b", b"c", b"d"]
    with pytest.raises(IndexError):
        StoreCollectives(store, 0, 3).scatter_send("few", ["a", "b"])


def test_all_gather_and_all_sum(store: HashStore) -> None:
    assert each(store, lambda world, rank: world.all_gather("k", str(rank))) == [[b"0", b"1", b"2", b"3"]] * RANKS
    assert each(store, lambda world, rank: world.all_sum("n", rank)) == [6] * RANKS


@pytest.mark.parametrize(("what", "call"), [
    ("barrier", lambda world: world.barrier("k", SOON)),
    ("gather", lambda world: world.gather_recv("k", "x", SOON)),
    ("all_gather", lambda world: world.all_gather("k", "x", SOON)),
    ("barrier", lambda world: world.all_sum("k", 1, SOON)),
])  # fmt: skip
def test_errors_name_the_missing(store: HashStore, what: str, call: Callable[[Any], Any]) -> None:
    with pytest.raises(MissingRanksError, match=f"^{what} failed -- missing ranks: 1, 2, Wait timeout") as caught:
        call(StoreCollectives(store, 0, 3))
    assert caught.value.ranks == [1, 2]


def test_what_one_sends_is_waited_for(store: HashStore) -> None:
    world = StoreCollectives(store, 1, 2)
    for call in (world.broadcast_recv, world.scatter_recv):
        with pytest.raises(StoreTimeoutError, match="Wait timeout after 50ms"):
            call(call.__name__, SOON)


def test_a_key_is_for_one_call(store: HashStore) -> None:
    world = StoreCollectives(store, 0, 1)
    world.all_sum("k", 1)
    repeated: list[Callable[[], object]] = [lambda: world.broadcast_send("k", "x"), lambda: world.barrier("k/barrier")]
    for again in repeated:
        with pytest.raises(RuntimeError, match=r"Key k.* has already been used\."):
            again()


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_there_is_not(store: HashStore, rank: int) -> None:
    with pytest.raises(ValueError, match=r"^rank must be from 0 to 1, as world_size is 2, not"):
        StoreCollectives(store, rank, 2)
    with pytest.raises(ValueError, match=r"^rank must be from 0 to 1"):
        synchronize(store, b"data", rank, 2, "prefix")
    assert store.num_keys() == 0


class StoreOfOthers(HashStore):
    """Its errors are not ours, as PyTorch's are not."""

    def wait(self, keys: Iterable[Text], timeout: Timeout | None = None) -> None:
        try:
            super().wait(keys, timeout)
        except DistStoreError as error:
            raise RuntimeError(str(error)) from None


def test_a_store_whose_errors_are_not_ours(caplog: pytest.LogCaptureFixture) -> None:
    store = StoreOfOthers()
    with pytest.raises(DistStoreError, match="num_workers_joined=1"):
        store_based_barrier(0, store, "group", 2, 0.05)
    with pytest.raises(MissingRanksError) as caught:
        StoreCollectives(store, 0, 3).all_gather("key", b"data", 0.05)
    assert caught.value.ranks == [1, 2]
