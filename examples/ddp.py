"""A DDP training whose ranks meet on our server. It needs no change but the two lines with tcpstore_async.

Under torchrun, which may have our rendezvous too:

    torchrun --nproc-per-node=2 --rdzv-backend=tcpstore --rdzv-endpoint=localhost:29400 examples/ddp.py

By hand, a process for each rank:

    MASTER_ADDR=localhost MASTER_PORT=29555 WORLD_SIZE=2 RANK=0 python examples/ddp.py

Without any change to a program: leave the two lines out and set TCPSTORE_INSTALL=1 (see train.py).
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tcpstore_async.torch

tcpstore_async.torch.install()

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(5):
    data = torch.rand(8, 4, generator=generator)
    loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
