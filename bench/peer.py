"""One blocking connection to a server under test.

Knows a socket. Must not know what is said on it.
Invariant: whatever goes wrong is a LoadError of one line; nothing waits longer than the limit.
"""

from __future__ import annotations

import socket

from tcpstore_async.load.generator import Late, Unreachable, late


class Peer:
    """Connects when it is made, and goes when its context ends. `limit`: seconds for each answer. Raises LoadError."""

    def __init__(self, port: int, limit: float, *, name: str = "a connection", source: str = "") -> None:
        self._name = name
        self._limit = limit
        try:
            self._socket = socket.create_connection(("127.0.0.1", port), limit, (source, 0) if source else None)
        except TimeoutError:
            raise self._late() from None
        except OSError as error:
            raise Unreachable(f"{name} cannot be made: {error.strerror or error}") from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *why: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def ask(self, request: bytes, reply: int) -> bytes:
        """Send a request; the answer, of so many bytes."""
        answer = b""
        try:
            self._socket.sendall(request)
            while len(answer) < reply:
                piece = self._socket.recv(reply - len(answer))
                if not piece:
                    raise Unreachable(f"{self._name} has lost the server, which has closed it")
                answer += piece
        except TimeoutError:
            raise self._late() from None
        except OSError as error:
            raise Unreachable(f"{self._name} has lost the server: {error.strerror or error}") from None
        return answer

    def _late(self) -> Late:
        return late(self._limit, f"{self._name} was not answered")
