"""HashStore: a store in the memory of this process, shared by its threads.

The keyspace gives commands their meaning; this module adds locking, sleeping threads and fork. It must not know files
or connections.

Invariants: operations on the keyspaces are atomic, and none of them sleeps. A thread that stops waiting, for whatever
reason, passes on the item that was handed to it. A forked child has its own copy, without the parent's waiters.
"""

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar
from weakref import WeakSet

from ..base.coercion import Text, Timeout, call_seconds, to_bytes, to_bytes_list, to_int64, to_pairs
from ..base.deadline import Deadline
from ..base.errors import ProtocolError, QueueEmptyError, StoreTimeoutError
from ..base.keys import decode_keys, wait_timeout_message
from ..base.limits import Limits
from ..keyspace.keyspace import Keyspace
from ..keyspace.waiter_types import CallbackWaiter
from ..wire.values import Framed, pack, unpack
from .atomic import LOCK, atomically, release_after_fork
from .base import Store

_Result = TypeVar("_Result")

UNLIMITED: Final = Limits(budget_bytes=2**62)
"""Limits of a keyspace that only this process can fill."""


class Alarm:
    """Wakes the thread that sleeps on it when its waiter fires.

    It is a lock: a signal handler that sets a `threading.Event` may find its own thread holding the Event's lock.
    """

    def __init__(self) -> None:
        self._fired = threading.Lock()
        self._fired.acquire()
        self.waiter = CallbackWaiter(self._fired.release)

    def sleep(self, seconds: float | None) -> bool:
        """Sleep until the waiter fires, or for this many seconds; None means no limit. Return whether it fired."""
        return self._fired.acquire(timeout=-1 if seconds is None else min(seconds, threading.TIMEOUT_MAX))


def not_a_number(key: bytes) -> ValueError:
    """Return the error for an `add` to a key, in the caller's form, whose value is not a number."""
    return ValueError(f"cannot add to key {key.decode(errors='replace')!r}: its value is not a 64-bit number")


class HashStore(Store):
    """A store in the memory of this process, shared by its threads. A drop-in for `torch.distributed.HashStore`.

    `add` raises ValueError if the value is not a number.
    """

    def __init__(self) -> None:
        super().__init__()
        self._keyspace = Keyspace(UNLIMITED)
        _STORES.add(self)

    def clone(self) -> "HashStore":
        """Return this store itself, as PyTorch does."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle 'HashStore' object: its keys are in the memory of this process")

    # Values

    def set(self, key: Text, value: Text) -> None:
        name, framed = to_bytes("key", key), pack(to_bytes("value", value))
        atomically(lambda: self._keyspace.set(name, framed))

    def get(self, key: Text) -> bytes:
        return self._get([to_bytes("key", key)])[0]

    def add(self, key: Text, amount: int) -> int:
        name, number = to_bytes("key", key), to_int64("amount", amount)
        try:
            return atomically(lambda: self._keyspace.add(name, number))
        except ProtocolError:
            raise not_a_number(name) from None

    def compare_set(self, key: Text, expected: Text, desired: Text) -> bytes:
        name = to_bytes("key", key)
        old, new = pack(to_bytes("expected", expected)), pack(to_bytes("desired", desired))
        return unpack(atomically(lambda: self._keyspace.compare_set(name, old, new)))

    def append(self, key: Text, value: Text) -> None:
        name, framed = to_bytes("key", key), pack(to_bytes("value", value))
        atomically(lambda: self._keyspace.append(name, framed))

    def check(self, keys: Iterable[Text]) -> bool:
        names = to_bytes_list("keys", keys)
        return atomically(lambda: self._keyspace.check(names))

    def delete_key(self, key: Text) -> bool:
        name = to_bytes("key", key)
        return atomically(lambda: self._keyspace.delete_key(name)) == 1

    def num_keys(self) -> int:
        return atomically(self._keyspace.num_keys)

    def list_keys(self) -> list[str]:
        return decode_keys(self._list_keys_as_bytes())

    def _list_keys_as_bytes(self) -> list[bytes]:
        return atomically(self._keyspace.list_keys)

    def multi_get(self, keys: Iterable[Text]) -> list[bytes]:
        return self._get(to_bytes_list("keys", keys))

    def multi_set(self, keys: Iterable[Text], values: Iterable[Text]) -> None:
        pairs = to_pairs(to_bytes_list("keys", keys), to_bytes_list("values", values))
        items: list[tuple[bytes, Framed]] = [(name, pack(value)) for name, value in pairs]
        atomically(lambda: self._keyspace.multi_set(items))

    def has_extended_api(self) -> bool:
        return True

    def _absent(self, keys: Sequence[Text], deadline: Deadline) -> tuple[list[int], bool]:
        names = to_bytes_list("keys", keys)

        def look() -> list[int]:
            return [index for index, name in enumerate(names) if not self._keyspace.check([name])]

        return atomically(look), True

    # Queues

    def queue_push(self, key: Text, value: Text) -> None:
        name, framed = to_bytes("key", key), pack(to_bytes("value", value))
        atomically(lambda: self._keyspace.queue_push(name, framed))

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        name = to_bytes("key", key)
        deadline = Deadline(self._timeout)

        def pop() -> tuple[Framed | None, bool]:
            _, item = self._keyspace.queue_pop(name)
            return item, item is None and self._keyspace.check([name])

        while True:
            item, is_plain_value = self._when_present([name], deadline, pop) if block else atomically(pop)
            if item is not None:
                return unpack(item)
            if not block or is_plain_value:
                raise QueueEmptyError("queue is empty")

    def queue_len(self, key: Text) -> int:
        name = to_bytes("key", key)
        return atomically(lambda: self._keyspace.queue_len(name))

    # Waiting

    def wait(self, keys: Iterable[Text], timeout: Timeout | None = None) -> None:
        names = to_bytes_list("keys", keys)
        self._when_present(names, Deadline(call_seconds(timeout, self._timeout)), lambda: None)

    def _get(self, names: list[bytes]) -> list[bytes]:
        """Wait until all keys exist at the same time; return their values."""
        deadline = Deadline(self._timeout)

        def look() -> list[Framed] | None:
            return self._keyspace.multi_get(names) if self._keyspace.check(names) else None

        while (values := self._when_present(names, deadline, look)) is None:
            pass
        return [unpack(value) for value in values]

    def _when_present(self, names: list[bytes], deadline: Deadline, then: Callable[[], _Result]) -> _Result:
        """Wait until all keys exist, then execute an operation; keys may have been deleted in between.

        Raises StoreTimeoutError.
        """
        keyspace, alarm = self._keyspace, Alarm()

        def begin() -> tuple[_Result] | None:
            return (then(),) if keyspace.wait(alarm.waiter, names) else None

        parked = True
        try:
            done = atomically(begin)
            if done is not None:
                parked = False
                return done[0]
            if not alarm.sleep(deadline.left()):
                # PyTorch's HashStore begins this text with a capital.
                raise StoreTimeoutError(wait_timeout_message(names, deadline.timeout, "Wait"))
            return atomically(then)
        finally:
            if parked:  # after `then`: leaving earlier would pass on an item that it takes
                atomically(lambda: keyspace.leave(alarm.waiter))


_STORES: Final["WeakSet[HashStore]"] = WeakSet()


def _after_fork_in_child() -> None:
    """Drop the waiters of the parent's other threads, which do not exist here."""
    for store in _STORES:
        store._keyspace.forget_waiters()
    release_after_fork()


os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=_after_fork_in_child)
