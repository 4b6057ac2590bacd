"""Values in the form in which a reply costs least."""

from __future__ import annotations

import pytest

from tcpstore_async.base.errors import ProtocolError
from tcpstore_async.wire.values import (
    COUNTER_SIZE,
    EMPTY,
    GROWING_BYTES,
    NUMBER_BYTES,
    Growing,
    cost,
    framed,
    number,
    pack,
    size,
    unpack,
    wrap,
)


@pytest.mark.parametrize("raw", [b"", b"v", bytes(300), b"\0\xff"])
def test_pack_and_unpack(raw: bytes) -> None:
    packed = pack(raw)
    assert packed == len(raw).to_bytes(8, "little") + raw
    assert unpack(packed) == unpack(bytearray(packed)) == raw


def test_the_empty_value() -> None:
    assert pack(b"") == EMPTY


def test_framed_gives_every_form_its_length() -> None:
    growing = Growing(pack(b"ab"))
    growing.append(pack(b"cd"))
    assert framed(growing) == pack(b"abcd")
    assert framed(-12) == pack(b"-12")
    assert framed(pack(b"x")) == pack(b"x")
    assert framed(bytearray(pack(b"x"))) == pack(b"x")


def test_a_framed_value_is_not_copied() -> None:
    value, large = pack(b"v"), bytearray(pack(b"w"))
    assert framed(value) is value
    assert framed(large) is large


def test_a_framed_value_does_not_change_with_its_source() -> None:
    growing = Growing(pack(b"a"))
    flat = framed(growing)
    growing.append(pack(b"b"))
    assert flat == pack(b"a")


def test_size() -> None:
    assert size(pack(b"abc")) == size(bytearray(pack(b"abc"))) == size(Growing(pack(b"abc"))) == 11
    assert cost(Growing(pack(b"abc"))) - GROWING_BYTES == cost(pack(b"abc")) == 11
    assert size(0) == size(-(2**63)) == COUNTER_SIZE


@pytest.mark.parametrize(("text", "expected"), [
    (b" \t\n\v\f\r+12abc", 12), (b"-007", -7), (b"9223372036854775807", 2**63 - 1),
    (b"-0000000000009223372036854775808", -(2**63)),
])  # fmt: skip
def test_number(text: bytes, expected: int) -> None:
    """In every form. tests/conformance has more texts, and PyTorch's answers."""
    assert number(pack(text)) == number(bytearray(pack(text))) == number(Growing(pack(text))) == expected


@pytest.mark.parametrize("filler", [b" ", b"0"])
# quirk: long-numbers
def test_a_number_ends_within_its_first_bytes(filler: bytes) -> None:
    """Looking for it costs no more than that, however long the value is (finding H4)."""
    most = filler * (NUMBER_BYTES - 1) + b"5"
    assert number(pack(most)) == number(Growing(pack(most))) == 5
    for text in (filler * NUMBER_BYTES + b"5", most + b" ", filler * 2**21 + b"5"):
        for blob in (pack(text), bytearray(pack(text)), Growing(pack(text))):
            with pytest.raises(ProtocolError):
                number(blob)


def test_a_number_is_found_in_the_pieces_of_a_growing_value() -> None:
    growing = Growing(pack(b"  "))
    growing.read()
    growing.append(bytearray(pack(b"12" + bytes(300_000))))
    assert number(growing) == 12


def test_frequent_reads_make_few_pieces_and_no_copies() -> None:
    growing = Growing(pack(bytes(100_000)))
    for _ in range(10):
        growing.append(pack(bytes(100_000)))
        growing.read()
    seen = growing.read()
    for _ in range(1000):
        growing.append(pack(b"x"))
        growing.read()
    after = growing.read()
    assert len(after) == len(seen)
    assert all(one is other for one, other in zip(seen[1:-1], after[1:-1], strict=True))
    assert b"".join(after) == pack(bytes(1_100_000) + b"x" * 1000)
    assert b"".join(seen) == pack(bytes(1_100_000))


def test_a_counter_is_its_number() -> None:
    assert number(-5) == -5


@pytest.mark.parametrize(("value", "expected"), [
    (0, 0),
    (2**63 - 1, 2**63 - 1),
    (2**63, -(2**63)),
    (-(2**63) - 1, 2**63 - 1),
    (2 * (2**63 - 1), -2),
    (-(2**64), 0),
])  # fmt: skip
def test_wrap(value: int, expected: int) -> None:
    assert wrap(value) == expected


def test_a_large_value_is_appended_without_a_copy() -> None:
    growing = Growing(pack(b"a"))
    large = bytearray(pack(bytes(300_000)))
    growing.append(large)
    growing.append(pack(b"b"))
    assert growing.size == 300_002
    assert growing.pieces[1] is large
    assert framed(growing) == pack(b"a" + bytes(300_000) + b"b")
