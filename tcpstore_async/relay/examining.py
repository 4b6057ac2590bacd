"""Find out what the processes of a relay's ranks do, when its server asks.

Knows a child process, which looks at them, and its deadline. Must not know links, nor what a process does.

Invariants: the loop waits for nothing. There is one examination at a time: a new one ends the one before. Its process
ends at the deadline, or with the relay. A report that does not fit into a frame is no report.
"""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec

from ..base import python_process
from ..stacks.report import HostReport, fitted
from ..wire.link import REPORT_BYTES

_PROGRAM: Final = """# looks at the processes of a relay's ranks
from tcpstore_async.stacks.examine import main
main()
"""

_SHARE: Final = 0.85
"""Of the time until the answer, the rest is for the network."""


class Examiner:
    """Runs the examinations of one relay."""

    def __init__(self, program: str = _PROGRAM) -> None:
        """`program` reads pids and a time of the monotonic clock, until which it writes a `HostReport`, all as JSON."""
        self.program = program
        self._number = -1
        """Of the question that is being answered; -1 if none is."""
        self._process: subprocess.Popen[bytes] | None = None

    def examine(
        self, number: int, seconds: float, pids: Iterable[int], on_report: Callable[[int, bytes], object]
    ) -> None:
        """Call `on_report` with the number and a report of these processes, if there is one within `seconds`."""
        self.close()
        self._number = number
        given = msgspec.json.encode({"pids": sorted(pids), "until": time.monotonic() + seconds * _SHARE})
        looking = asyncio.get_running_loop().run_in_executor(None, self._look, number, seconds, given)
        looking.add_done_callback(partial(self._done, number, on_report))

    def close(self) -> None:
        """End the examination under way. Idempotent."""
        self._number = -1
        if self._process is not None:
            _kill(self._process)

    def _look(self, number: int, seconds: float, given: bytes) -> bytes:
        """Return the report; empty if there is none. In a thread, as it waits."""
        try:
            process = self._process = subprocess.Popen(
                python_process.command(self.program),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=python_process.environment(),
                start_new_session=True,
            )
            with process:
                try:
                    if number != self._number:  # `close` may not have seen it
                        return b""
                    said = process.communicate(given, seconds)[0]
                    return fitted(msgspec.json.decode(said, type=HostReport), REPORT_BYTES)
                finally:
                    _kill(process)
        except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return b""

    def _done(self, number: int, on_report: Callable[[int, bytes], object], looking: "asyncio.Future[bytes]") -> None:
        if number == self._number:
            self._number = -1
            if looking.result():
                on_report(number, looking.result())


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End it, and what it has started."""
    if process.poll() is None:  # else its number may be another one's
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
