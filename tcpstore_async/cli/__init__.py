"""The command line: options, output, exit codes. No logic of its own.

Exit status: 0 done, 1 failed, 2 usage, 3 timed out, 4 unreachable.
"""

import dataclasses
import math
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import DistError
from ..limits import Limits
from ..server.backends import BACKENDS, DEFAULT_BACKEND, DEFAULT_GRACE
from ..serving import build, run, run_loop, serve_owner
from .bench import bench
from .client import add_client_commands
from .commands import Program
from .output import is_closed, say_json
from .stdio import log_without_blocking, open_standard_streams

if TYPE_CHECKING:
    from ..server.base import Server


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="tcpstore_async")
def main() -> None:
    """The key-value store through which the ranks of a distributed job find each other.

    'tcpstore serve' runs a server; the other commands ask one, ours or PyTorch's, at --url or TCPSTORE_URL, by default
    tcp://127.0.0.1:29500.

    \b
      tcpstore serve &
      tcpstore set greeting hello
      tcpstore get greeting
      tcpstore wait ready --timeout 60

    Exit status: 0 done (for check: present), 1 failed (for check: absent), 2 usage, 3 timed out, 4 unreachable. Ctrl-C
    ends a command by the signal, which a shell shows as 130.
    """
    open_standard_streams()


def _limits(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> Limits:
    """The limits that `--limit NAME=NUMBER` options ask for."""
    names = [field.name for field in dataclasses.fields(Limits)]
    chosen = {}
    for text in given:
        name, _, number = text.partition("=")
        if name not in names:
            raise click.BadParameter(f"there is no limit {name!r}; there are {', '.join(names)}", ctx, param)
        if not (number.isdecimal() and len(number) < 19):
            raise click.BadParameter(
                f"{number!r} is not a number: write {name}=NUMBER, with a number below 10**18", ctx, param
            )
        chosen[name] = int(number)
    try:
        return Limits(**chosen)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


@main.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on, exactly; '::' for all.")
@click.option(
    "--port", default=29500, show_default=True, type=click.IntRange(0, 65535), help="Port; 0 lets the kernel choose."
)
@click.option(
    "--backend",
    default=DEFAULT_BACKEND,
    show_default=True,
    type=click.Choice(BACKENDS),
    help="uv is driven by events; threaded, the legacy one, has a thread for each connection.",
)
@click.option("--listen-fd", type=click.IntRange(0), help="Listen on this inherited socket instead of an address.")
@click.option(
    "--port-file", type=click.Path(dir_okay=False, path_type=Path), help="Write the port here, when it is known."
)
@click.option(
    "--grace",
    default=DEFAULT_GRACE,
    show_default=True,
    type=click.FloatRange(0, 1e9),
    help="Seconds that connections get to end after SIGTERM, or after the owner's stop.",
)
@click.option(
    "--owner-pid",
    type=click.IntRange(1),
    metavar="PID",
    help="Belong to the process that starts this one, and end with it. TCPStore(is_master=True) starts its server so; "
    "by hand it is of no use. Needs --listen-fd and --control-fd.",
)
@click.option(
    "--control-fd",
    type=click.IntRange(0),
    metavar="FD",
    help="Inherited socket over which the owner says 'stop', instead of signals, and is told 'ready'.",
)
@click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="NAME=NUMBER",
    callback=_limits,
    help="Change a limit, such as budget_bytes=1000000000. May be repeated.",
)
def serve(
    host: str,
    port: int,
    backend: str,
    listen_fd: int | None,
    port_file: Path | None,
    grace: float,
    owner_pid: int | None,
    control_fd: int | None,
    limits: Limits,
) -> None:
    """Run a server in the foreground.

    Prints one line of JSON when it accepts connections. SIGTERM drains, SIGINT stops.

    With --owner-pid it is another process's server: it prints nothing, ignores both signals, and ends when that
    process says so over --control-fd, closes it, or dies.
    """
    if math.isnan(grace):
        raise click.BadParameter("must be a number of seconds", param_hint="'--grace'")
    if owner_pid is not None or control_fd is not None:
        if owner_pid is None or control_fd is None or listen_fd is None:
            raise click.UsageError("--owner-pid and --control-fd go together, and with --listen-fd.")
        if port_file is not None:
            raise click.UsageError("--port-file is of no use to an owner, who knows the port.")
    log_without_blocking()

    def ready(server: "Server") -> None:
        if port_file is not None:
            _write_atomically(port_file, f"{server.port}\n")
        event = {"event": "ready", "host": server.host, "port": server.port, "pid": os.getpid()}
        if not is_closed():
            say_json({**event, "backend": backend, "build": build()})

    try:
        if owner_pid is not None and control_fd is not None and listen_fd is not None:
            serve_owner(listen_fd, owner_pid, control_fd, backend=backend, limits=limits, grace=grace)
            return
        run_loop(run(host, port, listen_fd, backend=backend, limits=limits, grace=grace, ready=ready))
    except DistError as error:
        raise click.ClickException(str(error)) from None


add_client_commands(main)
main.add_command(bench)


def _write_atomically(path: Path, text: str) -> None:
    """Through a new file beside it, whose name nobody can foresee: what lies there under any name is never written."""
    temporary = path.with_name(f".tcpstore-{secrets.token_hex(8)}")
    try:
        with open(temporary, "x") as file:
            try:
                file.write(text)
                file.close()
                temporary.replace(path)
            except BaseException:
                temporary.unlink()
                raise
    except OSError as error:
        raise click.ClickException(f"cannot write the port to {path}: {error.strerror}") from None
