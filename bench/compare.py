"""Compare TCPStore servers under the same load, in one run, or judge a change.

    python bench/compare.py --server 'ours=tcpstore serve --port {port}' --server libuv --control
    python bench/compare.py --against COMMIT        judge: is anything slower, or larger, than it was there?

A server is `NAME=COMMAND`, a command that stays in the foreground, with {port} in place of the port, or PyTorch's
`libuv` or `legacy`. Commands run in a temporary folder: give absolute paths. Each run has a new server, on CPU 0, and
the load generator on CPU 1, in a private network namespace with its own somaxconn and port range, which needs root
(--no-netns uses the current one). Repetitions are interleaved (A B C, B C A, ...). The output has medians and their
ratios to the base server: the median of the ratios of each repetition, with its 90 % interval. A difference is real if
the whole interval lies on one side of 1. --control runs the base a second time; its interval is the noise. If the
machine does other work, trust CPU time over wall time, and begin with `chrt -f 50`.

--against judges the chosen build (`build/compiled`, or the checkout with BENCH_BUILD=interpreted) against another: a
folder with a build of the same kind, or a git revision, which is compiled into build/against. Only CPU time and memory
are judged. A row is slower if its interval lies above 1 and its median above 1.02, and both again when its job is
repeated alone, 25 times. Exit status 1 if a row is slower, or a run failed.

A job is `NAME: LOADGEN ARGUMENTS`, or `NAME: join NEW CLIENTS`, which measures how long NEW connections take to be
served while CLIENTS others keep the server busy. Without jobs, a standard set runs. Where the load generator uses more
CPU than the server, it is the bottleneck: the server then sleeps and wakes more often the faster it is, and a start
says little about its work. `-n RANKS -S -m init` is a start that saturates it: it is stopped until all have connected.
"""

from __future__ import annotations

import collections
import json
import shlex
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench import processes, stats

START_SECONDS: Final = 60.0
RUN_SECONDS: Final = 600.0
HEAD_START_SECONDS: Final = 0.7
"""Time for the busy clients of a `join` job before the new ones connect."""

NOW: Final = "now"
BEFORE: Final = "before"
"""The builds of --against."""

BOUND: Final = 1.02
"""A median up to this is not called slower: it may be due to where the compiler has put the code."""
REPS: Final = 5
REPS_JUDGED: Final = 11
REPS_AGAIN: Final = 25
"""Repetitions: by default, with --against, and of a job in which a row seems to be slower."""

STANDARD: Final = [
    "small ops, 64 clients: -n 64 -t 0.4 -w 0.1 -m add,setget,get,check",
    "small ops, 1024 clients: -n 1024 -t 0.4 -w 0.1 -m add,setget,add@16",
    "bulk: -n 1 -t 0.4 -w 0.1 -m mget,bigset,bigget",
    "10000 ranks: -n 10000 -c 512 -r 3 -m init,barrier,barrier18",
    "saturated start of 10000 ranks: -n 10000 -S -m init",
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

JUDGED: Final = ("srv_cpu", "rss")
"""How the names of fields begin that other work on the machine hardly changes."""

Record = dict[str, Any]

Runs = dict[str, dict[int, Record]]
"""The records of one row, by server and repetition."""


class Row(NamedTuple):
    """What is compared: one mode of one job."""

    job: str
    what: str
    mode: str


class Server:
    """A server under measurement, from its start until `stop`."""

    def __init__(self, name: str, command: str | None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        if command is None:
            arguments = [sys.executable, "-c", TORCH_SERVER, str(self.port), name]
        else:
            arguments = shlex.split(command.format(port=self.port))
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by stop)
        # Not in the checkout: with `-m`, what is in the working directory would be imported first.
        self.process = subprocess.Popen(
            ["taskset", "-c", "0", *arguments],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=tempfile.gettempdir(),
        )
        deadline = time.monotonic() + START_SECONDS
        while not _answers(self.port):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self._log.seek(0)
                text = self._log.read().decode(errors="replace")[-2000:]
                self.stop()
                raise SystemExit(f"{name} did not start: {text}")
            time.sleep(0.1)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

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


def measure(servers: dict[str, str | None], jobs: list[tuple[str, str]], reps: int) -> tuple[list[Record], int]:
    """Run every job on every server, interleaved; return all records and the number of failed runs."""
    generator, names = processes.load_generator(), list(servers)
    records, failures = [], 0
    for repetition in range(reps):
        first = repetition % len(names)
        for title, arguments in jobs:
            for name in names[first:] + names[:first]:
                with Server(name, servers[name]) as server:
                    found, error = run_job(generator, server, arguments)
                if error:
                    failures += 1
                    print(f"FAILED {name}, {title}: {error}", flush=True)
                records += [{**record, "tag": name, "job": title, "rep": repetition} for record in found]
    return records, failures


# What it says


def by_row(records: list[Record]) -> dict[Row, Runs]:
    rows: dict[Row, Runs] = {}
    for record in records:
        what = f"{record['op']} depth {record['depth']}" if record["mode"] == "tput" else record["mode"]
        runs = rows.setdefault(Row(record["job"], what, record["mode"]), collections.defaultdict(dict))
        runs[record["tag"]][record["rep"]] = record
    return rows


def values(runs: Runs, name: str, field: str) -> dict[int, float]:
    return {repetition: record[field] for repetition, record in runs.get(name, {}).items()}


def report(records: list[Record], names: list[str], base: str) -> None:
    """Print every server's medians and ratios to the base, row by row, and where the load generator sets the pace."""
    for row, runs in by_row(records).items():
        print(f"\n{row.job} | {row.what}")
        measured = [name for name in names if name in runs]
        for name in measured:
            print(f"  {name:10}", "  ".join(_cell(runs, name, base, field) for field in SHOWN[row.mode]))
        waiting = [text for name in measured if (text := _waits(runs, name, row.mode))]
        if waiting:
            print(f"  the load generator is the bottleneck, in µs of CPU: {', '.join(waiting)}")


def _cell(runs: Runs, name: str, base: str, field: str) -> str:
    found = values(runs, name, field)
    cell = f"{field} {stats.median(list(found.values())):.2f}"
    ratios = stats.paired(found, values(runs, base, field))
    if name == base or not ratios:
        return cell
    low, high, _ = stats.interval(ratios)
    return f"{cell} ({stats.median(ratios):.2f}x {low:.2f}–{high:.2f})"


def _waits(runs: Runs, name: str, mode: str) -> str:
    """Return the CPU of the load generator beside that of a server that waits for it, or "" if it does not wait."""
    for field in SHOWN[mode]:
        if field.startswith("srv_cpu"):
            server = stats.median(list(values(runs, name, field).values()))
            load = stats.median(list(values(runs, name, field.replace("srv", "lg", 1)).values()))
            return f"{load:.2f} beside {server:.2f} of {name}" if load > server else ""
    return ""


# The judge


def is_slower(ratios: list[float]) -> bool:
    """Whether the repetitions of a row say so; a row without any says nothing."""
    return bool(ratios) and stats.interval(ratios).low > 1 and stats.median(ratios) > BOUND


def seem_slower(records: list[Record]) -> list[tuple[Row, str]]:
    """Return the rows, and their fields, in which NOW is slower, or larger, than BEFORE."""
    return [
        (row, field)
        for row, runs in by_row(records).items()
        for field in SHOWN[row.mode]
        if field.startswith(JUDGED) and is_slower(stats.paired(values(runs, NOW, field), values(runs, BEFORE, field)))
    ]


def judge(records: list[Record], again: Callable[[str], list[Record]]) -> list[tuple[Row, str]]:
    """Return what seems slower in these records and in those that `again` returns for its job."""
    suspects = seem_slower(records)
    jobs = dict.fromkeys(row.job for row, _ in suspects)
    repeated = [each for job in jobs for each in seem_slower(again(job))]
    return [each for each in suspects if each in repeated]


def builds(against: str) -> dict[str, str | None]:
    """Return the servers of --against. Raises ValueError if they cannot be compared."""
    trees = {BEFORE: processes.tree_of(against), NOW: processes.chosen_build()}
    if processes.is_compiled(trees[BEFORE]) != processes.is_compiled(trees[NOW]):
        raise ValueError(f"only one of these is compiled: {', '.join(map(str, trees.values()))}")
    python = f"{shlex.quote(sys.executable)} -m tcpstore_async serve --port {{port}}"
    return {name: f"env PYTHONPATH={shlex.quote(str(tree))} {python}" for name, tree in trees.items()}


def main() -> int:
    parser = processes.parser(__doc__)
    parser.add_argument("--server", action="append", metavar="NAME=COMMAND", help="or libuv, or legacy")
    parser.add_argument("--against", metavar="FOLDER|REVISION", help="judge this build against another")
    parser.add_argument("--base", help="the server that ratios refer to (default: libuv if present, else the last)")
    parser.add_argument("--control", action="store_true", help="run the base a second time to measure the noise")
    parser.add_argument("--reps", type=int, help=f"repetitions ({REPS}; {REPS_JUDGED} with --against)")
    parser.add_argument("--json", type=Path, help="write all records to this file, one per line")
    parser.add_argument("--no-netns", action="store_true", help="use the current network namespace")
    parser.add_argument("jobs", nargs="*", metavar="NAME: JOB")
    options = parser.parse_args()
    if not options.server and not options.against:
        parser.error("give --server or --against")
    if options.base and options.against:
        parser.error("--base cannot be used with --against")
    servers: dict[str, str | None] = {}
    if options.against:
        try:
            servers = builds(options.against)
        except (ValueError, subprocess.CalledProcessError) as error:
            parser.error(str(error))
    if not options.no_netns:
        processes.enter_namespace()
    for name, command in servers.items():
        print(f"{name}: {command}")
    for given in options.server or []:
        name, _, command = given.partition("=")
        if not command and name not in ("libuv", "legacy"):
            parser.error(f"--server {name}: expected NAME=COMMAND, libuv or legacy")
        if name in servers:
            parser.error(f"--server {name}: there are two servers of that name")
        servers[name] = command or None
    compared = {name: servers[name] for name in (BEFORE, NOW)} if options.against else {}
    base = BEFORE if compared else options.base or ("libuv" if "libuv" in servers else list(servers)[-1])
    if options.control:
        servers["control"] = servers[base] or _torch_command(base)
    pairs = (job.partition(":") for job in options.jobs or STANDARD)
    jobs = [(title.strip(), arguments.strip()) for title, _, arguments in pairs]
    records, failures = measure(servers, jobs, options.reps or (REPS_JUDGED if compared else REPS))
    if options.json:
        options.json.write_text("\n".join(map(json.dumps, records)) + "\n")
    report(records, list(servers), base)
    if not compared:
        return 1 if failures else 0

    def again(job: str) -> list[Record]:
        nonlocal failures
        print(f"\nagain, {REPS_AGAIN} times, because a row seems to be slower:", flush=True)
        found, failed = measure(compared, [(job, dict(jobs)[job])], REPS_AGAIN)
        failures += failed
        report(found, list(compared), BEFORE)
        return found

    slower = judge(records, again)
    print()
    for row, field in slower:
        print(f"slower: {row.job} | {row.what} | {field}")
    if not slower:
        print("nothing is slower" if not failures else "nothing is slower, but runs have failed")
    return 1 if slower or failures else 0


def _torch_command(name: str) -> str:
    return shlex.join([sys.executable, "-c", TORCH_SERVER]) + f" {{port}} {name}"


if __name__ == "__main__":
    sys.exit(main())
