"""TCPSTORE_INSTALL under PyTorch's launchers: whose server it is, and that no rank waits for a next round."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import LIMIT
from versions import since

pytestmark = since(2, 6, "torchrun handlers of other packages")

WORKER = """
import json, logging, os, sys
logging.basicConfig(level=logging.INFO, stream=sys.stderr)  # our log records, not the launcher's
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
store = dist.distributed_c10d._get_default_store()
while isinstance(store, dist.PrefixStore):
    store = store.underlying_store
line = json.dumps({"sum": total.item(), "host": store.host, "port": store.port, "type": type(store).__module__})
if dist.get_rank() == 0:
    from tcpstore_async.cli import main
    open(sys.argv[1], "w").write(line)
    dist.barrier()
    try:
        main(["info", "--url", f"tcp://{store.host}:{store.port}", "-o", "json"])
    finally:
        sys.stdout.flush()
        dist.barrier()
        dist.destroy_process_group()
else:
    dist.barrier()
    dist.barrier()
    dist.destroy_process_group()
"""

LAUNCHERS = {
    "static": ["--master-port", "{port}"],
    "standalone": ["--standalone"],
    "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:{port}"],
    "tcpstore": ["--rdzv-backend", "tcpstore", "--rdzv-endpoint", "127.0.0.1:{port}"],
}

# Every launcher, and every mode that installs, at least once; the rest of the product differs in nothing else. That 0
# installs nothing is tried by tests/pytorch/test_torch_install.py.
JOBS: list[Any] = [("static", "1"), ("standalone", "python,classes"), ("c10d", "classes"), ("tcpstore", "")]
JOBS += [
    pytest.param(launcher, mode, marks=pytest.mark.exhaustive)
    for launcher, mode in [
        *[("static", mode) for mode in ("", "0", "python", "classes", "python,classes")],
        *[("standalone", "0"), ("standalone", "1"), ("c10d", "1"), ("tcpstore", "1"), ("tcpstore", "classes")],
    ]
]  # fmt: skip


def launch(
    folder: Path, launcher: str, mode: str, port: int, **more: str
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """A job of two workers: what rank 0 has found, what `tcpstore info` prints about the server, and stderr."""
    script = folder / "worker.py"
    script.write_text(WORKER)
    env = {name: text for name, text in os.environ.items() if name != "TCPSTORE_INSTALL"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *[option.format(port=port) for option in LAUNCHERS[launcher]],
            *(str(script), str(folder / "found")),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
        env={**env, "OMP_NUM_THREADS": "1", **({"TCPSTORE_INSTALL": mode} if mode else {}), **more},
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "found").read_text()), json.loads(done.stdout), done.stderr


@pytest.mark.parametrize(("launcher", "mode"), JOBS, ids=lambda value: value or "unset")
def test_a_job_of_two(launcher: str, mode: str, tmp_path: Path, port: int) -> None:
    found, server, stderr = launch(tmp_path, launcher, mode, port)
    assert found["sum"] == 2
    assert found["type"].startswith("tcpstore_async" if "python" in mode else "torch._C")
    hosted = launcher == "tcpstore" or mode not in ("", "0")
    assert (server["server"] == "tcpstore_async") == hosted
    assert "more ranks than world_size" not in stderr


@pytest.mark.parametrize(
    ("launcher", "mode"),
    [
        ("static", "1"),
        ("c10d", "classes"),
        ("tcpstore", "1"),
        pytest.param("standalone", "python", marks=pytest.mark.exhaustive),
        pytest.param("c10d", "1", marks=pytest.mark.exhaustive),
        pytest.param("tcpstore", "", marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: value or "unset",
)
# quirk: install-fallback
def test_a_job_whose_agent_cannot_start_our_server(launcher: str, mode: str, tmp_path: Path, port: int) -> None:
    """It gets PyTorch's, and one warning; agents that need ours for their rounds have it in a thread."""
    found, server, stderr = launch(tmp_path, launcher, mode, port, TCPSTORE_SERVER="thread")
    assert found["sum"] == 2
    assert (server["server"] == "tcpstore_async") == (launcher == "tcpstore")
    assert stderr.count("PyTorch's own server") == (launcher != "tcpstore"), stderr
