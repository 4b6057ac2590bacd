"""Named stores in memory: processes own, enter, use and lose them, over connections that are cut anywhere.

The server's sessions, engines and registry are real, and so is what clients do to enter a store; bytes are carried in
pieces. A model decides who may enter which store, and holds the content of each (`properties.model`). Checked is that

* every byte that a session is sent is what the model says: so no key, waiter or queue of a store concerns another one;
* a store is there as long as one of its owners is, and nobody enters one that has ended, or another of its name;
* whoever is in a store that has ended, or waits in it, is closed with the reason, and is told it when it comes back;
* once the network rests, nobody waits for a store that is there;
* when all have left, nothing is held.

A step is a plain tuple (see `World.do`) that means nothing where it does not apply.
"""

from __future__ import annotations

import os
import random
import socket
from collections import deque
from collections.abc import Generator
from typing import Any, Final, NamedTuple

from properties.fleet import Difference
from properties.model import Closed, Model, Peer
from replaying import record, replayed
from simulation.world import ENCODERS
from tcpstore_async.base.errors import PeerError
from tcpstore_async.base.limits import Limits
from tcpstore_async.client.admission import admission
from tcpstore_async.client.store_name import StoreEndedError, StoreName, StoreTakenError
from tcpstore_async.session.client import ClientSession, PendingCall
from tcpstore_async.session.identity import ENDED, ENTERED, TAKEN, identity, read_enter_reply
from tcpstore_async.session.named_stores import NamedStore, NamedStores
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store
from tcpstore_async.wire.commands import BY_METHOD, SERVER_KEY
from tcpstore_async.wire.values import PREFIX, framed, unpack

Step = tuple[Any, ...]

NAMES: Final = ("a", "b")
SLOTS: Final = 3
"""Most connections of a process."""
DROPPED: Final = "an administrator dropped it"
GAVE_UP: Final = b"\xff" * 8
"""Reply to a cancel; no reply to ENTER begins with it."""
WHO: Final = f"host {socket.gethostname()}, pid {os.getpid()}"


class Life:
    """The expected state of one incarnation of a name, or of the unnamed store."""

    def __init__(self, portion: int, store: Store, name: str = "", attempt: str = "") -> None:
        self.model = Model(portion)
        self.model.reserved = {key: unpack(value) for key, value in store.keyspace.reserved.items()}
        self.store = store
        self.name = name
        self.attempt = attempt
        self.incarnation = ""
        self.owners: dict[Connection, str] = {}
        self.ids: set[str] = set()
        self.members: dict[Connection, bool] = {}
        """Sessions in the store; whether they count as others when its owner ends it."""
        self.over = ""


class Connection:
    """Both ends of a connection, and the bytes in flight."""

    def __init__(self, store: Store, nameless: Life, number: int) -> None:
        self.server = ServerSession(store, number, "::1", number, 0.0)
        self.session = ClientSession()
        self.up = bytearray()
        self.down = bytearray()
        self.frames: deque[list[Any]] = deque()
        """Requests that have not fully arrived: method, fields, and the number of missing bytes."""
        self.life = nameless
        self.peer: Peer = nameless.model.enter()
        self.entry: StoreName | None = None
        """What it waits for, as the server sees it."""
        self.name: StoreName | None = None
        """What its client has requested."""
        self.program: Generator[tuple[bytes, PendingCall], None, None] | None = None
        """What enters the store."""
        self.call: PendingCall | None = None
        self.there = True
        """Whether the server's end is open."""


class Client:
    """A process."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.slots: list[Connection | None] = [None] * SLOTS
        self.known: dict[str, str] = {}
        """The incarnation that it was last in, keyed by name."""


class World:
    """Runs steps. Raises Difference."""

    def __init__(self, clients: int, portion: int) -> None:
        self.portion = portion
        self.store = Store(Limits(), portion)
        self.store.identify(identity("the server", "uv"))
        self.named = NamedStores(self.store, "the server")
        record(self.store, self.named)
        self.named.on_released = lambda store: self.released.append(store)
        self.named.on_created = self._created
        self.released: list[NamedStore] = []
        self.newest: NamedStore | None = None
        self.nameless = Life(portion, self.store)
        self.lives: dict[str, Life] = {}
        """Stores that have not ended, keyed by name."""
        self.by_incarnation: dict[str, Life] = {}
        self.connections: list[Connection] = []
        self.clients = [Client(number) for number in range(clients)]
        self.serial = 0
        self.done = 0
        """Commands executed."""

    def _created(self, store: NamedStore) -> None:
        self.newest = store

    def do(self, step: Step) -> None:
        """Do one of these. c is a client, s one of its connections:

        * `("open", c, s)`: it connects, to the store without a name
        * `("enter", c, s, name, role, attempt)`: it connects and enters a store: as an `owner`, as one that `shares` it
          with others of its process, as a `guest` who waits, `now` or never, or as who `returns` to where it was
        * `("call", c, s, method, fields)`: it sends a request, unless it waits
        * `("end", c, s)`: it sends END_STORE if it owns the store; `("quit", c, s)`: it gives up its wait
        * `("go", c, s)`: all that is on its way arrives; `("up", c, s, n)`, `("down", c, s, n)`: n bytes do
        * `("close", c, s)`: it closes, what it sent arrives; `("reset", c, s)`: that is lost; `("die", c)`: all reset
        * `("work",)`: the server does a portion of what it has left; `("grace",)`: the grace of stores that were ended
          by their owners is over; `("drop", name)`: an administrator drops a store
        """
        getattr(self, "_do_" + step[0])(*step[1:])

    # Clients

    def _do_open(self, number: int, slot: int) -> Connection | None:
        client = self.clients[number]
        if client.slots[slot] is not None:
            return None
        self.serial += 1
        connection = client.slots[slot] = Connection(self.store, self.nameless, self.serial)
        self.connections.append(connection)
        hello, _ = connection.session.hello(number)
        connection.up += hello
        connection.frames.append(["validate", (0x3C85F7CE,), 5])
        connection.frames.append(["ping", (number,), 5])
        return connection

    def _do_enter(self, number: int, slot: int, name: str, role: str, attempt: str) -> None:
        connection = self._do_open(number, slot)
        if connection is None:
            return
        client = self.clients[number]
        self.serial += 1
        owner = f"o{number}" if role == "owner" else f"s{self.serial}" if role == "shares" else ""
        found = StoreName(name, owner, f"p{number}" if role == "shares" else "", attempt=attempt)
        found.waits = role != "now"
        if role == "returns":
            found.incarnation = client.known.get(name, "")
        connection.name = found
        connection.program = admission(connection.session, "::1", 1, b"", found)
        self._advance(client, slot, connection)

    def _advance(self, client: Client, slot: int, connection: Connection) -> None:
        """Continue to enter."""
        assert connection.program is not None
        assert connection.name is not None
        pending = connection.session.pending
        before = len(pending)
        try:
            _, connection.call = next(connection.program)
        except StopIteration:
            connection.program = None
            client.known[connection.name.name] = connection.name.incarnation
        except (StoreEndedError, StoreTakenError):
            self._close(client, slot)
        else:
            for call in list(pending)[before:]:
                method = call.command.method
                data = call.command.prefix + call.command.request.encode(call.fields)
                self._send(connection, method, (connection.name,) if method == "enter" else call.fields, data)

    def _send(self, connection: Connection, method: str, fields: tuple[Any, ...], data: bytes) -> None:
        connection.up += data
        connection.frames.append([method, fields, len(data)])

    def _do_call(self, number: int, slot: int, method: str, fields: tuple[Any, ...]) -> None:
        connection = self.clients[number].slots[slot]
        if connection is None or connection.program is not None or connection.session.waiting is not None:
            return
        encode = ENCODERS.get(method)
        data, _ = connection.session.request(BY_METHOD[method], fields if encode is None else encode(fields))
        self._send(connection, method, fields, data)

    def _do_end(self, number: int, slot: int) -> None:
        connection = self.clients[number].slots[slot]
        if connection is not None and connection in connection.life.owners:
            self._do_call(number, slot, "end_store", ())

    def _do_quit(self, number: int, slot: int) -> None:
        connection = self.clients[number].slots[slot]
        call = None if connection is None else connection.session.waiting
        if connection is None or call is None or call.canceled:
            return
        method = "cancel_wait" if call.command.method == "wait" else "cancel_fetch"
        self._send(connection, method, (), connection.session.cancel(call))
        if connection.program is not None:
            connection.program.close()
            connection.program = None

    def _do_close(self, number: int, slot: int) -> None:
        self._close(self.clients[number], slot)

    def _do_reset(self, number: int, slot: int) -> None:
        connection = self.clients[number].slots[slot]
        if connection is not None:
            connection.up.clear()
            connection.frames.clear()
            self._close(self.clients[number], slot)

    def _do_die(self, number: int) -> None:
        for slot in range(SLOTS):
            self._do_reset(number, slot)

    def _close(self, client: Client, slot: int) -> None:
        connection = client.slots[slot]
        client.slots[slot] = None
        if connection is not None and connection.there:
            self._arrive(connection, len(connection.up))
            if connection.there:
                self._leave(connection)
                self._compare()

    # The network

    def _do_go(self, number: int, slot: int) -> None:
        self._do_up(number, slot, 1 << 20)
        self._do_down(number, slot, 1 << 20)

    def _do_up(self, number: int, slot: int, count: int) -> None:
        connection = self.clients[number].slots[slot]
        if connection is not None and connection.there:
            self._arrive(connection, count)

    def _do_down(self, number: int, slot: int, count: int) -> None:
        client = self.clients[number]
        connection = client.slots[slot]
        if connection is None:
            return
        if not connection.down:
            if not connection.there:
                client.slots[slot] = None
            return
        chunk = bytes(connection.down[:count])
        del connection.down[: len(chunk)]
        for call in connection.session.receive(chunk):
            if connection.program is not None and call is connection.call:
                self._advance(client, slot, connection)

    def _arrive(self, connection: Connection, count: int) -> None:
        chunk = bytes(connection.up[:count])
        if not chunk:
            return
        del connection.up[: len(chunk)]
        server = connection.server
        refusal: PeerError | None = None
        try:
            server.receive(chunk)
            while server.stalled():
                server.receive(b"")
        except PeerError as error:
            refusal = error
        expected = self._execute(connection, len(chunk))
        if (refusal is not None) != expected:
            raise Difference(f"closed: {refusal!r}, expected: {expected}")
        if expected:
            self._leave(connection)
        self._compare()

    def _execute(self, connection: Connection, count: int) -> bool:
        """Let the model do what has arrived; return whether that closes the connection."""
        self._note_let_in(connection)
        frames = connection.frames
        while frames and frames[0][2] <= count:
            method, fields, size = frames.popleft()
            count -= size
            self.done += 1
            if method == "enter":
                self._model_enters(connection, fields[0])
            elif method == "end_store":
                if connection not in connection.life.owners:
                    return True
                connection.peer.sent.append(self._model_releases(connection))
            else:
                connection.entry = None if method == "cancel_fetch" else connection.entry
                try:
                    connection.life.model.do(connection.peer, method, fields)
                except Closed:
                    return True
        if frames:
            frames[0][2] -= count
        return False

    def _leave(self, connection: Connection) -> None:
        """Close the server's end."""
        connection.there = False
        connection.server.leave()
        life = connection.life
        life.model.leave(connection.peer)
        life.members.pop(connection, None)
        if life.owners.pop(connection, "") and not life.owners:
            self._model_ends(life, f"its owner ({WHO}) left")

    # The server

    def _do_work(self) -> None:
        if self.store.keyspace.work:
            self.store.activate()
            self.store.keyspace.step()
        self.named.work()
        self._compare()

    def _do_grace(self) -> None:
        for store in self.released:
            self.named.close(store)
        self.released.clear()
        self._compare()

    def _do_drop(self, name: str) -> None:
        life = self.lives.get(name)
        if self.named.drop(name, DROPPED) != (life is not None):
            raise Difference(f"store {name!r}: {life}")
        if life is not None:
            self._model_ends(life, DROPPED)
        self._compare()

    def _evict(self) -> None:
        """Close the connections that the server closes because their store has ended."""
        evicted = self.store.hub.evicted
        while evicted:
            server, error = next(iter(evicted.items()))
            connection = next(one for one in self.connections if one.server is server)
            life = connection.life
            if not life.over or str(error) != f"the store {life.name!r} ended: {life.over}":
                raise Difference(f"closed for {error}, but {life.name!r} is over for {life.over!r}")
            if connection in life.owners:
                raise Difference("an owner outlives its store")
            server.out.clear()
            connection.peer.sent.clear()
            self._leave(connection)

    def _compare(self) -> None:
        """Compare and take the output of all sessions."""
        self._evict()
        for connection in self.connections:
            if not connection.there:
                continue
            self._note_let_in(connection)
            server, peer = connection.server, connection.peer
            if not server.out and not peer.sent:
                continue
            sent, expected = b"".join(server.out), b"".join(peer.sent)
            if sent != expected:
                raise Difference(f"sent {sent!r} in {connection.life.name!r}, expected {expected!r}")
            self._take(connection, len(sent))
            peer.sent.clear()
            peer.unsent = 0
        self.connections = [one for one in self.connections if one.there]
        for life in (self.nameless, *self.lives.values()):
            life.model.woken.clear()
        self.store.hub.pending_flush.clear()

    def _take(self, connection: Connection, count: int) -> None:
        """Send the first bytes of a session's output."""
        server = connection.server
        said = b"".join(server.out)
        server.out[:] = [said[count:]] if said[count:] else []
        server.unsent -= count
        connection.down += said[:count]

    # The model

    def _model_enters(self, connection: Connection, entry: StoreName) -> None:
        expected = b"".join(connection.peer.sent)
        said = b"".join(connection.server.out)
        if not said.startswith(expected):
            raise Difference(f"sent {said!r}, expected {expected!r}")
        connection.peer.sent.clear()
        connection.peer.unsent = 0
        self._take(connection, len(expected))
        decision = self._decide(entry)
        connection.entry = entry
        if decision is not None:
            self._note_let_in(connection)
            if connection.entry is not None:
                raise Difference(f"no reply to ENTER, expected {decision}")

    def _note_let_in(self, connection: Connection) -> None:
        """Note the answer to a session that waited for a store, if there is one."""
        entry = connection.entry
        said = b"".join(connection.server.out)
        if entry is None or not said or said.startswith(GAVE_UP):
            return
        size = PREFIX + int.from_bytes(said[:PREFIX], "little")
        reply = read_enter_reply(said[PREFIX:size])
        decision = self._decide(entry)
        if decision is None or decision != (reply.status, reply.reason):
            raise Difference(f"the reply to ENTER was {reply}, expected {decision}")
        self._take(connection, size)
        connection.entry = None
        if reply.status == ENTERED:
            self._model_puts(connection, entry, reply.incarnation)

    def _decide(self, entry: StoreName) -> tuple[str, str] | None:
        """Return the reply to ENTER and its reason; None if the session must wait."""
        name, life = entry.name, self.lives.get(entry.name)
        entered = ENTERED, ""
        if entry.incarnation:
            if life is not None and life.incarnation == entry.incarnation:
                return entered
            return ENDED, f"the store {name!r} ended: {self.by_incarnation[entry.incarnation].over}"
        if entry.owner:
            if life is None or entry.owner in life.ids or (entry.shares and entry.shares in life.ids):
                return entered
            return TAKEN, f"the store {name!r} already has an owner ({WHO}), which created it 0.0 s ago"
        if life is None or (entry.attempt and life.attempt and int(entry.attempt) > int(life.attempt)):
            over = next(
                (one.over for one in reversed(self.by_incarnation.values()) if one.name == name and one.over), ""
            )
            absent = f"the store {name!r} ended: {over}" if over else f"there is no store {name!r}"
            return None if entry.waits else (ENDED, absent)
        if entry.attempt and life.attempt and entry.attempt != life.attempt:
            text = f"belongs to attempt {life.attempt}, but this rank belongs to attempt {entry.attempt}"
            return ENDED, f"the store {name!r} {text}"
        return entered

    def _model_puts(self, connection: Connection, entry: StoreName, incarnation: str) -> None:
        life = self.lives.get(entry.name)
        if life is None:
            assert self.newest is not None
            life = self.lives[entry.name] = Life(self.portion, self.newest, entry.name, entry.attempt)
            life.incarnation = self.newest.incarnation
            if life.incarnation in self.by_incarnation:
                raise Difference(f"{life.incarnation} was there before")
            self.by_incarnation[life.incarnation] = life
        if incarnation != life.incarnation:
            raise Difference(f"entered {incarnation}, expected {life.incarnation}")
        self.nameless.model.leave(connection.peer)
        connection.life = life
        connection.peer = life.model.enter()
        connection.peer.validated = True
        life.members[connection] = True
        if entry.owner:
            life.owners[connection] = entry.owner
            if entry.owner not in life.ids:
                life.ids |= {entry.owner, *([entry.shares] if entry.shares else [])}

    def _model_releases(self, connection: Connection) -> bytes:
        life = connection.life
        owner = life.owners[connection]
        for one in [one for one, of in life.owners.items() if of == owner]:
            del life.owners[one]
            life.members[one] = False
            life.model.do(one.peer, "depart", ())
        life.ids.discard(owner)
        if not life.owners:
            self._model_ends(life, f"its owner ({WHO}) has closed it")
        return sum(life.members.values()).to_bytes(8, "little")

    def _model_ends(self, life: Life, why: str) -> None:
        if not life.over:
            life.over = why
            life.owners.clear()
            del self.lives[life.name]

    # Invariants

    def check(self) -> None:
        """Check the invariants between two steps."""
        _same("stores", sorted(self.named.stores), sorted(self.lives))
        for life in (self.nameless, *self.lives.values()):
            keyspace = life.store.keyspace
            values = {key: unpack(framed(value)) for key, value in keyspace.values.items()}
            _same(f"values in {life.name!r}", values, life.model.store)
            queues = {key: [unpack(item) for item in items] for key, items in keyspace.queues.items()}
            _same(f"queues in {life.name!r}", queues, life.model.queues)
        for name, life in self.lives.items():
            store = self.named.stores[name]
            _same("members", set(store.sessions), {one.server for one in life.members})
            _same("owners", dict(store.owners), {c.server: of for c, of in life.owners.items()})

    def rest(self) -> None:
        """Deliver everything; then no session may wait without need."""
        moving = True
        while moving:
            moving = bool(self.store.keyspace.work or self.named.to_work or self.released)
            self._do_grace()
            self._do_work()
            for client in self.clients:
                for slot, connection in enumerate(client.slots):
                    if connection is not None and (connection.up or connection.down or not connection.there):
                        moving = True
                        self._do_go(client.number, slot)
        for connection in self.connections:
            if connection.life.over and connection.life.members[connection]:  # its owner may stay by itself
                raise Difference(f"a connection is in {connection.life.name!r}, which is over: {connection.life.over}")
            if connection.entry is not None and self._decide(connection.entry) is not None:
                raise Difference(f"a connection waits for {connection.entry.name!r}, which is there")

    def finish(self) -> None:
        """Make all clients leave; then nothing may be held."""
        self.rest()
        self.check()
        for client in self.clients:
            self._do_die(client.number)
        self.rest()
        named, store = self.named, self.store
        left = (named.stores, named.ending, named.waiting, named.entries, named.to_work, store.hub.evicted)
        if any(left) or store.hub.unvalidated or store.budget.holders:
            raise Difference(f"left: {left}")
        _same("bytes of waiters", store.keyspace.parked, 0)
        connection = self._do_open(0, 0)
        assert connection is not None
        for key in list(self.nameless.model.store):
            self._do_call(0, 0, "delete_key", (key,))
        for key, items in list(self.nameless.model.queues.items()):
            for _ in range(len(items)):
                self._do_call(0, 0, "queue_pop", (key,))
        self._do_go(0, 0)
        self._do_die(0)
        _same("bytes", (store.keyspace.size, store.budget.used()), (0, 0))


def _same(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise Difference(f"{what}: {found!r}, expected {expected!r}")


# Schedules

KEYS: Final = (b"/a", b"/b", SERVER_KEY)
QUEUE: Final = b"/q"
ROLES: Final = {"owner": 4, "shares": 2, "guest": 8, "now": 1, "returns": 4}
WEIGHTS: Final = {
    "enter": 16, "open": 2, "call": 30, "go": 40, "up": 8, "down": 8, "quit": 3, "end": 2, "close": 2, "reset": 2,
    "die": 2, "work": 12, "grace": 2, "drop": 0.6,
}  # fmt: skip


class Schedule(NamedTuple):
    """A world and its steps."""

    clients: int
    portion: int
    """Keys that the server handles at a time."""
    steps: list[Step]


def chosen(seed: int) -> Schedule:
    """Return the schedule of a seed."""
    rng = random.Random(seed)
    clients = rng.choice((2, 3, 3, 4))
    weights = [weight * rng.choice((0.1, 1, 1, 3)) for weight in WEIGHTS.values()]
    weights[0], weights[2], weights[3] = 16, 30, 40
    roles = [weight * rng.choice((0, 1, 1, 3)) for weight in ROLES.values()]
    roles[0] += 1
    names = NAMES[: rng.choice((1, 2))]
    attempts = rng.choice((("",), ("",), ("", "1", "2")))
    steps: list[Step] = []
    for kind in rng.choices(list(WEIGHTS), weights, k=rng.randrange(20, 121)):
        number, slot = rng.randrange(clients), int(rng.random() ** 2 * SLOTS)
        if kind == "enter":
            steps.append(
                (kind, number, slot, rng.choice(names), rng.choices(list(ROLES), roles)[0], rng.choice(attempts))
            )
        elif kind == "call":
            steps.append((kind, number, slot, *_request(rng)))
        elif kind in ("up", "down"):
            steps.append((kind, number, slot, rng.randrange(1, 60)))
        elif kind in ("work", "grace"):
            steps.append((kind,))
        elif kind == "drop":
            steps.append((kind, rng.choice(names)))
        else:
            steps.append((kind, number) if kind == "die" else (kind, number, slot))
    return Schedule(clients, rng.choice((20, 20, 1000)), steps)


def _request(rng: random.Random) -> tuple[str, tuple[Any, ...]]:
    key = rng.choice(KEYS[:2])
    method = rng.choice(
        (
            "set",
            "set",
            "get",
            "add",
            "check",
            "wait",
            "wait",
            "fetch",
            "delete_key",
            "num_keys",
            "list_keys",
            "join",
            "queue_push",
            "queue_push",
            "queue_pop",
            "wait_queue",
        )
    )
    match method:
        case "set":
            return method, (key, rng.choice((b"1", b"2", b"x")))
        case "add":
            return method, (b"/n", 1)
        case "join":
            return method, (b"/init", b"rank %d" % rng.randrange(3))
        case "check" | "wait":
            return method, (list(rng.sample(KEYS, rng.randrange(1, 3))),)
        case "num_keys" | "list_keys":
            return method, ()
        case "queue_push":
            return method, (QUEUE, b"%d" % rng.randrange(100))
        case "queue_pop":
            return method, (QUEUE,)
        case "wait_queue":
            return "wait", ([QUEUE],)
        case _:
            return method, (key,)


def run(schedule: Schedule, every: int = 16) -> World:
    """Run a schedule, and check the invariants after every few steps. Raises what is wrong."""
    world = World(schedule.clients, schedule.portion)
    for count, step in enumerate(schedule.steps):
        world.do(step)
        if count % every == every - 1:
            world.check()
    world.finish()
    return world


def fault(schedule: Schedule) -> Exception | None:
    """Return what is wrong, if anything, with a check after each step, and when it is executed again."""
    try:
        with replayed(1):
            run(schedule, 1)
    except Exception as error:  # the package's own, too
        return error
    return None
