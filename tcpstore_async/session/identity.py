"""What our servers and clients say to each other beyond PyTorch's protocol; `docs/wire.md` specifies it.

Knows: how a server says who it is, and a client who it is. Must not know: when that is asked, how bytes travel.
Invariant: whatever a server answers, a client that reads it here has either one of our servers or a stock one.
"""

from typing import Final

import msgspec

from .. import values
from ..version import VERSION

EXTENSION: Final = 2
"""The number of the extension: which commands there are."""


class Identity(msgspec.Struct, frozen=True):
    """Who a server is."""

    server: str
    version: str
    extension: int
    instance: str
    """Differs for every server ever started."""
    backend: str = ""
    build: str = ""


def identity(instance: str, backend: str) -> bytes:
    """What a server of this package says of itself."""
    return msgspec.json.encode(Identity("tcpstore_async", VERSION, EXTENSION, instance, backend, build()))


def read_identity(raw: bytes) -> Identity | None:
    """Who answered; None if it is not one of ours, or too old to have the commands that are used here."""
    try:
        found = msgspec.json.decode(raw, type=Identity)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found if found.extension >= EXTENSION else None


def build() -> str:
    """How the hot path of this installation runs: `compiled` or `interpreted`."""
    return "interpreted" if (values.__file__ or "").endswith(".py") else "compiled"
