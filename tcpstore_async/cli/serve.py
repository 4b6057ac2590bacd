"""`tcpstore serve`: options, output and exit status."""

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..auth.tokens import TokenFiles
from ..base.errors import DistError
from ..base.limits import Limits
from ..client.admin import ask
from ..log.encoding import JournalError
from ..server import admin_path
from ..server.backends import BACKENDS, DEFAULT_BACKEND
from ..server.handover import SECONDS, receive
from ..server.http_process import listen_for_http
from ..server.listen_socket import DEFER_ACCEPT
from ..server.store_ports import ANY, NONE
from ..serving import PROCESS, SYNCS, JournalLost, build, run, run_loop, serve_owner
from ..session.auth import ALL, REMOTE
from ..session.identity import THREADED
from .etcd import etcd_options, parse_etcd, to_etcd
from .listen import (
    Where,
    announce_ready,
    grace_option,
    linger_option,
    link_grace_option,
    listen_options,
    log_format_option,
    log_level_option,
    parse_address,
    tls_server_options,
)
from .stdio import fail, log_without_blocking

if TYPE_CHECKING:
    from ..server.base import Server
    from ..server.http_process import HttpOptions

_LIMITS = [field.name for field in dataclasses.fields(Limits)]


def _parse_limits(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> Limits:
    """Return the limits set by `--limit NAME=NUMBER` options."""
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


def _parse_ports(ctx: click.Context, param: click.Parameter, text: str) -> range:
    """Return the ports given as `any`, `0` or `FIRST-LAST`."""
    if text in ("any", "0"):
        return ANY if text == "any" else NONE
    first, _, last = text.partition("-")
    if first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) <= 65535:
        return range(int(first), int(last) + 1)
    raise click.BadParameter(f"{text!r} is not of the form FIRST-LAST, any or 0", ctx, param)


@click.command()
@listen_options
@click.option(
    "--backend",
    default=DEFAULT_BACKEND,
    show_default=True,
    type=click.Choice(BACKENDS),
    help="'uv' is event-driven; 'threaded', the legacy one, uses a thread per connection.",
)
@click.option(
    "--defer-accept",
    default=DEFER_ACCEPT,
    show_default=True,
    type=click.IntRange(0, 60),
    metavar="SECONDS",
    help="Have the kernel hold a connection until its client has sent something, or for this many seconds; 0: not at "
    "all. Sockets from --listen-fd or systemd are left as they are.",
)
@grace_option
@link_grace_option
@linger_option
@log_format_option
@log_level_option
@tls_server_options
@click.option(
    "--token-keys",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Accept tokens signed by a key in this file: one id:secret per line. Reloaded on SIGHUP.",
)
@click.option(
    "--revoked-tokens",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Refuse tokens whose ids are in this file, one per line. Reloaded on SIGHUP.",
)
@click.option(
    "--require-auth",
    is_flag=False,
    flag_value=REMOTE,
    default="",
    type=click.Choice(["", REMOTE, ALL]),
    metavar="[=all]",
    help="Refuse connections without a token, except those from this host's loopback addresses; '=all' refuses those "
    "too.",
)
@click.option(
    "--require-tls",
    is_flag=True,
    help="Refuse connections without TLS, those from this host included. Stock PyTorch clients then need a relay.",
)
@click.option(
    "--store-ports",
    default="any",
    show_default=True,
    metavar="RANGE",
    callback=_parse_ports,
    help="Ports for named stores that stock PyTorch clients use: FIRST-LAST, any free ones, or 0 for none. A server "
    "with TLS or tokens has none.",
)
@click.option(
    "--persist",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep the stores in this directory, and continue with those that are there: ranks behind relays, and clients "
    "of this package, only notice a pause. On SIGTERM the server leaves them to the next one; SIGINT and --linger "
    "remove them.",
)
@click.option(
    "--sync",
    default=PROCESS,
    show_default=True,
    type=click.Choice(SYNCS),
    help="What the stores survive with --persist: the end of the server's process, or always, the machine's too: then "
    "nothing is answered before it is on the disk.",
)
@click.option(
    "--replace",
    is_flag=True,
    help="Take over from the server that runs with the same --persist and --port: its stores, and its listening "
    "socket, so that no client is refused meanwhile. Without such a server, start as usual.",
)
@click.option(
    "--etcd",
    metavar="URL[,URL…]",
    callback=parse_etcd,
    help="Keep the stores in etcd, together with other servers that have the same --etcd: one serves, and when it, or "
    "its host, dies, another one goes on. Ranks behind relays, and clients of this package, only notice a pause. Needs "
    "pip install 'tcpstore-async[etcd]'.",
)
@click.option("--store-name", metavar="NAME", help="Name of these stores in that etcd.  [default: default]")
@etcd_options
@click.option(
    "--admin",
    metavar="PATH",
    help="Path of the admin socket, which 'tcpstore who' and other commands use; '' for none.  [default: a file named "
    "after the port, in a directory that only this user can access]",
)
@click.option(
    "--http",
    metavar="HOST:PORT",
    callback=parse_address,
    help="Serve a status page (/), /metrics, /livez and /readyz over HTTP, from a separate process.",
)
@click.option(
    "--owner-pid",
    type=click.IntRange(1),
    metavar="PID",
    help="Exit when this parent process exits. Needs --listen-fd and --control-fd.",
    hidden=True,
)
@click.option(
    "--control-fd",
    type=click.IntRange(0),
    metavar="FD",
    help="Inherited socket to the parent process.",
    hidden=True,
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
    defer_accept: int,
    listen_fd: int | None,
    port_file: Path | None,
    grace: float,
    link_grace: float,
    store_ports: range,
    persist: Path | None,
    sync: str,
    replace: bool,
    etcd: list[str],
    store_name: str | None,
    etcd_ca: str | None,
    etcd_cert: str | None,
    etcd_key: str | None,
    etcd_user: str | None,
    admin: str | None,
    http: Where | None,
    linger: float | None,
    log_format: str,
    log_level: str,
    token_keys: Path | None,
    revoked_tokens: Path | None,
    require_auth: str,
    require_tls: bool,
    tls_cert: str | None,
    tls_key: str | None,
    tls_ca: str | None,
    owner_pid: int | None,
    control_fd: int | None,
    limits: Limits,
) -> None:
    """Run a server in the foreground.

    Prints one line of JSON once it is ready to accept connections. On SIGTERM, open connections get up to --grace
    seconds to finish; SIGINT stops at once. With --linger, the server exits once its job has ended.

    On SIGHUP, the server reloads the files given by --tls-cert, --tls-key, --tls-ca, --token-keys and --revoked-tokens.
    They apply to new connections; connections whose tokens are no longer valid are closed. SIGHUP never stops a server.

    Under systemd, the server listens on the socket of its socket unit, if it has one, and reports when it is ready.
    """
    if backend == THREADED:
        source = click.get_current_context().get_parameter_source
        others = (
            *("tls_cert", "tls_key", "tls_ca", "require_tls", "token_keys", "revoked_tokens", "require_auth"),
            "link_grace",
            "persist",
            "etcd",
        )
        given = [f"--{name.replace('_', '-')}" for name in others if source(name) != click.core.ParameterSource.DEFAULT]
        if given:
            raise click.UsageError(
                f"--backend threaded has no TLS, tokens, links or journal: leave out {', '.join(given)}."
            )
    if bool(tls_cert) != bool(tls_key) or (tls_ca and not tls_cert):
        raise click.UsageError("--tls-cert and --tls-key must be given together, and --tls-ca needs both.")
    if sync != PROCESS and persist is None:
        raise click.UsageError("--sync needs --persist.")
    if persist is not None and not str(persist).strip("."):
        raise click.UsageError("--persist needs the path of a directory of its own.")
    if persist is not None and owner_pid is not None:
        raise click.UsageError("--persist cannot be used with --owner-pid.")
    if replace and persist is None:
        raise click.UsageError("--replace needs --persist.")
    if replace and (listen_fd is not None or admin == ""):
        raise click.UsageError("--replace needs the admin socket, and cannot be used with --listen-fd.")
    replicated = to_etcd(etcd, store_name, etcd_ca, etcd_cert, etcd_key, etcd_user)
    if etcd and (persist is not None or owner_pid is not None):
        raise click.UsageError("--etcd cannot be used with --persist or --owner-pid.")
    if require_tls and not tls_cert:
        raise click.UsageError("--require-tls needs --tls-cert and --tls-key.")
    if token_keys is None and revoked_tokens is not None:
        raise click.UsageError("--revoked-tokens needs --token-keys.")
    if require_auth and token_keys is None and tls_ca is None:
        raise click.UsageError("--require-auth needs --token-keys or --tls-ca.")
    if token_keys is not None and owner_pid is not None:
        raise click.UsageError("--token-keys cannot be used with --owner-pid.")
    if owner_pid is not None or control_fd is not None:
        if owner_pid is None or control_fd is None or listen_fd is None:
            raise click.UsageError("--owner-pid, --control-fd and --listen-fd must be given together.")
        if port_file is not None:
            raise click.UsageError("--port-file cannot be used with --owner-pid.")
        if linger is not None:
            raise click.UsageError("--linger cannot be used with --owner-pid.")
        if http is not None:
            raise click.UsageError("--http cannot be used with --owner-pid: use 'tcpstore http'.")
    if http is not None and admin == "":
        raise click.UsageError("--http needs the admin socket.")
    log_without_blocking(log_format, log_level)
    tokens = None
    try:
        if token_keys is not None:
            tokens = TokenFiles(token_keys, revoked_tokens)
    except OSError as error:
        raise click.ClickException(f"cannot read {error.filename}: {error.strerror}") from None
    except ValueError as error:
        raise click.ClickException(str(error)) from None

    page: HttpOptions | None = None

    def announce(server: "Server", role: str = "") -> None:
        more: dict[str, object] = {} if server.tls is None else {"tls": True}
        more.update({"admin": server.admin} if server.admin else {})
        more.update({} if page is None else {"http": page.url})
        more.update({} if persist is None else {"persist": str(persist)})
        replica = server.facts()
        more.update({name: replica[name] for name in ("epoch", "serves") if name in replica})
        announce_ready(port_file, server.host, server.port, role, backend=backend, build=build(), **more)

    try:
        if owner_pid is not None and control_fd is not None and listen_fd is not None:
            serve_owner(listen_fd, owner_pid, control_fd, backend=backend, limits=limits, grace=grace)
            return
        if replace and persist is not None:
            listen_fd = _take_over(persist, admin, port)
        if http is not None:
            page = listen_for_http(*http, same_user=require_auth == ALL, log_format=log_format, log_level=log_level)
        running = run(
            host,
            port,
            listen_fd,
            backend=backend,
            defer_accept=defer_accept,
            limits=limits,
            grace=grace,
            link_grace=link_grace,
            admin=admin,
            http=page,
            linger=linger,
            ready=announce,
            tokens=tokens,
            require_auth=require_auth,
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_ca=tls_ca,
            require_tls=require_tls,
            store_ports=store_ports,
            persist=persist,
            sync=sync,
            etcd=replicated,
        )
        run_loop(running)
    except JournalLost as error:
        fail(error, log_format, 74)
    except (DistError, JournalError) as error:
        fail(error, log_format)


def _take_over(persist: Path, admin: str | None, port: int) -> int | None:
    """Return the listening socket of the server that runs now, once it has ended; None if there is no such server."""
    found = [Path(admin)] if admin is not None else admin_path.find(port)
    if not found or not admin_path.is_live(found[0]):
        return None

    def request(path: str) -> None:
        for line in ask(found[0], [], SECONDS, replace=path, persist=os.path.realpath(persist)):
            fact = json.loads(line)
            if "error" in fact:
                raise OSError(fact["error"])

    return receive(request)
