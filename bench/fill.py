"""What a server counts against its budget, and what that takes: every way in which a peer can make it hold memory.

    python bench/fill.py [--budget 256] [--backend uv] [--only queues ...]

Each way has a server of its own. It is filled to three quarters of the budget, or by so many connections as --peers
says; then a row shows what the server counts, by how much its resident memory has grown, and the ratio of both. Filling
goes on to a quarter more than the budget: the last columns show the largest size that the server had, in parts of the
budget, and how many connections it closed. Exit status 1 if a ratio, or the largest size, is over 1.5.

The compiled build is measured if it is on PYTHONPATH (`make compile` makes it); the first line says which one it was.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tcpstore_async import Limits, serve
from tcpstore_async.serving import build, tune_gc

MIB = 1 << 20
MOST = 1.5
LARGE = 8 * MIB
HELLO = bytes.fromhex("00cef7853c")
SET, GET, ADD, CHECK, WAIT = 1, 3, 4, 5, 6
APPEND, MULTI_SET, PING, PUSH, LIST_KEYS = 9, 11, 13, 14, 17
WAIT_COUNT, INTRODUCE, LEASE = 66, 67, 68


def blob(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def frame(opcode: int, *fields: bytes) -> bytes:
    return bytes([opcode]) + b"".join(map(blob, fields))


def keys(opcode: int, names: list[bytes]) -> bytes:
    return bytes([opcode]) + struct.pack("<Q", len(names)) + b"".join(map(blob, names))


def number(value: int) -> bytes:
    return struct.pack("<q", value)


class Peers:
    """The connections of one way of filling."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.all: list[socket.socket] = []

    def new(self, hello: bytes = HELLO) -> socket.socket:
        peer = socket.socket()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.connect(("127.0.0.1", self.port))
        peer.sendall(hello)
        self.all.append(peer)
        return peer

    def pour(self, peer: socket.socket, data: bytes) -> None:
        """Send as much as the server takes."""
        peer.setblocking(False)
        deadline = time.monotonic() + 0.5
        while data and time.monotonic() < deadline:
            try:
                data = data[peer.send(data) :]
            except BlockingIOError:
                time.sleep(0.002)


Way = Callable[[Peers], Iterator[None]]
"""Goes on filling, a little more each time."""


def stored(make: Callable[[int], bytes], count: int = 2000) -> Way:
    """A peer that goes on storing."""

    def fill(peers: Peers) -> Iterator[None]:
        at = 0
        peer = peers.new()
        while True:
            try:
                peer.sendall(b"".join(make(at + i) for i in range(count)))
            except OSError:
                peer = peers.new()
            at += count
            yield

    return fill


def told(make: Callable[[int], bytes], hello: bytes = HELLO) -> Way:
    """Peers of which each says one thing."""

    def fill(peers: Peers) -> Iterator[None]:
        at = 0
        while True:
            with suppress(OSError):
                peers.new(hello).sendall(make(at))
            at += 1
            if len(make(at)) > 10_000 or at % 20 == 0:
                yield

    return fill


def unread(prepare: bytes, make: Callable[[int], bytes]) -> Way:
    """Peers of which each asks, and does not read; another one changes what is there."""

    def fill(peers: Peers) -> Iterator[None]:
        first = peers.new()
        first.sendall(prepare)
        at = 0
        while True:
            with suppress(OSError):
                peers.pour(peers.new(), make(at))
            at += 1
            yield

    return fill


SAID = b"".join(blob(b"%02d" % i) + blob(b"\xff\xff") for i in range(90))

WAYS: dict[str, Way] = {
    "half a large value each": told(lambda i: frame(SET, b"k", bytes(LARGE))[:-1]),
    "half a list of short keys each": told(lambda i: keys(CHECK, [b"key"] * 131_072)[:-1]),
    "half a list of pairs each": told(
        lambda i: bytes([MULTI_SET]) + number(131_072) + (blob(b"key") + blob(b"value")) * 100_000
    ),
    "one byte of a frame each": told(lambda i: b"\x01"),
    "large values": stored(lambda i: frame(SET, b"%d" % i, bytes(LARGE)), 1),
    "short keys and values": stored(lambda i: frame(SET, b"%d" % i, b"")),
    "long keys": stored(lambda i: frame(SET, b"%d" % i + bytes(1000), b"v"), 200),
    "counters": stored(lambda i: bytes([ADD]) + blob(b"%d" % i) + number(10**15)),
    "values that were appended to": stored(lambda i: frame(APPEND, b"%d" % (i // 2), b"v" * 50)),
    "queues of one item": stored(lambda i: frame(PUSH, b"%d" % i, b"")),
    "one queue": stored(lambda i: frame(PUSH, b"q", b"")),
    "leased items": stored(lambda i: frame(PUSH, b"q", b"") + bytes([LEASE]) + blob(b"q") + number(i)),
    "waiting for many keys": stored(lambda i: keys(WAIT, [b"%d" % (1000 * i + j) for j in range(1000)]), 1),
    "many waiting for one key": told(lambda i: keys(WAIT, [b"k"])),
    "many waiting for a number": told(lambda i: bytes([WAIT_COUNT]) + blob(b"n") + number(10**6 + i)),
    "short replies": unread(b"", lambda i: frame(PING)[:1] + b"1234" + (b"\x0d" + b"1234") * 1_500_000),
    "replies of a kilobyte": unread(
        b"", lambda i: b"".join(frame(SET, b"k", b"%1000d" % j) + frame(GET, b"k") for j in range(6000))
    ),
    "old versions, set": unread(b"", lambda i: frame(SET, b"v", bytes(LARGE)) + frame(GET, b"v") * 2),
    "old versions, appended to": unread(
        frame(APPEND, b"v", bytes(LARGE)) * 2, lambda i: frame(APPEND, b"v", b"x") + frame(GET, b"v")
    ),
    "LIST_KEYS": unread(
        b"".join(frame(SET, b"%d" % i + bytes(1000), b"") for i in range(8000)), lambda i: bytes([LIST_KEYS]) * 2
    ),
    "LIST_KEYS while keys come": unread(
        b"".join(frame(SET, b"%d" % i + bytes(1000), b"") for i in range(8000)),
        lambda i: frame(SET, b"new%d" % i, b"") + bytes([LIST_KEYS]),
    ),
    "introductions": told(lambda i: bytes([INTRODUCE]) + number(90) + SAID),
    "connections": told(lambda i: b"\x0d1234"),
    "connections without VALIDATE": told(lambda i: b"", b""),
}  # fmt: skip


class Child:
    """A server in a process of its own, which says what it counts."""

    def __init__(self, budget: int, backend: str) -> None:
        command = [sys.executable, __file__, "--serve", str(budget), "--backend", backend]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.port: int = self._line()["port"]

    def ask(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line: dict[str, Any] = json.loads(self.process.stdout.readline())
        return line

    def end(self) -> str:
        return self.process.communicate()[1]


async def server(budget: int, backend: str) -> None:
    tune_gc()
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    async with serve(limits=Limits(budget_bytes=budget, validate_seconds=600), backend=backend) as served:
        engine = served.engine

        def answer() -> None:
            if not sys.stdin.readline():
                ended.set()
                return
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            count = served.count
            print(json.dumps({"used": engine.budget.used(), "rss": resident, "count": count}), flush=True)

        loop.add_reader(sys.stdin.fileno(), answer)
        print(json.dumps({"port": served.port}), flush=True)
        await ended.wait()


def settled(child: Child) -> dict[str, Any]:
    """What it says once it says the same again."""
    before = child.ask()
    while True:
        time.sleep(0.05)
        now = child.ask()
        if now["used"] == before["used"] and now["count"] == before["count"]:
            return now
        before = now


def measure(name: str, budget: int, backend: str, most_peers: int) -> bool:
    child = Child(budget, backend)
    peers = Peers(child.port)
    warm = peers.new()
    warm.sendall(b"\x0d1234")
    warm.recv(4)
    start = settled(child)
    found = start
    peak = 0.0
    steps = WAYS[name](peers)
    began = time.monotonic()
    full = False
    made = 0
    try:
        for _ in steps:
            now = child.ask()
            peak = max(peak, (now["rss"] - start["rss"]) / budget)
            made += 1
            if not full and (now["used"] > budget * 3 / 4 or len(peers.all) >= most_peers):
                full = True
                found = settled(child)
                began = time.monotonic()
                quota = 2 + made * 2 // 3
            elif full:
                quota -= 1
            if (full and not quota) or len(peers.all) >= 1.3 * most_peers or time.monotonic() - began > 40:
                break
        last = settled(child)
    finally:
        for peer in peers.all:
            peer.close()
        log = child.end()
    if not full:
        found = last
    used, grown = found["used"] - start["used"], found["rss"] - start["rss"]
    closed = len(peers.all) - last["count"]
    ratio = grown / used
    print(f"{name:32} {used / MIB:8.1f} {grown / MIB:8.1f} {ratio:6.2f} {peak:8.2f} {closed:7d}", flush=True)
    if "Traceback" in log:
        print(log)
    return ratio <= MOST and peak <= MOST


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=int, default=256, help="in MiB")
    parser.add_argument("--backend", default="uv")
    parser.add_argument("--peers", type=int, default=8000)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if given.serve:
        import uvloop

        uvloop.run(server(given.serve, given.backend))
        return 0
    print(f"{build()}, budget {given.budget} MiB, {given.backend}")
    print(f"{'':32} {'counted':>8} {'took':>8} {'ratio':>6} {'largest':>8} {'closed':>7}")
    chosen = [name for name in WAYS if not given.only or any(word in name for word in given.only)]
    fine = [measure(name, given.budget * MIB, given.backend, given.peers) for name in chosen]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
