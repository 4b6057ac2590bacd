"""What commands print: results on standard output, whole or not at all, and errors on standard error.

Invariants: a command that exits with status 0 has written everything. Names and messages from peers are printed
without control characters, as a pipe may lead to a terminal; only values, and raw output, are unchanged.
"""

import errno
import os
import re
import select
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, Final

import click
import msgspec

_QUIET_SECONDS: Final = 2.0
"""Seconds before progress is shown."""

_UNPRINTABLE: Final = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
"""Control and format characters that JSON does not require to be escaped."""


def open_standard_streams() -> None:
    """Open descriptors 0 to 2 where the parent closed them, so that no socket gets the number of a standard stream."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number


def print_result(text: object, nl: bool = True) -> None:
    """Print a result completely; `nl` appends a newline.

    Raises ClickException if that fails, and BrokenPipeError, which click handles, if the reader is gone.
    """
    if sys.stdout is None:
        raise click.ClickException("cannot write to standard output: it is closed")
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    data = text if isinstance(text, bytes) else str(text).encode(encoding, errors="backslashreplace")
    try:
        sys.stdout.flush()
        _write_all(sys.stdout.buffer, data + b"\n" if nl else data)
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        raise click.ClickException(f"cannot write to standard output: {error.strerror}") from None


def stdout_is_closed() -> bool:
    """Return whether this process was started without a standard output."""
    return sys.stdout is None


def _write_all(stream: Any, data: bytes) -> None:
    """Write to the raw stream, which may accept only a part, or nothing while the reader is slow."""
    raw: IO[bytes] = getattr(stream, "raw", stream)
    remaining = memoryview(data)
    while remaining:
        count = raw.write(remaining)
        if count is None:  # a non-blocking stream, inherited as such
            select.select([], [raw], [])
        else:
            remaining = remaining[count:]


def print_json(value: Any) -> None:
    """Print a value as one line of JSON with all control characters escaped."""
    print_result(to_json(value))


def to_json(value: Any) -> str:
    """Return one line of JSON with all control characters escaped."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", msgspec.json.encode(value).decode())


def escape(text: str) -> str:
    """Return untrusted text as one printable line."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def print_error(text: str, status: int, output: str) -> None:
    """Print an error to standard error: one line, or a JSON object if `output` is "json"."""
    line = escape(text)
    click.echo(to_json({"error": line, "status": status}) if output == "json" else f"Error: {line}", err=True)


class ProgressLine:
    """A line on standard error that says what a slow command is doing, if that is a terminal.

    A thread writes it, so it is current even while the main thread computes; the end erases it.
    """

    def __init__(self) -> None:
        self.describe: Callable[[], str] = str
        """Returns the text; may be replaced at any time."""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "ProgressLine":
        if sys.stderr is not None and sys.stderr.isatty():
            self._thread = threading.Thread(target=self._show, name="tcpstore progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _show(self) -> None:
        if self._ended.wait(_QUIET_SECONDS):
            return
        with suppress(OSError):
            while not self._ended.wait(0.25):
                click.echo(f"\r\x1b[K{escape(self.describe())}", nl=False, err=True)
            click.echo("\r\x1b[K", nl=False, err=True)
