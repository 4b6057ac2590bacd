"""`tcpstore token`: creates tokens. Must not know how they are signed."""

import logging
import os
from pathlib import Path

import click

from ..auth.access import RIGHTS, Access
from ..auth.tokens import read_keys
from .output import print_result
from .stdio import log_without_blocking

log = logging.getLogger("tcpstore_async.audit")
notes = logging.getLogger("tcpstore_async")


def _check_prefix(ctx: click.Context, param: click.Parameter, prefix: str | None) -> str:
    if prefix == "":  # an unset variable of a script
        raise click.BadParameter("it is empty; omit it to give access to all keys", ctx, param)
    try:
        (prefix or "").encode()
    except UnicodeEncodeError:
        raise click.BadParameter("it is not UTF-8, so no key can begin with it", ctx, param) from None
    return prefix or ""


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
@click.option(
    "--prefix",
    default=None,
    metavar="P",
    callback=_check_prefix,
    help="Give access only to keys that begin with P, such as job1/ for those of PrefixStore('job1', store).",
)
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

    Anyone who has the token can do what it allows: keep it in a file that only its owner can read, and pass that file
    to clients and relays as TCPSTORE_TOKEN_FILE. The token's id, which is needed to revoke it, and the keys that it
    gives access to are logged to standard error.
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
    _explain(prefix, store)
    print_result(made)


def _explain(prefix: str, store: str) -> None:
    """Log which keys a token gives access to."""
    where = f" of the store {store!r}" if store else ""
    if not prefix:
        notes.info("it gives access to all keys%s", where)
        return
    name = prefix.rstrip("/")
    if prefix.endswith("/"):
        note = f", which is 'x' in PrefixStore({name!r}, store)" if name and prefix == name + "/" else ""
    else:
        note = f"; end it with '/' to give access only to the keys of PrefixStore({name!r}, store)"
    notes.info("it gives access to the keys%s that begin with %r, for example %r%s", where, prefix, prefix + "x", note)
    if prefix.startswith("/"):
        notes.warning(
            "the prefix %r begins with '/': the token gives no access to keys such as %r; omit the leading '/' unless "
            "the program's own keys begin with one (timeout errors and the wire protocol add another to every key)",
            prefix,
            prefix.lstrip("/") + "x",
        )
