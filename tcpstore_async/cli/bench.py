"""`tcpstore bench`: the short benchmark of a running server.

Knows: its options and how its table prints. Must not know: how anything is measured.
"""

import signal
import socket
import sys
import time

import click
import msgspec

from ..load.generator import Late, LoadError, Unreachable
from ..load.requests import OPERATIONS
from ..load.short import Row, measure
from .client import FAILED, TIMED_OUT, UNREACHABLE, Asker, client_command
from .streams import say

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
    help="Of each operation, over all ranks; rounded up to the same number for each.",
)
@click.option(
    "--value-size", type=click.IntRange(0, 8_000_000), default=64, show_default=True, help="Bytes of each value."
)
@client_command
def bench(asker: Asker, ranks: int, ops: list[str], requests: int, value_size: int) -> None:
    """Measure a running server: throughput, and latencies by percentile.

    Every rank has one request under way at a time. --timeout is for each operation. Silent writes count as done when a
    PING behind them is answered. The keys are under /tcpstore-bench/ and are deleted at the end.
    """
    limit = asker.timeout if asker.timeout >= 0 else _FOR_EVER
    progress = _Progress(len(ops))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the keys go, and the load with them
    try:
        host = socket.getaddrinfo(asker.host, asker.port, type=socket.SOCK_STREAM)[0][4][0]
        rows = measure(
            str(host), asker.port, ranks=ranks, names=ops, requests=requests, size=value_size, limit=limit,
            progress=progress.tell,
        )  # fmt: skip
    except Unreachable as error:
        asker.fail(str(error), UNREACHABLE)
    except Late as error:
        asker.fail(str(error), TIMED_OUT)
    except LoadError as error:
        asker.fail(str(error), FAILED)
    except socket.gaierror as error:
        asker.fail(f"cannot look up {asker.host}: {error.strerror}", UNREACHABLE)
    finally:
        progress.end()
    if asker.output == "json":
        say(msgspec.json.encode({"ranks": ranks, "value_size": value_size, "operations": rows}))
        return
    for line in _table(rows):
        say(line)


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
        click.echo(f"\r\x1b[K{done} of {self.count} done, now {name}", nl=False, err=True)

    def end(self) -> None:
        if self.shown:
            click.echo("\r\x1b[K", nl=False, err=True)


def _table(rows: list[Row]) -> list[str]:
    lines = [f"{'operation':<12} {'requests':>10} {'ops/s':>10} {'p50 ms':>9} {'p95 ms':>9} {'p99 ms':>9}"]
    lines += [
        f"{row.operation:<12} {row.requests:>10,} {row.per_second:>10,.0f} "
        f"{row.p50_ms:>9.3f} {row.p95_ms:>9.3f} {row.p99_ms:>9.3f}"
        for row in rows
    ]
    return lines
