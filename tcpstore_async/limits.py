"""What one server grants its peers.

Knows: the names, units and defaults of the limits. Must not know: who checks them.
Invariant: a `Limits` never changes once made. The defaults are met by no well-behaved job; the first three are those of
PyTorch's libuv server.
"""

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


@dataclass(frozen=True)
class Limits:
    """Limits of one server. Sizes are in bytes; whoever goes over one loses its connection, and nobody else notices."""

    key_bytes: int = 8 * KIB
    """Length of one key on the wire."""

    value_bytes: int = 8 * MIB
    """Length of one value in a request. Repeated APPENDs may grow a stored value beyond it, as on PyTorch's server."""

    keys: int = 128 * KIB
    """Number of keys in one request."""

    request_bytes: int = 256 * MIB
    """Length of one request. At least what one key and two of the largest values need."""

    unfinished_bytes: int = GIB
    """Received bytes of requests that are not complete, or wait for their peer to read, of all connections together."""

    unread_soft_bytes: int = MIB
    """Replies that one peer has not read, at which its requests wait until it has."""

    unread_hard_bytes: int = 256 * MIB
    """Replies that one peer has not read, one large reply included, over which its connection closes.

    At least `unread_soft_bytes` and one largest value: an item that was popped must not be lost to this limit.
    """

    store_bytes: int = 8 * GIB
    """Keys, values, queues and parked waiters together, with what holds them."""

    connections: int = 0
    """Connections at once; 0 means as many as the process may open files, less a reserve."""

    def __post_init__(self) -> None:
        """Raise ValueError for limits that contradict each other."""
        _demand("request_bytes", self.request_bytes, self.key_bytes + 2 * self.value_bytes + 25)
        _demand("unread_hard_bytes", self.unread_hard_bytes, self.unread_soft_bytes + self.value_bytes + 16)


def _demand(name: str, given: int, least: int) -> None:
    if given < least:
        raise ValueError(f"{name} is {given}, but with the other limits as they are it must be at least {least}")


ENTRY_BYTES = 128
"""What holds one key or queued item in the store is counted as this many bytes."""

PARKED_BYTES = 512
"""What holds one waiter under one key is counted as this many bytes."""
