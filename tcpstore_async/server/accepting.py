"""Accepting connections on a loop, many per turn, as raw descriptors.

Knows listening sockets and the errors of `accept`. Must not know what a connection is for.
Invariant: no error ends accepting: it continues with the next connection, or after a pause.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Final

from ..base.addresses import format_address, unmapped
from .listen_socket import CONNECTION_ERRORS

_ACCEPTS_PER_TURN: Final = 128
"""Connections accepted per turn of the loop: with one, new connections would wait behind busy ones."""

ACCEPT_PAUSE: Final = 0.1
"""Seconds without accepting after the system refused a descriptor, memory or a thread."""


class Acceptor:
    """Accepts the connections of one listening socket."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        serve: Callable[[int, str, int], None],
        served: Callable[[], None] | None,
        log: Callable[[str, str], None],
    ) -> None:
        """Call `serve` with the descriptor, host and port of each connection; it closes what it rejects.

        If `serve` raises, it has left the descriptor open. `served` is called after each batch of connections. `log`
        gets a kind, whose messages are rate-limited together, and the message.
        """
        self._loop = loop
        self.listener = listener
        self._serve = serve
        self._served = served
        self._log = log
        self._accepting = False

    def resume(self) -> None:
        """Accept connections from now on, unless the socket has been closed. Idempotent."""
        if self.listener.fileno() >= 0 and not self._accepting:
            self._accepting = True
            self._loop.add_reader(self.listener.fileno(), self._accept)

    def pause(self) -> None:
        """Leave connections in the backlog. Idempotent."""
        if self._accepting:
            self._accepting = False
            self._loop.remove_reader(self.listener.fileno())

    def close(self) -> None:
        """Stop accepting, and free the port. Idempotent."""
        self.pause()
        self.listener.close()

    def hold(self, reason: str) -> None:
        """Log the reason and accept nothing for a moment: the system lacks descriptors, memory or threads."""
        self._log("accept", f"cannot accept connections for now: {reason}")
        self.pause()
        self._loop.call_later(ACCEPT_PAUSE, self.resume)

    def _accept(self) -> None:
        # socket.accept() wraps each descriptor in a socket object: 2.5 µs of the 17 that the start of a rank costs.
        accept = self.listener._accept  # type: ignore[attr-defined]
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                fd, address = accept()
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                if error.errno in CONNECTION_ERRORS:
                    continue
                self.hold(error.strerror or str(error))
                break
            try:
                self._serve(fd, unmapped(address[0]), address[1])
            except Exception as error:
                os.close(fd)
                self._log("accept", f"rejected {format_address(address[0], address[1])}: {error!r}")
            if not self._accepting:  # `serve` has paused it
                break
        if self._served is not None:
            self._served()
