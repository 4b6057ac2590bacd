"""`tcpstore who`, `waiters`, `clients` and `stores`: options and tables.

They query a server over its admin socket and print conclusions. Must not know how these are drawn.
"""

import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from ...base.addresses import format_address
from ...base.errors import counted
from ...base.keys import caller_key
from ...cli.commands import Group
from ...cli.context import FAILED, ClientContext, client_command, looking_command
from ...cli.output import escape, print_json, print_result
from ...client.admin import ask
from ...diagnosis.facts import Facts, NamedStore, Session, read_facts, uncollected
from ...diagnosis.hang import HANGS, UNKNOWN, WAITS, Hang
from ...diagnosis.missing import Elsewhere, Missing, Pending, awaited, describe_activity, find_missing
from ...diagnosis.nearest import Waiting, find_waiting
from ...diagnosis.stock_ranks import Ranks, number_ranges
from .asking import admin_option, in_seconds_or_more, joined_of, query, store_option, world_size_option
from .local import local_ranks
from .stacks import hang_lines, look_twice

_ENOUGH: Final = 32
"""Ranks, or keys, that a line of text names; JSON contains all."""

_MOST_CLAIMING: Final = 4
"""Processes that claim the same rank and are named."""


def look_in(context: ClientContext, admin: Path | None, parts: list[str], **more: Any) -> Facts:
    """Return the facts about the server, or the context's store; exit with the right status on failure.

    `more` is for the request: `drop` ends the store of that name first, `stop` the server.
    """
    if context.store is not None:
        more["store"] = context.store
    return query(context, admin, lambda path, timeout: read_facts(ask(path, parts, timeout, **more)))


@click.command()
@click.option("--missing", is_flag=True, help="Show who is missing, instead of who is connected.")
@store_option
@world_size_option
@admin_option
@looking_command
@uncollected()
def who(context: ClientContext, missing: bool, world_size: int | None, admin: Path | None) -> None:
    """Show which ranks are connected to a server, and what each is waiting for.

    With --missing, show which ranks are missing from initialization and from each barrier and key exchange in progress,
    which of them are connected, from where, and what they are doing instead. If none is, look at the processes, as
    'tcpstore stacks' does: collectives do not pass through the store. The exit status is 1 if it cannot be told whether
    the job hangs.

    Ranks that use PyTorch's client are recognized by their environment, if they run on the server's machine, and by the
    keys that they write. Without --store, this shows the ranks in all stores, or with --missing those in the unnamed
    store.
    """
    parts = ["sessions", "counters", "keys"]
    facts = look_in(context, admin, parts)
    others = _keep_those_in(facts, context.store) if missing else []
    why_held = str(facts.server.get("why_held", ""))
    held = [why_held] if why_held else []
    ranks = local_ranks(facts, world_size)
    if missing:
        answer = find_missing(facts, ranks, awaited(facts))
        hang = None if answer.waits else _look_at_processes(context, admin, ranks)
        known = {**_callers_keys(answer), "processes": msgspec.to_builtins(hang)}
        _print(context, known, lambda: [*held, *_missing_lines(answer, hang), *others])
        if not answer.waits and (
            hang is None or hang.state in (UNKNOWN, WAITS) or (hang.state != HANGS and hang.unseen)
        ):
            raise SystemExit(FAILED)
        return
    sessions = [_session(session, facts, ranks) for session in facts.sessions if session.carries is None]
    sessions.sort(key=lambda one: (one["rank"] is None, one["rank"] or 0, one["host"], one["port"]))
    columns: tuple[str, ...] = ("rank", "host", "port", "pid", "joined", "command", "does", "since")
    if any(one["store"] for one in sessions):
        columns = ("store", *columns)
    _print(context, sessions, lambda: [*held, *_table(columns, sessions)])


def _look_at_processes(context: ClientContext, admin: Path | None, ranks: Ranks) -> Hang | None:
    """Return what the ranks' processes show; None over HTTP, which must not ask about them."""
    if context.http is not None and admin is None:
        return None
    return query(context, admin, lambda path, timeout: look_twice(path, ranks))


@click.command()
@store_option
@world_size_option
@admin_option
@looking_command
@uncollected()
def waiters(context: ClientContext, world_size: int | None, admin: Path | None) -> None:
    """Show which keys are being waited for, longest wait first, and the most similar existing keys.

    A key that will never be written often differs only in a counter or a prefix from the one that other ranks use.
    """
    facts = look_in(context, admin, ["sessions", "counters", "keys"])
    others = _keep_those_in(facts, context.store)
    found = find_waiting(facts, local_ranks(facts, world_size), awaited(facts))
    _print(context, [_callers_keys(one) for one in found], lambda: [*_waiting_lines(found), *others])


@click.command()
@admin_option
@client_command
@uncollected()
def clients(context: ClientContext, admin: Path | None) -> None:
    """List the connections to a server on this machine, including links and their sessions."""
    facts = look_in(context, admin, ["sessions"])
    rows = [_connection(session, facts) for session in facts.sessions]
    rows.sort(key=lambda one: (one["host"], one["port"]))
    columns = ("host", "port", "pid", "over", "joined", "idle", "command", "unsent", "held", "client")
    _print(context, rows, lambda: _table(columns, rows))


@click.group(cls=Group, invoke_without_command=True)
@admin_option
@looking_command
def stores(context: ClientContext, admin: Path | None) -> None:
    """List the named stores on a server."""
    if click.get_current_context().invoked_subcommand is not None:
        return
    rows = [_store(one) for one in look_in(context, admin, ["stores"]).stores]
    rows.sort(key=lambda one: one["name"])
    _print(context, rows, lambda: _store_lines(rows))


@stores.command()
@click.argument("name")
@admin_option
@client_command
def drop(context: ClientContext, name: str, admin: Path | None) -> None:
    """End the store NAME at once: its ranks lose their connections, and the next store of that name starts empty."""
    look_in(context, admin, [], drop=name)


@click.command()
@admin_option
@client_command
def stop(context: ClientContext, admin: Path | None) -> None:
    """End a server for good: clients are told, and what it keeps with --persist is removed.

    SIGTERM leaves its stores to the next server instead.
    """
    look_in(context, admin, [], stop=True)


@click.command()
@admin_option
@client_command
def promote(context: ClientContext, admin: Path | None) -> None:
    """Let a server that stands by serve instead of this one: ranks see a pause of less than a second."""
    look_in(context, admin, [], promote=True)


def _keep_those_in(facts: Facts, store: str | None) -> list[str]:
    """Keep only the sessions in this store, and return a line about the others, if there are any."""
    others = facts.keep_store(store)
    names = {one.store for one in others}
    example = min(filter(None, names), default="")
    if not others:
        return []
    where = f"{counted(len(others), 'connection')} in {counted(len(names), 'named store')}"
    return [
        f"not shown: {where}; list the stores with 'tcpstore stores', then select one, for instance "
        f"--store {shlex.quote(example)}"
    ]


def _store(store: NamedStore) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(store)
    return {
        **found,
        "expected": store.expected or None,
        "pid": int(store.pid) if store.pid.isdecimal() else None,
        "port": store.port or None,
    }


def _store_lines(rows: list[dict[str, Any]]) -> Iterable[str]:
    shown = [
        {
            **one,
            "owner": f"{one['host']}, pid {_cell(one['pid'])}",
            "ranks": f"{one['joined']} of {one['expected']}" if one["expected"] else str(one["joined"]),
            "state": "ended" if one["ended"] else "",
        }
        for one in rows
    ]
    return _table(("name", "owner", "ranks", "age", "sessions", "keys", "bytes", "port", "state"), shown)


def _print(context: ClientContext, value: Any, lines: Callable[[], Iterable[str]]) -> None:
    if context.output == "json":
        print_json(value)
    elif text := "\n".join(map(escape, lines())):
        print_result(text)


def _session(session: Session, facts: Facts, ranks: Ranks) -> dict[str, Any]:
    rank = ranks.by_session.get(session.id)
    wait = session.wait
    keys: list[str] = []
    if wait is not None:
        group = facts.groups.get(wait.group) if wait.group else None
        keys = wait.keys if group is None else group.keys
    return {
        "host": session.peer.get("host") or session.host,
        "port": session.port,
        "pid": session.pid,
        "rank": None if rank is None else rank.number,
        "joined": session.joined,
        "command": session.command,
        "waits_for": [caller_key(key) for key in keys],
        "since": session.idle,
        "does": describe_activity(session, facts.groups),
        "address": session.host,
        "known_by": "" if rank is None else rank.source,
        "store": session.store or "",
    }


def _connection(session: Session, facts: Facts) -> dict[str, Any]:
    over = "" if session.link is None else f"link from {session.link}"
    return {
        "host": session.host,
        "port": session.port,
        "pid": session.pid,
        "over": over if session.carries is None else counted(session.carries, "session"),
        "joined": session.joined,
        "idle": session.idle,
        "command": session.command,
        "waits": session.wait is not None,
        "unsent": session.unsent,
        "held": session.held,
        "client": ", ".join(f"{name} {text}" for name, text in session.peer.items()),
    }


# Text


def _missing_lines(answer: Missing, hang: Hang | None) -> Iterable[str]:
    if answer.world_size is None:
        yield f"{answer.joined} of an unknown number of ranks have joined"
    else:
        yield joined_of(answer.joined, answer.world_size)
    for claim in answer.claimed[:_ENOUGH]:
        yield f"rank {claim.rank} is claimed by {len(claim.by)} processes: {'; '.join(claim.by[:_MOST_CLAIMING])}"
    if len(answer.claimed) > _ENOUGH:
        more = len(answer.claimed) - _ENOUGH
        yield f"{counted(more, 'more rank')} {'is' if more == 1 else 'are'} claimed by several processes"
    if not answer.waits:
        yield "no rank is missing from any pending barrier or key exchange; collectives do not pass through the store"
        if answer.waiting:
            waiting = "1 session is" if answer.waiting == 1 else f"{answer.waiting} sessions are"
            yield f"{waiting} waiting: see 'tcpstore waiters'"
        if hang is None:
            yield "whether they hang is not known here: run 'tcpstore stacks' on the server's machine"
        else:
            yield from hang_lines(hang)
    for one in answer.waits:
        yield from _pending_lines(one)


def _pending_lines(one: Pending) -> Iterable[str]:
    expected = "?" if one.expected is None else str(one.expected)
    what = {"join": "joining", "barrier": f"barrier {caller_key(one.key)}", "keys": f"keys {caller_key(one.key)}"}
    waiting = f", {one.waiting} waiting for {in_seconds_or_more(one.since)}" if one.waiting else ""
    yield f"{what[one.kind]}: {one.arrived} of {expected} have arrived{waiting}"
    if one.missing_ranks:
        yield f"  missing: {_ranks(one.missing_ranks)}"
    for rank in one.elsewhere[:_ENOUGH]:
        yield f"  {_name(rank)} is connected but {rank.does} (last request {in_seconds_or_more(rank.since)} ago)"
    for rank in one.left[:_ENOUGH]:
        yield f"  {_name(rank)} {rank.does}"
    if len(one.elsewhere) > _ENOUGH:
        yield f"  and {len(one.elsewhere) - _ENOUGH} more connected"
    if one.unseen:
        yield f"  {one.unseen} of them not connected"
    if one.unidentified:
        whose = "its connection is" if one.unidentified == 1 else "their connections are"
        yield f"  {one.unidentified} may be connected, but {whose} not known"
    for host in one.fewer_on[:_ENOUGH]:
        yield f"  from {host.host}: {host.arrived} (most hosts: {host.usual})"


def _name(rank: Elsewhere) -> str:
    where = format_address(rank.host, rank.port) + ("" if rank.pid is None else f", pid {rank.pid}")
    return where if rank.rank is None else f"rank {rank.rank} ({where})"


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {number_ranges(numbers)}"


def _waiting_lines(found: list[Waiting]) -> Iterable[str]:
    for one in found:
        names = f" ({_ranks(one.ranks)})" if one.ranks else ""
        if one.connections:
            names += f" ({', '.join(one.connections[:4])}{', …' if len(one.connections) > 4 else ''})"
        count = f"{one.waiting} waiting" if one.waiting == 1 else f"{one.waiting} waiting, the longest"
        yield f"{caller_key(one.key)}: {count} for {in_seconds_or_more(one.since)}{names}"
        if one.more > 0:
            yield f"  and for {counted(one.more, 'more key')}"
        for near in one.nearest:
            age = "" if near.age is None else f", written {in_seconds_or_more(near.age)} ago"
            yield f"  {caller_key(near.key)} exists{age}{'' if near.by is None else f' by {near.by}'}"


def _table(columns: tuple[str, ...], rows: list[dict[str, Any]]) -> Iterable[str]:
    """Yield the lines of a table."""
    cells = [[_cell(row[column]) for column in columns] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(columns, *cells, strict=True)]
    for line in [[column.upper() for column in columns], *cells]:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return in_seconds_or_more(value) if isinstance(value, float) else escape(str(value))


def _callers_keys(answer: msgspec.Struct) -> Any:
    """Return an answer for JSON, with keys in the caller's form."""
    return _convert(msgspec.to_builtins(answer))


def _convert(value: Any) -> Any:
    if isinstance(value, list):
        return [_convert(one) for one in value]
    if isinstance(value, dict):
        return {name: caller_key(one) if name == "key" else _convert(one) for name, one in value.items()}
    return value
