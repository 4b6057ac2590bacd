"""The shapes of requests and replies: each one a pair of decode and encode, used by both ends.

Knows: how fields lie in bytes, little-endian, and the limits on lengths. Must not know: opcodes, what a request means,
where bytes come from.
Invariant: a length is checked against its limit as soon as it is read, before the bytes it announces; nothing is
decoded twice but the one or two lengths of a frame whose rest was still under way.
"""

from collections.abc import Callable
from struct import Struct
from typing import Any, Final

from librt.strings import read_i64_le

from ..errors import LimitError, ProtocolError
from ..limits import Limits
from ..values import NO_BLOB, PREFIX, Framed, pack
from .buffers import resize_uninitialized

Fields = tuple[Any, ...]
Handler = Callable[..., Any]
"""What is to be done with the fields of a request."""

_U32: Final = Struct("<I")
_I64: Final = Struct("<q")
_U64: Final = Struct("<Q")
_ONE_KEY: Final = Struct("<QQ")
"""How many keys, and how long the first is."""
_read_u32: Final = _U32.unpack_from

LARGE_VALUE_BYTES: Final = 64 * 1024
"""Length from which an unfinished value is received into the buffer in which it will be stored."""

_FIRST_BUFFER: Final = 4 * 1024
"""What a bulk value is given before more of it has arrived, in bytes; later three times what has."""

ITEM_BYTES: Final = 64
"""What holds one key of an unfinished list is counted as this many bytes."""

_PAIR_BYTES: Final = 160
"""What holds a key and a value."""


class PartialRequest:
    """What is still to come of a frame whose beginning has been decoded."""

    at: int
    """Where, in the data last decoded, the bytes begin that were not used up."""

    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        """As `Request.decode`, going on where the frame was left."""
        raise NotImplementedError

    def held(self) -> int:
        """Bytes kept for the frame so far."""
        raise NotImplementedError


class RequestCodec:
    """The shape of a request's fields, those behind the opcode."""

    arity: int = 1
    """How many fields there are."""

    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        """Decode the fields that start at `at` in data[:end], and give them to `call`.

        Returns its result and where the fields stop. While they are not all there: None, or the `Rest` that has to go
        on, and minus the length that `data` must have before that can do anything. Raises LimitError. (Handing the
        fields on from here, not through a tuple, is worth 0.15 µs a command in plain Python.)
        """
        raise NotImplementedError

    def encode(self, fields: Fields) -> bytes:
        """The bytes of the fields."""
        raise NotImplementedError


class _Nothing(RequestCodec):
    def __init__(self) -> None:
        self.arity = 0

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


def _key_stop(data: bytes, at: int, end: int, limits: Limits) -> int:
    """Where the key at `at` stops, or minus the length that must be there to go on. Raises LimitError."""
    start = at + 8
    if start > end:
        return -start
    length: int = read_i64_le(data, at)
    if length < 0 or length > limits.key_bytes:
        raise LimitError("key_bytes", _unsigned(length), limits.key_bytes)
    stop = start + length
    return stop if stop <= end else -stop


def _value_stop(data: bytes, at: int, end: int, limits: Limits) -> int:
    """As `_key_stop`, for a value."""
    start = at + 8
    if start > end:
        return -start
    length: int = read_i64_le(data, at)
    if length < 0 or length > limits.value_bytes:
        raise LimitError("value_bytes", _unsigned(length), limits.value_bytes)
    stop = start + length
    return stop if stop <= end else -stop


class _Key(RequestCodec):
    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        start = at + 8
        if start <= end:
            stop = start + read_i64_le(data, at)
            if start <= stop <= end and stop - start <= limits.key_bytes:
                return call(data[start:stop]), stop
        return None, _key_stop(data, at, end, limits)

    def encode(self, fields: Fields) -> bytes:
        return pack(fields[0])


class _KeyI64(RequestCodec):
    def __init__(self) -> None:
        self.arity = 2

    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        start = at + 8
        if start <= end:
            middle = start + read_i64_le(data, at)
            if start <= middle <= end - 8 and middle - start <= limits.key_bytes:
                return call(data[start:middle], read_i64_le(data, middle)), middle + 8
        middle = _key_stop(data, at, end, limits)
        return None, middle if middle < 0 else -(middle + 8)

    def encode(self, fields: Fields) -> bytes:
        return pack(fields[0]) + _I64.pack(fields[1])


class _KeyValues(RequestCodec):
    """A key and one or more values."""

    def __init__(self, values: int, bulk: bool) -> None:
        self.arity = 1 + values
        self.values = values
        self.bulk = bulk
        """Whether a large last value may be received as a `Bulk`."""

    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        start = _key_stop(data, at, end, limits)
        if start < 0:
            return None, start
        fields: list[Any] = [data[at + 8 : start]]
        for left in range(self.values, 0, -1):
            stop = _value_stop(data, start, end, limits)
            if stop < 0:
                if self.bulk and left == 1 and -stop - start >= LARGE_VALUE_BYTES:
                    return LargeValue(fields, -stop - start, data, start, end), -(end + 1)
                return None, stop
            fields.append(data[start:stop])
            start = stop
        return call(*fields), start

    def encode(self, fields: Fields) -> bytes:
        return pack(fields[0]) + b"".join(fields[1:])


class _KeyValue(_KeyValues):
    """A key and one value, with a fast path for a frame that is all there."""

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


class LargeValue(PartialRequest):
    """A large last value, received straight into the buffer that will be stored.

    The buffer grows as bytes arrive: an announcement alone must not cost memory.
    """

    def __init__(self, fields: list[Any], size: int, data: bytes, start: int, end: int) -> None:
        self.fields = fields
        self.size = size
        self.filled = 0
        self.buffer = bytearray(min(size, _FIRST_BUFFER))
        self.at = self._take(data, start, end)

    def room(self) -> memoryview:
        """The part of the buffer to be filled next; empty once the value is complete."""
        if self.filled == len(self.buffer) and self.filled < self.size:
            resize_uninitialized(self.buffer, min(self.size, 4 * self.filled))
        return memoryview(self.buffer)[self.filled :]

    def fill(self, count: int) -> None:
        """`count` bytes have been put into `room()`."""
        self.filled += count

    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        self.at = self._take(data, at, end)
        if self.filled < self.size:
            return self, -(end + 1)
        return call(*self.fields, self.buffer), self.at

    def held(self) -> int:
        return self.filled + sum(map(len, self.fields))

    def _take(self, data: bytes, at: int, end: int) -> int:
        while at < end and self.filled < self.size:
            with self.room() as room:
                count = min(end - at, len(room))
                room[:count] = data[at : at + count]
            self.filled += count
            at += count
        return at


def _alone(key: bytes) -> bytes:
    return key


def _pair(key: bytes, value: Framed) -> tuple[bytes, Framed]:
    hash(key)  # while its turn lasts: those of all keys together would hold everybody up
    return key, value


class _CountedList(RequestCodec):
    """A count and as many items."""

    def __init__(self, item: RequestCodec, pick: Handler) -> None:
        self.item = item
        self.pick = pick
        """Makes an item of the list from its fields."""

    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        start = at + 8
        if start > end:
            return None, -start
        count: int = read_i64_le(data, at)
        if count < 0 or count > limits.keys:
            raise LimitError("keys", _unsigned(count), limits.keys)
        if count == 1 and self.item is KEY and start + 8 <= end:
            stop = start + 8 + read_i64_le(data, start)
            if start + 8 <= stop <= end and stop - start - 8 <= limits.key_bytes:
                return call([data[start + 8 : stop]]), stop
        items: list[Any] = []
        stop = _take_keys(items, count, data, start, end, limits) if self.item is KEY else start
        if len(items) == count and stop - at <= limits.request_bytes:
            return call(items), stop
        return _PartialList(self, count, items, stop - at).decode(call, data, stop, end, limits)

    def encode(self, fields: Fields) -> bytes:
        items: list[Any] = fields[0]
        if len(items) == 1 and self.item is KEY:
            key: bytes = items[0]
            return _ONE_KEY.pack(1, len(key)) + key
        encoded = [self.item.encode(item if isinstance(item, tuple) else (item,)) for item in items]
        return _U64.pack(len(items)) + b"".join(encoded)


def _take_keys(items: list[Any], count: int, data: bytes, at: int, end: int, limits: Limits) -> int:
    """Append the keys that are here, until `items` holds `count`; where they stop.

    A loop of its own, without a call for every key, halves a MULTI_GET of 1,000 keys.
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


class _PartialList(PartialRequest):
    """The items of a counted list that have arrived so far."""

    def __init__(self, shape: _CountedList, count: int, items: list[Any], size: int) -> None:
        self.shape = shape
        self.count = count
        self.items = items
        self.size = size
        self.at = 0

    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        item = self.shape.item
        items = self.items
        start = at
        if item is KEY:
            at = _take_keys(items, self.count, data, at, end, limits)
        need = 0
        while len(items) < self.count:
            field, stop = item.decode(self.shape.pick, data, at, end, limits)
            if stop < 0:
                need = -stop
                break
            items.append(field)
            at = stop
        self.at = at
        self.size += at - start
        size = self.size + max(0, need - at)
        if size > limits.request_bytes:
            raise LimitError("request_bytes", size, limits.request_bytes)
        return (self, -need) if need else (call(items), at)

    def held(self) -> int:
        return self.size + (ITEM_BYTES if self.shape.item is KEY else _PAIR_BYTES) * len(self.items)


class ReplyCodec:
    """The shape of a reply."""

    encode: Callable[[Any], Any] | None
    """From a result to the reply's bytes, or its pieces; None if the result is that already, or says nothing."""

    in_pieces: bool = False
    """Whether the reply is a list of pieces, so that values need no copy."""

    measure: Callable[[Any], int] | None = None
    """For a reply that is built from what may be much larger than its request: its length in bytes."""

    def decode(self, data: bytes, at: int, end: int, count: int) -> tuple[Any, int]:
        """Decode the reply that starts at `at` in data[:end]; `count` is the number of keys that were asked for.

        Returns the result and where it stops. While it is not all there: None, or the `RestOfReply` that has to go on,
        and minus the length that `data` must have before that can do anything. Raises ProtocolError for a reply that
        cannot be true.
        """
        raise NotImplementedError


class PartialReply:
    """What is still to come of a reply of several items."""

    def __init__(self, count: int, items: list[Framed], bare: bool) -> None:
        self.count = count
        self.items = items
        self.bare = bare
        """Whether an item is kept without its length, as keys are."""
        self.at = 0
        """Where, in the data last decoded, the bytes begin that were not used up."""

    def decode(self, data: bytes, at: int, end: int) -> tuple[Any, int]:
        """As `Reply.decode`, going on where the reply was left."""
        items = self.items
        skip = PREFIX if self.bare else 0
        while len(items) < self.count:
            stop = _blob_stop(data, at, end)
            if stop < 0:
                self.at = at
                return self, stop
            items.append(data[at + skip : stop])
            at = stop
        return items, at


MAX_REPLY_ITEM: Final = 2**40
"""No value is so long, in bytes, and no store holds so many keys: a reply that says so is not one."""


class _NoReply(ReplyCodec):
    def __init__(self) -> None:
        self.encode = None

    def decode(self, data: bytes, at: int, end: int, count: int) -> tuple[Any, int]:
        return None, at


class _Echo(ReplyCodec):
    def __init__(self) -> None:
        self.encode = _U32.pack

    def decode(self, data: bytes, at: int, end: int, count: int) -> tuple[Any, int]:
        stop = at + 4
        if stop > end:
            return None, -stop
        return _read_u32(data, at)[0], stop


class _Number(ReplyCodec):
    def __init__(self) -> None:
        self.encode = _I64.pack

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
    """One byte: `yes` for a true result, `no` for a false one; if `no` is None a false one says nothing."""

    def __init__(self, yes: int, no: int | None, complaint: str) -> None:
        self.yes = yes
        self.no = no
        self.complaint = complaint
        """What PyTorch's client says of any other byte."""
        self.encode = (b"" if no is None else bytes([no]), bytes([yes])).__getitem__

    def decode(self, data: bytes, at: int, end: int, count: int) -> tuple[Any, int]:
        if at == end:
            return None, -(at + 1)
        byte = data[at]
        if byte != self.yes and byte != self.no:
            raise ProtocolError(self.complaint)
        return byte == self.yes, at + 1


def _blob_stop(data: bytes, at: int, end: int) -> int:
    start = at + 8
    if start > end:
        return -start
    length: int = read_i64_le(data, at)
    if not 0 <= length < MAX_REPLY_ITEM:
        raise ProtocolError(f"a reply announces {_unsigned(length)} bytes")
    stop = start + length
    return stop if stop <= end else -stop


class _Blob(ReplyCodec):
    def __init__(self) -> None:
        self.encode = None

    def decode(self, data: bytes, at: int, end: int, count: int) -> tuple[Any, int]:
        stop = _blob_stop(data, at, end)
        if stop < 0:
            return None, stop
        return data[at:stop], stop


class _NoValue(ReplyCodec):
    """What ends a FETCH without a value: a length that no value has."""

    def __init__(self) -> None:
        self.encode = None

    def decode(self, data: bytes, at: int, end: int, count: int) -> tuple[Any, int]:
        stop = at + PREFIX
        if stop > end:
            return None, -stop
        if data[at:stop] != NO_BLOB:
            raise ProtocolError("the answer to a canceled FETCH is expected")
        return NO_BLOB, stop


class _Blobs(ReplyCodec):
    """Values, as many as keys were asked for."""

    def __init__(self) -> None:
        self.encode = None
        self.in_pieces = True

    def decode(self, data: bytes, at: int, end: int, count: int) -> tuple[Any, int]:
        return PartialReply(count, [], bare=False).decode(data, at, end)


class _CountedKeys(ReplyCodec):
    """A count and as many keys."""

    def __init__(self) -> None:
        self.encode = _encode_keys
        self.measure = _measure_keys

    def decode(self, data: bytes, at: int, end: int, count: int) -> tuple[Any, int]:
        start = at + 8
        if start > end:
            return None, -start
        number: int = read_i64_le(data, at)
        if not 0 <= number < MAX_REPLY_ITEM:
            raise ProtocolError(f"a reply announces {_unsigned(number)} keys")
        return PartialReply(number, [], bare=True).decode(data, start, end)


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

    def __init__(self, encode: Callable[[Any], Any]) -> None:
        self.encode = encode
        self.in_pieces = True

    def decode(self, data: bytes, at: int, end: int, count: int) -> tuple[Any, int]:
        start = at + 8
        if start > end:
            return None, -start
        length: int = read_i64_le(data, at)
        if length <= 0:
            return (length, None), start
        stop = _blob_stop(data, start, end)
        if stop < 0:
            return None, stop
        return (length, data[start:stop]), stop


def encode_popped(popped: tuple[int, Framed | None]) -> list[Framed]:
    length, item = popped
    return [_I64.pack(length)] if item is None else [_I64.pack(length), item]


def _encode_popped_later(popped: tuple[int, Framed | None] | None) -> list[Framed]:
    return [] if popped is None else encode_popped(popped)


NOTHING: Final[RequestCodec] = _Nothing()
U32: Final[RequestCodec] = _U32Field()
I64: Final[RequestCodec] = _I64Field()
KEY: Final[RequestCodec] = _Key()
KEY_I64: Final[RequestCodec] = _KeyI64()
KEY_VALUE: Final[RequestCodec] = _KeyValue(1, bulk=True)
KEY_VALUE_VALUE: Final[RequestCodec] = _KeyValues(2, bulk=True)
KEYS: Final[RequestCodec] = _CountedList(KEY, _alone)
ITEMS: Final[RequestCodec] = _CountedList(_KeyValue(1, bulk=False), _pair)

NO_REPLY: Final[ReplyCodec] = _NoReply()
ECHO: Final[ReplyCodec] = _Echo()
NUMBER: Final[ReplyCodec] = _Number()
PRESENCE: Final[ReplyCodec] = _Byte(READY, NOT_READY, "ready or not_ready response expected")
WAKE: Final[ReplyCodec] = _Byte(STOP_WAITING, None, "Stop_waiting response is expected")
CANCELED: Final[ReplyCodec] = _Byte(WAIT_CANCELED, None, "wait_canceled response is expected")
BLOB: Final[ReplyCodec] = _Blob()
DEFERRED_VALUE: Final[ReplyCodec] = _Blob()
"""As BLOB, but perhaps later."""
NO_VALUE: Final[ReplyCodec] = _NoValue()
BLOBS: Final[ReplyCodec] = _Blobs()
COUNTED_KEYS: Final[ReplyCodec] = _CountedKeys()
POPPED: Final[ReplyCodec] = _Popped(encode_popped)
POPPED_LATER: Final[ReplyCodec] = _Popped(_encode_popped_later)
"""As POPPED, but perhaps later."""
