"""`torchrun --rdzv-backend=tcpstore`: two agents on this host, whose workers, and who themselves, are killed."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
    registry,
)
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from marks import exhaustive
from support import Server, secret_file, tcpstore_server, torch_server
from support import refused as refuses
from tcpstore_async import AccessDeniedError
from tcpstore_async import TCPStore as PlainTCPStore
from tcpstore_async.auth.tokens import TokenKeys
from tcpstore_async.base import errors
from tcpstore_async.cli import main
from tcpstore_async.client import store_name
from tcpstore_async.client.server_url import ServerUrl
from tcpstore_async.relay import named_ports
from tcpstore_async.stores import agent as stores_agent
from tcpstore_async.stores.late_agent import Origin
from tcpstore_async.torch import PrefixStore, TCPStore, rendezvous_handler
from tls.certificates import HOSTS, certificates
from tls.peers import TlsPeer, context
from torch_forker import Program

pytestmark = [pytest.mark.measured, pytest.mark.timeout(600)]

PATIENCE = 240.0
"""Seconds until a job is given up."""

CONF = "join_timeout=60,last_call_timeout=1,close_timeout=20,keep_alive_interval=1,keep_alive_max_attempt=3"


once = pytest.mark.skipif(
    os.environ.get("TCPSTORE_TEST_BUILD") == "compiled",
    reason="agents are tested on the interpreted build: they take long",
)


HERE = Path(__file__).parent


@pytest.fixture(autouse=True, scope="module")
def _forwarding() -> Iterator[None]:
    """The process that forwards for handlers of this one ends with the tests."""
    yield
    named_ports._forget()


class Job:
    """Agents that share a folder, and what their workers wrote there."""

    def __init__(self, folder: Path, port: int, run_id: str = "job") -> None:
        self.folder = folder
        self.port = port
        self.endpoint = ""
        """Of several servers; else that of the port."""
        self.run_id = run_id
        self.agents: list[Program] = []

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                self.kill(agent)
            agent.end()

    def agent(self, what: str, nodes: str = "2", workers: str = "1", conf: str = CONF, **env: str) -> Program:
        process = Program(
            HERE / "elastic_agent.py",
            *("--nnodes", nodes),
            *("--nproc-per-node", workers, "--max-restarts", "3", "--monitor-interval", "0.1"),
            *(
                "--rdzv-backend",
                "tcpstore",
                "--rdzv-endpoint",
                self.endpoint or f"127.0.0.1:{self.port}",
                "--rdzv-id",
                self.run_id,
            ),
            *("--rdzv-conf", conf),
            *(str(HERE / "elastic_worker.py"), str(self.folder), what),
            env={"OMP_NUM_THREADS": "1", **env},
            imports=["torch.distributed.run"],
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

    def end(self, *agents: Program) -> None:
        """Wait until these agents have ended well."""
        self.until(lambda: all(agent.poll() is not None for agent in agents))
        assert [agent.returncode for agent in agents] == [0] * len(agents), self.said()

    def kill(self, agent: Program) -> None:
        """An agent and its workers, as when their machine goes down."""
        os.kill(agent.pid, signal.SIGKILL)
        agent.wait()
        for one in self.seen():
            if one["agent"] == agent.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one["pid"], signal.SIGKILL)

    def said(self) -> str:
        return "\n".join(agent.errors()[-3000:] for agent in self.agents)


@pytest.fixture
def job(tmp_path: Path, port: int) -> Iterator[Job]:
    if not hasattr(registry, "_register_out_of_tree_handlers"):
        pytest.skip(f"torchrun of PyTorch {torch.__version__} knows no handlers but its own")
    with Job(tmp_path, port) as job:
        yield job


def groups(seen: list[dict[str, Any]]) -> list[tuple[int, list[int]]]:
    """The worlds that formed, one after the other: the sum over the ranks, and the ranks."""
    rounds = list(dict.fromkeys(one["round"] for one in seen))
    assert not any(one["stale"] for one in seen)
    found = []
    for name in rounds:
        world = [one for one in seen if one["round"] == name]
        (total,) = {one["sum"] for one in world}
        found.append((int(total), sorted(one["rank"] for one in world)))
    return found


@pytest.mark.parametrize("env", [{}, {"TCPSTORE_INSTALL": "1"}, exhaustive({"TCPSTORE_INSTALL": "python,classes"})])
def test_a_killed_worker_restarts_the_round(job: Job, env: dict[str, str]) -> None:
    """And the workers of the next attempt find none of its keys."""
    nodes = 1 if env else 2
    job.end(*[job.agent("fail", nodes=str(nodes), workers="2", **env) for _ in range(nodes)])
    world = 2 * nodes
    assert groups(job.seen()) == [(world, list(range(world)))] * 2


@pytest.mark.parametrize("env", [{"TCPSTORE_RELAY": "1"}, {"TCPSTORE_RELAY": "1", "TCPSTORE_INSTALL": "1"}])
def test_each_agent_runs_a_relay_for_its_workers(job: Job, env: dict[str, str]) -> None:
    job.end(*[job.agent("fail", workers="2", **env) for _ in range(2)])
    seen = job.seen()
    assert not any(one["stale"] for one in seen)
    assert len(seen) == 8
    for world in (seen[:4], seen[4:]):
        assert sorted(one["rank"] for one in world) == [0, 1, 2, 3]
        assert {one["sum"] for one in world} == {4.0}
        assert len({(one["agent"], one["port"]) for one in world}) == 2
        assert {one["host"] for one in world} == {"127.0.0.1"}


@once
def test_agents_with_tls_and_a_token(job: Job) -> None:
    """Stock workers behind relays: what goes between the agents' hosts is encrypted, and nobody else is let in."""
    known = certificates()
    mine = known.ours.issue("agent", *HOSTS, socket.getfqdn())
    env = {name: value for name, value in known.environment(mine).items() if name != "TCPSTORE_TLS"}
    token = "a-secret-of-the-agents"
    agents = [job.agent("hold", conf=f"{CONF},tls=1,relay=1", TCPSTORE_TOKEN=token, **env) for _ in range(2)]
    job.until(lambda: len(job.seen()) == 2)
    assert groups(job.seen()[:1])[0][0] == 2
    for given, error in (("", "the server requires a token"), ("other", "it is not the token of the process")):
        with (
            pytest.raises(AccessDeniedError, match=error),
            PlainTCPStore("127.0.0.1", job.port, timeout=PATIENCE, token=given) as store,
        ):
            store.num_keys()
    with TlsPeer(job.port, using=context(mine)) as peer:
        peer.ping()
    (job.folder / "go").touch()
    job.end(*agents)
    assert {one["host"] for one in job.seen()} == {"127.0.0.1"}
    assert token not in job.said()


def hosting(job: Job, nodes: str = "2") -> Program:
    """The agent that hosts the server, started first."""
    first = job.agent("hold", nodes=nodes)
    job.until(lambda: not refuses(job.port))
    return first


@once
def test_a_killed_agent_comes_back(job: Job) -> None:
    first = hosting(job)
    second = job.agent("hold")
    job.until(lambda: len(job.seen()) == 2)
    job.kill(second)
    third = job.agent("hold")
    job.until(lambda: len(job.seen()) == 4)
    (job.folder / "go").touch()
    job.end(first, third)
    assert groups(job.seen()) == [(2, [0, 1])] * 2


@once
# quirk: torchrun-errors
def test_the_agents_server_ends_with_the_agent_that_hosts_it(job: Job) -> None:
    """The others, be they in the round or redundant, say so and do not wait for it."""
    first = hosting(job, "1:2")
    second, third = (job.agent("hold", nodes="1:2", ELASTIC_LOG="1") for _ in range(2))
    job.until(lambda: sum(one["sum"] == 2 for one in job.seen()) >= 2)
    job.until(lambda: all("attempts to join" in agent.errors() for agent in (second, third)))
    job.kill(first)
    job.until(lambda: all(agent.poll() is not None for agent in (second, third)))
    for agent in (second, third):
        assert agent.returncode == 1, job.said()
        said = agent.errors()
        assert "RendezvousConnectionError: the rendezvous server at 127.0.0.1" in said
        assert f"is gone: it exits with the agent that hosts it, {socket.getfqdn()} (pid {first.pid}) (" in said
        assert "run `tcpstore serve` on a host that stays up" in said
        assert "a server of their own" not in said


def test_sigterm_to_the_hosting_agent_is_an_ordinary_end(job: Job) -> None:
    """Nothing is said of its own connection to its server."""
    agent = hosting(job, "1")
    job.until(lambda: len(job.seen()) == 1)
    os.kill(agent.pid, signal.SIGTERM)
    job.until(lambda: agent.poll() is not None)
    said = agent.errors()
    assert "death signal" in said
    assert "closed the connection" not in said
    assert "heartbeat" not in said


def alone(job: Job) -> bool:
    """Whether a world of one agent has formed after one of two."""
    sums = [one["sum"] for one in job.seen()]
    return 2.0 in sums and 1.0 in sums[sums.index(2.0) :]


def stores(server: Server) -> list[tuple[str, int]]:
    """The run IDs and rounds of the stores with names."""
    done = CliRunner().invoke(main, ["stores", "--url", f"tcp://127.0.0.1:{server.port}", "-o", "json"])
    names = [one["name"].split("/") for one in json.loads(done.stdout)]
    assert all(name[0] == "torchrun" for name in names)
    return sorted((name[1], int(name[2])) for name in names)


def marked(mark: str) -> list[str]:
    """The processes that have this text in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(path.parent.name)
    return found


@once
@pytest.mark.parametrize("relay", ["0", "1"])
def test_agents_leave_no_store_and_no_process(
    job: Job, relay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a round of two, of one, because the owner of the store was killed, and the end."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    mark = f"of-{tmp_path.name}-{os.getpid()}"
    with tcpstore_server() as server:
        job.port = server.port
        agents = [job.agent("hold", nodes="1:2", TEST_MARK=mark, TCPSTORE_RELAY=relay) for _ in range(2)]
        job.until(lambda: sum(one["sum"] == 2 for one in job.seen()) >= 2)
        job.until(lambda: len(stores(server)) == 1)
        first = stores(server)
        (owner,) = [one["agent"] for one in job.seen() if one["sum"] == 2 and one["rank"] == 0]
        dead, alive = sorted(agents, key=lambda agent: agent.pid != owner)
        job.kill(dead)
        job.until(lambda: alone(job))
        job.until(lambda: len(stores(server)) == 1 and stores(server) > first)
        (job.folder / "go").touch()
        job.end(alive)
        assert not any(one["stale"] for one in job.seen())
        job.until(lambda: stores(server) == [])
        job.until(lambda: marked(mark) == [])


@once
def test_two_jobs_on_one_server(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same time, each with a store of its own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "other").mkdir()
    with tcpstore_server() as server:
        job.port = server.port
        with Job(tmp_path / "other", server.port, "other") as other:
            agents = [one.agent("hold", nodes="1") for one in (job, other)]
            job.until(lambda: len(job.seen()) == 1 and len(other.seen()) == 1)
            assert stores(server) == [("job", 0), ("other", 0)]
            (tmp_path / "go").touch()
            (tmp_path / "other" / "go").touch()
            job.end(*agents)
        job.until(lambda: stores(server) == [])
    for one in (job, other):
        assert groups(one.seen()) == [(1, [0])]


@once
# quirk: torchrun-next-job
def test_jobs_with_one_id_in_a_row(job: Job, tmp_path: Path) -> None:
    """On a daemon: after one that ended, and at once after one that was killed."""
    with tcpstore_server() as server:
        job.port = server.port
        job.end(job.agent("end", nodes="1"))
        killed = job.agent("hold", nodes="1")
        job.until(lambda: len(job.seen()) == 2)
        job.kill(killed)
        job.end(job.agent("end", nodes="1"))
    assert groups(job.seen()) == [(1, [0])] * 3


@once
def test_jobs_in_a_row_at_one_endpoint(job: Job) -> None:
    """Where the agent hosts the server, it goes with it."""
    for _ in range(2):
        job.end(job.agent("end", nodes="1"))
    assert groups(job.seen()) == [(1, [0])] * 2


def refused(job: Job, agent: Program, why: str) -> None:
    """Wait until an agent has been refused as a late one, for this reason."""
    job.until(lambda: agent.poll() is not None)
    assert agent.returncode == 1, job.said()
    said = agent.errors()
    assert re.search(r"RendezvousClosedError: the job 'job' ended successfully at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", said)
    assert (
        f" s ago) on {socket.getfqdn()}, and {why}: there is nothing left to do. To run it again, use another" in said
    )


@once
# quirk: torchrun-next-job
def test_a_late_agent_of_the_run_that_ended_is_refused(job: Job) -> None:
    """Another run begins anew, and so does the same one with reuse_id=1."""
    with tcpstore_server() as server:
        job.port = server.port
        job.end(job.agent("end", nodes="1:2", TCPSTORE_ATTEMPT="1"))
        late = job.agent("end", nodes="1:2", TCPSTORE_ATTEMPT="1")
        refused(job, late, "this agent belongs to the same run (TCPSTORE_ATTEMPT=1)")
        never = job.agent("end", nodes="1:2", TCPSTORE_ATTEMPT="2", conf=f"{CONF},reuse_id=0")
        refused(job, never, "with reuse_id=0 this agent does not begin it anew")
        assert len(job.seen()) == 1
        for conf in (CONF, f"{CONF},reuse_id=1"):
            again = job.agent("end", nodes="1:2", TCPSTORE_ATTEMPT="2", conf=conf)
            job.end(again)
            assert "ended successfully" not in again.errors()
    assert groups(job.seen()) == [(1, [0])] * 3


def joining(port: int) -> dict[str, str]:
    """The environment of agents whose workers all meet on a server that runs already."""
    return {"TCPSTORE_INSTALL": "1", "TCPSTORE_JOIN": "1", "ELASTIC_URL": f"tcp://127.0.0.1:{port}"}


@once
def test_workers_that_join_a_running_server(job: Job) -> None:
    """After a restart, which only one of two agents counts, and in the next job of the name, no key is seen again."""
    with tcpstore_server() as server:
        job.port = server.port
        job.end(*[job.agent("fail", **joining(server.port)) for _ in range(2)])
        assert sorted(one["restarts"] for one in job.seen()) == [0, 0, 0, 1]
        job.end(job.agent("end", nodes="1", **joining(server.port)))
    assert groups(job.seen()) == [(2, [0, 1]), (2, [0, 1]), (1, [0])]


@once
def test_workers_that_join_a_daemon_become_more(job: Job) -> None:
    """No agent counts that as a restart. The agents' own server does not outlive them; that of the workers does."""
    with tcpstore_server() as server:
        agents = [job.agent("hold", nodes="1:2", **joining(server.port))]
        job.until(lambda: len(job.seen()) == 1)
        agents.append(job.agent("hold", nodes="1:2", **joining(server.port)))
        job.until(lambda: len(job.seen()) == 3)
        (job.folder / "go").touch()
        job.end(*agents)
        job.end(job.agent("end", nodes="1", **joining(server.port)))
    assert groups(job.seen()) == [(1, [0]), (2, [0, 1]), (1, [0])]


@pytest.mark.parametrize("number", ["0", "-1"])
@pytest.mark.parametrize("name", ["read_timeout", "keep_alive_interval", "keep_alive_max_attempt"])
# quirk: torchrun-options
def test_options_that_must_be_positive(port: int, name: str, number: str) -> None:
    params = RendezvousParameters("tcpstore", f"127.0.0.1:{port}", "job", 1, 1, **{name: number})
    with pytest.raises(ValueError, match=f"The {name.replace('_', ' ')} must be a positive integer."):
        rendezvous_handler.create_handler(params)


@pytest.fixture
def server() -> Iterator[int]:
    with tcpstore_server() as running:
        yield running.port


def parameters(port: int, least: int = 1, most: int = 1, **options: Any) -> RendezvousParameters:
    conf: dict[str, Any] = {"is_host": "0", "last_call_timeout": "1", **options}
    return RendezvousParameters("tcpstore", f"127.0.0.1:{port}", "job", least, most, **conf)


@pytest.mark.parametrize("name", ["join", "last_call", "close", "heartbeat"])
def test_timeouts_that_must_be_positive(port: int, name: str) -> None:
    options: dict[str, Any] = {f"{name}_timeout": "0"}
    with pytest.raises(ValueError, match=f"The {name} timeout .* must be positive"):
        rendezvous_handler.create_handler(parameters(port, **options))


@pytest.mark.unmeasured
def test_a_handler_joins_and_closes(server: int) -> None:
    handler = rendezvous_handler.create_handler(parameters(server))
    assert (handler.get_backend(), handler.get_run_id(), handler.is_closed()) == ("tcpstore", "job", False)
    for _ in range(2):
        found = handler.next_rendezvous()
        assert (found.rank, found.world_size) == (0, 1)
        assert not found.store.check(["from an earlier round"])
        found.store.set("from an earlier round", "")
        where = found.bootstrap_store_info
        assert where is not None
        TCPStore("localhost", where.master_port).close()
        assert os.environ["TCPSTORE_ROUND"]
    assert handler.num_nodes_waiting() == 0
    assert handler.shutdown()
    assert "TCPSTORE_ROUND" not in os.environ


@contextlib.contextmanager
def requiring_tokens(folder: Path) -> Iterator[Server]:
    """A server that admits only peers with a token of the key `k1:a secret`."""
    keys = secret_file(folder / "keys", "k1:a secret\n")
    with tcpstore_server("--token-keys", str(keys), "--require-auth=all") as own:
        yield own


@pytest.mark.parametrize("relay", ["0", "1"])
def test_a_token_of_the_agents_opens_the_store_of_a_round(
    relay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is beside the workers presents it; workers that have it may present it, too."""
    with requiring_tokens(tmp_path) as own:
        monkeypatch.setenv("TCPSTORE_TOKEN", TokenKeys([("k1", b"a secret")]).create())
        handler = rendezvous_handler.create_handler(parameters(own.port, relay=relay))
        where = handler.next_rendezvous().bootstrap_store_info
        assert where is not None
        for token in ("", os.environ["TCPSTORE_TOKEN"]):
            with TCPStore("127.0.0.1", where.master_port, timeout=timedelta(seconds=PATIENCE), token=token) as store:
                store.set("k", "v")
                assert store.get("k") == b"v"
        assert not caplog.messages
        assert handler.shutdown()


@pytest.mark.parametrize("access", [{"prefix": "tcpstore."}, {"store": "agents:1"}])
def test_a_token_for_less_than_a_store_leaves_the_workers_a_server(
    access: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with requiring_tokens(tmp_path) as own:
        token = TokenKeys([("k1", b"a secret")]).create(**cast(Any, access))
        owner = None
        params = parameters(own.port)
        if "store" in access:
            monkeypatch.setenv("TCPSTORE_SERVER_URL", f"tcp://127.0.0.1:{own.port}")
            params = RendezvousParameters("tcpstore", "agents:1", "job", 1, 1, is_host="0")
            owner = PlainTCPStore("agents", 1, None, True, token=token)
        monkeypatch.setenv("TCPSTORE_TOKEN", token)
        handler = rendezvous_handler.create_handler(params)
        where = handler.next_rendezvous().bootstrap_store_info
        assert where is not None
        with PlainTCPStore("127.0.0.1", where.master_port, timeout=PATIENCE, token="", server="") as store:
            store.set("k", "v")
            assert store.get("k") == b"v"
        assert sum("a server of their own instead of a named store" in message for message in caplog.messages) == 1
        assert handler.shutdown()
        if owner is not None:
            owner.close()


@pytest.mark.parametrize("relay", ["0", "1"])
def test_a_token_protects_the_workers_server(
    relay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With relays, which present one of the round, it is required; without, workers without one are let in."""
    with requiring_tokens(tmp_path) as own:
        with pytest.raises(RendezvousConnectionError, match="the server requires a token: set TCPSTORE_TOKEN_FILE"):
            rendezvous_handler.create_handler(parameters(own.port))
        monkeypatch.setenv("TCPSTORE_TOKEN", TokenKeys([("k1", b"a secret")]).create())
        one = rendezvous_handler.create_handler(parameters(own.port, relay=relay, named_store="0"))
        where = one.next_rendezvous().bootstrap_store_info
        assert where is not None
        port = where.master_port
        for token in ("", os.environ["TCPSTORE_TOKEN"]):
            with TCPStore("127.0.0.1", port, token=token) as store:
                store.set("k", "v")
                assert store.get("k") == b"v"
        if relay == "1":
            with pytest.raises(RuntimeError, match="the server requires a token"):  # noqa: SIM117
                with TCPStore("127.0.0.1", cast(Any, one)._opened[0].port, token="") as store:
                    store.set("k", "v")
        warned = f"the workers' server on port {port} admits clients without a token"
        assert any(message.startswith(warned) for message in caplog.messages) == (relay == "0")
        assert one.shutdown()


@pytest.mark.parametrize(
    ("variable", "reason"), [("TCPSTORE_TLS", "the workers use TLS themselves"), ("", "does not support named stores")]
)
def test_workers_for_whom_there_is_no_named_store_get_a_server(
    server: int, variable: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handler = rendezvous_handler.create_handler(parameters(server, tls="0"))
    if variable:
        monkeypatch.setenv(variable, "1")
    else:
        monkeypatch.setattr(store_name, "NAMES", 1000)
    found = handler.next_rendezvous().bootstrap_store_info
    assert found is not None
    assert found.master_addr == cast(Any, handler)._address
    with TCPStore("localhost", found.master_port, tls=False) as store:
        store.set("k", "v")
        assert store.get("k") == b"v"
    assert [reason in message for message in caplog.messages if message.startswith("the workers get")] == [True]
    assert handler.shutdown()


def run(params: RendezvousParameters) -> None:
    """One agent's whole job."""
    handler = rendezvous_handler.create_handler(params)
    assert handler.next_rendezvous().world_size == 1
    assert handler.shutdown()


def test_a_process_may_run_a_job_twice(
    server: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it says is its run: it knows that its own part of the job has ended."""
    monkeypatch.setenv("TCPSTORE_ATTEMPT", "1")
    monkeypatch.setattr(rendezvous_handler, "_ended_here", set())
    for _ in range(2):
        run(parameters(server))
    assert not caplog.messages
    monkeypatch.setattr(rendezvous_handler, "_ended_here", set())  # as in another process
    with pytest.raises(RendezvousClosedError, match=r"the same run \(TCPSTORE_ATTEMPT=1\)"):
        rendezvous_handler.create_handler(parameters(server))
    run(parameters(server, reuse_id="1"))


def test_without_a_run_an_agent_that_began_before_the_end_is_late(
    server: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous_handler, "_ended_here", set())
    run(parameters(server))
    monkeypatch.setattr(rendezvous_handler, "_ended_here", set())
    with pytest.raises(RendezvousClosedError, match="and this agent's process began before that: there is nothing"):
        rendezvous_handler.create_handler(parameters(server))
    monkeypatch.setattr(rendezvous_handler, "own_origin", lambda _: Origin("", "", 0.0))
    caplog.set_level(logging.INFO)
    run(parameters(server))
    assert f"on {socket.getfqdn()}; this agent's process began afterwards, so it begins the job anew" in caplog.text


def test_a_late_agent_does_not_join_the_next_run(server: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_handler, "_ended_here", set())
    monkeypatch.setenv("TCPSTORE_ATTEMPT", "1")
    run(parameters(server))
    monkeypatch.setattr(rendezvous_handler, "_ended_here", set())
    monkeypatch.setenv("TCPSTORE_ATTEMPT", "2")
    second = rendezvous_handler.create_handler(parameters(server))
    second.next_rendezvous()
    monkeypatch.setenv("TCPSTORE_ATTEMPT", "1")
    with pytest.raises(RendezvousClosedError, match="the same run"):
        rendezvous_handler.create_handler(parameters(server))
    assert second.num_nodes_waiting() == 0
    assert second.shutdown()


def test_a_rendezvous_that_is_closed_for_an_error_may_be_begun_again(
    server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun shuts down its handler then, too."""
    monkeypatch.setattr(rendezvous_handler, "_ended_here", set())
    monkeypatch.setenv("TCPSTORE_ATTEMPT", "1")
    failed, closed = (rendezvous_handler.create_handler(parameters(server)) for _ in range(2))
    failed.next_rendezvous()
    try:
        raise RuntimeError("the workers failed")
    except RuntimeError:
        assert failed.shutdown()
    assert closed.shutdown()  # never had a rank
    monkeypatch.setattr(rendezvous_handler, "_ended_here", set())
    run(parameters(server))


def test_a_closed_rendezvous_is_left_for_the_next_epoch(server: int) -> None:
    first, second = (rendezvous_handler.create_handler(parameters(server)) for _ in range(2))
    cast(Any, first).set_closed()
    assert first.is_closed()
    assert second.is_closed()
    with pytest.raises(RendezvousClosedError):
        second.next_rendezvous()
    third = rendezvous_handler.create_handler(parameters(server))
    assert not third.is_closed()
    assert third.next_rendezvous().world_size == 1
    assert [one.shutdown() for one in (first, second, third)] == [True] * 3


def test_a_redundant_agent_exits_gracefully(server: int) -> None:
    first, second = (rendezvous_handler.create_handler(parameters(server)) for _ in range(2))
    first.next_rendezvous()
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(second.next_rendezvous)
        while cast(Any, second)._agent.look().standing != 3:
            time.sleep(0.01)
        assert first.num_nodes_waiting() == 0
        cast(Any, first).set_closed()
        with pytest.raises(RendezvousGracefulExitError):
            late.result(PATIENCE)
    assert first.shutdown()
    assert second.shutdown()


def test_a_join_that_times_out(server: int) -> None:
    handler = rendezvous_handler.create_handler(parameters(server, 2, 2, join_timeout="1"))
    joined = f"{socket.getfqdn()} (pid {os.getpid()}, this agent)"
    expected = f"no round of 2 agents was formed within 1 s: 1 agent has joined: {joined}; "
    with pytest.raises(RendezvousTimeoutError) as caught:
        handler.next_rendezvous()
    assert str(caught.value) == f"{expected}the rendezvous server is at 127.0.0.1:{server}"
    handler.shutdown()


# quirk: torchrun-errors
def test_agents_with_an_endpoint_each_are_told_so(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each hosts a server of its own, where the others never come."""
    monkeypatch.setattr(stores_agent, "_FIRST_REPORT", 0.1)
    handler = rendezvous_handler.create_handler(parameters(port, 2, 2, join_timeout="1", is_host="1"))
    hosted = (
        f"has joined: {socket.getfqdn()} (pid {os.getpid()}, this agent); the rendezvous server is at "
        f"127.0.0.1:{port}, hosted by this agent; agents with another --rdzv-endpoint do not come there"
    )
    with pytest.raises(RendezvousTimeoutError) as caught:
        handler.next_rendezvous()
    assert hosted in str(caught.value)
    (warned,) = [message for message in caplog.messages if "no round" in message]
    assert warned.startswith("no round of 2 agents has been formed for 0 s: 1 agent ")
    assert hosted in warned
    cast(Any, handler)._host_name = "node-1 (pid 4711)"
    assert cast(Any, handler)._where().endswith(f":{port}, hosted by the agent node-1 (pid 4711)")
    handler.shutdown()


def test_a_server_that_has_gone(port: int) -> None:
    with tcpstore_server() as running:
        handler = rendezvous_handler.create_handler(parameters(running.port))
        running.process.kill()
        running.process.wait()
    with pytest.raises(RendezvousConnectionError):
        handler.is_closed()
    with pytest.raises(RendezvousConnectionError):
        handler.next_rendezvous()
    assert not handler.shutdown()


def test_a_host_that_says_so_after_the_round_is_formed(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server accepts connections before the agent that hosts it has a connection of its own."""
    monkeypatch.setattr(rendezvous_handler, "_FRESH", 0)
    with tcpstore_server() as running:
        handler = rendezvous_handler.create_handler(parameters(running.port))
        handler.next_rendezvous()
        with PlainTCPStore("127.0.0.1", running.port) as host:
            host.set("tcpstore.host", "node-1 (pid 4711)")
        assert not handler.is_closed()
        running.process.kill()
        running.process.wait()
    with pytest.raises(RendezvousConnectionError, match=r"exits with the agent that hosts it, node-1 \(pid 4711\)"):
        handler.is_closed()
    assert not handler.shutdown()


def test_a_round_that_is_formed_as_the_server_goes(server: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may end after the round has been formed, and before the workers have a store."""
    handler = rendezvous_handler.create_handler(parameters(server))
    refuses = errors.DistNetworkError("the connection to the server was lost")

    def gone(*_: object) -> None:
        raise refuses

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(handler, "_agents_server", ServerUrl("127.0.0.1", closed.getsockname()[1], False))
        with pytest.raises(
            RendezvousConnectionError, match=r"can no longer be reached: it refuses connections\. If it has exited"
        ):
            handler.next_rendezvous()
    monkeypatch.undo()
    monkeypatch.setattr(PrefixStore, "set", gone)
    with pytest.raises(RendezvousConnectionError, match="can no longer be reached: the connection to the server"):
        handler.next_rendezvous()
    monkeypatch.undo()
    assert handler.shutdown()


def test_a_server_that_is_not_ours() -> None:
    with (
        torch_server() as port,
        pytest.raises(RendezvousConnectionError, match="does not support this rendezvous backend"),
    ):
        rendezvous_handler.create_handler(parameters(port))


def test_two_agents_that_think_they_host(port: int) -> None:
    params = RendezvousParameters("tcpstore", f"127.0.0.1:{port}", "job", 2, 2)
    both = [rendezvous_handler.create_handler(params) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda handler: handler.next_rendezvous(), both))
    assert sorted(one.rank for one in found) == [0, 1]
    ports = [one.bootstrap_store_info.master_port for one in found if one.bootstrap_store_info]
    with TCPStore("127.0.0.1", ports[0]) as first, TCPStore("127.0.0.1", ports[1]) as second:
        first.set("k", "v")
        assert second.get("k") == b"v"
    for handler in reversed(both):
        handler.shutdown()


def test_beats_keep_an_agent_and_their_end_is_noticed(server: int) -> None:
    keep_alive: dict[str, Any] = {"keep_alive_interval": "1", "keep_alive_max_attempt": "2"}
    a, b = (rendezvous_handler.create_handler(parameters(server, 1, 2, **keep_alive)) for _ in range(2))
    with ThreadPoolExecutor(2) as pool:
        assert {one.world_size for one in pool.map(lambda handler: handler.next_rendezvous(), (a, b))} == {2}
    time.sleep(3)
    look = cast(Any, a)._agent.look
    assert look().participants == 2
    cast(Any, b)._stop_beats()
    while look().participants == 2:
        time.sleep(0.05)
    assert a.shutdown()
    assert b.shutdown()


class Bomb:
    """What a stranger leaves in the store: a file appears where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


# quirk: torchrun-state
def test_nothing_from_the_store_is_unpickled(tmp_path: Path, server: int) -> None:
    bomb = tmp_path / "bomb"
    store = TCPStore("127.0.0.1", server)
    store.set("torch.rendezvous.job", base64.b64encode(pickle.dumps(Bomb(bomb))).decode())
    store.set("tcpstore.job.0/torch.rendezvous.job", base64.b64encode(pickle.dumps(Bomb(bomb))).decode())
    handler = rendezvous_handler.create_handler(parameters(server))
    assert handler.next_rendezvous().world_size == 1
    handler.shutdown()
    store.close()
    assert not bomb.exists()


@pytest.mark.parametrize("first", ["tcpstore_async.torch.rendezvous_handler", "torch.distributed.elastic.rendezvous"])
def test_the_handler_is_registered_whichever_is_imported_first(first: str) -> None:
    if not hasattr(registry, "_register_out_of_tree_handlers"):
        pytest.skip(f"torchrun of PyTorch {torch.__version__} knows no handlers but its own")
    code = f"""
import {first}
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry as registry
handler = registry.create_handler(RendezvousParameters("tcpstore", "127.0.0.1:0", "job", 1, 1))
print(handler.get_backend(), type(handler).__module__)
handler.shutdown()"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=tempfile.gettempdir(), capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("tcpstore tcpstore_async.torch.rendezvous_handler\n", "")
