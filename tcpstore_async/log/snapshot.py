"""The state of an engine as bytes, and back, in any process and build.

What is written is the graph of the objects that the engine consists of, each by its class and the attributes that
`_LAYOUTS` names. Objects that every engine has, or that another one makes, are found by name, and only filled. This
module must not know what the state means, or where it is kept.

Invariants: on what `load` makes of `dump`, events have the same effects as on the engine that was dumped. Nothing is
dumped in the middle of a command in steps. `load` makes something of all that `dump` returns, or raises JournalError.
"""

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Final

import msgspec
from librt.strings import BytesWriter

from ..auth.access import Access
from ..base.errors import PeerError, ProtocolError
from ..keyspace.accounts import Account
from ..keyspace.agents import Ended
from ..keyspace.joins import Joins
from ..keyspace.keyspace import Keyspace
from ..keyspace.rounds import Agent, Due, Rounds
from ..keyspace.rounds import Group as Agents
from ..keyspace.waiter_types import Counter, Handoff, KeyList, SharedWait
from ..links.carrier import Carrier
from ..links.link_registry import LinkRegistry
from ..links.link_server import LinkInput, ServerLink
from ..links.linked_session import LinkedSession
from ..links.resume import Resumable
from ..links.single_link import SingleLink
from ..session.auth import Auth, Guards
from ..session.budget import Budget, StoreShare
from ..session.guard import TokenUsage
from ..session.key_list_cache import EqualSoFar, KeyListCache, PartialKeys, SharedKeys
from ..session.named_stores import Entry, NamedStore, NamedStores
from ..session.server import ServerSession
from ..session.slots import NO_COMMANDS, Slot
from ..session.store import Hub, Store
from ..session.unsent import Pin, Unsent
from ..wire.codecs import LargeValue, PartialList, PartialValues
from ..wire.commands import SERVER_KEY
from ..wire.values import Growing
from .encoding import JournalError
from .events import Engine, EventRecorder
from .records import Snapshot
from .replay import Ghost, Replayer

_WAITER: Final = (
    *("state", "parked", "awaited", "group", "number", "barrier", "handoff", "leases", "joined", "weight"),
)
_HOLDER: Final = (*_WAITER, "stored", "held", "backlog")
_STREAM: Final = ("crc", "taken", "sent", "kept", "kept_bytes")
_PARTIAL: Final = ("at", "items", "before", "endless")
_STORE: Final = ("joins", "over", "serving")

_LAYOUTS: Final[dict[type, tuple[str, ...]]] = {
    # What every engine has, or another object makes
    Hub: ("stores", "evicted", "unvalidated", "unvalidated_on_links", "held"),
    Auth: ("granted", "usage"),
    Budget: ("others", "lists", "unfinished", "holders", "seen", "share", "keyspace", "pins", "orphaned"),
    NamedStores: (
        *("stores", "ending", "waiting", "seeking", "addresses", "of_port", "entries", "ended", "created", "ports"),
        *("_patient_until", "_orphans"),
    ),
    LinkRegistry: (
        *("links", "places", "singles", "sessions", "suspended", "attaching", "skipped", "ticked", "stopping"),
        *("_scheduled", "_to_close", "_to_end", "_to_offer", "_to_resume", "_to_step", "_to_send"),
    ),
    Store: _STORE,
    Keyspace: (
        *("values", "final", "changes", "queues", "leased", "queue_count", "reserved", "joins", "rounds"),
        *("represented", "no_rounds", "ended", "noting", "taken", "waiters", "counters", "tracked", "holes"),
        *("handoffs", "size", "parked", "_woken", "_awaited", "_keys_before", "_stored_before", "_last_key"),
    ),
    StoreShare: ("counted", "stored", "scale"),
    KeyListCache: ("lists", "size"),
    Guards: ("accounts",),
    Carrier: (*_HOLDER, "attempt", "connected", "lost", "queues"),
    Resumable: _STREAM,
    # What is made by its constructor
    NamedStore: (
        *(*_STORE, "attempt", "addresses", "relays", "creator", "host", "pid", "since", "owners", "_connected", "ids"),
        *("sessions", "port", "hosts", "ended", "released", "handshake"),
    ),
    ServerSession: (
        *(*_HOLDER, "store", "out", "unsent", "partial", "input_buffer", "need", "owner", "host", "port"),
        *("connected_at", "pid", "peer"),
    ),
    LinkedSession: ("waiting", "in_turn", "queued", "ended", "closed", "credit", "allowed", "low"),
    ServerLink: (
        *(*_STREAM, "seat", "granted", "access", "noted", "_last_opened", "_waiting", "_heard", "_sent", "_hosts"),
        *("connection", "host", "attached_at", "sessions", "over", "out", "connected", "_spent", "_frames", "_before"),
        *("added_bytes", "_same_payload", "_same", "untold", "_same_done"),
    ),
    SingleLink: ("single", "connection", "over", "_ahead", "_stepping"),
    # All other objects
    Ghost: ("single", "session"),
    LinkInput: (*_PARTIAL, "link", "session"),
    LargeValue: (*_PARTIAL, "size", "filled", "buffer"),
    PartialValues: _PARTIAL,
    PartialList: (*_PARTIAL, "count", "size", "key_bytes"),
    PartialKeys: (*_PARTIAL, "count", "size", "key_bytes"),
    EqualSoFar: (*_PARTIAL, "known", "size"),
    KeyList: (
        *("raw", "keys", "uses", "tracked", "group", "present", "reads", "reply", "longest_reply", "counted_reply"),
        *("size", "compared"),
    ),
    Counter: (*_WAITER, "registry", "member_bytes", "key", "targets", "awaiting", "reaching", "reached"),
    SharedWait: (*_WAITER, "registry", "member_bytes", "members", "listed"),
    Handoff: ("queue",),
    Growing: ("pieces", "tail", "size"),
    Joins: ("waiters", "lost", "size"),
    Rounds: (
        *("round", "formed", "closed", "least", "most", "agents", "group", "waiting", "present", "caller", "calls"),
        *("called", "tick", "expiring", "due", "size", "counted", "_kept"),
    ),
    Agent: ("rounds", "name", "group", "beaten", "seen", "connections", "parked"),
    Agents: ("names", "agents"),
    Due: ("rounds", "agents", "group", "round", "closed"),
    Ended: ("account", "at", "count", "names"),
    Entry: (
        *("session", "name", "owner", "shares", "incarnation", "attempt", "waits", "host", "pid", "addresses"),
        *("relay", "server", "joins"),
    ),
    Account: ("usage", "keys", "bytes"),
    TokenUsage: (
        *("max_sessions", "sessions", "suspended", "identity", "max_keys", "max_bytes", "keys", "bytes", "guards"),
        *("command", "nameless"),
    ),
    Unsent: ("budget", "pieces", "taken", "cost", "pinned", "referenced", "_chunk"),
    Pin: ("cost", "references", "holder"),
}
"""The attributes of each class that are written. Others are the constructor's, caches, or at rest."""

_NAMES: Final = {kind.__module__.rpartition(".")[2] + "." + kind.__name__: kind for kind in _LAYOUTS}
_NAME_OF: Final = {kind: name for name, kind in _NAMES.items()}

_PARTS: Final[dict[type, tuple[str, ...]]] = {
    Store: ("keyspace", "share", "guards", "key_lists"),
    NamedStore: ("keyspace", "share", "guards", "key_lists"),
    ServerLink: ("carrier",),
    SingleLink: ("carrier", "stream"),
    LinkedSession: ("session",),
}
"""What the constructors of these classes make."""

_METHODS: Final = frozenset({"close_some", "offer_some", "resume", "step", "_send_noted"})
"""Of objects whose methods are called later."""

_ACCESS: Final = [field.name for field in dataclasses.fields(Access) if field.init]

_CONTAINERS: Final[dict[str, type]] = {"l": list, "d": dict, "o": OrderedDict, "s": set, "q": deque}
_LETTERS: Final = {kind: letter for letter, kind in _CONTAINERS.items()}

_GREETED: Final = "h"
_EVICTED: Final = "n"
_ADMITTED: Final = "a"
"""The table of a session: that of the handshake, none, or the one for what its peer may do."""


class NotNowError(Exception):
    """Something is being done in steps: there is nothing to dump before it is done."""


def dump(source: Replayer | EventRecorder) -> bytes:
    """Return the state of an engine that is at rest, whose connections are all gone, or Ghosts.

    Raises NotNowError if it is not at rest.
    """
    engine, numbers = source.engine, source.numbers
    hub = engine.root.hub
    for store in hub.stores:
        if store.keyspace.working:
            raise NotNowError("work is left to be done")
    for session in numbers:
        if session.running is not None:
            raise NotNowError(f"{session} has a command under way")
    writer = _Writer(engine)
    given = [[writer.value(session), number] for session, number in numbers.items()]
    writer.finish()
    layouts = {name: _LAYOUTS[_NAMES[name]] for name in writer.occurring}
    counts = [source.opened_sessions, source.inquiries]
    return msgspec.msgpack.encode([layouts, counts, given, writer.made, writer.contents, writer.guarded()])


def _roots(engine: Engine) -> list[Any]:
    """Return the objects that every engine has, in an order that is always the same."""
    root = engine.root
    parts = [root.keyspace, root.share, root.guards, root.key_lists]
    hub = root.hub
    features = [one for one in (engine.named, engine.links) if one is not None]
    return [root, *parts, hub, hub.auth, hub.budget, *features]


class _Writer:
    """Writes what is reachable from an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.made: list[Any] = []
        """How each object is made."""
        self.contents: list[Any] = []
        """What it is filled with, when all are there."""
        self.occurring: dict[str, None] = {}
        """The names of classes."""
        self._numbers: dict[int, int] = {}
        self._objects: list[Any] = []
        self._pinned = engine.root.hub.budget.pins
        for thing in _roots(engine):
            self._add(thing, None)
        for store in engine.root.hub.stores:
            if isinstance(store, NamedStore):
                self.value(store)
        links = engine.links
        if links is not None:
            for link in [*links.links.values(), *links.singles.values()]:
                self.value(link)

    def finish(self) -> None:
        """Write all that is reachable."""
        at = 0
        while at < len(self._objects):
            self.contents.append(self._content(self._objects[at]))
            at += 1

    def guarded(self) -> list[Any]:
        """Return the guards of each store: they are made anew, as the replies that they have depend on the version."""
        found = []
        for store in self.engine.root.hub.stores:
            for access, (guard, _) in store.guards.guarded.items():
                found.append([self.value(one) for one in (store, access, guard.sessions, guard.ended, guard.account)])
        return found

    def value(self, thing: Any) -> Any:
        """Return what stands for a thing: itself, an array that begins with a letter, or a reference."""
        kind = type(thing)
        if thing is None or kind is int or kind is str or kind is bool or kind is float:
            return thing
        if kind is bytes and id(thing) not in self._pinned:
            return thing
        number = self._numbers.get(id(thing))
        if number is not None:
            return [number]
        if kind is tuple:
            return ["t", *[self.value(one) for one in thing]]
        if kind is Access:
            return ["c", *[self.value(getattr(thing, name)) for name in _ACCESS]]
        if isinstance(thing, PeerError):
            return ["e", str(thing)]
        if callable(thing):
            return ["m", self.value(thing.__self__), thing.__name__]
        return self._add_new(thing)

    def _add_new(self, thing: Any) -> Any:
        kind = type(thing)
        if kind is bytes or kind is bytearray:
            return self._add(thing, ["b" if kind is bytes else "a", bytes(thing)])
        letter = _LETTERS.get(kind)
        if letter is not None:
            return self._add(thing, [letter])
        if kind is ServerSession and isinstance(thing.owner, LinkedSession) and thing.owner.session is thing:
            self.value(thing.owner)
            return [self._numbers[id(thing)]]
        given: list[Any] = []
        if kind is NamedStore:
            given = [thing.name, thing.incarnation]
        elif kind is ServerLink:
            given = [thing.carrier.identity, thing.carrier.secret, thing.place]
        elif kind is SingleLink:
            given = [thing.carrier.identity, thing.carrier.secret, self.value(thing.session)]
        elif kind is LinkedSession:
            given = [self.value(thing.link), thing.number]
        return self._add(thing, [_NAME_OF[kind], *given])

    def _add(self, thing: Any, made: list[Any] | None) -> list[int]:
        number = self._numbers.get(id(thing))
        if number is None:  # else what it is made of has led here already
            number = self._numbers[id(thing)] = len(self._objects)
            self._objects.append(thing)
            self.made.append(made)
            if made is not None:
                for part in _PARTS.get(type(thing), ()):
                    self._add(getattr(thing, part), [number, part])
        return [number]

    def _content(self, thing: Any) -> Any:
        kind = type(thing)
        content: list[Any] = []
        if kind is bytes or kind is bytearray:
            return None
        if isinstance(thing, dict):
            value = self.value
            for key, held in thing.items():
                content.append(value(key))
                content.append(value(held))
            return content
        if kind in _LETTERS:
            content = [self.value(one) for one in thing]
            if kind is set:  # whose order differs between processes
                content.sort(key=repr)
            return content
        self.occurring[_NAME_OF[kind]] = None
        content = [self._attribute(thing, name) for name in _LAYOUTS[kind]]
        if kind is ServerSession:
            content.append(self._standing(thing))
        return content

    def _attribute(self, thing: Any, name: str) -> Any:
        value = getattr(thing, name)
        if name == "pins":
            backlogs = [holder.backlog for holder in thing.holders if holder.backlog is not None]
            held = {id(piece): piece for backlog in backlogs for piece in backlog.pieces}
            return [[self.value(held[number]), self.value(pin)] for number, pin in value.items() if number in held]
        if name == "reserved":
            return [[key, framed] for key, framed in value.items() if key != SERVER_KEY]
        if name == "serving":
            return self.value(value if value is not None and value.owner is not None else None)
        if name == "handshake":
            return value is not thing.root.handshake
        if name == "_frames":
            return None if value is None else value.getvalue()
        if name == "queues" and type(thing) is Carrier:
            stores = self.engine.root.hub.stores
            return self.value(dict.fromkeys([place for place in value if place[0] in stores]))
        return self.value(value)

    def _standing(self, session: ServerSession) -> list[Any]:
        """Return which table a session has, its last command, and whether its incomplete request has a shared codec."""
        table = _ADMITTED
        if session.table is session.store.handshake:
            table = _GREETED
        elif session.table is NO_COMMANDS:
            table = _EVICTED
        codec = getattr(session.partial, "codec", None)
        return [table, session.slot.command.opcode, isinstance(codec, SharedKeys)]


def restore(snapshot: Snapshot | None, target: Replayer) -> None:
    """Give an engine in which nothing has happened yet the state and time of a snapshot. Raises JournalError."""
    if snapshot is not None:
        target.hub.clock.now = snapshot.now
        load(snapshot.state, target)


def load(data: bytes, target: Replayer) -> None:
    """Give an engine in which nothing has happened yet the state that was dumped. Raises JournalError."""
    try:
        layouts, (opened, inquiries), given, made, contents, guarded = msgspec.msgpack.decode(data)
        for name, layout in layouts.items():
            if name not in _NAMES or list(_LAYOUTS[_NAMES[name]]) != layout:
                raise JournalError(f"{name} was written by another version: {', '.join(layout)}")
        loader = _Loader(target.engine, made)
        loader.fill(contents, guarded)
        sessions: dict[int, ServerSession] = {}
        for session, number in given:
            sessions[number] = loader.value(session)
            if not isinstance(sessions[number], ServerSession):
                raise JournalError(f"session {number} is none")
        target.resume(sessions, opened, inquiries)
    except JournalError:
        raise
    except Exception as error:
        raise JournalError(f"the snapshot cannot be read: {error!r}") from None


def sessions_of(data: bytes) -> list[int]:
    """Return the numbers of the sessions in what `dump` returned."""
    return [number for _, number in msgspec.msgpack.decode(data)[2]]


class _Loader:
    """Makes objects again."""

    def __init__(self, engine: Engine, made: list[Any]) -> None:
        self.engine = engine
        self.objects: list[Any] = _roots(engine)
        root = self.objects[0]
        self._makers: dict[str, Callable[..., Any]] = {
            _NAME_OF[NamedStore]: self._store,
            _NAME_OF[ServerSession]: lambda: ServerSession(root, None, "", 0, 0.0),
            _NAME_OF[ServerLink]: lambda *given: ServerLink(self._registry(), *given),
            _NAME_OF[SingleLink]: lambda identity, secret, session: SingleLink(
                self._registry(), identity, secret, self.value(session)
            ),
            _NAME_OF[LinkedSession]: lambda link, number: LinkedSession(root, self.value(link), number, "", 0, 0.0),
            _NAME_OF[Counter]: lambda: Counter(root.keyspace, b"", 0),
            _NAME_OF[SharedWait]: lambda: SharedWait(root.keyspace),
            "b": bytes,
            "a": bytearray,
        }
        for maker in made[len(self.objects) :]:
            self.objects.append(self._make(*maker))

    def _make(self, kind: Any, *given: Any) -> Any:
        if isinstance(kind, int):  # a part of another object
            (part,) = given
            owner = self.objects[kind]
            if part not in _PARTS[type(owner)]:
                raise JournalError(f"{part} is no part of {type(owner).__name__}")
            return getattr(owner, part)
        container = _CONTAINERS.get(kind)
        if container is not None:
            return container()
        maker = self._makers.get(kind)
        if maker is not None:
            return maker(*given)
        known: Any = _NAMES[kind]
        return known.__new__(known)

    def _registry(self) -> LinkRegistry:
        registry = self.engine.links
        assert registry is not None
        return registry

    def _store(self, name: str, incarnation: str) -> NamedStore:
        entry = Entry.__new__(Entry)
        entry.name = name
        entry.attempt = entry.host = entry.pid = ""
        entry.addresses = ()
        named = self.engine.named
        assert named is not None
        store = NamedStore(named, entry, incarnation, 0.0)
        self.engine.root.budget.add(store.share)
        return store

    def value(self, given: Any) -> Any:
        """Return the thing that this stands for."""
        if not isinstance(given, list):
            return given
        first = given[0]
        if isinstance(first, int):
            return self.objects[first]
        if first == "t":
            return tuple([self.value(one) for one in given[1:]])
        if first == "c":
            return Access(**dict(zip(_ACCESS, [self.value(one) for one in given[1:]], strict=True)))
        if first == "e":
            return ProtocolError(given[1])
        if first == "m" and given[2] in _METHODS:
            return getattr(self.value(given[1]), given[2])
        raise JournalError(f"unknown kind of value: {first}")

    def fill(self, contents: list[Any], guarded: list[Any]) -> None:
        """Give all objects what they had."""
        standing = []
        for thing, content in zip(self.objects, contents, strict=True):
            if content is None:
                continue
            if isinstance(thing, dict):
                values = iter([self.value(one) for one in content])
                thing.update(zip(values, values, strict=True))
            elif isinstance(thing, set):
                thing.update([self.value(one) for one in content])
            elif isinstance(thing, (list, deque)):
                thing.extend([self.value(one) for one in content])
            else:
                layout = _LAYOUTS[type(thing)]
                if type(thing) is ServerSession:
                    standing.append((thing, content.pop()))
                for name, one in zip(layout, content, strict=True):
                    self._set(thing, name, one)
        self._guard(guarded)
        for session, (table, opcode, shared) in standing:
            _stand(session, table, opcode, shared)

    def _set(self, thing: Any, name: str, given: Any) -> None:
        value: Any
        if name == "handshake":
            if given:
                thing.begin_sessions()
            return
        if name == "pins":
            value = {id(self.value(piece)): self.value(pin) for piece, pin in given}
        elif name == "reserved":
            value = {**thing.reserved, **dict(given)}
        elif name == "_frames" and given is not None:
            value = BytesWriter()
            value.write(given)
        else:
            value = self.value(given)
        setattr(thing, name, value)

    def _guard(self, guarded: list[Any]) -> None:
        usage = self.engine.root.hub.auth.usage
        before = {identity: one.guards for identity, one in usage.items()}
        for given in guarded:
            store, access, sessions, ended, account = [self.value(one) for one in given]
            guard, _ = store.guards.guard(access)
            guard.sessions = sessions
            guard.ended = ended
            guard.account = account
        for identity, count in before.items():
            usage[identity].guards = count


def _stand(session: ServerSession, table: str, opcode: int, shared: bool) -> None:
    """Give a session its table, its last command and the codec of its incomplete request."""
    store = session.store
    if table == _GREETED:
        session.table = store.handshake
    elif table == _EVICTED:
        session.table = NO_COMMANDS
    else:
        session.table = store.guards.table_of(session)
    found: Slot | None = store.handshake[opcode] or session.table[opcode] or store.guards.slot(session, opcode)
    slot = found or store.slot(opcode) or store.root.slot(opcode) or store.first
    session.slot = slot
    partial: Any = session.partial
    if partial is not None and not isinstance(partial, LinkInput):
        partial.codec = slot.request if shared else slot.command.request
        if isinstance(slot.request, SharedKeys) and isinstance(partial, PartialKeys):
            partial.shared = slot.request
