"""Descriptors that a forked child must not keep.

Must not know what they are for.
Invariant: a forked child closes its copies before it does anything else. A copy of a listening socket would keep the
port in use, a copy of a control socket would hide the end of its owner from the other side, and a copy of a connection
would keep it open after the server has closed it.
"""

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, Protocol, TypeVar


class Closable(Protocol):
    """An object that owns descriptors."""

    def close(self) -> None: ...


class Inherited(Protocol):
    """An object with descriptors that its own `close` must not free in a forked child."""

    def close_inherited(self) -> None: ...


_Private = TypeVar("_Private", bound=Closable)

_private: Final[weakref.WeakSet[Closable]] = weakref.WeakSet()

_servers: Final[dict[int, Inherited]] = {}


def close_on_fork(private: _Private) -> _Private:
    """Close copies of an object in forked children; return it."""
    _private.add(private)
    return private


@contextmanager
def closed_in_children(server: Inherited) -> Iterator[None]:
    """Close the server's descriptors in children forked within the context."""
    _servers[id(server)] = server
    try:
        yield
    finally:
        _servers.pop(id(server), None)


def _close_inherited() -> None:
    for server in list(_servers.values()):
        with suppress(Exception):  # another thread may have been changing it when the process forked
            server.close_inherited()
    _servers.clear()
    for private in list(_private):
        private.close()
    _private.clear()


os.register_at_fork(after_in_child=_close_inherited)
