"""What the links of one server share, and the calls that they defer.

Without I/O: the server calls `LinkWork.work` after each `on_work`. This module must not know what a link is.

Invariant: a portion of work takes no longer than a few milliseconds.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from ..session.server import ServerSession
from ..session.store import PORTION, Store
from ..session.transport import Keeper, Transport
from .resume import Outputs

_CLOSING: Final = 8
"""Closing a session takes as long as handling this many frames."""

_STEPS: Final = 4
"""Commands under way continued before other peers are served."""

_LINKS: Final = 256
"""Links written to before other peers are served."""


class LinkWork:
    """What all links of a server share. The base class of `LinkRegistry`."""

    def __init__(self, store: Store, grace: float, keep_alive: float = 5.0, portion: int = PORTION) -> None:
        """`portion` is how many frames are handled, sessions closed or items offered before other peers are served."""
        self.store = store
        self.portion = portion
        self.grace = grace
        self.keep_alive = keep_alive
        self.sessions: int = 0
        """Sessions on all links, without those of single links."""
        self.suspended: dict[bytes, bool] = {}
        """Ids of the single links that have no connection now."""
        self.attaching: dict[Keeper, ServerSession] = {}
        """Single links that will use another connection once its reply to LINK has left, and its session."""
        self.skipped: int = 0
        """How often sessions were skipped, so far."""
        self.clock = store.hub.clock
        self.outputs: Outputs | None = None
        """Where links add what they send, if a checksum of that is needed."""
        self.ticked: float = self.clock.now
        """The time of the last `tick`."""
        self.on_work: Callable[[], object] = ignore
        """Called when there is work after none: call `work` soon."""
        self.on_link: Callable[[], object] = ignore
        """Called when there is a link after none: call `tick` once a second from now on."""
        self.on_end: Callable[[object, str], object] = ignore
        """Called when a link that still has sessions ends, with the reason."""
        self.on_refused: Callable[[str, int], object] = ignore
        """Called with the host and port of a rank whose session exceeds the limit."""
        self.on_refusal: Callable[[str, str, str], object] = ignore
        """Called when a link, or a session on one, is refused, with the peer's host, the peer and the reason."""
        self.on_examined: Callable[[Any, int, bytes], object] = ignore
        """Called with a link, the number of a question and the report that answers it. It is no part of the event: it
        must not enter the stores."""
        self.on_failure: Callable[[Transport], object] | None = None
        """Called in an exception handler to close a session that failed. Without it, the exception is raised."""
        self.stopping = False
        self._scheduled = False
        """Whether `work` will be called."""
        self._to_close: list[ServerSession] = []
        """Connections whose links were closed by their clients."""
        self._to_end: deque[Callable[[int], bool]] = deque()
        """Calls that close sessions of links that are over, up to a number; they return whether all are closed."""
        self._to_offer: deque[Callable[[int], bool]] = deque()
        """Calls that offer items to skipped sessions, up to a number; they return whether all are offered."""
        self._to_resume: deque[Callable[[], int]] = deque()
        """Calls that execute held-back requests; they return the cost, in frames."""
        self._to_step: deque[Callable[[], object]] = deque()
        """Calls that continue commands of sessions that have no connection."""
        self._to_send: deque[Callable[[], int]] = deque()
        """Calls that send the frames of links; they return how many of their sessions had waited."""

    def expect_ticks(self) -> None:
        """Have `tick` called from now on."""
        self.ticked = self.clock.now
        self.on_link()

    def forget_link(self, identity: bytes) -> None:
        raise NotImplementedError

    def forget_single(self, identity: bytes) -> None:
        raise NotImplementedError

    def make_way(self, session: ServerSession) -> None:
        """If a new session is one too many for its token, end those of the token longest without a connection.

        A session that resumes is not new: it is admitted whatever is suspended.
        """
        raise NotImplementedError

    def fail(self, transport: Transport) -> None:
        """Close a session after an internal error. Call it in the exception handler."""
        if self.on_failure is None:
            raise
        self.on_failure(transport)

    # For later

    def close_later(self, carrier: ServerSession) -> None:
        self._to_close.append(carrier)
        self._schedule()

    def end_later(self, close_some: Callable[[int], bool]) -> None:
        self._to_end.append(close_some)
        self._schedule()

    def offer_later(self, offer_some: Callable[[int], bool]) -> None:
        self._to_offer.append(offer_some)
        self._schedule()

    def resume_later(self, resume: Callable[[], int]) -> None:
        self._to_resume.append(resume)
        self._schedule()

    def step_later(self, step: Callable[[], object]) -> None:
        self._to_step.append(step)
        self._schedule()

    def send_later(self, send: Callable[[], int]) -> None:
        self._to_send.append(send)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self.on_work()

    def work(self) -> bool:
        """Make a portion of the deferred calls. Return whether there are more: then call it again soon.

        Sessions that have got output are in `Hub.pending_flush`.
        """
        if self.clock.enters(self, "work"):
            return self._scheduled
        while self._to_close:
            owner = self._to_close.pop().owner
            if isinstance(owner, Transport):
                owner.close()
        if self._to_end and self._to_end[0](max(1, self.portion // _CLOSING)):
            self._to_end.popleft()
        if self._to_offer and self._to_offer[0](self.portion):
            self._to_offer.popleft()
        self._take_turns(self._to_resume, len(self._to_resume))
        for _ in range(min(len(self._to_step), _STEPS)):
            self._to_step.popleft()()
        self._take_turns(self._to_send, min(len(self._to_send), _LINKS))
        self._scheduled = bool(
            self._to_close or self._to_end or self._to_offer or self._to_resume or self._to_step or self._to_send
        )
        return self._scheduled

    def _take_turns(self, calls: deque[Callable[[], int]], most: int) -> None:
        spent = 0
        for _ in range(most):
            if spent >= self.portion:
                break
            spent += calls.popleft()()

    def end_all(self) -> None:
        """Close at once all sessions of links that are over."""
        while self._to_end:
            if self._to_end[0](self.portion):
                self._to_end.popleft()


def ignore(*_: object) -> None:
    """Stand in for a callback that is not set."""
