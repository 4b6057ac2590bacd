"""Jobs that are killed and started again at once under the same name and URL, with PyTorch's C++ client and ours.

Each rank is a process. Ranks that the killed job has left see the end of its store, and change nothing in the next.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from faults.fault_helpers import until
from support import Server, tcpstore_server
from torch_forker import Program

pytest.importorskip("torch")


RANK = """
import sys
from datetime import timedelta
import tcpstore_async.torch
import torch.distributed as dist

client, rank, job = sys.argv[1], int(sys.argv[2]), sys.argv[3]
tcpstore_async.torch.install(client="native" if client == "native" else "python", classes=client != "native")
store = dist.TCPStore("node7", 4711, 2, rank == 0, timedelta(seconds=60))
assert (type(store).__module__ == "torch._C._distributed_c10d") == (client == "native")
store.add("ranks that have come", 1)
store.set(f"{job} {rank}", "here")
store.wait([f"{job} {1 - rank}"])
print(store.add("ranks that have come", 0), flush=True)
if rank == 0 or job == "second":
    sys.stdin.read()
try:
    print(store.get("never"))
except dist.DistNetworkError as error:
    print(error)
for act in (lambda: store.set("k", "late"), lambda: store.add("ranks that have come", 1)):
    try:
        act()
    except dist.DistNetworkError:
        pass
print("done", flush=True)
"""


@pytest.fixture
def server(ports: str) -> Iterator[Server]:
    with tcpstore_server("--store-ports", ports) as server:
        yield server


@pytest.mark.parametrize(("client", "ports"), [("native", "any"), ("native", "0"), ("python", "any")])
def test_a_killed_job_starts_again(client: str, ports: str, server: Server) -> None:
    env = {"TCPSTORE_SERVER_URL": f"tcp://127.0.0.1:{server.port}"}
    with ExitStack() as stack:

        def job(name: str) -> list[Program]:
            ranks = [stack.enter_context(Program(RANK, client, rank, name, env=env)) for rank in range(2)]
            for rank in ranks:
                assert rank.stdout.readline() == b"2\n", rank.errors()  # those of this job, and nobody else
            return ranks

        owner, late = job("first")
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        second = job("second")
        printed = late.output()
        assert late.wait() == 0, late.errors()
        assert printed.endswith("done\n")
        why = f"the store 'node7:4711' ended: its owner (host {os.uname().nodename}, pid {owner.pid}) left"
        if client == "native" and ports == "any":  # its own client can say only that the connection is lost
            assert why not in printed + late.errors()
        elif client == "native":  # the process that forwards says it, and may outlive the rank
            until(lambda: why in late.errors(), "it is said why the store has ended")
        else:
            assert why in printed
        with stack.enter_context(Program(LOOK, env=env)) as look:
            assert look.output() == "b'2' []\n", look.errors()
        for rank in second:
            rank.end()


LOOK = """
from tcpstore_async import TCPStore
with TCPStore("node7", 4711, timeout=60.0) as store:
    print(store.get("ranks that have come"), [key for key in store.list_keys() if key == "k" or "first" in key])
"""
