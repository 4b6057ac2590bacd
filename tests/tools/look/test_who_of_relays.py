"""Who is missing, of ranks behind relays: `tcpstore who --missing`, as a user runs it.

A rank here is a process whose environment says which one it is, as torchrun's workers' does, and a connection that
sends that process's id as PyTorch's client does. Only the relays read these environments, as on other machines.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from commands import run_command
from conformance.frames import add
from support import RawPeer, Server, blob, keys, tcpstore_relay, tcpstore_server

SIZE = 64
ABSENT = {3, 17, 40}
HANGING = {8, 41}
CANCEL = b"\x0c"


class Relayed:
    """A server and two relays."""

    def __init__(self, stack: ExitStack) -> None:
        self.server: Server = stack.enter_context(tcpstore_server())
        self.relays = [stack.enter_context(tcpstore_relay(self.server.port)) for _ in range(2)]

    def missing(self) -> Any:
        done = run_command(self.server, "who", "--missing", "-o", "json", "--timeout", "60")
        assert done.exit_code in (0, 1), done.output  # 1 where nobody waits yet
        return json.loads(done.stdout)


class Job(Relayed):
    """The ranks that have come, half of them behind each relay."""

    def __init__(self, stack: ExitStack) -> None:
        super().__init__(stack)
        self.pids: dict[int, int] = {}
        self.peers: dict[int, RawPeer] = {}
        for rank in sorted({*range(SIZE)} - ABSENT):
            environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(SIZE)}
            process = stack.enter_context(subprocess.Popen(["sleep", "600"], env=environment))
            stack.callback(process.kill)
            self.pids[rank] = process.pid
            environ = Path(f"/proc/{process.pid}/environ")
            while environ.exists() and b"RANK=" not in environ.read_bytes():
                pass  # for a moment after its start
            peer = self.peers[rank] = stack.enter_context(RawPeer(self.relays[rank % 2].port))
            peer.ping(process.pid)
            peer.ask(add(b"init/", 1), 8)

    def come(self, rank: int, *, gloo: bool = False, store_based: bool = False) -> None:
        peer = self.peers[rank]
        if gloo:
            value = blob(bytes(154 + 8 * SIZE))
            peer.send(b"\x01" + blob(b"/default_pg/0//cpu//0/%d" % rank) + value)
            peer.send(b"\x06" + keys(b"/default_pg/0//cpu//0/3"))
        elif store_based:
            peer.ask(add(b"/store_based_barrier_key:0", 1), 8)
            peer.send(b"\x06" + keys(b"/store_based_barrier_key:0:last_worker"))
        else:
            peer.send(b"\x12" + blob(b"/all") + struct.pack("<q", SIZE))


@pytest.fixture(scope="module")
def job(module_sockets: Path) -> Iterator[Job]:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(importlib.import_module("tcpstore_async.tools.look.local"), "read_environment", lambda pid: {})
        yield Job(stack)


needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no other system tells environments")


@needs_proc
def test_ranks_that_never_started(job: Job) -> None:
    answer = job.missing()
    assert (answer["world_size"], answer["joined"]) == (SIZE, SIZE - len(ABSENT))
    (found,) = answer["waits"]
    assert (found["kind"], found["missing_ranks"], found["unseen"]) == ("join", sorted(ABSENT), len(ABSENT))


@needs_proc
@pytest.mark.parametrize("kind", ["gloo", "store_based", "BARRIER"])
def test_ranks_that_never_started_and_ranks_that_hang(job: Job, kind: str) -> None:
    came = set(job.peers) - HANGING
    for rank in came:
        job.come(rank, gloo=kind == "gloo", store_based=kind == "store_based")
    _until(lambda: len(_kinds(job.missing())) == 2 and _kinds(job.missing())[1]["waiting"] == len(came))
    found = _kinds(job.missing())[1]
    for rank in came:
        assert job.peers[rank].ask(CANCEL, 1) == b"\1"
    assert found["kind"] == ("keys" if kind == "gloo" else "barrier")
    assert (found["arrived"], found["expected"]) == (len(came), SIZE)
    assert found["missing_ranks"] == sorted(ABSENT | HANGING)
    assert found["unseen"] == len(ABSENT)
    assert [(one["rank"], one["host"], one["pid"], one["does"]) for one in found["elsewhere"]] == [
        (rank, socket.gethostname(), job.pids[rank], "has sent nothing since ADD") for rank in sorted(HANGING)
    ]


def _kinds(answer: Any) -> list[Any]:
    return sorted(answer["waits"], key=lambda one: one["kind"] != "join")


def _until(holds: Callable[[], bool]) -> None:
    """Ask until the relays have passed everything on."""
    for _ in range(100):
        if holds():
            return
    raise AssertionError("in vain")
