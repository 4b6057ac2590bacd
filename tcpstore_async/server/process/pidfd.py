"""A process that is no child of this one: wait for its end, kill it.

Knows: descriptors of processes, where the system has them. Must not know: what the process does.
Invariant: with a descriptor, no other process that has got the same pid is ever meant.
"""

import os
import select
import signal
import time
from contextlib import suppress
from typing import Final

from ..fork_safety import close_on_fork

_POLL: Final = 0.01
"""Seconds between looks whether a process lives, where the system does not report its end."""


def open_pidfd(pid: int) -> int | None:
    """A descriptor that can be read once the process has ended; None where there is no such thing, or no process."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def exists(pid: int) -> bool:
    """Whether there is a process of that number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


class Process:
    """A process that runs, or has run."""

    def __init__(self, pid: int, fd: int | None) -> None:
        """Owns the descriptor, if there is one. A forked child has none of it."""
        self.pid = pid
        self._fd = fd
        close_on_fork(self)

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, at the latest after so many seconds."""
        if self._fd is not None:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            return bool(poll.poll(max(0.0, seconds) * 1000))
        end = time.monotonic() + seconds
        while exists(self.pid):
            if time.monotonic() >= end:
                return False
            time.sleep(_POLL)
            self.reap()
        return True

    def kill(self) -> None:
        with suppress(OSError):  # it has ended
            if self._fd is not None:
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)
            else:
                os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> int | None:
        """Its status, if it has ended and been adopted by this process, which is then the init of a container."""
        try:
            if self._fd is not None:
                ended = os.waitid(os.P_PIDFD, self._fd, os.WEXITED | os.WNOHANG)
            else:
                ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG)
        except OSError:
            return None
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __del__(self) -> None:
        self.close()
