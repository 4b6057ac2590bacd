"""Leases: pops that their client confirms, so that an item that does not reach it goes back to its queue.

It must not know how waiters come and go, only that one has left. What an item that goes back wakes is known to
`waiters.py`.

Invariant: an item that is leased is in no queue. The waiter has it until it confirms it, and it goes back to the front
of its queue when it is returned or the waiter leaves.
"""

from collections import deque
from typing import Final

from ..base.errors import ProtocolError
from ..base.limits import ENTRY_BYTES, PARKED_BYTES
from ..wire.values import ABSENT, Framed
from .queues import Queues
from .waiter_types import AWAITING_ITEM, Waiter

MAX_LEASES: Final = 4096
"""Largest number of unconfirmed leases per waiter: on its departure all go back at once, ahead of later items."""


class Leases(Queues):
    """The leases of one store. The base class of `Keyspace`."""

    def lease(self, waiter: Waiter, key: bytes, ticket: int) -> tuple[int, Framed | None]:
        """As `queue_pop`, but the item goes back unless the waiter confirms the ticket.

        Raises ProtocolError for a ticket that is in use, and for too many leases.
        """
        leases = waiter.leases
        pending = waiter.state == AWAITING_ITEM
        if (leases is not None and ticket in leases) or (pending and waiter.number == ticket):
            raise ProtocolError(f"ticket {ticket} is in use")
        if leases is not None and len(leases) + pending >= MAX_LEASES:
            raise ProtocolError(f"too many unconfirmed leases (max {MAX_LEASES})")
        queue = self.queues.get(key)
        if queue is None:
            return 0, None
        length = len(queue)
        self.leased[key] = self.leased.get(key, 0) + 1
        item = self._take(key, queue)
        if leases is None:
            leases = waiter.leases = {}
        leases[ticket] = (key, item)
        self.size += PARKED_BYTES + len(key)  # even above the limit: a full store has to be emptied
        return length, item

    def lease_later(self, waiter: Waiter, key: bytes, ticket: int) -> tuple[int, Framed | None] | None:
        """As `lease` if the key exists. If not: None, and the waiter is granted an item when there is one."""
        leased = self.lease(waiter, key, ticket)
        if leased[0] or self.exists(key):
            return leased
        self._require_idle(waiter)
        self.park_on(waiter, key)
        waiter.state = AWAITING_ITEM
        waiter.awaited = key
        waiter.number = ticket
        return None

    def confirm(self, waiter: Waiter, ticket: int) -> None:
        """Drop the item leased under this ticket, if there is one: it has reached its caller."""
        leases = waiter.leases
        if leases is not None and ticket in leases:
            key, item = leases.pop(ticket)
            self.size -= ENTRY_BYTES + len(item)
            self._end_lease(key)
            if not leases:
                waiter.leases = None

    def _end_lease(self, key: bytes) -> None:
        """Stop counting a lease, and its queue if that has no items, and no others that are leased."""
        self.size -= PARKED_BYTES + len(key)
        left = self.leased[key] - 1
        if left:
            self.leased[key] = left
            return
        del self.leased[key]
        if key not in self.queues:
            self._forget_queue(key)

    def give_back(self, waiter: Waiter, ticket: int) -> Framed:
        """Return the item leased under this ticket to the front of its queue, and wake the next waiter.

        If the lease is still awaited, end that wait and return `ABSENT`; else return nothing.
        """
        if waiter.state == AWAITING_ITEM and waiter.number == ticket:
            self._unpark(waiter)
            return ABSENT
        leases = waiter.leases
        if leases is not None and ticket in leases:
            self._restore([leases.pop(ticket)])
            if not leases:
                waiter.leases = None
        return b""

    def _restore(self, leased: list[tuple[bytes, Framed]]) -> None:
        """Return items to the front of their queues, the oldest first; each wakes the next waiter, as a push does."""
        for key, item in reversed(leased):
            queue = self.queues.get(key)
            if queue is None:
                queue = self._create_queue(key)
            queue.appendleft(item)
            self._end_lease(key)
        if self.waiters:
            self.offer_returned(deque([key for key, _ in leased if key in self.waiters]))
