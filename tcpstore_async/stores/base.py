"""The contract of every synchronous store.

Knows: PyTorch's methods, their defaults, what they promise, and which of them follow from others. Must not know: where
keys and values are kept.
Invariant: a method means the same on every store.
"""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Final, TypeVar

from ..client.requests import BARRIER_LAST, BARRIER_MEMBERS
from ..coercion import Text, Timeout, to_bytes, to_bytes_list, to_int64, to_pairs, to_seconds
from ..deadline import DEFAULT_TIMEOUT, Deadline

Self = TypeVar("Self", bound="Store")


class Store:
    """A key-value store that the ranks of a job share. The methods are those of `torch.distributed.Store`.

    Keys and values are str, which is taken as UTF-8, bytes or bytearray; values come back as bytes. A timeout is a
    timedelta or a number of seconds: 0 means one look, a negative one for ever. Arguments of the wrong kind raise
    TypeError or ValueError naming the argument. A store may be used by any number of threads at once.

    A store of one's own inherits from this and defines `set`, `get`, `add`, `compare_set`, `check`, `wait`,
    `delete_key`, `num_keys` and `clone`; the rest works by these, as far as it can.
    """

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self._timeout = to_seconds("timeout", timeout)

    @property
    def timeout(self) -> timedelta:
        """How long a call may take that is given no timeout of its own."""
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
        """Give back what the store holds: connections, files, its server. May be called again."""

    def set(self, key: Text, value: Text) -> None:
        """Store a value."""
        raise NotImplementedError

    def get(self, key: Text) -> bytes:
        """The value, as soon as there is one. Raises StoreTimeoutError, a DistStoreError."""
        raise NotImplementedError

    def add(self, key: Text, amount: int) -> int:
        """Add to a counter, 0 if it is missing, and return the sum."""
        raise NotImplementedError

    def compare_set(self, key: Text, expected: Text, desired: Text) -> bytes:
        """Set `desired` if the value is `expected`, a missing key being empty; the value afterwards.

        For a missing key that was expected to hold something, `expected` is returned and nothing set, as in PyTorch.
        """
        raise NotImplementedError

    def check(self, keys: Iterable[Text]) -> bool:
        """Whether all keys are there, a queue that holds items included."""
        raise NotImplementedError

    def wait(self, keys: Iterable[Text], timeout: Timeout | None = None) -> None:
        """Until all keys are there. The timeout is the store's unless given. Raises StoreTimeoutError."""
        raise NotImplementedError

    def delete_key(self, key: Text) -> bool:
        """Remove a key; whether it was there."""
        raise NotImplementedError

    def num_keys(self) -> int:
        """How many keys there are, those included that PyTorch keeps for itself, as in PyTorch."""
        raise NotImplementedError

    def list_keys(self) -> list[str]:
        """The names of all keys, in no order. Raises UnicodeDecodeError for a name that is not UTF-8."""
        raise NotImplementedError("this store cannot list its keys")

    def _list_keys_as_bytes(self) -> list[bytes]:
        """The same, whatever bytes they are: one that is no text must not spoil the list of a view without it."""
        return [name.encode() for name in self.list_keys()]

    def append(self, key: Text, value: Text) -> None:
        """Append to a value; a missing one is empty."""
        more = to_bytes("value", value)
        old = self.get(key) if self.check([key]) else b""
        while (found := self.compare_set(key, old, old + more)) != old + more:
            old = found

    def multi_get(self, keys: Iterable[Text]) -> list[bytes]:
        """The values, as soon as all are there. Raises StoreTimeoutError."""
        return [self.get(key) for key in to_bytes_list("keys", keys)]

    def multi_set(self, keys: Iterable[Text], values: Iterable[Text]) -> None:
        """Set all. Raises DistStoreError if there are not as many values as keys."""
        for key, value in to_pairs(to_bytes_list("keys", keys), to_bytes_list("values", values)):
            self.set(key, value)

    def queue_push(self, key: Text, value: Text) -> None:
        """Append an item to a queue."""
        raise NotImplementedError(NO_QUEUES)

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        """Take the oldest item of a queue; with `block`, as soon as there is one.

        Raises StoreTimeoutError; QueueEmptyError without `block`, or if a plain value of that name is there instead.
        """
        raise NotImplementedError(NO_QUEUES)

    def queue_len(self, key: Text) -> int:
        """How many items a queue holds, 0 if there is none of that name."""
        raise NotImplementedError(NO_QUEUES)

    def barrier(self, key: Text, world_size: int, timeout: Timeout | None = None) -> None:
        """Until `world_size` callers have arrived at this key. It is never reset: use a new key for every round.

        Raises StoreTimeoutError; whoever has arrived stays counted. Done as in PyTorch's base class, by two keys beside
        `key`, unless the store has something better.
        """
        name = to_bytes("key", key)
        size = to_int64("world_size", world_size)
        limit = self.timeout if timeout is None else timedelta(seconds=to_seconds("timeout", timeout))
        last = name + BARRIER_LAST
        if self.add(name + BARRIER_MEMBERS, 1) >= size:
            self.set(last, b"1")
        self.wait([last], limit)

    def has_extended_api(self) -> bool:
        """Whether `append`, `multi_get` and `multi_set` are single operations."""
        return False

    def clone(self) -> "Store":
        """Another store on the same keys, to be closed by itself."""
        raise NotImplementedError

    def _absent(self, keys: Sequence[Text], deadline: Deadline) -> tuple[list[int], bool]:
        """The places of those keys that are not there, and whether all were looked at before the deadline.

        By halves, of which one `check` says that they are whole, unless the store has something better.
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

    # For those who inherit

    def _seconds(self, timeout: Timeout | None) -> float:
        """The timeout of one call, in seconds."""
        return self._timeout if timeout is None else to_seconds("timeout", timeout)


NO_QUEUES: Final = "queue support is not implemented."
