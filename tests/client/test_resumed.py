"""A reset connection is a pause: both clients, on both servers, through a proxy that resets connections."""

from __future__ import annotations

import asyncio
import errno
import functools
import gc
import os
import random
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any
from unittest.mock import Mock

import pytest

from conformance.frames import delete, get, i64, set_
from support import LIMIT, blob, tcpstore_server, until
from tcpstore_async import AsyncTCPStore, DistNetworkError, StoreTimeoutError, TCPStore
from tcpstore_async.base.deadline import Deadline
from tcpstore_async.client import background
from tcpstore_async.client.async_connection import AsyncConnection
from tcpstore_async.client.connect import connect_blocking
from tcpstore_async.client.requests import NO_KEY
from tcpstore_async.client.resume import resume_blocking
from tcpstore_async.client.servers import Servers
from tcpstore_async.client.sync_connection import DeadlineExceeded, SyncConnection
from tcpstore_async.links.single_client import UNANSWERED_BYTES, ClientSingleLink
from tcpstore_async.session.client import ClientSession
from tcpstore_async.wire.commands import BY_METHOD

_RESET = struct.pack("ii", 1, 0)
_PING_BYTES = 4
"""Length of the reply to the handshake."""


class Resetter:
    """A proxy on one thread that can reset all of its connections, in both directions."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self.listener.getsockname()[1]
        self.resets = 0
        self._pairs: dict[int, tuple[socket.socket, socket.socket]] = {}
        self._lock = threading.Lock()
        self._waker, self._woken = socket.socketpair()
        self._stopped = False
        self._refuses = False
        self.holds = False
        """Whether nothing is carried."""
        self.mutes = False
        """Whether what the server sends is dropped, but for the reply to the handshake."""
        self.breaks: list[tuple[bool, int]] = []
        """How many bytes each of the next connections carries before both of its ends are reset, and whether from the
        server or to it."""
        self._left: dict[int, int] = {}
        """How many bytes are left, by the descriptor of the end that sends them."""
        self._replied: dict[int, int] = {}
        """Bytes from the server, by its end's descriptor."""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def reset(self) -> int:
        """Reset every connection; return how many there were."""
        with self._lock:
            count = len(self._pairs) // 2
            for one, _ in self._pairs.values():
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                one.close()
            self._pairs.clear()
            self.resets += count
            return count

    def refuse(self) -> None:
        """Refuse further connections, as the port of a server that is gone does."""
        self._refuses = True
        self._waker.send(b"\0")
        until(lambda: self.listener.fileno() < 0)

    def stop(self) -> None:
        self._stopped = True
        self._waker.send(b"\0")
        self._thread.join(LIMIT)
        self.reset()
        for one in (self.listener, self._waker, self._woken):
            one.close()

    def _run(self) -> None:
        while not self._stopped:
            with self._lock:
                ends = {fd: pair for fd, pair in self._pairs.items() if pair[0].fileno() == fd}
            if self._refuses:
                self.listener.close()
            listening = [] if self._refuses else [self.listener.fileno()]
            try:
                ready, _, _ = select.select([*listening, self._woken.fileno(), *ends], [], [], 0.05)
            except OSError:
                continue  # one has just been reset
            for fd in ready:
                if fd in listening:
                    self._accept()
                elif fd == self._woken.fileno():
                    self._woken.recv(1)
                elif not self.holds:
                    self._carry(fd)

    def held(self) -> int:
        """Return how many bytes have arrived and are not carried."""
        with self._lock:
            ends = [one for one, _ in self._pairs.values()]
            return sum([len(one.recv(1 << 16, socket.MSG_PEEK)) for one in ends if select.select([one], [], [], 0)[0]])

    def _accept(self) -> None:
        client, _ = self.listener.accept()
        try:
            server = socket.create_connection(("127.0.0.1", self.target), LIMIT)
        except OSError:
            client.close()
            return
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.settimeout(0.5)
        with self._lock:
            for one in (client, server):
                self._left.pop(one.fileno(), None)
            if self.breaks:
                from_server, count = self.breaks.pop(0)
                self._left[(server if from_server else client).fileno()] = count
            self._replied.pop(client.fileno(), None)
            self._replied[server.fileno()] = 0
            self._pairs[client.fileno()] = client, server
            self._pairs[server.fileno()] = server, client

    def _carry(self, fd: int) -> None:
        with self._lock:
            pair = self._pairs.get(fd)
            if pair is None:
                return
            data = b""
            try:
                data = pair[0].recv(self._left.get(fd, 1 << 16))
                if not self.mutes or self._replied.get(fd, 0) < _PING_BYTES:
                    pair[1].sendall(data)
                if fd in self._replied:
                    self._replied[fd] += len(data)
                if data and fd in self._left:
                    self._left[fd] -= len(data)
                    if not self._left[fd]:
                        raise ConnectionResetError
            except OSError:  # reset, or one end does not read while this thread serves no other connection
                data = b""
                for one in pair:
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            if not data:
                for one in pair:
                    self._pairs.pop(one.fileno(), None)
                    one.close()


@contextmanager
def resetter(port: int) -> Iterator[Resetter]:
    proxy = Resetter(port)
    try:
        yield proxy
    finally:
        proxy.stop()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with tcpstore_server() as server:
        yield server.port


@contextmanager
def resets(proxy: Resetter, seed: int) -> Iterator[None]:
    """Reset all connections again and again, at random moments."""
    rng = random.Random(seed)
    done = threading.Event()

    def run() -> None:
        while not done.wait(rng.uniform(0.01, 0.06)):
            proxy.reset()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(LIMIT)


def opened(port: int, timeout: float = LIMIT) -> TCPStore:
    """Return a store whose connection is a link: it is one once the server is known."""
    store = TCPStore("127.0.0.1", port, timeout=timeout)
    store.queue_len("there is none")
    return store


# quirk: reset
def test_what_was_written_is_executed_once(port: int) -> None:
    with resetter(port) as proxy, opened(proxy.port) as store, TCPStore("127.0.0.1", port, timeout=LIMIT) as other:
        with resets(proxy, 1):
            count = 0
            while proxy.resets < 25:
                count += 1
                assert store.add("once", 1) == count
                store.set("text", str(count))
                store.queue_push("items", str(count))
                store.append("long", "x" * 2000)
        assert store.get("text") == str(count).encode()
        assert [other.queue_pop("items") for _ in range(count)] == [str(1 + n).encode() for n in range(count)]
        assert len(other.get("long")) == 2000 * count
        for key in ("once", "text", "long"):
            other.delete_key(key)


ONLY: dict[str, Callable[[Any, str], Any]] = {
    "set": lambda store, key: store.set(key, "v"),
    "add": lambda store, key: store.add(key, 1),
    "append": lambda store, key: store.append(key, "v"),
    "check": lambda store, key: store.check([key]),
}
"""Calls that do not depend on who the server is."""

COUNTS = {"set": b"v", "add": b"12", "append": b"v" * 12, "check": None}
"""What is there after twelve of them."""


def _remains(port: int, key: str) -> bytes | None:
    with TCPStore("127.0.0.1", port, timeout=LIMIT) as store:
        value = store.get(key) if store.check([key]) else None
        store.delete_key(key)
        return value


@pytest.mark.parametrize("name", ONLY)
# quirk: reset
def test_a_store_that_has_made_one_kind_of_call_only(port: int, name: str) -> None:
    with resetter(port) as proxy:
        for _ in range(4):
            with TCPStore("127.0.0.1", proxy.port, timeout=LIMIT) as store:
                ONLY[name](store, f"only/{name}")
                assert proxy.reset() == 1
                for _ in range(2):
                    ONLY[name](store, f"only/{name}")
                store.check(["only"])
    assert _remains(port, f"only/{name}") == COUNTS[name]


@pytest.mark.parametrize("name", ONLY)
def test_an_async_store_that_has_made_one_kind_of_call_only(port: int, name: str) -> None:
    async def main(proxy: Resetter) -> None:
        for _ in range(4):
            async with await AsyncTCPStore.connect("127.0.0.1", proxy.port, timeout=LIMIT) as store:
                await ONLY[name](store, f"only/{name}")
                assert proxy.reset() == 1
                for _ in range(2):
                    await ONLY[name](store, f"only/{name}")
                await store.check(["only"])

    with resetter(port) as proxy:
        asyncio.run(main(proxy))
    assert _remains(port, f"only/{name}") == COUNTS[name]


# quirk: reset
def test_a_call_with_little_time_leaves_the_identity_to_a_later_one(port: int) -> None:
    async def main(listening: int) -> None:
        async with await AsyncTCPStore.connect("127.0.0.1", listening, timeout=LIMIT) as store:
            store.set_timeout(0.001)
            await store.set("little", "time")
            assert store.identity is None
            store.set_timeout(0)
            assert await store.add("little/count", 1) == 2
            assert store.identity is not None

    with resetter(port) as proxy:
        with TCPStore("127.0.0.1", proxy.port, timeout=LIMIT) as store:
            client = store._client
            assert client is not None
            store.set_timeout(0.001)
            store.set("little", "time")
            assert client.identity is None
            store.set_timeout(0)
            assert store.add("little/count", 1) == 1
            assert _connection(store).link is not None
        asyncio.run(main(proxy.port))
    assert _remains(port, "little") == b"time"
    assert _remains(port, "little/count") == b"2"


@pytest.mark.parametrize(
    ("first", "count"),
    [
        pytest.param(5, 4, id="handshake"),
        pytest.param(37, 5, id="LINK"),
        pytest.param(160, 30, id="reply to LINK"),
        pytest.param(280, 100, id="behind LINK"),
    ],
)
def test_a_resumption_that_breaks_three_times(port: int, first: int, count: int) -> None:
    """Both clients, wherever the connection breaks on which the session was to continue."""

    async def main(proxy: Resetter) -> None:
        async with await AsyncTCPStore.connect("127.0.0.1", proxy.port, timeout=LIMIT) as store:
            await store.append("breaks", "a" * 50)
            break_(proxy)
            await store.append("breaks", "b" * 50)
            assert await store.add("breaks/count", 1) == 2
            assert await store.get("breaks") == expected * 2
        assert not proxy.breaks

    def break_(proxy: Resetter) -> None:
        proxy.breaks = [(False, first), (True, count), (False, first)]
        assert proxy.reset() == 1

    expected = b"a" * 50 + b"b" * 50
    with resetter(port) as proxy:
        with TCPStore("127.0.0.1", proxy.port, timeout=LIMIT) as store:
            store.append("breaks", "a" * 50)
            break_(proxy)
            store.append("breaks", "b" * 50)
            assert store.add("breaks/count", 1) == 1
            assert store.get("breaks") == expected
        assert not proxy.breaks
        asyncio.run(main(proxy))
    assert _remains(port, "breaks") == expected * 2
    assert _remains(port, "breaks/count") == b"2"


def test_resets_right_after_writes_that_have_no_reply(port: int) -> None:
    """Again and again on one connection, also while the session is being continued."""

    async def main(proxy: Resetter) -> None:
        async with await AsyncTCPStore.connect("127.0.0.1", proxy.port, timeout=LIMIT) as store:
            for number in range(100):
                await store.append("right/after", "v")
                await store.set("right/last", str(number))
                proxy.reset()
                for _ in range(number % 5):
                    await asyncio.sleep(0)
            await store.check(["right/after"])

    with resetter(port) as proxy:
        with TCPStore("127.0.0.1", proxy.port, timeout=LIMIT) as store:
            for number in range(100):
                store.append("right/after", "v")
                store.set("right/last", str(number))
                proxy.reset()
                for _ in range(number % 5):
                    os.sched_yield()
            store.check(["right/after"])
        assert _remains(port, "right/last") == b"99"
        asyncio.run(main(proxy))
    assert _remains(port, "right/last") == b"99"
    assert _remains(port, "right/after") == b"v" * 200


def test_large_values_both_ways(port: int) -> None:
    value = os.urandom(3_000_000)
    with resetter(port) as proxy, opened(proxy.port) as store:
        with resets(proxy, 2):
            while proxy.resets < 5:
                store.set("large", value)
                assert store.get("large") == value
        store.delete_key("large")


def test_threads_that_wait_and_pop(port: int) -> None:
    with (
        resetter(port) as proxy,
        opened(proxy.port) as store,
        TCPStore("127.0.0.1", port, timeout=LIMIT) as other,
        ThreadPoolExecutor(8) as threads,
    ):
        waits = [threads.submit(store.wait, [f"later/{number}"]) for number in range(4)]
        pops = [threads.submit(store.queue_pop, "queue") for _ in range(4)]
        with resets(proxy, 3):
            until(lambda: proxy.resets >= 10)
            for number in range(4):
                other.set(f"later/{number}", "v")
                other.queue_push("queue", str(number))
            assert {pop.result(LIMIT) for pop in pops} == {b"0", b"1", b"2", b"3"}
            for wait in waits:
                wait.result(LIMIT)
        assert other.queue_len("queue") == 0
        for number in range(4):
            other.delete_key(f"later/{number}")


# quirk: reset
def test_an_idle_connection_is_replaced_before_the_next_call(port: int) -> None:
    with resetter(port) as proxy, opened(proxy.port) as store:
        for _ in range(5):
            before = _connection(store).peer.getsockname()
            assert proxy.reset() == 1
            until(functools.partial(_is_replaced, store, before))
            store.set("idle", "v")
        assert store.get("idle") == b"v"
        store.delete_key("idle")


def _connection(store: TCPStore) -> SyncConnection:
    client = store._client
    assert client is not None
    return client._connections[0]


def _is_replaced(store: TCPStore, before: object) -> bool:
    connection = _connection(store)
    try:
        return connection.down is None and connection.peer.getsockname() != before
    except OSError:
        return False


def test_a_connection_that_a_call_has_replaced_is_watched_too(port: int) -> None:
    with resetter(port) as proxy, opened(proxy.port) as store:
        _connection(store).mark_down(ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)))
        store.set("k", "v")
        assert store.get("k") == b"v"
        before = _connection(store).peer.getsockname()
        assert proxy.reset() >= 1
        until(functools.partial(_is_replaced, store, before))
        store.delete_key("k")


def test_the_loop_is_stopped_before_it_has_replaced_a_connection(port: int) -> None:
    """As a fork does. Nobody then holds the connection, and the next call replaces it."""
    with resetter(port) as proxy, opened(proxy.port) as store:
        store.set("k", "v")
        loop = background.running()
        assert loop is not None
        connection = _connection(store)
        found: list[bool] = []

        def break_and_stop() -> None:
            connection.mark_down(ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)))
            found.append(store._client is not None and store._client.check_idle())
            loop._loop.stop()  # before the task has run

        loop.call_soon(break_and_stop)
        until(lambda: connection.user == 0 and bool(found))
        assert store.get("k") == b"v"
        store.delete_key("k")


_FORKS = """
import os, sys
from tcpstore_async import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), timeout=30)
store.queue_len("there is none")
store.set("forked", "v")
print("ready", flush=True)
sys.stdin.readline()
child = os.fork()
found = store.get("forked")
if not child:
    os._exit(found != b"v")
assert (os.waitpid(child, 0)[1], found) == (0, b"v")
store.delete_key("forked")
store.close()
"""


@contextmanager
def _ready(source: str, port: int) -> Iterator[subprocess.Popen[str]]:
    """Run a program that says when it is ready."""
    command, pipe = [sys.executable, "-c", source, str(port)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        yield program


@pytest.mark.unmeasured
def test_a_store_forks_just_when_its_connection_breaks(port: int) -> None:
    with resetter(port) as proxy, _ready(_FORKS, proxy.port) as program:
        proxy.reset()
        program.communicate("\n", timeout=LIMIT)
        assert program.returncode == 0


@pytest.mark.unmeasured
def test_a_store_forks_while_its_connection_is_replaced(port: int) -> None:
    """The server has resumed the session on a connection that the fork gives up: to the server, that is a break."""
    with resetter(port) as proxy, _ready(_FORKS, proxy.port) as program:
        proxy.mutes = True
        proxy._replied.clear()
        proxy.reset()
        until(lambda: max([*proxy._replied.values(), 0]) > _PING_BYTES)  # the reply to LINK has been dropped
        proxy.mutes = False
        program.communicate("\n", timeout=LIMIT)
        assert program.returncode == 0


def test_the_async_client(port: int) -> None:
    async def main(proxy: Resetter) -> None:
        async with await AsyncTCPStore.connect("127.0.0.1", proxy.port, timeout=LIMIT) as store:
            assert await store.server() is not None
            counts = []

            async def work(number: int) -> None:
                count = 0
                while proxy.resets < 20:
                    count += 1
                    await store.add("async/once", 1)
                    await store.queue_push("async/items", f"{number} {count}")
                counts.append(count)

            with resets(proxy, 4):
                await asyncio.gather(*map(work, range(5)))
                waits = [asyncio.ensure_future(store.wait([f"async/{number}"])) for number in range(5)]
                await store.multi_set([f"async/{number}" for number in range(5)], ["v"] * 5)
                await asyncio.gather(*waits)
            total = sum(counts)
            assert await store.add("async/once", 0) == total
            items = {await store.queue_pop("async/items") for _ in range(total)}
            assert len(items) == total
            for key in ("once", *map(str, range(5))):
                await store.delete_key(f"async/{key}")

    with resetter(port) as proxy:
        asyncio.run(main(proxy))


@asynccontextmanager
async def linked(port: int) -> AsyncIterator[tuple[AsyncTCPStore, AsyncConnection, ClientSingleLink]]:
    """An async store, its connection, and the link that this is."""
    async with await AsyncTCPStore.connect("127.0.0.1", port, timeout=LIMIT) as store:
        assert await store.server() is not None
        (connection,) = store._connections
        assert connection.link is not None
        yield store, connection, connection.link


def test_the_async_client_keeps_only_what_has_not_been_replied_to(port: int) -> None:

    async def main() -> None:
        async with linked(port) as (store, _, link):
            most = 0

            async def work(number: int) -> None:
                nonlocal most
                for count in range(100):
                    await store.add(f"async/kept {number % 3}", count)
                    await store.set("async/kept", "v" * (number + count))
                    assert await store.multi_get([]) == []
                    most = max(most, sum(len(data) for _, data, _ in link.sent))

            await asyncio.gather(*map(work, range(40)))
            assert most < 100_000, "of 1,000,000"
            value = b"v" * (UNANSWERED_BYTES // 8 - 100)
            for _ in range(20):
                await store.set("async/kept", value)
                while link.unanswered > UNANSWERED_BYTES:  # a fence is under way
                    await asyncio.sleep(0)
            await store.ping()
            assert len(link.sent) == 1
            for key in ("", " 0", " 1", " 2"):
                assert await store.delete_key(f"async/kept{key}")

    asyncio.run(main())


def test_a_call_that_blocks_keeps_nothing_but_itself(port: int) -> None:
    """What was written before it in the same iteration is forgotten once the server has it."""

    async def main() -> None:
        async with linked(port) as (store, connection, link):
            setting = asyncio.ensure_future(store.set("async/large", "v" * 1_000_000))
            waiting = asyncio.ensure_future(store.wait(["async/never"]))
            await setting
            while connection.session.waiting is None or connection.session.unconfirmed():
                await asyncio.sleep(0)
            assert sum(len(data) for _, data, _ in link.sent) < 100
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting
            assert await store.delete_key("async/large")

    asyncio.run(main())


def test_replies_that_arrive_across_the_iterations_of_their_requests() -> None:
    """The last reply of each read is for the first of two requests that were sent together."""

    async def main() -> None:
        def ignored(*_: object) -> None: ...

        connection = AsyncConnection(ClientSession(), ignored, ignored)
        connection.transport = Mock(is_closing=lambda: False)
        link = connection.link = ClientSingleLink()

        async def ask() -> list[asyncio.Future[Any]]:
            both = [connection.call(BY_METHOD["check"], ([blob(b"k")],))[1] for _ in range(2)]
            await asyncio.sleep(0)
            return both

        futures = await ask()
        connection.data_received(b"\0")
        for _ in range(10):
            futures += await ask()
            connection.data_received(b"\0\0")
            assert len(link.sent) <= 3, "what the server has taken, and two iterations"
        connection.data_received(b"\0")
        assert len(link.sent) == 1
        assert await asyncio.gather(*futures) == [True] * 22

    asyncio.run(main())


def test_a_server_that_has_not_kept_the_session_ends_the_store(port: int) -> None:
    with resetter(port) as proxy, opened(proxy.port) as store:
        link = _connection(store).link
        assert link is not None
        link._secret = bytes(16)
        proxy.reset()
        with pytest.raises(DistNetworkError, match=r"reset by peer; the server did not keep the session: wrong secret"):
            store.add("k", 1)


# quirk: reset
def test_a_server_that_refuses_connections_is_gone() -> None:
    with tcpstore_server() as server, resetter(server.port) as proxy:
        store = opened(proxy.port)
        with store:
            proxy.refuse()
            proxy.reset()
            with pytest.raises(DistNetworkError, match="reset by peer"):
                store.add("k", 1)


def test_an_orderly_end_is_one() -> None:
    """A server that has ended is not looked for: calls fail at once, as they do without a link."""
    with tcpstore_server() as server:
        store = opened(server.port)
    with store, pytest.raises(DistNetworkError, match="Failed to recv"):
        store.add("k", 1)


def test_a_call_times_out_while_the_connection_is_replaced(port: int) -> None:
    with resetter(port) as proxy, opened(proxy.port) as store:
        store.set("k", "v")
        assert store.get("k") == b"v"
        proxy.target = 1  # nobody is there: the proxy closes what it accepts
        store.set_timeout(0.2)
        proxy.reset()
        began = time.monotonic()
        with pytest.raises(StoreTimeoutError):
            store.get("k")
        assert time.monotonic() - began < LIMIT
        proxy.target = port
        store.set_timeout(LIMIT)
        assert store.get("k") == b"v"
        store.delete_key("k")


_HANDLES = """
import signal, sys
from tcpstore_async import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), timeout=60)
store.queue_len("there is none")
print("ready", flush=True)
handled = 0
busy = False


def handle(number, frame):
    global handled, busy
    if busy:
        return
    busy = True
    handled += 1
    assert store.add("signal/handled", 1) == handled
    store.set("signal/last", str(handled))
    assert store.get("signal/last") == str(handled).encode()
    busy = False


signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.0171)
count = 0
while handled < 60:
    count += 1
    assert store.add("signal/count", 1) == count
    store.set("signal/large", b"x" * (1, 1000, 300_000)[count % 3])
    store.queue_push("signal/items", str(count))
signal.setitimer(signal.ITIMER_REAL, 0)
assert store.queue_len("signal/items") == count
assert [store.queue_pop("signal/items") for _ in range(count)] == [str(1 + n).encode() for n in range(count)]
for key in ("handled", "last", "count", "large"):
    store.delete_key("signal/" + key)
store.close()
"""


def _run_while_connections_break(port: int, program: str, seed: int) -> None:
    """Run a program, which prints a line when its connection is a link and then exits with 0 and without errors."""
    with (
        resetter(port) as proxy,
        subprocess.Popen(
            [sys.executable, "-c", program, str(proxy.port)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with resets(proxy, seed):
            _, errors = process.communicate(timeout=LIMIT)
        assert (process.returncode, errors) == (0, "")
        assert proxy.resets


@pytest.mark.unmeasured
def test_signal_handlers_use_a_store_whose_connections_break(port: int) -> None:
    _run_while_connections_break(port, _HANDLES, 5)


_RAISES = """
import signal, sys
from tcpstore_async import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), timeout=60)
store.queue_len("there is none")
print("ready", flush=True)
interrupts = tried = done = 0


class Interrupt(Exception):
    pass


def handle(number, frame):
    global interrupts
    interrupts += 1
    raise Interrupt


signal.signal(signal.SIGALRM, handle)
while interrupts < 100:
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.005)
        while True:
            tried += 1
            store.add("raised/count", 1)
            done += 1
            store.set("raised/text", "v")
    except Interrupt:
        pass
signal.setitimer(signal.ITIMER_REAL, 0)
assert done <= store.add("raised/count", 0) <= tried
for key in ("count", "text"):
    store.delete_key("raised/" + key)
store.close()
"""


@pytest.mark.unmeasured
def test_signal_handlers_raise_in_calls_whose_connections_break(port: int) -> None:
    _run_while_connections_break(port, _RAISES, 6)


@pytest.mark.unmeasured
def test_an_interrupt_that_hides_a_reset(port: int) -> None:
    with resetter(port) as proxy, opened(proxy.port) as store:
        connection = _connection(store)
        connection.interrupted(KeyboardInterrupt())
        assert connection.down is None
        interrupt = KeyboardInterrupt()
        interrupt.__context__ = ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        connection.interrupted(interrupt)
        assert connection.down is not None
        assert store.check(["k"]) is False


def test_a_call_that_times_out_while_it_resumes_does_not_end_the_session(port: int) -> None:
    with resetter(port) as proxy, opened(proxy.port) as store, ThreadPoolExecutor(1) as threads:
        connection = _connection(store)
        wait = threads.submit(store.wait, ["never"], 2.0)
        until(lambda: connection.parked)
        proxy.mutes = True  # LINK arrives, and its reply does not
        proxy.reset()
        with pytest.raises(StoreTimeoutError):
            wait.result(LIMIT)
        proxy.mutes = False
        proxy.reset()  # a connection made in the meantime would wait for its reply as long as the session is kept
        assert store.check(["never"]) is False


# quirk: reset
def test_a_request_that_times_out_when_it_is_partly_sent_is_executed_once(port: int) -> None:
    with resetter(port) as proxy, opened(proxy.port) as store:
        store.set_timeout(0.2)
        with proxy._lock, pytest.raises(StoreTimeoutError):  # nothing is carried
            store.append("large", bytes(8_000_000))
        store.set_timeout(LIMIT)
        assert len(store.get("large")) == 8_000_000
        store.delete_key("large")


def test_unsent_bytes_of_a_connection_whose_end_the_server_has_not_noticed_are_sent_once(port: int) -> None:
    value = os.urandom(6_000_000)
    connection = SyncConnection(*connect_blocking(Servers(("127.0.0.1", port)), Deadline(LIMIT)))
    with connection.peer as old:
        old.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.open_link(Deadline(LIMIT))
        link = connection.link
        assert link is not None
        link.note(set_(b"k", value) + get(b"k"))
        old.sendall(set_(b"k", value) + get(b"k"))
        select.select([old], [], [], LIMIT)
        link.received += len(old.recv(8))  # the server has sent as much as the kernel accepts
        peer, reply = resume_blocking(Servers(("127.0.0.1", port)), link, Deadline(LIMIT), lambda: True)
        with peer:
            assert link.resume(reply) == b""
            peer.sendall(delete(b"k"))
            expected = blob(value)[link.received :] + i64(1)
            found = bytearray()
            while len(found) < len(expected) and (data := peer.recv(1 << 20)):
                found += data
            assert found[:100] == expected[:100]
            assert bytes(found) == expected


def test_a_store_that_closes_while_its_connection_is_broken_withholds_no_item() -> None:
    with (
        tcpstore_server("--link-grace", "600") as server,
        resetter(server.port) as proxy,
        opened(proxy.port) as store,
        TCPStore("127.0.0.1", server.port, timeout=LIMIT) as other,
    ):
        other.queue_push("withheld", "item")
        with ThreadPoolExecutor(1) as threads:
            proxy.mutes = True  # the server leases the item, and its reply does not arrive
            store.set_timeout(1.0)
            pop = threads.submit(store.queue_pop, "withheld")
            until(lambda: other.queue_len("withheld") == 0)
            proxy.target = 1  # nobody is there: the proxy closes what it accepts
            proxy.reset()
            with pytest.raises(StoreTimeoutError):
                pop.result(LIMIT)
        proxy.mutes = False
        proxy.target = server.port
        store.close()
        assert other.queue_pop("withheld") == b"item"


def test_what_was_written_last_outlives_a_reset_behind_the_close(port: int) -> None:
    with (
        resetter(port) as proxy,
        opened(proxy.port) as store,
        TCPStore("127.0.0.1", port, timeout=LIMIT) as other,
        ThreadPoolExecutor(1) as threads,
    ):
        proxy.holds = True
        store.set("written last", "v")
        until(lambda: proxy.held() > 0)
        held = proxy.held()
        closing = threads.submit(store.close)
        until(lambda: closing.done() or proxy.held() > held)
        proxy.reset()
        proxy.holds = False
        closing.result(LIMIT)
        assert other.check(["written last"])


def test_what_an_async_client_wrote_last_outlives_a_reset_behind_the_close(port: int) -> None:
    async def main(proxy: Resetter) -> None:
        store = await AsyncTCPStore.connect("127.0.0.1", proxy.port, timeout=LIMIT)
        assert await store.server() is not None
        assert await store.num_keys() >= 0
        proxy.holds = True
        await store.set("async, written last", "v")
        while not (held := proxy.held()):
            await asyncio.sleep(0)
        closing = asyncio.ensure_future(store.close())
        while not closing.done() and proxy.held() == held:
            await asyncio.sleep(0)
        proxy.reset()
        proxy.holds = False
        await closing

    with resetter(port) as proxy, TCPStore("127.0.0.1", port, timeout=LIMIT) as other:
        asyncio.run(main(proxy))
        assert other.check(["async, written last"])


def test_what_a_closed_store_wrote_last_and_nobody_confirmed_is_logged(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        store = await AsyncTCPStore.connect("127.0.0.1", proxy.port, timeout=LIMIT)
        assert await store.server() is not None
        await store.num_keys()
        proxy.holds = True
        await store.set("async, never confirmed", "v")
        await store.close()

    with resetter(port) as proxy:
        with opened(proxy.port) as store:
            store.num_keys()
            proxy.holds = True
            store.set("never confirmed", "v")
        proxy.holds = False
        asyncio.run(main())
    said = f"the server at 127.0.0.1:{proxy.port} did not answer within 1 s: the store is closed"
    assert [record.getMessage().startswith(said) for record in caplog.records] == [True, True]


def test_closing_a_store_whose_server_does_not_answer_takes_a_second(port: int) -> None:
    with resetter(port) as proxy, opened(proxy.port) as store:
        connection = _connection(store)
        proxy.mutes = True
        proxy.reset()
        until(lambda: connection.down is not None)
        store.close()
        with pytest.raises(DistNetworkError, match="closed"):
            store.check(["k"])


def test_an_async_client_that_closes_while_it_resumes(port: int) -> None:
    """It gives up the connection on which the session was to continue; the session is the server's until it ends."""

    async def main(proxy: Resetter) -> None:
        store = await AsyncTCPStore.connect("127.0.0.1", proxy.port, timeout=LIMIT)
        assert await store.server() is not None
        proxy.mutes = True
        proxy.reset()
        call = asyncio.ensure_future(store.get("never"))
        await asyncio.sleep(0)
        await store.close()
        with pytest.raises(DistNetworkError, match="closed"):
            await call

    with resetter(port) as proxy:
        asyncio.run(main(proxy))


def test_an_async_client_that_closes_while_it_resumes_leaves_no_connection(port: int) -> None:
    """Although the cancel of `close` is swallowed, as `wait_for` may do before Python 3.12."""

    async def main(proxy: Resetter) -> None:
        store = await AsyncTCPStore.connect("127.0.0.1", proxy.port, timeout=LIMIT)
        assert await store.server() is not None
        await store.set("k", "v")
        assert await store.get("k") == b"v"
        [connection] = store._connections
        reach, begun, resumed = connection._reach, asyncio.Event(), asyncio.Event()
        assert reach is not None

        async def reach_although_canceled(*args: Any) -> tuple[socket.socket, bytes]:
            begun.set()
            going = asyncio.ensure_future(reach(*args))
            while not going.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([going])
            resumed.set()
            return going.result()

        connection._reach = reach_although_canceled
        proxy.reset()
        await begun.wait()
        resuming = connection._resuming
        assert resuming is not None
        await store.close()
        await asyncio.wait([resuming])
        assert resumed.is_set()
        assert connection.transport.is_closing()

    with resetter(port) as proxy:
        asyncio.run(main(proxy))


def test_an_idle_store_that_could_not_go_on_says_why() -> None:
    with tcpstore_server("--link-grace", "1") as server, resetter(server.port) as proxy, opened(proxy.port) as store:
        proxy.target = 1  # nobody is there: the proxy closes what it accepts
        proxy.reset()
        until(lambda: not store._client or bool(store._client._lost))
        with pytest.raises(DistNetworkError, match="reset by peer; "):
            store.check(["k"])


def test_so_does_one_whose_server_does_not_answer() -> None:
    with tcpstore_server("--link-grace", "1") as server, resetter(server.port) as proxy, opened(proxy.port) as store:
        proxy.mutes = True
        proxy.reset()
        until(lambda: not store._client or bool(store._client._lost))
        with pytest.raises(DistNetworkError, match="could not be resumed: no answer"):
            store.check(["k"])


def test_a_late_reply_to_link_is_taken_by_the_next_call(port: int) -> None:
    with resetter(port) as proxy:
        connection = SyncConnection(*connect_blocking(Servers(("127.0.0.1", proxy.port)), Deadline(LIMIT)))
        with connection.peer:
            with proxy._lock, pytest.raises(DeadlineExceeded):  # nothing is carried
                connection.open_link(Deadline(0.01))
            assert not connection.broken
            connection.drain_abandoned_calls(Deadline(LIMIT))
            assert connection.link is not None
            connection.open_link(Deadline(LIMIT))
            call = connection.request(NO_KEY, Deadline(LIMIT))
            connection.read_until(call, Deadline(LIMIT))
            assert call.done


def _has_late_reply(store: TCPStore) -> bool:
    peer = _connection(store).peer
    return bool(select.select([peer], [], [], 0)[0]) and peer.recv(1, socket.MSG_PEEK) != b""


@pytest.mark.parametrize("call", [lambda store: store.queue_pop("none"), lambda store: store.add("late", 1)])
def test_an_idle_connection_with_a_late_reply_is_reset(port: int, call: Callable[[TCPStore], object]) -> None:
    """The reply to a call that timed out hides the error of the reset."""
    with resetter(port) as proxy, opened(proxy.port) as store:
        store.set("k", "v")
        assert store.get("k") == b"v"
        before = _connection(store).peer.getsockname()
        proxy.holds = True
        store.set_timeout(0.1)
        with pytest.raises(StoreTimeoutError):
            call(store)
        proxy.holds = False
        until(functools.partial(_has_late_reply, store))
        store.set_timeout(LIMIT)
        assert proxy.reset() == 1
        until(functools.partial(_is_replaced, store, before))
        assert store.get("k") == b"v"
        store.delete_key("k")


def test_a_pop_that_times_out_while_its_connection_is_down_takes_no_item(port: int) -> None:
    """Nobody calls the store again: what its idle connection is resumed with says that the pop was given up."""
    with (
        resetter(port) as proxy,
        opened(proxy.port) as store,
        TCPStore("127.0.0.1", port, timeout=LIMIT) as other,
        ThreadPoolExecutor(1) as threads,
    ):
        store.set_timeout(1.0)
        pop = threads.submit(store.queue_pop, "given up")
        connection = _connection(store)
        until(lambda: connection.parked)
        other.queue_len("given up")  # the pop has arrived
        proxy.target = 1  # nobody is there: the proxy closes what it accepts
        assert proxy.reset() == 1
        with pytest.raises(StoreTimeoutError):
            pop.result(LIMIT)
        assert connection.down is not None
        proxy.target = port
        until(lambda: connection.down is None)
        other.queue_push("given up", "item")
        assert other.queue_pop("given up") == b"item"


def test_a_pop_whose_connection_breaks_when_it_is_given_up_takes_no_item(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        resetter(port) as proxy,
        opened(proxy.port) as store,
        TCPStore("127.0.0.1", port, timeout=LIMIT) as other,
    ):
        cancel = SyncConnection.cancel

        def break_and_cancel(connection: SyncConnection) -> None:
            if connection.session.waiting is not None:
                proxy.reset()
                until(connection.hung_up)
            cancel(connection)

        monkeypatch.setattr(SyncConnection, "cancel", break_and_cancel)
        store.set_timeout(0.5)
        with pytest.raises(StoreTimeoutError):
            store.queue_pop("given up")
        until(lambda: _connection(store).down is None)
        other.queue_push("given up", "item")
        assert other.queue_pop("given up") == b"item"


@pytest.mark.parametrize("linked_to", [False, True], ids=["connecting", "LINK sent"])
def test_an_async_client_whose_tasks_are_all_canceled_while_it_resumes(port: int, linked_to: bool) -> None:
    async def main(proxy: Resetter) -> None:
        async with linked(proxy.port) as (store, connection, _):
            await store.set("canceled", "v")
            assert await store.get("canceled") == b"v"
            if linked_to:
                proxy.mutes = True  # LINK arrives, and its reply does not
            else:
                proxy.target = 1  # nobody is there: the proxy closes what it accepts
            proxy._replied.clear()
            proxy.reset()
            while connection._resuming is None or (linked_to and max([*proxy._replied.values(), 0]) <= _PING_BYTES):
                await asyncio.sleep(0)
            resuming = connection._resuming
            while not resuming.done():  # before Python 3.12, `wait_for` may swallow a cancellation
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()
                await asyncio.sleep(0)
            assert resuming.cancelled()
            proxy.mutes = False
            proxy.target = port
            assert await store.get("canceled") == b"v"
            assert await store.delete_key("canceled")

    with resetter(port) as proxy:
        asyncio.run(main(proxy))


def test_an_async_client_that_is_left_open_while_it_resumes_leaves_no_task(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(proxy: Resetter) -> AsyncTCPStore:
        store = await AsyncTCPStore.connect("127.0.0.1", proxy.port, timeout=LIMIT)
        assert await store.server() is not None
        (connection,) = store._connections
        proxy.target = 1
        proxy.reset()
        while connection._resuming is None:
            await asyncio.sleep(0)
        return store

    with resetter(port) as proxy:
        store = asyncio.run(main(proxy))
        with pytest.warns(ResourceWarning, match="was not closed"):  # noqa: PT031
            del store
            gc.collect()
    assert not caplog.records


async def test_a_reason_that_nobody_waits_for_any_more() -> None:
    """The task that asks for it is canceled, with all others: the connection is lost all the same."""
    begun = asyncio.Event()

    async def ask(_: str) -> DistNetworkError:
        begun.set()
        await asyncio.sleep(LIMIT)
        raise AssertionError

    def ignored(*_: object) -> None: ...

    connection = AsyncConnection(ClientSession(), ignored, ignored, lost_error=ask)
    connection.transport = Mock(get_extra_info=lambda _: None)
    _, future = connection.call(*NO_KEY)
    connection.connection_lost(None)
    await begun.wait()
    assert connection._resuming is not None
    connection._resuming.cancel()
    with pytest.raises(DistNetworkError, match="Failed to recv"):
        await asyncio.wait_for(future, LIMIT)


def test_calls_of_an_async_client_do_not_pile_up_while_its_connection_is_down(port: int) -> None:
    """Those that find no space time out without being made, and can be made once the connection has been resumed."""
    value = "v" * (UNANSWERED_BYTES // 4)

    async def main(proxy: Resetter) -> None:
        async with linked(proxy.port) as (store, connection, _):
            assert await store.add("piled/count", 0) == 0
            proxy.target = 1  # nobody is there: the proxy closes what it accepts
            proxy.reset()
            while connection._resuming is None:
                await asyncio.sleep(0)
            store.set_timeout(0.01)
            for _ in range(12):
                with pytest.raises(StoreTimeoutError):
                    await store.set("piled/value", value)
            assert sum(map(len, connection._outbox)) <= UNANSWERED_BYTES + len(value)
            with pytest.raises(StoreTimeoutError):
                await store.add("piled/count", 1)
            with pytest.raises(StoreTimeoutError):
                await store.get("piled/count")
            with pytest.raises(StoreTimeoutError):
                await store.wait(["piled/count"])
            store.set_timeout(LIMIT)
            later = [asyncio.ensure_future(store.add("piled/count", 1)) for _ in range(3)]
            await asyncio.sleep(0)
            proxy.target = port
            assert sorted(await asyncio.gather(*later)) == [1, 2, 3]
            assert await store.get("piled/value") == value.encode()
            for key in ("count", "value"):
                await store.delete_key(f"piled/{key}")

    with resetter(port) as proxy:
        asyncio.run(main(proxy))


def test_an_async_call_that_waits_for_space_fails_with_the_store(port: int) -> None:
    async def main(proxy: Resetter) -> None:
        async with linked(proxy.port) as (store, connection, _):
            proxy.target = 1
            proxy.reset()
            while connection._resuming is None:
                await asyncio.sleep(0)
            calls = [asyncio.ensure_future(store.set("piled", "v" * UNANSWERED_BYTES)) for _ in range(2)]
            await asyncio.sleep(0)
            assert connection.space is not None
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, DistNetworkError)

    with resetter(port) as proxy:
        asyncio.run(main(proxy))


@pytest.mark.interpreted("no method of a compiled class can be replaced")
@pytest.mark.unmeasured
@pytest.mark.parametrize("within", ["drain_abandoned_calls", "confirm_writes"])
def test_an_interrupt_that_hides_a_reset_before_the_call(
    port: int, within: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It strikes between the kernel's error and the note that the connection is down, while it is being leased."""

    def interrupt(*_: object) -> None:
        raised = KeyboardInterrupt()
        raised.__context__ = ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        raise raised

    with resetter(port) as proxy, opened(proxy.port) as store:
        connection = _connection(store)
        store.set_timeout(0.1)
        proxy.holds = True
        with pytest.raises(StoreTimeoutError):
            store.queue_len("none")
        store.set_timeout(LIMIT)
        client = store._client
        assert client is not None
        client._detour = True
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            if within == "confirm_writes":
                patched.setattr(SyncConnection, "drain_abandoned_calls", lambda *_: None)
                patched.setattr(client, "_unconfirmed_beside", lambda _: True)
            patched.setattr(SyncConnection, within, interrupt)
            store.wait(["none"])
        assert connection.down is not None
        proxy.holds = False
        assert store.check(["k"]) is False
