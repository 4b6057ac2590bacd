"""The ring all-reduce, from sends to the right and receives from the left: `python examples/ring_allreduce.py [PORT]`.

The tensor is split into one chunk per rank. In the first round each rank adds its part to the chunks that it receives,
and in the second the sums are passed around. Each rank sends and receives every chunk at most twice, however many ranks
there are.
"""

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tcpstore_async.torch

WORLD = 4


def ring_all_reduce(tensor: torch.Tensor) -> None:
    """Sum a tensor over all ranks, in place."""
    rank, world = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % world, (rank + 1) % world
    chunks = tensor.tensor_split(world)
    for step in range(world - 1):  # afterwards this rank has the sum of the chunk after its own
        sent, received = chunks[(rank - step) % world], chunks[(rank - step - 1) % world]
        received += pass_on(sent, received, left, right)
    for step in range(world - 1):
        sent, received = chunks[(rank - step + 1) % world], chunks[(rank - step) % world]
        received.copy_(pass_on(sent, received, left, right))


def pass_on(sent: torch.Tensor, like: torch.Tensor, left: int, right: int) -> torch.Tensor:
    arrived = torch.empty_like(like)
    sending = dist.isend(sent.contiguous(), right)
    dist.recv(arrived, left)
    assert sending is not None
    sending.wait()
    return arrived


def rank(number: int, port: int) -> None:
    tcpstore_async.torch.install()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=WORLD)
    by_hand = torch.arange(10.0) * (number + 1)
    by_pytorch = by_hand.clone()
    ring_all_reduce(by_hand)
    dist.all_reduce(by_pytorch)
    assert torch.equal(by_hand, by_pytorch)
    if number == 0:
        print("the same as PyTorch's all_reduce:", by_hand.tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank, (int(sys.argv[1]) if len(sys.argv) > 1 else 29555,), WORLD)
