"""FileStore faults: killed writers, lost and unusable files, signals and forks."""

from __future__ import annotations

import errno
import fcntl
import gc
import itertools
import logging
import os
import random
import signal
import struct
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support import LIMIT, in_child, run_python
from tcpstore_async import DistStoreError, FileStore, StoreTimeoutError
from tcpstore_async.base.errors import counted
from tcpstore_async.stores.file import records, reentrant_lock, torn_records
from tcpstore_async.stores.file import store as file_store
from torch_forker import Program

pytestmark = pytest.mark.interpreted

ADDER = """
import datetime, sys
which, path, name, log, limit = *sys.argv[1:5], float(sys.argv[5])
if which == "ours":
    from tcpstore_async import FileStore
else:
    from torch.distributed import FileStore
store = FileStore(path, 1000)
store.set_timeout(datetime.timedelta(seconds=limit))
done = open(log, "ab", buffering=0)
print("ready", flush=True)
for number in range(10 ** 9):
    store.set(f"{name}/{number}", "x" * (number % 50))
    done.write(b"k")
    store.add("total", 1)
    done.write(b"a")
    if which == "ours":
        store.queue_push("queue", str(number))
"""
"""Writes until it is killed, and records in a log which writes have returned."""


class Adder:
    def __init__(self, which: str, path: Path, name: str) -> None:
        self.name = name
        self.log = path.with_name(f"log of {name}")
        self.process = Program(ADDER, which, path, name, self.log, LIMIT)

    def kill(self) -> None:
        self.process.end()

    def until_ready(self) -> None:
        assert self.process.stdout.readline() == b"ready\n"

    def done(self, what: bytes) -> int:
        return self.log.read_bytes().count(what)


def demand_progress(adders: list[Adder]) -> None:
    """Assert that no writer hangs."""
    before = [adder.done(b"a") for adder in adders]
    end = time.monotonic() + LIMIT
    for adder, old in zip(adders, before, strict=True):
        while adder.done(b"a") <= old:
            assert adder.process.poll() is None
            assert time.monotonic() < end, f"{adder.name} hangs"
            time.sleep(0.01)


def demand_everything(path: Path, adders: list[Adder]) -> None:
    """Assert that every write that returned is in the file."""
    with FileStore(path, timeout=LIMIT) as store:
        told, total = sum(adder.done(b"a") for adder in adders), int(store.get("total"))
        assert told <= total <= told + len(adders)
        keys = set(store.list_keys())
        for adder in adders:
            for number in range(adder.done(b"k")):
                assert f"{adder.name}/{number}" in keys
                assert len(store.get(f"{adder.name}/{number}")) == number % 50
        assert records.is_complete(path.read_bytes(), 0)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("killed", "times", "others"), [("ours", 8, "torch"), ("torch", 4, "ours")])
def test_killed_writers(killed: str, times: int, others: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "store"
    stay = [Adder(others, path, f"{others}{number}") for number in range(2)]
    adders = list(stay)
    chance = random.Random(1)
    for number in range(times):
        adders.append(Adder(killed, path, f"{killed}{number}"))
        for adder in adders[-1:] if number else adders:
            adder.until_ready()
        time.sleep(chance.uniform(0.05, 0.5))
        adders[-1].kill()
    demand_progress(stay)
    for adder in stay:
        adder.kill()
    demand_everything(path, adders)


# Torn records


def record(key: bytes, value: bytes) -> bytes:
    return struct.pack("<I", len(key)) + key + struct.pack("<I", len(value)) + value


RECORD = record(b"/torn", b"0123456789")


@pytest.mark.parametrize("length", [*range(1, len(RECORD)), 10_000])
@pytest.mark.parametrize("found_by", ["a reader", "a writer"])
# quirk: torn-record
def test_a_torn_record_is_cut_off_once(
    tmp_path: Path, length: int, found_by: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "store"
    torn = RECORD[:length] if length < len(RECORD) else b"\x04\0\0\0/big\xff\xff\xff\x7f" + bytes(9_988)
    with FileStore(path, timeout=LIMIT) as store:
        store.set("k", "v")
        whole = path.read_bytes()
        path.write_bytes(whole + torn)
        if found_by == "a reader":
            assert store.num_keys() == 2
        else:
            store.set("k", "v")
            whole += record(b"/k", b"v")
        assert path.read_bytes() == whole
        assert store.get("k") == b"v"
        assert [entry.message for entry in caplog.records] == [
            f"{path}: removed {counted(len(torn), 'byte')}: 1 incomplete record left by writers that died"
        ]


@pytest.mark.parametrize("length", range(1, len(RECORD)))
def test_pytorch_s_writes_after_a_torn_record_are_kept(tmp_path: Path, length: int) -> None:
    """PyTorch's `set` appends without checking, so the torn record swallows part of the next one."""
    path = tmp_path / "store"
    with FileStore(path, timeout=LIMIT) as store, FileStore(path, timeout=LIMIT) as other:
        store.set("k", "v")
        before = path.read_bytes()
        behind = record(b"/whole", b"value") + record(b"/more", b"12")
        path.write_bytes(before + RECORD[:length] + behind)
        assert store.get("whole") == b"value"
        assert other.get("more") == b"12"
        assert path.read_bytes() == before + behind
        assert sorted(store.list_keys()) == sorted(other.list_keys()) == ["k", "more", "whole"]


SHORT = record(b"-/x", b"")


@pytest.mark.parametrize("first", range(1, len(RECORD)))
@pytest.mark.parametrize("second", [1, 3, 4, 5, 8, 9, 12, 13, 14, len(RECORD) - 1])
# quirk: torn-record
def test_what_stands_between_two_torn_records_is_kept(first: int, second: int) -> None:
    """However much of each was written, unless what it swallows makes it look complete."""
    between = record(b"/whole", b"value") + SHORT + record(b"+/queue", b"item") + record(b"/k", bytes(300))
    behind = record(b"refcount/", b"-1") + record(b"/more", b"12")
    for rest in (b"", behind):
        start = record(b"/start", b"")
        data = start + RECORD[:first] + between + RECORD[:second] + rest
        spans = torn_records.torn_spans(data)
        at = len(start) + first + len(between)
        assert spans == [(len(start), len(start) + first), (at, at + second)]


def test_many_torn_records_take_linear_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "store"
    looks = 0
    real = torn_records._announced_end

    def count(data: bytes, at: int) -> int:
        nonlocal looks
        looks += 1
        return real(data, at)

    with FileStore(path, timeout=LIMIT) as store:
        before = path.read_bytes()
        whole = b"".join(record(b"/k%d" % number, b"v" * (number % 9)) for number in range(1000))
        path.write_bytes(before + (RECORD[:-4] + whole) * 3 + RECORD[:-9])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torn_records, "_announced_end", count)
            assert all(store.check([f"k{number}"]) for number in range(1000))
        assert looks < 5 * 3000
        assert path.read_bytes() == before + whole * 3
    assert [entry.message for entry in caplog.records] == [
        f"{path}: removed {3 * (len(RECORD) - 4) + len(RECORD) - 9} bytes: "
        "4 incomplete records left by writers that died"
    ]


def test_only_complete_records_remain_of_random_data() -> None:
    chance = random.Random(5)
    for _ in range(500):
        pieces = []
        for _ in range(chance.randrange(1, 12)):
            key = chance.choice([b"/", b"/key", b"-/key", b"refcount/", b"stranger"])
            value = chance.choice([b"", b"value", chance.randbytes(9), record(b"/inner", b"x"), bytes(40)])
            piece = record(key, value)
            pieces.append(piece[: chance.randrange(len(piece) + 1)] if chance.random() < 0.4 else piece)
        data = b"".join(pieces)
        spans = torn_records.torn_spans(data)
        ends = [0, *(end for _, end in spans)]
        left = b"".join(data[end:begin] for end, (begin, _) in zip(ends, [*spans, (len(data), 0)], strict=True))
        assert records.is_complete(left, 0)
        assert all(begin < end for begin, end in spans)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_records_of_other_software_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(path, timeout=LIMIT) as store:
        path.write_bytes(path.read_bytes() + record(b"stranger", b"x") + record(b"", b"") + record(b"/k", b""))
        store.set("k", "v")
        assert store.get("k") == b"v"
        assert store.num_keys() == 4
        assert store.list_keys() == ["k"]
        assert record(b"stranger", b"x") in path.read_bytes()


def test_read_only_reader_ignores_torn_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store"
    with FileStore(path, timeout=LIMIT) as store:
        store.set("k", "v")
        monkeypatch.setattr(os, "access", lambda *_: False)
        path.write_bytes(path.read_bytes() + RECORD[:7])
        assert store.get("k") == b"v"
        assert path.read_bytes().endswith(RECORD[:7])


@pytest.mark.parametrize("content", [b"Dear diary,\n", b"\0", b"\x09\0\0\0refcounx/", bytes(100)], ids=str)
def test_foreign_file_is_left_unchanged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "diary"
    path.write_bytes(content)
    with pytest.raises(DistStoreError, match=r"diary: not a FileStore file; left unchanged$"):
        FileStore(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("key", [b"refcount/", b"cleanup/"])
def test_invalid_count_of_stores(tmp_path: Path, key: bytes) -> None:
    path = tmp_path / "store"
    path.write_bytes(record(b"refcount/", b"1") + record(key, b"one"))
    with pytest.raises(DistStoreError, match="its count of stores is not a number"):
        FileStore(path, 2)


def test_incomplete_first_record(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.write_bytes(record(b"refcount/", b"1")[:6])
    with FileStore(path, 1) as store:
        assert store.add("n", 1) == 1
    assert not path.exists()


# Unusable and lost files


def test_directory_in_place_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(DistStoreError, match=f"^{tmp_path}: Is a directory"):
        FileStore(tmp_path)


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(DistStoreError, match=f"^{tmp_path}/store: Permission denied$"):
            FileStore(tmp_path / "store")


def test_no_flock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.flock

    def refuse(fd: int, kind: int) -> None:
        if kind != fcntl.LOCK_UN:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        real(fd, kind)

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(DistStoreError, match="the file system does not support flock"):
        FileStore(tmp_path / "store")


def test_directory_created_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "later" / "store"
    threading.Timer(0.2, path.parent.mkdir).start()
    with FileStore(path, 1, timeout=LIMIT) as store:
        assert store.add("n", 1) == 1
    assert [entry.message for entry in caplog.records] == [
        f"{path}: directory {path.parent} does not exist; waiting for it until the timeout"
    ]


def test_directory_never_created(tmp_path: Path) -> None:
    with pytest.raises(StoreTimeoutError, match=r"^timeout after 200ms: .*/never/store: No such directory: .*/never$"):
        FileStore(tmp_path / "never" / "store", timeout=0.2)


def test_removed_file(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(path, timeout=0.2) as store, FileStore(path, timeout=LIMIT) as other:
        store.set("k", "v")
        path.unlink()
        with pytest.raises(StoreTimeoutError, match=r"^timeout after 200ms: .*/store: No such file or directory$"):
            store.get("k")
        other.set("new", "1")
        assert not store.check(["k"])
        assert store.get("new") == b"1"
        path.unlink()
    assert not path.exists()


def test_replaced_file(tmp_path: Path) -> None:
    path, another = tmp_path / "store", tmp_path / "another"
    with FileStore(path, timeout=LIMIT) as store, FileStore(another) as second:
        store.set("k", "v")
        for number in range(20):
            second.set(f"n{number}", "x" * 100)
        waiting = threading.Timer(0.1, another.rename, [path])
        waiting.start()
        assert store.get("n19") == b"x" * 100
        assert not store.check(["k"])


def test_new_file_with_the_same_inode(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(path, timeout=LIMIT) as store:
        store.set("k", "v")
        path.write_bytes(record(b"refcount/", b"1") + record(b"/other", b"1") + record(b"/more", b"2"))
        assert sorted(store.list_keys()) == ["more", "other"]


@contextmanager
def locked_by_another(path: Path) -> Iterator[None]:
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize("timeout", [0.2, 0])
def test_lock_held_by_another(tmp_path: Path, timeout: float) -> None:
    path = tmp_path / "store"
    with FileStore(path) as store:
        store.set_timeout(timeout)
        with locked_by_another(path):
            for call in (lambda: store.set("k", "v"), lambda: store.check(["k"]), lambda: store.get("k")):
                with pytest.raises(
                    StoreTimeoutError, match=r"^timeout after \d+ms: .*/store: locked by another process or store$"
                ):
                    call()
        store.set("k", "v")


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store"
    real = os.pwrite

    def half(fd: int, data: bytes, at: int) -> int:
        if len(data) < 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[: len(data) // 2], at)

    with FileStore(path, timeout=LIMIT) as store:
        store.add("n", 1)
        before = path.read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", half)
            with pytest.raises(DistStoreError, match=r"/store: No space left on device$"):
                store.add("n", 1)
        assert path.read_bytes() == before
        assert store.add("n", 1) == 2


# Interruptions


def test_a_signal_handler_uses_the_store(tmp_path: Path) -> None:
    """The interrupted thread may hold the lock on the file."""
    came = made = 0
    with FileStore(tmp_path / "store", timeout=LIMIT) as store, FileStore(tmp_path / "store", timeout=LIMIT) as other:

        def handle(*_: object) -> None:
            nonlocal came
            came += 1
            (store if came % 2 else other).add("signals", 1)
            store.queue_push("queue", str(came))
            if came < 300:
                signal.setitimer(signal.ITIMER_REAL, 0.0001 + came % 13 * 0.00002)

        before = signal.signal(signal.SIGALRM, handle)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0001)
            while came < 300:
                made += 1
                assert store.add("calls", 1) == made
                assert store.check(["calls"])
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert other.add("signals", 0) == store.queue_len("queue") == 300
        assert [store.queue_pop("queue") for _ in range(300)] == [b"%d" % number for number in range(1, 301)]
    assert not reentrant_lock._held


def test_ctrl_c_ends_a_wait_at_once(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store", timeout=LIMIT) as store:
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
            store.get("k")
        assert time.monotonic() - began < LIMIT / 2
        store.set("k", "v")
        assert store.get("k") == b"v"


def test_forked_child_uses_the_store_and_is_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(path, 1, timeout=LIMIT) as store:
        busy = threading.Event()

        def write() -> None:
            while not busy.is_set():
                store.add("busy", 1)

        def child() -> None:
            store.add("children", 1)
            store.close()

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for _ in range(20):
                assert in_child(child) == "None"
        finally:
            busy.set()
            thread.join()
        assert store.add("children", 0) == 20
        assert path.exists()
    assert not path.exists()


def test_collected_store_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = FileStore(path, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del store
        gc.collect()
    assert [entry.category for entry in caught] == [ResourceWarning]
    assert not path.exists()


LEFT = """
import sys, tcpstore_async
store = tcpstore_async.FileStore(sys.argv[1], 1)
store.set("k", "v")
store.itself = store
"""


def test_store_is_closed_at_exit(tmp_path: Path) -> None:
    path = tmp_path / "store"
    run_python(LEFT, path)
    assert not path.exists()


def test_failed_close_of_a_collected_store_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    path = tmp_path / "store"
    monkeypatch.setattr(file_store, "_FINALIZE_SECONDS", 0.1)
    store = FileStore(path, 1)
    with warnings.catch_warnings(), locked_by_another(path):
        warnings.simplefilter("ignore")
        del store
        gc.collect()
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING
    assert path.exists()


def test_a_large_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store"
    read = 0
    real = os.pread

    def count(fd: int, length: int, at: int) -> bytes:
        nonlocal read
        data = real(fd, length, at)
        read += len(data)
        return data

    with FileStore(path, timeout=LIMIT) as store:
        for number in range(20):
            store.set(f"big{number % 3}", bytes(2_000_000 + number))
        size = path.stat().st_size
        monkeypatch.setattr(os, "pread", count)
        with FileStore(path, timeout=LIMIT) as other:
            assert len(other.get("big1")) == 2_000_019
            for _ in range(100):
                other.check(["big0"])
        assert read < 3 * size


def test_a_call_that_is_interrupted_while_it_registers_can_lose_its_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whatever interrupts it next would wait for a lock of its own thread."""

    class Interrupted(dict[int, list[reentrant_lock.FileLock]]):
        handlers = 1

        def setdefault(self, thread: int, locks: Any = None) -> Any:
            found = super().setdefault(thread, locks)
            if self.handlers:
                self.handlers -= 1
                with reentrant_lock.locked():
                    pass
            return found

    held = Interrupted()
    monkeypatch.setattr(reentrant_lock, "_held", held)
    with reentrant_lock.locked() as first:
        assert held.handlers == 0
        with reentrant_lock.locked():
            assert first.lost
    assert not held
