"""The limits of a server: names, units and defaults.

Checked: `keys` here, for `wire/codecs.py`; `key_bytes`, `value_bytes`, `request_bytes` and `request_key_bytes`
there, `budget_bytes` in `session/budget.py`, `unsent_high_water` in `session/server.py`, `links` in
`links/link_registry.py`, `sessions` in `links/link_server.py`, `connections`, `validate_seconds` and `audit_lines`
in `server/`. What one token may store (`--max-keys`, `--max-bytes`) is checked in `keyspace/accounts.py`.

A `Limits` is immutable. No well-behaved job reaches the defaults; the first three are those of PyTorch's libuv server.
"""

from dataclasses import dataclass
from typing import Final

from .errors import LimitError

DEFAULT_GRACE: Final = 10.0
"""Seconds that connections get to finish when the server stops."""

LINK_GRACE: Final = 30.0
"""Seconds for which the sessions of a link are kept after its connection breaks."""

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


@dataclass(frozen=True)
class Limits:
    """Limits of one server, sizes in bytes. A peer that exceeds one loses its connection; others are not affected."""

    key_bytes: int = 8 * KIB
    """Length of a key on the wire."""

    value_bytes: int = 8 * MIB
    """Length of a value in a request. Repeated APPENDs may grow a stored value beyond it, as on PyTorch's server."""

    keys: int = 128 * KIB
    """Number of keys in one request."""

    request_bytes: int = 256 * MIB
    """Length of one request: at least one key and two values of the maximum length."""

    request_key_bytes: int = 16 * MIB
    """Length of all keys of one request: they are looked up at once, which takes long for long keys."""

    budget_bytes: int = 8 * GIB
    """Everything that peers make the server hold, overheads included: the store, waiters, incomplete requests, unsent
    replies, introductions, connections. Above 7/8 of it the largest holder is evicted; above 15/16 the store does not
    grow."""

    unsent_high_water: int = MIB
    """Unsent bytes of replies above which a peer's requests are not executed until the kernel has accepted more."""

    connections: int = 0
    """Simultaneous connections; 0 means the process's limit on open files, less a reserve."""

    links: int = 65_536
    """Links, including those without a connection."""

    sessions: int = 131_072
    """Sessions on links."""

    validate_seconds: int = 30
    """Seconds within which a new connection must send VALIDATE; 0 means no limit."""

    audit_lines: int = 100
    """Refused actions per second that get a line each in the audit log, which counts the rest; 0 means no limit."""

    def __post_init__(self) -> None:
        """Raise ValueError for limits that contradict each other."""
        _demand("request_bytes", self.request_bytes, self.key_bytes + 2 * self.value_bytes + 25)
        _demand("request_key_bytes", self.request_key_bytes, self.key_bytes)
        _demand("budget_bytes", self.budget_bytes, self.value_bytes + 16)

    def check_keys(self, count: int) -> None:
        """Raise LimitError if a request names too many keys; a negative count is a u64 above int64."""
        if count < 0 or count > self.keys:
            raise LimitError("keys", count % 2**64, self.keys)


def _demand(name: str, given: int, least: int) -> None:
    if given < least:
        raise ValueError(f"{name} is {given}, but the other limits require at least {least}")


ENTRY_BYTES: Final = 128
"""Bytes counted for a key or a queued item, besides its contents."""

QUEUE_BYTES: Final = 832
"""Bytes counted for a queue, besides its items; an empty deque has 760."""

PARKED_BYTES: Final = 512
"""Bytes counted for the registration of a waiter under a key, besides the key."""

MEMBER_BYTES: Final = 192
"""Bytes counted for a waiter in a group that is registered for all its members."""
