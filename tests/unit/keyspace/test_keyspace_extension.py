"""The semantics of the extension's commands: deferred values, numbers that are reached, reserved keys."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable

import pytest

from properties.session_driver import with_store_of
from tcpstore_async.base.errors import LimitError, ProtocolError
from tcpstore_async.base.limits import ENTRY_BYTES, MIB, PARKED_BYTES, Limits
from tcpstore_async.keyspace.keyspace import Keyspace
from tcpstore_async.keyspace.waiter_types import AWAITING_VALUE, IDLE
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store
from tcpstore_async.wire.commands import JOINS_KEY, SERVER_KEY
from tcpstore_async.wire.values import ABSENT, EMPTY, pack

WOKEN = b"\0"
Write = Callable[[Keyspace], object]


@pytest.fixture
def store() -> Store:
    return Store(Limits())


@pytest.fixture
def keyspace(store: Store) -> Keyspace:
    return store.keyspace


def waiter(store: Store) -> ServerSession:
    return ServerSession(store, None, "::1", 1, 0.0)


def heard(session: ServerSession) -> list[bytes]:
    """Return its replies since the last call."""
    said = list(map(bytes, session.out))
    session.out.clear()
    session.unsent = 0
    return said


def nothing_is_left(keyspace: Keyspace) -> bool:
    waiting = keyspace.waiters, keyspace.counters, keyspace.handoffs, keyspace.holes
    return waiting == ({}, {}, {}, {}) and (keyspace.size, keyspace.parked) == (0, 0)


# Fetching

WRITES: dict[str, tuple[Write, bytes]] = {
    "set": (lambda k: k.set(b"k", pack(b"v")), b"v"),
    "set of a large value": (lambda k: k.set(b"k", bytearray(pack(bytes(8 * MIB)))), bytes(8 * MIB)),
    "set of the empty value": (lambda k: k.set(b"k", EMPTY), b""),
    "add": (lambda k: k.add(b"k", -7), b"-7"),
    "append": (lambda k: k.append(b"k", pack(b"v")), b"v"),
    "compare_set": (lambda k: k.compare_set(b"k", EMPTY, pack(b"v")), b"v"),
    "multi_set": (lambda k: k.multi_set([(b"j", EMPTY), (b"k", pack(b"v"))]), b"v"),
    "multi_set, twice": (lambda k: k.multi_set([(b"k", pack(b"1")), (b"k", pack(b"2"))]), b"2"),
    "queue_push": (lambda k: k.queue_push(b"k", pack(b"item")), b""),
}


@pytest.mark.parametrize("how", WRITES)
def test_a_fetched_value_is_sent_when_it_appears(store: Store, keyspace: Keyspace, how: str) -> None:
    write, value = WRITES[how]
    first, second, other = waiter(store), waiter(store), waiter(store)
    assert keyspace.fetch(first, b"k") is None
    assert keyspace.fetch(second, b"k") is None
    assert keyspace.fetch(other, b"elsewhere") is None
    write(keyspace)
    assert (heard(first), heard(second), heard(other)) == ([pack(value)], [pack(value)], [])
    write(keyspace)
    assert (heard(first), heard(second)) == ([], [])
    assert (first.parked, first.state, first.handoff) == (None, IDLE, None)
    assert store.hub.pending_flush.count(first) == 1


@pytest.mark.parametrize("how", WRITES)
def test_an_existing_value_is_fetched_at_once(store: Store, keyspace: Keyspace, how: str) -> None:
    write, _ = WRITES[how]
    write(keyspace)
    session = waiter(store)
    assert keyspace.fetch(session, b"k") == keyspace.get(b"k")
    assert (session.parked, session.state, keyspace.waiters) == (None, IDLE, {})


def test_a_large_fetched_value_is_not_copied(store: Store, keyspace: Keyspace) -> None:
    sessions = [waiter(store) for _ in range(50)]
    for session in sessions:
        keyspace.fetch(session, b"k")
    keyspace.set(b"k", pack(bytes(MIB)))
    assert all(session.out[0] is keyspace.values[b"k"] for session in sessions)


def test_a_value_under_append_is_copied_once_for_all_fetches(store: Store, keyspace: Keyspace) -> None:
    sessions = [waiter(store) for _ in range(50)]
    for session in sessions:
        keyspace.fetch(session, b"k")
    keyspace.barrier(waiter(store), b"k", 9)  # creates the key and wakes no waiter
    keyspace.append(b"k", pack(bytes(MIB)))
    assert len({id(session.out[1]) for session in sessions}) == 1
    assert b"".join(heard(sessions[0])) == pack(b"1" + bytes(MIB))


def test_an_arrival_at_a_barrier_ends_no_fetch_but_its_completion_does(store: Store, keyspace: Keyspace) -> None:
    """As for WAIT."""
    session = waiter(store)
    keyspace.fetch(session, b"b")
    keyspace.barrier(waiter(store), b"b", 2)
    assert heard(session) == []
    keyspace.barrier(waiter(store), b"b", 2)
    assert heard(session) == [pack(b"2")]


def test_a_deleted_key_is_still_awaited(store: Store, keyspace: Keyspace) -> None:
    session = waiter(store)
    keyspace.set(b"k", pack(b"1"))
    keyspace.delete_key(b"k")
    keyspace.fetch(session, b"k")
    keyspace.delete_key(b"k")
    keyspace.set(b"k", pack(b"2"))
    keyspace.delete_key(b"k")
    assert heard(session) == [pack(b"2")]
    assert keyspace.fetch(session, b"k") is None


@pytest.mark.parametrize("again", ["fetch", "wait", "barrier", "wait_count"])
def test_other_waits_during_a_fetch(store: Store, keyspace: Keyspace, again: str) -> None:
    session = waiter(store)
    keyspace.fetch(session, b"k")
    size = keyspace.size
    match again:
        case "fetch" | "wait_count":
            with pytest.raises(ProtocolError, match="already has a pending wait"):
                if again == "fetch":
                    keyspace.fetch(session, b"j")
                else:
                    keyspace.wait_count(session, b"j", 1)
            assert (session.state, session.awaited, keyspace.size) == (AWAITING_VALUE, b"k", size)
            keyspace.set(b"k", pack(b"v"))
            assert heard(session) == [pack(b"v")]
        case "wait":
            keyspace.wait(session, [b"j"])
            keyspace.set(b"j", EMPTY)
            assert heard(session) == [WOKEN]
            keyspace.set(b"k", pack(b"v"))
            assert heard(session) == []
        case _:
            keyspace.barrier(session, b"b", 2)
            keyspace.barrier(waiter(store), b"b", 2)
            assert heard(session) == [WOKEN]


@pytest.mark.parametrize("value", [b"v", 5])
def test_an_existing_value_is_fetched_during_another_wait(store: Store, keyspace: Keyspace, value: bytes | int) -> None:
    session = waiter(store)
    if isinstance(value, int):
        keyspace.add(b"k", value)
    else:
        keyspace.set(b"k", pack(value))
    keyspace.wait(session, [b"j"])
    assert keyspace.fetch(session, b"k") == keyspace.get(b"k")
    keyspace.set(b"j", EMPTY)
    assert heard(session) == [WOKEN]


@pytest.mark.parametrize("cancel", ["cancel_fetch", "cancel_wait", "leave"])
def test_an_ended_fetch_sends_nothing(store: Store, keyspace: Keyspace, cancel: str) -> None:
    session = waiter(store)
    keyspace.fetch(session, b"k")
    if cancel == "cancel_fetch":
        assert keyspace.cancel_fetch(session) == ABSENT
    elif cancel == "cancel_wait":
        assert keyspace.cancel_wait(session)
    else:
        session.leave()
    assert nothing_is_left(keyspace)
    keyspace.set(b"k", pack(b"v"))
    assert heard(session) == []
    assert (session.state, session.awaited) == (IDLE, b"")
    keyspace.wait(session, [b"j"])
    keyspace.set(b"j", pack(b"v"))
    assert heard(session) == [WOKEN]


def test_a_fetch_takes_no_item_from_other_waiters(store: Store, keyspace: Keyspace) -> None:
    """As a WAIT and a GET behind it would."""
    fetchers = [waiter(store) for _ in range(40)]  # enough for compaction
    first, second = waiter(store), waiter(store)
    for session in fetchers[:20]:
        keyspace.fetch(session, b"q")
    keyspace.wait(first, [b"q"])
    for session in fetchers[20:]:
        keyspace.fetch(session, b"q")
    keyspace.wait(second, [b"q"])
    keyspace.queue_push(b"q", pack(b"1"))
    assert [heard(session) for session in fetchers] == [[EMPTY]] * 20 + [[]] * 20
    assert (heard(first), heard(second)) == ([WOKEN], [])
    assert keyspace.handoffs == {b"q": 1}
    first.leave()
    assert [heard(session) for session in fetchers] == [[]] * 20 + [[EMPTY]] * 20
    assert heard(second) == [WOKEN]


def test_a_fetch_from_a_queue_hands_its_item_on(store: Store, keyspace: Keyspace) -> None:
    first, second, pusher = waiter(store), waiter(store), waiter(store)
    for session in (first, second, pusher):
        session.receive(bytes.fromhex("00cef7853c"))
    wait = b"\x06" + pack(b"q").join([(1).to_bytes(8, "little"), b""])
    first.receive(wait)
    second.receive(wait)
    pusher.receive(b"\x0e" + pack(b"q") + pack(b"item"))
    assert heard(first) == [WOKEN]
    first.receive(b"\x40" + pack(b"q"))
    assert heard(first) == [EMPTY]
    assert heard(second) == [WOKEN]


# Waiting for a number

REACHING: dict[str, Write] = {
    "add": lambda k: k.add(b"n", 1),
    "add of more than one": lambda k: k.add(b"n", 1000),
    "add of all there is": lambda k: k.add(b"n", 2**63 - 4),
    "set": lambda k: k.set(b"n", pack(b" +4 and text")),
    "append": lambda k: k.append(b"n", pack(b"0")),
    "compare_set": lambda k: k.compare_set(b"n", pack(b"3"), pack(b"4")),
    "multi_set": lambda k: k.multi_set([(b"n", pack(b"0")), (b"n", pack(b"4"))]),
}


@pytest.mark.parametrize("how", REACHING)
def test_a_target_is_reached(store: Store, keyspace: Keyspace, how: str) -> None:
    keyspace.set(b"n", pack(b"3"))
    size = keyspace.size
    first, second, more = waiter(store), waiter(store), waiter(store)
    assert not keyspace.wait_count(first, b"n", 4)
    assert not keyspace.wait_count(second, b"n", 4)
    assert not keyspace.wait_count(more, b"n", 2**63 - 1)
    assert first.parked is None
    REACHING[how](keyspace)
    assert (heard(first), heard(second)) == ([WOKEN], [WOKEN])
    assert (first.state, first.group) == (IDLE, None)
    more.leave()
    keyspace.set(b"n", pack(b"9"))
    assert heard(first) == []
    assert (keyspace.waiters, keyspace.counters, keyspace.size) == ({}, {}, size)


def test_arrivals_at_a_barrier_are_counted(store: Store, keyspace: Keyspace) -> None:
    """They wake no other waiter; but the number is reached, and there may be no further write."""
    one, two, three, plain = (waiter(store) for _ in range(4))
    keyspace.wait_count(one, b"b", 1)
    keyspace.wait_count(two, b"b", 2)
    keyspace.wait_count(three, b"b", 3)
    keyspace.wait(plain, [b"b"])
    keyspace.barrier(waiter(store), b"b", 3)
    assert [heard(session) for session in (one, two, three, plain)] == [[WOKEN], [], [], []]
    keyspace.barrier(waiter(store), b"b", 3)
    assert [heard(session) for session in (one, two, three, plain)] == [[], [WOKEN], [], []]
    keyspace.barrier(waiter(store), b"b", 3)
    assert [heard(session) for session in (one, two, three, plain)] == [[], [], [WOKEN], [WOKEN]]
    assert (keyspace.counters, keyspace.waiters) == ({}, {})


def test_a_wait_count_followed_by_a_barrier_ends_both(store: Store, keyspace: Keyspace) -> None:
    session = waiter(store)
    keyspace.wait_count(session, b"b", 1)
    keyspace.barrier(session, b"b", 2)
    assert heard(session) == [WOKEN]
    keyspace.barrier(waiter(store), b"b", 2)
    assert heard(session) == [WOKEN]
    keyspace.delete_key(b"b")
    assert nothing_is_left(keyspace)


@pytest.mark.parametrize(("text", "target", "reached"), [
    (None, 0, True), (None, 1, False), (None, -1, True), (None, -(2**63), True), (None, 2**63 - 1, False),
    (b"-5", -5, True), (b"-5", -4, False), (b"-5", 0, False), (b"7x", 7, True), (b"7x", 8, False),
    (b"9223372036854775807", 2**63 - 1, True), (b"-9223372036854775808", -(2**63) + 1, False),
])  # fmt: skip
def test_targets_that_are_reached_at_once(
    store: Store, keyspace: Keyspace, text: bytes | None, target: int, reached: bool
) -> None:
    if text is not None:
        keyspace.set(b"n", pack(text))
    session = waiter(store)
    assert keyspace.wait_count(session, b"n", target) == reached
    assert (session.group is None) == reached == (keyspace.counters == {})
    keyspace.set(b"n", pack(b"9223372036854775807"))
    assert heard(session) == ([] if reached else [WOKEN])


def test_a_sum_that_wraps_reaches_nothing(store: Store, keyspace: Keyspace) -> None:
    session = waiter(store)
    keyspace.set(b"n", pack(b"1"))
    keyspace.wait_count(session, b"n", 2)
    keyspace.add(b"n", 2**63 - 1)
    assert heard(session) == []


def test_a_value_that_is_deleted_reaches_nothing(store: Store, keyspace: Keyspace) -> None:
    """A missing key counts as 0; but DELETE_KEY wakes no waiter."""
    session = waiter(store)
    keyspace.add(b"n", -5)
    keyspace.wait_count(session, b"n", -3)
    keyspace.delete_key(b"n")
    assert heard(session) == []
    keyspace.add(b"n", 0)
    assert heard(session) == [WOKEN]


def test_a_value_that_is_no_number_closes_only_the_connection_that_asks(store: Store, keyspace: Keyspace) -> None:
    early, late = waiter(store), waiter(store)
    keyspace.wait_count(early, b"n", 2)
    size = keyspace.size
    keyspace.set(b"n", pack(b"text"))
    with pytest.raises(ProtocolError, match="not a 64-bit number"):
        keyspace.wait_count(late, b"n", 2)
    assert (late.state, late.group, keyspace.size) == (IDLE, None, size + ENTRY_BYTES + 1 + 12)
    late.leave()
    for text in (b"", b"9" * 20, b"-"):
        keyspace.set(b"n", pack(text))
    assert heard(early) == []
    keyspace.set(b"n", pack(b"2"))
    assert heard(early) == [WOKEN]
    assert (keyspace.waiters, keyspace.counters) == ({}, {})


def test_each_waiter_is_woken_at_its_own_target(store: Store, keyspace: Keyspace) -> None:
    targets = [random.Random(number).randrange(1, 40) for number in range(200)]
    sessions = [waiter(store) for _ in targets]
    for session, target in zip(sessions, targets, strict=True):
        keyspace.wait_count(session, b"n", target)
    for _ in range(19):
        total = keyspace.add(b"n", 2)
        woken = [target for session, target in zip(sessions, targets, strict=True) if heard(session)]
        assert sorted(woken) == sorted(target for target in targets if total - 2 < target <= total)
    keyspace.add(b"n", 2)
    keyspace.delete_key(b"n")
    assert nothing_is_left(keyspace)


@pytest.mark.parametrize("how", ["cancel_wait", "cancel_fetch", "leave", "wait", "barrier"])
def test_an_ended_wait_count_is_not_woken(store: Store, keyspace: Keyspace, how: str) -> None:
    session, same, more = waiter(store), waiter(store), waiter(store)
    for other, target in ((session, 3), (same, 3), (more, 4)):
        keyspace.wait_count(other, b"n", target)
    match how:
        case "cancel_wait":
            keyspace.cancel_wait(session)
        case "cancel_fetch":
            keyspace.cancel_fetch(session)
        case "leave":
            session.leave()
        case "wait":
            keyspace.wait(session, [b"k"])
        case _:
            keyspace.barrier(session, b"k", 2)
    assert session.group is None
    keyspace.add(b"n", 3)
    assert (heard(session), heard(same), heard(more)) == ([], [WOKEN], [])
    if how in ("wait", "barrier"):
        keyspace.set(b"k", EMPTY)
        assert heard(session) == [WOKEN]
        keyspace.delete_key(b"k")
    more.leave()
    keyspace.delete_key(b"n")
    assert nothing_is_left(keyspace)


@pytest.mark.parametrize("again", ["fetch", "wait_count"])
def test_other_waits_during_a_wait_count(store: Store, keyspace: Keyspace, again: str) -> None:
    session = waiter(store)
    keyspace.wait_count(session, b"n", 5)
    size = keyspace.size
    with pytest.raises(ProtocolError, match="already has a pending wait"):
        if again == "fetch":
            keyspace.fetch(session, b"j")
        else:
            keyspace.wait_count(session, b"m", 0)
    assert keyspace.size == size
    keyspace.add(b"n", 5)
    assert heard(session) == [WOKEN]


def test_a_queue_of_the_same_name_skips_a_counter(store: Store, keyspace: Keyspace) -> None:
    counting = waiter(store)
    keyspace.wait_count(counting, b"q", 1)
    keyspace.queue_push(b"q", pack(b"the only item"))
    assert (heard(counting), keyspace.handoffs) == ([], {})
    assert keyspace.queue_pop(b"q") == (1, pack(b"the only item"))
    sessions = [waiter(store) for _ in range(30)]  # enough for compaction
    for session in sessions:
        keyspace.wait(session, [b"q"])
    for session in sessions:
        keyspace.queue_push(b"q", pack(b"item"))
        assert heard(session) == [WOKEN]
    assert heard(counting) == []
    for session in sessions:
        session.leave()
    assert heard(counting) == []
    keyspace.add(b"q", 1)
    assert heard(counting) == [WOKEN]


def test_waiters_for_a_key_and_for_its_number(store: Store, keyspace: Keyspace) -> None:
    plain, fetching, counting = waiter(store), waiter(store), waiter(store)
    keyspace.wait_count(counting, b"n", 2)
    keyspace.wait(plain, [b"n"])
    keyspace.fetch(fetching, b"n")
    keyspace.add(b"n", 1)
    assert (heard(plain), heard(fetching), heard(counting)) == ([WOKEN], [pack(b"1")], [])
    keyspace.add(b"n", 1)
    assert heard(counting) == [WOKEN]


def test_waiters_of_one_number_are_woken_in_order_of_arrival(store: Store, keyspace: Keyspace) -> None:
    sessions = [waiter(store) for _ in range(20)]
    for session in sessions:
        keyspace.wait_count(session, b"n", 1)
    sessions.pop(7).leave()
    keyspace.add(b"n", 1)
    assert store.hub.pending_flush == sessions


def test_a_write_looks_at_one_of_many_targets(store: Store, keyspace: Keyspace) -> None:
    """What a write touches is one registration and the top of a heap, however many wait."""
    count = 10_000
    sessions = [waiter(store) for _ in range(count)]
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
    others = [waiter(store) for _ in range(10)]
    for number, other in enumerate(others):
        keyspace.wait_count(other, b"n", 2**40 + number)
    session = waiter(store)
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


def test_many_waiters_that_leave_one_by_one_leave_nothing(store: Store, keyspace: Keyspace) -> None:
    sessions = [waiter(store) for _ in range(500)]
    for number, session in enumerate(sessions):
        keyspace.wait_count(session, b"n", 1 + number // 2)
    rng = random.Random(2)
    rng.shuffle(sessions)
    for session in sessions[:250]:
        session.leave()
    keyspace.add(b"n", 125)
    left = [session for session in sessions[250:] if not heard(session)]
    assert all(session.number > 125 for session in left)
    for session in left:
        session.leave()
    keyspace.delete_key(b"n")
    assert nothing_is_left(keyspace)


# Reserved keys


def _reserved(store: Store) -> Keyspace:
    store.identify(b"who")
    store.announce(12)
    return store.keyspace


def test_reserved_keys_exist(store: Store) -> None:
    keyspace = _reserved(store)
    session = waiter(store)
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


@pytest.mark.parametrize("how", ["set", "append", "add", "compare_set", "multi_set", "barrier", "open barrier"])
def test_reserved_keys_are_read_only(store: Store, how: str) -> None:
    keyspace = _reserved(store)
    session = waiter(store)
    with pytest.raises(ProtocolError, match="key tcpstore_async/joins is read-only"):
        match how:
            case "set":
                keyspace.set(JOINS_KEY, EMPTY)
            case "append":
                keyspace.append(JOINS_KEY, EMPTY)
            case "add":
                keyspace.add(JOINS_KEY, 1)
            case "compare_set":
                keyspace.compare_set(JOINS_KEY, EMPTY, pack(b"v"))
            case "multi_set":
                keyspace.multi_set([(b"k", EMPTY), (JOINS_KEY, EMPTY)])
            case _:
                keyspace.barrier(session, JOINS_KEY, 9 if how == "barrier" else 1)
    assert (keyspace.num_keys(), keyspace.size, keyspace.waiters, session.state) == (0, 0, {}, IDLE)
    assert keyspace.get(JOINS_KEY) == pack(b"12")


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
    assert keyspace.lease(waiter(store), SERVER_KEY, 1) == (0, None)


def test_a_wait_for_a_reserved_number_ends(store: Store) -> None:
    store.announce(2)
    few, many = waiter(store), waiter(store)
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
    fetching, first, second = waiter(store), waiter(store), waiter(store)
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
    session, early = waiter(store), waiter(store)
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


def test_many_fetches_of_which_one_was_canceled_leave_nothing(store: Store, keyspace: Keyspace) -> None:
    """An item ends all of them at once, and nothing is remembered of the place that the canceled one had."""
    sessions = [waiter(store) for _ in range(40)]
    for session in sessions:
        assert keyspace.fetch(session, b"q") is None
    keyspace.cancel_fetch(sessions[1])
    keyspace.queue_push(b"q", EMPTY)
    keyspace.queue_pop(b"q")
    assert [heard(session) for session in sessions] == [[EMPTY]] + [[]] + [[EMPTY]] * 38
    assert nothing_is_left(keyspace)


def test_a_number_that_falls_while_its_waiters_are_woken(store: Store, keyspace: Keyspace) -> None:
    """Those whose target it had reached are woken all the same, however many."""
    keyspace.portion = 1
    sessions = [waiter(store) for _ in range(5)]
    for session in sessions:
        assert not keyspace.wait_count(session, b"k", 10)
    keyspace.add(b"k", 10)
    keyspace.add(b"k", -10)
    assert keyspace.working
    while keyspace.working:
        keyspace.step()
    assert [heard(session) for session in sessions] == [[b"\0"]] * 5
    keyspace.delete_key(b"k")
    assert nothing_is_left(keyspace)


@pytest.mark.parametrize("how", ["leaves", "joins another counter"])
def test_who_joined_a_counter_that_was_deleted_and_leaves(store: Store, keyspace: Keyspace, how: str) -> None:
    """The rank has joined again, and has lost that connection: it is not lost once it leaves on the first one."""
    first, second = waiter(store), waiter(store)
    assert keyspace.join(first, b"k", b"token") == 1
    keyspace.delete_key(b"k")
    assert keyspace.size == 0
    assert keyspace.join(second, b"k", b"token") == 1
    keyspace.leave(second)
    assert keyspace.join(waiter(store), b"k", b"") == 0
    if how == "leaves":
        keyspace.depart(first)
    else:
        keyspace.join(first, b"other", b"token")
    assert keyspace.join(waiter(store), b"k", b"") == 1


@pytest.mark.unmeasured
def test_a_forked_process_forgets_all_waiters(store: Store, keyspace: Keyspace) -> None:
    keyspace.wait(waiter(store), [b"%d" % number for number in range(5)])
    keyspace.wait_count(waiter(store), b"n", 1)
    keyspace.forget_waiters()
    assert nothing_is_left(keyspace)


def test_a_wait_for_a_number_that_has_fallen_while_its_waiters_are_woken(store: Store, keyspace: Keyspace) -> None:
    """It begins when they have been woken, and does not end with them."""
    keyspace.portion = 1
    sessions = [waiter(store) for _ in range(5)]
    for session in sessions:
        keyspace.wait_count(session, b"k", 10)
    keyspace.add(b"k", 10)
    keyspace.add(b"k", -10)
    late = waiter(store)
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
