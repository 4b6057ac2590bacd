"""`tcpstore relay`: options, output and exit status.

This module does not know how a relay works.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import DistError
from ..serving import build, run_loop
from .client import parse_url
from .listen import grace_option, listen_options, write_atomically
from .output import print_json, stdout_is_closed
from .stdio import log_without_blocking

if TYPE_CHECKING:
    from ..relay.core import Relay


def _parse_urls(ctx: click.Context, param: click.Parameter, text: str) -> list[tuple[str, int]]:
    return [parse_url(ctx, param, url.strip()) for url in text.split(",")]


@click.command("relay")
@click.option(
    "--upstream",
    required=True,
    metavar="URL[,URL...]",
    callback=_parse_urls,
    help="Address of the server; if several are given, the first reachable one is used.",
)
@listen_options
@grace_option
@click.option(
    "--owner-fd",
    type=click.IntRange(0),
    metavar="FD",
    help="Ignore signals, and exit when the other end of this pipe or socket is closed (internal).",
)
def relay_command(
    upstream: list[tuple[str, int]],
    host: str,
    port: int,
    listen_fd: int | None,
    port_file: Path | None,
    grace: float,
    owner_fd: int | None,
) -> None:
    """Serve the ranks of this host over one connection to the server.

    Ranks connect here as to any server. All of them share one connection to the server at --upstream, a link, which
    may break and be resumed without their noticing; the relay itself keeps no keys. In front of a server that does
    not support links, such as PyTorch's, each rank gets a connection of its own.

    The relay may start before its server: ranks wait until it can be reached. After 30 seconds, the relay closes a
    waiting rank's connection, and the rank retries until its own timeout. If the relay loses its connection for longer
    than the server keeps the link, or if the server restarts, the ranks' connections are closed.

    Prints one line of JSON once it accepts connections. On SIGTERM, open connections get up to --grace seconds to
    finish; SIGINT stops at once.
    """
    from ..relay.running import run  # not for the other commands, which have to start fast

    log_without_blocking()

    def announce(relay: "Relay") -> None:
        if port_file is not None:
            write_atomically(port_file, f"{relay.port}\n")
        event = {"event": "ready", "role": "relay", "host": relay.host, "port": relay.port, "pid": os.getpid()}
        servers = [f"tcp://{f'[{name}]' if ':' in name else name}:{number}" for name, number in upstream]
        if not stdout_is_closed():
            print_json({**event, "upstream": ",".join(servers), "build": build()})

    try:
        run_loop(run(upstream, host, port, listen_fd, grace=grace, owner_fd=owner_fd, ready=announce))
    except DistError as error:
        raise click.ClickException(str(error)) from None
