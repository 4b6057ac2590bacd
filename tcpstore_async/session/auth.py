"""Authentication: who has presented which token, or a certificate, and the guards before their commands.

`Auth` is of a server, `Guards` of one store. Neither knows tokens or how bytes travel: `Auth.authenticate` does.

Invariants: a session that has to authenticate executes nothing but what is allowed to everybody. What is counted for a
token is kept while anything of its holders is stored or connected.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

from ..auth.access import Access
from ..base.addresses import is_loopback
from ..base.clock import Clock
from ..base.errors import NotAllowedError, counted
from ..keyspace.accounts import Account
from ..wire.commands import FIRST, SERVER_KEY, Command
from ..wire.values import Framed, pack, unpack
from .guard import Guard, TokenUsage
from .identity import (
    CERTIFICATE,
    CROWDED,
    REFUSED,
    TOKEN,
    auth_refusal,
    auth_reply,
    decode_identity,
    encode_identity,
    with_access,
    with_elsewhere,
    with_requirement,
)
from .key_list_cache import SharedKeys
from .peer import Peer
from .slots import Slot
from .table import Commands, Table

REMOTE: Final = "remote"
ALL: Final = "all"
"""Which sessions must authenticate: those from other hosts, or all."""

_STANDING_BY: Final = ("get", "check", "auth", "link")
"""Commands that a server answers which stands by. Not PING: PyTorch's client connects again until that is answered."""


class Auth:
    """Who has authenticated at one server."""

    def __init__(self, commands: Commands, clock: Clock) -> None:
        self.commands = commands
        self.clock = clock
        self.authenticate: Callable[[bytes], Access | str] | None = None
        """Returns what a token allows, or why it is refused; None if this server has no keys to check tokens with."""
        self.require_auth: str = ""
        """Which sessions must present a token or certificate: `REMOTE`, `ALL`, or none if empty."""
        self.elsewhere: str | None = None
        """None unless this server stands by, and executes nothing: then the address of the one that serves, if any."""
        self.granted: dict[Peer, Access | None] = {}
        """Sessions that have authenticated, and what they may do; None for everything."""
        self.usage: dict[str, TokenUsage] = {}
        """What is counted for tokens with limits, by their id."""
        commands.register("auth", lambda store: self.present)

    def present(self, session: Peer, token: Framed) -> Framed:
        """Execute AUTH. Raises NotAllowedError if the token is refused, behind the reply that says so."""
        status = REFUSED
        found: Access | str = "the server has no keys to check tokens with; connect without a token"
        given = unpack(token)
        self.clock.hidden(given)
        if self.authenticate is not None:
            found = self.clock.ask(partial(self.authenticate, given))
        if isinstance(found, Access):
            if found.store and "enter" not in self.commands.features:
                found = f"token {found.identity} is only for the store {found.store!r}, which this server does not have"
            elif self.granted.get(session) != found:
                status = CROWDED
                found = self.crowded(found) or found
        if isinstance(found, str):
            reply = pack(auth_refusal(status, found))
            session.out.append(reply)
            session.unsent += len(reply)
            raise NotAllowedError(found)
        session.grant_access(found)
        return pack(auth_reply(found, self.clock.ask(session.refused_before)))

    def access_of(self, session: Peer) -> Access | None:
        """Return what the token of a session allows; None if it has none, or may do everything."""
        granted = self.granted
        return granted.get(session) if granted else None

    def must_authenticate(self, session: Peer) -> bool:
        """Return whether a session may do nothing yet."""
        if not self.require_auth or session in self.granted or session.shares_connection():
            return False  # one on a link may do what the link's connection may
        return self.require_auth == ALL or not is_loopback(session.host)

    def is_limited(self, session: Peer) -> bool:
        """Return whether only what `allows` says is executed for a session."""
        return self.elsewhere is not None or self.must_authenticate(session)

    def allows(self, command: Command) -> bool:
        """Return whether a command is executed for a session that is limited, of keys to the identity only."""
        if self.elsewhere is not None:
            return command.method in _STANDING_BY
        return command.flags & FIRST != 0

    def refuse(self, what: str) -> str:
        """Return why something is refused to a peer that has not authenticated, or by a server that stands by."""
        if self.elsewhere is not None:
            return f"{what} is not executed, as this server stands by; {self.elsewhere or 'no server'} serves"
        needed = "a client certificate" if self.authenticate is None else "a token"
        return f"{what} requires {needed}, because the server was started with --require-auth"

    def identity_of(self, own: Framed) -> Framed:
        """Return this server's identity as such a peer sees it."""
        identity = decode_identity(unpack(own))
        if self.elsewhere is not None:
            return pack(encode_identity(with_elsewhere(identity, self.elsewhere)))
        return pack(encode_identity(with_requirement(identity, CERTIFICATE if self.authenticate is None else TOKEN)))

    def crowded(self, access: Access | None) -> str:
        """Return why there may be no further session with this token; empty if there may.

        Those without a connection do not keep others out: see `LinkRegistry.make_way`.
        """
        usage = None if access is None else self.usage.get(access.identity)
        connected = 0 if usage is None else len(usage.sessions) - len(usage.suspended)
        if access is None or not 0 < access.max_sessions <= connected:
            return ""
        return f"token {access.identity} already has {counted(connected, 'session')} (max {access.max_sessions})"

    def usage_of(self, session: Peer) -> TokenUsage | None:
        """Return what is counted for the token of a session, if that is limited."""
        access = self.access_of(session)
        return None if access is None else self.usage.get(access.identity)

    def forget_unused(self, usage: TokenUsage) -> None:
        """Forget a token that counts nothing."""
        if usage.unused():
            self.usage.pop(usage.identity, None)


class Guards:
    """The guards of one store, and the tables that they stand before."""

    def __init__(self, auth: Auth, table: Table) -> None:
        self.auth = auth
        self.table = table
        self.accounts: dict[str, Account] = {}
        """What the holders of tokens with limits have stored here, by the token's id. Not of the root."""
        self.guarded: dict[Access | None, tuple[Guard, list[Slot | None]]] = {}
        """None: of sessions that have to authenticate."""

    def grant(self, session: Peer, access: Access | None) -> None:
        """Let a session do what `access` allows from now on; None allows everything."""
        self.revoke(session)
        self.auth.granted[session] = access
        if access is not None:
            self.guard(access)[0].sessions += 1
            if access.limited():
                self.auth.usage[access.identity].sessions.add(session)

    def expect(self, access: Access, ended: str) -> None:
        """Expect a session of this token from another store; `ended` says why the token is not valid any more, or "".

        To be called before it leaves that one, so that what is counted for the token is not forgotten in between.
        """
        self.guard(access)[0].ended = ended

    def revoke(self, session: Peer) -> None:
        """Forget what a session was allowed: it has gone, or is about to be allowed something else."""
        access = self.auth.granted.pop(session, None)
        if access is None:
            return
        usage = self.auth.usage.get(access.identity)
        if usage is not None:
            usage.sessions.discard(session)
        guard = self.guarded[access][0]
        guard.sessions -= 1
        if not guard.sessions:
            del self.guarded[access]
            if usage is not None:
                usage.guards -= 1
                self.auth.forget_unused(usage)

    def end_invalid(self, ended: Callable[[Access], str]) -> bool:
        """Refuse all commands of sessions whose token is no longer valid; return whether there are any.

        `ended` returns why that is so, or nothing.
        """
        invalid = False
        for access, (guard, _) in self.guarded.items():
            guard.ended = "" if access is None else ended(access)
            invalid = invalid or guard.ended != ""
        return invalid

    def why_ended(self, session: Peer) -> str:
        """Return why the token of a session is no longer valid; empty if it is, or has none."""
        access = self.auth.access_of(session)
        found = None if access is None else self.guarded.get(access)
        return "" if found is None else found[0].ended

    def account_of(self, session: Peer) -> Account | None:
        """Return what is counted in this store for the token of a session, if that is limited."""
        access = self.auth.access_of(session)
        found = None if access is None else self.guarded.get(access)
        return None if found is None else found[0].account

    def table_of(self, session: Peer) -> list[Slot | None]:
        """Return the table of a session that has sent VALIDATE."""
        auth = self.auth
        if session in auth.granted and auth.elsewhere is None:
            access = auth.granted[session]
            return self.table.commands if access is None else self.guard(access)[1]
        return self.guard(None)[1] if auth.is_limited(session) else self.table.commands

    def slot(self, session: Peer, opcode: int) -> Slot | None:
        """Return how a command of a session is executed that has sent VALIDATE; None if it is not."""
        if session.table is self.table.commands:
            return self.table.slot(opcode)
        access = None if self.auth.elsewhere is not None else self.auth.granted.get(session)
        found = self.guarded.get(access)
        if found is None or found[1] is not session.table:
            return None  # it has not sent VALIDATE, or is evicted
        slot = self.table.slot(opcode)
        if slot is None or (access is None and not self.auth.allows(slot.command)):
            return None
        guarded = found[1][opcode] = self._guarded_slot(found[0], slot)
        return guarded

    def all_slots(self) -> list[Slot]:
        """Return the slots that there are."""
        return [slot for _, table in self.guarded.values() for slot in table if slot is not None]

    def clear(self) -> None:
        """Forget all guards, and the store, which has ended."""
        self.guarded.clear()
        self.table = self.table.root

    def guard(self, access: Access | None) -> tuple[Guard, list[Slot | None]]:
        found = self.guarded.get(access)
        if found is not None:
            return found
        auth, keyspace, name = self.auth, self.table.keyspace, self.table.name
        own = keyspace.reserved.get(SERVER_KEY, pack(b"{}"))
        identity: Callable[[], Framed] = partial(auth.identity_of, own)
        account: Account | None = None
        if access is not None:
            seen = pack(encode_identity(with_access(decode_identity(unpack(own)), access)))
            identity = lambda: seen  # noqa: E731
            if access.limited():
                usage = auth.usage.setdefault(access.identity, TokenUsage(access))
                usage.guards += 1
                account = self._account(usage)
        guard = Guard(keyspace, access, account, identity, auth.refuse, name or None)
        table: list[Slot | None] = [None] * 256
        self.guarded[access] = guard, table
        return guard, table

    def _guarded_slot(self, guard: Guard, slot: Slot) -> Slot:
        command, table = slot.command, self.table
        guarded = Slot(command, guard.wrap(command, slot.executing()), slot.tally)
        if isinstance(slot.request, SharedKeys):
            guarded.request = SharedKeys(table.key_lists, guard.wrap_shared(command, slot.executing_shared()))
        if table.shared.watchers:
            guarded.watch(table.note)
        return guarded

    def _account(self, usage: TokenUsage) -> Account:
        """Return what the holders of a token have stored here."""
        if not self.table.name:
            return usage.nameless
        account = self.accounts.get(usage.identity)
        if account is None or account.usage is not usage:  # the token was forgotten, as there was nothing to count
            account = self.accounts[usage.identity] = Account(usage)
        return account
