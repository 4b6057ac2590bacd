"""One end of a link: the frames of many sessions in numbered batches, each of which the peer takes once.

Bytes in, frames out, and the reverse. It knows numbers, acknowledgements and what to send again after the connection
broke. It must not know how bytes travel, what time it is, or what a frame does to a session: `links/link_server.py`
and `links/link_client.py` do.

Invariants: a frame is handled once, in the order of adding, however often the connection breaks. A batch is kept until
the peer has taken it. Kept batches are bounded: from `WINDOW_BYTES` on, `has_room` is false and the owner adds no more
DATA.
"""

from collections import deque
from typing import Final

import msgspec
from librt.strings import BytesWriter, read_i64_le, write_i32_le, write_i64_le

from ..base.errors import ProtocolError, counted
from ..wire.link import (
    ACKNOWLEDGE_BYTES,
    BATCH_BYTES,
    BATCH_HEAD,
    BATCH_HEAD_BYTES,
    DATA,
    FRAME_HEAD_BYTES,
    KIND_SHIFT,
    LENGTH_MASK,
    LENGTH_SHIFT,
    MAX_BATCH_BYTES,
    PIECE_BYTES,
    SAME,
    SAME_BYTES,
    SAME_SESSIONS,
    SESSION_MASK,
    UNNUMBERED,
    WINDOW_BYTES,
)

_FLAGS_SHIFT: Final = 32

_MAX_I32: Final = 2**31 - 1
_TWO_TO_32: Final = 2**32

_LEAST_SAME: Final = 8
"""Bytes of a SAME for one session, without a payload."""

_COST_SHIFT: Final = 6
"""A delivery costs one unit, plus one per 64 bytes, so that many short commands cost what they take."""

NEW: Final = "new"
RESUMED: Final = "resumed"
UNKNOWN: Final = "unknown"
LINK_REFUSED: Final = "refused"


class LinkReply(msgspec.Struct, frozen=True):
    status: str
    instance: str = ""
    """The server's instance, as in its identity."""
    taken: int = 0
    """The last batch that the server has taken."""
    keep_alive: float = 0.0
    """Seconds within which each end must send something; after three times as long, the connection is closed."""
    grace: float = 0.0
    """Seconds for which the server keeps the sessions of a broken connection."""
    reason: str = ""
    """Why the link was refused."""


class Link:
    """The common part of both ends of a link. Subclasses override `handle`."""

    def __init__(self) -> None:
        self.out: list[bytes] = []
        """Bytes for the connection, in order. The owner of the connection removes them."""
        self.connected = False
        self.taken: int = 0
        """The number of the last batch taken from the peer."""
        self.number: int = 0
        """The number of the last batch sent."""
        self.kept: deque[bytes] = deque()
        """Batches that the peer has not acknowledged, up to `number`."""
        self.kept_bytes: int = 0
        self._spent: int = 0
        """The cost of the deliveries of the present call of `take`."""
        self._frames: BytesWriter | None = None
        """Frames of the next batch, after the last long payload if there is any."""
        self._before: list[bytes] = []
        """Bytes before `_frames`: long payloads, which are not copied, and the frames between them."""
        self._frames_bytes: int = 0
        """Bytes of all frames of the next batch."""
        self._same_payload: bytes = b""
        self._same: list[int] = []
        """Sessions of the last DATA frame, which is not in `_frames` yet."""
        self._untold_bytes: int = 0
        """Bytes of batches taken but not acknowledged."""
        self._incoming: int = 0
        """The number of the batch being handled."""
        self._incoming_bytes: int = 0
        self._left: int = 0
        """Bytes of it that are left; a batch is handled only when it is complete."""
        self._handled: int = 0
        """Deliveries made of batch `taken + 1`: one per frame, or per session of a SAME."""
        self._same_done: int = 0
        """How many of them are of the next SAME frame."""
        self._to_skip: int = 0
        """Deliveries made before the connection broke: the peer sends their batch again."""

    # Sending

    def has_room(self) -> bool:
        """Return whether DATA may be added."""
        return self.kept_bytes + self._frames_bytes < WINDOW_BYTES

    def add(self, kind: int, session: int, payload: bytes = b"") -> None:
        """Add a frame other than DATA to the next batch."""
        if self._same:
            self._close_same()
        self._append(kind, session, payload)

    def add_data(self, session: int, payload: bytes) -> None:
        """Add bytes of a session's stream to the next batch."""
        if self._same:
            if payload == self._same_payload:
                self._same.append(session)
                self._frames_bytes += 4
                if len(self._same) == SAME_SESSIONS:
                    self._close_same()
                return
            self._close_same()
        size = len(payload)
        if size <= SAME_BYTES:
            self._same_payload = payload
            self._same.append(session)
            self._frames_bytes += size + FRAME_HEAD_BYTES
        elif size <= PIECE_BYTES:
            self._append(DATA, session, payload)
        else:
            for at in range(0, size, PIECE_BYTES):
                self._append(DATA, session, payload[at : at + PIECE_BYTES])

    def close_batch(self) -> None:
        """Put the next batch into `out` if it has frames; else acknowledge if much was taken."""
        if self._same:
            self._close_same()
        frames = self._frames
        if frames is not None:
            self.number += 1
            head = BytesWriter()
            write_i64_le(head, self._frames_bytes)
            write_i64_le(head, self.number)
            write_i64_le(head, self.taken)
            if self._before:
                batch = b"".join([head.getvalue(), *self._before, frames.getvalue()])
                self._before = []
            else:
                head.write(frames.getvalue())
                batch = head.getvalue()
            self._frames = None
            self._frames_bytes = 0
            self.kept.append(batch)
            self.kept_bytes += len(batch)
            if self.connected:
                self.out.append(batch)
                self._untold_bytes = 0
        elif self._untold_bytes >= ACKNOWLEDGE_BYTES:
            self.acknowledge()

    def acknowledge(self) -> None:
        """Put a batch without frames into `out`: it acknowledges, and shows that this end is alive."""
        if self.connected:
            self.out.append(BATCH_HEAD.pack(0, UNNUMBERED, 0, self.taken))
            self._untold_bytes = 0

    def held_bytes(self) -> int:
        """Return the bytes of frames that the peer has not acknowledged."""
        return self.kept_bytes + self._frames_bytes

    def forget(self) -> None:
        """Drop all frames: the link is over."""
        self.kept.clear()
        self._frames = None
        self._before = []
        self._same.clear()
        self.kept_bytes = self._frames_bytes = 0

    def peer_taken(self) -> int:
        """Return the number of the last batch that the peer has acknowledged."""
        return self.number - len(self.kept)

    def _close_same(self) -> None:
        """Append the DATA frame that further sessions might have shared."""
        sessions = self._same
        payload = self._same_payload
        count = len(sessions)
        size = len(payload)
        frames = self._frames
        if frames is None:
            frames = self._frames = BytesWriter()
        if count == 1:
            write_i64_le(frames, sessions[0] | size << LENGTH_SHIFT | DATA << KIND_SHIFT)
        else:
            write_i64_le(frames, (4 + 4 * count + size) << LENGTH_SHIFT | SAME << KIND_SHIFT)
            write_i32_le(frames, count)
            for session in sessions:
                write_i32_le(frames, session if session <= _MAX_I32 else session - _TWO_TO_32)
            self._frames_bytes += FRAME_HEAD_BYTES
        frames.write(payload)
        sessions.clear()
        if self._frames_bytes >= BATCH_BYTES:
            self.close_batch()

    def _append(self, kind: int, session: int, payload: bytes) -> None:
        frames = self._frames
        if frames is None:
            frames = self._frames = BytesWriter()
        size = len(payload)
        write_i64_le(frames, session | size << LENGTH_SHIFT | kind << KIND_SHIFT)
        if size > SAME_BYTES:
            self._before.append(frames.getvalue())
            self._before.append(payload)
            frames.truncate(0)
        elif size:
            frames.write(payload)
        self._frames_bytes += FRAME_HEAD_BYTES + size
        if self._frames_bytes >= BATCH_BYTES:
            self.close_batch()

    # Receiving

    def take(self, data: bytes, at: int, end: int, most: int) -> tuple[int, int]:
        """Handle the frames of complete batches in data[at:end], up to a cost of `most`.

        Returns where it stopped, and the length that `data` needs for the next batch, or the same number if it stopped
        early. It also stops when handling a frame disconnects the link. Raises ProtocolError.
        """
        self._spent = 0
        while True:
            if not self._left:
                stop = at + BATCH_HEAD_BYTES
                if stop > end:
                    return at, stop
                word = read_i64_le(data, at)
                size = word & SESSION_MASK
                if size > MAX_BATCH_BYTES:
                    raise ProtocolError(f"batch of {size} bytes (max {MAX_BATCH_BYTES})")
                if stop + size > end:
                    return at, stop + size
                flags = word >> _FLAGS_SHIFT
                number = read_i64_le(data, at + 8)
                self._acknowledged(read_i64_le(data, at + 16))
                at = stop
                if flags == UNNUMBERED and not size:
                    continue
                if flags or not size:
                    raise ProtocolError(f"invalid batch: flags {flags:#x}, {counted(size, 'byte')}")
                if 0 < number <= self.taken:
                    at += size
                    continue
                if number != self.taken + 1:
                    raise ProtocolError(f"batch {number} is out of order: the last one taken was {self.taken}")
                self._incoming = number
                self._incoming_bytes = self._left = size
            if self._spent >= most:
                return at, at
            at = self._take_frame(data, at, most)
            if not self.connected:
                return at, at

    def handle(self, kind: int, session: int, payload: bytes) -> None:
        """Handle one frame. Raises nothing but ProtocolError, for an invalid frame."""
        raise NotImplementedError

    def _take_frame(self, data: bytes, at: int, most: int) -> int:
        """Handle the frame that starts at `at`; return where it stops, or `at` if it is not handled completely."""
        if self._left < FRAME_HEAD_BYTES:
            raise ProtocolError("a frame exceeds its batch")
        head = read_i64_le(data, at)
        size = head >> LENGTH_SHIFT & LENGTH_MASK
        kind = head >> KIND_SHIFT
        start = at + FRAME_HEAD_BYTES
        left = self._left - FRAME_HEAD_BYTES - size
        if left < 0 or size > PIECE_BYTES:
            raise ProtocolError(f"frame of {size} bytes exceeds its batch or the maximum of {PIECE_BYTES} bytes")
        stop = start + size
        if kind == SAME:
            if not self._take_same(data, start, stop, most):
                return at
        else:
            self._handled += 1
            if self._handled > self._to_skip:
                self._spent += 1 + (size >> _COST_SHIFT)
                self.handle(kind, head & SESSION_MASK, data[start:stop])
        if not left:
            self.taken = self._incoming
            self._untold_bytes += self._incoming_bytes
            self._left = self._handled = self._to_skip = 0
        elif self.connected:
            self._left = left
        return stop

    def _take_same(self, data: bytes, at: int, stop: int, most: int) -> bool:
        """Deliver the payload of a SAME to its sessions; return whether all have it. It stops as `take` does."""
        count = read_i64_le(data, at) & SESSION_MASK if stop - at >= _LEAST_SAME else 0
        start = at + 4 + 4 * count
        if not 0 < count <= SAME_SESSIONS or not start <= stop <= start + SAME_BYTES:
            raise ProtocolError(
                f"SAME for {count} sessions in {stop - at} bytes (max {SAME_SESSIONS} sessions, {SAME_BYTES} bytes)"
            )
        payload = data[start:stop]
        cost = 1 + (len(payload) >> _COST_SHIFT)
        for number in range(at + 4 * self._same_done, start - 4, 4):
            if self._spent >= most or not self.connected:
                return False
            self._same_done += 1
            self._handled += 1
            if self._handled > self._to_skip:
                self._spent += cost
                self.handle(DATA, read_i64_le(data, number) >> 32 & SESSION_MASK, payload)
        self._same_done = 0
        return True

    def _acknowledged(self, number: int) -> None:
        """Drop the batches that the peer has taken."""
        kept = self.kept
        if number > self.number or number < 0:
            raise ProtocolError(f"the peer acknowledged batch {number}, but the last one sent was {self.number}")
        for _ in range(len(kept) - (self.number - number)):
            self.kept_bytes -= len(kept.popleft())

    # The connection

    def connect(self, taken: int) -> None:
        """Use a new connection to a peer that has taken the batches up to `taken`. Raises ProtocolError."""
        self._acknowledged(taken)
        self.connected = True
        self.out = list(self.kept)
        self._untold_bytes = 0

    def disconnect(self) -> None:
        """Stop using a connection that is gone."""
        self.connected = False
        self.out = []
        self._to_skip = max(self._to_skip, self._handled)
        self._handled = self._same_done = self._left = 0
