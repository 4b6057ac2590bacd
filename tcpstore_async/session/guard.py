"""Checks every command of the sessions that have presented the same token, or none where one is required.

It knows what a token allows and what its holders have stored, as far as that is limited; it must not know tokens, or
how bytes travel.

Invariant: a command that is refused has changed nothing. A session without a guard pays nothing for there being one.
"""

from typing import TYPE_CHECKING, Any, Final

from ..access import Access, show
from ..errors import NotAllowedError, counted
from ..keyspace import Keyspace
from ..limits import ENTRY_BYTES
from ..values import Framed
from ..waiter_types import KeyList
from ..wire.codecs import Fields, Handler
from ..wire.commands import SERVER_KEY, Command

if TYPE_CHECKING:
    from .server import ServerSession

_GET: Final = "get"


class Stored:
    """What the holders of one token have stored."""

    def __init__(self) -> None:
        self.keys: int = 0
        self.bytes: int = 0


class Usage(Stored):
    """What the holders of one token have made the server hold, in all stores."""

    def __init__(self) -> None:
        super().__init__()
        self.guards: int = 0
        """Of how many stores a guard counts here."""
        self.nameless = Stored()
        """Of that, what is in the store without a name."""
        self.sessions: set[ServerSession] = set()
        """Those that have a connection."""

    def add(self, store: Stored, keys: int, size: int) -> None:
        """Count what one store has grown by. Where others' keys are deleted, nothing is left to count."""
        keys = max(-store.keys, keys)
        size = max(-store.bytes, size)
        store.keys += keys
        store.bytes += size
        self.keys += keys
        self.bytes += size

    def unused(self) -> bool:
        return not (self.guards or self.sessions or self.keys or self.bytes)


class Guard:
    """What stands before the commands of such sessions."""

    def __init__(
        self,
        keyspace: Keyspace,
        access: Access | None,
        usage: Usage | None,
        stored: Stored | None,
        identity: Framed,
        certificate: bool,
        store: str | None = None,
    ) -> None:
        """Without `access`, nothing is allowed but to ask who the server is, until a token or `certificate` is shown.

        `usage` is counted, if given, and `stored` is the part of it in this store. `identity` is the reply to a GET of
        the server's identity. `store` is the name of the store that the sessions are in; None for the one without a
        name.
        """
        self.store = store
        self.keyspace = keyspace
        self.access = access
        self.usage = usage
        self.stored = stored
        self.identity = identity
        self.certificate = certificate
        self.sessions: int = 0
        """How many it stands before."""

    def wrap(self, command: Command, call: Handler) -> Handler:
        """Return a function that executes a command if it is allowed. Raises NotAllowedError if not."""
        if command.method == _GET:
            return lambda key: self._get(command, call, key)
        if self.usage is not None and (command.mutates or command.holds):
            return lambda *fields: self._counted(command, call, fields)
        return lambda *fields: self._checked(command, call, fields)

    def wrap_shared(self, command: Command, call: Handler) -> Handler:
        """Do the same for a function that takes a list of keys which many send."""
        return lambda listed: self._listed(command, call, listed)

    def check(self, command: Command, fields: Fields) -> None:
        """Raise NotAllowedError if a command is not allowed."""
        access = self.access
        if access is not None:
            refusal = access.refusal(command, fields, self.store)
        else:
            other = [key for key in command.request.keys(fields) if key != SERVER_KEY]
            what = f"{command.name} of {show(other[0])}" if other else ""
            refusal = authentication_required(what, self.certificate) if other else ""
        if refusal:
            raise NotAllowedError(refusal)

    def _checked(self, command: Command, call: Handler, fields: Fields) -> Any:
        self.check(command, fields)
        return call(*fields)

    def _listed(self, command: Command, call: Handler, listed: KeyList) -> Any:
        self.check(command, (listed.keys,))
        return call(listed)

    def _get(self, command: Command, call: Handler, key: bytes) -> Any:
        if key == SERVER_KEY:
            return self.identity
        self.check(command, (key,))
        return call(key)

    def _counted(self, command: Command, call: Handler, fields: Fields) -> Any:
        self.check(command, fields)
        usage, stored, keyspace = self.usage, self.stored, self.keyspace
        assert usage is not None
        assert stored is not None
        keys, size = self._growth(fields) if command.stores else (0, 0)
        self._check_limits(command, keys, size)
        keys_before = len(keyspace.values) + len(keyspace.queues)
        size_before = keyspace.size - keyspace.parked
        result = call(*fields)
        if keyspace.incremental is None:
            keys = len(keyspace.values) + len(keyspace.queues) - keys_before
            size = keyspace.size - keyspace.parked - size_before
        usage.add(stored, keys, size)
        return result

    def _growth(self, fields: Fields) -> tuple[int, int]:
        """Return by how many keys and bytes a command may make the store grow, at most."""
        first = fields[0]
        pairs = first if isinstance(first, list) else [(first, *fields[1:])]
        keyspace = self.keyspace
        new: set[bytes] = set()
        size = 0
        for key, *values in pairs:
            if key not in new and key not in keyspace.values and key not in keyspace.queues:
                new.add(key)
                size += ENTRY_BYTES + len(key)
            for value in values:
                if isinstance(value, (bytes, bytearray)):
                    size += len(value)
        return len(new), size

    def _check_limits(self, command: Command, keys: int, size: int) -> None:
        access, usage = self.access, self.usage
        assert access is not None
        assert usage is not None
        for grown, held, most, what in (
            (keys, usage.keys, access.max_keys, "key"),
            (size, usage.bytes, access.max_bytes, "byte"),
        ):
            if most and grown and held + grown > most:
                raise NotAllowedError(
                    f"{command.name} would add {counted(grown, what)}; "
                    f"{held:,} of the {most:,} allowed for token {access.identity} are in use"
                )


def authentication_required(what: str, certificate: bool) -> str:
    """Return why something is refused to a peer that has not authenticated, by a token or else a certificate."""
    needed = "a client certificate" if certificate else "a token"
    return f"{what} requires {needed}, because the server was started with --require-auth"
