"""Random sessions that own, enter, use and leave stores with names, against a small model."""

from __future__ import annotations

import random
from typing import Any

import pytest

from conformance.frames import CANCEL_FETCH, END, NO_VALUE, enter, get, i64, set_
from support import blob
from tcpstore_async.session.server import ServerSession
from unit.session.test_named_stores import Server, reply, take

NAMES = ("a", "b")
KEYS = (b"/k", b"/l")


class Store:
    """What a store should hold, and who should be in it."""

    def __init__(self, name: str, owner: ServerSession | None) -> None:
        self.name = name
        self.values: dict[bytes, bytes] = {}
        self.owner = owner
        self.sessions: set[ServerSession] = set()
        self.released = False


class Model:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.server = Server(portion=self.rng.choice([1, 3, 1000]))
        self.nameless = Store("", None)
        self.stores: dict[str, Store] = {}
        self.ended: list[Store] = []
        self.place: dict[ServerSession, Store] = {}
        self.waiting: dict[ServerSession, str] = {}
        self.server.named.on_released = lambda store: None

    def step(self) -> None:
        sessions = list(self.place)
        kind = self.rng.choice(["connect", "own", "enter", "cancel", "end", "leave", "set", "get", "drop", "work"])
        if kind == "connect" or not sessions:
            if len(sessions) < 8:
                self.place[self.server.connect()] = self.nameless
            return
        session, name = self.rng.choice(sessions), self.rng.choice(NAMES)
        if kind == "work":
            self.work()
        elif kind == "drop":
            found = self.server.named.drop(name, "dropped")
            assert found == (name in self.stores)
            if found:
                self.close(self.stores.pop(name))
        elif kind == "leave":
            self.leave(session)
        elif session in self.waiting:
            if kind == "cancel":
                said = self.server.say(session, CANCEL_FETCH)
                assert said.endswith(NO_VALUE)
                self.note_entered(session, said[: -len(NO_VALUE)])
                del self.waiting[session]
        elif kind == "own" and self.place[session] is self.nameless:
            status = self.server.enter(session, name, owner=str(session.port))["status"]
            assert status == ("taken" if name in self.stores else "entered")
            if status == "entered":
                store = self.stores[name] = Store(name, session)
                self.move(session, store)
        elif kind == "enter" and self.place[session] is self.nameless:
            said = self.server.say(session, enter(name))
            assert bool(said) == (name in self.stores)
            if said:
                self.note_entered(session, said, name)
            else:
                self.waiting[session] = name
        elif kind == "end" and self.place[session].owner is session and not self.place[session].released:
            store = self.place[session]
            assert self.server.say(session, END) == i64(len(store.sessions) - 1)
            store.released = True
            del self.stores[store.name]
        elif kind in ("set", "get"):
            self.use(session, self.rng.choice(KEYS), kind == "set")

    def use(self, session: ServerSession, key: bytes, writes: bool) -> None:
        values = self.place[session].values
        if writes:
            values[key] = b"%d" % self.rng.randrange(1000)
            assert self.server.say(session, set_(key, values[key])) == b""
        else:
            assert self.server.say(session, get(key)) == blob(values.get(key, b""))

    def move(self, session: ServerSession, store: Store) -> None:
        self.place[session] = store
        store.sessions.add(session)

    def note_entered(self, session: ServerSession, said: bytes, name: str = "") -> None:
        """A session was let in, before it gave up or just now."""
        if said:
            found: dict[str, Any] = reply(said)
            assert found["status"] == "entered"
            self.move(session, self.stores[name or self.waiting[session]])

    def leave(self, session: ServerSession) -> None:
        store = self.place.pop(session)
        store.sessions.discard(session)
        self.waiting.pop(session, None)
        session.leave()
        if store.owner is session and not store.released:
            del self.stores[store.name]
            self.close(store)

    def close(self, store: Store) -> None:
        """A store has ended at once."""
        self.work()
        assert {one for one in self.server.closed if one in store.sessions} == store.sessions
        for one in store.sessions:
            del self.place[one]
        self.server.closed.clear()

    def work(self) -> None:
        """Let everybody in whose store is there."""
        self.server.work()
        for session, name in list(self.waiting.items()):
            said = take(session)
            assert bool(said) == (name in self.stores)
            self.note_entered(session, said)
            if said:
                del self.waiting[session]

    def finish(self) -> None:
        for session in list(self.place):
            if session in self.place:
                self.leave(session)
        self.work()
        named, store = self.server.named, self.server.store
        assert (named.stores, named.ending, named.waiting, named.entries) == ({}, {}, {}, {})
        self.server.connect().leave()
        assert store.budget.used() == store.keyspace.size
        assert store.keyspace.parked == 0


@pytest.mark.parametrize("seed", range(200))
def test_stores(seed: int) -> None:
    model = Model(seed)
    for _ in range(150):
        model.step()
    model.finish()
