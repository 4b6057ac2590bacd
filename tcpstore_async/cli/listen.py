"""What commands that listen have in common: options, and the announcement that they are ready."""

import os
import secrets
from pathlib import Path
from typing import Final, NamedTuple

import click

from ..base.limits import DEFAULT_GRACE, LINK_GRACE
from .options import Decorator, Seconds, add_options
from .output import print_json, stdout_is_closed
from .stdio import INFO, LOG_FORMATS, LOG_LEVELS, TEXT

LINGER: Final = 60.0
"""Seconds of `--linger` without a number: a job that restarts is back by then."""

listen_options: Final = add_options(
    click.option(
        "--host", default="127.0.0.1", show_default=True, help="Address to listen on; '::' for all, IPv4 included."
    ),
    click.option(
        "--port",
        default=29500,
        show_default=True,
        type=click.IntRange(0, 65535),
        help="Port; 0 lets the kernel choose one.",
    ),
    click.option("--listen-fd", type=click.IntRange(0), metavar="FD", help="Listen on this inherited socket instead."),
    click.option(
        "--port-file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Write the port to this file once listening.",
    ),
)

tls_server_options: Final = add_options(
    click.option(
        "--tls-cert",
        metavar="FILE",
        help="Serve TLS 1.3 alongside plain connections, with this certificate (PEM, with its chain).",
    ),
    click.option("--tls-key", metavar="FILE", help="The private key of --tls-cert (PEM, not encrypted)."),
    click.option(
        "--tls-ca", metavar="FILE", help="Require every TLS peer to present a certificate from one of these CAs (PEM)."
    ),
)

owner_fd_option: Final = click.option(
    "--owner-fd",
    type=click.IntRange(0),
    metavar="FD",
    help="Ignore signals, and exit when the other end of this pipe or socket is closed.",
    hidden=True,
)


def _seconds_option(name: str, default: float, text: str) -> Decorator:
    return click.option(name, default=default, show_default=True, type=Seconds(0, 1e9), help=text)


grace_option = _seconds_option("--grace", DEFAULT_GRACE, "Seconds that open connections get to finish after SIGTERM.")
link_grace_option = _seconds_option(
    "--link-grace",
    LINK_GRACE,
    "Seconds to keep the sessions of a link, such as a relay's, after its connection breaks.",
)


log_format_option = click.option(
    "--log-format",
    type=click.Choice(LOG_FORMATS),
    default=TEXT,
    show_default=True,
    help="Format of the log on standard error; 'json' is one object per line.",
)
log_level_option = click.option(
    "--log-level",
    type=click.Choice(LOG_LEVELS, case_sensitive=False),
    default=INFO,
    show_default=True,
    help="Log what is at least this important.",
)
linger_option = click.option(
    "--linger",
    is_flag=False,
    flag_value=LINGER,
    type=Seconds(0, 1e9),
    metavar="[SECONDS]",
    help="Once a client has written a key, exit when no client has been connected for this many seconds.  "
    f"[default without a number: {LINGER:g}]",
)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file as a whole.

    The temporary file has an unpredictable name and is created exclusively, so no existing file or link is written to.
    """
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


def announce_ready(port_file: Path | None, host: str, port: int, role: str, **more: object) -> None:
    """Write the port to the file of --port-file, if given, and print one line of JSON: connections are accepted.

    `role` is empty for a server. Raises ClickException.
    """
    if port_file is not None:
        write_atomically(port_file, f"{port}\n")
    if not stdout_is_closed():
        what = {"role": role} if role else {}
        print_json({"event": "ready", **what, "host": host, "port": port, "pid": os.getpid(), **more})


class Where(NamedTuple):
    """An address to listen on."""

    host: str
    port: int


def parse_address(ctx: click.Context, param: click.Parameter, text: str | None) -> Where | None:
    """Return the address of an option HOST:PORT. Raises BadParameter."""
    if text is None:
        return None
    host, separator, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host if ":" not in host else ""
    if not separator or not host or not (port.isascii() and port.isdecimal() and len(port) < 6 and int(port) < 65536):
        raise click.BadParameter(f"{text!r} is not of the form HOST:PORT, such as 127.0.0.1:9400", ctx, param)
    return Where(host, int(port))
