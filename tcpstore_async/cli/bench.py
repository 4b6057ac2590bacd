"""`tcpstore bench`: the short benchmark of a running server.

Knows: its options, how its table prints, what ends it. Must not know: how anything is measured.
Invariant: an operation that was finished is printed, whatever ends the next.
"""

import signal
import socket
import sys
import time
from contextlib import closing

import click

from ..client.aio import AsyncTCPStore
from ..errors import DistError
from ..interrupts import end_by
from ..load.generator import Late, LoadError, Unreachable
from ..load.quick_bench import SATURATED, Row, measure
from ..load.scripts import OPERATIONS
from ..serving import run_loop
from ..session.identity import Identity
from .client import FAILED, TIMED_OUT, UNREACHABLE, ClientContext, client_command
from .output import say, say_error, say_json, shown

_QUIET = 2.0
"""Seconds before progress is shown."""
_FOR_EVER = 1e9


def _names(ctx: click.Context, param: click.Parameter, text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in OPERATIONS:
            raise click.BadParameter(f"there is no {name!r}; there are {', '.join(OPERATIONS)}", ctx, param)
    if not names:
        raise click.BadParameter("name at least one operation", ctx, param)
    return list(dict.fromkeys(names))


@click.command()
@click.option("--ranks", type=click.IntRange(1, 60_000), default=64, show_default=True, help="Connections.")
@click.option(
    "--ops",
    default="set,get,add,check",
    show_default=True,
    callback=_names,
    metavar="NAME,…",
    help=f"Of {', '.join(OPERATIONS)}.",
)
@click.option(
    "--requests",
    type=click.IntRange(1, 100_000_000),
    default=20_000,
    show_default=True,
    help="Of each operation, over all ranks.",
)
@click.option(
    "--value-size", type=click.IntRange(0, 8_000_000), default=64, show_default=True, help="Bytes of each value."
)
@client_command
def bench(asker: ClientContext, ranks: int, ops: list[str], requests: int, value_size: int) -> None:
    """Measure a running server: throughput, and latencies by percentile.

    Every rank has one request under way at a time. --timeout is for each operation. Silent writes count as done when
    a PING behind them is answered. Load CPU is how much of the time the one process that sends all requests computed,
    or waited for a core: where it is saturated (sat.), that process may have set the pace and not the server. The
    keys are under /tcpstore-bench/ and are deleted at the end, if the server answers in time. What was finished is
    printed, whatever ends the next.

    PyTorch's servers look up the name of every peer before they answer it: where no name server replies, many ranks
    take them longer than --timeout.
    """
    limit = asker.timeout if asker.timeout >= 0 else _FOR_EVER
    progress = _Progress(len(ops))
    done: list[Row] = []
    server = {"server": "unknown"}
    why, status = "", 0
    _raise_interrupts()
    try:
        rows = measure(
            _address(asker), asker.port, ranks=ranks, names=ops, requests=requests, size=value_size, limit=limit,
            progress=progress.tell,
        )  # fmt: skip
        with closing(rows):
            for row in rows:
                done.append(row)
                if len(done) == 1:  # not before: only now it is known that there is a server, and that it answers
                    server = _who(asker) or server
    except Unreachable as error:
        why, status = str(error), UNREACHABLE
    except Late as error:
        why, status = str(error), TIMED_OUT
    except LoadError as error:
        why, status = str(error), FAILED
    except _Interrupt as interrupt:
        why, status = "interrupted", 128 + interrupt.number
    finally:
        progress.end()
    if done and asker.output == "json":
        about = {"ranks": ranks, "value_size": value_size, **server, "complete": not why}
        say_json({**about, "operations": done})
    elif done:
        say(_table(server, done))
    if status > 128:
        say_error(why, status, asker.output)
        end_by(status - 128)
    if why:
        asker.fail(why, status)


def _address(asker: ClientContext) -> str:
    """The first of the host's addresses at which something listens, for all ranks. Raises Unreachable, Late."""
    limit = max(asker.timeout, 0.001) if asker.timeout >= 0 else None
    try:
        with socket.create_connection((asker.host, asker.port), limit) as one:
            return str(one.getpeername()[0])
    except socket.gaierror as error:
        raise Unreachable(f"cannot look up {asker.host}: {error.strerror}") from None
    except TimeoutError:
        raise Late(f"cannot connect to {asker.host}:{asker.port} within {asker.timeout:g} s") from None
    except OSError as error:
        raise Unreachable(f"cannot connect to {asker.host}:{asker.port}: {error.strerror}") from None


class _Interrupt(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or SIGHUP."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def _raise_interrupts() -> None:
    """At an interrupt the keys go, the load with them, and what was finished is printed."""

    def interrupt(number: int, frame: object) -> None:
        raise _Interrupt(number)

    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, interrupt)


def _who(asker: ClientContext) -> dict[str, str] | None:
    """What the server says of itself; None if it could not be asked."""
    found: list[Identity | None] = []

    async def ask() -> None:
        async with await AsyncTCPStore.connect(asker.host, asker.port, timeout=asker.timeout) as store:
            found.append(await store.server())

    try:
        run_loop(ask())
    except DistError:
        return None  # what ails it, the next operation will say
    [server] = found
    if server is None:
        return {"server": "not ours"}
    return {"server": server.server, "version": server.version, "backend": server.backend, "build": server.build}


class _Progress:
    """One line on a terminal's standard error, once it takes long."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.began = time.monotonic()
        self.shown = False

    def tell(self, done: int, name: str) -> None:
        if not sys.stderr.isatty() or time.monotonic() - self.began < _QUIET:
            return
        self.shown = True
        line = f"{done} of {self.count} done, now {name}{self._left(done)}"
        click.echo(f"\r\x1b[K{line}", nl=False, err=True)

    def _left(self, done: int) -> str:
        """The time left, if operations take as long as those before."""
        if not 0 < done < self.count:
            return ""
        return f", about {(time.monotonic() - self.began) / done * (self.count - done):.0f} s left"

    def end(self) -> None:
        if self.shown:
            click.echo("\r\x1b[K", nl=False, err=True)


def _table(server: dict[str, str], rows: list[Row]) -> str:
    lines = [
        shown(f"server: {', '.join(server.values())}"),
        f"{'operation':<12} {'requests':>10} {'ops/s':>10} {'p50 ms':>9} {'p95 ms':>9} {'p99 ms':>9}  load CPU",
    ]
    lines += [
        f"{row.operation:<12} {row.requests:>10,} {row.per_second:>10,.0f} "
        f"{row.p50_ms:>9.3f} {row.p95_ms:>9.3f} {row.p99_ms:>9.3f}  {_load(row.load_cpu)}"
        for row in rows
    ]
    return "\n".join(lines)


def _load(share: float) -> str:
    return f"{share:>8.0%}{' sat.' if share >= SATURATED else ''}"
