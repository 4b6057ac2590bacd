"""Compare TCPStore servers under the same load, in one run.

    python bench/compare.py --server 'ours=tcpstore serve --port {port}' --server libuv --control

A server is `NAME=COMMAND`, a command that stays in the foreground, with {port} in place of the port, or PyTorch's
`libuv` or `legacy`. Servers run on CPU 0 and the load generator on CPU 1, in a private network namespace with its own
somaxconn and port range, which needs root (--no-netns uses the current one). Repetitions are interleaved (A B C,
B C A, ...). The output has medians and their ratios to the base server: the median of the ratios of each repetition,
with its 90 % bootstrap interval. A difference is real if the whole interval lies on one side of 1. --control runs the
base a second time; its interval is the noise. If the machine does other work, trust CPU time over wall time. --fresh
starts a new server for each run, as memory figures require.

A job is `NAME: LOADGEN ARGUMENTS`, or `NAME: join NEW CLIENTS`, which measures how long NEW connections take to be
served while CLIENTS others keep the server busy. Without jobs, a standard set runs. Exit status 1 if a run failed.
"""

from __future__ import annotations

import collections
import json
import random
import shlex
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench import processes

FIRST_PORT: Final = 21_000
START_SECONDS: Final = 60.0
RUN_SECONDS: Final = 600.0
HEAD_START_SECONDS: Final = 0.7
"""Time for the busy clients of a `join` job before the new ones connect."""

STANDARD: Final = [
    "small ops, 64 clients: -n 64 -t 0.4 -w 0.1 -m add,setget,get,check",
    "small ops, 1024 clients: -n 1024 -t 0.4 -w 0.1 -m add,setget,add@16",
    "bulk: -n 1 -t 0.4 -w 0.1 -m mget,bigset,bigget",
    "10000 ranks: -n 10000 -c 512 -r 3 -m init,barrier,barrier18",
    "NCCL's IDs for 16000 ranks: -n 16000 -k 125 -m park,wake,readywait,mget128",
    "joining a busy server: join 500 1024",
]

TORCH_SERVER: Final = """
import datetime, resource, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
import torch
torch.set_num_threads(1)
store = torch.distributed.TCPStore("127.0.0.1", int(sys.argv[1]), None, True, datetime.timedelta(seconds=300),
                                   wait_for_workers=False, use_libuv=sys.argv[2] == "libuv")
while True:
    time.sleep(1000)
"""

SHOWN: Final = {
    "init": ["srv_cpu_us_per_conn", "wall_ms", "p99_us", "rss_per_conn"],
    "barrier": ["srv_cpu_us_per_rank", "mean_ms"],
    "barrier18": ["srv_cpu_us_per_rank", "mean_ms"],
    "tput": ["srv_cpu_us_per_op", "ops", "p50_us", "p99_us"],
    "park": ["srv_cpu_us_per_rank", "rss_per_rank", "wall_ms"],
    "wake": ["srv_cpu_us_per_rank", "wall_ms"],
    "readywait": ["srv_cpu_us_per_rank", "wall_ms"],
    "mget128": ["srv_cpu_us_per_rank", "wall_ms"],
    "join": ["wall_ms", "p99_us"],
}

Record = dict[str, Any]


class Server:
    """A server under measurement, from its start until `stop`."""

    def __init__(self, name: str, command: str | None, port: int) -> None:
        if command is None:
            arguments = [sys.executable, "-c", TORCH_SERVER, str(port), name]
        else:
            arguments = shlex.split(command.format(port=port))
        self.port = port
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by stop)
        self.process = subprocess.Popen(["taskset", "-c", "0", *arguments], stdout=self._log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + START_SECONDS
        while not _answers(port):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self._log.seek(0)
                text = self._log.read().decode(errors="replace")[-2000:]
                self.stop()
                raise SystemExit(f"{name} did not start: {text}")
            time.sleep(0.1)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()


def _answers(port: int) -> bool:
    """Whether a server on the port completes the handshake."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as peer:
        peer.sendall(b"\x00" + struct.pack("<I", 0x3C85F7CE) + b"\x0dping")
        return peer.recv(4) == b"ping"
    return False


def run_job(generator: Path, server: Server, arguments: str) -> tuple[list[Record], str]:
    """Run one job on one server; return its records, and an error message if it failed."""
    base = ["taskset", "-c", "1", str(generator), "-p", str(server.port), "-P", str(server.process.pid)]
    words = arguments.split()
    load = None
    if words[0] == "join":
        busy = [*base, "-n", words[2], "-t", "30", "-m", "add"]
        load = subprocess.Popen(busy, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(HEAD_START_SECONDS)
        words = ["-n", words[1], "-c", words[1], "-m", "init"]
    try:
        done = subprocess.run([*base, *words], capture_output=True, text=True, timeout=RUN_SECONDS)
    finally:
        if load is not None:
            load.kill()
            load.wait()
    records = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode or any("error" in record for record in records):
        return [], f"{done.stdout[-200:]} {done.stderr[-200:]}"
    return [{**record, "mode": "join"} if load else record for record in records], ""


def measure(
    servers: dict[str, str | None], jobs: list[tuple[str, str]], reps: int, fresh: bool
) -> tuple[list[Record], int]:
    """Run every job on every server, interleaved; return all records and the number of failed runs."""
    generator, names = processes.load_generator(), list(servers)
    port, records, failures = FIRST_PORT, [], 0
    running: dict[str, Server] = {}
    try:
        for repetition in range(reps):
            first = repetition % len(names)
            for title, arguments in jobs:
                for name in names[first:] + names[:first]:
                    if fresh and name in running:
                        running.pop(name).stop()
                    if name not in running:
                        port += 1
                        running[name] = Server(name, servers[name], port)
                    found, error = run_job(generator, running[name], arguments)
                    if error:
                        failures += 1
                        print(f"FAILED {name}, {title}: {error}", flush=True)
                    records += [{**record, "tag": name, "job": title, "rep": repetition} for record in found]
    finally:
        for server in running.values():
            server.stop()
    return records, failures


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Return the median and its 90 % bootstrap interval."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(1000))
    return statistics.median(ratios), medians[50], medians[949]


def report(records: list[Record], names: list[str], base: str) -> None:
    """Print, for each job and mode, every server's medians and ratios to the base."""
    groups: dict[tuple[str, str, str], dict[str, dict[int, Record]]] = {}
    for record in records:
        what = f"{record['op']} depth {record['depth']}" if record["mode"] == "tput" else record["mode"]
        group = groups.setdefault((record["job"], what, record["mode"]), collections.defaultdict(dict))
        group[record["tag"]][record["rep"]] = record
    for (job, what, mode), by_name in groups.items():
        print(f"\n{job} | {what}")
        for name in names:
            cells = [_cell(by_name[name], by_name[base], field, name != base) for field in SHOWN[mode] if by_name[name]]
            if cells:
                print(f"  {name:10}", "  ".join(cells))


def _cell(rows: dict[int, Record], base: dict[int, Record], field: str, compared: bool) -> str:
    cell = f"{field} {statistics.median(row[field] for row in rows.values()):.2f}"
    pairs = [row[field] / base[rep][field] for rep, row in rows.items() if base.get(rep, {}).get(field)]
    if pairs and compared:
        cell += " ({:.2f}x {:.2f}–{:.2f})".format(*interval(pairs))
    return cell


def main() -> int:
    parser = processes.parser(__doc__)
    parser.add_argument("--server", action="append", required=True, metavar="NAME=COMMAND", help="or libuv, or legacy")
    parser.add_argument("--base", help="the server that ratios refer to (default: libuv if present, else the last)")
    parser.add_argument("--control", action="store_true", help="run the base a second time to measure the noise")
    parser.add_argument("--reps", type=int, default=5, help="repetitions (5)")
    parser.add_argument("--fresh", action="store_true", help="start a new server for each run")
    parser.add_argument("--json", type=Path, help="write all records to this file, one per line")
    parser.add_argument("--no-netns", action="store_true", help="use the current network namespace")
    parser.add_argument("jobs", nargs="*", metavar="NAME: JOB")
    options = parser.parse_args()
    if not options.no_netns:
        processes.enter_namespace()
    servers: dict[str, str | None] = {}
    for given in options.server:
        name, _, command = given.partition("=")
        if not command and name not in ("libuv", "legacy"):
            parser.error(f"--server {name}: expected NAME=COMMAND, libuv or legacy")
        servers[name] = command or None
    base = options.base or ("libuv" if "libuv" in servers else list(servers)[-1])
    if options.control:
        servers["control"] = servers[base] or _torch_command(base)
    pairs = (job.partition(":") for job in options.jobs or STANDARD)
    jobs = [(title.strip(), arguments.strip()) for title, _, arguments in pairs]
    records, failures = measure(servers, jobs, options.reps, options.fresh)
    if options.json:
        options.json.write_text("\n".join(map(json.dumps, records)) + "\n")
    report(records, list(servers), base)
    return 1 if failures else 0


def _torch_command(name: str) -> str:
    return shlex.join([sys.executable, "-c", TORCH_SERVER]) + f" {{port}} {name}"


if __name__ == "__main__":
    sys.exit(main())
