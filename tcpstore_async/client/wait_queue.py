"""Threads in line, for a connection or for news.

Knows: who has waited for how long. Must not know: what for.
Invariant: whoever is told is out of the line; whoever is in it will be told, or leaves.
"""

from collections import deque
from threading import Lock, get_ident


class Ticket:
    """One thread's place in a line."""

    def __init__(self) -> None:
        self.user = get_ident()
        self.notified = Lock()
        """Can be acquired once this thread has been told."""
        self.starving = False
        """Whether it has waited for long, and is counted as such."""

    def wait(self, seconds: float | None) -> bool:
        """Whether it has been told by then."""
        return self.notified.acquire(timeout=-1 if seconds is None else seconds)


class WaitQueue:
    """Threads that wait to be told of a change. All of it is done with the client's lock held.

    Nobody waits with the lock: unlike a Condition, this stays whole wherever an interrupt strikes.
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
        """Tell the first. A handler of signals may do the same in the midst of it, and tells the same one: that one
        has both to choose from. Nor is one left out that was not told, wherever an interrupt strikes.
        """
        if self.tickets:
            ticket = self.tickets[0]
            try:
                ticket.notified.release()
            except RuntimeError:
                pass  # it has been told
            try:
                self.tickets.remove(ticket)
            except ValueError:
                pass  # the handler has taken it out

    def notify_all(self) -> None:
        while self.tickets:
            self.notify()
