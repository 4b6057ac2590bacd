"""Rank 0 of a job, which is not done before all others have joined.

Knows how PyTorch's constructor waits. Must not know the other ranks' load or any budget.
Invariant: it speaks as PyTorch's constructor does, request by request and pause by pause.
"""

from __future__ import annotations

import time

from bench.peer import Peer
from tcpstore_async.load.generator import LoadError
from tcpstore_async.load.requests import join, said

PAUSE = 0.01
"""Seconds between two looks, as in PyTorch's `waitForWorkers`."""
_WAIT = said("wait", [b"init/"])
_GET = said("get", b"init/")


class FirstRank:
    """Connects, shakes hands and joins when it is made; a context, at whose end it goes. Raises LoadError."""

    def __init__(self, port: int, limit: float, source: str = "") -> None:
        self.began = time.perf_counter()
        """Seconds of the monotonic clock."""
        self._deadline = time.monotonic() + limit
        self._peer = Peer(port, limit, name="rank 0's connection", source=source)
        try:
            for step in join():
                self._peer.ask(step.request, step.reply)
        except LoadError:
            self._peer.close()
            raise

    def __enter__(self) -> FirstRank:
        return self

    def __exit__(self, *why: object) -> None:
        self._peer.close()

    def sees(self, ranks: int) -> float | None:
        """Look until so many have joined; when that was, on the monotonic clock, or None if it is too late.

        Raises LoadError.
        """
        while time.monotonic() < self._deadline:
            self._peer.ask(_WAIT, 1)
            if self._joined() >= ranks:
                return time.perf_counter()
            time.sleep(PAUSE)
        return None

    def _joined(self) -> int:
        size = int.from_bytes(self._peer.ask(_GET, 8), "little")
        return int(self._peer.ask(b"", size))
