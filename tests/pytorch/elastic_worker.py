"""A worker for torchrun: meets the others, sums, and writes down what it saw; then does as `what` says.

    elastic_worker.py FOLDER WHAT

`end`: ends. `fail`: one of the first attempt is killed. `hold`: waits until FOLDER/go is there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def main(folder: Path, what: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    store = dist.distributed_c10d._get_default_store()
    stale = store.check(["from an earlier attempt"])
    dist.barrier()
    store.set("from an earlier attempt", "")
    rank, attempt = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    seen = {
        "attempt": int(attempt),
        "rank": rank,
        "sum": tensor.item(),
        "stale": stale,
        "agent": os.getppid(),
        "pid": os.getpid(),
        "port": os.environ["MASTER_PORT"],
    }
    with (folder / "seen").open("a") as file:
        file.write(json.dumps(seen) + "\n")
    if what == "fail" and attempt == "0" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while what == "hold" and not (folder / "go").exists():
        time.sleep(0.05)
        dist.barrier()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
