"""The reply to MISSING, which is JSON. `docs/wire.md` specifies it.

Used by both ends. Must not know how the contents are found, nor how they are used.
"""

import msgspec

from ..base.errors import ProtocolError


class Who(msgspec.Struct, frozen=True, omit_defaults=True):
    """A process, as far as known."""

    host: str
    rank: int | None = None
    pid: int | None = None

    def __str__(self) -> str:
        where = self.host if self.pid is None else f"{self.host}, pid {self.pid}"
        return where if self.rank is None else f"rank {self.rank} ({where})"


class Near(msgspec.Struct, frozen=True, omit_defaults=True):
    """An existing key that is similar to a missing one."""

    key: str
    age: float | None = None
    """Seconds since it was last written, if known."""
    by: Who | None = None
    """Who wrote it."""


class Absent(msgspec.Struct, frozen=True, omit_defaults=True):
    """A missing key."""

    index: int
    """Its place in the request, from 0."""
    nearest: list[Near] = []


class Elsewhere(msgspec.Struct, frozen=True, omit_defaults=True):
    """A missing rank that is or was connected."""

    who: Who
    does: str
    since: float | None = None
    """Seconds since its last request, if known."""


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """The reply."""

    missing: int = 0
    """Number of keys of the request that do not exist."""
    keys: list[Absent] = []
    """The first of these keys."""
    arrived: int | None = None
    """Value of the counter in the request, if there was one."""
    ranks: list[int] = []
    """The first ranks that have not written the keys or not arrived, if known."""
    more: int = 0
    """Number of further ranks."""
    elsewhere: list[Elsewhere] = []


def encode_report(report: Report) -> bytes:
    return msgspec.json.encode(report)


def decode_report(raw: bytes) -> Report:
    """Decode a reply. Raises ProtocolError."""
    try:
        return msgspec.json.decode(raw, type=Report)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ProtocolError("invalid reply to MISSING") from None
