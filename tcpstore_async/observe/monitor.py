"""Samples of the commands that a store executes, for `tcpstore monitor`.

Knows commands and their fields. Must not know sockets, nor read a clock: the server supplies one.

Invariants: what a peer is sent does not depend on whether it is watched. A monitor holds a limited number of samples,
each of limited size, and counts the ones that it drops. No sample contains tokens or secrets, nor values unless they
were requested. A command is noted when it is complete, before it is executed.
"""

from collections.abc import Callable
from typing import Any, Final

from ..base.keys import readable
from ..keyspace.waiter_types import KeyList
from ..session.peer import Peer
from ..wire.codecs import Fields
from ..wire.commands import SESSION, Command
from ..wire.values import PREFIX
from .statistics import shown

MOST_SAMPLES: Final = 2000
"""Most samples held until they are taken."""

_MOST_VALUE: Final = 256
"""Most bytes of a value in a sample."""


class Monitor:
    """A watcher of a store, or of all stores of a server."""

    def __init__(
        self, clock: Callable[[], float], every: int, values: bool, most: int = MOST_SAMPLES, store: str | None = None
    ) -> None:
        """Note one command in `every`, with its value if `values`. `clock` returns the time of a sample, in seconds.

        With `store`, note only commands in the store of that name.
        """
        self.store = store
        self.clock = clock
        self.every: int = max(1, every)
        self.values = values
        self.most: int = most
        self.seen: int = 0
        """Commands so far."""
        self.dropped: int = 0
        """Samples dropped so far, because too many were held."""
        self._samples: list[list[Any]] = []

    def take(self) -> list[list[Any]]:
        """Return the samples since the last call, oldest first.

        Each has the time, the host, port, process (or None) and rank (or None) of the peer, the command, its first key
        (or None), the number of its keys, the bytes of its values, its last value or number (or None), and its store,
        if that has a name.
        """
        samples = self._samples
        self._samples = []
        return samples

    def note(self, command: Command, fields: Fields, session: Peer | None, store: str) -> None:
        """Note a command that a session sends in a store, with the fields passed to its method."""
        if self.store is not None and store != self.store:
            return
        self.seen += 1
        if self.seen % self.every:
            return
        if len(self._samples) >= self.most:
            self.dropped += 1
            return
        first = fields[0] if fields else None  # a key, a list of keys or pairs, or neither
        keys: list[bytes] = first.keys if isinstance(first, KeyList) else command.request.keys(fields)
        values: list[Any] = []
        if keys and isinstance(first, list):
            values = [item[1] for item in first if isinstance(item, tuple)]
        elif keys and not command.flags & SESSION:  # the value of JOIN is a token
            values = list(fields[1:])
        size = sum([len(one) - PREFIX for one in values if isinstance(one, (bytes, bytearray))])
        host, port, pid, rank = "", 0, None, None
        if session is not None:
            host, port = session.host, session.port
            pid = None if session.pid < 0 else session.pid
            rank = session.peer.get("rank")
        key = shown(keys[0]) if keys else None
        value = _shown_value(values[-1]) if values and self.values else None
        sample = [self.clock(), host, port, pid, rank, command.name, key, len(keys), size, value]
        self._samples.append([*sample, store] if store else sample)


def _shown_value(value: object) -> str | None:
    """Return a value, or a number, as text, shortened if it is long."""
    if isinstance(value, (bytes, bytearray)):
        start = bytes(value[PREFIX : PREFIX + _MOST_VALUE])
        return readable(start) + ("…" if len(value) > PREFIX + _MOST_VALUE else "")
    return None if value is None else str(value)
