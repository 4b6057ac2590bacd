"""`tcpstore top`: what a server is doing, on a screen that is redrawn, or as one JSON object.

Knows terminals and rich, which is an extra of the package. Must not know how a server is queried.
Invariant: whatever ends the command, the terminal is restored.
"""

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec.structs import asdict

from ...base.errors import counted
from ...base.interrupts import die_of
from ...base.keys import caller_key
from ...cli.context import ClientContext, looking_command
from ...cli.options import Seconds
from ...cli.output import escape, print_json
from ...client.admin import Where
from ...diagnosis.rates import Interval, Look, between
from .asking import admin_option, in_bytes, in_seconds, joined_of, query, store_option, world_size_option
from .look import look_at, store_figures

if TYPE_CHECKING:
    from rich.console import RenderableType

_PARTS: Final = ("waits", "largest", "oldest_stores")

_FIRST_INTERVAL: Final = 0.3
"""Seconds between the two looks of the first screen, or of the only object."""

_MOST_ROWS: Final = 10
"""Rows of each table on a screen."""


@click.command()
@click.option(
    "-i",
    "--interval",
    type=Seconds(0.1, 3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between refreshes.",
)
@world_size_option
@store_option
@admin_option
@looking_command
def top(context: ClientContext, interval: float, world_size: int | None, admin: Path | None) -> None:
    """Show what a server is doing, until 'q' or Ctrl-C.

    Shows who has joined the unnamed store, commands by name, the longest waits and the largest keys in all stores, and
    the oldest named stores; with --store, the same for that store only. With -o json, prints one object and exits.
    """
    store = context.store
    if context.output == "json":
        print_json(query(context, admin, lambda path, timeout: _object(path, timeout, store, world_size)))
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("'top' needs a terminal; without one, use -o json, or 'tcpstore stat'.")
    try:
        import rich  # noqa: F401
    except ImportError:
        raise click.ClickException(
            "'top' needs rich: pip install 'tcpstore-async[top]'; without it, use 'tcpstore stat', or -o json"
        ) from None
    number = query(
        context,
        admin,
        lambda path, timeout: _show(lambda: _look(path, timeout, store), interval, store, world_size),
    )
    if number:
        die_of(number)


def _look(where: Where, timeout: float | None, store: str | None) -> Look:
    return look_at(where, timeout, *_PARTS, store=store)


def _object(where: Where, timeout: float | None, store: str | None, world_size: int | None) -> dict[str, Any]:
    before = look_at(where, timeout, store=store)
    time.sleep(_FIRST_INTERVAL)
    after = _look(where, timeout, store)
    return as_object(after, between(before.stats, after.stats), store, world_size)


def as_object(look: Look, now: Interval, store: str | None, world_size: int | None) -> dict[str, Any]:
    """Return what is shown of all stores, or of one, as JSON."""
    waits = [{**asdict(one), "key": caller_key(one.key)} for one in look.waits]
    return {
        "server": look.server,
        "now": now if store is None else store_figures(store, now),
        "joined": look.stats.joins.joined,
        "world_size": _world_size(look, world_size),
        "waits": waits,
        "largest": [{"key": caller_key(one.key), "bytes": one.size, "store": one.store} for one in look.largest],
        **({"stores": [asdict(one) for one in look.oldest], "other_stores": look.others} if store is None else {}),
    }


def _world_size(look: Look, world_size: int | None) -> int | None:
    joins = look.stats.joins
    return world_size or joins.expected or joins.world_size


class _Ended(Exception):
    """A signal requested exit."""


def _show(look: Callable[[], Look], interval: float, store: str | None, world_size: int | None) -> int:
    """Redraw a screen until 'q' is pressed; return the number of the signal that ended it, 0 for none."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    before = look()
    ended: list[int] = []

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def end(number: int, frame: object) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)  # the terminal is being restored
        ended.append(number)
        raise _Ended

    previous = {number: signal.signal(number, end) for number in numbers}
    try:
        with _keys_at_once(sys.stdin.fileno()), Live(console=console, screen=True, auto_refresh=False) as live:
            seconds = min(_FIRST_INTERVAL, interval)
            while not _quits(sys.stdin.fileno(), seconds):
                after = look()
                shown = screen(after, between(before.stats, after.stats), world_size, console.height, store)
                live.update(shown, refresh=True)
                before, seconds = after, interval
    except _Ended:
        pass
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return ended[0] if ended else 0


@contextmanager
def _keys_at_once(terminal: int) -> Iterator[None]:
    """Have keys delivered as they are pressed, without echo."""
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _quits(terminal: int, seconds: float) -> bool:
    """Wait up to `seconds`; return whether 'q' was pressed, or the terminal is gone."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if select.select([terminal], [], [], left)[0]:
            pressed = os.read(terminal, 64)
            if not pressed or b"q" in pressed or b"Q" in pressed:
                return True
    return False


# The screen


def screen(
    look: Look, now: Interval, world_size: int | None, height: int, store: str | None = None
) -> "RenderableType":
    """Return the screen for all stores, or for one. Text of peers is escaped, and not taken for markup."""
    from rich.console import Group
    from rich.text import Text

    named = bool(look.oldest) and store is None
    rows = max(2 if named else 3, min(_MOST_ROWS, (height - 16) // 4 if named else (height - 14) // 3))
    stats, server = look.stats, look.server
    title = f"tcpstore {server.get('host', '')}:{server.get('port', '')}"
    about = f"  pid {server.get('pid', '')}, {server.get('version', '')} ({server.get('build', '')}), up "
    first = Text(title, style="bold").append(
        escape(f"{about}{in_seconds(stats.uptime)}, {in_bytes(stats.resident_bytes)} resident, CPU {now.cpu:.0%}"),
        style="not bold",
    )
    if store is not None:
        first.append(f"\nstore {escape(store)}")
    of_store = (("sessions", str(now.sessions)), ("waiting", str(now.waiting)), ("keys", str(now.keys)))
    numbers = (
        (*of_store, ("memory", in_bytes(now.bytes)))
        if store is not None
        else (
            ("connections", f"{now.connections} of {stats.connections.max}"),
            *of_store,
            ("ops/s", f"{now.ops:.0f}"),
            ("memory", f"{in_bytes(now.bytes)} of {in_bytes(stats.budget.limit)}"),
            ("p99", in_seconds(now.p99)),
            ("lag", in_seconds(now.lag)),
            ("accept queue", "-" if now.accept_queue is None else str(now.accept_queue)),
            ("in", f"{in_bytes(now.received)}/s"),
            ("out", f"{in_bytes(now.sent)}/s"),
        )
    )
    second = Text()
    for name, number in numbers:
        second.append(f"{name} ", style="dim").append(f"{number}   ")
    waits: list[tuple[str, ...]] = [
        (caller_key(one.key) + (f" and {one.keys - 1} more" if one.keys > 1 else ""), str(one.waiting),
         in_seconds(one.since), one.command, _who(one.peer, one.host, one.port, one.pid), one.store or "")
        for one in look.waits[:rows]
    ]  # fmt: skip
    stores: list[tuple[str, ...]] = [
        (one.name, f"{one.joined} of {one.expected}" if one.expected else str(one.joined), str(one.sessions),
         str(one.keys), in_bytes(one.bytes), in_seconds(one.age))
        for one in look.oldest[:rows]
    ]  # fmt: skip
    more = max(0, len(look.oldest) - rows) + look.others.stores
    commands: list[tuple[str, ...]] = [
        (name, f"{rate:.0f}", str(stats.commands.get(name, 0))) for name, rate in list(now.commands.items())[:rows]
    ]
    largest: list[tuple[str, ...]] = [
        (caller_key(one.key), in_bytes(one.size), one.store or "") for one in look.largest[:rows]
    ]
    in_store = ("STORE",) if named else ()
    oldest = f"OLDEST STORES (AND {more} MORE)" if more else "OLDEST STORES"
    return Group(
        first,
        second,
        Text(""),
        _joined(look, world_size, " the unnamed store" if named else ""),
        Text(""),
        *([_table(("COMMAND", "PER SECOND", "SINCE START"), commands)] if store is None else []),
        _table(("LONGEST WAITS", "WAITING", "LONGEST", "COMMAND", "BY", *in_store), waits),
        _table(("LARGEST KEYS", "VALUE", *in_store), largest),
        *([_table((oldest, "RANKS", "SESSIONS", "KEYS", "MEMORY", "AGE"), stores)] if named else []),
        Text("q: quit", style="dim"),
    )


def _joined(look: Look, world_size: int | None, where: str) -> "RenderableType":
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    joined, size = look.stats.joins.joined, _world_size(look, world_size)
    if size is None:
        return Text(
            f"{counted(joined, 'rank')} {'has' if joined == 1 else 'have'} joined{where}",
            style="dim" if not joined else "",
        )
    bar = Table.grid(padding=(0, 1))
    bar.add_row(ProgressBar(total=size, completed=min(joined, size), width=40), joined_of(joined, size, where))
    return bar


def _who(peer: dict[str, str], host: str, port: int, pid: int | None) -> str:
    rank = f"rank {peer['rank']} " if "rank" in peer else ""
    return f"{rank}{peer.get('host') or host}:{port}" + ("" if pid is None else f" pid {pid}")


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> "RenderableType":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, expand=True, padding=(0, 2, 0, 0), header_style="reverse")
    for at, column in enumerate(columns):
        table.add_column(column, ratio=4 if at == 0 else None, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*[Text(escape(cell)) for cell in row[: len(columns)]])
    return table
