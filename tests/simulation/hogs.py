"""Peers that make a server hold as much as they can, in every way, beside honest ones, on a small budget.

Checked after each step: what is really held, counted here from the objects themselves, stays within the budget; an
honest peer is answered, rightly, and never closed; at the end everything is given back.
"""

from __future__ import annotations

import random

from properties.fleet import HANDSHAKE, Command, Difference
from replaying import record
from tcpstore_async.base.errors import PeerError
from tcpstore_async.base.limits import MIB, Limits
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store
from tcpstore_async.wire.values import size

BUDGET = 2 * MIB
SLACK = 200_000
"""Bytes of one reply and one value in flight."""
HONEST, HOGS = 3, 3


class Crowd:
    """The server and its peers."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.store = Store(Limits(budget_bytes=BUDGET, value_bytes=100_000))
        record(self.store)
        self.honest = [self.come() for _ in range(HONEST)]
        self.hogs = [self.come() for _ in range(HOGS)]
        self.sums = [0] * HONEST
        self.removed = 0
        for number, session in enumerate(self.honest):
            self.ask(session, Command("add", b"/mine%d" % number, 0))

    def come(self) -> ServerSession:
        session = ServerSession(self.store, object(), "::1", 1, 0.0)
        try:
            session.receive(HANDSHAKE.frame)
        except PeerError as error:
            raise Difference(f"a new peer is refused: {error}") from error
        return session

    def ask(self, session: ServerSession, command: Command) -> bytes:
        """Send a request and return the reply."""
        try:
            session.receive(command.frame)
        except PeerError as error:
            raise Difference(f"an honest peer is refused: {error}") from error
        said = b"".join(session.out)
        session.unsent -= len(said)
        session.out.clear()
        return said

    def step(self) -> None:
        rng = self.rng
        if rng.random() < 0.3:
            number = rng.randrange(HONEST)
            self.sums[number] += 1
            said = self.ask(self.honest[number], Command("add", b"/mine%d" % number, 1))
            if said != self.sums[number].to_bytes(8, "little"):
                raise Difference(f"an honest peer is answered {said!r}, not {self.sums[number]}")
        else:
            number = rng.randrange(HOGS)
            session = self.hogs[number]
            try:
                if not session.stalled():
                    self._hog(session)
                self._read_nothing(session)
            except PeerError:
                self._remove(number)
        self._flush()
        self._check()

    def _hog(self, session: ServerSession) -> None:
        rng = self.rng
        key, large = b"/large%d" % rng.randrange(4), bytes(rng.choice((10, 1000, 60_000)))
        match rng.randrange(9):
            case 0 | 1:  # 0.1.0 counted a value once that each of these pinned in a version of its own: H3
                for _ in range(rng.randrange(1, 9)):
                    session.receive(Command("append", key, b"x").frame + Command("get", key).frame)
                    self._read_nothing(session)
            case 2:
                session.receive(Command("set", key, large).frame)
            case 3:
                session.receive(Command("set", key, large).frame[: rng.randrange(1, 40)])
            case 4:
                names = [b"/%d/%d" % (rng.randrange(100), name) for name in range(rng.choice((1, 500, 2000)))]
                session.receive(Command("wait", names).frame)
            case 5:
                for _ in range(rng.choice((1, 500))):
                    session.receive(Command("queue_push", b"/q%d" % rng.randrange(2000), b"").frame)
            case 6:
                session.receive(Command("ping", 7).frame * rng.choice((1, 2000)))
            case 7:
                session.receive(Command("introduce", [(b"a%d" % at, b"") for at in range(100)]).frame)
            case _:
                session.receive(b"".join(Command("delete_key", b"/large%d" % at).frame for at in range(4)))

    def _read_nothing(self, session: ServerSession) -> None:
        if session.out and session not in self.store.hub.evicted:
            said = list(session.out)
            session.out.clear()
            session.keep_unsent(said, 0)

    def _flush(self) -> None:
        """Act as a server: close evicted sessions, take the output of the others."""
        store, rounds = self.store, 0
        while store.hub.pending_flush:
            pending_flush, store.hub.pending_flush = list(store.hub.pending_flush), []
            for session in pending_flush:
                if session in store.hub.evicted and session in self.honest:
                    raise Difference(f"an honest peer has to go: {store.hub.evicted[session]}")
                if session in store.hub.evicted and session in self.hogs:
                    self._remove(self.hogs.index(session))
                elif session in self.hogs:
                    self._read_nothing(session)
            rounds += 1
            if rounds > 100:
                raise Difference("one peer after the other has to go")

    def _remove(self, number: int) -> None:
        self.removed += 1
        self.hogs[number].leave()
        self.hogs[number] = self.come()

    def held(self) -> int:
        """Return the bytes held, each piece once, without overheads."""
        keyspace = self.store.keyspace
        pieces = {id(value): size(value) for value in keyspace.values.values()}
        pieces.update((id(item), len(item)) for items in keyspace.queues.values() for item in items)
        for session in [*self.honest, *self.hogs]:
            pieces.update((id(piece), len(piece)) for piece in session.out)
            if session.backlog is not None:
                pieces.update((id(piece), len(piece)) for piece in session.backlog.pieces)
            if session.input_buffer is not None:
                pieces[id(session.input_buffer)] = len(session.input_buffer)
        for listed in self.store.key_lists.lists.values():
            pieces[id(listed)] = 2 * len(listed.raw) + len(listed.reply or b"")
        return sum(pieces.values())

    def _check(self) -> None:
        held, used = self.held(), self.store.budget.used()
        if held > BUDGET + SLACK or used > BUDGET + SLACK:
            raise Difference(f"{held} bytes are held, {used} are counted, {BUDGET} are allowed")
        if held > used + SLACK:
            raise Difference(f"{held} bytes are held, {used} are counted")

    def finish(self) -> None:
        for session in [*self.honest, *self.hogs]:
            session.leave()
        budget, keyspace = self.store.budget, self.store.keyspace
        while keyspace.work:
            keyspace.step()
        lists = self.store.key_lists.size
        if budget.others != lists or keyspace.parked or budget.holders or budget.pins:
            raise Difference(
                f"{budget.others - lists} bytes are counted without a session, {keyspace.parked} for waiters"
            )
        last = self.come()
        for key in list(keyspace.values):
            self.ask(last, Command("delete_key", key))
        for key in list(keyspace.queues):
            while keyspace.queue_len(key):
                self.ask(last, Command("queue_pop", key))
        last.leave()
        if budget.used() != lists:
            raise Difference(f"{budget.used() - lists} bytes of an empty store")


def perform(seed: int, steps: int = 150) -> int:
    """Run a seed and return how many hogs were removed. Raises Difference."""
    crowd = Crowd(seed)
    for _ in range(steps):
        crowd.step()
    crowd.finish()
    return crowd.removed
