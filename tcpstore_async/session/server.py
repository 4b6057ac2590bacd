"""The server's side of a connection, without I/O: bytes in, commands executed, replies out.

A `ServerSession` decodes requests, executes them by the table of its store, and encodes replies. It must not know how
bytes travel, what time it is, or what the commands do.

Invariants: commands and replies do not depend on how bytes are cut into chunks. A command is executed once, when it is
complete. Whatever arrives, a session replies or raises PeerError; after an error, call `leave` and drop it.
"""

from math import inf
from typing import Any, Final

from ..auth.access import Access
from ..base.addresses import format_address
from ..base.errors import BudgetError, LimitError, NotAllowedError, PeerError, ProtocolError
from ..base.mypyc_shim import mypyc_attr
from ..keyspace.accounts import Account
from ..keyspace.keyspace import Keyspace
from ..keyspace.steps import IncrementalCommand, ReplyInPieces
from ..keyspace.waiter_types import Handoff
from ..keyspace.waiters import PostponedCommands
from ..wire.codecs import STOP_WAITING, LargeValue, PartialRequest, encode_popped
from ..wire.commands import BY_OPCODE, MAGIC
from ..wire.values import Framed, Value, length
from .budget import SESSION_BYTES, StoreShare
from .guard import authentication_required
from .observer import NEVER
from .peer import NO_PID, Introduction, Peer
from .slots import NO_COMMANDS, Slot
from .store import Store
from .tls import HANDSHAKE, MISMATCH
from .unsent import Unsent

_WOKEN: Final = bytes([STOP_WAITING])

_BUFFER_BYTES: Final = 64
"""Bytes counted for an input buffer, besides its contents."""

_MOST_BEFORE_AUTH: Final = 8192
"""Bytes of incomplete requests that are kept for a session that has to authenticate: more than any it may send."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Transport:
    """What moves a session's bytes, as far as sessions and servers know it."""

    def __init__(self, engine: Store, host: str, port: int, connected_at: float) -> None:
        self.single: Keeper | None = None
        """What keeps the session when the connection breaks."""
        self.session: ServerSession = ServerSession(engine, self, host, port, connected_at)

    def flush(self) -> None:
        """Send the session's replies, as far as its peer takes them."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connection and take back what its session was offered. Idempotent."""
        raise NotImplementedError

    def finish(self) -> None:
        """Read no more, and close once the peer has been sent the replies that are unsent."""
        self.close()

    def leave(self, broken: bool) -> None:
        """The connection has ended. If it is broken and there is a single link, that keeps the session."""
        link = self.single
        if link is not None and broken and not link.over:
            link.detach()
            return
        if link is not None:
            link.forget()
            self.single = None
        self.session.leave()

    def send_again(self, replies: list[Framed], taken: int) -> None:
        """Send replies without their first `taken` bytes; they are counted as unsent, and nothing is ahead of them."""
        raise NotImplementedError

    def resumed(self) -> None:
        """Go on soon with what the session, which comes from another connection, has kept back."""
        raise NotImplementedError

    def wake(self, reply: bytes) -> bool:
        """Send the reply that ends a wait, if that costs less than to flush it later and nothing is ahead of it.

        Returns whether it is sent. This must not fail.
        """
        return False

    def pass_over(self, engine: Store, queue: bytes) -> bool:
        """See `Waiter.pass_over`."""
        return False

    def awaited_since(self) -> float:
        """Return since when the peer could send VALIDATE, in seconds of the server's clock; infinite if it cannot."""
        return self.session.connected_at

    def shares_connection(self) -> bool:
        """Return whether there are other sessions on the same connection, and closing this one leaves it open."""
        return False

    def refused_before(self) -> str:
        """Return why another connection of the same process and token has just been closed; empty if none was."""
        return ""

    def in_handshake(self) -> bool:
        """Return whether the peer has begun a TLS handshake, or has to, and has not finished it."""
        return False


class Keeper(Transport):
    """A single link, as connections know it: keeps replies until they are acknowledged, and the session meanwhile."""

    over: bool
    received: int
    """Bytes taken from the client since LINK."""

    def keep(self, out: list[Framed]) -> None:
        """Keep replies that are about to be sent. May evict the session, which clears its `out`."""
        raise NotImplementedError

    def detach(self) -> None:
        """Do without the connection, which is broken: wait for the next for as long as the grace period is."""
        raise NotImplementedError

    def forget(self) -> None:
        """End the link; the session is then its connection's alone, and ends with it."""
        raise NotImplementedError


class ServerSession(Peer):
    """One connection: its incomplete request, its replies, and what is known about its peer."""

    def __init__(self, engine: Store, owner: object, host: str, port: int, connected_at: float) -> None:
        super().__init__(owner, host, port, connected_at, engine.handshake, engine.first)
        self.engine = engine
        hub = engine.hub
        (hub.unvalidated_on_links if self.shares_connection() else hub.unvalidated)[self] = True
        engine.budget.enter(self, self._base_bytes())
        self._relieve()

    def __str__(self) -> str:
        address = format_address(self.host, self.port)
        known = {} if self.pid == NO_PID else {"pid": str(self.pid)}
        known.update(self.peer)
        granted = self.engine.hub.auth.granted
        access = granted.get(self) if granted else None
        if access is not None:
            known["token"] = access.identity
        return f"{address} ({', '.join(f'{name} {text}' for name, text in known.items())})" if known else address

    # Input

    def receive(self, chunk: bytes) -> None:
        """Take bytes, execute the commands that are complete, and put their replies into `out`.

        Stops while more than `Limits.unsent_high_water` bytes of replies are unsent, and after each step of a long
        command; see `stalled`. Raises PeerError.
        """
        # What rarely happens is in methods of its own: compiled, the common path then takes fewer cache lines.
        if self.input_buffer is not None:
            joined = self._join_kept(chunk)
            if joined is None:
                return
            chunk = joined
        engine = self.engine
        keyspace = engine.keyspace
        budget = engine.budget
        if keyspace is not budget.keyspace:
            budget.switch(engine.share)
        elif keyspace.size != budget.seen:
            budget.attribute()
        engine.serving = self
        if engine.observer is not None:
            self.heard_at = engine.observer.now
        limits = engine.limits
        high_water = limits.unsent_high_water
        out = self.out
        end = len(chunk)
        at = held = 0
        if (keyspace.working or self.incremental is not None) and not self._finish_before(engine, chunk):
            return
        if self.unsent > high_water:
            self._stall(chunk, 0)
            return
        while at < end or self.partial is not None:
            if keyspace.working and keyspace.postpones(self):
                self.incremental = PostponedCommands(keyspace, self)
                self._keep_for_incremental(chunk, at)
                return
            handoff = self.handoff
            partial = self.partial
            if partial is None:
                slot = self.table[chunk[at]]
                if slot is None:
                    slot = self._missing(chunk[at])
                self.slot = slot
                result, stop = slot.request.decode(slot.call, chunk, at + 1, end, limits)
            else:
                slot = self.slot
                held = self.held
                result, stop = self._decode_more(partial, chunk, at)
                if stop == 0 and result is partial:  # a link stopped early, within its first frame
                    self._stall(chunk, 0)
                    return
            if stop < 0:
                self._suspend(result, chunk, at, -stop)
                return
            at = stop
            slot.tally.count += 1
            if keyspace.working and not keyspace.postpones(self):  # it may have woken itself
                keyspace.resolve(self)
            if keyspace.incremental is not None:
                if not self._begin_steps(keyspace, handoff, chunk, at, at if partial is None else max(held, at)):
                    return
                continue
            if slot.encode is not None:
                result = slot.encode(result)
            if result:
                if slot.in_pieces:
                    self._add_pieces(result)
                else:
                    out.append(result)
                    self.unsent += len(result)
            if handoff is not None:
                engine.keyspace.end_handoff(self, handoff)
            if self.unsent > high_water:
                self._stall(chunk, at)
                return
        if self.held:
            self._account()

    def _join_kept(self, chunk: bytes) -> bytes | None:
        """Return the bytes that were kept and those that follow; None if they do not suffice, and are kept too."""
        kept = self.input_buffer
        assert kept is not None
        if len(kept) + len(chunk) < self.need:
            kept += chunk
            self._account()
            return None
        self.input_buffer = None
        return b"".join([kept, chunk])

    def _finish_before(self, engine: Store, chunk: bytes) -> bool:
        """Do what has to precede the next command: work that concerns this session, and the rest of the last command.

        Returns whether commands follow now; if not, `chunk` has been dealt with.
        """
        keyspace = engine.keyspace
        if keyspace.working and not keyspace.postpones(self):
            keyspace.resolve(self)
            if self.engine is not engine:  # it has been let into another store
                self.receive(chunk)
                return False
        if self.incremental is not None:
            if keyspace.postpones(self) or not self._go_on():
                self._keep_for_incremental(chunk, 0)
                return False
            if self.engine is not engine:  # ENTER: what follows is for another store
                if chunk:
                    self._keep_for_incremental(chunk, 0)
                return False
        return True

    def _decode_more(self, partial: PartialRequest, chunk: bytes, at: int) -> tuple[Any, int]:
        """Decode more of a request, and execute it if it is complete. Returns what `PartialRequest.decode` does."""
        if self.held:
            self._count_held(0)  # executing the command may move what it holds to the store
        result, stop = partial.decode(self.slot.call, chunk, at, len(chunk), self.engine.limits)
        if self.partial is partial and not partial.endless:  # LINK replaces it
            self.partial = None
        return result, stop

    def _begin_steps(self, keyspace: Keyspace, handoff: Handoff | None, chunk: bytes, at: int, size: int) -> bool:
        """Begin with the rest of a command that is carried out in steps, whose request has `size` bytes.

        Returns whether it is done, so that others follow now; if not, the rest of `chunk` is held back.
        """
        self._take_incremental(size)
        if handoff is not None:
            keyspace.end_handoff(self, handoff)
        if not isinstance(self.incremental, ReplyInPieces) or not self._go_on():
            self._keep_for_incremental(chunk, at)
            return False
        if self.unsent > self.engine.limits.unsent_high_water:
            self._stall(chunk, at)
            return False
        return True

    def _add_pieces(self, pieces: list[Framed]) -> None:
        """Add a reply in pieces. Raises LimitError."""
        size = length(pieces)
        self.check_reply_size(size)
        self.out.extend(pieces)
        self.unsent += size

    def large_value(self) -> LargeValue | None:
        """Return the large value under way, if any.

        Instead of reading, the server may receive into its `free_space`, report that to `fill`, and call
        `receive(b"")`.
        """
        partial = self.partial
        return partial if isinstance(partial, LargeValue) and self.input_buffer is None else None

    def stalled(self) -> bool:
        """Whether requests are held back until replies have been sent; `receive(b"")` goes on with them.

        While a command is `incremental`, `receive(b"")` goes on whatever is unsent.
        """
        return self.input_buffer is not None and self.need == 0

    def hold_back(self, chunk: bytes) -> None:
        """Keep bytes that arrive while this is `stalled`. Raises BudgetError."""
        kept = self.input_buffer
        assert kept is not None
        kept += chunk
        self._account()

    def leave(self) -> None:
        engine = self.engine
        engine.activate()
        if engine.observer is not None:
            engine.observer.leaves(self)
        keyspace = engine.keyspace
        before = keyspace.charge(self.account())
        keyspace.leave(self)
        keyspace.charge(before)
        self._let_go()
        hub = engine.hub
        if hub.auth.granted:  # not before, so that what goes back to the store is counted
            engine.guards.revoke(self)
        if hub.evicted:
            hub.evicted.pop(self, None)
        if hub.on_leave is not None:
            hub.on_leave(self)
        self.owner = None

    def share(self) -> StoreShare:
        return self.engine.share

    def account(self) -> Account | None:
        return self.engine.guards.account_of(self)

    def evict(self, error: PeerError) -> None:
        hub = self.engine.hub
        hub.evicted[self] = error
        self.table = NO_COMMANDS
        self._let_go()
        hub.pending_flush.append(self)

    def keep_unsent(self, replies: list[Framed], taken: int) -> None:
        """Queue replies of which the kernel has accepted the first `taken` bytes, behind those that are queued."""
        hub = self.engine.hub
        if self in hub.evicted:
            return
        if hub.auth.must_authenticate(self):
            self.evict(self._stranger("not reading its replies"))
            return
        if self.backlog is None:
            self.backlog = Unsent(self.engine.budget)
        self.backlog.add(replies, taken)
        self._relieve()

    def _let_go(self) -> None:
        """Release everything but what the keyspace holds."""
        engine = self.engine
        self._expect_nothing()
        engine.budget.unfinished -= self.held
        engine.budget.forget(self, self._base_bytes())
        if self.partial is not None:
            engine.keyspace.free_later(self.partial.items)
            self.partial.abandon()
            self.partial = None
        self.input_buffer = None
        self.out.clear()
        self.unsent = 0
        if self.incremental is not None:
            self.incremental.abandon()
            self.incremental = None

    def _expect_nothing(self) -> None:
        """Await VALIDATE, and authentication, no more."""
        hub = self.engine.hub
        if self in hub.unvalidated:
            del hub.unvalidated[self]  # compiled, `pop` costs twice as much
        elif hub.unvalidated_on_links:
            hub.unvalidated_on_links.pop(self, False)

    def shares_connection(self) -> bool:
        owner = self.owner
        return isinstance(owner, Transport) and owner.shares_connection()

    def awaited_since(self) -> float:
        owner = self.owner
        return owner.awaited_since() if isinstance(owner, Transport) else inf

    def refused_before(self) -> str:
        owner = self.owner
        return owner.refused_before() if isinstance(owner, Transport) else ""

    def why_ended(self) -> str:
        return self.engine.guards.why_ended(self)

    def _base_bytes(self) -> int:
        """Return the bytes counted for the session and its connection."""
        return SESSION_BYTES if self.shares_connection() else self.engine.budget.session_bytes

    def _relieve(self) -> None:
        """Have the budget evict a peer, perhaps this one, if too much is held now."""
        try:
            self.engine.budget.relieve(self)
        except BudgetError as error:
            self.evict(error)

    def _take_incremental(self, size: int) -> None:
        """Take over the rest of the command that was just called, whose request has so many bytes."""
        keyspace = self.engine.keyspace
        incremental = keyspace.incremental
        keyspace.incremental = None
        self.incremental = incremental
        if incremental is not None and incremental.keeps:
            incremental.held = size

    def _keep_for_incremental(self, chunk: bytes, at: int) -> None:
        """Hold back what follows a command that is not done."""
        self.need = 0
        self.input_buffer = bytearray(memoryview(chunk)[at:])
        self._account()

    def _go_on(self) -> bool:
        """Do the next step of the last command. True if that was all; its reply is in `out` then."""
        incremental = self.incremental
        assert incremental is not None
        keyspace = self.engine.keyspace
        account = incremental.account
        done = incremental.step(keyspace.portion) if account is None else self._step_counted(incremental, account)
        if incremental.parts:
            self.out.extend(incremental.parts)
            self.unsent += length(incremental.parts)
            incremental.parts = []
        if not done:
            return False
        if keyspace.incremental is not None:
            self._take_incremental(0)
            return False
        self.incremental = None
        slot = self.slot
        result = incremental.result
        if slot.encode is not None and not isinstance(result, list):
            result = slot.encode(result)
        if isinstance(result, list):
            self._add_pieces(result)
        elif result:
            self.out.append(result)
            self.unsent += len(result)
        self.out.extend(incremental.behind)
        self.unsent += length(incremental.behind)
        return True

    def _step_counted(self, incremental: IncrementalCommand, account: Account) -> bool:
        """Do the next step of a command whose effects are counted."""
        keyspace = self.engine.keyspace
        account.usage.command = self.slot.command.name
        before = keyspace.charge(account)
        try:
            return incremental.step(keyspace.portion)
        finally:
            keyspace.charge(before)
            if keyspace.incremental is not None:
                keyspace.incremental.account = account

    def _stall(self, chunk: bytes, at: int) -> None:
        """Hold back requests, as the peer reads its replies too slowly."""
        self._keep(chunk, at, 0)

    def check_reply_size(self, size: int) -> None:
        """Raise LimitError for a reply of more bytes than the whole budget."""
        most = self.engine.limits.budget_bytes
        if size > most:
            raise LimitError("budget_bytes", size, most)

    def _suspend(self, partial: PartialRequest | None, chunk: bytes, at: int, need: int) -> None:
        """Keep what an incomplete request needs to go on."""
        if partial is not None:
            self.partial = partial
            at = partial.at
            before = partial.before
            if before:
                partial.before = b""
                chunk = before + chunk[at:]
                need += len(before) - at
                at = 0
        self._keep(chunk, at, need - at)

    def _keep(self, chunk: bytes, at: int, need: int) -> None:
        self.need = need
        if at < len(chunk):
            self.input_buffer = bytearray(memoryview(chunk)[at:])
        self._account()

    def _account(self) -> None:
        """Count what is held of unfinished requests. Raises LimitError."""
        held = 0 if self.input_buffer is None else _BUFFER_BYTES + len(self.input_buffer)
        if self.partial is not None:
            held += self.partial.held()
        if self.incremental is not None:
            held += self.incremental.held
        if held != self.held:
            if held > _MOST_BEFORE_AUTH and self.engine.hub.auth.must_authenticate(self):
                raise self._stranger(f"{self.slot.command.name} with more than {_MOST_BEFORE_AUTH} bytes")
            self._count_held(held)
            self.engine.budget.relieve(self)

    def _count_held(self, held: int) -> None:
        engine = self.engine
        growth = held - self.held
        self.held = held
        engine.budget.unfinished += growth
        engine.budget.charge(growth)

    def _missing(self, opcode: int) -> Slot:
        """Return how a command is executed for which the table has nothing. Raises PeerError."""
        slot = self.engine.guards.slot(self, opcode)
        if slot is None:
            raise self._refusal(opcode)
        return slot

    def _refusal(self, opcode: int) -> PeerError:
        engine = self.engine
        if self.table is engine.handshake:
            if opcode == HANDSHAKE:
                self._alert()
                return ProtocolError("it began a TLS handshake, but this server does not use TLS")
            return ProtocolError(f"first frame has opcode {opcode}, expected VALIDATE")
        if self.table is NO_COMMANDS:
            return ProtocolError(f"opcode {opcode} from an evicted session")
        command = BY_OPCODE[opcode]
        if command is not None and engine.hub.auth.must_authenticate(self):
            return self._stranger(command.name)
        return ProtocolError(f"unknown opcode {opcode}")

    def plain_refused(self) -> NotAllowedError:
        """Return the error of a session whose peer does not use TLS, and has to; tell the peer."""
        self._alert()
        return NotAllowedError(
            "it uses plain TCP, but the server was started with --require-tls; use tcps://, or a relay"
        )

    def _alert(self) -> None:
        """Tell the peer that it uses TLS and the server does not, or the other way round."""
        self.out.append(MISMATCH)
        self.unsent += len(MISMATCH)

    def _stranger(self, what: str) -> NotAllowedError:
        """Return the error of a session that has not authenticated, and has to."""
        return NotAllowedError(authentication_required(what, self.engine.hub.auth.authenticate is None))

    def expected(self) -> str:
        return "VALIDATE" if self.table is self.engine.handshake else "AUTH"

    # Commands that concern the connection

    def validate(self, magic: int) -> None:
        if magic != MAGIC:
            raise ProtocolError(f"VALIDATE carries {magic:#x}, expected {MAGIC:#x}")
        engine = self.engine
        auth = engine.hub.auth
        if auth.granted or auth.require_auth:
            self.table = engine.guards.table_of(self)
            if auth.must_authenticate(self):
                return
        else:
            self.table = engine.commands
        self._expect_nothing()

    def grant_access(self, access: Access | None) -> None:
        engine = self.engine
        if self.table is NO_COMMANDS:
            return
        engine.guards.grant(self, access)
        if self.table is not engine.handshake:
            self.table = engine.guards.table_of(self)
            self._expect_nothing()

    def certify(self) -> None:
        """The peer has shown a certificate that the server demands, which allows everything unless tokens decide."""
        if self.engine.hub.auth.authenticate is None:
            self.grant_access(None)

    def describe(self, peer: Introduction) -> None:
        """Keep what a relay says of the peer, unless the peer has said it itself."""
        if not self.peer and self.table is not NO_COMMANDS:
            self.peer = peer
            self.engine.budget.charge(self.introduction_bytes())
            self._relieve()

    def put_into(self, engine: Store) -> None:
        """Go on in another store. What the session has written in the one before is nobody's share any more."""
        before = self.engine
        self.heard_at = NEVER
        authenticated = before.hub.auth.granted
        granted = self in authenticated
        access = authenticated.get(self)
        if granted:
            if access is not None:
                engine.guards.expect(access, before.guards.why_ended(self))
            before.guards.revoke(self)
        self.engine = engine
        self.stored = 0.0
        before.serving = None
        if granted:
            engine.guards.grant(self, access)
        self.table = engine.guards.table_of(self)

    def came_back(self) -> None:
        """Its link has a connection again."""
        on_return = self.engine.hub.on_return
        if on_return is not None:
            on_return(self)

    # Output

    def pass_over(self, queue: bytes) -> bool:
        owner = self.owner
        return isinstance(owner, Transport) and owner.pass_over(self.engine, queue)

    def fire(self, value: Value | None) -> None:
        """Send the end of a wait, whatever is unsent: one value at most, which must not fail another's command."""
        if self.incremental is not None and self.incremental.determined:
            behind = self.incremental.behind
            behind.extend([_WOKEN] if value is None else value if isinstance(value, list) else [value])
            return
        if value is None:
            owner = self.owner
            if isinstance(owner, Transport) and owner.wake(_WOKEN):
                return
            self.out.append(_WOKEN)
            self.unsent += 1
        elif isinstance(value, list):
            self.out.extend(value)
            self.unsent += length(value)
        else:
            self.out.append(value)
            self.unsent += len(value)
        self.engine.hub.pending_flush.append(self)

    def grant(self, length: int, item: Framed | None) -> None:
        """Send the end of a wait for an item."""
        pieces = encode_popped((length, item))
        if self.incremental is not None and self.incremental.determined:
            self.incremental.behind.extend(pieces)
            return
        self.out.extend(pieces)
        self.unsent += sum(map(len, pieces))
        self.engine.hub.pending_flush.append(self)


def latecomers(sessions: list[ServerSession], complete: float) -> list[ServerSession]:
    """Return the sessions connected after the world was complete: they belong to the next round.

    A peer that was connected before, judged by host and process, keeps its later connections too.
    """
    early = {(one.host, one.pid) for one in sessions if one.connected_at <= complete and one.pid != NO_PID}
    return [one for one in sessions if one.connected_at > complete and (one.host, one.pid) not in early]
