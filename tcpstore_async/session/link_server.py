"""The server's end of links: sessions whose bytes travel on a connection that they share, and that may break.

Without I/O, as the sessions themselves are. This module knows what LINK and each frame do, how much each session may
still send, and when a link that broke is given up. It must not know how bytes travel or what time it is: the server
calls `LinkRegistry.tick` with the time, and `work` whenever `on_work` asked for it.

Invariants: a session on a link behaves as one on a connection of its own. What one of them does wrong, or does not
read, concerns no other; a frame that must not be ends the link. The sessions of a link whose connection broke stay for
the grace period, during which no item of a queue is offered to them. Everything that a link holds is counted in the
budget, as the session's whose it is or as the link's own. Nothing here takes longer than a few milliseconds.
"""

from collections import deque
from collections.abc import Callable
from hmac import compare_digest
from itertools import islice
from math import inf
from typing import Any, Final

import msgspec

from ..errors import BudgetError, PeerError, ProtocolError
from ..limits import Limits
from ..values import Framed, length, pack, unpack
from ..waiter_types import IDLE
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
    MAX_CREDIT,
    OPEN,
    PIECE_BYTES,
    REFUSED,
    U16,
    U32,
    VERSION,
)
from .budget import SESSION_BYTES, Holder
from .link import LINK_REFUSED, NEW, RESUMED, UNKNOWN, Link, LinkReply
from .server import PORTION, Engine, ServerSession, Transport, printable
from .unsent import first_bytes

_CLOSING: Final = 8
"""A session is closed in the time in which so many frames are handled."""

_PASSED_SHIFT: Final = 4
"""Sixteen sessions are passed over in the time in which one is offered an item."""

_STEP_COST: Final = 250
"""What a step of a long command costs, compared with a frame."""

_LINKS: Final = 256
"""Links written to before other peers are served."""

LINK_BYTES: Final = 3 * SESSION_BYTES
"""Bytes counted for a link without sessions."""

_ID_BYTES: Final = 16
_MAX_TEXT: Final = 256
_MAX_HOSTS: Final = 64


class LinkRegistry:
    """All links of one server."""

    def __init__(
        self, engine: Engine, instance: str, grace: float, keep_alive: float = 5.0, portion: int = PORTION
    ) -> None:
        """`portion` is how many frames are handled, sessions closed or items offered before other peers are served."""
        self.engine = engine
        self.portion = portion
        self.instance = instance
        self.grace = grace
        self.keep_alive = keep_alive
        self.links: dict[bytes, ServerLink] = {}
        """By id."""
        self.places: dict[bytes, ServerLink] = {}
        """By place, for links that named one."""
        self.sessions: int = 0
        """Of all links."""
        self.passed_over: int = 0
        """How often a session was, so far."""
        self.now: float = 0.0
        """The time of the last `tick`, in seconds of the server's clock."""
        self.clock: Callable[[], float] | None = None
        """Returns the time, where a second matters."""
        self.on_work: Callable[[], object] | None = None
        """Called when there is work after none: have `work` called soon."""
        self.on_link: Callable[[], object] | None = None
        """Called when there is a link after none: have `tick` called from now on, once a second."""
        self.on_end: Callable[[ServerLink, str], object] | None = None
        """Called when a link that still had sessions ends, with the reason."""
        self.on_failure: Callable[[Transport], object] | None = None
        """Called in an exception's handler for a session that failed: close it. Without it, the exception is raised."""
        self.stopping = False
        self._scheduled = False
        """Whether `work` will be called."""
        self._to_end: deque[ServerLink] = deque()
        """Links that are over and have sessions left."""
        self._to_close: list[ServerSession] = []
        """Connections whose links have been closed by their clients."""
        self._to_offer: deque[ServerLink] = deque()
        """Links that are back, and whose sessions were passed over."""
        self._to_send: deque[ServerLink] = deque()
        """Links with frames that belong to no batch yet."""
        self._to_go_on: deque[LinkedSession] = deque()
        """Sessions whose requests were held back."""
        engine.open_link = self.open

    # LINK

    def open(self, carrier: ServerSession, items: list[tuple[bytes, Framed]]) -> bytes:
        """Make the connection of a session a link, as its LINK demands; return the reply."""
        said = {name: unpack(value) for name, value in items}
        identity, secret = said.get(b"id", b""), said.get(b"secret", b"")
        if len(identity) != _ID_BYTES or len(secret) != _ID_BYTES or carrier.state != IDLE:
            raise ProtocolError("LINK without a valid id and secret, or from a connection with a pending wait")
        if isinstance(carrier.owner, LinkedSession):
            return self._reply(LINK_REFUSED, 0, "this connection is a session of a link")
        if said.get(b"version", b"") != b"%d" % VERSION:
            return self._reply(LINK_REFUSED, 0, f"this server speaks version {VERSION} of the link protocol")
        link = self.links.get(identity)
        if link is not None and not compare_digest(link.secret, secret):
            return self._reply(LINK_REFUSED, 0, "wrong secret")
        if said.get(b"instance"):
            return self._resume(carrier, link, said)
        if link is not None:
            link.end("its client has started over")  # it never heard that the link exists
        if self.stopping:
            return self._reply(LINK_REFUSED, 0, "the server is stopping")
        place = said.get(b"place", b"")[:_MAX_TEXT]
        other = self.places.get(place)
        if other is not None:
            other.end("another link has taken its place")
        if len(self.links) >= self.engine.limits.links:
            return self._reply(LINK_REFUSED, 0, f"there are already {len(self.links)} links, the maximum (limit links)")
        link = self.links[identity] = ServerLink(self, identity, secret, place)
        if place:
            self.places[place] = link
        if len(self.links) == 1 and self.on_link is not None:
            self.on_link()
        link.attach(carrier, 0)
        return self._reply(NEW, 0)

    def _resume(self, carrier: ServerSession, link: "ServerLink | None", said: dict[bytes, bytes]) -> bytes:
        taken, told = _number(said, b"taken"), _number(said, b"told")
        if link is None:
            return self._reply(UNKNOWN, 0)
        if said[b"instance"] != self.instance.encode() or not link.can_resume(taken, told):
            link.end("its client has lost its state, or refers to a different server")
            return self._reply(UNKNOWN, 0)
        if self.stopping:  # it would end with the connection that it has
            link.end("the server is stopping")
            return self._reply(UNKNOWN, 0)
        link.drop_carrier(ProtocolError("its link continues on another connection"))
        link.attach(carrier, taken)
        return self._reply(RESUMED, link.taken)

    def _reply(self, status: str, taken: int, reason: str = "") -> bytes:
        reply = LinkReply(status, self.instance, taken, self.keep_alive, self.grace, reason)
        return pack(msgspec.json.encode(reply))

    # Work

    def send_later(self, link: "ServerLink") -> None:
        """Close the link's batch soon."""
        self._to_send.append(link)
        self._schedule()

    def offer_later(self, link: "ServerLink") -> None:
        """Offer a link's sessions soon what they were passed over for."""
        self._to_offer.append(link)
        self._schedule()

    def end_later(self, link: "ServerLink") -> None:
        """End the sessions of a link soon."""
        self._to_end.append(link)
        self._schedule()

    def close_later(self, carrier: ServerSession) -> None:
        """Close a connection soon."""
        self._to_close.append(carrier)
        self._schedule()

    def go_on_later(self, linked: "LinkedSession") -> None:
        """Go on soon with requests that a session holds back."""
        if not linked.queued:
            linked.queued = True
            self._to_go_on.append(linked)
            self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            if self.on_work is not None:
                self.on_work()

    def work(self) -> bool:
        """Do a portion of what was left for later. Returns whether there is more: then call it again, soon.

        Sessions that this gave output to are in `Engine.pending_flush`.
        """
        while self._to_close:
            owner = self._to_close.pop().owner
            if isinstance(owner, Transport):
                owner.close()
        if self._to_end and self._to_end[0].close_some(max(1, self.portion // _CLOSING)):
            self._to_end.popleft()
        if self._to_offer and self._to_offer[0].offer_some(self.portion):
            self._to_offer.popleft()
        self._go_on()
        spent = 0
        for _ in range(min(len(self._to_send), _LINKS)):
            if spent >= self.portion:
                break
            link = self._to_send.popleft()
            link.noted = False
            spent += link.send()
        self._scheduled = bool(self._to_close or self._to_end or self._to_offer or self._to_go_on or self._to_send)
        return self._scheduled

    def _go_on(self) -> None:
        """Go on with requests that some sessions hold back, those first that have waited longest."""
        spent = 0
        for _ in range(len(self._to_go_on)):
            if spent >= self.portion:
                break
            linked = self._to_go_on.popleft()
            linked.queued = False
            spent += linked.go_on()

    def time(self) -> float:
        """Return the time, in seconds of the server's clock."""
        return self.now if self.clock is None else self.clock()

    def fail(self, transport: Transport, error: Exception) -> None:
        """Close a session after an exception that is no peer's fault. To be called in its handler."""
        if self.on_failure is None:
            raise error
        self.on_failure(transport)

    def tick(self, now: float) -> bool:
        """Acknowledge, keep alive, and end what is overdue. Returns whether there are links."""
        self.now = now
        for link in list(self.links.values()):
            link.tick(now)
        return len(self.links) > 0

    def all_sessions(self) -> list[ServerSession]:
        return [linked.session for link in self.links.values() for linked in link.sessions.values()]

    def is_carrier(self, session: ServerSession) -> bool:
        """Return whether a session's connection is a link's."""
        return isinstance(session.partial, _LinkInput)

    def go_away(self) -> None:
        """Admit no new sessions and links, and give up links without a connection."""
        self.stopping = True
        for link in list(self.links.values()):
            if link.carrier is None:
                link.end("the server is stopping")
            else:
                link.add(GOING_AWAY, LINK)
                link.note()

    def close_all(self) -> None:
        """End all links, at once: the server stops. Their last frames are in `Engine.pending_flush`'s sessions."""
        self.stopping = True
        for link in list(self.links.values()):
            link.say_end()
        while self._to_end:
            if self._to_end[0].close_some(self.portion):
                self._to_end.popleft()


def _number(said: dict[bytes, bytes], name: bytes) -> int:
    text = said.get(name, b"")
    if not text.isdigit() or len(text) > 18:
        raise ProtocolError(f"LINK with an invalid batch count {name!r}")
    return int(text)


class _LinkInput(PartialRequest):
    """What follows LINK: a request without end."""

    def __init__(self, link: "ServerLink", carrier: ServerSession) -> None:
        self.at = 0
        self.items = []
        self.endless = True
        self.link: ServerLink | None = link
        """None once the link goes on elsewhere, or has ended."""
        self.carrier = carrier

    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        link = self.link
        if link is None:
            raise ProtocolError("frames after the end of the link")
        try:
            self.at, need = link.take_some(data, at, end)
        except PeerError as error:
            link.end(str(error))
            raise
        evicted = self.carrier.engine.evicted
        if evicted:
            refusal = evicted.get(self.carrier)
            if refusal is not None:  # by what one of its sessions did
                raise refusal
        return self, -need

    def held(self) -> int:
        return 0

    def abandon(self) -> None:
        link = self.link
        self.link = None
        if link is not None:
            link.detach()


class _LinkMemory(Holder):
    """A link as the budget sees it: `held` are the bytes of its frames that its client has not acknowledged."""

    def __init__(self, link: "ServerLink") -> None:
        super().__init__()
        self.link = link

    def introduction_bytes(self) -> int:
        return 0

    def evict(self, error: BudgetError) -> None:
        self.link.drop_carrier(error)
        self.link.end(str(error))


class ServerLink(Link):
    """The server's end of one link."""

    def __init__(self, registry: LinkRegistry, identity: bytes, secret: bytes, place: bytes) -> None:
        super().__init__()
        self.registry = registry
        self.identity = identity
        self.secret = secret
        self.place = place
        """Which relay this is: a link of the same place takes the place of this one."""
        self.carrier: ServerSession | None = None
        """The session of the connection, if there is one."""
        self.sessions: dict[int, LinkedSession] = {}
        """By number."""
        self.over = False
        """Whether it has ended, though some of its sessions may still have to be closed."""
        self.noted = False
        """Whether the registry will close the next batch."""
        self.host: str = ""
        """Of the connection, the last one if there is none."""
        self.attached_at: float = 0.0
        """Since when there is a connection, in seconds of the server's clock."""
        self._last_opened: int = 0
        self._waiting: deque[LinkedSession] = deque()
        """Sessions with replies that did not fit; in rotation each sends a piece."""
        self._passed: dict[bytes, None] = {}
        """Queues for which its sessions were passed over while there was no connection."""
        self._taking = False
        self._heard: float = registry.now
        self._sent: float = registry.now
        self._lost: float = registry.now
        self._hosts: dict[bytes, str] = {}
        """By address of a rank, its host for the log."""
        self._memory = _LinkMemory(self)
        registry.engine.budget.enter(self._memory, LINK_BYTES)

    def __str__(self) -> str:
        place = f" of {printable(self.place)}" if self.place else ""
        return f"the link{place} from {self.host} with {len(self.sessions)} sessions"

    # The connection

    def can_resume(self, taken: int, told: int) -> bool:
        """Return whether both ends still have what the other has not taken."""
        return self.peer_taken() <= taken <= self.number and told <= self.taken

    def attach(self, carrier: ServerSession, taken: int) -> None:
        """Go on with a connection."""
        self.connect(taken)
        self.carrier = carrier
        self.host = carrier.host
        carrier.partial = _LinkInput(self, carrier)
        self.attached_at = self.registry.time()
        self._heard = self._sent = self.registry.now
        self.note()
        if self._passed:
            self.registry.offer_later(self)

    def detach(self) -> None:
        """Do without the connection, which is gone: wait for the next for as long as the grace period is."""
        self.carrier = None
        self.disconnect()
        self._lost = self.registry.now
        if self.registry.stopping:
            self.end("the server is stopping")

    def drop_carrier(self, error: PeerError) -> None:
        """Have the connection closed, if there is one; the link goes on without."""
        carrier = self._release_carrier()
        if carrier is not None:
            carrier.evict(error)

    def _release_carrier(self) -> ServerSession | None:
        """Do without the connection, which stays; return its session, if there is one."""
        carrier = self.carrier
        if carrier is not None:
            partial = carrier.partial
            assert isinstance(partial, _LinkInput)
            partial.link = None
            self.detach()
        return carrier

    def pass_over(self, queue: bytes) -> bool:
        """Return whether no item of a queue must be offered to a session; if so, that is done once the link is back."""
        if self.carrier is not None:
            return False
        self._passed[queue] = None
        self.registry.passed_over += 1
        return True

    def offer_some(self, most: int) -> bool:
        """Offer items for which sessions were passed over, at most so many. Returns whether that is done.

        The sessions of other links, which these items pass over in turn, cost time too.
        """
        registry = self.registry
        keyspace = registry.engine.keyspace
        most += registry.passed_over >> _PASSED_SHIFT
        for queue in list(islice(self._passed, registry.portion)):
            if self.carrier is None:
                return True
            while keyspace.offer(queue):
                most -= 1
                if most <= registry.passed_over >> _PASSED_SHIFT:
                    return False
            del self._passed[queue]
            if most <= registry.passed_over >> _PASSED_SHIFT:
                break
        return not self._passed

    def end(self, reason: str) -> None:
        """End the link, have its connection closed, and end its sessions soon."""
        if self.over:
            return
        self.over = True
        self.drop_carrier(ProtocolError("its link has ended"))
        registry = self.registry
        del registry.links[self.identity]
        if registry.places.get(self.place) is self:
            del registry.places[self.place]
        registry.engine.budget.forget(self._memory, LINK_BYTES)
        self.forget()
        self._waiting.clear()
        if self.sessions:
            if registry.on_end is not None:
                registry.on_end(self, reason)
            registry.end_later(self)

    def close_some(self, most: int) -> bool:
        """Close sessions of a link that is over, at most so many. Returns whether that is done."""
        for linked in list(islice(self.sessions.values(), most)):
            linked.close()
        return not self.sessions

    def say_end(self) -> None:
        """Send CLOSE for the link, and end it; its connection stays."""
        carrier = self.carrier
        if carrier is not None:
            self.add(CLOSE, LINK, LOST)
            self._move_out(carrier)
            if self._release_carrier() is not None:
                self.registry.engine.pending_flush.append(carrier)
        self.end("the server is stopping")

    # In

    def take_some(self, data: bytes, at: int, end: int) -> tuple[int, int]:
        """Handle frames, and put what they result in into the output of the connection's session."""
        carrier = self.carrier
        assert carrier is not None
        self._heard = self.registry.now
        self._taking = True
        try:
            most = 0 if carrier.unsent > carrier.engine.limits.unsent_high_water else self.registry.portion
            at, need = self.take(data, at, end, most)
        finally:
            self._taking = False
        if self.carrier is carrier:
            self._move_on()
            self._move_out(carrier)
        else:
            self._count()
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
                raise ProtocolError(f"CREDIT of {len(payload)} bytes")
        elif kind == OPEN:
            self._open(session, payload)
        elif kind == CLOSE:
            self._close(session, payload)
        else:
            raise ProtocolError(f"frame of kind {kind}")

    def _open(self, session: int, payload: bytes) -> None:
        if session <= self._last_opened or not 2 < len(payload) <= _MAX_TEXT:
            raise ProtocolError(f"OPEN of session {session} after session {self._last_opened}")
        self._last_opened = session
        registry = self.registry
        engine = registry.engine
        if registry.sessions >= engine.limits.sessions or registry.stopping:
            self.add(CLOSE, session, REFUSED)
            return
        registry.sessions += 1
        host = self._hosts.get(payload[2:])
        if host is None:
            host = self._host(payload[2:])
        port = U16.unpack_from(payload)[0]
        self.sessions[session] = LinkedSession(engine, self, session, host, port, registry.time())
        if self.over:  # the session was one too many for the budget
            registry.end_later(self)

    def _host(self, address: bytes) -> str:
        """Return the host of a rank with this address there: the peer's host, unless the relay serves other hosts."""
        host = self.host
        if not address.startswith((b"127.", b"::1")):
            host = printable(address)
        if len(self._hosts) < _MAX_HOSTS:
            self._hosts[address] = host
        return host

    def _close(self, session: int, payload: bytes) -> None:
        if session > self._last_opened or payload not in (END_OF_FILE, LOST, REFUSED):
            raise ProtocolError(f"CLOSE of session {session} with reason {payload!r}")
        if session == LINK:
            carrier = self._release_carrier()
            if carrier is not None:
                self.registry.close_later(carrier)
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

    def note(self) -> None:
        """Have the frames sent that were added outside of `take_some`."""
        if not self.noted and not self._taking and not self.over:
            self.noted = True
            self.registry.send_later(self)

    def send(self) -> int:
        """Put what was added into the output of the connection's session. Return how many sessions had waited."""
        if self.over:
            return 0
        count = self._move_on()
        carrier = self.carrier
        if carrier is None:
            self.close_batch()
            self._count()
        elif self._move_out(carrier):
            self.registry.engine.pending_flush.append(carrier)
        return count

    def _move_out(self, carrier: ServerSession) -> bool:
        """Close the batch and move it to the connection's session. Returns whether there is anything to send."""
        self.close_batch()
        out = self.out
        if out:
            self.out = []
            for batch in out:
                carrier.out.append(batch)
                carrier.unsent += len(batch)
            self._sent = self.registry.now
        self._count()
        return len(out) > 0

    def _count(self) -> None:
        """Count in the budget what the link holds, and have it evict a peer, perhaps this one, if that is too much."""
        memory = self._memory
        growth = 0 if self.over else self.held_bytes() - memory.held
        if growth:
            budget = self.registry.engine.budget
            memory.held += growth
            budget.charge(growth)
            if growth > 0:
                try:
                    budget.relieve(memory)
                except BudgetError as error:
                    memory.evict(error)

    def wait(self, linked: "LinkedSession") -> None:
        """Let a session send what did not fit, when there is credit and space, after the others that wait."""
        if not linked.waiting:
            linked.waiting = True
            if linked.credit > 0:
                self._wait(linked)

    def _wait(self, linked: "LinkedSession") -> None:
        if not linked.in_turn:
            linked.in_turn = True
            self._waiting.append(linked)
            self.note()

    def _move_on(self) -> int:
        """Let sessions that wait send a piece each, in rotation, while there is space; return how many.

        What exceeds a portion is left for later.
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

    def tick(self, now: float) -> None:
        registry = self.registry
        if self.carrier is None:
            if now - self._lost >= registry.grace:
                self.end(f"it was without a connection for {now - self._lost:.0f} s")
        elif now - self._heard >= 3 * registry.keep_alive:
            self.drop_carrier(ProtocolError(f"nothing received on a link for {now - self._heard:.0f} s"))
        elif not self.is_acknowledged() or now - self._sent >= registry.keep_alive:
            self.acknowledge()
            self.send()


class LinkedSession(Transport):
    """Moves the bytes of one session on a link, as far as there is credit for them."""

    def __init__(self, engine: Engine, link: ServerLink, number: int, host: str, port: int, now: float) -> None:
        self.link = link
        self.number = number
        self.credit: int = CREDIT_BYTES
        """Bytes that may be sent."""
        self.received: int = 0
        """Bytes received for which no CREDIT has been given."""
        self.waiting = False
        """Whether replies did not fit: they are in the session's backlog."""
        self.in_turn = False
        """Whether the link will have it send a piece: if it waits, and has credit."""
        self.queued = False
        """Whether the registry will have it go on."""
        self.ended = False
        """Whether the rank sends no more."""
        self.closed = False
        super().__init__(engine, host, port, now)

    def pass_over(self, queue: bytes) -> bool:
        return self.link.pass_over(queue)

    def awaited_since(self) -> float:
        link = self.link
        return inf if link.carrier is None else max(self.session.connected_at, link.attached_at)

    def shares_connection(self) -> bool:
        return True

    # In

    def receive(self, payload: bytes) -> None:
        """Execute what has arrived, or hold it back if requests before it are."""
        session = self.session
        self.received += len(payload)
        if self.received > CREDIT_BYTES:
            raise ProtocolError(f"DATA of session {self.number} without credit")
        if self.ended or session.table is session.engine.no_commands:
            return
        try:
            if session.stalled():
                session.hold_back(payload)
            else:
                self._execute(payload)
        except PeerError as error:
            self._fail(error)
        except Exception as error:
            self.link.registry.fail(self, error)

    def go_on(self) -> int:
        """Execute what was held back. Returns what that cost, compared with a frame."""
        session = self.session
        if self.closed or not session.stalled() or session.table is session.engine.no_commands:
            return 1
        buffer = session.input_buffer
        cost = 1 + (0 if buffer is None else len(buffer) >> 6)
        if session.incremental is not None:
            cost = _STEP_COST
        try:
            self._execute(b"")
        except PeerError as error:
            self._fail(error)
        except Exception as error:
            self.link.registry.fail(self, error)
        return cost

    def _execute(self, payload: bytes) -> None:
        session = self.session
        session.receive(payload)
        if session.out:
            self.flush()
        if not session.stalled():
            self._settle()
        elif session.incremental is not None or session.unsent <= session.engine.limits.unsent_high_water:
            self.link.registry.go_on_later(self)

    def _fail(self, error: PeerError) -> None:
        """Send the replies to earlier requests, let go of everything, and have the session closed."""
        self._send_rest()
        self.session.evict(error)

    def _send_rest(self) -> None:
        """Send what there is credit for, of a session that will be closed."""
        session = self.session
        backlog = session.backlog
        while backlog is not None and self.credit > 0:
            piece = b"".join(first_bytes(backlog.batch(), min(PIECE_BYTES, self.credit)))
            self.credit -= len(piece)
            self.link.add_data(self.number, piece)
            if backlog.took(len(piece)):
                backlog = session.backlog = None
        if backlog is None and session.out:
            self.link.add_data(self.number, b"".join(first_bytes(session.out, self.credit)))

    def _settle(self) -> None:
        """Allow the rank to send more, or close what it has ended."""
        if self.ended:
            self.close_if_done()
        elif self.received >= CREDIT_BYTES // 2:
            self.link.add(CREDIT, self.number, U32.pack(self.received))
            self.link.note()
            self.received = 0

    def close_if_done(self) -> None:
        """Close, unless requests or replies are still under way."""
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
        size = session.unsent
        link = self.link
        evicted = session.engine.evicted
        if link.over or (evicted and session in evicted):
            session.unsent -= length(out)
        elif session.backlog is not None:
            session.keep_unsent(out, 0)
        elif size <= self.credit and size <= PIECE_BYTES and link.has_room():
            self.credit -= size
            session.unsent = 0
            link.add_data(self.number, bytes(out[0]) if len(out) == 1 else b"".join(out))
            link.note()
        else:
            session.keep_unsent(out, 0)
            link.wait(self)
        out.clear()

    def send_piece(self) -> bool:
        """Send a piece of what did not fit. Returns whether there is more, and credit for it."""
        session = self.session
        backlog = session.backlog
        if backlog is None:
            self.waiting = False
            return False
        piece = b"".join(first_bytes(backlog.batch(), min(PIECE_BYTES, self.credit)))
        self.credit -= len(piece)
        session.unsent -= len(piece)
        self.link.add_data(self.number, piece)
        if not backlog.took(len(piece)):
            return self.credit > 0
        session.backlog = None
        self.waiting = False
        if session.stalled():
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
        if not link.over:
            link.add(CLOSE, self.number, LOST)
            link.note()
