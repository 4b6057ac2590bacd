"""Conversion of arguments: text to bytes, timeouts to seconds, integers to 64 bits.

Accepts the types that PyTorch's methods take. Every error is a TypeError or ValueError that names the argument, except
the one that PyTorch raises. Arguments are typed `object`, because compiled code would reject a wrong type with its own
message.
"""

import math
import operator
from collections.abc import Iterable
from datetime import timedelta
from typing import Final

from .addresses import unbracketed
from .errors import DistStoreError

Text = str | bytes | bytearray
Timeout = timedelta | float

LONGEST: Final = 1e10
"""Maximum timeout in seconds, about 300 years."""

_TWO_63: Final = 2**63

_MOST_DIGITS: Final = 9


def _plain(text: str) -> TypeError:
    """Make an error without context: `raise … from None` is lost in compiled code."""
    error = TypeError(text)
    error.__cause__ = None
    return error


def to_bytes(name: str, value: object) -> bytes:
    """Convert a key or value: str to UTF-8, bytes and bytearray to bytes."""
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError:
            raise _plain(f"{name} contains lone surrogates and cannot be encoded as UTF-8") from None
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    raise TypeError(f"{name} must be str, bytes or bytearray, not {type(value).__name__}")


def to_bytes_list(name: str, values: object) -> list[bytes]:
    """Convert keys or values: any iterable of them except str, bytes, bytearray and dict."""
    if isinstance(values, (str, bytes, bytearray, dict)) or not isinstance(values, (list, Iterable)):
        raise TypeError(f"{name} must be a list of str or bytes, not {type(values).__name__}")
    items = list(values)
    try:
        return [to_bytes(name, item) for item in items]
    except TypeError:  # find the culprit only now: a name for each item would cost more than the conversion
        for number, item in enumerate(items):
            to_bytes(f"{name}[{number}]", item)
        raise


def to_pairs(keys: list[bytes], values: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Pair keys with values. Raises DistStoreError, as PyTorch's TCPStore does, if their numbers differ."""
    if len(keys) != len(values):
        raise DistStoreError("multiSet keys and values vectors must be of same size")
    return list(zip(keys, values, strict=True))


def to_int64(name: str, value: object) -> int:
    if type(value) is int:
        number = value
    else:
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            raise _plain(f"{name} must be an int, not {type(value).__name__}") from None
    if not -_TWO_63 <= number < _TWO_63:
        raise TypeError(f"{name} does not fit in 64 bits: {number}")
    return number


def to_seconds(name: str, timeout: object) -> float:
    """Convert a timeout to seconds, truncated to whole milliseconds as PyTorch's are.

    Any negative timeout means no timeout and stays negative. A timeout beyond `LONGEST` is cut to that, so that it fits
    a timedelta. Raises ValueError for NaN and infinity.
    """
    if isinstance(timeout, timedelta):
        seconds = timeout.total_seconds()
    elif isinstance(timeout, (int, float)):
        seconds = _to_float(timeout)
    else:
        raise TypeError(f"{name} must be a timedelta or a number of seconds, not {type(timeout).__name__}")
    if math.isnan(seconds) or seconds == math.inf:
        raise ValueError(f"{name} must be finite (a negative number means no timeout)")
    if seconds < 0:
        return min(_to_milliseconds(max(seconds, -LONGEST)), -0.001)
    return _to_milliseconds(min(seconds, LONGEST))


def call_seconds(timeout: object, default: float) -> float:
    """Return the timeout of one call in seconds; `default`, the store's, if the call has none."""
    return default if timeout is None else to_seconds("timeout", timeout)


def _to_milliseconds(seconds: float) -> float:
    return math.trunc(round(seconds * 1e6) / 1e3) / 1e3


def _to_float(number: int | float) -> float:
    try:
        return float(number)
    except OverflowError:  # an int that no float can hold
        return math.inf if number > 0 else -math.inf


def in_milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def to_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return value


def to_host(name: str, value: object) -> str:
    """Return a host, an IPv6 address without the brackets of URLs."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}")
    if "\0" in value:
        raise ValueError(f"{name} must not contain NUL")
    return unbracketed(value)


def to_port(name: str, value: object) -> int:
    number = to_int64(name, value)
    if not 0 <= number <= 65535:
        raise TypeError(f"{name} must be from 0 to 65535, not {number}")
    return number


def parse_digits(text: str | None) -> int | None:
    """Return the number that a peer sent as one to nine decimal digits; None for any other text."""
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


def to_world_size(name: str, value: object) -> int | None:
    """Convert a number of ranks; None means unknown, for which PyTorch also accepts a negative number."""
    if value is None:
        return None
    number = to_int64(name, value)
    if number == 0:
        raise ValueError("TCPStore world size cannot be 0")
    return number if number > 0 else None
