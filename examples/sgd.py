"""Distributed SGD that averages the gradients by hand, so that every step is visible.

Run it as `python examples/sgd.py [PORT]`. Each rank has a part of the data, and all have the same model after each
step.
"""

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tcpstore_async.torch

WORLD = 2
EPOCHS = 5


def average_gradients(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= WORLD


def is_the_same_everywhere(model: torch.nn.Module) -> bool:
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    all_of_them = [torch.empty_like(mine) for _ in range(WORLD)]
    dist.all_gather(all_of_them, mine)
    return all(torch.equal(mine, other) for other in all_of_them)


def rank(number: int, port: int) -> None:
    tcpstore_async.torch.install()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=WORLD)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    part = torch.rand(256, 4)[number::WORLD]
    for epoch in range(EPOCHS):
        losses = []
        for batch in part.split(16):
            loss = (model(batch) - batch.prod(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model)
            optimizer.step()
            losses.append(loss.item())
        if number == 0:
            print(f"epoch {epoch}: loss {sum(losses) / len(losses):.5f}")
    same = is_the_same_everywhere(model)
    if number == 0:
        print(f"the same model on every rank: {same}")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank, (int(sys.argv[1]) if len(sys.argv) > 1 else 29555,), WORLD)
