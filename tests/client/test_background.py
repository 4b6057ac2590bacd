"""The background loop: who starts and stops it, what it notices, and what it must not disturb."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import queue
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from client.fakes import Fake, answer_probe, fake_server, greet
from support import LIMIT, alarms, run_python, tcpstore_server, until
from tcpstore_async import DistNetworkError, TCPStore
from tcpstore_async.client import background

LOST = r"remote server shutdown|reset|Broken pipe"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with tcpstore_server() as server:
        yield server.port


@pytest.fixture(autouse=True)
def _no_loop() -> Iterator[None]:
    """No test leaves a loop or its thread, nor begins with one."""
    assert background.running() is None
    yield
    assert background.running() is None
    until(lambda: not threads())


class Losses(logging.Handler):
    """Collects what the client logs, and is set by it."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.noticed = threading.Event()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.noticed.set()


@pytest.fixture
def losses() -> Iterator[Losses]:
    logger = logging.getLogger("tcpstore_async.client")
    handler = Losses()
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == background.THREAD_NAME]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def pool_of(store: TCPStore) -> Any:
    assert store._client is not None
    return store._client


# Start and end


@pytest.mark.needs_proc
def test_it_starts_with_the_first_call_and_ends_with_the_last_store(port: int) -> None:
    opened = descriptors()
    alive = threading.active_count()
    with TCPStore("127.0.0.1", port, timeout=LIMIT) as first, TCPStore("127.0.0.1", port, timeout=LIMIT) as second:
        assert not threads(), "a store that makes no call needs no thread"
        first.set("k", "v")
        loop = background.running()
        assert loop is not None
        assert len(threads()) == 1
        assert second.get("k") == b"v"
        assert set(loop.clients) == {first._client, second._client}
        first.close()
        assert background.running() is loop
        assert second.get("k") == b"v"
    assert background.running() is None
    assert not threads()
    assert threading.active_count() == alive
    assert descriptors() == opened


def test_it_ends_though_a_task_swallows_its_cancellation(port: int) -> None:
    """As `asyncio.wait_for` does before Python 3.12 if what it waits for has just ended."""
    begun, swallowed, ended = threading.Event(), threading.Event(), threading.Event()

    async def task() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            swallowed.set()
        await asyncio.Event().wait()

    with TCPStore("127.0.0.1", port, timeout=LIMIT) as store:
        store.set("k", "v")
        background.call_soon(lambda: background.spawn(task(), lambda _: ended.set()))
        assert begun.wait(LIMIT)
    until(lambda: not threads())
    assert swallowed.is_set()
    assert ended.is_set()


def test_many_stores_share_one_loop(port: int) -> None:
    stores = [TCPStore("127.0.0.1", port, timeout=LIMIT) for _ in range(20)]
    with ThreadPoolExecutor(8) as workers:
        list(workers.map(lambda store: store.add("n", 1), stores))
        for store in stores:
            store.check(["n"])  # two that start at once: one is told to try again
        loop: Any = background.running()
        assert len(threads()) == 1
        assert len(loop.clients) == 20
        list(workers.map(TCPStore.close, stores))


class Interrupted(BaseException):
    """Raised by a signal handler."""


@contextmanager
def interrupted(where: type, method: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have a handler raise in the main thread while `method` runs, which ends only once the handler has."""
    handled = threading.Event()
    real: Callable[..., Any] = getattr(where, method)

    def handle(*_: object) -> None:
        handled.set()
        raise Interrupted

    def interrupt(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        handled.wait(LIMIT)
        return real(*given)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with monkeypatch.context() as patch, pytest.raises(Interrupted):
            patch.setattr(where, method, interrupt)
            yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.unmeasured
@pytest.mark.needs_proc
@pytest.mark.parametrize("method", ["__init__", "start", "watch"])
def test_an_interrupt_while_it_starts(port: int, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is watched all the same, and nothing is left of it in the end."""
    opened = descriptors()
    with TCPStore("127.0.0.1", port, timeout=LIMIT) as store:
        with interrupted(background.BackgroundLoop, method, monkeypatch):
            store.check(["k"])
        store.check(["k"])
        until(lambda: (loop := background.running()) is not None and pool_of(store) in loop.clients)
        assert len(threads()) == 1
    until(lambda: not background._alive)
    until(lambda: descriptors() == opened)


@pytest.mark.unmeasured
@pytest.mark.needs_proc
@pytest.mark.parametrize("method", ["forget", "stop", "call_soon"])
def test_an_interrupt_while_it_ends(port: int, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = descriptors()
    store = TCPStore("127.0.0.1", port, timeout=LIMIT)
    store.check(["k"])
    with interrupted(background.BackgroundLoop, method, monkeypatch):
        store.close()
    store.close()
    until(lambda: background.running() is None and not background._alive)
    until(lambda: descriptors() == opened)


def test_the_last_of_two_stores_that_close_at_once_stops_it(port: int) -> None:
    """While the first checked for others, the second found the lock taken, and nobody stopped the loop."""
    with TCPStore("127.0.0.1", port, timeout=LIMIT) as store, ThreadPoolExecutor(1) as closers:
        store.check(["k"])
        loop = background.running()
        assert loop is not None
        with background._changing:
            closing = closers.submit(store.close)
            until(lambda: not loop.clients)
        closing.result(LIMIT)
        assert background.running() is None


def test_a_forgotten_store_releases_it(port: int) -> None:
    store: Any = TCPStore("127.0.0.1", port, timeout=LIMIT)
    store.set("k", "v")
    assert threads()
    with pytest.warns(  # noqa: PT031
        ResourceWarning, match=r"^a TCPStore was not closed: TCPStore\(client=TCPClient\(SocketImpl\(fd="
    ):
        del store
        gc.collect()
    assert background.running() is None


def test_starting_and_ending_it_again_and_again(port: int) -> None:
    """By several threads at once: no thread is left over, and no store is left unwatched for good."""

    def work(number: int) -> None:
        for _ in range(30):
            with TCPStore("127.0.0.1", port, timeout=LIMIT) as store:
                store.add(f"again{number}", 1)

    with ThreadPoolExecutor(4) as workers:
        list(workers.map(work, range(4)))
    with TCPStore("127.0.0.1", port, timeout=LIMIT) as store:
        assert [store.add(f"again{number}", 0) for number in range(4)] == [30] * 4
        assert len(threads()) == 1


@pytest.mark.needs_proc
def test_without_a_thread_calls_go_on(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    opened = descriptors()
    with TCPStore("127.0.0.1", port, timeout=LIMIT) as store:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            assert store.add("threadless", 1) == 1
            assert store.add("threadless", 1) == 2
        assert background.running() is None
    assert descriptors() == opened


# For a process group that is being formed


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """What ends the delay, which is as good as endless."""
    monkeypatch.setattr(background, "_DEFER_SECONDS", LIMIT)
    yield lambda: background._deferred._hurry.put(None)
    background._deferred._hurry.put(None)
    until(lambda: not background._deferred._running.locked())


def test_a_group_that_forms_does_not_wait_for_it(port: int, late: Callable[[], None], losses: Losses) -> None:
    with tcpstore_server() as server, TCPStore("127.0.0.1", server.port, timeout=LIMIT) as store:
        pool_of(store).forming = True
        for number in range(1, 4):
            assert store.add("forming", 1) == number
        assert background.running() is None
        assert not threads()
        with pool_of(store)._lock:  # as a call has it, or a signal handler within one
            late()
            until(background._deferred._hurry.empty)
        until(lambda: (loop := background.running()) is not None and pool_of(store) in loop.clients)
        assert not pool_of(store).forming
        server.stop(signal.SIGKILL)
        assert losses.noticed.wait(LIMIT)
        until(lambda: background.running() is None)


def test_a_store_closed_before_it_starts_is_not_watched(port: int, late: Callable[[], None]) -> None:
    with TCPStore("127.0.0.1", port, timeout=LIMIT) as store:
        pool_of(store).forming = True
        store.check(["k"])
    late()
    until(lambda: not background._deferred._running.locked())
    assert background.running() is None


AT_FORK = """
import os, sys

def tasks():
    return len(os.listdir("/proc/self/task"))

def polls():
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += "eventpoll" in os.readlink("/proc/self/fd/" + fd)
        except OSError:
            pass
    return found

at_fork = []
def note():
    at_fork.append((tasks(), polls()))
os.register_at_fork(after_in_parent=note, after_in_child=note)  # before the package, which then goes on

def check_that_nothing_of_ours_existed():
    assert at_fork == [(1, 0)], at_fork
    at_fork.clear()

from tcpstore_async import TCPStore
from tcpstore_async.client import background
"""
"""Tells how many threads and epoll sets a process has had at a fork."""

FORKS_WHILE_FORMING = f"""{AT_FORK}
background._DEFER_SECONDS = 60
with TCPStore("127.0.0.1", int(sys.argv[1]), timeout=60) as store:
    store._client.forming = True
    first = store.add("forming forks", 1)
    for number in range(20):
        assert background.running() is None and background._deferred._due
        child = os.fork()
        check_that_nothing_of_ours_existed()
        assert bool(background._deferred._due) == (child != 0)
        if child == 0:
            assert store.add("forming forks", 1) == first + 2 * number + 1 and background._deferred._due
            store.close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert store.add("forming forks", 1) == first + 2 * number + 2
    background._deferred._hurry.put(None)
    while background.running() is None or store._client not in background.running().clients:
        pass
assert background.running() is None and tasks() == 1
print("good")
"""


@pytest.mark.unmeasured
@pytest.mark.needs_proc
def test_no_thread_exists_at_a_fork_while_a_group_forms(port: int) -> None:
    assert run_python(FORKS_WHILE_FORMING, port) == "good\n"


# What it notices


# quirk: lost-while-idle
def test_a_loss_is_noticed_without_a_call(losses: Losses) -> None:
    with tcpstore_server() as server, TCPStore("127.0.0.1", server.port, timeout=LIMIT) as store:
        store.set("k", "v")
        assert store.get("k") == b"v"
        peer = pool_of(store)._connections[0].peer
        server.stop(signal.SIGKILL)
        assert losses.noticed.wait(LIMIT)
        until(lambda: peer.fileno() == -1)
        assert pool_of(store)._connections == []
        for _ in range(2):
            with pytest.raises(DistNetworkError, match=LOST) as caught:
                store.set("k", "v")  # the first write after a loss needed to fail before it was noticed
            assert caught.value.__suppress_context__
        until(lambda: background.running() is None)
    assert [record.levelno for record in losses.records] == [logging.DEBUG]


def test_a_reset_is_noticed_without_a_call(losses: Losses) -> None:
    reset = threading.Event()

    def talk(peer: socket.socket) -> None:
        greet(peer)
        answer_probe(peer)
        peer.recv(100)
        peer.sendall((1).to_bytes(8, "little"))
        reset.wait(LIMIT)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with fake_server(talk) as fake, TCPStore("127.0.0.1", fake.port, timeout=LIMIT) as store:
        assert store.add("n", 1) == 1
        reset.set()
        assert losses.noticed.wait(LIMIT)
        with pytest.raises(
            DistNetworkError, match=r"^Connection reset by peer \(last byte from the server .* s ago\)$"
        ):
            store.add("n", 1)


@pytest.mark.needs_proc
def test_further_connections_are_watched(losses: Losses) -> None:
    """Each one once: the epoll set has as many as the store."""
    with (
        tcpstore_server() as server,
        TCPStore("127.0.0.1", server.port, timeout=LIMIT) as store,
        ThreadPoolExecutor(3) as workers,
    ):
        waiting = [workers.submit(store.get, "late") for _ in range(3)]
        until(lambda: sum(connection.parked for connection in pool_of(store)._connections) == 3)
        store.set("late", "")
        for one in waiting:
            assert one.result(LIMIT) == b""
        store.add("n", 1)
        loop: Any = background.running()
        connections = pool_of(store)._connections
        assert len(connections) > 1
        with open(f"/proc/self/fdinfo/{loop._epoll.fileno()}") as info:
            watched = {int(line.split()[1]) for line in info if line.startswith("tfd:")}
        assert watched == {connection.peer.fileno() for connection in connections}
        server.stop(signal.SIGKILL)
        assert losses.noticed.wait(LIMIT)


def test_of_several_connections(losses: Losses) -> None:
    """One is idle, one is waited on: whoever notices first, both have the same to say."""
    with (
        tcpstore_server() as server,
        TCPStore("127.0.0.1", server.port, timeout=LIMIT) as store,
        ThreadPoolExecutor(1) as workers,
    ):
        waiting = workers.submit(store.get, "never")
        until(lambda: any(connection.parked for connection in pool_of(store)._connections))
        assert store.add("n", 1) == 1
        server.stop(signal.SIGKILL)
        with pytest.raises(DistNetworkError, match=LOST):
            waiting.result(LIMIT)
        until(lambda: background.running() is None)
        with pytest.raises(DistNetworkError, match=LOST):
            store.add("n", 1)
    assert len(losses.records) <= 1


def test_a_connection_in_use_is_its_callers(losses: Losses) -> None:
    """Until it is given back."""
    with tcpstore_server() as server, TCPStore("127.0.0.1", server.port, timeout=LIMIT) as store:
        assert store.add("n", 1) == 1
        loop: Any = background.running()
        (connection,) = pool_of(store)._connections
        connection.user = -1  # a thread's
        server.stop(signal.SIGKILL)
        until(connection.hung_up)
        until(lambda: loop._retrying)
        assert pool_of(store)._connections == [connection]
        connection.user = 0
        assert losses.noticed.wait(LIMIT)
        with pytest.raises(DistNetworkError, match=LOST):
            store.add("n", 1)


def test_it_waits_for_no_lock(losses: Losses) -> None:
    """A signal handler may stop it in the middle of a call that holds the store's lock."""
    with tcpstore_server() as server, TCPStore("127.0.0.1", server.port, timeout=LIMIT) as store:
        assert store.add("n", 1) == 1
        loop: Any = background.running()
        (connection,) = pool_of(store)._connections
        with pool_of(store)._lock:
            server.stop(signal.SIGKILL)
            until(connection.hung_up)
            until(lambda: loop._retrying)
            passed = threading.Event()
            loop.call_soon(passed.set)
            assert passed.wait(LIMIT)
            assert not losses.noticed.is_set()
        assert losses.noticed.wait(LIMIT)


def test_without_epoll_it_looks_now_and_then(losses: Losses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(select, "epoll")
    monkeypatch.setattr(background, "_SWEEP_SECONDS", 0.01)
    with tcpstore_server() as server, TCPStore("127.0.0.1", server.port, timeout=LIMIT) as store:
        store.set("k", "v")
        assert store.get("k") == b"v"
        server.stop(signal.SIGKILL)
        assert losses.noticed.wait(LIMIT)


@pytest.mark.needs_proc
def test_replies_do_not_wake_it(port: int) -> None:
    with TCPStore("127.0.0.1", port, timeout=LIMIT) as store:
        store.add("quiet", 1)
        loop: Any = background.running()
        (thread,) = threads()

        def switches() -> str:
            with open(f"/proc/self/task/{thread.native_id}/status") as status:
                return next(line for line in status if line.startswith("voluntary_ctxt_switches"))

        started = threading.Event()
        loop.call_soon(started.set)
        assert started.wait(LIMIT)
        before = ""
        while before != switches():
            before = switches()
            time.sleep(0.01)
        for _ in range(100):
            store.add("quiet", 1)
        assert switches() == before


def test_a_large_value_that_the_server_rejects(losses: Losses) -> None:
    """The error has the hint whoever notices the end."""

    def talk(peer: socket.socket) -> None:
        greet(peer)
        answer_probe(peer)
        while peer.recv(1 << 20):
            pass

    with fake_server(talk) as fake, TCPStore("127.0.0.1", fake.port, timeout=LIMIT) as store:
        [connection] = pool_of(store)._connections
        connection.peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # lest one send takes all of it
        store.set("k", bytes(64 << 20))
        _end(fake)
        assert losses.noticed.wait(LIMIT)
        with pytest.raises(DistNetworkError, match="exceeds its limit"):
            store.add("n", 1)


def _end(fake: Fake) -> None:
    for peer in fake._peers:
        peer.shutdown(socket.SHUT_RDWR)


# Signals, forks, the end


@pytest.mark.unmeasured
def test_signals_are_blocked_in_it(port: int) -> None:
    with TCPStore("127.0.0.1", port, timeout=LIMIT) as store:
        store.set("k", "v")
        masks: queue.SimpleQueue[set[Any]] = queue.SimpleQueue()
        loop: Any = background.running()
        loop.call_soon(lambda: masks.put(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
        wanted = {signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGCHLD}
        assert wanted <= masks.get(timeout=LIMIT)


FORKS = f"""{AT_FORK}
with TCPStore("127.0.0.1", int(sys.argv[1]), timeout=60) as store:
    assert store.add("forks", 1) == 1
    for number in range(20):
        before = background.running()
        assert before is not None
        child = os.fork()
        check_that_nothing_of_ours_existed()
        if child == 0:
            assert background.running() is None
            assert store.add("forks", 1) == 2 * number + 2
            assert background.running() is not None
            store.close()
            assert background.running() is None and tasks() == 1
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert store.add("forks", 1) == 2 * number + 3
        assert background.running() not in (None, before)
while tasks() > 1:
    pass
print("good")
"""


@pytest.mark.unmeasured
@pytest.mark.needs_proc
def test_no_thread_exists_at_a_fork(port: int) -> None:
    assert run_python(FORKS, port) == "good\n"


WATCHES_AGAIN = """
import os, sys
from tcpstore_async import TCPStore
from tcpstore_async.client import background
background._DEFER_SECONDS = 60
with TCPStore("127.0.0.1", int(sys.argv[1]), timeout=60) as store:
    store.set("k", "v")
    for _ in range(2):  # the second fork drops what the first has deferred
        child = os.fork()
        if child == 0:
            assert not background._deferred._due
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert background.running() is None
    background._deferred._hurry.put(None)
    while background.running() is None or store._client not in background.running().clients:
        pass
print("good")
"""


@pytest.mark.unmeasured
def test_an_idle_store_is_watched_again_after_a_fork(port: int) -> None:
    """It may make no call for longer than the server keeps its session."""
    assert run_python(WATCHES_AGAIN, port) == "good\n"


FORKS_BESIDE_CALLS = """
import os, sys, threading
from tcpstore_async import TCPStore
stop = threading.Event()
def work(store):
    while not stop.is_set():
        store.add("beside", 1)
        with TCPStore("127.0.0.1", int(sys.argv[1]), timeout=60) as other:
            other.set("k", "v")
with TCPStore("127.0.0.1", int(sys.argv[1]), timeout=60) as store:
    threads = [threading.Thread(target=work, args=(store,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        child = os.fork()
        if child == 0:
            store.add("children", 1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    stop.set()
    for thread in threads:
        thread.join()
    print(store.add("children", 0))
"""


@pytest.mark.unmeasured
def test_forks_while_others_start_and_stop_it(port: int) -> None:
    assert run_python(FORKS_BESIDE_CALLS, port) == "30\n"


LEFT_OPEN = """
import sys
from tcpstore_async import TCPStore
from tcpstore_async.client import background
background._DEFER_SECONDS = 60
store = TCPStore("127.0.0.1", int(sys.argv[1]), timeout=60)
store._client.forming = sys.argv[2] == "True"
store.set("k", "v")
sys.modules["kept"] = store
import warnings
warnings.simplefilter("ignore")
print("good")
"""


@pytest.mark.parametrize("forming", [False, True])
def test_an_interpreter_ends_with_a_store_open(port: int, forming: bool) -> None:
    assert run_python(LEFT_OPEN, port, forming) == "good\n"


IMPORTS = """
import sys
import tcpstore_async
assert not {"asyncio", "uvloop", "tcpstore_async.client.background"} & set(sys.modules)
with tcpstore_async.TCPStore("127.0.0.1", int(sys.argv[1]), timeout=60) as store:
    store.set("k", "v")
print("good")
"""


def test_what_importing_costs(port: int) -> None:
    """No loop is imported before there is a store."""
    assert run_python(IMPORTS, port) == "good\n"


@pytest.mark.unmeasured
def test_a_handler_that_forks(port: int) -> None:
    """And one that closes the last store: neither waits for the interrupted call."""
    store = TCPStore("127.0.0.1", port, timeout=LIMIT)
    store.set("k", "v")
    statuses: list[int] = []

    def handle(*_: object) -> None:
        child = os.fork()
        if child == 0:
            os._exit(0)
        statuses.append(os.waitpid(child, 0)[1])
        store.close()

    with alarms(handle, 0.05), pytest.raises(DistNetworkError, match="has been closed"):
        store.wait(["never"])
    assert statuses == [0]
