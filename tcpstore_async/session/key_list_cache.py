"""Recognizes lists of keys that many peers send alike, so that each is decoded once.

A `SharedKeys` codec compares the bytes of a request with those of a known list instead of decoding them, and passes the
`KeyList` on. This module knows bytes and what a list counts in the budget; what is kept for a list is known to
`shared_requests.py`.

Invariants: what is executed does not depend on how bytes are cut into chunks, nor on what lists are known. A frame that
equals a known list so far holds only its last, incomplete key. A frame is never kept waiting for the length of a known
list. The lists of all stores never count more than `capacity`, and one with which an incomplete frame is being compared
stays.
"""

from bisect import bisect_right
from itertools import accumulate
from typing import Any, Final

from ..errors import LimitError
from ..keyspace import Keyspace
from ..limits import MIB, Limits
from ..values import PREFIX
from ..waiter_types import KeyList
from ..wire.codecs import KEY, KEYS, CountedList, Handler, PartialList, alone, key_stop, take_keys
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

        Its bytes stay counted as long as the list, for the next reply.
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
        """Count the lists no more: the store has ended."""
        self._charge(-self.size)


class SharedKeys(CountedList):
    """The codec of a request that names keys. Lists of several keys are looked for among the known ones."""

    def __init__(self, cache: KeyListCache, call: Handler) -> None:
        super().__init__(KEY, KEYS.layout, alone)
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
            stop = at + len(known.raw)
            if stop <= end and data.startswith(known.raw, at):
                return self.execute(known), stop
            return _PartialKeys(self, count, known, first - at).decode(call, data, first, end, limits)
        keys: list[bytes] = []
        stop = take_keys(keys, count, data, at + PREFIX, end, limits)
        if len(keys) == count and stop - at <= limits.request_bytes:
            return self.execute(cache.add(data[at:stop], keys)), stop
        partial = _PartialKeys(self, count, None, stop - at)
        partial.items = keys
        return partial.decode(call, data, stop, end, limits)

    def execute(self, listed: KeyList) -> Any:
        result = self.call(listed)
        if listed.longest_reply > listed.counted_reply:
            self.cache.count_reply(listed)
        return result

    def execute_decoded(self, keys: list[bytes]) -> Any:
        """Execute the command for a list that was decoded key by key."""
        return self.execute(self.cache.add(self.encode((keys,)), keys))


class _PartialKeys(PartialList):
    """A list of keys of which a part has arrived. Nothing of it is kept while it equals a known list."""

    def __init__(self, codec: SharedKeys, count: int, known: KeyList | None, size: int) -> None:
        super().__init__(codec, count, [], size)
        self.shared = codec
        self.known = known
        """The list whose first `matched` keys, with the count `size` bytes, have arrived."""
        self.matched: int = 1
        self.comparing = False
        """Whether it counts as one of the frames that are compared with the known list."""

    def decode(self, call: Handler, data: bytes, at: int, end: int, limits: Limits) -> tuple[Any, int]:
        known = self.known
        if known is not None:
            size = len(known.raw) - self.size
            if end - at >= size and data.startswith(known.piece(self.size, len(known.raw)), at):
                self.abandon()
                return self.shared.execute(known), at + size
            at = self._compare(known, data, at, end)
            need = key_stop(data, at, end, limits)
            if need < 0:
                return self, self._wait(known, at, need, limits)
            self.items = known.keys[: self.matched]
            self.abandon()  # the next key differs
        return super().decode(self.shared.execute_decoded, data, at, end, limits)

    def _compare(self, known: KeyList, data: bytes, at: int, end: int) -> int:
        """Step over the complete keys that are equal, and return where they stop."""
        raw, keys = known.raw, known.keys
        stops = known.stops
        if not stops:
            stops.extend(accumulate([PREFIX + len(key) for key in keys], initial=PREFIX))
            del stops[0]
        start = self.size
        matched = bisect_right(stops, start + end - at, self.matched)
        stop = stops[matched - 1]
        if not data.startswith(known.piece(start, stop), at):  # rare: find out where
            stop = start
            matched = self.matched
            while True:
                following = stop + PREFIX + len(keys[matched])
                if data[at + stop - start : at + following - start] != raw[stop:following]:
                    break
                stop = following
                matched += 1
        self.matched = matched
        self.size = stop
        return at + stop - start

    def _wait(self, known: KeyList, at: int, need: int, limits: Limits) -> int:
        """Keep what is needed to go on; `need` is as `key_stop` returns it."""
        size = self.size - need - at
        if size > limits.request_bytes:
            raise LimitError("request_bytes", size, limits.request_bytes)
        self.at = at
        if not self.comparing:
            self.comparing = True
            known.compared += 1
        return need

    def held(self) -> int:
        return _CUT_BYTES if self.known is not None else super().held()

    def abandon(self) -> None:
        """Stop comparing."""
        if self.known is not None and self.comparing:
            self.known.compared -= 1
        self.known = None
