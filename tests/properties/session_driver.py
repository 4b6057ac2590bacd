"""Talking to one session in memory, in whatever pieces."""

from __future__ import annotations

from collections.abc import Iterable

from properties.fleet import HANDSHAKE, registrations
from tcpstore_async.errors import LimitError, PeerError
from tcpstore_async.keyspace import Keyspace
from tcpstore_async.limits import Limits
from tcpstore_async.session.server import Engine, ServerSession
from tcpstore_async.values import framed, unpack

Heard = tuple[bytes, str]
"""What a peer was answered, and why its connection was closed, if it was."""


def session_on(engine: Engine) -> ServerSession:
    """A session that has not been talked to."""
    return ServerSession(engine, None, "::1", 1, 0.0)


def with_store_of(most: int) -> Engine:
    """An engine whose store alone is limited, so that nobody but who goes over the limit is closed."""
    engine = Engine(Limits())
    engine.budget.keyspace = Keyspace(Limits())
    engine.keyspace.on_full = None
    engine.keyspace.max_size = most
    return engine


def greeted(engine: Engine | None = None, limits: Limits | None = None) -> ServerSession:
    """A session that may be given commands."""
    session = session_on(engine or Engine(limits or Limits()))
    session.receive(HANDSHAKE.frame)
    return session


def take(session: ServerSession) -> bytes:
    """Read the replies, as the door does."""
    said = b"".join(session.out)
    session.out.clear()
    session.unsent -= len(said)
    return said


def tell(session: ServerSession, chunks: Iterable[bytes]) -> Heard:
    """Send the chunks one by one, reading replies at once; a refused session is left."""
    heard = []
    try:
        for chunk in chunks:
            session.receive(chunk)
            heard.append(take(session))
            while session.stalled():
                session.receive(b"")
                heard.append(take(session))
    except PeerError as error:
        heard.append(take(session))
        session.leave()
        return b"".join(heard), _reason(error)
    return b"".join(heard), ""


def tell_as_door(session: ServerSession, chunks: Iterable[bytes]) -> Heard:
    """As `tell`, but large values are filled into their own buffer."""
    heard = []
    try:
        for chunk in chunks:
            at = 0
            while at < len(chunk):
                bulk = session.large_value()
                if bulk is None:
                    session.receive(chunk[at : at + 65536])
                    at += 65536
                else:
                    with bulk.free_space() as room:
                        count = min(len(room), len(chunk) - at)
                        room[:count] = chunk[at : at + count]
                    bulk.fill(count)
                    session.receive(b"")
                    at += count
                heard.append(take(session))
                while session.stalled():
                    session.receive(b"")
                    heard.append(take(session))
    except PeerError as error:
        heard.append(take(session))
        session.leave()
        return b"".join(heard), _reason(error)
    return b"".join(heard), ""


def _reason(error: PeerError) -> str:
    # What has come of a list when its size is noticed depends on the cuts; that it is noticed does not.
    return error.limit if isinstance(error, LimitError) else str(error)


def cut(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    """The data in pieces; cuts beyond its end count from its beginning again."""
    at = sorted({cut % (len(data) + 1) for cut in cuts})
    return [data[start:stop] for start, stop in zip([0, *at], [*at, len(data)], strict=True)]


def everything(engine: Engine) -> object:
    """All that is stored and awaited, plainly."""
    keyspace = engine.keyspace
    return (
        {key: unpack(framed(value)) for key, value in keyspace.values.items()},
        {key: list(map(unpack, items)) for key, items in keyspace.queues.items()},
        {key: list(waiters.values()) for key, waiters in registrations(keyspace).items()},
        dict(keyspace.handoffs),
        {
            key: sorted((target, len(crowd)) for target, crowd in counter.awaiting.items())
            for key, counter in keyspace.counters.items()
        },
        {key: (dict(joins.connections), joins.lost) for key, joins in keyspace.joins.items()},
    )


NOTHING: object = ({}, {}, {}, {}, {}, {})
"""What `everything` says of an engine that holds nothing."""


def measured(engine: Engine) -> int:
    """What the store counts, in bytes."""
    return engine.keyspace.size
