"""Run the programs in examples/ as a user would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from torch_forker import Program
from versions import QUIET, unsaid

EXAMPLES = Path(__file__).parent.parent / "examples"


ABORTED_BY_GLOO = "terminate called without an active exception"
"""Printed occasionally by a process that exits right after a backward pass, with any store: PyTorch's issue 190489."""


def run(*command: str, world: int = 1, attempts: int = 1, **env: str) -> list[str]:
    """Run `world` ranks of a command and return what each prints. Only runs that Gloo has aborted are repeated."""
    codes, printed = run_once(*command, world=world, env=env)
    if attempts > 1 and any(ABORTED_BY_GLOO in text for text in printed):
        return run(*command, world=world, attempts=attempts - 1, **env)
    assert codes == [0] * world, printed
    return printed


def run_once(*command: str, world: int, env: dict[str, str]) -> tuple[list[int], list[str]]:
    ranks = [
        subprocess.Popen(
            [sys.executable, *QUIET, *command],
            cwd=tempfile.gettempdir(),
            env={**os.environ, "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(world), "RANK": str(rank), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(world)
    ]
    try:
        printed = [unsaid(rank.communicate(timeout=90)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)  # with its children, which would keep the pipe open
                rank.communicate()
    return [rank.returncode for rank in ranks], printed


def lines_of(name: str, *arguments: object, attempts: int = 1) -> list[str]:
    """Run a program that starts its own ranks and return the lines that it prints."""
    (printed,) = run(str(EXAMPLES / name), *map(str, arguments), attempts=attempts)
    return printed.splitlines()


SPAWN = """
import pickle, runpy, sys
import torch.multiprocessing as mp
def spawn(function, args=(), nprocs=1):
    pickle.dumps((function, args))
    assert function.__name__ in runpy.run_path(example, run_name="__mp_main__")
    mp.start_processes(function, args, nprocs, start_method="fork")
mp.spawn = spawn
example = sys.argv.pop(1)
sys.argv[0] = example
kept = runpy.run_path(example, run_name="__main__")
"""
"""Runs an example whose ranks are forked instead of spawned, which would import PyTorch in each. What spawning does is
tried all the same: what a rank is given is pickled, and the example is imported under another name.

What the example has defined is kept until the interpreter ends, as Python does for a program. Freed before, a DDP model
can wait forever: it frees Gloo's process group, which joins a thread that needs the GIL (PyTorch's issue 190489).
"""


USED = ["torch._dynamo"]
"""Modules that optimizers and DDP import; they take as long as PyTorch itself."""


AGENT = Path(__file__).parent / "pytorch" / "elastic_agent.py"

TORCHRUN = """
import os, runpy, subprocess, sys
from torch_forker import Forked, fork_from_here
fork_from_here()
start = subprocess.Popen
def forked(command, **options):
    if command[1:3] != ["-m", "torch.distributed.run"]:
        return start(command, **options)
    request = {"code": agent, "path": True, "arguments": command[3:], "env": dict(os.environ), "imports": []}
    return Forked(request, (0, 1, 2))
subprocess.Popen = forked
agent = sys.argv.pop(1)
sys.argv[:] = sys.argv[1:]
kept = runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs an example that starts `torchrun` several times: the agents are forked, and so are their workers."""


def forked_lines_of(name: str, *arguments: object, attempts: int = 1) -> list[str]:
    """Do the same for a program that spawns ranks with PyTorch; standard error comes last."""
    return _lines(SPAWN, EXAMPLES / name, *arguments, attempts=attempts)


def forked_torchrun_lines_of(name: str, *arguments: object) -> list[str]:
    """Do the same for a program that starts `torchrun`."""
    return _lines(TORCHRUN, AGENT, EXAMPLES / name, *arguments)


def forked_torchrun(*arguments: object, attempts: int = 1) -> list[str]:
    """Run `torchrun` with these arguments and return what it prints; standard error comes last."""
    return _lines(AGENT, *arguments, attempts=attempts)


def _lines(program: str | Path, *arguments: object, attempts: int = 1) -> list[str]:
    with Program(program, *arguments, env={"OMP_NUM_THREADS": "1"}, imports=USED) as running:
        printed = running.output()
        code, errors = running.wait(), running.errors()
    if attempts > 1 and ABORTED_BY_GLOO in errors:
        return _lines(program, *arguments, attempts=attempts - 1)
    assert code == 0, printed + errors
    return (unsaid(printed) + errors).splitlines()


AUTOLOADED = """
import runpy, sys
from tcpstore_async.autoload import autoload
autoload()
kept = runpy.run_path(sys.argv[1], run_name="__main__")
"""


def run_forked(name: str, *, world: int, attempts: int = 1, **env: str) -> list[str]:
    """Run `world` ranks of a program that does not start them itself and return what each prints."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(world), **env}
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(Program(AUTOLOADED, EXAMPLES / name, env={**meeting, "RANK": str(rank)}, imports=USED))
            for rank in range(world)
        ]
        printed = [unsaid(rank.output()) for rank in ranks]
        codes, errors = [rank.wait() for rank in ranks], [rank.errors() for rank in ranks]
    if attempts > 1 and any(ABORTED_BY_GLOO in text for text in errors):
        return run_forked(name, world=world, attempts=attempts - 1, **env)
    assert codes == [0] * world, errors
    return [text + error for text, error in zip(printed, errors, strict=True)]
