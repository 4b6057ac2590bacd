"""Log handlers that never block the event loop."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from support import LIMIT
from tcpstore_async.server import log_handlers
from tcpstore_async.server.log_handlers import JsonHandler, NonBlockingHandler, OwnerHandler
from tcpstore_async.server.process.protocol import LogLine

pytestmark = pytest.mark.interpreted


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("tcpstore_async.server", logging.WARNING, __file__, 1, text, None, None)


def test_a_line_for_a_file_is_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        handler = NonBlockingHandler(file.fileno())
        handler.handle(record("one"))
        assert path.read_text() == "one\n"


@pytest.mark.needs_proc
@pytest.mark.skipif(sys.platform != "linux", reason="Linux says which signals a thread gets")
def test_the_thread_for_a_file_gets_no_signal(tmp_path: Path) -> None:
    """Another one may wait for it, and without a handler the process would die of it."""
    with (tmp_path / "log").open("wb") as file:
        before = set(threading.enumerate())
        NonBlockingHandler(file.fileno()).handle(record("it runs"))
        (thread,) = set(threading.enumerate()) - before
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        assert blocked & 1 << number - 1


# quirk: stuck-log
def test_a_file_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`poll` always reports a regular file as writable."""

    def hang(fd: int, line: bytes) -> int:
        entered.set()
        assert go_on.wait(LIMIT)
        written.append(line)
        if line == b"last\n":
            done.set()
        return len(line)

    entered, go_on, done = threading.Event(), threading.Event(), threading.Event()
    written: list[bytes] = []
    monkeypatch.setattr(log_handlers, "_write", hang)
    monkeypatch.setattr(log_handlers, "_MOST_QUEUED", 3)
    with (tmp_path / "log").open("wb") as file:
        handler = NonBlockingHandler(file.fileno())
        handler.handle(record("0"))
        assert entered.wait(LIMIT)
        for i in range(1, 6):
            handler.handle(record(str(i)))
        assert not written
        go_on.set()
        assert handler._file is not None
        handler._file._lines.join()
        handler.handle(record("6"))
        handler.handle(record("last"))
        assert done.wait(LIMIT)
    assert b"".join(written).decode() == ("0\n1\n2\n3\n6 (2 earlier lines dropped)\nlast\n")


def test_an_owner_that_does_not_read_holds_up_nobody() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        handler = OwnerHandler(theirs.fileno())
        handler._second = float("inf")
        handlers_most = log_handlers._MOST_PER_SECOND
        sent = 0
        while not handler._dropped:
            handler._second = 0.0  # a second for each
            handler.handle(record("x" * 3000))
            sent += 1
            assert sent < 10_000
        assert handlers_most > 1
        received = b""
        while received.count(b"\n") < sent - 1:
            received += ours.recv(1 << 16)
        handler._second = 0.0
        handler.handle(record("y"))
        assert msgspec.json.decode(ours.recv(1 << 16), type=LogLine).text == ("y (1 earlier lines dropped)")
    assert all(len(line) < 4096 for line in received.split(b"\n"))


def test_an_owner_gets_a_limited_number_of_lines_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        handler = OwnerHandler(theirs.fileno())
        for i in range(50):
            handler.handle(record(str(i)))
        now += 1
        handler.handle(record("later"))
        said = [msgspec.json.decode(line, type=LogLine) for line in ours.recv(1 << 16).splitlines()]
    assert [line.text for line in said[:-1]] == [str(i) for i in range(20)]
    assert said[-1].text == "later (30 earlier lines dropped)"
    assert (said[-1].level, said[-1].name) == (logging.WARNING, "tcpstore_async.server")


@pytest.mark.parametrize("text", ["\0" * 100_000, "é" * 100_000, "x" * 100_000, '"' * 5000])
def test_a_long_line_is_cut_and_stays_a_line(text: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        OwnerHandler(theirs.fileno()).handle(record(text))
        raw = ours.recv(1 << 16)
        assert len(raw) <= 4096
        assert raw.endswith(b"\n")
        assert msgspec.json.decode(raw, type=LogLine).text == text[: len(msgspec.json.decode(raw, type=LogLine).text)]


def test_a_pipe_without_a_reader(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    handler = NonBlockingHandler(writer)
    handler.handle(record("x"))
    assert handler._dropped == 1
    os.close(writer)


# JSON


def test_a_record_as_json(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        handler = JsonHandler(file.fileno())
        handler._dropped = 3
        failed = record("closing \u2028 %s")
        failed.args = ("\x1b[2J\n",)
        try:
            raise ValueError("what failed")
        except ValueError:
            failed.exc_info = sys.exc_info()
        handler.handle(failed)
        handler.handle(record("next"))
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["message"] == "closing \u2028 \x1b[2J\n"
    assert "\x1b" not in path.read_text()
    assert first["exception"].endswith("ValueError: what failed")
    assert first["dropped"] == "3 earlier lines dropped"
    assert set(second) == {"time", "level", "logger", "message"}
    assert (second["level"], second["logger"]) == ("WARNING", "tcpstore_async.server")
    assert datetime.fromisoformat(second["time"]).utcoffset() == timedelta(0)


@pytest.mark.parametrize("text", ["x", "\x00", "\U0001f600"])
def test_a_long_record_as_json_fits_a_pipe(text: str, tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        long = record(text * 10_000)
        try:
            raise ValueError(text * 10_000)
        except ValueError:
            long.exc_info = sys.exc_info()
        line = JsonHandler(file.fileno()).encode(long, " (1000000 earlier lines dropped)")
    assert len(line) <= 4096
    assert json.loads(line)["message"].startswith(text)
