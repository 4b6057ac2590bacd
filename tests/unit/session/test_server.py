"""The server's side of a connection."""

from __future__ import annotations

import gc
import struct
import weakref

import pytest

from conformance.frames import introduce
from properties.session_driver import take
from support import HANDSHAKE, blob, keys, u64
from tcpstore_async.base.errors import LimitError, ProtocolError
from tcpstore_async.base.limits import Limits
from tcpstore_async.session.peer import NO_PID
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store
from tcpstore_async.session.tls import HANDSHAKE as TLS_HANDSHAKE
from tcpstore_async.wire.commands import BY_OPCODE

PING = b"\x0d"
GET = b"\x03"
SET = b"\x01"
ADD = b"\x04"
WAIT = b"\x06"
FETCH = b"\x40"
WAIT_COUNT = b"\x42"


@pytest.fixture
def store() -> Store:
    return Store(Limits())


def join(store: Store) -> ServerSession:
    session = ServerSession(store, "owner", "10.0.0.7", 4711, 1.5)
    session.receive(HANDSHAKE)
    return session


# Who it is


def test_what_is_known_of_the_peer(store: Store) -> None:
    session = join(store)
    assert (session.owner, session.host, session.port, session.connected_at) == ("owner", "10.0.0.7", 4711, 1.5)
    assert (session.pid, str(session)) == (NO_PID, "10.0.0.7:4711")
    session.receive(PING + struct.pack("<I", 4242))
    assert take(session) == struct.pack("<I", 4242)
    assert (session.pid, str(session)) == (4242, "10.0.0.7:4711 (pid 4242)")
    session.receive(GET + blob(b"/k")[:-1])
    assert session.slot.command.name == "GET"


def test_an_ipv6_peer_is_written_as_one(store: Store) -> None:
    assert str(ServerSession(store, None, "fe80::1", 5, 0.0)) == "[fe80::1]:5"


def test_an_introduce(store: Store) -> None:
    session = join(store)
    session.receive(introduce((b"rank", b"3"), (b"job", "søk".encode())))
    assert take(session) == b""
    assert (session.peer, str(session)) == ({"rank": "3", "job": "søk"}, "10.0.0.7:4711 (rank 3, job søk)")
    session.receive(PING + struct.pack("<I", 42))
    assert str(session) == "10.0.0.7:4711 (pid 42, rank 3, job søk)"
    session.receive(introduce((b"pid", b"7"), (b"rank", b"1"), (b"rank", b"2")))
    assert str(session) == "10.0.0.7:4711 (pid 7, rank 2)"
    session.receive(introduce())
    assert (session.peer, str(session)) == ({}, "10.0.0.7:4711 (pid 7)")
    session.receive(PING + struct.pack("<I", 43))
    session.receive(introduce((b"pid", b"9" * 30)))
    assert session.pid == 7


@pytest.mark.parametrize("raw", [
    b"\n", b"a\r\nERROR: all is lost", b"\x1b[31m", b"\0\t", b"\xff\xfe", b"\xed\xa0\x80", "\u2028\u202e\x85".encode(),
])  # fmt: skip
def test_an_introduction_breaks_no_log_line(store: Store, raw: bytes) -> None:
    session = join(store)
    session.receive(introduce((raw, raw), (b"after", b"all")))
    assert str(session).isprintable()
    assert len(str(session).splitlines()) == 1
    str(session).encode()
    assert session.peer["after"] == "all"


def test_the_size_of_an_introduction_is_limited(store: Store) -> None:
    """Names and values, with the lengths of the values: so the number of items has a limit too."""
    session, other, third = join(store), join(store), join(store)
    session.receive(introduce((b"host", bytes(2048 - 4 - 8))))
    with pytest.raises(ProtocolError, match="INTRODUCE of more than 2048 bytes"):
        session.receive(introduce((b"host", bytes(2048 - 4 - 8 + 1))))
    assert len(session.peer["host"]) == 4 * (2048 - 4 - 8)  # the former one stands
    other.receive(introduce(*[(b"", b"")] * 256))
    assert other.peer == {"": ""}
    with pytest.raises(ProtocolError):
        third.receive(introduce(*[(b"", b"")] * 257))


# A value, now or later


def test_a_large_deferred_value_is_not_copied(store: Store) -> None:
    sessions = [join(store) for _ in range(20)]
    for session in sessions:
        session.receive(FETCH + blob(b"/k"))
    setter = join(store)
    frame = SET + blob(b"/k") + blob(bytes(8 << 20))
    setter.receive(frame[:100_000])
    assert setter.large_value() is not None
    setter.receive(frame[100_000:])
    for session in sessions:
        assert session.out[0] is store.keyspace.values[b"/k"]
        assert session.unsent == len(session.out[0]) == (8 << 20) + 8


def test_a_fetch_with_unsent_replies() -> None:
    """The value comes behind them, even if that makes them more than the high-water mark."""
    store = Store(Limits(value_bytes=100, unsent_high_water=50))
    session, setter = join(store), join(store)
    session.receive(SET + blob(b"/k") + blob(bytes(52)) + FETCH + blob(b"/j") + (GET + blob(b"/k")) * 3)
    assert (session.unsent, session.stalled()) == (60, True)
    setter.receive(SET + blob(b"/j") + blob(bytes(100)))
    assert session.unsent == 168
    assert take(session) == blob(bytes(52)) + blob(bytes(100))
    session.receive(b"")
    assert take(session) == blob(bytes(52))


# The beginning


@pytest.mark.parametrize("magic", [0, 0x3C85F7CF, 0xCEF7853C, 2**32 - 1])
def test_a_wrong_magic_number(store: Store, magic: int) -> None:
    session = ServerSession(store, None, "::1", 1, 0.0)
    with pytest.raises(ProtocolError, match=f"VALIDATE carries {magic:#x}"):
        session.receive(b"\0" + struct.pack("<I", magic) + SET + blob(b"/k") + blob(b"v"))
    assert store.keyspace.num_keys() == 0


@pytest.mark.parametrize("opcode", range(1, 256))
def test_a_first_frame_that_is_not_validate(store: Store, opcode: int) -> None:
    session = ServerSession(store, None, "::1", 1, 0.0)
    expected = f"first frame has opcode {opcode}, expected VALIDATE$"
    if opcode == TLS_HANDSHAKE:
        expected = "it began a TLS handshake, but this server does not use TLS$"
    with pytest.raises(ProtocolError, match=expected):
        session.receive(bytes([opcode]))


@pytest.mark.parametrize("opcode", [0, *(opcode for opcode, command in enumerate(BY_OPCODE) if command is None)])
def test_an_unknown_opcode(store: Store, opcode: int) -> None:
    session = join(store)
    with pytest.raises(ProtocolError, match=f"unknown opcode {opcode}"):
        session.receive(SET + blob(b"/k") + blob(b"v") + GET + blob(b"/k") + bytes([opcode]) + ADD)
    assert take(session) == blob(b"v")


# What is said


def test_a_value_is_sent_without_a_copy(store: Store) -> None:
    session = join(store)
    session.receive(SET + blob(b"/k") + blob(bytes(1000)) + (GET + blob(b"/k")) * 2)
    assert session.out[0] is session.out[1] is store.keyspace.values[b"/k"]


# Going


def test_leaving_leaves_nothing(store: Store) -> None:
    session = join(store)
    session.receive(WAIT + keys(b"/a", b"/b") + SET + u64(100))
    assert store.budget.unfinished == 9 + 64
    session.leave()
    assert (store.budget.unfinished, store.keyspace.waiters, store.keyspace.size) == (0, {}, 0)
    assert (session.owner, session.parked, session.input_buffer, session.partial) == (None, None, None, None)


@pytest.mark.parametrize("waits", [WAIT + keys(b"/a"), FETCH + blob(b"/a"), WAIT_COUNT + blob(b"/a") + u64(1)])
def test_a_session_that_leaves_is_in_no_cycle(waits: bytes) -> None:
    """The server collects seldom: it relies on this. (A weak reference is taken of what the session holds.)"""

    class Owner:
        pass

    store = Store(Limits())
    owner = Owner()
    gone = weakref.ref(owner)
    gc.disable()
    try:
        session = ServerSession(store, owner, "::1", 1, 0.0)
        session.receive(HANDSHAKE + waits + PING + b"\1\2\3\4")
        session.leave()
        del owner
        assert gone() is None
    finally:
        gc.enable()


# Limits


def test_a_reply_over_every_budget_closes() -> None:
    session = join(Store(Limits(value_bytes=100_000, budget_bytes=250_000)))
    session.receive(SET + blob(b"/k") + blob(bytes(99_992)))
    with pytest.raises(LimitError, match=r"budget_bytes=300000 \(max 250000\)"):
        session.receive(b"\x0a" + keys(b"/k", b"/k", b"/k"))


def test_a_stalled_peer_cannot_send_without_limit() -> None:
    store = Store(Limits(value_bytes=100, unsent_high_water=0, budget_bytes=4000))
    session = join(store)
    session.receive(PING + b"\1\0\0\0")
    with pytest.raises(LimitError, match="budget_bytes"):
        for _ in range(1000):
            session.receive(PING + b"\1\0\0\0")


def test_what_a_relay_says_of_a_peer_counts_and_yields_to_what_the_peer_says() -> None:
    store = Store(Limits())
    session = ServerSession(store, None, "h", 1, 0.0)
    session.receive(HANDSHAKE)
    used = store.budget.used()
    session.describe({"rank": "3"})
    assert store.budget.used() == used + session.introduction_bytes() > used
    session.receive(introduce((b"rank", b"4"), (b"host", b"node")))
    session.describe({"rank": "5"})
    assert session.peer == {"rank": "4", "host": "node"}
    assert store.budget.used() == used + session.introduction_bytes()
    session.leave()
    assert store.budget.used() == 0
