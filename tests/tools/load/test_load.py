"""Many threads, and many tasks, on one store: all results are consistent, and nothing deadlocks.

Each takes a few seconds; TCPSTORE_LOAD_SECONDS=60 makes it a minute.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from support import LIMIT, server_of
from tcpstore_async import AsyncTCPStore, QueueEmptyError, StoreTimeoutError, TCPStore

SECONDS = float(os.environ.get("TCPSTORE_LOAD_SECONDS", "2"))
THREADS = 64
TASKS = 1000

pytestmark = [pytest.mark.unmeasured, pytest.mark.timeout(120 + 2 * SECONDS)]


@pytest.fixture(scope="module", params=["ours", "libuv"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    with server_of(request.param) as found:
        yield found


class Worker:
    """One thread's calls, and their expected results."""

    def __init__(self, store: TCPStore, number: int, end: float, prefix: str) -> None:
        self.store = store
        self.number = number
        self.end = end
        self.prefix = prefix
        self.rng = random.Random(number)
        self.mine: dict[str, bytes] = {}
        self.added = 0
        self.pushed: list[bytes] = []
        self.popped: list[bytes] = []
        self.calls = 0

    def run(self) -> None:
        calls = [
            self.write,
            self.read,
            self.add,
            self.look,
            self.wait_until_timeout,
            self.push,
            self.pop,
            self.swap,
            self.meet,
        ]
        while time.monotonic() < self.end:
            self.rng.choice(calls)()
            self.calls += 1

    def name(self) -> str:
        return f"{self.prefix}/{self.number}/{self.rng.randrange(5)}"

    def write(self) -> None:
        name, value = self.name(), self.rng.randbytes(self.rng.choice([0, 3, 900, 70_000]))
        self.store.set(name, value)
        self.mine[name] = value

    def read(self) -> None:
        name = self.name()
        if name in self.mine:
            assert self.store.get(name) == self.mine[name]
            assert self.store.multi_get([name, name]) == [self.mine[name]] * 2

    def add(self) -> None:
        before = self.store.add(f"{self.prefix}/sum", 1)
        assert self.store.add(f"{self.prefix}/sum", 0) >= before
        self.added += 1

    def look(self) -> None:
        name = self.name()
        assert self.store.check([name]) == (name in self.mine)
        if name in self.mine and self.rng.random() < 0.3:
            assert self.store.delete_key(name)
            del self.mine[name]
            assert not self.store.check([name])

    def wait_until_timeout(self) -> None:
        with pytest.raises(StoreTimeoutError):
            self.store.wait([self.prefix + "/never"], self.rng.choice([0, 0.001, 0.01]))

    def push(self) -> None:
        item = b"%d.%d" % (self.number, len(self.pushed))
        self.store.queue_push(f"{self.prefix}/queue", item)
        self.pushed.append(item)

    def pop(self) -> None:
        try:
            self.popped.append(self.store.queue_pop(f"{self.prefix}/queue", False))
        except QueueEmptyError:
            pass

    def swap(self) -> None:
        name = f"{self.prefix}/swap{self.number}"
        old = self.mine.get(name, b"")
        new = b"%d" % self.calls
        assert self.store.compare_set(name, old, new) == new
        self.mine[name] = new

    def meet(self) -> None:
        """Wait for what another thread is going to write."""
        name = f"{self.prefix}/met{self.number}.{self.calls}"
        later = threading.Timer(0.001, self.store.set, (name, "v"))
        later.start()
        assert self.store.get(name) == b"v"
        later.join()
        self.store.delete_key(name)


def test_64_threads_on_one_store(port: int) -> None:
    end = time.monotonic() + SECONDS
    with TCPStore("127.0.0.1", port, timeout=LIMIT) as store, ThreadPoolExecutor(THREADS) as threads:
        workers = [Worker(store, number, end, f"load{port}") for number in range(THREADS)]
        for one in [threads.submit(worker.run) for worker in workers]:
            one.result(SECONDS + LIMIT)
        assert store.add(f"load{port}/sum", 0) == sum(worker.added for worker in workers)
        left = [store.queue_pop(f"load{port}/queue") for _ in range(store.queue_len(f"load{port}/queue"))]
        popped = Counter(left)
        for worker in workers:
            popped.update(worker.popped)
            for name, value in worker.mine.items():
                assert store.get(name) == value
        assert popped == Counter(item for worker in workers for item in worker.pushed)
        assert all(worker.calls for worker in workers)
        counts = [worker.calls for worker in workers]
        print(f"{sum(counts)} calls, {min(counts)} to {max(counts)} per thread")


async def test_a_thousand_cancelled_tasks(port: int) -> None:
    end = time.monotonic() + SECONDS
    prefix = f"tasks{port}"
    pushed: list[bytes] = []
    popped: list[bytes] = []
    sure = maybe = cancelled = 0

    async def push(store: AsyncTCPStore, number: int) -> None:
        item = b"%d" % number
        pushed.append(item)
        await store.queue_push(prefix + "queue", item)

    async def work(store: AsyncTCPStore, number: int) -> None:
        nonlocal sure, maybe
        rng = random.Random(number)
        name = f"{prefix}/{number}"
        what = rng.randrange(5)
        if what == 0:
            await asyncio.shield(push(store, number))
        elif what == 1:
            popped.append(await store.queue_pop(prefix + "queue"))
        elif what == 2:
            maybe += 1
            await store.add(prefix + "sum", 1)
            sure += 1
        elif what == 3:
            await store.set(name, name)
            assert await store.get(name) == name.encode()
        else:
            with pytest.raises(StoreTimeoutError):
                await store.wait([prefix + "never"], rng.random() / 20)

    rng = random.Random(1)
    async with await AsyncTCPStore.connect("127.0.0.1", port, timeout=LIMIT) as store:
        number = 0
        while time.monotonic() < end or not number:
            tasks = [asyncio.create_task(work(store, number + one)) for one in range(TASKS)]
            number += TASKS
            for _ in range(rng.randrange(1, 30)):
                await asyncio.sleep(0)
            for task in rng.sample(tasks, TASKS // 2):
                task.cancel()
            _, waiting = await asyncio.wait(tasks, timeout=0.2)
            for task in waiting:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                cancelled += isinstance(result, asyncio.CancelledError)
                assert result is None or isinstance(result, asyncio.CancelledError), result
        assert sure <= await store.add(prefix + "sum", 0) <= maybe
        while len(popped) < len(pushed):
            popped.append(await asyncio.wait_for(store.queue_pop(prefix + "queue"), LIMIT))
        assert await store.queue_len(prefix + "queue") == 0
        assert Counter(popped) == Counter(pushed)
    print(f"{number} tasks, {cancelled} cancelled, {len(pushed)} items")


async def test_a_call_among_many_that_wait(port: int) -> None:
    """Blocked calls look for a connection one at a time, so other calls get one in between."""
    async with await AsyncTCPStore.connect("127.0.0.1", port, timeout=LIMIT) as store:
        waiting = [asyncio.create_task(store.get(f"waiters{port}/{number}")) for number in range(500)]
        await asyncio.sleep(0.05)
        await store.set(f"waiters{port}", "among them")
        assert await store.add(f"waiters{port}/sum", 2) == 2
        assert sum(task.done() for task in waiting) == 0
        await store.multi_set([f"waiters{port}/{number}" for number in range(500)], ["now"] * 500)
        assert set(await asyncio.gather(*waiting)) == {b"now"}
