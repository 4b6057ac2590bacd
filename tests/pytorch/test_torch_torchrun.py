"""`torchrun --rdzv-backend=tcpstore`: two agents on this host, whose workers, and who themselves, are killed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

from support import tcpstore_server
from tcpstore_async.torch import HashStore, torchrun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PATIENCE = 240.0
"""Seconds until a job is given up."""

CONF = "join_timeout=60,last_call_timeout=1,close_timeout=20,keep_alive_interval=1,keep_alive_max_attempt=3"


once = pytest.mark.skipif(
    os.environ.get("TCPSTORE_TEST_BUILD") == "compiled",
    reason="agents are tested on the interpreted build: they take long",
)


class Job:
    """Agents that share a folder, and what their workers wrote there."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.port = port
        self.agents: list[subprocess.Popen[bytes]] = []

    def agent(self, what: str, nodes: str = "2", workers: str = "2", **env: str) -> subprocess.Popen[bytes]:
        log = self.folder / f"agent{len(self.agents)}"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes),
                    *("--nproc-per-node", workers, "--max-restarts", "3", "--monitor-interval", "0.1"),
                    *("--rdzv-backend", "tcpstore", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "job"),
                    *("--rdzv-conf", CONF),
                    *(str(Path(__file__).with_name("elastic_worker.py")), str(self.folder), what),
                ],
                cwd=self.folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        self.agents.append(process)
        return process

    def seen(self) -> list[dict[str, Any]]:
        path = self.folder / "seen"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def end(self, *agents: subprocess.Popen[bytes]) -> None:
        """Wait until these agents have ended well."""
        self.until(lambda: all(agent.poll() is not None for agent in agents))
        assert [agent.returncode for agent in agents] == [0] * len(agents), self.said()

    def kill(self, agent: subprocess.Popen[bytes]) -> None:
        """An agent and its workers, as when their machine goes down."""
        agent.kill()
        agent.wait()
        for one in self.seen():
            if one["agent"] == agent.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one["pid"], signal.SIGKILL)

    def said(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in sorted(self.folder.glob("agent*")))


@pytest.fixture
def job(tmp_path: Path, port: int) -> Iterator[Job]:
    if not hasattr(registry, "_register_out_of_tree_handlers"):
        pytest.skip(f"torchrun of PyTorch {torch.__version__} knows no handlers but its own")
    job = Job(tmp_path, port)
    yield job
    for agent in job.agents:
        if agent.poll() is None:
            job.kill(agent)


def groups(seen: list[dict[str, Any]]) -> list[tuple[int, list[int]]]:
    """The worlds that formed, one after the other: the sum over the ranks, and the ranks."""
    ports = list(dict.fromkeys(one["port"] for one in seen))
    assert not any(one["stale"] for one in seen)
    found = []
    for port in ports:
        world = [one for one in seen if one["port"] == port]
        (total,) = {one["sum"] for one in world}
        found.append((int(total), sorted(one["rank"] for one in world)))
    return found


@pytest.mark.parametrize("env", [{}, {"TCPSTORE_INSTALL": "1"}, {"TCPSTORE_INSTALL": "python,classes"}])
def test_a_killed_worker_restarts_the_round(job: Job, env: dict[str, str]) -> None:
    """And the workers of the next attempt find none of its keys."""
    nodes = 1 if env else 2
    job.end(*[job.agent("fail", nodes=str(nodes), **env) for _ in range(nodes)])
    world = 2 * nodes
    assert groups(job.seen()) == [(world, list(range(world)))] * 2


def hosting(job: Job) -> subprocess.Popen[bytes]:
    """The agent that hosts the server, started first."""
    first = job.agent("hold")
    job.until(lambda: accepts(job.port))
    return first


def accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@once
def test_a_killed_agent_comes_back(job: Job) -> None:
    first = hosting(job)
    second = job.agent("hold")
    job.until(lambda: len(job.seen()) == 4)
    job.kill(second)
    third = job.agent("hold")
    job.until(lambda: len(job.seen()) == 8)
    (job.folder / "go").touch()
    job.end(first, third)
    assert groups(job.seen()) == [(4, list(range(4)))] * 2


def alone(job: Job) -> bool:
    """Whether a world of one agent has formed after one of two."""
    sums = [one["sum"] for one in job.seen()]
    return 4.0 in sums and 2.0 in sums[sums.index(4.0) :]


@once
@pytest.mark.parametrize("victim", [0, 1])
def test_on_a_running_server_either_agent_may_be_killed(job: Job, victim: int) -> None:
    with tcpstore_server() as server:
        job.port = server.port
        agents = [job.agent("hold", nodes="1:2") for _ in range(2)]
        job.until(lambda: sum(one["sum"] == 4 for one in job.seen()) >= 4)
        job.kill(agents[victim])
        job.until(lambda: alone(job))
        (job.folder / "go").touch()
        job.end(agents[1 - victim])
        assert not any(one["stale"] for one in job.seen())


@once
def test_jobs_with_one_id_in_a_row(job: Job, tmp_path: Path) -> None:
    """On a daemon: after one that ended, and at once after one that was killed."""
    with tcpstore_server() as server:
        job.port = server.port
        job.end(job.agent("end", nodes="1"))
        killed = job.agent("hold", nodes="1")
        job.until(lambda: len(job.seen()) == 4)
        job.kill(killed)
        job.end(job.agent("end", nodes="1"))
    assert groups(job.seen()) == [(2, [0, 1])] * 3


@once
def test_jobs_in_a_row_at_one_endpoint(job: Job) -> None:
    """Where the agent hosts the server, it goes with it."""
    for _ in range(2):
        job.end(job.agent("end", nodes="1"))
    assert groups(job.seen()) == [(2, [0, 1])] * 2


def joining(port: int) -> dict[str, str]:
    """The environment of agents whose workers all meet on a server that runs already."""
    return {"TCPSTORE_INSTALL": "1", "TCPSTORE_JOIN": "1", "ELASTIC_URL": f"tcp://127.0.0.1:{port}"}


@once
def test_workers_that_join_a_running_server(job: Job) -> None:
    """After a restart, which only one of two agents counts, and in the next job of the name, no key is seen again."""
    with tcpstore_server() as server:
        job.port = server.port
        job.end(*[job.agent("fail", workers="1", **joining(server.port)) for _ in range(2)])
        assert sorted(one["restarts"] for one in job.seen()) == [0, 0, 0, 1]
        job.end(job.agent("end", nodes="1", workers="1", **joining(server.port)))
    assert groups(job.seen()) == [(2, [0, 1]), (2, [0, 1]), (1, [0])]


@once
def test_workers_that_join_a_daemon_become_more(job: Job) -> None:
    """No agent counts that as a restart. The agents' own server does not outlive them; that of the workers does."""
    with tcpstore_server() as server:
        agents = [job.agent("hold", nodes="1:2", workers="1", **joining(server.port))]
        job.until(lambda: len(job.seen()) == 1)
        agents.append(job.agent("hold", nodes="1:2", workers="1", **joining(server.port)))
        job.until(lambda: len(job.seen()) == 3)
        (job.folder / "go").touch()
        job.end(*agents)
        job.end(job.agent("end", nodes="1", workers="1", **joining(server.port)))
    assert groups(job.seen()) == [(1, [0]), (2, [0, 1]), (1, [0])]


@pytest.mark.parametrize("number", ["0", "-1"])
@pytest.mark.parametrize("name", ["read_timeout", "keep_alive_interval", "keep_alive_max_attempt"])
def test_options_that_must_be_positive(port: int, name: str, number: str) -> None:
    params = RendezvousParameters("tcpstore", f"127.0.0.1:{port}", "job", 1, 1, **{name: number})
    with pytest.raises(ValueError, match=f"The {name.replace('_', ' ')} must be a positive integer."):
        torchrun.create_handler(params)


class Left(HashStore):
    """An epoch in which an agent's last heartbeat is from then; and at each look, so much newer."""

    def __init__(self, seconds: float, step: float) -> None:
        super().__init__()
        self.set("torch.rendezvous.job", "a state")
        self.step = step
        self.beat = time.time() + seconds

    def check(self, keys: Any) -> bool:
        self.beat += self.step
        self.set(torchrun._BEAT, str(self.beat))
        return bool(super().check(keys))


@pytest.mark.parametrize("hours", [-1, 1])
def test_an_agent_with_another_clock_is_alive(hours: int) -> None:
    assert not torchrun._why_over(Left(hours * 3600, 1), "job", timedelta(seconds=5))


@pytest.mark.parametrize("hours", [-1, 1])
def test_an_agent_that_stays_silent_is_dead(hours: int) -> None:
    assert torchrun._why_over(Left(hours * 3600, 0), "job", timedelta(seconds=0.1)) == "no heartbeat"


def test_a_recent_heartbeat_is_enough() -> None:
    assert not torchrun._why_over(Left(0, 0), "job", timedelta(hours=1))


def test_an_epoch_without_agents_may_be_joined() -> None:
    store = HashStore()
    assert not torchrun._why_over(store, "job", timedelta(hours=1))
    torchrun._Backend(store, "job")
    assert not torchrun._why_over(store, "job", timedelta(hours=1))


def test_an_agent_writes_heartbeats_and_marks_the_end() -> None:
    store = HashStore()
    backend = torchrun._Backend(store, "job")
    handler = cast(Any, torchrun._Handler.from_backend("job", store, backend, 1, 1, "127.0.0.1", RendezvousTimeout()))
    assert not store.check([torchrun._BEAT])
    handler.set_closed()
    assert torchrun._is_recent(store.get(torchrun._BEAT), timedelta(seconds=60))
    assert torchrun._why_over(store, "job", timedelta(hours=1)) == "closed"


class Bomb:
    """What a stranger leaves in place of a state: a file appears where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("beat", ["", "nan", "-inf", "no number", "1e400"])
def test_nothing_from_the_store_is_unpickled(tmp_path: Path, beat: str) -> None:
    """And a state that no agent of ours left keeps nobody: there is another epoch."""
    bomb = tmp_path / "bomb"
    store = HashStore()
    store.set(torchrun._BEAT, beat)
    store.set("torch.rendezvous.job", base64.b64encode(pickle.dumps(Bomb(bomb))).decode())
    assert torchrun._why_over(store, "job", timedelta(seconds=0.1)) == "no heartbeat"
    assert not bomb.exists()


@pytest.mark.parametrize("first", ["tcpstore_async.torch.torchrun", "torch.distributed.elastic.rendezvous"])
def test_the_handler_is_registered_whichever_is_imported_first(first: str) -> None:
    if not hasattr(registry, "_register_out_of_tree_handlers"):
        pytest.skip(f"torchrun of PyTorch {torch.__version__} knows no handlers but its own")
    code = f"""
import {first}
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry as registry
handler = registry.create_handler(RendezvousParameters("tcpstore", "127.0.0.1:0", "job", 1, 1))
print(handler.get_backend(), type(handler).__module__)
handler.shutdown()"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=tempfile.gettempdir(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("tcpstore tcpstore_async.torch.torchrun\n", "")
