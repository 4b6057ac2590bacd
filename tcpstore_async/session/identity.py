"""How a server of ours identifies itself to clients of ours. `docs/wire.md` specifies the format.

This module knows the identity's JSON, not when it is requested or how bytes travel. Whatever a server replies,
`read_identity` classifies it: one of our servers, or another one.
"""

from typing import Final

import msgspec

from .. import values
from ..version import VERSION

EXTENSION: Final = 5
"""The version of the extension: which of its commands the server has."""

ROUNDS: Final = 3
"""The version from which on it has MEET and ATTEND."""

LINKS: Final = 4
"""The version from which on it has LINK."""

SINGLE_LINKS: Final = 5
"""The version from which on a link may be a single one, and it has TAKEN."""

_LEAST: Final = 2
"""The version with what every client of this package relies on."""


class Identity(msgspec.Struct, frozen=True):
    """A server's identity."""

    server: str
    version: str
    extension: int
    instance: str
    """Unique to each server ever started."""
    backend: str = ""
    build: str = ""


def identity(instance: str, backend: str) -> bytes:
    """Encode the identity of a server of this package."""
    return msgspec.json.encode(Identity("tcpstore_async", VERSION, EXTENSION, instance, backend, build()))


def read_identity(raw: bytes) -> Identity | None:
    """Decode an identity; None if it is not one of our servers, or too old to have the commands used here."""
    try:
        found = msgspec.json.decode(raw, type=Identity)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found if found.extension >= _LEAST else None


def build() -> str:
    """Return how the hot path of this installation runs: `compiled` or `interpreted`."""
    return "interpreted" if (values.__file__ or "").endswith(".py") else "compiled"
