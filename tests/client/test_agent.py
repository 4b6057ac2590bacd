"""Agents on a real server: they meet, notice who has gone, and end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

import pytest

from support import LIMIT, tcpstore_server, torch_server, until
from tcpstore_async import DistNetworkError, StoreTimeoutError, TCPStore
from tcpstore_async.keyspace.agents import DESCRIBE, LEAVE, LOOK
from tcpstore_async.stores import agent as stores_agent
from tcpstore_async.stores.agent import Agent, Options, Round, RoundsClosed, agent_name, how_ended, is_closed, joining

QUICK = Options(2, 3, join=LIMIT, last_call=0.05, keep_alive_interval=0.2, keep_alive_max_attempt=2)


class Hosts:
    """A server, and agents in threads."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.stores: list[TCPStore] = []
        self.pool = ThreadPoolExecutor(16)

    def agent(self, name: str, options: Options = QUICK) -> Agent:
        self.stores.append(TCPStore("127.0.0.1", self.port, timeout=LIMIT))
        return Agent(self.stores[-1], "job", name.encode(), options)

    def join(self, *agents: Agent) -> list[Future[Round]]:
        return [self.pool.submit(agent.join) for agent in agents]

    def close(self) -> None:
        for store in self.stores:
            store.close()
        self.pool.shutdown()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with tcpstore_server() as server:
        hosts = Hosts(server.port)
        yield hosts
        hosts.close()


def test_agents_meet_again_and_again(hosts: Hosts) -> None:
    agents = [hosts.agent(f"node {number}", QUICK._replace(least=3)) for number in range(3)]
    for number in range(3):
        found = [future.result(LIMIT) for future in hosts.join(*agents)]
        assert found == [Round(number, rank, 3) for rank in range(3)]
    assert agents[0].look() == (2, 1, 3, 0, 1, 0)


def test_a_last_call(hosts: Hosts) -> None:
    a, b = hosts.agent("a"), hosts.agent("b")
    assert [future.result(LIMIT) for future in hosts.join(a, b)] == [Round(0, 0, 2), Round(0, 1, 2)]


# quirk: torchrun-last-call
def test_whoever_times_the_last_call_may_die(hosts: Hosts) -> None:
    patient = QUICK._replace(least=1, last_call=1.0)
    a, b = hosts.agent("a", patient), hosts.agent("b", patient)
    first = hosts.join(a)[0]
    until(lambda: b.look().participants == 1)
    second = hosts.join(b)[0]
    until(lambda: b.look().participants == 2)
    hosts.stores[0].close()
    assert second.result(LIMIT) == Round(0, 0, 1)
    with pytest.raises(DistNetworkError):
        first.result(LIMIT)


def test_the_join_timeout_does_not_end_a_redundant_agent(hosts: Hosts) -> None:
    """Not even if it is shorter than the time between two beats."""
    one = QUICK._replace(least=1, most=1, keep_alive_interval=60)
    a, b = hosts.agent("a", one), hosts.agent("b", one._replace(join=0.05))
    assert hosts.join(a)[0].result(LIMIT) == Round(0, 0, 1)
    second = hosts.join(b)[0]
    time.sleep(0.5)
    assert not second.done()
    hosts.stores[0].close()
    assert second.result(LIMIT) == Round(1, 0, 1)


def test_an_agent_that_gives_up_leaves_no_round_that_was_formed(hosts: Hosts) -> None:
    pair = QUICK._replace(most=2, keep_alive_interval=60)
    a, b = hosts.agent("a", pair), hosts.agent("b", pair._replace(join=0.05))
    steps = joining(b"/job", b"b", b.options, -1, b.pulse, time.monotonic)
    request, _ = next(steps)
    first = hosts.pool.submit(b._perform, (request, 0.1))
    assert first.result(LIMIT) is None
    request, _ = steps.send(None)
    assert request[1][2:] == (LOOK, DESCRIBE)
    request, _ = steps.send(b._client.call(request))
    assert request[1][2] == LEAVE
    assert hosts.join(a)[0].result(LIMIT) == Round(0, 0, 2)
    request, _ = steps.send(b._client.call(request))
    with pytest.raises(StopIteration) as end:
        steps.send(b._perform((request, LIMIT)))
    assert end.value.value == Round(0, 1, 2)


def test_closing_ends_all_waits(hosts: Hosts) -> None:
    patient = QUICK._replace(least=3)
    a, b, c = (hosts.agent(name, patient) for name in "abc")
    waiting = hosts.join(a, b)
    until(lambda: c.look().participants == 2)
    assert not is_closed(hosts.stores[0], "job")
    c.close()
    for future in waiting:
        with pytest.raises(RoundsClosed) as caught:
            future.result(LIMIT)
        assert not caught.value.redundant
    assert is_closed(hosts.stores[0], "job")
    with pytest.raises(RoundsClosed):
        c.join()


def test_a_join_timeout(hosts: Hosts) -> None:
    agent = hosts.agent("a", QUICK._replace(join=0.3))
    with pytest.raises(
        StoreTimeoutError,
        match=r"^no round of 2 to 3 agents was formed within 0\.3 s: 1 agent has joined: a \(this agent\)$",
    ):
        agent.join()
    assert agent.look().participants == 0


def test_agents_report_who_has_joined_until_a_round_is_formed(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores_agent, "_FIRST_REPORT", 0.05)
    monkeypatch.setattr(stores_agent, "_NEXT_REPORT", 0.05)
    names = [agent_name("node2", 0).decode(), *[f"node1 {number:010d} 0 x" for number in range(1, 10)]]
    agents = [hosts.agent(name, QUICK._replace(least=11, most=11, keep_alive_interval=60)) for name in names]
    reports: list[str] = []
    futures = [hosts.pool.submit(agents[0].join, reports.append)]
    alone = f"no round of 11 agents has been formed for 0 s: 1 agent has joined: node2 (pid {os.getpid()}, this agent)"
    until(lambda: alone in reports)
    futures += hosts.join(*agents[1:])
    listed = ", ".join(f"node1 (pid {number})" for number in range(1, 9))
    until(lambda: any(text.endswith(f"s: 10 agents have joined: {listed}, 2 more") for text in reports))
    futures += hosts.join(hosts.agent("c", agents[0].options))
    assert {future.result(LIMIT).world for future in futures} == {11}
    count = len(reports)
    agents[0].beat()
    assert len(reports) == count


def test_an_agent_that_waits_for_the_next_round_reports_the_current_one(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not if it is redundant: it may be so for days."""
    monkeypatch.setattr(stores_agent, "_FIRST_REPORT", 0.0)
    monkeypatch.setattr(stores_agent, "_NEXT_REPORT", 0.05)
    pair = QUICK._replace(keep_alive_interval=60)
    a, b, c, d = (hosts.agent(name, pair) for name in "abcd")
    for future in hosts.join(a, b):
        future.result(LIMIT)
    reports: list[str] = []
    waiting = hosts.pool.submit(c.join, reports.append)
    told = "this agent waits for the next round; the current one has 2 agents: a, b"
    until(lambda: any(text.endswith(told) for text in reports))
    futures = [*hosts.join(a, b), waiting]
    assert {future.result(LIMIT).world for future in futures} == {3}
    redundant: list[str] = []
    late = hosts.pool.submit(d.join, redundant.append)
    until(lambda: d.look().standing == 3)
    with pytest.raises(FutureTimeout):
        late.result(0.5)
    a.close()
    with pytest.raises(RoundsClosed):
        late.result(LIMIT)
    assert not redundant


def test_an_older_server_only_counts_the_agents(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = hosts.agent("a", QUICK._replace(join=0.3))
    monkeypatch.setattr(stores_agent, "DESCRIBE", 0)
    with pytest.raises(StoreTimeoutError, match=r"s: 1 agent has joined$"):
        agent.join()
    assert how_ended(hosts.stores[0], "job") is None


@pytest.mark.parametrize("backend", ["uv", "threaded"])
def test_how_a_job_has_ended(backend: str) -> None:
    with tcpstore_server("--backend", backend) as server:
        hosts = Hosts(server.port)
        a, b = (hosts.agent(name, QUICK._replace(most=2)) for name in "ab")
        for future in hosts.join(a, b):
            future.result(LIMIT)
        assert how_ended(hosts.stores[0], "job") is None
        a.close(succeeded=True)
        b.close(succeeded=True)
        first = how_ended(hosts.stores[0], "job")
        assert first is not None
        assert (first.count, first.agents) == (2, ["a", "b"])
        assert 0 <= first.since < LIMIT
        until(lambda: (how_ended(hosts.stores[0], "job") or first).since > first.since)
        hosts.close()


def test_beats_beside_other_calls(hosts: Hosts) -> None:
    """An agent that waits for a key goes on sending beats, on whichever connection."""
    a, b = hosts.agent("a"), hosts.agent("b")
    for future in hosts.join(a, b):
        future.result(LIMIT)
    waiter = threading.Thread(target=hosts.stores[0].wait, args=(["key"],))
    waiter.start()
    for _ in range(8):
        a.beat()
        b.beat()
        time.sleep(QUICK.period())
    assert (a.look().standing, b.look().standing) == (1, 1)
    hosts.stores[1].set("key", "")
    waiter.join(LIMIT)
    assert not waiter.is_alive()


def test_names_are_ordered_by_host() -> None:
    names = [agent_name("node1", 7), agent_name("node1-a", 0), agent_name("node2", 1), agent_name("x" * 9999, 1)]
    assert sorted(names) == names
    assert len(set(names)) == 4
    assert max(map(len, names)) <= 512
    assert agent_name("a", 1) != agent_name("a", 1)


def test_servers_without_rounds() -> None:
    with torch_server() as port:
        store = TCPStore("127.0.0.1", port, timeout=LIMIT)
        with pytest.raises(NotImplementedError, match="does not support this rendezvous backend"):
            Agent(store, "job", b"a", QUICK)
        store.close()
