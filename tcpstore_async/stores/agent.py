"""The agents of an elastic job: how one meets the others, and stays one of them.

An agent joins a round with MEET, which the server answers when the round is formed. Meanwhile and afterwards it sends
beats. It is removed when its connection is lost or its beats stop. This module knows the agent's part of that, its
timeouts included; what makes a round complete is decided by the server (`rounds.py`). It does not know PyTorch.

Invariants: at least a beat's period passes between the reply to a beat and the next one, on which the server relies.
Every request may be repeated.
"""

import os
import time
from collections.abc import Callable, Generator
from struct import Struct
from typing import Final, NamedTuple

from ..agents import BEAT, CLOSE, COMPLETE, LEAVE, LOOK
from ..client import capabilities, requests
from ..client.pool import TCPClient
from ..client.requests import Request
from ..deadline import Deadline
from ..errors import DistError, StoreTimeoutError, counted
from ..keys import stored_key
from ..rounds import CLOSED, PARTICIPANT, REDUNDANT
from ..values import PREFIX, Framed
from .tcp import TCPStore

_ANSWER: Final = Struct("<3q")
_STATUS: Final = Struct("<6q")

_BEATS: Final = 2
"""Beats within a keep-alive interval."""

_MAX_HOST: Final = 400
"""Bytes of a host's name in that of an agent."""

_CLOSED: Final = 2

_SHORTEST: Final = 0.001
"""Seconds that an agent waits at least for its rank."""


class Options(NamedTuple):
    """How agents meet; times in seconds."""

    least: int
    most: int
    """How many agents a round needs, and admits."""
    join: float = 600.0
    """How long to wait for a round."""
    last_call: float = 30.0
    """How long a round waits for more agents than it needs."""
    close: float = 30.0
    """How long closing may take."""
    heartbeat: float = 5.0
    """How long a beat may take."""
    keep_alive_interval: float = 5.0
    keep_alive_max_attempt: int = 3
    """An agent that sends no beats for as many intervals is taken for dead."""

    def period(self) -> float:
        """Return the seconds between two beats."""
        return self.keep_alive_interval / _BEATS

    def missing(self) -> int:
        """Return after how many ticks of the server an agent is dead, so that this takes as long as its attempts.

        Two ticks may pass between two beats of an agent that is a little late, so the third is the first to prove it.
        """
        return max(3, _BEATS * self.keep_alive_max_attempt - 1)


class Round(NamedTuple):
    """A round as one agent sees it."""

    number: int
    rank: int
    world: int


class State(NamedTuple):
    """The state of the rounds; see `rounds.Status`."""

    round: int
    state: int
    participants: int
    waiting: int
    standing: int
    call: int

    @property
    def closed(self) -> bool:
        """Whether no more rounds are formed."""
        return self.state == _CLOSED


class RoundsClosed(DistError):
    """The agents of this job form no more rounds."""

    def __init__(self, redundant: bool) -> None:
        super().__init__("the rendezvous is closed")
        self.redundant = redundant
        """Whether this agent was one too many for the last round."""


def agent_name(host: str, number: int) -> bytes:
    """Return a name for the agent `number` of this process. Agents have their ranks in the order of names."""
    prefix = host.encode()[:_MAX_HOST]
    return b"%s %010d %06d %s" % (prefix, os.getpid(), number, os.urandom(8).hex().encode())


class Pulse:
    """When the next beat of an agent is due, whatever it does meanwhile."""

    def __init__(self, due: float) -> None:
        self.due = due
        """On the monotonic clock."""


class Agent:
    """One agent, which meets others under a key of a store of ours. Closing the store removes it.

    Raises NotImplementedError if the server has no rounds. All methods raise StoreTimeoutError and DistNetworkError.
    """

    def __init__(self, store: TCPStore, key: str, name: bytes, options: Options) -> None:
        self.name = name
        self.options = options
        self._client = store._connection()
        self._key = stored_key(key)
        self._left = -1
        """The round that it is in, or was in last."""
        self.pulse = Pulse(time.monotonic() + options.period())
        require_rounds(self._client)

    def join(self) -> Round:
        """Leave the current round and return the next one once it is formed. Raises RoundsClosed.

        Raises StoreTimeoutError after `Options.join`, which begins anew when the agent is redundant no more.
        """
        steps = joining(self._key, self.name, self.options, self._left, self.pulse, time.monotonic)
        reply: Framed | None = None
        try:
            while True:
                request, seconds = steps.send(reply)
                reply = self._meet(request, seconds) if request[0].parks else self._client.call(request)
        except StopIteration as end:
            found: Round = end.value
            self._left = found.number
            return found

    def beat(self) -> State:
        """Send a beat. The caller waits until `pulse.due` before each, and does not join meanwhile."""
        try:
            return self._attend(BEAT, self.options.missing(), self.options.heartbeat)
        finally:
            self.pulse.due = time.monotonic() + self.options.period()

    def look(self) -> State:
        """Return the state of the rounds."""
        return self._attend(LOOK)

    def close(self) -> None:
        """Close the rounds for all agents."""
        self._attend(CLOSE, 0, self.options.close)

    def _meet(self, request: Request, seconds: float) -> Framed | None:
        try:
            reply: Framed = self._client.call_blocking(request, seconds)
        except StoreTimeoutError:
            return None
        return reply

    def _attend(self, action: int, number: int = 0, seconds: float | None = None) -> State:
        return _attend(self._client, requests.attend(self._key, self.name, action, number), seconds)


def joining(
    key: bytes, name: bytes, options: Options, left: int, pulse: Pulse, clock: Callable[[], float]
) -> Generator[tuple[Request, float], Framed | None, Round]:
    """Yield the requests by which an agent joins a round, having left the round `left`; return the round.

    With each request comes the time to wait for the reply, in seconds: MEET may take longer, and gets None. Other
    requests are answered at once. Raises RoundsClosed, and StoreTimeoutError after the join timeout.
    """
    now = clock()
    deadline = now + options.join
    call, call_end = 0, 0.0
    meet = requests.meet(key, name, options.least, options.most, left)
    while True:
        until = min(deadline, pulse.due, call_end if call else deadline)
        answer = yield meet, max(_SHORTEST, until - now)
        now = clock()
        if answer is not None:
            number, rank, detail = _ANSWER.unpack_from(answer, PREFIX)
            if rank >= 0:
                return Round(number, rank, detail)
            if rank == CLOSED:
                raise RoundsClosed(bool(detail))
            call, call_end = detail, now + options.last_call
        elif call and now >= call_end:
            yield requests.attend(key, name, COMPLETE, call), 0.0
            call = 0
        elif now >= pulse.due:
            reply = yield requests.attend(key, name, BEAT, options.missing()), 0.0
            assert reply is not None
            state = State(*_STATUS.unpack_from(reply, PREFIX))
            now = clock()
            pulse.due = now + options.period()
            if state.call != call:  # the answer to an earlier request was lost, or the call was revoked
                call, call_end = state.call, now + options.last_call
            if state.standing == REDUNDANT:
                deadline = now + options.join
        elif now >= deadline:
            reply = yield requests.attend(key, name, LEAVE), 0.0
            assert reply is not None
            state = State(*_STATUS.unpack_from(reply, PREFIX))
            if state.standing != REDUNDANT and (state.standing != PARTICIPANT or state.round == left):
                raise StoreTimeoutError(
                    f"no round of {counted(options.least, 'agent')} was formed within {options.join:g} s"
                )
            now = clock()
            deadline = now + options.join  # redundant, or the round was formed just now and MEET is answered at once


def is_closed(store: TCPStore, key: str) -> bool:
    """Return whether the rounds under a key are closed, without taking part. Raises NotImplementedError."""
    client = store._connection()
    require_rounds(client)
    return _attend(client, requests.attend(stored_key(key), b"", LOOK), None).closed


def require_rounds(client: TCPClient) -> None:
    """Raise NotImplementedError if the server has no rounds."""
    if not client.supports(capabilities.EXTENSION, requests.attend(b"", b"", LOOK)):
        raise NotImplementedError(
            f"the server at {client.host}:{client.port} does not support this rendezvous backend: it is PyTorch's, or "
            "runs an older version of this package"
        )


def _attend(client: TCPClient, request: Request, seconds: float | None) -> State:
    state = client.call(request, None if seconds is None else Deadline.of_a_call(seconds))
    return State(*_STATUS.unpack_from(state, PREFIX))
