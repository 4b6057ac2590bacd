"""Every limit, over the wire: the offender loses its connection, the log says why, and nobody else notices."""

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace

import pytest

from faults.watching import I64, get, num_keys, number, settled, until
from support import RawPeer, Server, blob, keys, tcpstore_server, u64
from tcpstore_async import DistNetworkError, Limits, TCPStore

SMALL = Limits(
    key_bytes=64,
    value_bytes=1000,
    keys=8,
    request_bytes=3000,
    unfinished_bytes=100_000,
    unread_soft_bytes=2000,
    unread_hard_bytes=4000,
    store_bytes=20_000,
    connections=30,
)


def options(limits: Limits) -> list[str]:
    return [f"--limit={field.name}={getattr(limits, field.name)}" for field in fields(limits)]


@pytest.fixture(scope="module")
def server(backend: str) -> Iterator[Server]:
    with tcpstore_server("--backend", backend, *options(SMALL)) as started:
        yield started


@pytest.fixture
def other(server: Server) -> Iterator[RawPeer]:
    """A bystander that is parked in a WAIT throughout, on a store that holds one key."""
    with RawPeer(server.port) as peer:
        peer.send(b"\x01" + blob(b"/kept") + blob(b"v" * 1000))
        peer.send(b"\x06" + keys(b"/awaited"))
        peer.ping()
        assert num_keys(peer) == 1
        yield peer
        peer.ping()
        assert num_keys(peer) == 1, "something was half applied"
        assert get(peer, b"/kept") == b"v" * 1000
        peer.send(b"\x01" + blob(b"/awaited") + blob(b""))
        assert peer.read(1) == b"\0"
        peer.ask(b"\x08" + blob(b"/awaited"), 8)


@dataclass
class Offence:
    limit: str
    size: int
    frames: bytes


LONG_KEY = u64(65)
LONG_VALUE = u64(1001)
K = blob(b"/k")
FULL = blob(b"x" * 1000)
ONE_OVER = b"\x0b" + u64(3) + b"".join(blob(b"/multi/%d" % i) + FULL for i in range(2))

ANNOUNCED = {
    "key of SET": Offence("key_bytes", 65, b"\x01" + LONG_KEY),
    "key of COMPARE_SET": Offence("key_bytes", 65, b"\x02" + LONG_KEY),
    "key of GET": Offence("key_bytes", 65, b"\x03" + LONG_KEY),
    "key of ADD": Offence("key_bytes", 65, b"\x04" + LONG_KEY),
    "key of CHECK": Offence("key_bytes", 65, b"\x05" + u64(2) + K + LONG_KEY),
    "key of WAIT": Offence("key_bytes", 65, b"\x06" + u64(2) + K + LONG_KEY),
    "key of DELETE_KEY": Offence("key_bytes", 65, b"\x08" + LONG_KEY),
    "key of APPEND": Offence("key_bytes", 65, b"\x09" + LONG_KEY),
    "key of MULTI_GET": Offence("key_bytes", 65, b"\x0a" + u64(2) + K + LONG_KEY),
    "key of MULTI_SET": Offence("key_bytes", 65, b"\x0b" + u64(2) + K + FULL + LONG_KEY),
    "key of QUEUE_PUSH": Offence("key_bytes", 65, b"\x0e" + LONG_KEY),
    "key of QUEUE_POP": Offence("key_bytes", 65, b"\x0f" + LONG_KEY),
    "key of QUEUE_LEN": Offence("key_bytes", 65, b"\x10" + LONG_KEY),
    "key of BARRIER": Offence("key_bytes", 65, b"\x12" + LONG_KEY),
    "absurd key": Offence("key_bytes", 2**64 - 1, b"\x03" + u64(2**64 - 1)),
    "most absurd key": Offence("key_bytes", 2**63, b"\x03" + u64(2**63)),
    "value of SET": Offence("value_bytes", 1001, b"\x01" + K + LONG_VALUE),
    "expected of COMPARE_SET": Offence("value_bytes", 1001, b"\x02" + K + LONG_VALUE),
    "desired of COMPARE_SET": Offence("value_bytes", 1001, b"\x02" + K + blob(b"") + LONG_VALUE),
    "value of APPEND": Offence("value_bytes", 1001, b"\x09" + K + LONG_VALUE),
    "value of MULTI_SET": Offence("value_bytes", 1001, b"\x0b" + u64(2) + K + FULL + K + LONG_VALUE),
    "value of QUEUE_PUSH": Offence("value_bytes", 1001, b"\x0e" + K + LONG_VALUE),
    "absurd value": Offence("value_bytes", 2**63 + 5, b"\x01" + K + u64(2**63 + 5)),
    "keys of CHECK": Offence("keys", 9, b"\x05" + u64(9)),
    "keys of WAIT": Offence("keys", 9, b"\x06" + u64(9)),
    "keys of MULTI_GET": Offence("keys", 9, b"\x0a" + u64(9)),
    "keys of MULTI_SET": Offence("keys", 9, b"\x0b" + u64(9)),
    "absurd count": Offence("keys", 2**64 - 1, b"\x0a" + u64(2**64 - 1)),
}
"""Requests of which only the announcement arrives: that is enough."""

COMPLETE = {
    "long request": Offence("request_bytes", 3000, ONE_OVER + blob(b"/multi/2") + u64(1000)),
    "large reply": Offence("unread_hard_bytes", 5 * 1008, b"\x0a" + keys(*[b"/kept"] * 5)),
    "SET": Offence("store_bytes", 20_000, b"".join(b"\x01" + blob(b"/f/%d" % i) + FULL for i in range(30))),
    "MULTI_SET": Offence(
        "store_bytes",
        20_000,
        b"".join(b"\x01" + blob(b"/f/%d" % i) + FULL for i in range(15))
        + b"\x0b" + u64(2) + b"".join(blob(b"/multi/%d" % i) + FULL for i in range(2)),
    ),
    "ADD": Offence("store_bytes", 20_000, b"".join(b"\x04" + blob(b"/f/%d" % i) + I64.pack(1) for i in range(200))),
    "APPEND": Offence("store_bytes", 20_000, (b"\x09" + blob(b"/f/0") + FULL) * 30),
    "COMPARE_SET": Offence(
        "store_bytes", 20_000, b"".join(b"\x02" + blob(b"/f/%d" % i) + blob(b"") + FULL for i in range(30))
    ),
    "QUEUE_PUSH": Offence("store_bytes", 20_000, (b"\x0e" + blob(b"/f/0") + FULL) * 30),
    "WAIT": Offence(
        "store_bytes", 20_000, b"".join(b"\x06" + keys(*[b"/w/%d/%d" % (i, j) for j in range(8)]) for i in range(10))
    ),
}  # fmt: skip


def tidy(other: RawPeer) -> None:
    """Remove what legitimate requests before the offence have stored."""
    for i in range(200):
        other.ask(b"\x08" + blob(b"/f/%d" % i), 8)
    while number(other, b"\x10" + blob(b"/f/0")):
        other.ask(b"\x0f" + blob(b"/f/0"), 8 + len(FULL))
    assert num_keys(other) == 1


def offend(peer: RawPeer, frames: bytes) -> None:
    """Send, and wait until the server has closed; replies to what came before the offence do not matter."""
    with suppress(ConnectionError):
        peer.send(frames)
        while peer.socket.recv(1 << 16):
            pass


def sizes(line: str) -> tuple[int, int]:
    """The size and what is allowed, as a line names them."""
    found = re.search(r"over the limit \w+: (\d+), allowed (\d+)", line)
    assert found
    return int(found[1]), int(found[2])


def complaints(log: str, kind: str) -> list[str]:
    return [line for line in log.splitlines() if kind in line and "listening" not in line]


def counted(lines: list[str]) -> int:
    """How many offences these lines stand for."""
    total = 0
    for line in lines:
        more = re.search(r"\((\d+) more", line)
        last = re.search(r" (\d+) more of the kind '", line)
        total += int(last[1]) if last else 1 + (int(more[1]) if more else 0)
    return total


@pytest.mark.parametrize("name", ANNOUNCED)
def test_an_announcement_over_a_limit_closes_at_once(server: Server, other: RawPeer, name: str) -> None:
    offence = ANNOUNCED[name]
    with RawPeer(server.port) as peer:
        peer.ping()
        peer.send(offence.frames)
        assert peer.closed()


@pytest.mark.parametrize("name", ANNOUNCED)
def test_an_announcement_byte_by_byte(server: Server, other: RawPeer, name: str) -> None:
    with RawPeer(server.port) as peer:
        peer.ping()
        for i in range(len(ANNOUNCED[name].frames) - 1):
            peer.send(ANNOUNCED[name].frames[i : i + 1])
        peer.send(ANNOUNCED[name].frames[-1:])
        assert peer.closed()


@pytest.mark.parametrize("name", COMPLETE)
def test_what_goes_over_a_limit_closes(server: Server, other: RawPeer, name: str) -> None:
    with RawPeer(server.port) as peer:
        peer.ping()
        offend(peer, COMPLETE[name].frames)
    tidy(other)


@pytest.mark.parametrize("cut", [0, 20, 1500, 2500])
def test_a_long_request_is_refused_however_it_arrives(server: Server, other: RawPeer, cut: int) -> None:
    """All of it is there, whole or in pieces, with another request behind it."""
    frame = b"\x0b" + u64(3) + b"".join(blob(b"/multi/%d" % i) + FULL for i in range(3))
    with RawPeer(server.port) as peer:
        peer.ping()
        with suppress(ConnectionError):
            peer.send(frame[:cut])
            settled(server, other)
            peer.send(frame[cut:] + b"\x0dpong")
        assert peer.closed(), "the request has been executed"


LOGGED = {name: ANNOUNCED[name] for name in ("key of SET", "absurd key", "value of SET", "keys of CHECK")} | COMPLETE


@pytest.mark.parametrize("name", LOGGED)
def test_the_log_names_peer_limit_and_size(backend: str, name: str) -> None:
    """On a server whose log has no offence yet, so that this one is logged at once."""
    offence = LOGGED[name]
    with tcpstore_server("--backend", backend, *options(SMALL)) as server, RawPeer(server.port) as peer:
        peer.send(b"\x01" + blob(b"/kept") + blob(b"v" * 1000))
        peer.ping(4242)
        offend(peer, offence.frames)
        until(lambda: complaints(server.log(), offence.limit), "the offence is logged")
        [line] = complaints(server.log(), offence.limit)
        assert f"127.0.0.1:{peer.socket.getsockname()[1]} (pid 4242)" in line
    size, allowed = sizes(line)
    if offence.limit != "unread_hard_bytes":
        assert allowed == getattr(SMALL, offence.limit)
    assert size > allowed
    if name not in COMPLETE or offence.limit == "unread_hard_bytes":
        assert size == offence.size


@pytest.fixture
def tight(backend: str) -> Iterator[Server]:
    with tcpstore_server("--backend", backend, *options(replace(SMALL, unfinished_bytes=5000))) as started:
        yield started


def test_unfinished_requests_of_all_connections_count_together(tight: Server) -> None:
    """Two halves fit, a third does not: its sender goes, the two others finish."""
    frame = b"\x0b" + u64(2) + blob(b"/f/0") + FULL + blob(b"/f/1") + FULL
    with RawPeer(tight.port) as other:
        with RawPeer(tight.port) as first, RawPeer(tight.port) as second, RawPeer(tight.port) as third:
            for peer in (first, second):
                peer.ping()
                peer.send(frame[:-10])
                settled(tight, other)
            third.ping(4243)
            offend(third, frame[:-10])
            [line] = complaints(tight.log(), "unfinished_bytes")
            assert "(pid 4243)" in line
            size, allowed = sizes(line)
            assert size > allowed == 5000
            for peer in (first, second):
                peer.send(frame[-10:])
                peer.ping()
        assert num_keys(other) == 2


def test_what_was_unfinished_is_given_back_when_a_peer_goes(tight: Server) -> None:
    frame = b"\x0b" + u64(2) + blob(b"/f/0") + FULL + blob(b"/f/1") + FULL
    with RawPeer(tight.port) as other:
        for ending in ("close", "reset", "garbage") * 10:
            peer = RawPeer(tight.port)
            peer.ping()
            peer.send(frame[:-10])
            settled(tight, other)
            if ending == "garbage":
                peer.send(b"x" * 10 + b"\xff")
                assert peer.closed()
            peer.reset() if ending == "reset" else peer.close()
            settled(tight, other)
        with RawPeer(tight.port) as peer:
            peer.send(frame)
            peer.ping()
    assert not complaints(tight.log(), "unfinished_bytes")


def test_a_full_store_still_answers(server: Server, other: RawPeer) -> None:
    with RawPeer(server.port) as filler:
        offend(filler, COMPLETE["SET"].frames)
    assert 10 < num_keys(other) < 20
    assert get(other, b"/f/3") == b"x" * 1000
    other.send(b"\x01" + blob(b"/f/3") + blob(b"y" * 1000))
    assert get(other, b"/f/3") == b"y" * 1000
    other.ping()
    assert number(other, b"\x08" + blob(b"/f/3")) == 1
    other.send(b"\x01" + blob(b"/f/4") + blob(b"z" * 1000))
    other.ping()
    tidy(other)


def test_a_frame_within_every_limit_is_served(server: Server, other: RawPeer) -> None:
    """One byte less than each offence."""
    with RawPeer(server.port) as peer:
        peer.send(b"\x01" + blob(b"/" + b"f" * 63) + FULL)
        peer.ping()
        assert get(peer, b"/" + b"f" * 63) == b"x" * 1000
        peer.ask(b"\x08" + blob(b"/" + b"f" * 63), 8)
        assert peer.ask(b"\x0a" + keys(*[b"/kept"] * 3), 3 * 1008) == blob(b"v" * 1000) * 3
        assert peer.ask(b"\x05" + keys(*[b"/kept"] * 8), 1) == b"\0"


def test_fifty_offences_are_a_few_lines_whose_counts_add_up(backend: str) -> None:
    with tcpstore_server("--backend", backend, *options(SMALL)) as server, RawPeer(server.port) as other:
        began = time.monotonic()
        for _ in range(50):
            for frames in (b"\x03" + LONG_KEY, b"\x01" + K + LONG_VALUE, b"\xff"):
                with RawPeer(server.port) as peer:
                    peer.send(frames)
                    assert peer.closed()
            other.ping()
        lasted = time.monotonic() - began
        for kind in ("key_bytes", "value_bytes", "opcode"):
            assert 1 <= len(complaints(server.log(), kind)) <= lasted + 1
        assert server.stop() == 0
        for kind in ("key_bytes", "value_bytes"):
            assert counted(complaints(server.log(), kind)) == 50
        assert counted(complaints(server.log(), "opcode") + complaints(server.log(), "kind 'protocol'")) == 50


def test_a_later_line_counts_those_before(backend: str) -> None:
    with tcpstore_server("--backend", backend, *options(SMALL)) as server:
        offences = 0

        def once_more() -> bool:
            nonlocal offences
            offences += 1
            with RawPeer(server.port) as peer:
                peer.send(b"\x03" + LONG_KEY)
                assert peer.closed()
            return len(complaints(server.log(), "key_bytes")) > 1

        until(once_more, "a second line is logged")
        assert offences - counted(complaints(server.log(), "key_bytes")) in (0, 1)  # the last may have come after it
        server.stop()
        assert counted(complaints(server.log(), "key_bytes")) == offences


def admitted(port: int) -> RawPeer | None:
    """A connection, if the server takes it."""
    peer = RawPeer(port, validate=False)
    try:
        peer.send(bytes.fromhex("00cef7853c") + b"\x0dping")
        if peer.socket.recv(4) == b"ping":
            return peer
    except ConnectionError:
        pass
    peer.close()
    return None


def test_more_connections_than_allowed_are_refused(backend: str) -> None:
    with tcpstore_server("--backend", backend, "--limit", "connections=5") as server:
        peers = [admitted(server.port) for _ in range(5)]
        assert "for up to 5 connections" in server.log()
        for _ in range(20):
            assert admitted(server.port) is None
        [line] = complaints(server.log(), "refused")
        assert re.search(r"refused the connection of 127\.0\.0\.1, port \d+: 5 are open, the most allowed", line)
        for peer in peers:
            assert peer is not None
            peer.ping()
        last = peers.pop()
        assert last is not None
        last.close()

        def room() -> bool:
            peers.append(admitted(server.port))
            return peers[-1] is not None or bool(peers.pop())

        until(room, "there is room again")
        assert len(peers) == 5
        server.stop()
        assert counted(complaints(server.log(), "more of the kind") + complaints(server.log(), "refused")) >= 20
        for peer in peers:
            assert peer is not None
            assert peer.closed()
            peer.close()


def test_who_is_refused_is_told_where_to_look() -> None:
    with (
        tcpstore_server("--limit", "connections=1") as server,
        RawPeer(server.port) as peer,
        pytest.raises(DistNetworkError, match="no room for more connections; its log says so"),
    ):
        peer.ping()
        TCPStore("127.0.0.1", server.port, timeout=1.0)


def test_an_unknown_limit_is_a_usage_error() -> None:
    with pytest.raises(AssertionError, match="there is no limit 'colour'"), tcpstore_server("--limit", "colour=1"):
        pass
