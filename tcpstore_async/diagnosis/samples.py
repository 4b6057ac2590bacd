"""Samples of the commands that a server executes, as its admin socket sends them.

Knows the format (`observe/monitor.py`). Must not know sockets, nor how anything is printed.
"""

from collections.abc import Iterable, Iterator

import msgspec

from .lines import Line, decode_lines


class Sample(msgspec.Struct, array_like=True):
    """A command that a server has executed."""

    time: float
    """Seconds since the epoch."""
    host: str
    port: int
    pid: int | None
    rank: str | None
    command: str
    key: str | None
    """The first one, stored form."""
    keys: int
    size: int
    """Bytes of its values."""
    value: str | None
    store: str | None = None
    """The name of the store, if it has one."""


class Portion(Line):
    """Samples since the last portion, oldest first."""

    samples: list[Sample] = msgspec.field(default_factory=list)
    seen: int = 0
    """Commands so far."""
    dropped: int = 0
    """Samples so far that were not sent, because they were not read in time."""


def read_samples(lines: Iterable[bytes]) -> Iterator[Portion]:
    """Decode the reply to `monitor` as it arrives. Raises as `decode_lines` does."""
    return (portion for portion in decode_lines(lines, Portion) if portion.samples)
