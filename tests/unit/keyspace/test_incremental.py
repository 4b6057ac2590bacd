"""Commands in steps: what a session receives when something happens between two steps, and what is left."""

from __future__ import annotations

import struct

import pytest

from properties.fleet import Command
from properties.session_driver import greeted, take
from tcpstore_async.base.errors import PeerError
from tcpstore_async.base.limits import Limits
from tcpstore_async.keyspace.leases import MAX_LEASES
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store
from tcpstore_async.wire.commands import SERVER_KEY
from tcpstore_async.wire.values import PREFIX, pack, size, unpack

MIB = 1 << 20

KEYS = [b"k%d" % number for number in range(10)]
PAIRS = [(key, b"new") for key in KEYS]
NEW = pack(b"new")


@pytest.fixture
def store() -> Store:
    return Store(Limits(), portion=3)


def ask(session: ServerSession, name: str, *fields: object) -> None:
    session.receive(Command(name, *fields).frame)


def finish(*sessions: ServerSession) -> None:
    for session in sessions:
        while session.running is not None:
            session.receive(b"")
            if session.store.keyspace.work:
                session.store.keyspace.step()
        while session.store.keyspace.work:
            session.store.keyspace.step()


def parked(store: Store, *keys: bytes) -> ServerSession:
    """Return a session that waits for KEYS, and for these."""
    session = greeted(store)
    ask(session, "wait", [*KEYS, *keys])
    finish(session)
    return session


def nothing_is_left(store: Store) -> bool:
    keyspace = store.keyspace
    return not (keyspace.waiters or keyspace.holes) and keyspace.parked == 0 and not keyspace.work


@pytest.mark.parametrize("alike", [1, 2], ids=["each for its own keys", "in pairs for one list"])
def test_registrations_of_many_who_leave_at_once_are_dropped_in_steps(alike: int) -> None:
    store = Store(Limits(), portion=100)
    waiting = [greeted(store) for _ in range(20)]
    for number, session in enumerate(waiting):
        ask(session, "wait", [b"%d/%d" % (number // alike, key) for key in range(50)])
    count = left = len(store.keyspace.waiters)
    assert count == 50 * 20 // alike
    for session in waiting:
        session.leave()
    assert len(store.keyspace.waiters) == count
    while store.keyspace.work:
        store.keyspace.step()
        assert left - len(store.keyspace.waiters) <= 2 * store.keyspace.portion
        left = len(store.keyspace.waiters)
    assert nothing_is_left(store)


def test_a_multi_set_that_follows_another_counts_while_it_waits(store: Store) -> None:
    parked(store)
    first, second = greeted(store), greeted(store)
    ask(first, "multi_set", PAIRS)
    ask(second, "multi_set", PAIRS)
    for _ in KEYS:
        second.receive(b"")
    assert store.keyspace.waking is not None
    assert second.held >= len(Command("multi_set", PAIRS).frame) - 9
    finish(second)
    assert second.held == 0
    assert nothing_is_left(store)


def test_a_cancel_behind_a_long_wait_follows_it(store: Store) -> None:
    session = greeted(store)
    session.receive(Command("wait", KEYS).frame + Command("cancel_wait").frame + Command("ping", 7).frame)
    assert session.stalled()
    finish(session)
    assert take(session) == b"\x01" + (7).to_bytes(4, "little")
    assert nothing_is_left(store)


def test_a_second_wait_follows_a_long_first_one(store: Store) -> None:
    session, other = greeted(store), greeted(store)
    session.receive(Command("wait", KEYS).frame + Command("wait", [b"x"]).frame)
    finish(session)
    ask(other, "set", b"x", b"")
    assert take(session) == b"\0"
    ask(session, "cancel_wait")
    finish(session)
    assert take(session) == b"\x01"
    assert nothing_is_left(store)


@pytest.mark.parametrize(("name", "reply"), [("check", b"\0"), ("multi_get", pack(b"1") * len(KEYS))])
def test_a_long_read_is_executed_at_once(store: Store, name: str, reply: bytes) -> None:
    """Only its list is freed in steps."""
    session, other = greeted(store), greeted(store)
    for key in KEYS:
        ask(other, "set", key, b"1")
    ask(session, name, KEYS)
    assert session.running is None
    assert take(session) == reply
    assert store.keyspace.work
    finish(session)
    assert nothing_is_left(store)


@pytest.mark.parametrize("wait", [("wait", [b"k"]), ("fetch", b"k"), ("wait_count", b"k", 1)])
def test_many_waiters_are_woken_in_order_of_arrival(store: Store, wait: tuple[str, object]) -> None:
    waiting = [greeted(store) for _ in range(20)]
    other = greeted(store)
    for session in waiting:
        ask(session, *wait)
    ask(other, "add", b"k", 1)
    assert store.keyspace.work
    finish(other)
    assert store.hub.pending_flush == waiting


def left_of(*sessions: ServerSession) -> int:
    return sum(len(session.parked or ()) for session in sessions)


def test_one_multi_set_wakes_the_waiters_of_many_keys_in_steps(store: Store) -> None:
    waiting = [parked(store) for _ in range(4)]
    other = greeted(store)
    ask(other, "multi_set", PAIRS)
    left = left_of(*waiting)
    assert left >= (len(KEYS) - 1) * len(waiting)
    while store.keyspace.work:
        store.keyspace.step()
        assert left - left_of(*waiting) <= store.keyspace.portion
        left = left_of(*waiting)
    assert [take(session) for session in waiting] == [b"\0"] * 4
    assert nothing_is_left(store)


def test_many_writes_at_once_wake_the_waiters_of_their_keys_in_steps() -> None:
    store = Store(Limits(), portion=100)
    keyspace = store.keyspace
    for number in range(50):
        ask(
            greeted(store), "wait", [*KEYS, b"other%d" % number]
        )  # lists of their own, so they are in no group together
    left = keyspace.parked
    most = keyspace.portion * keyspace.registration_bytes(KEYS[0])
    greeted(store).receive(b"".join([Command("set", key, pack(b"v")).frame for key in KEYS]))
    while keyspace.work:
        assert 0 <= left - keyspace.parked <= most
        left = keyspace.parked
        keyspace.step()
    assert sum(map(len, keyspace.waiters.values())) == 50


def test_many_pushes_at_once_let_others_in_between() -> None:
    store = Store(Limits(), portion=100)
    waiting = [greeted(store) for _ in range(50)]
    for number, session in enumerate(waiting):
        ask(session, "wait", [b"other%d" % number])
        ask(session, "wait", [*KEYS, b"none"])  # not in a group
    left = left_of(*waiting)
    session = greeted(store)
    session.receive(
        b"".join([Command("queue_push", key, pack(b"v")).frame for key in KEYS]) + Command("queue_len", KEYS[-1]).frame
    )
    done = [left - left_of(*waiting)]
    assert take(session) == b""
    while session.stalled():
        left = left_of(*waiting)
        session.receive(b"")
        done.append(left - left_of(*waiting))
    assert max(done) <= store.keyspace.portion + len(waiting)
    assert sum(done) == len(KEYS) * len(waiting)
    assert take(session) == (1).to_bytes(8, "little")


@pytest.mark.parametrize("taken", [False, True])
def test_items_that_go_back_and_end_no_wait_are_offered_in_steps(taken: bool) -> None:
    """No waiter stays asleep before an item, and an item that another peer has taken is not offered."""
    store = Store(Limits())
    queues = [b"q%d" % number for number in range(1000)]
    holder, other = greeted(store), greeted(store)
    for ticket, queue in enumerate(queues):
        ask(other, "queue_push", queue, pack(b"v"))
        ask(holder, "lease", queue, ticket)
    for number in range(12):
        ask(greeted(store), "wait", [*queues[:-1], b"%d" % number])  # lists of their own, so they are in no group
    waiting = greeted(store)
    ask(waiting, "wait", queues[-1:])
    before = store.keyspace.taken
    holder.leave()
    steps = [store.keyspace.taken - before]
    assert store.keyspace.queue_len(queues[-1]) == 1
    assert take(waiting) == b""
    if taken:
        ask(other, "queue_pop", queues[-1])
    while store.keyspace.work:
        before = store.keyspace.taken
        store.keyspace.step()
        steps.append(store.keyspace.taken - before)
    assert max(steps) < 6000
    assert sum(steps) >= 12 * 999
    assert take(waiting) == (b"" if taken else b"\0")


@pytest.mark.interpreted("no method of a compiled class can be replaced")
def test_leases_that_go_back_look_once_for_waiters_whom_they_pass_over() -> None:
    store = Store(Limits())
    other = greeted(store)
    sessions = [greeted(store) for _ in range(3)]
    holder = greeted(store)
    for ticket in range(5):
        ask(other, "queue_push", b"q", pack(b"v"))
        ask(holder, "lease", b"q", ticket)
    for session in sessions:
        ask(session, "barrier", b"q", 9)
    looked: list[bytes] = []
    store.keyspace.finish_waking = looked.append  # type: ignore[assignment]
    holder.leave()
    assert looked == [b"q"]
    assert store.keyspace.queue_len(b"q") == 5


@pytest.mark.parametrize("wait", [("fetch", b"k9"), ("lease_later", b"k9", 1)])
def test_what_follows_does_not_change_what_waiters_of_a_multi_set_receive(
    store: Store, wait: tuple[str, object]
) -> None:
    parked(store)
    waiter, other = greeted(store), greeted(store)
    ask(waiter, *wait)
    ask(other, "multi_set", PAIRS)
    ask(other, "delete_key", b"k9")
    ask(other, "queue_push", b"k9", b"late")
    finish(other)
    assert take(waiter) == (NEW if wait[0] == "fetch" else bytes(8))


def test_a_waiter_that_sets_the_many_keys_it_waits_for_is_answered_before_its_next_command(store: Store) -> None:
    session = parked(store)
    session.receive(Command("multi_set", PAIRS).frame + Command("ping", 7).frame)
    finish(session)
    assert take(session) == b"\0" + (7).to_bytes(4, "little")
    assert nothing_is_left(store)


def test_a_queue_hands_its_item_to_a_waiter_whose_other_keys_have_been_set(store: Store) -> None:
    first, second, other = parked(store, b"q"), greeted(store), greeted(store)
    ask(second, "wait", [b"q"])
    ask(other, "multi_set", PAIRS)
    ask(other, "queue_push", b"q", b"item")
    assert take(first) == b"\0"
    finish(other)
    assert take(second) == b""
    first.leave()
    assert take(second) == b"\0"


def test_a_long_multi_set_is_executed_at_once(store: Store) -> None:
    session, other = greeted(store), greeted(store)
    ask(other, "set", KEYS[0], b"old")
    ask(session, "multi_set", PAIRS)
    assert session.running is None
    assert [store.keyspace.values[key] for key in KEYS] == [NEW] * len(KEYS)
    finish(session)
    assert nothing_is_left(store)


@pytest.mark.parametrize("waits", [False, True])
def test_a_long_multi_set_that_fits_once_is_not_counted_twice(waits: bool) -> None:
    """Its request is no longer held when its pairs are stored, even if it had to wait."""
    store = Store(Limits(value_bytes=MIB, request_bytes=8 * MIB, budget_bytes=4 * MIB), portion=3)
    session = greeted(store)
    if waits:
        parked(store)
        ask(greeted(store), "multi_set", PAIRS)
    ask(session, "multi_set", [(key, bytes(MIB // 4)) for key in KEYS])
    assert (session.held > 10 * MIB // 4) == waits
    finish(session)
    assert session.held == 0
    assert size(store.keyspace.values[KEYS[9]]) == PREFIX + MIB // 4


def test_a_long_multi_set_that_is_refused_changes_nothing(store: Store) -> None:
    session = greeted(store)
    store.identify(b"{}")
    with pytest.raises(PeerError):
        ask(session, "multi_set", [(SERVER_KEY, b""), *PAIRS])
        finish(session)
    session.leave()
    finish(session)
    assert not store.keyspace.values
    assert nothing_is_left(store)


def test_half_a_list_of_a_peer_that_disconnects_is_freed_in_steps(store: Store) -> None:
    session = greeted(store)
    session.receive(Command("multi_set", PAIRS).frame[:-1])
    session.leave()
    assert store.keyspace.work
    finish(session)
    assert store.budget.unfinished == 0
    assert nothing_is_left(store)


@pytest.mark.parametrize("queues", [1, MAX_LEASES])
def test_all_leases_of_a_peer_that_disconnects_are_back_at_once_and_in_order(store: Store, queues: int) -> None:
    session, other = greeted(store), greeted(store)
    for number in range(MAX_LEASES):
        ask(other, "queue_push", b"q%d" % (number % queues), b"%d" % number)
        ask(session, "lease", b"q%d" % (number % queues), number)
    session.leave()
    expected = [[b"%d" % number for number in range(queue, MAX_LEASES, queues)] for queue in range(queues)]
    assert [[unpack(item) for item in store.keyspace.queues[b"q%d" % queue]] for queue in range(queues)] == expected
    assert nothing_is_left(store)


@pytest.mark.parametrize("method", ["lease", "lease_later"])
def test_a_peer_may_leave_a_limited_number_of_leases_unconfirmed(store: Store, method: str) -> None:
    session, other = greeted(store), greeted(store)
    for number in range(MAX_LEASES - 1):
        ask(other, "queue_push", b"q", b"")
        ask(session, "lease", b"q", number)
    ask(session, "lease_later", b"q", MAX_LEASES)
    with pytest.raises(PeerError, match="too many unconfirmed leases"):
        ask(session, method, b"q", MAX_LEASES + 1)
    ask(other, "queue_push", b"q", b"")  # the item that is awaited is one of them
    assert session.leases is not None
    assert len(session.leases) == MAX_LEASES


def test_a_reply_may_be_as_long_as_the_limit(store: Store) -> None:
    session = greeted(store)
    for key in KEYS:
        ask(session, "set", key, b"value")
    expected = b"".join(pack(b"value") for _ in KEYS)
    store.keyspace.max_reply = len(expected)
    ask(session, "multi_get", KEYS)
    finish(session)
    assert take(session) == expected
    store.keyspace.max_reply -= 1
    with pytest.raises(PeerError, match="budget_bytes"):
        ask(session, "multi_get", KEYS)


def test_a_long_wait_hands_the_item_on_that_ended_the_one_before(store: Store) -> None:
    first, second, third, writer = (greeted(store) for _ in range(4))
    for session in (first, second, third):
        ask(session, "wait", KEYS[:1])
    for key in KEYS[1:]:
        ask(writer, "set", key, b"v")
    ask(writer, "queue_push", KEYS[0], b"item")
    assert [take(session) for session in (first, second, third)] == [b"\0", b"", b""]
    ask(first, "wait", KEYS)
    finish(first)
    assert [take(session) for session in (first, second, third)] == [b"\0", b"\0", b""]
    second.leave()
    assert take(third) == b"\0"
    first.leave()
    assert take(third) == b""


def test_large_values_longer_than_the_limit_are_no_reply(store: Store) -> None:
    session = greeted(store)
    for _ in range(2):
        ask(session, "append", b"k", bytes(4_000_000))
    store.keyspace.max_reply = 8_000_008
    ask(session, "multi_get", [b"k"])
    assert len(take(session)) == 8_000_008
    store.keyspace.max_reply = 7_000_000
    with pytest.raises(PeerError, match="budget_bytes"):
        store.keyspace.multi_get([b"k"])


def agents(store: Store, names: bytes, least: int) -> list[ServerSession]:
    """Return the sessions of agents, each with a name of one letter, that meet in a round of at least so many."""
    sessions = [greeted(store) for _ in names]
    for session, name in zip(sessions, names, strict=True):
        ask(session, "meet", b"job", bytes([name]), least, least, -1)
    return sessions


def answer(number: int, rank: int, size: int) -> bytes:
    return pack(struct.pack("<3q", number, rank, size))


@pytest.mark.parametrize("left", [-1, 0])
def test_an_agent_that_is_to_be_answered_is_so_before_it_meets_again_elsewhere(store: Store, left: int) -> None:
    """A connection that broke may still be open on the server when the agent has another one."""
    sessions = agents(store, b"abcde", 5)
    assert store.keyspace.work
    again = greeted(store)
    ask(again, "meet", b"job", b"d", 5, 5, left)
    assert take(sessions[3]) == answer(0, 3, 5)
    assert take(again) == (answer(0, 3, 5) if left < 0 else b"")
    finish(*sessions)
    assert [take(session) for session in sessions] == [answer(0, rank, 5) if rank != 3 else b"" for rank in range(5)]


def test_a_change_of_agent_that_forms_a_round_leaves_none_of_it_unanswered(store: Store) -> None:
    """By becoming the agent `f`, that of the first round leaves it; this forms the next one, of which `f` is part."""
    [alone] = agents(store, b"a", 1)
    assert take(alone) == answer(0, 0, 1)
    waiting = agents(store, b"bcdef", 5)
    ask(alone, "meet", b"job", b"f", 5, 5, -1)
    finish(alone)
    assert [take(session) for session in [*waiting, alone]] == [answer(1, min(rank, 4), 5) for rank in range(6)]


def test_agents_that_are_to_be_answered_are_so_before_they_are_removed_as_silent(store: Store) -> None:
    sessions = agents(store, b"abcde", 5)
    ask(sessions[4], "attend", b"job", b"e", 1, 1)
    assert list(store.keyspace.rounds[b"job"].agents) == [b"e"]
    finish(*sessions)
    assert [take(session)[:32] for session in sessions] == [answer(0, rank, 5) for rank in range(5)]


def test_an_agent_that_is_to_be_told_of_the_end_is_so_before_it_leaves(store: Store) -> None:
    [alone] = agents(store, b"a", 1)
    waiting = agents(store, b"bcde", 4)
    ask(alone, "attend", b"job", b"a", 3, 0)
    assert store.keyspace.work
    ask(greeted(store), "attend", b"job", b"e", 4, 0)
    finish(*waiting)
    assert [take(session) for session in waiting] == [answer(0, -2, 0)] * 4


def seventeen_await(store: Store, names: list[bytes]) -> list[ServerSession]:
    """Return sessions that wait for these keys, and for one that never comes."""
    waiting = [greeted(store) for _ in range(17)]
    for session in waiting:
        ask(session, "wait", [*names, b"never"])
        finish(session)
    return waiting


def test_writes_to_many_keys_that_the_same_few_await_are_one_piece_of_work() -> None:
    """Else each of the next commands would look for its session in all of them."""
    store = Store(Limits(), portion=20)
    names = [b"k%d" % number for number in range(200)]
    waiting = seventeen_await(store, names)
    writer = greeted(store)
    before = store.keyspace.parked
    for name in names:
        ask(writer, "set", name, pack(b""))
        assert len(store.keyspace.work) <= 1
    steps = 0
    while store.keyspace.work:
        store.keyspace.step()
        steps += 1
    assert 17 * 200 // 20 <= steps <= 17 * 200 // 5, "each step has a portion of the registrations"
    assert 0 < store.keyspace.parked < before / 100
    assert not store.keyspace.written
    ask(writer, "set", b"never", pack(b""))
    assert [take(session) for session in waiting] == [b"\0"] * 17


def test_a_session_with_many_awaited_keys_that_were_written_goes_on_later() -> None:
    store = Store(Limits(), portion=20)
    names = [b"k%d" % number for number in range(200)]
    waiting = seventeen_await(store, names)
    writer = greeted(store)
    for name in names:
        ask(writer, "set", name, pack(b""))
    ask(waiting[0], "ping", 7)
    assert take(waiting[0]) == b""
    ask(waiting[1], "cancel_wait")
    waiting[2].leave()
    finish(*waiting)
    assert take(waiting[0]) == b"\x07\0\0\0"
    assert take(waiting[1]) == b"\1"
    for session in waiting:
        session.leave()
    finish(writer)
    assert nothing_is_left(store)


def test_who_has_left_is_forgotten_however_many_keys_are_written() -> None:
    """While MULTI_SETs come one after the other there is always something to wake."""
    store = Store(Limits(), portion=20)
    waiting, gone, first, second = (greeted(store) for _ in range(4))
    ask(waiting, "wait", [b"w%d" % number for number in range(30)])
    ask(gone, "wait", [b"g%d" % number for number in range(100)])
    finish(waiting, gone)
    pairs = [(b"/%d" % number, pack(b"")) for number in range(30)]
    ask(first, "multi_set", pairs)
    gone.leave()
    for _ in range(20):
        assert store.keyspace.waking is not None
        ask(second, "multi_set", pairs)
        store.keyspace.step()
        while store.keyspace.waking is not None:
            store.keyspace.step()
        second.receive(b"")
        first, second = second, first
    assert not store.keyspace.departed
    assert not any(name.startswith(b"g") for name in store.keyspace.waiters)
