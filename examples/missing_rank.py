"""Find the missing rank: `python examples/missing_rank.py [PORT]`.

One rank of four does not call two barriers. PyTorch's `monitored_barrier` names it, and so does `StoreCollectives`,
which does not need PyTorch.
"""

import sys
from datetime import timedelta

import torch.distributed as dist
import torch.multiprocessing as mp

from tcpstore_async import MissingRanksError
from tcpstore_async.collectives import StoreCollectives
from tcpstore_async.torch import TCPStore

WORLD = 4
ABSENT = 2


def rank(number: int, port: int) -> None:
    with TCPStore("127.0.0.1", port, WORLD, is_master=number == 0) as store:
        dist.init_process_group("gloo", store=store, rank=number, world_size=WORLD)
        if number != ABSENT:
            meet(number, store)
        store.barrier("all have tried", WORLD)
        dist.destroy_process_group()


def meet(number: int, store: TCPStore) -> None:
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=5), wait_all_ranks=True)
    except RuntimeError as error:
        if number == 0:
            print(f"monitored_barrier: {str(error).splitlines()[0]}")
    try:
        StoreCollectives(store, number, WORLD).barrier("start", timeout=1.0)
    except MissingRanksError as error:
        if number == 0:
            print(f"StoreCollectives: missing are {error.ranks}")


if __name__ == "__main__":
    mp.spawn(rank, (int(sys.argv[1]) if len(sys.argv) > 1 else 29555,), WORLD)
