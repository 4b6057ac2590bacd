"""A process that ends with this one: a relay, the HTTP process of a server, or ports of named stores.

Must not know what it does.
Invariant: the process ends when its owner closes it, drops it, or ends in whatever way, and not before: signals that a
job manager or a terminal sends to all processes of a job do not reach it.
"""

import os
import socket
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from ..base import python_process
from .fork_safety import close_on_fork

STOP_SECONDS: Final = 5.0
"""Time to end before it is killed."""

_COMMAND: Final = """# a tcpstore command that ends with its owner
from tcpstore_async.__main__ import main
main()
"""


class OwnedProcess:
    """A running program: the command line, unless another one is given."""

    def __init__(
        self,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        *,
        program: str = _COMMAND,
        stdout: int = subprocess.DEVNULL,
        stderr: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start the program, by default in an environment without what is for the user's. Raises OSError.

        It must end when its standard input does, as commands with `--owner-fd 0` do.
        """
        # A child that outlives this process must hold no copy of `end`.
        end, stdin = socket.socketpair()
        self.end: socket.socket = close_on_fork(end)
        """The other end of its standard input. Readable once the process has ended."""
        try:
            with stdin:
                self.process = subprocess.Popen(
                    python_process.command(program, *arguments),
                    stdin=stdin.fileno(),
                    stdout=stdout,
                    stderr=stderr,
                    env=python_process.environment() if environment is None else environment,
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
