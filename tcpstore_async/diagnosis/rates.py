"""Decodes a server's counters, and computes rates and quantiles from them.

Knows the format (`server/admin.py`, `observe/statistics.py`). Must not know sockets or output.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from ..base.errors import ProtocolError
from .facts import NamedStore, OtherStores
from .lines import Line, decode_reply


class Histogram(msgspec.Struct):
    """A distribution of seconds."""

    bounds: list[float]
    """Upper bounds of all buckets but the last, which has none."""
    counts: list[int]
    sum: float

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.bounds) + 1:
            raise ValueError("a histogram needs one more bucket than bounds")

    def since(self, before: "Histogram") -> "Histogram":
        """Return what was added since an earlier look."""
        if self.bounds != before.bounds:
            return self
        counts = [max(0, now - then) for now, then in zip(self.counts, before.counts, strict=True)]
        return Histogram(self.bounds, counts, max(0.0, self.sum - before.sum))

    def quantile(self, share: float) -> float | None:
        """Return the seconds that this share of the samples is below, interpolated in its bucket; None without samples.

        A sample above all bounds counts as the last bound.
        """
        total = sum(self.counts)
        if not total:
            return None
        left = share * total
        lower = 0.0
        for upper, count in zip(self.bounds, self.counts, strict=False):
            if count and left <= count:
                return lower + (upper - lower) * max(0.0, left) / count
            left -= count
            lower = upper
        return lower


class Connections(msgspec.Struct):
    open: int
    max: int
    accepted: int
    rejected: int
    closed_for: dict[str, int]


class Traffic(msgspec.Struct):
    received_bytes: int
    sent_bytes: int


class Sessions(msgspec.Struct):
    open: int
    waiting: int
    unvalidated: int
    unsent_bytes: int


class Links(msgspec.Struct):
    open: int
    sessions: int
    single: int
    suspended: int


class Budget(msgspec.Struct):
    limit: int
    used: int
    store: int
    waiters: int
    requests: int
    key_lists: int
    connections: int


class Joins(msgspec.Struct):
    joined: int
    expected: int
    world_size: int | None


class AcceptQueue(msgspec.Struct):
    length: int
    limit: int


class Stats(msgspec.Struct, rename={"turn_times": "turns"}):
    """The counters of a server at one time. Times are in seconds, sizes in bytes."""

    time: float
    """Since the epoch."""
    uptime: float
    cpu: float
    resident_bytes: int
    commands: dict[str, int]
    traffic: Traffic
    connections: Connections
    sessions: Sessions
    links: Links
    keys: int
    queues: int
    awaited_keys: int
    budget: Budget
    joins: Joins
    service: Histogram
    lag: Histogram
    turn_times: Histogram
    accept_queue: AcceptQueue | None = None


class Wait(msgspec.Struct):
    """A long wait: the awaited key, and the client that has waited longest."""

    key: str
    waiting: int
    since: float
    command: str
    host: str
    port: int
    keys: int = 1
    pid: int | None = None
    peer: dict[str, str] = {}
    store: str | None = None
    """The name of the store; None for the unnamed one."""


class Key(msgspec.Struct, array_like=True):
    key: str
    size: int
    store: str | None = None


class _Line(Line):
    stats: Stats | None = None
    waits: list[Wait] = msgspec.field(default_factory=list)
    largest: list[Key] = msgspec.field(default_factory=list)
    oldest: list[NamedStore] = msgspec.field(default_factory=list)
    others: OtherStores | None = None


class Look(NamedTuple):
    """A server's reply to one request for its numbers."""

    server: dict[str, Any]
    stats: Stats
    waits: list[Wait]
    largest: list[Key]
    oldest: list[NamedStore]
    """The oldest named stores; `others` sums up the rest."""
    others: OtherStores


def read_look(lines: Iterable[bytes]) -> Look:
    """Decode a reply with `stats`. Raises DistStoreError for a reported error, ProtocolError for an invalid reply."""
    found = _Line()
    for line in decode_reply(lines, _Line):
        found.server = line.server or found.server
        found.stats = line.stats or found.stats
        found.waits += line.waits
        found.largest += line.largest
        found.oldest += line.oldest
        found.others = line.others or found.others
    if found.stats is None:
        raise ProtocolError("the admin socket's reply contains no statistics")
    others = found.others or OtherStores()
    return Look(found.server or {}, found.stats, found.waits, found.largest, found.oldest, others)


class Interval(msgspec.Struct):
    """What happened between two looks at a server; rates are per second of its clock."""

    time: float
    seconds: float
    connections: int
    sessions: int
    waiting: int
    joined: int
    """Ranks that have joined."""
    ops: float
    """Commands executed."""
    keys: int
    bytes: int
    """Bytes of the budget in use."""
    p99: float | None
    """99th percentile of the service time in seconds; None if nothing was timed."""
    lag: float | None
    """Worst lag of the loop in seconds; None if none was measured."""
    accept_queue: int | None
    received: float
    """Bytes received."""
    sent: float
    """Bytes sent."""
    cpu: float
    """Share of one processor."""
    commands: dict[str, float]
    """Rates of the executed commands by name, most frequent first."""


def between(before: Stats, after: Stats) -> Interval:
    """Return what happened between two looks, or since the server's start if it was restarted in between."""
    restarted = after.uptime < before.uptime
    seconds = max(1e-6, after.uptime if restarted else round(after.uptime - before.uptime, 3))

    def rate(now: float, then: float) -> float:
        return max(0.0, now - (0 if restarted else then)) / seconds

    executed = {name: rate(count, before.commands.get(name, 0)) for name, count in after.commands.items()}
    service, lag = after.service, after.lag
    if not restarted:
        service, lag = service.since(before.service), lag.since(before.lag)
    return Interval(
        time=after.time,
        seconds=seconds,
        connections=after.connections.open,
        sessions=after.sessions.open,
        waiting=after.sessions.waiting,
        joined=after.joins.joined,
        ops=sum(executed.values()),
        keys=after.keys,
        bytes=after.budget.used,
        p99=service.quantile(0.99),
        lag=lag.quantile(1.0),
        accept_queue=None if after.accept_queue is None else after.accept_queue.length,
        received=rate(after.traffic.received_bytes, before.traffic.received_bytes),
        sent=rate(after.traffic.sent_bytes, before.traffic.sent_bytes),
        cpu=rate(after.cpu, before.cpu),
        commands=dict(sorted([one for one in executed.items() if one[1]], key=lambda one: (-one[1], one[0]))),
    )
