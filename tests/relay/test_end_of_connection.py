"""A relay notices that its connection has ended, also when bytes have arrived together with the end."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import pytest

from support import LIMIT
from tcpstore_async.links.frames import NEW, LinkReply
from tcpstore_async.links.link_client import ClientLink
from tcpstore_async.relay.core import Relay
from tcpstore_async.server.listen_socket import listen


@pytest.mark.parametrize("count", [2, 10])
async def test_the_end_behind_bytes_is_noticed(count: int) -> None:
    """Of both, the poller reports one event, whether or not a turn of the loop suffices to read the bytes."""
    relay = Relay(listen("127.0.0.1", 0), ClientLink)
    lost: asyncio.Queue[str] = asyncio.Queue()
    relay.on_lost = lost.put_nowait
    peer = ClientLink()  # frames are the same in both directions
    for number in range(count):
        peer.add_data(1, number.to_bytes(32_000, "big"))
    peer.seal()
    assert peer.kept is not None
    data = b"".join(peer.kept.pieces)
    upstream, server = socket.socketpair()  # which has room for all of it, and then the end, at once
    server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    upstream.setblocking(False)
    try:
        relay.link.answered(msgspec.json.encode(LinkReply(NEW, "instance")))
        with server:
            server.setblocking(False)
            assert server.send(data) == len(data)
        relay.connect(upstream)
        reason = await asyncio.wait_for(lost.get(), LIMIT)
        assert reason in ("the server closed it", "Broken pipe"), "the latter if it acknowledges before it has read all"
        assert relay.link.taken == len(data)
    finally:
        relay.stop()
        upstream.close()
