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

    budget_bytes: int = 8 * GIB
    """Everything that peers make the server hold, together, with what holds it: the store, waiters, requests under way,
    unsent replies, introductions, connections. From 7/8 of it on whoever holds most goes; from 15/16 on the store does
    not grow."""

    unsent_high_water: int = MIB
    """Bytes of replies that the kernel has not taken, at which a peer's requests wait until it has."""

    connections: int = 0
    """Connections at once; 0 means as many as the process may open files, less a reserve."""

    validate_seconds: int = 30
    """Time that a new connection has to send VALIDATE; 0 means any. (The one limit that is not a size or a number.)"""

    def __post_init__(self) -> None:
        """Raise ValueError for limits that contradict each other."""
        _demand("request_bytes", self.request_bytes, self.key_bytes + 2 * self.value_bytes + 25)
        _demand("budget_bytes", self.budget_bytes, self.value_bytes + 16)


def _demand(name: str, given: int, least: int) -> None:
    if given < least:
        raise ValueError(f"{name} is {given}, but with the other limits as they are it must be at least {least}")


ENTRY_BYTES = 128
"""What holds one key or queued item in the store is counted as this many bytes."""

QUEUE_BYTES = 832
"""What holds a queue is counted as this many bytes more; an empty deque is 760."""

PARKED_BYTES = 512
"""What holds one waiter under one key is counted as this many bytes."""
