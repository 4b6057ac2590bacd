"""Passes on replies of the admin socket to commands on other machines.

Knows the admin socket. Must not know HTTP.
Invariants: a bounded number of replies at a time; each is held line by line, and waits for its reader. Only requests
that change nothing and show no value are passed on.
"""

import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Final

import msgspec

from ...client.admin import ask
from ...diagnosis.facts import Session
from ..look.local import find_environments

MOST_REPLIES: Final = 2
"""Most replies under way."""

PARTS: Final = ("sessions", "counters", "keys", "stores", "oldest_stores", "stats", "waits", "largest")
"""Parts that may be requested."""

REPLY_SECONDS: Final = 60.0
"""Timeout of a whole reply."""


class BusyError(Exception):
    """Too many replies are under way."""


class _Sessions(msgspec.Struct):
    sessions: list[Session] = []


class Replies:
    """The replies of one server."""

    def __init__(self, find: Callable[[], Path]) -> None:
        """`find` returns the path of the admin socket, or raises DistNetworkError."""
        self._find = find
        self._free = threading.BoundedSemaphore(MOST_REPLIES)

    def lines(self, parts: list[str], store: str | None) -> Generator[bytes, None, None]:
        """Yield the lines of a reply, with line ends.

        Sessions are preceded by the environments of their processes, if they run on this machine: the reader may be
        on another. Raises what `ask` does, ValueError for an unknown part, and BusyError.
        """
        unknown = [part for part in parts if part not in PARTS]
        if unknown:
            raise ValueError(f"unknown part {unknown[0]!r}: choose from {', '.join(PARTS)}")
        if not self._free.acquire(blocking=False):
            raise BusyError(f"other requests are being answered; there may be {MOST_REPLIES} at a time")
        try:
            hosts: dict[str, bool] = {}
            for line in ask(self._find(), parts, REPLY_SECONDS, store=store):
                if "sessions" in parts and (sessions := _sessions(line)):
                    yield msgspec.json.encode({"environments": find_environments(sessions, hosts)}) + b"\n"
                yield line + b"\n"
        finally:
            self._free.release()


def _sessions(line: bytes) -> list[Session]:
    try:
        return msgspec.json.decode(line, type=_Sessions).sessions
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []  # the reader reports it
