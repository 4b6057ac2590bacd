"""Queues of threads that wait for a connection or an event.

The module must not know what they wait for. Invariant: a thread that has been notified is no longer in the queue; one
in the queue will be notified, or leaves.
"""

from collections import deque
from threading import Lock, get_ident


class Ticket:
    """One thread's place in a queue."""

    def __init__(self) -> None:
        self.user = get_ident()
        self.notified = Lock()
        """Locked until this thread is notified."""
        self.starving = False
        """Whether the pool counts the thread as starving."""

    def wait(self, seconds: float | None) -> bool:
        """Wait to be notified; return whether it was. None means no timeout."""
        return self.notified.acquire(timeout=-1 if seconds is None else seconds)


class WaitQueue:
    """Threads that wait to be notified, first come, first served. Every method needs the client's lock.

    Unlike a Condition, it stays consistent wherever an interrupt strikes; no thread waits with the lock held.
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

        A signal handler that calls this in the middle of it notifies the same thread, which then finds both connections
        free. Wherever an interrupt strikes, no thread leaves the queue without being notified.
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
