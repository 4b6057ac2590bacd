"""Which kinds of server there are, and what all of them are to those who run one.

Knows: the doors by name. Must not know: how any of them works.
Invariant: whoever runs a server can do so without knowing which kind it is.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Final, Protocol

from ..limits import Limits
from .listening import BACKENDS

DEFAULT_BACKEND: Final = BACKENDS[0]


class Server(Protocol):
    """A server, made and stopped on a running loop."""

    host: str
    port: int
    max_connections: int
    """Connections that it can hold, known once it has started."""
    empty: asyncio.Event
    """Set while there are no connections."""

    @property
    def count(self) -> int:
        """Connections that are open."""

    def start(self) -> None:
        """Accept connections from now on."""

    def stop_accepting(self) -> None:
        """Free the port; connections that are open stay."""

    def stop(self) -> None:
        """Stop at once: the port is free and every connection closed when this returns. May be called again."""

    async def drain(self, grace: float) -> None:
        """Stop accepting, give the peers up to `grace` seconds to leave, then stop."""

    def announce(self, joins: int) -> None:
        """Say how many ranks are expected to join."""

    def all_joined(self) -> bool:
        """Whether as many ranks have joined as were announced."""

    def dismiss_latecomers(self, complete: float) -> None:
        """Close the connections that came after `complete`: they belong to a next round, and join again."""

    def close_inherited(self) -> None:
        """In a forked child: close its copies of the connections, which are the parent's to close."""


def server_of(backend: str) -> Callable[[socket.socket, Limits], Server]:
    """What makes a server of this kind on a listener. Raises ValueError if there is no such kind."""
    if backend == "uv":
        from .uv import UvServer  # each kind is imported by those who use it: a server is to start fast

        return UvServer
    if backend == "threaded":
        from .threaded import ThreadedServer

        return ThreadedServer
    raise ValueError(f"there is no backend {backend!r}; there is {', '.join(BACKENDS)}")
