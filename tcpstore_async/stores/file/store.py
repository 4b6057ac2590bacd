"""FileStore: the store whose keys are in a file, so that PyTorch's processes and ours can share one.

Knows: which records a method writes, how a store waits, how it signs off. Must not know: how the file is locked.
Invariant: what a command means is the keyspace's to say; nothing is decided on but what the locked file holds.
"""

import logging
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

from ...client.requests import names_of, texts_of
from ...coercion import Text, Timeout, to_bytes, to_bytes_list, to_int64, to_pairs
from ...deadline import DEFAULT_TIMEOUT, Deadline
from ...errors import DistStoreError, ProtocolError, QueueEmptyError, StoreTimeoutError
from ...keyspace import Keyspace
from ...values import pack, unpack
from ..base import Store
from ..hash import Alarm, no_number, wait_timeout
from .locked_file import SharedFile
from .records import GONE, POPPED, PUSHED, outcome, record

T = TypeVar("T")

_POLL_SECONDS: Final = 0.01
"""How often one who waits looks whether the file has changed, as PyTorch's."""

_FAREWELL_SECONDS: Final = 10.0
"""How long a store that is collected, or left at exit, tries to sign off."""

log: Final = logging.getLogger("tcpstore_async.stores")


def _farewell(file: SharedFile, world_size: int) -> None:
    """Sign off a store that nobody has closed."""
    if os.getpid() != file.pid:
        return
    try:
        file.sign_off(world_size, Deadline(_FAREWELL_SECONDS))
    except DistStoreError as error:
        log.warning("a FileStore could not sign off: %s", error)


class FileStore(Store):
    """A store in a file, which PyTorch's processes may use at the same time; for `torch.distributed.FileStore`.

    The file is made if it is missing, and removed when `world_size` stores or more have been closed and none is open; a
    negative `world_size` lets it be. It needs a file system with `flock`. All calls raise DistStoreError naming the
    file if it cannot be used, and StoreTimeoutError if others keep it locked, or it is missing, for the whole timeout;
    `add` raises ValueError if the value is no number.

    With `new_round`, as for `file://`, a file that `world_size` stores or more have opened and one has closed already
    is taken for an earlier round's and begun anew: ranks that leave late do not leave their keys to the next round.

    A store that is not closed is closed when it is collected, or at exit. In a forked child it can be used, but counts
    as its parent's.
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
        self._file.sign_on(self._world_size if new_round else 0, self._deadline())
        self._farewell = weakref.finalize(self, _farewell, self._file, self._world_size)
        self._closed = False

    @property
    def path(self) -> str:
        """The file, as it was given."""
        return self._path

    def clone(self) -> "FileStore":
        """A store of its own on the same file, with the same timeout; it counts as another one."""
        return FileStore(self._path, self._world_size, timeout=self._timeout)

    def close(self) -> None:
        """Sign off; the last one removes the file.

        May be called again: a store that could not sign off in time is closed nevertheless, and tries again then or, at
        the latest, when it is collected or at exit.
        """
        self._closed = True
        if not self._farewell.alive or os.getpid() != self._file.pid:
            return
        self._file.sign_off(self._world_size, self._deadline())
        self._farewell.detach()

    def __del__(self) -> None:
        if getattr(self, "_closed", True) or os.getpid() != self._file.pid or sys.is_finalizing():
            return
        try:
            warnings.warn(f"a FileStore was not closed: {self!r}", ResourceWarning, source=self, stacklevel=1)
        finally:
            self._closed = True
            self._farewell()

    def __repr__(self) -> str:
        return f"FileStore({self._path!r}, world_size={self._world_size})"

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle 'FileStore' object: make one in the other process")

    # Values

    def set(self, key: Text, value: Text) -> None:
        data = record(_name(key), to_bytes("value", value))
        self._write(lambda keyspace: (None, data))

    def get(self, key: Text) -> bytes:
        return self._get([_name(key)])[0]

    def add(self, key: Text, amount: int) -> int:
        name, number = _name(key), to_int64("amount", amount)
        try:
            return self._write(lambda keyspace: outcome(keyspace, name, lambda trial: trial.add(name, number)))
        except ProtocolError:
            raise no_number(name[1:]) from None

    def compare_set(self, key: Text, expected: Text, desired: Text) -> bytes:
        name = _name(key)
        old, new = pack(to_bytes("expected", expected)), pack(to_bytes("desired", desired))
        found = self._write(lambda keyspace: outcome(keyspace, name, lambda trial: trial.compare_set(name, old, new)))
        return unpack(found)

    def append(self, key: Text, value: Text) -> None:
        name, more = _name(key), pack(to_bytes("value", value))
        self._write(lambda keyspace: outcome(keyspace, name, lambda trial: trial.append(name, more)))

    def check(self, keys: Iterable[Text]) -> bool:
        names = _names(keys)
        return self._read(lambda keyspace: keyspace.check(names))

    def delete_key(self, key: Text) -> bool:
        name = _name(key)

        def decide(keyspace: Keyspace) -> tuple[bool, bytes]:
            there = name in keyspace.values
            return there, record(GONE + name, b"") if there else b""

        self._must_be_open()
        return self._file.write(decide, self._deadline(), create=False)

    def num_keys(self) -> int:
        return self._read(lambda keyspace: keyspace.num_keys())

    def list_keys(self) -> list[str]:
        return texts_of(self._list_keys_as_bytes())

    def _list_keys_as_bytes(self) -> list[bytes]:
        return names_of(self._read(lambda keyspace: keyspace.list_keys()))

    def multi_get(self, keys: Iterable[Text]) -> list[bytes]:
        return self._get(_names(keys))

    def multi_set(self, keys: Iterable[Text], values: Iterable[Text]) -> None:
        pairs = to_pairs(_names(keys), to_bytes_list("values", values))
        data = b"".join([record(name, value) for name, value in pairs])
        self._write(lambda keyspace: (None, data))

    def has_extended_api(self) -> bool:
        return True

    def _absent(self, keys: Sequence[Text], deadline: Deadline) -> tuple[list[int], bool]:
        names = _names(keys)

        def look(keyspace: Keyspace) -> list[int]:
            return [place for place, name in enumerate(names) if not keyspace.check([name])]

        return self._read(look, deadline), True

    # Queues

    def queue_push(self, key: Text, value: Text) -> None:
        data = record(PUSHED + _name(key), to_bytes("value", value))
        self._write(lambda keyspace: (None, data))

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        name = _name(key)
        deadline = self._deadline()

        def decide(keyspace: Keyspace) -> tuple[tuple[bytes | None, bool], bytes]:
            queue = keyspace.queues.get(name)
            if queue is None:
                return (None, name in keyspace.values), b""
            return (unpack(queue[0]), False), record(POPPED + name, b"")

        while True:
            item, plain = self._write(decide)
            if item is not None:
                return item
            if not block or plain:
                raise QueueEmptyError("queue is empty")
            self._await([name], deadline)

    def queue_len(self, key: Text) -> int:
        name = _name(key)
        return self._read(lambda keyspace: keyspace.queue_len(name))

    # Waiting

    def wait(self, keys: Iterable[Text], timeout: Timeout | None = None) -> None:
        self._await(_names(keys), Deadline(self._seconds(timeout)))

    def _get(self, names: list[bytes]) -> list[bytes]:
        """The values, as soon as all are there at once."""
        deadline = self._deadline()

        def look(keyspace: Keyspace) -> list[bytes] | None:
            return [unpack(blob) for blob in keyspace.multi_get(names)] if keyspace.check(names) else None

        while (values := self._read(look)) is None:
            self._await(names, deadline)
        return values

    def _await(self, names: list[bytes], deadline: Deadline) -> None:
        """Until all keys have appeared; they may be gone again. Raises StoreTimeoutError."""
        alarm = Alarm()
        parked: Keyspace | None = None

        def look(keyspace: Keyspace) -> bool:
            nonlocal alarm, parked
            if keyspace is parked:
                return False
            new = Alarm()
            if keyspace.wait(new.waiter, names):
                return True
            alarm, parked = new, keyspace
            return False

        signature = self._file.signature()
        try:
            there = self._read(look, deadline)
            while not there:
                left = deadline.left()
                if alarm.sleep(_POLL_SECONDS if left is None else min(left, _POLL_SECONDS)):
                    return
                if signature != (signature := self._file.signature()):
                    there = self._look_again(look, deadline, names) or alarm.sleep(0)
                elif left == 0.0:
                    raise wait_timeout([name[1:] for name in names], deadline.timeout)
        finally:
            if parked is not None:
                self._file.forget(parked, alarm)

    def _look_again(self, look: Callable[[Keyspace], bool], deadline: Deadline, names: list[bytes]) -> bool:
        try:
            return self._read(look, deadline)
        except StoreTimeoutError as error:
            raise wait_timeout([name[1:] for name in names], deadline.timeout) from error

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
        raise TypeError(f"file_name must be a str or a path, not {type(given).__name__}") from None
    if not path:
        raise ValueError("file_name must not be empty")
    if "\0" in path:
        raise ValueError("file_name must have no NUL in it")
    return path


def _name(key: Text) -> bytes:
    return b"/" + to_bytes("key", key)


def _names(keys: Iterable[Text]) -> list[bytes]:
    return [b"/" + key for key in to_bytes_list("keys", keys)]
