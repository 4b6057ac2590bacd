"""Decodes the samples of commands that the admin socket sends.

Knows the format (`observe/monitor.py`). Must not know sockets or output.
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
    """The first key, in stored form."""
    keys: int
    size: int
    """Bytes of its values."""
    value: str | None
    store: str | None = None
    """The name of its store; None for the unnamed one."""


class Portion(Line):
    """Samples since the last portion, oldest first."""

    samples: list[Sample] = msgspec.field(default_factory=list)
    seen: int = 0
    """Commands so far."""
    dropped: int = 0
    """Samples so far that were dropped, because they were not read in time."""


def read_samples(lines: Iterable[bytes]) -> Iterator[Portion]:
    """Decode the reply to `monitor` as it arrives. Raises as `decode_lines` does."""
    return (portion for portion in decode_lines(lines, Portion) if portion.samples)
