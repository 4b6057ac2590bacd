"""The event-driven server: one thread, callbacks on uvloop.

Knows descriptors, and when to read, write, pause and close. Must not know opcodes, keys, or what a command means.
Invariants: nothing here blocks. A turn of the loop writes to each peer once, and a bounded number of bytes in all. A
peer that does not read is not read from. Whatever a peer does, only its own connection closes.
"""

import errno
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from ..base.errors import PeerError, ProtocolError
from ..base.limits import Limits
from ..session.named_stores import NamedStore
from ..session.tls import CIPHERTEXT, HANDSHAKE, TlsChannel, TlsError, TlsStream
from ..session.transport import Transport
from ..session.unsent import PIECES, first_bytes
from ..wire.values import Framed, length
from . import base
from .persistence import Persistence
from .poller import READ, WRITE, WatchWith, make_poller
from .tls import CIPHERTEXT_ON, MOST_HANDSHAKES, TLS_BYTES, ServerTls

_read: Final = os.read
_read_into: Final = os.readv
_write: Final = os.write
_write_pieces: Final = os.writev

_FIRST_READ: Final = 479
"""Most requests are this short, and Python has a fast path for buffers up to this size: 512 bytes with the header."""

_READ: Final = 16 * 1024
"""Bytes read at once between frames."""

_READ_ON: Final = 128 * 1024
"""Bytes read at once within a frame."""

_READS_PER_TURN: Final = 2
"""Reads, of up to 33,000 of the shortest commands, after which a peer that keeps sending waits for its next turn."""

_WRITTEN_PER_TURN: Final = 4 * 1024 * 1024
"""Bytes of large replies written per turn of the loop, to all peers together."""

_ENDS_SECONDS: Final = 0.001
"""Time per report of the poller for peers that hung up; the rest is deferred."""

_RESUMED_SECONDS: Final = 0.002
"""Time per turn of the loop for deferred connections; the rest waits for the next turn."""

_SHORT: Final = 4096
"""Replies of more bytes count towards `_HELD_BYTES`."""

_HELD_BYTES: Final = 1024 * 1024
"""Bytes of long replies at which a turn ends early: the budget does not count replies that wait for its end. With a
journal, bytes of requests count, too: a record must fit into what is left of a full disk."""

_JOINED: Final = 512 * 1024
"""Replies up to this size are joined for one write: twice what two reads of the shortest commands are answered. Larger
ones are not copied."""


class Connection(Transport):
    """A session and its descriptor."""

    def __init__(self, server: "UvServer", fd: int, host: str, port: int, store: NamedStore | None = None) -> None:
        super().__init__(server.store if store is None else store, host, port, server.clock.now)
        self.server = server
        self.fd = fd
        """-1 once closed."""
        self.paused = False
        self.hung_up = False
        """Whether the peer sends no more: read to the end, as no further event will be reported."""
        self.queued = False
        """Whether reading is deferred to a later turn, or until the disk has space: nothing else may read meanwhile."""
        self.ended = False
        """Whether nothing more is read: the connection lasts only until its unsent bytes are sent."""

    def on_events(self, events: int) -> None:
        if events != READ:
            self.hung_up = events & ~(READ | WRITE) != 0
            self.writable()
        if self.hung_up and self.server.must_defer_end():
            if not self.queued:
                self.server.defer(self)
        elif events != WRITE:
            self.resume_reading()

    def resume_reading(self) -> None:
        """Read and execute requests, up to the share of one turn of the loop."""
        session = self.session
        if self.queued:
            return
        for _ in range(_READS_PER_TURN):
            if self.fd < 0 or self.ended:
                return
            if self.server.committing:
                break
            if session.waits_for_space():
                self.server.hold(self)
                return
            # A command that runs in steps continues though its peer does not read: others may wait for its end.
            if session.unsent > self.server.high_water and session.running is None:
                if session.backlog is None:
                    break  # at the end of the turn the kernel may take it all
                self._pause()
                return
            try:
                more = self._read_much()
            except BlockingIOError:
                return
            except OSError as error:
                self.lost(error)
                return
            except PeerError as error:
                self.server.close_for(self, error)
                return
            if session.out:
                self.flush()
            if self.server.store.hub.pending_flush:
                self.server.flush_pending()
            if not more and not self.hung_up and not session.stalled():
                return
        self.server.defer(self)

    def _read_much(self) -> bool:
        """Execute held-back requests, or else read once; return False if the kernel has no more."""
        session = self.session
        if session.stalled():
            session.receive(b"")
            return True
        value = session.large_value()
        if value is None:
            partial = session.partial
            size = _READ if partial is None or partial.endless else _READ_ON
            chunk = _read(self.fd, size)
            if chunk:
                self._count_received(len(chunk))
                session.receive(chunk)
            else:
                self._end()
            return len(chunk) == size
        with value.free_space() as space:
            size = len(space)
            count = _read_into(self.fd, [space])
        if count:
            self._count_received(count)
            value.fill(count)
            session.receive(b"")
        else:
            self._end()
        return count == size

    def flush(self) -> None:
        server, unsent = self.server, self.session.unsent
        server.held.append(self)
        if unsent > _SHORT:
            server.held_bytes += unsent

    def close_behind(self, error: PeerError) -> bool:
        self.server.refused[self] = error
        self.ended = True
        return True

    def write_out(self) -> None:
        """Write the session's replies, as far as the kernel takes them."""
        session = self.session
        out = session.out
        if self.single is not None:
            self.single.keep(out)
            out = list(out)
            session.out.clear()
            if not out:  # keeping the replies has evicted the session
                return
        if session.backlog is not None:
            session.keep_unsent(out, 0)
        elif session.unsent > _JOINED:
            self._flush_large(out)
        else:
            data = out[0] if len(out) == 1 else b"".join(out)
            out.clear()
            count = self._hand_over(data)
            if 0 <= count < len(data):
                self.keep([data], count)
            return
        out.clear()

    def _flush_large(self, out: list[Framed]) -> None:
        """Flush replies too large to copy, as far as this turn of the loop allows."""
        server = self.server
        at = 0
        while at < len(out):
            batch: list[Any] = out[at : at + PIECES]
            size = length(batch)
            left = server.write_allowance()
            if left <= 0:
                self.keep(out[at:], 0)
                server.defer_writing(self)
                return
            count = self._hand_over(first_bytes(batch, left) if size > left else batch)
            if count < 0:
                return
            server.written += count
            if count < size:
                self.keep(out[at:], count)
                return
            at += PIECES

    def keep(self, replies: list[Framed], taken: int) -> None:
        """Keep replies without their first `taken` bytes, and send them when the kernel takes more."""
        self.session.keep_unsent(replies, taken)
        if self.session.backlog is not None:
            self.server.poller.watch_writing(self.fd, True)

    def writable(self) -> None:
        """Send more of the unsent bytes; once all are sent, resume reading.

        Until then keep watching: modifying the epoll set would report a hang-up again.
        """
        if not self._behind():
            return
        self._write_unsent()
        if self._behind() or self.fd < 0:
            return
        self.server.poller.watch_writing(self.fd, False)
        if self.ended:
            self.close()
        elif self.paused:
            self.paused = False
            self.server.poller.resume(self.fd)
            self.resume_reading()

    def send_again(self, replies: list[Framed], taken: int) -> None:
        self.keep(replies, taken)

    def refused_before(self) -> str:
        return self.server.refused_before(self.session)

    def resumed(self) -> None:
        if self.session.stalled() and not self.queued:
            self.server.defer(self)

    def lost(self, error: OSError) -> None:
        """Close after an error."""
        if self.server.breaking:  # with all others, once what has been sent to them counts as sent
            self.session.out.clear()
            self.session.backlog = None
            self.session.unsent = 0
            return
        self._close(self.server.broken or error.errno != errno.EPIPE)  # EPIPE only follows the peer's own close

    def close(self) -> None:
        self._close(False)

    def finish(self) -> None:
        self._end()

    def _close(self, broken: bool) -> None:
        fd = self.fd
        if fd < 0:
            return
        self.fd = -1
        server = self.server
        server.connections[fd] = None
        server.poller.forget(fd)
        if server.persistence is None:
            os.close(fd)
        else:
            server.closing.append(fd)
            server.postponed.pop(fd, None)  # another connection may have the number by then
        if server.refused:
            server.refused.pop(self, None)
        if server.waiting:
            server.waiting.pop(self, None)
        self.leave(broken)
        server.closed(self)

    def close_if_sent(self) -> None:
        """Close if it lasted only until its replies were sent."""
        error = self.server.refused.pop(self, None)
        if error is not None:
            self.server.close_refused(self, error)
        elif not self._behind():
            self.close()

    def _end(self) -> None:
        """Read no more; close once the unsent bytes are sent."""
        if self.server.broken:
            self._close(True)
            return
        if self._behind():
            self.ended = True
            self._pause()
        else:
            self.close()

    def _behind(self) -> bool:
        """Return whether there are unsent bytes."""
        return self.session.backlog is not None or len(self.session.out) > 0

    def _pause(self) -> None:
        if not self.paused:
            self.paused = True
            self.server.poller.pause(self.fd)

    def _count_received(self, count: int) -> None:
        server = self.server
        server.received += count
        if server.persistence is not None:
            server.held_bytes += count
        if self.single is not None:
            self.single.received(count)

    def _hand_over(self, data: Framed | list[Any]) -> int:
        """Write; return how many bytes the kernel took, or -1 if the connection is lost and now closed."""
        try:
            count = self._send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self.lost(error)
            return -1
        self.session.unsent -= count
        self.server.sent += count
        return count

    def _send(self, data: Framed | list[Any]) -> int:
        """Write bytes or pieces; return how many bytes the kernel took. Raises OSError."""
        return _write_pieces(self.fd, data) if isinstance(data, list) else _write(self.fd, data)

    def _write_unsent(self) -> None:
        session = self.session
        server = self.server
        backlog = session.backlog
        while backlog is not None:
            left = server.write_allowance()
            if left <= 0:
                server.defer_writing(self)
                return
            count = self._hand_over(first_bytes(backlog.batch(), left))
            if count <= 0:
                return
            server.written += count
            if backlog.took(count):
                session.backlog = None
                return


class TlsConnection(Connection):
    """A connection to a server that has TLS. The first byte shows whether the peer uses it.

    A peer that does not is from then on served like any other.
    """

    def __init__(self, server: "UvServer", tls: ServerTls, fd: int, host: str, port: int) -> None:
        super().__init__(server, fd, host, port)
        self.tls = tls
        self.channel: TlsChannel | None = None
        """None before the handshake, and without TLS."""
        self.hello: bytes = b""
        """The first bytes of a handshake that has not begun."""
        self.drained = False
        """Whether the last read emptied the kernel's buffer, and no event has been reported since."""

    def in_handshake(self) -> bool:
        if self.channel is None:
            return bool(self.hello) or self.tls.required
        return not self.channel.stream.established

    def on_events(self, events: int) -> None:
        self.drained = False  # even if reading is deferred: the edge is reported only once
        super().on_events(events)

    def _read_much(self) -> bool:
        channel = self.channel
        if channel is None:
            return super()._read_much() if self.server.connections[self.fd] is self else self._begin()
        try:
            return self._read_plaintext(channel)
        except TlsError as error:
            if not channel.stream.established:
                raise
            self.server.log_limited("tls", f"lost the connection from {self.session}: {error}")
            # It counts as a break of the connection, after which a client resumes its link.
            raise ConnectionResetError(errno.ECONNRESET, str(error)) from None
        finally:
            if channel.behind() and self.fd >= 0:
                self.server.poller.watch_writing(self.fd, True)

    def _begin(self) -> bool:
        """Read the first byte; on a later call, begin the handshake if the peer uses TLS.

        Raises BlockingIOError, and NotAllowedError if the peer must use TLS and does not.
        """
        server = self.server
        hello, self.hello = self.hello, b""
        if hello:
            budget = server.store.budget
            budget.charge(TLS_BYTES)
            channel = self.channel = TlsChannel(TlsStream(self.tls.context), partial(_write, self.fd))
            channel.stream.feed(hello)
            budget.relieve(self.session)
            oldest = self.tls.begin(self)
            if oldest is not None:
                text = f"too many TLS handshakes under way (max {MOST_HANDSHAKES}); this was the oldest"
                server.close_for(oldest, ProtocolError(text))
            return True
        chunk = _read(self.fd, _FIRST_READ)
        if not chunk:
            self._end()
            return False
        if chunk[0] != HANDSHAKE:
            if self.tls.required:
                raise self.session.plain_refused()
            server.serve_plain(self)
            server.received += len(chunk)
            self.session.receive(chunk)
            return True
        self.hello = chunk
        server.defer_handshake(self)
        raise BlockingIOError

    def _read_plaintext(self, channel: TlsChannel) -> bool:
        session = self.session
        stream = channel.stream
        if session.stalled():
            session.receive(b"")
            return True
        if not stream.established:
            return self._shake_hands(channel)
        if stream.ended and not stream.readable:
            self._end()
            return False
        value = session.large_value()
        if value is None:
            chunk = channel.read(_READ) if stream.readable else b""
            if not chunk:
                self._feed(channel, CIPHERTEXT)
                chunk = channel.read(_READ)
            if chunk:
                self._count_received(len(chunk))
                session.receive(chunk)
        else:
            with value.free_space() as space:
                count = channel.read_into(space)
                if not count:
                    self._feed(channel, CIPHERTEXT_ON)
                    count = channel.read_into(space)
            if count:
                self._count_received(count)
                value.fill(count)
                session.receive(b"")
        return stream.readable or stream.ended or not self.drained

    def _shake_hands(self, channel: TlsChannel) -> bool:
        stream = channel.stream
        if not stream.readable:
            self._feed(channel, CIPHERTEXT)
        if channel.shake_hands():
            self.tls.end(self)
            if stream.certified():
                self.session.certify()
            stream.readable = True
        return stream.readable or not self.drained

    def _feed(self, channel: TlsChannel, size: int) -> None:
        """Read ciphertext. Raises BlockingIOError if there is none."""
        chunk = _read(self.fd, size)
        self.drained = 0 < len(chunk) < size
        channel.stream.feed(chunk)

    def _send(self, data: Framed | list[Any]) -> int:
        channel = self.channel
        if channel is None:
            return super()._send(data)
        return channel.write(data if isinstance(data, list) else [data])

    def _behind(self) -> bool:
        channel = self.channel
        return super()._behind() or (channel is not None and channel.behind())

    def _write_unsent(self) -> None:
        channel = self.channel
        if channel is None or self.session.backlog is not None:
            super()._write_unsent()
            return
        try:
            channel.push()
        except BlockingIOError:
            pass
        except OSError as error:
            self.lost(error)

    def _close(self, broken: bool) -> None:
        channel = self.channel
        if self.fd >= 0:
            self.server.tls_connections.pop(self.fd, None)
            if channel is not None:
                self.tls.end(self)
                self.server.store.budget.charge(-TLS_BYTES)
                if not broken:
                    channel.finish()
        super()._close(broken)


class UvServer(base.Server):
    """The server on one loop. Not to be shared between threads."""

    def __init__(
        self,
        listener: socket.socket,
        limits: Limits,
        watch_with: WatchWith = make_poller,
        tls: ServerTls | None = None,
        instance: str = "",
    ) -> None:
        super().__init__(listener, limits, "uv", tls=tls, instance=instance)
        self.high_water = limits.unsent_high_water
        self.connections: list[Connection | None] = []
        """Indexed by file descriptor; those in `tls_connections` are None here."""
        self.tls_connections: dict[int, TlsConnection] = {}
        """Connections with TLS, and those whose first byte has not arrived, keyed by file descriptor."""
        self.poller = watch_with(self.loop, self.ready)
        self.held: list[Connection] = []
        """Connections with replies, which are written at the end of the turn; some more than once."""
        self.held_bytes: int = 0
        """Bytes of their long replies; those of a connection may be counted more than once. See `_HELD_BYTES`."""
        self.closing: list[int] = []
        """Descriptors that are closed once what has happened is durable."""
        self.refused: dict[Connection, PeerError] = {}
        """Connections that are closed behind these replies, and why."""
        self.waiting: dict[Connection, None] = {}
        """Connections that are not read until the disk has space."""
        self.turn.end = self._write_held
        self._deferred: list[Connection] = []
        """Connections with more to read."""
        self._ends_until: float = 0.0
        """Time until which ends are handled during the present report of the poller; 0 before the first."""
        self._deferred_handshakes: deque[TlsConnection] = deque()
        """Connections whose TLS handshake has not begun."""
        self.written: int = 0
        """Bytes of large replies written in this turn of the loop."""
        self._writing = False
        """Whether `_write_more` will be called, in the next turn."""
        self._to_write: dict[Connection, None] = {}
        """Connections that have used up what a turn of the loop may write."""
        self.committing = False
        """Whether what has happened is being made durable: until then nothing else happens here."""
        self.postponed: dict[int, int] = {}
        """What the poller has reported meanwhile: events, keyed by file descriptor."""
        self._postponed_calls: list[Callable[[], object]] = []
        self._arrived: list[tuple[int, str, int, NamedStore | None]] = []
        """What was accepted meanwhile."""
        self.broken = False
        """Whether all connections have broken, whatever the kernel says of each."""
        self.breaking = False
        """Whether `break_all` is to be done."""
        self.cut_off = False
        """Whether another server may serve by now: connections are closed at once, without a trace in the stores."""

    def open_connections(self) -> list[Transport]:
        found: list[Transport] = [connection for connection in self.connections if connection is not None]
        return [*found, *self.tls_connections.values()]

    def break_off(self, connection: Transport) -> None:
        if isinstance(connection, Connection):
            connection.lost(OSError(errno.ECONNRESET, "the server ends"))

    def call_soon(self, callback: Callable[[], object]) -> None:
        self.loop.call_soon(self._call, callback)

    def _call(self, callback: Callable[[], object]) -> None:
        if self.committing:
            self._postponed_calls.append(callback)
        else:
            callback()

    def _postpone(self, reported: list[tuple[int, int]]) -> None:
        for fd, events in reported:
            self.postponed[fd] = self.postponed.get(fd, 0) | events

    def committed(self) -> None:
        """Send what had to be durable first, and soon go on with what was postponed. Outside of a turn."""
        self.committing = False
        self._write_held()
        if self.breaking:
            self.break_all()
        if not self.committing:  # else something has happened that was not postponed
            self.turn.stands = False
            self.loop.call_soon(self._go_on)

    def break_all(self) -> None:
        """Go on as behind a restart, once what has happened is durable: all connections that `cut` has closed broke."""
        self.breaking = self.committing
        if not self.committing and self.persistence is not None:
            with self.turn:
                self.persistence.break_all(self.break_off)
                self.flush_pending()
            self.broken = False

    def _go_on(self) -> None:
        calls, self._postponed_calls = self._postponed_calls, []
        for callback in calls:
            self.call_soon(callback)
        arrived, self._arrived = self._arrived, []
        for one in arrived:
            self.serve(*one)
        reported, self.postponed = list(self.postponed.items()), {}
        if arrived:
            self.served()
        self.ready(reported)

    def cut(self) -> None:
        """Close all connections for their peers, at once. What that means for the stores happens later."""
        self.cut_off = self.broken = True
        for connection in self.open_connections():
            if isinstance(connection, Connection) and connection.fd >= 0:
                peer = socket.socket(fileno=connection.fd)  # no copy: there may be no descriptor left
                with suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)
                peer.detach()
        self._forget_arrived()

    def _forget_arrived(self) -> None:
        for fd, _, _, _ in self._arrived:
            os.close(fd)
        self._arrived.clear()

    def release(self) -> None:
        self._forget_arrived()
        for fd in self.closing:
            os.close(fd)
        self.closing.clear()
        self.poller.close()

    def close_inherited(self) -> None:
        for connection in [*self.connections, *self.tls_connections.values()]:
            if connection is not None and connection.fd >= 0:
                os.close(connection.fd)

    # Called by the poller

    def ready(self, reported: list[tuple[int, int]]) -> None:
        """Serve the reported descriptors, each with its events."""
        if self.committing:
            self._postpone(reported)
            return
        self.turn.begin()
        times = self.times
        began = 0.0 if times is None else times.begin()
        self._ends_until = 0.0
        if not began or times is None:
            self._serve_reported(reported)
            self._write_held()
            return
        for one in reported:
            self._serve_reported([one])
            times.served(began)
        self._write_held()
        times.end(began)

    def _serve_reported(self, reported: list[tuple[int, int]]) -> None:
        """Serve descriptors.

        The common case, one short request, is inlined, as is its reply in `_write_held`: that saves 0.1 µs of the 5 µs
        that an operation costs in plain Python. `Connection.on_events` does everything else.
        """
        connections = self.connections
        pending_flush = self.store.hub.pending_flush
        for fd, events in reported:
            if self.held_bytes > _HELD_BYTES:
                self._write_held()
                if self.committing:
                    self._postpone([(fd, events)])
                    continue
            connection = connections[fd]
            if connection is None:
                if self.tls_connections:
                    self._ready_with_tls(fd, events)
                continue
            session = connection.session
            try:
                if events != READ or session.backlog is not None or session.partial is not None or connection.queued:
                    connection.on_events(events)
                    continue
                chunk = _read(fd, _FIRST_READ)
                self.received += len(chunk)
                single = connection.single
                if single is not None:
                    single.received(len(chunk))
                session.receive(chunk)
                if session.unsent > _SHORT:
                    connection.flush()
                elif session.out:
                    self.held.append(connection)
                if pending_flush:
                    self.flush_pending()
                if len(chunk) == _FIRST_READ or not chunk or session.input_buffer is not None:
                    connection.resume_reading()
            except (OSError, PeerError) as error:
                self._failed(connection, error)
            except Exception:
                self.give_up(connection)

    def _write_held(self) -> None:
        """Write what this turn has to send, and close what was to be closed behind it."""
        connections = self.connections
        if self.committing:
            return
        self.held_bytes = 0
        while self.held:
            if self.store.hub.pending_flush:  # a command behind those that woke them has failed
                self.flush_pending()
            held, self.held = self.held, []
            self.held_bytes = 0
            if self.persistence is not None and not self._commit(self.persistence, held):
                self.held = held + self.held
                return
            for connection in held:
                fd = connection.fd
                if fd < 0:
                    continue
                session = connection.session
                out = session.out
                try:
                    if (
                        len(out) == 1
                        and connections[fd] is connection
                        and connection.single is None
                        and session.backlog is None
                    ):
                        data = out[0]
                        size = len(data)
                        if size > _JOINED:
                            connection.write_out()
                        else:
                            try:
                                count = _write(fd, data)
                            except BlockingIOError:
                                count = 0
                            out.clear()
                            session.unsent -= count
                            self.sent += count
                            if count < size:
                                connection.keep([data], count)
                    elif out:
                        connection.write_out()
                    if connection.ended:
                        connection.close_if_sent()
                except OSError as error:
                    connection.lost(error)
                except Exception:
                    self.give_up(connection)
            if self.links.attaching:
                self.attach_links()
            if self.store.hub.pending_flush:
                self.flush_pending()
        if self.persistence is not None and self._commit(self.persistence, self.held):
            for fd in self.closing:
                os.close(fd)
            self.closing.clear()

    def _commit(self, persistence: Persistence, held: list[Connection]) -> bool:
        """Make durable what has happened before these connections are written to; return whether that succeeded."""
        for connection in held:
            if connection.single is not None:
                connection.single.keep_ahead(connection.session.out)
        try:
            durable = persistence.commit(len(held) + len(self.closing) > 0)
        except OSError as error:
            self.lost(error)
            return False
        if not durable:
            self.committing = self.turn.stands = True  # the next record has events of one time, too
            self.held_bytes = _HELD_BYTES + 1  # so that nothing else is read
        return durable

    def _ready_with_tls(self, fd: int, events: int) -> None:
        connection = self.tls_connections.get(fd)
        if connection is None:
            return
        try:
            connection.on_events(events)
        except Exception:
            self.give_up(connection)

    def _failed(self, connection: Connection, error: OSError | PeerError) -> None:
        """Finish serving a connection after an error of the inlined case."""
        try:
            if isinstance(error, PeerError):
                self.close_for(connection, error)
            elif isinstance(error, BlockingIOError):  # there was nothing to read
                if self.store.hub.pending_flush:
                    self.flush_pending()
                connection.resume_reading()
            else:
                connection.lost(error)
        except Exception:
            self.give_up(connection)

    # Called by connections

    def serve_plain(self, connection: TlsConnection) -> None:
        """Serve a connection without TLS from now on."""
        del self.tls_connections[connection.fd]
        self.connections[connection.fd] = connection

    def write_allowance(self) -> int:
        """Return how many more bytes of large replies may be written in this turn of the loop."""
        if not self._writing:
            self._writing = True
            self.call_soon(self._write_more)
        return _WRITTEN_PER_TURN - self.written

    def defer_writing(self, connection: Connection) -> None:
        """Continue writing in the next turn of the loop. Call it when `write_allowance` is 0."""
        self._to_write[connection] = None

    def _write_more(self) -> None:
        with self.turn:
            self._writing = False
            self.written = 0
            to_write = list(self._to_write)
            self._to_write = {}
            for at, connection in enumerate(to_write):
                if self.written >= _WRITTEN_PER_TURN:
                    self._to_write = dict.fromkeys([*to_write[at:], *self._to_write])
                    return
                try:
                    connection.writable()
                except Exception:
                    self.give_up(connection)

    def defer(self, connection: Connection) -> None:
        """Continue reading in the next turn of the loop."""
        if not self._deferred:
            self.call_soon(self._resume)
        connection.queued = True
        self._deferred.append(connection)

    def hold(self, connection: Connection) -> None:
        """Continue reading when the disk has space."""
        connection.queued = True
        self.waiting[connection] = None

    def resume_held(self) -> None:
        waiting, self.waiting = self.waiting, {}
        for connection in waiting:
            self.defer(connection)

    def _resume(self) -> None:
        with self.turn:
            deferred = self._deferred
            self._deferred = []
            end = time.perf_counter() + _RESUMED_SECONDS
            for at, connection in enumerate(deferred):
                if self.committing or time.perf_counter() > end:
                    if not self._deferred:
                        self.call_soon(self._resume)
                    self._deferred = deferred[at:] + self._deferred
                    return
                self._resume_one(connection)
                if self.held_bytes > _HELD_BYTES:
                    self._write_held()

    def _resume_one(self, connection: Connection) -> None:
        connection.queued = False
        try:
            connection.resume_reading()
        except Exception:
            self.give_up(connection)

    def must_defer_end(self) -> bool:
        """Return whether the ends of other peers have taken so long that the next one is deferred.

        Releasing what peers leave behind may take long: when the hosts of a job end together, other peers are served in
        between.
        """
        now = time.perf_counter()
        if not self._ends_until:
            self._ends_until = now + _ENDS_SECONDS
        return now > self._ends_until

    def defer_handshake(self, connection: TlsConnection) -> None:
        """Begin a TLS handshake later: one per turn of the loop, as each takes as long as 100 requests.

        Other peers are served in between, and peers that connect together can complete their handshakes before
        `MOST_HANDSHAKES` newer ones are under way.
        """
        if not self._deferred_handshakes:
            self.call_soon(self._begin_handshake)
        connection.queued = True
        self._deferred_handshakes.append(connection)

    def _begin_handshake(self) -> None:
        with self.turn:
            connection = self._deferred_handshakes.popleft()
            if self._deferred_handshakes:
                self.call_soon(self._begin_handshake)
            self._resume_one(connection)

    # Accepting

    def serve(self, fd: int, host: str, port: int, store: NamedStore | None = None) -> None:
        if self.committing and not self.cut_off and self.count + len(self._arrived) < self.max_connections:
            self._arrived.append((fd, host, port, store))
            return
        self.turn.begin()
        if (store is not None and store.ended) or self.cut_off or not self.admits(host, port):
            os.close(fd)
            return
        os.set_blocking(fd, False)
        self.poller.watch(fd)
        try:
            host = sys.intern(host)  # a host has many ranks
            while fd >= len(self.connections):
                self.connections.extend([None] * (len(self.connections) + 64))
            if self.tls is None:
                connection = Connection(self, fd, host, port, store)
                if store is not None:
                    self.named.arrive(connection.session, store)
                self.connections[fd] = connection
            else:
                self.tls_connections[fd] = TlsConnection(self, self.tls, fd, host, port)
        except BaseException:
            self.poller.forget(fd)
            raise
        self.opened()
