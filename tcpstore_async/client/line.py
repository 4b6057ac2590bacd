"""Threads in line, for a connection or for news.

Knows: who has waited for how long. Must not know: what for.
Invariant: whoever is told is out of the line; whoever is in it will be told, or leaves.
"""

from collections import deque
from threading import Lock, get_ident


class Turn:
    """One thread's place in a line."""

    def __init__(self) -> None:
        self.user = get_ident()
        self.told = Lock()
        """Can be acquired once this thread has been told."""
        self.starving = False
        """Whether it has waited for long, and is counted as such."""

    def wait(self, seconds: float | None) -> bool:
        """Whether it has been told by then."""
        return self.told.acquire(timeout=-1 if seconds is None else seconds)


class Line:
    """Threads that wait to be told of a change. All of it is done with the client's lock held.

    Nobody waits with the lock: unlike a Condition, this stays whole wherever an interrupt strikes.
    """

    def __init__(self) -> None:
        self.turns: deque[Turn] = deque()

    def join(self, turn: Turn) -> None:
        if turn not in self.turns:
            turn.told.acquire(blocking=False)
            self.turns.append(turn)

    def leave(self, turn: Turn) -> None:
        if turn in self.turns:
            self.turns.remove(turn)

    def tell(self) -> None:
        """Tell the first. A handler of signals may do the same in the midst of it, and tells the same one: that one
        has both to choose from. Nor is one left out that was not told, wherever an interrupt strikes.
        """
        if self.turns:
            turn = self.turns[0]
            try:
                turn.told.release()
            except RuntimeError:
                pass  # it has been told
            try:
                self.turns.remove(turn)
            except ValueError:
                pass  # the handler has taken it out

    def tell_all(self) -> None:
        while self.turns:
            self.tell()
