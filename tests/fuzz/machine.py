"""A small machine that runs any bytes as a program for a few sessions, and checks what must always hold.

Whatever arrives, a session answers or raises PeerError, and memory stays within Limits.
"""

from __future__ import annotations

from tcpstore_async.base.errors import PeerError
from tcpstore_async.base.limits import PARKED_BYTES, QUEUE_BYTES, Limits
from tcpstore_async.keyspace.waiter_types import IDLE
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store
from tcpstore_async.wire.commands import SERVER_KEY
from tcpstore_async.wire.values import pack

LIMITS = Limits(
    key_bytes=40,
    value_bytes=70_000,
    keys=20,
    request_bytes=200_000,
    unsent_high_water=300,
    budget_bytes=350_000,
)
HANDSHAKE = bytes.fromhex("00cef7853c")
MOST_UNSENT = LIMITS.unsent_high_water + LIMITS.budget_bytes + 28 + LIMITS.value_bytes
"""A value that was fetched may come on top, perhaps with the digits of a counter that it was appended to."""
IDENTITY = b"{}"
SLOTS = 4
ZEROS = 1000
"""What one instruction may stand for, so that short inputs reach large values."""


class Broken(AssertionError):
    """An invariant does not hold."""


class Machine:
    """A few sessions on one store, and the transport's part of the contract."""

    def __init__(self) -> None:
        self.store = Store(LIMITS)
        self.store.identify(IDENTITY)
        self.sessions: list[ServerSession | None] = [None] * SLOTS
        self.refused = 0
        self.sent = 0

    def session(self, slot: int, greet: bool) -> ServerSession:
        session = self.sessions[slot]
        if session is None:
            session = self.sessions[slot] = ServerSession(self.store, slot, "::1", slot, 0.0)
            if greet:
                session.receive(HANDSHAKE)
        return session

    def tell(self, slot: int, data: bytes, greet: bool) -> None:
        """A chunk arrives. A transport does not read while too much is unsent, so neither does this."""
        session = self.session(slot, greet)
        try:
            if session.stalled() or session.unsent > LIMITS.unsent_high_water:
                return
            bulk = session.large_value()
            if bulk is not None and len(data) > 1:
                with bulk.free_space() as space:
                    count = min(len(space), len(data))
                    space[:count] = data[:count]
                bulk.fill(count)
                session.receive(b"")
                data = data[count:]
                if session.unsent > LIMITS.unsent_high_water:
                    return
            session.receive(data)
        except PeerError:
            self.refused += 1
            self.leave(slot)

    def read(self, slot: int) -> None:
        """The peer reads its replies, and the transport goes on with what was kept back."""
        session = self.sessions[slot]
        if session is None:
            return
        self._take(session)
        while session.stalled():
            try:
                session.receive(b"")
            except PeerError:
                self.refused += 1
                self.leave(slot)
                return
            self._take(session)

    def leave(self, slot: int) -> None:
        session = self.sessions[slot]
        if session is not None:
            self.sessions[slot] = None
            session.leave()

    def check(self) -> None:
        """What must hold between any two instructions."""
        store = self.store
        present = [session for session in self.sessions if session is not None]
        for session in store.hub.pending_flush:
            if session.owner is not None and not session.out and session not in store.hub.evicted:
                raise Broken("a session without output is to be flushed")
        evicted = [session for session in present if session in store.hub.evicted]
        if evicted:
            self.refused += len(evicted)
            for session in evicted:
                self.leave(self.sessions.index(session))
            self.check()
            return
        store.hub.pending_flush.clear()
        if store.budget.unfinished != sum(session.held for session in present):
            raise Broken("unfinished is not the sum of what is held")
        leases = sum(len(session.leases) for session in present if session.leases is not None)
        queues = len(store.keyspace.queues)
        used = store.budget.used()
        # What is leased, or given back, must not keep a full store full.
        if not 0 <= used <= LIMITS.budget_bytes + leases * PARKED_BYTES + (leases + queues) * (QUEUE_BYTES + 40):
            raise Broken(f"used: {used}")
        others = sum(store.budget.session_bytes + session.held + session.introduction_bytes() for session in present)
        others += store.key_lists.size
        if store.budget.others != others:
            raise Broken(f"counted beside the store: {store.budget.others}, held {others}")
        for session in present:
            if session.unsent != sum(map(len, session.out)):
                raise Broken("unsent is not what is in out")
            if session.unsent > MOST_UNSENT:
                raise Broken(f"unsent: {session.unsent}")
            if not str(session).isprintable():
                raise Broken("a peer breaks the lines of the log")
            if session.group is not None and session.state == IDLE:
                raise Broken("a group has a waiter that does not wait")
            if session.input_buffer is not None and len(session.input_buffer) > LIMITS.request_bytes:
                raise Broken(f"kept: {len(session.input_buffer)}")

    def finish(self) -> None:
        for slot in range(SLOTS):
            self.leave(slot)
        self.check()
        keyspace = self.store.keyspace
        while keyspace.work:
            keyspace.step()
        if keyspace.waiters or keyspace.counters or keyspace.handoffs or self.store.budget.unfinished:
            raise Broken("a session that left is still registered")
        for key in list(keyspace.values):
            keyspace.delete_key(key)
        for key in list(keyspace.queues):
            while keyspace.queue_len(key):
                keyspace.queue_pop(key)
        used = self.store.budget.used() - self.store.key_lists.size
        if keyspace.size or keyspace.parked or used:
            raise Broken(f"{used} bytes of an empty store")
        if keyspace.get(SERVER_KEY) != pack(IDENTITY):
            raise Broken("a peer has changed a reserved key")

    def _take(self, session: ServerSession) -> None:
        size = sum(map(len, session.out))
        self.sent += size
        session.unsent -= size
        session.out.clear()


def run(program: bytes) -> Machine:
    """Execute a program, check after each instruction, and return the machine.

    An instruction is one byte: its low two bits are the slot of a session, which is greeted when it is new unless bit 7
    is set. Bits 2 to 4 say what happens: 0 it leaves, 1 it reads its replies, 2 to 5 a chunk arrives whose length is
    the next byte and whose bytes follow (5: one by one), 6 a chunk of as many zeros as the next byte says, 7 that many
    thousands of zeros.
    """
    machine = Machine()
    at = 0
    while at < len(program):
        instruction = program[at]
        at += 1
        slot, what, greet = instruction & 3, instruction >> 2 & 7, instruction < 128
        if what == 0:
            machine.leave(slot)
        elif what == 1:
            machine.read(slot)
        else:
            count = program[at] if at < len(program) else 0
            at += 1
            if what == 7:
                for _ in range(min(count, 80)):
                    machine.tell(slot, bytes(ZEROS), greet)
            elif what == 6:
                machine.tell(slot, bytes(count), greet)
            else:
                chunk = program[at : at + count]
                at += count
                if what == 5:
                    for byte in chunk:
                        machine.tell(slot, bytes([byte]), greet)
                else:
                    machine.tell(slot, chunk, greet)
        machine.check()
    machine.finish()
    return machine
