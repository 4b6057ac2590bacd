"""The examples run, and print what they should."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from support import tcpstore_server

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
QUIET = ["-W", "error", "-W", "ignore:Failed to initialize NumPy:UserWarning"]


def run(*command: str, world: int = 1, **env: str) -> list[str]:
    """What so many ranks of a command print, each."""
    ranks = [
        subprocess.Popen(
            [sys.executable, *QUIET, *command],
            cwd=tempfile.gettempdir(),
            env={**os.environ, "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(world), "RANK": str(rank), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        printed = [rank.communicate(timeout=90)[0] for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.communicate()
    assert [rank.returncode for rank in ranks] == [0] * world, printed
    return printed


def test_plain(port: int) -> None:
    assert run(str(EXAMPLES / "plain.py"), str(port)) == ["rank 0, rank 1, rank 2, rank 3\n"]


def test_ddp(port: int) -> None:
    first, second = run(str(EXAMPLES / "ddp.py"), world=2, MASTER_PORT=str(port))
    assert first.count("loss") == 5
    assert second == ""


def test_ddp_under_torchrun(port: int) -> None:
    endpoint = ["--nproc-per-node=2", "--rdzv-backend=tcpstore", f"--rdzv-endpoint=localhost:{port}"]
    conf = ["--rdzv-conf=last_call_timeout=1"]
    (printed,) = run("-m", "torch.distributed.run", *endpoint, *conf, str(EXAMPLES / "ddp.py"), OMP_NUM_THREADS="1")
    assert printed.count("loss") == 5


def test_the_environment_alone(port: int) -> None:
    printed = run(str(EXAMPLES / "train.py"), world=2, MASTER_PORT=str(port), TCPSTORE_INSTALL="1")
    assert printed == ["2 ranks, sum 1\n", ""]
    with tcpstore_server() as server:
        joins = {"TCPSTORE_INSTALL": "1", "TCPSTORE_JOIN": "1", "TCPSTORE_JOB": "experiment"}
        printed = run(str(EXAMPLES / "train.py"), world=2, MASTER_PORT=str(server.port), **joins)
    assert printed == ["2 ranks, sum 1\n", ""]
