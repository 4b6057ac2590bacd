"""A stage on which the real clients play: threads that run one at a time, a clock of its own, sockets in memory.

Each client is an actor, a thread that runs until it would block; then it is the director's ticket, who chooses by a
list of numbers which actor goes on, which bytes are carried, what is cut, and when time passes. So the real
AsyncTCPStore (on a loop of asyncio whose selector hands over to the director) and the real TCPStore (whose socket does)
run on the real server sessions, and the same numbers always mean the same run. Bytes may rest for as long as there is a
timeout: an answer that comes late is a choice like any other.
"""

from __future__ import annotations

import asyncio
import random
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

from msgspec import json

from properties.fleet import Difference
from replaying import record
from tcpstore_async.base.errors import PeerError
from tcpstore_async.base.limits import Limits
from tcpstore_async.base.version import VERSION
from tcpstore_async.client import connect, requests
from tcpstore_async.client.connect import _receive
from tcpstore_async.client.wait_queue import Ticket
from tcpstore_async.serving import build
from tcpstore_async.session.client import ClientSession
from tcpstore_async.session.identity import SINGLE_LINKS, Identity
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store

_monotonic, _sleep, _poll = time.monotonic, time.sleep, select.poll

PID: Final = 4711


class Killed(BaseException):
    """The actor's process has died; nothing that it does from here on counts."""


def _job(session: ServerSession) -> Any:
    """Return what remains of its last command, where commands run in steps."""
    return getattr(session, "job", None)


def _store(portion: int) -> Store:
    """Return a store that handles this many keys in a step, if it has steps."""
    any_engine: Any = Store
    return cast(Store, any_engine(Limits(), portion) if _STEPS else any_engine(Limits()))


_STEPS: Final = hasattr(Store(Limits()).keyspace, "work")


class Choices:
    """Numbers that decide what happens: first the given ones, then random ones, or 0, the quiet choice."""

    def __init__(self, given: list[int], seed: int | None) -> None:
        self.taken: list[int] = []
        self._given = given
        self._rng = None if seed is None else random.Random(seed)

    def draw(self, below: int) -> int:
        at = len(self.taken)
        if at < len(self._given):
            number = self._given[at] % below
        else:
            number = int(self._rng.random() * below) if self._rng is not None else 0
        self.taken.append(number)
        return number


class Pipe:
    """A connection between a real session and an actor."""

    def __init__(self, stage: Stage, actor: Actor) -> None:
        self.stage = stage
        self.actor = actor
        self.session = ServerSession(stage.store, self, "sim", len(stage.pipes), stage.now)
        self.up = bytearray()
        self.down = bytearray()
        self.open = True
        """Whether the client's end is open."""
        self.served = True
        """Whether the server's end is open."""
        self.was_reset = False
        self.rest = bytearray()
        """Bytes that have reached the client's kernel."""
        self.on_data: Callable[[], None] | None = None
        """Callback of a transport, called when bytes or the end have arrived."""

    def __str__(self) -> str:
        return f"{self.actor.name}, connection {self.stage.pipes.index(self)}:"

    def send(self, data: bytes) -> int:
        if self.actor.dead:
            return len(data)
        if self.was_reset or not self.open:
            raise ConnectionResetError(104, "Connection reset by peer")
        self.up += data
        return len(data)

    def readable(self) -> bool:
        return bool(self.rest) or self.was_reset or (not self.served and not self.down) or not self.open

    def take(self, size: int) -> bytes:
        """Return received bytes, b"" at the end. Raises ConnectionResetError."""
        if not self.rest and self.was_reset:
            raise ConnectionResetError(104, "Connection reset by peer")
        data = bytes(self.rest[:size])
        del self.rest[:size]
        return data

    def close(self) -> None:
        self.open = False

    # The network

    def moves(self) -> bool:
        """Return True if there are bytes to carry or work to continue."""
        if _job(self.session) is not None:
            return self.served
        return bool(self.up and self.served) or bool(self.down and self.open) or (self.served and not self.open)

    def carry(self, count: int) -> None:
        """Deliver this many bytes, all for 0, to one of the ends; or continue a command of the server."""
        if _job(self.session) is not None:
            self._arrive(b"")
        elif self.up and self.served:
            count = count or len(self.up)
            chunk = bytes(self.up[:count])
            del self.up[:count]
            self.stage.tell(f"{self} up {chunk!r}")
            self._arrive(chunk)
        elif self.down and self.open:
            count = count or len(self.down)
            self.stage.tell(f"{self} down {bytes(self.down[:count])!r}")
            self.rest += self.down[:count]
            del self.down[:count]
            self._tell()
        elif self.served and not self.open:
            self.stage.tell(f"{self} end")
            self.leave()

    def cut(self, how: int) -> None:
        """0: close the server's end, its bytes still arrive. 1: reset, both ends see it. 2: only the client does."""
        self.stage.tell(f"{self} is cut, {('by the server', 'reset', 'reset for the client only')[how]}")
        if how == 0:
            self.leave()
        else:
            self.was_reset = True
            self.down.clear()
            if how == 1:
                self.up.clear()
                self.leave()
        self._tell()

    def leave(self) -> None:
        if self.served:
            self.served = False
            self.session.leave()
            self.stage.flush()
            self._tell()

    def _tell(self) -> None:
        if self.on_data is not None and self.open and self.readable():
            self.on_data()

    def _arrive(self, chunk: bytes) -> None:
        session = self.session
        try:
            session.receive(chunk)
            self.stage.flush(session)
            while session.stalled() and _job(session) is None:
                session.receive(b"")
                self.stage.flush(session)
        except PeerError as error:
            self.stage.refusals.append(error)
            self.stage.flush(session)
            self.leave()


class Stage:
    """The server, its connections, the actors and the clock. `play` directs."""

    def __init__(self, choices: Choices, trouble: int, tell: Callable[[str], object]) -> None:
        self.choices = choices
        self.report = tell
        self.trouble = trouble
        """How many of a thousand moves do harm."""
        self.now = 1000.0
        self.store = _store(1 + choices.draw(3))
        self.store.identify(json.encode(Identity("tcpstore_async", VERSION, SINGLE_LINKS - 1, "one")))
        self.store.announce(0)
        record(self.store)
        self.pipes: list[Pipe] = []
        self.actors: list[Actor] = []
        self.refusals: list[PeerError] = []
        self.back = threading.Lock()
        self.back.acquire()
        self.moved = 0
        self.rushed = 0.0
        """When time last passed although an actor could have run."""

    def tell(self, text: str) -> None:
        """Write a line of the log."""
        self.report(f"{self.now:.3f} {text}")

    def observe(self, opcode: int, seen: Callable[..., None]) -> None:
        """Call this with the fields of each such command, before it is executed."""
        slot = self.store.slot(opcode)
        assert slot is not None
        call = slot.call

        def both(*fields: Any) -> Any:
            seen(*fields)
            return call(*fields)

        slot.call = both

    def flush(self, *sessions: ServerSession) -> None:
        for session in (*sessions, *self.store.hub.pending_flush):
            if session.out and isinstance(session.owner, Pipe):
                data = b"".join(session.out)
                session.out.clear()
                session.unsent -= len(data)
                if session.owner.open and not session.owner.was_reset:
                    session.owner.down += data
        self.store.hub.pending_flush.clear()

    def connect(self) -> Pipe:
        pipe = Pipe(self, _me())
        self.pipes.append(pipe)
        return pipe

    def in_flight(self) -> bool:
        return any(pipe.moves() for pipe in self.pipes) or self.has_work()

    def play(self, most: int = 2000) -> None:
        """Run until every actor is done. After many moves, or at the end of the choices, nothing does harm any more."""
        for actor in self.actors:
            actor.start()
            self.back.acquire()
        draw = self.choices.draw
        while alive := [actor for actor in self.actors if actor.is_playing()]:
            self.moved += 1
            if self.moved > 20 * most:
                raise Difference("this never ends")
            wild = self.moved < most
            if wild and draw(1000) >= 1000 - self.trouble:
                self._trouble(alive)
                continue
            able = [actor for actor in alive if actor.can_go()]
            ways: list[Pipe | Store] = [pipe for pipe in self.pipes if pipe.moves()]
            if self.has_work():
                ways.append(self.store)
            count = len(able) + len(ways)
            if not count or (wild and draw(40) == 39):
                self._pass_time(alive, bool(count))
                continue
            which = draw(count) if wild else self.moved % count
            if which < len(able):
                able[which].go()
            else:
                size = draw(30) if wild and draw(3) == 2 else 0
                way = ways[which - len(able)]
                if isinstance(way, Pipe):
                    way.carry(size)
                else:
                    self.work()
        while moving := [pipe for pipe in self.pipes if pipe.moves()]:
            moving[0].carry(0)
        while self.has_work():
            self.work()

    def has_work(self) -> bool:
        """Return True if commands have left work."""
        return bool(getattr(self.store.keyspace, "work", None))

    def work(self) -> None:
        """Continue the server's work."""
        keyspace: Any = self.store.keyspace
        keyspace.step()
        self.flush()

    def _pass_time(self, alive: list[Actor], may_wait: bool) -> None:
        untils = [actor.until for actor in alive if actor.until is not None]
        if untils:
            self.now = max(self.now, min(untils))
            if may_wait:
                self.rushed = self.now
        elif not may_wait:
            raise Difference("everybody sleeps, for ever")

    def _trouble(self, alive: list[Actor]) -> None:
        draw = self.choices.draw
        kind = draw(4)
        if kind <= 1:
            pipes = [pipe for pipe in self.pipes if pipe.open and pipe.served and not pipe.actor.dead]
            if pipes:
                pipe = pipes[draw(len(pipes))]
                pipe.actor.losses += 1
                pipe.cut(draw(3))
        elif kind == 2 or draw(4):
            actor = alive[draw(len(alive))]
            self.tell(f"{actor.name} is interrupted")
            actor.disturb(draw(8))
        else:
            actor = alive[draw(len(alive))]
            self.tell(f"{actor.name} dies")
            actor.kill()

    def end(self) -> None:
        """End all threads."""
        for actor in self.actors:
            while actor.is_playing():
                actor.kill()


class Actor(threading.Thread):
    """A client."""

    def __init__(self, stage: Stage, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.stage = stage
        stage.actors.append(self)
        self.ticket = threading.Lock()
        self.ticket.acquire()
        self.ready: Callable[[], bool] = lambda: True
        self.until: float | None = None
        self.dead = False
        self.done = False
        self.losses = 0
        """How often its connections were cut."""
        self.skew: float | None = None
        """How far the clock of a dying actor is ahead: the others do not wait for its end."""
        self.error: BaseException | None = None
        self.interrupt: Callable[[], None] | None = None

    def act(self) -> None:
        """Act; runs in the actor's thread."""
        raise NotImplementedError

    def run(self) -> None:
        try:
            self.act()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.done = True
            self.stage.back.release()

    def is_playing(self) -> bool:
        if self.error is not None:
            raise self.error
        return not self.done

    def can_go(self) -> bool:
        return self.interrupt is not None or self.ready() or (self.until is not None and self.until <= self.stage.now)

    def go(self) -> None:
        """Run it until it would block; called by the director."""
        self.ticket.release()
        self.stage.back.acquire()

    def pause(self, ready: Callable[[], bool], until: float | None) -> None:
        """Wait for a condition or a time; called by the actor. Raises what disturbs it."""
        if self.dead:
            raise Killed
        self.ready, self.until = ready, until
        self.stage.back.release()
        self.ticket.acquire()
        if self.dead:
            raise Killed
        interrupt, self.interrupt = self.interrupt, None
        if interrupt is not None:
            interrupt()

    def disturb(self, how: int) -> None:
        """Interrupt the actor."""

    def kill(self) -> None:
        """Kill its process; its bytes still arrive."""
        self.dead = True
        for pipe in self.stage.pipes:
            if pipe.actor is self:
                pipe.close()
        self.go()


def _me() -> Actor:
    me = threading.current_thread()
    assert isinstance(me, Actor)
    return me


# What the synchronous client touches


class Socket(socket.socket):
    """A stand-in for a connected socket."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__(socket.AF_INET, socket.SOCK_STREAM, fileno=None)
        super().close()
        self.pipe = pipe

    def setsockopt(self, *_: Any) -> None:
        pass

    def settimeout(self, value: float | None) -> None:
        pass

    def send(self, data: Any, flags: int = 0) -> int:
        return self.pipe.send(bytes(data))

    def recv(self, size: int, flags: int = 0) -> bytes:
        actor = _me()
        if not self.pipe.readable():
            actor.pause(self.pipe.readable, actor.stage.now + 0.01)
            if not self.pipe.readable():
                raise BlockingIOError
        return self.pipe.take(size)

    def shutdown(self, how: int) -> None:
        self.pipe.close()

    def close(self) -> None:
        self.pipe.close()


class Poll:
    """A stand-in for `select.poll`, for these sockets."""

    def __init__(self) -> None:
        self.pipe: Pipe | None = None
        self.reads = True

    def register(self, peer: Any, event: int = select.POLLIN) -> None:
        self.pipe, self.reads = peer.pipe, bool(event & select.POLLIN)

    def poll(self, milliseconds: float | None = None) -> list[tuple[int, int]]:
        pipe, actor = self.pipe, _me()
        assert pipe is not None
        if self.reads and not pipe.readable():
            until = None if milliseconds is None or milliseconds < 0 else actor.stage.now + milliseconds / 1000
            actor.pause(pipe.readable, until)
            if not pipe.readable():
                return []
        return [(0, select.POLLIN)]


def _connect(tries: Any, attempt: Any, asks: bool) -> tuple[socket.socket, ClientSession]:
    """In place of `connect._try_in_this_thread`."""
    peer = Socket(_me().stage.connect())
    session = ClientSession(tries.pings)
    hello, call = session.hello(PID)
    if asks:
        asking, session.asked = session.request(*requests.HAS_EXTENSION)
        hello += asking
    try:
        peer.send(hello)
        poll = Poll()
        poll.register(peer)
        while not call.done:
            while not poll.poll(attempt.tick() * 1000):
                pass
            _receive(session, peer.recv(4))
        return peer, session
    except BaseException:
        peer.close()
        raise


# What the async client touches


class Selector(selectors.BaseSelector):
    """A selector without descriptors; a wait hands over to the director."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.loop: Any = None

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def get_map(self) -> Any:
        return {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        actor = self.actor
        if actor.skew is not None:  # it dies
            actor.skew += timeout or 0.0
        elif timeout is None or timeout > 0:
            until = None if timeout is None else actor.stage.now + timeout
            actor.pause(lambda: bool(self.loop._ready), until)
        return []


class Loop(asyncio.SelectorEventLoop):
    """An event loop in an actor."""

    def __init__(self, actor: Actor) -> None:
        selector = Selector(actor)
        super().__init__(selector)
        selector.loop = self

    async def create_connection(self, factory: Any, *_: Any, sock: Any = None, **__: Any) -> Any:  # type: ignore[override]
        protocol = factory()
        transport = Transport(self, sock.pipe, protocol)
        protocol.connection_made(transport)
        return transport, protocol


class Transport(asyncio.Transport):
    """A stand-in for a transport of asyncio."""

    def __init__(self, loop: Loop, pipe: Pipe, protocol: Any) -> None:
        super().__init__()
        self.loop, self.pipe, self.protocol = loop, pipe, protocol
        self.closing = False
        pipe.on_data = lambda: loop._ready.append(asyncio.Handle(self._read, (), loop)) and None  # type: ignore[attr-defined]
        loop.call_soon(self._read)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: Any) -> None:
        try:
            self.pipe.send(bytes(data))
        except ConnectionError as error:
            self._lose(error)

    def close(self) -> None:
        self._lose(None)

    abort = close

    def _lose(self, error: Exception | None) -> None:
        if not self.closing:
            self.closing = True
            self.pipe.close()
            self.loop.call_soon(self.protocol.connection_lost, error)

    def _read(self) -> None:
        if self.closing or not self.pipe.readable():
            return
        try:
            data = self.pipe.take(1 << 20)
        except ConnectionError as error:
            self._lose(error)
            return
        if data:
            self.protocol.data_received(data)
            if self.pipe.readable():
                self.loop.call_soon(self._read)
        else:
            self._lose(None)


async def _try(tries: Any) -> tuple[Any, ClientSession]:
    """In place of `connect._try`."""
    peer = Socket(_me().stage.connect())
    session = ClientSession(tries.pings)
    hello, call = session.hello(PID)
    try:
        peer.send(hello)
        while not call.done:
            while not peer.pipe.readable():
                loop = asyncio.get_running_loop()
                news = loop.create_future()
                peer.pipe.on_data = lambda news=news, loop=loop: loop.call_soon(_set, news) and None
                await news
            _receive(session, peer.pipe.take(4))
        return peer, session
    except BaseException:
        peer.close()
        raise
    finally:
        peer.pipe.on_data = None


def _set(news: asyncio.Future[None]) -> None:
    if not news.done():
        news.set_result(None)


def run_on_loop(actor: Actor, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Replace `asyncio.run` in an actor."""
    loop = Loop(actor)
    task = loop.create_task(main())
    try:
        loop.run_until_complete(task)
    finally:
        actor.skew = 0.0
        while tasks := asyncio.all_tasks(loop):
            for one in tasks:
                one.cancel()
            loop.run_until_complete(asyncio.wait(tasks))
        loop.run_until_complete(asyncio.sleep(0))  # what is to be called when they are done
        loop.close()


# The machine


def _virtual_monotonic() -> float:
    me = threading.current_thread()
    return me.stage.now + (me.skew or 0.0) if isinstance(me, Actor) else _monotonic()


def _virtual_sleep(seconds: float) -> None:
    me = threading.current_thread()
    if isinstance(me, Actor):
        me.pause(lambda: False, me.stage.now + seconds)
    else:
        _sleep(seconds)


def _virtual_poll() -> Any:
    return Poll() if isinstance(threading.current_thread(), Actor) else _poll()


def _wait_for_turn(ticket: Ticket, seconds: float | None) -> bool:
    """Replace `Ticket.wait`: this thread itself holds the lock, in the call that a handler interrupts."""
    me = threading.current_thread()
    if not isinstance(me, Actor):
        return ticket.notified.acquire(timeout=-1 if seconds is None else seconds)
    me.pause(lambda: not ticket.notified.locked(), None if seconds is None else me.stage.now + seconds)
    return ticket.notified.acquire(blocking=False)


@contextmanager
def machine() -> Iterator[None]:
    """Give actors the time and sockets of the stage; others keep the real ones."""
    places: list[tuple[Any, str, Any]] = [
        (time, "monotonic", _virtual_monotonic),
        (time, "sleep", _virtual_sleep),
        (select, "poll", _virtual_poll),
        (connect, "_try", _try),
        (connect, "_try_in_this_thread", _connect),
    ]
    if build() == "interpreted":
        places.append((Ticket, "wait", _wait_for_turn))
    before = [getattr(owner, name) for owner, name, _ in places]
    for owner, name, virtual in places:
        setattr(owner, name, virtual)
    try:
        yield
    finally:
        for (owner, name, _), real in zip(places, before, strict=True):
            setattr(owner, name, real)
