"""Events as bytes, and back, in any process and build.

Most events are bytes that a session received: these have a header of twelve bytes and are otherwise as they arrived.
Every other one is a MessagePack array. This module must not know what an event does, or where it is kept.

Invariant: `decode` returns what `encode` was given, or raises JournalError; nothing in between.
"""

import dataclasses
import struct
from typing import Any, Final

import msgspec
from librt.strings import BytesWriter, write_i32_le, write_i64_le

from ..auth.access import Access
from .events import RECEIVE, Event, Evicted, Reference, Reply


class JournalError(Exception):
    """A journal cannot be read, or may not be used."""


_HEAD: Final = struct.Struct("<QI")
"""The kind, in the lowest byte, with the number of the session above it; and the length of what follows."""

_BYTES: Final = 1
"""What a session received, and there were no answers."""
_CALL: Final = 2
"""Any other event: its method, its subject, what it was given, and the answers."""

_REFERENCE: Final = 1
_EVICTED: Final = 2
_REPLY: Final = 3
_ACCESS: Final = 4

_ACCESS_FIELDS: Final = [field.name for field in dataclasses.fields(Access) if field.init]

_pack: Final = msgspec.msgpack.Encoder().encode


class Encoder:
    """Collects events as bytes, without their time, which is the same for all."""

    def __init__(self) -> None:
        self._writer = BytesWriter()

    def received(self, session: int, data: bytes) -> None:
        """Add what the session of this number has received."""
        writer = self._writer
        write_i64_le(writer, session << 8 | _BYTES)
        write_i32_le(writer, len(data))
        writer.write(data)

    def add(self, events: list[Event]) -> None:
        for event in events:
            subject, given = event.subject, event.given
            if event.method == RECEIVE and subject.kind == "session" and not event.answers:
                self.received(subject.name, given[0])
            else:
                data = _pack([event.method, _plain(subject), _plain(given), _plain(event.answers)])
                writer = self._writer
                write_i64_le(writer, _CALL)
                write_i32_le(writer, len(data))
                writer.write(data)

    def take(self) -> bytes:
        """Return what was added since the last call."""
        data = self._writer.getvalue()
        self._writer.truncate(0)
        return data


def encode(events: list[Event]) -> bytes:
    """Return events as bytes."""
    encoder = Encoder()
    encoder.add(events)
    return encoder.take()


def decode(data: bytes, now: float) -> list[Event]:
    """Return the events of one time. Raises JournalError."""
    events = []
    at = 0
    while at < len(data):
        if len(data) - at < _HEAD.size:
            raise JournalError("an event ends in its header")
        word, size = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        if len(data) - at < size:
            raise JournalError(f"an event of {size} bytes ends after {len(data) - at}")
        body = data[at : at + size]
        at += size
        kind = word & 0xFF
        if kind == _BYTES:
            events.append(Event(RECEIVE, Reference("session", word >> 8), (body,), now))
        elif kind == _CALL:
            events.append(_decode_call(body, now))
        else:
            raise JournalError(f"unknown kind of event: {kind}")
    return events


def _decode_call(body: bytes, now: float) -> Event:
    try:
        method, subject, given, answers = _unpack(body)
    except (ValueError, TypeError, LookupError, msgspec.MsgspecError) as error:
        raise JournalError(f"an event cannot be decoded: {error}") from None
    whole = isinstance(method, str) and isinstance(subject, Reference)
    if not whole or not isinstance(given, tuple) or not isinstance(answers, tuple):
        raise JournalError("an event is not a call")
    return Event(method, subject, given, now, answers)


def _plain(thing: Any) -> Any:
    """Return what MessagePack has a form for."""
    if isinstance(thing, Reference):
        return _tagged(_REFERENCE, list(thing))
    if isinstance(thing, Evicted):
        return _tagged(_EVICTED, [_plain(one) for one in thing])
    if isinstance(thing, Reply):
        return _tagged(_REPLY, [thing.command, _plain(thing.result)])
    if isinstance(thing, Access):
        return _tagged(_ACCESS, [getattr(thing, name) for name in _ACCESS_FIELDS])
    if isinstance(thing, (tuple, list)):
        return [_plain(one) for one in thing]
    return thing


def _tagged(code: int, fields: list[Any]) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, _pack(fields))


def _untag(code: int, data: memoryview) -> Any:
    fields = _unpack(bytes(data))
    if code == _REFERENCE:
        return Reference(*fields)
    if code == _EVICTED:
        return Evicted(*fields)
    if code == _REPLY:
        return Reply(*fields)
    if code == _ACCESS:
        return Access(**dict(zip(_ACCESS_FIELDS, fields, strict=True)))
    raise ValueError(f"unknown kind of value: {code}")


def _unpack(data: bytes) -> Any:
    return _tuples(_decoder.decode(data))


def _tuples(thing: Any) -> Any:
    return tuple(_tuples(one) for one in thing) if isinstance(thing, list) else thing


_decoder: Final = msgspec.msgpack.Decoder(ext_hook=_untag)
