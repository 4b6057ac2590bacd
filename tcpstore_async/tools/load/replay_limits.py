"""The resources that a replay needs: open files, local ports and memory.

Must not know how a recording is played. Invariant: a replay that cannot succeed is refused before the first connection
is made and before anything is computed for each copy of the job.
"""

import os
import sys
from itertools import accumulate
from pathlib import Path
from typing import Final

from ...base.errors import counted
from ...server.listen_socket import max_connections_by_files
from .recording import Recording, RecordingError

_RESERVED_FILES: Final = 16
"""Open files reserved for the loop and for name look-ups."""
_CONNECTION_BYTES: Final = 2048
"""Measured bytes of each connection of each copy."""
_OPEN_BYTES: Final = 4096
"""Additional bytes while it is open."""
_POINTER_BYTES: Final = 8
"""Bytes of an entry in a list."""
_PREFIXED_BYTES: Final = 24
"""Additional bytes of a key in further copies: prefix and list entry."""
_PORT_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


def check_limits(recording: Recording, copies: int, speed: float) -> None:
    """Raise RecordingError, naming the limit, if this machine cannot play so many copies."""
    at_once = copies * _most_at_once(recording, speed)
    needs = f"the replay needs {counted(at_once, 'simultaneous connection')}"
    allowed = max_connections_by_files(_RESERVED_FILES)
    if at_once > allowed:
        raise RecordingError(f"{needs}, but the limit on open files (ulimit -Hn) allows only {allowed:,}")
    ports = _local_ports()
    if at_once > ports:
        raise RecordingError(f"{needs}, but net.ipv4.ip_local_port_range has only {ports:,} ports for them")
    needed, memory = _memory_of(recording, copies) + at_once * _OPEN_BYTES, _physical_memory()
    if needed > memory // 2:
        raise RecordingError(
            f"the replay needs about {needed / 2**30:,.1f} GiB of memory, more than half of the "
            f"{memory / 2**30:,.1f} GiB that this machine has"
        )


def _most_at_once(recording: Recording, speed: float) -> int:
    """Return the most simultaneous connections; without pauses, all may be open."""
    if not speed:
        return len(recording.connections)
    changes = [(connection.opened, 0, 1) for connection in recording.connections]
    changes += [(connection.closed, 1, -1) for connection in recording.connections if connection.closed is not None]
    changes.sort()
    return max(accumulate((change for *_, change in changes), initial=0))


def _memory_of(recording: Recording, copies: int) -> int:
    """Return the bytes that the player needs for the copies before it connects."""
    keys = sum(sys.getsizeof(key) + _PREFIXED_BYTES for key in recording.keys)
    return copies * (len(recording.connections) * _CONNECTION_BYTES + len(recording.steps) * _POINTER_BYTES + keys)


def _physical_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _local_ports() -> int:
    """Return the number of connections to one address for which there are local ports."""
    try:
        low, high = map(int, _PORT_RANGE.read_text().split())
    except (OSError, ValueError):
        return 65_535
    return high - low + 1
