"""The messages between a server process and its owner.

Must not know processes.
Invariant: a message is one line. Over the control socket, the owner sends `joins N` (N more ranks are expected to
join), `complete T` (all had joined at the time T of `time.monotonic`, which all processes of a machine share) and
`stop`, as plain text; the server sends `Event`s as JSON. Over a second socket, its standard error, the server sends
`LogLine`s as JSON; other lines there are the last output of an interpreter, or a C library, that crashed.
"""

import socket

import msgspec


class Event(msgspec.Struct, omit_defaults=True):
    """A report of the server: `ready`; `failed`; or `stopped`, once it no longer listens."""

    event: str
    port: int = 0
    pid: int = 0
    backend: str = ""
    error: str = ""
    """Why it failed."""
    max_connections: int = 0
    remaining: int = 0
    """Connections that have their grace after the stop; if 0, the server ends at once."""


class LogLine(msgspec.Struct, omit_defaults=True):
    """A record of the server's log or, with `over`, the announcement of an orderly exit."""

    level: int = 0
    name: str = ""
    text: str = ""
    over: bool = False


def encode(message: Event | LogLine) -> bytes:
    return msgspec.json.encode(message) + b"\n"


class LineReader:
    """Reads whole lines from a socket."""

    def __init__(self, source: socket.socket) -> None:
        self._source = source
        self.rest = b""
        """Bytes after the last whole line."""

    def read(self) -> list[bytes] | None:
        """Read once; return the lines now complete, or None at the end. Raises OSError as `recv` does."""
        data = self._source.recv(4096)
        if not data:
            return None
        *lines, self.rest = (self.rest + data).split(b"\n")
        return lines
