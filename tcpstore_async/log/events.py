"""Notes each event that enters a server's stores.

An event is a call from outside: bytes of a session, its end, a portion of work, a tick. It is noted behind its
execution, with the answers that it got from outside of the engine, so what was refused is in no event. This module must
not know what an event does, or where it is kept.

Invariant: the noted events, executed in order by `log/replay.py`, have the same effects and give every link the same
bytes. Whom the budget evicts depends on what the kernel took, so it is noted, with the point of the event.
"""

import hashlib
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Final, NamedTuple

from ..base.clock import Recorder
from ..base.errors import PeerError
from ..base.mypyc_shim import mypyc_attr
from ..keyspace.keyspace import Keyspace
from ..links.carrier import Carrier
from ..links.link_registry import LinkRegistry
from ..links.link_server import LinkInput, ServerLink
from ..links.single_link import SingleLink
from ..session.named_stores import NamedStore, NamedStores
from ..session.server import ServerSession
from ..session.store import Store
from ..session.transport import Transport
from ..wire.commands import BY_METHOD

OPENED: Final = "opened"
"""The one event that is not a method of something in the engine: a session on a connection of its own."""

RECEIVE: Final = "receive"

_WITH_SECRETS: Final = BY_METHOD["auth"].prefix + BY_METHOD["link"].prefix
"""Opcodes of commands that have a token, or the secret of a link."""


class Engine(NamedTuple):
    """The stores of one server, and the features that events enter."""

    root: Store
    named: NamedStores | None = None
    links: LinkRegistry | None = None


class Reference(NamedTuple):
    """Names something in the engine, whichever process it is in."""

    kind: str
    """A session or its `transport`, by number; a store, or the `keyspace` of one, by incarnation, which is empty for
    the root; a link, or the `carrier` of one, by id; `hub`, `named`, `links`; `error`, by its text; `answers`, a
    function that was asked."""
    name: Any = 0


class Event(NamedTuple):
    method: str
    subject: Reference
    given: tuple[Any, ...]
    now: float
    answers: tuple[Any, ...] = ()
    """What was said outside of the engine meanwhile, in order."""


class Evicted(NamedTuple):
    """An answer: memory was short, and this is whom the budget evicted, or whose command it refused."""

    points: int
    done: int
    wanted: int
    """See `Clock.points`."""
    victim: Reference | None
    """None if a command was refused for which no peer is known."""


class Reply(NamedTuple):
    """An answer: the reply to a command that depends on what is no event."""

    command: int
    """How many such commands there were before."""
    result: Any


def name_of(store: Store) -> str:
    return store.incarnation if isinstance(store, NamedStore) else ""


def is_link(session: ServerSession) -> bool:
    """Return whether the session's connection is a link's."""
    return isinstance(session.partial, LinkInput)


def _is_between(session: ServerSession) -> bool:
    """Return whether a session is between two requests."""
    return session.partial is None and session.input_buffer is None and session.running is None


def _withholds(session: ServerSession) -> bool:
    """Return whether bytes that have arrived are to be noted with those that follow: what the session keeps of them.

    They wait until replies have been sent, or they are the beginning of a secret, which is hidden as a whole.
    """
    kept = session.input_buffer
    return kept is not None and (
        session.need == 0 or (len(kept) > 0 and session.partial is None and kept[0] in _WITH_SECRETS)
    )


def _counts(session: ServerSession) -> bool:
    """Return whether every byte counts that a session receives: its client may resume it."""
    owner = session.owner
    return not isinstance(owner, Transport) or owner.single is not None


@mypyc_attr(allow_interpreted_subclasses=True)
class EventRecorder(Recorder):
    """Notes the events of one engine."""

    def __init__(self, engine: Engine, note: Callable[[list[Event]], object]) -> None:
        """`note` is called behind each call from outside: with the event, or evictions caused by what is none."""
        super().__init__()
        self.engine = engine
        self.note = note
        self.clock = engine.root.hub.clock
        self.clock.recorder = self
        self._stores = engine.root.hub.stores
        self._parts = {"hub": engine.root.hub, "named": engine.named, "links": engine.links}
        self.opened_sessions = 0
        """How many sessions there were."""
        self.numbers: dict[ServerSession, int] = {}
        """Those that there are, in order of opening, with their numbers."""
        self._answers: list[Any] = []
        self._secrets: dict[bytes, bytes] = {}
        """Those in what is received, and what is noted instead."""
        self._evicted: list[Evicted] = []
        self.inquiries = 0
        """How many commands there were whose replies depend on what is no event."""
        self._kept: dict[ServerSession, bytes] = {}
        """What links' connections have received and not looked at."""
        self._filled: dict[ServerSession, int] = {}
        """Bytes of the large value under way that are in events."""

    def go_on(self, numbers: dict[ServerSession, int], opened: int, inquiries: int) -> None:
        """Record the events of an engine in which others have been executed already."""
        self.numbers = numbers
        self.opened_sessions = opened
        self.inquiries = inquiries
        for session in numbers:
            value = session.large_value()
            if value is not None:
                self._filled[session] = value.filled

    def _start_event(self) -> None:
        self.inside = True
        self.clock.points = 0

    def enter(self, subject: Any, method: str, *given: Any) -> Any:
        reference = self.refer(subject)
        references = tuple(map(self.refer, given))
        asked = [partial(self._ask, one) if callable(one) else one for one in given]
        self._start_event()
        try:
            return getattr(subject, method)(*asked)
        finally:
            self._note(method, reference, references)

    def receive(self, session: ServerSession, chunk: bytes) -> None:
        if not _is_between(session) or session.unsent > session.store.limits.unsent_high_water or not chunk:
            self._receive(session, chunk)
            return
        # The common case: requests begin here, and end here.
        keyspace = session.store.keyspace
        clock = self.clock
        clock.lasting = session.handoff is not None or keyspace.working
        self._start_event()
        try:
            session.receive(chunk)
        except BaseException:
            if clock.done > 0:
                self._note_received(session, chunk[: clock.done])
            else:
                self._answers.clear()
                self._note_evicted(session)
            raise
        if _is_between(session):
            if clock.lasting or self._answers or keyspace.working or _counts(session):
                self._note_received(session, chunk)
            else:  # it has only read
                self._note_evicted(session)
            return
        given = chunk
        if not is_link(session) and _withholds(session):
            given = chunk[: len(chunk) - len(session.input_buffer or b"")]
        self._note_received(session, given)
        value = session.large_value()
        if value is not None:
            self._filled[session] = value.filled

    def _note_received(self, session: ServerSession, data: bytes) -> None:
        if self._answers or self._evicted:
            self._note(RECEIVE, self.refer(session), (data,))
        else:
            self.inside = False
            if self._secrets:
                data = self._without_secrets(data)
                self._secrets.clear()
            self.received(self.numbers[session], data)

    def received(self, number: int, data: bytes) -> None:
        """Note that the session of this number has received bytes."""
        self.note([Event(RECEIVE, Reference("session", number), (data,), self.clock.now)])

    def _receive(self, session: ServerSession, chunk: bytes) -> None:
        """Have a session receive bytes that may belong to what is under way, or may have to wait."""
        high = session.unsent > session.store.limits.unsent_high_water
        linked = is_link(session)
        kept = bytes(session.input_buffer or b"")
        ahead = 0 if _withholds(session) else len(kept)  # of these, in events already
        value, before = session.large_value(), self._filled.pop(session, 0)
        filled = b"" if value is None else bytes(value.buffer[before : value.filled])  # read straight into it
        running = session.running
        idle = high and running is None and not session.store.keyspace.working
        failed = True
        self._start_event()
        try:
            session.receive(chunk)
            failed = False
        finally:
            given = kept + chunk
            if linked:
                given = self._kept.pop(session, b"") + chunk
                if high:  # it has not looked at them
                    self._kept[session] = given
                    given = b""
            elif failed:
                given = given[ahead : max(ahead, self.clock.done)]
                if self.clock.done < 0:  # the large value was complete, and was refused
                    filled = b""
            elif is_link(session):
                given = given[ahead:]
            else:
                held_back = len(session.input_buffer or b"") if _withholds(session) else 0
                given = given[ahead : max(ahead, len(given) - held_back)]
            stepped = running is not None and (not failed or session.running is not running)
            if given or filled or stepped or not ((failed and not linked) or idle):
                self._note(RECEIVE, self.refer(session), (filled + given,))
            else:
                self._answers.clear()
                self._note_evicted(session)
            if (value := session.large_value()) is not None:
                self._filled[session] = value.filled

    def answer(self, ask: Callable[[], Any]) -> Any:
        found = ask()
        self._answers.append(found)
        return found

    def hide(self, secret: bytes) -> bytes:
        hidden = hashlib.shake_128(secret).digest(len(secret))
        if secret:
            self._secrets[secret] = hidden
        return hidden

    def steps(self, steps: Generator[None, None, Any]) -> Generator[None, None, Any]:
        self.inquiries += 1
        return self.reply_of(self.inquiries, steps)

    def reply_of(self, command: int, steps: Generator[None, None, Any]) -> Generator[None, None, Any]:
        found = yield from steps
        self._answers.append(Reply(command, found))
        return found

    def opened(self, session: ServerSession) -> None:
        self.opened_sessions += 1
        self.numbers[session] = self.opened_sessions
        if not self.inside:
            given = session.host, session.port, session.connected_at
            self._note(OPENED, self.refer(session.store), given)

    def left(self, session: ServerSession) -> None:
        del self.numbers[session]
        self._kept.pop(session, None)
        self._filled.pop(session, None)

    def evicts(self, victim: Any, wanted: int) -> None:
        if self.inside:
            self._evicted.append(Evicted(self.clock.points, self.clock.done, wanted, self.refer(victim)))

    def refer(self, thing: Any) -> Any:
        """Return what names a thing in any process; plain data, itself."""
        if thing is None:
            return None
        if isinstance(thing, ServerSession):
            return Reference("session", self.numbers.get(thing))
        if isinstance(thing, Carrier):
            return Reference("carrier", thing.identity)
        if isinstance(thing, SingleLink):
            return Reference("single", thing.carrier.identity)
        if isinstance(thing, Transport):
            return Reference("transport", self.numbers.get(thing.session))
        if isinstance(thing, ServerLink):
            return Reference("link", thing.carrier.identity)
        if isinstance(thing, Keyspace):
            return Reference("keyspace", name_of(next(one for one in self._stores if one.keyspace is thing)))
        if isinstance(thing, Store):
            return Reference("store", name_of(thing))
        kind = next((name for name, one in self._parts.items() if one is thing), None)
        if kind is not None:
            return Reference(kind)
        if isinstance(thing, PeerError):
            return Reference("error", str(thing))
        return Reference("answers") if callable(thing) else thing

    def _ask(self, ask: Callable[..., Any], *given: Any) -> Any:
        return self.answer(partial(ask, *given))

    def _note(self, method: str, subject: Reference, given: tuple[Any, ...]) -> None:
        self.inside = False
        if self._secrets:
            given = tuple([self._without_secrets(one) if isinstance(one, bytes) else one for one in given])
            self._secrets.clear()
        event = Event(method, subject, given, self.clock.now, (*self._evicted, *self._answers))
        self._evicted.clear()
        self._answers.clear()
        self.note([event])

    def _without_secrets(self, data: bytes) -> bytes:
        for secret, hidden in self._secrets.items():
            data = data.replace(secret, hidden)
        return data

    def _note_evicted(self, session: ServerSession) -> None:
        """Note whom a session has made the budget evict with bytes that are in no event."""
        self.inside = False
        if self._secrets:
            self._secrets.clear()
        if not self._evicted:  # what is only read costs little
            return
        given = (Reference("error", "memory was short"),)
        mine = self.refer(session)
        evicted, self._evicted = self._evicted, []
        self.note(
            [Event("evict", one.victim, given, self.clock.now) for one in evicted if one.victim not in (None, mine)]
        )
