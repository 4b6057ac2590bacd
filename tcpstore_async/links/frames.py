"""One end of a link: the frames of many sessions in one stream of bytes.

Bytes in, frames out, and the reverse. It knows frames, credit's limits and acknowledgements. It must not know how bytes
travel, what time it is, or what a frame does to a session: `links/link_server.py` and `links/link_client.py` do.

Invariants: a frame is handled once, in the order of adding, however often the connection breaks; it counts as taken
once it is handled. What is kept is bounded: from `WINDOW_BYTES` on, `has_room` is false and the owner adds no more
DATA.
"""

from typing import Final

import msgspec
from librt.strings import BytesWriter, read_i64_le, write_i32_le, write_i64_le

from ..base.errors import ProtocolError, counted
from ..session.unsent import Pins
from ..wire.link import (
    ACK,
    ACKNOWLEDGE_AT_ONCE,
    ACKNOWLEDGE_BYTES,
    DATA,
    FRAME_HEAD_BYTES,
    KIND_SHIFT,
    LENGTH_MASK,
    LENGTH_SHIFT,
    LINK,
    MAX_FRAME_BYTES,
    PIECE_BYTES,
    SAME,
    SAME_SESSIONS,
    SESSION_MASK,
    U64,
    WINDOW_BYTES,
)
from ..wire.values import Framed
from .resume import Resumable

_MAX_I32: Final = 2**31 - 1
_TWO_TO_32: Final = 2**32

_LEAST_SAME: Final = 8
"""Bytes of a SAME for one session, without a payload."""

_COPIED: Final = 4 * 1024
"""Payloads up to this length are copied into the stream; longer ones stand in it as they are."""

_COST_SHIFT: Final = 6
"""A delivery costs one unit, plus one per 64 bytes, so that many short commands cost what they take."""

NEW: Final = "new"
RESUMED: Final = "resumed"
UNKNOWN: Final = "unknown"
LINK_REFUSED: Final = "refused"
ELSEWHERE: Final = "elsewhere"
"""Has no `LinkReply`, but a member `server`: our clients do not send LINK to a server whose identity says the same."""


class LinkReply(msgspec.Struct, frozen=True):
    status: str
    instance: str = ""
    """The server's instance, as in its identity."""
    taken: int = 0
    """How many bytes the server has taken."""
    keep_alive: float = 0.0
    """Seconds within which each end must send something; after three times as long, the connection is closed."""
    grace: float = 0.0
    """Seconds for which the server keeps the sessions of a broken connection."""
    reason: str = ""
    """Why the link was refused."""
    durable: bool = False
    """Whether the server, if it comes back, knows the link: an orderly end and a refusal are breaks, too."""


class Link(Resumable):
    """The common part of both ends of a link. Subclasses override `handle`."""

    def __init__(self, budget: Pins) -> None:
        super().__init__(budget)
        self.out: list[Framed] = []
        """Bytes for the connection, in order. The owner of the connection removes them."""
        self.connected = False
        self._spent: int = 0
        """The cost of the deliveries of the present call of `take`."""
        self._frames: BytesWriter | None = None
        """Added frames, after the last long payload if there is any."""
        self._before: list[Framed] = []
        """Bytes before `_frames`: long payloads, which are not copied, and the frames between them."""
        self.added_bytes: int = 0
        """Bytes of all added frames, which are not sent or kept yet."""
        self._same_payload: bytes = b""
        self._same: list[int] = []
        """Sessions of the last DATA frame, which is not in `_frames` yet."""
        self.untold: int = 0
        """Bytes taken since the last acknowledgement."""
        self._same_done: int = 0
        """Deliveries made of the next frame, a SAME that is not handled completely."""

    # Sending

    def has_room(self) -> bool:
        """Return whether DATA may be added."""
        return self.kept_bytes + self.added_bytes < WINDOW_BYTES

    def add(self, kind: int, session: int, payload: bytes = b"") -> None:
        """Add a frame other than DATA."""
        if self._same:
            self._close_same()
        self._append(kind, session, payload)

    def add_data(self, session: int, payload: bytes) -> None:
        """Add bytes of a session's stream."""
        size = len(payload)
        if size > PIECE_BYTES:
            for at in range(0, size, PIECE_BYTES):
                self.add_data(session, payload[at : at + PIECE_BYTES])
            return
        if self._same:
            if payload == self._same_payload:
                self._same.append(session)
                self.added_bytes += 4
                if len(self._same) == SAME_SESSIONS:
                    self._close_same()
                return
            self._close_same()
        self._same_payload = payload
        self._same.append(session)
        self.added_bytes += size + FRAME_HEAD_BYTES

    def seal(self) -> None:
        """Keep the added frames, and put them into `out`. Acknowledge what was taken, if that is due."""
        if self._same:
            self._close_same()
        untold = self.untold
        frames = self._frames
        if untold >= ACKNOWLEDGE_BYTES and (frames is not None or untold >= ACKNOWLEDGE_AT_ONCE):
            self._append_ack()
            frames = self._frames
        if frames is None:
            return
        pieces = self._before
        self._before = []
        pieces.append(frames.getvalue())
        self._frames = None
        self.added_bytes = 0
        self.keep(pieces)
        if self.connected:
            self.out.extend(pieces)

    def acknowledge(self) -> None:
        """Acknowledge now, which also shows that this end is alive."""
        if self.connected:
            if self._same:
                self._close_same()
            self._append_ack()
            self.seal()

    def held_bytes(self) -> int:
        """Return the bytes of frames that the peer has not acknowledged."""
        return self.kept_bytes + self.added_bytes

    def forget(self) -> None:
        """Drop all frames: the link is over."""
        super().forget()
        self._frames = None
        self._before = []
        self._same.clear()
        self.added_bytes = 0

    def _append_ack(self) -> None:
        if self.connected:
            self._append(ACK, LINK, U64.pack(self.taken))
            self.untold = 0

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
            self.added_bytes += FRAME_HEAD_BYTES
        sessions.clear()
        self._same_payload = b""
        self._append_payload(frames, payload)

    def _append(self, kind: int, session: int, payload: bytes) -> None:
        frames = self._frames
        if frames is None:
            frames = self._frames = BytesWriter()
        size = len(payload)
        write_i64_le(frames, session | size << LENGTH_SHIFT | kind << KIND_SHIFT)
        self.added_bytes += FRAME_HEAD_BYTES + size
        self._append_payload(frames, payload)

    def _append_payload(self, frames: BytesWriter, payload: bytes) -> None:
        if len(payload) > _COPIED:
            self._before.append(frames.getvalue())
            self._before.append(payload)
            frames.truncate(0)
        elif payload:
            frames.write(payload)

    # Receiving

    def take(self, data: bytes, at: int, end: int, most: int) -> tuple[int, int]:
        """Handle the complete frames in data[at:end], up to a cost of `most`.

        Returns where it stopped, and the length that `data` needs for the next frame, or the same number if it stopped
        early. It also stops when handling a frame disconnects the link. Raises ProtocolError.
        """
        self._spent = 0
        while True:
            start = at + FRAME_HEAD_BYTES
            if start > end:
                return at, start
            head = read_i64_le(data, at)
            size = head >> LENGTH_SHIFT & LENGTH_MASK
            kind = head >> KIND_SHIFT
            if size > (MAX_FRAME_BYTES if kind == SAME else PIECE_BYTES):
                raise ProtocolError(f"frame of {size} bytes (max {PIECE_BYTES}, and the sessions of a SAME)")
            stop = start + size
            if stop > end:
                return at, stop
            if self._spent >= most:
                return at, at
            if kind == SAME:
                if not self._take_same(data, start, stop, most):
                    return at, at
            elif kind == ACK:
                if size != U64.size or head & SESSION_MASK != LINK:
                    raise ProtocolError(f"ACK with a payload of {counted(size, 'byte')}")
                self.acknowledged(read_i64_le(data, start))
            else:
                self._spent += 1 + (size >> _COST_SHIFT)
                self.handle(kind, head & SESSION_MASK, data[start:stop])
            self.taken += stop - at
            self.untold += stop - at
            at = stop
            if not self.connected:
                return at, at

    def in_same(self) -> bool:
        """Return whether `take` stopped within a SAME, so that further sessions have to get its payload."""
        return self._same_done > 0

    def handle(self, kind: int, session: int, payload: bytes) -> None:
        """Handle one frame. Raises nothing but ProtocolError, for an invalid frame."""
        raise NotImplementedError

    def _take_same(self, data: bytes, at: int, stop: int, most: int) -> bool:
        """Deliver the payload of a SAME to its sessions; return whether all have it. It stops as `take` does."""
        count = read_i64_le(data, at) & SESSION_MASK if stop - at >= _LEAST_SAME else 0
        start = at + 4 + 4 * count
        if not 0 < count <= SAME_SESSIONS or not start <= stop <= start + PIECE_BYTES:
            raise ProtocolError(
                f"SAME for {count} sessions in {stop - at} bytes (max {SAME_SESSIONS} sessions, {PIECE_BYTES} bytes)"
            )
        payload = data[start:stop]
        cost = 1 + (len(payload) >> _COST_SHIFT)
        for number in range(at + 4 * self._same_done, start - 4, 4):
            if self._spent >= most or not self.connected:
                return False
            self._same_done += 1
            self._spent += cost
            self.handle(DATA, read_i64_le(data, number) >> 32 & SESSION_MASK, payload)
        self._same_done = 0
        return True

    # The connection

    def connect(self, taken: int) -> None:
        """Use a new connection to a peer that has taken `taken` bytes. Raises ProtocolError."""
        self.acknowledged(taken)
        self.connected = True
        self.out = self.rest()
        self.untold = 0

    def disconnect(self) -> None:
        """Stop using a connection that is gone."""
        self.connected = False
        self.out = []
