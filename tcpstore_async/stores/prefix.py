"""PrefixStore: a part of another store, under names of its own.

Knows: how a prefix and a key make a key of the other store. Must not know: what the other store does with it.
Invariant: every call becomes one call of the same method of the other store, so that whatever that store does better
than the base class is not lost on the way. Values arrive there as bytes, as from PyTorch's PrefixStore: a store that a
program makes itself may take nothing else.
"""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Final

from ..client.requests import texts_of
from ..coercion import Text, Timeout, to_bytes, to_bytes_list
from ..deadline import Deadline
from .base import Store


class PrefixStore(Store):
    """A view of another store in which every key `k` is the other's `prefix/k`. A drop-in for PyTorch's PrefixStore.

    Timeouts are the other store's. `num_keys` counts all of its keys, as in PyTorch; `list_keys` names those of this
    view, without the prefix. Closing a view leaves the other store open, for that may have other users, unless
    the view `owns` it; a `clone()` does. Raises ValueError if there is no store.
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
        """The store under this one."""
        return self._store

    @property
    def _underlying_non_prefix_store(self) -> Store:
        """The store under this one and all that it goes through; a name of PyTorch's."""
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
        """The same view of a clone of the other store, which it closes when it is closed."""
        return PrefixStore(self._prefix, self._store.clone(), owns=True)

    def close(self) -> None:
        if self._owns:
            self._store.close()

    def __repr__(self) -> str:
        return f"PrefixStore({self._prefix!r}, {self._store!r})"

    # Values

    def set(self, key: Text, value: Text) -> None:
        self._store.set(self._name(key), to_bytes("value", value))

    def get(self, key: Text) -> bytes:
        return self._store.get(self._name(key))

    def add(self, key: Text, amount: int) -> int:
        return self._store.add(self._name(key), amount)

    def compare_set(self, key: Text, expected: Text, desired: Text) -> bytes:
        return self._store.compare_set(self._name(key), to_bytes("expected", expected), to_bytes("desired", desired))

    def append(self, key: Text, value: Text) -> None:
        self._store.append(self._name(key), to_bytes("value", value))

    def check(self, keys: Iterable[Text]) -> bool:
        return self._store.check(self._names(keys))

    def delete_key(self, key: Text) -> bool:
        return self._store.delete_key(self._name(key))

    def num_keys(self) -> int:
        return self._store.num_keys()

    def list_keys(self) -> list[str]:
        return texts_of(self._list_keys_as_bytes())

    def _list_keys_as_bytes(self) -> list[bytes]:
        start = self._start
        return [name[len(start) :] for name in self._store._list_keys_as_bytes() if name.startswith(start)]

    def multi_get(self, keys: Iterable[Text]) -> list[bytes]:
        return self._store.multi_get(self._names(keys))

    def multi_set(self, keys: Iterable[Text], values: Iterable[Text]) -> None:
        self._store.multi_set(self._names(keys), to_bytes_list("values", values))

    def has_extended_api(self) -> bool:
        return self._store.has_extended_api()

    # Queues

    def queue_push(self, key: Text, value: Text) -> None:
        self._store.queue_push(self._name(key), to_bytes("value", value))

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        return self._store.queue_pop(self._name(key), block)

    def queue_len(self, key: Text) -> int:
        return self._store.queue_len(self._name(key))

    # Meeting

    def wait(self, keys: Iterable[Text], timeout: Timeout | None = None) -> None:
        self._store.wait(self._names(keys), timeout)

    def barrier(self, key: Text, world_size: int, timeout: Timeout | None = None) -> None:
        self._store.barrier(self._name(key), world_size, timeout)

    def _absent(self, keys: Sequence[Text], deadline: Deadline) -> tuple[list[int], bool]:
        return self._store._absent(self._names(keys), deadline)

    # Names

    def _name(self, key: Text, said: str = "key") -> Text:
        """The other store's name of a key: text as long as all of it is, for a store of one's own that expects it."""
        if isinstance(key, str) and isinstance(self._prefix, str):
            to_bytes(said, key)
            return f"{self._prefix}/{key}"
        return self._start + to_bytes(said, key)

    def _names(self, keys: Iterable[Text]) -> list[Text]:
        if isinstance(keys, (str, bytes, bytearray, dict)) or not isinstance(keys, Iterable):
            to_bytes_list("keys", keys)  # it says what is wrong
        return [self._name(key, f"keys[{number}]") for number, key in enumerate(keys)]
