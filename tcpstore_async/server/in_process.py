"""A server in a thread of this process, if that is requested or a server process cannot be started.

Must not know the protocol.
Invariant: as with a server process, a forked child holds nothing of it and cannot stop it.

It is the second choice: while another thread runs Python code, each reply waits for the GIL, 5 ms at the median.
"""

import asyncio
import atexit
import os
import socket
import threading
from concurrent.futures import Future

from ..auth.tokens import HostTokens
from ..base.limits import Limits
from ..base.locks import RLock
from .admin import admin_socket
from .backends import make_server
from .base import Server
from .fork_safety import close_on_fork, closed_in_children
from .reloading import Reloading
from .threads import Worker
from .tls import ServerTls


class ServerThread:
    """A server in a thread, with the interface of `ServerProcess`. Thread-safe."""

    def __init__(
        self, listener: socket.socket, backend: str, tls: ServerTls | None = None, tokens: HostTokens | None = None
    ) -> None:
        """Serve on `listener`, which is closed with the server. Raises what keeps the server from starting."""
        self.port: int = listener.getsockname()[1]
        self.pid = os.getpid()
        self._backend = backend
        self._tls = tls
        self._tokens = tokens
        self._joins = 0
        self._listener = close_on_fork(listener)
        self._lock = RLock()
        """Reentrant: a garbage collection may call `stop` in a thread that holds the lock."""
        self._stopped = False
        self._over = asyncio.Event()
        started: Future[tuple[asyncio.AbstractEventLoop, Server]] = Future()
        self._thread = threading.Thread(target=self._run, args=[started], name="tcpstore server", daemon=True)
        self._thread.start()
        try:
            self._loop, self._server = started.result()
        finally:
            del started
        self.max_connections = self._server.max_connections
        atexit.register(self.stop)

    def announce(self, joins: int) -> None:
        """Expect `joins` more ranks to join."""
        if self.pid != os.getpid():
            return
        with self._lock:
            self._joins += joins
            if not self._stopped:
                self._loop.call_soon_threadsafe(self._server.announce, self._joins)

    def complete(self) -> None:
        """Do nothing: no connection outlives `stop`."""

    def alive(self) -> bool:
        """Return whether it has neither stopped nor crashed."""
        return not self._stopped and self._thread.is_alive()

    def crash(self) -> str:
        """Return "": there is no process to crash."""
        return ""

    def stop(self) -> None:
        """Free the port and close every connection; both are done on return. Idempotent.

        Other ranks get no grace: this process may be about to end, and its threads with it.
        """
        if self.pid != os.getpid():
            return
        with self._lock:
            if not self._stopped:
                self._stopped = True
                atexit.unregister(self.stop)
                self._loop.call_soon_threadsafe(self._over.set)
            here = threading.current_thread()
            # A garbage collection may call this in a thread of the server, which must not wait for itself.
            if here is not self._thread and not isinstance(here, Worker):
                self._thread.join()

    def _run(self, started: "Future[tuple[asyncio.AbstractEventLoop, Server]]") -> None:
        try:
            import uvloop  # clients need not import it

            uvloop.run(self._serve(started))
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error.with_traceback(None))

    async def _serve(self, started: "Future[tuple[asyncio.AbstractEventLoop, Server]]") -> None:
        server = make_server(self._backend, self._listener, Limits(), self._tls)
        checker = None
        if self._tokens is not None:
            checker = self._tokens.checker()
            server.store.hub.auth.authenticate = checker.authenticate
            server.store.hub.auth.require_auth = self._tokens.require_auth
        with closed_in_children(server):
            try:
                server.start()
                async with admin_socket(server, None):
                    with Reloading(server, checker).watching():
                        started.set_result((asyncio.get_running_loop(), server))
                        await self._over.wait()
            finally:
                server.stop()
