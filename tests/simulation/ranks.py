"""Ranks behind one relay that want more memory than there is, of a server that executes its events again.

Whom the budget evicts, and when, depends on what the relay reads. What the server sends is not checked here, but is the
same when the events are executed again (`tests/replaying.py`), whoever is evicted in the middle of an event: a rank
whose command is being executed, another one that has sent more, the link, or its connection.
"""

from __future__ import annotations

import random
import struct

from properties.fleet import HANDSHAKE, Command
from replaying import record
from tcpstore_async.base.errors import PeerError
from tcpstore_async.base.limits import Limits
from tcpstore_async.links.link_client import ClientLink, Stream
from tcpstore_async.links.link_registry import LinkRegistry
from tcpstore_async.session.store import Store
from tcpstore_async.session.transport import Transport

LIMITS = Limits(budget_bytes=1_200_000, value_bytes=100_000, unsent_high_water=100_000)
RANKS = 6


class Rank(Stream):
    """A rank, as its relay knows it."""

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self.relay = relay
        self.over = False
        self.due = HANDSHAKE.frame
        """Bytes to send as soon as there is credit."""
        relay.link.open(self, "127.0.0.1", 1)

    def credited(self) -> None:
        count = min(self.credit, len(self.due))
        if count and not self.over and self.relay.link.has_room():
            self.relay.link.send(self, self.due[:count])
            self.due = self.due[count:]

    def received(self, data: bytes) -> None:
        if self.relay.rng.random() < 0.7:  # it may be slow
            self.relay.link.consume(self, len(data))

    def closed(self) -> None:
        self.over = True


class Relay(Transport):
    """A relay, and the server's end of its connection."""

    def __init__(self, store: Store, rng: random.Random) -> None:
        super().__init__(store, "10.0.0.7", 4, 0.0)
        self.rng = rng
        self.open = True
        self.link = ClientLink("a place")
        self.session.receive(self.link.request())
        reply = b"".join(self.session.out)
        self.session.out.clear()
        self.session.unsent = 0
        (size,) = struct.unpack_from("<Q", reply)
        self.link.answered(reply[8 : 8 + size])
        self.down = reply[8 + size :]
        """What the kernel has taken."""
        self.ranks = [Rank(self) for _ in range(RANKS)]

    def flush(self) -> None:
        session = self.session
        out = list(session.out)
        session.out.clear()
        if session.backlog is not None or self.rng.random() < 0.5:
            session.keep_unsent(out, 0)
        else:
            self.down += b"".join(out)
            session.unsent = 0

    def read(self) -> None:
        session = self.session
        if session.backlog is not None:
            self.down += b"".join(session.backlog.pieces)[session.backlog.taken :]
            session.backlog.release()
            session.backlog = None
            session.unsent = 0
        data, self.down = self.down, b""
        if data:
            self.link.receive(data)

    def send(self) -> None:
        session = self.session
        for rank in self.ranks:
            rank.credited()
        self.link.seal()
        data = b"".join(self.link.out)
        self.link.out.clear()
        try:
            if data:
                session.receive(data)
            while session.stalled() and session.unsent <= LIMITS.unsent_high_water:
                session.receive(b"")
        except PeerError:
            self.close()
        else:
            if session.out:
                self.flush()

    def close(self) -> None:
        if self.open:
            self.open = False
            self.session.leave()


def _commands(rng: random.Random) -> bytes:
    key = b"/large%d" % rng.randrange(50)
    word = b"/awaited%d" % rng.randrange(5)
    match rng.randrange(9):
        case 0 | 1:
            return Command("append", key, b"x" * rng.choice((1, 3000))).frame + Command("get", key).frame
        case 2 | 3:
            return Command("set", key, bytes(rng.choice((10, 30_000, 60_000)))).frame + Command("get", key).frame
        case 4:
            return Command("wait", [word]).frame
        case 5:
            return Command("set", word, b"x" * rng.choice((1, 9000))).frame
        case 6:
            return Command("delete_key", word).frame
        case 7:
            return b"".join(Command("delete_key", b"/large%d" % rng.randrange(50)).frame for _ in range(6))
        case _:
            return b""


def _work(store: Store, registry: LinkRegistry) -> None:
    """Flush, close and work as a server does, until nothing is left to do."""
    pending_flush = store.hub.pending_flush
    more = True
    while more or pending_flush:
        while pending_flush:
            session = pending_flush.pop()
            transport = session.owner
            if isinstance(transport, Transport):
                if session.out:
                    transport.flush()
                if session in store.hub.evicted:
                    transport.close()
        more = registry.work()


def perform(seed: int, steps: int = 100) -> int:
    """Run a seed and return how many ranks lost their sessions."""
    rng = random.Random(seed)
    store = Store(LIMITS)
    registry = LinkRegistry(store, "the server", 30.0)
    record(store, links=registry)
    relay = Relay(store, rng)
    lost = 0
    for _ in range(steps):
        for _ in range(rng.randrange(1, 9)):
            at = rng.randrange(RANKS)
            rank = relay.ranks[at]
            if rank.over:
                lost += 1
                relay.ranks[at] = Rank(relay)
            elif len(rank.due) < 300_000:
                rank.due += b"".join(_commands(rng) for _ in range(rng.randrange(1, 5)))
                rank.credited()
        if rng.random() < 0.5:
            relay.read()
        relay.send()
        _work(store, registry)
        if not relay.open:
            lost += RANKS
            relay = Relay(store, rng)
    return lost
