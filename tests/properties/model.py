"""The server's semantics once more, as plainly as possible: the model that the server is compared with.

Written from the description of PyTorch's protocol, the list of what this server does otherwise (docs/quirks.md) and the
specification of the extension (docs/wire.md), not from the package's keyspace. Nothing here is fast, framed or counted.
A `Peer` collects the bytes that it would be sent.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from typing import Any

from .rounds_model import Meeting, Member

MAGIC = 0x3C85F7CE

Method = Callable[..., bytes]


class Closed(Exception):
    """The server closes the connection whose command this was."""


class Peer:
    """One connection."""

    def __init__(self) -> None:
        self.validated = False
        self.waits = False
        """Whether it awaits something."""
        self.barrier: bytes | None = None
        """The barrier it is in; it must not be handed an item of a queue of that name."""
        self.handoff: bytes | None = None
        """The queue it was woken for, until its next command."""
        self.fetching: bytes | None = None
        """The key whose value ends its wait."""
        self.counting: tuple[bytes, int] | None = None
        """The key whose number it waits for, and the number."""
        self.popping: tuple[bytes, int] | None = None
        """The queue an item of which ends its wait, and the ticket for that."""
        self.leased: dict[int, tuple[bytes, bytes]] = {}
        """Per ticket, the queue and the item that it was given and has not confirmed."""
        self.rank: tuple[bytes, bytes] | None = None
        """The counter that it has joined, and its token."""
        self.agent: Member | None = None
        """The agent of an elastic job that it represents."""
        self.meeting: Member | None = None
        """The agent for whose rank it waits."""
        self.introduced: dict[str, str] = {}
        """The contents of its INTRODUCE."""
        self.away = False
        """Its link has no connection: no item of a queue is offered to it."""
        self.sent: list[bytes] = []
        """Replies that it was sent and has not read."""
        self.unsent = 0
        """The number of their bytes."""


def framed(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def i64(number: int) -> bytes:
    return struct.pack("<q", number)


def stoll(text: bytes) -> int:
    match = re.match(rb"[ \t\n\v\f\r]*([+-]?)0*([0-9]*)", text)
    assert match is not None
    if not text[: match.end()][-1:].isdigit() or len(match[2]) > 19:
        raise Closed
    number = int(match[1] + (match[2] or b"0"))
    if not -(2**63) <= number < 2**63:
        raise Closed
    return number


def int64(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def one_line(raw: bytes) -> str:
    """Return text that fits a log line."""
    text = raw.decode("utf-8", "replace")
    return text if text.isprintable() else repr(text)[1:-1]


class Model:
    """The server. `do` executes a command of a peer; `woken` lists the peers whose waits have ended."""

    def __init__(self, portion: int = 1000) -> None:
        self.portion = portion
        """Keys up to which a list is waited for at once."""
        self.store: dict[bytes, bytes] = {}
        self.reserved: dict[bytes, bytes] = {}
        """Reserved keys: information about the server, read-only, and no keys of the store."""
        self.queues: dict[bytes, list[bytes]] = {}
        self.waiting: dict[bytes, list[Peer]] = {}
        self.joined: dict[bytes, dict[bytes, int | None]] = {}
        """By counter and token: how many peers represent that rank; None once one of them has sent LEAVE."""
        self.meetings: dict[bytes, Meeting] = {}
        """By key: where the agents of an elastic job meet."""
        self.ended: dict[bytes, tuple[float, list[bytes]]] = {}
        """By key, oldest first: when a job ended successfully, and the agents of its last round."""
        self.now: Callable[[], float] = lambda: 0.0
        """The server's clock."""
        self.peers: list[Peer] = []
        self.woken: list[Peer] = []
        self.passed: dict[Peer, dict[bytes, None]] = {}
        """The queues for which peers were passed over since they are away."""
        self.methods: dict[str, Method] = {
            name: getattr(self, name)
            for name in (
                "set compare_set get add check wait num_keys delete_key append multi_get multi_set cancel_wait ping "
                "queue_push queue_pop queue_len list_keys barrier fetch cancel_fetch wait_count introduce "
                "lease lease_later confirm give_back join depart meet attend"
            ).split()
        }

    def enter(self) -> Peer:
        peer = Peer()
        self.peers.append(peer)
        return peer

    def leave(self, peer: Peer) -> None:
        self.peers.remove(peer)
        self.forget(peer)
        self.unrepresent(peer)
        if peer.handoff is not None:
            self.hand_on(peer.handoff)
        if peer.rank is not None:
            key, token = peer.rank
            standing = self.joined.get(key, {}).get(token)
            if standing:
                self.joined[key][token] = standing - 1
        self.put_back(list(peer.leased.values()))

    def knows(self, peer: Peer, name: str) -> bool:
        """Whether the peer may send this now; if not, the opcode alone closes its connection."""
        return name in self.methods if peer.validated else name == "validate"

    def do(self, peer: Peer, name: str, fields: tuple[Any, ...]) -> None:
        if not self.knows(peer, name):
            raise Closed
        if name == "validate":
            if fields != (MAGIC,):
                raise Closed
            peer.validated = True
            return
        handoff = peer.handoff
        reply = self.methods[name](peer, *fields)
        if reply:
            self.send(peer, reply)
        if handoff is not None:
            renewed = name == "wait" and reply and handoff in fields[0]
            if not renewed:
                peer.handoff = None
            self.hand_on(handoff)

    # Values

    def set(self, peer: Peer, key: bytes, value: bytes) -> bytes:
        self.demand_writable(key)
        self.store[key] = value
        self.wake_all(key)
        return b""

    def compare_set(self, peer: Peer, key: bytes, expected: bytes, desired: bytes) -> bytes:
        if key not in self.store and expected:
            return framed(expected)
        self.demand_writable(key)
        if self.store.get(key, b"") != expected:
            return framed(self.store[key])
        self.set(peer, key, desired)
        return framed(desired)

    def get(self, peer: Peer, key: bytes) -> bytes:
        return framed(self.store.get(key, self.reserved.get(key, b"")))

    def add(self, peer: Peer, key: bytes, delta: int) -> bytes:
        total = int64(stoll(self.store.get(key, b"0")) + delta)
        self.set(peer, key, b"%d" % total)
        return i64(total)

    def append(self, peer: Peer, key: bytes, value: bytes) -> bytes:
        return self.set(peer, key, self.store.get(key, b"") + value)

    def delete_key(self, peer: Peer, key: bytes) -> bytes:
        if key in self.meetings and not self.meetings[key].members:
            del self.meetings[key]
            self.ended.pop(key, None)
        if key in self.store:
            self.joined.pop(key, None)
        return i64(0 if self.store.pop(key, None) is None else 1)

    def num_keys(self, peer: Peer) -> bytes:
        return i64(len(self.store))

    def list_keys(self, peer: Peer) -> bytes:
        return i64(len(self.store)) + b"".join(map(framed, self.store))

    def multi_get(self, peer: Peer, keys: list[bytes]) -> bytes:
        return b"".join(self.get(peer, key) for key in keys)

    def multi_set(self, peer: Peer, items: list[tuple[bytes, bytes]]) -> bytes:
        for key, _ in items:
            self.demand_writable(key)
        for key, value in items:
            self.store[key] = value
        for key, _ in items:
            self.wake_all(key)
        return b""

    def ping(self, peer: Peer, nonce: int) -> bytes:
        return struct.pack("<I", nonce)

    # Queues

    def queue_push(self, peer: Peer, key: bytes, value: bytes) -> bytes:
        self.demand_writable(key)
        self.queues.setdefault(key, []).append(value)
        self.wake_next(key)
        return b""

    def queue_pop(self, peer: Peer, key: bytes) -> bytes:
        queue = self.queues.get(key, [])
        length = len(queue)
        if not length:
            return i64(0)
        item = queue.pop(0)
        if not queue:
            del self.queues[key]
        return i64(length) + framed(item)

    def queue_len(self, peer: Peer, key: bytes) -> bytes:
        return i64(len(self.queues.get(key, [])))

    # Waiting

    def present(self, key: bytes) -> bool:
        return key in self.store or key in self.queues or key in self.reserved

    def demand_writable(self, key: bytes) -> None:
        if key in self.reserved:
            raise Closed

    def check(self, peer: Peer, keys: list[bytes]) -> bytes:
        return b"\0" if all(map(self.present, keys)) else b"\1"

    def wait(self, peer: Peer, keys: list[bytes]) -> bytes:
        missing = [key for key in keys if not self.present(key)]
        if not missing:
            return b"\0"
        self.register(peer, missing)
        return b""

    def barrier(self, peer: Peer, key: bytes, world_size: int) -> bytes:
        self.demand_writable(key)
        count = int64(stoll(self.store.get(key, b"0")) + 1)
        self.store[key] = b"%d" % count
        self.recount(key)
        if count < world_size:
            self.register(peer, [key])
            peer.barrier = key
            return b""
        self.wake_all(key)
        return b"\0"

    def cancel_wait(self, peer: Peer) -> bytes:
        self.forget(peer)
        return b"\1"

    # The extension

    def fetch(self, peer: Peer, key: bytes) -> bytes:
        if self.present(key):
            return self.get(peer, key)
        self.demand_idle(peer)
        self.register(peer, [key])
        peer.fetching = key
        return b""

    def cancel_fetch(self, peer: Peer) -> bytes:
        self.forget(peer)
        return b"\xff" * 8

    def wait_count(self, peer: Peer, key: bytes, target: int) -> bytes:
        if peer.waits:
            raise Closed
        if self.number(key) >= target:
            return b"\0"
        self.demand_idle(peer)
        peer.waits = True
        peer.counting = (key, target)
        return b""

    def introduce(self, peer: Peer, items: list[tuple[bytes, bytes]]) -> bytes:
        if sum(len(name) + len(framed(text)) for name, text in items) > 2048:
            raise Closed
        peer.introduced = {one_line(name): one_line(text) for name, text in items}
        return b""

    def lease(self, peer: Peer, key: bytes, ticket: int) -> bytes:
        if ticket in peer.leased or (peer.popping is not None and peer.popping[1] == ticket):
            raise Closed
        reply = self.queue_pop(peer, key)
        if len(reply) > 8:
            peer.leased[ticket] = key, reply[16:]
        return reply

    def lease_later(self, peer: Peer, key: bytes, ticket: int) -> bytes:
        reply = self.lease(peer, key, ticket)
        if len(reply) > 8 or self.present(key):
            return reply
        self.demand_idle(peer)
        self.register(peer, [key])
        peer.popping = key, ticket
        return b""

    def confirm(self, peer: Peer, ticket: int) -> bytes:
        peer.leased.pop(ticket, None)
        return b""

    def give_back(self, peer: Peer, ticket: int) -> bytes:
        if peer.popping is not None and peer.popping[1] == ticket:
            self.forget(peer)
            return i64(-1)
        if ticket in peer.leased:
            self.put_back([peer.leased.pop(ticket)])
        return b""

    def put_back(self, leased: list[tuple[bytes, bytes]]) -> None:
        """Return items to the front, in their order; each wakes a waiter."""
        for key, item in leased[::-1]:
            self.queues.setdefault(key, []).insert(0, item)
        for key, _ in leased:
            self.wake_next(key, handed_on=True)

    def join(self, peer: Peer, key: bytes, token: bytes) -> bytes:
        if len(token) > 64:
            raise Closed
        ranks = self.joined.get(key, {})
        if not token:
            return i64(int64(self.number(key) - sum(standing == 0 for standing in ranks.values())))
        if token in ranks:
            total = self.number(key)
        else:
            total = int64(stoll(self.store.get(key, b"0")) + 1)
            self.set(peer, key, b"%d" % total)
            ranks = self.joined.setdefault(key, {})
            ranks[token] = 0
        if peer.rank != (key, token):
            self.depart(peer)
            if (standing := ranks[token]) is not None:
                ranks[token] = standing + 1
            peer.rank = key, token
        return i64(total)

    def depart(self, peer: Peer) -> bytes:
        if peer.rank is not None:
            key, token = peer.rank
            if token in self.joined.get(key, {}):
                self.joined[key][token] = None
            peer.rank = None
        return b""

    def meet(self, peer: Peer, key: bytes, name: bytes, least: int, most: int, left: int) -> bytes:
        if peer.waits or not 1 <= least <= most or not 1 <= len(name) <= 512:
            raise Closed
        meeting = self.meetings.get(key)
        member = None if meeting is None else meeting.find(name)
        if meeting is None:
            meeting = self.meetings[key] = Meeting()
        if member is None:
            if meeting.closed:
                return framed(struct.pack("<3q", meeting.round, -2, 0))
            member = Member(meeting, name)
            meeting.members.append(member)
        self.represent(peer, member)
        meeting.see(member)
        member.parked = None
        answer = meeting.join(member, least, most, left)
        self.settle(meeting)
        if answer is not None:
            return framed(struct.pack("<3q", *answer))
        self.forget(peer)
        peer.waits = True
        peer.meeting = member
        member.parked = peer
        return b""

    def attend(self, peer: Peer, key: bytes, name: bytes, action: int, number: int) -> bytes:
        if not 0 <= action <= 4 or (action == 1 and number < 1) or len(name) > 512:
            raise Closed
        meeting = self.meetings.get(key)
        member = None if meeting is None else meeting.find(name)
        if member is not None and peer.meeting is not None and peer.agent is not member:
            raise Closed
        if meeting is None:
            if action != 3:
                return framed(bytes(48))
            meeting = self.meetings[key] = Meeting()
        if member is not None:
            self.represent(peer, member)
            meeting.see(member)
            if action == 1:
                meeting.beat(member, number)
            elif action == 2 and meeting.caller is member and meeting.calls == number and not meeting.closed:
                meeting.form()
            elif action == 4 and (meeting.ranks is None or meeting.status(member)[4] in (0, 2)):
                meeting.remove(member)
        if action == 3:
            self.note_end(key, meeting, member, number == 1)
            meeting.close()
        self.settle(meeting)
        described = self.describe(key, meeting) if (action, number) == (0, 1) else b""
        return framed(struct.pack("<6q", *meeting.status(member)) + described)

    def note_end(self, key: bytes, meeting: Meeting, member: Member | None, succeeded: bool) -> None:
        """A job ends successfully if all of its last round are there, the first says so, and nobody else denies it."""
        if member not in meeting.inside:
            return
        if not succeeded:
            self.ended.pop(key, None)
        elif not meeting.closed and meeting.ranks is not None and len(meeting.inside) == len(meeting.ranks):
            recent = [(key, end) for key, end in self.ended.items() if self.now() - end[0] < 600]
            self.ended = dict(recent[-1023:])
            self.ended[key] = self.now(), [one.name for one in meeting.ranks]

    def describe(self, key: bytes, meeting: Meeting) -> bytes:
        def texts(names: list[bytes]) -> list[str]:
            return [name.decode() for name in names[:16]]

        agents = sorted(one.name for one in (meeting.inside if meeting.ranks is None else meeting.ranks))
        described: dict[str, Any] = {"agents": texts(agents)}
        if key in self.ended and self.now() - self.ended[key][0] < 600:
            at, names = self.ended[key]
            described["ended"] = {"since": round(self.now() - at, 3), "count": len(names), "agents": texts(names)}
        return json.dumps(described, separators=(",", ":")).encode()

    def represent(self, peer: Peer, member: Member) -> None:
        if peer.agent is not member:
            member.peers.append(peer)
            self.unrepresent(peer)
            peer.agent = member

    def unrepresent(self, peer: Peer) -> None:
        member, peer.agent = peer.agent, None
        if member is not None:
            member.peers.remove(peer)
            if not member.peers:
                member.meeting.remove(member)
                self.settle(member.meeting)

    def settle(self, meeting: Meeting) -> None:
        """Answer those who are parked."""
        caller = meeting.caller
        if not meeting.told and caller is not None and self.is_parked(caller):
            meeting.told = True
            self.answer(caller, (meeting.round, -1, meeting.calls))
        for member, answer in meeting.answers:
            if self.is_parked(member) and member in meeting.members:
                self.answer(member, answer)
        meeting.answers.clear()

    def is_parked(self, member: Member) -> bool:
        peer = member.parked
        return peer is not None and peer.meeting is member and peer.agent is member

    def answer(self, member: Member, answer: tuple[int, int, int]) -> None:
        peer = member.parked
        peer.meeting = None
        peer.waits = False
        self.woken.append(peer)
        self.send(peer, framed(struct.pack("<3q", *answer)))

    def demand_idle(self, peer: Peer) -> None:
        """Refuse a second wait."""
        if peer.waits:
            raise Closed

    def number(self, key: bytes) -> int:
        return stoll(self.store.get(key, self.reserved.get(key, b"0")))

    def recount(self, key: bytes) -> None:
        """Wake the peers whose number a write to the key has reached."""
        try:
            number = self.number(key)
        except Closed:
            return
        for peer in self.peers:
            if peer.counting is not None and peer.counting[0] == key and peer.counting[1] <= number:
                peer.counting = None
                peer.waits = False
                self.woken.append(peer)
                self.send(peer, b"\0")

    # Registrations

    def register(self, peer: Peer, keys: list[bytes]) -> None:
        """Let a peer await keys, instead of what it awaited before."""
        self.forget(peer)
        peer.waits = True
        self.place(peer, keys)

    def place(self, peer: Peer, keys: list[bytes]) -> None:
        """Register a peer behind all others, once for each key."""
        for key in keys:
            places = self.waiting.setdefault(key, [])
            if peer not in places:
                places.append(peer)

    def has_places(self, peer: Peer) -> bool:
        return any(peer in places for places in self.waiting.values())

    def forget(self, peer: Peer) -> None:
        peer.waits = False
        peer.meeting = None
        peer.barrier = None
        peer.fetching = None
        peer.popping = None
        peer.counting = None
        for places in self.waiting.values():
            places[:] = [other for other in places if other is not peer]

    def wake_all(self, key: bytes) -> None:
        for peer in self.waiting.pop(key, []):
            self.count_down(peer)
        self.recount(key)

    def wake_next(self, key: bytes, *, handed_on: bool = False) -> None:
        places = self.waiting.get(key, [])
        order = places[:]
        for peer in order:
            if handed_on and peer.barrier == key:
                continue
            places.remove(peer)
            if peer.away and peer.waits and peer.fetching is None and not self.has_places(peer):
                places.insert(0, peer)
                places.sort(key=order.index)
                self.passed.setdefault(peer, {})[key] = None
                continue
            takes, popping = peer.fetching is None, peer.popping
            if self.count_down(peer) and takes:
                peer.handoff = key if popping is None else None
                return

    def come_back(self, peers: list[Peer]) -> None:
        """Offer peers of one link what they were passed over for."""
        passed = [key for peer in peers for key in self.passed.pop(peer, {})]
        for key in dict.fromkeys(passed):
            before = -1
            while (left := self.unpromised(key)) > 0 and left != before:
                before = left
                self.wake_next(key, handed_on=True)

    def unpromised(self, queue: bytes) -> int:
        return len(self.queues.get(queue, [])) - sum(peer.handoff == queue for peer in self.peers)

    def count_down(self, peer: Peer) -> bool:
        """Note that a place of the peer was used up; True if that ended its wait."""
        if not peer.waits or self.has_places(peer):
            return False
        peer.waits = False
        peer.barrier = None
        self.woken.append(peer)
        if peer.popping is not None:
            (key, ticket), peer.popping = peer.popping, None
            if peer.away:
                self.passed.setdefault(peer, {})[key] = None
            self.send(peer, i64(0) if peer.away else self.lease(peer, key, ticket))
            return True
        self.send(peer, b"\0" if peer.fetching is None else self.get(peer, peer.fetching))
        peer.fetching = None
        return True

    def hand_on(self, queue: bytes) -> None:
        """Hand on an item that a woken peer has left, because it sent another command or has gone."""
        promised = sum(peer.handoff == queue for peer in self.peers)
        if len(self.queues.get(queue, [])) > promised:
            self.wake_next(queue, handed_on=True)

    def send(self, peer: Peer, data: bytes) -> None:
        peer.sent.append(data)
        peer.unsent += len(data)
