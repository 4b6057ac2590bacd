"""What is kept for the next connection of a link."""

from __future__ import annotations

from tcpstore_async.base.limits import Limits
from tcpstore_async.links.resume import Resumable
from tcpstore_async.session.store import Store
from tcpstore_async.session.unsent import Unsent


def test_what_is_kept_is_shared_with_every_next_connection() -> None:
    """A peer that sends LINK again and again has nothing copied, and makes the server hold no more."""
    budget = Store(Limits()).budget
    before = budget.used()
    stream = Resumable(budget)
    for number in range(1000):
        stream.keep([b"%03d" % number])
    stream.keep([bytes(1 << 20)])
    first = stream.rest()
    kept = budget.used()
    connections = []
    for _ in range(10):
        again = stream.rest()
        assert [id(piece) for piece in again] == [id(piece) for piece in first]
        connection = Unsent(budget)
        connection.add(again)
        connections.append(connection)
    assert budget.used() - kept < 20_000
    stream.keep([b"more"])
    assert b"".join(first) == b"".join(b"%03d" % number for number in range(1000)) + bytes(1 << 20)
    for connection in connections:
        connection.release()
    stream.acknowledged(stream.sent)
    assert (stream.kept, budget.used()) == (None, before)
