"""Ranks that use a store in every way, and check that everything happened exactly once.

Each rank is a thread with a connection of its own that speaks raw bytes. All ranks of a load meet every few operations,
so every wait must be answered for any of them to go on.
"""

from __future__ import annotations

import random
import struct
import threading
from collections import Counter

from conformance.frames import (
    CANCELED,
    WOKEN,
    add,
    append,
    barrier,
    compare_set,
    confirm,
    get,
    lease_later,
    ping,
    pop,
    push,
    set_,
    wait,
)
from support import RawPeer

OPERATIONS = 20
"""Of a rank, between two meetings."""

SIZES = (10, 100, 500, 1000)
"""Bytes of a rank's own values; the last is multiplied by the scale of the load."""


class Load:
    """One load; its keys begin with `name`."""

    def __init__(self, name: bytes, ports: list[int], seed: int = 0, scale: int = 1) -> None:
        """Connect one rank to each of these ports."""
        self.name = name
        self.sizes = (*SIZES[:-1], SIZES[-1] * scale)
        self.stopping = False
        self.rounds = 0
        """How often the ranks have met."""
        with RawPeer(ports[0]) as peer:
            peer.send(set_(name + b"/cas", b"start") + append(name + b"/log", b"start"))
            peer.ping()
        self.ranks = [Rank(self, number, port, seed) for number, port in enumerate(ports)]
        for rank in self.ranks:
            rank.start()

    def alive(self) -> bool:
        return all(rank.error is None for rank in self.ranks)

    def stop(self) -> None:
        """Stop at the next meeting; raise what went wrong in a rank."""
        self.stopping = True
        for rank in self.ranks:
            rank.join()
        for rank in self.ranks:
            if rank.error is not None:
                raise rank.error

    def operations(self) -> int:
        return sum(sum(rank.done.values()) for rank in self.ranks)

    def judge(self, direct: RawPeer, *others: bytes) -> None:
        """Compare what ranks were told with what the store has. `others` are items that somebody else pushed."""
        ranks = self.ranks
        sums = [number for rank in ranks for number in rank.sums]
        assert sorted(sums) == list(range(1, len(sums) + 1))
        assert all(rank.sums == sorted(rank.sums) for rank in ranks)
        for queue in (b"/leased", b"/popped"):
            pushed = Counter(item for rank in ranks for item in rank.pushed[queue])
            taken = Counter(item for rank in ranks for item in rank.taken[queue])
            if queue == b"/leased":
                pushed.update(others)
            while item := read_item(direct, self.name + queue):
                taken[item] += 1
            assert taken == pushed, (taken - pushed, pushed - taken)
        log = read_value(direct, self.name + b"/log").split(b" ")[1:]
        for number, rank in enumerate(ranks):
            assert [token for token in log if token.startswith(b"%d-" % number)] == rank.appended
        assert len(log) == sum(len(rank.appended) for rank in ranks)
        steps = dict(step for rank in ranks for step in rank.swapped)
        value, last = b"start", read_value(direct, self.name + b"/cas")
        while value != last:
            value = steps.pop(value)
        assert not steps


class Rank(threading.Thread):
    """One rank, and what it was told."""

    def __init__(self, load: Load, number: int, port: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.load = load
        self.number = number
        self.random = random.Random(seed * 1000 + number)
        self.peer = RawPeer(port)
        self.made = 0
        self.done: Counter[str] = Counter()
        self.sums: list[int] = []
        self.pushed: dict[bytes, list[bytes]] = {b"/leased": [], b"/popped": []}
        self.taken: dict[bytes, list[bytes]] = {b"/leased": [], b"/popped": []}
        self.appended: list[bytes] = []
        self.swapped: list[tuple[bytes, bytes]] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with self.peer:
                number, goes_on = 0, True
                while goes_on:
                    number += 1
                    for _ in range(OPERATIONS):
                        name = self.random.choice(list(_WAYS))
                        _WAYS[name](self)
                        self.done[name] += 1
                    goes_on = self._meet(b"%d" % number)
        except BaseException as error:
            self.error = error

    def _meet(self, round_: bytes) -> bool:
        """Wait for all others, in two ways; return whether they go on."""
        load, peer = self.load, self.peer
        name, world = load.name, len(load.ranks)
        assert peer.ask(barrier(name + b"/barrier" + round_, world), 1) == WOKEN
        last = name + b"/last" + round_
        if self._add(name + b"/met" + round_) == world:
            peer.send(set_(last, b""))
        assert peer.ask(wait(last), 1) == WOKEN
        decision = name + b"/decision" + round_
        if not self.number:
            load.rounds += 1
            peer.send(set_(decision, b"stop" if load.stopping else b"go on"))
        assert peer.ask(wait(decision), 1) == WOKEN
        return read_value(peer, decision) == b"go on"

    def _add(self, key: bytes) -> int:
        number: int = struct.unpack("<q", self.peer.ask(add(key, 1), 8))[0]
        return number

    def _unique(self) -> bytes:
        self.made += 1
        return b"%d-%d" % (self.number, self.made)

    # Operations

    def _count(self) -> None:
        self.sums.append(self._add(self.load.name + b"/sum"))

    def _push(self, queue: bytes) -> None:
        item = self._unique()
        self.pushed[queue].append(item)
        self.peer.send(push(self.load.name + queue, item))

    def _lease(self) -> None:
        """Whoever leases has pushed before, so there is an item for each."""
        self._push(b"/leased")
        self.peer.send(lease_later(self.load.name + b"/leased", self.made))
        assert struct.unpack("<q", self.peer.read(8))[0] > 0
        self.taken[b"/leased"].append(self.peer.read(struct.unpack("<Q", self.peer.read(8))[0]))
        self.peer.send(confirm(self.made))

    def _push_or_pop(self) -> None:
        if self.random.random() < 0.5:
            self._push(b"/popped")
        elif item := read_item(self.peer, self.load.name + b"/popped"):
            self.taken[b"/popped"].append(item)

    def _append(self) -> None:
        token = self._unique()
        self.appended.append(token)
        self.peer.send(append(self.load.name + b"/log", b" " + token))

    def _swap(self) -> None:
        key, desired = self.load.name + b"/cas", self._unique()
        expected = read_value(self.peer, key)
        self.peer.send(compare_set(key, expected, desired))
        if self.peer.read(struct.unpack("<Q", self.peer.read(8))[0]) == desired:
            self.swapped.append((expected, desired))

    def _own(self) -> None:
        key = self.load.name + b"/own%d" % self.number
        value = self.random.randbytes(self.random.choices(self.load.sizes, (60, 30, 9, 1))[0])
        self.peer.send(set_(key, value))
        assert read_value(self.peer, key) == value

    def _cancel(self) -> None:
        """Give up a wait for what never comes."""
        assert self.peer.ask(wait(self.load.name + b"/never") + b"\x0c", 1) == CANCELED

    def _ping(self) -> None:
        self.made += 1
        nonce = struct.pack("<I", self.made)
        assert self.peer.ask(ping(nonce), 4) == nonce


_WAYS = {
    "ADD": Rank._count,
    "LEASE_LATER": Rank._lease,
    "QUEUE_POP": Rank._push_or_pop,
    "APPEND": Rank._append,
    "COMPARE_SET": Rank._swap,
    "GET": Rank._own,
    "CANCEL_WAIT": Rank._cancel,
    "PING": Rank._ping,
}


def read_value(peer: RawPeer, key: bytes) -> bytes:
    size: int = struct.unpack("<Q", peer.ask(get(key), 8))[0]
    return peer.read(size)


def read_item(peer: RawPeer, queue: bytes) -> bytes:
    """Pop an item; empty if there is none."""
    if not struct.unpack("<q", peer.ask(pop(queue), 8))[0]:
        return b""
    return peer.read(struct.unpack("<Q", peer.read(8))[0])
