"""Stores with names: who owns each, who is in it, who waits for it, and how it ends.

A session begins in the store without a name; ENTER puts it into another one, for good. The owner's ENTER creates that;
others wait until there is one. If the owner meant any address of its host, the store is known by these too: a client
that finds no store of a name says which addresses that name may stand for. Clients that cannot send ENTER connect to a
port that the server has for their store. This module must not know how bytes travel, what the stores hold, what an
address is, or what time it is.

Invariants: one store at a time has a name. A store exists while one of its owners is connected: when the last one has
left, no session enters any more, and the next store of that name starts empty. A session that names the incarnation in
which it was enters no other one. What ends with a store is closed and freed in portions.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from math import inf
from typing import Any, Final

import msgspec

from ..base.addresses import spelled
from ..base.errors import NotAllowedError, PeerError, ProtocolError
from ..base.mypyc_shim import mypyc_attr
from ..keyspace.steps import Later, Running, Steps, free_dict
from ..keyspace.waiter_types import AWAITING_STORE, IDLE, Waiter
from ..wire.commands import SERVER_KEY, WORKERS_KEY
from ..wire.values import Framed, pack, unpack
from .identity import (
    CLOSED,
    ENDED,
    ENTERED,
    LOST,
    MAX_ADDRESSES,
    MAX_ID,
    MAX_NAME,
    REFUSED,
    TAKEN,
    EnterReply,
    decode_identity,
    encode_identity,
    with_store,
)
from .observer import NEVER
from .peer import printable
from .server import ServerSession
from .store import Store
from .transport import Transport

_MAX_ENTER: Final = 4096
"""Bytes of all items."""

_MAX_TEXT: Final = 256
"""Characters of a host that are kept."""

STORE_BYTES: Final = 16 * 1024
"""Bytes counted for a store, besides what is in it."""

PORT_BYTES: Final = 4 * 1024
"""Bytes counted for a store's port."""

_MOST_RELAYS: Final = 8
"""Relays of the owner's host whose addresses are remembered."""

_MOST_HOSTS: Final = 4
"""How many spellings of the server's host, besides the one in its own name, may name a store by its port."""

ENTRY_BYTES: Final = 1024
"""Bytes counted for a session that waits for a store, besides the name."""

ADDRESS_BYTES: Final = 512
"""Bytes counted for each address of a store, or of a session that waits."""

_SHOWN: Final = 4
"""Stores of the same port that a client is told of which finds none under its name."""

_SHOWN_NAME: Final = 100
"""Characters that are shown of the name of each."""

_REMEMBERED: Final = 1024
"""Stores that have ended of which it is remembered why."""

_LETTING_IN: Final = 8
"""Admitting a session costs as much as handling this many keys."""

_MANY: Final = 1000
"""Keys from which on they are freed in portions."""


_STAYING: Final = "a connection that is waiting, has joined, represents an agent, or has unconfirmed leases"


class StoreEnded(PeerError):
    """The store that a session was in has ended."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Entry:
    """An ENTER: what a session has said about the store that it wants to be in."""

    def __init__(self, session: ServerSession, items: list[tuple[bytes, Framed]]) -> None:
        """Raises ProtocolError."""
        if len(items) > _MAX_ENTER or sum(len(name) + len(value) for name, value in items) > _MAX_ENTER:
            raise ProtocolError(f"ENTER of more than {_MAX_ENTER} bytes")
        said = {name: unpack(value) for name, value in items}
        self.session = session
        self.name = _text(said, b"name", MAX_NAME)
        self.owner = _text(said, b"owner", MAX_ID)
        """The id of the owner, whose connections all give it; empty for others."""
        self.shares = _text(said, b"shares", MAX_ID)
        """Owners that give the same, unless it is empty, own a store together."""
        self.incarnation = _text(said, b"incarnation", MAX_ID)
        """The only one that it enters; empty for any."""
        self.attempt = printable(_text(said, b"attempt", MAX_ID).encode())
        """Which attempt of its job the session belongs to, if that is known."""
        self.waits = said.get(b"wait", b"1") != b"0"
        self.host = printable(said.get(b"host", b""))[:_MAX_TEXT] or session.host
        self.pid = printable(_text(said, b"pid", MAX_ID).encode())
        self.addresses = tuple(dict.fromkeys(_text(said, b"addresses", _MAX_ENTER).split()))
        """Of the owner: what the store is found at, beside its name. Of others: what the name may stand for."""
        if len(self.addresses) > MAX_ADDRESSES:
            raise ProtocolError(f"ENTER with {len(self.addresses)} addresses (max {MAX_ADDRESSES})")
        self.relay = _text(said, b"relay", MAX_NAME)
        """The address of the relay through which the session comes, if that enters the store for it."""
        self.server = _text(said, b"server", MAX_NAME)
        """The server's host as the client spells it, if it asks for a port of the store; empty otherwise."""
        joins = said.get(b"joins", b"0")
        if not self.name or not joins.isdigit() or len(joins) > 18:
            raise ProtocolError("ENTER without a name, or with an invalid number")
        self.joins = int(joins)
        """How many ranks the owner expects to join."""

    def who(self) -> str:
        return f"host {self.host}, pid {self.pid}" if self.pid else f"host {self.host}"

    def bytes(self) -> int:
        """Return what is counted for it while it waits."""
        return ENTRY_BYTES + len(self.name) + ADDRESS_BYTES * len(self.addresses)


class NamedStore(Store):
    """One incarnation of a name."""

    def __init__(self, registry: "NamedStores", entry: Entry, incarnation: str, since: float) -> None:
        root = registry.unnamed
        super().__init__(root.limits, root.keyspace.portion, hub=root.hub)
        self.name = entry.name
        self.incarnation = incarnation
        self.attempt = entry.attempt
        self.addresses = entry.addresses
        self.relays: dict[str, None] = {}
        """Further addresses: those of relays on its owner's host, which that may publish as the store's."""
        self.creator = entry.who()
        self.host = entry.host
        self.pid = entry.pid
        self.since = since
        """When it was created, in seconds of the server's clock."""
        self.owners: dict[ServerSession, str] = {}
        """The sessions of its owners, each with its owner's id."""
        self._connected: dict[ServerSession, None] = {}
        """The owners' sessions not yet found to be without a connection; see `look`."""
        self.ids: set[str] = set()
        """The ids of its owners, and what they share it by."""
        self.sessions: dict[ServerSession, bool] = {}
        """All that are in it."""
        self.port: int = 0
        """On which the server listens for it; 0 if it does not."""
        self.hosts: set[str] = {entry.name.rpartition(":")[0]} - {""}
        """With which the port is another name of it."""
        self.ended = ""
        """Why it has ended; empty if it has not."""
        self.released: float = NEVER
        """Clock time at which its owner ended it, while the remaining sessions have their grace; else `NEVER`."""
        self.keyspace.on_work = lambda: registry.work_later(self)
        self.keyspace.clock = registry.clock
        self.identify(encode_identity(with_store(registry.identity, self.name, incarnation)))

    def __str__(self) -> str:
        return f"the store {spelled(self.name)!r}"

    def bytes(self) -> int:
        """Return what is counted for it, besides what is in it."""
        return STORE_BYTES + ADDRESS_BYTES * (len(self.addresses) + len(self.relays))

    def spelling(self) -> str:
        """Return what its owner calls it, and who that is; a name on loopback is that of any address, too."""
        name = f"0.0.0.0:{_port(self.name)}" if self.addresses else spelled(self.name)
        return f"{name[:_SHOWN_NAME]} ({self.creator})"

    def joined(self) -> int:
        """Return how many ranks have joined it."""
        count = self.keyspace.values.get(WORKERS_KEY)
        return count if isinstance(count, int) else 0

    def own(self, session: ServerSession, owner: str) -> None:
        """Let a session be one of an owner's."""
        self.owners[session] = owner
        self._connected[session] = None

    def disown(self, session: ServerSession) -> str:
        """Dissociate a session from its owner; return the owner's id, or nothing if it had none."""
        self._connected.pop(session, None)
        return self.owners.pop(session, "")

    def disown_all(self) -> None:
        self._connected.clear()
        self.owners.clear()

    def reconnected(self, session: ServerSession) -> None:
        """Note that a session has a connection again."""
        if session in self.owners:
            self._connected[session] = None

    def look(self, most: int) -> bool:
        """Look at most so many of its owners' sessions for one that has a connection; False if that does not suffice.

        Each is looked at once, until it has a connection again: an owner may have very many.
        """
        connected = self._connected
        for _ in range(most):
            if not connected:
                return True
            session, _ = connected.popitem()
            if not isinstance(session.owner, Transport) or session.owner.awaited_since() != inf:
                connected[session] = None
                return True
        return not connected

    def is_lost(self) -> bool:
        """Return whether all connections of its owners are broken. Perhaps they are dead, and it is about to end."""
        self.look(len(self._connected))
        return not self._connected

    def error(self) -> StoreEnded:
        return StoreEnded(f"{self} ended: {self.ended}")


class NamedStores:
    """The stores of one server that have names."""

    def __init__(self, unnamed: Store, instance: str) -> None:
        """`unnamed` is the store without a name, which knows the identity of the server."""
        self.unnamed = unnamed
        self.instance = instance
        self.identity = decode_identity(unpack(unnamed.keyspace.reserved[SERVER_KEY]))
        self.stores: dict[str, NamedStore] = {}
        """Live stores, keyed by name."""
        self.ending: dict[NamedStore, bool] = {}
        """Stores that have ended but still have sessions."""
        self.waiting: dict[str, OrderedDict[ServerSession, Entry]] = {}
        """Sessions that wait for a store, in order of arrival, keyed by its name; some may have given up."""
        self.seeking: dict[str, OrderedDict[ServerSession, Entry]] = {}
        """Of these, the ones that look for a store at an address, keyed by address."""
        self.addresses: dict[str, dict[NamedStore, bool]] = {}
        """Stores found at an address, keyed by address."""
        self.of_port: dict[str, dict[NamedStore, bool]] = {}
        """Stores whose names end with a port, keyed by port."""
        self.entries: dict[ServerSession, Entry] = {}
        """What each session waits for, or waited for when it gave up."""
        self.ended: OrderedDict[str, tuple[str, str]] = OrderedDict()
        """Name of a store and why it ended, keyed by incarnation; the latest ones only."""
        self.created: int = 0
        """How many stores there were so far."""
        self.to_work: OrderedDict[NamedStore, bool] = OrderedDict()
        """Stores whose keyspaces have deferred work."""
        self.clock = unnamed.hub.clock
        self.on_work: Callable[[], object] | None = None
        """Called when there is work: have `work` called soon."""
        self.on_released: Callable[[NamedStore], object] | None = None
        """Called when a store's owner has ended it and others are in it: have `close` called after the grace period.

        It must not keep the store, of which nothing may be left by then: see `oldest_released`.
        """
        self.on_created: Callable[[NamedStore], object] | None = None
        """Called with each new store."""
        self._patient_until: float = 0.0
        """The time until which a store whose owners have no connection is not lost, as they may come back."""
        self._orphans: dict[NamedStore, None] = {}
        """Stores that end then unless an owner has come back: their owners' sessions were not to survive."""
        self.ports: dict[str, NamedStore] = {}
        """Stores with a port of their own, keyed by that port in decimal."""
        self.open_port: Callable[[NamedStore], int | str] | None = None
        """Has the server listen for a store; returns the port, or why there is none."""
        self.close_port: Callable[[NamedStore], object] | None = None
        """Called when a store ends that has a port."""
        unnamed.hub.on_leave = self.leave
        unnamed.hub.on_return = self.came_back
        unnamed.hub.register("enter", lambda store: self.enter)
        unnamed.hub.register("end_store", lambda store: self.release)

    # Commands

    def enter(self, session: ServerSession, items: list[tuple[bytes, Framed]]) -> Framed | None:
        """Execute ENTER: in a step of its own, because commands that follow are for another store.

        Raises NotAllowedError if the session's token does not allow that, behind the reply that says so.
        """
        store = self.unnamed
        if session.store is not store:
            raise ProtocolError(f"ENTER from a connection in {session.store}")
        if session.state != IDLE or session.parked or self._stays(session):
            raise ProtocolError(f"ENTER from {_STAYING}")
        entry = Entry(session, items)
        refusal = self._refusal(entry)
        if refusal:  # reported as for AUTH: the reply says why, and the connection is closed behind it
            reply = _reply(REFUSED, refusal)
            session.out.append(reply)
            session.unsent += len(reply)
            raise NotAllowedError(refusal)
        self._forget_entry(session)
        store.keyspace.running = Running(self._enter(entry))
        return None

    def _enter(self, entry: Entry) -> Steps:
        while True:
            store = self.stores.get(entry.name)
            if store is None or store.look(self.unnamed.keyspace.portion):
                break
            yield
        reply = self.decide(entry)
        if reply is None:
            self.park(entry)
        return reply

    def decide(self, entry: Entry) -> Framed | None:
        """Put a session into the store that it wants, and return its reply; None if it has to wait."""
        store = self._find(entry.name)
        found = "" if store is not None or entry.owner or entry.incarnation else self._found_at(entry)
        if found:
            store = self.stores[found]
        if entry.incarnation:
            if store is None or store.incarnation != entry.incarnation:
                return _reply(ENDED, self.why_ended(entry.name, entry.incarnation))
        elif entry.owner:
            if store is None:
                store = self._create(entry)
            elif not (entry.owner in store.ids or (entry.shares and entry.shares in store.ids)):
                if store.is_lost():
                    return self._lost(store)
                age = self.clock.now - store.since
                return _reply(
                    TAKEN, f"{store} already has an owner ({store.creator}), which created it {age:.1f} s ago"
                )
        elif store is None or _is_later(entry.attempt, store.attempt):
            return None if entry.waits else self._absent(entry)
        elif entry.attempt and store.attempt and entry.attempt != store.attempt:
            return _reply(
                ENDED, f"{store} belongs to attempt {store.attempt}, but this rank belongs to attempt {entry.attempt}"
            )
        elif store.is_lost():
            return self._lost(store)
        self._put(entry, store)
        port, no_port = self._port_for(entry, store) if entry.server else (0, "")
        return _encoded(EnterReply(ENTERED, store.incarnation, "", port, no_port, found))

    def park(self, entry: Entry) -> None:
        """Have a session wait for a store."""
        session = entry.session
        self.unnamed.keyspace.hold(session, entry.bytes())
        session.state = AWAITING_STORE
        session.awaited = entry.name.encode()
        self.entries[session] = entry
        self._queue(entry)

    def release(self, session: ServerSession) -> int:
        """Execute END_STORE: the session's owner, with all its connections, owns the store no more, and leaves.

        Returns how many sessions are in it that are none of the owner's.
        """
        store = session.store
        if not isinstance(store, NamedStore) or session not in store.owners:
            raise ProtocolError("END_STORE from a connection that owns no store")
        mine = store.owners[session]
        for one in [one for one, owner in store.owners.items() if owner == mine]:
            store.disown(one)
            store.sessions[one] = False
            store.keyspace.depart(one)
        store.ids.discard(mine)
        others = sum(store.sessions.values())
        if not store.owners and not store.ended:
            self._end(store, f"its owner ({store.creator}) {CLOSED}")
            if others and self.on_released is not None:
                store.released = self.clock.now
                self.on_released(store)
        return others

    # Called by sessions and servers

    def arrive(self, session: ServerSession, store: NamedStore) -> None:
        """Note a session that has begun in a store, because its connection came to the store's port."""
        if self.clock.enters(self, "arrive", session, store):
            return
        store.sessions[session] = True

    def leave(self, session: ServerSession) -> None:
        """Forget a session that has gone. A store ends with its last owner, at once."""
        if self.entries:
            self._forget_entry(session)
        store = session.store
        if not isinstance(store, NamedStore):
            return
        store.sessions.pop(session, None)
        if store.disown(session) and not store.owners and not store.ended:
            self._end(store, f"its owner ({store.creator}) left")
            self.close(store)
        if store.ended and not store.sessions:
            self._free(store)

    def came_back(self, session: ServerSession) -> None:
        """Note that the link of a session has a connection again."""
        store = session.store
        if isinstance(store, NamedStore):
            store.reconnected(session)
            if self.clock.now < self._patient_until and session in store.owners:
                self._let_in_again(store)

    def restart(self, patient_until: float) -> None:
        """Until then, let sessions wait for stores whose owners have no connection: there was no server for a while.

        To be called before the sessions end that do not survive that.
        """
        if self.clock.enters(self, "restart", patient_until):
            return
        self._patient_until = patient_until
        for store in self.stores.values():
            for session in list(store.owners):
                if not isinstance(session.owner, Transport) or not session.owner.survives():
                    store.disown(session)
            if not store.owners:
                self._orphans[store] = None

    def orphaned_until(self) -> float | None:
        """Return when `end_orphans` has to be called; None if there are no orphans."""
        return self._patient_until if self._orphans else None

    def end_orphans(self) -> None:
        """End the stores whose owners have not come back."""
        if self.clock.enters(self, "end_orphans"):
            return
        orphans, self._orphans = self._orphans, {}
        for store in orphans:
            if not store.owners and not store.ended:
                self._end(store, f"its owner ({store.creator}) did not come back after the server's restart")
                self.close(store)

    def drop(self, name: str, why: str) -> bool:
        """End a store at once; return whether there is one."""
        store = self.stores.get(name)
        if store is None:
            return False
        if not self.clock.enters(self, "drop", name, why):
            self._end(store, why)
            self.close(store)
        return True

    def lose_port(self, store: NamedStore) -> None:
        """Forget the port of a store, on which the server cannot listen any more. The next client gets another."""
        if not self.clock.enters(self, "lose_port", store):
            del self.ports[str(store.port)]
            store.port = 0
            self.unnamed.budget.charge(-PORT_BYTES)

    def close(self, store: NamedStore) -> None:
        """Close, in portions, the connections that are still in a store that has ended."""
        if self.clock.enters(self, "close", store):
            return
        store.released = NEVER
        if store in self.ending:
            self.unnamed.hub.evict_in_steps(
                list(store.sessions), lambda one: store.error() if one in store.sessions else None
            )

    def oldest_released(self) -> NamedStore | None:
        """Return the store that others have had the longest time to leave since its owner has ended it."""
        return next((store for store in self.ending if store.released != NEVER), None)

    def why_ended(self, name: str, incarnation: str) -> str:
        _, why = self.ended.get(incarnation, ("", ""))
        return f"the store {spelled(name)!r} ended" + (f": {why}" if why else "")

    def _absent(self, entry: Entry) -> Framed:
        """Return the reply to a session that does not wait and whose store does not exist."""
        others = self.of_port.get(_port(entry.name), {})
        access = self.unnamed.hub.auth.access_of(entry.session)
        shown = (
            ()
            if access is not None and access.store
            else tuple(store.spelling() for store in islice(reversed(others), _SHOWN))
        )
        return _encoded(EnterReply(ENDED, reason=self._why_absent(entry.name), others=shown))

    def _why_absent(self, name: str) -> str:
        last = next((incarnation for incarnation, (ended, _) in reversed(self.ended.items()) if ended == name), None)
        return f"there is no store {spelled(name)!r}" if last is None else self.why_ended(name, last)

    # Deferred work of the stores

    def work_later(self, store: NamedStore) -> None:
        self.to_work[store] = True
        if self.on_work is not None:
            self.on_work()

    def work(self) -> bool:
        """Do a portion of the work that one store has left. Returns whether there is more: call it again, soon."""
        if not self.to_work:
            return False
        store, _ = self.to_work.popitem(last=False)
        keyspace = store.keyspace
        if keyspace.work:
            store.activate()
            keyspace.step()
            if keyspace.work:
                self.to_work[store] = True
        return len(self.to_work) > 0

    # Internal

    def _find(self, name: str) -> NamedStore | None:
        """Return the store of this name or, if there is none, the one with a port that has this address."""
        store = self.stores.get(name)
        if store is None and self.ports:
            host, _, port = name.rpartition(":")
            found = self.ports.get(port)
            if found is not None and host in found.hosts:
                return found
        return store

    def _found_at(self, entry: Entry) -> str:
        """Return the name of the store at the addresses of a session; empty if there is none, or more than one.

        An address at which there are several stores says nothing: that of a bridge, say, which every host has.
        """
        names = {store.name for address in self._telling(entry.addresses) for store in self.addresses[address]}
        access = self.unnamed.hub.auth.access_of(entry.session)
        return "" if len(names) != 1 or (access is not None and access.store) else names.pop()

    def _telling(self, addresses: tuple[str, ...]) -> tuple[str, ...]:
        """Return the addresses at which there is exactly one store."""
        return tuple(address for address in addresses if len(self.addresses.get(address, ())) == 1)

    def _port_for(self, entry: Entry, store: NamedStore) -> tuple[int, str]:
        """Return the port of a store, which is opened if need be, or 0 and why there is none."""
        if not store.port:
            opened: int | str = "this server offers none"
            if self.open_port is not None:
                opened = self.clock.ask(partial(self.open_port, store))
            if isinstance(opened, str):
                return 0, opened
            self.unnamed.budget.charge(PORT_BYTES)
            store.port = opened
            store.begin_sessions()
            self.ports[str(opened)] = store
        address = f"{entry.server}:{store.port}"
        if self.stores.get(address, store) is not store or address in self.waiting:
            return 0, f"{address} is also the name of another store"
        if len(store.hosts) <= _MOST_HOSTS:
            store.hosts.add(entry.server)
        return store.port, ""

    def _stays(self, session: ServerSession) -> bool:
        """Return whether the store without a name remembers something of a session that it could not in another one."""
        keyspace = self.unnamed.keyspace
        return session.joined is not None or bool(session.leases) or session in keyspace.represented

    def _refusal(self, entry: Entry) -> str:
        """Return why a session's token does not allow that."""
        access = self.unnamed.hub.auth.access_of(entry.session)
        if access is None:
            return ""
        if access.store and access.store != entry.name:
            return f"token {access.identity} is only for the store {access.store!r}, not for {entry.name!r}"
        if entry.owner and not access.may_write():
            return f"token {access.identity} grants only read access, but the owner of a store needs write access"
        if entry.owner and not (access.store or access.whole()):
            return (
                f"token {access.identity} is only for keys with the prefix {access.prefix!r}; to own {entry.name!r} "
                "takes a token for that store or for all keys"
            )
        return ""

    def _create(self, entry: Entry) -> NamedStore:
        access = self.unnamed.hub.auth.access_of(entry.session)
        if access is not None and access.store:
            entry.addresses = ()  # its owner may take this name only
        budget = self.unnamed.budget
        size = STORE_BYTES + ADDRESS_BYTES * len(entry.addresses)
        budget.charge(size)
        try:
            budget.relieve(entry.session)
        except PeerError:
            budget.charge(-size)
            raise
        self.created += 1
        since = self.clock.now
        store = NamedStore(self, entry, f"{self.instance}/{self.created}", since)
        budget.add(store.share)
        self.stores[entry.name] = store
        if self.on_created is not None:
            self.on_created(store)
        self.of_port.setdefault(_port(store.name), {})[store] = True
        for address in store.addresses:
            self.addresses.setdefault(address, {})[store] = True
        self._let_in(self.waiting, (store.name,))
        self._let_in(self.seeking, self._telling(store.addresses))
        return store

    def _let_in(self, queues: dict[str, OrderedDict[ServerSession, Entry]], keys: tuple[str, ...]) -> None:
        """Answer, in portions, the sessions that wait for one of these names."""
        for key in keys:
            waiting = queues.pop(key, None)
            if waiting is not None:
                self.unnamed.keyspace.defer(Later(self._let_each_in(waiting), partial(self._let_waiter_in, waiting)))

    def _let_in_again(self, store: NamedStore) -> None:
        """Decide again about sessions that have waited for the owner of this store."""
        self._let_in(self.waiting, (store.name, *(f"{host}:{store.port}" for host in store.hosts)))
        self._let_in(self.seeking, (*store.addresses, *store.relays))

    def _lost(self, store: NamedStore) -> Framed | None:
        """Return the reply to a session whose store has lost its owner, or None while the owner may come back."""
        if self.clock.now < self._patient_until:
            return None
        return _reply(LOST, f"{store} has lost its owner ({store.creator}) and will end unless the owner comes back")

    def _let_each_in(self, waiting: OrderedDict[ServerSession, Entry]) -> Iterator[None]:
        portion = max(1, self.unnamed.keyspace.portion // _LETTING_IN)
        while True:
            for _ in range(min(portion, len(waiting))):
                session, entry = waiting.popitem(last=False)
                self._admit(session, entry)
            if not waiting:
                return
            yield

    def _let_waiter_in(self, waiting: OrderedDict[ServerSession, Entry], waiter: object) -> None:
        if isinstance(waiter, ServerSession):
            entry = waiting.pop(waiter, None)
            if entry is not None:
                self._admit(waiter, entry)

    def _put(self, entry: Entry, store: NamedStore) -> None:
        session = entry.session
        session.move_to(store)
        store.sessions[session] = True
        if entry.relay:
            self._find_at(store, entry)
        if not entry.owner:
            return
        store.own(session, entry.owner)
        if self.clock.now < self._patient_until:
            self._let_in_again(store)
        if entry.owner not in store.ids:
            store.ids.add(entry.owner)
            if entry.shares:
                store.ids.add(entry.shares)
            if entry.joins:
                store.announce(store.joins + entry.joins)
                self.unnamed.activate()

    def _find_at(self, store: NamedStore, entry: Entry) -> None:
        """Let a store be found at the address of a relay on its owner's host."""
        relay = entry.relay
        access = self.unnamed.hub.auth.access_of(entry.session)
        if entry.host != store.host or relay in store.relays or len(store.relays) == _MOST_RELAYS:
            return
        if relay in store.addresses or access is not None:
            return  # a token that does not allow everything must not lead others here
        store.relays[relay] = None
        self.unnamed.budget.charge(ADDRESS_BYTES)
        self.addresses.setdefault(relay, {})[store] = True
        self._let_in(self.seeking, self._telling((relay,)))

    def _queue(self, entry: Entry) -> None:
        self.waiting.setdefault(entry.name, OrderedDict())[entry.session] = entry
        for address in entry.addresses:
            self.seeking.setdefault(address, OrderedDict())[entry.session] = entry

    def _forget_entry(self, session: ServerSession) -> None:
        entry = self.entries.pop(session, None)
        if entry is None:
            return
        self.unnamed.keyspace.hold_less(session, entry.bytes())
        _take(self.waiting, entry.name, entry)
        for address in entry.addresses:
            _take(self.seeking, address, entry)

    def _admit(self, session: ServerSession, entry: Entry) -> None:
        """Answer a session that has waited for a store which is there now, unless it has given up."""
        if self.entries.get(session) is not entry or session.state != AWAITING_STORE:
            return
        if session in self.unnamed.hub.evicted:
            return
        if self._stays(session):  # by what it has sent since
            session.evict(ProtocolError(f"ENTER from {_STAYING}"))
            return
        refusal = self._refusal(entry)
        if refusal:  # it has presented another token since
            session.evict(NotAllowedError(refusal))
            return
        reply = self.decide(entry)
        if reply is None:
            self._queue(entry)
            return
        self._forget_entry(session)
        session.state = IDLE
        session.awaited = b""
        session.fire(reply)

    def _end(self, store: NamedStore, why: str) -> None:
        """Close a store to further sessions, and free its name."""
        store.ended = why
        if self.stores.get(store.name) is store:
            del self.stores[store.name]
        _remove(self.of_port, _port(store.name), store)
        addresses = (*store.addresses, *store.relays)
        for address in addresses:
            _remove(self.addresses, address, store)
        # Sessions that wait because two stores came into question.
        self._let_in(self.seeking, tuple(one for one in addresses if len(self.addresses.get(one, ())) < 2))
        if self._patient_until:
            self._let_in_again(store)
        self.ending[store] = True
        self.ended[store.incarnation] = store.name, why
        if len(self.ended) > _REMEMBERED:
            self.ended.popitem(last=False)
        store.disown_all()
        if store.port:
            del self.ports[str(store.port)]
            store.port = 0
            self.unnamed.budget.charge(-PORT_BYTES)
            if self.close_port is not None:
                self.close_port(store)
        if store.joins:
            store.announce(0)
        if not store.sessions:
            self._free(store)

    def _free(self, store: NamedStore) -> None:
        """Release what a store without sessions holds."""
        if not self.ending.pop(store, False):
            return
        keyspace = store.keyspace
        root = self.unnamed
        self.to_work.pop(store, None)
        store.key_lists.release()
        root.budget.remove(store.share)
        root.budget.charge(-store.bytes())
        dicts: list[dict[Any, Any]] = [keyspace.values, keyspace.queues, keyspace.rounds]
        # Sessions that have left, of which these still know, refer to the store: it would be part of a cycle.
        departed = list(keyspace.departed)
        dicts += [keyspace.waiters, keyspace.written]
        keyspace.departed.clear()
        keyspace.unwoken.clear()
        if departed:
            root.keyspace.defer(Later(_forget_registrations(departed, root.keyspace.portion), aside=True))
        if store.observer is not None:
            writes, left = store.observer.dispose()
            dicts += writes
            for sessions in left:
                root.keyspace.free_later(sessions)
        for held in dicts:
            if len(held) > _MANY:
                root.keyspace.defer(Later(free_dict(held, root.keyspace.portion), aside=True))
            else:
                held.clear()
        for joins in keyspace.joins.values():
            if len(joins.waiters) > _MANY:
                root.keyspace.defer(Later(free_dict(joins.waiters, root.keyspace.portion), aside=True))
        for identity, account in store.guards.accounts.items():
            account.close()
            usage = root.hub.auth.usage.get(identity)
            if usage is not None:
                root.hub.auth.forget_unused(usage)
        keyspace.on_work = None
        keyspace.work.clear()
        store.dispose()


def _forget_registrations(departed: list[Waiter], portion: int) -> Iterator[None]:
    """Free the lists of keys under which waiters that have gone were registered."""
    for waiter in departed:
        parked, waiter.parked = waiter.parked, None
        while parked:
            for _ in range(min(portion, len(parked))):
                parked.popitem()
            yield


def _text(said: dict[bytes, bytes], name: bytes, most: int) -> str:
    raw = said.get(name)
    if raw is None:
        return ""
    if len(raw) > most:
        raise ProtocolError(f"the {name.decode()} in ENTER is {len(raw)} bytes long (max {most})")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ProtocolError(f"the {name.decode()} in ENTER is not UTF-8") from None


def _port(name: str) -> str:
    return name.rpartition(":")[2]


def _take(queues: dict[str, OrderedDict[ServerSession, Entry]], key: str, entry: Entry) -> None:
    """Take an entry out of a queue, if it is there."""
    waiting = queues.get(key)
    if waiting is not None and waiting.get(entry.session) is entry:
        del waiting[entry.session]
        if not waiting:
            del queues[key]


def _remove(index: dict[str, dict[NamedStore, bool]], key: str, store: NamedStore) -> None:
    stores = index[key]
    del stores[store]
    if not stores:
        del index[key]


def _is_later(attempt: str, other: str) -> bool:
    """Return whether an attempt is known to come after another one."""
    return attempt.isdecimal() and other.isdecimal() and int(attempt) > int(other)


def _reply(status: str, reason: str) -> Framed:
    return _encoded(EnterReply(status, reason=reason))


def _encoded(reply: EnterReply) -> Framed:
    return pack(msgspec.json.encode(reply))
