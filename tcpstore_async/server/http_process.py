"""The HTTP process of a server: how a server starts it, and what the end of one means for the other.

Knows the command line of `tcpstore http`. Must not know HTTP.
Invariants: the process ends when the server closes it or ends in whatever way. If it ends by itself, that is logged
once, its port is free, and the server goes on.
"""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final, NamedTuple

from ..auth.secret_files import TOKEN, TOKEN_FILE
from ..base.addresses import format_address
from .fork_safety import close_on_fork
from .listen_socket import listen

log = logging.getLogger("tcpstore_async.server")

_STOP_SECONDS: Final = 5.0


class HttpOptions(NamedTuple):
    """Where and how to answer over HTTP."""

    listener: socket.socket
    """The socket that listens; the process takes ownership."""
    url: str
    """Where the page is."""
    name: str = ""
    """The name of this host by which it was given."""
    same_user: bool = False
    """Whether only processes of this user, and root's, see what names keys or hosts."""
    log_format: str = "text"
    log_level: str = "info"


def listen_for_http(host: str, port: int, *, same_user: bool, log_format: str, log_level: str) -> HttpOptions:
    """Return how a server answers over HTTP at an address. Raises DistNetworkError if that cannot be had."""
    listener = listen(host, port)
    url = f"http://{format_address(*listener.getsockname()[:2])}/"
    return HttpOptions(listener, url, host, same_user, log_format, log_level)


@asynccontextmanager
async def http_process(admin: str, options: HttpOptions) -> AsyncIterator[None]:
    """Have a process answer over HTTP about the server with the admin socket `admin`, while the context lasts.

    Its log goes to this process's standard error.
    """
    listener = options.listener
    command = [sys.executable, "-m", "tcpstore_async", "http", "--admin", admin, "--owner-fd", "0"]
    command += ["--listen-fd", str(listener.fileno()), "--log-format", options.log_format, "--name", options.name]
    command += ["--log-level", options.log_level]
    command += ["--same-user"] if options.same_user else []
    # It ends when its standard input does: when this process has closed it, or has ended.
    end, stdin = socket.socketpair()
    with close_on_fork(end):
        with stdin, listener:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=stdin.fileno(),
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=(listener.fileno(),),
                start_new_session=True,
                env={key: text for key, text in os.environ.items() if key not in (TOKEN, TOKEN_FILE)},
            )
        watching = asyncio.ensure_future(_report_end(process, options.url))
        try:
            yield
        finally:
            watching.cancel()
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # works even if somebody else holds a copy
            try:
                await asyncio.wait_for(process.wait(), _STOP_SECONDS)
            except asyncio.TimeoutError:
                process.kill()
                await process.wait()


async def _report_end(process: asyncio.subprocess.Process, url: str) -> None:
    status = await process.wait()
    log.error(
        "the HTTP process (pid %d) exited with status %d: %s is no longer served; the server is not affected",
        process.pid,
        status,
        url,
    )
