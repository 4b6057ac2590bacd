"""What every link is at the server, whatever its bytes mean: who may resume it, and what happens without a connection.

Without I/O. It must not know frames, sessions, or how bytes travel.

Invariants: a link resumes only for a client that knows its secret, and never by a LINK older than the last. No item is
offered to a session whose client may never come back; the queues for which sessions were skipped are offered their
items once there is a connection. Everything that a link holds is counted in the budget.
"""

from collections.abc import Callable
from hmac import compare_digest
from itertools import islice
from typing import Final

from ..base.errors import BudgetError
from ..session.budget import Holder
from ..session.store import Store
from .resume import Resumable
from .work import LinkWork, ignore

_SKIPPED_SHIFT: Final = 4
"""Skipping sixteen sessions takes as long as offering one item."""


class Carrier(Holder):
    """One link in its registry and in the budget: `backlog` has the bytes that its client has not acknowledged."""

    def __init__(
        self,
        registry: LinkWork,
        identity: bytes,
        secret: bytes,
        stream: Resumable,
        size: int,
        on_evict: Callable[[BudgetError], object],
    ) -> None:
        """`size` is counted for the link, besides its sessions and bytes; `on_evict` ends it if it holds too much."""
        super().__init__()
        self.registry = registry
        self.identity = identity
        self.secret = secret
        self.stream = stream
        stream.outputs = registry.outputs
        self.size = size
        self.on_evict = on_evict
        self.attempt: int = 0
        """The number of the last LINK that succeeded; 0 if its client does not count."""
        self.connected = False
        self.lost: float = registry.clock.now
        """When its last connection broke, in seconds of the server's clock."""
        self.queues: dict[tuple[Store, bytes], None] = {}
        """Stores and the names of queues in them for which its sessions were skipped, in the order of skipping."""
        registry.store.budget.enter(self, size)

    def introduction_bytes(self) -> int:
        return 0

    def evict(self, error: BudgetError) -> None:
        self.on_evict(error)

    # The connection

    def refusal(self, secret: bytes, attempt: int) -> str:
        """Return why a LINK with this secret and number may not resume or replace the link; "" if it may."""
        if not compare_digest(self.secret, secret):
            return "wrong secret"
        if self.attempt and attempt <= self.attempt:  # it was delayed, or recorded and replayed
            return f"attempt {attempt} is stale: the link is already at attempt {self.attempt}"
        return ""

    def attach(self) -> None:
        """Note that there is a connection; offer the items of skipped queues soon."""
        self.connected = True
        if self.queues:
            self.registry.offer_later(self.offer_some)

    def detach(self) -> None:
        """Note that the connection is gone: the grace period begins."""
        self.connected = False
        self.lost = self.registry.clock.now

    def overdue(self, now: float) -> str:
        """Return why a link without a connection must end now: the grace period is over; "" if it is not."""
        gone = now - self.lost
        return f"it had no connection for {gone:.0f} s" if gone >= self.registry.grace else ""

    # Queues

    def pass_over(self, store: Store, queue: bytes) -> bool:
        """Return whether a queue must skip the link's sessions now; see `Waiter.skip_suspended`."""
        if self.connected:
            return False
        self.queues[store, queue] = None
        self.registry.skipped += 1
        return True

    def offer_some(self, most: int) -> bool:
        """Offer at most `most` items; return whether all are offered.

        Skipping sessions of other links, which may have no connection either, counts too.
        """
        registry = self.registry
        most += registry.skipped >> _SKIPPED_SHIFT
        for place in list(islice(self.queues, registry.portion)):
            if not self.connected:
                return True
            store, queue = place
            store.activate()
            while store.keyspace.offer(queue):
                most -= 1
                if most <= registry.skipped >> _SKIPPED_SHIFT:
                    return False
            del self.queues[place]
            if most <= registry.skipped >> _SKIPPED_SHIFT:
                break
        return not self.queues

    # The budget

    def count(self, added: int = 0) -> None:
        """Charge the budget for the bytes kept and for `added` ones. Evict a peer, perhaps this one, if it is full."""
        budget = self.registry.store.budget
        self.backlog = self.stream.kept
        growth = added - self.held
        if growth:
            self.held = added
            budget.charge(growth)
        try:
            budget.relieve(self)
        except BudgetError as error:
            self.evict(error)

    def forget(self) -> None:
        """Count nothing any more, and keep no bytes: the link is over."""
        self.registry.store.budget.forget(self, self.size)
        self.stream.forget()
        self.on_evict = ignore  # else it would be part of a cycle
