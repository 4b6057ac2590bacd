"""The file format of recordings: rows of JSON, one per line, which `bench/recordings.md` specifies.

A `RowEncoder` writes rows, and `read_recording` reads a file into memory for a replay. Must not know sockets or clocks.
Invariants: every row is complete in itself, so a truncated file is readable up to its last complete row. The contents
of values are written only on request; which values are equal is always written.
"""

import base64
import hashlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from ...base.limits import GIB, MIB
from ...base.version import VERSION
from ...wire.codecs import NO_REPLY, VALUES, Fields, ReplyCodec, RequestCodec
from ...wire.commands import COMMANDS, MUTATES, Command
from ...wire.values import INT64_MAX, INT64_MIN, PREFIX, Framed

FORMAT: Final = "tcpstore-recording"
FORMAT_VERSION: Final = 1

_CHUNK: Final = 1 << 20
"""Bytes read at once."""
_LONGEST_ROW: Final = 512 * MIB
"""Bytes above which a row is invalid."""
_GZIP: Final = b"\x1f\x8b"
"""First bytes of a compressed file."""
_GZIP_WINDOW: Final = 31
"""zlib's number for a gzip header and the largest window."""
_MOST_NUMBERS: Final = 1 << 18
"""Keys, lists and values, each, that an encoder remembers; beyond it, it forgets them and assigns new numbers."""
_DIGEST_BYTES: Final = 16
"""Bytes of the digest that identifies a value."""
_MOST_BYTES: Final = 4 * GIB
"""Size of a value above which a recording is invalid."""

Row = list[Any]

_RECORDED_AS: Final = {"u": "", "t": "", "m": "i"}
"""Kinds of fields recorded as another kind, or not at all: no tokens."""

FIELDS: Final[dict[RequestCodec, str]] = {
    command.request: "".join([_RECORDED_AS.get(kind, kind) for kind in command.request.kinds]) for command in COMMANDS
}
"""Kinds of the fields in a request's row, keyed by codec, as letters of `FIELD_LAYOUTS` in `wire/codecs.py`; numbers
stand for keys, lists and values."""

_RECORDED_REPLIES: Final = "nbvwcp"

REPLIES: Final[dict[ReplyCodec, str]] = {
    command.reply: command.reply.kind if command.reply.kind in _RECORDED_REPLIES else "" for command in COMMANDS
}
"""Kind of the result in a reply's row, keyed by codec; empty if the result is always the same. A list of keys is
represented by the number of keys and of their bytes."""

_LEAST_FIELDS: Final = {"": 0, "c": 2}
"""Least number of fields of a reply's row, if not one."""

_BY_NAME: Final = {command.name: command for command in COMMANDS}


class RecordingError(Exception):
    """A recording cannot be written, read or replayed. The text is one line for users."""


class _DamagedError(Exception):
    """The gzip data is corrupt, not merely truncated."""


# Writing


class RowEncoder:
    """Turns traffic into rows. Times are in seconds of any monotonic clock."""

    def __init__(self, began: float, created: str, values: bool = False) -> None:
        """Begin a recording. `created` is date and time for readers; with `values`, contents of values are recorded."""
        self._began = began
        self._last = 0
        self._values_included = values
        self._salt = os.urandom(16)
        """Never written, so that a guess at a hidden value cannot be checked."""
        self._keys: dict[bytes, int] = {}
        self._lists: dict[tuple[bytes, ...], int] = {}
        self._values: dict[bytes, int] = {}
        self._counts = [0, 0, 0]
        """Number of keys, lists and values so far."""
        self._encoder = msgspec.json.Encoder()
        self.rows: list[bytes] = []
        self._put(
            {
                "format": FORMAT,
                "version": FORMAT_VERSION,
                "created": created,
                "by": f"tcpstore_async {VERSION}",
                "values": values,
            }
        )

    def take(self) -> bytes:
        """Return the rows since the last call, encoded for the file."""
        rows = self.rows
        if not rows:
            return b""
        self.rows = []
        return b"\n".join(rows) + b"\n"

    def add(self, now: float, connection: int, name: str, *fields: Any) -> None:
        """Add a row of traffic."""
        at = int((now - self._began) * 1e6)
        self._put([at - self._last, connection, name, *fields])
        self._last = at

    def add_request(self, now: float, connection: int, command: Command, fields: Fields) -> None:
        """Add a request."""
        row: Row = []
        for kind, field in zip(command.request.kinds, fields, strict=True):
            if kind == "n":
                row.append(field)
            elif kind == "k":
                row.append(self._key(field))
            elif kind == "v":
                row.append(self._value(field))
            elif kind == "l":
                row.append(self._list(field))
            elif kind in ("i", "m"):
                row.append([[self._key(key), self._value(value)] for key, value in field])
        self.add(now, connection, command.name, *row)

    def add_reply(self, now: float, connection: int, command: Command, result: Any) -> None:
        """Add the reply to the oldest unanswered request of the connection."""
        kind = REPLIES[command.reply]
        row: Row = []
        if kind in ("n", "b"):
            row = [result]
        elif kind == "v":
            row = [self._value(result)]
        elif kind == "w":
            row = [[self._value(value) for value in result]]
        elif kind == "c":
            row = [len(result), sum(map(len, result))]
        elif kind == "p":
            length, item = result
            row = [length] if item is None else [length, self._value(item)]
        self.add(now, connection, "REPLY", *row)

    def _put(self, row: Any) -> None:
        self.rows.append(self._encoder.encode(row))

    def _key(self, key: bytes) -> int:
        number = self._keys.get(key)
        if number is None:
            number = self._number(0, self._keys, key)
            try:
                self._put(["K", key.decode()])
            except UnicodeDecodeError:
                self._put(["K64", base64.b64encode(key).decode()])
        return number

    def _list(self, keys: list[bytes]) -> int:
        members = tuple(keys)
        number = self._lists.get(members)
        if number is None:
            numbers = [self._key(key) for key in keys]
            number = self._number(1, self._lists, members)
            self._put(["L", numbers])
        return number

    def _value(self, value: Framed) -> int:
        digest = hashlib.blake2b(value, digest_size=_DIGEST_BYTES, key=self._salt).digest()
        number = self._values.get(digest)
        if number is None:
            number = self._number(2, self._values, digest)
            row: Row = ["V", len(value) - PREFIX]
            if self._values_included:
                row.append(base64.b64encode(memoryview(value)[PREFIX:]).decode())
            self._put(row)
        return number

    def _number(self, kind: int, table: dict[Any, int], entry: Any) -> int:
        number = self._counts[kind]
        self._counts[kind] = number + 1
        if len(table) >= _MOST_NUMBERS:
            table.clear()
        table[entry] = number
        return number


# Reading


class Value:
    """A value of a recording: its size in bytes and, if recorded, its content."""

    __slots__ = ("content", "integer", "number", "size")

    def __init__(self, number: int, size: int, content: bytes | None) -> None:
        self.number = number
        self.size = size
        self.content = content
        self.integer: int | None = None
        """The number in a hidden value, if known."""


class Step:
    """One request of a connection, and its reply. Times are in seconds since the recording began."""

    __slots__ = (
        "at", "canceled", "cancels", "command", "connection", "dependents", "end", "fence", "fields", "index", "needs",
        "number", "prerequisites", "reply", "start",
    )  # fmt: skip

    def __init__(self, connection: "Connection", number: int, start: int, at: float, command: Command) -> None:
        self.connection = connection
        self.number = number
        """Its place among all steps."""
        self.index = len(connection.steps)
        self.command = command
        self.fields: Row = _NO_FIELDS
        """Fields of its row: keys, lists and values by number."""
        self.at = at
        self.cancels = False
        """Whether it cancels a wait, and so has no reply of its own."""
        self.canceled = False
        """Whether a later step cancels this wait: then the reply says whether it had already ended."""
        self.reply: Row | None = None
        """Fields of its reply's row; None without a recorded reply."""
        self.needs = connection.replies
        """Number of replies that its connection had received before."""
        self.start = start
        """The row of the request."""
        self.end = -1
        """The row by which it had been executed: that of the reply, if it has one; -1 if unknown."""
        self.prerequisites = 0
        """Number of steps of other connections that must be done before it is sent; see `replay_order`."""
        self.dependents: list[Step] = _NO_STEPS
        """Steps of other connections that must wait for this one; added by `precedes`."""
        self.fence = False
        """Whether others wait for this write, which has no reply: the player appends a PING."""

    def precedes(self, step: "Step") -> None:
        """Make a step of another connection wait for this one."""
        if self.dependents is _NO_STEPS:
            self.dependents = []
        self.dependents.append(step)
        step.prerequisites += 1

    @property
    def has_reply(self) -> bool:
        """Whether the protocol defines a reply to it."""
        return self.command.reply is not NO_REPLY and not self.cancels and not self._is_empty_list()

    @property
    def keys(self) -> list[int]:
        """The numbers of the keys that it names."""
        kinds = FIELDS[self.command.request]
        if kinds == "l":
            return self.connection.recording.lists[self.fields[0]]
        if kinds.startswith("k"):
            return [self.fields[0]]
        return [pair[0] for pair in self.fields[0]] if kinds == "i" and self.command.flags & MUTATES else []

    def _is_empty_list(self) -> bool:
        """Return whether it is a MULTI_GET of no keys, whose reply has no bytes."""
        return self.command.reply is VALUES and self.connection.recording.lists[self.fields[0]] == []


# Shared by the many steps; never changed.
_NO_STEPS: Final[list[Step]] = []
_NO_FIELDS: Final[Row] = []


class Connection:
    """A connection of the recorded job."""

    def __init__(self, recording: "Recording", number: int, opened: float) -> None:
        self.recording = recording
        self.number = number
        self.opened = opened
        self.closed: float | None = None
        self.closed_by_server = False
        self.process = -1
        """The number of its process, from its PING; -1 if unknown."""
        self.steps: list[Step] = []
        self.replies = 0
        self.opaque = False
        """Whether the recorder could not decode some of its traffic."""


class Recording:
    """A recording in memory."""

    def __init__(self) -> None:
        self.values_included = False
        self.created = ""
        self.keys: list[bytes] = []
        self.lists: list[list[int]] = []
        self.values: list[Value] = []
        self.connections: list[Connection] = []
        self.steps: list[Step] = []
        self.seconds = 0.0
        """The time of the last event of a connection."""
        self.complete = False
        """Whether the recorder was stopped properly, so that no rows are missing."""

    @property
    def ranks(self) -> int:
        """The number of processes; a connection without PING counts as a process."""
        known = {connection.process for connection in self.connections if connection.process >= 0}
        return len(known) + sum(1 for connection in self.connections if connection.process < 0)

    @property
    def first(self) -> float:
        """The time of the first connection, at which a replay starts."""
        return min((connection.opened for connection in self.connections), default=0.0)


def read_recording(path: Path) -> Recording:
    """Read a recording, up to the last complete row if it is truncated. Raises RecordingError."""
    reader = _Reader()
    try:
        with path.open("rb") as file:
            for row in _rows(file):
                reader.take(row)
    except _DamagedError as error:
        raise RecordingError(f"{path} is damaged and cannot be decompressed: {error}") from None
    except OSError as error:
        raise RecordingError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if reader.row > 1:
            raise RecordingError(f"{path}, row {reader.row}: not JSON: {error}") from None
        raise RecordingError(f"{path} is not a recording") from None
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise RecordingError(f"{path}, row {reader.row}: {error or type(error).__name__}") from None
    if not reader.row:
        raise RecordingError(f"{path} is not a recording: it is empty")
    return reader.recording


def _rows(file: Any) -> Iterator[bytes]:
    """Yield the complete rows of a file, compressed or not."""
    chunk = file.read(_CHUNK)
    unpacker = zlib.decompressobj(_GZIP_WINDOW) if chunk.startswith(_GZIP) else None
    rest = b""
    while chunk:
        try:
            data = chunk if unpacker is None else unpacker.decompress(chunk)
        except zlib.error as error:
            raise _DamagedError(str(error)) from None
        *rows, rest = (rest + data).split(b"\n")
        yield from rows
        if len(rest) > _LONGEST_ROW:
            raise ValueError(f"longer than {_LONGEST_ROW} bytes")
        chunk = file.read(_CHUNK)


class _Reader:
    """Builds a recording from rows."""

    def __init__(self) -> None:
        self.recording = Recording()
        self._decode = msgspec.json.Decoder().decode
        self._connections: dict[int, Connection] = {}
        self._unanswered: dict[int, list[Step]] = {}
        self.row = 0
        """Number of the current row, from 1."""
        self._micros = 0

    def take(self, raw: bytes) -> None:
        self.row += 1
        row = self._decode(raw)
        if self.row == 1:
            self._header(row)
        elif isinstance(row[0], str):
            self._define(*row)
        else:
            micros = int(row[0])
            if micros < 0:
                raise ValueError(
                    f"time {micros} is negative; expected the microseconds since the previous row, 0 or more"
                )
            self._micros += micros
            if row[1] >= 0:  # the end of the recording belongs to no connection
                self.recording.seconds = self._micros / 1e6
            self._traffic(row[1], row[2], row[3:])

    def _header(self, row: Any) -> None:
        if not isinstance(row, dict) or row.get("format") != FORMAT:
            raise ValueError("not a recording made by tcpstore record")
        if row.get("version") != FORMAT_VERSION:
            raise ValueError(
                f"format version {row.get('version')} is not supported; this program reads {FORMAT_VERSION}"
            )
        self.recording.values_included = bool(row["values"])
        self.recording.created = str(row["created"])

    def _define(self, kind: str, *fields: Any) -> None:
        recording = self.recording
        if kind == "K":
            recording.keys.append(fields[0].encode())
        elif kind == "K64":
            recording.keys.append(base64.b64decode(fields[0]))
        elif kind == "L":
            if fields[0] and not 0 <= min(fields[0]) <= max(fields[0]) < len(recording.keys):
                raise ValueError("a list names an unknown key")
            recording.lists.append(fields[0])
        elif kind == "V":
            content = base64.b64decode(fields[1]) if len(fields) > 1 else None
            if not 0 <= fields[0] <= _MOST_BYTES or (content is not None and len(content) != fields[0]):
                raise ValueError(f"invalid value size {fields[0]}")
            recording.values.append(Value(len(recording.values), fields[0], content))
        else:
            raise ValueError(f"unknown kind of row {kind!r}")

    def _traffic(self, number: int, name: str, fields: Row) -> None:
        recording = self.recording
        if name == "END":
            recording.complete = True
        elif name == "OPEN":
            self._connections[number] = connection = Connection(recording, number, recording.seconds)
            recording.connections.append(connection)
            self._unanswered[number] = []
        elif name == "CLOSE":
            connection = self._connections.pop(number)
            connection.closed = recording.seconds
            connection.closed_by_server = fields[0] == "server"
        elif name == "OPAQUE":
            self._connections[number].opaque = True
        elif name == "REPLY":
            self._reply(self._connections[number], self._unanswered[number].pop(0), fields)
        else:
            self._request(self._connections[number], name, fields)

    def _request(self, connection: Connection, name: str, fields: Row) -> None:
        recording = self.recording
        command = _BY_NAME.get(name)
        if command is None:
            raise ValueError(f"unknown command {name!r}")
        step = Step(connection, len(recording.steps), self.row, recording.seconds, command)
        if name == "PING":
            connection.process = int(fields[0]) if fields else connection.process
        elif name in ("CANCEL_WAIT", "CANCEL_FETCH"):
            step.cancels = bool(fields and fields[0])
            if step.cancels:
                self._unanswered[connection.number][-1].canceled = True
        else:
            self._check(FIELDS[command.request], fields)
            step.fields = fields or _NO_FIELDS
        connection.steps.append(step)
        recording.steps.append(step)
        if step.has_reply:
            self._unanswered[connection.number].append(step)
        elif not step.cancels:
            step.end = self.row

    def _reply(self, connection: Connection, step: Step, fields: Row) -> None:
        kind = "b" if step.canceled else REPLIES[step.command.reply]
        if len(fields) < _LEAST_FIELDS.get(kind, 1):
            raise ValueError("a field is missing")
        if kind == "w":
            self._check("v" * len(fields[0]), fields[0])
            if len(fields[0]) != len(step.keys):
                raise ValueError(f"{len(fields[0])} values for {len(step.keys)} keys")
        elif kind == "p":
            self._check("nv"[: len(fields)], fields[:2])
        elif kind == "c":
            self._check("nn", fields[:2])
        elif kind:
            self._check("n" if kind == "b" else kind, fields[:1])
        step.reply = fields or _NO_FIELDS
        step.end = self.row
        connection.replies += 1

    def _check(self, kinds: str, fields: Row) -> None:
        """Raise ValueError unless the fields are of these kinds and refer only to defined numbers."""
        if len(fields) != len(kinds):
            raise ValueError(f"{len(fields)} fields instead of {len(kinds)}")
        recording = self.recording
        for kind, field in zip(kinds, fields, strict=True):
            if kind == "i":
                for pair in field:
                    self._check("kv", pair)
                continue
            if not isinstance(field, int):
                raise TypeError(f"{field!r} is not a number")
            number = int(field)
            if kind == "n":
                if not INT64_MIN <= number <= INT64_MAX:
                    raise ValueError(f"{number} is out of range for a 64-bit integer")
            else:
                tables: dict[str, list[Any]] = {"k": recording.keys, "l": recording.lists, "v": recording.values}
                if not 0 <= number < len(tables[kind]):
                    raise ValueError(f"number {number} is not defined")
