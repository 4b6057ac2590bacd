"""A relay and its one connection to the server, played by the test: what it sends, and what it does at the end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import msgspec
import pytest

from support import LIMIT
from tcpstore_async.links.frames import NEW, LinkReply
from tcpstore_async.links.link_client import ClientLink
from tcpstore_async.relay.core import Relay
from tcpstore_async.relay.upstream import Upstream
from tcpstore_async.server.listen_socket import listen
from tcpstore_async.wire.link import CLOSE, LINK, LOST


class Events:
    """A relay, and what it says of its connection."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        self.broken: list[str] = []
        relay.on_lost = self.lost.put_nowait
        relay.on_broken = self.broken.append


@contextmanager
def linked(upstream: socket.socket) -> Iterator[Events]:
    relay = Relay(listen("127.0.0.1", 0), ClientLink)
    events = Events(relay)
    relay.start()
    try:
        upstream.setblocking(False)
        relay.link.answered(msgspec.json.encode(LinkReply(NEW, "instance")))
        relay.connect(upstream)
        yield events
    finally:
        relay.stop()
        upstream.close()


@pytest.fixture
async def relay() -> AsyncIterator[Relay]:
    """A relay whose connection leads to nobody."""
    upstream, server = socket.socketpair()
    with server, linked(upstream) as events:
        yield events.relay


async def reach(relay: Relay, count: int) -> None:
    """Wait until the relay has so many connections."""

    async def wait() -> None:
        while relay.count != count:
            await asyncio.sleep(0)

    await asyncio.wait_for(wait(), LIMIT)


def sealed(peer: ClientLink) -> bytes:
    """What a peer sends: frames are the same in both directions."""
    peer.seal()
    assert peer.kept is not None
    return b"".join(peer.kept.pieces)


# A rank's session is opened with its first bytes, together, or soon if it sends none


async def test_a_session_is_opened_together_with_its_first_bytes(relay: Relay) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", relay.port)
    await reach(relay, 1)
    assert (relay.link.sent, len(relay.silent)) == (0, 1)
    writer.write(b"request")
    while not relay.link.kept:
        await asyncio.sleep(0)
    relay.tick()
    kept = b"".join(relay.link.kept.pieces)
    assert kept.endswith(b"127.0.0.1" + (1 | 7 << 32).to_bytes(8, "little") + b"request")
    assert (relay.link.sent, len(relay.silent)) == (len(kept), 0)
    writer.close()


async def test_a_session_of_a_rank_that_sends_nothing_is_opened_by_the_next_tick(relay: Relay) -> None:
    """The server limits how many there are, and for how long."""
    _, writer = await asyncio.open_connection("127.0.0.1", relay.port)
    await reach(relay, 1)
    relay.tick()
    sent = relay.link.sent
    assert (sent > 0, len(relay.link.streams), len(relay.silent)) == (True, 1, 0)
    relay.tick()
    assert relay.link.sent == sent
    writer.close()


async def test_a_rank_that_has_sent_nothing_outlives_a_connection_of_the_link(relay: Relay) -> None:
    upstream = Upstream(relay, [("127.0.0.1", 1)])
    upstream._grace = LIMIT
    _, writer = await asyncio.open_connection("127.0.0.1", relay.port)
    await reach(relay, 1)
    link = relay.link
    relay.disconnect()
    upstream._lost("reset")
    try:
        assert (relay.link, relay.count, len(relay.silent)) == (link, 1, 1)
    finally:
        upstream._cancel_giving_up()
        writer.close()


async def test_a_rank_that_leaves_without_a_byte_leaves_nothing(relay: Relay) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", relay.port)
    await reach(relay, 1)
    relay.close_ranks()
    await reach(relay, 0)
    relay.tick()
    assert (relay.link.sent, len(relay.silent)) == (0, 0)
    writer.close()


# A server's last replies reach the ranks, whatever else happens to the link


async def test_last_replies_are_taken_from_a_connection_that_cannot_be_written_any_more() -> None:
    """The server stopped while a request was under way, so that its kernel reset the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        upstream = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with server, linked(upstream) as events:
        relay = events.relay
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        writer.write(b"request")
        while not relay.link.kept:
            await asyncio.sleep(0)
        peer = ClientLink()
        peer.add_data(1, b"reply")
        peer.add(CLOSE, LINK, LOST)
        server.sendall(sealed(peer))
        server.close()  # before it has read the request
        relay.acknowledge()
        assert (await asyncio.wait_for(reader.readexactly(5), LIMIT)) == b"reply"
        assert (events.lost.empty(), events.broken) == (True, ["the server has stopped"])
        writer.close()


async def test_what_tls_has_buffered_is_read_without_an_event() -> None:
    peer = ClientLink()
    peer.add(CLOSE, LINK, LOST)
    buffered = [sealed(peer)]

    class Buffering(socket.socket):
        def recv(self, size: int, flags: int = 0) -> bytes:
            return buffered.pop() if buffered else super().recv(size, flags)

    ours, theirs = socket.socketpair()
    with theirs, linked(Buffering(fileno=ours.detach())) as events:
        await asyncio.sleep(0)
        assert events.broken == ["the server has stopped"]


@pytest.mark.parametrize("count", [2, 10])
async def test_the_end_behind_bytes_is_noticed(count: int) -> None:
    """Of both, the poller reports one event, whether or not a turn of the loop suffices to read the bytes."""
    peer = ClientLink()
    for number in range(count):
        peer.add_data(1, number.to_bytes(32_000, "big"))
    data = sealed(peer)
    upstream, server = socket.socketpair()  # which has room for all of it, and then the end, at once
    server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    with server:
        server.setblocking(False)
        assert server.send(data) == len(data)
    with linked(upstream) as events:
        reason = await asyncio.wait_for(events.lost.get(), LIMIT)
        assert reason in ("the server closed it", "Broken pipe"), "the latter if it acknowledges before it has read all"
        assert events.relay.link.taken == len(data)
