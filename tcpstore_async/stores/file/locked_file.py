"""The file as one store of this process sees it, with other processes at work on it.

Knows: locks, deadlines, what a writer that died leaves behind. Must not know: keys, commands, what a store is asked.
Invariants: nothing is read or written without a lock on the whole file (flock). A record is written by one write, right
behind a whole one. Nothing is written because of what an older replica said.
"""

import errno
import fcntl
import logging
import os
import random
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from ...coercion import in_milliseconds
from ...deadline import Deadline
from ...errors import DistStoreError, ProtocolError, StoreTimeoutError
from ...keyspace import Keyspace
from ..hash import Alarm
from .records import FIRST, is_complete, sign_off_records, sign_on_records
from .reentrant_lock import FileLock, locked
from .replica import Replica
from .torn_records import torn_spans

T = TypeVar("T")

_SHORTEST_PAUSE: Final = 0.0001
_LONGEST_PAUSE: Final = 0.005
"""Seconds between two tries for the lock."""

_NO_FLOCK: Final = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}

log: Final = logging.getLogger("tcpstore_async.stores")


class Missing(Exception):
    """The file is not there, and nobody waits for it."""


class Backoff:
    """When to try again, until the deadline."""

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline
        self.pause = _SHORTEST_PAUSE

    def pause_or_raise(self, what: str) -> None:
        """Raises StoreTimeoutError, which says what was the matter."""
        left = self.deadline.left()
        if left == 0.0:
            raise StoreTimeoutError(f"{what} for {in_milliseconds(self.deadline.timeout)}ms")
        pause = self.pause * random.uniform(0.5, 1.5)
        time.sleep(pause if left is None else min(pause, left))
        self.pause = min(self.pause * 1.5, _LONGEST_PAUSE)


class SharedFile:
    """The file as one store of this process sees it. Every method raises DistStoreError."""

    def __init__(self, path: str) -> None:
        self.path: Final = os.path.abspath(path)
        self.pid: Final = os.getpid()
        self._complained = False
        self._joined: list[int] = []
        """A descriptor of the file that was joined, so that no other one gets its inode; none once it is left.

        A list, because taking it out is one step: of two that sign off at once, one does.
        """
        self.renew()
        _FILES.add(self)

    def renew(self) -> None:
        """Forget everything that was read."""
        self._lock = threading.RLock()
        """Guards the replica. Taken after the file's, and held by nobody who waits for anything."""
        self._user: int | None = None
        """The thread that holds it."""
        self._replica = Replica()

    def read(self, look: Callable[[Keyspace], T], deadline: Deadline) -> T:
        """Look at what the file holds, twice perhaps."""
        whole = False

        def act(lock: FileLock) -> T:
            nonlocal whole
            with self._common(lock) as replica:
                whole = replica.catch_up(lock.fd)
                return look(replica.keyspace)

        result = self._locked(os.O_RDONLY, deadline, act)
        if not whole and self._mend(deadline):
            return self._locked(os.O_RDONLY, deadline, act)
        return result

    def write(self, decide: Callable[[Keyspace], tuple[T, bytes]], deadline: Deadline, create: bool = True) -> T:
        """Look at what the file holds, and write records because of it."""
        flags = os.O_RDWR | os.O_CREAT if create else os.O_RDWR
        return self._locked(flags, deadline, lambda lock: self._write(lock, decide))

    def sign_on(self, round_size: int, deadline: Deadline) -> None:
        """Count one store more, in a new file if an earlier round of that size, unless it is 0, is done with this."""

        def act(lock: FileLock) -> bool:
            self._let_go()
            self._joined.append(os.open(self.path, os.O_RDONLY))
            may = self._sign(lock, lambda keyspace: sign_on_records(keyspace, round_size))
            if not may and not lock.lost:
                _unlink(self.path)
            return may

        try:
            while not self._locked(os.O_RDWR | os.O_CREAT, deadline, act):
                pass
        except BaseException:
            self._let_go()
            raise

    def sign_off(self, world_size: int, deadline: Deadline) -> None:
        """Count one store less, if the file is still the one that was joined; the last one of a world removes it.

        Does nothing if that is done. If it fails it may be tried again.
        """
        try:
            joined = self._joined.pop()
        except IndexError:
            return
        done = False

        def act(lock: FileLock) -> None:
            nonlocal done
            if not os.path.samestat(os.fstat(lock.fd), os.fstat(joined)):
                return
            try:
                last = self._sign(lock, lambda keyspace: sign_off_records(keyspace, world_size))
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
            self._joined.append(joined)
            if done:
                self._let_go()

    def forked(self) -> None:
        """Be the file in a forked child, where nobody holds the lock and nobody signs off."""
        self.renew()
        self._let_go()

    def _let_go(self) -> None:
        while self._joined:
            os.close(self._joined.pop())

    def signature(self) -> object:
        """Something that is another thing once the file has changed."""
        try:
            found = os.stat(self.path)
        except OSError as error:
            return error.errno
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def forget(self, keyspace: Keyspace, alarm: Alarm) -> None:
        """A thread no longer waits for what it was parked on."""
        if self._user == threading.get_ident():
            return
        with self._lock:
            self._user = threading.get_ident()
            try:
                keyspace.leave(alarm.waiter)
            finally:
                self._user = None

    def _locked(self, flags: int, deadline: Deadline, act: Callable[[FileLock], T], patient: bool = True) -> T:
        """Do something while the file is locked, from the start again if another call has taken the lock meanwhile."""
        deadline = deadline if deadline.timeout else Deadline.of_a_call(0)
        while True:
            lock = FileLock()
            try:
                with locked() as lock:
                    self._open(lock, flags, Backoff(deadline), patient)
                    result = act(lock)
                if lock.written or not lock.lost:
                    return result
            except Exception as error:
                if lock.lost and not lock.written:
                    continue
                if isinstance(error, OSError):
                    raise DistStoreError(f"{self.path}: {error.strerror or error}") from error
                raise

    def _open(self, lock: FileLock, flags: int, tries: Backoff, patient: bool) -> None:
        """Open the file that is there now, and lock it: for itself alone if it may be written."""
        kind = fcntl.LOCK_EX if flags & os.O_RDWR else fcntl.LOCK_SH
        while True:
            lock.lost = False
            try:
                lock.fd = os.open(self.path, flags | os.O_NONBLOCK, 0o644)
            except FileNotFoundError:
                if not patient:
                    raise Missing from None
                tries.pause_or_raise(f"{self.path}: {self._what_is_missing()}")
                continue
            self._wait_for_lock(lock.fd, kind, tries)
            if self._is_there(lock.fd):
                return
            fd, lock.fd = lock.fd, -1
            os.close(fd)

    def _what_is_missing(self) -> str:
        """Said in an error's text; a directory is logged at once, too, for the error may be minutes away."""
        folder = os.path.dirname(self.path)
        if os.path.isdir(folder):
            return "No such file or directory"
        if not self._complained:
            self._complained = True
            log.warning("%s: there is no directory %s; waiting for it until the timeout", self.path, folder)
        return f"No such directory: {folder}"

    def _wait_for_lock(self, fd: int, kind: int, tries: Backoff) -> None:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EISDIR, "Is a directory, or something else that is no file")
        while True:
            try:
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                tries.pause_or_raise(f"{self.path}: others have held the lock on it")
            except OSError as error:
                if error.errno in _NO_FLOCK:
                    raise DistStoreError(
                        f"{self.path}: its file system has no flock, which a FileStore cannot do without "
                        f"({error.strerror})"
                    ) from error
                raise

    def _is_there(self, fd: int) -> bool:
        """Whether it is still this file that has the name."""
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self.path))
        except FileNotFoundError:
            return False

    @contextmanager
    def _common(self, lock: FileLock) -> Iterator[Replica]:
        """The replica that the threads of this process share, or one to be thrown away if this one is in use here."""
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
            with self._common(lock) as replica:
                if replica.catch_up(lock.fd) or not self._cut_off(lock.fd, replica):
                    result, data = decide(replica.keyspace)
                    if data:
                        _append(lock.fd, replica.offset, data)
                        lock.written = True
                        replica.apply(data)
                    return result

    def _sign(self, lock: FileLock, decide: Callable[[Keyspace], tuple[bool, bytes]]) -> bool:
        """As `_write`, for what counts stores: there may be text in place of a number."""
        try:
            return self._write(lock, decide)
        except ProtocolError:
            raise DistStoreError(
                f"{self.path} was not written by a FileStore: its count of stores is no number"
            ) from None

    # Damage

    def _mend(self, deadline: Deadline) -> bool:
        """Cut off what a writer left that died; False if this process may only read the file."""
        if not os.access(self.path, os.W_OK):
            return False
        self.write(lambda keyspace: (None, b""), deadline, create=False)
        return True

    def _cut_off(self, fd: int, replica: Replica) -> bool:
        """Remove the torn records behind the replica's last one; whether there is more to be read.

        Nobody writes, for the file is locked: who has written them is dead. If one of PyTorch's stores has written
        since, which does so without a look, then whole records follow, and perhaps a torn one has swallowed a part of
        them and looks like a whole one.
        """
        size = os.fstat(fd).st_size
        rest = _read_all(fd, replica.last, size)
        at = replica.offset - replica.last
        if replica.last == 0 and not rest.startswith(FIRST[: len(rest)]):
            raise DistStoreError(f"{self.path} was not written by a FileStore; it is left as it is")
        if is_complete(rest, at, strict=False):
            return not replica.catch_up(fd, strict=False)  # a stranger's, as it seems
        spans = torn_spans(rest)
        start = spans[0][0]
        ends = [0, *(end for _, end in spans)]
        kept = [rest[end:begin] for end, (begin, _) in zip(ends, [*spans, (len(rest), 0)], strict=True)]
        begin = replica.last + start
        if start < at:
            replica.discard()
        _move(fd, begin, b"".join(kept[1:]))
        torn = sum(end - begin for begin, end in spans)
        what = (
            "a record that a writer left when it died" if len(spans) == 1 else f"{len(spans)} records of dead writers"
        )
        log.warning("%s: cut off %d bytes of %s", self.path, torn, what)
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


def _move(fd: int, at: int, data: bytes) -> None:
    """Have the file end with this, at this place."""
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
            pass  # the lock was lost, or the disk is: the next writer cuts it off
        raise


_FILES: Final["weakref.WeakSet[SharedFile]"] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for file in _FILES:
        file.forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
