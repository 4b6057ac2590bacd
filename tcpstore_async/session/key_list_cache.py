"""Recognizes lists of keys that many peers send alike, so that each is decoded once.

A `SharedKeys` codec compares the bytes of a request with those of a known list instead of decoding them, and passes the
`KeyList` on. This module knows bytes and what a list counts in the budget; what is kept for a list is known to
`keyspace/shared_requests.py`.

Invariants: what is executed does not depend on how bytes are cut into chunks, nor on what lists are known. Of a frame
that equals a known list so far, no byte is kept. A frame is never kept waiting for the length of a known list. The
lists of all stores never count more than `capacity`, and one with which an incomplete frame is being compared stays.
"""

from typing import Any, Final

from ..base.limits import MIB, Limits
from ..base.mypyc_shim import mypyc_attr
from ..keyspace.keyspace import Keyspace
from ..keyspace.waiter_types import KeyList
from ..wire.codecs import KEY, CountedList, Handler, PartialList, PartialRequest, alone, key_stop, take_keys
from ..wire.values import PREFIX
from .budget import Budget

FEWEST: Final = 4
"""Keys from which on a list is shared. Looking for a shorter one saves nothing."""

_LONGEST: Final = 256 * 1024
"""Bytes of a list above which it is not kept."""

_CAPACITY: Final = 8 * MIB
_SHARE: Final = 64
"""At most 1/64 of the budget is for lists, and 1/8 of that for one reply."""

_LIST_BYTES: Final = 640
"""Bytes counted for a list, besides its contents and `_KEY_BYTES` for each key."""

_KEY_BYTES: Final = 160

_CUT_BYTES: Final = 128
"""Bytes counted for a frame of which a part has arrived and equals a known list."""


class KeyListCache:
    """The lists that are known, oldest first."""

    def __init__(self, keyspace: Keyspace, budget: Budget, most: int) -> None:
        self.keyspace = keyspace
        self.budget = budget
        self.most = most
        """Keys up to which a list is shared."""
        self.capacity: int = min(_CAPACITY, budget.limit // _SHARE)
        self.lists: dict[bytes, KeyList] = {}
        """By count and first key, as they are sent: one list for each."""
        self.size: int = 0
        """Bytes counted for the lists and the replies that are kept for them. `Budget.lists` is that of all stores."""
        keyspace.max_kept_reply = self.capacity // 8

    def add(self, raw: bytes, keys: list[bytes]) -> KeyList:
        """Return the list of these keys, and remember it if it fits."""
        first = raw[: 2 * PREFIX + len(keys[0])]
        known = self.lists.get(first)
        if known is not None:
            if known.raw == raw:
                return known
            if known.compared:
                return KeyList(raw, keys)
            self._remove(first, known)
        listed = KeyList(raw, keys)
        size = _LIST_BYTES + 3 * len(raw) + _KEY_BYTES * len(keys)
        if len(raw) <= _LONGEST and self._make_room(size):
            listed.size = size
            self.lists[first] = listed
            self._charge(size)
        return listed

    def count_reply(self, listed: KeyList) -> None:
        """Count a reply that is to be kept, or drop it if it does not fit.

        Its bytes stay counted while the list is kept: the next reply will need them.
        """
        growth = listed.longest_reply - listed.counted_reply
        if self._make_room(growth, listed):
            listed.counted_reply = listed.longest_reply
            listed.size += growth
            self._charge(growth)
        else:
            listed.longest_reply = listed.counted_reply
            listed.reply = None

    def _make_room(self, size: int, spared: KeyList | None = None) -> bool:
        """Forget the oldest lists until `size` bytes fit, which must not be more than half. False if they do not."""
        if size > self.capacity // 2:
            return False
        budget = self.budget
        if budget.lists + size > self.capacity:
            for first, listed in list(self.lists.items()):
                if listed is not spared and not listed.compared:
                    self._remove(first, listed)
                    if budget.lists + size <= self.capacity:
                        return True
        return budget.lists + size <= self.capacity

    def _remove(self, first: bytes, listed: KeyList) -> None:
        del self.lists[first]
        self.keyspace.untrack(listed)
        self._charge(-listed.size)

    def _charge(self, growth: int) -> None:
        self.size += growth
        self.budget.lists += growth
        self.budget.charge(growth)

    def release(self) -> None:
        """Stop counting the lists: the store has ended."""
        self._charge(-self.size)


class SharedKeys(CountedList):
    """The codec of a request that names keys. Lists of several keys are looked for among the known ones."""

    def __init__(self, cache: KeyListCache, call: Handler) -> None:
        super().__init__("l", KEY, alone)
        self.cache = cache
        self.call = call
        """Executes the command for a `KeyList`."""

    def decode_items(
        self, call: Handler, count: int, data: bytes, at: int, end: int, limits: Limits
    ) -> tuple[Any, int]:
        cache = self.cache
        if count < FEWEST or count > cache.most:
            return super().decode_items(call, count, data, at, end, limits)
        first = key_stop(data, at + PREFIX, end, limits)
        if first < 0:
            return None, first
        known = cache.lists.get(data[at:first])
        if known is not None:
            raw = known.raw
            stop = at + len(raw)
            if stop <= end:
                if data.startswith(raw, at):
                    return self.execute(known), stop
            elif raw.startswith(data[at:end]):
                return EqualSoFar(self, known, end - at, end), -(end + 1)
        keys: list[bytes] = []
        stop = take_keys(keys, count, data, at + PREFIX, end, limits)
        if len(keys) == count and stop - at <= limits.request_bytes and stop - at <= limits.request_key_bytes:
            return self.execute(cache.add(data[at:stop], keys)), stop
        return PartialKeys(self, count, keys, stop - at).decode(call, data, stop, end, limits)

    def execute(self, listed: KeyList) -> Any:
        result = self.call(listed)
        if listed.longest_reply > listed.counted_reply:
            self.cache.count_reply(listed)
        return result

    def execute_decoded(self, keys: list[bytes]) -> Any:
        """Execute the command for a list that was decoded key by key."""
        return self.execute(self.cache.add(self.encode((keys,)), keys))


@mypyc_attr(allow_interpreted_subclasses=True)
class PartialKeys(PartialList):
    """A list of keys of which a part has arrived that does not equal a known list."""

    def __init__(self, codec: SharedKeys, count: int, keys: list[bytes], size: int) -> None:
        super().__init__(codec, count, keys, size)
        self.shared = codec

    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        return super().decode(self.shared.execute_decoded, data, at, end, limits)


_NO_ITEMS: Final[list[Any]] = []


@mypyc_attr(allow_interpreted_subclasses=True)
class EqualSoFar(PartialRequest):
    """A list of keys of which a part has arrived that equals the start of a known list."""

    def __init__(self, codec: SharedKeys, known: KeyList, size: int, at: int) -> None:
        self.items = _NO_ITEMS
        self.at = at
        self.codec = codec
        self.known: KeyList | None = known
        self.size = size
        """Bytes that have arrived, the count included."""
        known.compared += 1

    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        known = self.known
        assert known is not None
        rest = len(known.raw) - self.size
        stop = min(at + rest, end)
        piece = data if stop - at == len(data) else data[at:stop]
        if not known.raw.startswith(piece, self.size):
            self.abandon()
            return self._decode(known, call, data, at, end, limits)
        if stop - at == rest:
            self.abandon()
            return self.codec.execute(known), stop
        self.size += stop - at
        self.at = end
        return self, -(end + 1)

    def _decode(self, known: KeyList, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        """Decode what has arrived so far, and continue without the known list."""
        keys: list[bytes] = []
        count = len(known.keys)
        cut = take_keys(keys, count, known.raw, PREFIX, self.size, limits)
        before = known.raw[cut : self.size]
        partial = PartialKeys(self.codec, count, keys, cut)
        result, stop = partial.decode(call, before + data[at:end], 0, len(before) + end - at, limits)
        shift = at - len(before)  # from the joined bytes to `data`
        if stop >= 0:
            return result, stop + shift
        partial.at += shift
        if partial.at < at:  # the key that was cut is not complete yet
            partial.at = at
            partial.before = before
        return partial, stop - shift

    def held(self) -> int:
        return _CUT_BYTES

    def abandon(self) -> None:
        """Stop comparing. Idempotent."""
        known = self.known
        if known is not None:
            known.compared -= 1
            self.known = None
