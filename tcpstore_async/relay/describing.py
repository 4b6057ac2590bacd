"""Describe the ranks of this host to the server, as PyTorch's clients do not introduce themselves.

It knows that PyTorch's client sends its process id right after VALIDATE, and how to read the environment of a process
of this machine. It must not know links. Unknown facts are left out.
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
"""Most addresses for which it is remembered whether they are local."""

_LONGEST: Final = 200
"""Most characters of a value: a name or a number."""

_VARIABLES: Final = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "job": "TORCHELASTIC_RUN_ID",
}


def describer() -> Callable[[bytes, str], tuple[int, dict[str, str]]]:
    """Return a function that returns the pid of a rank, 0 if it is not known, and a description.

    It is given the first ten bytes of the rank, and its address.
    """
    name = socket.gethostname()[:_LONGEST]
    local: dict[str, bool] = {}

    def describe(head: bytes, host: str) -> tuple[int, dict[str, str]]:
        if host not in local:
            if len(local) >= _MOST_HOSTS:
                local.clear()
            local[host] = is_local(host)
        validate, magic, ping, pid = _HANDSHAKE.unpack(head)
        if not local[host] or (validate, magic, ping) != (_VALIDATE, MAGIC, _PING):
            return 0, {}
        environment = read_environment(pid)
        known = {"host": name}
        for what, variable in _VARIABLES.items():
            if text := environment.get(variable):
                known[what] = text[:_LONGEST]
        return pid, known

    return describe
