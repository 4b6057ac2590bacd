"""Both ends of a link: batches, and taking each of them once."""

from __future__ import annotations

import random
import struct

import pytest

from tcpstore_async.base.errors import ProtocolError
from tcpstore_async.links.link_client import ClientLink, Stream
from tcpstore_async.wire.link import (
    ACKNOWLEDGE_BYTES,
    BATCH_BYTES,
    CLOSE,
    DATA,
    MAX_BATCH_BYTES,
    PIECE_BYTES,
    SAME_BYTES,
    WINDOW_BYTES,
)

SESSIONS = 5
NEW = b'{"status":"new","instance":"one"}'


class Received(Stream):
    def __init__(self, link: ClientLink) -> None:
        super().__init__()
        self.link = link
        self.data = b""
        self.breaks_at = -1

    def received(self, data: bytes) -> None:
        self.data += data
        if 0 <= self.breaks_at <= len(self.data):
            self.breaks_at = -1
            self.link.disconnect()

    def credited(self) -> None: ...

    def closed(self) -> None: ...


def end() -> tuple[ClientLink, list[Received]]:
    """Return an end of a link that has a connection, and what its sessions receive."""
    link = ClientLink()
    streams = [Received(link) for _ in range(SESSIONS)]
    for stream in streams:
        link.open(stream, "h", 1)
    link.forget()
    link.answered(NEW)
    return link, streams


def batch(number: int, *frames: bytes, acknowledged: int = 0, flags: int = 0) -> bytes:
    return struct.pack("<IIQQ", sum(map(len, frames)), flags, number, acknowledged) + b"".join(frames)


def frame(kind: int, session: int, payload: bytes) -> bytes:
    return struct.pack("<II", session, len(payload) | kind << 24) + payload


def same(sessions: list[int], payload: bytes) -> bytes:
    return frame(5, 0, struct.pack(f"<{len(sessions) + 1}I", len(sessions), *sessions) + payload)


def test_a_batch_is_taken_once() -> None:
    link, streams = end()
    link.receive(batch(1, frame(DATA, 1, b"one")) * 2 + batch(2, frame(DATA, 1, b"two")))
    link.receive(batch(1, frame(DATA, 1, b"one")))
    assert (streams[0].data, link.taken) == (b"onetwo", 2)


@pytest.mark.parametrize(
    "data",
    [
        batch(2, frame(DATA, 1, b"x")),
        batch(0, frame(DATA, 1, b"x")),
        batch(2**64 - 1, frame(DATA, 1, b"x")),
        batch(1),
        batch(0, flags=2),
        batch(1, frame(DATA, 1, b"x"), flags=1),
        batch(1, frame(DATA, 1, b"x"), acknowledged=1),
        batch(1, frame(DATA, 1, b"x"), acknowledged=2**64 - 1),
        batch(1, frame(DATA, 1, b"x")[:-1]),
        batch(1, frame(DATA, 1, b"x"), b"1234567"),
        batch(1, frame(DATA, 1, bytes(PIECE_BYTES + 1))),
        batch(1, frame(63, 1, b"x")),
        batch(1, frame(255, 1, b"x")),
        batch(1, frame(3, 1, b"x")),
        batch(1, frame(5, 0, b"")),
        batch(1, frame(5, 0, struct.pack("<I", 0) + b"x")),
        batch(1, frame(5, 0, struct.pack("<II", 2, 1))),
        batch(1, frame(5, 0, struct.pack("<I", 2**32 - 1) + bytes(100))),
        batch(1, same([1] * 1025, b"x")),
        batch(1, same([1], bytes(SAME_BYTES + 1))),
        struct.pack("<IIQQ", MAX_BATCH_BYTES + 1, 0, 1, 0),
    ],
    ids=lambda data: data[24:40].hex() or data.hex(),
)
def test_what_a_batch_must_not_be(data: bytes) -> None:
    link, _ = end()
    with pytest.raises(ProtocolError):
        link.receive(data)
    assert link.taken == 0


def test_a_batch_of_the_longest_kind_is_accepted() -> None:
    sender, receiver = end()[0], end()[0]
    rng = random.Random(1)
    for _ in range(200):
        size = rng.choice([1, 8, SAME_BYTES, SAME_BYTES + 1, PIECE_BYTES, 3 * PIECE_BYTES])
        for session in range(1, rng.randrange(1, SESSIONS)):
            sender.add_data(session, bytes(size))
        if rng.random() < 0.1:
            sender.add(CLOSE, 1, b"\1")
    sender.close_batch()
    sizes = [len(one) - 24 for one in sender.out]
    assert MAX_BATCH_BYTES >= max(sizes) > BATCH_BYTES
    for one in sender.out:
        receiver.receive(one)
    assert receiver.taken == sender.number


def test_a_connection_that_breaks_in_the_middle_of_a_batch() -> None:
    """Whatever was delivered of it is not delivered again: what a session does may end the connection."""
    content = [same([1, 2, 3, 1], b"ab"), frame(DATA, 2, b"c"), same([5, 4], b"d"), frame(DATA, 1, b"e")]
    data = batch(1, *content) + batch(2, frame(DATA, 3, b"f"))
    _, expected = end()
    expected[0].link.receive(data)
    for which in range(SESSIONS):
        for at in range(1, 6):
            link, streams = end()
            streams[which].breaks_at = at
            link.receive(data)
            broke = not link.connected
            assert broke == (streams[which].breaks_at < 0)
            if broke:
                link.answered(b'{"status":"resumed","instance":"one","taken":0}')
                link.receive(data if not link.taken else data[len(batch(1, *content)) :])
            assert [stream.data for stream in streams] == [stream.data for stream in expected]
            assert link.taken == 2


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8])
def test_a_batch_that_is_handled_in_portions(most: int) -> None:
    data = batch(1, same([1, 2, 3, 1], b"ab"), frame(DATA, 2, b"c"), same([5, 4], b"d")) + batch(
        2, frame(DATA, 1, b"e")
    )
    for breaks in range(8):
        link, streams = end()
        at = calls = 0
        while link.taken < 2:
            at, need = link.take(data, at, len(data), most)
            assert need == at or link.taken == 2
            calls += 1
            if calls == breaks:
                link.disconnect()
                link.connect(0)
                at = 0
        assert [stream.data for stream in streams] == [b"ababe", b"abc", b"ab", b"d", b"d"]


def test_two_ends_that_are_both_full_go_on_by_themselves() -> None:
    """Nobody has to wait for a timer to acknowledge what stops the other."""
    ends = end()[0], end()[0]
    sent = 0
    for _ in range(8):
        for link in ends:
            while link.has_room():
                link.add_data(1, bytes(PIECE_BYTES))
                sent += 1
            link.close_batch()
            assert link.held_bytes() < WINDOW_BYTES + MAX_BATCH_BYTES
        for link, other in (ends, ends[::-1]):
            out = b"".join(link.out)
            link.out.clear()
            other.receive(out)
    assert sent > 2 * len(ends) * WINDOW_BYTES // PIECE_BYTES


def test_what_is_taken_is_acknowledged_without_anything_to_send() -> None:
    sender, receiver = end()[0], end()[0]
    while sender.held_bytes() < ACKNOWLEDGE_BYTES + MAX_BATCH_BYTES:
        sender.add_data(1, bytes(PIECE_BYTES))
        sender.close_batch()
    receiver.receive(b"".join(sender.out))
    assert not receiver.out
    receiver.close_batch()
    sender.receive(b"".join(receiver.out))
    assert sender.held_bytes() == 0


def test_the_layout_of_a_batch() -> None:
    """The numbers of sessions are unsigned, and a long payload is behind what precedes it."""
    link, _ = end()
    long = bytes(SAME_BYTES + 1)
    sessions = [1, 2**31 - 1, 2**31, 2**32 - 1]
    for session in sessions:
        link.add_data(session, b"x")
    link.add_data(2**32 - 1, long)
    link.add_data(2, b"y")
    link.add(CLOSE, 2**31, b"\1")
    assert link.held_bytes() > len(long)
    link.close_batch()
    frames = (
        same(sessions, b"x"),
        frame(DATA, 2**32 - 1, long),
        frame(DATA, 2, b"y"),
        frame(CLOSE, 2**31, b"\1"),
    )
    assert link.out == [batch(1, *frames)]
    assert link.held_bytes() == len(link.out[0])


def test_a_link_that_is_resumed_by_another_server() -> None:
    link, _ = end()
    with pytest.raises(ProtocolError, match="resumed a link that belongs to"):
        link.answered(b'{"status":"resumed","instance":"two","taken":0}')


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"status":1}', b"[" * 100_000, b'{"status":"new","taken":"x"}'])
def test_a_reply_that_is_none(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        ClientLink().answered(raw)
