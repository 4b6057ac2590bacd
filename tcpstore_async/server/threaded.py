"""The legacy server: one thread per connection, and one lock over the store.

Knows threads and sockets. Must not know opcodes, keys, or what a command means.
Invariants: no thread blocks while it holds the lock. Only a connection's own thread reads from it and frees its
descriptor. The holder of the lock may write what the kernel takes at once; one thread writes the rest, for all
connections. A peer that does not read is not read from. Once started, only a new connection needs a new thread.

It replies byte for byte as the event-driven server does, but has no TLS, no tokens and no links. It exists because
PyTorch has one (`use_libuv=False`): every rank costs a thread, and every command two switches between threads.
"""

import errno
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from ..base.errors import PeerError
from ..base.limits import Limits
from ..session.budget import SESSION_BYTES
from ..session.identity import THREADED
from ..session.named_stores import NamedStore
from ..session.transport import Transport
from ..session.unsent import PIECES
from ..wire.values import Framed, length
from . import base
from .accepting import ACCEPT_PAUSE
from .listen_socket import free_large_memory
from .threads import FairLock, Worker

_READ: Final = 16 * 1024
"""Bytes read at once. With more, a peer that sends the shortest commands would hold the lock longer than 10 ms."""

_SESSION_BYTES: Final = SESSION_BYTES + 64 * 1024
"""Cost of one connection, its thread included."""


class Connection(Transport):
    """A session and its socket. Only `run` and what it calls may be called without the lock."""

    def __init__(
        self, server: "ThreadedServer", peer: socket.socket, host: str, port: int, store: NamedStore | None = None
    ) -> None:
        super().__init__(server.store if store is None else store, host, port, server.clock.now)
        self.server = server
        self.peer = peer
        self.caught_up = threading.Event()
        """Set while there are no unsent bytes; the writing thread sets it when it has sent them."""
        self.caught_up.set()
        self.awake = threading.Event()
        """Clear while its command in steps is parked until waiters are woken."""
        self.awake.set()
        self.is_closed = False
        self.finishing = False
        """Whether it lasts only until its unsent bytes are sent."""
        self.broken = False
        """Whether its thread has read an error other than the peer's own close."""

    # Its own thread

    def run(self) -> None:
        """Serve the peer until either side closes the connection."""
        with self.peer:
            try:
                self._serve()
            except Exception:
                with self.server.turn:
                    self.server.give_up(self)
            finally:
                with self.server.turn:
                    self._close(self.broken)

    def _serve(self) -> None:
        while chunk := self._read():
            times = self.server.times
            began = 0.0 if times is None else times.begin()
            with self.server.turn:
                self._execute(chunk)
                if began and times is not None:
                    times.served(began)
                    times.end(began)
            while self._behind():
                self._catch_up()
            if self.is_closed:
                return  # bytes left in the kernel make the close a reset, which wakes a peer blocked in send()
            if self.finishing:
                break
        self.caught_up.wait()  # the peer may still be reading

    def _read(self) -> bytes:
        """Return the next bytes, or none at the end of the connection, whichever side closed it."""
        try:
            return self.peer.recv(_READ)
        except OSError as error:
            self.broken = error.errno != errno.EPIPE
            return b""

    def _behind(self) -> bool:
        """Return whether the peer must read replies before it is read from again."""
        session = self.session
        if self.is_closed or self.finishing:
            return False
        return session.stalled() or session.unsent > self.server.limits.unsent_high_water

    def _catch_up(self) -> None:
        """Wait until all replies are sent, then execute the requests held back meanwhile.

        A command that runs in steps continues at once: others may wait for its end. It is parked only while deferred
        work wakes waiters: most wait for that themselves, and hundreds of threads would ask for the lock in vain.
        """
        if self.session.running is None:
            self.caught_up.wait()
        else:
            self.awake.wait()
        with self.server.turn:
            if self.session.stalled():
                self._execute(b"")

    # With the lock

    def _execute(self, chunk: bytes) -> None:
        """Execute requests, and write the replies as far as the kernel takes them."""
        if self.is_closed:
            return
        self.server.received += len(chunk)
        try:
            self.session.receive(chunk)
        except PeerError as error:
            self.server.close_for(self, error)
        self.flush()
        self.server.flush_pending()
        if self.session.waits_for_work() and not self.is_closed:
            self.awake.clear()
            self.server.parked.add(self)

    def flush(self) -> None:
        session = self.session
        out = session.out
        if self.is_closed or not out:
            return
        if session.backlog is not None:
            session.keep_unsent(out, 0)
        else:
            self._send(out)
        out.clear()

    def _send(self, out: list[Framed]) -> None:
        """Write what the kernel takes at once, no more: a peer that reads fast must not keep the lock."""
        session = self.session
        for at in range(0, len(out), PIECES):
            batch = out[at : at + PIECES]
            count = self._write(batch)
            if count < 0:
                return
            if count < length(batch):
                session.keep_unsent(out[at:], count)
                if session.backlog is not None:
                    self.server.writer.add(self)
                return

    def push(self) -> None:
        """Write unsent bytes likewise."""
        session = self.session
        while (backlog := session.backlog) is not None:
            count = self._write(backlog.batch())
            if count <= 0:
                return
            if backlog.took(count):
                session.backlog = None

    def _write(self, batch: Sequence[Framed | memoryview]) -> int:
        """Write; return how many bytes the kernel took, or -1 if the connection is lost and now closed."""
        try:
            count = self.peer.sendmsg(batch, [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:  # its thread finds it closed
            self._close(True)
            return -1
        self.session.unsent -= count
        self.server.sent += count
        return count

    def close(self) -> None:
        self._close(False)

    def finish(self) -> None:
        self.finishing = True

    def _close(self, broken: bool) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self.server.writer.remove(self)
        self.server.wake(self)
        with suppress(OSError):
            self.peer.shutdown(socket.SHUT_RDWR)  # wakes its thread, which frees the descriptor
        self.leave(broken)
        self.server.connections.discard(self)
        self.server.closed(self)


class Writer:
    """One thread that sends the unsent bytes of all connections, while their own threads read."""

    def __init__(self, lock: FairLock) -> None:
        self._lock = lock
        self._behind: dict[int, Connection] = {}
        """Connections with unsent bytes, keyed by file descriptor."""
        self._poll = select.poll()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._poll.register(self._woken, select.POLLIN)
        self._stopped = False

    def add(self, connection: Connection) -> None:
        """Write the unsent bytes of a connection when the kernel takes more. In a turn."""
        connection.caught_up.clear()
        fd = connection.peer.fileno()
        self._behind[fd] = connection
        self._poll.register(fd, select.POLLOUT)
        with suppress(BlockingIOError):  # earlier wake-ups fill the buffer
            self._waker.send(b"\0")

    def remove(self, connection: Connection) -> None:
        """Stop writing to a connection, which has no unsent bytes or is closed. In a turn."""
        if self._behind.pop(connection.peer.fileno(), None) is not None:
            self._poll.unregister(connection.peer)
        connection.caught_up.set()

    def stop(self) -> None:
        """Let its thread end."""
        self._stopped = True
        self._waker.shutdown(socket.SHUT_RDWR)  # close() would not wake it while a forked child has a copy

    def close(self) -> None:
        """Free its descriptors, once its thread has ended."""
        self._waker.close()
        self._woken.close()

    def run(self) -> None:
        """Write until stopped: the target of its thread."""
        while not self._stopped:
            reported = self._poll.poll()
            with self._lock:
                for fd, _ in reported:
                    connection = self._behind.get(fd)
                    if connection is not None:
                        self._write(connection)
                    elif fd == self._woken.fileno():
                        self._woken.recv(4096)

    def _write(self, connection: Connection) -> None:
        try:
            connection.push()
            if connection.session.backlog is None:
                self.remove(connection)
        except Exception:
            connection.server.give_up(connection)


class ThreadedServer(base.Server):
    """The server. Its loop accepts connections and runs timers; threads serve."""

    def __init__(self, listener: socket.socket, limits: Limits) -> None:
        lock = FairLock()
        super().__init__(listener, limits, THREADED, _SESSION_BYTES, lock)
        self.writer = Writer(lock)
        self.connections: set[Connection] = set()
        self.parked: set[Connection] = set()
        """Connections whose command in steps waits until deferred work has woken waiters."""
        self._threads: set[Worker] = set()
        """Threads to join when the server stops."""
        self._ended: deque[Worker] = deque()
        """Those of `_threads` that are ending."""
        self._without_thread: list[Connection] = []
        """Connections whose threads could not be started yet."""

    def start(self) -> None:
        """Accept connections from now on. Raises RuntimeError if the writing thread cannot be started."""
        free_large_memory()
        self._start_thread(self.writer.run, "tcpstore writing")
        super().start()

    def open_connections(self) -> list[Transport]:
        return list(self.connections)

    def release(self) -> None:
        with self.turn:
            self.writer.stop()
        for thread in self._threads:
            thread.join()
        for connection in self._without_thread:
            connection.peer.close()
        self.writer.close()

    def close_inherited(self) -> None:
        for connection in self.connections:
            connection.peer.close()
        self.writer.close()

    def call_soon(self, callback: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop may be closed already
            self.loop.call_soon_threadsafe(callback)

    # Deferred work

    def wake(self, connection: Connection) -> None:
        """Let a parked command continue. In a turn."""
        self.parked.discard(connection)
        connection.awake.set()

    def work(self) -> None:
        super().work()
        with self.turn:
            for connection in [one for one in self.parked if not one.session.waits_for_work()]:
                self.wake(connection)

    # Accepting

    def serve(self, fd: int, host: str, port: int, store: NamedStore | None = None) -> None:
        with self.turn:
            if (store is not None and store.ended) or not self.admits(host, port):
                os.close(fd)
                return
            peer = socket.socket(fileno=fd)
            try:
                peer.setblocking(True)
                connection = Connection(self, peer, host, port, store)
                if store is not None:
                    self.named.arrive(connection.session, store)
            except BaseException:
                peer.detach()
                raise
            self.connections.add(connection)
            self.opened()
        self._run(connection)

    def _run(self, connection: Connection) -> None:
        """Start the thread of a connection; if that is not possible, pause accepting and retry."""
        try:
            self._start_thread(connection.run, f"tcpstore serving {connection.session}")
        except (RuntimeError, MemoryError) as error:
            if not self._without_thread:
                self.acceptor.hold(str(error))
                self.loop.call_later(ACCEPT_PAUSE, self._run_waiting)
            self._without_thread.append(connection)

    def _run_waiting(self) -> None:
        waiting, self._without_thread = self._without_thread, []
        for connection in waiting:
            if connection.is_closed:  # it timed out, or the server has stopped
                connection.peer.close()
            else:
                self._run(connection)

    def _start_thread(self, run: Callable[[], object], name: str) -> None:
        """Start a thread that the server joins when it stops. Raises RuntimeError and MemoryError if it cannot."""
        while self._ended:
            ended = self._ended.popleft()
            ended.join()
            self._threads.discard(ended)
        worker = Worker(run, name, self._ended)
        worker.start()
        self._threads.add(worker)
