"""The short benchmark: one operation after the other, from many ranks, against a server that runs already.

Knows: which orders make an operation's measurement. Must not know: how results are printed.
Invariant: its keys are its own, and are deleted at the end, however that comes, if the server is still there.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from .generator import Act, LoadError
from .process import Fleet, Play, fleet
from .requests import Operation, hello, operation

_PATIENCE = 30.0
"""Seconds to clean up in: PyTorch's servers look up the name of whoever connects, and a name server may be slow."""


class Row(msgspec.Struct):
    """What one operation took. Milliseconds are those within which this percentage of requests was answered."""

    operation: str
    requests: int
    seconds: float
    per_second: float
    p50_ms: float
    p95_ms: float
    p99_ms: float


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
) -> list[Row]:
    """So many requests of each operation, from so many ranks, values of `size` bytes; `limit` seconds for each part.

    `progress` is called with the number of operations done and the name of the next. Raises LoadError.
    """  # fmt: skip
    prefix = b"/tcpstore-bench/" + os.urandom(6).hex().encode() + b"/"
    operations = [(name, operation(name, prefix, size)) for name in names]
    rows = []
    with _cleaning(host, port, ranks, operations), fleet(host, port, ranks) as load:
        load.tell(Play(hello(), limit))
        for number, (name, one) in enumerate(operations):
            progress(number, name)
            rows.append(_row(load, name, one, -(-requests // ranks), limit))
    return rows


def _row(load: Fleet, name: str, one: Operation, repeat: int, limit: float) -> Row:
    if one.before:
        load.tell(Play(one.before, limit))
    took = load.tell(Play([one.request], limit, repeat=repeat))
    p50, p95, p99 = ((took.quantile(part) or 0.0) * 1000 for part in (0.5, 0.95, 0.99))
    return Row(name, took.operations, took.wall, took.operations / took.wall, p50, p95, p99)


@contextmanager
def _cleaning(host: str, port: int, ranks: int, operations: list[tuple[str, Operation]]) -> Iterator[None]:
    """Delete what the operations leave, from connections of its own: those of the load may be stuck in a request."""
    try:
        yield
    finally:
        acts: list[Act] = []
        for _, one in operations:
            acts.extend(act for act in one.after if act not in acts)
        try:
            if acts:
                with fleet(host, port, ranks) as load:
                    load.tell(Play([*hello(), *acts], _PATIENCE))
        except LoadError:
            pass  # the server is gone, and its keys with it; why is said by what came before
