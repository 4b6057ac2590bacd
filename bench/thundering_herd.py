#!/usr/bin/env python3
"""A herd of ranks: 10,000 connections opened at once are all served and none is reset; 19,000 are held at once.

    python bench/herd.py [--server 'tcpstore serve --port {port}'] [--at-once 10000] [--held 19000]
                         [--runs 3]

Runs the load generator (`bench/loadgen`, compiled when needed, or given by --lg) in a private network namespace with a
somaxconn of 65,535, which needs root, and reads `TcpRetransSegs` of that namespace before and after: a connection that
met a full backlog would have been retransmitted. The server runs on CPU 0, the load on CPU 1. Exit status 1 if a
connection failed, if a segment was retransmitted in the run at once, or if fewer are held than asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench import loadgen

INSIDE = "HERD_NETNS"
PORT = 21_500
PATIENCE = 120.0
"""Seconds after which whatever does not come is given up."""


def counters() -> dict[str, int]:
    """What the kernel has counted in this namespace that speaks of a connection in trouble.

    A reset would be an error of the generator; `TcpOutRsts` counts how it ends its own connections.
    """
    found = {}
    for name in ("snmp", "netstat"):
        lines = [line.split() for line in Path("/proc/net", name).read_text().splitlines()]
        for names, values in zip(lines[::2], lines[1::2], strict=True):
            found.update({names[0][:-1] + key: int(value) for key, value in zip(names[1:], values[1:], strict=True)})
    wanted = ("TcpRetransSegs", "TcpAttemptFails", "TcpExtListenOverflows", "TcpExtListenDrops")
    return {name: found[name] for name in wanted}


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as peer:
        peer.sendall(b"\x00" + struct.pack("<I", 0x3C85F7CE) + b"\x0dping")
        return peer.recv(4) == b"ping"
    return False


@contextmanager
def running(command: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    with tempfile.TemporaryFile() as log:
        arguments = shlex.split(command.format(port=port))
        # Not in the checkout, whose plain sources would hide a compiled build.
        process = subprocess.Popen(
            ["taskset", "-c", "0", *arguments], stdout=log, stderr=log, cwd=tempfile.gettempdir()
        )
        try:
            deadline = time.monotonic() + PATIENCE
            while not answers(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise SystemExit(f"the server did not start: {log.read().decode(errors='replace')}")
                time.sleep(0.1)
            yield process
        finally:
            process.kill()
            process.wait()


def generate(lg: Path, port: int, pid: int, *arguments: str) -> list[dict[str, object]]:
    """Run the generator; the records it prints."""
    command = ["taskset", "-c", "1", str(lg), "-p", str(port), "-P", str(pid), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    records: list[dict[str, object]] = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode or not records or any("error" in record for record in records):
        raise SystemExit(f"FAILED lg {' '.join(arguments)}: {done.stdout}{done.stderr}")
    return records


def at_once(command: str, lg: Path, count: int, port: int) -> bool:
    """Every connection opened at once, on a fresh server."""
    with running(command, port) as server:
        before = counters()
        [record] = generate(lg, port, server.pid, "-n", str(count), "-c", "0", "-m", "init")
        changed = {name: value - before[name] for name, value in counters().items()}
    print(
        f"{count} at once: all served in {record['wall_ms']} ms, slowest {record['max_ms']} ms, "
        f"{record['srv_cpu_us_per_conn']} µs of server CPU and {record['rss_per_conn']} bytes each; {changed}",
        flush=True,
    )
    return not (changed["TcpRetransSegs"] or changed["TcpExtListenOverflows"] or changed["TcpExtListenDrops"])


def held(command: str, lg: Path, count: int, port: int) -> bool:
    """So many connections held, counted from outside while they all are; what it costs when all leave at once."""
    with running(command, port) as server:
        load = subprocess.Popen(
            ["taskset", "-c", "1", str(lg), "-p", str(port), "-n", str(count), "-c", "512", "-m", "init,hold"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert load.stdout is not None
            record = json.loads(load.stdout.readline() or '{"error": "the generator ended"}')
            if "error" in record:
                raise SystemExit(f"FAILED to hold {count}: {record}")
            files = files_of(server.pid)
            served = answers(port)
            status = Path(f"/proc/{server.pid}/status").read_text()
            memory = int(status.split("VmRSS:")[1].split()[0]) // 1024
            before = spent(server.pid)
        finally:
            load.kill()
            load.communicate()
        deadline = time.monotonic() + PATIENCE
        while (left := files_of(server.pid)) > files - count and time.monotonic() < deadline:
            time.sleep(0.01)
        leaving = (spent(server.pid) - before) / count * 1e6
    print(
        f"{count} held at once: the server has {files} descriptors open, {memory} MiB, serves one more: {served}; "
        f"all leave at once: {leaving:.1f} µs each"
    )
    return files >= count and served and left <= files - count


def files_of(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def spent(pid: int) -> float:
    """Seconds of CPU of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default=f"{sys.executable} -m tcpstore_async serve --port {{port}}")
    parser.add_argument("--lg", type=Path, help="the load generator, compiled")
    parser.add_argument("--at-once", type=int, default=10_000)
    parser.add_argument("--held", type=int, default=19_000)
    parser.add_argument("--runs", type=int, default=3, help="of the connections at once")
    options = parser.parse_args()
    if INSIDE not in os.environ:
        os.environ[INSIDE] = "1"
        os.execvp("unshare", ["unshare", "-n", "bash", "-c", loadgen.NAMESPACE, "herd", sys.executable, *sys.argv])
    lg = options.lg or loadgen.build()
    good = [at_once(options.server, lg, options.at_once, PORT + run) for run in range(options.runs)]
    for run, count in enumerate((1000, options.held), options.runs):
        good.append(held(options.server, lg, count, PORT + run))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
