"""What the holder of a token may do: which keys, and what with them.

Servers and clients decide here, from the same rows of the command table. Must not know tokens, their signatures or
bytes, nor the time.

Invariant: a command that is not refused touches no key outside of the store and the prefix.
"""

from dataclasses import dataclass, field
from typing import Final

from ..base.errors import counted
from ..wire.codecs import Fields
from ..wire.commands import MUTATES, SERVER_KEY, WHOLE, Command

READ: Final = 1
WRITE: Final = 2
ADMIN: Final = 3

RIGHTS: Final = {"read": READ, "write": WRITE, "admin": ADMIN}
"""Levels of access by name; each includes the previous ones."""

_SHOWN: Final = 128
"""Characters of a key shown in a refusal."""


@dataclass(unsafe_hash=True)
class Access:
    """What one token allows. Two are equal if they come from the same token and allow the same."""

    identity: str
    """The id of the token, for logs and revocation; not secret."""
    rights: str = "write"
    prefix: str = ""
    """Prefix of the allowed keys, in the caller's form."""
    store: str = ""
    """The name of the only store it gives access to; empty for all stores."""
    expires: int = 0
    """Expiry in seconds since 1970; 0 for never."""
    signer: str = ""
    """The id of the key that signed the token."""
    max_keys: int = 0
    """Maximum number of keys and queues created; 0 for no limit, as for the other limits."""
    max_bytes: int = 0
    """Maximum bytes stored, overheads included."""
    max_sessions: int = 0
    """Maximum number of simultaneous connections and sessions on links."""
    _level: int = field(init=False, repr=False, compare=False)
    _scope: bytes = field(init=False, repr=False, compare=False)
    """Prefix of the allowed keys, in stored form."""

    def __post_init__(self) -> None:
        """Raise ValueError for unknown rights."""
        if self.rights not in RIGHTS:
            raise ValueError(f"rights must be one of {', '.join(RIGHTS)}, not {self.rights!r}")
        self._level = RIGHTS[self.rights]
        self._scope = b"/" + self.prefix.encode(errors="replace") if self.prefix else b""

    def __str__(self) -> str:
        said = [f"rights {self.rights}"]
        said += [f"prefix {self.prefix!r}"] if self.prefix else []
        said += [f"store {self.store!r}"] if self.store else []
        said += [f"expires {self.expires}"] if self.expires else []
        for limit, what in ((self.max_keys, "key"), (self.max_bytes, "byte"), (self.max_sessions, "session")):
            said += [f"max {counted(limit, what)}"] if limit else []
        return f"token {self.identity} ({', '.join(said)}), signed by {self.signer}"

    def limited(self) -> bool:
        """Return whether what its holders store, and their sessions, must be counted."""
        return self.max_keys > 0 or self.max_bytes > 0 or self.max_sessions > 0

    def may_write(self) -> bool:
        return self._level >= WRITE

    def refusal(self, command: Command, fields: Fields, store: str | None = None) -> str:
        """Return why a command with these fields is not allowed in this store; empty if it is.

        A command that names no key concerns what its connection was granted before, and is allowed.
        """
        if not command.request.names_keys and not command.flags & WHOLE:
            return ""
        if self.store and self.store != store:
            foreign = [key for key in command.request.keys(fields) if key != SERVER_KEY]
            if foreign or command.flags & WHOLE:
                here = "the unnamed store" if store is None else f"the store {store!r}"
                return f"{command.name} in {here}; token {self.identity} is only for the store {self.store!r}"
        if command.flags & MUTATES and self._level < WRITE:
            return f"{command.name} requires write access; token {self.identity} grants only read access"
        scope = self._scope
        if not scope:
            return ""
        if command.flags & WHOLE:
            return f"{command.name} covers the whole store; {self._granted_keys()}"
        for key in command.request.keys(fields):
            # Every client may read the server's identity, whatever its prefix.
            if not key.startswith(scope) and (command.flags & MUTATES or key != SERVER_KEY):
                return f"{command.name} of {show(key)}; {self._granted_keys()}"
        return ""

    def covers(self, key: bytes) -> bool:
        """Return whether a stored key has the token's prefix."""
        return key.startswith(self._scope)

    def includes(self, other: "Access") -> bool:
        """Return whether it allows at least what another token allows."""
        limits = (
            (self.max_keys, other.max_keys),
            (self.max_bytes, other.max_bytes),
            (self.max_sessions, other.max_sessions),
        )
        return (
            self._level >= other._level
            and other.prefix.startswith(self.prefix)
            and self.store in ("", other.store)
            and all(not mine or 0 < theirs <= mine for mine, theirs in limits)
        )

    def whole(self) -> bool:
        """Return whether the token is not restricted to a prefix."""
        return not self._scope

    def _granted_keys(self) -> str:
        return f"token {self.identity} grants access only to keys with the prefix {self.prefix[:_SHOWN]!r}"


def show(key: bytes) -> str:
    """Return the caller's form of a key, quoted so that it cannot break a line."""
    text = key[: _SHOWN + 1].decode(errors="replace")
    return repr(text.removeprefix("/")[:_SHOWN])
