"""A target whose peers are sessions on a link: scripts are played through frames, and through connections that break.

As the store's targets, without I/O. All that a peer says has been executed and answered before the script goes on.
"""

from __future__ import annotations

import random

from conformance.script import Answer
from conformance.targets import Cut, demand_nothing_left, whole
from tcpstore_async.base.limits import Limits
from tcpstore_async.links.link_client import ClientLink, Stream
from tcpstore_async.links.link_registry import LinkRegistry
from tcpstore_async.links.linked_session import LinkedSession
from tcpstore_async.server.features import attach_features
from tcpstore_async.session.store import Store
from tcpstore_async.session.transport import Transport
from tcpstore_async.wire.link import REPLY_CREDIT_BYTES


class _Carrier(Transport):
    def __init__(self, store: Store, target: LinkTarget) -> None:
        super().__init__(store, "127.0.0.1", 1, 0.0)
        self.target = target

    def flush(self) -> None:
        self.target.down += b"".join(self.session.out)
        self.session.out.clear()
        self.session.unsent = 0

    def close(self) -> None:
        self.session.leave()


class LinkPeer(Stream):
    def __init__(self, target: LinkTarget) -> None:
        super().__init__()
        self.target = target
        self.link = target.link
        self.heard = bytearray()
        self.is_closed = False

    def received(self, data: bytes) -> None:
        self.heard += data
        if self.target.reads:
            self.link.consume(self, len(data))

    def credited(self) -> None:
        pass

    def closed(self) -> None:
        self.is_closed = True


class LinkTarget:
    """A store to which all peers are connected by one link."""

    def __init__(
        self, cut: Cut = whole, breaks: random.Random | None = None, store: Store | None = None, reads: bool = True
    ) -> None:
        self.store = store or Store(Limits())
        self.registry = attach_features(self.store, "a store", "none", 30.0).links
        self.link = ClientLink()
        self.cut = cut
        self.breaks = breaks
        """Chooses where the connection breaks, if it does."""
        self.reads = reads
        """Whether peers read what arrives for them, so that more may be sent."""
        self.peers: dict[str, LinkPeer] = {}
        self.down = b""
        self.up = b""
        self.dial()

    def connect(self, peer: str) -> None:
        stream = self.peers[peer] = LinkPeer(self)
        self.link.open(stream, "127.0.0.1", 1)
        self.exchange()

    def say(self, peer: str, data: bytes) -> None:
        stream = self.peers[peer]
        for piece in self.cut(data):
            while piece and not stream.is_closed:
                count = min(len(piece), stream.credit) if self.link.has_room() else 0
                if count:
                    self.link.send(stream, piece[:count])
                    piece = piece[count:]
                self.exchange()

    def hear(self, peer: str, expected: Answer) -> Answer:
        stream = self.peers[peer]
        data = bytes(stream.heard)
        stream.heard.clear()
        return Answer(data, stream.is_closed)

    def read(self, peer: str) -> None:
        """Have a peer read what has arrived for it."""
        stream = self.peers[peer]
        self.link.consume(stream, REPLY_CREDIT_BYTES - self.session(peer).credit - stream.consumed)
        self.exchange()

    def session(self, peer: str) -> LinkedSession:
        """Return the server's end of a peer."""
        return self.registry.links[self.link.identity].sessions[self.peers[peer].number]

    def half_close(self, peer: str) -> None:
        self.link.end(self.peers[peer])
        self.exchange()

    def close(self, peer: str) -> None:
        stream = self.peers[peer]
        if not stream.is_closed:
            self.link.close(stream)
            stream.is_closed = True
            self.exchange()

    def stop_server(self) -> None:
        raise AssertionError("a store has no server to stop")

    def finish(self) -> None:
        """Everybody leaves; nothing of them may stay behind."""
        for peer in self.peers:
            self.close(peer)
        demand_nothing_left(self.store)
        assert self.registry.sessions == 0

    def cut_off(self) -> None:
        """Let the connection break."""
        self.carrier.close()
        self.serve()
        self.link.disconnect()

    def dial(self) -> None:
        self.carrier = _Carrier(self.store, self)
        self.up = self.down = b""
        self.carrier.session.receive(self.link.request())
        self.carrier.flush()
        size = int.from_bytes(self.down[:8], "little")
        raw, self.down = self.down[8 : 8 + size], self.down[8 + size :]
        assert self.link.answered(raw).status in ("new", "resumed")

    def exchange(self) -> None:
        """Let everything arrive; if the connection is to break, let it break once in each direction."""
        if self.breaks is not None:
            for up in (True, False):
                self._collect()
                self._carry(self.breaks.randrange(len(self.up) + 1) if up else len(self.up))
                self._bring(self.breaks.randrange(len(self.down) + 1))
                self.cut_off()
                self.dial()
        self.serve()
        self._collect()
        while self.up or self.down:
            self._carry(len(self.up))
            self._bring(len(self.down))
            self._collect()

    def _collect(self) -> None:
        self.link.seal()
        self.up += b"".join(self.link.out)
        self.link.out.clear()

    def _carry(self, count: int) -> None:
        session = self.carrier.session
        if count:
            session.receive(self.up[:count])
            self.up = self.up[count:]
            while session.stalled():
                session.receive(b"")
        self.serve()

    def _bring(self, count: int) -> None:
        if count:
            chunk, self.down = self.down[:count], self.down[count:]
            self.link.receive(chunk)

    def serve(self) -> None:
        if self.carrier.session.out:
            self.carrier.flush()
        serve(self.store, self.registry)


def tick(registry: LinkRegistry, now: float) -> bool:
    """Let it be `now`, in seconds, when the timers of links run."""
    registry.clock.now = now
    return registry.tick()


def serve(store: Store, registry: LinkRegistry) -> None:
    """Do what a server does after a command, until nothing is left to do."""
    keyspace, pending, attaching = store.keyspace, store.hub.pending_flush, registry.attaching
    more = True
    while more or pending:
        while attaching:
            next(iter(attaching)).attach()
        while keyspace.work:
            keyspace.step()
        while pending:
            woken = pending.pop()
            transport = woken.owner
            if isinstance(transport, Transport):
                transport.flush()
                if woken in store.hub.evicted:
                    transport.close()
        more = registry.work()
