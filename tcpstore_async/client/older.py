"""What PyTorch's older servers lack: how that is found out, and what is said then.

Knows: since when there is a command, how to try BARRIER without a trace. Must not know: connections.
Invariant: a try is made on a connection of its own, for a server that does not know a command closes the connection,
and with it what the store has written there. Only where something else can be done instead is a command tried out;
elsewhere the connection is lost, as PyTorch's client loses it, and the error says what may be the reason.
"""

import os
from typing import Final

from ..wire.commands import BY_METHOD
from .calls import Ask

_SINCE: Final = {
    "queue_push": "since 2.8, its legacy one never",
    "queue_pop": "since 2.8, its legacy one never",
    "queue_len": "since 2.8, its legacy one never",
    "list_keys": "since 2.10",
}


def barrier_tries() -> list[Ask]:
    """What a server answers at once, one after the other, if it knows BARRIER; nobody else can have such keys."""
    name = b"tcpstore_async/try/" + os.urandom(8).hex().encode()
    delete = BY_METHOD["delete_key"]
    return [(BY_METHOD["barrier"], (name, 1)), (delete, (name,)), (delete, (name + b"/last_member",))]


def explained(said: str, ask: Ask) -> str:
    """What is said of a connection that a server closed when it was sent this, and that is not one of ours."""
    since = _SINCE.get(ask[0].method)
    return said if since is None else f"{said} PyTorch's server knows {ask[0].name} {since}."
