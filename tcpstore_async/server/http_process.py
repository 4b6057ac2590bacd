"""The HTTP process of a server.

Knows the command line of `tcpstore http`. Must not know HTTP.
Invariants: the process ends with the server. If it ends by itself, that is logged once, its port is free, and the
server is not affected.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from ..auth.secret_files import TOKEN, TOKEN_FILE
from ..base import python_process
from ..base.addresses import format_address
from .listen_socket import listen
from .owned_process import STOP_SECONDS, OwnedProcess

log = logging.getLogger("tcpstore_async.server")


class HttpOptions(NamedTuple):
    """Where and how to answer over HTTP."""

    listener: socket.socket
    """The listening socket; the process takes ownership."""
    url: str
    """URL of the page."""
    name: str = ""
    """Name of this host, as the user gave it."""
    same_user: bool = False
    """Whether only processes of this user and of root see names of keys and hosts."""
    log_format: str = "text"
    log_level: str = "info"


def listen_for_http(host: str, port: int, *, same_user: bool, log_format: str, log_level: str) -> HttpOptions:
    """Listen for HTTP; return the options of the HTTP process. Raises DistNetworkError."""
    listener = listen(host, port)
    url = f"http://{format_address(*listener.getsockname()[:2])}/"
    return HttpOptions(listener, url, host, same_user, log_format, log_level)


@asynccontextmanager
async def http_process(admin: str, options: HttpOptions) -> AsyncIterator[None]:
    """Run a process that answers over HTTP about the server with the admin socket `admin`, while the context lasts.

    It logs to this process's standard error.
    """
    arguments = ["http", "--owner-fd", "0", "--admin", admin]
    arguments += ["--log-format", options.log_format, "--log-level", options.log_level]
    arguments += ["--name", options.name, *(["--same-user"] if options.same_user else [])]
    environment = {key: text for key, text in python_process.environment().items() if key not in (TOKEN, TOKEN_FILE)}
    with options.listener:
        fd = options.listener.fileno()
        owned = OwnedProcess([*arguments, "--listen-fd", str(fd)], environment, pass_fds=[fd])
    loop = asyncio.get_running_loop()

    def report_end() -> None:
        loop.remove_reader(owned.end)
        log.error(
            "the HTTP process (pid %d) exited with status %d: %s is no longer served; the server is not affected",
            owned.pid,
            owned.process.wait(STOP_SECONDS),
            options.url,
        )

    loop.add_reader(owned.end, report_end)
    try:
        yield
    finally:
        loop.remove_reader(owned.end)
        await loop.run_in_executor(None, owned.close)  # it waits
