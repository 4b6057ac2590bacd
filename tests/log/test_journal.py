"""Events as bytes, records, and the files that they fill: what is read is what was written, or nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import struct
import threading
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tcpstore_async.auth.access import Access
from tcpstore_async.log import journal as journal_module
from tcpstore_async.log.encoding import JournalError, decode, encode
from tcpstore_async.log.events import RECEIVE, Event, Evicted, Reference, Reply
from tcpstore_async.log.journal import Journal, read_records, segments_of, snapshots_of, write_snapshot
from tcpstore_async.log.records import HEADER_BYTES, REPLAY, Chain, Reader, Record, Snapshot, decode_snapshot

# Events

TEXT = st.text(max_size=5)
ACCESS = st.builds(Access, TEXT, st.sampled_from(["read", "write"]), TEXT, TEXT, st.integers(0, 9), TEXT)
REFERENCES = st.builds(Reference, st.sampled_from(["session", "store", "link", "error"]), st.integers(0, 9) | TEXT)
PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | TEXT | st.binary(max_size=9) | REFERENCES
GIVEN = st.lists(PLAIN | st.floats(allow_nan=False) | ACCESS | st.tuples(PLAIN, PLAIN), max_size=3).map(tuple)
ANSWERS = st.lists(
    PLAIN
    | ACCESS
    | st.builds(Evicted, st.integers(0, 9), st.integers(-1, 9), st.integers(-1, 9), st.none() | REFERENCES)
    | st.builds(Reply, st.integers(0, 2**32), TEXT),
    max_size=2,
).map(tuple)
RECEIVED = st.builds(
    lambda number, data, answers: Event(RECEIVE, Reference("session", number), (data,), 1.5, answers),
    st.integers(1, 2**55 - 1), st.binary(max_size=50), ANSWERS,
)  # fmt: skip
CALLS = st.builds(Event, TEXT, REFERENCES, GIVEN, st.just(1.5), ANSWERS)
EVENTS = st.lists(RECEIVED | CALLS, max_size=4)


@settings(deadline=None)
@given(EVENTS)
def test_events_are_decoded_as_they_were(events: list[Event]) -> None:
    found = decode(encode(events), 1.5)
    assert found == events
    assert [list(map(type, event)) for event in found] == [list(map(type, event)) for event in events]


@settings(deadline=None)
@given(EVENTS.filter(bool), st.data())
def test_events_that_are_cut_are_not_decoded_otherwise(events: list[Event], data: st.DataObject) -> None:
    encoded = encode(events)
    cut = encoded[: data.draw(st.integers(0, len(encoded) - 1))]
    try:
        found = decode(cut, 1.5)
    except JournalError:
        return
    assert found == events[: len(found)]


@given(st.binary(max_size=40) | st.binary(max_size=20).map(lambda data: struct.pack("<QI", 2, len(data)) + data))
def test_anything_is_decoded_or_refused(data: bytes) -> None:
    try:
        decode(data, 0.0)
    except JournalError:
        pass


def test_bytes_of_a_session_have_a_header_of_twelve_bytes() -> None:
    assert encode([Event(RECEIVE, Reference("session", 7), (b"abc",), 0.0)]) == b"\1\7\0\0\0\0\0\0\3\0\0\0abc"


# Files


def filled(folder: Path, sync: bool = False) -> Journal:
    journal = Journal(folder, sync, segment_bytes=100)
    assert list(journal.read()) == []
    for number in range(5):
        journal.append(1.5, number, b"e" * 50)
    return journal


def test_a_removal_that_was_cut_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = filled(tmp_path)
    first = journal.instance
    unlink = Path.unlink

    def cut(path: Path, missing_ok: bool = False) -> None:
        if path.name == "log-00000002":
            raise KeyboardInterrupt
        unlink(path, missing_ok)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", cut)
        journal.remove()
    journal.close()
    following = Journal(tmp_path, False)
    assert list(following.read()) == []
    assert following.instance != first
    following.close()


def test_a_full_disk_keeps_no_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = filled(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(journal, "_make", full)
    journal.remove()
    assert segments_of(tmp_path) == []


def test_records_that_were_not_synced_are_before_others_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path).close()
    synced: list[Path] = []
    monkeypatch.setattr(journal_module, "_sync_file", synced.append)
    Journal(tmp_path, True).close()
    assert [path.name for path in synced if path != tmp_path] == [path.name for path in segments_of(tmp_path)]


# Records

THREE = [Record(number, 1.5 * number, 7 * number, b"events %d" % number) for number in range(3)]


def segment(records: list[Record], chain: Chain | None = None, zeros: int = 50) -> bytes:
    chain = chain or Chain()
    return chain.header() + b"".join(chain.record(*one[1:]) for one in records) + bytes(zeros)


def read(*segments: bytes) -> list[Record]:
    reader = Reader()
    return [record for one in segments for record in reader.read(one)]


def test_records_are_read_as_they_were() -> None:
    assert read(segment(THREE)) == THREE


def test_a_segment_that_is_cut_anywhere_has_the_records_before() -> None:
    whole = segment(THREE, zeros=0)
    ends = [len(segment(THREE[:count], zeros=0)) for count in range(4)]
    for end in range(HEADER_BYTES, len(whole) + 1):
        for rest in (b"", bytes(50)):
            assert read(whole[:end] + rest) == THREE[: sum(one <= end for one in ends[1:])]


def test_a_segment_of_which_a_byte_is_wrong_is_refused_if_whole_records_follow() -> None:
    """The last record may be torn, and so may the one before if its checksum is wrong: nothing vouches for the last."""
    whole = segment(THREE)
    ends = [len(segment(THREE[:count], zeros=0)) for count in range(4)]
    for at in range(len(whole) - 50):
        damaged = bytearray(whole)
        damaged[at] ^= 0x40
        whole_before = sum(one <= at for one in ends[1:])
        if whole_before == 2 or ends[1] + 4 <= at < ends[1] + 8:
            assert read(bytes(damaged)) == THREE[:whole_before]
        else:
            with pytest.raises(JournalError):
                read(bytes(damaged))


@pytest.mark.interpreted("compiled code calls zlib directly")
def test_a_value_full_of_what_looks_like_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each claims all that is behind it, and has to be looked at."""
    looked = 0

    def crc32(data: bytes, value: int = 0) -> int:
        nonlocal looked
        looked += len(data)
        return real(data, value)

    real = zlib.crc32
    count = 40_000
    false = b"".join(struct.pack("<IIQ", (count - place) * 16 - 8, 0, 4) for place in range(count))
    whole = segment(THREE, zeros=0) + struct.pack("<II", len(false) + 100, 0) + b"torn" + false
    monkeypatch.setattr(zlib, "crc32", crc32)
    assert read(whole) == THREE
    assert looked < 3 * (256 << 20)


def test_a_record_that_was_somewhere_else_is_not_read() -> None:
    """It is whole, but it goes on from another one."""
    chain = Chain()
    first = chain.header() + chain.record(*THREE[0][1:])
    other = Chain()
    other.header()
    other.record(0.0, 0, b"another first")
    assert read(first + other.record(*THREE[1][1:])) == THREE[:1]


def test_segments_go_on_from_each_other() -> None:
    chain = Chain()
    segments = [segment([one], chain) for one in THREE]
    assert read(*segments) == THREE
    with pytest.raises(JournalError, match="continues record 2, but record 1 is the next"):
        read(segments[0], segments[2])
    with pytest.raises(JournalError, match="continues record 1, but record 0 is the next"):
        read(segments[1])
    with pytest.raises(JournalError, match="no segment of a journal"):
        read(bytes(100))
    with pytest.raises(JournalError, match="format 9"):
        read(segments[0][:16] + b"\x09" + segments[0][17:])


# Files


def written(folder: Path) -> list[bytes]:
    """Return the events of all records."""
    journal = Journal(folder, False)
    try:
        return [record.events for record in journal.read()]
    finally:
        journal.close()


def write(folder: Path, *events: bytes, **options: Any) -> str:
    journal = Journal(folder, **{"sync": False, **options})
    try:
        list(journal.read())
        for one in events:
            journal.append(0.0, 0, one)
        return journal.instance
    finally:
        journal.close()


@pytest.mark.parametrize("sync", [False, True])
def test_a_journal_goes_on_where_it_ended(tmp_path: Path, sync: bool) -> None:
    folder = tmp_path / "a" / "journal"
    instance = write(folder, b"1", b"2", sync=sync)
    assert write(folder, b"3", sync=sync) == instance
    assert written(folder) == [b"1", b"2", b"3"]
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert set(modes) == {"LOCK", "instance", "log-00000000", "next"}
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_segments_are_filled_one_after_the_other(tmp_path: Path) -> None:
    """A record that fits into none has one of its own."""
    events = [b"%d" % number * size for number, size in enumerate((10, 300, 3000, 100, 5000, 100, 100, 100))]
    for one in events:
        write(tmp_path, one, segment_bytes=1000)
    assert written(tmp_path) == events
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("log-*"))]
    assert len(sizes) > 3
    assert set(sizes) > {1000}
    write(tmp_path, *events, segment_bytes=1000)
    assert written(tmp_path) == events + events


def test_one_server_holds_a_directory(tmp_path: Path) -> None:
    journal = Journal(tmp_path, False)
    with pytest.raises(JournalError, match=f"another server holds {tmp_path}"):
        Journal(tmp_path, False)
    journal.close()
    Journal(tmp_path, False).close()


def test_a_torn_record_is_written_over(tmp_path: Path) -> None:
    write(tmp_path, b"1" * 100, b"2" * 100)
    [path] = tmp_path.glob("log-*")
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 200] ^= 1
    path.write_bytes(data)
    write(tmp_path, b"3")
    assert written(tmp_path) == [b"1" * 100, b"3"]


def test_a_torn_record_at_the_end_of_a_segment_is_cut(tmp_path: Path) -> None:
    """What is written next does not fit there, so nothing is written over it."""
    write(tmp_path, b"1" * 100, b"2" * 700, segment_bytes=1000)
    [path] = tmp_path.glob("log-*")
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 300] ^= 1
    path.write_bytes(data)
    write(tmp_path, b"3" * 900, segment_bytes=1000)
    assert written(tmp_path) == [b"1" * 100, b"3" * 900]


def test_records_are_not_written_over_before_they_are_read(tmp_path: Path) -> None:
    write(tmp_path, b"1")
    journal = Journal(tmp_path, False)
    with pytest.raises(FileExistsError):
        journal.append(0.0, 0, b"2")
    journal.close()
    assert written(tmp_path) == [b"1"]


def test_what_a_killed_process_was_making_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "made").write_text("half")
    write(tmp_path, b"1")
    assert written(tmp_path) == [b"1"]
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert set(modes) == {"LOCK", "instance", "log-00000000", "next"}
    assert set(modes.values()) == {0o600}


def test_what_is_damaged_or_missing_in_the_middle_is_refused(tmp_path: Path) -> None:
    write(tmp_path, *[b"%d" % number * 600 for number in range(4)], segment_bytes=1000)
    second = tmp_path / "log-00000001"
    data = second.read_bytes()
    second.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    with pytest.raises(JournalError, match=rf"{second}: the record at byte {HEADER_BYTES} is damaged, and later"):
        written(tmp_path)
    second.unlink()
    with pytest.raises(JournalError, match=f"{second} is missing"):
        written(tmp_path)
    second.write_bytes(data)
    (tmp_path / "instance").unlink()
    with pytest.raises(JournalError, match="no file named instance"):
        written(tmp_path)


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match=f"cannot use the directory {tmp_path}/file"):
        Journal(tmp_path / "file", False)


def test_nothing_is_written_after_an_error(tmp_path: Path) -> None:
    journal = Journal(tmp_path, False)
    journal.append(0.0, 0, b"1")
    fd, journal._fd = journal._fd, os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError, match="No space left on device"):
        journal.append(0.0, 0, b"2")
    os.close(journal._fd)
    journal._fd = fd
    with pytest.raises(OSError, match="No space left on device"):
        journal.append(0.0, 0, b"3")
    journal.close()
    assert written(tmp_path) == [b"1"]


def test_nothing_is_written_after_a_sync_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may have dropped what it could not write, and say nothing the next time."""
    journal = Journal(tmp_path, True)
    journal.append(0.0, 0, b"1")

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "no disk")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(OSError, match="no disk"):
            journal.append(0.0, 0, b"2")
    with pytest.raises(OSError, match="Input/output error"):
        journal.append(0.0, 0, b"3")
    journal.close()
    assert written(tmp_path) == [b"1", b"2"]  # the next start takes what is there


def made(journal: Journal) -> None:
    """Wait until making the next segment has succeeded or failed."""
    if journal._ahead is not None:
        journal._ahead.join()


def test_what_there_is_space_for(tmp_path: Path) -> None:
    """Segments that exist are filled; then appending fails. The next one is made as soon as that is possible."""
    journal = Journal(tmp_path, False, segment_bytes=1000)
    told: list[str] = []
    journal.on_made = lambda: told.append(journal.refused)
    assert journal.shortage() == 0
    journal.append(0.0, 0, b"1")
    made(journal)
    assert told == [""]
    (tmp_path / "made").mkdir()
    journal.append(0.0, 0, bytes(900))
    assert journal.shortage() == 0  # the next one is made
    journal.append(0.0, 0, bytes(100))
    made(journal)
    assert told == ["", "Is a directory"]
    assert journal.shortage() == 1
    journal.append(0.0, 0, bytes(700))
    assert journal.shortage() == 2
    journal.make_ahead()
    made(journal)
    assert len(told) == 3
    (tmp_path / "made").rmdir()
    journal.make_ahead()
    made(journal)
    assert told[3:] == [""]
    assert journal.shortage() == 0
    journal.append(0.0, 0, bytes(900))
    made(journal)
    (tmp_path / "made").mkdir()
    journal.close()
    (tmp_path / "next").unlink()
    again = Journal(tmp_path, False, segment_bytes=1000)
    assert len(list(again.read())) == 5
    made(again)
    assert again.shortage() == 2
    with pytest.raises(IsADirectoryError):
        again.append(0.0, 0, bytes(900))
    again.close()


def test_a_segment_that_is_being_made_counts_once_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is slow is not written to faster than it makes segments."""
    journal = Journal(tmp_path, False, segment_bytes=1000)
    going_on = threading.Event()
    make = journal._make

    def make_slowly(path: Path, parts: Iterable[bytes]) -> None:
        if threading.current_thread() is not threading.main_thread():
            going_on.wait()
        make(path, parts)

    monkeypatch.setattr(journal, "_make", make_slowly)
    journal.append(0.0, 0, bytes(300))
    assert journal.shortage() == 0
    journal.append(0.0, 0, bytes(200))
    assert journal.shortage() == 1
    journal.append(0.0, 0, bytes(200))
    assert journal.shortage() == 2
    going_on.set()
    made(journal)
    assert journal.shortage() == 0
    journal.close()


def test_a_segment_that_cannot_be_made_leaves_the_space_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path, True)

    def fail(fd: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    journal.append(0.0, 0, b"1")
    made(journal)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        journal.make_ahead()
        made(journal)
    assert journal.refused == "no space"
    assert not (tmp_path / "made").exists()
    journal.close()


def test_removing_leaves_nothing_but_the_lock(tmp_path: Path) -> None:
    journal = Journal(tmp_path, False)
    journal.append(0.0, 0, b"1")
    first = journal.instance
    journal.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["LOCK"]
    assert write(tmp_path) != first


# Snapshots


def seal(folder: Path, state: bytes) -> None:
    journal = Journal(folder, False)
    try:
        list(journal.read())
        journal.seal(1.5, state)
    finally:
        journal.close()


def test_a_snapshot_stands_for_what_was_before(tmp_path: Path) -> None:
    write(tmp_path, *[b"%d" % number * 600 for number in range(4)], segment_bytes=1000)
    seal(tmp_path, b"state")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LOCK", "instance", "next", "snapshot-00000004"]
    assert (tmp_path / "snapshot-00000004").stat().st_mode & 0o777 == 0o600
    write(tmp_path, b"5", b"6")
    journal = Journal(tmp_path, False)
    assert journal.snapshot == Snapshot(4, 4, journal.snapshot.crc if journal.snapshot else 0, 1.5, b"state")
    assert [(record.number, record.events) for record in journal.read()] == [(4, b"5"), (5, b"6")]
    journal.close()
    assert segments_of(tmp_path) == [tmp_path / "log-00000004"]


def test_what_a_snapshot_makes_unnecessary_is_removed(tmp_path: Path) -> None:
    """Also if the server was killed before it had removed it; and it is told of each complete segment."""
    write(tmp_path, *[b"%d" % number * 600 for number in range(4)], segment_bytes=1000)
    reader = Reader()
    records = list(read_records(tmp_path, reader))
    third = Reader()
    for path in segments_of(tmp_path)[:2]:
        list(third.read(path.read_bytes()))
    for segment, state in ((0, b"old"), (2, b"new")):
        crc = third.chain.crc if segment else 0
        write_snapshot(tmp_path, Snapshot(segment, segment, crc, 0.0, state))
    (tmp_path / "snapshot").write_bytes(b"begun")
    journal = Journal(tmp_path, False, segment_bytes=1000)
    assert journal.snapshot is not None
    assert journal.snapshot.state == b"new"
    assert list(journal.read()) == records[2:]
    assert snapshots_of(tmp_path) == [tmp_path / "snapshot-00000002"]
    assert [path.name for path in segments_of(tmp_path)] == ["log-00000002", "log-00000003"]
    assert list(journal.complete) == [2]
    told: list[int] = []
    journal.on_complete = lambda: told.append(len(journal.complete))
    journal.append(0.0, 0, bytes(900))
    assert told == [2]
    journal.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["LOCK"]


def test_a_snapshot_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Damaged, put back from a copy, or with what follows missing or not its own."""
    write(tmp_path, *[b"%d" % number * 600 for number in range(3)], segment_bytes=1000)
    seal(tmp_path, b"state")
    write(tmp_path, *[b"%d" % number * 600 for number in range(3)], segment_bytes=1000)
    path = tmp_path / "snapshot-00000003"
    whole = path.read_bytes()
    for wrong, why in (
        (whole[:-1], "the snapshot is damaged"),
        (whole[:10], "the snapshot is not whole"),
        (whole[:-5] + b"x" + whole[-4:], "the snapshot is damaged"),
        (bytes(100), "this is no snapshot"),
        (b"".join(Snapshot(2, 3, 0, 0.0, b"").encode()), "is the snapshot before segment 2"),
        (b"".join(Snapshot(3, 7, 0, 0.0, b"").encode()), "continues record 3, but record 7 is the next"),
    ):
        path.write_bytes(wrong)
        with pytest.raises(JournalError, match=f"{path}.*{why}|{why}"):
            written(tmp_path)
    path.unlink()
    with pytest.raises(JournalError, match="log-00000000 is missing"):
        written(tmp_path)
    path.write_bytes(whole)
    (tmp_path / "log-00000003").unlink()
    with pytest.raises(JournalError, match="log-00000003 is missing"):
        written(tmp_path)


def test_a_segment_of_another_version_is_refused(tmp_path: Path) -> None:
    """A snapshot is not: nothing has to be executed again."""
    write(tmp_path, b"1")
    seal(tmp_path, b"state")
    [path] = snapshots_of(tmp_path)
    found = decode_snapshot(path.read_bytes())
    path.write_bytes(b"".join(found._replace(replay=REPLAY + 1).encode()))
    assert written(tmp_path) == []
    write(tmp_path, b"2")
    [segment] = segments_of(tmp_path)
    data = bytearray(segment.read_bytes())
    data[20] += 1
    segment.write_bytes(data)
    with pytest.raises(JournalError, match=f"for replay {REPLAY + 1}; .*: start that version, and end it with SIGTERM"):
        written(tmp_path)


def test_a_full_disk_leaves_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, b"1")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(OSError, match="No space left"):
            seal(tmp_path, b"state")
    assert snapshots_of(tmp_path) == []
    assert written(tmp_path) == [b"1"]


def test_a_snapshot_is_made_by_one_process(tmp_path: Path) -> None:
    """One that has lost its server may not have ended when the next server's begins."""
    with (tmp_path / "snapshot").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write(b"of another process")
        other.flush()
        with pytest.raises(BlockingIOError):
            write_snapshot(tmp_path, Snapshot(0, 0, 0, 0.0, b""))
    assert (tmp_path / "snapshot").read_bytes() == b"of another process"
    write_snapshot(tmp_path, Snapshot(0, 0, 0, 0.0, b""))
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot-00000000"]


def failing(fd: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.slow
@pytest.mark.parametrize("sync", [False, True])
def test_what_was_appended_survives_a_kill(tmp_path: Path, sync: bool) -> None:
    """A process that is killed while it appends leaves all that it said it had, in order, and perhaps one more."""
    said = 0
    for _ in range(20):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                journal = Journal(tmp_path, sync, segment_bytes=4000)
                number = sum(1 for _ in journal.read())
                while True:
                    journal.append(0.0, 0, b"%d " % number * (1 + number % 700))
                    number += 1
                    os.write(writing, struct.pack("<I", number))
            finally:
                os._exit(1)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            for _ in range(30):
                said = max(said, *struct.unpack("<I", pipe.read(4)))
            os.kill(child, signal.SIGKILL)
            assert os.waitpid(child, 0)[1] == signal.SIGKILL
            rest = pipe.read()
        said = struct.unpack("<I", rest[-4:])[0] if rest else said
        events = written(tmp_path)
        assert said <= len(events) <= said + 1
        assert events == [b"%d " % number * (1 + number % 700) for number in range(len(events))]
