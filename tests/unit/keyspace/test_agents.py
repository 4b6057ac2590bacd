"""What a server says about the rounds of agents, and what it remembers of jobs that ended successfully."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from tcpstore_async.base.errors import ProtocolError
from tcpstore_async.base.limits import Limits
from tcpstore_async.keyspace.accounts import Account, Usage
from tcpstore_async.keyspace.agents import (
    CLOSE,
    DESCRIBE,
    LOOK,
    MOST_NAMED,
    MOST_REMEMBERED,
    REMEMBERED_SECONDS,
    SUCCEEDED,
)
from tcpstore_async.keyspace.keyspace import Keyspace
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store
from tcpstore_async.wire.values import pack, unpack

FAILED = 0
STATE_BYTES = 48


class Job:
    """Agents of one job on a server whose clock stands still until it is set."""

    def __init__(self, portion: int = 1000) -> None:
        self.store = Store(Limits(), portion)
        self.clock = self.keyspace.clock
        self.clock.now = 1000.0
        self.agents: dict[bytes, ServerSession] = {}

    @property
    def keyspace(self) -> Keyspace:
        return self.store.keyspace

    def meet(self, *names: bytes, key: bytes = b"job", most: int = 0, left: int = -1) -> None:
        for name in names:
            self.agents[key + name] = agent = ServerSession(self.store, None, "::1", 1, 0.0)
            self.keyspace.meet(agent, key, pack(name), len(names), most or len(names), left)

    def close(self, name: bytes, number: int, key: bytes = b"job") -> None:
        stranger = ServerSession(self.store, None, "::1", 1, 0.0)
        self.keyspace.attend(self.agents.get(key + name, stranger), key, pack(name), CLOSE, number)

    def lose(self, name: bytes) -> None:
        self.agents[b"job" + name].leave()

    def described(self, key: bytes = b"job") -> Any:
        agent = ServerSession(self.store, None, "::1", 1, 0.0)
        return json.loads(unpack(self.keyspace.attend(agent, key, pack(b""), LOOK, DESCRIBE))[STATE_BYTES:] or "{}")

    def ended(self) -> Any:
        return self.described().get("ended")


def test_a_description_names_the_agents_of_the_round() -> None:
    job = Job()
    assert job.described() == {}
    job.meet(b"b", b"a")
    assert job.described() == {"agents": ["a", "b"]}
    job.meet(b"late", most=2)
    assert job.described() == {"agents": ["a", "b"]}


def test_who_waits_in_meet_does_not_act_for_another_agent() -> None:
    """It would come back to an agent that no longer knows whom to answer (links, seed 40395)."""
    job = Job()
    waits, other = ServerSession(job.store, None, "::1", 1, 0.0), ServerSession(job.store, None, "::1", 2, 0.0)
    assert job.keyspace.meet(other, b"job", pack(b"b"), 3, 3, -1) is None
    assert job.keyspace.meet(waits, b"job", pack(b"a"), 3, 3, -1) is None
    job.keyspace.attend(waits, b"job", pack(b"a"), LOOK, 0)
    job.keyspace.attend(waits, b"job", pack(b""), LOOK, 0)
    with pytest.raises(ProtocolError, match="another agent"):
        job.keyspace.attend(waits, b"job", pack(b"b"), LOOK, 0)
    job.keyspace.cancel_fetch(waits)
    job.keyspace.attend(waits, b"job", pack(b"b"), LOOK, 0)


def test_a_description_is_only_for_those_who_ask() -> None:
    job = Job()
    job.meet(b"a")
    agent = job.agents[b"joba"]
    for number in (0, 2, -1):
        assert len(unpack(job.keyspace.attend(agent, b"job", pack(b"a"), LOOK, number))) == STATE_BYTES


def test_a_job_that_ended_successfully_is_remembered() -> None:
    job = Job()
    job.meet(b"b", b"a")
    job.close(b"a", SUCCEEDED)
    job.clock.now += 12.25
    job.close(b"b", SUCCEEDED)
    for name in (b"a", b"b"):
        job.lose(name)
    assert job.ended() == {"since": 12.25, "count": 2, "agents": ["a", "b"]}
    job.clock.now += REMEMBERED_SECONDS - 12.5
    assert job.ended() is not None
    job.clock.now += 0.25
    assert job.ended() is None


def test_only_the_first_agents_of_a_large_job_are_named() -> None:
    job = Job()
    job.meet(*[b"%03d" % number for number in range(100)])
    names = [f"{number:03d}" for number in range(MOST_NAMED)]
    assert job.described() == {"agents": names}
    job.close(b"050", SUCCEEDED)
    assert job.ended() == {"since": 0.0, "count": 100, "agents": names}


@pytest.mark.parametrize("portion", [1, 1000])
def test_a_job_that_failed_is_not_remembered(portion: int) -> None:
    for closing in (
        [(b"a", FAILED)],
        [(b"a", FAILED), (b"b", SUCCEEDED)],
        [(b"a", SUCCEEDED), (b"b", FAILED)],
        [(b"", SUCCEEDED)],
        [(b"stranger", SUCCEEDED)],
        [(b"", FAILED), (b"a", SUCCEEDED)],
    ):
        job = Job(portion=portion)
        job.meet(b"a", b"b")
        for name, number in closing:
            job.close(name, number)
        assert job.ended() is None, closing
        assert not job.keyspace.ended


def test_a_redundant_agent_that_fails_does_not_make_the_job_one_that_failed() -> None:
    job = Job()
    job.meet(b"a")
    job.meet(b"b")
    job.close(b"a", SUCCEEDED)
    job.close(b"b", FAILED)
    assert job.ended() is not None


def test_a_job_that_has_lost_an_agent_has_not_ended_successfully() -> None:
    """Those that succeed wait for each other: one that has gone did not, whatever another says after its timeout."""
    job = Job()
    job.meet(b"a", b"b")
    job.lose(b"b")
    job.close(b"a", SUCCEEDED)
    assert job.ended() is None
    job = Job()
    job.meet(b"a", b"b")
    job.meet(b"b", left=0)  # its workers failed, and it waits for the next round
    job.close(b"a", SUCCEEDED)
    assert job.ended() is None


def test_a_round_that_was_not_formed_has_not_ended_successfully() -> None:
    job = Job()
    job.keyspace.meet(agent := ServerSession(job.store, None, "::1", 1, 0.0), b"job", pack(b"a"), 2, 2, -1)
    job.keyspace.attend(agent, b"job", pack(b"a"), CLOSE, SUCCEEDED)
    assert job.ended() is None


def test_the_oldest_are_forgotten_first() -> None:
    job = Job()
    keys = [b"job %d" % number for number in range(MOST_REMEMBERED + 2)]
    for key in keys:
        job.meet(b"a", key=key)
        job.close(b"a", SUCCEEDED, key)
        job.clock.now += 0.25
    assert list(job.keyspace.ended) == keys[2:]
    job.clock.now += REMEMBERED_SECONDS - 2
    job.meet(b"a")
    job.close(b"a", SUCCEEDED)
    assert list(job.keyspace.ended) == [*keys[-7:], b"job"]


def test_what_is_remembered_is_counted_and_goes_with_the_rounds() -> None:
    job = Job()
    keys = [b"job %d" % number for number in range(50)]
    tracemalloc.start()
    for key in keys:
        job.meet(*[b"%03d " % number + b"x" * 500 for number in range(MOST_NAMED)], key=key)
        job.close(b"000 " + b"x" * 500, SUCCEEDED, key)
        for agent in job.agents.values():
            agent.leave()
        job.agents.clear()
    job.store.hub.pending_flush.clear()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(job.keyspace.ended) == len(keys)
    assert held <= 1.5 * job.keyspace.size
    for key in keys:
        job.keyspace.delete_key(key)
    assert (job.keyspace.size, len(job.keyspace.ended)) == (0, 0)


def test_a_full_store_closes_rounds_without_remembering_it() -> None:
    job = Job()
    job.meet(b"a")
    job.keyspace.on_full = None
    job.keyspace.max_size = job.keyspace.size
    job.keyspace.attend(job.agents[b"joba"], b"job", pack(b"a"), CLOSE, SUCCEEDED)
    assert job.keyspace.rounds[b"job"].closed
    assert job.ended() is None


def test_what_is_remembered_counts_for_whoever_said_so_until_it_is_forgotten() -> None:
    job = Job()
    said, forgets = Usage("one", 0, 0), Usage("other", 0, 0)
    job.keyspace.charge(Account(said))
    job.meet(b"a")
    before = job.keyspace.size
    job.close(b"a", SUCCEEDED)
    job.keyspace.charge(None)
    assert (said.bytes, job.keyspace.size > before) == (job.keyspace.size, True)
    job.clock.now += REMEMBERED_SECONDS
    job.keyspace.charge(Account(forgets))
    job.meet(b"b", key=b"other job")
    job.close(b"b", SUCCEEDED, b"other job")
    job.keyspace.charge(None)
    assert list(job.keyspace.ended) == [b"other job"]
    assert (said.bytes, said.bytes + forgets.bytes) == (before, job.keyspace.size)


def test_a_token_at_its_limit_closes_rounds_without_remembering_it() -> None:
    job = Job()
    job.meet(b"a")
    usage = Usage("one", 0, 1000)
    job.keyspace.charge(Account(usage))
    job.close(b"a", SUCCEEDED)
    job.keyspace.charge(None)
    assert job.keyspace.rounds[b"job"].closed
    assert (job.ended(), usage.bytes) == (None, 0)
