"""A `tcpstore` command in a process that ends with this one: a relay, or the HTTP process of a server.

Must not know what the command does.
Invariant: the process ends when its owner closes it, drops it, or ends in whatever way, and not before: signals that a
job manager or a terminal sends to all processes of a job do not reach it.
"""

import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from .fork_safety import close_on_fork

STOP_SECONDS: Final = 5.0
"""Time to end before it is killed."""


class OwnedProcess:
    """A running command."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdout: int = subprocess.DEVNULL,
        stderr: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start `tcpstore` with `arguments`, which `--owner-fd 0` follows. Raises OSError."""
        # The process ends when its standard input does. A child that outlives this process must hold no copy of `end`.
        end, stdin = socket.socketpair()
        self.end: socket.socket = close_on_fork(end)
        """Readable once the process has ended."""
        try:
            with stdin:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "tcpstore_async", *arguments, "--owner-fd", "0"],
                    stdin=stdin.fileno(),
                    stdout=stdout,
                    stderr=stderr,
                    env=environment,
                    pass_fds=pass_fds,
                    start_new_session=True,
                )
        except BaseException:
            end.close()
            raise
        self.close = weakref.finalize(self, _stop, self.process, end, os.getpid())
        """Ends the process, and kills it if it takes too long. Idempotent. Does nothing in a forked child."""

    @property
    def pid(self) -> int:
        return self.process.pid


def _stop(process: "subprocess.Popen[bytes]", end: socket.socket, owner: int) -> None:
    if os.getpid() != owner:
        return
    with end, suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)  # works even if another process holds a copy
    if process.stdout is not None:
        process.stdout.close()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
