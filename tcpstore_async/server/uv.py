"""The event-driven server: one thread, callbacks on uvloop.

Knows: descriptors, when to read, write, pause and close. Must not know: opcodes, keys, what a command means.
Invariants: nothing here blocks. Each turn writes to a peer once for all it has to be told. A peer that does not read
is not read from; whatever a peer does, only its own connection closes.
"""

import asyncio
import os
import secrets
import socket
import sys
import time
from collections import deque
from typing import Any, Final

from ..errors import LimitError, PeerError
from ..limits import Limits
from ..session.budget import PIECES
from ..session.identity import identity
from ..session.server import Engine, ServerSession, latecomers
from ..values import Framed, length
from .listening import NEWCOMERS, RateLimitedLog, log, reserve_connections
from .poller import READ, WRITE, WatchWith, make_poller

_read = os.read
_read_into = os.readv
_write = os.write
_write_pieces = os.writev

_FIRST_READ: Final = 960
"""Most requests are this short, and malloc has a fast path for a buffer that is not longer."""

_READ: Final = 16 * 1024
_READ_ON: Final = 128 * 1024
"""The same inside a frame: more of it is to come."""

_READS_PER_TURN: Final = 2
"""After that many reads, up to 33,000 of the shortest commands, a peer that sends on waits for the others."""

_FLUSHES_PER_TURN: Final = 512
"""Peers with something to hear that are written to in one turn, at some 4 µs each; a herd is told in several."""

_WRITTEN_PER_TURN: Final = 4 * 1024 * 1024
"""Bytes that one peer is sent in one turn, however fast it reads."""

_GOING_ON: Final = 0.002
"""Seconds of one turn in which connections that have more to do go on; the rest of them do so in the next."""

_JOINED: Final = 256 * 1024
"""Replies up to this size are joined for one write; larger ones go out without a copy."""

_ACCEPTS_PER_TURN: Final = 128
"""New connections are taken in bunches: one a turn would let them wait while old ones are busy."""

_ACCEPT_PAUSE: Final = 0.1
"""Seconds without accepting after the system refused a descriptor or memory."""


class Connection:
    """The door's side of one session."""

    def __init__(self, server: "UvServer", fd: int, host: str, port: int) -> None:
        self.server = server
        self.fd = fd
        self.session = ServerSession(server.engine, self, host, port, time.monotonic())
        self.paused = False
        self.hung_up = False
        """The peer has said that it will send no more: read to the end, there will be no further news."""
        self.queued = False
        """Whether it has to wait for the others before it is read from again."""
        self.ended = False
        """The end has been read; the connection lasts until the peer has read what it was sent."""

    def attend(self, events: int) -> None:
        """Do what news of the descriptor call for."""
        if events != READ:
            self.hung_up = events & ~(READ | WRITE) != 0
            self.writable()
        if events != WRITE:
            self.go_on()

    def go_on(self) -> None:
        """Read and execute what is there, to the end or until the others have their turn."""
        session = self.session
        if self.queued:
            return
        for _ in range(_READS_PER_TURN):
            if self.fd < 0 or self.ended:
                return
            if session.unsent > self.server.high_water and session.incremental is None:
                self._pause()
                return
            try:
                more = self._read_much()
            except BlockingIOError:
                return
            except OSError:
                self.close()
                return
            except PeerError as error:
                self.server.refuse(self, error)
                return
            if session.out:
                self.flush()
            if self.server.engine.pending_flush:
                self.server.flush_pending()
            if not more and not self.hung_up and not session.stalled():
                return
        self.server.go_on_later(self)

    def _read_much(self) -> bool:
        """Execute what was kept back, else read once; False if that was all the kernel had."""
        session = self.session
        if session.stalled():
            session.receive(b"")
            return True
        bulk = session.large_value()
        if bulk is None:
            size = _READ if session.partial is None else _READ_ON
            chunk = _read(self.fd, size)
            if chunk:
                session.receive(chunk)
            else:
                self._end()
            return len(chunk) == size
        with bulk.free_space() as room:
            size = len(room)
            count = _read_into(self.fd, [room])
        if count:
            bulk.fill(count)
            session.receive(b"")
        else:
            self._end()
        return count == size

    def flush(self) -> None:
        """Hand the session's replies to the kernel, as far as it takes them."""
        session = self.session
        out = session.out
        if session.backlog is not None:
            session.keep_unsent(out, 0)
        elif len(out) == 1:
            data = out[0]
            out.clear()
            count = self._hand_over([data])
            if 0 <= count < len(data):
                self.keep([data], count)
        elif session.unsent <= _JOINED:
            data = b"".join(out)
            out.clear()
            count = self._hand_over([data])
            if 0 <= count < len(data):
                self.keep([data], count)
        else:
            self._flush_much()
        out.clear()

    def _flush_much(self) -> None:
        """The same for replies that are not worth a copy."""
        out = self.session.out
        at = 0
        while at < len(out):
            batch = out[at : at + PIECES]
            size = length(batch)
            count = self._hand_over(batch)
            if count < 0:
                return
            if count < size:
                self.keep(out[at:], count)
                return
            at += PIECES

    def keep(self, replies: list[Framed], taken: int) -> None:
        """The kernel took only the first `taken` bytes: the rest goes when it takes more."""
        self.session.keep_unsent(replies, taken)
        if self.session.backlog is not None:
            self.server.make_poller.watch_writing(self.fd, True)

    def writable(self) -> None:
        """The kernel takes more; once it has taken everything, requests that were kept back go on.

        Until then it goes on being watched as it is: telling epoll again would have it report a hang-up again.
        """
        if not self._behind():
            return
        self._write_unsent()
        if self._behind() or self.fd < 0:
            return
        self.server.make_poller.watch_writing(self.fd, False)
        if self.ended:
            self.close()
        elif self.paused:
            self.paused = False
            self.server.make_poller.resume(self.fd)
            self.go_on()

    def close(self) -> None:
        """Close the connection, and hand on what the session was promised."""
        fd = self.fd
        if fd < 0:
            return
        self.fd = -1
        server = self.server
        server.connections[fd] = None
        server.count -= 1
        server.make_poller.forget(fd)
        os.close(fd)
        self.session.leave()
        if server.engine.pending_flush and not server.stopped:
            server.flush_pending()
        if not server.count:
            server.empty.set()

    def _end(self) -> None:
        """The peer sends no more."""
        if self._behind():
            self.ended = True
            self._pause()
        else:
            self.close()

    def _behind(self) -> bool:
        """Whether the peer has yet to read what it was sent."""
        return self.session.backlog is not None

    def _pause(self) -> None:
        if not self.paused:
            self.paused = True
            self.server.make_poller.pause(self.fd)

    def _hand_over(self, data: list[Any]) -> int:
        """Give bytes to the kernel; how many it took, or -1 if the connection turned out to be gone."""
        try:
            count = _write(self.fd, data[0]) if len(data) == 1 else _write_pieces(self.fd, data)
        except BlockingIOError:
            return 0
        except OSError:
            self.close()
            return -1
        self.session.unsent -= count
        return count

    def _write_unsent(self) -> None:
        session = self.session
        backlog = session.backlog
        written = 0
        while backlog is not None:
            if written >= _WRITTEN_PER_TURN:
                self.server.write_later(self)
                return
            batch = backlog.batch()
            count = self._hand_over(batch)
            if count <= 0:
                return
            if backlog.took(count):
                session.backlog = None
                return
            written += count


class UvServer:
    """One server on the running loop. Not to be shared between threads."""

    def __init__(self, listener: socket.socket, limits: Limits, watch_with: WatchWith = make_poller) -> None:
        self.listener = listener
        self.limits = limits
        self.high_water = limits.unsent_high_water
        self.engine = Engine(limits)
        self.engine.identify(identity(secrets.token_hex(8), "uv"))
        self.connections: list[Connection | None] = []
        """By file descriptor."""
        self.count = 0
        self.empty = asyncio.Event()
        self.empty.set()
        self.rate_limited = RateLimitedLog()
        self.host: str = listener.getsockname()[0]
        self.port: int = listener.getsockname()[1]
        self.max_connections = 0
        self._later: list[Connection] = []
        self._to_write: dict[Connection, None] = {}
        """Those that the kernel may take more from at once."""
        self._to_flush: deque[Connection] = deque()
        """Those that were woken with more others than one turn can tell."""
        self.engine.keyspace.on_work = self._work_later
        self._loop = asyncio.get_running_loop()
        self.make_poller = watch_with(self._loop, self.ready)
        self._accepting = False
        self.stopped = False
        self._flushing = False
        self._suppressed_timer: asyncio.TimerHandle | None = None
        self._validating: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Accept connections from now on."""
        self.max_connections = reserve_connections(self.listener, self.host, self.port, self.limits.connections)
        self._resume_accepting()

    def stop(self) -> None:
        """Stop at once: the port is free and every connection closed when this returns. May be called again."""
        if self.stopped:
            return
        self.stopped = True
        self.stop_accepting()
        for connection in self.connections:
            if connection is not None:
                connection.close()
        self.make_poller.close()
        if self._suppressed_timer is not None:
            self._suppressed_timer.cancel()
        if self._validating is not None:
            self._validating.cancel()
        self.rate_limited.finish()

    async def drain(self, grace: float) -> None:
        """Stop accepting, give the peers up to `grace` seconds to leave, then stop."""
        self.stop_accepting()
        try:
            await asyncio.wait_for(self.empty.wait(), grace)
        except asyncio.TimeoutError:
            log.info("connections closed after %g s of grace: %d", grace, self.count)
        self.stop()

    def announce(self, joins: int) -> None:
        """So many ranks are expected to join, all told."""
        self.engine.announce(joins)
        self.flush_pending()

    def all_joined(self) -> bool:
        """Whether as many ranks have joined as were announced."""
        return self.engine.all_joined()

    def dismiss_latecomers(self, complete: float) -> None:
        """Close the connections that came after `complete`: they belong to a next round, and join again."""
        there = [connection.session for connection in self.connections if connection is not None]
        for session in latecomers(there, complete):
            if isinstance(session.owner, Connection):
                session.owner.close()

    def close_inherited(self) -> None:
        """In a forked child: close its copies of the connections, which are the parent's to close."""
        for connection in self.connections:
            if connection is not None and connection.fd >= 0:
                os.close(connection.fd)

    def stop_accepting(self) -> None:
        """Free the port; connections that are open stay."""
        self._pause_accepting()
        self.listener.close()

    # Called by the readiness

    def ready(self, news: list[tuple[int, int]]) -> None:
        """Serve the connections that there is news of.

        The common case, one short request and its reply, stands here in one piece: calls spared are worth 0.1 µs of the
        5 that an operation costs in plain Python. Everything else is the connection's to attend to.
        """
        connections = self.connections
        pending_flush = self.engine.pending_flush
        for fd, events in news:
            connection = connections[fd]
            if connection is None:
                continue
            session = connection.session
            try:
                if events != READ or session.unsent or session.partial is not None or connection.queued:
                    connection.attend(events)
                    continue
                chunk = _read(fd, _FIRST_READ)
                session.receive(chunk)
                out = session.out
                if len(out) == 1:
                    data = out[0]
                    count = _write(fd, data)
                    out.clear()
                    session.unsent -= count
                    if count < len(data):
                        connection.keep([data], count)
                elif out:
                    connection.flush()
                if pending_flush:
                    self.flush_pending()
                if len(chunk) == _FIRST_READ or not chunk or session.input_buffer is not None:
                    connection.go_on()
            except BlockingIOError:
                self._blocked(connection)
            except OSError:
                connection.close()
            except PeerError as error:
                self.refuse(connection, error)
            except Exception:
                self._give_up(connection)

    def _blocked(self, connection: Connection) -> None:
        """There was nothing to read, or there is no room to write."""
        try:
            if connection.session.out:
                connection.flush()
            if self.engine.pending_flush:
                self.flush_pending()
            connection.go_on()
        except Exception:
            self._give_up(connection)

    # Called by connections

    def flush_pending(self) -> None:
        """Flush the sessions that another one's command, or its end, gave something to say, and close the evicted."""
        if self._flushing:
            return  # a connection failed under the loop below, which goes on with whom its end woke
        self._flushing = True
        try:
            pending_flush = self.engine.pending_flush
            if len(pending_flush) > _FLUSHES_PER_TURN:
                self._flush_in_turns(pending_flush)
            while pending_flush:
                session = pending_flush.pop()
                connection = session.owner
                if isinstance(connection, Connection):
                    try:
                        error = self.engine.evicted.get(session)
                        if error is not None:
                            self.refuse(connection, error)
                        elif session.out:
                            connection.flush()
                    except Exception:
                        self._give_up(connection)
        finally:
            self._flushing = False

    def _flush_in_turns(self, pending_flush: list[ServerSession]) -> None:
        """Take a herd over, so that those who come next need not wait for all of it."""
        if not self._to_flush:
            self._loop.call_soon(self._flush_more)
        evicted = self.engine.evicted
        for session in pending_flush:
            if session not in evicted and isinstance(session.owner, Connection):
                self._to_flush.append(session.owner)
        pending_flush[:] = [session for session in pending_flush if session in evicted]

    def _flush_more(self) -> None:
        to_flush = self._to_flush
        for _ in range(min(_FLUSHES_PER_TURN, len(to_flush))):
            connection = to_flush.popleft()
            if connection.session.out and connection.fd >= 0:
                try:
                    connection.flush()
                except Exception:
                    self._give_up(connection)
        if to_flush:
            self._loop.call_soon(self._flush_more)

    def _work_later(self) -> None:
        self._loop.call_soon(self._work)

    def _work(self) -> None:
        """Do a portion of what commands have left to do."""
        keyspace = self.engine.keyspace
        if self.stopped or not keyspace.work:
            return
        keyspace.step()
        if self.engine.pending_flush:
            self.flush_pending()
        if keyspace.work:
            self._loop.call_soon(self._work)

    def write_later(self, connection: Connection) -> None:
        """Go on writing when the others have had their turn."""
        if not self._to_write:
            self._loop.call_soon(self._write_more)
        self._to_write[connection] = None

    def _write_more(self) -> None:
        to_write = self._to_write
        self._to_write = {}
        for connection in to_write:
            try:
                connection.writable()
            except Exception:
                self._give_up(connection)

    def refuse(self, connection: Connection, error: PeerError) -> None:
        """Close a connection for what its peer did."""
        kind = error.limit if isinstance(error, LimitError) else "protocol"
        self.log_limited(kind, f"closed the connection of {connection.session}: {error}")
        if connection.session.out:
            connection.flush()
        connection.close()

    def log_limited(self, kind: str, text: str) -> None:
        """Log what a peer did, now or, if the log has had its line of that kind, in a count a second later."""
        if self.rate_limited.add(kind, text) or self._suppressed_timer is not None:
            return
        self._suppressed_timer = self._loop.call_later(1.0, self._flush_suppressed)

    def _flush_suppressed(self) -> None:
        self._suppressed_timer = None
        self.rate_limited.finish()

    def _give_up(self, connection: Connection) -> None:
        """A defect of ours, or no memory, must not cost the others: their news is not told twice."""
        log.exception("closing the connection of %s after an error of the server's", connection.session)
        try:
            connection.close()
        except Exception:
            log.exception("the connection of %s did not close in order", connection.session)

    def go_on_later(self, connection: Connection) -> None:
        """Go on reading when the others have had their turn."""
        if not self._later:
            self._loop.call_soon(self._go_on)
        connection.queued = True
        self._later.append(connection)

    def _go_on(self) -> None:
        later = self._later
        self._later = []
        end = time.perf_counter() + _GOING_ON
        for at, connection in enumerate(later):
            if time.perf_counter() > end:
                if not self._later:
                    self._loop.call_soon(self._go_on)
                self._later = later[at:] + self._later
                return
            connection.queued = False
            try:
                connection.go_on()
            except Exception:
                self._give_up(connection)

    # Accepting

    def _accept(self) -> None:
        # socket.accept() wraps each descriptor in a socket object: 2.5 µs of the 17 that the start of a rank costs.
        accept = self.listener._accept  # type: ignore[attr-defined]
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                fd, address = accept()
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                if error.errno in NEWCOMERS:
                    continue
                self.log_limited("accept", f"cannot accept connections for now: {error.strerror}")
                self._pause_accepting()
                self._loop.call_later(_ACCEPT_PAUSE, self._resume_accepting)
                break
            try:
                self._admit(fd, address[0], address[1])
            except Exception as error:
                self._turn_away(fd, f"refused the connection of {address[0]}, port {address[1]}: {error!r}")
        if self.engine.pending_flush:
            self.flush_pending()
        if self._validating is None and self.limits.validate_seconds:
            self._expect_validation()

    def _turn_away(self, fd: int, text: str) -> None:
        """Close a new connection that cannot be served."""
        self.make_poller.forget(fd)
        os.close(fd)
        self.log_limited("accept", text)

    def _admit(self, fd: int, host: str, port: int) -> None:
        if self.count >= self.max_connections and not self._make_place():
            os.close(fd)
            self.log_limited(
                "connections", f"refused the connection of {host}, port {port}: {self.count} are open, the most allowed"
            )
            return
        os.set_blocking(fd, False)
        self.make_poller.watch(fd)
        host = sys.intern(host)  # a host has many ranks
        while fd >= len(self.connections):
            self.connections.extend([None] * (len(self.connections) + 64))
        self.connections[fd] = Connection(self, fd, host, port)
        self.count += 1
        self.empty.clear()

    def _make_place(self) -> bool:
        """Close the connection that has not sent VALIDATE for longest, if there is one."""
        session = self.engine.oldest_unvalidated()
        if session is None or not isinstance(session.owner, Connection):
            return False
        text = (
            f"closed the connection of {session}, which had not sent VALIDATE: {self.count} are open, the most allowed"
        )
        self.log_limited("connections", text)
        session.owner.close()
        return True

    def _expect_validation(self) -> None:
        """Look again when the oldest of those that have not sent VALIDATE should have."""
        oldest = self.engine.oldest_unvalidated()
        if oldest is not None:
            left = oldest.connected_at + self.limits.validate_seconds - time.monotonic()
            self._validating = self._loop.call_later(max(left, 0.001), self._close_overdue)

    def _close_overdue(self) -> None:
        self._validating = None
        now = time.monotonic()
        most = self.limits.validate_seconds
        while (session := self.engine.overdue(now)) is not None and isinstance(session.owner, Connection):
            self.refuse(session.owner, LimitError("validate_seconds", int(now - session.connected_at), most))
        self._expect_validation()

    def _resume_accepting(self) -> None:
        if self.listener.fileno() >= 0 and not self._accepting:
            self._accepting = True
            self._loop.add_reader(self.listener.fileno(), self._accept)

    def _pause_accepting(self) -> None:
        if self._accepting:
            self._accepting = False
            self._loop.remove_reader(self.listener.fileno())
