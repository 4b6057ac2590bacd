"""All links of one server: what LINK does, what is left for later, and when a link that broke is given up.

Without I/O: the server calls `LinkRegistry.tick` with the time, and `work` whenever `on_work` asked for it.

Invariants: no more links and sessions than the limits allow. A link that goes on has lost nothing. Nothing here takes
longer than a few milliseconds.
"""

from collections import deque
from collections.abc import Callable
from hmac import compare_digest
from typing import Final

import msgspec

from ..base.errors import ProtocolError
from ..keyspace.waiter_types import IDLE
from ..session.server import PORTION, Engine, ServerSession, Transport
from ..wire.link import (
    GOING_AWAY,
    LINK,
    VERSION,
)
from ..wire.values import Framed, pack, unpack
from .link import LINK_REFUSED, NEW, RESUMED, UNKNOWN, LinkReply
from .link_server import LinkInput, ServerLink
from .linked_session import LinkedSession
from .passed_over import PassedOver
from .single_link import SingleLink

_CLOSING: Final = 8
"""A session is closed in the time in which so many frames are handled."""

_STEPS: Final = 4
"""Commands that are under way and go on before other peers are served."""

_LINKS: Final = 256
"""Links written to before other peers are served."""

_ID_BYTES: Final = 16
_MAX_TEXT: Final = 256


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
        self.places: dict[tuple[str, bytes], ServerLink] = {}
        """By the id of their token and place, for links that named one: others cannot take it."""
        self.sessions: int = 0
        """Of all links, but single ones."""
        self.singles: dict[bytes, SingleLink] = {}
        """Single links, by id."""
        self.suspended: dict[SingleLink, bool] = {}
        """Those that have no connection now."""
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
        self.on_end: Callable[[object, str], object] | None = None
        """Called when a link that still had sessions ends, with the reason."""
        self.on_refused: Callable[[str, int], object] | None = None
        """Called with the host and port of a rank whose session the limit does not allow."""
        self.on_refusal: Callable[[str, str, str], object] | None = None
        """Called when a link, or a session on one, is refused, with the peer's host, the peer and the reason."""
        self.on_failure: Callable[[Transport], object] | None = None
        """Called in an exception's handler for a session that failed: close it. Without it, the exception is raised."""
        self.stopping = False
        self._scheduled = False
        """Whether `work` will be called."""
        self._to_end: deque[ServerLink] = deque()
        """Links that are over and have sessions left."""
        self._to_close: list[ServerSession] = []
        """Connections whose links have been closed by their clients."""
        self._to_offer: deque[PassedOver] = deque()
        """Links that are back, and whose sessions were passed over."""
        self._to_send: deque[ServerLink] = deque()
        """Links with frames that belong to no batch yet."""
        self._to_go_on: deque[LinkedSession] = deque()
        """Sessions whose requests were held back."""
        self._to_step: deque[SingleLink] = deque()
        """Those without a connection whose command is under way."""
        engine.open_link = self.open

    # LINK

    def open(self, carrier: ServerSession, items: list[tuple[bytes, Framed]]) -> bytes:
        """Make the connection of a session a link, as its LINK demands; return the reply."""
        said = {name: unpack(value) for name, value in items}
        identity, secret = said.get(b"id", b""), said.get(b"secret", b"")
        if len(identity) != _ID_BYTES or len(secret) != _ID_BYTES or carrier.state != IDLE:
            raise ProtocolError("LINK without a valid id and secret, or from a connection with a pending wait")
        if isinstance(carrier.owner, LinkedSession):
            return self._reply(LINK_REFUSED, 0, "this is a connection to a relay; connect to its server instead")
        owner = carrier.owner
        if carrier in self.engine.attaching or (isinstance(owner, Transport) and owner.single is not None):
            return self._reply(LINK_REFUSED, 0, "this connection already has a link")
        if said.get(b"version", b"") != b"%d" % VERSION:
            return self._reply(LINK_REFUSED, 0, f"this server speaks version {VERSION} of the link protocol")
        attempt = _number(said, b"attempt") if b"attempt" in said else 0
        link = self.links.get(identity)
        single = self.singles.get(identity)
        for known in (link, single):
            if known is None:
                continue
            refusal = ""
            if not compare_digest(known.secret, secret):
                refusal = "wrong secret"
            elif known.attempt and attempt <= known.attempt:
                # It was delayed, or recorded, and the link has moved on since.
                refusal = f"attempt {attempt} is stale: the link is already at attempt {known.attempt}"
            elif not self._same_access(carrier, known):
                refusal = "the link belongs to a client that authenticated differently"
            if refusal:
                self.refuse(carrier.host, str(carrier), f"LINK refused: {refusal}")
                return self._reply(LINK_REFUSED, 0, refusal)
        if said.get(b"single"):
            return self._open_single(carrier, single, said, attempt)
        if carrier.engine.store is not None:
            reason = (
                f"this connection is in {carrier.engine.store}; connect to the server's own port, and enter that store"
            )
            return self._reply(LINK_REFUSED, 0, reason)
        if said.get(b"instance"):
            return self._resume(carrier, link, said, attempt)
        if link is not None:
            link.end("its client has started over")  # it never heard that the link exists
        if self.stopping:
            return self._reply(LINK_REFUSED, 0, "the server is stopping")
        place = said.get(b"place", b"")[:_MAX_TEXT]
        access = self.engine.granted.get(carrier)
        seat = ("" if access is None else access.identity, place)
        other = self.places.get(seat)
        if other is not None:
            other.end("another link has taken its place")
        if len(self.links) >= self.engine.limits.links:
            return self._reply(LINK_REFUSED, 0, f"link limit {len(self.links)} reached (the `links` limit)")
        link = self.links[identity] = ServerLink(self, identity, secret, place)
        link.attempt = attempt
        link.granted = carrier in self.engine.granted
        link.access = access
        link.seat = seat
        if place:
            self.places[seat] = link
        if len(self.links) == 1 and self.on_link is not None:
            self.on_link()
        link.attach(carrier, 0)
        return self._reply(NEW, 0)

    def _same_access(self, carrier: ServerSession, known: "ServerLink | SingleLink") -> bool:
        """Return whether a connection has authenticated as the one did that made the link."""
        granted = self.engine.granted
        if isinstance(known, SingleLink):
            was, access = known.session in granted, granted.get(known.session)
        else:
            was, access = known.granted, known.access
        return was == (carrier in granted) and access == granted.get(carrier)

    def make_way(self, session: ServerSession) -> None:
        """End the sessions of a new one's token that have been without a connection for longest, if there are too many.

        One that resumes is not new: its token is known before that is, so it is admitted whatever is suspended.
        """
        usage = self.engine.usage_of(session)
        if usage is None:
            return
        while usage.suspended and 0 < usage.max_sessions < len(usage.sessions):
            oldest = next(iter(usage.suspended))
            oldest.end(f"a new session has taken its place (token {usage.identity} allows {usage.max_sessions})")
        session.engine.activate()

    def refuse(self, host: str, peer: str, reason: str) -> None:
        """Report that something was refused to a peer."""
        if self.on_refusal is not None:
            self.on_refusal(host, peer, reason)

    def _resume(
        self, carrier: ServerSession, link: "ServerLink | None", said: dict[bytes, bytes], attempt: int
    ) -> bytes:
        taken, told = _number(said, b"taken"), _number(said, b"told")
        if link is None:
            return self._reply(UNKNOWN, 0)
        if said[b"instance"] != self.instance.encode() or not link.can_resume(taken, told):
            link.end("its client has lost its state, or refers to a different server")
            return self._reply(UNKNOWN, 0)
        if self.stopping:  # it would end with the connection that it has
            link.end("the server is stopping")
            return self._reply(UNKNOWN, 0)
        link.attempt = attempt
        link.drop_carrier(ProtocolError("its link continues on another connection"))
        link.attach(carrier, taken)
        return self._reply(RESUMED, link.taken)

    def _open_single(
        self, carrier: ServerSession, link: SingleLink | None, said: dict[bytes, bytes], attempt: int
    ) -> bytes:
        engine = self.engine
        if said.get(b"instance"):
            if link is None:
                return self._reply(UNKNOWN, 0)
            taken = _number(said, b"taken")
            if said[b"instance"] != self.instance.encode() or self.stopping or not link.can_resume(taken):
                link.end("its client has lost its state, or the server is stopping")
                return self._reply(UNKNOWN, 0)
            link.acknowledge(taken)
        else:
            if link is not None:
                link.end("its client has started over")
            if self.stopping:
                return self._reply(LINK_REFUSED, 0, "the server is stopping")
            self.make_way(carrier)
            count = len(self.singles) + self.sessions
            if count >= engine.limits.sessions:
                return self._reply(LINK_REFUSED, 0, f"session limit {count} reached (the `sessions` limit)")
            link = SingleLink(self, said[b"id"], said[b"secret"], carrier)
            self.singles[link.identity] = link
        link.attempt = attempt
        status = RESUMED if said.get(b"instance") else NEW
        engine.attaching[carrier] = link
        engine.pending_flush.append(carrier)
        return self._reply(status, link.received)

    def _reply(self, status: str, taken: int, reason: str = "") -> bytes:
        reply = LinkReply(status, self.instance, taken, self.keep_alive, self.grace, reason)
        return pack(msgspec.json.encode(reply))

    # Work

    def send_later(self, link: "ServerLink") -> None:
        """Close the link's batch soon."""
        self._to_send.append(link)
        self._schedule()

    def offer_later(self, passed: PassedOver) -> None:
        """Offer a link's sessions soon what they were passed over for."""
        self._to_offer.append(passed)
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

    def step_later(self, link: SingleLink) -> None:
        """Go on soon with a command that is under way."""
        self._to_step.append(link)
        self._schedule()

    def expect_ticks(self) -> None:
        """Have `tick` called: a link has no connection."""
        if self.on_link is not None:
            self.on_link()

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
        for _ in range(min(len(self._to_step), _STEPS)):
            self._to_step.popleft().step()
        spent = 0
        for _ in range(min(len(self._to_send), _LINKS)):
            if spent >= self.portion:
                break
            link = self._to_send.popleft()
            link.noted = False
            spent += link.send()
        self._scheduled = bool(
            self._to_close or self._to_end or self._to_offer or self._to_go_on or self._to_step or self._to_send
        )
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

    def fail(self, transport: Transport) -> None:
        """Close a session after an exception that is no peer's fault. To be called in its handler."""
        if self.on_failure is None:
            raise
        self.on_failure(transport)

    def tick(self, now: float) -> bool:
        """Acknowledge, keep alive, and end what is overdue. Returns whether there are links."""
        self.now = now
        for link in list(self.links.values()):
            link.tick(now)
        for single in list(self.suspended):
            single.tick(now)
        return len(self.links) + len(self.suspended) > 0

    def all_sessions(self) -> list[ServerSession]:
        linked = [linked.session for link in self.links.values() for linked in link.sessions.values()]
        return linked + [single.session for single in self.suspended]

    def clients(self, connections: int) -> int:
        """Return how many clients there are, given the number of connections: ranks on links, but not the links.

        A client whose connection is broken counts as long as it may come back.
        """
        carriers = sum([link.carrier is not None for link in self.links.values()])
        return connections - carriers + self.sessions + len(self.suspended)

    def is_carrier(self, session: ServerSession) -> bool:
        """Return whether a session's connection is a link's."""
        return isinstance(session.partial, LinkInput)

    def go_away(self) -> None:
        """Admit no new sessions and links, and give up links without a connection."""
        self.stopping = True
        self._end_suspended()
        for link in list(self.links.values()):
            if link.carrier is None:
                link.end("the server is stopping")
            else:
                link.add(GOING_AWAY, LINK)
                link.note()

    def close_all(self) -> None:
        """End all links, at once: the server stops. Their last frames are in `Engine.pending_flush`'s sessions."""
        self.stopping = True
        self._end_suspended()
        for link in list(self.links.values()):
            link.say_end()
        while self._to_end:
            if self._to_end[0].close_some(self.portion):
                self._to_end.popleft()

    def _end_suspended(self) -> None:
        for single in list(self.suspended):
            single.end("")


def _number(said: dict[bytes, bytes], name: bytes) -> int:
    text = said.get(name, b"")
    if not text.isdigit() or len(text) > 18:
        raise ProtocolError(f"LINK with an invalid number as its {name.decode()}")
    return int(text)
