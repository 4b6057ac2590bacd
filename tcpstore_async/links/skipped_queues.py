"""Queues for which sessions without a connection were skipped. They are offered the items once they are connected.

Invariant: no item is offered to a session whose client may never come back, and none is forgotten when it does.
"""

from itertools import islice
from typing import Final

from ..session.store import Store
from .work import LinkWork

_SKIPPED_SHIFT: Final = 4
"""Skipping sixteen sessions takes as long as offering one item."""


class SkippedQueues:
    """The skipped queues of one link."""

    def __init__(self, registry: LinkWork) -> None:
        self.registry = registry
        self.connected = False
        """Whether the link has a connection."""
        self.queues: dict[tuple[Store, bytes], None] = {}
        """Stores and the names of queues in them, in the order of skipping."""

    def skip_suspended(self, store: Store, queue: bytes) -> bool:
        """Return whether a queue must skip a session now; see `Waiter.skip_suspended`."""
        if self.connected:
            return False
        self.queues[store, queue] = None
        self.registry.skipped += 1
        return True

    def connect(self) -> None:
        """Note that there is a connection; offer the skipped items soon."""
        self.connected = True
        if self.queues:
            self.registry.offer_later(self.offer_some)

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
