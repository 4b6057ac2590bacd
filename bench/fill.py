"""Compare what a server counts against its budget with the memory that it takes, for each way to fill it.

    python bench/fill.py [--budget 256] [--backend uv] [--only queues ...]

Each way has a server of its own. It is filled to three quarters of the budget, or by --peers connections; a row shows
what the server counts, the growth of its resident memory, and the ratio of the two. Filling continues to a quarter more
than the budget; the last columns show the peak of resident memory as a fraction of the budget, and how many connections
the server closed. Exit status 1 if a ratio or a peak exceeds 1.5.

The compiled build is measured if it is up to date; otherwise, and with BENCH_BUILD=interpreted, the checkout. The first
line names the build.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
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

sys.path.append(str(Path(__file__).parent.parent))

from bench import processes

processes.use_build()

from tcpstore_async import Limits, serve  # noqa: E402  (the path comes first)
from tcpstore_async.auth.access import Access  # noqa: E402
from tcpstore_async.observe.history import History  # noqa: E402
from tcpstore_async.serving import build, tune_gc  # noqa: E402
from tcpstore_async.wire.values import pack  # noqa: E402

MIB = 1 << 20
MAX_RATIO = 1.5
LARGE = 8 * MIB
HELLO = bytes.fromhex("00cef7853c")
SET, GET, ADD, CHECK, WAIT = 1, 3, 4, 5, 6
APPEND, MULTI_SET, PING, PUSH, LIST_KEYS = 9, 11, 13, 14, 17
WAIT_COUNT, INTRODUCE, LEASE, LINK, AUTH = 66, 67, 68, 76, 78


def frame(opcode: int, *fields: bytes) -> bytes:
    return bytes([opcode]) + b"".join(map(pack, fields))


def keys(opcode: int, names: list[bytes]) -> bytes:
    return bytes([opcode]) + struct.pack("<Q", len(names)) + b"".join(map(pack, names))


def number(value: int) -> bytes:
    return struct.pack("<q", value)


WITH_TOKEN = HELLO + frame(AUTH, b"token")
"""The server takes any token for one with a prefix and limits."""


class Peers:
    """The connections that fill one server."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.all: list[socket.socket] = []

    def connect(self, hello: bytes = HELLO) -> socket.socket:
        peer = socket.socket()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.connect(("127.0.0.1", self.port))
        peer.sendall(hello)
        self.all.append(peer)
        return peer

    def send_much(self, peer: socket.socket, data: bytes) -> None:
        """Send as much as the server reads within half a second."""
        peer.setblocking(False)
        deadline = time.monotonic() + 0.5
        while data and time.monotonic() < deadline:
            try:
                data = data[peer.send(data) :]
            except BlockingIOError:
                time.sleep(0.002)


Way = Callable[[Peers], Iterator[None]]
"""Fills a server, a little more with each `next`."""


def stored(make: Callable[[int], bytes], count: int = 2000, ping: bytes = b"", hello: bytes = HELLO) -> Way:
    """Fill with one peer that stores again and again; with a `ping`, it waits until the server has done so."""

    def fill(peers: Peers) -> Iterator[None]:
        at = 0
        peer = peers.connect(hello)
        while True:
            try:
                peer.sendall(b"".join(make(at + i) for i in range(count)) + ping)
                if ping and not peer.recv(len(ping)):
                    raise ConnectionError
            except OSError:
                peer = peers.connect(hello)
            at += count
            yield

    return fill


def sent_once(make: Callable[[int], bytes], hello: bytes = HELLO) -> Way:
    """Fill with peers that send one request each."""

    def fill(peers: Peers) -> Iterator[None]:
        at = 0
        while True:
            with suppress(OSError):
                peers.connect(hello).sendall(make(at))
            at += 1
            if len(make(at)) > 10_000 or at % 20 == 0:
                yield

    return fill


def left_behind(make: Callable[[int], bytes], hello: bytes = HELLO) -> Way:
    """Fill with peers that send some requests each, and leave."""

    def fill(peers: Peers) -> Iterator[None]:
        at = 0
        while True:
            for _ in range(50):
                with suppress(OSError):
                    peer = peers.connect(hello)
                    peers.all.remove(peer)
                    with peer:
                        peer.sendall(make(at) + bytes([PING]) + b"1234")
                        peer.recv(4)
                at += 1
            yield

    return fill


def suspended(peers: Peers) -> Iterator[None]:
    """Fill with sessions whose connections break."""
    at = 0
    while True:
        for _ in range(20):
            with suppress(OSError):
                peer = peers.connect(WITH_TOKEN)
                items = {b"id": os.urandom(16), b"secret": os.urandom(16), b"version": b"1", b"single": b"1"}
                pairs = b"".join(pack(name) + pack(value) for name, value in items.items())
                peer.sendall(bytes([LINK]) + number(len(items)) + pairs + keys(WAIT, [b"/job/%d" % at]))
                while b'"instance"' not in peer.recv(1 << 16):
                    pass
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                peer.close()
            at += 1
        yield


def not_read(prepare: bytes, make: Callable[[int], bytes]) -> Way:
    """Fill with peers that send requests and do not read the replies."""

    def fill(peers: Peers) -> Iterator[None]:
        first = peers.connect()
        first.sendall(prepare)
        at = 0
        while True:
            with suppress(OSError):
                peers.send_much(peers.connect(), make(at))
            at += 1
            yield

    return fill


INTRODUCTION = b"".join(pack(b"%02d" % i) + pack(b"\xff\xff") for i in range(90))

KEY_LIST = [b"/default_pg/0//cuda//nccl_storekey_0_%d" % i for i in range(125)]

WAYS: dict[str, Way] = {
    "half a large value each": sent_once(lambda i: frame(SET, b"k", bytes(LARGE))[:-1]),
    "half a list of short keys each": sent_once(lambda i: keys(CHECK, [b"key"] * 131_072)[:-1]),
    "half a list of pairs each": sent_once(
        lambda i: bytes([MULTI_SET]) + number(131_072) + (pack(b"key") + pack(b"value")) * 100_000
    ),
    "one byte of a frame each": sent_once(lambda i: b"\x01"),
    "large values": stored(lambda i: frame(SET, b"%d" % i, bytes(LARGE)), 1),
    "short keys and values": stored(lambda i: frame(SET, b"%d" % i, b"")),
    "long keys": stored(lambda i: frame(SET, b"%d" % i + bytes(1000), b"v"), 200),
    "counters": stored(lambda i: bytes([ADD]) + pack(b"%d" % i) + number(10**15)),
    "values grown by APPEND": stored(lambda i: frame(APPEND, b"%d" % (i // 2), b"v" * 50)),
    "queues of one item": stored(lambda i: frame(PUSH, b"%d" % i, b"")),
    "one queue": stored(lambda i: frame(PUSH, b"q", b"")),
    "leased items": stored(lambda i: frame(PUSH, b"q", b"") + bytes([LEASE]) + pack(b"q") + number(i)),
    "waiting for many keys": stored(
        lambda i: keys(WAIT, [b"%d" % (1000 * i + j) for j in range(1000)]), 1, bytes([PING]) + b"1234"
    ),
    "many waiting for one list": sent_once(lambda i: keys(WAIT, KEY_LIST)),
    "half a known list each": sent_once(lambda i: keys(WAIT, KEY_LIST) if i < 3 else keys(WAIT, KEY_LIST)[:-1]),
    "many waiting for one key": sent_once(lambda i: keys(WAIT, [b"k"])),
    "many waiting for a count": sent_once(lambda i: bytes([WAIT_COUNT]) + pack(b"n") + number(10**6 + i)),
    "short replies": not_read(b"", lambda i: frame(PING)[:1] + b"1234" + (b"\x0d" + b"1234") * 1_500_000),
    "replies of a kilobyte": not_read(
        b"", lambda i: b"".join(frame(SET, b"k", b"%1000d" % j) + frame(GET, b"k") for j in range(6000))
    ),
    "old versions, SET": not_read(b"", lambda i: frame(SET, b"v", bytes(LARGE)) + frame(GET, b"v") * 2),
    "old versions, APPEND": not_read(
        frame(APPEND, b"v", bytes(LARGE)) * 2, lambda i: frame(APPEND, b"v", b"x") + frame(GET, b"v")
    ),
    "LIST_KEYS": not_read(
        b"".join(frame(SET, b"%d" % i + bytes(1000), b"") for i in range(8000)), lambda i: bytes([LIST_KEYS]) * 2
    ),
    "LIST_KEYS while keys are added": not_read(
        b"".join(frame(SET, b"%d" % i + bytes(1000), b"") for i in range(8000)),
        lambda i: frame(SET, b"new%d" % i, b"") + bytes([LIST_KEYS]),
    ),
    "introductions": sent_once(lambda i: bytes([INTRODUCE]) + number(90) + INTRODUCTION),
    "counters of barriers": stored(lambda i: bytes([ADD]) + pack(b"%d/num_members" % i) + number(1)),
    "many who come to barriers": sent_once(
        lambda i: b"".join(bytes([ADD]) + pack(b"%d/num_members" % j) + number(1) for j in range(20))
    ),
    "keys of peers that have left": left_behind(
        lambda i: bytes([INTRODUCE]) + number(90) + INTRODUCTION + frame(SET, b"%d" % i, b"")
    ),
    "a token's short keys": stored(lambda i: frame(SET, b"/job/%d" % i, b""), hello=WITH_TOKEN),
    "a token's items that go back": left_behind(
        lambda i: (
            b"".join(
                frame(PUSH, b"/job/%d/%d" % (i, j), b"") + bytes([LEASE]) + pack(b"/job/%d/%d" % (i, j)) + number(j)
                for j in range(50)
            )
        ),
        WITH_TOKEN,
    ),
    "a token's connections": sent_once(lambda i: b"\x0d1234", WITH_TOKEN),
    "a token's connections that broke": suspended,
    "connections": sent_once(lambda i: b"\x0d1234"),
    "connections without VALIDATE": sent_once(lambda i: b"", b""),
}  # fmt: skip


class Child:
    """A server in a child process, which reports what it counts."""

    def __init__(self, budget: int, backend: str) -> None:
        command = [sys.executable, __file__, "--serve", str(budget), "--backend", backend]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.port: int = self._read()["port"]

    def report(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def end(self) -> str:
        """Stop the server and return its log."""
        return self.process.communicate()[1]


async def server(budget: int, backend: str) -> None:
    """The child's part: serve, and report for each line of standard input."""
    tune_gc()
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    async with serve(limits=Limits(budget_bytes=budget, validate_seconds=600), backend=backend) as served:
        store = served.store
        store.hub.auth.authenticate = lambda token: Access("t", prefix="job/", max_keys=10**9, max_bytes=10**12)
        if store.observer is None:
            store.observe(History(store))  # as for an admin socket

        def report() -> None:
            if not sys.stdin.readline():
                ended.set()
                return
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            count = served.count
            print(json.dumps({"used": store.budget.used(), "rss": resident, "count": count}), flush=True)

        loop.add_reader(sys.stdin.fileno(), report)
        print(json.dumps({"port": served.port}), flush=True)
        await ended.wait()


def settled(child: Child) -> dict[str, Any]:
    """Return the report once it no longer changes."""
    before = child.report()
    while True:
        time.sleep(0.05)
        now = child.report()
        if now["used"] == before["used"] and now["count"] == before["count"]:
            return now
        before = now


def measure(name: str, budget: int, backend: str, most_peers: int) -> bool:
    """Fill a server in one way, print its row, and return whether it keeps the limits."""
    child = Child(budget, backend)
    peers = Peers(child.port)
    warm = peers.connect()
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
            now = child.report()
            peak = max(peak, (now["rss"] - start["rss"]) / budget)
            if not full and now["used"] > found["used"]:
                found = now  # in case that the server closes the connection before it is full
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
    used, grown = found["used"] - start["used"], found["rss"] - start["rss"]
    closed = len(peers.all) - last["count"]
    ratio = grown / used if used else float("inf")
    print(f"{name:32} {used / MIB:8.1f} {grown / MIB:8.1f} {ratio:6.2f} {peak:8.2f} {closed:7d}", flush=True)
    if "Traceback" in log:
        print(log)
    return ratio <= MAX_RATIO and peak <= MAX_RATIO


def main() -> int:
    parser = processes.parser(__doc__)
    parser.add_argument("--budget", type=int, default=256, help="MiB that the server may use (256)")
    parser.add_argument("--backend", default="uv", help="uv or threaded (uv)")
    parser.add_argument("--peers", type=int, default=8000, help="connections at which a server counts as full (8000)")
    parser.add_argument("--only", nargs="*", default=[], help="only ways whose name contains one of these words")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if given.serve:
        import uvloop

        uvloop.run(server(given.serve, given.backend))
        return 0
    print(f"{build()}, budget {given.budget} MiB, backend {given.backend}; MiB")
    print(f"{'':32} {'counted':>8} {'grew':>8} {'ratio':>6} {'peak':>8} {'closed':>7}")
    chosen = [name for name in WAYS if not given.only or any(word in name for word in given.only)]
    fine = [measure(name, given.budget * MIB, given.backend, given.peers) for name in chosen]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
