"""Clients that resume their sessions: the real ends of links, on pairs of sockets.

Each session knows what was sent and received on it, and what the model has sent it. A client that is told that it
cannot resume begins anew.
"""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Final

from properties.fleet import HANDSHAKE, Command, Difference
from properties.model import Model, Peer
from support import blob
from tcpstore_async.client.store_name import StoreName
from tcpstore_async.links.frames import UNKNOWN
from tcpstore_async.links.link_client import ClientLink, Stream
from tcpstore_async.links.single_client import ClientSingleLink
from tcpstore_async.session.client import PendingCall
from tcpstore_async.session.identity import ENTERED, read_enter_reply
from tcpstore_async.wire.commands import BY_METHOD

if TYPE_CHECKING:
    from simulation.journal import World
    from tcpstore_async.server.uv import Connection

RANKS: Final = 3
"""Ranks of each relay."""

AUTH: Final = BY_METHOD["auth"].prefix + blob(b"token")


class Rank:
    """A session that survives its connection: what its client has sent and received, and what the model has."""

    def __init__(self, holder: Single | Relay) -> None:
        self.holder = holder
        self.stream = bytearray()
        """All bytes of commands."""
        self.sent: list[Command] = []
        self.received = 0
        """Bytes of replies."""
        self.tickets: set[int] = set()
        self.blocked: Command | None = None
        """The last command if that may wait: only its cancel may follow."""
        self.closed = False
        """Whether its client has left it, or knows that it has ended."""
        # In the model:
        self.model = holder.world.executed.model
        """Of the store that it is in."""
        self.peer: Peer | None = None
        self.at = 0
        """Bytes that were executed."""
        self.count = 0
        """Commands that were."""
        self.partly = 0
        """Bytes of the next one."""
        self.expected = bytearray()
        self.failed = False
        """Whether it has sent what closes it: nothing is executed from then on."""
        self.over = False
        """Whether it cannot be resumed."""
        self.attempt = 0
        """The serial number of the last connection that resumes it."""

    def add(self, command: Command) -> None:
        self.stream += command.frame
        self.sent.append(command)

    def receive(self, data: bytes) -> None:
        if self.expected[self.received : self.received + len(data)] != data:
            expected = bytes(self.expected[self.received :])
            raise Difference(f"{self.holder} received {data!r} at {self.received}, expected {expected!r}")
        self.received += len(data)

    def may_end(self) -> bool:
        """Return whether its client has given it a reason to end, or may be in a store that has ended."""
        return self.closed or bool(self.holder.enter) or (len(self.sent) > 0 and self.sent[-1].name == "unknown")

    def idle(self) -> bool:
        """Return whether everything was executed and answered."""
        waits = self.peer is not None and self.peer.waits
        return self.at == len(self.stream) and self.received == len(self.expected) and not waits


class Wire:
    """A connection: the client's end of it, and what both ends have read of LINK."""

    def __init__(self, world: World, client: Client) -> None:
        world.serial += 1
        self.serial = world.serial
        """Its port, by which the events name it."""
        self.client = client
        mine, theirs = socket.socketpair()
        mine.setblocking(False)
        self.socket = mine
        self.fd = theirs.detach()
        self.up = bytearray()
        """What is sent, and has not reached the server."""
        self.hello = b""
        """The first bytes, up to LINK."""
        self.links = False
        """Whether these end with LINK."""
        self.resumes = False
        self.rank: Rank | None = None
        self.entry: Entry | None = None
        self.asked: Command | None = None
        """What was asked last, if it is an observer's."""
        self.executed = b""
        """What is in records of that."""
        self.heard = 0
        """How many of the first bytes were executed."""
        self.ended = False
        """Whether the end of it was read, or one is on its way to the server."""
        self.buffer = bytearray()
        """What is received, and not looked at."""
        world.wires[self.serial] = self
        self.server = world.server
        self.accepted: Connection | None = None
        self.server.serve(self.fd, f"10.0.0.{client.number}", self.serial)

    @property
    def connection(self) -> Connection | None:
        """The server's end; None until the server has it."""
        connections = self.server.connections
        if self.accepted is None and self.fd < len(connections):
            found = connections[self.fd]
            if found is not None and found.session.port == self.serial:
                self.accepted = found
        return self.accepted

    def is_open(self) -> bool:
        """Return whether the server has not closed its end."""
        return self.connection is None or self.connection.fd >= 0

    def greet(self, hello: bytes, links: bool) -> None:
        self.hello += hello
        self.links = links
        self.up += hello

    def read(self) -> bytes | None:
        """Return what has arrived; None at the end."""
        data = b""
        while True:
            try:
                chunk = self.socket.recv(65536)
            except BlockingIOError:
                return data
            except ConnectionError:
                return data or None
            if not chunk:
                return data or None
            data += chunk


class Client:
    """Has one connection at a time."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.wire: Wire | None = None
        self.replies = 0
        """To AUTH, ENTER and LINK, which have not arrived."""
        self.enter = b""
        """Enters a store, if it is in one with a name."""
        self.later = b""
        """LINK, which follows when it has entered the store."""
        self.linked = False
        """Whether they have, and commands may be sent."""
        self.dozing = False

    def __str__(self) -> str:
        return f"client {self.number}"

    def connect(self) -> None:
        wire = self.wire = Wire(self.world, self)
        link, wire.resumes = self.hello()
        auth, enter = AUTH if self.world.tokens else b"", b"" if wire.resumes else self.enter
        self.replies = len([one for one in (auth, enter, link) if one])
        self.linked = not self.replies
        self.later = link if enter else b""
        wire.greet(HANDSHAKE.frame + auth + (enter or link), bool(link) and not enter)
        if isinstance(self, Single):
            wire.rank = self.rank
        elif isinstance(self, Relay):
            wire.entry = self.entry

    def hello(self) -> tuple[bytes, bool]:
        """Return LINK, if it sends one, and whether that resumes a link."""
        raise NotImplementedError

    def collect(self) -> None:
        """Give the connection what is to be sent."""

    def deliver(self) -> None:
        """Read what has arrived."""
        wire = self.wire
        if wire is None:
            return
        data = wire.read()
        if data is None:
            wire.ended = True
            self.lose()
            return
        wire.buffer += data
        while self.replies and len(wire.buffer) >= 8:
            size = 8 + int.from_bytes(wire.buffer[:8], "little")
            if len(wire.buffer) < size:
                break
            reply = bytes(wire.buffer[8:size])
            del wire.buffer[:size]
            self.replies -= 1
            if not self.replies:
                self.answered(reply)
            elif self.replies == 1 and self.later:
                if read_enter_reply(reply).status != ENTERED:
                    self.lose()
                    return
                wire.greet(self.later, True)
        if self.linked and wire.buffer and self.wire is wire:
            data = bytes(wire.buffer)
            wire.buffer.clear()
            self.receive(data)

    def answered(self, reply: bytes) -> None:
        raise NotImplementedError

    def receive(self, data: bytes) -> None:
        raise NotImplementedError

    def lose(self) -> None:
        """Note that the connection is gone."""
        wire, self.wire = self.wire, None
        self.linked = False
        if wire is not None:
            self.world.gone.append(wire)


class Single(Client):
    """Has a session of its own."""

    def __init__(self, world: World, number: int, named: bool) -> None:
        """If `named`, it is in a store with a name, which the first of the clients owns."""
        super().__init__(world, number)
        if named:
            command, fields = StoreName("job", "" if number else "the first").request()
            self.enter = command.prefix + command.request.encode(fields)
        self.begin()

    def begin(self) -> None:
        self.link = ClientSingleLink()
        self.rank = Rank(self)
        self.known = False
        """Whether the server has said that there is a session."""
        self.last: PendingCall | None = None
        self.world.executed.singles[self.link._identity] = self.rank

    def hello(self) -> tuple[bytes, bool]:
        command = BY_METHOD["link"]
        return command.prefix + command.request.encode(self.link.fields()), self.known

    def answered(self, reply: bytes) -> None:
        status = json.loads(reply)["status"]
        if self.known and status == UNKNOWN:
            if not self.rank.over:
                raise Difference(f"{self} is not resumed: {reply!r}")
            self.rank.closed = True
            self.lose()
            self.begin()
            return
        wire = self.wire
        assert wire is not None
        if self.known:
            self.link.received = self.rank.received
            wire.up += self.link.resume(reply)
        elif self.link.begun(reply):
            self.known = True
            wire.up += self.rank.stream
        else:
            raise Difference(f"{self} gets no link: {reply!r}")
        self.linked = True

    def receive(self, data: bytes) -> None:
        self.rank.receive(data)
        self.link.received = self.rank.received
        if self.last is not None and self.rank.idle():
            self.link.answered(self.last)
            self.last = None

    def may_send(self, rank: Rank, command: Command) -> bool:
        return True

    def send(self, rank: Rank, command: Command) -> None:
        taken = self.link.acknowledgement(40)
        for one in ([Taken(taken)] if taken else []) + [command]:
            rank.add(one)
            self.last = PendingCall(BY_METHOD["ping"], 0, 0, (0,))
            self.link.note(one.frame, self.last)
            if self.linked and self.wire is not None:
                self.wire.up += one.frame

    def leave(self, rank: Rank) -> None:
        """Close for good: the server reads everything first."""
        rank.closed = True
        wire = self.wire
        if wire is not None:
            self.world.flush(wire)
            wire.ended = True
            wire.socket.shutdown(socket.SHUT_WR)
            self.world.serve([wire])
            self.lose()
        self.begin()


class Taken(Command):
    """An acknowledgement."""

    def __init__(self, frame: bytes) -> None:
        self.name, self.fields = "taken", ()
        self.frame = frame
        self.size = len(frame)


class LinkedRank(Stream):
    """The client's end of a session on a link."""

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self.rank = Rank(relay)
        self.relay = relay

    def received(self, data: bytes) -> None:
        self.rank.receive(data)
        self.relay.link.consume(self, len(data))

    def credited(self) -> None:
        pass

    def closed(self) -> None:
        rank = self.rank
        rank.closed = True
        if not rank.failed or rank.received < len(rank.expected):
            raise Difference(f"{self.relay} has lost a session that had received {rank.received} bytes")


class Relay(Client):
    """Has a link with several sessions."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, number)
        self.asked = 0
        """The number of the last question that it has answered."""
        self.begin()

    def begin(self) -> None:
        self.link = ClientLink(f"host:{self.number}", {"examines": "1"} if self.number % 3 else {})
        self.frames = bytearray()
        """All frames."""
        self.ranks: list[LinkedRank | None] = [None] * RANKS
        self.entry = Entry(self)
        self.opened: dict[int, LinkedRank] = self.entry.opened

    def hello(self) -> tuple[bytes, bool]:
        knew = bool(self.link.instance)
        return self.link.request(validate=False), knew

    def answered(self, reply: bytes) -> None:
        found = self.link.answered(reply)
        if found.status == UNKNOWN:
            if not self.entry.over:
                raise Difference(f"{self} is not resumed: {reply!r}")
            self.restart()
            return
        if not self.link.connected:
            raise Difference(f"{self} gets no link: {reply!r}")
        self.linked = True
        self.collect()

    def restart(self) -> None:
        for one in self.ranks:
            if one is not None:
                one.rank.closed = True
        self.lose()
        self.begin()

    def collect(self) -> None:
        link = self.link
        link.seal()
        new = link.sent - len(self.frames)
        if new and link.kept is not None:
            self.frames += b"".join(link.kept.pieces)[-new:]
        if self.wire is not None and self.linked:
            self.wire.up += b"".join(link.out)
        link.out.clear()

    def receive(self, data: bytes) -> None:
        self.link.receive(data)
        if self.link.question is not None:
            (self.asked, _), self.link.question = self.link.question, None
            self.link.answer(self.asked, b"%d" % self.number)

    def lose(self) -> None:
        super().lose()
        self.link.disconnect()

    def rank_of(self, number: int) -> Rank:
        """Return a rank, which is opened if need be."""
        one = self.ranks[number]
        if one is None or one.rank.closed:
            one = self.ranks[number] = LinkedRank(self)
            self.link.open(one, "127.0.0.1", number)
            self.opened[one.number] = one
            self.send(one.rank, HANDSHAKE)
        return one.rank

    def _stream(self, rank: Rank) -> LinkedRank:
        return next(one for one in self.ranks if one is not None and one.rank is rank)

    def may_send(self, rank: Rank, command: Command) -> bool:
        return self._stream(rank).credit >= command.size and self.link.has_room()

    def send(self, rank: Rank, command: Command) -> None:
        rank.add(command)
        self.link.send(self._stream(rank), command.frame)

    def leave(self, rank: Rank) -> None:
        rank.closed = True
        self.link.close(self._stream(rank))

    def end(self) -> None:
        """Close the link, if it is connected."""
        if self.wire is not None and self.linked:
            self.link.close_link()
            self.collect()
            self.world.flush(self.wire)
            self.world.serve([self.wire])
            self.restart()


class Observer(Client):
    """Has a connection without a link, and asks one thing at a time."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, number)
        self.asked: Command | None = None
        self.possible: set[bytes] = set()
        """What it may be told."""

    def hello(self) -> tuple[bytes, bool]:
        self.asked = None
        return b"", False

    def answered(self, reply: bytes) -> None:
        self.linked = True

    def ask(self, command: Command) -> None:
        if self.wire is not None and self.linked and self.asked is None:
            self.asked = self.wire.asked = command
            self.wire.executed = b""
            self.possible = set()
            self.look(self.world.executed.model)
            self.wire.up += command.frame

    def look(self, model: Model) -> None:
        """Note what it would be told now."""
        if self.asked is not None and self.asked.name != "add":
            self.possible.add(getattr(model, self.asked.name)(None, *self.asked.fields))

    def receive(self, data: bytes) -> None:
        if data not in self.possible:
            raise Difference(f"{self.asked} was answered {data!r}, which was none of {self.possible}")
        self.asked = None


class Entry:
    """The link of a relay in the model."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.frames = relay.frames
        self.opened: dict[int, LinkedRank] = {}
        """Ranks, keyed by their number on the link."""
        self.carrier: Wire | None = None
        self.done = 0
        """Bytes of frames that were executed."""
        self.partly = bytearray()
        """What has arrived behind these."""
        self.delivered = 0
        """To how many sessions of the next one, if several get the same."""
        self.heard = self.lost = 0.0
        self.over = False
        self.attempt = 0
        """The serial number of the last connection that resumes it."""

    def ranks(self) -> list[Rank]:
        """Those that the server knows."""
        return [one.rank for one in self.opened.values() if one.rank.peer is not None]
