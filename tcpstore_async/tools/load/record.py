"""`tcpstore record` and `tcpstore replay`: options, output and exit status.

Must not know how traffic is decoded, written or played.
"""

import asyncio
import math
import signal
from pathlib import Path
from typing import Any

import click

from ...auth.secret_files import TlsFiles
from ...base.errors import DistError, counted
from ...base.interrupts import die_of
from ...cli.context import (
    FAILED,
    ClientContext,
    client_command,
    exit_status,
    keys_store_option,
    parse_one_url,
    tls_client_options,
)
from ...cli.listen import announce_ready, listen_options
from ...cli.output import ProgressLine, escape, print_error, print_json, print_result
from ...cli.stdio import log_without_blocking
from ...client.server_url import ServerUrl
from ...client.tls_settings import wants_tls
from ...serving import run_loop
from .player import Player, Report
from .recorder import record
from .recording import Recording, RecordingError, read_recording
from .summary import Summary, summarize


@click.command("record")
@click.option(
    "--upstream",
    required=True,
    metavar="URL",
    callback=parse_one_url,
    help="Address of the server; tcps://HOST:PORT for TLS.",
)
@tls_client_options
@click.option(
    "-w",
    "--write",
    "path",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write; an existing one is replaced once the recorder has started. Compressed if its name ends in "
    "'.gz'.",
)
@click.option(
    "--values",
    is_flag=True,
    help="Also record the contents of values, not just their sizes. Gloo's values contain addresses; INTRODUCE, which "
    "our clients send, contains the host name and process id.",
)
@listen_options
def record_command(
    upstream: ServerUrl,
    tls_ca: str,
    tls_cert: str,
    tls_key: str,
    path: Path,
    values: bool,
    host: str,
    port: int,
    listen_fd: int | None,
    port_file: Path | None,
) -> None:
    """Forward connections to a server and record their requests.

    A job that connects here instead of to the server at --upstream, ours or PyTorch's, runs as before. The file
    records the time, command, keys and sizes of every request and reply, the numbers added, and which values are
    equal, but no values unless --values is given. Play it back with 'tcpstore replay'.

    The server should be empty at the start of a recording, and of a replay.

    Prints one line of JSON once it is ready to accept connections. On SIGTERM or SIGINT, closes the remaining
    connections and exits, so stop it after the job has ended. The file remains readable even if the recorder is killed.
    """
    log_without_blocking()

    def announce(host: str, port: int) -> None:
        announce_ready(port_file, host, port, "recorder", file=str(path), values=values)

    done: list[Any] = []

    async def main() -> None:
        files = TlsFiles(tls_ca, tls_cert, tls_key) if wants_tls(upstream.tls or None) else None
        where = upstream.host, upstream.port
        done.append(
            await record(where, path, host=host, port=port, fd=listen_fd, values=values, tls=files, ready=announce)
        )

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
        raise click.BadParameter(f"must be a finite number, 0 or greater, not {number}", ctx, param)
    return number


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--ranks",
    type=click.IntRange(1, 1_000_000),
    default=None,
    metavar="N",
    help="Play as many copies of the job as it takes to reach N ranks.  [default: one copy]",
)
@click.option(
    "--speed",
    type=float,
    default=1.0,
    show_default=True,
    callback=_speed,
    help="Speed relative to the recording; 0 for no pauses.",
)
@click.option("--summary", is_flag=True, help="Print a summary of the recording instead of replaying it.")
@keys_store_option
@client_command
def replay(context: ClientContext, file: Path, ranks: int | None, speed: float, summary: bool) -> None:
    """Replay a recording against a server and compare the replies.

    Reopens every recorded connection and sends the same requests at the recorded times. A request that depended on
    requests from other ranks is sent after them. Values that were not recorded are replaced by others of the same
    length. Compares the numeric values, types and lengths of replies, and their contents if those were recorded. Use an
    empty server.

    --ranks does not make the job larger: with --ranks 20, three copies of a job of 8 ranks are played at once. The
    first copy uses the recorded keys, and each of the others adds a prefix of its own. Each recorded process counts as
    a rank.

    With a token, TLS or --store, the connections are made through a relay that is started for them.

    The replay fails after --timeout seconds without progress. Ctrl-C stops it and prints the results so far.

    Exit status: 0 all replies match the recording, 1 some differ or the recording cannot be played, 2 usage error, 3
    timeout, 4 server unreachable, 5 not allowed.
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
    except DistError as error:
        context.fail(str(error), exit_status(error))
    if context.output == "json":
        print_json(report)
    else:
        print_result(_describe(report))
    if signals:
        print_error("interrupted", 128 + signals[0], context.output)
        die_of(signals[0])
    if report.different:
        verb = "differs" if report.different == 1 else "differ"
        replies = counted(report.replies, "reply", "replies")
        context.fail(f"{report.different} of {replies} {verb}; first: {report.first}", FAILED)
    if report.broken:
        context.fail(f"{counted(report.broken, 'connection')} ended early; first: {report.first}", FAILED)


def _play(
    context: ClientContext,
    recording: Recording,
    ranks: int | None,
    speed: float,
    progress: ProgressLine,
    signals: list[int],
) -> Report:
    """Play a recording; append the signals that end it early to `signals`. Before its start, they end the process."""
    copies = 1 if ranks is None or not recording.connections else -(-ranks // max(1, recording.ranks))
    reports: list[Report] = []

    def interrupt(number: int) -> None:
        signals.append(number)
        player.interrupt()

    def begin() -> None:
        if player.keys_before and context.output != "json":  # the report has it too
            click.echo(
                f"Warning: the server already has {counted(player.keys_before, 'key')}, so replies may differ from the "
                "recording; use an empty server, such as a new `tcpstore serve`",
                err=True,
            )
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup
                asyncio.get_running_loop().add_signal_handler(number, interrupt, number)

    async def main() -> None:
        reports.append(await player.play(begin))

    with context.plain_address() as (host, port):
        player = Player(recording, host, port, copies=copies, speed=speed, timeout=context.timeout)
        progress.describe = player.describe_progress
        run_loop(main())
    return reports[0]


def _describe(report: Report) -> str:
    job = "the job" if report.copies == 1 else f"{report.copies} copies of the job"
    lines = [
        f"{'interrupted while playing' if report.interrupted else 'played'} {job}: {counted(report.ranks, 'rank')}, "
        f"{counted(report.connections, 'connection')}, {counted(report.requests, 'request')} "
        f"in {report.seconds:.3f} s (recorded: {report.recorded_seconds:.3f} s)",
        f"replies that match the recording: {report.replies - report.different} of {report.replies}",
    ]
    if report.opaque:
        lines.append(f"recorded only in part, because of undecodable traffic: {counted(report.opaque, 'connection')}")
    if not report.complete:
        lines.append("the recording is truncated")
    return "\n".join(lines)


def _print_summary(context: ClientContext, summary: Summary) -> None:
    if context.output == "json":
        print_json(summary)
        return
    values = "with values" if summary.values else "values hidden"
    end = "" if summary.complete else "; truncated"
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
