"""`tcpstore relay`: options, output and exit status. Must not know how a relay works."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..auth.secret_files import TlsFiles
from ..base.errors import AccessDeniedError, DistError
from ..client.credentials import find_token, read_token
from ..client.server_url import ServerUrl
from ..client.store_name import StoreName
from ..client.tls_settings import wants_tls
from ..serving import build, run_loop
from .context import FAILED, NOT_ALLOWED, parse_store, parse_url, tls_client_options, token_file_option
from .listen import (
    announce_ready,
    grace_option,
    listen_options,
    log_format_option,
    log_level_option,
    owner_fd_option,
)
from .stdio import fail, log_without_blocking

if TYPE_CHECKING:
    from ..relay.core import Relay


@click.command("relay")
@click.option(
    "--upstream",
    required=True,
    metavar="URL[,URL...]",
    callback=parse_url,
    help="Address of the server, tcps://HOST:PORT for TLS; if several are given, the one that serves is used.",
)
@tls_client_options
@listen_options
@log_format_option
@log_level_option
@grace_option
@token_file_option
@click.option(
    "--store",
    default="",
    metavar="NAME",
    callback=parse_store,
    help="Have the ranks use this named store, which must exist.",
)
@click.option(
    "--same-user",
    is_flag=True,
    help="Reject connections from other users' processes and from other hosts. Linux only.",
)
@owner_fd_option
def relay_command(
    upstream: ServerUrl,
    host: str,
    port: int,
    listen_fd: int | None,
    port_file: Path | None,
    log_format: str,
    log_level: str,
    grace: float,
    store: str,
    same_user: bool,
    token_file: str | None,
    owner_fd: int | None,
    tls_ca: str,
    tls_cert: str,
    tls_key: str,
) -> None:
    """Serve the ranks of this host over one connection to the server.

    Ranks connect here as to any server. All of them share one connection to the server at --upstream, a link, which
    may break and be resumed without the ranks noticing; the relay itself keeps no keys. In front of a server that does
    not support links, such as PyTorch's, each rank gets a connection of its own.

    The relay may start before its server: ranks wait until it can be reached. After 30 seconds, the relay closes a
    waiting rank's connection, and the rank retries until its own timeout. If the relay loses its connection for longer
    than the server keeps the link, or if the server restarts, the ranks' connections are closed.

    If the server refuses the relay's token at startup, or if the server and the relay do not agree on whether to use
    TLS, or either rejects the other's certificate, the relay exits with status 5. If that happens later, for example
    because the token was revoked, ranks that use this package's client get an error with the reason, and the
    connections of other ranks are closed; the relay keeps trying, and rereads its files each time.

    Prints one line of JSON once it is ready to accept connections. On SIGTERM, open connections get up to --grace
    seconds to finish; SIGINT stops at once.
    """
    from ..relay.running import run  # not at the top: other commands must start fast

    log_without_blocking(log_format, log_level)
    tls = wants_tls(upstream.tls or None)
    files = TlsFiles(tls_ca, tls_cert, tls_key) if tls else None

    def announce(relay: "Relay") -> None:
        url = str(upstream._replace(tls=tls))
        announce_ready(port_file, relay.host, relay.port, "relay", upstream=url, build=build())

    try:
        token = find_token if token_file is None else partial(read_token, token_file)
        token()  # report a missing file at once; it is read again for every connection
        run_loop(
            run(
                upstream.all(),
                host,
                port,
                listen_fd,
                grace=grace,
                same_user=same_user,
                owner_fd=owner_fd,
                token=token,
                tls=files,
                store=StoreName(store) if store else None,
                ready=announce,
            )
        )
    except DistError as error:
        refused = isinstance(error, AccessDeniedError) and error.final
        fail(error, log_format, NOT_ALLOWED if refused else FAILED)
