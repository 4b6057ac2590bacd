"""What follows the handshake on a new connection: a token is presented, and a store with a name entered.

It knows in which order a server is asked; it must not know how bytes travel.

Invariant: a server is asked who it is once, before it is sent anything that only ours knows, and only if there is such
a thing to send.
"""

from collections.abc import Generator

from ..session.client import ClientSession, PendingCall
from ..session.identity import Identity, read_identity
from ..values import unpack
from . import requests
from .credentials import authenticate
from .store_name import StoreName


def admission(
    session: ClientSession, host: str, port: int, token: bytes, name: StoreName | None
) -> Generator[tuple[bytes, PendingCall], None, None]:
    """Do on a connection that has shaken hands what comes before its first request.

    Yields what to send, and the call whose reply has to arrive before the next. Raises AccessDeniedError,
    StoreEndedError, and DistNetworkError if there can be no such store.
    """
    if not token and name is None:
        return
    identity = yield from _identify(session)
    if token:
        yield from authenticate(session, identity, token, host, port)
    if name is not None:
        yield from name.entering(session, identity, host, port)


def _identify(session: ClientSession) -> Generator[tuple[bytes, PendingCall], None, Identity | None]:
    """Ask a server who it is; None if it is not one of ours."""
    asking, asked = session.request(*requests.HAS_EXTENSION)
    assert asked is not None
    yield asking, asked
    if not asked.result:
        return None
    asking, asked = session.request(*requests.WHO_ARE_YOU)
    assert asked is not None
    yield asking, asked
    return read_identity(unpack(asked.result))
