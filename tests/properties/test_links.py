"""Sessions on links do and say what sessions on connections of their own do and say, whatever breaks in between."""

from __future__ import annotations

from itertools import product

import pytest

from marks import thinned
from properties.fleet import Command, Difference, Step
from properties.linked import RANKS, LinkedFleet, chosen, first_frame, run

PROGRAM: list[Step] = [
    ("send", 0, (Command("queue_push", b"q", b"one"), Command("add", b"/n", 1)), 0),
    ("send", 1, (Command("wait", [b"r"]),), 0),
    ("chorus", 0, (Command("add", b"/n", 1), Command("get", b"/n")), 0),
    ("send", 4, (Command("append", b"/v", b"x" * 300), Command("queue_pop", b"q")), 7),
    ("up", 0, (), -1),
    ("send", 4, (Command("append", b"/v", b"y" * 30), Command("get", b"/v")), 0),
    ("up", 1, (), -1),
    ("send", 2, (Command("lease_later", b"r", 1),), 0),
    ("send", 5, (Command("queue_push", b"r", b"two"), Command("queue_push", b"r", b"three")), 0),
    ("chorus", 1, (Command("add", b"/n", 1), Command("compare_set", b"/c", b"", b"3"), Command("fetch", b"/v")), 0),
    ("up", 1, (), -1),
    ("up", 0, (), -1),
    ("down", 0, (), -1),
    ("send", 1, (Command("queue_pop", b"r"), Command("barrier", b"/b", 2)), 0),
    ("end", 5, (), 0),
    ("send", 4, (Command("barrier", b"/b", 2), Command("add", b"/n", 5)), 0),
    ("leave", 2, (), 0),
    ("chorus", 0, (Command("get", b"/n"),), 0),
]
"""What two links with a few ranks do, all bytes counted."""


class _Cutting(LinkedFleet):
    """Break the connection of each link once, after so many bytes in one direction, and resume it."""

    def __init__(self, up: bool, at: int, portion: int) -> None:
        self.left = [at, at]
        self.up = up
        self.carried = [0, 0]
        super().__init__(2, portion=portion)

    def apply(self, step: Step) -> None:
        kind, number, _, __ = step
        if (kind == "up" and self.up) or (kind == "down" and not self.up):
            client = self.clients[number]
            client.collect()
            size = len(client.up if self.up else client.down)
            if 0 <= self.left[number] < size:
                super().apply(("part" if self.up else kind, number, (), self.left[number]))
                self.left[number] = -1
                super().apply(("break", number, (), 0))
                self.check()
                super().apply(("resume", number, (), 0))
                client.collect()
            else:
                self.carried[number] += size
                self.left[number] -= size if self.left[number] >= 0 else 0
        super().apply(step)

    def everything(self) -> tuple[dict[bytes, bytes], dict[bytes, list[bytes]], list[bytes]]:
        """Return what is stored, and what each rank has received."""
        for _ in range(8):
            for number in range(2):
                self.apply(("up", number, (), -1))
                self.apply(("down", number, (), -1))
        got = [bytes(rank.got) for client in self.clients for rank in client.opened.values()]
        return dict(self.model.store), {key: list(items) for key, items in self.model.queues.items()}, got


def _replay(up: bool, at: int, portion: int) -> tuple[_Cutting, object]:
    fleet = _Cutting(up, at, portion)
    for step in PROGRAM:
        fleet.apply(step)
    everything = fleet.everything()
    fleet.finish()
    return fleet, everything


@pytest.mark.slow
@pytest.mark.parametrize(
    ("up", "portion"), thinned(product([True, False], [1, 2, 3, 1000]), [(True, 1), (False, 1000)])
)
def test_a_recorded_run_that_breaks_at_any_byte(up: bool, portion: int) -> None:
    """The two links alternate in the same order as without a break, so that nothing at all may differ."""
    whole, expected = _replay(up, 2**40, portion)
    most = max(whole.carried)
    assert most > 300
    for at in range(most):
        fleet, found = _replay(up, at, portion)
        assert fleet.broken > 0
        assert found == expected, f"broken after {at} bytes"


def test_the_same_payload_travels_once() -> None:
    fleet = LinkedFleet(1)
    for rank in range(RANKS):
        fleet.apply(("send", rank, (), 0))
    fleet.apply(("up", 0, (), -1))
    client = fleet.clients[0]
    fleet.apply(("chorus", 0, (Command("get", b"/long" * 20),), 0))
    client.collect()
    assert client.up.count(b"/long" * 20) == 1
    assert [session for _, session, _ in first_frame(client.up)[1]] == [1, 2, 3, 4]
    fleet.apply(("up", 0, (), -1))
    assert len(client.down) < 24 + 8 + 4 + RANKS * 4 + 8 + 1
    fleet.finish()


def test_a_suspended_rank_is_passed_over_and_keeps_its_place() -> None:
    fleet = LinkedFleet(2)
    for rank in (0, 1, 4):
        fleet.apply(("send", rank, (Command("wait", [b"q"]),), 0))
        fleet.apply(("up", rank // RANKS, (), -1))
    fleet.apply(("break", 0, (), 0))
    pushes = tuple(Command("queue_push", b"q", b"%d" % number) for number in range(3))
    fleet.apply(("send", 5, pushes, 0))
    fleet.apply(("up", 1, (), -1))
    fleet.check()
    first, second, third = (fleet.clients[rank // RANKS].ranks[rank % RANKS] for rank in (0, 1, 4))
    assert first is not None
    assert second is not None
    assert third is not None
    assert third.connection is not None
    assert third.connection.expected == b"\0"
    assert fleet.store.keyspace.handoffs == {b"q": 1}
    fleet.apply(("resume", 0, (), 0))
    fleet.check()
    assert fleet.store.keyspace.handoffs == {b"q": 3}
    fleet.finish()
    assert bytes(first.got + second.got) == b"\0\0"


def test_the_fleet_notices_a_wrong_reply() -> None:
    fleet = LinkedFleet(1)
    fleet.apply(("send", 0, (), 0))
    fleet.model.store[b"/a"] = b"1"
    with pytest.raises(Difference):
        for step in (("send", 0, (Command("get", b"/a"),), 0), ("up", 0, (), -1), ("down", 0, (), -1)):
            fleet.apply(step)


def test_a_run_does_what_it_is_to_do() -> None:
    """Connections break and are resumed, in these runs, hundreds of times."""
    fleets = [run(chosen(seed)) for seed in range(50)]
    assert sum(fleet.done for fleet in fleets) > 3000
    assert sum(fleet.resumed for fleet in fleets) > 300


@pytest.mark.parametrize("high_water", [0, 9, 300, 100_000])
def test_a_rank_whose_requests_are_held_back(high_water: int) -> None:
    """With one rank, what is held back is executed in the same order as if it were not."""
    allowed = ("send", "drip", "end", "doze", "read", "up", "part", "down", "break", "resume", "silence")
    for seed in range(60):
        schedule = chosen(seed)
        fleet = LinkedFleet(1, high_water, schedule.portion)
        for kind, number, commands, count in schedule.steps:
            if kind in allowed and number == 0:
                fleet.apply((kind, number, commands, count))
        fleet.finish()
