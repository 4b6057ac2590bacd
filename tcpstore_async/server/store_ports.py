"""Ports of a server that stand for named stores, for clients that cannot name one: PyTorch's C++ client.

A port's number is not the one in the store's name, which programs on the server's host may want. Knows listening
sockets and their numbers. Must not know the protocol, or what a store is.

Invariants: a port listens, on the server's address, before a client learns of it, and is closed with its store. Most of
what the server can hold is left to connections.
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
"""Port 0: the kernel chooses a free one."""

NONE: Final = range(0)
"""No ports for named stores."""

_TRIES: Final = 64
"""Ports of a range tried for one store, in about 0.3 ms; the next store continues with the following ports."""

_SHARE: Final = 4
"""One in this many of the connections that a server can hold may be a port instead."""


class StorePorts:
    """The ports of one server. Call methods in a turn."""

    def __init__(
        self,
        listener: socket.socket,
        loop: asyncio.AbstractEventLoop,
        call_soon: Callable[[Callable[[], object]], None],
        serve: Callable[[int, str, int, NamedStore | None], None],
        served: Callable[[], None],
        log: Callable[[str, str], None],
    ) -> None:
        """Open ports on the address of `listener`; `call_soon` schedules a call on the loop.

        `serve` gets the descriptor, host and port of each connection, and the store whose port it came to. Otherwise
        it is, with `served` and `log`, as for `Acceptor`.
        """
        self.numbers: range = ANY
        """Ports to choose from."""
        self.most: int = 0
        """Most ports at a time; 0 until the server starts."""
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
        """Index, modulo its length, of the next of `numbers` to try."""
        self._stopped = False

    def __len__(self) -> int:
        return len(self._acceptors)

    def reserve(self, connections: int) -> None:
        """Set the number of ports from the number of connections that the server can hold."""
        self.most = connections // _SHARE

    def open(self, store: NamedStore) -> int | str:
        """Listen for a store; return the port, or why there is none."""
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
        self._accept(store, listener)
        port: int = listener.getsockname()[1]
        return port

    def open_again(self, store: NamedStore) -> str:
        """Listen on the port that a store already has; return why that fails, or nothing."""
        if not self.numbers:
            return "the server offers none (--store-ports 0)"
        host, _, *scope = self._address
        try:
            self._accept(store, close_on_fork(listen_at(self._family, (host, store.port, *scope), self._v6_only)))
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _accept(self, store: NamedStore, listener: socket.socket) -> None:
        serve = self._serve
        acceptor = Acceptor(
            self._loop, listener, lambda fd, host, port: serve(fd, host, port, store), self._served, self._log
        )
        self._acceptors[store] = acceptor
        self._call_soon(acceptor.resume)

    def close(self, store: NamedStore) -> None:
        """Schedule closing the port of a store that has ended. Connections until then are rejected."""
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
