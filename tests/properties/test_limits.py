"""Limits are checked on what is announced, and whoever goes over one has changed nothing."""

from __future__ import annotations

import random
import tracemalloc

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from properties.fleet import OPCODES, Command, random_command
from properties.limited import run as run_limited
from properties.session_driver import NOTHING, cut, everything, feed, greeted, measured, take, with_store_of
from properties.test_fleet import commands
from support import blob, u64
from tcpstore_async.base.errors import BudgetError, LimitError, ProtocolError
from tcpstore_async.base.limits import ENTRY_BYTES, GIB, MIB, PARKED_BYTES, Limits
from tcpstore_async.session.store import Store
from tcpstore_async.wire.values import pack

SMALL = Limits(key_bytes=10, value_bytes=100, keys=4)
SHORT = Limits(key_bytes=70, value_bytes=50, keys=4, request_bytes=200)
HUGE = [2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1]

KEYED = ["set", "compare_set", "get", "add", "delete_key", "append", "queue_push", "queue_pop", "queue_len", "barrier"]
KEYED += ["fetch", "wait_count"]
VALUED = ["set", "append", "queue_push"]
LISTED = ["check", "wait", "multi_get", "multi_set", "introduce"]
PAIRED = {"multi_set": blob(b"v"), "introduce": blob(b"v")}
"""What follows each name of a list."""


def _refused(start: bytes, limits: Limits = SMALL) -> LimitError:
    """The error that this beginning of a frame meets, in one chunk; byte by byte it must meet the same."""
    whole, drops = greeted(limits=limits), greeted(limits=limits)
    with pytest.raises(LimitError) as error:
        whole.receive(start)
    with pytest.raises(LimitError) as error_of_drops:
        for byte in start:
            drops.receive(bytes([byte]))
    assert error.value.args == error_of_drops.value.args
    assert everything(whole.store) == NOTHING
    return error.value


@pytest.mark.parametrize("start", [
    *[bytes([OPCODES[name]]) for name in KEYED],
    *[bytes([OPCODES[name]]) + u64(3) + blob(b"/a") + PAIRED.get(name, b"") for name in LISTED],
])  # fmt: skip
@pytest.mark.parametrize("length", [11, *HUGE])
def test_key_length(start: bytes, length: int) -> None:
    error = _refused(start + u64(length))
    assert (error.limit, error.size, error.allowed) == ("key_bytes", length, 10)


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("count", [5, *HUGE])
def test_number_of_keys(name: str, count: int) -> None:
    error = _refused(bytes([OPCODES[name]]) + u64(count))
    assert (error.limit, error.size, error.allowed) == ("keys", count, 4)


@pytest.mark.parametrize("start", [
    *[bytes([OPCODES[name]]) + blob(b"/a") for name in VALUED],
    bytes([OPCODES["compare_set"]]) + blob(b"/a"),
    bytes([OPCODES["compare_set"]]) + blob(b"/a") + blob(b"expected"),
    bytes([OPCODES["multi_set"]]) + u64(2) + blob(b"/a"),
    bytes([OPCODES["multi_set"]]) + u64(2) + blob(b"/a") + blob(b"v") + blob(b"/b"),
])  # fmt: skip
@pytest.mark.parametrize("length", [101, *HUGE])
def test_value_length(start: bytes, length: int) -> None:
    error = _refused(start + u64(length))
    assert (error.limit, error.size, error.allowed) == ("value_bytes", length, 100)


def test_exactly_at_the_limit_is_within_it() -> None:
    session = greeted(limits=SMALL)
    name = b"k" * 10
    session.receive(Command("multi_set", [(name, bytes(100))] * 4).frame)
    session.receive(Command("multi_get", [name] * 4).frame)
    assert take(session) == blob(bytes(100)) * 4


@pytest.mark.parametrize("command", [
    Command("multi_set", [(b"/a", bytes(50))] * 4),
    Command("wait", [b"/a" * 30] * 4),
], ids=repr)  # fmt: skip
# quirk: request_bytes
def test_length_of_a_request(command: Command) -> None:
    for chunks in ([command.frame], cut(command.frame, range(command.size))):
        session = greeted(limits=SHORT)
        assert feed(session, chunks) == (b"", "request_bytes")
        assert everything(session.store) == NOTHING


@pytest.mark.parametrize("name", ["multi_set", "wait", "check", "multi_get"])
@pytest.mark.parametrize("count", [3, 4, 20])
# quirk: request_key_bytes
def test_length_of_all_keys_of_a_request(name: str, count: int) -> None:
    limits = Limits(key_bytes=70, value_bytes=50, request_key_bytes=70 * count - 60)
    fits, longer = ([b"%070d" % key for key in range(count - 1)] + [b"c" * last] for last in (10, 11))
    for size in (1, 40, 10_000):
        session = greeted(limits=limits)
        frame = _naming(name, fits).frame
        assert feed(session, cut(frame, range(0, len(frame), size)))[1] == ""
        session.leave()
        session = greeted(limits=limits)
        frame = _naming(name, longer).frame
        assert feed(session, cut(frame, range(0, len(frame), size))) == (b"", "request_key_bytes")
        assert everything(session.store) == NOTHING


def _naming(name: str, keys: list[bytes]) -> Command:
    return Command(name, [(key, b"v") for key in keys] if name == "multi_set" else keys)


def test_a_list_item_is_refused_before_it_arrives() -> None:
    item = blob(b"/a") + blob(bytes(50))
    error = _refused(bytes([OPCODES["multi_set"]]) + u64(4) + item * 2 + blob(b"/b") + u64(50), SHORT)
    assert error.limit == "request_bytes"


def test_unfinished_frames_of_all_connections_together() -> None:
    store = Store(Limits(budget_bytes=100 * MIB))
    first, second, third = greeted(store), greeted(store), greeted(store)
    frame = Command("set", b"/a", bytes(8 * MIB)).frame
    large = Command("multi_set", [(b"/a", bytes(8 * MIB))] * 9).frame
    second.receive(frame[:-10])
    first.receive(large[:-10])
    third.receive(frame[:-10])
    assert store.hub.pending_flush == [first]
    error = store.hub.evicted[first]
    assert isinstance(error, BudgetError)
    assert error.size > error.allowed == 100 * MIB - 2 * (100 * MIB // 16)
    assert error.held > 64 * MIB
    assert (first.input_buffer, first.partial, first.held) == (None, None, 0)
    assert store.budget.unfinished == second.held + third.held
    first.leave()
    second.receive(frame[-10:])
    third.receive(frame[-10:])
    assert store.budget.unfinished == 0


def test_the_largest_holder_may_be_the_last_to_connect() -> None:
    store = Store(Limits(budget_bytes=100 * MIB))
    first, second = greeted(store), greeted(store)
    first.receive(Command("set", b"/a", bytes(8 * MIB)).frame[:-10])
    with pytest.raises(BudgetError) as raised:
        second.receive(Command("multi_set", [(b"/a", bytes(8 * MIB))] * 12).frame[:-10])
    assert raised.value.held > 80 * MIB
    second.leave()
    assert store.budget.unfinished == first.held


def test_an_announcement_costs_no_memory() -> None:
    sessions = [greeted() for _ in range(20)]
    starts = [
        bytes([OPCODES["set"]]) + blob(b"/a") + u64(8 * MIB),
        bytes([OPCODES["compare_set"]]) + blob(b"/a") + blob(b"v") + u64(8 * MIB),
        bytes([OPCODES["multi_set"]]) + u64(131_072) + blob(b"/a") + u64(8 * MIB),
        bytes([OPCODES["wait"]]) + u64(131_072),
    ]
    tracemalloc.start()
    try:
        for number, session in enumerate(sessions):
            session.receive(starts[number % 4])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(sessions) * MIB // 2


def test_a_multi_get_that_names_a_large_value_often_costs_no_memory() -> None:
    session = greeted(limits=Limits(budget_bytes=GIB))
    session.receive(Command("set", b"/a", bytes(8 * MIB)).frame)
    frame = Command("multi_get", [b"/a"] * 200).frame
    assert len(frame) < 2_100
    tracemalloc.start()
    try:
        with pytest.raises(LimitError) as error:
            session.receive(frame)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert error.value.limit == "budget_bytes"
    assert error.value.size == 200 * (8 * MIB + 8)
    assert peak < 64 * 1024
    assert session.unsent == 0


@pytest.mark.parametrize("how", ["set", "append"])
def test_a_multi_get_that_names_a_value_under_append_often_costs_one_copy(how: str) -> None:
    session = greeted(limits=Limits(budget_bytes=GIB // 2))
    session.receive(Command("append", b"/a", bytes(4 * MIB)).frame)
    session.receive(Command(how, b"/a", bytes(4 * MIB)).frame)
    with pytest.raises(LimitError):
        tracemalloc.start()
        try:
            session.receive(Command("multi_get", [b"/a"] * 200).frame)
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    assert peak < 18 * MIB  # one value, flattened


def test_list_keys_is_measured_before_it_is_built() -> None:
    limits = Limits(value_bytes=100, budget_bytes=2 * MIB)
    session = greeted(limits=limits)
    for number in range(200):
        session.receive(Command("set", b"%08000d" % number, b"").frame)
    tracemalloc.start()
    try:
        with pytest.raises(LimitError) as error:
            session.receive(Command("list_keys").frame)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert error.value.limit == "budget_bytes"
    assert error.value.size > 8 + 2 * 200 * 8008
    assert peak < 64 * 1024


# The size of the store

FULL = 3 * (ENTRY_BYTES + 20) + 2 * PARKED_BYTES


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.booleans(), commands()), max_size=40), st.sampled_from([400, 700, FULL, 4 * FULL]))
def test_a_full_store_refuses_whole_commands(sent: list[tuple[bool, Command]], most: int) -> None:
    _fill(sent, most)


@pytest.mark.parametrize("seed", range(10))
def test_a_full_store_refuses_whole_commands_for_long(seed: int) -> None:
    rng = random.Random(seed)
    kinds = ["set", "append", "add", "multi_set", "multi_set", "compare_set", "queue_push", "wait", "barrier", "get"]
    kinds += ["delete_key", "queue_pop", "cancel_wait", "fetch", "wait_count", "wait_count"]
    names = [b"/a", b"/b", b"q"]
    sent = [(rng.random() < 0.5, random_command(rng, names, rng.choice(kinds))) for _ in range(1500)]
    _fill(sent, rng.choice([400, 700, FULL]))


def _fill(sent: list[tuple[bool, Command]], most: int) -> None:
    store = with_store_of(most)
    sessions = [greeted(store), greeted(store)]
    for which, command in sent:
        if command.name in ("unknown", "validate"):
            continue
        before = everything(store), measured(store)
        session = sessions[which]
        try:
            session.receive(command.frame)
        except LimitError as error:
            assert error.limit == "budget_bytes"
            assert error.size > error.allowed == most
            assert (everything(store), measured(store)) == before
            assert not store.hub.pending_flush
            # Were this a server, the session would leave; but nothing happened, so it may as well go on.
            session.input_buffer = None
        except ProtocolError:
            assert (everything(store), measured(store)) == before
        assert measured(store) <= most
        for other in sessions:
            take(other)
        store.hub.pending_flush.clear()


def test_a_multi_set_may_pass_through_more_than_fits() -> None:
    """What counts is the store that the request leaves."""
    most = 3 * (ENTRY_BYTES + 2 + 8) + 100
    store = with_store_of(most)
    session = greeted(store)
    session.receive(Command("set", b"/c", bytes(100)).frame)
    for pairs in (
        [(b"/a", b""), (b"/b", bytes(100)), (b"/c", b"")],
        [(b"/c", bytes(100)), (b"/b", b"")],
        [(b"/a", bytes(200)), (b"/a", b"")],
    ):
        session.receive(Command("multi_set", pairs).frame)
        for key, value in dict(pairs).items():
            assert store.keyspace.get(key) == pack(value)


def test_an_append_to_a_counter_is_within_the_limit() -> None:
    store = with_store_of(ENTRY_BYTES + 2 + 8 + 1)
    session = greeted(store)
    session.receive(Command("add", b"/n", 10**18).frame)
    with pytest.raises(LimitError):
        session.receive(Command("append", b"/n", b"1").frame)
    assert measured(store) <= ENTRY_BYTES + 2 + 8 + 1


# What tokens have stored


@pytest.mark.parametrize("seed", range(60))
def test_what_is_counted_for_a_token_is_what_its_holders_have_stored(seed: int) -> None:
    assert run_limited(seed) > 0
