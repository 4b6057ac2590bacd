"""The server's end of a single link: one session, whose connection may break and be replaced by the next.

There are no frames: the bytes are the session's own, and both ends count them. Without I/O. It must not know how bytes
travel, what they mean, or what time it is.

Invariants: the session takes every byte of its client once and in order. Replies are kept, and counted in the budget,
until the client has acknowledged them. A session without a connection is offered no item of a queue, and its commands
that are under way go on.
"""

from math import inf
from typing import Final

from ..base.errors import BudgetError, PeerError, ProtocolError, counted
from ..session.budget import SESSION_BYTES, Holder
from ..session.server import ServerSession
from ..session.store import Store
from ..session.transport import Keeper, Transport
from ..session.unsent import Unsent
from ..wire.values import Framed, length
from .skipped_queues import SkippedQueues
from .work import LinkWork

SINGLE_BYTES: Final = SESSION_BYTES
"""Bytes counted for a single link, besides its session and what it keeps."""


_COPIED: Final = 1024
"""Pieces of fewer bytes are copied together: they are acknowledged soon."""

_MANY_PIECES: Final = 2048
"""With more pieces, longer ones are copied together too: acknowledging them must not take long."""

_COPIED_OF_MANY: Final = 4096

MOST_PIECES: Final = 8192
"""A link that would keep more pieces ends. Its session goes on, and ends with the connection."""


class _Kept(Holder):
    """A single link as the budget sees it: `backlog` has the replies that its client has not acknowledged."""

    def __init__(self, session: ServerSession) -> None:
        super().__init__()
        self.session = session

    def introduction_bytes(self) -> int:
        return 0

    def evict(self, error: BudgetError) -> None:
        self.session.evict(error)


class SingleLink(Keeper):
    """Keeps a session's replies until they are acknowledged, and stands for its connection while that is broken."""

    def __init__(self, registry: LinkWork, identity: bytes, secret: bytes, session: ServerSession) -> None:
        self.registry = registry
        self.identity = identity
        self.secret = secret
        self.session = session
        self.single = self
        self.carrier: Transport | None = None
        """The connection, if there is one."""
        self.received: int = 0
        """Bytes taken from the client since LINK."""
        self.sent: int = 0
        """Bytes of replies since then."""
        self.attempt: int = 0
        """The number of the last LINK that succeeded, if its client counts them."""
        self.over = False
        self._kept = _Kept(session)
        self._kept_bytes: int = 0
        self._skipped = SkippedQueues(registry)
        self._lost: float = 0.0
        self._stepping = False
        """Whether the registry will go on with the command that is under way."""
        registry.store.budget.enter(self._kept, SINGLE_BYTES)

    def __str__(self) -> str:
        return f"the session of {self.session}"

    # The connection

    def can_resume(self, taken: int) -> bool:
        """Return whether everything that the client has not received is still there."""
        return not self.over and self.sent - self._kept_bytes <= taken <= self.sent

    def attach(self, carrier: Transport, session: ServerSession) -> None:
        """Use a connection, whose own session has sent LINK: for a new link that is this one's session."""
        mine = self.session
        if session is not mine:
            self._take_over(carrier, session)
        self.carrier = carrier
        carrier.single = self
        self._skipped.connect()
        if session is not mine:
            if mine.out:
                self.flush()
            kept = self._kept.backlog
            if kept is not None:
                mine.unsent = self._kept_bytes
                carrier.send_again(kept.copies(), kept.taken)
            carrier.resumed()

    def _take_over(self, carrier: Transport, session: ServerSession) -> None:
        """Exchange sessions: that of the new connection ends, with the old connection if there is one."""
        mine = self.session
        old = self.carrier
        if old is None:
            session.leave()
        else:  # the server has not noticed yet that it is broken
            old.single = None
            old.session = session
            session.owner = old
            self._forget_unsent()
            session.evict(ProtocolError("its session continues on another connection"))
        self.registry.suspended.pop(self.identity, None)
        mine.host = session.host
        mine.port = session.port
        mine.owner = carrier
        carrier.session = mine
        mine.came_back()
        self._count_suspended(False)

    def detach(self) -> None:
        """Do without the connection, which is broken: wait for the next for as long as the grace period is."""
        carrier = self.carrier
        assert carrier is not None
        carrier.single = None
        self.carrier = None
        self._skipped.connected = False
        session = self.session
        session.owner = self
        self._forget_unsent()
        registry = self.registry
        self._lost = registry.time()
        registry.suspended[self.identity] = True
        self._count_suspended(True)
        if session in registry.store.hub.evicted or registry.stopping:
            self.end("")
            return
        registry.expect_ticks()
        self.step_later()

    def _count_suspended(self, suspended: bool) -> None:
        """Let the session count among those of its token that have no connection, or no longer."""
        usage = self.registry.store.hub.auth.usage_of(self.session)
        if usage is None:
            return
        if suspended:
            usage.suspended[self.identity] = None
        else:
            usage.suspended.pop(self.identity, None)

    def _forget_unsent(self) -> None:
        """The bytes that no kernel will accept any more are among those that are kept."""
        session = self.session
        if session.backlog is not None:
            session.backlog.release()
            session.backlog = None
        session.unsent = length(session.out)

    def awaited_since(self) -> float:
        return inf  # of its session, it is the transport only without a connection

    def skip_suspended(self, store: Store, queue: bytes) -> bool:
        return self._skipped.skip_suspended(store, queue)

    # Replies

    def keep(self, out: list[Framed]) -> None:
        """Keep replies that are about to be sent. May evict the session, which clears its `out`."""
        if self.over:
            return
        size = length(out)
        self.sent += size
        self._kept_bytes += size
        kept = self._kept
        if kept.backlog is None:
            kept.backlog = Unsent(self.registry.store.budget)
        elif len(out) == 1 and kept.backlog.add_short(out[0], _COPIED):
            return
        kept.backlog.add(out, 0, _COPIED if len(kept.backlog.pieces) < _MANY_PIECES else _COPIED_OF_MANY)
        if len(kept.backlog.pieces) > MOST_PIECES:
            self._give_up()
            return
        try:
            self.registry.store.budget.relieve(kept)
        except BudgetError as error:
            kept.evict(error)

    def _give_up(self) -> None:
        """End the link: its client acknowledges too little, or a reply has too many pieces."""
        carrier = self.carrier
        if carrier is None:
            self.session.evict(ProtocolError(f"more than {MOST_PIECES} replies have not been acknowledged"))
        else:
            self.forget()
            carrier.single = self  # it may still acknowledge

    def acknowledge(self, taken: int) -> None:
        """Drop the replies up to the byte that the client has received as the last one. Raises ProtocolError."""
        if self.over:
            return
        if not 0 <= taken <= self.sent:
            raise ProtocolError(f"the peer acknowledged {counted(taken, 'byte')}, but {self.sent} were sent")
        count = max(0, taken - self.sent + self._kept_bytes)  # one that is sent again says less than LINK did
        self._kept_bytes -= count
        kept = self._kept
        if kept.backlog is not None and kept.backlog.took(count):
            kept.backlog = None

    # Without a connection

    def flush(self) -> None:
        session = self.session
        out = list(session.out)
        session.out.clear()
        session.unsent = 0
        self.keep(out)

    def step_later(self) -> None:
        """Go on with the command that is under way, for which others may wait."""
        if self.session.running is not None and not self._stepping:
            self._stepping = True
            self.registry.step_later(self.step)

    def step(self) -> None:
        session = self.session
        self._stepping = False
        if self.over or self.carrier is not None or session.running is None:
            return
        try:
            session.receive(b"")
        except PeerError as error:
            self.end(str(error))
            return
        if session.out:
            self.flush()
        self.step_later()

    def close(self) -> None:
        self.end("")

    def tick(self, now: float) -> None:
        if now - self._lost >= self.registry.grace:
            self.end(f"it had no connection for {now - self._lost:.0f} s")

    # The end

    def abandon(self, session: ServerSession) -> None:
        """A connection that was to be used is gone, or did not take the reply to LINK: with it goes a new link."""
        if session is self.session:
            self.forget()

    def forget(self) -> None:
        """End the link; the session is then its connection's alone, and ends with it."""
        if self.over:
            return
        self.over = True
        self.single = None
        if self.carrier is not None:
            self.carrier.single = None
        registry = self.registry
        registry.suspended.pop(self.identity, None)
        self._count_suspended(False)
        registry.forget_single(self.identity)
        registry.store.budget.forget(self._kept, SINGLE_BYTES)

    def end(self, reason: str) -> None:
        """End the link and, if it has no connection, the session; `reason` is for the log, if there is one."""
        if self.over:
            return
        self.forget()
        if self.carrier is None:
            if reason and self.registry.on_end is not None:
                self.registry.on_end(self, reason)
            self.session.leave()
