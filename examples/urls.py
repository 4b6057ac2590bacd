"""`init_process_group` with every kind of URL, on our server: run it as `python examples/urls.py [PORT]`.

tcp:// names the master in the URL, env:// in the environment; file:// needs a shared file instead of a server.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tcpstore_async.torch

WORLD = 2


def rank(number: int, port: int, folder: str) -> None:
    tcpstore_async.torch.install()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(number), WORLD_SIZE=str(WORLD))
    for url in (
        f"tcp://127.0.0.1:{port}?rank={number}&world_size={WORLD}",
        "env://",
        f"file://{folder}/meeting?rank={number}&world_size={WORLD}",
    ):
        dist.init_process_group("gloo", init_method=url)
        count = torch.ones(1)
        dist.all_reduce(count)
        if number == 0:
            print(f"{count.item():g} ranks met by {url.partition('://')[0]}://")
        dist.destroy_process_group()


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 29555
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (port, folder), WORLD)
