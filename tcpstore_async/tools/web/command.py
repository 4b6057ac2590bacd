"""`tcpstore http`: options, output and exit status. Must not know what is answered over HTTP."""

from pathlib import Path

import click

from ...base.errors import DistError
from ...cli.context import parse_one_url, url_option
from ...cli.listen import (
    Where,
    announce_ready,
    log_format_option,
    log_level_option,
    owner_fd_option,
    parse_address,
)
from ...cli.stdio import fail, log_without_blocking
from ...client.server_url import ServerUrl
from ...server.listen_socket import adopt, listen
from ..look.asking import admin_option, find_admin


@click.command("http")
@click.option(
    "--listen",
    "where",
    default="127.0.0.1:9400",
    show_default=True,
    metavar="HOST:PORT",
    callback=parse_address,
    help="Address to listen on; port 0 lets the kernel choose one.",
)
@admin_option
@url_option("Address of the server, on this machine.", parse_one_url)
@click.option(
    "--same-user",
    is_flag=True,
    help="Show keys, hosts and ranks only to processes of this user, or of root, on this host. Linux only.",
)
@log_format_option
@log_level_option
@click.option("--listen-fd", type=click.IntRange(0), metavar="FD", help="Listen on this inherited socket.", hidden=True)
@click.option("--name", default="", help="The host name that the socket of --listen-fd was bound to.", hidden=True)
@owner_fd_option
def http_command(
    where: Where,
    admin: Path | None,
    url: ServerUrl,
    same_user: bool,
    log_format: str,
    log_level: str,
    listen_fd: int | None,
    name: str,
    owner_fd: int | None,
) -> None:
    """Serve a status page, metrics and health checks over HTTP for a server on this machine.

    'tcpstore serve --http HOST:PORT' does the same for the server that it starts. This command is for a
    server that is already running, such as that of TCPStore(is_master=True); run it as the same user.

    / is the page, /metrics is for Prometheus, /livez and /readyz are for supervisors. Prints one line of JSON once it
    is ready to accept requests. Exits on SIGTERM and SIGINT.
    """
    from .running import run  # not at the top: other commands must start fast

    log_without_blocking(log_format, log_level)

    def announce() -> None:
        if owner_fd is None:
            host, port = listener.getsockname()[:2]
            announce_ready(None, host, port, "http")

    try:
        listener = listen(where.host, where.port) if listen_fd is None else adopt(listen_fd)
        run(
            listener,
            lambda: admin or find_admin(url.host, url.port),
            name=where.host if listen_fd is None else name,
            same_user=same_user,
            owner_fd=owner_fd,
            ready=announce,
        )
    except DistError as error:
        fail(error, log_format)
