"""The server's end of one link: what each frame does, and what happens while there is no connection.

Without I/O, like sessions. It must not know how bytes travel, what time it is, or what other links there are: it asks
its registry.

Invariants: an invalid frame ends the link. The sessions of a link whose connection broke are kept for the grace period,
during which no item of a queue is offered to them. Everything that a link holds is counted in the budget, for one of
its sessions or for the link itself.
"""

from collections import deque
from itertools import islice
from typing import Any, Final

from ..auth.access import Access
from ..base.addresses import format_address, is_loopback
from ..base.errors import BudgetError, PeerError, ProtocolError, counted
from ..base.limits import Limits
from ..base.mypyc_shim import mypyc_attr
from ..session.budget import SESSION_BYTES
from ..session.peer import printable
from ..session.server import ServerSession
from ..session.store import WRITES
from ..wire.codecs import Handler, PartialRequest
from ..wire.link import (
    CLOSE,
    CREDIT,
    DATA,
    DESCRIBE,
    DESCRIPTION_BYTES,
    END_OF_FILE,
    EXAMINE,
    EXAMINED,
    LINK,
    LOST,
    MAX_CREDIT,
    OPEN,
    QUESTION,
    REFUSED,
    U16,
    U32,
)
from ..wire.values import length
from .linked_session import LinkedSession, SharedLink
from .work import LinkWork

LINK_BYTES: Final = 3 * SESSION_BYTES
"""Bytes counted for a link without sessions."""

_MAX_TEXT: Final = 256
_OF_ADDRESSES: Final = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.:%_-"
"""Characters of addresses, which may name an interface."""

_MAX_HOSTS: Final = 64
"""Most addresses whose host is remembered."""


@mypyc_attr(allow_interpreted_subclasses=True)
class LinkInput(PartialRequest):
    """The frames after LINK, as a request without end."""

    def __init__(self, link: "ServerLink", session: ServerSession) -> None:
        self.at = 0
        self.items = []
        self.endless = True
        self.link: ServerLink | None = link
        """None once the link has moved to another connection, or has ended."""
        self.session = session

    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        link = self.link
        if link is None:
            raise ProtocolError("frames after the end of the link")
        try:
            self.at, need = link.take_some(data, at, end)
        except PeerError as error:
            link.end(str(error))
            raise
        evicted = self.session.store.hub.evicted
        if evicted:
            refusal = evicted.get(self.session)
            try:
                if refusal is not None:  # one of its sessions has evicted it
                    raise refusal
            finally:
                del refusal
        return self, -need

    def held(self) -> int:
        return 0

    def abandon(self) -> None:
        link = self.link
        self.link = None
        if link is not None:
            link.detach()


class ServerLink(SharedLink):
    def __init__(self, registry: LinkWork, identity: bytes, secret: bytes, place: bytes) -> None:
        super().__init__(registry, identity, secret, LINK_BYTES, self.evict)
        self.place = place
        """Which relay this is: a new link of the same place replaces this one."""
        self.seat = ("", place)
        """Id of its token, and place."""
        self.granted = False
        """Whether its connection has authenticated."""
        self.access: Access | None = None
        """The access of its connection and sessions, if it has authenticated; None for everything."""
        self.examines = False
        """Whether the client of its connection answers EXAMINE."""
        self.noted = False
        """Whether the registry will call `_send_noted`."""
        self._last_opened: int = 0
        self._waiting: deque[LinkedSession] = deque()
        """Sessions with replies that did not fit; each in turn sends a piece."""
        self._taking = False
        self._heard: float = registry.clock.now
        self._sent: float = registry.clock.now
        self._hosts: dict[bytes, str] = {}
        """Hosts for the log, keyed by the addresses of ranks."""

    def __str__(self) -> str:
        place = f" of {printable(self.place)}" if self.place else ""
        return f"the link{place} from {self.host} ({counted(len(self.sessions), 'session')})"

    # The connection

    def evict(self, error: BudgetError) -> None:
        if self.registry.clock.enters(self, "evict", error):
            return
        self.drop_connection(error)
        self.end(str(error))

    def attach(self, connection: ServerSession, taken: int) -> None:
        """Use a connection, new or replaced, whose client has taken `taken` bytes."""
        self.drop_connection(ProtocolError("its link continues on another connection"))
        self.connect(taken)
        self.connection = connection
        self.host = connection.host
        connection.partial = LinkInput(self, connection)
        self.attached_at = self.registry.clock.now
        self._heard = self._sent = self.registry.clock.now
        self.note()
        self.carrier.attach()
        for linked in self.sessions.values():
            linked.session.came_back()

    def detach(self) -> None:
        """Wait for another connection during the grace period, as this one is gone."""
        self.connection = None
        self.carrier.detach()
        self.disconnect()
        if self.registry.stopping:
            self.end("the server is stopping")

    def drop_connection(self, error: PeerError) -> None:
        """Close the connection, if there is one; the link stays."""
        connection = self._release_connection()
        if connection is not None:
            connection.evict(error)

    def _release_connection(self) -> ServerSession | None:
        """Detach from the connection, which stays open; return its session, if there is one."""
        connection = self.connection
        if connection is not None:
            partial = connection.partial
            assert isinstance(partial, LinkInput)
            partial.link = None
            self.detach()
        return connection

    def end(self, reason: str) -> None:
        """End the link, close its connection, and close its sessions soon."""
        if self.over:
            return
        self.over = True
        self.drop_connection(ProtocolError("its link has ended"))
        registry = self.registry
        registry.forget_link(self.carrier.identity)
        self.carrier.forget()
        self._waiting.clear()
        if self.sessions:
            registry.on_end(self, reason)
            registry.end_later(self.close_some)

    def close_some(self, most: int) -> bool:
        """Close at most `most` sessions of a link that is over; return whether all are closed."""
        for linked in list(islice(self.sessions.values(), most)):
            linked.close()
        return not self.sessions

    def close_link(self) -> None:
        """Send CLOSE for the link, and end it; its connection stays open."""
        connection = self.connection
        if connection is not None:
            self.add(CLOSE, LINK, LOST)
            self._move_out(connection)
            if self._release_connection() is not None:
                self.registry.store.hub.pending_flush.append(connection)
        self.end("the server is stopping")

    # In

    def take_some(self, data: bytes, at: int, end: int) -> tuple[int, int]:
        """Handle frames, and put the resulting frames into the output of the connection's session."""
        connection = self.connection
        assert connection is not None
        self._heard = self.registry.clock.now
        self._taking = True
        try:
            most = 0 if connection.unsent > connection.store.limits.unsent_high_water else self.registry.portion
            at, need = self.take(data, at, end, most)
        finally:
            self._taking = False
        if self.connection is not connection or self.in_same():  # replies to what travels once travel once
            self._count()
        else:
            self._move_on()
            self._move_out(connection)
        return at, need

    def handle(self, kind: int, session: int, payload: bytes) -> None:
        if kind in (DATA, CREDIT):
            linked = self.sessions.get(session)
            if linked is None:
                if session > self._last_opened or not session:
                    raise ProtocolError(f"frame for session {session}, which was not opened")
            elif kind == DATA:
                linked.receive(payload)
            elif len(payload) == 4:
                linked.credit += U32.unpack(payload)[0]
                if linked.credit > MAX_CREDIT:
                    raise ProtocolError(f"credit of {linked.credit} bytes (max {MAX_CREDIT})")
                if linked.waiting:
                    self._wait(linked)
            else:
                raise ProtocolError(f"CREDIT with a payload of {counted(len(payload), 'byte')}")
        elif kind == OPEN:
            self._open(session, payload)
        elif kind == CLOSE:
            self._close(session, payload)
        elif kind == DESCRIBE:
            self._describe(session, payload)
        elif kind == EXAMINED and session == LINK and len(payload) > U32.size:
            self.registry.on_examined(self, U32.unpack_from(payload)[0], payload[U32.size :])
        else:
            raise ProtocolError(f"unexpected frame of kind {kind}")

    def _open(self, session: int, payload: bytes) -> None:
        if session <= self._last_opened:
            raise ProtocolError(f"OPEN for session {session}, but the last session opened was {self._last_opened}")
        if not 2 < len(payload) <= _MAX_TEXT:
            raise ProtocolError(f"OPEN for session {session} with a payload of {counted(len(payload), 'byte')}")
        self._last_opened = session
        registry = self.registry
        store = registry.store
        host = self._hosts.get(payload[2:])
        if host is None:
            host = self._host(payload[2:])
        port = U16.unpack_from(payload)[0]
        if registry.sessions >= store.limits.sessions or registry.stopping:
            self.add(CLOSE, session, REFUSED)
            if not registry.stopping:
                registry.on_refused(host, port)
            return
        crowded = store.hub.auth.crowded(self.access)
        if crowded:
            registry.on_refusal(self.host, format_address(host, port), crowded)
            self.add(CLOSE, session, REFUSED)
            return
        registry.sessions += 1
        linked = self.sessions[session] = LinkedSession(store, self, session, host, port, registry.clock.now)
        if self.granted:
            linked.session.grant_access(self.access)
            registry.make_way(linked.session)
        if self.over:  # the budget evicted the link when it counted the session
            registry.end_later(self.close_some)

    def _describe(self, session: int, payload: bytes) -> None:
        if session > self._last_opened or not session or len(payload) > DESCRIPTION_BYTES:
            raise ProtocolError(f"DESCRIBE for session {session} with a payload of {counted(len(payload), 'byte')}")
        linked = self.sessions.get(session)
        if linked is not None:
            pairs = [pair.partition(b"=") for pair in payload.split(b"\0")]
            linked.session.describe({printable(name): printable(text) for name, _, text in pairs})

    def _host(self, address: bytes) -> str:
        """Return the host of a rank for the log: its address if the relay serves other hosts, else the peer's host.

        An invalid address is not used: lines of the log would start with it.
        """
        host = "" if address.translate(None, _OF_ADDRESSES) else address.decode()
        if not host or is_loopback(host):
            host = self.host
        if len(self._hosts) < _MAX_HOSTS:
            self._hosts[address] = host
        return host

    def _close(self, session: int, payload: bytes) -> None:
        if session > self._last_opened or payload not in (END_OF_FILE, LOST, REFUSED):
            raise ProtocolError(f"CLOSE for session {session} with reason {payload!r}")
        if session == LINK:
            connection = self._release_connection()
            if connection is not None:
                self.registry.close_later(connection)
            self.end("its client has closed it")
            return
        linked = self.sessions.get(session)
        if linked is not None:
            linked.ended = True
            if payload == END_OF_FILE:
                linked.close_if_done()
            else:
                linked.close()

    # Out

    def examine(self, number: int, milliseconds: int) -> None:
        """Ask what the processes of ranks do; the answer is for `LinkWork.on_examined`."""
        if self.registry.clock.enters(self, "examine", number, milliseconds):
            return
        self.add(EXAMINE, LINK, QUESTION.pack(number, milliseconds))
        self.note()

    def note(self) -> None:
        """Schedule sending the frames added outside of `take_some`."""
        if not self.noted and not self._taking and not self.over:
            self.noted = True
            self.registry.send_later(self._send_noted)

    def _send_noted(self) -> int:
        self.noted = False
        return self.send()

    def send(self) -> int:
        """Put added frames into the output of the connection's session; return how many sessions had waited."""
        if self.over:
            return 0
        count = self._move_on()
        connection = self.connection
        if connection is None:
            self.seal()
            self._count()
        elif self._move_out(connection):
            self.registry.store.hub.pending_flush.append(connection)
        return count

    def _move_out(self, connection: ServerSession) -> bool:
        """Move the added frames to the connection's session; return whether there is anything to send."""
        self.seal()
        out = self.out
        if out:
            self.out = []
            connection.out.extend(out)
            connection.unsent += length(out)
            self._sent = self.registry.clock.now
        self._count()
        return len(out) > 0

    def _count(self) -> None:
        """Charge the budget for what the link holds. If that is too much, a peer, perhaps this one, is evicted."""
        if not self.over:
            self.carrier.count(self.added_bytes)

    def wait(self, linked: LinkedSession) -> None:
        """Let a session send its backlog when there is credit and space, after other waiting sessions."""
        if not linked.waiting:
            linked.waiting = True
            if linked.credit > 0:
                self._wait(linked)

    def _wait(self, linked: LinkedSession) -> None:
        if not linked.in_turn:
            linked.in_turn = True
            self._waiting.append(linked)
            self.note()

    def _move_on(self) -> int:
        """Let waiting sessions send a piece each, in rotation, while there is space; return how many did.

        Pieces beyond a portion are sent later.
        """
        waiting = self._waiting
        count = 0
        while waiting and self.has_room():
            if count >= self.registry.portion:
                self.note()
                break
            count += 1
            linked = waiting.popleft()
            linked.in_turn = False
            if linked.send_piece():
                linked.in_turn = True
                waiting.append(linked)
        return count

    # Time

    def tick(self, now: float, soon: float) -> None:
        """Do what is due before `soon`, when the next tick is expected."""
        registry = self.registry
        if registry.store.hub.held > WRITES:
            self._heard = now  # nothing is read meanwhile
        if self.connection is None:
            overdue = self.carrier.overdue(now)
            if overdue:
                self.end(overdue)
        elif now - self._heard >= 3 * registry.keep_alive:
            self.drop_connection(ProtocolError(f"nothing received on a link for {now - self._heard:.0f} s"))
        elif soon - self._sent >= registry.keep_alive:
            self.acknowledge()
            self.send()
