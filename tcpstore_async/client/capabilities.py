"""What PyTorch's older servers lack: how that is found out, and what is said then.

Knows: which commands came late, and how to try them. Must not know: connections.
Invariant: a try is made on a connection of its own, for a server that does not know a command closes the connection,
and with it what the store has written there. Every command of a try is answered at once, and nothing of it stays.
"""

import os
from typing import Final

from ..wire.commands import BY_METHOD
from . import requests
from .requests import Request

TRIES: Final = 2
"""Connections that have to be lost before a server counts as one that does not know something."""

BARRIER: Final = "barrier"
QUEUES: Final = "queues"
LIST_KEYS: Final = "list_keys"

_SINCE: Final = {
    QUEUES: "has no queues (PyTorch's has since 2.8, its legacy server never)",
    LIST_KEYS: "cannot list its keys (PyTorch's can since 2.10)",
}


def tries(what: str) -> list[Request]:
    """What to ask, one after the other, to find out whether a server knows this; nobody else can have such keys."""
    if what == LIST_KEYS:
        return [requests.LIST_KEYS]
    name = b"tcpstore_async/try/" + os.urandom(8).hex().encode()
    if what == QUEUES:
        return [requests.queue_len(name)]
    delete = BY_METHOD["delete_key"]
    return [(BY_METHOD["barrier"], (name, 1)), (delete, (name,)), (delete, (name + requests.BARRIER_LAST,))]


def lacks(what: str, host: str, port: int) -> NotImplementedError:
    """What is raised where nothing else can be done instead."""
    return NotImplementedError(f"the server at {host}:{port} {_SINCE[what]}")
