"""Numbers about a server's stores, or one of them, that are cheap enough for every second: counters, longest waits.

Facts of few bytes, whatever the number of sessions and keys. Performs no I/O and changes nothing.

Invariant: sessions and keys are counted in portions; between two of them anything may happen.
"""

from collections.abc import Iterator
from heapq import heappush, heappushpop
from typing import Any, Final

from ..base.coercion import parse_digits
from ..base.keys import readable
from ..keyspace.waiter_types import IDLE
from ..session.observer import NEVER
from ..session.server import ServerSession
from ..session.store import Store
from ..wire.commands import WORKERS_KEY
from ..wire.values import read_length
from .inspection import Fact, awaited_keys, client_of

PORTION: Final = 400
"""Sessions, or keys, of one portion: less than 0.1 ms, compiled."""

_MOST_TEXT: Final = 256
"""Most bytes of a key in a reply, which is for a line on a screen."""


class Statistics:
    """One look at the numbers of all stores of a server, or of one."""

    def __init__(self, store: Store, now: float, everyone: bool = True) -> None:
        """Look at `now`, the time of the server's clock. Without `everyone`, look at this store alone."""
        self.everyone = everyone
        self.store = store
        self.now = now
        self.open: int = 0
        """Sessions. `count` sets this and the next three."""
        self.waiting: int = 0
        """Sessions that wait."""
        self.unsent: int = 0
        """Bytes of replies that the kernel has not accepted."""
        self.world_size: int | None = None
        """The largest that a client in this store has sent."""

    def count(self) -> Iterator[None]:
        """Count what only the sessions know, in portions."""
        for number, holder in enumerate(list(self.store.budget.holders), 1):
            if number % PORTION == 0:
                yield
            if not isinstance(holder, ServerSession) or not (self.everyone or holder.store is self.store):
                continue
            self.open += 1
            if holder.state != IDLE:
                self.waiting += 1
            self.unsent += holder.unsent
            if holder.peer and holder.store is self.store:
                size = parse_digits(holder.peer.get("world_size"))
                if size is not None:
                    self.world_size = max(size, self.world_size or 0)

    def counters(self) -> Fact:
        """Return the counters, after `count`. Joins are those of this store, commands those of all stores."""
        store = self.store
        keyspace = store.keyspace
        budget = store.budget
        joined = keyspace.values.get(WORKERS_KEY)
        stores = [one.keyspace for one in self._stores()]
        stored = sum([one.size - one.parked for one in stores])
        parked = sum([one.parked for one in stores])
        requests, lists = (budget.unfinished, budget.lists) if self.everyone else (0, 0)
        used = budget.used() if self.everyone else stored + parked
        return {
            "commands": store.hub.counts(),
            "sessions": {
                "open": self.open,
                "unvalidated": len(store.hub.unvalidated) + len(store.hub.unvalidated_on_links),
                "waiting": self.waiting,
                "unsent_bytes": self.unsent,
            },
            "stores": len(stores),
            "keys": sum([len(one.values) for one in stores]),
            "queues": sum([len(one.queues) for one in stores]),
            "awaited_keys": sum([len(one.waiters) for one in stores]),
            "budget": {
                "limit": budget.limit,
                "used": used,
                "store": stored,
                "waiters": parked,
                "requests": requests,
                "key_lists": lists,
                "connections": used - stored - parked - requests - lists,
            },
            "joins": {
                "joined": joined if isinstance(joined, int) else 0,
                "expected": store.joins,
                "world_size": self.world_size,
            },
        }

    def longest_waits(self, most: int) -> Iterator[Fact]:
        """Yield empty portions, and finally the longest waits, each with one awaited key.

        Sessions that wait for the same are one entry: their number, and the session that has waited longest.
        """
        found: dict[tuple[Store, bytes], list[Any]] = {}
        for number, holder in enumerate(list(self.store.budget.holders), 1):
            if number % PORTION == 0:
                yield {}
            if not isinstance(holder, ServerSession) or holder.state == IDLE:
                continue
            if holder.partial is not None and holder.partial.endless:  # it carries a link
                continue
            if not (self.everyone or holder.store is self.store):
                continue
            since = holder.connected_at if holder.heard_at == NEVER else holder.heard_at
            awaited = holder.store, _awaited(holder)
            known = found.get(awaited)
            if known is None:
                found[awaited] = [1, since, holder]
            else:
                known[0] += 1
                if since < known[1]:
                    known[1:] = [since, holder]
        longest = sorted(found.values(), key=lambda one: float(one[1]))[:most]
        yield {"waits": [self._wait(count, since, holder) for count, since, holder in longest], "different": len(found)}

    def largest_keys(self, most: int) -> Iterator[Fact]:
        """Yield empty portions, and finally the largest values: key, bytes and, if it has a name, store."""
        largest: list[tuple[int, bytes, str]] = []
        portion = 0
        for store in self._stores():
            values = store.keyspace.values
            name = store.name
            for key in list(values):
                portion += 1
                if portion >= PORTION:
                    portion = 0
                    yield {}
                value = values.get(key)
                if value is None:
                    continue
                bytes_ = read_length(value)
                if len(largest) < most:
                    heappush(largest, (bytes_, key, name))
                elif bytes_ > largest[0][0]:
                    heappushpop(largest, (bytes_, key, name))
        found = sorted(largest, reverse=True)
        yield {"largest": [[shown(key), bytes_, *([name] if name else [])] for bytes_, key, name in found]}

    def _stores(self) -> list[Store]:
        return list(self.store.hub.stores) if self.everyone else [self.store]

    def _wait(self, count: int, since: float, session: ServerSession) -> Fact:
        name = session.store.name
        return {
            **({"store": name} if name else {}),
            "key": shown(_awaited(session)),
            "keys": max(1, len(awaited_keys(session))),
            "command": session.slot.command.name,
            "waiting": count,
            "since": round(max(0.0, self.now - since), 3),
            **client_of(session),
        }


def _awaited(session: ServerSession) -> bytes:
    """Return one key that a session waits for; for equal lists, usually the same."""
    return next(iter(awaited_keys(session)), b"")


def shown(key: bytes) -> str:
    """Return a key as text, shortened if it is long."""
    return readable(key) if len(key) <= _MOST_TEXT else readable(key[:_MOST_TEXT]) + "…"
