#!/usr/bin/env python3
"""What rude clients cost the others.

    python bench/rude_clients.py [--server 'tcpstore serve --port {port}'] [--lg LG] [--pairs 7] [--seconds 2]

64 well-behaved clients, each with one request under way at all times, run against one server for some seconds, with
and without four rude ones:

* garbage: connects, sends what is no frame, is closed, and comes again, 50 times a second;
* half:    stops in the middle of a frame, holds the connection for half a second, goes and comes again;
* deaf:    asks for 100 MiB of replies, reads nothing, holds that for half a second, goes and comes again;
* churn:   opens and closes 500 connections a second.

Printed is, for each pair, the 99th percentile of the well-behaved ones' latency with and without, and their ratio; at
the end the median ratio. Exit status 1 if that is over the bound, or if a well-behaved client met an error.

The server is pinned to CPU 0. The load and the rude ones, which run at low priority, are pinned to CPU 1, so that what
is seen is what they cost the server. The load is the generator of `bench/loadgen` if it is given, compiled, else one in
Python. What the rude ones have done is printed too: at low priority beside a busy load they may fall behind. A ratio
below 1 is no error: where clients and server wake each other in lockstep, a disturbance lets them work in batches.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shlex
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
CLIENTS = 64
HANDSHAKE = b"\x00" + struct.pack("<I", 0x3C85F7CE)
MIB = 1 << 20
BOUND = 1.5
PATIENCE = 60.0
"""Seconds after which whatever does not come is given up."""


def blob(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def connect(port: int) -> socket.socket:
    peer = socket.create_connection((HOST, port), timeout=PATIENCE)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer


# The rude ones: each is a process that counts what it did until it is told to end.


def garbage(port: int) -> None:
    with suppress(ConnectionError), connect(port) as peer:
        peer.sendall(HANDSHAKE + b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)) * 16)
        while peer.recv(4096):
            pass
    time.sleep(0.02)


def half(port: int) -> None:
    with connect(port) as peer:
        peer.sendall(HANDSHAKE + b"\x01" + blob(b"/half") + blob(bytes(MIB))[: MIB // 2])
        time.sleep(0.5)


def deaf(port: int) -> None:
    """The replies are values of 1 MiB; the value is stored once and stays."""
    with connect(port) as peer:
        peer.setblocking(False)
        requests = memoryview(HANDSHAKE + (b"\x03" + blob(b"/large")) * 100)
        for _ in range(50):
            with suppress(BlockingIOError):
                requests = requests[peer.send(requests) :]
            time.sleep(0.01)


def churn(port: int) -> None:
    """One every 2 ms; one that comes late is not made up for by more than four at a time."""
    began = time.monotonic()
    done = 0
    while done < 100:
        due = min(100, int((time.monotonic() - began) * 500) + 1)
        for _ in range(min(4, due - done)):
            with socket.socket() as peer:
                peer.connect((HOST, port))
            done += 1
        time.sleep(0.002)


WEIGHT = {"garbage": 1, "half": 1, "deaf": 1, "churn": 100}
"""What each does in one round."""


NICE = {"garbage": 10, "half": 10, "deaf": 10, "churn": 0}
"""The load shares their processor: only the one that must keep a rate may disturb it."""

CHURN_RATE = 450
"""Connections a second that must have been reached, or the measurement says nothing."""


def be_rude(name: str, port: int) -> None:
    """Rounds until standard input ends; then prints how often a second it did what it does."""
    os.sched_setaffinity(0, {1})
    os.nice(NICE[name])
    action = {"garbage": garbage, "half": half, "deaf": deaf, "churn": churn}[name]
    rounds = 0
    began = time.monotonic()
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0] and time.monotonic() - began < 600:
        action(port)
        rounds += 1
    print(rounds * WEIGHT[name] / (time.monotonic() - began), flush=True)


@contextmanager
def rude(port: int, rates: dict[str, list[float]]) -> Iterator[None]:
    """All of them at once; what they did goes into `rates`."""
    command = [sys.executable, __file__, "--port", str(port), "--rude"]
    processes = {
        name: subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name in WEIGHT
    }
    try:
        for process in processes.values():
            assert process.stdout is not None
            process.stdout.readline()
        time.sleep(0.5)  # let the slow ones reach what they hold
        yield
        for name, process in processes.items():
            output, _ = process.communicate("", timeout=PATIENCE)
            if process.returncode:
                raise SystemExit(f"the rude client {name} failed")
            rates.setdefault(name, []).append(float(output))
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


# The well-behaved ones


def load_in_python(port: int, seconds: float) -> tuple[float, float]:
    """As `lg -n 64 -m add`: the 99th percentile in microseconds, and operations a second."""
    peers = [connect(port) for _ in range(CLIENTS)]
    poll = select.epoll()
    for peer in peers:
        peer.sendall(HANDSHAKE)
        poll.register(peer.fileno(), select.EPOLLIN)
    by_fd = {peer.fileno(): peer for peer in peers}
    requests = {peer.fileno(): b"\x04" + blob(b"/a%d" % i) + struct.pack("<q", 1) for i, peer in enumerate(peers)}
    sent: dict[int, float] = {}
    taken: list[float] = []
    clock = time.perf_counter
    for fd, peer in by_fd.items():
        sent[fd] = clock()
        peer.sendall(requests[fd])
    began = clock()
    warm = began + 0.2
    end = warm + seconds
    while (now := clock()) < end:
        ready = poll.poll(PATIENCE)
        if not ready:
            raise SystemExit("the server does not answer")
        for fd, _ in ready:
            reply = by_fd[fd].recv(64)
            if len(reply) != 8:
                raise SystemExit(f"a well-behaved client got {len(reply)} bytes instead of 8")
            now = clock()
            if now > warm:
                taken.append(now - sent[fd])
            sent[fd] = now
            by_fd[fd].sendall(requests[fd])
    for peer in peers:
        peer.close()
    poll.close()
    taken.sort()
    return taken[int(len(taken) * 0.99)] * 1e6, len(taken) / seconds


def load(port: int, seconds: float, lg: Path | None) -> tuple[float, float]:
    """The 99th percentile in microseconds, and operations a second."""
    if lg is None:
        command = [sys.executable, __file__, "--port", str(port), "--seconds", str(seconds), "--load"]
    else:
        command = [str(lg), "-p", str(port), "-n", str(CLIENTS), "-t", str(seconds), "-w", "0.2", "-m", "add"]
    done = subprocess.run(
        ["taskset", "-c", "1", *command], capture_output=True, text=True, timeout=PATIENCE + 10 * seconds
    )
    record: dict[str, Any] = {"error": "nothing was printed"}
    with suppress(ValueError, IndexError):  # not a number of operations: none was done
        record = json.loads(done.stdout.splitlines()[-1])
    if done.returncode or "error" in record:
        raise SystemExit(f"the load failed, the well-behaved were not served: {done.stdout} {done.stderr}")
    return record["p99_us"], record["ops"]


@contextmanager
def running(command: str) -> Iterator[int]:
    """A server pinned to CPU 0; yields its port once it answers."""
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    arguments = shlex.split(command.format(port=port))
    with tempfile.TemporaryFile() as log:
        # Not in the checkout, whose plain sources would hide a compiled build.
        process = subprocess.Popen(
            ["taskset", "-c", "0", *arguments], stdout=log, stderr=log, cwd=tempfile.gettempdir()
        )
        try:
            deadline = time.monotonic() + PATIENCE
            while True:
                with suppress(OSError), connect(port) as peer:
                    peer.sendall(HANDSHAKE + b"\x01" + blob(b"/large") + blob(bytes(MIB)) + b"\x0dping")
                    if peer.recv(4) == b"ping":
                        break
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise SystemExit(f"the server did not start: {log.read().decode(errors='replace')}")
                time.sleep(0.05)
            yield port
        finally:
            process.kill()
            process.wait()


def measure(command: str, pairs: int, seconds: float, lg: Path | None) -> float:
    """Prints pair after pair; returns the median ratio."""
    ratios = []
    rates: dict[str, list[float]] = {}
    with running(command) as port:
        load(port, 0.2, lg)
        for pair in range(pairs):
            figures: dict[bool, tuple[float, float]] = {}
            for with_rude in (False, True) if pair % 2 else (True, False):
                if with_rude:
                    with rude(port, rates):
                        figures[True] = load(port, seconds, lg)
                else:
                    figures[False] = load(port, seconds, lg)
            ratios.append(figures[True][0] / figures[False][0])
            print(
                f"pair {pair + 1}: p99 {figures[False][0]:.0f} µs without, {figures[True][0]:.0f} µs with, "
                f"{ratios[-1]:.2f}x; {figures[False][1]:.0f} and {figures[True][1]:.0f} operations a second",
                flush=True,
            )
    done = ", ".join(f"{name} {statistics.median(found):.0f}" for name, found in rates.items())
    print(f"rude ones, times a second at the median: {done}")
    if statistics.median(rates["churn"]) < CHURN_RATE:
        raise SystemExit("too few connections were opened and closed: this machine is too busy to measure")
    return statistics.median(ratios)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default=f"{sys.executable} -m tcpstore_async serve --port {{port}}")
    parser.add_argument("--lg", type=Path, help="the load generator of bench/loadgen, compiled")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of every run")
    parser.add_argument("--bound", type=float, default=BOUND)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rude", choices=list(WEIGHT), help=argparse.SUPPRESS)
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rude:
        be_rude(options.rude, options.port)
        return 0
    if options.load:
        p99, ops = load_in_python(options.port, options.seconds)
        print(json.dumps({"p99_us": p99, "ops": ops}))
        return 0
    ratio = measure(options.server, options.pairs, options.seconds, options.lg)
    print(f"median ratio {ratio:.2f}, at most {options.bound} wanted")
    return 0 if ratio <= options.bound else 1


if __name__ == "__main__":
    sys.exit(main())
