"""Generators in processes of their own, and the orders they get: one line of JSON each way.

Knows: processes, pipes, what an order is. Must not know: what is measured.
Invariant: a generator never outlives its `Fleet`, and a failure in it is a LoadError here, in the same words.
"""

import os
import select
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from ..server.listening import raise_file_limit
from .generator import Act, Clock, Generator, Late, LoadError, Result, Unreachable, waited

_KINDS: Final = {kind.__name__: kind for kind in (Unreachable, Late)}


_ROOT: Final = str(Path(__file__).resolve().parent.parent.parent)
_PROGRAM: Final = "import sys; sys.path[0] = sys.argv[1]; from tcpstore_async.load.workers import work; work()"
"""This very package, wherever we are: a checkout in the working directory must not hide a compiled one."""


def process_clock(pid: int) -> int:
    """Linux's clock of another process's processor time, for `time.clock_gettime`; finer than /proc's."""
    return (~pid << 3) | 2


class Open(msgspec.Struct, tag=True):
    """Make room for `count` more connections, ranks from `first` on."""

    count: int
    first: int


class ClosedLoop(msgspec.Struct, tag=True):
    """See `Generator.play`; seconds."""

    acts: list[Act]
    limit: float
    repeat: int = 1
    window: int = 0
    background: int = 0
    behind: list[Act] | None = None
    more: int = 0


class OpenLoop(msgspec.Struct, tag=True):
    """See `Generator.pace`; seconds."""

    act: Act
    seconds: float
    interval: float
    limit: float


Order = Open | ClosedLoop | OpenLoop


class Done(msgspec.Struct):
    """What an order took. Times are seconds of the monotonic clock, which all processes share."""

    began: float
    ended: float
    start: Clock
    """The generator's, when it began."""
    end: Clock
    operations: int
    behind: int
    """Requests of the background."""
    latencies: bytes
    """An array of C floats, seconds."""
    failed: str = ""
    kind: str = ""
    """Of the LoadError."""


class Took(msgspec.Struct):
    """What an order took on all generators together."""

    wall: float
    """Seconds from the first byte to the last answer."""
    cpu: float
    """Seconds of processor time of all generators."""
    share: float
    """Of the wall time, how long the busiest generator computed or waited for a core: near 1 it may set the pace."""
    clocks: list[Clock]
    """Of each generator, when it was done."""
    ended: float
    """Seconds of the monotonic clock."""
    operations: int
    behind: int
    """Requests of the background that were answered besides."""
    latencies: "array[float]"
    """Seconds, sorted."""

    def quantile(self, part: float) -> float | None:
        """Seconds that this part (0 to 1) of the requests took at most; None if there were none."""
        if not self.latencies:
            return None
        return float(self.latencies[min(len(self.latencies) - 1, int(part * len(self.latencies)))])


def busy(start: Clock, end: Clock) -> float:
    """Seconds in which a generator had something to do: what waits for a core is not free."""
    return end.cpu - start.cpu + end.waited - start.waited


class WorkerPool:
    """`count` connections to a server, spread over the generators; made by `fleet`."""

    def __init__(self, processes: list["subprocess.Popen[bytes]"]) -> None:
        self._processes = processes
        self._opened = 0

    def open(self, count: int) -> None:
        """Make room for `count` more connections, spread over the generators. Raises LoadError."""
        share, more = divmod(count, len(self._processes))
        for number, process in enumerate(self._processes):
            mine = share + (number < more)
            _say(process.stdin, msgspec.json.encode(Open(mine, self._opened)))
            self._opened += mine
        self.collect()

    def clocks(self) -> list[Clock]:
        """Of each generator, now."""
        pids = [process.pid for process in self._processes]
        return [Clock(time.clock_gettime(process_clock(pid)), waited(str(pid))) for pid in pids]

    def tell(self, order: ClosedLoop | OpenLoop) -> Took:
        """Give the order to all generators at once and wait for all of them. Raises LoadError."""
        self.send(order)
        return self.collect()

    def send(self, order: ClosedLoop | OpenLoop) -> None:
        """Give the order; `collect` is to be called for it before the next."""
        line = msgspec.json.encode(order)
        for process in self._processes:
            _say(process.stdin, line)

    def collect(self) -> Took:
        """Wait for all generators to have done the order. Raises LoadError."""
        found: list[Done] = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise LoadError(f"a load generator ended with status {process.wait(10)}")
            found.append(msgspec.json.decode(line, type=Done))
        for done in found:
            if done.failed:
                raise _KINDS.get(done.kind, LoadError)(done.failed)
        wall = max(done.ended for done in found) - min(done.began for done in found)
        every: list[float] = []
        for done in found:
            every.extend(array("f", done.latencies))
        return Took(
            wall,
            sum(done.end.cpu - done.start.cpu for done in found),
            max(busy(done.start, done.end) for done in found) / wall if wall > 0 else 0.0,
            [done.end for done in found],
            max(done.ended for done in found),
            sum(done.operations for done in found),
            sum(done.behind for done in found),
            array("f", sorted(every)),
        )


@contextmanager
def worker_pool(
    host: str, port: int, count: int, *, generators: int = 1, source: str = "", cores: set[int] | None = None
) -> Iterator[WorkerPool]:
    """So many connections to a server, from processes on these processor cores. Nothing of them is left at the end."""
    if not hasattr(select, "epoll"):
        raise LoadError("the load generator needs epoll, which only Linux has")
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(min(generators, count)):
            # A session of its own: Ctrl-C is for the parent, which ends this one.
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, _ROOT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            processes.append(process)
            if cores:
                os.sched_setaffinity(process.pid, cores)
            _say(process.stdin, msgspec.json.encode([host, port, source]))
        made = WorkerPool(processes)
        made.open(count)
        yield made
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    _shut(pipe)


def _shut(pipe: IO[bytes]) -> None:
    try:
        pipe.close()
    except BrokenPipeError:
        pass


def _say(pipe: IO[bytes] | None, line: bytes) -> None:
    assert pipe is not None
    try:
        pipe.write(line + b"\n")
        pipe.flush()
    except BrokenPipeError:
        raise LoadError("a load generator has ended") from None


def work() -> None:
    """The life of a generator process: orders on standard input, answers on standard output, until it is closed."""
    raise_file_limit()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    first = sys.stdin.buffer.readline()
    if not first:
        return  # the parent was interrupted while it started this
    host, port, source = msgspec.json.decode(first, type=tuple[str, int, str])
    generator = Generator(host, port, source)
    try:
        for line in sys.stdin.buffer:
            done = _obey(generator, msgspec.json.decode(line, type=Order))
            sys.stdout.buffer.write(msgspec.json.encode(done) + b"\n")
            sys.stdout.buffer.flush()
    except BrokenPipeError:
        os._exit(1)  # the parent is gone; the interpreter would try to flush once more, and complain


def _end_with_parent() -> None:
    """Orders are read between two of them only, and one may last for hours."""
    gone = select.poll()
    gone.register(sys.stdin.fileno(), 0)  # no event but that the other end is closed, which is always told
    gone.poll()
    os._exit(1)


def _obey(generator: Generator, order: Any) -> Done:
    result = Result(time.perf_counter())
    failed = kind = ""
    try:
        if isinstance(order, Open):
            generator.open(order.count, order.first)
        elif isinstance(order, OpenLoop):
            result = generator.pace(order.act, order.seconds, order.interval, order.limit)
        else:
            result = generator.play(
                order.acts, order.limit, order.repeat, order.window, order.background, order.behind, order.more
            )
    except LoadError as error:
        failed, kind = str(error), type(error).__name__
    return Done(
        result.began,
        result.ended,
        result.start,
        result.end,
        result.operations,
        result.behind,
        result.latencies.tobytes(),
        failed,
        kind,
    )
