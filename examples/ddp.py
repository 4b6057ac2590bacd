"""DDP training on our server. Only the two lines with tcpstore_async are new.

With torchrun, here with our rendezvous backend:

    torchrun --nproc-per-node=2 --rdzv-backend=tcpstore --rdzv-endpoint=localhost:29400 examples/ddp.py

By hand, with one process per rank:

    MASTER_ADDR=localhost MASTER_PORT=29555 WORLD_SIZE=2 RANK=0 python examples/ddp.py

To leave the program unchanged, omit the two lines and set TCPSTORE_INSTALL=1 (see train.py).
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
