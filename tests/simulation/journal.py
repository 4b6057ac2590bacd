"""A server whose process may end at any time, its journal, and clients that resume their sessions.

The server is the real one (`UvServer` with its `Persistence`), on a loop without a selector and a clock that this
module sets; so are both ends of links, records, and what reads them. The disk is in memory: what an interrupted write
leaves behind the last durable record is chosen. Peers are pairs of connected sockets.

The model executes what the records say once they are durable, and nothing else:

* each session has executed a prefix of what its client has sent, each byte once;
* what a client has received is a prefix of what the model has sent it: no reply leaves before its record is durable;
* what a reader without a link is told was true, at some durable event since it asked;
* behind each record the state is the same again when it is executed again, also up to any record only;
* in the end every client has received everything, and the server has what the model has.

A step is a plain tuple (see `World.do`) that means nothing where it does not apply, so any part of a schedule is one.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import Any, Final, NamedTuple

from properties.fleet import Command, Difference
from properties.model import Model
from replaying import digest
from simulation.disk import INSTANCE, Crash, Disk, Memory
from simulation.executed import Executed
from simulation.loop import Errors, Loop, call, machine
from simulation.resuming import RANKS, Client, Observer, Rank, Relay, Single, Wire
from tcpstore_async.auth.access import Access
from tcpstore_async.base.clock import Recorder
from tcpstore_async.base.limits import LINK_GRACE, Limits
from tcpstore_async.links.link_server import ServerLink
from tcpstore_async.log.events import EventRecorder
from tcpstore_async.log.journal import Instance
from tcpstore_async.log.records import Reader, Record, Snapshot
from tcpstore_async.log.replay import Replayer
from tcpstore_async.log.snapshot import NotNowError, dump, load
from tcpstore_async.server.persistence import execute
from tcpstore_async.server.poller import READ, WRITE, LoopPoller
from tcpstore_async.server.snapshots import engine_of
from tcpstore_async.server.uv import UvServer
from tcpstore_async.wire.values import framed, unpack

Step = tuple[Any, ...]

PAUSE: Final = 4.0
"""Seconds after which links have shown again that they are alive."""

SETTINGS: Final = {field.name: str(getattr(Limits(), field.name)) for field in fields(Limits)} | {
    "link-grace": str(LINK_GRACE),
    "require-auth": "",
}


class World:
    """Clients, and what decides what they are to see. Raises Difference."""

    server: UvServer
    """To which clients connect, or which writes a record."""
    loop: Loop

    def __init__(self, singles: int, named: int, relays: int, portion: int, tokens: bool, every: int) -> None:
        """`every` is how many records there are between two looks at the state."""
        self.every = every
        self.now = 1000.0
        self.errors = Errors()
        self.serial = 0
        self.question = 0
        """The number of the last question to relays."""
        self.wires: dict[int, Wire] = {}
        """Keyed by serial number."""
        self.gone: list[Wire] = []
        """Those whose clients have lost them, and of which the server may not know that."""
        self.crashes = 0
        self.digests: dict[int, int | None] = {}
        """Of the state behind records, keyed by their number."""
        self.portion = portion
        """Frames of links handled, and items offered, at once."""
        self.tokens = tokens
        """Whether clients have tokens."""
        self.executed = Executed(self)
        self.clients: list[Client] = [Single(self, number, number < named) for number in range(singles)]
        self.clients += [Relay(self, singles + number) for number in range(relays)]
        self.clients.append(Observer(self, len(self.clients)))
        self.ranks = singles + relays * RANKS
        self.singles = singles

    def make(self, instance: str) -> UvServer:
        """Make a server on the running loop."""
        server = UvServer(socket.socket(), Limits(), LoopPoller, instance=instance)
        server.links.portion = self.portion
        if self.tokens:
            server.store.hub.auth.authenticate = lambda token: Access("one")
        server.max_connections = 1000
        return server

    def release(self, server: UvServer) -> None:
        """Close the descriptors of a server that has ended at once."""
        server.listener.close()
        server.close_inherited()
        for fd in server.closing:
            os.close(fd)
        for fd, *_ in server._arrived:
            os.close(fd)

    def _forget_gone(self) -> None:
        for wire in self.gone:
            wire.socket.close()
        self.gone.clear()

    def close(self) -> None:
        """Close all descriptors."""
        for client in self.clients:
            if client.wire is not None:
                client.wire.socket.close()
        self._forget_gone()

    # The records

    def look(self, number: int) -> int | None:
        """Return a digest of the state behind a record that is written now, if it is time for one."""
        recorder = self.server.clock.recorder
        if not number or number % self.every:  # the first tick, record 1, sets links' time
            return None
        assert isinstance(recorder, EventRecorder)
        sessions = {number: session for session, number in recorder.numbers.items()}
        return digest(recorder.engine, sessions)

    def compare(self, number: int, recorder: Recorder | None) -> None:
        """Compare the state behind a record with what it was, when a server has executed it again."""
        assert isinstance(recorder, Replayer)
        known = self.digests.get(number)
        if known is not None and known != digest(recorder.engine, recorder.sessions):
            raise Difference(f"the state behind record {number} is not the same again")

    # Turns

    def serve(self, wires: list[Wire]) -> None:
        """Have the server read what has arrived, all in one turn; then call what it has scheduled."""

        def ready() -> None:
            events = [(wire.fd, READ) for wire in wires if wire.is_open()]
            writers = [(fd, WRITE) for fd in self.loop.writers]
            self.server.ready([one for one in events if one[0] in self.loop.readers] + writers)
            self.loop.run_once()

        self._guarded(ready)

    def flush(self, wire: Wire) -> None:
        self._send(wire, len(wire.up))

    def _send(self, wire: Wire, count: int) -> None:
        if wire.up and wire.is_open():
            with suppress(BlockingIOError, ConnectionError):
                count = wire.socket.send(wire.up[:count])
                del wire.up[:count]

    def _guarded(self, do: Callable[[], object]) -> None:
        """Have the server do something; then clients receive."""
        do()
        if self.errors.found:
            raise Difference(f"the server logs {self.errors.found}")
        self.deliver()

    def deliver(self) -> None:
        """Let clients receive what has left."""
        for client in self.clients:
            if not client.dozing:
                client.deliver()

    # Steps

    def do(self, step: Step) -> None:
        """Do one of these:

        * `("send", r, command)`: rank r sends a command, unless it waits; a rank of a relay is opened first
        * `("cancel", r)`: it sends the cancel of what it waits for
        * `("leave", r)`: its client closes it for good
        * `("close", c)`: client c closes its link for good, if it is a relay
        * `("ask", command)`: a client without a link sends a command, if it has the reply to the last one
        * `("turn", clients, n)`: n bytes of each of these clients arrive, all for -1, in one turn of the server
        * `("doze", c)`: c stops reading; `("read", c)`: it goes on
        * `("break", c)`: the connection is lost, and the server hears of that with the next `("notice",)`
        * `("connect", c)`: c connects, if it has no connection
        * `("time", s)`: so many seconds pass
        * `("examine",)`: relays are asked what their ranks do
        """
        getattr(self, "_do_" + step[0])(*step[1:])

    def _rank(self, number: int, opens: bool) -> tuple[Single | Relay, Rank] | None:
        client = self.clients[number if number < self.singles else self.singles + (number - self.singles) // RANKS]
        if isinstance(client, Single):
            return client, client.rank
        assert isinstance(client, Relay)
        at = (number - self.singles) % RANKS
        if opens:
            return client, client.rank_of(at)
        one = client.ranks[at]
        return None if one is None or one.rank.closed else (client, one.rank)

    def _do_send(self, number: int, command: Command) -> None:
        found = self._rank(number, True)
        assert found is not None
        client, rank = found
        if rank.blocked is not None:
            if not rank.idle():
                return
            rank.blocked = None
        name, fields = command.name, command.fields
        if not client.may_send(rank, command):
            return
        if name in ("lease", "lease_later"):
            if fields[1] in rank.tickets:
                return
            rank.tickets.add(fields[1])
        elif name in ("confirm", "give_back"):
            rank.tickets.discard(fields[0])
        if name in CANCELS:
            rank.blocked = command
        client.send(rank, command)

    def _do_cancel(self, number: int) -> None:
        found = self._rank(number, False)
        if found is not None:
            client, rank = found
            command = rank.blocked
            if command is not None and CANCELS[command.name] and rank.sent[-1] is command and not rank.idle():
                cancel = CANCELS[command.name]
                ticket = command.fields[1:] if cancel == "give_back" else ()
                rank.tickets.difference_update(ticket)
                client.send(rank, Command(cancel, *ticket))

    def _do_leave(self, number: int) -> None:
        found = self._rank(number, False)
        if found is not None:
            found[0].leave(found[1])

    def _do_close(self, number: int) -> None:
        client = self.clients[number]
        if isinstance(client, Relay):
            client.end()

    def _do_ask(self, command: Command) -> None:
        observer = self.clients[-1]
        assert isinstance(observer, Observer)
        observer.ask(command)

    def _do_turn(self, numbers: tuple[int, ...], count: int) -> None:
        wires = []
        for number in numbers:
            client = self.clients[number]
            client.collect()
            wire = client.wire
            if wire is not None:
                if wire.up:
                    wires.append(wire)
                self._send(wire, len(wire.up) if count < 0 else count)
        self.serve(wires)

    def _do_examine(self) -> None:
        def examine() -> None:
            self._examine(self.server)
            self.loop.run_once()

        self._guarded(examine)

    def _examine(self, server: UvServer) -> None:
        """Ask relays what their ranks do, as `examining.Question` does."""
        self.question += 1
        number = self.question

        def ask() -> None:
            with server.turn:
                for link in server.links.links.values():
                    if link.examines and link.connection is not None:
                        link.examine(number, 1500)

        server.links.on_examined = self._examined
        server.call_soon(ask)

    def _examined(self, link: ServerLink, number: int, report: bytes) -> None:
        client = self.clients[int(report)]
        assert isinstance(client, Relay)
        if link.place != client.link.place.encode() or not 0 < number <= client.asked <= self.question:
            raise Difference(f"{client} has not answered question {number}")

    def _do_doze(self, number: int) -> None:
        self.clients[number].dozing = True

    def _do_read(self, number: int) -> None:
        self.clients[number].dozing = False
        self.clients[number].deliver()

    def _do_break(self, number: int) -> None:
        client = self.clients[number]
        if client.wire is not None:
            if not client.dozing:
                client.deliver()
            client.lose()

    def _do_notice(self) -> None:
        def notice() -> None:
            gone, self.gone = self.gone, []
            try:
                for wire in gone:
                    if wire.connection is not None and wire.is_open():
                        with self.server.turn:
                            wire.connection.lost(ConnectionResetError(errno.ECONNRESET, "reset"))
            finally:
                for wire in gone:
                    wire.socket.close()
            self.loop.run_once()

        self._guarded(notice)

    def _do_connect(self, number: int) -> None:
        client = self.clients[number]

        def connect() -> None:
            if client.wire is None:
                client.connect()
                self.server.served()

        self._guarded(connect)

    def _do_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            pause = min(end, self.now + PAUSE)
            self._guarded(partial(self._pass, pause))
            self.now = max(self.now, pause)
            for client in self.clients:
                if isinstance(client, Relay) and client.linked:
                    client.link.acknowledge()
                    self._do_turn((client.number,), -1)

    def _pass(self, until: float) -> None:
        loop = self.loop
        while loop is self.loop and (timer := loop.next_timer(until)) is not None:
            self.now = max(self.now, timer.when())
            call(timer)
            loop.run_once()

    # The end

    def settle(self) -> None:
        """Deliver everything."""
        before = None
        while before != (before := self._progress()):
            for _ in range(3):
                self._do_notice()
                for client in self.clients:
                    client.dozing = False
                    if client.wire is None:
                        self._do_connect(client.number)
                    self._do_turn((client.number,), -1)
            self.calm()

    def calm(self) -> None:
        """Let servers do what they can do now."""
        while self.loop.soon:
            self.serve([])

    def again(self) -> None:
        """Have another server go on."""
        raise NotImplementedError

    def _progress(self) -> tuple[int, ...]:
        return self.serial, self.executed.commands, *(rank.received + rank.at for rank in self._ranks())

    def _ranks(self) -> list[Rank]:
        found = [client.rank for client in self.clients if isinstance(client, Single)]
        relays = [client for client in self.clients if isinstance(client, Relay)]
        return found + [one.rank for relay in relays for one in relay.ranks if one is not None and not one.rank.closed]

    def finish(self) -> None:
        self.settle()
        for rank in self._ranks():
            if rank.at < len(rank.stream) and rank.peer is not None and not rank.failed:
                raise Difference(f"{rank.holder}: {rank.at} of {len(rank.stream)} bytes were executed")
            if rank.received < len(rank.expected):
                raise Difference(f"{rank.holder} has not received {bytes(rank.expected[rank.received :])!r}")
        self.check()
        self.again()
        self.check()

    def check(self) -> None:
        """Compare what the server has with what the model has."""
        server, models = self.server, self.executed.models
        stores = {"": server.store, **{store.incarnation: store for store in server.named.stores.values()}}
        for incarnation, store in stores.items():
            keyspace, model = store.keyspace, models.get(incarnation, Model())
            _same("values", {key: unpack(framed(value)) for key, value in keyspace.values.items()}, model.store)
            queues = {key: [unpack(item) for item in items] for key, items in keyspace.queues.items()}
            _same("queues", queues, model.queues)
        sessions = server.links.sessions + len(server.links.singles)
        _same("sessions", sessions, sum(len(model.peers) for model in models.values()))


def _same(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise Difference(f"{what}: {found!r}, expected {expected!r}")


class Restarting(World):
    """A server that ends and is started again."""

    def __init__(
        self, singles: int, named: int, relays: int, portion: int, tokens: bool, disk: Disk, every: int
    ) -> None:
        super().__init__(singles, named, relays, portion, tokens, every)
        self.disk = disk
        self.running = False
        """Whether there is a server whose descriptors are open."""
        self.armed: deque[tuple[int, str, float]] = deque()
        """Troubles: after how many records each comes, and of which kind."""
        self.past = False
        """Whether servers start from earlier records."""

    def start(self) -> None:
        """Start servers until one does not end at once."""
        while True:
            try:
                self._begin(self.disk)
                self.loop.run_once()
            except (Crash, OSError):
                self._kill()
                continue
            break
        if self.server.links.instance != INSTANCE or self.errors.found:
            raise Difference(f"replay: {self.errors.found}")

    def _begin(self, disk: Disk) -> None:
        self.loop = Loop(self)  # type: ignore[abstract]
        asyncio._set_running_loop(self.loop)
        try:
            self.server = self.make(INSTANCE)
        finally:
            asyncio._set_running_loop(None)
        self.running = True
        self.lost = False
        self.server.on_end = self._on_end
        self.server.persist(Memory(self, disk))

    def _on_end(self, error: OSError | None) -> None:
        self.lost = True

    def _kill(self) -> None:
        """End the server's process."""
        self._release()
        for client in self.clients:
            if client.wire is not None:
                if not client.dozing:  # else what it has not read is lost
                    client.deliver()
                if client.wire is not None:
                    client.lose()
        self._forget_gone()

    def _crash(self) -> None:
        self.crashes += 1
        self._kill()
        self.start()

    def _release(self) -> None:
        """Close the descriptors of the server."""
        if self.running:
            self.running = False
            self.release(self.server)

    def close(self) -> None:
        self._release()
        super().close()

    def trouble(self) -> tuple[str, float] | None:
        """Return what happens to the record that is written now."""
        if self.armed:
            count, how, part = self.armed.popleft()
            if count == 0:
                return how, part
            self.armed.appendleft((count - 1, how, part))
        return None

    def is_durable(self, record: Record) -> None:
        """Execute a record, unless it was executed when it was written."""
        if not self.past and record.number >= self.executed.records:
            self.executed.execute(record)

    def _do_snapshot(self, part: float) -> None:
        """As `snapshots.make_snapshot`, which reads files."""
        before = self.disk.snapshot
        first = 0 if before is None else before.number
        upto = first + int(part * (self.executed.records - first))
        engine = engine_of(Instance(INSTANCE, self.disk.sync, "", {**SETTINGS, "tokens": str(self.tokens)}))
        replayer = Replayer(engine, lambda session, pieces: None)
        assert engine.links is not None
        assert engine.links.outputs is not None
        engine.links.portion = self.portion
        if before is not None:
            engine.root.hub.clock.now = before.now
            load(before.state, replayer)
        for record in self.disk.records(Reader(), upto):
            if not execute(replayer, record, engine.links.outputs):
                raise Difference(f"record {record.number} has another effect: {self.errors.found}")
        with suppress(NotNowError):
            self.disk.snapshot = Snapshot(0, upto, 0, engine.root.hub.clock.now, dump(replayer))

    def _guarded(self, do: Callable[[], object]) -> None:
        def crashes() -> None:
            try:
                do()
            except Crash:
                self._crash()
            else:
                if self.lost:
                    self._crash()

        super()._guarded(crashes)

    def do(self, step: Step) -> None:
        """Do one of these, too:

        * `("crash", n, how, part)`: n records from now, the server's process ends while it writes one: `none`, a `torn`
          part, all or all but `damaged` bytes of it get to the disk; or it learns of an `error`. Several may follow
        * `("kill", s)`: the server's process ends now, and is started again so many seconds later
        * `("snapshot", part)`: another process makes a snapshot behind a part of the records that have none
        * `("stop",)`: it is told to end, for another one to go on
        """
        super().do(step)

    def _do_crash(self, count: int, how: str, part: float) -> None:
        if len(self.armed) < 2:
            self.armed.append((count, how, part))

    def _do_kill(self, seconds: float) -> None:
        self._kill()
        self.now += seconds
        self.crashes += 1
        self.start()

    def _do_stop(self) -> None:
        self._guarded(lambda: self.server.stop(for_good=False))
        if self.server.stopped:
            self._crash()

    def settle(self) -> None:
        self.armed.clear()
        super().settle()

    def again(self) -> None:
        self._do_kill(0.0)

    def look_back(self, cuts: list[tuple[float, int]]) -> None:
        """Start from earlier records, with some bytes of the next one: the state behind each is what it was."""
        records = len(self.disk.ends)
        self.past = True
        for part, more in cuts:
            disk = self.disk.upto(1 + int(part * (records - 1)), more)
            self._release()
            self._begin(disk)
            if self.server.links.instance != INSTANCE or self.errors.found:
                raise Difference(f"replay of {len(disk.ends)} records: {self.errors.found}")


# Schedules

CANCELS: Final = {
    "wait": "cancel_wait", "barrier": "cancel_wait", "wait_count": "cancel_wait", "fetch": "cancel_fetch",
    "lease_later": "give_back", "unknown": "",
}  # fmt: skip
"""Commands behind which nothing else may be sent, and the cancel of each."""

COMMANDS: Final = {
    "add": 10, "set": 6, "get": 4, "append": 3, "compare_set": 2, "check": 2, "wait": 10, "wait_count": 3, "fetch": 4,
    "delete_key": 4, "queue_push": 16, "queue_pop": 6, "queue_len": 1, "lease": 4, "lease_later": 10, "confirm": 6,
    "give_back": 3, "barrier": 4, "join": 2, "depart": 1, "multi_set": 2, "multi_get": 2, "list_keys": 1, "ping": 1,
    "unknown": 0.3,
}  # fmt: skip

CLIENTS: Final = {
    "send": 60, "cancel": 8, "leave": 1, "close": 0.4, "ask": 8, "turn": 40, "doze": 1, "read": 3, "break": 4,
    "notice": 3, "connect": 20, "time": 3, "examine": 4,
}  # fmt: skip
"""Steps of clients, and of time."""

STEPS: Final = {**CLIENTS, "crash": 3, "kill": 2, "stop": 0.5, "snapshot": 2}

KEYS: Final = (b"/a", b"/b")
QUEUES: Final = (b"/q", b"/r")
COUNTER: Final = b"/n"
LARGE: Final = b"z" * 40_000
"""A value that is received straight into its place."""
TROUBLES: Final = ("none", "torn", "torn", "damaged", "whole", "error")


class Schedule(NamedTuple):
    """A world and its steps."""

    singles: int
    named: int
    """How many of these are in a store with a name."""
    relays: int
    portion: int
    tokens: bool
    sync: bool
    segment_bytes: int
    steps: list[Step]


def _command(rng: random.Random, name: str) -> Command:
    key, queue = rng.choice(KEYS), rng.choice(QUEUES)
    value = LARGE if rng.random() < 0.02 else rng.choice((b"", b"1", b"x" * 9, b"y" * 700))
    match name:
        case "add":
            return Command(name, COUNTER, rng.choice((1, 1, 2, 5)))
        case "set" | "append":
            return Command(name, key, value)
        case "compare_set":
            return Command(name, key, rng.choice((b"", b"1")), value)
        case "get" | "fetch":
            return Command(name, key)
        case "delete_key":
            return Command(name, rng.choice((*KEYS, COUNTER)))
        case "check" | "multi_get":
            return Command(name, list(rng.sample((*KEYS, COUNTER), rng.randrange(1, 3))))
        case "wait":
            return Command(name, rng.choice(([key], [*KEYS], [queue], [queue, key], [*QUEUES])))
        case "wait_count":
            return Command(name, COUNTER, rng.randrange(1, 60))
        case "queue_push":
            return Command(name, queue, b"%d" % rng.randrange(1000))
        case "queue_pop" | "queue_len":
            return Command(name, queue)
        case "lease" | "lease_later":
            return Command(name, queue, rng.randrange(6))
        case "confirm" | "give_back":
            return Command(name, rng.randrange(6))
        case "barrier":
            return Command(name, b"/barrier", rng.choice((2, 3)))
        case "join":
            return Command(name, b"/init", rng.choice((b"one", b"two", b"three")))
        case "multi_set":
            return Command(name, [(KEYS[0], value), (KEYS[1], b"2")])
        case "ping":
            return Command(name, rng.randrange(2**32))
    return Command(name)


class Chooser:
    """Chooses clients, and what these do."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.singles, self.relays = rng.choice(((1, 0), (2, 0), (3, 0), (4, 0), (0, 1), (0, 2), (1, 1), (2, 1), (2, 2)))
        self.clients = self.singles + self.relays + 1
        self._commands = [weight * rng.choice((0.1, 1, 1, 3)) for weight in COMMANDS.values()]
        if rng.random() < 0.4:
            queues = {"wait": 20, "queue_push": 30, "queue_pop": 10, "lease_later": 20, "confirm": 6, "give_back": 3}
            self._commands = [queues.get(name, 0.5) for name in COMMANDS]

    def kinds(self, weights: dict[str, float]) -> list[str]:
        """Return the kinds of the steps."""
        rng = self.rng
        some = {kind: weight * rng.choice((0, 1, 1, 3)) for kind, weight in weights.items()}
        some.update(send=60, turn=40, connect=rng.choice((10, 20)))
        self._bytes = rng.choice((8, 60, 1000))
        return rng.choices(list(some), list(some.values()), k=rng.choice((40, 80, 160, 240)))

    def step(self, kind: str) -> Step:
        """Return a step of a client."""
        rng, ranks = self.rng, self.singles + self.relays * RANKS
        match kind:
            case "send":
                name = rng.choices(list(COMMANDS), self._commands)[0]
                return kind, rng.randrange(ranks), _command(rng, name)
            case "cancel" | "leave":
                return kind, rng.randrange(ranks)
            case "ask":
                name = rng.choice(("get", "get", "check", "queue_len", "multi_get", "add"))
                return kind, _command(rng, name)
            case "turn":
                several = tuple(rng.sample(range(self.clients), rng.randrange(1, self.clients + 1)))
                return kind, several, -1 if rng.random() < 0.7 else rng.randrange(1, self._bytes)
            case "notice" | "examine":
                return (kind,)
            case "time":
                return kind, rng.choice((0.5, 2.0, 6.0, 20.0, 40.0))
        return kind, rng.randrange(self.clients)

    def named(self) -> int:
        """Return how many clients are in a store with a name."""
        return self.rng.randrange(1, self.singles + 1) if self.singles > 1 and self.rng.random() < 0.3 else 0


PORTIONS: Final = (1, 2, 5, 1000, 1000)


def chosen(seed: int) -> Schedule:
    """Return the schedule of a seed."""
    rng = random.Random(seed)
    chooser = Chooser(rng)
    steps: list[Step] = [("connect", number) for number in range(chooser.clients)]
    for kind in chooser.kinds(STEPS):
        match kind:
            case "crash":
                for count in (rng.randrange(4), *([0] if rng.random() < 0.3 else [])):
                    steps.append((kind, count, rng.choice(TROUBLES), rng.random()))
            case "snapshot":
                steps.append((kind, rng.choice((rng.random(), 1.0))))
            case "kill":
                steps.append((kind, rng.choice((0.0, 1.0, 40.0))))
            case "stop":
                steps.append((kind,))
            case _:
                steps.append(chooser.step(kind))
    named, portion = chooser.named(), rng.choice(PORTIONS)
    tokens, sync, segment_bytes = rng.random() < 0.3, rng.random() < 0.5, rng.choice((200, 1000, 100_000))
    return Schedule(chooser.singles, named, chooser.relays, portion, tokens, sync, segment_bytes, steps)


def run(schedule: Schedule, every: int = 8, cuts: int = 2) -> Restarting:
    """Run a schedule, look at the state behind every few records, and start from so many earlier ones at the end."""
    singles, named, relays, portion, tokens, sync, segment_bytes, steps = schedule
    world = Restarting(singles, named, relays, portion, tokens, Disk(sync, segment_bytes), every)
    with machine(world):
        world.start()
        for step in steps:
            world.do(step)
        world.finish()
        rng = random.Random(len(steps))
        world.look_back([(rng.random(), rng.choice((0, rng.randrange(40)))) for _ in range(cuts)])
    return world


def fault(schedule: Schedule) -> Exception | None:
    """Return what is wrong, if anything, with a look at the state behind each record."""
    try:
        run(schedule, 1, 4)
    except Exception as error:  # the package's own, too
        return error
    return None
