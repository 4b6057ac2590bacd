"""The files of a journal: a directory that one server holds.

    LOCK               locked by that server
    instance           which journal it is, and what it depends on, in JSON
    snapshot-00000003  the state behind all segments before this one
    log-00000003       segments, in order
    next               a segment of zeros, made ahead; `made` until it is whole

Writing over zeros that are on the disk changes no metadata, so a sync costs less, and a full disk is noticed early:
`shortage` says what may still be written.
This module must not know what an event is, nor the engine.

Invariants: files are the user's only. `append` returns when the record is with the kernel or, if the journal is synced,
on the disk. After an error nothing more is written.
"""

import errno
import fcntl
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from ..base.mypyc_shim import mypyc_attr
from .encoding import JournalError
from .records import HEADER_BYTES, Chain, Reader, Record, Snapshot, decode_snapshot

SEGMENT_BYTES: Final = 8 << 20

_ZEROS: Final = bytes(1 << 20)

_SEGMENT: Final = "log-"
_SNAPSHOT: Final = "snapshot-"
"""What the names of files begin with."""

_UNFINISHED: Final = "snapshot"
"""The name of a snapshot while it is written."""

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class Instance(msgspec.Struct):
    """What is known of a journal besides its records."""

    instance: str
    sync: bool
    boot: str
    """Since when the machine has run; empty if that is not known."""
    settings: dict[str, str]
    """What the server must have in common with those that wrote the records."""
    ended: bool = False
    """Whether the stores have ended for good: what is left of the records is to be removed."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Journal:
    """Reads the records of a directory, then appends to them."""

    def __init__(
        self,
        folder: Path,
        sync: bool,
        settings: dict[str, str] | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """Lock the directory, which is made if need be.

        With `sync`, records survive the machine; those of before its start that were written without it are removed.
        Records can be read only with the `settings` with which they were written. Raises JournalError, also for an
        OSError.
        """
        self.folder = folder
        self.sync = sync
        self.segment_bytes = segment_bytes
        self.chain = Chain()
        self.snapshot: Snapshot | None = None
        """The last one, until `read` is called."""
        self.complete: dict[int, int] = {}
        """The size of each segment that is complete, by its number, until a snapshot makes it unnecessary."""
        self.on_complete: Callable[[], object] | None = None
        """Called with each further one."""
        self._fd = -1
        self._at = 0
        """Where the next record goes, in the segment."""
        self._size = 0
        """Of the segment, in bytes."""
        self._count = 0
        """The number of the next segment."""
        self._ahead: threading.Thread | None = None
        self.spare = False
        """Whether the next segment is made."""
        self.refused: str = ""
        """Why it could not be made; empty if it is, or is being made for the first time."""
        self.on_made: Callable[[], object] = _nothing
        """Called in a thread whenever making it has succeeded or failed."""
        self.failed: int = 0
        """The errno of the first error; 0 if there was none."""
        self.cut: int = 0
        """Bytes of a record that was not whole, at the end, which `read` has cut."""
        self.outdated = False
        """Whether records were removed that might not be whole, as the machine has started again."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError(f"cannot use the directory {folder}: {error.strerror}") from None
        try:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise JournalError(f"another server holds {folder}") from None
            self.instance = self._identify(settings or {})
            self.snapshot = read_snapshot(folder)
        except BaseException:
            os.close(self._lock)
            raise

    def _identify(self, settings: dict[str, str]) -> str:
        """Return the name of the journal, a new one where there are no records to read."""
        path = self.folder / "instance"
        try:
            found: Instance | None = read_instance(self.folder)
        except FileNotFoundError:
            found = None
        segments = [*snapshots_of(self.folder), *segments_of(self.folder)]
        if found is None and segments:
            raise JournalError(f"{self.folder} has segments, but no file named instance")
        try:
            boot = _BOOT.read_text().strip()
        except OSError:
            boot = ""
        if found is not None and segments and not found.sync and found.boot != boot and not found.ended:
            self.outdated = True
            self._discard(found)
            found, segments = None, []
        elif found is not None and found.ended:
            self._discard(found)
            found, segments = None, []
        if found is not None and segments:
            for name, value in settings.items():
                if found.settings.get(name) != value:
                    raise JournalError(
                        f"{self.folder} was written by a server with {name}={found.settings.get(name)}, and this one "
                        f"has {name}={value}: start with the same, or with another directory"
                    )
        instance = secrets.token_hex(8) if found is None else found.instance
        wanted = Instance(instance, self.sync, boot, settings)
        if found != wanted:
            try:
                if found is not None and self.sync and not found.sync:
                    for segment in segments:
                        _sync_file(segment)
                self._make(path, [msgspec.json.encode(wanted), b"\n"])
                self._sync_folder()
            except OSError as error:
                raise JournalError(f"cannot write {path}: {error.strerror}") from None
        return instance

    # Reading

    def read(self) -> Iterator[Record]:
        """Yield all records behind the snapshot; the next one is appended behind them, over what is torn.

        Raises JournalError.
        """
        reader = Reader(self.snapshot)
        self.snapshot = None
        self._trim(reader.first)
        yield from read_records(self.folder, reader)
        segments = segments_of(self.folder, reader.first)
        self.chain = reader.chain
        self._count = reader.first + len(segments)
        if segments:
            self.complete = {_number(path): path.stat().st_size for path in segments[:-1]}
            self._reopen(segments[-1], reader.end, reader.torn)
            self.cut = reader.torn
            self.spare = (self.folder / "next").exists()
            if not self.spare:
                self.make_ahead()

    def trim(self) -> None:
        """Remove what the last snapshot makes unnecessary. From any thread."""
        self._trim(max([_number(path) for path in snapshots_of(self.folder)], default=0))

    def _trim(self, first: int) -> None:
        for path in (*snapshots_of(self.folder), *segments_of(self.folder)):
            if _number(path) < first:
                if path.name.startswith(_SEGMENT):
                    self.complete.pop(_number(path), None)
                path.unlink(missing_ok=True)

    def _reopen(self, path: Path, end: int, torn: int) -> None:
        """Append to a segment from `end` on. What is torn there is cut, as the next record may not fit there."""
        try:
            self._open(path, end)
            if torn:
                self._write(bytes(torn))
                self._at = end
                self._sync_data()
        except OSError as error:
            raise JournalError(f"cannot write {path}: {error.strerror}") from None

    # Writing

    def append(self, now: float, outputs: int, events: bytes) -> None:
        """Write a record. Raises OSError; then nothing more may be written, as what is on the disk is not known."""
        if self.failed:
            raise OSError(self.failed, os.strerror(self.failed))
        try:
            chain = self.chain
            if self._fd < 0:
                self._begin(0)
            before = chain.number, chain.crc
            record = chain.record(now, outputs, events)
            if self._at + len(record) > self._size:
                chain.number, chain.crc = before
                self._begin(HEADER_BYTES + len(record))
                record = chain.record(now, outputs, events)
            self._write(record)
            self._sync_data()
        except OSError as error:
            self.failed = error.errno or errno.EIO
            raise

    def shortage(self) -> int:
        """Return what the disk has space for: 0 for anything, 1 for what is small, 2 for what cannot be avoided.

        While the next segment is not made, the rest of this one is all that there is.
        """
        if self.spare or self._fd < 0:
            return 0
        left = self._size - self._at
        if left < self.segment_bytes // 4:
            return 2
        return int(bool(self.refused) or left < self.segment_bytes // 2)

    def _begin(self, at_least: int) -> None:
        """Begin the next segment."""
        path, made = self.folder / _name(self._count), self.folder / "next"
        if path.exists():
            raise FileExistsError(errno.EEXIST, "the records have not been read", str(path))
        self._finish_ahead()
        if not made.exists() or made.stat().st_size < at_least:
            self._make(made, _zeros(max(at_least, self.segment_bytes)))
        if self._fd >= 0:
            self.complete[self._count - 1] = self._size
        self._open(made, 0)
        self._write(self.chain.header())
        self._sync_data()
        made.rename(path)
        self._sync_folder()
        self._count += 1
        self.spare = False
        self.refused = ""
        self.make_ahead()
        if self.on_complete is not None and self.complete:
            self.on_complete()

    def make_ahead(self) -> None:
        """Make the next segment in a thread, unless that is under way."""
        if self._ahead is None or not self._ahead.is_alive():
            self._ahead = threading.Thread(target=self._make_ahead, name="tcpstore journal", daemon=True)
            self._ahead.start()

    def _open(self, path: Path, at: int) -> None:
        self._close_segment()
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._size = os.fstat(self._fd).st_size
        self._at = at

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            count = os.pwrite(self._fd, view, self._at)
            self._at += count
            view = view[count:]

    def _make_ahead(self) -> None:
        try:
            self._make(self.folder / "next", _zeros(self.segment_bytes))
            self.spare = True
            self.refused = ""
        except OSError as error:
            self.refused = error.strerror or str(error)
        self.on_made()

    def _make(self, path: Path, parts: Iterable[bytes]) -> None:
        _make_whole(path, self.folder / "made", parts, self.sync)

    def _finish_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.join()
            self._ahead = None

    def _close_segment(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _sync_data(self) -> None:
        if self.sync:
            os.fdatasync(self._fd)

    def _sync_folder(self) -> None:
        if self.sync:
            _sync_file(self.folder)

    # The end

    def seal(self, now: float, state: bytes) -> None:
        """Keep the present state instead of all records; those that follow begin a segment. Raises OSError."""
        write_snapshot(self.folder, Snapshot(self._count, self.chain.number, self.chain.crc, now, state))
        self._close_segment()
        self.trim()

    def close(self) -> None:
        """Let another server have the directory. Idempotent."""
        self._finish_ahead()
        self._close_segment()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def remove(self) -> None:
        """Remove what the journal has written: its stores have ended for good. Then close it."""
        self._finish_ahead()
        self._discard(Instance(self.instance, self.sync, "", {}))
        self.close()

    def _discard(self, instance: Instance) -> None:
        """Remove all records. Whoever finds only some of them removed goes on with that."""
        path = self.folder / "instance"
        instance.ended = True
        with suppress(OSError):  # a full disk must not keep them
            self._make(path, [msgspec.json.encode(instance), b"\n"])
            self._sync_folder()
        files = [self.folder / name for name in ("next", "made", _UNFINISHED)]
        for one in (*snapshots_of(self.folder), *segments_of(self.folder), *files, path):
            one.unlink(missing_ok=True)


def _make_whole(path: Path, made: Path, parts: Iterable[bytes], sync: bool) -> None:
    """Make a whole file, or none; `made` is its name until then. Raises OSError."""
    fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with open(fd, "wb", 0) as file:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a process that has lost its server may still be at it
        os.fchmod(fd, 0o600)
        try:
            file.truncate(0)
            for part in parts:
                view = memoryview(part)
                while view:
                    view = view[file.write(view) :]
            if sync:
                os.fsync(fd)
            made.rename(path)
        except OSError:
            with suppress(OSError):  # others may need the space
                made.unlink(missing_ok=True)
            raise


def _sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def segments_of(folder: Path, first: int = 0) -> list[Path]:
    """Return the segments of a journal in order, from this number on."""
    return [path for path in sorted(folder.glob(_SEGMENT + "[0-9]" * 8)) if _number(path) >= first]


def snapshots_of(folder: Path) -> list[Path]:
    """Return the snapshots of a journal, in order."""
    return sorted(folder.glob(_SNAPSHOT + "[0-9]" * 8))


def read_instance(folder: Path) -> Instance:
    """Return what is known of a journal. Raises FileNotFoundError, and JournalError."""
    path = folder / "instance"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Instance)
    except FileNotFoundError:
        raise
    except (OSError, msgspec.MsgspecError) as error:
        raise JournalError(f"cannot read {path}: {error}") from None


def read_snapshot(folder: Path) -> Snapshot | None:
    """Return the last snapshot of a journal, which may be another server's. Raises JournalError."""
    paths = snapshots_of(folder)
    if not paths:
        return None
    path = paths[-1]
    try:
        found = decode_snapshot(path.read_bytes())
    except OSError as error:
        raise JournalError(f"cannot read {path}: {error.strerror}") from None
    except JournalError as error:
        raise JournalError(f"{path}: {error}") from None
    if found.segment != _number(path):
        raise JournalError(f"{path} is the snapshot before segment {found.segment}")
    return found


def write_snapshot(folder: Path, snapshot: Snapshot) -> None:
    """Make the file of a snapshot, on the disk. Raises OSError, also while another process makes one."""
    _make_whole(folder / f"{_SNAPSHOT}{snapshot.segment:08}", folder / _UNFINISHED, snapshot.encode(), True)
    _sync_file(folder)


def read_records(folder: Path, reader: Reader, complete: bool = False) -> Iterator[Record]:
    """Yield the records of a journal, which may be another server's, with a reader that has read none.

    If that is so `complete`, leave out the last segment, to which its server may append. Raises JournalError.
    """
    segments = segments_of(folder, reader.first)
    for number, path in enumerate(segments[:-1] if complete else segments):
        if path.name != _name(reader.first + number):
            raise JournalError(f"{folder / _name(reader.first + number)} is missing")
        try:
            yield from reader.read(path.read_bytes())
        except OSError as error:
            raise JournalError(f"cannot read {path}: {error.strerror}") from None
        except JournalError as error:
            raise JournalError(f"{path}: {error}") from None
        if number < len(segments) - 1 and reader.torn:
            raise JournalError(f"{path}: the record at byte {reader.end} is damaged, and later segments follow")


def _nothing() -> None:
    pass


def _name(number: int) -> str:
    return f"{_SEGMENT}{number:08}"


def _number(path: Path) -> int:
    """Return the number of a segment, or of the segment that follows a snapshot."""
    return int(path.name[-8:])


def _zeros(size: int) -> Iterator[bytes]:
    for at in range(0, size, len(_ZEROS)):
        yield _ZEROS[: size - at]
