"""What is said to a server and what it must answer: one form for recorded vectors and for cases of our own.

A script is a list of steps of named peers. Every answer is exact: what a peer hears is all that has come since it last
listened, and at the end nobody has anything more to hear.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from support import HANDSHAKE


@dataclass(frozen=True)
class Answer:
    """Bytes, and whether the connection is closed behind them. A reset counts as closed."""

    data: bytes = b""
    closed: bool = False

    def __str__(self) -> str:
        text = self.data.hex() if len(self.data) <= 64 else f"{self.data[:64].hex()}… ({len(self.data)} bytes)"
        return "+".join([text] * bool(self.data) + ["closed"] * self.closed) or "silent"


NO_REPLY = Answer()
CLOSED = Answer(closed=True)


class Deed(Enum):
    CONNECT = auto()
    SAY = auto()
    HEAR = auto()
    HALF_CLOSE = auto()
    CLOSE = auto()
    STOP_SERVER = auto()


@dataclass(frozen=True)
class Step:
    peer: str
    deed: Deed
    data: bytes = b""
    ours: Answer = NO_REPLY
    torch: Answer = NO_REPLY
    listed: int | None = None
    """Where in the answer a LIST_KEYS reply begins, whose keys may come in any order."""


@dataclass
class Script:
    name: str
    row: str = ""
    """The row of `docs/quirks.md` that this shows: why the two answers differ, or what both servers do."""
    steps: list[Step] = field(default_factory=list)

    @property
    def mended(self) -> bool:
        return any(step.ours != step.torch for step in self.steps)

    @property
    def stops_server(self) -> bool:
        return any(step.deed is Deed.STOP_SERVER for step in self.steps)

    def peer(self, name: str, *, greet: bool = True) -> Peer:
        """Connect somebody; unless told otherwise it says VALIDATE."""
        peer = Peer(self, name)
        self.steps.append(Step(name, Deed.CONNECT))
        if greet:
            peer.says(HANDSHAKE)
        return peer

    def peers(self, names: str) -> list[Peer]:
        return [self.peer(name) for name in names]


class Peer:
    """Writes the steps of one connection into a script."""

    def __init__(self, script: Script, name: str) -> None:
        self.script = script
        self.name = name

    def says(self, *frames: bytes) -> None:
        """Send everything in one piece."""
        self.script.steps.append(Step(self.name, Deed.SAY, b"".join(frames)))

    def hears(self, ours: Answer | bytes, torch: Answer | bytes | None = None, listed: int | None = None) -> None:
        ours = _answer(ours)
        torch = ours if torch is None else _answer(torch)
        self.script.steps.append(Step(self.name, Deed.HEAR, b"", ours, torch, listed))

    def asks(self, frame: bytes, reply: Answer | bytes, torch: Answer | bytes | None = None) -> None:
        self.says(frame)
        self.hears(reply, torch)

    def half_closes(self) -> None:
        self.script.steps.append(Step(self.name, Deed.HALF_CLOSE))

    def leaves(self) -> None:
        self.script.steps.append(Step(self.name, Deed.CLOSE))


def _answer(answer: Answer | bytes) -> Answer:
    return answer if isinstance(answer, Answer) else Answer(answer)


Writer = Callable[[Script], None]


def in_order(data: bytes, listed: int | None) -> bytes:
    """The answer with its list of keys sorted."""
    if listed is None:
        return data
    names = []
    at = listed + 8
    for _ in range(int.from_bytes(data[listed:at], "little")):
        stop = at + 8 + int.from_bytes(data[at : at + 8], "little")
        names.append(data[at:stop])
        at = stop
    return data[: listed + 8] + b"".join(sorted(names)) + data[at:]
