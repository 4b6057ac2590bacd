"""Both ends of a link: frames, and taking each of them once."""

from __future__ import annotations

import struct

import pytest

from tcpstore_async.base.errors import ProtocolError
from tcpstore_async.links.link_client import ClientLink, Stream
from tcpstore_async.wire.link import (
    ACKNOWLEDGE_AT_ONCE,
    ACKNOWLEDGE_BYTES,
    CLOSE,
    DATA,
    PIECE_BYTES,
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


def frame(kind: int, session: int, payload: bytes) -> bytes:
    return struct.pack("<II", session, len(payload) | kind << 24) + payload


def same(sessions: list[int], payload: bytes) -> bytes:
    return frame(5, 0, struct.pack(f"<{len(sessions) + 1}I", len(sessions), *sessions) + payload)


def ack(taken: int) -> bytes:
    return frame(7, 0, struct.pack("<Q", taken))


def sent(link: ClientLink) -> bytes:
    link.seal()
    data = b"".join(link.out)
    link.out.clear()
    return data


CONTENT = [same([1, 2, 3, 1], b"ab"), frame(DATA, 2, b"c"), same([5, 4], b"d"), frame(DATA, 1, b"e")]
DATA_OF_ALL = b"".join(CONTENT)
EXPECTED = [b"ababe", b"abc", b"ab", b"d", b"d"]


def test_a_frame_is_taken_when_it_is_complete() -> None:
    link, streams = end()
    for at in range(len(DATA_OF_ALL)):
        link.receive(DATA_OF_ALL[at : at + 1])
    assert [stream.data for stream in streams] == EXPECTED
    assert link.taken == len(DATA_OF_ALL)


@pytest.mark.parametrize(
    "data",
    [
        ack(1),
        ack(2**63),
        ack(2**64 - 1),
        frame(7, 1, bytes(8)),
        frame(7, 0, bytes(7)),
        frame(DATA, 1, bytes(PIECE_BYTES + 1)),
        frame(63, 1, b"x"),
        frame(255, 1, b"x"),
        frame(3, 1, b"x"),
        frame(5, 0, b""),
        frame(5, 0, struct.pack("<I", 0) + b"x"),
        frame(5, 0, struct.pack("<II", 2, 1)),
        frame(5, 0, struct.pack("<I", 2**32 - 1) + bytes(100)),
        same([1] * 1025, b"x"),
        same([1], bytes(PIECE_BYTES + 1)),
        frame(5, 0, bytes(4 + 4 * 1024 + PIECE_BYTES + 1))[:8],
        frame(DATA, 1, bytes(2**24 - 1))[:8],
    ],
    ids=lambda data: data[:16].hex(),
)
def test_what_a_frame_must_not_be(data: bytes) -> None:
    link, _ = end()
    with pytest.raises(ProtocolError):
        link.receive(data)
    assert link.taken == 0


def test_a_same_of_the_longest_kind_is_accepted() -> None:
    link, streams = end()
    link.receive(same([2] * 1024, bytes(PIECE_BYTES)))
    assert len(streams[1].data) == 1024 * PIECE_BYTES


def test_a_connection_that_breaks_in_the_middle_of_a_frame() -> None:
    """What was delivered of it is not delivered again: what a session does may end the connection."""
    for which in range(SESSIONS):
        for at in range(1, 6):
            link, streams = end()
            streams[which].breaks_at = at
            link.receive(DATA_OF_ALL)
            broke = not link.connected
            assert broke == (streams[which].breaks_at < 0)
            if broke:
                link.answered(b'{"status":"resumed","instance":"one","taken":0}')
                link.receive(DATA_OF_ALL[link.taken :])
            assert [stream.data for stream in streams] == EXPECTED


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8])
def test_frames_that_are_handled_in_portions(most: int) -> None:
    for breaks in range(8):
        link, streams = end()
        at = calls = 0
        while link.taken < len(DATA_OF_ALL):
            at, need = link.take(DATA_OF_ALL, at, len(DATA_OF_ALL), most)
            assert need == at or link.taken == len(DATA_OF_ALL)
            calls += 1
            if calls == breaks:
                link.disconnect()
                link.connect(0)
                at = link.taken
        assert [stream.data for stream in streams] == EXPECTED


def test_what_the_peer_has_not_taken_is_sent_again_from_any_byte() -> None:
    link, _ = end()
    link.add_data(1, b"one")
    first = sent(link)
    link.add_data(1, bytes(range(256)) * 64)
    link.add_data(2, b"two")
    whole = first + sent(link)
    for taken in (*range(60), *range(60, len(whole) - 20, 97), *range(len(whole) - 20, len(whole) + 1)):
        link.disconnect()
        assert link.can_resume(taken, 0)
        link.connect(taken)
        assert sent(link) == whole[taken:]
        assert not taken or not link.can_resume(taken - 1, 0), "it has said that it has this byte"
    assert not link.can_resume(len(whole) + 1, 0)
    assert not link.can_resume(len(whole), 1), "it has forgotten what it took"


def test_an_old_acknowledgement_changes_nothing() -> None:
    """One that is sent again says less than the LINK that resumed."""
    link, _ = end()
    link.add_data(1, b"one")
    size = len(sent(link))
    link.receive(ack(size))
    held = link.held_bytes()
    link.receive(ack(size - 1))
    assert held == link.held_bytes() == 0


def test_two_ends_that_are_both_full_go_on_by_themselves() -> None:
    """Nobody has to wait for a timer to acknowledge what stops the other."""
    ends = end()[0], end()[0]
    count = 0
    for _ in range(8):
        for link in ends:
            while link.has_room():
                link.add_data(1, count.to_bytes(PIECE_BYTES, "big"))
                count += 1
            assert link.held_bytes() < WINDOW_BYTES + PIECE_BYTES + 100
        for link, other in (ends, ends[::-1]):
            other.receive(sent(link))
    assert count > 2 * len(ends) * WINDOW_BYTES // PIECE_BYTES


def test_much_that_is_taken_is_acknowledged_without_anything_to_send() -> None:
    sender, receiver = end()[0], end()[0]
    while sender.held_bytes() < ACKNOWLEDGE_AT_ONCE:
        sender.add_data(1, bytes(PIECE_BYTES // 2))  # each is sealed before the next
        assert sent(receiver) == b""
        receiver.receive(sent(sender))
    sender.receive(sent(receiver))
    assert sender.held_bytes() == 0


def test_little_that_is_taken_is_acknowledged_with_the_next_frame() -> None:
    receiver = end()[0]
    receiver.receive(frame(DATA, 1, bytes(ACKNOWLEDGE_BYTES - 9)))
    receiver.add(CLOSE, 1, b"\1")
    assert sent(receiver) == frame(CLOSE, 1, b"\1")
    receiver.receive(frame(DATA, 1, b""))
    assert sent(receiver) == b""
    receiver.add(CLOSE, 1, b"\1")
    assert sent(receiver) == frame(CLOSE, 1, b"\1") + ack(ACKNOWLEDGE_BYTES + 7)


def test_nothing_follows_the_end_of_a_link() -> None:
    receiver = end()[0]
    receiver.receive(frame(DATA, 1, bytes(ACKNOWLEDGE_BYTES)))
    receiver.close_link()
    assert sent(receiver) == frame(CLOSE, 0, b"\1")


def test_the_layout_of_frames() -> None:
    """The numbers of sessions are unsigned, a long payload is behind what precedes it, and each travels once."""
    link, _ = end()
    long, longer = bytes(4097), bytes(PIECE_BYTES + 5)
    sessions = [1, 2**31 - 1, 2**31, 2**32 - 1]
    for session in sessions:
        link.add_data(session, b"x")
    link.add_data(2**32 - 1, long)
    link.add_data(2, b"y")
    link.add(CLOSE, 2**31, b"\1")
    for session in sessions:
        link.add_data(session, long)
    link.add_data(3, longer)
    held = link.held_bytes()
    frames = (
        same(sessions, b"x"),
        frame(DATA, 2**32 - 1, long),
        frame(DATA, 2, b"y"),
        frame(CLOSE, 2**31, b"\1"),
        same(sessions, long),
        frame(DATA, 3, longer[:PIECE_BYTES]),
        frame(DATA, 3, longer[PIECE_BYTES:]),
    )
    assert sent(link) == b"".join(frames)
    assert link.held_bytes() == link.sent == sum(map(len, frames))
    assert held <= link.sent


def test_a_question_and_its_answer() -> None:
    link, _ = end()
    link.receive(frame(8, 0, struct.pack("<II", 2**32 - 1, 1500)))
    assert link.question == (2**32 - 1, 1500)
    link.answer(2**32 - 1, b"{}")
    assert sent(link) == frame(9, 0, b"\xff\xff\xff\xff{}")
    with pytest.raises(ProtocolError):
        link.receive(frame(8, 0, bytes(7)))


def test_a_link_that_is_resumed_by_another_server() -> None:
    link, _ = end()
    with pytest.raises(ProtocolError, match="resumed a link that belongs to"):
        link.answered(b'{"status":"resumed","instance":"two","taken":0}')


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"status":1}', b"[" * 100_000, b'{"status":"new","taken":"x"}'])
def test_a_reply_that_is_none(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        end()[0].answered(raw)
