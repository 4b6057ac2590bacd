"""Rank 0 of a job, which is not done before all others have joined.

Knows one blocking connection, and how PyTorch's constructor waits. Must not know the other ranks' load or any budget.
Invariant: it speaks as PyTorch's constructor does, request by request and pause by pause.
"""

from __future__ import annotations

import socket
import time

from tcpstore_async.load.generator import Late, Unreachable
from tcpstore_async.load.requests import join, said

PAUSE = 0.01
"""Seconds between two looks, as in PyTorch's `waitForWorkers`."""
_WAIT = said("wait", [b"init/"])
_GET = said("get", b"init/")


class FirstRank:
    """Connects, shakes hands and joins when it is made; a context, at whose end it goes. Raises Unreachable."""

    def __init__(self, port: int, limit: float, source: str = "") -> None:
        self.began = time.perf_counter()
        """Seconds of the monotonic clock."""
        self._deadline = time.monotonic() + limit
        try:
            self._socket = socket.create_connection(("127.0.0.1", port), limit, (source, 0) if source else None)
        except OSError as error:
            raise Unreachable(f"rank 0 cannot connect: {error.strerror or error}") from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for step in join():
            self._ask(step.request, step.reply)

    def __enter__(self) -> FirstRank:
        return self

    def __exit__(self, *why: object) -> None:
        self._socket.close()

    def sees(self, ranks: int) -> float | None:
        """Look until so many have joined; when that was, on the monotonic clock, or None if it is too late.

        Raises LoadError.
        """
        while time.monotonic() < self._deadline:
            self._ask(_WAIT, 1)
            if self._joined() >= ranks:
                return time.perf_counter()
            time.sleep(PAUSE)
        return None

    def _joined(self) -> int:
        size = int.from_bytes(self._ask(_GET, 8), "little")
        return int(self._ask(b"", size))

    def _ask(self, request: bytes, reply: int) -> bytes:
        """The answer, of so many bytes."""
        answer = b""
        try:
            self._socket.sendall(request)
            while len(answer) < reply:
                piece = self._socket.recv(reply - len(answer))
                if not piece:
                    raise Unreachable("rank 0 has lost the server: it has closed the connection")
                answer += piece
        except TimeoutError:
            raise Late("rank 0 was not answered in time") from None
        except OSError as error:
            raise Unreachable(f"rank 0 has lost the server: {error.strerror or error}") from None
        return answer
