"""A program that knows nothing of us; what it is started with decides where its ranks meet:

    TCPSTORE_INSTALL=1 MASTER_ADDR=localhost MASTER_PORT=29555 WORLD_SIZE=2 RANK=0 python examples/train.py

On a server that runs already (`tcpstore serve --host 0.0.0.0`), every rank a client, jobs told apart by name:

    TCPSTORE_INSTALL=1 TCPSTORE_JOIN=1 TCPSTORE_JOB=experiment MASTER_ADDR=… RANK=… python examples/train.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
if dist.get_rank() == 0:
    print(f"{dist.get_world_size()} ranks, sum {total.item():g}")
dist.destroy_process_group()
