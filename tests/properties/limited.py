"""A fleet whose peers have tokens with a prefix and limits; each token's usage must equal what the model has stored.

Two tokens share one store, each with keys of its own, so that what one of them has stored does not depend on how that
came about. The model foresees which commands are refused, and by how much each would exceed a limit.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from replaying import record
from tcpstore_async.auth.access import Access
from tcpstore_async.base.errors import ProtocolError
from tcpstore_async.base.limits import ENTRY_BYTES, PARKED_BYTES, QUEUE_BYTES
from tcpstore_async.keyspace.agents import ENDED_BYTES
from tcpstore_async.keyspace.rounds import AGENT_BYTES, ROUNDS_BYTES
from tcpstore_async.session.identity import identity
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store
from tcpstore_async.wire.values import CHUNKED_BYTES, COUNTER_SIZE, GROWING_BYTES, PREFIX

from .fleet import AGENTS, HANDSHAKE, STEP_SECONDS, Command, Connection, Difference, Fleet, Step, random_command
from .model import Closed, Model, Peer
from .rounds_model import Meeting, Member
from .stepped import SteppedFleet

PREFIXES = ("a/", "b/")
NO_LIMIT = 2**40


class LimitedModel(Model):
    """The model, with the size of each key, and limits per prefix."""

    def __init__(self, limits: dict[bytes, tuple[int, int]], portion: int = 1000) -> None:
        super().__init__(portion)
        self.limits = limits
        """Most keys and bytes, keyed by prefix."""
        self.forms: dict[bytes, str] = {}
        """Keys whose values are kept as a number, or as pieces that were appended."""

    # What is stored

    def cost(self, key: bytes) -> int:
        form = self.forms.get(key)
        return COUNTER_SIZE if form == "number" else PREFIX + len(self.store[key]) + GROWING_BYTES * (form == "pieces")

    def queue_names(self) -> set[bytes]:
        """Return the queues that count: those with items, and those to which leased items may go back."""
        return {*self.queues, *(key for peer in self.peers for key, _ in peer.leased.values())}

    def measure(self, prefix: bytes) -> tuple[int, int]:
        """Return how many keys and bytes are stored under a prefix."""

        def inside(names: Any) -> list[bytes]:
            return [name for name in names if name.startswith(prefix)]

        values, queues = inside(self.store), inside(self.queue_names())
        size = sum(len(key) + ENTRY_BYTES + self.cost(key) for key in values)
        size += sum(len(key) + QUEUE_BYTES for key in queues)
        size += sum(ENTRY_BYTES + PREFIX + len(item) for key in inside(self.queues) for item in self.queues[key])
        for peer in self.peers:
            for key, item in peer.leased.values():
                if key.startswith(prefix):
                    size += len(key) + PARKED_BYTES + ENTRY_BYTES + PREFIX + len(item)
        size += sum(len(token) + PARKED_BYTES for key in inside(self.joined) for token in self.joined[key])
        for key in inside(self.meetings):
            meeting = self.meetings[key]
            kept = {*meeting.members, *(meeting.ranks or ())}
            size += len(key) + ROUNDS_BYTES + sum(AGENT_BYTES + len(member.name) for member in kept)
        size += sum(len(key) + ENDED_BYTES + sum(map(len, self.ended[key][1][:16])) for key in inside(self.ended))
        return len(values) + len(queues), size

    # What a command adds

    def growth(self, name: str, fields: tuple[Any, ...]) -> tuple[int, int]:
        """Return how many keys and bytes a command adds before it wakes waiters."""
        key: bytes = fields[0] if fields and isinstance(fields[0], bytes) else b""
        match name:
            case "set":
                return self.written(key, PREFIX + len(fields[1]))
            case "compare_set":
                stored = self.store.get(key, b"") == fields[1]
                return self.written(key, PREFIX + len(fields[2])) if stored else (0, 0)
            case "append":
                if key not in self.store:
                    return self.written(key, PREFIX + len(fields[1]))
                size = PREFIX + len(self.store[key]) + GROWING_BYTES + len(fields[1])
                return 0, size - self.cost(key)
            case "add" | "barrier":
                return self.written(key, COUNTER_SIZE)
            case "join":
                if not fields[1] or fields[1] in self.joined.get(key, {}):
                    return 0, 0
                keys, size = self.written(key, COUNTER_SIZE)
                return keys, size + len(fields[1]) + PARKED_BYTES
            case "queue_push":
                new = key not in self.queue_names()
                return int(new), ENTRY_BYTES + PREFIX + len(fields[1]) + new * (len(key) + QUEUE_BYTES)
            case "multi_set":
                added = [self.written(one, PREFIX + len(value)) for one, value in dict(fields[0]).items()]
                return sum(keys for keys, _ in added), sum(size for _, size in added)
            case "meet":
                meeting = self.meetings.get(key)
                if meeting is not None and (meeting.closed or meeting.find(fields[1]) is not None):
                    return 0, 0
                rounds = 0 if meeting is not None else ROUNDS_BYTES + len(key)
                return 0, rounds + AGENT_BYTES + PREFIX + len(fields[1])
            case "attend" if fields[2] == 3 and key not in self.meetings:
                return 0, ROUNDS_BYTES + len(key)
        return 0, 0

    def written(self, key: bytes, size: int) -> tuple[int, int]:
        if key in self.store:
            return 0, size - self.cost(key)
        return 1, len(key) + ENTRY_BYTES + size

    # Commands

    def do(self, peer: Peer, name: str, fields: tuple[Any, ...]) -> None:
        keys, size = self.growth(name, fields)
        first = fields[0][0][0] if name == "multi_set" and fields[0] else fields[0] if fields else b""
        for prefix, (most_keys, most_bytes) in self.limits.items():
            if isinstance(first, bytes) and first.startswith(prefix):
                held, counted = self.measure(prefix)
                if (keys > 0 and held + keys > most_keys) or (size > 0 and counted + size > most_bytes):
                    raise Closed
        super().do(peer, name, fields)

    def set(self, peer: Peer, key: bytes, value: bytes) -> bytes:
        self.forms.pop(key, None)
        return super().set(peer, key, value)

    def get(self, peer: Peer, key: bytes) -> bytes:
        if self.forms.get(key) == "pieces" and PREFIX + len(self.store[key]) < CHUNKED_BYTES:
            del self.forms[key]
        return super().get(peer, key)

    def multi_get(self, peer: Peer, keys: list[bytes]) -> bytes:
        if len(keys) <= self.portion:
            return super().multi_get(peer, keys)
        return b"".join(super(LimitedModel, self).get(peer, key) for key in keys)  # in steps, which join no pieces

    def compare_set(self, peer: Peer, key: bytes, expected: bytes, desired: bytes) -> bytes:
        if key in self.store:
            self.get(peer, key)
        return super().compare_set(peer, key, expected, desired)

    def add(self, peer: Peer, key: bytes, delta: int) -> bytes:
        return self.counted(key, super().add(peer, key, delta))

    def barrier(self, peer: Peer, key: bytes, world_size: int) -> bytes:
        return self.counted(key, super().barrier(peer, key, world_size))

    def join(self, peer: Peer, key: bytes, token: bytes) -> bytes:
        new = token and token not in self.joined.get(key, {})
        reply = super().join(peer, key, token)
        return self.counted(key, reply) if new else reply

    def counted(self, key: bytes, reply: bytes) -> bytes:
        self.forms[key] = "number"
        return reply

    def append(self, peer: Peer, key: bytes, value: bytes) -> bytes:
        grows = key in self.store
        reply = super().append(peer, key, value)
        if grows:
            self.forms[key] = "pieces"
        return reply

    def multi_set(self, peer: Peer, items: list[tuple[bytes, bytes]]) -> bytes:
        for key, _ in items:
            self.forms.pop(key, None)
        return super().multi_set(peer, items)

    def delete_key(self, peer: Peer, key: bytes) -> bytes:
        self.forms.pop(key, None)
        return super().delete_key(peer, key)

    def note_end(self, key: bytes, meeting: Meeting, member: Member | None, succeeded: bool) -> None:
        before = self.ended.get(key)
        super().note_end(key, meeting, member, succeeded)
        if self.ended.get(key) is not before:
            for prefix, (_, most_bytes) in self.limits.items():
                if key.startswith(prefix) and self.measure(prefix)[1] > most_bytes:
                    self.ended.pop(key, None)  # nothing is remembered that there is no room for


def compare_usage(store: Store, model: LimitedModel) -> None:
    """Check that each token's usage is what is stored. Raises Difference."""
    if store.keyspace.account is not None:
        raise Difference("something is counted for nobody's command")
    for prefix in PREFIXES:
        usage = store.hub.auth.usage.get(f"t-{prefix}")
        found = (0, 0) if usage is None else (usage.keys, usage.bytes)
        expected = model.measure(b"/" + prefix.encode())
        if found != expected:
            raise Difference(f"{found} keys and bytes are counted for {prefix}, expected {expected}")


class LimitedFleet(Fleet):
    """Run steps on a store and on the model at once. Peers with even numbers have the first token."""

    def __init__(self, slots: int, soft: int, most_keys: int, most_bytes: int) -> None:
        super().__init__(slots, soft)
        self.accesses = [
            Access(f"t-{prefix}", prefix=prefix, max_keys=most_keys, max_bytes=most_bytes) for prefix in PREFIXES
        ]
        limits = {b"/" + prefix.encode(): (most_keys, most_bytes) for prefix in PREFIXES}
        self.model = self.limited = LimitedModel(limits)
        self.model.now = lambda: self.store.keyspace.clock.now
        self.store.identify(identity("this server", "uv"))
        record(self.store)

    def new_session(self, slot: int) -> ServerSession:
        session = super().new_session(slot)
        session.grant_access(self.accesses[slot % len(PREFIXES)])
        return session

    def apply(self, step: Step) -> None:
        kind, slot, _, _ = step
        connection = self.connections[slot]
        if kind == "evict":
            if connection is not None:
                connection.session.evict(ProtocolError("for this test"))
                self.store.hub.pending_flush.remove(connection.session)
                self._leave(slot, connection)
        else:
            super().apply(step)
        compare_usage(self.store, self.limited)


class LimitedSteppedFleet(SteppedFleet):
    """The same, with nearly every command in steps, and limits that are never reached."""

    def __init__(self, slots: int, portion: int) -> None:
        super().__init__(slots, portion)
        self.accesses = [Access(f"t-{prefix}", prefix=prefix, max_bytes=NO_LIMIT) for prefix in PREFIXES]
        self.model = self.limited = LimitedModel({}, portion)
        self.model.now = lambda: self.store.keyspace.clock.now
        self.store.identify(identity("this server", "uv"))
        record(self.store)

    def new_session(self, slot: int) -> ServerSession:
        session = super().new_session(slot)
        session.grant_access(self.accesses[slot % len(PREFIXES)])
        return session

    def settle(self) -> None:
        super().settle()
        compare_usage(self.store, self.limited)


WEIGHTS = {
    "set": 4, "compare_set": 4, "get": 4, "add": 3, "check": 1, "wait": 8, "delete_key": 10, "append": 6,
    "multi_get": 2, "multi_set": 8, "cancel_wait": 1, "queue_push": 16, "queue_pop": 6, "barrier": 3, "fetch": 4,
    "lease": 10, "lease_later": 12, "confirm": 8, "give_back": 6, "join": 4, "depart": 1, "meet": 12, "attend": 12,
}  # fmt: skip
"""All commands that a token with a prefix allows."""


IN_STEPS = ("wait", "barrier", "lease_later", "meet")
"""Commands that leave registrations, or change what is stored only once earlier ones are dropped."""


def pools(rng: random.Random, often: Sequence[str] = (), count: int = 120) -> list[list[Command]]:
    """Return commands for the peers of each token, some of them more `often`."""
    weights = [weight * rng.choice([0.1, 1, 1, 4]) + 20 * (name in often) for name, weight in WEIGHTS.items()]
    names = rng.sample([b"k", b"q", b"n", b"long" * 20, b"", b"r"], 6 if often else rng.choice([2, 3, 5]))
    kinds = rng.choices(list(WEIGHTS), weights, k=count)
    ends = rng.choice([0, 0, count])
    chosen = []
    for prefix in PREFIXES:
        keys = [b"/" + prefix.encode() + name for name in names]
        commands = [random_command(rng, keys, kind) for kind in kinds]
        chosen.append(commands + [ending_command(rng, keys[0]) for _ in range(ends)])
    return chosen


def ending_command(rng: random.Random, key: bytes) -> Command:
    """Return a command of an agent that is alone, whose job ends and is forgotten."""
    name = AGENTS[0]
    meet = Command("meet", key, name, 1, 1, rng.choice([-1, 0, 1]))
    close = Command("attend", key, name, 3, rng.choice([1, 1, 1, 0]))
    return rng.choice([meet, meet, close, Command("delete_key", key), Command("attend", key, name, 4, 0)])


def run(seed: int, steps: int = 150) -> int:
    """Run one schedule and return the number of commands executed. Raises Difference."""
    rng = random.Random(seed)
    if seed % 4 == 3:
        return run_stepped(rng, steps)
    slots = rng.choice([2, 3, 4, 8])
    fleet = LimitedFleet(
        slots, rng.choice([0, 100, 1 << 20]), rng.choice([1, 2, 3, NO_LIMIT]), rng.choice([3000, 6000, 9000, NO_LIMIT])
    )
    chosen = pools(rng)
    for _ in range(steps):
        slot = rng.randrange(slots)
        connection = fleet.connections[slot]
        commands = tuple(rng.choices(chosen[slot % len(PREFIXES)], k=rng.choice([1, 1, 1, 3])))
        if connection is None:
            commands = (HANDSHAKE, *commands)
        kind = rng.choices(["send", "leave", "evict", "doze", "read"], [92, 4, 1, 1, 2])[0]
        if connection is not None and connection.peer.waits and kind == "send" and rng.random() < 0.7:
            continue
        fleet.apply((kind, slot, commands, 0 if rng.random() < 0.9 else rng.randrange(9)))
    fleet.check()
    for slot, connection in enumerate(fleet.connections):
        if connection is not None:
            fleet.apply(("leave", slot, (), 0))
    fleet.check()
    return fleet.done


def fault(seed: int) -> Exception | None:
    """Return what is wrong in a schedule, if anything."""
    try:
        run(seed)
    except Exception as error:  # of the package, too
        return error
    return None


def run_stepped(rng: random.Random, steps: int) -> int:
    often = rng.choice([(), IN_STEPS])
    fleet = LimitedSteppedFleet(rng.choice([2, 3, 5, 9]), 1 if often else rng.choice([1, 2, 3, 5]))
    # Whether waking many joins what was appended depends on how many there are: that is not for the model to know.
    chosen = [[command for command in pool if command.name != "append"] for pool in pools(rng, often)]
    hasty = 0.8 if often else 0.3
    for number in range(steps):
        fleet.store.keyspace.clock.now += STEP_SECONDS
        slot = rng.randrange(len(fleet.connections))
        if rng.random() < 0.6:
            fleet.turn(slot)
        if rng.random() < 0.03:
            fleet.gone(slot)
            fleet.compare()
            continue
        connection = fleet.connections[slot]
        if connection is None or not connection.peer.waits or rng.random() < hasty:
            fleet.send(slot, rng.choice(chosen[slot % len(PREFIXES)]))
        if number % 20 == 19 and rng.random() < 0.5:
            fleet.settle()
    fleet.settle()
    for slot in range(len(fleet.connections)):
        fleet.gone(slot)
    fleet.finish_work()
    fleet.settle()
    return fleet.done


__all__ = ["Connection", "LimitedFleet", "LimitedModel", "run"]
