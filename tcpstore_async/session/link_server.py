"""The server's end of links: sessions whose bytes travel on a connection that they share, and that may break.

Without I/O, as the sessions themselves are. This module knows what LINK and each frame do, how much each session may
still send, and when a link that broke is given up. It must not know how bytes travel or what time it is: the server
calls `LinkRegistry.tick` with the time, and `work` whenever `on_work` asked for it.

Invariants: a session on a link behaves as one on a connection of its own. What one of them does wrong, or does not
read, concerns no other; a frame that must not be ends the link. The sessions of a link whose connection broke stay for
the grace period, during which no item of a queue is offered to them.
"""

from collections import deque
from collections.abc import Callable
from hmac import compare_digest
from struct import Struct
from typing import Any, Final

import msgspec

from ..errors import PeerError, ProtocolError
from ..limits import Limits
from ..values import Framed, pack, unpack
from ..wire.codecs import Handler, PartialRequest
from ..wire.link import (
    CLOSE,
    CREDIT,
    CREDIT_BYTES,
    DATA,
    END_OF_FILE,
    GOING_AWAY,
    LINK,
    LOST,
    OPEN,
    PIECE_BYTES,
    REFUSED,
    VERSION,
)
from .link import LINK_REFUSED, NEW, RESUMED, UNKNOWN, Link, LinkReply
from .server import Engine, ServerSession, Transport, printable

_U16: Final = Struct("<H")
_U32: Final = Struct("<I")

_REASONS: Final = [bytes([reason]) for reason in (END_OF_FILE, LOST, REFUSED)]

_DELIVERIES: Final = 1000
"""Frames handled before other peers are served: a millisecond or two, compiled."""

_LINKS: Final = 256
"""Links written to before other peers are served."""

_ID_BYTES: Final = 16
_MAX_TEXT: Final = 256
_MAX_HOSTS: Final = 64


class LinkRegistry:
    """All links of one server."""

    def __init__(self, engine: Engine, instance: str, grace: float = 30.0, keep_alive: float = 5.0) -> None:
        self.engine = engine
        self.instance = instance
        self.grace = grace
        self.keep_alive = keep_alive
        self.links: dict[bytes, ServerLink] = {}
        """By id."""
        self.sessions: int = 0
        """Of all links."""
        self.now: float = 0.0
        """The time of the last `tick`, in seconds of the server's clock."""
        self.on_work: Callable[[], object] | None = None
        """Called when there is work after none: have `work` called soon."""
        self.on_link: Callable[[], object] | None = None
        """Called when there is a link after none: have `tick` called from now on, once a second."""
        self.stopping = False
        self._to_close: deque[ServerLink] = deque()
        """Links with frames that belong to no batch yet."""
        self._to_go_on: deque[LinkedSession] = deque()
        """Sessions whose requests were held back."""
        engine.open_link = self.open

    # LINK

    def open(self, carrier: ServerSession, items: list[tuple[bytes, Framed]]) -> bytes:
        """Make the connection of a session a link, as its LINK demands; return the reply."""
        said = {name: unpack(value) for name, value in items}
        identity, secret = said.get(b"id", b""), said.get(b"secret", b"")
        if len(identity) != _ID_BYTES or len(secret) != _ID_BYTES or isinstance(carrier.partial, _LinkInput):
            raise ProtocolError("LINK without id and secret, or twice")
        if said.get(b"version", b"") != b"%d" % VERSION:
            return self._reply(LINK_REFUSED, 0, f"this server has version {VERSION} of links")
        instance = said.get(b"instance", b"")
        link = self.links.get(identity)
        if link is not None and not compare_digest(link.secret, secret):
            return self._reply(LINK_REFUSED, 0, "wrong secret")
        if instance:
            return self._resume(carrier, link, instance, said)
        if link is not None:
            link.end()  # it never heard that it exists
        limits = self.engine.limits
        if self.stopping:
            return self._reply(LINK_REFUSED, 0, "the server is stopping")
        if len(self.links) >= limits.links:
            return self._reply(LINK_REFUSED, 0, f"there are {len(self.links)} links (limit links)")
        place = said.get(b"place", b"")[:_MAX_TEXT]
        if place:
            for other in [other for other in self.links.values() if other.place == place]:
                other.end()
        link = self.links[identity] = ServerLink(self, secret, place)
        link.identity = identity
        if len(self.links) == 1 and self.on_link is not None:
            self.on_link()
        link.attach(carrier, 0)
        return self._reply(NEW, 0)

    def _resume(
        self, carrier: ServerSession, link: "ServerLink | None", instance: bytes, said: dict[bytes, bytes]
    ) -> bytes:
        taken, told = _number(said, b"taken"), _number(said, b"told")
        if link is None or instance != self.instance.encode() or told > link.taken:
            return self._reply(UNKNOWN, 0)
        if link.carrier is not None:
            link.drop_carrier(ProtocolError("its link goes on with another connection"))
        link.attach(carrier, taken)
        return self._reply(RESUMED, link.taken)

    def _reply(self, status: str, taken: int, reason: str = "") -> bytes:
        reply = LinkReply(status, self.instance, taken, self.keep_alive, self.grace, reason)
        return pack(msgspec.json.encode(reply))

    # Work

    def note_frames(self, link: "ServerLink") -> None:
        """Close the link's batch soon."""
        self._to_close.append(link)
        self._note_work()

    def go_on_later(self, linked: "LinkedSession") -> None:
        """Go on soon with requests that a session holds back."""
        self._to_go_on.append(linked)
        self._note_work()

    def _note_work(self) -> None:
        if len(self._to_close) + len(self._to_go_on) == 1 and self.on_work is not None:
            self.on_work()

    def work(self) -> bool:
        """Send what sessions have added, and go on with some held-back requests. Returns whether there is more.

        Sessions that this gave output to are in `Engine.pending_flush`.
        """
        for _ in range(min(len(self._to_go_on), _DELIVERIES)):
            linked = self._to_go_on.popleft()
            linked.queued = False
            linked.go_on()
        for _ in range(min(len(self._to_close), _LINKS)):
            link = self._to_close.popleft()
            link.noted = False
            link.send()
        return len(self._to_go_on) > 0 or len(self._to_close) > 0

    def tick(self, now: float) -> bool:
        """Acknowledge, keep alive, and end what is overdue. Returns whether there are links."""
        self.now = now
        for link in list(self.links.values()):
            link.tick(now)
        return len(self.links) > 0

    def all_sessions(self) -> list[ServerSession]:
        return [linked.session for link in self.links.values() for linked in link.sessions.values()]

    def go_away(self) -> None:
        """Admit no new sessions and links, and give up links without a connection."""
        self.stopping = True
        for link in list(self.links.values()):
            if link.carrier is None:
                link.end()
            else:
                link.add(GOING_AWAY, LINK)
                link.note()

    def close_all(self) -> None:
        """End all links, at once: the server stops. Their last frames are in `Engine.pending_flush`'s sessions."""
        self.stopping = True
        for link in list(self.links.values()):
            link.say_end()


def _number(said: dict[bytes, bytes], name: bytes) -> int:
    text = said.get(name, b"")
    if not text.isdigit() or len(text) > 18:
        raise ProtocolError(f"LINK with a wrong number of batches {name!r}")
    return int(text)


class _LinkInput(PartialRequest):
    """What follows LINK: a request without end."""

    def __init__(self, link: "ServerLink", carrier: ServerSession) -> None:
        self.at = 0
        self.items = []
        self.link: ServerLink | None = link
        """None once the link goes on elsewhere, or has ended."""
        self.carrier = carrier

    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        link = self.link
        if link is None:
            raise ProtocolError("frames after the end of the link")
        try:
            self.at, need = link.take_some(data, at, end)
        except PeerError:
            link.end()
            raise
        return self, -need

    def held(self) -> int:
        return 0

    def abandon(self) -> None:
        link = self.link
        self.link = None
        if link is not None:
            link.detach()


class ServerLink(Link):
    """The server's end of one link."""

    def __init__(self, registry: LinkRegistry, secret: bytes, place: bytes) -> None:
        super().__init__()
        self.registry = registry
        self.identity: bytes = b""
        self.secret = secret
        self.place = place
        """Which relay this is: a link of the same place takes the place of this one."""
        self.carrier: ServerSession | None = None
        """The session of the connection, if there is one."""
        self.sessions: dict[int, LinkedSession] = {}
        """By number."""
        self.noted = False
        """Whether the registry will close the next batch."""
        self._last_opened: int = 0
        self._waiting: deque[LinkedSession] = deque()
        """Sessions with replies that did not fit; each sends a piece when it is its turn."""
        self._taking = False
        self._heard: float = registry.now
        self._sent: float = registry.now
        self._lost: float = registry.now
        self._hosts: dict[bytes, str] = {}
        """By address of a rank, its host for the log."""
        self._counted: int = 0
        """Bytes of `kept` that are counted in the budget."""

    # The connection

    def attach(self, carrier: ServerSession, taken: int) -> None:
        """Go on with a connection. Raises ProtocolError."""
        self.connect(taken)
        self.carrier = carrier
        carrier.partial = _LinkInput(self, carrier)
        now = self.registry.now
        self._heard = self._sent = now
        self._move_on()
        if self.sessions:
            keyspace = self.registry.engine.keyspace
            for linked in self.sessions.values():
                keyspace.come_back(linked.session)

    def is_open(self) -> bool:
        return self.registry.links.get(self.identity) is self

    def detach(self) -> None:
        """Do without the connection, which is gone: wait for the next for as long as the grace period is."""
        self.carrier = None
        self.disconnect()
        self._lost = self.registry.now
        if not self.sessions or self.registry.stopping:
            self._leave()

    def drop_carrier(self, error: PeerError) -> None:
        """Have the connection closed; the link goes on without."""
        carrier = self.carrier
        if carrier is not None:
            partial = carrier.partial
            assert isinstance(partial, _LinkInput)
            partial.link = None
            self.carrier = None
            self.disconnect()
            carrier.evict(error)

    def end(self) -> None:
        """End the link and all its sessions, and have its connection closed."""
        self.drop_carrier(ProtocolError("its link has ended"))
        self._leave()

    def _leave(self) -> None:
        """End all sessions, and be no link of the server any more."""
        registry = self.registry
        if not self.is_open():
            return
        del registry.links[self.identity]
        for linked in list(self.sessions.values()):
            linked.close()
        self._waiting.clear()
        self.kept.clear()
        self.kept_bytes = 0
        self._count()

    def say_end(self) -> None:
        """Send CLOSE for the link, and end it."""
        carrier = self.carrier
        if carrier is not None:
            self.add(CLOSE, LINK, _REASONS[LOST])
            self._move_out(carrier)
            registry = self.registry
            partial = carrier.partial
            assert isinstance(partial, _LinkInput)
            partial.link = None
            self.carrier = None
            registry.engine.pending_flush.append(carrier)
        self.end()

    # In

    def take_some(self, data: bytes, at: int, end: int) -> tuple[int, int]:
        """Handle frames, and put what they result in into the output of the connection's session."""
        carrier = self.carrier
        assert carrier is not None
        self._heard = self.registry.now
        self._taking = True
        try:
            most = 0 if carrier.unsent > carrier.engine.limits.unsent_high_water else _DELIVERIES
            at, need = self.take(data, at, end, most)
        finally:
            self._taking = False
        self._move_on()
        if self.carrier is carrier:
            self._move_out(carrier)
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
                linked.credit += _U32.unpack(payload)[0]
                if linked.waiting:
                    self._wait(linked)
            else:
                raise ProtocolError(f"CREDIT of {len(payload)} bytes")
        elif kind == OPEN:
            self._open(session, payload)
        elif kind == CLOSE:
            self._close(session, payload)
        else:
            raise ProtocolError(f"frame of kind {kind}")

    def _open(self, session: int, payload: bytes) -> None:
        if session <= self._last_opened or not 2 < len(payload) <= _MAX_TEXT or not self.is_open():
            raise ProtocolError(f"OPEN of session {session} after session {self._last_opened}")
        self._last_opened = session
        registry = self.registry
        engine = registry.engine
        if registry.sessions >= engine.limits.sessions or registry.stopping:
            self.add(CLOSE, session, _REASONS[REFUSED])
            return
        registry.sessions += 1
        host = self._hosts.get(payload[2:])
        if host is None:
            host = self._host(payload[2:])
        self.sessions[session] = LinkedSession(engine, self, session, host, _U16.unpack_from(payload)[0])

    def _host(self, address: bytes) -> str:
        """Return the host of a rank with this address there: the peer's host, unless the relay serves other hosts."""
        carrier = self.carrier
        host = "" if carrier is None else carrier.host
        if not address.startswith((b"127.", b"::1")):
            host = printable(address)
        if len(self._hosts) < _MAX_HOSTS:
            self._hosts[address] = host
        return host

    def _close(self, session: int, payload: bytes) -> None:
        if session == LINK:
            self._leave()
            return
        linked = self.sessions.get(session)
        if linked is not None:
            linked.ended = True
            if payload == _REASONS[END_OF_FILE]:
                linked.close_if_done()
            else:
                linked.close()

    # Out

    def note(self) -> None:
        """Have the frames sent that were added outside of `take_some`."""
        if not self.noted and not self._taking:
            self.noted = True
            self.registry.note_frames(self)

    def send(self) -> None:
        """Put what was added into the output of the connection's session."""
        self._move_on()
        carrier = self.carrier
        if carrier is None:
            self.close_batch()
            self._count()
        elif self._move_out(carrier):
            self.registry.engine.pending_flush.append(carrier)

    def _move_out(self, carrier: ServerSession) -> bool:
        """Close the batch and move it to the connection's session. Returns whether there is anything to send."""
        self.close_batch()
        self._count()
        out = self.out
        if not out:
            return False
        self.out = []
        for batch in out:
            carrier.out.append(batch)
            carrier.unsent += len(batch)
        self._sent = self.registry.now
        return True

    def _count(self) -> None:
        """Count what is kept in the budget."""
        growth = self.kept_bytes - self._counted
        if growth:
            self._counted += growth
            self.registry.engine.budget.charge(growth)

    def wait(self, linked: "LinkedSession") -> None:
        """Let a session send what did not fit, when there is credit and room, after the others that wait."""
        if not linked.waiting:
            linked.waiting = True
            if linked.credit > 0:
                self._wait(linked)

    def _wait(self, linked: "LinkedSession") -> None:
        if not linked.in_turn:
            linked.in_turn = True
            self._waiting.append(linked)
            self.note()

    def _move_on(self) -> None:
        """Let the sessions that wait send a piece each, in turn, while there is room."""
        waiting = self._waiting
        while waiting and self.has_room():
            linked = waiting.popleft()
            linked.in_turn = False
            if linked.send_piece():
                linked.in_turn = True
                waiting.append(linked)

    # Time

    def tick(self, now: float) -> None:
        registry = self.registry
        if self.carrier is None:
            if now - self._lost >= registry.grace:
                self.end()
        elif now - self._heard >= 3 * registry.keep_alive:
            self.drop_carrier(ProtocolError(f"nothing received on a link for {now - self._heard:.0f} s"))
            self._lost = now
            if not self.sessions:
                self.end()
        elif not self.is_acknowledged() or now - self._sent >= registry.keep_alive:
            self.acknowledge()
            self.send()


class LinkedSession(Transport):
    """Moves the bytes of one session on a link, as far as there is credit for them."""

    def __init__(self, engine: Engine, link: ServerLink, number: int, host: str, port: int) -> None:
        super().__init__(engine, host, port, link.registry.now)
        self.link = link
        self.number = number
        self.credit: int = CREDIT_BYTES
        """Bytes that may be sent."""
        self.received: int = 0
        """Bytes received for which no CREDIT has been given."""
        self.waiting = False
        """Whether replies did not fit: they are in the session's backlog."""
        self.in_turn = False
        """Whether the link will have it send a piece."""
        self.queued = False
        """Whether the registry will have it go on."""
        self.ended = False
        """Whether the rank sends no more."""
        self.closed = False

    def is_suspended(self) -> bool:
        return self.link.carrier is None

    # In

    def receive(self, payload: bytes) -> None:
        """Execute what has arrived."""
        session = self.session
        self.received += len(payload)
        if self.received > CREDIT_BYTES:
            raise ProtocolError(f"DATA of session {self.number} without credit")
        if self.ended or session.table is session.engine.no_commands:
            return
        self._execute(payload)

    def go_on(self) -> None:
        """Execute what was held back."""
        if not self.closed and self.session.stalled():
            self._execute(b"")

    def _execute(self, payload: bytes) -> None:
        session = self.session
        engine = session.engine
        try:
            session.receive(payload)
        except PeerError as error:
            engine.evicted[session] = error
            session.table = engine.no_commands
            engine.pending_flush.append(session)
            return
        if session.out:
            self.flush()
        if session.stalled():
            if not self.queued and (
                session.incremental is not None or session.unsent <= engine.limits.unsent_high_water
            ):
                self.queued = True
                self.link.registry.go_on_later(self)
        else:
            self._settle()

    def _settle(self) -> None:
        """Allow the rank to send more, or close what it has ended."""
        if self.ended:
            self.close_if_done()
        elif self.received >= CREDIT_BYTES // 2:
            self.link.add(CREDIT, self.number, _U32.pack(self.received))
            self.link.note()
            self.received = 0

    def close_if_done(self) -> None:
        """Close, unless requests or replies are still under way."""
        session = self.session
        if not session.stalled() and session.backlog is None:
            self.close()

    # Out

    def flush(self) -> None:
        session = self.session
        out = session.out
        size = session.unsent
        if session.backlog is None and size <= self.credit and size <= PIECE_BYTES and self.link.has_room():
            self.credit -= size
            session.unsent = 0
            self.link.add_data(self.number, bytes(out[0]) if len(out) == 1 else b"".join(out))
            self.link.note()
        else:
            session.keep_unsent(out, 0)
            self.link.wait(self)
        out.clear()

    def send_piece(self) -> bool:
        """Send a piece of what did not fit. Returns whether there is more, and credit for it."""
        session = self.session
        backlog = session.backlog
        if backlog is None:
            self.waiting = False
            return False
        piece = _first_bytes(backlog.batch(), min(PIECE_BYTES, self.credit))
        self.credit -= len(piece)
        session.unsent -= len(piece)
        self.link.add_data(self.number, piece)
        if not backlog.took(len(piece)):
            return self.credit > 0
        session.backlog = None
        self.waiting = False
        if session.stalled():
            if not self.queued:
                self.queued = True
                self.link.registry.go_on_later(self)
        else:
            self._settle()
        return False

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        link = self.link
        del link.sessions[self.number]
        link.registry.sessions -= 1
        self.session.leave()
        link.add(CLOSE, self.number, _REASONS[LOST])
        link.note()


def _first_bytes(pieces: list[Any], most: int) -> bytes:
    """Return the first `most` bytes of `pieces`, joined."""
    taken: list[Any] = []
    for piece in pieces:
        size = len(piece)
        if size >= most:
            taken.append(memoryview(piece)[:most])
            break
        taken.append(piece)
        most -= size
    return b"".join(taken)
