"""The reply to MISSING, which is JSON. `docs/wire.md` specifies it.

Both ends use it. It must not know how the contents are found out, nor what becomes of them.
"""

import msgspec

from ..base.errors import ProtocolError


class Who(msgspec.Struct, frozen=True, omit_defaults=True):
    """A process, as far as it is known."""

    host: str
    rank: int | None = None
    pid: int | None = None

    def __str__(self) -> str:
        where = self.host if self.pid is None else f"{self.host}, pid {self.pid}"
        return where if self.rank is None else f"rank {self.rank} ({where})"


class Near(msgspec.Struct, frozen=True, omit_defaults=True):
    """An existing key that is like one that is missing."""

    key: str
    age: float | None = None
    """Seconds since it was last written, if that is known."""
    by: Who | None = None
    """Who wrote it."""


class Absent(msgspec.Struct, frozen=True, omit_defaults=True):
    """A key that is missing."""

    index: int
    """Its place in the request, from 0."""
    nearest: list[Near] = []


class Elsewhere(msgspec.Struct, frozen=True, omit_defaults=True):
    """A rank that is missing, and is or was connected."""

    who: Who
    does: str
    since: float | None = None
    """For how many seconds, if that is known."""


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """The reply."""

    missing: int = 0
    """How many keys of the request do not exist."""
    keys: list[Absent] = []
    """The first of them."""
    arrived: int | None = None
    """What the counter in the request has reached, if it had one."""
    ranks: list[int] = []
    """The ranks that have not written the keys or not arrived, the first ones, if that is known."""
    more: int = 0
    """How many ranks follow."""
    elsewhere: list[Elsewhere] = []


def encode_report(report: Report) -> bytes:
    return msgspec.json.encode(report)


def decode_report(raw: bytes) -> Report:
    """Raises ProtocolError."""
    try:
        return msgspec.json.decode(raw, type=Report)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ProtocolError("invalid reply to MISSING") from None
