"""Drive a session in memory, with input cut into any pieces."""

from __future__ import annotations

from collections.abc import Iterable

from properties.fleet import HANDSHAKE, registrations
from tcpstore_async.base.errors import LimitError, PeerError
from tcpstore_async.base.limits import Limits
from tcpstore_async.keyspace.keyspace import Keyspace
from tcpstore_async.session.peer import Peer
from tcpstore_async.session.server import ServerSession
from tcpstore_async.session.store import Store
from tcpstore_async.wire.values import framed, unpack

Outcome = tuple[bytes, str]
"""The replies to a peer, and why its connection was closed, if it was."""


def session_on(store: Store) -> ServerSession:
    """Return a session without input."""
    return ServerSession(store, None, "::1", 1, 0.0)


def with_store_of(most: int) -> Store:
    """Return a store of which the keyspace alone is limited, so that no peer is evicted for another."""
    store = Store(Limits())
    store.budget.keyspace = store.share.keyspace = Keyspace(Limits())
    store.keyspace.on_full = None
    store.keyspace.max_size = most
    return store


def greeted(store: Store | None = None, limits: Limits | None = None) -> ServerSession:
    """Return a session that has sent VALIDATE."""
    session = session_on(store or Store(limits or Limits()))
    session.receive(HANDSHAKE.frame)
    return session


def take(session: Peer) -> bytes:
    """Take the replies, as a server does."""
    sent = b"".join(session.out)
    session.out.clear()
    session.unsent -= len(sent)
    return sent


def feed(session: ServerSession, chunks: Iterable[bytes]) -> Outcome:
    """Pass the chunks one by one, taking replies at once; a session that raises is left."""
    replies = []
    try:
        for chunk in chunks:
            session.receive(chunk)
            replies.append(take(session))
            while session.stalled():
                session.receive(b"")
                replies.append(take(session))
    except PeerError as error:
        replies.append(take(session))
        session.leave()
        return b"".join(replies), _reason(error)
    return b"".join(replies), ""


def feed_as_server(session: ServerSession, chunks: Iterable[bytes]) -> Outcome:
    """As `feed`, but large values are received into their own buffer."""
    replies = []
    try:
        for chunk in chunks:
            at = 0
            while at < len(chunk):
                bulk = session.large_value()
                if bulk is None:
                    session.receive(chunk[at : at + 65536])
                    at += 65536
                else:
                    with bulk.free_space() as space:
                        count = min(len(space), len(chunk) - at)
                        space[:count] = chunk[at : at + count]
                    bulk.fill(count)
                    session.receive(b"")
                    at += count
                replies.append(take(session))
                while session.stalled():
                    session.receive(b"")
                    replies.append(take(session))
    except PeerError as error:
        replies.append(take(session))
        session.leave()
        return b"".join(replies), _reason(error)
    return b"".join(replies), ""


def _reason(error: PeerError) -> str:
    # How much of a list has arrived when its size is noticed depends on the cuts; that it is noticed does not.
    return error.limit if isinstance(error, LimitError) else str(error)


def cut(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    """Cut the data into pieces; cuts beyond its end count from its start again."""
    at = sorted({cut % (len(data) + 1) for cut in cuts})
    return [data[start:stop] for start, stop in zip([0, *at], [*at, len(data)], strict=True)]


def everything(store: Store) -> object:
    """Return all that is stored and awaited, in plain types."""
    keyspace = store.keyspace
    return (
        {key: unpack(framed(value)) for key, value in keyspace.values.items()},
        {key: list(map(unpack, items)) for key, items in keyspace.queues.items()},
        {key: len(waiters) for key, waiters in registrations(keyspace).items()},
        dict(keyspace.handoffs),
        {
            key: sorted((target, len(group)) for target, group in counter.awaiting.items())
            for key, counter in keyspace.counters.items()
        },
        {key: (dict(joins.waiters), joins.lost) for key, joins in keyspace.joins.items()},
        {key: (rounds.status(None), list(rounds.agents)) for key, rounds in keyspace.rounds.items()},
        {key: ended.names for key, ended in keyspace.ended.items()},
    )


NOTHING: object = ({}, {}, {}, {}, {}, {}, {}, {})
"""What `everything` returns for a store that holds nothing."""


def measured(store: Store) -> int:
    """Return the size of the store in bytes."""
    return store.keyspace.size
