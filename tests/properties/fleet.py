"""Many sessions on one store, in memory, each step compared with the model.

A step is a plain tuple, so a run can be recorded, replayed and shrunk:

* `("send", slot, commands, keep)`: the peer in this slot, which connects first if need be, sends these commands; all of
  its bytes but the last `keep` arrive, in one chunk. The others come first the next time.
* `("drip", slot, commands, 0)`: the same, byte by byte.
* `("leave", slot, (), 0)`: it disconnects, wherever it is.
* `("doze", slot, (), 0)`: it stops reading its replies. `("read", slot, (), 0)`: it reads them, and goes on reading.
"""

from __future__ import annotations

import random
import struct
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from replaying import record
from support import blob, keys
from tcpstore_async.base.errors import PeerError
from tcpstore_async.base.limits import ENTRY_BYTES, MEMBER_BYTES, MIB, PARKED_BYTES, QUEUE_BYTES, Limits
from tcpstore_async.keyspace.agents import ENDED_BYTES, MOST_NAMED
from tcpstore_async.keyspace.keyspace import Keyspace
from tcpstore_async.keyspace.rounds import AGENT_BYTES, ROUNDS_BYTES, Agent
from tcpstore_async.keyspace.waiter_types import (
    AWAITING_ITEM,
    AWAITING_ROUND,
    AWAITING_VALUE,
    IDLE,
    UNKNOWN,
    SharedWait,
    Waiter,
)
from tcpstore_async.keyspace.waiter_types import Counter as CounterGroup
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store
from tcpstore_async.wire.commands import JOINS_KEY, SERVER_KEY
from tcpstore_async.wire.values import cost, framed, unpack

from .model import MAGIC, Closed, Model, Peer
from .rounds_model import Member

Step = tuple[str, int, "tuple[Command, ...]", int]


class Difference(AssertionError):
    """The package and the model disagree, or an invariant is broken."""


def registrations(keyspace: Keyspace) -> dict[bytes, list[Waiter]]:
    """Return who is registered under each key, in order: the members of a group instead of the group."""
    return {key: [one for waiter in waiters for one in members(waiter)] for key, waiters in keyspace.waiters.items()}


def members(waiter: Waiter) -> list[Waiter]:
    """Return the members of a group, or the waiter itself."""
    return list(waiter.members) if isinstance(waiter, SharedWait) else [waiter]


STOCK = (
    "validate set compare_set get add check wait num_keys delete_key append multi_get multi_set cancel_wait ping "
    "queue_push queue_pop queue_len list_keys barrier unknown"
)
EXTENSION = "fetch cancel_fetch wait_count introduce lease lease_later confirm give_back join depart meet attend"
OPCODES = {
    **{name: opcode for opcode, name in enumerate(STOCK.split())},
    **{name: opcode for opcode, name in enumerate(EXTENSION.split(), 64)},
}
"""From the protocol's description, not from the table."""

STEP_SECONDS = 20.0
"""Between two steps: so what is remembered for ten minutes is forgotten within a schedule."""

RESERVED = {SERVER_KEY: b'{"server":"this"}', JOINS_KEY: b"3"}
"""The reserved keys of store and model."""


class Command:
    """One command: its fields for the model, its bytes for the session."""

    def __init__(self, name: str, *fields: Any) -> None:
        self.name = name
        self.fields = fields
        self.frame = bytes([OPCODES[name]]) + self._body()
        self.size = len(self.frame)

    def _body(self) -> bytes:
        match self.name:
            case "validate" | "ping":
                return struct.pack("<I", self.fields[0])
            case "confirm" | "give_back":
                return struct.pack("<q", self.fields[0])
            case "add" | "barrier" | "wait_count" | "lease" | "lease_later":
                return blob(self.fields[0]) + struct.pack("<q", self.fields[1])
            case "check" | "wait" | "multi_get":
                return keys(*self.fields[0])
            case "meet" | "attend":
                key, name, *numbers = self.fields
                return blob(key) + blob(name) + struct.pack(f"<{len(numbers)}q", *numbers)
            case "multi_set" | "introduce":
                items = self.fields[0]
                return struct.pack("<Q", len(items)) + b"".join(blob(key) + blob(value) for key, value in items)
            case _:
                return b"".join(map(blob, self.fields))

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(repr(f) if len(repr(f)) < 200 else '<long>' for f in self.fields)})"


HANDSHAKE = Command("validate", MAGIC)
CANCEL = Command("cancel_wait")
CANCEL_FETCH = Command("cancel_fetch")


class Connection:
    """Both ends of one connection: the session, the model's peer, and what is on its way between them."""

    def __init__(self, session: ServerSession, model: Model) -> None:
        self.session = session
        self.peer = model.enter()
        self.wire = bytearray()
        """Sent, but not arrived."""
        self.frames: deque[tuple[Command, int]] = deque()
        """Commands that have not arrived completely, with the number of missing bytes."""
        self.ready: deque[Command] = deque()
        """Commands that have arrived, but are held back until the peer reads."""
        self.dozing = False


class Fleet:
    """Run steps on a store and on the model at once. Raises Difference."""

    def __init__(self, slots: int, soft: int = MIB, lists: int = 0) -> None:
        """`lists` limits the bytes of the lists of keys that the server remembers; 0 means the default."""
        self.soft = soft
        self.store = Store(Limits(unsent_high_water=soft))
        if lists:
            self.store.key_lists.capacity = lists
            self.store.keyspace.max_kept_reply = lists // 8
        self.model = Model()
        self.store.identify(RESERVED[SERVER_KEY])
        self.store.announce(int(RESERVED[JOINS_KEY]))
        record(self.store)
        self.model.reserved = RESERVED
        """The server's clock, in seconds."""
        self.model.now = lambda: self.store.keyspace.clock.now
        self.connections: list[Connection | None] = [None] * slots
        self.done = 0
        """Commands executed."""

    def new_session(self, slot: int) -> ServerSession:
        return ServerSession(self.store, slot, "::1", slot, 0.0)

    def apply(self, step: Step) -> None:
        kind, slot, commands, keep = step
        self.store.keyspace.clock.now += STEP_SECONDS
        connection = self.connections[slot]
        if kind == "leave":
            if connection is not None:
                self._leave(slot, connection)
            return
        if connection is None:
            connection = self.connections[slot] = Connection(self.new_session(slot), self.model)
        if kind == "doze":
            connection.dozing = True
        elif kind == "read":
            self._wake_up(slot, connection)
        else:
            wire = connection.wire
            for command in commands:
                wire += command.frame
                connection.frames.append((command, command.size))
            count = max(0, len(wire) - keep)
            chunk = bytes(wire[:count])
            del wire[:count]
            if kind == "drip" and count < 1000:
                for at in range(count):
                    if self.connections[slot] is connection:
                        self._arrive(slot, connection, chunk[at : at + 1])
            elif count:
                self._arrive(slot, connection, chunk)

    def _arrive(self, slot: int, connection: Connection, chunk: bytes) -> None:
        count = len(chunk)
        frames = connection.frames
        while count:
            command, missing = frames[0]
            if missing > count:
                frames[0] = command, missing - count
                break
            count -= missing
            frames.popleft()
            connection.ready.append(command)
        self._receive(slot, connection, chunk)
        while connection.session.stalled() and not connection.dozing and self.connections[slot] is connection:
            self._receive(slot, connection, b"")

    def _receive(self, slot: int, connection: Connection, chunk: bytes) -> None:
        model, peer, ready = self.model, connection.peer, connection.ready
        expect_close = False
        while ready and peer.unsent <= self.soft:
            command = ready.popleft()
            self.done += 1
            try:
                model.do(peer, command.name, command.fields)
            except Closed:
                expect_close = True
                break
            self.on_done(connection, command)
        if not expect_close and not ready and connection.frames and peer.unsent <= self.soft:
            command, missing = connection.frames[0]
            expect_close = missing < command.size and not model.knows(peer, command.name)
        refusal: PeerError | None = None
        try:
            connection.session.receive(chunk)
            self._finish_steps(connection.session)
        except PeerError as error:
            refusal = error
        if (refusal is not None) != expect_close:
            raise Difference(f"closed: {refusal!r}, expected: {expect_close}")
        stalled = connection.session.stalled()
        # Bytes that are held back may also be the start of a frame.
        if not expect_close and (stalled < bool(ready) or stalled > (peer.unsent > self.soft)):
            raise Difference(f"stalled: {stalled}, unsent {peer.unsent}, held back {len(ready)}")
        self._compare(connection)
        if expect_close:
            self._leave(slot, connection)

    def _finish_steps(self, session: ServerSession) -> None:
        """Finish commands that are carried out in steps: the model executes a command at once."""
        keyspace = self.store.keyspace
        while session.running is not None:
            session.receive(b"")
        while keyspace.work:
            keyspace.step()

    def _compare(self, connection: Connection | None) -> None:
        """Compare what each peer was sent since the last comparison."""
        pending_flush = self.store.hub.pending_flush
        woken = self.model.woken
        if connection is not None:
            self._compare_output(connection)
        if pending_flush or woken:
            sessions = {id(session) for session in pending_flush}
            if len(sessions) != len(pending_flush) and len(pending_flush) != len(woken):
                raise Difference(f"{len(pending_flush)} sessions to flush, expected {len(woken)}")
            for other in self.connections:
                if (
                    other is not None
                    and other is not connection
                    and (id(other.session) in sessions or other.peer in woken)
                ):
                    self._compare_output(other)
                    if id(other.session) not in sessions:
                        raise Difference("a session with output is not in pending_flush")
            pending_flush.clear()
            woken.clear()

    def _compare_output(self, connection: Connection) -> None:
        session, peer = connection.session, connection.peer
        sent = b"".join(session.out)
        expected = b"".join(peer.sent)
        if sent != expected:
            raise Difference(f"sent {sent!r}, expected {expected!r}")
        if session.unsent != peer.unsent:
            raise Difference(f"unsent {session.unsent}, expected {peer.unsent}")
        if not connection.dozing:
            session.unsent -= len(sent)
            session.out.clear()
            peer.sent.clear()
            peer.unsent = 0
            if sent:
                self.on_sent(connection, sent)

    def on_done(self, connection: Connection, command: Command) -> None:
        """For a simulator: a command was executed."""

    def on_sent(self, connection: Connection, sent: bytes) -> None:
        """For a simulator: these bytes have left the server."""

    def _wake_up(self, slot: int, connection: Connection) -> None:
        connection.dozing = False
        self._compare_output(connection)
        while connection.session.stalled() and self.connections[slot] is connection:
            self._receive(slot, connection, b"")

    def _leave(self, slot: int, connection: Connection) -> None:
        self.connections[slot] = None
        connection.session.leave()
        self.model.leave(connection.peer)
        self._compare(None)

    # Invariants

    def check(self) -> None:
        """Check the invariants that hold between any two steps."""
        store, model = self.store, self.model
        keyspace = store.keyspace
        connections = [connection for connection in self.connections if connection is not None]
        sessions = [connection.session for connection in connections]
        _same("values", {key: unpack(framed(value)) for key, value in keyspace.values.items()}, model.store)
        queues = {key: [unpack(item) for item in items] for key, items in keyspace.queues.items()}
        _same("queues", queues, model.queues)
        held = Counter(session.handoff.queue for session in sessions if session.handoff is not None)
        _same("hand-offs", keyspace.handoffs, dict(held))
        _same(
            "hand-offs of peers",
            [connection.peer.handoff for connection in connections],
            [s.handoff and s.handoff.queue for s in sessions],
        )
        carriers = self.carriers()
        _same("unfinished", store.budget.unfinished, sum(session.held for session in [*sessions, *carriers]))
        recount = sum(len(key) + ENTRY_BYTES + cost(value) for key, value in keyspace.values.items())
        counted_queues = {*keyspace.queues, *keyspace.leased}
        _same("queues that count", keyspace.queue_count, len(counted_queues))
        recount += sum(len(key) + QUEUE_BYTES for key in counted_queues)
        recount += sum(ENTRY_BYTES + len(item) for items in keyspace.queues.values() for item in items)
        lent: Counter[bytes] = Counter()
        for connection in connections:
            leased = connection.session.leases or {}
            found = {ticket: (key, unpack(item)) for ticket, (key, item) in leased.items()}
            _same("leases", list(found.items()), list(connection.peer.leased.items()))
            recount += sum(len(key) + ENTRY_BYTES + len(item) + PARKED_BYTES for key, item in leased.values())
            lent.update(key for key, _ in leased.values())
            popping = connection.session.awaited, connection.session.number
            _same("popping", popping if connection.session.state == AWAITING_ITEM else None, connection.peer.popping)
            _same("rank", connection.session.joined, connection.peer.rank)
            _same("agent", _name(keyspace.represented.get(connection.session)), _name(connection.peer.agent))
        _same("leased", keyspace.leased, dict(lent))
        for joins in keyspace.joins.values():
            recount += sum(len(token) + PARKED_BYTES for token in joins.waiters)
        _same("lost", {key: joins.lost for key, joins in keyspace.joins.items()}, _lost(model))
        recount += self._check_rounds()
        stored = recount
        standing = registrations(keyspace)
        groups = self._check_groups()
        recount += sum((len(key) + PARKED_BYTES) * len(waiters) for key, waiters in keyspace.waiters.items())
        recount += sum(MEMBER_BYTES * len(group.members) for group in groups)
        for key, counter in keyspace.counters.items():
            recount += (len(key) + PARKED_BYTES) * sum(map(len, counter.awaiting.values()))
        _same("size", keyspace.size, recount)
        _same("parked", keyspace.parked, recount - stored)
        weights = sum(session.weight for session in sessions)
        weights += sum(counter.weight for counter in keyspace.counters.values())
        weights += sum(group.weight for group in groups)
        _same("weights", weights, keyspace.parked)
        others = sum(
            store.budget.session_bytes + session.held + session.introduction_bytes()
            for session in [*sessions, *carriers]
        )
        others += self._check_key_lists() + self.counted_for_links()
        _same("counted beside the store", store.budget.others, others)
        self._check_counters()
        parked = {id(session): set[bytes]() for session in sessions}
        parked.update((id(counter), set()) for counter in keyspace.counters.values())
        for key, waiters in standing.items():
            if not waiters:
                raise Difference(f"{key!r} has no registrations but an entry")
            for waiter in waiters:
                if id(waiter) not in parked:
                    raise Difference(f"a waiter that has left is registered under {key!r}")
                parked[id(waiter)].add(key)
            waiting = any(peer.waits and peer.barrier != key and not peer.away for peer in model.waiting.get(key, ()))
            if waiting and len(keyspace.queues.get(key, ())) > keyspace.handoffs.get(key, 0):
                raise Difference(f"a lost wake-up: {key!r} holds items promised to nobody, and somebody waits")
        for connection in connections:
            session, peer = connection.session, connection.peer
            group = session.group if isinstance(session.group, SharedWait) else None
            holder = session if group is None else group
            if group is not None and session.parked is not None:
                raise Difference("a member of a group has registrations of its own")
            _same("parked", set(holder.parked or ()), parked[id(session)])
            self.check_output(connection)
            keys = {key for key, peers in model.waiting.items() if peer in peers}
            _same("registrations", {key for key, waiters in standing.items() if session in waiters}, keys)
            _same("waiting", session.state != IDLE, peer.waits)
            fetching = session.awaited if session.state == AWAITING_VALUE else None
            _same("fetching", fetching, peer.fetching)
            counting = (session.group.key, session.number) if isinstance(session.group, CounterGroup) else None
            _same("counting", counting, peer.counting)
            _same("introduced", session.peer, peer.introduced)
            _same("meeting", session.state == AWAITING_ROUND, peer.meeting is not None)
            if peer.waits and not keys and counting is None and peer.meeting is None:
                raise Difference("a lost wake-up: it waits for nothing")
            kept = 0 if session.input_buffer is None else 64 + len(session.input_buffer)
            rest = 0 if session.partial is None else session.partial.held()
            _same("held", session.held, kept + rest)
            awaited = session in store.hub.unvalidated or session in store.hub.unvalidated_on_links
            _same("validated", not awaited, session.table is store.guards.table_of(session))

    def check_output(self, connection: Connection) -> None:
        session, peer = connection.session, connection.peer
        _same("output", (b"".join(session.out) == b"", session.unsent), (peer.unsent == 0, peer.unsent))

    def carriers(self) -> list[ServerSession]:
        """Return the sessions of connections that are links."""
        return []

    def counted_for_links(self) -> int:
        """Return the bytes that are to be counted for links, and for replies that wait there."""
        return 0

    def _check_groups(self) -> list[SharedWait]:
        """Check the groups that are registered, and return them."""
        keyspace = self.store.keyspace
        counts: dict[SharedWait, set[bytes]] = {}
        for key, waiters in keyspace.waiters.items():
            for waiter in waiters:
                if isinstance(waiter, SharedWait):
                    counts.setdefault(waiter, set()).add(key)
        for group, own in counts.items():
            if not group.members or any(member.group is not group for member in group.members):
                raise Difference("a group has no members, or those of another one")
            _same("what a group awaits", set(group.parked or ()), own)
            listed = group.listed
            if listed is not None:
                missing = {key for key in listed.keys if not keyspace.exists(key)}
                _same("what an open group awaits", (listed.group, own), (group, missing))
        return list(counts)

    def _check_key_lists(self) -> int:
        """Check what is kept for lists of keys, and return the bytes that it counts."""
        keyspace, cache = self.store.keyspace, self.store.key_lists
        tracked: dict[bytes, object] = {}
        for first, listed in cache.lists.items():
            if not listed.raw.startswith(first):
                raise Difference("a list is kept under what it does not begin with")
            _same("a list", (listed.raw, listed.tracked), (keys(*listed.keys), listed in keyspace.tracked.values()))
            if listed.tracked:
                tracked.update(dict.fromkeys(listed.keys, listed))
            elif listed.group is not None or listed.reply is not None or listed.present != UNKNOWN:
                raise Difference("something is kept for a list that is not tracked")
            if listed.present != UNKNOWN:
                _same("presence", listed.present == 1, all(map(keyspace.exists, listed.keys)))
            if listed.reply is not None:
                _same("a kept reply", listed.reply, b"".join(self.model.get(Peer(), key) for key in listed.keys))
                if len(listed.reply) > listed.counted_reply:
                    raise Difference("a kept reply is not counted")
            partials = (one.session.partial for one in self.connections if one is not None)
            _same("compared", listed.compared, sum(getattr(partial, "known", None) is listed for partial in partials))
        _same("tracked", dict(keyspace.tracked), tracked)
        _same("noting", keyspace.noting, len(tracked) > 0)
        _same("bytes of lists", cache.size, sum(listed.size for listed in cache.lists.values()))
        if cache.size > cache.capacity:
            raise Difference(f"lists count {cache.size} bytes")
        return cache.size

    def _check_rounds(self) -> int:
        """Check the rounds of agents, and return the bytes that are to be counted for them."""
        model = self.model.meetings
        counted = 0
        _same("rounds", list(self.store.keyspace.rounds), list(model))
        for key, rounds in self.store.keyspace.rounds.items():
            meeting = model[key]
            _same("round", (rounds.round, rounds.formed), (meeting.round, meeting.ranks is not None))
            _same("closed", rounds.closed, meeting.closed)
            agents = [(agent.name, agent.beaten, agent.seen, agent.connections) for agent in rounds.agents.values()]
            _same("agents", agents, [(one.name, one.beaten, one.seen, len(one.peers)) for one in meeting.members])
            inside = [agent.name for agent in rounds.group.agents if agent.group is rounds.group]
            _same("inside", inside, sorted(one.name for one in meeting.inside))
            _same("outside", rounds.waiting.names, sorted(one.name for one in meeting.outside))
            _same("caller", _name(rounds.caller), _name(meeting.caller))
            _same("due", rounds.due, [])
            if rounds.formed:
                _same("present", rounds.present, len(inside))
                _same("ranks", rounds.group.names, [one.name for one in meeting.ranks or ()])
            kept = {*rounds.agents.values(), *(rounds.group.agents if rounds.formed else ())}
            size = ROUNDS_BYTES + sum(AGENT_BYTES + len(agent.name) for agent in kept)
            _same("the size of rounds", (rounds.size, rounds.counted), (size, size))
            counted += len(key) + size
        ended = {key: (one.at, one.count, one.names) for key, one in self.store.keyspace.ended.items()}
        expected = {key: (at, len(names), names[:MOST_NAMED]) for key, (at, names) in self.model.ended.items()}
        _same("the jobs that have ended", list(ended.items()), list(expected.items()))
        for key, (_, _, names) in ended.items():
            counted += len(key) + ENDED_BYTES + sum(map(len, names))
        return counted

    def _check_counters(self) -> None:
        keyspace, model = self.store.keyspace, self.model
        standing = registrations(keyspace)
        sessions = {
            id(connection.session): connection.peer for connection in self.connections if connection is not None
        }
        for key, counter in keyspace.counters.items():
            _same("the registration of a counter", counter in standing.get(key, ()), True)
            _same("what a counter waits for", (counter.key, set(counter.parked or ())), (key, {key}))
            if not counter.awaiting:
                raise Difference(f"a counter for {key!r} without waiters")
            targets = counter.targets
            if any(targets[at] < targets[(at - 1) // 2] for at in range(1, len(targets))):
                raise Difference(f"no heap: {targets}")
            if not set(counter.awaiting) <= set(targets):
                raise Difference(f"a target that will not be reached: {targets} of {list(counter.awaiting)}")
            for target, group in counter.awaiting.items():
                if not group:
                    raise Difference(f"no waiter for {key!r} to reach {target}")
                for waiter in group:
                    if id(waiter) not in sessions:
                        raise Difference(f"a waiter that has left awaits that {key!r} reaches {target}")
                    _same("who counts", sessions[id(waiter)].counting, (key, target))
        for peer in model.peers:
            if peer.counting is None:
                continue
            key, target = peer.counting
            try:
                reached = model.number(key) >= target
            except Closed:
                continue
            if reached and key in model.store:
                raise Difference(f"a lost wake-up: {key!r} has reached {target}")

    def finish(self) -> None:
        """Let all peers leave and delete everything; nothing may be left."""
        self.check()
        for slot, connection in enumerate(self.connections):
            if connection is not None:
                self._leave(slot, connection)
        self.check()
        keyspace = self.store.keyspace
        _same("waiters", len(keyspace.waiters), 0)
        _same("hand-offs", len(keyspace.handoffs), 0)
        _same("counters", len(keyspace.counters), 0)
        _same("represented", len(keyspace.represented), 0)
        _same("unfinished", self.store.budget.unfinished, 0)
        for key, raw in RESERVED.items():
            _same("reserved", unpack(keyspace.reserved[key]), raw)
        wipe = [Command("delete_key", key) for key in self.model.store]
        wipe += [Command("delete_key", key) for key in self.model.meetings]
        wipe += [Command("queue_pop", key) for key, items in self.model.queues.items() for _ in items]
        self.apply(("send", 0, (HANDSHAKE, *wipe), 0))
        _same("size", keyspace.size, 0)
        self.check()


def _name(agent: Agent | Member | None) -> bytes | None:
    return None if agent is None else agent.name


def _lost(model: Model) -> dict[bytes, int]:
    return {key: sum(standing == 0 for standing in ranks.values()) for key, ranks in model.joined.items()}


def _same(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise Difference(f"{what}: {found!r}, expected {expected!r}")


# Random steps

NAMES = [b"/a", b"/b", b"q", b"", b"/a/long/name/with\0zero", b"init/", b"/c", b"\xff", SERVER_KEY, JOINS_KEY]
TEXTS = [
    b"",
    b"0",
    b"1",
    b"-1",
    b"7",
    b"12abc",
    b"x",
    b" +3",
    b"9223372036854775807",
    b"-9223372036854775808",
    b"y" * 30,
]
TARGETS = [-(2**63), -5, 0, 1, 1, 2, 2, 3, 3, 4, 5, 7, 8, 12, 20, 2**63 - 1]
INTRODUCED = [b"", b"rank", b"7", b"a\nb", b"\xff\xfe", "\u2028é".encode(), b"x" * 700]
DELTAS = [0, 1, 1, 1, -1, 2, 5, 2**63 - 1, -(2**63)]
TICKETS = list(range(12))
TOKENS = [b"", b"", b"one", b"two", b"three", b"x" * 64, b"x" * 65]
AGENTS = [b"a", b"b", b"c", b"d", b"e", b"f", b"node 1", b"x" * 512, b"x" * 513, b""]
LARGE = bytes(70_000)

WEIGHTS = {
    "set": 6, "compare_set": 5, "get": 3, "add": 4, "check": 3, "wait": 40, "num_keys": 1, "delete_key": 30,
    "append": 3, "multi_get": 2, "multi_set": 4, "cancel_wait": 3, "ping": 1, "queue_push": 12, "queue_pop": 20,
    "queue_len": 2, "list_keys": 1, "barrier": 5, "fetch": 20, "cancel_fetch": 1, "wait_count": 20, "introduce": 1,
    "lease": 10, "lease_later": 20, "confirm": 8, "give_back": 8, "join": 4, "depart": 1, "meet": 30, "attend": 12,
}  # fmt: skip


def key_lists(names: Sequence[bytes]) -> list[list[bytes]]:
    """Return a few lists that are long enough to be shared; some begin alike, and some name a key twice."""
    many = list(names) * 5
    first = many[:5]
    return [
        first,
        first[:4],
        [*first[:4], names[0]],
        [*first, names[-1]],
        [*first[:2], names[-1], *first[3:]],
        many[1:6],
    ]


def random_command(rng: random.Random, names: Sequence[bytes], name: str) -> Command:
    def key() -> bytes:
        return rng.choice(names)

    def text() -> bytes:
        return LARGE if rng.random() < 0.005 else rng.choice(TEXTS)

    match name:
        case "set" | "append" | "queue_push":
            return Command(name, key(), text())
        case "compare_set":
            return Command(name, key(), text(), text())
        case "get" | "delete_key" | "queue_pop" | "queue_len" | "fetch":
            return Command(name, key())
        case "add":
            return Command(name, key(), rng.choice(DELTAS))
        case "barrier":
            return Command(name, key(), rng.choice([-1, 0, 1, 2, 2, 3, 3, 4]))
        case "lease" | "lease_later":
            return Command(name, key(), rng.choice(TICKETS))
        case "confirm" | "give_back":
            return Command(name, rng.choice(TICKETS))
        case "join":
            return Command(name, key(), rng.choice(TOKENS))
        case "meet":
            least, most = rng.choice(
                [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (2, 4), (3, 3), (3, 9), (1, 9), (0, 1), (3, 2)]
            )
            return Command(name, key(), rng.choice(AGENTS), least, most, rng.choice([-1, -1, 0, 0, 1, 2, 3]))
        case "attend":
            action = rng.choice(
                [0, 1, 1, 1, 1, 2, 2, 2, 3 if rng.random() < 0.2 else 0, 4, 5 if rng.random() < 0.1 else 1]
            )
            return Command(name, key(), rng.choice(AGENTS), action, rng.choice([0, 1, 1, 2, 2, 3, 3, 4, 5]))
        case "wait_count":
            return Command(name, key(), rng.choice(TARGETS) if rng.random() < 0.5 else rng.randrange(-20, 100))
        case "introduce":
            return Command(name, [(rng.choice(INTRODUCED), rng.choice(INTRODUCED)) for _ in range(rng.randrange(5))])
        case "check" | "multi_get" | "wait" if rng.random() < 0.4:
            return Command(name, rng.choice(key_lists(names)))
        case "check" | "multi_get":
            return Command(name, [key() for _ in range(rng.randrange(5))])
        case "wait":
            return Command(name, [key() for _ in range(rng.choice([0, 1, 1, 1, 1, 2, 2, 3, 4]))])
        case "multi_set":
            return Command(name, [(key(), text()) for _ in range(rng.randrange(4))])
        case "ping" | "validate":
            return Command(name, rng.randrange(2**32))
        case _:
            return Command(name)


CROWD = 40
"""Commands of fleets in which many sessions wait: mostly for queues, counters, values, or lists of keys."""

CROWD_WEIGHTS = [
    {"wait": 60, "queue_push": 5, "queue_pop": 14, "delete_key": 10, "cancel_wait": 2, "queue_len": 1, "fetch": 2},
    {"lease_later": 60, "queue_push": 9, "queue_pop": 4, "give_back": 9, "confirm": 5, "lease": 4, "wait": 20},
    {"wait_count": 60, "add": 12, "set": 1, "barrier": 1, "delete_key": 8, "cancel_wait": 9, "wait": 2, "fetch": 2},
    {"meet": 60, "attend": 12, "delete_key": 8, "cancel_fetch": 6, "wait": 2, "set": 1},
    {"fetch": 60, "set": 4, "append": 2, "delete_key": 20, "cancel_fetch": 4, "queue_push": 2, "queue_pop": 2},
    {
        "wait": 60,
        "multi_get": 9,
        "check": 4,
        "set": 6,
        "append": 2,
        "delete_key": 14,
        "cancel_wait": 2,
        "queue_push": 3,
    },
]


class Driver:
    """Choose steps at random, for one fleet with its own probabilities."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.slots = rng.choice([2, 3, 4, 5, 8, 12, CROWD])
        soft = rng.choice([0, 1, 16, 100, MIB, MIB])
        self.lists = rng.choice([0, 0, 3_000, 6_000])
        self.fleet = Fleet(self.slots, soft, self.lists)
        names = rng.sample(NAMES, rng.choice([1, 2, 3, 5, 8]))
        weights = [weight * rng.choice([0.1, 1, 1, 3]) for weight in WEIGHTS.values()]
        if self.slots == CROWD:
            names = names[:2]
            group = rng.choice(CROWD_WEIGHTS)
            weights = [group.get(kind, 0.1) for kind in WEIGHTS]
        kinds = rng.choices(list(WEIGHTS), weights, k=250)
        self.pool = [random_command(rng, names, kind) for kind in kinds]
        self.polite = 0.9 if self.slots == CROWD else rng.choice([0.1, 0.5, 0.9, 0.99])
        """How seldom a waiting peer sends another command."""
        self.cuts = rng.choice([0.05, 0.2, 0.5])
        """How often a frame is cut."""
        self.trouble = rng.choice([0.002, 0.01, 0.05])
        """How often something else than a valid command happens."""

    def step(self) -> Step:
        rng = self.rng
        random_ = rng.random
        slot = int(random_() * self.slots)
        connection = self.fleet.connections[slot]
        if connection is None:
            if random_() < self.trouble:
                return "send", slot, (rng.choice(self.pool),), 0
            return "send", slot, (HANDSHAKE, rng.choice(self.pool)), rng.randrange(9)
        if connection.dozing and random_() < 0.1:
            return "read", slot, (), 0
        if random_() < self.trouble:
            return self._trouble(slot)
        commands: tuple[Command, ...]
        if connection.peer.waits and random_() < self.polite:
            commands = () if random_() >= 0.1 else (_cancel(connection.peer),)
        elif random_() < 0.85:
            commands = (self._pick(connection.peer),)
        else:
            commands = tuple(rng.choices(self.pool, k=rng.randrange(2, 7)))
        keep = 0
        if random_() < self.cuts:
            keep = rng.randrange(len(connection.wire) + sum(command.size for command in commands) + 1)
        return "send", slot, commands, keep

    def _pick(self, peer: Peer) -> Command:
        """Choose a command, but seldom one that closes the connection because another wait is pending."""
        while True:
            command = self.pool[int(self.rng.random() * 250)]
            if (
                not peer.waits
                or command.name not in ("fetch", "wait_count", "lease_later", "meet")
                or self.rng.random() < 0.1
            ):
                return command

    def _trouble(self, slot: int) -> Step:
        rng = self.rng
        match rng.randrange(6):
            case 0:
                return "leave", slot, (), 0
            case 1 | 2:
                return "doze", slot, (), 0
            case 3:
                return "send", slot, (rng.choice(self.pool), Command("unknown"), rng.choice(self.pool)), 0
            case 4:
                return "send", slot, (HANDSHAKE,), 0
            case _:
                few = [command for command in rng.choices(self.pool, k=3) if command.size < 200]
                return "drip", slot, tuple(few), 0


def _cancel(peer: Peer) -> Command:
    """Return the command that ends its wait."""
    if peer.popping is not None:
        return Command("give_back", peer.popping[1])
    return CANCEL if peer.fetching is None and peer.meeting is None else CANCEL_FETCH


EPOCH = 3_000
"""Commands after which a fleet ends and another one begins."""

CHECK_EVERY = 250
"""Steps between two checks of the invariants."""


def run_epoch(seed: int, steps: list[Step] | None = None) -> int:
    """Run one fleet and return the number of commands executed. Records the steps if asked to. Raises Difference."""
    driver = Driver(seed)
    fleet = driver.fleet
    count = 0
    while fleet.done < EPOCH and count < 20 * EPOCH:
        step = driver.step()
        if steps is not None:
            steps.append(step)
        fleet.apply(step)
        count += 1
        if count % CHECK_EVERY == 0:
            fleet.check()
    fleet.finish()
    return fleet.done


def replay(slots: int, soft: int, steps: Sequence[Step], lists: int = 0) -> None:
    """Run recorded steps, and check the invariants after each. Raises Difference."""
    fleet = Fleet(slots, soft, lists)
    for step in steps:
        fleet.apply(step)
        fleet.check()
    fleet.finish()


def shrink(slots: int, soft: int, steps: list[Step], lists: int = 0) -> list[Step]:
    """Return a short sequence of steps that still fails."""

    def differs(candidate: list[Step]) -> bool:
        try:
            replay(slots, soft, candidate, lists)
        except Exception:  # one of the package, too
            return True
        return False

    if not differs(steps):
        return steps
    size_ = max(1, len(steps) // 2)
    while True:
        at = 0
        while at < len(steps):
            candidate = steps[:at] + steps[at + size_ :]
            if differs(candidate):
                steps = candidate
            else:
                at += size_
        if size_ == 1:
            break
        size_ = max(1, size_ // 2)
    for index, (kind, slot, commands, _) in enumerate(steps):
        for at in range(len(commands) - 1, -1, -1):
            old = steps[index]
            shorter = old[2][:at] + old[2][at + 1 :]
            candidate = [*steps[:index], (kind, slot, shorter, 0), *steps[index + 1 :]]
            if differs(candidate):
                steps = candidate
    return steps
