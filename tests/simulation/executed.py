"""The model, which executes what the records of a journal say, once they are durable.

It knows what events mean, and which session of which client each concerns. It states once more when links are given up,
and when skipped sessions are offered items.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from properties.fleet import Difference
from properties.linked import first_frame
from properties.model import Closed, Model, Peer
from simulation.resuming import Entry, Observer, Rank, Relay, Single, Wire
from tcpstore_async.base.limits import LINK_GRACE
from tcpstore_async.log.encoding import decode
from tcpstore_async.log.events import OPENED, RECEIVE, Event
from tcpstore_async.log.records import Record

if TYPE_CHECKING:
    from simulation.journal import World

SILENCE: Final = 15.0
"""Seconds after which a link of which nothing is heard loses its connection."""


class Executed:
    """Executes in the model what the records say."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.model = Model()
        self.records = 0
        self.now = 0.0
        self.model.now = lambda: self.now
        self.opened = 0
        self.sessions: dict[int, Wire | Rank] = {}
        self.singles: dict[bytes, Rank] = {}
        self.places: dict[int, Entry] = {}
        """Links, keyed by the number of the relay, in the order of beginning."""
        self.lost: dict[Rank, float] = {}
        """Single links without a connection, and since when."""
        self.to_end: deque[Entry] = deque()
        self.to_offer: deque[list[Peer]] = deque()
        self.commands = 0

    def execute(self, record: Record) -> None:
        if record.number != self.records:
            raise Difference(f"record {record.number} follows {self.records - 1}")
        self.records += 1
        for event in decode(record.events, record.now):
            self.now = event.now
            self._do(event)
            for client in self.world.clients:
                if isinstance(client, Observer):
                    client.look(self.model)

    def _do(self, event: Event) -> None:
        kind, name = event.subject
        match event.method, kind:
            case (method, _) if method == OPENED:
                self.opened += 1
                self.sessions[self.opened] = self.world.wires[event.given[1]]
            case (method, "session") if method == RECEIVE:
                self._receive(name, event.given[0])
            case ("leave", "session") | ("close", "transport"):
                self._leave(name)
            case ("detach", "single"):
                rank = self.singles[name]
                self.lost[rank] = self.now
                assert rank.peer is not None
                rank.peer.away = True
            case ("attach", "single"):
                self._attach(self.singles[name])
            case ("forget" | "abandon", "single"):
                self.singles[name].over = True
                self.lost.pop(self.singles[name], None)
            case ("tick", "links"):
                self._tick()
            case ("work", "links"):
                self._work()
            case ("restart", "links"):
                for entry in self.places.values():
                    entry.lost = self.now
                self.lost = dict.fromkeys(self.lost, self.now)
            case ("flush", "transport") | ("restart", "named") | ("evict", "session"):
                pass
            case _:
                raise Difference(f"unexpected: {event}")

    # Sessions

    def _receive(self, number: int, data: bytes) -> None:
        session = self.sessions[number]
        if isinstance(session, Rank):
            self._arrived(session, data)
            return
        size = len(session.hello) - session.heard
        session.heard += min(size, len(data))
        rest = data[size:] if size > 0 else data
        if 0 < size <= len(data):
            self._linked(number, session)
        client = session.client
        if isinstance(client, Observer):
            if rest:
                self._asked(client, rest)
        elif isinstance(client, Relay):
            entry = next((one for one in self.places.values() if one.carrier is session), None)
            if entry is not None:
                entry.heard = self.now
                entry.partly += rest
                self._frames(entry)
        elif rest:
            raise Difference(f"{client} has sent {rest!r} before it had a link")

    def _asked(self, client: Observer, data: bytes) -> None:
        """Execute what the recorder has noted of a session without a link."""
        command = client.asked
        if command is not None and command.name == "add":
            client.executed += data
            if not command.frame.startswith(client.executed):
                raise Difference(f"{client} has sent {command}, and {client.executed!r} was executed")
            if client.executed == command.frame:
                client.possible.add(self.model.add(Peer(), *command.fields))
                self.commands += 1
                self._drain()

    def _linked(self, number: int, wire: Wire) -> None:
        """Execute LINK."""
        client = wire.client
        if isinstance(client, Single):
            if not wire.resumes:
                rank = wire.rank
                assert rank is not None
                if rank.peer is not None:  # its client has not learned of the first LINK
                    self._end(rank)
                    rank.over = False
                    self.sessions.update({old: wire for old, one in self.sessions.items() if one is rank})
                rank.peer = self.model.enter()
                rank.peer.validated = True
                self.sessions[number] = rank
        elif isinstance(client, Relay):
            entry = wire.entry
            assert entry is not None
            if not wire.resumes:
                other = self.places.get(client.number)
                if other is not None:
                    self._end_link(other)
                entry.over = False  # even if its client has not learned of the first LINK
                self.places[client.number] = entry
            if entry.over:
                return
            entry.carrier = wire
            entry.heard = self.now
            entry.partly.clear()
            self._came_back(entry.peers())

    def _came_back(self, peers: list[Peer]) -> None:
        for peer in peers:
            peer.away = False
        if any(self.model.passed.get(peer) for peer in peers):
            self.to_offer.append(peers)

    def _attach(self, rank: Rank) -> None:
        self.lost.pop(rank, None)
        assert rank.peer is not None
        self._came_back([rank.peer])

    def _leave(self, number: int) -> None:
        session = self.sessions.pop(number)
        if isinstance(session, Rank):
            self._end(session)
            return
        for entry in self.places.values():
            if entry.carrier is session:
                self._away(entry)

    def _away(self, entry: Entry) -> None:
        entry.carrier = None
        entry.lost = self.now
        for peer in entry.peers():
            peer.away = True

    def _end(self, rank: Rank) -> None:
        rank.over = True
        self.lost.pop(rank, None)
        if rank.peer is not None and rank.peer in self.model.peers:
            self.model.leave(rank.peer)
        self._drain()

    def _end_link(self, entry: Entry) -> None:
        if not entry.over:
            entry.over = True
            if entry.carrier is not None:
                self._away(entry)
            if any(not one.rank.over for one in entry.opened.values() if one.rank.peer is not None):
                self.to_end.append(entry)
            del self.places[entry.relay.number]

    def _tick(self) -> None:
        for entry in list(self.places.values()):
            if entry.carrier is None:
                if self.now - entry.lost >= LINK_GRACE:
                    self._end_link(entry)
            elif self.now - entry.heard >= SILENCE:
                self._away(entry)
        for rank, since in list(self.lost.items()):
            if self.now - since >= LINK_GRACE:
                self._end(rank)

    def _work(self) -> None:
        if self.to_end:
            for one in self.to_end.popleft().opened.values():
                self._end(one.rank)
        if self.to_offer:
            peers = [peer for peer in self.to_offer.popleft() if peer in self.model.peers and not peer.away]
            self.model.come_back(peers)
            self._drain()

    # Bytes

    def _frames(self, entry: Entry) -> None:
        at = entry.done
        if entry.frames[at : at + len(entry.partly)] != entry.partly:
            raise Difference(f"{entry.relay} has sent {bytes(entry.frames[at:])!r}, executed is {entry.partly!r}")
        while len(entry.partly) >= 8:
            size = 8 + int.from_bytes(entry.partly[4:7], "little")
            if len(entry.partly) < size or entry.over:
                break
            _, deliveries = first_frame(entry.partly)
            for kind, number, payload in deliveries:
                self._frame(entry, kind, number, payload)
            del entry.partly[:size]
            entry.done += size

    def _frame(self, entry: Entry, kind: int, number: int, payload: bytes) -> None:
        if kind == 2 and not number:
            self._end_link(entry)
            return
        one = entry.opened.get(number)
        if one is None:
            return
        rank = one.rank
        if kind == 0:
            self._arrived(rank, payload)
        elif kind == 1:
            self.opened += 1
            self.sessions[self.opened] = rank
            rank.peer = self.model.enter()
        elif kind == 2:
            self._end(rank)

    def _arrived(self, rank: Rank, data: bytes) -> None:
        if rank.failed or rank.over:
            return
        if rank.stream[rank.at : rank.at + len(data)] != data:
            raise Difference(f"{rank.holder} has sent {bytes(rank.stream[rank.at :])!r}, executed is {data!r}")
        rank.at += len(data)
        rank.partly += len(data)
        peer = rank.peer
        assert peer is not None
        while rank.count < len(rank.sent) and rank.partly >= rank.sent[rank.count].size:
            command = rank.sent[rank.count]
            rank.partly -= command.size
            rank.count += 1
            self.commands += 1
            if command.name == "taken":
                continue
            try:
                self.model.do(peer, command.name, command.fields)
            except Closed:
                rank.failed = True
                break
        self._drain()

    def _drain(self) -> None:
        """Note what the model has sent."""
        for session in self.sessions.values():
            if isinstance(session, Rank) and session.peer is not None and session.peer.sent:
                session.expected += b"".join(session.peer.sent)
                session.peer.sent.clear()
                session.peer.unsent = 0
        self.model.woken.clear()
