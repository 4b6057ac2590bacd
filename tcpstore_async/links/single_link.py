"""The server's end of a single link: one session, whose connection may break and be replaced.

There are no frames: the bytes are the session's own, and both ends count them. Without I/O. It must not know how bytes
travel, what they mean, or what time it is.

Invariants: the session takes every byte of its client once and in order. Replies are kept, and counted in the budget,
until the client has acknowledged them. A session without a connection is offered no item of a queue, and its commands
under way continue.
"""

from math import inf
from typing import Final

from ..base.errors import BudgetError, PeerError, ProtocolError
from ..session.budget import SESSION_BYTES
from ..session.server import ServerSession
from ..session.store import Store
from ..session.transport import Keeper, Transport
from ..wire.values import Framed, length
from .carrier import Carrier
from .resume import Resumable
from .work import LinkWork

SINGLE_BYTES: Final = SESSION_BYTES
"""Bytes counted for a single link, besides its session and unacknowledged replies."""

MOST_PIECES: Final = 8192
"""A link that would keep more pieces ends. Its session then ends with the connection."""


class SingleLink(Keeper):
    """Keeps a session's replies until they are acknowledged, and replaces its connection while that is broken."""

    def __init__(self, registry: LinkWork, identity: bytes, secret: bytes, session: ServerSession) -> None:
        self.registry = registry
        self.session = session
        self.single = self
        self.connection: Transport | None = None
        """None while it is broken."""
        self.stream = Resumable(registry.store.budget)
        """The bytes since LINK: requests taken, and replies."""
        self.carrier = Carrier(registry, identity, secret, self.stream, SINGLE_BYTES, self._evict)
        self.over = False
        self._ahead: int = 0
        """Pieces of the session's output that are kept already."""
        self._stepping = False
        """Whether the registry will call `step`."""

    def __str__(self) -> str:
        return f"the session of {self.session}"

    # The connection

    def attach(self) -> None:
        """Use the connection of the session that has sent LINK; for a new link that is this link's own session."""
        if self.registry.clock.enters(self, "attach"):
            return
        session = self.registry.attaching.pop(self)
        connection = session.owner
        assert isinstance(connection, Transport)
        mine = self.session
        if session is not mine:
            self._take_over(connection, session)
        self.connection = connection
        connection.single = self
        self.carrier.attach()
        if session is not mine:
            if mine.out:
                self.flush()
            kept = self.stream.kept
            if kept is not None:
                mine.unsent = self.stream.kept_bytes
                connection.send_again(kept.shared(), kept.taken)
            connection.resumed()

    def _take_over(self, connection: Transport, session: ServerSession) -> None:
        """Move this link's session to a new connection. That connection's own session ends, with the old connection."""
        mine = self.session
        old = self.connection
        if old is None:
            session.leave()
        else:  # the server has not noticed yet that the old connection is broken
            old.single = None
            old.session = session
            session.owner = old
            self._forget_unsent()
            session.evict(ProtocolError("its session continues on another connection"))
        self.registry.suspended.pop(self.carrier.identity, None)
        mine.host = session.host
        mine.port = session.port
        mine.owner = connection
        connection.session = mine
        mine.came_back()
        self._count_suspended(False)

    def detach(self) -> None:
        """Wait for another connection during the grace period, as this one is broken."""
        if self.registry.clock.enters(self, "detach"):
            return
        connection = self.connection
        assert connection is not None
        connection.single = None
        self.connection = None
        self.carrier.detach()
        session = self.session
        session.owner = self
        self._forget_unsent()
        self.give_back()
        if session.out:
            self.flush()
        registry = self.registry
        registry.suspended[self.carrier.identity] = True
        self._count_suspended(True)
        if session in registry.store.hub.evicted or registry.stopping:
            self.end("")
            return
        registry.expect_ticks()
        self.step_later()

    def give_back(self) -> None:
        """Take only what has been executed: the next connection brings the rest again."""
        session = self.session
        if session.stalled():
            self.stream.taken -= session.drop_held_back()

    def _count_suspended(self, suspended: bool) -> None:
        """Count the session among those of its token without a connection, or stop counting it."""
        usage = self.registry.store.hub.auth.usage_of(self.session)
        if usage is None:
            return
        if suspended:
            usage.suspended[self.carrier.identity] = None
        else:
            usage.suspended.pop(self.carrier.identity, None)

    def _forget_unsent(self) -> None:
        """Drop the unsent bytes: the link keeps them too."""
        session = self.session
        if session.backlog is not None:
            session.backlog.release()
            session.backlog = None
        session.unsent = length(session.out)

    def awaited_since(self) -> float:
        return inf  # it is the session's transport only while there is no connection

    def skip_suspended(self, store: Store, queue: bytes) -> bool:
        return self.carrier.pass_over(store, queue)

    def received(self, count: int) -> None:
        self.stream.taken += count

    # Replies

    def keep(self, out: list[Framed]) -> None:
        self.keep_ahead(out)
        self._ahead = 0
        if not self.over:  # only now: whom this evicts has what it was to be sent in the same record
            self.carrier.count()

    def keep_ahead(self, out: list[Framed]) -> None:
        new = out[self._ahead :] if self._ahead else out
        self._ahead = len(out)
        if self.over or not new:
            return
        stream = self.stream
        stream.keep(new)
        if stream.kept is not None and len(stream.kept.pieces) > MOST_PIECES:
            self._give_up()

    def _give_up(self) -> None:
        """End the link: its client acknowledges too rarely, or a reply has too many pieces."""
        recorder = self.registry.clock.recorder
        if recorder is not None and recorder.again:
            return  # an event says so, as other pieces may be kept here
        connection = self.connection
        if connection is None:
            self.session.evict(ProtocolError(f"more than {MOST_PIECES} replies have not been acknowledged"))
        else:
            self.forget()
            connection.single = self  # it may still acknowledge

    def acknowledge(self, taken: int) -> None:
        """Drop the first `taken` bytes of replies, which the client has received. Raises ProtocolError."""
        if not self.over:
            self.stream.acknowledged(taken)
            self.carrier.backlog = self.stream.kept

    # Without a connection

    def flush(self) -> None:
        session = self.session
        out = list(session.out)
        session.out.clear()
        session.unsent = 0
        self.keep(out)

    def step_later(self) -> None:
        """Continue a command under way later, as others may wait for its end."""
        if self.session.running is not None and not self._stepping:
            self._stepping = True
            self.registry.step_later(self.step)

    def step(self) -> None:
        session = self.session
        self._stepping = False
        if self.over or self.connection is not None or session.running is None:
            return
        try:
            session.receive(b"")
        except PeerError as error:
            self.end(str(error))
            return
        if session.out:
            self.flush()
        self.step_later()

    def _evict(self, error: BudgetError) -> None:
        """End the session, and keep its replies no longer: they are what was too much."""
        self.session.evict(error)
        self.forget()

    def close(self) -> None:
        self.forget()
        if self.session.owner is self:
            self.session.leave()

    def tick(self, now: float) -> None:
        overdue = self.carrier.overdue(now)
        if overdue:
            self.end(overdue)

    # The end

    def abandon(self) -> None:
        """End a new link whose connection is gone, or did not take the reply to LINK."""
        if self.registry.clock.enters(self, "abandon"):
            return
        if self.registry.attaching.pop(self) is self.session:
            self.forget()

    def forget(self) -> None:
        """End the link; its session then ends with its connection."""
        if self.over:
            return
        if self.registry.clock.enters(self, "forget"):
            return
        self.over = True
        self.single = None
        if self.connection is not None:
            self.connection.single = None
        registry = self.registry
        registry.suspended.pop(self.carrier.identity, None)
        self._count_suspended(False)
        registry.forget_single(self.carrier.identity)
        self.carrier.forget()

    def end(self, reason: str) -> None:
        """End the link with its session, and close its connection; a `reason` that is not empty is logged."""
        if self.over:
            return
        self.forget()
        if self.connection is not None:
            self.session.evict(ProtocolError(reason))
            return
        if reason:
            self.registry.on_end(self, reason)
        self.session.leave()
