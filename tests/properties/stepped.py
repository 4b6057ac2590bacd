"""A fleet whose store carries out nearly every command in steps, with the steps of all sessions mixed at random.

Each command takes effect at one moment: what a write wakes, when it arrives, however late it is sent; a
WAIT looks at each key in its step; a BARRIER that must first drop registrations, and a command that waits for another
one, at its end. The model executes the command whole at that moment. What a session has sent is always the start of
what the model has sent, and all of it once no work is left.
"""

from __future__ import annotations

import random

from replaying import record
from tcpstore_async.base.errors import PeerError
from tcpstore_async.base.limits import Limits
from tcpstore_async.keyspace.waiter_types import AWAITING_ITEM
from tcpstore_async.session.store import Store

from .fleet import HANDSHAKE, NAMES, RESERVED, WEIGHTS, Command, Connection, Difference, Fleet, random_command
from .model import Closed

LATE = ("barrier", "wait_count", "multi_set")
"""Commands in steps that take effect at their end, once registrations are dropped or others are woken."""


class Under:
    """A command under way."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.postponed = False
        """Nothing of it is executed yet: others are woken first."""
        self.late = command.name in LATE
        """It takes effect at its end."""
        self.at = 0
        """How many keys a WAIT has looked at."""


class SteppedFleet(Fleet):
    """Run commands of random peers, one step of one of them at a time. Raises Difference."""

    def __init__(self, slots: int, portion: int) -> None:
        super().__init__(slots)
        self.portion = portion
        self.store = Store(Limits(), portion)
        self.model.portion = portion
        self.store.identify(next(iter(RESERVED.values())))
        self.store.announce(3)
        self.store.hub.pending_flush.clear()
        record(self.store)
        self.under: list[Under | None] = [None] * slots
        self.steps = 0
        self.postponed = 0

    def send(self, slot: int, command: Command) -> None:
        """Let a peer send a command, unless its last one is still running."""
        connection = self.connections[slot]
        if connection is None:
            connection = self.connections[slot] = Connection(self.new_session(slot), self.model)
            connection.session.receive(HANDSHAKE.frame)
            connection.peer.validated = True
        session = connection.session
        if session.running is not None:
            return
        if session.state == AWAITING_ITEM and self.store.keyspace.queues:
            return  # its own write would wake it before others, so it might lease an item that is theirs
        self.done += 1
        self._receive_from(slot, connection, command, command.frame)

    def _receive_from(self, slot: int, connection: Connection, command: Command, data: bytes) -> None:
        """Let the server receive a command, or begin with one that was postponed."""
        session, peer, keyspace = connection.session, connection.peer, self.store.keyspace
        handoff = peer.handoff
        refused = False
        postponed = keyspace.working and keyspace.postpones(session)
        try:
            session.receive(data)
        except PeerError:
            refused = True
        if session.running is None:
            self._do(slot, connection, command, refused)
        else:
            under = self.under[slot] = Under(command)
            if postponed:
                self.postponed += 1
                under.postponed = True
            elif under.late or command.name == "wait":
                if command.name in ("wait", "barrier"):  # it replaces what the peer awaited before
                    self.model.forget(peer)
                peer.handoff = None
                if handoff is not None:
                    self.model.hand_on(handoff)
            else:
                self._do(slot, connection, command, refused=False)
        self._finish_work_for_queues()
        self.compare()

    def _finish_work_for_queues(self) -> None:
        """The moment of waking decides who leases which item, so it must not be later than the model's."""
        if self.store.keyspace.work and (self.store.keyspace.queues or self.model.queues):
            self.finish_work()

    def _do(
        self, slot: int, connection: Connection, command: Command, refused: bool, newer: bytes | None = None
    ) -> None:
        closed = False
        try:
            self.model.do(connection.peer, command.name, command.fields)
        except Closed:
            closed = True
        if newer is not None:
            connection.peer.handoff = newer
        if closed != refused:
            raise Difference(f"{command}: closed {refused}, expected {closed}")
        if closed:
            self.gone(slot)

    def _do_late(self, slot: int, connection: Connection, command: Command, refused: bool) -> None:
        """Do a command that takes effect only now; a hand-off that is newer than it stays."""
        newer, connection.peer.handoff = connection.peer.handoff, None
        self._do(slot, connection, command, refused, newer)

    def gone(self, slot: int) -> None:
        """A peer leaves."""
        connection = self.connections[slot]
        if connection is not None:
            self.connections[slot] = None
            self.under[slot] = None
            connection.session.leave()
            self.model.leave(connection.peer)

    def turn(self, slot: int) -> None:
        """Do a step of this peer's command, or of deferred work."""
        self.steps += 1
        connection, under = self.connections[slot], self.under[slot]
        if connection is None or under is None:
            if self.store.keyspace.work:
                self.store.keyspace.step()
                self.compare()
            return
        session = connection.session
        if under.postponed:
            self.under[slot] = None
            self._receive_from(slot, connection, under.command, b"")
            return
        stays = self._cannot_step(connection)
        drops = under.at == 0 and len(session.parked or ()) > self.portion
        refused = False
        try:
            session.receive(b"")
        except PeerError:
            refused = True
        done = refused or session.running is None
        if done:
            self.under[slot] = None
        if under.command.name == "wait":
            if not stays and not drops:
                self._park(connection, under, done)
        elif under.late and done:
            self._do_late(slot, connection, under.command, refused)
        elif refused:
            raise Difference(f"{under.command} was refused")
        if done:
            self._finish_work_for_queues()
        self.compare()

    def _cannot_step(self, connection: Connection) -> bool:
        """Do what precedes a step of the peer's command; return whether that cannot be done yet."""
        keyspace = self.store.keyspace
        if keyspace.working and not keyspace.postpones(connection.session):
            keyspace.resolve(connection.session)
        return keyspace.working and keyspace.postpones(connection.session)

    def _park(self, connection: Connection, under: Under, done: bool) -> None:
        """Let the model look at the next keys of a WAIT, too."""
        model, peer = self.model, connection.peer
        keys = under.command.fields[0]
        portion = keys[under.at : under.at + self.portion]
        under.at += self.portion
        model.place(peer, [key for key in portion if not model.present(key)])
        if (under.at >= len(keys)) != done:
            raise Difference(f"{under.command}: done {done} after {under.at} keys")
        if not done:
            return
        if model.has_places(peer):
            peer.waits = True
        else:
            model.send(peer, b"\0")

    def compare(self) -> None:
        """Check that all output is the start of the model's."""
        for connection in self.connections:
            if connection is not None:
                sent, expected = b"".join(connection.session.out), b"".join(connection.peer.sent)
                if not expected.startswith(sent) and sorted(sent) != sorted(expected):
                    raise Difference(f"sent {sent!r}, expected {expected!r}")
        for session in self.store.hub.pending_flush:
            if session.owner is not None and not session.out:
                raise Difference("a session without output is in pending_flush")

    def finish_work(self) -> None:
        while self.store.keyspace.work:
            self.store.keyspace.step()

    def settle(self) -> None:
        """Finish all work; then everything must equal the model."""
        for _ in range(10_000):
            if not any(self.under) and not self.store.keyspace.work:
                break
            if self.store.keyspace.work:
                self.store.keyspace.step()
            for slot in range(len(self.connections)):
                self.turn(slot)
        else:
            raise Difference("the work never ends")
        for connection in self.connections:
            if connection is not None:
                self._compare_output(connection)
        self.store.hub.pending_flush.clear()
        self.model.woken.clear()
        self.check()


def run(seed: int, commands: int = 400) -> int:
    """Run one fleet at random and return the number of steps that its commands took. Raises Difference."""
    rng = random.Random(seed)
    fleet = SteppedFleet(rng.choice([2, 3, 5, 9, 14]), rng.choice([1, 1, 2, 3, 4, 5, 6]))
    names = rng.sample(NAMES, rng.choice([2, 3, 4, 6]))
    weights = [weight * rng.choice([0.1, 1, 1, 3]) for weight in WEIGHTS.values()]
    patient = rng.choice([0.3, 0.6, 0.9])
    if seed % 3 == 0:  # many keys are set for which many wait
        for name in ("wait", "multi_set"):
            weights[list(WEIGHTS).index(name)] += sum(weights)
    for number in range(commands):
        slot = rng.randrange(len(fleet.connections))
        if rng.random() < patient:
            fleet.turn(slot)
        if rng.random() < 0.02:
            fleet.gone(slot)
            fleet.compare()
            continue
        command = random_command(rng, names, rng.choices(list(WEIGHTS), weights)[0])
        connection = fleet.connections[slot]
        if connection is not None and connection.peer.waits and rng.random() < 0.7:
            continue
        fleet.send(slot, command)
        if number % 20 == 19 and rng.random() < 0.5:
            fleet.settle()
    fleet.settle()
    for slot in range(len(fleet.connections)):
        fleet.gone(slot)
    fleet.finish_work()
    fleet.finish()
    return fleet.steps
