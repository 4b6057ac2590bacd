"""What a server remembers of its sessions, and what it tells whoever looks."""

from __future__ import annotations

import gc
import struct
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.frames import add, set_
from looking import World
from support import HANDSHAKE, blob, keys
from tcpstore_async.base.errors import ProtocolError
from tcpstore_async.base.limits import MIB, Limits
from tcpstore_async.diagnosis.facts import Wait
from tcpstore_async.observe.history import History
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store
from tcpstore_async.wire import codecs
from tcpstore_async.wire.commands import BY_METHOD, MUTATES, STORES, Command


def by(world: World, key: bytes) -> tuple[int, float] | None:
    """Which client wrote a key, and when."""
    write = world.history.last_write(key)
    if write is None or write.by is None:
        return None
    return next(client for client, session in world.sessions.items() if session is write.by), write.at


def test_who_wrote_which_key() -> None:
    world = World()
    for client in range(8):
        world.connect(client, joins=False)
    world.history.clock.now = 3.0
    world.set(0, b"/set")
    world.send(1, b"\x09" + blob(b"/append") + blob(b"x"))
    world.add(2, b"/add", 5)
    world.send(3, b"\x0b" + struct.pack("<Q", 2) + blob(b"/many") + blob(b"") + blob(b"/more") + blob(b""))
    world.send(4, b"\x02" + blob(b"/compared") + blob(b"") + blob(b"x"))
    world.send(5, b"\x02" + blob(b"/set") + blob(b"not it") + blob(b"x"))
    world.barrier(6, b"/barrier", 2)
    world.add(7, b"/add", 0)
    for client, key in enumerate([b"/set", b"/append", b"/add", b"/many", b"/compared"]):
        assert by(world, key) == (client, 3.0)
    assert by(world, b"/more") == (3, 3.0)
    (barrier,) = [key for key in world.facts().keys if key.key == "/barrier"]
    assert (barrier.age, barrier.by) == (0.0, world.history.serial(world.sessions[6]))
    world.history.clock.now = 4.0
    world.barrier(7, b"/barrier", 2)
    assert by(world, b"/barrier") == (7, 4.0)
    world.set(1, b"/set")
    assert by(world, b"/set") == (1, 4.0)
    world.delete(2, b"/set")
    assert by(world, b"/set") is None


STEPS = st.lists(
    st.tuples(st.sampled_from(["set", "add", "read", "append", "delete"]), st.integers(0, 1), st.booleans())
)


@given(STEPS)
def test_who_wrote_a_key_whatever_was_written_before(steps: list[tuple[str, int, bool]]) -> None:
    """Two clients and two keys: often somebody writes what was written last."""
    world = World()
    for client in (0, 1):
        world.connect(client, joins=False)
    known: dict[bytes, tuple[int, float]] = {}
    for number, (what, client, other) in enumerate(steps):
        world.history.clock.now = float(number)
        key = b"/other" if other else b"/one"
        if what == "set":
            world.set(client, key, b"7")
        elif what == "append":
            world.send(client, b"\x09" + blob(key) + blob(b"7"))
        elif what == "delete":
            world.delete(client, key)
        else:
            world.add(client, key, int(what == "add"))
        if what == "delete":
            known.pop(key, None)
        elif what != "read":
            known[key] = client, float(number)
        assert [by(world, name) for name in (b"/one", b"/other")] == [known.get(b"/one"), known.get(b"/other")]


def test_many_requests_in_one_read_are_noted() -> None:
    world = World()
    world.connect(0, joins=False)
    world.connect(1, joins=False)
    added = b"\x04" + blob(b"/counter") + struct.pack("<q", 1)
    world.send(0, 16 * added)
    world.history.clock.now = 2.0
    world.send(1, 16 * added)
    assert by(world, b"/counter") == (1, 2.0)
    world.history.clock.now = 3.0
    world.send(0, added + 16 * (b"\x01" + blob(b"/text") + blob(b"x")))
    assert (by(world, b"/counter"), by(world, b"/text")) == ((0, 3.0), (0, 3.0))
    assert world.store.keyspace.values[b"/counter"] == 33


def test_whatever_executes_a_command_is_called() -> None:
    """Nothing that stands before the keyspace, such as a check of rights, is bypassed."""
    world = World()
    called = []
    for method in ("set", "add", "append", "delete_key", "check"):
        fields = {"set": 2, "add": 2, "append": 2}.get(method, 1)
        world.history.recorded(method, lambda *given: called.append(given))(*[b"/k", 1][:fields])
    assert [len(given) for given in called] == [2, 2, 2, 1, 1]
    assert not world.store.keyspace.values


@pytest.mark.parametrize(("flags", "expected"), [(STORES, (1, 5.0)), (MUTATES, (0, 0.0))])
def test_what_the_row_of_a_new_command_tells(flags: int, expected: tuple[int, float]) -> None:
    """One that may enlarge the store has written the value; after any other, the value may be gone."""
    world = World()
    world.connect(0)
    world.connect(1)
    command = Command(0x7F, "NEW", codecs.KEY, codecs.NO_REPLY, "new", flags, "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BY_METHOD, "new", command)
        new = world.history.recorded("new", world.store.keyspace.values.get)
        delete = world.history.recorded("new", world.store.keyspace.values.pop)
    world.set(0, b"/k")
    world.history.clock.now = 5.0
    world.store.serving = world.sessions[1]
    new(b"/k")
    assert by(world, b"/k") == expected
    delete(b"/k")
    assert by(world, b"/k") is None


def test_a_command_that_fails_is_not_noted() -> None:
    world = World()
    world.connect(0)
    world.set(0, b"/text", b"no number")
    world.history.clock.now = 9.0
    with pytest.raises(ProtocolError):
        world.add(0, b"/text")
    assert by(world, b"/text") == (0, 0.0)


def members(world: World) -> dict[str, list[int]]:
    """By counter: the clients that are known to have come, whether they are connected or not."""
    facts = world.facts()
    clients = {one.id: one.port - 20_000 for one in facts.sessions}
    clients.update({one.id: one.port - 20_000 for one in facts.departed.values()})
    return {key: sorted(clients[one] for one in set(counter.members)) for key, counter in facts.counters.items()}


def test_barriers_are_forgotten_in_steps() -> None:
    store = Store(Limits(budget_bytes=64 * MIB))
    history = History(store)
    store.observe(history)
    peer = ServerSession(store, None, "h", 1, 0.0)
    peer.receive(HANDSHAKE)
    for number in range(900):
        peer.receive(add(b"%d/num_members" % number, 1))
    store.keyspace.portion = 100
    number = 0
    for _ in range(2):  # all have come since nothing was forgotten
        while not store.keyspace.work:
            peer.receive(set_(b"key %d" % number, b""))
            number += 1
        while store.keyspace.work:
            before = len(history.barriers)
            store.keyspace.step()
            assert before - len(history.barriers) <= 100
    assert not history.barriers


def test_who_has_come_to_a_barrier() -> None:
    world = World()
    for client in range(4):
        world.connect(client)
    world.store_based_barrier([0, 1])
    world.add(0, b"/store_based_barrier_key:default_pg", 0)
    world.barrier(2, b"/b", 3)
    world.add(3, b"/e/num_members")
    assert members(world) == {
        "init/": [0, 1, 2, 3],
        "/store_based_barrier_key:default_pg": [0, 1],
        "/b": [2],
        "/e/num_members": [3],
    }
    counters = world.facts().counters
    assert {key: (one.value, one.expected) for key, one in counters.items()} == {
        "init/": (4, 0),
        "/store_based_barrier_key:default_pg": (2, 0),
        "/b": (1, 3),
        "/e/num_members": (1, 0),
    }
    world.set(0, b"/store_based_barrier_key:default_pg:last_worker")
    world.set(0, b"/e/last_member")
    world.add(1, b"/c/num_members")
    assert members(world) == {"init/": [0, 1, 2, 3], "/b": [2], "/c/num_members": [1]}
    world.set(1, b"/c/last_members")
    world.barrier(3, b"/b", 2)
    world.delete(0, b"init/")
    assert members(world) == {}
    assert not world.history.barriers


def test_who_has_come_and_left_or_given_up() -> None:
    """It is known even when their sessions cannot tell any more, until the barrier is open."""
    world = World()
    for client in range(5):
        world.connect(client)
    for client in range(3):
        world.barrier(client, b"/b", 4)
    world.store_based_barrier([3])
    world.leave(0)
    world.send(1, b"\x0c")
    world.leave(3)
    assert members(world) == {
        "init/": [0, 1, 2, 3, 4],
        "/b": [0, 1, 2],
        "/store_based_barrier_key:default_pg": [3],
    }
    world.barrier(1, b"/b", 9)
    assert members(world)["/b"] == [0, 1, 2]
    world.barrier(4, b"/b", 4)
    world.set(4, b"/store_based_barrier_key:default_pg:last_worker")
    assert set(members(world)) == {"init/"}
    assert set(world.history.barriers) == {b"init/"}


def test_joins_with_a_token() -> None:
    world = World()
    for client in range(3):
        world.connect(client, joins=False)
        world.send(client, b"\x48" + blob(b"init/") + blob(b"token%d" % client))
    world.leave(1)
    assert members(world) == {"init/": [0, 1, 2]}
    assert world.history.last_write(b"init/") is not None


def test_joining_with_add_counts_as_before() -> None:
    """That a session has joined is noted where joins with a token are, and must not count as one."""
    world = World()
    world.connect(0)
    world.connect(1, joins=False)
    world.send(1, b"\x48" + blob(b"init/") + blob(b"token"))
    world.leave(0)
    session = world.sessions[1]
    session.receive(b"\x48" + blob(b"init/") + blob(b""))
    assert b"".join(map(bytes, session.out)) == struct.pack("<q", 2)


def test_members_have_a_limit() -> None:
    world = World(most_bytes=16 * 1024)
    world.connect(0, joins=False)
    for number in range(20):
        world.add(0, b"/%d/num_members" % number)
    for client in range(1, 50):
        world.connect(client)
        world.add(client, b"/0/num_members")
    world.barrier(1, b"/b", 9)
    world.leave(1)
    counters = world.facts().counters
    assert counters["/0/num_members"].value == 50
    assert 0 < len(counters["/0/num_members"].members) + len(counters) < 16 * 1024 // 4 // 96
    assert "/b" not in counters
    assert len(counters["init/"].members) == 48, "those who are connected are not noted"


def test_what_is_known_of_keys_is_forgotten_when_it_is_too_much() -> None:
    world = World(most_bytes=16 * 1024)
    world.connect(0)
    for number in range(200):
        world.add(0, b"/%d/num_members" % number)
        world.set(0, b"/%d" % number)
        assert by(world, b"/%d" % number) == (0, 0.0)
        assert world.history.held <= 16 * 1024 + 256 + len(b"/199/num_members")
    assert by(world, b"init/") is None
    assert members(world)["init/"] == [0]
    assert 3 < len(world.history.barriers) < 20
    assert len(world.facts().keys) == 401
    assert [key.by is None for key in world.facts().keys[:50]] == [True] * 50


def test_a_key_that_is_written_again_is_not_forgotten() -> None:
    world = World(most_bytes=8 * 1024)
    world.connect(0)
    for number in range(100):
        world.set(0, b"/%d" % number)
        world.set(0, b"/again")
        assert by(world, b"/again") is not None


def test_a_session_that_has_left_is_remembered_as_long_as_what_it_wrote() -> None:
    world = World(most_bytes=64 * 1024)
    for client in range(300):
        world.connect(client, joins=False)
        world.introduce(client, rank=str(client))
        world.set(client, b"/%d" % client)
        world.leave(client)
        facts = world.facts()
        known = [key for key in facts.keys if key.by is not None]
        assert {key.by for key in known} == set(facts.departed)
        assert [facts.departed[key.by or 0].peer["rank"] for key in known] == [key.key[1:] for key in known]
        assert world.history.held <= 64 * 1024 + 2048
    assert 10 < len(known) < 100


def test_a_session_that_only_reads_is_not_remembered() -> None:
    world = World()
    world.connect(0, joins=False)
    world.wait(0, b"/k")
    world.leave(0)
    assert world.history.held == 0


def test_the_limit_follows_the_budget() -> None:
    store = Store(Limits(budget_bytes=2**30))
    history = History(store)
    store.observe(history)
    session = ServerSession(store, None, "10.0.0.1", 1, 0.0)
    session.receive(HANDSHAKE)
    most = 0
    for number in range(100_000):
        session.receive(b"\x01" + blob(b"/%d" % number) + blob(b""))
        most = max(most, history.held)
    assert 2**24 < most <= 2**25


def test_what_is_remembered_is_counted_in_the_budget() -> None:
    world = World()
    budget = world.store.budget
    for client in range(20):
        world.connect(client)
        world.introduce(client, rank=str(client))
    for client in range(10):
        world.set(client, b"/%d" % client)
        world.add(client, b"/e/num_members")
        world.barrier(client, b"/b", 99)
    for client in range(5):
        world.leave(client)
    held = world.history.held
    others = budget.others
    assert held > 10 * 256 + 5 * 640
    world.delete(5, b"/7")
    world.delete(5, b"/e/num_members")
    assert world.history.held < held
    assert budget.others - others == world.history.held - held
    while world.sessions:
        world.leave(min(world.sessions))
    assert budget.others == world.history.held


def has_come(world: World, number: int) -> None:
    world.connect(number, joins=False)
    world.add(number, b"/e/num_members")


def has_written_and_left(world: World, number: int) -> None:
    world.connect(number, joins=False)
    world.introduce(number, rank=str(number), host="node.of.a.cluster.example")
    world.set(number, b"/%d" % number, b"")
    world.leave(number)


GROWING: dict[str, Callable[[World, int], None]] = {
    "keys": lambda world, number: world.set(-1, b"/default_pg/0//cpu//0/%d" % number, b""),
    "counters of barriers": lambda world, number: world.add(-1, b"/%d/num_members" % number),
    "who has come": has_come,
    "who has written and left": has_written_and_left,
}


@pytest.mark.parametrize("way", GROWING)
def test_what_is_counted_is_what_it_takes(way: str) -> None:
    """The difference that a history makes to memory, when its tables have just been enlarged."""
    grown = []
    held = 0
    for observed in (False, True):
        world = World()
        if not observed:
            world.store = Store(Limits())
        world.connect(-1, joins=False)
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for number in range(2_800):
                GROWING[way](world, number)
            gc.collect()
            grown.append(tracemalloc.get_traced_memory()[0] - before)
        finally:
            tracemalloc.stop()
        held = world.history.held
    assert grown[1] - grown[0] <= 1.5 * held + 2**14, f"{grown[1] - grown[0]} bytes, and {held} are counted"


def test_a_session_that_has_left_is_described() -> None:
    world = World()
    world.connect(0, joins=False)
    world.introduce(0, rank="7", host="node")
    world.set(0, b"/k")
    world.leave(0)
    facts = world.facts()
    (key,) = facts.keys
    assert key.by is not None
    left = facts.departed[key.by]
    assert (left.host, left.pid, left.peer) == ("10.0.0.1", 1000, {"rank": "7", "host": "node"})
    assert not facts.sessions


def test_what_sessions_wait_for() -> None:
    world = World()
    for client in range(9):
        world.connect(client, joins=False)
    world.history.clock.now = 2.0
    world.wait(0, b"/a", b"/b")
    world.set(8, b"/a")
    world.send(1, b"\x40" + blob(b"/value"))
    world.send(2, b"\x42" + blob(b"init/") + struct.pack("<q", 12))
    world.send(3, b"\x45" + blob(b"/queue") + struct.pack("<q", 1))
    world.barrier(4, b"/barrier", 3)
    names = [b"/list/%d" % number for number in range(6)]
    world.set(8, names[0])
    for client in (5, 6, 7):
        world.wait(client, *names)
    world.history.clock.now = 6.0
    facts = world.facts()
    waits = {one.port - 20_000: one.wait for one in facts.sessions}
    assert waits[0] == Wait("keys", ["/b"])
    assert waits[1] == Wait("value", ["/value"])
    assert waits[2] == Wait("number", ["init/"], target=12)
    assert waits[3] == Wait("item", ["/queue"])
    assert waits[4] == Wait("barrier", ["/barrier"])
    assert waits[8] is None
    groups = {wait.group for client in (5, 6, 7) if (wait := waits[client]) is not None}
    for number in groups:
        assert sorted(facts.groups[number].keys) == [f"/list/{one}" for one in range(1, 6)]
    assert [one.idle for one in facts.sessions] == [4.0] * 9


def test_what_a_replaced_wait_awaited_is_not_waited_for() -> None:
    world = World()
    world.connect(0)
    world.wait(0, b"/a", b"/b")
    world.wait(0, b"/c")
    session = next(one for one in world.facts().sessions if one.port == 20_000)
    assert session.wait is not None
    assert session.wait.keys == ["/c"]


def test_portions_are_small_and_hold_everything() -> None:
    world = World()
    for client in range(2_000):
        world.connect(client)
        world.set(client, b"/k%d" % client)
    lines = world.lines()
    assert max(map(len, lines)) < 200_000
    facts = world.facts()
    assert len(facts.sessions) == 2_000
    assert {key.key for key in facts.keys} == {"init/", *(f"/k{client}" for client in range(2_000))}


def test_portions_of_long_keys_are_small_too() -> None:
    world = World()
    world.connect(0, joins=False)
    for number in range(400):
        world.set(0, b"/%d" % number + bytes(4_000).replace(b"\0", b"k"))
        world.send(0, b"\x0e" + blob(b"/queue %d" % number) + blob(b"item"))
    lines = world.lines()
    assert max(map(len, lines)) < 200_000
    facts = world.facts()
    assert len({key.key for key in facts.keys}) == 800


def test_whatever_bytes_a_key_has() -> None:
    world = World()
    world.connect(0, joins=False)
    for key in (b"/\xff\xfe", b"/\n\x1b[31m", b"", b"/" + bytes(range(256))):
        world.set(0, key)
    world.wait(0, b"\xed\xa0\x80")
    assert len(world.facts().keys) == 4
    assert world.waiting()[0].waiting == 1


def test_a_frame_that_is_not_complete_is_no_command() -> None:
    world = World()
    world.connect(0, joins=False)
    world.send(0, b"\x06" + keys(b"/k")[:-1])
    assert world.facts().sessions[0].wait is None
