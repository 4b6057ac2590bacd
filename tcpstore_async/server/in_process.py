"""A server in a thread of this process, for where it cannot have a process of its own.

Knows: one loop in one thread. Must not know: the protocol.
Invariant: as for a server in a process, a forked child holds nothing of it and cannot end it.

It is the second choice: while another thread is busy in Python every answer waits for the interpreter's lock, 5 ms at
the median.
"""

import asyncio
import atexit
import os
import socket
import threading
from concurrent.futures import Future

from ..limits import Limits
from .backends import DEFAULT_BACKEND, Server, server_of
from .fork_safety import close_on_fork, kept_private
from .loop import run_loop
from .threaded import Worker


class ServerThread:
    """A server on `listener`, which it closes. For any thread; the same to its owner as a `ServerProcess`."""

    def __init__(self, listener: socket.socket, backend: str = DEFAULT_BACKEND) -> None:
        """Raises what keeps a server from starting."""
        self.port: int = listener.getsockname()[1]
        self.pid = os.getpid()
        self._backend = backend
        self._joins = 0
        self._listener = close_on_fork(listener)
        self._lock = threading.RLock()  # reentrant: a collection may stop one while its thread is at work on it
        self._stopped = False
        self._over = asyncio.Event()
        started: Future[tuple[asyncio.AbstractEventLoop, Server]] = Future()
        self._thread = threading.Thread(target=self._run, args=[started], name="tcpstore server", daemon=True)
        self._thread.start()
        self._loop, self._server = started.result()
        self.room = self._server.max_connections
        """Connections that it can hold."""
        atexit.register(self.stop)

    def announce(self, joins: int) -> None:
        """So many more ranks are to join."""
        if self.pid != os.getpid():
            return
        with self._lock:
            self._joins += joins
            if not self._stopped:
                self._loop.call_soon_threadsafe(self._server.announce, self._joins)

    def complete(self) -> None:
        """All have joined. Of no account here: nobody has a grace."""

    def alive(self) -> bool:
        """Whether it runs still: it was not stopped, and has not crashed."""
        return not self._stopped and self._thread.is_alive()

    def stop(self) -> None:
        """Free the port and close every connection at once; both are done when this returns. May be called again.

        There is no grace for the other ranks: this process may be about to end, and its threads with it.
        """
        if self.pid != os.getpid():
            return
        with self._lock:
            if not self._stopped:
                self._stopped = True
                atexit.unregister(self.stop)
                self._loop.call_soon_threadsafe(self._over.set)
            here = threading.current_thread()
            if here is not self._thread and not isinstance(here, Worker):  # a collection may happen there
                self._thread.join()

    def _run(self, started: "Future[tuple[asyncio.AbstractEventLoop, Server]]") -> None:
        try:
            run_loop(self._serve(started))
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    async def _serve(self, started: "Future[tuple[asyncio.AbstractEventLoop, Server]]") -> None:
        server = server_of(self._backend)(self._listener, Limits())
        with kept_private(server):
            try:
                server.start()
                started.set_result((asyncio.get_running_loop(), server))
                await self._over.wait()
            finally:
                server.stop()
