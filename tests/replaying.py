"""Every run of the simulators, executed a second time from its events: the state and all output must be the same.

`record` is called with each engine that a simulator makes. Its events are noted, with what each gave to connections,
and every few events with a digest of the state; `compare` encodes and decodes them, and executes them on an engine of
its own.
"""

from __future__ import annotations

import copyreg
import os
import pickle
import subprocess
import sys
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from typing import Any, NamedTuple

from tcpstore_async.auth.access import Access
from tcpstore_async.base.limits import Limits
from tcpstore_async.keyspace.waiter_types import KeyList
from tcpstore_async.links.link_registry import LinkRegistry
from tcpstore_async.links.resume import Resumable
from tcpstore_async.log.encoding import decode, encode
from tcpstore_async.log.events import RECEIVE, Engine, Event, EventRecorder
from tcpstore_async.log.replay import Replayer
from tcpstore_async.log.snapshot import NotNowError, dump, load
from tcpstore_async.observe.missing import answer_missing
from tcpstore_async.session.named_stores import NamedStores
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store
from tcpstore_async.wire.values import Framed, Growing, unpack

BETWEEN = 40
"""Events from one snapshot to the next, at least."""

Given = dict[int, bytes]
"""What the connections of sessions were given, keyed by the sessions' numbers."""


class NotTheSame(AssertionError):
    """The events had other effects when they were executed again."""


class Noted(NamedTuple):
    events: list[Event]
    given: Given
    ignored: set[int]
    """Numbers of sessions that are about to be closed: what they are given may differ."""
    digest: int | None


# The state

NOT_KEPT = {
    *("budget", "share", "limits", "key_lists", "observer", "owner", "clock", "hub", "registry", "shared", "guards"),
    *("table", "slot", "commands", "handshake", "first", "root", "serving", "backlog", "input_buffer", "need"),
    *("out", "unsent", "held", "stored", "done", "heard_at", "serial", "max_size", "on_full", "account", "features"),
    *("tallies", "watchers", "pending_flush", "evicted", "auth", "connection", "on_work", "kept", "kept_bytes", "sent"),
    *("max_kept_reply", "max_reply", "steps", "work", "_piece", "_piece_of", "_piece_at"),
    *("on_created", "on_released", "open_port", "close_port", "on_leave", "on_return"),
    *("running", "partial", "freeing", "working", "to_work"),
    *("command", "_last_key", "on_link", "on_end", "on_refused", "on_refusal", "on_failure"),
    *("_parts", "_reply", "recorder", "examines", "unnamed", "unvalidated", "_listing", "weight", "_ahead"),
    *("reserved", "build"),
}
"""Attributes that are counts of memory, caches, or of the connection, or whose contents are looked at elsewhere;
the last name the build."""


class Digest:
    """A checksum of what things mean, the same in every process."""

    def __init__(self, *things: Any) -> None:
        self.sum = 0
        self._numbers: dict[int, int] = {}
        self._waiting: deque[Any] = deque(things)
        while self._waiting:
            self._look(self._waiting.popleft())

    def _add(self, text: str) -> None:
        self.sum = zlib.crc32(text.encode(errors="surrogateescape"), self.sum)

    def _look(self, thing: Any) -> None:
        if thing is None or isinstance(thing, (bool, int, float, str)):
            self._add(f"{type(thing).__name__} {thing!r};")
        elif isinstance(thing, (bytes, bytearray)):
            self._add(f"bytes {bytes(thing)!r};")
        elif isinstance(thing, Access):  # compared by value: each token that is presented makes another one
            self._add(f"{thing};")
        elif isinstance(thing, Growing):
            self._add(f"bytes {unpack(b''.join(thing.read()))!r};")
        elif isinstance(thing, dict):
            self._add(f"dict {len(thing)};")
            for key, value in thing.items():
                self._look(key)
                self._look(value)
        elif isinstance(thing, (list, tuple, deque)):
            self._add(f"list {len(thing)};")
            for one in thing:
                self._look(one)
        elif isinstance(thing, (set, frozenset)):
            self._add(f"set {len(thing)};")
            plain = [one for one in thing if isinstance(one, (bytes, str, int))]
            for one in sorted(plain, key=repr):
                self._look(one)
        elif type(thing).__module__.startswith("tcpstore_async"):
            known = self._numbers.get(id(thing))
            if known is None:
                known = self._numbers[id(thing)] = len(self._numbers)
                self._waiting.append(_Contents(thing))
            self._add(f"{type(thing).__name__} {known};")
        elif isinstance(thing, _Contents):
            for name, value in thing.attributes():
                self._add(name)
                self._look(value)


class _Contents:
    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def attributes(self) -> Iterator[tuple[str, Any]]:
        thing = self.thing
        names: set[str] = set(getattr(thing, "__dict__", ()))
        for kind in type(thing).__mro__:
            names.update(getattr(kind, "__slots__", ()))
            names.update(getattr(kind, "__mypyc_attrs__", ()))
        if isinstance(thing, KeyList):  # the rest is a cache
            names = {"keys", "group"}
        if type(thing) is Resumable:  # of a single link, which counts what is held back until it is asked
            names = set()
        for name in sorted(names - NOT_KEPT):
            value = getattr(thing, name, None)
            if not callable(value) and not isinstance(value, types.GeneratorType):
                yield name, value


def digest(engine: Engine, sessions: dict[int, ServerSession]) -> int:
    """Return a checksum of what survives a server."""
    hub = engine.root.hub
    found = Digest(
        list(hub.stores), sessions, hub.auth.granted, hub.auth.usage, hub.unvalidated, engine.named, engine.links
    )
    return found.sum


# Live


class Recording(EventRecorder):
    """Notes the events of a simulator, and their effects."""

    def __init__(self, engine: Engine, every: int) -> None:
        super().__init__(engine, self._done)
        self.start = beginning(engine)
        self.every = every
        self.noted: list[Noted] = []
        self.sessions: dict[int, ServerSession] = {}
        self._left: dict[ServerSession, int] = {}
        """How many pieces of output were there before the event."""
        self._failed: set[int] = set()

    def _begin(self) -> None:
        self._left = {one: len(one.out) for one in self.sessions.values() if one.out}

    def enter(self, subject: Any, method: str, *given: Any) -> Any:
        self._begin()
        return super().enter(subject, method, *given)

    def receive(self, session: ServerSession, chunk: bytes) -> None:
        self._begin()
        before = len(self.noted)
        try:
            super().receive(session, chunk)
            for noted in self.noted[before:]:
                if not any(event.method == RECEIVE for event in noted.events):  # it has only read
                    noted.ignored.add(self.numbers[session])
        except BaseException:
            if self.noted:
                self.noted[-1].ignored.add(self.numbers[session])
            self._failed.add(self.numbers[session])
            raise

    def opened(self, session: ServerSession) -> None:
        if not self.inside:
            self._begin()
        self.sessions[self.opened_sessions + 1] = session
        super().opened(session)

    def left(self, session: ServerSession) -> None:
        del self.sessions[self.numbers[session]]
        super().left(session)

    def _done(self, events: list[Event]) -> None:
        hub = self.engine.root.hub
        given: Given = {}
        for number, session in self.sessions.items():
            new = session.out[self._left.get(session, 0) :]
            if new and not session.shares_connection():
                given[number] = b"".join(new)
        ignored = self._failed | {self.numbers[one] for one in hub.evicted if isinstance(one, ServerSession)}
        self.noted.append(Noted(events, given, ignored, None))
        if len(self.noted) % self.every == 0:
            self.look()

    def look(self) -> None:
        """Note the state behind the last event."""
        if self.noted:
            self.noted[-1] = self.noted[-1]._replace(digest=digest(self.engine, self.sessions))


def compare(start: Beginning, events: list[Noted], between: int = BETWEEN) -> None:
    """Execute the events of a recording again, after some looks on an engine made of a snapshot.

    Raises NotTheSame.
    """
    until = 0
    engine = start.make()
    given: Given = {}

    def note(session: ServerSession, pieces: list[Framed]) -> None:
        number = replayer.numbers[session]
        given[number] = given.get(number, b"") + b"".join(pieces)

    replayer = Replayer(engine, note)
    for at, noted in enumerate(events):
        given.clear()
        for event in decode(encode(noted.events), noted.events[0].now) if noted.events else ():
            replayer.execute(event)
        for number in {*given, *noted.given} - noted.ignored:
            found, expected = given.get(number, b""), noted.given.get(number, b"")
            if found != expected:
                raise NotTheSame(
                    f"event {at}, {noted.events}: session {number} was given {expected[:200]!r}, again {found[:200]!r}"
                )
        if noted.digest is None:
            continue
        if digest(engine, replayer.sessions) != noted.digest:
            raise NotTheSame(f"event {at}, {noted.events}: the state is not the same again")
        if at < until:
            continue
        until = at + between
        with suppress(NotNowError):
            data = dump(replayer)
            engine = start.make()
            engine.root.hub.clock.now = replayer.hub.clock.now
            replayer = Replayer(engine, note)
            load(data, replayer)
            if dump(replayer) != data or digest(engine, replayer.sessions) != noted.digest:
                raise NotTheSame(f"event {at}: a snapshot has another state")


# Simulators

_recordings: list[Recording] | None = None
_every = 1


@contextmanager
def replayed(every: int, check: Callable[[Beginning, list[Noted]], object] = compare) -> Iterator[None]:
    """Record all engines that are made meanwhile, and compare them at the end. Raises NotTheSame.

    The state is looked at every so many events, and at the end.
    """
    global _recordings, _every
    before, _recordings, _every = _recordings, [], every
    try:
        yield
        for recording in _recordings:
            recording.look()
            check(recording.start, recording.noted)
    finally:
        _recordings = before


class Beginning(NamedTuple):
    """What another engine begins with, in whichever process."""

    limits: Limits
    portion: int
    now: float
    reserved: dict[bytes, Framed]
    final: set[bytes]
    joins: int
    instance: str | None
    """Of named stores, if there are any."""
    links: tuple[str, float, float, int] | None
    tokens: bool

    def make(self) -> Engine:
        store = Store(self.limits, self.portion)
        store.hub.clock.now = self.now
        store.keyspace.reserved.update(self.reserved)
        store.keyspace.final.update(self.final)
        store.joins = self.joins
        answer_missing(store)
        if self.tokens:
            store.hub.auth.authenticate = lambda token: ""
        return Engine(
            store,
            None if self.instance is None else NamedStores(store, self.instance),
            None if self.links is None else LinkRegistry(store, *self.links),
        )


def beginning(live: Engine) -> Beginning:
    """Describe an engine in which nothing has happened yet."""
    root, named, links = live
    keyspace = root.keyspace
    return Beginning(
        root.limits,
        keyspace.portion,
        root.hub.clock.now if links is None else links.ticked,
        dict(keyspace.reserved),
        set(keyspace.final),
        root.joins,
        None if named is None else named.instance,
        None if links is None else (links.instance, links.grace, links.keep_alive, links.portion),
        root.hub.auth.authenticate is not None,
    )


def record(root: Store, named: NamedStores | None = None, links: LinkRegistry | None = None) -> None:
    """Record the events of an engine that has just been made, if asked for."""
    if _recordings is not None:
        _recordings.append(Recording(Engine(root, named, links), _every))


# Other processes


def _make(kind: Any, given: dict[str, Any]) -> Any:
    return kind(**given)


def _reduce(one: Any) -> tuple[Any, ...]:
    return _make, (type(one), {field.name: getattr(one, field.name) for field in fields(one) if field.init})


for _kind in (Limits, Access):  # compiled or not
    copyreg.pickle(_kind, _reduce)


class Elsewhere:
    """A process with another build, or another order of sets, that executes recordings again."""

    def __init__(self, path: str, seed: int) -> None:
        env = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": str(seed)}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd="/"
        )

    def send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(len(data).to_bytes(8, "little") + data)
        self._process.stdin.flush()

    def answer(self) -> str:
        """Return what is not the same there; empty if everything is."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode()
        return line.strip() if line else "the process has ended"

    def close(self) -> None:
        with self._process as process:
            process.kill()


def _serve() -> None:
    given = sys.stdin.buffer
    while size := int.from_bytes(given.read(8), "little"):
        wrong = ""
        for start, noted in pickle.loads(given.read(size)):
            try:
                compare(start, noted)
            except Exception as error:  # the package's own, too
                wrong = repr(error).replace("\n", " ")
        print(wrong, flush=True)


if __name__ == "__main__":
    _serve()
