"""What counts, for which peer, and which one is evicted."""

from __future__ import annotations

import gc
import random

import pytest

from properties.fleet import Command
from properties.session_driver import greeted
from tcpstore_async.base.errors import BudgetError, ProtocolError
from tcpstore_async.base.limits import MIB, QUEUE_BYTES, Limits
from tcpstore_async.keyspace.keyspace import Keyspace
from tcpstore_async.keyspace.steps import KeyListing
from tcpstore_async.session.budget import SESSION_BYTES, Budget, StoreShare
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store
from tcpstore_async.session.unsent import Unsent
from tcpstore_async.wire.values import EMPTY, Framed

VALUE = 1_000_000


def behind(session: ServerSession, taken: int = 0) -> None:
    """The kernel takes only so much of what the session says."""
    session.keep_unsent(session.out, taken)
    session.out.clear()


def storing(store: Store, key: bytes, size: int = VALUE) -> ServerSession:
    session = greeted(store)
    session.receive(Command("set", key, bytes(size)).frame)
    return session


def budget() -> Budget:
    return Budget(100 * MIB, StoreShare(Keyspace(Limits()), lambda: None))


def test_a_value_shared_by_replies_counts_once() -> None:
    store = Store(Limits())
    storing(store, b"/v")
    sessions = [greeted(store) for _ in range(100)]
    before = store.budget.used()
    for session in sessions:
        session.receive(Command("get", b"/v").frame)
        behind(session, 10)
    assert VALUE < store.budget.used() - before < VALUE + 100 * 2048
    for session in sessions:
        session.leave()
    assert (store.budget.pins, store.budget.orphaned) == ({}, 0)
    assert store.budget.used() == before - 100 * SESSION_BYTES


def test_every_old_version_counts() -> None:
    """r01: 775 bytes held 624 MiB, of which the server counted 24."""
    store = Store(Limits())
    first = storing(store, b"/v")
    sessions = [greeted(store) for _ in range(10)]
    for session in sessions:
        first.receive(Command("set", b"/v", bytes(VALUE)).frame)
        session.receive(Command("get", b"/v").frame)
        behind(session)
    assert store.budget.used() > 11 * VALUE
    for session in sessions:
        session.leave()
    first.leave()
    store.keyspace.delete_key(b"/v")
    assert store.budget.used() == 0


def test_short_replies_are_kept_together() -> None:
    """r01b: an object for each reply of four bytes took 14 MiB for one."""
    store = Store(Limits(unsent_high_water=MIB))
    session = greeted(store)
    before = store.budget.used()
    for _ in range(100):
        session.receive(Command("ping", 7).frame * 1000)
        behind(session)
    assert session.backlog is not None
    assert len(session.backlog.pieces) < 100_000 * 4 // (32 * 1024) + 2
    assert 400_000 < store.budget.used() - before < 410_000


@pytest.mark.parametrize("seed", range(20))
def test_unsent_replies_are_complete_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    counted = budget()
    unsent = Unsent(counted)
    pool: list[Framed] = [rng.randbytes(rng.choice([1, 4, 63, 64, 500, 40_000])) for _ in range(20)]
    expected, got = bytearray(), bytearray()
    for _ in range(300):
        if rng.random() < 0.5 or len(got) == len(expected):
            replies = [rng.choice(pool) for _ in range(rng.randint(1, 8))]
            taken = rng.randrange(sum(map(len, replies))) if not expected else 0
            unsent.add(replies, taken)
            expected += b"".join(replies)[taken:]
        else:
            ready = b"".join(unsent.batch())
            count = rng.randint(1, len(ready))
            got += ready[:count]
            assert unsent.took(count) == (len(got) == len(expected))
            if len(got) == len(expected):
                assert counted.used() == 0
                unsent = Unsent(counted)
    assert expected.startswith(got)
    unsent.release()
    assert (counted.used(), counted.pins, counted.orphaned) == (0, {}, 0)


def test_old_versions_of_a_value_under_append_share_pieces() -> None:
    """Each of them holds what was appended since the last one, and no more."""
    store = Store(Limits())
    first = storing(store, b"/v")
    first.receive(Command("append", b"/v", b"x").frame)
    before = store.budget.used()
    for _ in range(10):
        session = greeted(store)
        session.receive(Command("append", b"/v", b"x").frame + Command("get", b"/v").frame)
        behind(session)
    assert VALUE < store.budget.used() - before < 2 * VALUE


def test_a_listing_under_way_counts_and_goes_with_its_session() -> None:
    store = Store(Limits(), portion=10)
    session, other = greeted(store), greeted(store)
    for number in range(100):
        session.receive(Command("set", b"%01000d" % number, b"").frame)
    before = store.budget.used()
    session.receive(Command("list_keys").frame)
    assert session.running is not None
    assert store.budget.used() - before > 100_000
    other.receive(Command("list_keys").frame)
    session.leave()
    while other.running is not None:
        other.receive(b"")
    assert len(b"".join(other.out)) == 8 + 100 * 1008
    assert store.budget.listing() is not None
    assert store._listing is None, "it is kept where nothing counts it"


def test_nobody_continues_with_a_listing_whose_client_has_left() -> None:
    """How many steps a command takes must not depend on what no snapshot has."""
    store = Store(Limits(), portion=10)
    session, other = greeted(store), greeted(store)
    for number in range(100):
        session.receive(Command("set", b"%01000d" % number, b"").frame)
    session.receive(Command("list_keys").frame)
    for _ in range(5):
        session.receive(b"")
    session.leave()
    other.receive(Command("list_keys").frame)
    steps = 0
    while other.running is not None:
        other.receive(b"")
        steps += 1
    assert steps == 10


def test_a_queue_counts_its_overhead() -> None:
    """r14: a queue of one item was counted 144 bytes and took 925."""
    keyspace = Keyspace(Limits())
    keyspace.queue_push(b"q", bytes(8))
    assert keyspace.size > QUEUE_BYTES > 760
    keyspace.queue_pop(b"q")
    assert keyspace.size == 0


def test_an_introduction_counts() -> None:
    store = Store(Limits())
    session = greeted(store)
    before = store.budget.used()
    for text in (b"x" * 1000, b"x" * 500):
        session.receive(Command("introduce", [(b"rank", text)]).frame)
        assert store.budget.used() - before > len(text)
    session.leave()
    assert store.budget.used() == 0


def test_simultaneous_list_keys_share_a_reply() -> None:
    store = Store(Limits())
    sessions = [greeted(store) for _ in range(10)]
    for number in range(100):
        sessions[0].receive(Command("set", b"%01000d" % number, b"").frame)
    before = store.budget.used()
    for session in sessions:
        session.receive(Command("list_keys").frame)
    assert len({id(session.out[1]) for session in sessions}) == 1
    for session in sessions:
        behind(session, 10)
    assert store.budget.used() - before < 2 * 102_000 + 10 * 2048
    sessions[0].receive(Command("set", b"new", b"").frame)
    sessions[1].leave()
    other = greeted(store)
    other.receive(Command("list_keys").frame)
    assert b"new" in b"".join(other.out)


# quirk: budget_bytes
def test_the_largest_reader_goes_and_lets_go_at_once() -> None:
    store = Store(Limits(budget_bytes=100 * MIB, unsent_high_water=100 * MIB))
    writer = storing(store, b"/v", 8 * MIB)
    large, small = greeted(store), greeted(store)
    for number in range(8):
        large.receive(Command("get", b"/v").frame)
        behind(large)
        writer.receive(Command("set", b"/v", bytes([number]) * (8 * MIB)).frame)
    assert not store.hub.pending_flush
    for number in range(2):
        small.receive(Command("get", b"/v").frame)
        behind(small)
        writer.receive(Command("set", b"/v", bytes([number]) * (8 * MIB)).frame)
    assert store.hub.pending_flush == [large]
    error = store.hub.evicted[large]
    assert isinstance(error, BudgetError)
    assert error.held > 64 * MIB
    assert large.backlog is None
    assert store.budget.used() < 32 * MIB
    large.leave()
    assert not store.hub.evicted
    assert small.backlog is not None


def test_a_writer_whose_command_just_ended_is_the_largest() -> None:
    """Its share of the store is known before those whom it woke do not read their replies."""
    store = Store(Limits(budget_bytes=64 * MIB))
    names = [b"/%d" % number for number in range(30)]
    writer, readers = greeted(store), [greeted(store) for _ in names]
    for name, reader in zip(names, readers, strict=True):
        reader.receive(Command("fetch", name).frame)
    writer.receive(Command("multi_set", [(name, bytes(MIB)) for name in names]).frame)
    remaining = iter(readers)
    while not store.hub.evicted:
        behind(next(remaining))
    assert list(store.hub.evicted) == [writer]


# quirk: budget_bytes
def test_small_writers_go_on_above_the_mark_until_the_store_is_full() -> None:
    store = Store(Limits(budget_bytes=160 * MIB))
    greedy, honest = greeted(store), greeted(store)
    with pytest.raises(BudgetError) as error:
        for number in range(100):
            greedy.receive(Command("set", b"/g/%d" % number, bytes(4 * MIB)).frame)
    assert error.value.allowed == 140 * MIB
    assert error.value.held > 130 * MIB
    greedy.leave()
    written = 0
    with pytest.raises(BudgetError) as error:
        for number in range(10_000):
            honest.receive(Command("set", b"/h/%d" % number, bytes(1000)).frame)
            written += 1
    assert written > 1000  # a holder of 1/128 of the budget is large again
    assert error.value.size > error.value.allowed
    assert not store.hub.pending_flush
    reader = greeted(store)
    reader.receive(Command("get", b"/h/0").frame)
    assert len(reader.out[0]) == 1008


def test_shares_shrink_when_items_are_removed() -> None:
    store = Store(Limits(budget_bytes=160 * MIB))
    producer, consumer, greedy = greeted(store), greeted(store), greeted(store)
    for _ in range(300):
        producer.receive(Command("queue_push", b"q", bytes(MIB)).frame)
        consumer.receive(Command("queue_pop", b"q").frame)
        consumer.out.clear()
        consumer.unsent = 0
    with pytest.raises(BudgetError):
        for number in range(100):
            greedy.receive(Command("set", b"/g/%d" % number, bytes(4 * MIB)).frame)
    assert not store.hub.pending_flush
    producer.receive(Command("queue_push", b"q", bytes(MIB)).frame)


def test_an_evicted_session_takes_no_more_requests() -> None:
    """What it held of them would be counted for ever: its share of the budget has been given back already."""
    store = Store(Limits(budget_bytes=9 * MIB))
    session = storing(store, b"/v")
    session.evict(BudgetError(2, 1, 1, 1))
    before = store.budget.others
    with pytest.raises(ProtocolError, match="opcode 1 from an evicted session"):
        session.receive(Command("set", b"/v", bytes(VALUE)).frame[:100])
    session.leave()
    assert store.budget.others == before
    assert not store.budget.unfinished


def test_an_evicted_session_leaves_no_cycle() -> None:
    """The server collects seldom: requests of megabytes would stay in the frames of what was raised."""
    store = Store(Limits(budget_bytes=9 * MIB))
    session = greeted(store)
    gc.collect()
    gc.disable()
    try:
        raised = False
        try:
            session.receive(Command("set", b"/k", bytes(8 * MIB)).frame[:-1])
        except BudgetError:
            raised = True
        assert raised
        assert not [found for found in gc.get_objects() if type(found) is BudgetError]
    finally:
        gc.enable()


def test_the_oldest_unvalidated_session_is_known() -> None:
    store = Store(Limits(validate_seconds=30))
    sessions = [ServerSession(store, None, "::1", number, float(number)) for number in range(3)]
    assert store.hub.overdue(29.9) is None
    assert store.hub.overdue(30.0) is sessions[0]
    sessions[0].receive(Command("validate", 0x3C85F7CE).frame)
    assert store.hub.overdue(30.0) is None
    sessions[1].leave()
    assert store.hub.oldest_unvalidated() is sessions[2]


def test_the_next_eviction_is_at_the_first_mark_again_when_less_is_used() -> None:
    """Right after one it is a step higher, as long as that much is used."""
    store = Store(Limits(budget_bytes=100 * MIB))
    serving = ServerSession(store, None, "::1", 0, 0.0)
    for number in range(1, 4):
        hog = ServerSession(store, None, "::1", number, 0.0)
        hog.held = 90 * MIB
        store.budget.charge(90 * MIB)
        store.budget.relieve(serving)
        assert hog in store.hub.evicted
        store.hub.evicted.clear()


def test_a_listing_of_keys_that_have_changed_since_is_not_kept() -> None:
    among = budget()
    listing = KeyListing([b"k" * 100_000], 100_016, among.keyspace.changes)
    among.keyspace.set(b"k", EMPTY)
    before = among.used()
    among.keep_listing(listing)
    assert (among.used(), among.listing()) == (before, None)
    listing.changes = among.keyspace.changes
    among.keep_listing(listing)
    assert (among.used(), among.listing()) == (before + listing.size, listing)
