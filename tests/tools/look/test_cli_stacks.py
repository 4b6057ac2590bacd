"""`tcpstore stacks`, and what `who --missing` says if no rank is missing: output and exit status.

What processes do is recorded; the ranks are connections of the test, and processes that only have an environment.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from commands import run_command
from conformance.frames import introduce
from support import RawPeer, Server, tcpstore_server
from tcpstore_async.base.errors import DistStoreError
from tcpstore_async.stacks.report import Doing, Group, HostReport

SIZE = 4
PIDS = range(901, 901 + SIZE)
REDUCING = Doing(
    "sleeping", frames=("all_reduce (distributed_c10d.py:1)", "step (train.py:98)", "<module> (train.py:7)")
)
READING = Doing("sleeping", call="read", frames=("read (dataset.py:41)", "<module> (train.py:7)"))

commands = importlib.import_module("tcpstore_async.tools.look.stacks")


@pytest.fixture(scope="module")
def server(module_sockets: Path) -> Iterator[Server]:
    with tcpstore_server() as server:
        peers = [RawPeer(server.port) for _ in PIDS]
        for rank, (pid, peer) in enumerate(zip(PIDS, peers, strict=True)):
            known = {"rank": str(rank), "world_size": str(SIZE), "host": socket.gethostname(), "pid": str(pid)}
            peer.send(introduce(*((name.encode(), text.encode()) for name, text in known.items())))
            peer.ping(pid)
        yield server
        for peer in peers:
            peer.close()


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[int]]]:
    """Set what is found out about processes, keyed by rank; return the pids that are looked at."""

    def set_up(doing: dict[int, Doing]) -> list[list[int]]:
        looks: list[list[int]] = []

        def examine(pids: Sequence[int], seconds: float) -> HostReport:
            looks.append(list(pids))
            return HostReport(socket.gethostname(), [Group([PIDS[rank]], one, [0.0]) for rank, one in doing.items()])

        monkeypatch.setattr(commands, "examine", examine)
        return looks

    return set_up


def run(server: Server, *words: str) -> Any:
    done = run_command(server, *words)
    assert done.stderr == ""
    return done


def test_who_is_not_where_the_others_are(server: Server, examined: Callable[..., list[list[int]]]) -> None:
    looks = examined({0: REDUCING, 1: REDUCING, 2: READING, 3: REDUCING})
    done = run(server, "stacks", "--seconds", "0.2")
    lines = done.stdout.splitlines()
    assert done.exit_code == 0
    assert looks == [[*PIDS]] * 2
    assert lines[0].startswith("ranks wait, as they did 0.")
    here = socket.gethostname()
    assert lines[1].startswith(f"rank 2 ({here}, pid {PIDS[2]}): sleeping in read (dataset.py:41), quiet for ")
    assert lines[2:4] == ["    read (dataset.py:41)", "    <module> (train.py:7)"]
    assert lines[4].startswith("3 of 4 ranks: all_reduce (train.py:98), quiet for ")
    found = json.loads(run(server, "stacks", "-o", "json", "--seconds", "0.2", "--rank", "1", "--rank", "3").stdout)
    assert (found["state"], found["seen"], found["ranks"]) == ("waits", SIZE, SIZE)
    assert [(one["ranks"], one["first"]) for one in found["groups"]] == [
        ([rank], [{"rank": rank, "host": here, "pid": PIDS[rank]}]) for rank in (1, 3)
    ]
    assert found["groups"][0]["frames"] == list(REDUCING.frames)
    lines = run(server, "stacks", "--seconds", "0.2", "--rank", "3").stdout.splitlines()
    assert lines[0].startswith("ranks wait, as they did 0.")
    assert lines[1].startswith(f"rank 3 ({here}, pid {PIDS[3]}): all_reduce (train.py:98), quiet for ")
    assert lines[2:] == [f"    {frame}" for frame in REDUCING.frames]
    done = run_command(server, "stacks", "--seconds", "0.2", "--rank", "7")
    assert (done.exit_code, done.stderr) == (1, "Error: rank 7: not connected, or not to be seen from here\n")


def test_a_rank_that_cannot_be_looked_at(server: Server, examined: Callable[..., list[list[int]]]) -> None:
    examined({0: REDUCING})
    lines = run(server, "stacks", "--seconds", "0.2").stdout.splitlines()
    assert (
        f"3 ranks not seen, as they have ended, or no relay there can be asked: on {socket.gethostname()} (3)" in lines
    )
    examined({})
    done = run(server, "stacks", "--seconds", "0.2")
    assert (done.exit_code, done.stdout.splitlines()[0]) == (1, "cannot tell whether the job hangs")


def test_it_is_not_for_others() -> None:
    done = run_command(None, "stacks", "--url", "http://127.0.0.1:1")
    assert done.exit_code == 2
    assert "'http://127.0.0.1:1' is not of the form" in done.stderr


def test_nobody_is_missing_for_the_store(server: Server, examined: Callable[..., list[list[int]]]) -> None:
    examined({0: REDUCING, 1: REDUCING, 2: READING, 3: REDUCING})
    done = run(server, "who", "--missing")
    lines = done.stdout.splitlines()
    assert done.exit_code == 1  # a slow step looks the same
    assert (
        lines[1]
        == "no rank is missing from any pending barrier or key exchange; collectives do not pass through the store"
    )
    assert lines[2].startswith("ranks wait, as they did 0.")
    assert lines[2].endswith(" s before; a slow step or start looks the same: look again if it lasts")
    assert lines[3].startswith(f"rank 2 ({socket.gethostname()}, pid {PIDS[2]}): sleeping in read (dataset.py:41)")
    examined({2: READING})
    done = run(server, "who", "--missing", "-o", "json")
    found = json.loads(done.stdout)
    assert (done.exit_code, found["waits"], found["processes"]["unseen"]) == (1, [], {socket.gethostname(): 3})
    examined({})
    done = run(server, "who", "--missing")
    assert (done.exit_code, done.stdout.splitlines()[2]) == (1, "cannot tell whether the job hangs")


def test_relays_that_cannot_be_asked(
    server: Server, examined: Callable[..., list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server answers one question at a time, an older one none."""
    examined({0: REDUCING})
    ask = commands.ask

    def refuse(where: Path, parts: list[str], *more: Any, **fields: Any) -> Any:
        if parts == ["stacks"]:
            raise DistStoreError("unknown part 'stacks'")
        return ask(where, parts, *more, **fields)

    monkeypatch.setattr(commands, "ask", refuse)
    lines = run(server, "stacks", "--seconds", "0.2").stdout.splitlines()
    assert "relays were not asked: unknown part 'stacks'" in lines


def test_ranks_of_pytorchs_client(module_sockets: Path) -> None:
    """Its address is this machine's, and the environment of its process has its rank."""
    process = subprocess.Popen(["sleep", "600"], env={**os.environ, "RANK": "3"})
    try:
        with tcpstore_server() as server, RawPeer(server.port) as peer:
            peer.ping(process.pid)
            found = json.loads(run_command(server, "stacks", "-o", "json", "--seconds", "0.2").stdout)
            assert [(one["ranks"], one["first"][0]["pid"]) for one in found["groups"]] == [([3], process.pid)]
            assert found["groups"][0]["does"].startswith("sleeping")
    finally:
        process.kill()
        process.wait()


def test_nccl_is_asked(
    server: Server, examined: Callable[..., list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the way of its RAS, which replies and closes the connection."""
    member = {"host": "127.0.0.1", "collective_counts": {"AllReduce": 7}}
    ranks = [{**member, "rank": rank, "pid": pid} for rank, pid in enumerate(PIDS)]
    ranks[2]["collective_counts"] = {"AllReduce": 6}
    communicator = {"hash": "0x1", "size": SIZE, "ranks": ranks, "missing_ranks": []}
    reply = b"SERVER PROTOCOL 2\nOK\nOK\n" + json.dumps({"communicators": [communicator]}).encode()
    examined({})
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for _ in range(2):
                peer, _ = listener.accept()
                with peer, peer.makefile("rb") as lines:
                    requests.append([next(lines) for _ in range(4)])
                    peer.sendall(reply)

        requests: list[list[bytes]] = []
        answering = threading.Thread(target=answer)
        answering.start()
        monkeypatch.setenv("NCCL_RAS_ADDR", f"127.0.0.1:{listener.getsockname()[1]}")
        done = run_command(server, "stacks", "--seconds", "0.2")
        answering.join()
    assert requests[0] == [b"CLIENT PROTOCOL 2\n", b"TIMEOUT 1\n", b"SET FORMAT json\n", b"STATUS\n"]
    name = f"rank 2 ({socket.gethostname()}, pid {PIDS[2]})"
    assert f"{name} of NCCL's communicator 0x1 (4 ranks): 6 AllReduce, others 7" in done.stdout.splitlines()
    monkeypatch.setenv("NCCL_RAS_ADDR", "nowhere")
    assert run_command(server, "stacks", "--seconds", "0.2").exit_code == 1
