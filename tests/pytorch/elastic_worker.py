"""A worker for torchrun: meets the others, sums, and writes down what it saw; then does as `what` says.

    elastic_worker.py FOLDER WHAT

They meet where torchrun says, or at ELASTIC_URL. `end`: ends. `fail`: one of the first round is killed, and the others
wait for their agents to end them. `hold`: waits until FOLDER/go is there.
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
    failed = folder / "failed"
    fails = what == "fail" and not failed.exists()
    url = os.environ.get("ELASTIC_URL", "env://")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=url, timeout=timedelta(seconds=60), rank=rank, world_size=size)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    store = dist.distributed_c10d._get_default_store()
    stale = store.check(["from an earlier attempt"])
    dist.barrier()
    store.set("from an earlier attempt", "")
    seen = {
        "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        "rank": rank,
        "sum": tensor.item(),
        "stale": stale,
        "agent": int(os.environ["ELASTIC_AGENT"]),
        "pid": os.getpid(),
        "host": os.environ["MASTER_ADDR"],
        "port": os.environ["MASTER_PORT"],
        "round": os.environ["TCPSTORE_ROUND"],
    }
    path = folder / "seen"
    with path.open("a") as file:
        file.write(json.dumps(seen) + "\n")
    while fails and rank == 1:
        if len(path.read_text().splitlines()) == size:  # its agent ends those beside it, who are to write first
            failed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
    while fails:
        signal.pause()
    while what == "hold" and not (folder / "go").exists():
        time.sleep(0.05)
        dist.barrier()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
