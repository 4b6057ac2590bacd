"""A client's token: from an argument, the environment or a file, and presented to the server.

It knows AUTH; it must not know how bytes travel.

Invariant: a token is sent only to a server that says it checks tokens, and no error contains it.
"""

import logging
import os
from collections.abc import Generator
from typing import Final

from ..auth.secret_files import TOKEN, TOKEN_FILE, read_secret
from ..base.addresses import format_address
from ..base.errors import AccessDeniedError
from ..session.client import ClientSession, PendingCall
from ..session.identity import TOKENS, Identity, read_auth_reply, with_access
from ..wire.codecs import MAX_TOKEN
from ..wire.values import unpack
from . import requests

log = logging.getLogger("tcpstore_async.client")


def find_token(given: object = None) -> bytes:
    """Return the token of the argument or, without one, of the environment; empty if there is none.

    Raises TypeError, and AccessDeniedError if the file cannot be read or the text is not a valid token.
    """
    if given is None:
        token = os.environ.get(TOKEN, "")
        path = os.environ.get(TOKEN_FILE, "")
        return read_token(path) if path and not token else _checked(token, f"${TOKEN}")
    if not isinstance(given, str):
        raise TypeError(f"token must be str, not {type(given).__name__}")
    return _checked(given, "token")


def read_token(path: str | os.PathLike[str]) -> bytes:
    """Return the token in a file. Raises AccessDeniedError."""
    try:
        token = _checked(read_secret(path, "the token file"), f"the token file {os.fspath(path)}")
    except OSError as error:
        raise AccessDeniedError(f"cannot read the token file {os.fspath(path)}: {error.strerror}") from None
    except ValueError as error:
        raise AccessDeniedError(str(error)) from None
    if not token:
        raise AccessDeniedError(f"the token file {os.fspath(path)} is empty")
    return token


def _checked(text: str, where: str) -> bytes:
    text = text.strip()
    if not text.isascii() or not text.isprintable() or " " in text or len(text) > MAX_TOKEN:
        raise AccessDeniedError(f"{where} is not a valid token")
    return text.encode()


_warned: Final[set[tuple[str, int]]] = set()


def warn_of_clear_text(host: str, port: int) -> None:
    """Warn, once per server, that the token is sent in clear text."""
    if (host, port) not in _warned:
        _warned.add((host, port))
        log.warning(
            "sending the token to %s without TLS: anyone who sees the traffic can use it; connect with tcps:// or "
            "TCPSTORE_TLS=1, to a server with a certificate (docs/security.md)",
            format_address(host, port),
        )


def authenticate(
    session: ClientSession, identity: Identity | None, token: bytes, host: str, port: int, clear: bool = False
) -> Generator[tuple[bytes, PendingCall], None, Identity]:
    """Present the token; set `session.access` to what it allows, and return the server's identity from then on.

    `clear` is whether others on the network could read the token. Yields the bytes to send, and the call to be answered
    before the next step. Raises AccessDeniedError.
    """
    if identity is None or identity.extension < TOKENS:
        raise AccessDeniedError(f"the server at {host}:{port} does not check tokens, so the token was not sent")
    if clear:
        warn_of_clear_text(host, port)
    showing, shown = session.request(*requests.auth(token))
    assert shown is not None
    yield showing, shown
    session.access, session.refusal = read_auth_reply(unpack(shown.result))
    return with_access(identity, session.access)
