"""The commands of `python -m bench`, and what a run says of the machine it was on.

Knows options, the machine, where results go. Must not know how anything is measured or drawn.
Invariant: the results of a run are on disk before anything is drawn from them.
"""

from __future__ import annotations

import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Literal

import click

from bench import records
from bench.records import Machine, Run, Versions
from bench.runner import Plan, Progress, Runner
from bench.scenarios import SCENARIOS
from bench.servers import ROOT, SERVERS, hosting, reference_of
from tcpstore_async.daemon import build
from tcpstore_async.load.generator import LoadError
from tcpstore_async.server.base import raise_file_limit
from tcpstore_async.version import VERSION

FULL = 3000.0
"""Seconds that a whole run may take."""
QUICK = 155.0
SAMPLED = "run.json"


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
    words = [word for word in (text or "").split(",") if word]
    if not all(word.isdecimal() and 0 < int(word) <= 1_000_000 for word in words):
        raise click.BadParameter(f"{text!r} is not a list such as 1024,2048 of numbers to 1,000,000", ctx, param)
    return tuple(sorted(set(map(int, words))))


@main.command()
@click.option("--quick", is_flag=True, help="Under three minutes: 1K to 8K ranks.")
@click.option("--scenario", "names", multiple=True, type=click.Choice(list(SCENARIOS)), help="Only this; repeatable.")
@click.option("--server", "servers", multiple=True, type=click.Choice(SERVERS), help="Only this; repeatable.")
@click.option("--sizes", callback=_sizes, metavar="N,N,…", help="Instead of each scenario's own.")
@click.option(
    "--rounds",
    type=click.IntRange(1, 100),
    help="Of each point; other scenarios than init and barrier have 3 at most.  [default: 5, or 3 if --quick]",
)
@click.option("--seconds", type=click.FloatRange(1, 86_400), help="For all of it.  [default: 3000, or 155 if --quick]")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("bench-results"), show_default=True
)
def scale(
    quick: bool, names: tuple[str, ...], servers: tuple[str, ...], sizes: tuple[int, ...], rounds: int | None,
    seconds: float | None, out: Path,
) -> None:  # fmt: skip
    """Measure ranks by the thousand on every server; leaves run.json, report.md and figures in --out."""
    raise_file_limit()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.ClickException(f"cannot write to {out}: {error.strerror}") from None
    plan = Plan(
        [SCENARIOS[name] for name in names or SCENARIOS],
        list(servers),
        sizes,
        rounds or (3 if quick else 5),
        quick,
        seconds or (QUICK if quick else FULL),
        _open_files(),
    )
    click.echo(f"{build()} build; a process may have {plan.open_files:,} files open here", err=True)
    run, failure = _measure(plan)
    path = out / SAMPLED
    records.write(run, path)
    click.echo(f"{len(run.samples)} samples in {run.seconds:.0f} s: {path}", err=True)
    if run.samples:
        from bench.report import write_report

        for file in write_report(run, out):
            click.echo(file)
    if failure:
        raise click.ClickException(failure)


def _measure(plan: Plan) -> tuple[Run, str]:
    """The run, complete or not, and why it is not; empty if it is."""
    began = datetime.now(timezone.utc)
    clock = time.monotonic()
    failure = ""
    reference = reference_of(plan.servers or SERVERS)
    with hosting(reference) as host, _shown() as progress, _terminated():
        runner = Runner(plan, host, progress)
        try:
            runner.run()
            failure = runner.failures[0] if runner.failures else ""
        except KeyboardInterrupt:
            failure = "interrupted; what was measured until then is kept"
        except (LoadError, OSError) as error:
            failure = str(error)
    run = Run(
        began=began.isoformat(timespec="seconds"),
        seconds=time.monotonic() - clock,
        command=shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
        machine=_machine(plan.open_files),
        versions=_versions(),
        samples=runner.samples,
        endings=runner.endings,
        complete=not failure,
        reference=reference,
    )
    return run, failure


@contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _shown() -> Iterator[Progress]:
    """A bar with the time left on a terminal; silence elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("left at most"), TimeRemainingColumn())
    with Bar(*columns, TextColumn("{task.description}"), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=1.0)

        def tell(done: float, text: str) -> None:
            bar.update(task, completed=min(done, 1.0), description=text)

        yield tell


def _open_files() -> int:
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _machine(open_files: int) -> Machine:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(_processor(), cores, memory, platform.release(), open_files)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def _versions() -> Versions:
    kind: Literal["compiled", "interpreted"] = "compiled" if build() == "compiled" else "interpreted"
    return Versions(VERSION, kind, _commit(), platform.python_version(), _version("uvloop"), _version("torch"))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode().strip()
