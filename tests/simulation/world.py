"""A server and its clients in memory, with the network between them, each command compared with the model.

The server's half is `properties.fleet.Fleet`: real sessions on a real store, every answer compared with the model's.
This adds the other half: real client sessions, callers who run the same sequences of commands as our clients do, and
connections that are carried byte by byte, cut anywhere, reset, left half open and replaced while old bytes still
arrive. What is checked on top of the fleet's invariants:

* a client is answered what the model answered on that connection, in order, whatever was canceled in between;
* a write that a client believes to be executed has been executed, once;
* an item that was pushed is with one caller or in the queue; with two only if it was leased and the connection was lost
  over which it was to be confirmed; and if all that pop it lease it, it is never lost;
* a rank that joins again is counted once;
* agents that see a round of an elastic job agree about it;
* once the network rests, no caller sleeps that should be awake;
* a connection that is gone holds nothing.

A step is a plain tuple (see `World.do`) that means nothing where it does not apply, so that any part of a schedule
is a schedule: it can be recorded, replayed and shrunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Final

from properties.fleet import Command, Connection, Difference, Fleet
from tcpstore_async.base.errors import StoreTimeoutError
from tcpstore_async.keyspace.agents import BEAT, CLOSE, DESCRIBE, LEAVE, LOOK, SUCCEEDED
from tcpstore_async.session.client import ClientSession, PendingCall
from tcpstore_async.session.server import ServerSession
from tcpstore_async.stores.agent import Options, Pulse, Round, RoundsClosed, joining
from tcpstore_async.wire.codecs import DEFERRED_VALUE, NO_REPLY, STOP_WAITING, WAIT_CANCELED
from tcpstore_async.wire.commands import BY_METHOD, HOLDS, MUTATES, PARKS
from tcpstore_async.wire.values import ABSENT, Framed, pack, unpack

Step = tuple[Any, ...]
Ask = tuple[Any, ...]
"""A method, and its fields in the model's form."""
Program = Generator[Ask, Any, Any]


def _as_is(fields: tuple[Any, ...]) -> tuple[Any, ...]:
    return fields


def _last_packed(fields: tuple[Any, ...]) -> tuple[Any, ...]:
    return fields[0], pack(fields[1])


ENCODERS: dict[str, Callable[[tuple[Any, ...]], tuple[Any, ...]]] = {
    "set": _last_packed,
    "append": _last_packed,
    "queue_push": _last_packed,
    "compare_set": lambda fields: (fields[0], pack(fields[1]), pack(fields[2])),
    "join": _last_packed,
    "multi_set": lambda fields: ([(key, pack(value)) for key, value in fields[0]],),
    "meet": lambda fields: (fields[0], pack(fields[1]), *fields[2:]),
    "attend": lambda fields: (fields[0], pack(fields[1]), *fields[2:]),
}
"""Conversions of the model's fields to the client's, where they differ."""


class Said(Command):
    """A command for the model; its bytes are those of the client session."""

    def __init__(self, name: str, fields: tuple[Any, ...], size: int) -> None:
        self.name = name
        self.fields = fields
        self.size = size


class Link(Connection):
    """A connection; `wire` holds bytes in flight to the server."""

    def __init__(self, session: ServerSession, world: World, slot: int) -> None:
        super().__init__(session, world.model)
        self.slot = slot
        self.down = bytearray()
        """Bytes in flight to the client."""
        self.heard = bytearray()
        """Bytes that have reached the client, of calls that are not complete."""
        self.open = True
        """Whether the client's end is open; if not, the server sees the end when `wire` is empty."""
        self.written = 0
        """Writes without a reply that the server has executed."""


class Op:
    """A caller's current operation."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.call: PendingCall | None = None
        self.given_up = False
        self.ticket = 0
        """Ticket of its current lease."""


class Client:
    """A process with one connection at a time."""

    def __init__(self, number: int, pipelines: bool) -> None:
        self.number = number
        self.pipelines = pipelines
        """Whether callers share the connection, as in the async client; else one call waits for the other."""
        self.link: Link | None = None
        self.session = ClientSession()
        self.ops: list[Op] = []
        self.calls: dict[PendingCall, Op | None] = {}
        self.held: deque[tuple[Op, Ask]] = deque()
        """Requests held back while the connection waits."""
        self.left = -1
        """Last round of its agent."""
        self.pulse = Pulse(0.0)
        self.patience = 0.0
        """Seconds that its agent waits for the reply to MEET."""


class World(Fleet):
    """Runs steps. Raises Difference."""

    def __init__(self, clients: int, soft: int, pipelines: int = 0) -> None:
        super().__init__(1, soft)
        self.clients = [Client(number, bool(pipelines >> number & 1)) for number in range(clients)]
        self.serial = 0
        self.acting: Client
        """The client whose caller runs."""
        self.received: dict[bytes, Link] = {}
        """Items given to callers, with the connection of the last delivery."""
        self.pushed: dict[bytes, bytes] = {}
        """Items given to the server, with their queues."""
        self.tokens: set[bytes] = set()
        """Ranks that have joined."""
        self.now = 0.0
        """Clock of agents, which moves only when one is late."""
        self.rounds: dict[int, dict[bytes, Round]] = {}
        """Rounds that agents have seen, keyed by number and agent."""

    # Steps

    def do(self, step: Step) -> None:
        """Do one of these:

        * `("call", c, name, ...)`: a caller at client c begins one of `PROGRAMS`; it dials first if need be
        * `("quit", c, n)`: a caller gives up: it timed out, was cancelled or interrupted
        * `("go", c)`: all that is on its way between c and the server arrives, both ways
        * `("up", c, n)`, `("down", c, n)`: n bytes do
        * `("close", c)`: c closes, what it sent still arrives; `("reset", c)`: that is lost, the server hears later
        * `("drop", c)`: the server's end goes, c hears after what was sent to it
        * `("old", n, count)`: bytes of a connection that its client has left arrive, or its end
        * `("doze", c)`: c stops to read; `("read", c)`: it goes on
        * `("late", c)`: the agent at c has waited for so long that it cancels its MEET and does what is due
        """
        getattr(self, "_do_" + step[0])(*step[1:])

    def _do_call(self, number: int, method: str, *fields: Any) -> None:
        client = self.clients[number]
        if client.ops and not client.pipelines:
            return
        if client.link is None:
            self._dial(client)
        op = Op(PROGRAMS[method](self, *fields))
        client.ops.append(op)
        self._advance(client, op, None)

    def _do_quit(self, number: int, which: int) -> None:
        client = self.clients[number]
        if client.ops:
            op = client.ops.pop(which % len(client.ops))
            op.given_up = True
            op.program.close()
            if op.call is not None and op.call is client.session.waiting:
                if not op.call.canceled:
                    self._cancel(client, op.call)
            elif op.call is not None and op.ticket:
                assert client.link is not None
                self._write(client.link, "give_back", (op.ticket,), client.session.request(GIVE_BACK, (op.ticket,))[0])

    def _do_go(self, number: int) -> None:
        link = self.clients[number].link
        if link is not None:
            self._carry(link, len(link.wire))
            self._bring(self.clients[number], link, len(link.down))

    def _do_up(self, number: int, count: int) -> None:
        link = self.clients[number].link
        if link is not None:
            self._carry(link, count)

    def _do_down(self, number: int, count: int) -> None:
        link = self.clients[number].link
        if link is not None:
            self._bring(self.clients[number], link, count)

    def _do_close(self, number: int) -> None:
        self._lose(self.clients[number])

    def _do_reset(self, number: int) -> None:
        link = self.clients[number].link
        if link is not None:
            link.wire.clear()
            link.frames.clear()
            self._lose(self.clients[number])

    def _do_drop(self, number: int) -> None:
        link = self.clients[number].link
        if link is not None and self.connections[link.slot] is link:
            self._leave(link.slot, link)

    def _do_old(self, which: int, count: int) -> None:
        old = [connection for connection in self.connections if isinstance(connection, Link) and not connection.open]
        if old:
            link = old[which % len(old)]
            if link.wire:
                self._carry(link, count)
            elif not link.dozing:
                self._leave(link.slot, link)

    def _do_doze(self, number: int) -> None:
        link = self.clients[number].link
        if link is not None:
            link.dozing = True

    def _do_read(self, number: int) -> None:
        link = self.clients[number].link
        if link is not None and link.dozing:
            link.dozing = False
            if self.connections[link.slot] is link:
                self._wake_up(link.slot, link)

    def _do_late(self, number: int) -> None:
        client = self.clients[number]
        call = client.session.waiting
        if client.link is not None and call is not None and not call.canceled and call.command.method == "meet":
            self.now += client.patience
            self._cancel(client, call)

    # The network

    def _dial(self, client: Client) -> None:
        slot = len(self.connections)
        link = Link(ServerSession(self.store, slot, "::1", slot, 0.0), self, slot)
        self.connections.append(link)
        client.link = link
        client.session = ClientSession()
        hello, fence = client.session.hello(client.number)
        link.wire += hello
        link.frames.append((Said("validate", (0x3C85F7CE,), 5), 5))
        link.frames.append((Said("ping", (client.number,), 5), 5))
        client.calls[fence] = None

    def _carry(self, link: Link, count: int) -> None:
        if count > 0 and link.wire and self.connections[link.slot] is link:
            chunk = bytes(link.wire[:count])
            del link.wire[:count]
            self._arrive(link.slot, link, chunk)

    def on_sent(self, connection: Connection, sent: bytes) -> None:
        if isinstance(connection, Link) and connection.open:
            connection.down += sent

    def on_done(self, connection: Connection, command: Command) -> None:
        if isinstance(connection, Link):
            connection.written += command.name in SILENT
            if command.name == "queue_push":
                key, item = command.fields
                if item in self.pushed:
                    raise Difference(f"item {item!r} was pushed twice")
                self.pushed[item] = key
            elif command.name == "join":
                self.tokens.add(command.fields[1])

    def _bring(self, client: Client, link: Link, count: int) -> None:
        if link.dozing:
            return
        if not link.down:
            if self.connections[link.slot] is not link:
                self._lose(client)
            return
        chunk = bytes(link.down[: max(1, count)])
        del link.down[: len(chunk)]
        link.heard += chunk
        session = client.session
        done = session.receive(chunk)
        if session.confirmed > link.written:
            raise Difference(f"{session.confirmed} writes are believed to be done, {link.written} are")
        for call in done:
            self._verify(link, call)
            op = client.calls.pop(call)
            if op is not None and not op.given_up and client.link is link:
                op.call = None
                self._advance(client, op, call.result)
        while client.held and session.waiting is None and client.link is link:
            op, ask = client.held.popleft()
            if not op.given_up:
                self._send(client, op, ask)

    def _lose(self, client: Client) -> None:
        """Close the client's end, and fail its callers."""
        link, client.link = client.link, None
        if link is not None:
            link.open = False
            link.dozing = False
            link.down.clear()
            for op in client.ops:
                op.program.close()
            client.ops.clear()
            client.calls.clear()
            client.held.clear()

    # Callers

    def _advance(self, client: Client, op: Op, result: Any) -> None:
        self.acting = client
        try:
            ask = op.program.send(result)
        except StopIteration:
            client.ops.remove(op)
            return
        if ask[0] == "confirm" or (client.session.waiting is None and not client.held):
            self._send(client, op, ask)
        else:
            client.held.append((op, ask))

    def _send(self, client: Client, op: Op, ask: Ask) -> None:
        method, *rest = ask
        fields = tuple(rest)
        if method in ("lease", "lease_later"):
            op.ticket = fields[1]
        session, link = client.session, client.link
        assert link is not None
        command = BY_METHOD[method]
        if command.flags & PARKS and session.unconfirmed():
            data, fence = session.fence(7)
            self._write(link, "ping", (7,), data)
            client.calls[fence] = None
        data, call = session.request(command, ENCODERS.get(method, _as_is)(fields))
        self._write(link, method, fields, data)
        if call is None or call.done:
            self._advance(client, op, None if call is None else call.result)
        else:
            op.call = call
            client.calls[call] = op

    def _cancel(self, client: Client, call: PendingCall) -> None:
        link = client.link
        assert link is not None
        data = client.session.cancel(call)
        method = call.command.method
        if method == "lease_later":
            self._write(link, "give_back", (call.fields[1],), data)
        else:
            self._write(link, "cancel_fetch" if method in ("fetch", "meet") else "cancel_wait", (), data)

    def _write(self, link: Link, name: str, fields: tuple[Any, ...], data: bytes) -> None:
        link.wire += data
        link.frames.append((Said(name, fields, len(data)), len(data)))

    def _verify(self, link: Link, call: PendingCall) -> None:
        """Check that a call was answered with exactly its reply."""
        heard = link.heard
        if call.canceled and call.command.method != "lease_later":
            later = call.command.reply is DEFERRED_VALUE
            if call.woken:
                size = 8 + int.from_bytes(heard[:8], "little") if later else 1
                if not later and heard[0] != STOP_WAITING:
                    raise Difference(f"{call.command.name} was not woken: {bytes(heard)!r}")
                del heard[:size]
            expected = ABSENT if later else bytes([WAIT_CANCELED])
        else:
            expected = _answered(call)
        if heard[: len(expected)] != expected:
            raise Difference(f"{call.command.name}: {expected!r} was understood, {bytes(heard)!r} was sent")
        del heard[: len(expected)]

    def give(self, blob: Framed, leased: bool = False) -> None:
        """Note that a caller received an item."""
        item, link = unpack(blob), self.acting.link
        assert link is not None
        if item in self.received and not (leased and (self._is_lost(self.received[item]) or self._is_lost(link))):
            raise Difference(f"item {item!r} was given to two callers")
        if item not in self.pushed:
            raise Difference(f"item {item!r} was never pushed")
        self.received[item] = link

    def saw(self, name: bytes, found: Round) -> None:
        """Note that an agent received its rank."""
        others = self.rounds.setdefault(found.number, {})
        if others.setdefault(name, found) != found:
            raise Difference(f"{name!r} was told {others[name]}, then {found}")
        known = others.values()
        if len({one.rank for one in known}) < len(others) or len({one.world for one in known}) > 1:
            raise Difference(f"agents do not agree: {others}")
        if not AGENTS.least <= found.world <= AGENTS.most or not 0 <= found.rank < found.world:
            raise Difference(f"there is no such rank: {found}")

    def _is_lost(self, link: Link) -> bool:
        return not link.open or self.connections[link.slot] is not link

    # The end

    def rest(self) -> None:
        """Deliver everything; a caller that still waits must have a reason."""
        moving = True
        while moving:
            moving = False
            for client in self.clients:
                link = client.link
                while (link := client.link) is not None and (
                    link.wire or link.down or link.dozing or self.connections[link.slot] is not link
                ):
                    moving = True
                    if link.dozing:
                        self._do_read(client.number)
                    if self.connections[link.slot] is not link:
                        link.wire.clear()
                        self._bring(client, link, len(link.down))
                    else:
                        self._do_go(client.number)
        for client in self.clients:
            if client.link is None:
                continue
            asleep = [call for call in client.session.pending if call is not client.session.waiting]
            if asleep or (client.session.waiting is not None and not client.link.peer.waits):
                raise Difference(f"client {client.number} sleeps and should be awake")
            if client.session.waiting is None and client.held:
                raise Difference(f"client {client.number} holds back what could be sent")

    def finish(self) -> None:
        self.rest()
        queued = [item for items in self.model.queues.values() for item in items]
        queued += [item for peer in self.model.peers for _, item in peer.leased.values()]
        for item in queued:
            if item in self.received and not (self.pushed[item] in LEASED and self._is_lost(self.received[item])):
                raise Difference(f"item {item!r} was given to a caller and is there as well")
        for item, key in self.pushed.items():
            if key in LEASED and item not in self.received and item not in queued:
                raise Difference(f"item {item!r} is lost")
        if int(self.model.store.get(RANKS, b"0")) != len(self.tokens):
            raise Difference(f"{len(self.tokens)} ranks have joined, {self.model.store[RANKS]!r} are counted")
        for client in self.clients:
            self._lose(client)
        super().finish()


def _answered(call: PendingCall) -> bytes:
    """Return the bytes of a reply with this result."""
    command = call.command
    encode = command.reply.encode
    said = call.result if encode is None else encode(call.result)
    return b"".join(said) if isinstance(said, list) else bytes(said or b"")


SILENT: Final = {
    method
    for method, command in BY_METHOD.items()
    if command.reply is NO_REPLY and command.flags & MUTATES and not command.flags & HOLDS
}
GIVE_BACK: Final = BY_METHOD["give_back"]
LEASED: Final = (b"/l",)
"""Queues whose pops are all leases."""
RANKS: Final = b"/init"
JOB: Final = b"/job"
AGENTS: Final = Options(2, 3, join=6.0, last_call=1.0, keep_alive_interval=2.0, keep_alive_max_attempt=2)


# What callers do: the same sequences of commands as the clients


def _one(method: str) -> Callable[..., Program]:
    def program(world: World, *fields: Any) -> Program:
        yield (method, *fields)

    return program


def _get(world: World, key: bytes) -> Program:
    there = yield "check", [key]
    if there:
        yield "get", key
    else:
        yield "fetch", key


def _multi_get(world: World, keys: list[bytes]) -> Program:
    yield "wait", keys
    yield "multi_get", keys


def _push(world: World, key: bytes) -> Program:
    world.serial += 1
    yield "queue_push", key, b"item%d" % world.serial


def _pop(world: World, key: bytes) -> Program:
    _, item = yield "queue_pop", key
    if item is not None:
        world.give(item)


def _pop_when_there(world: World, key: bytes) -> Program:
    item = None
    while item is None:
        yield "wait", [key]
        _, item = yield "queue_pop", key
        if item is None and (yield "queue_len", key) == 0 and (yield "check", [key]):
            return  # a plain value of that name
    world.give(item)


def _lease(method: str) -> Callable[..., Program]:
    def program(world: World, key: bytes) -> Program:
        world.serial += 1
        ticket = world.serial
        _, item = yield method, key, ticket
        if item is not None:
            world.give(item, leased=True)
            yield "confirm", ticket

    return program


def _join(world: World) -> Program:
    yield "join", RANKS, b"rank %d" % world.acting.number


def _agent(world: World) -> Program:
    """Join a round, as `stores.agent.Agent.join` does."""
    client = world.acting
    name = b"agent %d" % client.number
    client.pulse.due = max(client.pulse.due, world.now + AGENTS.period())
    steps = joining(JOB, name, AGENTS, client.left, client.pulse, lambda: world.now)
    reply = None
    try:
        while True:
            (command, (key, framed, *numbers)), client.patience = steps.send(reply)
            reply = yield command.method, key, unpack(framed), *numbers
    except StopIteration as end:
        client.left = end.value.number
        world.saw(name, end.value)
    except (RoundsClosed, StoreTimeoutError):
        pass


def _attend(action: int, number: int) -> Callable[..., Program]:
    def program(world: World) -> Program:
        yield "attend", JOB, b"agent %d" % world.acting.number, action, number

    return program


PROGRAMS: dict[str, Callable[..., Program]] = {
    **{method: _one(method) for method in BY_METHOD if method not in ("validate", "cancel_wait", "cancel_fetch")},
    "get_when_there": _get,
    "multi_get_when_there": _multi_get,
    "push": _push,
    "pop": _pop,
    "pop_when_there": _pop_when_there,
    "lease": _lease("lease"),
    "lease_later": _lease("lease_later"),
    "join": _join,
    "agent": _agent,
    "beat": _attend(BEAT, AGENTS.missing()),
    "describe": _attend(LOOK, DESCRIBE),
    "give_up": _attend(LEAVE, 0),
    "close": _attend(CLOSE, 0),
    "end": _attend(CLOSE, SUCCEEDED),
}
