"""What the program `torchrun` does, forked with PyTorch imported; its workers are forked as well.

    elastic_agent.py OPTIONS OF TORCHRUN

With ELASTIC_LOG=1, it prints what our handler logs.
test_torch_launchers.py runs agents and workers as users do, each with an interpreter of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import handlers
from torch.distributed.run import main as torchrun

from tcpstore_async.autoload import autoload
from torch_forker import Forked, fork_from_here

WORKER = """
import runpy, sys
from tcpstore_async.autoload import autoload
autoload()
sys.argv[:] = sys.argv[1:]
kept = runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""`kept`, as in the programs of example_runs.py."""


class Worker(Forked):
    """A worker, as torchrun sees what `subprocess.Popen` returns."""

    def __init__(self, arguments: tuple[str, ...], env: dict[str, str]) -> None:
        assert arguments[:2] == (sys.executable, "-u"), arguments
        # The agent's ID, since the parent is another process.
        request = {"code": WORKER, "arguments": arguments[2:], "env": {**env, "ELASTIC_AGENT": str(os.getpid())}}
        super().__init__({**request, "path": False, "imports": [], "group": True}, (0, 1, 2))

    def wait(self, timeout: float | None = None) -> int:
        try:
            return super().wait(*(() if timeout is None else (timeout,)))
        except TimeoutError:
            raise subprocess.TimeoutExpired("worker", timeout or 0.0) from None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None


class Handler(handlers.SubprocessHandler):
    """What torchrun has for each worker."""

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        return Worker(args, env)

    def close(self, death_sig: signal.Signals | None = None) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and its status is on its way
            super().close(death_sig)


if __name__ == "__main__":
    fork_from_here()
    handlers.SubprocessHandler = Handler  # type: ignore[misc]
    if os.environ.get("ELASTIC_LOG"):
        logging.getLogger("tcpstore_async").addHandler(logging.StreamHandler())
        logging.getLogger("tcpstore_async").setLevel(logging.INFO)
    autoload()
    torchrun()
