"""Loading again the files that a server was started with: its certificate, the keys of tokens, revoked tokens.

Knows which files there are, how to notice that they have changed, and whose connections end. Must not know what is in
the files.
Invariants: files that cannot be used change nothing, which is logged. A file that is being written is not read, if
nobody asks for it: one that has changed has to be the same at two looks. A file system that hangs stops no server.
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
"""Time between two looks at the files of a server that is told nothing."""

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
        """Load the files, and close the connections whose token is no longer valid. On the loop; logs what is wrong."""
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
        with server.lock:
            server.log_audit(why, f"{why}: reloaded {tokens.describe()}", logging.INFO)
        server.close_invalid(ended)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Reload when files have changed, for as long as the context lasts; for a server that nobody sends a signal."""
        over = threading.Event()
        if self._paths:
            loop, loaded = asyncio.get_running_loop(), self._state()
            threading.Thread(target=self._run, args=(loop, loaded, over), name="tcpstore files", daemon=True).start()
        try:
            yield
        finally:
            over.set()  # nobody waits for the thread, as a file system may hang

    def _run(self, loop: asyncio.AbstractEventLoop, loaded: _State, over: threading.Event) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for who waits for them
        self._watch(loop, loaded, over)

    def _watch(self, loop: asyncio.AbstractEventLoop, loaded: _State, over: threading.Event) -> None:
        before = loaded
        while not over.wait(LOOK_SECONDS):
            now = self._state()
            if now != loaded and now == before:
                loaded = now
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self.reload, "files changed")
            before = now

    def _state(self) -> _State:
        return [_state_of(path) for path in self._paths]


def _state_of(path: str) -> tuple[int, int, int] | None:
    """Return what changes when a file does, None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
