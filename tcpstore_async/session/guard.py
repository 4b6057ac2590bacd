"""Checks every command of the sessions that have presented the same token, or none where one is required.

It knows what a token allows and what its holders have stored, as far as that is limited; it must not know tokens, or
how bytes travel.

Invariant: a command that is refused has changed nothing. A session without a guard pays nothing for there being one.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from ..auth.access import Access, show
from ..base.errors import NotAllowedError
from ..base.mypyc_shim import mypyc_attr
from ..keyspace.accounts import Account, Usage
from ..keyspace.keyspace import Keyspace
from ..keyspace.waiter_types import KeyList
from ..wire.codecs import Fields, Handler
from ..wire.commands import SERVER_KEY, Command
from ..wire.values import Framed
from .budget import Holder

_GET: Final = "get"


@mypyc_attr(allow_interpreted_subclasses=True)
class TokenUsage(Usage):
    """What the holders of a token have stored, and their connections."""

    def __init__(self, access: Access) -> None:
        super().__init__(access.identity, access.max_keys, access.max_bytes)
        self.max_sessions = access.max_sessions
        self.sessions: set[Holder] = set()
        self.suspended: OrderedDict[bytes, None] = OrderedDict()
        """Links of such sessions that lost their connection and may resume, in the order in which they lost it."""

    def unused(self) -> bool:
        return not (self.guards or self.sessions or self.keys or self.bytes)


class Guard:
    """Checks the commands of sessions with one token."""

    def __init__(
        self,
        keyspace: Keyspace,
        access: Access | None,
        account: Account | None,
        identity: Callable[[], Framed],
        refuse: Callable[[str], str],
        store: str | None = None,
    ) -> None:
        """Without `access`, nothing is allowed but to ask who the server is; `refuse` returns why something is not.

        What is stored counts for `account`, if given. `identity` returns the reply to a GET of the server's identity.
        `store` is the name of the store that the sessions are in; None for the one without a name.
        """
        self.store = store
        self.keyspace = keyspace
        self.access = access
        self.account = account
        self.identity = identity
        self.refuse = refuse
        self.sessions: int = 0
        """How many sessions it checks."""
        self.ended: str = ""
        """Why the token is no longer valid; empty while it is."""

    def wrap(self, command: Command, call: Handler) -> Handler:
        """Return a function that executes a command if it is allowed. Raises NotAllowedError if not."""
        counted = call if self.account is None else self._counted(command, call, self.account)
        if command.method == _GET:
            return lambda key: self._get(command, counted, key)
        return lambda *fields: self._checked(command, counted, fields)

    def wrap_shared(self, command: Command, call: Handler) -> Handler:
        """Do the same for a function that takes a list of keys which many send."""
        counted = call if self.account is None else self._counted(command, call, self.account)
        return lambda listed: self._listed(command, counted, listed)

    def check(self, command: Command, fields: Fields) -> None:
        """Raise NotAllowedError if a command is not allowed."""
        access = self.access
        if self.ended:
            refusal = self.ended
        elif access is not None:
            refusal = access.refusal(command, fields, self.store)
        else:
            other = [key for key in command.request.keys(fields) if key != SERVER_KEY]
            what = f"{command.name} of {show(other[0])}" if other else ""
            refusal = self.refuse(what) if other else ""
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
            return self.keyspace.clock.ask(self.identity)
        self.check(command, (key,))
        return call(key)

    def _counted(self, command: Command, call: Handler, account: Account) -> Handler:
        """Return a function that executes a command, and counts for an account what the store grows or shrinks by."""
        keyspace = self.keyspace

        def execute(*fields: Any) -> Any:
            account.usage.command = command.name
            before = keyspace.charge(account)
            try:
                return call(*fields)
            finally:
                keyspace.charge(before)
                if keyspace.running is not None:
                    keyspace.running.account = account

        return execute
