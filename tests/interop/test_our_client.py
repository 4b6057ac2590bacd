"""Our two clients through every method, against our server and both of PyTorch's; and masters and workers of each kind
in one job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from client.fakes import proxy_to
from contract.store_kinds import either_client
from support import LIMIT, free_port, server_of
from tcpstore_async import DistStoreError, QueueEmptyError, Store, TCPStore
from torch_forker import Program
from versions import needs

SERVERS = ["ours", "libuv", "legacy"]


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    with server_of(request.param) as port:
        yield request.param, port


@pytest.fixture(params=["sync", "async"])
def store(request: pytest.FixtureRequest, server: tuple[str, int]) -> Iterator[Store]:
    with either_client(request.param) as connect:
        yield connect(server[1])


_numbers = iter(range(1_000_000))


@pytest.fixture
def key() -> str:
    """A name that no other test uses."""
    return f"key{next(_numbers)}"


def test_keys_and_values(store: Store, key: str) -> None:
    """What tests/contract tests at length, and not with every client on every server."""
    for name in (key, "", "\0", "a\0b", "/", "ü", "x" * 8000, b"\xff\xfe"):
        store.set(name, bytearray(b"\x00\xff"))
        assert store.get(name) == b"\x00\xff"
        assert store.check([name])
        assert store.delete_key(name)
        assert not store.check([name])
    assert store.compare_set(key, "old", "new") == b"old"
    assert store.compare_set(key, "", "new") == b"new"
    assert store.compare_set(key, "wrong", "newer") == b"new"
    store.append(key, "er")
    assert store.compare_set(key, b"newer", bytearray(b"newest")) == b"newest"
    assert (store.add(key + "n", 5), store.add(key + "n", -7), store.add(key + "n", True)) == (5, -2, -1)
    assert store.get(key + "n") == b"-1"
    assert store.add(key + "max", 2**63 - 1) == 2**63 - 1
    assert store.add(key + "max", 1) == -(2**63)


def test_8_mib(store: Store, key: str) -> None:
    value = bytes(range(256)) * (8 << 12)
    store.set(key, value)
    assert store.get(key) == value
    assert store.multi_get([key, key]) == [value, value]
    assert store.delete_key(key)


def test_many_at_once(store: Store, key: str) -> None:
    names = [f"{key}/{number}" for number in range(500)]
    store.multi_set(names, [str(number) for number in range(500)])
    assert store.multi_get(names) == [b"%d" % number for number in range(500)]
    assert store.check(names)
    store.wait(names)
    assert store.multi_get(iter(names[:2])) == [b"0", b"1"]
    assert store.check(set(names))
    assert store.check(())
    assert store.multi_get([]) == []
    store.multi_set([], [])
    store.wait([])
    with pytest.raises(DistStoreError, match=r"^multiSet keys and values vectors must be of same size$"):
        store.multi_set(names, ["1"])


@needs("list_keys")
def test_names(store: Store, key: str) -> None:
    before = store.num_keys()
    store.set(key, "")
    assert store.num_keys() == before + 1
    assert key in store.list_keys()
    assert store.delete_key(key) is True
    assert store.delete_key(key) is False
    assert store.num_keys() == before
    assert key not in store.list_keys()


def test_timeouts_have_pytorchs_texts(store: Store, key: str) -> None:
    for timeout, said in ((0, 0), (0.001, 1), (0.05, 50), (timedelta(milliseconds=20), 20), (0.0005, 0)):
        with pytest.raises(DistStoreError, match=rf"^wait timeout after {said}ms, keys: /{key}, /{key}b$"):
            store.wait([key, key + "b"], timeout)
    for timeout in (0, 0.03):
        with pytest.raises(DistStoreError, match=rf"^barrier timeout after {timeout * 1000:.0f}ms, key: {key}bar$"):
            store.barrier(key + "bar", 9, timeout)
    for timeout in (0, 0.03):
        store.set_timeout(timeout)
        reads: list[Callable[[], object]] = [lambda: store.get(key), lambda: store.multi_get([key])]
        for call in reads:
            with pytest.raises(DistStoreError, match=rf"^wait timeout after {timeout * 1000:.0f}ms, keys: /{key}$"):
                call()
    store.set_timeout(LIMIT)
    store.set(key, "now")
    assert store.get(key) == b"now"
    assert store.timeout == timedelta(seconds=LIMIT)


def test_a_timeout_of_0_checks_once(store: Store, key: str) -> None:
    store.set(key, "there")
    store.set_timeout(0)
    for _ in range(20):
        assert store.get(key) == b"there"
        store.wait([key])
        store.wait([key], timedelta(0))
        assert store.multi_get([key]) == [b"there"]
        store.barrier(key + "bar", 1)
        assert store.add(key + "n", 1)
        store.set(key, "there")
        assert store.check([key])


@pytest.mark.parametrize("timeout", [-1, timedelta.max])
def test_a_negative_timeout_waits_for_ever(store: Store, server: tuple[str, int], key: str, timeout: Any) -> None:
    store.set_timeout(timeout)
    with ThreadPoolExecutor(1) as threads, TCPStore("127.0.0.1", server[1], timeout=LIMIT) as other:
        waiting = threads.submit(store.get, key)
        for _ in range(200):
            other.add(key + "n", 1)
        other.set(key, "late")
        assert waiting.result(LIMIT) == b"late"


def test_clone(store: Store, key: str) -> None:
    store.set_timeout(7.5)
    other = store.clone()
    store.set(key, "v")
    assert store.check([key])
    assert other.get(key) == b"v"
    assert other.timeout == timedelta(seconds=7.5)
    other.close()
    assert store.get(key) == b"v"


def test_barrier(store: Store, server: tuple[str, int], key: str) -> None:
    store.barrier(key, 0)
    store.barrier(key, 1, 5)
    with ThreadPoolExecutor(1) as threads, TCPStore("127.0.0.1", server[1], timeout=LIMIT) as other:
        waiting = threads.submit(store.barrier, key + "2", 2)
        other.barrier(key + "2", 2)
        waiting.result(LIMIT)


@needs("queue_push")
def test_queues(store: Store, server: tuple[str, int], key: str) -> None:
    if server[0] == "legacy":
        pytest.skip("PyTorch's legacy server has none")
    assert store.queue_len(key) == 0
    for item in ("1", b"2", bytearray(b""), "4"):
        store.queue_push(key, item)
    assert store.queue_len(key) == 4
    assert store.check([key])
    assert store.queue_pop(key) == b"1"
    assert store.queue_pop(key, False) == b"2"
    store.set_timeout(0)
    assert store.queue_pop(key) == b""
    store.set_timeout(LIMIT)
    assert store.queue_pop(key, block=True) == b"4"
    with pytest.raises(QueueEmptyError, match=r"^queue is empty$"):
        store.queue_pop(key, False)
    for timeout in (0, 0.03):
        store.set_timeout(timeout)
        with pytest.raises(DistStoreError, match=rf"^wait timeout after {timeout * 1000:.0f}ms, keys: /{key}$"):
            store.queue_pop(key)
    store.set_timeout(LIMIT)
    with ThreadPoolExecutor(1) as threads, TCPStore("127.0.0.1", server[1], timeout=LIMIT) as other:
        waiting = threads.submit(store.queue_pop, key)
        other.queue_push(key, "late")
        assert waiting.result(LIMIT) == b"late"
    store.set(key, "a plain value")
    with pytest.raises(QueueEmptyError):
        store.queue_pop(key)


def test_queues_of_a_legacy_client(server: tuple[str, int], key: str) -> None:
    name, port = server
    with proxy_to(port) as proxy, TCPStore("127.0.0.1", proxy.port, timeout=LIMIT, use_libuv=False) as store:
        assert not store.libuvBackend
        if name == "ours":
            store.queue_push(key, "1")
            assert store.queue_len(key) == 1
            assert store.queue_pop(key) == b"1"
            return
        for call in (
            lambda: store.queue_push(key, "1"),
            lambda: store.queue_pop(key),
            lambda: store.queue_pop(key, False),
            lambda: store.queue_len(key),
        ):
            with pytest.raises(NotImplementedError, match=r"^queues not implemented on legacy TCPStore backend$"):
                call()
        assert store.add(key, 1) == 1
        assert proxy.all_sent().count(key.encode()) == 1


def test_a_value_over_the_limit(server: tuple[str, int], key: str) -> None:
    if server[0] == "legacy":
        pytest.skip("PyTorch's legacy server has no limit")
    with TCPStore("127.0.0.1", server[1], timeout=LIMIT) as store, pytest.raises(RuntimeError, match=LOST):
        store.set(key, bytes((8 << 20) + 1))
        store.add(key, 1)


LOST = "Failed to recv, got 0 bytes|reset by peer|Broken pipe"


# One job of both kinds

TORCH_RANK = """
import datetime, sys, torch
port, rank = int(sys.argv[1]), int(sys.argv[2])
store = torch.distributed.TCPStore("127.0.0.1", port, 3, rank == 0, datetime.timedelta(seconds=60))
store.set(f"rank{rank}", str(rank))
for other in range(3):
    assert store.get(f"rank{other}") == str(other).encode()
store.barrier("done", 3)
if rank == 0:
    while store.add("left", 0) < 2:
        pass
else:
    store.add("left", 1)
"""


def do_work(store: TCPStore, rank: int) -> None:
    store.set(f"rank{rank}", str(rank))
    for other in range(3):
        assert store.get(f"rank{other}") == str(other).encode()
    store.barrier("done", 3)


@pytest.fixture
def ranks() -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    for process in started:
        process.end()


@needs("barrier")
def test_our_worker_of_pytorchs_master(ranks: list[Program]) -> None:
    port = free_port()
    ranks.extend([Program(TORCH_RANK, port, 0), Program(TORCH_RANK, port, 1)])
    with TCPStore("127.0.0.1", port, 3, False, LIMIT) as store:
        do_work(store, 2)
        store.add("left", 1)
    assert [process.wait() for process in ranks] == [0, 0]


@needs("barrier")
def test_pytorchs_workers_of_our_master(ranks: list[Program]) -> None:
    port = free_port()
    ranks.extend([Program(TORCH_RANK, port, 1), Program(TORCH_RANK, port, 2)])
    with TCPStore("127.0.0.1", port, 3, True, LIMIT) as store:
        do_work(store, 0)
        assert [process.wait() for process in ranks] == [0, 0]
