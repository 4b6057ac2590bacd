"""FileStore: a store in a file, in PyTorch's format, so that PyTorch's processes and ours can share it.

Invariant: the keyspace gives commands their meaning, and every decision is based on the contents of the locked file.
This module decides which records a method writes and how a store waits; it must not know how the file is locked.
"""

import logging
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

from ...base.coercion import Text, Timeout, call_seconds, to_bytes, to_bytes_list, to_int64, to_pairs
from ...base.deadline import DEFAULT_TIMEOUT, Deadline
from ...base.errors import DistStoreError, ProtocolError, QueueEmptyError, StoreTimeoutError
from ...base.keys import caller_keys, decode_keys, stored_key, stored_keys, wait_timeout_message
from ...keyspace.keyspace import Keyspace
from ...wire.values import pack, unpack
from ..base import Store
from ..hash import Alarm, not_a_number
from .locked_file import SharedFile
from .records import GONE, POPPED, PUSHED, outcome, record

T = TypeVar("T")

_POLL_SECONDS: Final = 0.01
"""Interval at which a waiting store checks whether the file has changed, as PyTorch's."""

_FINALIZE_SECONDS: Final = 10.0
"""Timeout of closing a store when it is collected or at exit."""

log: Final = logging.getLogger("tcpstore_async.stores")


def _finalize(file: SharedFile, world_size: int) -> None:
    """Unregister a store that was not closed."""
    if os.getpid() != file.pid:
        return
    try:
        file.unregister(world_size, Deadline(_FINALIZE_SECONDS))
    except DistStoreError as error:
        log.warning("could not close a FileStore: %s", error)


class FileStore(Store):
    """A store in a file, shared with PyTorch's FileStores. A drop-in for `torch.distributed.FileStore`.

    The file is created if it does not exist, and removed once `world_size` or more stores have been closed and none is
    open; with a negative `world_size` it is never removed. The file system must support `flock`.

    With `new_round`, as for `file://`, a file that `world_size` or more stores have opened and at least one has closed
    belongs to a finished round and is replaced by a new one, so that ranks that leave late pass no keys on to the next
    round.

    A store that is not closed is closed when it is collected or at exit. A forked child can use its parent's store, but
    does not count as another one.

    All methods raise DistStoreError, naming the file, if it cannot be used, and StoreTimeoutError if it stays locked or
    missing for the whole timeout, which is `timeout` at first. `add` raises ValueError if the value is not a number.
    """

    def __init__(
        self,
        file_name: str | os.PathLike[str],
        world_size: int = -1,
        *,
        timeout: Timeout = DEFAULT_TIMEOUT,
        new_round: bool = False,
    ) -> None:
        self._closed = True
        super().__init__(timeout)
        self._path = _to_path(file_name)
        self._world_size = to_int64("world_size", world_size)
        self._file = SharedFile(self._path)
        self._file.register(self._world_size if new_round else 0, self._deadline())
        self._finalizer = weakref.finalize(self, _finalize, self._file, self._world_size)
        self._closed = False

    def _keep_file(self) -> None:
        """Leave the file when the store is closed, even as the last one of the world."""
        self._world_size = -1
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _finalize, self._file, self._world_size)

    @property
    def path(self) -> str:
        """The file name, as given."""
        return self._path

    def clone(self) -> "FileStore":
        """Open another store on the same file, with the same timeout. It counts as one more."""
        return FileStore(self._path, self._world_size, timeout=self._timeout)

    def close(self) -> None:
        """Close the store; the last one of the world removes the file.

        Raises StoreTimeoutError if the file stays locked for the whole timeout. The store is closed nevertheless; it is
        uncounted by calling this again, or when the store is collected or at exit.
        """
        self._closed = True
        if not self._finalizer.alive or os.getpid() != self._file.pid:
            return
        self._file.unregister(self._world_size, self._deadline())
        self._finalizer.detach()

    def __del__(self) -> None:
        if getattr(self, "_closed", True) or os.getpid() != self._file.pid or sys.is_finalizing():
            return
        try:
            warnings.warn(f"a FileStore was not closed: {self!r}", ResourceWarning, source=self, stacklevel=1)
        finally:
            self._closed = True
            self._finalizer()

    def __repr__(self) -> str:
        return f"FileStore({self._path!r}, world_size={self._world_size})"

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle 'FileStore' object: create one in the other process")

    # Values

    def set(self, key: Text, value: Text) -> None:
        data = record(stored_key(key), to_bytes("value", value))
        self._write(lambda keyspace: (None, data))

    def get(self, key: Text) -> bytes:
        return self._get([stored_key(key)])[0]

    def add(self, key: Text, amount: int) -> int:
        name, number = stored_key(key), to_int64("amount", amount)
        try:
            return self._write(lambda keyspace: outcome(keyspace, name, lambda trial: trial.add(name, number)))
        except ProtocolError:
            raise not_a_number(name[1:]) from None

    def compare_set(self, key: Text, expected: Text, desired: Text) -> bytes:
        name = stored_key(key)
        old, new = pack(to_bytes("expected", expected)), pack(to_bytes("desired", desired))
        found = self._write(lambda keyspace: outcome(keyspace, name, lambda trial: trial.compare_set(name, old, new)))
        return unpack(found)

    def append(self, key: Text, value: Text) -> None:
        name, more = stored_key(key), pack(to_bytes("value", value))
        self._write(lambda keyspace: outcome(keyspace, name, lambda trial: trial.append(name, more)))

    def check(self, keys: Iterable[Text]) -> bool:
        names = stored_keys(keys)
        return self._read(lambda keyspace: keyspace.check(names))

    def delete_key(self, key: Text) -> bool:
        name = stored_key(key)

        def decide(keyspace: Keyspace) -> tuple[bool, bytes]:
            exists = name in keyspace.values
            return exists, record(GONE + name, b"") if exists else b""

        self._must_be_open()
        return self._file.write(decide, self._deadline(), create=False)

    def num_keys(self) -> int:
        return self._read(lambda keyspace: keyspace.num_keys())

    def list_keys(self) -> list[str]:
        return decode_keys(self._list_keys_as_bytes())

    def _list_keys_as_bytes(self) -> list[bytes]:
        return caller_keys(self._read(lambda keyspace: keyspace.list_keys()))

    def multi_get(self, keys: Iterable[Text]) -> list[bytes]:
        return self._get(stored_keys(keys))

    def multi_set(self, keys: Iterable[Text], values: Iterable[Text]) -> None:
        pairs = to_pairs(stored_keys(keys), to_bytes_list("values", values))
        data = b"".join([record(name, value) for name, value in pairs])
        self._write(lambda keyspace: (None, data))

    def has_extended_api(self) -> bool:
        return True

    def _absent(self, keys: Sequence[Text], deadline: Deadline) -> tuple[list[int], bool]:
        names = stored_keys(keys)

        def look(keyspace: Keyspace) -> list[int]:
            return [index for index, name in enumerate(names) if not keyspace.check([name])]

        return self._read(look, deadline), True

    # Queues

    def queue_push(self, key: Text, value: Text) -> None:
        data = record(PUSHED + stored_key(key), to_bytes("value", value))
        self._write(lambda keyspace: (None, data))

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        name = stored_key(key)
        deadline = self._deadline()

        def decide(keyspace: Keyspace) -> tuple[tuple[bytes | None, bool], bytes]:
            queue = keyspace.queues.get(name)
            if queue is None:
                return (None, name in keyspace.values), b""
            return (unpack(queue[0]), False), record(POPPED + name, b"")

        while True:
            item, is_plain_value = self._write(decide)
            if item is not None:
                return item
            if not block or is_plain_value:
                raise QueueEmptyError("queue is empty")
            self._await([name], deadline)

    def queue_len(self, key: Text) -> int:
        name = stored_key(key)
        return self._read(lambda keyspace: keyspace.queue_len(name))

    # Waiting

    def wait(self, keys: Iterable[Text], timeout: Timeout | None = None) -> None:
        self._await(stored_keys(keys), Deadline(call_seconds(timeout, self._timeout)))

    def _get(self, names: list[bytes]) -> list[bytes]:
        """Wait until all keys exist at the same time; return their values."""
        deadline = self._deadline()

        def look(keyspace: Keyspace) -> list[bytes] | None:
            return [unpack(value) for value in keyspace.multi_get(names)] if keyspace.check(names) else None

        while (values := self._read(look)) is None:
            self._await(names, deadline)
        return values

    def _await(self, names: list[bytes], deadline: Deadline) -> None:
        """Wait until all keys exist; some may be deleted again by the return. Raises StoreTimeoutError."""
        alarm = Alarm()
        parked: Keyspace | None = None

        def look(keyspace: Keyspace) -> bool:
            nonlocal alarm, parked
            if keyspace is parked:  # the waiter fires by itself; a new replica needs a new one
                return False
            new = Alarm()
            if keyspace.wait(new.waiter, names):
                return True
            alarm, parked = new, keyspace
            return False

        signature = self._file.signature()
        try:
            present = self._read(look, deadline)
            while not present:
                left = deadline.left()
                if alarm.sleep(_POLL_SECONDS if left is None else min(left, _POLL_SECONDS)):
                    return
                if signature != (signature := self._file.signature()):
                    present = self._read_again(look, deadline, names) or alarm.sleep(0)
                elif left == 0.0:
                    raise _wait_timeout(names, deadline)
        finally:
            if parked is not None:
                self._file.forget(parked, alarm)

    def _read_again(self, look: Callable[[Keyspace], bool], deadline: Deadline, names: list[bytes]) -> bool:
        try:
            return self._read(look, deadline)
        except StoreTimeoutError as error:
            raise _wait_timeout(names, deadline) from error

    # The file

    def _deadline(self) -> Deadline:
        return Deadline(self._timeout)

    def _read(self, look: Callable[[Keyspace], T], deadline: Deadline | None = None) -> T:
        self._must_be_open()
        return self._file.read(look, deadline or self._deadline())

    def _write(self, decide: Callable[[Keyspace], tuple[T, bytes]]) -> T:
        self._must_be_open()
        return self._file.write(decide, self._deadline())

    def _must_be_open(self) -> None:
        if self._closed:
            raise DistStoreError(f"the store has been closed: {self!r}")


def _to_path(given: str | os.PathLike[str]) -> str:
    try:
        path = os.fsdecode(given)
    except TypeError:
        raise TypeError(f"file_name must be str or os.PathLike, not {type(given).__name__}") from None
    if not path:
        raise ValueError("file_name must not be empty")
    if "\0" in path:
        raise ValueError("file_name must not contain NUL")
    return path


def _wait_timeout(names: list[bytes], deadline: Deadline) -> StoreTimeoutError:
    return StoreTimeoutError(wait_timeout_message(caller_keys(names), deadline.timeout))
