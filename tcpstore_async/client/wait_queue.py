"""Queues of threads that wait for a connection, or for an event.

The module knows which thread has waited for how long, and must not know what for. Invariant: a thread that has been
notified is no longer in the queue; one that is in the queue will be notified, or leaves.
"""

from collections import deque
from threading import Lock, get_ident


class Ticket:
    """One thread's place in a queue."""

    def __init__(self) -> None:
        self.user = get_ident()
        self.notified = Lock()
        """Can be acquired once this thread has been notified."""
        self.starving = False
        """Whether it is counted as having waited for long."""

    def wait(self, seconds: float | None) -> bool:
        """Wait to be notified; return whether it was. None means no timeout."""
        return self.notified.acquire(timeout=-1 if seconds is None else seconds)


class WaitQueue:
    """Threads that wait to be notified. Every method needs the client's lock.

    No thread waits with the lock held: unlike a Condition, this stays consistent wherever an interrupt strikes.
    """

    def __init__(self) -> None:
        self.tickets: deque[Ticket] = deque()

    def join(self, ticket: Ticket) -> None:
        if ticket not in self.tickets:
            ticket.notified.acquire(blocking=False)
            self.tickets.append(ticket)

    def leave(self, ticket: Ticket) -> None:
        if ticket in self.tickets:
            self.tickets.remove(ticket)

    def notify(self) -> None:
        """Notify the first thread.

        A signal handler that does the same in the middle of this notifies the same thread, which then finds both
        connections. No thread leaves the queue without being notified, wherever an interrupt strikes.
        """
        if self.tickets:
            ticket = self.tickets[0]
            try:
                ticket.notified.release()
            except RuntimeError:
                pass  # it has been notified
            try:
                self.tickets.remove(ticket)
            except ValueError:
                pass  # a signal handler has removed it

    def notify_all(self) -> None:
        while self.tickets:
            self.notify()
