"""`tcpstore doctor`: options, output and exit status. Must not know what is checked."""

import sys
from typing import Final

import click

from ...auth.secret_files import TlsFiles
from ...cli.context import (
    DEFAULT_PORT,
    FAILED,
    ClientContext,
    output_option,
    parse_seconds,
    parse_url,
    tls_client_options,
    token_file_option,
)
from ...cli.etcd import etcd_options, parse_etcd, to_etcd
from ...cli.output import escape, print_json, print_result
from ...client.server_url import ServerUrl
from ...client.url_variables import COMMANDS_URL

_INDENT: Final = 6
_COLUMN: Final = 18


def _parse_url(ctx: click.Context, param: click.Parameter, text: str | None) -> ServerUrl | None:
    return None if text is None else parse_url(ctx, param, text)


@click.command("doctor")
@click.option(
    "--ranks",
    default=1,
    show_default=True,
    envvar="WORLD_SIZE",
    show_envvar=True,
    type=click.IntRange(1),
    metavar="N",
    help="Number of ranks that the job will have.",
)
@click.option(
    "--url",
    envvar=COMMANDS_URL,
    show_envvar=True,
    callback=_parse_url,
    help="Check the connection to this server too.",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help=f"Port for a server on this machine.  [default: {DEFAULT_PORT}; none with --url]",
)
@click.option(
    "--etcd",
    metavar="URL[,URL…]",
    callback=parse_etcd,
    help="Check the etcd with these members, in which servers are to keep their stores.",
)
@etcd_options
@click.option(
    "--timeout",
    type=float,
    default=5.0,
    show_default=True,
    callback=parse_seconds,
    help="Timeout in seconds for each name lookup, and for each answer of the server or etcd.",
)
@tls_client_options
@token_file_option
@output_option
def doctor_command(
    ranks: int,
    url: ServerUrl | None,
    port: int | None,
    etcd: list[str],
    etcd_ca: str | None,
    etcd_cert: str | None,
    etcd_key: str | None,
    etcd_user: str | None,
    timeout: float,
    output: str,
    tls_ca: str,
    tls_cert: str,
    tls_key: str,
    token_file: str | None,
) -> None:
    """Check whether this machine and the connection to a server are ready for a job.

    Each check is ok, warn (works, but badly or not everywhere), fail (a job of N ranks will not start) or skip (cannot
    be checked on this system). For each problem, a command that fixes it is shown. Nothing is changed, and nothing but
    the resolver, the server at --url and etcd is contacted; a key below /tcpstore/doctor is written there, and removed.

    Exit status: 0 if no check fails, 1 otherwise.
    """
    from .examination import SECONDS, Machine, examine  # not at the top: other commands must start fast
    from .finding import FAIL, Finding
    from .server import Way

    findings: list[Finding] = []
    keeping = to_etcd(etcd, None, etcd_ca, etcd_cert, etcd_key, etcd_user)
    if port is None and url is None:
        port = DEFAULT_PORT
    seconds = timeout if timeout > 0 else SECONDS
    way = None
    if url is not None:
        context = ClientContext(url, seconds, output, TlsFiles(tls_ca, tls_cert, tls_key), token_file)
        way = Way(url.host, url.port, context.connect)
    for finding in examine(Machine(), ranks, port, way, seconds, keeping):
        findings.append(finding)
        if output == "text":
            print_result(escape(f"{finding.status:<{_INDENT}}{finding.check:<{_COLUMN}}{finding.text}"))
            if finding.fix:
                print_result(escape(f"{'':<{_INDENT + _COLUMN}}-> {finding.fix}"))
    failed = sum(finding.status == FAIL for finding in findings)
    if output == "json":
        print_json({"failed": failed, "checks": [finding._asdict() for finding in findings]})
    if failed:
        sys.exit(FAILED)
