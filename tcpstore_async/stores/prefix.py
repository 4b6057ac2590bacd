"""PrefixStore: a view of another store, with a prefix before every key.

Invariant: every call becomes one call of the same method of the underlying store, which may have optimized it. Values
are passed on as bytes, as by PyTorch's PrefixStore, because a user-defined store may accept nothing else.
"""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Final

from ..base.coercion import Text, Timeout, to_bytes, to_bytes_list
from ..base.deadline import Deadline
from ..base.keys import decode_keys
from .base import Store


class PrefixStore(Store):
    """A view of another store: key `k` here is `prefix/k` there. A drop-in for `torch.distributed.PrefixStore`.

    The timeout is the underlying store's. `num_keys` counts all of that store's keys, as in PyTorch; `list_keys` lists
    those under the prefix, without it. Closing a view leaves the underlying store open, which may have other users,
    unless the view `owns` it, as a `clone()` does. Raises ValueError if `store` is None.
    """

    def __init__(self, prefix: Text, store: Store, *, owns: bool = False) -> None:
        if store is None:
            raise ValueError("store argument cannot be None")
        if not isinstance(store, Store):
            raise TypeError(f"store must be a tcpstore_async.Store, not {type(store).__name__}")
        self._prefix: Final = prefix if isinstance(prefix, str) else to_bytes("prefix", prefix)
        self._start: Final = to_bytes("prefix", prefix) + b"/"
        self._store: Final = store
        self._owns = owns

    @property
    def underlying_store(self) -> Store:
        """The underlying store."""
        return self._store

    @property
    def _underlying_non_prefix_store(self) -> Store:
        """The innermost store, below all nested views. PyTorch's name."""
        store = self._store
        while isinstance(store, PrefixStore):
            store = store._store
        return store

    @property
    def timeout(self) -> timedelta:
        return self._store.timeout

    def set_timeout(self, timeout: Timeout) -> None:
        self._store.set_timeout(timeout)

    def clone(self) -> "PrefixStore":
        """Return the same view of a clone of the underlying store; closing it closes that clone."""
        return PrefixStore(self._prefix, self._store.clone(), owns=True)

    def close(self) -> None:
        if self._owns:
            self._store.close()

    def __repr__(self) -> str:
        return f"PrefixStore({self._prefix!r}, {self._store!r})"

    # Values

    def set(self, key: Text, value: Text) -> None:
        self._store.set(self._prefixed(key), to_bytes("value", value))

    def get(self, key: Text) -> bytes:
        return self._store.get(self._prefixed(key))

    def add(self, key: Text, amount: int) -> int:
        return self._store.add(self._prefixed(key), amount)

    def compare_set(self, key: Text, expected: Text, desired: Text) -> bytes:
        return self._store.compare_set(
            self._prefixed(key), to_bytes("expected", expected), to_bytes("desired", desired)
        )

    def append(self, key: Text, value: Text) -> None:
        self._store.append(self._prefixed(key), to_bytes("value", value))

    def check(self, keys: Iterable[Text]) -> bool:
        return self._store.check(self._all_prefixed(keys))

    def delete_key(self, key: Text) -> bool:
        return self._store.delete_key(self._prefixed(key))

    def num_keys(self) -> int:
        return self._store.num_keys()

    def list_keys(self) -> list[str]:
        return decode_keys(self._list_keys_as_bytes())

    def _list_keys_as_bytes(self) -> list[bytes]:
        start = self._start
        return [name[len(start) :] for name in self._store._list_keys_as_bytes() if name.startswith(start)]

    def multi_get(self, keys: Iterable[Text]) -> list[bytes]:
        return self._store.multi_get(self._all_prefixed(keys))

    def multi_set(self, keys: Iterable[Text], values: Iterable[Text]) -> None:
        self._store.multi_set(self._all_prefixed(keys), to_bytes_list("values", values))

    def has_extended_api(self) -> bool:
        return self._store.has_extended_api()

    # Queues

    def queue_push(self, key: Text, value: Text) -> None:
        self._store.queue_push(self._prefixed(key), to_bytes("value", value))

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        return self._store.queue_pop(self._prefixed(key), block)

    def queue_len(self, key: Text) -> int:
        return self._store.queue_len(self._prefixed(key))

    # Waiting

    def wait(self, keys: Iterable[Text], timeout: Timeout | None = None) -> None:
        self._store.wait(self._all_prefixed(keys), timeout)

    def barrier(self, key: Text, world_size: int, timeout: Timeout | None = None) -> None:
        self._store.barrier(self._prefixed(key), world_size, timeout)

    def _absent(self, keys: Sequence[Text], deadline: Deadline) -> tuple[list[int], bool]:
        return self._store._absent(self._all_prefixed(keys), deadline)

    # Keys

    def _prefixed(self, key: Text, argument: str = "key") -> Text:
        """Return the underlying store's key: str if prefix and key are str, which a user-defined store may expect."""
        if isinstance(key, str) and isinstance(self._prefix, str):
            to_bytes(argument, key)
            return f"{self._prefix}/{key}"
        return self._start + to_bytes(argument, key)

    def _all_prefixed(self, keys: Iterable[Text]) -> list[Text]:
        if isinstance(keys, (str, bytes, bytearray, dict)) or not isinstance(keys, Iterable):
            to_bytes_list("keys", keys)  # raises TypeError
        return [self._prefixed(key, f"keys[{index}]") for index, key in enumerate(keys)]
