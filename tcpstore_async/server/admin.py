"""The admin socket: answers who is connected and who waits for what, beside the port that the ranks use.

Knows a Unix socket, requests and portions of replies. Must not draw conclusions from the facts that it passes on.
Invariants: the store's peers are served between two portions, and a client that does not read delays no other. It works
when the server has as many connections as it can hold. Only requests to drop a named store, or to end or replace the
server, change anything. The audit log has a line for each process's requests.

A request is one line of JSON, `{"ask": ["sessions", "counters", "keys", "stores"]}`. The reply is lines of JSON: facts
about the server, portions of what was asked for (`observe/inspection.py`), and `{"end": true}`; `{"error": "…"}` ends
it early. `"store": "…"` selects a named store; without it, sessions, counters and samples are those of all stores, and
keys and barriers those of the unnamed store. `"drop": "…"` first ends the store of that name, `"stop": true` the whole
server; `"replace": "…"` has it pass its listening socket to the server that waits there, and leave its stores to that;
`"promote": true` has it let a server serve that stands by. `{"ask": ["stacks"]}` has it ask relays what their ranks do.
"""

import asyncio
import logging
import os
import select
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from ..base.errors import DistNetworkError
from ..base.peer_process import peer_process
from ..base.version import VERSION
from ..observe.history import MOST_BYTES, History, history_of
from ..observe.inspection import Inspection
from ..observe.monitor import Monitor
from ..observe.statistics import Statistics
from ..session.identity import build
from ..session.named_stores import NamedStore
from ..session.store import Store
from . import admin_path
from .base import Server
from .examining import Question
from .fork_safety import close_on_fork
from .listen_socket import accept_queue
from .persistence import JournalPersistence
from .service_times import Histogram, ServiceTimes

log = logging.getLogger("tcpstore_async.server")

_READ_SECONDS: Final = 10.0
"""Time to receive a request."""

_WRITE_SECONDS: Final = 60.0
"""Time for the peer to read a portion."""

_LAG_SECONDS: Final = 0.2
"""Time between two looks at how late the loop is."""

_SERIAL_BITS: Final = 24
"""Low bits of a session's serial number, which count the sessions of one store."""

_MOST_PEERS: Final = 16

_MONITOR: Final = "monitor"
"""The part of a reply that is a stream of samples."""

_MOST_MONITORS: Final = 4

_STACKS: Final = "stacks"
"""The part of a reply that relays give."""

_MOST_SECONDS: Final = 10.0
"""Longest time for that."""

_SAMPLE_SECONDS: Final = 0.1
"""Time between two portions of samples."""

_MOST_LISTED: Final = 32
"""Most waits, keys or stores in a list of the longest, largest or oldest."""

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")

_NOTHING: Final = "invalid request: empty"
"""A request from a client that only checked whether the server is there. Not logged."""

_MOST_AUDITED: Final = 256
"""Most requests remembered so that they are logged once."""

_MOST_LOGGED: Final = 200
"""Most logged characters of a request."""

_HIGH_WATER: Final = 256 * 1024
"""Unsent bytes from which on a reply waits for its client to read."""

_AT_ONCE: Final = 16 * 1024
"""Bytes of a reply sent together: each write wakes this process and the client."""

_SHARE: Final = 10
"""A reply may take one in this many seconds of the loop from the peers of a busy server: 0.1 s of work takes 1 s."""

_IDLE_SECONDS: Final = 0.00005
"""A shorter turn of the loop serves hardly any peers."""


class Request(msgspec.Struct):
    ask: list[str]
    """Parts of the reply, in order."""
    every: int = 1
    """For `monitor`: one command in this many is sent."""
    values: bool = False
    """For `monitor`: whether values are sent."""
    seconds: float = 2.0
    """For `stacks`: within which relays answer."""
    store: str | None = None
    drop: str | None = None
    stop: bool = False
    replace: str | None = None
    """Where a server waits that is to take this one's place."""
    persist: str = ""
    """The directory of its journal."""
    promote: bool = False


@asynccontextmanager
async def admin_socket(server: Server, path: str | None) -> AsyncIterator[None]:
    """Observe a server, and answer at its admin socket, while the context lasts.

    `path` is by default that of `admin_path.default_path`; if that is unavailable, a warning is logged and the server
    has no admin socket. An empty path means none. Raises DistNetworkError if a given path is unavailable.
    """
    if path == "":
        yield
        return
    try:
        where = admin_path.default_path(server.port) if path is None else Path(path)
        admin = Admin(server, where)
    except DistNetworkError as error:
        if path is not None:
            raise
        log.warning("no admin socket: %s", error)
        yield
        return
    try:
        await admin.start()
        yield
    finally:
        await admin.close()


class Admin:
    """The admin socket of one server."""

    def __init__(self, server: Server, path: Path) -> None:
        """Listen, and observe the server. Raises DistNetworkError."""
        self.server = server
        self.path = path
        self._listener = close_on_fork(admin_path.listen(path))
        self._identity = admin_path.identify(path)
        self._pid = os.getpid()
        self._began = time.monotonic()
        self._times = ServiceTimes()
        self._lag = Histogram()
        """How late the loop runs what is due."""
        self._due: float = 0.0
        """When `_measure_lag` is due."""
        self._accepting: asyncio.AbstractServer | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._peers: set[asyncio.Task[None]] = set()
        self._monitors: set[Monitor] = set()
        self._question: Question | None = None
        """The last one to relays."""
        self._audited: set[tuple[str, str]] = set()
        """Users with their processes, and their requests."""
        self._closed = False
        with server.turn:
            self.history = History(server.store)
            server.store.observe(self.history)
            server.times = self._times
            server.named.on_created = self._observe
            for store in server.named.stores.values():  # which have come from a journal
                self._observe(store)
        server.admin = str(path.absolute())

    async def start(self) -> None:
        """Answer from now on."""
        self._schedule_lag()
        self._accepting = await asyncio.start_unix_server(self._accept, sock=self._listener)

    async def close(self) -> None:
        """Stop answering, and remove the socket."""
        self._closed = True
        if os.getpid() == self._pid:
            admin_path.remove(self.path, self._identity)
        if self._timer is not None:
            self._timer.cancel()
        if self._accepting is not None:
            self._accepting.close()
        self._listener.close()
        for peer in list(self._peers):
            peer.cancel()
        if self._peers:
            await asyncio.wait(list(self._peers))

    def _observe(self, store: NamedStore) -> None:
        """Observe a new store. The more stores there are, the shorter their histories."""
        named = self.server.named
        history = History(store, MOST_BYTES // len(named.stores), named.created << _SERIAL_BITS)
        store.observe(history)

    def _measure_lag(self) -> None:
        self._lag.add(max(0.0, time.monotonic() - self._due))
        self._schedule_lag()

    def _schedule_lag(self) -> None:
        self._due = time.monotonic() + _LAG_SECONDS
        self._timer = self.server.loop.call_later(_LAG_SECONDS, self._measure_lag)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = asyncio.current_task()
        assert peer is not None
        self._peers.add(peer)
        try:
            with suppress(OSError, asyncio.TimeoutError):
                await self._answer(reader, writer)
        except asyncio.CancelledError:
            pass  # the server stops
        except Exception:
            log.exception("an admin request failed")
        finally:
            self._peers.discard(peer)
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()
            with suppress(OSError):  # what broke the connection: a stream reports it if nobody waited for its end
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(high=_HIGH_WATER)
        request = await self._request(reader)
        if request != _NOTHING:
            self._audit(writer, request)
        if isinstance(request, Request) and request.ask == [_MONITOR]:
            if request.store is not None and request.store not in self.server.named.stores:
                request = _no_store(request.store)
            elif len(self._monitors) < _MOST_MONITORS:
                await self._watch(request, reader, writer)
                return
            else:
                request = f"there are already {_MOST_MONITORS} monitors"
        if isinstance(request, Request) and request.ask == [_STACKS]:
            if self._question is not None and not self._question.over:
                request = "relays are being asked already"
            elif not 0 < request.seconds <= _MOST_SECONDS:
                request = f"invalid request: seconds must be at most {_MOST_SECONDS:g}"
            else:
                await self._examine(request.seconds, reader, writer)
                await _finish(reader, writer)
                return
        await _send(writer, self._facts(request))
        await _finish(reader, writer)
        if isinstance(request, Request) and request.stop and self.server.on_end is not None:
            self.server.on_end(None)
        if isinstance(request, Request) and request.replace is not None and self.server.on_replace is not None:
            self.server.on_replace(request.replace)
        if isinstance(request, Request) and request.promote and not self.server.why_not_promote():
            self.server.on_promote()

    async def _watch(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send samples of commands until the peer sends something, or leaves.

        While the peer does not read, samples beyond what the monitor holds are dropped.
        """
        monitor = Monitor(time.time, request.every, request.values, store=request.store)
        store = self.server.store
        self._monitors.add(monitor)
        ended = asyncio.ensure_future(reader.read(1))
        try:
            with self.server.turn:
                store.hub.watch(monitor.note)
            await _write(writer, _encode({"server": self._about()}))
            while not ended.done() and not self._closed:  # before 3.12, wait_for may swallow a cancellation
                await asyncio.wait([ended], timeout=_SAMPLE_SECONDS)
                with self.server.turn:
                    samples = monitor.take()
                    fact = {"samples": samples, "seen": monitor.seen, "dropped": monitor.dropped}
                if samples:
                    await _write(writer, _encode(fact))
        finally:
            with self.server.turn:
                store.hub.unwatch(monitor.note)
            self._monitors.discard(monitor)
            await _cancel(ended)

    async def _examine(self, seconds: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send what relays answer, as it comes, until the peer leaves."""
        question = self._question = Question(self.server, seconds)
        leaving = asyncio.ensure_future(_end_if_it_leaves(question, reader, writer))
        try:
            await _write(writer, _encode({"server": self._about()}))
            while await question.wait():
                await _send(writer, question.answers())
            await _write(writer, _encode({"relays": question.relays()}) + _encode({"end": True}))
        finally:
            question.end()
            await _cancel(leaving)

    def _audit(self, writer: asyncio.StreamWriter, request: Request | str) -> None:
        """Log a request: each drop and each examination, and anything else once per process."""
        user = _user(writer)
        if isinstance(request, Request) and request.ask == [_STACKS]:
            asked = "asked what ranks do"
        elif isinstance(request, Request) and request.stop:
            asked = "asked the server to stop"
        elif isinstance(request, Request) and request.replace is not None:
            asked = "asked the server to let another one take its place"
        elif isinstance(request, Request) and request.drop is not None:
            asked = f"asked to drop the store {request.drop}"
        else:
            asked = request if isinstance(request, str) else f"asked for {', '.join(request.ask) or 'a summary'}"
            if (user, asked) in self._audited:  # `tcpstore stat` repeats its request each second
                return
            if len(self._audited) >= _MOST_AUDITED:
                self._audited.clear()
            self._audited.add((user, asked))
        text = f"admin socket for port {self.server.port}: {user}: {asked[:_MOST_LOGGED]!r}"
        with self.server.turn:
            self.server.log_audit(user, text, logging.INFO)

    async def _request(self, reader: asyncio.StreamReader) -> Request | str:
        """Return the request, or an error."""
        if len(self._peers) > _MOST_PEERS:
            return f"there are already {_MOST_PEERS} other clients"
        try:
            line = await asyncio.wait_for(reader.readline(), _READ_SECONDS)
            return msgspec.json.decode(line, type=Request) if line else _NOTHING
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            return f"invalid request: {error}"

    def _refusal(self, folder: str) -> str:
        """Return why a server with a journal in this directory may not take this one's place; nothing if it may."""
        persistence = self.server.persistence
        if not isinstance(persistence, JournalPersistence) or self.server.on_replace is None:
            return "this server has no journal that another one could continue"
        mine = os.path.realpath(persistence.journal.folder)
        return "" if mine == folder else f"this server keeps its stores in {mine}, not in {folder}"

    def _facts(self, request: Request | str) -> Iterator[dict[str, Any]]:
        """Yield the lines of the reply, each computed in a turn. Empty ones are not sent."""
        if isinstance(request, str):
            yield {"error": request}
            return
        server = self.server
        shown: Store = server.store
        history = self.history
        with server.turn:
            if request.drop is not None and not server.drop_store(request.drop, "an administrator dropped it"):
                yield {"error": _no_store(request.drop)}
                return
            if request.stop and server.on_end is None:
                yield {"error": "this server ends with the process that started it"}
                return
            refusal = server.why_not_promote() if request.promote else ""
            if request.replace is not None:
                refusal = self._refusal(request.persist)
            if refusal:
                yield {"error": refusal}
                return
            if request.store is not None:
                named = server.named.stores.get(request.store)
                found = None if named is None else history_of(named)
                if named is None or found is None:
                    yield {"error": _no_store(request.store)}
                    return
                shown, history = named, found
            inspection = Inspection(shown, history, server.clock.now, request.store is None, server.named)
            about = {**self._about(), **inspection.summary()}
        yield {"server": about}
        statistics = Statistics(shown, inspection.now, request.store is None)
        parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
            "sessions": inspection.sessions,
            "counters": inspection.counters,
            "keys": inspection.keys,
            "stores": inspection.stores,
            "oldest_stores": lambda: inspection.oldest_stores(_MOST_LISTED),
            "stats": lambda: self._stats(statistics),
            "waits": lambda: statistics.longest_waits(_MOST_LISTED),
            "largest": lambda: statistics.largest_keys(_MOST_LISTED),
        }
        for part in request.ask:
            if part not in parts:
                known = f"choose from {', '.join(parts)}, or {_MONITOR} or {_STACKS} by itself"
                yield {"error": f"unknown part {part!r}; {known}"}
                return
            portions = parts[part]()
            while True:
                with server.turn:
                    portion = next(portions, None)
                if portion is None:
                    break
                yield portion
        yield {"end": True}

    def _stats(self, statistics: Statistics) -> Iterator[dict[str, Any]]:
        """Yield empty portions while counting, then all counters."""
        for _ in statistics.count():
            yield {}
        server, links = self.server, self.server.links
        queue = accept_queue(server.listener)
        yield {
            "stats": {
                "time": round(time.time(), 3),
                "uptime": round(time.monotonic() - self._began, 3),
                "cpu": round(time.process_time(), 3),
                "resident_bytes": resident_bytes(),
                "connections": {
                    "open": server.count,
                    "max": server.max_connections,
                    "accepted": server.accepted,
                    "rejected": server.rejected,
                    "closed_for": dict(server.closed_for),
                },
                "links": {
                    "open": len(links.links),
                    "sessions": links.sessions,
                    "single": len(links.singles),
                    "suspended": len(links.suspended),
                },
                "traffic": {"received_bytes": server.received, "sent_bytes": server.sent},
                "accept_queue": None if queue is None else {"length": queue[0], "limit": queue[1]},
                "lag": self._lag.as_fact(),
                "service": self._times.service.as_fact(),
                "turns": self._times.turn_times.as_fact(),
                **statistics.counters(),
            }
        }

    def _about(self) -> dict[str, Any]:
        server = self.server
        return {
            "host": server.host,
            "port": server.port,
            "pid": os.getpid(),
            "version": VERSION,
            "build": build(),
            "seconds": round(time.monotonic() - self._began, 3),
            "accepting": server.listener.fileno() >= 0,
            "connections": server.count,
            "max_connections": server.max_connections,
            "why_held": server.store.hub.why_held,
            **server.facts(),
        }


def _no_store(name: str) -> str:
    return f"there is no store {name!r}"


def _encode(fact: dict[str, Any]) -> bytes:
    """Return a line of the reply."""
    return msgspec.json.encode(fact) + b"\n"


async def _send(writer: asyncio.StreamWriter, facts: Iterable[dict[str, Any]]) -> None:
    """Send what is computed meanwhile, with time for the store's peers. Raises OSError and TimeoutError."""
    lines, size = [], 0
    began = time.perf_counter()
    due = 0.0  # seconds that they get before the reply continues
    for fact in facts:
        if fact:
            lines.append(_encode(fact))
            size += len(lines[-1])
        due += (time.perf_counter() - began) * _SHARE
        if size >= _AT_ONCE:
            await _write(writer, b"".join(lines))
            lines, size = [], 0
        began = time.perf_counter()
        while due > 0.0:
            await asyncio.sleep(0)
            now = time.perf_counter()
            due = due - (now - began) if now - began > _IDLE_SECONDS else 0.0
            began = now
    await _write(writer, b"".join(lines))


async def _cancel(future: "asyncio.Future[Any]") -> None:
    future.cancel()
    with suppress(asyncio.CancelledError, OSError):
        await future


async def _end_if_it_leaves(question: Question, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """End a question when who asks it closes the connection; who only stops sending gets the answer."""
    with suppress(OSError):  # it has not read all
        if await reader.read(1):
            return
    poll = select.poll()
    if not writer.transport.is_closing():
        poll.register(writer.get_extra_info("socket").fileno(), 0)
        if not poll.poll(0):
            return
    question.end()


async def _finish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """End a reply, and wait until its peer has all of it, and closes. Raises OSError and TimeoutError."""
    if writer.can_write_eof():
        writer.write_eof()
    await asyncio.wait_for(reader.read(1), _WRITE_SECONDS)


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Send lines; wait while more than `_HIGH_WATER` bytes are unsent. Raises OSError and TimeoutError."""
    transport = writer.transport
    if transport.is_closing():  # uvloop would raise RuntimeError on a write
        raise ConnectionResetError("the peer has gone")
    writer.write(data)
    if transport.get_write_buffer_size() > _HIGH_WATER:  # drain() always costs a turn of the loop
        await asyncio.wait_for(writer.drain(), _WRITE_SECONDS)


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes, 0 if the system does not report it."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0


def _user(writer: asyncio.StreamWriter) -> str:
    """Return which user and process have connected, as reported by the kernel."""
    try:
        with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as copy:
            pid, user = peer_process(copy)
    except OSError:
        return "unknown user"
    return f"uid {user}, pid {pid}"
