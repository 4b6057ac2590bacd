"""What has happened in a real server, over real connections that break, happens again from its events."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import socket
import struct
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from conformance.frames import NUM_KEYS, append, enter, get, lease, multi_set, ping, push, set_
from relay.test_pollers import relay_with
from replaying import Recording, compare
from support import HANDSHAKE, LIMIT, blob, u64
from tcpstore_async.base.errors import DistNetworkError, StoreTimeoutError
from tcpstore_async.base.limits import MIB, Limits
from tcpstore_async.client.aio import AsyncTCPStore
from tcpstore_async.links.link_client import ClientLink
from tcpstore_async.links.single_client import ClientSingleLink
from tcpstore_async.log.events import Engine
from tcpstore_async.server.poller import make_poller
from tcpstore_async.server.uv import Connection, UvServer
from tcpstore_async.serving import serve
from tcpstore_async.session.store import EVERYTHING, WRITES
from tcpstore_async.wire.commands import BY_METHOD


@asynccontextmanager
async def recorded(limits: Limits | None = None, every: int = 40) -> AsyncIterator[UvServer]:
    """A server, with a history, whose events are executed again, without one, when it has stopped."""
    with tempfile.TemporaryDirectory() as folder:
        async with serve(limits=limits, admin=f"{folder}/admin") as server:
            assert isinstance(server, UvServer)
            recording = Recording(Engine(server.store, server.named, server.links), every)
            yield server
    compare(recording.start, recording.noted, between=1)


async def cut(server: UvServer, rng: random.Random, count: int) -> None:
    """Break connections, one after the other."""
    for _ in range(count):
        await asyncio.sleep(rng.random() / 200)
        there = [one for one in server.open_connections() if isinstance(one, Connection)]
        if there:
            connection = rng.choice(there)
            with socket.socket(fileno=os.dup(connection.fd)) as peer:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its peer is reset
            with server.turn:
                connection.lost(OSError(errno.ECONNRESET, "cut"))


async def use(store: AsyncTCPStore, number: int, rng: random.Random) -> None:
    """Do something of everything."""
    for turn in range(20):
        await store.add("sum", 1)
        await store.set(f"{number}/{turn}", bytes(rng.choice((3, 3000, 200_000))))
        await store.queue_push("queue", f"{number}/{turn}")
        await store.wait([f"{other}/{turn}" for other in range(4)])
        assert await store.queue_pop("queue")
        await store.append("all", b"x" * rng.randrange(9000))
        with pytest.raises(StoreTimeoutError):
            await store.wait(["nobody sets it"], 0.01)
        await store.barrier(f"barrier {turn}", 4)
        await store.multi_get(["sum", f"{number}/{turn}"])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("through_relay", [False, True])
async def test_clients_whose_connections_break(through_relay: bool, seed: int) -> None:
    rng = random.Random(seed)
    async with recorded() as server:
        if through_relay:
            async with relay_with(make_poller, server.port) as relay:
                await run(server, relay.port, rng)
        else:
            await run(server, server.port, rng)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("through_relay", [False, True])
async def test_clients_of_a_server_whose_disk_is_full_again_and_again(through_relay: bool, seed: int) -> None:
    rng = random.Random(seed)
    async with recorded() as server:
        filling = asyncio.ensure_future(fill(server, rng))
        if through_relay:
            async with relay_with(make_poller, server.port) as relay:
                await run(server, relay.port, rng)
        else:
            await run(server, server.port, rng)
        filling.cancel()


async def fill(server: UvServer, rng: random.Random) -> None:
    """Have what comes wait, again and again."""
    while True:
        for held in (rng.choice((WRITES, EVERYTHING)), 0):
            with server.turn:
                server.links.hold(held)
                if not held:
                    server.resume_held()
            await asyncio.sleep(rng.random() / 200)


async def run(server: UvServer, port: int, rng: random.Random) -> None:
    stores = [await AsyncTCPStore.connect("127.0.0.1", port, timeout=60.0) for _ in range(4)]
    for store in stores:  # from its first call on, a store survives its connection
        await store.server()
    cutting = asyncio.ensure_future(cut(server, rng, 150))
    await asyncio.gather(*(use(store, number, rng) for number, store in enumerate(stores)))
    cutting.cancel()
    assert await stores[0].add("sum", 0) == 80
    for store in stores:
        await store.close()


@pytest.mark.parametrize("through_relay", [False, True])
async def test_a_server_whose_memory_is_short(through_relay: bool) -> None:
    """What was refused is refused again, though there is memory; who was evicted is evicted."""
    async with recorded(Limits(budget_bytes=9 * MIB), 500) as server, relay_with(make_poller, server.port) as relay:
        port = relay.port if through_relay else server.port
        other = await AsyncTCPStore.connect("127.0.0.1", port, timeout=60.0)
        for number in range(3):
            store = await AsyncTCPStore.connect("127.0.0.1", port, timeout=60.0)
            await other.set("before", str(number))
            with pytest.raises(DistNetworkError):
                for at in range(1000):
                    await store.set(f"{number}/{at}", bytes(20_000))
                    await store.append("grows", b"x" * 10)
                    await store.check(["grows"])
            assert await other.get("before") == str(number).encode()
            for at in range(1000):
                await other.delete_key(f"{number}/{at}")
            await store.close()
        await other.close()


async def say(server: UvServer, data: bytes) -> None:
    """Send as a peer that then leaves, and wait until the server has closed its connection."""

    def send() -> None:
        with socket.create_connection(("127.0.0.1", server.port), LIMIT) as peer, suppress(OSError):
            peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(65_536):
                pass

    await asyncio.to_thread(send)


async def test_requests_that_are_refused_for_memory() -> None:
    """Before they are complete, and when they are: a list, and a value whose last bytes were read straight into it."""
    value = HANDSHAKE + b"\x01" + blob(b"/late") + u64(400_000)
    async with recorded(Limits(budget_bytes=11 * MIB), 5) as server:
        for _ in range(3):
            await say(server, HANDSHAKE + multi_set(*[(b"/k%d" % number, bytes(60)) for number in range(30_000)]))
        budget = server.store.budget
        with socket.create_connection(("127.0.0.1", server.port)) as late:
            read = server.received
            await asyncio.to_thread(late.sendall, value + bytes(395_000))
            while server.received < read + len(value) + 395_000:
                await asyncio.sleep(0)
            budget.resize(budget.used() + 8000)
            await asyncio.to_thread(late.sendall, bytes(5_000))
            assert await asyncio.to_thread(late.recv, 1) == b""
        budget.resize(11 * MIB)
        await say(server, HANDSHAKE + set_(b"/end", b"x"))
        assert "/late" not in str(server.store.keyspace.values)
    assert server.closed_for["budget_bytes"] >= 2


async def test_reading_what_was_appended_to() -> None:
    """Less is counted for it from then on."""
    async with recorded(every=1) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as peer:
            await asyncio.to_thread(peer.sendall, HANDSHAKE + set_(b"/k", b"v") + append(b"/k", b"w") + NUM_KEYS)
            assert await asyncio.to_thread(peer.recv, 64) == u64(1)
            await asyncio.to_thread(peer.sendall, get(b"/k"))
            assert await asyncio.to_thread(peer.recv, 64) == blob(b"vw")
        await say(server, HANDSHAKE + set_(b"/end", b"x"))


async def test_who_says_later_whose_process_it_is() -> None:
    """PING changes nothing but that."""
    async with recorded(every=1) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as peer:
            for request, size in ((HANDSHAKE + NUM_KEYS, 8), (ping(b"1234"), 4), (set_(b"/k", b"v") + NUM_KEYS, 8)):
                await asyncio.to_thread(peer.sendall, request)
                assert len(await asyncio.to_thread(peer.recv, 64)) == size


async def test_who_comes_to_a_stores_port_and_has_said_nothing() -> None:
    """Its first command is one of that store, not of the one without a name."""
    async with recorded(every=1) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(HANDSHAKE + enter("n1:4711", owner="o", server="127.0.0.1"))
        await reader.readuntil(b"}")
        (port,) = server.named.ports
        _, root = await asyncio.open_connection("127.0.0.1", server.port)
        heard, stock = await asyncio.open_connection("127.0.0.1", int(port))
        root.write(HANDSHAKE + set_(b"/k", b"v"))
        for part in (HANDSHAKE[:2], HANDSHAKE[2:], NUM_KEYS):
            stock.write(part)
            read = server.received
            while server.received == read:
                await asyncio.sleep(0)
        assert await heard.readexactly(8) == u64(0)
        for one in (stock, root, writer):
            one.close()
            await one.wait_closed()


async def test_all_keys_are_listed_again() -> None:
    """The reply is not kept for the next who asks: whether it still is depends on memory, and no snapshot has it."""
    async with recorded(every=1) as server:
        store = await AsyncTCPStore.connect("127.0.0.1", server.port, timeout=60.0)
        await store.multi_set([f"{number:050}" for number in range(1500)], [b""] * 1500)
        for _ in range(3):
            assert len(await store.list_keys()) == 1500
        await store.close()


async def test_a_link_whose_client_leaves_before_the_reply() -> None:
    async with recorded(every=1) as server:
        fields = ClientSingleLink().fields()
        await say(server, HANDSHAKE + BY_METHOD["link"].prefix + BY_METHOD["link"].request.encode(fields))
        await say(server, HANDSHAKE + set_(b"/k", b"v"))


async def test_an_item_that_goes_back_when_a_link_is_closed() -> None:
    """A rank on another link gets it in the same portion of work."""
    async with recorded(every=1) as server, relay_with(make_poller, server.port) as relay:
        link = ClientLink("a place")
        with socket.create_connection(("127.0.0.1", server.port)) as holder:
            await asyncio.to_thread(holder.sendall, HANDSHAKE + push(b"/q", b"item") + lease(b"/q", 1))
            assert await asyncio.to_thread(holder.recv, 64)
            store = await AsyncTCPStore.connect("127.0.0.1", relay.port, timeout=60.0)
            popping = asyncio.ensure_future(store.queue_pop("q"))
            while not server.store.keyspace.waiters:
                await asyncio.sleep(0)
            await asyncio.to_thread(holder.sendall, link.request(validate=False))
            reply = await asyncio.to_thread(holder.recv, 4096)
            link.answered(reply[8:])
            link.close_link()
            link.seal()
            await asyncio.to_thread(holder.sendall, b"".join(link.out))
            assert await popping == b"item"
        await store.close()
