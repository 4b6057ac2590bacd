"""Engines that make groups on ports that they have probed, as vLLM and SGLang do: `python examples/many_groups.py`.

Somebody else takes every port between the probe and its use. With a server and TCPSTORE_SERVER_URL that does not
matter: a port is only a name there. Programs that cannot be changed set TCPSTORE_INSTALL=native instead of calling
`install()`.
"""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tcpstore_async.torch

TCPSTORE = [sys.executable, "-m", "tcpstore_async"]
ENGINES, WORKERS, ROUNDS = 2, 2, 3


def open_port() -> int:
    """Return a port that is free now, as frameworks find one."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def worker(number: int, ports: list[int]) -> None:
    tcpstore_async.torch.install()
    engine, rank = divmod(number, WORKERS)
    for _ in range(ROUNDS):  # as when weights are reloaded: the same port, and an empty store each time
        address = f"tcp://127.0.0.1:{ports[engine]}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORKERS)
        total = torch.tensor([number])
        dist.all_reduce(total)
        if rank == 0:
            os.write(1, f"engine {engine}: sum {total.item()}\n".encode())
        dist.destroy_process_group()


def main() -> None:
    serve = [*TCPSTORE, "serve", "--host", "127.0.0.1", "--port", "0"]
    with ExitStack() as stack:
        server = stack.enter_context(subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
        stack.callback(server.terminate)
        assert server.stdout is not None
        url = f"tcp://127.0.0.1:{json.loads(server.stdout.readline())['port']}"
        os.environ["TCPSTORE_SERVER_URL"] = url
        ports = [open_port() for _ in range(ENGINES)]
        for port in ports:  # the stranger
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        mp.spawn(worker, (ports,), ENGINES * WORKERS)
        listed = subprocess.run([*TCPSTORE, "stores", "--url", url, "-o", "json"], capture_output=True, check=True)
        print("stores that are left:", len(json.loads(listed.stdout)))


if __name__ == "__main__":
    main()
