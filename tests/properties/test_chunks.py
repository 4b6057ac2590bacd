"""However bytes are cut into chunks, what is done and answered is the same."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
from hypothesis import example, given, settings

from properties.fleet import HANDSHAKE, Command
from properties.session_driver import NOTHING, cut, everything, feed, feed_as_server, greeted, session_on, take
from properties.test_fleet import commands
from support import blob
from tcpstore_async.base.limits import MIB, Limits
from tcpstore_async.session.store import Store
from tcpstore_async.wire.codecs import LARGE_VALUE_BYTES

large = st.sampled_from(
    [LARGE_VALUE_BYTES - 9, LARGE_VALUE_BYTES - 8, LARGE_VALUE_BYTES, 100_000, 300_000, 1_200_000]
).map(bytes)


def _names(count: int) -> list[bytes]:
    return [b"/key/%d" % number for number in range(count)]


large_commands = st.one_of(
    st.builds(Command, st.sampled_from(["set", "append", "queue_push"]), st.just(b"/a"), large),
    st.builds(Command, st.just("compare_set"), st.just(b"/a"), st.just(b"") | large, large),
    st.builds(Command, st.sampled_from(["wait", "check", "multi_get"]), st.integers(100, 3000).map(_names)),
    st.builds(
        lambda count, value: Command("multi_set", [(name, value) for name in _names(count)]),
        st.integers(0, 300),
        st.sampled_from([b"", b"1", bytes(700)]),
    ),
    st.builds(Command, st.just("multi_set"), st.lists(st.tuples(st.just(b"/a"), large), max_size=2)),
    st.just(Command("get", b"/a")),
    st.just(Command("queue_pop", b"/a")),
)
cuts = st.lists(st.integers(0, 2**22), max_size=12)


@settings(max_examples=200, deadline=None)
@given(st.lists(commands(), max_size=12), st.binary(max_size=20), cuts, st.sampled_from([0, 9, 2**20]))
def test_small_commands(sent: list[Command], rubbish: bytes, at: list[int], soft: int) -> None:
    data = HANDSHAKE.frame + b"".join(command.frame for command in sent) + rubbish
    whole, pieces, drops = (Store(Limits(unsent_high_water=soft)) for _ in range(3))
    expected = feed(session_on(whole), [data])
    assert feed(session_on(pieces), cut(data, at)) == expected
    assert feed(session_on(drops), cut(data, range(len(data)))) == expected
    assert everything(pieces) == everything(drops) == everything(whole)
    assert pieces.budget.unfinished == drops.budget.unfinished == whole.budget.unfinished


@settings(max_examples=80, deadline=None)
@given(st.lists(commands() | large_commands, min_size=1, max_size=5), cuts, st.integers(0, 300))
@example([Command("set", b"/a", bytes(LARGE_VALUE_BYTES - 8))], [1 + 8 + 2 + 7], 0)
@example([Command("set", b"/a", bytes(LARGE_VALUE_BYTES - 8))], [1 + 8 + 2 + 8], 0)
def test_large_commands(sent: list[Command], at: list[int], missing: int) -> None:
    data = HANDSHAKE.frame + b"".join(command.frame for command in sent)
    data = data[: max(0, len(data) - missing)]
    whole, pieces, filled = (Store(Limits()) for _ in range(3))
    expected = feed(session_on(whole), [data])
    assert feed(session_on(pieces), cut(data, at)) == expected
    assert feed_as_server(session_on(filled), cut(data, at)) == expected
    assert everything(pieces) == everything(filled) == everything(whole)
    assert pieces.keyspace.size == filled.keyspace.size == whole.keyspace.size


listed_keys = st.lists(st.binary(max_size=12), min_size=4, max_size=12)
changes = st.one_of(
    st.just(lambda raw: raw),
    st.builds(lambda at, by: lambda raw: _changed(raw, at % len(raw), by), st.integers(0, 999), st.integers(1, 255)),
    st.builds(lambda by: lambda raw: _changed(raw, len(raw) - 1, by), st.integers(1, 255)),
    st.builds(lambda at: lambda raw: raw[: at % len(raw)] + raw[at % len(raw) + 1 :], st.integers(0, 999)),
    st.builds(lambda at: lambda raw: raw[: at % len(raw)] + b"\0" + raw[at % len(raw) :], st.integers(0, 999)),
)
"""Functions that change one byte of a request, take one away, insert one, or do nothing."""


def _changed(raw: bytes, at: int, by: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ by]) + raw[at + 1 :]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(["wait", "check", "multi_get"]), listed_keys, listed_keys, st.booleans(), changes, cuts)
def test_lists_that_resemble_a_known_one(
    name: str,
    keys: list[bytes],
    others: list[bytes],
    replace: bool,
    change: Callable[[bytes], bytes],
    at: list[int],
) -> None:
    """What differs may be any byte, also a length; and the last keys may be others, of other lengths."""
    asked = [*keys[:2], *others][: len(keys)] if replace else keys
    data = change(Command(name, asked).frame) + Command("ping", 7).frame
    known, drops, unknown = (Store(Limits()) for _ in range(3))
    expected = feed(session_on(unknown), [HANDSHAKE.frame, data])
    for store, pieces in ((known, cut(data, at)), (drops, cut(data, range(len(data))))):
        feed(session_on(store), [HANDSHAKE.frame, Command("check", keys).frame * 2])
        session = session_on(store)
        assert feed(session, [HANDSHAKE.frame, *pieces]) == expected
        assert everything(store) == everything(unknown)
        assert (session.held > 0) == (unknown.budget.unfinished > 0)
        assert store.budget.unfinished == session.held
        session.leave()
        assert store.budget.unfinished == 0
        assert all(listed.compared == 0 for listed in store.key_lists.lists.values())


@settings(max_examples=100, deadline=None)
@given(commands() | large_commands, st.integers(0, 2**22))
def test_half_a_frame_has_no_effect(command: Command, at: int) -> None:
    store = Store(Limits())
    session = greeted(store)
    if command.name in ("unknown", "validate"):
        return
    session.receive(command.frame[: at % command.size])
    assert not session.out
    assert everything(store) == NOTHING
    session.leave()
    assert store.budget.unfinished == 0
    assert store.keyspace.size == 0


@settings(max_examples=100, deadline=None)
@given(commands() | large_commands, st.integers(0, 2**22), st.integers(0, 2**22))
def test_an_incomplete_frame_counts(command: Command, one: int, two: int) -> None:
    if command.name in ("unknown", "validate"):
        return
    store = Store(Limits())
    session = greeted(store)
    pieces = cut(command.frame[:-1], [one, two])
    arrived = 0
    for piece in pieces:
        session.receive(piece)
        arrived += len(piece)
        assert store.budget.unfinished == session.held
        if command.name != "compare_set":  # see the next test
            # All but the opcode, the key and lengths before a large value.
            assert session.held >= arrived - 64
    session.receive(command.frame[arrived:])
    while session.stalled():
        session.receive(b"")
    assert (store.budget.unfinished, session.held) == (0, 0)


def test_the_expected_value_counts_while_the_desired_one_arrives() -> None:
    session = greeted()
    session.receive(Command("compare_set", b"/a", bytes(8 * MIB), bytes(LARGE_VALUE_BYTES)).frame[:-1])
    assert session.store.budget.unfinished > 8 * MIB


def test_a_stalled_session_goes_on_where_it_stopped() -> None:
    session = greeted(limits=Limits(unsent_high_water=30))
    session.receive(Command("set", b"/a", b"12345").frame)
    gets = Command("get", b"/a").frame * 5
    session.receive(gets + Command("add", b"/n", 1).frame[:-3])
    assert session.stalled()
    assert take(session) == blob(b"12345") * 3
    session.receive(b"")
    assert take(session) == blob(b"12345") * 2
    assert not session.stalled()
    session.receive(Command("add", b"/n", 1).frame[-3:])
    assert take(session) == (1).to_bytes(8, "little")


def test_a_stalled_session_keeps_later_input() -> None:
    session = greeted(limits=Limits(unsent_high_water=3))
    session.receive(Command("ping", 1).frame * 2)
    assert session.stalled()
    session.receive(Command("ping", 2).frame)
    assert take(session) == b"\1\0\0\0"
    session.receive(b"")
    assert take(session) == b"\1\0\0\0"
    session.receive(b"")
    assert take(session) == b"\2\0\0\0"
    assert not session.stalled()
    assert session.held == 0
