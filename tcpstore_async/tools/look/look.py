"""`tcpstore info`, `keys`, `stat`, `latency` and `monitor`: options and text.

The first two query a server as clients do, ours or PyTorch's, and the admin socket of one on this machine for what
clients cannot see; the others query that socket. Must not know how a request is made.
"""

import asyncio
import functools
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from ...base.errors import DistError, DistNetworkError, StoreTimeoutError, counted
from ...base.keys import caller_key, readable
from ...base.limits import Limits
from ...base.version import VERSION
from ...cli.client import ping_milliseconds
from ...cli.context import OTHER_SERVER, ClientContext, client_command, keys_store_option, looking_command, wait_option
from ...cli.options import Seconds
from ...cli.output import escape, print_json, print_result, to_json
from ...client.admin import Where, ask, is_local, read_environment
from ...client.aio import AsyncTCPStore
from ...diagnosis.facts import Facts, read_facts
from ...diagnosis.rates import Histogram, Interval, Look, between, read_look
from ...diagnosis.samples import Sample, read_samples
from ...serving import build
from .asking import admin_option, find_admin, in_bytes, in_seconds, query, store_option

_FIRST_INTERVAL: Final = 0.3
"""Seconds between the two looks of a `stat` that prints once."""

_HEADER_EVERY: Final = 20
"""Rows between two headers."""

_PAUSE: Final = 0.005
"""Seconds between two round trips, so that measuring adds no load."""

_BAR: Final = 40
"""Characters of the longest bar."""


def look_at(where: Where, timeout: float | None, *more: str, store: str | None = None) -> Look:
    """Return the numbers of a server, or of one store, with further parts. Raises DistError, PermissionError."""
    return read_look(ask(where, ["stats", *more], timeout, store=store))


@click.command()
@click.option("--local", is_flag=True, help="Describe this installation instead of a server.")
@admin_option
@wait_option
@client_command
def info(context: ClientContext, local: bool, admin: Path | None) -> None:
    """Print the server's identity, number of keys and latency.

    A server on this machine that is not accepting clients, for instance because it is full, is queried over its
    admin socket. --admin queries that socket without trying the port first.
    """
    if local:
        limits = msgspec.to_builtins(Limits())
        known: dict[str, Any] = {"version": VERSION, "build": build(), "loop": "uvloop", "limits": limits}
    else:
        known = _described_by_admin(context, admin) if admin is not None else _described(context)
    if context.output == "json":
        print_json(known)
        return
    lines = []
    for name, value in known.items():
        if isinstance(value, dict):
            lines += [f"{name}.{inner}: {number}" for inner, number in value.items()]
        else:
            lines.append(escape(f"{name}: {value}"))
    print_result("\n".join(lines))


def _described(context: ClientContext) -> dict[str, Any]:
    """Describe a server as clients see it; if it is on this machine and cannot be reached, as its admin socket does."""
    try:
        path: Path | None = find_admin(context.host, context.port)
    except DistError:
        path = None
    if path is not None:
        found = _described_by_admin(context, path)
        if found["connections"] >= found["max_connections"]:  # a client would try until its timeout
            return {
                **found,
                "unreachable": f"it has reached its maximum of {counted(found['max_connections'], 'connection')}",
            }

    async def describe(store: AsyncTCPStore) -> dict[str, Any]:
        milliseconds = await ping_milliseconds(store)
        known = {
            **dict(zip(("host", "port"), store._servers.first, strict=True)),
            "num_keys": await store.num_keys(),
            "ping_milliseconds": milliseconds,
        }
        server = await store.server()
        return {**known, **(msgspec.to_builtins(server) if server else {"server": OTHER_SERVER})}

    def otherwise(error: DistError) -> dict[str, Any] | None:
        if path is None or not isinstance(error, (DistNetworkError, StoreTimeoutError)):
            return None
        return {**_described_by_admin(context, path), "unreachable": str(error)}

    known: dict[str, Any] = context.run(describe, otherwise)
    return known


def _described_by_admin(context: ClientContext, admin: Path) -> dict[str, Any]:
    """Describe a server by its admin socket, without a round trip of a client."""
    facts = query(context, admin, lambda path, timeout: read_facts(ask(path, [], timeout)))
    return {"server": "tcpstore_async", **facts.server, "ping_milliseconds": None}


@click.command()
@click.option("--prefix", default="", help="List only keys with this prefix.")
@click.option("--raw", is_flag=True, help="Do not escape control characters.")
@click.option(
    "--sort",
    type=click.Choice(["name", "size"]),
    default="name",
    show_default=True,
    help="'size' lists the largest values first, with their sizes; only for a server on this machine.",
)
@keys_store_option
@admin_option
@wait_option
@client_command
def keys(context: ClientContext, prefix: str, raw: bool, sort: str, admin: Path | None) -> None:
    """List the keys, sorted, one per line.

    Control characters in keys are escaped unless --raw is given; bytes that are not UTF-8 are shown as \\xff, for
    example. --raw prints even those unchanged, except with --sort size. The output of -o json is unambiguous, except
    that such a byte looks like the four characters \\xff.
    """
    if sort == "size":
        _keys_by_size(context, prefix, raw, admin)
        return
    found: list[bytes] = context.run(lambda store: store._list_keys_as_bytes())
    names = sorted(name for name in found if name.startswith(os.fsencode(prefix)))
    if context.output == "json":
        print_json({"keys": list(map(readable, names))})
    elif names:
        print_result(b"\n".join(names) if raw else "\n".join(escape(readable(name)) for name in names))


def _keys_by_size(context: ClientContext, prefix: str, raw: bool, admin: Path | None) -> None:
    store = context.store
    facts: Facts = query(context, admin, lambda path, timeout: read_facts(ask(path, ["keys"], timeout, store=store)))
    found = [(caller_key(one.key), one) for one in facts.keys]
    start = readable(os.fsencode(prefix))
    rows = sorted((-one.size, name, one.age) for name, one in found if name.startswith(start))
    if context.output == "json":
        print_json({"keys": [{"key": name, "bytes": -size, "age": age} for size, name, age in rows]})
    elif rows:
        width = len(str(-rows[0][0]))
        print_result("\n".join(f"{-size:>{width}}  {name if raw else escape(name)}" for size, name, _ in rows))


# stat

_COLUMNS: Final[tuple[tuple[str, int, Callable[[Interval], str]], ...]] = (
    ("CONNECTIONS", 11, lambda one: str(one.connections)),
    ("WAITING", 8, lambda one: str(one.waiting)),
    ("OPS/S", 9, lambda one: f"{one.ops:.0f}"),
    ("KEYS", 9, lambda one: str(one.keys)),
    ("BYTES", 10, lambda one: in_bytes(one.bytes)),
    ("P99", 9, lambda one: in_seconds(one.p99)),
    ("LAG", 9, lambda one: in_seconds(one.lag)),
    ("QUEUE", 6, lambda one: "-" if one.accept_queue is None else str(one.accept_queue)),
    ("CPU", 5, lambda one: f"{one.cpu:.0%}"),
)
_STORE_COLUMNS: Final[tuple[tuple[str, int, Callable[[Interval], str]], ...]] = (
    ("SESSIONS", 8, lambda one: str(one.sessions)),
    ("WAITING", 8, lambda one: str(one.waiting)),
    ("JOINED", 8, lambda one: str(one.joined)),
    ("KEYS", 9, lambda one: str(one.keys)),
    ("BYTES", 10, lambda one: in_bytes(one.bytes)),
)
"""The columns with --store: other numbers are not counted for each store."""


@click.command()
@click.option(
    "-i",
    "--interval",
    type=Seconds(0.1, 86400),
    metavar="SECONDS",
    help="Print a line at this interval until interrupted; without it, print one line, measured over 0.3 s.",
)
@click.option("--count", type=click.IntRange(1), metavar="N", help="Stop after N lines.")
@store_option
@admin_option
@looking_command
def stat(context: ClientContext, interval: float | None, count: int | None, admin: Path | None) -> None:
    """Print one line about what a server is doing.

    The columns, for all stores, are: connections, waiting sessions, commands per second, keys, bytes of the budget in
    use, the 99th percentile of the service time, the worst lag of the event loop, connections not accepted yet, and
    CPU use. With --store, they are: sessions, waiting sessions, ranks that have joined, keys and bytes of that store.
    """
    wanted = count or (1 if interval is None else None)
    seconds = interval or _FIRST_INTERVAL
    store = context.store
    look = functools.partial(look_at, store=store)
    columns = _COLUMNS if store is None else _STORE_COLUMNS
    before = query(context, admin, look).stats
    due = time.monotonic()
    printed = 0
    while wanted is None or printed < wanted:
        due = max(due + seconds, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
        after = query(context, admin, look).stats
        row = between(before, after)
        before = after
        if context.output == "json":
            print_json(row if store is None else store_figures(store, row))
        else:
            if printed % _HEADER_EVERY == 0:
                if store is not None:
                    print_result(f"store {escape(store)}")
                print_result(" ".join(f"{name:>{width}}" for name, width, _ in columns))
            print_result(" ".join(f"{cell(row):>{width}}" for _, width, cell in columns))
        printed += 1


def store_figures(store: str, now: Interval) -> dict[str, Any]:
    """Return the numbers of one store, for JSON."""
    names = ("time", "sessions", "waiting", "joined", "keys", "bytes")
    return {"store": store, **{name: getattr(now, name) for name in names}}


# latency


@click.command()
@click.option(
    "--count", type=click.IntRange(1), default=100, show_default=True, metavar="N", help="Number of round trips."
)
@admin_option
@wait_option
@client_command
def latency(context: ClientContext, count: int, admin: Path | None) -> None:
    """Measure round trips to a server, and show how much of that time the server itself takes.

    A server on this machine reports its service times, for all stores since it started: the time from when the kernel
    reports a request until the reply is handed to the kernel. The rest of a round trip is the network, the kernels and
    this command.
    """

    async def measure(store: AsyncTCPStore) -> list[float]:
        found: list[float] = []
        await store.ping()  # the first one is slow
        for _ in range(count):
            found.append(round(await ping_milliseconds(store) / 1000, 6))
            await asyncio.sleep(_PAUSE)
        return sorted(found)

    trips: list[float] = context.run(measure)
    look: Look | None = None
    reason = ""
    try:
        look = look_at(
            admin or find_admin(context.host, context.port), context.timeout if context.timeout >= 0 else None
        )
    except (DistError, PermissionError) as error:
        reason = str(error)
    values = {"min": trips[0], "p50": _share(trips, 0.5), "p99": _share(trips, 0.99), "max": trips[-1]}
    if context.output == "json":
        server = None
        if look is not None:
            stats = look.stats
            server = {"service": _quantiles(stats.service), "lag": _quantiles(stats.lag)}
        print_json({"count": count, **values, "server": server})
        return
    lines = [f"{count} round trips: " + ", ".join(f"{name} {in_seconds(number)}" for name, number in values.items())]
    if look is None:
        lines.append(f"no service times from the server: {reason}")
    else:
        lines += _bars("service time in the server", look.stats.service)
        lines += _bars("lag of its event loop", look.stats.lag)
    print_result("\n".join(map(escape, lines)))


def _share(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _quantiles(times: Histogram) -> dict[str, Any]:
    return {"p50": times.quantile(0.5), "p99": times.quantile(0.99), **msgspec.to_builtins(times)}


def _bars(title: str, times: Histogram) -> Iterable[str]:
    """Yield the lines of a histogram."""
    if not any(times.counts):
        yield f"{title}: no samples yet"
        return
    p50, p99 = times.quantile(0.5), times.quantile(0.99)
    yield f"{title}: p50 {in_seconds(p50)}, p99 {in_seconds(p99)}, {counted(sum(times.counts), 'sample')}"
    bounds = [f"≤ {in_seconds(bound)}" for bound in times.bounds]
    labels = [*bounds, f"> {in_seconds(times.bounds[-1])}"]
    used = [at for at, number in enumerate(times.counts) if number]
    most = max(times.counts)
    for at in range(used[0], used[-1] + 1):
        number = times.counts[at]
        bar = "█" * ((number * _BAR + most - 1) // most)
        yield f"  {labels[at]:>10}  {number:>8}  {bar}".rstrip()


# monitor


@click.command()
@click.option("--values", is_flag=True, help="Show values too, up to 256 bytes of each.")
@click.option(
    "--every",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Show only every Nth command.",
)
@click.option("--count", type=click.IntRange(1), metavar="N", help="Stop after N commands.")
@store_option
@admin_option
@client_command
def monitor(context: ClientContext, values: bool, every: int, count: int | None, admin: Path | None) -> None:
    """Show the commands that a server on this machine executes in all stores, until interrupted.

    Tokens are never shown, and values only with --values. The server does not wait for this command: entries that
    arrive faster than they are read are dropped, and the number dropped is shown.
    """

    def follow(path: Where, timeout: float | None) -> None:
        shown = dropped = 0
        lines_of_reply = ask(path, ["monitor"], timeout, endless=True, every=every, values=values, store=context.store)
        for portion in read_samples(lines_of_reply):
            samples = portion.samples if count is None else portion.samples[: count - shown]
            shown += len(samples)
            for sample in samples:
                sample.rank = _rank_of(sample)
            lost = portion.dropped - dropped
            dropped = portion.dropped
            if context.output == "json":
                lines = [to_json(_as_object(sample)) for sample in samples]
                lines += [f'{{"dropped":{lost}}}'] if lost else []
            else:
                lines = [escape(_sample_line(sample)) for sample in samples]
                lines += (
                    [f"… {lost} dropped because they arrived faster than they were read; see --every"] if lost else []
                )
            if lines:
                print_result("\n".join(lines))
            if shown == count:
                return
        raise DistNetworkError("the server closed the admin socket: it is stopping, or this command read too slowly")

    query(context, admin, follow)


_is_local: Final = functools.cache(is_local)


@functools.cache
def _rank_in_environment(pid: int) -> str | None:
    return read_environment(pid).get("RANK")


def _rank_of(sample: Sample) -> str | None:
    """Return the rank that sent a command, if known: from its client, or from the environment of a local process."""
    if sample.rank is not None or sample.pid is None or not _is_local(sample.host):
        return sample.rank
    return _rank_in_environment(sample.pid)


def _as_object(sample: Sample) -> dict[str, Any]:
    return {**msgspec.structs.asdict(sample), "key": None if sample.key is None else caller_key(sample.key)}


def _sample_line(sample: Sample) -> str:
    moment = time.strftime("%H:%M:%S", time.localtime(sample.time)) + f".{int(sample.time * 1000) % 1000:03}"
    rank = "" if sample.rank is None else f" rank {sample.rank}"
    pid = "" if sample.pid is None else f" pid {sample.pid}"
    words = [f"{moment} {sample.host}:{sample.port}{rank}{pid}", sample.command]
    if sample.key is not None:
        words.append(caller_key(sample.key))
    if sample.keys > 1:
        words.append(f"and {sample.keys - 1} more")
    if sample.size:
        words.append(counted(sample.size, "byte"))
    if sample.value is not None:
        words.append(repr(sample.value))
    if sample.store is not None:
        words.append(f"in store {sample.store}")
    return "  ".join(words)
