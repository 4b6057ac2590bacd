"""Receive buffers that grow without being filled with zeros first."""

from typing import Any

try:
    import ctypes
except ImportError:  # Python built without libffi
    _resize: Any = None
else:
    _resize = ctypes.pythonapi.PyByteArray_Resize
    _resize.argtypes = [ctypes.py_object, ctypes.c_ssize_t]
    _resize.restype = ctypes.c_int


def resize_uninitialized(buffer: bytearray, size: int) -> None:
    """Make the buffer `size` bytes long. The new bytes are undefined: write them before reading them.

    Python's own ways fill the new bytes with zeros first: a third of the time of a SET of 1 MiB.
    """
    if _resize is None:
        buffer += bytes(size - len(buffer))
    else:
        _resize(buffer, size)
