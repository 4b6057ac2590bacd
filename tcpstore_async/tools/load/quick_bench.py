"""The short benchmark of a running server: one operation after the other, from many ranks.

Invariant: its keys have their own prefix and are deleted at the end, whatever the outcome; if the server does not
answer in time, the error says that keys may remain. Must not know how results are printed.
"""

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import msgspec

from .generator import Late, LoadError, Step, Unreachable
from .scripts import Operation, hello, operation
from .workers import ClosedLoop, WorkerPool, worker_pool

SATURATED: Final = 0.9
"""Share of a core from which the generator may be the bottleneck, not the server."""

_PREFIX: Final = "/tcpstore-bench/"
"""Prefix of all keys."""
_WINDOW: Final = 512
"""Ranks that connect simultaneously. Connecting is not measured."""
_CLEANUP_SECONDS: Final = 5.0
"""Maximum time to delete the keys after an interrupt."""


class Row(msgspec.Struct):
    """The measurement of one operation. `p95_ms` is the latency in milliseconds of the 95th percentile."""

    operation: str
    requests: int
    seconds: float
    per_second: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    load_cpu: float
    """Share of the time (0 to 1) in which the generator computed or waited for a core."""


def measure(
    host: str,
    port: int,
    *,
    ranks: int,
    names: list[str],
    requests: int,
    size: int,
    limit: float,
    progress: Callable[[int, str], None],
) -> Generator[Row, None, None]:
    """Measure each operation with `requests` requests from `ranks` ranks; yield a row when an operation is done.

    Values have `size` bytes; each phase of an operation may take `limit` seconds. `progress` is called with the number
    of operations done and the name of the next. A caller that stops early must close the generator, which deletes the
    keys. Raises LoadError.
    """  # fmt: skip
    prefix = _PREFIX.encode() + os.urandom(6).hex().encode() + b"/"
    operations = [(name, operation(name, prefix, size)) for name in names]
    cleanup: list[Step] = []
    with _cleaning(host, port, ranks, cleanup, min(limit, _CLEANUP_SECONDS)), worker_pool(host, port, ranks) as load:
        load.run(ClosedLoop(hello(), limit, window=_WINDOW))
        for number, (name, one) in enumerate(operations):
            progress(number, name)
            cleanup.extend(step for step in one.after if step not in cleanup)
            yield _row(load, name, one, *divmod(requests, ranks), limit)
        if cleanup:
            progress(len(operations), "cleaning up")
            load.run(ClosedLoop(cleanup, limit))


def _row(load: WorkerPool, name: str, one: Operation, repeat: int, extra: int, limit: float) -> Row:
    if one.before:
        load.run(ClosedLoop(one.before, limit))
    took = load.run(ClosedLoop([one.request], limit, repeat=repeat, extra=extra))
    p50, p95, p99 = ((took.quantile(part) or 0.0) * 1000 for part in (0.5, 0.95, 0.99))
    return Row(name, took.operations, took.wall, took.operations / took.wall, p50, p95, p99, took.share)


@contextmanager
def _cleaning(host: str, port: int, ranks: int, cleanup: list[Step], limit: float) -> Iterator[None]:
    """Delete the keys after an early end, unless the server is gone or did not answer in time."""
    try:
        yield
    except Unreachable:
        raise  # the server is gone, and its keys with it
    except Late as error:
        if not cleanup:
            raise
        raise Late(f"{error}; keys under {_PREFIX} may remain") from None
    except BaseException:
        with suppress(LoadError):
            _clean(host, port, ranks, cleanup, limit)
        raise


def _clean(host: str, port: int, ranks: int, cleanup: list[Step], limit: float) -> None:
    """Delete the keys over new connections, as the old ones may be blocked. Raises LoadError."""
    if cleanup:
        with worker_pool(host, port, ranks) as load:
            load.run(ClosedLoop([*hello(), *cleanup], limit, window=_WINDOW))
