"""Programs that own a server, and how they and the server end."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import uvloop

import tcpstore_async
from faults.fault_helpers import program
from support import LIMIT

ROOT = str(Path(tcpstore_async.__file__).parent.parent)
PLACES = [ROOT, *{str(Path(module.__file__ or "").parent.parent) for module in (msgspec, uvloop)}]
"""Where the package under test is, and what it needs."""

STREAMS = """
import os, sys
IN, OUT = os.dup2(0, 8), os.dup2(1, 9)

def say(*words):
    os.write(OUT, " ".join(map(str, words)).encode() + b"\\n")
"""

HOST = """
from tcpstore_async.server import master
hosted = master.host(0)
say(hosted.port, hosted.pid)
"""
"""Start a server and print its port, after STREAMS; a test appends what the program does then."""

WAIT = "os.read(IN, 1)\n"

RELEASE = WAIT + "hosted.release()\nsay('released')\n" + WAIT


def port_is_free(port: int) -> bool:
    """Return whether a server could listen on this port now, on both families."""
    with socket.socket(socket.AF_INET6) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind(("::", port))
            probe.listen()
        except OSError:
            return False
        return True


class Seen:
    """A process that is no child, watched through a pidfd, so that its pid cannot be reused unnoticed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def running(self, seconds: float = 0) -> bool:
        """Return whether it still runs after so many seconds."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return not poll.poll(seconds * 1000)

    def ended(self) -> bool:
        """Wait for its end."""
        return not self.running(LIMIT)

    def signal(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self._fd, number)

    def maps(self) -> str:
        """Return the files that it has mapped."""
        return Path("/proc", str(self.pid), "maps").read_text()

    def close(self) -> None:
        """Kill it if it still runs."""
        if self.running():
            self.signal(signal.SIGKILL)
        os.close(self._fd)


@contextmanager
def seen(pid: int) -> Iterator[Seen]:
    process = Seen(pid)
    try:
        yield process
    finally:
        process.close()


class Owner:
    """A program that owns a server."""

    def __init__(self, process: subprocess.Popen[str], port: int, server: Seen) -> None:
        self.process = process
        self.port = port
        self.server = server

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        """End a WAIT."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@contextmanager
def owner(
    then: str, options: Sequence[str] = (), *, before: str = "", cwd: str | None = None, backend: str | None = None
) -> Iterator[Owner]:
    """A program that owns a server, with code to run before and after its start; both are killed at the end."""
    host = HOST if backend is None else HOST.replace("host(0)", f"host(0, backend={backend!r})")
    options = ["-W", "error::RuntimeWarning", *options]
    with program(STREAMS + before + host + then, options=options, cwd=cwd) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the program did not come to host"
        port, pid = map(int, line.split())
        with seen(pid) as server:
            yield Owner(process, port, server)
