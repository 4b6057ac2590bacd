"""The semantics of commands. Waiters are sessions, since a compiled class cannot be subclassed here."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable

import pytest

from properties.session_driver import with_store_of
from tcpstore_async.base.errors import LimitError, ProtocolError
from tcpstore_async.base.limits import ENTRY_BYTES, MIB, PARKED_BYTES, QUEUE_BYTES, Limits
from tcpstore_async.keyspace.keyspace import Keyspace
from tcpstore_async.keyspace.waiter_types import IDLE
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store
from tcpstore_async.wire.values import EMPTY, GROWING_BYTES, pack, unpack


@pytest.fixture
def store() -> Store:
    return Store(Limits())


@pytest.fixture
def keyspace(store: Store) -> Keyspace:
    return store.keyspace


def waiter(store: Store) -> ServerSession:
    return ServerSession(store, None, "::1", 1, 0.0)


def woken(session: ServerSession) -> int:
    """Return how often it was woken since the last call."""
    count = len(session.out)
    session.out.clear()
    return count


# Values


def test_set_get_delete(keyspace: Keyspace) -> None:
    assert keyspace.get(b"k") == EMPTY
    keyspace.set(b"k", pack(b"v"))
    assert keyspace.get(b"k") == pack(b"v")
    assert (keyspace.num_keys(), keyspace.list_keys()) == (1, [b"k"])
    assert (keyspace.delete_key(b"k"), keyspace.delete_key(b"k")) == (1, 0)
    assert (keyspace.num_keys(), keyspace.size) == (0, 0)


@pytest.mark.parametrize(("stored", "expected", "desired", "reply", "left"), [
    (None, b"", b"new", b"new", b"new"),
    (None, b"x", b"new", b"x", None),
    (b"old", b"old", b"new", b"new", b"new"),
    (b"old", b"x", b"new", b"old", b"old"),
    (b"", b"", b"new", b"new", b"new"),
    (b"old", b"", b"new", b"old", b"old"),
])  # fmt: skip
def test_compare_set(
    keyspace: Keyspace, stored: bytes | None, expected: bytes, desired: bytes, reply: bytes, left: bytes | None
) -> None:
    if stored is not None:
        keyspace.set(b"k", pack(stored))
    assert keyspace.compare_set(b"k", pack(expected), pack(desired)) == pack(reply)
    assert keyspace.check([b"k"]) == (left is not None)
    assert keyspace.get(b"k") == pack(left or b"")


def test_compare_set_compares_counters_and_large_values_as_text(keyspace: Keyspace) -> None:
    keyspace.add(b"n", 41)
    assert keyspace.compare_set(b"n", pack(b"41"), bytearray(pack(b"a"))) == pack(b"a")
    assert keyspace.compare_set(b"n", pack(b"a"), pack(b"b")) == pack(b"b")


def test_add(keyspace: Keyspace) -> None:
    assert keyspace.add(b"n", 5) == 5
    assert keyspace.add(b"n", -7) == -2
    assert keyspace.get(b"n") == pack(b"-2")
    keyspace.set(b"n", pack(b" +12abc"))
    assert keyspace.add(b"n", 1) == 13
    keyspace.set(b"n", pack(b"%d" % (2**63 - 1)))
    assert keyspace.add(b"n", 1) == -(2**63)
    assert keyspace.add(b"n", -1) == 2**63 - 1


def test_add_to_what_is_no_number_changes_nothing(keyspace: Keyspace) -> None:
    keyspace.set(b"n", pack(b"abc"))
    with pytest.raises(ProtocolError):
        keyspace.add(b"n", 1)
    assert keyspace.get(b"n") == pack(b"abc")


def test_append_to_every_form(keyspace: Keyspace) -> None:
    keyspace.append(b"missing", pack(b""))
    assert keyspace.check([b"missing"])
    keyspace.add(b"n", 12)
    keyspace.append(b"n", pack(b"3"))
    assert keyspace.add(b"n", 1) == 124
    for piece in (b"a", b"b", b"", b"c"):
        keyspace.append(b"k", pack(piece))
    assert keyspace.get(b"k") == pack(b"abc")
    keyspace.append(b"k", bytearray(pack(b"d")))
    assert keyspace.get(b"k") == pack(b"abcd")


def test_a_value_that_was_read_does_not_change_by_appending(keyspace: Keyspace) -> None:
    keyspace.append(b"k", pack(b"a"))
    keyspace.append(b"k", pack(b"b"))
    reply = keyspace.get(b"k")
    keyspace.append(b"k", pack(b"c"))
    assert reply == pack(b"ab")


def test_many_appends_do_not_copy_what_was_there(keyspace: Keyspace) -> None:
    keyspace.set(b"k", pack(bytes(4 * MIB)))
    keyspace.append(b"k", pack(b"x"))
    piece = pack(b"y")
    tracemalloc.start()
    try:
        for _ in range(100):
            keyspace.append(b"k", piece)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6 * MIB
    assert keyspace.size == ENTRY_BYTES + GROWING_BYTES + 1 + 8 + 4 * MIB + 101


def test_multi(keyspace: Keyspace) -> None:
    keyspace.multi_set([(b"a", pack(b"1")), (b"b", pack(b"2")), (b"a", pack(b"3"))])
    assert keyspace.multi_get([b"a", b"missing", b"b", b"a"]) == [pack(b"3"), EMPTY, pack(b"2"), pack(b"3")]


# Waiting


def test_a_wait_ends_once(store: Store, keyspace: Keyspace) -> None:
    session = waiter(store)
    assert not keyspace.wait(session, [b"a", b"b"])
    keyspace.set(b"a", EMPTY)
    keyspace.delete_key(b"a")
    assert not woken(session)
    keyspace.set(b"b", EMPTY)
    keyspace.set(b"b", EMPTY)
    keyspace.set(b"a", EMPTY)
    assert woken(session) == 1
    assert session.parked is None


def test_a_key_named_twice_is_registered_once(store: Store, keyspace: Keyspace) -> None:
    session = waiter(store)
    keyspace.wait(session, [b"a", b"a", b"b"])
    assert session.parked == {b"a": None, b"b": None}
    keyspace.set(b"a", EMPTY)
    assert not woken(session)
    keyspace.set(b"b", EMPTY)
    assert woken(session) == 1


def test_a_second_wait_replaces_the_first(store: Store, keyspace: Keyspace) -> None:
    session = waiter(store)
    keyspace.wait(session, [b"k"])
    keyspace.wait(session, [b"j"])
    assert session.parked == {b"j": None}
    keyspace.set(b"k", EMPTY)
    assert not woken(session)
    keyspace.set(b"j", EMPTY)
    assert woken(session) == 1
    assert keyspace.waiters == {}


def test_cancel_drops_every_registration(store: Store, keyspace: Keyspace) -> None:
    session = waiter(store)
    assert keyspace.cancel_wait(session)
    keyspace.wait(session, [b"a", b"b"])
    assert keyspace.cancel_wait(session)
    keyspace.set(b"a", EMPTY)
    keyspace.set(b"b", EMPTY)
    assert not woken(session)
    assert keyspace.waiters == {}


@pytest.mark.parametrize("expected", [b"x", b""])
def test_a_failed_compare_set_wakes_nobody(store: Store, keyspace: Keyspace, expected: bytes) -> None:
    session = waiter(store)
    keyspace.wait(session, [b"k"])
    if not expected:
        keyspace.barrier(waiter(store), b"k", 9)  # stores without waking
    keyspace.compare_set(b"k", pack(expected), pack(b"new"))
    assert not woken(session)


def test_a_wait_that_would_exceed_the_budget_changes_nothing() -> None:
    store = with_store_of(PARKED_BYTES + 1)
    session = waiter(store)
    with pytest.raises(LimitError):
        store.keyspace.wait(session, [b"a", b"b"])
    assert (session.state, session.parked, store.keyspace.waiters, store.keyspace.size) == (IDLE, None, {}, 0)
    assert not store.keyspace.wait(session, [b"a"])


# Barriers


def test_barrier(store: Store, keyspace: Keyspace) -> None:
    first, second, third = (waiter(store) for _ in range(3))
    assert not keyspace.barrier(first, b"b", 3)
    assert not keyspace.barrier(second, b"b", 3)
    assert keyspace.get(b"b") == pack(b"2")
    assert keyspace.barrier(third, b"b", 3)
    assert (woken(first), woken(second), woken(third)) == (1, 1, 0)
    assert keyspace.barrier(first, b"b", 3)
    assert keyspace.get(b"b") == pack(b"4")


def test_an_incomplete_barrier_creates_the_key_but_wakes_nobody(store: Store, keyspace: Keyspace) -> None:
    early, late = waiter(store), waiter(store)
    keyspace.wait(early, [b"b"])
    keyspace.barrier(waiter(store), b"b", 2)
    assert not woken(early)
    assert keyspace.wait(late, [b"b"])


def test_a_peer_that_leaves_a_barrier_stays_counted(store: Store, keyspace: Keyspace) -> None:
    gone = waiter(store)
    keyspace.barrier(gone, b"b", 2)
    gone.leave()
    assert keyspace.barrier(waiter(store), b"b", 2)


def test_a_barrier_on_what_is_no_number_changes_nothing(store: Store, keyspace: Keyspace) -> None:
    keyspace.set(b"b", pack(b"x"))
    with pytest.raises(ProtocolError):
        keyspace.barrier(waiter(store), b"b", 2)
    assert keyspace.get(b"b") == pack(b"x")
    assert keyspace.waiters == {}


# Queues


def test_queue(keyspace: Keyspace) -> None:
    assert (keyspace.queue_pop(b"q"), keyspace.queue_len(b"q")) == ((0, None), 0)
    keyspace.queue_push(b"q", pack(b"1"))
    keyspace.queue_push(b"q", pack(b"2"))
    assert keyspace.queue_len(b"q") == 2
    assert not keyspace.num_keys()
    assert not keyspace.delete_key(b"q")
    assert keyspace.check([b"q"])
    assert keyspace.queue_pop(b"q") == (2, pack(b"1"))
    assert keyspace.queue_pop(b"q") == (1, pack(b"2"))
    assert not keyspace.check([b"q"])
    assert keyspace.size == 0


def test_a_queue_serves_in_order_of_arrival(store: Store, keyspace: Keyspace) -> None:
    sessions = [waiter(store) for _ in range(40)]  # enough for compaction
    for session in sessions:
        keyspace.wait(session, [b"q"])
    for number, session in enumerate(sessions):
        keyspace.queue_push(b"q", pack(b"%d" % number))
        assert [woken(other) for other in sessions if other is session] == [1]
        assert not any(map(woken, sessions))
    assert keyspace.handoffs == {b"q": 40}
    assert keyspace.waiters == {}


def test_a_served_waiter_registers_behind_the_others(store: Store, keyspace: Keyspace) -> None:
    """Q1."""
    a, b = waiter(store), waiter(store)
    keyspace.wait(a, [b"q"])
    keyspace.wait(b, [b"q"])
    keyspace.queue_push(b"q", pack(b"1"))
    assert woken(a)
    keyspace.queue_pop(b"q")
    keyspace.wait(a, [b"q"])
    keyspace.queue_push(b"q", pack(b"2"))
    assert (woken(a), woken(b)) == (0, 1)


def test_a_served_waiter_is_not_woken_for_another_key(store: Store, keyspace: Keyspace) -> None:
    """Q2."""
    a, b = waiter(store), waiter(store)
    keyspace.wait(a, [b"q"])
    keyspace.queue_push(b"q", pack(b"1"))
    assert woken(a)
    keyspace.queue_pop(b"q")
    keyspace.wait(a, [b"other"])
    keyspace.wait(b, [b"q"])
    keyspace.queue_push(b"q", pack(b"2"))
    assert (woken(a), woken(b)) == (0, 1)
    keyspace.set(b"other", EMPTY)
    assert woken(a)


def test_a_queue_that_holds_items_is_not_awaited(store: Store, keyspace: Keyspace) -> None:
    """Q3."""
    a = waiter(store)
    keyspace.queue_push(b"q", pack(b"1"))
    keyspace.wait(a, [b"q", b"k"])
    keyspace.set(b"k", EMPTY)
    assert woken(a)


def test_an_item_that_a_woken_waiter_leaves_wakes_the_next(store: Store, keyspace: Keyspace) -> None:
    """Q4."""
    a, b, c = (waiter(store) for _ in range(3))
    for session in (a, b, c):
        keyspace.wait(session, [b"q"])
    keyspace.queue_push(b"q", pack(b"1"))
    assert woken(a)
    a.leave()
    assert (woken(b), woken(c)) == (1, 0)
    b.leave()
    assert woken(c)
    c.leave()
    assert (keyspace.handoffs, keyspace.waiters, keyspace.queue_len(b"q")) == ({}, {}, 1)


def test_a_push_counts_down_waiters_that_await_more(store: Store, keyspace: Keyspace) -> None:
    a, b = waiter(store), waiter(store)
    keyspace.wait(a, [b"q", b"k"])
    keyspace.wait(b, [b"q"])
    keyspace.queue_push(b"q", pack(b"1"))
    assert (woken(a), woken(b)) == (0, 1)
    keyspace.set(b"k", EMPTY)
    assert woken(a)


def test_set_of_a_queues_name_wakes_all_its_waiters(store: Store, keyspace: Keyspace) -> None:
    a, b = waiter(store), waiter(store)
    keyspace.wait(a, [b"q"])
    keyspace.wait(b, [b"q"])
    keyspace.set(b"q", EMPTY)
    assert (woken(a), woken(b)) == (1, 1)
    assert keyspace.queue_pop(b"q") == (0, None)
    assert keyspace.handoffs == {}


@pytest.mark.parametrize("enter", [lambda k, w, key: k.wait(w, [key]), lambda k, w, key: k.barrier(w, key, 4)])
def test_peers_that_name_one_key_in_a_row_share_it(
    store: Store, enter: Callable[[Keyspace, ServerSession, bytes], bool]
) -> None:
    parked: list[bytes] = []
    for _ in range(3):
        peer = waiter(store)
        enter(store.keyspace, peer, bytes(bytearray(b"/key")))
        assert peer.parked is not None
        parked += peer.parked
    assert parked == [b"/key"] * 3
    assert len(set(map(id, parked))) == 1


def test_registrations_are_compacted_when_waiters_leave(store: Store, keyspace: Keyspace) -> None:
    """The next push would step over their places."""
    sessions = [waiter(store) for _ in range(1_000)]
    for session in sessions:
        keyspace.wait(session, [b"q"])
    for session in sessions[:-5]:
        session.leave()
    assert sys.getsizeof(keyspace.waiters[b"q"]) <= sys.getsizeof(dict.fromkeys(range(40)))
    for session in sessions[-5:]:
        keyspace.queue_push(b"q", EMPTY)
        assert [other for other in sessions if woken(other)] == [session]
    assert keyspace.waiters == {}


# Size


def test_everything_counts_bytes(store: Store, keyspace: Keyspace) -> None:
    keyspace.set(b"key", pack(b"value"))
    assert keyspace.size == ENTRY_BYTES + 3 + 13
    keyspace.set(b"key", pack(b""))
    assert keyspace.size == ENTRY_BYTES + 3 + 8
    keyspace.queue_push(b"q", pack(b"12"))
    assert keyspace.size == 2 * ENTRY_BYTES + 3 + 8 + QUEUE_BYTES + 1 + 10
    session = waiter(store)
    keyspace.wait(session, [b"k", b"k", b"long"])
    assert keyspace.size == 2 * ENTRY_BYTES + 3 + 8 + QUEUE_BYTES + 1 + 10 + 2 * PARKED_BYTES + 5
    session.leave()
    keyspace.queue_pop(b"q")
    keyspace.delete_key(b"key")
    assert keyspace.size == 0


@pytest.mark.parametrize("command", ["set", "append", "queue_push", "compare_set", "add", "multi_set"])
def test_a_full_store_refuses_and_does_not_change(command: str) -> None:
    keyspace = Keyspace(Limits())
    keyspace.max_size = ENTRY_BYTES + 1 + 8
    keyspace.set(b"k", EMPTY)
    size = keyspace.size
    with pytest.raises(LimitError) as error:
        match command:
            case "set":
                keyspace.set(b"k", pack(b"v"))
            case "append":
                keyspace.append(b"k", pack(b"v"))
            case "queue_push":
                keyspace.queue_push(b"k", EMPTY)
            case "compare_set":
                keyspace.compare_set(b"k", EMPTY, pack(b"v"))
            case "add":
                keyspace.add(b"n", 1)
            case _:
                keyspace.multi_set([(b"k", EMPTY), (b"j", EMPTY)])
    assert (error.value.limit, error.value.allowed) == ("budget_bytes", ENTRY_BYTES + 1 + 8)
    assert (keyspace.size, unpack(keyspace.get(b"k")), keyspace.num_keys(), keyspace.queues) == (size, b"", 1, {})
