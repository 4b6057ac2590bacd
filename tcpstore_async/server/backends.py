"""The names of the backends, and defaults shared by everything that starts a server.

Must not know how a server works; importing this imports none.
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
"""Seconds that a caller with a timeout of 0 waits for its server to start, which usually takes 0.1 s."""


def check_backend(backend: str, tls: bool = False, tokens: bool = False, persist: bool = False) -> None:
    """Raise ValueError for an unknown backend, or one that lacks the requested TLS, tokens or journal.

    The threaded server has none of them, and must not serve in the clear instead.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; choose {' or '.join(BACKENDS)}")
    if backend == THREADED and (tls or tokens or persist):
        lacks = ["TLS (tls=, tls_cert=, TCPSTORE_TLS)"] if tls else []
        names = f"token=, token_keys=, tokens=, require_auth=, {TOKEN}, {TOKEN_FILE}, TCPSTORE_TOKEN_KEYS"
        lacks += [f"tokens ({names})"] if tokens else []
        lacks += ["journal (persist=)"] if persist else []
        raise ValueError(
            f"the threaded server (use_libuv=False) has no {' and no '.join(lacks)}: leave that out, or use the "
            "default server"
        )


def make_server(
    backend: str, listener: "socket.socket", limits: Limits, tls: "ServerTls | None" = None, instance: str = ""
) -> "Server":
    """Return a server on a listening socket. `backend` has passed `check_backend`; `instance` is as for `Server`."""
    if backend == THREADED:  # import only the one that is used: a server must start fast
        from .threaded import ThreadedServer

        return ThreadedServer(listener, limits)
    from .uv import UvServer

    return UvServer(listener, limits, tls=tls, instance=instance)
