"""Runs py-spy, which reads the frames of a process out of its memory.

Knows its command and its output. Must not know responders. Invariants: it stops no process; it never runs more often at
once than there are processors, nor beyond the deadline; where it may not attach to one process, it is not tried on the
next.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import msgspec

from .frames import written

MAY_NOT: Final = "py-spy may not attach"
NO_TIME: Final = "no time for py-spy"
_REFUSED: Final = re.compile(rb"permission|not permitted", re.IGNORECASE)


class _Frame(msgspec.Struct):
    name: str
    filename: str
    line: int


class _Thread(msgspec.Struct):
    frames: list[_Frame]
    os_thread_id: int | None = None
    thread_name: str | None = None


def find() -> str:
    """Return the path of py-spy, beside this interpreter or on PATH; empty if it is not installed."""
    return shutil.which("py-spy", path=os.path.dirname(sys.executable)) or shutil.which("py-spy") or ""


class _Runs:
    """Its runs for one question."""

    def __init__(self, program: str, until: float) -> None:
        self.program = program
        self.until = until
        self.refused = False

    def run(self, pid: int) -> tuple[str, ...] | str:
        left = self.until - time.monotonic()
        if self.refused:
            return MAY_NOT
        if left <= 0:
            return NO_TIME
        command = [self.program, "dump", "--pid", str(pid), "--json", "--nonblocking"]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=left)
        except subprocess.TimeoutExpired:
            return NO_TIME
        except OSError as error:
            return f"py-spy does not start: {error.strerror}"
        if done.returncode:
            if not _REFUSED.search(done.stderr):
                return "py-spy fails"
            self.refused = True
            return MAY_NOT
        return _main_thread(done.stdout, pid)


def _main_thread(data: bytes, pid: int) -> tuple[str, ...] | str:
    """Return the frames of the main thread, or why there are none."""
    try:
        threads = msgspec.json.decode(data, type=list[_Thread])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return "py-spy's output is not known"
    for one in threads:
        if one.os_thread_id == pid or one.thread_name == "MainThread":
            return written((frame.name, frame.filename, frame.line) for frame in one.frames)
    return "py-spy finds no main thread"


def spy(program: str, pids: Iterable[int], until: float) -> dict[int, tuple[str, ...] | str]:
    """Return the frames of these processes, the first ones first, or why there are none, keyed by pid."""
    pids = list(pids)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return dict(zip(pids, pool.map(partial(_Runs.run, _Runs(program, until)), pids), strict=True))
