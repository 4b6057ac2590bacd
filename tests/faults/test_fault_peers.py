"""Peers that break off, send garbage, never read or stall: only their own connection suffers."""

import asyncio
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from conformance.frames import LIST_KEYS, multi_get
from conformance.frames import get as get_
from faults.fault_helpers import FRAMES, I64, Watch, get, num_keys, number, settled, until
from support import HANDSHAKE, RawPeer, Server, blob, keys, tcpstore_server, u64
from tcpstore_async import Limits, serve
from tcpstore_async.base.limits import DEFAULT_GRACE
from tcpstore_async.links.single_client import ClientSingleLink
from tcpstore_async.server import base
from tcpstore_async.server.due import Due
from tcpstore_async.server.listen_socket import listen
from tcpstore_async.session.tls import MISMATCH
from tcpstore_async.wire.commands import BY_METHOD

MIB = 1 << 20

LINK = BY_METHOD["link"]


@pytest.fixture(scope="module")
def server(backend: str) -> Iterator[Server]:
    with tcpstore_server("--backend", backend) as started:
        yield started


@pytest.fixture
def other(server: Server) -> Iterator[RawPeer]:
    """A well-behaved peer, on a store that is empty before and after."""
    with RawPeer(server.port) as peer:
        peer.ping()
        assert num_keys(peer) == 0
        yield peer
        peer.ping()
        for name in (b"/kept", b"/big", b"/list", b"/k", b"/count", *(b"/pattern/%d" % i for i in range(10))):
            peer.ask(b"\x08" + blob(name), 8)
        assert num_keys(peer) == 0


def gone(server: Server, files: int) -> None:
    """Wait until the server has closed every connection above that number of descriptors."""
    until(lambda: Watch(server.process.pid).files() <= files, "the server has closed the connections")


def prepare(peer: RawPeer) -> None:
    peer.send(b"\x01" + blob(b"/kept") + blob(b"as it was") + b"\x0e" + blob(b"/full") + blob(b"item"))
    peer.ping()


def untouched(peer: RawPeer) -> None:
    """Check that nothing but what `prepare` made is left; delete the queue."""
    assert get(peer, b"/kept") == b"as it was"
    assert num_keys(peer) == 1
    assert number(peer, b"\x10" + blob(b"/queue")) == 0
    assert peer.ask(b"\x0f" + blob(b"/full"), 20) == I64.pack(1) + blob(b"item")


@pytest.mark.parametrize("ending", ["close", "reset"])
def test_half_a_frame_of_every_command(server: Server, other: RawPeer, ending: str) -> None:
    prepare(other)
    files = Watch(server.process.pid).files()
    for frame in FRAMES.values():
        for cut in range(1, len(frame)):
            peer = RawPeer(server.port)
            peer.send(frame[:cut])
            peer.reset() if ending == "reset" else peer.close()
        other.ping()
    gone(server, files)
    untouched(other)


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n",
    "tls": bytes.fromhex("1603010200010001fc0303") + bytes(range(256)) * 2,
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "ones": b"\xff" * 4096,
}


@pytest.mark.parametrize("handshake", [b"", HANDSHAKE], ids=["at once", "after the handshake"])
@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_closed(server: Server, other: RawPeer, kind: str, handshake: bytes) -> None:
    with RawPeer(server.port, validate=False) as peer:
        peer.send(handshake + GARBAGE[kind])
        if kind == "tls" and not handshake:
            assert peer.read(len(MISMATCH)) == MISMATCH
        assert peer.closed()
    other.ping()


@asynccontextmanager
async def refused(
    backend: str, caplog: pytest.LogCaptureFixture, first: bytes = b""
) -> AsyncIterator[tuple[base.Server, RawPeer, bytes]]:
    """A peer that has sent garbage, and not read the replies to earlier requests; and these replies.

    Buffers are small, so that the kernel has not taken most of them. `first` is a request whose reply is a value.
    """
    listener = listen("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MIB // 16)  # those that it accepts inherit it
    value = os.urandom(MIB)
    async with serve(listener=listener, backend=backend, limits=Limits(unsent_high_water=16 * MIB)) as server:
        with RawPeer(server.port) as peer:
            peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MIB // 16)
            if first:
                [size] = struct.unpack("<Q", await asyncio.to_thread(peer.ask, first, 8))
                await asyncio.to_thread(peer.read, size)
            request = b"\x01" + blob(b"/k") + blob(value) + 3 * (b"\x03" + blob(b"/k")) + b"\x63"
            await asyncio.to_thread(peer.send, request)
            await asyncio.to_thread(until, lambda: "unknown opcode 99" in caplog.text, "the garbage is found")
            yield server, peer, 3 * blob(value)


async def test_good_replies_that_the_kernel_does_not_take_at_once_arrive_before_garbage_ends_it(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with refused(backend, caplog) as (_, peer, replies):
        assert await asyncio.to_thread(peer.read, len(replies)) == replies
        assert await asyncio.to_thread(peer.closed)


async def test_a_refused_peer_is_not_served_while_replies_wait_for_it(caplog: pytest.LogCaptureFixture) -> None:
    """Nor can it go on by its link when the connection breaks."""
    link = LINK.prefix + LINK.request.encode(ClientSingleLink().fields())
    async with refused("uv", caplog, link) as (server, peer, _):
        peer.send(b"\x01" + blob(b"/late") + blob(b"value"))
        with RawPeer(server.port) as other:
            await asyncio.to_thread(other.ping)
            peer.reset()
            await asyncio.to_thread(until, lambda: server.count == 1, "its connection is closed")
            assert await asyncio.to_thread(num_keys, other) == 1
        assert not server.links.singles


async def test_a_refused_peer_that_does_not_read_is_closed_in_the_end(
    backend: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be blocked sending, as the server reads no more."""
    loop = asyncio.get_running_loop()
    call_later = loop.call_later
    ends: list[Callable[[], object]] = []

    def later(seconds: float, call: Callable[..., object], *given: Any) -> asyncio.TimerHandle:
        if isinstance(due := getattr(call, "__self__", None), Due) and due._run.__name__ == "_close_refused":
            assert 0 < seconds <= DEFAULT_GRACE
            ends.append(lambda: call(*given))
        return call_later(seconds, call, *given)

    monkeypatch.setattr(loop, "call_later", later)
    async with refused(backend, caplog) as (server, peer, _):
        while not ends:
            await asyncio.sleep(0)
        assert server.count == 1
        [end] = ends
        now = time.monotonic() + DEFAULT_GRACE
        monkeypatch.setattr(time, "monotonic", lambda: now)
        end()
        while server.count:
            await asyncio.sleep(0)
        peer.reset()


def send_until_refused(server: Server, peer: RawPeer, other: RawPeer, request: bytes) -> int:
    """Send requests, reading nothing, until the kernel takes no more because the server has stopped reading.

    Returns how many were begun. The last may be cut off: its rest is sent by `finish`.
    """
    data = memoryview(request * 64)
    sent = 0
    quiet = 0
    peer.socket.setblocking(False)
    while quiet < 2:
        assert sent < 512 * MIB, "the server reads on and on"
        try:
            sent += peer.socket.send(data[sent % len(request) :])
            quiet = 0
        except BlockingIOError:
            settled(server, other)
            quiet += 1
    peer.socket.setblocking(True)
    peer.socket.settimeout(60)
    return sent


# quirk: unsent_high_water
def test_a_peer_that_reads_nothing_is_not_read_from(server: Server, other: RawPeer) -> None:
    """Values of 1 MiB, patterns of its own for each key, counters between them: all arrive, in order, once it reads."""
    values = [bytes([65 + i]) * (100_000 + i) for i in range(10)]
    request = b""
    for i, value in enumerate(values):
        other.send(b"\x01" + blob(b"/pattern/%d" % i) + blob(value))
        request += b"\x03" + blob(b"/pattern/%d" % i) + b"\x04" + blob(b"/count") + I64.pack(1)
        request += b"\x05" + keys(*[b"/kept" + b"x" * 4000] * 4)
    other.ping()
    watch = Watch(server.process.pid)
    before = watch.memory()
    with RawPeer(server.port) as peer:
        sent = send_until_refused(server, peer, other, request)
        assert watch.memory() < before + 64 * MIB
        done = number(other, b"\x04" + blob(b"/count") + I64.pack(0))
        assert done < 10 * (sent // len(request)), "requests behind the pause have been executed"
        rounds = sent // len(request)
        assert rounds > 2
        count = 0
        for _ in range(rounds):
            for value in values:
                count += 1
                assert peer.read(8 + len(value)) == blob(value)
                assert peer.read(8) == I64.pack(count)
                assert peer.read(1) == b"\x01"
        if sent % len(request):
            peer.send(request[sent % len(request) :])
            peer.read(sum(8 + len(value) for value in values) + 90)
        peer.ping()
    assert watch.memory() < before + 64 * MIB


@pytest.mark.parametrize("command", ["GET", "MULTI_GET", "LIST_KEYS"])
def test_memory_is_bounded_while_a_peer_reads_nothing(server: Server, other: RawPeer, command: str) -> None:
    """Two hundred replies of a MiB or more each; LIST_KEYS builds its replies anew each time."""
    other.send(b"\x01" + blob(b"/big") + blob(bytes(MIB)))
    names = [b"/list/%d/" % i + b"x" * 4000 for i in range(256)]
    other.send(b"\x0b" + u64(len(names)) + b"".join(blob(name) + blob(b"") for name in names))
    other.ping()
    requests = {"GET": get_(b"/big"), "MULTI_GET": multi_get(b"/big", b"/big"), "LIST_KEYS": LIST_KEYS}
    watch = Watch(server.process.pid)
    before = watch.memory()
    with RawPeer(server.port) as peer:
        peer.ping()
        peer.send(requests[command] * 200)
        settled(server, other)
        assert watch.memory() < before + 32 * MIB
        for _ in range(200):
            if command == "LIST_KEYS":
                assert peer.read(8) == I64.pack(257)
                peer.read(257 * 8 + len(b"/big") + sum(map(len, names)))
            else:
                for _ in range(command.count("MULTI") + 1):
                    assert peer.read(8) == u64(MIB)
                    peer.read(MIB)
        peer.ping()
        assert watch.memory() < before + 32 * MIB
    for name in names:
        other.ask(b"\x08" + blob(name), 8)


# quirk: budget_bytes
def test_a_reply_over_the_budget_is_not_built(backend: str) -> None:
    """The 2 kB request that takes PyTorch's server to 1.4 GB."""
    size = 8 * MIB
    with (
        tcpstore_server("--backend", backend, f"--limit=budget_bytes={1024 * MIB}") as server,
        RawPeer(server.port) as other,
        RawPeer(server.port) as peer,
    ):
        other.send(b"\x01" + blob(b"/big") + blob(bytes(size)))
        other.ping()
        watch = Watch(server.process.pid)
        before = watch.memory()
        peer.ping(4242)
        peer.send(b"\x0a" + keys(*[b"/big"] * 200))
        assert peer.closed()
        address = f"127.0.0.1:{peer.socket.getsockname()[1]} (pid 4242)"
        assert watch.memory() < before + 32 * MIB
        [line] = [line for line in server.log().splitlines() if "budget_bytes" in line]
        assert address in line
        assert str(200 * (size + 8)) in line
        assert str(1024 * MIB) in line
        other.ping()


def test_resets_while_parked(server: Server, other: RawPeer) -> None:
    files = Watch(server.process.pid).files()
    with RawPeer(server.port) as survivor:
        peers = [RawPeer(server.port) for _ in range(50)]
        for peer in peers:
            peer.ping()
            peer.send(b"\x06" + keys(b"/k", b"/never"))
        survivor.send(b"\x06" + keys(b"/k"))
        for peer in peers:
            peer.reset()
        gone(server, files + 1)
        other.send(b"\x01" + blob(b"/k") + blob(b"here"))
        assert survivor.read(1) == b"\0"
        survivor.ping()


def test_half_close(server: Server, other: RawPeer) -> None:
    """What was sent before the end of file is executed and answered, with more than the kernel takes at once."""
    value = bytes(900_000)
    other.send(b"\x01" + blob(b"/big") + blob(value))
    other.ping()
    with RawPeer(server.port) as peer:
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        peer.ping()
        peer.send((b"\x04" + blob(b"/count") + I64.pack(1)) * 2000 + (b"\x03" + blob(b"/big")) * 10)
        peer.socket.shutdown(socket.SHUT_WR)
        for _ in range(100):
            other.ping()
        assert peer.read(16_000) == b"".join(I64.pack(i) for i in range(1, 2001))
        for _ in range(10):
            assert peer.read(8 + len(value)) == blob(value)
        assert peer.closed()
    with RawPeer(server.port) as peer:
        peer.send(b"\x06" + keys(b"/never"))
        peer.socket.shutdown(socket.SHUT_WR)
        assert peer.closed()


def test_a_peer_that_has_half_closed_and_reads_nothing_costs_no_cpu(server: Server, other: RawPeer) -> None:
    other.send(b"\x01" + blob(b"/big") + blob(bytes(MIB)))
    other.ping()
    with RawPeer(server.port) as peer:
        peer.send((b"\x03" + blob(b"/big")) * 20)
        peer.socket.shutdown(socket.SHUT_WR)
        other.ping()
        watch = Watch(server.process.pid)
        before = watch.cpu()
        time.sleep(0.5)
        assert watch.cpu() - before < 0.1, "the server spins"


@pytest.mark.parametrize("ending", ["close", "reset", "garbage"])
def test_the_hand_off_of_a_peer_that_leaves_goes_to_the_next(server: Server, other: RawPeer, ending: str) -> None:
    """When a woken queue waiter leaves without popping, the next waiter is woken."""
    with RawPeer(server.port) as first, RawPeer(server.port) as second:
        for peer in (first, second):
            peer.ping()
            peer.send(b"\x06" + keys(b"/queue"))
            settled(server, other)
        other.send(b"\x0e" + blob(b"/queue") + blob(b"item"))
        assert first.read(1) == b"\0"
        if ending == "garbage":
            first.send(b"\xff")
            assert first.closed()
        elif ending == "reset":
            first.reset()
        else:
            first.close()
        assert second.read(1) == b"\0"
        assert second.ask(b"\x0f" + blob(b"/queue"), 20) == I64.pack(1) + blob(b"item")
