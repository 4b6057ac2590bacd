"""A server's last replies reach the ranks behind a relay, whatever else happens to the link."""

from __future__ import annotations

import asyncio
import socket

import msgspec

from support import LIMIT
from tcpstore_async.links.frames import NEW, LinkReply
from tcpstore_async.links.link_client import ClientLink
from tcpstore_async.relay.core import Relay
from tcpstore_async.server.listen_socket import listen
from tcpstore_async.wire.link import CLOSE, LINK, LOST


async def test_they_are_taken_from_a_connection_that_cannot_be_written_any_more() -> None:
    """The server stopped while a request was under way, so that its kernel reset the connection."""
    relay = Relay(listen("127.0.0.1", 0), ClientLink)
    lost: list[str] = []
    broken: list[str] = []
    relay.on_lost = lost.append
    relay.on_broken = broken.append
    relay.start()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        upstream = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    try:
        upstream.setblocking(False)
        relay.link.answered(msgspec.json.encode(LinkReply(NEW, "instance")))
        relay.connect(upstream)
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        writer.write(b"request")
        while not relay.link.kept:
            await asyncio.sleep(0)
        peer = ClientLink()  # frames are the same in both directions
        peer.add_data(1, b"reply")
        peer.add(CLOSE, LINK, LOST)
        peer.seal()
        assert peer.kept is not None
        server.sendall(b"".join(peer.kept.pieces))
        server.close()  # before it has read the request
        relay.acknowledge()
        assert (await asyncio.wait_for(reader.readexactly(5), LIMIT)) == b"reply"
        assert (lost, broken) == ([], ["the server has stopped"])
        writer.close()
    finally:
        relay.stop()
        upstream.close()
        server.close()


async def test_what_tls_has_buffered_is_read_without_an_event() -> None:
    relay = Relay(listen("127.0.0.1", 0), ClientLink)
    broken: list[str] = []
    relay.on_broken = broken.append
    peer = ClientLink()
    peer.add(CLOSE, LINK, LOST)
    peer.seal()
    assert peer.kept is not None
    buffered = [b"".join(peer.kept.pieces)]

    class Buffering(socket.socket):
        def recv(self, size: int, flags: int = 0) -> bytes:
            return buffered.pop() if buffered else super().recv(size, flags)

    ours, theirs = socket.socketpair()
    with theirs, Buffering(fileno=ours.detach()) as upstream:
        upstream.setblocking(False)
        relay.link.answered(msgspec.json.encode(LinkReply(NEW, "instance")))
        relay.connect(upstream)
        await asyncio.sleep(0)
        assert broken == ["the server has stopped"]
        relay.stop()
