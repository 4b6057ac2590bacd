"""The threaded server inside the test's own process: how its threads interact, and that none is left."""

import asyncio
import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest

from conformance.frames import fetch
from faults.fault_helpers import Watch, get, until
from relay.load import Load
from support import LIMIT, RawPeer, alarms, blob, keys, tcpstore_server, u64
from tcpstore_async import serve
from tcpstore_async.base.limits import Limits
from tcpstore_async.server.backends import BACKENDS
from tcpstore_async.server.listen_socket import listen
from tcpstore_async.server.master import ServerHandle, host
from tcpstore_async.server.threaded import _READ, Connection, ThreadedServer
from tcpstore_async.server.threads import FairLock, Worker
from tcpstore_async.wire.commands import JOINS_KEY
from tcpstore_async.wire.values import Framed

pytestmark = [pytest.mark.slow, pytest.mark.needs_proc]

MIB = 1 << 20

SET_K = b"\x01" + blob(b"/k") + blob(b"v")


def threads() -> set[threading.Thread]:
    return set(threading.enumerate())


class Served:
    """A server whose loop runs in a thread of its own, for the test to call as the loop would."""

    def __init__(self, server: ThreadedServer, loop: asyncio.AbstractEventLoop) -> None:
        self.server = server
        self.port = server.port
        self._loop = loop

    def stop(self) -> None:
        """Have the loop stop it, and wait until it has."""

        async def stop() -> None:
            self.server.stop()

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(LIMIT)

    def drain(self, grace: float) -> "Future[None]":
        return asyncio.run_coroutine_threadsafe(self.server.drain(grace), self._loop)

    def poll(self) -> None:
        """Have the loop ask for the lock."""
        self._loop.call_soon_threadsafe(self.server.all_joined)

    def connection(self, peer: RawPeer) -> Connection:
        """Return the server's connection for a peer, once there is one."""
        port = peer.socket.getsockname()[1]
        peer.ping()
        [found] = [one for one in list(self.server.connections) if one.session.port == port]
        return found


@contextmanager
def served(limits: Limits | None = None) -> Iterator[Served]:
    """A server, of which no thread is left when it has stopped."""
    before = threads()
    started: Future[Served] = Future()
    over: Future[None] = Future()

    async def main() -> None:
        async with serve(limits=limits, backend="threaded") as server:
            assert isinstance(server, ThreadedServer)
            started.set_result(Served(server, asyncio.get_running_loop()))
            await asyncio.wrap_future(over)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(asyncio.run, main())
        try:
            yield started.result(LIMIT)
        finally:
            over.set_result(None)
            running.result(LIMIT)
    assert threads() == before


@pytest.fixture
def server() -> Iterator[Served]:
    with served() as running:
        yield running


@pytest.fixture
def other(server: Served) -> Iterator[RawPeer]:
    """Another peer, which is served to the end."""
    with RawPeer(server.port) as peer:
        peer.ping()
        yield peer
        peer.ping()


# The lock


def test_the_lock_is_fair() -> None:
    lock = FairLock()
    order: list[int] = []

    def ask(i: int) -> None:
        with lock:
            order.append(i)

    asking = [threading.Thread(target=ask, args=[i]) for i in range(20)]
    with lock:
        for thread in asking:
            length = len(lock._waiting)
            thread.start()
            until(lambda: len(lock._waiting) > length, "it waits for the lock")  # noqa: B023
    for thread in asking:
        thread.join(LIMIT)
    assert order == list(range(20))


def test_an_interrupt_while_waiting_for_the_lock_withdraws() -> None:
    lock = FairLock()
    held = threading.Event()
    go = threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            go.wait(LIMIT)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(LIMIT)
    try:
        with pytest.raises(KeyboardInterrupt), alarms(signal.default_int_handler, 0.05), lock:
            pass
    finally:
        go.set()
        holder.join(LIMIT)
    with lock:
        pass


def test_a_peer_that_floods_does_not_starve_others(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much a peer has sent, one that has waited for the lock is served after one of its chunks."""
    executed: list[int] = []
    real = Connection._execute

    def execute(connection: Connection, chunk: bytes) -> None:
        executed.append(connection.session.port)
        real(connection, chunk)

    lock = server.server.turn
    assert isinstance(lock, FairLock)
    with RawPeer(server.port) as flooding, RawPeer(server.port) as other:
        flooding.ping()
        other.ping()
        monkeypatch.setattr(Connection, "_execute", execute)
        with lock:
            server.poll()
            until(lambda: len(lock._waiting) == 1, "the loop waits for the lock, and no timer will")
            flooding.send(b"\x0c" * (4 * _READ))
            until(lambda: len(lock._waiting) == 2, "the flooding peer's thread waits for the lock")
            other.send(SET_K)
            until(lambda: len(lock._waiting) == 3, "the other peer's thread waits for the lock")
        flooding.read(4 * _READ)
        flood, second = (peer.socket.getsockname()[1] for peer in (flooding, other))
    assert executed[:3] == [flood, second, flood]


def test_a_command_that_waits_for_deferred_work_does_not_ask_for_the_lock(
    server: Served, other: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else hundreds of them would starve everybody, the deferred work included."""
    names = [b"/%d" % i for i in range(20)]
    multi_set = b"\x0b" + u64(len(names)) + b"".join(blob(name) + blob(b"") for name in names)
    go = threading.Event()
    real_work, real_execute = ThreadedServer.work, Connection._execute
    executed: list[Connection] = []

    def work(self: ThreadedServer) -> None:
        go.wait(LIMIT)
        real_work(self)

    def execute(self: Connection, chunk: bytes) -> None:
        executed.append(self)
        real_execute(self, chunk)

    with ExitStack() as stack:
        waiting, first, second = (stack.enter_context(RawPeer(server.port)) for _ in range(3))
        connection = server.connection(second)
        server.connection(first)
        server.connection(waiting)
        server.server.store.keyspace.portion = 4
        monkeypatch.setattr(ThreadedServer, "work", work)
        monkeypatch.setattr(Connection, "_execute", execute)
        stack.callback(go.set)
        waiting.send(b"\x06" + keys(*names))
        until(lambda: server.server.store.keyspace.waiters.get(names[-1]), "it waits")
        first.send(multi_set)
        until(lambda: server.server.store.keyspace.waking, "deferred work is to wake it")
        second.send(multi_set)
        until(lambda: connection.session.running, "the second waits for that work")
        for _ in range(50):
            other.ping()
        assert executed.count(connection) <= 2
        go.set()
        assert waiting.read(1) == b"\0"
        second.ping()


# Writing


def behind(server: Served, stack: ExitStack, *, before: bytes = b"") -> RawPeer:
    """Return a peer that has requested 32 MiB and reads nothing."""
    peer = stack.enter_context(RawPeer(server.port))
    connection = server.connection(peer)
    peer.send(b"\x01" + blob(b"/big") + blob(bytes(MIB)) + before + (b"\x03" + blob(b"/big")) * 32)
    until(lambda: not connection.caught_up.is_set(), "the kernel takes no more")
    return peer


def reads_all(peer: RawPeer) -> None:
    for _ in range(32):
        assert peer.read(MIB + 8) == blob(bytes(MIB))


def test_a_waiter_with_unsent_bytes_is_woken(server: Served, other: RawPeer) -> None:
    with ExitStack() as stack:
        peer = behind(server, stack, before=b"\x06" + keys(b"/k"))
        other.send(SET_K)
        other.ping()
        received = b"".join(peer.read(MIB + 8) for _ in range(32)) + peer.read(1)
        assert len(received.replace(blob(bytes(MIB)), b"")) == 1, "the wake-up stands between two values"
        peer.ping()


def test_a_large_value_for_many_that_wait_and_do_not_read(server: Served, other: RawPeer) -> None:
    """One thread writes for all of them. No other peer waits, and every byte arrives."""
    value = bytes(8 * MIB)
    with ExitStack() as stack:
        peers = [stack.enter_context(RawPeer(server.port)) for _ in range(20)]
        for peer in peers:
            peer.ping()
            peer.send(fetch(b"/large"))
        until(lambda: len(server.server.store.keyspace.waiters.get(b"/large", ())) == 20, "all wait")
        other.send(b"\x01" + blob(b"/large") + blob(value))
        for _ in range(100):
            other.ping()
        for peer in peers[:10]:
            assert peer.read(len(value) + 8) == blob(value)
            peer.ping()
        for peer in peers[10:15]:
            peer.reset()
    until(lambda: server.server.count == 1, "all have left")


@pytest.mark.parametrize("ending", ["close", "reset"])
def test_a_peer_that_leaves_while_it_is_written_to(server: Served, other: RawPeer, ending: str) -> None:
    """Both while its own thread waits, and while it reads and another peer's command made the reply."""
    with ExitStack() as stack:
        for _ in range(5):
            peer = behind(server, stack)
            fetching = stack.enter_context(RawPeer(server.port))
            connection = server.connection(fetching)
            fetching.send(fetch(b"/large"))
            until(lambda: connection.session.state, "it waits")  # noqa: B023
            other.send(b"\x01" + blob(b"/large") + blob(bytes(8 * MIB)))
            until(lambda: not connection.caught_up.is_set(), "the kernel takes no more")  # noqa: B023
            for gone in (peer, fetching):
                gone.reset() if ending == "reset" else gone.close()
            until(lambda: server.server.count == 1, "both are gone")
            other.ask(b"\x08" + blob(b"/large"), 8)
    until(lambda: not server.server.writer._behind, "nothing is left to write")


def test_requests_below_the_high_water_mark_are_executed(server: Served, other: RawPeer) -> None:
    """As on the event-driven server: only a peer above the mark is not read from."""
    with RawPeer(server.port) as peer:
        connection = server.connection(peer)
        peer.send(b"\x01" + blob(b"/part") + blob(bytes(100_000)))
        while connection.caught_up.is_set():
            peer.send(b"\x03" + blob(b"/part"))
            time.sleep(0.001)
        assert connection.session.unsent < MIB
        peer.send(SET_K)
        until(lambda: get(other, b"/k") == b"v", "the request is done")


# Internal errors


class Defect(Exception):
    pass


def test_an_internal_error_while_a_waiter_is_woken_closes_only_the_waiter(
    server: Served, other: RawPeer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with RawPeer(server.port) as waiting, RawPeer(server.port) as second:
        broken = server.connection(waiting)
        for peer in (waiting, second):
            peer.send(b"\x06" + keys(b"/k"))
        until(lambda: len(server.server.store.keyspace.waiters.get(b"/k", ())) == 2, "both wait")
        send = Connection._send

        def fail(connection: Connection, out: list[Framed]) -> None:
            if connection is broken:
                raise Defect
            send(connection, out)

        monkeypatch.setattr(Connection, "_send", fail)
        other.send(SET_K)
        assert waiting.closed()
        assert second.read(1) == b"\0"
        other.ping()
    assert "after an internal error" in caplog.text


def test_an_internal_error_in_the_writing_thread_closes_one_connection(
    server: Served, other: RawPeer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        first = behind(server, stack)
        second = behind(server, stack)
        broken = server.server.writer._behind[min(server.server.writer._behind)]
        push = Connection.push

        def fail(connection: Connection) -> None:
            if connection is broken:
                raise Defect
            push(connection)

        monkeypatch.setattr(Connection, "push", fail)
        if broken.session.port == second.socket.getsockname()[1]:
            first, second = second, first
        with pytest.raises((EOFError, ConnectionError)):
            reads_all(first)
        reads_all(second)
    assert caplog.text.count("after an internal error") == 1


# Threads that cannot be had


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event; while it is set, no server can start a thread."""
    refused = threading.Event()
    start = Worker.start

    def start_if_allowed(worker: Worker) -> None:
        if refused.is_set():
            raise RuntimeError("can't start new thread")
        start(worker)

    monkeypatch.setattr(Worker, "start", start_if_allowed)
    return refused


def test_a_connection_waits_until_a_thread_can_be_started(
    server: Served, other: RawPeer, no_threads: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    no_threads.set()
    with RawPeer(server.port) as first, RawPeer(server.port) as second:
        for peer in (first, second):
            peer.send(b"\x0dpong")
        until(lambda: "cannot accept connections for now: can't start new thread" in caplog.text, "it is logged")
        other.ping()
        no_threads.clear()
        assert first.read(4) == second.read(4) == b"pong"


def test_a_stop_while_there_is_no_thread(no_threads: threading.Event, caplog: pytest.LogCaptureFixture) -> None:
    with served() as server, RawPeer(server.port) as peer:
        peer.ping()
        no_threads.set()
        with RawPeer(server.port) as late_peer:
            until(lambda: "cannot accept" in caplog.text, "somebody waits for a thread")
            server.stop()
            assert late_peer.closed()
            assert peer.closed()


async def test_a_server_that_cannot_have_its_threads_does_not_start(no_threads: threading.Event) -> None:
    before = threads()
    no_threads.set()
    listener = listen("127.0.0.1", 0)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        async with serve(listener=listener, backend="threaded"):
            pass
    assert listener.fileno() == -1
    assert threads() == before


# Ends


def test_a_stop_with_everybody_in_the_midst_of_something() -> None:
    files = Watch(os.getpid()).files()
    with ExitStack() as stack, served() as server:
        behind(server, stack)
        peers = [stack.enter_context(RawPeer(server.port)) for _ in range(30)]
        for i, peer in enumerate(peers):
            peer.ping()
            peer.send([b"\x06" + keys(b"/never"), b"\x01" + blob(b"/half")[:5], fetch(b"/never")][i % 3])
        server.stop()
        server.stop()
        assert all(peer.closed() for peer in peers)
        assert server.server.count == 0
    assert Watch(os.getpid()).files() <= files


def test_a_stop_while_many_come() -> None:
    for _ in range(5):
        with served() as server:
            over = threading.Event()

            def come(port: int = server.port, over: threading.Event = over) -> None:
                with suppress(OSError):
                    while not over.is_set():
                        RawPeer(port, validate=False).close()

            coming = [threading.Thread(target=come) for _ in range(4)]
            for thread in coming:
                thread.start()
            until(lambda: server.server.count, "somebody is there")
            server.stop()
            over.set()
            for thread in coming:
                thread.join(LIMIT)


async def test_a_server_that_was_never_started() -> None:
    server = ThreadedServer(listen("127.0.0.1", 0), Limits())
    server.stop()
    server.stop()
    assert server.listener.fileno() == -1


def test_a_connection_accepted_just_before_the_drain_has_its_grace(server: Served) -> None:
    with RawPeer(server.port) as peer:
        peer.ping()
        draining = server.drain(LIMIT)
        until(lambda: server.server.listener.fileno() == -1, "the port is free")
        peer.ping()
        assert not draining.done()
    draining.result(LIMIT)


def test_threads_that_have_ended_are_not_kept(server: Served) -> None:
    for _ in range(50):
        with RawPeer(server.port) as peer:
            peer.ping()
    until(lambda: server.server.count == 0, "all are gone")
    with RawPeer(server.port) as peer:
        peer.ping()
        assert len(server.server._threads) < 20


def test_a_forked_child_does_not_keep_the_server_from_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCPSTORE_SERVER", "thread")
    before = threads()
    hosted = host(0, backend="threaded")
    ours, theirs = socket.socketpair()
    with ours, theirs, RawPeer(hosted.port) as peer:
        peer.ping()
        child = os.fork()
        if child == 0:
            theirs.recv(1)
            os._exit(0)
        try:
            releasing = threading.Thread(target=hosted.release, daemon=True)
            releasing.start()
            releasing.join(LIMIT)
            assert not releasing.is_alive()
            assert peer.closed()
            assert threads() == before
        finally:
            ours.send(b"\0")
            os.waitpid(child, 0)


def test_a_collection_in_a_thread_of_the_server_may_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection's thread finds a cycle with the last handle while it has the lock; it must not wait for itself."""
    monkeypatch.setenv("TCPSTORE_SERVER", "thread")
    before = threads()
    holder: list[object] = [host(0, backend="threaded")]
    assert isinstance(holder[0], ServerHandle)
    port = holder[0].port
    holder.append(holder)
    collected: list[bool] = []

    class Collecting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            collected.append(isinstance(threading.current_thread(), Worker))
            gc.collect()

    handler = Collecting()
    logging.getLogger("tcpstore_async.server").addHandler(handler)
    gc.disable()
    try:
        with RawPeer(port) as peer, RawPeer(port) as parked:
            parked.send(b"\x06" + keys(b"/never"))
            parked.ping()
            del holder
            peer.send(b"\xff")
            assert peer.closed()
            assert parked.closed()
    finally:
        gc.enable()
        logging.getLogger("tcpstore_async.server").removeHandler(handler)
    assert collected == [True]
    until(lambda: threads() == before, "its threads have ended")


# Commands of its owner


@pytest.mark.parametrize("where", ["process", "thread"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_announcement_can_be_read(monkeypatch: pytest.MonkeyPatch, where: str, backend: str) -> None:
    monkeypatch.setenv("TCPSTORE_SERVER", where)
    hosted = host(0, backend=backend)
    assert hosted.backend == backend
    hosted.announce(2)
    hosted.announce(1)
    with RawPeer(hosted.port) as peer:
        until(lambda: get(peer, JOINS_KEY) == b"3", "it is known")
    hosted.complete()
    hosted.release()


@pytest.mark.parametrize("backend", BACKENDS)
async def test_latecomers_are_dismissed(backend: str) -> None:
    async with serve(backend=backend) as server:
        with RawPeer(server.port) as early, RawPeer(server.port) as nameless:
            await asyncio.to_thread(early.ping, 1)
            await asyncio.to_thread(nameless.ask, b"\x07", 8)
            complete = time.monotonic()
            with RawPeer(server.port) as same, RawPeer(server.port) as late, RawPeer(server.port) as waiting:
                await asyncio.to_thread(same.ping, 1)
                await asyncio.to_thread(late.ping, 2)
                await asyncio.to_thread(waiting.ask, b"\x07", 8)  # so it has been accepted
                for peer in (late, waiting):
                    peer.send(b"\x06" + keys(b"/queue"))
                await asyncio.to_thread(late.ping, 2)
                server.close_latecomers(complete)
                assert await asyncio.to_thread(late.closed)
                assert await asyncio.to_thread(waiting.closed)
                for peer in (early, same):
                    await asyncio.to_thread(peer.ping, 1)
                await asyncio.to_thread(nameless.ping, 3)
                assert server.count == 3


# All at once


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_clients_with_random_commands(backend: str) -> None:
    with tcpstore_server("--backend", backend) as server, RawPeer(server.port) as peer:
        peer.ping()
        watch = Watch(server.process.pid)
        before = watch.threads()
        load = Load(b"load", [server.port] * 64)
        until(lambda: load.rounds >= 10 or not load.alive(), "all have met")
        load.stop()
        load.judge(peer)
        until(lambda: watch.threads() == before, "their threads have ended")
        assert "Traceback" not in server.log()


async def test_stopping_is_no_trouble_with_accepting(caplog: pytest.LogCaptureFixture) -> None:
    """The listener is shut down first."""
    for _ in range(20):
        async with serve(backend="threaded"):
            pass
    assert "cannot accept" not in caplog.text
