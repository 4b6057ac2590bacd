"""What the owner of a server and the server say to each other, over the control socket between them.

Knows: the messages. Must not know: processes, who listens.
Invariant: a message is one line. The owner says in plain words `joins N` (so many more are to join), `complete T` (all
had at that time of the clock that the processes of a machine share, `time.monotonic`) and `stop`. The server reports
events as objects of JSON. On a second socket, its standard error, it sends its log as objects of JSON; what else comes
there are the last words of an interpreter, or a C library, that crashes.
"""

import socket

import msgspec


class Event(msgspec.Struct, omit_defaults=True):
    """What a server reports: `ready`, `failed`, and `stopped` once it no longer listens."""

    event: str
    port: int = 0
    pid: int = 0
    backend: str = ""
    error: str = ""
    """Why it failed."""
    room: int = 0
    """Connections that it can hold."""
    left: int = 0
    """Connections that still have their grace after the stop; with none the server ends at once."""


class Line(msgspec.Struct, omit_defaults=True):
    """One record of a server's log or, with `over`, the news that it ends as it should."""

    level: int = 0
    name: str = ""
    text: str = ""
    over: bool = False


def encode(message: Event | Line) -> bytes:
    """Encode what a server says."""
    return msgspec.json.encode(message) + b"\n"


class Lines:
    """The lines that come from a socket, whole."""

    def __init__(self, source: socket.socket) -> None:
        self._source = source
        self.rest = b""
        """What came after the last whole line."""

    def read(self) -> list[bytes] | None:
        """Read once: the lines that are complete now, or None at the end. Raises OSError as `recv` does."""
        data = self._source.recv(4096)
        if not data:
            return None
        *lines, self.rest = (self.rest + data).split(b"\n")
        return lines
