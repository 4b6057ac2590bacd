"""Ask relays what the processes of their ranks do.

Knows links, and the form of an answer. Must not know who asks, or what follows from an answer.

Invariants: nothing but the question enters the stores. A relay that answers late, not at all or with anything else
counts as silent, and delays nobody beyond the deadline. What is kept of answers is bounded.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

import msgspec

from ..base.addresses import format_address
from ..links.link_server import ServerLink
from ..links.work import ignore
from ..session.peer import printable
from ..stacks.report import HostReport
from .base import Server
from .due import Due

_MOST_BYTES: Final = 16 << 20
"""Bytes of answers that have not been passed on. Relays whose answers exceed it count as silent."""

_LINKS: Final = 16
"""Relays that are asked together, or so many that this happens `_PORTIONS` times."""

_PORTIONS: Final = 100

_PAUSE_SECONDS: Final = 0.002
"""Time between two of them."""

_MOST_SILENT: Final = 32
"""Silent relays that are named."""


class Question:
    """One question to all relays of a server. There must be no other one before it is over."""

    def __init__(self, server: Server, seconds: float) -> None:
        """Ask soon, and take answers for so long."""
        links = server.links
        self._server = server
        self._number = secrets.randbits(32)
        self._until = server.loop.time() + seconds
        self.over = False
        """Whether no more answers are taken."""
        self._left = {link: None for link in links.links.values() if link.examines}
        """Links whose relays may still answer."""
        self._to_ask = iter(list(self._left))
        self._portion = max(_LINKS, len(self._left) // _PORTIONS)
        self._older = len(links.links) - len(self._left)
        self._silent: list[ServerLink] = []
        """Those whose relays have not answered, for whatever reason."""
        self._answers: deque[tuple[ServerLink, bytes]] = deque()
        self._bytes = 0
        """Of these."""
        self._answered = 0
        self._news = asyncio.Event()
        links.on_examined = self._take
        self._asking = Due(server.loop, server.call_soon, server.turn, self._ask_some)
        self._asking.expect()
        self._deadline = server.loop.call_at(self._until, self.end)

    def end(self) -> None:
        """Take no more answers. Idempotent."""
        if not self.over:
            self.over = True
            self._asking.cancel()
            self._deadline.cancel()
            self._server.links.on_examined = ignore
            self._silent += self._left
            self._news.set()

    async def wait(self) -> bool:
        """Wait for the next answers; return False if there will be none."""
        while not self._answers and not self.over:
            self._news.clear()
            await self._news.wait()
        return len(self._answers) > 0

    def answers(self) -> Iterator[dict[str, Any]]:
        """Yield each of those that have arrived."""
        while self._answers:
            link, report = self._answers.popleft()
            self._bytes -= len(report)
            try:
                found = msgspec.json.decode(report, type=HostReport)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self._silent.append(link)
                continue
            self._answered += 1
            yield {"stacks": found}

    def relays(self) -> dict[str, Any]:
        """Return how many relays were asked, and which have not answered."""
        return {
            "asked": self._answered + len(self._silent),
            "answered": self._answered,
            "silent": [_name(link) for link in self._silent[:_MOST_SILENT]],
            "older": self._older,
        }

    def _ask_some(self) -> float | None:
        """Ask some relays; return when to go on. All at once would hold up the store's peers."""
        some = list(islice(self._to_ask, self._portion))
        milliseconds = max(0, round(1000 * (self._until - self._server.loop.time())))
        for link in some:
            if link not in self._left:
                continue  # it has answered a question that was put to another one
            if link.connection is not None:
                link.examine(self._number, milliseconds)
            else:
                del self._left[link]
                self._silent.append(link)
        if not self._left:
            self.end()
        return _PAUSE_SECONDS if some else None

    def _take(self, link: ServerLink, number: int, report: bytes) -> None:
        if number != self._number or link not in self._left:
            return
        del self._left[link]
        if self._bytes + len(report) > _MOST_BYTES:
            self._silent.append(link)
        else:
            self._answers.append((link, report))
            self._bytes += len(report)
        self._news.set()
        if not self._left:
            self.end()


def _name(link: ServerLink) -> str:
    """Return the host of a relay, and its port if that is known."""
    port = printable(link.place).rpartition(":")[2]
    return format_address(link.host, int(port)) if port.isdecimal() and len(port) <= 5 else link.host
