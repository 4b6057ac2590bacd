"""Measure what PyTorch's switches save when a gloo group is made: `python -m bench.gloo [--ranks 16,32,64]`.

Real groups: every rank is a process, forked from one that has imported PyTorch, and a client of our server, which runs
in a process of its own. For each combination of switches a group is made a few times, all ranks at once; a row has the
medians of the seconds until the last rank has its group, of the server's CPU time, and of the seconds of a first
all_reduce, which makes the connections that TORCH_GLOO_LAZY_INIT has put off. Requests and bytes are counted in a
further run, through `tcpstore record`.

Needs PyTorch and about 30 MB of memory per rank. Gloo connects every rank with every other one, so each rank has as
many sockets.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench import processes

processes.use_build()

from bench.scale.servers import Host, Server, hosting  # noqa: E402  (the path comes first)
from tcpstore_async.serving import build  # noqa: E402
from tcpstore_async.tools.load.recording import read_recording  # noqa: E402
from tcpstore_async.tools.load.summary import summarize  # noqa: E402

V2 = "GLOO_ENABLE_STORE_V2_API"
SEQUENCE = "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER"
LAZY = "TORCH_GLOO_LAZY_INIT"
SWITCHES: tuple[tuple[str, ...], ...] = ((), (SEQUENCE,), (V2,), (V2, SEQUENCE), (LAZY,))
LIMIT = 300.0
"""Seconds until the ranks of a group are killed."""


class Sample(NamedTuple):
    """One group that was made. Times are in seconds."""

    seconds: float
    server_cpu: float
    first_reduce: float


class Traffic(NamedTuple):
    """What a group sent, all ranks together."""

    requests: int
    request_bytes: int
    reply_bytes: int


def rank_main(number: int, ranks: int, port: int, switches: tuple[str, ...], go: int, ready: int) -> None:
    """Be one rank: connect, report, wait until all are there, make the group, and report when that was done."""
    for name in (V2, SEQUENCE, LAZY):
        os.environ.pop(name, None)
    os.environ.update(dict.fromkeys(switches, "1"))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    os.write(ready, b".")
    os.read(go, 1)
    dist.init_process_group("gloo", store=store, rank=number, world_size=ranks)
    made = time.monotonic()
    dist.all_reduce(torch.ones(1))
    reduced = time.monotonic()
    os.write(ready, json.dumps([made, reduced - made]).ljust(60).encode())
    os.read(go, 1)  # nobody leaves before all are done
    os._exit(0)


@contextmanager
def forked(ranks: int, port: int, switches: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Fork the ranks; yield the pipes to start them by and to hear from them. They are killed at the end."""
    go, start = os.pipe()
    report, ready = os.pipe()
    pids: list[int] = []
    try:
        for number in range(ranks):
            pid = os.fork()
            if not pid:
                try:
                    signal.alarm(int(LIMIT))
                    rank_main(number, ranks, port, switches, go, ready)
                finally:
                    os._exit(1)
            pids.append(pid)
        os.close(ready)
        ready = -1
        yield start, report
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
        for descriptor in (go, start, report, ready):
            if descriptor >= 0:
                os.close(descriptor)


def read_exactly(descriptor: int, count: int) -> bytes:
    """Read so many bytes. Raises RuntimeError if the ranks have died."""
    data = b""
    while len(data) < count:
        part = os.read(descriptor, count - len(data))
        if not part:
            raise RuntimeError("ranks have died")
        data += part
    return data


def make_group(ranks: int, switches: tuple[str, ...], port: int, server: Server) -> Sample:
    """Make one group of so many ranks."""
    with forked(ranks, port, switches) as (start, report):
        read_exactly(report, ranks)
        cpu = server.cpu()
        began = time.monotonic()
        os.write(start, b"g" * ranks)
        reports = [json.loads(read_exactly(report, 60)) for _ in range(ranks)]
        spent = server.cpu() - cpu
        os.write(start, b"e" * ranks)
    return Sample(max(made for made, _ in reports) - began, spent, max(seconds for _, seconds in reports))


def count_traffic(ranks: int, switches: tuple[str, ...], server: Server) -> Traffic:
    """Make one group through `tcpstore record`, and count what was sent after the connections were made."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "recording.gz")
        upstream = f"tcp://127.0.0.1:{server.port}"
        recorder = subprocess.Popen(
            [sys.executable, "-m", "tcpstore_async", "record", "--upstream", upstream, "-w", str(path), "--port", "0"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert recorder.stdout is not None
        try:
            port = json.loads(recorder.stdout.readline())["port"]
            make_group(ranks, switches, port, server)
            recorder.terminate()
            recorder.wait(LIMIT)
        finally:
            recorder.kill()
            recorder.wait()
            recorder.stdout.close()
        rows = [row for row in summarize(read_recording(path)).commands if row.command not in ("VALIDATE", "PING")]
    return Traffic(
        sum(row.requests for row in rows), sum(row.request_bytes for row in rows), sum(row.reply_bytes for row in rows)
    )


def measure(host: Host, ranks: int, switches: tuple[str, ...], repeat: int, server: str) -> dict[str, Any]:
    """Return one row."""
    samples = []
    for _ in range(repeat):
        with host.running(server) as running:
            samples.append(make_group(ranks, switches, running.port, running))
    with host.running(server) as running:
        traffic = count_traffic(ranks, switches, running)
    return {
        "ranks": ranks,
        "switches": list(switches),
        "seconds": statistics.median(sample.seconds for sample in samples),
        "server_cpu_ms": 1000 * statistics.median(sample.server_cpu for sample in samples),
        "first_reduce": statistics.median(sample.first_reduce for sample in samples),
        "requests_per_rank": traffic.requests / ranks,
        "bytes_per_rank": (traffic.request_bytes + traffic.reply_bytes) / ranks,
    }


def show(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    names = " ".join(row["switches"]) or "none"
    return (
        f"| {row['ranks']} | {names} | {row['requests_per_rank']:,.0f} | {row['bytes_per_rank']:,.0f} | "
        f"{row['server_cpu_ms']:,.1f} | {row['seconds']:.3f} | {row['first_reduce']:.3f} |"
    )


def main() -> None:
    parser = processes.parser(__doc__)
    parser.add_argument("--ranks", default="16,32,64", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=3, help="groups for each row (default: %(default)s)")
    parser.add_argument("--server", default="uvloop", choices=["uvloop", "threaded", "libuv"])
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    options = parser.parse_args()
    import torch.distributed  # before the ranks are forked

    rows = []
    print(f"PyTorch {torch.__version__}, {build()} build, medians of {options.repeat}\n")
    print("| ranks | switches | requests per rank | bytes per rank | server CPU, ms | seconds | first all_reduce, s |")
    print("|---:|---|---:|---:|---:|---:|---:|", flush=True)
    with hosting(options.server) as host:
        for ranks in map(int, options.ranks.split(",")):
            for switches in SWITCHES:
                rows.append(measure(host, ranks, switches, options.repeat, options.server))
                print(show(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
