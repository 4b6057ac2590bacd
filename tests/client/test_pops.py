"""A value that has left the server reaches its caller or goes back: both clients, whatever happens in between."""

from __future__ import annotations

import asyncio
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import FrameType

import pytest

from client.fakes import Fake, exactly, proxy_to
from contract.store_kinds import either_client
from marks import ON_STOCK
from support import LIMIT, alarms, blob, keys, server_of, tcpstore_server, torch_server, until
from tcpstore_async import (
    AsyncTCPStore,
    DistNetworkError,
    QueueEmptyError,
    StoreTimeoutError,
    TCPStore,
)
from tcpstore_async.base.errors import PeerError
from tcpstore_async.base.limits import Limits
from tcpstore_async.wire.commands import BY_METHOD, BY_OPCODE

SHORT = 0.3
"""The timeout of a store whose replies are held back."""


class Link(Fake):
    """A proxy that can hold back replies to a pop, and cut after so many bytes in either direction."""

    def __init__(self, port: int, queue: str) -> None:
        self.target = port
        name = blob(b"/" + queue.encode())
        self.pops = [bytes([opcode]) + name for opcode in (0x0F, 0x44, 0x45)]
        self.wait = b"\x06" + keys(b"/" + queue.encode())
        self.holds = False
        """Whether replies after a pop are held back."""
        self.asked = threading.Event()
        """A pop has been sent, or the WAIT that a client without leases sends before."""
        self.popping = threading.Event()
        """A pop has been sent."""
        self.released = threading.Event()
        self.left: dict[str, int] = {}
        """Bytes until it is cut, by who sends them."""
        super().__init__(self._pass_on, socket.create_server(("127.0.0.1", 0), backlog=128))

    def _pass_on(self, peer: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", self.target), LIMIT) as server:
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            held = False
            while True:
                ready, _, _ = select.select([peer] if held else [peer, server], [], [], 0.01 if held else LIMIT)
                held = held and not self.released.is_set()
                for end in ready:
                    data = end.recv(1 << 20)
                    who, other = ("client", server) if end is peer else ("server", peer)
                    # What is silent, an introduction say, may come together with it.
                    if who == "client" and any(pop in data for pop in self.pops):
                        held = self.holds and not self.released.is_set()
                        self.asked.set()
                        self.popping.set()
                    elif who == "client" and self.wait in data:
                        self.asked.set()
                    cut = who in self.left and len(data) > self.left[who]
                    if who in self.left:
                        data = data[: self.left[who]]
                        self.left[who] -= len(data)
                    if data:
                        other.sendall(data)
                    if cut or not data:
                        return


@contextmanager
def link_to(port: int, queue: str = "q") -> Iterator[Link]:
    link = Link(port, queue)
    try:
        yield link
    finally:
        link.released.set()
        link.stop()


@pytest.fixture(scope="module", params=["uv", "threaded"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    with tcpstore_server("--backend", request.param) as server:
        yield server.port


@pytest.fixture
def other(port: int) -> Iterator[TCPStore]:
    """Another client's store on the same server; the queue is empty."""
    with TCPStore("127.0.0.1", port, timeout=LIMIT) as store:
        with suppress(QueueEmptyError):
            while True:
                store.queue_pop("q", block=False)
        yield store


def on(port: int, timeout: float = LIMIT) -> TCPStore:
    """A store that has identified its server."""
    store = TCPStore("127.0.0.1", port, timeout=timeout)
    assert store.queue_len("q") == 0
    return store


def take_all(store: TCPStore, count: int) -> list[bytes]:
    """Items that are there, or arrive."""
    return [store.queue_pop("q") for _ in range(count)]


# The caller gives up


@pytest.mark.parametrize("block", [True, False])
# quirk: returned-items
def test_a_pop_that_is_out_of_time_gives_its_item_back(port: int, other: TCPStore, block: bool) -> None:
    with link_to(port) as link, on(link.port, SHORT) as store, ThreadPoolExecutor(1) as threads:
        link.holds = True
        if not block:
            other.queue_push("q", "job")
        popping = threads.submit(store.queue_pop, "q", block)
        assert link.asked.wait(LIMIT)
        if block:
            other.queue_push("q", "job")
        with pytest.raises(StoreTimeoutError):
            popping.result(LIMIT)
        assert take_all(other, 1) == [b"job"]
        link.released.set()
        store.set_timeout(LIMIT)
        assert not store.check(["x"])
        other.queue_push("q", "next")
        assert store.queue_pop("q") == b"next"


@pytest.mark.unmeasured
# quirk: returned-items
def test_ctrl_c_gives_the_item_back(port: int, other: TCPStore) -> None:
    with link_to(port) as link, on(link.port) as store, ThreadPoolExecutor(1) as threads:
        link.holds = True

        def interrupt() -> None:
            assert link.asked.wait(LIMIT)
            other.queue_push("q", "job")
            assert link.popping.wait(LIMIT)
            until(lambda: not other.queue_len("q"))  # it has left the queue
            os.kill(os.getpid(), signal.SIGINT)

        interrupting = threads.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.queue_pop("q")
        interrupting.result(LIMIT)
        assert take_all(other, 1) == [b"job"]
        link.released.set()
        assert not store.check(["x"])
        assert other.queue_len("q") == 0


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("why", ["timeout", "cancel"])
# quirk: returned-items
def test_an_async_pop_gives_its_item_back(port: int, other: TCPStore, why: str, block: bool) -> None:
    """Before 0.2 it was kept for that store's own next pop, where no one else could see it."""
    cancel = threading.Event() if why == "cancel" else None
    with link_to(port) as link, ThreadPoolExecutor(1) as threads:
        link.holds = True
        if not block:
            other.queue_push("q", "job")

        def take() -> list[bytes]:
            assert link.asked.wait(LIMIT)
            if block:
                other.queue_push("q", "job")
            until(lambda: not other.queue_len("q"))  # it has been leased
            if cancel is not None:
                cancel.set()
            took = take_all(other, 1)
            link.released.set()
            return took

        taking = threads.submit(take)
        with pytest.raises(asyncio.CancelledError if cancel else StoreTimeoutError):
            asyncio.run(_give_up(link.port, LIMIT if cancel else 3.0, block, cancel))
        assert taking.result(LIMIT) == [b"job"]
        assert other.queue_len("q") == 0


async def _give_up(port: int, timeout: float, block: bool, cancel: threading.Event | None) -> None:
    async with await AsyncTCPStore.connect("127.0.0.1", port, timeout=timeout) as store:
        assert await store.queue_len("other") == 0
        popping = asyncio.ensure_future(store.queue_pop("q", block))
        if cancel is not None:
            await asyncio.get_running_loop().run_in_executor(None, cancel.wait)
            popping.cancel()
        try:
            await popping
        finally:
            store.set_timeout(LIMIT)
            assert not await store.check(["x"])  # it is in step


CHILD = """
import sys
from tcpstore_async import TCPStore
TCPStore("127.0.0.1", int(sys.argv[1]), timeout=60).queue_pop("q")
"""


@pytest.mark.parametrize("options", [("--link-grace", "0.5"), ("--backend", "threaded")])
# quirk: returned-items
def test_the_item_of_a_killed_process_goes_back(options: tuple[str, ...]) -> None:
    with (
        tcpstore_server(*options) as server,
        TCPStore("127.0.0.1", server.port, timeout=LIMIT) as other,
        link_to(server.port) as link,
    ):
        link.holds = True
        with subprocess.Popen([sys.executable, "-c", CHILD, str(link.port)], cwd=tempfile.gettempdir()) as child:
            assert link.asked.wait(LIMIT)
            other.queue_push("q", "job")
            assert link.popping.wait(LIMIT)
            child.kill()
        link.released.set()
        assert take_all(other, 1) == [b"job"]


# quirk: held-items
def test_an_item_stays_with_whom_it_was_lent_to(port: int, other: TCPStore) -> None:
    """However long that client is silent: it may be working. The item goes back with the end of the connection."""
    other.queue_push("lent", "job")
    assert other.queue_len("lent") == 1  # it is there before another connection asks
    lease = bytes([BY_METHOD["lease"].opcode]) + blob(b"/lent") + bytes(8)
    with socket.create_connection(("127.0.0.1", port), LIMIT) as peer:
        peer.sendall(bytes.fromhex("00cef7853c") + lease)
        assert exactly(peer, 8 + 8 + 3)[16:] == b"job"
        other.set_timeout(SHORT)
        with pytest.raises(StoreTimeoutError):
            other.queue_pop("lent")
        other.set_timeout(LIMIT)
    assert other.queue_pop("lent") == b"job"


# The connection is cut

LEASE = 1 + 8 + 2 + 8
CONFIRM = 1 + 8
ITEM = 8 + 8 + 3


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize(
    ("who", "count"),
    [*(("client", count) for count in range(LEASE + CONFIRM + 1)), *(("server", count) for count in range(ITEM + 1))],
)
# quirk: broken-pop
def test_a_connection_that_is_cut_loses_nothing(other: TCPStore, port: int, kind: str, who: str, count: int) -> None:
    """The item is the caller's or in the queue; both only if the connection broke during the CONFIRM."""
    other.queue_push("q", "job")
    with link_to(port) as link:
        got = []
        with suppress(DistNetworkError), either_client(kind) as connect:
            store = connect(link.port)
            assert not store.queue_len("other")
            link.left[who] = count
            got.append(store.queue_pop("q"))
    confirmed = who == "server" or count >= LEASE + CONFIRM
    there = other.queue_len("q") if got and confirmed else len(take_all(other, 1))
    assert [*got, *([b"job"] * there)] == [b"job"] * (2 if got and not confirmed else 1)
    assert other.queue_len("q") == 0
    assert bool(got) == (count >= (LEASE if who == "client" else ITEM))


# Interrupts anywhere


class Interrupted(BaseException):
    pass


@pytest.mark.unmeasured
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a socket that was being opened
# quirk: returned-items
def test_interrupts_at_any_moment_lose_no_item(port: int, other: TCPStore) -> None:
    def pop(store: TCPStore, got: list[bytes]) -> None:
        got += map(store.queue_pop, ("q",))  # no interrupt strikes between the call and the list

    def handle(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is pop.__code__:
                raise Interrupted
            frame = frame.f_back

    rng = random.Random(0)
    got: list[bytes] = []
    count = 400
    for number in range(count):
        other.queue_push("q", str(number))
    store = on_any(port)
    struck = 0
    with alarms(handle, 0):
        while len(got) < count // 2 and struck < 4 * count:
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 4e-4))
                pop(store, got)
            except Interrupted:
                struck += 1
            except DistNetworkError:  # what was half sent when it struck
                store.close()
                store = on_any(port)
    store.close()
    assert struck
    left = take_all(other, count - len(got))
    assert sorted([*got, *left]) == sorted(str(number).encode() for number in range(count))
    with pytest.raises(QueueEmptyError):
        other.queue_pop("q", block=False)


def on_any(port: int) -> TCPStore:
    store = TCPStore("127.0.0.1", port, timeout=LIMIT)
    store.queue_len("other")
    return store


# What is asked


def opcodes(data: bytes) -> list[int]:
    """Return the opcodes of the frames that a client sent."""
    found = []
    at = 0
    while at < len(data):
        command = BY_OPCODE[data[at]]
        assert command is not None
        try:
            _, stop = command.request.decode(lambda *_: None, data, at + 1, len(data), Limits())
        except PeerError as error:
            raise AssertionError(f"no frame at {at}") from error
        if stop < 0:
            break
        found.append(command.opcode)
        at = stop
    return found


def test_many_workers_on_one_queue_ask_for_nothing_else(port: int, other: TCPStore) -> None:
    """Before 0.2 a pop that found nothing listed all keys."""
    other.multi_set([f"a/key/{number}" for number in range(20_000)], ["v"] * 20_000)
    items = 1500

    def work(store: TCPStore) -> int:
        done = 0
        while store.queue_pop("q") != b"end":
            done += 1
        return done

    with proxy_to(port) as proxy, ThreadPoolExecutor(12) as threads:
        stores = [TCPStore("127.0.0.1", proxy.port, timeout=LIMIT) for _ in range(12)]
        working = [threads.submit(work, store) for store in stores]
        for number in range(items):
            other.queue_push("q", str(number))
        for _ in stores:
            other.queue_push("q", "end")
        assert sum(worker.result(LIMIT) for worker in working) == items
        for store in stores:
            store.close()
    said = [opcode for data in proxy.sent for opcode in opcodes(bytes(data))]
    names = {BY_METHOD[name].opcode for name in ("lease_later", "confirm", "taken")}
    assert said.count(BY_METHOD["lease_later"].opcode) == said.count(BY_METHOD["confirm"].opcode) == items + 12
    once = {BY_METHOD[name].opcode for name in ("validate", "ping", "check", "get", "introduce", "link")}
    assert set(said) <= names | once
    assert said.count(BY_METHOD["check"].opcode) == 12
    for number in range(20_000):
        other.delete_key(f"a/key/{number}")


@pytest.mark.parametrize("kind", ["ours", pytest.param("libuv", marks=ON_STOCK)])
@pytest.mark.parametrize("value", ["plain", ""])
@pytest.mark.parametrize("client", ["sync", "async"])
# quirk: woken-for-nothing
def test_a_plain_value_ends_a_pop(client: str, kind: str, value: str) -> None:
    with server_of(kind) as port, either_client(client) as connect:
        store = connect(port)
        store.set("q", value)
        with pytest.raises(QueueEmptyError):
            store.queue_pop("q")


# PyTorch's servers, which know no leases


def _late_on_pytorchs(pop: Callable[[Link], None]) -> None:
    with torch_server() as port, TCPStore("127.0.0.1", port, timeout=LIMIT) as other, link_to(port) as link:
        link.holds = True
        releasing = threading.Timer(1.0, link.released.set)
        other.queue_push("q", "job")
        releasing.start()
        pop(link)
        releasing.join(LIMIT)
        assert take_all(other, 1) == [b"job"]


@pytest.mark.slow
@pytest.mark.parametrize("by", ["the next call", "closing"])
# quirk: returned-items
def test_what_pytorchs_server_sends_too_late_is_pushed_back(by: str) -> None:
    def pop(link: Link) -> None:
        with TCPStore("127.0.0.1", link.port, timeout=SHORT) as store:
            if by == "the next call":
                store.has_extended_api()
            with pytest.raises(StoreTimeoutError):
                store.queue_pop("q", block=False)
            assert link.released.wait(LIMIT)
            if by == "the next call":
                store.set_timeout(LIMIT)
                assert not store.check(["x"])

    _late_on_pytorchs(pop)


@pytest.mark.slow
def test_what_pytorchs_server_sends_too_late_is_pushed_back_by_async() -> None:
    def pop(link: Link) -> None:
        async def run() -> None:
            async with await AsyncTCPStore.connect("127.0.0.1", link.port, timeout=LIMIT) as store:
                popping = asyncio.ensure_future(store.queue_pop("q", block=False))
                await asyncio.get_running_loop().run_in_executor(None, link.asked.wait)
                popping.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await popping
                await asyncio.get_running_loop().run_in_executor(None, link.released.wait)

        asyncio.run(run())

    _late_on_pytorchs(pop)
