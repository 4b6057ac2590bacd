"""Unchanged PyTorch clients go on when the server of their store is killed and comes back: they share a relay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pytorch.test_torch_torchrun import CONF, Job, groups, once
from pytorch.test_torch_torchrun import job as torchrun_job
from server.test_persistence import Restarting
from standby import Replicated
from support import tcpstore
from torch_forker import Program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ADDRESS = "10.9.9.9:31000"
"""The name of the store: no host has it."""

RANKS = 3

GROUPS = 20

TRAIN = f"""
import sys
from datetime import timedelta
import tcpstore_async.torch
tcpstore_async.torch.install()
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank = int(sys.argv[1])
print("begins", flush=True)
dist.init_process_group("gloo", init_method="tcp://{ADDRESS}", rank=rank, world_size={RANKS},
                        timeout=timedelta(seconds=60))
assert type(dist.distributed_c10d._get_default_store()._underlying_non_prefix_store) is dist.TCPStore
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
for number in range({GROUPS}):
    print(number, flush=True)
    group = dist.new_group()
    model(torch.full((2, 4), float(rank))).sum().backward()
    total = torch.tensor([number])
    dist.all_reduce(total, group=group)
    assert total.item() == {RANKS} * number
dist.barrier()
print(float(model.module.weight.grad.sum()), flush=True)
dist.destroy_process_group()
"""

job = torchrun_job


@pytest.fixture(params=["at its port", "elsewhere"])
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Restarting]:
    """A server that comes back at its port, or at another one, which one that stands by knows."""
    with (Restarting if request.param == "at its port" else Replicated)(tmp_path / "journal") as server:
        yield server


@pytest.fixture
def port(server: Restarting) -> int:
    """Where the agents of `job` meet."""
    return server.port


def connected(server: Restarting) -> int:
    """How many sessions there are in the store of the ranks."""
    command = ["who", "--url", f"tcp://127.0.0.1:{server.port}", "--store", ADDRESS, "-o", "json"]
    done = tcpstore(*command)
    return 0 if done.returncode else len(json.loads(done.stdout))


def test_ddp_through_three_kills(server: Restarting) -> None:
    """In the middle of the start, and of `new_group`, twice."""
    with ExitStack() as stack:

        def begin(rank: int) -> Program:
            program = Program(TRAIN, rank, env={"TCPSTORE_SERVER_URL": f"tcp://{server.endpoint}"})
            stack.enter_context(program)
            assert program.stdout.readline() == b"begins\n", program.errors()
            return program

        ranks = [begin(rank) for rank in range(RANKS - 1)]
        while connected(server) < len(ranks):
            assert all(rank.poll() is None for rank in ranks), ranks[0].errors()
        server.kill()
        ranks.append(begin(RANKS - 1))
        server.start()
        for number in range(GROUPS):
            assert ranks[0].stdout.readline() == b"%d\n" % number, ranks[0].errors()
            if number in (5, 12):
                server.restart()
        lasts = [rank.output().splitlines()[-1] for rank in ranks]
        assert len(set(lasts)) == 1, [rank.errors() for rank in ranks]


@once
def test_torchrun_through_kills_in_the_start_and_in_a_restart_of_workers(job: Job, server: Restarting) -> None:
    conf = f"{CONF},is_host=0"  # on the server's own host, an agent would take the port while there is no server
    job.endpoint = server.endpoint
    first = job.agent("fail", conf=conf)
    job.until(lambda: b"tcpstore.epoch.job" in tcpstore("keys", "--url", f"tcp://127.0.0.1:{server.port}").stdout)
    server.kill()
    second = job.agent("fail", conf=conf)
    server.start()
    job.until((job.folder / "failed").exists)
    server.restart()
    job.end(first, second)
    assert groups(job.seen()) == [(2, [0, 1])] * 2


@once
def test_torchrun_trains_through_three_kills(job: Job, server: Restarting) -> None:
    job.endpoint = server.endpoint
    agents = [job.agent("hold") for _ in range(2)]
    job.until(lambda: len(job.seen()) == 2)
    for _ in range(3):
        server.restart()
    (job.folder / "go").touch()
    job.end(*agents)
    assert groups(job.seen()) == [(2, [0, 1])]
