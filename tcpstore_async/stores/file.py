"""FileStore: the store whose keys are in a file, in PyTorch's format, so that its processes and ours can share one.

Knows: the format, whose turn it is with the file, who has died while it was his, how the file goes away. Must not know:
what a command means, which is the keyspace's.
Invariants: nothing is read or written without a lock on the whole file (flock). A record is written by one write, right
behind a whole one. What is in a replica is what the file holds up to its offset, and nothing is written because of what
an older replica said.

A file is a row of records: length of the key, key, length of the value, value; lengths are u32, little-endian. The last
record of a key counts. PyTorch's are:

    `/` + key           a value
    `-/` + key          the key is gone; empty
    `refcount/`         how many stores have the file open, in decimal
    `cleanup/`          how many have closed it

PyTorch's stores have no queues. Ours are two kinds of records more; PyTorch takes them for values that nobody asks for:

    `+/` + key          an item, at the end of the queue
    `</` + key          the first item is taken; empty

A signal handler, or a finalizer that the garbage collector calls, may use a store while its own thread is in the middle
of something, with the file locked: waiting for that lock would be for ever. So it takes the lock from the call that it
interrupts and does without the common replica; the interrupted call finds its descriptor dead and starts again.
"""

import errno
import fcntl
import logging
import os
import random
import re
import stat
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from struct import Struct
from typing import Any, Final, TypeVar

from ..arguments import Text, Timeout, in_milliseconds, to_bytes, to_bytes_list, to_int64, to_pairs
from ..blob import pack, unpack
from ..client.calls import names_of
from ..client.deadline import Deadline
from ..errors import DistStoreError, ProtocolError, QueueEmptyError, StoreTimeoutError
from ..keyspace import Keyspace
from .base import DEFAULT_TIMEOUT, Store
from .hash import UNLIMITED, Alarm, no_number, wait_timeout

T = TypeVar("T")

_LENGTH: Final = Struct("<I")
_LONGEST: Final = 2**32 - 1

_REFERENCES: Final = b"refcount/"
_CLOSED: Final = b"cleanup/"
_GONE: Final = b"-"
_PUSHED: Final = b"+"
_POPPED: Final = b"<"

_POLL_SECONDS: Final = 0.01
"""How often one who waits looks whether the file has changed, as PyTorch's."""

_ONE_LOOK: Final = 1.0
"""Seconds that a call may take to get at the file when the timeout is 0: that means one look, not none."""

_FAREWELL_SECONDS: Final = 10.0
"""How long a store that is collected, or left at exit, tries to sign off."""

_SHORTEST_PAUSE: Final = 0.0001
_LONGEST_PAUSE: Final = 0.005
"""Seconds between two tries for the lock."""

_CHUNK: Final = 1 << 20
"""Bytes that are read at once, unless a record is longer."""

_SEAM: Final = 64
"""Bytes before the offset by which a replica knows its file again: another one may get the same inode."""

_NO_FLOCK: Final = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}

log: Final = logging.getLogger("tcpstore_async.stores")


# Records


def _record(key: bytes, value: bytes) -> bytes:
    if max(len(key), len(value)) > _LONGEST:
        raise ValueError(f"key or value is too long for a FileStore, which takes up to {_LONGEST} bytes")
    return b"".join((_LENGTH.pack(len(key)), key, _LENGTH.pack(len(value)), value))


_FIRST: Final = _LENGTH.pack(len(_REFERENCES)) + _REFERENCES
"""What every file begins with."""

_KEY: Final = re.compile(rb"[-+<]?/|(?:refcount|cleanup)/\Z")
"""How keys begin that a store has written."""

_HEADER: Final = re.compile(rb"(?=....(?:[-+<]?/|refcount/|cleanup/))", re.DOTALL)
"""Where a record may begin."""


def _next_record(data: bytes, at: int) -> tuple[bytes, bytes, int] | None:
    """Key, value and end of the record at this place; None if it is not all there."""
    key_at = at + _LENGTH.size
    if key_at > len(data):
        return None
    key_end = key_at + int(_LENGTH.unpack_from(data, at)[0])
    value_at = key_end + _LENGTH.size
    if value_at > len(data):
        return None
    end = value_at + int(_LENGTH.unpack_from(data, key_end)[0])
    if end > len(data):
        return None
    return data[key_at:key_end], data[value_at:end], end


def _is_whole(data: bytes, at: int, strict: bool = True) -> bool:
    """Whether there is nothing but whole records from here to the end; if it is `strict`, with keys of stores."""
    while at < len(data):
        found = _next_record(data, at)
        if found is None or (strict and not _KEY.match(found[0])):
            return False
        at = found[2]
    return True


def _torn(data: bytes) -> int:
    """How many bytes at the beginning of this, which is damaged, are the rest of a record; all if nothing follows."""
    for found in _HEADER.finditer(data, 1):
        if _is_whole(data, found.start()):
            return found.start()
    return len(data)


def _outcome(keyspace: Keyspace, name: bytes, command: Callable[[Keyspace], T]) -> tuple[T, bytes]:
    """What a command on one key returns, and the record of what it makes of that key. Nothing is changed by this."""
    trial = Keyspace(UNLIMITED)
    old = keyspace.values.get(name)
    if old is not None:
        trial.values[name] = old
    result = command(trial)
    unchanged = trial.values.get(name) is old
    return result, b"" if unchanged else _record(name, unpack(trial.get(name)))


class _Replica:
    """What the file holds, up to an offset."""

    def __init__(self) -> None:
        self.keyspace: Final = Keyspace(UNLIMITED)
        self.offset = 0
        self.last = 0
        """Where the record before the offset begins."""
        self._inode: tuple[int, int] | None = None
        self._seam = b""
        """The last bytes before the offset."""
        self._whole = True
        """False while records are applied; if that is interrupted, nobody knows how many were."""

    def is_of(self, fd: int) -> bool:
        """Whether the beginning of this file is what is here."""
        found = os.fstat(fd)
        if not self._whole or found.st_size < self.offset:
            return False
        if self._inode is None:
            self._inode = found.st_dev, found.st_ino
        if self._inode != (found.st_dev, found.st_ino):
            return False
        return os.pread(fd, len(self._seam), self.offset - len(self._seam)) == self._seam

    def catch_up(self, fd: int, strict: bool = True) -> bool:
        """Apply what has been written since; whether nothing but whole records was found.

        If it is `strict`, a key that no store has written is a sign that a record is torn.
        """
        size = os.fstat(fd).st_size
        length = _CHUNK
        while self.offset < size:
            data = os.pread(fd, min(length, size - self.offset), self.offset)
            if not data:
                raise OSError(errno.EIO, "it became shorter while it was locked")
            if self.apply(data, strict):
                length = _CHUNK
            elif len(data) == size - self.offset or (strict and _next_record(data, 0)):
                return False
            else:
                length *= 2
        return True

    def apply(self, data: bytes, strict: bool = False) -> bool:
        """Apply the whole records at the beginning of what stands behind the offset; whether there is one."""
        self._whole = False
        at = last = 0
        while (found := _next_record(data, at)) is not None:
            key, value, end = found
            if strict and not _KEY.match(key):
                break
            self._apply(key, value)
            last, at = at, end
        if at:
            self.last = self.offset + last
            self.offset += at
            self._seam = (self._seam + data[max(0, at - _SEAM) : at])[-_SEAM:]
        self._whole = True
        return at > 0

    def discard(self) -> None:
        """What is here is not to be trusted any more."""
        self._whole = False

    def _apply(self, key: bytes, value: bytes) -> None:
        kind = key[:1]
        if kind == _GONE:
            self.keyspace.delete_key(key[1:])
        elif kind == _PUSHED:
            self.keyspace.queue_push(key[1:], pack(value))
        elif kind == _POPPED:
            self.keyspace.queue_pop(key[1:])
        else:
            self.keyspace.set(key, pack(value))


# Turns


class _Turn:
    """The file, open and locked for one call."""

    def __init__(self) -> None:
        self.fd = -1
        self.lost = False
        """Another call, which has interrupted this one, has taken the lock."""
        self.written = False

    def give_up(self) -> None:
        """Let go of the lock, whatever the interrupted call is about to do with its descriptor."""
        self.lost = True
        if self.fd < 0:
            return
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, self.fd, inheritable=False)
        os.close(nothing)


_turns: Final[dict[int, list[_Turn]]] = {}
"""Of every thread, those that are under way: several if one has interrupted another."""


@contextmanager
def _registered() -> Iterator[_Turn]:
    """A turn of this thread. Those that it interrupts are lost."""
    thread = threading.get_ident()
    turns = _turns.setdefault(thread, [])
    for other in turns:
        other.give_up()
    turn = _Turn()
    turns.append(turn)
    try:
        yield turn
    finally:
        # Unlocked before it is forgotten, for one that interrupts this to find; not by closing alone, for a forked
        # child may have a copy.
        if turn.fd >= 0:
            fcntl.flock(turn.fd, fcntl.LOCK_UN)
        turns.remove(turn)
        if not turns:
            _turns.pop(thread, None)
        if turn.fd >= 0:
            os.close(turn.fd)


class _Missing(Exception):
    """The file is not there, and nobody waits for it."""


class _Tries:
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


class _File:
    """The file as one store of this process sees it. Every method raises DistStoreError."""

    def __init__(self, path: str) -> None:
        self.path: Final = os.path.abspath(path)
        self.pid: Final = os.getpid()
        self._complained = False
        self.renew()
        _FILES.add(self)

    def renew(self) -> None:
        """Forget everything; for a forked child, too, where nobody holds the lock."""
        self._lock = threading.RLock()
        """Guards the replica. Taken after the file's, and held by nobody who waits for anything."""
        self._user: int | None = None
        """The thread that holds it."""
        self._replica = _Replica()

    def read(self, look: Callable[[Keyspace], T], deadline: Deadline) -> T:
        """Look at what the file holds, twice perhaps."""
        whole = False

        def act(turn: _Turn) -> T:
            nonlocal whole
            with self._common(turn) as replica:
                whole = replica.catch_up(turn.fd)
                return look(replica.keyspace)

        result = self._in_turn(os.O_RDONLY, deadline, act)
        if not whole and self._mend(deadline):
            return self._in_turn(os.O_RDONLY, deadline, act)
        return result

    def write(self, decide: Callable[[Keyspace], tuple[T, bytes]], deadline: Deadline, create: bool = True) -> T:
        """Look at what the file holds, and write records because of it."""
        flags = os.O_RDWR | os.O_CREAT if create else os.O_RDWR
        return self._in_turn(flags, deadline, lambda turn: self._write(turn, decide))

    def sign_off(self, world_size: int, deadline: Deadline) -> None:
        """Count one store less; the last one of a world removes the file."""

        def act(turn: _Turn) -> None:
            if self._write(turn, lambda keyspace: _signed_off(keyspace, world_size)) and not turn.lost:
                _unlink(self.path)

        try:
            self._in_turn(os.O_RDWR, deadline, act, patient=False)
        except _Missing:
            pass  # as in PyTorch

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

    def _in_turn(self, flags: int, deadline: Deadline, act: Callable[[_Turn], T], patient: bool = True) -> T:
        """Do something while the file is locked, from the start again if another call has taken the lock meanwhile."""
        deadline = deadline if deadline.timeout else Deadline(_ONE_LOOK)
        while True:
            turn = _Turn()
            try:
                with _registered() as turn:
                    self._open(turn, flags, _Tries(deadline), patient)
                    result = act(turn)
                if turn.written or not turn.lost:
                    return result
            except Exception as error:
                if turn.lost and not turn.written:
                    continue
                if isinstance(error, OSError):
                    raise DistStoreError(f"{self.path}: {error.strerror or error}") from error
                raise

    def _open(self, turn: _Turn, flags: int, tries: _Tries, patient: bool) -> None:
        """Open the file that is there now, and lock it: for itself alone if it may be written."""
        kind = fcntl.LOCK_EX if flags & os.O_RDWR else fcntl.LOCK_SH
        while True:
            turn.lost = False
            try:
                turn.fd = os.open(self.path, flags | os.O_NONBLOCK, 0o644)
            except FileNotFoundError:
                if not patient:
                    raise _Missing from None
                tries.pause_or_raise(f"{self.path}: {self._what_is_missing()}")
                continue
            self._wait_for_lock(turn.fd, kind, tries)
            if self._is_there(turn.fd):
                return
            fd, turn.fd = turn.fd, -1
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

    def _wait_for_lock(self, fd: int, kind: int, tries: _Tries) -> None:
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
    def _common(self, turn: _Turn) -> Iterator[_Replica]:
        """The replica that the threads of this process share, or one to be thrown away if this one is in use here."""
        thread = threading.get_ident()
        if self._user == thread:
            yield _Replica()
            return
        with self._lock:
            self._user = thread
            try:
                if not self._replica.is_of(turn.fd):
                    self._replica = _Replica()
                yield self._replica
            finally:
                self._user = None

    def _write(self, turn: _Turn, decide: Callable[[Keyspace], tuple[T, bytes]]) -> T:
        while True:
            with self._common(turn) as replica:
                if replica.catch_up(turn.fd) or not self._cut_off(turn.fd, replica):
                    result, data = decide(replica.keyspace)
                    if data:
                        _append(turn.fd, replica.offset, data)
                        turn.written = True
                        replica.apply(data)
                    return result

    # Damage

    def _mend(self, deadline: Deadline) -> bool:
        """Cut off what a writer left that died; False if this process may only read the file."""
        if not os.access(self.path, os.W_OK):
            return False
        self.write(lambda keyspace: (None, b""), deadline, create=False)
        return True

    def _cut_off(self, fd: int, replica: _Replica) -> bool:
        """Remove the torn record behind the replica's last one; whether there is more to be read.

        Nobody writes, for the file is locked: who has written it is dead. If one of PyTorch's stores has written since,
        which does so without a look, then whole records follow, and perhaps the torn one has swallowed a part of them
        and looks like a whole one.
        """
        start, size = replica.offset, os.fstat(fd).st_size
        rest = _read_all(fd, replica.last, size)
        at = start - replica.last
        if replica.last == 0 and not rest.startswith(_FIRST[: len(rest)]):
            raise DistStoreError(f"{self.path} was not written by a FileStore; it is left as it is")
        if _is_whole(rest, at, strict=False):
            return not replica.catch_up(fd, strict=False)  # a stranger's, as it seems
        torn = _torn(rest)
        if torn < at:
            start, at = replica.last, 0
            replica.discard()
        _move(fd, start, rest[torn:])
        torn -= at
        log.warning("%s: cut off %d bytes of a record that a writer left when it died", self.path, torn)
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


def _signed_off(keyspace: Keyspace, world_size: int) -> tuple[bool, bytes]:
    """Whether nobody is left, and the records that say that a store has gone."""
    closed, first = _outcome(keyspace, _CLOSED, lambda trial: trial.add(_CLOSED, 1))
    left, second = _outcome(keyspace, _REFERENCES, lambda trial: trial.add(_REFERENCES, -1))
    return 0 <= world_size <= closed and left == 0, first + second


def _farewell(file: _File, world_size: int) -> None:
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

    A store that is not closed is closed when it is collected, or at exit. In a forked child it can be used, but counts
    as its parent's.
    """

    def __init__(
        self, file_name: str | os.PathLike[str], world_size: int = -1, *, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> None:
        self._closed = True
        super().__init__(timeout)
        self._path = _to_path(file_name)
        self._world_size = to_int64("world_size", world_size)
        self._file = _File(self._path)
        self._file.write(
            lambda keyspace: _outcome(keyspace, _REFERENCES, lambda trial: trial.add(_REFERENCES, 1)), self._deadline()
        )
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
        """Sign off; the last one removes the file."""
        self._closed = True
        if self._farewell.detach() and os.getpid() == self._file.pid:
            self._file.sign_off(self._world_size, self._deadline())

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
        data = _record(_name(key), to_bytes("value", value))
        self._write(lambda keyspace: (None, data))

    def get(self, key: Text) -> bytes:
        return self._get([_name(key)])[0]

    def add(self, key: Text, amount: int) -> int:
        name, number = _name(key), to_int64("amount", amount)
        try:
            return self._write(lambda keyspace: _outcome(keyspace, name, lambda trial: trial.add(name, number)))
        except ProtocolError:
            raise no_number(name[1:]) from None

    def compare_set(self, key: Text, expected: Text, desired: Text) -> bytes:
        name = _name(key)
        old, new = pack(to_bytes("expected", expected)), pack(to_bytes("desired", desired))
        found = self._write(lambda keyspace: _outcome(keyspace, name, lambda trial: trial.compare_set(name, old, new)))
        return unpack(found)

    def append(self, key: Text, value: Text) -> None:
        name, more = _name(key), pack(to_bytes("value", value))
        self._write(lambda keyspace: _outcome(keyspace, name, lambda trial: trial.append(name, more)))

    def check(self, keys: Iterable[Text]) -> bool:
        names = _names(keys)
        return self._read(lambda keyspace: keyspace.check(names))

    def delete_key(self, key: Text) -> bool:
        name = _name(key)

        def decide(keyspace: Keyspace) -> tuple[bool, bytes]:
            there = name in keyspace.values
            return there, _record(_GONE + name, b"") if there else b""

        self._must_be_open()
        return self._file.write(decide, self._deadline(), create=False)

    def num_keys(self) -> int:
        return self._read(lambda keyspace: keyspace.num_keys())

    def list_keys(self) -> list[str]:
        return names_of(self._read(lambda keyspace: keyspace.list_keys()))

    def multi_get(self, keys: Iterable[Text]) -> list[bytes]:
        return self._get(_names(keys))

    def multi_set(self, keys: Iterable[Text], values: Iterable[Text]) -> None:
        pairs = to_pairs(_names(keys), to_bytes_list("values", values))
        data = b"".join([_record(name, value) for name, value in pairs])
        self._write(lambda keyspace: (None, data))

    def has_extended_api(self) -> bool:
        return True

    # Queues

    def queue_push(self, key: Text, value: Text) -> None:
        data = _record(_PUSHED + _name(key), to_bytes("value", value))
        self._write(lambda keyspace: (None, data))

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        name = _name(key)
        deadline = self._deadline()

        def decide(keyspace: Keyspace) -> tuple[tuple[bytes | None, bool], bytes]:
            queue = keyspace.queues.get(name)
            if queue is None:
                return (None, name in keyspace.values), b""
            return (unpack(queue[0]), False), _record(_POPPED + name, b"")

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
    if "\0" in path:
        raise ValueError("file_name must have no NUL in it")
    return path


def _name(key: Text) -> bytes:
    return b"/" + to_bytes("key", key)


def _names(keys: Iterable[Text]) -> list[bytes]:
    return [b"/" + key for key in to_bytes_list("keys", keys)]


_FILES: Final["weakref.WeakSet[_File]"] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """The turns of the parent's other threads are not this process's, and their locks are theirs to give back."""
    here = threading.get_ident()
    for thread, turns in list(_turns.items()):
        for turn in turns:
            if thread == here:
                turn.give_up()
            elif turn.fd >= 0:
                os.close(turn.fd)
        if thread != here:
            del _turns[thread]
    for file in _FILES:
        file.renew()


os.register_at_fork(after_in_child=_after_fork_in_child)
