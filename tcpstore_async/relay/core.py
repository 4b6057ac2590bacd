"""Move bytes between the ranks' connections and the link.

Knows descriptors, credit, and when to read, write and close. Must not know what the bytes mean, nor how the upstream
connection is made: `upstream` does.

Invariants: nothing here blocks. A turn of the loop writes upstream once, whatever the ranks have sent. No more bytes of
a rank are kept than the link's credit. Whatever a rank does, only its own connection closes.
"""

import asyncio
import logging
import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from ..base.addresses import format_address
from ..base.errors import ProtocolError
from ..base.limits import Limits
from ..client.tls import TlsSocket
from ..links.link_client import ClientLink, Stream
from ..links.work import ignore
from ..server.accepting import Acceptor
from ..server.audit import AuditLog
from ..server.listen_socket import reserve_connections
from ..server.peer_user import PeerUsers, UnknownOwnerError
from ..server.poller import READ, WRITE, WatchWith, make_poller
from ..server.rate_limited_log import RateLimitedLog
from .entering import Entry
from .examining import Examiner

_read: Final = os.read
_write: Final = os.write

HEAD_BYTES: Final = 10
"""First bytes of a rank, two requests, that identify it."""

_FIRST_READ: Final = 960
"""Most requests are this short, and malloc has a fast path for a buffer that is not longer."""

_READ: Final = 15 * 1024
"""Bytes read at once from a rank that sends more: two such reads and a first one fit into a session's first credit."""

_UPSTREAM_READ: Final = 64 * 1024

_UPSTREAM_READS_PER_TURN: Final = 4
"""Reads from the server, after which it waits for the ranks."""

_RESUMED_SECONDS: Final = 0.002
"""Time per turn of the loop for deferred ranks; the rest waits for the next turn."""

_GONE: Final = 0x018
"""EPOLLERR and EPOLLHUP: neither direction of the connection works any more."""

_HANG_UP: Final[int] = getattr(select, "POLLRDHUP", 0) | select.POLLHUP

_CLOSING_SECONDS: Final = 10.0
"""Seconds without progress after which a rank that does not read its last replies is closed."""

WAITING: Final = 0
"""The server's capabilities are not known yet: connections are kept, and nothing is read."""
LINKED: Final = 1
"""The ranks' bytes go over the link, even while that has no connection."""
DIRECT: Final = 2
"""The server has no links: each rank gets a connection of its own."""

log = logging.getLogger("tcpstore_async.server")


class Rank(Stream):
    """A rank's connection."""

    def __init__(self, relay: "Relay", fd: int, host: str, port: int) -> None:
        super().__init__()
        self.relay = relay
        self.fd = fd
        """-1 once closed."""
        self.host = host
        self.port = port
        self.queued = False
        """Whether reading is deferred to a later turn of the loop; until then nothing else may read."""
        self.starved = False
        """Whether it waits for credit."""
        self.hung_up = False
        """Whether the rank sends no more: read to the end, as no further event will be reported."""
        self.ended = False
        """Whether the end has been read."""
        self.leaving = False
        """Whether the server has closed: the connection lasts until the rank has read its last replies."""
        self.unsent: list[bytes] | None = None
        """Replies that the kernel has not taken; None if there are none."""
        self.moved_at: float = 0.0
        """When the kernel last took some of `unsent`, while `leaving`."""
        self.described = relay.describe is None
        """Whether the rank has been described, as far as its first bytes identify it."""
        self.pid: int = 0
        """Of its process, if that is one of this machine; else 0."""
        self._head: bytes = b""
        """Its first bytes, while it is not `described`."""
        self.greeting: int = 0 if relay.entry is None else len(relay.entry.greeting)
        """Bytes of its greeting, which is not passed on, that are still to be read."""
        self.entering: bytes | None = None
        """The server's reply to ENTER so far, while the rank is entering a named store."""

    # The rank's side

    def on_events(self, events: int) -> None:
        if events & WRITE:
            self.writable()
        if events != WRITE and self.fd >= 0:
            if events & ~(READ | WRITE):
                self.hung_up = True
                # Nothing will be read from it, and no further event is reported.
                if events & _GONE and (self.queued or self.starved or self.leaving or self.ended):
                    self.abort()
                    return
            self.resume_reading()

    def open(self) -> None:
        """Open a session on the link."""
        relay = self.relay
        relay.silent.pop(self, None)
        relay.link.open(self, self.host, self.port)
        if relay.entry is not None:
            self.entering = b""
            self.queued = True
            relay.link.send(self, relay.entry.request)

    def enter(self, entry: Entry, reply: bytes) -> None:
        """Start reading from the rank once it is in the store, or close it if it is refused."""
        try:
            refusal = entry.refusal(reply)
        except ProtocolError as error:
            refusal = str(error)
        if refusal is None:
            self.entering = reply
            return
        relay = self.relay
        self.entering = None
        self.queued = False
        if refusal:
            relay.log_limited(
                "entering", f"closed the connection from {format_address(self.host, self.port)}: {refusal}"
            )
            self.abort()
        else:
            relay.defer(self)

    def read_greeting(self, entry: Entry) -> bool:
        """Read the rest of the greeting, which is not passed on; return whether it is complete."""
        try:
            chunk = _read(self.fd, self.greeting)
        except BlockingIOError:
            return False
        except OSError:
            chunk = b""
        if not chunk or not entry.greeting.startswith(chunk, len(entry.greeting) - self.greeting):
            self.abort()
            return False
        self.greeting -= len(chunk)
        if not self.described:
            self.describe(chunk)
        return self.greeting == 0

    def resume_reading(self) -> None:
        """Read and pass on a piece, if there is credit for it.

        Pieces are always cut at the same places, and those of several ranks alternate: a long request that all of them
        send, such as a WAIT for hundreds of keys, then travels once.
        """
        if self.queued or self.ended or self.leaving:
            return
        relay = self.relay
        link = relay.link
        if link.has_room():
            if self.number == 0:
                self.open()
                if self.queued:
                    return
            if self.greeting and relay.entry is not None and not self.read_greeting(relay.entry):
                return
            if self.credit < _READ:
                self.starved = True
                relay.poller.pause(self.fd)
                return
            try:
                chunk = _read(self.fd, _READ)
            except BlockingIOError:
                return
            except OSError:
                self.abort()
                return
            if not chunk:
                self.end()
                return
            link.send(self, chunk)
            if not self.described:
                self.describe(chunk)
            if len(chunk) < _READ and not self.hung_up:
                return
        relay.defer(self)

    def describe(self, chunk: bytes) -> None:
        """Describe the rank to the server, once its first bytes have arrived."""
        relay = self.relay
        head = self._head + chunk[: HEAD_BYTES - len(self._head)]
        if len(head) < HEAD_BYTES:
            self._head = head
            return
        self._head = b""
        self.described = True
        if relay.describe is not None:
            self.pid, known = relay.describe(head, self.host)
            relay.link.describe(self, known)

    def end(self) -> None:
        """Tell the server that the rank sends no more."""
        self.ended = True
        relay = self.relay
        relay.poller.pause(self.fd)
        relay.link.end(self)

    def abort(self) -> None:
        """Close, and end the session at once."""
        if self.fd >= 0:
            self.relay.link.close(self)
            self.close()

    def close(self) -> None:
        fd = self.fd
        if fd < 0:
            return
        self.fd = -1
        self.unsent = None
        relay = self.relay
        del relay.ranks[fd]
        if self.leaving:
            relay.leaving.pop(self, None)
        if not self.number:
            relay.silent.pop(self, None)
        relay.poller.forget(fd)
        os.close(fd)
        relay.left()

    # The server's side

    def received(self, data: bytes) -> None:
        if self.unsent is not None:
            self.unsent.append(data)
            return
        if self.entering is not None and self.relay.entry is not None:
            self.relay.link.consume(self, len(data))
            self.enter(self.relay.entry, self.entering + data)
            return
        try:
            count = _write(self.fd, data)
        except BlockingIOError:
            count = 0
        except OSError:
            self.abort()
            return
        if count < len(data):
            self.unsent = [data[count:]]
            self.relay.poller.watch_writing(self.fd, True)
        self.relay.link.consume(self, count)

    def writable(self) -> None:
        unsent = self.unsent
        if unsent is None:
            return
        data = unsent[0] if len(unsent) == 1 else b"".join(unsent)
        try:
            count = _write(self.fd, data)
        except BlockingIOError:
            self.unsent = [data]
            return
        except OSError:
            self.abort()
            return
        if self.leaving:
            self.moved_at = time.monotonic()
        else:
            self.relay.link.consume(self, count)
        if count < len(data):
            self.unsent = [data[count:]]
            return
        self.unsent = None
        if self.leaving:
            self.close()
        else:
            self.relay.poller.watch_writing(self.fd, False)

    def credited(self) -> None:
        if self.starved:
            self.starved = False
            self.relay.defer(self)

    def closed(self) -> None:
        if self.unsent is None:
            self.close()
        else:
            self.leaving = True
            self.moved_at = time.monotonic()
            relay = self.relay
            relay.leaving[self] = None
            relay.poller.pause(self.fd)


class Relay:
    """The ranks' connections and the link, on one loop. Not to be shared between threads."""

    def __init__(
        self,
        listener: socket.socket,
        make_link: Callable[[], ClientLink],
        watch_with: WatchWith = make_poller,
        users: PeerUsers | None = None,
        describe: Callable[[bytes, str], tuple[int, dict[str, str]]] | None = None,
        entry: Entry | None = None,
        examiner: Examiner | None = None,
    ) -> None:
        """`make_link` makes a link with a new identity. `listener` is closed when the relay stops accepting.

        With `users`, only connections of this process's user are accepted. `describe` returns the pid of a rank, or 0,
        and what is known about it, given its first `HEAD_BYTES` bytes and its address. With `entry`, ranks enter a
        named store. `examiner` finds out what they do, when the server asks.
        """
        self.listener = listener
        self.host: str = listener.getsockname()[0]
        self.port: int = listener.getsockname()[1]
        self.loop = asyncio.get_running_loop()
        self.make_link = make_link
        self.link: ClientLink = make_link()
        self.state = WAITING
        self.ranks: dict[int, Rank] = {}
        """Keyed by file descriptor."""
        self.silent: dict[Rank, None] = {}
        """Ranks that have sent nothing: OPEN goes with their first bytes, so that the server wakes once for both."""
        self.leaving: dict[Rank, None] = {}
        """Ranks that have not read their last replies."""
        self.max_files: int = 0
        """Connections that it can hold; 0 until it starts."""
        self.count: int = 0
        """Open connections of ranks."""
        self.used = asyncio.Event()
        """Set when the first rank has connected."""
        self.tried = asyncio.Event()
        """Set when the first attempt to reach a server has ended."""
        self.refusal: str = ""
        """Why the last attempt was refused for good; empty if it was not."""
        self.empty = asyncio.Event()
        """Set while no connection of a rank is open."""
        self.empty.set()
        self.stopped = False
        self.heard = False
        """Whether anything has been received from upstream since `Upstream` reset this."""
        self.on_lost: Callable[[str], object] = ignore
        """Called with the reason when the upstream connection is lost; the link is already disconnected."""
        self.on_broken: Callable[[str], object] = ignore
        """Called with the reason when the link cannot be resumed."""
        self.on_direct: Callable[[int, str, int], object] = ignore
        """Takes over the descriptor, host and port of a rank's connection while the state is DIRECT."""
        self.users = users
        self.describe = describe
        self.entry = entry
        self.examiner = examiner
        self.poller = watch_with(self.loop, self.ready)
        self.rate_limited = RateLimitedLog()
        self.audit = AuditLog(Limits().audit_lines)
        self._acceptor = Acceptor(self.loop, listener, self._serve, None, self.log_limited)
        self._waiting: list[tuple[int, str, int, float]] = []
        """Connections accepted while the state is WAITING: descriptor, host, port, and when."""
        self._upstream = -1
        """The descriptor of the link's connection."""
        self._peer: socket.socket | None = None
        """The socket of the last one."""
        self._upstream_ended = False
        """Whether the server sends no more on it: read to the end, as no further event will be reported."""
        self._unsent: bytes = b""
        """Bytes for it that the kernel has not taken."""
        self._to_read: deque[Rank] = deque()
        """Ranks with more to read."""
        self._resuming = False
        """Whether `_resume` will be called."""

    # Called by its owner

    def start(self) -> None:
        """Accept connections from now on."""
        self.max_files = reserve_connections(self.listener, self.host, self.port, 0)
        self._acceptor.resume()

    def stop_accepting(self) -> None:
        """Free the port; open connections stay. Idempotent."""
        self._acceptor.close()

    def stop(self) -> None:
        """Stop at once: the port is free, and every connection of a rank on a link closed, on return. Idempotent."""
        if self.stopped:
            return
        self.stop_accepting()
        if self.examiner is not None:
            self.examiner.close()
        self.close_ranks()
        if self._upstream >= 0:
            self.link.close_link()
            self.flush()
            self.disconnect()
        self.stopped = True
        self.poller.close()
        self.rate_limited.flush()
        self.audit.flush()

    def close_inherited(self) -> None:
        """In a forked child: close its copies of the descriptors, without touching the parent's connections."""
        for fd in self.ranks:
            os.close(fd)
        for fd, _, _, _ in self._waiting:
            os.close(fd)
        if self._upstream >= 0:
            os.close(self._upstream)

    def log_limited(self, kind: str, text: str) -> None:
        self.rate_limited.add(kind, text)

    # Called by `upstream`

    def connect(self, peer: socket.socket) -> None:
        """Use a connection that the server has accepted as the link's."""
        fd = self._upstream = peer.fileno()
        self._peer = peer
        self._upstream_ended = False
        self._unsent = b""
        self.heard = True
        self.poller.watch(fd)
        self.set_state(LINKED)
        self.loop.call_soon(self._read_on, fd)  # what TLS has buffered, the poller does not report
        self.flush()
        self._resume_soon()

    def disconnect(self) -> None:
        """Stop using the connection, which `Upstream` closes."""
        fd = self._upstream
        if fd >= 0:
            self._upstream = -1
            self._unsent = b""
            self.poller.forget(fd)
            self.link.disconnect()

    def ranks_on_link(self) -> int:
        """Return how many ranks use the link, including silent ones."""
        return len(self.link.streams) + len(self.silent)

    def wait_if_direct(self) -> None:
        """If the server had no links, keep new connections until it is known whether it has now."""
        if self.state == DIRECT:
            self.state = WAITING

    def abandon_link(self) -> None:
        """Close all ranks on the link, as if the server had died, and make a new link."""
        self.disconnect()
        self.state = WAITING
        self.close_ranks()
        self.link = self.make_link()

    def close_ranks(self) -> None:
        """Close all ranks except those with connections of their own."""
        for rank in list(self.ranks.values()):
            rank.close()
        self._to_read.clear()
        for fd, _, _ in self.take_waiting():
            os.close(fd)
            self.left()

    def close_waiting(self, seconds: float) -> None:
        """Close connections that have waited for `seconds`, or whose ranks have given up."""
        latest = time.monotonic() - seconds
        waiting = self._waiting
        self._waiting = []
        for entry in waiting:
            fd, host, port, since = entry
            if since > latest and not _has_hung_up(fd):
                self._waiting.append(entry)
                continue
            os.close(fd)
            self.left()
            if since <= latest:
                address = format_address(host, port)
                text = f"closed the connection from {address}: the relay has no server yet; the rank may retry"
                self.log_limited("waiting", text)

    def take_waiting(self) -> list[tuple[int, str, int]]:
        """Hand over the waiting connections, each with its address; they stay counted."""
        waiting = self._waiting
        self._waiting = []
        return [(fd, host, port) for fd, host, port, _ in waiting]

    def end_link(self) -> None:
        """End a link without ranks: a server that is about to stop waits for its connections to end."""
        self.link.close_link()
        self.flush()
        self._break("the server is about to stop")

    def tick(self) -> None:
        """Close ranks that do not read their last replies, and open sessions for silent ones.

        The server limits how many sessions there are, and how long they may be silent.
        """
        self.audit.flush_due()
        if self.silent:
            for rank in list(self.silent):
                if self.link.has_room():
                    rank.open()
            self.flush()
        if self.link.going_away and not self.link.streams and self._upstream >= 0:
            self.end_link()
        if self.leaving:
            late = time.monotonic() - _CLOSING_SECONDS
            for rank in list(self.leaving):
                if rank.moved_at < late:
                    self.log_limited(
                        "leaving",
                        f"closed the connection from {format_address(rank.host, rank.port)}, which made no progress "
                        f"reading its last replies for {_CLOSING_SECONDS:g} s",
                    )
                    rank.close()

    def acknowledge(self) -> None:
        """Acknowledge what the server has sent, which also shows that the relay is alive."""
        self.link.acknowledge()
        self.flush()

    def left(self) -> None:
        self.count -= 1
        if not self.count:
            self.empty.set()

    # Called by the poller

    def ready(self, reported: list[tuple[int, int]]) -> None:
        """Serve the reported descriptors, each with its events, then write upstream once."""
        ranks = self.ranks
        link = self.link
        for fd, events in reported:
            if fd == self._upstream:
                self._on_upstream_events(events)
                link = self.link
                continue
            rank = ranks.get(fd)
            if rank is None:
                continue  # it was closed, or is the link's previous connection
            try:
                if (
                    events != READ
                    or rank.queued
                    or rank.credit < _FIRST_READ
                    or not rank.number
                    or rank.greeting
                    or rank.ended
                    or rank.leaving
                    or not link.has_room()
                ):
                    rank.on_events(events)
                    continue
                chunk = _read(fd, _FIRST_READ)
                if chunk:
                    link.send(rank, chunk)
                    if not rank.described:
                        rank.describe(chunk)
                    if len(chunk) == _FIRST_READ:
                        self.defer(rank)
                else:
                    rank.end()
            except BlockingIOError:
                pass
            except OSError:
                rank.abort()
            except Exception:
                self._give_up(rank)
        self.flush()

    # Called by ranks

    def defer(self, rank: Rank) -> None:
        """Continue reading from a rank in a later turn of the loop, when the link has room."""
        if not rank.queued and not rank.ended and not rank.leaving:
            rank.queued = True
            self._to_read.append(rank)
            self.poller.pause(rank.fd)
            self._resume_soon()

    # Internal

    def _resume_soon(self) -> None:
        if self._to_read and not self._resuming and self.link.has_room():
            self._resuming = True
            self.loop.call_soon(self._resume)

    def _resume(self) -> None:
        self._resuming = False
        to_read = self._to_read
        end = time.perf_counter() + _RESUMED_SECONDS
        while to_read and time.perf_counter() < end and self.link.has_room():
            rank = to_read.popleft()
            rank.queued = False
            if rank.fd < 0:
                continue
            self.poller.resume(rank.fd)
            try:
                rank.resume_reading()
            except Exception:
                self._give_up(rank)
        self.flush()
        self._resume_soon()

    def _give_up(self, rank: Rank) -> None:
        """Close a connection after an internal error, so that the others are still served."""
        address = format_address(rank.host, rank.port)
        log.exception("closing the connection from %s after an internal error", address)
        rank.abort()

    def flush(self) -> None:
        """Write upstream what ranks have sent."""
        link = self.link
        link.seal()
        out = link.out
        if out and self._upstream >= 0 and not self._unsent:
            link.out = []
            self._write_upstream(b"".join(out))

    def _write_upstream(self, data: bytes) -> None:
        fd, peer = self._upstream, self._peer
        assert peer is not None
        try:
            count = peer.send(data)
        except BlockingIOError:
            count = 0
        except OSError as error:
            self._take_rest(fd, peer)
            if self._upstream == fd:
                self._lose_upstream(error.strerror or str(error))
            return
        if count < len(data):
            if not self._unsent:
                self.poller.watch_writing(fd, True)
            self._unsent = data[count:]
        elif self._unsent:
            self._unsent = b""
            self.poller.watch_writing(fd, False)

    def _on_upstream_events(self, events: int) -> None:
        if events & WRITE and self._unsent:
            self._write_upstream(self._unsent)
            if not self._unsent and self._upstream >= 0:
                self.flush()
        if events != WRITE:
            if events & ~(READ | WRITE):
                self._upstream_ended = True
            self._read_upstream()

    def _read_upstream(self) -> None:
        """Read from the server, up to its share of one turn of the loop."""
        fd, peer = self._upstream, self._peer
        assert peer is not None
        self.heard = True
        for _ in range(_UPSTREAM_READS_PER_TURN):
            if self._upstream != fd or fd < 0:
                return
            try:
                chunk = peer.recv(_UPSTREAM_READ)
            except BlockingIOError:
                break
            except OSError as error:
                self._lose_upstream(error.strerror or str(error))
                return
            if not chunk:
                self._lose_upstream("the server closed it")
                return
            if not self._take(chunk):
                return
            drained = peer.drained() if isinstance(peer, TlsSocket) else len(chunk) < _UPSTREAM_READ
            if drained and not self._upstream_ended:
                break
        else:
            self.loop.call_soon(self._read_on, fd)
        if self._to_read:
            self._resume_soon()

    def _take_rest(self, fd: int, peer: socket.socket) -> None:
        """Read what the server sent before it closed the connection: last replies, and whether it has stopped."""
        while self._upstream == fd:
            try:
                chunk = peer.recv(_UPSTREAM_READ)
            except OSError:
                return
            if not chunk or not self._take(chunk):
                return

    def _read_on(self, fd: int) -> None:
        if fd == self._upstream:
            self._read_upstream()
            self.flush()

    def _take(self, chunk: bytes) -> bool:
        """Pass bytes to the link; return whether it still lasts."""
        link = self.link
        try:
            link.receive(chunk)
        except ProtocolError as error:
            self._break(f"the server violated the link protocol: {error}")
            return False
        except Exception as error:
            log.exception("ending the link after an internal error")
            self._break(f"internal error: {error!r}")
            return False
        if link.is_over:
            self._break("the server has stopped")
            return False
        if link.question is not None:
            self._examine(link, *link.question)
        if link.going_away and not link.streams:
            self.end_link()
            return False
        return True

    def _examine(self, link: ClientLink, number: int, milliseconds: int) -> None:
        """Answer a question of the server, later."""
        link.question = None
        if self.examiner is not None:
            pids = {rank.pid for rank in self.ranks.values()} - {0}
            self.examiner.examine(number, milliseconds / 1000, pids, partial(self._answer, link))

    def _answer(self, link: ClientLink, number: int, report: bytes) -> None:
        if link is self.link:
            link.answer(number, report)
            self.flush()

    def _lose_upstream(self, reason: str) -> None:
        self.disconnect()
        self.on_lost(reason)

    def _break(self, reason: str) -> None:
        self.disconnect()
        self.on_broken(reason)

    # Accepting

    def set_state(self, state: int) -> None:
        """Serve waiting and new ranks as LINKED or DIRECT says."""
        self.state = state
        for fd, host, port in self.take_waiting():
            try:
                self._admit(fd, host, port)
            except Exception as error:
                os.close(fd)
                self.left()
                self.log_limited("accept", f"closed the connection from {format_address(host, port)}: {error!r}")

    def _serve(self, fd: int, host: str, port: int) -> None:
        """Serve a new connection, or close it if there are too many."""
        needed = self.count + 1 if self.state != DIRECT else 2 * self.count + 2  # files: one more to the server each
        if needed > self.max_files:
            self.log_limited(
                "connections",
                f"rejected {format_address(host, port)}: connection limit {self.count} reached; raise ulimit -n",
            )
            os.close(fd)
        elif self.link.going_away or (self.users is not None and not self._is_same_user(fd, host, port, self.users)):
            os.close(fd)
        else:
            os.set_blocking(fd, False)
            self._admit(fd, sys.intern(host), port)
            self.count += 1
            self.used.set()
            self.empty.clear()

    def _is_same_user(self, fd: int, host: str, port: int, users: PeerUsers) -> bool:
        """Return whether a new connection belongs to this process's user; log one that does not."""
        connection = socket.socket(fileno=fd)
        try:
            user = users.look_up(connection)
        except UnknownOwnerError as error:
            reason = f"cannot determine its user: {error}"
        else:
            if user == users.user:
                return True
            reason = f"its process belongs to user {user}"
        finally:
            connection.detach()
        self.audit.add(
            host,
            f"rejected {format_address(host, port)}: {reason}; --same-user admits only user {users.user} on this host",
        )
        return False

    def _admit(self, fd: int, host: str, port: int) -> None:
        if self.state == WAITING:
            self._waiting.append((fd, host, port, time.monotonic()))
        elif self.state == DIRECT:
            self.on_direct(fd, host, port)
        else:
            rank = Rank(self, fd, host, port)
            self.poller.watch(fd)
            self.ranks[fd] = rank
            self.silent[rank] = None


def _has_hung_up(fd: int) -> bool:
    """Return whether the peer sends no more."""
    poll = select.poll()
    poll.register(fd, _HANG_UP)
    return bool(poll.poll(0))
