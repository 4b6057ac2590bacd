"""Space at the end of a buffer."""

from __future__ import annotations

import pytest

from tcpstore_async.wire import receive_buffer


@pytest.mark.parametrize("by_ctypes", [True, False])
def test_a_resized_buffer_keeps_its_bytes(by_ctypes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if by_ctypes:
        assert receive_buffer._resize is not None
    else:
        monkeypatch.setattr(receive_buffer, "_resize", None)
    buffer = bytearray(b"here")
    for size in (4, 16, 100_000, 10_000_000):
        receive_buffer.resize_uninitialized(buffer, size)
        assert len(buffer) == size
        buffer[-1:] = b"!"
        assert buffer.startswith(b"here" if size > 4 else b"her!")
        buffer[:4] = b"here"


def test_a_buffer_with_a_view_is_not_resized() -> None:
    buffer = bytearray(b"here")
    with memoryview(buffer), pytest.raises(BufferError):
        receive_buffer.resize_uninitialized(buffer, 100)
    assert buffer == b"here"
