"""Admission: after the handshake, find out whether the server serves, present the token and enter the named store.

It knows the order of the requests; it must not know how bytes travel. Afterwards the session has the server's identity,
so that nothing asks for it again on this connection.

Invariant: the server is asked for its identity once, and only if a token or a name has to be sent, which only our
servers understand, or if it may be one that stands by.
"""

import os
from collections.abc import Generator

from ..session.client import ClientSession, PendingCall
from ..session.identity import Identity, read_identity
from ..wire.values import unpack
from . import requests
from .credentials import authenticate
from .servers import StandsByError
from .store_name import StoreName


def admission(
    session: ClientSession,
    host: str,
    port: int,
    token: bytes,
    name: StoreName | None,
    clear: bool = False,
    may_stand_by: bool = False,
) -> Generator[tuple[bytes, PendingCall], None, None]:
    """Present the token and enter the named store, if given, on a connection that has shaken hands.

    `clear` is whether others on the network could read the token; `may_stand_by`, whether the handshake had no PING.
    Yields the bytes to send, if any, and the call to be answered before the next step. Raises AccessDeniedError,
    StandsByError, StoreEndedError, and DistNetworkError if there can be no such store.
    """
    ours = bool(token) or name is not None
    if not ours and not may_stand_by:
        return
    identity = yield from _identify(session, ours)
    if identity is not None and identity.elsewhere is not None:
        raise StandsByError(identity.elsewhere)
    if identity is not None and may_stand_by:
        pinging, answered = session.greet(os.getpid())
        yield pinging, answered
    if token:
        identity = yield from authenticate(session, identity, token, host, port, clear)
    if name is not None:
        identity = yield from name.enter(session, identity, host, port)
    session.identity = identity


def _identify(session: ClientSession, ours: bool) -> Generator[tuple[bytes, PendingCall], None, Identity | None]:
    """Ask the server for its identity, in one round trip if only `ours` will do; None if it is not one of ours.

    A server of another kind may never answer WHO_ARE_YOU, or close the connection; then neither matters, as without an
    identity the admission fails.
    """
    asking, asked = session.request(*requests.HAS_EXTENSION)
    assert asked is not None
    session.asked = asked
    telling, told = session.request(*requests.WHO_ARE_YOU) if ours else (b"", None)
    yield asking + telling, asked
    if not asked.result:
        return None
    if told is None:
        telling, told = session.request(*requests.WHO_ARE_YOU)
        assert told is not None
        yield telling, told
    else:
        yield b"", told
    return read_identity(unpack(told.result))
