"""The legacy server: a thread for each connection, and one lock over the engine.

Knows: threads, sockets. Must not know: opcodes, keys, what a command means.
Invariants: the lock is never held while anything waits. A connection's own thread alone reads from it and frees its
descriptor; whoever has the lock may write to it what the kernel takes at once, and one thread writes what is left over,
of all connections. A peer that does not read is not read from. Once started, only a new connection needs a new thread.

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from ..errors import LimitError, PeerError
from ..limits import Limits
from ..session.budget import PIECES, SESSION_BYTES
from ..session.identity import identity
from ..session.server import Engine, ServerSession, latecomers
from ..values import Framed, length
from .listening import NEWCOMERS, RateLimitedLog, free_large_memory, log, reserve_connections

_READ: Final = 16 * 1024
"""More would let others wait longer than 10 ms for a peer that sends nothing but the shortest commands."""

_SESSION_BYTES: Final = SESSION_BYTES + 64 * 1024
"""What one connection takes, its thread included."""

_FLUSHES_PER_TURN: Final = 512
"""Peers with something to hear that are written to while the lock is held; a herd is told in several turns."""

_PAUSE: Final = 0.1
"""Seconds without accepting after the system refused a descriptor, memory or a thread."""


class Worker(threading.Thread):
    """A thread of a server's. Whoever stops the server waits for it: it must not wait for the end of one itself."""

    def __init__(self, run: Callable[[], object], name: str, ended: "deque[Worker]") -> None:
        super().__init__(target=run, name=name, daemon=True)
        self._ended = ended

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._ended.append(self)


class FairLock:
    """A lock that goes to whoever has waited longest.

    `threading.Lock` goes to who asks when it happens to be free: with twenty peers that send without a pause, another
    one's PING took six seconds.
    """

    def __init__(self) -> None:
        self._inner = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._held = False

    def __enter__(self) -> None:
        with self._inner:
            if not self._held:
                self._held = True
                return
            ticket = threading.Lock()
            ticket.acquire()
            self._waiting.append(ticket)
        try:
            ticket.acquire()
        except BaseException:  # an interrupt from the keyboard
            self._withdraw(ticket)
            raise

    def __exit__(self, *_: object) -> None:
        with self._inner:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False

    def _withdraw(self, ticket: threading.Lock) -> None:
        with self._inner:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                return
        self.__exit__()


class Connection:
    """The door's side of one session. Everything but its own thread's part is called with the lock."""

    def __init__(self, server: "ThreadedServer", peer: socket.socket, host: str, port: int) -> None:
        self.server = server
        self.peer = peer
        self.session = ServerSession(server.engine, self, host, port, time.monotonic())
        self.caught_up = threading.Event()
        """Set while nothing is unsent. What is, the writer sends on."""
        self.caught_up.set()
        self.closed = False

    # Its own thread

    def run(self) -> None:
        """Serve the peer to the end."""
        with self.peer:
            try:
                self._serve()
            except Exception:
                with self.server.lock:
                    self.give_up()
            finally:
                with self.server.lock:
                    self.close()

    def _serve(self) -> None:
        while chunk := self._read():
            with self.server.lock:
                self._execute(chunk)
            while self._behind():
                self._catch_up()
            if self.closed:  # with bytes unread, which makes the end a reset: the peer may be waiting for room to send
                return
        self.caught_up.wait()  # it sends no more, and may read still

    def _read(self) -> bytes:
        """What the peer sends next; nothing at the end, whoever made it."""
        try:
            return self.peer.recv(_READ)
        except OSError:
            return b""

    def _behind(self) -> bool:
        """Whether the peer has to read before it is read from again."""
        session = self.session
        return not self.closed and (session.stalled() or session.unsent > self.server.limits.unsent_high_water)

    def _catch_up(self) -> None:
        """Wait until the peer has been sent everything, and go on with requests that were kept back for that.

        A command that is done in steps goes on at once: others may wait for its end.
        """
        if self.session.incremental is None:
            self.caught_up.wait()
        with self.server.lock:
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
        self.server.flush_pending()

    def flush(self) -> None:
        """Hand the session's replies to the kernel, as far as it takes them, after those that it did not take yet."""
        session = self.session
        out = session.out
        if self.closed or not out:
            return
        if session.backlog is not None:
            session.keep_unsent(out, 0)
        else:
            self._send(out)
        out.clear()

    def _send(self, out: list[Framed]) -> None:
        """Write what the kernel takes at once; not more, lest a peer that reads fast keeps the lock from others."""
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
        """The same for what is unsent."""
        session = self.session
        while (backlog := session.backlog) is not None:
            count = self._write(backlog.batch())
            if count <= 0:
                return
            if backlog.took(count):
                session.backlog = None

    def _write(self, batch: Sequence[Framed | memoryview]) -> int:
        """Give bytes to the kernel; how many it took, or -1 if the connection turned out to be gone."""
        try:
            count = self.peer.sendmsg(batch, [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            self.close()
            return -1
        self.session.unsent -= count
        return count

    def give_up(self) -> None:
        """Close after a defect of ours, or for want of memory: it must not cost the others."""
        log.exception("closing the connection of %s after an error of the server's", self.session)
        self.close()

    def close(self) -> None:
        """Close the connection, and hand on what the session was promised. Its thread ends and frees the descriptor."""
        if self.closed:
            return
        self.closed = True
        self.server.writer.remove(self)
        with suppress(OSError):
            self.peer.shutdown(socket.SHUT_RDWR)  # wakes its thread; for the peer it is the end, whoever has copies
        self.session.leave()
        self.server.forget(self)


class Writer:
    """Sends what peers did not read at once, while their own threads wait for what they say. One thread for all."""

    def __init__(self, lock: FairLock) -> None:
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
        connection.caught_up.clear()
        fd = connection.peer.fileno()
        self._behind[fd] = connection
        self._poll.register(fd, select.POLLOUT)
        with suppress(BlockingIOError):  # it has been woken, and not looked yet
            self._bell.send(b"\0")

    def remove(self, connection: Connection) -> None:
        """There is nothing left to write. With the lock."""
        if self._behind.pop(connection.peer.fileno(), None) is not None:
            self._poll.unregister(connection.peer)
        connection.caught_up.set()

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
            if connection.session.backlog is None:
                self.remove(connection)
        except Exception:
            connection.give_up()


class ThreadedServer:
    """One server. To be made and stopped on a running loop, which waits for signals and the owner meanwhile."""

    def __init__(self, listener: socket.socket, limits: Limits) -> None:
        self.listener = listener
        self.limits = limits
        self.engine = Engine(limits, session_bytes=_SESSION_BYTES)
        self.engine.identify(identity(secrets.token_hex(8), "threaded"))
        self.lock = FairLock()
        self.writer = Writer(self.lock)
        self.connections: set[Connection] = set()
        self.empty = asyncio.Event()
        self.empty.set()
        self.host: str = listener.getsockname()[0]
        self.port: int = listener.getsockname()[1]
        self.max_connections = 0
        self.stopped = False
        self._complaints = RateLimitedLog()
        self._suppressed_timer: asyncio.TimerHandle | None = None
        self._validating = False
        """Whether somebody will look for those that have not sent VALIDATE in time."""
        self._expiry: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._accepting: Worker | None = None
        self._closing = threading.Event()
        self._bell, self._woken = socket.socketpair()
        self._threads: set[Worker] = set()
        """Those to wait for when the server stops."""
        self._ended: deque[Worker] = deque()
        """Those of them that are ending."""
        self._flushing = False
        self._to_flush: deque[Connection] = deque()
        """Those that were woken with more others than one turn can tell."""
        self.engine.keyspace.on_work = self._work_later

    @property
    def count(self) -> int:
        """Connections that are open."""
        return len(self.connections)

    def start(self) -> None:
        """Accept connections from now on. Raises RuntimeError if the threads for it cannot be had."""
        self.max_connections = reserve_connections(self.listener, self.host, self.port, self.limits.connections)
        free_large_memory()
        self._start_thread(self.writer.run, "tcpstore writing")
        self._accepting = self._start_thread(self._accept_all, "tcpstore accepting")

    def stop(self) -> None:
        """Stop at once: the port is free and every connection closed when this returns. May be called again."""
        if self.stopped:
            return
        self.stopped = True
        self.stop_accepting()
        with self.lock:
            for connection in list(self.connections):
                connection.close()
            self.writer.stop()
        for thread in self._threads:
            thread.join()
        for own in (self.writer, self._bell, self._woken):
            own.close()
        if self._suppressed_timer is not None:
            self._suppressed_timer.cancel()
        if self._expiry is not None:
            self._expiry.cancel()
        self._complaints.finish()
        self._note_empty()

    async def drain(self, grace: float) -> None:
        """Stop accepting, give the peers up to `grace` seconds to leave, then stop."""
        self.stop_accepting()
        self._note_empty()  # the loop may not have heard of the last one to come
        try:
            await asyncio.wait_for(self.empty.wait(), grace)
        except asyncio.TimeoutError:
            log.info("connections closed after %g s of grace: %d", grace, self.count)
        self.stop()

    def announce(self, joins: int) -> None:
        """So many ranks are expected to join, all told."""
        with self.lock:
            self.engine.announce(joins)
            self.flush_pending()

    def all_joined(self) -> bool:
        """Whether as many ranks have joined as were announced."""
        with self.lock:
            return self.engine.all_joined()

    def dismiss_latecomers(self, complete: float) -> None:
        """Close the connections that came after `complete`: they belong to a next round, and join again."""
        with self.lock:
            for session in latecomers([connection.session for connection in self.connections], complete):
                if isinstance(session.owner, Connection):
                    session.owner.close()

    def close_inherited(self) -> None:
        """In a forked child, which has no thread of the server's: close its copies of what is the parent's to close."""
        for connection in self.connections:
            connection.peer.close()
        for own in (self.writer, self._bell, self._woken):
            own.close()

    def stop_accepting(self) -> None:
        """Free the port; connections that are open stay."""
        self._closing.set()
        with suppress(OSError):  # it has been done
            self._bell.shutdown(socket.SHUT_RDWR)
        if self._accepting is not None:
            self._accepting.join()
        self.listener.close()

    # Called with the lock

    def flush_pending(self) -> None:
        """Flush the sessions that another one's command, or its end, gave something to say, and close the evicted."""
        if self._flushing:
            return  # a connection failed under the loop below, which goes on with whom its end woke
        self._flushing = True
        try:
            pending_flush = self.engine.pending_flush
            if len(pending_flush) > _FLUSHES_PER_TURN:
                if not self._to_flush:
                    self._tell_loop(self._flush_more)
                evicted = self.engine.evicted
                self._to_flush.extend(
                    one.owner for one in pending_flush if one not in evicted and isinstance(one.owner, Connection)
                )
                pending_flush[:] = [one for one in pending_flush if one in evicted]
            while pending_flush:
                session = pending_flush.pop()
                connection = session.owner
                if isinstance(connection, Connection):
                    try:
                        error = self.engine.evicted.get(session)
                        if error is not None:
                            self.refuse(connection, error)
                            connection.close()
                        else:
                            connection.flush()
                    except Exception:
                        connection.give_up()
        finally:
            self._flushing = False

    def _work_later(self) -> None:
        self._tell_loop(self._work)

    def refuse(self, connection: Connection, error: PeerError) -> None:
        """Say why a connection closes."""
        kind = error.limit if isinstance(error, LimitError) else "protocol"
        self._log_limited(kind, f"closed the connection of {connection.session}: {error}")

    def forget(self, connection: Connection) -> None:
        """A connection has closed."""
        self.connections.discard(connection)
        if not self.stopped:
            self.flush_pending()
        if not self.connections:
            self._tell_loop(self._note_empty)

    def _log_limited(self, kind: str, text: str) -> None:
        """Log what a peer did, now or, if the log has had its line of that kind, in a count a second later."""
        if not self._complaints.add(kind, text) and self._suppressed_timer is None:
            self._tell_loop(self._count_later)

    # On the loop

    def _flush_more(self) -> None:
        with self.lock:
            for _ in range(min(_FLUSHES_PER_TURN, len(self._to_flush))):
                connection = self._to_flush.popleft()
                try:
                    connection.flush()
                except Exception:
                    connection.give_up()
            if self._to_flush:
                self._loop.call_soon(self._flush_more)

    def _work(self) -> None:
        """Do a portion of what commands have left to do."""
        with self.lock:
            keyspace = self.engine.keyspace
            if self.stopped or not keyspace.work:
                return
            keyspace.step()
            self.flush_pending()
            if keyspace.work:
                self._loop.call_soon(self._work)

    def _tell_loop(self, what: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(what)

    def _note_empty(self) -> None:
        if self.connections:
            self.empty.clear()
        else:
            self.empty.set()

    def _count_later(self) -> None:
        if self._suppressed_timer is None and not self.stopped:
            self._suppressed_timer = self._loop.call_later(1.0, self._flush_suppressed)

    def _flush_suppressed(self) -> None:
        self._suppressed_timer = None
        with self.lock:
            self._complaints.finish()

    def _expect_validation(self) -> None:
        """Look again when the oldest of those that have not sent VALIDATE should have."""
        with self.lock:
            oldest = self.engine.oldest_unvalidated()
            if oldest is None or self.stopped:
                self._validating = False
                return
        left = oldest.connected_at + self.limits.validate_seconds - time.monotonic()
        self._expiry = self._loop.call_later(max(left, 0.001), self._close_overdue)

    def _close_overdue(self) -> None:
        now = time.monotonic()
        most = self.limits.validate_seconds
        with self.lock:
            while (session := self.engine.overdue(now)) is not None and isinstance(session.owner, Connection):
                self.refuse(session.owner, LimitError("validate_seconds", int(now - session.connected_at), most))
                session.owner.close()
        self._expect_validation()

    # The accepting thread

    def _accept_all(self) -> None:
        poll = select.poll()
        poll.register(self.listener, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while not self._closing.is_set():
            poll.poll()
            try:
                self._accept()
            except (BlockingIOError, InterruptedError):
                continue
            except Exception as error:  # there is no descriptor or no memory
                if not isinstance(error, OSError) or error.errno not in NEWCOMERS:
                    self._pause(error)

    def _pause(self, error: Exception) -> None:
        """Those who come next wait; those who are in are served."""
        reason = error.strerror if isinstance(error, OSError) else error
        with self.lock:
            self._log_limited("accept", f"cannot accept connections for now: {reason}")
        self._closing.wait(_PAUSE)

    def _accept(self) -> None:
        peer, (host, port, *_) = self.listener.accept()
        served = False
        try:
            connection = self._admit(peer, host, port)
            served = connection is not None and self._serve(connection)
        finally:
            if not served:
                peer.close()

    def _admit(self, peer: socket.socket, host: str, port: int) -> Connection | None:
        """Its connection, if there is room for one more."""
        peer.setblocking(True)
        with self.lock:
            if self.count >= self.max_connections and not self._make_place():
                text = f"refused the connection of {host}, port {port}: {self.count} are open, the most allowed"
                self._log_limited("connections", text)
                return None
            connection = Connection(self, peer, host, port)
            self.connections.add(connection)
            if self.count == 1:
                self._tell_loop(self._note_empty)
            if not self._validating and self.limits.validate_seconds:
                self._validating = True
                self._tell_loop(self._expect_validation)
            self.flush_pending()
        return connection

    def _make_place(self) -> bool:
        """Close the connection that has not sent VALIDATE for longest, if there is one."""
        session = self.engine.oldest_unvalidated()
        if session is None or not isinstance(session.owner, Connection):
            return False
        text = (
            f"closed the connection of {session}, which had not sent VALIDATE: {self.count} are open, the most allowed"
        )
        self._log_limited("connections", text)
        session.owner.close()
        return True

    def _serve(self, connection: Connection) -> bool:
        """Give it its thread, once there can be one; False if the server stops accepting before."""
        while not self._closing.is_set():
            try:
                self._start_thread(connection.run, f"tcpstore serving {connection.session}")
                return True
            except (RuntimeError, MemoryError) as error:
                self._pause(error)
        with self.lock:
            connection.close()
        return False

    def _start_thread(self, run: Callable[[], object], name: str) -> Worker:
        """A thread that the server waits for when it stops. Raises RuntimeError if there can be none."""
        while self._ended:
            ended = self._ended.popleft()
            ended.join()
            self._threads.discard(ended)
        worker = Worker(run, name, self._ended)
        worker.start()
        self._threads.add(worker)
        return worker
