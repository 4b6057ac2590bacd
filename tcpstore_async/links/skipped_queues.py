"""Queues whose items were not offered to sessions without a connection, and are offered when they have one again.

Invariant: no item is offered to a session that nobody may come back for, and none is forgotten when somebody does.
"""

from itertools import islice
from typing import Final

from ..session.store import Store
from .work import LinkWork

_SKIPPED_SHIFT: Final = 4
"""Sixteen sessions are skipped in the time in which one is offered an item."""


class SkippedQueues:
    """The queues of one link."""

    def __init__(self, registry: LinkWork) -> None:
        self.registry = registry
        self.connected = False
        """Whether the link has a connection."""
        self.queues: dict[tuple[Store, bytes], None] = {}
        """Each with its store."""

    def skip_suspended(self, store: Store, queue: bytes) -> bool:
        """Return whether no item of a queue must be offered to a session now; see `Waiter.skip_suspended`."""
        if self.connected:
            return False
        self.queues[store, queue] = None
        self.registry.skipped += 1
        return True

    def connect(self) -> None:
        """There is a connection: offer soon what was not offered."""
        self.connected = True
        if self.queues:
            self.registry.offer_later(self.offer_some)

    def offer_some(self, most: int) -> bool:
        """Offer items, at most so many. Returns whether that is done.

        The sessions of other links, which these items skip in turn, cost time too.
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
