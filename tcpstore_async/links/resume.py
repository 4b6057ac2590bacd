"""The bytes that two ends of a link have exchanged, over all connections: what was taken, and what may be needed again.

Without I/O. It must not know what the bytes mean, how they travel, or what time it is.

Invariant: every byte sent is kept until the peer has acknowledged it, so the next connection continues where the peer
stopped, at whatever byte that was.
"""

import zlib
from typing import Final

from ..base.errors import ProtocolError, counted
from ..session.unsent import Pins, Unsent
from ..wire.values import Framed, length

_COPIED: Final = 1024
"""Shorter pieces are copied together: they are acknowledged soon."""

_MANY_PIECES: Final = 2048
"""With more pieces, `_COPIED_OF_MANY` applies: dropping acknowledged pieces must not take long."""

_COPIED_OF_MANY: Final = 4096
"""Shorter pieces are copied together if there are many."""


class Uncounted(Pins):
    """Counts nothing, for a client, which has no budget."""

    def charge(self, amount: int) -> None:
        pass


class Outputs:
    """A checksum of what streams are sent, in whatever pieces, and in whatever order the streams are."""

    def __init__(self) -> None:
        self._sums: dict[Resumable, int] = {}
        """Those to which something was added since the last `take`, each with the checksum of all its bytes."""

    def add(self, stream: "Resumable", pieces: list[Framed]) -> None:
        crc = stream.crc
        for piece in pieces:
            crc = zlib.crc32(piece, crc)
        stream.crc = self._sums[stream] = crc

    def forget(self, stream: "Resumable") -> None:
        self._sums.pop(stream, None)

    def take(self) -> int:
        """Return the checksum of what was added since the last call, in 32 bits."""
        total = sum(self._sums.values()) & 0xFFFFFFFF
        self._sums.clear()
        return total


class Resumable:
    """One end of a stream of bytes that survives its connection."""

    def __init__(self, budget: Pins) -> None:
        self.budget = budget
        self.outputs: Outputs | None = None
        """Where a checksum of what is sent is added, if it is needed."""
        self.crc: int = 0
        self.taken: int = 0
        """Bytes taken from the peer."""
        self.sent: int = 0
        """Bytes sent, whether or not a connection took them."""
        self.kept: Unsent | None = None
        """Those that the peer has not acknowledged; None if there are none."""
        self.kept_bytes: int = 0

    def keep(self, pieces: list[Framed]) -> None:
        """Keep bytes that are sent now."""
        if self.outputs is not None:
            self.outputs.add(self, pieces)
        size = length(pieces)
        self.sent += size
        self.kept_bytes += size
        kept = self.kept
        if kept is None:
            kept = self.kept = Unsent(self.budget)
        elif len(pieces) == 1 and kept.add_short(pieces[0], _COPIED):
            return
        kept.add(pieces, 0, _COPIED if len(kept.pieces) < _MANY_PIECES else _COPIED_OF_MANY)

    def acknowledged(self, taken: int) -> None:
        """Drop what the peer has taken: the first `taken` bytes. Raises ProtocolError.

        An acknowledgement that is sent again says less than a later LINK has said; it changes nothing.
        """
        if not 0 <= taken <= self.sent:
            raise ProtocolError(f"the peer acknowledged {counted(taken, 'byte')}, but {self.sent} were sent")
        count = taken - self.told()
        if count > 0:
            self.kept_bytes -= count
            kept = self.kept
            if kept is not None and kept.took(count):
                self.kept = None

    def told(self) -> int:
        """Return how many bytes the peer has acknowledged."""
        return self.sent - self.kept_bytes

    def can_resume(self, taken: int, told: int) -> bool:
        """Return whether neither end lacks bytes, if the peer has taken `taken` and we have acknowledged `told`."""
        return self.told() <= taken <= self.sent and told <= self.taken

    def rest(self) -> list[Framed]:
        """Return what the peer has not acknowledged, to be sent on the next connection."""
        kept = self.kept
        if kept is None:
            return []
        pieces = kept.shared()
        if kept.taken:
            pieces[0] = bytes(memoryview(pieces[0])[kept.taken :])
        return pieces

    def forget(self) -> None:
        """Keep nothing any more."""
        if self.outputs is not None:
            self.outputs.forget(self)
        if self.kept is not None:
            self.kept.release()
            self.kept = None
        self.kept_bytes = 0
