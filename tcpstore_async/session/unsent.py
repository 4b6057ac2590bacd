"""The unsent bytes of one connection: replies that the kernel has not accepted yet.

Short replies are copied together; longer ones are kept by reference, and count once in the budget however many
connections share them. `session/session.py` counts them, and has those not offered to the kernel yet. This module does
not know sockets: whoever writes passes `batch` to the kernel and reports with `took` how much of it was accepted.

Invariant: the bytes leave in the order in which they were added, and everything kept is counted in the budget.
"""

from collections import deque
from itertools import islice
from typing import Any, Final

from ..base.mypyc_shim import mypyc_attr
from ..wire.values import Framed

_UNSENT_BYTES: Final = 1024
"""Bytes counted for the queue of one peer's unsent replies; an empty deque has 760."""

_PIN_BYTES: Final = 256
"""Bytes counted, besides its contents, for a piece of a reply kept by reference, or for a chunk of copied pieces."""

_SLOT_BYTES: Final = 9
"""Bytes counted for one more reference to such a piece."""

_COPIED: Final = 64
"""Pieces shorter than this are copied into chunks: an object for each would cost many times its bytes."""

CHUNK: Final = 32 * 1024
"""Length at which a chunk is complete."""

PIECES: Final = 256
"""Most pieces in one write."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Pin:
    """A piece of a reply kept by reference, however many replies share it."""

    def __init__(self, cost: int, holder: "Unsent") -> None:
        self.cost = cost
        self.references = 1
        self.holder: Unsent | None = holder
        """The queue for which it counts; None once that has released it while others have not."""


class Pins:
    """The pinned pieces of all peers, and what counts them. The base class of `Budget`."""

    def __init__(self) -> None:
        self.pins: dict[int, Pin] = {}
        """By the identity of the piece."""
        self.orphaned: int = 0
        """Bytes of pinned pieces that count for no queue in particular."""

    def charge(self, amount: int) -> None:
        """Count so many bytes more, or less."""
        raise NotImplementedError


@mypyc_attr(allow_interpreted_subclasses=True)
class Unsent:
    """The replies to one peer that the kernel has not accepted, in order."""

    def __init__(self, budget: Pins) -> None:
        self.budget = budget
        self.pieces: deque[Framed] = deque()
        self.taken: int = 0
        """Bytes of the first piece that the kernel has accepted."""
        self.cost: int = _UNSENT_BYTES
        """Bytes counted besides pinned pieces."""
        self.pinned: int = 0
        """Bytes of the pinned pieces that count for this queue."""
        self.referenced: int = 0
        """Bytes of all pinned pieces in this queue."""
        self._chunk: bytearray | None = None
        """The last piece, if it is a chunk of copied pieces that may grow."""
        budget.charge(_UNSENT_BYTES)

    def add(self, replies: list[Framed], taken: int = 0, copied: int = _COPIED) -> None:
        """Append replies, without their first `taken` bytes, which must be 0 unless the queue is empty.

        Pieces of fewer than `copied` bytes are copied.
        """
        pieces = self.pieces
        before = self.cost
        for piece in replies:
            size = len(piece)
            if taken >= size:
                taken -= size
                continue
            if taken:
                self.taken = taken
                taken = 0
            elif size < copied:
                chunk = self._chunk
                if chunk is None or len(chunk) >= CHUNK:
                    chunk = self._chunk = bytearray()
                    pieces.append(chunk)
                    self.cost += _PIN_BYTES
                chunk += piece
                self.cost += size
                continue
            self._chunk = None
            pieces.append(piece)
            self.cost += _SLOT_BYTES
            self._pin(piece)
        self.budget.charge(self.cost - before)

    def add_short(self, piece: Framed, copied: int) -> bool:
        """Append a reply of fewer than `copied` bytes if the last chunk has space; return whether it was appended."""
        chunk = self._chunk
        size = len(piece)
        if chunk is None or size >= copied or len(chunk) >= CHUNK:
            return False
        chunk += piece
        self.cost += size
        self.budget.charge(size)
        return True

    def batch(self) -> list[Framed | memoryview]:
        """Return the pieces to write next."""
        batch: list[Framed | memoryview] = list(islice(self.pieces, PIECES))
        if self.taken:
            batch[0] = memoryview(batch[0])[self.taken :]
        return batch

    def took(self, count: int) -> bool:
        """Remove `count` bytes that the kernel has accepted; True if that was everything."""
        pieces = self.pieces
        before = self.cost
        count += self.taken
        while pieces and count >= len(pieces[0]):
            piece = pieces.popleft()
            count -= len(piece)
            self._drop(piece)
        self.taken = count
        if not pieces:
            self.cost = 0
        self.budget.charge(self.cost - before)
        return not pieces

    def shared(self) -> list[Framed]:
        """Return all pieces, for another queue to send as well. They are not copied: none of them grows any more."""
        pins = self.budget.pins
        before = self.cost
        self._chunk = None
        for piece in self.pieces:
            if id(piece) not in pins:
                self.cost += _SLOT_BYTES - len(piece) - _PIN_BYTES
                self._pin(piece)
        self.budget.charge(self.cost - before)
        return list(self.pieces)

    def release(self) -> None:
        """Drop everything."""
        before = self.cost
        while self.pieces:
            self._drop(self.pieces.popleft())
        self.cost = 0
        self.budget.charge(-before)

    def _pin(self, piece: Framed) -> None:
        budget = self.budget
        pin = budget.pins.get(id(piece))
        if pin is None:
            pin = budget.pins[id(piece)] = Pin(len(piece) + _PIN_BYTES, self)
            self.pinned += pin.cost
            budget.charge(pin.cost)
        else:
            pin.references += 1
            if pin.holder is None:
                pin.holder = self
                self.pinned += pin.cost
                budget.orphaned -= pin.cost
        self.referenced += pin.cost

    def _drop(self, piece: Framed) -> None:
        budget = self.budget
        pin = budget.pins.get(id(piece))
        if pin is None:
            if piece is self._chunk:
                self._chunk = None
            self.cost -= len(piece) + _PIN_BYTES
            return
        self.cost -= _SLOT_BYTES
        self.referenced -= pin.cost
        pin.references -= 1
        if pin.holder is self:
            pin.holder = None
            self.pinned -= pin.cost
            budget.orphaned += pin.cost
        if not pin.references:
            del budget.pins[id(piece)]
            budget.orphaned -= pin.cost
            budget.charge(-pin.cost)


def first_bytes(pieces: list[Any], most: int) -> list[Any]:
    """Return the first `most` bytes of `pieces`, which are cut without a copy."""
    taken: list[Any] = []
    for piece in pieces:
        size = len(piece)
        if size > most:
            taken.append(memoryview(piece)[:most])
            break
        taken.append(piece)
        most -= size
    return taken
