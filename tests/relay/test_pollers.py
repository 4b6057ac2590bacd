"""A relay in this process, with each poller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tcpstore_async.client.aio import AsyncTCPStore
from tcpstore_async.links.link_client import ClientLink
from tcpstore_async.relay.core import Relay
from tcpstore_async.relay.upstream import Upstream
from tcpstore_async.server.listen_socket import listen
from tcpstore_async.server.poller import LoopPoller, WatchWith, make_poller
from tcpstore_async.serving import serve


@asynccontextmanager
async def relay_with(watch_with: WatchWith, server: int) -> AsyncIterator[Relay]:
    relay = Relay(listen("127.0.0.1", 0), ClientLink, watch_with)
    upstream = Upstream(relay, [("127.0.0.1", server)])
    connecting = asyncio.ensure_future(upstream.run())
    try:
        relay.start()
        yield relay
    finally:
        relay.stop()
        upstream.close()
        while not connecting.done():
            connecting.cancel()
            await asyncio.wait([connecting], timeout=0.05)


@pytest.mark.parametrize("watch_with", [make_poller, LoopPoller])
async def test_values_pass_and_ranks_come_and_go(watch_with: WatchWith) -> None:
    async with serve() as server, relay_with(watch_with, server.port) as relay:
        value = bytes(range(256)) * 20_000
        for _ in range(3):
            stores = [await AsyncTCPStore.connect("127.0.0.1", relay.port) for _ in range(4)]
            waiting = [asyncio.ensure_future(store.get("value")) for store in stores[1:]]
            await stores[0].set("value", value)
            assert await asyncio.gather(*waiting) == [value] * 3
            assert relay.count == 4
            await stores[0].delete_key("value")
            for store in stores:
                await store.close()
            await asyncio.wait_for(relay.empty.wait(), 60)
            assert relay.link.streams == {}
