#!/usr/bin/env python3
"""Put a server under stress: many connections at once, clients that misbehave, or somebody who looks into it.

    python bench/stress.py thundering-herd [--at-once 10000] [--held 19000] [--runs 3]
    python bench/stress.py misbehaving [--pairs 7] [--seconds 2] [--bound 1.5]
    python bench/stress.py looking [--clients 19000] [--busy 64] [--pairs 7] [--seconds 8] [--bound 1.1]

All take --server 'COMMAND --port {port}' (default: `tcpstore serve`), pin it to CPU 0, and pin the load, which comes
from bench/loadgen, to CPU 1. Exit status 1 if the server fails.

`thundering-herd` needs root for a private network namespace with a somaxconn of 65,535. It opens all connections at
once, then holds many. It fails if a connection fails, if the kernel retransmits a segment or drops a connection because
the backlog is full, or if fewer are held than asked for.

`misbehaving` measures the p99 latency of 64 clients, each with one request in flight, with and without four others:

* garbage: sends what is no frame, is disconnected, and comes back, 50 times a second;
* half:    stops in the middle of a frame, holds the connection for half a second, and comes back;
* deaf:    requests 100 MiB of replies, reads nothing for half a second, and comes back;
* churn:   opens and closes 500 connections a second.

It fails if the median ratio of the pairs exceeds the bound. A ratio below 1 is possible: a disturbance may break up the
lockstep of clients and server and let them work in batches.

`looking` measures the same of the busy ones of many clients, of which the others wait for a list of keys, with and
without `tcpstore stat -i 1`, `tcpstore top` and the page, which is asked once a second. These run on the CPU of
the load while it is idle, and look at another, idle server otherwise, so that the ratio shows what the server does for
them. It needs root for a private network namespace, and fails if one of them is shown nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import select
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench import processes
from bench.compare import Server, run_job

HOST = "127.0.0.1"
TIMEOUT = 120.0
HANDSHAKE = b"\x00" + struct.pack("<I", 0x3C85F7CE)
MIB = 1 << 20
MIN_CHURN = 450
"""Connections a second without which a measurement means nothing."""


def generate(generator: Path, server: Server, arguments: str) -> dict[str, Any]:
    """Run the load generator and return its last record."""
    records, error = run_job(generator, server, arguments)
    if error or not records:
        raise SystemExit(f"the load failed ({arguments}): {error or 'no records'}")
    return records[-1]


# Thundering herd


def counters() -> dict[str, int]:
    """Return what the kernel has counted of connections in trouble in this namespace."""
    found = {}
    for name in ("snmp", "netstat"):
        lines = [line.split() for line in Path("/proc/net", name).read_text().splitlines()]
        for names, values in zip(lines[::2], lines[1::2], strict=True):
            found.update({names[0][:-1] + key: int(value) for key, value in zip(names[1:], values[1:], strict=True)})
    wanted = ("TcpRetransSegs", "TcpAttemptFails", "TcpExtListenOverflows", "TcpExtListenDrops")
    return {name: found[name] for name in wanted}


def at_once(command: str, generator: Path, count: int) -> bool:
    """Open all connections at once on a new server."""
    with Server("server", command) as server:
        before = counters()
        record = generate(generator, server, f"-n {count} -c 0 -m init")
        changed = {name: value - before[name] for name, value in counters().items()}
    print(
        f"{count} at once: all served in {record['wall_ms']} ms, slowest {record['max_ms']} ms, "
        f"{record['srv_cpu_us_per_conn']} µs of server CPU and {record['rss_per_conn']} bytes each; {changed}",
        flush=True,
    )
    return not (changed["TcpRetransSegs"] or changed["TcpExtListenOverflows"] or changed["TcpExtListenDrops"])


def held(command: str, generator: Path, count: int) -> bool:
    """Hold connections, count them from outside, and measure the CPU that their end costs."""
    with Server("server", command) as server:
        pid = server.process.pid
        load = subprocess.Popen(
            ["taskset", "-c", "1", generator, "-p", str(server.port), "-n", str(count), "-c", "512", "-m", "init,hold"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert load.stdout is not None
            record = json.loads(load.stdout.readline() or '{"error": "the generator exited"}')
            if "error" in record:
                raise SystemExit(f"cannot hold {count} connections: {record}")
            files = processes.open_files(pid)
            memory = processes.memory(pid) >> 20
            one_more = generate(generator, server, "-n 1 -m init")
            before = processes.cpu_seconds(pid)
        finally:
            load.kill()
            load.communicate()
        deadline = time.monotonic() + TIMEOUT
        while (left := processes.open_files(pid)) > files - count and time.monotonic() < deadline:
            time.sleep(0.01)
        closing = (processes.cpu_seconds(pid) - before) / count * 1e6
    print(
        f"{count} held: the server has {files} open files and uses {memory} MiB; one more is served in "
        f"{one_more['wall_ms']} ms; closing all at once takes {closing:.1f} µs each"
    )
    return files >= count and left <= files - count


def thundering_herd(options: argparse.Namespace) -> bool:
    processes.enter_namespace()
    generator = processes.load_generator()
    good = [at_once(options.server, generator, options.at_once) for _ in range(options.runs)]
    good += [held(options.server, generator, count) for count in (1000, options.held)]
    return all(good)


# Clients that misbehave: each repeats one action in a process of its own


def _encoded(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def _connect(port: int) -> socket.socket:
    peer = socket.create_connection((HOST, port), timeout=TIMEOUT)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer


def garbage(port: int) -> None:
    with suppress(ConnectionError), _connect(port) as peer:
        peer.sendall(HANDSHAKE + b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)) * 16)
        while peer.recv(4096):
            pass
    time.sleep(0.02)


def half(port: int) -> None:
    with _connect(port) as peer:
        peer.sendall(HANDSHAKE + b"\x01" + _encoded(b"/half") + _encoded(bytes(MIB))[: MIB // 2])
        time.sleep(0.5)


def deaf(port: int) -> None:
    with _connect(port) as peer:
        peer.setblocking(False)
        requests = memoryview(HANDSHAKE + (b"\x03" + _encoded(b"/large")) * 100)
        for _ in range(50):
            with suppress(BlockingIOError):
                requests = requests[peer.send(requests) :]
            time.sleep(0.01)


def churn(port: int) -> None:
    """Open a connection every 2 ms, 100 times; catch up by no more than four at a time."""
    began, done = time.monotonic(), 0
    while done < 100:
        due = min(100, int((time.monotonic() - began) * 500) + 1)
        for _ in range(min(4, due - done)):
            with socket.socket() as peer:
                peer.connect((HOST, port))
            done += 1
        time.sleep(0.002)


ACTIONS: dict[str, tuple[Callable[[int], None], int, int]] = {
    "garbage": (garbage, 1, 10),
    "half": (half, 1, 10),
    "deaf": (deaf, 1, 10),
    "churn": (churn, 100, 0),
}
"""What each does, how often per call, and its niceness: only the one that must keep a rate may disturb the load."""


def misbehave(name: str, port: int) -> None:
    """The child's part: repeat an action until standard input ends, then print its rate per second."""
    action, weight, niceness = ACTIONS[name]
    os.sched_setaffinity(0, {1})
    os.nice(niceness)
    rounds, began = 0, time.monotonic()
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0] and time.monotonic() - began < 600:
        action(port)
        rounds += 1
    print(rounds * weight / (time.monotonic() - began), flush=True)


@contextmanager
def misbehaving_clients(port: int, rates: dict[str, list[float]]) -> Iterator[None]:
    """Run all of them; add their rates to `rates`."""
    children = {
        name: subprocess.Popen(
            [sys.executable, __file__, "misbehaving", "--child", name, "--port", str(port)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for name in ACTIONS
    }  # fmt: skip
    try:
        for process in children.values():
            assert process.stdout is not None
            process.stdout.readline()
        time.sleep(0.5)  # until the slow ones hold what they hold
        yield
        for name, process in children.items():
            output, _ = process.communicate("", timeout=TIMEOUT)
            if process.returncode:
                raise SystemExit(f"the client {name} failed")
            rates.setdefault(name, []).append(float(output))
    finally:
        for process in children.values():
            process.kill()
            process.wait()


def misbehaving(options: argparse.Namespace) -> bool:
    if options.child:
        misbehave(options.child, options.port)
        return True
    ratios: list[float] = []
    rates: dict[str, list[float]] = {}
    generator = processes.load_generator()

    def load(seconds: float) -> dict[str, Any]:
        return generate(generator, server, f"-n 64 -t {seconds} -w 0.2 -m add")

    with Server("server", options.server) as server:
        with _connect(server.port) as peer:  # for `deaf`
            peer.sendall(HANDSHAKE + b"\x01" + _encoded(b"/large") + _encoded(bytes(MIB)) + b"\x0dping")
            peer.recv(4, socket.MSG_WAITALL)
        load(0.2)
        for pair in range(options.pairs):
            found = {}
            for disturbed in (False, True) if pair % 2 else (True, False):
                if disturbed:
                    with misbehaving_clients(server.port, rates):
                        found[True] = load(options.seconds)
                else:
                    found[False] = load(options.seconds)
            ratios.append(found[True]["p99_us"] / found[False]["p99_us"])
            print(
                f"pair {pair + 1}: p99 {found[False]['p99_us']:.0f} µs without, {found[True]['p99_us']:.0f} µs with, "
                f"{ratios[-1]:.2f}x; {found[False]['ops']:.0f} and {found[True]['ops']:.0f} operations a second",
                flush=True,
            )
    print("times a second: " + ", ".join(f"{name} {statistics.median(found):.0f}" for name, found in rates.items()))
    if statistics.median(rates["churn"]) < MIN_CHURN:
        raise SystemExit("too few connections were opened and closed: this machine is too busy")
    print(f"median ratio {statistics.median(ratios):.2f}, bound {options.bound}")
    return bool(statistics.median(ratios) <= options.bound)


# Somebody who looks


class Lookers:
    """Those who look into a server, each in a process of its own, and what they have been shown."""

    def __init__(self, admin: Path, stack: ExitStack) -> None:
        self._lines = 0
        self._screens = 0
        self._looks = 0
        self._slowest = 0.0
        self._ended = threading.Event()
        stat = self._start(stack, ["stat", "-i", "1", "--admin", str(admin)], stdout=subprocess.PIPE)
        master, slave = pty.openpty()
        self._start(stack, ["top", "--admin", str(admin)], stdin=slave, stdout=slave)
        os.close(slave)
        page = self._start(
            stack, ["http", "--listen", "127.0.0.1:0", "--admin", str(admin), "--log-format", "text"],
            stdout=subprocess.PIPE,
        )  # fmt: skip
        assert stat.stdout is not None
        assert page.stdout is not None
        url = f"http://127.0.0.1:{json.loads(page.stdout.readline())['port']}/api/state"
        for read in (lambda: self._count_lines(stat.stdout), lambda: self._count_screens(master)):
            threading.Thread(target=read, daemon=True).start()
        asking = threading.Thread(target=lambda: self._ask(url), daemon=True)
        asking.start()
        stack.callback(asking.join)
        stack.callback(self._ended.set)

    def _start(self, stack: ExitStack, words: list[str], **where: Any) -> subprocess.Popen[bytes]:
        command = ["taskset", "-c", "1", "chrt", "--idle", "0", sys.executable, "-m", "tcpstore_async", *words]
        process = subprocess.Popen(command, env={**os.environ, "TERM": "xterm"}, **where)
        stack.callback(process.wait)
        stack.callback(process.kill)
        return process

    def _count_lines(self, stat: Any) -> None:
        for _ in stat:
            self._lines += 1

    def _count_screens(self, top: int) -> None:
        with suppress(OSError):  # when its process has ended
            while os.read(top, 1 << 20):
                self._screens += 1

    def _ask(self, url: str) -> None:
        """Do what the page does."""
        age = 0.0
        while not self._ended.is_set():
            began = time.monotonic()
            with urllib.request.urlopen(url, timeout=TIMEOUT) as reply:
                state = json.load(reply)
            self._slowest = max(self._slowest, time.monotonic() - began)
            if state["look"] is not None:
                self._looks += not self._looks or state["age"] < age
                age = state["age"]
            self._ended.wait(1.0)

    def wait(self) -> None:
        """Return when all of them have been shown something."""
        deadline = time.monotonic() + TIMEOUT
        while not (self._lines and self._screens and self._looks):
            if time.monotonic() > deadline:
                raise SystemExit(f"somebody who looks was shown nothing: {self.shown()}")
            time.sleep(0.1)
        self.shown()

    def shown(self) -> dict[str, float]:
        """Return what they have been shown since this was called last."""
        found = {"lines": self._lines, "screens": self._screens, "looks": self._looks, "slowest answer": self._slowest}
        self._lines = self._screens = self._looks = 0
        self._slowest = 0.0
        return found


def looking(options: argparse.Namespace) -> bool:
    processes.enter_namespace()
    generator = processes.load_generator()
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        looked_at, idle = Path(folder) / "admin", Path(folder) / "idle"
        server = stack.enter_context(Server("server", f"{options.server} --admin {looked_at}"))
        stack.enter_context(Server("server", f"{options.server} --admin {idle}"))
        others = f"-p {server.port} -n {options.clients - options.busy} -c 512 -k 100 -m init,park,hold"
        held = subprocess.Popen(
            ["taskset", "-c", "1", str(generator), *others.split()],
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(held.wait)
        stack.callback(held.kill)
        assert held.stdout is not None
        for _ in range(2):
            if "error" in (line := held.stdout.readline() or '{"error": "the generator exited"}'):
                raise SystemExit(f"cannot hold the connections: {line}")

        def load() -> dict[str, Any]:
            return generate(generator, server, f"-n {options.busy} -t {options.seconds} -w 0.5 -m add")

        for pair in range(options.pairs):
            found = {}
            for disturbed in (False, True) if pair % 2 else (True, False):
                with ExitStack() as watching:
                    lookers = Lookers(looked_at if disturbed else idle, watching)
                    lookers.wait()
                    found[disturbed] = load()
                    if disturbed:
                        shown = lookers.shown()
            ratios.append(found[True]["p99_us"] / found[False]["p99_us"])
            print(
                f"pair {pair + 1}: p99 {found[False]['p99_us']:.0f} µs without, {found[True]['p99_us']:.0f} µs with, "
                f"{ratios[-1]:.2f}x; p50 {found[False]['p50_us']:.0f} and {found[True]['p50_us']:.0f} µs; "
                f"{found[False]['ops']:.0f} and {found[True]['ops']:.0f} operations a second; shown: {shown}",
                flush=True,
            )
    print(f"median ratio {statistics.median(ratios):.2f}, bound {options.bound}")
    return bool(statistics.median(ratios) <= options.bound)


def main() -> int:
    parser = processes.parser(__doc__)
    commands = parser.add_subparsers(required=True)
    many = commands.add_parser("thundering-herd", help="open many connections at once; hold many")
    many.add_argument("--at-once", type=int, default=10_000)
    many.add_argument("--held", type=int, default=19_000)
    many.add_argument("--runs", type=int, default=3, help="how often to open all at once")
    many.set_defaults(run=thundering_herd)
    others = commands.add_parser("misbehaving", help="measure what misbehaving clients cost the others")
    others.add_argument("--pairs", type=int, default=7)
    others.add_argument("--seconds", type=float, default=2.0, help="of each run")
    others.add_argument("--bound", type=float, default=1.5, help="highest median ratio")
    others.add_argument("--child", choices=ACTIONS, help=argparse.SUPPRESS)
    others.add_argument("--port", type=int, help=argparse.SUPPRESS)
    others.set_defaults(run=misbehaving)
    watched = commands.add_parser("looking", help="measure what those who look into a server cost its clients")
    watched.add_argument("--clients", type=int, default=19_000, help="those that are busy included")
    watched.add_argument("--busy", type=int, default=64)
    watched.add_argument("--pairs", type=int, default=7)
    watched.add_argument("--seconds", type=float, default=8.0, help="of each run")
    watched.add_argument("--bound", type=float, default=1.1, help="highest median ratio")
    watched.set_defaults(run=looking)
    for command in (many, others, watched):
        command.add_argument("--server", default=f"{sys.executable} -m tcpstore_async serve --port {{port}}")
    options = parser.parse_args()
    return 0 if options.run(options) else 1


if __name__ == "__main__":
    sys.exit(main())
