"""A store's file, shared with other processes: locking, reading, appending, and repair after a writer died.

Invariants: nothing is read or written without a lock on the whole file (flock). Records are appended directly after a
complete one, all or nothing. Decisions to write are made on the current contents, never on an older replica. This
module must not know keys or commands.
"""

import errno
import fcntl
import logging
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from ...base.coercion import in_milliseconds
from ...base.deadline import Deadline, backoff
from ...base.errors import DistStoreError, ProtocolError, StoreTimeoutError, counted
from ...base.locks import RLock
from ...keyspace.keyspace import Keyspace
from ..hash import Alarm
from .records import FIRST, is_complete, register, unregister
from .reentrant_lock import FileLock, locked
from .replica import Replica
from .torn_records import torn_spans

T = TypeVar("T")

_FIRST_PAUSE: Final = 0.0001
"""Seconds between the first attempts to open and lock the file."""

_LONGEST_PAUSE: Final = 0.005
"""Seconds between later attempts."""

_NO_FLOCK: Final = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}

log: Final = logging.getLogger("tcpstore_async.stores")


class Missing(Exception):
    """The file does not exist, and the caller does not wait for it."""


class _Attempts:
    """Attempts to open and lock the file, until a deadline."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._failures = 0

    def pause(self, waiting_for: str) -> None:
        """Sleep until the next attempt. Raises StoreTimeoutError at the deadline."""
        left = self._deadline.left()
        if left == 0.0:
            raise StoreTimeoutError(f"timeout after {in_milliseconds(self._deadline.timeout)}ms: {waiting_for}")
        self._failures += 1
        pause = backoff(self._failures, _FIRST_PAUSE, _LONGEST_PAUSE)
        time.sleep(pause if left is None else min(pause, left))


class SharedFile:
    """The file as one store of this process uses it. Every method raises DistStoreError."""

    def __init__(self, path: str) -> None:
        self.path: Final = os.path.abspath(path)
        self.pid: Final = os.getpid()
        self._has_warned = False
        self._registered: list[int] = []
        """A descriptor of the file that counts this store, which keeps its inode from being reused; empty otherwise.

        A list, because popping is atomic: only one of two threads that unregister at once gets it.
        """
        self._reset()
        _FILES.add(self)

    def _reset(self) -> None:
        """Forget everything that was read."""
        self._lock = RLock()
        """Guards the replica. Acquired after the file's lock, and never held while waiting."""
        self._user: int | None = None
        """The thread that uses the replica."""
        self._replica = Replica()

    def read(self, look: Callable[[Keyspace], T], deadline: Deadline) -> T:
        """Return what `look` returns for the current contents. It may be called more than once."""
        intact = False

        def act(lock: FileLock) -> T:
            nonlocal intact
            with self._shared_replica(lock) as replica:
                intact = replica.catch_up(lock.fd)
                return look(replica.keyspace)

        result = self._locked(os.O_RDONLY, deadline, act)
        if not intact and self._repair(deadline):
            return self._locked(os.O_RDONLY, deadline, act)
        return result

    def write(self, decide: Callable[[Keyspace], tuple[T, bytes]], deadline: Deadline, create: bool = True) -> T:
        """Append the records that `decide` returns for the current contents; return its result.

        It may be called more than once.
        """
        flags = os.O_RDWR | os.O_CREAT if create else os.O_RDWR
        return self._locked(flags, deadline, lambda lock: self._write(lock, decide))

    def register(self, round_size: int, deadline: Deadline) -> None:
        """Count one more store.

        If the file is that of a finished round of this size, replace it by a new one; a size of 0 means no rounds.
        """

        def act(lock: FileLock) -> bool:
            self._release_descriptor()
            self._registered.append(os.open(self.path, os.O_RDONLY))
            usable = self._count(lock, lambda keyspace: register(keyspace, round_size))
            if not usable and not lock.lost:
                _unlink(self.path)
            return usable

        try:
            while not self._locked(os.O_RDWR | os.O_CREAT, deadline, act):
                pass
        except BaseException:
            self._release_descriptor()
            raise

    def unregister(self, world_size: int, deadline: Deadline) -> None:
        """Count one store less, if the file is still the one that counts this store; the world's last store removes it.

        Does nothing if this store is no longer counted. May be called again after a failure.
        """
        try:
            registered = self._registered.pop()
        except IndexError:
            return
        done = False

        def act(lock: FileLock) -> None:
            nonlocal done
            if not os.path.samestat(os.fstat(lock.fd), os.fstat(registered)):
                return
            try:
                last = self._count(lock, lambda keyspace: unregister(keyspace, world_size))
            finally:
                done = lock.written
            if last and not lock.lost:
                _unlink(self.path)

        try:
            self._locked(os.O_RDWR, deadline, act, patient=False)
            done = True
        except Missing:
            done = True  # as in PyTorch
        finally:
            self._registered.append(registered)
            if done:
                self._release_descriptor()

    def reset_after_fork(self) -> None:
        """Forget the parent's replica, lock and registration in a forked child."""
        self._reset()
        self._release_descriptor()

    def _release_descriptor(self) -> None:
        while self._registered:
            os.close(self._registered.pop())

    def signature(self) -> object:
        """Return a value that changes with the file."""
        try:
            found = os.stat(self.path)
        except OSError as error:
            return error.errno
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def forget(self, keyspace: Keyspace, alarm: Alarm) -> None:
        """Remove a thread's waiter from a replica's keyspace."""
        if self._user == threading.get_ident():
            return
        with self._lock:
            self._user = threading.get_ident()
            try:
                keyspace.leave(alarm.waiter)
            finally:
                self._user = None

    def _locked(self, flags: int, deadline: Deadline, act: Callable[[FileLock], T], patient: bool = True) -> T:
        """Call `act` while the file is locked; repeat it if a call that interrupted this one took the lock.

        Unless `patient`, raises Missing at once if the file does not exist.
        """
        deadline = deadline if deadline.timeout else Deadline.of_a_call(0)
        while True:
            lock = FileLock()
            try:
                with locked() as lock:
                    self._open(lock, flags, _Attempts(deadline), patient)
                    result = act(lock)
                if lock.written or not lock.lost:  # after a write, repeating `act` would write twice
                    return result
            except Exception as error:
                if lock.lost and not lock.written:
                    continue
                if isinstance(error, OSError):
                    raise DistStoreError(f"{self.path}: {error.strerror or error}") from error
                raise

    def _open(self, lock: FileLock, flags: int, attempts: _Attempts, patient: bool) -> None:
        """Open and lock the file that the path names now; the lock is exclusive if the file may be written."""
        kind = fcntl.LOCK_EX if flags & os.O_RDWR else fcntl.LOCK_SH
        while True:
            lock.lost = False
            try:
                lock.fd = os.open(self.path, flags | os.O_NONBLOCK, 0o644)
            except FileNotFoundError:
                if not patient:
                    raise Missing from None
                attempts.pause(f"{self.path}: {self._what_is_missing()}")
                continue
            self._wait_for_lock(lock.fd, kind, attempts)
            if self._is_current(lock.fd):
                return
            fd, lock.fd = lock.fd, -1
            os.close(fd)

    def _what_is_missing(self) -> str:
        """Return the text of the error; log a missing directory at once, as the error may be minutes away."""
        folder = os.path.dirname(self.path)
        if os.path.isdir(folder):
            return "No such file or directory"
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s: directory %s does not exist; waiting for it until the timeout", self.path, folder)
        return f"No such directory: {folder}"

    def _wait_for_lock(self, fd: int, kind: int, attempts: _Attempts) -> None:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EISDIR, "Is a directory" if stat.S_ISDIR(mode) else "Not a regular file")
        while True:
            try:
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                attempts.pause(f"{self.path}: locked by another process or store")
            except OSError as error:
                if error.errno in _NO_FLOCK:
                    raise DistStoreError(
                        f"{self.path}: the file system does not support flock, which FileStore needs ({error.strerror})"
                    ) from error
                raise

    def _is_current(self, fd: int) -> bool:
        """Return whether the path still names this file."""
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self.path))
        except FileNotFoundError:
            return False

    @contextmanager
    def _shared_replica(self, lock: FileLock) -> Iterator[Replica]:
        """Yield the replica that this process's threads share, or a temporary one if this call interrupts its user."""
        thread = threading.get_ident()
        if self._user == thread:
            yield Replica()
            return
        with self._lock:
            self._user = thread
            try:
                if not self._replica.is_of(lock.fd):
                    self._replica = Replica()
                yield self._replica
            finally:
                self._user = None

    def _write(self, lock: FileLock, decide: Callable[[Keyspace], tuple[T, bytes]]) -> T:
        while True:
            with self._shared_replica(lock) as replica:
                if replica.catch_up(lock.fd) or not self._remove_torn(lock.fd, replica):
                    result, data = decide(replica.keyspace)
                    if data:
                        _append(lock.fd, replica.offset, data)
                        lock.written = True
                        replica.apply(data)
                    return result

    def _count(self, lock: FileLock, decide: Callable[[Keyspace], tuple[bool, bytes]]) -> bool:
        """Write as `_write` does, for the counts of stores. Raises DistStoreError if they are not numbers."""
        try:
            return self._write(lock, decide)
        except ProtocolError:
            raise DistStoreError(f"{self.path}: not a FileStore file: its count of stores is not a number") from None

    # Repair

    def _repair(self, deadline: Deadline) -> bool:
        """Remove torn records; return False if this process may not write the file."""
        if not os.access(self.path, os.W_OK):
            return False
        self.write(lambda keyspace: (None, b""), deadline, create=False)
        return True

    def _remove_torn(self, fd: int, replica: Replica) -> bool:
        """Remove torn records from the replica's last record on; return whether there is more to read.

        The file is locked, so the writers of torn records are dead. PyTorch's stores append without checking: complete
        records may follow, of which a torn one may have swallowed a part, so that it looks complete.
        """
        size = os.fstat(fd).st_size
        rest = _read_all(fd, replica.last_start, size)
        at = replica.offset - replica.last_start
        if replica.last_start == 0 and not rest.startswith(FIRST[: len(rest)]):
            raise DistStoreError(f"{self.path}: not a FileStore file; left unchanged")
        if is_complete(rest, at, strict=False):
            return not replica.catch_up(fd, strict=False)  # written by other software
        spans = torn_spans(rest)
        start = spans[0][0]
        ends = [0, *(end for _, end in spans)]
        kept = [rest[end:begin] for end, (begin, _) in zip(ends, [*spans, (len(rest), 0)], strict=True)]
        begin = replica.last_start + start
        if start < at:
            replica.invalidate()
        _replace_tail(fd, begin, b"".join(kept[1:]))
        torn = sum(end - begin for begin, end in spans)
        log.warning(
            "%s: removed %s: %s left by writers that died",
            self.path,
            counted(torn, "byte"),
            counted(len(spans), "incomplete record"),
        )
        return True


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _read_all(fd: int, start: int, end: int) -> bytes:
    pieces = []
    while start < end and (piece := os.pread(fd, end - start, start)):
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)


def _replace_tail(fd: int, at: int, data: bytes) -> None:
    """Replace everything from this offset on."""
    while data:
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written
    os.ftruncate(fd, at)


def _append(fd: int, at: int, data: bytes) -> None:
    """Write all or nothing."""
    rest, end = data, at
    try:
        while rest:
            written = os.pwrite(fd, rest, end)
            rest, end = rest[written:], end + written
    except BaseException:
        try:
            os.ftruncate(fd, at)
        except OSError:
            pass  # the lock or the disk is lost: the next writer removes the torn record
        raise


_FILES: Final["weakref.WeakSet[SharedFile]"] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for file in _FILES:
        file.reset_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
