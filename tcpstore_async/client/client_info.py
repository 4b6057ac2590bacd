"""A client's introduction for the server's log, from this process and its environment."""

import os
import socket
from typing import Final

_LONGEST: Final = 200

_VARIABLES: Final = {"rank": ("RANK",), "world_size": ("WORLD_SIZE",), "job": ("TCPSTORE_JOB", "TORCHELASTIC_RUN_ID")}


def introduction(world_size: int | None = None) -> dict[str, str]:
    """Return host, pid and, where known, rank, world size and job."""
    known = {"host": socket.gethostname(), "pid": str(os.getpid())}
    if world_size is not None:
        known["world_size"] = str(world_size)
    for name, variables in _VARIABLES.items():
        for variable in variables:
            if text := os.environ.get(variable):
                known.setdefault(name, text[:_LONGEST])
    return known
