"""The commands by which the agents of elastic jobs meet.

A connection that sends MEET represents an agent, and waits until `Rounds` has an answer for it. An agent that loses all
its connections is removed at once. This module connects waiters with the rounds that they take part in, and answers
many of them in portions. It does not know what makes a round complete.

Invariants: a parked waiter is answered once. All that is kept for a parked waiter is its agent; all that is kept for an
agent that has gone is its name, which `Rounds` counts, or `Ended` if its job ended successfully.
"""

from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from struct import Struct
from typing import Any, Final

import msgspec

from ..base.errors import LimitError, NotAllowedError, ProtocolError, counted
from ..base.mypyc_shim import mypyc_attr
from ..wire.values import PREFIX, Framed, unpack
from .accounts import Account
from .rounds import AGENT_BYTES, CLOSED, LAST_CALL, PARTICIPANT, ROUNDS_BYTES, Agent, Answer, Due, Rounds, Status
from .shared_requests import SharedRequests
from .steps import Later
from .waiter_types import AWAITING_ROUND, IDLE, Waiter

LOOK: Final = 0
BEAT: Final = 1
COMPLETE: Final = 2
CLOSE: Final = 3
LEAVE: Final = 4
"""Actions of ATTEND."""

DESCRIBE: Final = 1
"""Argument of LOOK: a description of the rounds follows their state."""
SUCCEEDED: Final = 1
"""Argument of CLOSE: the workers of this agent have succeeded."""

REMEMBERED_SECONDS: Final = 600.0
MOST_REMEMBERED: Final = 1024
"""How long it is remembered that a job has ended successfully, and of how many jobs."""

MOST_NAMED: Final = 16
"""Agents that a description names, and that are remembered of a job that has ended."""

ENDED_BYTES: Final = 1024
"""Bytes counted for a job that has ended, besides its key and the names of its agents."""

_MAX_NAME: Final = PREFIX + 512
"""Bytes of an agent's name, framed."""

_REMOVED_AT_ONCE: Final = 100
"""Silent agents that are removed in one step; each moves the references to those behind it."""

_ANSWER: Final = Struct("<Q3q")
_STATUS: Final = Struct("<Q6q")

_NO_ROUNDS: Final[Status] = (0, 0, 0, 0, 0, 0)


def _framed_answer(answer: Answer) -> Framed:
    return _ANSWER.pack(_ANSWER.size - PREFIX, *answer)


def _framed_status(status: Status, described: bytes = b"") -> Framed:
    return _STATUS.pack(_STATUS.size - PREFIX + len(described), *status) + described


def _texts(names: list[bytes]) -> list[str]:
    return [name.decode(errors="replace") for name in names[:MOST_NAMED]]


@mypyc_attr(allow_interpreted_subclasses=True)
class Ended:
    """A job that has ended successfully."""

    def __init__(self, at: float, names: list[bytes], account: Account | None) -> None:
        self.account = account
        """That of the agent that has said so; None if nothing is counted for it."""
        self.at = at
        """In seconds of the server's clock."""
        self.count: int = len(names)
        """How many agents its last round had."""
        self.names: list[bytes] = names[:MOST_NAMED]
        """The first of them."""

    def cost(self) -> int:
        """Return the bytes counted for it, besides its key."""
        return ENDED_BYTES + sum(map(len, self.names))


class AgentRegistry(SharedRequests):
    """The agents of one store. The base class of `JoinRegistry`."""

    def __init__(self, max_size: int, portion: int) -> None:
        super().__init__(max_size, portion)
        self.rounds: dict[bytes, Rounds] = {}
        """The rounds in which agents meet, keyed by the key of their job."""
        self.represented: dict[Waiter, Agent] = {}
        """The agent that each waiter represents. (An attribute of all waiters would enlarge them.)"""
        self.no_rounds: str = ""
        """Why no further rounds are formed; empty while they are."""
        self.ended: OrderedDict[bytes, Ended] = OrderedDict()
        """Jobs that are remembered to have ended successfully, oldest first, keyed by the key of the job."""

    def meet(self, waiter: Waiter, key: bytes, name: Framed, least: int, most: int, left: int) -> Framed | None:
        """Let an agent join the current round, or the next one: see `Rounds.join`. None if the waiter has to wait.

        Raises ProtocolError for numbers that make no sense, and after `end_rounds`.
        """
        self._require_idle(waiter)
        if not 1 <= least <= most or not PREFIX < len(name) <= _MAX_NAME:
            raise ProtocolError(
                f"invalid MEET: {least} to {most} agents, name length {counted(len(name) - PREFIX, 'byte')}"
            )
        agent, rounds = self._find(key, name)
        if self.no_rounds and (rounds is None or not rounds.closed):
            raise ProtocolError(f"MEET: {self.no_rounds}")
        if agent is None:
            if rounds is not None and rounds.closed:
                return _framed_answer((rounds.round, CLOSED, 0))
            self._make_room(AGENT_BYTES + len(name) + (ROUNDS_BYTES + len(key) if rounds is None else 0))
        if rounds is None:
            rounds = self._add_rounds(key)
        if agent is None:
            agent = rounds.add(unpack(name))
        self._represent(waiter, agent)
        rounds.see(agent)
        self._answer_first(agent)
        agent.parked = None
        answer = rounds.join(agent, least, most, left)
        self.answer_due(rounds)
        if answer is not None:
            return _framed_answer(answer)
        waiter.state = AWAITING_ROUND
        agent.parked = waiter
        return None

    def attend(self, waiter: Waiter, key: bytes, name: Framed, action: int, number: int) -> Framed:
        """Execute an action of an agent, unless there is no such agent; return the state of the rounds.

        Raises ProtocolError for an action that does not exist, and as another agent than one that waits in MEET.
        """
        if not LOOK <= action <= LEAVE or (action == BEAT and number < 1) or len(name) > _MAX_NAME:
            raise ProtocolError(
                f"invalid ATTEND: action {action}, argument {number}, name length {counted(len(name) - PREFIX, 'byte')}"
            )
        agent, rounds = self._find(key, name)
        if agent is not None and waiter.state == AWAITING_ROUND and self.represented.get(waiter) is not agent:
            raise ProtocolError("ATTEND as another agent than the one for which MEET waits")
        if rounds is None:
            if action != CLOSE:
                return _framed_status(_NO_ROUNDS)
            self._make_room(ROUNDS_BYTES + len(key))
            rounds = self._add_rounds(key)
        if agent is not None:
            self._represent(waiter, agent)
            rounds.see(agent)
        if action == CLOSE:
            self._note_end(key, rounds, agent, number == SUCCEEDED)
            rounds.close()
        elif agent is not None:
            if action == BEAT:
                rounds.beat(agent)
                if not rounds.expiring and not self._remove_silent(rounds, number):
                    rounds.expiring = True
                    self.defer(Later(self._remove_more_silent(rounds, number, self.account)))
            elif action == COMPLETE:
                rounds.complete(agent, number)
            elif action == LEAVE:
                self._answer_first(agent)
                rounds.leave(agent)
        self.answer_due(rounds)
        described = self._describe(key, rounds) if action == LOOK and number == DESCRIBE else b""
        return _framed_status(rounds.status(agent), described)

    def lose_agent(self, waiter: Waiter) -> None:
        """Dissociate the waiter from its agent; an agent without waiters is removed."""
        agent = self.represented.pop(waiter)
        if agent.parked is waiter:
            agent.parked = None
        agent.connections -= 1
        if agent.connections == 0:
            agent.rounds.remove(agent)
            self.answer_due(agent.rounds)

    def end_rounds(self, why: str) -> list[Waiter]:
        """Stop forming rounds; return the waiters of agents whose rounds are still open, for the caller to evict.

        Agents of closed rounds may still read and write what they end with.
        """
        if not self.clock.enters(self, "end_rounds", why):
            self.no_rounds = why
        return [waiter for waiter, agent in self.represented.items() if not agent.rounds.closed]

    def _remove_silent(self, rounds: Rounds, missing: int) -> bool:
        """Remove some agents that were silent for so many ticks; True if none is left."""
        for _ in range(_REMOVED_AT_ONCE):
            agent = rounds.silent(missing)
            if agent is None:
                return True
            self._answer_first(agent)
            rounds.remove(agent)
        return False

    def _remove_more_silent(self, rounds: Rounds, missing: int, account: Account | None) -> Iterator[None]:
        """Remove the others, for the account of the agent whose beat this follows from."""
        while rounds.expiring:
            before = self.charge(account)
            rounds.expiring = not self._remove_silent(rounds, missing)
            self.answer_due(rounds)
            self.charge(before)
            if rounds.expiring:
                yield

    def forget_rounds(self, key: bytes) -> None:
        """Forget the rounds under a key if they have no agents."""
        rounds = self.rounds[key]
        if not rounds.agents:
            del self.rounds[key]
            self.size -= len(key) + rounds.counted
            self._forget_end(key)

    def _answer(self, due: Due, agent: Agent, rank: int) -> None:
        """Answer an agent that is due, if it is parked and has not been removed."""
        waiter = self._parked(agent)
        if waiter is not None and (agent.group is due.group if due.closed < 0 else agent.group is not None):
            self._fire_answer(agent, waiter, due.answer(rank))

    def _note_end(self, key: bytes, rounds: Rounds, agent: Agent | None, succeeded: bool) -> None:
        """Remember that a job has ended successfully if the first of its agents to end says so, and none has failed.

        The agents of a round wait for each other at its end: one that has left it by then has failed, or was lost.
        """
        if rounds.standing(agent) != PARTICIPANT:
            return
        if not succeeded:
            self._forget_end(key)
        elif not rounds.closed and rounds.is_intact():
            self._forget_old_ends()
            ended = Ended(self.clock.now, rounds.group.names, self.account)
            size = len(key) + ended.cost()
            try:
                self._make_room(size)
            except (LimitError, NotAllowedError):
                return  # closing must not fail for want of memory
            self.ended[key] = ended
            self.size += size

    def _forget_end(self, key: bytes) -> None:
        ended = self.ended.pop(key, None)
        if ended is not None:
            before = self.charge(ended.account)
            self.size -= len(key) + ended.cost()
            self.charge(before)

    def _forget_old_ends(self) -> None:
        """Forget the jobs that ended too long ago, and make room for one more."""
        oldest = self.clock.now - REMEMBERED_SECONDS
        while self.ended:
            key, ended = next(iter(self.ended.items()))
            if ended.at > oldest and len(self.ended) < MOST_REMEMBERED:
                return
            self._forget_end(key)

    def _describe(self, key: bytes, rounds: Rounds) -> bytes:
        """Return who is in the current round, and how the job has ended if it did so successfully, as JSON."""
        described: dict[str, Any] = {"agents": _texts(rounds.group.names)}
        ended = self.ended.get(key)
        since = 0.0 if ended is None else self.clock.now - ended.at
        if ended is not None and since < REMEMBERED_SECONDS:
            described["ended"] = {"since": round(since, 3), "count": ended.count, "agents": _texts(ended.names)}
        return msgspec.json.encode(described)

    def _find(self, key: bytes, name: Framed) -> tuple[Agent | None, Rounds | None]:
        rounds = self.rounds.get(key)
        return None if rounds is None else rounds.agents.get(unpack(name)), rounds

    def _add_rounds(self, key: bytes) -> Rounds:
        rounds = self.rounds[key] = Rounds()
        self.size += len(key)
        return rounds

    def _represent(self, waiter: Waiter, agent: Agent) -> None:
        before = self.represented.get(waiter)
        if before is agent:
            return
        agent.connections += 1
        if before is not None:
            self.lose_agent(waiter)
        self.represented[waiter] = agent

    def _parked(self, agent: Agent) -> Waiter | None:
        """Return the waiter that is to be answered for an agent, if it still awaits that."""
        waiter: Waiter | None = agent.parked
        if waiter is None or waiter.state != AWAITING_ROUND or self.represented.get(waiter) is not agent:
            return None
        return waiter

    def _answer_first(self, agent: Agent) -> None:
        """Give an agent the answer that `_answer_each` may have for it: what follows makes that impossible."""
        if self.working:
            waiter = self._parked(agent)
            if waiter is not None:
                self.resolve(waiter)

    def answer_due(self, rounds: Rounds) -> None:
        """Count what rounds have grown by, and answer the agents that are due."""
        self.size += rounds.size - rounds.counted
        rounds.counted = rounds.size
        caller = rounds.caller
        if rounds.called and caller is not None:
            waiter = self._parked(caller)
            if waiter is not None:
                rounds.called = False
                self._fire_answer(caller, waiter, (rounds.round, LAST_CALL, rounds.calls))
        while rounds.due:
            due = rounds.due.pop(0)
            if len(due.agents) > self.portion:
                self.defer(Later(self._answer_each(due), partial(self._answer_waiter, due)))
            else:
                for rank, agent in enumerate(due.agents):
                    self._answer(due, agent, rank)

    def _answer_each(self, due: Due) -> Iterator[None]:
        """Answer the agents of a group that are parked."""
        for rank, agent in enumerate(due.agents):
            if rank and rank % self.portion == 0:
                yield
            self._answer(due, agent, rank)

    def _answer_waiter(self, due: Due, waiter: Waiter) -> None:
        agent = self.represented.get(waiter)
        if agent is not None and waiter.state == AWAITING_ROUND:
            if due.closed >= 0:
                if agent.rounds is due.rounds:
                    self._answer(due, agent, 0)
            elif agent.group is due.group:
                self._answer(due, agent, due.group.rank(agent))

    def _fire_answer(self, agent: Agent, waiter: Waiter, answer: Answer) -> None:
        agent.parked = None
        waiter.state = IDLE
        waiter.fire(_framed_answer(answer))
