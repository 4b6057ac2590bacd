"""Agents of elastic jobs, with the real client's part and real sessions, on a simulated clock.

They come, stay, restart, hang and die at random times. Whatever happens, those that see a round agree about it, no
agent that lives is taken for dead, and in the end all that live are in one round, or redundant.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from properties.session_driver import greeted, take
from tcpstore_async.base.errors import StoreTimeoutError
from tcpstore_async.base.limits import Limits
from tcpstore_async.client import requests
from tcpstore_async.keyspace.agents import BEAT, CLOSE, LOOK
from tcpstore_async.session.peer import Peer
from tcpstore_async.session.store import Store
from tcpstore_async.stores.agent import Options, Pulse, Round, RoundsClosed, State, joining
from tcpstore_async.wire.commands import BY_METHOD, Command
from tcpstore_async.wire.values import PREFIX

KEY = b"/job"
POLL = 1.0
"""Seconds between two looks of an agent whose workers run."""
END = 150.0


class World:
    """The server, the clock, and what agents have seen."""

    def __init__(self, portion: int) -> None:
        self.store = Store(Limits(), portion)
        self.keyspace = self.store.keyspace
        self.actors: dict[Peer, Actor] = {}
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.seen: dict[int, dict[bytes, Round]] = {}
        self.formed_at: dict[int, float] = {}

    def at(self, time: float, event: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, event))

    def run(self, end: float) -> None:
        while self.events and self.events[0][0] <= end:
            self.now, _, event = heapq.heappop(self.events)
            event()
            while self.keyspace.work or self.store.hub.pending_flush:
                if self.keyspace.work:
                    self.keyspace.step()
                woken = list(self.store.hub.pending_flush)
                self.store.hub.pending_flush.clear()
                for session in woken:
                    if session.out:
                        self.actors[session].on_reply(take(session))
        self.now = end

    def saw(self, name: bytes, found: Round) -> None:
        others = self.seen.setdefault(found.number, {})
        assert name not in others
        others[name] = found
        self.formed_at.setdefault(found.number, self.now)


class Actor:
    """One agent: torchrun's, with workers that fail when another agent's do."""

    def __init__(self, world: World, name: bytes, options: Options) -> None:
        self.world = world
        self.name = name
        self.options = options
        self.session = greeted(world.store)
        world.actors[self.session] = self
        self.left = -1
        self.pulse = Pulse(0.0)
        self.round: Round | None = None
        self.outcome = ""
        self.gone = False
        self.hangs = False
        self.steps: Any = None
        self.turn = 0
        """Counts what it does, so that the events of earlier steps are recognized."""

    def start(self) -> None:
        if self.gone or self.hangs:
            return
        if self.left < 0:
            self.pulse.due = self.world.now + self.options.period()
        self.round = None
        self.steps = joining(KEY, self.name, self.options, self.left, self.pulse, lambda: self.world.now)
        self.send(None)

    def ask(self, command: Command, fields: tuple[Any, ...]) -> bytes:
        """Send a request and return the reply; nothing if it is to follow."""
        self.session.receive(command.prefix + command.request.encode(fields))
        return take(self.session)

    def send(self, reply: bytes | None) -> None:
        try:
            while True:
                (command, fields), seconds = self.steps.send(reply)
                reply = self.ask(command, fields)
                if not reply:
                    self.turn += 1
                    turn = self.turn
                    self.world.at(self.world.now + seconds, lambda turn=turn: self.on_timeout(turn))  # type: ignore[misc]
                    return
        except StopIteration as end:
            self.on_round(end.value)
        except RoundsClosed as error:
            self.outcome = "redundant" if error.redundant else "closed"
        except StoreTimeoutError:
            self.outcome = "timeout"

    def on_reply(self, value: bytes) -> None:
        self.turn += 1
        turn = self.turn

        def go_on() -> None:
            if self.turn == turn and not self.gone and not self.hangs:
                self.send(value)

        self.world.at(self.world.now, go_on)

    def on_timeout(self, turn: int) -> None:
        if turn == self.turn and not self.gone and not self.hangs:
            assert self.ask(BY_METHOD["cancel_fetch"], ()) == b"\xff" * 8
            self.send(None)

    def on_round(self, found: Round) -> None:
        self.left = found.number
        self.round = found
        self.world.saw(self.name, found)
        self.beat_later(found)
        self.look_later(found)

    def attend(self, action: int, number: int = 0) -> State:
        reply = self.ask(*requests.attend(KEY, self.name, action, number))
        return State(*memoryview(reply[PREFIX:]).cast("q"))

    def beat_later(self, found: Round) -> None:
        def beat() -> None:
            if self.round is found and not self.gone and not self.hangs:
                self.attend(BEAT, self.options.missing())
                self.pulse.due = self.world.now + self.options.period()
                self.beat_later(found)

        self.world.at(self.pulse.due, beat)

    def look_later(self, found: Round) -> None:
        def look() -> None:
            if self.round is not found or self.gone or self.hangs:
                return
            state = self.attend(LOOK)
            assert state.standing == 1, "an agent that lives was removed"
            if state.waiting or state.participants < found.world:
                self.start()
            else:
                self.look_later(found)

        self.world.at(self.world.now + POLL, look)

    def restart(self) -> None:
        if self.round is not None:
            self.start()

    def close(self) -> None:
        self.attend(CLOSE)

    def die(self) -> None:
        self.gone = True
        self.round = None
        self.session.leave()

    def hang(self) -> None:
        """Stop, as with the power of its machine: the connection stays."""
        self.hangs = True
        self.round = None


times = st.integers(0, 4000).map(lambda number: number / 100)
fates = st.tuples(times, st.sampled_from(["lives", "lives", "lives", "restarts", "dies", "hangs"]), times)
options = st.builds(
    lambda least, more, last_call, attempts: Options(
        least, least + more, 1e6, last_call, keep_alive_interval=1.0, keep_alive_max_attempt=attempts
    ),
    st.integers(1, 4),
    st.integers(0, 4),
    st.sampled_from([0.1, 1.0, 3.0, 20.0]),
    st.integers(1, 4),
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(fates, min_size=1, max_size=9), options, st.sampled_from([1, 2, 1000]))
@example([(0.0, "hangs", 0.5), (0.0, "lives", 0.0), (1.0, "lives", 0.0)], Options(2, 3, 1e6, 1.0), 1000)
def test_those_that_live_meet(fates: list[tuple[float, str, float]], options: Options, portion: int) -> None:
    world = World(portion)
    actors = [Actor(world, b"node %d" % number, options) for number in range(len(fates))]
    for actor, (arrival, fate, then) in zip(actors, fates, strict=True):
        world.at(arrival, actor.start)
        event = {"restarts": actor.restart, "dies": actor.die, "hangs": actor.hang}.get(fate)
        if event is not None:
            world.at(arrival + then, event)
    world.run(END)
    for number, found in world.seen.items():
        sizes = {one.world for one in found.values()}
        assert len(sizes) == 1
        (size,) = sizes
        assert options.least <= size <= options.most
        ranks = {one.rank: name for name, one in found.items()}
        assert len(ranks) == len(found)
        assert [ranks[rank] for rank in sorted(ranks)] == sorted(ranks.values())
        assert min(ranks) >= 0
        assert max(ranks) < size
        if size < options.most:
            assert world.formed_at[number] >= min(arrival for arrival, _, _ in fates) + options.last_call
    living = [actor for actor in actors if not actor.gone and not actor.hangs]
    rounds = world.keyspace.rounds[KEY]
    assert {agent.name for agent in rounds.agents.values()} == {actor.name for actor in living} or len(living) == 0
    inside = [actor for actor in living if actor.round is not None]
    assert not any(actor.outcome for actor in actors)
    if len(living) < options.least:
        assert not inside
    else:
        assert len(inside) == min(len(living), options.most)
        (last,) = {actor.round.number for actor in inside if actor.round}
        assert rounds.round == last
        assert {actor.round.world for actor in inside if actor.round} == {len(inside)}
    for actor in actors:
        if not actor.gone:
            actor.die()
    assert not rounds.agents
    world.keyspace.delete_key(KEY)
    assert world.keyspace.size == 0


@pytest.mark.parametrize("attempts", [1, 2, 3, 5])
@pytest.mark.parametrize("first", [True, False])
# quirk: torchrun-lost-agent
def test_a_silent_agent_is_removed_within_its_time(attempts: int, first: bool) -> None:
    """Whoever it is, also the one whose beats make the ticks. One attempt counts as two."""
    options = Options(3, 3, keep_alive_interval=4.0, keep_alive_max_attempt=attempts)
    for moment in range(40):
        world = World(1000)
        actors = [Actor(world, b"node %d" % number, options) for number in range(3)]
        for number, actor in enumerate(actors):
            world.at(0.3 * number, actor.start)
        world.run(10.0)
        world.run(10.0 + moment / 10)
        silent = actors[0 if first else 2]
        silent.hang()
        rounds = world.keyspace.rounds[KEY]
        while silent.name in rounds.agents:
            world.run(world.now + 0.05)
            assert world.events
        died = 10.0 + moment / 10
        limit = 4.0 * max(attempts, 2)
        assert world.now - died <= limit + 0.1
        assert len(rounds.agents) == 2


def test_agents_that_are_too_many_leave_when_the_rounds_close() -> None:
    world = World(1000)
    options = Options(1, 2)
    actors = [Actor(world, b"node %d" % number, options) for number in range(4)]
    for number, actor in enumerate(actors):
        world.at(number, actor.start)
    world.run(1000.0)
    assert [actor.outcome for actor in actors] == [""] * 4
    world.at(1000.0, lambda: actors[0].close())
    world.run(1001.0)
    assert [actor.outcome for actor in actors] == ["", "", "redundant", "redundant"]


def test_too_few_agents_time_out() -> None:
    world = World(1000)
    actor = Actor(world, b"node", Options(2, 2, 60.0))
    world.at(0, actor.start)
    world.run(61.0)
    assert actor.outcome == "timeout"
    assert not world.keyspace.rounds[KEY].agents


def test_many_agents_are_answered_in_portions() -> None:
    world = World(3)
    options = Options(50, 50)
    actors = [Actor(world, b"node %d" % number, options) for number in range(50)]
    for actor in actors:
        world.at(0, actor.start)
    world.run(1.0)
    assert sorted(one.rank for one in world.seen[0].values()) == list(range(50))
    for actor in actors:
        world.at(2, actor.restart)
    world.run(3.0)
    assert sorted(one.rank for one in world.seen[1].values()) == list(range(50))
