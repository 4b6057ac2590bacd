"""Measure what the log of a job's ranks weighs, and what links cost that do nothing, on a server with a journal.

    python -m bench.logged [RANKS [SECONDS]]

The ranks are behind links of eight, as hosts with eight GPUs have them. For a start, ten `store_based_barrier`s, ten
BARRIERs, and SECONDS without a request, it prints bytes of the journal and CPU time of the server; then the size of the
snapshot that the server leaves behind. What a server writes to etcd with `--etcd` are the same records.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench import processes

if __name__ == "__main__":
    processes.use_build()  # before the package is imported

from bench.scale.in_memory import BARRIERS
from bench.scale.servers import RANKS_PER_LINK, WINDOW, Measured, _started, loaded, relayed
from tcpstore_async.serving import build
from tcpstore_async.tools.load.scripts import one_message_barrier, store_based_barrier

LIMIT = 600.0

_SETTLE: float = 6.0
"""Seconds after which a link has sent its last acknowledgement but for keep-alive."""


def written(folder: Path) -> int:
    """Return the bytes of records in a journal, whose segments end with zeros."""
    return sum(len(segment.read_bytes().rstrip(b"\0")) for segment in folder.glob("log-*"))


def measure(ranks: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "journal")
        command = [sys.executable, "-W", "ignore", "-m", "tcpstore_async", "serve", "--port", "0", "--admin", ""]
        with (
            _started([*command, "--persist", str(folder)], trainer=False) as server,
            relayed(server, ranks) as behind,
            loaded(behind, ranks - 1, LIMIT) as test,
        ):

            def part(what: str, play: Callable[[], Measured], times: int = 1) -> None:
                before = written(folder)
                found = play()
                each = ranks * times
                print(
                    f"{what}: {(written(folder) - before) / each:.0f} B of the journal and "
                    f"{1e6 * found.server_cpu / each:.1f} µs of the server's CPU per rank"
                )

            others = ranks - 1
            part("start", lambda: test.join(ranks, WINDOW))
            steps = [step for number in range(BARRIERS) for step in store_based_barrier(b"s%d" % number, others)]
            part("store_based_barrier", lambda: test.play(steps), BARRIERS)
            short = [step for number in range(BARRIERS) for step in one_message_barrier(b"b%d" % number, others)]
            part("BARRIER", lambda: test.play(short), BARRIERS)
            time.sleep(_SETTLE)
            bytes_before, cpu_before = written(folder), server.cpu()
            time.sleep(seconds)
            each = seconds * -(-ranks // RANKS_PER_LINK)
            print(
                f"nothing: {(written(folder) - bytes_before) / each:.1f} B and "
                f"{1e6 * (server.cpu() - cpu_before) / each:.1f} µs per link and second"
            )
            os.kill(server.pid, signal.SIGTERM)
            while not (found := list(folder.glob("snapshot-*"))):
                time.sleep(0.01)
            print(f"snapshot: {found[0].stat().st_size / ranks:.0f} B per rank; {build()} build")


if __name__ == "__main__":
    measure(int(sys.argv[1]) if len(sys.argv) > 1 else 8192, float(sys.argv[2]) if len(sys.argv) > 2 else 20.0)
