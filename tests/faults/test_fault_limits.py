"""Every limit, over the wire: the offender is disconnected, the log says why, and other peers are not affected."""

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from typing import NamedTuple

import pytest

from conformance.frames import (
    add,
    append,
    check,
    compare_set,
    delete,
    multi_get,
    multi_set,
    pop,
    push,
    queue_len,
    set_,
    wait,
)
from faults.fault_helpers import connect, get, num_keys, number, settled, until
from support import RawPeer, Server, blob, tcpstore_server, u64
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


@pytest.fixture
def server(backend: str) -> Iterator[Server]:
    """One whose log has no offence yet, so that the first is logged at once."""
    with tcpstore_server("--backend", backend, *options(SMALL)) as started:
        yield started


@pytest.fixture
def other(server: Server) -> Iterator[RawPeer]:
    """A peer that is parked in a WAIT throughout, on a store with one key."""
    with RawPeer(server.port) as peer:
        peer.send(set_(b"/kept", b"v" * 1000) + wait(b"/awaited"))
        peer.ping()
        assert num_keys(peer) == 1
        yield peer
        peer.ping()
        assert num_keys(peer) == 1, "something was half applied"
        assert get(peer, b"/kept") == b"v" * 1000
        peer.send(set_(b"/awaited", b""))
        assert peer.read(1) == b"\0"
        peer.ask(delete(b"/awaited"), 8)


class Offence(NamedTuple):
    limit: str
    frames: bytes
    size: int = MARK
    """What the log says; `MARK`, or more than that, where the peer has filled the store."""


LONG_KEY = b"\x03" + u64(65)
LONG_VALUE = b"\x01" + blob(b"/k") + u64(1001)
VALUE = b"x" * 1000
MANY = [b"/f/%d" % number for number in range(8000)]
PAIRS = [multi_set((one, VALUE), (other, VALUE)) for one, other in zip(MANY[:1000:2], MANY[1:1000:2], strict=True)]
TRIPLE = multi_set(*((b"/multi/%d" % number, VALUE) for number in range(3)))

OFFENCES = {
    "absurd key": Offence("key_bytes", b"\x03" + u64(2**64 - 1), 2**64 - 1),
    "value of SET": Offence("value_bytes", LONG_VALUE, 1001),
    "keys of CHECK": Offence("keys", b"\x05" + u64(9), 9),
    "long request": Offence("request_bytes", TRIPLE[: -len(VALUE)], 3000),
    "large reply": Offence("budget_bytes", append(MANY[0], VALUE) * 300 + multi_get(*MANY[:1] * 5), 5 * 300_008),
    "SET": Offence("budget_bytes", b"".join(set_(key, VALUE) for key in MANY[:1000])),
    "MULTI_SET": Offence("budget_bytes", b"".join(PAIRS)),
    "ADD": Offence("budget_bytes", b"".join(add(key, 1) for key in MANY)),
    "APPEND": Offence("budget_bytes", append(MANY[0], VALUE) * 1000),
    "COMPARE_SET": Offence("budget_bytes", b"".join(compare_set(key, b"", VALUE) for key in MANY[:1000])),
    "QUEUE_PUSH": Offence("budget_bytes", push(MANY[0], VALUE) * 1000),
}
"""Of the first ones only the length arrives, which is enough."""


def tidy(other: RawPeer) -> None:
    """Remove what legitimate requests before the offence have stored."""
    for at in range(0, 8000, 100):
        other.ask(b"".join(map(delete, MANY[at : at + 100])), 8 * 100)
    while number(other, queue_len(MANY[0])):
        other.ask(pop(MANY[0]), 16 + len(VALUE))
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


@pytest.mark.parametrize("cut", [0, 20, 1500, 2500])
def test_a_long_request_is_refused_however_it_arrives(server: Server, other: RawPeer, cut: int) -> None:
    """All of it is there, whole or in pieces, with another request behind it."""
    with RawPeer(server.port) as peer:
        peer.ping()
        with suppress(ConnectionError):
            peer.send(TRIPLE[:cut])
            settled(server, other)
            peer.send(TRIPLE[cut:] + b"\x0dpong")
        assert peer.closed(), "the request has been executed"


@pytest.mark.parametrize("name", OFFENCES)
def test_the_log_names_peer_limit_and_size(server: Server, other: RawPeer, name: str) -> None:
    limit, frames, expected = OFFENCES[name]
    with RawPeer(server.port) as peer:
        peer.ping(4242)
        offend(peer, frames)
        until(lambda: rate_limited(server.log(), limit), "the offence is logged")
        [line] = rate_limited(server.log(), limit)
        assert f"127.0.0.1:{peer.socket.getsockname()[1]} (pid 4242)" in line
    size, allowed = sizes(line)
    if expected == MARK:
        assert size > allowed == MARK
        held = re.search(r"=1000000\); this peer accounts for (\d+)$", line)
        assert held
        assert int(held[1]) > MARK - 200_000
    else:
        assert size >= expected
        assert size == expected or name == "long request"
        assert allowed == getattr(SMALL, limit)
    tidy(other)


@pytest.fixture
def tight(backend: str) -> Iterator[Server]:
    with tcpstore_server("--backend", backend, *options(replace(SMALL, request_bytes=600_000, keys=1000))) as started:
        yield started


def half(count: int) -> bytes:
    """A MULTI_SET of so many pairs, without its last bytes."""
    return multi_set(*((key, VALUE) for key in MANY[:count]))[:-10]


# quirk: budget_bytes
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
            other.ask(b"".join(map(delete, MANY[:400])), 8 * 400)
        with RawPeer(tight.port) as peer:
            peer.send(half(400) + bytes(10))
            peer.ping()
    assert not rate_limited(tight.log(), "budget_bytes")


# quirk: budget_bytes
def test_a_full_store_still_answers(server: Server, other: RawPeer) -> None:
    with RawPeer(server.port) as filler:
        offend(filler, OFFENCES["SET"].frames)
    assert 600 < num_keys(other) < 1000
    assert get(other, b"/f/3") == VALUE
    other.send(set_(b"/f/3", b"y" * 1000))
    assert get(other, b"/f/3") == b"y" * 1000
    other.ping()
    assert number(other, delete(b"/f/3")) == 1
    other.send(set_(b"/f/4", b"z" * 1000))
    other.ping()
    tidy(other)


def test_a_frame_within_every_limit_is_served(server: Server, other: RawPeer) -> None:
    """One byte less than each offence."""
    key = b"/" + b"f" * 63
    with RawPeer(server.port) as peer:
        peer.send(set_(key, VALUE))
        peer.ping()
        assert get(peer, key) == VALUE
        peer.ask(delete(key), 8)
        assert peer.ask(multi_get(*[b"/kept"] * 3), 3 * 1008) == blob(b"v" * 1000) * 3
        assert peer.ask(check(*[b"/kept"] * 8), 1) == b"\0"


# quirk: log-rate
def test_fifty_offences_are_a_few_lines_whose_counts_add_up(server: Server) -> None:
    began = time.monotonic()
    with RawPeer(server.port) as other:
        for _ in range(50):
            for frames in (LONG_KEY, LONG_VALUE, b"\xff"):
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


def test_a_later_message_counts_those_before(server: Server) -> None:
    offences = 0

    def once_more() -> bool:
        nonlocal offences
        offences += 1
        with RawPeer(server.port) as peer:
            peer.send(LONG_KEY)
            assert peer.closed()
        return len(rate_limited(server.log(), "key_bytes")) > 1

    until(once_more, "a second line is logged")
    assert offences - counted(rate_limited(server.log(), "key_bytes")) in (0, 1)  # the last may have come after it
    server.stop()
    assert counted(rate_limited(server.log(), "key_bytes")) == offences


# quirk: connections
def test_more_connections_than_allowed_are_refused(backend: str) -> None:
    with tcpstore_server("--backend", backend, "--limit", "connections=5") as server:
        peers = [connect(server.port) for _ in range(5)]
        assert "up to 5 connections" in server.log()
        for _ in range(20):
            assert connect(server.port) is None
        [line] = rate_limited(server.log(), "rejected")
        assert re.search(r"rejected 127\.0\.0\.1:\d+: connection limit 5 reached", line)
        for peer in peers:
            assert peer is not None
            peer.ping()
        last = peers.pop()
        assert last is not None
        last.close()

        def accepted() -> bool:
            peers.append(connect(server.port))
            return peers[-1] is not None or bool(peers.pop())

        until(accepted, "a connection is accepted again")
        assert len(peers) == 5
        server.stop()
        lines = rate_limited(server.log(), "similar messages (kind: ") + rate_limited(server.log(), "rejected")
        assert counted(lines) >= 20
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
