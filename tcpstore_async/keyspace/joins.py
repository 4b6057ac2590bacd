"""Joins: each rank counts once, however many connections it joins with.

A rank of ours joins a counter with a token of its own, which adds 1 to the counter if the token is new. (PyTorch's
client has no token: it sends ADD, which `keyspace.py` executes, and counts as often as it asks.) This module keeps the
tokens, by how many waiters each rank is represented, and how many ranks were lost. It does not know how values are
stored, connections, or what a token stands for.

Invariant: `lost` is the number of tokens without waiters, except those of ranks that left with LEAVE.
"""

from typing import Final

from ..base.mypyc_shim import mypyc_attr
from ..wire.values import wrap
from .agents import AgentRegistry
from .steps import Later, free_dict
from .waiter_types import Waiter

_LEFT: Final = -1
"""In place of the number of waiters, once one of them has sent LEAVE."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Joins:
    """The ranks that have joined one counter, each by its own token."""

    def __init__(self) -> None:
        self.waiters: dict[bytes, int] = {}
        """The number of waiters that represent each rank, keyed by its token; or `_LEFT`."""
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


class JoinRegistry(AgentRegistry):
    """The ranks that have joined the counters of one store. The base class of `Queues`."""

    def __init__(self, max_size: int, portion: int) -> None:
        super().__init__(max_size, portion)
        self.joins: dict[bytes, Joins] = {}
        """By counter: the ranks that have joined."""

    # What the keyspace supplies

    def add(self, key: bytes, amount: int) -> int:
        """Add to a counter and return the sum."""
        raise NotImplementedError

    def make_room_to_add(self, key: bytes, size: int) -> None:
        """Make sure that `add` is possible, and so many bytes more. Raises ProtocolError and as `_make_room`."""
        raise NotImplementedError

    # Commands

    def join(self, waiter: Waiter, key: bytes, token: bytes) -> int:
        """Add 1 to a counter, once for each token, and return the sum. The waiter represents that rank from now on.

        An empty token adds nothing; the sum returned is then less the ranks that were lost: all their waiters left
        without a LEAVE. Raises ProtocolError if the value is not a number.
        """
        joins = self.joins.get(key)
        if not token:
            return wrap(self.number_at(key) - (0 if joins is None else joins.lost))
        if joins is not None and token in joins.waiters:
            total = self.number_at(key)
        else:
            size = self.registration_bytes(token)
            self.make_room_to_add(key, size)
            if joins is None:
                joins = self.joins[key] = Joins()
            joins.add(token, size)
            self.size += size
            total = self.add(key, 1)
        if waiter.joined != (key, token):
            self.depart(waiter)
            joins.represent(token)
            waiter.joined = (key, token)
        return total

    def depart(self, waiter: Waiter) -> None:
        """Let the waiter represent no rank any more, without counting that rank as lost."""
        if waiter.joined is None:
            return
        key, token = waiter.joined
        waiter.joined = None
        joins = self.joins.get(key)
        if joins is not None:
            joins.depart(token)

    # Called by the keyspace

    def lose(self, waiter: Waiter, key: bytes, token: bytes) -> None:
        """Forget a waiter that represents a rank, and has left."""
        waiter.joined = None
        joins = self.joins.get(key)
        if joins is not None:
            joins.lose(token)

    def forget_joins(self, key: bytes) -> None:
        """Forget who has joined a counter that is deleted."""
        joins = self.joins.pop(key)
        self.size -= joins.size
        if len(joins.waiters) > self.portion:
            self.defer(Later(free_dict(joins.waiters, self.portion), aside=True))
