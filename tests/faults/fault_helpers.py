"""Shared by the fault tests: what a process uses, waiting for a condition, and one valid frame of every command."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from support import HANDSHAKE, LIMIT, RawPeer, Server, blob, keys, listening, resting, u64

I64 = struct.Struct("<q")


def until(condition: Callable[[], object], what: str) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.005)


def gone(pid: int) -> bool:
    """Return whether a process has ended, even if it was not waited for yet."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def settled(server: Server, other: RawPeer) -> None:
    """Wait until the server has executed everything that was sent before, on any connection."""
    other.ping()  # what was sent before has arrived
    resting(server.process.pid)


class Watch:
    """What a process uses, seen from outside."""

    def __init__(self, pid: int) -> None:
        self.folder = Path("/proc", str(pid))

    def memory(self) -> int:
        """Resident bytes."""
        return self._status("VmRSS") * 1024

    def files(self) -> int:
        """Open file descriptors."""
        return len(os.listdir(self.folder / "fd"))

    def threads(self) -> int:
        """Number of threads."""
        return len(os.listdir(self.folder / "task"))

    def cpu(self) -> float:
        """Seconds of CPU time, user and system."""
        fields = (self.folder / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def file_limit(self) -> tuple[int, int]:
        """Soft and hard limit on open files."""
        found = re.search(r"Max open files +(\d+) +(\d+)", (self.folder / "limits").read_text())
        assert found
        return int(found[1]), int(found[2])

    def file_table(self) -> int:
        """Descriptors that the kernel's table of open files can hold before it has to grow."""
        return self._status("FDSize")

    def _status(self, name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+)", (self.folder / "status").read_text())
        assert found
        return int(found[1])


def server_under(prefix: list[str], *options: str) -> AbstractContextManager[Server]:
    """`tcpstore serve`, started by another command such as prlimit."""
    return listening(["serve", "--port", "0", *options], prefix=prefix)


@contextmanager
def program(
    text: str, *arguments: str, options: Sequence[str] = (), cwd: str | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A Python program whose output the test reads line by line; killed at the end."""
    process = subprocess.Popen(
        [sys.executable, *options, "-c", text, *arguments],
        cwd=cwd or tempfile.gettempdir(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait(LIMIT)
        process.stdin.close()
        process.stdout.close()


def connect(port: int) -> RawPeer | None:
    """Return a connection, if the server accepts it."""
    peer = RawPeer(port, validate=False)
    try:
        peer.send(HANDSHAKE + b"\x0dping")
        if peer.socket.recv(4) == b"ping":
            return peer
    except ConnectionError:
        pass
    peer.close()
    return None


def number(peer: RawPeer, request: bytes) -> int:
    """Send a request; return its reply, an i64."""
    answer: int = I64.unpack(peer.ask(request, 8))[0]
    return answer


def num_keys(peer: RawPeer) -> int:
    return number(peer, b"\x07")


def get(peer: RawPeer, key: bytes) -> bytes:
    return peer.ask_value(b"\x03" + blob(key))


FRAMES: dict[str, bytes] = {
    "SET": b"\x01" + blob(b"/set") + blob(b"value"),
    "COMPARE_SET": b"\x02" + blob(b"/compare_set") + blob(b"") + blob(b"desired"),
    "GET": b"\x03" + blob(b"/get"),
    "ADD": b"\x04" + blob(b"/add") + I64.pack(3),
    "CHECK": b"\x05" + keys(b"/check", b"/another"),
    "WAIT": b"\x06" + keys(b"/wait", b"/another"),
    "GETNUMKEYS": b"\x07",
    "DELETE_KEY": b"\x08" + blob(b"/kept"),
    "APPEND": b"\x09" + blob(b"/append") + blob(b"value"),
    "MULTI_GET": b"\x0a" + keys(b"/multi_get", b"/another"),
    "MULTI_SET": b"\x0b" + u64(2) + blob(b"/multi/1") + blob(b"one") + blob(b"/multi/2") + blob(b"two"),
    "CANCEL_WAIT": b"\x0c",
    "PING": b"\x0d1234",
    "QUEUE_PUSH": b"\x0e" + blob(b"/queue") + blob(b"item"),
    "QUEUE_POP": b"\x0f" + blob(b"/full"),
    "QUEUE_LEN": b"\x10" + blob(b"/full"),
    "LIST_KEYS": b"\x11",
    "BARRIER": b"\x12" + blob(b"/barrier") + I64.pack(2),
}
"""One valid frame of every command but VALIDATE."""
