"""What keyspaces count, share and refuse. What commands answer is in tests/conformance, as sessions play it.

Waiters are sessions, since a compiled class cannot be subclassed here.
"""

from __future__ import annotations

import random
import sys
import tracemalloc
from collections.abc import Callable

import pytest

from properties.session_driver import session_on, with_store_of
from tcpstore_async.base.errors import LimitError, ProtocolError
from tcpstore_async.base.limits import ENTRY_BYTES, MIB, PARKED_BYTES, QUEUE_BYTES, Limits
from tcpstore_async.keyspace.keyspace import Keyspace
from tcpstore_async.keyspace.waiter_types import IDLE
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store
from tcpstore_async.wire.commands import JOINS_KEY, SERVER_KEY
from tcpstore_async.wire.values import EMPTY, GROWING_BYTES, pack, unpack

WOKEN = b"\0"
Write = Callable[[Keyspace], object]


def heard(session: ServerSession) -> list[bytes]:
    """Return its replies since the last call."""
    said = list(map(bytes, session.out))
    session.out.clear()
    session.unsent = 0
    return said


def nothing_is_left(keyspace: Keyspace) -> bool:
    waiting = keyspace.waiters, keyspace.counters, keyspace.handoffs, keyspace.holes
    return waiting == ({}, {}, {}, {}) and (keyspace.size, keyspace.parked) == (0, 0)


# Values


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


# Waiting


def test_a_wait_that_would_exceed_the_budget_changes_nothing() -> None:
    store = with_store_of(PARKED_BYTES + 1)
    session = session_on(store)
    with pytest.raises(LimitError):
        store.keyspace.wait(session, [b"a", b"b"])
    assert (session.state, session.parked, store.keyspace.waiters, store.keyspace.size) == (IDLE, None, {}, 0)
    assert not store.keyspace.wait(session, [b"a"])


# Queues


def test_a_queue_serves_in_order_of_arrival(store: Store, keyspace: Keyspace) -> None:
    sessions = [session_on(store) for _ in range(40)]  # enough for compaction
    for session in sessions:
        keyspace.wait(session, [b"q"])
    for number, session in enumerate(sessions):
        keyspace.queue_push(b"q", pack(b"%d" % number))
        assert heard(session) == [WOKEN]
        assert not any(map(heard, sessions))
    assert keyspace.handoffs == {b"q": 40}
    assert keyspace.waiters == {}


@pytest.mark.parametrize("enter", [lambda k, w, key: k.wait(w, [key]), lambda k, w, key: k.barrier(w, key, 4)])
def test_peers_that_name_one_key_in_a_row_share_it(
    store: Store, enter: Callable[[Keyspace, ServerSession, bytes], bool]
) -> None:
    parked: list[bytes] = []
    for _ in range(3):
        peer = session_on(store)
        enter(store.keyspace, peer, bytes(bytearray(b"/key")))
        assert peer.parked is not None
        parked += peer.parked
    assert parked == [b"/key"] * 3
    assert len(set(map(id, parked))) == 1


def test_registrations_are_compacted_when_waiters_leave(store: Store, keyspace: Keyspace) -> None:
    """The next push would step over their places."""
    sessions = [session_on(store) for _ in range(1_000)]
    for session in sessions:
        keyspace.wait(session, [b"q"])
    for session in sessions[:-5]:
        session.leave()
    assert sys.getsizeof(keyspace.waiters[b"q"]) <= sys.getsizeof(dict.fromkeys(range(40)))
    for session in sessions[-5:]:
        keyspace.queue_push(b"q", EMPTY)
        assert [other for other in sessions if heard(other)] == [session]
    assert keyspace.waiters == {}


# Size


def test_everything_counts_bytes(store: Store, keyspace: Keyspace) -> None:
    keyspace.set(b"key", pack(b"value"))
    assert keyspace.size == ENTRY_BYTES + 3 + 13
    keyspace.set(b"key", pack(b""))
    assert keyspace.size == ENTRY_BYTES + 3 + 8
    keyspace.queue_push(b"q", pack(b"12"))
    assert keyspace.size == 2 * ENTRY_BYTES + 3 + 8 + QUEUE_BYTES + 1 + 10
    session = session_on(store)
    keyspace.wait(session, [b"k", b"k", b"long"])
    assert keyspace.size == 2 * ENTRY_BYTES + 3 + 8 + QUEUE_BYTES + 1 + 10 + 2 * PARKED_BYTES + 5
    session.leave()
    keyspace.queue_pop(b"q")
    keyspace.delete_key(b"key")
    assert keyspace.size == 0


@pytest.mark.parametrize("write", [
    lambda k: k.set(b"k", pack(b"v")),
    lambda k: k.append(b"k", pack(b"v")),
    lambda k: k.queue_push(b"k", EMPTY),
    lambda k: k.compare_set(b"k", EMPTY, pack(b"v")),
    lambda k: k.add(b"n", 1),
    lambda k: k.multi_set([(b"k", EMPTY), (b"j", EMPTY)]),
])  # fmt: skip
def test_a_full_store_refuses_and_does_not_change(write: Write) -> None:
    keyspace = Keyspace(Limits())
    keyspace.max_size = ENTRY_BYTES + 1 + 8
    keyspace.set(b"k", EMPTY)
    size = keyspace.size
    with pytest.raises(LimitError) as error:
        write(keyspace)
    assert (error.value.limit, error.value.allowed) == ("budget_bytes", ENTRY_BYTES + 1 + 8)
    assert (keyspace.size, unpack(keyspace.get(b"k")), keyspace.num_keys(), keyspace.queues) == (size, b"", 1, {})


# Fetching


def test_a_value_under_append_is_copied_once_for_all_fetches(store: Store, keyspace: Keyspace) -> None:
    sessions = [session_on(store) for _ in range(50)]
    for session in sessions:
        keyspace.fetch(session, b"k")
    keyspace.barrier(session_on(store), b"k", 9)  # creates the key and wakes no waiter
    keyspace.append(b"k", pack(bytes(MIB)))
    assert len({id(session.out[1]) for session in sessions}) == 1
    assert b"".join(heard(sessions[0])) == pack(b"1" + bytes(MIB))


# Waiting for a number


def test_waiters_of_one_number_are_woken_in_order_of_arrival(store: Store, keyspace: Keyspace) -> None:
    sessions = [session_on(store) for _ in range(20)]
    for session in sessions:
        keyspace.wait_count(session, b"n", 1)
    sessions.pop(7).leave()
    keyspace.add(b"n", 1)
    assert store.hub.pending_flush == sessions


def test_a_write_looks_at_one_of_many_targets(store: Store, keyspace: Keyspace) -> None:
    """What a write touches is one registration and the top of a heap, however many wait."""
    count = 10_000
    sessions = [session_on(store) for _ in range(count)]
    order = list(range(1, count + 1))
    random.Random(1).shuffle(order)
    for session, target in zip(sessions, order, strict=True):
        keyspace.wait_count(session, b"n", target)
    counter = keyspace.counters[b"n"]
    assert len(keyspace.waiters[b"n"]) == 1
    for total in range(1, count + 1):
        assert keyspace.add(b"n", 1) == total
        assert len(store.hub.pending_flush) == 1
        assert len(counter.targets) == len(counter.awaiting) == count - total
        assert total == count or len(keyspace.waiters[b"n"]) == 1
        store.hub.pending_flush.clear()
    assert all(heard(session) == [WOKEN] for session in sessions)
    keyspace.delete_key(b"n")
    assert nothing_is_left(keyspace)


def test_new_targets_cost_no_memory(store: Store, keyspace: Keyspace) -> None:
    others = [session_on(store) for _ in range(10)]
    for number, other in enumerate(others):
        keyspace.wait_count(other, b"n", 2**40 + number)
    session = session_on(store)
    size = keyspace.size
    counter = keyspace.counters[b"n"]
    most = 0
    tracemalloc.start()
    try:
        for number in range(20_000):
            keyspace.wait_count(session, b"n", 10 + number)
            keyspace.cancel_wait(session)
            most = max(most, len(counter.targets))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most <= 2 * 11 + 17
    assert len(counter.awaiting) == 10
    assert used < 64 * 1024
    assert keyspace.size == size
    keyspace.add(b"n", 2**40 + 9)
    assert all(heard(other) == [WOKEN] for other in others)
    assert heard(session) == []


# Reserved keys


def _reserved(store: Store) -> Keyspace:
    store.identify(b"who")
    store.announce(12)
    return store.keyspace


def test_reserved_keys_exist(store: Store) -> None:
    keyspace = _reserved(store)
    session = session_on(store)
    assert (keyspace.get(SERVER_KEY), keyspace.get(JOINS_KEY)) == (pack(b"who"), pack(b"12"))
    assert keyspace.multi_get([JOINS_KEY, b"k", SERVER_KEY]) == [pack(b"12"), EMPTY, pack(b"who")]
    assert keyspace.check([SERVER_KEY, JOINS_KEY])
    assert not keyspace.check([SERVER_KEY, b"k"])
    assert keyspace.wait(session, [SERVER_KEY, JOINS_KEY])
    assert keyspace.fetch(session, SERVER_KEY) == pack(b"who")
    assert keyspace.wait_count(session, JOINS_KEY, 12)
    assert not keyspace.wait(session, [SERVER_KEY, b"k"])
    assert session.parked == {b"k": None}


def test_reserved_keys_are_no_keys_of_the_store(store: Store) -> None:
    keyspace = _reserved(store)
    assert (keyspace.num_keys(), keyspace.list_keys(), keyspace.size) == (0, [], 0)
    assert (keyspace.delete_key(SERVER_KEY), keyspace.delete_key(JOINS_KEY)) == (0, 0)
    assert keyspace.get(SERVER_KEY) == pack(b"who")
    store.announce(13)
    assert keyspace.get(JOINS_KEY) == pack(b"13")


def test_no_joins_are_announced_without_an_owner(store: Store, keyspace: Keyspace) -> None:
    assert not keyspace.check([JOINS_KEY])
    assert keyspace.get(JOINS_KEY) == EMPTY


def test_a_push_to_a_reserved_key_evicts_nobody() -> None:
    """It is refused before others are evicted for it: whatever can refuse does so before the first change."""
    store = Store(Limits())
    store.identify(b"{}")
    asked: list[int] = []
    store.keyspace.on_full = asked.append
    store.keyspace.max_size = 0
    with pytest.raises(ProtocolError, match="is read-only"):
        store.keyspace.queue_push(SERVER_KEY, pack(b"item"))
    assert asked == []
    assert not store.keyspace.queues


def test_no_queue_has_a_reserved_name(store: Store) -> None:
    keyspace = _reserved(store)
    with pytest.raises(ProtocolError, match="is read-only"):
        keyspace.queue_push(SERVER_KEY, pack(b"item"))
    assert (keyspace.queue_len(SERVER_KEY), keyspace.size) == (0, 0)
    assert keyspace.queue_pop(SERVER_KEY) == (0, None)
    assert keyspace.lease(session_on(store), SERVER_KEY, 1) == (0, None)


def test_a_wait_for_a_reserved_number_ends(store: Store) -> None:
    store.announce(2)
    few, many = session_on(store), session_on(store)
    assert store.keyspace.wait_count(few, JOINS_KEY, 2)
    assert not store.keyspace.wait_count(few, JOINS_KEY, 4)
    assert not store.keyspace.wait_count(many, JOINS_KEY, 9)
    store.announce(3)
    assert not store.hub.pending_flush
    store.announce(4)
    assert store.hub.pending_flush == [few]
    store.announce(0)
    assert store.hub.pending_flush == [few, many]
    assert store.keyspace.wait_count(few, JOINS_KEY, 5)
    assert (store.keyspace.counters, store.keyspace.waiters, store.keyspace.size) == ({}, {}, 0)


# The size of the store


def test_waiters_count_bytes(store: Store, keyspace: Keyspace) -> None:
    fetching, first, second = session_on(store), session_on(store), session_on(store)
    keyspace.fetch(fetching, b"key")
    assert keyspace.size == PARKED_BYTES + 3
    keyspace.wait_count(first, b"n", 1)
    assert keyspace.size == PARKED_BYTES + 3 + 2 * (PARKED_BYTES + 1)
    keyspace.wait_count(second, b"n", 2)
    assert keyspace.size == PARKED_BYTES + 3 + 3 * (PARKED_BYTES + 1)
    keyspace.add(b"n", 1)
    assert keyspace.size == PARKED_BYTES + 3 + 2 * (PARKED_BYTES + 1) + ENTRY_BYTES + 1 + 8
    second.leave()
    fetching.leave()
    keyspace.delete_key(b"n")
    assert nothing_is_left(keyspace)


@pytest.mark.parametrize("command", ["fetch", "wait_count", "wait_count of more"])
def test_a_wait_that_does_not_fit_changes_nothing(command: str) -> None:
    store = with_store_of(10_000)
    keyspace = store.keyspace
    session, early = session_on(store), session_on(store)
    if command == "wait_count of more":
        keyspace.wait_count(early, b"n", 1)
    needed = (PARKED_BYTES + 1) * (2 if command == "wait_count" else 1)
    keyspace.set(b"filling", pack(bytes(10_001 - needed - keyspace.size - ENTRY_BYTES - 7 - 8)))
    before = session.parked, session.state, session.group, keyspace.size, len(keyspace.counters)
    with pytest.raises(LimitError) as error:
        if command == "fetch":
            keyspace.fetch(session, b"n")
        else:
            keyspace.wait_count(session, b"n", 5)
    assert (error.value.limit, error.value.size) == ("budget_bytes", 10_001)
    after = session.parked, session.state, session.group, keyspace.size, len(keyspace.counters)
    assert after == before
    keyspace.set(b"filling", EMPTY)
    assert not keyspace.wait_count(session, b"n", 5)
    session.leave()
    early.leave()
    assert (keyspace.waiters, keyspace.counters) == ({}, {})


@pytest.mark.unmeasured
def test_a_forked_process_forgets_all_waiters(store: Store, keyspace: Keyspace) -> None:
    keyspace.wait(session_on(store), [b"%d" % number for number in range(5)])
    keyspace.wait_count(session_on(store), b"n", 1)
    keyspace.forget_waiters()
    assert nothing_is_left(keyspace)


def test_a_wait_for_a_number_that_has_fallen_while_its_waiters_are_woken(store: Store, keyspace: Keyspace) -> None:
    """It begins when they have been woken, and does not end with them."""
    keyspace.portion = 1
    sessions = [session_on(store) for _ in range(5)]
    for session in sessions:
        keyspace.wait_count(session, b"k", 10)
    keyspace.add(b"k", 10)
    keyspace.add(b"k", -10)
    late = session_on(store)
    assert not keyspace.wait_count(late, b"k", 10)
    postponed = keyspace.running
    keyspace.running = None
    assert postponed is not None
    assert not postponed.step()
    while keyspace.working:
        keyspace.step()
    assert postponed.step()
    assert postponed.result is False
    assert heard(late) == []
    keyspace.add(b"k", 10)
    assert heard(late) == [b"\0"]
