"""A session as its store and its server know it: who the peer is, what it sends, and what is unsent to it.

What it does with bytes is not known here; `server.py` knows.

Invariant: what is counted in the budget for an introduction is what `introduction_bytes` returns.
"""

from collections.abc import Sequence
from sys import getsizeof
from typing import Final

from ..auth.access import Access
from ..base.clock import Clock
from ..base.errors import PeerError, ProtocolError
from ..keyspace.steps import Running
from ..wire.codecs import PartialRequest
from ..wire.values import Framed, unpack
from .budget import Budget, Holder
from .observer import NEVER
from .slots import Slot

NO_PID: Final = -1

_MAX_INTRODUCTION: Final = 2048
"""Bytes of an INTRODUCE: names and framed values, which limits the number of items too."""

_MAX_PID_DIGITS: Final = 19

Introduction = dict[str, str]

_NO_INTRODUCTION: Final[Introduction] = {}
"""Shared by all sessions that have not sent INTRODUCE; never changed."""


class Peer(Holder):
    """One connection, or one session on a link."""

    __slots__ = ("heard_at", "serial")
    """Python shares the names of 29 other attributes among all sessions. With one more, each would have its own."""

    def __init__(
        self, owner: object, host: str, port: int, connected_at: float, table: list[Slot | None], slot: Slot
    ) -> None:
        super().__init__()
        # What most commands use comes first: compiled, it is in fewer cache lines.
        self.table = table
        self.slot = slot
        """The last command, incomplete ones included. What it awaits is in `parked` or `group`."""
        self.heard_at: float = NEVER
        """When it last received something, in seconds of the server's clock, if its store is observed."""
        self.out: list[Framed] = []
        """Replies for the server to take, in order."""
        self.unsent: int = 0
        """Bytes of replies, `out` included, that the kernel has not accepted yet."""
        self.partial: PartialRequest | None = None
        """The request that has been decoded in part."""
        self.running: Running | None = None
        """The last command, if it is not done; `receive(b"")` continues it."""
        self.input_buffer: bytearray | None = None
        """Bytes that are not decoded yet."""
        self.need: int = 0
        """Length of `input_buffer` at which decoding can continue; 0 if it waits for something else."""
        self.owner: object = owner
        """Its `Transport`, on a server; None after `leave`."""
        self.host = host
        self.port = port
        self.connected_at = connected_at
        """On the same clock."""
        self.serial: int = 0
        """Its serial number in the history; 0 if it is not named there."""
        self.pid: int = NO_PID
        """The peer's process: from its INTRODUCE, else the number of its first PING, which PyTorch's client and ours
        send in the handshake."""
        self.peer: Introduction = _NO_INTRODUCTION
        """The contents of the peer's INTRODUCE."""

    def validate(self, magic: int) -> None:
        """Execute VALIDATE."""
        raise NotImplementedError

    def grant_access(self, access: Access | None) -> None:
        """Allow what the peer's token allows, or everything if it has authenticated by a certificate."""
        raise NotImplementedError

    def why_ended(self) -> str:
        """Return why its token is no longer valid; empty if it is, or has none."""
        raise NotImplementedError

    def expected(self) -> str:
        """Return what the peer has to send first, and has not sent."""
        raise NotImplementedError

    def evict(self, error: PeerError) -> None:
        raise NotImplementedError

    def leave(self) -> None:
        """Release everything: the connection is gone. Sessions that this wakes are in `Hub.pending_flush`."""
        raise NotImplementedError

    # What its transport knows

    def shares_connection(self) -> bool:
        """Return whether this is a session on a link."""
        raise NotImplementedError

    def awaited_since(self) -> float:
        """See `Owner.awaited_since`."""
        raise NotImplementedError

    def refused_before(self) -> str:
        """See `Owner.refused_before`."""
        raise NotImplementedError

    # Who it is

    def ping(self, nonce: int, clock: Clock) -> int:
        """Execute PING."""
        if self.pid == NO_PID:
            self.pid = nonce
            clock.lasting = True  # a link may keep the session, which then is whose it was
        return nonce

    def introduce(self, items: list[tuple[bytes, Framed]], budget: Budget) -> None:
        """Execute INTRODUCE: keep a description of the peer for logs. Raises ProtocolError if it is too long."""
        if len(items) > _MAX_INTRODUCTION or sum(len(name) + len(value) for name, value in items) > _MAX_INTRODUCTION:
            raise ProtocolError(f"INTRODUCE of more than {_MAX_INTRODUCTION} bytes")
        before = self.introduction_bytes()
        self.peer = {printable(name): printable(unpack(value)) for name, value in items}
        pid = self.peer.get("pid", "")
        if pid.isdecimal() and len(pid) <= _MAX_PID_DIGITS:
            self.pid = int(pid)
        budget.charge(self.introduction_bytes() - before)
        budget.relieve(self)

    def introduction_bytes(self) -> int:
        peer = self.peer
        if not peer:
            return 0
        return getsizeof(peer) + sum(getsizeof(name) + getsizeof(text) for name, text in peer.items())


def latecomers(sessions: Sequence[Peer], complete: float) -> list[Peer]:
    """Return the sessions connected after the world was complete: they belong to the next round.

    A peer that was connected before, judged by host and process, keeps its later connections too.
    """
    early = {(one.host, one.pid) for one in sessions if one.connected_at <= complete and one.pid != NO_PID}
    return [one for one in sessions if one.connected_at > complete and (one.host, one.pid) not in early]


def printable(raw: bytes) -> str:
    """Text that cannot break a log line."""
    text = raw.decode(errors="replace")
    return text if text.isprintable() else repr(text)[1:-1]
