"""What a forked child must not inherit.

Knows: what is this process's own. Must not know: what it is for.
Invariant: a forked child closes its copies before it does anything else. A copy of a listening socket would keep the
port, a copy of a control socket would keep the other end from noticing that its owner has gone, a copy of a connection
would keep it open after the server has closed it.
"""

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, Protocol, TypeVar


class Closable(Protocol):
    """What has descriptors."""

    def close(self) -> None: ...


class Inherited(Protocol):
    """What has descriptors of which a forked child has copies."""

    def close_inherited(self) -> None: ...


_Private = TypeVar("_Private", bound=Closable)

_private: Final[weakref.WeakSet[Closable]] = weakref.WeakSet()

_servers: Final[dict[int, Inherited]] = {}


def close_on_fork(private: _Private) -> _Private:
    """The same socket, or what else has descriptors, which forked children close."""
    _private.add(private)
    return private


@contextmanager
def kept_private(server: Inherited) -> Iterator[None]:
    """Within the context, forked children close their copies of the server's descriptors."""
    _servers[id(server)] = server
    try:
        yield
    finally:
        _servers.pop(id(server), None)


def _close_inherited() -> None:
    for server in list(_servers.values()):
        with suppress(Exception):  # in the midst of a change of another thread's: the others are closed all the same
            server.close_inherited()
    _servers.clear()
    for private in list(_private):
        private.close()
    _private.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)
