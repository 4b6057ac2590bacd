"""The demo: a server, simulated ranks that connect at once, and PyTorch processes that form a group over it; then
plain Python processes of which rank 0 hosts the server.

`make demo` runs it. Exit status 1, with one line on standard error, if a step fails.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from simulated import Failed, Rank, connect
from tcpstore_async.server.listen_socket import max_connections_by_files, raise_file_limit
from tcpstore_async.serving import run_loop

START_SECONDS = 30.0
STEP_SECONDS = 60.0
TORCH_SECONDS = 240.0
"""Time limits of the steps. Importing PyTorch is slow on a small machine."""

T = TypeVar("T")


def show(label: str, text: str) -> None:
    print(f"  {label:<9} {text}", flush=True)


async def together(what: str, seconds: float, steps: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all steps concurrently and return their results; cancel all when one fails."""
    tasks = [asyncio.ensure_future(step) for step in steps]
    try:
        done, pending = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        if pending:
            raise Failed(f"{what}: {len(pending):,} of {len(tasks):,} not finished within {seconds:g} s")
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def server() -> AsyncIterator[dict[str, Any]]:
    """Run `tcpstore serve` in a child process; yield the event that it prints when it is ready."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tcpstore_async", "serve", "--port", "0"),
                cwd=folder,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
            )
        assert process.stdout is not None
        try:
            try:
                line = await asyncio.wait_for(process.stdout.readline(), START_SECONDS)
            except asyncio.TimeoutError:
                raise Failed(f"the server was not ready within {START_SECONDS:g} s") from None
            if not line:
                raise Failed(f"the server did not start: {last_line(log.read_text())}")
            yield json.loads(line)
            process.send_signal(signal.SIGTERM)
            try:
                status = await asyncio.wait_for(process.wait(), STEP_SECONDS)
            except asyncio.TimeoutError:
                raise Failed(f"the server was still running {STEP_SECONDS:g} s after SIGTERM") from None
            if status:
                raise Failed(f"the server exited with status {status}: {last_line(log.read_text())}")
        finally:
            await kill(process)


async def simulated_ranks(port: int, count: int) -> None:
    print(f"\n{count:,} simulated ranks, connecting at once")
    ranks: list[Rank] = []

    async def join(number: int) -> tuple[int, int]:
        rank = await connect(port, number)
        ranks.append(rank)
        return await rank.join(), number

    async def pass_barrier(rank: Rank) -> tuple[int, int]:
        return await rank.pass_barrier(b"/store_based_barrier_key:1", count), rank.number

    try:
        start = time.monotonic()
        joined = sorted(await together("joining", STEP_SECONDS, [join(number) for number in range(count)]))
        seconds = time.monotonic() - start
        if [arrival for arrival, _ in joined] != list(range(1, count + 1)):
            raise Failed("the server did not count every joining rank exactly once")
        show("joined", f"{len(joined):,} in {seconds:.2f} s; rank {joined[0][1]} first, rank {joined[-1][1]} last")

        start = time.monotonic()
        passed = sorted(await together("the barrier", STEP_SECONDS, [pass_barrier(rank) for rank in ranks]))
        seconds = time.monotonic() - start
        if [arrival for arrival, _ in passed] != list(range(1, count + 1)):
            raise Failed("the barrier did not count every rank exactly once")
        show(
            "barrier",
            f"{len(passed):,} passed in {seconds:.2f} s; rank {passed[-1][1]} arrived last and released the others",
        )
    finally:
        for rank in ranks:
            rank.leave()


async def plain_ranks(count: int) -> None:
    print(f"\n{count} plain Python processes; rank 0 hosts the server", flush=True)
    start = time.monotonic()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    reports = await together(
        "finding each other", STEP_SECONDS, [plain_rank(port, rank, count) for rank in range(count)]
    )
    for report in reports:
        if report["found"] != count:
            raise Failed(f"rank {report['rank']} found {report['found']} addresses, not {count}")
        show(f"rank {report['rank']}", f"pid {report['pid']:<7} read {count} addresses, reached {report['next']}")
    show("took", f"{time.monotonic() - start:.2f} s, three barriers included")


async def plain_rank(port: "asyncio.Future[int]", rank: int, count: int) -> dict[str, Any]:
    """Run one plain process and return its report; rank 0 sets `port` for the others."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(Path(__file__).with_name("plain_rank.py"))),
        *map(str, (await port if rank else 0, rank, count)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        first = b"" if rank else await process.stdout.readline()
        if first:
            port.set_result(json.loads(first)["port"])
        return await report_of(process, f"rank {rank}")
    finally:
        await kill(process)


async def report_of(process: asyncio.subprocess.Process, name: str) -> dict[str, Any]:
    """Return the report that a process prints last. Raises Failed if the process fails."""
    out, errors = await process.communicate()
    if process.returncode:
        text = last_line(errors.decode(errors="replace"))
        raise Failed(f"{name} exited with status {process.returncode}: {text}")
    report: dict[str, Any] = json.loads(out.splitlines()[-1])
    return report


async def kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


async def torch_ranks(port: int, count: int) -> None:
    print(f"\n{count} PyTorch processes, a gloo group over the same server", flush=True)
    start = time.monotonic()
    reports = await together("the gloo group", TORCH_SECONDS, [torch_rank(port, rank, count) for rank in range(count)])
    seconds = time.monotonic() - start
    expected = count * (count + 1) / 2
    for report in reports:
        if report["sum"] != expected:
            raise Failed(f"PyTorch rank {report['rank']} got {report['sum']} from all_reduce, not {expected}")
        terms = " + ".join(str(rank + 1) for rank in range(count))
        show(f"rank {report['rank']}", f"pid {report['pid']:<7} all_reduce: {terms} = {report['sum']:g}")
    steps = {name: max(report[f"{name}_seconds"] for report in reports) for name in ("import", "join", "reduce")}
    show(
        "took",
        f"{seconds:.1f} s: import torch {reports[0]['version']} {steps['import']:.1f} s, "
        f"form the group {steps['join']:.2f} s, all_reduce {steps['reduce']:.3f} s",
    )


async def torch_rank(port: int, rank: int, count: int) -> dict[str, Any]:
    """Run one PyTorch process and return its report."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "ignore", str(Path(__file__).with_name("torch_rank.py"))),
        *map(str, (port, rank, count)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**loopback, **os.environ},
    )
    try:
        return await report_of(process, f"PyTorch rank {rank}")
    finally:
        await kill(process)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["(no output)"])[-1]


async def demo(ranks: int, torch: int, plain: int) -> None:
    main_task = asyncio.current_task()
    assert main_task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main_task.cancel)
    raise_file_limit()
    if max_connections_by_files() < ranks:
        raise Failed(f"the limit on open files is too low for {ranks:,} ranks (ulimit -n)")
    start = time.monotonic()
    async with server() as ready:
        print("Server: tcpstore serve --port 0")
        show("ready", f"{ready['host']}, port {ready['port']}, pid {ready['pid']}; {ready['build']}")
        show("took", f"{time.monotonic() - start:.2f} s to start")
        await simulated_ranks(ready["port"], ranks)
        if torch:
            await torch_ranks(ready["port"], torch)
    if plain:
        await plain_ranks(plain)
    print("\nThe servers have stopped; every step succeeded.")
    print(NEXT if torch else NEXT_WITHOUT_TORCH)


NEXT = """
Try next (.venv has the plain Python build; `pip install .` compiles it, as for this demo)
  .venv/bin/tcpstore serve --host 127.0.0.1 --port 29500     and in a second terminal, with unmodified PyTorch:
  .venv/bin/python -W ignore -c 'from torch.distributed import TCPStore; store = TCPStore("127.0.0.1", 29500); \
store.set("hello", "world"); print(store.get("hello"))'
  .venv/bin/python examples/survive.py     training goes on while the server is killed three times"""

NEXT_WITHOUT_TORCH = """
Try next (.venv has the plain Python build; `pip install .` compiles it, as for this demo)
  make demo                                                  the same with four PyTorch processes
  .venv/bin/tcpstore serve --host 127.0.0.1 --port 29500     a server for PyTorch programs (see README.md)"""


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def main() -> None:
    parser = argparse.ArgumentParser(prog="demo", description="Show the server at work.")
    parser.add_argument("--ranks", type=positive, default=1000, help="simulated ranks (1000)")
    parser.add_argument("--torch", type=int, default=4, help="PyTorch processes; 0: none (4)")
    parser.add_argument("--plain", type=int, default=8, help="plain Python processes; 0: none (8)")
    options = parser.parse_args()
    try:
        run_loop(demo(options.ranks, options.torch, options.plain))
    except Failed as error:
        sys.exit(f"demo: {error}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit("demo: interrupted")


if __name__ == "__main__":
    main()
