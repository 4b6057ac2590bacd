"""Who the ranks of this host are, for the server: read where PyTorch's clients do not say it.

It knows that PyTorch's client sends its process id right after VALIDATE, and the environment of a process of this
machine. It must not know links. What cannot be found out is left out.
"""

import socket
import struct
from collections.abc import Callable
from typing import Final

from ..client.admin import is_local, read_environment
from ..wire.commands import BY_METHOD, MAGIC

_HANDSHAKE: Final = struct.Struct("<BIBI")
"""VALIDATE with its number, and PING with the process id."""

_VALIDATE: Final = BY_METHOD["validate"].opcode
_PING: Final = BY_METHOD["ping"].opcode

_MOST_HOSTS: Final = 64
_LONGEST: Final = 200
"""Characters of a value: a name or a number."""

_VARIABLES: Final = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "job": "TORCHELASTIC_RUN_ID",
}


def describer() -> Callable[[bytes, str], dict[str, str]]:
    """Return a function that says who a rank is, by its first ten bytes and its address."""
    name = socket.gethostname()[:_LONGEST]
    local: dict[str, bool] = {}

    def describe(head: bytes, host: str) -> dict[str, str]:
        if host not in local:
            if len(local) >= _MOST_HOSTS:
                local.clear()
            local[host] = is_local(host)
        validate, magic, ping, pid = _HANDSHAKE.unpack(head)
        if not local[host] or (validate, magic, ping) != (_VALIDATE, MAGIC, _PING):
            return {}
        environment = read_environment(pid)
        known = {"host": name}
        for what, variable in _VARIABLES.items():
            if text := environment.get(variable):
                known[what] = text[:_LONGEST]
        return known

    return describe
