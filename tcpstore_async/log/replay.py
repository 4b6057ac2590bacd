"""Executes noted events again, on an engine of its own.

The sessions' connections write nowhere: what they are given is reported. This module must not know where events come
from.

Invariant: nobody is evicted or refused for memory here but those noted, each at the same point of its event.
"""

from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Final

from ..base.clock import Recorder
from ..base.errors import BudgetError, PeerError, ProtocolError
from ..base.mypyc_shim import mypyc_attr
from ..session.server import ServerSession
from ..session.transport import Keeper, Transport
from ..wire.values import Framed
from .events import OPENED, RECEIVE, Engine, Event, EventRecorder, Evicted, Reference, Reply, name_of

_UNLIMITED: Final = 2**62


@mypyc_attr(allow_interpreted_subclasses=True)
class Ghost(Transport):
    """A connection that is not there."""

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if self.session.owner is self:
            self.leave(False)

    def send_again(self, replies: list[Framed], taken: int) -> None:
        self.session.unsent = 0

    def resumed(self) -> None:
        pass


class Replayer(Recorder):
    """Executes events."""

    def __init__(self, engine: Engine, given: Callable[[ServerSession, list[Framed]], object]) -> None:
        """`given` is called behind each event with the sessions whose connections are given bytes, and these."""
        super().__init__()
        self.engine = engine
        self.given = given
        self.inside = self.again = True
        self.hub = engine.root.hub
        self.hub.clock.recorder = self
        self._before: list[tuple[Any, str, Any]] = []
        """What the engine had before: objects, attributes and values."""
        self._limit = self.hub.budget.limit
        self.hub.budget.resize(_UNLIMITED)
        if self.hub.auth.authenticate is not None:
            self._replace(self.hub.auth, "authenticate", _ignore)
        self._replace(engine.root.keyspace, "on_work", None)
        if engine.named is not None:
            for name in ("open_port", "close_port", "on_released", "on_work"):
                self._replace(engine.named, name, _ignore)
        if engine.links is not None:
            for name in ("on_work", "on_link", "on_end", "on_refused", "on_refusal"):
                self._replace(engine.links, name, _ignore)
            self._replace(engine.links, "on_failure", _close)
        self.sessions: dict[int, ServerSession] = {}
        """Keyed by number."""
        self.numbers: dict[ServerSession, int] = {}
        self.opened_sessions = 0
        """How many sessions there were."""
        self._answers: deque[Any] = deque()
        self._evicted: deque[Evicted] = deque()
        """Whom the budget has evicted in this event, and does not know yet."""
        self.inquiries = 0
        """How many commands there were whose replies depend on what is no event."""
        self._recorder: EventRecorder | None = None
        """What records what happens from now on; None while events are executed again."""

    def _replace(self, thing: Any, name: str, value: Any) -> None:
        self._before.append((thing, name, getattr(thing, name)))
        setattr(thing, name, value)

    def resume(self, sessions: dict[int, ServerSession], opened: int, inquiries: int) -> None:
        """Continue with an engine that has a state already; see `snapshot.py`."""
        self.sessions = sessions
        self.numbers = {session: number for number, session in sessions.items()}
        self.opened_sessions = opened
        self.inquiries = inquiries
        self.hub.budget.resize(_UNLIMITED)

    def hand_over(self, recorder: EventRecorder) -> None:
        """Execute no more: this records the events that follow. The engine gets back what it had before."""
        for thing, name, value in self._before:
            setattr(thing, name, value)
        self.hub.budget.resize(self._limit)
        self._recorder = recorder
        recorder.go_on(self.numbers, self.opened_sessions, self.inquiries)

    def execute(self, event: Event) -> None:
        self.hub.clock.now = event.now
        self.hub.clock.points = 0
        self._answers = deque(one for one in event.answers if not isinstance(one, Evicted))
        self._evicted.extend(one for one in event.answers if isinstance(one, Evicted))
        if self._evicted:
            self.hub.budget.resize(-_UNLIMITED)  # whatever anybody wants, it is asked
        subject, given = self._find(event.subject), [self._find(one) for one in event.given]
        if event.method == OPENED:
            host, port, connected_at = given
            Ghost(subject, host, port, connected_at)
        elif subject is not None and given.count(None) == event.given.count(None):
            if event.method == RECEIVE and isinstance(subject.owner, Transport) and subject.owner.single is not None:
                subject.owner.single.received(len(given[0]))
            try:
                getattr(subject, event.method)(*given)
            except PeerError:
                pass  # of a link's connection, which is about to be closed
        if event.answers:
            self._evict_others(subject)
        self._report(subject)

    def _evict_others(self, subject: Any) -> None:
        """Evict whom a command evicted that was refused, or bytes that were held back: these are in no event."""
        self.hub.budget.resize(_UNLIMITED)
        while self._evicted:
            victim = self._find(self._evicted.popleft().victim)
            if victim is not None and victim is not subject:
                victim.evict(BudgetError(0, 0, 0, 0))

    def _find(self, thing: Any) -> Any:
        """Return what a reference names; None if it is gone."""
        if not isinstance(thing, Reference):
            return thing
        engine, name = self.engine, thing.name
        match thing.kind:
            case "session":
                return self.sessions.get(name)
            case "transport":
                session = self.sessions.get(name)
                return None if session is None else session.owner
            case "store" | "keyspace":
                store = next((one for one in self.hub.stores if name_of(one) == name), None)
                return store if store is None or thing.kind == "store" else store.keyspace
            case "single":
                return None if engine.links is None else engine.links.singles.get(name)
            case "link":
                return None if engine.links is None else engine.links.links.get(name)
            case "carrier":
                link = None if engine.links is None else engine.links.known(name)
                return None if link is None else link.carrier
            case "error":
                return ProtocolError(name)
            case "answers":
                return lambda *_: self._answers.popleft()
        return {"hub": self.hub, "named": engine.named, "links": engine.links}[thing.kind]

    def _report(self, subject: Any) -> None:
        """Take what was given to connections."""
        pending, self.hub.pending_flush = self.hub.pending_flush, []
        sessions = dict.fromkeys(one for one in (subject, *pending) if isinstance(one, ServerSession))
        for session in sessions:
            owner = session.owner
            if session.out and not (isinstance(owner, Transport) and owner.shares_connection()):
                out = list(session.out)
                if isinstance(owner, Keeper):
                    owner.flush()
                elif isinstance(owner, Transport) and owner.single is not None:
                    owner.single.keep(out)
                session.out.clear()
                session.unsent = 0
                self.given(session, out)

    # Called by the engine

    def enter(self, subject: Any, method: str, *given: Any) -> Any:
        return getattr(subject, method)(*given)

    def receive(self, session: ServerSession, chunk: bytes) -> None:
        session.receive(chunk)

    def answer(self, ask: Callable[[], Any]) -> Any:
        return self._answers.popleft()

    def hide(self, secret: bytes) -> bytes:
        return secret  # it is hidden already

    def steps(self, steps: Generator[None, None, Any]) -> Generator[None, None, Any]:
        self.inquiries += 1
        return self._noted(self.inquiries, steps)

    def _noted(self, command: int, steps: Generator[None, None, Any]) -> Generator[None, None, Any]:
        while self._recorder is None:
            answer = self._answers[0] if self._answers else None
            if isinstance(answer, Reply) and answer.command == command:
                self._answers.popleft()
                return answer.result
            yield
        return (yield from self._recorder.reply_of(command, steps))

    def opened(self, session: ServerSession) -> None:
        self.opened_sessions += 1
        self.sessions[self.opened_sessions] = session
        self.numbers[session] = self.opened_sessions

    def left(self, session: ServerSession) -> None:
        del self.sessions[self.numbers.pop(session)]

    def evicts(self, victim: Any, wanted: int) -> None:
        pass

    def victims(self, wanted: int) -> list[Any]:
        clock = self.hub.clock
        victims = []
        while self._evicted and self._evicted[0][:3] == (clock.points, clock.done, wanted):
            victims.append(self._find(self._evicted.popleft().victim))
        return victims


def _ignore(*_: object) -> None:
    pass


def _close(transport: Transport) -> None:
    transport.close()
