"""A fleet whose engine does nearly every command in steps, with the steps of all sessions mixed at random.

Each command has its moment: reads, and what a write wakes, are as of when it arrives, however late they are said; a
WAIT looks at each key when it comes to it; a MULTI_SET, and a command that begins with forgetting registrations, happen
at their end. The model does the command at that moment, whole. What a session says is always the beginning of what the
model has said, and all of it once nothing is left to do.
"""

from __future__ import annotations

import random

from tcpstore_async.errors import PeerError
from tcpstore_async.incremental import MarkStale, ParkOnKeys, PostponedWaitCount, ReadKeys, SetItems, UnparkFirst
from tcpstore_async.limits import Limits
from tcpstore_async.session.server import Engine, ServerSession

from .fleet import HANDSHAKE, NAMES, RESERVED, WEIGHTS, Command, Difference, Fleet, Line, random_command
from .model import Closed, Place, framed

LATE = ("fetch", "wait_count", "lease_later")
"""What happens once the registrations before it are forgotten, if those are many."""


class Under:
    """A command under way."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.begun = False
        self.at = 0
        self.again: bytes | None = None


class SteppedFleet(Fleet):
    """Runs commands of random peers, one step of one of them at a time. Raises Difference."""

    def __init__(self, slots: int, portion: int) -> None:
        super().__init__(slots)
        self.portion = portion
        self.engine = Engine(Limits(), portion)
        self.engine.identify(next(iter(RESERVED.values())))
        self.engine.announce(3)
        self.engine.pending_flush.clear()
        self.under: list[Under | None] = [None] * slots
        self.steps = 0

    def say(self, slot: int, command: Command) -> None:
        """A peer that is not kept waiting says one command."""
        line = self.lines[slot]
        if line is None:
            session = ServerSession(self.engine, slot, "::1", slot, 0.0)
            line = self.lines[slot] = Line(session, self.model)
            session.receive(HANDSHAKE.frame)
            line.peer.validated = True
        if line.session.incremental is not None:
            return
        self.done += 1
        handoff = line.peer.handoff
        refused = False
        try:
            line.session.receive(command.frame)
        except PeerError:
            refused = True
        job = line.session.incremental
        if job is None:
            self._do(slot, line, command, refused)
        else:
            under = self.under[slot] = Under(command)
            reading = isinstance(job, ReadKeys) and self.engine.keyspace.reading is not job
            late = isinstance(job, (MarkStale, PostponedWaitCount, SetItems)) or (
                isinstance(job, UnparkFirst) and command.name in LATE
            )
            if isinstance(job, ParkOnKeys) or reading or late:
                if handoff is not None:
                    under.again = handoff if isinstance(job, ParkOnKeys) else None
                    line.peer.handoff = None
                    self.model.hand_on(handoff)
            else:
                under.begun = True
                self._do(slot, line, command, refused=False)
        if self.engine.keyspace.work and any(self.model.queues.values()):
            self.finish_work()  # what is leased to those who were woken depends on when
        self.compare()

    def _do(self, slot: int, line: Line, command: Command, refused: bool) -> None:
        closed = False
        try:
            self.model.do(line.peer, command.name, command.fields)
        except Closed:
            closed = True
        if closed != refused:
            raise Difference(f"{command}: closed {refused}, expected {closed}")
        if closed:
            self.gone(slot)

    def gone(self, slot: int) -> None:
        """A peer leaves."""
        line = self.lines[slot]
        if line is not None:
            self.lines[slot] = None
            self.under[slot] = None
            line.session.leave()
            self.model.leave(line.peer)

    def turn(self, slot: int) -> None:
        """A step of this peer's command, or of what other commands have left to do."""
        self.steps += 1
        line, under = self.lines[slot], self.under[slot]
        if line is None or under is None:
            if self.engine.keyspace.work:
                self.engine.keyspace.step()
                self.compare()
            return
        job = line.session.incremental
        if isinstance(job, ReadKeys) and not under.begun and self.engine.keyspace.reading is None:
            under.begun = True
            self._do(slot, line, under.command, refused=False)
        refused = False
        at = job.at if isinstance(job, ParkOnKeys) else -1
        try:
            line.session.receive(b"")
        except PeerError:
            refused = True
        done = refused or line.session.incremental is None
        if done:
            self.under[slot] = None
        if isinstance(job, ParkOnKeys) and (job.at > at or done):
            self._park(line, under, done)
        elif done and isinstance(job, (MarkStale, PostponedWaitCount, SetItems, UnparkFirst)) and not under.begun:
            self._do(slot, line, under.command, refused)
        elif refused:
            raise Difference(f"{under.command} was refused")
        if self.lines[slot] is line and done:
            under.begun = True
        self.compare()

    def _park(self, line: Line, under: Under, done: bool) -> None:
        model, peer = self.model, line.peer
        keys = under.command.fields[0]
        portion = keys[under.at : under.at + self.portion]
        missing = [key for key in portion if not model.present(key)]
        under.at += self.portion
        if missing:
            left = peer.remaining if under.begun else 1
            under.begun = True
            model.register(peer, missing, barrier=False)
            peer.remaining += left
        if (under.at >= len(keys)) != done:
            raise Difference(f"{under.command}: done {done} after {under.at} keys")
        if not done:
            return
        if under.begun:
            peer.remaining -= 1
            if peer.remaining > 0:
                return
            peer.barrier = None
            for line_ in model.lines.values():
                for place in line_:
                    if place.peer is peer:
                        place.leftover = True
        elif under.again in keys:
            peer.handoff = under.again
        model.say(peer, b"\0")

    def compare(self) -> None:
        """Nobody has said anything but what the model has."""
        for line in self.lines:
            if line is not None:
                said, expected = b"".join(line.session.out), b"".join(line.peer.said)
                if not expected.startswith(said) and sorted(said) != sorted(expected):
                    raise Difference(f"said {said!r}, expected {expected!r}")
        for session in self.engine.pending_flush:
            if session.owner is not None and not session.out:
                raise Difference("a session that has nothing to say is to be flushed")

    def finish_work(self) -> None:
        while self.engine.keyspace.work:
            self.engine.keyspace.step()

    def settle(self) -> None:
        """Do all that is left to do; then everything must be as the model has it."""
        for _ in range(10_000):
            if not any(self.under) and not self.engine.keyspace.work:
                break
            for slot in range(len(self.lines)):
                self.turn(slot)
        else:
            raise Difference("it never ends")
        for line in self.lines:
            if line is not None:
                self._compare_output(line)
        self.engine.pending_flush.clear()
        self.model.woken.clear()
        if self.engine.keyspace.reading is not None:
            raise Difference("somebody reads still")
        self.check()


def run(seed: int, commands: int = 400) -> int:
    """One fleet, at random; the number of steps that its commands took. Raises Difference."""
    rng = random.Random(seed)
    fleet = SteppedFleet(rng.choice([2, 3, 5, 9]), rng.choice([1, 1, 2, 3]))
    names = rng.sample(NAMES, rng.choice([2, 3, 4, 6]))
    weights = [weight * rng.choice([0.1, 1, 1, 3]) for weight in WEIGHTS.values()]
    patient = rng.choice([0.3, 0.6, 0.9])
    for number in range(commands):
        slot = rng.randrange(len(fleet.lines))
        if rng.random() < patient:
            fleet.turn(slot)
        if rng.random() < 0.02:
            fleet.gone(slot)
            fleet.compare()
            continue
        command = random_command(rng, names, rng.choices(list(WEIGHTS), weights)[0])
        line = fleet.lines[slot]
        if line is not None and line.peer.remaining > 0 and rng.random() < 0.7:
            continue
        fleet.say(slot, command)
        if number % 20 == 19 and rng.random() < 0.5:
            fleet.settle()
    fleet.settle()
    for slot in range(len(fleet.lines)):
        fleet.gone(slot)
    fleet.finish_work()
    fleet.finish()
    return fleet.steps


__all__ = ["Place", "SteppedFleet", "framed", "run"]
