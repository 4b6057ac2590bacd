"""The codecs of request fields and replies, used by both ends. Integers are little-endian.

A codec encodes and decodes one layout of fields. It knows the limits on lengths; it must not know opcodes, what a
request means, or where bytes come from.

Invariants: a length is checked against its limit as soon as it is read, before the bytes that it announces. Nothing is
decoded twice, except the one or two lengths before the point at which a frame was cut.
"""

import gc
from collections.abc import Callable
from struct import Struct
from typing import Any, Final

from librt.strings import read_i64_le

from ..base.errors import LimitError, ProtocolError
from ..base.limits import Limits
from ..base.mypyc_shim import mypyc_attr
from .receive_buffer import resize_uninitialized
from .values import ABSENT, PREFIX, Framed, pack

Fields = tuple[Any, ...]
"""The fields of a request."""

Handler = Callable[..., Any]
"""A function that takes the fields of a request."""

_U32: Final = Struct("<I")
_read_u32: Final = _U32.unpack_from
_I64: Final = Struct("<q")
_U64: Final = Struct("<Q")

_ONE_KEY: Final = Struct("<QQ")
"""The number of keys and the length of the first."""

LARGE_VALUE_BYTES: Final = 64 * 1024
"""Length from which an incomplete value is received straight into the buffer that will be stored."""

_FIRST_BUFFER: Final = 4 * 1024
"""Bytes of the initial buffer of a large value, which grows to four times what has arrived."""

ITEM_BYTES: Final = 64
"""Bytes counted for one key of an incomplete list, besides its contents."""

_MANY_ITEMS: Final = 10_000
"""Items above which a list is moved out of the youngest generation of the garbage collector."""

MAX_TOKEN: Final = 4096
"""Bytes of the longest token that AUTH may carry."""

_PAIR_BYTES: Final = 160
"""Bytes counted for a key and a value of an incomplete list."""


FIELD_LAYOUTS: Final = {
    "u": "u32",
    "n": "i64",
    "k": "key",
    "v": "value",
    "t": "value",
    "l": "keys",
    "i": "pairs",
    "m": "pairs",
}
"""Layouts, for `docs/wire.md`, by the letter of a kind of field: a 32-bit number, a number, a key, a value, a token, a
list of keys, pairs of key and value, pairs of name and value."""


@mypyc_attr(allow_interpreted_subclasses=True)
class PartialRequest:
    """The state of a request that has been decoded in part."""

    at: int
    """Where the unused bytes begin in the data that was last decoded."""
    items: list[Any]
    """The fields, or items of the list, decoded so far."""
    before: bytes = b""
    """Bytes that arrived earlier and must be decoded again, before those at `at`."""
    endless: bool = False
    """Whether it never completes, so that even a short chunk must be decoded."""

    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        """Continue decoding; returns and raises as `RequestCodec.decode`."""
        raise NotImplementedError

    def held(self) -> int:
        """Return the bytes held for the request so far."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Release what is held: the connection is gone."""


class RequestCodec:
    """The layout of a request's fields, which follow the opcode."""

    def __init__(self, kinds: str) -> None:
        self.kinds: Final = kinds
        """The kind of each field, as a letter of `FIELD_LAYOUTS`."""
        self.arity: Final = len(kinds)
        """The number of fields."""
        self.layout: Final = ", ".join([FIELD_LAYOUTS[kind] for kind in kinds])
        """The fields, for `docs/wire.md`."""
        self.names_keys: Final = not {"k", "l", "i"}.isdisjoint(kinds)
        """Whether any field is a key or has keys."""

    def keys(self, fields: Fields) -> list[bytes]:
        """Return the keys among the fields."""
        return []

    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        """Decode the fields that start at `at` in data[:end] and pass them to `call`.

        Returns the result of `call` and where the fields stop. If they are incomplete: None, or the `PartialRequest` to
        continue with, and minus the length that `data` needs for progress. Raises LimitError. (Calling from here, not
        returning a tuple of fields, saves 0.15 µs a command in plain Python.)
        """
        raise NotImplementedError

    def encode(self, fields: Fields) -> bytes:
        """Return the fields as bytes."""
        raise NotImplementedError


class _BeginsWithKey(RequestCodec):
    """A codec whose first field is a key, and no other."""

    def keys(self, fields: Fields) -> list[bytes]:
        return [fields[0]]


class _Nothing(RequestCodec):
    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        return call(), at

    def encode(self, fields: Fields) -> bytes:
        return b""


class _U32Field(RequestCodec):
    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        stop = at + 4
        if stop > end:
            return None, -stop
        return call(_read_u32(data, at)[0]), stop

    def encode(self, fields: Fields) -> bytes:
        return _U32.pack(fields[0])


class _I64Field(RequestCodec):
    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        stop = at + 8
        if stop > end:
            return None, -stop
        return call(read_i64_le(data, at)), stop

    def encode(self, fields: Fields) -> bytes:
        return _I64.pack(fields[0])


def _unsigned(length: int) -> int:
    return length % 2**64


def key_stop(data: bytes, at: int, end: int, limits: Limits) -> int:
    """Return where the key at `at` stops, or minus the length that `data` needs for progress. Raises LimitError."""
    return _stop(data, at, end, "key_bytes", limits.key_bytes)


def _value_stop(data: bytes, at: int, end: int, limits: Limits) -> int:
    """Do the same for a value."""
    return _stop(data, at, end, "value_bytes", limits.value_bytes)


def _stop(data: bytes, at: int, end: int, limit: str, allowed: int) -> int:
    start = at + 8
    if start > end:
        return -start
    length: int = read_i64_le(data, at)
    if length < 0 or length > allowed:
        raise LimitError(limit, _unsigned(length), allowed)
    stop = start + length
    return stop if stop <= end else -stop


class _Key(_BeginsWithKey):
    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        start = at + 8
        if start <= end:  # a complete key needs no call of `key_stop`
            stop = start + read_i64_le(data, at)
            if start <= stop <= end and stop - start <= limits.key_bytes:
                return call(data[start:stop]), stop
        return None, key_stop(data, at, end, limits)

    def encode(self, fields: Fields) -> bytes:
        return pack(fields[0])


class _KeyI64(_BeginsWithKey):
    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        start = at + 8
        if start <= end:
            middle = start + read_i64_le(data, at)
            if start <= middle <= end - 8 and middle - start <= limits.key_bytes:
                return call(data[start:middle], read_i64_le(data, middle)), middle + 8
        middle = key_stop(data, at, end, limits)
        return None, middle if middle < 0 else -(middle + 8)

    def encode(self, fields: Fields) -> bytes:
        return pack(fields[0]) + _I64.pack(fields[1])


class _Token(RequestCodec):
    """A value with a maximum length of its own, in bytes."""

    def __init__(self, most: int) -> None:
        super().__init__("t")
        self.most = most

    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        start = at + PREFIX
        if start > end:
            return None, -start
        length: int = read_i64_le(data, at)
        if length < 0 or length > self.most:
            raise ProtocolError(f"a value of {_unsigned(length)} bytes (max {self.most})")
        stop = start + length
        return (call(data[at:stop]), stop) if stop <= end else (None, -stop)

    def encode(self, fields: Fields) -> bytes:
        value: bytes = fields[0]
        return value


class _KeyValues(_BeginsWithKey):
    """A key and one or more values."""

    def __init__(self, values: int, large: bool) -> None:
        super().__init__("k" + "v" * values)
        self.large = large
        """Whether a large value may be received as a `LargeValue`."""

    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        start = key_stop(data, at, end, limits)
        if start < 0:
            return None, start
        return self.decode_values([data[at + 8 : start]], None, call, data, start, end, limits)

    def decode_values(
        self,
        fields: list[Any],
        partial: "PartialValues | None",
        call: Handler,
        data: bytes,
        at: int,
        end: int,
        limits: Limits,
    ) -> tuple[Any, int]:
        """Decode the values that `fields` lacks; if a small one is incomplete, return `partial` first."""
        while len(fields) < self.arity:
            stop = _value_stop(data, at, end, limits)
            if stop < 0:
                if self.large and -stop - at >= LARGE_VALUE_BYTES:
                    return LargeValue(self, fields, -stop - at, data, at, end), -(end + 1)
                if partial is not None:
                    partial.at = at
                return partial, stop
            fields.append(data[at:stop])
            at = stop
        return call(*fields), at

    def encode(self, fields: Fields) -> bytes:
        return pack(fields[0]) + b"".join(fields[1:])


class _KeyValue(_KeyValues):
    """A key and one value, with a fast path for a complete frame."""

    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        start = at + 8
        if start <= end:
            middle = start + read_i64_le(data, at)
            if start <= middle <= end - 8 and middle - start <= limits.key_bytes:
                length = read_i64_le(data, middle)
                stop = middle + 8 + length
                if 0 <= length <= limits.value_bytes and stop <= end:
                    return call(data[start:middle], data[middle:stop]), stop
        return super().decode(call, data, at, end, limits)

    def encode(self, fields: Fields) -> bytes:
        value: bytes = fields[1]
        return pack(fields[0]) + value


class _KeyValueNumbers(_BeginsWithKey):
    """A key, a short value and numbers."""

    def __init__(self, numbers: int) -> None:
        super().__init__("kv" + "n" * numbers)
        self.numbers = Struct(f"<{numbers}q")

    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        start = key_stop(data, at, end, limits)
        if start < 0:
            return None, start
        middle = _value_stop(data, start, end, limits)
        if middle < 0:
            return None, middle
        stop = middle + self.numbers.size
        if stop > end:
            return None, -stop
        return call(data[at + 8 : start], data[start:middle], *self.numbers.unpack_from(data, middle)), stop

    def encode(self, fields: Fields) -> bytes:
        value: bytes = fields[1]
        return pack(fields[0]) + value + self.numbers.pack(*fields[2:])


@mypyc_attr(allow_interpreted_subclasses=True)
class PartialValues(PartialRequest):
    """A request whose first value was large and has arrived, while the second is incomplete."""

    def __init__(self, codec: _KeyValues, fields: list[Any]) -> None:
        self.codec = codec
        self.items = fields
        self.at = 0

    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        return self.codec.decode_values(self.items, self, call, data, at, end, limits)

    def held(self) -> int:
        return sum(map(len, self.items))


@mypyc_attr(allow_interpreted_subclasses=True)
class LargeValue(PartialRequest):
    """A request whose large value is received straight into the buffer that will be stored or compared.

    The buffer grows as bytes arrive: announcing a length alone costs no memory.
    """

    def __init__(self, codec: _KeyValues, fields: list[Any], size: int, data: bytes, start: int, end: int) -> None:
        self.codec = codec
        self.items = fields
        self.size = size
        self.filled = 0
        self.buffer = bytearray(min(size, _FIRST_BUFFER))
        self.at = self._take(data, start, end)

    def free_space(self) -> memoryview:
        """Return the part of the buffer to be filled next; empty once the value is complete."""
        if self.filled == len(self.buffer) and self.filled < self.size:
            resize_uninitialized(self.buffer, min(self.size, 4 * self.filled))
        return memoryview(self.buffer)[self.filled :]

    def fill(self, count: int) -> None:
        """Note that `count` bytes have been written to `free_space`."""
        self.filled += count

    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        self.at = self._take(data, at, end)
        if self.filled < self.size:
            return self, -(end + 1)
        fields = [*self.items, self.buffer]
        return self.codec.decode_values(fields, PartialValues(self.codec, fields), call, data, self.at, end, limits)

    def held(self) -> int:
        return self.filled + sum(map(len, self.items))

    def _take(self, data: bytes, at: int, end: int) -> int:
        while at < end and self.filled < self.size:
            with self.free_space() as space:
                count = min(end - at, len(space))
                space[:count] = data[at : at + count]
            self.filled += count
            at += count
        return at


def alone(key: bytes) -> bytes:
    """Make a list item from the only field, a key."""
    return key


def _pair(key: bytes, value: Framed) -> tuple[bytes, Framed]:
    hash(key)  # cached from now on: hashing all keys at once would hold the loop for long
    return key, value


class CountedList(RequestCodec):
    """A count and as many items."""

    def __init__(self, kind: str, item: RequestCodec, pick: Handler) -> None:
        super().__init__(kind)
        self.item = item
        self.pick = pick
        """Makes a list item from its fields."""

    def keys(self, fields: Fields) -> list[bytes]:
        items: list[Any] = fields[0]
        if not self.names_keys:
            return []
        return items if self.item is KEY else [key for key, _ in items]

    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        start = at + 8
        if start > end:
            return None, -start
        count: int = read_i64_le(data, at)
        limits.check_keys(count)
        if count == 1 and self.item is KEY and start + 8 <= end:  # most WAITs and CHECKs
            stop = start + 8 + read_i64_le(data, start)
            if start + 8 <= stop <= end and stop - start - 8 <= limits.key_bytes:
                return call([data[start + 8 : stop]]), stop
        return self.decode_items(call, count, data, at, end, limits)

    def decode_items(
        self, call: Handler, count: int, data: bytes, at: int, end: int, limits: Limits
    ) -> tuple[Any, int]:
        """Decode a list that starts at `at` and whose count is known; returns and raises as `decode`."""
        start = at + PREFIX
        items: list[Any] = []
        stop = take_keys(items, count, data, start, end, limits) if self.item is KEY else start
        size = stop - at
        # The common case: all has arrived, and even the whole list is within the limit on its keys.
        if len(items) == count and size <= limits.request_bytes and size <= limits.request_key_bytes:
            return call(items), stop
        return PartialList(self, count, items, size).decode(call, data, stop, end, limits)

    def encode(self, fields: Fields) -> bytes:
        items: list[Any] = fields[0]
        if len(items) == 1 and self.item is KEY:
            key: bytes = items[0]
            return _ONE_KEY.pack(1, len(key)) + key
        encoded = [self.item.encode(item if isinstance(item, tuple) else (item,)) for item in items]
        return _U64.pack(len(items)) + b"".join(encoded)


def take_keys(items: list[Any], count: int, data: bytes, at: int, end: int, limits: Limits) -> int:
    """Append complete keys to `items` until it holds `count`, and return where they stop.

    A loop of its own, without a call for every key, halves the time of a MULTI_GET of 1,000 keys.
    """
    longest = limits.key_bytes
    for _left in range(count - len(items)):
        start = at + 8
        if start > end:
            break
        stop = start + read_i64_le(data, at)
        if not start <= stop <= end or stop - start > longest:
            break
        items.append(data[start:stop])
        at = stop
    return at


class _WholeList(CountedList):
    """Named values, decoded once all have arrived, as there are secrets among them: at most so many bytes."""

    def __init__(self, most: int) -> None:
        super().__init__("m", _KeyValue(1, large=False), _pair)
        self.most = most

    def decode_items(
        self, call: Handler, count: int, data: bytes, at: int, end: int, limits: Limits
    ) -> tuple[Any, int]:
        items: list[Any] = []
        stop = at + PREFIX
        while len(items) < count:
            field, after = self.item.decode(self.pick, data, stop, end, limits)
            self._check(abs(after) - at)
            if after < 0:
                return None, min(after, -(end + 1))
            items.append(field)
            stop = after
        return call(items), stop

    def _check(self, size: int) -> None:
        if size > self.most:
            raise ProtocolError(f"names and values of {size} bytes (max {self.most})")


@mypyc_attr(allow_interpreted_subclasses=True)
class PartialList(PartialRequest):
    """A counted list of which some items have arrived."""

    def __init__(self, codec: CountedList, count: int, items: list[Any], size: int) -> None:
        self.codec = codec
        self.count = count
        self.items = items
        self.size = size
        self.key_bytes: int = 0
        """Bytes of the keys."""
        self.at = 0
        if count > _MANY_ITEMS:
            gc.collect(0)  # else a later collection traverses the long list: 20 ms for 131,072 long keys

    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        item = self.codec.item
        items = self.items
        start = at
        if item is KEY:
            at = take_keys(items, self.count, data, at, end, limits)
        need = 0
        # Other items than keys; of keys, the one that `take_keys` refused: it is incomplete or too long.
        while len(items) < self.count:
            field, stop = item.decode(self.codec.pick, data, at, end, limits)
            if stop < 0:
                need = -stop
                break
            items.append(field)
            if item is not KEY:
                self.key_bytes += len(field[0])
            at = stop
        if item is KEY:  # all bytes but the length prefixes and the count
            self.key_bytes = self.size + at - start - PREFIX * (len(items) + 1)
        if self.key_bytes > limits.request_key_bytes:
            raise LimitError("request_key_bytes", self.key_bytes, limits.request_key_bytes)
        self.at = at
        self.size += at - start
        size = self.size + max(0, need - at)
        if size > limits.request_bytes:
            raise LimitError("request_bytes", size, limits.request_bytes)
        return (self, -need) if need else (call(items), at)

    def held(self) -> int:
        return self.size + (ITEM_BYTES if self.codec.item is KEY else _PAIR_BYTES) * len(self.items)


class ReplyCodec:
    """The layout of a reply."""

    def __init__(
        self,
        kind: str = "",
        layout: str = "",
        encode: Callable[[Any], Any] | None = None,
        in_pieces: bool = False,
        measure: Callable[[Any], int] | None = None,
    ) -> None:
        self.kind = kind
        """The kind of result: `u` a 32-bit number, `n` a number, `b` true or false, `d` true, `v` a value, `a` its
        absence, `w` a list of values, `c` a list of keys, `p` a length and perhaps a value; empty for nothing."""
        self.layout = layout
        """The reply, for `docs/wire.md`."""
        self.encode = encode
        """Converts a result to the reply's bytes, or its pieces; None if the result is these already, or nothing."""
        self.in_pieces = in_pieces
        """Whether the reply is a list of pieces, so that values are not copied."""
        self.measure = measure
        """Returns the length in bytes; set for a reply that may be much larger than its request."""

    def decode(self, data: bytes, at: int, end: int, count: int) -> tuple[Any, int]:
        """Decode the reply that starts at `at` in data[:end]; `count` is the number of keys in the request.

        Returns the result and where it stops. If it is incomplete: None, or the `PartialReply` to continue with, and
        minus the length that `data` needs for progress. Raises ProtocolError for an invalid reply.
        """
        raise NotImplementedError


class PartialReply:
    """The state of a reply that has been decoded in part: items, and how many there will be."""

    def __init__(self, count: int, bare: bool) -> None:
        self.count = count
        self.items: list[Framed] = []
        self.bare = bare
        """Whether items are kept without their length prefix: keys are, values are not."""
        self.whole = 0
        """How many items the data before has brought. Others are decoded again, after an interrupt."""
        self.at = 0
        """Where the unused bytes begin in the data that was last decoded."""

    def decode(self, data: bytes, at: int, end: int) -> tuple[Any, int]:
        """Continue decoding; returns and raises as `ReplyCodec.decode`."""
        items = self.items
        del items[self.whole :]
        skip = PREFIX if self.bare else 0
        while len(items) < self.count:
            stop = _framed_stop(data, at, end)
            if stop < 0:
                self.at = at
                return self, stop
            items.append(data[at + skip : stop])
            at = stop
        return items, at


MAX_REPLY_ITEM: Final = 2**40
"""Bytes of a value, and number of keys, from which a reply is invalid."""


class _NoReply(ReplyCodec):
    def decode(self, data: bytes, at: int, end: int, count: int) -> tuple[Any, int]:
        return None, at


class _Echo(ReplyCodec):
    def decode(self, data: bytes, at: int, end: int, count: int) -> tuple[Any, int]:
        stop = at + 4
        if stop > end:
            return None, -stop
        return _read_u32(data, at)[0], stop


class _Number(ReplyCodec):
    def decode(self, data: bytes, at: int, end: int, count: int) -> tuple[Any, int]:
        stop = at + 8
        if stop > end:
            return None, -stop
        number: int = read_i64_le(data, at)
        return number, stop


READY: Final = 0
NOT_READY: Final = 1
STOP_WAITING: Final = 0
WAIT_CANCELED: Final = 1


class _Byte(ReplyCodec):
    """One byte: `yes` for a true result, `no` for a false one; if `no` is None, a false one has no reply yet."""

    def __init__(self, kind: str, yes: int, no: int | None, layout: str, error: str) -> None:
        super().__init__(kind, layout, (b"" if no is None else bytes([no]), bytes([yes])).__getitem__)
        self.yes = yes
        self.no = no
        self.error = error
        """The message for any other byte, as PyTorch's client has it."""

    def decode(self, data: bytes, at: int, end: int, count: int) -> tuple[Any, int]:
        if at == end:
            return None, -(at + 1)
        byte = data[at]
        if byte != self.yes and byte != self.no:
            raise ProtocolError(self.error)
        return byte == self.yes, at + 1


def _framed_stop(data: bytes, at: int, end: int) -> int:
    start = at + 8
    if start > end:
        return -start
    length: int = read_i64_le(data, at)
    if not 0 <= length < MAX_REPLY_ITEM:
        raise ProtocolError(f"reply claims {_unsigned(length)} bytes")
    stop = start + length
    return stop if stop <= end else -stop


class _Value(ReplyCodec):
    def decode(self, data: bytes, at: int, end: int, count: int) -> tuple[Any, int]:
        stop = _framed_stop(data, at, end)
        if stop < 0:
            return None, stop
        return data[at:stop], stop


class _NoValue(ReplyCodec):
    """The end of a FETCH without a value: a length that no value has."""

    def decode(self, data: bytes, at: int, end: int, count: int) -> tuple[Any, int]:
        stop = at + PREFIX
        if stop > end:
            return None, -stop
        if data[at:stop] != ABSENT:
            raise ProtocolError("expected the reply to a canceled FETCH")
        return ABSENT, stop


class _Values(ReplyCodec):
    """One value for each key of the request."""

    def decode(self, data: bytes, at: int, end: int, count: int) -> tuple[Any, int]:
        return PartialReply(count, bare=False).decode(data, at, end)


class _CountedKeys(ReplyCodec):
    """A count and as many keys."""

    def decode(self, data: bytes, at: int, end: int, count: int) -> tuple[Any, int]:
        start = at + 8
        if start > end:
            return None, -start
        number: int = read_i64_le(data, at)
        if not 0 <= number < MAX_REPLY_ITEM:
            raise ProtocolError(f"reply claims {_unsigned(number)} keys")
        return PartialReply(number, bare=True).decode(data, start, end)


def _measure_keys(keys: list[bytes]) -> int:
    return PREFIX * (1 + len(keys)) + sum(map(len, keys))


def _encode_keys(keys: list[bytes]) -> bytes:
    parts = [_I64.pack(len(keys))]
    for key in keys:
        parts.append(_U64.pack(len(key)))
        parts.append(key)
    return b"".join(parts)


class _Popped(ReplyCodec):
    """A length and, if it is more than 0, a value."""

    def decode(self, data: bytes, at: int, end: int, count: int) -> tuple[Any, int]:
        start = at + 8
        if start > end:
            return None, -start
        length: int = read_i64_le(data, at)
        if length <= 0:
            return (length, None), start
        stop = _framed_stop(data, start, end)
        if stop < 0:
            return None, stop
        return (length, data[start:stop]), stop


def encode_popped(popped: tuple[int, Framed | None]) -> list[Framed]:
    length, item = popped
    return [_I64.pack(length)] if item is None else [_I64.pack(length), item]


def _encode_deferred_popped(popped: tuple[int, Framed | None] | None) -> list[Framed]:
    return [] if popped is None else encode_popped(popped)


NOTHING: Final[RequestCodec] = _Nothing("")
U32: Final[RequestCodec] = _U32Field("u")
I64: Final[RequestCodec] = _I64Field("n")
KEY: Final[RequestCodec] = _Key("k")
KEY_I64: Final[RequestCodec] = _KeyI64("kn")
KEY_VALUE: Final[RequestCodec] = _KeyValue(1, large=True)
KEY_VALUE_VALUE: Final[RequestCodec] = _KeyValues(2, large=True)
KEY_VALUE_2_I64: Final[RequestCodec] = _KeyValueNumbers(2)
KEY_VALUE_3_I64: Final[RequestCodec] = _KeyValueNumbers(3)
KEYS: Final[RequestCodec] = CountedList("l", KEY, alone)
ITEMS: Final[RequestCodec] = CountedList("i", _KeyValue(1, large=False), _pair)
NAMED_VALUES: Final[RequestCodec] = CountedList("m", _KeyValue(1, large=False), _pair)
WHOLE_NAMED_VALUES: Final[RequestCodec] = _WholeList(MAX_TOKEN)
TOKEN: Final[RequestCodec] = _Token(MAX_TOKEN)

NO_REPLY: Final[ReplyCodec] = _NoReply()
ECHO: Final[ReplyCodec] = _Echo("u", "u32", _U32.pack)
NUMBER: Final[ReplyCodec] = _Number("n", "i64", _I64.pack)
PRESENCE: Final[ReplyCodec] = _Byte("b", READY, NOT_READY, "u8: 0 or 1", "ready or not_ready response expected")
WAKE: Final[ReplyCodec] = _Byte("d", STOP_WAITING, None, "u8: 0, deferred", "Stop_waiting response is expected")
CANCELED: Final[ReplyCodec] = _Byte("d", WAIT_CANCELED, None, "u8: 1", "wait_canceled response is expected")
VALUE: Final[ReplyCodec] = _Value("v", "value")
DEFERRED_VALUE: Final[ReplyCodec] = _Value("v", "value, deferred")
NO_VALUE: Final[ReplyCodec] = _NoValue("a", "8 bytes `ff`")
VALUES: Final[ReplyCodec] = _Values("w", "value of each key", in_pieces=True)
COUNTED_KEYS: Final[ReplyCodec] = _CountedKeys("c", "i64 *n*, *n* × key", _encode_keys, measure=_measure_keys)
POPPED: Final[ReplyCodec] = _Popped("p", "i64 *n*; value if *n* > 0", encode_popped, in_pieces=True)
DEFERRED_POPPED: Final[ReplyCodec] = _Popped(
    "p", "i64 *n*; value if *n* > 0; deferred", _encode_deferred_popped, in_pieces=True
)
