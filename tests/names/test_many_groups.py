"""Programs that make many process groups with ports out of a small pool that strangers hold, as vLLM's and SGLang's do.

TCPSTORE_TEST_GROUPS=16x200 makes 200 groups in 16 processes; by default there are few of both, to be quick.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support import LIMIT, Server, tcpstore_server
from tcpstore_async import TCPStore

pytest.importorskip("torch")

PROCESSES, GROUPS = map(int, os.environ.get("TCPSTORE_TEST_GROUPS", "2x7").split("x"))
SECONDS = LIMIT + GROUPS * PROCESSES / 4

PROGRAM = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist

how, rank, world, groups, *ports = sys.argv[1:]
rank, world = int(rank), int(world)
if how != "stock":
    import tcpstore_async.torch
    tcpstore_async.torch.install(client=how.removesuffix("-class"))
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
    """Three ports on which strangers listen."""
    with ExitStack() as held:
        found = []
        for _ in range(3):
            stranger = held.enter_context(socket.create_server(("", 0)))
            found.append(str(stranger.getsockname()[1]))
        yield found


@pytest.fixture
def server() -> Iterator[Server]:
    with tcpstore_server() as server:
        yield server


def start(how: str, rank: int, world: int, ports: list[str], url: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", PROGRAM, how, str(rank), str(world), str(GROUPS), *ports]
    environment = {**os.environ, "TCPSTORE_SERVER_URL": url, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize("how", ["native", "python", "native-class"])
def test_no_address_is_in_use(how: str, ports: list[str], server: Server) -> None:
    url = f"tcp://127.0.0.1:{server.port}"
    ranks = [start(how, rank, PROCESSES, ports, url) for rank in range(PROCESSES)]
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=SECONDS)
            assert (rank.returncode, out) == (0, "done\n"), err
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


PUBLISHES = """
import sys
from datetime import timedelta
import tcpstore_async.torch
import torch.distributed as dist

tcpstore_async.torch.install()
if sys.argv[1] == "0":
    store = dist.TCPStore("node7", 0, None, True, timedelta(seconds=60))
    print(store.port, flush=True)
    sys.stdin.read()
else:
    store = dist.TCPStore("node7", int(sys.argv[1]), None, False, timedelta(seconds=60))
    store.set("k", "v")
    print(store.get("k"))
"""


def test_a_port_that_is_published_is_a_name(server: Server) -> None:
    environment = {**os.environ, "TCPSTORE_SERVER_URL": f"tcp://127.0.0.1:{server.port}"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen([sys.executable, "-c", PUBLISHES, "0"], **pipes) as owner:
        assert owner.stdout is not None
        port = owner.stdout.readline().strip()
        with subprocess.Popen([sys.executable, "-c", PUBLISHES, port], **pipes) as rank:
            assert rank.communicate(timeout=LIMIT)[0] == "b'v'\n"
        owner.communicate(timeout=LIMIT)


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


def num_stores(server: Server) -> int:
    """Return how many stores with names there were: each has a number."""
    with TCPStore("any", 1, None, True, LIMIT, server=f"tcp://127.0.0.1:{server.port}") as store:
        identity = store._connection()
        assert identity.extended()
        assert identity.identity is not None
        return int(identity.identity.instance.rpartition("/")[2]) - 1


def test_pytorch_alone_fails(ports: list[str]) -> None:
    with start("stock", 0, 2, ports, "") as rank:
        _, err = rank.communicate(timeout=LIMIT)
    assert rank.returncode == 1
    assert "EADDRINUSE" in err
