"""WAIT, CHECK and MULTI_GET of lists that many peers send alike: one registration and one reply for all."""

from __future__ import annotations

import tracemalloc

import pytest

from properties.fleet import Command, registrations
from properties.session_driver import greeted, take
from support import blob
from tcpstore_async.base.errors import LimitError
from tcpstore_async.base.limits import GIB, MEMBER_BYTES, PARKED_BYTES, Limits
from tcpstore_async.keyspace.keyspace import Keyspace
from tcpstore_async.keyspace.waiter_types import SharedWait
from tcpstore_async.session.key_list_cache import FEWEST
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store

KEYS = [b"/a", b"/b", b"/c", b"/d"]
WAIT, CHECK, MULTI_GET = Command("wait", KEYS), Command("check", KEYS), Command("multi_get", KEYS)
CANCEL = Command("cancel_wait")
assert len(KEYS) == FEWEST


def ask(session: ServerSession, *commands: Command) -> bytes:
    for command in commands:
        session.receive(command.frame)
    return take(session)


def parked(store: Store, count: int, *, wait: Command = WAIT) -> list[ServerSession]:
    """Return sessions that have sent this, and await something."""
    sessions = [greeted(store) for _ in range(count)]
    for session in sessions:
        assert ask(session, wait) == b""
    return sessions


def woken(sessions: list[ServerSession]) -> list[int]:
    """Return which of the sessions were woken since the last call."""
    return [number for number, session in enumerate(sessions) if take(session) == b"\0"]


def write(store: Store, *keys: bytes, value: bytes = b"v") -> None:
    ask(greeted(store), *(Command("set", key, value) for key in keys))
    while store.keyspace.work:
        store.keyspace.step()


def groups(keyspace: Keyspace) -> list[int]:
    """Return the sizes of the registered groups, in order of arrival."""
    found = {waiter: None for waiters in keyspace.waiters.values() for waiter in waiters}
    return [len(waiter.members) for waiter in found if isinstance(waiter, SharedWait)]


# Registration


def test_all_but_the_first_are_registered_as_one(store: Store, keyspace: Keyspace) -> None:
    """The list is known from the first request on and tracked from the second."""
    sessions = parked(store, 10)
    assert groups(keyspace) == [1, 9]
    assert keyspace.parked == 2 * (PARKED_BYTES + 2) * 4 + 10 * MEMBER_BYTES
    write(store, *KEYS[:3])
    assert woken(sessions) == []
    sessions += parked(store, 1)
    assert groups(keyspace) == [1, 10]
    write(store, KEYS[3])
    assert woken(sessions) == list(range(11))
    assert (keyspace.waiters, keyspace.parked) == ({}, 0)


def test_one_more_waiter_costs_the_same_for_any_list(store: Store) -> None:
    wait = Command("wait", [b"/key/%04d" % number for number in range(900)])
    sessions = [greeted(store) for _ in range(2002)]
    for session in sessions[:2]:
        ask(session, wait)
    tracemalloc.start()
    try:
        for session in sessions[2:]:
            ask(session, wait)
        each = tracemalloc.get_traced_memory()[0] / 2000
    finally:
        tracemalloc.stop()
    assert each < 220, f"{each:.0f} bytes a waiter"


def test_shorter_lists_are_registered_alone(store: Store, keyspace: Keyspace) -> None:
    parked(store, 3, wait=Command("wait", KEYS[:3]))
    assert groups(keyspace) == []
    assert store.key_lists.lists == {}


# Ends


def test_a_large_group_is_woken_in_steps() -> None:
    store = Store(Limits(), portion=100)
    sessions = parked(store, 251)
    writer = greeted(store)
    ask(writer, *(Command("set", key, b"v") for key in KEYS))
    assert woken(sessions) == [0]  # the first one is registered by itself
    for expected in (range(1, 101), range(101, 201), range(201, 251)):
        store.keyspace.step()
        assert woken(sessions) == list(expected)
    assert (store.keyspace.work, store.keyspace.parked) == (type(store.keyspace.work)(), 0)


def test_a_member_that_sends_while_its_group_is_woken_is_woken_first() -> None:
    store = Store(Limits(), portion=100)
    sessions = parked(store, 251)
    ask(greeted(store), *(Command("set", key, b"v") for key in KEYS))
    assert ask(sessions[200], Command("ping", 7)) == b"\0\7\0\0\0"
    assert ask(sessions[250], CANCEL) == b"\0\1"
    sessions[240].leave()
    while store.keyspace.work:
        store.keyspace.step()
    assert woken(sessions) == [number for number in range(251) if number not in (200, 240, 250)]


def test_a_member_is_woken_first_though_its_group_is_still_to_be_counted_down() -> None:
    store = Store(Limits(), portion=20)
    single = parked(store, 15, wait=Command("wait", KEYS[3:]))
    lists = [[*KEYS[:3], b"/%d" % number, KEYS[3]] for number in range(10)]
    sessions = [session for keys in lists for session in parked(store, 3, wait=Command("wait", keys))]
    write(store, *KEYS[:3], *(b"/%d" % number for number in range(10)))
    ask(greeted(store), Command("set", KEYS[3], b"v"))
    assert store.keyspace.work
    assert ask(sessions[29], Command("ping", 7)) == b"\0\7\0\0\0"
    assert ask(sessions[28], CANCEL) == b"\0\1"
    while store.keyspace.work:
        store.keyspace.step()
    assert len(woken(single)) == 15
    assert woken(sessions) == list(range(28))
    assert store.keyspace.parked == 0


# A second wait


def test_a_second_wait_that_does_not_fit_changes_nothing() -> None:
    store = Store(Limits())
    sessions = parked(store, 3)
    store.keyspace.on_full = None
    store.keyspace.max_size = store.keyspace.size + PARKED_BYTES
    before = registrations(store.keyspace), store.keyspace.size
    for second in (Command("wait", [b"/x"]), Command("barrier", b"/x", 2)):
        with pytest.raises(LimitError):
            sessions[2].receive(second.frame)
        assert (registrations(store.keyspace), store.keyspace.size) == before
        assert store.keyspace.values == {}


# Replies


def test_a_reply_is_made_once_until_a_key_changes(store: Store) -> None:
    write(store, *KEYS)
    sessions = [greeted(store) for _ in range(5)]
    for session in sessions:
        session.receive(MULTI_GET.frame)
    assert [len(session.out) for session in sessions] == [4, 4, 1, 1, 1]
    assert sessions[2].out[0] is sessions[3].out[0] is sessions[4].out[0]
    assert {take(session) for session in sessions} == {blob(b"v") * 4}
    write(store, b"/x")
    sessions[0].receive(MULTI_GET.frame)
    assert len(sessions[0].out) == 1


CHANGES = [
    Command("set", b"/b", b"new"),
    Command("set", b"/b", bytes(30)),
    Command("compare_set", b"/b", b"7", b"new"),
    Command("append", b"/b", b"0"),
    Command("add", b"/b", 1),
    Command("multi_set", [(b"/x", b"1"), (b"/b", b"new")]),
    Command("delete_key", b"/b"),
    Command("barrier", b"/b", 0),
    Command("join", b"/b", b"token"),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda command: command.name)
def test_every_change_ends_a_kept_reply(store: Store, change: Command) -> None:
    write(store, *KEYS, value=b"7")
    session, other = greeted(store), greeted(store)
    for form in (Command("set", b"/b", b"7"), Command("add", b"/b", 7), Command("append", b"/b", b"7")):
        ask(other, Command("delete_key", b"/b"), form)
        for _ in range(4):
            ask(session, MULTI_GET)
            assert ask(session, CHECK) == b"\0"
        assert store.keyspace.tracked[b"/b"].reply is not None
        ask(other, change)
        reply = ask(session, MULTI_GET)  # before anything else reads the new value
        assert reply == b"".join(ask(other, Command("get", key)) for key in KEYS)
        assert ask(session, CHECK) == (b"\1" if change.name == "delete_key" else b"\0")


def test_a_reserved_key_in_a_list(store: Store) -> None:
    write(store, *KEYS)
    check = Command("check", [*KEYS, b"tcpstore_async/joins"])
    session = greeted(store)
    assert [ask(session, check) for _ in range(3)] == [b"\1"] * 3
    sessions = parked(store, 3, wait=Command("wait", check.fields[0]))
    store.announce(3)
    assert ask(session, check) == b"\0"
    assert ask(session, Command("wait", check.fields[0])) == b"\0"
    assert woken(sessions) == []  # as for one key


def test_unsent_replies_are_counted_once(store: Store) -> None:
    write(store, *KEYS, value=bytes(10_000))
    sessions = [greeted(store) for _ in range(50)]
    for session in sessions:
        session.receive(MULTI_GET.frame)
    before = store.budget.others
    for session in sessions[2:]:
        session.keep_unsent(list(session.out), 0)
    assert store.budget.others - before < 40_000 + 48 * 1100 + 400


def test_a_large_reply_is_not_kept(store: Store) -> None:
    write(store, *KEYS, value=bytes(1 << 19))
    session = greeted(store)
    for _ in range(4):
        session.receive(MULTI_GET.frame)
        assert len(session.out) == 4
        take(session)


def test_a_reply_that_does_not_fit_is_not_kept() -> None:
    """Lists that are being compared stay, so they leave no room."""
    store = Store(Limits(budget_bytes=64 << 20, value_bytes=1 << 20))
    cache = store.key_lists
    write(store, *KEYS, value=bytes(30_000))
    session = greeted(store)
    lists = [Command("multi_get", [b"/%d" % number, *KEYS]) for number in range(20)]
    for command in lists:
        ask(session, command)
        greeted(store).receive(command.frame[:-1])
    assert all(listed.compared for listed in cache.lists.values())
    for command in lists:
        expected = bytes(8) + (blob(bytes(30_000))) * 4
        for _ in range(3):
            assert ask(session, command) == expected
            assert cache.size <= cache.capacity
    kept = [listed for listed in cache.lists.values() if listed.counted_reply]
    assert 5 < len(kept) < 10
    assert cache.size == sum(listed.size for listed in cache.lists.values())


# Recognizing lists


def test_lists_are_forgotten_when_they_take_too_much() -> None:
    store = Store(Limits(budget_bytes=64 << 20, value_bytes=1 << 20))
    cache = store.key_lists
    assert cache.capacity == 1 << 20
    session = greeted(store)
    lists = [Command("check", [b"/%d/%d" % (number, at) for at in range(50)]) for number in range(300)]
    for command in lists:
        assert ask(session, command, command) == b"\1\1"
        assert cache.size <= cache.capacity
    assert 50 < len(cache.lists) < 300
    assert len(store.keyspace.tracked) == 50 * len(cache.lists)
    assert store.budget.others == store.budget.session_bytes + cache.size


def test_a_forgotten_list_keeps_its_waiters() -> None:
    store = Store(Limits())
    store.key_lists.capacity = 4000
    early = parked(store, 3)
    for number in range(9):
        command = Command("check", [b"/%d/%d" % (number, at) for at in range(4)])
        ask(greeted(store), command, command)
    assert store.keyspace.tracked.get(b"/a") is None
    late = parked(store, 3)
    assert groups(store.keyspace) == [1, 2, 1, 2]
    write(store, *KEYS)
    assert woken(early + late) == [0, 1, 2, 3, 4, 5]


def test_a_cut_frame_that_is_known_is_not_kept(store: Store) -> None:
    wait = Command("wait", [b"/key/%04d" % number for number in range(900)])
    parked(store, 2, wait=wait)
    for step in (1, 1000, 5000, wait.size - 1):
        session = greeted(store)
        for at in range(0, wait.size, step):
            session.receive(wait.frame[at : at + step])
            assert session.input_buffer is None or at < 32, "nothing is joined with what comes next"
            assert session.held < 200
        assert session.group is not None
        assert store.budget.unfinished == 0


@pytest.mark.parametrize("differs", [40, 5000, 5007, 5008, -1])
def test_what_had_arrived_counts_once_it_differs(store: Store, differs: int) -> None:
    """The peer that stalls then holds what it has sent, whole keys and the start of the next."""
    wait = Command("wait", [b"/key/%04d" % number for number in range(900)])
    parked(store, 2, wait=wait)
    session = greeted(store)
    frame = wait.frame
    differs %= len(frame)
    session.receive(frame[: differs - 3])
    assert session.held < 200
    session.receive(frame[differs - 3 : differs] + bytes([frame[differs] ^ 1]))
    if differs < wait.size - 1:
        assert session.held > differs
        assert store.budget.unfinished == session.held
        session.leave()
    assert store.budget.unfinished == 0


@pytest.mark.parametrize("last", [b"/d", b"/e", b"/longer", b"", b"/", b"/d2"])
@pytest.mark.parametrize("step", [1, 2, 3, 5, 7, 11, 23, 50])
def test_a_frame_that_begins_as_a_known_list(store: Store, step: int, last: bytes) -> None:
    """However it is cut, it is complete with its own last byte."""
    write(store, b"/a", b"/b", b"/c", last)
    session = greeted(store)
    ask(session, CHECK, CHECK)
    other = Command("check", [*KEYS[:3], last])
    for at in range(0, other.size - 1, step):
        assert not session.out
        session.receive(other.frame[at : min(at + step, other.size - 1)])
    assert not session.out
    session.receive(other.frame[-1:])
    assert take(session) == b"\0"
    assert store.budget.unfinished == 0


def test_a_peer_that_leaves_in_the_middle_of_a_frame(store: Store) -> None:
    ask(greeted(store), CHECK, CHECK)
    (listed,) = store.key_lists.lists.values()
    session, other = greeted(store), greeted(store)
    for one in (session, other):
        one.receive(CHECK.frame[:-1])
    assert listed.compared == 2
    session.leave()
    assert listed.compared == 1
    other.receive(CHECK.frame[-1:])
    assert (listed.compared, take(other)) == (0, b"\1")


# The budget


def test_a_job_of_98304_ranks_meets_no_limit() -> None:
    """In small: 1/48 of the ranks and of the budget, with all the keys."""
    ranks, roots = 98_304 // 48, 768
    store = Store(Limits(budget_bytes=8 * GIB // 48))
    keys = [b"/default_pg/0//cuda//nccl_storekey_0_%d" % number for number in range(roots)]
    wait, read = Command("wait", keys), Command("multi_get", keys)
    sessions = [greeted(store) for _ in range(ranks)]
    for session in sessions:
        session.receive(wait.frame)
        assert session.held < 300
    assert store.keyspace.parked < 2 * 768 * 600 + ranks * MEMBER_BYTES
    write(store, *keys, value=bytes(128))
    assert woken(sessions) == list(range(ranks))
    for session in sessions:
        session.receive(read.frame)
        session.keep_unsent(list(session.out), 0)
        session.out.clear()
    assert not store.hub.evicted
    assert store.budget.used() < store.budget.limit // 8


def test_who_is_alone_in_a_group_holds_all_of_it(store: Store) -> None:
    wait = Command("wait", [b"/key/%04d" % number for number in range(900)])
    (alone,) = parked(store, 1, wait=wait)
    assert store.budget._holds(alone) > 900 * PARKED_BYTES
    many = parked(store, 100, wait=wait)
    assert store.budget._holds(many[0]) < 6000
