"""Move the bytes of one session on a link, as far as credit allows.

It knows credit, and what waits for it. It must not know what a frame looks like, or that a link breaks: while the link
has no connection, nothing is sent.

Invariant: a session on a link behaves as one on a connection of its own. Neither its protocol errors nor a rank that
does not read affect other sessions.
"""

from collections.abc import Callable
from math import inf
from typing import Final

from ..base.errors import BudgetError, PeerError, ProtocolError
from ..session.server import ServerSession
from ..session.slots import NO_COMMANDS
from ..session.store import Store
from ..session.unsent import Unsent, first_bytes
from ..wire.link import (
    CLOSE,
    CREDIT,
    LOST,
    PIECE_BYTES,
    REPLY_CREDIT_BYTES,
    U32,
)
from ..wire.values import Framed, length
from .carrier import Carrier
from .credit import Credit
from .frames import Link
from .work import LinkWork

_LONG: Final = 4 * 1024
"""Replies of more bytes are shared, as objects, by the sessions that get the same."""

_STEP_COST: Final = 250
"""Cost of a step of a long command, in frames."""


class SharedLink(Link):
    """The server's end of a link, as seen by the sessions on it."""

    def __init__(
        self, registry: LinkWork, identity: bytes, secret: bytes, size: int, on_evict: Callable[[BudgetError], object]
    ) -> None:
        super().__init__(registry.store.budget)
        self.registry = registry
        self.carrier = Carrier(registry, identity, secret, self, size, on_evict)
        self.connection: ServerSession | None = None
        """The session of its connection; None if there is none."""
        self.host: str = ""
        """Host of its connection, or of the last one."""
        self.attached_at: float = 0.0
        """When its connection was attached, in seconds of the server's clock."""
        self.sessions: dict[int, LinkedSession] = {}
        """Keyed by number."""
        self.over = False
        """Whether it has ended; some of its sessions may still have to be closed."""
        self._parts: list[Framed] = []
        """The parts of the last long reply, until frames are sealed: other sessions may get the same."""
        self._reply: bytes = b""
        """These, joined."""
        self._piece_of: bytes = b""
        """The long reply, or value, of which a piece was sent last, until frames are sealed."""
        self._piece_at: int = 0
        self._piece: bytes = b""

    def note(self) -> None:
        """Schedule sending the added frames."""
        raise NotImplementedError

    def joined(self, parts: list[Framed]) -> bytes:
        """Return a long reply as one object: that of the session before, if its reply has the same parts.

        So the reply is not copied and compared for each session, and the budget counts it once.
        """
        if parts != self._parts:
            reply = b"".join(parts)
            if set(map(type, parts)) != {bytes}:  # a bytearray may grow
                return reply
            self._parts = list(parts)
            self._reply = reply
        return self._reply

    def piece(self, backlog: Unsent, most: int) -> bytes:
        """Return up to `most` bytes of a backlog: the object of the session before, if that has sent the same."""
        size = min(PIECE_BYTES, most)
        first = backlog.pieces[0]
        if not isinstance(first, bytes) or len(first) < _LONG:
            return b"".join(first_bytes(backlog.batch(), size))
        at = backlog.taken
        if first is not self._piece_of or at != self._piece_at or len(self._piece) > size:
            self._piece_of = first
            self._piece_at = at
            self._piece = first[at : at + size]
        return self._piece

    def seal(self) -> None:
        super().seal()
        if self._parts or self._piece:
            self._parts = []
            self._reply = self._piece_of = self._piece = b""

    def wait(self, linked: "LinkedSession") -> None:
        """Let a session send its backlog when there is credit and space, after other waiting sessions."""
        raise NotImplementedError


class LinkedSession(Credit):
    """Moves the bytes of one session on a link."""

    def __init__(self, store: Store, link: SharedLink, number: int, host: str, port: int, now: float) -> None:
        self.link = link
        self.number = number
        self.waiting = False
        """Whether replies did not fit and are in the session's backlog."""
        self.in_turn = False
        """Whether the link will call `send_piece`: the session waits, and has credit."""
        self.queued = False
        """Whether the registry will call `resume`."""
        self.ended = False
        """Whether the rank sends no more."""
        self.closed = False
        super().__init__(store, host, port, now)

    def skip_suspended(self, store: Store, queue: bytes) -> bool:
        return self.link.carrier.pass_over(store, queue)

    def awaited_since(self) -> float:
        link = self.link
        return inf if link.connection is None else max(self.session.connected_at, link.attached_at)

    def shares_connection(self) -> bool:
        return True

    def survives(self) -> bool:
        return True

    # In

    def receive(self, payload: bytes) -> None:
        """Execute requests, or hold them back if earlier ones are held back."""
        session = self.session
        if not self.spend(len(payload)):
            raise ProtocolError(f"DATA for session {self.number} exceeds its credit")
        if self.ended or session.table is NO_COMMANDS:
            return
        try:
            if session.stalled():
                session.hold_back(payload)
            else:
                self._execute(payload)
        except PeerError as error:
            self._fail(error)
        except Exception:
            self.link.registry.fail(self)

    def resume_later(self) -> None:
        """Schedule `resume`."""
        if not self.queued:
            self.queued = True
            self.link.registry.resume_later(self.resume)

    def resume(self) -> int:
        """Execute held-back requests; return the cost, in frames."""
        self.queued = False
        session = self.session
        if self.closed or not session.stalled() or session.table is NO_COMMANDS:
            return 1
        buffer = session.input_buffer
        cost = 1 + (0 if buffer is None else len(buffer) >> 6)
        if session.running is not None:
            cost = _STEP_COST
        try:
            self._execute(b"")
        except PeerError as error:
            self._fail(error)
        except Exception:
            self.link.registry.fail(self)
        return cost

    def _execute(self, payload: bytes) -> None:
        session = self.session
        session.receive(payload)
        if session.out:
            self.flush()
        if not session.stalled():
            self._allow_or_close()
        elif session.running is not None or (
            session.unsent <= session.store.limits.unsent_high_water and not session.waits_for_space()
        ):
            self.resume_later()

    def _fail(self, error: PeerError) -> None:
        """Send the replies to earlier requests, as far as there is credit, and evict the session."""
        self._send_rest()
        self.session.evict(error)

    def _send_rest(self) -> None:
        """Send as much as there is credit for, before the session is closed."""
        session = self.session
        backlog = session.backlog
        while backlog is not None and self.credit > 0:
            piece = self.link.piece(backlog, self.credit)
            self.credit -= len(piece)
            self.link.add_data(self.number, piece)
            if backlog.took(len(piece)):
                backlog = session.backlog = None
        if backlog is None and session.out:
            self.link.add_data(self.number, b"".join(first_bytes(session.out, self.credit)))

    def _allow_or_close(self) -> None:
        """Allow the rank to send more, or close if it has ended."""
        if self.ended:
            self.close_if_done()
        elif self.allowed <= self.low:
            self.give_credit()

    def send_credit(self, count: int) -> None:
        self.link.add(CREDIT, self.number, U32.pack(count))
        self.link.note()

    def close_if_done(self) -> None:
        """Close, unless there are still requests or replies."""
        session = self.session
        if session.out:
            self.flush()
        if not session.stalled() and session.backlog is None:
            self.close()

    # Out

    def flush(self) -> None:
        session = self.session
        out = session.out
        if not out:
            return
        recorder = self.link.registry.clock.recorder
        if recorder is not None and not recorder.inside:
            recorder.enter(self, "flush")
            return
        size = session.unsent
        link = self.link
        evicted = session.store.hub.evicted
        if link.over or (evicted and session in evicted):
            session.unsent -= length(out)
        elif session.backlog is not None:
            session.keep_unsent(out, 0)
        elif size <= self.credit and size <= PIECE_BYTES and link.has_room():
            self.credit -= size
            session.unsent = 0
            reply = out[0] if len(out) == 1 else link.joined(out) if size > _LONG else b"".join(out)
            link.add_data(self.number, reply if isinstance(reply, bytes) else bytes(reply))
            link.note()
        else:
            session.keep_unsent([link.joined(out)] if len(out) > 1 and _LONG < size <= REPLY_CREDIT_BYTES else out, 0)
            link.wait(self)
        out.clear()

    def wake(self, reply: bytes) -> bool:
        session = self.session
        link = self.link
        if session.unsent or len(reply) > self.credit or link.over or session.store.hub.evicted or not link.has_room():
            return False
        self.credit -= len(reply)
        link.add_data(self.number, reply)
        link.note()
        return True

    def send_piece(self) -> bool:
        """Send a piece of the backlog; return whether there is more, and credit for it."""
        session = self.session
        backlog = session.backlog
        if backlog is None:
            self.waiting = False
            return False
        piece = self.link.piece(backlog, self.credit)
        self.credit -= len(piece)
        session.unsent -= len(piece)
        self.link.add_data(self.number, piece)
        if not backlog.took(len(piece)):
            return self.credit > 0
        session.backlog = None
        self.waiting = False
        if session.stalled():
            self.resume_later()
        else:
            self._allow_or_close()
        return False

    def close(self) -> None:
        if self.closed:
            return
        if self.link.registry.clock.enters(self, "close"):
            return
        self.closed = True
        link = self.link
        del link.sessions[self.number]
        link.registry.sessions -= 1
        self.session.leave()
        if not link.over:
            link.add(CLOSE, self.number, LOST)
            link.note()
