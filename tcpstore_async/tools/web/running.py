"""Runs the HTTP server, in a process of its own.

Knows its parts, signals, and the process that started it. Must not know the command line.
Invariant: when `run` ends, the port is free. It ends when its owner does, in whatever way.
"""

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

from ...base.addresses import format_address, is_loopback
from ...server.peer_user import PeerUsers
from ...server.process.child import ignore_signals
from .answers import Answers
from .http import HttpServer
from .looking import Looker

log = logging.getLogger("tcpstore_async.web")

_POLL_SECONDS: Final = 0.2
_ENDING: Final = (signal.SIGINT, signal.SIGTERM)
_WAITED_FOR: Final = (*_ENDING, signal.SIGHUP)


def run(
    listener: socket.socket,
    find: Callable[[], Path],
    *,
    name: str = "",
    same_user: bool = False,
    owner_fd: int | None = None,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Answer on a socket that listens until SIGTERM or SIGINT, or until `owner_fd` ends, if that is given.

    `find` returns the path of the server's admin socket, or raises DistNetworkError. `name` is the host as given to
    --listen. With `same_user`, only this user's processes, and root's, see answers with keys or hosts. With `owner_fd`,
    a pipe or socket whose other end the owner holds, signals are ignored. `ready` is called once requests are answered.
    Takes ownership of `listener`. Raises DistNetworkError if `same_user` is not possible on this system.
    """
    host, port = listener.getsockname()[:2]
    with listener, ExitStack() as stack:
        if owner_fd is None:  # before threads start, which would receive them
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
            stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        else:
            ignore_signals()
        users = stack.enter_context(closing(PeerUsers())) if same_user else None
        looker = stack.enter_context(closing(Looker(find)))
        names = frozenset({"localhost", socket.gethostname().lower(), name.lower()} - {""})
        http = HttpServer(listener, Answers(looker, same_user or is_loopback(host)), names, users)
        looker.start()
        serving = threading.Thread(target=http.serve_forever, args=(_POLL_SECONDS,), name="tcpstore http")
        serving.start()
        try:
            warn_if_exposed(host, port, same_user)
            ready()
            _wait(owner_fd)
        finally:
            http.shutdown()
            serving.join()


def _wait(owner_fd: int | None) -> None:
    """Wait until the process must end."""
    if owner_fd is None:
        while signal.sigwait(_WAITED_FOR) not in _ENDING:
            log.info("SIGHUP: there is nothing to reload; the HTTP process keeps running")
        return
    while os.read(owner_fd, 4096):
        pass


def warn_if_exposed(host: str, port: int, same_user: bool) -> None:
    """Warn if the page can be reached from other hosts."""
    if not is_loopback(host) and not same_user:
        log.warning(
            "http://%s/ is reachable from other hosts, without TLS or tokens: anyone who can reach it sees the names "
            "of keys and hosts (never values); listen on 127.0.0.1, or restrict access to it (docs/security.md)",
            format_address(host, port),
        )
