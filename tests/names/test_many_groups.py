"""Programs that make many process groups with ports out of a small pool that strangers hold, as vLLM's and SGLang's do.

`make test-exhaustive` has 16 processes make 200 groups, one after the other.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support import LIMIT, Server, tcpstore_server
from tcpstore_async import TCPStore
from torch_forker import Program

pytest.importorskip("torch")

PORTS = 3
"""How many ports there are to choose from."""

sizes = pytest.mark.parametrize(("processes", "groups"), [
    (2, 7), pytest.param(16, 200, marks=[pytest.mark.exhaustive, pytest.mark.timeout(3600)]),
])  # fmt: skip

PROGRAM = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist

how, rank, world, groups, *ports = sys.argv[1:]
rank, world = int(rank), int(world)
if how != "stock":
    import tcpstore_async.torch
    tcpstore_async.torch.install(client=how.removesuffix("-class"), classes=how == "python-class")
for number in range(int(groups)):
    port = int(ports[number % len(ports)])
    if how.endswith("-class"):  # as frameworks do that make their stores themselves
        store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    else:
        store = None
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    total = torch.tensor([number * rank])
    dist.all_reduce(total)
    assert total.item() == number * sum(range(world))
    dist.destroy_process_group()
    del store
print("done")
"""


@pytest.fixture
def ports() -> Iterator[list[str]]:
    """Ports on which strangers listen."""
    with ExitStack() as held:
        found = []
        for _ in range(PORTS):
            stranger = held.enter_context(socket.create_server(("", 0)))
            found.append(str(stranger.getsockname()[1]))
        yield found


@pytest.fixture
def server() -> Iterator[Server]:
    with tcpstore_server() as server:
        yield server


class Ranks:
    """The processes of one job; killed at the end of `with`."""

    def __init__(self, how: str, processes: int, groups: int, ports: list[str], url: str) -> None:
        self._stack = ExitStack()
        self._seconds = LIMIT + groups * processes / 4
        env = {"TCPSTORE_SERVER_URL": url, "OMP_NUM_THREADS": "1"}
        self._ranks = [
            self._stack.enter_context(Program(PROGRAM, how, rank, processes, groups, *ports, env=env))
            for rank in range(processes)
        ]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def ended(self, rank: int) -> tuple[str, int, str]:
        """Wait for the end of a rank; return what it has printed, its exit status, and its errors."""
        one = self._ranks[rank]
        return one.output(self._seconds), one.wait(), one.errors()


@sizes
@pytest.mark.parametrize("how", ["native", "python", "native-class", "python-class"])
def test_no_address_is_in_use(how: str, processes: int, groups: int, ports: list[str], server: Server) -> None:
    with Ranks(how, processes, groups, ports, f"tcp://127.0.0.1:{server.port}") as ranks:
        for rank in range(processes):
            printed, status, errors = ranks.ended(rank)
            assert (printed, status) == ("done\n", 0), errors
    assert num_stores(server) == groups


@sizes
def test_pytorch_alone_fails_at_it(processes: int, groups: int, ports: list[str]) -> None:
    """With its first group: the other ranks have connected to strangers by then, and wait for them."""
    with Ranks("stock", processes, groups, ports, "") as ranks:
        printed, status, errors = ranks.ended(0)
    assert (printed, status) == ("", 1)
    assert "EADDRINUSE" in errors


def test_the_launchers_own_stores_are_addresses(server: Server, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "assert os.environ['TORCHELASTIC_USE_AGENT_STORE'] == 'True'\n"
        "dist.barrier()\n"
        "os.write(1, b'done ')\n"
    )
    environment = {
        **os.environ, "TCPSTORE_SERVER_URL": f"tcp://127.0.0.1:{server.port}", "TCPSTORE_INSTALL": "native",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2 * LIMIT)
    assert (done.returncode, done.stdout) == (0, "done done "), done.stderr
    assert num_stores(server) == 0


JOINS = """
import sys
import tcpstore_async.torch
import torch.distributed as dist

tcpstore_async.torch.install(client=sys.argv[1])
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
print("done")
"""


@pytest.mark.parametrize("client", ["native", "python"])
def test_the_server_that_a_job_joins_is_an_address(client: str, server: Server) -> None:
    with tcpstore_server() as joined, ExitStack() as stack:
        env = {
            "TCPSTORE_SERVER_URL": f"tcp://127.0.0.1:{server.port}", "TCPSTORE_JOIN": "1", "TCPSTORE_JOB": "job",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(joined.port), "WORLD_SIZE": "2",
        }  # fmt: skip
        ranks = [stack.enter_context(Program(JOINS, client, env={**env, "RANK": str(rank)})) for rank in range(2)]
        for rank in ranks:
            assert rank.output() == "done\n", rank.errors()
        with TCPStore("127.0.0.1", joined.port, timeout=LIMIT, server="") as store:
            assert {key.split("/")[0] for key in store.list_keys()} == {"job"}
    assert num_stores(server) == 0


WRONG = """
import sys
from datetime import timedelta
import tcpstore_async.torch
import torch.distributed as dist

tcpstore_async.torch.install()
for is_master in (True, False):
    try:
        dist.TCPStore(sys.argv[1], 0, None, is_master, timedelta(seconds=1))
    except ValueError as error:
        print(error)
"""


@pytest.mark.parametrize(("url", "host", "why"), [
    ("http://127.0.0.1:1", "127.0.0.1", "TCPSTORE_SERVER_URL: 'http://127.0.0.1:1' is not of the form"),
    ("tcp://127.0.0.1:1", "x" * 600, "is too long for the name of a store"),
])  # fmt: skip
def test_a_wrong_name_is_no_reason_to_use_the_address(url: str, host: str, why: str) -> None:
    with Program(WRONG, host, env={"TCPSTORE_SERVER_URL": url}) as program:
        assert program.output().count(why) == 2, program.errors()


def num_stores(server: Server) -> int:
    """Return how many stores with names there were: each has a number."""
    with TCPStore("any", 1, None, True, LIMIT, server=f"tcp://127.0.0.1:{server.port}") as store:
        identity = store._connection()
        assert identity.extended()
        assert identity.identity is not None
        return int(identity.identity.instance.rpartition("/")[2]) - 1
