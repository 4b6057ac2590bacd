"""Asks the responders of processes where they are.

Knows their sockets, and the file in memory to which a signal writes frames. Must not know what processes do.
Invariants: a signal goes only to a process that catches it, by a descriptor of that very process. Who answers is the
process that was asked.
"""

import os
import re
import select
import signal
import socket
import stat
import time
from collections.abc import Iterable
from typing import Final

import msgspec

from ..base.peer_process import peer_process
from .frames import clipped, written
from .report import Collective
from .responder import NAME, Answer, takes

_MOST_BYTES: Final = 1 << 16
_COLLECTIVES: Final = 32
_CHARACTERS: Final = 128
_NUMBERS: Final = 1 << 53
_LONGEST: Final = 1e9
_DUMP_SECONDS: Final = 0.2
"""After which a signal has not been handled, as by a process that the kernel has frozen."""
_POLL_SECONDS: Final = 0.005

_FILE: Final = re.compile(rf"/memfd:{NAME}(\d\d) \(deleted\)")
_FRAME: Final = re.compile(r'  File "(.*)", line (\d+) in (.*)\n')


def ask(pids: Iterable[int], seconds: float) -> dict[int, Answer | None]:
    """Return the answers of responders, keyed by pid; None of those that do not answer in time.

    Processes without a responder are left out.
    """
    answers: dict[int, Answer | None] = {}
    asked: dict[int, tuple[int, socket.socket, bytearray]] = {}
    poll = select.poll()
    until = time.monotonic() + seconds
    try:
        for pid in pids:
            try:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            except OSError:
                break  # there is no descriptor left
            connection.setblocking(False)
            asked[connection.fileno()] = pid, connection, bytearray()
            try:
                connection.connect(f"\0{NAME}{pid}")
                if peer_process(connection)[0] != pid:
                    continue
            except BlockingIOError:  # several ask it, so that it does not answer them
                answers[pid] = None
            except OSError:
                continue
            else:
                answers[pid] = None
                poll.register(connection, select.POLLIN)
        waiting = len(answers)
        while waiting and (left := until - time.monotonic()) > 0:
            for number, _ in poll.poll(left * 1000):
                pid, connection, data = asked[number]
                if _received(connection, data):
                    continue
                poll.unregister(connection)
                waiting -= 1
                try:
                    answers[pid] = _trusted(msgspec.json.decode(data, type=Answer))
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    pass  # it ended, or is none of ours
    finally:
        for _, connection, _ in asked.values():
            connection.close()
    return answers


def _trusted(answer: Answer) -> Answer:
    """Return no more of an answer than a responder says: a rank is not to have others' answers left out."""
    return Answer(
        clipped(answer.frames),
        tuple(
            Collective(
                one.group[:_CHARACTERS],
                one.name[:_CHARACTERS],
                one.number,
                one.sizes[:_CHARACTERS],
                min(one.since, _LONGEST),
            )
            for one in answer.collectives[:_COLLECTIVES]
            if 0 <= one.number < _NUMBERS and one.since >= 0
        ),
    )


def _received(connection: socket.socket, data: bytearray) -> bool:
    """Receive into `data`; return whether there may be more."""
    try:
        received = connection.recv(_MOST_BYTES)
    except BlockingIOError:
        return True
    except OSError:
        return False
    data += received
    return bool(received) and len(data) < _MOST_BYTES


def dumped(pids: Iterable[int], until: float) -> dict[int, tuple[str, ...]]:
    """Return the frames of processes that do not get the GIL, written by their signal handlers, keyed by pid.

    Processes without a handler are left out. A system call that the kernel does not restart, such as a sleep in C,
    would be interrupted: the caller asks for no such processes.
    """
    until = min(until, time.monotonic() + _DUMP_SECONDS)
    files: dict[int, int] = {}
    try:
        for pid in pids:
            if time.monotonic() < until and (file := _signalled(pid)) is not None:
                files[pid] = file
        return {pid: frames for pid, data in _read(files, until).items() if (frames := _frames(data))}
    finally:
        for file in files.values():
            os.close(file)


def _signalled(pid: int) -> int | None:
    """Have a process write its frames; return the file that they go to, or None."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return None
    file = None
    try:
        path, number = _file(pid)
        file = _opened(path)
        if not takes(pid, number):
            os.close(file)
            return None
        os.ftruncate(file, 0)
        signal.pidfd_send_signal(process, number)
    except OSError:  # it has ended, or may not be looked at
        if file is not None:
            os.close(file)
        return None
    finally:
        os.close(process)
    return file


def _opened(path: str) -> int:
    """Open a file in memory for writing. Raises OSError, also for a file that is on a disk, whatever its name says."""
    seen = os.open(path, os.O_PATH)
    try:
        found = os.stat(seen)
        own = os.memfd_create("of this kind")
        try:
            if found.st_nlink or found.st_dev != os.fstat(own).st_dev or not stat.S_ISREG(found.st_mode):
                raise FileNotFoundError(path)
        finally:
            os.close(own)
        return os.open(f"/proc/self/fd/{seen}", os.O_RDWR)
    finally:
        os.close(seen)


def _file(pid: int) -> tuple[str, int]:
    """Return the file to which a process writes its frames, and on which signal. Raises OSError."""
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        path = f"{folder}/{name}"
        try:
            found = _FILE.fullmatch(os.readlink(path))
        except FileNotFoundError:
            continue  # it was closed meanwhile
        if found is not None and signal.SIGRTMIN < int(found[1]) < signal.SIGRTMAX:
            return path, int(found[1])
    raise FileNotFoundError(folder)


def _read(files: dict[int, int], until: float) -> dict[int, bytes]:
    """Return what is in files once they do not grow any more: nothing marks their ends."""
    found = dict.fromkeys(files, b"")
    growing = set(files)
    while growing and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
        for pid in [*growing]:
            data = os.pread(files[pid], _MOST_BYTES, 0)
            if data and data == found[pid]:
                growing.remove(pid)
            found[pid] = data
    return found


def _frames(data: bytes) -> tuple[str, ...]:
    text = data.decode(errors="replace")
    return written((found[3], found[1], int(found[2])) for found in _FRAME.finditer(text))
