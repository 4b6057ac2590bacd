"""The legacy server: a thread for each connection, and one lock over the engine.

Knows: threads, sockets. Must not know: opcodes, keys, what a command means.
Invariants: the lock is never held while anything waits. A connection's own thread alone reads from it, and alone closes
its descriptor; whoever has the lock may write to it what the kernel takes at once, and one thread for all writes what is
left over. A peer that does not read is not read from. After the start no thread has to be had but for a new connection.

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

_READ: Final = 16 * 1024
"""One read of the shortest commands keeps the others waiting for some 50 ms."""

_PIECES: Final = 256
"""Pieces of replies that go out in one write."""

_PAUSE: Final = 0.1
"""Seconds without accepting after the system refused a descriptor, memory or a thread."""


class Worker(threading.Thread):
    """A thread of a server's. Whoever stops the server waits for it, so it must not wait for the end of one."""

    def __init__(self, run: Callable[[], object], name: str) -> None:
        super().__init__(target=run, name=name, daemon=True)


class Connection:
    """The door's side of one session. Everything but its own thread's part is called with the lock."""

    def __init__(self, server: "ThreadedServer", peer: socket.socket, host: str, port: int) -> None:
        self.server = server
        self.peer = peer
        self.session = ServerSession(server.engine, self, host, port, time.monotonic())
        self.unsent: deque[Framed | memoryview] = deque()
        """What the kernel did not take yet, in order; the writer sends it on."""
        self.caught_up = threading.Condition(server.lock)
        """The kernel has taken everything, or the connection is closed."""
        self.closed = False

    # Its own thread

    def run(self) -> None:
        """Serve the peer to the end."""
        with self.peer:
            try:
                self._serve()
            except Exception:
                log.exception("closing the connection of %s after an error of the server's", self.session)
            finally:
                with self.server.lock:
                    self.close()

    def _serve(self) -> None:
        while chunk := self._read():
            with self.server.lock:
                self._execute(chunk)
            while self._behind():
                self._catch_up()
        while self.unsent:  # it sends no more, and may read still
            self._catch_up()

    def _read(self) -> bytes:
        """What the peer sends next; nothing at the end, whoever made it."""
        try:
            return self.peer.recv(_READ)
        except OSError:
            return b""

    def _behind(self) -> bool:
        """Whether the peer has to read before it is read from again."""
        session = self.session
        return not self.closed and (session.stalled() or session.unread > self.server.limits.unread_soft_bytes)

    def _catch_up(self) -> None:
        """Wait until the peer has been sent everything, and go on with requests that were kept back for that."""
        with self.server.lock:
            while self.unsent:
                self.caught_up.wait()
            if self.session.stalled():
                self._execute(b"")

    # With the lock

    def _execute(self, chunk: bytes) -> None:
        """Do what the peer asks and answer, as far as the kernel takes it."""
        if self.closed:
            return
        try:
            self.session.receive(chunk)
        except PeerError as error:
            self.server.refuse(self, error)
            self.flush()
            self.close()
        self.flush()
        self.server.flush_dirty()

    def flush(self) -> None:
        """Hand the session's replies to the kernel, as far as it takes them, after those that it did not take yet."""
        if self.closed:
            return
        behind = bool(self.unsent)
        self.unsent.extend(self.session.out)
        self.session.out.clear()
        if behind:
            return
        self.push()
        if self.unsent:
            self.server.writer.add(self)

    def push(self) -> None:
        """Write what the kernel takes at once; not more, lest a peer that reads fast keeps the lock from others."""
        unsent = self.unsent
        while unsent:
            try:
                count = self.peer.sendmsg(list(islice(unsent, _PIECES)), [], socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                self.close()
                return
            self.session.unread -= count
            if not self._drop(count):
                return

    def _drop(self, count: int) -> bool:
        """Forget bytes that the kernel has taken; False if it took a piece in part."""
        unsent = self.unsent
        while count:
            piece = unsent.popleft()
            if count < len(piece):
                unsent.appendleft(memoryview(piece)[count:])
                return False
            count -= len(piece)
        return True

    def close(self) -> None:
        """Close the connection, and hand on what the session was promised. Its thread ends, and frees the descriptor."""
        if self.closed:
            return
        self.closed = True
        self.unsent.clear()
        self.server.writer.remove(self)
        with suppress(OSError):
            self.peer.shutdown(socket.SHUT_RDWR)  # wakes its thread; for the peer it is the end, whoever has copies
        self.session.leave()
        self.server.forget(self)


class Writer:
    """Sends what peers did not read at once, while their own threads wait for what they say. One thread for all."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._behind: dict[int, Connection] = {}
        """By file descriptor."""
        self._poll = select.poll()
        self._bell, self._woken = socket.socketpair()
        self._bell.setblocking(False)
        self._poll.register(self._woken, select.POLLIN)
        self._stopped = False

    def add(self, connection: Connection) -> None:
        """Write what is unsent when the kernel takes more. With the lock."""
        fd = connection.peer.fileno()
        self._behind[fd] = connection
        self._poll.register(fd, select.POLLOUT)
        with suppress(BlockingIOError):  # it has been woken, and not looked yet
            self._bell.send(b"\0")

    def remove(self, connection: Connection) -> None:
        """There is nothing left to write. With the lock."""
        if self._behind.pop(connection.peer.fileno(), None) is not None:
            self._poll.unregister(connection.peer)
        connection.caught_up.notify()

    def stop(self) -> None:
        """End its thread."""
        self._stopped = True
        self._bell.shutdown(socket.SHUT_RDWR)  # closing would wake nobody while a forked child has a copy

    def close(self) -> None:
        self._bell.close()
        self._woken.close()

    def run(self) -> None:
        """Its thread."""
        while not self._stopped:
            news = self._poll.poll()
            with self._lock:
                for fd, _ in news:
                    connection = self._behind.get(fd)
                    if connection is not None:
                        self._write(connection)
                    elif fd == self._woken.fileno():
                        self._woken.recv(4096)

    def _write(self, connection: Connection) -> None:
        try:
            connection.push()
            if not connection.unsent:
                self.remove(connection)
        except Exception:
            log.exception("closing the connection of %s after an error of the server's", connection.session)
            connection.close()
