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
from tcpstore_async.session.named_stores import NamedStore

if TYPE_CHECKING:
    from simulation.journal import World

SILENCE: Final = 15.0
"""Seconds after which a link of which nothing is heard loses its connection."""


class Executed:
    """Executes in the model what the records say."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.records = 0
        self.now = 0.0
        self.models: dict[str, Model] = {}
        """Of all stores, keyed by incarnation."""
        self.model = self._of("")
        self.opened = 0
        self.sessions: dict[int, Wire | Rank] = {}
        self.singles: dict[bytes, Rank] = {}
        self.places: dict[int, Entry] = {}
        """Links, keyed by the number of the relay, in the order of beginning."""
        self.lost: dict[Rank, float] = {}
        """Single links without a connection, and since when."""
        self.to_end: deque[Entry] = deque()
        self.to_offer: deque[list[Rank]] = deque()
        self.commands = 0

    def _of(self, incarnation: str) -> Model:
        model = self.models.get(incarnation)
        if model is None:
            model = self.models[incarnation] = Model()
            model.now = lambda: self.now
        return model

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
                self._attach(self.singles[name], name)
            case ("abandon", "single") if self.singles[name].peer is not None:
                pass
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
            case (_, "named" | "keyspace") | ("hold", "links") | ("examine", "link"):
                pass
            case ("flush", "transport") | ("evict", "session"):
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
        if 0 < size <= len(data) and session.links:
            self._linked(number, session)
        client = session.client
        if isinstance(client, Observer):
            if rest:
                self._asked(client, session, rest)
        elif isinstance(client, Relay):
            entry = next((one for one in self.places.values() if one.carrier is session), None)
            if entry is not None:
                entry.heard = self.now
                entry.partly += rest
                self._frames(entry)
        elif rest:
            raise Difference(f"{client} has sent {rest!r} before it had a link")

    def _asked(self, client: Observer, wire: Wire, data: bytes) -> None:
        """Execute what the recorder has noted of a session without a link."""
        command = wire.asked
        if command is not None and command.name == "add":
            wire.executed += data
            if not command.frame.startswith(wire.executed):
                raise Difference(f"{client} has sent {command}, and {wire.executed!r} was executed")
            if wire.executed == command.frame:
                reply = self.model.add(Peer(), *command.fields)
                if client.wire is wire:
                    client.possible.add(reply)
                self.commands += 1
                self._drain()

    def _linked(self, number: int, wire: Wire) -> None:
        """Execute LINK."""
        client = wire.client
        link = wire.entry or wire.rank
        assert link is not None
        if wire.serial < link.attempt:  # a later one has overtaken it
            return
        link.attempt = wire.serial
        if isinstance(client, Single):
            if not wire.resumes:
                rank = wire.rank
                assert rank is not None
                if rank.peer is not None:  # its client has not learned of the first LINK
                    self._end(rank)
                    self.sessions.update({old: wire for old, one in self.sessions.items() if one is rank})
                rank.peer = None
                rank.over = False
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
            self._came_back(entry.ranks())

    def _came_back(self, ranks: list[Rank]) -> None:
        passed = False
        for rank in ranks:
            assert rank.peer is not None
            rank.peer.away = False
            passed = passed or bool(rank.model.passed.get(rank.peer))
        if passed:
            self.to_offer.append(ranks)

    def _attach(self, rank: Rank, identity: bytes) -> None:
        self.lost.pop(rank, None)
        if rank.peer is not None:
            self._came_back([rank])
            return
        link = self.world.server.links.singles.get(identity)  # None if it has ended in the same record
        store = None if link is None else link.session.store
        rank.model = self._of(store.incarnation if isinstance(store, NamedStore) else "")
        rank.peer = rank.model.enter()
        rank.peer.validated = True

    def _leave(self, number: int) -> None:
        session = self.sessions.pop(number)
        if isinstance(session, Rank):
            if session.peer is not None and not session.may_end():
                raise Difference(f"{session.holder} is taken to have left")
            self._end(session)
            return
        for entry in self.places.values():
            if entry.carrier is session:
                self._away(entry)

    def _away(self, entry: Entry) -> None:
        entry.carrier = None
        entry.lost = self.now
        for rank in entry.ranks():
            assert rank.peer is not None
            rank.peer.away = True

    def _end(self, rank: Rank) -> None:
        rank.over = True
        self.lost.pop(rank, None)
        if rank.peer is not None and rank.peer in rank.model.peers:
            rank.model.leave(rank.peer)
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
        portion = self.world.portion
        if self.to_end:
            ranks = [rank for rank in self.to_end[0].ranks() if not rank.over]
            for rank in ranks[: max(1, portion // 8)]:
                self._end(rank)
            if len(ranks) <= max(1, portion // 8):
                self.to_end.popleft()
        if self.to_offer and self._offer(self.to_offer[0], portion):
            self.to_offer.popleft()
        self._drain()

    def _offer(self, ranks: list[Rank], most: int) -> bool:
        """Offer items of the queues for which ranks were skipped; return whether all are offered."""
        model = ranks[0].model
        here = [rank.peer for rank in ranks if rank.peer is not None and not (rank.over or rank.peer.away)]
        skipped = [model.passed[peer] for peer in here if peer in model.passed]
        for key in list(dict.fromkeys(key for keys in skipped for key in keys)):
            before = -1
            while (left := model.unpromised(key)) > 0 and left != before:
                before = left
                model.wake_next(key, handed_on=True)
                most -= model.unpromised(key) != left
                if most <= 0:
                    return False
            for keys in skipped:
                keys.pop(key, None)
        return True

    # Bytes

    def _frames(self, entry: Entry) -> None:
        at = entry.done
        if entry.frames[at : at + len(entry.partly)] != entry.partly:
            raise Difference(f"{entry.relay} has sent {bytes(entry.frames[at:])!r}, executed is {entry.partly!r}")
        most = self.world.portion
        while len(entry.partly) >= 8 and not entry.over:
            size = 8 + int.from_bytes(entry.partly[4:7], "little")
            if len(entry.partly) < size:
                break
            _, deliveries = first_frame(entry.partly)
            for kind, number, payload in deliveries[entry.delivered :]:
                if most <= 0:  # the rest follows in another event
                    return
                if kind != 7:
                    most -= 1 + len(payload) // 64
                entry.delivered += 1
                self._frame(entry, kind, number, payload)
            entry.delivered = 0
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
                rank.model.do(peer, command.name, command.fields)
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
                session.model.woken.clear()
