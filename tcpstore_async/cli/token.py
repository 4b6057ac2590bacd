"""`tcpstore token`: creates tokens. This module does not know how they are signed."""

import logging
import os
from pathlib import Path

import click

from ..access import RIGHTS, Access
from ..tokens import read_keys
from .output import print_result
from .stdio import log_without_blocking

log = logging.getLogger("tcpstore_async.audit")


@click.group()
def token() -> None:
    """Create tokens, which let clients and relays use a server that was started with --token-keys."""


@token.command()
@click.option(
    "--token-keys",
    required=True,
    type=click.Path(path_type=Path),
    help="File with one id:secret per line; the first key signs.",
)
@click.option("--store", default="", metavar="NAME", help="Give access to this named store only.")
@click.option("--prefix", default="", metavar="P", help="Give access only to keys that begin with P.")
@click.option(
    "--rights",
    type=click.Choice(list(RIGHTS)),
    default="write",
    show_default=True,
    help="Give this level of access; each level includes the previous one.",
)
@click.option("--expires", type=click.IntRange(1), metavar="SECONDS", help="Expire after this time; default: never.")
@click.option(
    "--max-keys", type=click.IntRange(1), default=None, metavar="N", help="Allow at most N keys to be created."
)
@click.option(
    "--max-bytes", type=click.IntRange(1), default=None, metavar="N", help="Allow at most N bytes to be stored."
)
@click.option(
    "--max-sessions",
    type=click.IntRange(1),
    default=None,
    metavar="N",
    help="Allow at most N simultaneous connections and sessions.",
)
def create(
    token_keys: Path,
    store: str,
    prefix: str,
    rights: str,
    expires: int | None,
    max_keys: int | None,
    max_bytes: int | None,
    max_sessions: int | None,
) -> None:
    """Print a new token.

    Anyone who has it can use the server within its limits: keep it in a file that only its owner can read, and pass
    that file to clients and relays as TCPSTORE_TOKEN_FILE. Its id, by which it can be revoked, is logged.
    """
    log_without_blocking()
    try:
        keys = read_keys(token_keys)
        made = keys.create(rights, prefix, store, expires, max_keys or 0, max_bytes or 0, max_sessions or 0)
    except OSError as error:
        raise click.ClickException(f"cannot read {token_keys}: {error.strerror}") from None
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    created = keys.check(made.encode(), 0)
    assert isinstance(created, Access)
    log.info("uid %d created %s", os.getuid(), created)
    print_result(made)
