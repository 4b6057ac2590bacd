"""Find the holder of a TCP port of this machine, for errors and for `tcpstore doctor`.

Knows Linux's /proc. Must not know why it is asked.
Invariants: nothing is raised; what cannot be read in time is left out of the answer. No name is resolved.
"""

import errno
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from ..base.addresses import format_address

PROC: Final = Path("/proc")

_SECONDS: Final = 0.5
"""Time limit. A machine may have a million open files."""

_LISTEN: Final = "0A"

_LONGEST: Final = 100
"""Most characters of a command line."""

_FILES_PER_LOOK: Final = 256
"""Lines or open files between two checks of the time."""


class _Socket(NamedTuple):
    """A line of /proc/net/tcp or tcp6."""

    host: str
    port: int
    peer: str
    listens: bool
    uid: int
    inode: int


class Holder(NamedTuple):
    """What holds a port."""

    peer: str
    """Other end of the connection that holds it; "" for a listening socket."""
    uid: int
    """User who made the socket."""
    pid: int = 0
    """0 if the process was not found: it is another user's, in another container, or time was up."""
    command: str = ""

    def __str__(self) -> str:
        if not self.pid:
            text = f"a process of uid {self.uid} that was not found"
            if os.geteuid() in (0, self.uid):
                text += " (it may be in another container)"
            else:
                text += " (only that user, and root, can see which)"
        elif self.pid == os.getpid():
            text = f"this process, pid {self.pid}"
        else:
            text = f"pid {self.pid} ({self.command})" if self.command else f"pid {self.pid}"
        return f"{text}, for a connection to {self.peer}" if self.peer else text


def find_holder(host: str, port: int, proc: Path = PROC, seconds: float = _SECONDS) -> Holder | None:
    """Return what prevents listening on an address of this machine; None if nothing is found.

    `host` is an IPv4 or IPv6 address. Takes about `seconds` at most.
    """
    end = time.monotonic() + seconds
    found = _find_socket(host, port, proc, end)
    if found is None:
        return None
    peer = "" if found.listens else found.peer
    pid = _find_process(found.inode, proc, end)
    return Holder(peer, found.uid, pid, _command(proc, pid)) if pid else Holder(peer, found.uid)


def holder_of(error: OSError, host: object, port: int) -> Holder | None:
    """Return the holder of the address if `error` says that it is in use; None if it does not, or none is found."""
    return find_holder(str(host), port) if error.errno == errno.EADDRINUSE and port else None


def by_holder(error: OSError, host: object, port: int) -> str:
    """Return " by …", to follow "Address already in use", or "" if `holder_of` finds none."""
    holder = holder_of(error, host, port)
    return f" by {holder}" if holder is not None else ""


def _find_socket(host: str, port: int, proc: Path, end: float) -> _Socket | None:
    """Return the socket that listens on an address, or else a connection that uses the port."""
    connection: _Socket | None = None
    for name in ("tcp", "tcp6"):
        for found in _sockets(proc / "net" / name, port, end):
            if not _overlap(host, found.host):
                continue
            if found.listens:
                return found
            if found.inode:  # a closed connection is no obstacle
                connection = connection or found
    return connection


def _sockets(table: Path, port: int, end: float) -> Iterator[_Socket]:
    """Yield the sockets with this local port, in the kernel's order: listening ones first."""
    wanted = f":{port:04X}"
    with suppress(OSError, ValueError, IndexError), open(table) as file:
        for number, text in enumerate(file):
            if number % _FILES_PER_LOOK == 0 and time.monotonic() > end:
                return
            words = text.split(maxsplit=10)
            if words[1].endswith(wanted):
                host, remote = _address(words[1]), _address(words[2])
                peer = format_address(remote, int(words[2].rpartition(":")[2], 16))
                yield _Socket(host, port, peer, words[3] == _LISTEN, int(words[7]), int(words[9]))


def _address(text: str) -> str:
    """Parse an address that the kernel prints as words in native byte order."""
    digits = text.rpartition(":")[0]
    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))


def _overlap(one: str, other: str) -> bool:
    """Return whether a socket listening on one address prevents listening on the other."""
    try:
        first, second = _plain(one), _plain(other)
    except ValueError:
        return False
    return first == second or first.is_unspecified or second.is_unspecified


def _plain(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def _find_process(inode: int, proc: Path, end: float) -> int:
    """Return the process that has a socket open; 0 if none is found.

    Tries this process first, then younger ones, which it may have started.
    """
    wanted = f"socket:[{inode}]"
    try:
        others = [int(name) for name in os.listdir(proc) if name.isdecimal()]
    except OSError:
        return 0
    mine = os.getpid()
    for pid in [mine, *sorted(others, key=lambda other: other < mine)]:
        folder = f"{proc}/{pid}/fd"
        with suppress(OSError):
            for number, name in enumerate(os.listdir(folder)):
                if number % _FILES_PER_LOOK == 0 and time.monotonic() > end:
                    return 0
                with suppress(OSError):
                    if os.readlink(f"{folder}/{name}") == wanted:
                        return pid
    return 0


def arguments_of(pid: int, proc: Path = PROC) -> list[str]:
    """Return the beginning of the command line of a process, or its name; nothing if neither is known."""
    try:
        with open(proc / str(pid) / "cmdline", "rb") as file:
            raw = file.read(4 * _LONGEST).rstrip(b"\0")
        if not raw:
            raw = (proc / str(pid) / "comm").read_bytes().rstrip(b"\n")
    except OSError:
        return []
    return raw.decode(errors="replace").split("\0")


def _command(proc: Path, pid: int) -> str:
    """Return the command line of a process, printable and shortened; of a multi-line argument, the first line."""
    words = arguments_of(pid, proc)
    text = " ".join(f"{word.strip().splitlines()[0]} …" if "\n" in word.strip() else word for word in words)
    text = "".join(char if char.isprintable() else "?" for char in text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
