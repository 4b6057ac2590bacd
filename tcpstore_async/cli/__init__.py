"""The command line: options, output and exit status, without logic of its own.

Exit status: 0 success, 1 failure, 2 usage error, 3 timeout, 4 server unreachable.
"""

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import DistError
from ..limits import Limits
from ..server.backends import BACKENDS, DEFAULT_BACKEND
from ..serving import build, run, run_loop, serve_owner
from .bench import bench
from .client import add_client_commands
from .commands import Program
from .listen import grace_option, link_grace_option, listen_options, write_atomically
from .output import print_json, stdout_is_closed
from .record import record_command, replay
from .relay import relay_command
from .stdio import log_without_blocking, open_standard_streams

if TYPE_CHECKING:
    from ..server.base import Server


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="tcpstore_async")
def main() -> None:
    """Key-value store for distributed jobs, compatible with PyTorch's TCPStore.

    'tcpstore serve' runs a server. The other commands connect to a running server, ours or PyTorch's, at the address
    given by --url or TCPSTORE_URL.

    \b
      tcpstore serve &
      tcpstore set greeting hello
      tcpstore get greeting
      tcpstore wait ready --timeout 60

    Exit status: 0 success, 1 failure (check: a key is missing; delete: the key did not exist), 2 usage error,
    3 timeout, 4 server unreachable; 130 in a shell after Ctrl-C.
    """
    open_standard_streams()


_LIMITS = [field.name for field in dataclasses.fields(Limits)]


def _parse_limits(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> Limits:
    """Return the limits that `--limit NAME=NUMBER` options ask for."""
    chosen = {}
    for text in given:
        name, _, number = text.partition("=")
        if name not in _LIMITS:
            raise click.BadParameter(f"unknown limit {name!r}; choose from {', '.join(_LIMITS)}", ctx, param)
        if not (number.isdecimal() and len(number) < 19):
            raise click.BadParameter(f"{text!r} is not of the form NAME=NUMBER, with NUMBER below 10**18", ctx, param)
        chosen[name] = int(number)
    try:
        return Limits(**chosen)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


@main.command()
@listen_options
@click.option(
    "--backend",
    default=DEFAULT_BACKEND,
    show_default=True,
    type=click.Choice(BACKENDS),
    help="'uv' is event-driven; 'threaded', the legacy one, uses a thread per connection.",
)
@grace_option
@link_grace_option
@click.option(
    "--owner-pid",
    type=click.IntRange(1),
    metavar="PID",
    help="Exit when this parent process exits (internal). Needs --listen-fd and --control-fd.",
)
@click.option(
    "--control-fd",
    type=click.IntRange(0),
    metavar="FD",
    help="Inherited socket to the parent process (internal).",
)
@click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="NAME=NUMBER",
    callback=_parse_limits,
    help=f"Set a limit: NAME is one of {', '.join(_LIMITS)}. May be repeated.",
)
def serve(
    host: str,
    port: int,
    backend: str,
    listen_fd: int | None,
    port_file: Path | None,
    grace: float,
    link_grace: float,
    owner_pid: int | None,
    control_fd: int | None,
    limits: Limits,
) -> None:
    """Run a server in the foreground.

    Prints one line of JSON once it accepts connections. On SIGTERM, open connections get up to --grace seconds to
    finish; SIGINT stops at once.
    """
    if owner_pid is not None or control_fd is not None:
        if owner_pid is None or control_fd is None or listen_fd is None:
            raise click.UsageError("--owner-pid, --control-fd and --listen-fd must be given together.")
        if port_file is not None:
            raise click.UsageError("--port-file cannot be used with --owner-pid.")
    log_without_blocking()

    def announce(server: "Server") -> None:
        if port_file is not None:
            write_atomically(port_file, f"{server.port}\n")
        event = {"event": "ready", "host": server.host, "port": server.port, "pid": os.getpid()}
        if not stdout_is_closed():
            print_json({**event, "backend": backend, "build": build()})

    try:
        if owner_pid is not None and control_fd is not None and listen_fd is not None:
            serve_owner(listen_fd, owner_pid, control_fd, backend=backend, limits=limits, grace=grace)
            return
        running = run(
            host, port, listen_fd, backend=backend, limits=limits, grace=grace, link_grace=link_grace, ready=announce
        )
        run_loop(running)
    except DistError as error:
        raise click.ClickException(str(error)) from None


add_client_commands(main)
for _command in (bench, record_command, relay_command, replay):
    main.add_command(_command)
