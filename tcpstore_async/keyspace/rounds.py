"""Rounds: how the agents of an elastic job meet, as PyTorch's dynamic rendezvous defines it.

Agents gather until as many as the most that are admitted have come, or until the agent that times the last call ends
it. Then the round is formed: each agent has a rank, by its name. Agents that come later wait for the next round, which
begins when no agent of the current one is left. This module keeps who stands where, and when each agent was last seen.
It does not know connections, waiting, bytes or time: the caller passes on what agents send, answers those in `due`, and
removes agents that have gone.

Invariants: an agent is in one group at most. The names of a group are sorted, and those of a formed group never change,
so an agent's rank is its name's place whenever it is looked up. Every step costs O(log n) comparisons and the move of
at most n references. `size` counts all that is kept.
"""

from bisect import bisect_left
from collections import OrderedDict
from typing import Any, Final

from ..base.mypyc_shim import mypyc_attr

CLOSED: Final = -2
"""In place of a rank: the rounds are closed. The number is 1 for a redundant agent, else 0."""
LAST_CALL: Final = -1
"""In place of a rank: enough agents have come, and this one is to time the last call, whose number follows."""

GATHERING: Final = 0
FORMED: Final = 1
"""States of the current round, in `Status`. A closed rendezvous has the state 2 whatever its round is."""

STRANGER: Final = 0
PARTICIPANT: Final = 1
WAITING: Final = 2
REDUNDANT: Final = 3
"""Where an agent stands: nowhere, in the current round, waiting for the next one, or too many for the current one."""

AGENT_BYTES: Final = 1024
"""Bytes counted for an agent, besides its name."""

ROUNDS_BYTES: Final = 2048
"""Bytes counted for the rounds under one key, besides the key."""

Answer = tuple[int, int, int]
"""The round; the rank, `LAST_CALL` or `CLOSED`; and the world size or the number that belongs to these."""

Status = tuple[int, int, int, int, int, int]
"""The round, its state, its participants, how many agents wait for the next round (redundant ones do not count), where
the agent stands, and the number of the last call if it is this agent's to time, else 0."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Agent:
    """One agent, while a connection represents it and it is not considered dead."""

    def __init__(self, rounds: "Rounds", name: bytes) -> None:
        self.rounds = rounds
        self.name = name
        self.group: Group | None = None
        """Where it stands, if anywhere."""
        self.beaten = rounds.tick
        """The tick of its last beat."""
        self.seen = rounds.tick
        """The tick of its last sign of life."""
        self.connections: int = 0
        """How many connections represent it."""
        self.parked: Any = None
        """What is to be answered when its round is formed: opaque here."""

    def cost(self) -> int:
        """Return the bytes counted for it."""
        return AGENT_BYTES + len(self.name)


@mypyc_attr(allow_interpreted_subclasses=True)
class Group:
    """Agents in the order of their names."""

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self.agents: list[Agent] = []

    def add(self, agent: Agent) -> None:
        at = bisect_left(self.names, agent.name)
        self.names.insert(at, agent.name)
        self.agents.insert(at, agent)
        agent.group = self

    def remove(self, agent: Agent) -> None:
        at = bisect_left(self.names, agent.name)
        del self.names[at]
        del self.agents[at]
        agent.group = None

    def rank(self, agent: Agent) -> int:
        """Return the place of an agent; -1 if it is not in the group."""
        at = bisect_left(self.names, agent.name)
        return at if at < len(self.agents) and self.agents[at] is agent else -1

    def split(self, most: int) -> "Group":
        """Keep the first `most` agents, and return the others."""
        others = Group()
        others.names = self.names[most:]
        others.agents = self.agents[most:]
        del self.names[most:]
        del self.agents[most:]
        for agent in others.agents:
            agent.group = others
        return others


@mypyc_attr(allow_interpreted_subclasses=True)
class Due:
    """Parked agents that have to be answered: all of a group alike, except for their ranks."""

    def __init__(self, rounds: "Rounds", group: Group, closed: int) -> None:
        self.rounds = rounds
        self.agents = group.agents if closed < 0 else list(group.agents)
        self.group = group
        self.round = rounds.round
        self.closed = closed
        """The number after `CLOSED`; -1 if the round is formed."""

    def answer(self, rank: int) -> Answer:
        if self.closed >= 0:
            return self.round, CLOSED, self.closed
        return self.round, rank, len(self.agents)


@mypyc_attr(allow_interpreted_subclasses=True)
class Rounds:
    """The rounds that agents meet in under one key."""

    def __init__(self) -> None:
        self.round: int = 0
        self.formed = False
        self.closed = False
        self.least: int = 1
        self.most: int = 1
        """How many agents a round needs, and admits: as the last agent that joined has it."""
        self.agents: OrderedDict[bytes, Agent] = OrderedDict()
        """The agents in order of their last signs of life, keyed by name."""
        self.group = Group()
        """The agents that gather or, once the round is formed, all that it was formed of."""
        self.waiting = Group()
        """The agents that wait for the next round, redundant ones included."""
        self.present: int = 0
        """How many agents of a formed round have neither left nor gone."""
        self.caller: Agent | None = None
        """The agent that times the last call."""
        self.calls: int = 0
        """The number of the latest last call."""
        self.called = False
        """Whether the caller has to be told of its last call, if it is parked."""
        self.tick: int = 0
        self.expiring = False
        """Whether the caller is removing silent agents in steps."""
        self.due: list[Due] = []
        """Groups whose parked agents have to be answered. The caller takes them."""
        self.size: int = ROUNDS_BYTES
        """Bytes counted."""
        self.counted: int = 0
        """Of these, how many the store has taken into account."""
        self._kept: int = 0
        """Of these, for agents that have gone, but whose names belong to the formed round."""

    # Agents

    def add(self, name: bytes) -> Agent:
        """Add an agent that is not known yet."""
        agent = self.agents[name] = Agent(self, name)
        self.size += agent.cost()
        return agent

    def remove(self, agent: Agent) -> None:
        """Remove an agent that has gone, unless that was done before."""
        if self.agents.get(agent.name) is not agent:
            return
        del self.agents[agent.name]
        self._withdraw(agent)
        if self.formed and self.group.rank(agent) >= 0:
            self._kept += agent.cost()
        else:
            self.size -= agent.cost()

    def see(self, agent: Agent) -> None:
        """Note a sign of life of an agent that has not been removed: any request."""
        agent.seen = self.tick
        self.agents.move_to_end(agent.name)

    def beat(self, agent: Agent) -> None:
        """Note a beat.

        There is a tick when an agent sends a beat and has sent another since the last tick. So the time between two
        ticks is at least that between two beats of one agent, and less than twice that if the agent which made the last
        tick has gone. No clock is needed, and a server that was stopped for a while takes no one for dead.
        """
        if agent.beaten == self.tick:
            self.tick += 1
        agent.beaten = self.tick
        self.see(agent)

    def silent(self, missing: int) -> Agent | None:
        """Return the agent that was seen longest ago, if nothing was seen of it for `missing` ticks."""
        oldest = next(iter(self.agents.values()), None)
        return None if oldest is None or self.tick - oldest.seen < missing else oldest

    # Rounds

    def join(self, agent: Agent, least: int, most: int, left: int) -> Answer | None:
        """Let an agent take part: in the current round, or else the next one; None if it has to wait.

        `left` is the round whose result it has received before and now leaves, -1 if there is none. It may join again
        while it waits.
        """
        self.least = least
        self.most = most
        if self.formed and agent.group is self.group and self.round == left:
            self._withdraw(agent)
        if self.closed:
            return self.round, CLOSED, 1 if self.standing(agent) == REDUNDANT else 0
        if agent.group is None:
            if self.formed:
                self.waiting.add(agent)
            else:
                self.group.add(agent)
        if agent.group is not self.group:
            return None
        if not self.formed:
            self._count(agent)
        if self.formed:
            return self.round, self.group.rank(agent), len(self.group.agents)
        if self.caller is agent and self.called:
            self.called = False
            return self.round, LAST_CALL, self.calls
        return None

    def complete(self, agent: Agent, call: int) -> None:
        """End a last call, unless it is not this agent's or out of date: the round is formed."""
        if self.caller is agent and self.calls == call and not self.closed:
            self._form()

    def leave(self, agent: Agent) -> None:
        """Remove an agent that has waited for long enough, unless it has a rank meanwhile or is redundant."""
        if not self.formed or self.standing(agent) not in (PARTICIPANT, REDUNDANT):
            self.remove(agent)

    def close(self) -> None:
        """Close: form no further rounds."""
        if self.closed:
            return
        self.closed = True
        if self.formed:
            self.due.append(Due(self, self.waiting, 1 if self.is_full() else 0))
        else:  # no agent waits for the next round
            self.due.append(Due(self, self.group, 0))

    def is_full(self) -> bool:
        """Whether no agent could join the round that is formed, so that those waiting are redundant."""
        return self.formed and self.present >= self.most

    def is_intact(self) -> bool:
        """Whether a round is formed, and none of its agents has left it or gone."""
        return self.formed and self.present == len(self.group.agents)

    def standing(self, agent: Agent | None) -> int:
        if agent is None or agent.group is None:
            return STRANGER
        if agent.group is self.group:
            return PARTICIPANT
        return REDUNDANT if self.is_full() else WAITING

    def status(self, agent: Agent | None) -> Status:
        state = 2 if self.closed else FORMED if self.formed else GATHERING
        present = self.present if self.formed else len(self.group.agents)
        waiting = 0 if self.is_full() else len(self.waiting.agents)
        call = self.calls if agent is not None and self.caller is agent else 0
        return self.round, state, present, waiting, self.standing(agent), call

    def _withdraw(self, agent: Agent) -> None:
        """Take an agent out of its group."""
        group = agent.group
        if group is None:
            return
        if group is self.group and self.formed:
            agent.group = None
            self.present -= 1
            if self.present == 0:
                self._begin_next()
            return
        group.remove(agent)
        if group is self.group:
            if self.caller is agent:
                self.caller = None
            self._count(None)

    def _count(self, latest: Agent | None) -> None:
        """Form the round, begin a last call or revoke it, as the number of agents requires.

        The agent that has just joined times the last call, if there is one: it is alive for sure.
        """
        count = len(self.group.agents)
        if self.closed or count < self.least:
            self.caller = None
        elif count >= self.most:
            self._form()
        elif self.caller is None:
            self.caller = self.group.agents[0] if latest is None else latest
            self.calls += 1
            self.called = True

    def _form(self) -> None:
        self.formed = True
        self.caller = None
        self.present = len(self.group.agents)
        self.due.append(Due(self, self.group, -1))

    def _begin_next(self) -> None:
        """Begin the next round, as the current one is empty: waiting agents gather, up to its maximum."""
        self.formed = False
        self.round += 1
        self.size -= self._kept
        self._kept = 0
        self.group = self.waiting
        self.waiting = self.group.split(self.most) if len(self.group.agents) > self.most else Group()
        self._count(None)
