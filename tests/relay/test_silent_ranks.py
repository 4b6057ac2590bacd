"""A rank's session is opened with its first bytes, together, or soon if it sends none."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import msgspec
import pytest

from support import LIMIT
from tcpstore_async.links.frames import NEW, LinkReply
from tcpstore_async.links.link_client import ClientLink
from tcpstore_async.relay.core import Relay
from tcpstore_async.relay.upstream import Upstream
from tcpstore_async.server.listen_socket import listen


async def reach(relay: Relay, count: int) -> None:
    """Wait until the relay has accepted so many connections."""

    async def wait() -> None:
        while relay.count != count:
            await asyncio.sleep(0)

    await asyncio.wait_for(wait(), LIMIT)


@pytest.fixture
async def relay() -> AsyncIterator[Relay]:
    """Return a relay whose link has a connection to nobody."""
    relay = Relay(listen("127.0.0.1", 0), ClientLink)
    relay.start()
    upstream, server = socket.socketpair()
    try:
        upstream.setblocking(False)
        relay.link.answered(msgspec.json.encode(LinkReply(NEW, "instance")))
        relay.connect(upstream)
        yield relay
    finally:
        relay.stop()
        upstream.close()
        server.close()


async def test_it_is_opened_together_with_its_first_bytes(relay: Relay) -> None:
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


async def test_one_that_sends_nothing_is_opened_by_the_next_tick(relay: Relay) -> None:
    """The server limits how many there are, and for how long."""
    _, writer = await asyncio.open_connection("127.0.0.1", relay.port)
    await reach(relay, 1)
    relay.tick()
    sent = relay.link.sent
    assert (sent > 0, len(relay.link.streams), len(relay.silent)) == (True, 1, 0)
    relay.tick()
    assert relay.link.sent == sent
    writer.close()


async def test_one_that_has_sent_nothing_outlives_a_connection_of_the_link(relay: Relay) -> None:
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


async def test_one_that_leaves_without_a_byte_leaves_nothing(relay: Relay) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", relay.port)
    await reach(relay, 1)
    relay.close_ranks()
    await reach(relay, 0)
    relay.tick()
    assert (relay.link.sent, len(relay.silent)) == (0, 0)
    writer.close()
