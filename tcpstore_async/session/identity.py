"""How a server of ours identifies itself to clients of ours. `docs/wire.md` specifies the format.

This module knows the identity's JSON, not when it is requested or how bytes travel. Whatever a server replies,
`read_identity` classifies it: one of our servers, or another one.
"""

from typing import Any, Final

import msgspec

from ..auth.access import Access
from ..base.errors import AccessDeniedError, ProtocolError
from ..base.version import VERSION
from ..wire import values
from ..wire.commands import BY_METHOD, EXTENSION

LINKS: Final = BY_METHOD["link"].since
"""The version of the extension from which on a server has LINK."""

SINGLE_LINKS: Final = BY_METHOD["taken"].since
"""The version from which on a link may be a single one, and it has TAKEN."""

TOKENS: Final = BY_METHOD["auth"].since
"""The version from which on it has AUTH."""

QUESTIONS: Final = BY_METHOD["missing"].since
"""The version from which on it has MISSING, and a link may describe ranks."""

NAMES: Final = BY_METHOD["end_store"].since
"""The version from which on it has ENTER and END_STORE."""

THREADED: Final = "threaded"
"""The name of the legacy backend, which has no links."""

_LEAST: Final = 2
"""The version with what every client of this package relies on."""


TOKEN: Final = "token"
CERTIFICATE: Final = "certificate"
"""What a server may require."""


class Granted(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a token allows, as a server tells the client that has presented it."""

    id: str = ""
    store: str = ""
    prefix: str = ""
    rights: str = ""
    expires: int = 0
    """In seconds since 1970; 0 for never."""


class AuthReply(Granted, frozen=True, kw_only=True, omit_defaults=True):
    """The reply to AUTH, which has what the token allows unless it is refused."""

    status: str
    """One of the following."""
    reason: str = ""
    """Why it was refused."""
    closed: str = ""
    """Why the server has just closed another connection of the same process, if that was not allowed something."""


OK: Final = "ok"
REFUSED: Final = "refused"
CROWDED: Final = "crowded"
"""What becomes of a token: it is accepted, or not, or not now, as there are as many sessions with it as it allows."""

ENTERED: Final = "entered"
TAKEN: Final = "taken"
ENDED: Final = "ended"
LOST: Final = "lost"
"""Results of ENTER, besides REFUSED: the connection is in the store; it has another owner; it has ended, or there is
none; it may be about to end, as all connections of its owner are broken."""


MAX_NAME: Final = 512
"""Bytes of the name of a store."""

MAX_ID: Final = 64
"""Bytes of an owner's id, of what it shares the store by, and of an attempt."""

MAX_ADDRESSES: Final = 32
"""Addresses of its host that the owner of a store sends, and that a client sends which looks for one."""

CLOSED: Final = "has closed it"
"""The end of the reason why a store has ended, if its owner wanted that."""


class EnterReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The reply to ENTER."""

    status: str
    incarnation: str = ""
    """Which of the stores that had this name, one after the other, the connection is in."""
    reason: str = ""
    port: int = 0
    """The port of the store at the server, if the client has asked for one."""
    no_port: str = ""
    """Why there is none, if it has."""
    store: str = ""
    """The name of the store, if it was found by an address and has another name than the client has said."""
    others: tuple[str, ...] = ()
    """If there is no such store, some of the same port: how their owners spell them, and who these are."""


class Identity(msgspec.Struct, frozen=True, omit_defaults=True):
    """A server's identity."""

    server: str
    version: str
    extension: int
    instance: str
    """Unique to each server ever started and, for a connection in a store with a name, to each such store."""
    backend: str = ""
    build: str = ""
    access: Granted | None = None
    """What the token allows that has been presented for this connection, if one was."""
    requires: str = ""
    """What this connection has to present before it may do anything: `token` or `certificate`, if it has to."""
    store: str = ""
    """The name of the store that this connection is in, if it has one."""
    refused: str = ""
    """Why this connection may do nothing, whatever it presents: the server has refused the relay's token."""
    elsewhere: str | None = None
    """None unless this server stands by: the address of the one that serves, empty if none does at the moment."""

    def has_links(self, least: int) -> bool:
        """Return whether the server has links of at least this version of the extension; the threaded one has none."""
        return self.extension >= least and self.backend != THREADED


_DECODER: Final = msgspec.json.Decoder(Identity)
"""Made with the module: `msgspec.json.decode` would look at the class's annotations in the first connection's time."""


def identity(instance: str, backend: str) -> bytes:
    """Encode the identity of a server of this package."""
    return encode_identity(Identity("tcpstore_async", VERSION, EXTENSION, instance, backend, build()))


def encode_identity(identity: Identity) -> bytes:
    return msgspec.json.encode(identity)


def decode_identity(own: bytes) -> Identity:
    """Decode the identity of this server itself."""
    return _DECODER.decode(own)


def read_identity(raw: bytes) -> Identity | None:
    """Decode an identity; None if it is not one of our servers, or too old to have the commands used here."""
    try:
        found = _DECODER.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found if found.extension >= _LEAST else None


def with_access(identity: Identity, access: Access) -> Identity:
    """Return a server's identity as a client sees it for which this token was presented."""
    return msgspec.structs.replace(identity, access=Granted(**_granted(access)), requires="")


def with_store(identity: Identity, name: str, incarnation: str) -> Identity:
    """Return a server's identity as a client sees it that is in a store with a name."""
    return msgspec.structs.replace(identity, instance=incarnation, store=name)


def read_enter_reply(raw: bytes) -> EnterReply:
    """Decode the reply to ENTER. Raises ProtocolError."""
    try:
        return msgspec.json.decode(raw, type=EnterReply)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ProtocolError("invalid reply to ENTER") from None


def with_requirement(identity: Identity, requires: str) -> Identity:
    """Return a server's identity as a client sees it that has not authenticated, and has to."""
    return msgspec.structs.replace(identity, requires=requires)


def with_elsewhere(identity: Identity, address: str) -> Identity:
    """Return the identity of a server that stands by."""
    return msgspec.structs.replace(identity, elsewhere=address)


def check_admitted(identity: Identity) -> None:
    """Raise AccessDeniedError if the server lets this client do nothing, which has presented all that it has."""
    reason = identity.refused
    if identity.requires and not reason:
        reason = (
            "the server requires a client certificate: use TLS, with TCPSTORE_CERT and TCPSTORE_KEY"
            if identity.requires == CERTIFICATE
            else "the server requires a token: set TCPSTORE_TOKEN_FILE"
        )
    if reason:
        raise AccessDeniedError(reason, final=True)


def granted_access(granted: Granted | None) -> Access | None:
    """Return what a client may do; None for everything. Raises ProtocolError for rights that it does not know."""
    if granted is None:
        return None
    try:
        return Access(granted.id, granted.rights, granted.prefix, granted.store, granted.expires)
    except ValueError as error:
        raise ProtocolError(f"invalid description of a token: {error}") from None


def _granted(access: Access) -> dict[str, Any]:
    """Return the fields of a `Granted`."""
    fields = (access.identity, access.store, access.prefix, access.rights, access.expires)
    return dict(zip(Granted.__struct_fields__, fields, strict=True))


def auth_reply(access: Access, closed: str = "") -> bytes:
    """Encode the reply to AUTH with a token that allows this."""
    return msgspec.json.encode(AuthReply(status=OK, closed=closed, **_granted(access)))


def auth_refusal(status: str, reason: str) -> bytes:
    """Encode the reply to AUTH with a token that is not accepted."""
    return msgspec.json.encode(AuthReply(status=status, reason=reason))


def read_auth_reply(raw: bytes) -> tuple[Access, str]:
    """Return what the token allows, and why another connection has just been closed, if one was.

    Raises AccessDeniedError if the token was refused, and ProtocolError.
    """
    try:
        reply = msgspec.json.decode(raw, type=AuthReply)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ProtocolError("invalid reply to AUTH") from None
    if reply.status != OK:
        text = f"the server refused the token: {reply.reason or reply.status}"
        raise AccessDeniedError(text, final=reply.status == REFUSED)
    access = granted_access(reply)
    assert access is not None
    return access, reply.closed


def build() -> str:
    """Return how the hot path of this installation runs: `compiled` or `interpreted`."""
    return "interpreted" if (values.__file__ or "").endswith(".py") else "compiled"
