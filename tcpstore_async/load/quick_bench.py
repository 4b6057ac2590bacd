"""The short benchmark: one operation after the other, from many ranks, against a server that runs already.

Knows: which orders make an operation's measurement. Must not know: how results are printed.
Invariant: its keys are its own, and are deleted at the end, however that comes, if the server still answers; where it
does not in time, the error says that keys may be left.
"""

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import msgspec

from .generator import Act, Late, LoadError, Unreachable
from .scripts import Operation, hello, operation
from .workers import ClosedLoop, WorkerPool, worker_pool

SATURATED: Final = 0.9
"""Of a core: from this share on the generator may have set the pace, not the server."""

_PLACE: Final = "/tcpstore-bench/"
_WINDOW: Final = 512
"""Ranks that connect at the same time: it is not the start that is measured."""
_PATIENCE: Final = 5.0
"""Seconds to clean up in, at most, for who has been interrupted."""


class Row(msgspec.Struct):
    """What one operation took. Milliseconds are those within which this percentage of requests was answered."""

    operation: str
    requests: int
    seconds: float
    per_second: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    load_cpu: float
    """How much of the time the generator computed, or waited for a core; 1: all of it."""


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
    """So many requests of each operation, from so many ranks, values of `size` bytes; `limit` seconds for each part.

    A row comes as soon as its operation is done. Who stops taking them must close the generator: that deletes the keys.
    `progress` is called with the number of operations done and the name of the next. Raises LoadError.
    """  # fmt: skip
    prefix = _PLACE.encode() + os.urandom(6).hex().encode() + b"/"
    operations = [(name, operation(name, prefix, size)) for name in names]
    left: list[Act] = []
    with _cleaning(host, port, ranks, left, min(limit, _PATIENCE)), worker_pool(host, port, ranks) as load:
        load.tell(ClosedLoop(hello(), limit, window=_WINDOW))
        for number, (name, one) in enumerate(operations):
            progress(number, name)
            left.extend(act for act in one.after if act not in left)
            yield _row(load, name, one, *divmod(requests, ranks), limit)
        if left:
            progress(len(operations), "cleaning up")
            load.tell(ClosedLoop(left, limit))


def _row(load: WorkerPool, name: str, one: Operation, repeat: int, more: int, limit: float) -> Row:
    if one.before:
        load.tell(ClosedLoop(one.before, limit))
    took = load.tell(ClosedLoop([one.request], limit, repeat=repeat, more=more))
    p50, p95, p99 = ((took.quantile(part) or 0.0) * 1000 for part in (0.5, 0.95, 0.99))
    return Row(name, took.operations, took.wall, took.operations / took.wall, p50, p95, p99, took.share)


@contextmanager
def _cleaning(host: str, port: int, ranks: int, left: list[Act], limit: float) -> Iterator[None]:
    """After an early end delete what is left, but never wait a second time for a server that does not answer."""
    try:
        yield
    except Unreachable:
        raise  # the server is gone, and its keys with it
    except Late as error:
        if not left:
            raise
        raise Late(f"{error}; keys under {_PLACE} may be left") from None
    except BaseException:
        with suppress(LoadError):
            _clean(host, port, ranks, left, limit)
        raise


def _clean(host: str, port: int, ranks: int, left: list[Act], limit: float) -> None:
    """From connections of its own: those of the load may be stuck in a request. Raises LoadError."""
    if left:
        with worker_pool(host, port, ranks) as load:
            load.tell(ClosedLoop([*hello(), *left], limit, window=_WINDOW))
