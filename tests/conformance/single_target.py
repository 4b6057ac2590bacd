"""A target whose peers have a single link each: scripts are played through connections that break.

As the store's targets, without I/O. All that a peer says has been executed and answered before the script goes on.
"""

from __future__ import annotations

import random

from conformance.link_target import serve
from conformance.script import Answer
from conformance.targets import Cut, demand_nothing_left, whole
from tcpstore_async.base.errors import PeerError
from tcpstore_async.base.limits import Limits
from tcpstore_async.links.single_client import ClientSingleLink
from tcpstore_async.server.features import attach_features
from tcpstore_async.session.store import Store
from tcpstore_async.session.transport import Transport
from tcpstore_async.wire.commands import BY_METHOD, MAGIC
from tcpstore_async.wire.values import Framed, length

VALIDATE = BY_METHOD["validate"].prefix + MAGIC.to_bytes(4, "little")


class Wire(Transport):
    """A connection that carries so many bytes of replies as its peer says."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, "127.0.0.1", 1, 0.0)
        self.down = bytearray()
        self.is_closed = False

    def flush(self) -> None:
        out = self.session.out
        if self.single is not None:
            self.single.keep(out)
        self.down += b"".join(out)
        self.session.unsent -= length(out)
        out.clear()

    def send_again(self, replies: list[Framed], taken: int) -> None:
        data = b"".join(replies)
        self.down += data[taken:]
        self.session.unsent -= len(data) - taken

    def resumed(self) -> None:
        pass

    def close(self) -> None:
        self.end(False)

    def end(self, broken: bool) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.leave(broken)


class SinglePeer:
    """One client, with a link from its VALIDATE on."""

    def __init__(self, target: SingleTarget) -> None:
        self.target = target
        self.wire = Wire(target.store)
        self.link: ClientSingleLink | None = None
        self.heard = bytearray()
        self.said = 0

    def dial(self) -> None:
        """Make the connection a link, or go on with it on another connection."""
        target = self.target
        link = self.link
        new = link is None
        if link is None:
            link = ClientSingleLink()
        else:
            self.wire = Wire(target.store)
            self.wire.session.receive(VALIDATE)
        command = BY_METHOD["link"]
        self.wire.session.receive(command.prefix + command.request.encode(link.fields()))
        self.wire.flush()
        size = int.from_bytes(self.wire.down[:8], "little")
        raw = bytes(self.wire.down[8 : 8 + size])
        del self.wire.down[: 8 + size]
        target.serve()
        if new:
            assert link.begun(raw)
            self.link = link
        else:
            self.carry(link.resume(raw))

    def carry(self, data: bytes) -> None:
        wire = self.wire
        if wire.is_closed:
            return
        session = wire.session
        if wire.single is not None:
            wire.single.received(len(data))
        try:
            session.receive(data)
            while session.stalled() and not wire.is_closed:
                if session.out:
                    wire.flush()
                session.receive(b"")
        except PeerError:
            if session.out:
                wire.flush()
            wire.close()
        if session.out:
            session_owner = session.owner
            if isinstance(session_owner, Transport):
                session_owner.flush()
        self.target.serve()

    def bring(self, count: int) -> None:
        chunk = self.wire.down[:count]
        del self.wire.down[:count]
        self.heard += chunk
        if self.link is not None:
            self.link.received += len(chunk)


class SingleTarget:
    """A store to which each peer is connected by a single link."""

    def __init__(self, cut: Cut = whole, breaks: random.Random | None = None) -> None:
        self.store = Store(Limits())
        self.registry = attach_features(self.store, "a store", "none", 30.0).links
        self.cut = cut
        self.breaks = breaks
        """Chooses where the connection breaks, if it does."""
        self.peers: dict[str, SinglePeer] = {}

    def connect(self, peer: str) -> None:
        self.peers[peer] = SinglePeer(self)

    def say(self, peer: str, data: bytes) -> None:
        one = self.peers[peer]
        while data and one.link is None and not one.wire.is_closed:
            count = max(1, len(VALIDATE) - one.said)
            piece, data = data[:count], data[count:]
            one.said += len(piece)
            one.carry(piece)
            if one.wire.session.table is self.store.commands and not one.wire.is_closed:
                one.dial()
        link = one.link
        for piece in self.cut(data) if link is not None and data else ():
            if one.wire.is_closed:
                break
            assert link is not None
            link.note(piece)
            if self.breaks is None:
                one.carry(piece)
                continue
            one.carry(piece[: self.breaks.randrange(len(piece) + 1)])
            if one.wire.is_closed:
                break
            one.bring(self.breaks.randrange(len(one.wire.down) + 1))
            if self.breaks.randrange(2):  # otherwise the server does not notice that it is broken
                one.wire.end(True)
                self.serve()
            one.dial()
        self.serve()

    def hear(self, peer: str, expected: Answer) -> Answer:
        one = self.peers[peer]
        if self.breaks is not None and one.link is not None and not one.wire.is_closed:
            one.bring(self.breaks.randrange(len(one.wire.down) + 1))
            one.wire.end(True)
            self.serve()
            one.dial()
        one.bring(len(one.wire.down))
        data = bytes(one.heard)
        one.heard.clear()
        return Answer(data, one.wire.is_closed)

    def half_close(self, peer: str) -> None:
        self.close(peer)

    def close(self, peer: str) -> None:
        self.peers[peer].wire.close()
        self.serve()

    def stop_server(self) -> None:
        raise AssertionError("a store has no server to stop")

    def finish(self) -> None:
        """Everybody leaves; nothing of them may stay behind."""
        for peer in self.peers:
            self.close(peer)
        demand_nothing_left(self.store)
        assert (self.registry.singles, self.registry.suspended) == ({}, {})
        assert (self.store.budget.holders, self.store.budget.pins) == ({}, {})

    def serve(self) -> None:
        serve(self.store, self.registry)
