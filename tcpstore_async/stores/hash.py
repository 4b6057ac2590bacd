"""HashStore: the store whose keys this process keeps, for its threads.

Knows: how threads sleep until a keyspace wakes them, locks, fork. Must not know: what a command means, which is the
keyspace's; files, connections.
Invariants: one operation on the keyspaces here is done at a time, whole, and none of them sleeps. Whoever stops
waiting, for whatever reason, hands on what it was promised. A forked child has a copy of its own, on which none of its
parent's threads wait.
"""

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar
from weakref import WeakSet

from ..client.requests import texts_of
from ..coercion import Text, Timeout, in_milliseconds, to_bytes, to_bytes_list, to_int64, to_pairs
from ..deadline import Deadline
from ..errors import ProtocolError, QueueEmptyError, StoreTimeoutError
from ..keyspace import Keyspace
from ..limits import Limits
from ..values import Framed, pack, unpack
from ..waiters import CallbackWaiter
from .base import Store
from .exclusive import LOCK, do, forked

_Result = TypeVar("_Result")

UNLIMITED: Final = Limits(budget_bytes=2**62)
"""What a keyspace grants that nobody else can fill: everything."""


class Alarm:
    """Wakes the thread that sleeps on it when its waiter fires.

    Not an Event: a signal handler could set that while its own thread holds the lock inside.
    """

    def __init__(self) -> None:
        self._rung = threading.Lock()
        self._rung.acquire()
        self.waiter = CallbackWaiter(self._rung.release)

    def sleep(self, seconds: float | None) -> bool:
        """Until the waiter fires, which is True, or the time is over; None means for ever."""
        return self._rung.acquire(timeout=-1 if seconds is None else min(seconds, threading.TIMEOUT_MAX))


def wait_timeout(names: list[bytes], seconds: float, word: str = "wait") -> StoreTimeoutError:
    """What is raised when keys, as users know them, have not appeared in time."""
    listed = ", ".join(name.decode(errors="replace") for name in names)
    return StoreTimeoutError(f"{word} timeout after {in_milliseconds(seconds)}ms, keys: {listed}")


def no_number(name: bytes) -> ValueError:
    """What is raised for an `add` to a key, as users know it, whose value is not a number."""
    return ValueError(f"the value of key {name.decode(errors='replace')!r} is not a 64-bit number: nothing was added")


class HashStore(Store):
    """A store in the memory of this process, shared by its threads. A drop-in for `torch.distributed.HashStore`.

    `add` raises ValueError if the value is no number.
    """

    def __init__(self) -> None:
        super().__init__()
        self._keyspace = Keyspace(UNLIMITED)
        _STORES.add(self)

    def clone(self) -> "HashStore":
        """This store itself, as in PyTorch."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle 'HashStore' object: its keys are in the memory of this process")

    # Values

    def set(self, key: Text, value: Text) -> None:
        name, blob = to_bytes("key", key), pack(to_bytes("value", value))
        do(lambda: self._keyspace.set(name, blob))

    def get(self, key: Text) -> bytes:
        return self._get([to_bytes("key", key)])[0]

    def add(self, key: Text, amount: int) -> int:
        name, number = to_bytes("key", key), to_int64("amount", amount)
        try:
            return do(lambda: self._keyspace.add(name, number))
        except ProtocolError:
            raise no_number(name) from None

    def compare_set(self, key: Text, expected: Text, desired: Text) -> bytes:
        name = to_bytes("key", key)
        old, new = pack(to_bytes("expected", expected)), pack(to_bytes("desired", desired))
        return unpack(do(lambda: self._keyspace.compare_set(name, old, new)))

    def append(self, key: Text, value: Text) -> None:
        name, blob = to_bytes("key", key), pack(to_bytes("value", value))
        do(lambda: self._keyspace.append(name, blob))

    def check(self, keys: Iterable[Text]) -> bool:
        names = to_bytes_list("keys", keys)
        return do(lambda: self._keyspace.check(names))

    def delete_key(self, key: Text) -> bool:
        name = to_bytes("key", key)
        return do(lambda: self._keyspace.delete_key(name)) == 1

    def num_keys(self) -> int:
        return do(self._keyspace.num_keys)

    def list_keys(self) -> list[str]:
        return texts_of(self._list_keys_as_bytes())

    def _list_keys_as_bytes(self) -> list[bytes]:
        return do(self._keyspace.list_keys)

    def multi_get(self, keys: Iterable[Text]) -> list[bytes]:
        return self._get(to_bytes_list("keys", keys))

    def multi_set(self, keys: Iterable[Text], values: Iterable[Text]) -> None:
        pairs = to_pairs(to_bytes_list("keys", keys), to_bytes_list("values", values))
        items: list[tuple[bytes, Framed]] = [(name, pack(value)) for name, value in pairs]
        do(lambda: self._keyspace.multi_set(items))

    def has_extended_api(self) -> bool:
        return True

    def _absent(self, keys: Sequence[Text], deadline: Deadline) -> tuple[list[int], bool]:
        names = to_bytes_list("keys", keys)
        return do(lambda: [place for place, name in enumerate(names) if not self._keyspace.check([name])]), True

    # Queues

    def queue_push(self, key: Text, value: Text) -> None:
        name, blob = to_bytes("key", key), pack(to_bytes("value", value))
        do(lambda: self._keyspace.queue_push(name, blob))

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        name = to_bytes("key", key)
        deadline = Deadline(self._timeout)

        def pop() -> tuple[Framed | None, bool]:
            _, item = self._keyspace.queue_pop(name)
            return item, item is None and self._keyspace.check([name])

        while True:
            item, is_plain = self._once_there([name], deadline, pop) if block else do(pop)
            if item is not None:
                return unpack(item)
            if not block or is_plain:
                raise QueueEmptyError("queue is empty")

    def queue_len(self, key: Text) -> int:
        name = to_bytes("key", key)
        return do(lambda: self._keyspace.queue_len(name))

    # Waiting

    def wait(self, keys: Iterable[Text], timeout: Timeout | None = None) -> None:
        names = to_bytes_list("keys", keys)
        self._once_there(names, Deadline(self._seconds(timeout)), lambda: None)

    def _get(self, names: list[bytes]) -> list[bytes]:
        """The values, as soon as all are there at once."""
        deadline = Deadline(self._timeout)

        def look() -> list[Framed] | None:
            return self._keyspace.multi_get(names) if self._keyspace.check(names) else None

        while (blobs := self._once_there(names, deadline, look)) is None:
            pass
        return [unpack(blob) for blob in blobs]

    def _once_there(self, names: list[bytes], deadline: Deadline, then: Callable[[], _Result]) -> _Result:
        """Do something as soon as all keys have appeared; they may be gone again. Raises StoreTimeoutError."""
        keyspace, alarm = self._keyspace, Alarm()

        def begin() -> tuple[_Result] | None:
            return (then(),) if keyspace.wait(alarm.waiter, names) else None

        parked = True
        try:
            done = do(begin)
            if done is not None:
                parked = False
                return done[0]
            if not alarm.sleep(deadline.left()):
                raise wait_timeout(names, deadline.timeout, "Wait")  # as PyTorch's begins
            return do(then)
        finally:
            if parked:
                do(lambda: keyspace.leave(alarm.waiter))


_STORES: Final["WeakSet[HashStore]"] = WeakSet()


def _after_fork_in_child() -> None:
    """Only the thread that forked is there: nobody else waits any more."""
    for store in _STORES:
        keyspace = store._keyspace
        keyspace.waiters.clear()
        keyspace.stale.clear()
        keyspace.counters.clear()
        keyspace.handoffs.clear()
    forked()


os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=_after_fork_in_child)
