"""Wait for, and kill, a process that is not a child of this one.

Knows pidfds, where the system has them. Must not know what the process does.
Invariant: with a pidfd, a later process with the same pid is never touched.
"""

import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ..fork_safety import close_on_fork

_POLL: Final = 0.01
"""Seconds between checks that a process is alive, where the system does not report its end."""


def open_pidfd(pid: int) -> int | None:
    """Return a pidfd, readable once the process has ended; None if there is no such process, or no pidfds."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def exists(pid: int) -> bool:
    """Return whether a process has this pid."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        pass
    return True


class Process:
    """A process, running or ended."""

    def __init__(self, pid: int, fd: int | None) -> None:
        """Take ownership of the pidfd `fd`, if there is one. A forked child closes its copy."""
        self.pid = pid
        self._fd = fd
        close_on_fork(self)

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for its end; return whether it has ended."""
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
        """Send SIGKILL, unless it has ended."""
        with suppress(OSError):  # it has ended
            if self._fd is not None:
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)
            else:
                os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> int | None:
        """Return its exit status (negative: a signal) if it has ended and this process has adopted it, else None.

        The init process of a container adopts orphans, and so does one that has set PR_SET_CHILD_SUBREAPER.
        """
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

    def close(self, _close: Callable[[int], None] = os.close) -> None:
        """Free the pidfd. `_close` is bound because `os` may be gone when the interpreter exits."""
        fd, self._fd = self._fd, None
        if fd is not None:
            _close(fd)

    def __del__(self) -> None:
        self.close()
