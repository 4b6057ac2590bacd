"""The legacy server: a thread for each connection, and one lock over the engine.

Knows: threads, blocking sockets. Must not know: opcodes, keys, what a command means.
Invariants: the lock is never held while anything waits. A connection's thread alone reads from it; whoever has the lock
may write to it what the kernel takes at once, and its own thread, or a helper while that one reads, writes the rest. A
peer that does not read is not read from.

It answers byte for byte as the event-driven server. It is here for those who ask for it, as in PyTorch: every rank
costs a thread and every command two switches between threads.
"""

import asyncio
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Final

from ..blob import Framed
from ..errors import LimitError, PeerError
from ..limits import Limits
from ..session.extension import identity
from ..session.server import Engine, ServerSession, newcomers
from .base import Complaints, log, room_for_connections, warn_of_short_backlog

_READ: Final = 64 * 1024
_PIECES: Final = 256
"""Pieces of replies that go out in one write."""

_ACCEPT_PAUSE: Final = 0.1
"""Seconds without accepting after the system refused a descriptor, memory or a thread."""


class Connection:
    """The door's side of one session."""

    def __init__(self, server: "ThreadedServer", peer: socket.socket, host: str, port: int) -> None:
        self.server = server
        self.peer = peer
        self.session = ServerSession(server.engine, self, host, port, time.monotonic())
        self.unsent: deque[Framed | memoryview] = deque()
        """What the kernel did not take yet, in order."""
        self.reading = True
        """Whether its own thread reads, or is about to, and cannot write."""
        self.helped = False
        """Whether a helper writes for it."""
        self.closed = False

    def run(self) -> None:
        """Serve the peer to the end. The connection's own thread."""
        server = self.server
        try:
            while not self.closed:
                chunk = self.peer.recv(_READ)
                with server.lock:
                    self.reading = False
                    if chunk:
                        self._execute(chunk)
                self._catch_up()
                if not chunk:
                    return
        except OSError:
            pass  # the peer has gone, or the server stops
        except Exception:
            log.exception("closing the connection of %s after an error of the server's", self.session)
        finally:
            with server.lock:
                self.close()

    def _execute(self, chunk: bytes) -> None:
        """Do what the peer asks and answer, as far as the kernel takes it. With the lock."""
        try:
            self.session.receive(chunk)
        except PeerError as error:
            self.server.refuse(self, error)
            self.flush()
            self.close()
        self.flush()
        self.server.flush_dirty()

    def _catch_up(self) -> None:
        """Wait until the peer has read what it was sent, and go on with requests that were kept back for that."""
        while not self.closed:
            if self.unsent:
                self._await_writable()
            with self.server.lock:
                self.push()
                if self.unsent or self.closed:
                    continue
                if not self.session.stalled():
                    self.reading = True
                    return
                self._execute(b"")

    def _await_writable(self) -> None:
        poll = select.poll()
        poll.register(self.peer, select.POLLOUT)
        poll.poll()

    def flush(self) -> None:
        """Hand the session's replies to the kernel, as far as it takes them. With the lock."""
        if self.closed:
            return
        self.unsent.extend(self.session.out)
        self.session.out.clear()
        self.push()
        if self.unsent and self.reading and not self.helped:
            self.helped = True
            self.server.start_thread(self._help, f"writing to {self.session}")

    def push(self) -> None:
        """Write what the kernel takes at once. With the lock."""
        unsent = self.unsent
        while unsent and not self.closed:
            try:
                count = self.peer.sendmsg(list(islice(unsent, _PIECES)), [], socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                self.close()
                return
            self.session.unread -= count
            while count:
                piece = unsent.popleft()
                if count < len(piece):
                    unsent.appendleft(memoryview(piece)[count:])
                count -= min(count, len(piece))

    def _help(self) -> None:
        """Write what is left while the connection's own thread reads. A helper thread."""
        while True:
            with suppress(OSError, ValueError):  # closed meanwhile
                self._await_writable()
            with self.server.lock:
                self.push()
                if self.closed or not self.unsent:
                    self.helped = False
                    return

    def close(self) -> None:
        """Close the connection, and hand on what the session was promised. With the lock."""
        if self.closed:
            return
        self.closed = True
        self.unsent.clear()
        with suppress(OSError):
            self.peer.shutdown(socket.SHUT_RDWR)  # wakes whoever waits for it
        self.session.leave()
        self.server.forget(self)


class ThreadedServer:
    """One server. To be made and stopped on a running loop, which waits for signals and the owner meanwhile."""

    def __init__(self, listener: socket.socket, limits: Limits) -> None:
        self.listener = listener
        self.limits = limits
        self.engine = Engine(limits)
        self.engine.identify(identity(secrets.token_hex(8), "threaded"))
        self.lock = threading.RLock()
        self.connections: set[Connection] = set()
        self.empty = asyncio.Event()
        self.empty.set()
        self.host: str = listener.getsockname()[0]
        self.port: int = listener.getsockname()[1]
        self.max_connections = 0
        self.stopped = False
        self._complaints = Complaints()
        self._loop = asyncio.get_running_loop()
        self._threads: set[threading.Thread] = set()
        self._accepting: threading.Thread | None = None
        self._wake, self._woken = socket.socketpair()
        self._flushing = False

    @property
    def count(self) -> int:
        """Connections that are open."""
        return len(self.connections)

    def start(self) -> None:
        """Accept connections from now on."""
        room = room_for_connections()
        self.max_connections = min(room, self.limits.connections or room)
        warn_of_short_backlog()
        log.info("listening on %s, port %d, for up to %d connections", self.host, self.port, self.max_connections)
        self._accepting = threading.Thread(target=self._accept_all, name="accepting", daemon=True)
        self._accepting.start()

    def stop(self) -> None:
        """Stop at once: the port is free and every connection closed when this returns. May be called again."""
        if self.stopped:
            return
        self.stopped = True
        self.stop_accepting()
        with self.lock:
            for connection in list(self.connections):
                connection.close()
            threads = list(self._threads)
        for thread in threads:
            thread.join()
        self._woken.close()
        self._complaints.finish()

    async def drain(self, grace: float) -> None:
        """Stop accepting, give the peers up to `grace` seconds to leave, then stop."""
        self.stop_accepting()
        try:
            await asyncio.wait_for(self.empty.wait(), grace)
        except asyncio.TimeoutError:
            log.info("connections closed after %g s of grace: %d", grace, self.count)
        self.stop()

    def announce(self, joins: int) -> None:
        """Say how many ranks are expected to join."""
        with self.lock:
            self.engine.announce(joins)

    def dismiss_newcomers(self, complete: float) -> None:
        """Close the connections that came after `complete`: they belong to a next round, and join again."""
        with self.lock:
            for session in newcomers([connection.session for connection in self.connections], complete):
                if isinstance(session.owner, Connection):
                    session.owner.close()

    def close_inherited(self) -> None:
        """In a forked child: close its copies of the connections, which are the parent's to close."""
        for connection in self.connections:
            connection.peer.close()

    def stop_accepting(self) -> None:
        """Free the port; connections that are open stay."""
        self._wake.close()
        if self._accepting is not None:
            self._accepting.join()
        self.listener.close()

    # Called by connections, with the lock

    def flush_dirty(self) -> None:
        """Flush the sessions that another one's command, or its end, gave something to say."""
        if self._flushing:
            return  # a connection failed under the loop below, which goes on with whom its end woke
        self._flushing = True
        try:
            dirty = self.engine.dirty
            while dirty:
                connection = dirty.pop().owner
                if isinstance(connection, Connection):
                    connection.flush()
        finally:
            self._flushing = False

    def refuse(self, connection: Connection, error: PeerError) -> None:
        """Say why a connection closes."""
        kind = error.limit if isinstance(error, LimitError) else "protocol"
        self._complaints.add(kind, f"closed the connection of {connection.session}: {error}")

    def forget(self, connection: Connection) -> None:
        """A connection has closed."""
        self.connections.discard(connection)
        if not self.stopped:
            self.flush_dirty()
        if not self.connections:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._note_empty)

    def start_thread(self, run: Callable[[], object], name: str) -> None:
        """Start a thread that the server waits for when it stops. Raises RuntimeError if there can be none."""

        def run_and_leave() -> None:
            try:
                run()
            finally:
                with self.lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run_and_leave, name=name, daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:
            self._threads.discard(thread)
            raise

    def _note_empty(self) -> None:
        if self.connections:
            self.empty.clear()
        else:
            self.empty.set()

    # The accepting thread

    def _accept_all(self) -> None:
        poll = select.poll()
        poll.register(self.listener, select.POLLIN)
        poll.register(self._woken, select.POLLIN | select.POLLHUP)
        while True:
            if any(fd == self._woken.fileno() for fd, _ in poll.poll()):
                return
            try:
                self._accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                continue
            except (OSError, RuntimeError) as error:
                with self.lock:
                    self._complaints.add("accept", f"cannot accept connections for now: {error}")
                time.sleep(_ACCEPT_PAUSE)

    def _accept(self) -> None:
        peer, (host, port, *_) = self.listener.accept()
        peer.setblocking(True)
        with self.lock:
            if self.count >= self.max_connections:
                peer.close()
                text = f"refused the connection of {host}, port {port}: {self.count} are open, the most allowed"
                self._complaints.add("connections", text)
                return
            connection = Connection(self, peer, host, port)
            self.connections.add(connection)
            self._loop.call_soon_threadsafe(self._note_empty)
            try:
                self.start_thread(lambda: self._serve(connection), f"serving {host}, port {port}")
            except RuntimeError:
                connection.close()
                peer.close()
                raise

    def _serve(self, connection: Connection) -> None:
        with connection.peer:
            connection.run()
