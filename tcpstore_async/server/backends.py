"""The servers that there are, by name, and defaults that they share with those who start one.

Knows the names. Must not know how a server works; importing this imports none.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .base import Server

BACKENDS: Final = ("uv", "threaded")
DEFAULT_BACKEND: Final = "uv"

START_TIMEOUT: Final = 60.0
"""Seconds that a caller with a timeout of 0 waits for its server to start, which usually takes 0.1."""


def check_backend(backend: str) -> None:
    """Raise ValueError if there is no backend of that name."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; choose {' or '.join(BACKENDS)}")


def server_class(backend: str) -> "Callable[..., Server]":
    """Return the server of that name, to be called with a listener, its limits, and `tls`. Raises ValueError."""
    check_backend(backend)
    if backend == "threaded":  # each is imported by those who use it only: a server has to start fast
        from .threaded import ThreadedServer

        return ThreadedServer
    from .uv import UvServer

    return UvServer
