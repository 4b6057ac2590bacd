"""A thread in a rank that tells where the main thread is, and which collectives the process has entered.

Knows the main thread's frames and who may ask. Must not know who asks, nor what follows.

Invariants: it costs nothing until it is asked, and answers one question at a time. Only the process's user and root get
an answer, and no values. Where the thread does not get the GIL, a signal has `faulthandler` write the frames to a file
in memory, which needs no GIL; its name tells the signal. A forked child has no responder until it starts its own.
"""

import faulthandler
import fcntl
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Final

import msgspec

from ..base.peer_process import peer_process
from .flight_recorder import last_collectives
from .frames import written
from .kernel import status
from .report import Collective

NAME: Final = "tcpstore-stacks-"
"""Of the socket, before the pid, and of the file, before the number of the signal."""

_FULL_SECONDS: Final = 0.1
"""Time until it looks again whether there is a descriptor for a connection."""

_SEND_SECONDS: Final = 1.0
"""An answer fits the socket's buffer, so this is for one who asks often and reads nothing."""


class Answer(msgspec.Struct):
    frames: tuple[str, ...]
    collectives: tuple[Collective, ...]


class _Responder:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.dump = -1
        self.signal = 0
        self.closing = False
        self.thread = threading.Thread(target=self._run, name="tcpstore stacks", daemon=True)
        try:
            self.listener.bind(f"\0{NAME}{self.pid}")
            self.listener.listen(4)
            self._register()
            self.thread.start()
        except BaseException:
            self.close()
            raise

    def _register(self) -> None:
        """Have a signal that nothing else handles write the frames; if there is none, only the thread answers."""
        self.signal = free_signal()
        if self.signal:
            self.dump = os.memfd_create(f"{NAME}{self.signal}")
            fcntl.fcntl(self.dump, fcntl.F_SETFL, os.O_APPEND)  # whoever asks truncates it
            faulthandler.register(self.signal, self.dump, all_threads=False)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            try:
                connection = self.listener.accept()[0]
            except OSError:
                if self.closing:
                    return
                time.sleep(_FULL_SECONDS)  # there is no descriptor left
                continue
            with connection:
                try:
                    if peer_process(connection)[1] in (0, os.getuid()):
                        connection.settimeout(_SEND_SECONDS)
                        connection.sendall(_answer())
                except OSError:
                    pass  # who asked is gone

    def close(self) -> None:
        """End it. In a forked child it closes what the child has inherited."""
        self.closing = True
        if self.dump >= 0:
            os.close(self.dump)  # first: whoever finds it open may send the signal
            faulthandler.unregister(self.signal)
        if self.pid == os.getpid():
            try:
                self.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            except OSError:
                pass  # it does not listen
        self.listener.close()
        if self.pid == os.getpid() and self.thread.is_alive():
            self.thread.join(_SEND_SECONDS)  # until it returns from accept, the name is taken


_running: _Responder | None = None


def start() -> None:
    """Start the responder of this process, which is on Linux: `switch` knows. Idempotent.

    What it needs may not be there, as in a sandbox: then there is none.
    """
    global _running
    if _running is None:
        try:
            _running = _Responder()
        except (OSError, RuntimeError):
            pass  # no thread, descriptor or signal is to be had


def stop() -> None:
    """End the responder. Idempotent."""
    global _running
    ended, _running = _running, None
    if ended is not None:
        ended.close()


def takes(pid: int, number: int) -> bool:
    """Return whether a process of this user, with all its ids, catches this signal in its main thread. Raises OSError.

    Where the main thread blocks it, another one would get it, or it would wait until nobody catches it any more.
    """
    found, bit = status(pid), 1 << (number - 1)
    if {*map(int, found["Uid"].split())} != {os.geteuid()}:
        return False
    return bool(int(found["SigCgt"], 16) & bit) and not int(found["SigBlk"], 16) & bit


def free_signal() -> int:
    """Return a real-time signal that this process neither catches, ignores nor blocks; 0 if there is none."""
    found = status(os.getpid())
    used = int(found["SigCgt"], 16) | int(found["SigIgn"], 16) | int(found["SigBlk"], 16)
    return next((one for one in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1) if not used >> (one - 1) & 1), 0)


def _answer() -> bytes:
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    return msgspec.json.encode(Answer(written(_frames(main)), last_collectives()))


def _frames(frame: FrameType | None) -> Iterator[tuple[str, str, int]]:
    while frame is not None:
        yield frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno or 0
        frame = frame.f_back


os.register_at_fork(after_in_child=stop)
