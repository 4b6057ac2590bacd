"""Reload the files that a server was started with: its certificate, token keys, revoked tokens.

Knows which files there are, how to notice changes, and which connections end. Must not know what is in the files.
Invariants: files that cannot be used are logged and change nothing. Unless asked to, it reads no file that is still
being written: a changed file must look the same twice in a row. A file system that hangs does not stop the server.
"""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from ..auth.tokens import SharedTokens, TokenFiles
from .base import Server

LOOK_SECONDS: Final = 2.0
"""Time between two looks at the files of a server that gets no signals."""

log = logging.getLogger("tcpstore_async.server")

_State = list[tuple[int, int, int] | None]


class Reloading:
    """The files of one server."""

    def __init__(self, server: Server, tokens: TokenFiles | SharedTokens | None) -> None:
        self._server = server
        self._tokens = tokens if isinstance(tokens, TokenFiles) else None
        paths = [] if server.tls is None else [path for path in server.tls.files if path]
        self._paths = [*paths, *([] if self._tokens is None else self._tokens.paths())]

    def reload(self, why: str) -> None:
        """Load the files, and close connections whose token is no longer valid. Logs errors. On the loop."""
        server, tokens = self._server, self._tokens
        if not self._paths:
            log.info("%s: this server has no files to reload; it keeps running", why)
        if server.stopped:
            return
        if server.tls is not None:
            server.tls.reload()
        if tokens is None:
            return
        try:
            ended = tokens.reload()
        except (OSError, ValueError) as error:
            log.error("cannot reload the token files: %s; the previous ones stay in use", error)
            return
        with server.turn:
            server.log_audit(why, f"{why}: reloaded {tokens.describe()}", logging.INFO)
        server.close_invalid(ended)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Reload changed files while the context lasts, for a server that gets no signals."""
        over = threading.Event()
        if self._paths:
            loop, loaded = asyncio.get_running_loop(), self._state()
            threading.Thread(target=self._run, args=(loop, loaded, over), name="tcpstore files", daemon=True).start()
        try:
            yield
        finally:
            over.set()  # the thread is not joined: the file system may hang

    def _run(self, loop: asyncio.AbstractEventLoop, loaded: _State, over: threading.Event) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # other threads wait for them
        self._watch(loop, loaded, over)

    def _watch(self, loop: asyncio.AbstractEventLoop, loaded: _State, over: threading.Event) -> None:
        before = loaded
        while not over.wait(LOOK_SECONDS):
            now = self._state()
            if now != loaded and now == before:
                loaded = now
                with suppress(RuntimeError):  # the loop may be closed already
                    loop.call_soon_threadsafe(self.reload, "files changed")
            before = now

    def _state(self) -> _State:
        return [_state_of(path) for path in self._paths]


def _state_of(path: str) -> tuple[int, int, int] | None:
    """Return values that change when the file does; None if there is no such file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
