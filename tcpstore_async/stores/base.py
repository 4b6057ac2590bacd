"""The contract of every synchronous store.

It knows PyTorch's methods, their defaults and guarantees, and which of them can be built on others. It must not know
where keys and values are kept. Invariant: a method means the same on every store.
"""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Final, TypeVar

from ..base.coercion import Text, Timeout, to_bytes, to_bytes_list, to_int64, to_pairs, to_seconds
from ..base.deadline import DEFAULT_TIMEOUT, Deadline
from ..base.keys import BARRIER_LAST, BARRIER_MEMBERS

Self = TypeVar("Self", bound="Store")


class Store:
    """A key-value store shared by the ranks of a job, with the methods of `torch.distributed.Store`.

    Keys and values are bytes, bytearray, or str, which is encoded as UTF-8; values are returned as bytes. A timeout is
    a timedelta or a number of seconds: 0 checks once, a negative one means none. An invalid argument raises TypeError
    or ValueError with the argument's name. Any number of threads may use a store at once.

    A subclass defines `set`, `get`, `add`, `compare_set`, `check`, `wait`, `delete_key`, `num_keys` and `clone`; the
    other methods are built on these, where possible.
    """

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self._timeout = to_seconds("timeout", timeout)

    @property
    def timeout(self) -> timedelta:
        """The timeout of calls that have no timeout of their own."""
        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: Timeout) -> None:
        """Change the timeout of later calls."""
        self._timeout = to_seconds("timeout", timeout)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release what the store holds: connections, files, its server. May be called again."""

    def set(self, key: Text, value: Text) -> None:
        """Store a value."""
        raise NotImplementedError

    def get(self, key: Text) -> bytes:
        """Return the value as soon as the key exists. Raises StoreTimeoutError, which is a DistStoreError."""
        raise NotImplementedError

    def add(self, key: Text, amount: int) -> int:
        """Add to a counter, which starts at 0, and return the sum. A value that is not a number is an error."""
        raise NotImplementedError

    def compare_set(self, key: Text, expected: Text, desired: Text) -> bytes:
        """Set `desired` if the value is `expected`, and return the value afterwards. A missing key counts as empty.

        If the key is missing and `expected` is not empty, nothing is set and `expected` is returned, as in PyTorch.
        """
        raise NotImplementedError

    def check(self, keys: Iterable[Text]) -> bool:
        """Return whether all keys exist. A queue exists while it holds items."""
        raise NotImplementedError

    def wait(self, keys: Iterable[Text], timeout: Timeout | None = None) -> None:
        """Block until all keys exist. The timeout defaults to the store's. Raises StoreTimeoutError."""
        raise NotImplementedError

    def delete_key(self, key: Text) -> bool:
        """Remove a key; return whether it existed."""
        raise NotImplementedError

    def num_keys(self) -> int:
        """Return the number of keys, including those that PyTorch keeps for itself, as in PyTorch."""
        raise NotImplementedError

    def list_keys(self) -> list[str]:
        """Return all keys, unordered. Raises UnicodeDecodeError if one is not UTF-8."""
        raise NotImplementedError("this store cannot list its keys")

    def _list_keys_as_bytes(self) -> list[bytes]:
        """Return all keys as bytes, so that a key that is not UTF-8 fails no view without it."""
        return [name.encode() for name in self.list_keys()]

    def append(self, key: Text, value: Text) -> None:
        """Append to a value; a missing key counts as empty."""
        more = to_bytes("value", value)
        old = self.get(key) if self.check([key]) else b""
        while (found := self.compare_set(key, old, old + more)) != old + more:
            old = found

    def multi_get(self, keys: Iterable[Text]) -> list[bytes]:
        """Return the values as soon as all keys exist. Raises StoreTimeoutError."""
        return [self.get(key) for key in to_bytes_list("keys", keys)]

    def multi_set(self, keys: Iterable[Text], values: Iterable[Text]) -> None:
        """Set all keys. Raises DistStoreError if the numbers of keys and values differ."""
        for key, value in to_pairs(to_bytes_list("keys", keys), to_bytes_list("values", values)):
            self.set(key, value)

    def queue_push(self, key: Text, value: Text) -> None:
        """Append an item to a queue; one caller will get it."""
        raise NotImplementedError(NO_QUEUES)

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        """Take the oldest item of a queue; with `block`, as soon as there is one.

        Raises StoreTimeoutError, and QueueEmptyError without `block` or if the key holds a plain value.
        """
        raise NotImplementedError(NO_QUEUES)

    def queue_len(self, key: Text) -> int:
        """Return the number of items in a queue, 0 if there is none."""
        raise NotImplementedError(NO_QUEUES)

    def barrier(self, key: Text, world_size: int, timeout: Timeout | None = None) -> None:
        """Block until `world_size` calls have arrived at this key. It is never reset: use a new key for every round.

        Raises StoreTimeoutError; a call that times out stays counted.
        """
        # As in PyTorch's base class, two keys named after `key`; stores with a better way override this.
        name = to_bytes("key", key)
        size = to_int64("world_size", world_size)
        limit = self.timeout if timeout is None else timedelta(seconds=to_seconds("timeout", timeout))
        last = name + BARRIER_LAST
        if self.add(name + BARRIER_MEMBERS, 1) >= size:
            self.set(last, b"1")
        self.wait([last], limit)

    def has_extended_api(self) -> bool:
        """Return whether `append`, `multi_get` and `multi_set` are single operations."""
        return False

    def clone(self) -> "Store":
        """Return another store on the same keys, which is closed separately."""
        raise NotImplementedError

    def _absent(self, keys: Sequence[Text], deadline: Deadline) -> tuple[list[int], bool]:
        """Return the indices of missing keys, and whether all keys were checked before the deadline.

        This bisects with one `check` for each part; stores with a better way override it.
        """
        absent: list[int] = []
        spans = [(0, len(keys))] if keys else []
        while spans and not deadline.passed():
            start, stop = spans.pop()
            if self.check(keys[start:stop]):
                continue
            if stop - start == 1:
                absent.append(start)
                continue
            middle = (start + stop) // 2
            spans += [(middle, stop), (start, middle)]
        return absent, not spans


NO_QUEUES: Final = "queue support is not implemented."
