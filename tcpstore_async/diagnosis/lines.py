"""Decodes the lines of the admin socket's replies.

Knows the fields that any line may have. Must not know sockets, nor other fields.
"""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import msgspec

from ..base.errors import DistStoreError, ProtocolError


class Line(msgspec.Struct):
    """A line of any reply."""

    server: dict[str, Any] | None = None
    error: str = ""
    end: bool = False


AnyLine = TypeVar("AnyLine", bound=Line)


def decode_lines(lines: Iterable[bytes], type: type[AnyLine]) -> Iterator[AnyLine]:
    """Yield decoded lines. Raises DistStoreError for a reported error, ProtocolError for an invalid line."""
    decoder = msgspec.json.Decoder(type)
    for raw in lines:
        try:
            line = decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"invalid reply from the admin socket: {error}") from None
        if line.error:
            raise DistStoreError(line.error)
        yield line


def decode_reply(lines: Iterable[bytes], type: type[AnyLine]) -> Iterator[AnyLine]:
    """Yield the lines before the last. Raises as `decode_lines` does, and ProtocolError if the last one is missing."""
    for line in decode_lines(lines, type):
        if line.end:
            return
        yield line
    raise ProtocolError("the admin socket's reply is incomplete")
