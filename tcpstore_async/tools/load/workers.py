"""Worker processes that run load generators, and the orders and results exchanged with them as lines of JSON.

Invariant: a worker never outlives its pool, and its failure is raised here as the same LoadError. Must not know what is
measured.
"""

import os
import select
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from ...server.listen_socket import raise_file_limit
from .generator import Clock, Generator, Late, LoadError, Result, Step, Unreachable, waited

_KINDS: Final = {kind.__name__: kind for kind in (Unreachable, Late)}

_ROOT: Final = str(Path(__file__).resolve().parent.parent.parent)
"""Argument of the program: where this package is."""

_PROGRAM: Final = "import sys; sys.path[0] = sys.argv[1]; from tcpstore_async.tools.load.workers import work; work()"
"""Program of a worker. It imports this very package: a checkout in the working directory must not shadow it."""


def process_clock(pid: int) -> int:
    """Return Linux's CPU clock of another process, for `time.clock_gettime`; it is finer than /proc's."""
    return (~pid << 3) | 2


class Open(msgspec.Struct, tag=True):
    """Order: open `count` more connections, ranks from `first` on."""

    count: int
    first: int


class ClosedLoop(msgspec.Struct, tag=True):
    """Order: see `Generator.closed_loop`."""

    steps: list[Step]
    limit: float
    repeat: int = 1
    window: int = 0
    background: int = 0
    background_steps: list[Step] | None = None
    extra: int = 0


class OpenLoop(msgspec.Struct, tag=True):
    """Order: see `Generator.open_loop`."""

    step: Step
    seconds: float
    interval: float
    limit: float


Order = Open | ClosedLoop | OpenLoop


class Done(msgspec.Struct):
    """A worker's result. Times are in seconds of the monotonic clock, which all processes share."""

    began: float
    ended: float
    start: Clock
    end: Clock
    operations: int
    background_operations: int
    latencies: bytes
    """An array of C floats, in seconds."""
    error: str = ""
    """The text of the LoadError; empty for success."""
    kind: str = ""
    """The name of the LoadError's class."""


class Took(msgspec.Struct):
    """The combined result of all workers."""

    wall: float
    """Seconds from the first byte sent to the last reply."""
    cpu: float
    """CPU seconds of all workers."""
    share: float
    """Share of the time in which the busiest worker computed or waited for a core; near 1 it may be the bottleneck."""
    clocks: list[Clock]
    """Each worker's clock at the end."""
    ended: float
    """Seconds of the monotonic clock."""
    operations: int
    background_operations: int
    """Replies on background connections, which `operations` does not include."""
    latencies: "array[float]"
    """Seconds, sorted."""

    def quantile(self, fraction: float) -> float | None:
        """Return the latency in seconds that a fraction (0 to 1) of the requests did not exceed; None without any."""
        if not self.latencies:
            return None
        return float(self.latencies[min(len(self.latencies) - 1, int(fraction * len(self.latencies)))])


def busy(start: Clock, end: Clock) -> float:
    """Return the seconds in which a worker computed or waited for a core."""
    return end.cpu - start.cpu + end.waited - start.waited


class WorkerPool:
    """Connections to a server, spread over worker processes; made by `worker_pool`."""

    def __init__(self, processes: list["subprocess.Popen[bytes]"]) -> None:
        self._processes = processes
        self._opened = 0

    def open(self, count: int) -> None:
        """Open `count` more connections, spread over the workers. Raises LoadError."""
        share, remainder = divmod(count, len(self._processes))
        for number, process in enumerate(self._processes):
            part = share + (number < remainder)
            _send_line(process.stdin, msgspec.json.encode(Open(part, self._opened)))
            self._opened += part
        self.collect()

    def clocks(self) -> list[Clock]:
        """Return the current clock of each worker."""
        pids = [process.pid for process in self._processes]
        return [Clock(time.clock_gettime(process_clock(pid)), waited(str(pid))) for pid in pids]

    def run(self, order: ClosedLoop | OpenLoop) -> Took:
        """Have all workers execute an order and wait for them. Raises LoadError."""
        self.send(order)
        return self.collect()

    def send(self, order: ClosedLoop | OpenLoop) -> None:
        """Send an order to all workers. `collect` must be called before the next one."""
        line = msgspec.json.encode(order)
        for process in self._processes:
            _send_line(process.stdin, line)

    def collect(self) -> Took:
        """Wait until all workers have executed the order. Raises LoadError."""
        results: list[Done] = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise LoadError(f"a load worker exited with status {process.wait(10)}")
            results.append(msgspec.json.decode(line, type=Done))
        for done in results:
            if done.error:
                raise _KINDS.get(done.kind, LoadError)(done.error)
        wall = max(done.ended for done in results) - min(done.began for done in results)
        latencies: list[float] = []
        for done in results:
            latencies.extend(array("f", done.latencies))
        return Took(
            wall,
            sum(done.end.cpu - done.start.cpu for done in results),
            max(busy(done.start, done.end) for done in results) / wall if wall > 0 else 0.0,
            [done.end for done in results],
            max(done.ended for done in results),
            sum(done.operations for done in results),
            sum(done.background_operations for done in results),
            array("f", sorted(latencies)),
        )


@contextmanager
def worker_pool(
    host: str,
    port: int,
    count: int,
    *,
    generators: int = 1,
    ports: Sequence[int] = (),
    source: str = "",
    cores: set[int] | None = None,
) -> Iterator[WorkerPool]:
    """Open `count` connections to a server from worker processes on these cores; close and end them with the context.

    `ports`, those of relays, take the place of `port`: each worker connects to some of them. Raises LoadError.
    """
    if not hasattr(select, "epoll"):
        raise LoadError("the load generator requires Linux (epoll)")
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(min(generators, count)):
            # In its own session: Ctrl-C is for the parent, which ends the worker.
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, _ROOT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            processes.append(process)
            if cores:
                os.sched_setaffinity(process.pid, cores)
            _send_line(process.stdin, msgspec.json.encode([host, list(ports[number::generators]) or [port], source]))
        pool = WorkerPool(processes)
        pool.open(count)
        yield pool
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    _close(pipe)


def _close(pipe: IO[bytes]) -> None:
    try:
        pipe.close()
    except BrokenPipeError:
        pass


def _send_line(pipe: IO[bytes] | None, line: bytes) -> None:
    assert pipe is not None
    try:
        pipe.write(line + b"\n")
        pipe.flush()
    except BrokenPipeError:
        raise LoadError("a load worker has exited") from None


def work() -> None:
    """Run a worker process: read orders from standard input and write results to standard output until it is closed."""
    raise_file_limit()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    first = sys.stdin.buffer.readline()
    if not first:
        return  # the parent was interrupted while it started this process
    host, ports, source = msgspec.json.decode(first, type=tuple[str, list[int], str])
    generator = Generator(host, ports, source)
    try:
        for line in sys.stdin.buffer:
            done = _execute(generator, msgspec.json.decode(line, type=Order))
            sys.stdout.buffer.write(msgspec.json.encode(done) + b"\n")
            sys.stdout.buffer.flush()
    except BrokenPipeError:
        os._exit(1)  # the parent is gone; exiting normally would flush once more and print an error


def _end_with_parent() -> None:
    """Exit when the parent closes the pipe, even while an order is executed, which may take hours."""
    poll = select.poll()
    poll.register(sys.stdin.fileno(), 0)  # a hang-up is always reported
    poll.poll()
    os._exit(1)


def _execute(generator: Generator, order: Any) -> Done:
    result = Result(time.perf_counter())
    text = kind = ""
    try:
        if isinstance(order, Open):
            generator.open(order.count, order.first)
        elif isinstance(order, OpenLoop):
            result = generator.open_loop(order.step, order.seconds, order.interval, order.limit)
        else:
            result = generator.closed_loop(
                order.steps,
                order.limit,
                order.repeat,
                order.window,
                order.background,
                order.background_steps,
                order.extra,
            )
    except LoadError as error:
        text, kind = str(error), type(error).__name__
    return Done(
        result.began,
        result.ended,
        result.start,
        result.end,
        result.operations,
        result.background_operations,
        result.latencies.tobytes(),
        text,
        kind,
    )
