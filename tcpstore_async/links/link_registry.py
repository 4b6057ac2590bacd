"""All links of one server: what LINK does, and when a broken link is given up.

Without I/O: the server calls `LinkRegistry.tick` with the time, and `work` after each `on_work`.

Invariants: no more links and sessions than the limits allow. A resumed link has lost nothing. Nothing here takes longer
than a few milliseconds.
"""

from hmac import compare_digest
from typing import Final

import msgspec

from ..base.errors import ProtocolError
from ..keyspace.waiter_types import IDLE
from ..session.server import ServerSession
from ..session.store import PORTION, Store
from ..session.transport import Transport
from ..wire.link import GOING_AWAY, LINK, VERSION
from ..wire.values import Framed, pack, unpack
from .frames import LINK_REFUSED, NEW, RESUMED, UNKNOWN, LinkReply
from .link_server import LinkInput, ServerLink
from .linked_session import LinkedSession
from .single_link import SingleLink
from .work import LinkWork

_ID_BYTES: Final = 16
_MAX_TEXT: Final = 256


class LinkRegistry(LinkWork):
    def __init__(
        self,
        store: Store,
        instance: str,
        grace: float,
        keep_alive: float = 5.0,
        portion: int = PORTION,
        offered: bool = True,
    ) -> None:
        """`offered` says whether peers may open links."""
        super().__init__(store, grace, keep_alive, portion)
        self.instance = instance
        self.links: dict[bytes, ServerLink] = {}
        """Keyed by id."""
        self.places: dict[tuple[str, bytes], ServerLink] = {}
        """Links that named a place, keyed by the id of their token and the place: no other token can take the place."""
        self.singles: dict[bytes, SingleLink] = {}
        """Single links, keyed by id."""
        self.attaching: dict[ServerSession, SingleLink] = {}
        """Sessions that have sent LINK, and the single links that use their connections after its reply."""
        if offered:
            store.hub.register("link", lambda one: self.open)
            store.hub.register("taken", lambda one: _taken)

    # LINK

    def open(self, carrier: ServerSession, items: list[tuple[bytes, Framed]]) -> bytes:
        """Execute LINK: make the connection of a session a link; return the reply."""
        said = {name: unpack(value) for name, value in items}
        identity, secret = said.get(b"id", b""), said.get(b"secret", b"")
        if len(identity) != _ID_BYTES or len(secret) != _ID_BYTES or carrier.state != IDLE:
            raise ProtocolError("LINK without a valid id and secret, or from a connection with a pending wait")
        if isinstance(carrier.owner, LinkedSession):
            return self._reply(LINK_REFUSED, 0, "this is a connection to a relay; connect to its server instead")
        owner = carrier.owner
        if carrier in self.attaching or (isinstance(owner, Transport) and owner.single is not None):
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
                # It was delayed, or recorded and replayed.
                refusal = f"attempt {attempt} is stale: the link is already at attempt {known.attempt}"
            elif not self._may_resume(carrier, known):
                refusal = "the link belongs to a client whose token allows more"
            if refusal:
                self.on_refusal(carrier.host, str(carrier), f"LINK refused: {refusal}")
                return self._reply(LINK_REFUSED, 0, refusal)
        if said.get(b"single"):
            return self._open_single(carrier, single, said, attempt)
        if carrier.store is not self.store:
            reason = f"this connection is in {carrier.store}; connect to the server's own port, and enter that store"
            return self._reply(LINK_REFUSED, 0, reason)
        if said.get(b"instance"):
            return self._resume(carrier, link, said, attempt)
        if link is not None:
            link.end("its client has started over")  # the client never got the reply to its first LINK
        if self.stopping:
            return self._reply(LINK_REFUSED, 0, "the server is stopping")
        place = said.get(b"place", b"")[:_MAX_TEXT]
        access = self.store.hub.auth.access_of(carrier)
        seat = ("" if access is None else access.identity, place)
        other = self.places.get(seat)
        if other is not None:
            other.end("another link has taken its place")
        if len(self.links) >= self.store.limits.links:
            return self._reply(LINK_REFUSED, 0, f"link limit {len(self.links)} reached (the `links` limit)")
        link = self.links[identity] = ServerLink(self, identity, secret, place)
        link.attempt = attempt
        link.granted = carrier in self.store.hub.auth.granted
        link.access = access
        link.seat = seat
        if place:
            self.places[seat] = link
        if len(self.links) == 1:
            self.on_link()
        link.attach(carrier, 0)
        return self._reply(NEW, 0)

    def _may_resume(self, carrier: ServerSession, known: ServerLink | SingleLink) -> bool:
        """Return whether a connection may do at least what the one that opened the link may: tokens are renewed."""
        granted = self.store.hub.auth.granted
        if isinstance(known, SingleLink):
            was, access = known.session in granted, granted.get(known.session)
        else:
            was, access = known.granted, known.access
        if not was or carrier not in granted:
            return was == (carrier in granted)
        now = granted[carrier]
        return now is None or (access is not None and now.includes(access))

    def make_way(self, session: ServerSession) -> None:
        usage = self.store.hub.auth.usage_of(session)
        if usage is None:
            return
        while usage.suspended and 0 < usage.max_sessions < len(usage.sessions):
            oldest = next(iter(usage.suspended))
            self.singles[oldest].end(
                f"a new session has taken its place (token {usage.identity} allows {usage.max_sessions})"
            )
        session.store.activate()

    def forget_link(self, identity: bytes) -> None:
        link = self.links.pop(identity)
        if self.places.get(link.seat) is link:
            del self.places[link.seat]

    def forget_single(self, identity: bytes) -> None:
        del self.singles[identity]

    def _resume(self, carrier: ServerSession, link: ServerLink | None, said: dict[bytes, bytes], attempt: int) -> bytes:
        taken, told = _number(said, b"taken"), _number(said, b"told")
        if link is None:
            return self._reply(UNKNOWN, 0)
        if said[b"instance"] != self.instance.encode() or not link.can_resume(taken, told):
            link.end("its client has lost its state, or refers to a different server")
            return self._reply(UNKNOWN, 0)
        if self.stopping:  # the link ends with its present connection
            link.end("the server is stopping")
            return self._reply(UNKNOWN, 0)
        link.attempt = attempt
        link.drop_carrier(ProtocolError("its link continues on another connection"))
        link.attach(carrier, taken)
        return self._reply(RESUMED, link.taken)

    def _open_single(
        self, carrier: ServerSession, link: SingleLink | None, said: dict[bytes, bytes], attempt: int
    ) -> bytes:
        store = self.store
        if said.get(b"instance"):
            if link is None:
                return self._reply(UNKNOWN, 0)
            taken = _number(said, b"taken")
            if said[b"instance"] != self.instance.encode() or self.stopping or not link.stream.can_resume(taken, 0):
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
            if count >= store.limits.sessions:
                return self._reply(LINK_REFUSED, 0, f"session limit {count} reached (the `sessions` limit)")
            link = SingleLink(self, said[b"id"], said[b"secret"], carrier)
            self.singles[link.identity] = link
        link.attempt = attempt
        status = RESUMED if said.get(b"instance") else NEW
        self.attaching[carrier] = link
        store.hub.pending_flush.append(carrier)
        return self._reply(status, link.stream.taken)

    def _reply(self, status: str, taken: int, reason: str = "") -> bytes:
        reply = LinkReply(status, self.instance, taken, self.keep_alive, self.grace, reason)
        return pack(msgspec.json.encode(reply))

    def tick(self, now: float) -> bool:
        """Acknowledge, keep alive, and end what is overdue; return whether there are links."""
        soon = now + (now - self.now)
        self.now = now
        for link in list(self.links.values()):
            link.tick(now, soon)
        for identity in list(self.suspended):
            self.singles[identity].tick(now)
        return len(self.links) + len(self.suspended) > 0

    def all_sessions(self) -> list[ServerSession]:
        linked = [linked.session for link in self.links.values() for linked in link.sessions.values()]
        return linked + [self.singles[identity].session for identity in self.suspended]

    def clients(self, connections: int) -> int:
        """Return the number of clients, given the number of connections: ranks on links count, links do not.

        A client whose connection is broken counts while its session is kept.
        """
        carriers = sum([link.carrier is not None for link in self.links.values()])
        return connections - carriers + self.sessions + len(self.suspended)

    def is_carrier(self, session: ServerSession) -> bool:
        """Return whether a session's connection is a link's."""
        return isinstance(session.partial, LinkInput)

    def go_away(self) -> None:
        """Admit no new sessions and links, and end links without a connection."""
        self.stopping = True
        self._end_suspended()
        for link in list(self.links.values()):
            if link.carrier is None:
                link.end("the server is stopping")
            else:
                link.add(GOING_AWAY, LINK)
                link.note()

    def close_all(self) -> None:
        """End all links at once: the server stops. Sessions with last frames are in `Hub.pending_flush`."""
        self.stopping = True
        self._end_suspended()
        for link in list(self.links.values()):
            link.close_link()
        self.end_all()

    def _end_suspended(self) -> None:
        for identity in list(self.suspended):
            self.singles[identity].end("")


def _taken(session: ServerSession, count: int) -> None:
    """Execute TAKEN: acknowledge replies on a single link; see `docs/links.md`."""
    owner = session.owner
    link = owner.single if isinstance(owner, Transport) else None
    if not isinstance(link, SingleLink):
        raise ProtocolError("TAKEN on a connection that is not a single link")
    link.acknowledge(count)


def _number(said: dict[bytes, bytes], name: bytes) -> int:
    text = said.get(name, b"")
    if not text.isdigit() or len(text) > 18:
        raise ProtocolError(f"LINK with an invalid number as its {name.decode()}")
    return int(text)
