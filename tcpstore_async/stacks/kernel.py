"""What the kernel says of a process: its state, the CPU that it has used, and where its main thread sleeps.

Knows /proc. Must not know Python. Invariant: what may not be read is empty, and a process that has ended is `gone`.
"""

import os
import platform
from pathlib import Path
from typing import Final, NamedTuple

from .report import Doing

GONE: Final = "gone"
STOPPED: Final = ("stopped", "traced")

_STATES: Final = {
    "D": "waiting for a disk",
    "I": "sleeping",
    "R": "running",
    "S": "sleeping",
    "T": "stopped",
    "X": GONE,
    "Z": "zombie",
    "t": "traced",
    "x": GONE,
}
_TICKS: Final = os.sysconf("SC_CLK_TCK")

_CALLS: Final = """
    read 0 63, write 1 64, poll 7 -, pread64 17 67, readv 19 65, select 23 -, pause 34 -, nanosleep 35 101,
    connect 42 203, accept 43 202, sendto 44 206, recvfrom 45 207, sendmsg 46 211, recvmsg 47 212, wait4 61 260,
    fcntl 72 25, flock 73 32, fsync 74 82, fdatasync 75 83, rt_sigtimedwait 128 137, futex 202 98,
    clock_nanosleep 230 115, epoll_wait 232 -, waitid 247 95, openat 257 56, pselect6 270 72, ppoll 271 73,
    epoll_pwait 281 22, accept4 288 242, epoll_pwait2 441 441
"""
"""System calls in which a process may stay, with their numbers on x86_64 and aarch64."""

INTERRUPTED: Final = frozenset(
    {
        *("poll", "select", "pause", "nanosleep", "rt_sigtimedwait", "clock_nanosleep", "epoll_wait", "pselect6"),
        *("ppoll", "epoll_pwait", "epoll_pwait2"),
    }
)
"""System calls that a signal ends, whatever its handler does."""

_COLUMN: Final = {"x86_64": 1, "aarch64": 2}.get(platform.machine(), 0)
_NAMES: Final = {words[_COLUMN]: words[0] for words in map(str.split, _CALLS.split(","))}


class Seen(NamedTuple):
    """A process at one moment."""

    state: str
    user: int = -1
    """Who may look at it; -1 if it is gone."""
    cpu: float = 0.0
    """Seconds of all its threads."""
    born: int = 0
    """When it started: another process with the same pid has another value."""
    switches: int = -1
    """How often its main thread has waited; -1 if that is not known."""


def look(pid: int) -> Seen:
    """Look at a process."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        user = os.stat(f"/proc/{pid}").st_uid
        switches = int(status(pid).get("voluntary_ctxt_switches", -1))
    except OSError:
        return Seen(GONE)
    cpu = (int(words[11]) + int(words[12])) / _TICKS
    return Seen(_STATES.get(words[0], "sleeping"), user, cpu, int(words[19]), switches)


def status(pid: int) -> dict[str, str]:
    """Return what the kernel says of a process and its main thread, keyed by name. Raises OSError."""
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    return {name: value for name, _, value in (line.partition(":\t") for line in lines)}


def describe(pid: int, state: str) -> Doing:
    """Return what a process in this state does, without frames."""
    wchan, call = _read(pid, "wchan"), _read(pid, "syscall").partition(" ")[0]
    return Doing(state, "" if wchan == "0" else wchan, _NAMES.get(call, ""))


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text().strip()
    except OSError:
        return ""
