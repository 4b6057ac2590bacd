"""Barriers, gathers and broadcasts over a HashStore; tests/interop has them with PyTorch's ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest

from marks import STOCK_SERVERS
from support import LIMIT, server_of
from tcpstore_async import (
    DistNetworkError,
    DistStoreError,
    FileStore,
    HashStore,
    MissingRanksError,
    PrefixStore,
    Store,
    StoreTimeoutError,
    TCPStore,
)
from tcpstore_async.base.coercion import Text, Timeout
from tcpstore_async.base.deadline import Deadline
from tcpstore_async.collectives import StoreCollectives, barrier, get_all, store_based_barrier, synchronize

T = TypeVar("T")
RANKS = 4
SOON = timedelta(milliseconds=50)


@pytest.fixture
def store() -> HashStore:
    return HashStore()


def together(do: Callable[[int], T], ranks: int = RANKS) -> list[T]:
    """Run all ranks concurrently, each in a thread; return their results."""
    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(do, range(ranks), timeout=LIMIT))


def each(store: HashStore, do: Callable[[StoreCollectives, int], T]) -> list[T]:
    return together(lambda rank: do(StoreCollectives(store, rank, RANKS), rank))


# The functions of init_process_group and torchrun


def test_store_based_barrier(store: HashStore) -> None:
    together(lambda rank: store_based_barrier(rank, store, "0", RANKS))
    assert store.get("store_based_barrier_key:0") == b"4"
    assert store.check(["store_based_barrier_key:0:last_worker"])


def test_store_based_barrier_logs_the_number_of_joined_ranks(
    store: HashStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tcpstore_async.collectives._LOG_INTERVAL_MIN", 0.01)
    with (
        caplog.at_level(logging.INFO, "tcpstore_async.collectives"),
        pytest.raises(DistStoreError, match=r"rank 0.*world_size=2, num_workers_joined=1"),
    ):
        store_based_barrier(0, store, "g", 2, SOON, timedelta(milliseconds=10))
    assert "has 1 of 2 ranks after" in caplog.text


def test_get_all(store: HashStore) -> None:
    for rank in range(RANKS):
        store.set(f"data{rank}", str(rank))
    found = together(lambda rank: get_all(store, rank, "data", RANKS))
    assert found == [[b"0", b"1", b"2", b"3"]] * RANKS


def test_synchronize(store: HashStore) -> None:
    found = together(lambda rank: synchronize(store, str(rank), rank, RANKS, "data"))
    assert found == [[b"0", b"1", b"2", b"3"]] * RANKS
    assert store.timeout == timedelta(seconds=300)


def test_synchronize_reports_missing_ranks(store: HashStore) -> None:
    with pytest.raises(MissingRanksError, match="missing ranks: 1, 3") as caught:
        together(lambda rank: rank % 2 or synchronize(store, "x", rank, RANKS, "data", SOON))
    assert caught.value.ranks == [1, 3]


def test_barrier(store: HashStore) -> None:
    together(lambda rank: barrier(store, RANKS, "b"))
    assert store.get("b/num_members") == b"4"
    assert store.check(["b/last_member"])


def test_barrier_traces_missing_ranks(store: HashStore) -> None:
    def come(rank: int) -> str:
        if rank == 2:
            return ""
        with pytest.raises(MissingRanksError) as caught:
            barrier(store, RANKS, "b", SOON, rank, lambda rank: f"host{rank}", timedelta(seconds=0.5))
        return str(caught.value)

    texts = together(come)
    assert "on rank 0, for key prefix: b (world_size=4, missing_ranks=[host2], timeout=0.05)" in texts[0]
    assert "missing_ranks=[<check rank 0 (host0) for missing rank info>]" in texts[1]


def test_barrier_without_rank_0_raises_the_store_s_error(store: HashStore) -> None:
    with pytest.raises(StoreTimeoutError, match=r"(?i)wait timeout"):
        barrier(store, 2, "b", SOON, 1, None, SOON)
    with pytest.raises(AssertionError, match="Tracing requires rank information"):
        barrier(store, 2, "b", SOON, None, str)


# StoreCollectives


def test_collective_barrier(store: HashStore) -> None:
    each(store, lambda world, rank: world.barrier("b"))
    assert store.get("b/num_members") == b"4"
    assert store.get("b/2") == b"joined"


def test_barrier_without_blocking(store: HashStore) -> None:
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
def test_errors_name_missing_ranks(store: HashStore, what: str, call: Callable[[Any], Any]) -> None:
    with pytest.raises(MissingRanksError, match=f"^{what} failed -- missing ranks: 1, 2, Wait timeout") as caught:
        call(StoreCollectives(store, 0, 3))
    assert caught.value.ranks == [1, 2]


def test_receive_times_out(store: HashStore) -> None:
    world = StoreCollectives(store, 1, 2)
    for call in (world.broadcast_recv, world.scatter_recv):
        with pytest.raises(StoreTimeoutError, match="Wait timeout after 50ms"):
            call(call.__name__, SOON)


def test_key_can_be_used_once(store: HashStore) -> None:
    world = StoreCollectives(store, 0, 1)
    world.all_sum("k", 1)
    repeated: list[Callable[[], object]] = [lambda: world.broadcast_send("k", "x"), lambda: world.barrier("k/barrier")]
    for again in repeated:
        with pytest.raises(RuntimeError, match=r"Key k.* has already been used\."):
            again()


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_out_of_range(store: HashStore, rank: int) -> None:
    with pytest.raises(ValueError, match=r"^rank must be from 0 to 1 \(world_size=2\), not"):
        StoreCollectives(store, rank, 2)
    with pytest.raises(ValueError, match=r"^rank must be from 0 to 1"):
        synchronize(store, b"data", rank, 2, "prefix")
    assert store.num_keys() == 0


def test_tracing_uses_one_wait_and_one_search(store: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for all other ranks at once, then searches once for the missing ones."""
    waits: list[int] = []
    real = HashStore.wait

    def wait(self: HashStore, keys: list[str], timeout: Timeout | None = None) -> None:
        waits.append(len(keys))
        real(self, keys, timeout)

    monkeypatch.setattr(HashStore, "wait", wait)
    with pytest.raises(MissingRanksError) as caught:
        barrier(store, 1000, "b", SOON, 0, None, SOON)
    assert caught.value.ranks == list(range(1, 17))
    assert waits == [1, 999]


# The search for missing ranks


class Shared(HashStore):
    """A store with the default `_absent` of user-defined stores; counts its checks."""

    def __init__(self) -> None:
        super().__init__()
        self.checks = 0
        self.looked = 0

    def check(self, keys: Iterable[Text]) -> bool:
        self.checks += 1
        self.looked += len(list(keys))
        return super().check(keys)

    def _absent(self, keys: Sequence[Text], deadline: Deadline) -> tuple[list[int], bool]:
        return Store._absent(self, keys, deadline)


def failed_barrier(store: Store, rank: int, world: int) -> MissingRanksError:
    with pytest.raises(MissingRanksError) as caught:
        StoreCollectives(store, rank, world).barrier("b", 0.01)
    return caught.value


def test_missing_ranks_are_found_by_bisection() -> None:
    store = Shared()
    store.multi_set([f"b/{rank}" for rank in range(1000)], ["joined"] * 1000)
    store.delete_key("b/17")
    store.delete_key("b/900")
    error = failed_barrier(store, 0, 1000)
    assert error.ranks == [17, 900]
    assert store.checks < 50


@pytest.mark.parametrize(
    ("there", "rank", "ranks", "said"),
    [
        (range(1, 400), 5, [0], "0, <check rank 1 for missing rank info>"),
        (range(400), 300, [], "<check rank 0 for missing rank info>"),
        (range(8, 400), 300, [*range(8)], "0, 1, 2, 3, 4, 5, 6, 7, <check rank 8 for missing rank info>"),
        (range(8, 400), 8, [*range(8)], "0, 1, 2, 3, 4, 5, 6, 7"),
        (range(20, 400), 30, [*range(16)], f"{', '.join(map(str, range(16)))}, possibly others"),
    ],
)
# quirk: collective-missing
def test_in_a_large_world_one_looks_for_all(there: range, rank: int, ranks: list[int], said: str) -> None:
    store = Shared()
    store.multi_set([f"b/{number}" for number in there], ["joined"] * len(there))
    error = failed_barrier(store, rank, 400)
    assert error.ranks == ranks
    assert f"missing ranks: {said}, Wait timeout" in str(error)
    assert rank == 8 or store.looked <= 2 * 16 * 5


def test_gathering_rank_searches_alone(store: HashStore) -> None:
    with pytest.raises(MissingRanksError) as caught:
        StoreCollectives(store, 399, 400).gather_recv("k", "x", SOON)
    assert caught.value.ranks == list(range(399))


def test_incomplete_search_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcpstore_async.collectives._SEARCH_SECONDS", 0.0)
    error = failed_barrier(Shared(), 0, 3)
    assert error.ranks == []
    assert "missing ranks: possibly others, Wait timeout" in str(error)


def test_lost_store_raises_its_own_error(store: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> bool:
        raise DistNetworkError("gone")

    monkeypatch.setattr(HashStore, "wait", lost)
    monkeypatch.setattr(HashStore, "_absent", lost)
    with pytest.raises(DistNetworkError, match="gone"):
        StoreCollectives(store, 0, 2).barrier("b", SOON)


@pytest.mark.parametrize("kind", ["ours", *STOCK_SERVERS])
def test_missing_ranks_are_found_in_few_round_trips(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    real = TCPStore.check

    def check(self: TCPStore, keys: Iterable[Text]) -> bool:
        asked.append(keys)
        return real(self, keys)

    monkeypatch.setattr(TCPStore, "check", check)
    with server_of(kind) as port, TCPStore("127.0.0.1", port, timeout=LIMIT) as store:
        there = [f"b/{rank}" for rank in range(1, 3000, 2)]
        store.multi_set(there, ["joined"] * len(there))
        error = failed_barrier(store, 0, 3000)
        assert error.ranks == list(range(2, 3000, 2))
        world = StoreCollectives(PrefixStore("p", store), 0, 2)
        with pytest.raises(MissingRanksError, match="missing ranks: 1,"):
            world.all_gather("k", b"", 0.01)
        assert store.check(["b/1"])
    assert asked == [["b/1"]]  # only this test's own call


def test_missing_ranks_in_a_file_store(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store", timeout=LIMIT) as store:
        store.set("b/2", "joined")
        assert failed_barrier(store, 0, 4).ranks == [1, 3]


class StoreOfOthers(HashStore):
    """A store whose errors do not inherit from ours, as PyTorch's."""

    def wait(self, keys: Iterable[Text], timeout: Timeout | None = None) -> None:
        try:
            super().wait(keys, timeout)
        except DistStoreError as error:
            raise RuntimeError(str(error)) from None


def test_store_with_foreign_errors(caplog: pytest.LogCaptureFixture) -> None:
    store = StoreOfOthers()
    with pytest.raises(DistStoreError, match="num_workers_joined=1"):
        store_based_barrier(0, store, "group", 2, 0.05)
    with pytest.raises(MissingRanksError) as caught:
        StoreCollectives(store, 0, 3).all_gather("key", b"data", 0.05)
    assert caught.value.ranks == [1, 2]
