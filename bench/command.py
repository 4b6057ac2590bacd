"""The commands of `python -m bench`.

Knows options, what ends a run, where results go. Must not know how anything is measured or drawn.
Invariant: the results of a run are on disk before anything is drawn from them.
"""

from __future__ import annotations

import math
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType

import click
from msgspec.structs import replace

from bench.keeping import Keeper
from bench.machine import machine, open_files, versions
from bench.plan import Plan
from bench.records import Ending, Run, Transport
from bench.runner import Progress, Runner
from bench.scenarios import SCENARIOS
from bench.servers import SERVERS, hosting, reference_of
from tcpstore_async.daemon import build
from tcpstore_async.load.generator import LoadError
from tcpstore_async.server.base import raise_file_limit

FULL = 3200.0
"""Seconds that a whole run may take."""
QUICK = 170.0
TRANSPORTS = ("sockets", "memory")
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main() -> None:
    """Benchmarks of stores, ours and PyTorch's."""


@main.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
def compare(a: Path, b: Path) -> None:
    """Print the ratios of two runs, B over A, and which differences exceed the noise."""
    from bench.compare import compare as compared

    sys.exit(compared(a, b))


def _sizes(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    words = text.split(",")
    if not all(word.isdecimal() and 0 < int(word) <= 1_000_000 for word in words):
        raise click.BadParameter(f"{text!r} is not a list such as 1024,2048 of numbers to 1,000,000", ctx, param)
    return tuple(sorted(set(map(int, words))))


def _number(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and math.isnan(value):
        raise click.BadParameter("not a number", ctx, param)
    return value


@main.command()
@click.option(
    "--quick",
    is_flag=True,
    help="Under three minutes: init and barrier from 1K to 8K ranks, most others at one size.",
)
@click.option("--scenario", "names", multiple=True, type=click.Choice(list(SCENARIOS)), help="Only this; repeatable.")
@click.option("--server", "servers", multiple=True, type=click.Choice(SERVERS), help="Only this; repeatable.")
@click.option("--sizes", callback=_sizes, metavar="N,N,…", help="Instead of each scenario's own.")
@click.option(
    "--rounds",
    type=click.IntRange(1, 100),
    help="Of each point.  [default: init and barrier 5, others 3; if --quick 3, slow ones 1]",
)
@click.option("--transport", "transports", multiple=True, type=click.Choice(TRANSPORTS), help="Only this; repeatable.")
@click.option(
    "--seconds",
    type=click.FloatRange(1, 86_400),
    callback=_number,
    help="For all of it, but each scenario's smallest size is always measured.  "
    f"[default: {FULL:.0f}, or {QUICK:.0f} if --quick]",
)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("bench-results"), show_default=True
)
def scale(
    quick: bool, names: tuple[str, ...], servers: tuple[str, ...], sizes: tuple[int, ...], rounds: int | None,
    transports: tuple[Transport, ...], seconds: float | None, out: Path,
) -> None:  # fmt: skip
    """Measure ranks by the thousand on every server; leaves run.json, report.md and figures in --out."""
    raise_file_limit()
    keeper = _keeper(out)
    plan = Plan(
        [SCENARIOS[name] for name in names or SCENARIOS],
        list(servers),
        sizes,
        rounds or 0,
        quick,
        seconds or (QUICK if quick else FULL),
        open_files(),
        transports,
    )
    _tell(f"{build()} build; a process may have {plan.open_files:,} files open here")
    try:
        run, failure = _measure(plan, keeper)
    except OSError as error:
        raise click.ClickException(f"cannot write {keeper.path}: {error.strerror}") from None
    if run.samples:
        _tell(f"{len(run.samples)} samples in {run.seconds:.0f} s: {keeper.path}")
        from bench.report import write_report

        try:
            for file in write_report(run, out):
                click.echo(file)
        except OSError as error:
            where = error.filename or "the output"
            text = f"no report, but {keeper.path} is whole: {where}: {error.strerror}"
            raise click.ClickException(text) from None
    if failure:
        raise click.ClickException(failure)


def _keeper(out: Path) -> Keeper:
    keeper = Keeper(out)
    try:
        keeper.check()
    except OSError as error:
        raise click.BadParameter(f"cannot write {keeper.path}: {error.strerror}", param_hint="'--out'") from None
    return keeper


def _tell(text: str) -> None:
    """To whoever watches; a run does not end because nobody does any more."""
    with suppress(OSError):
        click.echo(text, err=True)


def _measure(plan: Plan, keeper: Keeper) -> tuple[Run, str]:
    """The run, complete or not, and why it is not; empty if it is. It is on disk, however this ends.

    Raises OSError if it cannot be written.
    """
    clock = time.monotonic()
    reference = reference_of(plan.servers or SERVERS)
    run = Run(
        began=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        seconds=0.0,
        command=shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
        machine=machine(plan.measures_torch),
        versions=versions(),
        samples=[],
        endings=[],
        complete=False,
        reference=reference,
    )

    if run.machine.names == "this machine's":
        _tell("Warning: PyTorch's servers ask this machine's name server for every peer, which takes root to prevent")

    def so_far(complete: bool = False) -> Run:
        seconds = time.monotonic() - clock
        return replace(run, seconds=seconds, samples=runner.samples, endings=runner.endings, complete=complete)

    failure = "not finished"
    with _ending_once() as no_more, hosting(reference) as host, _shown() as progress:
        runner = Runner(plan, host, progress, lambda: keeper.write(so_far()))
        try:
            failure = _failure(runner)
        finally:
            no_more()
            keeper.write(so_far(not failure))
    for note in runner.notes:
        if note != failure:
            _tell(f"Note: {note}")
    return so_far(not failure), failure


def _failure(runner: Runner) -> str:
    """Run it; why it is not complete, empty if it is."""
    try:
        runner.run()
    except KeyboardInterrupt:
        return "interrupted; what was measured until then is kept"
    except (LoadError, OSError) as error:
        return str(error)
    if runner.failures:
        return runner.failures[0]
    return "" if runner.samples else _nothing(runner.endings)


def _nothing(endings: Sequence[Ending]) -> str:
    for one in endings:
        at = f" at {one.size:,}" if one.size else ""
        return f"nothing was measured: {one.scenario}, {one.server}{at}: {one.reason}"
    return "nothing was measured: no scenario asked for has such sizes, servers and transports"


@contextmanager
def _ending_once() -> Iterator[Callable[[], None]]:
    """Ctrl-C, SIGTERM and SIGHUP end a run, once: while servers are stopped and results written they are ignored.

    What is yielded ignores them from now on. Whoever has us ignore one, as nohup does, is obeyed.
    """
    ours = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.getsignal(number) for number in ours}

    def ignore() -> None:
        for number in ours:
            signal.signal(number, signal.SIG_IGN)

    def interrupt(number: int, frame: FrameType | None) -> None:
        ignore()
        raise KeyboardInterrupt

    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield ignore
    finally:
        for number in ours:
            signal.signal(number, before[number])


@contextmanager
def _shown() -> Iterator[Progress]:
    """A bar with the time left on a terminal; silence elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("left at most"), TimeRemainingColumn())
    bar = Bar(*columns, TextColumn("{task.description}"), console=Console(stderr=True), transient=True)
    task = bar.add_task("starting", total=1.0)

    def tell(done: float, text: str) -> None:
        bar.update(task, completed=min(done, 1.0), description=text)

    # There may be nobody any more who reads standard error, which is no reason to lose anything.
    with suppress(OSError):
        bar.start()
    try:
        yield tell
    finally:
        with suppress(OSError):
            bar.stop()
