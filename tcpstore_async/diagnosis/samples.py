"""Samples of the commands that a server executes, as its admin socket sends them.

Knows the format (`session/monitor.py`). Must not know sockets, nor how anything is printed.
"""

from collections.abc import Iterable, Iterator

import msgspec

from ..errors import DistStoreError, ProtocolError


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


class Portion(msgspec.Struct):
    """Samples since the last portion, oldest first."""

    samples: list[Sample] = []
    seen: int = 0
    """Commands so far."""
    dropped: int = 0
    """Samples so far that were not sent, because they were not read in time."""


class _Line(Portion):
    error: str = ""


def read_samples(lines: Iterable[bytes]) -> Iterator[Portion]:
    """Decode the reply to `monitor` as it arrives. Raises DistStoreError for one that says what is wrong."""
    decoder = msgspec.json.Decoder(_Line)
    for raw in lines:
        try:
            line = decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"invalid reply of the admin socket: {error}") from None
        if line.error:
            raise DistStoreError(line.error)
        if line.samples:
            yield line
