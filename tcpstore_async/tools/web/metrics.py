"""A server's counters as Prometheus metrics. Needs prometheus-client.

Knows the names of metrics. Must not know where the numbers come from.
Invariants: names begin with `tcpstore_`, in base units. Peers choose no label, such as a key, rank or host, except the
names of the few stores that have existed for a while: the number of series does not grow with a job.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ...diagnosis.facts import NamedStore, OtherStores
from ...diagnosis.rates import Histogram, Look, Stats

_GAUGES: tuple[tuple[str, str, Callable[[Stats], float | None]], ...] = (
    ("start_time_seconds", "When the server started, in seconds since the epoch.", lambda one: one.time - one.uptime),
    ("resident_memory_bytes", "Resident memory of the server's process.", lambda one: one.resident_bytes),
    ("connections", "Open connections.", lambda one: one.connections.open),
    ("connections_limit", "Connections that the server can hold.", lambda one: one.connections.max),
    ("sessions", "Sessions, including those on links.", lambda one: one.sessions.open),
    ("sessions_unvalidated", "Sessions that have not sent VALIDATE yet.", lambda one: one.sessions.unvalidated),
    (
        "sessions_waiting",
        "Sessions that are waiting for a key, a queue item or other ranks.",
        lambda one: one.sessions.waiting,
    ),
    ("unsent_bytes", "Replies that the kernel has not accepted.", lambda one: one.sessions.unsent_bytes),
    ("links", "Relay links.", lambda one: one.links.open),
    ("link_sessions", "Sessions on relay links.", lambda one: one.links.sessions),
    ("single_links", "Single-session links.", lambda one: one.links.single),
    ("links_suspended", "Single-session links that currently have no connection.", lambda one: one.links.suspended),
    ("keys", "Keys with a value.", lambda one: one.keys),
    ("queues", "Queues that are not empty.", lambda one: one.queues),
    ("awaited_keys", "Keys that sessions are waiting for.", lambda one: one.awaited_keys),
    ("memory_budget_bytes", "Limit on the memory held on behalf of peers.", lambda one: one.budget.limit),
    ("ranks_joined", "Ranks that have joined.", lambda one: one.joins.joined),
    (
        "ranks_expected",
        "Ranks that are expected to join; 0 if unknown.",
        lambda one: one.joins.expected or one.joins.world_size or 0,
    ),
    (
        "accept_queue_length",
        "Connections in the kernel that the server has not accepted yet.",
        lambda one: None if one.accept_queue is None else one.accept_queue.length,
    ),
    (
        "accept_queue_limit",
        "Largest number of connections that the kernel queues.",
        lambda one: None if one.accept_queue is None else one.accept_queue.limit,
    ),
)

_COUNTERS: tuple[tuple[str, str, Callable[[Stats], float]], ...] = (
    ("cpu_seconds", "CPU time of the server's process.", lambda one: one.cpu),
    ("received_bytes", "Bytes received, excluding TLS overhead.", lambda one: one.traffic.received_bytes),
    ("sent_bytes", "Bytes sent, excluding TLS overhead.", lambda one: one.traffic.sent_bytes),
    ("connections_accepted", "Connections that were accepted.", lambda one: one.connections.accepted),
    (
        "connections_rejected",
        "Connections rejected because the server was full.",
        lambda one: one.connections.rejected,
    ),
)

_HISTOGRAMS: tuple[tuple[str, str, Callable[[Stats], Histogram]], ...] = (
    ("loop_lag_seconds", "How late timers run in the server's event loop.", lambda one: one.lag),
    (
        "service_seconds",
        "Time from when the kernel reports a request until its replies are handed to the kernel; sampled.",
        lambda one: one.service,
    ),
    ("turn_seconds", "Duration of an iteration of the server's event loop; sampled.", lambda one: one.turn_times),
)

_STORE_GAUGES: tuple[tuple[str, str, Callable[[NamedStore | OtherStores], int]], ...] = (
    ("sessions", "Sessions in a named store.", lambda one: one.sessions),
    ("keys", "Keys with a value in a named store.", lambda one: one.keys),
    ("memory_bytes", "Memory held for the keys and waiters of a named store.", lambda one: one.bytes),
    ("ranks_joined", "Ranks that have joined a named store.", lambda one: one.joined),
    ("ranks_expected", "Ranks that the owner of a named store expects; 0 if unknown.", lambda one: one.expected),
)
_LABELLED_SECONDS: Final = 60
"""Age from which a store has a label: many short-lived stores must not make as many series."""
_MOST_LABEL: Final = 128
"""Most characters of a label."""
OTHERS: Final = "(others)"
"""Label of all stores without one of their own."""

_USES = ("store", "waiters", "requests", "key_lists", "connections")


class _Server(Collector):
    """Collects from one reply."""

    def __init__(self, counters: Look | None, names: bool) -> None:
        self._counters = counters
        self._names = names

    def collect(self) -> Iterator[Metric]:
        up = self._counters is not None
        yield GaugeMetricFamily("tcpstore_up", "Whether the server is responding.", value=float(up))
        if self._counters is None:
            return
        server, stats = self._counters.server, self._counters.stats
        labels = {name: str(server.get(name, "")) for name in ("version", "build")}
        yield InfoMetricFamily("tcpstore_build", "The server's version and build.", value=labels)
        accepting = float(bool(server.get("accepting", True)))
        yield GaugeMetricFamily("tcpstore_accepting", "Whether the server is accepting connections.", value=accepting)
        held = bool(server.get("why_held"))
        if "role" in server:
            yield from _replica(server, held)
        else:
            text = "Whether writes wait; /readyz says why."
            yield GaugeMetricFamily("tcpstore_writes_held", text, value=float(held))
        for name, text, gauge in _GAUGES:
            value = gauge(stats)
            if value is not None:
                yield GaugeMetricFamily(f"tcpstore_{name}", text, value=value)
        for name, text, counter in _COUNTERS:
            yield CounterMetricFamily(f"tcpstore_{name}", text, value=counter(stats))
        for name, text, histogram in _HISTOGRAMS:
            found = histogram(stats)
            yield HistogramMetricFamily(f"tcpstore_{name}", text, buckets=_buckets(found), sum_value=found.sum)
        yield _labelled(
            CounterMetricFamily("tcpstore_commands", "Commands that were executed.", labels=["command"]),
            stats.commands,
        )
        yield _labelled(
            CounterMetricFamily(
                "tcpstore_connections_closed", "Connections closed because of their peer's behavior.", labels=["reason"]
            ),
            stats.connections.closed_for,
        )
        yield _labelled(
            GaugeMetricFamily("tcpstore_memory_bytes", "Memory held on behalf of peers.", labels=["use"]),
            {use: getattr(stats.budget, use) for use in _USES},
        )
        yield from _stores(self._counters, self._names)


def _replica(server: dict[str, Any], held: bool) -> Iterator[Metric]:
    """Yield where a server of a replicated store stands; `held` is whether it can write nothing."""
    leads = server["role"] == "server"
    text = "Whether this server of a replicated store serves, and can write."
    yield GaugeMetricFamily("tcpstore_serving", text, value=float(leads and not held))
    if not leads:
        return
    for name, text, key in (
        ("epoch", "Grows whenever another server begins to serve.", "epoch"),
        ("commit_seconds", "Duration of the last append to the log.", "commit_seconds"),
        ("log_bytes", "Bytes of the log since its last snapshot.", "bytes_since_snapshot"),
    ):
        yield GaugeMetricFamily(f"tcpstore_{name}", text, value=server.get(key, 0))
    lag = GaugeMetricFamily(
        "tcpstore_standby_lag_records", "Records that a standby has not followed.", labels=["server"]
    )
    yield _labelled(lag, {str(one["address"]): one["records_behind"] for one in server.get("standbys", [])})


def expose(counters: Look | None, accept: str, names: bool = True) -> tuple[str, bytes]:
    """Return content type and text for a collector that accepts these formats; `counters` is None for a silent server.

    Without `names`, stores are summed.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Server(counters, names))
    encode, kind = choose_encoder(accept)
    return kind, encode(registry)


def _stores(counters: Look, names: bool) -> Iterator[Metric]:
    labels: dict[str, list[NamedStore | OtherStores]] = {OTHERS: [counters.others]} if counters.others.stores else {}
    for store in counters.oldest:
        label = store.name[:_MOST_LABEL] if names and store.age >= _LABELLED_SECONDS else OTHERS
        labels.setdefault(label, []).append(store)  # clipped names may be equal
    total = len(counters.oldest) + counters.others.stores
    yield GaugeMetricFamily("tcpstore_named_stores", "Named stores.", value=total)
    for name, text, figure in _STORE_GAUGES:
        family = GaugeMetricFamily(f"tcpstore_named_store_{name}", text, labels=["store"])
        yield _labelled(family, {label: sum(map(figure, stores)) for label, stores in labels.items()})


def _labelled(family: Any, values: dict[str, int]) -> Metric:
    for label, value in values.items():
        family.add_metric([label], value)
    found: Metric = family
    return found


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return cumulative buckets with their upper bounds."""
    total = 0
    found: list[tuple[str, float]] = []
    for bound, count in zip([*map(str, histogram.bounds), "+Inf"], histogram.counts, strict=True):
        total += count
        found.append((bound, total))
    return found
