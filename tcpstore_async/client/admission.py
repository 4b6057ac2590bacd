"""What follows the handshake on a new connection: a token is presented, and a store with a name entered.

It knows in which order a server is asked; it must not know how bytes travel. Afterwards the session knows the server's
identity, as the server would tell it on this connection: nobody has to ask again.

Invariant: a server is asked who it is once, before it is sent anything that only ours knows, and only if there is such
a thing to send.
"""

from collections.abc import Generator

from ..session.client import ClientSession, PendingCall
from ..session.identity import Identity, read_identity
from ..wire.values import unpack
from . import requests
from .credentials import authenticate
from .store_name import StoreName


def admission(
    session: ClientSession, host: str, port: int, token: bytes, name: StoreName | None, clear: bool = False
) -> Generator[tuple[bytes, PendingCall], None, None]:
    """Do on a connection that has shaken hands what comes before its first request.

    `clear` is whether others could read the token on its way.
    Yields what to send, if anything, and the call whose reply has to arrive before the next. Raises AccessDeniedError,
    StoreEndedError, and DistNetworkError if there can be no such store.
    """
    if not token and name is None:
        return
    identity = yield from _identify(session)
    if token:
        identity = yield from authenticate(session, identity, token, host, port, clear)
    if name is not None:
        identity = yield from name.entering(session, identity, host, port)
    session.identity = identity


def _identify(session: ClientSession) -> Generator[tuple[bytes, PendingCall], None, Identity | None]:
    """Ask a server who it is, in one round trip; None if it is not one of ours.

    Such a server may never reply to the second question, or close the connection, of which there is no use then.
    """
    asking, asked = session.request(*requests.HAS_EXTENSION)
    telling, told = session.request(*requests.WHO_ARE_YOU)
    assert asked is not None
    assert told is not None
    yield asking + telling, asked
    if not asked.result:
        return None
    yield b"", told
    return read_identity(unpack(told.result))
