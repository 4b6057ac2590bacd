"""`python -m bench`: `scale` measures, `compare` compares two runs, `report` redraws one; `growth` drives one server.

Must not know how anything is measured or drawn.
Invariant: results are on disk before anything is drawn from them, whatever ends a run; exit status 0 only if the run is
complete.
"""

from __future__ import annotations

import math
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType

import click
from msgspec import structs

from bench import processes

if __name__ == "__main__":
    processes.use_build()  # before the package is imported

from bench.scale import in_memory
from bench.scale.report import compare_files, write_report, write_report_of
from bench.scale.results import Ending, Run, RunFile, Transport, machine, open_files, versions
from bench.scale.runner import OURS, Plan, Runner
from bench.scale.scenarios import SCENARIOS, Scenario
from bench.scale.servers import SERVERS, hosting, reference_of
from bench.scale.start import BACKENDS, NCCL2, PRESETS, Pattern
from bench.stats import format_seconds
from tcpstore_async.base.errors import counted
from tcpstore_async.server.listen_socket import raise_file_limit
from tcpstore_async.serving import build
from tcpstore_async.tools.load.generator import LoadError

FULL_SECONDS = 3200.0
QUICK_SECONDS = 170.0
TRANSPORTS = ("sockets", "memory")
_FEWER = 8192
"""Ranks that a job may have over sockets on most machines."""
_STARTS = ("start", "start-spread")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main() -> None:
    """Benchmark TCPStore servers: ours and PyTorch's."""


@main.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
def compare(a: Path, b: Path) -> None:
    """Compare two runs.

    Prints the ratios, B over A, and which differences exceed the noise.
    """
    sys.exit(compare_files(a, b))


@main.command("report")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the report.  [default: the run's]")
def redraw(run: Path, out: Path | None) -> None:
    """Write the report and the figures of a run again."""
    sys.exit(write_report_of(run, out or run.parent))


def _sizes(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    words = text.split(",")
    if not all(word.isdecimal() and 0 < int(word) <= 1_000_000 for word in words):
        raise click.BadParameter(f"{text!r} is not a list of numbers up to 1000000, such as 1024,2048", ctx, param)
    return tuple(sorted(set(map(int, words))))


def _number(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and math.isnan(value):
        raise click.BadParameter("not a number", ctx, param)
    return value


@main.command()
@click.option(
    "--sizes", callback=_sizes, default="1000,19000,98304,1000000", show_default=True, metavar="N,N,…", help="Ranks."
)
@click.option("--runs", type=click.IntRange(1), default=3, show_default=True, help="Processes for each row.")
@click.option("--max-growth", type=float, metavar="FACTOR", help="Fail if a row grows by more than that.")
def growth(sizes: tuple[int, ...], runs: int, max_growth: float | None) -> None:
    """Measure the cost of a rank as the job grows.

    Our sessions are driven in memory. A row is the CPU time of the store per rank, in microseconds, and its ratio to
    the smallest size. Each run has a process of its own; its first pass does not count, and small sizes are repeated on
    new engines until some 20,000 ranks have been served. Shown is the minimum over the runs of the median over the
    passes. The garbage collector is set as the server sets it (`tuned`) or as Python does (`default`). `leave_waiting`
    is the disconnection of all ranks while each waits for a key; `give_up_so_many_keys` is one client that waits for so
    many keys and disconnects.
    """
    worst = in_memory.growth(sizes, runs)
    if max_growth is not None and worst.factor > max_growth:
        raise click.ClickException(f"{worst.row}: {worst.factor:.2f} times the smallest size's (max {max_growth:g})")


@main.command()
@click.option(
    "--quick",
    is_flag=True,
    help="Finish in less than three minutes: init and barrier at 1K to 8K ranks, most others at one size.",
)
@click.option(
    "--scenario",
    "names",
    multiple=True,
    type=click.Choice(list(SCENARIOS)),
    help="Measure only this scenario; repeatable.",
)
@click.option(
    "--server", "servers", multiple=True, type=click.Choice(SERVERS), help="Measure only this server; repeatable."
)
@click.option("--sizes", callback=_sizes, metavar="N,N,…", help="Measure these sizes instead of each scenario's.")
@click.option(
    "--rounds",
    type=click.IntRange(1, 100),
    help="Rounds per size.  [default: init and barrier 5, others 3; with --quick 3, slow scenarios 1]",
)
@click.option(
    "--transport",
    "transports",
    multiple=True,
    type=click.Choice(TRANSPORTS),
    help="Measure only this transport; repeatable.",
)
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    help="What `start` and `start-spread` replay; measures only these scenarios.  [default: nccl2]",
)
@click.option(
    "--groups",
    metavar="KxN[:BACKEND],…",
    help="Additional groups in these: each rank is in K groups of N ranks, for example 12x128,2x512:gloo.",
)
@click.option(
    "--preset",
    type=click.Choice(list(PRESETS)),
    help="Replay a known job instead, at its own sizes or those in --sizes: dense, 8,192 ranks; megatron, up to 16,384 "
    "in many groups, with 3,116 requests per rank, so that a sample of 1,024 takes a minute or more; frontier, 98,304 "
    "in memory.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(1, 86_400),
    callback=_number,
    help="Time budget; each scenario's smallest size is always measured.  "
    f"[default: {FULL_SECONDS:.0f}, with --quick {QUICK_SECONDS:.0f}]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("bench-results"),
    show_default=True,
    help="Folder for the results.",
)
def scale(
    quick: bool, names: tuple[str, ...], servers: tuple[str, ...], sizes: tuple[int, ...], rounds: int | None,
    transports: tuple[Transport, ...], backend: str | None, groups: str | None, preset: str | None,
    seconds: float | None, out: Path,
) -> None:  # fmt: skip
    """Measure every server with thousands of ranks.

    Writes run.json, report.md and figures to --out.
    """
    raise_file_limit()
    file = _run_file(out)
    starts = _starts(backend, groups, preset, sizes)
    others = [name for name in names if name not in _STARTS]
    if starts and others:
        raise click.UsageError(f"--backend, --groups and --preset are for start and start-spread, not {others[0]}")
    if preset is not None and PRESETS[preset].in_memory_only:
        transports = transports or ("memory",)
    plan = Plan(
        [starts.get(name, SCENARIOS[name]) for name in names or starts or SCENARIOS],
        list(servers),
        sizes,
        rounds or 0,
        quick,
        seconds or (QUICK_SECONDS if quick else FULL_SECONDS),
        open_files(),
        transports,
    )
    _print(f"{build()} build; limit on open files: {plan.open_files:,}")
    try:
        run, failure = _measure(plan, file)
    except OSError as error:
        raise click.ClickException(f"cannot write {file.path}: {error.strerror}") from None
    if run.samples:
        _print(f"{counted(len(run.samples), 'sample')} in {format_seconds(run.seconds)}: {file.path}")
        try:
            for path in write_report(run, out):
                click.echo(path)
        except OSError as error:
            where = error.filename or "standard output"
            text = f"no report, but {file.path} is complete: {where}: {error.strerror}"
            raise click.ClickException(text) from None
    if failure:
        raise click.ClickException(failure)


def _starts(backend: str | None, groups: str | None, preset: str | None, asked: Sequence[int]) -> dict[str, Scenario]:
    """Return the scenarios of a start as these options replace them; none without options."""
    if preset is not None:
        if backend is not None or groups is not None:
            raise click.UsageError("--preset excludes --backend and --groups")
        pattern, sizes, memory = PRESETS[preset]
        title = preset
        if not {*asked} <= {*sizes, *memory}:
            title = f"{preset} at {', '.join(f'{size:,}' for size in asked)} ranks"
            _print(f"Note: --preset {preset} is a job of {max(sizes + memory):,} ranks; measuring {title}")
        return {
            name: replace(
                SCENARIOS[name].replaying(pattern, title), sizes=sizes, quick=(sizes or memory)[:1], memory=memory
            )
            for name in _STARTS
        }
    if backend is None and groups is None:
        return {}
    try:
        pattern = Pattern.of(backend or NCCL2.backend, groups or "")
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--groups'") from None
    return {name: SCENARIOS[name].replaying(pattern) for name in _STARTS}


def _run_file(out: Path) -> RunFile:
    file = RunFile(out)
    try:
        file.check()
    except OSError as error:
        raise click.BadParameter(f"cannot write {file.path}: {error.strerror}", param_hint="'--out'") from None
    return file


def _print(text: str) -> None:
    """Print to standard error; a closed one does not end the run."""
    with suppress(OSError):
        click.echo(text, err=True)


def _measure(plan: Plan, file: RunFile) -> tuple[Run, str]:
    """Run the plan; return the run and why it is not complete (empty if it is). The file is written in any case.

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
        jobs={one.name: one.job for one in plan.scenarios if one.job},
    )

    if run.machine.names == "this machine's":
        _print("Warning: PyTorch's servers query this machine's name server for every peer; preventing that needs root")

    def so_far(complete: bool = False) -> Run:
        seconds = time.monotonic() - clock
        return structs.replace(run, seconds=seconds, samples=runner.samples, endings=runner.endings, complete=complete)

    failure = "not finished"
    with _interrupted_once() as ignore_signals, hosting(reference) as host:
        runner = Runner(plan, host, _show_progress, lambda: file.write(so_far()))
        try:
            failure = _failure(runner)
        finally:
            ignore_signals()
            _overwrite("")
            file.write(so_far(not failure))
    for note in runner.notes:
        if note != failure:
            _print(f"Note: {note}")
    return so_far(not failure), failure


def _failure(runner: Runner) -> str:
    """Run it; return why it is not complete, or an empty string."""
    try:
        runner.run()
    except KeyboardInterrupt:
        return "interrupted; what was measured so far is kept"
    except (LoadError, OSError) as error:
        return str(error)
    if runner.failures:
        return runner.failures[0]
    return "" if runner.samples else f"nothing was measured: {_why_nothing(runner.plan, runner.endings)}"


def _why_nothing(plan: Plan, endings: Sequence[Ending]) -> str:
    """Return why a run has no samples, and what can be measured instead."""
    for one in endings:
        at = f" at {one.size:,}" if one.size else ""
        return f"{one.scenario}, {one.server}{at}: {one.reason}"
    names = " and ".join(scenario.name for scenario in plan.scenarios)
    presets = {scenario.job.preset for scenario in plan.scenarios if scenario.job and scenario.job.preset}
    what = f"{names} of {presets.pop()}" if presets else names
    without_sizes = not all(scenario.sizes for scenario in plan.scenarios)
    sockets = "--transport sockets" + (f" --sizes {_FEWER}" if without_sizes else "")
    if not plan.has("sockets"):
        if plan.servers and OURS not in plan.servers:
            return (
                f"{what}: measured in memory, where {' and '.join(plan.servers)} cannot be; choose --server {OURS}, or "
                f"sockets with {sockets}"
            )
        return f"{what}: cannot be measured in memory; choose {sockets}"
    if without_sizes:
        return f"{what}: measured in memory only, unless you choose fewer ranks with {sockets}"
    return "no chosen scenario has these sizes, servers and transports"


@contextmanager
def _interrupted_once() -> Iterator[Callable[[], None]]:
    """Let SIGINT, SIGTERM and SIGHUP end the run once; ignore them while servers stop and results are written.

    Yields a function that ignores them from then on. A signal that was ignored before, as under nohup, stays so.
    """
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    before = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}

    def ignore() -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)

    def interrupt(number: int, frame: FrameType | None) -> None:
        ignore()
        raise KeyboardInterrupt

    for number in before:
        signal.signal(number, interrupt)
    try:
        yield ignore
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show_progress(done: float, text: str) -> None:
    """Overwrite the last line of a terminal; print nothing elsewhere."""
    _overwrite(f"{done:4.0%} of the time: {text}")


def _overwrite(text: str) -> None:
    with suppress(OSError):
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[K{text}", err=True, nl=False)


if __name__ == "__main__":
    main(prog_name="python -m bench")
