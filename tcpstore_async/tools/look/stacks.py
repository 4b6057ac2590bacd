"""`tcpstore stacks`, and what `who --missing` and the page say of processes: two looks at the ranks, and text.

It knows how ranks are looked at: those on this machine by this process, those behind relays by way of the server. Must
not know what follows from what was seen.
"""

import os
import socket
import time
from collections.abc import Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import click
import msgspec

from ...base.errors import DistStoreError, counted
from ...cli.context import FAILED, ClientContext, client_command
from ...cli.options import Seconds
from ...cli.output import escape, print_json, print_result
from ...client.admin import Where, ask, find_local
from ...diagnosis import debug_server
from ...diagnosis.facts import read_facts, uncollected
from ...diagnosis.hang import GOES_ON, HANGS, STARTS, UNKNOWN, WAITS, Hang, Look, Relays, Same, conclude, ranks_of
from ...diagnosis.ras import REQUEST, Ras, read_ras
from ...diagnosis.stock_ranks import Ranks, number_ranges
from ...stacks.examine import examine
from .asking import admin_option, in_seconds_or_more, query, store_option, world_size_option
from .local import local_ranks

SECONDS: Final = 1.6
"""How long both looks take together: with the start of the command, less than 2 s."""

_LOOK_SECONDS: Final = 1.0
"""Longest time of one look."""

_LATER: Final = 1.5
"""Seconds that a reply may be late, of relays that have used up the time of a look."""

_NCCL: Final = "localhost:28028"
"""Where NCCL's RAS listens on each host of a job, unless NCCL_RAS_ADDR says otherwise."""
_MOST_BYTES: Final = 64 * 1024 * 1024
"""Most bytes of its reply: 100,000 ranks, each in one communicator."""

_MOST_LINES: Final = 32
_MOST_HOSTS: Final = 8
_MOST_FRAMES: Final = 8
"""Frames shown of one rank of a group."""


@click.command()
@click.option("--rank", "numbers", type=click.IntRange(0), multiple=True, metavar="N", help="Show only this rank.")
@click.option(
    "--seconds",
    type=Seconds(0.2, 3600),
    default=SECONDS,
    show_default=True,
    help="How long to look, in all: two looks are compared. A longer time tells a slow step from a hang.",
)
@store_option
@world_size_option
@admin_option
@client_command
@uncollected()
def stacks(
    context: ClientContext, numbers: tuple[int, ...], seconds: float, world_size: int | None, admin: Path | None
) -> None:
    """Show where each rank is, and whether the job hangs.

    Ranks that do the same are one line, the odd ones first. This machine's ranks are looked at directly, those behind
    relays by these, as the user that they belong to; nothing is attached to them, and no values or arguments are shown.
    Where there are neither py-spy (pip install 'tcpstore-async[stacks]') nor TCPSTORE_STACKS=1 in the environment of
    the ranks, this shows only what the kernel knows.

    Exit status: 0, or 1 if no rank could be looked at.
    """

    def look(where: Where, timeout: float | None) -> Hang:
        facts = read_facts(ask(where, ["sessions", "counters", "keys"], timeout, store=context.store))
        facts.keep_store(context.store)
        return look_twice(where, local_ranks(facts, world_size), seconds, numbers)

    hang = query(context, admin, look)
    if unknown := sorted(set(numbers).difference(*[one.ranks for one in hang.groups])):
        who = f"rank{'s' if len(unknown) > 1 else ''} {number_ranges(unknown)}"
        context.fail(f"{who}: not connected, or not to be seen from here", FAILED)
    if context.output == "json":
        print_json(msgspec.to_builtins(hang))
    else:
        print_result("\n".join(map(escape, hang_lines(hang, frames=_MOST_FRAMES))))
    if not hang.looked_at:
        raise SystemExit(FAILED)


def look_twice(admin: Where, ranks: Ranks, seconds: float = SECONDS, only: Container[int] = ()) -> Hang:
    """Look at the ranks twice; for `only` see `conclude`. Raises DistError, PermissionError."""
    here = socket.gethostname()
    direct = [
        one
        for rank in ranks_of(ranks)
        for one in rank.sessions
        if one.link is None and one.peer.get("host", here) == here  # another name: a container's, with other pids
    ]
    local = find_local({one.host for one in direct})
    pids = sorted({one.pid for one in direct if one.host in local and one.pid is not None})
    each = min(seconds / 2, _LOOK_SECONDS)
    began = time.monotonic()
    first = _look(admin, pids, each)
    time.sleep(max(0.0, began + seconds - each - time.monotonic()))
    between = time.monotonic() - began
    second = _look(admin, pids, each)
    return conclude(ranks, (first, second), between, dict.fromkeys(local, here), only)


def _look(admin: Where, pids: list[int], seconds: float) -> Look:
    """Look at the processes on this machine and, at the same time, at those behind relays."""
    look = Look()
    with ThreadPoolExecutor(3) as pool:
        nccl, pytorch = pool.submit(_ask_nccl, seconds), pool.submit(_ask_pytorch, seconds)
        others = pool.submit(lambda: list(ask(admin, ["stacks"], seconds + _LATER, seconds=seconds)))
        if pids:
            look.add(examine(pids, seconds))
        try:
            look.read(others.result())
        except DistStoreError as error:  # it is answering another one, or is too old
            look.relays = Relays(refused=str(error))
        look.ras, look.pytorch = nccl.result(), pytorch.result()
    return look


def _ask_nccl(seconds: float) -> Ras:
    """Return what NCCL says on this host; nothing if no job with a recent NCCL runs here, or it takes too long."""
    host, _, port = os.environ.get("NCCL_RAS_ADDR", _NCCL).rpartition(":")
    return read_ras(_reply(host, port, REQUEST, seconds))


def _ask_pytorch(seconds: float) -> dict[int, tuple[str, ...]]:
    """Return the frames that PyTorch's debug server on this host shows, keyed by rank, if a job runs it."""
    page = _reply("127.0.0.1", str(debug_server.PORT), debug_server.REQUEST, seconds)
    return debug_server.read_stacks(page.decode(errors="replace"))


def _reply(host: str, port: str, request: bytes, seconds: float) -> bytes:
    """Return all that a server sends; nothing if there is none, or if it is too much or too late."""
    deadline = time.monotonic() + seconds + _LATER
    raw = bytearray()
    try:
        with socket.create_connection((host, int(port)), seconds) as peer:
            peer.sendall(request)
            while chunk := peer.recv(65536):
                raw += chunk
                if len(raw) > _MOST_BYTES or time.monotonic() > deadline:
                    return b""
    except (OSError, ValueError):
        return b""
    return bytes(raw)


def hang_lines(hang: Hang, frames: int = 0) -> Iterator[str]:
    """Yield the conclusion as text, with so many frames of each group but the largest."""
    between = in_seconds_or_more(hang.between)
    busy = hang.state == UNKNOWN and hang.looked_at and not hang.without_stacks
    if hang.state == GOES_ON:
        yield f"the job goes on: {hang.moved} of {hang.seen} ranks did something else {between} before"
    elif hang.state == STARTS:
        yield "the job starts: " + (
            f"{hang.absent} of {hang.ranks} ranks are not connected, or not known by number"
            if hang.absent
            else "ranks import modules, or make process groups"
        )
    elif hang.state == HANGS:
        yield f"the job hangs, since at least {in_seconds_or_more(hang.lasts)}"
    elif hang.state == WAITS:
        yield f"ranks wait, as they did {between} before; a slow step or start looks the same: look again if it lasts"
    elif not hang.ranks:
        yield "no rank is connected"
    elif busy:
        yield f"cannot tell whether the job hangs: most ranks neither wait nor were seen to go on in {between}"
    else:
        yield "cannot tell whether the job hangs"
    for one in hang.groups[:_MOST_LINES]:
        yield _line(one, hang)
        if frames and (one.count == 1 or one is not hang.groups[-1] or len(hang.groups) == 1):
            yield from (f"    {frame}" for frame in one.frames[:frames])
    if len(hang.groups) > _MOST_LINES:
        yield f"and {len(hang.groups) - _MOST_LINES} more"
    yield from hang.mismatches[:_MOST_LINES]
    if hang.unseen:
        hosts = ", ".join(f"{host} ({count})" for host, count in list(hang.unseen.items())[:_MOST_HOSTS])
        more = f" and {len(hang.unseen) - _MOST_HOSTS} more hosts" if len(hang.unseen) > _MOST_HOSTS else ""
        count = sum(hang.unseen.values())
        yield f"{counted(count, 'rank')} not seen, as they have ended, or no relay there can be asked: on {hosts}{more}"
    if hang.relays.refused:
        yield f"relays were not asked: {hang.relays.refused}"
    if hang.relays.silent:
        yield f"no answer from relays: {', '.join(hang.relays.silent)}"
    if hang.relays.older:
        yield f"{counted(hang.relays.older, 'relay')} cannot look at ranks: too old"
    if hang.without_stacks:
        reasons = ", ".join(sorted({one.no_stack for one in hang.groups if one.no_stack and not one.frames}))
        why = f" ({reasons})" if reasons else ""
        yield (
            f"without stacks: {hang.without_stacks} of {hang.seen} ranks{why}; to tell these apart, pip install "
            "'tcpstore-async[stacks]' on their hosts, or start them with TCPSTORE_STACKS=1"
        )
    elif busy and hang.uncounted:
        yield (
            f"without numbers of collectives: {hang.uncounted} of {hang.seen} ranks; to know whether these go on, "
            "start them with TCPSTORE_STACKS=1 and TORCH_FR_BUFFER_SIZE=2000"
        )


def _line(one: Same, hang: Hang) -> str:
    places = [member.host if member.pid is None else f"{member.host}, pid {member.pid}" for member in one.first]
    where = "; ".join(places) + (f" and {one.count - len(places)} more" if one.count > len(places) else "")
    if one.count == 1:
        who = f"rank {one.ranks[0]} ({where})" if one.ranks else where
    elif len(one.ranks) == one.count and 2 * one.count <= hang.ranks:
        who = f"ranks {number_ranges(one.ranks)} ({where})"
    else:
        who = f"{one.count:,} of {hang.ranks:,} {'ranks' if one.ranks else 'processes'}"
        who += f" ({where})" if 2 * one.count <= hang.ranks else ""
    used = f", CPU {one.cpu:.0%}" if one.does.startswith("running") else ""
    if one.since is not None:
        return f"{who}: {one.does}{used} for {in_seconds_or_more(one.since)}"
    quiet = "" if one.moved or one.quiet is None else f", quiet for {in_seconds_or_more(one.quiet)}"
    return f"{who}: {one.does}{used}{quiet}"
