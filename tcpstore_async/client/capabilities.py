"""Capabilities that other servers lack: how to probe for them, and the error.

A server of ours reports its version of the extension. Capabilities of PyTorch's servers are probed on a separate
connection, because a server that does not know a command closes the connection, and the writes on it are lost. Every
command of a probe is answered at once and leaves nothing behind.
"""

import os
from typing import Final

from ..base.keys import BARRIER_LAST
from ..wire.commands import BY_METHOD
from . import requests
from .requests import Request

PROBES: Final = 2
"""Probes that must lose their connections before the server counts as lacking the capability."""

BARRIER: Final = "barrier"
QUEUES: Final = "queues"
LIST_KEYS: Final = "list_keys"

EXTENSION: Final = "extension"
"""The command of the request, which is one of the extension."""

_SINCE: Final = {
    EXTENSION: "does not have this method: it is PyTorch's, or runs an older version of this package",
    QUEUES: "has no queues (PyTorch added them in 2.8, but not to its legacy server)",
    LIST_KEYS: "cannot list its keys (PyTorch added this in 2.10)",
}


def probe(what: str) -> list[Request]:
    """Return requests that a server with this capability answers, on keys that no one else uses."""
    if what == LIST_KEYS:
        return [requests.LIST_KEYS]
    name = b"tcpstore_async/try/" + os.urandom(8).hex().encode()
    if what == QUEUES:
        return [requests.queue_len(name)]
    delete = BY_METHOD["delete_key"]
    return [(BY_METHOD["barrier"], (name, 1)), (delete, (name,)), (delete, (name + BARRIER_LAST,))]


def lacks(what: str, host: str, port: int) -> NotImplementedError:
    """Return the error of a call that the server cannot serve."""
    return NotImplementedError(f"the server at {host}:{port} {_SINCE[what]}")
