"""Creates and checks tokens.

A token is the text `tcps1.KEY.CLAIMS.MAC`: the version of this format, the id of the key that signed it, what it allows
(JSON) and the HMAC-SHA-256 of everything before the last dot, the last two in base64url without padding. Must not know
connections or commands.

Invariants: no error and no log line contains a token or a secret. How long a check takes depends neither on whether the
key is known nor on where a token differs from a valid one: every token is compared with the signature of every key.
"""

import base64
import hashlib
import hmac
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from ..base.errors import counted
from ..wire.codecs import MAX_TOKEN
from .access import Access
from .secret_files import read_secret

VERSION: Final = b"tcps1"

_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""A valid id of a key or token."""

_SHORT: Final = 16
"""Bytes below which a secret can be guessed."""

log = logging.getLogger("tcpstore_async")

_SHARED: Final = "shared"
"""Identity of all tokens that are compared whole, without being decoded."""

_UNSIGNED: Final = "the token is not signed by one of this server's keys"


class Claims(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The claims of a token. An unknown claim must not be ignored: it may be a restriction."""

    id: str
    rights: str
    prefix: str = ""
    store: str = ""
    expires: int = 0
    keys: int = 0
    bytes: int = 0
    sessions: int = 0


class TokenKeys:
    """The keys that sign tokens, and the tokens that are revoked."""

    def __init__(self, keys: list[tuple[str, bytes]], revoked: frozenset[str] = frozenset()) -> None:
        """`keys` are pairs of id and secret, of which the first signs; `revoked` are ids of tokens."""
        self.keys = keys
        self.revoked = revoked

    def create(
        self,
        rights: str = "write",
        prefix: str = "",
        store: str = "",
        seconds: int | None = None,
        max_keys: int = 0,
        max_bytes: int = 0,
        max_sessions: int = 0,
    ) -> str:
        """Return a new token that expires after `seconds`, or never. Raises ValueError if it would be too long."""
        signer, secret = self.keys[0]
        expires = 0 if seconds is None else int(time.time()) + seconds
        identity = secrets.token_hex(8)
        claims = Claims(identity, rights, prefix, store, expires, max_keys, max_bytes, max_sessions)
        signed = b".".join([VERSION, signer.encode(), _encode(msgspec.json.encode(claims))])
        token = signed + b"." + _sign(secret, signed)
        if len(token) > MAX_TOKEN:
            raise ValueError(f"the token would be {len(token)} bytes long (max {MAX_TOKEN}): shorten its prefix")
        return token.decode()

    def check(self, token: bytes, now: float) -> Access | str:
        """Return what a token allows at `now`, in seconds since 1970, or why it is refused."""
        signed, _, mac = token.rpartition(b".")
        signer = ""
        for name, secret in self.keys:
            if hmac.compare_digest(_sign(secret, signed), mac):
                signer = name  # no break: the duration must not tell which key signed
        if not signer:
            return _UNSIGNED
        return self._read(token, signer, now)

    def _read(self, token: bytes, signer: str, now: float) -> Access | str:
        """Do the same for a token whose signature is valid."""
        parts = token.split(b".")
        if len(parts) != 4 or parts[0] != VERSION:
            return "this server does not support the token's version"
        if parts[1] != signer.encode():  # the key was renamed, or shares its secret
            return _UNSIGNED
        try:
            said = msgspec.json.decode(base64.urlsafe_b64decode(parts[2] + b"=" * (-len(parts[2]) % 4)), type=Claims)
            limits = (said.keys, said.bytes, said.sessions)
            if not _ID.fullmatch(said.id) or min(limits) < 0:
                raise ValueError
            access = Access(said.id, said.rights, said.prefix, said.store, said.expires, signer, *limits)
        except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
            return "this server does not understand the token's contents"
        if said.id in self.revoked:
            return f"token {said.id} is revoked"
        if said.expires and said.expires <= now:
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(max(0, said.expires)))
            return f"token {said.id} expired at {when}"
        return access


class SharedTokens:
    """Accepts the tokens of a server's owner, compared whole, whatever their claims."""

    def __init__(self, tokens: Iterable[bytes]) -> None:
        self._digests = [hashlib.sha256(token).digest() for token in tokens]

    def authenticate(self, token: bytes) -> Access | str:
        """Return what a token allows, or why it is refused."""
        digest = hashlib.sha256(token).digest()
        known = [hmac.compare_digest(digest, one) for one in self._digests]
        return Access(_SHARED) if any(known) else "it is not the token of the process that hosts this server"


@dataclass(unsafe_hash=True, repr=False)  # a representation would contain the tokens
class HostTokens:
    """What a master's server checks tokens against: the keys in a file or, without one, given tokens."""

    keys: str
    """The absolute path of the file, or empty."""
    tokens: frozenset[bytes]
    require_auth: str
    """As for `serving.serve`."""

    def __post_init__(self) -> None:
        if self.keys:  # which decide alone
            self.tokens = frozenset()

    def checker(self) -> "TokenFiles | SharedTokens":
        """Return the object that checks tokens. Raises OSError and ValueError."""
        return TokenFiles(self.keys) if self.keys else SharedTokens(self.tokens)

    def encode(self) -> bytes:
        """Return a line for the server's process. It contains secrets."""
        tokens = sorted(token.decode() for token in self.tokens)
        return msgspec.json.encode((self.keys, tokens, self.require_auth)) + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> "HostTokens":
        """Decode a line of `encode`. Raises ValueError."""
        keys, tokens, require_auth = msgspec.json.decode(line, type=tuple[str, list[str], str])
        return cls(keys, frozenset(token.encode() for token in tokens), require_auth)


def _encode(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def _sign(secret: bytes, signed: bytes) -> bytes:
    return _encode(hmac.digest(secret, signed, hashlib.sha256))


def parse_keys(text: str, where: str) -> list[tuple[str, bytes]]:
    """Return the ids and secrets in a key file: `id:secret` lines, comments that start with `#`, and empty lines.

    Raises ValueError, which names the file as `where`, and the line, but not its contents.
    """
    keys: dict[str, bytes] = {}
    for number, line in _entries(text):
        name, _, secret = line.partition(":")
        if not _ID.fullmatch(name) or not secret:
            raise ValueError(
                f"{where}, line {number}: expected id:secret, with an id of up to 64 letters, digits, '-' and '_'"
            )
        if name in keys:
            raise ValueError(f"{where}, line {number}: duplicate key id")
        keys[name] = secret.encode()
    if not keys:
        raise ValueError(f"{where}: no keys")
    return list(keys.items())


def _entries(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file, stripped, with their numbers; without comments and empty lines."""
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if line and not line.startswith("#"):
            yield number, line


def read_keys(path: str | os.PathLike[str], revoked: str | os.PathLike[str] | None = None) -> TokenKeys:
    """Read a key file and, if given, a file with the id of a revoked token on each line. Raises OSError, ValueError."""
    keys = parse_keys(read_secret(path, "the token key file"), os.fspath(path))
    for name, secret in keys:
        if len(secret) < _SHORT:
            log.warning(
                "the secret of key %s in %s is only %d bytes long, so anyone with a token can guess it: use at least "
                "%d, for example from openssl rand -hex 32",
                name,
                os.fspath(path),
                len(secret),
                _SHORT,
            )
    return TokenKeys(keys, frozenset() if revoked is None else _read_revoked(revoked))


def _read_revoked(path: str | os.PathLike[str]) -> frozenset[str]:
    """Return the ids of tokens in a file. Raises OSError, and ValueError for any other line, such as a token."""
    ids: set[str] = set()
    for number, line in _entries(Path(path).read_bytes().decode(errors="replace")):
        if not _ID.fullmatch(line):
            raise ValueError(
                f"{os.fspath(path)}, line {number}: expected the id of a token, and nothing else on the line"
            )
        ids.add(line)
    return frozenset(ids)


class TokenFiles:
    """What a server checks tokens against, read from files that may be reloaded."""

    def __init__(self, path: str | os.PathLike[str], revoked: str | os.PathLike[str] | None = None) -> None:
        """Read the files. Raises OSError and ValueError."""
        self._path = path
        self._revoked = revoked
        self._keys = read_keys(path, revoked)

    def authenticate(self, token: bytes) -> Access | str:
        """Return what a token allows, or why it is refused."""
        return self._keys.check(token, time.time())

    def paths(self) -> list[str]:
        """Return the paths of the files."""
        return [os.fspath(path) for path in (self._path, self._revoked) if path is not None]

    def describe(self) -> str:
        """Return the ids of the keys and the number of revoked tokens, for logs."""
        keys = self._keys
        names = ", ".join(name for name, _ in keys.keys)
        return f"the token keys {names} and {counted(len(keys.revoked), 'revoked token')}"

    def reload(self) -> Callable[[Access], str]:
        """Read the files again. Raises OSError and ValueError, and then keeps what it had.

        Returns a function that says why a token accepted before is not valid any more, other than by expiry.
        """
        before = dict(self._keys.keys)
        self._keys = read_keys(self._path, self._revoked)
        after = dict(self._keys.keys)
        revoked = self._keys.revoked

        def ended(access: Access) -> str:
            if access.identity in revoked:
                return f"token {access.identity} is revoked"
            if access.signer not in after or after[access.signer] != before.get(access.signer):
                return f"the key {access.signer}, which signed token {access.identity}, has been removed or replaced"
            return ""

        return ended
