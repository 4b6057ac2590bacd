"""How long a connection's peer has been silent, from the kernel: no bookkeeping while all is well.

Knows Linux's TCP_INFO. Must not know what was awaited.
"""

import socket
import struct
from typing import Final, Protocol

_INFO: Final[int | None] = getattr(socket, "TCP_INFO", None)

_LAST_DATA_RECEIVED: Final = struct.Struct("@52xI")
"""tcpi_last_data_recv of `struct tcp_info` in <linux/tcp.h>: milliseconds since the last byte, or since connecting."""

_MOST: Final = 2**31
"""Milliseconds, 24 days, from which the number is taken for another field of another kernel's structure."""


class Peer(Protocol):
    """A socket, or a transport's view of one."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


def seconds_silent(peer: Peer | None) -> float | None:
    """Return the seconds since the last byte arrived; None if the system does not say."""
    if peer is None or _INFO is None or not hasattr(socket, "SO_PEERCRED"):  # other systems have another structure
        return None
    try:
        raw = peer.getsockopt(socket.IPPROTO_TCP, _INFO, _LAST_DATA_RECEIVED.size)
        milliseconds: int = _LAST_DATA_RECEIVED.unpack(raw)[0]
    except (OSError, struct.error):
        return None
    return milliseconds / 1000 if milliseconds < _MOST else None


def describe_silence(peer: Peer | None) -> str:
    """Return those seconds as text for an error; "" if the system does not say."""
    seconds = seconds_silent(peer)
    return "" if seconds is None else f"last byte from the server {seconds:.1f} s ago"
