"""A PyTorch process of the demo: unmodified PyTorch, whatever server it connects to.

    python torch_rank.py PORT RANK WORLD_SIZE

Prints its report as a line of JSON.
"""

import json
import os
import sys
import time
from datetime import timedelta

started = time.monotonic()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

TIMEOUT = timedelta(seconds=60)


def main(port: int, rank: int, world_size: int) -> None:
    imported = time.monotonic()
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    joined = time.monotonic()
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    report = {
        "rank": rank,
        "pid": os.getpid(),
        "version": torch.__version__,
        "import_seconds": imported - started,
        "join_seconds": joined - imported,
        "reduce_seconds": time.monotonic() - joined,
        "sum": tensor.item(),
    }
    print(json.dumps(report))
    dist.destroy_process_group()


main(*map(int, sys.argv[1:]))
