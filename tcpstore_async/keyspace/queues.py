"""Queues: items in order, from which a pop takes the oldest.

A `Queues` knows the items of one store; which waiter an item wakes is known to `waiters.py`, and who may still return
an item to `leases.py`. It must not know values.

Invariant: `queue_count` and `size` count a queue while it has items, or while some are leased.
"""

from collections import deque

from ..base.errors import ProtocolError
from ..base.limits import ENTRY_BYTES, QUEUE_BYTES
from ..wire.values import Framed
from .joins import JoinRegistry
from .steps import Running, pause


class Queues(JoinRegistry):
    """The queues of one store. The base class of `Leases`."""

    def __init__(self, max_size: int, portion: int) -> None:
        super().__init__(max_size, portion)
        self.queues: dict[bytes, deque[Framed]] = {}
        """Never holds an empty queue."""
        self.leased: dict[bytes, int] = {}
        """Number of leased items, keyed by queue. Such a queue counts even while it is empty: they may go back."""
        self.queue_count: int = 0
        """Number of queues with items, or with leased ones."""
        self.reserved: dict[bytes, Framed] = {}
        """Information about the server: visible to GET, CHECK and WAIT, read-only, and no keys of the store."""

    def queue_push(self, key: bytes, value: Framed) -> None:
        """Append to a queue and wake the next waiter. Raises ProtocolError for a reserved key."""
        queue = self.queues.get(key)
        growth = ENTRY_BYTES + len(value)
        new = 0
        if queue is None:
            if key in self.reserved:
                raise ProtocolError(f"key {key.decode()} is read-only")
            if key not in self.leased:
                growth += len(key) + QUEUE_BYTES
                new = 1
        self._make_room(growth, new)
        self.queue_count += new
        if queue is None:
            queue = self._create_queue(key)
        queue.append(value)
        self.size += growth
        if key in self.waiters:
            self.wake_next(key)
            if self._woken > self.portion:
                self._woken = 0
                self.running = Running(pause())

    def _create_queue(self, key: bytes) -> deque[Framed]:
        """Add an empty queue, for the caller to put an item into."""
        if self.noting:
            self.note(key)
            self.close_group(key)
        queue: deque[Framed] = deque()
        self.queues[key] = queue
        return queue

    def queue_pop(self, key: bytes) -> tuple[int, Framed | None]:
        """Return the length before the pop and, unless that is 0, the oldest item."""
        queue = self.queues.get(key)
        if queue is None:
            return 0, None
        length = len(queue)
        item = self._take(key, queue)
        self.size -= ENTRY_BYTES + len(item)
        return length, item

    def _take(self, key: bytes, queue: deque[Framed]) -> Framed:
        """Remove the oldest item, which still counts, and the queue if that was the last."""
        item = queue.popleft()
        if not queue:
            if self.noting:
                self.note(key)
                self.close_group(key)
            del self.queues[key]
            if key not in self.leased:
                self._forget_queue(key)
        return item

    def _forget_queue(self, key: bytes) -> None:
        """Stop counting a queue."""
        self.queue_count -= 1
        self.size -= len(key) + QUEUE_BYTES

    def queue_len(self, key: bytes) -> int:
        queue = self.queues.get(key)
        return 0 if queue is None else len(queue)
