"""Joins: each rank counts once, however many connections it joins with.

A rank joins a counter with a token of its own, and `Keyspace.join` adds 1 to the counter if the token is new. This
module keeps the tokens, by how many waiters each rank is represented, and how many ranks were lost. It does not know
values, connections, or what a token stands for.

Invariant: `lost` is the number of tokens without waiters, except those of ranks that left with LEAVE.
"""

from typing import Final

_LEFT: Final = -1
"""In place of the number of waiters, once one of them has sent LEAVE."""


class Joins:
    """The ranks that have joined one counter, each by its own token."""

    def __init__(self) -> None:
        self.waiters: dict[bytes, int] = {}
        """By token: the number of waiters that represent the rank, or `_LEFT`."""
        self.lost: int = 0
        """Tokens of ranks that lost all their waiters without a LEAVE."""
        self.size: int = 0
        """Bytes counted for the tokens."""

    def add(self, token: bytes, size: int) -> None:
        """Add a new token, for which `size` bytes are counted. `represent` must follow."""
        self.waiters[token] = 0
        self.lost += 1
        self.size += size

    def represent(self, token: bytes) -> None:
        """Count one more waiter for this rank, unless it has left."""
        waiters = self.waiters[token]
        if waiters >= 0:
            self.waiters[token] = waiters + 1
            if waiters == 0:
                self.lost -= 1

    def depart(self, token: bytes) -> None:
        """Let the rank leave: it is not lost, whatever becomes of its waiters."""
        if token in self.waiters:
            if self.waiters[token] == 0:
                self.lost -= 1
            self.waiters[token] = _LEFT

    def lose(self, token: bytes) -> None:
        """Count one waiter less for this rank; the last one is a loss."""
        waiters = self.waiters.get(token, _LEFT)
        if waiters > 0:
            self.waiters[token] = waiters - 1
            if waiters == 1:
                self.lost += 1
