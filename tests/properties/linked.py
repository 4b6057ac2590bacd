"""Sessions on links, in memory: the fleet's commands, frames cut anywhere, connections that break and are resumed.

The server's half is real: store, registry, carriers. So is the client's: `ClientLink`. What each frame contains is
decoded here once more, from `docs/links.md`; once the server has taken a frame, the model executes it. What a rank
receives must be what the model has sent it, byte by byte, whatever happens to the connections in between.

A step is a plain tuple, so a run can be recorded, replayed and shrunk:

* `("send", rank, commands, keep)` and `("drip", …)`: as in `fleet`. A rank that is not there is opened first.
* `("chorus", link, commands, 0)`: all ranks of a link send the same.
* `("leave", rank, (), 0)`: its connection is lost. `("end", rank, (), 0)`: it sends no more, but receives.
* `("doze", rank, (), 0)` and `("read", rank, (), 0)`: it stops to read; it reads.
* `("up", link, (), n)` and `("down", link, (), n)`: n bytes arrive, all for -1.
* `("part", link, (), n)`: n bytes arrive, and the server handles one portion of what has arrived; others may go first.
* `("break", link, (), 0)`: the connection is lost with what was on its way. `("resume", link, (), 0)`: a new one.
* `("expire", 0, (), 0)`: so much time passes that links without a connection end; the others stay alive.
* `("silence", 0, (), 0)`: nothing is heard of anybody for so long that the server closes all connections.
* `("replace", link, (), 0)`: the link's holder starts anew, in the same place.
* `("close", link, (), 0)`: it closes its link, and opens another.
* `("intrude", link, (), kind)`: somebody sends a LINK that must not change anything.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from replaying import record, replayed
from tcpstore_async.base.errors import PeerError
from tcpstore_async.base.limits import GIB, Limits
from tcpstore_async.links.frames import LinkReply
from tcpstore_async.links.link_client import ClientLink, Stream
from tcpstore_async.links.link_registry import LinkRegistry
from tcpstore_async.links.link_server import LINK_BYTES, ServerLink
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store
from tcpstore_async.session.transport import Transport
from tcpstore_async.wire.link import REPLY_CREDIT_BYTES, REQUEST_CREDIT_BYTES

from .fleet import HANDSHAKE, LARGE, NAMES, WEIGHTS, Command, Connection, Difference, Fleet, Step, random_command
from .model import Closed

INSTANCE = "the server"
RANKS = 4
"""Ranks of each link."""


def first_frame(data: bytes | bytearray) -> tuple[int, list[tuple[int, int, bytes]]]:
    """Decode the first frame: its length, and kind, session and payload of what it delivers; a SAME delivers DATA."""
    session, rest = struct.unpack_from("<II", data)
    size, kind = rest & 0xFFFFFF, rest >> 24
    payload = bytes(data[8 : 8 + size])
    if kind != 5:
        return 8 + size, [(kind, session, payload)]
    (count,) = struct.unpack_from("<I", payload)
    return 8 + size, [(0, one, payload[4 + 4 * count :]) for one in struct.unpack_from(f"<{count}I", payload, 4)]


class Carrier(Transport):
    """The server's end of a connection."""

    def __init__(self, store: Store, client: Client) -> None:
        super().__init__(store, "10.0.0.7", 4, 0.0)
        self.client = client
        self.open = True

    def flush(self) -> None:
        out = self.session.out
        data = b"".join(out)
        out.clear()
        self.session.unsent -= len(data)
        if self.client.carrier is self:
            self.client.down += data

    def close(self) -> None:
        if self.open:
            self.open = False
            self.session.leave()


class LinkedRank(Stream):
    """The client's end of a session."""

    def __init__(self, link: ClientLink) -> None:
        super().__init__()
        self.link = link
        self.connection: LinkedConnection | None = None
        self.got = bytearray()
        self.wire = bytearray()
        """Bytes of commands that are not sent yet."""
        self.due = 0
        """How many of these to send as soon as there is credit."""
        self.sent: list[Command] = []
        """All commands."""
        self.dozing = False
        self.owed = 0
        """Bytes received and not read."""
        self.leaving = False
        self.ended = False
        self.over = False

    def received(self, data: bytes) -> None:
        self.got += data
        connection = self.connection
        if connection is None or not connection.expected.startswith(self.got):
            raise Difference(f"a rank received {data[:100]!r} after {bytes(self.got[-100 - len(data) : -len(data)])!r}")
        if self.dozing:
            self.owed += len(data)
            if self.owed > REPLY_CREDIT_BYTES:
                raise Difference(f"a rank was sent {self.owed} bytes that it had given no credit for")
        else:
            self.link.consume(self, len(data))

    def credited(self) -> None:
        self.send_due()

    def send_due(self) -> None:
        count = min(self.due, self.credit)
        if count and self.link.has_room() and not self.over and not self.leaving:
            chunk = bytes(self.wire[:count])
            del self.wire[:count]
            self.due -= count
            self.link.send(self, chunk)

    def closed(self) -> None:
        self.over = True
        connection = self.connection
        if self.leaving or connection is None or connection.expected == self.got:
            return
        if not connection.failed or len(self.got) < REPLY_CREDIT_BYTES:  # there was no credit for the rest
            raise Difference(f"a rank received {self.got[-99:]!r} of {connection.expected[-99:]!r}")

    def read(self) -> None:
        self.dozing = False
        self.link.consume(self, self.owed)
        self.owed = 0


class LinkedConnection(Connection):
    """Both ends of a session on a link."""

    def __init__(self, session: ServerSession, fleet: LinkedFleet, rank: LinkedRank) -> None:
        super().__init__(session, fleet.model)
        self.rank = rank
        self.expected = bytearray()
        """What the model has sent so far."""
        self.at = 0
        """How many commands have fully arrived."""
        self.partly = 0
        """Received bytes of the next one."""
        self.failed = False
        self.over = False
        """Whether it failed; it receives nothing after that."""
        rank.connection = self


class Client:
    """One holder of a link."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.begin()

    def begin(self) -> None:
        self.link = ClientLink(f"host:{self.number}")
        self.server: ServerLink | None = None
        self.carrier: Carrier | None = None
        self.up = b""
        self.down = b""
        self.frames = bytearray()
        """Frames that the model has not fully executed."""
        self.executed = 0
        """Bytes of those before."""
        self.partly = 0
        """How many deliveries of the next one it has executed."""
        self.ranks: list[LinkedRank | None] = [None] * RANKS
        self.opened: dict[int, LinkedRank] = {}
        """All past and present ranks, keyed by session number."""
        self.connections: dict[int, LinkedConnection] = {}
        """Connections with a session, keyed by session number."""

    def collect(self) -> None:
        """Send what is added."""
        link = self.link
        link.seal()
        new = link.sent - self.executed - len(self.frames)
        if new and link.kept is not None:
            self.frames += b"".join(link.kept.pieces)[-new:]
        self.up += b"".join(link.out)
        link.out.clear()


class LinkedFleet(Fleet):
    """Run steps on a store with links and on the model at once. Raises Difference."""

    def __init__(self, links: int, high_water: int = GIB, portion: int = 1000) -> None:
        super().__init__(0, high_water)
        self.registry = LinkRegistry(self.store, INSTANCE, 30.0, portion=portion)
        record(self.store, links=self.registry)
        self.clients = [Client(number) for number in range(links)]
        self.resumed = self.broken = 0
        self.has_large = False
        """Whether replies may be sent in pieces."""
        self.former: list[dict[int, LinkedConnection]] = []
        """Sessions of links whose clients have started over."""
        for client in self.clients:
            self._connect(client)

    # Steps

    def apply(self, step: Step) -> None:
        kind, number, commands, count = step
        if kind in ("send", "drip", "leave", "end", "doze", "read"):
            self._of_rank(kind, self.clients[number // RANKS], number % RANKS, commands, count)
        elif kind == "chorus":
            client = self.clients[number]
            for rank in client.ranks:
                if rank is not None and not rank.wire:
                    self._send(client, rank, commands, 0)
        else:
            getattr(self, "_do_" + kind)(self.clients[number], count)

    def _of_rank(self, kind: str, client: Client, number: int, commands: tuple[Command, ...], keep: int) -> None:
        rank = client.ranks[number]
        if rank is None or rank.over or rank.leaving:
            if kind not in ("send", "drip") or client.link.going_away:
                return
            rank = client.ranks[number] = LinkedRank(client.link)
            commands = (HANDSHAKE, *commands)
            client.link.open(rank, "127.0.0.1", number)
            client.opened[rank.number] = rank
        if kind == "leave":
            rank.leaving = True
            client.link.close(rank)
        elif kind == "end":
            # Behind a reply that does not fit, a session closes some frames later: the model cannot know when.
            if not rank.ended and not self.has_large and not rank.due:
                rank.ended = True
                client.link.end(rank)
        elif kind == "doze":
            rank.dozing = True
        elif kind == "read":
            rank.read()
        elif not rank.ended:
            self._send(client, rank, commands, keep, kind == "drip")

    def _send(
        self, client: Client, rank: LinkedRank, commands: tuple[Command, ...], keep: int, drip: bool = False
    ) -> None:
        size = len(rank.wire) + sum(command.size for command in commands)
        if rank.due or not client.link.has_room() or rank.ended:
            return
        for command in commands:
            rank.wire += command.frame
            rank.sent.append(command)
            self.has_large = self.has_large or command.size > 30_000
        count = max(0, size - keep)
        if drip and count < min(1000, rank.credit):
            for at in range(count):
                client.link.send(rank, bytes(rank.wire[at : at + 1]))
            del rank.wire[:count]
        else:
            rank.due = count
            rank.send_due()

    def _do_up(self, client: Client, count: int, part: bool = False) -> None:
        client.collect()
        carrier = client.carrier
        if carrier is None or not carrier.open:
            return
        count = len(client.up) if count < 0 else count
        chunk, client.up = client.up[:count], client.up[count:]
        if chunk or carrier.session.stalled():
            self._deliver(client, carrier, chunk, part)

    def _do_part(self, client: Client, count: int) -> None:
        self._do_up(client, count, True)

    def _do_down(self, client: Client, count: int) -> None:
        count = len(client.down) if count < 0 else count
        chunk, client.down = client.down[:count], client.down[count:]
        if chunk:
            client.link.receive(chunk)
        if client.carrier is not None and not client.carrier.open and not client.down:
            self._do_break(client, 0)

    def _do_break(self, client: Client, _: int) -> None:
        carrier, client.carrier = client.carrier, None
        client.up = client.down = b""
        client.link.disconnect()
        self.broken += carrier is not None
        if carrier is not None:
            self._set_away(client, True)
            carrier.close()
            self.quiesce()

    def _do_resume(self, client: Client, _: int) -> None:
        old = client.carrier
        if old is not None:
            self._set_away(client, True)
            client.carrier = None
            client.link.disconnect()
            client.up = client.down = b""
        self._connect(client)
        if old is not None and old.open:
            raise Difference("a connection whose link went on elsewhere is open")

    def _do_expire(self, _: Client, __: int) -> None:
        for _step in range(4):
            for client in self.clients:
                if client.carrier is not None:
                    client.link.acknowledge()
                    self._do_up(client, -1)
            self.registry.clock.now += 10
            self.registry.tick()
            self.quiesce()

    def _do_silence(self, _: Client, __: int) -> None:
        self.registry.clock.now += 16
        self.registry.tick()
        self.quiesce()

    def _do_replace(self, client: Client, _: int) -> None:
        self._set_away(client, True)
        self._abandon(client)
        self._connect(client)
        self._left()

    def _do_close(self, client: Client, _: int) -> None:
        if client.carrier is None or not client.carrier.open:
            return
        client.link.close_link()
        self._do_up(client, -1)
        if client.carrier.open:
            raise Difference("the connection of a link that was closed is open")
        self._abandon(client)
        self._connect(client)

    def _do_intrude(self, client: Client, kind: int) -> None:
        if client.server is None or client.server.over:
            return
        other = ClientLink(client.link.place if kind == 0 else "")
        other.instance = client.link.instance
        if kind != 1:
            other.identity = client.link.identity
        if kind == 2:
            other.instance = ""
        carrier = Carrier(self.store, client)
        reply = self._request(carrier, other.request())
        if reply.status not in ("unknown", "refused") or (kind != 1 and reply.reason != "wrong secret"):
            raise Difference(f"an intruder was answered {reply}")
        carrier.close()
        self.quiesce()

    # The connection

    def _request(self, carrier: Carrier, data: bytes) -> LinkReply:
        carrier.session.receive(data)
        out = b"".join(carrier.session.out)
        carrier.session.out.clear()
        carrier.session.unsent = 0
        (size,) = struct.unpack_from("<Q", out)
        reply = msgspec.json.decode(out[8 : 8 + size], type=LinkReply)
        if carrier.client.carrier is carrier:
            carrier.client.down += out[8 + size :]
        return reply

    def _connect(self, client: Client) -> None:
        client.carrier = carrier = Carrier(self.store, client)
        knew = client.link.instance
        reply = self._request(carrier, client.link.request())
        self.quiesce()
        if reply.status == "unknown":
            if client.server is not None and not client.server.over:
                raise Difference("a link that is there is not resumed")
            carrier.close()
            self._abandon(client)
            self._connect(client)
            return
        client.link.answered(msgspec.json.encode(reply))
        self.resumed += bool(knew)
        server = self.registry.links[client.link.identity]
        if knew and server is not client.server:
            raise Difference("another link was resumed")
        client.server = server
        client.collect()

    def _abandon(self, client: Client) -> None:
        """Drop the client's end and start over."""
        self.broken += 1
        self.former.append(client.connections)
        client.begin()

    def _set_away(self, client: Client, away: bool) -> None:
        for connection in client.connections.values():
            connection.peer.away = away

    # The server

    def _deliver(self, client: Client, carrier: Carrier, chunk: bytes, part: bool) -> None:
        session = carrier.session
        try:
            session.receive(chunk)
            self._follow(client)
            while session.stalled() and not part:
                carrier.flush()
                session.receive(b"")
                self._follow(client)
        except PeerError as error:
            raise Difference(f"a link was refused: {error!r}") from error
        if session.out:
            carrier.flush()
        self.quiesce()

    def _follow(self, client: Client) -> None:
        """Execute in the model what the server has handled."""
        link = client.server
        assert link is not None
        while client.executed < link.taken:
            size, deliveries = first_frame(client.frames)
            self._execute(client, deliveries[client.partly :])
            del client.frames[:size]
            client.executed += size
            client.partly = 0
        if link._same_done > client.partly:
            _, deliveries = first_frame(client.frames)
            self._execute(client, deliveries[client.partly : link._same_done])
            client.partly = link._same_done

    def quiesce(self) -> None:
        """Flush and work as a server does, until nothing is left to do."""
        pending_flush = self.store.hub.pending_flush
        more = True
        while more or pending_flush:
            while pending_flush:
                session = pending_flush.pop()
                transport = session.owner
                if not isinstance(transport, Transport):
                    continue
                failed = session in self.store.hub.evicted
                if session.out:
                    transport.flush()
                if failed:
                    transport.close()
                    self._left()
            more = self.registry.work()
            self._left()
            for client in self.clients:
                if client.server is not None and client.server.connection is not None:
                    peers = [connection.peer for connection in client.connections.values()]
                    for peer in peers:
                        peer.away = False
                    self.model.come_back(peers)
        self.store.hub.pending_flush.clear()
        self._drain()

    def _left(self) -> None:
        """Remove peers whose sessions have ended from the model."""
        for client in self.clients:
            if client.server is not None and client.server.connection is None:
                self._set_away(client, True)
        for connections in [*self.former, *(client.connections for client in self.clients)]:
            for number in list(connections):
                connection = connections[number]
                if connection.session.owner is None:
                    self._drain()
                    del connections[number]
                    self.connections.remove(connection)
                    self.model.leave(connection.peer)

    # The model

    def _execute(self, client: Client, frames: Sequence[tuple[int, int, bytes]]) -> None:
        for kind, number, payload in frames:
            if kind == 1:
                self._enter(client, number)
            connection = client.connections.get(number)
            if connection is None:
                continue
            if kind == 0:
                self._arrived(connection, len(payload))
            elif kind == 2 and (payload != b"\0" or connection.session.owner is None):
                self._drain()
                del client.connections[number]
                self.connections.remove(connection)
                self.model.leave(connection.peer)
        self._drain()

    def _enter(self, client: Client, number: int) -> None:
        assert client.server is not None
        linked = client.server.sessions.get(number)
        session = ServerSession(Store(Limits()), None, "", 0, 0.0) if linked is None else linked.session
        connection = LinkedConnection(session, self, client.opened[number])
        client.connections[number] = connection
        self.connections.append(connection)

    def _arrived(self, connection: LinkedConnection, count: int) -> None:
        model, peer = self.model, connection.peer
        connection.partly += count
        commands = connection.rank.sent
        while not connection.failed and connection.at < len(commands):
            command = commands[connection.at]
            if connection.partly < command.size:
                connection.failed = connection.partly > 0 and not model.knows(peer, command.name)
                break
            connection.partly -= command.size
            connection.at += 1
            self.done += 1
            try:
                model.do(peer, command.name, command.fields)
            except Closed:
                connection.failed = True
        if connection.failed and not connection.over:
            self._drain()
            connection.over = True

    def _drain(self) -> None:
        """Note what the model has sent."""
        for connection in self.connections:
            if isinstance(connection, LinkedConnection) and connection.peer.sent:
                if not connection.over:
                    connection.expected += b"".join(connection.peer.sent)
                connection.peer.sent.clear()
                connection.peer.unsent = 0
        self.model.woken.clear()

    # Invariants

    def check(self) -> None:
        for link in self.registry.links.values():
            if link.carrier.held != link.added_bytes or link.carrier.backlog is not link.kept:
                raise Difference(f"a link counts {link.carrier.held} bytes and holds {link.added_bytes}")
            for linked in link.sessions.values():
                if linked.waiting and linked.credit > 0 and not linked.in_turn:
                    raise Difference("a session that may send is not in the rotation")
                if linked.session.backlog is not None and not linked.waiting:
                    raise Difference("unsent bytes wait for nothing")
        for client in self.clients:
            server = client.server
            if (
                server is not None
                and not server.over
                and self.registry.links.get(server.carrier.identity) is not server
            ):
                raise Difference("a link is not known to the server")
        if self.registry.sessions != sum(len(link.sessions) for link in self.registry.links.values()):
            raise Difference(f"{self.registry.sessions} sessions on links are counted")
        super().check()

    def check_output(self, connection: Connection) -> None:
        session = connection.session
        if session.out or (session.backlog is None and session.unsent):
            raise Difference("there is output, and nobody knows")

    def carriers(self) -> list[ServerSession]:
        return [client.carrier.session for client in self.clients if client.carrier is not None and client.carrier.open]

    def counted_for_links(self) -> int:
        counted = 0
        for link in self.registry.links.values():
            counted += LINK_BYTES + link.added_bytes + (0 if link.kept is None else link.kept.cost)
        for connection in self.connections:
            if connection is not None and connection.session.backlog is not None:
                counted += connection.session.backlog.cost
        return counted + sum(pin.cost for pin in self.store.budget.pins.values())

    def settle(self) -> None:
        """Deliver everything, and check that each rank has received what the model has sent it."""
        for client in self.clients:
            for rank in client.ranks:
                if rank is not None and rank.dozing:
                    rank.read()
            if client.carrier is None:
                self._do_resume(client, 0)
        before = None
        while before != (before := self._received()):
            for _ in range(20):
                for client in self.clients:
                    for rank in client.ranks:
                        if rank is not None:
                            rank.send_due()
                    self._do_up(client, -1)
                    self._do_down(client, -1)
                    if client.carrier is None:
                        self._do_resume(client, 0)
        for client in self.clients:
            for number, connection in client.connections.items():
                if connection.rank.credit <= REQUEST_CREDIT_BYTES // 2 - 1 and not connection.rank.ended:
                    raise Difference(f"rank {number} may send only {connection.rank.credit} bytes")
                if connection.rank.got != connection.expected:
                    raise Difference(f"rank {number}: {connection.rank.got[-99:]!r} of {connection.expected[-99:]!r}")

    def _received(self) -> tuple[int, int]:
        """Return how many bytes the ranks have received, and have to send: large ones take many rounds of credit."""
        ranks = [rank for client in self.clients for rank in client.opened.values()]
        return sum(len(rank.got) for rank in ranks), sum(rank.due for rank in ranks)

    def finish(self) -> None:
        """Deliver everything, end all links and delete everything; nothing may be left."""
        self.settle()
        self.check()
        for client in self.clients:
            if client.carrier is not None:
                client.link.close_link()
                self._do_up(client, -1)
                client.carrier = None
        if self.connections or self.registry.links or self.registry.sessions or self.registry.places:
            raise Difference(f"{self.connections}, {self.registry.links} are left")
        self.check()
        if self.store.budget.others != self._check_key_lists():
            raise Difference(f"{self.store.budget.others} bytes are counted for nobody")
        left = self.store.hub.unvalidated or self.store.hub.unvalidated_on_links
        if self.store.hub.evicted or left or self.store.budget.holders:
            raise Difference("a session that has left is known")


STEPS = {
    "send": 40, "drip": 2, "chorus": 3, "leave": 1, "end": 1, "doze": 1, "read": 2, "up": 20, "down": 20,
    "part": 10, "break": 3, "resume": 5, "expire": 0.4, "silence": 0.2, "replace": 0.3, "close": 0.3,
    "intrude": 0.3,
}  # fmt: skip


class Schedule(NamedTuple):
    """A fleet of links and its steps."""

    links: int
    portion: int
    """Portion of the server's work."""
    steps: list[Step]


def chosen(seed: int) -> Schedule:
    """Return the schedule that a seed chooses."""
    rng = random.Random(seed)
    links = rng.choice([1, 1, 2, 3])
    names = rng.sample(NAMES, rng.choice([1, 2, 3]))
    weights = [weight * rng.choice([0, 0.1, 1, 3]) for weight in WEIGHTS.values()]
    if rng.random() < 0.5:  # mostly about queues, whose items must not be lost
        queues = {"wait": 30, "queue_push": 30, "queue_pop": 20, "lease_later": 20, "confirm": 5, "give_back": 3}
        weights = [queues.get(kind, 0.5) for kind in WEIGHTS]
    pool = [random_command(rng, names, kind) for kind in rng.choices(list(WEIGHTS), weights, k=120)]
    large = rng.random() < 0.1
    if large:  # much to send, in both directions
        pool[:30] = [Command("set", names[0], LARGE), Command("get", names[0]), Command("get", names[-1])] * 10
    troubles = [weight * rng.choice([0, 1, 1, 3]) for weight in STEPS.values()]
    troubles[0], troubles[7], troubles[8] = 40, 20, 20
    greedy = large and rng.random() < 0.5  # one rank requests much, until there is no credit
    if greedy:
        pool = pool[:30]
        troubles[5], troubles[6] = 5, 0.5
    bytes_ = rng.choice([8, 60, 1000])
    steps: list[Step] = []
    for kind in rng.choices(list(STEPS), troubles, k=rng.choice([60, 150, 400])):
        ranks = kind in ("send", "drip", "leave", "end", "doze", "read")
        number = 0 if greedy else rng.randrange(links * (RANKS if ranks else 1))
        commands: tuple[Command, ...] = ()
        if kind in ("send", "drip", "chorus"):
            commands = tuple(rng.choices(pool, k=rng.choice([1, 1, 1, 2, 4])))
            if rng.random() < 0.01:
                commands = (*commands, Command("unknown"))
        count = 0
        if kind in ("up", "down", "part"):
            count = -1 if rng.random() < 0.5 else rng.randrange(1, bytes_)
        elif kind == "send" and rng.random() < 0.2:
            count = rng.randrange(30)
        elif kind == "intrude":
            count = rng.randrange(3)
        steps.append((kind, number, commands, count))
    return Schedule(links, rng.choice([1, 2, 3, 1000]), steps)


def run(schedule: Schedule, every: int = 20) -> LinkedFleet:
    """Run a schedule, and check all invariants after every few steps. Raises what is wrong."""
    fleet = LinkedFleet(schedule.links, portion=schedule.portion)
    for at, step in enumerate(schedule.steps):
        fleet.apply(step)
        if at % every == every - 1:
            fleet.check()
    fleet.finish()
    return fleet


def fault(schedule: Schedule) -> Exception | None:
    """Return what is wrong, if anything, with a check after each step, and when it is executed again."""
    try:
        with replayed(1):
            run(schedule, 1)
    except Exception as error:  # the package's own, too
        return error
    return None
