"""A job of asyncio programs: tasks in several processes take work from one queue. `python examples/asyncio_job.py`

The first process runs the server on its own loop. No PyTorch, no threads.
"""

import asyncio
import sys

import tcpstore_async

PROCESSES, TASKS, ITEMS = 3, 4, 100
OVER = b""


async def work(store: tcpstore_async.AsyncTCPStore) -> None:
    while (item := await store.queue_pop("work")) != OVER:
        await store.add("sum", int(item) ** 2)
        await store.add("done", 1)


async def worker(port: int) -> None:
    async with tcpstore_async.AsyncTCPStore("127.0.0.1", port) as store:
        await asyncio.gather(*(work(store) for _ in range(TASKS)))


async def main() -> int:
    async with tcpstore_async.serve("127.0.0.1", 0) as server:
        command = (sys.executable, __file__, str(server.port))
        workers = [await asyncio.create_subprocess_exec(*command) for _ in range(PROCESSES)]
        async with tcpstore_async.AsyncTCPStore("127.0.0.1", server.port) as store:
            items = [str(number).encode() for number in range(ITEMS)] + [OVER] * (PROCESSES * TASKS)
            await asyncio.gather(*(store.queue_push("work", item) for item in items))
            failed = [await one.wait() for one in workers]
            done, total = await store.get("done"), await store.get("sum")
            print(f"{done.decode()} numbers squared by {PROCESSES} processes: {total.decode()}")
    return sum(failed)


if __name__ == "__main__":
    sys.exit(asyncio.run(worker(int(sys.argv[1])) if len(sys.argv) > 1 else main()))
