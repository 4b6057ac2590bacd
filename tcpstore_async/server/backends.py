"""The servers that there are, by name, and defaults that they share with those who start one.

Knows the names. Must not know how a server works; importing this imports none.
"""

from typing import TYPE_CHECKING, Final

from ..auth.secret_files import TOKEN, TOKEN_FILE
from ..base.limits import Limits
from ..session.identity import THREADED

if TYPE_CHECKING:
    import socket

    from .base import Server
    from .tls import ServerTls

BACKENDS: Final = ("uv", THREADED)
DEFAULT_BACKEND: Final = "uv"

START_TIMEOUT: Final = 60.0
"""Seconds that a caller with a timeout of 0 waits for its server to start, which usually takes 0.1."""


def check_backend(backend: str, tls: bool = False, tokens: bool = False) -> None:
    """Raise ValueError if there is no backend of that name, or if it lacks the TLS or tokens that it is to use.

    The threaded one has neither TLS nor tokens: it must not serve in the clear instead.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; choose {' or '.join(BACKENDS)}")
    if backend == THREADED and (tls or tokens):
        lacks = ["TLS (tls=, TCPSTORE_TLS)"] if tls else []
        lacks += [f"tokens (token=, token_keys=, {TOKEN}, {TOKEN_FILE}, TCPSTORE_TOKEN_KEYS)"] if tokens else []
        raise ValueError(
            f"the server of use_libuv=False has no {' and no '.join(lacks)}: leave that out, or use the default server"
        )


def make_server(backend: str, listener: "socket.socket", limits: Limits, tls: "ServerTls | None" = None) -> "Server":
    """Return a server of that name, which has passed `check_backend`, on a socket that listens."""
    if backend == THREADED:  # each is imported by those who use it only: a server has to start fast
        from .threaded import ThreadedServer

        return ThreadedServer(listener, limits)
    from .uv import UvServer

    return UvServer(listener, limits, tls=tls)
