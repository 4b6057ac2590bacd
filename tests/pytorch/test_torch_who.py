"""Who is missing, of real PyTorch processes behind two relays: `tcpstore who --missing`, as a user runs it.

`TCPSTORE_TEST_RANKS` is the number of ranks, 16 by default. Each is a process of its own, started with an environment
as torchrun makes it for its workers: what a process changes there later cannot be read.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from look.test_who_of_relays import Relayed, needs_proc

from conformance.frames import set_
from support import RawPeer
from versions import needs

SIZE = int(os.environ.get("TCPSTORE_TEST_RANKS", "16"))
ABSENT = {3, SIZE // 2 + 1, SIZE - 2}
HANGING = {SIZE // 2, SIZE - 5}

PATIENCE = 300.0
"""Seconds: importing PyTorch in all of them takes long on a busy machine."""

RANK = """
import os, sys
from datetime import timedelta
import torch.distributed as dist

rank, world, patience = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timedelta(seconds=600)
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), world, False, patience)
for step in sys.stdin:
    if step == "store_based_barrier\\n":
        dist.distributed_c10d._store_based_barrier(rank, store, "pg", world, patience)
    elif step == "BARRIER\\n":
        store.barrier("all", world, patience)
    elif step == "gloo\\n":
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)
"""


class Job(Relayed):
    """The ranks that have come, half of them behind each relay."""

    def __init__(self, stack: ExitStack) -> None:
        super().__init__(stack)
        self.ranks: dict[int, subprocess.Popen[str]] = {}
        own = {
            "WORLD_SIZE": str(SIZE),
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RUN_ID": "job",
            "OMP_NUM_THREADS": "1",
        }
        for rank in sorted({*range(SIZE)} - ABSENT):
            environment = {**os.environ, **own, "RANK": str(rank)}
            command = [sys.executable, "-c", RANK, str(self.relays[rank % 2].port)]
            process = stack.enter_context(subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            self.ranks[rank] = process

    def tell(self, step: str) -> None:
        """Have all ranks but those that hang do something."""
        for rank, process in self.ranks.items():
            if rank not in HANGING:
                assert process.stdin is not None
                process.stdin.write(f"{step}\n")
                process.stdin.flush()

    def found(self, kind: str, holds: Callable[[Any], bool]) -> Any:
        """Ask until this is so of what is waited for."""
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = self.missing()
            for one in answer["waits"]:
                if one["kind"] == kind and holds(one):
                    return one
            assert all(process.poll() is None for process in self.ranks.values())
            assert time.monotonic() < deadline, answer
            time.sleep(0.2)  # lest asking takes the processors from those that are waited for

    def release(self, key: bytes) -> None:
        with RawPeer(self.server.port) as peer:
            peer.send(set_(key, b"1"))
            peer.ping()


@pytest.fixture
def job(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """What `who` says of ranks it has from the relays, as if they were on other machines."""
    monkeypatch.setattr(importlib.import_module("tcpstore_async.tools.look.local"), "read_environment", lambda pid: {})
    with ExitStack() as stack:
        yield Job(stack)


@pytest.mark.timeout(600)
@needs_proc
@needs("barrier")
def test_exactly_the_missing_ranks_are_named(job: Job) -> None:
    came = len(job.ranks)
    joining = job.found("join", lambda one: one["arrived"] == came)
    assert (joining["missing_ranks"], joining["unseen"], joining["elsewhere"]) == (sorted(ABSENT), len(ABSENT), [])
    active = came - len(HANGING)
    for step, kind, key in (
        ("store_based_barrier", "barrier", b"/store_based_barrier_key:pg:last_worker"),
        ("BARRIER", "barrier", b"/all"),
        ("gloo", "keys", b""),
    ):
        job.tell(step)
        found = job.found(kind, lambda one: one["waiting"] == one["arrived"] == active)
        assert found["missing_ranks"] == sorted(ABSENT | HANGING)
        assert (found["expected"], found["unseen"]) == (SIZE, len(ABSENT))
        assert [(one["rank"], one["host"], one["pid"], one["does"]) for one in found["elsewhere"]] == [
            (rank, socket.gethostname(), job.ranks[rank].pid, "has sent nothing since ADD") for rank in sorted(HANGING)
        ]
        if key:
            job.release(key)
