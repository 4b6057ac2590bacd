"""Since when the peer of a connection has been silent, as the kernel knows it: nothing is counted while all is well.

Knows Linux's TCP_INFO. Must not know what was awaited.
"""

import socket
import struct
from typing import Final, Protocol

_INFO: Final[int | None] = getattr(socket, "TCP_INFO", None)

_LAST_DATA_RECEIVED: Final = struct.Struct("@52xI")
"""In `struct tcp_info` of <linux/tcp.h>, in milliseconds ago; at first since the connection was made."""

_MOST: Final = 2**31
"""No silence lasts 24 days: another system may have something else at this place."""


class Peer(Protocol):
    """A socket, or what a transport shows of one."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


def seconds_silent(peer: Peer | None) -> float | None:
    """Return how long ago the last byte arrived; None if the system does not say."""
    if peer is None or _INFO is None or not hasattr(socket, "SO_PEERCRED"):  # Linux; others have another structure
        return None
    try:
        raw = peer.getsockopt(socket.IPPROTO_TCP, _INFO, _LAST_DATA_RECEIVED.size)
        milliseconds: int = _LAST_DATA_RECEIVED.unpack(raw)[0]
    except (OSError, struct.error):
        return None
    return milliseconds / 1000 if milliseconds < _MOST else None


def describe_silence(peer: Peer | None) -> str:
    """Return the same as text for an error, "" if the system does not say."""
    seconds = seconds_silent(peer)
    return "" if seconds is None else f"last byte from the server {seconds:.1f} s ago"
