"""A program without any of our code. Environment variables select our server:

    TCPSTORE_INSTALL=1 MASTER_ADDR=localhost MASTER_PORT=29555 WORLD_SIZE=2 RANK=0 python examples/train.py

On a running server (`tcpstore serve --host ::` on HOST), where the address is only the name of the job's store:

    export TCPSTORE_INSTALL=1 TCPSTORE_SERVER_URL=tcp://HOST:29500
    MASTER_ADDR=job-1 MASTER_PORT=1 WORLD_SIZE=2 RANK=0 python examples/train.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
if dist.get_rank() == 0:
    print(f"{dist.get_world_size()} ranks, sum {total.item():g}")
dist.destroy_process_group()
