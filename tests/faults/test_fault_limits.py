"""Every limit, over the wire: the offender is disconnected, the log says why, and other peers are not affected."""

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace

import pytest

from faults.fault_helpers import I64, get, num_keys, number, settled, until
from support import RawPeer, Server, blob, keys, tcpstore_server, u64
from tcpstore_async import DistNetworkError, Limits, TCPStore

SMALL = Limits(
    key_bytes=64,
    value_bytes=1000,
    keys=8,
    request_bytes=3000,
    unsent_high_water=2000,
    budget_bytes=1_000_000,
    connections=30,
)
MARK = 1_000_000 - 2 * (1_000_000 // 16)
"""From here on the peer that holds most is closed; a connection of the legacy server counts as 67,000."""


def options(limits: Limits) -> list[str]:
    return [f"--limit={field.name}={getattr(limits, field.name)}" for field in fields(limits)]


@pytest.fixture(scope="module")
def server(backend: str) -> Iterator[Server]:
    with tcpstore_server("--backend", backend, *options(SMALL)) as started:
        yield started


@pytest.fixture
def other(server: Server) -> Iterator[RawPeer]:
    """A peer that is parked in a WAIT throughout, on a store with one key."""
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
"""Requests of which only the length arrives, which is enough."""

GROWN = (b"\x09" + blob(b"/f/0") + FULL) * 300

COMPLETE = {
    "long request": Offence("request_bytes", 3000, ONE_OVER + blob(b"/multi/2") + u64(1000)),
    "large reply": Offence("budget_bytes", 5 * 300_008, GROWN + b"\x0a" + keys(*[b"/f/0"] * 5)),
    "SET": Offence("budget_bytes", MARK, b"".join(b"\x01" + blob(b"/f/%d" % i) + FULL for i in range(1000))),
    "MULTI_SET": Offence(
        "budget_bytes",
        MARK,
        b"".join(b"\x0b" + u64(2) + b"".join(blob(b"/f/%d" % j) + FULL for j in (i, i + 1)) for i in range(0, 1000, 2)),
    ),
    "ADD": Offence("budget_bytes", MARK, b"".join(b"\x04" + blob(b"/f/%d" % i) + I64.pack(1) for i in range(8000))),
    "APPEND": Offence("budget_bytes", MARK, (b"\x09" + blob(b"/f/0") + FULL) * 1000),
    "COMPARE_SET": Offence(
        "budget_bytes", MARK, b"".join(b"\x02" + blob(b"/f/%d" % i) + blob(b"") + FULL for i in range(1000))
    ),
    "QUEUE_PUSH": Offence("budget_bytes", MARK, (b"\x0e" + blob(b"/f/0") + FULL) * 1000),
}  # fmt: skip


def tidy(other: RawPeer) -> None:
    """Remove what legitimate requests before the offence have stored."""
    for at in range(0, 8000, 100):
        other.ask(b"".join(b"\x08" + blob(b"/f/%d" % i) for i in range(at, at + 100)), 8 * 100)
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
    """Return the size and the limit that a message names."""
    found = re.search(r"exceeded: (?:\w+=)?(\d+) (?:bytes are in use, the limit is |\(max )(\d+)", line)
    assert found
    return int(found[1]), int(found[2])


def rate_limited(log: str, kind: str) -> list[str]:
    return [line for line in log.splitlines() if kind in line and "listening" not in line]


def counted(lines: list[str]) -> int:
    """Return how many offences these messages stand for."""
    total = 0
    for line in lines:
        more = re.search(r"\((\d+) similar", line)
        last = re.search(r"suppressed (\d+) similar messages? \(kind: ", line)
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
        until(lambda: rate_limited(server.log(), offence.limit), "the offence is logged")
        [line] = rate_limited(server.log(), offence.limit)
        assert f"127.0.0.1:{peer.socket.getsockname()[1]} (pid 4242)" in line
    size, allowed = sizes(line)
    assert allowed == (MARK if offence.size == MARK else getattr(SMALL, offence.limit))
    assert size > allowed
    if name not in COMPLETE or name == "large reply":
        assert size == offence.size
    if offence.size == MARK:
        held = re.search(r"=1000000\); this peer accounts for (\d+)$", line)
        assert held
        assert int(held[1]) > MARK - 200_000


@pytest.fixture
def tight(backend: str) -> Iterator[Server]:
    with tcpstore_server("--backend", backend, *options(replace(SMALL, request_bytes=600_000, keys=1000))) as started:
        yield started


def half(count: int) -> bytes:
    """A MULTI_SET of so many pairs, without its last bytes."""
    return (b"\x0b" + u64(count) + b"".join(blob(b"/f/%d" % i) + FULL for i in range(count)))[:-10]


def test_of_unfinished_requests_the_largest_goes(tight: Server) -> None:
    """Small requests are executed, although they come last and pass the mark."""
    with RawPeer(tight.port) as other, RawPeer(tight.port) as large:
        large.ping(4243)
        large.send(half(400))
        settled(tight, other)
        small: list[RawPeer] = []
        while not rate_limited(tight.log(), "budget_bytes"):
            small.append(RawPeer(tight.port))
            small[-1].ping()
            small[-1].send(half(100))
            settled(tight, other)
        assert large.closed()
        [line] = rate_limited(tight.log(), "budget_bytes")
        assert "(pid 4243)" in line
        for peer in small:
            peer.send(bytes(10))
            peer.ping()
            peer.close()
        assert num_keys(other) == 100


def test_what_was_unfinished_is_given_back_when_a_peer_goes(tight: Server) -> None:
    with RawPeer(tight.port) as other:
        for ending in ("close", "reset", "garbage") * 5:
            peer = RawPeer(tight.port)
            peer.ping()
            peer.send(half(400))
            settled(tight, other)
            if ending == "garbage":
                peer.send(b"x" * 10 + b"\xff")
                assert peer.closed()
            peer.reset() if ending == "reset" else peer.close()
            settled(tight, other)
            other.ask(b"".join(b"\x08" + blob(b"/f/%d" % i) for i in range(400)), 8 * 400)
        with RawPeer(tight.port) as peer:
            peer.send(half(400) + bytes(10))
            peer.ping()
    assert not rate_limited(tight.log(), "budget_bytes")


def test_a_full_store_still_answers(server: Server, other: RawPeer) -> None:
    with RawPeer(server.port) as filler:
        offend(filler, COMPLETE["SET"].frames)
    assert 600 < num_keys(other) < 1000
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
            assert 1 <= len(rate_limited(server.log(), kind)) <= lasted + 1
        assert server.stop() == 0
        for kind in ("key_bytes", "value_bytes"):
            assert counted(rate_limited(server.log(), kind)) == 50
        assert counted(rate_limited(server.log(), "opcode") + rate_limited(server.log(), "(kind: protocol)")) == 50


def test_a_later_message_counts_those_before(backend: str) -> None:
    with tcpstore_server("--backend", backend, *options(SMALL)) as server:
        offences = 0

        def once_more() -> bool:
            nonlocal offences
            offences += 1
            with RawPeer(server.port) as peer:
                peer.send(b"\x03" + LONG_KEY)
                assert peer.closed()
            return len(rate_limited(server.log(), "key_bytes")) > 1

        until(once_more, "a second line is logged")
        assert offences - counted(rate_limited(server.log(), "key_bytes")) in (0, 1)  # the last may have come after it
        server.stop()
        assert counted(rate_limited(server.log(), "key_bytes")) == offences


def admitted(port: int) -> RawPeer | None:
    """Return a connection, if the server accepts it."""
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
        assert "up to 5 connections" in server.log()
        for _ in range(20):
            assert admitted(server.port) is None
        [line] = rate_limited(server.log(), "rejected")
        assert re.search(r"rejected 127\.0\.0\.1:\d+: connection limit 5 reached", line)
        for peer in peers:
            assert peer is not None
            peer.ping()
        last = peers.pop()
        assert last is not None
        last.close()

        def accepted() -> bool:
            peers.append(admitted(server.port))
            return peers[-1] is not None or bool(peers.pop())

        until(accepted, "a connection is accepted again")
        assert len(peers) == 5
        server.stop()
        assert (
            counted(rate_limited(server.log(), "similar messages (kind: ") + rate_limited(server.log(), "rejected"))
            >= 20
        )
        for peer in peers:
            assert peer is not None
            assert peer.closed()
            peer.close()


def test_a_rejected_client_is_referred_to_the_log() -> None:
    with (
        tcpstore_server("--limit", "connections=1") as server,
        RawPeer(server.port) as peer,
        pytest.raises(DistNetworkError, match="a server at its connection limit also does this; see its log"),
    ):
        peer.ping()
        TCPStore("127.0.0.1", server.port, timeout=1.0)


def test_an_unknown_limit_is_a_usage_error() -> None:
    with pytest.raises(AssertionError, match="unknown limit 'colour'"), tcpstore_server("--limit", "colour=1"):
        pass
