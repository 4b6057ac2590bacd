"""What commands print: results on standard output, whole or not at all, and errors on standard error.

Knows: standard streams, JSON, what a terminal would take for a command. Must not know: what is printed.
Invariants: whoever ends with status 0 has written everything. What others have named or said reaches a terminal as
text; only values, and what is asked for raw, are printed as they are.
"""

import errno
import re
import select
import sys
from typing import IO, Any, Final

import click
import msgspec

_LINE_BREAKS: Final = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"

_UNSEEN: Final = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
"""Control and format characters that JSON may leave as they are."""


def say(text: object, nl: bool = True) -> None:
    """Print a result, all of it. A reader who has gone is click's business. Raises ClickException if it cannot."""
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


def is_closed() -> bool:
    """Whether nobody is to see what is printed."""
    return sys.stdout is None


def _write_all(stream: Any, data: bytes) -> None:
    """Without buffer: of a raw stream a write may take a part only, or nothing while a reader is slow."""
    raw: IO[bytes] = getattr(stream, "raw", stream)
    left = memoryview(data)
    while left:
        count = raw.write(left)
        if count is None:
            select.select([], [raw], [])
        else:
            left = left[count:]


def say_json(value: Any) -> None:
    """Print an object of JSON, in which every control character is escaped."""
    say(to_json(value))


def to_json(value: Any) -> str:
    """One line of JSON, in which every control character is escaped."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", msgspec.json.encode(value).decode())


def shown(text: str) -> str:
    """A text of others as a terminal may have it: in one line, with nothing that it would take for a command."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _escaped(one) for one in text)


def shown_in_a_line(text: str) -> str:
    """The same on a terminal; to others only line breaks are escaped, so that a line stays one name."""
    if sys.stdout is None or sys.stdout.isatty():
        return shown(text)
    return "".join(_escaped(one) if one in _LINE_BREAKS else one for one in text) if _breaks(text) else text


def _breaks(text: str) -> bool:
    return len(text.splitlines()) > 1 or text.endswith(tuple(_LINE_BREAKS))


def _escaped(one: str) -> str:
    return one.encode("unicode_escape").decode()


def say_error(text: str, status: int, output: str) -> None:
    """Say on standard error why it failed: in one line, or as an object of JSON."""
    said = shown(text)
    click.echo(to_json({"error": said, "status": status}) if output == "json" else f"Error: {said}", err=True)
