"""The byte layout of single fields. Properties of all codecs are in tests/properties/test_codec_properties.py."""

from __future__ import annotations

from typing import Any

import pytest

from support import blob, keys, u64
from tcpstore_async.base.limits import KIB, MIB, Limits
from tcpstore_async.wire.codecs import (
    COUNTED_KEYS,
    ITEMS,
    KEY,
    KEY_I64,
    KEY_VALUE,
    KEY_VALUE_2_I64,
    KEY_VALUE_3_I64,
    KEY_VALUE_VALUE,
    KEYS,
    LARGE_VALUE_BYTES,
    NOTHING,
    POPPED,
    U32,
    LargeValue,
    RequestCodec,
)
from tcpstore_async.wire.values import pack

LIMITS = Limits()


def fields(*got: Any) -> tuple[Any, ...]:
    return got


@pytest.mark.parametrize(("codec", "sent", "encoded"), [
    (NOTHING, (), b""),
    (U32, (0x3C85F7CE,), bytes.fromhex("cef7853c")),
    (KEY, (b"/k",), u64(2) + b"/k"),
    (KEY_I64, (b"/k", -2), u64(2) + b"/k" + b"\xfe" + b"\xff" * 7),
    (KEY_VALUE, (b"/k", pack(b"v")), blob(b"/k") + blob(b"v")),
    (KEY_VALUE_VALUE, (b"/k", pack(b""), pack(b"v")), blob(b"/k") + blob(b"") + blob(b"v")),
    (KEY_VALUE_2_I64, (b"/k", pack(b"v"), 1, -2), blob(b"/k") + blob(b"v") + u64(1) + b"\xfe" + b"\xff" * 7),
    (KEY_VALUE_3_I64, (b"/k", pack(b""), 1, 2, 3), blob(b"/k") + blob(b"") + u64(1) + u64(2) + u64(3)),
    (KEYS, ([b"/a", b""],), keys(b"/a", b"")),
    (ITEMS, ([(b"/a", pack(b"1"))],), u64(1) + blob(b"/a") + blob(b"1")),
])  # fmt: skip
def test_bytes(codec: RequestCodec, sent: tuple[Any, ...], encoded: bytes) -> None:
    assert codec.encode(sent) == encoded
    assert codec.decode(fields, encoded, 0, len(encoded), LIMITS) == (sent, len(encoded))


def test_replies_that_are_built() -> None:
    assert COUNTED_KEYS.encode is not None
    assert COUNTED_KEYS.encode([b"/a", b""]) == keys(b"/a", b"")
    assert POPPED.encode is not None
    assert POPPED.encode((0, None)) == [u64(0)]
    value = pack(bytes(MIB))
    popped = POPPED.encode((3, value))
    assert isinstance(popped, list)
    assert popped[0] == u64(3)
    assert popped[1] is value


def test_a_large_value_is_received_into_its_own_buffer() -> None:
    value = blob(bytes(range(256)) * 4 * KIB)
    start = blob(b"/k") + value[:100]
    rest, stop = KEY_VALUE.decode(fields, start, 0, len(start), LIMITS)
    assert isinstance(rest, LargeValue)
    assert (-stop, rest.at, rest.size) == (len(start) + 1, len(start), len(value))
    at = 100
    while at < len(value):
        with rest.free_space() as space:
            count = min(len(space), 50_000, len(value) - at)
            space[:count] = value[at : at + count]
        rest.fill(count)
        at += count
        assert rest.held() <= 4 * max(at, 64 * KIB) + len(b"/k")
    assert len(rest.free_space()) == 0
    (key, stored), stop = rest.decode(fields, b"", 0, 0, LIMITS)
    assert (key, stored, stop) == (b"/k", value, 0)


def test_bytes_behind_a_large_value_are_not_used() -> None:
    value = blob(bytes(LARGE_VALUE_BYTES))
    start = blob(b"/k") + value[:-5]
    rest, _ = KEY_VALUE.decode(fields, start, 0, len(start), LIMITS)
    assert isinstance(rest, LargeValue)
    more = b"??" + value[-5:] + b"next"
    (_, stored), stop = rest.decode(fields, more, 2, len(more), LIMITS)
    assert (stored, stop) == (value, 7)


@pytest.mark.parametrize("second", [b"", b"small", bytes(2 * LARGE_VALUE_BYTES)], ids=len)
@pytest.mark.parametrize("step", [1, 7, 50_000])
def test_a_large_first_value_is_received_into_its_own_buffer_too(second: bytes, step: int) -> None:
    """Whatever follows it, in whatever pieces: at both ends of each value, single bytes."""
    first = blob(bytes(range(256)) * (LARGE_VALUE_BYTES // 256))
    frame = blob(b"/k") + first + blob(second)
    rest: Any = None
    unused, at, need = b"", 0, 0
    while at < len(frame):
        near = any(abs(at - end) < 40 for end in (12, len(frame) - len(blob(second)), len(frame)))
        piece = frame[at : at + (step if near else 50_000)]
        at += len(piece)
        data = unused + piece
        if len(data) < need:
            unused = data
            continue
        codec = KEY_VALUE_VALUE if rest is None else rest
        rest, stop = codec.decode(fields, data, 0, len(data), LIMITS)
        if stop < 0:
            begin = 0 if rest is None else rest.at
            unused, need = data[begin:], -stop - begin
    assert stop == len(data)
    key, expected, desired = rest
    assert (key, expected, desired) == (b"/k", first, blob(second))
    assert isinstance(expected, bytearray)


def test_an_announcement_gets_a_small_buffer() -> None:
    start = blob(b"/k") + u64(8 * MIB)
    rest, _ = KEY_VALUE.decode(fields, start, 0, len(start), LIMITS)
    assert isinstance(rest, LargeValue)
    assert rest.held() <= 256 * KIB + len(b"/k")


def test_short_values_are_decoded_when_complete() -> None:
    start = blob(b"/k") + u64(LARGE_VALUE_BYTES - 9)
    assert KEY_VALUE.decode(fields, start, 0, len(start), LIMITS) == (None, -(len(start) + LARGE_VALUE_BYTES - 9))


def test_an_incomplete_list_keeps_its_items() -> None:
    whole = keys(b"/a", b"/b", b"/c")
    start = whole[:25]
    rest, stop = KEYS.decode(fields, start, 0, len(start), LIMITS)
    assert (rest.at, -stop) == (18, 26)
    assert rest.held() > 18
    remaining = whole[18:]
    assert rest.decode(fields, remaining, 0, len(remaining), LIMITS) == (([b"/a", b"/b", b"/c"],), len(remaining))
