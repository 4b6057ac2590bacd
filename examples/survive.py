"""DDP training goes on while the server of its store is killed three times.

    python examples/survive.py

The ranks are a program of PyTorch's alone. Two variables put their store on a server that keeps a journal, behind a
relay that they share and that is started for them.
"""

import os
import subprocess
import sys
import tempfile
import time

RANKS = 2
KILLS = 3


def train() -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10 * KILLS):
        if dist.get_rank() == 0 and step % 10 == 5:
            print(f"step {step}", flush=True)  # now the server is killed
        group = dist.new_group()  # uses the store
        data = torch.rand(8, 4)
        loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.barrier(group)
        dist.destroy_process_group(group)
    dist.destroy_process_group()


def serve(port: int, journal: str) -> "subprocess.Popen[str]":
    """Start the server, and wait until it is ready; its first line has its port."""
    command = [sys.executable, "-m", "tcpstore_async", "serve", "--port", str(port), "--persist", journal]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    assert server.stdout.readline(), "the server does not start"
    return server


def main() -> None:
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 29555
    with tempfile.TemporaryDirectory() as journal:
        server = serve(port, journal)
        store = {"TCPSTORE_SERVER_URL": f"tcp://127.0.0.1:{port}", "TCPSTORE_INSTALL": "1"}
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": str(RANKS)}  # only a name
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "train"],
                env={**os.environ, **store, **job, "RANK": str(rank)},
                stdout=subprocess.PIPE if rank == 0 else None,
                text=True,
            )
            for rank in range(RANKS)
        ]
        assert ranks[0].stdout is not None
        for line in ranks[0].stdout:
            with server:
                server.kill()
            print(f"{line.strip()}: killed the server, pid {server.pid}", flush=True)
            time.sleep(0.5)
            server = serve(port, journal)
        ranks[0].stdout.close()
        print("the ranks ended with", *[rank.wait() for rank in ranks], flush=True)
        with server:
            server.terminate()


if __name__ == "__main__":
    train() if sys.argv[1:] == ["train"] else main()
