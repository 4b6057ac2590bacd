"""A process group on a store that the program creates, and also uses itself.

Run it as `python examples/explicit_store.py [PORT]`. This needs no `install()`: pass the store where you would pass
PyTorch's.
"""

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tcpstore_async.torch import PrefixStore, TCPStore

WORLD = 3


def rank(number: int, port: int) -> None:
    with TCPStore("127.0.0.1", port, WORLD, is_master=number == 0) as store:
        dist.init_process_group("gloo", store=PrefixStore("group", store), rank=number, world_size=WORLD)
        total = torch.tensor([float(number)])
        dist.all_reduce(total)
        dist.destroy_process_group()

        store.set(f"sum/{number}", f"{total.item():g}")
        sums = store.multi_get([f"sum/{other}" for other in range(WORLD)])
        if number == 0:
            print("the sums of all ranks:", ", ".join(one.decode() for one in sums))
        store.barrier("all have read", WORLD)


if __name__ == "__main__":
    mp.spawn(rank, (int(sys.argv[1]) if len(sys.argv) > 1 else 29555,), WORLD)
