"""All links of one server: what LINK does, and when a broken link is given up.

Without I/O: the server calls `LinkRegistry.tick` with the time, and `work` after each `on_work`.

Invariants: no more links and sessions than the limits allow. A resumed link has lost nothing. Nothing here takes longer
than a few milliseconds.
"""

from typing import Final

import msgspec

from ..base.errors import ProtocolError
from ..keyspace.waiter_types import IDLE
from ..session.server import ServerSession
from ..session.store import PORTION, Store
from ..session.transport import Transport
from ..wire.link import GOING_AWAY, LINK, VERSION
from ..wire.values import Framed, pack, unpack
from .frames import ELSEWHERE, LINK_REFUSED, NEW, RESUMED, UNKNOWN, LinkReply
from .link_server import LinkInput, ServerLink
from .linked_session import LinkedSession
from .single_link import SingleLink
from .work import LinkWork

_ID_BYTES: Final = 16
_MAX_TEXT: Final = 256

_STOPPING: Final = "the server is stopping"


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
        self.durable = False
        """Whether links survive the server."""
        self.links: dict[bytes, ServerLink] = {}
        """Keyed by id."""
        self.places: dict[tuple[str, bytes], ServerLink] = {}
        """Links that named a place, keyed by the id of their token and the place: no other token can take the place."""
        self.singles: dict[bytes, SingleLink] = {}
        """Single links, keyed by id."""
        if offered:
            store.hub.register("link", lambda one: self.open)
            store.hub.register("taken", lambda one: _taken)

    @property
    def elsewhere(self) -> str | None:
        """None unless the server stands by: see `Auth.elsewhere`. To be set before the first peer is served."""
        return self.store.hub.auth.elsewhere

    @elsewhere.setter
    def elsewhere(self, address: str | None) -> None:
        self.store.hub.auth.elsewhere = address

    def known(self, identity: bytes) -> ServerLink | SingleLink | None:
        """Return the link of this id, of either kind; None if there is none."""
        return self.links.get(identity) or self.singles.get(identity)

    # LINK

    def open(self, session: ServerSession, items: list[tuple[bytes, Framed]]) -> bytes:
        """Execute LINK: make the connection of a session a link, or a link's next connection; return the reply."""
        if self.elsewhere is not None:
            return pack(msgspec.json.encode({"status": ELSEWHERE, "server": self.elsewhere}))
        said = {name: unpack(value) for name, value in items}
        identity, secret = said.get(b"id", b""), said.get(b"secret", b"")
        if len(identity) != _ID_BYTES or len(secret) != _ID_BYTES or session.state != IDLE:
            raise ProtocolError("LINK without a valid id and secret, or from a connection with a pending wait")
        secret = said[b"secret"] = self.clock.hidden(secret)
        single = bool(said.get(b"single"))
        attempt = _number(said, b"attempt") if b"attempt" in said else 0
        link = self.known(identity)
        refusal = self._refusal(session, said.get(b"version", b""), single)
        if not refusal and link is not None:
            refusal = link.carrier.refusal(secret, attempt)
            if not refusal and not self._may_resume(session, link):
                refusal = "the link belongs to a client whose token allows more"
            elif not refusal and isinstance(link, SingleLink) != single:
                refusal = "the link is of the other kind"
            if refusal:
                self.on_refusal(session.host, str(session), f"LINK refused: {refusal}")
        if refusal:
            return self._reply(LINK_REFUSED, 0, refusal)
        instance = said.get(b"instance", b"")
        taken = told = 0
        if instance:
            taken = _number(said, b"taken")
            told = 0 if single else _number(said, b"told")
            if link is None:
                return self._reply(UNKNOWN, 0, _STOPPING if self.stopping else "")
            lost = instance != self.instance.encode() or not link.carrier.stream.can_resume(taken, told)
            if lost or self.stopping:  # a link that is not resumed ends with its present connection
                link.end("its client has lost its state, or refers to a different server" if lost else _STOPPING)
                return self._reply(UNKNOWN, 0, _STOPPING if self.stopping else "")
        else:
            if link is not None:
                link.end("its client has started over")  # the client never got the reply to its first LINK
            new = self._new_single(session, said) if single else self._new_link(session, said)
            if isinstance(new, str):
                return self._reply(LINK_REFUSED, 0, new)
            link = new
        link.carrier.attempt = attempt
        if isinstance(link, SingleLink):
            link.give_back()
            link.acknowledge(taken)
            self.attaching[link] = session
            self.store.hub.pending_flush.append(session)
        else:
            link.examines = bool(said.get(b"examines"))
            link.attach(session, taken)
        return self._reply(RESUMED if instance else NEW, link.carrier.stream.taken)

    def _refusal(self, session: ServerSession, version: bytes, single: bool) -> str:
        """Return why this connection cannot be a link's; "" if it can."""
        owner = session.owner
        if isinstance(owner, LinkedSession):
            return "this is a connection to a relay; connect to its server instead"
        if session in self.attaching.values() or (isinstance(owner, Transport) and owner.single is not None):
            return "this connection already has a link"
        if version != b"%d" % VERSION:
            return f"this server speaks version {VERSION} of the link protocol"
        if not single and session.store is not self.store:
            return f"this connection is in {session.store}; connect to the server's own port, and enter that store"
        return ""

    def _new_link(self, session: ServerSession, said: dict[bytes, bytes]) -> ServerLink | str:
        """Return a new link of a relay, or why there may be none."""
        if self.stopping:
            return _STOPPING
        place = said.get(b"place", b"")[:_MAX_TEXT]
        access = self.store.hub.auth.access_of(session)
        seat = ("" if access is None else access.identity, place)
        other = self.places.get(seat)
        if other is not None:
            other.end("another link has taken its place")
        if len(self.links) >= self.store.limits.links:
            return f"link limit {len(self.links)} reached (the `links` limit)"
        link = self.links[said[b"id"]] = ServerLink(self, said[b"id"], said[b"secret"], place)
        link.granted = session in self.store.hub.auth.granted
        link.access = access
        link.seat = seat
        if place:
            self.places[seat] = link
        if len(self.links) == 1:
            self.expect_ticks()
        return link

    def _new_single(self, session: ServerSession, said: dict[bytes, bytes]) -> SingleLink | str:
        """Return a new single link, or why there may be none."""
        if self.stopping:
            return _STOPPING
        self.make_way(session)
        count = len(self.singles) + self.sessions
        if count >= self.store.limits.sessions:
            return f"session limit {count} reached (the `sessions` limit)"
        link = self.singles[said[b"id"]] = SingleLink(self, said[b"id"], said[b"secret"], session)
        return link

    def _may_resume(self, session: ServerSession, link: ServerLink | SingleLink) -> bool:
        """Return whether a connection may do at least what the one that opened the link may: tokens are renewed."""
        granted = self.store.hub.auth.granted
        if isinstance(link, SingleLink):
            was, access = link.session in granted, granted.get(link.session)
        else:
            was, access = link.granted, link.access
        if not was or session not in granted:
            return was == (session in granted)
        now = granted[session]
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

    def _reply(self, status: str, taken: int, reason: str = "") -> bytes:
        reply = LinkReply(status, self.instance, taken, self.keep_alive, self.grace, reason, self.durable)
        return pack(msgspec.json.encode(reply))

    def tick(self) -> bool:
        """Acknowledge, keep alive, and end what is overdue; return whether there are links."""
        if not self.clock.enters(self, "tick"):
            self._tick(self.clock.now)
        return len(self.links) + len(self.suspended) > 0

    def _tick(self, now: float) -> None:
        soon = now + (now - self.ticked)
        self.ticked = now
        for link in list(self.links.values()):
            link.tick(now, soon)
        for identity in list(self.suspended):
            self.singles[identity].tick(now)

    def all_sessions(self) -> list[ServerSession]:
        linked = [linked.session for link in self.links.values() for linked in link.sessions.values()]
        return linked + [self.singles[identity].session for identity in self.suspended]

    def clients(self, connections: int) -> int:
        """Return the number of clients, given the number of connections: ranks on links count, links do not.

        A client whose connection is broken counts while its session is kept.
        """
        carrying = sum([link.connection is not None for link in self.links.values()])
        return connections - carrying + self.sessions + len(self.suspended)

    def is_carrying(self, session: ServerSession) -> bool:
        """Return whether a session's connection is a link's."""
        return isinstance(session.partial, LinkInput)

    def go_away(self) -> None:
        """Admit no new sessions and links, and end links without a connection."""
        if self.clock.enters(self, "go_away"):
            return
        self.stopping = True
        self._end_suspended()
        for link in list(self.links.values()):
            if link.connection is None:
                link.end(_STOPPING)
            else:
                link.add(GOING_AWAY, LINK)
                link.note()

    def restart(self) -> None:
        """Begin every grace period anew: all connections are gone, as there was no server for a while."""
        if self.clock.enters(self, "restart"):
            return
        self.ticked = self.clock.now
        for carrier in [link.carrier for link in self.links.values()] + [one.carrier for one in self.singles.values()]:
            carrier.lost = self.clock.now

    def hold(self, what: int) -> None:
        """Have commands wait, or wait no longer: see `Hub.held`. Here, as sessions on links continue as an event."""
        if self.clock.enters(self, "hold", what):
            return
        self.store.hub.held = what
        if what:
            return
        for link in self.links.values():
            for linked in link.sessions.values():
                if linked.session.stalled():
                    linked.resume_later()

    def close_all(self) -> None:
        """End all links at once: the server stops. Sessions with last frames are in `Hub.pending_flush`."""
        if self.clock.enters(self, "close_all"):
            return
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
