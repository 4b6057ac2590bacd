"""The agents of an elastic job: how an agent joins rounds, and stays in them.

An agent joins a round with MEET, which the server answers when the round is formed. Meanwhile and afterwards it sends
beats. It is removed when its connection is lost or its beats stop. This module knows the agent's part of that and its
timeouts; the server decides when a round is complete (`keyspace/rounds.py`). It must not know PyTorch.

Invariants: at least a beat's period passes between the reply to a beat and the next beat, on which the server relies.
Every request may be repeated.
"""

import os
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from struct import Struct
from typing import Final, NamedTuple

import msgspec

from ..base.deadline import Deadline
from ..base.errors import DistError, ProtocolError, StoreTimeoutError, counted
from ..base.keys import stored_key
from ..client import capabilities, exchanges, requests
from ..client.requests import Request
from ..client.sync_client import TCPClient
from ..keyspace.agents import BEAT, CLOSE, COMPLETE, DESCRIBE, LEAVE, LOOK, SUCCEEDED
from ..keyspace.rounds import CLOSED, FORMED, PARTICIPANT, REDUNDANT
from ..wire.commands import PARKS
from ..wire.values import PREFIX, Framed
from .tcp import TCPStore

_ANSWER: Final = Struct("<3q")
_STATUS: Final = Struct("<6q")

_BEATS: Final = 2
"""Beats within a keep-alive interval."""

_MAX_HOST: Final = 400
"""Bytes of a host's name in that of an agent."""

_CLOSED: Final = 2
"""`State.state` once no more rounds are formed."""

_SHORTEST: Final = 0.001
"""Shortest wait for a reply to MEET, in seconds."""

_FIRST_REPORT: Final = 30.0
"""Seconds until an agent reports that it still waits for a round."""

_NEXT_REPORT: Final = 60.0
"""Seconds between further reports."""

_MOST_LISTED: Final = 8
"""Agents that a text lists."""


class Options(NamedTuple):
    """Sizes of rounds, and timeouts in seconds."""

    least: int
    """Agents that a round needs."""
    most: int
    """Agents that a round admits."""
    join: float = 600.0
    """Timeout of joining a round."""
    last_call: float = 30.0
    """Time that a round waits for more agents than it needs."""
    close: float = 30.0
    """Timeout of closing the rounds."""
    heartbeat: float = 5.0
    """Timeout of a beat."""
    keep_alive_interval: float = 5.0
    """Interval in which an agent sends `_BEATS` beats."""
    keep_alive_max_attempt: int = 3
    """Intervals without beats after which an agent is considered dead."""

    def period(self) -> float:
        """Return the seconds between two beats."""
        return self.keep_alive_interval / _BEATS

    def missing(self) -> int:
        """Return the ticks of the server without a beat after which an agent is dead, for the time of its attempts.

        Two ticks may pass between two beats of an agent that is a little late, so only the third proves its death.
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


class Ended(msgspec.Struct, frozen=True):
    """The successful end of a job."""

    since: float
    """Seconds since then."""
    count: int
    """Number of agents in its last round."""
    agents: list[str]
    """Names of the first of them."""


class Description(msgspec.Struct, frozen=True):
    """Details that follow the state of the rounds on request. An older server sends none."""

    agents: list[str] = []
    """Names of the first agents of the current round."""
    ended: Ended | None = None
    """The end of the job, if it was successful and the server still remembers it."""


class RoundsClosed(DistError):
    """The agents of this job form no more rounds."""

    def __init__(self, redundant: bool) -> None:
        super().__init__("the rendezvous is closed")
        self.redundant = redundant
        """Whether the last round had enough agents without this one."""


def agent_name(host: str, number: int, run: str = "") -> bytes:
    """Return a name for the agent `number` of this process, which contains the run of its job.

    Agents get their ranks in the order of their names.
    """
    prefix = host.encode()[:_MAX_HOST]
    name = b"%s %010d %06d %s" % (prefix, os.getpid(), number, os.urandom(8).hex().encode())
    return name + b" " + run.encode() if run else name


def named_host(name: str) -> str:
    """Return the host in an agent's name."""
    host = name.partition(" ")[0]
    return host if host.isprintable() else ascii(host)


def named_run(name: str) -> str:
    """Return the run in an agent's name; empty if there is none."""
    return name.split(" ")[4] if name.count(" ") == 4 else ""


def _named_process(name: str, own: bool) -> str:
    pid = name.split(" ")[1].lstrip("0") if " " in name else ""
    said = [f"pid {pid}"] if pid.isdecimal() else []
    said += ["this agent"] if own else []
    return named_host(name) + (f" ({', '.join(said)})" if said else "")


class Pulse:
    """The time of an agent's next beat, which outlives the agent's calls."""

    def __init__(self, due: float) -> None:
        self.due = due
        """On the monotonic clock."""


def _no_report(text: str) -> None:
    pass


class Agent:
    """One agent, which meets others under a key of a store of ours. Closing the store removes the agent.

    Raises NotImplementedError if the server has no rounds. All methods raise StoreTimeoutError and DistNetworkError.
    """

    def __init__(self, store: TCPStore, key: str, name: bytes, options: Options) -> None:
        self.name = name
        self.options = options
        self._client = store._connection()
        self._key = stored_key(key)
        self._left = -1
        """The number of the current or last round."""
        self.pulse = Pulse(time.monotonic() + options.period())
        require_rounds(self._client)

    def join(self, report: Callable[[str], object] = _no_report) -> Round:
        """Leave the current round and return the next one once it is formed. Raises RoundsClosed.

        Raises StoreTimeoutError after `Options.join`, which starts again while the agent is redundant. While it waits,
        `report` is called with what is missing, at first after `_FIRST_REPORT` seconds.
        """
        steps = joining(self._key, self.name, self.options, self._left, self.pulse, time.monotonic, report)
        found = exchanges.run(self._perform, steps)
        self._left = found.number
        return found

    def beat(self) -> State:
        """Send a beat. The caller waits until `pulse.due` before each beat, and does not join meanwhile."""
        try:
            return self._attend(BEAT, self.options.missing(), self.options.heartbeat)
        finally:
            self.pulse.due = time.monotonic() + self.options.period()

    def look(self) -> State:
        """Return the state of the rounds."""
        return self._attend(LOOK)

    def close(self, succeeded: bool = False) -> None:
        """Close the rounds for all agents, and tell the server whether this agent's workers have succeeded."""
        self._attend(CLOSE, SUCCEEDED if succeeded else 0, self.options.close)

    def _perform(self, step: tuple[Request, float]) -> Framed | None:
        """Make the call of a step of `joining`; return None for a MEET that takes too long."""
        request, seconds = step
        reply: Framed | None = None
        if request[0].flags & PARKS:
            with suppress(StoreTimeoutError):
                reply = self._client.call_blocking(request, seconds)
        else:
            reply = self._client.call(request)
        return reply

    def _attend(self, action: int, number: int = 0, seconds: float | None = None) -> State:
        return _attend(self._client, requests.attend(self._key, self.name, action, number), seconds)


def joining(
    key: bytes,
    name: bytes,
    options: Options,
    left: int,
    pulse: Pulse,
    clock: Callable[[], float],
    report: Callable[[str], object] = _no_report,
) -> Generator[tuple[Request, float], Framed | None, Round]:
    """Yield the requests with which an agent joins a round, having left the round `left`; return the round.

    Each request comes with the seconds to wait for its reply. A MEET that takes longer gets None; other requests are
    answered at once. While no round is formed, `report` is called with what is missing. Raises RoundsClosed, and
    StoreTimeoutError after the join timeout.
    """
    began = now = clock()
    report_at = began + _FIRST_REPORT
    deadline = now + options.join
    call, call_end = 0, 0.0
    meet = requests.meet(key, name, options.least, options.most, left)
    needed = (
        counted(options.least, "agent")
        if options.least == options.most
        else f"{options.least} to {options.most} agents"
    )
    while True:
        until = min(deadline, report_at, pulse.due, call_end if call else deadline)
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
            missing = _standing((yield requests.attend(key, name, LOOK, DESCRIBE), 0.0), name)
            reply = yield requests.attend(key, name, LEAVE), 0.0
            assert reply is not None
            state = State(*_STATUS.unpack_from(reply, PREFIX))
            if state.standing != REDUNDANT and (state.standing != PARTICIPANT or state.round == left):
                raise StoreTimeoutError(f"no round of {needed} was formed within {options.join:g} s: {missing}")
            now = clock()
            deadline = now + options.join  # redundant, or the round has just been formed and MEET is answered at once
        elif now >= report_at:
            missing = _standing((yield requests.attend(key, name, LOOK, DESCRIBE), 0.0), name)
            now = clock()
            report_at = now + _NEXT_REPORT
            if missing:
                report(f"no round of {needed} has been formed for {now - began:.0f} s: {missing}")


def _standing(reply: Framed | None, name: bytes) -> str:
    """Return the agents of a round that is not formed, from the reply to LOOK; empty if this one is redundant."""
    assert reply is not None
    state, described = _described(reply)
    if state.standing == REDUNDANT:
        return ""
    count = state.participants
    agents = [_named_process(one, one == name.decode(errors="replace")) for one in described.agents[:_MOST_LISTED]]
    more = [f"{count - len(agents):,} more"] if agents and count > len(agents) else []
    listed = f": {', '.join(agents + more)}" if agents else ""
    if state.state == FORMED:
        return f"this agent waits for the next round; the current one has {counted(count, 'agent')}{listed}"
    return f"{counted(count, 'agent')} {'has' if count == 1 else 'have'} joined{listed}"


def is_closed(store: TCPStore, key: str) -> bool:
    """Return whether the rounds under a key are closed, without joining. Raises NotImplementedError."""
    client = store._connection()
    require_rounds(client)
    return _attend(client, requests.attend(stored_key(key), b"", LOOK), None).closed


def how_ended(store: TCPStore, key: str) -> Ended | None:
    """Return the end of the job under a key, if it was successful and the server remembers it."""
    return _described(store._connection().call(requests.attend(stored_key(key), b"", LOOK, DESCRIBE)))[1].ended


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


def _described(reply: Framed) -> tuple[State, Description]:
    """Return the state of the rounds and its details. Raises ProtocolError."""
    state = State(*_STATUS.unpack_from(reply, PREFIX))
    try:
        return state, msgspec.json.decode(reply[PREFIX + _STATUS.size :] or b"{}", type=Description)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ProtocolError("invalid reply to ATTEND") from None
