"""Room at the end of a buffer, for bytes that are about to be received.

Knows: how a bytearray is made longer without a look at its new bytes. Must not know: what is received.
Invariant: the new bytes have no meaning: whoever asks for them writes them before anybody reads them.
"""

from typing import Any

try:
    import ctypes
except ImportError:  # Python may have been built without
    _resize: Any = None
else:
    _resize = ctypes.pythonapi.PyByteArray_Resize
    _resize.argtypes = [ctypes.py_object, ctypes.c_ssize_t]
    _resize.restype = ctypes.c_int


def resize_uninitialized(buffer: bytearray, size: int) -> None:
    """Make the buffer `size` bytes long.

    Python's own ways fill the new bytes with zeros and copy those: a third of what a SET of 1 MiB costs in all.
    """
    if _resize is None:
        buffer += bytes(size - len(buffer))
    else:
        _resize(buffer, size)
