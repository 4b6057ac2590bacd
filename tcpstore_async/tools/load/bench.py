"""`tcpstore bench`: options, table and exit status of a short benchmark of a running server.

Must not know how anything is measured. Invariant: the results of finished operations are printed, whatever ends the
benchmark.
"""

import copy
import signal
import socket
import time
from contextlib import closing

import click

from ...base.errors import AccessDeniedError, DistError
from ...base.interrupts import die_of
from ...cli.context import (
    FAILED,
    NOT_ALLOWED,
    OTHER_SERVER,
    TIMED_OUT,
    UNREACHABLE,
    ClientContext,
    client_command,
    exit_status,
    keys_store_option,
)
from ...cli.output import ProgressLine, escape, print_error, print_json, print_result
from ...serving import run_loop
from ...session.identity import Identity
from .generator import Late, LoadError, Unreachable
from .quick_bench import SATURATED, Row, measure
from .scripts import OPERATIONS

_NO_TIMEOUT = 1e9
"""Seconds that stand for no timeout."""

_STATUS = {Unreachable: UNREACHABLE, Late: TIMED_OUT}


def _parse_operations(ctx: click.Context, param: click.Parameter, text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in OPERATIONS:
            raise click.BadParameter(f"unknown operation {name!r}; choose from {', '.join(OPERATIONS)}", ctx, param)
    if not names:
        raise click.BadParameter("no operation given", ctx, param)
    return list(dict.fromkeys(names))


@click.command()
@click.option("--ranks", type=click.IntRange(1, 60_000), default=64, show_default=True, help="Number of connections.")
@click.option(
    "--ops",
    default="set,get,add,check",
    show_default=True,
    callback=_parse_operations,
    metavar="NAME,…",
    help=f"Operations to measure: {', '.join(OPERATIONS)}.",
)
@click.option(
    "--requests",
    type=click.IntRange(1, 100_000_000),
    default=20_000,
    show_default=True,
    help="Requests per operation, across all ranks.",
)
@click.option(
    "--value-size",
    type=click.IntRange(0, 8_000_000),
    default=64,
    show_default=True,
    help="Size of each value in bytes.",
)
@keys_store_option
@client_command
def bench(context: ClientContext, ranks: int, ops: list[str], requests: int, value_size: int) -> None:
    """Measure the throughput and latency of a running server.

    Each rank sends its next request as soon as the previous one is answered; a write that has no reply is followed by
    a PING. --timeout applies to each operation. Keys are created under /tcpstore-bench/ and deleted at the end if the
    server answers in time. Results of finished operations are printed even if the benchmark fails or is interrupted.

    "load CPU" is the share of time that the load-generating process spent running or waiting for a core. If it is
    marked "sat." (saturated), that process may have been the bottleneck, not the server.

    With a token, TLS or --store, the ranks connect through a relay that is started for them, and the results are those
    of ranks behind a relay.

    PyTorch's servers look up the name of every peer when it connects: if the name server does not respond, connecting
    many ranks can exceed --timeout.
    """
    limit = context.timeout if context.timeout >= 0 else _NO_TIMEOUT
    progress = _Progress(len(ops))
    done: list[Row] = []
    server = {"server": "unknown"}
    failure, status = "", 0
    _raise_interrupts()
    try:
        with ProgressLine() as line, context.plain_address("tcpstore-bench/") as where:
            line.describe = lambda: progress.text
            rows = measure(
                *_address(context, *where), ranks=ranks, names=ops, requests=requests, size=value_size, limit=limit,
                progress=progress.show,
            )  # fmt: skip
            with closing(rows):
                for row in rows:
                    done.append(row)
                    if len(done) == 1:  # not earlier: only now is it known that there is a server that answers
                        server = _identify(context) or server
    except DistError as error:
        failure, status = str(error), exit_status(error)
    except LoadError as error:
        failure, status = str(error), _STATUS.get(type(error), FAILED)
    except _Interrupt as interrupt:
        failure, status = "interrupted", 128 + interrupt.number
    if not done and status in (UNREACHABLE, FAILED) and (refusal := _refusal(context)):
        failure, status = refusal, NOT_ALLOWED
    if done and context.output == "json":
        about = {"ranks": ranks, "value_size": value_size, **server, "complete": not failure}
        print_json({**about, "operations": done})
    elif done:
        print_result(_table(server, done))
    if status > 128:
        print_error(failure, status, context.output)
        die_of(status - 128)
    if failure:
        context.fail(failure, status)


def _address(context: ClientContext, host: str, port: int) -> tuple[str, int]:
    """Return the first of the host's addresses that accepts a connection. Raises Unreachable and Late."""
    limit = max(context.timeout, 0.001) if context.timeout >= 0 else None
    try:
        with socket.create_connection((host, port), limit) as one:
            return str(one.getpeername()[0]), port
    except socket.gaierror as error:
        raise Unreachable(f"cannot resolve {context.host}: {error.strerror}") from None
    except TimeoutError:
        raise Late(f"cannot connect to {context.host}:{context.port} within {context.timeout:g} s") from None
    except OSError as error:
        raise Unreachable(f"cannot connect to {context.host}:{context.port}: {error.strerror}") from None


class _Interrupt(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or SIGHUP."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def _raise_interrupts() -> None:
    """Turn signals into exceptions, so that keys are deleted and finished results printed."""

    def interrupt(number: int, frame: object) -> None:
        raise _Interrupt(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup
            signal.signal(number, interrupt)


def _identify(context: ClientContext) -> dict[str, str] | None:
    """Return the server's identity; None if the request failed."""
    found: list[Identity | None] = []

    async def request() -> None:
        async with await context.connect() as store:
            found.append(await store.server())

    try:
        run_loop(request())
    except DistError:
        return None  # the next operation reports the error
    [server] = found
    if server is None:
        return {"server": OTHER_SERVER}
    return {"server": server.server, "version": server.version, "backend": server.backend, "build": server.build}


def _refusal(context: ClientContext) -> str:
    """Return why the server refuses this client, which the load generator cannot see; "" if unknown."""
    brief = copy.copy(context)
    brief.timeout = 0.0  # one attempt

    async def ask() -> None:
        async with await brief.connect() as store:
            await store.check([])

    try:
        run_loop(ask())
    except AccessDeniedError as error:
        return str(error)
    except DistError:
        pass
    return ""


class _Progress:
    """The text of the progress line, with the remaining time if each operation takes as long as the previous ones."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.began = time.monotonic()
        self.text = "connecting"

    def show(self, done: int, name: str) -> None:
        self.text = f"{done} of {self.count} done, now {name}"
        if 0 < done < self.count:
            self.text += f", about {(time.monotonic() - self.began) / done * (self.count - done):.0f} s left"


def _table(server: dict[str, str], rows: list[Row]) -> str:
    lines = [
        escape(f"server: {', '.join(server.values())}"),
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
