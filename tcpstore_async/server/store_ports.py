"""Ports of a server that stand for stores with names, for clients that can say no name: PyTorch's C++ client.

Knows listening sockets and their numbers. Must not know the protocol, or what a store is.

Invariants: a port listens where the server does before anybody learns of it, and is closed with its store. Ports leave
most of what the server can hold to connections.
"""

import asyncio
import errno
import socket
from collections.abc import Callable
from functools import partial
from typing import Final

from ..session.named_stores import NamedStore
from .accepting import Acceptor
from .fork_safety import close_on_fork
from .listen_socket import listen_at, v6_only

ANY: Final = range(1)
"""Port 0, for which the kernel chooses a free one."""

NONE: Final = range(0)

_TRIES: Final = 64
"""Ports of a range that are tried for one store, in some 0.3 ms; the next store goes on with the next ones."""

_SHARE: Final = 4
"""One in so many of the connections that a server can hold may be a port instead."""


class StorePorts:
    """The ports of one server. To be used with the server's lock."""

    def __init__(
        self,
        listener: socket.socket,
        loop: asyncio.AbstractEventLoop,
        call_soon: Callable[[Callable[[], object]], None],
        serve: Callable[[int, str, int, NamedStore | None], None],
        served: Callable[[], None],
        log: Callable[[str, str], None],
    ) -> None:
        """`listener` listens where the ports shall; `call_soon` has the loop call a function.

        `serve` gets the descriptor, host and port of each connection, and the store whose port it has come to; like
        the others, it is as for an `Acceptor`.
        """
        self.numbers: range = ANY
        """From which the ports are taken."""
        self.most: int = 0
        """How many there may be; known once the server has started."""
        self._address = listener.getsockname()
        self._family = listener.family
        self._v6_only = v6_only(listener)
        self._loop = loop
        self._call_soon = call_soon
        self._serve = serve
        self._served = served
        self._log = log
        self._acceptors: dict[NamedStore, Acceptor] = {}
        self._next = 0
        """The place in `numbers` of the next one to try."""
        self._stopped = False

    def __len__(self) -> int:
        return len(self._acceptors)

    def reserve(self, connections: int) -> None:
        """Learn how many connections the server can hold."""
        self.most = connections // _SHARE

    def open(self, store: NamedStore) -> int | str:
        """Listen for a store; return the port, or why there can be none."""
        if self._stopped:
            return "the server is stopping"
        if not self.numbers:
            return "the server offers none (--store-ports 0)"
        if len(self) >= self.most:
            return f"{len(self)} stores have one already, and the server has no more (a quarter of its connections)"
        try:
            listener = close_on_fork(self._listen())
        except OSError as error:
            where = "" if self.numbers == ANY else f" on any of the ports {self.numbers[0]}-{self.numbers[-1]}"
            return f"the server cannot listen{where}: {error.strerror or error}"
        acceptor = Acceptor(self._loop, listener, partial(self._accepted, store), self._served, self._log)
        self._acceptors[store] = acceptor
        self._call_soon(acceptor.resume)
        port: int = listener.getsockname()[1]
        return port

    def close(self, store: NamedStore) -> None:
        """Have the loop close the port of a store, which has ended; who connects until then is not served."""
        self._call_soon(partial(self._close, store))

    def stop(self) -> None:
        """Close all ports, and open no more. On the loop. Idempotent."""
        self._stopped = True
        for store in list(self._acceptors):
            self._close(store)

    def _close(self, store: NamedStore) -> None:
        acceptor = self._acceptors.pop(store, None)
        if acceptor is not None:
            acceptor.close()

    def _listen(self) -> socket.socket:
        """Return a socket that listens on one of the ports. Raises OSError."""
        for _ in range(min(len(self.numbers), _TRIES)):
            number = self.numbers[self._next % len(self.numbers)]
            self._next += 1
            host, _, *scope = self._address
            try:
                return listen_at(self._family, (host, number, *scope), self._v6_only)
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
                refused = error.errno, error.strerror
        raise OSError(*refused)

    def _accepted(self, store: NamedStore, fd: int, host: str, port: int) -> None:
        self._serve(fd, host, port, store)
