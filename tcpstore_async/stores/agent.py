"""The agents of an elastic job: how one meets the others, and stays one of them.

An agent joins a round with MEET, which the server answers when the round is formed. Meanwhile and afterwards it sends
beats. It is removed when its connection is lost or its beats stop. This module knows the agent's part of that, its
timeouts included; the server decides what makes a round complete (`keyspace/rounds.py`). It does not know PyTorch.

Invariants: at least a beat's period passes between the reply to a beat and the next one, on which the server relies.
Every request may be repeated.
"""

import os
import time
from collections.abc import Callable, Generator
from struct import Struct
from typing import Final, NamedTuple

import msgspec

from ..base.deadline import Deadline
from ..base.errors import DistError, ProtocolError, StoreTimeoutError, counted
from ..base.keys import stored_key
from ..client import capabilities, requests
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

_SHORTEST: Final = 0.001
"""Seconds that an agent waits at least for its rank."""

_FIRST_REPORT: Final = 30.0
_NEXT_REPORT: Final = 60.0
"""Seconds until an agent reports that it still waits for a round, and from then on between two reports."""

_MOST_LISTED: Final = 8
"""Agents that a text lists."""


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


class Ended(msgspec.Struct, frozen=True):
    """How a job ended that did so successfully."""

    since: float
    """How many seconds ago."""
    count: int
    """How many agents its last round had."""
    agents: list[str]
    """The names of the first of them."""


class Description(msgspec.Struct, frozen=True):
    """What follows the state of the rounds if an agent asks for it. An older server says nothing."""

    agents: list[str] = []
    """The names of the first agents of the current round."""
    ended: Ended | None = None
    """How the job has ended, if it did so successfully and the server still knows."""


class RoundsClosed(DistError):
    """The agents of this job form no more rounds."""

    def __init__(self, redundant: bool) -> None:
        super().__init__("the rendezvous is closed")
        self.redundant = redundant
        """Whether this agent was one too many for the last round."""


def agent_name(host: str, number: int, run: str = "") -> bytes:
    """Return a name for the agent `number` of this process, which also says to which run of its job it belongs.

    Agents have their ranks in the order of names.
    """
    prefix = host.encode()[:_MAX_HOST]
    name = b"%s %010d %06d %s" % (prefix, os.getpid(), number, os.urandom(8).hex().encode())
    return name + b" " + run.encode() if run else name


def named_host(name: str) -> str:
    """Return the host in an agent's name."""
    host = name.partition(" ")[0]
    return host if host.isprintable() else ascii(host)


def named_run(name: str) -> str:
    """Return the run in an agent's name; empty if it says none."""
    return name.split(" ")[4] if name.count(" ") == 4 else ""


def _named_process(name: str, own: bool) -> str:
    pid = name.split(" ")[1].lstrip("0") if " " in name else ""
    said = [f"pid {pid}"] if pid.isdecimal() else []
    said += ["this agent"] if own else []
    return named_host(name) + (f" ({', '.join(said)})" if said else "")


class Pulse:
    """When the next beat of an agent is due, whatever it does meanwhile."""

    def __init__(self, due: float) -> None:
        self.due = due
        """On the monotonic clock."""


def _to_nobody(text: str) -> None:
    """Report to nobody."""


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

    def join(self, report: Callable[[str], object] = _to_nobody) -> Round:
        """Leave the current round and return the next one once it is formed. Raises RoundsClosed.

        Raises StoreTimeoutError after `Options.join`, which begins anew when the agent is redundant no more. Until
        then, `report` is called now and then with what is missing.
        """
        steps = joining(self._key, self.name, self.options, self._left, self.pulse, time.monotonic, report)
        reply: Framed | None = None
        try:
            while True:
                request, seconds = steps.send(reply)
                reply = self._meet(request, seconds) if request[0].flags & PARKS else self._client.call(request)
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

    def close(self, succeeded: bool = False) -> None:
        """Close the rounds for all agents; tell whether this agent's workers have succeeded."""
        self._attend(CLOSE, SUCCEEDED if succeeded else 0, self.options.close)

    def _meet(self, request: Request, seconds: float) -> Framed | None:
        try:
            reply: Framed = self._client.call_blocking(request, seconds)
        except StoreTimeoutError:
            return None
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
    report: Callable[[str], object] = _to_nobody,
) -> Generator[tuple[Request, float], Framed | None, Round]:
    """Yield the requests by which an agent joins a round, having left the round `left`; return the round.

    With each request comes the time to wait for the reply, in seconds: MEET may take longer, and gets None. Other
    requests are answered at once. While no round is formed, `report` is called now and then with what is missing.
    Raises RoundsClosed, and StoreTimeoutError after the join timeout.
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
            deadline = now + options.join  # redundant, or the round was formed just now and MEET is answered at once
        elif now >= report_at:
            missing = _standing((yield requests.attend(key, name, LOOK, DESCRIBE), 0.0), name)
            now = clock()
            report_at = now + _NEXT_REPORT
            if missing:
                report(f"no round of {needed} has been formed for {now - began:.0f} s: {missing}")


def _standing(reply: Framed | None, name: bytes) -> str:
    """Return who has come to a round that is not formed, from the reply to LOOK; empty for a redundant agent."""
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
    """Return whether the rounds under a key are closed, without taking part. Raises NotImplementedError."""
    client = store._connection()
    require_rounds(client)
    return _attend(client, requests.attend(stored_key(key), b"", LOOK), None).closed


def how_ended(store: TCPStore, key: str) -> Ended | None:
    """Return how the job under a key has ended, if it did so successfully and the server knows."""
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
    """Return the state of the rounds and what follows it. Raises ProtocolError."""
    state = State(*_STATUS.unpack_from(reply, PREFIX))
    try:
        return state, msgspec.json.decode(reply[PREFIX + _STATUS.size :] or b"{}", type=Description)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ProtocolError("invalid reply to ATTEND") from None
