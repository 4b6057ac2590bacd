"""`tcpstore record` and `tcpstore replay`: options, output and exit status.

This module does not know how traffic is decoded, written or played.
"""

import asyncio
import math
import os
import signal
from pathlib import Path
from typing import Any

import click

from ..errors import DistError, DistNetworkError, StoreTimeoutError
from ..interrupts import die_of
from ..load.player import Player, Report, counted
from ..load.recorder import record
from ..load.recording import Recording, RecordingError, read_recording
from ..load.summary import Summary, summarize
from ..serving import run_loop
from .client import FAILED, TIMED_OUT, UNREACHABLE, ClientContext, client_command, parse_url
from .listen import listen_options, write_atomically
from .output import ProgressLine, escape, print_error, print_json, print_result, stdout_is_closed
from .stdio import log_without_blocking


@click.command("record")
@click.option("--upstream", required=True, metavar="URL", callback=parse_url, help="Address of the server.")
@click.option(
    "-w",
    "--write",
    "path",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write, replaced if it exists once the recorder has started; compressed if its name ends with '.gz'.",
)
@click.option(
    "--values",
    is_flag=True,
    help="Record the contents of values too, not only their sizes: Gloo's hold addresses, and our clients' INTRODUCE "
    "holds host name and process id.",
)
@listen_options
def record_command(
    upstream: tuple[str, int],
    path: Path,
    values: bool,
    host: str,
    port: int,
    listen_fd: int | None,
    port_file: Path | None,
) -> None:
    """Forward connections to a server and record their requests.

    A job that connects here instead of to the server at --upstream, ours or PyTorch's, runs as before. The file gets
    the time, command, keys and sizes of every request and reply, numbers that are added, and which values are equal;
    the contents of values only with --values. 'tcpstore replay' plays it.

    Begin with a server that has no keys, as a replay does.

    Prints one line of JSON once it accepts connections. On SIGTERM or SIGINT, closes the connections that are left and
    exits: stop it after the job. A recorder that is killed leaves a readable file.
    """
    log_without_blocking()

    def announce(host: str, port: int) -> None:
        if port_file is not None:
            write_atomically(port_file, f"{port}\n")
        event = {"event": "ready", "role": "recorder", "host": host, "port": port, "pid": os.getpid()}
        if not stdout_is_closed():
            print_json({**event, "file": str(path), "values": values})

    done: list[Any] = []

    async def main() -> None:
        done.append(await record(upstream, path, host=host, port=port, fd=listen_fd, values=values, ready=announce))

    try:
        run_loop(main())
    except (RecordingError, DistError) as error:
        raise click.ClickException(str(error)) from None
    [recorder] = done
    if recorder.file.error:
        raise click.ClickException(recorder.file.error)
    requests = counted(recorder.requests, "request")
    connections = counted(recorder.connections, "connection")
    processes = counted(len(recorder.processes), "process", "processes")
    click.echo(f"recorded {requests} from {connections} and {processes}", err=True)


def _speed(ctx: click.Context, param: click.Parameter, number: float) -> float:
    if not (number >= 0 and math.isfinite(number)):
        raise click.BadParameter(f"{number} is not a finite number of 0 or more", ctx, param)
    return number


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--ranks",
    type=click.IntRange(1, 1_000_000),
    default=None,
    metavar="N",
    help="Play copies of the job until there are N ranks; default: the job once.",
)
@click.option(
    "--speed",
    type=float,
    default=1.0,
    show_default=True,
    callback=_speed,
    help="Times as fast as recorded; 0 for no pauses.",
)
@click.option("--summary", is_flag=True, help="Print what the recording holds, and play nothing.")
@client_command
def replay(context: ClientContext, file: Path, ranks: int | None, speed: float, summary: bool) -> None:
    """Replay a recording against a server and compare the replies.

    Every recorded connection is made again and sends the same requests at the recorded times, but none before the
    requests of other ranks on which it depended have been executed. Hidden values are replaced by others of the same
    length. Use a server that has no keys yet. Replies are compared: numbers, kinds and lengths, and contents too if
    they were recorded.

    --ranks does not make the job larger: a job of 8 ranks played with --ranks 20 is played three times at once; the
    first copy uses the recorded keys, and each further copy puts a prefix of its own before them. A rank is a process
    that was recorded.

    --timeout is the time without any progress after which the replay is given up. Ctrl-C ends it and prints what was
    played until then.

    Exit status: 0 all replies are as recorded, 1 some are not or the recording cannot be played, 2 usage error, 3
    timeout, 4 server unreachable.
    """
    signals: list[int] = []
    try:
        with ProgressLine() as progress:
            progress.describe = lambda: f"reading {file}"
            recording = read_recording(file)
            if not summary:
                report = _play(context, recording, ranks, speed, progress, signals)
        if summary:
            _print_summary(context, summarize(recording))
            return
    except RecordingError as error:
        context.fail(str(error), FAILED)
    except StoreTimeoutError as error:
        context.fail(str(error), TIMED_OUT)
    except DistNetworkError as error:
        context.fail(str(error), UNREACHABLE)
    if context.output == "json":
        print_json(report)
    else:
        print_result(_describe(report))
    if signals:
        print_error("interrupted", 128 + signals[0], context.output)
        die_of(signals[0])
    if report.different:
        context.fail(f"{report.different} of {report.replies} replies differ; the first: {report.first}", FAILED)
    if report.broken:
        context.fail(f"{counted(report.broken, 'connection')} ended early; the first: {report.first}", FAILED)


def _play(
    context: ClientContext,
    recording: Recording,
    ranks: int | None,
    speed: float,
    progress: ProgressLine,
    signals: list[int],
) -> Report:
    """Play it; the signals that end it early are added to `signals`. Before it begins they end the process."""
    copies = 1 if ranks is None or not recording.connections else -(-ranks // max(1, recording.ranks))
    player = Player(recording, context.host, context.port, copies=copies, speed=speed, timeout=context.timeout)
    progress.describe = player.describe_progress
    reports: list[Report] = []

    def interrupt(number: int) -> None:
        signals.append(number)
        player.interrupt()

    def handle_signals() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup
                asyncio.get_running_loop().add_signal_handler(number, interrupt, number)

    async def main() -> None:
        reports.append(await player.play(handle_signals))

    run_loop(main())
    return reports[0]


def _describe(report: Report) -> str:
    job = "the job" if report.copies == 1 else f"{report.copies} copies of the job"
    lines = [
        f"{'interrupted while playing' if report.interrupted else 'played'} {job}: {counted(report.ranks, 'rank')}, "
        f"{counted(report.connections, 'connection')}, {counted(report.requests, 'request')} "
        f"in {report.seconds:.3f} s (recorded: {report.recorded_seconds:.3f} s)",
        f"{report.replies - report.different} of {report.replies} replies are as recorded",
    ]
    if report.opaque:
        lines.append(f"recorded in part, as not all could be decoded: {counted(report.opaque, 'connection')}")
    if not report.complete:
        lines.append("the end of the recording is missing: it was cut off")
    return "\n".join(lines)


def _print_summary(context: ClientContext, summary: Summary) -> None:
    if context.output == "json":
        print_json(summary)
        return
    values = "with values" if summary.values else "values hidden"
    end = "" if summary.complete else "; its end is missing"
    lines = [
        f"recorded {escape(summary.created)}: {counted(summary.ranks, 'rank')}, "
        f"{counted(summary.connections, 'connection')}, {counted(summary.requests, 'request')} "
        f"in {summary.seconds:.3f} s, {values}{end}",
        f"{'command':<12} {'requests':>10} {'ranks':>7} {'per rank':>13} {'bytes sent':>12} {'bytes of replies':>17}",
    ]
    for row in summary.commands:
        per_rank = f"{row.fewest}" if row.fewest == row.most else f"{row.fewest}–{row.most}"
        lines.append(
            f"{row.command:<12} {row.requests:>10,} {row.ranks:>7,} {per_rank:>13} "
            f"{row.request_bytes:>12,} {row.reply_bytes:>17,}"
        )
    print_result("\n".join(lines))
