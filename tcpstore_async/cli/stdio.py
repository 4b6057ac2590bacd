"""The standard streams of a server process, which must exist and must never block it.

Invariants: a reader of standard error cannot stop the server by not reading. Whatever peers send, a record is one line
of printable text, or several with a traceback.
"""

import logging
from types import TracebackType
from typing import Final, NoReturn

import click

from ..server.log_handlers import JsonHandler, NonBlockingHandler
from .output import escape

STANDARD_ERROR: Final = 2

INFO: Final = "info"
LOG_LEVELS: Final = ("debug", INFO, "warning", "error")

TEXT: Final = "text"
JSON: Final = "json"
LOG_FORMATS: Final = (TEXT, JSON)

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class _EscapingFormatter(logging.Formatter):
    """Escapes control characters: part of a message may come from a peer, or from another server."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escape(super().formatMessage(record))

    def formatException(self, ei: _ExcInfo) -> str:
        return "\n".join(map(escape, super().formatException(ei).split("\n")))


def fail(error: Exception, log_format: str, status: int = 1) -> NoReturn:
    """End the process with this status; the error is the last line of the log."""
    if log_format == JSON:
        logging.getLogger("tcpstore_async.server").critical("%s", error)
    else:
        click.ClickException(str(error)).show()
    raise SystemExit(status) from None


def log_without_blocking(log_format: str = TEXT, level: str = INFO) -> None:
    """Log to standard error from a level on, as text or as one JSON object per line."""
    handler = JsonHandler(STANDARD_ERROR) if log_format == JSON else NonBlockingHandler(STANDARD_ERROR)
    handler.setFormatter(_EscapingFormatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    root.setLevel(level.upper())
    root.addHandler(handler)
