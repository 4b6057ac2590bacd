"""What the links of one server share, and what they leave for later.

Without I/O: the server calls `LinkWork.work` whenever `on_work` asked for it. This module must not know what a link is:
what is left for later are calls.

Invariant: a portion of work takes no longer than a few milliseconds.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from ..session.server import ServerSession
from ..session.store import PORTION, Store
from ..session.transport import Transport

_CLOSING: Final = 8
"""A session is closed in the time in which so many frames are handled."""

_STEPS: Final = 4
"""Commands that are under way and go on before other peers are served."""

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
        """Of all links, but single ones."""
        self.suspended: dict[bytes, bool] = {}
        """By id, the single links that have no connection now."""
        self.skipped: int = 0
        """How often a session was, so far."""
        self.now: float = 0.0
        """The time of the last `tick`, in seconds of the server's clock."""
        self.clock: Callable[[], float] | None = None
        """Returns the time, where a second matters."""
        self.on_work: Callable[[], object] | None = None
        """Called when there is work after none: have `work` called soon."""
        self.on_link: Callable[[], object] | None = None
        """Called when there is a link after none: have `tick` called from now on, once a second."""
        self.on_end: Callable[[object, str], object] | None = None
        """Called when a link that still had sessions ends, with the reason."""
        self.on_refused: Callable[[str, int], object] | None = None
        """Called with the host and port of a rank whose session the limit does not allow."""
        self.on_refusal: Callable[[str, str, str], object] | None = None
        """Called when a link, or a session on one, is refused, with the peer's host, the peer and the reason."""
        self.on_failure: Callable[[Transport], object] | None = None
        """Called in an exception's handler for a session that failed: close it. Without it, the exception is raised."""
        self.stopping = False
        self._scheduled = False
        """Whether `work` will be called."""
        self._to_close: list[ServerSession] = []
        """Connections whose links have been closed by their clients."""
        self._to_end: deque[Callable[[int], bool]] = deque()
        """Close sessions of links that are over, at most so many; return whether that is done."""
        self._to_offer: deque[Callable[[int], bool]] = deque()
        """Offer items, at most so many, to sessions that were passed over; return whether that is done."""
        self._to_resume: deque[Callable[[], int]] = deque()
        """Execute requests that were held back; return what that cost, compared with a frame."""
        self._to_step: deque[Callable[[], object]] = deque()
        """Go on with commands of sessions that have no connection."""
        self._to_send: deque[Callable[[], int]] = deque()
        """Write to links with frames that belong to no batch yet; return how many of their sessions had waited."""

    def forget_link(self, identity: bytes) -> None:
        """Forget a link, which has ended."""
        raise NotImplementedError

    def forget_single(self, identity: bytes) -> None:
        """Forget a single link, which has ended."""
        raise NotImplementedError

    def make_way(self, session: ServerSession) -> None:
        """End the sessions of a new one's token that have been without a connection for longest, if there are too many.

        One that resumes is not new: its token is known before that is, so it is admitted whatever is suspended.
        """
        raise NotImplementedError

    def refuse(self, host: str, peer: str, reason: str) -> None:
        """Report that something was refused to a peer."""
        if self.on_refusal is not None:
            self.on_refusal(host, peer, reason)

    def time(self) -> float:
        """Return the time, in seconds of the server's clock."""
        return self.now if self.clock is None else self.clock()

    def fail(self, transport: Transport) -> None:
        """Close a session after an exception that is no peer's fault. To be called in its handler."""
        if self.on_failure is None:
            raise
        self.on_failure(transport)

    def expect_ticks(self) -> None:
        """Have `tick` called: a link has no connection."""
        if self.on_link is not None:
            self.on_link()

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
            if self.on_work is not None:
                self.on_work()

    def work(self) -> bool:
        """Do a portion of what was left for later. Returns whether there is more: then call it again, soon.

        Sessions that this gave output to are in `Hub.pending_flush`.
        """
        while self._to_close:
            owner = self._to_close.pop().owner
            if isinstance(owner, Transport):
                owner.close()
        if self._to_end and self._to_end[0](max(1, self.portion // _CLOSING)):
            self._to_end.popleft()
        if self._to_offer and self._to_offer[0](self.portion):
            self._to_offer.popleft()
        self._take_turns(self._to_resume, len(self._to_resume))  # those first that have waited longest
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
